"""Patch an installed speculators to use this package's losses, and compute its metrics from hidden states.

Example::

    from dllm_kernels.integrations import speculators

    print(speculators.patch())        # before the trainer reads its loss configuration
    ...
    speculators.unpatch()

speculators has seven losses in two tables, "fused" and "eager". :func:`patch` replaces both wherever speculators holds
them: in its modules, in its tables and default configurations, and in the defaults of its functions. A loss
configuration that was read before the call keeps the original functions. The replacements also run on CPU; the fused
originals do not.

:func:`speculators_metrics` is speculators' ``compute_metrics`` from hidden states of the draft and the verifier.
``core.py`` computes the logits of both models and passes them on. Pass the inputs of the two LM heads instead; the full
logits tensors are then never materialized.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_kernels import _checks, ops
from dllm_kernels._checks import Extra
from dllm_kernels._checks._target_range import first_fraction
from dllm_kernels.integrations._hosts import Host, PatchReport, checked_excluded, origin
from dllm_kernels.losses._block_weights import BlockWeights
from dllm_kernels.losses._common import sum_of_rows

HOST = "speculators"
EAGER = "losses.eager"
TABLES = EAGER, "losses.utils"  # the modules that define the functions of each, under equal names
# Name in the tables of speculators -> kind of ops.divergence, in the order of the tables.
KINDS = {"kl_div": "kl", "rkl": "rkl", "jsd": "jsd", "ce": "teacher_ce", "tv": "tv", "nla": "nla", "lk_hybrid": "lk"}
WEIGHTS = ("fixed-exp-decay", "dpace")
EPS = {"loss": 1e-5, "confidence": 1e-8}  # added to the number of valid rows
FLOOR = 1e-5  # floor of nla, as in ops.divergence
Loss = Callable[..., Tensor]
Metrics = dict[str, Tensor]


_host = Host(HOST, {})


@_host.exclusive
def patch(*, exclude: Iterable[str] = (), strict: bool = False) -> PatchReport:
    """Replace the losses of the installed ``speculators``, both the "fused" and the "eager" ones.

    Signatures, ``(logits, targets) -> [1, T]``, and values are unchanged. The gradient is computed from per-row
    statistics, without temporaries ``[T, V]``. The result is float32 (float64 for float64 logits), also for the eager
    ``ce_loss``, whose original returns the dtype of the logits. If the targets require a gradient, the eager losses
    call the original, because the replacements, like the fused losses, treat the targets as constants. A second call
    does nothing and returns the first report with ``already=True``. A function whose signature in speculators differs
    from the replacement stays as it is; a warning and the report list the differences.

    Args:
        exclude: names of functions to keep, such as "ce_loss".
        strict: True to raise an error for signatures that differ.

    Returns:
        :class:`PatchReport`; print it.

    Raises:
        ImportError: ``speculators`` is not installed, or its losses cannot be imported.
        RuntimeError: with ``strict``, a signature in speculators differs from the replacement; the message lists every
            difference, and nothing is replaced. Or speculators is patched already with another ``exclude``.
        TypeError: ``strict`` is not a bool.
        ValueError: ``exclude`` holds a name that is never replaced.
    """
    excluded = checked_excluded(exclude, REPLACEMENTS)
    strict = _checks.checked_bool("strict", strict)
    if (earlier := _host.earlier(strict, exclude=excluded)) is not None:
        return earlier
    pairs, problems = _host.pairs(dict.fromkeys(TABLES, sorted(REPLACEMENTS)), excluded, _replacement)
    version = importlib.metadata.version(HOST)
    return _host.patch(version, pairs, problems, strict, {"exclude": excluded}, kept=tuple(excluded))


@_host.exclusive
def unpatch() -> tuple[tuple[str, str], ...]:
    """Restore the original losses wherever they were replaced, also in modules imported since.

    Returns:
        ``(module, place)`` of each restored place; empty if speculators was not patched.
    """
    return _host.unpatch()


def _replacement(home: str, name: str, original: Loss) -> Loss:
    """Wrap the replacement for one table; eager losses fall back to the original if the targets require a gradient."""
    replacement = REPLACEMENTS[name]

    @functools.wraps(replacement)
    def loss(logits: Tensor, targets: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        trains_targets = home == EAGER and torch.is_grad_enabled() and targets.requires_grad
        return (original if trains_targets else replacement)(logits, targets, *args, **kwargs)

    return loss


# The losses ----------------------------------------------------------------------------------------------------------


def _per_row(kind: str, logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Return the divergence per row, computed in the wider of the two dtypes."""
    for name, value in (("logits", logits), ("targets", targets)):  # the op has another name for the targets
        _checks.check_tensor(name, value)
    _checks.check_shape("targets", targets, logits.shape, "that of logits")
    _checks.check_same_device("logits", logits, targets=targets)
    dtype = torch.promote_types(logits.dtype, targets.dtype)
    return ops.divergence(logits.to(dtype), targets.to(dtype), kind=kind, reduction="none", **options).loss


def kl_div_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute KL(q || p) per row, ``[1, T]``, from logits ``[1, T, V]``: p is the draft's softmax, q the verifier's."""
    return _per_row("kl", logits, targets)


def reverse_kl_div_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute KL(p || q) per row, with p and q as in :func:`kl_div_loss`."""
    return _per_row("rkl", logits, targets)


def js_div_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute (KL(q || m) + KL(p || m)) / 2 per row, m = (p + q) / 2, with p and q as in :func:`kl_div_loss`."""
    return _per_row("jsd", logits, targets)


def ce_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute -log p at the verifier's argmax per row, with p and q as in :func:`kl_div_loss`."""
    return _per_row("teacher_ce", logits, targets)


def tv_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute 1 - a per row, a = sum min(p, q), with p and q as in :func:`kl_div_loss`."""
    return _per_row("tv", logits, targets)


def neg_log_acceptance_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute -log(max(a, 1e-5)) per row, with a as in :func:`tv_loss`."""
    return _per_row("nla", logits, targets)


def lk_hybrid_loss(logits: Tensor, targets: Tensor, eta: float | Tensor = 3.0) -> Tensor:
    """Compute ``lam KL(q || p) + (1 - lam) (1 - a)`` per row.

    lam = exp(-eta a) is a constant, with a as in :func:`tv_loss`.
    ``eta`` is a number, or a tensor that broadcasts with ``[1, T]``; a tensor takes two passes over the logits.
    """
    if not isinstance(eta, Tensor):
        return _per_row("lk", logits, targets, eta=eta)
    kl, tv = kl_div_loss(logits, targets), tv_loss(logits, targets)
    lam = torch.exp(-eta * (1 - tv).detach())
    return lam * kl + (1 - lam) * tv


LOSSES = kl_div_loss, reverse_kl_div_loss, js_div_loss, ce_loss, tv_loss, neg_log_acceptance_loss, lk_hybrid_loss
REPLACEMENTS: dict[str, Loss] = {loss.__name__: loss for loss in LOSSES}
NAMES = dict(zip(KINDS, REPLACEMENTS, strict=True))  # of the functions in the tables


# The metrics of speculators, from hidden states ----------------------------------------------------------------------


def speculators_metrics(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, loss_mask: Tensor, block_size: int = 1, gamma: float = 4.0,
    loss_config: Mapping[str, Any] | None = None, per_position_loss_weight: str = "fixed-exp-decay",
    dpace_alpha: float = 0.5, sample_from_anchor: bool = False, *, acceptance: bool = False,
    confidence_logits: Tensor | None = None, confidence_head_alpha: float = 1.0, bias: Tensor | None = None,
    extra: Extra | None = None, teacher_weight: Tensor | None = None, teacher_bias: Tensor | None = None,
    teacher_extra: Extra | None = None, teacher_rows: Tensor | None = None, draft_to_target: Tensor | None = None,
    chunk_size: int | None = None, logits_dtype: torch.dtype | None = None, backend: str = "auto",
) -> tuple[Tensor, Metrics]:  # fmt: skip
    """Compute the loss and metrics of speculators' ``compute_metrics`` from hidden states.

    The logits exist one chunk at a time.

    With ``acceptance`` or ``confidence_logits`` this is ``compute_metrics`` of ``models/dspark/metrics.py``, otherwise
    of ``models/dflash/metrics.py``. The gradient is computed in the forward pass, in three matrix products with a
    frozen head. If ``loss_config`` has several terms, the loss of each is a metric. These metrics are free for tv, nla
    (not with ``draft_to_target``) and one other term, and cost two more products for each further term and for each
    term of small weight.

    Rows of weight 0 are not read. With ``sample_from_anchor=False`` the anchor's row predicts nothing. Unless
    ``loss_mask`` masks it, as the trainer does, it counts only in the number of valid rows that the loss is divided by.

    Args:
        hidden: the input of the draft's LM head, ``[1, T, D]``, T is a multiple of ``block_size``.
        weight: the draft's LM head ``[V, D]``.
        teacher_hidden: the input of the verifier's LM head, after its norm, ``[1, T, D']``, a constant. With
            ``teacher_rows`` it may have any number of rows.
        loss_mask: ``[1, T]``, 0 or 1.
        block_size: rows per block, including the anchor's.
        gamma: gamma of the decay, a number other than 0.
        loss_config: ``{name: weight}``, or ``{name: (function, weight)}`` as in speculators. The functions are not
            called, so they must be speculators' own. None: ``{"kl_div": 1.0}``.
        per_position_loss_weight: "fixed-exp-decay" or "dpace". As in speculators, "dpace" takes one term only. A block
            ends at its first masked row that predicts: rows after it have the weight 0 with "dpace", unlike in
            speculators.
        dpace_alpha: alpha of :func:`dpace_weights`.
        sample_from_anchor: True if the first row of a block predicts a token, as in DSpark.
        acceptance: True to add DSpark's metrics of the acceptance rate.
        confidence_logits: ``[1, T]`` of the confidence head, or None. Adds its loss and its metrics.
        confidence_head_alpha: coefficient of the confidence loss.
        bias: ``[V]`` or None.
        extra: low-rank second part of the draft's head, (u ``[1, T, r]``, U ``[V, r]``), or None, as for a Markov head.
        teacher_weight: the verifier's head ``[V, D']``, a constant; None: the draft's head.
        teacher_bias: ``[V]``, the bias of ``teacher_weight``, or None.
        teacher_extra: low-rank second part of the verifier's head, a constant, or None.
        teacher_rows: ``[1, T]`` int64, the row of ``teacher_hidden`` for each row of ``hidden``, called
            ``target_indices`` in ``core.py``; None: the two have the same layout.
        draft_to_target: ``[V]`` int64, for a draft with a smaller vocabulary and a verifier's head of the whole
            vocabulary: the verifier's column of each of the draft's tokens, ``torch.arange(len(d2t)) + d2t``. The
            metrics of acceptance and accuracy then cover the whole vocabulary, and so does the target of the confidence
            head. In speculators they cover the draft's vocabulary only.
        chunk_size: rows per chunk of logits; None: chosen from the sizes.
        logits_dtype: torch.float32 keeps the logits of 16-bit operands in float32; None: the dtype of the operands.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(loss, metrics)``. The metrics are pairs ``*_sum`` and ``*_total`` of 0-d tensors, named as in speculators.

    Raises:
        TypeError: an argument that should be a tensor, a number or a bool is not.
        ValueError: shapes, dtypes or devices do not match, a loss is unknown or has a function of the caller's, or
            "dpace" is used with several terms.

    Source: speculators 0.9.0, Apache-2.0.
    """
    terms = _terms(loss_config)
    _checks.check_choice("per_position_loss_weight", per_position_loss_weight, WEIGHTS)
    dpace = per_position_loss_weight == "dpace"
    if dpace and len(terms) > 1:
        raise ValueError(f"loss_config must have one loss with D-PACE, got {', '.join(terms)}")
    _checks.check_finite("confidence_head_alpha", confidence_head_alpha)
    divergence = functools.partial(
        ops.linear_divergence, hidden, weight, teacher_hidden, bias=bias, extra=extra, teacher_weight=teacher_weight,
        teacher_bias=teacher_bias, teacher_extra=teacher_extra, teacher_rows=teacher_rows,
        draft_to_target=draft_to_target, chunk_size=chunk_size, logits_dtype=logits_dtype, backend=backend,
    )  # fmt: skip
    first = 0 if _checks.checked_bool("sample_from_anchor", sample_from_anchor) else 1
    block_size = _checked_blocks(hidden, loss_mask, block_size, gamma)
    if dpace and (where := first_fraction(loss_mask, loss_mask)) is not None:
        raise ValueError(f"loss_mask must hold 0 or 1, got {loss_mask[where].item()} at position {where}")
    _checks.check_probability("dpace_alpha", dpace_alpha)
    kind = "dpace" if dpace else "decay"
    weighting = BlockWeights(kind, float(gamma), dpace_alpha, "tokens", anchor_row=True, decay_from=first)
    mask = loss_mask.detach().float()
    call = _Metrics(divergence, terms, mask, block_size, weighting, truncated=draft_to_target is not None)
    loss, result, term_losses = call.dpace() if dpace else call.decay()
    metrics: Metrics = {}
    if confidence_logits is not None:
        _checks.check_float("confidence_logits", confidence_logits)
        _checks.check_shape("confidence_logits", confidence_logits, loss_mask.shape, "that of loss_mask")
        learned, metrics = call.confidence(confidence_logits, result.acceptance_rate)
        loss = loss + float(confidence_head_alpha) * learned
    metrics |= _counted("loss", loss.detach().clone())
    for name, value in term_losses.items():
        metrics |= _counted(f"{name}_loss", value)
    if _checks.checked_bool("acceptance", acceptance) or confidence_logits is not None:
        metrics |= call.acceptance(result.acceptance_rate)
    return loss, metrics | call.accuracy(result.agree)


def _checked_blocks(hidden: Tensor, loss_mask: Tensor, block_size: int, gamma: float) -> int:
    """Check the mask, the block layout and the decay; return the block size."""
    _checks.check_float("hidden", hidden)
    _checks.check_ndim("hidden", hidden, 3, "[1, T, D]")
    _checks.check_mask("loss_mask", loss_mask, hidden.shape[:-1], "that of hidden without its last dimension")
    block_size = _checks.checked_int("block_size", block_size, 1)
    if hidden.shape[1] % block_size:
        raise ValueError(f"hidden must have a multiple of block_size={block_size} rows, got {hidden.shape[1]}")
    _checks.check_number("gamma", gamma)
    if gamma == 0 or math.isnan(gamma):
        raise ValueError(f"gamma must be a number other than 0, got {gamma}")
    return block_size


def _terms(loss_config: Mapping[str, Any] | None) -> dict[str, float]:
    """Return name -> weight of the loss terms."""
    if loss_config is None:
        return {"kl_div": 1.0}
    if not isinstance(loss_config, Mapping) or not loss_config:
        raise ValueError(f"loss_config must be a dict of losses and weights, got {loss_config!r}")
    terms = {}
    for name, weight in loss_config.items():
        _checks.check_choice("loss_config", name, KINDS)
        if isinstance(weight, tuple):
            function, weight = weight
            if getattr(function, "__name__", "") != NAMES[name] or not (function in LOSSES or _host.owns(function)):
                raise ValueError(
                    f"loss_config[{name!r}] must hold speculators' {NAMES[name]}, because its functions are not "
                    f"called, got {origin(function)}"
                )
        _checks.check_finite(f"loss_config[{name!r}]", weight)
        terms[name] = float(weight)
    return terms


def _counted(name: str, total: Tensor, count: Tensor | None = None) -> Metrics:
    """Return a pair of metrics; the count is 1 if not given."""
    return {f"{name}_sum": total, f"{name}_total": torch.ones((), device=total.device) if count is None else count}


@dataclass(frozen=True)
class _Metrics:
    """One call of :func:`speculators_metrics`.

    ``divergence(weights, kind=..., reduction=...)`` returns the divergence of the rows. ``weighting`` computes their
    weights. ``mask`` is ``loss_mask`` in the dtype of sums. ``truncated``: True if the draft has a smaller vocabulary.
    """

    divergence: Callable[..., ops.Divergence]
    terms: dict[str, float]
    mask: Tensor
    block_size: int
    weighting: BlockWeights
    truncated: bool

    def decay(self) -> tuple[Tensor, ops.Divergence, dict[str, Tensor]]:
        """Return the loss weighted by the decay, the divergence, and the loss of each term if there are several."""
        weights = self._shares(self.weighting.row_weights(self.mask, self.block_size, None, None), EPS["loss"])
        kind = {KINDS[name]: weight for name, weight in self.terms.items()}
        if any(kind.values()):
            result = self.divergence(weights, kind=kind)
            loss = result.loss
        else:  # only the metrics and the confidence head are requested; a divergence of no kind is an error
            result = self.divergence(weights, kind=dict.fromkeys(kind, 1.0))
            loss = 0.0 * result.loss
        return loss, result, self._term_losses(result, weights) if len(self.terms) > 1 else {}

    def dpace(self) -> tuple[Tensor, ops.Divergence, dict[str, Tensor]]:
        """Return the results of :meth:`decay` for one term weighted by D-PACE. Its value determines the confidence."""
        ((name, weight),) = self.terms.items()
        result = self.divergence(self.mask != 0, kind=KINDS[name], reduction="none")
        weights = self.weighting.row_weights(self.mask, self.block_size, torch.exp(-result.value), None)
        return weight * sum_of_rows(result.loss, self._shares(weights, EPS["loss"])), result, {}

    def confidence(self, logits: Tensor, a: Tensor) -> tuple[Tensor, Metrics]:
        """Return the loss of the confidence head and its calibration metrics. It is always weighted by the decay."""
        mask, learned = self.mask, torch.where(self.mask != 0, logits.float(), 0.0)
        bce = F.binary_cross_entropy_with_logits(learned, a.float().clamp(0, 1), reduction="none")
        decay = self.weighting.decay(mask.shape[1], self.block_size, mask.device, mask.dtype)
        loss = (bce * self._shares(decay * mask, EPS["confidence"])).sum()
        with torch.no_grad():
            p, a, valid = (self._blocks(t) for t in (learned.sigmoid(), a, mask))
            prefixes, total = [(rate * valid).cumprod(-1) for rate in (p, a)], valid.sum().clamp(min=1)
            metrics = _counted("confidence_loss", loss.detach().clone())
            metrics |= _counted("confidence_abs_error", ((p - a).abs() * valid).sum(), total)
            metrics |= _counted("confidence_pred_mean", (p * valid).sum(), total.clone())
            bias = ((prefixes[0] - prefixes[1]) * valid).sum()
            return loss, metrics | _counted("confidence_cumprod_bias", bias, total.clone())

    def acceptance(self, a: Tensor) -> Metrics:
        """Return the mean acceptance rate and the expected number of accepted tokens per block."""
        valid = self._blocks(self.mask)
        rates = self._blocks(a) * valid
        length, blocks = self._accepted(rates)
        metrics = _counted("accept_rate", rates.sum(), valid.sum().clamp(min=1))
        return metrics | _counted("accept_len", length, blocks.clamp(min=1))

    def accuracy(self, agree: Tensor) -> Metrics:
        """Return the argmax matches per row of a block, and per block up to the first miss."""
        valid = (self._blocks(self.mask) != 0).float()
        correct = self._blocks(agree) * valid
        hits, counts = correct.sum(0), valid.sum(0)
        metrics = _counted("full_acc", hits.sum(), counts.sum())
        for row in range(hits.numel()):
            metrics |= _counted(f"position_{row + self.weighting.decay_from}_acc", hits[row], counts[row])
        return metrics | _counted("eal", *self._accepted(correct))

    def _accepted(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the accepted tokens, including one token of the verifier per block, and the number of valid blocks."""
        blocks = (self._blocks(self.mask) != 0).any(-1).float()
        return ((rates.cumprod(-1).sum(-1) + 1) * blocks).sum(), blocks.sum()

    def _blocks(self, rows: Tensor) -> Tensor:
        """Reshape to ``[blocks, rows that predict]``."""
        return rows.reshape(-1, self.block_size)[:, self.weighting.decay_from :]

    def _shares(self, weights: Tensor, eps: float) -> Tensor:
        """Divide row weights by the number of valid rows of their sequence and by the number of sequences."""
        return weights / (self.mask.sum(1, keepdim=True) + eps) / len(weights)

    def _term_losses(self, result: ops.Divergence, weights: Tensor) -> dict[str, Tensor]:
        """Return the loss of each term: from a, as the remainder of the sum (one term), or by a separate pass."""
        free = {"tv": 1 - result.acceptance_rate, "nla": -result.acceptance_rate.clamp(min=FLOOR).log()}
        if self.truncated:  # the acceptance rate of the result is over all columns, that of the loss over the draft's
            free = {}
        values = {name: free[name] for name in self.terms if name in free}
        # A term that is a small part of the sum would lose most digits in the subtraction.
        least = 0.01 * max(map(abs, self.terms.values()))
        others = [name for name, weight in self.terms.items() if name not in free and abs(weight) > least]
        last = others.pop() if others else None
        with torch.no_grad():
            for name in self.terms.keys() - values.keys() - {last}:
                values[name] = self.divergence(weights, kind=KINDS[name]).value
        if last is not None:
            known = sum(self.terms[name] * value for name, value in values.items())
            values[last] = (result.value - known) / self.terms[last]
        return {name: sum_of_rows(values[name], weights) for name in self.terms}
