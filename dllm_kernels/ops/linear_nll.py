r"""NLL straight from hidden states and the LM head; the logits exist one chunk at a time.

    z_i = W h_i + b,      nll_i = logsumexp(z_i) - z_{i, y_i},      g_i = s_i (softmax(z_i) - onehot(y_i)),
    d/dh_i = g_i W,       d/dW = sum_i g_i h_i^T,                    d/db = sum_i g_i.

Per chunk of active rows: one product makes the logits, one pass over them leaves the NLL and writes g over them, one
product gives the gradient of the hidden states and, if the head trains, one more that of the head, summed in float32.

``weighted_linear_nll`` knows s_i = w_i in the forward pass, so it makes the gradients there, and backward only scales
them: 2 products with a frozen head, 3 with a trainable one. ``linear_token_nll`` does not know its upstream gradient;
but row i of d/dh depends on the upstream gradient of row i alone, so with a frozen head the gradient for s_i = 1 is
made in forward and its rows are scaled in backward: 2 products again. Only a trainable head needs its logits twice (4).

A head of two parts, ``extra = (u, U)``, has z_i = W h_i + U u_i + b: a thin product, which adds to the chunk where it
lies, and d/du_i = g_i U, d/dU = sum_i g_i u_i^T beside the others. Where W is frozen and U trains,
``weighted_linear_nll`` stays at its 2 large products; ``linear_token_nll`` makes the logits again (3), since d/dU mixes
the rows' upstream gradients.
"""

from __future__ import annotations

import torch

from dllm_kernels._core._inputs import RowInputs
from dllm_kernels._core._nll import LINEAR_TOKEN_NLL, WEIGHTED_LINEAR_NLL
from dllm_kernels._core._plan import Options
from dllm_kernels._core._results import TokenNLL, WeightedNLL
from dllm_kernels._core._run import call
from dllm_kernels._utils._checks import LINEAR, Extra, check_constant
from dllm_kernels._utils._transform import Transform


def weighted_linear_nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    extra: Extra | None = None,
    active: torch.Tensor | None = None,
    ignore_index: int = -100,
    with_lse: bool = False,
    with_correct: bool = False,
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

    The gradients are made in the forward pass, on the rows of nonzero weight only, and only for the inputs that require
    them. Backward scales them by the upstream gradient, in place. So backward can run only once.

    Examples:
        >>> hidden, weight = torch.zeros(2, 3, 8, requires_grad=True), torch.zeros(10, 8)  # a frozen LM head
        >>> targets = torch.tensor([[1, 2, -100], [4, 5, 6]])  # -100: no row
        >>> weights = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, 0.0]])  # rows of weight 0 are not projected
        >>> loss = weighted_linear_nll(hidden, weight, targets, weights).loss
        >>> round((loss / math.log(10)).item(), 4)
        4.0
        >>> loss.backward()

    Args:
        hidden: ``[..., D]``, float16, bfloat16, float32 or float64.
        weight: ``[V, D]``, the LM head, of the dtype of ``hidden`` unless autocast is on.
        targets: ``[...]`` integers in ``[0, V)`` or ``ignore_index``; anything else gives NaN in its own row.
        weights: ``[...]``, bool or numeric, taken as constants: they must not require a gradient.
        bias: ``[V]`` or None.
        extra: a second part of the head, of its dtype: (u ``[..., r]``, U ``[V, r]``) adds ``U u`` to the logits; or
            None.
        active: ``[...]``, rows to project; None: those whose weight is not zero.
        ignore_index: the target that switches a row off.
        with_lse: also return the logsumexp of each row.
        with_correct: also return whether the target is the argmax, of logits rounded to the compute dtype.
        round_nll: round each NLL to the compute dtype before it is weighted (the value; the gradient is not rounded).
        chunk_size: number of rows whose logits exist at a time; None: chosen from the sizes.
        num_active: an upper bound of the number of active rows, else read back from a GPU. Too small a bound gives NaN.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32, where argmax and ties
            are judged too; their gradient is rounded once, before its products. None: the dtype of the operands.
        softcap: c > 0 makes each logit ``c tanh(z / c)``, as Gemma's are; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: a column that is never predicted, such as MASK's: its logit counts as -inf, and as a target it gives
            NaN.
        check_targets: raise an IndexError naming the first bad target (a host sync); None: where
            ``DLLM_KERNELS_CHECK=1``.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`WeightedNLL`: ``loss`` float32 (float64 for float64 input), differentiable in hidden, weight, bias and
        extra.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices that do not fit, a number out of range, or an unknown backend.
        IndexError: ``check_targets`` is on and a target is out of range.
        RuntimeError: a second backward pass through the same loss.
    """
    check_constant("weights", weights, "linear_token_nll(...).nll * weights")
    options = Options(
        Transform(softcap, scale, skip_id), ignore_index, check_targets, backend, chunk_size, num_active, logits_dtype,
        with_lse, with_correct, round_nll=round_nll,
    )  # fmt: skip
    inputs = RowInputs(hidden, targets, weight, bias, active=active, weights=weights)
    return call(WEIGHTED_LINEAR_NLL, LINEAR, inputs, options, extra=extra)  # type: ignore[no-any-return]


def linear_token_nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    extra: Extra | None = None,
    active: torch.Tensor | None = None,
    ignore_index: int = -100,
    with_lse: bool = False,
    with_correct: bool = False,
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

    With a frozen head nothing is recomputed; a trainable head (or bias, or ``extra[1]``) has its logits made again in
    backward, since its gradient is a sum over rows, each times its upstream gradient. Use :func:`weighted_linear_nll`
    where the weight of each row is known in advance.

    Args:
        hidden: ``[..., D]``, float16, bfloat16, float32 or float64.
        weight: ``[V, D]``, the LM head, of the dtype of ``hidden`` unless autocast is on.
        targets: ``[...]`` integers in ``[0, V)`` or ``ignore_index``; anything else gives NaN in its own row.
        bias: ``[V]`` or None.
        extra: a second part of the head, of its dtype: (u ``[..., r]``, U ``[V, r]``) adds ``U u`` to the logits; or
            None.
        active: ``[...]``, rows to project; None: all.
        ignore_index: the target that switches a row off.
        with_lse: also return the logsumexp of each row.
        with_correct: also return whether the target is the argmax, of logits rounded to the compute dtype.
        chunk_size: number of rows whose logits exist at a time; None: chosen from the sizes.
        num_active: an upper bound of the number of active rows, else read back from a GPU. Too small a bound gives NaN.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32, where argmax and ties
            are judged too; their gradient is rounded once, before its products. None: the dtype of the operands.
        softcap: c > 0 makes each logit ``c tanh(z / c)``, as Gemma's are; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: a column that is never predicted, such as MASK's: its logit counts as -inf, and as a target it gives
            NaN.
        check_targets: raise an IndexError naming the first bad target (a host sync); None: where
            ``DLLM_KERNELS_CHECK=1``.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`TokenNLL`, its ``nll`` differentiable in hidden, weight, bias and extra.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices that do not fit, a number out of range, or an unknown backend.
        IndexError: ``check_targets`` is on and a target is out of range.
    """
    transform = Transform(softcap, scale, skip_id)
    options = Options(
        transform, ignore_index, check_targets, backend, chunk_size, num_active, logits_dtype, with_lse, with_correct
    )
    inputs = RowInputs(hidden, targets, weight, bias, active=active)
    return call(LINEAR_TOKEN_NLL, LINEAR, inputs, options, extra=extra)  # type: ignore[no-any-return]
