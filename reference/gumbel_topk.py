"""Sampling of k positions without replacement, by Gumbel noise on log-weights."""

from __future__ import annotations

import torch


def draw_uniform(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """Draw uniform float32 numbers strictly inside (0, 1)."""
    # Clamp to half a step, because torch.rand has a step of 2**-24 and can return 0.
    return torch.rand(shape, device=device, generator=generator).clamp(min=2.0**-25)


def gumbel_topk(
    log_w: torch.Tensor,
    k: int,
    uniform: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Choose exactly ``k`` positions without replacement, with probabilities proportional to their weights.

    The positions with the k largest ``score_i = log_w_i - log(-log u_i)`` are chosen. The lowest index wins a tie.

    Positions with log-weight ``-inf`` are never chosen. If ``k`` exceeds the number of other positions, all of them are
    chosen.

    Args:
        log_w: log-weights ``[D]``, floating.
        k: number of positions to choose, at least 0.
        uniform: u, ``[D]``, strictly inside (0, 1); None: drawn.
        generator: source of random numbers; None: torch's default generator.

    Returns:
        ``[D]``, bool.

    Source: Kool, van Hoof and Welling 2019, "Stochastic Beams and Where to Find Them", arXiv:1903.06059 (the
    Gumbel-top-k trick); the chosen set has the Plackett-Luce distribution.
    """
    if uniform is None:
        uniform = draw_uniform(tuple(log_w.shape), log_w.device, generator)
    dtype = torch.promote_types(log_w.dtype, torch.float32)
    scores = log_w.to(dtype) - torch.log(-torch.log(uniform.to(dtype)))
    candidates = torch.nonzero(log_w > -torch.inf).flatten()
    ranking = torch.sort(scores[candidates], descending=True, stable=True).indices
    chosen = torch.zeros_like(log_w, dtype=torch.bool)
    chosen[candidates[ranking[:k]]] = True
    return chosen


def batched_gumbel_topk(
    log_w: torch.Tensor,
    k: torch.Tensor,
    uniform: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Apply :func:`gumbel_topk` to every row, with one ``k`` per row.

    ``mask[n] = gumbel_topk(log_w[n], k[n], uniform[n])``

    Args:
        log_w: log-weights ``[N, D]``, floating.
        k: number of positions to choose per row ``[N]``, integer.
        uniform: u, ``[N, D]``, strictly inside (0, 1); None: drawn.
        generator: source of random numbers; None: torch's default generator.

    Returns:
        ``[N, D]``, bool.

    Source: see :func:`gumbel_topk`.
    """
    if uniform is None:
        uniform = draw_uniform(tuple(log_w.shape), log_w.device, generator)
    chosen = torch.zeros_like(log_w, dtype=torch.bool)
    for n, count in enumerate(k.tolist()):
        chosen[n] = gumbel_topk(log_w[n], count, uniform[n])
    return chosen
