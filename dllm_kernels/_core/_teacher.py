"""The teacher of a divergence: its rows, its LM head, and which of them are compared."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from dllm_kernels._core._rows import flat_index
from dllm_kernels._core._setup import flat_rows


class TeacherHead(NamedTuple):
    """LM head of the teacher, a constant; all None for logits.

    Attributes:
        weight: ``[V', D']``; None for logits, and if it shares the student's.
        bias: bias of ``weight`` or None.
        u: ``[..., r]``, rows of the low-rank part, or None.
        U: ``[V', r]`` or None.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    u: Tensor | None = None
    U: Tensor | None = None


class Teacher(NamedTuple):
    """Teacher of a divergence; all tensors are constants.

    Attributes:
        x: logits ``[..., V']`` or hidden states ``[..., D']``.
        head: its own LM head.
        rows: int64 ``[...]``, teacher row of each student row; None for the same row.
        columns: int64 ``[V]``, teacher column of each student column; None for the same column.
        inverse: int64 ``[V']``, student column of each teacher column, -100 for teacher columns without one; None
            without ``columns``.
    """

    x: Tensor
    head: TeacherHead = TeacherHead()
    rows: Tensor | None = None
    columns: Tensor | None = None
    inverse: Tensor | None = None

    SCHEMA = (
        "Tensor teacher, Tensor? teacher_weight, Tensor? teacher_bias, Tensor? teacher_u, Tensor? teacher_U, "
        "Tensor? teacher_rows, Tensor? draft_to_target, Tensor? target_to_draft"
    )

    def flat(self, *, from_hidden: bool) -> Teacher:
        """Return the teacher with flat rows: hidden states ``[R, D']``; logits keep their shape."""
        rows = None if self.rows is None else flat_index(self.rows)
        columns = None if self.columns is None else flat_index(self.columns)
        x = flat_rows(self.x) if from_hidden else self.x
        return Teacher(x, self.head._replace(u=flat_rows(self.head.u)), rows, columns, self.inverse)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of :attr:`SCHEMA`."""
        x, head, rows, columns, inverse = self
        of_head = {f"teacher_{name}": t for name, t in head._asdict().items()}
        return {"teacher": x, **of_head, "teacher_rows": rows, "draft_to_target": columns, "target_to_draft": inverse}

    @classmethod
    def from_arguments(cls, **given: Any) -> Teacher:
        """Rebuild from :meth:`arguments`."""
        head = TeacherHead(*[given[f"teacher_{name}"] for name in TeacherHead._fields])
        return cls(given["teacher"], head, given["teacher_rows"], given["draft_to_target"], given["target_to_draft"])
