"""Corruption routines: their random bits, their kernels, and the choice of code path."""

import functools
import sys

import pytest
import torch
import triton
import triton.language as tl

from dllm_kernels import corruption
from dllm_kernels.backends.triton import corruption as kernels
from dllm_kernels.corruption import _corrupt as ops
from dllm_kernels.corruption import _philox, _rules
from dllm_kernels.corruption import _topk as op
from dllm_kernels.corruption._philox import Layout
from reference import corruption as reference
from tests.corruption.test_corruption import MASK, ROUTINES, V, batch, every_routine, same

pytestmark = pytest.mark.indices


def draws(seeds, L, block_size, whole_words=False):
    """Return the random numbers of the routines for the reference: one u per block, position draws, and their words."""
    blocks = -(-L // min(block_size or L, L))
    levels, bits, words = _philox.random_bits(seeds, len(seeds), Layout(blocks, L, whole_words))
    return _rules.uniform(levels), bits, words


UNIFORM = [(1, 1, {}), (3, 50, {}), (4, 129, {}), *((3, 50, {"block_size": size}) for size in (1, 7, 64))]


@pytest.mark.everyday(4)
@pytest.mark.parametrize(("B", "L", "options"), UNIFORM, ids=str)
def test_uniform_equals_the_reference(B, L, options, backend, device):
    ids, loss_mask, seeds = batch(B, L, device)
    level, bits, _ = draws(seeds, L, options.get("block_size"))
    drawn = {"t_uniform": level if options else level[:, 0], "uniform": _rules.uniform(bits)}
    expected = reference.corrupt_uniform(ids, loss_mask, MASK, 0.05, **options, **drawn)
    assert same(
        corruption.corrupt_uniform(ids, loss_mask, MASK, 0.05, **options, seeds=seeds, backend=backend), expected
    )


@pytest.mark.parametrize("with_level", [False, True])
def test_uniform_with_segments_equals_the_reference(with_level, backend, device):
    ids, loss_mask, seeds = batch(3, 50, device)
    segment_ids = torch.randint(-1, 6, (3, 50), generator=torch.Generator().manual_seed(5)).to(device)
    level, bits, _ = draws(seeds, 50, 1)
    options = {"segment_ids": segment_ids, "level": level.flip(1) if with_level else None}
    drawn = {"t_uniform": level, "uniform": _rules.uniform(bits)}
    expected = reference.corrupt_uniform(ids, loss_mask, MASK, 0.05, **options, **drawn)
    assert same(
        corruption.corrupt_uniform(ids, loss_mask, MASK, 0.05, **options, seeds=seeds, backend=backend), expected
    )


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("block_size", [None, 1, 4, 7, 32, 64])
@pytest.mark.parametrize(("eps", "half_life_ratio"), [(1e-3, 0.25), (0.0, 1.0), (0.5, 0.05)])
def test_blockwise_equals_the_reference(block_size, eps, half_life_ratio, backend, device):
    ids, loss_mask, seeds = batch(3, 50, device)
    level, bits, _ = draws(seeds, 50, block_size)
    options = (MASK, block_size, eps, half_life_ratio)
    uniform = _rules.fine_uniform(bits)
    expected = reference.corrupt_blockwise(ids, loss_mask, *options, m_uniform=level, uniform=uniform)
    assert same(corruption.corrupt_blockwise(ids, loss_mask, *options, seeds=seeds, backend=backend), expected)


@pytest.mark.parametrize("block_size", [None, 1, 4, 6, 32])
def test_uniform_random_equals_the_reference(block_size, backend, device):
    ids, loss_mask, seeds = batch(3, 50, device)
    level, bits, words = draws(seeds, 50, block_size, whole_words=True)
    drawn = {"uniform": _rules.uniform(bits), "tokens": _rules.token(words, V)}
    expected = reference.corrupt_uniform_random(ids, loss_mask, V, block_size, t_uniform=level, **drawn)
    got = corruption.corrupt_uniform_random(ids, loss_mask, V, block_size, seeds=seeds, backend=backend)
    assert same(got, expected)


def test_all_masked_equals_the_reference(backend, device, monkeypatch):
    ids, loss_mask, _ = batch(3, 50, device)
    expected = reference.corrupt_all_masked(ids, loss_mask, MASK)
    assert same(corruption.corrupt_all_masked(ids, loss_mask, MASK, backend=backend), expected)
    monkeypatch.setattr(ops, "on_host", lambda device: False)
    assert same(corruption.corrupt_all_masked(ids, loss_mask, MASK, backend=backend), expected)


OTHERS = {
    "complementary": lambda ids, mask, seeds, **kw: corruption.complementary(mask, mask, **kw),
    "levels": lambda ids, mask, seeds, **kw: corruption.sample_level(2, seeds=seeds, **kw),
}


@pytest.mark.parametrize("routine", [*ROUTINES.values(), *OTHERS.values()], ids=[*ROUTINES, *OTHERS])
def test_the_requested_backend_runs(routine, monkeypatch, device):
    ids, loss_mask, seeds = batch(2, 9, device)
    monkeypatch.setitem(sys.modules, kernels.__name__, None)
    routine(ids, loss_mask, seeds=seeds, backend="torch")
    with pytest.raises(ImportError, match="corruption"):
        routine(ids, loss_mask, seeds=seeds, backend="triton")


@pytest.mark.everyday(24)
@every_routine
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


def test_the_torch_path_of_segments(monkeypatch):
    ids, loss_mask, seeds = batch(9, 40)
    monkeypatch.setattr(op, "_SLICE", 75)
    run = functools.partial(
        corruption.corrupt_uniform, ids, loss_mask, MASK, segment_ids=ids % 5 - 1, seeds=seeds, backend="torch"
    )
    by_host = [run(), run(level=torch.rand(9, 40, generator=torch.Generator().manual_seed(0)))]
    monkeypatch.setattr(ops, "on_host", lambda device: False)
    by_torch = [run(), run(level=torch.rand(9, 40, generator=torch.Generator().manual_seed(0)))]
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


# Levels and lengths: both clamps, rounding half to even (2.5, 3.5, 0.5, 1.5), and float32 products that round to a
# half.
COUNTS = [
    (0.5, 5), (0.5, 7), (0.5, 1), (0.5, 3), (0.25, 2), (0.75, 2), (0.001, 4), (0.001, 1), (1.0, 9), (0.9999, 8),
    (0.3, 5), (0.7, 5), (0.1, 5), (0.49999997, 5), (0.50000006, 5), (0.83333331, 3), (0.5, 4095), (0.99999994, 131071),
]  # fmt: skip


@triton.jit
def _count_kernel(level_ptr, length_ptr, out_ptr, n, at_least, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    level = tl.load(level_ptr + i, mask=i < n)
    length = tl.load(length_ptr + i, mask=i < n)
    tl.store(out_ptr + i, kernels.number_to_mask(level, length, at_least).to(tl.int64), mask=i < n)


@pytest.mark.parametrize("at_least", [0, 1])
def test_counts_round_half_to_even_and_clamp(at_least, device):
    level = torch.tensor([m for m, _ in COUNTS])
    length = torch.tensor([n for _, n in COUNTS])
    expected = [reference.number_to_mask(m, int(n), at_least) for m, n in zip(level, length, strict=True)]
    assert expected[:6] == [2, 4, at_least, 2, at_least, 2]
    assert _rules.number_to_mask(level, length, at_least).tolist() == expected
    assert _rules.number_to_mask(level.numpy(), length.numpy(), at_least).tolist() == expected
    out = torch.empty_like(length, device=device)
    _count_kernel[(1,)](
        level.to(device), length.to(device), out, len(COUNTS), at_least, BLOCK=32, enable_fp_fusion=False
    )
    assert out.tolist() == expected


@pytest.mark.everyday(1)
@pytest.mark.parametrize("exact", [False, True])
def test_a_short_last_block_that_exceeds_the_registers(exact, monkeypatch, device):
    """The keys of the kernels are in memory, and the last block ends at the end of the row."""
    tiles = kernels._tiles
    monkeypatch.setattr(tiles, "select", lambda *_: tiles.SelectTile(1, 32, 1, True))
    ids, loss_mask, seeds = batch(2, 150, device)

    def corrupted(backend):
        keywords = {"seeds": seeds, "backend": backend}
        if exact:
            level = torch.tensor([0.3, 0.8], device=device)
            return corruption.corrupt_uniform(ids, loss_mask, MASK, level=level, exact=True, **keywords)
        level = torch.tensor([[0.3, 0.9], [0.8, 0.45]], device=device)
        return corruption.corrupt_blockwise(ids, loss_mask, MASK, 100, level=level, **keywords)

    assert same(corrupted("triton"), corrupted("torch"))


@pytest.mark.parametrize("half_life_ratio", [1e-300, 1e-30, 1e30])
def test_extreme_biases_still_choose_exactly_k(half_life_ratio, backend, device):
    ids, _, seeds = batch(4, 24, device)
    _, noise, p = corruption.corrupt_blockwise(
        ids, None, MASK, 8, half_life_ratio=half_life_ratio, seeds=seeds, backend=backend
    )
    expected = _rules.number_to_mask(p[:, ::8], torch.tensor(8, device=device), 0)
    assert torch.equal(noise.view(4, 3, 8).sum(2), expected)
    if half_life_ratio < 1:  # so steep that the last positions of a block win
        assert (noise.view(4, 3, 8).int().diff(dim=2) >= 0).float().mean() > 0.9
