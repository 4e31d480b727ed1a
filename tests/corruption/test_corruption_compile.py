"""Compiled corruption routines return the bits of eager mode.

Inductor generates its own code for everything outside the ops.
"""

import pytest
import torch
from torch._dynamo.utils import counters

from dllm_kernels import corruption

V, MASK = 1_000, 999


def of_blocks(ids, loss_mask, seeds, block_size):
    return (
        *corruption.corrupt_uniform(ids, loss_mask, MASK, block_size=block_size, seeds=seeds),
        *corruption.corrupt_blockwise(ids, loss_mask, MASK, block_size, seeds=seeds),
        *corruption.corrupt_uniform_random(ids, loss_mask, V, block_size, seeds=seeds),
    )


def every_routine(ids, loss_mask, seeds, *block_sizes):
    """Return all outputs of all routines, traced as one graph."""
    log_w = torch.linspace(-2, 2, ids.shape[1], device=ids.device).expand(ids.shape)
    k = torch.arange(len(ids), device=ids.device)
    p = torch.linspace(0, 0.5, len(ids), device=ids.device)
    return [
        *corruption.corrupt_uniform(ids, loss_mask, MASK, seeds=seeds),
        *(t for size in block_sizes for t in of_blocks(ids, loss_mask, seeds, size)),
        *corruption.corrupt_all_masked(ids, loss_mask, MASK),
        corruption.batched_gumbel_topk(log_w, k, seeds=seeds),
        *corruption.corrupt_uniform(ids, loss_mask, MASK, level=p, exact=True, seeds=seeds),
        *corruption.corrupt_mix(ids, loss_mask, MASK, V, mask_prob=p, uniform_prob=p, seeds=seeds),
        corruption.complementary(loss_mask, ids > 500),
        corruption.sample_level(3, method="stratified", seeds=torch.arange(3, device=ids.device)),
    ]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.exhaustive
def test_inductor_gives_the_eager_result_for_every_seed():
    """No draw is a constant of the graph. Blocks: none, longer than the row, a short or a full last one, positions."""
    ids, loss_mask = torch.arange(60).view(3, 20) * 16, torch.arange(60).view(3, 20) % 4 != 0
    sizes = None, 40, 6, 5, 1
    compiled = torch.compile(every_routine, backend="inductor", fullgraph=True)
    for first in (0, 7, -3):
        seeds = torch.arange(first, first + 3)
        got = compiled(ids, loss_mask, seeds, *sizes)
        for theirs, ours in zip(every_routine(ids, loss_mask, seeds, *sizes), got, strict=True):
            assert theirs.dtype == ours.dtype
            assert torch.equal(theirs, ours)
    assert not torch.equal(got[0], compiled(ids, loss_mask, seeds + 1, *sizes)[0])


SHARES = {
    "uniform": lambda ids, mask, seeds, x: corruption.corrupt_uniform(ids, mask, MASK, x, seeds=seeds),
    "random": lambda ids, mask, seeds, x: corruption.corrupt_uniform_random(ids, mask, V, 4, x, seeds=seeds),
    "blockwise": lambda ids, mask, seeds, x: corruption.corrupt_blockwise(ids, mask, MASK, 4, x, seeds=seeds),
    "half life": lambda ids, mask, seeds, x: corruption.corrupt_blockwise(
        ids, mask, MASK, 4, half_life_ratio=x, seeds=seeds
    ),
    "levels": lambda ids, mask, seeds, x: [corruption.sample_level(2, low=x / 2, high=1 - x / 4, seeds=seeds)],
    "levels from": lambda ids, mask, seeds, x: [corruption.sample_level(2, low=x, seeds=seeds)],
    "levels to": lambda ids, mask, seeds, x: [corruption.sample_level(2, low=0.01, high=x, seeds=seeds)],
}


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", SHARES)
def test_a_number_that_changes_from_step_to_step(name):
    """One graph serves the first value, and a second one serves all others."""
    if name == "levels" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("torch 2.11 makes a graph of each value of x / 2 by itself")
    ids, loss_mask, seeds = torch.arange(60).view(2, 30), torch.ones(2, 30, dtype=torch.bool), torch.tensor([5, 6])
    compiled = torch.compile(SHARES[name], backend="aot_eager", fullgraph=True)
    counters.clear()
    for k in range(4):
        expected, got = (routine(ids, loss_mask, seeds, 0.01 + k / 10) for routine in (SHARES[name], compiled))
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert counters["stats"]["unique_graphs"] == 2
