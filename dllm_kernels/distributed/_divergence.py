r"""Divergence of rows whose vocabulary is split over ranks; neither side's logits are ever gathered.

Each rank finds the maximum, the sum of exponentials and the argmax of its columns, of both sides; one all-gather of these six
numbers a row gives all ranks the normalisers of p and q. Then a, and every sum that a kind is made of, is a sum over the ranks:
one all-reduce of a few numbers a row. What a row makes of the sums, and so the value, is the same on all ranks, and the gradient is
local again. The columns are worked on in plain torch whatever the backend (``_backends/torch/_divergence.py``), three times.
"""

from __future__ import annotations

import math

import torch

from dllm_kernels._backends._divergence import Recipe
from dllm_kernels._backends._rows import SKIP
from dllm_kernels._backends.torch._divergence import (
    Block,
    Coefficients,
    Columns,
    Norms,
    Numbers,
    Pairs,
    Program,
    at,
    largest,
    logarithms,
    subtract_at,
)
from dllm_kernels._utils._transform import Transform
from dllm_kernels.distributed._shard import VocabShard

Tensor = torch.Tensor


def divergence(
    shard: VocabShard, logits: Tensor, teacher: Tensor, weights: Tensor, recipe: Recipe, *, teacher_rows: Tensor | None = None,
    targets: Tensor | None = None, mean_alpha: Tensor | None = None, transform: Transform, teacher_transform: Transform,
    with_grad: bool, out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``_backends/_divergence.py``."""
    program = Program(recipe)
    transforms = (shard.local_transform(t) for t in (transform, teacher_transform))
    pairs = Pairs(logits, teacher, weights, teacher_rows, 2 + program.buffers, *transforms)
    norms, best, hot = _combined(shard, pairs, _largest_of_columns(shard, pairs))
    targets, lost = pairs.taken(targets), pairs.lost
    each = (*norms, *(None if y is None else shard.local_ids(y) for y in (hot, targets)))
    sums = pairs.empty(3 + len(program.sums)).zero_()
    if shard.size:
        pairs.each(lambda block, _, part, *row: _sum(program, block, part, *row), sums, *each)
    alpha, at_best, at_target, *of_features = shard.add_parts(sums).unsqueeze(2).unbind(1)
    if lost is not None:
        alpha = alpha.masked_fill(lost, math.nan)
    on = None
    if targets is not None:
        there = shard.in_vocabulary(targets)
        on = there.to(alpha.dtype).masked_fill_(~there & (targets != SKIP), math.nan)
        at_target = torch.where(on != 0, at_target * on, 0.0)
    weight = pairs.taken(weights)
    assert weight is not None
    lam_alpha = mean_alpha if program.mean_alpha and mean_alpha is not None else alpha
    value, c = program.rows(of_features, Numbers(alpha, lam_alpha, at_best, at_target, on), weight)
    if with_grad and shard.size:
        each = (*each, *(f.contiguous() for f in c.of), c.best, c.target)
        pairs.each(
            lambda block, grad, *row: _gradient(program, block, grad, *row), *each, out=logits if out is None else out
        )
    agree = (best == hot) & ~alpha.isnan()
    return pairs.placed(value), pairs.placed(alpha), pairs.placed(agree)


def _largest_of_columns(shard: VocabShard, pairs: Pairs) -> Tensor:
    """Reduce this rank's columns to ``[n, 6]``: maximum, log sum e^(z - maximum) and whole-row argmax of each side."""
    found = pairs.empty(6)
    lowest = torch.finfo(found.dtype).min
    if not shard.size:
        found[:] = found.new_tensor([lowest, -math.inf, -1, lowest, -math.inf, -1])
        return found

    def work(block: Block, _: None, part: Tensor) -> None:
        for i, x in ((0, block.z), (3, block.t)):
            row_max, column = largest(x)
            row_max = row_max.clamp(min=lowest)  # -inf cannot be subtracted from itself
            total = torch.sub(x, row_max, out=block.more[0]).exp_().sum(1, keepdim=True)
            part[:, i : i + 3] = torch.cat([row_max, total.log_(), column + shard.start], 1)

    pairs.each(work, found)
    return found


def _combined(shard: VocabShard, pairs: Pairs, found: Tensor) -> tuple[Norms, Tensor, Tensor]:
    """Combine all ranks' results into (normalisers of whole rows, the student's argmax, the teacher's)."""
    norms, columns = [], []
    numbers = shard.gather(found).unsqueeze(3).unbind(2)
    for row_max, log_sum, column in (numbers[:3], numbers[3:]):
        whole = row_max.amax(0)
        norms += [whole, torch.logsumexp(log_sum + (row_max - whole), 0)]
        first = torch.where((row_max == whole) & (log_sum > -math.inf), column, math.inf).amin(0)
        columns.append(torch.where(first.isfinite(), first, 0).to(torch.int64))
    return Norms(*norms), columns[0], columns[1]


def _columns(program: Program, block: Block, norms: Norms) -> tuple[Columns, list[Tensor]]:
    """Compute this rank's columns of p and q; return them with the unused buffers."""
    p, q, *more = block.more
    log_p, log_q = logarithms(block, norms, more, None)
    columns = Columns(torch.exp(log_p, out=p), torch.exp(log_q, out=q), log_p, log_q, careful=True)
    return columns, more[2:]


def _sum(program: Program, block: Block, part: Tensor, *row: Tensor | None) -> None:
    """Sum a, -log p at the teacher's argmax and at the target (if this rank holds them), and the features."""
    norms, (hot, y) = Norms(*row[:4]), row[4:]  # type: ignore[arg-type]
    columns, room = _columns(program, block, norms)
    alpha, *sums = program.summed(columns, room)
    nothing = torch.zeros_like(alpha)
    picked = [nothing if c is None else at(block.z, c, norms.row_max, norms.log_sum)[0] for c in (hot, y)]
    part.copy_(torch.cat([alpha, *picked, *sums], 1))


def _gradient(program: Program, block: Block, out: Tensor, *row: Tensor | None) -> Tensor:
    norms, (hot, y) = Norms(*row[:4]), row[4:6]  # type: ignore[arg-type]
    columns, room = _columns(program, block, norms)
    program.summed(columns, room)  # leaves in the room what the gradient is made of
    *of, best, target = row[6:]
    grad = program.made(columns, room, Coefficients(of, best, target), out)  # type: ignore[arg-type]
    for column, factor in ((hot, best), (y, target)):
        if factor is not None and column is not None:
            subtract_at(grad, column, factor)
    return grad
