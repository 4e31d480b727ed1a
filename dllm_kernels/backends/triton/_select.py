r"""Exact selection of the k largest scores of a row.

``keys`` maps a float64 score to an int64 of the same order, so that selection compares integers only. ``NEVER``, below
every key, marks positions that cannot be chosen.

The threshold t is the k-th largest key. Keys above t are chosen, and so many keys equal to t, in the order of their
index, as are still missing.

- Rows of up to ``SORTED`` keys are sorted; one warp holds one or several rows. No step depends on the data or waits for
  another warp. Compiled for sm_90, a position of a row of 32 costs a third of what it costs by bisection.
- In longer rows t is found by bisection of [lo, hi]. A row stops early if exactly k keys reach the middle, after some
  20 steps instead of 64.

``topk`` is for rows in registers, ``threshold_in_memory`` and ``chosen_of_tile`` are for longer ones.

``exact_log`` and ``score`` equal those of ``corruption/_gumbel.py``, operation by operation, for the reason given
there. Kernels that use them must be launched with ``enable_fp_fusion=False``.
"""

import triton
import triton.language as tl

from dllm_kernels.corruption import _gumbel

NEVER = tl.constexpr(-(2**63))
SORTED = tl.constexpr(128)

_SQRT_HALF_BITS = tl.constexpr(_gumbel.SQRT_HALF_BITS)
_LN2_HIGH, _LN2_LOW = tl.constexpr(_gumbel.LN2_HIGH), tl.constexpr(_gumbel.LN2_LOW)
_L7, _L6, _L5, _L4, _L3, _L2, _L1 = (tl.constexpr(c) for c in _gumbel.COEFFICIENTS)


@triton.jit
def exact_log(x):
    """Compute ln x of normal positive float64 numbers."""
    bits = x.to(tl.int64, bitcast=True)
    e = (bits - _SQRT_HALF_BITS) >> 52
    f = (bits - (e << 52)).to(tl.float64, bitcast=True) - 1.0
    s = f / (f + 2.0)
    z = s * s
    poly = ((((((z * _L7 + _L6) * z + _L5) * z + _L4) * z + _L3) * z + _L2) * z + _L1) * z
    exponent = e.to(tl.float64)
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + (f - s * (f - poly)))


@triton.jit
def score(log_w, u):
    """Compute log_w - ln(-ln u), float64."""
    return log_w.to(tl.float64) - exact_log(-exact_log(u))


@triton.jit
def keys(scores, choosable):
    """Map scores to int64 keys of the same order; the bits below the sign of negative numbers are flipped."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int64, bitcast=True)  # -0 and 0 tie
    ordered = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    return tl.where(choosable & (scores > -float("inf")), ordered, NEVER)


@triton.jit
def halve(lo, hi, k, middle, count):
    """Halve [lo, hi], given the count of keys >= middle."""
    enough = count >= k
    lo = tl.where(enough, middle, lo)
    hi = tl.where(enough, tl.where(count == k, middle, hi), middle - 1)
    return lo, hi


@triton.jit
def middle_of(lo, hi):
    """Compute the mean of lo and hi, rounded up, without overflow."""
    return (lo | hi) - ((lo ^ hi) >> 1)


@triton.jit
def topk(key, k):
    """Select the k[r] largest keys of row r of key [R, BLOCK]."""
    choosable = key != NEVER
    k = tl.minimum(k, tl.sum(choosable.to(tl.int32), 1))
    if key.shape[1] <= SORTED:
        place = tl.arange(0, key.shape[1])[None, :]
        threshold = tl.sum(tl.where(place == (k - 1)[:, None], tl.sort(key, 1, descending=True), 0), 1)
    else:
        hi = tl.max(key, 1)
        threshold = tl.min(tl.where(choosable, key, hi[:, None]), 1)
        while tl.max((threshold < hi).to(tl.int32), 0) > 0:
            middle = middle_of(threshold, hi)
            count = tl.sum((key >= middle[:, None]).to(tl.int32), 1)
            threshold, hi = halve(threshold, hi, k, middle, count)
    above = key > threshold[:, None]
    tied = (key == threshold[:, None]) & choosable
    missing = k - tl.sum(above.to(tl.int32), 1)
    return (k > 0)[:, None] & (above | (tied & (tl.cumsum(tied.to(tl.int32), 1) <= missing[:, None])))


@triton.jit
def count_in_memory(key_ptr, D, at_least, BLOCK: tl.constexpr):
    """Count the keys, of D, that are >= at_least."""
    lanes = tl.zeros([BLOCK], tl.int32)
    for start in range(0, D, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = tl.load(key_ptr + i, mask=i < D, other=NEVER)
        lanes += (key >= at_least).to(tl.int32)
    return tl.sum(lanes, 0)


@triton.jit
def threshold_in_memory(key_ptr, D, k, lo, hi, choosable, BLOCK: tl.constexpr):
    """Return (threshold, number of keys equal to it that are selected) for D keys within [lo, hi]."""
    k = tl.minimum(k, choosable)
    while lo < hi:
        middle = middle_of(lo, hi)
        lo, hi = halve(lo, hi, k, middle, count_in_memory(key_ptr, D, middle, BLOCK))
    missing = k - count_in_memory(key_ptr, D, lo + 1, BLOCK)
    return tl.where(k > 0, lo, 0x7FFFFFFFFFFFFFFF), missing


@triton.jit
def chosen_of_tile(key, threshold, missing):
    """Select keys of a tile [BLOCK]; return (mask, number of keys equal to the threshold still to be selected)."""
    tied = key == threshold
    chosen = (key > threshold) | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= missing))
    return chosen & (key != NEVER), missing - tl.sum(tied.to(tl.int32), 0)


@triton.jit
def widen(lo, hi, choosable, key):
    """Update the smallest, the largest and the number of choosable keys with one more tile."""
    is_key = key != NEVER
    lo = tl.minimum(lo, tl.min(tl.where(is_key, key, 0x7FFFFFFFFFFFFFFF), 0))
    return lo, tl.maximum(hi, tl.max(key, 0)), choosable + tl.sum(is_key.to(tl.int32), 0)
