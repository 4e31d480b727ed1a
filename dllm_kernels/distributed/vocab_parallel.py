r"""Row primitives for rows whose vocabulary is split over ranks; neither the logits nor the head are ever gathered.

Rank r holds the columns [start_r, start_{r+1}) of every row and reduces them to a few numbers
(``rows/_stats_interface.py``):

- the maximum M_r, and the sum S_r = sum exp(x - M_r),
- the distance of each id's logit from M_r, 0 if another rank holds the id,
- the argmax of these columns.

One all-gather gives every rank

    M = max_r M_r,      S = sum_r S_r exp(M_r - M),      log p_k = (x_k - M) - log S,

and the gradient is local. The argmax of the whole row is that of the lowest rank with M_r = M, because the lowest index
wins a tie.

:class:`ShardPrimitives` implements the row primitives (``rows/_primitives.py``) on top of those of a backend. All code
above the row primitives therefore works on a split vocabulary unchanged. For the NLL each rank sends 12 bytes per row,
16 with the argmax or its match, and twice as many for float64.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels.corruption._noise import Noise
from dllm_kernels.distributed import _divergence
from dllm_kernels.distributed._layout import VocabShard
from dllm_kernels.rows._chain_rule import NLLOfStats
from dllm_kernels.rows._divergence import DivergenceRequest, DivergenceResult, SavedStats
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import IGNORE, NLL
from dllm_kernels.rows._primitives import RowPrimitives
from dllm_kernels.rows._stats_interface import (
    Coefficients,
    Combined,
    Norms,
    StatsPrimitives,
    StatsRequest,
    StatsResult,
    Upstream,
)
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform, transformed
from dllm_kernels.rows._truncation import Truncation, only_near, only_prefix


class ShardPrimitives(NLLOfStats, RowPrimitives):
    """Row primitives for rows that are split over the shard's group, from those of whole rows."""

    def __init__(self, shard: VocabShard, local: RowPrimitives) -> None:
        self.shard, self.local, self.total = shard, local, shard.total
        self.stats = _ShardStats(shard, local.stats)
        self.add_parts, self.local_ids = shard.add_parts, shard.local_ids
        self.part_of = functools.partial(_divergence.part_of, shard)

    def nll_and_grad_(self, logits: Tensor, targets: Tensor, scale: Tensor, **options: Any) -> NLL:
        """See ``rows/_primitives.py``."""
        out, transform = self.nll(logits[None], targets, **options), options.get("transform", NO_TRANSFORM)
        self.nll_grad(logits[None], targets, scale, *out[1:3], logits[None], transform=transform)
        return out

    def scale_(self, t: Tensor, factor: Tensor) -> None:
        """See ``rows/_primitives.py``."""
        self.local.scale_(t, factor)

    def divergence(self, logits: Tensor, request: DivergenceRequest, *, with_grad: bool) -> DivergenceResult:
        """See ``rows/_divergence.py``."""
        return _divergence.divergence(self.shard, logits, request, with_grad=with_grad)

    def divergence_grad(self, logits: Tensor, request: DivergenceRequest, saved: SavedStats, out: Tensor) -> None:
        """See ``rows/_divergence.py``."""
        _divergence.divergence_grad(self.shard, logits, request, saved, out)

    def row_norms(self, logits: Tensor, transform: Transform, skip: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """See ``rows/_divergence.py``."""
        return _divergence.row_norms(self.shard, self.local.row_norms, logits, transform, skip, start)

    def sample(self, logits: Tensor, transform: Transform, noise: Noise | None, /) -> tuple[Tensor, Tensor]:
        """Select the best column of all ranks from the best of each, 16 bytes per row; the lowest rank wins a tie."""
        shard = self.shard
        if noise is not None:
            noise = noise._replace(first=shard.start)
        best = logits.new_full((len(logits), 2), -math.inf, dtype=torch.float64)
        if shard.size:
            score, ids = self.local.sample(logits, shard.local_transform(transform), noise)
            best = torch.stack([score, (ids + shard.start).to(torch.float64)], 1)
        score, ids = shard.gather(best).unbind(-1)
        winner = score.nan_to_num(nan=math.inf).argmax(0, keepdim=True)
        return score.gather(0, winner)[0], ids.gather(0, winner)[0].to(torch.int64)

    def largest(self, logits: Tensor, k: int, transform: Transform, /) -> tuple[Tensor, Tensor]:
        """Merge the k largest of each rank, sorted by value, then by column.

        A stable sort suffices for the columns, because they ascend with the ranks.
        """
        shard = self.shard
        local_k = min(k, shard.size)
        best = logits.new_full((len(logits), k, 2), -math.inf, dtype=torch.float64)
        if local_k:
            values, ids = self.local.largest(logits, local_k, shard.local_transform(transform))
            best[:, :local_k] = torch.stack([values.to(torch.float64), (ids + shard.start).to(torch.float64)], 2)
        values, ids = shard.gather(best.flatten(1)).view(-1, *best.shape).transpose(0, 1).flatten(1, 2).unbind(-1)
        # A rank with fewer than k columns leaves entries without a column (id < 0), which are sorted to the end.
        order = values.masked_fill(ids < 0, math.nan).neg().sort(dim=1, stable=True).indices[:, :k]
        return values.gather(1, order).to(accum_dtype(logits.dtype)), ids.gather(1, order).to(torch.int64)

    def truncated(self, logits: Tensor, transform: Transform, truncation: Truncation, /) -> Tensor:
        """Keep the columns of this rank that lie in the support of the whole row.

        Every rank finds the support from the ``top_k`` largest of all ranks, or from the largest if only min-p
        truncates.
        """
        shard = self.shard
        values, ids = self.largest(logits, truncation.top_k or 1, transform)
        if truncation.sorts:
            columns = shard.local_ids(ids)
            columns = columns.masked_fill(columns == IGNORE, shard.size)  # dropped
            return only_prefix(values, columns, shard.size + 1, truncation)[:, : shard.size]
        assert truncation.min_p is not None
        x = logits.to(values.dtype, copy=True)
        return only_near(transformed(x, shard.local_transform(transform), x), values, truncation.min_p)


def _local_request(shard: VocabShard, request: StatsRequest) -> StatsRequest:
    """Restrict a request to the columns of the shard; an id of another shard becomes ``IGNORE``."""
    ids, transform = shard.local_ids(request.ids), shard.local_transform(request.transform)
    return request._replace(ids=ids, transform=transform, whole=False)


class _ShardStats(NamedTuple):
    """Row statistics of rows that are split over the shard's group, from those of whole rows."""

    shard: VocabShard
    local: StatsPrimitives

    def forward(self, logits: Tensor, request: StatsRequest) -> StatsResult:
        """All-gather the statistics of each shard and combine them; the mixture takes one more all-reduce.

        Each shard's statistics treat its columns as a whole distribution. The shard has the share
        w_r = S_r e^{M_r - M} / S of its row, so that H = sum_r w_r (H_r - log w_r).
        """
        shard, argmax = self.shard, request.correct or request.best
        narrowed = _local_request(shard, request)._replace(a=None, b=None, correct=False, best=argmax)
        shard_stats = self.local.forward(logits, narrowed) if shard.size else _empty_stats(narrowed, logits.dtype)
        owned = narrowed.ids != IGNORE
        from_max = torch.where(owned, shard_stats.log_probs + shard_stats.log_sum.unsqueeze(1), 0.0)
        from_max = from_max.masked_fill(owned & (shard_stats.log_sum == -math.inf).unsqueeze(1), -math.inf)
        parts = {"max": shard_stats.row_max, "sum": shard_stats.log_sum.exp()}
        parts |= {name: getattr(shard_stats, name) for name in request.flags.requested}
        if shard_stats.best is not None:  # as bits, because a float32 holds no integer above 2**24 exactly
            bits = torch.int64 if from_max.dtype == torch.float64 else torch.int32
            parts["best"] = (shard_stats.best + shard.start).to(bits).view(from_max.dtype)
        part = torch.cat([torch.stack([*parts.values()], 1), from_max], 1)
        columns = torch.split(shard.gather(part), [1] * len(parts) + [request.ids.shape[1]], -1)
        maxima, sums, from_max = columns[0], columns[1], columns[-1]
        row_max, log_sum, log_probs = _combine_ids(shard, request, maxima, sums, from_max)
        gathered = {name: t.squeeze(-1) for name, t in zip(parts, columns, strict=False)}
        log_share = torch.log(gathered["sum"]) + (gathered["max"] - row_max) - log_sum
        inactive, flagged, correct, best = request.targets == IGNORE, {}, None, None
        if request.flags.entropy:
            shares = torch.where(log_share == -math.inf, 0.0, log_share.exp() * (gathered["entropy"] - log_share))
            flagged["entropy"] = shares.sum(0).masked_fill(inactive, 0)
        if argmax:
            # A shard of nothing but -inf has no maximum.
            first = (maxima.masked_fill(sums == 0, -math.inf).squeeze(-1) == row_max).to(torch.int64).argmax(0)
            best = gathered["best"].view(bits).to(torch.int64).gather(0, first.unsqueeze(0)).squeeze(0)
            best = best.masked_fill(~(log_sum > -math.inf), request.transform.first_column)
            correct = (best == request.ids[:, 0]) & ~log_probs[:, 0].isnan() & ~inactive if request.correct else None
            best = best.masked_fill_(inactive, IGNORE) if request.best else None
        row_max, log_sum = row_max.masked_fill(inactive, 0), log_sum.masked_fill(inactive, 0)
        F, W = (None, None) if request.a is None else self.mix(logits, request, (row_max, log_sum))
        log_probs = log_probs.masked_fill((request.ids == IGNORE) | inactive.unsqueeze(1), 0)
        return StatsResult(log_probs, row_max, log_sum, mix=F, mix_weight=W, correct=correct, best=best, **flagged)

    def mix(self, logits: Tensor, request: StatsRequest, norms: Norms) -> tuple[Tensor, Tensor | None]:
        """Compute (F, W) of whole rows with one all-reduce."""
        narrowed = _local_request(self.shard, request)
        if self.shard.size:
            parts = torch.stack([t for t in self.local.mix(logits, narrowed, norms) if t is not None])
        else:
            parts = norms[0].new_zeros(1 + request.gradients, request.targets.shape[0])
        F, *W = self.shard.add_parts(parts).unbind()
        return F, W[0] if W else None

    def coefficients(self, request: StatsRequest, result: StatsResult, upstream: Upstream) -> Combined:
        """See ``rows/_stats_interface.py``."""
        return self.local.coefficients(request, result, upstream)

    def backward(self, logits: Tensor, request: StatsRequest, c: Coefficients, norms: Norms, out: Tensor) -> None:
        """Compute the gradient of this rank's columns, without communication."""
        if self.shard.size:
            self.local.backward(logits, _local_request(self.shard, request), c, norms, out)


def _empty_stats(request: StatsRequest, dtype: torch.dtype) -> StatsResult:
    """Return the neutral result of a shard without columns."""
    acc = accum_dtype(dtype)
    zero = torch.zeros(request.targets.shape, dtype=acc, device=request.targets.device)
    lowest, none = zero + torch.finfo(acc).min, zero - math.inf
    best, flagged = zero.to(torch.int64) if request.best else None, dict.fromkeys(request.flags.requested, zero)
    return StatsResult(zero.new_zeros(request.ids.shape), lowest, none, best=best, **flagged)


def _combine_ids(
    shard: VocabShard, request: StatsRequest, maxima: Tensor, sums: Tensor, from_max: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (M, log S, log p) of whole rows.

    Computed from M and S of each shard, both ``[ranks, N, 1]``, and the distance of each id from the M of its shard.
    """
    row_max = maxima.amax(0)
    row_sum = (sums * torch.exp(maxima - row_max)).sum(0)
    rank = torch.arange(maxima.shape[0], device=maxima.device).view(-1, 1, 1)
    owned = torch.div(request.ids, shard.step, rounding_mode="floor") == rank
    distance = (from_max + torch.where(owned, maxima - row_max, 0.0)).sum(0)
    out_of_range = ~shard.in_vocabulary(request.ids) | (row_sum == 0)
    return row_max.squeeze(1), row_sum.log().squeeze(1), (distance - row_sum.log()).masked_fill(out_of_range, math.nan)
