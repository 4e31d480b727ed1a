"""Validate the arguments of a divergence, and encode its configuration as numbers for the schema of a custom op.

The kinds and their options are defined in ``_backends/torch/_divergence.py``. ``l1`` is twice ``tv``; a ``jsd`` whose
beta is 0 or 1 is ``kl`` or ``rkl``; ``lk`` is one of two kinds, depending on its base.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dllm_kernels._backends._divergence import DivergenceSpec, Option, Part
from dllm_kernels._backends.torch._divergence import KINDS
from dllm_kernels._utils import _changing
from dllm_kernels._utils._checks import check_choice, check_finite, check_number, type_name
from dllm_kernels._utils._transform import NO_TRANSFORM, Transform

# Other names that callers may use.
ALIASES = {"kl_div": "kl", "lk_hybrid": "lk"}
NAMES = (*(name for name in KINDS if name != "lk_soft_ce"), "l1", *ALIASES)
# Distributions of a teacher with more tokens than the student: over the student's tokens, or over all.
TEACHERS = ("draft", "full")
_ORDER = list(KINDS)
_OPTIONS = {name: option for kind in KINDS.values() for name, option in kind.options.items()}


def checked_spec(
    kind: Any, *, teacher: Any = "draft", alpha: Any = None, base: Any = None, **options: Any
) -> DivergenceSpec:
    """Make the spec from the arguments of a public function, of which None means not given.

    Args:
        kind: a name, or a dict from names to coefficients.
        teacher: "draft" or "full".
        alpha: option of ``lk``, "row" or "mean".
        base: option of ``lk``, "kl" or "soft_ce".
        options: a number or None for each option of a kind.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an unknown name, a number out of range, or an option that belongs to none of the kinds.
    """
    coefficients = _coefficients(kind)
    check_choice("teacher", teacher, TEACHERS)
    for name, value, known in (("alpha", alpha, ("row", "mean")), ("base", base, ("kl", "soft_ce"))):
        if value is not None:
            check_choice(name, value, known)
    used = {name for kind_ in coefficients for name in _options_of(kind_)}
    given = {**options, **({"alpha": alpha, "base": base} if "lk" not in coefficients else {})}
    for name, value in given.items():
        if value is not None and name not in used:
            owners = sorted(k for k in NAMES if name in _options_of(k) or (k == "lk" and name in ("alpha", "base")))
            raise ValueError(f"{name} is of kind {' and '.join(map(repr, owners))}, got it with kind={kind!r}")
    numbers = {name: _checked_option(name, options.get(name), option) for name, option in _OPTIONS.items()}
    parts = [_part(name, coefficient, base, numbers) for name, coefficient in coefficients.items()]
    return DivergenceSpec.of(parts, alpha == "mean", teacher == "full")


def _options_of(kind: str) -> Collection[str]:
    return KINDS[kind].options if kind in KINDS else ()


def _part(name: str, coefficient: float, base: str | None, options: dict[str, float]) -> Part:
    """Return the part of a spec for a name."""
    if name == "l1":
        return Part("tv", 2.0 * coefficient)
    kind = "lk_soft_ce" if name == "lk" and base == "soft_ce" else name
    first, second = (*(options[o] for o in _options_of(kind)), 0.0, 0.0)[:2]
    return Part(kind, coefficient, (first, second))


def _coefficients(kind: Any) -> dict[str, float]:
    """Resolve aliases and return the nonzero coefficients by name."""
    kinds: Any = {kind: 1.0} if isinstance(kind, str) else kind
    if not isinstance(kinds, Mapping):
        raise TypeError(f"kind must be a name or a dict of names and coefficients, got {type_name(kind)}")
    coefficients: dict[str, float] = {}
    for name, coefficient in kinds.items():
        if name not in NAMES:
            raise ValueError(f"kind must be one of {', '.join(NAMES)}, got {name!r}")
        check_finite(f"kind[{name!r}]", coefficient)
        if not _changing.equals(float(coefficient), 0):
            own = ALIASES.get(str(name), str(name))
            coefficients[own] = coefficients.get(own, 0.0) + float(coefficient)
    if not coefficients:
        raise ValueError(f"kind must have a coefficient that is not 0, got {kind!r}")
    return coefficients


def _checked_option(name: str, value: Any, option: Option) -> float:
    if value is None:
        return option.default
    check_number(name, value)
    if not option.least <= float(value) <= option.most:
        raise ValueError(f"{name} must lie in [{option.least}, {option.most}], got {_changing.printable(float(value))}")
    return float(value)


class DivergencePlan(NamedTuple):
    """Configuration of a divergence.

    Attributes:
        spec: weighted sum of kinds.
        teacher_transform: transform of the teacher's logits; the student's is the plan's.
        value_scale: factor of value and gradient, the square of a temperature.
        per_row: True if each row's loss has its own upstream gradient, False if the loss is the sum.
        all_reduce: sums a scalar over the ranks that hold the other rows; None on a single rank.
    """

    spec: DivergenceSpec
    teacher_transform: Transform = NO_TRANSFORM
    value_scale: float = 1.0
    per_row: bool = False
    all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def integers(self) -> list[int]:
        """All fields except floats, encoded for :meth:`unpacked`."""
        skip, spec = self.teacher_transform.skip_id, self.spec
        kinds = [_ORDER.index(part.kind) for part in spec.parts]
        return [int(self.per_row), -1 if skip is None else skip, int(spec.lam_of_mean), int(spec.full), *kinds]

    @property
    def floats(self) -> list[float]:
        """All floats, encoded for :meth:`unpacked`."""
        of_parts = [number for part in self.spec.parts for number in (part.coefficient, *part.hyper)]
        return [self.value_scale, *self.teacher_transform.factors, *of_parts]

    @classmethod
    def unpacked(cls, integers: Sequence[int], numbers: Sequence[float]) -> DivergencePlan:
        """Rebuild from :attr:`integers` and :attr:`floats`."""
        per_row, skip, lam_of_mean, full, *kinds = integers
        value_scale, softcap, scale, *of_parts = numbers
        triples = zip(*[iter(of_parts)] * 3, strict=True)
        parts = (Part(_ORDER[k], c, (first, second)) for k, (c, first, second) in zip(kinds, triples, strict=True))
        transform = Transform.of((softcap, scale), None if skip < 0 else skip)
        return cls(DivergenceSpec.of(parts, bool(lam_of_mean), bool(full)), transform, value_scale, bool(per_row))
