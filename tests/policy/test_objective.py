"""Policy objectives by hand and against the oracle; the weights that give an objective's gradient view by view."""

import math

import pytest
import torch
import torch.nn.functional as F

import reference
from dllm_kernels import (
    PolicyObjective,
    RowStats,
    linear_row_objective,
    nll_weights,
    policy_views,
    row_objective,
    weighted_linear_nll,
)  # fmt: skip
from tests.support.parity import assert_parity


def loss_and_grad(ratio, advantage, **settings):
    """Return the loss and its derivative in s, for s_old = -1 and a ratio."""
    s = torch.tensor(-1 + math.log(ratio), dtype=torch.float64, requires_grad=True)
    old, advantage = torch.tensor(-1.0, dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64)
    loss = PolicyObjective(**settings)(s, old, advantage)
    (grad,) = torch.autograd.grad(loss, s)
    return loss.item(), grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "settings", "loss", "grad"),
    [
        # PPO's clip: within, beyond each side, and the side on which advantages of the other sign are not clipped
        (1.1, 2.0, {}, -2.2, -2.2),
        (1.5, 2.0, {}, -2.4, 0.0),
        (0.5, 2.0, {}, -1.0, -1.0),
        (1.5, -2.0, {}, 3.0, 3.0),
        (0.5, -2.0, {}, 1.6, 0.0),
        (1.5, 2.0, {"clip_high": 0.28}, -2.56, 0.0),
        (0.5, -2.0, {"clip_low": 0.6}, 1.0, 1.0),
        (5.0, -2.0, {"dual_clip": 3.0}, 6.0, 0.0),
        (2.0, -2.0, {"dual_clip": 3.0}, 4.0, 4.0),
        (5.0, 2.0, {"dual_clip": 3.0}, -2.4, 0.0),
        (math.e, -1.0, {"log_ratio_clamp": 0.5}, math.exp(0.5), 0.0),
        (math.exp(-1), 1.0, {"log_ratio_clamp": 0.5}, -math.exp(-0.5), 0.0),
        # CISPO: the ratio is a weight without a gradient
        (1.5, 2.0, {"kind": "cispo"}, -1.2 * 2 * (-1 + math.log(1.5)), -2.4),
        (0.1, 2.0, {"kind": "cispo"}, -0.1 * 2 * (-1 + math.log(0.1)), -0.2),
        (1.5, -2.0, {"kind": "cispo", "clip_high": 1.0}, 1.5 * 2 * (-1 + math.log(1.5)), 3.0),
        (1.5, 2.0, {"kind": "reinforce"}, -2 * (-1 + math.log(1.5)), -2.0),
    ],
)
def test_by_hand(ratio, advantage, settings, loss, grad):
    assert loss_and_grad(ratio, advantage, **settings) == (pytest.approx(loss), pytest.approx(grad, abs=1e-12))


@pytest.mark.parametrize(
    ("kl", "value", "grad"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) + 0.5 - 1, 1 - math.exp(-0.5))],
)
def test_kl_by_hand(kl, value, grad):
    """At s - ref = 1/2, the penalty adds to a loss of 0."""
    s = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    objective = PolicyObjective(kl=kl, kl_coef=0.1)
    loss = objective(s, s.detach(), torch.zeros(1), ref=torch.tensor([-1.0]))
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * value)
    assert s.grad.item() == pytest.approx(0.1 * grad)


SETTINGS = [
    {}, {"clip_low": 0.1, "clip_high": 0.4}, {"dual_clip": 1.5}, {"log_ratio_clamp": 0.3},
    {"kind": "cispo"}, {"kind": "cispo", "clip_high": 0.0, "log_ratio_clamp": 0.2}, {"kind": "reinforce"},
    {"kl": "k1", "kl_coef": 0.5}, {"kind": "cispo", "kl": "k2", "kl_coef": 0.5}, {"kl": "k3", "kl_coef": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_the_oracle(settings):
    generator = torch.Generator().manual_seed(0)
    old, advantages, ref = torch.randn(3, 4, 5, generator=generator)
    objective = PolicyObjective(**settings)

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return [old + 0.5 * torch.randn(4, 5, generator=generator)], torch.randn(4, 5, generator=generator)

    oracle = lambda s: reference.policy_objective(  # noqa: E731
        s, old.to(s.dtype), advantages.to(s.dtype), ref.to(s.dtype), **settings
    )
    assert_parity(lambda s: objective(s, old, advantages, ref), oracle, draw)


# Ratios and penalties that overflow

EXTREMES = [
    {}, {"clip_low": 1.0, "clip_high": 0.0}, {"dual_clip": 3.0}, {"log_ratio_clamp": 0.1}, {"log_ratio_clamp": 150.0},
    {"dual_clip": 1.1, "log_ratio_clamp": 99.0}, {"kind": "cispo"}, {"kind": "cispo", "log_ratio_clamp": 0.1},
    {"kind": "reinforce"}, {"kl": "k1", "kl_coef": 0.5}, {"kl": "k2", "kl_coef": 0.5}, {"kl": "k3", "kl_coef": 0.5},
    {"kl": "k3", "kl_coef": 1e-30}, {"kl": "k3", "kl_coef": 0.0}, {"kind": "reinforce", "kl": "k3", "kl_coef": 0.5},
    {"kind": "cispo", "dual_clip": None, "kl": "k3", "kl_coef": 0.0},
]  # fmt: skip


def exponential(x, factor=1.0):
    """Compute ``factor e^x``, infinite only if the product is."""
    if factor == 0 or x < 700:
        return factor * math.exp(x) if factor else 0.0
    x += math.log(abs(factor))
    return math.copysign(math.inf if x > 709 else math.exp(x), factor)


def policy_by_hand(s, old, A, kind="clip", clip_low=0.2, clip_high=0.2, dual_clip=None, log_ratio_clamp=math.inf):
    """Return the loss of one score without a penalty, and its derivative in the score, one case after another."""
    d = min(max(s - old, -log_ratio_clamp), log_ratio_clamp)
    within = abs(s - old) <= log_ratio_clamp
    r = exponential(d)
    if A == 0:
        return 0.0, 0.0
    if kind == "reinforce":
        return -A * s, -A
    if kind == "cispo":
        return -min(r, 1 + clip_high) * A * s, -min(r, 1 + clip_high) * A
    if A > 0 and r > 1 + clip_high:
        return -A * (1 + clip_high), 0.0
    if A < 0 and r < 1 - clip_low:
        return -A * (1 - clip_low), 0.0
    if A < 0 and dual_clip is not None and r > dual_clip:
        return -A * dual_clip, 0.0
    return exponential(d, -A), exponential(d, -A) if within else 0.0


def penalty_by_hand(away, kl=None, kl_coef=0.0):
    """Return a penalty and its derivative in the score, with ``away = s - ref``."""
    if kl == "k1":
        return kl_coef * away, kl_coef
    if kl == "k2":
        return kl_coef * away**2 / 2, kl_coef * away
    e = exponential(-away, kl_coef)
    return e + kl_coef * (away - 1), kl_coef - e


@pytest.mark.parametrize("kind", ["clip", "cispo", "reinforce"])
def test_scores_decide_the_dtype_of_the_loss_whatever_the_constants_have(kind):
    objective = PolicyObjective(kind, kl="k3", kl_coef=0.1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for constants in (torch.float64, torch.float16):
            s, *others = (torch.full((3,), -0.5, dtype=x) for x in (dtype, constants, constants, constants))
            assert objective(s, *others).dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("settings", EXTREMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_branch_at_extreme_differences(settings, dtype):
    """Every score has the loss and the derivative of its own case, beside scores whose ratio overflows."""
    differences = [0.0, 0.05, -0.05, 0.5, -0.5, 1.5, 80.0, 88.0, 100.0, 200.0, 1e4, -88.0, -100.0, -200.0, -1e4]
    advantages = [1.0, -1.0, 0.0, -0.0, 1e-8, -1e-8, 1e-30, -1e-30, torch.finfo(torch.float32).tiny]
    s = torch.full((len(differences), len(advantages), len(differences)), -1.0, dtype=dtype, requires_grad=True)
    wide = torch.promote_types(dtype, torch.float32)
    old, ref = (-1 - torch.tensor(differences, dtype=wide) for _ in range(2))
    old, A = old[:, None, None], torch.tensor(advantages, dtype=wide)[None, :, None]
    loss = PolicyObjective(**settings)(s, old, A, ref[None, None])
    assert loss.dtype == wide
    loss.sum().backward()
    penalty = {name: settings[name] for name in settings if name in ("kl", "kl_coef")}
    policy = {name: settings[name] for name in settings if name not in penalty}
    terms = [[policy_by_hand(-1.0, x.item(), a.item(), **policy) for a in A.flatten().double()] for x in old.double()]
    penalties = [penalty_by_hand(-1.0 - y.item(), **penalty) for y in ref.double()]
    # Infinite outside the range of the dtype. The gradient is NaN only if it is the difference of two infinities.
    terms, penalties = (torch.tensor(t, dtype=torch.float64).to(wide) for t in (terms, penalties))
    expected = terms[:, :, None] + penalties
    for found, values in ((loss, expected[..., 0]), (s.grad, expected[..., 1])):
        rtol = 8 * torch.finfo(found.dtype).eps  # at 1, the size of the terms of k3, rtol / 2 is four roundings
        torch.testing.assert_close(found.detach(), values.to(found.dtype), rtol=rtol, atol=rtol / 2, equal_nan=True)


@pytest.mark.parametrize(
    ("settings", "s", "old", "A", "loss", "grad"),
    [
        ({}, -math.inf, -1.0, 1.0, 0.0, 0.0),
        ({}, -math.inf, -1.0, -1.0, 0.8, 0.0),
        ({"clip_low": 1.0}, -math.inf, -1.0, -1.0, 0.0, 0.0),
        ({}, -1.0, -math.inf, 1.0, -1.2, 0.0),
        ({}, -1.0, -math.inf, -1.0, math.inf, math.inf),
        ({"dual_clip": 3.0}, -1.0, -math.inf, -1.0, 3.0, 0.0),
        ({"log_ratio_clamp": 1.0}, -1.0, -math.inf, -1.0, math.e, 0.0),
        ({"kind": "cispo"}, -math.inf, -1.0, 1.0, 0.0, 0.0),
        ({"kind": "cispo"}, -1.0, -math.inf, 1.0, 1.2, -1.2),
        *(({"kind": kind}, s, old, 0.0, 0.0, 0.0) for kind in ("clip", "cispo", "reinforce")
          for s, old in ((-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf))),
        ({"kind": "reinforce"}, -math.inf, -1.0, 1.0, math.inf, -1.0),
        ({"kl": "k3", "kl_coef": 0.5}, -math.inf, -math.inf, 0.0, math.inf, -math.inf),
        ({"kl": "k3", "kl_coef": 0.0}, -math.inf, -math.inf, 0.0, 0.0, 0.0),
    ],
)  # fmt: skip
def test_infinite_scores_by_hand(settings, s, old, A, loss, grad):
    s = torch.tensor([s, -1.0], requires_grad=True)
    objective, old = PolicyObjective(**settings), torch.tensor([old, -1.0])
    found = objective(s, old, torch.tensor([A, 1.0]), torch.tensor([-2.0, -1.0]))
    found.sum().backward()
    assert found[0].item() == pytest.approx(loss)
    assert s.grad[0].item() == pytest.approx(grad)
    assert s.grad[1].item() == -1.0


@pytest.mark.parametrize("settings", [{}, {"dual_clip": 3.0}, {"kind": "cispo"}, {"kind": "reinforce"}], ids=str)
@pytest.mark.parametrize("A", [-1.0, 0.0, 1.0])
def test_a_nan_score_is_visible_in_its_own_entry(settings, A):
    s = torch.tensor([math.nan, -1.0], requires_grad=True)
    loss = PolicyObjective(**settings)(s, torch.full((2,), -1.0), torch.full((2,), A))
    assert loss.isnan().tolist() == [True, False]
    loss.sum().backward()
    assert s.grad[1].item() == -A


def test_weights_of_an_objective_whose_ratio_overflows():
    log_probs = torch.tensor([-1.0, -2.0, -3.0])
    old, A = torch.tensor([-1.0, -302.0, -303.0]), torch.tensor([2.0, 1.0, 0.0])
    ref = torch.tensor([-1.0, 98.0, 97.0])
    objective = PolicyObjective(kl="k3", kl_coef=0.0)
    assert nll_weights(lambda x: objective(x, old, A, ref).sum(), log_probs).tolist() == [2.0, 0.0, 0.0]


def test_constants_may_have_sizes_of_one_and_any_shape():
    objective, s = PolicyObjective(), torch.randn(2, 3)
    wide = objective(s, torch.zeros(2, 3), torch.tensor([[1.0], [-1.0]]).expand(2, 3))
    assert torch.equal(wide, objective(s, torch.zeros(()), torch.tensor([[1.0], [-1.0]])))
    assert objective(s[0, 0], s[0, 0], s[0, 0]).shape == ()
    assert objective(s[None, None], s[None, None], s[None, None]).shape == (1, 1, 2, 3)


def test_objectives_are_immutable_and_compare_by_value():
    assert PolicyObjective() == PolicyObjective("clip", clip_low=0.2) != PolicyObjective(clip_low=0.1)
    with pytest.raises(AttributeError):
        PolicyObjective().kind = "cispo"
    with pytest.raises(TypeError):
        PolicyObjective("clip", 0.2)


@pytest.mark.parametrize("settings", [{}, {"kl": "k3", "kl_coef": 0.1}], ids=str)
def test_policy_objective_as_row_objective(settings):
    """The objective of row statistics, from hidden states and from logits, equals that of the log-probabilities."""
    hidden, head = torch.randn(6, 8, dtype=torch.float64, requires_grad=True), torch.randn(11, 8, dtype=torch.float64)
    ids, advantages = torch.randint(0, 11, (6,)), torch.randn(6, dtype=torch.float64)
    log_probs = F.linear(hidden, head).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    old, ref = log_probs.detach() + torch.randn(2, 6, dtype=torch.float64) * 0.3
    aux = (old, advantages, ref) if settings else (old, advantages)
    objective = PolicyObjective(**settings)
    expected = objective(log_probs, *aux).sum()
    (grad,) = torch.autograd.grad(expected, hidden)
    assert torch.equal(objective(RowStats(log_probs, log_probs), *aux), objective(log_probs, *aux))
    for found in (
        linear_row_objective(hidden, head, ids, objective, *aux),
        row_objective(F.linear(hidden, head), ids, objective, *aux),
    ):
        torch.testing.assert_close(found.loss, expected)
        torch.testing.assert_close(torch.autograd.grad(found.loss, hidden)[0], grad)


def test_weights_give_the_exact_gradient_of_a_sequence_objective_view_by_view():
    B, L, D, V = 3, 7, 6, 13
    ids, loss_mask = torch.randint(0, V - 1, (B, L)), torch.ones(B, L)
    views = policy_views(ids, loss_mask, V - 1, "coupled", seeds=torch.arange(B))
    hidden = torch.randn(3, B, L, D, dtype=torch.float64)
    body, head = torch.nn.Linear(D, D).double(), torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    log_probs = F.linear(body(hidden), head).log_softmax(-1).gather(-1, ids.expand(3, B, L)[..., None])[..., 0]
    old = views.sequence_scores(log_probs.detach(), mean=True) + torch.tensor([0.1, -0.3, 0.05])
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def loss(log_probs):
        return PolicyObjective(kl="k3", kl_coef=0.1)(
            views.sequence_scores(log_probs, mean=True), old, advantages, old - 0.2
        ).mean()

    exact = torch.autograd.grad(loss(log_probs), (head, body.weight))
    with torch.no_grad():
        weights = nll_weights(loss, log_probs)
    assert not weights.requires_grad
    assert weights.shape == log_probs.shape
    assert not weights[~views.scored].any()
    for k in range(3):
        weighted_linear_nll(body(hidden[k]), head, ids, weights[k]).loss.backward()
    for found, expected in zip((head.grad, body.weight.grad), exact, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("compiling", [False, True])
def test_weights_of_a_square_by_hand(compiling, monkeypatch):
    """With f = (l_1 + 2 l_2)^2 at (1, -1), -df/dl = (2, 4)."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    log_probs = torch.tensor([1.0, -1.0], requires_grad=True)
    weights = nll_weights(lambda x: (x @ torch.tensor([1.0, 2.0])) ** 2, log_probs)
    assert weights.tolist() == [2.0, 4.0]
    assert log_probs.grad is None

    assert nll_weights(lambda x: 2 * x.sum() + x.detach().zero_().sum(), log_probs).tolist() == [-2.0, -2.0]
    assert log_probs.tolist() == [1.0, -1.0]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"kind": "ppo"}, ValueError, "kind must be one of clip, cispo, reinforce, got 'ppo'"),
        ({"clip_low": 1.5}, ValueError, r"clip_low must lie in \[0, 1\], got 1.5"),
        ({"clip_low": -0.1}, ValueError, r"clip_low must lie in \[0, 1\], got -0.1"),
        ({"clip_high": -0.1}, ValueError, "clip_high must be at least 0, got -0.1"),
        ({"clip_high": None}, TypeError, "clip_high must be a number, got NoneType"),
        ({"dual_clip": 1.0}, ValueError, "dual_clip must be above 1, got 1.0"),
        ({"dual_clip": "3"}, TypeError, "dual_clip must be a number, got str"),
        (
            {"kind": "cispo", "dual_clip": 3},
            ValueError,
            "dual_clip only applies to kind='clip', got kin",
        ),
        ({"log_ratio_clamp": 0}, ValueError, "log_ratio_clamp must be above 0, got 0"),
        ({"kl": "k4"}, ValueError, "kl must be one of k1, k2, k3, got 'k4'"),
        ({"kl": "k1", "kl_coef": -1.0}, ValueError, "kl_coef must be finite and non-negative, got -1.0"),
        ({"kl_coef": 0.1}, ValueError, "kl must be given for kl_coef=0.1, got None"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        PolicyObjective(**settings)


S = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("settings", "args", "error", "message"),
    [
        ({}, (S.long(), S, S), ValueError, "scores must have dtype float16"),
        ({}, (S, None, S), ValueError, "old must be given for kind='clip', got None"),
        ({}, (S, S, None), TypeError, "advantages must be a torch.Tensor, got NoneType"),
        ({}, (S, S, S[0]), ValueError, r"advantages must have shape \(2, 3\) \(that of scores\), got \(3,\)"),
        ({}, (S, S[:, :2], S), ValueError, r"old must have shape \(2, 3\) \(that of scores\), got \(2, 2\)"),
        ({}, (S, S.to("meta"), S), ValueError, "old must be on cpu like scores, got meta"),
        ({}, (S, S.clone().requires_grad_(), S), ValueError, "old must not require a gradient"),
        ({"kl": "k1"}, (S, S, S), ValueError, "ref must be given for kl='k1', got None"),
        ({"kl": "k1"}, (S, S, S, S[:1, :2]), ValueError, r"ref must have shape \(2, 3\)"),
    ],
)
def test_bad_input(settings, args, error, message):
    with pytest.raises(error, match=message):
        PolicyObjective(**settings)(*args)


def test_reinforce_needs_no_old_scores():
    assert torch.equal(PolicyObjective("reinforce")(S + 2, None, S + 3), S - 6)


@pytest.mark.parametrize(
    ("objective", "log_probs", "error", "message"),
    [
        (None, S, TypeError, "objective must be a function of the log-probabilities, got NoneType"),
        (torch.sum, S.long(), ValueError, "log_probs must have dtype float16"),
        (lambda x: 1.0, S, TypeError, "objective must return a torch.Tensor, got float"),
        (lambda x: x.sum(0), S, ValueError, r"objective must return a 0-d loss, got shape \(3,\)"),
        (lambda x: x.detach().sum(), S, ValueError, "objective must depend on log_probs, got a loss that does not"),
        (
            lambda x: torch.ones((), requires_grad=True) * 2,
            S,
            ValueError,
            "objective must depend on log_probs, got a loss that does not",
        ),
    ],
)
def test_bad_objectives(objective, log_probs, error, message):
    with pytest.raises(error, match=message):
        nll_weights(objective, log_probs)
