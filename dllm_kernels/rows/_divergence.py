"""Divergence to a teacher over N rows: of logits, or of a head's, chunk by chunk, eager and compiled alike.

A chunk of the student's logits and one of the teacher's exist at a time, each in a buffer that every chunk re-uses, and the
gradient is written over the student's: with a frozen head that both share, three products. The teacher has no gradient.

Where lam of ``lk`` is made from the mean of a, a pass without a gradient comes first: two products more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from dllm_kernels.base._divergence import Divergences
from dllm_kernels.base._rows import SKIP, as_blv
from dllm_kernels.rows._chunks import NO_FACTORS, Chunks, Factors, aligned_rows, no_autocast, unit_scale
from dllm_kernels.rows._plan import NO_GRADIENTS, Gradients, Job, Needs, Plan
from dllm_kernels.rows._teacher import Pair, Teacher

Tensor = torch.Tensor
Tensors = tuple[Tensor | None, ...]
# Bytes of a copy of some of the teacher's columns, where not all are compared.
COPY_BYTES = 64 << 20


class _Found(NamedTuple):
    """Of N rows: the divergence, a, whether the argmax agrees; the mean of a where lam is made from it."""

    value: Tensor
    alpha: Tensor
    agree: Tensor
    mean_alpha: Tensor | None


def made_in_forward(plan: Plan) -> bool:
    """Whether the forward pass makes the gradients, which backward only scales: of hidden states, where it can."""
    return pair_of(plan).linear and any(plan.needs) and (not pair_of(plan).per_row or plan.needs.frozen)


def forward(job: Job, plan: Plan) -> Tensors:
    """(loss, value, alpha, agree, mean of a, gradients of the leaves, headroom), None for what is not asked for.

    The loss is the weighted sum, and the gradients are those of it; where the plan is ``narrow``, what
    ``_chunks.weighted_forward`` says of them. With ``per_row`` it is each row's weighted value, and the gradient that of
    weights of 1.
    """
    assert job.weights is not None
    pair, weights = pair_of(plan), job.weights
    with no_autocast(job):
        needs = plan.needs if made_in_forward(plan) else NO_GRADIENTS
        scale, factors, headroom = weights * pair.factor, NO_FACTORS, None
        size = scale if made_in_forward(plan) else None  # the factor is not known while a graph is traced
        if pair.per_row:
            scale = _ones(weights)
        elif any(needs):
            scale, factors, headroom = unit_scale(scale, plan)
            factors = factors._replace(hidden=None)  # backward gives the rows theirs
        if job.weight is None:
            found, grads = _of_logits(job, plan), Gradients()
        else:
            found, grads = _of_head(job, plan, needs, scale, factors, wide=headroom is not None)
        weighted = torch.where(weights != 0, weights * found.value, 0.0)
        loss = weighted if pair.per_row else weighted.sum()
        return loss, found.value, found.alpha, found.agree, found.mean_alpha, *grads, headroom, size


def backward(job: Job, plan: Plan, mean_alpha: Tensor | None, grad_loss: Tensor) -> Gradients:
    """The gradients of the leaves for the upstream gradient of the loss: everything is made again."""
    assert job.weights is not None
    with no_autocast(job):
        scale = torch.where(grad_loss != 0, job.weights * grad_loss * pair_of(plan).factor, 0.0)
        if job.weight is None:
            grad = torch.empty(job.x.shape, dtype=job.x.dtype, device=job.x.device)
            _rows_of_logits(job, plan, scale, mean_alpha, grad)
            return Gradients(grad)
        scale, factors, headroom = unit_scale(scale, plan)
        assert job.active is not None
        rows = job._replace(active=job.active.masked_fill(scale == 0, SKIP))
        chunks = Chunks(rows, plan, plan.needs, factors)
        for _ in _passed(chunks, scale, mean_alpha, with_grad=True):
            pass
        return chunks.gradients(headroom)


def pair_of(plan: Plan) -> Pair:
    """The pair, where there is one."""
    assert plan.pair is not None
    return plan.pair


def _ones(weights: Tensor) -> Tensor:
    return (weights != 0).to(weights.dtype)


def _of_head(
    job: Job, plan: Plan, needs: Needs, scale: Tensor, factors: Factors, *, wide: bool
) -> tuple[_Found, Gradients]:
    """The rows' results, and the gradients for these scales."""
    chunks = Chunks(job, plan, needs, factors)
    mean = None
    if pair_of(plan).recipe.mean_alpha:
        mean = _mean(job, plan, _filled(chunks, scale, None, with_grad=False).alpha)
    found = _filled(chunks, scale, mean, with_grad=any(needs))
    return found, chunks.gradients(wide=wide) if any(needs) else Gradients()


def _mean(job: Job, plan: Plan, alpha: Tensor) -> Tensor:
    """The weighted mean of a over the rows of a call."""
    assert job.weights is not None
    total = pair_of(plan).total or (lambda t: t)
    return total(torch.where(job.weights != 0, job.weights * alpha, 0.0).sum()) / total(job.weights.sum())


def _filled(chunks: Chunks, scale: Tensor, mean_alpha: Tensor | None, *, with_grad: bool) -> _Found:
    """The results of all rows, from one pass over the chunks."""
    rows, plan, device = chunks.rows, chunks.plan, chunks.logits.device
    value, alpha = (rows.empty(dtype=plan.acc, device=device) for _ in range(2))
    agree = rows.empty(dtype=torch.bool, device=device)
    for chunk, *found in _passed(chunks, scale, mean_alpha, with_grad=with_grad):
        for out, part in zip((value, alpha, agree), found, strict=True):
            rows.put(out, chunk, part)
    value, alpha, agree = rows.finished([value, alpha, agree])
    return _Found(value * pair_of(plan).factor, alpha, agree, mean_alpha)


def _passed(
    chunks: Chunks, scale: Tensor, mean_alpha: Tensor | None, *, with_grad: bool
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """(chunk, value, alpha, agree); the products with the gradient are made on the way."""
    take, teacher = chunks.rows.take, _TeacherChunks(chunks)
    compared = _primitive(chunks.plan, mean_alpha, with_grad=with_grad)
    for chunk, h, active, logits in chunks:
        s = take(scale, chunk).masked_fill(active == SKIP, 0)
        y = take(chunks.job.ids[:, 0], chunk) if pair_of(chunks.plan).recipe.wants_targets else None
        found = compared(logits[None], teacher.logits(chunk)[None], s, targets=y)
        if with_grad:
            chunks.add_gradients(chunk, h, active, logits, s)
        yield chunk, *found


def _primitive(plan: Plan, mean_alpha: Tensor | None, *, with_grad: bool) -> Divergences:
    """The row primitive (``base/_divergence.py``) with what is the same for all rows of a call."""
    pair = pair_of(plan)
    return partial(
        plan.primitives().divergence, recipe=pair.recipe.settled, mean_alpha=mean_alpha, with_grad=with_grad,
        transform=plan.options.transform, teacher_transform=pair.teacher_transform,
    )  # fmt: skip


class _TeacherChunks:
    """The teacher's logits beside the student's chunks: the product that makes them happens here."""

    def __init__(self, chunks: Chunks) -> None:
        plan, teacher = chunks.plan, _teacher_of(chunks.plan)
        self.teacher, self.dtype, self.rows = teacher, plan.dtype, chunks.rows
        own = teacher.weight is not None
        head = (teacher.weight, teacher.bias) if own else (chunks.weight, chunks.bias)
        weight, self.bias, self.extra_weight = (self._compared(t) for t in (*head, teacher.extra_weight))
        assert weight is not None
        self.weight = weight
        self.buffer = aligned_rows(chunks.logits.shape[0], weight.shape[0], dtype=self.dtype, device=weight.device)

    def _compared(self, t: Tensor | None) -> Tensor | None:
        """What makes the columns that are compared, in the dtype of the logits."""
        if t is None:
            return None
        t, columns = t.detach(), self.teacher.columns
        return (t if columns is None else _picked(t, columns)).to(self.dtype)

    def logits(self, chunk: slice) -> Tensor:
        """Those of a chunk's rows."""
        h = self._rows(self.teacher.x, chunk)
        out = self.buffer[: h.shape[0]]
        if self.bias is None:
            torch.mm(h, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, h, self.weight.t(), out=out)
        if self.extra_weight is not None and self.teacher.extra_x is not None:
            out.addmm_(self._rows(self.teacher.extra_x, chunk), self.extra_weight.t())
        return out

    def _rows(self, t: Tensor, chunk: slice) -> Tensor:
        rows = self.teacher.rows
        return (self.rows.take(t, chunk) if rows is None else _picked(t, self.rows.take(rows, chunk))).to(self.dtype)


def _teacher_of(plan: Plan) -> Teacher:
    teacher = pair_of(plan).teacher
    assert teacher is not None
    return teacher


def _picked(t: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """A copy of these rows, or columns, of a tensor; NaN for one that it has not."""
    inside = index.clamp(0, t.shape[dim] - 1)
    lost = (index != inside).view(-1, *[1] * (t.dim() - 1 - dim))
    return t.index_select(dim, inside).masked_fill_(lost, math.nan)


def _of_logits(job: Job, plan: Plan) -> _Found:
    assert job.weights is not None
    mean = None
    if pair_of(plan).recipe.mean_alpha:
        mean = _mean(job, plan, _rows_of_logits(job, plan, job.weights, None, None)[1])
    value, alpha, agree = _rows_of_logits(job, plan, job.weights, mean, None)
    return _Found(value * pair_of(plan).factor, alpha, agree, mean)


def _rows_of_logits(
    job: Job, plan: Plan, scale: Tensor, mean_alpha: Tensor | None, grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(value, alpha, agree) of N rows, the gradient in ``grad``."""
    compared, teacher = _primitive(plan, mean_alpha, with_grad=grad is not None), _teacher_of(plan)
    y = job.ids[:, 0].contiguous() if pair_of(plan).recipe.wants_targets else None
    logits, theirs, out = as_blv(job.x), as_blv(teacher.x), None if grad is None else as_blv(grad)
    if teacher.columns is None:
        return compared(logits, theirs, scale, teacher_rows=teacher.rows, targets=y, out=out)
    found = [scale.new_empty(scale.shape), scale.new_empty(scale.shape), scale.new_empty(scale.shape, dtype=torch.bool)]
    for n, b, length in _pieces(logits, theirs.shape[-1]):
        here = slice(n, n + length.stop - length.start)
        index = torch.arange(n, here.stop, device=scale.device) if teacher.rows is None else teacher.rows[here]
        t = _picked(_rows_at(theirs, index), teacher.columns, 1)
        part = compared(
            logits[b : b + 1, length], t[None], scale[here], targets=None if y is None else y[here],
            out=None if out is None else out[b : b + 1, length],
        )  # fmt: skip
        for whole, of_rows in zip(found, part, strict=True):
            whole[here] = of_rows
    return found[0], found[1], found[2]


def _pieces(logits: Tensor, columns: int) -> Iterator[tuple[int, int, slice]]:
    """(first row, batch, positions) of pieces whose teacher's ``columns`` are copied at a time.

    All of the teacher's: ranks that share a vocabulary have as many, and cut the same pieces, each of which ends in a collective.
    """
    B, L, _ = logits.shape
    step = max(1, COPY_BYTES // max(columns * logits.element_size(), 1))
    for b in range(B):
        for start in range(0, L, step):
            yield b * L + start, b, slice(start, min(start + step, L))


def _rows_at(t: Tensor, index: Tensor) -> Tensor:
    """Rows of ``[B, L, V]`` by their number, ``[n, V]``; NaN for one that there is not."""
    count = t.shape[0] * t.shape[1]
    inside = index.clamp(0, count - 1)
    rows = t[inside // t.shape[1], inside % t.shape[1]]
    return rows.masked_fill_((index != inside).unsqueeze(1), math.nan)
