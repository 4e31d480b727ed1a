"""The random bits: equality with NumPy on every path, layout, numbers from bits."""

import math
import threading

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dllm_kernels.backends.triton import _philox as in_kernel
from dllm_kernels.corruption import _philox, _rules, _seeds
from dllm_kernels.corruption._philox import Layout

pytestmark = pytest.mark.indices

# Random123's kat_vectors, philox4x64 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)),
    (
        (2**64 - 1,) * 4,
        (2**64 - 1,) * 2,
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]


def numpy_words(counter, key, n=4):
    """Return NumPy's words from a 256-bit counter on. NumPy increments the counter before it draws."""
    before = (counter - 1) % 2**256
    return [int(w) for w in np.random.Philox(key=key, counter=before).random_raw(n)]


def joined(words):
    return sum(word << 64 * i for i, word in enumerate(words))


def random_places(n, seed=0):
    """Draw counters and keys of random words, with some parts all zeros or all ones."""
    generator = np.random.default_rng(seed)
    parts = generator.integers(0, 2**64, (n, 6), dtype=np.uint64)
    edge = generator.random((n, 6)) < 0.2
    parts[edge] = generator.choice(np.array([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1], np.uint64), int(edge.sum()))
    return [[int(part) for part in row] for row in parts]


def signed(word):
    return word - 2**64 if word >= 2**63 else word


@triton.jit
def _philox_kernel(in_ptr, out_ptr, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    c0 = tl.load(in_ptr + i * 6, mask=i < N, other=0).to(tl.uint64)
    c1 = tl.load(in_ptr + i * 6 + 1, mask=i < N, other=0).to(tl.uint64)
    c2 = tl.load(in_ptr + i * 6 + 2, mask=i < N, other=0).to(tl.uint64)
    c3 = tl.load(in_ptr + i * 6 + 3, mask=i < N, other=0).to(tl.uint64)
    k0 = tl.load(in_ptr + i * 6 + 4, mask=i < N, other=0).to(tl.uint64)
    k1 = tl.load(in_ptr + i * 6 + 5, mask=i < N, other=0).to(tl.uint64)
    w0, w1, w2, w3 = in_kernel.philox4x64(c0, c1, c2, c3, k0, k1)
    tl.store(out_ptr + i * 4, w0.to(tl.int64), mask=i < N)
    tl.store(out_ptr + i * 4 + 1, w1.to(tl.int64), mask=i < N)
    tl.store(out_ptr + i * 4 + 2, w2.to(tl.int64), mask=i < N)
    tl.store(out_ptr + i * 4 + 3, w3.to(tl.int64), mask=i < N)


def by_torch(places):
    parts = torch.tensor([[signed(part) for part in place] for place in places]).unbind(1)
    words = torch.stack(_philox.philox4x64(parts[:4], parts[4:]), dim=1)
    return [[word % 2**64 for word in row] for row in words.tolist()]


def by_kernel(places, device):
    parts = torch.tensor([[signed(part) for part in place] for place in places], device=device)
    out = torch.empty(len(places), 4, dtype=torch.int64, device=device)
    _philox_kernel[(1,)](parts, out, len(places), BLOCK=triton.next_power_of_2(len(places)))
    return [[word % 2**64 for word in row] for row in out.tolist()]


def test_known_answers(device):
    places = [[*counter, *key] for counter, key, _ in KNOWN_ANSWERS]
    expected = [list(words) for *_, words in KNOWN_ANSWERS]
    assert [numpy_words(joined(place[:4]), joined(place[4:])) for place in places] == expected
    assert by_torch(places) == expected
    assert by_kernel(places, device) == expected


def test_torch_and_kernel_equal_numpy_at_random_places(device):
    places = random_places(100)
    expected = [numpy_words(joined(place[:4]), joined(place[4:])) for place in places]
    assert by_torch(places) == expected
    assert by_kernel(places, device) == expected


def expected_draw(seed, row, stride, d):
    """Compute one draw directly with NumPy, as the layout defines it."""
    word = numpy_words((1 << 32) + row * stride + (d >> 3), seed % 2**64)[(d & 7) >> 1]
    return word >> 32 if d & 1 else word & 0xFFFFFFFF


LAYOUTS = [Layout(1, 1), Layout(1, 9), Layout(3, 10), Layout(8, 8), Layout(9, 33), Layout(0, 5), Layout(1, 0)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["one seed", "a seed a row"])
def test_layout(layout, shared):
    seed = torch.tensor(-987654321987654321) if shared else torch.tensor(SEEDS)
    stride = math.ceil(layout.levels / 8) + math.ceil(layout.positions / 8)
    levels, draws, _ = _philox.random_bits(seed, len(SEEDS), layout)
    for b, own in enumerate(SEEDS):
        key, row = (int(seed), b) if shared else (own, 0)
        assert levels[b].tolist() == [expected_draw(key, row, stride, -1 - j) for j in range(layout.levels)]
        assert draws[b].tolist() == [expected_draw(key, row, stride, i) for i in range(layout.positions)]


def test_layout_of_whole_words():
    levels, draws, words = _philox.random_bits(torch.tensor(77), 3, Layout(2, 6, True))
    stride = 1 + 2
    for b in range(3):
        assert levels[b].tolist() == [expected_draw(77, b, stride, -1), expected_draw(77, b, stride, -2)]
        for i in range(6):
            low, high = (expected_draw(77, b, stride, d) for d in (2 * i, 2 * i + 1))
            assert int(words[b, i]) % 2**64 == high << 32 | low
            assert int(draws[b, i]) == high


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(1, 5, True), Layout(17, 40, True)], ids=str)
@pytest.mark.parametrize("shared", [True, False], ids=["one seed", "a seed a row"])
def test_numpy_draws_what_torch_draws(layout, shared):
    seed = torch.tensor(-987654321987654321) if shared else torch.tensor(SEEDS)
    expected = _philox.random_bits(seed, len(SEEDS), layout)
    start = 2  # rows that are not the first of their batch
    got = _philox.bits_on_host(seed, range(start, len(SEEDS)), layout)
    if layout.whole_words:
        levels, draws, words = got
        assert draws.dtype == np.uint64
        got = levels, draws >> 32, words
    for theirs, ours in zip(expected, got, strict=True):
        assert (theirs is None) == (ours is None)
        assert theirs is None or np.array_equal(theirs[start:].numpy(), ours.astype(np.int64))


@pytest.mark.parametrize("count", [1, 4, 11])
def test_child_seeds_come_from_a_separate_stream(count):
    """NumPy and torch give NumPy's stream under the second key word 1, for several rows at once."""
    expected = [
        [signed(int(w)) for w in np.random.Philox(key=seed % 2**64 + 2**64).random_raw(count)] for seed in SEEDS
    ]
    assert expected[0] == [signed(w) for w in numpy_words(1, 2**64 + SEEDS[0], count)]
    for child_seeds_of_path in (_philox.child_seeds, _philox._child_seeds_torch):
        found = child_seeds_of_path(torch.tensor(SEEDS), count)
        assert found.dtype == torch.int64
        assert found.is_contiguous()
        assert found.tolist() == expected
    assert _philox._child_seeds_torch(torch.empty(0, dtype=torch.int64), count).shape == (0, count)


def test_threads_draw_from_separate_generators():
    layout, results = Layout(1, 2000), {}
    seeds = list(range(8))

    def draw(seed):
        for _ in range(50):
            results[seed] = _philox.bits_on_host(torch.tensor(seed), range(1), layout)[1].copy()

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in seeds:
        assert np.array_equal(results[seed], _philox.bits_on_host(torch.tensor(seed), range(1), layout)[1])


def test_numbers_at_the_ends_of_their_range():
    ends = torch.tensor([0, 2**32 - 1])
    words = torch.tensor([0, -1])
    for convert in (lambda x: x, lambda x: x.numpy()):
        assert _rules.uniform(convert(ends)).tolist() == [2.0**-24, 1 - 2.0**-24]
        assert _rules.fine_uniform(convert(ends)).tolist() == [2.0**-33, 1 - 2.0**-33]
        for n in (1, 262_144, 2**22, 2**22 + 1, 2**31):
            assert _rules.token(convert(words), n).tolist() == [0, n - 1]


@pytest.mark.many_draws
def test_numbers_are_exact():
    _, draws, words = _philox.random_bits(torch.tensor(3), 1, Layout(1, 1000, True))
    for library in ("torch", "numpy"):
        bits, whole = (x[0] if library == "torch" else x[0].numpy() for x in (draws, words))
        coins, fine, q = _rules.uniform(bits), _rules.fine_uniform(bits), _rules.coin_bits(bits)
        levels = _rules.level(bits, 0.25)
        for i, word in enumerate(int(w) % 2**64 for w in whole):
            high = word >> 32
            assert float(coins[i]) == (2 * (high >> 9) + 1) / 2**24
            assert float(fine[i]) == (2 * high + 1) / 2**33
            assert int(q[i]) == word >> 41
            assert float(levels[i]) == np.float32(0.75) * np.float32(coins[i]) + np.float32(0.25)
        for n in (1, 7, 126_464, 2**22, 2**22 + 1, 2**31):
            tokens = _rules.token(whole, n)
            assert tokens.tolist() == [(int(w) % 2**41) * n >> 41 for w in whole]


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_a_coin_is_u_below_the_level(library):
    """Levels are at, just below and just above a u, and at the ends: 0 masks nothing, 1 everything."""
    q = np.array([0, 1, 2, 1000, 2**22, 2**23 - 2, 2**23 - 1], np.uint32)
    u = ((2 * q.astype(np.float64) + 1) / 2**24).astype(np.float32)
    levels = np.concatenate([u, np.nextafter(u, np.float32(0)), np.nextafter(u, np.float32(1)), np.float32([0, 1])])
    expected = u[None, :] < levels[:, None]
    bits, passed = (
        (torch.from_numpy(q.astype(np.int64)), torch.from_numpy(levels)) if library == "torch" else (q, levels)
    )
    assert (bits[None, :] < _rules.coin_bound(passed, bits)[:, None]).tolist() == expected.tolist()


# The source of the seed.

CPU = torch.device("cpu")


def test_a_call_draws_one_seed_from_its_generator():
    generator = torch.Generator().manual_seed(11)
    seeds = [int(_seeds.resolve_seed(CPU, 4, generator, None)) for _ in range(3)]
    assert len(set(seeds)) == 3
    again = torch.Generator().manual_seed(11)
    assert [int(_seeds.resolve_seed(CPU, 9, again, None)) for _ in range(3)] == seeds


def test_without_a_generator_the_default_one_serves():
    torch.manual_seed(5)
    first = int(_seeds.resolve_seed(CPU, 1, None, None))
    assert int(_seeds.resolve_seed(CPU, 1, None, None)) != first
    torch.manual_seed(5)
    assert int(_seeds.resolve_seed(CPU, 1, None, None)) == first
    torch.manual_seed(5)
    assert int(torch.randint(-(2**63), 2**63 - 1, ())) == first  # guaranteed to stored states of generators


def test_a_thread_started_in_inference_mode_can_draw_seeds_outside_it():
    drawn = []

    def work():
        for mode in (True, False):
            with torch.inference_mode(mode):
                drawn.append(int(_seeds.resolve_seed(CPU, 1, torch.Generator().manual_seed(3), None)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert drawn == [int(_seeds.resolve_seed(CPU, 1, torch.Generator().manual_seed(3), None))] * 2


def test_a_generator_of_another_device_is_rejected():
    class Elsewhere(torch.Generator):
        device = torch.device("cuda", 1)

    with pytest.raises(ValueError, match="generator must be on cpu or on cuda:0 like the tensors, got one on cuda:1"):
        _seeds.resolve_seed(torch.device("cuda", 0), 2, Elsewhere(), None)
    with pytest.raises(ValueError, match="generator must be on cpu like the tensors, got one on cuda:1"):
        _seeds.resolve_seed(CPU, 2, Elsewhere(), None)


@triton.jit
def _fine_uniforms(draws_ptr, out_ptr):
    at = tl.arange(0, 4)
    tl.store(out_ptr + at, in_kernel.fine_uniform(tl.load(draws_ptr + at)))


def test_fine_uniforms_are_exact_and_inside_0_and_1(device):
    draws = torch.tensor([0, 1, 2**31, 2**32 - 1], device=device)
    out = torch.empty(4, dtype=torch.float64, device=device)
    _fine_uniforms[(1,)](draws, out)
    assert out.tolist() == [(2 * draw + 1) / 2**33 for draw in draws.tolist()]
    assert torch.equal(out, _rules.fine_uniform(draws))
