r"""NLL of a chunk of logits and, in the same launch, the gradient written over them.

Logits are materialised in the chunk only: a GEMM writes it, and two GEMMs read the gradient from it. One program
processes one row. Its first loop reads the row and computes (M, log S) (``_math.column_stats``). Its second loop
re-reads the row from the cache and stores

    logits[c, v] <- scale[c] * (exp(logits[c, v] - M - log S) - [v = y]).

The second loop runs from the end of the row to its start, because the first loop has read the end last. Loads of the
first loop have the L2 policy evict_last, except with a soft cap or a skipped column. Stores of the second loop have the
policy evict_first, because finished lines would compete with rows that are still to be re-read. Inactive rows are
zeroed, so that the GEMMs need no mask.

Few rows leave multiprocessors idle for the time of one row, some 30 us. That is little compared to the GEMMs, which
read the whole head even for one row. Therefore one kernel serves any number of rows. A CUDA graph, which processes all
rows, then needs no kernel that a warm-up on the active rows has not loaded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm_kernels.backends.triton import _launch, _math, _tiles, token_nll
from dllm_kernels.backends.triton._launch import FUSED, PER_ROW, TRANSFORM
from dllm_kernels.backends.triton._math import IGNORE
from dllm_kernels.backends.triton._transform import arguments
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import NLL
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform


@triton.jit
def _zero_row(logits_ptr, row, V, BLOCK_V: tl.constexpr):
    WIDE: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    at, first, wide = _math.wide_columns(row, 0, V, WIDE)
    i = tl.arange(0, BLOCK_V)
    for tile in range(0, wide, BLOCK_V):
        _math.zero_columns(logits_ptr + at + tile, i, i < wide - tile)
    v, mask = _math.ragged_columns(0, V, first, wide, WIDE)
    _math.zero_columns(logits_ptr + row, v, mask)


@triton.jit(do_not_specialize_on_alignment=PER_ROW, do_not_specialize=["stride_n", "V", *TRANSFORM])
def _linear_nll_rows(
    logits_ptr, target_ptr, scale_ptr, nll_ptr, max_ptr, log_sum_ptr, correct_ptr, best_ptr,
    stride_n, V, logit_scale, inv_softcap, skip_id,
    WITH_CORRECT: tl.constexpr, WITH_IDS: tl.constexpr, EVICT: tl.constexpr, BLOCK_V: tl.constexpr,
    THREADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    n = tl.program_id(0)
    out = (nll_ptr, max_ptr, log_sum_ptr, correct_ptr, best_ptr, None, None)
    y = tl.load(target_ptr + n)
    scale = tl.load(scale_ptr + n).to(ACC)
    row = n.to(tl.int64) * stride_n
    transform = (logit_scale, inv_softcap, skip_id)
    if y != IGNORE:
        target_logit = _math.load_target_logit(logits_ptr + row, y, V, transform, ACC)
        row_max, row_sum, best, _ = _math.column_stats(
            logits_ptr, row, 0, V, target_logit, transform,
            BLOCK_V, THREADS, ACC, WITH_CORRECT, WITH_IDS, False, None, EVICT, True
        )  # fmt: skip
        token_nll.finish_row(n, y, row_max, row_sum, target_logit, best, skip_id, out, WITH_CORRECT, WITH_IDS)
        log_sum = tl.log(row_sum)
        zero_scale = scale == 0  # the gradient is 0 even if the row has NaN
        scale = tl.where((y >= 0) & (y < V), scale, float("nan"))
        at, first, wide = _math.wide_columns(row, 0, V, WIDE)
        v, mask = _math.ragged_columns(0, V, first, wide, WIDE)
        x = tl.load(logits_ptr + row + v, mask=mask)
        tl.debug_barrier()  # all threads must load the target's logit and the ragged columns before a store
        if zero_scale:
            _zero_row(logits_ptr, row, V, BLOCK_V)
        else:
            hot = _math.column_of(y, V)
            tile_ptr = logits_ptr + at
            _math.grad_tiles(
                tile_ptr, tile_ptr, first, wide, hot - first, scale, row_max, log_sum, transform, BLOCK_V, ACC,
                "evict_first",
            )  # fmt: skip
            _math.store_grad(
                x, logits_ptr + row, v, mask, hot, scale, row_max, log_sum, transform, None, ACC, "evict_first"
            )
    else:
        token_nll.store_row(n, 0.0, 0.0, 0.0, False, IGNORE, out, WITH_CORRECT, WITH_IDS)
        _zero_row(logits_ptr, row, V, BLOCK_V)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _scale_inplace(t_ptr, factor_ptr, numel, BLOCK: tl.constexpr, ACC: tl.constexpr):
    factor = tl.load(factor_ptr).to(ACC)
    if factor != 1:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        t = tl.load(t_ptr + i, mask=i < numel).to(ACC)
        scaled = tl.where(t == 0, 0.0, t * factor)
        tl.store(t_ptr + i, scaled.to(t_ptr.dtype.element_ty), mask=i < numel)


def scale_(t: Tensor, factor: Tensor) -> None:
    """Launch ``t *= factor``, zeros aside; every program reads the factor and returns at once if it is 1."""
    if t.numel() == 0:
        return
    grid, acc = (triton.cdiv(t.numel(), 4096),), _launch.acc(accum_dtype(t.dtype))
    with torch.cuda.device_of(t):  # called outside of opaque functions
        _scale_inplace[grid](t, factor, t.numel(), BLOCK=4096, ACC=acc, num_warps=4, **FUSED)


def nll_and_grad_(
    logits: Tensor, targets: Tensor, scale: Tensor, *, with_correct: bool, with_ids: bool = False,
    transform: Transform = NO_TRANSFORM,
) -> NLL:  # fmt: skip
    """See ``rows/_primitives.py``; the gradient overwrites the chunk ``logits [C, V]``."""
    C, V = logits.shape
    acc = accum_dtype(logits.dtype)
    if acc == torch.float64 and transform.softcap is not None:  # one kernel with the tanh of both passes spills
        stats = token_nll.nll(logits[None], targets, with_correct=with_correct, with_ids=with_ids, transform=transform)
        token_nll.nll_grad(logits[None], targets, scale, *stats[1:3], logits[None], transform=transform)
        return stats
    out = token_nll.new_rows(C, acc, logits.device, with_correct, with_ids)
    bound_by_issue = (transform.softcap, transform.skip_id) != (None, None)
    tile = _tiles.linear_nll_rows(V, logits.element_size(), small=bound_by_issue)
    _linear_nll_rows[(C,)](
        logits, targets, scale, *out, logits.stride(0), V, *arguments(transform),
        WITH_CORRECT=with_correct, WITH_IDS=with_ids, EVICT="" if bound_by_issue else "evict_last",
        ACC=_launch.acc(acc), **_launch.tile_options(tile),
    )  # fmt: skip
    return out
