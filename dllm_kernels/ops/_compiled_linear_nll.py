"""The linear ops as torch.compile sees them: the whole chunk loop is one functional op each way.

What an op returns is all it writes. Loaded only while a graph is traced, since registering costs import time.
"""

from __future__ import annotations

from typing import Any

import torch

from dllm_kernels.ops.linear_nll import (
    _frozen,
    _Needs,
    _Options,
    _scale_rows,
    _token_backward,
    _token_forward,
    _weighted_forward,
)


def _present(t: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """An op returns tensors only; an empty one stands for None."""
    return like.new_empty(0) if t is None else t


def _fake_gradient(
    t: torch.Tensor | None, like: torch.Tensor, need: bool, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """What :func:`_present` makes of a gradient: contiguous, whatever the strides of the input."""
    return like.new_empty(0) if t is None or not need else t.new_empty(t.shape, dtype=dtype)


@torch.library.custom_op("dllm_kernels::weighted_linear_nll", mutates_args=())
def _weighted_op(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    scale: torch.Tensor,
    read_beyond: bool,
    round_nll: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    compute_dtype: torch.dtype,
    chunk_size: int | None,
    memory_budget: int | None,
    num_active: int | None,
    ignore_index: int,
    with_correct: bool,
    triton: bool,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
]:  # fmt: skip
    options = _Options(compute_dtype, chunk_size, memory_budget, num_active, ignore_index, with_correct, triton)
    needs = _Needs(need_hidden, need_weight, need_bias)
    out = _weighted_forward(hidden, weight, bias, targets, active, scale, read_beyond, round_nll, needs, options)
    grads = (_present(g, hidden) for g in (out.grad_hidden, out.grad_weight, out.grad_bias))
    rows = (t.clone() for t in (out.nll, out.row_max, out.log_sum, out.correct))
    return (out.loss, *rows, *grads, _present(out.headroom, out.loss))  # type: ignore[return-value]


@_weighted_op.register_fake
def _(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    scale: torch.Tensor,
    read_beyond: bool,
    round_nll: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    compute_dtype: torch.dtype,
    chunk_size: int | None,
    memory_budget: int | None,
    num_active: int | None,
    ignore_index: int,
    with_correct: bool,
    triton: bool,
) -> tuple[torch.Tensor, ...]:
    acc = torch.promote_types(compute_dtype, torch.float32)
    N = targets.shape[0]
    rows = [hidden.new_empty(N, dtype=d) for d in (acc, acc, acc, torch.bool)]
    makes_headroom = compute_dtype == torch.float16 and (need_hidden or need_weight or need_bias)
    wide = acc if makes_headroom else None
    wanted = ((hidden, need_hidden, None), (weight, need_weight, wide), (bias, need_bias, wide))
    grads = [_fake_gradient(t, hidden, need, dtype) for t, need, dtype in wanted]
    headroom = hidden.new_empty(() if makes_headroom else 0, dtype=acc)
    return (hidden.new_empty((), dtype=acc), *rows, *grads, headroom)


def _weighted_op_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.needs = inputs[8:11]
    ctx.dtypes = tuple(None if t is None else t.dtype for t in inputs[:3])
    ctx.save_for_backward(*output[5:])
    ctx.mark_non_differentiable(*output[1:])


def _weighted_op_backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    *grads, headroom = ctx.saved_tensors
    factor = grad_loss * headroom if headroom.dim() == 0 else grad_loss
    # widened first: a float16 gradient times a 0-d factor would round the factor to float16
    scaled = [
        (grad.to(factor.dtype) * factor).to(dtype) if need else None
        for grad, need, dtype in zip(grads, ctx.needs, ctx.dtypes, strict=True)
    ]
    return (*scaled, *(None,) * 15)


_weighted_op.register_autograd(_weighted_op_backward, setup_context=_weighted_op_setup)


@torch.library.custom_op("dllm_kernels::linear_token_nll", mutates_args=())
def _token_op(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    compute_dtype: torch.dtype,
    chunk_size: int | None,
    memory_budget: int | None,
    num_active: int | None,
    ignore_index: int,
    with_correct: bool,
    triton: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    options = _Options(compute_dtype, chunk_size, memory_budget, num_active, ignore_index, with_correct, triton)
    needs = _Needs(need_hidden, need_weight, need_bias)
    *rows, unit_grad = _token_forward(hidden, weight, bias, targets, active, needs, options)
    nll, row_max, log_sum, correct = (t.clone() for t in rows if t is not None)
    return nll, row_max, log_sum, correct, _present(unit_grad, hidden)


@_token_op.register_fake
def _(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    compute_dtype: torch.dtype,
    chunk_size: int | None,
    memory_budget: int | None,
    num_active: int | None,
    ignore_index: int,
    with_correct: bool,
    triton: bool,
) -> tuple[torch.Tensor, ...]:
    acc = torch.promote_types(compute_dtype, torch.float32)
    rows = [hidden.new_empty(targets.shape[0], dtype=d) for d in (acc, acc, acc, torch.bool)]
    frozen = _frozen(_Needs(need_hidden, need_weight, need_bias))
    return (*rows, _fake_gradient(hidden, hidden, frozen))


@torch.library.custom_op("dllm_kernels::linear_token_nll_backward", mutates_args=())
def _token_backward_op(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    grad_nll: torch.Tensor,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    compute_dtype: torch.dtype,
    chunk_size: int | None,
    memory_budget: int | None,
    num_active: int | None,
    ignore_index: int,
    with_correct: bool,
    triton: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = _Options(compute_dtype, chunk_size, memory_budget, num_active, ignore_index, with_correct, triton)
    needs = _Needs(need_hidden, need_weight, need_bias)
    grads = _token_backward(hidden, weight, bias, targets, active, row_max, log_sum, grad_nll, needs, options)
    grad_hidden, grad_weight, grad_bias = (_present(g, hidden) for g in grads)
    return grad_hidden, grad_weight, grad_bias


@_token_backward_op.register_fake
def _(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    grad_nll: torch.Tensor,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    compute_dtype: torch.dtype,
    chunk_size: int | None,
    memory_budget: int | None,
    num_active: int | None,
    ignore_index: int,
    with_correct: bool,
    triton: bool,
) -> tuple[torch.Tensor, ...]:
    wanted = ((hidden, need_hidden), (weight, need_weight), (bias, need_bias))
    return tuple(_fake_gradient(t, hidden, need) for t, need in wanted)


def _token_op_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.needs, ctx.options = _Needs(*inputs[5:8]), inputs[8:]
    _, row_max, log_sum, _, unit_grad = output
    ctx.save_for_backward(*((unit_grad,) if _frozen(ctx.needs) else (*inputs[:5], row_max, log_sum)))
    ctx.mark_non_differentiable(*output[1:])


def _token_op_backward(ctx: Any, grad_nll: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    if _frozen(ctx.needs):
        return (_scale_rows(ctx.saved_tensors[0], grad_nll), *(None,) * 14)
    grads = _token_backward_op(*ctx.saved_tensors, grad_nll, *ctx.needs, *ctx.options)
    wanted = (grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))
    return (*wanted, *(None,) * 12)


_token_op.register_autograd(_token_op_backward, setup_context=_token_op_setup)
