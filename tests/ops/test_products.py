"""Each op with a head: its matrix products, gradients of what trains alone, and a second backward."""

import pytest
import torch

from dllm_kernels import ops
from tests.conftest import DEVICE
from tests.support.inputs import Source
from tests.support.op_cases import OP_CASES, Rows, name_of
from tests.support.recorded import multiplications

N, D, V = 9, 5, 37
IDS = torch.arange(N, device=DEVICE)
R = Rows.of(IDS, IDS % 3 != 0, torch.linspace(0.1, 1, N, device=DEVICE))
COUNTED = [case for case in OP_CASES if case.products]
JUDGED = [case for case in OP_CASES if case.oracle]


@pytest.mark.everyday(12)
@pytest.mark.parametrize("trains", [(0, 0), (1, 0), (1, 1), (0, 1)], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("case", COUNTED, ids=name_of)
def test_products(case, trains, chunk_size, backend):
    leaves = [
        torch.randn(n, D, device=DEVICE).requires_grad_(bool(train)) for n, train in zip((N, V), trains, strict=True)
    ]

    def step():
        value = case.total(ops.LinearLogits(*leaves, chunk_size=chunk_size), R, backend=backend)
        if case.differentiable and value.requires_grad:
            value.backward()

    expected = dict(zip([(0, 0), (1, 0), (1, 1), (0, 1)], case.products, strict=True))[trains]
    assert multiplications(step) == expected * int(R.mask.sum()) * V * D
    with torch.no_grad():
        assert multiplications(step) == case.products[0] * int(R.mask.sum()) * V * D


TRAINS = [
    *((h, w, b, 0, 0) for h in (0, 1) for w in (0, 1) for b in (0, 1)),
    *((1, 0, 0, 1, 1), (1, 0, 0, 0, 1), (0, 0, 0, 1, 0), (0, 1, 0, 1, 0), (0, 0, 0, 0, 1), (1, 1, 1, 1, 1)),
]


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("trains", TRAINS, ids=str)
@pytest.mark.parametrize("case", JUDGED, ids=name_of)
def test_a_gradient_only_where_one_is_required(case, trains, backend):
    source = Source("low rank", chunk_size=4)

    def oracle(z):
        return sum(t.sum() for t in case.oracle(z, R))

    leaves = source.leaves((N,), V, torch.float64)
    grads = torch.autograd.grad(oracle(source.logits(*(leaf.requires_grad_() for leaf in leaves))), leaves)
    leaves = [leaf.detach().requires_grad_(bool(train)) for leaf, train in zip(leaves, trains, strict=True)]
    value = case.total(source.argument(*leaves), R, backend=backend)
    assert value.requires_grad == any(trains)
    torch.testing.assert_close(value.detach(), oracle(source.logits(*leaves)).detach())
    if any(trains):
        value.backward()
    for leaf, grad, train in zip(leaves, grads, trains, strict=True):
        assert (leaf.grad is not None) == bool(train)
        if train:
            torch.testing.assert_close(leaf.grad, grad)
