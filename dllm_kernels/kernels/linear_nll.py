r"""NLL of a chunk of logits and, in the same launch, the gradient written over them.

The chunk is the only place the logits ever exist: a GEMM made it and two GEMMs will read the gradient from it. One
program takes one row: the first loop reads it once and leaves (M, log S) (``_math.column_stats``), the second reads it
again, while it is near, and stores

    logits[c, v] <- scale[c] * (exp(logits[c, v] - M - log S) - [v = y]).

Rows that are not active get zeros, so that the GEMMs need no mask. A chunk with too few rows to fill the GPU goes
through the split kernels of ``kernels/token_nll.py`` instead.
"""

import torch
import triton
import triton.language as tl

from dllm_kernels.kernels import _tiles, token_nll
from dllm_kernels.kernels._launch import on_its_device
from dllm_kernels.kernels._math import FUSED, SKIP, column_stats, grad_columns, load_target_logit
from dllm_kernels.kernels.token_nll import _acc, _finish_row, _skip_row


@triton.jit
def _zero_row(row_ptr, V, BLOCK_V: tl.constexpr):
    for block in range(0, V, BLOCK_V):
        v = block + tl.arange(0, BLOCK_V)
        tl.store(row_ptr + v, tl.zeros([BLOCK_V], row_ptr.dtype.element_ty), mask=v < V)


@triton.jit
def _linear_nll_rows(
    logits_ptr, target_ptr, scale_ptr, nll_ptr, max_ptr, log_sum_ptr, target_logit_ptr, correct_ptr,
    stride_n, V,
    WITH_CORRECT: tl.constexpr, BLOCK_V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    y = tl.load(target_ptr + n)
    scale = tl.load(scale_ptr + n).to(ACC)
    row_ptr = logits_ptr + n.to(tl.int64) * stride_n
    lanes = tl.arange(0, BLOCK_V)
    if y != SKIP:
        target_logit = load_target_logit(row_ptr, y, V, ACC)
        row_max, row_sum, beaten = column_stats(row_ptr, 0, V, y, target_logit, BLOCK_V, ACC, WITH_CORRECT)
        _finish_row(
            n, row_max, row_sum, target_logit, beaten, nll_ptr, max_ptr, log_sum_ptr, target_logit_ptr, correct_ptr, WITH_CORRECT
        )  # fmt: skip
        log_sum = tl.log(row_sum)
        weightless = scale == 0  # its gradient is 0 even where it holds NaN
        scale = tl.where((y >= 0) & (y < V), scale, float("nan"))
        tl.debug_barrier()  # every lane has its target's logit before the first store replaces it
        if weightless:
            _zero_row(row_ptr, V, BLOCK_V)
        else:
            for block in range(0, V, BLOCK_V):
                grad_columns(row_ptr, row_ptr, block + lanes, V, y, scale, row_max, log_sum, ACC)
    else:
        _skip_row(n, nll_ptr, max_ptr, log_sum_ptr, target_logit_ptr, correct_ptr, WITH_CORRECT)
        _zero_row(row_ptr, V, BLOCK_V)


@triton.jit
def _scale_inplace(t_ptr, factor_ptr, numel, BLOCK: tl.constexpr, ACC: tl.constexpr):
    factor = tl.load(factor_ptr).to(ACC)
    if factor != 1:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        t = tl.load(t_ptr + i, mask=i < numel).to(ACC)
        tl.store(t_ptr + i, (t * factor).to(t_ptr.dtype.element_ty), mask=i < numel)


@on_its_device
def scale_(t: torch.Tensor, factor: torch.Tensor) -> None:
    """Launch ``t *= factor``; every program reads the factor and leaves at once when it is 1."""
    if t.numel() == 0:
        return
    block = 4096
    acc = _acc(torch.promote_types(t.dtype, torch.float32))
    _scale_inplace[(triton.cdiv(t.numel(), block),)](t, factor, t.numel(), BLOCK=block, ACC=acc, num_warps=4, **FUSED)


@on_its_device
def row_nll_grad_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    *,
    with_correct: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Launch over a chunk ``logits [C, V]``, which then holds the gradient; see ``ops._rows`` for the contract."""
    C, V = logits.shape
    if C < _tiles.TARGET_PROGRAMS // 2:
        stats = token_nll.row_stats(logits[None], targets, with_correct=with_correct)
        nll, row_max, log_sum, target_logit, correct = stats
        token_nll.row_grad(logits[None], targets, scale, row_max, log_sum, logits[None])
        return nll, row_max, log_sum, target_logit, correct
    acc = torch.promote_types(logits.dtype, torch.float32)
    nll, row_max, log_sum, target_logit = (torch.empty(C, dtype=acc, device=logits.device) for _ in range(4))
    correct = torch.empty(C, dtype=torch.bool, device=logits.device) if with_correct else None
    tile = _tiles.linear_nll_rows(V, logits.element_size())
    _linear_nll_rows[(C,)](
        logits, targets, scale, nll, row_max, log_sum, target_logit, correct, logits.stride(0), V,
        WITH_CORRECT=with_correct, BLOCK_V=tile.block_v, ACC=_acc(acc),
        num_warps=tile.num_warps, **FUSED,
    )  # fmt: skip
    return nll, row_max, log_sum, target_logit, correct
