"""Gradients that forward computes, for an upstream gradient of 1, and that backward only scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllm_kernels._graph._opaque import Spec, traced
from dllm_kernels.rows._call import times_upstream
from dllm_kernels.rows._fused import Once, link_to
from dllm_kernels.rows._logits import Head
from dllm_kernels.rows._setup import PER_ROW_GRADS, Gradients, NeedsGrad, Setup


def keep_gradients(
    ctx: Any, hidden: Tensor, head: Head, results: tuple[Gradients, Tensor | None, Tensor | None], setup: Setup,
    once: tuple[str, str] | None,
) -> Tensor:  # fmt: skip
    """Save the gradients for :func:`scale_gradients`; return the link, which forward must return as an output.

    Args:
        ctx: context of the Function.
        hidden: ``[N, D]``.
        head: the LM head.
        results: the gradients; the loss scale, by which the gradients of the head must be multiplied, or None; and the
            sizes of the rows ``[N]``, by which the gradients of the rows must be multiplied, or None
            (``_chunks.float16_scaling``). The size of a row without a gradient is 0.
        setup: settings of the call.
        once: name of the op, and what can be differentiated more than once, if the gradients are scaled in place. A
            traced backward scales copies, and can run again.
    """
    grads, loss_scale, row_size = results
    link = link_to(hidden)  # leads to all inputs, of which none is saved
    ctx.save_for_backward(*grads, loss_scale, row_size, link)
    ctx.setup, ctx.dtypes = setup, [None if t is None else t.dtype for t in (hidden, *head)]
    ctx.once = None if once is None or traced(hidden) else Once(*once, head, setup.needs)
    return link


def scale_gradients(ctx: Any, grad_loss: Tensor) -> Gradients:
    """Return the saved gradients for the upstream gradient of the loss, 0-d or ``[N]``, in the dtypes of the inputs.

    Rows without a gradient keep the gradient 0, even if the upstream gradient is infinite or NaN.
    """
    if ctx.once is not None:
        ctx.once()
    *saved, loss_scale, row_size, _link = ctx.saved_tensors
    grads = Gradients(*saved)
    if ctx.once is not None and loss_scale is None:
        for grad in grads:
            if grad is not None:
                ctx.setup.primitives().scale_(grad, grad_loss)
        return grads
    head_factor = grad_loss if loss_scale is None else grad_loss * loss_scale
    weight, bias, U = (_times(g, head_factor) for g in (grads.weight, grads.bias, grads.U))
    if row_size is None:
        x, u = (None if g is None else times_upstream(g.to(grad_loss.dtype), grad_loss) for g in (grads.x, grads.u))
    else:
        row_factor = times_upstream(row_size, grad_loss).unsqueeze(1)
        x, u = (None if g is None else times_upstream(g, row_factor) for g in (grads.x, grads.u))
    grads = Gradients(x, weight, bias, u, U)
    return Gradients(*[None if g is None else g.to(d) for g, d in zip(grads, ctx.dtypes, strict=True)])


def _times(grad: Tensor | None, factor: Tensor) -> Tensor | None:
    """Multiply in the dtype of the factor, because float16 times a 0-d factor would round the factor to float16.

    A gradient of 0 stays 0, also times infinity or NaN.
    """
    return None if grad is None else (grad.to(factor.dtype) * factor).masked_fill_(grad == 0, 0).to(grad.dtype)


def gradient_specs(hidden: Tensor, head: Head, needs: NeedsGrad, head_dtype: torch.dtype | None = None) -> list[Spec]:
    """Return shape and dtype of the gradients that are needed; ``head_dtype``: another dtype for those of the head."""
    each = zip((hidden, *head), needs, Gradients._fields, strict=True)
    return [
        (t.shape, head_dtype if head_dtype is not None and name not in PER_ROW_GRADS else t.dtype)
        if needed and t is not None
        else None
        for t, needed, name in each
    ]
