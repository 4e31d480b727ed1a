"""D-PACE: position weights of drafted blocks, computed from the confidence of the draft."""

from __future__ import annotations

import torch


def dpace_weights(
    confidence: torch.Tensor, mask: torch.Tensor, alpha: float = 0.5, variant: str = "dpace", anchor_row: bool = False
) -> torch.Tensor:
    """Compute position weights of blocks ``[..., k]``, one position at a time.

    ``q~_i = (1 - alpha) q_i + alpha``, or 0 from the first position on whose ``mask_i`` is 0;
    ``C_j = prod_{i <= j} q~_i``; ``S_j = sum_{m >= j} C_m mask_m``. ``"dpace"`` is S, ``"prefix"`` C,
    ``"continuation"`` S / C (0 if C is 0), each times the mask.

    Args:
        confidence: probability ``[..., k]`` of the token at each position.
        mask: ``[..., k]``, 0 for positions that predict nothing; fractions are weights.
        alpha: minimum of the smoothed confidence.
        variant: ``"dpace"``, ``"prefix"`` or ``"continuation"``.
        anchor_row: True if the first position is the anchor's, which may have the mask 0; ``q~`` is then 1.

    Returns:
        ``[..., k]`` in float32 (float64 for float64 confidence), detached.

    Raises:
        ValueError: ``variant`` is unknown.

    Source: D-PACE, arXiv 2605.18810.
    """
    if variant not in ("dpace", "prefix", "continuation"):
        raise ValueError(f"variant must be 'dpace', 'prefix' or 'continuation', got {variant!r}")
    dtype = torch.promote_types(confidence.dtype, torch.float32)
    q, mask = confidence.detach().double(), mask.detach().double()  # the prefix products underflow in float32
    k = q.shape[-1]
    weights = torch.zeros_like(q)
    prefix = [torch.ones_like(q[..., 0])] if k else []
    open_block = torch.ones_like(q[..., :1], dtype=torch.bool).all(-1)
    for i in range(k):
        valid = mask[..., i] != 0
        open_block = open_block & (valid | (anchor_row and i == 0))
        smoothed = torch.where(open_block, torch.where(valid, (1 - alpha) * q[..., i] + alpha, 1.0), 0.0)
        prefix.append(prefix[-1] * smoothed)
    for j in range(k):
        C = prefix[j + 1]
        S = sum(prefix[m + 1] * mask[..., m] for m in range(j, k))
        ratio = torch.where(C <= 0, 0.0, S / C)
        weights[..., j] = {"dpace": S, "prefix": C, "continuation": ratio}[variant] * mask[..., j]
    return weights.to(dtype)
