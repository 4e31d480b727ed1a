"""Rows without a gradient (ignored, inactive, of weight 0), and rows whose upstream gradient is 0.

The gradient of the former is 0 for any upstream gradient. A backward pass that recomputes logits skips both.
"""

import math

import pytest
import torch

from dllm_kernels import ops
from dllm_kernels.ops import LinearLogits
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
ONE_ZERO = torch.tensor([0.5, 0.0, 0.0, 0.0, 0.0, 2.0])
HARMFUL = torch.tensor([0.5, INF, NAN, -INF, 1.0, 2.0])
TOP = (torch.arange(N, device=DEVICE)[:, None] + torch.arange(3, device=DEVICE)).where(TARGETS[:, None] >= 0, -100)
TOP_LOG_PROBS = torch.full(TOP.shape, -2.0, device=DEVICE)


def teacher_of(x):
    """Return rows of a teacher: logits, or hidden states before the same head."""

    def waves(t):
        return torch.linspace(-9, 9, t.numel(), device=DEVICE).view(t.shape).sin().to(t.dtype)

    if isinstance(x, torch.Tensor):
        return waves(x)
    return LinearLogits(waves(x.hidden), x.weight.detach(), None if x.bias is None else x.bias.detach())


def of_stats(stats):
    return stats.log_probs + stats.lse + stats.entropy


def with_infinite_slope(stats):
    """Be infinite, with an infinite derivative, at the statistics of an inactive row, which are 0."""
    return (-stats.log_probs).log() + stats.entropy.sqrt()


# name -> values of rows, and their sum, as functions of logits, stored or a record
def token_nll(x, **options):
    return ops.token_nll(x, TARGETS, active=WEIGHTS != 0, **options).nll


def row_stats(x, **options):
    return of_stats(ops.row_stats(x, TARGETS, active=ON, entropy=True, **options))


def token_log_probs(x, **options):
    return ops.token_log_probs(x, TARGETS, active=WEIGHTS != 0, **options).log_probs


def divergence(x, *, kind="jsd", reduction="none", **options):
    return ops.divergence(x, teacher_of(x), WEIGHTS * ON, kind=kind, reduction=reduction, **options).loss


def with_stored_teacher(x, **options):
    stored = teacher_of(torch.empty(N, V, dtype=(x if isinstance(x, torch.Tensor) else x.hidden).dtype, device=DEVICE))
    return ops.divergence(x, stored, WEIGHTS * ON, **{"reduction": "none"} | options).loss


def cross_entropy(x, *, reduction="none", **options):
    options |= {"targets": TARGETS, "kind": "ce", "reduction": reduction}
    return ops.divergence(x, teacher_of(x), WEIGHTS, **options).loss


def topk_divergence(x, *, reduction="none", **options):
    return ops.topk_divergence(x, TOP, TOP_LOG_PROBS, WEIGHTS, reduction=reduction, **options).loss


def weighted_nll(x, **options):
    return ops.weighted_nll(x, TARGETS, WEIGHTS, **options).loss


def row_objective(x, **options):
    return ops.row_objective(x, TARGETS, with_infinite_slope, active=ON, entropy=True, **options).loss


COMPARING = [divergence, with_stored_teacher, cross_entropy, topk_divergence]
OF_ROWS, SUMS = [token_nll, row_stats, token_log_probs, *COMPARING], [weighted_nll, row_objective, *COMPARING]
# Logits, and hidden states with a head of which nothing, everything, U, or weight and bias alone is trained.
TRAINED = {"logits": "1", "frozen": "10010", "trained": "11111", "U": "10011", "head": "01100"}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def gradients(function, trained, dtype, upstream, filling=None, **options):
    """Return the gradients of the trained leaves; rows that are not read hold NaN, and ``filling`` is in another."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((N, V),) if trained == "1" else ((N, D), (V, D), (V,), (N, 2), (V, 2))
    leaves = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    for t in leaves:
        if len(t) == N:
            t[WITHOUT[1:] if function is cross_entropy else WITHOUT] = NAN
            if filling is not None:
                t[OTHERS[1], 0] = filling
    for t, train in zip(leaves, trained, strict=True):
        t.requires_grad_(train == "1")
    x = leaves[0] if trained == "1" else LinearLogits(*leaves[:3], tuple(leaves[3:]), chunk_size=2)
    value = function(x, **options)
    assert filling is not None or value.isfinite().all()
    value.backward(upstream.to(DEVICE, torch.promote_types(dtype, torch.float32)))
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
@pytest.mark.parametrize("upstream", [INF, NAN, 0.0])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("function", SUMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_upstream_gradient_of_a_sum_stays_out_of_rows_without_a_gradient(
    function, trained, dtype, upstream, backend
):
    options = {"backend": backend} | ({} if function in (weighted_nll, row_objective) else {"reduction": "sum"})
    for grad in gradients(function, TRAINED[trained], dtype, torch.tensor(upstream), **options):
        if upstream == 0:
            assert grad.eq(0).all()
        elif len(grad) == N:
            assert grad[WITHOUT].eq(0).all()
            assert not grad[OTHERS].isfinite().any()


KINDS = [(function, {}) for function in OF_ROWS] + [
    (topk_divergence, {"kind": kind, "tail": tail}) for kind in ("kl", "rkl", "jsd") for tail in (True, False)
]


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("filling", [NAN, INF, -INF])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize(("function", "options"), KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_upstream_gradient_of_zero_leaves_out_a_row_without_finite_values(
    function, options, trained, filling, dtype, backend
):
    """Not every NaN is in a row of weight 0: a trainer may multiply the values of rows by a mask of its own."""
    grads = []
    for value in (filling, 1.0):
        grads.append(gradients(function, TRAINED[trained], dtype, ONE_ZERO, filling=value, backend=backend, **options))
    for a, b in zip(*grads, strict=True):
        assert b.isfinite().all()
        assert torch.equal(a, b)


# Kinds without a gradient in a row: a < floor, no column for the teacher's argmax, no target
CONSTANT = {
    "nla": {"kind": {"nla": 2.0}, "floor": 1.0},
    "teacher_ce": {"kind": "teacher_ce", "teacher": "full"},
    "both": {"kind": {"nla": 1.0, "teacher_ce": 0.5}, "floor": 1.0, "teacher": "full"},
    "nla and ce": {"kind": {"nla": 1.0, "ce": 2.0}, "floor": 1.0, "targets": torch.tensor([-100, 3], device=DEVICE)},
}


@pytest.mark.everyday(10)
@pytest.mark.parametrize("trained", ["logits", "frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", CONSTANT)
def test_rows_in_which_every_kind_is_constant(kind, dtype, trained, backend):
    """Their gradient is 0 for any upstream gradient; that of the other row and of the head is finite."""
    options = dict(CONSTANT[kind])
    x, teacher = torch.randn(2, D), torch.randn(2, D)
    x[1], teacher[1] = (teacher[1], teacher[1]) if "nla" in kind else (x[1], teacher[1])
    if options.get("teacher") == "full":
        options["draft_to_target"] = torch.arange(1, D, device=DEVICE)
        teacher[0, 0], teacher[1, 0] = 9, -9  # column 0 is not the draft's
    W = torch.eye(D)[1:] if "draft_to_target" in options else torch.eye(D)
    x, teacher, W = (t.to(DEVICE, dtype) for t in (x, teacher, W))
    leaves = [x[:, -len(W) :].contiguous() if trained == "logits" else x]
    function = ops.divergence
    if trained != "logits":
        function, leaves = ops.linear_divergence, [x, W]
        options["teacher_weight"] = torch.eye(D, device=DEVICE, dtype=dtype)
    leaves = [t.requires_grad_(i == 0 or trained == "trained") for i, t in enumerate(leaves)]
    grads = []
    for harmful in (0.0, INF, NAN):
        loss = function(*leaves, teacher, reduction="none", backend=backend, **options).loss
        upstream = torch.tensor([harmful, 2.0], device=DEVICE, dtype=loss.dtype)
        grads.append(torch.autograd.grad(loss, [t for t in leaves if t.requires_grad], upstream))
    for of_zero, *others in zip(*grads, strict=True):
        assert of_zero.isfinite().all()
        assert all(torch.equal(of_zero, other) for other in others)
    assert grads[0][0][0].eq(0).all()
    if kind in ("teacher_ce", "nla and ce"):
        assert grads[0][0][1].ne(0).any()


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
    num_active = len(OTHERS) if bounded else None

    def step():
        leaves = h.clone().requires_grad_(), w.clone().requires_grad_(trained == "trained")
        x = LinearLogits(*leaves, num_active=num_active)
        function(x, backend=backend).backward(upstream.to(DEVICE))
        assert leaves[0].grad[upstream == 0].eq(0).all()

    recomputed = len(OTHERS) if bounded else number
    assert multiplications(step) == (len(OTHERS) * forward + recomputed * backward) * V * D
