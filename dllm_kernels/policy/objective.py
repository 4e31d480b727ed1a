r"""Policy-gradient objectives, and NLL weights with the gradient of an objective.

    loss = -min(r A, clip(r) A) + kl_coef KL,      r = exp(s - s_old),

with the score s of a token or a sequence, and its advantage A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph._own_graph import own_graph
from dllm_kernels.ops import RowStats
from dllm_kernels.rows._dtypes import accum_dtype

KINDS = ("clip", "cispo", "reinforce")
KL_KINDS = ("k1", "k2", "k3")


@dataclass(frozen=True)
class PolicyObjective:
    r"""Policy-gradient loss of each score, elementwise; a valid ``fn`` of :func:`linear_row_objective`.

    With scores s, advantages A and :math:`r = e^{s - s_\text{old}}`:

    ========= =========================================================================================================
    kind      loss of each
    ========= =========================================================================================================
    clip      ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``; with ``dual_clip`` c at most ``-c A`` if A < 0
    cispo     ``-sg(min(r, 1 + clip_high)) A s``, sg: without a gradient
    reinforce ``-A s``
    ========= =========================================================================================================

    plus ``kl_coef`` times an estimate of the KL divergence from reference scores:

    == =============================================
    k1 ``s - ref``
    k2 ``(s - ref)^2 / 2``
    k3 ``exp(ref - s) - (ref - s) - 1``
    == =============================================

    A clipped loss has the gradient 0 at any distance of s from the old score, also if the ratio overflows. If A is 0,
    the policy term and its gradient are 0. With ``kl_coef=0`` the penalty is not computed.

    Two losses have no upper bound and may overflow: "clip" with A < 0 and without ``dual_clip``, if ``|A| r`` exceeds
    float32, and k3, if ``ref - s`` is above about 88. Loss and gradient of this score are then infinite, or NaN if both
    overflow with opposite signs. Other scores keep their gradients. ``dual_clip`` or ``log_ratio_clamp`` bounds the
    ratio; k1 and k2 do not overflow.

    Examples:
        >>> objective = PolicyObjective(clip_low=0.2, clip_high=0.28)
        >>> scores, old = torch.tensor([0.5, 0.1]), torch.zeros(2)
        >>> # the first ratio, 1.65, is clipped
        >>> objective(scores, old, advantages=torch.ones(2))
        tensor([-1.2800, -1.1052])

    Args:
        kind: "clip", "cispo" or "reinforce".
        clip_low: lower clip range of "clip", in [0, 1].
        clip_high: upper clip range of "clip" and "cispo", at least 0.
        dual_clip: c > 1 bounds the loss of "clip" by ``-c A`` for negative advantages; None: no bound.
        log_ratio_clamp: c > 0 clamps ``s - old`` to [-c, c] before the exponential; None: not clamped.
        kl: "k1", "k2" or "k3"; None: no penalty.
        kl_coef: factor of the penalty, at least 0.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: ``kind`` or ``kl`` is unknown, a number is out of range, ``dual_clip`` is given for another kind, or
            ``kl_coef`` is given without ``kl``.

    Source: clip: PPO, arXiv:1707.06347; dual clip: arXiv:1912.09729; cispo: MiniMax-M1, arXiv:2506.13585; k1, k2, k3:
    J. Schulman, "Approximating KL Divergence", 2020.
    """

    kind: str = "clip"
    _: KW_ONLY
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    log_ratio_clamp: float | None = None
    kl: str | None = None
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        """Validate the settings."""
        _checks.check_choice("kind", self.kind, KINDS)
        for name in ("clip_low", "clip_high", "kl_coef", "dual_clip", "log_ratio_clamp"):
            value = getattr(self, name)
            if value is not None or name in ("clip_low", "clip_high", "kl_coef"):
                _checks.check_number(name, value)
        _checks.check_probability("clip_low", self.clip_low)
        if not self.clip_high >= 0:
            raise ValueError(f"clip_high must be at least 0, got {self.clip_high}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be above 1, got {self.dual_clip}")
        if self.dual_clip is not None and self.kind != "clip":
            raise ValueError(f"dual_clip only applies to kind='clip', got kind={self.kind!r}")
        if self.log_ratio_clamp is not None and not self.log_ratio_clamp > 0:
            raise ValueError(f"log_ratio_clamp must be above 0, got {self.log_ratio_clamp}")
        _checks.check_not_negative("kl_coef", self.kl_coef)
        if self.kl is not None:
            _checks.check_choice("kl", self.kl, KL_KINDS)
        elif self.kl_coef != 0:
            raise ValueError(f"kl must be given for kl_coef={self.kl_coef}, got None")

    def __call__(
        self, scores: Tensor | RowStats, old: Tensor | None, advantages: Tensor, ref: Tensor | None = None
    ) -> Tensor:
        """Compute the loss of each score.

        Args:
            scores: scores of tokens or sequences, floating, any shape; or a :class:`RowStats`, whose ``log_probs`` are
                used.
            old: scores under the sampling policy; None is allowed for "reinforce", which does not use them. ``old``,
                ``advantages`` and ``ref`` are constants of the shape of the scores, 0-d, or with 1 in place of some
                sizes.
            advantages: advantage of each score.
            ref: scores under the reference policy; only used with ``kl``.

        Returns:
            Loss, of the shape of the scores, float32 (float64 for float64 scores), differentiable in them.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: shapes, dtypes or devices do not match, ``old`` or ``ref`` is missing, or a constant requires a
                gradient.
        """
        s = scores.log_probs if isinstance(scores, RowStats) else scores
        _checks.check_float("scores", s)
        self._check_required(old, ref)
        for name, value in (("old", old), ("advantages", advantages), ("ref", ref)):
            if value is not None or name == "advantages":
                _check_beside(name, value, s)
        return self._values(s, old, advantages, ref)

    def unchecked(self) -> Callable[..., Tensor]:
        """Return the function of validated scores and constants; a subclass may have its own."""
        return self._values if type(self).__call__ is PolicyObjective.__call__ else self

    def _values(self, s: Tensor, old: Tensor | None, advantages: Tensor, ref: Tensor | None) -> Tensor:
        s = s.to(accum_dtype(s.dtype))
        old, advantages, ref = (None if t is None else t.to(s.dtype) for t in (old, advantages, ref))  # type: ignore[assignment]
        loss = self._policy_term(s, old, advantages)  # type: ignore[arg-type]
        if self.kl is None or self.kl_coef == 0:
            return loss
        return loss + self._penalty(s - ref, self.kl_coef)  # type: ignore[operator]

    def _check_required(self, old: Tensor | None, ref: Tensor | None) -> None:
        """Raise ValueError if scores that the objective needs are missing."""
        if old is None and self.kind != "reinforce":
            raise ValueError(f"old must be given for kind={self.kind!r}, got None")
        if ref is None and self.kl is not None:
            raise ValueError(f"ref must be given for kl={self.kl!r}, got None")

    def _policy_term(self, s: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
        """Select by ``where`` before the exponential: if it overflows, a selection after it has the gradient NaN.

        A NaN score stays NaN at any advantage.
        """
        zero = (advantages == 0) & ~s.isnan()
        if self.kind == "reinforce":
            return -advantages * torch.where(zero, 0.0, s)
        log_ratio = self._log_ratio(s, old)
        ratio = log_ratio.detach().exp()
        bounded = self._bounded(ratio, advantages)
        if self.kind == "cispo":
            factor = torch.where(zero, 0.0, bounded * advantages)
            return -factor * torch.where(factor == 0, 0.0, s)
        clipped = _differ(ratio, bounded)
        live = torch.where(zero | clipped, 0.0, log_ratio)
        return _times_growing(torch.where(clipped, bounded, 1.0) * -advantages, live)

    def _log_ratio(self, s: Tensor, old: Tensor) -> Tensor:
        log_ratio, c = s - old, self.log_ratio_clamp
        return log_ratio if c is None else log_ratio.clamp(-c, c)

    def _bounded(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Clip ratios on the side on which the loss does: ``-min(r A, clip(r) A)`` is ``-A`` times the result."""
        above = ratio.clamp(max=1.0 + self.clip_high)
        if self.kind == "cispo":
            return above
        return torch.where(advantages < 0, ratio.clamp(1.0 - self.clip_low, self.dual_clip), above)

    def _penalty(self, away: Tensor, coef: float = 1.0) -> Tensor:
        """Estimate the KL divergence from ``away = s - ref``, times a coefficient."""
        if self.kl == "k1":
            return coef * away
        if self.kl == "k2":
            return coef * (away.square() / 2)
        return _times_growing(coef, -away, lambda x: torch.expm1(x) - x)


def _times_growing(factor: Tensor | float, x: Tensor, function: Callable[[Tensor], Tensor] = torch.exp) -> Tensor:
    """Compute ``factor * function(x)`` for a function that grows as exp does; infinite only if the product is.

    Float32 holds exp(80), and above 80 such a function equals ``function(80) exp(x - 80)``, up to rounding.
    """
    large = x > 80.0
    return factor * function(torch.where(large, 80.0, x)) * torch.where(large, x - 80.0, 0.0).exp()


def _differ(ratio: Tensor, bounded: Tensor) -> Tensor:
    """Return True where clipping changed a ratio; False for NaN."""
    return (ratio > bounded) | (ratio < bounded)


class ScoreMetrics(NamedTuple):
    """Metrics of each score, detached.

    Attributes:
        ratio: ``exp(s - old)``, clamped as in the objective; None without ``old``.
        clipped: 1 if clipping changed the loss, otherwise 0; None for "reinforce".
        kl: the KL estimate, without its coefficient; None without ``kl``.
    """

    ratio: Tensor | None
    clipped: Tensor | None
    kl: Tensor | None


def score_metrics(
    objective: PolicyObjective, scores: Tensor, old: Tensor | None, advantages: Tensor, ref: Tensor | None
) -> ScoreMetrics:
    """Compute the metrics of the scores; the arguments are documented in :meth:`PolicyObjective.__call__`."""
    s = scores.detach()
    ratio = None if old is None else objective._log_ratio(s, old).exp()
    kl = None if objective.kl is None else objective._penalty(s - ref)  # type: ignore[operator]
    if objective.kind == "reinforce" or ratio is None:
        return ScoreMetrics(ratio, None, kl)
    clipped = _differ(ratio, objective._bounded(ratio, advantages)) & (advantages != 0)
    return ScoreMetrics(ratio, clipped.to(s.dtype), kl)


def nll_weights(objective: Callable[[Tensor], Tensor], log_probs: Tensor) -> Tensor:
    r"""Compute NLL weights so that the weighted sum of NLLs has the gradient of an objective.

    .. math:: w_{kbi} = -\frac{\partial f}{\partial l_{kbi}}

    Call ``weighted_linear_nll(hidden_k, head, ids, weights_k)`` and backward for each view. The accumulated gradient is
    the exact gradient of ``f``, computed with the memory of one view. Works under ``torch.no_grad``.

    Examples:
        >>> log_probs = torch.tensor([[[-1.0, -2.0]], [[-3.0, -1.0]]])  # [K, B, L]
        >>> nll_weights(lambda l: -(l.sum((0, 2)) / 4).exp().sum(), log_probs).shape
        torch.Size([2, 1, 2])

    Args:
        objective: function of log-probabilities of the shape of ``log_probs`` that returns a 0-d loss. Numbers that it
            closes over are constants of a compiled graph; tensors may change from step to step.
        log_probs: log-probabilities at which to differentiate, ``[K, B, L]`` or any other shape, floating. Detached and
            copied.

    Returns:
        Weights of the shape and dtype of ``log_probs``, detached; may be negative.

    Raises:
        TypeError: ``objective`` is not callable or does not return a tensor, or ``log_probs`` is not a tensor.
        ValueError: ``log_probs`` is not floating, or the result of ``objective`` is not 0-d or does not depend on
            ``log_probs``. Under ``torch.compile`` the weights of such a result are 0 instead.

    Source: the chain rule.
    """
    if not callable(objective):
        raise TypeError(f"objective must be a function of the log-probabilities, got {_checks.type_name(objective)}")
    _checks.check_float("log_probs", log_probs)

    def checked(x: Tensor) -> Tensor:
        loss = objective(x)
        if not isinstance(loss, Tensor):
            raise TypeError(f"objective must return a torch.Tensor, got {_checks.type_name(loss)}")
        if loss.dim() != 0:
            raise ValueError(f"objective must return a 0-d loss, got shape {tuple(loss.shape)}")
        return loss

    if torch.compiler.is_compiling():  # torch.autograd.grad would break the graph
        gradient: Tensor = torch.func.grad(checked)(log_probs.detach().clone())
        return -gradient.detach()
    with own_graph(), torch.enable_grad():
        leaf = log_probs.detach().clone().requires_grad_()
        loss = checked(leaf)
        grad = torch.autograd.grad(loss, leaf, allow_unused=True)[0] if loss.requires_grad else None
    if grad is None:
        raise ValueError("objective must depend on log_probs, got a loss that does not; does it detach them?")
    return -grad


def _check_beside(name: str, value: Tensor | None, scores: Tensor) -> None:
    """Raise unless the value is a constant that is 0-d or has the shape of the scores, or 1 in place of a size."""
    _checks.check_float(name, value)
    assert value is not None
    shape, expected = tuple(value.shape), tuple(scores.shape)
    if shape and (len(shape) != len(expected) or any(a not in (1, b) for a, b in zip(shape, expected, strict=True))):
        raise ValueError(f"{name} must have shape {expected} (that of scores), got {shape}")
    _checks.check_same_device("scores", scores, **{name: value})
    _checks.check_constant(name, value)
