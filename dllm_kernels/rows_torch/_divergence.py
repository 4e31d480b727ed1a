"""The divergence of rows to a teacher's in plain torch (``base/_divergence.py``): a few rows at a time, in buffers that stay in cache.

A kind is a :class:`Kind`: column functions whose sums it needs, column functions that its gradient is made of, and what one row
makes of the sums. All kinds of a recipe share p, q and what they have in common, so that a sum of kinds is one pass.

torch's ``log_softmax`` followed by ``exp`` takes twice as long as ``softmax``; log p is the logits less two numbers a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from dllm_kernels.base._divergence import NO_HYPER, TIE, Hyper, Recipe
from dllm_kernels.base._rows import SKIP
from dllm_kernels.base._transform import NO_TRANSFORM, Transform, through_, transformed, with_slope
from dllm_kernels.rows_torch._blocks import (
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

Tensor = torch.Tensor
# Columns among which the largest is looked for first: torch finds where it is at a tenth of the speed at which it finds it.
TILE = 256
# Buffers of a block's size that are in use at a time, by which a block is the smaller.
BUFFERS = 4


class Columns(NamedTuple):
    """Of a block of rows ``[R, V]``: p, q and their logarithms, where a kind needs these.

    ``careful``: whether a logarithm may be infinite, so that a product with it is NaN where the probability is 0.
    """

    p: Tensor
    q: Tensor
    log_p: Tensor | None
    log_q: Tensor | None
    careful: bool = False

    def times(self, e: Tensor, x: Tensor) -> Tensor:
        """``e x`` over x; 0 where the probability e is."""
        x.mul_(e)
        return x.masked_fill_(e == 0, 0) if self.careful else x


class Numbers(NamedTuple):
    """Of a block of rows, ``[R, 1]``.

    Attributes:
        alpha: a.
        lam_alpha: what lam is made from.
        at_best: -log p at the teacher's argmax.
        at_target: -log p at the target, 0 where there is none.
        on: 1, 0 where there is no target, NaN for one that no column has.
    """

    alpha: Tensor
    lam_alpha: Tensor
    at_best: Tensor | None = None
    at_target: Tensor | None = None
    on: Tensor | None = None


class Feature(NamedTuple):
    """A function of a column: (columns, hyper, room) -> ``[R, V]``, mostly in the room.

    ``logs``: whether it reads log p or log q; ``hyper``: whether it reads the hyperparameters.
    """

    of: Callable[[Columns, Hyper, Tensor], Tensor]
    logs: bool = False
    hyper: bool = False


def _difference(c: Columns, _: Hyper, out: Tensor) -> Tensor:
    return torch.sub(c.p, c.q, out=out)


def _below(c: Columns, _: Hyper, out: Tensor) -> Tensor:
    """``p [p <= q]``."""
    return torch.mul(c.q, TIE, out=out).ge_(c.p).mul_(c.p)


def _forward_kl(c: Columns, _: Hyper, out: Tensor) -> Tensor:
    return c.times(c.q, torch.sub(c.log_q, c.log_p, out=out))  # type: ignore[arg-type]


def _reverse_kl(c: Columns, _: Hyper, out: Tensor) -> Tensor:
    return c.times(c.p, torch.sub(c.log_p, c.log_q, out=out))  # type: ignore[arg-type]


def _cross_entropy(c: Columns, _: Hyper, out: Tensor) -> Tensor:
    return c.times(c.q, torch.neg(c.log_p, out=out))  # type: ignore[arg-type]


def _log_mean(c: Columns, h: Hyper, out: Tensor) -> Tensor:
    """``log m``, ``m = p + beta (q - p)``: p itself where q is."""
    m = torch.lerp(c.p, c.q, h[0], out=out)
    return m.clamp_(min=torch.finfo(m.dtype).tiny).log_()  # where it is 0 so are p and q


def _student_to_mean(c: Columns, h: Hyper, out: Tensor) -> Tensor:
    return c.times(c.p, torch.sub(c.log_p, _log_mean(c, h, out), out=out))  # type: ignore[arg-type]


def _teacher_to_mean(c: Columns, h: Hyper, out: Tensor) -> Tensor:
    return c.times(c.q, torch.sub(c.log_q, _log_mean(c, h, out), out=out))  # type: ignore[arg-type]


STUDENT = Feature(lambda c, h, out: c.p)
DIFFERENCE = Feature(_difference)
BELOW = Feature(_below)
FORWARD_KL = Feature(_forward_kl, logs=True)
REVERSE_KL = Feature(_reverse_kl, logs=True)
CROSS_ENTROPY = Feature(_cross_entropy, logs=True)
STUDENT_TO_MEAN = Feature(_student_to_mean, logs=True, hyper=True)
TEACHER_TO_MEAN = Feature(_teacher_to_mean, logs=True, hyper=True)


def _sum(X: Sequence[Tensor], n: Numbers, h: Hyper) -> tuple[Tensor, tuple[Any, ...]]:
    return X[0], (1.0,)


def _rkl(X: Sequence[Tensor], n: Numbers, h: Hyper) -> tuple[Tensor, tuple[Any, ...]]:
    return X[0], (1.0, -X[0])


def _jsd(X: Sequence[Tensor], n: Numbers, h: Hyper) -> tuple[Tensor, tuple[Any, ...]]:
    of_p, of_q = X
    rest = 1 - h[0]
    return h[0] * of_q + rest * of_p, (rest, -rest * of_p)


def _tv(X: Sequence[Tensor], n: Numbers, h: Hyper) -> tuple[Tensor, tuple[Any, ...]]:
    return 1 - n.alpha, (X[0], -1.0)


def _nla(X: Sequence[Tensor], n: Numbers, h: Hyper) -> tuple[Tensor, tuple[Any, ...]]:
    over = torch.where(n.alpha < h[0], 0.0, 1 / n.alpha)
    value = torch.where(n.alpha < h[0], h[0], n.alpha).log().neg()  # a maximum would hide a NaN
    return value, (X[0] * over, -over)


def _lk(X: Sequence[Tensor], n: Numbers, h: Hyper) -> tuple[Tensor, tuple[Any, ...]]:
    base, below = X
    lam = h[1] * torch.exp(-h[0] * n.lam_alpha)
    return lam * base + (1 - lam) * (1 - n.alpha), (lam, (1 - lam) * below, lam - 1)


def _at_best(X: Sequence[Tensor], n: Numbers, h: Hyper) -> tuple[Any, tuple[Any, ...]]:
    return n.at_best, (1.0,)


def _at_target(X: Sequence[Tensor], n: Numbers, h: Hyper) -> tuple[Any, tuple[Any, ...]]:
    return n.at_target, (n.on,)


class Kind(NamedTuple):
    """A kind of divergence.

    Attributes:
        sums: whose sums over a row it needs.
        gradient: what its gradient is made of.
        row: (sums, numbers, hyper) -> value, and what each part of the gradient is multiplied by.
        minus: "best" or "target": the gradient has -1 more in that column.
    """

    sums: tuple[Feature, ...]
    gradient: tuple[Feature, ...]
    row: Callable[[Sequence[Tensor], Numbers, Hyper], tuple[Any, tuple[Any, ...]]]
    minus: str = ""


KINDS = {
    "kl": Kind((FORWARD_KL,), (DIFFERENCE,), _sum),
    "rkl": Kind((REVERSE_KL,), (REVERSE_KL, STUDENT), _rkl),
    "jsd": Kind((STUDENT_TO_MEAN, TEACHER_TO_MEAN), (STUDENT_TO_MEAN, STUDENT), _jsd),
    "tv": Kind((BELOW,), (STUDENT, BELOW), _tv),
    "nla": Kind((BELOW,), (STUDENT, BELOW), _nla),
    "lk": Kind((FORWARD_KL, BELOW), (DIFFERENCE, STUDENT, BELOW), _lk),
    "lk_soft_ce": Kind((CROSS_ENTROPY, BELOW), (DIFFERENCE, STUDENT, BELOW), _lk),
    "soft_ce": Kind((CROSS_ENTROPY,), (DIFFERENCE,), _sum),
    "teacher_ce": Kind((), (STUDENT,), _at_best, "best"),
    "ce": Kind((), (STUDENT,), _at_target, "target"),
}
Key = tuple[Feature, Hyper | None]


class Coefficients(NamedTuple):
    """What a block's gradient is made of, ``[R, 1]``: for each of the features, and at the teacher's argmax, at the target."""

    of: list[Tensor]
    best: Tensor | None
    target: Tensor | None


class Program:
    """A recipe as this path works on it: each feature once, whatever number of kinds have it."""

    def __init__(self, recipe: Recipe) -> None:
        self.parts = [(KINDS[part.kind], part.coefficient, part.hyper) for part in recipe.parts]
        self.mean_alpha = recipe.mean_alpha
        self.sums = list(dict.fromkeys(_key(f, h) for kind, _, h in self.parts for f in kind.sums))
        self.gradient = list(dict.fromkeys(_key(f, h) for kind, _, h in self.parts for f in kind.gradient))
        self.kept = [key for key in self.sums if key in self.gradient]
        self.logs = any(feature.logs for feature, _ in (*self.sums, *self.gradient))
        self.best, self.target = (any(kind.minus == m for kind, _, _ in self.parts) for m in ("best", "target"))

    @property
    def buffers(self) -> int:
        """Blocks in the dtype of sums to work in: p, q, their logarithms, one to work in, and what is kept."""
        return 2 + 2 * self.logs + 1 + len(self.kept)

    def summed(self, c: Columns, room: Sequence[Tensor]) -> list[Tensor]:
        """The sum of minima, and that of each feature, ``[R, 1]``; those of the gradient stay in the room."""
        work, *kept = room
        found = [sum_rows(torch.minimum(c.p, c.q, out=work))]
        for feature, hyper in self.sums:
            out = kept[self.kept.index((feature, hyper))] if (feature, hyper) in self.kept else work
            found.append(sum_rows(feature.of(c, hyper or NO_HYPER, out)))
        return found

    def rows(self, sums: Sequence[Tensor], n: Numbers, w: Tensor) -> tuple[Tensor, Coefficients]:
        """(value, coefficients times the weight w) of rows, ``[R, 1]``."""
        of_key = dict(zip(self.sums, sums, strict=True))
        value = n.alpha * 0  # NaN where a row of either side has no distribution, which comparisons would hide
        w = w + value
        of: dict[Key, Tensor] = {}
        minus: dict[str, Tensor] = {}
        for kind, coefficient, h in self.parts:
            of_row, factors = kind.row([of_key[_key(f, h)] for f in kind.sums], n, h)
            value = value + coefficient * of_row
            here = [coefficient * factor * w for factor in factors]
            for feature, c in zip(kind.gradient, here, strict=True):
                key = _key(feature, h)
                of[key] = of[key] + c if key in of else c
            if kind.minus:
                minus[kind.minus] = here[0]
        return value, Coefficients([of[key] for key in self.gradient], minus.get("best"), minus.get("target"))

    def made(self, c: Columns, room: Sequence[Tensor], coefficients: Coefficients, out: Tensor) -> Tensor:
        """The gradient in the transformed logits but for single columns, in ``out``, which is no memory of the room."""
        work, *kept = room
        for i, (key, factor) in enumerate(zip(self.gradient, coefficients.of, strict=True)):
            feature, hyper = key
            t = kept[self.kept.index(key)] if key in self.kept else feature.of(c, hyper or NO_HYPER, work)
            if i == 0:
                torch.mul(t, factor, out=out)
            else:
                out.addcmul_(t, factor)
        return out


def _key(feature: Feature, hyper: Hyper) -> Key:
    return feature, hyper if feature.hyper else None


class Side(NamedTuple):
    """The student's rows or the teacher's: where they lie, what they go through."""

    rows: Listed
    transform: Transform


class Row(NamedTuple):
    """What there is of each row beside its logits, and what is found of it, ``[n, 1]``; below in blocks."""

    weight: Tensor
    lost: Tensor | None
    target: Tensor | None
    value: Tensor
    alpha: Tensor
    agree: Tensor

    def blocks(self, size: int) -> list[Row]:
        count = -(-self.value.shape[0] // size)
        parts = ([None] * count if t is None else split(t, size) for t in self)
        return [Row(*part) for part in zip(*parts, strict=True)]


class Room(NamedTuple):
    """A thread's buffers: the student's, the teacher's, and blocks to work in."""

    student: Space
    teacher: Space
    more: Sequence[Tensor]


def divergence(
    logits: Tensor, teacher: Tensor, weights: Tensor, recipe: Recipe, *, teacher_rows: Tensor | None = None,
    targets: Tensor | None = None, mean_alpha: Tensor | None = None, transform: Transform = NO_TRANSFORM,
    teacher_transform: Transform = NO_TRANSFORM, with_grad: bool, out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``base/_divergence.py``."""
    N, V, acc = weights.shape[0], logits.shape[-1], acc_dtype(logits.dtype)
    rows = (weights != 0).nonzero().squeeze(1)
    value, alpha = (torch.zeros(N, dtype=acc, device=logits.device) for _ in range(2))
    agree = torch.zeros(N, dtype=torch.bool, device=logits.device)
    out = logits if out is None else out
    if rows.numel() == 0:
        if with_grad:
            out.zero_()
        return value, alpha, agree
    program = Program(recipe)
    n, everything = rows.numel(), rows.numel() == N
    student = Side(Listed(logits, rows), transform)
    its, lost = _teacher_rows(teacher, rows, teacher_rows)
    found = [t if everything else t.new_empty(n) for t in (value, alpha, agree)]
    each = [t if t is None or everything else t[rows] for t in (weights, targets)]
    row = Row(*(None if t is None else t.unsqueeze(1) for t in (each[0], lost, each[1], *found)))  # type: ignore[arg-type]
    threads, size = team(n, V, acc, logits.device)
    size = max(1, size // BUFFERS)
    target = with_zeros_between(out, rows, size) if with_grad else None
    block = partial(_block, program, student, Side(its, teacher_transform), target, mean_alpha)
    writes = target.blocks(size) if target is not None else [None] * -(-n // size)
    blocks = zip(student.rows.blocks(size), its.blocks(size), writes, row.blocks(size), strict=True)
    spare = 0 if target is None else target.spare
    in_place = student.rows.together and (target is None or target.together)
    caps = with_grad and transform.softcap is not None
    rooms = [
        Room(mine, theirs, [torch.empty(size, V, dtype=acc, device=logits.device) for _ in range(program.buffers)])
        for mine, theirs in zip(
            spaces_for(threads, size + spare, V, logits, wide=True, narrow=not in_place, slope=caps),
            spaces_for(threads, size, V, teacher, wide=True, narrow=not its.together),
            strict=True,
        )
    ]
    share_out([partial(block, *here) for here in blocks], rooms)
    if not everything:
        for whole, part in zip((value, alpha, agree), found, strict=True):
            whole.index_copy_(0, rows, part)
    return value, alpha, agree


def _teacher_rows(teacher: Tensor, rows: Tensor, teacher_rows: Tensor | None) -> tuple[Listed, Tensor | None]:
    """The teacher's rows beside these, and which of these have none."""
    count = teacher.shape[0] * teacher.shape[1]
    if teacher_rows is None:
        return Listed(teacher, rows), None
    index = teacher_rows[rows]
    inside = index.clamp(0, count - 1)
    listed = Listed(teacher, inside)
    listed.together = listed.together and bool((inside.diff() == 1).all())
    return listed, index != inside


def _block(
    program: Program, student: Side, teacher: Side, target: Listed | Spread | None, mean_alpha: Tensor | None,
    mine: Tensor, its: Tensor, to: Any, row: Row, room: Room,
) -> None:  # fmt: skip
    wide = top(room.student.wide, mine)
    z = student.rows.load(mine, room.student)
    slope: Tensor | float = 1.0
    if target is None:
        z = transformed(z, student.transform, wide)
    else:
        z, slope = with_slope(z, student.transform, wide, top(room.student.slope, mine))
    t = transformed(teacher.rows.load(its, room.teacher), teacher.transform, top(room.teacher.wide, its))
    more = [top(buffer, mine) for buffer in room.more]
    (here, best, V) = (*largest(z), z.shape[1])
    (there, hot) = largest(t)
    p, q = (a_row_at_a_time(torch.softmax, x, buffer) for x, buffer in zip((z, t), more, strict=False))
    log_sum = torch.amax(p, 1, keepdim=True).log_().neg_()  # the largest p is 1 / S
    columns, work = Columns(p, q, None, None), more[2:]
    if program.logs:
        log_p = torch.sub(z, here, out=more[2]).sub_(log_sum)
        log_q = torch.sub(t, there, out=more[3]).sub_(torch.amax(q, 1, keepdim=True).log_().neg_())
        skip = student.transform.skip_id
        if skip is not None and skip == teacher.transform.skip_id:
            log_p.select(1, skip).zero_()  # any number but an infinite one
            log_q.select(1, skip).zero_()
        columns, work = Columns(p, q, log_p, log_q), more[4:]
    at_best = None if not program.best else log_sum - (z.gather(1, hot) - here)
    at_target, on = None, None
    if row.target is not None:
        column, inside = column_of(row.target, V)
        on = inside.to(p.dtype).masked_fill_(~inside & (row.target != SKIP), math.nan)
        at_target = torch.where(on != 0, (log_sum - (z.gather(1, column) - here)) * on, 0.0)
    value, c, alpha = _found(program, columns, work, row, mean_alpha, at_best, at_target, on)
    if program.logs and not math.isfinite(value.sum().item()):  # an infinite logarithm, if nothing worse
        value, c, alpha = _found(program, columns._replace(careful=True), work, row, mean_alpha, at_best, at_target, on)
    row.value.copy_(value)
    row.alpha.copy_(alpha)
    torch.logical_and(best == hot, ~alpha.isnan(), out=row.agree)
    if target is None:
        return
    grad = program.made(columns, work, c, target.room(to, room.student))
    if c.best is not None:
        grad.scatter_add_(1, hot, -c.best)
    if c.target is not None:
        grad.scatter_add_(1, column, -c.target)
    target.store(to, through_(grad, slope, student.transform), room.student)


def _found(
    program: Program, columns: Columns, work: Sequence[Tensor], row: Row, mean_alpha: Tensor | None,
    at_best: Tensor | None, at_target: Tensor | None, on: Tensor | None,
) -> tuple[Tensor, Coefficients, Tensor]:  # fmt: skip
    """(value, coefficients, a) of a block."""
    alpha, *sums = program.summed(columns, work)
    if row.lost is not None:
        alpha = alpha.masked_fill_(row.lost, math.nan)
    lam_alpha = mean_alpha if program.mean_alpha and mean_alpha is not None else alpha
    value, c = program.rows(sums, Numbers(alpha, lam_alpha, at_best, at_target, on), row.weight)
    return value, c, alpha


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """(maximum, the first column that has it) of each row of ``[R, V]``, ``[R, 1]``; where there is a NaN: NaN, any column."""
    V = x.shape[1]
    whole = V // TILE * TILE
    if whole in (0, TILE):
        column = x.argmax(1, keepdim=True)
        return x.gather(1, column), column
    of_tile = x[:, :whole].view(-1, whole // TILE, TILE).amax(2)
    if whole < V:
        of_tile = torch.cat([of_tile, x[:, whole:].amax(1, keepdim=True)], 1)
    tile = of_tile.argmax(1, keepdim=True)
    columns = torch.arange(TILE, device=x.device).add(tile * TILE)  # beyond the last column: that one once more
    column = x.gather(1, columns.clamp_(max=V - 1)).argmax(1, keepdim=True).add_(tile * TILE)
    return of_tile.gather(1, tile), column
