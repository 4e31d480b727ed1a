"""The token NLL op as torch.compile sees it: opaque and functional, so that a compiled step has no graph break.

Loaded only while a graph is traced, since registering costs import time; in eager mode the autograd.Function of
``ops/token_nll.py`` is the shorter way to the same two calls.
"""

from __future__ import annotations

from typing import Any

import torch

from dllm_kernels.ops._rows import as_blv, row_primitives
from dllm_kernels.ops.token_nll import _grad_rows


@torch.library.custom_op("dllm_kernels::token_nll", mutates_args=())
def _token_nll_op(
    logits: torch.Tensor,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    ignore_index: int,
    with_correct: bool,
    triton: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    nll, row_max, log_sum, _, correct = row_primitives(triton).row_stats(
        as_blv(logits), targets, active, ignore_index=ignore_index, with_correct=with_correct
    )
    if correct is None:
        correct = nll.new_empty(0, dtype=torch.bool)
    return nll.clone(), row_max.clone(), log_sum.clone(), correct


@_token_nll_op.register_fake
def _(
    logits: torch.Tensor,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    ignore_index: int,
    with_correct: bool,
    triton: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    acc = torch.promote_types(logits.dtype, torch.float32)
    N = targets.shape[0]
    nll, row_max, log_sum = (logits.new_empty(N, dtype=acc) for _ in range(3))
    return nll, row_max, log_sum, logits.new_empty(N if with_correct else 0, dtype=torch.bool)


@torch.library.custom_op("dllm_kernels::token_nll_backward", mutates_args=())
def _token_nll_backward_op(
    logits: torch.Tensor,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    grad_nll: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    ignore_index: int,
    triton: bool,
) -> torch.Tensor:
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _grad_rows(logits, targets, active, grad_nll, row_max, log_sum, ignore_index, triton, as_blv(out))
    return out


@_token_nll_backward_op.register_fake
def _(
    logits: torch.Tensor,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    grad_nll: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    ignore_index: int,
    triton: bool,
) -> torch.Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _op_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, targets, active, ctx.ignore_index, _, ctx.triton = inputs
    _, row_max, log_sum, correct = output
    ctx.save_for_backward(logits, targets, active, row_max, log_sum)
    ctx.mark_non_differentiable(row_max, log_sum, correct)


def _op_backward(ctx: Any, grad_nll: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    logits, targets, active, row_max, log_sum = ctx.saved_tensors
    grad = _token_nll_backward_op(logits, targets, active, grad_nll, row_max, log_sum, ctx.ignore_index, ctx.triton)
    return grad, None, None, None, None, None


_token_nll_op.register_autograd(_op_backward, setup_context=_op_setup_context)
