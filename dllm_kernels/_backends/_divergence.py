r"""Divergences of rows of student logits to rows of teacher logits: kinds as data, and the row primitive of a backend.

With p the softmax of a row of transformed student logits, q that of the teacher's, which is a constant, and a = sum_v
min(p_v, q_v), the acceptance rate, a kind has a value and a gradient in the student's logits: the table of them, and
what they are made of, stand in ``_backends/torch/_divergence.py``.

A :class:`DivergenceSpec` is a weighted sum of kinds, all of them from one pass. ``l1`` (sum |p - q|) is twice tv, and a
``jsd`` whose beta is 0 or 1 is kl or rkl: neither is a kind of its own in a spec.

The row primitives, a pair for each backend:

``divergence(logits, teacher, weights, spec, *, teacher_rows=None, targets=None, mean_alpha=None, transform,
teacher_transform, with_grad) -> Found(value, alpha, agree, kept)``

    ``logits`` is ``[B, L, V]`` and ``teacher`` ``[B', L', V]`` of the same dtype, both with any batch and position
    strides and columns side by side. N = B L. Everything else has one entry a row, ``[N]``, contiguous. Row n is
    compared with row ``teacher_rows[n]`` (int64, any order, may repeat; None: n) of the B' L' rows of the teacher.
    Nothing outside of these rows is read: a number that is none of theirs makes NaN of all that there is of row n, and
    False.

    ``weights``, in the dtype of sums acc (float32, float64 for float64 logits): a row of weight 0 is not read, neither
    the student's nor the teacher's. All its results and its gradient are 0.

    ``value`` acc: the sum over the spec's parts of coefficient times kind, not weighted. ``alpha`` acc: a. ``agree``
    bool: whether both rows have the same argmax; False where the row is NaN.

    With ``with_grad``, ``weights[n]`` times the gradient of ``value[n]`` in the student's logits as they were given
    (through ``transform``) is written over the logits, and ``kept`` is None. Without it nothing is written over, and
    ``kept`` is what ``divergence_grad`` reads. Rows of the teacher are never written.

    ``targets`` int64, where ``spec.wants_targets``: -100: the part ``ce`` is 0 and has no gradient in this row; any
    other that no column has makes its value, and its row of the gradient, NaN. No target is the transform's
    ``skip_id``.

    ``mean_alpha`` acc, 0-d, on the logits' device: what stands in the place of the row's own a in lam where
    ``spec.mean_alpha``; None: the row's own, in the pass before that finds the mean.

    A NaN, or a row of nothing but -inf, on either side makes value, alpha and gradient of its own row NaN. A logit of
    -inf is a probability of 0. ``skip_id`` of each side is -inf on that side; the gradient in the student's is 0.

``divergence_grad(logits, teacher, weights, spec, kept, out, *, teacher_rows, targets, mean_alpha, transform,
teacher_transform) -> None``

    The gradient that ``divergence`` computes ``with_grad``, from one pass over the logits. ``out`` is ``[B, L, V]`` in
    the dtype of the logits, and shares no memory with them. ``kept`` comes from ``divergence`` of the same backend and
    arguments. ``weights`` may differ, but a row that had the weight 0 must have the weight 0 again: its statistics are
    zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

# p <= TIE q counts as p <= q.
TIE = 1 + 2.0**-18
# Columns of :attr:`Kept.numbers`.
KEPT_NUMBERS = 8
Hyper = tuple[float, float]
NO_HYPER = (0.0, 0.0)


class Option(NamedTuple):
    """A number that a kind depends on: its default, and between what it lies."""

    default: float
    least: float
    most: float


class Part(NamedTuple):
    """A kind in a spec.

    Attributes:
        kind: a key of ``_backends.torch._divergence.KINDS``.
        coefficient: what it is multiplied by.
        hyper: its options in their order, 0 where it has none.
    """

    kind: str
    coefficient: float
    hyper: Hyper = NO_HYPER


class DivergenceSpec(NamedTuple):
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
    def settled(self) -> DivergenceSpec:
        """The spec with all numbers known: a ``jsd`` whose beta becomes 0 or 1 in a compiled graph is kl or rkl."""
        if not any(part.kind == "jsd" and part.hyper[0] in (0, 1) for part in self.parts):
            return self
        parts: dict[tuple[str, Hyper], float] = {}
        for kind, coefficient, hyper in self.parts:
            end = kind == "jsd" and hyper[0] in (0, 1)
            own = (("kl", "rkl")[int(hyper[0])], NO_HYPER) if end else (kind, hyper)
            parts[own] = parts.get(own, 0.0) + coefficient
        return self._replace(parts=tuple(Part(kind, c, hyper) for (kind, hyper), c in parts.items()))


class Kept(NamedTuple):
    """Statistics of N rows from which the gradient needs one pass.

    Attributes:
        numbers: acc ``[N, KEPT_NUMBERS]``: the maximum and the logarithm of the sum of either side, a, and sums that
            the gradient of the spec reads. Order and units are the backend's.
        hot: int64 ``[N]``, the teacher's argmax.
    """

    numbers: torch.Tensor
    hot: torch.Tensor


class Found(NamedTuple):
    """Results of N rows.

    Attributes:
        value: acc ``[N]``.
        alpha: acc ``[N]``.
        agree: bool ``[N]``.
        kept: what ``divergence_grad`` reads; None if the gradient is already there.
    """

    value: torch.Tensor
    alpha: torch.Tensor
    agree: torch.Tensor
    kept: Kept | None = None


Divergences = Callable[..., Found]
