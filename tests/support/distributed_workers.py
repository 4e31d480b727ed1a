"""Processes of the tests that need several: ``python -m tests.support.distributed_workers FOLDER``, run by conftest.py.

Starting processes is slow, so one start serves all tests of a session. If the system can fork, the imports of the
ranks run once, before the ranks are forked. FOLDER's ``asked.json`` lists the requests by group: the checks of two and
of four ranks, the ways to lose a peer, and those of the frameworks. Each rank of a group of checks runs the checks in
order, and writes the outcome after each. ``tests/distributed/test_distributed.py`` reads the outcomes and has one test
per check.

If the process that started the workers is killed, the workers end, too.
"""

import contextlib
import datetime
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch._dynamo  # DTensor and FSDP2 load it on their first use, separately in every rank
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dllm_kernels import ops
from tests.conftest import seed_by  # conftest also installs the faster interpreter
from tests.support import (  # noqa: F401
    distributed_data,
    distributed_divergence,
    distributed_extra,
    distributed_fsdp,
    distributed_fused_head,
    distributed_generate,
    distributed_pairs,
    distributed_pipeline,
    distributed_readme,
    distributed_sample,
    distributed_soft_embedding,
    distributed_tensor,
)
from tests.support.distributed_checks import CHECKS
from tools import mutants

with contextlib.suppress(ImportError):
    import dllm_kernels.backends.triton.linear_nll
    import dllm_kernels.backends.triton.token_nll  # noqa: F401


def redirect(rank, folder):
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)


def join(rank, world, folder, seconds):
    redirect(rank, folder)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, init_method=f"file://{folder}/store",
        timeout=datetime.timedelta(seconds=seconds),
    )  # fmt: skip


def run_checks(rank, world, folder, requested):
    """Run the checks. If one fails on a rank, others may wait for it until the timeout of the group."""
    join(rank, world, folder, 30)
    results = {}
    for name, function in CHECKS[world].items():
        if name not in requested:
            continue
        start, cpu = time.perf_counter(), time.process_time()
        try:
            seed_by(name)
            with mutants.record_rank(f"{world}-{name}") if "RECORD_RANKS" in os.environ else contextlib.nullcontext():
                function()
            results[name] = ""
        except (Exception, pytest.fail.Exception):
            results[name] = traceback.format_exc()
        took = f"{time.perf_counter() - start:.2f} s, {time.process_time() - cpu:.2f} CPU s"
        print(f"{name}: {took}{'' if results[name] == '' else ' FAILED'}", flush=True)
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
        if results[name] and os.environ.get("STOP_AT_FIRST_FAILURE"):  # the others see this at their next collective
            os._exit(1)
    dist.destroy_process_group()


def lose_a_peer(rank, world, folder, how):
    """Lose a peer: the last rank exits before the loss, or sleeps instead of calling it, or all ranks sleep.

    Each other rank writes its error to a file.
    """
    join(rank, world, folder, 5)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    Path(folder, f"{rank}.joined").write_text(str(os.getpid()))
    if rank == world - 1 or how == "asleep":
        while not all(Path(folder, f"{other}.joined").exists() for other in range(world)):
            time.sleep(0.01)  # otherwise, the exit could break the start of the others instead of their loss
        if how == "killed":
            os._exit(1)
        time.sleep(60)
    logits = DTensor.from_local(torch.randn(2, 3, 4), mesh, [Shard(2)], run_check=False)
    start = time.perf_counter()
    try:
        ops.token_nll(logits, torch.zeros(2, 3, dtype=torch.long))
        error = ""
    except RuntimeError as e:  # includes the errors of torch.distributed
        error = f"{type(e).__name__}: {e}"
    Path(folder, f"{rank}.json").write_text(json.dumps({"error": error, "seconds": time.perf_counter() - start}))
    os._exit(0)  # no shutdown of the group, because a peer is missing


def train(rank, world, folder, kinds):
    """Train with a Hugging Face Trainer on two ranks; it uses the existing process group."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    join(rank, world, folder, 120)
    from tests.support import trainer_ranks

    trainer_ranks.main(f"{folder}/found.pt", [kind for kind in kinds if kind])


def adapt(rank, world, folder, cases):
    """Compute losses of a framework with LoRA on a sharded head."""
    join(rank, world, folder, 120)
    from tests.support import nemo_lora_ranks

    nemo_lora_ranks.main(f"{folder}/found.pt", [case for case in cases if case])


def follow_a_recipe(rank, world, folder, _):
    """Run training steps of a framework's recipe, in one process."""
    redirect(rank, folder)
    from tests.support import nemo_recipe

    nemo_recipe.main(Path(folder, "found.pt"))


def groups(folder, requested):
    """Yield lists of groups that run at once: (folder, function of a rank, number of ranks, its requests)."""
    if any("compiled" in name for names in requested.values() for name in names):
        import torch._inductor.compile_fx  # noqa: F401 (which the first compilation loads, in every rank)
    lost = [(how, lose_a_peer, 2, how) for how in requested.get("lost", ())]  # mostly waiting
    yield [*lost, ("2", run_checks, 2, requested["2"])] if "2" in requested else lost
    yield [("4", run_checks, 4, requested["4"])] if "4" in requested else []
    frameworks = {"trainer": (train, 2), "lora": (adapt, 2), "recipe": (follow_a_recipe, 1)}
    if frameworks.keys() & requested:
        with contextlib.suppress(ImportError):
            import tests.support.trainer_ranks  # noqa: F401 (transformers, which all of them import)
    os.environ.pop("DLLM_KERNELS_CHECK", None)
    yield [(name, *run, requested[name]) for name, run in frameworks.items() if name in requested]


def with_parent(parent, function, *arguments):
    """Make a process end when its parent ends; call it in the child."""

    def watch():
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    function(*arguments)


def main(folder, requested, parent):
    processes = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    for together in groups(folder, requested):
        started, awaited = [], []
        for name, function, world, requests in together:
            place = Path(folder, name)
            place.mkdir()
            arguments = [(os.getpid(), function, rank, world, str(place), requests) for rank in range(world)]
            ranks = [processes.Process(target=with_parent, args=a) for a in arguments]
            started += ranks
            awaited += ranks[:-1] if function is lose_a_peer else ranks
        for process in started:
            process.start()
        while os.getppid() == parent and any(process.is_alive() for process in awaited):
            time.sleep(0.05)
        for process in started:
            process.kill()


if __name__ == "__main__":
    requested = json.loads(Path(sys.argv[1], "asked.json").read_text())
    main(sys.argv[1], requested, int(os.environ["STARTED_BY"]))
