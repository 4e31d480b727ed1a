r"""Divergence of rows whose vocabulary is split over ranks; the logits of neither side are ever gathered.

Each rank computes the maximum, the sum of exponentials and the argmax of its columns, for student and teacher. One
all-gather of these six numbers per row gives all ranks the normalisers of p and q. The acceptance rate a and all sums
of a kind are then sums over the ranks: one all-reduce of a few numbers per row. The value follows from the sums and is
equal on all ranks. The gradient is local. Plain torch computes the columns, whatever the backend
(``_backends/torch/_divergence.py``), in three passes. A separate backward pass reads them once, without communication.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from dllm_kernels._backends._divergence import DivergenceRequest, DivergenceResult, Kept
from dllm_kernels._backends._rows import IGNORE
from dllm_kernels._backends.torch import _divergence as _local
from dllm_kernels.distributed._layout import VocabShard

Tensor = torch.Tensor


def divergence(shard: VocabShard, logits: Tensor, request: DivergenceRequest, *, with_grad: bool) -> DivergenceResult:
    """See ``_backends/_divergence.py``."""
    program = _local.Program(request)
    pairs = _pairs(shard, logits, request, program)
    norms, student_argmax, teacher_argmax = _combine(shard, pairs, _local_stats(shard, pairs))
    y, weight = pairs.take(request.targets), pairs.take(request.weights)
    sums = pairs.empty(3 + len(program.sums)).zero_()
    if shard.size:
        columns = (None if t is None else shard.local_ids(t) for t in (teacher_argmax, y))
        pairs.for_each_block(partial(_sum, program), (sums, *columns, *norms))
    acceptance, at_best, at_target, *of_features = shard.add_parts(sums).unsqueeze(2).unbind(1)
    if pairs.out_of_range is not None:
        acceptance = acceptance.masked_fill(pairs.out_of_range, math.nan)
    target_flag = _target_flags(shard, y, acceptance.dtype)
    if target_flag is not None:
        at_target = torch.where(target_flag != 0, at_target * target_flag, 0.0)
    n = _local.RowValues(acceptance, program.lam_acceptance(acceptance), at_best, at_target, target_flag)
    value = program.rows(of_features, n, weight)[0]
    stats = program.kept_stats(norms, acceptance, of_features)
    result = DivergenceResult(
        pairs.put(value), pairs.put(acceptance), pairs.put((student_argmax == teacher_argmax) & ~acceptance.isnan())
    )
    if not with_grad:
        return result._replace(kept=Kept(pairs.put(stats), pairs.put(teacher_argmax)))
    _write_gradient(shard, _local.Program(request, known=True), pairs, request, Kept(stats, teacher_argmax), logits)
    return result


def divergence_grad(shard: VocabShard, logits: Tensor, request: DivergenceRequest, kept: Kept, out: Tensor) -> None:
    """See ``_backends/_divergence.py``; without communication."""
    program = _local.Program(request, known=True)
    pairs = _pairs(shard, logits, request, program)
    _write_gradient(shard, program, pairs, request, Kept(*(pairs.take(t) for t in kept)), out)


def _pairs(shard: VocabShard, logits: Tensor, request: DivergenceRequest, program: _local.Program) -> _local.Pairs:
    """Pair this rank's columns of both sides."""
    transform, teacher_transform = (shard.local_transform(t) for t in (request.transform, request.teacher_transform))
    of_shard = request._replace(transform=transform, teacher_transform=teacher_transform)
    return _local.Pairs(logits, of_shard, 2 + program.work_blocks)


def _write_gradient(
    shard: VocabShard, program: _local.Program, pairs: _local.Pairs, request: DivergenceRequest, kept: Kept, out: Tensor
) -> None:
    """Compute this rank's columns of the gradient; ``kept`` has the rows of the pairs."""
    if not shard.size:
        return
    y, weight = pairs.take(request.targets), pairs.take(request.weights)
    c = program.coefficients(kept.stats, _target_flags(shard, y, kept.stats.dtype), weight)
    teacher_argmax, y = shard.local_ids(kept.teacher_argmax), None if y is None else shard.local_ids(y)
    per_row = (kept.stats, teacher_argmax, y, c.best, c.target, *(f.contiguous() for f in c.of))
    pairs.for_each_block(partial(_gradient, program), per_row, out=out)


def _target_flags(shard: VocabShard, y: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return 1 for rows with a target, 0 for rows without, NaN for a target outside of the whole vocabulary."""
    if y is None:
        return None
    in_range = shard.in_vocabulary(y)
    return in_range.to(dtype).masked_fill_(~in_range & (y != IGNORE), math.nan)


def _local_stats(shard: VocabShard, pairs: _local.Pairs) -> Tensor:
    """Reduce this rank's columns to ``[n, 6]``: maximum, log sum e^(z - maximum) and argmax of student, then teacher.

    The argmax is a column of the whole row.
    """
    stats = pairs.empty(6)
    lowest = torch.finfo(stats.dtype).min
    if not shard.size:
        for i, nothing in enumerate((lowest, -math.inf, -1)):
            stats[:, i::3].fill_(nothing)  # a copy from the host would be a sync
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


def _combine(shard: VocabShard, pairs: _local.Pairs, local_stats: Tensor) -> tuple[_local.Norms, Tensor, Tensor]:
    """Combine the results of all ranks into (normalisers of whole rows, student's argmax, teacher's argmax)."""
    norms, columns = [], []
    gathered = shard.gather(local_stats).unsqueeze(3).unbind(2)
    for row_max, log_sum, column in (gathered[:3], gathered[3:]):
        whole = row_max.amax(0)
        norms += [whole, torch.logsumexp(log_sum + (row_max - whole), 0)]
        first = torch.where((row_max == whole) & (log_sum > -math.inf), column, math.inf).amin(0)
        columns.append(torch.where(first.isfinite(), first, 0).to(torch.int64))
    return _local.Norms(*norms), columns[0], columns[1]


def _columns(block: _local.Block, norms: _local.Norms) -> tuple[_local.Columns, list[Tensor]]:
    """Compute this rank's columns of p and q; return them with the unused buffers."""
    p, q, *more = block.more
    log_p, log_q = _local.logarithms(block, norms, more, None)
    columns = _local.Columns(torch.exp(log_p, out=p), torch.exp(log_q, out=q), log_p, log_q, guard_zeros=True)
    return columns, more[2:]


def _sum(program: _local.Program, block: _local.Block, _: None, row: tuple[Any, ...]) -> None:
    """Compute this rank's share of a, of -log p at the teacher's argmax and at the target, and of the feature sums."""
    part, teacher_argmax, y, *of_norms = row
    norms = _local.Norms(*of_norms)
    columns, room = _columns(block, norms)
    acceptance, *sums = program.summed(columns, room)
    nothing = torch.zeros_like(acceptance)
    picked = [
        nothing if c is None else _local.at(block.z, c, norms.row_max, norms.log_sum)[0] for c in (teacher_argmax, y)
    ]
    part.copy_(torch.cat([acceptance, *picked, *sums], 1))


def _gradient(program: _local.Program, block: _local.Block, out: Tensor, row: tuple[Any, ...]) -> Tensor:
    stats, teacher_argmax, y, best, target, *features = row
    columns, room = _columns(block, _local.Norms.of(stats))
    c = _local.Coefficients(features, best, target)
    return _local.with_single_columns(program.write_gradient(columns, room, c, out), teacher_argmax, y, c)
