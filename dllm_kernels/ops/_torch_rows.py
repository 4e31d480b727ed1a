"""The row primitives in plain torch: active rows only, a few of them at a time, in a buffer that stays in cache.

Neither a float32 copy of the logits nor a saved softmax of them ever exists: the working set is one block of rows in
the accumulation dtype. Finding the active rows (``nonzero``) syncs a GPU with its host; on CPU it costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from dllm_kernels.ops._rows import SKIP, Stats

# Bytes of the buffer that a block of rows is worked on in. On two AMD EPYC cores 2 MiB and 4 MiB were equally fast,
# 1 MiB 10 % slower and 256 KiB half as fast: it has to stay in cache, give each core a few rows, and (the larger of
# the equals) start few parallel regions, each of which waits for a core that another process may hold.
BLOCK_BYTES = 4 << 20


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are made in: float64 for float64, float32 for everything else."""
    return torch.promote_types(dtype, torch.float32)


def _blocks(rows: torch.Tensor, V: int, itemsize: int) -> Iterator[torch.Tensor]:
    size = max(1, BLOCK_BYTES // max(V * itemsize, 1))
    for start in range(0, rows.numel(), size):
        yield rows[start : start + size]


def _rows_and_index(t: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """View ``[B, L, V]`` so that the row numbers index it: flat where strides allow (faster), else by (b, l)."""
    B, L, _ = t.shape
    if B == 1 or t.stride(0) == L * t.stride(1):
        return (t[0] if B == 1 else t.flatten(0, 1)), (rows,)
    return t, (rows // L, rows % L)


def _gather(logits: torch.Tensor, rows: torch.Tensor, acc: torch.dtype) -> torch.Tensor:
    """Copy rows as float32 or float64."""
    view, index = _rows_and_index(logits, rows)
    return (view.index_select(0, rows) if len(index) == 1 else view[index]).to(acc)


def _scatter(out: torch.Tensor, rows: torch.Tensor, block: torch.Tensor | float) -> None:
    view, index = _rows_and_index(out, rows)
    view[index] = block


def _column(y: torch.Tensor, V: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A column to look at for every target, and whether the target is really there."""
    inside = (y >= 0) & (y < V)
    return y.clamp(0, max(V - 1, 0)).unsqueeze(1), inside


def _block_stats(x: torch.Tensor, y: torch.Tensor, with_correct: bool) -> Stats:
    """Stats of a block ``x [R, V]``, which holds exp(x - max) afterwards."""
    column, inside = _column(y, x.shape[1])
    target_logit = x.gather(1, column).squeeze(1)
    target_logit.masked_fill_(~inside, math.nan)
    correct = None
    if with_correct:
        row_max, best = x.max(dim=1)
        correct = best == y
    else:
        row_max = x.amax(dim=1)
    finite_max = row_max.clamp(min=torch.finfo(x.dtype).min)  # a row of -inf: exp(-inf - finite) = 0, not NaN
    row_sum = x.sub_(finite_max.unsqueeze(1)).exp_().sum(dim=1)
    log_sum = row_sum.log()
    nll = (finite_max - target_logit).add_(log_sum).masked_fill_(row_sum == 0, math.nan)
    if correct is not None:
        correct &= ~nll.isnan()
    return nll, finite_max, log_sum, target_logit, correct


def _block_grad_(exp_x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, log_sum: torch.Tensor) -> None:
    """Turn exp(x - max) into scale * (softmax - onehot), in place; the one-hot goes before any rounding."""
    column, inside = _column(y, exp_x.shape[1])
    exp_x.mul_((scale * torch.exp(-log_sum)).unsqueeze(1))
    exp_x.scatter_add_(1, column, -torch.where(inside, scale, 0.0).unsqueeze(1))


def _empty_stats(N: int, acc: torch.dtype, device: torch.device, with_correct: bool) -> Stats:
    # four tensors, not views of one: autograd lets nobody write into a view that a Function returned
    nll, row_max, log_sum, target_logit = (torch.zeros(N, dtype=acc, device=device) for _ in range(4))
    correct = torch.zeros(N, dtype=torch.bool, device=device) if with_correct else None
    return nll, row_max, log_sum, target_logit, correct


def _store(stats: Stats, rows: torch.Tensor, block: Stats) -> None:
    for whole, part in zip(stats, block, strict=True):
        if whole is not None and part is not None:
            whole.index_copy_(0, rows, part)


def row_stats(logits: torch.Tensor, targets: torch.Tensor, *, with_correct: bool) -> Stats:
    """See ``ops._rows``."""
    B, L, V = logits.shape
    acc = acc_dtype(logits.dtype)
    stats = _empty_stats(B * L, acc, logits.device, with_correct)
    active_rows = (targets != SKIP).nonzero().squeeze(1)
    for rows in _blocks(active_rows, V, acc.itemsize):
        x = _gather(logits, rows, acc)
        _store(stats, rows, _block_stats(x, targets[rows], with_correct))
        del x  # before the next block is gathered
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
) -> None:
    """See ``ops._rows``."""
    V = logits.shape[2]
    acc = acc_dtype(logits.dtype)
    mask = (targets != SKIP) & (scale != 0)
    _scatter(out, (~mask).nonzero().squeeze(1), 0)
    for rows in _blocks(mask.nonzero().squeeze(1), V, acc.itemsize):
        x = _gather(logits, rows, acc)
        y, block_scale = targets[rows], scale[rows]
        if whole_row:
            block_scale = torch.where((y >= 0) & (y < V), block_scale, math.nan)
        x.sub_(row_max[rows].unsqueeze(1)).exp_()
        _block_grad_(x, y, block_scale, log_sum[rows])
        _scatter(out, rows, x.to(out.dtype))
        del x


def row_nll_grad_(logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, *, with_correct: bool) -> Stats:
    """See ``ops._rows``. Works on views of the chunk itself where it already has the accumulation dtype."""
    C, V = logits.shape
    acc = acc_dtype(logits.dtype)
    stats = _empty_stats(C, acc, logits.device, with_correct)
    mask = targets != SKIP
    inert = ~mask | (scale == 0)
    scale = torch.where((targets >= 0) & (targets < V), scale, math.nan)
    size = max(1, BLOCK_BYTES // max(V * acc.itemsize, 1))
    for start in range(0, C, size):
        block = slice(start, start + size)
        view = logits[block]
        x = view.to(acc)  # the block itself when it is float32 or float64 already
        y = targets[block]
        nll, row_max, log_sum, target_logit, correct = _block_stats(x, y, with_correct)
        _block_grad_(x, y, scale[block], log_sum)
        if x is not view:
            view.copy_(x)
        view.masked_fill_(inert[block].unsqueeze(1), 0)
        for whole, part in zip(stats, (nll, row_max, log_sum, target_logit, correct), strict=True):
            if whole is not None and part is not None:
                whole[block] = part.masked_fill_(~mask[block], 0)
    return stats


def scale_(t: torch.Tensor, factor: torch.Tensor) -> None:
    """See ``ops._rows``; on a GPU the multiplication runs whatever the factor is, since looking would sync.

    A CPU multiplies by a 0-d factor at the factor's precision; a GPU would round it to the dtype of t first.
    """
    if not factor.is_cuda:
        if factor != 1:
            t.mul_(factor)
        return
    for block in torch.split(t, max(1, BLOCK_BYTES // max(t[0].nbytes, 1))) if t.numel() else ():
        block.copy_(block.to(factor.dtype).mul_(factor))
