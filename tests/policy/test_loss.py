"""The policy loss in both forms, compared with the oracle; its products, metrics, normalizations, memory and errors."""

import dataclasses
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import reference
from benchmarks.measure import Candidate, peak_memory
from dllm_kernels import (
    PolicyLoss,
    PolicyObjective,
    PolicyViews,
    linear_token_nll,
    nll_weights,
    policy_views,
    token_log_probs,
    weighted_linear_nll,
)
from dllm_kernels.ops import LinearLogits
from tests.conftest import DEVICE
from tests.support.parity import assert_as_good_as_plain, assert_parity

B, L, D, V = 3, 5, 6, 11
MASK = V - 1
STEPS = torch.tensor([[-1, 2, 0, 1, 0], [-1, 0, 0, 1, 2], [-1, -1, -1, -1, -1]])
SCHEMES = {
    "full": {}, "coupled": {}, "elbo": {"num": 2, "level": 0.5}, "count": {}, "trace": {"step_map": STEPS},
    "quadrature": {"num": 2},
}  # fmt: skip
OBJECTIVES = [
    {}, {"dual_clip": 1.5, "kl": "k1", "kl_coef": 0.5}, {"kind": "cispo", "clip_high": 0.1, "kl": "k2", "kl_coef": 0.5},
    {"kind": "reinforce"}, {"clip_high": 0.28, "log_ratio_clamp": 1.0, "kl": "k3", "kl_coef": 0.5},
]  # fmt: skip
LEVELS, NORMALIZE = ("token", "sequence"), ("tokens", "sequences", "none")
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def batch(scheme, level, token_0=False):
    """Draw ids, supervised tokens (none in the last row), views, old, advantages, ref.

    Scores are near those of small logits.
    """
    generator = torch.Generator().manual_seed(3)
    ids, loss_mask = torch.randint(0, MASK, (B, L), generator=generator), torch.ones(B, L)
    loss_mask[:, 0] = loss_mask[2] = 0
    loss_mask[0, 0] = token_0 and scheme in ("full", "coupled", "count")  # which score each supervised token
    views = policy_views(ids, loss_mask, MASK, scheme, seeds=torch.arange(B), **SCHEMES[scheme])
    uniform = torch.full(views.scored.shape, -math.log(V))
    near = views.token_scores(uniform) if level == "token" else views.sequence_scores(uniform, mean=True)
    old, ref = near + 0.3 * torch.randn(2, *near.shape, generator=generator)
    advantages = torch.randn(ids.shape if level == "token" else (B,), generator=generator)
    return ids, loss_mask, views, old, advantages, ref


def drawn(dtype, *shapes):
    """Return a function that draws leaves of these shapes from a seed."""

    def draw(seed):
        torch.manual_seed(seed + 100)
        return [(0.5 * torch.randn(shape)).to(dtype) for shape in shapes], torch.tensor(0.7)

    return draw


def make_oracle(level, normalize, arguments, **settings):  # settings of the oracle and of its objective
    ids, loss_mask, views, old, advantages, ref = arguments
    return lambda logits, **options: reference.policy_loss(
        logits, ids, reference.PolicyViews(*views), loss_mask, old, advantages, ref, level=level, normalize=normalize,
        **settings, **options,
    )  # fmt: skip


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("settings", OBJECTIVES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transform", [{}, {"softcap": 2.0, "temperature": 0.7, "skip_id": MASK}], ids=["", "capped"])
@pytest.mark.parametrize("shift", [False, True], ids=["", "shift"])
def test_parity_from_logits(scheme, level, normalize, settings, dtype, transform, shift):
    arguments = ids, _, views, old, advantages, ref = batch(scheme, level, token_0=shift)
    policy_loss, oracle = (
        PolicyLoss(PolicyObjective(**settings), level=level, normalize=normalize, shift=shift),
        make_oracle(level, normalize, arguments, shift=shift, **settings),
    )

    def plain(x):
        x = reference.transformed(x, 2.0, 1 / 0.7, MASK) if transform else x
        return oracle(x)

    def ours(x):
        return policy_loss(x, ids, views, old, advantages, ref, **transform).loss

    assert_parity(ours, plain, drawn(dtype, (*views.scored.shape, V)))


@pytest.mark.everyday(6)
@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("scheme", ["full", "coupled", "count", "trace"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("settings", OBJECTIVES[:4:3] + OBJECTIVES[2:3], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("parts", ["", "bias", "extra"])
@pytest.mark.parametrize(
    "options",
    [{}, {"chunk_size": 4, "with_entropy": True}, {"softcap": 2.0, "temperature": 0.7, "skip_id": MASK}],
    ids=["", "chunks", "capped"],
)
@pytest.mark.parametrize("shift", [False, True], ids=["", "shift"])
def test_parity_from_hidden_states(scheme, level, settings, dtype, trained, parts, options, shift):
    arguments = ids, _, views, old, advantages, ref = batch(scheme, level)
    rows = tuple(views.scored.shape)
    policy_loss, oracle = (
        PolicyLoss(PolicyObjective(**settings), level=level, shift=shift),
        make_oracle(level, "tokens", arguments, shift=shift, **settings),
    )
    torch.manual_seed(7)
    frozen = torch.randn(V, D).to(dtype)
    more = {"": [], "bias": [(V,)], "extra": [(*rows, 2), (V, 2)]}[parts]

    def from_hidden(leaves, dtype):
        h, *rest = leaves
        w = rest.pop(0) if trained else frozen.to(dtype)
        return h, w, rest

    def ours(*leaves):
        h, w, rest = from_hidden(leaves, dtype)
        head = {"extra": tuple(rest)} if parts == "extra" else {"lm_head_bias": rest[0]} if parts else {}
        return policy_loss.forward_fused(h, w, ids, views, old, advantages, ref, **head, **options).loss

    def plain(*leaves):
        h, w, rest = from_hidden(leaves, leaves[0].dtype)
        z = F.linear(h, w)
        z = z + F.linear(*rest) if parts == "extra" else z + rest[0] if parts else z
        return oracle(reference.transformed(z, 2.0, 1 / 0.7, MASK) if "softcap" in options else z)

    shapes = [(*rows, D), *([(V, D)] if trained else []), *more]
    assert_parity(ours, plain, drawn(dtype, *shapes), constants=(D, V))


def test_gradient_of_the_oracle():
    arguments = batch("coupled", "token")
    (logits,), _ = drawn(torch.float64, (*arguments[2].scored.shape, V))(0)
    for level in LEVELS:
        oracle = make_oracle(level, "sequences", batch("coupled", level), kl="k3", kl_coef=0.5)
        assert torch.autograd.gradcheck(oracle, logits.requires_grad_(), fast_mode=True)


def counted(scheme, level, trained, **options):
    """Count the products of one forward and backward pass, in units of the scored rows' logits."""
    ids, _, views, old, advantages, ref = batch(scheme, level)
    h, w = torch.randn(*views.scored.shape, D, requires_grad=True), torch.randn(V, D, requires_grad=trained)
    with FlopCounterMode(display=False) as counter:
        # With "reinforce", every scored row has a gradient. A row with a clipped ratio has none, which may save
        # products.
        policy_loss = PolicyLoss(PolicyObjective("reinforce"), level=level)
        policy_loss.forward_fused(h, w, ids, views, old, advantages, ref, **options).loss.backward()
    return counter.get_total_flops() / (2 * int(views.scored.sum()) * w.numel())


@pytest.mark.parametrize(
    ("scheme", "level", "frozen", "trained", "with_entropy"),
    [
        ("full", "token", 2, 3, 2), ("trace", "token", 2, 3, 2), ("count", "token", 2, 3, 2),
        ("coupled", "token", 2, 4, 3), ("full", "sequence", 2, 4, 3), ("trace", "sequence", 2, 4, 3),
    ],
)  # fmt: skip
def test_products(scheme, level, frozen, trained, with_entropy):
    assert counted(scheme, level, False) == frozen
    assert counted(scheme, level, True) == trained
    assert counted(scheme, level, False, with_entropy=True) == with_entropy


def one_view_at_a_time(loss_of, body, hidden, head, ids, views):
    """Compute the gradient of any function of the log-probabilities, one view at a time.

    The log-probabilities of all views come first, without a graph. Then each view runs forward and backward.
    """
    rows = zip(hidden, views.scored, strict=True)
    with torch.no_grad():
        log_probs = torch.stack([-linear_token_nll(body(h), head, ids, active=on).nll for h, on in rows])
    for h, weights in zip(hidden, nll_weights(loss_of, log_probs), strict=True):
        weighted_linear_nll(body(h), head, ids, weights).loss.backward()


def test_sixteen_views_need_the_memory_of_one():
    """The gradient equals that of all views at once, up to rounding."""
    B, L, D, V = 2, 16, 64, 300
    torch.manual_seed(0)
    ids, body, head = torch.randint(0, V - 1, (B, L)), torch.nn.Linear(D, D).double(), torch.randn(V, D).double()
    head.requires_grad_()
    leaves = (*body.parameters(), head)
    policy_loss = PolicyLoss(PolicyObjective(clip_high=1e9, kl="k3", kl_coef=0.1), level="sequence", normalize="none")
    peaks = {}
    for K in (1, 16):
        views = policy_views(ids, torch.ones(B, L), V - 1, "elbo", num=K, level=0.5, seeds=torch.arange(B))
        hidden, A = torch.randn(K, B, L, D).double(), torch.tensor([0.7, -0.4]).double()
        with torch.no_grad():
            log_probs = token_log_probs(body(hidden), ids.expand(K, B, L), weight=head).log_probs
        old = views.sequence_scores(log_probs, mean=True) + torch.tensor([0.1, -0.1])

        def loss_of(log_probs, views=views, old=old, A=A):
            return policy_loss.objective(views.sequence_scores(log_probs, mean=True), old, A, old).sum()

        def all_views(_, views=views, hidden=hidden, old=old, A=A):
            policy_loss.forward_fused(body(hidden), head, ids, views, old, A, old).loss.backward()

        def one_view(_, views=views, hidden=hidden, loss_of=loss_of):
            one_view_at_a_time(loss_of, body, hidden, head, ids, views)

        def no_gradients(_):
            for leaf in leaves:
                leaf.grad = torch.zeros_like(leaf)

        grads = {}
        for step in (all_views, one_view):
            peaks[K, step.__name__] = peak_memory(Candidate(step, no_gradients), "cpu")
            no_gradients(None)
            step(None)
            grads[step] = [leaf.grad for leaf in leaves]
        for found, expected in zip(*grads.values(), strict=True):
            assert_as_good_as_plain([found], [expected], 0.0, sizes={V, D, K * B * L})
    numbers = 8 * 16 * B * L  # one [K, B, L] in float64; the weights and their inputs need a few of them
    assert peaks[16, "one_view"] <= peaks[1, "one_view"] + 8 * numbers
    assert peaks[16, "one_view"] < 1.5 * peaks[1, "one_view"] < peaks[16, "all_views"] / 4


def test_schemes_that_score_a_token_twice_with_and_without_their_name():
    """Two draws of "full" or "count" score each token twice.

    Views made by hand, whose scheme is unknown, give the same loss.
    """
    ids, loss_mask = batch("full", "token")[:2]
    h, w, old = torch.randn(4, B, L, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64), torch.zeros(B, L)
    for scheme, num in (("full", 4), ("count", 2), ("elbo", 4)):
        views = policy_views(ids, loss_mask, MASK, scheme, num=num, seeds=torch.arange(B))
        for each in (views, replace(views, scheme=None)):
            policy_loss = PolicyLoss(PolicyObjective(clip_low=1.0, clip_high=1e9))
            found = policy_loss.forward_fused(h, w, ids, each, old, torch.ones(B))
            expected = policy_loss(F.linear(h, w), ids, each, old, torch.ones(B))
            torch.testing.assert_close(found, expected)


def of_pairs(views, select):
    return replace(views, **{name: select(getattr(views, name)) for name in ("noisy", "scored", "weights")})


COPIES = {
    "concatenated trace": lambda v: of_pairs(v["trace"], lambda t: torch.cat([t, t])),
    "repeated trace": lambda v: of_pairs(v["trace"], lambda t: t[[0, 1, 1]]),
    "first masks of two pairs": lambda v: of_pairs(v["pairs"], lambda t: t[::2]),
    "stacked pair": lambda v: of_pairs(v["pair"], lambda t: torch.cat([t[:1], t[:1]])),
    "by hand": lambda v: PolicyViews(v["pairs"].noisy[::2], *(t[::2] for t in list(v["pairs"])[1:]), None, "count"),
    "modified": lambda v: v["modified"],
}


@pytest.mark.parametrize("copy", COPIES)
def test_the_scheme_of_copied_views_is_not_taken_for_their_data(copy):
    """Slices and stacks that keep the scheme, but score tokens twice, have the loss of their views from both forms."""
    ids, loss_mask = batch("full", "token")[:2]
    make = lambda scheme, **more: policy_views(ids, loss_mask, MASK, scheme, seeds=torch.arange(B), **more)  # noqa: E731
    v = {
        "trace": make("trace", step_map=STEPS),
        "pair": make("count", level=0.7),
        "pairs": make("count", num=2, level=0.7),
    }
    v["modified"] = make("trace", step_map=STEPS)
    for t, value in zip(list(v["modified"])[1:], (True, 1.0), strict=True):
        t[:, 0, 2] = value
    views = COPIES[copy](v)
    assert (views.scored.sum(0) > 1).any()
    h, w = torch.randn(len(views.scored), B, L, D), torch.randn(V, D, requires_grad=True)
    old, A = torch.full((B, L), -2.0), torch.ones(B)
    policy_loss = PolicyLoss(PolicyObjective(clip_low=1.0, clip_high=1e9))
    fused = policy_loss.forward_fused(h, w, ids, views, old, A)
    plain = policy_loss(F.linear(h, w), ids, views, old, A)
    torch.testing.assert_close(fused[:4], plain[:4])
    grads = [torch.autograd.grad(out.loss, w)[0] for out in (fused, plain)]
    torch.testing.assert_close(*grads)


def stale(old, ref):
    """Move some scores so far that ratios and k3 overflow."""
    off = torch.zeros(old.shape)
    off.view(-1)[::3], off.view(-1)[1::3] = -300.0, 300.0
    return old + off, ref - off


@pytest.mark.everyday(3)
@pytest.mark.parametrize(
    "settings",
    [{"dual_clip": 3.0}, {"dual_clip": 3.0, "kl": "k3", "kl_coef": 0.0}, {"kind": "cispo", "kl": "k2", "kl_coef": 0.1},
     {"kind": "reinforce", "kl": "k3", "kl_coef": 0.0}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("scheme", "level"), [("full", "token"), ("coupled", "token"), ("coupled", "sequence")])
def test_stale_scores_have_finite_losses_and_gradients(scheme, level, settings, backend, device):
    ids, loss_mask, views, old, advantages, ref = batch(scheme, level)
    old, ref = stale(old, ref)
    advantages = torch.where(torch.arange(len(advantages.flatten())).view(advantages.shape) % 4 == 3, 0.0, advantages)
    policy_loss = PolicyLoss(PolicyObjective(**settings), level=level)
    oracle = make_oracle(level, "tokens", (ids, loss_mask, views, old, advantages, ref), **settings)
    torch.manual_seed(0)
    h, w = torch.randn(*views.scored.shape, D), torch.randn(V, D)
    wide = [t.double().requires_grad_() for t in (h, w)]
    expected = oracle(F.linear(*wide))
    grads = [g.float() for g in torch.autograd.grad(expected, wide)]
    assert all(g.isfinite().all() for g in grads)
    leaves = [t.to(device).requires_grad_() for t in (h, w)]
    views = replace(views, **{name: t.to(device) for name, t in vars(views).items() if isinstance(t, torch.Tensor)})
    arguments = [ids.to(device), views, old.to(device), advantages.to(device), ref.to(device)]
    for out in (
        policy_loss.forward_fused(*leaves, *arguments, backend=backend),
        policy_loss(F.linear(*leaves), *arguments, backend=backend),
    ):
        torch.testing.assert_close(out.loss.cpu(), expected.float(), rtol=1e-5, atol=1e-5)
        got = [g.cpu() for g in torch.autograd.grad(out.loss, leaves)]
        torch.testing.assert_close(got, grads, rtol=1e-4, atol=1e-4)


def test_metrics_by_hand():
    """In both forms, with two tokens of log-probabilities log 1/2 and log 1/4, and one row without tokens."""
    ids, loss_mask = torch.tensor([[0, 1, 0], [0, 0, 0]]), torch.tensor([[0, 1, 1], [0, 0, 0]])
    views = policy_views(ids, loss_mask, 3, "full")
    z = torch.tensor([[0.0, 0.0, -math.inf, -math.inf], [0.25, 0.5, 0.25, 0.0], [0.25, 0.5, 0.125, 0.125]]).double()
    logits = torch.stack([z[0].log().nan_to_num(neginf=-9.0), z[1].log().clamp(min=-90), z[2].log()]).expand(1, 2, 3, 4)
    hidden, head = logits, torch.eye(4).double()
    old = torch.tensor([[math.nan, -math.log(2.0), -math.log(8.0)], [math.nan] * 3]).double()
    ref = torch.tensor([[math.nan, -math.log(2.0), -math.log(2.0)], [math.nan] * 3]).double()
    advantages = torch.tensor([[math.nan, -1.0, 3.0], [math.nan] * 3]).double()
    objective = PolicyObjective(kl="k1", kl_coef=0.5)
    policy_loss, shifted = PolicyLoss(objective), PolicyLoss(objective, shift=True)
    next_rows = logits.roll(-1, 2)  # row i predicts token i + 1
    entropy = (1.5 * math.log(2) + 1.75 * math.log(2)) / 2
    # ratios 1 and 2, the second one clipped at 1.2
    for out in (
        policy_loss(logits, ids, views, old, advantages, ref, with_entropy=True),
        policy_loss.forward_fused(hidden, head, ids, views, old, advantages, ref, with_entropy=True),
        shifted(next_rows, ids, views, old, advantages, ref, with_entropy=True),
        shifted.forward_fused(next_rows, head, ids, views, old, advantages, ref, with_entropy=True),
    ):
        kl = -math.log(2) / 2
        expected = [(1.0 - 3.6) / 2 + 0.5 * kl, 1.5, 0.5, kl, entropy]
        assert [t.item() for t in out] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "ratios", "advantages", "clipped"),
    [
        ({}, [1.3, 0.7, 1.3, 0.7, 1.0], [1.0, 1.0, -1.0, -1.0, 1.0], [1, 0, 0, 1, 0]),
        ({"dual_clip": 3.0}, [4.0, 2.0, 4.0, 0.7], [-1.0, -1.0, 1.0, 1.0], [1, 0, 1, 0]),
        ({"kind": "cispo"}, [1.3, 0.7, 1.3, 0.7], [1.0, 1.0, -1.0, -1.0], [1, 0, 1, 0]),
        ({"kind": "cispo"}, [1.3, 9.0, 1.3], [0.0, 0.0, 1.0], [0, 0, 1]),
        ({"dual_clip": 3.0}, [4.0, 0.1], [0.0, 0.0], [0, 0]),
        ({"clip_high": 0.0, "clip_low": 0.0}, [1.0, 1.0], [1.0, -1.0], [0, 0]),
        ({}, [1.3, 0.7], [0.0, 0.0], [0, 0]),
    ],
)
def test_clipped_fraction(settings, ratios, advantages, clipped):
    n = len(ratios)
    ids, head = torch.zeros(1, n, dtype=torch.long), torch.zeros(2, 1, dtype=torch.float64)
    views = policy_views(ids, torch.ones(1, n), 1, "full")
    old = -math.log(2) - torch.tensor([ratios], dtype=torch.float64).log()
    out = PolicyLoss(PolicyObjective(**settings)).forward_fused(
        torch.zeros(1, 1, n, 1, dtype=torch.float64), head, ids, views, old, torch.tensor([advantages])
    )
    assert out.clip_fraction.item() == pytest.approx(sum(clipped) / n)
    assert out.ratio.item() == pytest.approx(sum(ratios) / n)
    assert out.kl is None
    assert out.entropy is None


def test_metrics_are_detached_or_none():
    ids, _, views, old, advantages, _ = batch("coupled", "token")
    h, w = torch.randn(*views.scored.shape, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    out = PolicyLoss(PolicyObjective("reinforce")).forward_fused(h, w, ids, views, None, advantages, with_entropy=True)
    assert out.ratio is out.clip_fraction is out.kl is None
    assert not out.entropy.requires_grad
    out = PolicyLoss(PolicyObjective("reinforce", kl="k3")).forward_fused(h, w, ids, views, old, advantages, old)
    assert not out.ratio.requires_grad
    assert not out.kl.requires_grad
    assert out.clip_fraction is None  # nothing is clipped, although there are ratios


def test_the_entropy_is_the_mean_over_all_scored_rows():
    ids, _, views, old, advantages, _ = batch("coupled", "token")
    h, w = torch.randn(*views.scored.shape, D), torch.randn(V, D)
    rows = token_log_probs(h, ids.expand(views.scored.shape), weight=w, with_entropy=True)
    for level, scores in (("token", old), ("sequence", old.sum(1))):
        A = advantages if level == "token" else advantages[:, 0]
        out = PolicyLoss(PolicyObjective(), level=level).forward_fused(h, w, ids, views, scores, A, with_entropy=True)
        torch.testing.assert_close(out.entropy, rows.entropy[views.scored].mean())


@pytest.mark.parametrize("scheme", ["full", "coupled"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_nothing_supervised_is_a_loss_of_zero(scheme, level, normalize):
    ids = torch.randint(0, MASK, (B, L))
    for size, shift in ((B, False), (B, True), (0, False), (0, True)):
        supervised = torch.zeros(size, L)
        supervised[:, 0] = shift  # token 0, which no row predicts
        views = policy_views(ids[:size], supervised, MASK, scheme)
        h = torch.full((*views.scored.shape, D), math.nan, requires_grad=True)
        w = torch.randn(V, D, requires_grad=True)
        scores = torch.full((size, L) if level == "token" else (size,), math.nan)
        policy_loss = PolicyLoss(PolicyObjective(kl="k3", kl_coef=1.0), level=level, normalize=normalize, shift=shift)
        out = policy_loss.forward_fused(h, w, ids[:size], views, scores, torch.ones(size), scores, with_entropy=True)
        out.loss.backward()
        assert [t.item() for t in out] == [0.0] * 5
        assert not h.grad.any()
        assert not w.grad.any()


@pytest.mark.parametrize("scheme", ["full", "coupled", "trace"])
@pytest.mark.parametrize("level", LEVELS)
def test_unscored_rows_have_no_effect(scheme, level):
    """NaN in unscored rows, and in constants of unscored tokens, has no effect. Ids of -100 are not scored."""
    ids, loss_mask, views, old, advantages, ref = batch(scheme, level)
    policy_loss = PolicyLoss(PolicyObjective(kl="k3", kl_coef=0.1), level=level)
    h, w = torch.randn(*views.scored.shape, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    outs = []
    for bad in (0.0, math.nan):
        off = (loss_mask == 0) if level == "token" else (loss_mask == 0).all(1)
        leaf = torch.where(views.scored[..., None], h, bad).requires_grad_()
        constants = [torch.where(off, bad, t) for t in (old, advantages, ref)]
        for form in ("hidden", "logits"):
            leaf.grad = None
            if form == "hidden":
                out = policy_loss.forward_fused(leaf, w, ids, views, *constants)
            else:
                out = policy_loss(leaf @ w.T, ids, views, *constants)
            out.loss.backward()
            outs.append((out.loss.detach(), *out[1:4], leaf.grad))
    torch.testing.assert_close(outs[0], outs[2])
    torch.testing.assert_close(outs[1], outs[3])
    if level == "token":
        fewer = torch.where(torch.arange(L) == 2, -100, ids)
        without = replace(views, scored=views.scored & (torch.arange(L) != 2))
        for one, other in ((fewer, views), (ids, without)):
            outs.append(policy_loss.forward_fused(h, w, one, other, old, advantages, ref))
        torch.testing.assert_close(outs[-1], outs[-2])


@pytest.mark.parametrize("count", [7, torch.tensor(7), torch.tensor(7.0)], ids=repr)
def test_number_of_tokens_of_the_step(count):
    for scheme in ("full", "coupled"):
        for level in LEVELS:
            arguments = ids, _, views, old, advantages, _ = batch(scheme, level)
            (logits,), _ = drawn(torch.float64, (*views.scored.shape, V))(0)
            out = PolicyLoss(PolicyObjective(), level=level)(logits, ids, views, old, advantages, num_tokens=count)
            torch.testing.assert_close(out.loss, make_oracle(level, "tokens", arguments)(logits, num_tokens=7))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_a_shifted_loss_neither_scores_nor_counts_token_0(level, normalize):
    """The loss is that of views of a prompt of one token, with or without a count in the views."""
    ids, loss_mask, views, old, advantages, ref = batch("full", "token")
    old, advantages, ref = (t if level == "token" else t[:, 1] for t in (old, advantages, ref))
    with_0 = policy_views(ids, torch.ones(B, L) * loss_mask.amax(1, keepdim=True), MASK, "full")
    assert with_0.scored[:, :2, 0].all()
    h, w = torch.randn(*views.scored.shape, D), torch.randn(V, D)
    policy_loss = PolicyLoss(PolicyObjective(kl="k3", kl_coef=0.1), level=level, normalize=normalize, shift=True)
    expected = policy_loss.forward_fused(h, w, ids, views, old, advantages, ref)
    for one in (with_0, replace(with_0, num_supervised=None)):
        torch.testing.assert_close(policy_loss.forward_fused(h, w, ids, one, old, advantages, ref)[:4], expected[:4])


def test_advantages_per_sequence_apply_to_each_token():
    ids, _, views, old, _, _ = batch("coupled", "token")
    logits, A = torch.randn(*views.scored.shape, V), torch.randn(B)
    policy_loss = PolicyLoss(PolicyObjective())
    for one, other in zip(
        policy_loss(logits, ids, views, old, A),
        policy_loss(logits, ids, views, old, A[:, None].expand(B, L)),
        strict=True,
    ):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("scheme", "level", "shift"),
    [
        ("coupled", "sequence", False),
        ("coupled", "token", True),
        pytest.param("full", "token", False, marks=pytest.mark.every_case),  # a view fewer
    ],
)
def test_one_graph_under_compile(scheme, level, shift):
    """The views are created in the graph."""
    ids, loss_mask, views, old, advantages, ref = batch(scheme, level)
    policy_loss = PolicyLoss(PolicyObjective(kl="k3", kl_coef=0.1), level=level, shift=shift)

    def step(h, w):
        views = policy_views(ids, loss_mask, MASK, scheme, seeds=torch.arange(B))
        return policy_loss.forward_fused(h, w, ids, views, old, advantages, ref, with_entropy=True)

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        leaves = [torch.randn(*views.scored.shape, D, requires_grad=True), torch.randn(V, D, requires_grad=True)]
        out = function(*leaves)
        out.loss.backward()
        results.append([out.loss.detach(), *out[1:], *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("level", "form", "backend"), [("token", "hidden", "aot_eager"), ("sequence", "logits", "eager")]
)
def test_one_graph_for_all_sizes(level, form, backend):
    """B, L and K take ten values each, without reaching the limit of recompilations."""
    torch.compiler.reset()
    policy_loss = PolicyLoss(PolicyObjective(kl="k3", kl_coef=0.1), level=level, shift=form == "hidden")
    head = torch.randn(V, D)

    def step(x, ids, views, old, advantages, ref):
        if form == "hidden":
            return policy_loss.forward_fused(x, head, ids, views, old, advantages, ref, with_entropy=True)
        return policy_loss(x, ids, views, old, advantages, ref, with_entropy=True)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for i in range(10):
        B, L, K = 2 + i, 5 + (3 * i + 2) % 11, 2 + (7 * i) % 10
        ids = torch.arange(B * L).view(B, L) % MASK
        views = policy_views(ids, ids % 3 > 0, MASK, "elbo", num=K, level=0.5, seeds=torch.arange(B))
        old, ref = torch.randn(2, *((B, L) if level == "token" else (B,))) - 3
        results = []
        for function in (step, compiled):
            torch.manual_seed(0)
            x = (0.1 * torch.randn(K, B, L, D if form == "hidden" else V)).requires_grad_()
            out = function(x, ids, views, old, torch.randn(B), ref)
            out.loss.backward()
            results.append([*(t.detach() for t in out), x.grad])
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(("scheme", "level"), [("full", "token"), ("coupled", "token"), ("coupled", "sequence")])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("shift", [False, True], ids=["", "shift"])
def test_the_record_of_logits_takes_their_place(scheme, level, with_entropy, shift):
    """Equal bits, also if the record holds the transform."""
    ids, _, views, old, advantages, ref = batch(scheme, level)
    policy_loss = PolicyLoss(PolicyObjective(kl="k3", kl_coef=0.1), level=level, shift=shift)
    torch.manual_seed(0)
    rows = tuple(views.scored.shape)
    drawn = [torch.randn(shape).bfloat16() for shape in ((*rows, D), (V, D), (V,), (*rows, 2), (V, 2))]
    of_logits = {"chunk_size": 4, "num_active": math.prod(rows), "logits_dtype": torch.float32}
    transform = {"softcap": 2.0, "skip_id": MASK}

    def fused(h, w, bias, *extra):
        arguments = h, w, ids, views, old, advantages, ref
        return policy_loss.forward_fused(
            *arguments, lm_head_bias=bias, extra=extra, temperature=0.5, with_entropy=with_entropy, **of_logits,
            **transform,
        )  # fmt: skip

    def of_record(h, w, bias, *extra, inside=False):
        within, options = ({**transform, "scale": 2.0}, {}) if inside else ({}, {**transform, "temperature": 0.5})
        logits = LinearLogits(h, w, bias, extra, **of_logits, **within)
        return policy_loss(logits, ids, views, old, advantages, ref, with_entropy=with_entropy, **options)

    found = []
    for form in (fused, of_record, partial(of_record, inside=True)):
        leaves = [t.clone().requires_grad_() for t in drawn]
        out = form(*leaves)
        out.loss.backward()
        found.append([*(t.detach() for t in out if t is not None), *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))


def test_the_backend_and_the_bound_of_rows_are_passed_on():
    ids, _, views, old, advantages, _ = batch("full", "token")
    on_device = {name: t.to(DEVICE) for name, t in vars(views).items() if isinstance(t, torch.Tensor)}
    views = replace(views, **on_device)
    ids, old, advantages = ids.to(DEVICE), old.to(DEVICE), advantages.to(DEVICE)
    h, w = torch.randn(*views.scored.shape, D, device=DEVICE), torch.randn(V, D, device=DEVICE)
    policy_loss = PolicyLoss(PolicyObjective())
    expected = policy_loss.forward_fused(h, w, ids, views, old, advantages)
    found = policy_loss.forward_fused(h, w, ids, views, old, advantages, backend="triton", num_active=12, chunk_size=3)
    torch.testing.assert_close(found, expected)
    assert policy_loss.forward_fused(h, w, ids, views, old, advantages, num_active=2).loss.isnan()


def test_a_check_of_the_targets_names_the_ids(monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "1")
    ids, loss_mask, views, old, advantages, _ = batch("coupled", "token")
    logits = torch.randn(*views.scored.shape, V)
    ids = torch.where(loss_mask == 0, V + 5, ids)  # unscored, so not checked
    assert PolicyLoss(PolicyObjective())(logits, ids, views, old, advantages).loss.isfinite()
    ids[1, 3] = V
    with pytest.raises(IndexError, match=r"ids must .*\(1, 3\)"):
        PolicyLoss(PolicyObjective())(logits, ids, views, old, advantages)
    ids[1, 3] = 2
    PolicyLoss(PolicyObjective())(logits, ids, views, old, advantages)
    with pytest.raises(IndexError, match="ids must "):  # no token can be the one that is never predicted
        PolicyLoss(PolicyObjective())(logits, ids, views, old, advantages, skip_id=2)


CLIP, S = PolicyObjective(), torch.zeros(B, L)


@pytest.mark.parametrize(
    ("args", "settings", "error", "message"),
    [
        ((lambda s: s,), {}, TypeError, "objective must be a PolicyObjective, got function"),
        ((CLIP,), {"level": "row"}, ValueError, "level must be one of token, sequence, got 'row'"),
        ((CLIP,), {"normalize": "mean"}, ValueError, "normalize must be one of tokens, sequences, none, got 'mean'"),
        ((CLIP,), {"shift": "no"}, TypeError, "shift must be a bool, got str"),
    ],
)
def test_bad_settings(args, settings, error, message):
    with pytest.raises(error, match=message):
        PolicyLoss(*args, **settings)


def test_settings_are_checked_at_each_call():
    ids, _, views, old, advantages, _ = batch("full", "token")
    policy_loss = PolicyLoss(CLIP)
    policy_loss.level = "tokens"
    with pytest.raises(ValueError, match="level must be one of token, sequence, got 'tokens'"):
        policy_loss(torch.zeros(1, B, L, V), ids, views, old, advantages)


OF_LEVELS = policy_views(torch.zeros(B, L, dtype=torch.long), S, MASK, "elbo", num=3, level=0.5)
OF_LEVELS = dataclasses.replace(OF_LEVELS, weights=OF_LEVELS.weights.clone().requires_grad_())


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"ids": S}, ValueError, "ids must have dtype int64"),
        ({"ids": torch.zeros(L, dtype=torch.long)}, ValueError, r"ids must have shape \[B, L\], got \(5,\)"),
        ({"views": None}, TypeError, "views must be PolicyViews, got NoneType"),
        (
            {"views": policy_views(torch.zeros(2, L, dtype=torch.long), S[:2], MASK, "coupled")},
            ValueError,
            r"views must be \[K, B, L\] with \[B, L\] = \(3, 5\), that of ids, got \(3, 2, 5\)",
        ),
        ({"rows": torch.zeros(B, L, D)}, ValueError, r"hidden must have shape \[K, B, L, D\], got \(3, 5, 6\)"),
        (
            {"rows": torch.zeros(2, B, L, D)},
            ValueError,
            r"hidden must have shape \(3, 3, 5, 6\) \(that of the views, with one dimension more\), got \(2, 3, 5, 6\)",
        ),
        ({"lm_head_bias": torch.zeros(3)}, ValueError, r"lm_head_bias must have shape \(11,\)"),
        ({"extra": (S, S)}, ValueError, "extra"),
        ({"old": None}, ValueError, "old must be given for kind='clip', got None"),
        (
            {"old": torch.zeros(3, B, L)},
            ValueError,
            r"old must have shape \(3, 5\) for level='token', got \(3, 3, 5\)",
        ),
        ({"old": S.long()}, ValueError, "old must have dtype float16"),
        ({"old": S.clone().requires_grad_()}, ValueError, "old must not require a gradient"),
        ({"views": OF_LEVELS}, ValueError, r"views\.weights must not require a gradient"),
        ({"advantages": None}, TypeError, "advantages must be a torch.Tensor, got NoneType"),
        (
            {"advantages": torch.zeros(L)},
            ValueError,
            r"advantages must have shape \(3,\) or \(3, 5\) for level='token', got \(5,\)",
        ),
        ({"ref": S[0]}, ValueError, r"ref must have shape \(3, 5\) for level='token', got \(5,\)"),
        ({"ref": S.to("meta")}, ValueError, "ref must be on cpu like ids, got meta"),
        ({"num_tokens": torch.zeros(2)}, ValueError, "num_tokens must be a number or a 0-d tensor"),
        ({"temperature": 0.0}, ValueError, "temperature must be positive"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive"),
        ({"skip_id": V}, ValueError, r"skip_id must lie in \[0, 11\), got 11"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"num_active": 99}, ValueError, r"num_active must be an int in \[0, 45\], got 99"),
        ({"with_entropy": 1}, TypeError, "with_entropy must be a bool, got int"),
        ({"backend": "jax"}, ValueError, "backend must be one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input(changed, error, message):
    ids, _, views, old, advantages, _ = batch("coupled", "token")
    arguments = {"ids": ids, "views": views, "old": old, "advantages": advantages} | changed
    rows = arguments.pop("rows", torch.zeros(3, B, L, D))
    with pytest.raises(error, match=message):
        PolicyLoss(CLIP).forward_fused(rows, torch.zeros(V, D), **arguments)


@pytest.mark.parametrize(
    ("settings", "changed", "message"),
    [
        ({"objective": PolicyObjective(kl="k1")}, {}, "ref must be given for kl='k1', got None"),
        ({"level": "sequence"}, {}, r"old must have shape \(3,\) for level='sequence', got \(3, 5\)"),
        (
            {"level": "sequence"},
            {"old": S[:, 0]},
            r"advantages must have shape \(3,\) for level='sequence', got \(3, 5\)",
        ),
        (
            {"normalize": "none"},
            {"num_tokens": 3},
            "num_tokens must be None unless normalize is 'tokens', got it with 'none'",
        ),
    ],
)
def test_bad_input_of_other_settings(settings, changed, message):
    ids, _, views, old, advantages, _ = batch("coupled", "token")
    arguments = {"ids": ids, "views": views, "old": old, "advantages": advantages} | changed
    with pytest.raises(ValueError, match=message):
        PolicyLoss(**{"objective": CLIP, **settings})(torch.zeros(3, B, L, V), **arguments)
