r"""Gumbel-max sampling: the column of each row with the largest score, x_v - ln(-ln u_v), or x_v without noise.

x are the transformed logits. Each program that shares a row writes its best score and column. ``corruption/_gumbel.py``
explains why a score is computed in float64, operation by operation. ``-ln u >= 1 - u``, and the high 16 bits of u give
a lower bound of 1 - u. A tile in which no ``x_v - ln(bound)``, in float32, reaches the best score so far is skipped,
without drawing the low bits or computing scores. After the first few tiles almost all tiles are skipped.
"""

import torch
import triton
import triton.language as tl

from dllm_kernels.backends.triton import _launch, _tiles
from dllm_kernels.backends.triton._launch import PER_ROW, SIZES
from dllm_kernels.backends.triton._philox import counter_words, halves
from dllm_kernels.backends.triton._select import score
from dllm_kernels.backends.triton._transform import arguments, transformed
from dllm_kernels.corruption._noise import HIGH, LOW, Noise
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._transform import Transform

ROWS = [*PER_ROW, "seed_ptr", "number_ptr"]
COLUMNS = [*SIZES, "stride_n", "before", "first"]
_HIGH, _LOW = tl.constexpr(HIGH), tl.constexpr(LOW)


@triton.jit
def _quarters(word):
    """Split words ``[n]`` into pieces of 16 bits ``[4 n]``, the low one first."""
    mask = tl.full(word.shape, 0xFFFF, tl.uint64)
    even = tl.join(word & mask, (word >> 32) & mask)
    odd = tl.join((word >> 16) & mask, word >> 48)
    return tl.reshape(tl.join(even, odd), [4 * word.shape[0]]).to(tl.uint32)


@triton.jit
def _logits(row_ptr, v, V, transform, ACC: tl.constexpr):
    in_bounds = (v >= 0) & (v < V)
    z = tl.load(row_ptr + v, mask=in_bounds)
    return tl.where(in_bounds, transformed(z, v, transform, ACC), -float("inf"))


@triton.jit
def _high(seed, number, counter, BLOCK_V: tl.constexpr):
    """Draw the high 16 bits of the uniforms of BLOCK_V columns, from a counter on."""
    return _quarters(counter_words(seed, number, counter + tl.arange(0, BLOCK_V // 16).to(tl.int64), _HIGH))


@triton.jit
def _scores(x, seed, number, counter, BLOCK_V: tl.constexpr):
    low = halves(counter_words(seed, number, 2 * counter + tl.arange(0, BLOCK_V // 8).to(tl.int64), _LOW))
    bits = (_high(seed, number, counter, BLOCK_V).to(tl.int64) << 32) + low.to(tl.int64)
    return score(x, (bits.to(tl.float64) + 0.5) * 3.552713678800501e-15)  # 2^-48


@triton.jit
def _better(best, column, scores, v):
    """Update the best score and its column with more columns; the first column wins a tie."""
    top = tl.max(scores, 0)
    if top > best:
        column = tl.min(tl.where(scores == top, v, 0x7FFFFFFF), 0)
        best = top
    return best, column


@triton.jit(do_not_specialize_on_alignment=ROWS, do_not_specialize=COLUMNS)
def _sample(
    logits_ptr, seed_ptr, number_ptr, score_ptr, column_ptr,
    stride_n, V, before, first, logit_scale, inv_softcap, skip_id, TILES, SPLITS,
    WITH_NOISE: tl.constexpr, BLOCK_V: tl.constexpr, FEW: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(0) // SPLITS).to(tl.int64)
    transform = (logit_scale, inv_softcap, skip_id)
    row_ptr = logits_ptr + n * stride_n
    start = (tl.program_id(0) % SPLITS) * TILES * BLOCK_V
    end = tl.minimum(start + TILES * BLOCK_V, V + before)
    best = tl.full([], -float("inf"), tl.float64)
    column = tl.zeros([], tl.int32)
    if WITH_NOISE:
        seed = tl.load(seed_ptr + n)
        number = tl.load(number_ptr + n)
    for tile in range(start, end, BLOCK_V):
        v = tile - before + tl.arange(0, BLOCK_V)
        x = _logits(row_ptr, v, V, transform, ACC)
        if WITH_NOISE:
            high = _high(seed, number, first + (tile >> 4), BLOCK_V)
            least = tl.maximum((65535 - high).to(tl.float32), 1.1641532182693481e-10)  # of 2^16 (1 - u): 2^-33
            bound = tl.max(x.to(tl.float32) - (tl.log(least) - 11.090354888959125), 0)  # 16 ln 2
            if (bound + 1e-6 * (64 + tl.abs(bound))).to(tl.float64) >= best:
                if BLOCK_V == FEW:
                    best, column = _better(best, column, _scores(x, seed, number, first + (tile >> 4), FEW), v)
                else:
                    # Scores of a whole tile at once would take 240 registers.
                    for part in range(tile, tl.minimum(tile + BLOCK_V, end), FEW):
                        i = part - before + tl.arange(0, FEW)
                        y = _logits(row_ptr, i, V, transform, ACC)
                        scores = _scores(y, seed, number, first + (part >> 4), FEW)
                        best, column = _better(best, column, scores, i)
        else:
            best, column = _better(best, column, x.to(tl.float64), v)
    at = tl.program_id(0).to(tl.int64)
    tl.store(score_ptr + at, best)
    tl.store(column_ptr + at, column)


def sample(logits: torch.Tensor, transform: Transform, noise: Noise | None) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``rows/_primitives.py``."""
    (C, V), device = logits.shape, logits.device
    tile = _tiles.sample(V, logits.dtype.itemsize)
    # 16 columns share a counter, and a tile must begin with a counter, ``before`` columns ahead of the first column.
    before, first = (0, 0) if noise is None else (noise.first % 16, noise.first_counter)
    tiles, splits = _launch.share(V + before, tile)
    score = torch.empty(C, splits, dtype=torch.float64, device=device)
    column = torch.empty(C, splits, dtype=torch.int32, device=device)
    if C:
        row_seeds = (None, None) if noise is None else (noise.seeds, noise.row_numbers)
        _sample[(C * splits,)](
            logits, *row_seeds, score, column, logits.stride(0), V, before, first, *arguments(transform), tiles, splits,
            WITH_NOISE=noise is not None, BLOCK_V=tile.block_v, FEW=_tiles.FEW_COLUMNS,
            ACC=_launch.acc(accum_dtype(logits.dtype)), num_warps=tile.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    best, part = score.max(1)
    return best, column.gather(1, part[:, None])[:, 0].to(torch.int64)
