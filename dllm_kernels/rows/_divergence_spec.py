"""How a divergence compares rows: the arguments of the public functions, validated, and as arguments of a custom op."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from dllm_kernels._checks import check_choice, check_finite, check_number, type_name
from dllm_kernels._graph import _changing
from dllm_kernels.rows._divergence import DivergenceSpec, Term
from dllm_kernels.rows._divergence_kinds import ALIASES, BASES, KINDS, MULTIPLES, NAMES, OPTIONS, Option
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform

# Distributions of a teacher with more tokens than the student: over the student's tokens, or over all.
TEACHERS = ("draft", "full")


class Comparison(NamedTuple):
    """How rows are compared.

    Attributes:
        spec: weighted sum of kinds.
        teacher_transform: transform of the teacher's logits; the student's is in the ``Setup``.
        value_scale: factor of value and gradient, the square of a temperature.
        per_row: True if each row's loss has its own upstream gradient, False if the loss is the sum.
        weighted: False if every row has the weight 1.
    """

    spec: DivergenceSpec
    teacher_transform: Transform = NO_TRANSFORM
    value_scale: float = 1.0
    per_row: bool = False
    weighted: bool = True


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
    passed = {**options, **({"alpha": alpha, "base": base} if "lk" not in coefficients else {})}
    for name, value in passed.items():
        if value is not None and name not in used:
            owners = sorted(k for k in NAMES if name in _options_of(k) or (k == "lk" and name in ("alpha", "base")))
            raise ValueError(f"{name} only applies to kind={' and '.join(map(repr, owners))}, got kind={kind!r}")
    numbers = {name: _checked_option(name, options.get(name), option) for name, option in OPTIONS.items()}
    terms = [_term(name, coefficient, base, numbers) for name, coefficient in coefficients.items()]
    return DivergenceSpec.of(terms, alpha == "mean", teacher == "full")


def _options_of(kind: str) -> Collection[str]:
    return KINDS[kind].options if kind in KINDS else ()


def _term(name: str, coefficient: float, base: str | None, options: dict[str, float]) -> Term:
    """Return the term of a spec for a name."""
    if name in MULTIPLES:
        kind, factor = MULTIPLES[name]
        return Term(kind, factor * coefficient)
    first, second = (*(options[o] for o in _options_of(name)), 0.0, 0.0)[:2]
    return Term(name if base is None else BASES.get((name, base), name), coefficient, (first, second))


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
            canonical = ALIASES.get(str(name), str(name))
            coefficients[canonical] = coefficients.get(canonical, 0.0) + float(coefficient)
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
