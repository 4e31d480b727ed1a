"""Float arguments of a compiled op that may vary between calls, such as an annealed temperature.

torch.compile turns a float that has changed into a symbol. It specialises on the symbol again when an op takes it as a
float, so that each value would need its own graph. A CPU tensor, which the op reads when it runs, stays symbolic.
Floats that have not changed stay floats, because a graph with a CPU tensor cannot be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def packed(values: Iterable[Any]) -> tuple[list[Any], Tensor | None]:
    """Encode floats, tuples of floats, and None, which is 0: as they are, or as zeros and one float64 tensor."""
    values = [0.0 if value is None else value for value in values]
    numbers = [number for value in values for number in (value if isinstance(value, tuple) else (value,))]
    if not torch.compiler.is_compiling() or not any(_changes(number) for number in numbers):
        return values, None
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return _filled(values, [0.0] * len(numbers)), torch.stack([one * n for n in numbers])  # tensor * symbol: a tensor


def unpacked(values: Sequence[Any], changing: Tensor | None) -> Sequence[Any]:
    """Decode the output of :func:`packed` when the op runs."""
    return values if changing is None else _filled(values, changing.tolist())


def _filled(values: Iterable[Any], numbers: Iterable[float]) -> list[Any]:
    """Replace all numbers of ``values``, in order."""
    rest = iter(numbers)
    return [[next(rest) for _ in value] if isinstance(value, (tuple, list)) else next(rest) for value in values]


def equals(number: float, constant: float) -> bool:
    """Compare with a constant; False for a symbolic number, because comparing it would specialise the graph."""
    return (not torch.compiler.is_compiling() or not _changes(number)) and number == constant


def printable(number: float) -> object:
    """Return the number as an error message prints it; a symbol cannot be printed."""
    return "another" if torch.compiler.is_compiling() and _changes(number) else number


def _changes(number: float) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imported lazily, because it is slow

    return not has_static_value(number)
