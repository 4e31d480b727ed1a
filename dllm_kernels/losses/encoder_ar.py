"""Next-token cross-entropy on an encoder's causal logits, and the per-token NLL."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
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
from dllm_kernels.losses._model_output import NAMES, ModelOutput
from dllm_kernels.ops.token_nll import token_nll_unchecked
from dllm_kernels.rows._call import checked
from dllm_kernels.rows._logits import LinearLogits, Logits
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._transform import Transform

NORMALIZE = ("tokens", "sequences")
ENCODER = _checks.Names("encoder_logits", "input_ids", "lm_head_weight", "lm_head_bias")


def compute_per_token_nll(
    logits: Logits, target_ids: Tensor, *, softcap: float | None = None, scale: float | None = None,
    skip_id: int | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    r"""Negative log-likelihood of every token, :math:`\log\sum_v e^{z_{iv}} - z_{i,y_i}`.

    Source: cross-entropy with a one-hot target, -log softmax(z)[y].

    Args:
        logits: ``[B, L, V]``, any float dtype.
        target_ids: ``[B, L]`` integers; -100 gives 0.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
        backend: "auto", "triton" or "torch".

    Returns:
        ``[B, L]`` in nats, float32 (float64 for float64 logits), differentiable with any gradient per token.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes, dtypes or devices do not match.
    """
    options = Options(Transform(softcap, scale, skip_id), backend=backend)
    return token_nll_unchecked(checked(NAMES, logits, target_ids, options)).nll


def encoder_ar_loss(
    encoder_logits: Logits, input_ids: Tensor, valid_mask: Tensor | None = None,
    num_tokens: int | Tensor | None = None, *, segment_ids: Tensor | None = None, normalize: str = "tokens",
    num_sequences: int | Tensor | None = None, softcap: float | None = None, scale: float | None = None,
    skip_id: int | None = None, reduction: str = "total", backend: str = "auto",
) -> Tensor:  # fmt: skip
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
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
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
    rows = ModelOutput.of(encoder_logits, Options(Transform(softcap, scale, skip_id), backend=backend), ENCODER)
    pairs = _Pairs(input_ids, valid_mask, segment_ids)
    if rows.packed(pairs.input_ids):
        rows, pairs = rows.as_batch(), _Pairs(*map(as_batch, pairs))
    rows = rows.checked(pairs.input_ids)
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
        counts = scored.sum(1, keepdim=True)
        weights = divide(weights / counts.clamp(min=1), num_sequences, counts > 0)
    return rows.weighted(targets, weights).loss


def encoder_ar_loss_fused(
    hidden: Tensor, lm_head_weight: Tensor, input_ids: Tensor, valid_mask: Tensor | None = None,
    num_tokens: Count = None, *, lm_head_bias: Tensor | None = None, extra: _checks.Extra | None = None,
    chunk_size: int | None = None, num_active: int | None = None, logits_dtype: torch.dtype | None = None,
    segment_ids: Tensor | None = None, normalize: str = "tokens", num_sequences: Count = None,
    softcap: float | None = None, scale: float | None = None, skip_id: int | None = None, reduction: str = "total",
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Compute :func:`encoder_ar_loss` of ``LinearLogits(hidden, lm_head_weight, lm_head_bias, extra, ...)``."""
    logits = LinearLogits(hidden, lm_head_weight, lm_head_bias, extra, logits_dtype, chunk_size, num_active)
    return encoder_ar_loss(
        logits, input_ids, valid_mask, num_tokens, segment_ids=segment_ids, normalize=normalize,
        num_sequences=num_sequences, softcap=softcap, scale=scale, skip_id=skip_id, reduction=reduction,
        backend=backend,
    )  # fmt: skip


class _Pairs(NamedTuple):
    """Tokens, and what decides which pairs of adjacent positions are scored."""

    input_ids: Tensor
    valid_mask: Tensor | None
    segment_ids: Tensor | None

    def scored(self) -> Tensor:
        """Validate the masks; return True for positions that predict the next token, bool ``[B, S]``."""
        input_ids, valid_mask, segment_ids = self
        valid = torch.ones(input_ids.shape, dtype=torch.bool, device=input_ids.device)
        if valid_mask is not None:
            _checks.check_masks_like("input_ids", input_ids, valid_mask=valid_mask)
            valid = valid_mask.bool()
        if segment_ids is None:
            return valid & shift_left(valid)
        _checks.check_like("input_ids", input_ids, _checks.INT_DTYPES, segment_ids=segment_ids)
        return valid & shift_left(valid & next_token_mask(segment_ids))
