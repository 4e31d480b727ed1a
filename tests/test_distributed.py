"""The losses in several processes on loopback, each check against the single-process run: see ``distributed_*.py``."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import distributed_workers
from tests.distributed_checks import CHECKS

ROOT = Path(__file__).parent.parent
DEADLINE = 300  # seconds for all checks of a world size; the group's own timeout is 30


def start(world, folder, how):
    """Start the processes, each with its output in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, "-W", "ignore", "-m", distributed_workers.__name__]
    for rank in range(world):
        with Path(folder, f"{rank}.log").open("w") as log:
            yield subprocess.Popen(
                [*command, str(rank), str(world), str(folder), how], cwd=ROOT, env=environment, stdout=log, stderr=log
            )  # fmt: skip


def finish(processes, deadline):
    """Wait for all, and end those that are late."""
    end = time.monotonic() + deadline
    for process in processes:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def outcome(tmp_path_factory):
    """(world) -> what became of every check on every rank; started once, also where several pytest workers ask."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent

    def of(world):
        folder = shared / f"distributed{world}"
        folder.mkdir(exist_ok=True)
        with Path(folder, "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not Path(folder, "done").exists():
                finish(list(start(world, folder, "checks")), DEADLINE)
                Path(folder, "done").touch()
        return [_read(folder, rank) for rank in range(world)], folder

    return of


def _read(folder, rank):
    path = Path(folder, f"{rank}.json")
    return json.loads(path.read_text()) if path.exists() else {}


def judge(outcome, world, name):
    results, folder = outcome(world)
    for rank, result in enumerate(results):
        if name not in result:
            log = Path(folder, f"{rank}.log").read_text()
            pytest.fail(f"rank {rank} did not come to this check; the end of its output:\n{log[-2000:]}")
        if result[name]:
            pytest.fail(f"rank {rank}:\n{result[name]}")


@pytest.mark.parametrize("name", CHECKS[2])
def test_in_two_processes(outcome, name):
    judge(outcome, 2, name)


@pytest.mark.parametrize("name", CHECKS[4])
def test_in_four_processes(outcome, name):
    judge(outcome, 4, name)


@pytest.mark.parametrize("how", ["killed", "missing"])
def test_a_lost_peer_ends_in_an_error_within_the_timeout(tmp_path, how):
    """The group's timeout is 5 s; the last rank leaves, or sleeps for a minute."""
    processes = list(start(2, tmp_path, how))
    try:
        processes[0].wait(60)
    finally:
        finish(processes, 0)
    seen = _read(tmp_path, 0)
    assert seen, Path(tmp_path, "0.log").read_text()[-2000:]
    assert seen["error"], "the loss came out although a rank was gone"
    assert seen["seconds"] < 20
