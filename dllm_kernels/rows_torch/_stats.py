"""The row statistics in plain torch (``base/_row_stats.py``): some active rows at a time, in buffers that stay in cache.

As in ``rows_torch/_nll.py``, threads share the blocks out, and what is one number a row is computed for all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from dllm_kernels.base._row_stats import FARTHEST, Coefficients, StatsRequest, StatsResult
from dllm_kernels.base._rows import SKIP
from dllm_kernels.base._transform import Transform, through_, transformed, with_slope
from dllm_kernels.rows_torch import _few
from dllm_kernels.rows_torch._blocks import (
    Listed,
    Space,
    Spread,
    a_row_at_a_time,
    acc_dtype,
    column_of,
    places,
    spaces_for,
    split,
    sum_rows,
    team,
    top,
    with_zeros_between,
)
from dllm_kernels.rows_torch._workers import share_out


class _Room(NamedTuple):
    """A thread's buffers: those of ``rows_torch/_nll.py``, and some more blocks in the dtype of sums."""

    space: Space
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

    def beside(self, row_sum: torch.Tensor) -> torch.Tensor:
        """What e^d has to be divided by, with itself added, to be q."""
        return torch.where(self.b == 0, math.inf, self.a * row_sum / self.b)


def _rooms(
    threads: int, size: int, V: int, like: torch.Tensor, more: int, *, narrow: bool, slope: bool = False
) -> list[_Room]:
    acc = acc_dtype(like.dtype)
    spaces = spaces_for(threads, size, V, like, wide=True, narrow=narrow, slope=slope)
    return [_Room(s, [torch.empty(size, V, dtype=acc, device=like.device) for _ in range(more)]) for s in spaces]


def _columns(V: int, transform: Transform) -> int:
    return V if transform.skip_id is None else V - 1


def _fill_skipped(t: torch.Tensor, transform: Transform, value: float) -> None:
    if transform.skip_id is not None:
        t.select(-1, transform.skip_id).fill_(value)


def _add_up_mix(
    e: torch.Tensor, d_sum: torch.Tensor | None, row_sum: torch.Tensor, mix: _Mix, sums: _Sums, spare: torch.Tensor,
    transform: Transform,
) -> None:  # fmt: skip
    """F and W of a block from its e^d; ``d_sum``: sums of d where a row of the block has no a."""
    V = _columns(e.shape[1], transform)
    ratio = mix.b / row_sum
    torch.mul(e, ratio, out=spare).add_(mix.a)
    _fill_skipped(spare, transform, 1)
    sum_rows(spare.log_(), sums.mix)
    if sums.mix_weight is not None:
        torch.add(e, mix.beside(row_sum), out=spare)
        sum_rows(torch.div(e, spare, out=spare), sums.mix_weight)
        sums.mix_weight.masked_fill_(mix.none, V)
    if d_sum is not None:
        assert sums.mix is not None
        sums.mix.copy_(torch.where(mix.none, d_sum + V * ratio.log(), sums.mix))


class _Sums(NamedTuple):
    """What the blocks leave of each row; None where not asked for."""

    row_max: torch.Tensor | None
    best: torch.Tensor | None
    log_sum: torch.Tensor | None
    row_sum: torch.Tensor | None
    moment: torch.Tensor | None
    mix: torch.Tensor | None
    mix_weight: torch.Tensor | None
    log_probs: torch.Tensor | None

    @classmethod
    def empty(cls, n: int, like: torch.Tensor, request: StatsRequest) -> _Sums:
        """A mixture needs e^d, and S by itself; else torch's log-softmax leaves the rest."""
        with_mix = request.a is not None
        wanted = (
            with_mix or request.lse or request.correct, request.correct, request.lse and not with_mix, with_mix, request.entropy,
            with_mix, with_mix and request.gradients,
        )  # fmt: skip
        acc = acc_dtype(like.dtype)
        dtypes = (acc, torch.int64, *(acc,) * 5)
        made = [
            torch.empty(n, 1, dtype=d, device=like.device) if w else None for d, w in zip(dtypes, wanted, strict=True)
        ]
        log_probs = None if with_mix else torch.empty(n, request.ids.shape[1], dtype=acc, device=like.device)
        return cls(*made, log_probs)  # type: ignore[call-arg]

    def blocks(self, size: int, count: int) -> list[_Sums]:
        """Views of ``[size, 1]`` and ``[size, K]``."""
        parts = ([None] * count if t is None else split(t, size) for t in self)
        return [_Sums(*part) for part in zip(*parts, strict=True)]


def _reduce(
    listed: Listed, transform: Transform, block: torch.Tensor, sums: _Sums, mix: _Mix | None, column: torch.Tensor, room: _Room
) -> None:  # fmt: skip
    """All sums of a block of rows."""
    wide = top(room.space.wide, block)
    z = transformed(listed.load(block, room.space), transform, wide)
    if sums.best is not None:
        torch.max(z, 1, keepdim=True, out=(sums.row_max, sums.best))  # type: ignore[arg-type]
    elif sums.row_max is not None:
        torch.amax(z, 1, keepdim=True, out=sums.row_max)
    if sums.log_probs is not None:
        log_p = a_row_at_a_time(torch.log_softmax, z, wide)
        torch.gather(log_p, 1, column, out=sums.log_probs)
        if sums.log_sum is not None:  # the largest of (z - M) - log S is 0 - log S, to the bit
            torch.amax(log_p, 1, keepdim=True, out=sums.log_sum).neg_()
        if sums.moment is not None:
            p = torch.exp(log_p, out=top(room.more[0], block))
            sum_rows(log_p.clamp_(min=FARTHEST).mul_(p), sums.moment)
        return
    assert mix is not None
    assert sums.row_sum is not None
    d = torch.sub(z, sums.row_max, out=wide)  # type: ignore[arg-type]
    e = torch.exp(d, out=top(room.more[0], block))
    sum_rows(e, sums.row_sum)
    _fill_skipped(d, transform, 0)
    d_sum = sum_rows(d) if bool(mix.none.any()) else None
    if sums.moment is not None:
        sum_rows(d.clamp_(min=FARTHEST).mul_(e), sums.moment)
    _add_up_mix(e, d_sum, sums.row_sum, mix, sums, d, transform)


def forward(logits: torch.Tensor, request: StatsRequest) -> StatsResult:
    """See ``base/_row_stats.py``."""
    if (few := _few.forward(logits, request)) is not None:
        return few
    B, L, V = logits.shape
    rows = places(request.marks != SKIP)
    if rows.numel() == 0:
        return _nothing(request, acc_dtype(logits.dtype))
    acc, some = acc_dtype(logits.dtype), rows.numel() < B * L
    with_mix = request.a is not None
    listed, sums = Listed(logits, rows), _Sums.empty(rows.numel(), logits, request)
    ids = request.ids.index_select(0, rows) if some else request.ids
    column, inside = column_of(ids, V)
    threads, size = team(rows.numel(), V, acc, logits.device)
    columns = split(column, size)
    parts = sums.blocks(size, len(columns))
    mixes = _Mix.of(request, rows).blocks(size) if with_mix else [None] * len(parts)
    blocks = zip(listed.blocks(size), parts, mixes, columns, strict=True)
    rooms = _rooms(threads, size, V, logits, int(request.entropy or with_mix), narrow=not listed.together)
    share_out([partial(_reduce, listed, request.transform, *block) for block in blocks], rooms)
    found = _with_mix(sums, listed, column, request.transform) if with_mix else _of_log_p(sums, request.lse)
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
        return request.marks.new_zeros(request.marks.shape, dtype=dtype) if wanted else None

    log_probs = request.ids.new_zeros(request.ids.shape, dtype=acc)
    entropy, part, correct = zeros(request.entropy), mix and request.gradients, zeros(request.correct, torch.bool)
    return StatsResult(log_probs, zeros(request.lse), zeros(request.lse), entropy, zeros(mix), zeros(part), correct)


def _with_mix(sums: _Sums, listed: Listed, column: torch.Tensor, transform: Transform) -> StatsResult:
    """From the sums of e^d and what the logits are in these columns."""
    assert sums.row_max is not None
    assert sums.row_sum is not None
    picked = listed.flat[listed.index.unsqueeze(1), column].to(sums.row_max.dtype)
    row_max, log_sum = _normalizer(sums.row_max, sums.row_sum.log())
    log_probs = (transformed(picked, transform.pointwise, picked) - row_max) - log_sum
    log_probs.masked_fill_(log_sum == -math.inf, math.nan)
    entropy = None if sums.moment is None else log_sum - sums.moment / sums.row_sum
    of_rows = (row_max, log_sum, entropy, sums.mix, sums.mix_weight)
    return StatsResult(log_probs, *(None if t is None else t.squeeze(1) for t in of_rows))


def _of_log_p(sums: _Sums, lse: bool) -> StatsResult:
    """From what log-softmax left."""
    assert sums.log_probs is not None
    row_max, log_sum = _normalizer(sums.row_max, sums.log_sum) if lse else (None, None)  # type: ignore[arg-type]
    entropy = None if sums.moment is None else 0 - sums.moment
    return StatsResult(sums.log_probs, *(None if t is None else t.squeeze(1) for t in (row_max, log_sum, entropy)))


def _normalizer(row_max: torch.Tensor, log_sum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """M and log S; of a row, or a shard of it, that is all -inf, M - M is NaN and S is 0."""
    nothing = row_max == -math.inf
    return row_max.clamp(min=torch.finfo(row_max.dtype).min), log_sum.masked_fill_(nothing, -math.inf)


def mix(
    logits: torch.Tensor, request: StatsRequest, row_max: torch.Tensor, log_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``base/_row_stats.py``."""
    V = logits.shape[-1]
    rows = places(request.marks != SKIP)
    wanted = (True, request.gradients)
    out = [torch.zeros(request.marks.shape, dtype=row_max.dtype, device=logits.device) if w else None for w in wanted]
    if rows.numel():
        listed, sums = (
            Listed(logits, rows),
            _Sums.empty(rows.numel(), logits, request._replace(entropy=False, correct=False)),
        )
        threads, size = team(rows.numel(), V, row_max.dtype, logits.device)
        per_row = (split(t[rows].unsqueeze(1), size) for t in (row_max, log_sum.exp()))
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
    listed: Listed, transform: Transform, block: torch.Tensor, sums: _Sums, mix: _Mix, row_max: torch.Tensor,
    row_sum: torch.Tensor, room: _Room,
) -> None:  # fmt: skip
    wide = top(room.space.wide, block)
    d = torch.sub(transformed(listed.load(block, room.space), transform, wide), row_max, out=wide)
    e = torch.exp(d, out=top(room.more[0], block))
    _fill_skipped(d, transform, 0)
    d_sum = sum_rows(d) if bool(mix.none.any()) else None
    _add_up_mix(e, d_sum, row_sum, mix, sums, d, transform)


class _Grad(NamedTuple):
    """What the gradient of a block needs: M, A - B log S and B, those of the mixture, and ids with their gradients.

    p (A + B log p) = p (``plain`` + ``of_log`` d), g_F q = ``of_mix`` e^d / (e^d + ``beside``). Where p is torch's softmax, since
    the whole row is there and nothing else needs e^d, ``softmax``; else both are over S, as factors of e^d. ``column`` and
    ``of_ids`` are ``[n, K]``, all others ``[n, 1]``.
    """

    plain: torch.Tensor
    column: torch.Tensor
    of_ids: torch.Tensor
    row_max: torch.Tensor | None = None
    of_log: torch.Tensor | None = None
    of_mix: torch.Tensor | None = None
    beside: torch.Tensor | None = None
    none: torch.Tensor | None = None
    softmax: bool = True

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
        plain = taken(c.plain).unsqueeze(1)
        column, inside = column_of(ids, V)
        of_ids = of_ids.masked_fill(~inside, 0)
        if request.whole and c.of_log is None and c.of_mix is None:  # all that most losses need
            return cls(plain, column, of_ids)
        row_max, log_sum = (taken(t).unsqueeze(1) for t in (row_max, log_sum))
        of_log = None if c.of_log is None else taken(c.of_log).unsqueeze(1)
        if of_log is not None:
            plain = plain - of_log * log_sum
        grad = cls(plain, column, of_ids, row_max, of_log)
        if request.whole and c.of_mix is None:
            return grad
        over_sum = torch.exp(-log_sum)
        grad = grad._replace(
            plain=plain * over_sum, of_log=None if of_log is None else of_log * over_sum, softmax=False
        )
        if c.of_mix is None:
            return grad
        mix = _Mix.of(request, rows)
        return grad._replace(of_mix=taken(c.of_mix).unsqueeze(1), beside=mix.beside(log_sum.exp()), none=mix.none)

    def blocks(self, size: int) -> list[_Grad]:
        count = -(-self.plain.shape[0] // size)
        parts = (split(t, size) if isinstance(t, torch.Tensor) else [t] * count for t in self)
        return [_Grad(*part) for part in zip(*parts, strict=True)]

    def made(self, z: torch.Tensor, out: torch.Tensor, *spare: torch.Tensor) -> torch.Tensor:
        """The gradient in the transformed logits z; written to ``out``, which may be z."""
        return self._dense(z, out, *spare).scatter_add_(1, self.column, self.of_ids)

    def _dense(self, z: torch.Tensor, out: torch.Tensor, *spare: torch.Tensor) -> torch.Tensor:
        """All but the ids."""
        if self.softmax and self.of_log is None:
            return a_row_at_a_time(torch.softmax, z, out).mul_(self.plain)
        assert self.row_max is not None
        p = a_row_at_a_time(torch.softmax, z, spare[0]) if self.softmax else None
        d = torch.sub(z, self.row_max, out=out)
        if self.of_log is None and self.of_mix is None:
            return d.exp_().mul_(self.plain)
        e = torch.exp(d, out=spare[0]) if p is None else p
        if self.of_log is None:
            grad = torch.mul(e, self.plain, out=out)
        else:
            grad = torch.addcmul(self.plain, d.clamp_(min=FARTHEST), self.of_log, out=out).mul_(e)
        if self.of_mix is None:
            return grad
        assert self.beside is not None
        assert self.none is not None
        q = e.div_(torch.add(e, self.beside, out=spare[1])).masked_fill_(self.none, 1)
        return grad.addcmul_(q, self.of_mix)


def backward(
    logits: torch.Tensor,
    request: StatsRequest,
    c: Coefficients,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See ``base/_row_stats.py``."""
    V, acc = logits.shape[-1], acc_dtype(logits.dtype)
    rows = places(request.marks != SKIP)
    threads, size = team(request.marks.numel(), V, acc, logits.device)
    if rows.numel() == 0:
        out.zero_()
        return
    source, target = Listed(logits, rows), with_zeros_between(out, rows, size)
    grad = _Grad.of(c, request, row_max, log_sum, None if rows.numel() == request.marks.numel() else rows, V)
    blocks = zip(source.blocks(size), target.blocks(size), grad.blocks(size), strict=True)
    jobs = [partial(_grad_block, source, target, request, *block) for block in blocks]
    more = 2 if grad.of_mix is not None else int(grad.of_log is not None)
    caps = request.transform.softcap is not None and request.through
    in_place = source.together and target.together
    rooms = _rooms(threads, size + target.spare, V, logits, more, narrow=not in_place, slope=caps)
    share_out(jobs, rooms)


def _grad_block(
    source: Listed, target: Listed | Spread, request: StatsRequest, block: torch.Tensor, to: Any, grad: _Grad, room: _Room
) -> None:  # fmt: skip
    space, transform = room.space, request.transform
    loaded, wide = source.load(block, space), top(space.wide, block)
    if request.through:
        z, slope = with_slope(loaded, transform, wide, top(space.slope, block))
    else:
        z, slope = transformed(loaded, transform, wide), 1.0
    values = grad.made(z, target.room(to, space), *(top(t, block) for t in room.more))
    target.store(to, through_(values, slope, transform), space)
