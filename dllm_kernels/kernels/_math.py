r"""The arithmetic that the kernels over rows of logits share.

Online softmax, per lane. A program walks a row in tiles of BLOCK_V columns; lane j sees the columns j, j + BLOCK_V, ...
and keeps their maximum m and s = sum exp(x - m). With d = x - m one exponential updates both:

    d > 0:  m <- x,  s <- s exp(-d) + 1          else:  s <- s + exp(d)          so e = exp(-|d|) serves either case.

Only at the end are the lanes reduced: M = max m,  S = sum s exp(m - M). m starts at the most negative finite number,
not at -inf, so that a tile of -inf gives exp(-inf) = 0 and never inf - inf.

What is kept of a row is (M, log S), not their sum: at |M| = 1e4 a float32 logsumexp is already off by 5e-4, and so
would be every probability computed from it, while exp((x - M) - log S) stays exact to rounding. exp is exp2 with the
factor log2(e) folded into one multiply-add.
"""

import triton
import triton.language as tl

# Launch option: a product and a sum may become one fused multiply-add, which is more exact here. Said at every launch,
# since Triton is about to change its default and warns where neither is chosen.
FUSED = {"enable_fp_fusion": True}

SKIP = tl.constexpr(-100)  # the target of a row that does not count
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST_F32 = tl.constexpr(-3.4028234663852886e38)
LOWEST_F64 = tl.constexpr(-1.7976931348623157e308)


@triton.jit
def row_offset(n, L, stride_b, stride_l):
    """Offset in elements of row n = b * L + l; int64, since n * V passes int32 at N * V = 2**31."""
    n = n.to(tl.int64)
    return (n // L) * stride_b + (n % L) * stride_l


@triton.jit
def load_target_logit(row_ptr, y, V, ACC: tl.constexpr):
    """The target's logit; NaN, and nothing read, for a target outside the row."""
    inside = (y >= 0) & (y < V)
    return tl.load(row_ptr + y, mask=inside, other=float("nan")).to(ACC)


@triton.jit
def column_stats(
    row_ptr, start, end, y, target_logit, BLOCK_V: tl.constexpr, ACC: tl.constexpr, WITH_CORRECT: tl.constexpr
):
    """Maximum M, sum of exp(x - M), and whether a column of [start, end) beats the target, reading each column once.

    A column beats the target when it is larger, or equal with a lower index: the target is the argmax when none does.
    """
    lanes = tl.arange(0, BLOCK_V)
    lane_max = tl.full([BLOCK_V], LOWEST_F64 if tl.float64 == ACC else LOWEST_F32, ACC)
    lane_sum = tl.zeros([BLOCK_V], ACC)
    tied = tl.zeros([BLOCK_V], tl.int1)
    for block in range(start, end, BLOCK_V):
        v = block + lanes
        x = tl.load(row_ptr + v, mask=v < end, other=-float("inf"), eviction_policy="evict_first").to(ACC)
        d = x - lane_max
        e = tl.exp2(-tl.abs(d) * LOG2E)
        lane_sum = tl.where(d > 0, lane_sum * e + 1, lane_sum + e)
        lane_max = tl.maximum(lane_max, x)
        if WITH_CORRECT:
            tied = tied | ((x == target_logit) & (v < y))
    row_max = tl.max(lane_max, 0)
    row_sum = tl.sum(lane_sum * tl.exp2((lane_max - row_max) * LOG2E), 0)
    beaten = row_max > target_logit
    if WITH_CORRECT:
        beaten = beaten | (tl.max(tied.to(tl.int32), 0) > 0)
    return row_max, row_sum, beaten


@triton.jit
def grad_columns(row_ptr, out_ptr, v, end, y, scale, row_max, log_sum, ACC: tl.constexpr):
    """Write scale * (softmax - onehot) for the columns v; the one-hot is subtracted before the result is rounded."""
    x = tl.load(row_ptr + v, mask=v < end, other=0.0, eviction_policy="evict_first").to(ACC)
    p = tl.exp2((x - row_max) * LOG2E - log_sum * LOG2E)
    grad = scale * tl.where(v == y, p - 1, p)
    tl.store(out_ptr + v, grad.to(out_ptr.dtype.element_ty), mask=v < end)
