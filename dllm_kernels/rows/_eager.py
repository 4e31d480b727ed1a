"""The row ops as one autograd Function, for eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dllm_kernels.rows._first_order import first_order_only, handle
from dllm_kernels.rows._plan import LEAVES, Job, Plan
from dllm_kernels.rows._records import RowOp, Tensors


def call(op: RowOp, job: Job, plan: Plan) -> Tensors:
    """What the caller gets of the op over N rows, with the gradients that the plan needs."""
    if not any(plan.needs):
        return op.forward(job, plan)[: op.shown]
    return _Rows.apply(op, plan, job, *job.leaves)[:-1]  # type: ignore[no-untyped-call, no-any-return]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: RowOp, plan: Plan, job: Job, *_: torch.Tensor | None) -> Tensors:
        """The job's leaves come again by themselves, for autograd to see them."""
        written = op.forward(job, plan)
        hook = handle(written[0])  # type: ignore[arg-type]
        ctx.op, ctx.plan = op, plan.for_backward
        ctx.dtypes, ctx.instead = dtypes(job.leaves), op.instead[job.weight is not None]
        theirs = {id(t) for t in written[: op.differentiable] if t is not None}  # which the caller may write into
        kept = [t.clone() if t is not None and id(t) in theirs else t for t in op.kept(job, written, plan)]
        ctx.save_for_backward(*kept, hook)
        ctx.check = op.before_backward and op.before_backward(job, plan)
        ctx.mark_non_differentiable(*(t for t in written[op.differentiable : op.shown] if t is not None))
        ctx.set_materialize_grads(False)
        return *written[: op.shown], hook

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: Callable[[], Tensors], *grads: torch.Tensor | None) -> tuple[Any, ...]:
        upstream = upstream_of(ctx.op, grads)
        if upstream is None:
            return (None,) * (3 + LEAVES)
        if ctx.check is not None:
            ctx.check()
        made = ctx.op.backward(saved()[:-1], upstream, ctx.plan)
        return None, None, None, *in_dtypes(made, ctx.dtypes)


def upstream_of(op: RowOp, grads: Sequence[torch.Tensor | None]) -> Tensors | None:
    """The upstream gradients of what is differentiable, contiguous; None where there is none at all."""
    upstream = tuple(None if g is None else g.contiguous() for g in grads[: op.differentiable])
    return None if all(g is None for g in upstream) else upstream


def dtypes(leaves: Sequence[torch.Tensor | None]) -> list[torch.dtype | None]:
    """Of what may want a gradient."""
    return [None if t is None else t.dtype for t in leaves]


def in_dtypes(grads: Sequence[torch.Tensor | None], dtypes: list[torch.dtype | None]) -> list[torch.Tensor | None]:
    """Each gradient in the dtype of its input."""
    return [None if g is None or dtype is None else g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)]
