r"""NLL of a chunk of logits and, in the same launch, the gradient written over them.

The chunk is the only place the logits ever exist: a GEMM made it and two GEMMs will read the gradient from it. One
program takes one row: the first loop reads it once and leaves (M, log S) (``_math.column_stats``), the second reads it
again, while it is near, and stores

    logits[c, v] <- scale[c] * (exp(logits[c, v] - M - log S) - [v = y]).

The second loop goes from the row's end to its start, where the first has just been. What the first reads the L2 is
asked to keep, and what the second has written to let go of: finished lines would compete with rows that are to be read
again. Rows that are not active get zeros, so that the GEMMs need no mask.

Few rows leave multiprocessors idle, for as long as one row takes one of them, some 30 us: little beside the GEMMs,
which read the whole head even for one row. So there is one kernel whatever the number of rows, and a CUDA graph that
takes all rows needs none that a warm-up on the active ones has not loaded.
"""

import torch
import triton
import triton.language as tl

from dllm_kernels._backends.triton import _launch, _math, _tiles, token_nll
from dllm_kernels._backends.triton._launch import FUSED, PER_ROW, on_its_device
from dllm_kernels._backends.triton._math import IGNORE
from dllm_kernels._backends.triton._transform import NO_TRANSFORM, Transform, arguments
from dllm_kernels._backends.triton.token_nll import NLL, Tensor
from dllm_kernels._utils._dtypes import accum_dtype


@triton.jit
def _zero_row(logits_ptr, row, V, BLOCK_V: tl.constexpr):
    WIDE: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    at, first, wide = _math.wide_columns(row, 0, V, WIDE)
    i = tl.arange(0, BLOCK_V)
    for tile in range(0, wide, BLOCK_V):
        _math.zero_columns(logits_ptr + at + tile, i, i < wide - tile)
    v, there = _math.ragged_columns(0, V, first, wide, WIDE)
    _math.zero_columns(logits_ptr + row, v, there)


@triton.jit(do_not_specialize_on_alignment=PER_ROW, do_not_specialize=["stride_n", "V", "gain", "rate", "skip"])
def _linear_nll_rows(
    logits_ptr, target_ptr, scale_ptr, nll_ptr, max_ptr, log_sum_ptr, correct_ptr,
    stride_n, V, gain, rate, skip,
    WITH_CORRECT: tl.constexpr, EVICT: tl.constexpr, BLOCK_V: tl.constexpr, THREADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    n = tl.program_id(0)
    out = (nll_ptr, max_ptr, log_sum_ptr, correct_ptr, None, None)
    y = tl.load(target_ptr + n)
    scale = tl.load(scale_ptr + n).to(ACC)
    row = n.to(tl.int64) * stride_n
    transform = (gain, rate, skip)
    if y != IGNORE:
        target_logit = _math.load_target_logit(logits_ptr + row, y, V, transform, ACC)
        row_max, row_sum, _, beaten = _math.column_stats(
            logits_ptr, row, 0, V, y, target_logit, transform,
            BLOCK_V, THREADS, ACC, WITH_CORRECT, False, None, EVICT, True
        )  # fmt: skip
        token_nll.finish_row(n, row_max, row_sum, target_logit, beaten, out, WITH_CORRECT)
        log_sum = tl.log(row_sum)
        weightless = scale == 0  # its gradient is 0 even where it holds NaN
        scale = tl.where((y >= 0) & (y < V), scale, float("nan"))
        at, first, wide = _math.wide_columns(row, 0, V, WIDE)
        v, there = _math.ragged_columns(0, V, first, wide, WIDE)
        x = tl.load(logits_ptr + row + v, mask=there)
        tl.debug_barrier()  # every thread has its target's logit and the ragged columns before a store replaces them
        if weightless:
            _zero_row(logits_ptr, row, V, BLOCK_V)
        else:
            hot = _math.column_of(y, V)
            tile_ptr = logits_ptr + at
            _math.grad_tiles(
                tile_ptr, tile_ptr, first, wide, hot - first, scale, row_max, log_sum, transform, BLOCK_V, ACC,
                "evict_first",
            )  # fmt: skip
            _math.store_grad(
                x, logits_ptr + row, v, there, hot, scale, row_max, log_sum, transform, None, ACC, "evict_first"
            )
    else:
        token_nll.store_row(n, 0.0, 0.0, 0.0, False, out, WITH_CORRECT)
        _zero_row(logits_ptr, row, V, BLOCK_V)


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def _scale_inplace(t_ptr, factor_ptr, numel, BLOCK: tl.constexpr, ACC: tl.constexpr):
    factor = tl.load(factor_ptr).to(ACC)
    if factor != 1:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        t = tl.load(t_ptr + i, mask=i < numel).to(ACC)
        tl.store(t_ptr + i, (t * factor).to(t_ptr.dtype.element_ty), mask=i < numel)


@on_its_device
def scale_(t: Tensor, factor: Tensor) -> None:
    """Launch ``t *= factor``; every program reads the factor and leaves at once when it is 1."""
    if t.numel() == 0:
        return
    block = 4096
    acc = _launch.acc(accum_dtype(t.dtype))
    _scale_inplace[(triton.cdiv(t.numel(), block),)](t, factor, t.numel(), BLOCK=block, ACC=acc, num_warps=4, **FUSED)


@on_its_device
def row_nll_grad_(
    logits: Tensor, targets: Tensor, scale: Tensor, *, with_correct: bool, transform: Transform = NO_TRANSFORM
) -> NLL:
    """Launch over a chunk ``logits [C, V]``, which then holds the gradient; the contract is in ``_backends._rows``."""
    C, V = logits.shape
    acc = accum_dtype(logits.dtype)
    if acc == torch.float64 and transform[0] is not None:  # both passes with hyperbolic tangents in one kernel spill
        stats = token_nll.row_stats(logits[None], targets, with_correct=with_correct, transform=transform)
        token_nll.row_grad(logits[None], targets, scale, *stats[1:3], logits[None], transform=transform)
        return stats
    found = token_nll.new_rows(C, acc, logits.device, with_correct)
    bound_by_issue = (transform[0], transform[2]) != (None, None)
    tile = _tiles.linear_nll_rows(V, logits.element_size(), small=bound_by_issue)
    _linear_nll_rows[(C,)](
        logits, targets, scale, *found, logits.stride(0), V, *arguments(transform),
        WITH_CORRECT=with_correct, EVICT="" if bound_by_issue else "evict_last", ACC=_launch.acc(acc),
        **_launch.of_tile(tile),
    )  # fmt: skip
    return found
