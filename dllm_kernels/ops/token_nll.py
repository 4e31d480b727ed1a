r"""Per-token negative log-likelihood from logits, and its weighted sum.

    nll_i = log(sum_v exp(z_iv)) - z_{i, y_i},        loss = sum_i w_i nll_i.

The backward pass of ``token_nll`` takes an arbitrary upstream gradient per row. ``weighted_nll`` also multiplies by the
row weights and sums. It takes fewer kernel launches than separate torch ops, because the kernels apply the weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels._checks import Names, check_constant, check_inplace, check_tensor
from dllm_kernels._graph._opaque import Spec, opaque
from dllm_kernels.ops._linear_nll import LinearTokenNLL, WeightedLinearNLL
from dllm_kernels.rows._call import Call, checked, flat_targets, flat_values
from dllm_kernels.rows._fused import Fused, first_order, outputs
from dllm_kernels.rows._interface import as_blv
from dllm_kernels.rows._logits import Logits, flat_rows
from dllm_kernels.rows._nll import argmax_specs, in_rows, logsumexp, rounded, weighted_sum
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._setup import Setup, Split
from dllm_kernels.rows._transform import Transform

NAMES = Names()
CROSS_ENTROPY = "torch.nn.functional.cross_entropy"  # has a second derivative


class TokenNLL(NamedTuple):
    """Per-row results, each of the shape of the targets.

    Attributes:
        nll: negative log-likelihood in nats, float32 (float64 for float64 logits), differentiable. 0 for inactive rows.
        lse: logsumexp of the row, detached, or None unless requested. 0 for inactive rows.
        correct: True if the target is the argmax of its row (the lowest index wins a tie), bool, or None unless
            requested. False for inactive rows and for rows whose NLL is NaN.
        ids: argmax of the row (the lowest index wins a tie), int64, or None unless requested. -100 for inactive rows.
            If the softmax of a row is NaN, the lowest id that is not skipped.
    """

    nll: Tensor
    lse: Tensor | None = None
    correct: Tensor | None = None
    ids: Tensor | None = None


class WeightedNLL(NamedTuple):
    """A weighted sum of NLLs, and the results of each row.

    Attributes:
        loss: sum of weights * nll, 0-d, float32 (float64 for float64 logits), differentiable.
        nll: see :class:`TokenNLL`, but detached.
        lse: see :class:`TokenNLL`.
        correct: see :class:`TokenNLL`.
        ids: see :class:`TokenNLL`.
    """

    loss: Tensor
    nll: Tensor
    lse: Tensor | None = None
    correct: Tensor | None = None
    ids: Tensor | None = None


def token_nll(
    logits: Logits, targets: Tensor, *, active: Tensor | None = None, ignore_index: int = -100, with_lse: bool = False,
    with_correct: bool = False, with_ids: bool = False, inplace_backward: bool = False, softcap: float | None = None,
    scale: float | None = None, skip_id: int | None = None, check_targets: bool | None = None, backend: str = "auto",
) -> TokenNLL:  # fmt: skip
    r"""Negative log-likelihood of each target under the softmax of its row of logits.

    .. math:: \text{nll}_i = \log \sum_v e^{z_{iv}} - z_{i, y_i}

    Rows with target ``ignore_index`` or ``active`` 0 are not read: their NLL and gradient are 0 even if they hold NaN.
    The backward pass takes an arbitrary upstream gradient per row.

    Source: cross-entropy with a one-hot target; one-pass logsumexp, Milakov and Gimelshein 2018, arXiv:1805.02867.

    Args:
        logits: ``[..., V]``, float16, bfloat16, float32 or float64; any strides.
        targets: ``[...]`` integers in ``[0, V)`` or ``ignore_index``; any other value raises an IndexError on a CPU and
            gives NaN in that row on a GPU, see ``check_targets``.
        active: ``[...]``, bool or numeric; rows with entry 0 are inactive. None: all rows.
        ignore_index: target of inactive rows.
        with_lse: also return the logsumexp of each row.
        with_correct: also return the argmax match: True if the target is the argmax of the transformed logits.
        with_ids: also return the predicted id, the argmax of the transformed logits; takes no second product or pass.
        inplace_backward: write the gradient over ``logits`` instead of allocating it. Rows must not share memory, and
            nothing else may read the logits afterwards. Autograd raises an error if another backward pass reads them. A
            :class:`LinearLogits` has none to overwrite.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
        check_targets: raise an IndexError that names the first out-of-range target or id of an active row. None: the
            environment variable ``DLLM_KERNELS_CHECK``, 1 or 0; if it is unset, True for eager calls on a CPU, and
            False elsewhere. True also rejects ``skip_id``, and costs a host sync on a GPU.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`TokenNLL`.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, or the backend is unknown.
        IndexError: a target is out of range and checked, see ``check_targets``.
    """
    options = Options(
        Transform(softcap, scale, skip_id), ignore_index, check_targets, backend, with_lse=with_lse,
        with_correct=with_correct, with_ids=with_ids, inplace_backward=inplace_backward,
    )  # fmt: skip
    return token_nll_unchecked(checked(NAMES, logits, targets, options, active=active))


def weighted_nll(
    logits: Logits, targets: Tensor, weights: Tensor, *, active: Tensor | None = None, ignore_index: int = -100,
    with_lse: bool = False, with_correct: bool = False, with_ids: bool = False, round_nll: bool = False,
    inplace_backward: bool = False, softcap: float | None = None, scale: float | None = None,
    skip_id: int | None = None, check_targets: bool | None = None, backend: str = "auto",
) -> WeightedNLL:  # fmt: skip
    r"""Weighted sum of the negative log-likelihood of each target.

    .. math:: \text{loss} = \sum_i w_i \, \text{nll}_i

    Rows of weight 0 are not read, so a NaN or inf in them affects neither the loss nor the gradient.

    Source: the weighted sum of :func:`token_nll`, the common form of most losses before the denominator.

    Args:
        logits: ``[..., V]``, float16, bfloat16, float32 or float64; any strides.
        targets: ``[...]`` integers in ``[0, V)`` or ``ignore_index``; any other value raises an IndexError on a CPU and
            gives NaN in that row on a GPU, see ``check_targets``.
        weights: ``[...]``, bool or numeric constants; must not require a gradient.
        active: ``[...]``, bool or numeric, nonzero for the rows to read; None: rows of nonzero weight. Pass it to
            compute the NLL and argmax match of rows of weight 0 too.
        ignore_index: target of inactive rows.
        with_lse: also return the logsumexp of each row.
        with_correct: also return the argmax match: True if the target is the argmax of the transformed logits.
        with_ids: also return the predicted id, the argmax of the transformed logits; takes no second product or pass.
        round_nll: round the value of each NLL to the dtype of the logits before it is weighted, like a cross-entropy
            computed in that dtype.
        inplace_backward: write the gradient over ``logits`` instead of allocating it. Rows must not share memory, and
            nothing else may read the logits afterwards. Autograd raises an error if another backward pass reads them. A
            :class:`LinearLogits` has none to overwrite.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
        check_targets: raise an IndexError that names the first out-of-range target or id of an active row. None: the
            environment variable ``DLLM_KERNELS_CHECK``, 1 or 0; if it is unset, True for eager calls on a CPU, and
            False elsewhere. True also rejects ``skip_id``, and costs a host sync on a GPU.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`WeightedNLL`.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, or the backend is unknown.
        IndexError: a target is out of range and checked, see ``check_targets``.
    """
    check_tensor("weights", weights)
    check_constant("weights", weights, "token_nll(...).nll * weights")
    options = Options(
        Transform(softcap, scale, skip_id), ignore_index, check_targets, backend, with_lse=with_lse,
        with_correct=with_correct, with_ids=with_ids, round_nll=round_nll, inplace_backward=inplace_backward,
    )  # fmt: skip
    return weighted_nll_unchecked(checked(NAMES, logits, targets, options, active=active, weights=weights))


def token_nll_unchecked(call: Call, split: Split | None = None) -> TokenNLL:
    """Compute :func:`token_nll` of a validated call."""
    if call.on_ranks:
        from dllm_kernels.distributed.run import on_this_rank

        return on_this_rank(token_nll_unchecked, call)  # type: ignore[no-any-return]
    setup, y = _setup(call, split), flat_targets(call.ids, call.active, call.options)
    if call.head is None:
        results = _TokenNLL.under(setup)(call.logits, y, call.options.inplace_backward, setup)
    else:
        results = LinearTokenNLL.under(setup)(flat_rows(call.x), y, setup, *call.head.flat)
    return TokenNLL(*in_rows(results, call.rows, setup))


def weighted_nll_unchecked(call: Call, split: Split | None = None) -> WeightedNLL:
    """Compute :func:`weighted_nll` of a validated call."""
    if call.on_ranks:
        from dllm_kernels.distributed.run import on_this_rank

        return on_this_rank(weighted_nll_unchecked, call, sums=("loss",))  # type: ignore[no-any-return]
    setup, options = _setup(call, split), call.options
    weights, masked = flat_values(call.weights, setup.accum_dtype), call.active is not None
    if call.head is None:
        y = flat_targets(call.ids, call.active, options)
        loss, *results = _WeightedNLL.under(setup)(
            call.logits, y, weights, masked, options.round_nll, options.inplace_backward, setup
        )
    else:
        y = flat_targets(call.ids, call.active if masked else call.weights, options)
        loss, *results = WeightedLinearNLL.under(setup)(
            flat_rows(call.x), y, weights, masked, options.round_nll, setup, *call.head.flat
        )
    return WeightedNLL(loss, *in_rows(results, call.rows, setup))


def _setup(call: Call, split: Split | None) -> Setup:
    if call.options.inplace_backward and isinstance(call.logits, Tensor):
        check_inplace(call.logits, as_blv(call.logits))
    return Setup.of(call.logits, call.options, split)


class _TokenNLL(Fused):
    """NLL of each row; backward recomputes the softmax from (row_max, log_sum)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, inplace: bool, setup: Setup) -> tuple[Tensor, ...]:
        _, nll, row_max, log_sum, *argmax = _nll(logits, y, None, setup)
        ctx.save_for_backward(logits, y, row_max, log_sum)
        ctx.inplace, ctx.setup = inplace, setup
        return outputs(ctx, [nll], [logsumexp(row_max, log_sum, setup), *argmax])

    @staticmethod
    @first_order(CROSS_ENTROPY)
    def backward(ctx: Any, grad_nll: Tensor, *_: Any) -> Any:
        logits, y, row_max, log_sum = ctx.saved_tensors
        (grad,) = _nll_grad(logits, y, grad_nll.contiguous(), row_max, log_sum, None, ctx.inplace, ctx.setup)
        return grad, None, None, None


class _WeightedNLL(Fused):
    """Weighted sum of the NLLs; in backward the kernel multiplies by the weight and the upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, y: Tensor, weights: Tensor, mask_zero: bool, round_nll: bool, inplace: bool,
        setup: Setup,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        # On a GPU each torch op on [N] is a kernel launch, so that only the sum is left to torch if possible.
        by_kernel = None if mask_zero else weights
        weighted, nll, row_max, log_sum, *argmax = _nll(logits, y, by_kernel, setup)
        ctx.save_for_backward(logits, y, weights, row_max, log_sum)
        ctx.inplace, ctx.setup = inplace, setup
        nll = rounded(nll, round_nll, setup)
        loss = weighted_sum(nll, weights, mask_zero) if mask_zero or round_nll else weighted.sum()
        return outputs(ctx, [loss], [nll, logsumexp(row_max, log_sum, setup), *argmax])

    @staticmethod
    @first_order(CROSS_ENTROPY)
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> Any:
        logits, y, weights, row_max, log_sum = ctx.saved_tensors
        (grad,) = _nll_grad(logits, y, weights, row_max, log_sum, grad_loss, ctx.inplace, ctx.setup)
        return grad, None, None, None, None, None, None


def _keeps_normalizer(setup: Setup) -> bool:
    """Return True unless (row_max, log_sum) is neither a result nor read by the backward pass of the backend."""
    return setup.with_lse or setup.triton or setup.splits_rows


def _nll_specs(logits: Tensor, y: Tensor, weights: Any, setup: Setup) -> list[Spec]:
    per_row, normalizer = (y.shape, setup.accum_dtype), _keeps_normalizer(setup)
    weighted, stats = per_row if weights is not None else None, per_row if normalizer else None
    return [weighted, per_row, stats, stats, *argmax_specs(y, setup)]


@opaque("token_nll", _nll_specs)
def _nll(logits: Tensor, y: Tensor, weights: Tensor | None, setup: Setup) -> Any:
    """Return (weights * nll, nll, row_max, log_sum, correct, ids) of N rows; None for those that are not needed."""
    options: dict[str, Any] = {
        "with_correct": setup.with_correct, "with_ids": setup.with_ids, "transform": setup.transform,
        "with_lse": _keeps_normalizer(setup),
    }  # fmt: skip
    if weights is None:
        return None, *setup.primitives().nll(as_blv(logits), y, **options)
    return setup.primitives().weighted_nll(as_blv(logits), y, weights, **options)


@opaque("token_nll_grad", lambda logits, *_: [(logits.shape, logits.dtype)])
def _nll_grad(
    logits: Tensor, y: Tensor, scale: Tensor, row_max: Tensor | None, log_sum: Tensor | None, factor: Tensor | None,
    inplace: bool, setup: Setup,
) -> tuple[Tensor]:  # fmt: skip
    """Return the gradient of the logits, ``factor * scale * (softmax - onehot)``; over the logits if ``inplace``."""
    grad = logits.detach() if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    setup.primitives().nll_grad(
        as_blv(logits), y, scale, row_max, log_sum, as_blv(grad), factor=factor, transform=setup.transform
    )
    if inplace:
        torch.autograd.graph.increment_version(logits)
    return (grad,)
