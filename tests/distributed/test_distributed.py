"""The losses in several processes on loopback, each check against the single-process run: see ``distributed_*.py``."""

import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from dllm_kernels import ops
from dllm_kernels.distributed import LossHead, global_token_count, set_gradient_divide_factor
from tests.support import distributed_workers
from tests.support.distributed_checks import (
    BY_NAME,
    CHECKS,
    EVERY_CASE,
    EVERY_DAY,
    EVERY_TIME,
    LAYOUTS,
    TABLE,
)

ROOT = Path(__file__).parents[2]


def _read(folder, rank):
    path = Path(folder, f"{rank}.json")
    return json.loads(path.read_text()) if path.exists() else {}


def _log(folder, rank):
    """Return the output of the rank and, if the rank did not start, of the process that started it."""
    return "".join(path.read_text() for path in (folder.parent / "log", folder / f"{rank}.log") if path.exists())


def judge(folder, world, name):
    for rank in range(world):
        result = _read(folder, rank)
        if name not in result:
            pytest.fail(f"rank {rank} did not come to this check; the end of its output:\n{_log(folder, rank)[-2000:]}")
        if result[name]:
            pytest.fail(f"rank {rank}:\n{result[name]}")


def checks(world):
    def marks(name):
        yield pytest.mark.ranks(str(world), name)
        if name not in EVERY_DAY[world]:
            yield pytest.mark.exhaustive
        if (world, name) in EVERY_CASE:
            yield pytest.mark.every_case

    return [pytest.param(name, marks=[*marks(name)]) for name in CHECKS[world]]


@pytest.mark.parametrize("name", checks(2))
def test_in_two_processes(several_processes, name):
    judge(several_processes / "2", 2, name)


@pytest.mark.parametrize("name", checks(4))
def test_in_four_processes(several_processes, name):
    judge(several_processes / "4", 4, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", [pytest.param(h, marks=pytest.mark.ranks("lost", h)) for h in ("killed", "missing")])
def test_a_lost_peer_ends_in_an_error_within_the_timeout(several_processes, how):
    """The last rank exits, or sleeps for a minute; the error of rank 0 is checked. The timeout of the group is 5 s."""
    folder = several_processes / how
    seen = _read(folder, 0)
    assert seen, _log(folder, 0)[-2000:]
    assert seen["error"], "the loss came out although a rank was gone"
    assert seen["seconds"] < 20


def start_and_sleep(folder):
    """Stand in for pytest: start the parent of the ranks, then sleep until killed."""
    arguments = folder, {"lost": ["asleep"]}, os.getpid()
    multiprocessing.get_context("fork").Process(target=distributed_workers.main, args=arguments).start()
    time.sleep(60)


def alive(pid):
    """Return whether a process runs; an ended process that was not reaped does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def within(seconds, condition):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.everyday(1)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_when_their_parent_is_killed(tmp_path, sent):
    parent = multiprocessing.get_context("fork").Process(target=start_and_sleep, args=(tmp_path,))
    parent.start()
    joined = [tmp_path / "asleep" / f"{rank}.joined" for rank in range(2)]
    assert within(60, lambda: all(path.exists() and path.read_text() for path in joined))
    ranks = [int(path.read_text()) for path in joined]
    assert all(map(alive, ranks))
    os.kill(parent.pid, sent)
    parent.join()
    assert within(20, lambda: not any(map(alive, ranks)))


def test_every_loss_runs_in_several_parallel_layouts():
    """Checks of long lists of losses omit most of them, but no loss is omitted by most checks of its kind."""
    often = {loss for losses in EVERY_TIME.values() for loss in losses}
    assert {loss: LAYOUTS[loss] for loss in set(BY_NAME) - often if LAYOUTS[loss] < 3} == {}


def table_in_docs(page):
    """Return the rows of the table of parallelisms of a page: name -> its cells."""
    lines = Path(ROOT, "docs", page).read_text().splitlines()
    first = next(k for k, line in enumerate(lines) if line.startswith("| Parallelism |")) + 2
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    return {name: cells for name, *cells in ([cell.strip() for cell in row.strip("|").split("|")] for row in table)}


def test_every_claim_in_docs_has_checks():
    """Every row is in ``TABLE``. A "yes" has checks that exist and are tested above; a "no" has none."""
    registered = {name for checks in CHECKS.values() for name in checks}
    registered |= {name.split("[")[0] for name in registered}
    table = table_in_docs("many-gpus.md") | table_in_docs("model-parallel.md")
    assert table.keys() == TABLE.keys()
    for row, cells in table.items():
        for cell, checks in zip(cells, TABLE[row], strict=True):
            assert cell.startswith(("yes", "no")), (row, cell)
            assert cell.startswith("yes") == bool(checks), (row, cell)
            assert set(checks) <= registered, (row, set(checks) - registered)


@pytest.mark.exhaustive
def test_loss_head_in_one_graph():
    """Without FSDP2, a training step with it compiles to one graph; value and gradients equal eager mode."""
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


def test_bad_input_of_functions_for_heads():
    linear = torch.nn.Linear(2, 3)
    with pytest.raises(
        TypeError, match=r"^loss must be a function of hidden states, weight and bias, got torch\.Tensor$"
    ):
        LossHead.of(linear)(torch.ones(1, 2), torch.ones(1))
    with pytest.raises(TypeError, match=r"^head must be an nn\.Module or parameters, got int$"):
        set_gradient_divide_factor(3, 1.0)
