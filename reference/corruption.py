"""Corruption of clean tokens, as functions of the uniform numbers that decide it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from reference.gumbel_topk import draw_uniform, gumbel_topk


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
    """Positions of each block, the last possibly short; without a block size the sequence is one block."""
    step = L if block_size is None else block_size
    return [range(start, min(start + step, L)) for start in range(0, L, max(step, 1))]


def corrupt_uniform(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    mask_token_id: int,
    eps: float = 1e-3,
    *,
    t_uniform: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Corrupted:
    """Mask each supervised position independently, with one probability for each sequence.

    ``p_b = (1 - eps) * t_b + eps``; position i is masked where ``u_{b,i} < p_b`` and it is supervised.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, nonzero is True; None for all.
        mask_token_id: the token that masks.
        eps: smallest probability.
        t_uniform: ``[B]`` in [0, 1); None draws it.
        uniform: ``[B, L]`` in [0, 1); None draws it.
        generator: source of the draws; None for torch's own.

    Returns:
        ``Corrupted(noisy_input_ids, noise_mask, p_mask)``; ``p_mask`` holds ``p_b``.

    Source: Nie et al. 2025 (LLaDA), arXiv:2502.09992, section 2.2, the forward process of Eq. 3.
    """
    B, L = input_ids.shape
    t = _given_or_drawn(t_uniform, (B,), input_ids, generator)
    u = _given_or_drawn(uniform, (B, L), input_ids, generator)
    p_mask = ((1.0 - eps) * t.float() + eps)[:, None].repeat(1, L)
    noise_mask = (u < p_mask) & _supervised(input_ids, loss_mask)
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
    m_uniform: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Corrupted:
    """Mask an exact share of every sequence (or block), later positions first when the share is small.

    ``m = eps + (1 - eps) * U``, ``k = round(m * length)``, ``log w_i = ln 2 / (half_life_ratio * size) * (1 -
    m) * i``; k positions are chosen by :func:`reference.gumbel_topk.gumbel_topk` among ALL of the sequence or
    block, and only then are the unsupervised ones dropped. ``size`` is L or ``block_size``, ``length`` the
    positions that are there, i the place in the sequence or block. k lies in ``[1, L]`` for a sequence, in
    ``[0, length]`` for a block.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, nonzero is True; None for all.
        mask_token_id: the token that masks.
        block_size: positions of a block; None for whole sequences.
        eps: smallest share.
        half_life_ratio: distance over which a weight doubles as m goes to 0, as a share of ``size``.
        m_uniform: ``[B]``, or ``[B, n_blocks]`` with blocks, in [0, 1); None draws it.
        uniform: ``[B, L]``, strictly inside (0, 1); None draws it.
        generator: source of the draws; None for torch's own.

    Returns:
        ``Corrupted(noisy_input_ids, noise_mask, p_mask)``; ``p_mask`` holds m.

    Source: the position bias w_i(m) = exp(lambda (1 - m) i) of Nemotron-Labs-Diffusion training; the
    selection of arXiv:1903.06059.
    """
    B, L = input_ids.shape
    blocks = blocks_of(L, block_size)
    draws = _given_or_drawn(m_uniform, (B, len(blocks)), input_ids, generator).float().reshape(B, len(blocks))
    u = _given_or_drawn(uniform, (B, L), input_ids, generator)
    m = eps + (1.0 - eps) * draws
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
    t_uniform: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Corrupted:
    """Replace supervised positions by random tokens, with one probability for each sequence or block.

    ``t = eps + (1 - eps) * U``; a supervised position becomes a token uniform over ``[0, vocab_size)`` where
    ``u < t``.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, nonzero is True; None for all.
        vocab_size: how many tokens there are to draw from.
        block_size: positions of a block; None for whole sequences.
        eps: smallest probability.
        t_uniform: ``[B]``, or ``[B, n_blocks]`` with blocks, in [0, 1); None draws it.
        uniform: ``[B, L]`` in [0, 1); None draws it.
        tokens: the replacements ``[B, L]``; None draws them.
        generator: source of the draws; None for torch's own.

    Returns:
        ``Corrupted(noisy_input_ids, noise_mask, p_mask)``; ``p_mask`` is all ones, for the loss is flat.

    Source: Austin et al. 2021 (D3PM), arXiv:2107.03006, section 3.1, the uniform transition.
    """
    B, L = input_ids.shape
    blocks = blocks_of(L, block_size)
    draws = _given_or_drawn(t_uniform, (B, len(blocks)), input_ids, generator).float().reshape(B, len(blocks))
    u = _given_or_drawn(uniform, (B, L), input_ids, generator)
    if tokens is None:
        tokens = torch.randint(vocab_size, (B, L), device=input_ids.device, generator=generator)
    t = eps + (1.0 - eps) * draws
    t_of_position = torch.empty(B, L, dtype=torch.float32, device=input_ids.device)
    for n, block in enumerate(blocks):
        t_of_position[:, block.start : block.stop] = t[:, n : n + 1]
    noise_mask = (u < t_of_position) & _supervised(input_ids, loss_mask)
    noisy = torch.where(noise_mask, tokens.to(input_ids.dtype), input_ids)
    return Corrupted(noisy, noise_mask, torch.ones(B, L, dtype=torch.float32, device=input_ids.device))


def corrupt_all_masked(input_ids: torch.Tensor, loss_mask: torch.Tensor | None, mask_token_id: int) -> Corrupted:
    """Mask every supervised position.

    ``noise = supervised``, ``p = 1``

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, nonzero is True; None for all.
        mask_token_id: the token that masks.

    Returns:
        ``Corrupted(noisy_input_ids, noise_mask, p_mask)``; ``p_mask`` is all ones.

    Source: the all-masked training of I-DLM, arXiv:2604.11035.
    """
    noise_mask = _supervised(input_ids, loss_mask).clone()
    noisy = torch.where(noise_mask, mask_token_id, input_ids)
    return Corrupted(noisy, noise_mask, torch.ones_like(input_ids, dtype=torch.float32))
