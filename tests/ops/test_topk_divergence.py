"""Divergences to a teacher known at K ids per row: compared with float64, products counted, small masses, bad input."""

import math

import pytest
import torch

import reference
from dllm_kernels.ops import divergence, topk_divergence
from tests.conftest import DEVICE
from tests.support.inputs import KINDS as KINDS_OF_INPUT
from tests.support.inputs import Source, exact
from tests.support.parity import assert_parity, poison_empty

V, D = 67, 6
INF, NAN = math.inf, math.nan
KINDS = {
    "kl": {"kind": "kl"},
    "rkl": {"kind": "rkl"},
    "jsd": {"kind": "jsd", "beta": 0.1},
    "jsd of 0": {"kind": "jsd", "beta": 0.0},
    "jsd of 1": {"kind": "jsd", "beta": 1.0},
}
TRANSFORMS = {"": {}, "transformed": {"softcap": 4.0, "scale": 0.7, "skip_id": 3, "temperature": 1.6}}
every_kind = pytest.mark.parametrize("kind", KINDS)
three_kinds = pytest.mark.parametrize("kind", ["kl", "rkl", "jsd"])
tails = pytest.mark.parametrize("tail", [True, False], ids=["tail", "renormalised"])
forms = pytest.mark.parametrize("form", KINDS_OF_INPUT)


def teacher(K, *rows, mass=0.9, V=V, missing=True):
    """Draw distinct ids, their log-probabilities, which sum to ``mass``, and weights of which some are 0."""
    torch.manual_seed(K)
    ids = torch.rand(*rows, V, device=DEVICE).masked_fill_(torch.arange(V, device=DEVICE) == 3, -1).topk(K).indices
    if missing and K > 1:
        ids.view(-1, K)[1, K // 2 :] = -100
    log_q = torch.log_softmax(torch.randn(*rows, K, device=DEVICE), -1) + math.log(mass)
    weights = torch.rand(rows, device=DEVICE).masked_fill_(torch.rand(rows, device=DEVICE) < 0.3, 0)
    weights.view(-1)[:2] = 0.5
    return ids, log_q, weights


def confident(ids):
    """Draw logits whose mass, all but 1e-9 of it, is at these ids."""
    torch.manual_seed(100)
    top = torch.zeros(*ids.shape[:-1], V, device=DEVICE).scatter_(-1, ids.clamp(min=0), 1.0)
    return (2 * torch.randn(top.shape, device=DEVICE)).clamp(-2, 2) / 4 + 24 * top


@pytest.mark.everyday(2)
@three_kinds
@tails
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("K", [1, 8, 20])
@pytest.mark.parametrize("sizes", [{"chunk_size": 3}, {}, {"chunk_size": 4, "num_active": 10}], ids=str)
@pytest.mark.parametrize("input_kind", KINDS_OF_INPUT)
def test_parity(input_kind, kind, tail, dtype, transform, reduction, K, sizes, backend):
    ids, log_q, weights = teacher(K, 2, 5)
    source = Source(input_kind, backend, **sizes)
    options = {"tail": tail, "reduction": reduction, **KINDS[kind], **TRANSFORMS[transform]}

    def ours(*x):
        return topk_divergence(source.argument(*x), ids, log_q, weights, backend=backend, **options).loss

    def oracle(*x):
        return reference.topk_divergence(source.logits(*x), ids, log_q, weights, **options).loss

    def draw(seed):
        leaves = source.leaves((2, 5), V, dtype, D=D, seed=seed + 100, size=2.0)
        return leaves, torch.randn((2, 5) if reduction == "none" else (), device=DEVICE)

    # Rounding the teacher's mass, 0.9, changes the log of the rest, 0.1, by nine times as much.
    assert_parity(ours, oracle, draw, {V, K, 9**2} if tail else {V, K})


@every_kind
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("K", [1, 8, 64])
@pytest.mark.parametrize("mass", [0.5, 1 - 1e-6])
def test_a_student_with_a_billionth_elsewhere(kind, K, mass, backend):
    """1 - sum p is 0 or noise in float32; value and gradient nevertheless have the precision of float32."""
    ids, log_q, weights = teacher(K, 2, 5, mass=mass, missing=False)
    z = confident(ids)
    wide = z.double().requires_grad_()
    want = reference.topk_divergence(wide, ids, log_q, weights, **KINDS[kind])
    (want_grad,) = torch.autograd.grad(want.loss, wide)
    others = torch.ones_like(z, dtype=torch.bool).scatter_(-1, ids, False)
    for form in KINDS_OF_INPUT:
        x = z.clone().requires_grad_()
        got = topk_divergence(exact(form, x, chunk_size=4), ids, log_q, weights, backend=backend, **KINDS[kind])
        (grad,) = torch.autograd.grad(got.loss, x)
        torch.testing.assert_close(got.value.double(), want.value, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(grad.double(), want_grad, rtol=1e-5, atol=5e-7)
        if kind in ("kl", "jsd of 0"):  # the gradient of these columns is that of log r alone
            torch.testing.assert_close(grad.double()[others], want_grad[others], rtol=1e-5, atol=1e-12)


@forms
def test_a_teacher_with_a_billionth_elsewhere(form):
    """The mass is that of the given log-probabilities, in float64."""
    log_q = torch.tensor([[-1e-9], [-1e-12], [0.0], [-1e-4]], device=DEVICE)
    ids, z = torch.arange(4, device=DEVICE)[:, None], torch.randn(4, V, device=DEVICE)
    for kind in ("kl", "rkl", "jsd"):
        want = reference.topk_divergence(z.double(), ids, log_q, kind=kind)
        got = topk_divergence(exact(form, z, chunk_size=4), ids, log_q, kind=kind)
        torch.testing.assert_close(got.value.double(), want.value, rtol=1e-6, atol=1e-7)


SHARES = {  # probabilities whose logarithms, in each dtype, sum to 1 up to their rounding, or to more
    "one id": [1.0], "halves": [0.5, 0.5], "thirds": [1 / 3] * 3, "tenths": [0.1] * 10, "above 1": [0.7, 0.31],
    "a share of 0": [0.6, 0.4, 0.0],
}  # fmt: skip


@pytest.mark.everyday(10)
@every_kind
@pytest.mark.covering(2, most=2)
@forms
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shares", SHARES)
def test_a_teacher_without_mass_elsewhere(shares, dtype, form, kind, backend):
    """Its bucket of the rest has the mass 0, not what rounding leaves of it; the reverse KL is then infinite."""
    q = torch.tensor(SHARES[shares], dtype=torch.float64, device=DEVICE)
    K = len(q)
    log_q = torch.stack([q.log(), (q / 2).log(), q.log()]).to(dtype)  # the second row has mass elsewhere
    ids, z = torch.arange(K, device=DEVICE).expand(3, K), torch.randn(3, V, dtype=dtype, device=DEVICE)
    z[2, K:] = -INF  # the student has none, either
    infinite = torch.tensor([kind in ("rkl", "jsd of 1"), False, False], device=DEVICE)
    if shares == "a share of 0":
        infinite = torch.full_like(infinite, bool(infinite[0]))
    want = reference.topk_divergence(z.double(), ids, log_q, **KINDS[kind])
    assert torch.equal(want.value.isinf(), infinite)
    x = z.clone()
    if form == "head":  # a head makes no -inf of finite hidden states
        x.clamp_(min=-200.0)
        infinite[2] |= infinite[0]
    got = topk_divergence(exact(form, x.requires_grad_(), chunk_size=4), ids, log_q, backend=backend, **KINDS[kind])
    assert torch.equal(got.value.isinf(), infinite)
    finite = ~infinite
    torch.testing.assert_close(got.value[finite].double(), want.value[finite], rtol=1e-5, atol=1e-6)
    (grad,) = torch.autograd.grad(got.loss, x)
    wide = z.double().requires_grad_()
    wide_loss = reference.topk_divergence(wide, ids, log_q, **KINDS[kind]).value[finite].sum()
    (wide_grad,) = torch.autograd.grad(wide_loss, wide)
    torch.testing.assert_close(grad[finite].double(), wide_grad[finite], rtol=1e-5, atol=1e-6)


@pytest.mark.everyday(4)
@every_kind
def test_all_columns_are_the_whole_divergence(kind, backend):
    """With K = V there is no rest, and the divergence is that of ``divergence``, in any order of the ids."""
    z, teacher_logits = torch.randn(6, 9, device=DEVICE), torch.randn(6, 9, device=DEVICE)
    ids = torch.rand(6, 9, device=DEVICE).argsort(-1)
    log_q = torch.log_softmax(teacher_logits, -1).gather(-1, ids)
    results = []
    for call in (
        lambda x: topk_divergence(x, ids, log_q, backend=backend, temperature=1.3, **KINDS[kind]),
        lambda x: topk_divergence(x, ids, log_q, backend=backend, temperature=1.3, tail=False, **KINDS[kind]),
        lambda x: divergence(x, 1.3 * teacher_logits, temperature=1.3, **KINDS[kind]),
    ):
        x = z.clone().requires_grad_()
        out = call(x)
        results.append((*(t.detach() for t in out), *torch.autograd.grad(out.loss, x)))
    for got in results[:2]:
        torch.testing.assert_close(got, results[2], rtol=1e-5, atol=1e-6)


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=2)
@three_kinds
@tails
@forms
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_outputs_beside_the_loss(kind, tail, form, reduction, backend):
    ids, log_q, weights = teacher(8, 2, 5)
    options = {"tail": tail, **KINDS[kind]}
    z = torch.randn(2, 5, V, device=DEVICE).requires_grad_()
    out = topk_divergence(
        exact(form, z, chunk_size=3), ids, log_q, weights, reduction=reduction, backend=backend, **options
    )
    wanted = reference.topk_divergence(z.double(), ids, log_q, weights, **options)
    for name in ("value", "acceptance_rate"):
        got = getattr(out, name)
        assert not got.requires_grad
        assert (got[weights == 0] == 0).all()
        torch.testing.assert_close(got.double(), getattr(wanted, name).detach(), rtol=2e-6, atol=2e-6)
    assert torch.equal(out.agree, wanted.agree)
    torch.testing.assert_close(out.loss.sum(), (weights * out.value).sum())
    assert out.loss.shape == (weights.shape if reduction == "none" else ())


def test_the_acceptance_rate_bounds_that_of_the_vocabulary():
    z, t = 2 * torch.randn(9, V, device=DEVICE), 2 * torch.randn(9, V, device=DEVICE)
    log_q, ids = torch.log_softmax(t, -1).topk(8)
    coarse, whole = topk_divergence(z, ids, log_q), divergence(z, t)
    assert (coarse.acceptance_rate >= whole.acceptance_rate - 1e-6).all()
    assert (coarse.value <= whole.value + 1e-6).all()
    assert torch.equal(coarse.agree, whole.agree)


@tails
@forms
def test_inactive_and_special_rows(form, tail, backend, monkeypatch):
    """NaN in rows of weight 0 and without ids has no effect; NaN elsewhere affects only its own row."""
    poison_empty(monkeypatch)
    ids, log_q, weights = teacher(4, 6, missing=False)
    weights = torch.tensor([1.0, 0.0, 1.0, 2.0, 1.0, 1.0], device=DEVICE)
    ids[2], log_q[2] = -100, NAN
    log_q[3, 1], log_q[4, 2] = NAN, -INF
    z = torch.randn(6, V, device=DEVICE)
    z[1], z[2], z[5, 0] = NAN, NAN, NAN
    x = z.requires_grad_()
    reduction = "sum" if form == "stored" else "none"
    out = topk_divergence(
        exact(form, x, chunk_size=4), ids, log_q, weights, tail=tail, backend=backend, reduction=reduction
    )
    (grad,) = torch.autograd.grad(out.loss.sum(), x)
    bad = torch.tensor([False, False, False, True, False, True], device=DEVICE)
    if form == "head":  # a NaN in the last hidden state
        assert (out.loss.isnan() == bad).all()
    assert (out.value.isnan() == bad).all()
    assert (out.acceptance_rate.isnan() == bad).all()
    assert not out.agree[bad].any()
    assert (grad[bad].isnan()).any(-1).all()
    assert grad[~bad].isfinite().all()
    assert not grad[1:3].any()
    assert not out.value[1:3].any()


def test_minus_infinity_outside_the_ids(backend):
    """A student without mass elsewhere has no last bucket; an id of probability 0 that the teacher has is infinite."""
    ids, log_q = torch.tensor([[0, 1], [0, 1]], device=DEVICE), torch.tensor([[0.5, 0.3]] * 2, device=DEVICE).log()
    z = torch.full((2, V), -INF, device=DEVICE)
    z[:, :2], z[1, 1], z[1, 5] = 0, -INF, 0
    x = z.requires_grad_()
    out = topk_divergence(x, ids, log_q, backend=backend, kind="rkl")
    want = reference.topk_divergence(z.detach().double(), ids, log_q, kind="rkl")
    torch.testing.assert_close(out.value.double(), want.value, rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(out.loss, x)
    assert grad.isfinite().all()
    assert topk_divergence(z, ids, log_q, backend=backend).value.isinf().tolist() == [False, True]


IDS, LOG_Q = torch.tensor([[1, 2], [3, 4], [5, -100]]), torch.full((3, 2), 0.4).log()
BAD = [
    ({"top_ids": IDS[:, 0]}, ValueError, r"top_ids must have shape \(3, 'K'\), .*, got \(3,\)$"),
    ({"top_ids": IDS[:, :0], "top_log_probs": LOG_Q[:, :0]}, ValueError, r"top_ids must have shape"),
    ({"top_ids": LOG_Q}, ValueError, r"top_ids must have dtype"),
    ({"top_log_probs": LOG_Q[:, :1]}, ValueError, r"top_log_probs must have shape \(3, 2\)"),
    ({"top_log_probs": IDS}, ValueError, r"top_log_probs must have dtype"),
    ({"top_log_probs": LOG_Q.clone().requires_grad_()}, ValueError, r"top_log_probs must not require a gradient"),
    ({"weights": torch.ones(3, 2)}, ValueError, r"weights must have shape \(3,\)"),
    ({"weights": torch.ones(3, requires_grad=True)}, ValueError, r"weights must not require a gradient"),
    (
        {"top_ids": torch.tensor([[1, 2], [4, 4], [5, -100]])}, ValueError,
        r"top_ids must hold each id once per row, got \[4, 4\] at position \(1,\)$",
    ),
    (
        {"top_ids": torch.tensor([[1, 2], [3, V], [5, -100]])}, IndexError,
        rf"top_ids must lie in \[0, {V}\) or be -100, got {V} at position \(1, 1\)$",
    ),
    (
        {"top_log_probs": LOG_Q + 0.3}, ValueError,
        r"top_log_probs must be log-probabilities, which sum to at most 1, got a sum of 1.08 at position \(0,\)",
    ),
    ({"kind": "tv"}, ValueError, r"kind must be one of kl, rkl, jsd, got 'tv'$"),
    ({"beta": 0.5}, ValueError, r"beta only applies to kind='jsd', got kind='kl'$"),
    ({"kind": "jsd", "beta": 2.0}, ValueError, r"beta must lie in \[0.0, 1.0\], got 2.0$"),
    ({"tail": "yes"}, TypeError, r"tail must be a bool, got str$"),
    ({"temperature": 0.0}, ValueError, r"temperature must be positive"),
    ({"reduction": "mean"}, ValueError, r"reduction must be sum or none, got 'mean'$"),
]  # fmt: skip


@forms
@pytest.mark.parametrize(("changed", "error", "message"), BAD)
def test_bad_input(changed, error, message, form):
    with pytest.raises(error, match=f"^{message}"):
        topk_divergence(exact(form, torch.zeros(3, V)), **{"top_ids": IDS, "top_log_probs": LOG_Q} | changed)


def test_what_does_not_count_is_not_checked():
    """Bad values in rows of weight 0, and any log-probabilities with tail=False."""
    ids, log_q = torch.tensor([[1, 2], [4, 4], [V, 1]]), LOG_Q.clone()
    log_q[1:] = 3
    weights = torch.tensor([1.0, 0.0, 0.0])
    out = topk_divergence(torch.zeros(3, V), ids, log_q, weights)
    assert out.loss.isfinite()
    assert torch.equal(out.value[1:], torch.zeros(2))
    assert topk_divergence(torch.zeros(3, V), IDS, LOG_Q + 5, tail=False).loss.isfinite()
