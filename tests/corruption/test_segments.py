"""Segments (packed documents) in ``corrupt_uniform``: the order of their levels, errors, narrow types."""

import pytest
import torch

from dllm_kernels.corruption import corrupt_uniform
from tests.support.routines import MASK

pytestmark = pytest.mark.indices


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


IDS, ON = torch.zeros(2, 6, dtype=torch.int64), torch.ones(2, 6)
SHAPES = r"\(2,\) or \(2, 1\) or "


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"exact": True, "block_size": 2}, ValueError, "exact must be False with block_size or segment_ids, got True"),
        ({"exact": True, "segment_ids": IDS}, ValueError, "exact must be False with block_size or segment_ids, got"),
        ({"block_size": 2, "segment_ids": IDS}, ValueError, "block_size and segment_ids exclude each other"),
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
