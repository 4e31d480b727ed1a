r"""Score of a Gumbel top-k selection or sample, defined operation by operation so that all devices agree.

    score = x - ln(-ln u)

Math libraries round logarithms differently, and a difference in the last bit can swap two positions. Therefore ``x``
and ``u`` are cast to float64, and ``ln`` is ``exact_log`` below. It consists of integer operations and float64
additions, subtractions, products and quotients, each rounded separately as IEEE 754 requires. The kernels compute the
same sequence with contraction into fused multiply-adds turned off (``backends/triton/_select.py``).

``exact_log`` errs by less than 2 ulp, so an oracle that uses another float64 logarithm picks the same positions unless
two scores lie within about 1e-15 of each other.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dllm_kernels.corruption._rules import Array, float64

SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
# ln 2 in two parts: the first has 32 significant bits, so that its product with an exponent is exact.
LN2_HIGH = float.fromhex("0x1.62e42feep-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
# The coefficients of fdlibm's e_log.c (Sun Microsystems, 1993), for x^2 <= 0.0295.
COEFFICIENTS = tuple(map(float.fromhex, (
    "0x1.2f112df3e5244p-3", "0x1.39a09d078c69fp-3", "0x1.7466496cb03dep-3", "0x1.c71c51d8e78afp-3",
    "0x1.2492494229359p-2", "0x1.999999997fa04p-2", "0x1.5555555555593p-1",
)))  # fmt: skip


def score(x: Array, u: Array) -> Array:
    """Compute ``x - ln(-ln u)`` in float64, torch or NumPy, bitwise equal on every device; u in (0, 1)."""
    return float64(x) - exact_log(-exact_log(u))


def exact_log(x: Array) -> Array:
    """Compute ``ln x`` of positive normal float64 numbers, torch or NumPy, bitwise equal on every device.

    With ``x = 2^e (1 + f)``, ``1 + f`` in [sqrt(1/2), sqrt(2)), and ``s = f / (2 + f)``, it is
    ``ln(1 + f) = f - s (f - R(s^2))``; R is the polynomial of fdlibm's e_log.c.
    """
    integer, floating = (torch.int64, torch.float64) if isinstance(x, Tensor) else (np.int64, np.float64)
    bits = x.view(integer)
    e = (bits - SQRT_HALF_BITS) >> 52
    f = (bits - (e << 52)).view(floating) - 1.0
    s = f / (f + 2.0)
    z = s * s
    poly = COEFFICIENTS[0] * z + COEFFICIENTS[1]
    for c in COEFFICIENTS[2:]:
        poly = poly * z + c
    exponent = float64(e)
    return exponent * LN2_HIGH + (exponent * LN2_LOW + (f - s * (f - z * poly)))
