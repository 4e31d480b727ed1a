"""Levels of blocks and of segments (packed documents) in ``corrupt_uniform``."""

import pytest
import torch

from dllm_kernels import corruption
from dllm_kernels.corruption import corrupt_uniform
from tests.corruption.test_corruption import MASK, batch, same

pytestmark = pytest.mark.indices


def documents(B, L, device="cpu", seed=0):
    """Draw segment ids: runs, ids that occur again later, and positions in no segment."""
    return torch.randint(-1, 4, (B, L), generator=torch.Generator().manual_seed(seed)).to(device)


def test_the_level_of_a_block_is_that_of_the_other_routines(backend, device):
    ids, loss_mask, seeds = batch(4, 50, device)
    p_mask = corrupt_uniform(ids, loss_mask, MASK, block_size=7, seeds=seeds, backend=backend)[2]
    assert torch.equal(p_mask, corruption.corrupt_blockwise(ids, loss_mask, MASK, 7, seeds=seeds)[2])


def test_one_segment_is_a_row_and_equal_segments_are_blocks(backend, device):
    ids, loss_mask, seeds = batch(4, 50, device)
    run = lambda **keywords: corrupt_uniform(ids, loss_mask, MASK, seeds=seeds, backend=backend, **keywords)  # noqa: E731
    assert same(run(segment_ids=torch.full_like(ids, 3)), run())
    blocks = (torch.arange(50, device=device) // 7).expand(4, 50)
    assert same(run(segment_ids=blocks), run(block_size=7))
    assert same(run(segment_ids=50 - blocks.int()), run(block_size=7))  # only equality counts
    assert same(run(block_size=50), run())


@pytest.mark.everyday(1)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
def test_backends_agree_on_segments(dtype, device):
    ids, loss_mask, seeds = batch(3, 70, device)
    segment_ids = documents(3, 70, device).to(dtype)
    turned = segment_ids.t().contiguous().t()
    for source in (lambda: {"seeds": seeds}, lambda: {"generator": torch.Generator().manual_seed(1)}):
        for level in (None, torch.rand(3, device=device), torch.rand(3, 70, device=device)):
            by_kernel, by_torch = (
                corrupt_uniform(ids, loss_mask, MASK, level=level, segment_ids=t, backend=b, **source())
                for t, b in ((turned, "triton"), (segment_ids, "torch"))
            )
            assert same(by_kernel, by_torch)


def test_positions_in_no_segment(backend, device):
    ids, loss_mask, seeds = batch(3, 70, device)
    segment_ids = documents(3, 70, device)
    noisy, noise, p_mask = corrupt_uniform(
        ids, torch.ones_like(loss_mask), MASK, 1.0, segment_ids=segment_ids, seeds=seeds, backend=backend
    )
    assert torch.equal(noise, segment_ids >= 0)
    assert torch.equal(noisy, torch.where(noise, MASK, ids))
    assert (p_mask == 1).all()


def test_given_levels_belong_to_segments_in_their_order(backend, device):
    ids = torch.zeros(1, 6, dtype=torch.int64, device=device)
    segment_ids = torch.tensor([[9, 9, -1, 4, 9, 5]], device=device)
    level = torch.tensor([[0.5, 0.0, 1.0, 0.25, 0.25, 0.25]], device=device)
    _, noise, p_mask = corrupt_uniform(
        ids, ids == 0, MASK, level=level, segment_ids=segment_ids, seeds=torch.tensor([1], device=device),
        backend=backend,
    )  # fmt: skip
    assert p_mask.tolist() == [[0.5, 0.5, 1.0, 0.0, 0.5, 1.0]]
    assert noise[0, [2, 3, 5]].tolist() == [False, False, True]


def test_segments_of_a_padded_row(backend, device):
    """Ids of the padding, here those of a later segment, do not count."""
    ids, loss_mask, seeds = batch(3, 30, device)
    segment_ids, start = documents(3, 30, device), torch.tensor([0, 4, 30], device=device)
    outputs = corrupt_uniform(ids, loss_mask, MASK, segment_ids=segment_ids, seeds=seeds, start=start, backend=backend)
    for b, first in enumerate(start.tolist()[:2]):
        rows = slice(b, b + 1)
        alone = corrupt_uniform(
            ids[rows, first:], loss_mask[rows, first:], MASK, segment_ids=segment_ids[rows, first:], seeds=seeds[rows]
        )
        assert same([t[rows, first:] for t in outputs], alone)
    assert not outputs[1][1, :4].any()
    assert not outputs[1][2].any()
    assert (outputs[2][2] == 1).all()


@pytest.mark.parametrize("options", [{"block_size": 8}, {"segments": True}], ids=str)
def test_noise_over_its_probability_has_the_expectation_1_in_every_position(options):
    """20,000 rows, within 4 standard errors; ``corrupt_blockwise`` fails by 40 %."""
    B, L = 20_000, 32
    ids = torch.zeros(B, L, dtype=torch.int64)
    lengths = torch.randint(1, 14, (B, L), generator=torch.Generator().manual_seed(2)).cumsum(1)
    runs = torch.searchsorted(lengths, torch.arange(L).expand(B, L).contiguous(), right=True)
    given = {"segment_ids": runs} if options.pop("segments", False) else options
    generator = torch.Generator().manual_seed(11)
    _, noise, p_mask = corrupt_uniform(ids, ids == 0, 1, generator=generator, **given)
    ratio = noise.double() / p_mask.double()
    error = ratio.std(0) / B**0.5
    assert ((ratio.mean(0) - 1).abs() < 4 * error).all()
    assert (error < 0.1).all()
    _, noise, m = corruption.corrupt_blockwise(ids, None, 1, 8, generator=generator)
    assert ((noise.double() / m).mean(0)[::8] < 0.7).all()


@pytest.mark.parametrize("source", ["seeds", "generator"])
def test_levels_of_blocks_and_segments_are_independent(source):
    """No pair of levels of a row is correlated, within 4.5 standard errors of 8,000 rows and 28 pairs."""
    B, L = 8_000, 16
    ids = torch.zeros(B, L, dtype=torch.int64)
    runs = (torch.arange(L) // 2).expand(B, L)
    for given in ({"block_size": 2}, {"segment_ids": runs}):
        draws = {"seeds": torch.arange(B)} if source == "seeds" else {"generator": torch.Generator().manual_seed(4)}
        level = corrupt_uniform(ids, ids == 0, 1, 0.0, **given, **draws)[2][:, ::2].double()
        assert ((level.mean(0) - 0.5).abs() < 4 * (1 / 12 / B) ** 0.5).all()
        pairs = torch.corrcoef(level.T) - torch.eye(8)
        assert (pairs.abs() < 4.5 / B**0.5).all()
        rows = torch.corrcoef(torch.stack([level[:-1].flatten(), level[1:].flatten()]))[0, 1]
        assert abs(float(rows)) < 4 / (8 * B) ** 0.5


@pytest.mark.everyday(1)
@pytest.mark.parametrize("eps", [1.0, 1])
def test_an_eps_of_1_masks_everything(eps, backend, device):
    ids, loss_mask, seeds = batch(3, 40, device)
    keywords = {"eps": eps, "seeds": seeds, "backend": backend}
    outputs = [
        corrupt_uniform(ids, loss_mask, MASK, **keywords),
        corrupt_uniform(ids, loss_mask, MASK, exact=True, **keywords),
        corrupt_uniform(ids, loss_mask, MASK, block_size=7, **keywords),
        corruption.corrupt_blockwise(ids, loss_mask, MASK, **keywords),
        corruption.corrupt_blockwise(ids, loss_mask, MASK, 7, **keywords),
        corruption.corrupt_uniform_random(ids, loss_mask, MASK, 7, **keywords),
    ]
    for _, noise, p_mask in outputs:
        assert torch.equal(noise, loss_mask)
        assert (p_mask == 1).all()


IDS, ON = torch.zeros(2, 6, dtype=torch.int64), torch.ones(2, 6)
SHAPES = r"\(2,\) or \(2, 1\) or "


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"exact": True, "block_size": 2}, ValueError, "exact must be False with block_size or segment_ids, got True"),
        ({"exact": True, "segment_ids": IDS}, ValueError, "exact must be False with block_size or segment_ids, got"),
        ({"block_size": 2, "segment_ids": IDS}, ValueError, "block_size and segment_ids exclude each other"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"segment_ids": [0]}, TypeError, "segment_ids must be a torch.Tensor, got list"),
        ({"segment_ids": ON}, ValueError, "segment_ids must have dtype int64, .*, got float32"),
        ({"segment_ids": IDS[:1]}, ValueError, r"segment_ids must have shape \(2, 6\) \(that of input_ids\), got"),
        ({"segment_ids": IDS.to("meta")}, ValueError, "segment_ids must be on cpu like input_ids, got meta"),
        ({"block_size": 2, "level": ON}, ValueError, rf"level must have shape {SHAPES}\(2, 3\), got \(2, 6\)"),
        ({"segment_ids": IDS, "level": ON[:, :2]}, ValueError, rf"level must have shape {SHAPES}\(2, 6\), got"),
        ({"segment_ids": IDS, "level": ON * 2}, ValueError, r"level must lie in \[0, 1\], got values from 2.0 to 2.0"),
    ],
)  # fmt: skip
def test_errors_of_blocks_and_segments(options, error, message):
    with pytest.raises(error, match=message):
        corrupt_uniform(IDS, ON, MASK, **options)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_the_largest_id_of_a_narrow_type_is_a_segment_of_a_padded_row(dtype, backend, device):
    """Padding was marked by -1, which is 255 in uint8."""
    segment_ids = torch.tensor([[255] * 6 + [7] * 6], dtype=dtype, device=device)
    ids, start = torch.arange(12, device=device)[None], torch.tensor([2], device=device)
    _, noise, _ = corrupt_uniform(
        ids, torch.ones_like(ids), MASK, segment_ids=segment_ids, start=start, level=torch.ones(1, device=device),
        backend=backend,
    )  # fmt: skip
    assert torch.equal(noise, ids >= 2)
