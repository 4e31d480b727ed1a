"""SCDD: masked diffusion whose noise holds wrong tokens too, which the model learns to correct."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch

from dllm_kernels.ops import _checks
from dllm_kernels.ops._plain import plain

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class SCDDSchedule:
    """What has become of a token at a time t: :func:`scdd_schedule`.

    Attributes:
        clean_mass: probability that it is still itself.
        uniform_mass: that it was drawn anew among all tokens but MASK.
        absorbed_mass: that it is MASK.
        gamma: that it is not MASK, ``clean_mass + uniform_mass``.
        rho: that it is still itself if it is not MASK, ``clean_mass / gamma``.
    """

    clean_mass: torch.Tensor
    uniform_mass: torch.Tensor
    absorbed_mass: torch.Tensor
    gamma: torch.Tensor
    rho: torch.Tensor


def scdd_schedule(t: torch.Tensor, *, max_ratio: float, gamma_shape: float, t_peak: float) -> SCDDSchedule:
    r"""The marginal of the noise at time t, as ``corrupt_mix`` draws it (``mask_prob`` the absorbed mass).

    .. math::
        \text{clean} = \frac{1 - t}{1 + c}, \quad \text{uniform} = \frac{c}{1 + c}, \quad \text{absorbed} = \frac{t}{1 + c},
        \qquad c(t) = \frac{r}{1 - r} \cdot \frac{t^a (1 - t)^b}{t_{peak}^a (1 - t_{peak})^b}

    with :math:`a = \gamma \, t_{peak}`, :math:`b = \gamma (1 - t_{peak})` and r the ``max_ratio``: the uniform mass is largest
    at ``t_peak``, where it is r. Of the uniform draws one in K gives back the clean token.

    Source: Self-Correcting Discrete Diffusion, openreview.net/forum?id=zQKlzKB6I9.

    Args:
        t: times ``[...]``, floating; taken to be 0 or 1 beyond.
        max_ratio: the uniform mass at the peak, in [0, 1); 0 is plain masked diffusion.
        gamma_shape: how narrow the peak is, >= 0.
        t_peak: where it is, in (0, 1).

    Returns:
        :class:`SCDDSchedule` of tensors ``[...]``, float32 (float64 for float64 times).

    Raises:
        TypeError: ``t`` is not a tensor, or a setting is no number.
        ValueError: ``t`` is not floating, or a setting out of range.
    """
    _checks.check_float("t", t)
    check_schedule(max_ratio, gamma_shape, t_peak)
    t = plain(t).detach().to(torch.promote_types(t.dtype, torch.float32)).clamp(0, 1)
    a, b = gamma_shape * t_peak, gamma_shape * (1 - t_peak)
    scale = max_ratio / (1 - max_ratio) / (t_peak**a * (1 - t_peak) ** b)
    c = scale * t**a * (1 - t) ** b
    clean, uniform = (1 - t) / (1 + c), c / (1 + c)
    gamma = clean + uniform
    return SCDDSchedule(clean, uniform, t / (1 + c), gamma, clean / gamma.clamp(min=TINY))


def check_schedule(max_ratio: Any, gamma_shape: Any, t_peak: Any) -> None:
    """Raise unless the settings of a schedule are numbers in their ranges."""
    settings = {"max_ratio": max_ratio, "gamma_shape": gamma_shape, "t_peak": t_peak}
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not 0 <= max_ratio < 1:
        raise ValueError(f"max_ratio must lie in [0, 1), got {max_ratio}")
    if not (gamma_shape >= 0 and math.isfinite(gamma_shape)):
        raise ValueError(f"gamma_shape must be finite and at least 0, got {gamma_shape}")
    if not 0 < t_peak < 1:
        raise ValueError(f"t_peak must lie in (0, 1), got {t_peak}")
