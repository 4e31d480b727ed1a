"""Values of deferred tensors to which nothing but derived tensors refers: they are released, as plain code does."""

from __future__ import annotations

import weakref
from typing import Any

from dllm_kernels._graph._own_graph import own_graph


def replace_source(tensor: Any, index: int) -> Any:
    """Replace a source to which nothing else refers by a twin, without values, and return the twin; or None.

    The caller must hold no reference to the source.
    """
    twin, ref = tensor.sources[index].twin(), weakref.ref(tensor.sources[index])

    def replace(other: Any) -> None:
        tensor.sources = tensor._recipe.sources = (*tensor.sources[:index], other, *tensor.sources[index + 1 :])

    replace(twin)
    source = ref()
    if source is not None:
        replace(source)
        return None
    twin._derived.append(weakref.ref(tensor))
    return twin


def release_sources(tensor: Any) -> None:
    """Release the values of sources to which nothing else refers, once for a function that is recomputed."""
    for i in range(0 if tensor.is_view else len(tensor.sources)):  # no reference to the sources may remain
        x = tensor.sources[i]
        known = x._value is not None or x._dense is not None
        releasable = known and not x.watched and x._own_node and not x._copy
        del x
        with own_graph():
            twin = replace_source(tensor, i) if releasable else None
        if twin is not None:
            release_sources(twin)
