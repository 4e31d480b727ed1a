"""Entries of logits, such as those of targets and the maxima, as operands beside the logits themselves.

Statistics are computed from chunks of logits, and differ from the entries by rounding. A comparison of the logits with
them, such as the rank of a target, needs the entries. They are then selected from the values of the logits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dllm_kernels._graph._private import same_storage

Tensor = torch.Tensor


class Noted(NamedTuple):
    """A tensor without a graph that has entries of logits.

    Attributes:
        base: reference to the tensor, or to the one that it is a view of.
        version: version of the tensor.
        key: key of the values of the logits.
        select: returns the entries from the values.
        stride: strides of the tensor.
        offset: offset of the tensor in its memory.
    """

    base: Callable[[], Tensor | None]
    version: int
    key: Any
    select: Callable[[Tensor], Tensor]
    stride: tuple[int, ...]
    offset: int

    def selected(self, values: Tensor, t: Tensor) -> Tensor:
        """Return the entries from the values, laid out like ``t``, a view of the tensor."""
        entries = self.select(values)
        whole = torch.empty_strided(entries.shape, self.stride, dtype=entries.dtype, device=entries.device)
        return whole.copy_(entries).as_strided(t.shape, t.stride(), t.storage_offset() - self.offset)


def note(x: Any, result: Any, select: Callable[[Tensor], Tensor]) -> Any:
    """Note that ``select`` returns the result from the values of ``x``, logits or a term; return the result."""
    if hasattr(result, "_entries"):
        result._entries = x.values_key, select
    elif x.values_key is not None and not result.is_inference():  # an inference tensor has no version
        base = weakref.ref(result if result._base is None else result._base)
        noted = Noted(base, result._version, x.values_key, select, result.stride(), result.storage_offset())
        x.noted[:] = [*(each for each in x.noted if each.base() is not None), noted]
    return result


def _noted(t: Any, x: Any) -> Noted | None:
    """Return what is noted of a tensor that has entries of ``x``, or None."""
    for noted in x.noted if type(t) is Tensor and not t.is_inference() else ():
        base = noted.base()
        same = base is not None and same_storage(t, base) and t._version == noted.version
        if same and noted.key == x.values_key:
            return noted  # type: ignore[no-any-return]
    return None


def are_entries(t: Any, x: Any) -> bool:
    """Return True if a tensor without a graph has entries of ``x``."""
    return _noted(t, x) is not None


def beside(t: Any, objects: Sequence[Any], use: str) -> Any:
    """Return a tensor that has entries of one of the objects, selected from the object's values; otherwise None."""
    sources = [x for x in objects if hasattr(x, "noted") and x is not t]
    if not hasattr(t, "_entries"):
        for x in sources:
            if (noted := _noted(t, x)) is not None:
                return noted.selected(x.dense(use), t)
        return None
    root, steps = t, list[Any]()
    while root._entries is None and len(root.sources) == 1 and not root.watched:
        steps, root = [root._recipe.function, *steps], root.sources[0]
    for x in sources if root._entries is not None and not root.watched else ():
        key, select = root._entries
        if key is not None and key == x.values_key:
            value = select(x.materialize(use))
            for step in steps:
                value = step(value)
            return value
    return None
