"""Generation with a masked diffusion language model, one row at a time, from logits of all tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection

import torch

from reference.linear_sample import truncated


def num_transfer_tokens(masked: int, steps: int) -> list[int]:
    """Split the masked tokens of a block over its steps, the remainder over the first steps.

    Source: ``get_num_transfer_tokens`` of LLaDA's sampler.
    """
    base, remainder = divmod(masked, steps)
    return [base + (step < remainder) for step in range(steps)]


def steps_of_blocks(length: int, block_size: int, steps: int) -> list[int]:
    """Split steps over blocks in proportion to their tokens; steps beyond one per token belong to the first block."""
    shared = min(steps, length)
    ends = [min(start + block_size, length) for start in range(0, length, block_size)] or [0]
    upto = [0, *(shared * end // max(length, 1) for end in ends)]
    own = [b - a for a, b in itertools.pairwise(upto)]
    return [own[0] + steps - shared, *own[1:]]


def diffusion_generate(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    prompt: torch.Tensor,
    *,
    mask_token_id: int,
    max_new_tokens: int,
    steps: int | None = None,
    block_size: int | None = None,
    remasking: str = "confidence",
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    position_temperature: float = 0.0,
    threshold: float | None = None,
    cfg_scale: float = 0.0,
    suppress_ids: Collection[int] = (),
    delay_eos: bool = False,
    infill: bool = False,
    eos_token_ids: Collection[int] = (),
    pad_token_id: int = 0,
    uniform: Callable[[int, int], torch.Tensor] | None = None,
    place_uniform: Callable[[int, int], torch.Tensor] | None = None,
    order: torch.Tensor | None = None,
) -> tuple[list[int], list[float], list[int]]:
    """Decode blocks of MASK tokens from left to right; each step keeps some of its predictions.

    A block is a range of columns of the row: its new tokens and, for the first block with ``infill``, all tokens before
    them. Each step of a block with M masked tokens and s steps left decodes the ``ceil(M / s)`` tokens of the largest
    score, of equal ones the first.

    Args:
        logits_of: maps ids ``[L]`` to logits ``[L, V]``; row i predicts token i.
        prompt: ids ``[P]``.
        mask_token_id: the MASK token, never predicted.
        max_new_tokens: number of MASK tokens behind the prompt.
        steps: number of steps, see :func:`steps_of_blocks`; None: one per token.
        block_size: tokens per block; None: all.
        remasking: score of a token. "confidence": its probability; "margin": the difference of the two largest
            probabilities; "entropy": minus the entropy; all at temperature 1 without truncation. "random": ``order``.
        temperature: T; a sample is ``argmax_v z_v / T - ln(-ln u_v)`` over the truncated columns, at T = 0 the argmax.
        top_k: as in :func:`truncated`.
        top_p: as in :func:`truncated`.
        min_p: as in :func:`truncated`.
        position_temperature: t > 0: the positions are drawn without replacement from softmax(score / t), as those with
            the largest ``score / t - ln(-ln u)``.
        threshold: a step also decodes every token whose score is at least the threshold.
        cfg_scale: w; the logits are ``z_u + (1 + w) (z - z_u)``, z_u with MASK in place of the prompt.
        suppress_ids: tokens that are never predicted.
        delay_eos: predictions of an EOS have the smallest score, below all others and any threshold.
        infill: MASK tokens of the prompt are decoded with the first block.
        eos_token_ids: new tokens that end the row; no block follows the block of the first one.
        pad_token_id: token behind the first EOS.
        uniform: maps a step and the number W of columns of a block to uniforms ``[W, V]``; not called at T = 0.
        place_uniform: maps a step and W to uniforms ``[W]`` for ``position_temperature``.
        order: for random remasking, a number per new token, with ``infill`` per token of the row.

    Returns:
        Tokens, the log-probability of each one in the distribution that it was drawn from, and its step (0 and -1 for
        tokens that were not decoded): of the new tokens, with ``infill`` of the whole row. Behind the first EOS
        ``pad_token_id``, 0 and -1.

    Source: Nie et al. 2025, arXiv 2502.09992, algorithms 4 and 5; LLaDA's ``generate`` (guidance, suppressed and
    delayed EOS). Ye et al. 2025, arXiv 2508.15487: Dream's ``sample_tokens`` (margin, entropy) and ``alg_temp``. Wu et
    al. 2025, arXiv 2505.22618, algorithm 1: Fast-dLLM's ``get_transfer_index`` (threshold).
    """
    P, N, size = len(prompt), max_new_tokens, block_size or max(max_new_tokens, 1)
    x = torch.cat([prompt, torch.full((N,), mask_token_id)])
    given = torch.cat([prompt != mask_token_id, torch.zeros(N, dtype=torch.bool)])
    L, first_new = P + N, 0 if infill else P
    log_probs, step_map, step = [0.0] * L, [-1] * L, 0
    starts = list(range(0, N, size)) or [0]
    for b, own in enumerate(steps_of_blocks(N, size, L if steps is None else steps)):
        columns = range(0 if infill and b == 0 else P + starts[b], P + min(starts[b] + size, N))
        for left in range(own, 0, -1):
            masked = [i for i in columns if x[i] == mask_token_id]
            if not masked:
                break
            logits = logits_of(x).double()
            if cfg_scale:
                unconditional = logits_of(x.masked_fill(given, mask_token_id)).double()
                logits = unconditional + (1 + cfg_scale) * (logits - unconditional)
            logits[:, [mask_token_id, *suppress_ids]] = -torch.inf
            tokens, scores, drawn_with = {}, {}, {}
            for i in masked:
                z, at = logits[i], i - columns.start
                kept = truncated(z if temperature == 0 else z / temperature, top_k, top_p, min_p)
                noise: float | torch.Tensor = 0.0
                if temperature != 0 and uniform is not None:
                    noise = torch.log(-torch.log(uniform(step, len(columns))[at]))
                tokens[i] = int((kept - noise).argmax())
                drawn_with[i] = float(kept.log_softmax(-1)[tokens[i]])
                p, log_p = z.softmax(-1), z.log_softmax(-1)
                if remasking == "random" and order is not None:
                    scores[i] = float(order[i - first_new])
                elif remasking == "margin":
                    scores[i] = float(p.topk(2).values.diff().neg())
                elif remasking == "entropy":
                    scores[i] = float(torch.where(p == 0, 0.0, p * log_p).sum())
                else:
                    scores[i] = float(p[tokens[i]])
            late = [i for i in masked if delay_eos and tokens[i] in eos_token_ids]
            ranks = dict(scores)
            if position_temperature and place_uniform is not None:
                u = place_uniform(step, len(columns)).tolist()
                for i in masked:
                    ranks[i] = scores[i] / position_temperature - math.log(-math.log(u[i - columns.start]))
            ranks.update(dict.fromkeys(late, -math.inf))
            decoded = set(sorted(masked, key=lambda i: -ranks[i])[: -(-len(masked) // left)])
            if threshold is not None:
                decoded |= {i for i in masked if i not in late and scores[i] >= threshold}
            for i in decoded:
                x[i], log_probs[i], step_map[i] = tokens[i], drawn_with[i], step
            step += 1
        if any(int(token) in eos_token_ids for token in x[P + starts[b] : P + min(starts[b] + size, N)]):
            break
    ids = x.tolist()
    end = next((i + 1 for i in range(P, L) if ids[i] in eos_token_ids), L)
    rest = L - end
    results = ids[:end] + [pad_token_id] * rest, log_probs[:end] + [0.0] * rest, step_map[:end] + [-1] * rest
    return results[0][first_new:], results[1][first_new:], results[2][first_new:]
