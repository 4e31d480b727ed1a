"""The processes of the distributed tests: ``python -m tests.distributed_workers WORLD FOLDER HOW [ONLY]``.

Starting processes is slow, so one start serves all checks of a world size: each rank runs them in order and writes, after
every check, what became of it. ``tests/test_distributed.py`` reads that and shows one test a check. Where the system can
fork, what the ranks import is imported once, before they are. ONLY names some checks, all that begin so; ``only.json`` in
the folder lists some.
"""

import contextlib
import datetime
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch._dynamo  # DTensor and FSDP2 load it on their first use, every rank for itself
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dllm_kernels import ops
from tests import (  # noqa: F401
    distributed_data,
    distributed_fsdp,
    distributed_pipeline,
    distributed_readme,
    distributed_tensor,
)
from tests.distributed_checks import CHECKS

with contextlib.suppress(ImportError):
    import dllm_kernels.kernels.linear_nll
    import dllm_kernels.kernels.token_nll  # noqa: F401
    from tests import interpreter

    interpreter.install()


def join(rank, world, folder, seconds):
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, init_method=f"file://{folder}/store", timeout=datetime.timedelta(seconds=seconds)
    )  # fmt: skip


def run_checks(rank, world, folder, only):
    """Run all that begin with ``only`` and that ``only.json`` lists, if it is there.

    A check that fails on one rank may leave others waiting, whose wait ends with the group's timeout.
    """
    join(rank, world, folder, 30)
    results, listed = {}, Path(folder, "only.json")
    asked = json.loads(listed.read_text()) if listed.exists() else CHECKS[world]
    for name, function in CHECKS[world].items():
        if name not in asked or not name.startswith(only):
            continue
        start = time.perf_counter()
        try:
            torch.manual_seed(0)
            function()
            results[name] = ""
        except (Exception, pytest.fail.Exception):
            results[name] = traceback.format_exc()
        print(f"{name}: {time.perf_counter() - start:.2f} s {'' if results[name] == '' else 'FAILED'}", flush=True)
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
        if results[name] and os.environ.get("STOP_AT_FIRST_FAILURE"):  # which the others see at their next collective
            os._exit(1)
    dist.destroy_process_group()


def lose_a_peer(rank, world, folder, how):
    """The last rank is killed before the loss, never comes to it, or wants no gradient; what the others see goes to a file."""
    join(rank, world, folder, 5)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    Path(folder, f"{rank}.joined").touch()
    last = rank == world - 1
    if last and how != "frozen":
        while not all(Path(folder, f"{other}.joined").exists() for other in range(world)):
            time.sleep(0.01)  # who leaves while others still connect to it ends their start, not their loss
        if how == "killed":
            os._exit(1)
        time.sleep(60)
    start = time.perf_counter()
    try:
        if how == "frozen":
            hidden_states_of_some_ranks_train(mesh, train=not last)
        else:
            logits = DTensor.from_local(torch.randn(2, 3, 4), mesh, [Shard(2)], run_check=False)
            ops.token_nll(logits, torch.zeros(2, 3, dtype=torch.long))
        error = ""
    except RuntimeError as e:  # which the errors of torch.distributed are
        error = f"{type(e).__name__}: {e}"
    if last:
        time.sleep(60)
    Path(folder, f"{rank}.json").write_text(json.dumps({"error": error, "seconds": time.perf_counter() - start}))
    os._exit(0)  # without the farewell to a peer that is gone


def hidden_states_of_some_ranks_train(mesh, train):
    head = DTensor.from_local(torch.randn(4, 5), mesh, [Shard(0)], run_check=False).requires_grad_()
    hidden = torch.randn(2, 3, 5, requires_grad=train)
    ops.linear_token_nll(hidden, head, torch.zeros(2, 3, dtype=torch.long)).nll.sum().backward()


def main(world, folder, how, only=""):
    target, more = (run_checks, (only,)) if how == "checks" else (lose_a_peer, (how,))
    processes = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    ranks = [processes.Process(target=target, args=(rank, world, folder, *more)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks if how == "checks" else ranks[:-1]:
        process.join()
    for process in ranks:
        process.kill()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
