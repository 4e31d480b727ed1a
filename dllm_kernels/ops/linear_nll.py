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

from dllm_kernels._checks import LINEAR, Extra, check_constant, check_tensor
from dllm_kernels._graph._deferred import of_computed
from dllm_kernels._graph._opaque import Spec, opaque
from dllm_kernels._graph._plain import any_dtensor
from dllm_kernels.rows._call import checked, flat_targets, flat_values
from dllm_kernels.rows._chunks import NO_FACTORS, Chunks, Factors, no_autocast, unit_scale
from dllm_kernels.rows._fused import Fused, first_order, link_to, outputs
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._kept_gradients import gradient_specs, keep_gradients, scale_gradients
from dllm_kernels.rows._nll import argmax_specs, in_rows, logsumexp, rounded, weighted_sum
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._results import TokenNLL, WeightedNLL
from dllm_kernels.rows._setup import NO_GRADIENTS, Gradients, Head, Setup, Split, flat_rows
from dllm_kernels.rows._transform import Transform

# Has a second derivative.
CROSS_ENTROPY = "torch.nn.functional.cross_entropy on the logits, torch.nn.functional.linear(hidden, weight, bias)"


@of_computed
def weighted_linear_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    bias: Tensor | None = None,
    extra: Extra | None = None,
    active: Tensor | None = None,
    ignore_index: int = -100,
    with_lse: bool = False,
    with_correct: bool = False,
    with_ids: bool = False,
    round_nll: bool = False,
    chunk_size: int | None = None,
    num_active: int | None = None,
    logits_dtype: torch.dtype | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> WeightedNLL:
    r"""Weighted sum of the NLL of each target under ``softmax(weight @ hidden + bias)``.

    .. math:: \text{loss} = \sum_i w_i \, \text{nll}_i

    The forward pass computes the gradients, for rows of nonzero weight and for inputs that require a gradient. Backward
    scales them in place by the upstream gradient, so it can run only once.

    Source: :func:`weighted_nll` of the projected hidden states.

    Examples:
        >>> # a frozen LM head
        >>> hidden, weight = torch.zeros(2, 3, 8, requires_grad=True), torch.zeros(10, 8)
        >>> targets = torch.tensor([[1, 2, -100], [4, 5, 6]])  # -100: inactive row
        >>> # rows of weight 0 are not projected
        >>> weights = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, 0.0]])
        >>> loss = weighted_linear_nll(hidden, weight, targets, weights).loss
        >>> round((loss / math.log(10)).item(), 4)
        4.0
        >>> loss.backward()

    Args:
        hidden: {hidden}
        weight: {weight}
        targets: {targets}
        weights: {weights}
        bias: ``[V]`` or None.
        extra: {extra}
        active: ``[...]``, bool or numeric, nonzero for the rows to project; None: rows of nonzero weight.
        ignore_index: {ignore_index}
        with_lse: {with_lse}
        with_correct: {linear_correct}
        with_ids: {linear_ids}
        round_nll: round the value of each NLL to the compute dtype before it is weighted; gradients are not rounded.
        chunk_size: {chunk_size}
        num_active: {num_active}
        logits_dtype: {logits_dtype}
        softcap: {softcap}
        scale: {scale}
        skip_id: {skip_id}
        check_targets: {check_targets}
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`WeightedNLL`, in nats. ``loss`` is float32 (float64 for float64 input) and differentiable in hidden,
        weight, bias and extra.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, or the backend is unknown.
        IndexError: a target is out of range and checked, see ``check_targets``.
        RuntimeError: a second backward pass through the same loss.
    """
    check_tensor("weights", weights)
    check_constant("weights", weights, "linear_token_nll(...).nll * weights")
    options = Options(
        Transform(softcap, scale, skip_id), ignore_index, check_targets, backend, chunk_size, num_active, logits_dtype,
        with_lse, with_correct, with_ids, round_nll=round_nll,
    )  # fmt: skip
    call = checked(LINEAR, hidden, targets, options, (weight, bias, extra), active=active, weights=weights)
    return weighted_linear_nll_unchecked(
        hidden, call.head, targets=call.ids, weights=call.weights, active=call.active, options=call.options
    )


def linear_token_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    extra: Extra | None = None,
    active: Tensor | None = None,
    ignore_index: int = -100,
    with_lse: bool = False,
    with_correct: bool = False,
    with_ids: bool = False,
    chunk_size: int | None = None,
    num_active: int | None = None,
    logits_dtype: torch.dtype | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> TokenNLL:
    r"""NLL of each target under ``softmax(weight @ hidden + bias)``, with an arbitrary upstream gradient per row.

    .. math:: \text{nll}_i = \log \sum_v e^{z_{iv}} - z_{i, y_i}, \qquad z_i = W h_i + b

    With a frozen head nothing is recomputed. With a trainable head, bias or ``extra[1]``, backward recomputes the
    logits, because the gradient is a sum over rows, each scaled by its upstream gradient. It skips rows whose upstream
    gradient is 0. Ignored and inactive rows have the gradient 0 for any upstream gradient. Use
    :func:`weighted_linear_nll` if the row weights are known in advance.

    Source: :func:`token_nll` of the projected hidden states.

    Args:
        hidden: {hidden}
        weight: {weight}
        targets: {targets}
        bias: ``[V]`` or None.
        extra: {extra}
        active: ``[...]``, bool or numeric, nonzero for the rows to project; None: all rows.
        ignore_index: {ignore_index}
        with_lse: {with_lse}
        with_correct: {linear_correct}
        with_ids: {linear_ids}
        chunk_size: {chunk_size}
        num_active: {num_active}
        logits_dtype: {logits_dtype}
        softcap: {softcap}
        scale: {scale}
        skip_id: {skip_id}
        check_targets: {check_targets}
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`TokenNLL`, in nats. ``nll`` is differentiable in hidden, weight, bias and extra.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, or the backend is unknown.
        IndexError: a target is out of range and checked, see ``check_targets``.
    """
    transform = Transform(softcap, scale, skip_id)
    options = Options(
        transform, ignore_index, check_targets, backend, chunk_size, num_active, logits_dtype, with_lse, with_correct,
        with_ids,
    )  # fmt: skip
    call = checked(LINEAR, hidden, targets, options, (weight, bias, extra), active=active)
    return linear_token_nll_unchecked(hidden, call.head, targets=call.ids, active=call.active, options=call.options)


def weighted_linear_nll_unchecked(
    hidden: Tensor, head: Head, *, targets: Tensor, weights: Tensor, active: Tensor | None, options: Options,
    split: Split | None = None,
) -> WeightedNLL:  # fmt: skip
    """Compute :func:`weighted_linear_nll` of validated arguments."""
    if any_dtensor(hidden, *head):
        from dllm_kernels.distributed.run import on_this_rank

        per_row = {"targets": targets, "weights": weights, "active": active}
        return on_this_rank(  # type: ignore[no-any-return]
            weighted_linear_nll_unchecked, hidden, head, per_row, sums=("loss",), options=options
        )
    setup = Setup.of(hidden, head, options, split)
    y = flat_targets(targets, weights if active is None else active, options)
    loss, *made = _WeightedLinearNLL.under(setup)(
        flat_rows(hidden), y, flat_values(weights, setup.accum_dtype), active is not None, options.round_nll, setup,
        *head.flat,
    )  # fmt: skip
    return WeightedNLL(loss, *in_rows(made, hidden.shape[:-1], setup))


def linear_token_nll_unchecked(
    hidden: Tensor, head: Head, *, targets: Tensor, active: Tensor | None, options: Options,
    split: Split | None = None,
) -> TokenNLL:  # fmt: skip
    """Compute :func:`linear_token_nll` of validated arguments."""
    if any_dtensor(hidden, *head):
        from dllm_kernels.distributed.run import on_this_rank

        per_row = {"targets": targets, "active": active}
        return on_this_rank(linear_token_nll_unchecked, hidden, head, per_row, options=options)  # type: ignore[no-any-return]
    setup, y = Setup.of(hidden, head, options, split), flat_targets(targets, active, options)
    made = _LinearTokenNLL.under(setup)(flat_rows(hidden), y, setup, *head.flat)
    return TokenNLL(*in_rows(made, hidden.shape[:-1], setup))


class _WeightedLinearNLL(Fused):
    """Weighted sum of the NLLs; forward computes the gradients, and backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, y: Tensor, weights: Tensor, mask_zero: bool, round_nll: bool, setup: Setup,
        *head: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        parts = Head(*head)  # type: ignore[arg-type]
        scale = weights if any(setup.needs) else None
        nll, row_max, log_sum, correct, ids, *grads, loss_scale, row_size = _nll(hidden, parts, y, scale, True, setup)
        made = Gradients(*grads), loss_scale, row_size
        link = keep_gradients(ctx, hidden, parts, made, setup, ("weighted_linear_nll", "linear_token_nll"))
        nll = rounded(nll, round_nll, setup)
        loss = weighted_sum(nll, weights, mask_zero)
        return outputs(ctx, [loss], [nll, logsumexp(row_max, log_sum, setup), correct, ids], link)

    @staticmethod
    @first_order(CROSS_ENTROPY)
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> Any:
        grad_hidden, *grad_head = scale_gradients(ctx, grad_loss)
        return grad_hidden, None, None, None, None, None, *grad_head


class _LinearTokenNLL(Fused):
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
    loss is a sum (``summed``), float16 gradients are those of a scaled loss, see ``unit_scale``. Otherwise the row
    sizes are 1, and 0 in inactive rows.
    """
    with no_autocast(hidden):
        factors, loss_scale, row_size = NO_FACTORS, None, None
        if scale is not None and (setup.needs_loss_scaling or not summed):
            scale = row_size = scale.masked_fill(y == IGNORE, 0)
        if scale is not None and summed:
            scale, factors, loss_scale = unit_scale(scale, setup)
            factors = Factors(None, factors.head)  # those of the rows are applied in backward
        needs = NO_GRADIENTS if scale is None else setup.needs
        chunks = Chunks(hidden, head, y, setup, needs, factors)
        rows, device, acc = chunks.rows, hidden.device, setup.accum_dtype
        keeps = _keeps_stats(summed, setup)
        out = [rows.empty(dtype=acc, device=device) if kept else None for kept in (True, keeps, keeps)]
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
        scale, factors, loss_scale = unit_scale(scale.masked_fill(y == IGNORE, 0), setup)
        listed = y.masked_fill(scale == 0, IGNORE)  # rows without an upstream gradient are not recomputed
        chunks = Chunks(hidden, head, y, setup, setup.needs, factors, listed=listed)
        for chunk, h, targets, logits in chunks:
            s, m, log_s = (chunks.rows.take(t, chunk) for t in (scale, row_max, log_sum))
            chunks.primitives.nll_grad(logits[None], targets, s, m, log_s, logits[None], transform=setup.transform)
            chunks.add_gradients(chunk, h, targets, logits, s)
        return chunks.gradients(loss_scale)
