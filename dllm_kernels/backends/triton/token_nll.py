r"""nll[n] = logsumexp(logits[n]) - logits[n, target[n]], and its gradient, for the active rows only.

Forward reads each active row once (``_math.column_stats``) and stores (M, log S), so that

    nll = (M - x_y) + log S,            d nll / d x_v = exp(x_v - M - log S) - [v = y].

A long row is split over several programs, whose partial (M, S, argmax) a second kernel merges:
M = max_k M_k, S = sum_k S_k exp(M_k - M). Backward reads the active rows once more and writes every row, inactive ones
as zeros. Inactive rows (target = IGNORE, or a weight of 0) are never read.

For a weighted sum the kernels multiply by the weights, because each separate torch op on [N] is a launch. Forward also
writes w * nll. Backward multiplies w by the upstream gradient of the sum, which it loads from device memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from dllm_kernels.backends.triton import _launch, _math, _tiles
from dllm_kernels.backends.triton._launch import FUSED, PER_ROW, SIZES
from dllm_kernels.backends.triton._math import IGNORE, LOG2E, NO_COLUMN
from dllm_kernels.backends.triton._transform import arguments
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import NLL
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform

Tensor = torch.Tensor


@triton.jit
def _is_active(n, y, weight_ptr):
    """Return True if row n is active: it has a target, and a nonzero weight if rows have weights."""
    on = y != IGNORE
    if weight_ptr is not None:
        on = on & (tl.load(weight_ptr + n) != 0)
    return on


@triton.jit
def store_row(n, nll, row_max, log_sum, correct, best, out, WITH_CORRECT: tl.constexpr, WITH_IDS: tl.constexpr):
    """Store the results of row n.

    ``out``: pointers to NLL, M, log S, correct, argmax, and to the weights and weights * NLL, or None.
    """
    nll_ptr, max_ptr, log_sum_ptr, correct_ptr, best_ptr, weight_ptr, weighted_ptr = out
    tl.store(nll_ptr + n, nll)
    tl.store(max_ptr + n, row_max)
    tl.store(log_sum_ptr + n, log_sum)
    if WITH_CORRECT:
        tl.store(correct_ptr + n, correct)
    if WITH_IDS:
        tl.store(best_ptr + n, best)
    if weight_ptr is not None:
        tl.store(weighted_ptr + n, nll * tl.load(weight_ptr + n))


@triton.jit
def finish_row(
    n, y, row_max, row_sum, target_logit, best, skip_id, out, WITH_CORRECT: tl.constexpr, WITH_IDS: tl.constexpr
):
    """Store the results of one row."""
    log_sum = tl.log(row_sum)
    nll = (row_max - target_logit) + log_sum
    nll = tl.where(row_sum == 0, float("nan"), nll)  # all logits are -inf: no distribution
    correct = (nll == nll) & (best == y)
    store_row(n, nll, row_max, log_sum, correct, _math.predicted(best, row_sum, skip_id), out, WITH_CORRECT, WITH_IDS)


@triton.jit(do_not_specialize_on_alignment=PER_ROW, do_not_specialize=SIZES)
def _token_nll_fwd(
    logits_ptr, target_ptr, weight_ptr, nll_ptr, max_ptr, log_sum_ptr, correct_ptr, best_ptr, weighted_ptr,
    L, stride_b, stride_l, V, logit_scale, inv_softcap, skip_id,
    WITH_CORRECT: tl.constexpr, WITH_IDS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
    THREADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    transform = (logit_scale, inv_softcap, skip_id)
    out = (nll_ptr, max_ptr, log_sum_ptr, correct_ptr, best_ptr, weight_ptr, weighted_ptr)
    y = tl.load(target_ptr + n)
    if _is_active(n, y, weight_ptr):
        row = _math.row_offset(n, L, stride_b, stride_l)
        target_logit = _math.load_target_logit(logits_ptr + row, y, V, transform, ACC)
        row_max, row_sum, best, _ = _math.column_stats(
            logits_ptr, row, 0, V, target_logit, transform,
            BLOCK_V, THREADS, ACC, WITH_CORRECT, WITH_IDS, False, ALIGNED, "evict_first",
        )  # fmt: skip
        finish_row(n, y, row_max, row_sum, target_logit, best, skip_id, out, WITH_CORRECT, WITH_IDS)
    else:
        store_row(n, 0.0, 0.0, 0.0, False, IGNORE, out, WITH_CORRECT, WITH_IDS)


@triton.jit(do_not_specialize_on_alignment=PER_ROW, do_not_specialize=SIZES)
def _token_nll_fwd_split(
    logits_ptr, target_ptr, weight_ptr, part_max_ptr, part_sum_ptr, part_best_ptr,
    L, stride_b, stride_l, V, logit_scale, inv_softcap, skip_id, TILES, SPLITS,
    WITH_CORRECT: tl.constexpr, WITH_IDS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
    THREADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) // SPLITS
    k = tl.program_id(0) % SPLITS
    transform = (logit_scale, inv_softcap, skip_id)
    y = tl.load(target_ptr + n)
    if _is_active(n, y, weight_ptr):
        row = _math.row_offset(n, L, stride_b, stride_l)
        target_logit = tl.zeros([], ACC)
        if WITH_CORRECT and not WITH_IDS:
            target_logit = _math.load_target_logit(logits_ptr + row, y, V, transform, ACC)
        start = k * TILES * BLOCK_V
        end = tl.minimum(start + TILES * BLOCK_V, V)
        row_max, row_sum, best, _ = _math.column_stats(
            logits_ptr, row, start, end, target_logit, transform,
            BLOCK_V, THREADS, ACC, WITH_CORRECT, WITH_IDS, False, ALIGNED, "evict_first",
        )  # fmt: skip
        part = n.to(tl.int64) * SPLITS + k
        tl.store(part_max_ptr + part, row_max)
        tl.store(part_sum_ptr + part, row_sum)
        if WITH_CORRECT or WITH_IDS:
            tl.store(part_best_ptr + part, best)


@triton.jit(do_not_specialize_on_alignment=PER_ROW, do_not_specialize=SIZES)
def _token_nll_merge(
    logits_ptr, target_ptr, weight_ptr, part_max_ptr, part_sum_ptr, part_best_ptr,
    nll_ptr, max_ptr, log_sum_ptr, correct_ptr, best_ptr, weighted_ptr,
    L, stride_b, stride_l, V, logit_scale, inv_softcap, skip_id, SPLITS,
    WITH_CORRECT: tl.constexpr, WITH_IDS: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    out = (nll_ptr, max_ptr, log_sum_ptr, correct_ptr, best_ptr, weight_ptr, weighted_ptr)
    y = tl.load(target_ptr + n)
    if _is_active(n, y, weight_ptr):
        row_ptr = logits_ptr + _math.row_offset(n, L, stride_b, stride_l)
        target_logit = _math.load_target_logit(row_ptr, y, V, (logit_scale, inv_softcap, skip_id), ACC)
        k = tl.arange(0, BLOCK_K)
        part = n.to(tl.int64) * SPLITS + k
        maxima = tl.load(part_max_ptr + part, mask=k < SPLITS, other=-float("inf"))
        sums = tl.load(part_sum_ptr + part, mask=k < SPLITS, other=0.0)
        row_max = tl.max(maxima, 0)
        row_sum = _math.total(tl.where(k < SPLITS, sums * tl.exp2((maxima - row_max) * LOG2E), 0.0))
        best = tl.full([], NO_COLUMN, tl.int32)
        if WITH_CORRECT or WITH_IDS:
            best = _math.best_of_parts(part_best_ptr + part, k < SPLITS, maxima, row_max)
        finish_row(n, y, row_max, row_sum, target_logit, best, skip_id, out, WITH_CORRECT, WITH_IDS)
    else:
        store_row(n, 0.0, 0.0, 0.0, False, IGNORE, out, WITH_CORRECT, WITH_IDS)


@triton.jit(do_not_specialize_on_alignment=PER_ROW, do_not_specialize=SIZES)
def _token_nll_bwd(
    logits_ptr, target_ptr, scale_ptr, factor_ptr, max_ptr, log_sum_ptr, out_ptr,
    L, stride_b, stride_l, out_stride_b, out_stride_l, V, logit_scale, inv_softcap, skip_id, TILES, SPLITS,
    SAME_STRIDES: tl.constexpr, BLOCK_V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    n = tl.program_id(0) // SPLITS
    y = tl.load(target_ptr + n)
    scale = tl.load(scale_ptr + n).to(ACC)
    on = (y != IGNORE) & (scale != 0)
    if factor_ptr is not None:
        scale = scale * tl.load(factor_ptr)
        on = on & (scale != 0)  # in addition to the test above, because a NaN factor must not activate a row of scale 0
    transform = (logit_scale, inv_softcap, skip_id)
    row = _math.row_offset(n, L, stride_b, stride_l)
    at, first, wide = _math.wide_columns(row, 0, V, WIDE)
    out_row, out_at = _math.output_of(row, at, first, n, L, out_stride_b, out_stride_l, SAME_STRIDES)
    start = (tl.program_id(0) % SPLITS) * TILES * BLOCK_V
    end = tl.minimum(start + TILES * BLOCK_V, wide)
    i = tl.arange(0, BLOCK_V)
    v, mask = _math.ragged_columns(0, V, first, wide, WIDE)  # for the first program of a row
    if on:
        scale = tl.where((y >= 0) & (y < V), scale, float("nan"))  # an out-of-range target gives NaN
        row_max = tl.load(max_ptr + n)
        log_sum = tl.load(log_sum_ptr + n)
        hot = _math.column_of(y, V)
        _math.grad_tiles(
            logits_ptr + at + start, out_ptr + out_at + start, first + start, end - start, hot - first - start, scale,
            row_max, log_sum, transform, BLOCK_V, ACC, "",
        )  # fmt: skip
        if start == 0:
            x = tl.load(logits_ptr + row + v, mask=mask)
            tl.debug_barrier()  # in place, all threads, also those beyond the 2 WIDE columns, must load before a store
            _math.store_grad(x, out_ptr + out_row, v, mask, hot, scale, row_max, log_sum, transform, None, ACC, "")
    else:
        for tile in range(start, end, BLOCK_V):
            _math.zero_columns(out_ptr + out_at + tile, i, i < end - tile)
        if start == 0:
            _math.zero_columns(out_ptr + out_row, v, mask)


def new_rows(N: int, dtype: torch.dtype, device: torch.device, with_correct: bool, with_ids: bool) -> NLL:
    """Allocate (NLL, M, log S, correct, argmax) of N rows."""
    correct = torch.empty(N, dtype=torch.bool, device=device) if with_correct else None
    best = torch.empty(N, dtype=torch.int64, device=device) if with_ids else None
    nll, row_max, log_sum = (torch.empty(N, dtype=dtype, device=device) for _ in range(3))
    return nll, row_max, log_sum, correct, best


def weighted_nll(logits: Tensor, targets: Tensor, weights: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
    """See ``rows/_primitives.py``: :func:`nll` with one weight per row."""
    weighted = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    return weighted, *nll(logits, targets, weights, weighted, **options)


def nll(
    logits: Tensor, targets: Tensor, weights: Tensor | None = None, weighted: Tensor | None = None, *,
    with_correct: bool, with_ids: bool = False, transform: Transform = NO_TRANSFORM, with_lse: bool = True,
) -> NLL:  # fmt: skip
    """See ``rows/_primitives.py``; also writes ``weights`` times the NLL to ``weighted``.

    Returns M and log S without ``with_lse`` too, because :func:`nll_grad` reads them.
    """
    B, L, V = logits.shape
    N = B * L
    acc = accum_dtype(logits.dtype)
    out = new_rows(N, acc, logits.device, with_correct, with_ids)
    if N == 0:
        return out
    tile = _tiles.token_nll_fwd(V, logits.element_size())
    sizes = (*_launch.strides(logits), V, *arguments(transform))
    inputs, outputs = (logits, targets, weights), (*out, weighted)
    flags = {"WITH_CORRECT": with_correct, "WITH_IDS": with_ids, "ACC": _launch.acc(acc)}
    options = {"ALIGNED": _launch.aligned(logits), **_launch.tile_options(tile)}
    if tile.splits == 1:
        _token_nll_fwd[(N,)](*inputs, *outputs, *sizes, **flags, **options)
        return out
    tiles, splits = _launch.share(V, tile)
    dtypes = (acc, acc, torch.int32 if with_correct or with_ids else None)
    parts = [None if d is None else torch.empty(N, splits, dtype=d, device=logits.device) for d in dtypes]
    _token_nll_fwd_split[(N * splits,)](*inputs, *parts, *sizes, tiles, splits, **flags, **options)
    options = {"BLOCK_K": triton.next_power_of_2(splits), "num_warps": 1, **FUSED}
    _token_nll_merge[(N,)](*inputs, *parts, *outputs, *sizes, splits, **flags, **options)
    return out


def nll_grad(
    logits: Tensor, targets: Tensor, scale: Tensor, row_max: Tensor, log_sum: Tensor, out: Tensor, *,
    factor: Tensor | None = None, transform: Transform = NO_TRANSFORM,
) -> None:  # fmt: skip
    """See ``rows/_primitives.py``."""
    B, L, V = logits.shape
    if B * L == 0:
        return
    tile = _tiles.token_nll_bwd(V, logits.element_size())
    tiles, splits = _launch.share(V, tile)
    rows, same_strides = _launch.strides_of_both(logits, out)
    # Half the columns per thread for tanh in float64, because otherwise Triton 3.6 spills 8 bytes on sm_80.
    many = logits.dtype == torch.float64 and transform.softcap is not None
    _token_nll_bwd[(B * L * splits,)](
        logits, targets, scale, factor, row_max, log_sum, out, *rows, V, *arguments(transform), tiles, splits,
        SAME_STRIDES=same_strides, BLOCK_V=tile.block_v, ACC=_launch.acc(scale.dtype),
        num_warps=_tiles.at_most_a_thread_a_column(tile.num_warps * (2 if many else 1), tile.block_v), **FUSED,
    )  # fmt: skip
