"""The random bits: known answers, the layout, the same words from every path, uniformity and independence."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dllm_kernels.kernels import _philox as in_kernel
from dllm_kernels.ops import _philox
from dllm_kernels.ops._philox import STREAM_LEVEL, STREAM_SELECT, STREAM_TOKEN_HIGH, STREAM_TOKEN_LOW, Draw

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]


@triton.jit
def _philox_kernel(in_ptr, out_ptr):
    c0 = tl.load(in_ptr + tl.arange(0, 1)).to(tl.uint32)
    c1 = tl.load(in_ptr + 1 + tl.arange(0, 1)).to(tl.uint32)
    c2 = tl.load(in_ptr + 2 + tl.arange(0, 1)).to(tl.uint32)
    c3 = tl.load(in_ptr + 3 + tl.arange(0, 1)).to(tl.uint32)
    k0 = tl.load(in_ptr + 4 + tl.arange(0, 1)).to(tl.uint32)
    k1 = tl.load(in_ptr + 5 + tl.arange(0, 1)).to(tl.uint32)
    w0, w1, w2, w3 = in_kernel.philox4x32(c0, c1, c2, c3, k0, k1)
    at = tl.arange(0, 1)
    tl.store(out_ptr + at, w0.to(tl.int64))
    tl.store(out_ptr + 1 + at, w1.to(tl.int64))
    tl.store(out_ptr + 2 + at, w2.to(tl.int64))
    tl.store(out_ptr + 3 + at, w3.to(tl.int64))


@triton.jit
def _grid_kernel(
    seed_ptr, bits_ptr, level_ptr, rows, blocks, columns, STREAM: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    n = tl.arange(0, R)[:, None]
    row, block = n // blocks, n % blocks
    seed = tl.load(seed_ptr + n * 0)
    d = tl.arange(0, BLOCK)[None, :]
    bits = in_kernel.position_bits(seed, row, block, 0, STREAM, R, BLOCK)
    inside = n < rows * blocks
    tl.store(bits_ptr + n * columns + d, bits.to(tl.int64), mask=inside & (d < columns))
    tl.store(level_ptr + n, in_kernel.level_bits(seed, row, block).to(tl.int64), mask=inside)


def words(counter, key):
    """Philox at one place, from the torch implementation that the known answers pin."""
    tensors = [torch.tensor([value]) for value in (*counter, *key)]
    return [int(w) for w in _philox.philox4x32(tuple(tensors[:4]), tuple(tensors[4:]))]


def split(seed):
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers_torch(counter, key, expected):
    assert words(counter, key) == list(expected)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers_kernel(counter, key, expected, device):
    out = torch.empty(4, dtype=torch.int64, device=device)
    _philox_kernel[(1,)](torch.tensor([*counter, *key], device=device), out)
    assert out.tolist() == list(expected)


def test_known_answers_numpy():
    # The host path takes a counter (column // 4, block, row, stream): the first vector is its very first word.
    (bits,) = _philox.words_on_host(np.array(0, np.uint64), range(1), [Draw(0, 1, 4)])
    assert bits[0, 0].tolist() == list(KNOWN_ANSWERS[0][2])


@pytest.mark.parametrize("seed", SEEDS)
def test_layout_with_one_seed(seed):
    draws = [Draw(STREAM_LEVEL, 1, 3), Draw(STREAM_SELECT, 3, 10), Draw(STREAM_TOKEN_LOW, 3, 10)]
    for draw, bits in zip(draws, _philox.random_bits(torch.tensor(seed), 5, *draws), strict=True):
        assert bits.shape == (5, draw.blocks, draw.columns)
        for row, block, column in [(0, 0, 0), (0, 0, 2), (4, draw.blocks - 1, draw.columns - 1), (2, 0, 1)]:
            expected = words((column // 4, block, row, draw.stream), split(seed))[column % 4]
            assert int(bits[row, block, column]) == expected


def test_layout_with_a_seed_for_each_row():
    (bits,) = _philox.random_bits(torch.tensor(SEEDS), len(SEEDS), Draw(STREAM_TOKEN_HIGH, 2, 7))
    for row, seed in enumerate(SEEDS):
        assert int(bits[row, 1, 6]) == words((1, 1, 0, STREAM_TOKEN_HIGH), split(seed))[2]


@pytest.mark.parametrize("shared", [True, False], ids=["one seed", "a seed a row"])
@pytest.mark.parametrize(("blocks", "columns"), [(1, 1), (1, 9), (3, 4), (4, 33), (7, 1)])
def test_numpy_draws_what_torch_draws(shared, blocks, columns):
    seed = torch.tensor(-987654321987654321) if shared else torch.tensor(SEEDS)
    draws = [
        Draw(STREAM_LEVEL, 1, blocks),
        Draw(STREAM_SELECT, blocks, columns),
        Draw(STREAM_TOKEN_LOW, blocks, columns),
    ]
    expected = _philox.random_bits(seed, len(SEEDS), *draws)
    start = 2  # rows that are not the first of their batch
    part = seed if shared else seed[start:]
    got = _philox.words_on_host(part.numpy().view(np.uint64), range(start, len(SEEDS)), draws)
    for draw, theirs, ours in zip(draws, expected, got, strict=True):
        assert np.array_equal(theirs[start:].numpy(), ours[..., : draw.columns].astype(np.int64))


@pytest.mark.parametrize(("rows", "blocks", "columns"), [(3, 1, 4), (2, 7, 13), (5, 3, 32)])
def test_kernel_draws_what_torch_draws(rows, blocks, columns, device):
    seed = torch.tensor(-0x123456789ABCDEF, device=device)
    draws = (Draw(STREAM_TOKEN_HIGH, blocks, columns), Draw(STREAM_LEVEL, 1, blocks))
    bits, levels = _philox.random_bits(seed, rows, *draws)
    got_bits, got_levels = torch.full_like(bits.contiguous(), -1), torch.full_like(levels.contiguous(), -1)
    R, BLOCK = triton.next_power_of_2(rows * blocks), max(4, triton.next_power_of_2(columns))
    _grid_kernel[(1,)](seed, got_bits, got_levels, rows, blocks, columns, STREAM=STREAM_TOKEN_HIGH, R=R, BLOCK=BLOCK)
    assert torch.equal(got_bits, bits)
    assert torch.equal(got_levels, levels)


def test_numbers_at_the_ends_of_their_range():
    ends = torch.tensor([0, 2**32 - 1])
    assert _philox.uniform_from_bits(ends).tolist() == [2.0**-24, 1 - 2.0**-24]
    assert _philox.fine_uniform_from_bits(ends).tolist() == [2.0**-33, 1 - 2.0**-33]
    assert _philox.token_from_bits(ends, ends, 262_144).tolist() == [0, 262_143]
    assert _philox.token_from_bits(ends, ends, 2**31).tolist() == [0, 2**31 - 1]


def test_numbers_are_exact():
    (bits,) = _philox.random_bits(torch.tensor(3), 1, Draw(0, 1, 2000))
    high, low = bits.view(2, -1)
    coins, fine = _philox.uniform_from_bits(high), _philox.fine_uniform_from_bits(high)
    for i, (h, w) in enumerate(zip(high.tolist(), low.tolist(), strict=True)):
        assert float(coins[i]) == (2 * (h >> 9) + 1) / 2**24
        assert float(fine[i]) == (2 * h + 1) / 2**33
        for vocab_size in (1, 7, 126_464, 2**31):
            token = int(_philox.token_from_bits(high[i], low[i], vocab_size))
            assert token == ((h << 32) + w) * vocab_size >> 64


# Statistics. Every threshold below is passed by chance with probability under 1e-8, and the seeds are fixed.

Z = 6.5  # two-sided normal tail 8e-11


def chi_square_p(counts, expected):
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2), statistic / 2))


@pytest.fixture(scope="module")
def bits():
    (drawn,) = _philox.random_bits(torch.tensor(20240229), 256, Draw(STREAM_SELECT, 1, 2048))
    return drawn[:, 0]


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_each_byte_is_uniform(bits, shift):
    counts = torch.bincount(((bits >> shift) & 255).flatten(), minlength=256).double()
    assert chi_square_p(counts, torch.full_like(counts, bits.numel() / 256)) > 1e-8


def test_each_bit_is_fair(bits):
    for bit in range(32):
        ones = float(((bits >> bit) & 1).sum())
        assert abs(ones - bits.numel() / 2) < Z * (bits.numel() / 4) ** 0.5


def correlation_z(a, b):
    """Standard score of the correlation of two uniform arrays: under independence normal with variance 1."""
    a, b = (_philox.fine_uniform_from_bits(x).flatten() - 0.5 for x in (a, b))
    return float((a * b).sum() * 12 / a.numel() ** 0.5)


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 8, 64])
def test_columns_are_uncorrelated(bits, lag):
    assert abs(correlation_z(bits[:, :-lag], bits[:, lag:])) < Z


@pytest.mark.parametrize("lag", [1, 2, 7])
def test_rows_are_uncorrelated(bits, lag):
    assert abs(correlation_z(bits[:-lag], bits[lag:])) < Z


def test_consecutive_seeds_blocks_and_streams_are_uncorrelated():
    seeds = torch.arange(-128, 128)
    select, low = _philox.random_bits(seeds, 256, Draw(STREAM_SELECT, 2, 1024), Draw(STREAM_TOKEN_LOW, 2, 1024))
    assert abs(correlation_z(select[:-1], select[1:])) < Z
    assert abs(correlation_z(select[:, 0], select[:, 1])) < Z
    assert abs(correlation_z(select, low)) < Z


def test_pairs_of_neighbours_fill_the_square(bits):
    high = bits >> 28
    for a, b in ((high[:, :-1], high[:, 1:]), (high[:-1], high[1:])):
        counts = torch.bincount((a * 16 + b).flatten(), minlength=256).double()
        assert chi_square_p(counts, torch.full_like(counts, a.numel() / 256)) > 1e-8


# Where the seed comes from.

CPU = torch.device("cpu")


def test_a_call_draws_one_seed_from_its_generator():
    generator = torch.Generator().manual_seed(11)
    seeds = [int(_philox.resolve_seed(CPU, 4, generator, None)) for _ in range(3)]
    assert len(set(seeds)) == 3
    again = torch.Generator().manual_seed(11)
    assert [int(_philox.resolve_seed(CPU, 9, again, None)) for _ in range(3)] == seeds


def test_without_a_generator_the_default_one_serves():
    torch.manual_seed(5)
    first = _philox.resolve_seed(CPU, 1, None, None)
    torch.manual_seed(5)
    assert torch.equal(_philox.resolve_seed(CPU, 1, None, None), first)


@pytest.mark.parametrize(
    ("generator", "seeds", "error", "message"),
    [
        ("seven", None, TypeError, "generator must be a torch.Generator or None, got str"),
        (None, [1, 2], TypeError, "seeds must be a torch.Tensor, got list"),
        (None, torch.tensor([1, 2], dtype=torch.int32), ValueError, "seeds must have dtype int64, got int32"),
        (None, torch.tensor([1, 2, 3]), ValueError, r"seeds must have shape \(2,\), one a row, got \(3,\)"),
        (None, torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "seeds must be on cpu .* got meta"),
        (torch.Generator(), torch.tensor([1, 2]), ValueError, "generator and seeds exclude each other"),
    ],
)
def test_bad_sources(generator, seeds, error, message):
    with pytest.raises(error, match=message):
        _philox.resolve_seed(CPU, 2, generator, seeds)


def test_a_generator_of_another_device_is_refused():
    class Elsewhere(torch.Generator):
        device = torch.device("cuda", 1)

    with pytest.raises(ValueError, match="generator must be on cpu or on cuda:0 like the tensors, got one on cuda:1"):
        _philox.resolve_seed(torch.device("cuda", 0), 2, Elsewhere(), None)
    with pytest.raises(ValueError, match="generator must be on cpu like the tensors, got one on cuda:1"):
        _philox.resolve_seed(CPU, 2, Elsewhere(), None)
