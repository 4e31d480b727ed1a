"""Float arguments of a compiled op that may vary between calls, such as an annealed temperature.

torch.compile turns a float that has changed into a symbol. It specialises on the symbol again when an op takes it as a
float, so that each value would need its own graph. A CPU tensor, which the op reads when it runs, stays symbolic.
Floats that have not changed stay floats, because a graph with a CPU tensor cannot be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def packed(numbers: Sequence[float]) -> tuple[list[float], torch.Tensor | None]:
    """Encode numbers for the schema of a custom op: as floats, or as zeros and one float64 tensor."""
    if not torch.compiler.is_compiling() or not any(_changes(number) for number in numbers):
        return list(numbers), None
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return [0.0] * len(numbers), torch.stack([one * number for number in numbers])  # tensor * symbol: a tensor


def unpacked(numbers: Sequence[float], changing: torch.Tensor | None) -> Sequence[float]:
    """Decode the output of :func:`packed` when the op runs."""
    return numbers if changing is None else changing.tolist()


def equals(number: float, constant: float) -> bool:
    """Compare with a constant; False for a symbolic number, because comparing it would specialise the graph."""
    return (not torch.compiler.is_compiling() or not _changes(number)) and number == constant


def printable(number: float) -> object:
    """Return the number as an error message prints it; a symbol cannot be printed."""
    return "another" if torch.compiler.is_compiling() and _changes(number) else number


def _changes(number: float) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imported lazily, because it is slow

    return not has_static_value(number)
