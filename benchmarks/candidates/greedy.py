"""Candidate for samples at temperature 0 in ``backends/triton/sample.py``: the argmax of rows, in 16-byte loads.

The package's kernel for samples masks each column, so that its loads are narrow. Here, as in the NLL, whole and aligned
tiles are read without a mask, and each element of a tile keeps the largest value that it has seen, with its tile.
"""

import torch
import triton
import triton.language as tl

from dllm_kernels.backends.triton import _launch, _math, _tiles


@triton.jit(do_not_specialize=["stride_n", "V", "TILES", "SPLITS"])
def _greedy(logits_ptr, best_ptr, column_ptr, stride_n, V, TILES, SPLITS, BLOCK_V: tl.constexpr):
    WIDE: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    row = (tl.program_id(0) // SPLITS).to(tl.int64) * stride_n
    start = (tl.program_id(0) % SPLITS) * TILES * BLOCK_V
    end = tl.minimum(start + TILES * BLOCK_V, V)
    at, first, wide = _math.wide_columns(row, start, end, WIDE)
    i = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], -float("inf"), tl.float32)
    tile_of_best = tl.zeros([BLOCK_V], tl.int32)
    whole = wide // BLOCK_V * BLOCK_V
    for tile in range(0, whole, BLOCK_V):
        x = tl.load(logits_ptr + at + tile + i, eviction_policy="evict_first").to(tl.float32)
        tile_of_best = tl.where(x > best, tile, tile_of_best)
        best = tl.maximum(best, x)
    if whole < wide:
        x = tl.load(logits_ptr + at + whole + i, mask=i < wide - whole, other=-float("inf")).to(tl.float32)
        tile_of_best = tl.where(x > best, whole, tile_of_best)
        best = tl.maximum(best, x)
    v, there = _math.ragged_columns(start, end, first, wide, WIDE)
    x = tl.load(logits_ptr + row + v, mask=there, other=-float("inf")).to(tl.float32)
    top = tl.maximum(tl.max(best, 0), tl.max(x, 0))
    # The first column wins a tie.
    column = tl.min(tl.where(best == top, first + tile_of_best + i, 0x7FFFFFFF), 0)
    column = tl.minimum(column, tl.min(tl.where((x == top) & there, v, 0x7FFFFFFF), 0))
    tl.store(best_ptr + tl.program_id(0), top)
    tl.store(column_ptr + tl.program_id(0), column)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the first column of the largest logit of each row ``[C, V]``, int64 ``[C]``."""
    C, V = logits.shape
    tile = _tiles.token_nll_fwd(V, logits.element_size())
    tiles, splits = _launch.share(V, tile)
    best = torch.empty(C, splits, dtype=torch.float32, device=logits.device)
    column = torch.empty(C, splits, dtype=torch.int32, device=logits.device)
    _greedy[(C * splits,)](
        logits,
        best,
        column,
        logits.stride(0),
        V,
        tiles,
        splits,
        BLOCK_V=tile.block_v,
        num_warps=2 * tile.num_warps,
        **_launch.FUSED,
    )
    return column.gather(1, best.max(1)[1][:, None])[:, 0].to(torch.int64)
