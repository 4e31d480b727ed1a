"""Deferred logsumexp of logits: what is subtracted from the logits need not be computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dllm_kernels.fused._graph import Recipe, Step
from dllm_kernels.fused._moves import Call
from dllm_kernels.fused._tensor import DeferredTensor, form_after

Tensor = torch.Tensor


class DeferredLse(DeferredTensor):
    """Logsumexp of rows.

    Parts: those of the logits, with the classes as the last dimension.

    Attributes:
        logits: a copy of the attributes of the logits that the rows are from.
        of: the recipe of these logits.
        axis: dimension of size 1 in place of the classes, or None.
    """

    logits: Any
    of: Any
    axis: int | None

    @classmethod
    def of_logits(cls, x: Any, compute: Callable[..., Tensor], dtype: torch.dtype, keepdim: bool) -> Any:
        """Return the logsumexp of logits; ``compute(parts, logits)`` computes it."""
        x.check_unchanged()
        parts, logits, axis = x.classes_last(), x.copied(), x.axis if keepdim else None
        needs = [n and t is not None and t.requires_grad for t, n in zip(parts, x.needs, strict=True)]

        def values(parts: Any) -> Tensor:
            lse = compute(parts, logits).to(dtype)
            return lse.unsqueeze(axis) if axis is not None else lse

        shape = [1 if i == x.axis else n for i, n in enumerate(x.shape) if keepdim or i != x.axis]
        form = torch.empty(shape, dtype=dtype, device="meta")
        made = cls.made(
            form, parts, Recipe(values, x.restored, needs), needs=needs, logits=logits, of=x._recipe, axis=axis
        )
        return made if made.requires_grad else _computed(made, x._recipe)

    def after(self, sources: Sequence[Any], step: Callable[..., Tensor]) -> Any:
        """Return the logsumexp as another tensor."""
        return self.changed(step, sources, None)

    def changed(self, step: Callable[..., Tensor], sources: Sequence[Any], axis: int | None) -> Any:
        """Return a view, or another tensor if ``axis`` is None."""
        recipe, (form, _) = Step(step, self.logits.restored, sources), form_after(step, self)  # type: ignore[misc]
        of = self.of if axis is not None else None
        return self.made(form, self.tapped(), recipe, needs=self.needs, logits=self.logits, of=of, axis=axis)

    def classes(self) -> int:
        """Return the dimension of the classes."""
        return int(self.logits.axis)


def _computed(made: DeferredLse, recipe: Any) -> Tensor:
    """Compute a logsumexp without a graph at once, because the head may change; note whose it is."""
    values = made.materialize()
    if not values.is_inference():
        recipe.lse = weakref.ref(values), values._version
    return values


def is_lse_of(value: Any, x: Any) -> bool:
    """Return True for the logsumexp of these logits, with a dimension in the place of the classes."""
    if isinstance(value, DeferredLse):
        return value.of is x._recipe and value.axis == x.axis
    ref, version = getattr(x._recipe, "lse", (lambda: None, 0))
    known = isinstance(value, Tensor) and value is ref()
    return known and value._version == version and value.dim() == x.ndim


def _with_dimension(x: DeferredLse, call: Call) -> Any:
    """Add a dimension in the place of the classes."""
    found = form_after(call.on, x)
    shape = list(x.shape)
    shape.insert(x.classes(), 1)
    if x.axis is not None or found is None or not found[1] or list(found[0].shape) != shape:
        return NotImplemented
    probe = call.on(torch.empty(tuple(range(2, 2 + x.ndim)), device="meta"))
    expected = list(range(2, 2 + x.ndim))
    expected.insert(x.classes(), 1)
    return x.changed(call.on, [x], x.classes()) if list(probe.shape) == expected else NotImplemented


DeferredLse.rules = {"unsqueeze": _with_dimension, "__getitem__": _with_dimension}
