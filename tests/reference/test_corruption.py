"""The oracle of corruption: every number of masked positions, threshold and weight worked out by hand."""

import math

import pytest
import torch

from reference import (
    complementary,
    corrupt_all_masked,
    corrupt_blockwise,
    corrupt_mix,
    corrupt_uniform,
    corrupt_uniform_random,
    sample_level,
)

M = 99
MASK_DTYPES = [torch.bool, torch.int64, torch.float32]


def ids(B, L):
    return torch.arange(B * L).reshape(B, L)


def masked(corrupted, b=0):
    return corrupted.noise_mask[b].nonzero().flatten().tolist()


def noise_for(*gumbels):
    """Compute one row of draws u whose Gumbel noise -log(-log u) is given: u = exp(-exp(-g))."""
    return torch.tensor([[math.exp(-math.exp(-g)) for g in gumbels]])


# Uniform


@pytest.mark.parametrize("dtype", MASK_DTYPES)
def test_uniform_masks_supervised_positions_below_the_sequences_probability(dtype):
    # p = 0.9 t + 0.1: 0.1 for t = 0, 0.55 for t = 0.5
    u = torch.tensor([[0.09, 0.11, 0.5, 0.09], [0.54, 0.56, 0.01, 0.54]])
    supervised = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]]).to(dtype)
    out = corrupt_uniform(ids(2, 4), supervised, M, 0.1, t_uniform=torch.tensor([0.0, 0.5]), uniform=u)
    assert out.noisy_input_ids.tolist() == [[M, 1, 2, 3], [M, 5, 6, M]]
    assert out.noise_mask.tolist() == [[True, False, False, False], [True, False, False, True]]
    torch.testing.assert_close(out.p_mask, torch.tensor([[0.1] * 4, [0.55] * 4]))


def test_uniform_threshold_is_strict():
    out = corrupt_uniform(ids(1, 2), None, M, 0.0, t_uniform=torch.tensor([0.5]), uniform=torch.tensor([[0.5, 0.25]]))
    assert masked(out) == [1]


# Blockwise: how many


@pytest.mark.parametrize(
    ("m", "in_sequence", "in_block"),
    [
        (0.0, 1, 0),  # 0, but a sequence masks at least one
        (0.125, 1, 0),  # 4 m = 0.5, half to even: 0
        (0.15, 1, 1),  # 0.6
        (0.375, 2, 2),  # 1.5 to 2
        (0.625, 2, 2),  # 2.5 to 2
        (0.875, 4, 4),  # 3.5 to 4
        (0.99, 4, 4),
    ],
)
def test_blockwise_masks_exactly_the_rounded_share(m, in_sequence, in_block):
    draw = torch.tensor([m])
    assert corrupt_blockwise(ids(1, 4), None, M, eps=0.0, m_uniform=draw).noise_mask.sum() == in_sequence
    block = corrupt_blockwise(ids(1, 4), None, M, 4, eps=0.0, m_uniform=draw[None])
    assert block.noise_mask.sum() == in_block


def test_blockwise_level_is_eps_at_least_and_comes_back_as_p_mask():
    # m = 0.2 + 0.8 U for each block: 0.2 and 0.6
    out = corrupt_blockwise(ids(1, 5), None, M, 3, eps=0.2, m_uniform=torch.tensor([[0.0, 0.5]]))
    torch.testing.assert_close(out.p_mask, torch.tensor([[0.2, 0.2, 0.2, 0.6, 0.6]]))
    assert out.noise_mask[0, :3].sum() == 1  # round(0.6)
    assert out.noise_mask[0, 3:].sum() == 1  # round(0.6 * 2) = round(1.2): the short block's own length
    whole = corrupt_blockwise(ids(2, 5), None, M, eps=0.2, m_uniform=torch.tensor([0.0, 0.5]))
    torch.testing.assert_close(whole.p_mask, torch.tensor([[0.2] * 5, [0.6] * 5]))
    assert whole.noise_mask.sum(1).tolist() == [1, 3]


@pytest.mark.parametrize(("m", "count"), [(0.5, 0), (0.51, 1)])
def test_blocks_of_one_position(m, count):
    out = corrupt_blockwise(ids(1, 3), None, M, 1, eps=0.0, m_uniform=torch.full((1, 3), m))
    assert out.noise_mask.sum() == 3 * count


def test_each_block_has_its_own_level_and_selection():
    u = noise_for(2.0, 0.0, 2.0, 0.0, 0.0, 2.0)
    # three blocks of two, m = 0, 0.5, 1 - 2**-24: 0, 1 and 2 positions; the slope is ln 2 at most
    levels = torch.tensor([[0.0, 0.5, 1.0 - 2.0**-24]])
    out = corrupt_blockwise(ids(1, 6), None, M, 2, eps=0.0, half_life_ratio=0.5, m_uniform=levels, uniform=u)
    assert out.noisy_input_ids.tolist() == [[0, 1, M, 3, M, M]]


# Blockwise: which ones. lambda = ln 2 / (half_life_ratio * size)


@pytest.mark.parametrize(("noise_of_the_first", "expected"), [(7.0, [3]), (9.0, [0])])
def test_blockwise_weight_grows_by_half_lives(noise_of_the_first, expected):
    # one of four at m = 0, lambda = ln 2: the last one weighs 2**3 = 8, the first one times its noise 7 or 9
    u = noise_for(math.log(noise_of_the_first), 0.0, 0.0, 0.0)
    out = corrupt_blockwise(ids(1, 4), None, M, eps=0.0, m_uniform=torch.zeros(1), uniform=u)
    assert masked(out) == expected


@pytest.mark.parametrize(("noise_of_the_first", "expected"), [(2.1, [3]), (2.3, [0])])
def test_blockwise_slope_follows_the_block_size_the_level_and_the_half_life(noise_of_the_first, expected):
    # a block of 8 of which 4 are there: k = round(0.25 * 4) = 1 and lambda = ln 2 / (0.25 * 8) = ln 2 / 2, so
    # the last one weighs 2**(0.75 * 3 / 2) = 2**1.125 = 2.18
    u = noise_for(math.log(noise_of_the_first), 0.0, 0.0, 0.0)
    quarter = torch.tensor([[0.25]])
    out = corrupt_blockwise(ids(1, 4), None, M, 8, eps=0.0, m_uniform=quarter, uniform=u)
    assert masked(out) == expected
    # the same weights from blocks of 4 with half the rate
    same = corrupt_blockwise(ids(1, 4), None, M, 4, eps=0.0, half_life_ratio=0.5, m_uniform=quarter, uniform=u)
    assert masked(same) == expected


def test_places_count_from_the_start_of_each_block():
    # two of four, as one pair in each block; place 1 weighs 2**(0.5 * 1 / (0.25 * 2)) = 2, noise 1.5 < 2 < 3
    u = noise_for(math.log(1.5), 0.0, math.log(3.0), 0.0)
    out = corrupt_blockwise(ids(1, 4), None, M, 2, eps=0.0, m_uniform=torch.full((1, 2), 0.5), uniform=u)
    assert masked(out) == [1, 2]


@pytest.mark.parametrize("dtype", MASK_DTYPES)
@pytest.mark.parametrize("block_size", [None, 4])
def test_unsupervised_positions_are_dropped_only_after_the_selection(dtype, block_size):
    # m = 0.5 chooses two of four, the two with the largest noise, one of which is not supervised
    u = noise_for(20.0, 0.0, 20.0, 0.0)
    supervised = torch.tensor([[0, 1, 1, 1]]).to(dtype)
    out = corrupt_blockwise(ids(1, 4), supervised, M, block_size, eps=0.0, m_uniform=torch.tensor([0.5]), uniform=u)
    assert masked(out) == [2]
    assert out.noisy_input_ids.tolist() == [[0, 1, M, 3]]


# Random tokens


def test_uniform_random_replaces_by_the_given_tokens_below_the_level_of_the_block():
    # t = 0.2 + 0.8 U: 0.2 and 0.6 over blocks of three and two
    u = torch.tensor([[0.1, 0.3, 0.1, 0.5, 0.7]])
    tokens = torch.tensor([[50, 51, 52, 53, 54]])
    supervised, t = torch.tensor([[1, 1, 0, 1, 1]]), torch.tensor([[0.0, 0.5]])
    out = corrupt_uniform_random(ids(1, 5), supervised, 60, 3, 0.2, t_uniform=t, uniform=u, tokens=tokens)
    assert out.noisy_input_ids.tolist() == [[50, 1, 2, 53, 4]]
    assert masked(out) == [0, 3]
    assert out.p_mask.equal(torch.ones(1, 5))


def test_uniform_random_has_one_level_for_each_sequence_without_blocks():
    u, tokens, t = torch.full((2, 3), 0.4), torch.full((2, 3), 8), torch.tensor([0.0, 0.5])
    out = corrupt_uniform_random(ids(2, 3), None, 9, None, 0.2, t_uniform=t, uniform=u, tokens=tokens)
    assert out.noisy_input_ids.tolist() == [[0, 1, 2], [8, 8, 8]]


def test_uniform_random_tokens_cover_the_vocabulary():
    # t = 1 here: every position is replaced. 4000 tokens over 5: each within 5.5 standard deviations of a
    # binomial with p = 1/5, a false alarm below 5 * 4e-8 < 1e-6.
    clean, generator = torch.full((1, 4000), 7), torch.Generator().manual_seed(0)
    out = corrupt_uniform_random(clean, None, 5, eps=0.0, t_uniform=torch.ones(1), generator=generator)
    counts = torch.bincount(out.noisy_input_ids[0], minlength=5)
    assert counts.shape == (5,)
    assert (counts - 800).abs().max() < 5.5 * math.sqrt(4000 * 0.2 * 0.8)


# All masked


@pytest.mark.parametrize("dtype", MASK_DTYPES)
def test_all_masked(dtype):
    out = corrupt_all_masked(ids(1, 4), torch.tensor([[1, 0, 0, 1]]).to(dtype), M)
    assert out.noisy_input_ids.tolist() == [[M, 1, 2, M]]
    assert masked(out) == [0, 3]
    assert out.p_mask.equal(torch.ones(1, 4))


# All of them

ROUTINES = [
    lambda x, supervised, g: corrupt_uniform(x, supervised, M, generator=g),
    lambda x, supervised, g: corrupt_blockwise(x, supervised, M, generator=g),
    lambda x, supervised, g: corrupt_blockwise(x, supervised, M, 3, generator=g),
    lambda x, supervised, g: corrupt_uniform_random(x, supervised, 90, generator=g),
    lambda x, supervised, g: corrupt_uniform_random(x, supervised, 90, 3, generator=g),
    lambda x, supervised, g: corrupt_all_masked(x, supervised, M),
]


@pytest.mark.parametrize("routine", ROUTINES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_outputs_and_inputs(routine, dtype):
    x, supervised = ids(3, 8).to(dtype) + 100, torch.arange(24).reshape(3, 8) % 3 > 0
    before = x.clone(), supervised.clone()
    noisy, noise, p = routine(x, supervised, torch.Generator().manual_seed(0))
    assert (noisy.dtype, noise.dtype, p.dtype) == (dtype, torch.bool, torch.float32)
    assert noisy.shape == noise.shape == p.shape == x.shape
    assert (noisy == x)[~noise].all()
    assert (noisy != x)[noise].all()
    assert noise.any()
    assert not noise[~supervised].any()
    assert ((p >= 1e-3) & (p <= 1)).all()
    assert x.equal(before[0])
    assert supervised.equal(before[1])
    assert noise.data_ptr() != supervised.data_ptr()


@pytest.mark.parametrize("routine", ROUTINES[:-1])
def test_draws_come_from_the_generator_alone_or_from_torchs_own(routine):
    def draw(seed, supervised=None):
        state = torch.get_rng_state()
        out = routine(ids(4, 30), supervised, torch.Generator().manual_seed(seed))
        assert torch.get_rng_state().equal(state)
        return out

    first = draw(1)
    for again in (draw(1), draw(1, torch.ones(4, 30))):  # no mask supervises everything
        assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert not first.noise_mask.equal(draw(2).noise_mask)
    torch.manual_seed(7)
    first = routine(ids(4, 30), None, None)
    torch.manual_seed(7)
    assert all(a.equal(b) for a, b in zip(first, routine(ids(4, 30), None, None), strict=True))


# The caller's level, exact counts, samplers, complements


def test_a_given_level_is_used_as_it_is():
    u = torch.tensor([[0.1, 0.2, 0.3], [0.0, 0.1, 0.2]])
    out = corrupt_uniform(ids(2, 3), None, M, 0.5, level=torch.tensor([0.2, 0.0]), uniform=u)
    assert out.noise_mask.tolist() == [[True, False, False], [False] * 3]
    torch.testing.assert_close(out.p_mask, torch.tensor([[0.2] * 3, [0.0] * 3]))
    blocks = corrupt_blockwise(ids(1, 5), None, M, 3, 0.5, level=torch.tensor([[1.0, 0.5]]))
    assert blocks.noise_mask[0].sum() == 3 + 1
    assert blocks.p_mask.tolist() == [[1.0, 1.0, 1.0, 0.5, 0.5]]
    tokens = corrupt_uniform_random(ids(1, 4), None, 9, 2, level=torch.tensor([[1.0, 0.0]]))
    assert masked(tokens) == [0, 1]
    assert tokens.p_mask.tolist() == [[1.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize(("level", "count"), [(0.0, 0), (0.1, 1), (0.5, 2), (0.7, 3), (1.0, 4)])
def test_exact_masks_the_rounded_share_of_the_supervised_by_the_largest_draws(level, count):
    supervised = torch.tensor([[1, 0, 1, 1, 1]])
    u = torch.tensor([[0.3, 0.99, 0.5, 0.5, 0.1]])  # the ranking is 2, 3, 0, 4
    out = corrupt_uniform(ids(1, 5), supervised, M, level=torch.tensor([level]), exact=True, uniform=u)
    assert masked(out) == sorted([2, 3, 0, 4][:count])


def test_exact_masks_none_where_none_is_supervised():
    out = corrupt_uniform(ids(1, 3), torch.zeros(1, 3), M, level=torch.tensor([0.9]), exact=True)
    assert masked(out) == []


def test_levels_by_hand():
    u = torch.tensor([0.25, 0.5, 0.75, 0.0])
    assert sample_level(4, uniform=u).tolist() == u.tolist()
    assert sample_level(4, "antithetic", uniform=u).tolist() == [0.25, 0.75, 0.75, 0.25]
    assert sample_level(4, "stratified", uniform=u).tolist() == [0.25, 0.5, 0.75, 0.0]
    assert sample_level(4, "stratified", 0.5, 1.0, uniform=u).tolist() == [0.625, 0.75, 0.875, 0.5]


def test_complementary_by_hand():
    noise, supervised = torch.tensor([[1, 0, 0, 1]]), torch.tensor([[1, 1, 0, 0]])
    assert complementary(noise, supervised).tolist() == [[False, True, False, False]]


def test_mix_by_hand():
    # u: MASK below 0.3, another token below 0.8. Of 5 tokens the others of 1 beside MASK = 4 are 0, 2, 3
    clean = torch.tensor([[1, 1, 1, 1, 1, 4, 4]])
    u = torch.tensor([[0.29, 0.3, 0.79, 0.8, 0.1, 0.2, 0.5]])
    supervised = torch.tensor([[1, 1, 1, 1, 0, 1, 1]])
    noisy, noise = corrupt_mix(
        clean, supervised, 4, 5, mask_prob=torch.tensor([0.3]), uniform_prob=torch.tensor([0.5]),
        uniform=u, tokens=torch.tensor([[0, 0, 2, 0, 0, 0, 0]]),
    )  # fmt: skip
    assert noisy.tolist() == [[4, 0, 3, 1, 1, 4, 4]]
    assert noise.tolist() == [[True, True, True, False, False, True, False]]
