r"""Per-token negative log-likelihood from logits, and its weighted sum.

    nll_i = log(sum_v exp(z_iv)) - z_{i, y_i},        loss = sum_i w_i nll_i.

The backward pass of ``token_nll`` takes an arbitrary upstream gradient per row. ``weighted_nll`` is the same followed
by a product and a sum, in fewer launches: the weights of the rows go down with them.
"""

from __future__ import annotations

import torch

from dllm_kernels._core._inputs import RowInputs
from dllm_kernels._core._nll import TOKEN_NLL, WEIGHTED_NLL
from dllm_kernels._core._plan import Options
from dllm_kernels._core._results import TokenNLL, WeightedNLL
from dllm_kernels._core._run import call
from dllm_kernels._utils._checks import LOGITS, check_constant
from dllm_kernels._utils._transform import Transform


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

    Rows whose target is ``ignore_index``, or whose entry of ``active`` is zero, are not read: their NLL and gradient
    are 0 even where they hold NaN. The backward pass takes any upstream gradient, one number per row.

    Source: cross-entropy with a one-hot target; the logsumexp in one pass by Milakov and Gimelshein 2018,
        arXiv:1805.02867.

    Args:
        logits: ``[..., V]``, float16, bfloat16, float32 or float64; any strides.
        targets: ``[...]`` integers in ``[0, V)`` or ``ignore_index``; anything else gives NaN in its own row.
        active: ``[...]``, bool or numeric; zero switches a row off. None: every row counts.
        ignore_index: the target that switches a row off.
        with_lse: also return the logsumexp of each row.
        with_correct: also return whether the target is the argmax, of the transformed logits if there is a transform.
        inplace_backward: write the gradient over ``logits`` instead of allocating it; no two rows may share memory.
            Nothing else may read the logits afterwards: autograd raises an error if another backward pass tries to.
        softcap: c > 0 makes each logit ``c tanh(z / c)``, as Gemma's are; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: a column that is never predicted, such as MASK's: its logit counts as -inf, and as a target it gives
            NaN.
        check_targets: raise an IndexError naming the first bad target (a host sync); None: where
            ``DLLM_KERNELS_CHECK=1``.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`TokenNLL`.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices that do not fit, a number out of range, or an unknown backend.
        IndexError: ``check_targets`` is on and a target is out of range.
    """
    options = Options(
        Transform(softcap, scale, skip_id), ignore_index, check_targets, backend, with_lse=with_lse,
        with_correct=with_correct, inplace_backward=inplace_backward,
    )  # fmt: skip
    return call(TOKEN_NLL, LOGITS, RowInputs(logits, targets, active=active), options)  # type: ignore[no-any-return]


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

    A row of weight 0 is not read: a NaN or inf in it reaches neither the loss nor the gradient.

    Args:
        logits: ``[..., V]``, float16, bfloat16, float32 or float64; any strides.
        targets: ``[...]`` integers in ``[0, V)`` or ``ignore_index``; anything else gives NaN in its own row.
        weights: ``[...]``, bool or numeric, taken as constants: they must not require a gradient.
        active: ``[...]``, rows to read; None: those whose weight is not zero. Give it to get NLL and argmax-match of
            rows that do not enter the loss.
        ignore_index: the target that switches a row off.
        with_lse: also return the logsumexp of each row.
        with_correct: also return whether the target is the argmax, of the transformed logits if there is a transform.
        round_nll: round each NLL to the dtype of the logits before it is weighted, as a cross-entropy computed in that
            dtype would return it.
        inplace_backward: write the gradient over ``logits`` instead of allocating it; no two rows may share memory.
            Nothing else may read the logits afterwards: autograd raises an error if another backward pass tries to.
        softcap: c > 0 makes each logit ``c tanh(z / c)``, as Gemma's are; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: a column that is never predicted, such as MASK's: its logit counts as -inf, and as a target it gives
            NaN.
        check_targets: raise an IndexError naming the first bad target (a host sync); None: where
            ``DLLM_KERNELS_CHECK=1``.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`WeightedNLL`.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices that do not fit, a number out of range, or an unknown backend.
        IndexError: ``check_targets`` is on and a target is out of range.
    """
    check_constant("weights", weights, "token_nll(...).nll * weights")
    options = Options(
        Transform(softcap, scale, skip_id), ignore_index, check_targets, backend, with_lse=with_lse,
        with_correct=with_correct, round_nll=round_nll, inplace_backward=inplace_backward,
    )  # fmt: skip
    inputs = RowInputs(logits, targets, active=active, weights=weights)
    return call(WEIGHTED_NLL, LOGITS, inputs, options)  # type: ignore[no-any-return]
