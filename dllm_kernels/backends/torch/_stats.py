"""Row statistics in plain torch (``rows/_stats_interface.py``): blocks of active rows, in buffers that stay in cache.

Threads share the blocks. Per-row values are computed for all active rows at once.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels.backends.torch import _blocks
from dllm_kernels.backends.torch._workers import run_jobs
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import IGNORE, column_of
from dllm_kernels.rows._stats_interface import FARTHEST, NO_FLAGS, Coefficients, Norms, StatsRequest, StatsResult
from dllm_kernels.rows._transform import Transform, through_


class _Mix(NamedTuple):
    """The mixture of each row.

    Attributes:
        a: ``[n, 1]``.
        b: ``[n, 1]``.
        zero_a: ``[n, 1]``, True if a is 0 and b is not.
        any_zero_a: False if ``zero_a`` is known to be False everywhere, which is tested on a CPU only.
    """

    a: Tensor
    b: Tensor
    zero_a: Tensor
    any_zero_a: bool

    @classmethod
    def of(cls, request: StatsRequest, rows: _blocks.RowIndex) -> _Mix:
        """Take the mixture of these rows."""
        a, b = (rows.take(t).unsqueeze(1) for t in (request.a, request.b))  # type: ignore[arg-type]
        zero_a = (a == 0) & (b > 0)
        return cls(a, b, zero_a, not zero_a.is_cpu or bool(zero_a.any()))

    @property
    def ratio(self) -> Tensor:
        """The x in q = p / (p + x): a / b, or inf if b is 0."""
        return torch.where(self.b == 0, math.inf, self.a / self.b)


def _add_mix(p: Tensor, log_p_sum: Tensor | None, mix: _Mix, sums: Sums, spare: Tensor, transform: Transform) -> None:
    """Write F and W of a block. ``log_p_sum`` is needed if ``mix.any_zero_a``."""
    transform.fill_skipped_(torch.mul(p, mix.b, out=spare).add_(mix.a), 1)
    V = transform.choices(p.shape[1])
    _blocks.sum_rows(spare.log_(), sums.mix)
    if sums.mix_weight is not None:
        torch.add(p, mix.ratio, out=spare)
        _blocks.sum_rows(torch.div(p, spare, out=spare), sums.mix_weight)
        sums.mix_weight.masked_fill_(mix.zero_a, V)
    if log_p_sum is not None:
        sums.mix.copy_(torch.where(mix.zero_a, log_p_sum + V * mix.b.log(), sums.mix))


def _log_p_sum(log_p: Tensor, mix: _Mix, transform: Transform) -> Tensor | None:
    """Sum log p if ``mix.any_zero_a``, otherwise return None. Sets the skipped column to 0, its share of every sum."""
    transform.fill_skipped_(log_p, 0)
    return _blocks.sum_rows(log_p) if mix.any_zero_a else None


class Sums(NamedTuple):
    """Per-row accumulators; None if not requested."""

    log_probs: Tensor
    row_max: Any = None
    best: Any = None
    log_sum: Any = None
    moment: Any = None
    mix: Any = None
    mix_weight: Any = None

    @classmethod
    def empty(cls, n: int, like: Tensor, request: StatsRequest) -> Sums:
        acc, mix, argmax = accum_dtype(like.dtype), request.a is not None, request.correct or request.best
        new = partial(torch.empty, dtype=acc, device=like.device)
        return cls(
            new(n, request.ids.shape[1]), row_max=new(n, 1) if request.lse or argmax else None,
            best=new(n, 1, dtype=torch.int64) if argmax else None, log_sum=new(n, 1) if request.lse else None,
            moment=new(n, 1) if request.flags.entropy else None, mix=new(n, 1) if mix else None,
            mix_weight=new(n, 1) if mix and request.gradients else None,
        )  # fmt: skip

    def write_max(self, z: Tensor) -> None:
        """Write the maxima of a block, and their columns."""
        if self.best is not None and z.is_cpu:  # torch.max with indices is not vectorised on a CPU
            self.best.copy_(torch.from_numpy(z.numpy().argmax(1)).unsqueeze(1))
            torch.gather(z, 1, self.best, out=self.row_max)
        elif self.best is not None:
            torch.max(z, 1, keepdim=True, out=(self.row_max, self.best))
        elif self.row_max is not None:
            torch.amax(z, 1, keepdim=True, out=self.row_max)

    def argmax(self, transform: Transform) -> Tensor:
        """Return the argmax; the lowest column that is not skipped if the softmax is NaN."""
        return self.best.masked_fill(~self.row_max.isfinite(), transform.first_column).squeeze(1)  # type: ignore[no-any-return]

    def normalizer(self) -> tuple[Tensor, Tensor]:
        """Return (M, log S); if all logits of a row, or of its shard, are -inf: M the lowest finite number, S = 0."""
        row_max = self.row_max.clamp(min=torch.finfo(self.row_max.dtype).min)
        return row_max, self.log_sum.masked_fill_(self.row_max == -math.inf, -math.inf)


def _reduce(
    source: _blocks.RowGather, transform: Transform, block: Tensor, sums: Sums, mix: _Mix | None, column: Tensor,
    buffers: _blocks.Buffers,
) -> None:  # fmt: skip
    """Compute all sums of a block of rows."""
    z, _, wide = _blocks.transformed_rows(source, block, transform, buffers)
    sums.write_max(z)
    log_p = _blocks.rowwise(torch.log_softmax, z, wide)
    torch.gather(log_p, 1, column, out=sums.log_probs)
    if sums.log_sum is not None:  # the largest of (z - M) - log S is 0 - log S, to the bit
        torch.amax(log_p, 1, keepdim=True, out=sums.log_sum).neg_()
    if not buffers.more:  # nothing else is requested
        return
    # Takes two thirds of the time of torch.exp.
    p = _blocks.rowwise(torch.softmax, log_p, _blocks.top(buffers.more[0], block))
    log_p_sum = None if mix is None else _log_p_sum(log_p, mix, transform)
    if sums.moment is not None:
        _blocks.sum_rows(log_p.clamp_(min=FARTHEST).mul_(p), sums.moment)
    if mix is not None:
        _add_mix(p, log_p_sum, mix, sums, wide, transform)


def forward(logits: Tensor, request: StatsRequest) -> StatsResult:
    """See ``rows/_stats_interface.py``."""
    V, acc, with_mix = logits.shape[-1], accum_dtype(logits.dtype), request.a is not None
    rows = _blocks.RowIndex.of(request.targets, IGNORE, request.weights)
    sums, ids = Sums.empty(rows.n, logits, request), rows.take(request.ids)
    column, out_of_range = column_of(ids, V)
    if rows.n:
        source, more = _blocks.RowGather(logits, rows), int(any(request.flags) or with_mix)
        threads, size = _blocks.partition(rows.n, V, acc, logits.is_cpu)
        buffers = _blocks.buffers_for(threads, size, logits, narrow=not source.in_place, more=more)
        columns = _blocks.split(column, size)
        mixes = _blocks.split_all(_Mix.of(request, rows), size) if with_mix else [None] * len(columns)
        blocks = zip(source.blocks(size), _blocks.split_all(sums, size), mixes, columns, strict=True)
        run_jobs([partial(_reduce, source, request.transform, *block) for block in blocks], buffers)
    row_max, log_sum = (None, None) if sums.log_sum is None else sums.normalizer()
    fields = {
        "row_max": row_max, "log_sum": log_sum, "entropy": None if sums.moment is None else 0 - sums.moment,
        "mix": sums.mix, "mix_weight": sums.mix_weight,
    }  # fmt: skip
    result = StatsResult(sums.log_probs, **{k: None if t is None else t.squeeze(1) for k, t in fields.items()})
    if out_of_range is not None:
        result.log_probs.masked_fill_(out_of_range, math.nan).masked_fill_(ids == IGNORE, 0)
    if request.correct:
        result = result._replace(correct=(sums.best.squeeze(1) == ids[:, 0]) & ~result.log_probs[:, 0].isnan())
    best = sums.argmax(request.transform) if request.best else None
    if rows.whole:
        return result._replace(best=best)
    result = StatsResult._make(None if t is None else rows.put(t) for t in result)
    return result if best is None else result._replace(best=rows.put(best, IGNORE))


def mix(logits: Tensor, request: StatsRequest, norms: Norms) -> tuple[Tensor, Tensor | None]:
    """See ``rows/_stats_interface.py``."""
    V, acc = logits.shape[-1], accum_dtype(logits.dtype)
    rows = _blocks.RowIndex.of(request.targets, IGNORE, request.weights)
    sums = Sums.empty(rows.n, logits, request._replace(flags=NO_FLAGS, correct=False, best=False))
    if rows.n:
        source, normalizer = _blocks.RowGather(logits, rows), [rows.take(t).unsqueeze(1) for t in norms]
        threads, size = _blocks.partition(rows.n, V, acc, logits.is_cpu)
        buffers = _blocks.buffers_for(threads, size, logits, narrow=not source.in_place, more=1)
        parts = (_blocks.split_all(t, size) for t in (sums, _Mix.of(request, rows), tuple(normalizer)))
        blocks = zip(source.blocks(size), *parts, strict=True)
        run_jobs([partial(_mix_block, source, request.transform, *block) for block in blocks], buffers)
    return rows.put(sums.mix.squeeze(1)), None if sums.mix_weight is None else rows.put(sums.mix_weight.squeeze(1))


def _mix_block(
    source: _blocks.RowGather, transform: Transform, block: Tensor, sums: Sums, mix: _Mix,
    normalizer: tuple[Tensor, Tensor], buffers: _blocks.Buffers,
) -> None:  # fmt: skip
    z, _, wide = _blocks.transformed_rows(source, block, transform, buffers)
    row_max, log_sum = normalizer
    log_p = torch.sub(z, row_max, out=wide).sub_(log_sum)
    p = torch.exp(log_p, out=_blocks.top(buffers.more[0], block))
    _add_mix(p, _log_p_sum(log_p, mix, transform), mix, sums, wide, transform)


class _Grad(NamedTuple):
    """Per-row terms of the gradient: M, A - B log S and B, the terms of the mixture, and the ids with their gradients.

    p (A + B log p) = p (``p_coef`` + ``p_logp_coef`` d), and g_F q = ``mix_coef`` p / (p + ``ratio``). p is
    ``torch.softmax`` for whole rows, and e^d times ``inv_sum`` for a part of a split row. ``column`` and ``grad_ids``
    are ``[n, K]``, all others ``[n, 1]``.
    """

    p_coef: Tensor
    column: Tensor
    grad_ids: Tensor
    row_max: Any = None
    inv_sum: Any = None
    p_logp_coef: Any = None
    mix_coef: Any = None
    ratio: Any = None
    zero_a: Any = None

    @classmethod
    def of(cls, c: Coefficients, request: StatsRequest, norms: Norms, rows: _blocks.RowIndex, V: int) -> _Grad:
        """Take the terms of these rows."""
        row_max, log_sum = norms
        column, out_of_range = column_of(rows.take(request.ids), V)
        grad_ids, p_coef = rows.take(c.grad_ids), rows.take(c.p_coef).unsqueeze(1)
        if out_of_range is not None:
            if request.whole:
                p_coef = p_coef.masked_fill((out_of_range & (grad_ids != 0)).any(1, keepdim=True), math.nan)
            grad_ids = grad_ids.masked_fill(out_of_range, 0)
        grad = cls(p_coef, column, grad_ids)
        if not request.whole:
            grad = grad._replace(inv_sum=torch.exp(-rows.take(log_sum)).unsqueeze(1))
        if not request.whole or c.p_logp_coef is not None:
            grad = grad._replace(row_max=rows.take(row_max).unsqueeze(1))
        if c.p_logp_coef is not None:
            p_logp_coef = rows.take(c.p_logp_coef).unsqueeze(1)
            p_coef = grad.p_coef - p_logp_coef * rows.take(log_sum).unsqueeze(1)
            grad = grad._replace(p_logp_coef=p_logp_coef, p_coef=p_coef)
        if c.mix_coef is not None:
            mix = _Mix.of(request, rows)
            grad = grad._replace(mix_coef=rows.take(c.mix_coef).unsqueeze(1), ratio=mix.ratio, zero_a=mix.zero_a)
        return grad

    def write(self, z: Tensor, out: Tensor, *spare: Tensor) -> Tensor:
        """Write the gradient with respect to the transformed logits z to ``out``, which may be z."""
        p = spare[0] if spare else out
        if self.inv_sum is None:
            _blocks.rowwise(torch.softmax, z, p)
        else:
            torch.sub(z, self.row_max, out=p).exp_().mul_(self.inv_sum)
        if self.p_logp_coef is None:
            grad = torch.mul(p, self.p_coef, out=out)
        else:
            d = torch.sub(z, self.row_max, out=out)
            grad = torch.addcmul(self.p_coef, d.clamp_(min=FARTHEST), self.p_logp_coef, out=out).mul_(p)
        if self.mix_coef is not None:
            q = p.div_(torch.add(p, self.ratio, out=spare[1])).masked_fill_(self.zero_a, 1)
            grad.addcmul_(q, self.mix_coef)
        return grad.scatter_add_(1, self.column, self.grad_ids)


def backward(logits: Tensor, request: StatsRequest, c: Coefficients, norms: Norms, out: Tensor) -> None:
    """See ``rows/_stats_interface.py``."""
    V, acc = logits.shape[-1], accum_dtype(logits.dtype)
    rows = _blocks.RowIndex.of(request.targets, IGNORE, request.weights)
    if not rows.n:
        out.zero_()
        return
    grad = _Grad.of(c, request, norms, rows, V)
    source, caps = _blocks.RowGather(logits, rows), request.transform.softcap is not None and request.through_transform
    more = 2 if grad.mix_coef is not None else int(grad.p_logp_coef is not None)
    threads, size = _blocks.partition(rows.n, V, acc, logits.is_cpu)
    target = _blocks.with_zeros_between(out, rows, size)
    buffers = _blocks.buffers_for(
        threads, size, logits, narrow=not (source.in_place and target.in_place), slope=caps, more=more,
        padded=isinstance(target, _blocks.RowScatter),
    )  # fmt: skip
    blocks = zip(source.blocks(size), target.blocks(size), _blocks.split_all(grad, size), strict=True)
    run_jobs([partial(_grad_block, source, target, request, *block) for block in blocks], buffers)


def _grad_block(
    source: _blocks.RowGather, target: _blocks.RowGather | _blocks.RowScatter, request: StatsRequest, block: Tensor,
    to: Any, grad: _Grad, buffers: _blocks.Buffers,
) -> None:  # fmt: skip
    z, slope, wide = _blocks.transformed_rows(source, block, request.transform, buffers)
    values = grad.write(z, target.output_buffer(to, wide), *(_blocks.top(t, block) for t in buffers.more))
    target.store(to, through_(values, slope if request.through_transform else 1.0, request.transform), buffers)
