"""One process of the distributed tests: ``python -m tests.distributed_workers RANK WORLD FOLDER``.

Starting processes is slow, so one start serves all checks of a world size: each process runs them in order and writes,
after every check, what became of it. ``tests/test_distributed.py`` reads that and shows one test a check.
"""

import datetime
import json
import os
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import distributed_data, distributed_fsdp, distributed_pipeline, distributed_tensor  # noqa: F401
from tests.distributed_checks import CHECKS


def join(rank, world, folder, seconds):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, init_method=f"file://{folder}/store", timeout=datetime.timedelta(seconds=seconds)
    )  # fmt: skip


def run_checks(rank, world, folder):
    """Run all; a check that fails on one rank may leave others waiting, whose wait ends with the group's timeout."""
    join(rank, world, folder, 30)
    results = {}
    for name, function in CHECKS[world].items():
        start = time.perf_counter()
        try:
            torch.manual_seed(0)
            function()
            results[name] = ""
        except (Exception, pytest.fail.Exception):
            results[name] = traceback.format_exc()
        print(f"{name}: {time.perf_counter() - start:.2f} s {'' if results[name] == '' else 'FAILED'}", flush=True)
        Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def lose_a_peer(rank, world, folder, how):
    """The last rank leaves before the loss, or never comes to it; what the others see goes to a file."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from dllm_kernels import ops

    join(rank, world, folder, 5)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    if rank == world - 1:
        if how == "killed":
            os._exit(1)
        time.sleep(60)
    logits = DTensor.from_local(torch.randn(2, 3, 4), mesh, [Shard(2)], run_check=False)
    start = time.perf_counter()
    try:
        ops.token_nll(logits, torch.zeros(2, 3, dtype=torch.long))
        error = ""
    except RuntimeError as e:  # which the errors of torch.distributed are
        error = f"{type(e).__name__}: {e}"
    Path(folder, f"{rank}.json").write_text(json.dumps({"error": error, "seconds": time.perf_counter() - start}))
    os._exit(0)  # without the farewell to a peer that is gone


if __name__ == "__main__":
    rank, world, folder, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    if how == "checks":
        run_checks(rank, world, folder)
    else:
        lose_a_peer(rank, world, folder, how)
