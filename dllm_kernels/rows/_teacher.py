"""The other side of a divergence: the teacher's tensors, and how the two are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dllm_kernels.base._divergence import Recipe
from dllm_kernels.base._named import replaced
from dllm_kernels.base._transform import Transform
from dllm_kernels.rows import _recipes

Tensor = torch.Tensor


class Teacher(NamedTuple):
    """The tensors of the other side, all of them constants.

    Attributes:
        x: logits ``[..., V']``, or hidden states ``[..., D']``; below ``rows/_run.py`` hidden states are ``[R, D']``.
        weight: its own head ``[V', D']``; None: the student's, or x are logits.
        bias: of its own head, or None.
        rows: int64 ``[...]``, the row of x for each row of the student, or None: the same; below ``[N]``.
        columns: int64 ``[V]``, the teacher's columns that are compared, or None: all.
        extra_x: the rows of the second part of its head, as x; or None.
        extra_weight: ``[V', r]``, or None.
    """

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    extra_x: Tensor | None = None
    extra_weight: Tensor | None = None


class Pair(NamedTuple):
    """How the two sides are compared.

    Attributes:
        teacher: None in a backward pass that needs no teacher.
        recipe: the sum of kinds.
        teacher_transform: of the teacher's logits; the student's is the plan's.
        factor: of value and gradient, the square of a temperature.
        per_row: whether each row's value takes an upstream gradient of its own, or only the sum does.
        linear: whether both are hidden states with a head, or logits.
        total: sums a 0-d tensor over whoever has other rows of the same call.
    """

    teacher: Teacher | None
    recipe: Recipe
    teacher_transform: Transform
    factor: float
    per_row: bool
    linear: bool
    total: Callable[[Tensor], Tensor] | None = None

    def flat(self) -> Pair:
        """The teacher over rows without a shape."""
        assert self.teacher is not None
        x, u, rows, columns = self.teacher.x, self.teacher.extra_x, self.teacher.rows, self.teacher.columns
        flat = replaced(
            self.teacher,
            x=x.reshape(-1, x.shape[-1]) if self.linear else x,
            extra_x=None if u is None else u.reshape(-1, u.shape[-1]),
            rows=None if rows is None else rows.reshape(-1).to(torch.int64).contiguous(),
            columns=None if columns is None else columns.to(torch.int64),
        )
        return replaced(self, teacher=flat)

    @property
    def tensors(self) -> list[Tensor]:
        """Those that there are."""
        return [t for t in self.teacher or () if t is not None]

    @property
    def integers(self) -> list[int]:
        """What :meth:`unpacked` makes a pair of, but for the floats and tensors."""
        skip = self.teacher_transform.skip_id
        there = sum((t is not None) << i for i, t in enumerate(self.teacher or ()))
        return [
            int(self.per_row),
            int(self.linear),
            there,
            -1 if skip is None else skip,
            *_recipes.indices(self.recipe),
        ]

    @property
    def floats(self) -> list[float]:
        """Likewise."""
        return [self.factor, *self.teacher_transform.factors, *_recipes.floats(self.recipe)]

    @classmethod
    def unpacked(cls, integers: Sequence[int], floats: Sequence[float], tensors: Sequence[Tensor]) -> Pair:
        """The pair of :attr:`integers`, :attr:`floats` and :attr:`tensors`, or, without these, the same without a teacher."""
        per_row, linear, there, skip, *indices = integers
        transform = Transform.of(floats[1:3], None if skip < 0 else skip)
        those = iter(tensors)
        fields = (next(those) if there >> i & 1 else None for i in range(len(Teacher._fields) if tensors else 0))
        teacher = Teacher(*fields) if tensors else None  # type: ignore[arg-type]
        return cls(
            teacher, _recipes.recipe_of(indices, list(floats[3:])), transform, floats[0], bool(per_row), bool(linear)
        )
