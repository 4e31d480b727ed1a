"""16-byte accesses for rows that allow them, without specialising kernels on the length of a row.

The compiler emits wide accesses if it can prove that positions and the ends of masks are multiples of 16. If the
launcher specialised the kernel on that, training with variable lengths would wait for a second compilation. Therefore a
kernel contains each load and store twice. At run time ``all_multiples`` tests the sizes and strides. It selects the
version with ALIGNED, which uses a :func:`multiple` of each, or the version without.
"""

import triton
import triton.language as tl


@triton.jit
def all_multiples(a, b, c, d):
    """Return True if all arguments are multiples of 16."""
    return ((a | b | c | d) % 16) == 0


@triton.jit
def multiple(number, ALIGNED: tl.constexpr):
    """Return the number, a multiple of 16 if ALIGNED, in a form that the compiler recognises."""
    if ALIGNED:
        return number // 16 * 16
    else:
        return number


@triton.jit
def rounded_up(number):
    """Round up to a multiple of 16 in a form that the compiler recognises."""
    return (number + 15) // 16 * 16
