"""The functions that ``_opaque`` decorates, in the order of their definition; ``_custom_ops`` registers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

# Shape and dtype of a result, or None for a result that is not computed.
Spec = tuple[Sequence[int], torch.dtype] | None


class Opaque(NamedTuple):
    """A function that is one node of a compiled graph.

    Attributes:
        name: name of the custom op.
        function: the implementation; each argument is a tensor, None, a number, a string, or a named tuple of these.
        specs: takes the same arguments; returns the :data:`Spec` of each result.
    """

    name: str
    function: Callable[..., Any]
    specs: Callable[..., Sequence[Spec]]


DEFINED: list[Opaque] = []
