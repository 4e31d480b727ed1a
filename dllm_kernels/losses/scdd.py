"""SCDD: masked diffusion with additional random-token noise, which the model learns to correct."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._checks._target_range import first_true
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import plain, readable_without_sync
from dllm_kernels.losses._base import Batch, DiffusionLoss
from dllm_kernels.losses._common import DLLMLossOutput, divide, next_tokens, shift_left, single_loss, weighted_rows
from dllm_kernels.losses._model_output import ModelOutput
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import IGNORE

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class SCDDSchedule:
    """Marginal distribution of a token at time t, computed by :func:`scdd_schedule`.

    Attributes:
        clean_mass: probability that the token is still the clean one.
        uniform_mass: probability that the token was drawn uniformly from all tokens but MASK.
        absorbed_mass: probability that the token is MASK.
        gamma: probability that the token is not MASK, ``clean_mass + uniform_mass``.
        rho: probability that the token is the clean one given that it is not MASK, ``clean_mass / gamma``.
    """

    clean_mass: Tensor
    uniform_mass: Tensor
    absorbed_mass: Tensor
    gamma: Tensor
    rho: Tensor


def scdd_schedule(t: Tensor, *, max_ratio: float, gamma_shape: float, t_peak: float) -> SCDDSchedule:
    r"""Compute the marginal distribution of a noisy token at time t.

    ``corrupt_mix`` draws from it; its ``mask_prob`` is the absorbed mass.

    .. math::
        \text{clean} = \frac{1 - t}{1 + c}, \quad \text{uniform} = \frac{c}{1 + c}, \quad
        \text{absorbed} = \frac{t}{1 + c}, \qquad
        c(t) = \frac{r}{1 - r} \cdot \frac{t^a (1 - t)^b}{t_{peak}^a (1 - t_{peak})^b}

    with :math:`a = \gamma \, t_{peak}`, :math:`b = \gamma (1 - t_{peak})` and r the ``max_ratio``: the uniform mass is
    largest at ``t_peak``, where it is r. One in K uniform draws returns the clean token.

    Source: Self-Correcting Discrete Diffusion, openreview.net/forum?id=zQKlzKB6I9.

    Args:
        t: times ``[...]``, floating, clamped to [0, 1].
        max_ratio: the uniform mass at the peak, in [0, 1); 0 is plain masked diffusion.
        gamma_shape: inverse width of the peak: a larger value gives a narrower peak. If it is negative, ``t_peak`` is
            the minimum of c, and t = 0 and t = 1 give NaN.
        t_peak: time of the peak, in (0, 1).

    Returns:
        :class:`SCDDSchedule` of tensors ``[...]``, float32 (float64 for float64 times), differentiable in t.

    Raises:
        TypeError: ``t`` is not a tensor, or a setting is not a number.
        ValueError: ``t`` is not floating, or a setting is out of range.
    """
    _checks.check_float("t", t)
    return _schedule(plain(t).to(accum_dtype(t.dtype)), *checked_schedule(max_ratio, gamma_shape, t_peak))


def _schedule(t: Tensor, max_ratio: float, gamma_shape: float, t_peak: float) -> SCDDSchedule:
    """Compute :func:`scdd_schedule` of validated arguments."""
    t = t.clamp(0, 1)
    a, b = gamma_shape * t_peak, gamma_shape * (1 - t_peak)
    scale = _peak_scale(max_ratio, gamma_shape, t_peak, t.dtype)
    c = scale * t**a * (1 - t) ** b
    clean, uniform = (1 - t) / (1 + c), c / (1 + c)
    gamma = clean + uniform
    return SCDDSchedule(clean, uniform, t / (1 + c), gamma, clean / gamma.clamp(min=TINY))


def _peak_scale(max_ratio: float, gamma_shape: float, t_peak: float, dtype: torch.dtype) -> float:
    """Return the factor of ``t^a (1 - t)^b`` in c(t); raise ValueError if the dtype of the times cannot hold it."""
    try:
        peak = t_peak ** (gamma_shape * t_peak) * (1 - t_peak) ** (gamma_shape * (1 - t_peak))
        scale: float = max_ratio / (1 - max_ratio) / peak
    except (OverflowError, ZeroDivisionError):
        peak = scale = math.inf
    most = torch.finfo(dtype).max
    if scale > most or peak > most:
        raise ValueError(
            f"gamma_shape must be nearer to 0 at t_peak={t_peak}, because c(t) leaves the range of {dtype}, got "
            f"{gamma_shape}"
        )
    return scale


def checked_schedule(max_ratio: Any, gamma_shape: Any, t_peak: Any) -> tuple[float, float, float]:
    """Convert the settings of a schedule to floats; raise unless they are numbers in their ranges."""
    _checks.check_number("max_ratio", max_ratio)
    _checks.check_finite("gamma_shape", gamma_shape)
    _checks.check_number("t_peak", t_peak)
    if not 0 <= max_ratio < 1:
        raise ValueError(f"max_ratio must lie in [0, 1), got {max_ratio}")
    if not 0 < t_peak < 1:
        raise ValueError(f"t_peak must lie in (0, 1), got {t_peak}")
    return float(max_ratio), float(gamma_shape), float(t_peak)  # NumPy would compute in the dtype of a narrow number


class SCDDLoss(DiffusionLoss):
    r"""Bound of self-correcting discrete diffusion: the model fills in masked tokens and corrects wrong tokens.

    p is the softmax without the column of MASK, z the noisy token, x the clean token, t the time of the sequence,
    :math:`s = \max(t - 1/T, 0)`, :math:`K = V - 1`, :math:`\beta = (1 - \rho)/K` and
    :math:`\ell_v = \log(\beta_s + \rho_s p_v)`. A supervised position costs T times

    .. math::
        z = \text{MASK}: \quad -\frac{\gamma_s - \gamma_t}{1 - \gamma_t} \Big(\beta_s \sum_v \ell_v + \rho_s \ell_x\Big)

    .. math::
        \text{else:} \quad -\frac{\beta_s u \sum_v (\ell_v - D) + \rho_s u (\ell_x - D)
                            + (\beta_s + \rho_s [z = x]) \, r \, (\ell_z - D)}{\beta_t + \rho_t [z = x]}

    with :math:`D = \log(\beta_t + \rho_t p_z)`, :math:`u = (\rho_s - \rho_t) / (\rho_s K)`,
    :math:`r = \rho_t / \rho_s`, and the schedule of :func:`scdd_schedule`. The sum over positions is divided by
    ``num_diffusion_tokens``, or if None by the number of supervised positions of this call. Rows that are not
    supervised are not read.

    The loss is one call of ``row_stats`` (log p at x and at z, and the sum over the vocabulary) and arithmetic on a few
    values per position. The only new ``[B, L, V]`` tensor is the gradient. ``max_ratio=0`` is
    :class:`MDLMCrossEntropyLoss` with ``skip_id=mask_token_id`` and the weight 1/t, at the same cost. The
    ``weight_sum`` of its output is T per supervised position for any noise.

    Source: Self-Correcting Discrete Diffusion, openreview.net/forum?id=zQKlzKB6I9.

    Args:
        mask_token_id: id of the MASK token.
        num_timesteps: T, at least 2.
        max_ratio, gamma_shape, t_peak: settings of :func:`scdd_schedule`.
        chunk_size: rows per chunk of logits in :meth:`forward_fused`, unless overridden there; None: chosen from the
            sizes. Not used from logits.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        reduction: "total", or "none" to also return the loss of each row. Then ``row_losses`` is T times the term of
            each position, and ``row_weights`` is T.
        backend: "auto", "triton" or "torch".
        shift: True for a model whose row i predicts token i + 1 (Dream, DiffuCoder, Fast-dLLM v2). Targets, masks and
            weights are shifted, never the logits. Token 0 is not predicted. Row i of ``row_losses`` and ``row_weights``
            holds token i + 1, and the last row is 0. If the denominator is counted, it does not include token 0. The
            time of a sequence is read in column 0 of ``p_mask`` in either case.

    Raises:
        TypeError: an argument that should be an int or a number is not.
        ValueError: an argument is out of range. Every call checks the settings again.
    """

    def __init__(
        self, mask_token_id: int, num_timesteps: int = 1000, max_ratio: float = 0.1, gamma_shape: float = 1.0,
        t_peak: float = 0.5, chunk_size: int | None = None, *, softcap: float | None = None, scale: float | None = None,
        reduction: str = "total", backend: str = "auto", shift: bool = False,
    ) -> None:  # fmt: skip
        """Initialize; the arguments are documented on the class."""
        super().__init__(softcap=softcap, scale=scale, reduction=reduction, backend=backend, shift=shift)
        self.mask_token_id = mask_token_id
        self.num_timesteps = num_timesteps
        self.max_ratio = max_ratio
        self.gamma_shape = gamma_shape
        self.t_peak = t_peak
        self.chunk_size = _checks.checked_size("chunk_size", chunk_size)
        self._checked_schedule()

    def _loss(self, rows: ModelOutput, batch: Batch, causal: ModelOutput | None) -> DLLMLossOutput:
        schedule = self._checked_schedule()
        rows = rows.checked(batch.target_ids)
        _checks.check_column("mask_token_id", self.mask_token_id, rows.vocabulary)
        rows = rows.transformed(skip_id=self.mask_token_id)
        batch.check_unused(causal=causal, noise_mask=batch.noise_mask)
        z = _checked_noisy(batch)
        _check_times(batch)
        supervised, count = batch.supervised, batch.num_diffusion_tokens
        x = batch.target_ids.long()
        active = supervised & (x != IGNORE)
        _checks.check_target_range(None, "target_ids", x, rows.vocabulary, counted=active)
        _checks.check_target_range(None, "noisy_input_ids", z, rows.vocabulary, None, counted=active)
        z = z.clamp(min=-1)  # -100 would mark a missing id
        # The time of an unsupervised sequence is arbitrary, so replace it.
        t = torch.where(supervised.any(1, keepdim=True), batch.p_mask[:, :1].detach(), 0.5)
        if batch.shift:
            x, z = next_tokens(x), shift_left(z, IGNORE)
            supervised, active = shift_left(supervised), shift_left(active)
        steps = self.num_timesteps * supervised.to(rows.accum_dtype)  # row weight for either noise
        if self.max_ratio == 0:  # weighted sum of NLLs: gamma is 1 - t, so T steps release T (t - s) / t
            masked = active & (z == self.mask_token_id)
            weights = torch.where(masked, t.to(rows.accum_dtype).clamp(min=1 / self.num_timesteps).reciprocal(), 0.0)
            out = self._single_part_output(rows, self._predictable(x), weights, divide(weights, count, supervised))
            return replaced(out, weight_sum=steps.sum(), row_weights=None if out.row_losses is None else steps)
        step = _Step.between(self.num_timesteps, schedule, t, rows)
        per_row, times = self._returns_rows(), self.num_timesteps * active.to(rows.accum_dtype)
        costs, divided = self._costs(rows, step, x, z, active, per_row), divide(times, count, supervised)
        return single_loss((costs * divided).sum(), steps, costs * times if per_row else None)

    def _predictable(self, ids: Tensor) -> Tensor:
        """Replace MASK by -100: its probability is 0 without a gradient, so as a clean token it adds a constant."""
        return ids.masked_fill(ids == self.mask_token_id, IGNORE)

    def _costs(self, rows: ModelOutput, step: _Step, x: Tensor, z: Tensor, active: Tensor, per_row: bool) -> Tensor:
        """Compute the cost per active position of one step ``[B, L]``."""
        mask, K = self.mask_token_id, rows.vocabulary - 1
        base_s, ids = step.base_s.clamp(min=TINY), self._predictable(torch.stack([x, z], -1))
        mix = base_s.expand(x.shape), step.rho_s.expand(x.shape)
        out = rows.stats(ids, active, mix=mix)
        assert out.mix is not None
        log_probs, mix_of_p, undefined = out.log_probs, out.mix, None
        if per_row:  # what follows would make NaN of an upstream gradient of 0 in these rows
            undefined = (log_probs.sum(-1) + mix_of_p).isnan()
            log_probs = log_probs.masked_fill(undefined.unsqueeze(-1), 0.0)
            mix_of_p = mix_of_p.masked_fill(undefined, 0.0)
        log_x, log_z = log_probs.unbind(-1)
        log_x = log_x.masked_fill(x == mask, -math.inf)
        log_rho_s, log_rho_t = (rho.clamp(min=TINY).log() for rho in (step.rho_s, step.rho_t))
        at_x, at_z = (torch.logaddexp(base_s.log(), log_rho_s + log_p) for log_p in (log_x, log_z))
        D = torch.logaddexp(step.base_t.clamp(min=TINY).log(), log_rho_t + log_z)
        same = (z == x).to(D.dtype)
        seen = (step.base_t + step.rho_t * same).clamp(min=TINY)
        coefficients = step.base_s * step.u, step.rho_s * step.u, (step.base_s + step.rho_s * same) * step.r
        drawn, clean, stayed = (number / seen for number in coefficients)  # 0 for impossible tokens, with gradient 0
        filled = step.released * (step.base_s * mix_of_p + step.rho_s * at_x)
        corrected = drawn * (mix_of_p - K * D) + clean * (at_x - D) + stayed * _change(step, K, log_z.exp(), at_z - D)
        costs = -torch.where(z == mask, filled, corrected)
        if undefined is None:
            return costs
        return torch.where(undefined, weighted_rows(out.mix, torch.full_like(out.mix, math.nan)), costs)

    def _checked_schedule(self) -> tuple[float, float, float]:
        """Validate the settings, on every call because attributes may have been reassigned; return the schedule's."""
        _checks.checked_int("mask_token_id", self.mask_token_id, 0)
        _checks.checked_int("num_timesteps", self.num_timesteps, 2)
        return checked_schedule(self.max_ratio, self.gamma_shape, self.t_peak)


def _change(step: _Step, K: int, p: Tensor, difference: Tensor) -> Tensor:
    """Compute ``difference``, log(base_s + rho_s p) - log(base_t + rho_t p), without cancellation if it is small.

    One step changes the logarithm by about 1 / T, so their difference has T times the relative rounding error.
    """
    share = step.fell * (p - 1 / K) / (step.base_t + step.rho_t * p).clamp(min=TINY)
    small = share.abs() < 0.5
    return torch.where(small, torch.log1p(torch.where(small, share, 0.0)), difference)


class _Step(NamedTuple):
    """Coefficients of a step from t down to s, ``[B, 1]``, named as in :class:`SCDDLoss`.

    ``released``: fraction of the masked tokens that the step unmasks; ``fell``: rho_s - rho_t.
    """

    base_s: Tensor
    base_t: Tensor
    rho_s: Tensor
    rho_t: Tensor
    fell: Tensor
    released: Tensor
    u: Tensor
    r: Tensor

    @classmethod
    def between(cls, num_timesteps: int, schedule: tuple[float, float, float], t: Tensor, rows: ModelOutput) -> _Step:
        """Compute the coefficients, one per sequence, in float64, because they are differences of close values."""
        t, K = t.detach().double().clamp(0, 1), rows.vocabulary - 1
        s = t - 1 / num_timesteps  # the schedule clamps to 0
        both = _schedule(torch.stack([s, t]), *schedule)  # one call, because each operation is a launch on a GPU
        (rho_s, rho_t), (base_s, base_t) = both.rho, (1 - both.rho) / K
        (gamma_s, gamma_t), absorbed = both.gamma, both.absorbed_mass[1]
        positive, fell = rho_s.clamp(min=TINY), rho_s - rho_t
        step = cls(
            base_s, base_t, rho_s, rho_t, fell,
            released=(gamma_s - gamma_t) / absorbed.clamp(min=TINY),
            u=fell / positive / K,
            r=rho_t / positive,
        )  # fmt: skip
        return cls(*torch.stack(step).to(rows.accum_dtype))


def _checked_noisy(batch: Batch) -> Tensor:
    """Check the noisy tokens and return them as int64."""
    z: Any = batch.noisy_input_ids
    if z is None:
        raise ValueError("noisy_input_ids must be given, got None; pass the tokens that the model received")
    _checks.check_like("target_ids", batch.target_ids, _checks.INT_DTYPES, noisy_input_ids=z)
    return z.long()  # type: ignore[no-any-return]


def _check_times(batch: Batch) -> None:
    """Check the masks, and on CPU that each supervised sequence has one time in [0, 1]; on GPU that would sync."""
    batch.check_unused_noise()
    batch.check_noise()
    p_mask, supervised = batch.p_mask, batch.supervised
    if not readable_without_sync(p_mask):
        return
    batch.check_range(supervised.any(1, keepdim=True))
    if (where := first_true(supervised & (p_mask != p_mask[:, :1]))) is not None:
        time = p_mask[where[0], 0].item()
        raise ValueError(
            f"p_mask must hold one time for each sequence, got {time} at position {(where[0], 0)} and "
            f"{p_mask[where].item()} at position {where}; are noise_mask and p_mask swapped?"
        )
