r"""Per-token negative log-likelihood from logits, and its weighted sum.

    nll_i = log(sum_v exp(z_iv)) - z_{i, y_i},        loss = sum_i w_i nll_i.

The backward pass of ``token_nll`` takes an arbitrary upstream gradient per row. ``weighted_nll`` also multiplies by the
row weights and sums. It takes fewer kernel launches than separate torch ops, because the kernels apply the weights.
"""

from __future__ import annotations

import torch

from dllm_kernels._core._inputs import RowInputs
from dllm_kernels._core._nll import TOKEN_NLL, WEIGHTED_NLL
from dllm_kernels._core._plan import Options
from dllm_kernels._core._results import TokenNLL, WeightedNLL
from dllm_kernels._core._run import call
from dllm_kernels._utils._checks import LOGITS, check_constant
from dllm_kernels._utils._deferred import from_hidden_states
from dllm_kernels._utils._transform import Transform
from dllm_kernels.ops.linear_nll import linear_token_nll, weighted_linear_nll


@from_hidden_states(linear_token_nll)
def token_nll(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    active: torch.Tensor | None = None,
    ignore_index: int = -100,
    with_lse: bool = False,
    with_correct: bool = False,
    inplace_backward: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> TokenNLL:
    r"""Negative log-likelihood of each target under the softmax of its row of logits.

    .. math:: \text{nll}_i = \log \sum_v e^{z_{iv}} - z_{i, y_i}

    Rows with target ``ignore_index`` or ``active`` 0 are not read: their NLL and gradient are 0 even if they hold NaN.
    The backward pass takes an arbitrary upstream gradient per row.

    Source: cross-entropy with a one-hot target; one-pass logsumexp, Milakov and Gimelshein 2018, arXiv:1805.02867.

    Args:
        logits: {logits}
        targets: {targets}
        active: ``[...]``, bool or numeric; rows with entry 0 are inactive. None: all rows.
        ignore_index: {ignore_index}
        with_lse: {with_lse}
        with_correct: also return the argmax match: True if the target is the argmax of the transformed logits.
        inplace_backward: {inplace_backward}
        softcap: {softcap}
        scale: {scale}
        skip_id: {skip_id}
        check_targets: {check_targets}
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
        with_correct=with_correct, inplace_backward=inplace_backward,
    )  # fmt: skip
    return call(TOKEN_NLL, LOGITS, RowInputs(logits, targets, active=active), options)  # type: ignore[no-any-return]


@from_hidden_states(weighted_linear_nll)
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
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> WeightedNLL:
    r"""Weighted sum of the negative log-likelihood of each target.

    .. math:: \text{loss} = \sum_i w_i \, \text{nll}_i

    Rows of weight 0 are not read, so a NaN or inf in them affects neither the loss nor the gradient.

    Source: the weighted sum of :func:`token_nll`, the common form of most losses before the denominator.

    Args:
        logits: {logits}
        targets: {targets}
        weights: {weights}
        active: ``[...]``, bool or numeric, nonzero for the rows to read; None: rows of nonzero weight. Pass it to
            compute the NLL and argmax match of rows of weight 0 too.
        ignore_index: {ignore_index}
        with_lse: {with_lse}
        with_correct: also return the argmax match: True if the target is the argmax of the transformed logits.
        round_nll: round the value of each NLL to the dtype of the logits before it is weighted, like a cross-entropy
            computed in that dtype.
        inplace_backward: {inplace_backward}
        softcap: {softcap}
        scale: {scale}
        skip_id: {skip_id}
        check_targets: {check_targets}
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`WeightedNLL`.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, or the backend is unknown.
        IndexError: a target is out of range and checked, see ``check_targets``.
    """
    check_constant("weights", weights, "token_nll(...).nll * weights")
    options = Options(
        Transform(softcap, scale, skip_id), ignore_index, check_targets, backend, with_lse=with_lse,
        with_correct=with_correct, round_nll=round_nll, inplace_backward=inplace_backward,
    )  # fmt: skip
    inputs = RowInputs(logits, targets, active=active, weights=weights)
    return call(WEIGHTED_NLL, LOGITS, inputs, options)  # type: ignore[no-any-return]
