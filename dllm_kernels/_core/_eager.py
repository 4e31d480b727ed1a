"""The row ops as one autograd Function, for eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dllm_kernels._core._first_order import first_order_only, handle
from dllm_kernels._core._inputs import GRAD_INPUTS, RowInputs
from dllm_kernels._core._op import Outputs, RowOp
from dllm_kernels._core._plan import Plan


def call(op: RowOp, inputs: RowInputs, plan: Plan) -> Outputs:
    """Run the op over N rows; return its public outputs, with the gradients that the plan needs."""
    if not any(plan.needs):
        return op.forward(inputs, plan)
    names: list[str] = []
    tensors = _Rows.apply(op, plan, inputs, names, *inputs.grad_inputs)  # type: ignore[no-untyped-call]
    return dict(zip(names, tensors[:-1], strict=True))


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: RowOp, plan: Plan, inputs: RowInputs, names: list[str], *_: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Fill ``names`` with those of the outputs. ``inputs.grad_inputs`` are passed again for autograd to see them."""
        outputs = op.forward(inputs, plan)
        public = [out for out in op.outputs if out.public and outputs.get(out.name) is not None]
        names += [out.name for out in public]
        hook = handle(outputs[names[0]])
        ctx.op, ctx.plan, ctx.differentiable = op, plan, [out.name if out.differentiable else None for out in public]
        ctx.dtypes, ctx.instead = dtypes(inputs.grad_inputs), op.instead[plan.from_hidden]
        of_inputs, of_outputs = op.saved(plan)
        shared = {name for name in ctx.differentiable if name}  # the caller may write into these
        kept = [outputs.get(name) for name in of_outputs]
        kept = [t.clone() if t is not None and name in shared else t for name, t in zip(of_outputs, kept, strict=True)]
        ctx.save_for_backward(*(getattr(inputs, name) for name in of_inputs), *kept, hook)
        ctx.check = op.before_backward and op.before_backward(inputs, plan)
        ctx.mark_non_differentiable(*(outputs[out.name] for out in public if not out.differentiable))
        ctx.set_materialize_grads(False)
        return *(outputs[name] for name in names), hook

    @staticmethod
    @first_order_only
    def backward(ctx: Any, saved: Callable[[], Sequence[Any]], *grads: torch.Tensor | None) -> tuple[Any, ...]:
        op, plan = ctx.op, ctx.plan
        upstream = upstream_of(ctx.differentiable, grads)
        if upstream is None:
            return (None,) * (4 + len(GRAD_INPUTS))
        if ctx.check is not None:
            ctx.check()
        gradients = op.backward(*restored(op, plan, saved()[:-1]), upstream, plan)
        return None, None, None, None, *in_dtypes(gradients, ctx.dtypes)


def restored(op: RowOp, plan: Plan, saved: Sequence[Any]) -> tuple[RowInputs, Outputs]:
    """The inputs and outputs that were saved for backward."""
    of_inputs, of_outputs = op.saved(plan)
    n = len(of_inputs)
    return RowInputs.restored(of_inputs, saved[:n]), dict(zip(of_outputs, saved[n:], strict=True))


def upstream_of(differentiable: Sequence[str | None], grads: Sequence[torch.Tensor | None]) -> Outputs | None:
    """Upstream gradients by output name, contiguous; None if there are none."""
    found = {
        name: g.contiguous()
        for name, g in zip(differentiable, grads, strict=False)
        if name is not None and g is not None
    }
    return found or None


def dtypes(tensors: Sequence[torch.Tensor | None]) -> list[torch.dtype | None]:
    """The dtype of each tensor."""
    return [None if t is None else t.dtype for t in tensors]


def in_dtypes(grads: Sequence[torch.Tensor | None], dtypes: list[torch.dtype | None]) -> list[torch.Tensor | None]:
    """Cast each gradient to the dtype of its input."""
    return [None if g is None or dtype is None else g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)]
