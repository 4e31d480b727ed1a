"""Numbers of a compiled op that may change from call to call, as an annealed temperature does.

torch.compile makes a symbol of a float that has changed, but a symbol that goes into an op as a float is made a constant
again, and every value a graph of its own. As a tensor on the CPU, which the op reads when it runs, it stays one. Numbers
that have not changed stay floats: a graph with a tensor on the CPU is no CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def packed(numbers: Sequence[float]) -> tuple[list[float], torch.Tensor | None]:
    """As an op's schema can carry them: floats, or zeros in their places and a float64 tensor of all of them."""
    if not torch.compiler.is_compiling() or not any(_changes(number) for number in numbers):
        return list(numbers), None
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return [0.0] * len(numbers), torch.stack([one * number for number in numbers])  # the products become tensor's


def unpacked(numbers: Sequence[float], changing: torch.Tensor | None) -> Sequence[float]:
    """The numbers of :func:`packed`, where the op runs."""
    return numbers if changing is None else changing.tolist()


def equals(number: float, constant: float) -> bool:
    """Whether they are equal; False of a number that changes, which the question would make a constant."""
    return (not torch.compiler.is_compiling() or not _changes(number)) and number == constant


def shown(number: float) -> object:
    """The number for an error's message, into which no symbol can be written."""
    return "another" if torch.compiler.is_compiling() and _changes(number) else number


def _changes(number: float) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import, and only a trace needs it

    return not has_static_value(number)
