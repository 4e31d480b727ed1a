r"""Divergences of rows of student logits to rows of teacher logits: the kinds as data, and the row primitive of a backend.

With p the softmax of a row of transformed student logits z, q that of the teacher's t, which is a constant, and
a = sum_v min(p_v, q_v), the acceptance rate, a kind has a value and a gradient in z (L: the value itself):

    kl          sum q (log q - log p)                        p - q
    rkl         sum p (log p - log q)                        p (log p - log q - L)
    jsd         beta KL(q||m) + (1 - beta) KL(p||m)          (1 - beta) p (log p - log m - KL(p||m)),  m = beta q + (1 - beta) p
    tv          1 - a                                        p X - p [p <= q],  X = sum p [p <= q]
    nla         -log max(a, floor)                           that of tv over a, 0 where a < floor
    lk          lam kl + (1 - lam) tv                        the same mixture, lam = kl_scale e^(-eta a) a constant
    lk_soft_ce  lam soft_ce + (1 - lam) tv                   the same mixture
    soft_ce     -sum q log p                                 p - q
    teacher_ce  -log p_h,  h the teacher's argmax            p - onehot(h)
    ce          -log p_y,  y the target                      p - onehot(y)

A product with a probability of 0 is 0. The argmax is the lowest index that has the largest transformed logit. [p <= q] is
p <= (1 + 2**-18) q: p and q that are equal but for rounding count as p <= q, or the rounding of a row's sum would decide all
its ties. a is the plain sum of minima.

A :class:`Recipe` is a weighted sum of kinds, all of them from one pass. ``l1`` (sum |p - q|) is twice tv, and a ``jsd`` whose
beta is 0 or 1 is kl or rkl: neither is a kind of its own in a recipe.

The row primitive, one for each backend:

``divergence(logits, teacher, weights, recipe, *, teacher_rows=None, targets=None, mean_alpha=None, transform, teacher_transform,
with_grad, out=None) -> (value, alpha, agree)``

    ``logits`` is ``[B, L, V]`` and ``teacher`` ``[B', L', V]`` of the same dtype, both with any batch and position strides
    and columns side by side. N = B L. Everything else has one entry a row, ``[N]``, contiguous. Row n is compared with row
    ``teacher_rows[n]`` (int64, any order, may repeat; None: n) of the B' L' rows of the teacher. Nothing outside of these
    rows is read: a number that is none of theirs makes NaN of all that there is of row n, and False.

    ``weights``, in the dtype of sums acc (float32, float64 for float64 logits): a row of weight 0 is not read, neither the
    student's nor the teacher's. All its results and its gradient are 0.

    ``value`` acc: the sum over the recipe's parts of coefficient times kind, not weighted. ``alpha`` acc: a. ``agree`` bool:
    whether both rows have the same argmax; False where the row is NaN.

    With ``with_grad``, ``weights[n]`` times the gradient of ``value[n]`` in the student's logits as they were given (through
    ``transform``) is written in their dtype: over the logits, or to ``out`` ``[B, L, V]`` where that is given, which is no
    memory of theirs. Without it nothing is written. Rows of the teacher are never written.

    ``targets`` int64, where ``recipe.wants_targets``: -100: the part ``ce`` is 0 and has no gradient in this row; any
    other that no column has makes its value, and its row of the gradient, NaN. No target is the transform's ``skip_id``.

    ``mean_alpha`` acc, 0-d, on the logits' device: what stands in the place of the row's own a in lam where
    ``recipe.mean_alpha``; None: the row's own, in the pass before that finds the mean.

    A NaN, or a row of nothing but -inf, on either side makes value, alpha and gradient of its own row NaN. A logit of -inf is
    a probability of 0. ``skip_id`` of each side is -inf on that side; the gradient in the student's is 0.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from dllm_kernels.base import _changing

# p <= TIE q counts as p <= q.
TIE = 1 + 2.0**-18
Hyper = tuple[float, float]
NO_HYPER = (0.0, 0.0)


class Option(NamedTuple):
    """A number that a kind depends on: its default, and between what it lies."""

    default: float
    least: float
    most: float


BETA = Option(0.5, 0.0, 1.0)
FLOOR = Option(1e-5, 1e-30, 1.0)
ETA = Option(3.0, 0.0, 1e4)
KL_SCALE = Option(1.0, 0.0, 1.0)

# The kinds of a recipe, in an order that compiled graphs know them by, with the options that each has, at most two.
KINDS: dict[str, dict[str, Option]] = {
    "kl": {},
    "rkl": {},
    "jsd": {"beta": BETA},
    "tv": {},
    "nla": {"floor": FLOOR},
    "lk": {"eta": ETA, "kl_scale": KL_SCALE},
    "lk_soft_ce": {"eta": ETA, "kl_scale": KL_SCALE},
    "soft_ce": {},
    "teacher_ce": {},
    "ce": {},
}
# What a caller may call them, beside their names; ``l1`` is twice tv, and the base of lk makes one of two kinds of it.
ALIASES = {"kl_div": "kl", "lk_hybrid": "lk"}
NAMES = (*(name for name in KINDS if name != "lk_soft_ce"), "l1", *ALIASES)


class Part(NamedTuple):
    """A kind in a recipe.

    Attributes:
        kind: one of :data:`KINDS`.
        coefficient: what it is multiplied by.
        hyper: its options in their order, 0 where it has none.
    """

    kind: str
    coefficient: float
    hyper: Hyper = NO_HYPER


class Recipe(NamedTuple):
    """A sum of kinds.

    Attributes:
        parts: no two of the same kind with the same options.
        mean_alpha: whether lam of ``lk`` is made from the mean of a over the rows of a call and not from the row's own.
    """

    parts: tuple[Part, ...]
    mean_alpha: bool = False

    @property
    def wants_targets(self) -> bool:
        """Whether there is a part that needs the targets."""
        return any(part.kind == "ce" for part in self.parts)

    @property
    def settled(self) -> Recipe:
        """The same where all numbers are known: a ``jsd`` whose beta has become 0 or 1 in a compiled graph is kl or rkl."""
        if not any(part.kind == "jsd" and part.hyper[0] in (0, 1) for part in self.parts):
            return self
        parts: dict[tuple[str, Hyper], float] = {}
        for kind, coefficient, hyper in self.parts:
            end = kind == "jsd" and hyper[0] in (0, 1)
            own = (("kl", "rkl")[int(hyper[0])], NO_HYPER) if end else (kind, hyper)
            parts[own] = parts.get(own, 0.0) + coefficient
        return self._replace(parts=tuple(Part(kind, c, hyper) for (kind, hyper), c in parts.items()))

    @property
    def indices(self) -> list[int]:
        """The integers of :meth:`of`."""
        return [int(self.mean_alpha), *(_ORDER.index(part.kind) for part in self.parts)]

    @property
    def numbers(self) -> list[float]:
        """The floats of :meth:`of`."""
        return [number for part in self.parts for number in (part.coefficient, *part.hyper)]

    @classmethod
    def of(cls, indices: list[int], numbers: list[float]) -> Recipe:
        """The recipe of these :attr:`indices` and :attr:`numbers`, as a compiled op's schema can carry them."""
        mean_alpha, *kinds = indices
        parts = (Part(_ORDER[k], numbers[3 * i], tuple(numbers[3 * i + 1 : 3 * i + 3])) for i, k in enumerate(kinds))  # type: ignore[arg-type]
        return cls(tuple(parts), bool(mean_alpha))


_ORDER = list(KINDS)
Divergences = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def checked_recipe(kind: Any, *, alpha: Any = None, base: Any = None, **options: Any) -> Recipe:
    """The recipe of the arguments of a public function; None: not given.

    Args:
        kind: a name, or a dict from names to coefficients.
        alpha: of ``lk``, "row" or "mean".
        base: of ``lk``, "kl" or "soft_ce".
        options: a number for each of the options of :data:`KINDS`, or None.

    Raises:
        TypeError: something of another type.
        ValueError: an unknown name, a number out of range, or an option that belongs to none of the kinds.
    """
    wanted = _coefficients(kind)
    _check_choice("alpha", alpha, ("row", "mean"))
    _check_choice("base", base, ("kl", "soft_ce"))
    used = {name for kind_ in wanted for name in KINDS.get(kind_, ())}
    given = {**options, **({"alpha": alpha, "base": base} if "lk" not in wanted else {})}
    for name, value in given.items():
        if value is not None and name not in used:
            owners = sorted(k for k in NAMES if name in KINDS.get(k, ()) or (k == "lk" and name in ("alpha", "base")))
            raise ValueError(f"{name} is of kind {' and '.join(map(repr, owners))}, got it with kind={kind!r}")
    numbers_ = {
        name: _checked_option(name, options.get(name), option) for k in KINDS.values() for name, option in k.items()
    }
    parts: dict[tuple[str, Hyper], float] = {}
    for name, coefficient in wanted.items():
        resolved, factor, hyper = _resolved(name, base, numbers_)
        parts[resolved, hyper] = parts.get((resolved, hyper), 0.0) + factor * coefficient
    return Recipe(tuple(Part(k, c, hyper) for (k, hyper), c in parts.items()), alpha == "mean")


def _resolved(name: str, base: str | None, options: dict[str, float]) -> tuple[str, float, Hyper]:
    """(kind of a recipe, factor of its coefficient, its hyperparameters) of a name."""
    if name == "l1":
        return "tv", 2.0, NO_HYPER
    if name == "jsd" and _changing.equals(options["beta"], 0):
        return "kl", 1.0, NO_HYPER
    if name == "jsd" and _changing.equals(options["beta"], 1):
        return "rkl", 1.0, NO_HYPER
    kind = "lk_soft_ce" if name == "lk" and base == "soft_ce" else name
    first, second = (*(options[o] for o in KINDS[kind]), 0.0, 0.0)[:2]
    return kind, 1.0, (first, second)


def _coefficients(kind: Any) -> dict[str, float]:
    """Names without aliases, with their coefficients; those of 0 left out."""
    kinds: Any = {kind: 1.0} if isinstance(kind, str) else kind
    if not isinstance(kinds, Mapping):
        raise TypeError(f"kind must be a name or a dict of names and coefficients, got {type(kind).__name__}")
    found: dict[str, float] = {}
    for name, coefficient in kinds.items():
        if name not in NAMES:
            raise ValueError(f"kind must be one of {', '.join(NAMES)}, got {name!r}")
        if isinstance(coefficient, bool) or not isinstance(coefficient, numbers.Real):
            raise TypeError(f"kind[{name!r}] must be a number, got {type(coefficient).__name__}")
        if not 0 <= float(coefficient) < math.inf:
            raise ValueError(
                f"kind[{name!r}] must not be negative, and finite, got {_changing.shown(float(coefficient))}"
            )
        if not _changing.equals(float(coefficient), 0):
            own = ALIASES.get(str(name), str(name))
            found[own] = found.get(own, 0.0) + float(coefficient)
    if not found:
        raise ValueError(f"kind must have a coefficient that is not 0, got {kind!r}")
    return found


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _checked_option(name: str, value: Any, option: Option) -> float:
    if value is None:
        return option.default
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not option.least <= float(value) <= option.most:
        raise ValueError(f"{name} must lie in [{option.least}, {option.most}], got {_changing.shown(float(value))}")
    return float(value)
