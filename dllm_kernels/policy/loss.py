r"""Policy-gradient loss: a :class:`PolicyObjective` of scores from noisy views, from logits or hidden states.

    loss = sum_i c_i f(s_i),      s_i = sum_k w_ki log p(y_i | view k),

with i over tokens, or over sequences, whose score is the mean over their tokens.

If every token is scored in at most one view, the objective of a row of logits depends on this row only. The forward
pass then computes the gradients, and the logits are computed once (``row_objective``): 2 matrix products with a
frozen head, 3 with a trainable head. Otherwise the upstream gradient of a row is known only after all rows of its
score, so the loss uses ``token_nll``: 2 and 4 products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dllm_kernels import _checks
from dllm_kernels._checks import Extra
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import all_plain, has_values
from dllm_kernels.losses._common import Count, check_counts, divide, next_tokens, shift_left
from dllm_kernels.losses._model_output import ModelOutput
from dllm_kernels.ops import RowStats
from dllm_kernels.ops.row_objective import row_objective_unchecked
from dllm_kernels.policy.objective import PolicyObjective, score_metrics
from dllm_kernels.policy.views import PolicyViews, next_token_views, scored_once, supervised_tokens
from dllm_kernels.rows._call import Call, checked_logits
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._logits import LinearLogits, Logits
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._stats_interface import StatsFlags
from dllm_kernels.rows._transform import Transform

LEVELS = ("token", "sequence")
NORMALIZE = ("tokens", "sequences", "none")
NAMES = _checks.Names("logits", "ids", "lm_head_weight", "lm_head_bias")


class PolicyLossOutput(NamedTuple):
    """Return type of :class:`PolicyLoss`: the loss and detached metrics, all 0-d.

    Metrics are means over the scored tokens of this call, or over the sequences with supervised tokens; 0 without any.

    Attributes:
        loss: float32 (float64 for float64 inputs), differentiable.
        ratio: mean of ``exp(s - old)``, clamped as in the objective; None without ``old``.
        clip_fraction: fraction of the scores whose loss or gradient is changed by clipping, none with an advantage of
            0; None for "reinforce".
        kl: mean of the KL estimate, without its coefficient; None without ``kl``.
        entropy: mean entropy of the scored rows of all views; None unless requested.
    """

    loss: Tensor
    ratio: Tensor | None = None
    clip_fraction: Tensor | None = None
    kl: Tensor | None = None
    entropy: Tensor | None = None


class _Constants(NamedTuple):
    """Constants of the objective, ``[B, L]`` or ``[B]``, 0 for scores that do not count.

    ``factors`` multiply the objective of each score and contain the normalization.
    """

    counted: Tensor
    factors: Tensor
    advantages: Tensor
    old: Tensor | None = None
    ref: Tensor | None = None


class PolicyLoss(nn.Module):
    r"""Policy gradient of a diffusion LM from noisy views of its completions.

    .. math::
        \text{loss} = \sum_i c_i \, f(s_i; \text{old}_i, A_i, \text{ref}_i), \qquad
        s_i = \sum_k w_{ki} \log p(y_i \mid \text{view } k)

    with f the :class:`PolicyObjective`. With ``level="token"``, i runs over the scored tokens. With
    ``level="sequence"``, i runs over the sequences with supervised tokens. Sequence b has :math:`n_b` of them and the
    score :math:`S_b / n_b`. The factor :math:`c_i` normalizes:

    ========= ======================================== ===================================
    normalize token                                    sequence
    ========= ======================================== ===================================
    tokens    1 / supervised tokens of the step        n_b / supervised tokens of the step
    sequences 1 / (B n_b): mean over sequences of the  1 / B
              mean over their tokens
    none      1                                        1
    ========= ======================================== ===================================

    Tokens that are scored in no view, and sequences without supervised tokens, add 0 to the loss; these sequences count
    in B. Only scored rows are read or projected, so the content of other rows has no effect.

    Matrix products with a frozen and with a trainable head: 2 and 3 with ``level="token"`` if each token is scored at
    most once (one view of any scheme, or "trace" and one pair of "count" as :func:`policy_views` returned them).
    Otherwise, and always under ``torch.compile``, 2 and 4, or 3 and 4 with ``with_entropy``. One graph serves all sizes
    B, L and K above 1 if torch.compile treats them as dynamic.

    Examples:
        >>> ids = torch.tensor([[5, 6, 7, 8]])
        >>> loss_mask = torch.tensor([[0, 1, 1, 1]])
        >>> MASK = 9
        >>> views = policy_views(ids, loss_mask, MASK, "coupled", seeds=torch.tensor([0]))
        >>> hidden, head = torch.zeros(3, 1, 4, 16, requires_grad=True), torch.zeros(10, 16)
        >>> with torch.no_grad():  # before the first update: one product
        ...     log_probs = token_log_probs(
        ...         hidden, ids.expand(3, 1, 4), weight=head, active=views.scored
        ...     ).log_probs
        ...     old = views.token_scores(log_probs)
        >>> policy_loss = PolicyLoss(PolicyObjective(clip_high=0.28))
        >>> out = policy_loss.forward_fused(
        ...     hidden, head, ids, views, old, torch.tensor([2.0])
        ... )
        >>> out.loss.item(), out.ratio.item(), out.clip_fraction.item()
        (-2.0, 1.0, 0.0)
        >>> out.loss.backward()

    Args:
        objective: computes the loss of each score.
        level: "token" or "sequence".
        normalize: "tokens", "sequences" or "none".
        shift: True for a model whose row i predicts token i + 1 (Dream, DiffuCoder, Fast-dLLM v2). Targets, views,
            ``old``, ``ref`` and ``advantages`` are given per token as without it, and the loss shifts them, never the
            logits. Token 0 is not scored. It is not counted if a view scores it, so pass a ``loss_mask`` that excludes
            it to :func:`policy_views`: a random view may omit it.

    Raises:
        TypeError: ``objective`` is not a :class:`PolicyObjective`, or ``shift`` is not a bool.
        ValueError: ``level`` or ``normalize`` is unknown. Every call checks all four again.

    Source: the objectives of the methods listed in :func:`policy_views`; sequence ratios over n: GSPO,
    arXiv:2507.18071; the normalizations: GRPO, arXiv:2402.03300, and DAPO, arXiv:2503.14476.
    """

    def __init__(
        self, objective: PolicyObjective, *, level: str = "token", normalize: str = "tokens", shift: bool = False
    ) -> None:
        """Initialize; the arguments are documented on the class."""
        super().__init__()
        self.objective, self.level, self.normalize, self.shift = objective, level, normalize, shift
        self._check_settings()

    def forward(
        self, logits: Logits, ids: Tensor, views: PolicyViews, old: Tensor | None, advantages: Tensor,
        ref: Tensor | None = None, *, num_tokens: int | Tensor | None = None, with_entropy: bool = False,
        temperature: float = 1.0, softcap: float | None = None, skip_id: int | None = None, backend: str = "auto",
    ) -> PolicyLossOutput:  # fmt: skip
        """Compute the loss.

        Args:
            logits: ``[K, B, L, V]``, output of the model on ``views.noisy``, any float dtype; or the
                :class:`LinearLogits` of hidden states ``[K, B, L, D]``. With ``level="token"`` and each token scored at
                most once, backward of a record can run only once.
            ids: ``[B, L]`` integers, the clean tokens; -100: not scored.
            views: noisy views of ``ids``, from :func:`policy_views`.
            old: scores under the sampling policy, floating, constant. With ``level="token"`` ``[B, L]``, from
                ``views.token_scores(log_probs)``. With ``level="sequence"`` ``[B]``, from
                ``views.sequence_scores(log_probs, mean=True)``. May be None for "reinforce".
            advantages: ``[B]``, or ``[B, L]`` with ``level="token"``; floating, constant.
            ref: scores under the reference policy, of the shape of ``old``; only used with a KL penalty.
            num_tokens: number n of supervised tokens of the whole step, int or 0-d tensor; the denominator is
                ``max(n, 1)``. None: counted from this call. Only with ``normalize="tokens"``.
            with_entropy: also return the mean entropy.
            temperature: T > 0. The logits are divided by T, after the cap.
            softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
            skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and
                the NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
            backend: "auto", "triton" or "torch".

        Returns:
            :class:`PolicyLossOutput`.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: shapes, dtypes or devices do not match, a value is out of range, ``old`` or ``ref`` is missing,
                a constant requires a gradient, or ``num_tokens`` is given with another normalization.
            RuntimeError: a second backward pass, if the forward pass computed the gradients.
        """
        self._check_settings()
        _checks.check_flags(with_entropy=with_entropy)
        transform = Transform(softcap, 1 / _checks.checked_temperature(temperature), skip_id)
        rows = ModelOutput.of(logits, Options(transform, check_targets=False, backend=backend), NAMES)
        ids, old, advantages, ref = all_plain(ids, old, advantages, ref)
        rows = _checked_rows(rows, ids, views, int(self.shift))
        self._check_constants(ids, old, advantages, ref)
        self._check_num_tokens(num_tokens)
        # In a graph, row_objective would recompute the logits.
        eager = not torch.compiler.is_compiling() and has_values(rows.x)
        by_row = eager and self.level == "token" and not rows.stored and scored_once(views)
        if self.shift:  # everything per token moves to the row that predicts it
            ids, views = next_tokens(ids), next_token_views(views)
            constants = old, advantages, ref
            old, advantages, ref = (shift_left(t) if t is not None and t.dim() == 2 else t for t in constants)
        scored = views.scored & (ids.long() != IGNORE)  # int64, because -100 equals 156 in uint8
        c = self._constants(views, scored, (old, advantages, ref), num_tokens, rows.accum_dtype)
        if by_row:
            loss, log_probs, entropy = self._by_row(rows, ids, views, scored, c, with_entropy)
            scores = views.token_scores(log_probs)
        else:
            log_probs, entropy = _log_probs(rows, ids, scored, with_entropy)
            by_token = self.level == "token"
            scores = views.token_scores(log_probs) if by_token else views.sequence_scores(log_probs, mean=True)
            value = self.objective.unchecked()(scores, c.old, c.advantages, c.ref)
            loss = torch.where(c.counted, value * c.factors, 0.0).sum()
        metrics = score_metrics(self.objective, scores, c.old, c.advantages, c.ref)
        ratio, clip_fraction, kl = (None if t is None else _mean(t, c.counted) for t in metrics)
        entropy = None if entropy is None else _mean(entropy.detach(), scored)
        return PolicyLossOutput(loss, ratio, clip_fraction, kl, entropy)

    def forward_fused(
        self, hidden: Tensor, lm_head_weight: Tensor, ids: Tensor, views: PolicyViews, old: Tensor | None,
        advantages: Tensor, ref: Tensor | None = None, *, num_tokens: Count = None, with_entropy: bool = False,
        lm_head_bias: Tensor | None = None, extra: Extra | None = None, chunk_size: int | None = None,
        num_active: int | None = None, logits_dtype: torch.dtype | None = None, temperature: float = 1.0,
        softcap: float | None = None, skip_id: int | None = None, backend: str = "auto",
    ) -> PolicyLossOutput:  # fmt: skip
        """Compute :meth:`forward` of ``LinearLogits(hidden, lm_head_weight, lm_head_bias, extra, ...)``."""
        logits = LinearLogits(hidden, lm_head_weight, lm_head_bias, extra, logits_dtype, chunk_size, num_active)
        return PolicyLoss.forward(
            self, logits, ids, views, old, advantages, ref, num_tokens=num_tokens, with_entropy=with_entropy,
            temperature=temperature, softcap=softcap, skip_id=skip_id, backend=backend,
        )  # fmt: skip

    def _by_row(
        self, rows: ModelOutput, ids: Tensor, views: PolicyViews, scored: Tensor, c: _Constants, with_entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (loss, log-probabilities, entropies) of scores that are one row each."""
        objective = self.objective.unchecked()
        constants = {name: t.expand(scored.shape) for name, t in c._asdict().items() if t is not None}

        def value(stats: RowStats, weights: Tensor, *values: Tensor) -> Tensor:
            chunk = _Constants(**dict(zip(constants, values, strict=True)))
            return chunk.factors * objective(weights * stats.log_probs, chunk.old, chunk.advantages, chunk.ref)

        options, flags = replaced(rows.options, with_lse=True), StatsFlags(entropy=with_entropy)
        call = Call(rows.logits, options, ids.expand(scored.shape), scored)
        out = row_objective_unchecked(call, (views.weights, *constants.values()), flags, fn=value)
        return out.loss, out.log_probs, out.entropy

    def _constants(
        self, views: PolicyViews, scored: Tensor, values: Sequence[Tensor | None], num_tokens: Count, dtype: torch.dtype
    ) -> _Constants:
        n = supervised_tokens(views)
        counted = scored.any(0) if self.level == "token" else n > 0

        def clean(t: Tensor | None) -> Tensor | None:
            if t is None:
                return None
            t = t[:, None] if t.dim() < counted.dim() else t
            return torch.where(counted, t.detach().to(dtype), 0.0)

        old, advantages, ref = map(clean, values)
        assert advantages is not None
        return _Constants(counted, self._factors(counted, n, num_tokens, dtype), advantages, old, ref)

    def _factors(self, counted: Tensor, n: Tensor, num_tokens: Count, dtype: torch.dtype) -> Tensor:
        """Compute the factor of each score, of the shape of ``counted``."""
        factors, by_token = counted.to(dtype), self.level == "token"
        if self.normalize == "tokens":
            return divide(factors if by_token else factors * n, num_tokens, n)
        if self.normalize == "sequences":
            return (factors / n.clamp(min=1)[:, None] if by_token else factors) / max(len(n), 1)
        return factors

    def _check_settings(self) -> None:
        """Validate the settings, on every call because attributes may have been reassigned."""
        if not isinstance(self.objective, PolicyObjective):
            raise TypeError(f"objective must be a PolicyObjective, got {_checks.type_name(self.objective)}")
        _checks.check_choice("level", self.level, LEVELS)
        _checks.check_choice("normalize", self.normalize, NORMALIZE)
        _checks.check_flags(shift=self.shift)

    def _check_constants(self, ids: Tensor, old: Any, advantages: Any, ref: Any) -> None:
        self.objective._check_required(old, ref)
        token_shape, row_shape = tuple(ids.shape), tuple(ids.shape[:1])
        by_token = self.level == "token"
        scores = token_shape if by_token else row_shape
        _check_constant("old", old, ids, (scores,), self.level)
        _check_constant("advantages", advantages, ids, (row_shape, scores) if by_token else (row_shape,), self.level)
        _check_constant("ref", ref, ids, (scores,), self.level)

    def _check_num_tokens(self, num_tokens: Count) -> None:
        check_counts(num_tokens=num_tokens)
        if num_tokens is not None and self.normalize != "tokens":
            raise ValueError(f"num_tokens must be None unless normalize is 'tokens', got it with {self.normalize!r}")


def _checked_rows(rows: ModelOutput, ids: Tensor, views: PolicyViews, shift: int) -> ModelOutput:
    """Validate rows ``[K, B, L, V]`` or ``[K, B, L, D]``, head, ids from column ``shift`` on, views and options."""
    logits, options, _ = checked_logits(NAMES, rows.logits, ids, rows.options)
    names, x = rows.names, rows.x
    _checks.check_ndim(names.rows, x, 4, "[K, B, L, V]" if rows.stored else "[K, B, L, D]")
    _checks.check_ndim("ids", ids, 2, "[B, L]")
    if not isinstance(views, PolicyViews):
        raise TypeError(f"views must be PolicyViews, got {_checks.type_name(views)}")
    shape = tuple(views.scored.shape)
    if len(shape) != 3 or shape[1:] != tuple(ids.shape):
        raise ValueError(f"views must be [K, B, L] with [B, L] = {tuple(ids.shape)}, that of ids, got {shape}")
    _checks.check_shape(names.rows, x, (*shape, x.shape[-1]), "that of the views, with one dimension more")
    _checks.check_same_device(names.rows, x, views=views.scored)
    _checks.check_constant("views.weights", views.weights)
    checked = ModelOutput(names, options, logits)
    checked.check_targets(ids, views.scored.any(0)[:, shift:], shift=shift)
    return checked


def _log_probs(rows: ModelOutput, ids: Tensor, scored: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the log-probability of each scored token, differentiable, and the entropies if requested."""
    ids = ids.expand(scored.shape)
    if rows.stored or entropy:
        out = rows.stats(ids, scored, entropy=entropy)
        return out.log_probs, out.entropy
    return -rows.per_row(ids, scored).nll, None


def _check_constant(name: str, value: Any, ids: Tensor, shapes: tuple[tuple[int, ...], ...], level: str) -> None:
    if value is None and name != "advantages":
        return
    _checks.check_float(name, value)
    if all(tuple(value.shape) != shape for shape in shapes):  # "in" compares symbolic sizes by identity
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {expected} for level={level!r}, got {tuple(value.shape)}")
    _checks.check_same_device("ids", ids, **{name: value})
    _checks.check_constant(name, value)


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Compute the mean over the counted entries, 0 if there are none."""
    total = torch.where(counted, values, 0.0).sum()
    return total / counted.sum().clamp(min=1)
