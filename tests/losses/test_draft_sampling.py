"""Anchors, targets and prefixes of drafted blocks: the oracle, the same bits everywhere, statistics, bad input."""

import math
import re

import numpy as np
import pytest
import torch

import reference
from dllm_kernels import (
    DFlashDecayLoss,
    DraftDistillationLoss,
    acceptance_length,
    acceptance_stats,
    block_targets,
    sample_anchors,
    sample_prefix,
)
from dllm_kernels.losses import draft_sampling
from tests.conftest import DEVICE

SEEDS = torch.tensor([5, -3, 2**62, 0])


def draws_of(seed, count):
    """Return the 32-bit draws of a row, from NumPy."""
    words = np.random.Philox(key=np.array([seed % 2**64, 0], np.uint64), counter=2**32 - 1).random_raw(-(-count // 2))
    return torch.from_numpy(words.view(np.uint32)[:count].astype(np.int64))


def batch(L=37, density=0.85):
    torch.manual_seed(0)
    mask = torch.rand(4, L) < density
    mask[3] = False
    mask[3, 4:7] = True  # no room for a whole block
    segments = (torch.arange(L) // 13).expand(4, L).clone()
    segments[1, -5:] = -1
    return mask, segments


@pytest.mark.parametrize("path", ["numpy", "torch"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize(("num", "block_size"), [(1, 2), (5, 4), (50, 4), (6, 8), (3, 64)])
def test_anchors_equal_the_oracle(num, block_size, with_segments, overlap, path, monkeypatch):
    if path == "torch":
        monkeypatch.setattr(draft_sampling, "on_host", lambda tensor: False)
    mask, segments = batch()
    segments = segments if with_segments else None
    draws = torch.stack([draws_of(int(seed), mask.shape[1]) for seed in SEEDS])
    here = None if segments is None else segments.to(DEVICE)
    found = sample_anchors(mask.to(DEVICE), num, block_size, seeds=SEEDS.to(DEVICE), segment_ids=here, overlap=overlap)
    expected = reference.sample_anchors(mask, draws, num, block_size, segments, overlap)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.cpu(), b)
    assert found[1].any()


def test_a_row_depends_on_its_own_seed_alone():
    mask, segments = batch()
    for overlap in (True, False):
        whole = sample_anchors(mask, 5, 4, seeds=SEEDS, segment_ids=segments, overlap=overlap)
        for b in range(4):
            alone = sample_anchors(
                mask[b : b + 1], 5, 4, seeds=SEEDS[b : b + 1], segment_ids=segments[b : b + 1], overlap=overlap
            )
            assert all(torch.equal(x[b : b + 1], y) for x, y in zip(whole, alone, strict=True))
    prefix = sample_prefix((4, 9), 8, 0.7, seeds=SEEDS)
    assert torch.equal(prefix[2:], sample_prefix((2, 9), 8, 0.7, seeds=SEEDS[2:]))


def test_a_generator_reproduces_the_draws():
    mask, _ = batch()
    first, second = (
        (sample_anchors(mask, 5, 4, generator=g), sample_prefix((4, 5), 8, 2.0, generator=g))
        for g in (torch.Generator().manual_seed(3), torch.Generator().manual_seed(3))
    )
    assert torch.equal(first[0][0], second[0][0])
    assert torch.equal(first[1], second[1])


def test_every_candidate_is_equally_likely():
    mask = torch.ones(1, 8, dtype=torch.bool).expand(20_000, 8)
    anchors, real = sample_anchors(mask, 2, 4, seeds=torch.arange(20_000))
    assert real.all()
    assert (anchors[:, 0] < anchors[:, 1]).all()
    counts = torch.bincount(anchors.flatten(), minlength=8).double()
    assert counts[5:].sum() == 0  # positions 0 to 4 begin a whole block
    assert ((counts[:5] - 8000).abs() <= 4 * math.sqrt(20_000 * 0.4 * 0.6)).all()


@pytest.mark.parametrize(("block_size", "base"), [(2, 3.0), (3, 0.5), (8, 0.7), (8, 1.0), (16, 1.3)])
def test_prefixes_have_geometric_probabilities(block_size, base, monkeypatch):
    drawn = sample_prefix((2000, 50), block_size, base, seeds=torch.arange(2000))
    monkeypatch.setattr(draft_sampling, "on_host", lambda tensor: False)
    assert torch.equal(drawn[:50], sample_prefix((50, 50), block_size, base, seeds=torch.arange(50)))
    for length, p in reference.prefix_probabilities(block_size, base).items():
        share = (drawn == length).double().mean().item()
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / 100_000) + 1e-9
    assert drawn.min() >= min(2, block_size - 1)
    assert drawn.max() <= block_size - 1
    monkeypatch.setattr(draft_sampling, "_draws", lambda *_: torch.tensor([[2**31 - 1, 2**31]]))
    assert sample_prefix((1, 2), 4, 1.0).tolist() == [[2, 3]]  # half of the draws each


def test_targets_of_blocks():
    ids, anchors = torch.randint(0, 99, (3, 11), device=DEVICE), torch.randint(-1, 12, (3, 7), device=DEVICE)
    documents = torch.tensor(
        [[0] * 4 + [1] * 3 + [0] * 4, [7, 7, -1, -1, -1, 3, 3, 3, 2, 2, 2], [-1] * 11], device=DEVICE
    )
    for block_size in (2, 5, 20):
        for segments in (None, documents, documents.to(torch.int8)):
            found = block_targets(ids.int(), anchors, block_size, segment_ids=segments)
            expected = reference.block_targets(
                ids.cpu(), anchors.cpu(), block_size, None if segments is None else segments.cpu()
            )
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("overlap", [True, False])
def test_no_block_crosses_into_another_document(overlap):
    """Also if no document holds a whole block: the recipe of the DFlash page trains on its own tokens alone."""
    segments = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, -1], [5, 5, 5, 5, 5, 5, 5, 5, 5, 9]], device=DEVICE)
    ids = 100 * segments + torch.arange(10, device=DEVICE)
    mask, size = torch.ones_like(ids), 6
    anchors, real = sample_anchors(mask, 4, size, seeds=SEEDS[:2].to(DEVICE), segment_ids=segments, overlap=overlap)
    targets, inside = block_targets(ids, anchors, size, segment_ids=segments)
    supervised = block_targets(mask, anchors, size)[0] > 0
    valid = (inside & supervised & real.repeat_interleave(size - 1, 1)).view(2, 4, size - 1)
    document = segments.gather(1, anchors).unsqueeze(2)
    assert (targets.view(valid.shape).div(100, rounding_mode="floor") == document)[valid].all()
    assert valid[0].any(-1).sum() == real[0].sum() > 0  # each has a target: the rest of its document
    assert (valid[1].sum(-1) == 5 * real[1]).all()
    targets, inside = block_targets(ids[:, :0], anchors, 4)
    assert not inside.any()
    assert (targets == -100).all()


@pytest.mark.parametrize("L", [0, 8])
@pytest.mark.parametrize("seeds", [None, SEEDS[:0]])
def test_no_rows(L, seeds):
    mask = torch.ones(0, L, dtype=torch.bool, device=DEVICE)
    seeds = None if seeds is None else seeds.to(DEVICE)
    for overlap in (True, False):
        anchors, real = sample_anchors(mask, 3, 4, seeds=seeds, overlap=overlap)
        targets, inside = block_targets(mask.long(), anchors, 4)
        assert [t.shape for t in (anchors, real, targets, inside)] == [(0, 3), (0, 3), (0, 9), (0, 9)]
        assert [t.dtype for t in (anchors, real, targets, inside)] == [torch.int64, torch.bool] * 2
    for shape in ((0,), (0, 3), (0, 0)):
        prefix = sample_prefix(shape, 4, 0.5, seeds=seeds)
        assert (prefix.shape, prefix.dtype) == (shape, torch.int64)


@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("anchor_row", [False, True])
def test_the_acceptance_of_a_perfect_draft_after_a_prefix(anchor_row, form):
    """The mean of block_size - l; with a row for the anchor, of one more. By hand: given rows may be masked."""
    torch.manual_seed(0)
    rows, prefix = 4 if anchor_row else 3, torch.tensor([[1, 2, 3], [3, 3, 1]], device=DEVICE)
    h, head = torch.randn(2, 3 * rows, 5, device=DEVICE), torch.randn(9, 5, device=DEVICE)
    x, mask = h @ head.T, torch.ones(2, 3 * rows, device=DEVICE)
    loss, y = DFlashDecayLoss(anchor_row=anchor_row), x.argmax(-1)
    options = {"anchor_row": anchor_row, "bonus": True}

    def called(targets, prefix, mask):
        rest = targets, mask, None, 4
        return loss(x, *rest, prefix=prefix) if form == "logits" else loss.forward_fused(h, head, *rest, prefix=prefix)

    out = called(y, prefix, mask)
    lengths = 4 + anchor_row - prefix
    torch.testing.assert_close(acceptance_length(out, mask, 4, **options), 1 + lengths.float().mean())
    torch.testing.assert_close(
        acceptance_length(out, mask, 4, **options, prefix=prefix.int()), 1 + lengths.float().mean()
    )
    matches = torch.ones_like(mask)
    assert [t.item() for t in acceptance_stats(matches, mask, 4, anchor_row=anchor_row, prefix=prefix)] == [
        lengths.sum(),
        6,
    ]
    wrong, holes = y.clone(), mask.clone()
    wrong[0, rows + 2] += 1 - 2 * (wrong[0, rows + 2] > 0)  # the second row that is read of the second block
    holes[1, :2] = 0  # in the prefix of the fourth block
    holes[0, 2 * rows + 2] = 0  # the first row that is read of the third block, which does not count
    total, count = acceptance_stats(called(wrong, prefix, holes), holes, 4, anchor_row=anchor_row)
    assert count == 5
    assert total == lengths.sum() - (lengths[0, 1] - 1) - lengths[0, 2]
    with pytest.raises(ValueError, match=r"^prefix must have shape \(2, 3\) \(an entry for each block\), got \(2, 2\)"):
        acceptance_length(matches, mask, 4, anchor_row=anchor_row, prefix=prefix[:, :2])
    if DEVICE == "cpu":  # values are not read on a GPU
        with pytest.raises(ValueError, match=r"^prefix must be on cpu like mask, got meta$"):
            acceptance_length(out._replace(prefix=prefix.to("meta")), mask, 4, **options, prefix=prefix)
        other = called(y, torch.ones_like(prefix), mask)
        with pytest.raises(
            ValueError, match=r"^prefix must be that of the loss call, which output holds, or None, got "
        ):
            acceptance_length(other, mask, 4, anchor_row=anchor_row, prefix=prefix)
        with pytest.raises(ValueError, match=r"^prefix must lie in \[1, [34]\], got 0 at position \(0, 0\)"):
            acceptance_length(matches, mask, 4, anchor_row=anchor_row, prefix=prefix - 1)


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_the_gammas_of_the_paper(block_size, gamma):
    T = 2 * (block_size - 1)
    x, y, mask = torch.randn(2, T, 9), torch.randint(0, 9, (2, T)), torch.ones(2, T)
    paper, number = (DFlashDecayLoss(g)(x, y, mask, block_size=block_size).total_loss for g in ("paper", gamma))
    assert torch.equal(paper, number)
    distilled = (
        DraftDistillationLoss("kl", g)(x, x.flip(0), None, mask, block_size=block_size).total_loss
        for g in ("paper", gamma)
    )
    assert torch.equal(*distilled)


@pytest.mark.exhaustive
def test_one_graph():
    mask, segments = batch()
    seeds = SEEDS.clone()

    def blocks(mask, segments, seeds):
        anchors, real = sample_anchors(mask, 5, 4, seeds=seeds, segment_ids=segments)
        return anchors, real, *block_targets(segments, anchors, 4), sample_prefix((4, 5), 4, 0.5, seeds=seeds)

    compiled = torch.compile(blocks, backend="aot_eager", fullgraph=True)
    for a, b in zip(compiled(mask, segments, seeds), blocks(mask, segments, seeds), strict=True):
        assert torch.equal(a, b)


MASK = torch.ones(2, 9)
TWO = torch.zeros(2, dtype=torch.int64)
PREFIX = torch.ones(2, 3, dtype=torch.int64)


def draft(prefix=PREFIX, block_size=4, loss_gamma=7.0, **options):
    x, y = torch.randn(2, 9, 5), torch.zeros(2, 9, dtype=torch.int64)
    return DFlashDecayLoss(loss_gamma, **options)(x, y, MASK, block_size=block_size, prefix=prefix)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sample_anchors(MASK, 0, 4), ValueError, "num must be at least 1, got 0"),
        (lambda: sample_anchors(MASK, 2, 1), ValueError, "block_size must be at least 2, got 1"),
        (lambda: sample_anchors(MASK[0], 2, 4), ValueError, "loss_mask must have shape [B, L], got (9,)"),
        (lambda: sample_anchors(MASK, 2, 4, overlap="no"), TypeError, "overlap must be a bool, got str"),
        (lambda: sample_anchors(MASK, 2, 4, segment_ids=MASK), ValueError, "segment_ids must have dtype"),
        (lambda: sample_anchors(MASK, 2, 4, segment_ids=TWO), ValueError, "segment_ids must have shape (2, 9) (that"),
        (lambda: sample_anchors(MASK, 2, 4, seeds=TWO[:1]), ValueError, "seeds must have shape"),
        (lambda: block_targets(MASK, PREFIX, 4), ValueError, "ids must have dtype"),
        (lambda: block_targets(PREFIX, PREFIX, 4, segment_ids=MASK), ValueError, "segment_ids must have dtype"),
        (lambda: block_targets(PREFIX, PREFIX, 4, segment_ids=TWO), ValueError, "segment_ids must have shape (2, 3) "),
        (lambda: block_targets(PREFIX, PREFIX[:1], 4), ValueError, "anchors must have the rows of ids, 2, got 1"),
        (lambda: sample_prefix(4, 4, 1.0), TypeError, "shape must be a tuple of ints, such as (B, num), got int"),
        (lambda: sample_prefix((2, 3), 4, 0.0), ValueError, "base must be positive and finite, got 0.0"),
        (lambda: draft(PREFIX - 1), ValueError, "prefix must lie in [1, 3], got 0 at position (0, 0)"),
        (lambda: draft(PREFIX + 3), ValueError, "prefix must lie in [1, 3], got 4 at position (0, 0)"),
        (lambda: draft(PREFIX[:, :2]), ValueError, "prefix must have shape (2, 3) (an entry for each block)"),
        (lambda: draft(block_size=None), ValueError, "prefix must be None without a block_size, or with "),
        (lambda: draft(position_weights="dpace"), ValueError, "prefix must be None without a block_size, or with "),
        (lambda: draft(None, loss_gamma="paper"), ValueError, "block_size must be one of 16, 10, 8 with loss_gamma="),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        call()


@pytest.mark.parametrize("anchor", [-1, -2, -100, 4])
def test_a_block_of_an_anchor_outside_of_the_row_has_no_target(anchor):
    """Anchors are often padded with -1."""
    targets, inside = block_targets(torch.tensor([[4, 9, 3, 0]]), torch.tensor([[anchor, 1]]), 3)
    assert targets.tolist() == [[-100, -100, 3, 0]]
    assert inside.tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_anchors_and_prefixes_of_a_narrow_type(dtype):
    """The length of a row, or of a block, does not fit int8 and uint8: compared with it, they took it for another."""
    ids, anchors = torch.arange(300, device=DEVICE)[None], torch.tensor([[3, 120]], device=DEVICE)
    for got, expected in zip(block_targets(ids, anchors.to(dtype), 4), block_targets(ids, anchors, 4), strict=True):
        assert torch.equal(got, expected)
    logits, targets = torch.randn(1, 300, 7, device=DEVICE), torch.randint(0, 7, (1, 300), device=DEVICE)
    prefix, mask = torch.tensor([[110]], device=DEVICE), torch.ones(1, 300, device=DEVICE)
    of = lambda prefix: DFlashDecayLoss()(logits, targets, mask, block_size=301, prefix=prefix).total_loss  # noqa: E731
    assert torch.equal(of(prefix.to(dtype)), of(prefix))
