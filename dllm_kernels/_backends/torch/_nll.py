"""The NLL of a chunk and its gradient in one pass over its blocks: the one row primitive that is more than the statistics of a row.

Neither a float32 copy of the logits nor a saved softmax of them ever exists (``_backends/torch/_blocks.py``).
"""

from __future__ import annotations

import math
from functools import partial

import torch

from dllm_kernels._backends._row_stats import StatsRequest
from dllm_kernels._backends._rows import NLL, SKIP
from dllm_kernels._backends.torch._blocks import (
    COMMON_BLOCK_BYTES,
    Buffers,
    buffers_for,
    column_of,
    split,
    sum_rows,
    team,
    top,
)
from dllm_kernels._backends.torch._stats import Sums
from dllm_kernels._backends.torch._workers import share_out
from dllm_kernels._utils._dtypes import accum_dtype
from dllm_kernels._utils._transform import NO_TRANSFORM, Transform, through_, with_slope


def nll_and_grad_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    *,
    with_correct: bool,
    transform: Transform = NO_TRANSFORM,
) -> NLL:
    """See ``_backends._rows``. Works on views of the chunk itself where it already has the accumulation dtype."""
    (C, V), acc = logits.shape, accum_dtype(logits.dtype)
    ids, off, caps = targets.unsqueeze(1), targets == SKIP, transform.softcap is not None
    column, inside = column_of(ids, V)
    row_scale = torch.where(inside, scale.unsqueeze(1), math.nan)
    sums = Sums.empty(C, logits, StatsRequest(ids, targets, correct=with_correct))

    def work(block: torch.Tensor, part: Sums, column: torch.Tensor, row_scale: torch.Tensor, buffers: Buffers) -> None:
        x = block if block.dtype == acc else top(buffers.wide, block).copy_(block)
        z, slope = with_slope(x, transform, x, top(buffers.slope, block))
        part.find_largest(z)
        torch.gather(z, 1, column, out=part.log_probs)  # the logit so far, as log_sum is S
        row_sum = sum_rows(torch.sub(z, part.row_max, out=x).exp_(), part.log_sum)  # type: ignore[arg-type]
        grad = x.mul_(row_scale / row_sum).scatter_add_(1, column, -row_scale)
        through_(grad, slope, transform)
        if x is not block:
            block.copy_(x)

    threads, size = team(C, V, acc, logits.device)
    per_row = [split(t, size) for t in (logits, column, row_scale)]
    blocks = zip(per_row[0], sums.blocks(size, len(per_row[0])), *per_row[1:], strict=True)
    buffers = buffers_for(threads, size, V, logits, wide=logits.dtype != acc, narrow=False, slope=caps)
    share_out([partial(work, *block) for block in blocks], buffers)
    logits.index_fill_(0, (off | (scale == 0)).nonzero().squeeze(1), 0)
    row_max, log_sum = sums.normalizer(sums.log_sum.log_())  # type: ignore[union-attr]
    nll = ((row_max - sums.log_probs) + log_sum).masked_fill_(~inside | (log_sum == -math.inf), math.nan).squeeze(1)
    correct = None if sums.best is None else (sums.best.squeeze(1) == targets) & ~nll.isnan() & ~off
    row_max, log_sum = (t.squeeze(1).masked_fill_(off, 0) for t in (row_max, log_sum))
    return nll.masked_fill_(off, 0), row_max, log_sum, correct


def scale_(t: torch.Tensor, factor: torch.Tensor) -> None:
    """See ``_backends._rows``; on a GPU the multiplication runs whatever the factor is, since looking would sync.

    A CPU multiplies by a 0-d factor at the factor's precision; a GPU would round it to the dtype of t first.
    """
    if not factor.is_cuda:
        if factor != 1:
            t.mul_(factor)
        return
    for block in torch.split(t, max(1, COMMON_BLOCK_BYTES // max(t[0].nbytes, 1))) if t.numel() else ():
        block.copy_(block.to(factor.dtype).mul_(factor))
