"""Samplers: block-wise denoising with low-confidence remasking, next-token sampling, speculative blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dllm_kernels import diffusion_generate, linear_sample

Hidden = Callable[[torch.Tensor], torch.Tensor]
Logits = Callable[[torch.Tensor], torch.Tensor]


def denoise(
    model: torch.nn.Module,
    prompt: torch.Tensor,
    new_tokens: int,
    mask_id: int,
    *,
    block_size: int,
    steps: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Continue a prompt with a masked diffusion model, block after block, with low-confidence remasking.

    Args:
        model: maps ids ``[1, L]`` to logits ``[1, L, V]``; its head never computes them.
        prompt: ids ``[P]``.
        new_tokens: number of tokens to add, a multiple of ``block_size``.
        mask_id: the mask token, which is never predicted.
        block_size: number of positions in a block.
        steps: steps per block.
        temperature: sampling temperature; 0 takes the most likely token.
        generator: random number generator of the draw.

    Returns:
        The ids after each step; in the first entry, all new tokens are masked.
    """
    made = diffusion_generate(
        model,
        prompt[None],
        mask_token_id=mask_id,
        max_new_tokens=new_tokens,
        steps=steps * (new_tokens // block_size),
        block_size=block_size,
        temperature=temperature,
        generator=generator,
    )
    (ids,), (decoded,) = made.ids, made.step_map
    return [ids.masked_fill(decoded >= step, mask_id).tolist() for step in range(int(decoded.max()) + 2)]


@torch.no_grad()
def next_token(
    hidden_of: Hidden,
    head: torch.Tensor,
    prompt: torch.Tensor,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Continue a prompt one token at a time; ``hidden_of`` maps ids ``[1, L]`` to the input of the head."""
    ids = prompt
    for _ in range(new_tokens):
        last = hidden_of(ids[None])[0, -1:]
        ids = torch.cat([ids, linear_sample(last, head, temperature=temperature, generator=generator).ids])
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
