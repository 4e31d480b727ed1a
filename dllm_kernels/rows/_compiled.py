"""The row ops as torch.compile sees them: one pair of opaque, functional ops, so that a compiled step has no graph break.

The whole chunk loop is one op each way. Loaded only while a graph is traced, since registering costs import time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dllm_kernels.rows._eager import dtypes, in_dtypes, upstream_of
from dllm_kernels.rows._plan import LEAVES, Job, Plan, placed
from dllm_kernels.rows._records import ROW_OPS, RowOp, Tensors


def call(op: RowOp, job: Job, plan: Plan) -> Tensors:
    """As ``_eager.call``."""
    return _in_place(op, job, plan, _rows(op.name, *job, *plan.pack()))[: op.shown]


def _in_place(op: RowOp, job: Job, plan: Plan, written: Iterable[Tensor]) -> Tensors:
    """None again where nothing was asked for: a list of tensors has no room for it."""
    those = iter(written)
    return tuple(None if spec is None else next(those) for spec in op.specs(job, plan))


@torch.library.custom_op("dllm_kernels::rows", mutates_args=())
def _rows(
    op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, ids: Tensor, active: Tensor | None,
    weights: Tensor | None, a: Tensor | None, b: Tensor | None, extra_x: Tensor | None, extra_weight: Tensor | None,
    table: Tensor | None, packed: list[int], factors: list[float], changing: Tensor | None, constants: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    job = Job(x, weight, bias, ids, active, weights, a, b, extra_x, extra_weight, table)
    plan = Plan.unpack(packed, factors, changing, constants)
    return [t for t in ROW_OPS[op].forward(job, plan) if t is not None]


@_rows.register_fake
def _(op: str, *inputs: Any) -> list[Tensor]:
    job, plan = Job(*inputs[:-4]), Plan.unpack(*inputs[-4:-2])
    return [job.x.new_empty(spec[0], dtype=spec[1]) for spec in ROW_OPS[op].specs(job, plan) if spec is not None]


@torch.library.custom_op("dllm_kernels::rows_backward", mutates_args=())
def _rows_backward(
    op: str, kept: list[Tensor | None], upstream: list[Tensor | None], packed: list[int], factors: list[float],
    changing: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    made = ROW_OPS[op].backward(tuple(kept), tuple(upstream), Plan.unpack(packed, factors, changing))
    return [g for g in in_dtypes(made, dtypes(kept[:LEAVES])) if g is not None]


@_rows_backward.register_fake
def _(
    op: str, kept: list[Tensor | None], _: Any, packed: list[int], factors: list[float], *changing: Any
) -> list[Tensor]:
    """Contiguous, whatever the strides of the inputs."""
    wanted = zip(kept[:LEAVES], Plan.unpack(packed, factors).needs, strict=True)
    return [t.new_empty(t.shape) for t, need in wanted if need and t is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    name, *tensors, packed, factors, changing, constants = inputs
    op, job, plan = ROW_OPS[name], Job(*tensors), Plan.unpack(packed, factors, None, constants)
    written = _in_place(op, job, plan, output)
    ctx.op, ctx.packed, ctx.constants = op, (packed, factors), len(constants)
    ctx.written = [t is not None for t in written]
    ctx.dtypes = dtypes(job.leaves)
    ctx.save_for_backward(*op.kept(job, written, plan), changing)
    ctx.mark_non_differentiable(*(t for t in written[op.differentiable :] if t is not None))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    op, plan, those = ctx.op, Plan.unpack(*ctx.packed), iter(grads)
    upstream = upstream_of(op, [next(those) if written else None for written in ctx.written])
    return None, *placed(_gradients(ctx, op, upstream, plan)), None, None, None, [None] * ctx.constants


def _gradients(ctx: Any, op: RowOp, upstream: Tensors | None, plan: Plan) -> list[Tensor | None]:
    if upstream is None or not any(plan.needs):
        return [None] * LEAVES
    *kept, changing = ctx.saved_tensors
    if (backward := op.traced(plan)) is not None:
        return in_dtypes(backward(tuple(kept), upstream, plan), ctx.dtypes)
    made = iter(_rows_backward(op.name, kept, list(upstream), *ctx.packed, changing))
    wanted = zip(kept[:LEAVES], plan.needs, strict=True)
    return [next(made) if need and t is not None else None for t, need in wanted]


_rows.register_autograd(_backward, setup_context=_setup)
