"""The losses in several processes on loopback, each check against the single-process run: see ``distributed_*.py``."""

import itertools
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from dllm_kernels import ops
from dllm_kernels.distributed import LossHead, global_token_count
from tests import distributed_workers
from tests.distributed_checks import CHECKS, EXHAUSTIVE, TABLE

ROOT = Path(__file__).parent.parent
DEADLINE = 900  # seconds for all checks of a world size, beside other tests; the group's own timeout is 30


def start(world, folder, how):
    """Start the process that starts the ranks; the output of each goes to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"TRITON_INTERPRET": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, "-W", "ignore", "-m", distributed_workers.__name__, str(world), str(folder), how]
    with Path(folder, "log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)


def finish(process, deadline):
    """Wait, and end it and its ranks when they are late."""
    try:
        process.wait(deadline)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def outcome(once, request):
    """(world) -> what became of each selected check on each rank."""

    def run(world, folder):
        folder.mkdir()
        Path(folder, "only.json").write_text(json.dumps(selected(request.session.items, world)))
        finish(start(world, folder, "checks"), DEADLINE)

    def of(world):
        folder = once(f"distributed{world}", partial(run, world))
        return [_read(folder, rank) for rank in range(world)], folder

    return of


def selected(items, world):
    """The checks of a world size that are tests of this session."""
    functions = {2: test_in_two_processes, 4: test_in_four_processes}
    return [item.callspec.params["name"] for item in items if getattr(item, "function", None) is functions[world]]


def _read(folder, rank):
    path = Path(folder, f"{rank}.json")
    return json.loads(path.read_text()) if path.exists() else {}


def _log(folder, rank):
    """The output of the rank, and of what started it where that did not come so far."""
    return "".join(path.read_text() for path in (Path(folder, "log"), Path(folder, f"{rank}.log")) if path.exists())


def judge(outcome, world, name):
    results, folder = outcome(world)
    for rank, result in enumerate(results):
        if name not in result:
            log = _log(folder, rank)
            pytest.fail(f"rank {rank} did not come to this check; the end of its output:\n{log[-2000:]}")
        if result[name]:
            pytest.fail(f"rank {rank}:\n{result[name]}")


def checks(world):
    exhaustive = pytest.mark.exhaustive
    return [pytest.param(n, marks=exhaustive) if (world, n) in EXHAUSTIVE else n for n in CHECKS[world]]


@pytest.mark.parametrize("name", checks(2))
def test_in_two_processes(outcome, name):
    judge(outcome, 2, name)


@pytest.mark.parametrize("name", checks(4))
def test_in_four_processes(outcome, name):
    judge(outcome, 4, name)


# The last rank leaves, never comes, or asks for no gradient where the others do, as README says of ranks that differ.
LOST = ("killed", "missing", "frozen")


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    """What rank 0 saw of each way to lose the last rank; all at once, most of it is waiting."""
    folders = {how: tmp_path_factory.mktemp(how) for how in LOST}
    for process in [start(2, folder, how) for how, folder in folders.items()]:
        finish(process, 60)
    return {how: (_read(folder, 0), _log(folder, 0)) for how, folder in folders.items()}


@pytest.mark.parametrize("how", LOST)
def test_a_lost_peer_ends_in_an_error_within_the_timeout(lost, how):
    """The group's timeout is 5 s; a last rank that has not left sleeps for a minute."""
    seen, log = lost[how]
    assert seen, log[-2000:]
    assert seen["error"], "the loss came out although a rank was gone"
    assert seen["seconds"] < 20


def readme_table():
    """Rows of README's table of parallelisms: name -> what its cells say."""
    lines = Path(ROOT, "README.md").read_text().splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("| Parallelism |")) + 2
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    return {name: cells for name, *cells in ([cell.strip() for cell in row.strip("|").split("|")] for row in table)}


def test_readme_claims_what_is_tested():
    """Every row is in ``TABLE``; a "yes" has checks behind it, which exist and are tests above; a "no" has none."""
    registered = {name for checks in CHECKS.values() for name in checks}
    registered |= {name.split("[")[0] for name in registered}
    table = readme_table()
    assert list(table) == list(TABLE)
    for row, cells in table.items():
        for cell, checks in zip(cells, TABLE[row], strict=True):
            assert cell.startswith(("yes", "no")), (row, cell)
            assert cell.startswith("yes") == bool(checks), (row, cell)
            assert set(checks) <= registered, (row, set(checks) - registered)


def test_loss_head_in_one_graph():
    """Without FSDP2 a step with it compiles whole; the value and the gradients are those of the eager step."""
    torch.manual_seed(0)
    head, y = LossHead.of(torch.nn.Linear(8, 19)), torch.randint(0, 19, (2, 6))
    hidden = torch.randn(2, 6, 8)

    def step(hidden):
        loss = head(hidden.tanh(), lambda h, w, b: ops.weighted_linear_nll(h, w, y, torch.ones(2, 6), bias=b)).loss
        return loss + head(hidden).sum()

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaves = hidden.clone().requires_grad_(), *head.parameters()
        value = function(leaves[0])
        results.append((value.detach(), *torch.autograd.grad(value, leaves)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_counts_without_a_process_group():
    mask = torch.tensor([[0.5, 0.0, 2.0]])
    assert global_token_count(mask) == 2
