"""The rule for fast paths accepts any summation order and rejects wrong results."""

import contextlib

import pytest
import torch
from torch.nn import functional as F

import reference
from tests.support.parity import assert_as_good_as_plain, assert_parity, reduction_sizes

V, D, CHUNK = 37, 8, 4
LOW, WIDE = (torch.float16, torch.bfloat16), (torch.float32, torch.float64)


def by_hand(targets, bug="", reverse=False, shards=1):
    """Compute the mean NLL of rows of ``hidden @ weight.T`` as a kernel does: in chunks of rows, sums in any order."""
    N = len(targets)
    order = torch.arange(N).flip(0) if reverse else torch.arange(N)
    dropped = {"a row dropped": 1, "a chunk dropped": CHUNK}.get(bug, 0)

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight):
            acc = torch.promote_types(hidden.dtype, torch.float32)
            z = (hidden[order] @ weight.t()).to(hidden.dtype if bug == "no upcast" else acc)
            y = targets[order].roll(1 if bug == "the next row's target" else 0)
            seen = z[:, 1:] if bug == "a column left out" else z
            lse = torch.stack([part.logsumexp(-1) for part in seen.chunk(shards, -1)]).logsumexp(0)
            nll = lse - z.gather(-1, y[:, None])[:, 0]
            ctx.save_for_backward(hidden, weight, z, lse, y)
            return nll[dropped:].to(acc).sum() / (N - 1 if bug == "another denominator" else N)

        @staticmethod
        def backward(ctx, upstream):
            hidden, weight, z, lse, y = ctx.saved_tensors
            sums = torch.promote_types(hidden.dtype, torch.float32)
            sums = {"sums in float32": torch.float32, "sums in the input's dtype": hidden.dtype}.get(bug, sums)
            p, one_hot = (z - lse[:, None]).exp(), F.one_hot(y, V).to(hidden.dtype)
            p = p.to(hidden.dtype) if bug == "one-hot after rounding" else p
            scale = (1 if bug == "upstream ignored" else upstream) / (N - 1 if bug == "another denominator" else N)
            dz = ((p - one_hot) * scale).to(hidden.dtype)
            dz[:dropped] = 0
            grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=sums)
            grad_hidden[order] = dz @ weight
            for rows in (order.new_tensor(range(start, min(start + CHUNK, N))) for start in range(0, N, CHUNK)):
                grad_weight += dz[rows].to(sums).t() @ hidden[order[rows]].to(sums)
            return grad_hidden, grad_weight.to(hidden.dtype)

    return Loss.apply


def judge(dtype, rows=24, sure=False, **how):
    """Compare on positive hidden states, so that sums over rows grow.

    With ``sure``, each target has almost all probability.
    """
    targets = torch.arange(rows) % (D if sure else V)

    def draw(seed):
        torch.manual_seed(seed)
        hidden, weight = (
            (12 * F.one_hot(targets, D), torch.eye(V, D)) if sure else (1 + torch.rand(rows, D), torch.randn(V, D) / 4)
        )
        return [hidden.to(dtype), weight.to(dtype)], torch.tensor(1.7 * rows)

    assert_parity(by_hand(targets, **how), lambda h, w: reference.linear_token_nll(h, w, targets).mean(), draw)


@pytest.mark.everyday(16)
@pytest.mark.parametrize("dtype", LOW + WIDE, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize("rows", [1, 24, 512])
def test_any_order_of_summation_passes(dtype, reverse, shards, rows):
    judge(dtype, rows, reverse=reverse, shards=shards)


ANYWHERE = ("a row dropped", "a chunk dropped", "a column left out", "the next row's target", "another denominator",
            "upstream ignored")  # fmt: skip
BUGS = [
    *((bug, LOW + WIDE, {}) for bug in ANYWHERE),
    ("no upcast", LOW, {"sure": True}),
    ("one-hot after rounding", LOW, {"sure": True}),
    ("sums in the input's dtype", LOW, {"rows": 512}),
    ("sums in float32", (torch.float64,), {}),
]


@pytest.mark.everyday(11)
@pytest.mark.parametrize(("bug", "dtype", "how"), [(b, t, how) for b, dtypes, how in BUGS for t in dtypes], ids=str)
def test_wrong_results_fail(bug, dtype, how):
    judge(dtype, **how)
    with pytest.raises(AssertionError, match="above one rounding step"):
        judge(dtype, bug=bug, **how)


@pytest.mark.parametrize("dtype", LOW + WIDE, ids=str)
@pytest.mark.parametrize("plain_error", [0.0, 0.5])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_bound_is_the_sum_of_three_terms(dtype, plain_error, sign):
    """The number is 4, the largest of the other draw is 64, and the sums have 9 and 4 terms."""
    eps_out, eps_acc = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    bound = 2 * plain_error + 4 * eps_out + 64 * (3 + 2) * eps_acc
    ours, more = torch.tensor([4.0], dtype=dtype), torch.tensor([-64.0], dtype=torch.float64)
    assert_as_good_as_plain([ours], [ours.double() + 0.98 * sign * bound, more], plain_error, sizes=(9, 4))
    with pytest.raises(AssertionError, match="above one rounding step"):
        assert_as_good_as_plain([ours], [ours.double() + 1.02 * sign * bound, more], plain_error, sizes=(9, 4))


@pytest.mark.parametrize("dtype", LOW + WIDE, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_terms_are_the_scale_if_every_exact_number_is_0(dtype, sign):
    """They are used only then: a single nonzero draw provides the scale."""
    bound = 64 * (3 + 2) * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    zero, more = torch.zeros(1, dtype=torch.float64), torch.full((1,), 1e-30, dtype=torch.float64)
    for factor, draws, passes in ((0.98, [zero], True), (1.02, [zero], False), (0.98, [zero, more], False)):
        ours = torch.tensor([factor * sign * bound], dtype=dtype)
        expected = contextlib.nullcontext() if passes else pytest.raises(AssertionError, match="above one rounding")
        with expected:
            assert_as_good_as_plain([ours], draws, 0.0, sizes=(9, 4), terms=64.0)


def test_the_sums_are_over_the_last_dimension_and_over_the_rows():
    assert reduction_sizes([torch.ones(2, 6, 8), torch.ones(19, 8), torch.ones(19), torch.ones(0, 5)]) == {12, 8, 19, 1}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("ours", "exact", "message"),
    [
        ([NAN, 1.0], [1.0, 1.0], "NaN elsewhere than in float64"),
        ([1.0, 1.0], [NAN, 1.0], "NaN elsewhere than in float64"),
        ([INF, 1.0], [1.0, 1.0], "infinite elsewhere than in float64"),
        ([1.0, 1.0], [1.0, INF], "infinite elsewhere than in float64"),
        ([INF, 1.0], [-INF, 1.0], "wrong sign of an infinity"),
        ([INF, 1.0], [-1e300, 1.0], "wrong sign of an infinity"),
        ([1.0], [1.0, 1.0], "nll"),
    ],
)
def test_special_values_must_be_at_the_same_positions(ours, exact, message):
    exact = torch.tensor(exact, dtype=torch.float64)
    with pytest.raises(AssertionError, match=message):
        assert_as_good_as_plain([torch.tensor(ours)], [exact], 1.0, "nll")
    float32 = exact.float()  # infinite beyond the range of float32
    assert_as_good_as_plain([float32], [exact], 0.0)


def test_a_value_in_half_precision_fails():
    leaf = torch.ones(4, dtype=torch.float16)
    with pytest.raises(AssertionError, match=r"value in torch\.float16"):
        assert_parity(torch.sum, torch.sum, lambda _: ([leaf], torch.tensor(1.0)))
