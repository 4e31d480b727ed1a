"""The row statistics in plain torch (``base/_row_stats.py``): some active rows at a time, in buffers that stay in cache.

As in ``rows_torch/_nll.py``, threads share the blocks out, and what is one number a row is computed for all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from dllm_kernels.base._row_stats import FARTHEST, Ask, Coefficients, Found
from dllm_kernels.base._rows import SKIP
from dllm_kernels.base._transform import NO_TRANSFORM, Transform, through_, transformed, with_slope
from dllm_kernels.rows_torch._blocks import (
    FEW,
    GRAIN,
    Listed,
    Space,
    Spread,
    a_row_at_a_time,
    acc_dtype,
    column_of,
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
    def of(cls, ask: Ask, rows: torch.Tensor | None) -> _Mix:
        """Of these rows; None: of all."""
        assert ask.a is not None
        assert ask.b is not None
        a, b = (t.unsqueeze(1) if rows is None else t[rows].unsqueeze(1) for t in (ask.a, ask.b))
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

    row_max: torch.Tensor
    best: torch.Tensor | None
    log_sum: torch.Tensor | None
    row_sum: torch.Tensor | None
    moment: torch.Tensor | None
    mix: torch.Tensor | None
    mix_weight: torch.Tensor | None

    @classmethod
    def empty(
        cls, n: int, like: torch.Tensor, *, best: bool = False, log_sum: bool = False, row_sum: bool = False,
        moment: bool = False, mix: bool = False, mix_weight: bool = False,
    ) -> _Sums:  # fmt: skip
        acc = acc_dtype(like.dtype)
        wanted, dtypes = (True, best, log_sum, row_sum, moment, mix, mix_weight), (acc, torch.int64, *(acc,) * 5)
        made = (torch.empty(n, dtype=d, device=like.device) if w else None for d, w in zip(dtypes, wanted, strict=True))
        return cls(*made)  # type: ignore[arg-type]

    def blocks(self, size: int) -> list[_Sums]:
        """Views of ``[size, 1]``."""
        count = -(-self.row_max.shape[0] // size)
        parts = ([None] * count if t is None else split(t.unsqueeze(1), size) for t in self)
        return [_Sums(*part) for part in zip(*parts, strict=True)]


def _reduce(
    listed: Listed, transform: Transform, block: torch.Tensor, sums: _Sums, mix: _Mix | None, room: _Room
) -> None:
    """All sums of a block of rows."""
    wide = top(room.space.wide, block)
    z = transformed(listed.load(block, room.space), transform, wide)
    if sums.best is None:
        torch.amax(z, 1, keepdim=True, out=sums.row_max)
    else:
        torch.max(z, 1, keepdim=True, out=(sums.row_max, sums.best))
    if sums.log_sum is not None:  # the largest of (z - M) - log S is 0 - log S, to the bit
        log_p = a_row_at_a_time(torch.log_softmax, z, wide)
        torch.amax(log_p, 1, keepdim=True, out=sums.log_sum).neg_()
        if sums.moment is not None:
            p = torch.exp(log_p, out=top(room.more[0], block))
            sum_rows(log_p.clamp_(min=FARTHEST).mul_(p), sums.moment)
        return
    d = torch.sub(z, sums.row_max, out=wide)
    assert sums.row_sum is not None
    e = torch.exp(d, out=top(room.more[0], block))
    sum_rows(e, sums.row_sum)
    _fill_skipped(d, transform, 0)
    d_sum = sum_rows(d) if mix is not None and bool(mix.none.any()) else None
    if sums.moment is not None:
        sum_rows(d.clamp_(min=FARTHEST).mul_(e), sums.moment)
    if mix is not None:
        _add_up_mix(e, d_sum, sums.row_sum, mix, sums, d, transform)


def forward(logits: torch.Tensor, ask: Ask) -> Found:
    """See ``base/_row_stats.py``."""
    found_at_once = _forward_at_once(logits, ask) if _is_few(logits, ask) else None
    if found_at_once is not None:
        return found_at_once
    B, L, V = logits.shape
    rows = (ask.marks != SKIP).nonzero().squeeze(1)
    whole = _nothing(ask, acc_dtype(logits.dtype))
    if rows.numel() == 0:
        return whole
    acc = acc_dtype(logits.dtype)
    with_mix = ask.a is not None
    listed, sums = Listed(logits, rows), _Sums.empty(
        rows.numel(), logits, best=ask.correct, log_sum=not with_mix, row_sum=with_mix, moment=ask.entropy,
        mix=with_mix, mix_weight=with_mix and ask.gradients,
    )  # fmt: skip
    threads, size = team(rows.numel(), V, acc, logits.device)
    mix = _Mix.of(ask, rows) if with_mix else None
    parts = sums.blocks(size)
    mixes = [None] * len(parts) if mix is None else mix.blocks(size)
    blocks = zip(listed.blocks(size), parts, mixes, strict=True)
    rooms = _rooms(threads, size, V, logits, int(ask.entropy or with_mix), narrow=not listed.together)
    share_out([partial(_reduce, listed, ask.transform, *block) for block in blocks], rooms)
    ids = ask.ids[rows]
    column, inside = column_of(ids, V)
    picked = _at(listed, column).to(acc)
    picked = transformed(picked, ask.transform.pointwise, picked)
    found = _finish(sums, ids, picked.masked_fill_(~inside, math.nan))
    if rows.numel() == B * L:
        return found
    for out, part in zip(whole, found, strict=True):
        if out is not None and part is not None:
            out.index_copy_(0, rows, part)
    return whole


def _nothing(ask: Ask, acc: torch.dtype) -> Found:
    """Zeros, None where not asked for."""
    mix = ask.a is not None

    def zeros(wanted: bool = True, dtype: torch.dtype = acc) -> Any:
        return ask.marks.new_zeros(ask.marks.shape, dtype=dtype) if wanted else None

    log_probs = ask.ids.new_zeros(ask.ids.shape, dtype=acc)
    rows = (zeros(), zeros(), zeros(ask.entropy), zeros(mix), zeros(mix and ask.gradients))
    return Found(log_probs, *rows, zeros(ask.correct, torch.bool))


def _at(listed: Listed, columns: torch.Tensor) -> torch.Tensor:
    """Entries ``[n, K]``, at so many columns of each row."""
    return listed.flat[listed.index.unsqueeze(1), columns]


def _finish(sums: _Sums, ids: torch.Tensor, picked: torch.Tensor) -> Found:
    """From what the blocks left and the logits of the ids."""
    nothing = sums.row_max == -math.inf  # -inf + inf is NaN; such a row, or shard of a row, adds up to 0
    log_sum = (sums.row_sum.log() if sums.log_sum is None else sums.log_sum).masked_fill_(nothing, -math.inf)  # type: ignore[union-attr]
    row_max = sums.row_max.clamp(min=torch.finfo(sums.row_max.dtype).min)
    log_probs = ((picked - row_max.unsqueeze(1)) - log_sum.unsqueeze(1)).masked_fill_(nothing.unsqueeze(1), math.nan)
    correct = None if sums.best is None else (sums.best == ids[:, 0]) & ~log_probs[:, 0].isnan()
    entropy = None if sums.moment is None else _entropy(sums, log_sum)
    return Found(log_probs.masked_fill_(ids == SKIP, 0), row_max, log_sum, entropy, sums.mix, sums.mix_weight, correct)


def _entropy(sums: _Sums, log_sum: torch.Tensor) -> torch.Tensor:
    """From the sum of p log p, or of e^d d."""
    assert sums.moment is not None
    return 0 - sums.moment if sums.row_sum is None else log_sum - sums.moment / sums.row_sum


def mix(
    logits: torch.Tensor, ask: Ask, row_max: torch.Tensor, log_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See ``base/_row_stats.py``."""
    V = logits.shape[-1]
    rows = (ask.marks != SKIP).nonzero().squeeze(1)
    wanted = (True, ask.gradients)
    out = [torch.zeros(ask.marks.shape, dtype=row_max.dtype, device=logits.device) if w else None for w in wanted]
    if rows.numel():
        listed, sums = Listed(logits, rows), _Sums.empty(rows.numel(), logits, mix=True, mix_weight=ask.gradients)
        threads, size = team(rows.numel(), V, row_max.dtype, logits.device)
        per_row = (split(t[rows].unsqueeze(1), size) for t in (row_max, log_sum.exp()))
        jobs = zip(listed.blocks(size), sums.blocks(size), _Mix.of(ask, rows).blocks(size), *per_row, strict=True)
        rooms = _rooms(threads, size, V, logits, 1, narrow=not listed.together)
        share_out([partial(_mix_block, listed, ask.transform, *job) for job in jobs], rooms)
        for whole, part in zip(out, (sums.mix, sums.mix_weight), strict=True):
            if whole is not None and part is not None:
                whole.index_copy_(0, rows, part)
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
        cls, c: Coefficients, ask: Ask, row_max: torch.Tensor, log_sum: torch.Tensor, rows: torch.Tensor | None, V: int
    ) -> _Grad:
        """Of these rows; None: of all."""

        def taken(t: torch.Tensor) -> torch.Tensor:
            return t if rows is None else t.index_select(0, rows)

        ids, of_ids = taken(ask.ids), taken(c.of_ids)
        plain = taken(c.plain).unsqueeze(1)
        column, inside = column_of(ids, V)
        of_ids = of_ids.masked_fill(~inside, 0)
        if ask.whole and c.of_log is None and c.of_mix is None:  # all that most losses need
            return cls(plain, column, of_ids)
        row_max, log_sum = (taken(t).unsqueeze(1) for t in (row_max, log_sum))
        of_log = None if c.of_log is None else taken(c.of_log).unsqueeze(1)
        if of_log is not None:
            plain = plain - of_log * log_sum
        grad = cls(plain, column, of_ids, row_max, of_log)
        if ask.whole and c.of_mix is None:
            return grad
        over_sum = torch.exp(-log_sum)
        grad = grad._replace(
            plain=plain * over_sum, of_log=None if of_log is None else of_log * over_sum, softmax=False
        )
        if c.of_mix is None:
            return grad
        mix = _Mix.of(ask, rows)
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
    logits: torch.Tensor, ask: Ask, c: Coefficients, row_max: torch.Tensor, log_sum: torch.Tensor, out: torch.Tensor
) -> None:
    """See ``base/_row_stats.py``."""
    if ask.whole and out.is_contiguous() and _is_few(logits, ask):
        _backward_at_once(logits, ask, c, row_max, log_sum, out)
        return
    V, acc = logits.shape[-1], acc_dtype(logits.dtype)
    rows = (ask.marks != SKIP).nonzero().squeeze(1)
    threads, size = team(ask.marks.numel(), V, acc, logits.device)
    if rows.numel() == 0:
        out.zero_()
        return
    source, target = Listed(logits, rows), with_zeros_between(out, rows, size)
    grad = _Grad.of(c, ask, row_max, log_sum, None if rows.numel() == ask.marks.numel() else rows, V)
    blocks = zip(source.blocks(size), target.blocks(size), grad.blocks(size), strict=True)
    jobs = [partial(_grad_block, source, target, ask.transform, *block) for block in blocks]
    more = 2 if grad.of_mix is not None else int(grad.of_log is not None)
    caps = ask.transform.softcap is not None
    in_place = source.together and target.together
    rooms = _rooms(threads, size + target.spare, V, logits, more, narrow=not in_place, slope=caps)
    share_out(jobs, rooms)


def _grad_block(
    source: Listed, target: Listed | Spread, transform: Transform, block: torch.Tensor, to: Any, grad: _Grad, room: _Room
) -> None:  # fmt: skip
    space = room.space
    z, slope = with_slope(source.load(block, space), transform, top(space.wide, block), top(space.slope, block))
    values = grad.made(z, target.room(to, space), *(top(t, block) for t in room.more))
    target.store(to, through_(values, slope, transform), space)


# Few numbers: what a call costs is then the number of operations, so these are all rows at once, in the caller's thread, with
# no buffers and nothing done for what is not there. The arithmetic is that of the blocks: which way a row goes follows the size
# of its batch, and its numbers must not.


def _is_few(logits: torch.Tensor, ask: Ask) -> bool:
    """Whether a call is small and asks for nothing unusual; more than one core waits for the others from ``GRAIN`` on."""
    most = FEW if torch.get_num_threads() == 1 else GRAIN
    return (
        logits.numel() <= most and logits.is_cpu and logits.is_contiguous() and ask.a is None and not ask.correct
        and ask.transform == NO_TRANSFORM
    )  # fmt: skip


def _listed_few(logits: torch.Tensor, ask: Ask) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The active rows in the dtype of sums, which may be memory of the logits, and which they are: None for all."""
    flat = logits.detach().view(-1, logits.shape[-1])
    rows = (ask.marks != SKIP).nonzero().squeeze(1)
    if rows.numel() == flat.shape[0]:
        return flat.to(acc_dtype(flat.dtype)), None
    return flat.index_select(0, rows).to(acc_dtype(flat.dtype)), rows


def _forward_at_once(logits: torch.Tensor, ask: Ask) -> Found | None:
    """None where something is out of the ordinary: an id that no column has, a log-probability that is not finite."""
    z, rows = _listed_few(logits, ask)
    ids = ask.ids if rows is None else ask.ids.index_select(0, rows)
    if ids.numel() == 0:
        return None
    least, most = torch.aminmax(ids)
    if least.item() < 0 or most.item() >= z.shape[1]:
        return None
    row_max, log_p = z.amax(1, keepdim=True), torch.log_softmax(z, 1)
    log_sum = log_p.amax(1, keepdim=True).neg_()
    entropy = 0 - sum_rows(log_p.exp().mul_(log_p.clamp_(min=FARTHEST))) if ask.entropy else None
    log_probs = (z.gather(1, ids) - row_max).sub_(log_sum)
    if not math.isfinite(log_probs.sum().item()):
        return None
    found = [log_probs, *(None if t is None else t.squeeze(1) for t in (row_max, log_sum, entropy))]
    if rows is not None:
        N = ask.marks.shape[0]
        found = [None if t is None else t.new_zeros(N, *t.shape[1:]).index_copy_(0, rows, t) for t in found]
    return Found(*found)  # type: ignore[arg-type]


def _backward_at_once(
    logits: torch.Tensor, ask: Ask, c: Coefficients, row_max: torch.Tensor, log_sum: torch.Tensor, out: torch.Tensor
) -> None:
    z, rows = _listed_few(logits, ask)
    n, V = z.shape
    if n == 0:
        out.zero_()
        return
    grad = _Grad.of(c, ask, row_max, log_sum, rows, V)
    made = torch.empty(n + (rows is not None), V, dtype=z.dtype, device=z.device)
    grad.made(z, made[:n], *(() if grad.of_log is None else (torch.empty_like(z),)))
    if rows is None:
        out.view(n, V).copy_(made)
        return
    made[n].zero_()
    place = torch.full((ask.marks.shape[0],), n, device=z.device).index_copy_(0, rows, torch.arange(n, device=z.device))
    torch.index_select(made.to(out.dtype), 0, place, out=out.view(-1, V))
