r"""Per-token negative log-likelihood from logits, and its weighted sum.

    nll_i = log(sum_v exp(z_iv)) - z_{i, y_i},        loss = sum_i w_i nll_i.

``weighted_nll`` is ``token_nll`` followed by a product and a sum over ``[N]`` numbers, so there is one
``autograd.Function`` for both, and its backward takes an arbitrary upstream gradient per row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dllm_kernels.ops import _checks
from dllm_kernels.ops._backend import use_triton
from dllm_kernels.ops._first_order import first_order_only
from dllm_kernels.ops._plain import all_plain, is_dtensor
from dllm_kernels.ops._rows import RowPrimitives, as_blv, row_primitives


class TokenNLL(NamedTuple):
    """Per-row results, each of the shape of the targets.

    Attributes:
        nll: negative log-likelihood in nats, float32 (float64 for float64 logits), differentiable. 0 for inactive rows.
        lse: logsumexp of the row, detached, or None when not asked for. 0 for inactive rows.
        correct: whether the target is the argmax of its row (the lowest index wins a tie), bool, or None when not asked
            for. False for inactive rows and for rows whose NLL is NaN.
    """

    nll: torch.Tensor
    lse: torch.Tensor | None = None
    correct: torch.Tensor | None = None


class WeightedNLL(NamedTuple):
    """A weighted sum and what it was made of.

    Attributes:
        loss: sum of weights * nll, 0-d, float32 (float64 for float64 logits), differentiable.
        nll: per-row NLL, detached; else as in :class:`TokenNLL`.
        lse: as in :class:`TokenNLL`.
        correct: as in :class:`TokenNLL`.
    """

    loss: torch.Tensor
    nll: torch.Tensor
    lse: torch.Tensor | None = None
    correct: torch.Tensor | None = None


def token_nll(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    active: torch.Tensor | None = None,
    ignore_index: int = -100,
    with_lse: bool = False,
    with_correct: bool = False,
    inplace_backward: bool = False,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> TokenNLL:
    r"""Negative log-likelihood of each target under the softmax of its row of logits.

    .. math:: \text{nll}_i = \log \sum_v e^{z_{iv}} - z_{i, y_i}

    Rows whose target is ``ignore_index``, or whose entry of ``active`` is zero, are not read: their NLL and gradient are
    0 even where they hold NaN. The backward pass takes any upstream gradient, one number per row.

    Args:
        logits: ``[..., V]``, float16, bfloat16, float32 or float64; any strides (a copy is made only when the columns of
            a row do not lie side by side).
        targets: ``[...]``, integer class indices in ``[0, V)`` or ``ignore_index``. Anything else gives NaN in its own
            row, see ``check_targets``.
        active: ``[...]``, bool or numeric; zero switches a row off. None: every row counts.
        ignore_index: the target that switches a row off.
        with_lse: also return the logsumexp of each row.
        with_correct: also return whether the target is the argmax.
        inplace_backward: write the gradient over ``logits`` instead of allocating it. Nothing else may read the logits
            afterwards: autograd raises an error if another backward pass tries to.
        check_targets: raise an IndexError that names the first bad target; reads the targets back to the host. None
            follows the environment variable ``DLLM_KERNELS_CHECK``.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`TokenNLL`.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes, dtypes or devices that do not fit, or an unknown backend.
        IndexError: ``check_targets`` found a bad target.
    """
    targets, active = all_plain(targets, active)
    _check(logits, targets, active, check_targets, ignore_index)
    sharded = _vocab_parallel(logits)
    if sharded is not None:
        return sharded.token_nll(  # type: ignore[no-any-return]
            logits, targets, active=active, ignore_index=ignore_index, with_lse=with_lse, with_correct=with_correct,
            inplace_backward=inplace_backward, backend=backend,
        )  # fmt: skip
    return rows_with_primitives(
        logits, targets, active, ignore_index=ignore_index, with_lse=with_lse, with_correct=with_correct,
        inplace_backward=inplace_backward, triton=use_triton(backend, logits),
    )  # fmt: skip


def rows_with_primitives(
    logits: torch.Tensor,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    *,
    ignore_index: int,
    with_lse: bool,
    with_correct: bool,
    inplace_backward: bool,
    triton: bool | RowPrimitives,
) -> TokenNLL:
    """:func:`token_nll` after its checks, with the row primitives chosen."""
    flat_targets, flat_active = flat_rows(targets, active)
    if torch.compiler.is_compiling():
        if inplace_backward:
            raise ValueError("inplace_backward must be False under torch.compile, got True")
        from dllm_kernels.ops._compiled_token_nll import _token_nll_op

        nll, row_max, log_sum, correct = _token_nll_op(
            logits, flat_targets, flat_active, ignore_index, with_correct, triton
        )
    else:
        nll, row_max, log_sum, correct = _TokenNLLFunction.apply(  # type: ignore[no-untyped-call]
            logits, flat_targets, flat_active, ignore_index, with_correct, inplace_backward, triton
        )
    shape = targets.shape
    return TokenNLL(
        nll.view(shape),
        (row_max + log_sum).detach().view(shape) if with_lse else None,
        correct.view(shape) if with_correct else None,
    )


def weighted_nll(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    active: torch.Tensor | None = None,
    ignore_index: int = -100,
    with_lse: bool = False,
    with_correct: bool = False,
    round_nll: bool = False,
    inplace_backward: bool = False,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> WeightedNLL:
    r"""Weighted sum of per-token negative log-likelihoods, the one idea under every loss here.

    .. math:: \text{loss} = \sum_i w_i \, \text{nll}_i

    A row of weight 0 is not read: a NaN or inf in it reaches neither the loss nor the gradient.

    Args:
        logits: ``[..., V]``, as in :func:`token_nll`.
        targets: ``[...]``, as in :func:`token_nll`.
        weights: ``[...]``, bool or numeric, taken as constants (detached).
        active: ``[...]``, rows to read; None: those whose weight is not zero. Give it to get NLL and argmax-match of
            rows that do not enter the loss.
        ignore_index: the target that switches a row off.
        with_lse: also return the logsumexp of each row.
        with_correct: also return whether the target is the argmax.
        round_nll: round each NLL to the dtype of the logits before it is weighted, as a cross-entropy computed in that
            dtype would return it.
        inplace_backward: as in :func:`token_nll`.
        check_targets: as in :func:`token_nll`.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`WeightedNLL`.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes, dtypes or devices that do not fit, or an unknown backend.
        IndexError: ``check_targets`` found a bad target.
    """
    targets, weights, active = all_plain(targets, weights, active)
    weights = check_weights(weights, targets, logits)
    rows = token_nll(
        logits, targets, active=weights if active is None else active, ignore_index=ignore_index, with_lse=with_lse,
        with_correct=with_correct, inplace_backward=inplace_backward, check_targets=check_targets, backend=backend,
    )  # fmt: skip
    nll = rows.nll.to(logits.dtype).to(rows.nll.dtype) if round_nll else rows.nll
    return WeightedNLL(weighted_sum(nll, weights, active is not None), nll.detach(), rows.lse, rows.correct)


def weighted_sum(nll: torch.Tensor, weights: torch.Tensor, read_beyond: bool) -> torch.Tensor:
    """Sum of weights * nll; where rows of weight 0 were read too (``read_beyond``), their NaN is kept out."""
    product = nll * weights
    return (torch.where(weights != 0, product, 0.0) if read_beyond else product).sum()


def check_weights(weights: torch.Tensor, targets: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Check weights and bring them, detached, to the dtype that sums are made in."""
    _checks.check_tensor("targets", targets)
    _checks.check_mask("weights", weights, targets.shape, "that of targets")
    _checks.check_same_device("targets", targets, weights=weights)
    acc = torch.promote_types(like.dtype, torch.float32) if isinstance(like, torch.Tensor) else torch.float32
    return weights.detach().to(acc)


def flat_rows(targets: torch.Tensor, active: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Targets as contiguous int64 ``[N]``, active as contiguous ``[N]``."""
    flat = targets.detach().reshape(-1).to(torch.int64).contiguous()
    return flat, None if active is None else active.detach().reshape(-1).contiguous()


def _check(
    logits: torch.Tensor,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    check_targets: bool | None,
    ignore_index: int,
) -> None:
    _checks.check_float("logits", logits)
    _checks.check_ids("targets", targets)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have shape [..., V] with V >= 1, got {tuple(logits.shape)}")
    _checks.check_shape("targets", targets, logits.shape[:-1], "that of logits without its last dimension")
    if active is not None:
        _checks.check_mask("active", active, targets.shape, "that of targets")
    _checks.check_same_device("logits", logits, targets=targets, active=active)
    if _checks.targets_checked(check_targets):
        _checks.check_target_range(targets, logits.shape[-1], ignore_index)


def _vocab_parallel(logits: torch.Tensor) -> Any:
    """The vocabulary-parallel implementation for DTensor logits, else None; torch.distributed loads only for those."""
    if not is_dtensor(logits):
        return None
    from dllm_kernels.distributed import vocab_parallel

    return vocab_parallel


def _grad_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    grad_nll: torch.Tensor,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    ignore_index: int,
    triton: bool | RowPrimitives,
    out: torch.Tensor,
) -> None:
    row_primitives(triton).row_grad(
        as_blv(logits), targets, active, grad_nll.reshape(-1).contiguous(), row_max, log_sum, out,
        ignore_index=ignore_index,
    )  # fmt: skip


class _TokenNLLFunction(torch.autograd.Function):
    """(nll, row_max, log_sum, correct) of each row; only nll is differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        active: torch.Tensor | None,
        ignore_index: int,
        with_correct: bool,
        inplace_backward: bool,
        triton: bool | RowPrimitives,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        nll, row_max, log_sum, _, correct = row_primitives(triton).row_stats(
            as_blv(logits), targets, active, ignore_index=ignore_index, with_correct=with_correct
        )
        ctx.save_for_backward(logits, targets, active, row_max, log_sum)
        ctx.options = (ignore_index, inplace_backward, triton)
        ctx.mark_non_differentiable(*(t for t in (row_max, log_sum, correct) if t is not None))
        ctx.set_materialize_grads(False)
        return nll, row_max, log_sum, correct

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_nll: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad_nll is None:
            return (None,) * 7
        logits, targets, active, row_max, log_sum = ctx.saved_tensors
        ignore_index, inplace, triton = ctx.options
        if inplace:
            out = _check_inplace(logits)
        else:
            out = as_blv(torch.empty(logits.shape, dtype=logits.dtype, device=logits.device))
        _grad_rows(logits, targets, active, grad_nll, row_max, log_sum, ignore_index, triton, out)
        if inplace:
            torch.autograd.graph.increment_version(logits)
            return (logits.detach(), *(None,) * 6)
        return (out.view(logits.shape), *(None,) * 6)


def _check_inplace(logits: torch.Tensor) -> torch.Tensor:
    """The rows of the logits themselves, to be written to; an error where two rows share memory or no view exists."""
    out = as_blv(logits)
    if out.data_ptr() != logits.data_ptr() or any(
        size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)
    ):
        raise ValueError(
            "inplace_backward=True needs logits whose rows can be written in place, got shape "
            f"{tuple(logits.shape)} with strides {logits.stride()}"
        )
    return out
