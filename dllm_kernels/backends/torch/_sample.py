r"""Gumbel-max sampling of one token per row, in plain torch and NumPy (``rows/_primitives.py``).

    score_v = x_v - ln(-ln u_v),        x the transformed logits, u the uniform of the row and the column.

On a CPU few scores are computed, and only the high 16 bits of most uniforms are drawn. They give an n such that
``1 - u`` lies in [n 2^-16, (n + 1) 2^-16]. Because ``-ln u`` is at least 1 - u and increases with it,

    x_v - ln(-ln(1 - (n + 1) 2^-16)) <= score_v <= x_v - ln(n 2^-16).

The lower bound of one column with a large score excludes all columns with a smaller upper bound. Exact scores are
computed for the remaining columns, and for those with n = 0, and decide.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllm_kernels.backends.torch import _blocks
from dllm_kernels.backends.torch._workers import run_jobs
from dllm_kernels.corruption import _gumbel, _noise
from dllm_kernels.corruption._noise import Noise
from dllm_kernels.corruption._rules import Array, float64
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._transform import Transform
from dllm_kernels.rows._truncation import Truncation, only_near, only_prefix

# Ratio of the bytes of a row's draws and scores to the bytes of its logits, on devices other than a CPU.
_BYTES_OF_DRAWS = 16
# Expected number of columns per row whose n is among the smallest, so that their scores bound the largest one.
_RARE_COLUMNS = 32
ScoreAndColumn = tuple[Tensor, Tensor]


def sample(logits: Tensor, transform: Transform, noise: Noise | None) -> ScoreAndColumn:
    """See ``rows/_primitives.py``."""
    C, device = logits.shape[0], logits.device
    score = torch.full((C,), -math.inf, dtype=torch.float64, device=device)
    out = score, torch.zeros(C, dtype=torch.int64, device=device)
    source, size, buffers = _blocks_of(logits)
    parts = [None] * -(-C // size) if noise is None else _blocks.split_all(noise, size)
    candidates: list[Any] = [None] * len(parts)
    blocks = zip(source.blocks(size), parts, _blocks.split_all(out, size), range(len(parts)), strict=True)
    run_jobs([partial(_sample_block, source, transform, candidates, *block) for block in blocks], buffers)
    if noise is not None and logits.is_cpu:
        _write_best(noise, [(at * size, *out) for at, out in enumerate(candidates)], *(t.numpy() for t in out))
    return out


def _blocks_of(logits: Tensor) -> tuple[_blocks.RowGather, int, list[_blocks.Buffers]]:
    """Return (all rows, rows per block, buffers of each thread)."""
    (C, V), device = logits.shape, logits.device
    source = _blocks.RowGather(logits[None], _blocks.RowIndex(torch.arange(C, device=device), C, C, 0, True))
    columns = V if logits.is_cpu else V * _BYTES_OF_DRAWS
    threads, size = _blocks.partition(C, columns, accum_dtype(logits.dtype), logits.is_cpu)
    return source, size, _blocks.buffers_for(threads, size, logits)


def _sample_block(
    source: _blocks.RowGather, transform: Transform, candidates: list[Any], block: Tensor, noise: Noise | None,
    out: ScoreAndColumn, index: int, buffers: _blocks.Buffers,
) -> None:  # fmt: skip
    """Write score and column or, on a CPU with noise, list the candidate columns of :func:`_write_best`."""
    x, (score, ids) = _blocks.transformed_rows(source, block, transform, buffers)[0], out
    V = x.shape[1]
    if noise is not None and x.is_cpu:
        candidates[index] = _candidates(x, _noise.high_on_host(noise, V))
        return
    scores = x if noise is None else _scores(x.to(torch.float64), _noise.high(noise, V), _noise.low(noise, V))
    at = torch.from_numpy(np.argmax(x.numpy(), 1)) if x.is_cpu else scores.argmax(1)  # ten times as fast
    ids.copy_(at)
    score.copy_(scores.gather(1, at[:, None])[:, 0])


def _scores(x: Array, high: Array, low: Array) -> Array:
    """Compute scores from float64 logits and the bits of their uniforms, bitwise equal on every device."""
    u = (float64((high << 32) + low) + 0.5) * 2.0**-48
    return _gumbel.score(x, u)


def _candidates(logits: Tensor, high: Array) -> tuple[Array, Array, Array, Array]:
    """Return (row, column, logit, high bits) of each column that may have the largest score of its row; ``[R, V]``."""
    x, rare = logits.numpy(), -(-_RARE_COLUMNS * 65536 // logits.shape[1])
    first = x.argmax(1)
    with np.errstate(all="ignore"):  # a row without a distribution; n = 0
        least = _lower_bound(x[np.arange(len(x)), first], high[np.arange(len(x)), first])
        # No logarithm per column: n is small, or the logit is large enough for the smallest other n.
        small = np.divmod(np.flatnonzero(high >= max(65536 - rare, 0)), x.shape[1])
        np.maximum.at(least, small[0], _lower_bound(x[small], high[small]))
        enough = (least + math.log(rare * 2.0**-16)).astype(np.float32)
        large = np.divmod(np.flatnonzero(x >= enough[:, None]), x.shape[1])
        row, column = (np.concatenate(both) for both in zip(small, large, strict=True))
        x, high = x[row, column].astype(np.float64), high[row, column].astype(np.int64)
        keep = x - np.log((65535 - high) * 2.0**-16) >= least[row]
    return row[keep], column[keep], x[keep], high[keep]


def _lower_bound(x: Array, high: Array) -> Array:
    """Compute ``x - ln(-ln(1 - (n + 1) 2^-16))``, minus more than its rounding error; -inf for the largest n."""
    score = x - np.log(-np.log1p((high - 65536.0) * 2.0**-16))
    return score - 2.0**-20 * (1 + np.abs(score))


def _write_best(noise: Noise, candidates: list[tuple[Any, ...]], score: Array, ids: Array) -> None:
    """Write the largest score of each row and its column; the lowest column wins a tie."""
    row = np.concatenate([first + r for first, r, *_ in candidates])
    column, x, high = (np.concatenate(part) for part in list(zip(*candidates, strict=True))[2:])
    scores = _scores(x, high, _noise.low_of_on_host(noise, row, column))
    with np.errstate(invalid="ignore"):  # NaN, in a row without a distribution
        np.maximum.at(score, row, scores)
    best = scores == score[row]
    ids[row[best][::-1]] = column[best][::-1]  # the lowest is written last


def largest(logits: Tensor, k: int, transform: Transform) -> ScoreAndColumn:
    """See ``rows/_primitives.py``; for any device, without a sync."""
    (C, V), device = logits.shape, logits.device
    values = torch.empty(C, k, dtype=accum_dtype(logits.dtype), device=device)
    out = values, torch.empty(C, k, dtype=torch.int64, device=device)
    if C and k:
        source, size, buffers = _blocks_of(logits)
        width = math.isqrt(V // k)
        rest = torch.arange(V // width * width, V, device=device)
        blocks = zip(source.blocks(size), _blocks.split_all(out, size), strict=True)
        run_jobs([partial(_largest_block, source, transform, width, rest, *block) for block in blocks], buffers)
    return out


def _largest_block(
    source: _blocks.RowGather, transform: Transform, width: int, rest: Tensor, block: Tensor, out: ScoreAndColumn,
    buffers: _blocks.Buffers,
) -> None:  # fmt: skip
    x, (values, ids) = _blocks.transformed_rows(source, block, transform, buffers)[0], out
    best = _k_largest(x, values.shape[1], width, rest)
    values.copy_(best[0])
    ids.copy_(best[1])


def _k_largest(x: Tensor, k: int, width: int, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Select by value, and of equal values the lowest column, which ``torch.topk`` does not guarantee.

    Columns are grouped into tiles, and ``rest`` after them. The k tiles of largest maximum, of equal ones the first,
    contain every selected column. Any other tile comes after k columns with a value no smaller than its maximum.
    """
    (R, V), columns = x.shape, None
    if width > 1:
        tiles = x[:, : V - len(rest)].view(R, -1, width)
        chosen = tiles.amax(2).sort(dim=1, descending=True, stable=True).indices[:, :k].sort(1).values
        columns = (chosen[:, :, None] * width + torch.arange(width, device=x.device)).view(R, -1)
        columns = torch.cat([columns, rest.expand(R, -1)], 1)
        x = x.gather(1, columns)
    values, order = x.sort(dim=1, descending=True, stable=True)
    return values[:, :k], order[:, :k] if columns is None else columns.gather(1, order[:, :k])


def truncated(logits: Tensor, transform: Transform, truncation: Truncation) -> Tensor:
    """See ``rows/_primitives.py``; for any device, without a sync."""
    (C, V), device = logits.shape, logits.device
    out = torch.empty(C, V, dtype=accum_dtype(logits.dtype), device=device)
    if C:
        source, size, buffers = _blocks_of(logits)
        k = V if truncation.top_k is None else truncation.top_k
        width = math.isqrt(V // k)
        rest = torch.arange(V // width * width, V, device=device)
        blocks = zip(source.blocks(size), _blocks.split_all((out,), size), strict=True)
        run_jobs([partial(_truncated_block, source, transform, truncation, width, rest, *b) for b in blocks], buffers)
    return out


def _truncated_block(
    source: _blocks.RowGather, transform: Transform, truncation: Truncation, width: int, rest: Tensor, block: Tensor,
    out: tuple[Tensor], buffers: _blocks.Buffers,
) -> None:  # fmt: skip
    x = _blocks.transformed_rows(source, block, transform, buffers)[0]
    if truncation.sorts:
        k = x.shape[1] if truncation.top_k is None else truncation.top_k
        out[0].copy_(only_prefix(*_k_largest(x, k, width, rest), x.shape[1], truncation))
    elif truncation.min_p is not None:
        out[0].copy_(only_near(x, x.amax(1, keepdim=True), truncation.min_p))
