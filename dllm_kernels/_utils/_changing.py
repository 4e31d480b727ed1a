"""Float arguments of a compiled op that may vary between calls, such as an annealed temperature.

torch.compile turns a float that has changed into a symbol, but specialises on it again when it enters an op as a float,
so that each value would need its own graph. As a CPU tensor, which the op reads when it runs, it stays symbolic. Floats
that have not changed stay floats, because a graph with a CPU tensor cannot be a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def packed(numbers: Sequence[float]) -> tuple[list[float], torch.Tensor | None]:
    """Encode the numbers as an op's schema can carry them: floats, or zeros and a float64 tensor of all of them."""
    if not torch.compiler.is_compiling() or not any(_changes(number) for number in numbers):
        return list(numbers), None
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return [0.0] * len(numbers), torch.stack([one * number for number in numbers])  # the products become tensor's


def unpacked(numbers: Sequence[float], changing: torch.Tensor | None) -> Sequence[float]:
    """Decode the numbers of :func:`packed` when the op runs."""
    return numbers if changing is None else changing.tolist()


def equals(number: float, constant: float) -> bool:
    """Compare with a constant; False for a symbolic number, because comparing it would specialise the graph."""
    return (not torch.compiler.is_compiling() or not _changes(number)) and number == constant


def shown(number: float) -> object:
    """Format the number for an error message, which cannot contain a symbol."""
    return "another" if torch.compiler.is_compiling() and _changes(number) else number


def _changes(number: float) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import, and only a trace needs it

    return not has_static_value(number)
