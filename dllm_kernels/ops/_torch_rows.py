"""The row primitives in plain torch: active rows only, a few of them at a time, in a buffer that stays in cache.

Neither a float32 copy of the logits nor a saved softmax of them ever exists (``_torch_blocks.py``). What is one number a row
is computed for all rows at once, before the blocks or after them; that includes the column of the target.

Finding the active rows (``nonzero``) syncs a GPU with its host; on CPU it costs nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from dllm_kernels.ops._rows import SKIP, Stats
from dllm_kernels.ops._torch_blocks import (
    COMMON_BLOCK_BYTES,
    Listed,
    Space,
    acc_dtype,
    column_of,
    spaces_for,
    split,
    sum_rows,
    team,
    top,
)
from dllm_kernels.ops._transform import NO_TRANSFORM, Transform, through_, transformed, with_slope
from dllm_kernels.ops._workers import share_out


def _of_column(z: torch.Tensor, transform: Transform) -> torch.Tensor:
    """The transformed logits of one column of each row, the target's, which is never the skipped one."""
    return transformed(z, transform.pointwise, z)


def _with_slope_of_column(z: torch.Tensor, transform: Transform) -> tuple[torch.Tensor, torch.Tensor | float]:
    return with_slope(z, transform.pointwise, z, torch.empty_like(z))


class _Sums(NamedTuple):
    """What the blocks leave of each row: its maximum, the sum of exp(x - maximum), the first column of the maximum."""

    row_max: torch.Tensor
    row_sum: torch.Tensor
    best: torch.Tensor | None

    @classmethod
    def empty(cls, rows: int, acc: torch.dtype, device: torch.device, with_best: bool) -> _Sums:
        row_max, row_sum = (torch.empty(rows, dtype=acc, device=device) for _ in range(2))
        return cls(row_max, row_sum, torch.empty(rows, dtype=torch.int64, device=device) if with_best else None)

    def blocks(self, size: int) -> list[_Sums]:
        """Views of ``[size, 1]``."""
        parts = [itertools.repeat(None) if t is None else split(t.unsqueeze(1), size) for t in self]
        return [_Sums(*part) for part in zip(*parts, strict=False)]

    def reduce(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Of a block ``[R, V]``; leaves exp(x - maximum) in ``out``, which may be x."""
        if self.best is None:
            torch.amax(x, 1, keepdim=True, out=self.row_max)
        else:
            torch.max(x, 1, keepdim=True, out=(self.row_max, self.best))
        torch.sub(x, self.row_max, out=out).exp_()
        sum_rows(out, self.row_sum)

    def stats(self, y: torch.Tensor, target_logit: torch.Tensor) -> Stats:
        """What :func:`row_stats` returns of these rows."""
        nothing = self.row_max == -math.inf  # -inf + inf is NaN; such a row, or shard of a row, adds up to 0
        log_sum = self.row_sum.masked_fill(nothing, 0).log_()
        row_max = self.row_max.clamp(min=torch.finfo(self.row_max.dtype).min)
        nll = (row_max - target_logit).add_(log_sum).masked_fill_(nothing, math.nan)
        correct = None if self.best is None else (self.best == y) & ~nll.isnan()
        return nll, row_max, log_sum, target_logit, correct


def _empty_stats(N: int, acc: torch.dtype, device: torch.device, with_correct: bool) -> Stats:
    # four tensors, not views of one: autograd lets nobody write into a view that a Function returned
    nll, row_max, log_sum, target_logit = (torch.zeros(N, dtype=acc, device=device) for _ in range(4))
    correct = torch.zeros(N, dtype=torch.bool, device=device) if with_correct else None
    return nll, row_max, log_sum, target_logit, correct


def row_stats(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    with_correct: bool,
    transform: Transform = NO_TRANSFORM,
) -> Stats:
    """See ``ops._rows``."""
    B, L, V = logits.shape
    acc = acc_dtype(logits.dtype)
    rows = (targets != SKIP).nonzero().squeeze(1)
    if rows.numel() == 0:
        return _empty_stats(B * L, acc, logits.device, with_correct)
    listed, sums = Listed(logits, rows), _Sums.empty(rows.numel(), acc, logits.device, with_correct)

    def work(block: torch.Tensor, part: _Sums, space: Space) -> None:
        wide = top(space.wide, block)
        part.reduce(transformed(listed.load(block, space), transform, wide), wide)

    threads, size = team(rows.numel(), V, acc, logits.device)
    spaces = spaces_for(threads, size, V, logits, wide=True, narrow=not listed.together)
    share_out([partial(work, *job) for job in zip(listed.blocks(size), sums.blocks(size), strict=True)], spaces)
    y = targets[rows]
    column, inside = column_of(y, V)
    target_logit = _of_column(listed.column(column).to(acc), transform).masked_fill_(~inside, math.nan)
    listed_stats = sums.stats(y, target_logit)
    if rows.numel() == B * L:
        return listed_stats
    stats = _empty_stats(B * L, acc, logits.device, with_correct)
    for whole, part in zip(stats, listed_stats, strict=True):
        if whole is not None and part is not None:
            whole.index_copy_(0, rows, part)
    return stats


def row_grad(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    out: torch.Tensor,
    *,
    whole_row: bool = True,
    transform: Transform = NO_TRANSFORM,
) -> None:
    """See ``ops._rows``."""
    B, L, V = logits.shape
    acc = acc_dtype(logits.dtype)
    mask = (targets != SKIP) & (scale != 0)
    idle, rows = (~mask).nonzero().squeeze(1), mask.nonzero().squeeze(1)
    threads, size = team(B * L, V, acc, logits.device)
    jobs: list[Callable[[Space], None]] = []
    if idle.numel():
        unread = Listed(out, idle)
        jobs += [partial(unread.zero, block) for block in unread.blocks(size)]
    if rows.numel() == 0:
        share_out(jobs, spaces_for(threads, size, V, logits, wide=False, narrow=False))
        return
    source, target = Listed(logits, rows), Listed(out, rows)
    column, inside = column_of(targets[rows], V)
    scale, row_max = scale[rows], row_max[rows]
    if whole_row:
        scale = torch.where(inside, scale, math.nan)
    factor = scale * torch.exp(-log_sum[rows])
    at_target, slope_there = _with_slope_of_column(
        source.column(column).to(acc), transform
    )  # before it is written over
    with_onehot = (factor * torch.exp(at_target - row_max) - scale) * slope_there

    def work(
        block: torch.Tensor, to: torch.Tensor, part_max: torch.Tensor, part_factor: torch.Tensor, space: Space
    ) -> None:
        room = target.room(to, space)
        x, slope = with_slope(source.load(block, space), transform, room, top(space.slope, block))
        target.store(to, through_(torch.sub(x, part_max, out=room).exp_().mul_(part_factor), slope, transform), space)

    per_row = (split(t.unsqueeze(1), size) for t in (row_max, factor))
    jobs += [partial(work, *job) for job in zip(source.blocks(size), target.blocks(size), *per_row, strict=True)]
    in_place = source.together and target.together
    wide, caps = not in_place or logits.dtype != acc, transform.softcap is not None
    share_out(jobs, spaces_for(threads, size, V, logits, wide=wide, narrow=not in_place, slope=caps))
    target.set_column(column, torch.where(inside, with_onehot.to(out.dtype), target.column(column)))


def row_nll_grad_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    *,
    with_correct: bool,
    transform: Transform = NO_TRANSFORM,
) -> Stats:
    """See ``ops._rows``. Works on views of the chunk itself where it already has the accumulation dtype."""
    C, V = logits.shape
    acc = acc_dtype(logits.dtype)
    mask = targets != SKIP
    column, inside = column_of(targets, V)
    row = torch.arange(C, device=logits.device)
    target_logit, slope_there = _with_slope_of_column(
        logits[row, column].to(acc), transform
    )  # before it is written over
    sums, factor = _Sums.empty(C, acc, logits.device, with_correct), torch.empty(C, dtype=acc, device=logits.device)
    row_scale = torch.where(inside, scale, math.nan)

    def work(
        block: torch.Tensor, part: _Sums, part_scale: torch.Tensor, part_factor: torch.Tensor, space: Space
    ) -> None:
        x = block if block.dtype == acc else top(space.wide, block).copy_(block)
        _, slope = with_slope(x, transform, x, top(space.slope, block))
        part.reduce(x, x)
        through_(x.mul_(torch.div(part_scale, part.row_sum, out=part_factor)), slope, transform)
        if x is not block:
            block.copy_(x)

    threads, size = team(C, V, acc, logits.device)
    per_row = (split(t.unsqueeze(1), size) for t in (row_scale, factor))
    caps = transform.softcap is not None
    spaces = spaces_for(threads, size, V, logits, wide=logits.dtype != acc, narrow=False, slope=caps)
    jobs = [partial(work, *job) for job in zip(split(logits, size), sums.blocks(size), *per_row, strict=True)]
    share_out(jobs, spaces)
    with_onehot = (factor * torch.exp(target_logit - sums.row_max) - row_scale) * slope_there
    logits[row, column] = with_onehot.to(logits.dtype)
    logits.index_fill_(0, (~mask | (scale == 0)).nonzero().squeeze(1), 0)
    stats = sums.stats(targets, target_logit.masked_fill_(~inside, math.nan))
    for part in stats:
        if part is not None:
            part.masked_fill_(~mask, 0)
    return stats


def scale_(t: torch.Tensor, factor: torch.Tensor) -> None:
    """See ``ops._rows``; on a GPU the multiplication runs whatever the factor is, since looking would sync.

    A CPU multiplies by a 0-d factor at the factor's precision; a GPU would round it to the dtype of t first.
    """
    if not factor.is_cuda:
        if factor != 1:
            t.mul_(factor)
        return
    for block in torch.split(t, max(1, COMMON_BLOCK_BYTES // max(t[0].nbytes, 1))) if t.numel() else ():
        block.copy_(block.to(factor.dtype).mul_(factor))
