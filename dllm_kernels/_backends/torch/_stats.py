"""The row statistics in plain torch (``_backends/_row_stats.py``): some active rows at a time, in buffers that stay in cache.

Threads share the blocks out, and what is one number a row is computed for all of them at once. Finding the active rows
(``nonzero``) syncs a GPU with its host; on CPU it costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from dllm_kernels._backends._row_stats import FARTHEST, Coefficients, StatsRequest, StatsResult
from dllm_kernels._backends._rows import SKIP
from dllm_kernels._backends.torch._blocks import (
    Buffers,
    RowGather,
    RowScatter,
    a_row_at_a_time,
    buffers_for,
    column_of,
    places,
    split,
    sum_rows,
    team,
    top,
    with_zeros_between,
)
from dllm_kernels._backends.torch._workers import share_out
from dllm_kernels._utils._dtypes import accum_dtype
from dllm_kernels._utils._transform import Transform, through_, transformed, with_slope


class _Room(NamedTuple):
    """A thread's buffers: its :class:`Buffers`, and some more blocks in the dtype of sums."""

    buffers: Buffers
    more: Sequence[torch.Tensor]


class _Mix(NamedTuple):
    """Of each row, ``[n, 1]``: a, b, and whether a is 0 beside a b that is not."""

    a: torch.Tensor
    b: torch.Tensor
    none: torch.Tensor

    @classmethod
    def of(cls, request: StatsRequest, rows: torch.Tensor | None) -> _Mix:
        """Of these rows; None: of all."""
        assert request.a is not None
        assert request.b is not None
        a, b = (t.unsqueeze(1) if rows is None else t[rows].unsqueeze(1) for t in (request.a, request.b))
        return cls(a, b, (a == 0) & (b > 0))

    def blocks(self, size: int) -> list[_Mix]:
        return [_Mix(*part) for part in zip(*(split(t, size) for t in self), strict=True)]

    @property
    def beside(self) -> torch.Tensor:
        """What p has to be divided by, with itself added, to be q."""
        return torch.where(self.b == 0, math.inf, self.a / self.b)


def _rooms(
    threads: int, size: int, V: int, like: torch.Tensor, more: int, *, narrow: bool, slope: bool = False
) -> list[_Room]:
    acc = accum_dtype(like.dtype)
    buffers = buffers_for(threads, size, V, like, wide=True, narrow=narrow, slope=slope)
    return [_Room(s, [torch.empty(size, V, dtype=acc, device=like.device) for _ in range(more)]) for s in buffers]


def _add_up_mix(
    p: torch.Tensor, log_p_sum: torch.Tensor | None, mix: _Mix, sums: Sums, spare: torch.Tensor, transform: Transform
) -> None:
    """F and W of a block; ``log_p_sum``: where a row of the block has no a."""
    skip, V = transform.skip_id, p.shape[1]
    torch.mul(p, mix.b, out=spare).add_(mix.a)
    if skip is not None:
        spare.select(1, skip).fill_(1)
        V -= 1
    sum_rows(spare.log_(), sums.mix)
    if sums.mix_weight is not None:
        torch.add(p, mix.beside, out=spare)
        sum_rows(torch.div(p, spare, out=spare), sums.mix_weight)
        sums.mix_weight.masked_fill_(mix.none, V)
    if log_p_sum is not None:
        assert sums.mix is not None
        sums.mix.copy_(torch.where(mix.none, log_p_sum + V * mix.b.log(), sums.mix))


def _log_p_sum(log_p: torch.Tensor, mix: _Mix, transform: Transform) -> torch.Tensor | None:
    """Where a row of a block has no a; the skipped column, which adds nothing, is 0 afterwards."""
    if transform.skip_id is not None:
        log_p.select(1, transform.skip_id).fill_(0)
    return sum_rows(log_p) if bool(mix.none.any()) else None


class Sums(NamedTuple):
    """What the blocks leave of each row; None where not asked for."""

    log_probs: torch.Tensor
    row_max: torch.Tensor | None
    best: torch.Tensor | None
    log_sum: torch.Tensor | None
    moment: torch.Tensor | None
    mix: torch.Tensor | None
    mix_weight: torch.Tensor | None

    @classmethod
    def empty(cls, n: int, like: torch.Tensor, request: StatsRequest) -> Sums:
        mix, acc = request.a is not None, accum_dtype(like.dtype)
        wanted = (
            request.lse or request.correct, request.correct, request.lse, request.entropy, mix, mix and request.gradients,
        )  # fmt: skip
        made = [
            torch.empty(n, 1, dtype=d, device=like.device) if w else None
            for d, w in zip((acc, torch.int64, *(acc,) * 4), wanted, strict=True)
        ]
        return cls(torch.empty(n, request.ids.shape[1], dtype=acc, device=like.device), *made)

    def find_largest(self, z: torch.Tensor) -> None:
        """The maxima of a block, and their columns."""
        if self.best is not None:
            torch.max(z, 1, keepdim=True, out=(self.row_max, self.best))  # type: ignore[arg-type]
        elif self.row_max is not None:
            torch.amax(z, 1, keepdim=True, out=self.row_max)

    def normalizer(self, log_sum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(M, log S); of a row, or a shard of it, that is all -inf, M - M is NaN and S is 0."""
        assert self.row_max is not None
        row_max = self.row_max.clamp(min=torch.finfo(self.row_max.dtype).min)
        return row_max, log_sum.masked_fill_(self.row_max == -math.inf, -math.inf)

    def blocks(self, size: int, count: int) -> list[Sums]:
        """Views of ``[size, 1]`` and ``[size, K]``."""
        parts = ([None] * count if t is None else split(t, size) for t in self)
        return [Sums(*part) for part in zip(*parts, strict=True)]


def _reduce(
    listed: RowGather, transform: Transform, block: torch.Tensor, sums: Sums, mix: _Mix | None, column: torch.Tensor, room: _Room
) -> None:  # fmt: skip
    """All sums of a block of rows."""
    wide = top(room.buffers.wide, block)
    z = transformed(listed.load(block, room.buffers), transform, wide)
    sums.find_largest(z)
    log_p = a_row_at_a_time(torch.log_softmax, z, wide)
    torch.gather(log_p, 1, column, out=sums.log_probs)
    if sums.log_sum is not None:  # the largest of (z - M) - log S is 0 - log S, to the bit
        torch.amax(log_p, 1, keepdim=True, out=sums.log_sum).neg_()
    if sums.moment is None and mix is None:
        return
    p = torch.exp(log_p, out=top(room.more[0], block))
    log_p_sum = None if mix is None else _log_p_sum(log_p, mix, transform)
    if sums.moment is not None:
        sum_rows(log_p.clamp_(min=FARTHEST).mul_(p), sums.moment)
    if mix is not None:
        _add_up_mix(p, log_p_sum, mix, sums, wide, transform)


def forward(logits: torch.Tensor, request: StatsRequest) -> StatsResult:
    """See ``_backends/_row_stats.py``."""
    B, L, V = logits.shape
    rows = places(request.active != SKIP)
    if rows.numel() == 0:
        return _nothing(request, accum_dtype(logits.dtype))
    acc, some = accum_dtype(logits.dtype), rows.numel() < B * L
    with_mix = request.a is not None
    listed, sums = RowGather(logits, rows), Sums.empty(rows.numel(), logits, request)
    ids = request.ids.index_select(0, rows) if some else request.ids
    column, inside = column_of(ids, V)
    threads, size = team(rows.numel(), V, acc, logits.device)
    columns = split(column, size)
    parts = sums.blocks(size, len(columns))
    mixes = _Mix.of(request, rows).blocks(size) if with_mix else [None] * len(parts)
    blocks = zip(listed.blocks(size), parts, mixes, columns, strict=True)
    rooms = _rooms(threads, size, V, logits, int(request.entropy or with_mix), narrow=not listed.together)
    share_out([partial(_reduce, listed, request.transform, *block) for block in blocks], rooms)
    found = _of_rows(sums)
    found.log_probs.masked_fill_(~inside, math.nan).masked_fill_(ids == SKIP, 0)
    if sums.best is not None:
        found = found._replace(correct=(sums.best.squeeze(1) == ids[:, 0]) & ~found.log_probs[:, 0].isnan())
    if not some:
        return found
    whole = _nothing(request, acc)
    for out, part in zip(whole, found, strict=True):
        if out is not None and part is not None:
            out.index_copy_(0, rows, part)
    return whole


def _nothing(request: StatsRequest, acc: torch.dtype) -> StatsResult:
    """Zeros, None where not asked for."""
    mix = request.a is not None

    def zeros(wanted: bool, dtype: torch.dtype = acc) -> Any:
        return request.active.new_zeros(request.active.shape, dtype=dtype) if wanted else None

    log_probs = request.ids.new_zeros(request.ids.shape, dtype=acc)
    entropy, part, correct = zeros(request.entropy), mix and request.gradients, zeros(request.correct, torch.bool)
    return StatsResult(log_probs, zeros(request.lse), zeros(request.lse), entropy, zeros(mix), zeros(part), correct)


def _of_rows(sums: Sums) -> StatsResult:
    """The statistics but for ``correct``."""
    row_max, log_sum = (None, None) if sums.log_sum is None else sums.normalizer(sums.log_sum)
    entropy = None if sums.moment is None else 0 - sums.moment
    of_rows = (row_max, log_sum, entropy, sums.mix, sums.mix_weight)
    return StatsResult(sums.log_probs, *(None if t is None else t.squeeze(1) for t in of_rows))


def mix(
    logits: torch.Tensor, request: StatsRequest, row_max: torch.Tensor, log_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``_backends/_row_stats.py``."""
    V = logits.shape[-1]
    rows = places(request.active != SKIP)
    wanted = (True, request.gradients)
    out = [torch.zeros(request.active.shape, dtype=row_max.dtype, device=logits.device) if w else None for w in wanted]
    if rows.numel():
        listed, sums = (
            RowGather(logits, rows),
            Sums.empty(rows.numel(), logits, request._replace(entropy=False, correct=False)),
        )
        threads, size = team(rows.numel(), V, row_max.dtype, logits.device)
        per_row = (split(t[rows].unsqueeze(1), size) for t in (row_max, log_sum))
        mixes = _Mix.of(request, rows).blocks(size)
        jobs = zip(listed.blocks(size), sums.blocks(size, len(mixes)), mixes, *per_row, strict=True)
        rooms = _rooms(threads, size, V, logits, 1, narrow=not listed.together)
        share_out([partial(_mix_block, listed, request.transform, *job) for job in jobs], rooms)
        for whole, part in zip(out, (sums.mix, sums.mix_weight), strict=True):
            if whole is not None and part is not None:
                whole.index_copy_(0, rows, part.squeeze(1))
    assert out[0] is not None
    return out[0], out[1]


def _mix_block(
    listed: RowGather, transform: Transform, block: torch.Tensor, sums: Sums, mix: _Mix, row_max: torch.Tensor,
    log_sum: torch.Tensor, room: _Room,
) -> None:  # fmt: skip
    wide = top(room.buffers.wide, block)
    log_p = torch.sub(transformed(listed.load(block, room.buffers), transform, wide), row_max, out=wide).sub_(log_sum)
    p = torch.exp(log_p, out=top(room.more[0], block))
    _add_up_mix(p, _log_p_sum(log_p, mix, transform), mix, sums, wide, transform)


class _Grad(NamedTuple):
    """What the gradient of a block needs: M, A - B log S and B, those of the mixture, and ids with their gradients.

    p (A + B log p) = p (``plain`` + ``of_log`` d), g_F q = ``of_mix`` p / (p + ``beside``). p is torch's softmax where the whole row
    is there, else e^d times ``over_sum``. ``column`` and ``of_ids`` are ``[n, K]``, all others ``[n, 1]``.
    """

    plain: torch.Tensor
    column: torch.Tensor
    of_ids: torch.Tensor
    row_max: torch.Tensor | None = None
    over_sum: torch.Tensor | None = None
    of_log: torch.Tensor | None = None
    of_mix: torch.Tensor | None = None
    beside: torch.Tensor | None = None
    none: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        c: Coefficients,
        request: StatsRequest,
        row_max: torch.Tensor,
        log_sum: torch.Tensor,
        rows: torch.Tensor | None,
        V: int,
    ) -> _Grad:
        """Of these rows; None: of all."""

        def taken(t: torch.Tensor) -> torch.Tensor:
            return t if rows is None else t.index_select(0, rows)

        ids, of_ids = taken(request.ids), taken(c.of_ids)
        column, inside = column_of(ids, V)
        grad = cls(taken(c.plain).unsqueeze(1), column, of_ids.masked_fill(~inside, 0))
        if not request.whole:
            grad = grad._replace(over_sum=torch.exp(-taken(log_sum)).unsqueeze(1))
        if not request.whole or c.of_log is not None:
            grad = grad._replace(row_max=taken(row_max).unsqueeze(1))
        if c.of_log is not None:
            of_log = taken(c.of_log).unsqueeze(1)
            grad = grad._replace(of_log=of_log, plain=grad.plain - of_log * taken(log_sum).unsqueeze(1))
        if c.of_mix is not None:
            mix = _Mix.of(request, rows)
            grad = grad._replace(of_mix=taken(c.of_mix).unsqueeze(1), beside=mix.beside, none=mix.none)
        return grad

    def blocks(self, size: int) -> list[_Grad]:
        count = -(-self.plain.shape[0] // size)
        parts = (split(t, size) if isinstance(t, torch.Tensor) else [t] * count for t in self)
        return [_Grad(*part) for part in zip(*parts, strict=True)]

    def made(self, z: torch.Tensor, out: torch.Tensor, *spare: torch.Tensor) -> torch.Tensor:
        """The gradient in the transformed logits z; written to ``out``, which may be z."""
        return self._dense(z, out, *spare).scatter_add_(1, self.column, self.of_ids)

    def _dense(self, z: torch.Tensor, out: torch.Tensor, *spare: torch.Tensor) -> torch.Tensor:
        """All but the ids."""
        p = self._p(z, spare[0] if spare else out)
        if self.of_log is None:
            grad = torch.mul(p, self.plain, out=out)
        else:
            d = torch.sub(z, self.row_max, out=out)  # type: ignore[arg-type]
            grad = torch.addcmul(self.plain, d.clamp_(min=FARTHEST), self.of_log, out=out).mul_(p)
        if self.of_mix is not None:
            q = p.div_(torch.add(p, self.beside, out=spare[1])).masked_fill_(self.none, 1)  # type: ignore[arg-type]
            grad.addcmul_(q, self.of_mix)
        return grad

    def _p(self, z: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.over_sum is None:
            return a_row_at_a_time(torch.softmax, z, out)
        return torch.sub(z, self.row_max, out=out).exp_().mul_(self.over_sum)  # type: ignore[arg-type]


def backward(
    logits: torch.Tensor,
    request: StatsRequest,
    c: Coefficients,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See ``_backends/_row_stats.py``."""
    V, acc = logits.shape[-1], accum_dtype(logits.dtype)
    rows = places(request.active != SKIP)
    threads, size = team(request.active.numel(), V, acc, logits.device)
    if rows.numel() == 0:
        out.zero_()
        return
    source, target = RowGather(logits, rows), with_zeros_between(out, rows, size)
    grad = _Grad.of(c, request, row_max, log_sum, None if rows.numel() == request.active.numel() else rows, V)
    blocks = zip(source.blocks(size), target.blocks(size), grad.blocks(size), strict=True)
    jobs = [partial(_grad_block, source, target, request, *block) for block in blocks]
    more = 2 if grad.of_mix is not None else int(grad.of_log is not None)
    caps = request.transform.softcap is not None and request.through
    in_place = source.together and target.together
    rooms = _rooms(threads, size + target.spare, V, logits, more, narrow=not in_place, slope=caps)
    share_out(jobs, rooms)


def _grad_block(
    source: RowGather, target: RowGather | RowScatter, request: StatsRequest, block: torch.Tensor, to: Any, grad: _Grad, room: _Room
) -> None:  # fmt: skip
    buffers, transform = room.buffers, request.transform
    loaded, wide = source.load(block, buffers), top(buffers.wide, block)
    if request.through:
        z, slope = with_slope(loaded, transform, wide, top(buffers.slope, block))
    else:
        z, slope = transformed(loaded, transform, wide), 1.0
    values = grad.made(z, target.room(to, buffers), *(top(t, block) for t in room.more))
    target.store(to, through_(values, slope, transform), buffers)
