"""Accesses of 16 bytes where the rows of a batch allow them, in one kernel for all lengths of a row.

The compiler makes an access wide if it sees that positions and the ends of masks are multiples of 16. If the launcher
specialised the kernel on that, a training with variable lengths would wait for a second compilation. Therefore a
kernel contains each load and store twice: ``all_multiples`` tests the sizes and strides at run time and selects the
version with WIDE, which uses a :func:`multiple` of each, or the version without.
"""

import triton
import triton.language as tl


@triton.jit
def all_multiples(a, b, c, d):
    """Whether all of these are multiples of 16."""
    return ((a | b | c | d) % 16) == 0


@triton.jit
def multiple(number, WIDE: tl.constexpr):
    """Return the number, a multiple of 16 if WIDE, in a form that the compiler recognises."""
    if WIDE:
        return number // 16 * 16
    else:
        return number


@triton.jit
def rounded_up(number):
    """Round up to a multiple of 16 in a form that the compiler recognises."""
    return (number + 15) // 16 * 16
