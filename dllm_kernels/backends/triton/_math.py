r"""Shared arithmetic of the kernels over rows of logits.

**Alignment of columns.** The widest access of a thread is 16 bytes, ``WIDE`` columns, and must begin at a multiple of
16 bytes. A row of odd length may begin anywhere, so its columns are read in two parts. Whole, aligned accesses in tiles
of BLOCK_V cover most columns (``wide_columns``; their position is rounded up to a multiple of WIDE, which the compiler
can prove). One narrow access covers the fewer than WIDE columns at each end (``ragged_columns``). Only the address of
the tensor must be aligned.

**Online softmax, per lane.** THREADS lanes iterate over the tiles. Each lane makes REPS accesses of WIDE columns per
tile, all issued before the first is used. It keeps the maximum m and s = sum exp(x - m) of the columns it has read.
With t the lane's maximum of a new tile,

    m' = max(m, t),    s <- s exp(m - m') + sum exp(x - m'),    m <- m',

which is one rescaling per REPS * WIDE columns. Wherever m is subtracted, it is clamped to the most negative finite
number, so that -inf gives exp(-inf) = 0 and never inf - inf. At the end M = max m and S = sum s exp(m - M) over the
lanes. For the entropy a lane also keeps t = sum exp(x - m) (x - m); a larger maximum m' changes it to
exp(m - m') (t + (m - m') s). x - M is computed before the multiplication by log2(e) for exp2, because M * log2(e)
hoisted out of the loop would be infinite for |M| > 2.3e38.

**The argmax.** Each lane keeps the tile at which its maximum last grew, which costs one comparison and one select per
tile. The lowest column with M lies in the first of these tiles among the lanes with m = M, or in a ragged part. Only
that tile is read again. If only the match with a target y is requested, it is read only if M = z_y.

The kernels store (M, log S) of a row and not their sum. At |M| = 1e4 a float32 logsumexp is off by 5e-4, and so is
every probability computed from it, whereas exp((x - M) - log S) is exact to rounding.
"""

import triton
import triton.language as tl

from dllm_kernels.backends.triton._transform import logits_transform_bwd, number, transformed
from dllm_kernels.rows._interface import IGNORE as _IGNORE
from dllm_kernels.rows._stats_interface import FARTHEST as _FARTHEST

IGNORE, FARTHEST = tl.constexpr(_IGNORE), tl.constexpr(_FARTHEST)
LOG2E = tl.constexpr(1.4426950408889634)
NO_COLUMN = tl.constexpr(2**31 - 1)  # of a row, or part of a row, without an argmax
LOWEST_F32 = tl.constexpr(-3.4028234663852886e38)
LOWEST_F64 = tl.constexpr(-1.7976931348623157e308)


@triton.jit
def row_offset(n, L, stride_b, stride_l):
    """Return the offset in elements of row n = b * L + l, or of row n at equal distances if L is None.

    int64, because n * V exceeds int32 at N * V = 2**31.
    """
    if L is None:
        return n.to(tl.int64) * stride_l
    else:
        return (n // L).to(tl.int64) * stride_b + (n % L).to(tl.int64) * stride_l


@triton.jit
def load_target_logit(row_ptr, y, V, transform, ACC: tl.constexpr):
    """Load the target's transformed logit; NaN, without a load, for a target outside the row."""
    inside = (y >= 0) & (y < V)
    return transformed(tl.load(row_ptr + y, mask=inside, other=float("nan")), y, transform, ACC)


@triton.jit
def column_of(y, V):
    """Convert a target to int32, for a cheap comparison per column; -1 if it is out of range."""
    return tl.where((y >= 0) & (y < V), y, -1).to(tl.int32)


@triton.jit
def wide_columns(row, start, end, WIDE: tl.constexpr):
    """Return (position, first column, number of columns) of the aligned accesses in [start, end) of the row."""
    up = row + start + (WIDE - 1)
    at = up // WIDE * WIDE
    first = start + (WIDE - 1) - (up % WIDE).to(tl.int32)
    return at, first, tl.maximum(end - first, 0) // WIDE * WIDE


@triton.jit
def output_of(row, at, first, n, L, out_stride_b, out_stride_l, SAME_STRIDES: tl.constexpr):
    """Return the positions in the output of row n and of its ``first`` aligned column, given those in the input."""
    if SAME_STRIDES:
        return row, at
    else:
        out_row = row_offset(n, L, out_stride_b, out_stride_l)
        return out_row, out_row + first


@triton.jit
def ragged_columns(start, end, first, wide, WIDE: tl.constexpr):
    """Return the columns [2 WIDE] of [start, end) before and after the ``wide`` aligned ones, and their mask."""
    i = tl.arange(0, 2 * WIDE)
    v = tl.where(i < WIDE, start + i, first + wide + (i - WIDE))
    return v, v < tl.where(i < WIDE, tl.minimum(first, end), end)


@triton.jit
def aligned_columns(row, start, end, WIDE: tl.constexpr, ALIGNED: tl.constexpr):
    """Call ``wide_columns`` for an ALIGNED row; an unaligned row begins at its own first column."""
    if ALIGNED is None or ALIGNED:
        return wide_columns(row, start, end, WIDE)
    else:
        return row + start, start, (end - start) // WIDE * WIDE


@triton.jit
def _one_by_one(ptr, i, limit, STEP: tl.constexpr, COUNT: tl.constexpr, OTHER: tl.constexpr, EVICT: tl.constexpr):
    """Load COUNT columns from each of i [n], STEP apart, if i is below the limit: [n, 2, 2, ...]."""
    if COUNT > 1:
        even = _one_by_one(ptr, i, limit, 2 * STEP, COUNT // 2, OTHER, EVICT)
        odd = _one_by_one(ptr + STEP, i, limit, 2 * STEP, COUNT // 2, OTHER, EVICT)
        return tl.join(even, odd)
    elif limit is None:
        return tl.load(ptr + i, eviction_policy=EVICT)
    else:
        return tl.load(ptr + i, mask=i < limit, other=OTHER, eviction_policy=EVICT)


@triton.jit
def load_columns(ptr, limit, BLOCK_V: tl.constexpr, ALIGNED: tl.constexpr, OTHER: tl.constexpr, EVICT: tl.constexpr):
    """Load the columns [BLOCK_V] below the limit, a multiple of WIDE, or all if it is None; OTHER for the rest.

    If the row is not ALIGNED, each thread loads the same columns one by one, so that sums have the same order.
    """
    if ALIGNED is None or ALIGNED:
        i = tl.arange(0, BLOCK_V)
        if limit is None:
            return tl.load(ptr + i, eviction_policy=EVICT)
        else:
            return tl.load(ptr + i, mask=i < limit, other=OTHER, eviction_policy=EVICT)
    else:
        WIDE: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
        i = tl.arange(0, BLOCK_V // WIDE) * WIDE
        return tl.reshape(_one_by_one(ptr, i, limit, 1, WIDE, OTHER, EVICT), [BLOCK_V])


@triton.jit
def finite(m):
    """Clamp a maximum to the most negative finite number, because -inf cannot be subtracted from -inf."""
    return tl.maximum(m, LOWEST_F64 if tl.float64 == m.dtype else LOWEST_F32)


@triton.jit
def masked_tile(x, v, mask, transform, ACC: tl.constexpr, first=None):
    """Transform the logits of the columns v; masked ones are set to -inf again, because a cap would raise them."""
    x = transformed(x, v, transform, ACC, first)
    _, inv_softcap, _ = transform
    if inv_softcap is not None:
        x = tl.where(mask, x, -float("inf"))
    return x


@triton.jit
def rescale_moment(moment, total, step):
    """Return sum e^d (d + step), from ``moment`` = sum e^d d and ``total`` = sum e^d; the maximum grew by ``-step``."""
    return moment + tl.maximum(step, FARTHEST) * total


@triton.jit
def _with_tile(x, lane_max, lane_sum, lane_moment, WITH_ENTROPY: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr):
    """Update (m, s, t) of the lanes with one more tile x [BLOCK_V]."""
    LANES: tl.constexpr = lane_max.shape[0]
    x = tl.reshape(x.to(ACC), [x.shape[0] // (LANES * WIDE), LANES, WIDE])
    new_max = tl.maximum(lane_max, tl.max(tl.max(x, 2), 0))
    m = finite(new_max)
    d = x - m[None, :, None]
    e = tl.exp2(d * LOG2E)
    step = finite(lane_max) - m
    less = tl.exp2(step * LOG2E)
    if WITH_ENTROPY:
        moments = tl.sum(tl.sum(e * tl.maximum(d, FARTHEST), 2), 0)
        lane_moment = less * rescale_moment(lane_moment, lane_sum, step) + moments
    lane_sum = lane_sum * less + tl.sum(tl.sum(e, 2), 0)
    return new_max, lane_sum, lane_moment


@triton.jit
def lane_sum(lanes, x, WIDE: tl.constexpr):
    """Add one more tile x [n] to the sums of the lanes; a lane holds WIDE adjacent columns at a time."""
    LANES: tl.constexpr = lanes.shape[0]
    return lanes + tl.sum(tl.sum(tl.reshape(x, [x.shape[0] // (LANES * WIDE), LANES, WIDE]), 2), 0)


@triton.jit
def total(x):
    """Sum x over its first dimension, with the same bits in every lane. Every sum of floats across lanes uses it.

    In ``tl.sum(a * b, 0)`` the compiler contracts the product into the first step across lanes, which becomes
    fma(a, b, shuffled product). This rounds only one of two products, and in the two lanes not the same one, so the
    lanes end with different totals. All lanes then store theirs at one address, and PTX leaves open which one stays.
    With + 0.0 the product becomes fma(a, b, 0.0) instead, which is the rounded product.
    """
    return tl.sum(x + 0.0, 0)


@triton.jit
def _lowest_equal(x, v, value):
    """Return the lowest of the columns v whose logit x equals the value, or NO_COLUMN."""
    return tl.min(tl.where(x == value, v, NO_COLUMN), 0)


@triton.jit
def _argmax(
    tile_ptr, first, wide, ragged, v, row_max, lane_max, lane_tile, transform, BLOCK_V: tl.constexpr, ACC: tl.constexpr
):
    """Return the lowest column that equals the maximum, among ``wide`` aligned ones and the ragged ones v."""
    tile = tl.min(tl.where(lane_max == row_max, lane_tile, wide), 0) // BLOCK_V * BLOCK_V  # a multiple: wide accesses
    lanes = tl.arange(0, BLOCK_V)
    x = tl.load(tile_ptr + tile + lanes, mask=lanes < wide - tile, other=float("nan"))
    x = transformed(x, lanes, transform, ACC, first + tile)
    return tl.minimum(_lowest_equal(x, first + tile + lanes, row_max), _lowest_equal(ragged, v, row_max))


@triton.jit
def best_of_parts(part_best_ptr, mask, maxima, row_max):
    """Return the argmax of a row from those of its parts, one per entry of ``part_best_ptr``, or NO_COLUMN."""
    return _lowest_equal(maxima, tl.load(part_best_ptr, mask=mask, other=NO_COLUMN), row_max)


@triton.jit
def predicted(best, row_sum, skip_id):
    """Return the argmax of a row, and the lowest column that is not skipped if its softmax is NaN, int64."""
    lowest = 0
    if skip_id is not None:
        lowest = (skip_id == 0).to(tl.int32)
    return tl.where(row_sum > 0, best, lowest).to(tl.int64)


@triton.jit
def column_stats(
    logits_ptr, row, start, end, target_logit, transform,
    BLOCK_V: tl.constexpr, THREADS: tl.constexpr, ACC: tl.constexpr, WITH_CORRECT: tl.constexpr,
    WITH_IDS: tl.constexpr, WITH_ENTROPY: tl.constexpr, ALIGNED: tl.constexpr, EVICT: tl.constexpr,
    AHEAD: tl.constexpr = False,
):  # fmt: skip
    """Return (M, S, best, (T,)) of the columns [start, end), reading each column once.

    For the transformed logits x, M is the maximum, S = sum exp(x - M), and T = sum exp(x - M) (x - M) if WITH_ENTROPY.
    The last tuple holds the sums that only the row statistics request.

    ``best`` is the argmax, the lowest column that equals M. With WITH_CORRECT alone it is NO_COLUMN unless M equals
    ``target_logit``.

    ALIGNED: True if all rows begin at multiples of WIDE columns. False: they do not, and columns are loaded one by one,
    so that sums have the same order as in aligned rows. None: rows may begin anywhere; as fast as True, but the order
    of a sum depends on where its row begins.

    AHEAD: load each tile while the previous one is processed, for a program that occupies its multiprocessor alone.
    """
    WIDE: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    LANES: tl.constexpr = min(THREADS, BLOCK_V // WIDE)
    at, first, wide = aligned_columns(row, start, end, WIDE, ALIGNED)
    tile_ptr = logits_ptr + at
    lanes = tl.arange(0, BLOCK_V)
    lane_max = tl.full([LANES], -float("inf"), ACC)
    lane_sum = tl.zeros([LANES], ACC)
    lane_moment = lane_sum
    lane_tile = tl.zeros([LANES], tl.int32)
    whole = wide // BLOCK_V * BLOCK_V
    if AHEAD:
        x_ahead = load_columns(tile_ptr, whole, BLOCK_V, ALIGNED, -float("inf"), EVICT)
    for tile in range(0, whole, BLOCK_V):
        if AHEAD:  # the last iteration reloads its own tile, which is cheaper than masking
            x = x_ahead
            ahead = tl.minimum(tile + BLOCK_V, whole - BLOCK_V)
            x_ahead = load_columns(tile_ptr + ahead, None, BLOCK_V, ALIGNED, -float("inf"), EVICT)
        else:
            x = load_columns(tile_ptr + tile, None, BLOCK_V, ALIGNED, -float("inf"), EVICT)
        x = transformed(x, lanes, transform, ACC, first + tile)
        before = lane_max
        lane_max, lane_sum, lane_moment = _with_tile(x, lane_max, lane_sum, lane_moment, WITH_ENTROPY, WIDE, ACC)
        if WITH_CORRECT or WITH_IDS:
            lane_tile = tl.where(lane_max > before, tile, lane_tile)
    if whole < wide:
        rest = lanes < wide - whole
        x = load_columns(tile_ptr + whole, wide - whole, BLOCK_V, ALIGNED, -float("inf"), EVICT)
        x = masked_tile(x, lanes, rest, transform, ACC, first + whole)
        before = lane_max
        lane_max, lane_sum, lane_moment = _with_tile(x, lane_max, lane_sum, lane_moment, WITH_ENTROPY, WIDE, ACC)
        if WITH_CORRECT or WITH_IDS:
            lane_tile = tl.where(lane_max > before, whole, lane_tile)
    v, mask = ragged_columns(start, end, first, wide, WIDE)
    x = tl.load(logits_ptr + row + v, mask=mask, other=-float("inf"))
    x = masked_tile(x, v, mask, transform, ACC, None)
    row_max = finite(tl.maximum(tl.max(lane_max, 0), tl.max(x, 0)))
    d = x - row_max
    e = tl.exp2(d * LOG2E)
    step = finite(lane_max) - row_max
    less = tl.exp2(step * LOG2E)
    moment = row_max
    if WITH_ENTROPY:
        moment = total(less * rescale_moment(lane_moment, lane_sum, step)) + total(e * tl.maximum(d, FARTHEST))
    row_sum = total(lane_sum * less) + total(e)
    best = tl.full([], NO_COLUMN, tl.int32)
    if WITH_IDS:
        best = _argmax(tile_ptr, first, wide, x, v, row_max, lane_max, lane_tile, transform, BLOCK_V, ACC)
    elif WITH_CORRECT:  # noqa: SIM102  (a compile-time condition; the next is a run-time condition)
        if row_max == target_logit:
            best = _argmax(tile_ptr, first, wide, x, v, row_max, lane_max, lane_tile, transform, BLOCK_V, ACC)
    return row_max, row_sum, best, (moment,)


@triton.jit
def store_grad(
    x, out_ptr, i, mask, hot, scale, row_max, log_sum, transform, first, ACC: tl.constexpr, EVICT: tl.constexpr
):
    """Write scale * (softmax - onehot) * slope for the columns i; round to the output dtype only at the end.

    The one-hot is at ``hot``. ``first`` as in ``transformed``.
    """
    logit_scale, inv_softcap, skip_id = transform
    # p need not be right in the skipped column, because the gradient is 0 there.
    p = tl.exp2((transformed(x, i, (logit_scale, inv_softcap, None), ACC) - row_max) * LOG2E - log_sum * LOG2E)
    grad = tl.where(i == hot, p - 1, p)
    if inv_softcap is None and logit_scale is not None:  # a constant slope is multiplied into the row's scale
        grad = logits_transform_bwd((scale * number(logit_scale, ACC)) * grad, x, i, (None, None, skip_id), ACC, first)
    else:
        grad = logits_transform_bwd(scale * grad, x, i, transform, ACC, first)
    tl.store(out_ptr + i, grad.to(out_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)


@triton.jit
def grad_tiles(
    in_ptr, out_ptr, column, wide, hot, scale, row_max, log_sum, transform, BLOCK_V: tl.constexpr, ACC: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Write the gradient of ``wide`` columns from the last tile to the first; each tile is loaded one iteration ahead.

    The pointers are at the ``column`` of the row, and ``hot`` is relative to it. The order is reversed, because the
    tiles read last are still in the cache. The output may be the input.
    """
    i = tl.arange(0, BLOCK_V)
    tile = (wide - 1) // BLOCK_V * BLOCK_V
    x = tl.load(in_ptr + tile + i, mask=i < wide - tile, eviction_policy="evict_first")
    for _ in range(0, wide, BLOCK_V):
        ahead = tile - BLOCK_V
        x_ahead = tl.load(in_ptr + ahead + i, mask=i >= -ahead, eviction_policy="evict_first")
        first = column + tile
        store_grad(
            x, out_ptr + tile, i, i < wide - tile, hot - tile, scale, row_max, log_sum, transform, first, ACC, EVICT
        )
        x = x_ahead
        tile = ahead


@triton.jit
def zero_columns(out_ptr, i, mask):
    """Write zeros for the columns i."""
    tl.store(out_ptr + i, tl.zeros(i.shape, out_ptr.dtype.element_ty), mask=mask)
