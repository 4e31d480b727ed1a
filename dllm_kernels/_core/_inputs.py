"""Tensors of one call of a row op, and which of them receive gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


class Gradients(NamedTuple):
    """Gradients of the differentiable inputs; None for inputs with ``requires_grad=False``."""

    x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    extra_x: Tensor | None = None
    extra_weight: Tensor | None = None


# Inputs whose gradients have one row per row of the call. Gradients of the other inputs, the head, are sums over rows.
OF_ROWS = ("x", "extra_x")


class NeedsGrad(NamedTuple):
    """Flags of the differentiable inputs that require a gradient."""

    x: bool = False
    weight: bool = False
    bias: bool = False
    extra_x: bool = False
    extra_weight: bool = False

    @classmethod
    def of(cls, inputs: Iterable[Tensor | None]) -> NeedsGrad:
        """Evaluate before ``autograd.Function.apply``: inside its forward, requires_grad is True even under no_grad.

        Inside a transform of ``torch.func``, an enclosing level may require a gradient that the innermost does not.
        """
        if not torch.is_grad_enabled():
            return NO_GRADIENTS
        return cls(*[t is not None and t.requires_grad for t in inputs])

    @property
    def frozen_head(self) -> bool:
        """True if only rows need a gradient, so that each depends on the upstream gradient of its own row alone."""
        return (self.x or self.extra_x) and not (self.weight or self.bias or self.extra_weight)


NO_GRADIENTS = NeedsGrad()


class RowInputs(NamedTuple):
    """Tensors of a call: rows of logits, or of hidden states with the LM head, and constants per row.

    Public functions build it with rows of the caller's shape ``[...]``, and :func:`flattened` reshapes them to N rows.
    A field typed ``Any`` is a tensor in the ops that read it, and None in all others.

    Attributes:
        x: logits ``[..., V]`` in any strides, which are never flattened; or hidden states ``[..., D]``.
        ids: int64 ``[...]`` or ``[..., K]``, targets or ids to look up. Flattened: ``[N, K]``, -1 for an id without a
            column.
        weight: LM head ``[V, D]``; None for logits.
        bias: ``[V]`` or None.
        extra_x: ``[..., r]``, rows of the low-rank part of the head, or None.
        extra_weight: ``[V, r]``; ``extra_x extra_weight^T`` is added to the logits.
        active: mask ``[...]``, zero for inactive rows, or None. Flattened: None, see ``targets``.
        targets: flattened only. int64 ``[N]``: ``IGNORE`` in inactive rows, the target in active rows, or 0 in ops
            without targets.
        weights: ``[...]``, row weights of a weighted sum, or None.
        mix_a: ``[...]``, a of the mixture ``log(a + b p)``, or None.
        mix_b: ``[...]``, b of the mixture, or None.
        bump: ``[...]``, added to the logit of the row's id (soft embedding), or None.
        embedding: ``[V, E]``, averaged under each row's distribution (soft embedding), or None.
        seeds: int64 ``[...]``, seed of each row's noise (samples), or None.
        row_numbers: int64 ``[...]``, number of each row under its seed, or None.
        teacher_x: teacher logits ``[..., V']`` or hidden states ``[..., D']``, or None. Flattened: hidden states
            ``[R, D']``.
        teacher_weight: LM head of the teacher ``[V', D']``; None for logits, and if it shares the student's.
        teacher_bias: bias of ``teacher_weight``, or None.
        teacher_rows: int64 ``[...]``, teacher row of each student row; None for the same row.
        teacher_columns: int64 ``[V]``, teacher column of each student column; None for the same column.
        teacher_inverse: int64 ``[V']``, student column of each teacher column, -100 for teacher columns without one;
            None without ``teacher_columns``.
        teacher_extra_x: ``[..., r]``, rows of the low-rank part of the teacher's head, or None.
        teacher_extra_weight: ``[V', r]`` or None.
        aux: tensors ``[..., *]`` passed on to the objective.
    """

    x: Tensor
    ids: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    extra_x: Any = None
    extra_weight: Any = None
    active: Tensor | None = None
    targets: Any = None
    weights: Any = None
    mix_a: Tensor | None = None
    mix_b: Tensor | None = None
    bump: Tensor | None = None
    embedding: Any = None
    seeds: Tensor | None = None
    row_numbers: Tensor | None = None
    teacher_x: Any = None
    teacher_weight: Tensor | None = None
    teacher_bias: Tensor | None = None
    teacher_rows: Tensor | None = None
    teacher_columns: Tensor | None = None
    teacher_inverse: Tensor | None = None
    teacher_extra_x: Tensor | None = None
    teacher_extra_weight: Tensor | None = None
    aux: tuple[Tensor, ...] = ()

    @property
    def grad_inputs(self) -> tuple[Tensor | None, ...]:
        """Inputs that may require a gradient, in the order of :class:`NeedsGrad`."""
        return self.x, self.weight, self.bias, self.extra_x, self.extra_weight

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All fields except ``aux``."""
        return self[:-1]

    @property
    def head(self) -> Tensor:
        """The LM head, which must be present."""
        assert self.weight is not None
        return self.weight

    @classmethod
    def restored(cls, names: Sequence[str], tensors: Sequence[Any]) -> RowInputs:
        """Rebuild from some of the fields; all others are None."""
        return cls(**{**_EMPTY, **dict(zip(names, tensors, strict=True))})


GRAD_INPUTS = Gradients._fields
TENSORS = RowInputs._fields[:-1]
# Inputs with one entry per row, which are sliced if rows are split over ranks.
PER_ROW = ("ids", "active", "weights", "mix_a", "mix_b", "bump", "seeds", "row_numbers")
_EMPTY: dict[str, Any] = dict.fromkeys(TENSORS)


def flattened(inputs: RowInputs, dtype: torch.dtype, ids: Tensor, targets: Tensor) -> RowInputs:
    """Flatten the inputs to N rows, with these flattened ids and targets; cast other per-row values to ``dtype``."""
    fields = inputs._asdict() | {"ids": ids, "targets": targets, "active": None}
    for name in ("weights", "mix_a", "mix_b", "bump"):
        if (t := fields[name]) is not None:
            fields[name] = t.detach().reshape(-1).to(dtype).contiguous()
    for name in ("x", "extra_x", "teacher_x", "teacher_extra_x") if inputs.weight is not None else ():
        if (t := fields[name]) is not None:
            fields[name] = t.reshape(-1, t.shape[-1])
    for name in ("teacher_rows", "seeds", "row_numbers"):
        if (t := fields[name]) is not None:
            fields[name] = t.reshape(-1).to(torch.int64).contiguous()
    if inputs.teacher_columns is not None:
        fields["teacher_columns"] = inputs.teacher_columns.to(torch.int64)
    N, rows = targets.shape[0], inputs.x.dim() - 1
    fields["aux"] = tuple(t.detach().reshape(N, *t.shape[rows:]) for t in inputs.aux)
    return RowInputs(**fields)
