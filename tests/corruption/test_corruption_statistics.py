"""The corruption routines compared with their distributions, which are computed exactly.

A correct implementation passes each comparison with probability above 1 - 1e-8 (the failing tail is a normal score
beyond 6.5, or a chi-square tail below 1e-9). The whole file therefore raises a false alarm with probability under 1e-6.
The seeds are fixed, so the outcome is the same in every run.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from dllm_kernels import corruption
from dllm_kernels.ops import gumbel_topk_mask
from tests.corruption.test_corruption import every_routine
from tests.support.routines import FIRSTS

Z = 6.5
P = 1e-9
OF_TOKENS = {name: case for name, case in FIRSTS.items() if "vocab_size" in case.parameters}


def chi_square_p(counts, expected):
    """Return the probability of a statistic at least this large."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2), statistic / 2))


def plackett_luce(log_w, k):
    """Compute the probability of each set of k chosen one after another without replacement, by enumeration."""
    weights = [math.exp(w) for w in log_w]
    sets = {}
    for order in itertools.permutations(range(len(weights)), k):
        left, probability = sum(weights), 1.0
        for i in order:
            probability *= weights[i] / left
            left -= weights[i]
        key = frozenset(order)
        sets[key] = sets.get(key, 0.0) + probability
    return sets


@pytest.mark.parametrize(
    ("log_w", "k"),
    [([0.0] * 5, 2), *(([0.0, 1.0, -2.0, 0.5, 3.0], k) for k in (1, 3)), ([-4.0, 0.0, 0.1, 0.2, 4.0], 4)],
    ids=str,
)
def test_sets_have_their_plackett_luce_probabilities(log_w, k):
    N, D = 60_000, len(log_w)
    chosen = gumbel_topk_mask(torch.tensor([log_w]).expand(N, D), k, generator=torch.Generator().manual_seed(k))
    code = (chosen * 2 ** torch.arange(D)).sum(1)
    expected = plackett_luce(log_w, k)
    seen = torch.tensor([float((code == sum(2**i for i in s)).sum()) for s in expected], dtype=torch.float64)
    assert seen.sum() == N
    theory = N * torch.tensor(list(expected.values()), dtype=torch.float64)
    often = theory > 50  # where the statistic is chi-square; the rare sets are merged into one more cell
    cells = [torch.cat([x[often], x[~often].sum()[None]]) for x in (seen, theory)]
    keep = cells[1] > 50
    assert chi_square_p(cells[0][keep], cells[1][keep]) > P
    inclusion = torch.tensor([sum(p for s, p in expected.items() if i in s) for i in range(D)])
    spread = (inclusion * (1 - inclusion) / N).sqrt()
    assert ((chosen.double().mean(0) - inclusion).abs() <= Z * spread + 1e-12).all()


def uniform_batch(B, L):
    return torch.zeros(B, L, dtype=torch.int64), torch.ones(B, L, dtype=torch.bool)


def score(values):
    """Return the mean of independent values with expectation 0 over its standard error, along dimension 0."""
    return values.mean(0) / (values.std(0) / len(values) ** 0.5).clamp(min=1e-9)


def drawn(case, B=4000, L=24, eps=0.3):
    """Corrupt rows with other tokens; returns all arguments, the part of each position, noise and ``p_mask``."""
    ids = torch.randint(0, 10_000, (B, L), generator=torch.Generator().manual_seed(3))
    given = case.constants() | case.inputs(ids)
    if "eps" in case.parameters:
        given["eps"] = eps
    _, noise, p = case(ids, torch.ones_like(ids), **given, generator=torch.Generator().manual_seed(2))
    return given, case.parts(ids), noise.double(), p.double()


@every_routine
def test_levels_have_their_distribution_above_eps_and_are_one_of_each_part(routine):
    """Independent of each other, and 1 outside of all parts. A level that is passed is used as it is."""
    given, parts, _, p = drawn(routine)
    assert (p[parts < 0] == 1).all()
    if routine.factor:  # the level of the row is that of its last position
        level = (p[:, -1:] / routine.of_positions(torch.ones_like(p))[:, -1:]).expand_as(p)
        torch.testing.assert_close(p, routine.of_positions(level), rtol=1e-6, atol=0)
        p = given["level"].double().expand_as(p) if "level" in given else level
        torch.testing.assert_close(p, level, rtol=1e-6, atol=0)
    of_part = torch.full((len(p), int(parts.max()) + 1), -1.0, dtype=p.dtype)
    of_part = of_part.scatter_reduce(1, parts.clamp(min=0), torch.where(parts < 0, -1.0, p), "amax")
    assert torch.equal(torch.where(parts < 0, 1, of_part.gather(1, parts.clamp(min=0))), p)
    if "level" in given:
        level = given["level"].double().expand(-1, max(of_part.shape[1], given["level"].shape[1]))
        assert torch.equal(of_part, torch.where(of_part < 0, of_part, level[:, : of_part.shape[1]]))
    elif "eps" in given and routine.rate is None:
        assert (of_part[of_part >= 0] > 0.3).all()
        of_part = torch.where(of_part < 0, -1, routine.cdf(((of_part - 0.3) / 0.7).clamp(0, 1)))
        there = of_part[of_part >= 0]
        counts = torch.histc(there, 20, 0, 1)
        assert chi_square_p(counts, torch.full_like(counts, len(there) / 20)) > P
        for a, b in ((of_part[:, :-1], of_part[:, 1:]), (of_part[:-1], of_part[1:])):
            both = (a >= 0) & (b >= 0)
            assert not both.any() or score(((a - 0.5) * (b - 0.5))[both]).abs() < Z
    else:
        assert (p == 1).all()


@every_routine
def test_positions_are_corrupted_at_their_rate(routine):
    """In total, in each column, in proportion to the rate, and over it; a number of positions is exact in each part."""
    given, parts, noise, p = drawn(routine)
    assert not noise[parts < 0].any()
    if routine.number:
        inside, sizes, counts = parts >= 0, *torch.zeros(2, len(p), int(parts.max()) + 1)
        sizes.scatter_add_(1, parts.clamp(min=0), inside.float())
        counts.scatter_add_(1, parts.clamp(min=0), (noise * inside).float())
        levels = torch.ones_like(sizes).scatter_(1, parts.clamp(min=0), p.float())
        expected = routine.number(levels.flatten(), sizes.long().flatten())
        assert torch.equal(counts.flatten().long(), expected)
        return
    rate = p if routine.rate is None else torch.as_tensor(routine.rate(given)).double().expand_as(p)
    rate = torch.where(parts < 0, 0.0, rate)
    assert not noise[rate == 0].any()
    assert noise[rate == 1].all()
    miss = noise - rate
    over = torch.where(rate > 0, noise / rate.clamp(min=1e-9) - 1, 0)
    for values in (miss, miss * (rate - rate.mean()), over, miss.mean(1, keepdim=True)):
        assert score(values).abs().max() < Z
    if routine.rate is None:  # the rate is the level, given which positions are independent
        assert score(miss.sum(1) ** 2 - (rate * (1 - rate)).sum(1)).abs() < Z


def test_positions_are_chosen_with_the_documented_bias():
    # Blocks of three, each with its own m: the inclusion probabilities are summed over the drawn m.
    ids, everywhere = uniform_batch(3000, 30)
    options = {"block_size": 3, "half_life_ratio": 0.25, "generator": torch.Generator().manual_seed(5)}
    _, noise, p = corruption.corrupt_blockwise(ids, everywhere, 1, **options)
    m = p.view(-1, 3)[:, 0].double()
    weight = torch.exp(math.log(2) / (0.25 * 3) * (1 - m)[:, None] * torch.arange(3))
    weight = weight / weight.sum(1, keepdim=True)
    last = torch.stack(
        [
            weight[:, a] / (1 - weight[:, b]) * weight[:, b] + weight[:, b] / (1 - weight[:, a]) * weight[:, a]
            for a, b in ((1, 2), (0, 2), (0, 1))
        ],
        dim=1,
    )
    k = torch.round(p.view(-1, 3)[:, 0] * 3).double()[:, None]
    inclusion = (k == 1) * weight + (k == 2) * (1 - last) + (k == 3)
    spread = (inclusion * (1 - inclusion)).sum(0).sqrt()
    score = (noise.view(-1, 3).double() - inclusion).sum(0) / spread
    assert score.abs().max() < Z
    assert (inclusion.mean(0).diff() > 0.02).all()  # the test has a bias to detect


@pytest.mark.parametrize("vocab_size", [5, 100])
@pytest.mark.parametrize("case", OF_TOKENS.values(), ids=OF_TOKENS)
def test_new_tokens_are_uniform_and_independent_of_each_other(case, vocab_size):
    """Routines with a MASK replace a token by any other one; without it, by any one."""
    clean, mask_token = 2, 1
    ids = torch.full((1000, 128), clean)
    case = replace(case, tokens={"vocab_size": vocab_size, "mask_token_id": mask_token})
    noisy, noise, _ = case(ids, torch.ones_like(ids), generator=torch.Generator().manual_seed(6))
    new = noisy[noise]
    others = torch.arange(vocab_size)
    if "mask_token_id" in case.parameters:
        new = new[new != mask_token]
        others = others[(others != clean) & (others != mask_token)]
    counts = torch.bincount(new, minlength=vocab_size).double()
    assert counts.sum() == counts[others].sum()
    assert chi_square_p(counts[others], torch.full((len(others),), len(new) / len(others)).double()) > P
    pairs = torch.bincount(new[:-1] % 3 * 3 + new[1:] % 3, minlength=9).double()
    third = torch.bincount(others % 3, minlength=3).double() / len(others)
    cells = torch.outer(third, third).flatten()
    assert chi_square_p(pairs[cells > 0], (len(new) - 1) * cells[cells > 0]) > P


def test_exact_sets_are_equally_likely():
    """Each of the 15 pairs of the six supervised positions is masked equally often."""
    N = 30_000
    ids = torch.zeros(N, 8, dtype=torch.int64)
    loss_mask = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1], dtype=torch.bool).expand(N, -1)
    level = torch.full((N,), 0.35)  # round(2.1)
    generator = torch.Generator().manual_seed(8)
    noise = corruption.corrupt_uniform(ids, loss_mask, 1, level=level, exact=True, generator=generator)[1]
    assert (noise.sum(1) == 2).all()
    code = (noise * 2 ** torch.arange(8)).sum(1)
    pairs = [2**a + 2**b for a, b in itertools.combinations([0, 1, 3, 4, 6, 7], 2)]
    counts = torch.tensor([float((code == pair).sum()) for pair in pairs], dtype=torch.float64)
    assert counts.sum() == N
    assert chi_square_p(counts, torch.full_like(counts, N / len(pairs))) > P


def test_mix_splits_at_its_rates():
    B, L, mask_token = 400, 500, 1
    ids = torch.full((B, L), 2)
    p, q = torch.full((B,), 0.3), torch.linspace(0.1, 0.6, B)
    generator = torch.Generator().manual_seed(9)
    noisy, noise = corruption.corrupt_mix(
        ids, ids > 0, mask_token, 100, mask_prob=p, uniform_prob=q, generator=generator
    )
    absorbed, moved = noisy == mask_token, noise & (noisy != mask_token)
    for found, rate in ((absorbed, p), (moved, q)):
        rate = rate.double()[:, None]
        score = (found.double() - rate).sum() / (rate * (1 - rate) * L).sum().sqrt()
        assert abs(float(score)) < Z
