"""Divergence to a teacher, from logits, or chunk by chunk from hidden states and LM heads.

One chunk of the student's logits and one of the teacher's are materialised at a time, each in a buffer that all chunks
reuse. The gradient overwrites the student's logits. With a frozen head that student and teacher share, this takes three
matrix products. The teacher has no gradient.

If the student has a smaller vocabulary, its columns of the teacher are compared. The teacher's whole rows are computed
and reduced to their maximum, sum of exponentials and argmax in one pass (``row_norms``), from which the acceptance rate
and the argmax match follow. The compared columns are then copied, one chunk at a time.

``lk`` with ``alpha="mean"`` needs an extra forward-only pass to compute the mean acceptance rate: two more matrix
products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from dllm_kernels._backends._divergence import KEPT_STATS, DivergenceRequest, DivergenceResult, Kept, Whole
from dllm_kernels._backends._rows import IGNORE, as_blv
from dllm_kernels._core import _op
from dllm_kernels._core._inputs import NO_GRADIENTS, Gradients, RowInputs
from dllm_kernels._core._old_chunks import NO_FACTORS, Chunks, aligned_rows, head_product, no_autocast, unit_scale
from dllm_kernels._core._old_nll import row_ids, scale_copies, scale_in_place
from dllm_kernels._core._plan import Plan
from dllm_kernels._core._results import Divergence

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
            chunks = Chunks(_with_teacher_head(inputs, plan, with_whole=True), plan, needs, factors)
            rows_of = partial(_rows_of_head, chunks, scale)
        mean = None
        if config.spec.lam_of_mean:  # of a in the loss, which is a of the compared columns unless ``full``
            rate = rows_of(None, with_grad=False, with_whole=config.spec.full).acceptance_rate
            all_reduce = config.all_reduce or (lambda t: t)
            mean = all_reduce(torch.where(weights != 0, weights * rate, 0.0).sum()) / all_reduce(weights.sum())
        value, acceptance_rate, agree, kept, norms = rows_of(mean, with_grad=any(needs))
        grads = chunks.gradients(wide=loss_scale is not None) if any(needs) else Gradients()
        value = value * config.value_scale
        weighted = torch.where(weights != 0, weights * value, 0.0)
        if plan.from_hidden:  # rows of weight 0 too
            for t in (weighted, size):
                if t is not None:
                    chunks.rows.checked_(t)
        stats, argmax = (kept.stats, kept.teacher_argmax) if kept is not None and any(plan.needs) else (None, None)
        norms = norms if _keeps_norms(inputs, plan) else None
        return {
            "loss": weighted if config.per_row else weighted.sum(), "value": value, "acceptance_rate": acceptance_rate,
            "agree": agree, "mean_acceptance": mean, "kept_stats": stats, "kept_argmax": argmax, "kept_norms": norms,
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
            return Gradients(_grad_of_logits(inputs, plan, scale, mean, kept, outputs.get("kept_norms")))
        scale, factors, loss_scale = unit_scale(scale, plan)
        targets, full = inputs.targets.masked_fill(scale == 0, IGNORE), plan.divergence.spec.full
        inputs = _with_teacher_head(inputs, plan, with_whole=full)
        chunks = Chunks(inputs, plan, plan.needs, factors, targets=targets)
        for _ in _compare_chunks(chunks, scale, mean, with_grad=True, with_whole=full):
            pass
        return chunks.gradients(loss_scale)


class _RowsOfCall(NamedTuple):
    """Results of N rows, as in :class:`DivergenceResult`; ``norms`` of :class:`Whole` for given logits."""

    value: Tensor
    acceptance_rate: Tensor
    agree: Tensor
    kept: Kept | None = None
    norms: Tensor | None = None


def _rows_of_head(
    chunks: Chunks, scale: Tensor, mean: Tensor | None, *, with_grad: bool, with_whole: bool = True
) -> _RowsOfCall:
    """Compute the results of all rows in one pass over the chunks."""
    rows, plan, device = chunks.rows, chunks.plan, chunks.logits.device
    out = [rows.empty(dtype=dtype, device=device) for dtype in (plan.accum_dtype, plan.accum_dtype, torch.bool)]
    for chunk, result in _compare_chunks(chunks, scale, mean, with_grad=with_grad, with_whole=with_whole):
        rows.put_each(out, chunk, result[:3])
    return _RowsOfCall(*rows.finished(out))


def _compare_chunks(
    chunks: Chunks, scale: Tensor, mean: Tensor | None, *, with_grad: bool, with_whole: bool
) -> Iterator[tuple[slice, DivergenceResult]]:
    """Compare chunk after chunk and yield (chunk, results); accumulate the gradients if requested."""
    take, teacher, request = chunks.rows.take, _teacher_of(chunks, with_whole), _request(chunks.plan, mean)
    compare = partial(chunks.plan.primitives().divergence, with_grad=with_grad)
    for chunk, h, targets, logits in chunks:
        s = take(scale, chunk).masked_fill(targets == IGNORE, 0)
        y = take(chunks.inputs.ids[:, 0], chunk) if chunks.plan.divergence.spec.wants_targets else None
        t, whole = teacher(chunk)
        result = compare(logits[None], request(t[None], s, targets=y, whole=whole))
        if with_grad:
            chunks.add_gradients(chunk, h, targets, logits, s)
        yield chunk, result


def _request(plan: Plan, mean: Tensor | None) -> Callable[..., DivergenceRequest]:
    """Return a function that makes the request of some rows from (teacher, weights, teacher_rows, targets, whole)."""
    config = plan.divergence
    return partial(
        DivergenceRequest, config.spec, mean_acceptance=mean, transform=plan.options.transform,
        teacher_transform=config.teacher_transform,
    )  # fmt: skip


def _teacher_of(chunks: Chunks, with_whole: bool) -> Callable[[slice], tuple[Tensor, Whole | None]]:
    """Make the function that computes the teacher's logits for a chunk of student rows.

    With ``with_whole`` it also returns the norms and the argmax of whole rows, if only some columns are compared.
    """
    inputs, plan, rows = chunks.inputs, chunks.plan, chunks.rows

    def take(t: Tensor | None, chunk: slice) -> Any:
        if t is None:
            return None
        index = inputs.teacher_rows
        return (rows.take(t, chunk) if index is None else _gather(t, rows.take(index, chunk))).to(plan.dtype)

    def product(chunk: slice, head: _Head, out: Tensor) -> Tensor:
        h, extra_h = (take(t, chunk) for t in (inputs.teacher_x, inputs.teacher_extra_x))
        head_product(h, head.weight, head.bias, extra_h, head.extra_weight, out := out[: len(h)])
        return out

    def buffer(columns: int) -> Tensor:
        return aligned_rows(len(chunks.logits), columns, dtype=chunks.logits.dtype, device=inputs.x.device)

    head = _Head(inputs.teacher_weight, inputs.teacher_bias, inputs.teacher_extra_weight)
    if inputs.teacher_weight is None:
        head = _Head(chunks.weight, chunks.bias, head.extra_weight)
    columns, V, primitives = inputs.teacher_columns, len(head.weight), plan.primitives()
    if columns is None or not with_whole:
        compared = head.picked(columns)
        out = buffer(len(compared.weight))
        return lambda chunk: (product(chunk, compared, out), None)
    norms_of = _norms_function(inputs, plan)
    if primitives.part_of is not None:  # this rank computes its columns, and a part of the whole rows for the norms
        start, size = primitives.part_of(V)
        compared, part = head.picked(columns), head.part(start, size)
        out, rest = buffer(len(columns)), buffer(size)
        return lambda chunk: (product(chunk, compared, out), norms_of(product(chunk, part, rest), start))
    out, rest = buffer(len(columns)), buffer(V + 1)
    rest[:, V] = math.nan  # read for columns that are out of range
    index = torch.where((columns >= 0) & (columns < V), columns, V)

    def compute(chunk: slice) -> tuple[Tensor, Whole]:
        logits = product(chunk, head, rest[:, :V])
        compared = torch.index_select(rest[: len(logits)], 1, index, out=out[: len(logits)])
        return compared, norms_of(logits, 0)

    return compute


class _Head(NamedTuple):
    """LM head of the teacher, a constant."""

    weight: Any
    bias: Tensor | None
    extra_weight: Tensor | None

    def picked(self, columns: Tensor | None) -> _Head:
        """Copy the rows for these columns of the logits; all rows if None."""
        return self if columns is None else _Head(*(None if t is None else _gather(t.detach(), columns) for t in self))

    def part(self, start: int, size: int) -> _Head:
        """View the rows for a range of columns of the logits."""
        return _Head(*(None if t is None else t[start : start + size] for t in self))


def _norms_function(inputs: RowInputs, plan: Plan) -> Callable[[Tensor, int], Whole]:
    """Return a function of the teacher's whole rows, or of their columns from a start on if rows are split."""
    inverse, transform = inputs.teacher_inverse, plan.divergence.teacher_transform
    assert inverse is not None
    skip = None if transform.skip_id is None else (inverse == transform.skip_id).to(torch.int32).argmax(0, keepdim=True)

    def norms_of(logits: Tensor, start: int) -> Whole:
        of_skip = None if skip is None else skip - start
        norms, best = plan.primitives().row_norms(logits, transform.pointwise, of_skip, start)
        return Whole(norms, inverse[best])

    return norms_of


def _with_teacher_head(inputs: RowInputs, plan: Plan, with_whole: bool) -> RowInputs:
    """Cast the teacher's separate head, or only its compared columns, before :class:`Chunks` syncs."""
    if inputs.teacher_weight is None:
        return inputs
    head, columns = _Head(inputs.teacher_weight, inputs.teacher_bias, inputs.teacher_extra_weight), None
    if with_whole:
        columns = inputs.teacher_columns
    else:
        head = head.picked(inputs.teacher_columns)
    weight, bias, extra_weight = (None if t is None else t.detach().to(plan.dtype) for t in head)
    return inputs._replace(
        teacher_weight=weight, teacher_bias=bias, teacher_extra_weight=extra_weight, teacher_columns=columns
    )


def _gather(t: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """Copy the indexed rows, or columns, of a tensor; NaN for an index out of range."""
    inside = index.clamp(0, t.shape[dim] - 1)
    out_of_range = (index != inside).view(-1, *[1] * (t.dim() - 1 - dim))
    return t.index_select(dim, inside).masked_fill_(out_of_range, math.nan)


def _rows_of_logits(
    inputs: RowInputs, plan: Plan, mean: Tensor | None, *, with_grad: bool, with_whole: bool = True
) -> _RowsOfCall:
    """Compute the results of N rows of given logits."""
    weights, logits = inputs.weights, as_blv(inputs.x)
    compare, norms_of = plan.primitives().divergence, None
    if inputs.teacher_columns is not None and with_whole:
        norms_of = _norms_function(inputs, plan)
    pairs = _pairs_of_logits(logits, inputs, plan, weights, mean, norms_of)
    if inputs.teacher_columns is None:
        ((_, _, request),) = pairs
        return _RowsOfCall(*compare(logits, request, with_grad=with_grad))
    value, acceptance = (weights.new_empty(weights.shape) for _ in range(2))
    stats, norms = (weights.new_empty(*weights.shape, size) for size in (KEPT_STATS, 2))
    agree, teacher_argmax = (
        torch.empty(value.shape, dtype=dtype, device=value.device) for dtype in (torch.bool, torch.int64)
    )
    for here, place, request in pairs:
        *results, kept = compare(logits[place], request, with_grad=with_grad)
        assert kept is not None
        for whole, part in zip((value, acceptance, agree, stats, teacher_argmax), (*results, *kept), strict=True):
            whole[here] = part
        if request.whole is not None:
            norms[here] = request.whole.norms
    return _RowsOfCall(value, acceptance, agree, Kept(stats, teacher_argmax), norms)


def _grad_of_logits(
    inputs: RowInputs, plan: Plan, scale: Tensor, mean: Tensor | None, kept: Kept, norms: Any
) -> Tensor:
    """Compute the gradient of N rows of given logits, each times its scale; ``norms`` of :class:`Whole`, or None."""
    grad = torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=inputs.x.device)
    logits, out = as_blv(inputs.x), as_blv(grad)
    for here, place, request in _pairs_of_logits(logits, inputs, plan, scale, mean, None):
        of_rows = Kept(*(t[here] for t in kept))
        if norms is not None:
            request = request._replace(whole=Whole(norms[here], of_rows.teacher_argmax))
        plan.primitives().divergence_grad(logits[place], request, of_rows, out[place])
    return grad


def _pairs_of_logits(
    logits: Tensor, inputs: RowInputs, plan: Plan, scale: Tensor, mean: Tensor | None,
    norms_of: Callable[[Tensor, int], Whole] | None,
) -> Iterator[tuple[slice, tuple[slice, slice], DivergenceRequest]]:  # fmt: skip
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
    part_of = plan.primitives().part_of
    first, size = (0, teacher.shape[-1]) if part_of is None else part_of(teacher.shape[-1])
    for b, start in itertools.product(range(B), range(0, L, step)):
        length, n = slice(start, min(start + step, L)), b * L + start
        here = slice(n, n + length.stop - start)
        rows = torch.arange(n, here.stop, device=scale.device) if index is None else index[here]
        whole_rows = _rows_at(teacher, rows)
        whole = None if norms_of is None else norms_of(whole_rows[:, first : first + size], first)
        t, targets = _gather(whole_rows, inputs.teacher_columns, 1), None if y is None else y[here]
        yield here, (slice(b, b + 1), length), request(t[None], scale[here], targets=targets, whole=whole)


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


def _keeps_norms(inputs: RowInputs, plan: Plan) -> bool:
    """Return True if backward also reads the norms of the teacher's whole rows."""
    return _keeps(plan) and plan.divergence.spec.full and inputs.teacher_columns is not None


def _norms_spec(inputs: RowInputs, plan: Plan) -> _op.Spec | None:
    return ((inputs.ids.shape[0], 2), plan.accum_dtype) if _keeps_norms(inputs, plan) else None


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
        _op.Output("kept_norms", _norms_spec, public=False),
    ),
    forward=_forward,
    saved=lambda plan: (
        ((), (*_op.GRADS, "loss_scale", "row_size"))
        if computes_gradients(plan)
        else ((*_INPUTS, *_TEACHER), ("mean_acceptance", "kept_stats", "kept_argmax", "kept_norms"))
    ),
    backward=_backward,
    result=Divergence,
    instead=("torch.softmax and what follows from it", f"torch.softmax of {_op.LOGITS}"),
    inline_backward=lambda plan: scale_copies if computes_gradients(plan) else None,
    before_backward=_single_use,
)
