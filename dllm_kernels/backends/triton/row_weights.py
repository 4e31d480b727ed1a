r"""Row weights of a masked diffusion loss, before and over its denominator, in one launch.

    w = factor [noise_mask and loss_mask] / max(p_mask, ``P_MASK_MIN``),        w / max(count, 1).

In torch these are up to twelve operations on ``[N]``, each a launch. Every operation here is rounded separately, in the
order of torch's operations on a CPU, so that the weights have the same bits. A row outside the masks has the weight 0
even if its p_mask is NaN.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from dllm_kernels.backends.triton import _launch
from dllm_kernels.backends.triton._transform import bits_of, number
from dllm_kernels.rows._interface import P_MASK_MIN

LEAST = tl.constexpr(P_MASK_MIN)
BLOCK = 1024
POINTERS = ["p_mask_ptr", "noise_mask_ptr", "loss_mask_ptr", "factor_ptr", "count_ptr"]
Tensor = torch.Tensor


@triton.jit
def _is_set(mask_ptr, i, in_bounds):
    x = tl.load(mask_ptr + i, mask=in_bounds)
    if x.dtype.primitive_bitwidth == 16:  # the interpreter compares bfloat16 wrongly
        x = x.to(tl.float32)
    return x != 0


@triton.jit
def _quotient(x, y, ACC: tl.constexpr):
    if tl.float64 == ACC:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit(do_not_specialize_on_alignment=POINTERS, do_not_specialize=["N", "factor", "count"])
def _mdlm_weights(
    p_mask_ptr, noise_mask_ptr, loss_mask_ptr, factor_ptr, count_ptr, weight_ptr, divided_ptr, N, factor, count,
    BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = i < N
    on = _is_set(noise_mask_ptr, i, in_bounds) & _is_set(loss_mask_ptr, i, in_bounds)
    p = tl.load(p_mask_ptr + i, mask=in_bounds).to(ACC)
    least = tl.full([BLOCK], LEAST, ACC)
    one = tl.full([BLOCK], 1, ACC)
    weight = tl.where(on, _quotient(one, tl.where(p < least, least, p), ACC), 0.0)  # a NaN stays
    if factor_ptr is not None:
        weight = tl.load(factor_ptr).to(ACC) * weight
    if factor is not None:
        weight = number(factor, ACC) * weight
    tl.store(weight_ptr + i, weight, mask=in_bounds)
    if divided_ptr is not None:
        total = one
        if count_ptr is not None:
            total = total * tl.load(count_ptr).to(ACC)
        if count is not None:
            total = total * number(count, ACC)
        tl.store(divided_ptr + i, _quotient(weight, tl.where(total < 1, one, total), ACC), mask=in_bounds)


def mdlm_weights(
    p_mask: Tensor, noise_mask: Tensor, loss_mask: Tensor, factor: Any, count: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See ``rows/_primitives.py``."""
    masks = [t.contiguous() for t in (p_mask, noise_mask, loss_mask)]
    weights = torch.empty(p_mask.shape, dtype=dtype, device=p_mask.device)
    divided = None if count is None else torch.empty_like(weights)
    numbers = [_pointer_or_bits(value, p_mask) for value in (factor, count)]
    N = p_mask.numel()
    if N:
        pointers, bits = zip(*numbers, strict=True)
        with torch.cuda.device_of(weights):  # called outside of opaque functions
            _mdlm_weights[(triton.cdiv(N, BLOCK),)](
                *masks, *pointers, weights, divided, N, *bits, BLOCK=BLOCK, ACC=_launch.acc(dtype), num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
    return weights, weights if divided is None else divided


def _pointer_or_bits(value: Any, like: Tensor) -> tuple[Tensor | None, int | None]:
    """Return a number on the device of ``like`` as a pointer, any other number as the bits of a float64."""
    if isinstance(value, Tensor) and value.device == like.device:
        return value.detach(), None
    return None, None if value is None else bits_of(float(value))
