r"""Transform of the logits inside the kernels, shared by all of them.

A kernel takes three integers, ``logit_scale, inv_softcap, skip_id`` (:func:`arguments`), and passes them on as one
tuple. Each is None if the transform has no such step. A None argument is a compile-time constant, and the step is
compiled out. The numbers are passed as the bits of a float64, because a launch would round a float to float32. No
launcher specialises on them, so that another temperature does not compile another kernel.

With a and b for the first two: **without a cap**, x = a z. **With a cap**, a = scale * softcap, b = 1 / softcap,
u = b z and, from one exponential,

    q = exp(-2 |u|),    r = 1 / (1 + q),    x = a tanh(u),    dx/dz = a b (1 - tanh(u)^2) = a b 4 q r^2.

The slope has full relative precision, however flat the cap is. tanh(|u|) is 1 - 2 q r. For |u| below 0.625, where the
difference would cancel, it is an odd function of Cephes (Moshier, ``tanhf.c``, ``tanh.c``). Each product plus a term is
an explicit fused multiply-add, so that a logit has one transformed value in every kernel, and equal logits tie.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from dllm_kernels.rows._transform import Transform

MINUS_2_LOG2E = tl.constexpr(-2.8853900817779268)
Arguments = tuple[int | None, int | None, int | None]


def arguments(transform: Transform) -> Arguments:
    """Convert a transform to the arguments of a kernel; ``skip_id`` is a column of the tensor that the kernel reads."""
    cap, scale, skip_id = transform
    if cap is None:
        return None if scale is None else bits_of(scale), None, skip_id
    return bits_of(cap if scale is None else cap * scale), bits_of(1 / cap), skip_id


def bits_of(number: float) -> int:
    """Return the bits of a float64 as an int.

    0 becomes -0.0, because the int 0 would be passed as an int32 and compile another kernel.
    """
    bits: int = struct.unpack("<q", struct.pack("<d", number or -0.0))[0]
    return bits


@triton.jit
def number(bits, ACC: tl.constexpr):
    """Decode the output of ``bits_of``."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True).to(ACC)


@triton.jit
def _polynomial(s, c0, c1, c2, c3, c4, ACC: tl.constexpr):
    """Evaluate a polynomial in s; the highest coefficient comes first."""
    p = tl.fma(s, tl.full(s.shape, c0, ACC), tl.full(s.shape, c1, ACC))
    p = tl.fma(s, p, tl.full(s.shape, c2, ACC))
    p = tl.fma(s, p, tl.full(s.shape, c3, ACC))
    return tl.fma(s, p, tl.full(s.shape, c4, ACC))


@triton.jit
def _tanh(u, ACC: tl.constexpr):
    a = tl.abs(u)
    s = u * u
    near = a < 0.625
    q = tl.exp2(a * MINUS_2_LOG2E)
    if tl.float64 == ACC:  # one division for both
        p = _polynomial(
            s, 0.0, 0.0, -9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3, ACC
        )
        d = _polynomial(s, 0.0, 1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3, ACC)
        t = tl.where(near, a, 1.0) + tl.where(near, s * a * p, -2 * q) / tl.where(near, d, 1 + q)
    else:
        p = _polynomial(
            s, -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1, ACC
        )
        t = tl.where(near, tl.fma(s * a, p, a), tl.fma(-2 * q, 1 / (1 + q), tl.full(u.shape, 1.0, ACC)))
    return tl.where(u < 0, -t, t)


@triton.jit
def _slope(u, ACC: tl.constexpr):
    """Compute the derivative of tanh."""
    if tl.float64 == ACC:
        t = _tanh(u, ACC)
        return tl.fma(-t, t, tl.full(u.shape, 1.0, ACC))
    else:
        q = tl.exp2(tl.abs(u) * MINUS_2_LOG2E)
        r = 1 / (1 + q)
        return 4 * q * r * r


@triton.jit
def with_column(x, v, skip_id, value, first):
    """Replace ``x`` by the value in the column ``skip_id``; ``first`` as in :func:`transformed`."""
    if first is None:
        return tl.where(v == skip_id, value, x)
    else:  # few tiles contain the column, and a comparison in every lane takes more registers than all the rest
        i = skip_id - first
        if (i >= 0) & (i < v.shape[0]):
            x = tl.where(v == i, value, x)
        return x


@triton.jit
def transformed(z, v, transform, ACC: tl.constexpr, first=None):
    """Transform the logits of the columns v of a row in ACC; the caller overwrites masked lanes.

    If ``first`` is given, the columns are first + v with v = 0, 1, 2, ...; in such a tile the
    skipped column is cheaper to find.
    """
    logit_scale, inv_softcap, skip_id = transform
    x = z.to(ACC)
    if inv_softcap is not None:
        x = number(logit_scale, ACC) * _tanh(x * number(inv_softcap, ACC), ACC)
    elif logit_scale is not None:
        x = x * number(logit_scale, ACC)
    if skip_id is not None:
        x = with_column(x, v, skip_id, -float("inf"), first)
    return x


@triton.jit
def logits_transform_bwd(grad, z, v, transform, ACC: tl.constexpr, first=None):
    """Backpropagate through the transform: multiply by the slope, and zero the skipped column."""
    logit_scale, inv_softcap, skip_id = transform
    if inv_softcap is not None:
        inverse = number(inv_softcap, ACC)
        grad = grad * (number(logit_scale, ACC) * inverse) * _slope(z.to(ACC) * inverse, ACC)
    elif logit_scale is not None:
        grad = grad * number(logit_scale, ACC)
    if skip_id is not None:
        grad = with_column(grad, v, skip_id, 0.0, first)
    return grad
