"""Rows without a gradient (ignored, inactive, of weight 0), and rows whose upstream gradient is 0.

The gradient of the former is 0 for any upstream gradient. A backward pass that recomputes logits skips both.
"""

import math

import pytest
import torch

from dllm_kernels import ops
from tests.conftest import DEVICE
from tests.support.recorded import multiplications

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NAN, INF = math.nan, math.inf
N, D, V = 6, 5, 37
TARGETS = torch.tensor([1, -100, 3, 4, 5, 6], device=DEVICE)
WEIGHTS = torch.tensor([1.5, 1.0, 0.0, 0.0, 1.0, -2.0], device=DEVICE)
WITHOUT, OTHERS = [1, 2, 3], [0, 4, 5]
ON = (WEIGHTS != 0) & (TARGETS != -100)
HARMLESS = torch.tensor([0.5, 0.0, 0.0, 0.0, 1.0, 2.0])
HARMFUL = torch.tensor([0.5, INF, NAN, -INF, 1.0, 2.0])
TOP = (torch.arange(N, device=DEVICE)[:, None] + torch.arange(3, device=DEVICE)).where(TARGETS[:, None] >= 0, -100)
TOP_LOG_PROBS = torch.full(TOP.shape, -2.0, device=DEVICE)


def teacher_of(x):
    return torch.linspace(-9, 9, x.numel(), device=DEVICE).view(x.shape).sin().to(x.dtype)


def of_stats(stats):
    return stats.log_probs + stats.lse + stats.entropy


def with_infinite_slope(stats):
    """Have an infinite derivative at the statistics of an inactive row, which are 0."""
    return (-stats.log_probs).sqrt() + stats.entropy.sqrt()


# name -> values of rows, and their sum, as functions of the rows (logits or hidden states), and of the head
def token_nll(x, *head, **options):
    return (ops.linear_token_nll if head else ops.token_nll)(x, *head, TARGETS, active=WEIGHTS != 0, **options).nll


def row_stats(x, *head, **options):
    function = ops.linear_row_stats if head else ops.row_stats
    return of_stats(function(x, *head, TARGETS, active=ON, entropy=True, **options))


def token_log_probs(x, *head, **options):
    options |= dict(zip(["weight"], head, strict=False))
    return ops.token_log_probs(x, TARGETS, active=WEIGHTS != 0, **options).log_probs


def divergence(x, *head, kind="jsd", reduction="none", **options):
    function, weights = (ops.linear_divergence if head else ops.divergence), WEIGHTS * ON
    return function(x, *head, teacher_of(x), weights, kind=kind, reduction=reduction, **options).loss


def cross_entropy(x, *head, reduction="none", **options):
    function = ops.linear_divergence if head else ops.divergence
    options |= {"targets": TARGETS, "kind": "ce", "reduction": reduction}
    return function(x, *head, teacher_of(x), WEIGHTS, **options).loss


def topk_divergence(x, *head, reduction="none", **options):
    function = ops.linear_topk_divergence if head else ops.topk_divergence
    return function(x, *head, TOP, TOP_LOG_PROBS, WEIGHTS, reduction=reduction, **options).loss


def weighted_nll(x, *head, **options):
    return (ops.weighted_linear_nll if head else ops.weighted_nll)(x, *head, TARGETS, WEIGHTS, **options).loss


def row_objective(x, *head, **options):
    function = ops.linear_row_objective if head else ops.row_objective
    return function(x, *head, TARGETS, with_infinite_slope, active=ON, entropy=True, **options).loss


OF_ROWS = [token_nll, row_stats, token_log_probs, divergence, cross_entropy, topk_divergence]
SUMS = [weighted_nll, row_objective, divergence, cross_entropy, topk_divergence]
# Logits, and hidden states with a head of which nothing, everything, U, or weight and bias alone is trained.
TRAINED = {"logits": "1", "frozen": "10010", "trained": "11111", "U": "10011", "head": "01100"}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def gradients(function, trained, dtype, upstream, **options):
    """Return the gradients of the trained leaves; rows that are not read hold NaN."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((N, V),) if trained == "1" else ((N, D), (V, D), (V,), (N, 2), (V, 2))
    leaves = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    for t in leaves:
        if len(t) == N:
            t[WITHOUT[1:] if function is cross_entropy else WITHOUT] = NAN
    for t, train in zip(leaves, trained, strict=True):
        t.requires_grad_(train == "1")
    x, *head = leaves
    if head:
        options |= {"bias": head[1], "extra": tuple(head[2:]), "chunk_size": 2}
    function(x, *head[:1], **options).backward(upstream.to(DEVICE, torch.promote_types(dtype, torch.float32)))
    return [t.grad for t in leaves if t.requires_grad]


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("function", OF_ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_upstream_gradient_stays_out_of_rows_without_a_gradient(function, trained, dtype, backend):
    harmful, harmless = (
        gradients(function, TRAINED[trained], dtype, upstream, backend=backend) for upstream in (HARMFUL, HARMLESS)
    )
    for a, b in zip(harmful, harmless, strict=True):
        assert b.isfinite().all()
        assert torch.equal(a, b)


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("upstream", [INF, NAN])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("function", SUMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_upstream_gradient_of_a_sum_stays_out_of_rows_without_a_gradient(
    function, trained, dtype, upstream, backend
):
    options = {"backend": backend} | ({} if function in (weighted_nll, row_objective) else {"reduction": "sum"})
    for grad in gradients(function, TRAINED[trained], dtype, torch.tensor(upstream), **options):
        if len(grad) == N:
            assert grad[WITHOUT].eq(0).all()
            assert not grad[OTHERS].isfinite().any()


# Products of the active rows in forward, and of the rows with an upstream gradient in backward.
PRODUCTS = [
    (token_nll, "frozen", 2, 0), (token_nll, "trained", 1, 3), (token_log_probs, "trained", 1, 3),
    (row_stats, "frozen", 1, 2), (row_stats, "trained", 1, 3), (divergence, "frozen", 3, 0),
    (divergence, "trained", 2, 4), (topk_divergence, "frozen", 1, 2), (topk_divergence, "trained", 1, 3),
]  # fmt: skip


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize(("function", "trained", "forward", "backward"), PRODUCTS)
def test_backward_recomputes_only_the_rows_with_an_upstream_gradient(
    function, trained, forward, backward, number, bounded, backend
):
    """With a bound, which needs no host sync, it recomputes as many rows as the bound is."""
    h, w = torch.randn(N, D, device=DEVICE), torch.randn(V, D, device=DEVICE)
    upstream = HARMFUL.clone()
    upstream[OTHERS[number:]] = 0
    options = {"backend": backend, "num_active": len(OTHERS) if bounded else None}

    def step():
        leaves = h.clone().requires_grad_(), w.clone().requires_grad_(trained == "trained")
        function(*leaves, **options).backward(upstream.to(DEVICE))
        assert leaves[0].grad[upstream == 0].eq(0).all()

    recomputed = len(OTHERS) if bounded else number
    assert multiplications(step) == (len(OTHERS) * forward + recomputed * backward) * V * D
