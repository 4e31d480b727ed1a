"""Divergence to a teacher, from logits, or chunk by chunk from hidden states and LM heads.

One chunk of the student's logits and one of the teacher's are materialised at a time, each in a buffer that all chunks
reuse. The gradient overwrites the student's logits. With a frozen head that student and teacher share, this takes three
matrix products. The teacher has no gradient.

``lk`` with ``alpha="mean"`` needs an extra forward-only pass to compute the mean acceptance rate: two more matrix
products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dllm_kernels._backends._divergence import KEPT_STATS, DivergenceRequest, DivergenceResult, Kept
from dllm_kernels._backends._rows import IGNORE, as_blv
from dllm_kernels._core import _op
from dllm_kernels._core._chunks import NO_FACTORS, Chunks, aligned_rows, head_product, no_autocast, unit_scale
from dllm_kernels._core._inputs import NO_GRADIENTS, Gradients, RowInputs
from dllm_kernels._core._nll import scale_copies, scale_in_place
from dllm_kernels._core._plan import Plan
from dllm_kernels._core._results import Divergence
from dllm_kernels._core._stats import row_ids

Tensor = torch.Tensor
# Largest size in bytes of a copy of the compared teacher columns.
COPY_BYTES = 64 << 20


def computes_gradients(plan: Plan) -> bool:
    """Return True if forward computes the gradients and backward only scales them: from hidden states, if possible.

    It is possible if the loss is the sum, or if only rows need a gradient.
    """
    return plan.from_hidden and any(plan.needs) and (not plan.divergence.per_row or plan.needs.frozen_head)


def _forward(inputs: RowInputs, plan: Plan) -> _op.Outputs:
    """Compute the loss, the per-row results, and the gradients that the plan needs.

    The loss is the weighted sum. With loss scaling, backward multiplies each row's gradient by ``row_size``, and the
    head's by ``loss_scale``. With ``per_row`` the loss is each row's weighted value, and the gradients are computed for
    weights of 1.
    """
    config, weights, computes = plan.divergence, inputs.weights, computes_gradients(plan)
    with no_autocast(inputs):
        needs = plan.needs if computes else NO_GRADIENTS
        scale, factors, loss_scale = weights * config.value_scale, NO_FACTORS, None
        size = scale if computes else None  # saved, since value_scale is unknown while a graph is traced
        if config.per_row:
            scale = (weights != 0).to(weights.dtype)
        elif any(needs):
            scale, factors, loss_scale = unit_scale(scale, plan)
            factors = factors._replace(hidden=None)  # applied in backward
        rows_of = partial(_rows_of_logits, inputs, plan)
        if plan.from_hidden:
            chunks = Chunks(_with_teacher_head(inputs, plan), plan, needs, factors)
            rows_of = partial(_rows_of_head, chunks, scale)
        mean = None
        if config.spec.lam_of_mean:
            rate, all_reduce = rows_of(None, with_grad=False).acceptance_rate, config.all_reduce or (lambda t: t)
            mean = all_reduce(torch.where(weights != 0, weights * rate, 0.0).sum()) / all_reduce(weights.sum())
        value, acceptance_rate, agree, kept = rows_of(mean, with_grad=any(needs))
        grads = chunks.gradients(wide=loss_scale is not None) if any(needs) else Gradients()
        value = value * config.value_scale
        weighted = torch.where(weights != 0, weights * value, 0.0)
        if plan.from_hidden:  # rows of weight 0 too
            for t in (weighted, size):
                if t is not None:
                    chunks.rows.checked_(t)
        stats, argmax = (kept.stats, kept.teacher_argmax) if kept is not None and any(plan.needs) else (None, None)
        return {
            "loss": weighted if config.per_row else weighted.sum(), "value": value, "acceptance_rate": acceptance_rate,
            "agree": agree, "mean_acceptance": mean, "kept_stats": stats, "kept_argmax": argmax,
            "loss_scale": loss_scale, "row_size": size, **_op.as_outputs(grads),
        }  # fmt: skip


def _backward(inputs: RowInputs, outputs: _op.Outputs, upstream: _op.Outputs, plan: Plan) -> Gradients:
    """Scale the gradients that forward computed, if any; otherwise read the logits again, or recompute them."""
    if computes_gradients(plan):
        return scale_in_place(inputs, outputs, upstream, plan)
    grad_loss, mean = upstream["loss"], outputs.get("mean_acceptance")
    with no_autocast(inputs):
        scale = torch.where(grad_loss != 0, inputs.weights * grad_loss * plan.divergence.value_scale, 0.0)
        if not plan.from_hidden:
            kept = Kept(outputs["kept_stats"], outputs["kept_argmax"])
            return Gradients(_grad_of_logits(inputs, plan, scale, mean, kept))
        scale, factors, loss_scale = unit_scale(scale, plan)
        targets = inputs.targets.masked_fill(scale == 0, IGNORE)
        chunks = Chunks(_with_teacher_head(inputs, plan), plan, plan.needs, factors, targets=targets)
        for _ in _compare_chunks(chunks, scale, mean, with_grad=True):
            pass
        return chunks.gradients(loss_scale)


def _rows_of_head(chunks: Chunks, scale: Tensor, mean: Tensor | None, *, with_grad: bool) -> DivergenceResult:
    """Compute the results of all rows in one pass over the chunks."""
    rows, plan, device = chunks.rows, chunks.plan, chunks.logits.device
    out = [rows.empty(dtype=dtype, device=device) for dtype in (plan.accum_dtype, plan.accum_dtype, torch.bool)]
    for chunk, result in _compare_chunks(chunks, scale, mean, with_grad=with_grad):
        rows.put_each(out, chunk, result[:3])
    return DivergenceResult(*rows.finished(out))


def _compare_chunks(
    chunks: Chunks, scale: Tensor, mean: Tensor | None, *, with_grad: bool
) -> Iterator[tuple[slice, DivergenceResult]]:
    """Compare chunk after chunk and yield (chunk, results); accumulate the gradients if requested."""
    take, teacher, request = chunks.rows.take, _teacher_of(chunks), _request(chunks.plan, mean)
    compare = partial(chunks.plan.primitives().divergence, with_grad=with_grad)
    for chunk, h, targets, logits in chunks:
        s = take(scale, chunk).masked_fill(targets == IGNORE, 0)
        y = take(chunks.inputs.ids[:, 0], chunk) if chunks.plan.divergence.spec.wants_targets else None
        result = compare(logits[None], request(teacher(chunk)[None], s, targets=y))
        if with_grad:
            chunks.add_gradients(chunk, h, targets, logits, s)
        yield chunk, result


def _request(plan: Plan, mean: Tensor | None) -> Callable[..., DivergenceRequest]:
    """Return a function that makes the request of some rows from (teacher, weights, teacher_rows, targets)."""
    config = plan.divergence
    return partial(
        DivergenceRequest, config.spec, mean_acceptance=mean, transform=plan.options.transform,
        teacher_transform=config.teacher_transform,
    )  # fmt: skip


def _teacher_of(chunks: Chunks) -> Callable[[slice], Tensor]:
    """Make the function that computes the teacher's logits for a chunk of student rows."""
    inputs, dtype, rows = chunks.inputs, chunks.plan.dtype, chunks.rows

    def take(t: Tensor | None, chunk: slice) -> Any:
        if t is None:
            return None
        index = inputs.teacher_rows
        return (rows.take(t, chunk) if index is None else _gather(t, rows.take(index, chunk))).to(dtype)

    weight, bias, extra_weight = inputs.teacher_weight, inputs.teacher_bias, inputs.teacher_extra_weight
    if weight is None:
        weight, bias = (_compared_rows(t, inputs, dtype) for t in (chunks.weight, chunks.bias))
    buffer = aligned_rows(len(chunks.logits), len(weight), dtype=chunks.logits.dtype, device=weight.device)

    def logits(chunk: slice) -> Tensor:
        h, extra_h = (take(t, chunk) for t in (inputs.teacher_x, inputs.teacher_extra_x))
        head_product(h, weight, bias, extra_h, extra_weight, out := buffer[: len(h)])
        return out

    return logits


def _with_teacher_head(inputs: RowInputs, plan: Plan) -> RowInputs:
    """Pick and cast the teacher's separate head, before :class:`Chunks` syncs."""
    own = (inputs.teacher_weight, inputs.teacher_bias, inputs.teacher_extra_weight)
    weight, bias, extra_weight = (_compared_rows(t, inputs, plan.dtype) for t in own)
    return inputs._replace(teacher_weight=weight, teacher_bias=bias, teacher_extra_weight=extra_weight)


def _compared_rows(t: Tensor | None, inputs: RowInputs, dtype: torch.dtype) -> Any:
    """Pick the rows of a head for the compared columns, cast to the dtype of the matrix products."""
    if t is None:
        return None
    columns = inputs.teacher_columns
    return (t.detach() if columns is None else _gather(t.detach(), columns)).to(dtype)


def _gather(t: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """Copy the indexed rows, or columns, of a tensor; NaN for an index out of range."""
    inside = index.clamp(0, t.shape[dim] - 1)
    out_of_range = (index != inside).view(-1, *[1] * (t.dim() - 1 - dim))
    return t.index_select(dim, inside).masked_fill_(out_of_range, math.nan)


def _rows_of_logits(inputs: RowInputs, plan: Plan, mean: Tensor | None, *, with_grad: bool) -> DivergenceResult:
    """Compute the results of N rows of given logits."""
    weights, logits = inputs.weights, as_blv(inputs.x)
    compare, pairs = plan.primitives().divergence, _pairs_of_logits(logits, inputs, plan, weights, mean)
    if inputs.teacher_columns is None:
        ((_, _, request),) = pairs
        return compare(logits, request, with_grad=with_grad)
    value, acceptance = (weights.new_empty(weights.shape) for _ in range(2))
    stats = weights.new_empty(*weights.shape, KEPT_STATS)
    agree, teacher_argmax = (
        torch.empty(value.shape, dtype=dtype, device=value.device) for dtype in (torch.bool, torch.int64)
    )
    for here, place, request in pairs:
        *results, kept = compare(logits[place], request, with_grad=with_grad)
        assert kept is not None
        for whole, part in zip((value, acceptance, agree, stats, teacher_argmax), (*results, *kept), strict=True):
            whole[here] = part
    return DivergenceResult(value, acceptance, agree, Kept(stats, teacher_argmax))


def _grad_of_logits(inputs: RowInputs, plan: Plan, scale: Tensor, mean: Tensor | None, kept: Kept) -> Tensor:
    """Compute the gradient of N rows of given logits, each times its scale."""
    grad = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device)
    logits, out = as_blv(inputs.x), as_blv(grad)
    for here, place, request in _pairs_of_logits(logits, inputs, plan, scale, mean):
        of_rows = Kept(*(t[here] for t in kept))
        plan.primitives().divergence_grad(logits[place], request, of_rows, out[place])
    return grad


def _pairs_of_logits(
    logits: Tensor, inputs: RowInputs, plan: Plan, scale: Tensor, mean: Tensor | None
) -> Iterator[tuple[slice, tuple[slice, slice], DivergenceRequest]]:
    """Yield (slice of the N rows, slices of ``[B, L]`` for it, the request of these rows)."""
    index, teacher, request = inputs.teacher_rows, as_blv(inputs.teacher_x), _request(plan, mean)
    y = inputs.ids[:, 0].contiguous() if plan.divergence.spec.wants_targets else None
    if inputs.teacher_columns is None:
        yield slice(None), (slice(None), slice(None)), request(teacher, scale, index, y)
        return
    # The size depends on all columns of the teacher, not on this rank's, because ranks that share a vocabulary must use
    # the same pieces: each ends in a collective.
    (B, L, _), row_bytes = logits.shape, teacher.shape[-1] * logits.element_size()
    step = max(1, COPY_BYTES // max(row_bytes, 1))
    for b, start in itertools.product(range(B), range(0, L, step)):
        length, n = slice(start, min(start + step, L)), b * L + start
        here = slice(n, n + length.stop - start)
        rows = torch.arange(n, here.stop, device=scale.device) if index is None else index[here]
        t = _gather(_rows_at(teacher, rows), inputs.teacher_columns, 1)
        yield here, (slice(b, b + 1), length), request(t[None], scale[here], targets=None if y is None else y[here])


def _rows_at(t: Tensor, index: Tensor) -> Tensor:
    """Gather rows of ``[B, L, V]`` by number, ``[n, V]``; NaN for a number out of range."""
    count = t.shape[0] * t.shape[1]
    inside = index.clamp(0, count - 1)
    rows = t[inside // t.shape[1], inside % t.shape[1]]
    return rows.masked_fill_((index != inside).unsqueeze(1), math.nan)


def _loss_spec(inputs: RowInputs, plan: Plan) -> _op.Spec:
    return (inputs.ids.shape[:1] if plan.divergence.per_row else ()), plan.accum_dtype


def _scales_loss(plan: Plan) -> bool:
    return computes_gradients(plan) and plan.needs_loss_scaling and not plan.divergence.per_row


def _keeps(plan: Plan) -> bool:
    """Return True if backward reads statistics that forward kept, which is so for given logits."""
    return any(plan.needs) and not plan.from_hidden


def _single_use(inputs: RowInputs, plan: Plan) -> _op.SingleUseBackward | None:
    if not computes_gradients(plan) or plan.divergence.per_row:
        return None
    return _op.SingleUseBackward("linear_divergence", 'reduction="none"', inputs, plan)


_INPUTS = ("x", "weight", "bias", "extra_x", "extra_weight", "ids", "targets", "weights")
_TEACHER = tuple(name for name in RowInputs._fields if name.startswith("teacher_"))

DIVERGENCE = _op.RowOp(
    name="divergence",
    rows=row_ids,
    outputs=(
        _op.Output("loss", _loss_spec, differentiable=True),
        _op.Output("value", _op.per_row()),
        _op.Output("acceptance_rate", _op.per_row()),
        _op.Output("agree", _op.per_row(dtype=torch.bool)),
        _op.Output("mean_acceptance", _op.scalar(lambda plan: plan.divergence.spec.lam_of_mean), public=False),
        *_op.gradient_outputs(computes_gradients, scaled=_scales_loss),
        _op.Output("loss_scale", _op.scalar(_scales_loss), public=False),
        _op.Output("row_size", _op.per_row(computes_gradients), public=False),
        _op.Output("kept_stats", _op.per_row(_keeps, (KEPT_STATS,)), public=False),
        _op.Output("kept_argmax", _op.per_row(_keeps, dtype=torch.int64), public=False),
    ),
    forward=_forward,
    saved=lambda plan: (
        ((), (*_op.GRADS, "loss_scale", "row_size"))
        if computes_gradients(plan)
        else ((*_INPUTS, *_TEACHER), ("mean_acceptance", "kept_stats", "kept_argmax"))
    ),
    backward=_backward,
    result=Divergence,
    instead=("torch.softmax and what follows from it", f"torch.softmax of {_op.LOGITS}"),
    inline_backward=lambda plan: scale_copies if computes_gradients(plan) else None,
    before_backward=_single_use,
)
