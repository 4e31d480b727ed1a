"""Negative log-likelihood from hidden states and the LM head."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from reference.token_nll import IGNORE_INDEX, counted_rows, token_nll, weighted_nll

Extra = tuple[torch.Tensor, torch.Tensor]


def linear_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    extra: Extra | None = None,
) -> torch.Tensor:
    """Compute ``logits = hidden @ weight.T + bias``, plus ``u @ U.T`` with ``extra = (u, U)``.

    The logits are rounded to the dtype of the inputs, as in the unfused computation.

    Args:
        hidden: ``[..., D]``, floating.
        weight: the LM head ``[V, D]``.
        bias: optional ``[V]``.
        active: optional mask ``[...]``. Inactive rows are replaced by zeros before the projection, so that a NaN in
            them does not affect the gradient of ``weight``.
        extra: low-rank second part of the head, (u ``[..., r]``, U ``[V, r]``), or None.

    Returns:
        ``[..., V]`` in the dtype of ``hidden``.

    Source: the output projection of a language model; a low-rank second part as in Markov heads of block drafters.
    """
    if active is not None:
        hidden = torch.where(active.bool()[..., None], hidden, 0.0)
    logits = F.linear(hidden, weight, bias)
    if extra is None:
        return logits
    u, second = extra
    if active is not None:
        u = torch.where(active.bool()[..., None], u, 0.0)
    return logits + F.linear(u, second)


def linear_token_nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    active: torch.Tensor | None = None,
    extra: Extra | None = None,
) -> torch.Tensor:
    """Compute the negative log-likelihood of every target under the LM head.

    ``nll[n] = log sum_v exp(z[n, v]) - z[n, targets[n]]``, ``z`` as in :func:`linear_logits`

    Args:
        hidden: ``[..., D]``, floating.
        weight: the LM head ``[V, D]``.
        targets: ``[...]``, integer.
        bias: optional ``[V]``.
        ignore_index: target of rows without a loss.
        active: optional mask ``[...]``; nonzero is True.
        extra: as in :func:`linear_logits`.

    Returns:
        ``[...]`` in float32 (float64 for float64 input), in nats, differentiable with respect to ``hidden``,
        ``weight``, ``bias`` and ``extra``.

    Source: :func:`reference.token_nll.token_nll` of :func:`linear_logits`.
    """
    counted = counted_rows(targets, ignore_index, active)
    return token_nll(linear_logits(hidden, weight, bias, counted, extra), targets, ignore_index, active)


def weighted_linear_nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    extra: Extra | None = None,
) -> torch.Tensor:
    """Weighted sum of the negative log-likelihoods under the LM head, ``sum_n weights[n] * nll[n]``.

    Args:
        hidden: ``[..., D]``, floating.
        weight: the LM head ``[V, D]``.
        targets: ``[...]``, integer.
        weights: ``[...]``, any dtype, constants. A row of weight 0 affects neither loss nor gradient.
        bias: optional ``[V]``.
        ignore_index: target of rows without a loss.
        extra: as in :func:`linear_logits`.

    Returns:
        A scalar in float32 (float64 for float64 input), in nats.

    Source: :func:`reference.token_nll.weighted_nll` of :func:`linear_logits`.
    """
    counted = counted_rows(targets, ignore_index, weights != 0)
    return weighted_nll(linear_logits(hidden, weight, bias, counted, extra), targets, weights, ignore_index)
