"""What the instructions compute, on arrays of one number per thread, or on one number if it is the same in all threads.

Fused multiply-adds are rounded twice: to a wider format, and from there to their own. For float32 one result in some
2^29 differs from that of a GPU, for float64 in some 2^52.

The PTX manual bounds the error of ``.approx`` and ``.full`` instructions. Here they are rounded correctly, or with
``PTX_APPROXIMATIONS=far`` as wrong as the manual allows, upwards or downwards by a hash of the operand.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy import where

i1, bool_ = np.int8, np.bool_
u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
i2, i4, i8 = np.int16, np.int32, np.int64
f2, f4, f8 = np.float16, np.float32, np.float64
UNSIGNED = {1: u1, 2: u2, 4: u4, 8: u8}
FAR = os.environ.get("PTX_APPROXIMATIONS") == "far"
Numbers = Any  # an array of one number per thread, or a NumPy scalar


def fma(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
    """Compute a b + c with one rounding, but for double roundings."""
    if a.dtype == f4:
        return (np.multiply(a, b, dtype=f8) + c).astype(f4)  # the product is exact
    product = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    error = ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2
    total = product + c
    part = total - product
    exact = total + (((product - (total - part)) + (c - part)) + error)
    return where(np.isfinite(exact), exact, total)


def _halves(a: Numbers) -> tuple[Numbers, Numbers]:
    """Split float64 numbers into two of 26 bits (Veltkamp), whose products are exact."""
    scaled = a * 134217729.0
    high = scaled - (scaled - a)
    return high, a - high


def ftz(x: Numbers) -> Numbers:
    """Flush subnormal numbers to zero."""
    return where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def minimum(a: Numbers, b: Numbers) -> Numbers:
    """Return the smaller number, or the one that is not NaN; -0 is smaller than 0."""
    return where(a == b, where(np.signbit(b), b, a), np.fmin(a, b))


def maximum(a: Numbers, b: Numbers) -> Numbers:
    """Return the larger number, or the one that is not NaN; 0 is larger than -0."""
    return where(a == b, where(np.signbit(b), a, b), np.fmax(a, b))


def _off(exact: Numbers, operand: Numbers, error: Numbers) -> Numbers:
    """Move float64 results by -1, 0 or 1 times the error, by a hash of the operands."""
    if not FAR:
        return exact
    hashed = operand.astype(f4).view(u4) * u4(2654435761)
    sign = ((hashed ^ (hashed >> u4(15))) >> u4(5)) % u4(3)
    return where(np.isfinite(exact), exact + (sign.astype(f8) - 1) * error, exact)


def ex2(x: Numbers) -> Numbers:
    """Compute 2^x with a relative error of up to 2^-22.5 before rounding; exact for integers."""
    exact = np.exp2(x.astype(f8))
    return _off(exact, x, where(np.floor(x) == x, 0, exact * 1.08e-7)).astype(f4)


def lg2(x: Numbers) -> Numbers:
    """Compute log2(x) with an error of up to 2^-22, absolute in (0.5, 2), else relative; exact for powers of 2."""
    exact = np.log2(x.astype(f8))
    error = where((x > 0.5) & (x < 2), 2.0e-7, exact * 1.7e-7)
    return _off(exact, x, where(np.floor(exact) == exact, 0, error)).astype(f4)


def div_full(a: Numbers, b: Numbers) -> Numbers:
    """Divide with an error of up to 2 ulp."""
    exact = a.astype(f8) / b
    return _off(exact, exact, where(a == b, 0, exact * 1.5 * 2.0**-24)).astype(f4)


def rcp(x: Numbers) -> Numbers:
    """Compute 1 / x of the upper 32 bits of a float64; the lower bits of the result are 0."""
    upper = u8(0xFFFFFFFF00000000)
    return (ftz(1.0 / ftz((x.view(u8) & upper).view(f8))).view(u8) & upper).view(f8)


def from_bf16(x: Numbers) -> Numbers:
    """Convert the bits of bfloat16 to float32."""
    return (x.astype(u4) << u4(16)).view(f4)


def to_bf16(x: Numbers) -> Numbers:
    """Round float32 to bfloat16, half to even, and return its bits."""
    bits = x.view(u4)
    rounded = (bits + u4(0x7FFF) + ((bits >> u4(16)) & u4(1))) >> u4(16)
    return where(np.isnan(x), u4(0x7FFF), rounded).astype(u2)


def to_f16(x: Numbers) -> Numbers:
    """Round float32 to float16 and return its bits."""
    return where(np.isnan(x), u2(0x7FFF), x.astype(f2).view(u2))


def pair(high: Numbers, low: Numbers) -> Numbers:
    """Join two numbers of 16 bits."""
    return (high.astype(u4) << u4(16)) | low


def to_integer(x: Numbers, dtype: type[np.integer[Any]]) -> Numbers:
    """Convert whole floats to integers, clamped to their range; NaN gives 0."""
    limits = np.iinfo(dtype)
    x = where(np.isnan(x), 0, x.astype(f8))
    low, high = x <= float(limits.min), x >= float(limits.max)
    return where(low, dtype(limits.min), where(high, dtype(limits.max), where(low | high, 0, x).astype(dtype)))


def mul_hi(a: Numbers, b: Numbers) -> Numbers:
    """Compute the upper half of the product of two uint64."""
    half, low = u8(32), u8(0xFFFFFFFF)
    a1, a0, b1, b0 = a >> half, a & low, b >> half, b & low
    middle = a1 * b0 + (a0 * b0 >> half)
    return a1 * b1 + (middle >> half) + ((a0 * b1 + (middle & low)) >> half)


def div(a: Numbers, b: Numbers) -> Numbers:
    """Divide integers, rounded to zero; all bits of a quotient by zero are set."""
    zero = b == 0
    divisor = where(zero, b.dtype.type(1), b)
    quotient = a // divisor
    quotient = quotient + ((quotient * divisor != a) & (quotient < 0)).astype(a.dtype)
    return where(zero, ~a.dtype.type(0), quotient)


def shl(a: Numbers, count: Numbers) -> Numbers:
    """Shift left; a count beyond the width gives 0."""
    return a << count.astype(a.dtype)


def shr(a: Numbers, count: Numbers) -> Numbers:
    """Shift right; a signed number shifts its sign in."""
    if a.dtype.kind == "i":
        count = np.minimum(count, u4(8 * a.dtype.itemsize - 1))
    return a >> count.astype(a.dtype)


def bfe(a: Numbers, first: Numbers, count: Numbers) -> Numbers:
    """Extract ``count`` bits from bit ``first`` on, which end within the number; a signed number extends its sign."""
    width = u4(8 * a.dtype.itemsize)
    return shr(shl(a, width - first - count), width - count)


def bfi(a: Numbers, b: Numbers, first: Numbers, count: Numbers) -> Numbers:
    """Replace ``count`` bits of ``b``, from bit ``first`` on, by the first bits of ``a``."""
    replaced = shl(~shl(~a.dtype.type(0), count), first)
    return (b & ~replaced) | (shl(a, first) & replaced)


def prmt(a: Numbers, b: Numbers, selector: Numbers) -> Numbers:
    """Select four bytes of the eight of two numbers, by a selector that is the same in all threads."""
    result = u4(0)
    for k in range(4):
        choice = int(selector) >> (4 * k) & 15
        byte = ((a, b)[choice >> 2 & 1] >> u4(8 * (choice & 3))) & u4(255)
        if choice & 8:  # its sign
            byte = (byte >> u4(7)) * u4(255)
        result = result | byte << u4(8 * k)
    return result
