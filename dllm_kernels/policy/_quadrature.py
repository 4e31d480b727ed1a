"""Nodes and weights of Gauss-Legendre quadrature on (0, 1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dllm_kernels._graph._opaque import opaque


@opaque("quadrature_rule", lambda like, num: [((2, num), torch.float32)])
def quadrature_rule(like: Tensor, num: int) -> list[Tensor]:
    """Return ascending nodes t and g / t with weights g of sum 1, float32 ``[2, num]`` on the device of ``like``.

    One fill per number, because copying a list to a GPU is a host sync. Tracing Newton's method would unroll it, and
    with a symbolic number of nodes it would build expressions without end.
    """
    nodes, factors = gauss_legendre(num)
    numbers = [*nodes, *(g / t for t, g in zip(nodes, factors, strict=True))]
    filled = [torch.full((), x, dtype=torch.float32, device=like.device) for x in numbers]
    return [torch.stack(filled).view(2, num)]


def gauss_legendre(num: int) -> tuple[list[float], list[float]]:
    """Return ascending nodes in (0, 1) and weights with sum 1.

    The nodes are the roots of the Legendre polynomial P_num, by Newton's method from Tricomi's approximation. With x a
    root, the weight is ``1 / ((1 - x^2) P'(x)^2)``, half of that on (-1, 1).
    """
    nodes, factors = [], []
    for i in range(num, 0, -1):
        x = math.cos(math.pi * (i - 0.25) / (num + 0.5))
        for _ in range(8):
            before, p = 1.0, x
            for j in range(2, num + 1):
                before, p = p, ((2 * j - 1) * x * p - (j - 1) * before) / j
            slope = num * (before - x * p) / (1.0 - x * x)
            x -= p / slope
        nodes.append((1.0 + x) / 2)
        factors.append(1.0 / ((1.0 - x * x) * slope * slope))
    return nodes, factors
