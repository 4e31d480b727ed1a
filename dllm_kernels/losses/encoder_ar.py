"""Next-token cross-entropy on an encoder's causal logits, and the per-token NLL."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dllm_kernels import _checks
from dllm_kernels._graph._deferred import from_hidden_states
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import all_plain
from dllm_kernels.losses._common import (
    REDUCTIONS,
    Count,
    as_batch,
    check_counts,
    divide,
    next_token_mask,
    next_tokens,
    shift_left,
)
from dllm_kernels.losses._model_output import HIDDEN, LOGITS, ModelOutput
from dllm_kernels.ops.linear_nll import linear_token_nll
from dllm_kernels.ops.token_nll import token_nll_unchecked
from dllm_kernels.rows._call import checked
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._transform import Transform

NORMALIZE = ("tokens", "sequences")


def _per_token_nll_fused(
    hidden: torch.Tensor, weight: torch.Tensor, target_ids: torch.Tensor, **options: Any
) -> torch.Tensor:
    return linear_token_nll(hidden, weight, target_ids, **options).nll


@from_hidden_states(_per_token_nll_fused)
def compute_per_token_nll(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    r"""Negative log-likelihood of every token, :math:`\log\sum_v e^{z_{iv}} - z_{i,y_i}`.

    Source: cross-entropy with a one-hot target, -log softmax(z)[y].

    Args:
        logits: ``[B, L, V]``, any float dtype.
        target_ids: ``[B, L]`` integers; -100 gives 0.
        softcap: {softcap}
        scale: {scale}
        skip_id: {skip_id}
        backend: "auto", "triton" or "torch".

    Returns:
        ``[B, L]`` in nats, float32 (float64 for float64 logits), differentiable with any gradient per token.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes, dtypes or devices do not match.
    """
    options = Options(Transform(softcap, scale, skip_id), backend=backend)
    call = checked(LOGITS, logits, target_ids, options)
    return token_nll_unchecked(logits, targets=call.ids, active=None, options=call.options).nll


@from_hidden_states("encoder_ar_loss_fused")
def encoder_ar_loss(
    encoder_logits: torch.Tensor,
    input_ids: torch.Tensor,
    valid_mask: torch.Tensor | None = None,
    num_tokens: int | torch.Tensor | None = None,
    *,
    segment_ids: torch.Tensor | None = None,
    normalize: str = "tokens",
    num_sequences: int | torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    reduction: str = "total",
    backend: str = "auto",
) -> torch.Tensor:
    r"""Next-token cross-entropy over the pairs of a valid position and a valid next position.

    .. math:: \text{loss} = \frac{1}{N} \sum_{i < S} m_i m_{i+1} \, \text{nll}(z_i, x_{i+1})

    With ``segment_ids``, both positions of a pair must also be in the same segment. With ``normalize="sequences"``, the
    sum of each sequence is divided by its number of pairs, and N is the number of sequences with at least one pair.

    The targets are shifted, not the logits, so no slice of ``[B, S, V]`` is copied or padded.

    Source: the next-token cross-entropy of language models; Bengio et al. 2003, "A Neural Probabilistic Language
    Model".

    Examples:
        >>> logits, ids = torch.zeros(1, 4, 10), torch.tensor([[3, 1, 4, 0]])
        >>> # two scored pairs
        >>> loss = encoder_ar_loss(logits, ids, valid_mask=torch.tensor([[1, 1, 1, 0]]))
        >>> round((loss / math.log(10)).item(), 4)
        1.0

    Args:
        encoder_logits: ``[B, S, V]``, any float dtype; ``[S, V]`` with ids and mask ``[S]`` is a batch of one sequence.
        input_ids: ``[B, S]`` integers, the clean sequence.
        valid_mask: ``[B, S]``, nonzero if a position is not padding; None: all are valid.
        num_tokens: divides the sum, as ``max(n, 1)``; int or 0-d tensor. None: the number of scored positions of this
            call. Only with ``normalize="tokens"``.
        segment_ids: integers ``[B, S]``, equal for the positions of one segment, such as a document in a packed row;
            negative for positions in no segment, which are not scored. None: each row is one segment.
        normalize: "tokens", the mean over pairs; or "sequences", the mean over sequences of the mean over their pairs.
        num_sequences: N with "sequences", as ``max(n, 1)``, such as the number of the whole step; int or 0-d tensor.
            None: the number of sequences of this call with at least one pair.
        softcap: {softcap}
        scale: {scale}
        skip_id: {skip_id}
        reduction: "total", the loss; or "none", the NLL per row, 0 for rows that are not scored, for a custom
            denominator. Row i predicts token i + 1. The rows are not divided by ``num_tokens``, which is still checked.
        backend: "auto", "triton" or "torch".

    Returns:
        0-d loss, float32 (float64 for float64 logits); with ``reduction="none"`` ``[B, S]``, differentiable with any
        gradient per row.

    Raises:
        TypeError: an argument that should be a tensor is not.
        ValueError: shapes, dtypes or devices do not match, ``reduction`` or ``normalize`` is unknown, or a count
            belongs to the other normalization.
    """
    options = Options(Transform(softcap, scale, skip_id), backend=backend)
    rows = ModelOutput(_checks.Names("encoder_logits", "input_ids"), options, encoder_logits)
    pairs = _Pairs(input_ids, valid_mask, segment_ids)
    return _next_token(rows, pairs, normalize, num_tokens, num_sequences, reduction)


def encoder_ar_loss_fused(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    input_ids: torch.Tensor,
    valid_mask: torch.Tensor | None = None,
    num_tokens: int | torch.Tensor | None = None,
    *,
    lm_head_bias: torch.Tensor | None = None,
    extra: _checks.Extra | None = None,
    chunk_size: int | None = None,
    num_active: int | None = None,
    logits_dtype: torch.dtype | None = None,
    segment_ids: torch.Tensor | None = None,
    normalize: str = "tokens",
    num_sequences: int | torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    reduction: str = "total",
    backend: str = "auto",
) -> torch.Tensor:
    """Compute :func:`encoder_ar_loss` from hidden states and the LM head; the logits exist one chunk at a time.

    Args:
        hidden: ``[B, S, D]``; ``[S, D]`` with ids and mask ``[S]`` is a batch of one sequence.
        lm_head_weight: ``[V, D]``.
        input_ids, valid_mask, num_tokens: as in :func:`encoder_ar_loss`.
        lm_head_bias: ``[V]`` or None.
        extra: {extra}
        chunk_size: {chunk_size}
        num_active: upper bound on the number of scored rows; None: read back from a GPU, a host sync. The loss is NaN
            if the bound is too small.
        logits_dtype: {logits_dtype}
        segment_ids, normalize, num_sequences: as in :func:`encoder_ar_loss`.
        softcap: {softcap}
        scale: {scale}
        skip_id: {skip_id}
        reduction: as in :func:`encoder_ar_loss`; with "none" and a trainable head the logits are computed twice.
        backend: "auto", "triton" or "torch".

    Returns:
        0-d loss, float32 (float64 for float64 hidden states), or ``[B, S]`` as in :func:`encoder_ar_loss`.

    Raises:
        TypeError: an argument that should be a tensor is not.
        ValueError: shapes, dtypes or devices do not match, ``num_active`` is outside [0, number of rows],
            ``reduction`` or ``normalize`` is unknown, or a count belongs to the other normalization.

    Source: :func:`encoder_ar_loss` of the projected hidden states.
    """
    options = Options(
        Transform(softcap, scale, skip_id), backend=backend, chunk_size=chunk_size, num_active=num_active,
        logits_dtype=logits_dtype,
    )  # fmt: skip
    rows = ModelOutput(replaced(HIDDEN, targets="input_ids"), options, hidden, lm_head_weight, lm_head_bias, extra)
    pairs = _Pairs(input_ids, valid_mask, segment_ids)
    return _next_token(rows, pairs, normalize, num_tokens, num_sequences, reduction)


class _Pairs(NamedTuple):
    """Tokens, and what decides which pairs of adjacent positions are scored."""

    input_ids: torch.Tensor
    valid_mask: torch.Tensor | None
    segment_ids: torch.Tensor | None

    def scored(self) -> torch.Tensor:
        """Validate the masks; return True for positions that predict the next token, bool ``[B, S]``."""
        input_ids, valid_mask, segment_ids = self
        valid = torch.ones(input_ids.shape, dtype=torch.bool, device=input_ids.device)
        if valid_mask is not None:
            _checks.check_masks_like("input_ids", input_ids, valid_mask=valid_mask)
            valid = valid_mask.bool()
        if segment_ids is None:
            return valid & shift_left(valid, False)
        _checks.check_like("input_ids", input_ids, _checks.INT_DTYPES, segment_ids=segment_ids)
        return valid & shift_left(valid & next_token_mask(segment_ids), False)


def _next_token(
    rows: ModelOutput, pairs: _Pairs, normalize: str, num_tokens: Count, num_sequences: Count, reduction: str
) -> torch.Tensor:
    if rows.packed(pairs.input_ids):
        rows, pairs = rows.as_batch(), _Pairs(*map(as_batch, pairs))
    rows.check(pairs.input_ids)
    _checks.check_choice("reduction", reduction, REDUCTIONS)
    _checks.check_choice("normalize", normalize, NORMALIZE)
    check_counts(num_tokens=num_tokens, num_sequences=num_sequences)
    for name, count, of in (("num_tokens", num_tokens, "tokens"), ("num_sequences", num_sequences, "sequences")):
        if count is not None and normalize != of:
            raise ValueError(f"{name} must be None unless normalize is {of!r}, got it with normalize={normalize!r}")
    pairs = _Pairs(*all_plain(*pairs))
    scored, targets = pairs.scored(), next_tokens(pairs.input_ids)
    rows.check_targets(pairs.input_ids, scored[:, :-1], shift=1)
    if reduction == "none":
        return rows.per_row(targets, scored).nll
    weights = scored.to(rows.accum_dtype)
    if normalize == "tokens":
        weights = divide(weights, num_tokens, scored)
    else:
        of_sequence = scored.sum(1, keepdim=True)
        weights = divide(weights / of_sequence.clamp(min=1), num_sequences, of_sequence > 0)
    return rows.weighted(targets, weights).loss
