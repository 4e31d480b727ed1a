"""The row primitives in plain torch: active rows only, a few of them at a time, in a buffer that stays in cache.

Neither a float32 copy of the logits nor a saved softmax of them ever exists (``rows_torch/_blocks.py``). What is one number a row
is computed for all rows at once, before the blocks or after them; that includes the column of the target.

Finding the active rows (``nonzero``) syncs a GPU with its host; on CPU it costs nothing.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import NamedTuple

import torch

from dllm_kernels.base._rows import NLL, SKIP
from dllm_kernels.base._transform import NO_TRANSFORM, Transform, through_, with_slope
from dllm_kernels.rows_torch._blocks import (
    COMMON_BLOCK_BYTES,
    Space,
    acc_dtype,
    column_of,
    spaces_for,
    split,
    sum_rows,
    team,
    top,
)
from dllm_kernels.rows_torch._workers import share_out


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

    def nll(self, y: torch.Tensor, target_logit: torch.Tensor) -> NLL:
        """(nll, row_max, log_sum, correct) of these rows."""
        nothing = self.row_max == -math.inf  # -inf + inf is NaN; such a row, or shard of a row, adds up to 0
        log_sum = self.row_sum.masked_fill(nothing, 0).log_()
        row_max = self.row_max.clamp(min=torch.finfo(self.row_max.dtype).min)
        nll = (row_max - target_logit).add_(log_sum).masked_fill_(nothing, math.nan)
        correct = None if self.best is None else (self.best == y) & ~nll.isnan()
        return nll, row_max, log_sum, correct


def nll_and_grad_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    *,
    with_correct: bool,
    transform: Transform = NO_TRANSFORM,
) -> NLL:
    """See ``base._rows``. Works on views of the chunk itself where it already has the accumulation dtype."""
    C, V = logits.shape
    acc = acc_dtype(logits.dtype)
    mask = targets != SKIP
    column, inside = column_of(targets, V)
    row = torch.arange(C, device=logits.device)
    z = logits[row, column].to(acc)  # before it is written over
    target_logit, slope_there = with_slope(z, transform.pointwise, z, torch.empty_like(z))
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
    stats = sums.nll(targets, target_logit.masked_fill_(~inside, math.nan))
    for part in stats:
        if part is not None:
            part.masked_fill_(~mask, 0)
    return stats


def scale_(t: torch.Tensor, factor: torch.Tensor) -> None:
    """See ``base._rows``; on a GPU the multiplication runs whatever the factor is, since looking would sync.

    A CPU multiplies by a 0-d factor at the factor's precision; a GPU would round it to the dtype of t first.
    """
    if not factor.is_cuda:
        if factor != 1:
            t.mul_(factor)
        return
    for block in torch.split(t, max(1, COMMON_BLOCK_BYTES // max(t[0].nbytes, 1))) if t.numel() else ():
        block.copy_(block.to(factor.dtype).mul_(factor))
