"""Samplers: block-wise denoising with low-confidence remasking, next-token sampling, speculative blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

Logits = Callable[[torch.Tensor], torch.Tensor]


def _drawn(logits: torch.Tensor, temperature: float, generator: torch.Generator | None) -> torch.Tensor:
    """Return the most likely token, or a token drawn at the temperature (Gumbel-max)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    noise = torch.empty_like(logits).exponential_(generator=generator).log()
    return (logits / temperature - noise).argmax(dim=-1)


@torch.no_grad()
def denoise(
    logits_of: Logits,
    prompt: torch.Tensor,
    new_tokens: int,
    mask_id: int,
    *,
    block_size: int,
    steps: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Continue a prompt with a masked diffusion model, block after block.

    Every step predicts all masked positions of the current block, keeps the predictions with the highest
    probability and remasks the others. A block is complete after ``steps`` steps.

    Args:
        logits_of: ids ``[1, L]`` -> logits ``[1, L, V]``.
        prompt: ids ``[P]``.
        new_tokens: number of tokens to add, a multiple of ``block_size``.
        mask_id: the mask token, which is never predicted.
        block_size: number of positions in a block.
        steps: steps per block.
        temperature: sampling temperature; 0 takes the most likely token.
        generator: random number generator of the draw.

    Returns:
        The ids after each step; in the first entry, all new tokens are masked.

    Source: Nie et al. 2025 (LLaDA), arXiv:2502.09992, algorithm 5, semi-autoregressive over blocks.
    """
    ids = torch.cat([prompt, prompt.new_full((new_tokens,), mask_id)])
    trace = [ids.tolist()]
    for start in range(len(prompt), len(ids), block_size):
        block = torch.arange(start, start + block_size, device=ids.device)
        for left in range(steps, 0, -1):
            masked = block[ids[block] == mask_id]
            if not len(masked):
                break
            logits = logits_of(ids[None])[0, masked].float()
            logits[:, mask_id] = -torch.inf
            tokens = _drawn(logits, temperature, generator)
            confidence = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            kept = confidence.topk(-(-len(masked) // left)).indices
            ids[masked[kept]] = tokens[kept]
            trace.append(ids.tolist())
    return trace


@torch.no_grad()
def next_token(
    logits_of: Logits,
    prompt: torch.Tensor,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Continue a prompt one token at a time; ``logits_of`` maps ids ``[1, L]`` to logits ``[1, L, V]``."""
    ids = prompt
    for _ in range(new_tokens):
        ids = torch.cat([ids, _drawn(logits_of(ids[None])[0, -1:].float(), temperature, generator)])
    return ids.tolist()


@torch.no_grad()
def speculate(
    target_of: Logits,
    draft_of: Callable[[torch.Tensor], torch.Tensor],
    prompt: torch.Tensor,
    new_tokens: int,
) -> tuple[list[int], list[int]]:
    """Continue a prompt greedily; the target checks a whole drafted block at once.

    The draft proposes the tokens after the last known token. The target accepts proposed tokens up to the first
    mismatch with its own greedy prediction, and adds one token. The result equals the greedy text of the target.

    Args:
        target_of: maps ids ``[1, L]`` to the target's logits ``[1, L, V]``.
        draft_of: maps ids ``[1, L]``, of which the last is the anchor, to the proposed ids ``[block_size - 1]``.
        prompt: ids ``[P]``.
        new_tokens: minimum number of tokens to add.

    Returns:
        The ids, and the number of tokens that each check of the target added.
    """
    ids, gained = prompt, []
    while len(ids) < len(prompt) + new_tokens:
        proposed = draft_of(ids[None])
        said = target_of(torch.cat([ids, proposed])[None])[0, len(ids) - 1 :].argmax(dim=-1)
        agreed = int((said[:-1] == proposed).long().cumprod(0).sum())
        ids = torch.cat([ids, said[: agreed + 1]])
        gained.append(agreed + 1)
    return ids.tolist(), gained
