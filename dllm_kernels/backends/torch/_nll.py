"""NLL of a chunk of logits and its gradient, block by block: the one row primitive not derived from the row statistics.

Neither a float32 copy nor a saved softmax of the chunk is ever materialised (``backends/torch/_blocks.py``).
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from dllm_kernels.backends.torch import _blocks
from dllm_kernels.backends.torch._stats import Sums
from dllm_kernels.backends.torch._workers import run_jobs
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import IGNORE, NLL, column_of
from dllm_kernels.rows._stats_interface import StatsRequest
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform, through_, with_slope


def nll_and_grad_(
    logits: Tensor, targets: Tensor, scale: Tensor, *, with_correct: bool, with_ids: bool = False,
    transform: Transform = NO_TRANSFORM,
) -> NLL:  # fmt: skip
    """See ``rows/_primitives.py``. Works in place on a chunk that already has the dtype of sums."""
    (C, V), acc = logits.shape, accum_dtype(logits.dtype)
    ids, inactive = targets.unsqueeze(1), targets == IGNORE
    column, out_of_range = column_of(ids, V)
    row_scale = scale.unsqueeze(1)
    if out_of_range is not None:
        row_scale = row_scale.masked_fill(out_of_range, math.nan)
    sums = Sums.empty(C, logits, StatsRequest(ids, targets, correct=with_correct, best=with_ids))

    def work(rows: tuple[Tensor, Tensor, Tensor], part: Sums, buffers: _blocks.Buffers) -> None:
        block, column, row_scale = rows
        x = block if block.dtype == acc else _blocks.top(buffers.wide, block).copy_(block)
        z, slope = with_slope(x, transform, x, None if buffers.slope is None else _blocks.top(buffers.slope, block))
        part.write_max(z)
        torch.gather(z, 1, column, out=part.log_probs)  # the target's logit; log_sum holds S until the end
        row_sum = _blocks.sum_rows(torch.sub(z, part.row_max, out=x).exp_(), part.log_sum)
        grad = x.mul_(row_scale / row_sum).scatter_add_(1, column, -row_scale)
        through_(grad, slope, transform)
        if x is not block:
            block.copy_(x)

    threads, size = _blocks.partition(C, V, acc, logits.is_cpu)
    parts = (_blocks.split_all(t, size) for t in ((logits, column, row_scale), sums))
    buffers = _blocks.buffers_for(threads, size, logits, wide=logits.dtype != acc, slope=transform.softcap is not None)
    run_jobs([partial(work, *block) for block in zip(*parts, strict=True)], buffers)
    _blocks.zero_rows_(logits, inactive | (scale == 0))
    sums.log_sum.log_()
    row_max, log_sum = sums.normalizer()
    nll = ((row_max - sums.log_probs) + log_sum).masked_fill_(log_sum == -math.inf, math.nan)
    nll = (nll if out_of_range is None else nll.masked_fill_(out_of_range, math.nan)).squeeze(1)
    correct = (sums.best.squeeze(1) == targets) & ~nll.isnan() & ~inactive if with_correct else None
    best = sums.argmax(transform).masked_fill_(inactive, IGNORE) if with_ids else None
    row_max, log_sum = (t.squeeze(1).masked_fill_(inactive, 0) for t in (row_max, log_sum))
    return nll.masked_fill_(inactive, 0), row_max, log_sum, correct, best


def scale_(t: Tensor, factor: Tensor) -> None:
    """See ``rows/_primitives.py``. Off the CPU the multiplication is unconditional, because a test would be a sync.

    A CPU multiplies by a 0-d factor in the precision of the factor. A GPU would round the factor to the dtype of t.
    """
    if factor.is_cpu and factor == 1:
        return
    if factor.is_cpu and factor.isfinite():
        t.mul_(factor)
        return
    for block in torch.split(t, max(1, _blocks.DEVICE_BLOCK_BYTES // max(t[0].nbytes, 1))) if t.numel() else ():
        block.copy_(torch.where(block == 0, 0.0, block * factor.view(1)))
