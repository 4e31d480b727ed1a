"""Kinds of divergence of a student's row from a teacher's row: names, options, and the column functions of each.

Let p be the softmax of a row of transformed student logits z, and q the softmax of the teacher's row t, a constant. The
acceptance rate is a = sum_v min(p_v, q_v). Each kind has a value L and a gradient with respect to z:

    kl          sum q (log q - log p)                        p - q
    rkl         sum p (log p - log q)                        p (log p - log q - L)
    jsd         beta KL(q||m) + (1 - beta) KL(p||m)          (1 - beta) p (log p - log m - KL(p||m))
    tv          1 - a                                        p X - p [p <= q],  X = sum p [p <= q]
    nla         -log max(a, floor)                           gradient of tv over a, 0 if a < floor
    lk          lam kl + (1 - lam) tv                        lam, 1 - lam times both gradients
    lk_soft_ce  lam soft_ce + (1 - lam) tv                   lam, 1 - lam times both gradients
    soft_ce     -sum q log p                                 p - q
    teacher_ce  -log p_h,  h the teacher's argmax            p - onehot(h)
    ce          -log p_y,  y the target                      p - onehot(y)

with m = beta q + (1 - beta) p, and lam = kl_scale e^(-eta a) a constant.

A product with a probability of 0 is 0. The argmax is the lowest index with the largest transformed logit. [p <= q]
is p <= (1 + 2**-18) q: p and q that differ only by rounding count as p <= q. Otherwise the rounding of a row's sum
would decide all ties of the row. a is the plain sum of minima.

A :class:`Kind` consists of column functions to sum, column functions that make up the gradient, and a function of one
row's sums. Column functions are plain torch functions of a block of rows. The torch backend and a vocabulary that is
split over ranks call them. The Triton kernel has its own code for each kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

# p <= TIE q counts as p <= q.
TIE = 1 + 2.0**-18
# Values of the options of a kind, in the order of ``Kind.options``; 0 for missing ones.
OptionValues = tuple[float, float]
NO_OPTIONS = (0.0, 0.0)
ValueAndFactors = tuple[Any, tuple[Any, ...]]  # a value, and the factors of the terms of the gradient


class Option(NamedTuple):
    """Default and range of an option of a kind, and other kinds that the ends of the range are, by value."""

    default: float
    least: float
    most: float
    ends: Mapping[float, str] = MappingProxyType({})


class Columns(NamedTuple):
    """p, q and their logarithms for a block of rows ``[R, V]``; the logarithms are None if no kind needs them.

    ``guard_zeros``: True if a logarithm may be infinite. Its product with a probability of 0 is then set to 0, not NaN.
    ``mass``: the sum of q ``[R, 1]`` if it may be less than 1, otherwise None.
    """

    p: Tensor
    q: Tensor
    log_p: Any
    log_q: Any
    guard_zeros: bool = False
    mass: Tensor | None = None

    def times(self, e: Tensor, x: Tensor) -> Tensor:
        """Multiply x by the probability e in place; 0 if e is 0."""
        x.mul_(e)
        return x.masked_fill_(e == 0, 0) if self.guard_zeros else x


class RowValues(NamedTuple):
    """Per-row values of a block, ``[R, 1]``.

    Attributes:
        acceptance: the acceptance rate a.
        lam_acceptance: the acceptance rate that lam is computed from.
        at_best: -log p at the teacher's argmax.
        at_target: -log p at the target, 0 without a target.
        target_flag: 1 with a target, 0 without, NaN if the target is out of range.
        best_flag: 1 if the student has the teacher's argmax, 0 if not.
        mass: the sum of q, a number if it is 1.
    """

    acceptance: Tensor
    lam_acceptance: Tensor
    at_best: Tensor | None = None
    at_target: Tensor | None = None
    target_flag: Tensor | None = None
    best_flag: Any = 1.0
    mass: Any = 1.0

    @property
    def constant(self) -> Any:
        """Constant that kl omits, mass log mass."""
        return torch.special.xlogy(self.mass, self.mass) if isinstance(self.mass, Tensor) else 0.0


class Feature(NamedTuple):
    """A column function: (columns, values of the options, buffer) -> ``[R, V]``, usually in the buffer.

    ``logs``: True if it reads log p or log q. ``with_options``: True if it reads the options.
    """

    of: Callable[[Columns, OptionValues, Tensor], Tensor]
    logs: bool = False
    with_options: bool = False


def _log_mean(c: Columns, o: OptionValues, out: Tensor) -> Tensor:
    """``log m`` with ``m = p + beta (q - p)``, which is exactly p if p equals q."""
    m = torch.lerp(c.p, c.q, o[0], out=out)
    return m.clamp_(min=torch.finfo(m.dtype).tiny).log_()  # m = 0 only if p = q = 0


STUDENT = Feature(lambda c, o, out: c.p)
DIFFERENCE = Feature(
    lambda c, o, out: torch.sub(c.p if c.mass is None else torch.mul(c.p, c.mass, out=out), c.q, out=out)
)
BELOW = Feature(lambda c, o, out: torch.mul(c.q, TIE, out=out).ge_(c.p).mul_(c.p))  # p [p <= q]
FORWARD_KL = Feature(lambda c, o, out: c.times(c.q, torch.sub(c.log_q, c.log_p, out=out)), logs=True)
REVERSE_KL = Feature(lambda c, o, out: c.times(c.p, torch.sub(c.log_p, c.log_q, out=out)), logs=True)
CROSS_ENTROPY = Feature(lambda c, o, out: c.times(c.q, torch.neg(c.log_p, out=out)), logs=True)
STUDENT_TO_MEAN = Feature(
    lambda c, o, out: c.times(c.p, torch.sub(c.log_p, _log_mean(c, o, out), out=out)), logs=True, with_options=True
)
TEACHER_TO_MEAN = Feature(
    lambda c, o, out: c.times(c.q, torch.sub(c.log_q, _log_mean(c, o, out), out=out)), logs=True, with_options=True
)


def _jsd(X: Sequence[Tensor], n: RowValues, o: OptionValues) -> ValueAndFactors:
    p_to_mean, q_to_mean = X
    rest, value = 1 - o[0], o[0] * q_to_mean + (1 - o[0]) * p_to_mean
    if isinstance(n.mass, Tensor) and o[0] > 0:
        value = value - (1 - n.mass) * (o[0] * math.log(o[0]))  # the other columns of whole rows, m = beta q
    return value, (rest, -rest * p_to_mean)


def _nla(X: Sequence[Tensor], n: RowValues, o: OptionValues) -> ValueAndFactors:
    over = torch.where(n.acceptance < o[0], 0.0, 1 / n.acceptance)
    value = torch.where(n.acceptance < o[0], o[0], n.acceptance).log().neg()  # a maximum would hide a NaN
    return value, (X[0] * over, -over)


def _lk(X: Sequence[Tensor], n: RowValues, o: OptionValues) -> ValueAndFactors:
    return _lk_soft_ce((X[0] - n.constant, X[1]), n, o)


def _lk_soft_ce(X: Sequence[Tensor], n: RowValues, o: OptionValues) -> ValueAndFactors:
    base, below = X
    lam = o[1] * torch.exp(-o[0] * n.lam_acceptance)
    return lam * base + (1 - lam) * (1 - n.acceptance), (lam, (1 - lam) * below, lam - 1)


class Kind(NamedTuple):
    """A kind of divergence.

    Attributes:
        sums: column functions to sum over a row.
        gradient: column functions whose weighted sum is the gradient.
        row: (sums, values of the row, values of the options) -> value, and the factor of each term of the gradient.
        minus: "best" or "target": column whose gradient has an additional -1.
        constant: (a, True without a column for the teacher's argmax, True without a target, values of the options) ->
            True for rows without a gradient; None if there are none.
        options: at most two options, keywords of the public functions.
    """

    sums: tuple[Feature, ...]
    gradient: tuple[Feature, ...]
    row: Callable[[Sequence[Tensor], RowValues, OptionValues], ValueAndFactors]
    minus: str = ""
    constant: Callable[[Tensor, Tensor, Any, OptionValues], Any] | None = None
    options: Mapping[str, Option] = MappingProxyType({})


BETA = {"beta": Option(0.5, 0.0, 1.0, {0.0: "kl", 1.0: "rkl"})}
FLOOR = {"floor": Option(1e-5, 1e-30, 1.0)}
LAM_OPTIONS = {"eta": Option(3.0, -math.inf, math.inf), "kl_scale": Option(1.0, 0.0, 1.0)}
KINDS = {
    "kl": Kind((FORWARD_KL,), (DIFFERENCE,), lambda X, n, o: (X[0] - n.constant, (1.0,))),
    "rkl": Kind((REVERSE_KL,), (REVERSE_KL, STUDENT), lambda X, n, o: (X[0], (1.0, -X[0]))),
    "jsd": Kind((STUDENT_TO_MEAN, TEACHER_TO_MEAN), (STUDENT_TO_MEAN, STUDENT), _jsd, options=BETA),
    "tv": Kind((BELOW,), (STUDENT, BELOW), lambda X, n, o: (1 - n.acceptance, (X[0], -1.0))),
    "nla": Kind((BELOW,), (STUDENT, BELOW), _nla, constant=lambda a, no_best, no_target, o: a < o[0], options=FLOOR),
    "lk": Kind((FORWARD_KL, BELOW), (DIFFERENCE, STUDENT, BELOW), _lk, options=LAM_OPTIONS),
    "lk_soft_ce": Kind((CROSS_ENTROPY, BELOW), (DIFFERENCE, STUDENT, BELOW), _lk_soft_ce, options=LAM_OPTIONS),
    "soft_ce": Kind((CROSS_ENTROPY,), (DIFFERENCE,), lambda X, n, o: (X[0], (1.0,))),
    "teacher_ce": Kind(
        (), (STUDENT,), lambda X, n, o: (n.at_best, (n.best_flag,)), "best", lambda a, no_best, no_target, o: no_best
    ),
    "ce": Kind(
        (),
        (STUDENT,),
        lambda X, n, o: (n.at_target, (n.target_flag,)),
        "target",
        lambda a, no_best, no_target, o: no_target,
    ),
}
# Kinds that callers choose by an option of another kind: (name, value of ``base``) -> kind.
BASES = {("lk", "soft_ce"): "lk_soft_ce"}
# Names for a multiple of a kind, and other names that callers may use.
MULTIPLES = {"l1": ("tv", 2.0)}
ALIASES = {"kl_div": "kl", "lk_hybrid": "lk"}
NAMES = (*(name for name in KINDS if name not in BASES.values()), *MULTIPLES, *ALIASES)
OPTIONS = {name: option for kind in KINDS.values() for name, option in kind.options.items()}


def saved_stats() -> int:
    """Return the number of statistics per row from which the gradient of any sum of kinds needs one pass.

    They are two normalizers of each side, a, and the sums that are also terms of the gradient. The number is a power of
    two, because a kernel writes them as one block.
    """
    gradient_features = {feature for kind in KINDS.values() for feature in kind.gradient}
    both = {feature for kind in KINDS.values() for feature in kind.sums if feature in gradient_features}
    return 1 << (4 + len(both)).bit_length()
