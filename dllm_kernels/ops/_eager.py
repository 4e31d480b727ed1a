"""The ops as autograd Functions, for eager mode.

The last output of each is a :func:`handle`, and so is the last tensor that it saves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dllm_kernels.ops import _chunks, _stats
from dllm_kernels.ops._first_order import first_order_only, handle
from dllm_kernels.ops._plan import LinearJob, LinearStatsJob, Plan
from dllm_kernels.ops._rows import as_blv
from dllm_kernels.ops._stats_rows import Ask, Found, Upstream

Tensors = tuple[torch.Tensor, ...]
Saved = Callable[[], tuple[Any, ...]]
_OF_LOGITS = "torch.nn.functional.cross_entropy"
_OF_HIDDEN = "torch.nn.functional.cross_entropy on the logits, torch.nn.functional.linear(hidden, weight, bias)"
_STATS = "torch.log_softmax and what follows from it"
_STATS_OF_HIDDEN = "torch.log_softmax of the logits, torch.nn.functional.linear(hidden, weight, bias)"


def token_nll(logits: torch.Tensor, targets: torch.Tensor, plan: Plan) -> Tensors:
    """(nll, row_max, log_sum, correct) of each row; only nll is differentiable."""
    return _TokenNLL.apply(logits, targets, plan)[:-1]  # type: ignore[no-untyped-call, no-any-return]


def weighted_linear_nll(job: LinearJob, plan: Plan) -> Tensors:
    """(loss, nll, row_max, log_sum, correct); only loss is differentiable, and its gradients are ready made."""
    return _WeightedLinearNLL.apply(*job, plan)[:-1]  # type: ignore[no-untyped-call, no-any-return]


def linear_token_nll(job: LinearJob, plan: Plan) -> Tensors:
    """(nll, row_max, log_sum, correct), nll differentiable with any gradient per row."""
    return _LinearTokenNLL.apply(*job, plan)[:-1]  # type: ignore[no-untyped-call, no-any-return]


def row_stats(logits: torch.Tensor, ask: Ask, plan: Plan) -> tuple[torch.Tensor | None, ...]:
    """(log_probs, lse, entropy, mix, correct) of each row; all but correct are differentiable."""
    return _RowStats.apply(logits, *ask[:4], plan)[:-1]  # type: ignore[no-untyped-call, no-any-return]


def linear_row_stats(job: LinearStatsJob, ask: Ask, plan: Plan) -> tuple[torch.Tensor | None, ...]:
    """As :func:`row_stats`, differentiable in hidden, weight and bias."""
    return _LinearRowStats.apply(*job[:3], *ask[:4], plan)[:-1]  # type: ignore[no-untyped-call, no-any-return]


class _TokenNLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, plan: Plan) -> tuple[Any, ...]:
        nll, row_max, log_sum, _, correct = plan.primitives().row_stats(
            as_blv(logits), targets, with_correct=plan.with_correct, transform=plan.transform
        )
        hook = handle(nll)
        ctx.save_for_backward(logits, targets, row_max, log_sum, hook)
        ctx.plan = plan
        ctx.mark_non_differentiable(*(t for t in (row_max, log_sum, correct) if t is not None))
        ctx.set_materialize_grads(False)
        return nll, row_max, log_sum, correct, hook

    @staticmethod
    @first_order_only(_OF_LOGITS)
    def backward(ctx: Any, saved: Saved, grad_nll: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad_nll is None:
            return None, None, None
        logits, targets, row_max, log_sum = saved()
        plan: Plan = ctx.plan
        inplace = plan.inplace_backward
        grad = logits.detach() if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        scale = grad_nll.reshape(-1).contiguous()
        plan.primitives().row_grad(
            as_blv(logits), targets, scale, row_max, log_sum, as_blv(grad), transform=plan.transform
        )
        if inplace:
            torch.autograd.graph.increment_version(logits)
        return grad, None, None


class _WeightedLinearNLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *job_and_plan: Any) -> tuple[torch.Tensor, ...]:
        job, plan = LinearJob(*job_and_plan[:-1]), job_and_plan[-1]
        out = _chunks.weighted_forward(job, plan)
        hook = handle(out.loss)
        ctx.save_for_backward(*out.gradients, job.weights, hook)
        ctx.plan, ctx.consumed = plan, False
        ctx.head_dtypes = tuple(None if t is None else t.dtype for t in (job.weight, job.bias))
        trained = zip((job.weight, job.bias), plan.needs[1:], strict=True)
        ctx.head = [weakref.ref(t) for t, trains in trained if trains and t is not None]
        ctx.mark_non_differentiable(*out.rows)
        ctx.set_materialize_grads(False)
        return (out.loss, *out.rows, hook)

    @staticmethod
    @first_order_only(_OF_HIDDEN)
    def backward(ctx: Any, saved: Saved, grad_loss: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad_loss is None:
            return (None,) * 7
        if ctx.consumed:
            raise RuntimeError(
                "weighted_linear_nll made its gradients in the forward pass and gave them away in the first backward; "
                "call the loss again for a second one, or use linear_token_nll"
            )
        ctx.consumed = True
        _check_still_gathered(ctx.head)
        grad_hidden, *head, headroom, weights = saved()
        if headroom is not None:
            grad_hidden = None if grad_hidden is None else _chunks.scale_rows(grad_hidden, weights * grad_loss)
            grads = (grad_hidden, *_chunks.times_headroom(head, grad_loss * headroom, ctx.head_dtypes))
        else:
            grads = (grad_hidden, *head)
            for grad in grads:
                if grad is not None:
                    ctx.plan.primitives().scale_(grad, grad_loss)
        return (*grads, *(None,) * 4)


class _LinearTokenNLL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *job_and_plan: Any) -> tuple[torch.Tensor, ...]:
        job, plan = LinearJob(*job_and_plan[:-1]), job_and_plan[-1]
        rows, unit_grad = _chunks.token_forward(job, plan)
        nll, row_max, log_sum, _ = rows
        hook = handle(nll)
        ctx.save_for_backward(*((unit_grad,) if plan.needs.frozen else (*job, row_max, log_sum)), hook)
        ctx.plan = plan
        ctx.mark_non_differentiable(*rows[1:])
        ctx.set_materialize_grads(False)
        return (*rows, hook)

    @staticmethod
    @first_order_only(_OF_HIDDEN)
    def backward(ctx: Any, saved: Saved, grad_nll: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad_nll is None:
            return (None,) * 7
        if ctx.plan.needs.frozen:
            return (_chunks.scale_rows(saved()[0], grad_nll), *(None,) * 6)
        *job, row_max, log_sum = saved()
        grads = _chunks.token_backward(LinearJob(*job), ctx.plan, (row_max, log_sum), grad_nll)
        return (*grads, *(None,) * 4)


class _RowStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, *ask_and_plan: Any) -> tuple[Any, ...]:
        *ask, plan = ask_and_plan
        return _save_stats(ctx, (logits, *ask), _stats.forward(logits, _stats.ask_of(plan, *ask), plan), plan)

    @staticmethod
    @first_order_only(_STATS)
    def backward(ctx: Any, saved: Saved, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        (logits, *ask), found, up = _saved_stats(saved(), grads)
        if up is None:
            return (None,) * 6
        return (_stats.backward(logits, _stats.ask_of(ctx.plan, *ask), found, up, ctx.plan), *(None,) * 5)


class _LinearRowStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *head_ask_and_plan: Any) -> tuple[Any, ...]:
        hidden, weight, bias, *ask, plan = head_ask_and_plan
        job = LinearStatsJob(hidden, weight, bias, ask[0])
        found = _stats.linear_forward(job, _stats.ask_of(plan, *ask), plan)
        return _save_stats(ctx, (hidden, weight, bias, *ask), found, plan)

    @staticmethod
    @first_order_only(_STATS_OF_HIDDEN)
    def backward(ctx: Any, saved: Saved, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        (hidden, weight, bias, *ask), found, up = _saved_stats(saved(), grads)
        if up is None:
            return (None,) * 8
        job = LinearStatsJob(hidden, weight, bias, ask[0])
        return (*_stats.linear_backward(job, _stats.ask_of(ctx.plan, *ask), found, up, ctx.plan), *(None,) * 5)


def _save_stats(ctx: Any, inputs: tuple[Any, ...], found: Found, plan: Plan) -> tuple[Any, ...]:
    """What a Function of row statistics returns, five that the caller sees; and save what backward needs."""
    hook = handle(found.log_probs)
    out = (found.log_probs, found.row_max + found.log_sum, found.entropy, found.mix, found.correct, hook)
    ctx.save_for_backward(*inputs, found.log_probs, found.row_max, found.log_sum, found.entropy, found.mix_weight, hook)
    ctx.plan = plan
    if found.correct is not None:
        ctx.mark_non_differentiable(found.correct)
    ctx.set_materialize_grads(False)
    return out


def _saved_stats(
    saved: tuple[Any, ...], grads: tuple[torch.Tensor | None, ...]
) -> tuple[tuple[Any, ...], Found, Upstream | None]:
    """The inputs, what was found, and the upstream gradients, None where there is none at all."""
    *inputs, log_probs, row_max, log_sum, entropy, weight = saved
    found = Found(log_probs, row_max, log_sum, entropy, mix_weight=weight)
    up = Upstream(*(None if g is None else g.contiguous() for g in grads[:4]))
    return tuple(inputs), found, None if all(g is None for g in up) else up


def _check_still_gathered(head: Iterable[weakref.ref[torch.Tensor]]) -> None:
    """Raise where FSDP2 has freed the gathered head before its gradient came: there the gradient would be lost.

    Backward does not read the head here, so nothing else would notice.
    """
    for parameter in (ref() for ref in head):
        if parameter is not None and parameter.numel() and not parameter.untyped_storage().size():
            raise RuntimeError(
                "weight or bias was freed before its gradient came, which would be lost: under fully_shard with "
                "reshard_after_forward=False, run the loss inside the head's forward (dllm_kernels.distributed.LossHead) "
                "where the head is also called by itself in the same step"
            )
