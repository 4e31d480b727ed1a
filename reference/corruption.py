"""Corruption of clean tokens, as functions of given uniform numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from reference.gumbel_topk import draw_uniform, gumbel_topk

__all__ = [
    "Corrupted", "complementary", "corrupt_all_masked", "corrupt_blockwise", "corrupt_mix", "corrupt_uniform",
    "corrupt_uniform_random", "sample_level",
]  # fmt: skip


class Corrupted(NamedTuple):
    """Noisy ids, the bool mask of the corrupted positions, and float32 probabilities; each ``[B, L]``."""

    noisy_input_ids: torch.Tensor
    noise_mask: torch.Tensor
    p_mask: torch.Tensor


def _given_or_drawn(
    given: torch.Tensor | None,
    shape: tuple[int, ...],
    input_ids: torch.Tensor,
    generator: torch.Generator | None,
) -> torch.Tensor:
    return draw_uniform(shape, input_ids.device, generator) if given is None else given


def _supervised(input_ids: torch.Tensor, loss_mask: torch.Tensor | None) -> torch.Tensor:
    return torch.ones_like(input_ids, dtype=torch.bool) if loss_mask is None else loss_mask.bool()


def blocks_of(L: int, block_size: int | None) -> list[range]:
    """Return the positions of each block; the last may be short. Without a block size the sequence is one block."""
    step = L if block_size is None else block_size
    return [range(start, min(start + step, L)) for start in range(0, L, max(step, 1))]


def _level_of_blocks(
    level: torch.Tensor | None,
    given: torch.Tensor | None,
    blocks: int,
    input_ids: torch.Tensor,
    eps: float,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Return the level of each block ``[B, blocks]``: the given level unchanged, or ``eps + (1 - eps) U``."""
    B = input_ids.shape[0]
    if level is not None:
        return level.float().reshape(B, -1).expand(B, blocks)
    draws = _given_or_drawn(given, (B, blocks), input_ids, generator).float().reshape(B, blocks)
    return eps + (1.0 - eps) * draws


def _exactly(p: torch.Tensor, uniform: torch.Tensor, supervised: torch.Tensor) -> torch.Tensor:
    """Select the ``round(p n)`` of n supervised positions with the largest u; at least one if p > 0 and n > 0."""
    chosen = torch.zeros_like(supervised)
    for b in range(len(p)):
        n = int(supervised[b].sum())
        k = number_to_mask(p[b], n, at_least=int(p[b] > 0))
        places = torch.nonzero(supervised[b]).flatten()
        ranking = torch.sort(uniform[b, places], descending=True, stable=True).indices
        chosen[b, places[ranking[:k]]] = True
    return chosen


def _members(row: list[int]) -> list[list[int]]:
    """Return the positions of each segment of a row, in the order in which the segments begin."""
    places: dict[int, list[int]] = {}
    for i, segment in enumerate(row):
        if segment >= 0:
            places.setdefault(segment, []).append(i)
    return list(places.values())


def corrupt_uniform(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    mask_token_id: int,
    eps: float = 1e-3,
    *,
    level: torch.Tensor | None = None,
    exact: bool = False,
    block_size: int | None = None,
    segment_ids: torch.Tensor | None = None,
    t_uniform: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Corrupted:
    """Mask each supervised position independently, with one probability per sequence, block or segment.

    ``p = (1 - eps) * t + eps``; a supervised position i is masked if ``u_{b,i} < p``. With ``exact``, the
    ``round(p n)`` of the n supervised positions with the largest u are masked instead.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, nonzero is True; None: all.
        mask_token_id: id of the MASK token.
        eps: smallest probability.
        level: p to use instead of the formula, ``[B]`` or ``[B, 1]``; with blocks or segments also as ``t_uniform``.
        exact: True to mask a fixed number of positions.
        block_size: positions per block; None: the full sequence is one block.
        segment_ids: ``[B, L]``, integer; equal for the positions of one segment, negative: never masked, p is 1.
        t_uniform: ``[B]`` in [0, 1), ``[B, n_blocks]`` with blocks, ``[B, L]`` with segments, one column per segment in
            the order in which they begin; None: drawn.
        uniform: u, ``[B, L]`` in [0, 1); None: drawn.
        generator: source of random numbers; None: torch's default generator.

    Returns:
        ``Corrupted(noisy_input_ids, noise_mask, p_mask)``; ``p_mask`` holds p.

    Source: Nie et al. 2025 (LLaDA), arXiv:2502.09992, section 2.2, the forward process of Eq. 3; Arriola et al. 2025
    (BD3-LM), arXiv:2503.09573, for blocks.
    """
    B, L = input_ids.shape
    parts = [[list(block) for block in blocks_of(L, block_size)]] * B
    if segment_ids is not None:
        parts = [_members(row) for row in segment_ids.tolist()]
    count = len(parts[0]) if segment_ids is None else L
    p = _level_of_blocks(level, t_uniform, count, input_ids, eps, generator)
    u = _given_or_drawn(uniform, (B, L), input_ids, generator)
    p_mask = torch.ones(B, L, dtype=torch.float32, device=input_ids.device)
    supervised = torch.zeros_like(input_ids, dtype=torch.bool)
    for b, of_row in enumerate(parts):
        for n, places in enumerate(of_row):
            p_mask[b, places] = p[b, n]
            supervised[b, places] = _supervised(input_ids, loss_mask)[b, places]
    noise_mask = _exactly(p[:, 0], u, supervised) if exact else (u < p_mask) & supervised
    return Corrupted(torch.where(noise_mask, mask_token_id, input_ids), noise_mask, p_mask)


def number_to_mask(m: torch.Tensor, length: int, at_least: int) -> int:
    """``round(m * length)``, half to even, clamped to ``[at_least, length]``."""
    return max(at_least, min(int(torch.round(m * length)), length))


def corrupt_blockwise(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    mask_token_id: int,
    block_size: int | None = None,
    eps: float = 1e-3,
    half_life_ratio: float = 0.25,
    *,
    level: torch.Tensor | None = None,
    m_uniform: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Corrupted:
    """Mask a fixed fraction of every sequence or block; if the fraction is small, later positions are more likely.

    ``m = eps + (1 - eps) * U``, ``k = round(m * length)``, ``log w_i = ln 2 / (half_life_ratio * size) * (1 - m) * i``;
    k positions are chosen by :func:`reference.gumbel_topk.gumbel_topk` among ALL positions of the sequence or block.
    Unsupervised positions are removed afterwards. ``size`` is L or ``block_size``, ``length`` the number of positions,
    and i the index in the sequence or block. k is clamped to ``[1, L]`` for a sequence and to ``[0, length]`` for a
    block.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, nonzero is True; None: all.
        mask_token_id: id of the MASK token.
        block_size: positions per block; None: the full sequence is one block.
        eps: minimum of m.
        half_life_ratio: distance over which a weight doubles in the limit m = 0, as a fraction of ``size``.
        level: m to use instead of the formula, ``[B]``, ``[B, 1]`` or ``[B, n_blocks]``.
        m_uniform: U, ``[B]``, or ``[B, n_blocks]`` with blocks, in [0, 1); None: drawn.
        uniform: ``[B, L]``, strictly inside (0, 1); None: drawn.
        generator: source of random numbers; None: torch's default generator.

    Returns:
        ``Corrupted(noisy_input_ids, noise_mask, p_mask)``; ``p_mask`` holds m.

    Source: the position bias w_i(m) = exp(lambda (1 - m) i) of Nemotron-Labs-Diffusion training; the
    selection of arXiv:1903.06059.
    """
    B, L = input_ids.shape
    blocks = blocks_of(L, block_size)
    m = _level_of_blocks(level, m_uniform, len(blocks), input_ids, eps, generator)
    u = _given_or_drawn(uniform, (B, L), input_ids, generator)
    rate = math.log(2.0) / (half_life_ratio * (L if block_size is None else block_size))
    chosen = torch.zeros_like(input_ids, dtype=torch.bool)
    p_mask = torch.empty(B, L, dtype=torch.float32, device=input_ids.device)
    for b in range(B):
        for n, block in enumerate(blocks):
            at = slice(block.start, block.stop)
            places = torch.arange(len(block), dtype=torch.float32, device=input_ids.device)
            k = number_to_mask(m[b, n], len(block), at_least=1 if block_size is None else 0)
            chosen[b, at] = gumbel_topk(rate * (1.0 - m[b, n]) * places, k, u[b, at])
            p_mask[b, at] = m[b, n]
    noise_mask = chosen & _supervised(input_ids, loss_mask)
    return Corrupted(torch.where(noise_mask, mask_token_id, input_ids), noise_mask, p_mask)


def corrupt_uniform_random(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    vocab_size: int,
    block_size: int | None = None,
    eps: float = 1e-3,
    *,
    level: torch.Tensor | None = None,
    t_uniform: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Corrupted:
    """Replace supervised positions by random tokens, with one probability per sequence or block.

    ``t = eps + (1 - eps) * U``. If ``u < t``, a supervised position becomes a token drawn uniformly from
    ``[0, vocab_size)``.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, nonzero is True; None: all.
        vocab_size: number of tokens to draw from.
        block_size: positions per block; None: the full sequence is one block.
        eps: smallest probability.
        level: t to use instead of the formula, ``[B]``, ``[B, 1]`` or ``[B, n_blocks]``; ``p_mask`` then holds it.
        t_uniform: U, ``[B]``, or ``[B, n_blocks]`` with blocks, in [0, 1); None: drawn.
        uniform: u, ``[B, L]`` in [0, 1); None: drawn.
        tokens: the replacements ``[B, L]``; None: drawn.
        generator: source of random numbers; None: torch's default generator.

    Returns:
        ``Corrupted(noisy_input_ids, noise_mask, p_mask)``; ``p_mask`` is all ones unless ``level`` is given, because
        the loss has no weight 1/t.

    Source: Austin et al. 2021 (D3PM), arXiv:2107.03006, section 3.1, the uniform transition.
    """
    B, L = input_ids.shape
    blocks = blocks_of(L, block_size)
    t = _level_of_blocks(level, t_uniform, len(blocks), input_ids, eps, generator)
    u = _given_or_drawn(uniform, (B, L), input_ids, generator)
    if tokens is None:
        tokens = torch.randint(vocab_size, (B, L), device=input_ids.device, generator=generator)
    t_of_position = torch.empty(B, L, dtype=torch.float32, device=input_ids.device)
    for n, block in enumerate(blocks):
        t_of_position[:, block.start : block.stop] = t[:, n : n + 1]
    noise_mask = (u < t_of_position) & _supervised(input_ids, loss_mask)
    noisy = torch.where(noise_mask, tokens.to(input_ids.dtype), input_ids)
    p_mask = torch.ones_like(t_of_position) if level is None else t_of_position
    return Corrupted(noisy, noise_mask, p_mask)


def corrupt_all_masked(input_ids: torch.Tensor, loss_mask: torch.Tensor | None, mask_token_id: int) -> Corrupted:
    """Mask every supervised position.

    ``noise = supervised``, ``p = 1``

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, nonzero is True; None: all.
        mask_token_id: id of the MASK token.

    Returns:
        ``Corrupted(noisy_input_ids, noise_mask, p_mask)``; ``p_mask`` is all ones.

    Source: the all-masked training of I-DLM, arXiv:2604.11035.
    """
    noise_mask = _supervised(input_ids, loss_mask).clone()
    noisy = torch.where(noise_mask, mask_token_id, input_ids)
    return Corrupted(noisy, noise_mask, torch.ones_like(input_ids, dtype=torch.float32))


def corrupt_mix(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    mask_token_id: int,
    vocab_size: int,
    *,
    mask_prob: torch.Tensor,
    uniform_prob: torch.Tensor,
    uniform: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask with one probability and replace by a different token with another probability, with one u per position.

    A position becomes MASK if ``u < mask_prob``. It becomes another token if
    ``mask_prob <= u < mask_prob + uniform_prob``, unless the clean token is MASK.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, nonzero is True.
        mask_token_id: id of the MASK token.
        vocab_size: number of tokens, including MASK.
        mask_prob: probability of MASK, ``[B]`` or ``[B, 1]``.
        uniform_prob: probability of another token, ``[B]`` or ``[B, 1]``.
        uniform: u, ``[B, L]`` in [0, 1); None: drawn.
        tokens: ``[B, L]``, index of the replacement among the ``vocab_size - 2`` other tokens in ascending order; None:
            drawn.
        generator: source of random numbers; None: torch's default generator.

    Returns:
        ``(noisy_input_ids, noise_mask)``.

    Source: the absorbing and the uniform transition of Austin et al. 2021 (D3PM), arXiv:2107.03006, section 3.1.
    """
    B, L = input_ids.shape
    u = _given_or_drawn(uniform, (B, L), input_ids, generator)
    if tokens is None:
        tokens = torch.randint(vocab_size - 2, (B, L), device=input_ids.device, generator=generator)
    noisy, noise_mask = input_ids.clone(), torch.zeros_like(input_ids, dtype=torch.bool)
    for b in range(B):
        p = mask_prob.float().reshape(B)[b]
        both = p + uniform_prob.float().reshape(B)[b]
        for i in range(L):
            clean = int(input_ids[b, i])
            if not loss_mask[b, i]:
                continue
            if u[b, i] < p:
                noisy[b, i], noise_mask[b, i] = mask_token_id, True
            elif u[b, i] < both and clean != mask_token_id:
                every = torch.arange(vocab_size)
                others = every[(every != clean) & (every != mask_token_id)]
                noisy[b, i], noise_mask[b, i] = others[tokens[b, i]], True
    return noisy, noise_mask


def complementary(noise_mask: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Select the supervised positions that are not masked.

    ``supervised and not noise``

    Args:
        noise_mask: masked positions ``[B, L]``, nonzero is True.
        loss_mask: supervised positions ``[B, L]``, nonzero is True.

    Returns:
        bool ``[B, L]``.

    Source: the coupled sampling of DiffuCoder, arXiv:2506.20639, section 4.2.
    """
    return loss_mask.bool() & ~noise_mask.bool()


def sample_level(
    B: int,
    method: str = "uniform",
    low: float = 0.0,
    high: float = 1.0,
    *,
    uniform: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Sample levels: independent, in pairs with sum 1, or one per interval of length 1 / B.

    ``u_b``; ``u_b, 1 - u_b``; ``(u_0 + b / B) mod 1``, scaled to [low, high].

    Args:
        B: number of levels.
        method: "uniform", "antithetic" or "stratified".
        low: lower bound.
        high: upper bound.
        uniform: ``[B]`` in [0, 1); None: drawn.
        generator: source of random numbers; None: torch's default generator.

    Returns:
        float64 ``[B]``.

    Source: the low-discrepancy sampler of Kingma et al. 2021, arXiv:2107.00630, appendix I.1.
    """
    u = (torch.rand(B, generator=generator) if uniform is None else uniform).double()
    if method == "antithetic":
        u = torch.stack([u[b] if b % 2 == 0 else 1 - u[b - 1] for b in range(B)])
    if method == "stratified":
        u = (u[0] + torch.arange(B, dtype=torch.float64) / B) % 1
    return low + (high - low) * u
