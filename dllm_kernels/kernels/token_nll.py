r"""nll[n] = logsumexp(logits[n]) - logits[n, target[n]], and its gradient, for the active rows only.

Forward reads each active row once (``_math.column_stats``) and keeps (M, log S) of it, so that

    nll = (M - x_y) + log S,            d nll / d x_v = exp(x_v - M - log S) - [v = y].

Where there are few rows each is split over several programs, whose partial (M, S, beaten) a second kernel merges:
M = max_k M_k, S = sum_k S_k exp(M_k - M). Backward reads the active rows once more and writes every row: the gradient,
or zeros. Inactive rows (target = SKIP) are never read.
"""

import torch
import triton
import triton.language as tl

from dllm_kernels.kernels import _tiles
from dllm_kernels.kernels._launch import on_its_device
from dllm_kernels.kernels._math import (
    FUSED,
    LOG2E,
    SKIP,
    column_stats,
    grad_columns,
    load_target_logit,
    row_offset,
)


@triton.jit
def _finish_row(
    n, row_max, row_sum, target_logit, beaten, nll_ptr, max_ptr, log_sum_ptr, target_logit_ptr, correct_ptr, WITH_CORRECT: tl.constexpr
):  # fmt: skip
    log_sum = tl.log(row_sum)
    nll = (row_max - target_logit) + log_sum
    nll = tl.where(row_sum == 0, float("nan"), nll)  # every logit is -inf: no distribution
    tl.store(nll_ptr + n, nll)
    tl.store(max_ptr + n, row_max)
    tl.store(log_sum_ptr + n, log_sum)
    tl.store(target_logit_ptr + n, target_logit)
    if WITH_CORRECT:
        tl.store(correct_ptr + n, (nll == nll) & (beaten == 0))


@triton.jit
def _skip_row(n, nll_ptr, max_ptr, log_sum_ptr, target_logit_ptr, correct_ptr, WITH_CORRECT: tl.constexpr):
    tl.store(nll_ptr + n, 0.0)
    tl.store(max_ptr + n, 0.0)
    tl.store(log_sum_ptr + n, 0.0)
    tl.store(target_logit_ptr + n, 0.0)
    if WITH_CORRECT:
        tl.store(correct_ptr + n, False)


@triton.jit(do_not_specialize=["L"])
def _token_nll_fwd(
    logits_ptr, target_ptr, nll_ptr, max_ptr, log_sum_ptr, target_logit_ptr, correct_ptr,
    L, stride_b, stride_l, V,
    WITH_CORRECT: tl.constexpr, BLOCK_V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    y = tl.load(target_ptr + n)
    if y != SKIP:
        row_ptr = logits_ptr + row_offset(n, L, stride_b, stride_l)
        target_logit = load_target_logit(row_ptr, y, V, ACC)
        row_max, row_sum, beaten = column_stats(row_ptr, 0, V, y, target_logit, BLOCK_V, ACC, WITH_CORRECT)
        _finish_row(
            n, row_max, row_sum, target_logit, beaten, nll_ptr, max_ptr, log_sum_ptr, target_logit_ptr, correct_ptr, WITH_CORRECT
        )  # fmt: skip
    else:
        _skip_row(n, nll_ptr, max_ptr, log_sum_ptr, target_logit_ptr, correct_ptr, WITH_CORRECT)


@triton.jit(do_not_specialize=["L", "SPLITS"])
def _token_nll_fwd_split(
    logits_ptr, target_ptr, part_max_ptr, part_sum_ptr, part_beaten_ptr,
    L, stride_b, stride_l, V, COLUMNS, SPLITS,
    WITH_CORRECT: tl.constexpr, BLOCK_V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) // SPLITS
    k = tl.program_id(0) % SPLITS
    y = tl.load(target_ptr + n)
    if y != SKIP:
        row_ptr = logits_ptr + row_offset(n, L, stride_b, stride_l)
        target_logit = load_target_logit(row_ptr, y, V, ACC)
        start = k * COLUMNS
        end = tl.minimum(start + COLUMNS, V)
        row_max, row_sum, beaten = column_stats(row_ptr, start, end, y, target_logit, BLOCK_V, ACC, WITH_CORRECT)
        part = n.to(tl.int64) * SPLITS + k
        tl.store(part_max_ptr + part, row_max)
        tl.store(part_sum_ptr + part, row_sum)
        tl.store(part_beaten_ptr + part, beaten)


@triton.jit(do_not_specialize=["L", "SPLITS"])
def _token_nll_merge(
    logits_ptr, target_ptr, part_max_ptr, part_sum_ptr, part_beaten_ptr,
    nll_ptr, max_ptr, log_sum_ptr, target_logit_ptr, correct_ptr,
    L, stride_b, stride_l, V, SPLITS,
    WITH_CORRECT: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    y = tl.load(target_ptr + n)
    if y != SKIP:
        row_ptr = logits_ptr + row_offset(n, L, stride_b, stride_l)
        target_logit = load_target_logit(row_ptr, y, V, ACC)
        k = tl.arange(0, BLOCK_K)
        part = n.to(tl.int64) * SPLITS + k
        maxima = tl.load(part_max_ptr + part, mask=k < SPLITS, other=-float("inf"))
        sums = tl.load(part_sum_ptr + part, mask=k < SPLITS, other=0.0)
        beaten = tl.load(part_beaten_ptr + part, mask=k < SPLITS, other=0)
        row_max = tl.max(maxima, 0)
        row_sum = tl.sum(tl.where(k < SPLITS, sums * tl.exp2((maxima - row_max) * LOG2E), 0.0), 0)
        any_beaten = tl.max(beaten.to(tl.int32), 0)
        _finish_row(
            n, row_max, row_sum, target_logit, any_beaten, nll_ptr, max_ptr, log_sum_ptr, target_logit_ptr, correct_ptr, WITH_CORRECT
        )  # fmt: skip
    else:
        _skip_row(n, nll_ptr, max_ptr, log_sum_ptr, target_logit_ptr, correct_ptr, WITH_CORRECT)


@triton.jit(do_not_specialize=["L", "TILES"])
def _token_nll_bwd(
    logits_ptr, target_ptr, scale_ptr, max_ptr, log_sum_ptr, out_ptr,
    L, stride_b, stride_l, out_stride_b, out_stride_l, V, TILES,
    WHOLE_ROW: tl.constexpr, BLOCK_V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) // TILES
    v = (tl.program_id(0) % TILES) * BLOCK_V + tl.arange(0, BLOCK_V)
    y = tl.load(target_ptr + n)
    scale = tl.load(scale_ptr + n).to(ACC)
    row_out_ptr = out_ptr + row_offset(n, L, out_stride_b, out_stride_l)
    if (y != SKIP) & (scale != 0):
        if WHOLE_ROW:  # a target that no column has: the row's NLL is NaN, and so is its gradient
            scale = tl.where((y >= 0) & (y < V), scale, float("nan"))
        row_ptr = logits_ptr + row_offset(n, L, stride_b, stride_l)
        row_max = tl.load(max_ptr + n)
        log_sum = tl.load(log_sum_ptr + n)
        grad_columns(row_ptr, row_out_ptr, v, V, y, scale, row_max, log_sum, ACC)
    else:
        tl.store(row_out_ptr + v, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=v < V)


def _rows_of(logits: torch.Tensor) -> tuple[int, int, int]:
    """(L, stride_b, stride_l) of row n = b * L + l. Rows at one stride are a b each, so that no number depends on theirs."""
    B, L, _ = logits.shape
    stride_b, stride_l, _ = logits.stride()
    return (1, stride_l, stride_l) if B == 1 else (L, stride_b, stride_l)


def _acc(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


@on_its_device
def row_stats(
    logits: torch.Tensor, targets: torch.Tensor, *, with_correct: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Launch the forward pass; see ``ops._rows`` for the contract."""
    B, L, V = logits.shape
    N = B * L
    acc = torch.promote_types(logits.dtype, torch.float32)
    nll, row_max, log_sum, target_logit = (torch.empty(N, dtype=acc, device=logits.device) for _ in range(4))
    correct = torch.empty(N, dtype=torch.bool, device=logits.device) if with_correct else None
    if N == 0:
        return nll, row_max, log_sum, target_logit, correct
    tile = _tiles.token_nll_fwd(N, V, logits.element_size())
    sizes = (*_rows_of(logits), V)
    outputs = (nll, row_max, log_sum, target_logit, correct)
    flags = {"WITH_CORRECT": with_correct, "ACC": _acc(acc)}
    if tile.splits == 1:
        _token_nll_fwd[(N,)](
            logits, targets, *outputs, *sizes, **flags, BLOCK_V=tile.block_v, num_warps=tile.num_warps, **FUSED
        )
        return outputs
    columns = triton.cdiv(triton.cdiv(V, tile.splits), tile.block_v) * tile.block_v
    splits = triton.cdiv(V, columns)
    parts = (
        torch.empty(N, splits, dtype=acc, device=logits.device),
        torch.empty(N, splits, dtype=acc, device=logits.device),
        torch.empty(N, splits, dtype=torch.bool, device=logits.device),
    )
    _token_nll_fwd_split[(N * splits,)](
        logits, targets, *parts, *sizes, columns, splits, **flags, BLOCK_V=tile.block_v, num_warps=tile.num_warps, **FUSED
    )  # fmt: skip
    _token_nll_merge[(N,)](
        logits, targets, *parts, *outputs, *sizes, splits, **flags,
        BLOCK_K=triton.next_power_of_2(max(splits, _tiles.most_splits(V, tile.block_v))), num_warps=1, **FUSED
    )  # fmt: skip
    return outputs


@on_its_device
def row_grad(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    out: torch.Tensor,
    *,
    whole_row: bool = True,
) -> None:
    """Launch the backward pass; see ``ops._rows`` for the contract."""
    B, L, V = logits.shape
    if B * L == 0:
        return
    tile = _tiles.token_nll_bwd(V, logits.element_size())
    tiles = triton.cdiv(V, tile.block_v)
    _token_nll_bwd[(B * L * tiles,)](
        logits, targets, scale, row_max, log_sum, out,
        *_rows_of(logits), *_rows_of(out)[1:], V, tiles,
        WHOLE_ROW=whole_row, BLOCK_V=tile.block_v, ACC=_acc(scale.dtype),
        num_warps=tile.num_warps, **FUSED,
    )  # fmt: skip
