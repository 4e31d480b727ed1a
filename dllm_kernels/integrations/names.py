"""Functions and classes of other code bases under the names and arguments that their users call.

Change the import line and nothing else. Each is a thin layer over an op of this package, which has more options.

- ``FusedLinearDiffusionCrossEntropyLoss``: SDAR and the training code derived from it; ``weighted_linear_nll`` here.
- ``linear_cross_entropy``: ``verl.utils.kernel``; ``token_log_probs`` here.
- ``FusedLinearForPPO``: ``verl.utils.experimental.torch_functional``; ``token_log_probs`` here.
- ``token_entropy``: training loops of policy gradients; ``row_stats`` here.
- ``get_mtp_loss_scaling_factor``: NeMo AutoModel; ``mtp_loss_scaling_factor`` here.
- ``masked_soft_cross_entropy``: NeMo AutoModel's EAGLE-3 trainers; ``divergence`` here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dllm_kernels import _checks, ops
from dllm_kernels._checks._target_range import first_true
from dllm_kernels._graph._plain import is_dtensor, readable_without_sync
from dllm_kernels.mtp import mtp_loss_scaling_factor as get_mtp_loss_scaling_factor
from dllm_kernels.ops import LinearLogits
from dllm_kernels.rows._logits import Logits, rows_of

__all__ = [
    "FusedLinearDiffusionCrossEntropyLoss", "FusedLinearForPPO", "get_mtp_loss_scaling_factor", "linear_cross_entropy",
    "masked_soft_cross_entropy", "token_entropy",
]  # fmt: skip


class FusedLinearDiffusionCrossEntropyLoss(nn.Module):
    """Sum or mean of ``nll_i / p_i`` of the masked tokens, from hidden states and the LM head.

    The gradient is computed in the forward pass, in three matrix products, or two with a frozen head. Rows with an
    ignored target are not projected.

    Args:
        ignore_index: target of rows without a loss.
        logit_scale: factor of the logits, positive.
        num_chunks: accepted, not used: the rows per chunk of logits are chosen from the sizes.
        reduction: "mean" to divide the sum by the number of targets that are not ignored, or "sum".

    Raises:
        TypeError: ``ignore_index`` or ``num_chunks`` is not an int, or ``logit_scale`` is not a number.
        ValueError: ``reduction`` is unknown, ``num_chunks`` < 1, or ``logit_scale`` is not positive.
    """

    def __init__(
        self, ignore_index: int = -100, *, logit_scale: float = 1.0, num_chunks: int = 8, reduction: str = "mean"
    ) -> None:
        """Initialize; the arguments are documented on the class."""
        super().__init__()
        num_chunks = _checks.checked_int("num_chunks", num_chunks, 1)
        _checks.check_choice("reduction", reduction, ("mean", "sum"))
        _checks.check_factor("logit_scale", logit_scale)
        self.ignore_index, self.logit_scale = _checks.checked_int64("ignore_index", ignore_index), logit_scale
        self.num_chunks, self.reduction = num_chunks, reduction

    def forward(
        self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None, p_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the loss.

        Args:
            x: hidden states ``[..., D]``.
            target: ``[...]`` integers in ``[0, V)``, or ``ignore_index``.
            weight: the LM head ``[V, D]``.
            bias: ``[V]`` or None.
            p_mask: ``[...]``, the probability with which each token was masked; not read where the target is ignored.
                None: ones.

        Returns:
            0-d, float32.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices do not match; on a CPU, a probability outside [0, 1].
        """
        names, logits = _checks.Names("x", "target"), LinearLogits(x, weight, bias)
        _check_linear(names, logits, target, self.ignore_index)
        counted = target.long() != self.ignore_index  # int64, because -100 equals 156 in uint8
        weights = counted.float()
        if p_mask is not None:
            _checks.check_float("p_mask", p_mask)
            _checks.check_shape("p_mask", p_mask, target.shape, "that of target")
            _checks.check_same_device("target", target, p_mask=p_mask)
            _checks.check_constant("p_mask", p_mask)
            p_mask = p_mask.masked_fill(~counted, 1.0)
            where = first_true((p_mask < 0) | (p_mask > 1)) if readable_without_sync(p_mask) else None
            if where is not None:
                got = p_mask[where].item()
                raise ValueError(f"p_mask must lie in [0, 1] where it is used, got {got} at position {where}")
            weights = weights / p_mask
        if self.reduction == "mean":
            weights = weights / counted.sum().clamp(min=1)
        scale = None if self.logit_scale == 1 else self.logit_scale
        return ops.weighted_nll(logits, target, weights, ignore_index=self.ignore_index, scale=scale).loss


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute log-probabilities and entropies of tokens, as ``verl.utils.kernel.linear_cross_entropy``.

    The logits exist one chunk at a time, also on CPU.

    Args:
        hidden: hidden states ``[..., D]``.
        weight: the LM head ``[V, D]``.
        labels: ``[...]`` integers in ``[0, V)``. A label of -100 has log-probability and entropy 0.
        temperature: T > 0; the logits are divided by T.
        reduction: "none", or "sum" or "mean" of the log-probabilities over all tokens.
        dist_process_group: None. With a vocabulary split over ranks, pass ``hidden``, ``weight`` and ``labels`` as
            DTensors.

    Returns:
        ``(log_probs, entropy)``, float32 ``[N]`` for all N tokens, or 0-d and ``[N]`` with a reduction.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, ``temperature`` is not positive, ``reduction`` is unknown,
            or ``dist_process_group`` is given.
    """
    _checks.check_choice("reduction", reduction, ("none", "sum", "mean"))
    if dist_process_group is not None:
        got = _checks.type_name(dist_process_group)
        raise ValueError(f"dist_process_group must be None, got {got}; pass DTensors, split by vocabulary")
    logits = LinearLogits(hidden, weight)
    _check_linear(_checks.Names("hidden", "labels"), logits, labels)
    out = ops.token_log_probs(logits, labels, temperature=temperature, with_entropy=True)
    log_probs, entropy = out.log_probs.flatten(), _requested(out.entropy).flatten()
    return (log_probs if reduction == "none" else getattr(log_probs, reduction)()), entropy


class FusedLinearForPPO(nn.Module):
    """Log-probabilities and entropies of tokens, as ``verl.utils.experimental.torch_functional.FusedLinearForPPO``.

    Args:
        chunk_size: rows per chunk of logits.
        impl_backend: accepted, not used: "torch" or "liger".

    Raises:
        TypeError: ``chunk_size`` is not an int.
        ValueError: ``chunk_size`` < 1, or ``impl_backend`` is unknown.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        """Initialize; the arguments are documented on the class."""
        super().__init__()
        self.chunk_size = _checks.checked_int("chunk_size", chunk_size, 1)
        _checks.check_choice("impl_backend", impl_backend, ("torch", "liger"))
        self.impl_backend = impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Compute the log-probability of each token and the entropy of its distribution.

        Args:
            hidden_states: ``[T, D]`` or ``[B, T, D]``.
            vocab_weights: the LM head ``[V, D]``.
            input_ids: ``[T]`` or ``[B, T]`` integers in ``[0, V)``. An id of -100 has log-probability and entropy 0.
            temperature: T > 0; the logits are divided by T.

        Returns:
            ``(log_probs, entropy)``, float32 and in the dtype of ``hidden_states``, of the shape of ``input_ids``.

        Raises:
            TypeError: an argument that should be a tensor or a number is not.
            ValueError: shapes, dtypes or devices do not match, or ``temperature`` is not positive.
        """
        logits = LinearLogits(hidden_states, vocab_weights, chunk_size=self.chunk_size)
        _check_linear(_checks.Names("hidden_states", "input_ids", "vocab_weights"), logits, input_ids)
        out = ops.token_log_probs(logits, input_ids, temperature=temperature, with_entropy=True)
        return out.log_probs, _requested(out.entropy).to(hidden_states.dtype)


def _check_linear(names: _checks.Names, logits: LinearLogits, ids: Tensor, ignored: int = -100) -> None:
    """Validate hidden states, LM head and ids under the names that the caller knows."""
    hidden, weight, bias = logits[:3]
    V = _checks.check_rows(names, hidden, ids, (weight, bias))
    _checks.check_shape(names.targets, ids, hidden.shape[:-1], f"that of {names.rows} without its last dimension")
    if not is_dtensor(ids):  # the op gathers it for this check
        _checks.check_target_range(None, names.targets, ids, V, ignored)


def _requested(entropy: Tensor | None) -> Tensor:
    assert entropy is not None  # it was requested
    return entropy


def token_entropy(logits: Logits) -> Tensor:
    """Compute the entropy of ``softmax(logits)`` of each row, in nats, differentiable.

    Args:
        logits: ``[..., V]``, floating.

    Returns:
        ``[...]``, float32 (float64 for float64 logits).

    Raises:
        TypeError: ``logits`` is not a tensor.
        ValueError: ``logits`` has the wrong dtype or no dimension.
    """
    rows = rows_of(logits)
    _checks.check_float("logits", rows)
    ids = torch.zeros(rows.shape[:-1], dtype=torch.int64, device=rows.device)
    return _requested(ops.row_stats(logits, ids, entropy=True).entropy)


def masked_soft_cross_entropy(logits: Tensor, target_probs: Tensor, position_mask: Tensor) -> Tensor:
    """Compute the cross-entropy against given probabilities, averaged over the valid positions.

    ``sum_i m_i (-sum_v q_iv log p_iv) / max(sum_i m_i, 1)`` with ``p = softmax(logits)``. The probabilities of a row
    may sum to less than 1, as those of a draft vocabulary do. Rows of mask 0 are not read.

    Args:
        logits: ``[batch, seq_len, V]``.
        target_probs: ``[batch, seq_len, V]``, q, at least 0. A constant.
        position_mask: ``[batch, seq_len, 1]``, bool or numeric.

    Returns:
        0-d, float32 (float64 for float64 operands).

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes, dtypes or devices do not match, ``target_probs`` requires a gradient, or on a CPU one in a
            valid position is negative.
    """
    _checks.check_float("logits", logits)
    _checks.check_float("target_probs", target_probs)
    _checks.check_shape("target_probs", target_probs, logits.shape, "that of logits")
    _checks.check_constant("target_probs", target_probs)
    _checks.check_mask("position_mask", position_mask, (*logits.shape[:-1], 1), "that of logits, with one column")
    _checks.check_same_device("logits", logits, target_probs=target_probs, position_mask=position_mask)
    dtype = torch.promote_types(torch.promote_types(logits.dtype, target_probs.dtype), torch.float32)
    mask, q = position_mask.squeeze(-1).to(dtype), target_probs.to(dtype)
    valid = q.masked_fill(mask[..., None] == 0, 0.0)
    _checks.check_none_negative("target_probs", valid)
    # The op normalizes q, so the sum of q is part of the weight.
    total = valid.sum(-1)
    weights = mask * total / mask.sum().clamp(min=1)
    return ops.divergence(logits.to(dtype), q.log(), weights, kind="soft_ce").loss
