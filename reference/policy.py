"""Noisy views of completions, their scores, and policy-gradient objectives, as functions of given random numbers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch


class PolicyViews(NamedTuple):
    """Noisy tokens, scored tokens and float64 weights, each ``[K, B, L]``."""

    noisy: torch.Tensor
    scored: torch.Tensor
    weights: torch.Tensor


class View(NamedTuple):
    """One view of one row: masked positions, scored positions, and the weight of each scored position."""

    masked: list[int]
    scored: list[int]
    weight: float


def policy_views(
    ids: torch.Tensor,
    loss_mask: torch.Tensor,
    mask_token_id: int,
    scheme: str,
    *,
    num: int = 1,
    levels: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
    prompt_prob: float = 0.0,
    step_map: torch.Tensor | None = None,
) -> PolicyViews:
    """Build the views, row by row, from given levels and uniform numbers.

    Args:
        ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised tokens ``[B, L]``, nonzero is True.
        mask_token_id: id of the MASK token.
        scheme: "full", "coupled", "elbo", "count", "quadrature" or "trace".
        num: draws per row; for "trace" the number of groups of steps, where 1 means that each step is a group.
        levels: ``[num, B]`` in (0, 1), for "coupled", "elbo" and "count".
        uniform: ``[num, B, L]`` in (0, 1), for schemes that draw masks.
        prompt_prob: for "full", the probability of masking each unsupervised token.
        step_map: ``[B, L]``, for "trace", the step at which each token was decoded.

    Returns:
        :class:`PolicyViews`.

    Source: d1 (diffu-GRPO), arXiv:2504.12216; DiffuCoder (coupled-GRPO), arXiv:2506.20639; LLaDA 1.5 (VRPO),
    arXiv:2505.19223; ESPO, arXiv:2512.03759; GDPO, arXiv:2510.08554; TraceRL, arXiv:2509.06949.
    """
    B, L = ids.shape
    last = max(int(step_map.max()), 0) if scheme == "trace" and step_map is not None else 0
    rows = []
    for b in range(B):
        supervised = [i for i in range(L) if loss_mask[b, i] != 0]
        if scheme == "trace":
            assert step_map is not None
            rows.append(_trace(step_map[b].tolist(), supervised, num, last))
            continue
        views: list[View] = []
        for k in range(num):
            u = [] if uniform is None else uniform[k, b].tolist()
            t = 0.0 if levels is None else float(levels[k, b])
            views += _drawn(scheme, supervised, L, t, u, k, num, prompt_prob)
        rows.append(views)
    K = len(rows[0])
    noisy = ids.repeat(K, 1, 1)
    scored = torch.zeros(K, B, L, dtype=torch.bool)
    weights = torch.zeros(K, B, L, dtype=torch.float64)
    for b, views in enumerate(rows):
        for k, view in enumerate(views):
            noisy[k, b, view.masked] = mask_token_id
            scored[k, b, view.scored] = True
            weights[k, b, view.scored] = view.weight
    return PolicyViews(noisy, scored, weights)


def _drawn(
    scheme: str, supervised: list[int], L: int, t: float, u: list[float], k: int, num: int, prompt_prob: float
) -> list[View]:
    """Build the views of draw k of one row."""
    n = len(supervised)
    if scheme == "full":
        others = [i for i in range(L) if i not in supervised and prompt_prob > 0 and u[i] < prompt_prob]
        return [View(supervised + others, supervised, 1 / num)]
    if scheme == "count":
        x = min(int(t * (n + 1)), n)
        inside = sorted(supervised, key=lambda i: u[i], reverse=True)[:x]
        weights = [(n + 1) / (2 * size * num) if size else 0.0 for size in (x, n - x)]
    elif scheme == "quadrature":
        nodes, factors = gauss_legendre(num)
        t = float(nodes[k])
        inside, weights = [i for i in supervised if u[i] < t], [float(factors[k]) / t]
    else:
        inside = [i for i in supervised if u[i] < t]
        weights = [1 / (2 * t * num), 1 / (2 * (1 - t) * num)] if scheme == "coupled" else [1 / (num * t)]
    outside = [i for i in supervised if i not in inside]
    views = [View(part, part, w) for part, w in zip((inside, outside), weights, strict=False)]
    return [View(supervised, supervised, 1 / (2 * num)), *views] if scheme == "coupled" else views


def _trace(steps: list[int], supervised: list[int], num: int, last: int) -> list[View]:
    """Build the views of one row: one per step up to the last step of the batch, or one per group of steps."""
    T = max(max(steps) + 1, 1)
    group = [s if s < 0 or num == 1 else num * s // T for s in steps]
    views = []
    for k in range(last + 1 if num == 1 else num):
        later = [i for i, g in enumerate(group) if g >= k]
        views.append(View(later, [i for i in later if group[i] == k and i in supervised], 1.0))
    return views


def stratified_levels(u: torch.Tensor, num: int) -> torch.Tensor:
    """Compute ``(u + k / num) mod 1`` of each row, ``[num, B]``; u is ``[B]`` in (0, 1).

    Source: the low-discrepancy sampler of Kingma et al. 2021, arXiv:2107.00630, appendix I.1.
    """
    return (u.double() + torch.arange(num, dtype=torch.float64)[:, None] / num) % 1


def gauss_legendre(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute nodes in (0, 1) and weights with sum 1, float64 ``[num]``, from the eigenvectors of the Jacobi matrix.

    Source: Golub and Welsch 1969, "Calculation of Gauss Quadrature Rules".
    """
    j = torch.arange(1, num, dtype=torch.float64)
    beside = j / torch.sqrt(4 * j * j - 1)
    nodes, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return (nodes + 1) / 2, vectors[0] ** 2


def token_scores(log_probs: torch.Tensor, views: PolicyViews) -> torch.Tensor:
    """Compute ``sum_k w_ki log p_ki`` over the views k that score token i, ``[B, L]``.

    Source: the definition.
    """
    return torch.where(views.scored, log_probs, 0).mul(views.weights.to(log_probs.dtype)).sum(0)


def sequence_scores(
    log_probs: torch.Tensor, views: PolicyViews, loss_mask: torch.Tensor, *, mean: bool = False
) -> torch.Tensor:
    """Sum the token scores of each row ``[B]``, or divide the sum by the number of supervised tokens.

    Source: the definition.
    """
    total = token_scores(log_probs, views).sum(1)
    return total / (loss_mask != 0).sum(1).clamp(min=1) if mean else total


def eubo(log_probs: torch.Tensor, scored: torch.Tensor, levels: torch.Tensor, beta: float = 1.5) -> torch.Tensor:
    """Compute ``(1 / beta) mean_i log mean_k (p_ki^beta [i scored in k] / t_k)`` over tokens i scored in any view.

    Args:
        log_probs: ``[K, B, L]``.
        scored: bool ``[K, B, L]``.
        levels: t_k, ``[K, B]``.
        beta: order of the bound.

    Returns:
        ``[B]``; 0 for rows without scored tokens.

    Source: SPG, arXiv:2510.09541, the evidence upper bound.
    """
    K, B, L = log_probs.shape
    rows = []
    for b in range(B):
        terms = []
        for i in range(L):
            views = [k for k in range(K) if scored[k, b, i]]
            if views:
                inner = [torch.exp(beta * log_probs[k, b, i]) / levels[k, b].to(log_probs.dtype) for k in views]
                terms.append(torch.log(torch.stack(inner).sum() / K))
        rows.append(torch.stack(terms).mean() / beta if terms else log_probs.new_zeros(()))
    return torch.stack(rows)


def policy_objective(
    scores: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    ref: torch.Tensor | None = None,
    *,
    kind: str = "clip",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = None,
    kl: str | None = None,
    kl_coef: float = 0.0,
) -> torch.Tensor:
    """Compute the loss of each score, elementwise.

    The clipped ratio is an exponential of a clamped logarithm. It cannot overflow, and its gradient is 0 where it is
    clipped: -min(r A, clip(r) A) is -A min(r, 1 + clip_high) for A > 0, and -A max(r, 1 - clip_low) for A < 0.

    Source: PPO, arXiv:1707.06347, eq. 7; dual clip, arXiv:1912.09729; CISPO, arXiv:2506.13585; k1, k2 and k3: J.
    Schulman, "Approximating KL Divergence", 2020.
    """
    bound = math.inf if log_ratio_clamp is None else log_ratio_clamp
    log_ratio = (scores - old).clamp(-bound, bound)
    most = math.log1p(clip_high)
    if kind == "clip":
        least = math.log1p(-clip_low) if clip_low < 1 else -math.inf
        of_negative = log_ratio.clamp(least, math.inf if dual_clip is None else math.log(dual_clip))
        # With an advantage of 0, any finite ratio gives 0.
        loss = -advantages * torch.exp(torch.where(advantages < 0, of_negative, log_ratio.clamp(max=most)))
    else:
        weight = 1 if kind == "reinforce" else torch.exp(log_ratio.clamp(max=most)).detach()
        loss = -advantages * weight * torch.where(advantages * weight == 0, 0, scores)
    if kl is None or ref is None or kl_coef == 0:
        return loss
    away = ref - scores
    penalty = {"k1": -away, "k2": away**2 / 2, "k3": torch.exp(away) - away - 1}[kl]
    return loss + kl_coef * penalty


def policy_loss(
    logits: torch.Tensor,
    ids: torch.Tensor,
    views: PolicyViews,
    loss_mask: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    ref: torch.Tensor | None = None,
    *,
    level: str = "token",
    normalize: str = "tokens",
    num_tokens: int | None = None,
    shift: bool = False,
    **objective: Any,
) -> torch.Tensor:
    """Compute the loss of a batch from the objective of each token or sequence, one at a time.

    Args:
        logits: ``[K, B, L, V]``, floating.
        ids: clean tokens ``[B, L]``.
        views: noisy views of ``ids``.
        loss_mask: supervised tokens ``[B, L]``.
        old: scores of the sampling policy, ``[B, L]`` for "token", ``[B]`` for "sequence".
        advantages: ``[B]`` or ``[B, L]``.
        ref: scores of the reference policy, with the shape of ``old``.
        level: "token" or "sequence".
        normalize: "tokens", "sequences" or "none".
        num_tokens: denominator of "tokens"; None: the number of supervised tokens.
        shift: row i predicts token i + 1, so token 0 is neither scored nor counted, and the last row predicts nothing.
        objective: settings of :func:`policy_objective`.

    Returns:
        0-d, float32 (float64 for float64 logits).

    Source: GRPO, arXiv:2402.03300, eq. 3 (mean over sequences of the mean over tokens); DAPO, arXiv:2503.14476, eq. 8
    (mean over tokens); GSPO, arXiv:2507.18071, eq. 7 (sequence scores over their lengths).
    """
    if shift:
        logits, ids, loss_mask = logits[:, :, :-1], ids[:, 1:], loss_mask[:, 1:]
        views = PolicyViews(*(t[..., 1:] for t in views))
        old, advantages = (t if t.dim() == 1 else t[:, 1:] for t in (old, advantages))
        ref = ref if ref is None or ref.dim() == 1 else ref[:, 1:]
    log_p = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    log_p = log_p.gather(-1, ids.expand(views.scored.shape)[..., None])[..., 0]
    scores = token_scores(log_p, views) if level == "token" else sequence_scores(log_p, views, loss_mask, mean=True)
    counts = (loss_mask != 0).sum(1).tolist()
    total = scores.new_zeros(())
    for b, n in enumerate(counts):
        places: list[tuple[int, ...]] = [(b, i) for i in range(ids.shape[1]) if views.scored[:, b, i].any()]
        if level == "sequence":
            places = [(b,)] if n else []
        for place in places:
            A = advantages[place if advantages.dim() == len(place) else b]
            away = None if ref is None else ref[place].to(scores.dtype)
            before = old[place].to(scores.dtype)
            value = policy_objective(scores[place], before, A.to(scores.dtype), away, **objective)
            if normalize == "sequences":
                value = value / (n * len(counts) if level == "token" else len(counts))
            elif normalize == "tokens":
                value = (
                    value * (1 if level == "token" else n) / max(sum(counts) if num_tokens is None else num_tokens, 1)
                )
            total = total + value
    return total
