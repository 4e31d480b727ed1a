r"""Divergence of rows whose vocabulary is split over ranks; the logits of neither side are ever gathered.

Each rank computes the maximum, the sum of exponentials and the argmax of its columns, for student and teacher. One
all-gather of these six numbers per row gives all ranks the normalisers of p and q. If the student has a smaller
vocabulary, each rank also reduces a part of the teacher's whole rows, which takes a second, smaller all-gather
(:func:`row_norms`). The acceptance rate a and all sums of a kind are then sums over the ranks: one all-reduce of a few
numbers per row. The value follows from the sums and is equal on all ranks. The gradient is local. Plain torch computes
the columns, whatever the backend (``backends/torch/_divergence.py``), in three passes. A separate backward pass reads
them once, without communication.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dllm_kernels.backends.torch import _divergence as _local
from dllm_kernels.distributed._layout import VocabShard
from dllm_kernels.rows._divergence import DivergenceRequest, DivergenceResult, SavedStats
from dllm_kernels.rows._divergence_kinds import Columns, RowValues
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._transform import Transform


def divergence(shard: VocabShard, logits: Tensor, request: DivergenceRequest, *, with_grad: bool) -> DivergenceResult:
    """See ``rows/_divergence.py``."""
    program = _local.Program(request)
    pairs = _pairs(shard, logits, request, program)
    norms, student_argmax, teacher_argmax = _combine(shard, pairs, _local_stats(shard, pairs))
    y, weight = pairs.take(request.targets), pairs.take(request.weights)
    whole, best = pairs.take_whole(request.whole)
    log_mass = norms.log_mass(whole)
    if program.full:
        teacher_argmax = best
    has_rate = log_mass is not None and not program.full
    sums = pairs.empty(3 + has_rate + len(program.sums)).zero_()
    if shard.size:
        columns = (None if t is None else shard.local_ids(t) for t in (teacher_argmax, y))
        pairs.for_each_block(partial(_sum, program), (sums, *columns, log_mass, *norms))
    acceptance, at_best, at_target, *feature_sums = shard.add_parts(sums).unsqueeze(2).unbind(1)
    rate = feature_sums.pop() if has_rate else acceptance
    if pairs.out_of_range is not None:
        acceptance, rate = (t.masked_fill(pairs.out_of_range, math.nan) for t in (acceptance, rate))
    flags = _flags(shard, program, y, teacher_argmax, log_mass, acceptance.dtype)
    if (target_flag := flags["target_flag"]) is not None:
        at_target = at_target * target_flag
    n = RowValues(acceptance, program.lam_acceptance(acceptance), at_best, at_target, **flags)
    value = program.rows(feature_sums, n, weight)[0]
    saved = SavedStats(program.saved_stats(norms, acceptance, feature_sums), teacher_argmax)
    agree = (student_argmax == (teacher_argmax if best is None else best)) & ~rate.isnan()
    result = DivergenceResult(pairs.put(value), pairs.put(rate), pairs.put(agree))
    if not with_grad:
        return result._replace(saved=SavedStats(*map(pairs.put, saved)))
    _write_gradient(shard, _local.Program(request, known=True), pairs, request, saved, logits)
    return result


def part_of(shard: VocabShard, V: int) -> tuple[int, int]:
    """See ``rows/_primitives.py``."""
    ranks, rank = dist.get_world_size(shard.group), dist.get_rank(shard.group)
    step = -(-V // ranks)
    start = min(rank * step, V)
    return start, min(step, V - start)


def row_norms(
    shard: VocabShard, local: Any, logits: Tensor, transform: Transform, skip: Tensor | None, start: int
) -> tuple[Tensor, Tensor]:
    """See ``rows/_divergence.py``; ``local`` is that of the backend. One all-gather of three numbers per row."""
    acc = accum_dtype(logits.dtype)
    part = torch.empty(len(logits), 3, dtype=acc, device=logits.device)
    _fill_neutral(part)
    if logits.shape[1]:
        norms, column = local(logits, transform, skip, start)
        lowest = torch.finfo(acc).min  # -inf cannot be subtracted from itself
        torch.cat([norms[:, :1].clamp(min=lowest), norms[:, 1:], column.unsqueeze(1).to(acc)], 1, out=part)
    row_max, log_sum, column = _combined(*shard.gather(part).unsqueeze(3).unbind(2))
    return torch.cat([row_max, log_sum], 1), column.squeeze(1)


def divergence_grad(
    shard: VocabShard, logits: Tensor, request: DivergenceRequest, saved: SavedStats, out: Tensor
) -> None:
    """See ``rows/_divergence.py``; without communication."""
    program = _local.Program(request, known=True)
    pairs = _pairs(shard, logits, request, program)
    _write_gradient(shard, program, pairs, request, SavedStats(*(pairs.take(t) for t in saved)), out)


def _pairs(shard: VocabShard, logits: Tensor, request: DivergenceRequest, program: _local.Program) -> _local.Pairs:
    """Pair this rank's columns of both sides."""
    transform, teacher_transform = (shard.local_transform(t) for t in (request.transform, request.teacher_transform))
    local_request = request._replace(transform=transform, teacher_transform=teacher_transform)
    return _local.Pairs(logits, local_request, 2 + program.work_blocks)


def _write_gradient(
    shard: VocabShard, program: _local.Program, pairs: _local.Pairs, request: DivergenceRequest, saved: SavedStats,
    out: Tensor,
) -> None:  # fmt: skip
    """Compute this rank's columns of the gradient; ``saved`` has the rows of the pairs."""
    if not shard.size:
        return
    stats, teacher_argmax = saved
    y, weight = pairs.take(request.targets), pairs.take(request.weights)
    log_mass = _local.Norms.of(stats).log_mass(pairs.take_whole(request.full)[0])
    c = program.factors(stats, weight, _flags(shard, program, y, teacher_argmax, log_mass, stats.dtype))
    teacher_argmax, y = shard.local_ids(teacher_argmax), None if y is None else shard.local_ids(y)
    per_row = (stats, log_mass, teacher_argmax, y, c.best, c.target, *(f.contiguous() for f in c.features))
    pairs.for_each_block(partial(_gradient, program), per_row, out=out)


def _flags(
    shard: VocabShard, program: _local.Program, y: Tensor | None, teacher_argmax: Tensor, log_mass: Tensor | None,
    dtype: torch.dtype,
) -> dict[str, Any]:  # fmt: skip
    """Return the flags of rows: 1 with a target, 0 without, NaN if it is outside of the whole vocabulary."""
    flag = best_flag = mass = None
    if program.full:
        best_flag, mass = (teacher_argmax != IGNORE).to(dtype), None if log_mass is None else log_mass.exp()
    if y is not None:
        in_range = shard.in_vocabulary(y)
        flag = in_range.to(dtype).masked_fill_(~in_range & (y != IGNORE), math.nan)
    return program.flags(flag, best_flag, mass)


def _local_stats(shard: VocabShard, pairs: _local.Pairs) -> Tensor:
    """Reduce this rank's columns to ``[n, 6]``: maximum, log sum e^(z - maximum) and argmax of student, then teacher.

    The argmax is a column of the whole row.
    """
    stats = pairs.empty(6)
    lowest = torch.finfo(stats.dtype).min
    if not shard.size:
        _fill_neutral(stats)
        return stats

    def work(block: _local.Block, _: None, row: tuple[Tensor]) -> None:
        (part,) = row
        for i, x in ((0, block.z), (3, block.t)):
            row_max, column = _local.largest(x)
            row_max = row_max.clamp(min=lowest)  # -inf cannot be subtracted from itself
            total = torch.sub(x, row_max, out=block.more[0]).exp_().sum(1, keepdim=True)
            part[:, i : i + 3] = torch.cat([row_max, total.log_(), column + shard.start], 1)

    pairs.for_each_block(work, (stats,))
    return stats


def _fill_neutral(stats: Tensor) -> None:
    """Fill every three columns with the maximum, log sum and argmax of no columns."""
    for i, neutral in enumerate((torch.finfo(stats.dtype).min, -math.inf, -1)):
        stats[:, i::3].fill_(neutral)  # a copy from the host would be a sync


def _combine(shard: VocabShard, pairs: _local.Pairs, local_stats: Tensor) -> tuple[_local.Norms, Tensor, Tensor]:
    """Combine the results of all ranks into (normalisers of whole rows, student's argmax, teacher's argmax)."""
    gathered = shard.gather(local_stats).unsqueeze(3).unbind(2)
    *norms, student = _combined(*gathered[:3])
    *teacher_norms, teacher = _combined(*gathered[3:])
    return _local.Norms(*norms, *teacher_norms), student, teacher


def _combined(row_max: Tensor, log_sum: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the parts of all ranks, ``[ranks, n, 1]``, into maximum, log sum and argmax of whole rows."""
    whole = row_max.amax(0)
    total = torch.logsumexp(log_sum + (row_max - whole), 0)
    first = torch.where((row_max == whole) & (log_sum > -math.inf), column, math.inf).amin(0)
    return whole, total, torch.where(first.isfinite(), first, 0).to(torch.int64)


def _columns(
    program: _local.Program, block: _local.Block, norms: _local.Norms, log_mass: Tensor | None
) -> tuple[Columns, list[Tensor]]:
    """Compute this rank's columns of p and q; return them with the unused buffers."""
    p, q, *more = block.more
    mass = None
    if program.full and log_mass is not None:
        mass, norms = log_mass.exp(), norms._replace(teacher_log_sum=norms.teacher_log_sum - log_mass)
    log_p, log_q = _local.logarithms(block, norms, more, None)
    columns = Columns(torch.exp(log_p, out=p), torch.exp(log_q, out=q), log_p, log_q, guard_zeros=True, mass=mass)
    return columns, more[2:]


def _sum(program: _local.Program, block: _local.Block, _: None, row: tuple[Any, ...]) -> None:
    """Compute this rank's share of the sums.

    They are a, -log p at the teacher's argmax and at the target, the features, and a of whole rows if it differs.
    """
    part, teacher_argmax, y, log_mass, *normalizers = row
    norms = _local.Norms(*normalizers)
    columns, scratch = _columns(program, block, norms, log_mass)
    acceptance, *sums = program.summed(columns, scratch)
    z, zero = block.z, torch.zeros_like(acceptance)
    picked = [zero if c is None else _local.at(z, c, norms.row_max, norms.log_sum)[0] for c in (teacher_argmax, y)]
    rate = [] if log_mass is None or program.full else [_local.overlap(columns, log_mass, scratch[0])]
    part.copy_(torch.cat([acceptance, *picked, *sums, *rate], 1))


def _gradient(program: _local.Program, block: _local.Block, out: Tensor, row: tuple[Any, ...]) -> Tensor:
    stats, log_mass, teacher_argmax, y, best, target, *features = row
    columns, scratch = _columns(program, block, _local.Norms.of(stats), log_mass)
    c = _local.GradientFactors(features, best, target)
    return _local.subtract_one_hots_(program.write_gradient(columns, scratch, c, out), teacher_argmax, y, c)
