"""Row ops for torch.compile: one pair of opaque, functional custom ops, which do not break the graph.

The whole chunk loop is one op in forward and one in backward. Imported only while a graph is traced, because
registration is slow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllm_kernels._core._eager import dtypes, first_order, in_dtypes, link_to, restored, upstream_of
from dllm_kernels._core._inputs import GRAD_INPUTS, TENSORS, RowInputs
from dllm_kernels._core._op import Outputs, RowOp
from dllm_kernels._core._plan import Plan
from dllm_kernels._core._stats import ROW_STATS

# Ops that can be part of a compiled graph. ROW_OBJECTIVE is not: under torch.compile it is traced as ROW_STATS and the
# caller's function.
_ALL = (ROW_STATS,)
ROW_OPS = {op.name: op for op in _ALL}


def call(op: RowOp, inputs: RowInputs, plan: Plan) -> Outputs:
    """Run the op as one custom op; see ``_eager.call``."""
    outputs = _rows(op.name, *inputs.tensors, *plan.pack())
    return {out.name: t for (out, _), t in zip(op.requested(inputs, plan), outputs[:-1], strict=True)}


_OPTIONAL = "".join(f"Tensor? {name}, " for name in TENSORS[2:])
_SCHEMA = f"(str op, Tensor x, Tensor ids, {_OPTIONAL}SymInt[] packed, float[] factors, Tensor? changing) -> Tensor[]"


@torch.library.custom_op("dllm_kernels::rows", mutates_args=(), schema=_SCHEMA)
def _rows(op: str, *arguments: Any) -> list[Tensor]:
    *tensors, packed, factors, changing = arguments
    inputs = RowInputs(*tensors)
    outputs = ROW_OPS[op].forward(inputs, Plan.unpack(packed, factors, changing))
    requested = [outputs[out.name] for out in ROW_OPS[op].outputs if outputs.get(out.name) is not None]
    return [*requested, link_to(inputs.x)]


@_rows.register_fake
def _(op: str, *arguments: Any) -> list[Tensor]:
    *tensors, packed, factors, _ = arguments
    inputs = RowInputs(*tensors)
    requested = ROW_OPS[op].requested(inputs, Plan.unpack(packed, factors))
    return [*(inputs.x.new_empty(shape, dtype=dtype) for _, (shape, dtype) in requested), link_to(inputs.x)]


@torch.library.custom_op("dllm_kernels::rows_backward", mutates_args=())
def _rows_backward(
    op: str, saved: list[Tensor | None], upstream: list[Tensor | None], packed: list[int], factors: list[float],
    changing: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    record, plan = ROW_OPS[op], Plan.unpack(packed, factors, changing)
    inputs, outputs = restored(record, plan, saved)
    differentiable = [out.name for out in record.outputs if out.differentiable]
    given = {name: g for name, g in zip(differentiable, upstream, strict=True) if g is not None}
    grads = record.backward(inputs, outputs, given, plan)
    return [g for g in in_dtypes(grads, dtypes(inputs.grad_inputs)) if g is not None]


@_rows_backward.register_fake
def _(
    op: str, saved: list[Tensor | None], _: Any, packed: list[int], factors: list[float], *changing: Any
) -> list[Tensor]:
    """Return contiguous gradients, whatever the strides of the inputs."""
    plan = Plan.unpack(packed, factors)
    inputs, _outputs = restored(ROW_OPS[op], plan, saved)
    needed = zip(inputs.grad_inputs, plan.needs, strict=True)
    return [t.new_empty(t.shape) for t, need in needed if need and t is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    name, *tensors, packed, factors, changing = inputs
    op, plan, given = ROW_OPS[name], Plan.unpack(packed, factors), RowInputs(*tensors)
    requested = [out for out, _ in op.requested(given, plan)]
    outputs = {out.name: t for out, t in zip(requested, output[:-1], strict=True)}
    of_inputs, of_outputs = op.saved(plan)
    ctx.op, ctx.packed = op, (packed, factors)
    ctx.differentiable = [out.name if out.differentiable else None for out in requested]
    ctx.dtypes, ctx.instead = dtypes(given.grad_inputs), op.instead[given.weight is not None]
    saved = (*(getattr(given, n) for n in of_inputs), *(outputs.get(n) for n in of_outputs))
    ctx.save_for_backward(*saved, changing, output[-1])
    ctx.mark_non_differentiable(*(outputs[out.name] for out in requested if not out.differentiable))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    op, upstream, plan = ctx.op, upstream_of(ctx.differentiable, grads), Plan.unpack(*ctx.packed)
    if upstream is None or not any(plan.needs):
        return (None,) * (len(TENSORS) + 4)
    *saved, changing, link = ctx.saved_tensors
    names, n = tuple(upstream), len(saved)

    def gradients(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, outputs = restored(op, plan, tensors[:n])
        given: Outputs = dict(zip(names, tensors[n:-2], strict=True))
        if (backward := op.inline_backward(plan)) is not None:
            return tuple(in_dtypes(backward(inputs, outputs, given, plan), ctx.dtypes))
        by_output = [given.get(out.name) for out in op.outputs if out.differentiable]
        computed = iter(_rows_backward(op.name, list(tensors[:n]), by_output, *ctx.packed, tensors[-2]))
        needed = zip(inputs.grad_inputs, plan.needs, strict=True)
        return tuple(next(computed) if need and t is not None else None for t, need in needed)

    input_grads = first_order(gradients, (*saved, *upstream.values(), changing, link), ctx.instead)
    by_name = dict(zip(GRAD_INPUTS, input_grads, strict=True))
    return None, *(by_name.get(name) for name in TENSORS), None, None, None


_rows.register_autograd(_backward, setup_context=_setup)
