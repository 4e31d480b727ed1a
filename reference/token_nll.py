"""Per-token negative log-likelihood, its log-sum-exp, and whether the argmax hits the target."""

from __future__ import annotations

import torch

IGNORE_INDEX = -100
Count = int | float | torch.Tensor


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that losses are computed in: float32, or float64 for float64 input."""
    return torch.promote_types(tensor.dtype, torch.float32)


def counted_rows(targets: torch.Tensor, ignore_index: int, active: torch.Tensor | None) -> torch.Tensor:
    """Rows that have a loss: active, and with a target other than ``ignore_index``."""
    counted = targets.long() != ignore_index  # a uint8 target compared as uint8 would see -100 as 156
    if active is not None:
        counted = counted & active.bool()
    return counted


def token_lse(logits: torch.Tensor, active: torch.Tensor | None = None) -> torch.Tensor:
    """Log of the normaliser of every row.

    ``lse[n] = log sum_v exp(logits[n, v])``, and 0 in a row that is not active.

    Args:
        logits: ``[..., V]``, floating.
        active: optional mask ``[...]``; nonzero is True.

    Returns:
        ``[...]`` in float32 (float64 for float64 logits), in nats.

    Source: the normaliser of the softmax; Milakov and Gimelshein 2018, arXiv:1805.02867, Eq. 1.
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

    A row that is not active, or whose target is ``ignore_index``, has NLL 0 and gradient 0 whatever its
    logits hold. A target outside ``[0, V)`` gives NaN, and so does a row that holds a NaN or a
    ``+inf`` or is all ``-inf``: NLL and gradient, in its own row only.

    Args:
        logits: ``[..., V]``, floating; ``-inf`` means probability 0.
        targets: ``[...]``, integer.
        ignore_index: the target that means "no loss here".
        active: optional mask ``[...]``; nonzero is True.

    Returns:
        ``[...]`` in float32 (float64 for float64 logits), in nats, differentiable with respect to ``logits``.

    Source: cross-entropy with a one-hot target, -log softmax(logits)[target].
    """
    counted = counted_rows(targets, ignore_index, active)
    in_range = (targets.long() >= 0) & (targets.long() < logits.shape[-1])
    # Selected before the softmax and after it: neither value nor gradient of an uncounted row gets through.
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
    """Whether the most likely token is the target; the lowest index wins a tie.

    ``correct[n] = (min argmax_v logits[n, v] == targets[n])``, False where the row is not active, its target
    is ``ignore_index`` or its NLL is NaN.

    Args:
        logits: ``[..., V]``, floating.
        targets: ``[...]``, integer.
        ignore_index: the target that is never matched.
        active: optional mask ``[...]``; nonzero is True.

    Returns:
        ``[...]``, bool.

    Source: the draft top-1 accuracy that DFlash training logs.
    """
    V = logits.shape[-1]
    is_best = logits == logits.amax(dim=-1, keepdim=True)
    columns = torch.arange(V, device=logits.device)
    lowest_best = torch.where(is_best, columns, V).amin(dim=-1)
    has_nll = ~token_nll(logits, targets, ignore_index, active).isnan()
    return (lowest_best == targets.long()) & counted_rows(targets, ignore_index, active) & has_nll


def weighted_nll(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    ignore_index: int = IGNORE_INDEX,
    fp32_upcast: bool = True,
    reduction: str = "total",
) -> torch.Tensor:
    """Weighted sum of the negative log-likelihoods, ``sum_n weights[n] * nll[n]``.

    A row of weight 0 is inert: its logits reach neither the loss nor a gradient, also when they hold NaN.

    Args:
        logits: ``[..., V]``, floating.
        targets: ``[...]``, integer.
        weights: ``[...]``, any dtype; constants of the differentiation.
        ignore_index: the target that means "no loss here".
        fp32_upcast: ``False`` rounds each NLL to the dtype of ``logits`` before it is weighted.
        reduction: ``"none"`` gives ``weights[n] * nll[n]`` of each row instead of their sum.

    Returns:
        A scalar, or ``[...]``, in float32 (float64 for float64 logits), in nats.

    Source: the common form of every loss here, before its denominator.
    """
    nll = token_nll(logits, targets, ignore_index, active=weights != 0)
    if not fp32_upcast:
        nll = nll.to(logits.dtype).to(nll.dtype)
    weighted = nll * weights.detach().to(nll.dtype)
    return weighted if reduction == "none" else weighted.sum()


def compute_per_token_nll(logits: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of every target, ``[B, L, V], [B, L] -> [B, L]``; see :func:`token_nll`.

    Args:
        logits: ``[B, L, V]``, floating.
        target_ids: ``[B, L]``, integer; -100 gives 0.

    Returns:
        ``[B, L]`` in float32 (float64 for float64 logits), in nats.

    Source: as :func:`token_nll`.
    """
    return token_nll(logits, target_ids)


def divided_by_count(loss: torch.Tensor, count: Count) -> torch.Tensor:
    """``loss / max(count, 1)``, for a Python number or a 0-d tensor."""
    return loss / torch.as_tensor(count, dtype=loss.dtype, device=loss.device).clamp(min=1)
