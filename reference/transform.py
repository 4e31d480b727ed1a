"""Transform of the logits before the softmax: soft cap, scale, and a column that is never predicted."""

from __future__ import annotations

import math

import torch

from reference.token_nll import compute_dtype


def transformed(
    logits: torch.Tensor,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
) -> torch.Tensor:
    """Compute ``scale * softcap * tanh(logits / softcap)``, -inf in column ``skip_id``; None omits a step.

    Args:
        logits: ``[..., V]``, floating.
        softcap: bound on the absolute value of the logits, > 0.
        scale: factor after the cap, > 0; 1 / T for a temperature T.
        skip_id: column that is never predicted. Its content has no effect, even if it is NaN.

    Returns:
        ``[..., V]`` in float32 (float64 for float64 logits), differentiable with respect to ``logits``.

    Source: Gemma Team 2024, "Gemma 2", arXiv:2408.00118, section 2, for the cap; Sahoo et al. 2024 (MDLM),
    arXiv:2406.07524, section 3.2.3, "zero masking probabilities", for the column.
    """
    x = logits.to(compute_dtype(logits))
    column = torch.arange(x.shape[-1], device=x.device) == (-1 if skip_id is None else skip_id)
    x = torch.where(column, 0.0, x)
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    if scale is not None:
        x = scale * x
    return torch.where(column, -math.inf, x)


def possible_targets(targets: torch.Tensor, skip_id: int | None = None) -> torch.Tensor:
    """Replace ``skip_id`` in targets ``[...]`` by -1, which is out of range.

    Args:
        targets: ``[...]``, integer.
        skip_id: the column that is never predicted.

    Returns:
        ``[...]``, int64.

    Source: convention of the package: a target with probability 0 is an error in the data, and a loss of NaN shows it.
    """
    return targets.long() if skip_id is None else targets.long().masked_fill(targets.long() == skip_id, -1)
