"""Self-correcting discrete diffusion: schedule, and likelihood bound in discrete time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from reference.token_nll import Count, compute_dtype, divided_by_count

TINY = torch.finfo(torch.float32).tiny


class SCDDSchedule(NamedTuple):
    """Marginal of a token at a given time: the probability that it is unchanged, another token, or MASK.

    ``gamma = clean_mass + uniform_mass`` and ``rho = clean_mass / gamma``.
    """

    clean_mass: torch.Tensor
    uniform_mass: torch.Tensor
    absorbed_mass: torch.Tensor
    gamma: torch.Tensor
    rho: torch.Tensor


def scdd_schedule(t: torch.Tensor, max_ratio: float, gamma_shape: float, t_peak: float) -> SCDDSchedule:
    """Compute the marginal of the forward process at time ``t``.

    With ``a = gamma_shape * t_peak``, ``b = gamma_shape * (1 - t_peak)`` and
    ``c(t) = max_ratio / (1 - max_ratio) * t^a (1 - t)^b / (t_peak^a (1 - t_peak)^b)``: the clean mass is
    ``(1 - t) / (1 + c)``, the uniform mass ``c / (1 + c)``, and the absorbed mass is the remainder.

    Args:
        t: times ``[...]`` in [0, 1], floating.
        max_ratio: maximum of ``c / (1 + c)``, in [0, 1).
        gamma_shape: inverse width of the peak.
        t_peak: time of the peak, in (0, 1).

    Returns:
        :class:`SCDDSchedule` of tensors ``[...]``.

    Source: Self-Correcting Discrete Diffusion, openreview.net/forum?id=zQKlzKB6I9.
    """
    t = t.to(compute_dtype(t)).clamp(0, 1)
    a, b = gamma_shape * t_peak, gamma_shape * (1 - t_peak)
    c = max_ratio / (1 - max_ratio) * t**a * (1 - t) ** b / (t_peak**a * (1 - t_peak) ** b)
    clean, uniform = (1 - t) / (1 + c), c / (1 + c)
    gamma = clean + uniform
    return SCDDSchedule(clean, uniform, 1 - clean - uniform, gamma, clean / gamma.clamp(min=TINY))


def scdd_loss(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    p_mask: torch.Tensor,
    loss_mask: torch.Tensor,
    noisy_input_ids: torch.Tensor,
    mask_token_id: int,
    num_diffusion_tokens: Count | None = None,
    num_timesteps: int = 1000,
    max_ratio: float = 0.1,
    gamma_shape: float = 1.0,
    t_peak: float = 0.5,
    reduction: str = "total",
    shift: bool = False,
) -> torch.Tensor:
    """Compute the negative bound on the likelihood in T steps, a sum over supervised tokens divided by their number.

    p is the softmax without the column of MASK, ``K = V - 1``, ``s = max(t - 1 / T, 0)``, ``base_x = (1 - rho_x) / K``,
    ``term_v = log(base_s + rho_s p_v)``, ``S`` its sum over all v except MASK, z the noisy token, x the clean token.

    z = MASK: ``-(gamma_s - gamma_t) / (1 - gamma_t) * (base_s S + rho_s term_x)``. Else, with
    ``D = log(base_t + rho_t p_z)``, ``u = (rho_s - rho_t) / rho_s / K``, ``r = rho_t / rho_s`` and ``e = [z = x]``:
    ``-(base_s u (S - K D) + rho_s u (term_x - D) + base_s r (term_z - D) + rho_s r e (term_x - D))``, divided by
    ``base_t + rho_t e``.

    Denominators and arguments of logarithms are clamped at the smallest normal float32. Only supervised positions with
    a clean token other than -100 have a loss.

    Args:
        logits: ``[B, L, V]``, floating.
        target_ids: clean tokens ``[B, L]``, integer.
        p_mask: ``[B, L]``; column 0 is the time t of each sequence.
        loss_mask: supervised positions ``[B, L]``; nonzero is True.
        noisy_input_ids: noisy tokens, the input of the model, ``[B, L]``, integer.
        mask_token_id: the id of MASK.
        num_diffusion_tokens: optional global count, a number or a 0-d tensor; None: the supervised tokens of this call.
        num_timesteps: T.
        max_ratio: as in :func:`scdd_schedule`.
        gamma_shape: as in :func:`scdd_schedule`.
        t_peak: as in :func:`scdd_schedule`.
        reduction: ``"total"``, or ``"none"`` to return the contribution of each row to the sum, before any denominator.
        shift: row i predicts token i + 1, so token 0 has no loss and is not counted, and the last row predicts nothing.

    Returns:
        A scalar, or ``[B, L]``, in float32 (float64 for float64 logits), in nats.

    Source: Self-Correcting Discrete Diffusion, openreview.net/forum?id=zQKlzKB6I9.
    """
    dtype, K = compute_dtype(logits), logits.shape[-1] - 1
    # In float64 for any logits dtype, because the steps of the schedule are differences of close numbers.
    t = p_mask[:, :1].double()
    s = (t - 1 / num_timesteps).clamp(min=0)
    at_t, at_s = (scdd_schedule(x, max_ratio, gamma_shape, t_peak) for x in (t, s))
    base_t, base_s, rho_t, rho_s = ((1 - at_t.rho) / K, (1 - at_s.rho) / K, at_t.rho, at_s.rho)
    release = (at_s.gamma - at_t.gamma) / (1 - at_t.gamma).clamp(min=TINY)
    u, r = (rho_s - rho_t) / rho_s.clamp(min=TINY) / K, rho_t / rho_s.clamp(min=TINY)
    base_t, base_s, rho_t, rho_s, release, u, r = (x.to(dtype) for x in (base_t, base_s, rho_t, rho_s, release, u, r))

    if shift:  # after the time, which is in column 0
        logits, target_ids = logits[:, :-1], target_ids[:, 1:]
        noisy_input_ids, loss_mask = noisy_input_ids[:, 1:], loss_mask[:, 1:]
    supervised = loss_mask.bool()
    active, is_mask = supervised & (target_ids.long() != -100), noisy_input_ids == mask_token_id
    x = torch.where(active, target_ids.long(), 0)
    z = torch.where(active, noisy_input_ids.long(), 0)
    rows = torch.where(active[..., None], logits.to(dtype), 0.0)
    p = torch.softmax(rows.index_fill(-1, torch.tensor(mask_token_id, device=rows.device), -torch.inf), dim=-1)

    def log(y: torch.Tensor) -> torch.Tensor:
        return y.clamp(min=TINY).log()

    term = log(base_s[..., None] + rho_s[..., None] * p)
    others = torch.arange(K + 1, device=logits.device) != mask_token_id
    S = term[..., others].sum(-1)
    term_x, term_z, p_z = (y.gather(-1, at[..., None]).squeeze(-1) for y, at in ((term, x), (term, z), (p, z)))
    D, e = log(base_t + rho_t * p_z), (x == z).to(dtype)
    absorbed = -release * (base_s * S + rho_s * term_x)
    q = (base_t + rho_t * e).clamp(min=TINY)  # divide each coefficient by q, because 0 / q has gradient 0
    corrected = base_s * u / q * (S - K * D) + rho_s * u / q * (term_x - D)
    corrected = -corrected - base_s * r / q * (term_z - D) - rho_s * r * e / q * (term_x - D)
    costs = torch.where(active, torch.where(is_mask, absorbed, corrected), 0.0) * num_timesteps
    if reduction == "none":
        return torch.nn.functional.pad(costs, (0, int(shift)))
    return divided_by_count(costs.sum(), supervised.sum() if num_diffusion_tokens is None else num_diffusion_tokens)
