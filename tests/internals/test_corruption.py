"""Corruption: the random bits, the arithmetic of each code path, and the choice of the path."""

import functools
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dllm_kernels import corruption
from dllm_kernels._graph import _opaque
from dllm_kernels.backends.triton import _philox as in_kernel
from dllm_kernels.backends.triton import corruption as kernels
from dllm_kernels.corruption import _corrupt as ops
from dllm_kernels.corruption import _gumbel, _noise, _philox, _rules, _seeds
from dllm_kernels.corruption import _topk as op
from dllm_kernels.corruption._noise import Noise
from dllm_kernels.ops import gumbel_topk_mask
from tests.conftest import INTERPRETED
from tests.corruption.test_corruption import COUNTS, more_routines
from tests.ops.test_gumbel_topk import SHAPES, example
from tests.support import routines
from tests.support.parity import same
from tests.support.routines import MASK, MORE, OTHERS, ROUTINES, V, batch
from tests.support.uniforms import draws, uniforms

pytestmark = pytest.mark.indices

# Random bits


def random_places(n):
    """Draw counters and keys of random words, with some parts all zeros or all ones."""
    generator = np.random.default_rng(0)
    parts = generator.integers(0, 2**64, (n, 6), dtype=np.uint64)
    edge = generator.random((n, 6)) < 0.2
    parts[edge] = generator.choice(np.array([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1], np.uint64), int(edge.sum()))
    return parts


@triton.jit
def _philox_kernel(in_ptr, out_ptr, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    c0 = tl.load(in_ptr + i, mask=i < N, other=0).to(tl.uint64)
    c1 = tl.load(in_ptr + N + i, mask=i < N, other=0).to(tl.uint64)
    c2 = tl.load(in_ptr + 2 * N + i, mask=i < N, other=0).to(tl.uint64)
    c3 = tl.load(in_ptr + 3 * N + i, mask=i < N, other=0).to(tl.uint64)
    k0 = tl.load(in_ptr + 4 * N + i, mask=i < N, other=0).to(tl.uint64)
    k1 = tl.load(in_ptr + 5 * N + i, mask=i < N, other=0).to(tl.uint64)
    w0, w1, w2, w3 = in_kernel.philox4x64(c0, c1, c2, c3, k0, k1)
    tl.store(out_ptr + i, w0.to(tl.int64), mask=i < N)
    tl.store(out_ptr + N + i, w1.to(tl.int64), mask=i < N)
    tl.store(out_ptr + 2 * N + i, w2.to(tl.int64), mask=i < N)
    tl.store(out_ptr + 3 * N + i, w3.to(tl.int64), mask=i < N)


def test_torch_and_kernel_equal_numpy_at_random_places(device):
    """NumPy increments the counter before it draws."""
    places = random_places(100)
    expected = []
    for *counter, k0, k1 in places.tolist():
        before = (sum(word << 64 * i for i, word in enumerate(counter)) - 1) % 2**256
        expected.append(np.random.Philox(key=k0 + (k1 << 64), counter=before).random_raw(4))
    expected = torch.from_numpy(np.array(expected).astype(np.int64).T.copy())
    parts = torch.from_numpy(places.astype(np.int64).T.copy())
    assert torch.equal(torch.stack(_philox.philox4x64(tuple(parts[:4]), tuple(parts[4:]))), expected)
    out = torch.empty_like(expected, device=device)
    _philox_kernel[(1,)](parts.to(device), out, len(places), BLOCK=128)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("count", [0, 1, 4, 11])
def test_child_seeds_come_from_a_separate_stream(count):
    """NumPy and torch give NumPy's stream under the second key word 1, for several rows at once."""
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]
    expected = np.array([np.random.Philox(key=seed % 2**64 + 2**64).random_raw(count) for seed in seeds])
    for child_seeds_of_path in (_philox.child_seeds, _philox._child_seeds_torch):
        found = child_seeds_of_path(torch.tensor(seeds), count)
        assert found.is_contiguous()
        assert torch.equal(found, torch.from_numpy(expected.astype(np.int64)))


def test_numbers_at_the_ends_of_their_range():
    ends = torch.tensor([0, 2**32 - 1])
    words = torch.tensor([0, -1])
    for convert in (lambda x: x, lambda x: x.numpy()):
        assert _rules.uniform(convert(ends)).tolist() == [2.0**-24, 1 - 2.0**-24]
        assert _rules.fine_uniform(convert(ends)).tolist() == [2.0**-33, 1 - 2.0**-33]
        for n in (1, 262_144, 2**22, 2**22 + 1, 2**31):
            assert _rules.token(convert(words), n).tolist() == [0, n - 1]


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


def test_a_generator_of_another_device_is_rejected():
    class Elsewhere(torch.Generator):
        device = torch.device("cuda", 1)

    with pytest.raises(ValueError, match="generator must be on cpu or on cuda:0 like the tensors, got one on cuda:1"):
        _seeds.resolve_seed(torch.device("cuda", 0), 2, Elsewhere(), None)
    with pytest.raises(ValueError, match="generator must be on cpu like the tensors, got one on cuda:1"):
        _seeds.resolve_seed(torch.device("cpu"), 2, Elsewhere(), None)


@pytest.mark.parametrize(
    ("block_size", "lengths", "folded"),
    [(4, [4, 4, 4], (2, 3, 4)), (6, [6, 6], (2, 2, 6)), (1, [1] * 12, (2, 12, 1)), (5, [5, 5, 2], (2, 12)),
     (20, [12], (2, 12)), (None, [12], (2, 12))],
)  # fmt: skip
def test_blocks_of_equal_length_are_folded(block_size, lengths, folded):
    """Others are repeated per position, which is slower."""
    grid = ops.Grid.of(torch.empty(2, 12), block_size)
    assert (grid.lengths, grid.fold(torch.empty(2, 12)).shape) == (lengths, folded)
    for per_block in (torch.rand(2, grid.blocks), torch.rand(2, 1)):
        per_position = grid.expand_to_positions(per_block).expand(folded).reshape(2, 12)
        assert torch.equal(per_position, per_block.expand(2, grid.blocks).repeat_interleave(torch.tensor(lengths), 1))
    assert grid.expand_to_positions(torch.rand(2, grid.blocks)).numel() <= 2 * (grid.blocks if len(folded) > 2 else 12)


def test_the_buffer_of_a_drawn_seed_is_reused():
    first, second = (_seeds.resolve_seed(torch.device("cpu"), 2, None, None) for _ in range(2))
    assert first is second


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


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 70), (16, 54), (21, 33), (69, 1)])
def test_the_bits_of_a_uniform(first, count):
    """NumPy and torch's integer products give equal bits, for a row and for any part of it."""
    seeds, rows = torch.tensor([3, -5, 2**62]), torch.tensor([0, 7, 1 << 20])
    noise = Noise(seeds, rows, first)
    expected = uniforms(seeds, rows, 70)[:, first : first + count]
    high, low = _noise.high(noise, count), _noise.low(noise, count)
    assert torch.equal(high, torch.from_numpy(_noise.high_on_host(noise, count).astype(np.int64)))
    found = _noise.low_of_on_host(noise, *np.ones((3, count)).nonzero())
    assert torch.equal(torch.from_numpy(found).view(3, count), low)
    assert torch.equal(((high << 32) + low + torch.tensor(0.5, dtype=torch.float64)) * 2.0**-48, expected)


# Code paths


@pytest.mark.parametrize(
    "routine",
    [*ROUTINES.values(), *OTHERS.values(), lambda ids, mask, **o: gumbel_topk_mask(mask.float(), 2, **o)],
    ids=[*ROUTINES, *OTHERS, "gumbel_topk_mask"],
)
def test_the_requested_backend_runs(routine, monkeypatch, device):
    ids, loss_mask, seeds = batch(2, 9, device)
    for name in ("corruption", "gumbel_topk"):
        monkeypatch.setitem(sys.modules, f"dllm_kernels.backends.triton.{name}", None)
    routine(ids, loss_mask, seeds=seeds, backend="torch")
    with pytest.raises(ImportError, match=r"corruption|gumbel_topk"):
        routine(ids, loss_mask, seeds=seeds, backend="triton")


def test_every_kind_is_described_and_every_path_rejects_one_without_a_branch(monkeypatch, device):
    """It lacks one in ``body``, in the lists of the launcher, or in the kernel of kinds with independent positions."""
    ids, loss_mask, seeds = batch(2, 9, device)
    kinds = {*ops.TIMES, *kernels._INDEPENDENT, *kernels._EXACT}
    missing = [kind for kind in kinds if f"\n    {kind} " not in ops.Routine.__doc__]
    assert not missing, f"add a row for {missing} to the table of Routine in corruption/_corrupt.py"
    monkeypatch.setitem(ops.TIMES, "new", 1)

    def corrupt(backend):
        ops.corrupt(ids, loss_mask, None, seeds, None, None, ops.Routine("new", MASK), backend)

    with pytest.raises(AssertionError, match=r"^body in corruption/_corrupt\.py has no branch for the kind new"):
        corrupt("torch")
    with pytest.raises(AssertionError, match=r"^no kernel in backends/triton/corruption\.py lists the kind new"):
        corrupt("triton")
    monkeypatch.setattr(kernels, "_INDEPENDENT", (*kernels._INDEPENDENT, "new"))
    with pytest.raises(Exception, match="_corrupt_independent has no branch for the kind new"):
        corrupt("triton")


@pytest.mark.everyday(40)
@more_routines
@pytest.mark.parametrize(("B", "L"), [(1, 1), (9, 150)])
@pytest.mark.parametrize("padded", [False, True])
def test_torch_and_its_host_shortcut_draw_the_same(routine, B, L, padded, monkeypatch):
    ids, loss_mask, seeds = batch(B, L)
    routine = functools.partial(routine, start=torch.arange(B) * 17 % (L + 1)) if padded else routine
    monkeypatch.setattr(op, "_SLICE", 75)  # slices of one row, or of four rows if that takes less memory
    sources = (lambda: {"seeds": seeds}, lambda: {"generator": torch.Generator().manual_seed(1)})
    by_host = [routine(ids, loss_mask, backend="torch", **source()) for source in sources]
    monkeypatch.setattr(ops, "on_host", lambda device: False)
    by_torch = [routine(ids, loss_mask, backend="torch", **source()) for source in sources]
    assert all(same(a, b) for a, b in zip(by_host, by_torch, strict=True))


def record(monkeypatch, module, name, note):
    """Replace a function by one that also records ``note(arguments, result)`` of each call; return the records."""
    notes, real = [], getattr(module, name)

    def recorded(*args):
        result = real(*args)
        notes.append(note(args, result))
        return result

    monkeypatch.setattr(module, name, recorded)
    return notes


@pytest.mark.parametrize("path", ["torch", "host", "triton"])
@pytest.mark.parametrize("name", ["corrupt_blockwise", "corrupt_uniform_random"])
def test_a_block_beyond_the_row_costs_no_more_than_the_row(name, path, monkeypatch, device):
    """A row of 40 in a block of 10,000 draws as many words, or uses as large a tile, as in a block of 40."""
    if path == "triton":
        tiles = kernels._tiles
        chosen = "select" if name == "corrupt_blockwise" else "independent"
        notes = record(monkeypatch, tiles, chosen, lambda args, tile: (args, tile))
    else:
        call = "random_bits" if path == "torch" else "bits_on_host"
        notes = record(
            monkeypatch, _philox, call, lambda args, bits: (args[2], [b.shape for b in bits if b is not None])
        )
    monkeypatch.setattr(ops, "on_host", lambda device: path == "host")
    ids, loss_mask, seeds = batch(2, 40, device if path == "triton" else "cpu")
    backend = "triton" if path == "triton" else "torch"
    for block_size in (40, 10_000):
        getattr(corruption, name)(ids, loss_mask, MASK, block_size, seeds=seeds, backend=backend)
    assert len(notes) == 2
    assert notes[0] == notes[1]


@pytest.mark.parametrize("exact", [False, True])
def test_a_short_last_block_that_exceeds_the_registers(exact, monkeypatch, device):
    """The keys of the kernels are in memory, and the last block ends at the end of the row."""
    tiles = kernels._tiles
    monkeypatch.setattr(tiles, "select", lambda *_: tiles.SelectTile(1, 32, 1, True))
    ids, loss_mask, seeds = batch(3, 150, device)

    def corrupted(backend):
        keywords = {"seeds": seeds, "backend": backend}
        if exact:
            level = torch.tensor([0.3, 0.8, 0.0], device=device)
            return corruption.corrupt_uniform(ids, loss_mask, MASK, level=level, exact=True, **keywords)
        level = torch.tensor([[0.3, 0.9], [0.8, 0.45], [0.0, 1.0]], device=device)
        return corruption.corrupt_blockwise(ids, loss_mask, MASK, 100, level=level, **keywords)

    assert same(corrupted("triton"), corrupted("torch"))


_real_draws = in_kernel.draws


@triton.jit
def _coarse_draws(seed, row, stride, start, SHARE: tl.constexpr, N: tl.constexpr):
    return _real_draws(seed, row, stride, start, SHARE, N) & 0xC0000000


COUNTED = {name: case for name, case in MORE.items() if case.number}


@pytest.mark.covering(2)
@pytest.mark.parametrize("path", ["host", "torch", "triton"])
@pytest.mark.parametrize("routine", COUNTED.values(), ids=COUNTED)
def test_a_number_of_positions_is_exact_if_many_draws_are_equal(routine, path, monkeypatch, device):
    """The lower index wins, as in the oracle. Draws have two bits here."""
    if path == "triton" and not INTERPRETED:
        pytest.skip("the draws of a compiled kernel cannot be replaced")

    def coarse(bits, *args):
        levels, positions, words = bits(*args)
        return levels, positions & 0xC0000000, words

    def coarse_draws(*args):
        drawn = draws(*args)
        q = (drawn.fine * 4).floor() * 2.0**30  # the draw without its low bits
        return drawn._replace(fine=(2 * q + 1) * 2.0**-33)

    for name in ("bits_on_host", "random_bits"):
        monkeypatch.setattr(_philox, name, functools.partial(coarse, getattr(_philox, name)))
    monkeypatch.setattr(in_kernel, "draws", _coarse_draws)
    monkeypatch.setattr(routines, "draws", coarse_draws)
    monkeypatch.setattr(ops, "on_host", lambda device: path == "host")
    ids, loss_mask, seeds = batch(3, 50)
    place, backend = "cpu" if path == "host" else device, "triton" if path == "triton" else "torch"
    found = routine(*(t.to(place) for t in (ids, loss_mask)), seeds=seeds.to(place), backend=backend)
    assert same([t.cpu() for t in found], routine.oracle(ids, loss_mask, seeds))


@pytest.mark.parametrize("method", ["uniform", "antithetic", "stratified"])
@pytest.mark.parametrize("source", ["seeds", "generator"])
def test_sample_level_is_the_same_on_every_path(method, source, device, monkeypatch):
    def run(backend):
        given = {"generator": torch.Generator().manual_seed(2), "device": device}
        given = {"seeds": torch.arange(50, device=device)} if source == "seeds" else given
        return corruption.sample_level(50, method=method, low=0.1, high=0.9, backend=backend, **given)

    kernel, host = run("triton"), run("torch")
    monkeypatch.setattr(ops, "on_host", lambda device: False)
    assert same(kernel, run("torch"))
    assert same(kernel, host)


def test_counts_of_torch_are_those_of_numpy():
    level, length, counts = (torch.tensor(t) for t in zip(*COUNTS, strict=True))
    for at_least in (0, 1):
        of_numpy = _rules.number_to_mask(level.numpy(), length.numpy(), at_least)
        assert _rules.number_to_mask(level, length, at_least).tolist() == of_numpy.tolist()
        assert of_numpy.tolist() == counts.clamp(min=at_least).tolist()


def test_mix_leaves_rows_with_too_large_a_sum_unchanged_off_the_cpu(backend, device, monkeypatch):
    monkeypatch.setattr(ops, "_check_sum", lambda p, q: None)  # as on a GPU
    ids, loss_mask, seeds = batch(3, 50, device)
    p, q = torch.tensor([0.9, 0.5, float("nan")], device=device), torch.full((3,), 0.5, device=device)
    noisy, noise = corruption.corrupt_mix(
        ids, loss_mask, MASK, V, mask_prob=p, uniform_prob=q, seeds=seeds, backend=backend
    )
    assert noise.any(1).tolist() == [False, True, False]
    assert torch.equal(noisy[::2], ids[::2])


@pytest.mark.parametrize("on_request", [False, True])
def test_mix_checks_the_sums_on_request(on_request, monkeypatch):
    reads = []
    monkeypatch.setattr(ops, "_check_sum", lambda p, q: reads.append(1))
    ids, loss_mask, seeds = (t.to("meta") for t in batch(2, 5))
    half = torch.full((2,), 0.5, device="meta")
    monkeypatch.setattr(ops, "on_host", lambda device: False)
    monkeypatch.setattr(_opaque, "traced", lambda x: False)
    options = {"mask_prob": half, "uniform_prob": half, "seeds": seeds, "backend": "torch"}
    corruption.corrupt_mix(ids, loss_mask, MASK, V, check=on_request, **options)
    assert len(reads) == int(on_request)


# Gumbel top-k


@pytest.mark.parametrize(("N", "D"), SHAPES)
@pytest.mark.parametrize("source", ["seeds", "generator", "uniform"])
def test_torch_and_its_host_shortcut_choose_the_same(source, N, D, monkeypatch):
    log_w, k, uniform = example(N, D)
    seeds = torch.arange(N)

    def run():
        given = {"seeds": seeds, "generator": torch.Generator().manual_seed(2), "uniform": uniform}
        return gumbel_topk_mask(log_w, k, backend="torch", **{source: given[source]})

    by_host = run()
    monkeypatch.setattr(op, "_SLICE", 300)  # slices of a few rows
    assert torch.equal(run(), by_host)
    monkeypatch.setattr(op, "on_host", lambda device: False)
    assert torch.equal(run(), by_host)
    if source == "seeds":
        assert torch.equal(gumbel_topk_mask(log_w, k, uniform=draws(seeds, N, 0, D).fine), by_host)


def test_equal_scores_of_either_zero_tie(backend, device):
    # E = 1 at u = 1/e in the arithmetic of exact_log. Log-weights -0 and 0 then give the scores -0 and 0.
    candidates = torch.tensor(np.exp(-1.0) + np.arange(-4, 5) * 2.0**-54)
    (exact,) = torch.nonzero(-_gumbel.exact_log(candidates) == 1.0, as_tuple=True)
    u = candidates[exact[0]]
    log_w = torch.tensor([[-0.0, 0.0, -0.0]], dtype=torch.float64, device=device)
    uniform = u.repeat(1, 3).to(device)
    assert gumbel_topk_mask(log_w, 1, uniform=uniform, backend=backend).tolist() == [[True, False, False]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_common_case_takes_no_detailed_checks(monkeypatch, dtype):
    ids, mask, seeds = batch(2, 5)
    monkeypatch.setattr(corruption._checks, "check_ids", None)
    assert corruption.corrupt_uniform(ids.to(dtype), mask, MASK, seeds=seeds)[0].dtype == dtype


EDGES = [0, 1, 2, 2**24 - 1, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 257, 2**32 - 128, 2**32 - 2, 2**32 - 1]


def test_quick_keys_are_within_their_error_bound():
    rng = np.random.default_rng(0)
    near_one = 2**32 - 1 - rng.integers(0, 2**12, 50_000)
    draws = np.concatenate([np.repeat(EDGES, 1000), near_one, rng.integers(0, 2**32, 500_000)]).astype(np.uint32)
    log_w = rng.uniform(0, op._MILD, len(draws)).astype(np.float32)
    exact = -np.log(op._rules.fine_uniform(draws)) / np.exp(log_w.astype(np.float64))
    error = np.abs(op._keys(log_w, draws) - exact)
    assert (error <= op._ROUNDING * (0.25 + exact)).all()
    assert (error > 0).mean() > 0.9


@pytest.mark.parametrize("spread", [1, 64, 2**20, 2**32], ids=lambda n: f"{n} draws")
@pytest.mark.parametrize("steepest", [0.0, 1e-6, 3.9, 50.0])
def test_draws_equal_in_float32_are_decided_exactly(spread, steepest, monkeypatch):
    """Of rows with independent draws, few need exact scores, however steep their weights are."""
    exact, rows = op._select_exact_host, []
    monkeypatch.setattr(op, "_select_exact_host", lambda *of: rows.extend(of[2]) or exact(*of))
    rng = np.random.default_rng(1)
    draws = (2**32 - 1 - rng.integers(0, spread, (200, 24))).astype(np.uint32)
    log_w = (rng.random((200, 1)) * np.linspace(0, steepest, 24)).astype(np.float32)
    k = rng.integers(0, 25, 200)
    u = op._rules.fine_uniform(draws)
    expected = op.select_exact(*(torch.from_numpy(x) for x in (log_w, u, k)))
    assert op.select_of_draws(log_w, draws, k, steepest).tolist() == expected.tolist()
    assert len(rows) < 3 or spread < 2**32


@pytest.mark.parametrize("u", [0.5, None])
def test_the_exact_choice_is_the_same_in_numpy(u):
    rng = np.random.default_rng(2)
    uniform = rng.random((60, 17)) if u is None else np.full((60, 17), u)
    log_w = rng.integers(-3, 4, (60, 17)).astype(np.float64)
    log_w[rng.random((60, 17)) < 0.2] = -np.inf
    k = rng.integers(0, 20, 60)
    expected = op.select_exact(*(torch.from_numpy(x) for x in (log_w, uniform, k)))
    assert op._select_exact_host(log_w, uniform, k).tolist() == expected.tolist()


def test_exact_log_is_accurate():
    g = torch.Generator().manual_seed(0)
    x = torch.cat(
        [
            torch.rand(4000, generator=g, dtype=torch.float64),
            1 + (torch.rand(4000, generator=g, dtype=torch.float64) - 0.5) * 1e-3,
            torch.exp(torch.randn(4000, generator=g, dtype=torch.float64) * 100),
            torch.tensor([2.0**-1022, 1 - 2.0**-53, 1.0, 2.0, 709.0, 2.0**-0.5, 2.0**0.5], dtype=torch.float64),
        ]
    )
    exact = np.log(x.numpy().astype(np.longdouble))
    error = np.abs(_gumbel.exact_log(x).numpy() - exact) / np.spacing(np.abs(exact).astype(np.float64))
    assert float(error[exact != 0].max()) < 2
    assert float(_gumbel.exact_log(torch.ones(1, dtype=torch.float64))) == 0.0
