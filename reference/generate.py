"""Generation with a masked diffusion language model, one row at a time, from logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from reference.linear_sample import truncated


def num_transfer_tokens(masked: int, steps: int) -> list[int]:
    """Split the masked tokens of a block over its steps, the remainder over the first steps.

    Source: ``get_num_transfer_tokens`` of LLaDA's sampler.
    """
    base, remainder = divmod(masked, steps)
    return [base + (step < remainder) for step in range(steps)]


def diffusion_generate(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    prompt: torch.Tensor,
    *,
    mask_token_id: int,
    max_new_tokens: int,
    steps: int,
    block_size: int | None = None,
    remasking: str = "confidence",
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    eos_token_ids: Collection[int] = (),
    pad_token_id: int = 0,
    uniform: Callable[[int, int], torch.Tensor] | None = None,
    order: torch.Tensor | None = None,
) -> tuple[list[int], list[float], list[int]]:
    """Decode blocks of MASK tokens from left to right; each step keeps some of its predictions.

    Args:
        logits_of: maps ids ``[L]`` to logits ``[L, V]``; row i predicts token i.
        prompt: ids ``[P]``.
        mask_token_id: the MASK token, never predicted.
        max_new_tokens: number of MASK tokens behind the prompt.
        steps: number of steps; block b of n has ``floor(steps (b + 1) / n) - floor(steps b / n)``, at most its tokens.
        block_size: tokens per block; None: all.
        remasking: "confidence" keeps the tokens with the largest probability at temperature 1, of equal ones the first;
            "random" those with the largest ``order``.
        temperature: T; a sample is ``argmax_v z_v / T - ln(-ln u_v)`` over the truncated columns, at T = 0 the argmax.
        top_k: as in :func:`truncated`.
        top_p: as in :func:`truncated`.
        min_p: as in :func:`truncated`.
        eos_token_ids: tokens that end the row; no block follows the block of the first one.
        pad_token_id: token behind the first EOS.
        uniform: maps a step and the number W of tokens of a block to uniforms ``[W, V]``; not called at T = 0.
        order: for random remasking, a number per new token.

    Returns:
        New tokens, the log-probability of each one in the distribution that it was drawn from, and its step. Behind the
        first EOS ``pad_token_id``, 0 and -1.

    Source: Nie et al. 2025, arXiv 2502.09992, algorithms 4 and 5; LLaDA's ``generate``.
    """
    P, N, size = len(prompt), max_new_tokens, block_size or max_new_tokens
    x = torch.cat([prompt, torch.full((N,), mask_token_id)])
    log_probs, step_map, step = [0.0] * N, [-1] * N, 0
    starts = list(range(0, N, size))
    for b, start in enumerate(starts):
        block = range(start, min(start + size, N))
        own = steps * (b + 1) // len(starts) - steps * b // len(starts)
        for count in num_transfer_tokens(len(block), min(own, len(block))):
            logits = logits_of(x).double()
            logits[:, mask_token_id] = -torch.inf
            found = {}
            for i in block:
                if x[P + i] != mask_token_id:
                    continue
                z = logits[P + i]
                kept = truncated(z if temperature == 0 else z / temperature, top_k, top_p, min_p)
                noise: float | torch.Tensor = 0.0
                if temperature != 0 and uniform is not None:
                    noise = torch.log(-torch.log(uniform(step, len(block))[i - start]))
                token = int((kept - noise).argmax())
                confidence = z.log_softmax(-1)[token] if remasking == "confidence" or order is None else order[i]
                found[i] = float(confidence), token, float(kept.log_softmax(-1)[token])
            for i in sorted(found, key=lambda i: -found[i][0])[:count]:
                _, x[P + i], log_probs[i] = found[i]
                step_map[i] = step
            step += 1
        if any(int(token) in eos_token_ids for token in x[P + start : P + block.stop]):
            break
    tokens = x[P:].tolist()
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos_token_ids), N)
    rest = N - end
    return tokens[:end] + [pad_token_id] * rest, log_probs[:end] + [0.0] * rest, step_map[:end] + [-1] * rest
