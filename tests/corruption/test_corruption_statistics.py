"""The corruption routines compared with their distributions, which are computed exactly.

A correct implementation passes each comparison with probability above 1 - 1e-8 (the failing tail is a normal score
beyond 6.5, or a chi-square tail below 1e-9). The whole file therefore raises a false alarm with probability under 1e-6.
The seeds are fixed, so the outcome is the same in every run.
"""

import itertools
import math

import pytest
import torch

from dllm_kernels import corruption
from dllm_kernels.ops import gumbel_topk_mask

Z = 6.5
P = 1e-9


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


def test_levels_are_uniform_and_coins_land_at_their_rate():
    ids, everywhere = uniform_batch(4000, 64)
    eps = 0.1
    _, noise, p = corruption.corrupt_uniform(ids, everywhere, 1, eps, torch.Generator().manual_seed(2))
    t = (p[:, 0].double() - eps) / (1 - eps)
    counts = torch.histc(t, 20, 0, 1)
    assert chi_square_p(counts, torch.full_like(counts, 4000 / 20)) > P
    p = p.double()
    score = (noise.double() - p).sum() / (p * (1 - p)).sum().sqrt()
    assert abs(float(score)) < Z
    # coins are independent: the variance of a row's count is that of independent coins
    p, noise = p[p[:, 0] < 0.9], noise[p[:, 0] < 0.9]  # near 1, a single miss would weigh as much as a thousand rows
    rest = ((noise.double() - p).sum(1) ** 2) / (64 * p[:, 0] * (1 - p[:, 0]))
    assert abs(float(rest.mean()) - 1) < Z * (2.1 / len(p)) ** 0.5


@pytest.mark.parametrize("block_size", [8, None])
def test_counts_have_the_distribution_of_the_rounded_level(block_size):
    length, eps = 8, 0.0
    ids, everywhere = uniform_batch(2000 if block_size else 16_000, 64 if block_size else length)
    _, noise, _ = corruption.corrupt_blockwise(
        ids, everywhere, 1, block_size, eps, generator=torch.Generator().manual_seed(4)
    )
    k = noise.view(-1, length).sum(1)
    share = torch.full((length + 1,), 1 / length, dtype=torch.float64)
    share[0] = share[-1] = 0.5 / length  # [0, 1/2) rounds to 0; it is half as wide as the interval that rounds to 1
    if block_size is None:  # each sequence masks at least one position
        share[1] += share[0]
        share[0] = 0
    counts = torch.bincount(k, minlength=length + 1).double()
    assert counts[share == 0].sum() == 0
    assert chi_square_p(counts[share > 0], (k.numel() * share)[share > 0]) > P


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


@pytest.mark.parametrize("vocab_size", [3, 100])
def test_replacement_tokens_are_uniform_and_independent_of_the_coins(vocab_size):
    ids = torch.full((1000, 128), 7777)
    everywhere = torch.ones_like(ids)
    noisy, noise, p_mask = corruption.corrupt_uniform_random(
        ids, everywhere, vocab_size, 16, generator=torch.Generator().manual_seed(6)
    )
    assert (p_mask == 1).all()
    tokens = noisy[noise]
    counts = torch.bincount(tokens, minlength=vocab_size).double()
    assert chi_square_p(counts, torch.full_like(counts, tokens.numel() / vocab_size)) > P
    pairs = torch.bincount(tokens[:-1] % 3 * 3 + tokens[1:] % 3, minlength=9).double()
    third = torch.bincount(torch.arange(vocab_size) % 3, minlength=3).double() / vocab_size
    assert chi_square_p(pairs, (tokens.numel() - 1) * torch.outer(third, third).flatten()) > P


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


@pytest.mark.parametrize("vocab_size", [5, 100])
def test_mix_splits_at_its_rates_and_other_tokens_are_uniform(vocab_size):
    B, L, clean, mask_token = 400, 500, 2, 1
    ids = torch.full((B, L), clean)
    p, q = torch.full((B,), 0.3), torch.linspace(0.1, 0.6, B)
    generator = torch.Generator().manual_seed(9)
    noisy, noise = corruption.corrupt_mix(
        ids, ids > 0, mask_token, vocab_size, mask_prob=p, uniform_prob=q, generator=generator
    )
    absorbed, moved = noisy == mask_token, noise & (noisy != mask_token)
    for found, rate in ((absorbed, p), (moved, q)):
        rate = rate.double()[:, None]
        score = (found.double() - rate).sum() / (rate * (1 - rate) * L).sum().sqrt()
        assert abs(float(score)) < Z
    counts = torch.bincount(noisy[moved], minlength=vocab_size).double()
    assert counts[clean] == counts[mask_token] == 0
    others = torch.tensor([v for v in range(vocab_size) if v not in (clean, mask_token)])
    assert chi_square_p(counts[others], torch.full((len(others),), float(moved.sum()) / len(others)).double()) > P
