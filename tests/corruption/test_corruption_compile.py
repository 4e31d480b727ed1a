"""Compiled corruption routines return the bits of eager mode.

Inductor generates its own code for everything outside the ops.
"""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from dllm_kernels import corruption
from tests.support.routines import FIRSTS, OTHERS, ROUTINES


def every_function(ids, loss_mask, seeds, inputs):
    """Return all outputs of all functions, traced as one graph."""
    outputs = [case.launch(ids, loss_mask, **inputs[name], seeds=seeds) for name, case in ROUTINES.items()]
    return tree_leaves([outputs, [call(ids, loss_mask, seeds=seeds) for call in OTHERS.values()]])


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.exhaustive
def test_inductor_gives_the_eager_result_for_every_seed():
    """No draw is a constant of the graph. Blocks: none, longer than the row, a short or a full last one, positions."""
    ids, loss_mask = torch.arange(60).view(3, 20) * 16, torch.arange(60).view(3, 20) % 4 != 0
    inputs = {name: case.inputs(ids) for name, case in ROUTINES.items()}
    compiled = torch.compile(every_function, backend="inductor", fullgraph=True)
    for first in (0, 7, -3):
        seeds = torch.arange(first, first + 3)
        got = compiled(ids, loss_mask, seeds, inputs)
        for theirs, ours in zip(every_function(ids, loss_mask, seeds, inputs), got, strict=True):
            assert theirs.dtype == ours.dtype
            assert torch.equal(theirs, ours)
    assert not torch.equal(got[0], compiled(ids, loss_mask, seeds + 1, inputs)[0])


def of_float(name, case):
    return lambda ids, mask, seeds, x: case(ids, mask, seeds=seeds, **{name: x})


SHARES = {
    **{f"{case.routine}, {name}": of_float(name, case) for case in FIRSTS.values() for name in case.floats},
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
