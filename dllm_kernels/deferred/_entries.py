"""Entries of logits, such as those of targets and the maxima, as operands beside the logits themselves.

Statistics are computed from chunks of logits, and differ from the entries by rounding. A comparison of the logits with
them, such as the rank of a target, needs the entries. They are then selected from the values of the logits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dllm_kernels._graph._private import same_storage

Tensor = torch.Tensor


class Identity(NamedTuple):
    """Identifies logits or a term by their values.

    Attributes:
        key: key of the values, which contains addresses.
        states: references to the memory of the hidden states, which are not kept alive.
        kept: the other objects whose addresses are in the key.
    """

    key: Any
    states: list[StorageWeakRef]
    kept: Any

    @classmethod
    def of(cls, x: Any) -> Identity | None:
        """Return the identity of logits, or of a term; None if only a term itself has its values."""
        if (key := x.values_key) is None:
            return None
        logits = getattr(x, "logits", x)
        states = [StorageWeakRef(t.untyped_storage()) for t in logits.parts[:2] if t is not None]  # type: ignore[no-untyped-call]
        return cls(key, states, (logits.pending, logits.shift.rows, logits.overwritten))

    def is_of(self, x: Any) -> bool:
        """Return True for logits or a term with the same values."""
        return self.key == x.values_key and not any(state.expired() for state in self.states)  # type: ignore[no-untyped-call]


class Noted(NamedTuple):
    """A tensor without a graph that has entries of logits.

    Attributes:
        base: reference to the tensor, or to the one that it is a view of.
        version: version of the tensor.
        source: identity of the logits.
        select: returns the entries from the values.
        stride: strides of the tensor.
        offset: offset of the tensor in its memory.
    """

    base: Callable[[], Tensor | None]
    version: int
    source: Identity
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
    source = Identity.of(x)
    if source is None:
        return result
    if hasattr(result, "_entries"):
        result._entries = source, select
    elif not result.is_inference():  # an inference tensor has no version
        base = weakref.ref(result if result._base is None else result._base)
        noted = Noted(base, result._version, source, select, result.stride(), result.storage_offset())
        x.noted[:] = [*(each for each in x.noted if each.base() is not None), noted]
    return result


def _noted(t: Any, x: Any) -> Noted | None:
    """Return what is noted of a tensor that has entries of ``x``, or None."""
    for noted in x.noted if type(t) is Tensor and not t.is_inference() else ():
        base = noted.base()
        same = base is not None and same_storage(t, base) and t._version == noted.version
        if same and noted.source.is_of(x):
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
        source, select = root._entries
        if source.is_of(x):
            value = select(x.materialize(use))
            for step in steps:
                value = step(value)
            return value
    return None
