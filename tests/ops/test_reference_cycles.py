"""No call leaves a reference cycle, which would keep logits in memory until Python collects garbage."""

import gc

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.conftest import usually
from tests.ops.test_changing_arguments import CALLS, Step
from tests.support.memory import without_garbage_collection


@pytest.fixture
def cycles():
    """Return a function that calls another one and returns what only the garbage collector can free afterwards."""

    def left_by(call):
        call()  # the first call imports and caches
        gc.collect()
        before = set(map(id, gc.get_objects()))  # freeing a compiled graph of an earlier test takes several collections
        gc.set_debug(gc.DEBUG_SAVEALL)
        call()
        gc.collect()
        return [x for x in gc.garbage if id(x) not in before]

    with without_garbage_collection():
        yield left_by
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("name", usually(["weighted_nll", "divergence", "row_objective of stored logits"], CALLS))
def test_a_step_leaves_no_cycle(name, cycles, monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "torch")  # the interpreter of the kernels makes cycles itself
    function, draw = CALLS[name]

    def step():
        results = tree_leaves(function(**draw(Step(3))))
        with_gradient = [t.square().sum() for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
        if with_gradient:
            torch.stack(with_gradient).sum().backward()

    assert cycles(step) == []


def test_a_cycle_is_found(cycles):
    def step():
        tensor = torch.zeros(3)
        tensor.itself = tensor

    assert [type(x) for x in cycles(step)] == [torch.Tensor, dict]
