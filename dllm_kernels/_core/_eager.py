"""Row ops as one autograd Function, for eager mode and for ``torch.func.grad`` and ``torch.func.vjp``.

Backward passes have no derivative. :func:`first_order` makes them raise if they are differentiated.
``torch.autograd.function.once_differentiable`` raises only if the upstream gradient has a graph. If it is a constant,
as in ``torch.autograd.grad(loss, x, create_graph=True)``, the returned gradient counts as a constant too, and a penalty
on it would silently have no gradient.

The node that raises must be on every path from the gradient to the inputs of the Function and to the upstream
gradients, because ``backward(inputs=[weight])`` visits no other nodes. If the Function has saved its gradients instead
of its inputs, backward has no access to the inputs. An output of the Function leads to all of them, and an empty output
(:func:`link_to`) takes no memory to save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dllm_kernels._core._inputs import GRAD_INPUTS, RowInputs
from dllm_kernels._core._op import Outputs, RowOp
from dllm_kernels._core._plan import Plan

Tensors = tuple[Tensor | None, ...]


def call(op: RowOp, inputs: RowInputs, plan: Plan) -> Outputs:
    """Run the op over N rows and return its outputs, including the gradients that the plan needs."""
    if not any(plan.needs):
        return op.forward(inputs, plan)
    return _by_name(op, _Rows.apply(op, plan, inputs, *inputs.grad_inputs))  # type: ignore[no-untyped-call]


def _by_name(op: RowOp, output: Sequence[Tensor | None]) -> Outputs:
    """Name the outputs of :func:`_forward`, without the link."""
    return {out.name: t for out, t in zip(op.outputs, output[:-1], strict=True)}


def _forward(op: RowOp, plan: Plan, inputs: RowInputs, *_: Tensor | None) -> Tensors:
    """Compute all outputs and the link. The last arguments are ``inputs.grad_inputs``, which autograd tracks."""
    outputs = op.forward(inputs, plan)
    return *(outputs.get(out.name) for out in op.outputs), link_to(inputs.x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the inputs and outputs of :func:`_forward` that backward reads."""
    op, plan, given, *_ = inputs
    outputs = _by_name(op, output)
    ctx.op, ctx.plan, ctx.differentiable = op, plan, [out.name if out.differentiable else None for out in op.outputs]
    ctx.dtypes, ctx.instead = dtypes(given.grad_inputs), op.instead[plan.from_hidden]
    of_inputs, of_outputs = op.saved(plan)
    shared = {name for name in ctx.differentiable if name}  # the caller may write into these
    kept = [outputs.get(name) for name in of_outputs]
    kept = [t.clone() if t is not None and name in shared else t for name, t in zip(of_outputs, kept, strict=True)]
    ctx.save_for_backward(*(getattr(given, name) for name in of_inputs), *kept, output[-1])
    ctx.check = op.before_backward and op.before_backward(given, plan)
    constant = (outputs[out.name] for out in op.outputs if not out.differentiable)
    ctx.mark_non_differentiable(*(t for t in constant if t is not None))
    ctx.set_materialize_grads(False)


def link_to(like: Tensor) -> Tensor:
    """Make an empty output that leads from a backward pass to the inputs; save it and return it."""
    return like.new_empty(0)


def first_order(make: Callable[..., Tensors], tensors: Sequence[Tensor | None], instead: str) -> Tensors:
    """Compute gradients ``make(*tensors)`` that raise when they are differentiated.

    Args:
        make: computes the gradients from its arguments only, which a transform of ``torch.func`` unwraps.
        tensors: the upstream gradients, the saved tensors, and a tensor that leads to all inputs that require a
            gradient: a :func:`link_to`, or the only such input.
        instead: function with a second derivative, for the error message.
    """
    if not torch.is_grad_enabled():
        return make(*tensors)
    return _Gradients.apply(make, instead, *tensors)  # type: ignore[no-untyped-call, no-any-return]


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(make: Callable[..., Tensors], _: str, *tensors: Tensor | None) -> Tensors:
        return make(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.instead = inputs[1]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "a gradient that dllm_kernels made was differentiated, and it has no second derivative; "
            f"for a second-order term use {ctx.instead}"
        )


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensors:
        output = _forward(*inputs)
        _setup(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        op, plan, dtypes_ = ctx.op, ctx.plan, ctx.dtypes
        upstream = upstream_of(ctx.differentiable, grads)
        if upstream is None:
            return (None,) * (3 + len(GRAD_INPUTS))
        if ctx.check is not None:
            ctx.check()
        *saved, link = ctx.saved_tensors  # read once, because an activation checkpoint recomputes and frees them
        names, n = tuple(upstream), len(saved)

        def gradients(*tensors: Tensor | None) -> Tensors:
            given = dict(zip(names, tensors[n:-1], strict=True))
            return tuple(in_dtypes(op.backward(*restored(op, plan, tensors[:n]), given, plan), dtypes_))

        return None, None, None, *first_order(gradients, (*saved, *upstream.values(), link), ctx.instead)


def restored(op: RowOp, plan: Plan, saved: Sequence[Any]) -> tuple[RowInputs, Outputs]:
    """Rebuild the inputs and outputs that were saved for backward."""
    of_inputs, of_outputs = op.saved(plan)
    n = len(of_inputs)
    return RowInputs.restored(of_inputs, saved[:n]), dict(zip(of_outputs, saved[n:], strict=True))


def upstream_of(differentiable: Sequence[str | None], grads: Sequence[Tensor | None]) -> Outputs | None:
    """Return the upstream gradients by name, contiguous; None if there are none."""
    upstream = {
        name: g.contiguous()
        for name, g in zip(differentiable, grads, strict=False)
        if name is not None and g is not None
    }
    return upstream or None


def dtypes(tensors: Sequence[Tensor | None]) -> list[torch.dtype | None]:
    """Return the dtype of each tensor."""
    return [None if t is None else t.dtype for t in tensors]


def in_dtypes(grads: Sequence[Tensor | None], dtypes: list[torch.dtype | None]) -> list[Tensor | None]:
    """Cast each gradient to the dtype of its input."""
    return [None if g is None or dtype is None else g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)]
