"""Distillation of a block drafter: divergence to the target model with the weights of DFlash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._checks import Extra
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import all_plain
from dllm_kernels.losses._block_weights import Counts
from dllm_kernels.losses._common import Count, DLLMLossOutput, as_batch, sum_of_rows
from dllm_kernels.losses._draft import DraftCall, DraftLoss, DraftResult
from dllm_kernels.losses._model_output import ModelOutput
from dllm_kernels.ops.divergence import Compared, Divergence, TeacherInput, divergence_unchecked, head_of_teacher
from dllm_kernels.rows._divergence import DivergenceSpec
from dllm_kernels.rows._divergence_spec import checked_spec
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._logits import LinearLogits, Logits, map_rows
from dllm_kernels.rows._transform import Transform

OPTIONS = ("beta", "floor", "eta", "kl_scale", "alpha", "base")  # options of single kinds
CONFIDENCE = ("target", "teacher", "acceptance")
TEACHER_CE = checked_spec("teacher_ce")
# Objectives of block-drafter trainers with their default settings. Their blocks hold a row for the anchor, which is
# masked if it predicts nothing.
PRESETS: dict[str, dict[str, Any]] = {
    "specforge-dflash": {"kind": "ce", "loss_gamma": None, "normalize": "mean", "anchor_row": True, "decay_from": 1},
    "specforge-dpace": {"kind": "ce", "position_weights": "dpace", "normalize": "sequences", "anchor_row": True},
    "specforge-dspark": {
        "kind": {"ce": 0.1, "l1": 0.9}, "loss_gamma": None, "normalize": "mean", "anchor_row": True,
    },
    "speculators-dflash": {
        "kind": "teacher_ce", "position_weights": "dpace", "confidence": "teacher", "loss_gamma": 4.0,
        "normalize": "rows", "anchor_row": True, "decay_from": 1,
    },
    "speculators-dspark": {"kind": "kl", "loss_gamma": 4.0, "normalize": "rows", "anchor_row": True},
}  # fmt: skip


class DraftDistillationLoss(DraftLoss):
    r"""Divergence of a block drafter to its target model, with larger weights for earlier positions of a block.

    .. math:: \text{loss} = \frac{1}{N} \sum_i w_i m_i \left( D(p_i, q_i) + c \, \text{BCE}(\sigma(s_i), a_i) \right),
        \qquad a_i = \sum_v \min(p_{iv}, q_{iv})

    p is the draft's distribution. q is the distribution of the target model, the teacher, a constant. a is the
    probability that speculative sampling accepts the drafted token. m is ``block_mask``. The second term exists only if
    the drafter has a confidence head with logits s. The head learns to predict a, which is a constant in this term.
    Draft and teacher rows whose ``block_mask`` is 0 are not read.

    From hidden states, the full logits tensors of both models are never materialized. The gradient is computed in the
    forward pass, in three matrix products if both models share a frozen head.

    ``DraftDistillationLoss.preset(name)`` returns the objective of a trainer with that trainer's default settings:
    "specforge-dflash", "specforge-dpace", "specforge-dspark", "speculators-dflash" or "speculators-dspark". Some
    objectives divide by a count of the whole step, which is an argument of the call; see :meth:`preset`.

    Source: DSpark for the sum of cross-entropy, L1 and confidence; arXiv:2602.23881 for losses of the acceptance rate;
    the DFlash paper, eq. 4, and D-PACE, arXiv 2605.18810, for the weights.

    Args:
        kind: D, a kind of :func:`divergence` or a dict of kinds and coefficients. The kinds are "kl", "rkl", "jsd",
            "tv", "l1", "nla", "lk", "soft_ce", "teacher_ce" and "ce". "ce" is the cross-entropy of ``target_ids``, the
            only kind that needs no teacher.
        loss_gamma: gamma of the decay: the k-th row of a block has the weight ``w = e^(-(k - 1) / gamma)``. None: every
            row has the weight 1. "paper": 7, 5, 4 for a ``block_size`` of 16, 10, 8. Used with
            ``position_weights="decay"`` only.
        normalize: denominator N. "tokens": ``num_tokens``; if None the loss is a sum. "rows": ``num_tokens``, or if
            None the sum of ``block_mask``. "mean": ``total_weight``, or if None the sum of this call's weights plus
            1e-6. "blocks": the number of blocks with a valid row, which is one whose ``block_mask`` is not 0.
            "sequences": the number of sequences with a valid row. "sequence_blocks": the sum of each sequence is
            divided by its number of blocks with a valid row. The total is divided by the number of sequences with a
            valid row.
        position_weights: "decay", or weights of :func:`dpace_weights`: "dpace" is S, "prefix" C and "continuation" S /
            C. The names used by trainers are accepted too.
        dpace_alpha: alpha of :func:`dpace_weights`, in [0, 1].
        confidence: the confidence from which D-PACE computes its weights. "target": the draft's probability of the
            target token. "teacher": its probability of the teacher's most likely token. "acceptance": a. From hidden
            states they cost one more matrix product, two more (none if ``kind`` is "teacher_ce") and none. With a
            trainable head D-PACE costs two more, because the logits are recomputed in backward.
        anchor_row: True: a block has ``block_size`` rows, the first of which is the anchor's. False: a block has
            ``block_size - 1`` rows, without the anchor's.
        decay_from: the row of a block, counted from 0, that has k = 1. Earlier rows have the weight 0. Set it to 1 with
            ``anchor_row=True`` if the anchor has a row that predicts nothing. Used with the decay only.
        confidence_weight: c, the coefficient of the confidence term.
        temperature: T > 0. The logits of both models are divided by T, and D is multiplied by T^2. a is then the
            acceptance rate of the distributions at this temperature.
        teacher: distribution q of the loss with ``draft_to_target``. "draft": the softmax over these columns. "full":
            their probabilities in the softmax over all columns of the teacher, which sum to a mass M. kl and soft_ce
            are then weighted by M. a in tv, l1, nla and lk is the acceptance rate. rkl increases by -log M, jsd by
            -beta (1 - M) log beta. teacher_ce is 0 if the student does not have the argmax. ce does not change. With
            "acceptance", the confidence is always the acceptance rate over all columns. With "teacher", it is the
            probability of the likeliest token among those of the draft.
        beta, floor: options of :func:`divergence`, of the kinds "jsd" and "nla".
        eta, kl_scale, alpha, base: options of :func:`divergence`, of the kind "lk"; alpha is "row" or "mean", base "kl"
            or "soft_ce". With D-PACE all valid rows have equal weight in the mean.
        chunk_size: rows per chunk of logits of a record that has no ``chunk_size``; None: chosen from the sizes.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
        teacher_transform: ``{"softcap": ..., "scale": ..., "skip_id": ...}`` for the teacher's logits, ``{}`` for no
            transform. Its ``skip_id`` is a column after ``draft_to_target``. None: ``softcap``, ``scale`` and
            ``skip_id`` apply to the teacher's logits too.
        reduction: "total", or "none" to also return the loss of each row. From hidden states with a trainable head
            "none" takes two more products.
        backend: "auto", "triton" or "torch".

    Raises:
        TypeError: a setting has the wrong type.
        ValueError: a setting is out of range, ``kind``, ``normalize``, ``position_weights`` or ``confidence`` is
            unknown, or an option belongs to none of the kinds. Every call checks the settings again, because attributes
            can be reassigned.
    """

    def __init__(
        self, kind: str | Mapping[str, float] = "kl", loss_gamma: float | str | None = 7.0, *,
        normalize: str = "tokens", position_weights: str = "decay", dpace_alpha: float = 0.5,
        confidence: str = "target", anchor_row: bool = False, decay_from: int = 0, confidence_weight: float = 1.0,
        temperature: float = 1.0, teacher: str = "draft", beta: float | None = None, floor: float | None = None,
        eta: float | None = None, kl_scale: float | None = None, alpha: str | None = None, base: str | None = None,
        chunk_size: int | None = None, softcap: float | None = None, scale: float | None = None,
        skip_id: int | None = None, teacher_transform: Mapping[str, Any] | None = None, reduction: str = "total",
        backend: str = "auto",
    ) -> None:  # fmt: skip
        """Initialize; the arguments are documented on the class."""
        super().__init__(
            Transform(softcap, scale, skip_id), loss_gamma, normalize, position_weights, dpace_alpha, anchor_row,
            decay_from, reduction=reduction, backend=backend,
        )  # fmt: skip
        self.kind = kind
        self.chunk_size = _checks.checked_size("chunk_size", chunk_size)
        self.confidence = confidence
        self.confidence_weight = confidence_weight
        self.temperature = temperature
        self.teacher = teacher
        self.beta = beta
        self.floor = floor
        self.eta = eta
        self.kl_scale = kl_scale
        self.alpha = alpha
        self.base = base
        self.teacher_transform = teacher_transform
        self._checked_spec()

    @classmethod
    def preset(cls, name: str, **changes: Any) -> DraftDistillationLoss:
        """Construct the loss with the default settings of a trainer's objective.

        ============================  ==============================================================================
        "specforge-dflash"            cross-entropy of ``target_ids``, divided by the sum of the weights; set
                                      ``loss_gamma`` as in the run
        "specforge-dpace"             cross-entropy with D-PACE, divided by the number of sequences; pass
                                      ``num_sequences`` if a sequence may have no valid row
        "specforge-dspark"            0.1 ce + 0.9 l1 + 1.0 BCE of the confidence, the decay from row 0, divided by
                                      the sum of the weights: pass the sum over all ranks as ``total_weight``, and
                                      multiply the loss by the number of ranks if gradients are averaged over ranks
        "speculators-dflash"          cross-entropy of the teacher's argmax, D-PACE from its probability, divided by
                                      the number of valid rows; with ``position_weights="decay"`` the decay from row 1
        "speculators-dspark"          kl + 1.0 BCE of the confidence, the decay from row 0, divided by the number of
                                      valid rows
        ============================  ==============================================================================

        All have ``anchor_row=True``: their blocks include the anchor's row, masked if it predicts nothing. speculators
        divides by the number of valid rows plus 1e-5: ``num_tokens=loss_mask.sum() + 1e-5`` reproduces this exactly.

        Source: specforge 0.2.0, ``algorithms/common/dflash_family_model.py``; speculators 0.9.0,
        ``models/dflash/metrics.py`` and ``models/dspark/metrics.py``, with the defaults of ``train/config/schema.py``.

        Args:
            name: name of a preset.
            changes: arguments of the class that replace the trainer's defaults.

        Returns:
            The loss.

        Raises:
            ValueError: the name is unknown.
        """
        _checks.check_choice("name", name, PRESETS)
        return cls(**{**PRESETS[name], **changes})

    def forward(
        self, logits: Logits, teacher_logits: Logits | None, target_ids: Tensor | None, block_mask: Tensor,
        num_tokens: Count = None, block_size: int | None = None, *, teacher_rows: Tensor | None = None,
        draft_to_target: Tensor | None = None, confidence_logits: Tensor | None = None, num_blocks: Count = None,
        num_sequences: Count = None, total_weight: float | Tensor | None = None,
    ) -> DLLMLossOutput:  # fmt: skip
        """Compute the loss, the acceptance rates and the draft accuracy from logits.

        From records (:class:`LinearLogits`) the logits of both models exist one chunk at a time. The gradient is
        computed in the forward pass, for the rows that are not masked: three matrix products with a frozen head, four
        with a trainable one. Some settings of ``confidence``, ``alpha`` and ``reduction`` take more. The accuracy is
        computed from logits rounded to the compute dtype.

        If each call receives the counts of the whole step, the losses of its micro-batches and ranks add up to the loss
        of the whole step. Packed input without a batch dimension, ``[T, V]`` of both models with every other tensor per
        row ``[T]``, is a batch of one sequence.

        Args:
            logits: the draft's ``[B, T, V]``, or their record. In the ``extra`` of a drafter's Markov head, u is the
                embedding of the previous token. T is blocks * (block_size - 1), or blocks * block_size with
                ``anchor_row``.
            teacher_logits: the target model's ``[B, T, V]`` for the same positions, or their record, a constant. With
                ``teacher_rows`` it may have any number of rows, such as all positions of the sequences from which the
                blocks were drawn. None: no teacher, which ``kind="ce"`` allows.
            target_ids: ``[B, T]`` integers; -100: no target at this position. Used by kind "ce" and by
                ``confidence="target"`` only; otherwise it may be None.
            block_mask: ``[B, T]``, 0 for rows that predict nothing. Fractions are weights. A constant.
            num_tokens: the loss is divided by ``max(num_tokens, 1)``; int or 0-d tensor. None: as described with
                ``normalize``. Used with "tokens" and "rows" only.
            block_size: positions of a block, the anchor included. The weights restart at each block, and accuracy is
                counted per offset. None: each sequence is one block, and no accuracy is counted.
            teacher_rows: ``[B, T]`` int64, the teacher's row that belongs to each of the draft's rows. The teacher's
                rows are numbered through all dimensions but the last. None: the two have the same layout.
            draft_to_target: ``[V]`` integers, for a student with a smaller vocabulary: for each student token the
                teacher's column, all distinct. Offsets such as d2t of EAGLE-3 are converted by ``torch.arange(len(d2t))
                + d2t``. The acceptance rate and the argmax match cover all columns of the teacher. ``target_ids`` are
                ids of the draft's vocabulary. None: both have the same vocabulary.
            confidence_logits: s ``[B, T]`` of the drafter's confidence head, or None. Only the confidence term has a
                gradient for it.
            num_blocks: N with ``normalize="blocks"``, as ``max(n, 1)``; None: the blocks of this call with a valid row.
                With "sequence_blocks" a tensor ``[B]``: the number of blocks with a valid row in each full sequence,
                for calls that hold only a part of each sequence. Not used otherwise.
            num_sequences: N with "sequences" and "sequence_blocks", as ``max(n, 1)``; None: the sequences of this call
                with a valid row. Not used otherwise.
            total_weight: N with "mean", without a minimum: the sum of ``weight_sum`` over the whole step. None: the sum
                of this call. Must not be negative; a negative value on a GPU makes the loss NaN. Not used otherwise.

        Returns:
            :class:`DLLMLossOutput`. ``dllm_loss`` is the loss without the confidence term. ``draft_correct`` is True
            where the draft's argmax is the teacher's argmax, or without a teacher the target. ``acceptance_rate`` is a,
            and ``weight_sum`` the sum of ``w m``. Both metrics cover the teacher's whole vocabulary.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices do not match, T is not a whole number of blocks, or the teacher or the
                targets are needed and None.
        """
        weighting, spec, options = self._checked_weighting(), self._checked_spec(), self._options()
        logits, teacher = TeacherInput.opened(
            logits, options.transform, teacher_logits, teacher_rows, draft_to_target, self.teacher_transform
        )
        if teacher_logits is None:
            _check_none("teacher_logits", teacher_rows=teacher_rows, draft_to_target=draft_to_target)
        rows = self._rows(logits, options)
        counts = Counts(num_tokens, num_blocks, num_sequences, total_weight)
        if rows.packed(block_mask if target_ids is None else target_ids):
            rows, teacher, counts = rows.as_batch(), _as_batch(teacher), counts.as_batch()
            target_ids, block_mask, confidence_logits = map(as_batch, (target_ids, block_mask, confidence_logits))
        rows, targets = _checked_layout(rows, target_ids, block_mask, confidence_logits)
        self._check_required(rows, teacher, spec, target_ids, confidence_logits)
        targets, block_mask, confidence_logits = all_plain(targets, block_mask, confidence_logits)
        counts, block_size = self._checked_counts(counts, block_mask), _checks.checked_size("block_size", block_size)
        call = _Call(
            weighting, self._returns_rows(), rows, targets, block_mask, block_size, counts, self, teacher, spec
        )
        result = call.compute()
        total = result.loss
        if confidence_logits is not None and result.a is not None:
            s = torch.where(result.weights != 0, confidence_logits.to(result.weights.dtype), 0.0)
            learned = F.binary_cross_entropy_with_logits(s, result.a.clamp(0, 1), reduction="none")
            total = total + self.confidence_weight * sum_of_rows(learned, result.divided)
            if result.value is not None:
                result = replaced(result, value=result.value + self.confidence_weight * learned)
        return replaced(call.output(result), total_loss=total)

    def forward_fused(
        self, hidden: Tensor, lm_head_weight: Tensor, teacher_hidden: Tensor | None, target_ids: Tensor | None,
        block_mask: Tensor, num_tokens: Count = None, block_size: int | None = None, lm_head_bias: Tensor | None = None,
        *, teacher_weight: Tensor | None = None, teacher_bias: Tensor | None = None,
        teacher_extra: Extra | None = None, teacher_rows: Tensor | None = None,
        draft_to_target: Tensor | None = None, confidence_logits: Tensor | None = None, num_blocks: Count = None,
        num_sequences: Count = None, total_weight: float | Tensor | None = None, extra: Extra | None = None,
        num_active: int | None = None, logits_dtype: torch.dtype | None = None,
    ) -> DLLMLossOutput:  # fmt: skip
        """Compute :meth:`forward` of two ``LinearLogits(hidden, lm_head_weight, lm_head_bias, extra, ...)``.

        The teacher's are ``teacher_hidden``, ``teacher_weight``, ``teacher_bias`` and ``teacher_extra``. Without
        ``teacher_weight`` it shares ``lm_head_weight`` and ``lm_head_bias``, but not ``extra``.
        """
        logits = LinearLogits(hidden, lm_head_weight, lm_head_bias, extra, logits_dtype, num_active=num_active)
        teacher, teacher_head = None, {
            "teacher_weight": teacher_weight, "teacher_bias": teacher_bias, "teacher_extra": teacher_extra,
        }  # fmt: skip
        if teacher_hidden is None:
            _check_none("teacher_hidden", teacher_rows=teacher_rows, draft_to_target=draft_to_target, **teacher_head)
        else:
            teacher = head_of_teacher(logits, teacher_hidden, *teacher_head.values())
        return DraftDistillationLoss.forward(
            self, logits, teacher, target_ids, block_mask, num_tokens, block_size, teacher_rows=teacher_rows,
            draft_to_target=draft_to_target, confidence_logits=confidence_logits, num_blocks=num_blocks,
            num_sequences=num_sequences, total_weight=total_weight,
        )  # fmt: skip

    def _checked_spec(self) -> DivergenceSpec:
        """Return the spec of the kinds and check the other settings; attributes may be reassigned between calls."""
        spec = checked_spec(self.kind, teacher=self.teacher, **{name: getattr(self, name) for name in OPTIONS})
        _checks.check_choice("confidence", self.confidence, CONFIDENCE)
        _checks.check_not_negative("confidence_weight", self.confidence_weight)
        _checks.checked_temperature(self.temperature)
        return spec

    def _check_required(
        self, rows: ModelOutput, teacher: TeacherInput, spec: DivergenceSpec, target_ids: Tensor | None,
        confidence_logits: Tensor | None,
    ) -> None:  # fmt: skip
        """Raise ValueError if targets or a teacher are required by the settings and not given."""
        confidence = None if self._weighting == "decay" else self.confidence
        needs_targets = [f"kind={self.kind!r}"] if spec.wants_targets else []
        needs_targets += [f"confidence={confidence!r}"] if confidence == "target" else []
        if target_ids is None and needs_targets:
            raise ValueError(f"target_ids must be given for {' and '.join(needs_targets)}, got None")
        if teacher.logits is not None:
            return
        needs_teacher = [] if all(term.kind == "ce" for term in spec.terms) else [f"kind={self.kind!r}"]
        needs_teacher += [f"confidence={confidence!r}"] if confidence in ("teacher", "acceptance") else []
        needs_teacher += [] if confidence_logits is None else ["confidence_logits"]
        needs_teacher += [] if self.temperature == 1 else [f"temperature={self.temperature}"]
        if needs_teacher:
            name = "teacher_logits" if rows.stored else "teacher_hidden"
            raise ValueError(f"{name} must be given for {' and '.join(needs_teacher)}, got None")


def _check_none(teacher: str, **others: Any) -> None:
    """Raise if one of the other arguments is given without the teacher."""
    if names := [name for name, value in others.items() if value is not None]:
        raise ValueError(f"{teacher} must be given with {', '.join(names)}, got None")


def _as_batch(teacher: TeacherInput) -> TeacherInput:
    """Return the teacher of packed rows with a batch dimension."""
    logits = map_rows(teacher.logits, lambda t: as_batch(t, 2))
    return replaced(teacher, logits=logits, rows=as_batch(teacher.rows))


def _checked_layout(
    rows: ModelOutput, target_ids: Tensor | None, block_mask: Tensor, confidence_logits: Tensor | None
) -> tuple[ModelOutput, Tensor]:
    """Check the rows and the per-row arguments; return the rows, and the targets, -100 everywhere if there are none."""
    if target_ids is None:  # the mask gives the row shape
        rows = replaced(rows, names=replaced(rows.names, targets="block_mask"))
        _checks.check_tensor("block_mask", block_mask)
        _checks.check_mask("block_mask", block_mask, block_mask.shape)
        target_ids = torch.full_like(block_mask, IGNORE, dtype=torch.int64)
    rows = rows.checked(target_ids)
    _checks.check_masks_like("target_ids", target_ids, block_mask=block_mask)
    _checks.check_constant("block_mask", block_mask)
    rows.check_targets(target_ids, block_mask)
    if confidence_logits is not None:
        _checks.check_like("block_mask", block_mask, _checks.FLOAT_DTYPES, confidence_logits=confidence_logits)
    return rows, target_ids


@dataclass(frozen=True)
class _Call(DraftCall):
    """One call with a teacher."""

    loss: DraftDistillationLoss
    teacher: TeacherInput
    spec: DivergenceSpec

    @property
    def confidence(self) -> str | None:
        """Kind of confidence for D-PACE, or None with the decay."""
        return None if self.weighting.decays else self.loss.confidence

    def compute(self) -> DraftResult:
        """Compute the weighted sum, or per-row divergences if rows are requested, or with D-PACE.

        D-PACE may compute its weights from the divergences. It also gives the weight 0 to valid rows after the end of a
        block. A weighted sum would not read them, so that they would count as misses.
        """
        if self.teacher.logits is None:
            return self.cross_entropy(sum(term.coefficient for term in self.spec.terms))
        if self.returns_rows or self.confidence is not None:
            return self._rows()
        weights, divided = self.weights()
        out = self._divergence(self._compared(divided), per_row=False)
        return DraftResult(out.loss, weights, divided, out.agree, out.acceptance_rate)

    def _rows(self) -> DraftResult:
        """Compute the divergence per row, then the weights, which may depend on it."""
        if self.loss.alpha == "mean" and self.confidence is None:
            return self._rows_with_weighted_mean()
        compared = self._compared((self.block_mask != 0).to(self.rows.accum_dtype))  # the rows that are read
        each = self._divergence(compared, per_row=True)
        weights, divided = self.weights(self._confidence(each, compared))
        return DraftResult(
            sum_of_rows(each.loss, divided), weights, divided, each.agree, each.acceptance_rate, each.loss
        )

    def _rows_with_weighted_mean(self) -> DraftResult:
        """Compute the divergence per row with known weights, which also weight the mean of a."""
        weights, divided = self.weights(None)
        each = self._divergence(self._compared(divided), per_row=True)
        value = each.loss / torch.where(divided != 0, divided, 1.0)  # each.loss is 0 if divided is 0
        return DraftResult(each.loss.sum(), weights, divided, each.agree, each.acceptance_rate, value)

    def _confidence(self, each: Divergence, compared: Compared) -> Tensor | None:
        """Return a, or the draft's probability of a token, taken from the divergence if it is the NLL of the token."""
        (term, *others), untempered = self.spec.terms, self.loss.temperature == 1
        if self.confidence is None:
            return None
        if self.confidence == "acceptance":
            return each.acceptance_rate.clamp(0, 1)
        draft_columns = self.loss.teacher == "draft"
        if term.kind == "teacher_ce" and self.confidence == "teacher" and not others and untempered and draft_columns:
            return torch.exp(-each.value / term.coefficient)
        if self.confidence == "target":
            with torch.no_grad():  # the draft's probability of the target tokens
                return torch.exp(-self.rows.per_row(self.target_ids, self.block_mask).nll)
        with torch.no_grad():
            return torch.exp(-divergence_unchecked(*compared.under(TEACHER_CE, 1.0, False)).value)

    def _compared(self, weights: Tensor) -> Compared:
        """Check the teacher beside rows with these weights."""
        return self.rows.compared(self.teacher, self.target_ids, weights)

    def _divergence(self, compared: Compared, *, per_row: bool) -> Divergence:
        """Compute the divergence with the settings of the loss."""
        return divergence_unchecked(*compared.under(self.spec, float(self.loss.temperature), per_row))
