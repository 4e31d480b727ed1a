"""Each op with a head: its matrix products, gradients of what trains alone, and a second backward."""

import pytest
import torch

import reference
from dllm_kernels import ops
from tests.conftest import DEVICE
from tests.support.inputs import Source
from tests.support.recorded import multiplications

N, D, V = 9, 5, 37
IDS, ON = torch.arange(N, device=DEVICE), torch.arange(N, device=DEVICE) % 3 != 0
WEIGHTS, TOP = ON.float(), IDS[:, None] + torch.arange(3, device=DEVICE)
LOG_Q = torch.full(TOP.shape, -2.0, device=DEVICE)
MIX = (WEIGHTS + 1, WEIGHTS + 2)


def focal(stats, *_):
    return -(1 - stats.log_probs.exp()).square() * stats.log_probs


def of_stats(stats):
    return sum(t.sum() for t in (stats.log_probs, stats.lse, stats.entropy, stats.mix))


# op -> a value, the value of the oracle, and the products if nothing, the rows, rows and head, or the head train
OPS = {
    "token_nll": (
        lambda x, **o: ops.token_nll(x, IDS, active=ON, **o).nll.sum(),
        lambda z: reference.token_nll(z, IDS, active=ON).sum(), (1, 2, 4, 3),
    ),
    "weighted_nll": (
        lambda x, **o: ops.weighted_nll(x, IDS, WEIGHTS, **o).loss,
        lambda z: reference.weighted_nll(z, IDS, WEIGHTS), (1, 2, 3, 2),
    ),
    "row_stats": (
        lambda x, **o: of_stats(ops.row_stats(x, IDS, entropy=True, mix=MIX, active=ON, **o)),
        lambda z: of_stats(reference.row_stats(z, IDS, MIX, ON)), (1, 3, 4, 3),
    ),
    "row_objective": (
        lambda x, **o: ops.row_objective(x, IDS, focal, active=ON, **o).loss,
        lambda z: reference.row_objective(z, IDS, focal, active=ON), (1, 2, 3, 2),
    ),
    **{
        f"topk_divergence, tail={tail}": (
            lambda x, tail=tail, **o: ops.topk_divergence(x, TOP, LOG_Q, WEIGHTS, tail=tail, **o).loss,
            lambda z, tail=tail: reference.topk_divergence(z, TOP, LOG_Q, WEIGHTS, tail=tail).loss, (1, 2, 3, 2),
        )
        for tail in (True, False)
    },
}  # fmt: skip


@pytest.mark.everyday(12)
@pytest.mark.parametrize("trains", [(0, 0), (1, 0), (1, 1), (0, 1)], ids=str)
@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("name", OPS)
def test_products(name, trains, chunk_size, backend):
    op, _, numbers = OPS[name]
    leaves = [
        torch.randn(n, D, device=DEVICE).requires_grad_(bool(train)) for n, train in zip((N, V), trains, strict=True)
    ]

    def step():
        value = op(ops.LinearLogits(*leaves, chunk_size=chunk_size), backend=backend)
        if value.requires_grad:
            value.backward()

    expected = dict(zip([(0, 0), (1, 0), (1, 1), (0, 1)], numbers, strict=True))[trains]
    assert multiplications(step) == expected * int(ON.sum()) * V * D
    with torch.no_grad():
        assert multiplications(step) == int(ON.sum()) * V * D


TRAINS = [
    *((h, w, b, 0, 0) for h in (0, 1) for w in (0, 1) for b in (0, 1)),
    *((1, 0, 0, 1, 1), (1, 0, 0, 0, 1), (0, 0, 0, 1, 0), (0, 1, 0, 1, 0), (0, 0, 0, 0, 1), (1, 1, 1, 1, 1)),
]


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("trains", TRAINS, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_a_gradient_only_where_one_is_required(name, trains, backend):
    (op, oracle, _), source = OPS[name], Source("low rank", chunk_size=4)
    leaves = source.leaves((N,), V, torch.float64)
    grads = torch.autograd.grad(oracle(source.logits(*(leaf.requires_grad_() for leaf in leaves))), leaves)
    leaves = [leaf.detach().requires_grad_(bool(train)) for leaf, train in zip(leaves, trains, strict=True)]
    value = op(source.argument(*leaves), backend=backend)
    assert value.requires_grad == any(trains)
    torch.testing.assert_close(value.detach(), oracle(source.logits(*leaves)).detach())
    if any(trains):
        value.backward()
    for leaf, grad, train in zip(leaves, grads, trains, strict=True):
        assert (leaf.grad is not None) == bool(train)
        if train:
            torch.testing.assert_close(leaf.grad, grad)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("weighted_nll", "recompute the loss to run backward again, or use linear_token_nll"),
        ("row_objective", r"linear_row_objective computes its gradients .* use linear_row_stats"),
        ("topk_divergence, tail=True", r"computes its gradients in the forward pass"),
    ],
)
def test_a_second_backward_of_a_sum_raises_with_advice(name, advice, backend):
    loss = OPS[name][0](
        ops.LinearLogits(*(torch.randn(n, D, device=DEVICE, requires_grad=True) for n in (N, V))), backend=backend
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=advice):
        loss.backward()
