r"""Divergences of rows of student logits to rows of teacher logits: the row primitives of a backend.

Let p be the softmax of a row of transformed student logits and q the softmax of the teacher's row, a constant. The
acceptance rate is a = sum_v min(p_v, q_v). A kind has a value and a gradient with respect to the student's logits.
``rows/_divergence_kinds.py`` lists all kinds.

A :class:`DivergenceSpec` is a weighted sum of kinds, all computed in one pass. ``l1`` (sum |p - q|) becomes twice
``tv`` in a spec. A ``jsd`` with beta 0 or 1 becomes ``kl`` or ``rkl``.

The row primitives of a backend:

``divergence(logits, request, *, with_grad) -> DivergenceResult(value, acceptance_rate, agree, saved)``

    ``request`` is a :class:`DivergenceRequest`. ``logits`` is ``[B, L, V]`` and ``teacher`` is ``[B', L', V]``, of the
    same dtype. Both may have any batch and position strides; columns are adjacent. N = B L. All other tensors are
    contiguous ``[N]``, one entry per row. Row n is compared with row ``teacher_rows[n]`` of the B' L' rows of the
    teacher (int64, in any order, repetitions allowed; None: n). A number out of range is never read. It makes value,
    acceptance rate and gradient of row n NaN, and agree False.

    ``weights`` has the accumulation dtype acc (float32, float64 for float64 logits). For rows of weight 0 neither the
    student's nor the teacher's logits are read. All their results and gradients are 0.

    ``value``, acc: the sum over the terms of the spec of coefficient times kind, without the weight.
    ``acceptance_rate``, acc: a. ``agree``, bool: True if both rows have the same argmax; False if the row is NaN.

    With ``with_grad``, ``weights[n]`` times the gradient of ``value[n]`` overwrites the logits, and ``saved`` is None.
    The gradient is with respect to the logits as given, before ``transform``. Otherwise the logits are not written, and
    ``saved`` is the input of ``divergence_grad``. The teacher's logits are never written.

    ``targets``, int64, if ``spec.wants_targets``. For a target of -100 the term ``ce`` is 0, without a gradient. Any
    other out-of-range target makes the value and the gradient of its row NaN. No target equals ``skip_id`` of the
    transform.

    ``mean_acceptance``, acc, 0-d, on the device of the logits: the acceptance rate in lam if ``spec.lam_of_mean``.
    None: the row's own rate, as in the preceding pass that computes the mean.

    ``whole``: a :class:`Whole` if the teacher's logits are some columns of longer rows, otherwise None. The acceptance
    rate is then ``sum_v min(p_v, q_v)`` with the probabilities q of the whole rows, and ``agree`` compares the
    student's argmax with ``whole.best``. q in the kinds is the softmax of the given columns; with ``spec.full`` it
    holds their probabilities in the whole rows. In ``teacher_ce`` the teacher's argmax is then ``whole.best``; a row
    without one has the value 0 and no gradient. ``divergence_grad`` reads ``whole`` with ``spec.full`` only.

    A NaN logit, or a row of nothing but -inf, on either side makes value, acceptance rate and gradient of its row NaN.
    A logit of -inf is a probability of 0. ``skip_id`` of each transform is a column of -inf on its side. The gradient
    of that column of the student is 0.

``row_norms(logits [C, V'], transform, skip, start) -> (norms [C, 2], column [C])``

    Maximum and log sum e^(x - maximum) of the transformed logits of each row, in acc, and the first column that has the
    maximum, int64; any column if the row has NaN. ``skip``: a column that counts as -inf, an integer tensor ``[1]``, or
    None; a column that is out of range is ignored. ``start`` is added to the column. If rows are split, the logits are
    the columns ``part_of(V')`` of each row, which begin at ``start``, and the results are those of whole rows.

``divergence_grad(logits, request, saved, out) -> None``

    Writes the gradient that ``divergence`` computes ``with_grad`` to ``out``, in one pass over the logits. ``out`` is
    ``[B, L, V]`` in the dtype of the logits, and shares no memory with them. ``saved`` comes from ``divergence`` of the
    same backend and request. ``weights`` may differ, except that rows of weight 0 must keep it, because their
    statistics are zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels._graph import _changing
from dllm_kernels.rows._divergence_kinds import KINDS, NO_OPTIONS, OptionValues, saved_stats
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform

# Columns of :attr:`SavedStats.stats`, and the one with a.
SAVED_STATS, ACCEPTANCE = saved_stats(), 4


class Term(NamedTuple):
    """One term of a spec.

    Attributes:
        kind: a key of ``KINDS``.
        coefficient: factor of the kind.
        options: values of the options of the kind.
    """

    kind: str
    coefficient: float
    options: OptionValues = NO_OPTIONS


def _settled(term: Term) -> Term:
    """Replace a kind by the one it equals at an end of an option's range, unless the value is symbolic in a graph."""
    for value, option in zip(term.options, KINDS[term.kind].options.values(), strict=False):
        for end, kind in option.ends.items():
            if _changing.equals(value, end):
                return Term(kind, term.coefficient)
    return term


class DivergenceSpec(NamedTuple):
    """A weighted sum of kinds.

    Attributes:
        kinds: the kinds of the terms; no two are equal.
        numbers: the coefficient and the values of both options of each term.
        lam_of_mean: True if lam of ``lk`` depends on the mean of a over the rows of a call, False if on a of the row.
        full: True if q of the kinds is the teacher's probability in its whole row (:class:`Whole`).
    """

    kinds: tuple[str, ...]
    numbers: tuple[float, ...]
    lam_of_mean: bool = False
    full: bool = False

    @classmethod
    def of(cls, terms: Iterable[Term], lam_of_mean: bool, full: bool = False) -> DivergenceSpec:
        """Make a spec; add the coefficients of terms of the same kind, which have the same options.

        The options are not compared, because they may be symbolic while a graph is traced.
        """
        total: dict[str, Term] = {}
        for kind, coefficient, options in map(_settled, terms):
            previous = total.get(kind)
            total[kind] = Term(kind, coefficient if previous is None else previous.coefficient + coefficient, options)
        numbers = [number for term in total.values() for number in (term.coefficient, *term.options)]
        return cls(tuple(total), tuple(numbers), lam_of_mean, full)

    @property
    def terms(self) -> list[Term]:
        """The terms of the sum."""
        n = self.numbers
        rows = zip(self.kinds, n[::3], n[1::3], n[2::3], strict=True)
        return [Term(kind, coefficient, (first, second)) for kind, coefficient, first, second in rows]

    @classmethod
    def from_fields(cls, kinds: Iterable[str], numbers: Iterable[float], **others: Any) -> DivergenceSpec:
        """Make the spec when a custom op runs, because numbers that were symbolic in the graph have values now."""
        return cls.of(cls(tuple(kinds), tuple(numbers)).terms, **others)

    @property
    def wants_targets(self) -> bool:
        """True if a term needs the targets."""
        return any(KINDS[kind].minus == "target" for kind in self.kinds)

    @property
    def may_be_constant(self) -> bool:
        """True if rows may have no gradient, because every term allows that."""
        return all(KINDS[kind].constant is not None for kind in self.kinds)

    def constant(self, acceptance: Tensor, no_best: Tensor, no_target: Tensor | None) -> Tensor:
        """Return True for rows without a gradient, if there may be any; see :class:`Kind`."""
        rows = torch.ones_like(no_best)
        for kind, _, options in self.terms:
            rows &= KINDS[kind].constant(acceptance, no_best, no_target, options)  # type: ignore[misc]
        return rows


class Whole(NamedTuple):
    """Whole rows of a teacher of which only some columns are compared.

    Attributes:
        norms: acc ``[N, 2]``: maximum and log sum e^(x - maximum) of all columns.
        best: int64 ``[N]``, the student's column for the teacher's argmax; -100 if the student lacks this token.
    """

    norms: Tensor
    best: Tensor


class DivergenceRequest(NamedTuple):
    """Arguments of both row primitives beside the logits; the module docstring describes the fields."""

    spec: DivergenceSpec
    teacher: Tensor
    weights: Tensor
    teacher_rows: Tensor | None = None
    targets: Tensor | None = None
    mean_acceptance: Tensor | None = None
    whole: Whole | None = None
    transform: Transform = NO_TRANSFORM
    teacher_transform: Transform = NO_TRANSFORM

    @property
    def full(self) -> Whole | None:
        """``whole`` if q of the kinds depends on it."""
        return self.whole if self.spec.full else None


class SavedStats(NamedTuple):
    """Statistics of N rows from which the gradient needs one pass.

    Attributes:
        stats: acc ``[N, SAVED_STATS]``: the maximum and the logarithm of the sum of each side, a, and the sums that
            the gradient of the spec reads. Their order and units depend on the backend.
        teacher_argmax: int64 ``[N]``, the teacher's argmax; ``best`` of :class:`Whole` with ``spec.full``.
    """

    stats: Tensor
    teacher_argmax: Tensor

    @property
    def acceptance(self) -> Tensor:
        """The rate a ``[N]``."""
        return self.stats[:, ACCEPTANCE]


class DivergenceResult(NamedTuple):
    """Results of N rows.

    Attributes:
        value: acc ``[N]``.
        acceptance_rate: acc ``[N]``.
        agree: bool ``[N]``.
        saved: input of ``divergence_grad``; None if the gradient has been written.
    """

    value: Tensor
    acceptance_rate: Tensor
    agree: Tensor
    saved: SavedStats | None = None
