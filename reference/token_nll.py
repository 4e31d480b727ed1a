"""Per-token negative log-likelihood, logsumexp, argmax and argmax match."""

from __future__ import annotations

import torch

IGNORE_INDEX = -100
Count = int | float | torch.Tensor


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the compute dtype of losses: float32, or float64 for float64 input."""
    return torch.promote_types(tensor.dtype, torch.float32)


def counted_rows(targets: torch.Tensor, ignore_index: int, active: torch.Tensor | None) -> torch.Tensor:
    """Return the mask of rows with a loss: active, and with a target other than ``ignore_index``."""
    counted = targets.long() != ignore_index  # int64, because -100 equals 156 in uint8
    if active is not None:
        counted = counted & active.bool()
    return counted


def token_lse(logits: torch.Tensor, active: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the logsumexp of every row.

    ``lse[n] = log sum_v exp(logits[n, v])``, and 0 for inactive rows.

    Args:
        logits: ``[..., V]``, floating.
        active: optional mask ``[...]``; nonzero is True.

    Returns:
        ``[...]`` in float32 (float64 for float64 logits), in nats.

    Source: the normalizer of the softmax; Milakov and Gimelshein 2018, arXiv:1805.02867, Eq. 1.
    """
    x = logits.to(compute_dtype(logits))
    if active is None:
        return torch.logsumexp(x, dim=-1)
    rows = active.bool()
    lse = torch.logsumexp(torch.where(rows[..., None], x, 0.0), dim=-1)
    return torch.where(rows, lse, 0.0)


def token_nll(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = IGNORE_INDEX,
    active: torch.Tensor | None = None,
) -> torch.Tensor:
    """Negative log-likelihood of every target.

    ``nll[n] = log sum_v exp(logits[n, v]) - logits[n, targets[n]]``

    An inactive row, or a row with target ``ignore_index``, has NLL 0 and gradient 0 for any logits. NLL and gradient of
    a row are NaN if its target is outside ``[0, V)``, or if its logits contain NaN or ``+inf`` or are all ``-inf``.
    Other rows are not affected.

    Args:
        logits: ``[..., V]``, floating; ``-inf`` means probability 0.
        targets: ``[...]``, integer.
        ignore_index: target of rows without a loss.
        active: optional mask ``[...]``; nonzero is True.

    Returns:
        ``[...]`` in float32 (float64 for float64 logits), in nats, differentiable with respect to ``logits``.

    Source: cross-entropy with a one-hot target, -log softmax(logits)[target].
    """
    counted = counted_rows(targets, ignore_index, active)
    in_range = (targets.long() >= 0) & (targets.long() < logits.shape[-1])
    # Mask before and after the softmax, so that neither value nor gradient of an uncounted row propagates.
    x = torch.where(counted[..., None], logits.to(compute_dtype(logits)), 0.0)
    index = torch.where(counted & in_range, targets.long(), 0)
    nll = -torch.log_softmax(x, dim=-1).gather(-1, index[..., None]).squeeze(-1)
    nll = nll * torch.where(in_range, 1.0, torch.nan)  # a product, so that the gradient is NaN as well
    return torch.where(counted, nll, 0.0)


def argmax_match(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = IGNORE_INDEX,
    active: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compare the most likely token with the target; the lowest index wins a tie.

    ``correct[n] = (min argmax_v logits[n, v] == targets[n])``. False for inactive rows, rows with target
    ``ignore_index`` and rows with NLL NaN.

    Args:
        logits: ``[..., V]``, floating.
        targets: ``[...]``, integer.
        ignore_index: target that never matches.
        active: optional mask ``[...]``; nonzero is True.

    Returns:
        ``[...]``, bool.

    Source: the draft top-1 accuracy that DFlash training logs.
    """
    has_nll = ~token_nll(logits, targets, ignore_index, active).isnan()
    return (predicted_ids(logits) == targets.long()) & counted_rows(targets, ignore_index, active) & has_nll


def predicted_ids(logits: torch.Tensor, active: torch.Tensor | None = None, skip_id: int | None = None) -> torch.Tensor:
    """Find the most likely token of every row; the lowest index wins a tie.

    ``ids[n] = min argmax_v logits[n, v]``. -100 for inactive rows. If the softmax of a row is NaN, the lowest id other
    than ``skip_id``.

    Args:
        logits: ``[..., V]``, floating, after their transform.
        active: optional mask ``[...]``; nonzero is True.
        skip_id: the column that the transform has set to ``-inf``.

    Returns:
        ``[...]``, int64.

    Source: greedy decoding; ties as in :func:`argmax_match`.
    """
    is_best = logits == logits.amax(dim=-1, keepdim=True)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    ids = torch.where(is_best, columns, logits.shape[-1]).amin(dim=-1)
    ids = torch.where(torch.softmax(logits, dim=-1).isnan().any(dim=-1), int(skip_id == 0), ids)
    return ids if active is None else torch.where(active.bool(), ids, IGNORE_INDEX)


def weighted_nll(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    ignore_index: int = IGNORE_INDEX,
    fp32_upcast: bool = True,
    reduction: str = "total",
) -> torch.Tensor:
    """Compute the weighted sum of negative log-likelihoods, ``sum_n weights[n] * nll[n]``.

    Logits of rows of weight 0 affect neither the loss nor a gradient, even if they hold NaN.

    Args:
        logits: ``[..., V]``, floating.
        targets: ``[...]``, integer.
        weights: ``[...]``, any dtype, constants.
        ignore_index: target of rows without a loss.
        fp32_upcast: ``False`` rounds each NLL to the dtype of ``logits`` before it is weighted.
        reduction: ``"total"``, or ``"none"`` to return ``weights[n] * nll[n]`` of each row.

    Returns:
        A scalar, or ``[...]``, in float32 (float64 for float64 logits), in nats.

    Source: common form of all losses, before the denominator.
    """
    nll = token_nll(logits, targets, ignore_index, active=weights != 0)
    if not fp32_upcast:
        nll = nll.to(logits.dtype).to(nll.dtype)
    weighted = nll * weights.detach().to(nll.dtype)
    return weighted if reduction == "none" else weighted.sum()


def compute_per_token_nll(logits: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    """Compute the negative log-likelihood of every target, ``[B, L, V], [B, L] -> [B, L]``; see :func:`token_nll`.

    Args:
        logits: ``[B, L, V]``, floating.
        target_ids: ``[B, L]``, integer; -100 gives 0.

    Returns:
        ``[B, L]`` in float32 (float64 for float64 logits), in nats.

    Source: see :func:`token_nll`.
    """
    return token_nll(logits, target_ids)


def divided_by_count(loss: torch.Tensor, count: Count) -> torch.Tensor:
    """Compute ``loss / max(count, 1)``, for a Python number or a 0-d tensor."""
    return loss / torch.as_tensor(count, dtype=loss.dtype, device=loss.device).clamp(min=1)
