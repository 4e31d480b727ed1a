"""Sampling k positions without replacement, by Gumbel noise on log-weights."""

from __future__ import annotations

import torch


def draw_uniform(shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """Uniform float32 numbers strictly inside (0, 1)."""
    # torch.rand steps by 2**-24 and can return 0: half a step is the smallest number we let through.
    return torch.rand(shape, device=device, generator=generator).clamp(min=2.0**-25)


def gumbel_topk(
    log_w: torch.Tensor,
    k: int,
    uniform: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Choose exactly ``k`` positions without replacement, with probabilities proportional to their weights.

    ``score_i = log_w_i - log(-log u_i)``; the k largest are chosen, the lowest index first among equals.

    A position of log-weight ``-inf`` is never chosen; ``k`` beyond the others chooses all of those.

    Args:
        log_w: log-weights ``[D]``, floating.
        k: how many to choose, at least 0.
        uniform: the draws ``[D]``, strictly inside (0, 1); None draws them.
        generator: source of the draws; None for torch's own.

    Returns:
        ``[D]``, bool.

    Source: Kool, van Hoof and Welling 2019, "Stochastic Beams and Where to Find Them", arXiv:1903.06059 (the
    Gumbel-top-k trick); the chosen set is that of Plackett and Luce.
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
    """:func:`gumbel_topk` of every row, each with its own ``k``.

    ``mask[n] = gumbel_topk(log_w[n], k[n], uniform[n])``

    Args:
        log_w: log-weights ``[N, D]``, floating.
        k: how many to choose in each row ``[N]``, integer.
        uniform: the draws ``[N, D]``, strictly inside (0, 1); None draws them.
        generator: source of the draws; None for torch's own.

    Returns:
        ``[N, D]``, bool.

    Source: as :func:`gumbel_topk`.
    """
    if uniform is None:
        uniform = draw_uniform(tuple(log_w.shape), log_w.device, generator)
    chosen = torch.zeros_like(log_w, dtype=torch.bool)
    for n, count in enumerate(k.tolist()):
        chosen[n] = gumbel_topk(log_w[n], count, uniform[n])
    return chosen
