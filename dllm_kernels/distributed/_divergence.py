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

from dllm_kernels._backends._divergence import DivergenceRequest, Found, Kept
from dllm_kernels._backends._rows import IGNORE
from dllm_kernels._backends.torch import _divergence as _local
from dllm_kernels.distributed._layout import VocabShard

Tensor = torch.Tensor


def divergence(shard: VocabShard, logits: Tensor, request: DivergenceRequest, *, with_grad: bool) -> Found:
    """See ``_backends/_divergence.py``."""
    program = _local.Program(request)
    pairs = _pairs(shard, logits, request, program)
    norms, best, hot = _combined(shard, pairs, _largest_of_columns(shard, pairs))
    y, weight = pairs.taken(request.targets), pairs.taken(request.weights)
    sums = pairs.empty(3 + len(program.sums)).zero_()
    if shard.size:
        columns = (None if t is None else shard.local_ids(t) for t in (hot, y))
        pairs.each(partial(_sum, program), (sums, *columns, *norms))
    alpha, at_best, at_target, *of_features = shard.add_parts(sums).unsqueeze(2).unbind(1)
    if pairs.lost is not None:
        alpha = alpha.masked_fill(pairs.lost, math.nan)
    on = _on(shard, y, alpha.dtype)
    if on is not None:
        at_target = torch.where(on != 0, at_target * on, 0.0)
    n = _local.Numbers(alpha, program.lam_alpha(alpha), at_best, at_target, on)
    value = program.rows(of_features, n, weight)[0]
    numbers = program.numbers(norms, alpha, of_features)
    found = Found(pairs.placed(value), pairs.placed(alpha), pairs.placed((best == hot) & ~alpha.isnan()))
    if not with_grad:
        return found._replace(kept=Kept(pairs.placed(numbers), pairs.placed(hot)))
    _write_gradient(shard, _local.Program(request, known=True), pairs, request, Kept(numbers, hot), logits)
    return found


def divergence_grad(shard: VocabShard, logits: Tensor, request: DivergenceRequest, kept: Kept, out: Tensor) -> None:
    """See ``_backends/_divergence.py``; without communication."""
    program = _local.Program(request, known=True)
    pairs = _pairs(shard, logits, request, program)
    _write_gradient(shard, program, pairs, request, Kept(*(pairs.taken(t) for t in kept)), out)


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
    y, weight = pairs.taken(request.targets), pairs.taken(request.weights)
    c = program.coefficients(kept.numbers, _on(shard, y, kept.numbers.dtype), weight)
    hot, y = shard.local_ids(kept.hot), None if y is None else shard.local_ids(y)
    per_row = (kept.numbers, hot, y, c.best, c.target, *(f.contiguous() for f in c.of))
    pairs.each(partial(_gradient, program), per_row, out=out)


def _on(shard: VocabShard, y: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return 1 for rows with a target, 0 for rows without, NaN for a target outside of the whole vocabulary."""
    if y is None:
        return None
    there = shard.in_vocabulary(y)
    return there.to(dtype).masked_fill_(~there & (y != IGNORE), math.nan)


def _largest_of_columns(shard: VocabShard, pairs: _local.Pairs) -> Tensor:
    """Reduce this rank's columns to ``[n, 6]``: maximum, log sum e^(z - maximum) and argmax of student, then teacher.

    The argmax is a column of the whole row.
    """
    found = pairs.empty(6)
    lowest = torch.finfo(found.dtype).min
    if not shard.size:
        for i, nothing in enumerate((lowest, -math.inf, -1)):
            found[:, i::3].fill_(nothing)  # a copy from the host would be a sync
        return found

    def work(block: _local.Block, _: None, row: tuple[Tensor]) -> None:
        (part,) = row
        for i, x in ((0, block.z), (3, block.t)):
            row_max, column = _local.largest(x)
            row_max = row_max.clamp(min=lowest)  # -inf cannot be subtracted from itself
            total = torch.sub(x, row_max, out=block.more[0]).exp_().sum(1, keepdim=True)
            part[:, i : i + 3] = torch.cat([row_max, total.log_(), column + shard.start], 1)

    pairs.each(work, (found,))
    return found


def _combined(shard: VocabShard, pairs: _local.Pairs, found: Tensor) -> tuple[_local.Norms, Tensor, Tensor]:
    """Combine the results of all ranks into (normalisers of whole rows, student's argmax, teacher's argmax)."""
    norms, columns = [], []
    numbers = shard.gather(found).unsqueeze(3).unbind(2)
    for row_max, log_sum, column in (numbers[:3], numbers[3:]):
        whole = row_max.amax(0)
        norms += [whole, torch.logsumexp(log_sum + (row_max - whole), 0)]
        first = torch.where((row_max == whole) & (log_sum > -math.inf), column, math.inf).amin(0)
        columns.append(torch.where(first.isfinite(), first, 0).to(torch.int64))
    return _local.Norms(*norms), columns[0], columns[1]


def _columns(block: _local.Block, norms: _local.Norms) -> tuple[_local.Columns, list[Tensor]]:
    """Compute this rank's columns of p and q; return them with the unused buffers."""
    p, q, *more = block.more
    log_p, log_q = _local.logarithms(block, norms, more, None)
    columns = _local.Columns(torch.exp(log_p, out=p), torch.exp(log_q, out=q), log_p, log_q, careful=True)
    return columns, more[2:]


def _sum(program: _local.Program, block: _local.Block, _: None, row: tuple[Any, ...]) -> None:
    """Compute this rank's share of a, of -log p at the teacher's argmax and at the target, and of the feature sums."""
    part, hot, y, *of_norms = row
    norms = _local.Norms(*of_norms)
    columns, room = _columns(block, norms)
    alpha, *sums = program.summed(columns, room)
    nothing = torch.zeros_like(alpha)
    picked = [nothing if c is None else _local.at(block.z, c, norms.row_max, norms.log_sum)[0] for c in (hot, y)]
    part.copy_(torch.cat([alpha, *picked, *sums], 1))


def _gradient(program: _local.Program, block: _local.Block, out: Tensor, row: tuple[Any, ...]) -> Tensor:
    numbers, hot, y, best, target, *features = row
    columns, room = _columns(block, _local.Norms.of(numbers))
    c = _local.Coefficients(features, best, target)
    return _local.with_single_columns(program.made(columns, room, c, out), hot, y, c)
