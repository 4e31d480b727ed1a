r"""Row statistics of active rows: log-probabilities at given ids, entropy, a sum of log-mixtures, and their gradient.

With d_v = x_v - M for the transformed logits x of a row, M = max x, S = sum e^{d_v}, T = sum e^{d_v} d_v and
p_v = e^{d_v} / S:

    log p_k = d_k - log S,        lse = M + log S,        H = log S - T / S,
    F = sum_v log(a + b p_v),     W = sum_v q_v,          q_v = p_v / (p_v + a / b), 1 where a is 0.

**Forward.** Each lane of a program keeps (m, s, t) of the columns that it has read (``_math.column_stats``). Each
program that shares a row writes (M, S, T). A second kernel merges them by the same rule and reads the logits of the
ids. F and W need S, and therefore a separate pass, with the grid of backward. Their parts are summed afterwards, in a
fixed order.

**Backward** reads each active row once and writes every row, inactive ones as zeros, in one launch for all outputs:

    dL/dx_v = sum_k g_k [v = id_k] + p_v (A + B log p_v) + g_F q_v,

with A, B and g_F computed beforehand, by one launch for all outputs (``rows/_stats_interface.py``, which also defines
the interface of the functions here). A tile compares its columns with the ids only if it contains one of them, and with
many ids only with those that it contains. log p_v is clamped to FARTHEST, at which p_v is 0, because the product of 0
and -inf would be NaN.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from dllm_kernels.backends.triton import _launch, _math, _tiles
from dllm_kernels.backends.triton._launch import FUSED, SIZES, TRANSFORM
from dllm_kernels.backends.triton._math import FARTHEST, IGNORE, LOG2E
from dllm_kernels.backends.triton._transform import arguments, logits_transform_bwd, transformed, with_column
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._stats_interface import Coefficients, Combined, Norms, StatsFlags, StatsResult, Upstream

LEAST_FACTOR, MOST_FACTOR = tl.constexpr(1e-9), tl.constexpr(1e9)  # the product of four of them is a normal float32
COEFFICIENTS = 1024  # ids per program
STRIDES = ("L", "stride_b", "stride_l", "out_stride_b", "out_stride_l")
# Pointers to rows that are not specialised on alignment, see ``_launch.PER_ROW``.
PER_ROW = [
    *_launch.PER_ROW, *(f"{n}_ptr" for n in Coefficients._fields), *(f"upstream_{n}_ptr" for n in Upstream._fields),
    "log_probs_ptr", "mix_weight_ptr", "size_ptr", "with_gradient_ptr",
]  # fmt: skip
Tensor = torch.Tensor


@triton.jit(do_not_specialize_on_alignment=PER_ROW, do_not_specialize=SIZES)
def _row_stats_parts(
    logits_ptr, ids_ptr, active_ptr, part_max_ptr, part_sum_ptr, part_moment_ptr, part_best_ptr,
    L, stride_b, stride_l, V, K, logit_scale, inv_softcap, skip_id, TILES, SPLITS,
    WITH_CORRECT: tl.constexpr, WITH_IDS: tl.constexpr, WITH_ENTROPY: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_V: tl.constexpr, THREADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) // SPLITS
    k = tl.program_id(0) % SPLITS
    transform = (logit_scale, inv_softcap, skip_id)
    if tl.load(active_ptr + n) != IGNORE:
        row = _math.row_offset(n, L, stride_b, stride_l)
        target_logit = tl.zeros([], ACC)
        if WITH_CORRECT and not WITH_IDS:
            y = tl.load(ids_ptr + n.to(tl.int64) * K)
            target_logit = _math.load_target_logit(logits_ptr + row, y, V, transform, ACC)
        start = k * TILES * BLOCK_V
        end = tl.minimum(start + TILES * BLOCK_V, V)
        row_max, row_sum, best, sums = _math.column_stats(
            logits_ptr, row, start, end, target_logit, transform,
            BLOCK_V, THREADS, ACC, WITH_CORRECT, WITH_IDS, WITH_ENTROPY, ALIGNED, "evict_first",
        )  # fmt: skip
        part = n.to(tl.int64) * SPLITS + k
        tl.store(part_max_ptr + part, row_max)
        tl.store(part_sum_ptr + part, row_sum)
        if WITH_ENTROPY:
            tl.store(part_moment_ptr + part, sums[0])
        if WITH_CORRECT or WITH_IDS:
            tl.store(part_best_ptr + part, best)


@triton.jit(do_not_specialize_on_alignment=PER_ROW, do_not_specialize=SIZES)
def _row_stats_merge(
    logits_ptr, ids_ptr, active_ptr, part_max_ptr, part_sum_ptr, part_moment_ptr, part_best_ptr,
    log_prob_ptr, max_ptr, log_sum_ptr, entropy_ptr, correct_ptr, best_ptr,
    L, stride_b, stride_l, V, K, logit_scale, inv_softcap, skip_id, SPLITS,
    WITH_CORRECT: tl.constexpr, WITH_IDS: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    id_mask = k < K
    ids_at = n.to(tl.int64) * K + k
    if tl.load(active_ptr + n) != IGNORE:
        s = tl.arange(0, BLOCK_SPLITS)
        part_mask = s < SPLITS
        part = n.to(tl.int64) * SPLITS + s
        maxima = tl.load(part_max_ptr + part, mask=part_mask, other=-float("inf"))
        sums = tl.load(part_sum_ptr + part, mask=part_mask, other=0.0)
        row_max = _math.finite(tl.max(maxima, 0))
        step = _math.finite(maxima) - row_max
        less = tl.exp2(step * LOG2E)
        row_sum = _math.total(sums * less)
        log_sum = tl.log(row_sum)
        tl.store(max_ptr + n, row_max)
        tl.store(log_sum_ptr + n, log_sum)
        if WITH_ENTROPY:
            moments = tl.load(part_moment_ptr + part, mask=part_mask, other=0.0)
            moment = _math.total(less * _math.rescale_moment(moments, sums, step))
            tl.store(entropy_ptr + n, log_sum - moment / row_sum)
        ids = tl.load(ids_ptr + ids_at, mask=id_mask)
        inside = (ids >= 0) & (ids < V)
        z = tl.load(logits_ptr + _math.row_offset(n, L, stride_b, stride_l) + ids, mask=inside)
        x = tl.where(inside, transformed(z, ids, (logit_scale, inv_softcap, skip_id), ACC), float("nan"))
        log_prob = tl.where(row_sum == 0, float("nan"), (x - row_max) - log_sum)
        tl.store(log_prob_ptr + ids_at, tl.where(ids == IGNORE, 0.0, log_prob), mask=id_mask)
        best = tl.full([], _math.NO_COLUMN, tl.int32)
        if WITH_CORRECT or WITH_IDS:
            best = _math.best_of_parts(part_best_ptr + part, part_mask, _math.finite(maxima), row_max)
        if WITH_CORRECT:
            first = (k == 0) & (log_prob == log_prob) & (ids == best)
            tl.store(correct_ptr + n, tl.max(first.to(tl.int32), 0) > 0)
        if WITH_IDS:
            tl.store(best_ptr + n, _math.predicted(best, row_sum, skip_id))
    else:
        tl.store(log_prob_ptr + ids_at, tl.zeros([BLOCK_K], ACC), mask=id_mask)
        tl.store(max_ptr + n, 0.0)
        tl.store(log_sum_ptr + n, 0.0)
        if WITH_ENTROPY:
            tl.store(entropy_ptr + n, 0.0)
        if WITH_CORRECT:
            tl.store(correct_ptr + n, False)
        if WITH_IDS:
            tl.store(best_ptr + n, IGNORE)


@triton.jit
def _mix_weights(q, lane_weight, v, mask, first, skip_id, WIDE: tl.constexpr):
    """Add the q of one more tile to W of the lanes; the skipped column, and columns outside of ``mask``, count as 0."""
    if skip_id is not None:
        q = with_column(q, v, skip_id, 0.0, first)
    if mask is not None:
        q = tl.where(mask, q, 0.0)
    return _math.lane_sum(lane_weight, q, WIDE)


@triton.jit
def _with_mix(
    z, v, mask, first, lane_mix, lane_weight, row_max, zero_a, a, ratio, a_over_ratio, transform,
    WITH_WEIGHT: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add the columns v of one more tile to F and W of the lanes; if a is 0, F lacks the term V log(b / S).

    ``first`` as in ``transformed``. ``mask``: the columns to count; None: all but the skipped one.
    """
    logit_scale, inv_softcap, skip_id = transform  # the skipped column need not be -inf, because its terms are set to 0
    d = transformed(z, v, (logit_scale, inv_softcap, None), ACC) - row_max
    e = tl.exp2(d * LOG2E)
    terms = tl.where(zero_a, d, tl.log(a + ratio * e))
    if mask is not None:
        terms = tl.where(mask, terms, 0.0)
    if skip_id is not None:
        terms = with_column(terms, v, skip_id, 0.0, first)
    lane_mix = _math.lane_sum(lane_mix, terms, WIDE)
    if WITH_WEIGHT:
        q = tl.where(zero_a, 1.0, e / (e + a_over_ratio))
        lane_weight = _mix_weights(q, lane_weight, v, mask, first, skip_id, WIDE)
    return lane_mix, lane_weight


@triton.jit
def _products_of_four(x):
    """Multiply the last dimension of x [n, LANES, WIDE] in groups of four adjacent entries, or of two if WIDE is 2."""
    WIDE: tl.constexpr = x.shape[2]
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], WIDE // 2, 2]))
    x = even * odd
    if WIDE >= 4:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], WIDE // 4, 2]))
        x = even * odd
    return x


@triton.jit
def _with_products(
    z, v, first, lane_mix, lane_weight, row_max, a, ratio, a_over_ratio, transform, WITH_WEIGHT: tl.constexpr,
    WIDE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Add an unmasked tile like ``_with_mix``, with one logarithm of the product of four terms, which fits float32."""
    logit_scale, inv_softcap, skip_id = transform
    e = tl.exp2((transformed(z, v, (logit_scale, inv_softcap, None), ACC) - row_max) * LOG2E)
    LANES: tl.constexpr = lane_mix.shape[0]
    terms = a + ratio * e
    if skip_id is not None:
        terms = with_column(terms, v, skip_id, 1.0, first)
    products = _products_of_four(tl.reshape(terms, [z.shape[0] // (LANES * WIDE), LANES, WIDE]))
    lane_mix += tl.sum(tl.sum(tl.log(products), 2), 0)
    if WITH_WEIGHT:
        lane_weight = _mix_weights(e / (e + a_over_ratio), lane_weight, v, None, first, skip_id, WIDE)
    return lane_mix, lane_weight


@triton.jit(do_not_specialize_on_alignment=PER_ROW, do_not_specialize=SIZES)
def _row_stats_mix(
    logits_ptr, active_ptr, max_ptr, log_sum_ptr, a_ptr, b_ptr, part_mix_ptr, part_weight_ptr,
    L, stride_b, stride_l, V, logit_scale, inv_softcap, skip_id, TILES, SPLITS,
    WITH_WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr, THREADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    LANES: tl.constexpr = min(THREADS, BLOCK_V // WIDE)
    n = tl.program_id(0) // SPLITS
    transform = (logit_scale, inv_softcap, skip_id)
    mix = tl.zeros([], ACC)
    weight = mix
    if tl.load(active_ptr + n) != IGNORE:
        a = tl.load(a_ptr + n)
        b = tl.load(b_ptr + n)
        row_max = tl.load(max_ptr + n)
        log_sum = tl.load(log_sum_ptr + n)
        zero_a = (a == 0) & (b > 0)
        ratio = b * tl.exp(-log_sum)
        a_over_ratio = tl.where(b == 0, float("inf"), a / ratio)
        row = _math.row_offset(n, L, stride_b, stride_l)
        at, first, wide = _math.aligned_columns(row, 0, V, WIDE, ALIGNED)
        start = (tl.program_id(0) % SPLITS) * TILES * BLOCK_V
        end = tl.maximum(tl.minimum(start + TILES * BLOCK_V, wide), start)
        whole = start + (end - start) // BLOCK_V * BLOCK_V
        i = tl.arange(0, BLOCK_V)
        lane_mix = tl.zeros([LANES], ACC)
        lane_weight = lane_mix
        tile_ptr = logits_ptr + at
        if (a > LEAST_FACTOR) & (a + b < MOST_FACTOR):
            for tile in range(start, whole, BLOCK_V):
                z = _math.load_columns(tile_ptr + tile, None, BLOCK_V, ALIGNED, 0.0, "evict_first")
                lane_mix, lane_weight = _with_products(
                    z, i, first + tile, lane_mix, lane_weight, row_max, a, ratio, a_over_ratio, transform,
                    WITH_WEIGHT, WIDE, ACC,
                )  # fmt: skip
        else:
            for tile in range(start, whole, BLOCK_V):
                z = _math.load_columns(tile_ptr + tile, None, BLOCK_V, ALIGNED, 0.0, "evict_first")
                lane_mix, lane_weight = _with_mix(
                    z, i, None, first + tile, lane_mix, lane_weight, row_max, zero_a, a, ratio, a_over_ratio, transform,
                    WITH_WEIGHT, WIDE, ACC,
                )  # fmt: skip
        if whole < end:
            z = _math.load_columns(tile_ptr + whole, end - whole, BLOCK_V, ALIGNED, 0.0, "evict_first")
            lane_mix, lane_weight = _with_mix(
                z, i, i < end - whole, first + whole, lane_mix, lane_weight, row_max, zero_a, a, ratio, a_over_ratio,
                transform, WITH_WEIGHT, WIDE, ACC,
            )  # fmt: skip
        count = end - start
        mix = _math.total(lane_mix)
        weight = _math.total(lane_weight)
        if start == 0:  # the first program of a row also processes the ragged columns
            v, ragged_mask = _math.ragged_columns(0, V, first, wide, WIDE)
            z = tl.load(logits_ptr + row + v, mask=ragged_mask)
            few_mix, few_weight = _with_mix(
                z, v, ragged_mask, None, tl.zeros([1], ACC), tl.zeros([1], ACC), row_max, zero_a, a, ratio,
                a_over_ratio, transform, WITH_WEIGHT, 2 * WIDE, ACC,
            )  # fmt: skip
            mix += _math.total(few_mix)
            weight += _math.total(few_weight)
            count += V - wide
            if skip_id is not None:
                count -= ((skip_id >= 0) & (skip_id < V)).to(tl.int32)
        if zero_a:
            mix += count * tl.log(ratio)
    tl.store(part_mix_ptr + tl.program_id(0).to(tl.int64), mix)
    if WITH_WEIGHT:
        tl.store(part_weight_ptr + tl.program_id(0).to(tl.int64), weight)


@triton.jit
def _next(near, k):
    """Return the first index after k at which ``near [BLOCK_K]`` is True, or BLOCK_K."""
    j = tl.arange(0, near.shape[0])
    return tl.min(tl.where(near & (j > k), j, near.shape[0]), 0)


@triton.jit
def _store_grad(
    x, out_ptr, i, mask, first, near, row, ids_ptr, grad_ids_ptr, K, transform,
    WITH_LOG: tl.constexpr, WITH_MIX: tl.constexpr, THROUGH_TRANSFORM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write the gradient for the columns i.

    ``near [BLOCK_K]`` is True for the ids among these columns; ``first`` as in ``transformed``.
    """
    row_max, log_sum, p_coef, p_logp_coef, mix_coef, ratio, zero_a = row
    log_p = (transformed(x, i, transform, ACC, first) - row_max) - log_sum
    p = tl.exp2(log_p * LOG2E)
    if WITH_LOG:
        grad = p * (p_coef + p_logp_coef * tl.maximum(log_p, FARTHEST))
    else:
        grad = p * p_coef
    if WITH_MIX:
        grad += mix_coef * tl.where(zero_a, 1.0, p / (p + ratio))
    zero = 0 if first is None else first
    if near.shape[0] <= 4:  # with eight, the compiler makes every tile compare
        if tl.max(near.to(tl.int32), 0) > 0:
            for k in tl.static_range(near.shape[0]):
                id_mask = k < K
                hot = tl.load(ids_ptr + k, mask=id_mask, other=-1).to(tl.int32)
                grad = tl.where(i == hot - zero, grad + tl.load(grad_ids_ptr + k, mask=id_mask), grad)
    else:  # a row of many ids has some in most tiles, but few in each
        k = _next(near, -1)
        while k < near.shape[0]:
            hot = tl.load(ids_ptr + k).to(tl.int32)
            grad = tl.where(i == hot - zero, grad + tl.load(grad_ids_ptr + k), grad)
            k = _next(near, k)
    if THROUGH_TRANSFORM:
        grad = logits_transform_bwd(grad, x, i, transform, ACC, first)
    tl.store(out_ptr + i, grad.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=PER_ROW, do_not_specialize=SIZES)
def _row_stats_bwd(
    logits_ptr, ids_ptr, active_ptr, grad_ids_ptr, p_coef_ptr, p_logp_coef_ptr, mix_coef_ptr, a_ptr, b_ptr, max_ptr,
    log_sum_ptr, out_ptr, L, stride_b, stride_l, out_stride_b, out_stride_l, V, K, logit_scale, inv_softcap, skip_id,
    TILES, SPLITS, SAME_STRIDES: tl.constexpr, WITH_LOG: tl.constexpr, WITH_MIX: tl.constexpr,
    THROUGH_TRANSFORM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    n = tl.program_id(0) // SPLITS
    transform = (logit_scale, inv_softcap, skip_id)
    row = _math.row_offset(n, L, stride_b, stride_l)
    at, first, wide = _math.wide_columns(row, 0, V, WIDE)
    out_row, out_at = _math.output_of(row, at, first, n, L, out_stride_b, out_stride_l, SAME_STRIDES)
    start = (tl.program_id(0) % SPLITS) * TILES * BLOCK_V
    end = tl.minimum(start + TILES * BLOCK_V, wide)
    i = tl.arange(0, BLOCK_V)
    v, ragged_mask = _math.ragged_columns(0, V, first, wide, WIDE)  # for the first program of a row
    if tl.load(active_ptr + n) != IGNORE:
        k = tl.arange(0, BLOCK_K)
        ids_at = n.to(tl.int64) * K
        ids = _math.column_of(tl.load(ids_ptr + ids_at + k, mask=k < K, other=IGNORE), V)
        p_coef = tl.load(p_coef_ptr + n)
        p_logp_coef, mix_coef, ratio, zero_a = p_coef, p_coef, p_coef, False
        if WITH_LOG:
            p_logp_coef = tl.load(p_logp_coef_ptr + n)
        if WITH_MIX:
            mix_coef = tl.load(mix_coef_ptr + n)
            a = tl.load(a_ptr + n)
            b = tl.load(b_ptr + n)
            ratio = tl.where(b == 0, float("inf"), a / b)
            zero_a = (a == 0) & (b > 0)
        row_terms = (tl.load(max_ptr + n), tl.load(log_sum_ptr + n), p_coef, p_logp_coef, mix_coef, ratio, zero_a)
        end = tl.maximum(start, end)
        # the last tile; before ``start`` if there is none
        tile = start + tl.cdiv(end - start, BLOCK_V) * BLOCK_V - BLOCK_V
        tile_mask = (i < end - tile) & (i >= start - tile)
        x = tl.load(logits_ptr + at + tile + i, mask=tile_mask, eviction_policy="evict_first")
        for _ in range(start, end, BLOCK_V):
            ahead = tile - BLOCK_V
            x_ahead = tl.load(logits_ptr + at + ahead + i, mask=i >= start - ahead, eviction_policy="evict_first")
            column = first + tile
            near = (ids >= column) & (ids < column + BLOCK_V)
            _store_grad(
                x, out_ptr + out_at + tile, i, i < end - tile, column, near, row_terms,
                ids_ptr + ids_at, grad_ids_ptr + ids_at, K, transform, WITH_LOG, WITH_MIX, THROUGH_TRANSFORM, ACC,
            )  # fmt: skip
            x = x_ahead
            tile = ahead
        if start == 0:
            x_few = tl.load(logits_ptr + row + v, mask=ragged_mask)
            tl.debug_barrier()  # in place, all threads, also those beyond the 2 WIDE columns, must load before a store
            near = (ids >= 0) & ((ids < first) | (ids >= first + wide))
            _store_grad(
                x_few, out_ptr + out_row, v, ragged_mask, None, near, row_terms,
                ids_ptr + ids_at, grad_ids_ptr + ids_at, K, transform, WITH_LOG, WITH_MIX, THROUGH_TRANSFORM, ACC,
            )  # fmt: skip
    else:
        for tile in range(start, end, BLOCK_V):
            _math.zero_columns(out_ptr + out_at + tile, i, i < end - tile)
        if start == 0:
            _math.zero_columns(out_ptr + out_row, v, ragged_mask)


@triton.jit
def _product(grad, value):
    """Multiply a gradient and a value; 0 if the gradient is 0, even if the value is NaN."""
    return tl.where(grad != 0, grad * value, 0.0)


@triton.jit(
    do_not_specialize_on_alignment=[*PER_ROW, *(f"{n}_ptr" for n in StatsFlags._fields)],
    do_not_specialize=[*SIZES, "N"],
)
def _row_stats_coefficients(
    log_probs_ptr, entropy_ptr, mix_weight_ptr, upstream_log_probs_ptr, upstream_lse_ptr, upstream_entropy_ptr,
    upstream_mix_ptr, ids_ptr, active_ptr, grad_ids_ptr, p_coef_ptr, p_logp_coef_ptr, size_ptr, with_gradient_ptr, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_mask = n < N
    id_mask = row_mask[:, None] & (k < K)[None, :]
    at = n[:, None] * K + k[None, :]
    grad_ids = tl.zeros([BLOCK_N, BLOCK_K], log_probs_ptr.dtype.element_ty)
    if upstream_log_probs_ptr is not None:
        upstream = tl.load(upstream_log_probs_ptr + at, mask=id_mask, other=0.0)
        log_p = tl.load(log_probs_ptr + at, mask=id_mask)
        grad_ids = tl.where(tl.load(ids_ptr + at, mask=id_mask) == IGNORE, 0.0, upstream)
        grad_ids = tl.where((log_p != log_p) & (upstream != 0), float("nan"), grad_ids)
    tl.store(grad_ids_ptr + at, grad_ids, mask=id_mask)
    p_coef = -tl.sum(grad_ids, 1)
    size = tl.sum(tl.abs(grad_ids), 1)
    if upstream_lse_ptr is not None:
        upstream = tl.load(upstream_lse_ptr + n, mask=row_mask)
        p_coef += upstream
        size += tl.abs(upstream)
    if upstream_entropy_ptr is not None:
        upstream = tl.load(upstream_entropy_ptr + n, mask=row_mask)
        p_coef -= _product(upstream, tl.load(entropy_ptr + n, mask=row_mask))
        size += tl.abs(upstream)
        tl.store(p_logp_coef_ptr + n, -upstream, mask=row_mask)
    if upstream_mix_ptr is not None:
        upstream = tl.load(upstream_mix_ptr + n, mask=row_mask)
        p_coef -= _product(upstream, tl.load(mix_weight_ptr + n, mask=row_mask))
        size += tl.abs(upstream)
    tl.store(p_coef_ptr + n, p_coef, mask=row_mask)
    active = tl.load(active_ptr + n, mask=row_mask)
    size = tl.where(active == IGNORE, 0.0, size + tl.abs(p_coef))
    tl.store(size_ptr + n, size, mask=row_mask)
    tl.store(with_gradient_ptr + n, tl.where(size == 0, IGNORE, active), mask=row_mask)


def forward(logits: Tensor, request: Any) -> StatsResult:
    """Launch the forward pass."""
    V = logits.shape[2]
    N, K = request.ids.shape
    acc = accum_dtype(logits.dtype)
    new = functools.partial(torch.empty, dtype=acc, device=logits.device)
    result = StatsResult(
        new(N, K), row_max=new(N), log_sum=new(N), entropy=new(N) if request.flags.entropy else None,
        correct=new(N, dtype=torch.bool) if request.correct else None,
        best=new(N, dtype=torch.int64) if request.best else None,
    )  # fmt: skip
    if N:
        tile = _tiles.token_nll_fwd(V, logits.element_size())
        tiles, splits = _launch.share(V, tile)
        shared = {
            "logits_ptr": logits, "ids_ptr": request.ids, "active_ptr": request.targets, "part_max_ptr": new(N, splits),
            "part_sum_ptr": new(N, splits), "part_moment_ptr": new(N, splits) if request.flags.entropy else None,
            "part_best_ptr": new(N, splits, dtype=torch.int32) if request.correct or request.best else None,
            "V": V, "K": K, "SPLITS": splits, **_named(_launch.strides(logits), request.transform),
            "WITH_CORRECT": request.correct, "WITH_IDS": request.best, "WITH_ENTROPY": request.flags.entropy,
            "ACC": _launch.acc(acc),
        }  # fmt: skip
        _row_stats_parts[(N * splits,)](
            **shared, TILES=tiles, ALIGNED=_launch.aligned(logits), **_launch.tile_options(tile)
        )
        _row_stats_merge[(N,)](
            **shared, log_prob_ptr=result.log_probs, max_ptr=result.row_max, log_sum_ptr=result.log_sum,
            entropy_ptr=result.entropy, correct_ptr=result.correct, best_ptr=result.best, num_warps=1, **FUSED,
            BLOCK_SPLITS=triton.next_power_of_2(splits), BLOCK_K=triton.next_power_of_2(K),
        )  # fmt: skip
    F, W = (None, None) if request.a is None else mix(logits, request, result.norms)
    return result._replace(mix=F, mix_weight=W)


def _named(strides: tuple[int | None, ...], transform: Any) -> dict[str, Any]:
    """Name the strides, of the logits or of logits and output, and the arguments for the transform."""
    return dict(zip((*STRIDES[: len(strides)], *TRANSFORM), (*strides, *arguments(transform)), strict=True))


def mix(logits: Tensor, request: Any, norms: Norms) -> tuple[Tensor, Tensor | None]:
    """Launch the pass for F and W."""
    B, L, V = logits.shape
    N = B * L
    tile = _tiles.token_nll_bwd(V, logits.element_size())
    tiles, splits = _launch.share(V, tile)
    # Half the columns per thread, because otherwise a skipped column spills on sm_90.
    tile = tile._replace(num_warps=_tiles.at_most_a_thread_a_column(2 * tile.num_warps, tile.block_v))
    F = torch.empty(N, splits, dtype=request.a.dtype, device=logits.device)
    W = torch.empty_like(F) if request.gradients else None
    if N:
        _row_stats_mix[(N * splits,)](
            logits_ptr=logits, active_ptr=request.targets, max_ptr=norms[0], log_sum_ptr=norms[1], a_ptr=request.a,
            b_ptr=request.b, part_mix_ptr=F, part_weight_ptr=W, V=V, TILES=tiles, SPLITS=splits,
            **_named(_launch.strides(logits), request.transform), WITH_WEIGHT=request.gradients,
            ALIGNED=_launch.aligned(logits), ACC=_launch.acc(request.a.dtype), **_launch.tile_options(tile),
        )  # fmt: skip
    return F.sum(1), None if W is None else W.sum(1)


def coefficients(request: Any, result: Any, upstream: Any) -> Combined:
    """Launch the combination of the upstream gradients."""
    N, K = result.log_probs.shape
    new = result.log_probs.new_empty
    c = Coefficients(new(N, K), new(N), p_logp_coef=None if upstream.entropy is None else new(N), mix_coef=upstream.mix)
    size, targets = new(N), torch.empty_like(request.targets)
    if N:
        block_k = triton.next_power_of_2(K)
        block_n = max(COEFFICIENTS // block_k, 1)
        _row_stats_coefficients[(triton.cdiv(N, block_n),)](
            ids_ptr=request.ids, active_ptr=request.targets, log_probs_ptr=result.log_probs, entropy_ptr=result.entropy,
            mix_weight_ptr=result.mix_weight, upstream_log_probs_ptr=upstream.log_probs, upstream_lse_ptr=upstream.lse,
            upstream_entropy_ptr=upstream.entropy, upstream_mix_ptr=upstream.mix, grad_ids_ptr=c.grad_ids,
            p_coef_ptr=c.p_coef, p_logp_coef_ptr=c.p_logp_coef, size_ptr=size, with_gradient_ptr=targets, N=N, K=K,
            BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return c, size, targets


def backward(logits: Tensor, request: Any, c: Any, norms: Norms, out: Tensor) -> None:
    """Launch the backward pass."""
    V = logits.shape[2]
    N, K = request.ids.shape
    if N == 0:
        return
    tile = _tiles.token_nll_bwd(V, logits.element_size())
    tiles, splits = _launch.share(V, tile)
    strides, same = _launch.strides_of_both(logits, out)
    # Twice the warps of the gradient of the NLL, half the columns per thread, because with more columns gfx942 spills
    # their masks. For float64 ptxas spills with twice the warps.
    num_warps = tile.num_warps * (1 if logits.dtype == torch.float64 else 2)
    _row_stats_bwd[(N * splits,)](
        logits_ptr=logits, ids_ptr=request.ids, active_ptr=request.targets, a_ptr=request.a, b_ptr=request.b,
        grad_ids_ptr=c.grad_ids, p_coef_ptr=c.p_coef, p_logp_coef_ptr=c.p_logp_coef, mix_coef_ptr=c.mix_coef,
        max_ptr=norms[0], log_sum_ptr=norms[1], out_ptr=out, V=V, K=K, TILES=tiles, SPLITS=splits,
        **_named(strides, request.transform),
        SAME_STRIDES=same, WITH_LOG=c.p_logp_coef is not None, WITH_MIX=c.mix_coef is not None,
        THROUGH_TRANSFORM=request.through_transform, BLOCK_V=tile.block_v, BLOCK_K=triton.next_power_of_2(K),
        ACC=_launch.acc(c.p_coef.dtype), num_warps=_tiles.at_most_a_thread_a_column(num_warps, tile.block_v), **FUSED,
    )  # fmt: skip
