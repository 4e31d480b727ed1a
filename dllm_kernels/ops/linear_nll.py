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

    The forward pass computes the gradients, for rows of nonzero weight and for inputs that require a gradient. Backward
    scales them in place by the upstream gradient, so it can run only once.

    Source: :func:`weighted_nll` of the projected hidden states.

    Examples:
        >>> hidden, weight = torch.zeros(2, 3, 8, requires_grad=True), torch.zeros(10, 8)  # a frozen LM head
        >>> targets = torch.tensor([[1, 2, -100], [4, 5, 6]])  # -100: inactive row
        >>> weights = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, 0.0]])  # rows of weight 0 are not projected
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

    With a frozen head nothing is recomputed. With a trainable head, bias or ``extra[1]``, backward recomputes the
    logits, because the gradient is a sum over rows, each scaled by its upstream gradient. Use
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
        transform, ignore_index, check_targets, backend, chunk_size, num_active, logits_dtype, with_lse, with_correct
    )
    inputs = RowInputs(hidden, targets, weight, bias, active=active)
    return call(LINEAR_TOKEN_NLL, LINEAR, inputs, options, extra=extra)  # type: ignore[no-any-return]
