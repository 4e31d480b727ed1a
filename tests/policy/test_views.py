"""Noisy views and their scores, compared with the oracle on equal random bits, and their documented properties."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import torch

import reference
from dllm_kernels import PolicyViews, eubo, nll_weights, policy_views, sample_level
from tests.conftest import usually
from tests.support.defaults import default_dtype
from tests.support.parity import assert_as_good_as_plain, assert_parity, largest_error
from tests.support.uniforms import draws

MASK = 99
SCHEMES = ("full", "coupled", "elbo", "count", "quadrature", "trace")
DRAWN = SCHEMES[:-1]
CHILDREN = 1


def batch(L=19, device="cpu"):
    """Draw rows with several, all, one and no supervised tokens, and the decoding step of each token."""
    ids = (torch.arange(4 * L).view(4, L) % 97).to(torch.int32)
    loss_mask = torch.zeros(4, L)
    loss_mask[0, 5:], loss_mask[1], loss_mask[2, 7] = 1, 1, 1
    steps = torch.full((4, L), -1)
    steps[0, 5:] = torch.arange(L - 5) * 7 % 5
    steps[1] = torch.arange(L) // 3
    steps[2, 7] = 2
    return ids.to(device), loss_mask.to(device), steps.to(device)


SEEDS = torch.tensor([3, -9, 2**62, 0])


def options(scheme, steps):
    return {"step_map": steps} if scheme == "trace" else {}


def words(seed, num, L):
    """Compute the random numbers of each draw of a row, in float64.

    They are its level in (0, 1), and the uniforms for coins and exact counts.
    """
    children = np.random.Philox(key=(seed % 2**64) + (CHILDREN << 64)).random_raw(num).view(np.int64)
    drawn = draws(torch.from_numpy(children), num, 1, L)
    return drawn.levels[:, 0], drawn.coins, drawn.fine


@pytest.mark.everyday(10)
@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("scheme", [*SCHEMES, "prompt"])
def test_views_equal_the_oracle(scheme, num, backend, device):
    prompt = 0.4 if scheme == "prompt" else 0.0
    scheme = "full" if prompt else scheme
    ids, loss_mask, steps = batch()
    level, coin, fine = (torch.stack(t, 1) for t in zip(*(words(s, num, 19) for s in SEEDS.tolist()), strict=True))
    levels = reference.policy.stratified_levels(level[0], num).float()
    if scheme == "coupled":
        levels = reference.sample_level(4 * num, "uniform", 0.2, 0.8, uniform=level.flatten()).float().view(num, 4)
    expected = reference.policy_views(
        ids, loss_mask, MASK, scheme, num=num, levels=levels.double(), uniform=fine if scheme == "count" else coin,
        prompt_prob=prompt, step_map=steps,
    )  # fmt: skip
    given = [t.to(device) for t in (ids, loss_mask)]
    more = {"prompt_prob": prompt, "seeds": SEEDS.to(device), **options(scheme, steps.to(device))}
    views = policy_views(*given, MASK, scheme, num=num, backend=backend, **more)
    assert torch.equal(views.noisy.cpu(), expected.noisy)
    assert torch.equal(views.scored.cpu(), expected.scored)
    assert views.noisy.dtype == torch.int32
    assert views.weights.dtype == torch.float32
    plain = largest_error([expected.weights.float()], [expected.weights])
    assert_as_good_as_plain([views.weights.cpu()], [expected.weights], plain)
    assert views.num_supervised.tolist() == [14, 19, 1, 0]
    assert views.scheme == scheme
    noisy, scored, weights = views
    assert noisy is views.noisy
    assert scored is views.scored
    assert weights is views.weights
    for t, before in zip(given, (ids, loss_mask), strict=True):
        assert torch.equal(t.cpu(), before)


# Published formulas, by hand. Log-probabilities of view k are -1, -2, -3, ..., so that the contribution of each view
# shows.


def scores_of(scheme, **more):
    ids, loss_mask = torch.arange(6)[None], torch.tensor([[0, 0, 1, 1, 1, 1]])
    views = policy_views(ids, loss_mask, MASK, scheme, seeds=torch.tensor([9]), **more)
    view_log_probs = -torch.arange(1.0, len(views.noisy) + 1)[:, None, None].expand(views.weights.shape)
    return views, views.token_scores(view_log_probs)[0, 2:], views.sequence_scores(view_log_probs, mean=True).item()


def test_the_mean_field_estimate_of_d1():
    """One pass has the whole completion masked; the result is the mean over two prompt masks (arXiv:2504.12216)."""
    views, tokens, mean = scores_of("full", num=2, prompt_prob=0.5)
    assert tokens.tolist() == [-1.5] * 4
    assert mean == -1.5
    assert (views.noisy[:, :, 2:] == MASK).all()
    assert not torch.equal(views.noisy[0], views.noisy[1])


def test_the_coupled_estimate_of_diffucoder():
    """Half of l_full + l_1 / t if masked, + l_2 / (1 - t) otherwise, with t = 1/4 (arXiv:2506.20639, section 4.2)."""
    views, tokens, _ = scores_of("coupled", level=0.25)
    full, mask, other = views.scored[:, 0, 2:]
    assert full.all()
    assert torch.equal(other, ~mask)
    expected = torch.where(mask, (-1 - 2 * 4) / 2, (-1 - 3 * 4 / 3) / 2)
    assert 0 < mask.sum() < 4
    torch.testing.assert_close(tokens, expected)


def test_the_elbo_of_llada():
    """Mean over the draws of the log-probabilities of the masked tokens over t (arXiv:2505.19223)."""
    views, tokens, _ = scores_of("elbo", num=2, level=torch.tensor([[0.25], [0.8]]))
    first, second = views.scored[:, 0, 2:].double()
    torch.testing.assert_close(tokens.double(), (-1 * first / 0.25 - 2 * second / 0.8) / 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("level", "x", "weights"), [(0.5, 2, (1.25, 1.25)), (0.25, 1, (2.5, 5 / 6)), (1.0, 4, (0.625, 0))]
)
def test_the_count_estimate_of_espo(level, x, weights):
    """x of n = 4 tokens masked: (n + 1) / x, and (n + 1) / (n - x) for the complement, halved (arXiv:2512.03759)."""
    views, _, _ = scores_of("count", level=level)
    assert views.scored.sum(-1).flatten().tolist() == [x, 4 - x]
    for scored, found, weight in zip(views.scored, views.weights, weights, strict=True):
        torch.testing.assert_close(found[scored], torch.full_like(found[scored], weight))


def test_the_quadrature_of_gdpo():
    """The two nodes are (1 -+ 1 / sqrt 3) / 2, each with weight 1/2 (arXiv:2510.08554)."""
    views, tokens, _ = scores_of("quadrature", num=2)
    low, high = (0.5 / ((1 + sign / math.sqrt(3)) / 2) for sign in (-1, 1))
    assert (low, high) == (pytest.approx(2.3660254), pytest.approx(0.6339746))
    first, second = views.scored[:, 0, 2:].float()
    torch.testing.assert_close(tokens, -low * first - 2 * high * second)


def test_the_trace_of_tracerl():
    """Each token is scored at the step that decoded it, given the tokens decoded before (arXiv:2509.06949)."""
    ids, loss_mask = torch.arange(6)[None], torch.tensor([[0, 0, 1, 1, 1, 0]])
    steps = torch.tensor([[-1, -1, 2, 0, 1, 2]])  # the last token was generated, but is not supervised
    views = policy_views(ids, loss_mask, MASK, "trace", step_map=steps)
    M = MASK
    assert views.noisy.tolist() == [[[0, 1, M, M, M, M]], [[0, 1, M, 3, M, M]], [[0, 1, M, 3, 4, M]]]
    assert views.scored.int().tolist() == [[[0, 0, 0, 1, 0, 0]], [[0, 0, 0, 0, 1, 0]], [[0, 0, 1, 0, 0, 0]]]
    assert torch.equal(views.weights, views.scored.float())
    two = policy_views(ids, loss_mask, MASK, "trace", num=2, step_map=steps)  # steps 0 and 1, then 2
    assert two.noisy.tolist() == [[[0, 1, M, M, M, M]], [[0, 1, M, 3, 4, M]]]
    assert two.scored.int().tolist() == [[[0, 0, 0, 1, 1, 0]], [[0, 0, 1, 0, 0, 0]]]


@pytest.mark.parametrize("num", [1, 2, 3, 7, 50])
def test_a_trace_scores_each_generated_token_once(num):
    ids, loss_mask, steps = batch()
    views = policy_views(ids, loss_mask, MASK, "trace", num=num, step_map=steps.to(torch.int16))
    assert torch.equal(views.scored.sum(0), ((loss_mask != 0) & (steps >= 0)).long())
    assert len(views.noisy) == (7 if num == 1 else num)
    assert not (views.scored & (views.noisy != MASK)).any()


@pytest.mark.parametrize("num", [2, 3, 7])
@pytest.mark.parametrize("last", [2**62, 2**63 - 1, 2**63 - 2])
def test_groups_of_steps_of_any_size(num, last):
    """The group of step s of T steps is floor(num s / T), in exact arithmetic."""
    steps = [*range(-2, 4), last // 7 * 3, last // 2, last // 2 + 1, last // 3, last // 3 * 2 + 1, last - 1, last]
    views = policy_views(IDS_OF_STEPS, IDS_OF_STEPS + 1, MASK, "trace", num=num, step_map=torch.tensor([steps]))
    group = [-1 if s < 0 else num * s // (last + 1) for s in steps]
    assert views.scored[:, 0].long().tolist() == [[int(g == k) for g in group] for k in range(num)]
    assert (views.noisy[:, 0] == MASK).tolist() == [[g >= k for g in group] for k in range(num)]


IDS_OF_STEPS = torch.zeros(1, 13, dtype=torch.int64)


# Laws


@pytest.mark.everyday(3)
@pytest.mark.parametrize(
    ("scheme", "num", "total"),
    [("full", 2, 1), ("coupled", 1, 1.5), ("coupled", 2, 1.5), ("elbo", 1, 1), ("elbo", 3, 1), ("count", 1, 1),
     ("count", 2, 1), ("quadrature", 1, 1), ("quadrature", 4, 1)],
)  # fmt: skip
def test_the_weights_of_a_token_have_their_expectation(scheme, num, total):
    """The expectation is 1. Under "coupled" it is 3/2, one half for each of its three views."""
    B, L = 2000, 6
    ids = torch.zeros(B, L, dtype=torch.int64)
    views = policy_views(ids, torch.ones_like(ids), 1, scheme, num=num, seeds=torch.arange(B))
    weights = views.weights.double().sum(0)
    spread = weights.std(0) / B**0.5
    assert ((weights.mean(0) - total).abs() <= 5 * spread + 1e-6).all()
    if scheme in ("coupled", "count"):  # a mask and its complement cover every token
        assert (views.scored.sum(0) == num * (2 if scheme == "coupled" else 1)).all()
    if scheme == "quadrature":  # each view masks at a different rate
        nodes = torch.tensor((np.polynomial.legendre.leggauss(num)[0] + 1) / 2)
        rates = views.scored.double().mean((1, 2))
        assert ((rates - nodes).abs() < 5 * (nodes * (1 - nodes) / (B * L)).sqrt()).all()
    other = policy_views(ids, torch.ones_like(ids), 1, scheme, num=num, seeds=torch.arange(B) + 1)
    assert torch.equal(other.noisy[:, :-1], views.noisy[:, 1:])


@pytest.mark.parametrize("num", [1, 2, 5, 20, 64])
def test_quadrature_integrates_polynomials_exactly(num):
    """The rates of masking and the sums of the weights are the nodes and weights of numpy."""
    nodes, factors = np.polynomial.legendre.leggauss(num)
    ids = torch.zeros(1, 400, dtype=torch.int64)
    views = policy_views(ids, torch.ones_like(ids), 1, "quadrature", num=num, seeds=torch.tensor([1]))
    seen = views.weights.amax(-1)[:, 0]
    expected = torch.tensor(factors / (nodes + 1), dtype=torch.float32)
    assert (seen > 0).sum() >= num - 3  # with a node near 0, none of 400 tokens may be masked
    torch.testing.assert_close(seen[seen > 0], expected[seen > 0])


def test_levels_of_a_row_are_stratified():
    num, L = 8, 300
    ids = torch.zeros(50, L, dtype=torch.int64)
    views = policy_views(ids, torch.ones_like(ids), 1, "elbo", num=num, seeds=torch.arange(50))
    level = 1 / (num * views.weights.amax(-1).double())
    seen = level.isfinite().all(0)
    assert seen.sum() > 30  # with a level near 0, nothing is masked and no weight shows
    gaps = level[:, seen].sort(0).values.diff(dim=0)
    torch.testing.assert_close(gaps, torch.full_like(gaps, 1 / num), rtol=0, atol=1e-6)


@pytest.mark.parametrize("num", [1, 2])
def test_counts_are_stratified_over_a_batch_without_seeds(num):
    """If rows times draws equals the number of counts, each count occurs once."""
    L = 16 * num - 1
    ids = torch.zeros(16, L, dtype=torch.int64)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        views = policy_views(ids, torch.ones_like(ids), 1, "count", num=num, generator=generator)
        x = views.scored.sum(-1).view(num, 2, 16)
        assert sorted(x[:, 0].flatten().tolist()) == list(range(L + 1))
        assert (x.sum(1) == L).all()


def test_the_draws_of_a_generator_equal_those_of_one_seed():
    """Row b has child b of the seed. The counts are spread over the batch from the level of that seed."""
    ids, loss_mask, _ = batch()
    drawn = torch.empty((), dtype=torch.int64)
    call = drawn.random_(-(2**63), 2**63 - 1, generator=torch.Generator().manual_seed(8))[None]
    rows = np.random.Philox(key=call.item() % 2**64 + (CHILDREN << 64)).random_raw(4).view(np.int64)
    expected = policy_views(ids, loss_mask, MASK, "elbo", num=2, seeds=torch.from_numpy(rows))
    views = policy_views(ids, loss_mask, MASK, "elbo", num=2, generator=torch.Generator().manual_seed(8))
    assert all(torch.equal(a, b) for a, b in zip(views, expected, strict=True))
    views = policy_views(ids, loss_mask, MASK, "count", num=2, generator=torch.Generator().manual_seed(8))
    u = sample_level(1, seeds=call).double() + torch.arange(4) / 8
    n = torch.tensor([14, 19, 1, 0])
    x = (reference.policy.stratified_levels(u, 2) * (n + 1)).floor().long()
    assert torch.equal(views.scored.sum(-1), torch.stack([x, n - x], 1).flatten(0, 1))


def test_a_batch_in_which_nothing_was_generated_has_one_view():
    ids, loss_mask, steps = batch()
    views = policy_views(ids, loss_mask, MASK, "trace", step_map=steps.fill_(-1))
    assert views.noisy.shape == (1, 4, 19)
    assert torch.equal(views.noisy[0], ids)
    assert not views.scored.any()


@pytest.mark.parametrize("scheme", ["elbo", "count", "coupled"])
def test_a_given_level_is_used(scheme):
    ids = torch.zeros(2, 1000, dtype=torch.int64)
    ones, seeds = torch.ones_like(ids), torch.tensor([0, 1])
    make = lambda level: policy_views(ids, ones, 1, scheme, num=2, level=level, seeds=seeds)  # noqa: E731
    rows = torch.tensor([0.3, 0.6])
    same = [make(rows), make(rows.double()), make(rows.expand(2, 2))]
    assert all(torch.equal(a, b) for other in same[1:] for a, b in zip(same[0], other, strict=True))
    assert torch.equal(make(0.3).weights, make(torch.tensor([0.3, 0.3])).weights)
    assert torch.equal(make(0.3).noisy, make(torch.tensor(0.3)).noisy)
    views = make(torch.tensor([[0.3, 0.6], [0.5, 1.0]]))
    masks = {"elbo": views.scored, "count": views.scored[::2], "coupled": views.scored[1::3]}[scheme]
    rates = masks.double().mean(-1)
    exact = torch.tensor([[0.3, 0.6], [0.5, 1.0]], dtype=torch.float64)
    assert ((rates - exact).abs() <= (0 if scheme == "count" else 5 * (exact * (1 - exact) / 1000).sqrt())).all()
    assert views.weights.isfinite().all()


# Seeds and generators


@pytest.mark.parametrize("scheme", DRAWN)
def test_a_generator_draws_one_seed_per_call(scheme):
    ids, loss_mask, _ = batch()
    more = {"prompt_prob": 0.5} if scheme == "full" else {}
    generator = torch.Generator().manual_seed(1)
    first = policy_views(ids, loss_mask, MASK, scheme, num=2, generator=generator, **more)
    after = generator.get_state()
    second = policy_views(ids, loss_mask, MASK, scheme, num=2, generator=generator, **more)
    again = policy_views(ids, loss_mask, MASK, scheme, num=2, generator=generator.manual_seed(1), **more)
    assert torch.equal(generator.get_state(), after)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.noisy, second.noisy)
    torch.manual_seed(1)
    default = policy_views(ids, loss_mask, MASK, scheme, num=2, **more)
    assert torch.equal(default.noisy, first.noisy)


def test_schemes_without_draws_do_not_advance_the_generator():
    ids, loss_mask, steps = batch()
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    policy_views(ids, loss_mask, MASK, "full", num=2, generator=generator)
    policy_views(ids, loss_mask, MASK, "trace", step_map=steps, generator=generator)
    assert torch.equal(generator.get_state(), before)


COMPILED = [("count", "eager"), *((scheme, "inductor") for scheme in DRAWN)]


# test_one_graph_for_all_sizes runs every scheme in a graph, and Inductor gets the same operations from all schemes.
@pytest.mark.everyday(1)
@pytest.mark.parametrize(("scheme", "compiler"), usually([COMPILED[0], ("coupled", "inductor")], COMPILED, "-".join))
def test_compiled_views_equal_eager_ones(scheme, compiler):
    ids, loss_mask, _ = batch()
    torch.compiler.reset()
    make = lambda ids, loss_mask, seeds: policy_views(ids, loss_mask, MASK, scheme, num=2, seeds=seeds)  # noqa: E731
    compiled = torch.compile(make, backend=compiler, fullgraph=True)
    for seeds in (SEEDS, SEEDS + 1):
        expected, got = make(ids, loss_mask, seeds), compiled(ids, loss_mask, seeds)
        assert torch.equal(expected.noisy, got.noisy)
        assert torch.equal(expected.scored, got.scored)
        torch.testing.assert_close(expected.weights, got.weights)
        assert got.scheme == scheme


SIZES = [(2 + i, 5 + (3 * i + 2) % 11, 2 + (7 * i) % 10) for i in range(10)]  # B, L and num, each of ten values
DYNAMIC = [(scheme, dynamic) for scheme in (*SCHEMES, "prompt") for dynamic in (None, True)]
# The second of their graphs is the one of dynamic=True, in a scheme with numbers and one with draws.
STATIC_FIRST = [c for c in DYNAMIC if c[1] is None or c[0] in ("quadrature", "coupled")]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("scheme", "dynamic"), usually(STATIC_FIRST, DYNAMIC, str))
def test_one_graph_for_all_sizes(scheme, dynamic):
    """Views and scores of ten sizes are compiled less often than the limit of recompilations allows."""
    torch.compiler.reset()

    def make(ids, loss_mask, seeds, num):
        more = {"prompt_prob": 0.4} if scheme == "prompt" else options(scheme, ids - 1)
        views = policy_views(
            ids, loss_mask, MASK, "full" if more.get("prompt_prob") else scheme, num=num, seeds=seeds, **more
        )
        log_probs = views.weights.log1p()
        fields = views.noisy, views.scored, views.weights  # torch 2.11 cannot unpack a dataclass in a graph
        return (*fields, views.token_scores(log_probs), views.sequence_scores(log_probs, mean=True))

    compiled = torch.compile(make, backend="eager", fullgraph=True, dynamic=dynamic)
    for B, L, num in SIZES:
        ids = torch.arange(B * L).view(B, L) % 13
        given = ids, (ids % 3 > 0).float(), torch.arange(B), num
        torch.testing.assert_close(compiled(*given), make(*given))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph_of_eubo_and_of_weights_for_all_sizes(dynamic):
    torch.compiler.reset()

    def bound(log_probs, views):
        return eubo(log_probs, views)

    def weights(log_probs, views):
        return nll_weights(lambda x: views.sequence_scores(x, mean=True).square().sum(), log_probs)

    for function in (bound, weights):
        compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=dynamic)
        for B, L, num in SIZES:
            ids = torch.zeros(B, L, dtype=torch.int64)
            views = policy_views(ids, ids + 1, MASK, "elbo", num=num, level=0.5, seeds=torch.arange(B))
            log_probs = drawn_log_probs(views)[1].float()
            torch.testing.assert_close(compiled(log_probs, views), function(log_probs, views))


@pytest.mark.exhaustive
def test_the_steps_of_a_trace_are_not_known_in_a_graph():
    ids, loss_mask, steps = batch()
    make = lambda steps: policy_views(ids, loss_mask, MASK, "trace", step_map=steps)  # noqa: E731
    with pytest.raises(Exception, match="num must be at least 2 for scheme 'trace' in a graph of"):
        torch.compile(make, backend="eager", fullgraph=True)(steps)
    with_breaks = torch.compile(make, backend="eager")(steps)
    assert all(torch.equal(a, b) for a, b in zip(with_breaks, make(steps), strict=True))


@pytest.mark.everyday(1)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_value_is_read_back_from_the_device(scheme):
    """Reading a value of a meta tensor raises. The steps of a trace are known from ``num``."""
    ids, loss_mask, steps = batch(device="meta")
    more = options(scheme, steps) | ({"prompt_prob": 0.1} if scheme == "full" else {})
    source = {} if scheme == "count" else {"seeds": SEEDS.to("meta")}  # which draws one more u if there are no seeds
    views = policy_views(ids, loss_mask, MASK, scheme, num=2, backend="torch", **source, **more)
    eubo(views.weights, PolicyViews(*views))
    assert views.sequence_scores(views.weights, mean=True).shape == (4,)
    if scheme == "trace":
        with pytest.raises(RuntimeError):
            policy_views(ids, loss_mask, MASK, scheme, **more)


# Scores


def drawn_log_probs(views, seed=0):
    """Draw negative values, with NaN and infinities in unscored positions."""
    values = -torch.rand(views.scored.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.1
    bad = torch.tensor([math.nan, -math.inf, math.inf], dtype=torch.float64)
    bad = bad[torch.arange(values.numel()).view(values.shape) % 3]
    return torch.where(views.scored, values, bad), torch.where(views.scored, values, 0.0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scores_equal_the_oracle_for_any_values_in_unscored_positions(scheme):
    ids, loss_mask, steps = batch()
    views = policy_views(ids, loss_mask, MASK, scheme, num=3, seeds=SEEDS, **options(scheme, steps))
    bad, clean = drawn_log_probs(views)
    as_given = reference.PolicyViews(views.noisy, views.scored, views.weights.double())

    def compared(ours, plain, upstream):
        assert_parity(
            ours,
            plain,
            lambda seed: ([drawn_log_probs(views, seed)[1].float()], upstream(torch.Generator().manual_seed(seed))),
            constants=(19, len(views.noisy)),
        )

    compared(
        views.token_scores, lambda x: reference.token_scores(x, as_given), lambda g: torch.randn(4, 19, generator=g)
    )
    for mean in (False, True):
        compared(
            functools.partial(views.sequence_scores, mean=mean),
            lambda x, mean=mean: reference.sequence_scores(x, as_given, loss_mask, mean=mean),
            lambda g: torch.randn(4, generator=g),
        )
    leaf = bad.requires_grad_()
    scores = views.sequence_scores(leaf)
    torch.testing.assert_close(scores, views.sequence_scores(clean), rtol=0, atol=0)
    scores.sum().backward()
    assert torch.equal(leaf.grad, views.weights.double())
    assert scores[3] == views.sequence_scores(bad, mean=True)[3] == 0
    assert torch.equal(views.noisy[:, 3], ids[3].expand(len(views.noisy), -1))


def test_views_made_by_hand_count_their_scored_tokens():
    scored = torch.tensor([[[True, False, False]], [[True, True, False]]])
    views = PolicyViews(torch.zeros(2, 1, 3, dtype=torch.int64), scored, scored.float() / 2)
    assert views.sequence_scores(torch.full((2, 1, 3), -2.0), mean=True).item() == -1.5


def test_eubo_by_hand():
    """With levels 1/2 and 1/4 and beta = 2: (log((e^-2 / 0.5 + e^-4 / 0.25) / 2) + log(e^-2 / 0.5 / 2)) / 2 / 2."""
    scored = torch.tensor([[[True, True, False]], [[True, False, False]]])
    weights = torch.tensor([1 / (2 * 0.5), 1 / (2 * 0.25)])[:, None, None] * scored
    views = PolicyViews(torch.zeros(2, 1, 3, dtype=torch.int64), scored, weights)
    log_probs = torch.tensor([[[-1.0, -1.0, math.nan]], [[-2.0, math.nan, math.nan]]])
    expected = (math.log((math.exp(-2) / 0.5 + math.exp(-4) / 0.25) / 2) + math.log(math.exp(-2) / 0.5 / 2)) / 4
    assert eubo(log_probs, views, beta=2).item() == pytest.approx(expected, rel=1e-6)


def with_weights(views, dtype):
    return dataclasses.replace(views, weights=views.weights.to(dtype))


SCORES = PolicyViews.token_scores, PolicyViews.sequence_scores, lambda views, x: eubo(x, views, beta=1.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_and_eubo_of_sixteen_bits_are_computed_in_float32(dtype):
    ids, loss_mask, _ = batch()
    views = with_weights(policy_views(ids, loss_mask, MASK, "elbo", num=3, seeds=SEEDS), dtype)
    log_probs = (-3 * torch.rand(views.scored.shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    for score in SCORES:
        leaves = [t.clone().requires_grad_() for t in (log_probs, log_probs.float())]
        found, expected = score(views, leaves[0]), score(with_weights(views, torch.float32), leaves[1])
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for t in (found, expected):
            t.sum().backward()
        assert torch.equal(leaves[0].grad, leaves[1].grad.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_log_probabilities_decide_the_dtype_of_scores_whatever_the_weights_have(dtype):
    ids, loss_mask, _ = batch()
    views = policy_views(ids, loss_mask, MASK, "elbo", num=2, seeds=SEEDS)
    for x in (torch.float64, torch.float32, torch.bfloat16):
        log_probs = torch.full(views.scored.shape, -0.5, dtype=x)
        expected = torch.promote_types(x, torch.float32)
        assert {score(with_weights(views, dtype), log_probs).dtype for score in SCORES} == {expected}


@pytest.mark.everyday(1)
@pytest.mark.parametrize(("scheme", "num"), [("full", 2), ("elbo", 3)])
def test_eubo_equals_the_oracle(scheme, num):
    ids, loss_mask, _ = batch()
    level = torch.tensor([[0.3, 0.5, 0.9, 0.1], [0.8, 0.6, 0.7, 0.2], [0.5, 0.05, 0.4, 0.3]])[:num]
    more = {"level": level} if scheme == "elbo" else {}
    views = policy_views(ids, loss_mask, MASK, scheme, num=num, seeds=SEEDS, **more)
    assert not views.scored.any(0)[:2].all()
    level = level if more else torch.ones(num, 4)
    assert_parity(
        lambda x: eubo(x, views),
        lambda x: reference.eubo(x, views.scored, level),
        lambda seed: (
            [drawn_log_probs(views, seed)[1].float()],
            torch.randn(4, generator=torch.Generator().manual_seed(seed)),
        ),
        constants=(19, num),
    )
    bad, clean = drawn_log_probs(views)
    leaf = bad.requires_grad_()
    found = eubo(leaf, views)
    assert torch.equal(found, eubo(clean, views))
    found.sum().backward()
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[~views.scored].any()
    assert found[3] == 0
    # no overflow, and larger than the mean of logarithms
    assert eubo(torch.full_like(clean, -1e4), views, beta=3.0).isfinite().all()
    assert torch.equal(found >= eubo(clean, views, beta=1.0), torch.ones(4, dtype=torch.bool))


# Bad input and edges


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_empty_batches(scheme, shape):
    ids = torch.zeros(shape, dtype=torch.int64)
    seeds = torch.zeros(shape[0], dtype=torch.int64)
    for source, num in itertools.product(({"seeds": seeds}, {}), (1, 2)):
        views = policy_views(ids, ids, MASK, scheme, num=num, **source, **options(scheme, ids))
        assert len(views.noisy) == num * {"coupled": 3, "count": 2}.get(scheme, 1)
        assert views.noisy.shape[1:] == views.weights.shape[1:] == shape
        assert views.sequence_scores(views.weights, mean=True).tolist() == [0] * shape[0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_ids_keep_their_dtype_and_masks_may_be_numbers(dtype):
    ids, loss_mask, _ = batch()
    expected = policy_views(ids, loss_mask.bool(), MASK, "coupled", seeds=SEEDS)
    for mask in (loss_mask.long(), loss_mask * 0.5, loss_mask * 3.0):
        views = policy_views(ids.to(dtype), mask, MASK, "coupled", seeds=SEEDS)
        assert views.noisy.dtype == dtype
        assert torch.equal(views.noisy.int(), expected.noisy)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_float32_for_any_default_dtype(scheme):
    ids, loss_mask, steps = batch()
    make = lambda **more: policy_views(ids, loss_mask, MASK, scheme, num=2, **more, **options(scheme, steps))  # noqa: E731
    expected = make(seeds=SEEDS)
    with default_dtype(torch.float64):
        views = make(seeds=SEEDS)
        assert make().weights.dtype == torch.float32
        if scheme in ("elbo", "coupled", "count"):
            assert make(level=0.5).weights.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(views, expected, strict=True))


@pytest.mark.parametrize(("scheme", "total"), [("elbo", 0.0), ("coupled", 1.0), ("count", 15 / 28)])
def test_a_level_of_0_masks_nothing(scheme, total):
    """Only the complement is left: 1/2 beside the full view; (n + 1) / (2 n) with n = 14."""
    ids, loss_mask, _ = batch()
    views = policy_views(ids, loss_mask, MASK, scheme, level=0.0, seeds=SEEDS)
    weights = views.weights.sum(0)[0, 5:]
    torch.testing.assert_close(weights, torch.full_like(weights, total))
    assert views.token_scores(-views.weights).isfinite().all()


IDS, ONES = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)
LEVEL = torch.full((2,), 0.5)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"ids": IDS.float()}, ValueError, "ids must have dtype int64, int32, int16, int8, uint8, got float32"),
        ({"ids": IDS.tolist()}, TypeError, "ids must be a torch.Tensor, got list"),
        ({"ids": IDS[0]}, ValueError, r"ids must have shape \[B, L\], got \(3,\)"),
        ({"loss_mask": ONES[:1]}, ValueError, r"loss_mask must have shape \(2, 3\) \(that of ids\), got \(1, 3\)"),
        ({"mask_token_id": 1.5}, TypeError, "mask_token_id must be an int, got float"),
        ({"ids": IDS.to(torch.int8), "mask_token_id": 200}, ValueError, "mask_token_id must fit the int8 of ids"),
        ({"scheme": "none"}, ValueError, "scheme must be one of full, coupled, .*, trace, got 'none'"),
        ({"num": 0}, ValueError, "num must be at least 1, got 0"),
        ({"num": True}, TypeError, "num must be an int, got bool"),
        ({"prompt_prob": 0.1}, ValueError, "prompt_prob must be 0 unless scheme is 'full', got 0.1 with scheme='elbo'"),
        ({"scheme": "full", "prompt_prob": 1.5}, ValueError, r"prompt_prob must lie in \[0, 1\], got 1.5"),
        ({"prompt_prob": "0"}, TypeError, "prompt_prob must be a float, got str"),
        ({"step_map": IDS}, ValueError, "step_map must be None unless scheme is 'trace', got it with scheme='elbo'"),
        ({"scheme": "trace"}, ValueError, "step_map must be given for scheme 'trace', got None"),
        ({"scheme": "trace", "step_map": ONES}, ValueError, "step_map must have dtype int64, .*, got float32"),
        ({"scheme": "trace", "step_map": IDS[:1]}, ValueError, r"step_map must have shape \(2, 3\)"),
        ({"scheme": "full", "level": 0.5}, ValueError, "level must be None unless scheme is 'coupled', 'elbo' or"),
        ({"level": 1.5}, ValueError, r"level must lie in \[0, 1\], got 1.5"),
        ({"level": LEVEL * 3}, ValueError, r"level must lie in \[0, 1\], got values from 1.5 to 1.5"),
        ({"level": "0.5"}, TypeError, "level must be a float or a tensor, got str"),
        ({"level": IDS[0]}, ValueError, "level must have dtype float16, .*, got int64"),
        ({"level": LEVEL[:1]}, ValueError, r"level must have shape \(2,\) or \(1, 2\), got \(1,\)"),
        ({"level": LEVEL.clone().requires_grad_()}, ValueError, "level must not require a gradient"),
        ({"seeds": IDS[0]}, ValueError, r"seeds must have shape \(2,\), one per row, got \(3,\)"),
        ({"scheme": "full", "seeds": IDS[0]}, ValueError, r"seeds must have shape \(2,\), one per row, got \(3,\)"),
        ({"seeds": IDS[:, 0], "generator": torch.Generator()}, ValueError, "generator and seeds exclude each other"),
        ({"generator": 5}, TypeError, "generator must be a torch.Generator or None, got int"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
        ({"level": 0.5, "backend": "cuda"}, ValueError, "backend must be one of"),
        ({"level": LEVEL.to("meta")}, ValueError, "level must be on cpu like ids, got meta"),
        ({"scheme": "trace", "step_map": IDS.to("meta")}, ValueError, "step_map must be on cpu like ids, got meta"),
    ],
)  # fmt: skip
def test_bad_input(changed, error, message):
    given = {"ids": IDS, "loss_mask": ONES, "mask_token_id": MASK, "scheme": "elbo"} | changed
    with pytest.raises(error, match=message):
        policy_views(**given)


class Split(torch.Tensor):
    device_mesh = None  # the attribute by which DTensors are recognised


def test_a_dtensor_raises_with_advice():
    given = {"ids": IDS, "loss_mask": ONES, "seeds": IDS[:, 0], "level": LEVEL, "step_map": IDS}
    for name in given:
        changed = given | {name: given[name].clone().as_subclass(Split)}
        scheme = "trace" if name == "step_map" else "elbo"
        del changed["level" if scheme == "trace" else "step_map"]
        with pytest.raises(TypeError, match=f"{name} must be a plain torch.Tensor, got DTensor"):
            policy_views(**changed, mask_token_id=MASK, scheme=scheme)
    views = policy_views(IDS, ONES, MASK, "elbo", num=2)
    for name in ("noisy", "scored", "weights", "num_supervised"):
        changed = {name: getattr(views, name).clone().as_subclass(Split)}
        with pytest.raises(TypeError, match=f"{name} must be a plain torch.Tensor, got DTensor; pass its full_tensor"):
            dataclasses.replace(views, **changed)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"noisy": None}, TypeError, "noisy must be a torch.Tensor, got NoneType"),
        ({"noisy": ONES.expand(2, 2, 3)}, ValueError, "noisy must have dtype int64, .*, got float32"),
        ({"noisy": IDS}, ValueError, r"noisy must have shape \(2, 2, 3\) \(that of scored\), got \(2, 3\)"),
        ({"scored": ONES.expand(2, 2, 3)}, ValueError, "scored must have dtype bool, got float32"),
        ({"scored": ONES.bool()}, ValueError, r"scored must have shape \[K, B, L\], got \(2, 3\)"),
        ({"weights": ONES.bool().expand(2, 2, 3)}, ValueError, "weights must have dtype float16, .*, got bool"),
        ({"weights": ONES.expand(1, 2, 3)}, ValueError, r"weights must have shape \(2, 2, 3\) \(that of scored\)"),
        ({"weights": torch.ones(2, 2, 3, device="meta")}, ValueError, "weights must be on cpu like scored, got meta"),
        ({"num_supervised": LEVEL}, ValueError, "num_supervised must have dtype int64, .*, got float32"),
        ({"num_supervised": 3}, TypeError, "num_supervised must be a torch.Tensor, got int"),
        ({"num_supervised": IDS}, ValueError, r"num_supervised must have shape \(2,\) \(one per row\), got \(2, 3\)"),
        ({"num_supervised": torch.tensor([3, -2])}, ValueError, "num_supervised must not be negative, got -2"),
        ({"scheme": "mine"}, ValueError, "scheme must be one of full, .*, trace, got 'mine'"),
    ],
)
def test_bad_fields_of_views(changed, error, message):
    views = policy_views(IDS, ONES, MASK, "elbo", num=2)
    with pytest.raises(error, match=message):
        dataclasses.replace(views, **changed)


@pytest.mark.parametrize(
    ("method", "scheme"),
    [("d1", "full"), ("diffu-grpo", "full"), ("Diffu_GRPO", "full"), ("wd1", "full"), ("DiffuCoder", "coupled"),
     ("coupled-GRPO", "coupled"), ("vrpo", "elbo"), ("LLaDA 1.5", "elbo"), ("spg", "elbo"), ("bgpo", "elbo"),
     ("ESPO", "count"), ("gdpo", "quadrature"), ("TraceRL", "trace"), ("dipo", "trace"), ("mdpo", "trace")],
)  # fmt: skip
def test_the_name_of_a_method_raises_with_its_scheme(method, scheme):
    message = f"scheme must be one of full, .*, trace, got '{method}'; pass '{scheme}', the views of this method"
    with pytest.raises(ValueError, match=message):
        policy_views(IDS, ONES, MASK, method)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda v: v.token_scores(ONES), ValueError, r"log_probs must have shape \(2, 2, 3\) \(that of the views\)"),
        (lambda v: v.sequence_scores(IDS.expand(2, 2, 3)), ValueError, "log_probs must have dtype float16"),
        (lambda v: v.sequence_scores(None), TypeError, "log_probs must be a torch.Tensor, got NoneType"),
        (lambda v: v.sequence_scores(v.weights, mean=1.0), TypeError, "mean must be a bool, got float"),
        (lambda v: eubo(v.weights, v.weights), TypeError, "views must be PolicyViews, got torch.Tensor"),
        (lambda v: eubo(v.weights[0], v), ValueError, "log_probs must have shape"),
        (lambda v: v.token_scores(v.weights.to("meta")), ValueError, "log_probs must be on cpu like views, got meta"),
        (lambda v: eubo(v.weights, v, beta=0.0), ValueError, "beta must be above 0, got 0"),
        (lambda v: eubo(v.weights, v, beta=math.nan), ValueError, "beta must be finite, got nan"),
        (
            lambda v: eubo(v.weights, policy_views(IDS, ONES, MASK, "count")),
            ValueError,
            "views must be of scheme full or elbo for eubo, got 'count'",
        ),
    ],
)
def test_bad_scores(call, error, message):
    with pytest.raises(error, match=message):
        call(policy_views(IDS, ONES, MASK, "elbo", num=2))


@pytest.mark.parametrize("num", [1, 2])
def test_steps_of_a_narrow_type_in_a_padded_row(num):
    """Padding was marked by -1, which is step 255 in uint8."""
    ids, steps, start = torch.arange(4)[None], torch.tensor([[0, 1, 0, 2]]), torch.tensor([1])
    make = lambda step_map: policy_views(ids, ids >= 0, MASK, "trace", num=num, step_map=step_map, start=start)  # noqa: E731
    expected, views = make(steps), make(steps.to(torch.uint8))
    assert torch.equal(views.noisy, expected.noisy)
    assert torch.equal(views.scored, expected.scored)
