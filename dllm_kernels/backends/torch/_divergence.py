"""Divergence of rows from a teacher's rows in plain torch (``rows/_divergence.py``), block by block.

All kinds of a spec share p, q and common column functions (``rows/_divergence_kinds.py``), so that a sum of kinds
takes one pass.

``torch.log_softmax`` followed by ``exp`` takes twice as long as ``torch.softmax``. Therefore log p is computed as the
logits minus two numbers per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dllm_kernels.backends.torch import _blocks
from dllm_kernels.backends.torch._workers import run_jobs
from dllm_kernels.rows._divergence import SAVED_STATS, DivergenceRequest, DivergenceResult, SavedStats, Whole
from dllm_kernels.rows._divergence_kinds import KINDS, NO_OPTIONS, Columns, Feature, OptionValues, RowValues
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import IGNORE, column_of
from dllm_kernels.rows._transform import Transform, through_

# Columns that are reduced to their maximum before argmax, because torch.argmax has a tenth of the speed of amax.
TILE = 256
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


Key = tuple[Feature, OptionValues | None]


class GradientFactors(NamedTuple):
    """Factors of a block's gradient, ``[R, 1]``: of each feature, at the teacher's argmax, and at the target."""

    features: list[Tensor]
    best: Tensor | None
    target: Tensor | None


class Program:
    """The features that a spec needs, each listed once, even if several kinds use it.

    Attributes:
        both: features that are summed and are terms of the gradient. The gradient's factors depend on their sums only.
        cached: features of ``both`` whose columns stay in a buffer after the sums; none if the sums are ``known``.
    """

    def __init__(self, request: DivergenceRequest, *, known: bool = False) -> None:
        self.terms = [(KINDS[term.kind], term.coefficient, term.options) for term in request.spec.terms]
        self.mean_acceptance = request.mean_acceptance if request.spec.lam_of_mean else None
        self.sums = list(dict.fromkeys(_key(f, o) for kind, _, o in self.terms for f in kind.sums))
        self.gradient = list(dict.fromkeys(_key(f, o) for kind, _, o in self.terms for f in kind.gradient))
        self.both = [key for key in self.sums if key in self.gradient]
        self.cached = [] if known else self.both
        self.logs = any(feature.logs for feature, _ in (*(() if known else self.sums), *self.gradient))
        self.full = request.full is not None
        self.best, self.target = (any(kind.minus == m for kind, _, _ in self.terms) for m in ("best", "target"))

    @property
    def work_blocks(self) -> int:
        """Number of buffers in the accumulation dtype: p, q, their logarithms, one scratch block, cached features."""
        return 2 + 2 * self.logs + 1 + len(self.cached)

    def summed(self, c: Columns, scratch: Sequence[Tensor]) -> list[Tensor]:
        """Return a and the sum of each feature, ``[R, 1]``; ``scratch``: one buffer, and one per ``cached`` key."""
        work, *buffers = scratch
        sums = [_blocks.sum_rows(torch.minimum(c.p, c.q, out=work))]
        for feature, options in self.sums:
            out = buffers[self.cached.index((feature, options))] if (feature, options) in self.cached else work
            sums.append(_blocks.sum_rows(feature.of(c, options or NO_OPTIONS, out)))
        return sums

    def rows(self, sums: Sequence[Tensor], n: RowValues, w: Tensor) -> tuple[Tensor, GradientFactors]:
        """Return (value, factors of the gradient times the weight w) of rows, ``[R, 1]``."""
        sums_by_key = dict(zip(self.sums, sums, strict=True))
        value = n.acceptance * 0  # propagates NaN, which the comparisons below would hide
        w = w + value
        by_key: dict[Key, Tensor] = {}
        minus: dict[str, Tensor] = {}
        for kind, coefficient, o in self.terms:
            kind_value, factors = kind.row([sums_by_key[_key(f, o)] for f in kind.sums], n, o)
            value = value + coefficient * kind_value
            kind_factors = [coefficient * factor * w for factor in factors]
            for feature, c in zip(kind.gradient, kind_factors, strict=True):
                key = _key(feature, o)
                by_key[key] = by_key[key] + c if key in by_key else c
            if kind.minus:
                minus[kind.minus] = kind_factors[0]
        return value, GradientFactors([by_key[key] for key in self.gradient], minus.get("best"), minus.get("target"))

    def saved_stats(self, norms: Norms, acceptance: Tensor, sums: Sequence[Tensor]) -> Tensor:
        """Return the statistics ``[R, SAVED_STATS]`` of rows, from the sums of :attr:`sums`."""
        sums_by_key = dict(zip(self.sums, sums, strict=True))
        columns = [*norms, acceptance, *(sums_by_key[key] for key in self.both)]
        return torch.cat(columns + [torch.zeros_like(acceptance)] * (SAVED_STATS - len(columns)), 1)

    def flags(self, target_flag: Tensor | None, best_flag: Tensor | None, mass: Tensor | None) -> dict[str, Any]:
        """Return the fields of :class:`RowValues` that the gradient reads; the last two are None unless ``full``."""
        full_flags = {"best_flag": best_flag, "mass": mass} if self.full else {}
        return {"target_flag": target_flag, **full_flags}

    def factors(self, stats: Tensor, w: Tensor, flags: dict[str, Any]) -> GradientFactors:
        """Return the factors of :meth:`rows`, from the statistics of rows and :meth:`flags`."""
        acceptance, *known = stats[:, len(Norms._fields) :].unsqueeze(2).unbind(1)
        sums_by_key = dict(zip(self.both, known, strict=False))
        unread = torch.zeros_like(acceptance)
        n = RowValues(acceptance, self.lam_acceptance(acceptance), unread, unread, **flags)
        return self.rows([sums_by_key.get(key, unread) for key in self.sums], n, w)[1]

    def lam_acceptance(self, acceptance: Tensor) -> Tensor:
        """Return the acceptance rate that lam is computed from."""
        return acceptance if self.mean_acceptance is None else self.mean_acceptance

    def write_gradient(self, c: Columns, scratch: Sequence[Tensor], factors: GradientFactors, out: Tensor) -> Tensor:
        """Write the gradient with respect to the transformed logits, without the one-hot terms, to ``out``.

        ``out`` must not be one of the buffers ``scratch``.
        """
        work, *buffers = scratch
        for i, (key, factor) in enumerate(zip(self.gradient, factors.features, strict=True)):
            feature, options = key
            t = buffers[self.cached.index(key)] if key in self.cached else feature.of(c, options or NO_OPTIONS, work)
            if i == 0:
                torch.mul(t, factor, out=out)
            else:
                out.addcmul_(t, factor)
        return out


def _key(feature: Feature, options: OptionValues) -> Key:
    return feature, options if feature.with_options else None


class Block(NamedTuple):
    """A block of rows of both sides, transformed logits ``[R, V]``, and scratch buffers with as many rows."""

    z: Tensor
    t: Tensor
    more: list[Tensor]


class Norms(NamedTuple):
    """Maximum and log sum e^(z - maximum) of rows of both sides, ``[R, 1]``; a row minus both is its log-softmax."""

    row_max: Tensor
    log_sum: Tensor
    teacher_row_max: Tensor
    teacher_log_sum: Tensor

    @classmethod
    def of(cls, stats: Tensor) -> Norms:
        """Extract them from the statistics of rows."""
        return cls(*stats[:, : len(cls._fields)].unsqueeze(2).unbind(1))

    def log_mass(self, whole: Tensor | None) -> Tensor | None:
        """Return the logarithm of the teacher's mass in these columns, given the norms ``[R, 2]`` of its whole rows."""
        if whole is None:
            return None
        row_max, log_sum = whole.unsqueeze(2).unbind(1)
        return (self.teacher_row_max - row_max) + (self.teacher_log_sum - log_sum)


class Pairs:
    """The rows of nonzero weight with their teacher rows, block by block, shared among threads.

    Attributes:
        rows: index of the student rows.
        out_of_range: bool ``[n, 1]``, True for rows whose teacher row is out of range; None if all are in range.
    """

    def __init__(self, logits: Tensor, request: DivergenceRequest, work_blocks: int) -> None:
        teacher, teacher_rows = request.teacher, request.teacher_rows
        self.work_blocks = work_blocks
        self.logits, self.teacher = logits, teacher
        self.transforms = request.transform, request.teacher_transform
        self.rows, self.acc = _blocks.RowIndex.of(request.weights, 0), accum_dtype(logits.dtype)
        self.threads, self.size = _blocks.partition(self.rows.n, logits.shape[-1], self.acc, logits.is_cpu, sides=3)
        self.out_of_range: Tensor | None = None
        if self.rows.n:
            self.student_source, teacher_index = _blocks.RowGather(logits, self.rows), self.rows
            if teacher_rows is not None:
                total = teacher.shape[0] * teacher.shape[1]
                index, out_of_range = column_of(self.rows.take(teacher_rows), total)
                teacher_index = _blocks.RowIndex.listed(index, total)
                self.out_of_range = None if out_of_range is None else out_of_range.unsqueeze(1)
            self.teacher_source = _blocks.RowGather(teacher, teacher_index)

    def take(self, t: MaybeTensor) -> MaybeTensor:
        """Take the entries of these rows from ``[N]``, as ``[n, 1]``, or from ``[N, columns]``; None for None."""
        if t is None:
            return None
        t = self.rows.take(t)
        return t.unsqueeze(1) if t.dim() == 1 else t

    def take_whole(self, whole: Whole | None) -> tuple[Any, Any]:
        """Take the fields of a :class:`Whole`; (None, None) for None."""
        return (None, None) if whole is None else (self.take(whole.norms), self.take(whole.best))

    def put(self, t: Tensor) -> Tensor:
        """Inverse of :meth:`take`; 0 in all other rows."""
        return self.rows.put(t.squeeze(1))

    def empty(self, columns: int = 1, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate results, ``[n, columns]``."""
        return torch.empty(self.rows.n, columns, dtype=dtype or self.acc, device=self.logits.device)

    def for_each_block(
        self, work: Callable[..., Tensor | None], per_row: tuple[Tensor | None, ...], out: Tensor | None = None
    ) -> None:
        """Call ``work(block, buffer for its gradient, part of per_row)`` for every block.

        With ``out``, work returns the gradient of the block, which is written to these rows of ``out``.
        """
        if not self.rows.n:
            if out is not None:
                out.zero_()
            return
        target = None if out is None else _blocks.with_zeros_between(out, self.rows, self.size)
        parts = _blocks.split_all(per_row, self.size)
        writes = [None] * len(parts) if target is None else target.blocks(self.size)
        blocks = zip(
            self.student_source.blocks(self.size), self.teacher_source.blocks(self.size), writes, parts, strict=True
        )
        buffers = _blocks.buffers_for(
            self.threads, self.size, self.logits, padded=isinstance(target, _blocks.RowScatter), more=self.work_blocks,
            narrow=not (self.student_source.in_place and (target is None or target.in_place)),
            slope=target is not None and self.transforms[0].softcap is not None,
        )  # fmt: skip
        teacher_buffers = _blocks.buffers_for(
            self.threads, self.size, self.teacher, narrow=not self.teacher_source.in_place
        )
        buffer_pairs = list(zip(buffers, teacher_buffers, strict=True))
        run_jobs([partial(self._run_block, work, target, *block) for block in blocks], buffer_pairs)

    def _run_block(
        self, work: Callable[..., Tensor | None], target: _blocks.RowGather | _blocks.RowScatter | None,
        student_block: Tensor, teacher_block: Tensor, to: Any, part: tuple[Tensor | None, ...],
        buffer_pair: tuple[_blocks.Buffers, _blocks.Buffers],
    ) -> None:  # fmt: skip
        buffers, teacher_buffers = buffer_pair
        z, slope, wide = _blocks.transformed_rows(self.student_source, student_block, self.transforms[0], buffers)
        t, _, _ = _blocks.transformed_rows(self.teacher_source, teacher_block, self.transforms[1], teacher_buffers)
        block = Block(z, t, [_blocks.top(buffer, z) for buffer in buffers.more])
        grad = work(block, None if target is None else target.output_buffer(to, wide), part)
        if target is not None and grad is not None:
            target.store(to, through_(grad, slope, self.transforms[0]), buffers)


class Results(NamedTuple):
    """Per-row inputs and results of :func:`divergence`, ``[R, 1]``, and ``stats [R, SAVED_STATS]``.

    ``stats`` and ``teacher_argmax`` are the fields of :class:`SavedStats`, None if the gradient is computed at once.
    ``whole`` and ``best`` are the fields of :class:`Whole`, or None.
    """

    weight: Tensor
    out_of_range: Tensor | None
    target: Tensor | None
    value: Tensor
    acceptance: Tensor
    agree: Tensor
    stats: Any = None
    teacher_argmax: Any = None
    whole: Any = None
    best: Any = None


def divergence(logits: Tensor, request: DivergenceRequest, *, with_grad: bool) -> DivergenceResult:
    """See ``rows/_divergence.py``."""
    program = Program(request)
    pairs = Pairs(logits, request, program.work_blocks)
    inputs = pairs.take(request.weights), pairs.out_of_range, pairs.take(request.targets)
    whole, best = pairs.take_whole(request.whole)
    results = pairs.empty(), pairs.empty(), pairs.empty(dtype=torch.bool)
    rows = Results(*inputs, *results, None, None, whole, best)
    if not with_grad:
        rows = rows._replace(stats=pairs.empty(SAVED_STATS), teacher_argmax=pairs.empty(dtype=torch.int64))
    pairs.for_each_block(partial(_whole_rows, program, request), rows, out=logits if with_grad else None)
    saved = None if with_grad else SavedStats(pairs.put(rows.stats), pairs.put(rows.teacher_argmax))
    return DivergenceResult(pairs.put(rows.value), pairs.put(rows.acceptance), pairs.put(rows.agree), saved)


def divergence_grad(logits: Tensor, request: DivergenceRequest, saved: SavedStats, out: Tensor) -> None:
    """See ``rows/_divergence.py``."""
    program = Program(request, known=True)
    pairs = Pairs(logits, request, program.work_blocks)
    per_row = tuple(pairs.take(t) for t in (request.weights, request.targets, saved.stats, saved.teacher_argmax))
    per_row = *per_row, pairs.take_whole(request.full)[0]
    pairs.for_each_block(partial(_gradient, program, request), per_row, out=out)


def _columns(
    program: Program, request: DivergenceRequest, block: Block, norms: Norms, log_mass: Tensor | None
) -> tuple[Columns, list[Tensor]]:
    """Return p and q, which are in the first two buffers, logarithms if a kind needs them, and the unused buffers.

    ``log_mass``: logarithm of the sum of q, or None if it is 0.
    """
    p, q, *scratch = block.more
    mass = None
    if log_mass is not None:
        mass = log_mass.exp()
        q.mul_(mass)
        norms = norms._replace(teacher_log_sum=norms.teacher_log_sum - log_mass)
    if not program.logs:
        return Columns(p, q, None, None, mass=mass), scratch
    skip = request.transform.common_skip(request.teacher_transform)
    return Columns(p, q, *logarithms(block, norms, scratch, skip), mass=mass), scratch[2:]


def _softmaxes(block: Block) -> tuple[Tensor, Tensor]:
    """Compute p and q in the first two buffers."""
    p, q, *_ = block.more
    return _blocks.rowwise(torch.softmax, block.z, p), _blocks.rowwise(torch.softmax, block.t, q)


def _whole_rows(
    program: Program, request: DivergenceRequest, block: Block, out: Tensor | None, row: Results
) -> Tensor | None:
    """Compute the results of a block, and its gradient if requested."""
    z, t = block.z, block.t
    (row_max, student_argmax), (teacher_row_max, teacher_argmax) = largest(z), largest(t)
    p, q = _softmaxes(block)
    # The largest probability is 1 / S.
    log_sum, teacher_log_sum = (x.gather(1, v).log_().neg_() for x, v in ((p, student_argmax), (q, teacher_argmax)))
    norms = Norms(row_max, log_sum, teacher_row_max, teacher_log_sum)
    log_mass = norms.log_mass(row.whole)
    columns, work = _columns(program, request, block, norms, log_mass if program.full else None)
    if program.full:
        teacher_argmax = row.best
    at_best, best_flag = at(z, teacher_argmax, row_max, log_sum) if program.best else (None, None)
    at_target, target_flag = (None, None) if row.target is None else at(z, row.target, row_max, log_sum)
    flags = program.flags(target_flag, best_flag, columns.mass)
    # On a CPU, repeat with ``guard_zeros`` if a sum is not finite. Elsewhere the test would be a host sync per block.
    for guard_zeros in (False, True) if z.is_cpu else (True,):
        acceptance, *sums = program.summed(columns._replace(guard_zeros=guard_zeros), work)
        if row.out_of_range is not None:
            acceptance = acceptance.masked_fill_(row.out_of_range, math.nan)
        n = RowValues(acceptance, program.lam_acceptance(acceptance), at_best, at_target, **flags)
        value, c = program.rows(sums, n, row.weight)
        if guard_zeros or not program.logs or math.isfinite(value.sum().item()):
            break
    rate = acceptance
    if log_mass is not None and not program.full:
        rate = overlap(columns, log_mass, work[0])
        if row.out_of_range is not None:
            rate = rate.masked_fill(row.out_of_range, math.nan)
    row.value.copy_(value)
    row.acceptance.copy_(rate)
    torch.logical_and(
        student_argmax == (teacher_argmax if row.best is None else row.best), ~rate.isnan(), out=row.agree
    )
    if row.stats is not None:
        row.stats.copy_(program.saved_stats(norms, acceptance, sums))
        row.teacher_argmax.copy_(teacher_argmax)
    return (
        None
        if out is None
        else subtract_one_hots_(program.write_gradient(columns, work, c, out), teacher_argmax, row.target, c)
    )


def _gradient(program: Program, request: DivergenceRequest, block: Block, out: Tensor, row: Sequence[Tensor]) -> Tensor:
    """Compute the gradient of a block from the statistics of its rows."""
    weight, y, stats, teacher_argmax, whole = row
    _softmaxes(block)
    norms = Norms.of(stats)
    log_mass = norms.log_mass(whole)
    columns, work = _columns(program, request, block, norms, log_mass)
    best = teacher_argmax if program.full else None
    target_flag, best_flag = (None if t is None else at(block.z, t, norms.row_max, norms.log_sum)[1] for t in (y, best))
    c = program.factors(stats, weight, program.flags(target_flag, best_flag, columns.mass))
    return subtract_one_hots_(
        program.write_gradient(columns._replace(guard_zeros=True), work, c, out), teacher_argmax, y, c
    )


def overlap(c: Columns, log_mass: Tensor, out: Tensor) -> Tensor:
    """Return ``sum_v min(p_v, q_v)`` with q times the mass, ``[R, 1]``; the buffer ``out`` is scratch."""
    q = torch.mul(c.q, log_mass.exp(), out=out)
    return _blocks.sum_rows(torch.minimum(c.p, q, out=out))


def row_norms(logits: Tensor, transform: Transform, skip: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
    """See ``rows/_divergence.py``."""
    (C, V), device, acc = logits.shape, logits.device, accum_dtype(logits.dtype)
    norms = torch.empty(C, 2, dtype=acc, device=device)
    column = torch.empty(C, 1, dtype=torch.int64, device=device)
    if C:
        source = _blocks.RowGather(logits[None], _blocks.RowIndex(torch.arange(C, device=device), C, C, 0, True))
        threads, size = _blocks.partition(C, V, acc, logits.is_cpu, sides=2)
        blocks = zip(source.blocks(size), _blocks.split_all((norms, column), size), strict=True)
        buffers = _blocks.buffers_for(threads, size, logits, more=1)
        run_jobs([partial(_norms_of_block, source, transform, skip, *block) for block in blocks], buffers)
    return norms, column.squeeze(1) + start


def _norms_of_block(
    source: _blocks.RowGather, transform: Transform, skip: Tensor | None, block: Tensor, out: tuple[Tensor, Tensor],
    buffers: _blocks.Buffers,
) -> None:  # fmt: skip
    x, (norms, column) = _blocks.transformed_rows(source, block, transform, buffers)[0], out
    (work,) = (_blocks.top(buffer, x) for buffer in buffers.more)
    if skip is not None:
        x = x.masked_fill(torch.arange(x.shape[1], device=x.device) == skip, -math.inf)
    row_max, first = largest(x)
    total = _blocks.sum_rows(torch.sub(x, row_max, out=work).exp_())
    torch.cat([row_max, total.log_()], 1, out=norms)
    column.copy_(first)


def subtract_one_hots_(grad: Tensor, teacher_argmax: Tensor, y: Tensor | None, c: GradientFactors) -> Tensor:
    """Subtract the one-hot terms of the teacher's argmax and of the target in place, for columns in range."""
    for y_, factor in ((teacher_argmax, c.best), (y, c.target)):
        if factor is not None and y_ is not None:
            column, out_of_range = column_of(y_, grad.shape[1])
            grad.scatter_add_(1, column, -factor if out_of_range is None else torch.where(out_of_range, 0.0, -factor))
    return grad


def logarithms(block: Block, norms: Norms, out: Sequence[Tensor], skip: int | None) -> tuple[Tensor, Tensor]:
    """Return log p and log q. A column skipped on both sides is set to 0, so that no product with it is NaN."""
    log_p = torch.sub(block.z, norms.row_max, out=out[0]).sub_(norms.log_sum)
    log_q = torch.sub(block.t, norms.teacher_row_max, out=out[1]).sub_(norms.teacher_log_sum)
    if skip is not None:
        log_p.select(1, skip).zero_()
        log_q.select(1, skip).zero_()
    return log_p, log_q


def at(z: Tensor, y: Tensor, row_max: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log p of column y, and 1. Both are 0 if y is ``IGNORE``, and NaN if y is otherwise out of range."""
    column, out_of_range = column_of(y, z.shape[1])
    nll = log_sum - (z.gather(1, column) - row_max)
    if out_of_range is None:
        return nll, torch.ones_like(nll)
    target_flag = (~out_of_range).to(nll.dtype).masked_fill_(out_of_range & (y != IGNORE), math.nan)
    return torch.where(target_flag != 0, nll * target_flag, 0.0), target_flag


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (maximum, first column that has it) of rows ``[R, V]``, ``[R, 1]``; (NaN, any column) if a row has NaN."""
    V = x.shape[1]
    whole = V // TILE * TILE
    if whole in (0, TILE):
        column = x.argmax(1, keepdim=True)
        return x.gather(1, column), column
    tile_max = x[:, :whole].view(-1, whole // TILE, TILE).amax(2)
    if whole < V:
        tile_max = torch.cat([tile_max, x[:, whole:].amax(1, keepdim=True)], 1)
    row_max, tile = torch.max(tile_max, 1, keepdim=True)
    first = tile * TILE
    columns = torch.arange(TILE, device=x.device) + first
    if whole < V:
        columns.clamp_(max=V - 1)  # repeat the last column
    return row_max, x.gather(1, columns).argmax(1, keepdim=True).add_(first)
