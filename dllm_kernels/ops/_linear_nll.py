r"""NLL from hidden states and the LM head; the logits exist one chunk at a time.

    z_i = W h_i + b,      nll_i = logsumexp(z_i) - z_{i, y_i},      g_i = s_i (softmax(z_i) - onehot(y_i)),
    d/dh_i = g_i W,       d/dW = sum_i g_i h_i^T,                    d/db = sum_i g_i.

Per chunk of active rows, one matrix product computes the logits. One pass over them computes the NLL and overwrites
them with g. One more product computes the gradient of the hidden states. If the head is trainable, another product
computes the gradient of the head, which is accumulated in float32.

In ``weighted_linear_nll``, s_i = w_i is known in the forward pass. The gradients are computed there, and backward only
scales them: 2 products with a frozen head, 3 with a trainable head.

In ``linear_token_nll``, s_i is the upstream gradient, known only in backward. Row i of d/dh depends only on s_i. With a
frozen head, forward therefore computes d/dh for s_i = 1, and backward scales its rows: 2 products. A trainable head
needs its logits a second time in backward: 4 products.

With a low-rank second part of the head, ``extra = (u, U)``, z_i = W h_i + U u_i + b. The low-rank product is
accumulated into the chunk in place. Its gradients are d/du_i = g_i U and d/dU = sum_i g_i u_i^T. If W is frozen and U
is trainable, ``weighted_linear_nll`` still takes 2 large products. ``linear_token_nll`` takes 3: d/dU sums over rows
with different upstream gradients, so backward recomputes the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllm_kernels._graph._opaque import Spec, opaque
from dllm_kernels.rows._chunks import NO_FACTORS, Chunks, Factors, float16_scaling, no_autocast
from dllm_kernels.rows._fused import Fused, first_order, link_to, outputs
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._kept_gradients import gradient_specs, keep_gradients, scale_gradients
from dllm_kernels.rows._logits import Head
from dllm_kernels.rows._nll import argmax_specs, logsumexp, rounded, weighted_sum
from dllm_kernels.rows._setup import NO_GRADIENTS, Gradients, Setup

# Has a second derivative.
CROSS_ENTROPY = "torch.nn.functional.cross_entropy on the logits, torch.nn.functional.linear(hidden, weight, bias)"


class WeightedLinearNLL(Fused):
    """Weighted sum of the NLLs; forward computes the gradients, and backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, y: Tensor, weights: Tensor, mask_zero: bool, round_nll: bool, setup: Setup,
        *head: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        parts = Head(*head)  # type: ignore[arg-type]
        scale = weights if any(setup.needs) else None
        nll, row_max, log_sum, correct, ids, *grads, loss_scale, row_size = _nll(hidden, parts, y, scale, True, setup)
        saved = Gradients(*grads), loss_scale, row_size
        link = keep_gradients(ctx, hidden, parts, saved, setup, ("weighted_linear_nll", "linear_token_nll"))
        nll = rounded(nll, round_nll, setup)
        loss = weighted_sum(nll, weights, mask_zero)
        return outputs(ctx, [loss], [nll, logsumexp(row_max, log_sum, setup), correct, ids], link)

    @staticmethod
    @first_order(CROSS_ENTROPY)
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> Any:
        grad_hidden, *grad_head = scale_gradients(ctx, grad_loss)
        return grad_hidden, None, None, None, None, None, *grad_head


class LinearTokenNLL(Fused):
    """NLL of each row.

    With a frozen head forward computes the gradients of the rows for upstream gradients of 1, and backward scales them.
    Otherwise backward recomputes the logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, y: Tensor, setup: Setup, *head: Tensor | None) -> tuple[Tensor, ...]:
        parts, frozen = Head(*head), setup.needs.frozen_head  # type: ignore[arg-type]
        ones = torch.ones(y.shape, dtype=setup.accum_dtype, device=y.device) if frozen else None
        nll, row_max, log_sum, correct, ids, *grads, _, row_size = _nll(hidden, parts, y, ones, False, setup)
        if frozen:
            link = keep_gradients(ctx, hidden, parts, (Gradients(*grads), None, row_size), setup, None)
        else:
            link, ctx.setup = link_to(hidden), setup
            ctx.save_for_backward(hidden, *head, y, row_max, log_sum, link)
        return outputs(ctx, [nll], [logsumexp(row_max, log_sum, setup), correct, ids], link)

    @staticmethod
    @first_order(CROSS_ENTROPY)
    def backward(ctx: Any, grad_nll: Tensor, *_: Any) -> Any:
        if ctx.setup.needs.frozen_head:
            grad_hidden, *grad_head = scale_gradients(ctx, grad_nll)
        else:
            hidden, *head, y, row_max, log_sum, _link = ctx.saved_tensors
            scale = grad_nll.to(ctx.setup.accum_dtype).contiguous()
            grad_hidden, *grad_head = _nll_grad(hidden, Head(*head), y, row_max, log_sum, scale, ctx.setup)
        return grad_hidden, None, None, *grad_head


def _nll_specs(hidden: Tensor, head: Head, y: Tensor, scale: Any, summed: bool, setup: Setup) -> list[Spec]:
    per_row = (y.shape, setup.accum_dtype)
    scaled = summed and scale is not None and setup.needs_loss_scaling
    row_size = per_row if scaled or (scale is not None and not summed) else None
    needs = NO_GRADIENTS if scale is None else setup.needs
    stats = per_row if _keeps_stats(summed, setup) else None
    return [
        per_row, stats, stats, *argmax_specs(y, setup),
        *gradient_specs(hidden, head, needs, setup.accum_dtype if scaled else None),
        ((), setup.accum_dtype) if scaled else None, row_size,
    ]  # fmt: skip


def _keeps_stats(summed: bool, setup: Setup) -> bool:
    """Return True if (row_max, log_sum) are read: by the logsumexp, or by a backward that recomputes the logits."""
    return setup.with_lse or (not summed and any(setup.needs) and not setup.needs.frozen_head)


@opaque("linear_nll", _nll_specs)
def _nll(hidden: Tensor, head: Head, y: Tensor, scale: Tensor | None, summed: bool, setup: Setup) -> Any:
    """Return (nll, row_max, log_sum, correct, ids) of N rows, five gradients, loss scale, row sizes, from one pass.

    None for those that are not needed. ``scale [N]`` is the factor of each row's gradient; None: no gradients. If the
    loss is a sum (``summed``), float16 gradients are those of a scaled loss, see ``float16_scaling``. Otherwise the row
    sizes are 1, and 0 in inactive rows.
    """
    with no_autocast(hidden):
        factors, loss_scale, row_size = NO_FACTORS, None, None
        if scale is not None and (setup.needs_loss_scaling or not summed):
            scale = row_size = scale.masked_fill(y == IGNORE, 0)
        if scale is not None and summed:
            scale, factors, loss_scale = float16_scaling(scale, setup)
            factors = Factors(None, factors.head)  # those of the rows are applied in backward
        needs = NO_GRADIENTS if scale is None else setup.needs
        chunks = Chunks(hidden, head, y, setup, needs, factors)
        rows, device, acc = chunks.rows, hidden.device, setup.accum_dtype
        keeps = _keeps_stats(summed, setup)
        out = [rows.empty(dtype=acc, device=device) if needed else None for needed in (True, keeps, keeps)]
        out += [None if spec is None else rows.empty(dtype=spec[1], device=device) for spec in argmax_specs(y, setup)]
        options: dict[str, Any] = {
            "with_correct": setup.with_correct, "with_ids": setup.with_ids, "transform": setup.transform,
        }  # fmt: skip
        for chunk, h, targets, logits in chunks:
            if scale is None:
                stats = chunks.primitives.nll(logits[None], targets, **options)
            else:
                s = rows.take(scale, chunk)
                stats = chunks.primitives.nll_and_grad_(logits, targets, s, **options)
                chunks.add_gradients(chunk, h, targets, logits, s)
            rows.put_each(out, chunk, stats)
        if row_size is not None:
            rows.checked_(row_size)
        return *rows.finished(out), *chunks.gradients(wide=loss_scale is not None), loss_scale, row_size


@opaque("linear_nll_grad", lambda hidden, head, *others: gradient_specs(hidden, head, others[-1].needs))
def _nll_grad(
    hidden: Tensor, head: Head, y: Tensor, row_max: Tensor, log_sum: Tensor, scale: Tensor, setup: Setup
) -> Gradients:
    """Recompute the logits chunk by chunk and return the gradients, for upstream gradients ``scale [N]``."""
    with no_autocast(hidden):
        scale, factors, loss_scale = float16_scaling(scale.masked_fill(y == IGNORE, 0), setup)
        listed = y.masked_fill(scale == 0, IGNORE)  # rows without an upstream gradient are not recomputed
        chunks = Chunks(hidden, head, y, setup, setup.needs, factors, listed=listed)
        for chunk, h, targets, logits in chunks:
            s, m, log_s = (chunks.rows.take(t, chunk) for t in (scale, row_max, log_sum))
            chunks.primitives.nll_grad(logits[None], targets, s, m, log_s, logits[None], transform=setup.transform)
            chunks.add_gradients(chunk, h, targets, logits, s)
        return chunks.gradients(loss_scale)
