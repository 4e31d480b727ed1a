"""Distillation of a block drafter: the divergence of its distributions to the target model's, weighed as DFlash weighs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dllm_kernels.base import _checks
from dllm_kernels.base._divergence import Recipe, checked_recipe
from dllm_kernels.base._plain import all_plain
from dllm_kernels.losses._blocks import Counts, rows_of_block
from dllm_kernels.losses._common import DLLMLossOutput, check_masks, single_loss, sum_of_rows, weighted_rows
from dllm_kernels.losses._draft import DraftLoss
from dllm_kernels.losses._rows import HIDDEN, LOGITS, Rows
from dllm_kernels.ops.dpace_weights import check_choice
from dllm_kernels.rows._results import Divergence

OPTIONS = ("beta", "floor", "eta", "kl_scale", "alpha", "base")  # of single kinds
CONFIDENCE = ("target", "teacher", "acceptance")
# What trainers of block drafters minimise, in their defaults. Their blocks hold a row for the anchor, which is masked where it
# predicts nothing.
PRESETS: dict[str, dict[str, Any]] = {
    "specforge-dflash": {"kind": "ce", "loss_gamma": None, "normalize": "mean", "anchor_row": True, "decay_from": 1},
    "specforge-dpace": {"kind": "ce", "position_weights": "dpace", "normalize": "sequences", "anchor_row": True},
    "specforge-dspark": {
        "kind": {"ce": 0.1, "l1": 0.9}, "loss_gamma": None, "normalize": "mean", "anchor_row": True,
    },
    "speculators-dflash": {
        "kind": "teacher_ce", "position_weights": "dpace", "confidence": "teacher", "loss_gamma": 4.0, "normalize": "rows",
        "anchor_row": True, "decay_from": 1,
    },
    "speculators-dspark": {"kind": "kl", "loss_gamma": 4.0, "normalize": "rows", "anchor_row": True},
}  # fmt: skip


class _Teacher(NamedTuple):
    """The target model's logits or hidden states, what the caller calls them, and what the op takes with them."""

    name: str
    x: torch.Tensor | None
    options: dict[str, Any]

    @classmethod
    def of(cls, name: str, x: torch.Tensor | None, **options: Any) -> _Teacher:
        """The options that are None are left out."""
        given = {option: value for option, value in options.items() if value is not None}
        if x is None and given:
            raise ValueError(f"{name} must be given to go with {', '.join(given)}, got None")
        return cls(name, x, given)

    def check(self, rows: Rows, targets: torch.Tensor) -> None:
        """Check that the draft's head, where there is no other, takes the teacher's hidden states; the op checks the rest."""
        if self.x is not None and rows.weight is not None and "teacher_weight" not in self.options:
            _checks.check_rows(rows.names._replace(rows=self.name), self.x, targets, rows.weight, rows.bias)


class _Found(NamedTuple):
    """What a call found.

    Attributes:
        loss: the divergence's, 0-d.
        weights: what the rows weigh before the denominator.
        shares: what they weigh over it.
        correct: what is drafted right.
        a: the acceptance rates, where there is a teacher.
        value: each row's divergence, differentiable, where the rows are asked for.
    """

    loss: torch.Tensor
    weights: torch.Tensor
    shares: torch.Tensor
    correct: torch.Tensor
    a: torch.Tensor | None = None
    value: torch.Tensor | None = None


class DraftDistillationLoss(DraftLoss):
    r"""Divergence of a block drafter to its target model, each position weighed by how much of its block depends on it.

    .. math:: \text{loss} = \frac{1}{N} \sum_i w_i m_i \left( D(p_i, q_i) + c \, \text{BCE}(\sigma(s_i), a_i) \right),
        \qquad a_i = \sum_v \min(p_{iv}, q_{iv})

    p is the draft's distribution, q the target model's, the teacher's, which is a constant. a is the probability that
    speculative sampling accepts the drafted token. The second part is there where the drafter has a confidence head, whose
    logits are s: it learns a, a constant here. Rows with ``block_mask`` 0 are not read, the teacher's neither.

    From hidden states neither model's logits are ever whole in memory, and the gradient is made in the forward pass: three
    matrix products where both share a frozen head.

    ``DraftDistillationLoss.preset(name)`` has the settings of trainers' objectives: "specforge-dflash", "specforge-dpace",
    "specforge-dspark", "speculators-dflash" and "speculators-dspark", each in its trainer's defaults. What a trainer divides
    by that no single call knows, it is given: see :meth:`preset`.

    Source: DSpark for the sum of cross-entropy, L1 and confidence; arXiv:2602.23881 for losses of the acceptance rate; the
    DFlash paper, eq. 4, and D-PACE, arXiv 2605.18810, for the weights.

    Args:
        kind: D, a kind of :func:`divergence` or a dict of kinds and coefficients: "kl", "rkl", "jsd", "tv", "l1", "nla", "lk",
            "soft_ce", "teacher_ce" and "ce", the cross-entropy of ``target_ids``, which alone needs no teacher.
        loss_gamma: gamma of the decay, ``w = e^(-(k - 1) / gamma)`` of the k-th row of a block; None weighs all alike. The
            decay alone has one.
        normalize: what N is. "tokens": ``num_tokens``. "rows": the same, or without it the sum of ``block_mask``. "mean": the
            sum of the weights, ``total_weight``, or without it that of this call (plus 1e-6). "blocks": the blocks with any
            valid row, one whose ``block_mask`` is not 0. "sequences": the sequences with any. "sequence_blocks": each
            sequence's sum is divided by its own valid blocks, and their sum by the sequences with any.
        position_weights: "decay"; or "dpace", "prefix" or "continuation": S, C or S / C of :func:`dpace_weights`, under any of
            its names.
        dpace_alpha: the least smoothed confidence of :func:`dpace_weights`, in [0, 1].
        confidence: what D-PACE takes for the draft's confidence: its probability of the "target" token, of the "teacher"'s
            most likely one, or a, the "acceptance" rate. The last is found on the way; the first costs one product more from
            hidden states, the second two, but nothing where ``kind`` is "teacher_ce".
        anchor_row: a block has ``block_size`` rows and not one less, the first of them the anchor's.
        decay_from: the row of its block, counted from 0, that the decay begins at; rows before it weigh nothing. 1 with
            ``anchor_row`` where the anchor's row is there but predicts nothing. The decay alone has one.
        confidence_weight: c, of the confidence's part.
        temperature: T > 0, by which the logits of both are divided; D counts T^2 times then, and a is that of the tempered
            distributions.
        beta: as in :func:`divergence`, of kind "jsd".
        floor: likewise, of "nla".
        eta: likewise, of "lk".
        kl_scale: likewise, of "lk".
        alpha: likewise, of "lk": "row" or "mean". With D-PACE's weights all valid rows count alike in the mean.
        base: likewise, of "lk": "kl" or "soft_ce".
        chunk_size: rows of logits that exist at a time in :meth:`forward_fused`; None chooses.
        softcap: as in :class:`MDLMCrossEntropyLoss`, of the draft's logits and, without ``teacher_transform``, the teacher's.
        scale: likewise.
        skip_id: likewise.
        teacher_transform: ``{"softcap": ..., "scale": ..., "skip_id": ...}`` of the teacher's logits; None: the draft's.
        reduction: as in :class:`MDLMCrossEntropyLoss`. "none" takes a product more from hidden states where the head trains.
        backend: "auto", "triton" or "torch".

    Raises:
        TypeError: a setting of another type.
        ValueError: a setting out of range, an unknown ``kind``, ``normalize``, ``position_weights`` or ``confidence``, or an
            option that belongs to none of the kinds. All also at a call, for attributes assigned since.
    """

    def __init__(
        self,
        kind: str | Mapping[str, float] = "kl",
        loss_gamma: float | None = 7.0,
        *,
        normalize: str = "tokens",
        position_weights: str = "decay",
        dpace_alpha: float = 0.5,
        confidence: str = "target",
        anchor_row: bool = False,
        decay_from: int = 0,
        confidence_weight: float = 1.0,
        temperature: float = 1.0,
        beta: float | None = None,
        floor: float | None = None,
        eta: float | None = None,
        kl_scale: float | None = None,
        alpha: str | None = None,
        base: str | None = None,
        chunk_size: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        skip_id: int | None = None,
        teacher_transform: Mapping[str, Any] | None = None,
        reduction: str = "total",
        backend: str = "auto",
    ) -> None:
        """The arguments are described with the class."""
        super().__init__(
            loss_gamma, chunk_size, normalize, position_weights=position_weights, dpace_alpha=dpace_alpha,
            anchor_row=anchor_row, decay_from=decay_from, softcap=softcap, scale=scale, skip_id=skip_id,
            reduction=reduction, backend=backend,
        )  # fmt: skip
        self.kind = kind
        self.confidence = confidence
        self.confidence_weight = confidence_weight
        self.temperature = temperature
        self.beta = beta
        self.floor = floor
        self.eta = eta
        self.kl_scale = kl_scale
        self.alpha = alpha
        self.base = base
        self.teacher_transform = teacher_transform
        self._checked_recipe()

    @classmethod
    def preset(cls, name: str, **changes: Any) -> DraftDistillationLoss:
        """The loss with the settings of a trainer's objective.

        ============================  ======================================================================================
        "specforge-dflash"            cross-entropy of ``target_ids`` over the sum of the weights; ``loss_gamma`` as the run's
        "specforge-dpace"             the same with D-PACE, over the sequences; give ``num_sequences`` where one may have none
        "specforge-dspark"            0.1 ce + 0.9 l1 + 1.0 BCE of the confidence, the decay from row 0, over the sum of the
                                      weights: give ``total_weight``, that of all ranks, and multiply by their number where
                                      gradients are averaged over them
        "speculators-dflash"          cross-entropy at the teacher's argmax, D-PACE of its probability, over the valid rows;
                                      with ``position_weights="decay"`` the decay from row 1 on
        "speculators-dspark"          kl + 1.0 BCE of the confidence, the decay from row 0, over the valid rows
        ============================  ======================================================================================

        All have ``anchor_row=True``: their blocks hold the anchor's row, and mask it where it predicts nothing. speculators
        adds 1e-5 to the number of valid rows: ``num_tokens=loss_mask.sum() + 1e-5`` is its denominator to the bit.

        Source: specforge 0.2.0, ``algorithms/common/dflash_family_model.py``; speculators 0.9.0, ``models/dflash/metrics.py``
        and ``models/dspark/metrics.py``, with the defaults of ``train/config/schema.py``.

        Args:
            name: one of these.
            changes: arguments of the class that are to be others than the trainer's defaults.

        Returns:
            The loss.

        Raises:
            ValueError: an unknown name.
        """
        check_choice("name", name, PRESETS)
        return cls(**{**PRESETS[name], **changes})

    def forward(
        self,
        logits: torch.Tensor,
        teacher_logits: torch.Tensor | None,
        target_ids: torch.Tensor | None,
        block_mask: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        block_size: int | None = None,
        *,
        teacher_rows: torch.Tensor | None = None,
        draft_to_target: torch.Tensor | None = None,
        confidence_logits: torch.Tensor | None = None,
        num_blocks: int | torch.Tensor | None = None,
        num_sequences: int | torch.Tensor | None = None,
        total_weight: float | torch.Tensor | None = None,
    ) -> DLLMLossOutput:
        """Compute the loss, a and the draft accuracy from logits.

        Given the counts of the whole step, the losses of its micro-batches and ranks add up to that of the whole.

        Args:
            logits: the draft's ``[B, T, V]``, T = blocks * (block_size - 1), or blocks * block_size with ``anchor_row``.
            teacher_logits: the target model's ``[B, T, V]`` for the same positions, a constant; with ``teacher_rows`` of any
                number of rows. None: there is no teacher, which ``kind="ce"`` allows.
            target_ids: ``[B, T]`` integers; -100: no target. None where there are none; they are used by kind "ce" and as
                D-PACE's confidence alone.
            block_mask: ``[B, T]``, 0 where there is nothing to predict; fractions are kept as weights, constant ones.
            num_tokens: divides the sum, as ``max(n, 1)``; int or 0-d tensor. None: the sum itself, with
                ``normalize="rows"`` the sum of ``block_mask``. Used with "tokens" and "rows" alone.
            block_size: positions of a block, the anchor included: the weights restart with each block, and accuracy is
                counted at each offset. None: one block a sequence, no accuracy.
            teacher_rows: ``[B, T]`` int64, which row of the teacher's, counted through all its dimensions but the last,
                belongs to each of the draft's; None: the same.
            draft_to_target: ``[V]`` int64, the teacher's columns of a draft with a smaller vocabulary, over which the
                teacher is normalised; ``target_ids`` are then the draft's.
            confidence_logits: s ``[B, T]`` of the drafter's confidence head, or None. Its gradient is of the confidence's
                part alone.
            num_blocks: divides the sum likewise with ``normalize="blocks"``; None: the valid blocks here. With
                "sequence_blocks" ``[B]``, the valid blocks of each sequence, for calls that have a part of each. Not used
                with others.
            num_sequences: divides the sum likewise with "sequences" and "sequence_blocks"; None: the sequences with any
                valid row here. Not used with others.
            total_weight: divides the sum with "mean", as it is: ``weight_sum`` of the whole step. None: that of this call.
                Not used with others.

        Returns:
            :class:`DLLMLossOutput`: ``dllm_loss`` is the loss without the confidence's part, ``draft_correct`` where the
            draft's argmax is the teacher's (without a teacher, the target), ``acceptance_rate`` a, and ``weight_sum`` the sum
            of ``w m``.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices that do not fit, T is no whole number of blocks, or the teacher or the
                targets are not there and needed.
        """
        rows = Rows(_names(LOGITS, target_ids), self._options(), logits)
        teacher = _Teacher.of(
            "teacher_logits", teacher_logits, teacher_rows=teacher_rows, draft_to_target=draft_to_target
        )
        counts = Counts(num_tokens, num_blocks, num_sequences, total_weight)
        return self._loss(rows, teacher, target_ids, block_mask, block_size, counts, confidence_logits)

    def forward_fused(
        self,
        hidden: torch.Tensor,
        lm_head_weight: torch.Tensor,
        teacher_hidden: torch.Tensor | None,
        target_ids: torch.Tensor | None,
        block_mask: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        block_size: int | None = None,
        lm_head_bias: torch.Tensor | None = None,
        *,
        teacher_weight: torch.Tensor | None = None,
        teacher_bias: torch.Tensor | None = None,
        teacher_extra: _checks.Extra | None = None,
        teacher_rows: torch.Tensor | None = None,
        draft_to_target: torch.Tensor | None = None,
        confidence_logits: torch.Tensor | None = None,
        num_blocks: int | torch.Tensor | None = None,
        num_sequences: int | torch.Tensor | None = None,
        total_weight: float | torch.Tensor | None = None,
        extra: _checks.Extra | None = None,
    ) -> DLLMLossOutput:
        """Compute the same from hidden states and LM heads; the logits of both exist one chunk at a time.

        The gradient is made in the forward pass, on the active rows only: three matrix products with a frozen head, four with
        a trainable one.

        Args:
            hidden: the draft's ``[B, T, D]``.
            lm_head_weight: its head ``[V, D]``.
            teacher_hidden: the target model's ``[B, T, D']``, a constant; with ``teacher_rows`` of any number of rows, such as
                all positions of the sequences that the blocks were drawn from. None as in :meth:`forward`.
            target_ids: as in :meth:`forward`.
            block_mask: as in :meth:`forward`.
            num_tokens: as in :meth:`forward`.
            block_size: as in :meth:`forward`.
            lm_head_bias: ``[V]`` or None.
            teacher_weight: the target model's head ``[V, D']``, a constant; None: ``lm_head_weight``, with its bias, but without
                ``extra``.
            teacher_bias: ``[V]`` of the teacher's own head, or None.
            teacher_extra: the second part of the teacher's head, (u for each row of ``teacher_hidden``, U ``[V, r]``), a
                constant, or None.
            teacher_rows: as in :meth:`forward`; the rows are read where they are.
            draft_to_target: as in :meth:`forward`.
            confidence_logits: as in :meth:`forward`.
            num_blocks: as in :meth:`forward`.
            num_sequences: as in :meth:`forward`.
            total_weight: as in :meth:`forward`.
            extra: the second part of the draft's head, (u ``[B, T, r]``, U ``[V, r]``), or None: ``U u`` is added to its
                logits, as a Markov head adds it, u being a row of a table for the token before.

        Returns:
            :class:`DLLMLossOutput` as in :meth:`forward`. Accuracy is judged on logits rounded to the compute dtype.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices that do not fit, T is no whole number of blocks, or the teacher or the
                targets are not there and needed.
        """
        names, options = _names(HIDDEN, target_ids), self._options(chunk_size=self.chunk_size)
        rows = Rows(names, options, hidden, lm_head_weight, lm_head_bias, extra)
        teacher = _Teacher.of(
            "teacher_hidden", teacher_hidden, teacher_rows=teacher_rows, draft_to_target=draft_to_target,
            teacher_weight=teacher_weight, teacher_bias=teacher_bias, teacher_extra=teacher_extra,
        )  # fmt: skip
        counts = Counts(num_tokens, num_blocks, num_sequences, total_weight)
        return self._loss(rows, teacher, target_ids, block_mask, block_size, counts, confidence_logits)

    def _loss(
        self,
        rows: Rows,
        teacher: _Teacher,
        target_ids: torch.Tensor | None,
        block_mask: torch.Tensor,
        block_size: int | None,
        counts: Counts,
        confidence_logits: torch.Tensor | None,
    ) -> DLLMLossOutput:
        self._check_settings()
        recipe = self._checked_recipe()
        targets = _check_layout(rows, target_ids, block_mask, confidence_logits)
        teacher.check(rows, targets)
        self._check_there(recipe, teacher, target_ids, confidence_logits)
        if block_size is not None:
            _checks.check_positive_int("block_size", block_size)
        target_ids, block_mask, confidence_logits = all_plain(target_ids, block_mask, confidence_logits)
        counts = Counts(*all_plain(*counts))
        counts.check(self.normalize, block_mask)
        call = _Call(self, rows, teacher, recipe, target_ids, block_mask, block_size, counts)
        gives_rows = self._gives_rows()
        found = call.found(summed=not gives_rows)
        total, value = found.loss, found.value
        if confidence_logits is not None and found.a is not None:
            learned = _confidence_losses(confidence_logits, found.a, found.weights)
            total = total + self.confidence_weight * sum_of_rows(learned, found.shares)
            value = None if value is None else value + self.confidence_weight * learned
        row_losses = None if value is None or not gives_rows else weighted_rows(value, found.weights)
        correct, a, mask = found.correct, found.a, block_mask
        if self.position_weights == "decay" and self.decay_from:
            mask = torch.where(call.predicts, mask, 0)
            correct, a = correct & (mask != 0), None if a is None else torch.where(mask != 0, a, 0.0)
        hits, count = self._draft_acc_per_pos(correct, mask, self._with_anchor(block_size))
        return single_loss(found.loss, found.weights, row_losses)._replace(
            total_loss=total, draft_correct_per_pos=hits, draft_count_per_pos=count, draft_correct=correct,
            acceptance_rate=a,
        )  # fmt: skip

    def _checked_recipe(self) -> Recipe:
        """The kinds, from attributes that may have been assigned since; the rest of them checked."""
        recipe = checked_recipe(
            self.kind, alpha=self.alpha, base=self.base, beta=self.beta, floor=self.floor, eta=self.eta,
            kl_scale=self.kl_scale,
        )  # fmt: skip
        check_choice("confidence", self.confidence, CONFIDENCE)
        _checks.check_number("temperature", self.temperature)
        _checks.check_factor("temperature", self.temperature)
        _checks.check_number("confidence_weight", self.confidence_weight)
        return recipe

    def _check_there(
        self, recipe: Recipe, teacher: _Teacher, target_ids: torch.Tensor | None, confidence_logits: torch.Tensor | None
    ) -> None:
        """Raise where what the settings need is not given."""
        confidence = None if self.position_weights == "decay" else self.confidence
        needs_targets = [f"kind={self.kind!r}"] if recipe.wants_targets else []
        needs_targets += [f"confidence={confidence!r}"] if confidence == "target" else []
        if target_ids is None and needs_targets:
            raise ValueError(f"target_ids must be given for {' and '.join(needs_targets)}, got None")
        if teacher.x is not None:
            return
        needs_teacher = [] if all(part.kind == "ce" for part in recipe.parts) else [f"kind={self.kind!r}"]
        needs_teacher += [f"confidence={confidence!r}"] if confidence in ("teacher", "acceptance") else []
        needs_teacher += [] if confidence_logits is None else ["confidence_logits"]
        needs_teacher += [] if self.temperature == 1 else [f"temperature={self.temperature}"]
        if needs_teacher:
            raise ValueError(f"{teacher.name} must be given for {' and '.join(needs_teacher)}, got None")


def _check_layout(
    rows: Rows, target_ids: torch.Tensor | None, block_mask: torch.Tensor, confidence_logits: torch.Tensor | None
) -> torch.Tensor:
    """Check the rows and what has an entry for each; returns the targets, or where there are none -100 everywhere."""
    if target_ids is None:
        _checks.check_mask("block_mask", block_mask, getattr(block_mask, "shape", ()))
        target_ids = torch.full_like(block_mask, -100, dtype=torch.int64)
    rows.check(target_ids)
    check_masks(target_ids, block_mask=block_mask)
    _checks.check_constant("block_mask", block_mask)
    if confidence_logits is not None:
        _checks.check_float("confidence_logits", confidence_logits)
        _checks.check_shape("confidence_logits", confidence_logits, block_mask.shape, "that of block_mask")
        _checks.check_same_device("block_mask", block_mask, confidence_logits=confidence_logits)
    return target_ids


def _names(names: _checks.Names, target_ids: torch.Tensor | None) -> _checks.Names:
    """Where there are no targets, the mask says how many rows there are."""
    return names._replace(targets="block_mask") if target_ids is None else names


def _confidence_losses(confidence_logits: torch.Tensor, a: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``BCE(sigmoid(s), a)`` of each row; one without weight is not looked at."""
    s = torch.where(weights != 0, confidence_logits.to(weights.dtype), 0.0)
    return F.binary_cross_entropy_with_logits(s, a.clamp(0, 1), reduction="none")


@dataclass(frozen=True)
class _Call:
    """One call, its arguments checked."""

    settings: DraftDistillationLoss
    rows: Rows
    teacher: _Teacher
    recipe: Recipe
    target_ids: torch.Tensor | None
    block_mask: torch.Tensor
    block_size: int | None
    counts: Counts

    @property
    def mask(self) -> torch.Tensor:
        """In the dtype of the weights."""
        return self.block_mask.detach().to(self.rows.acc)

    @property
    def predicts(self) -> torch.Tensor:
        """``[T]``, which rows predict anything: not those before the decay, which weigh nothing and need not be read."""
        T = self.block_mask.shape[1]
        row = torch.arange(T, device=self.block_mask.device) % rows_of_block(
            T, self.block_size, self.settings.anchor_row
        )
        return row >= self.settings.decay_from

    @property
    def confidence(self) -> str | None:
        """What D-PACE asks for, None with the decay."""
        return None if self.settings.position_weights == "decay" else self.settings.confidence

    def found(self, summed: bool) -> _Found:
        """The weighted sum, or where that is too late the divergence of each row."""
        if self.teacher.x is None:
            return self._cross_entropy(summed)
        alike = (
            self.settings.alpha == "mean" and self.confidence is not None
        )  # in the mean of a, whatever the rows weigh
        if not summed or alike or self.confidence in ("teacher", "acceptance"):
            return self._rows()
        q = None if self.confidence is None else self._of_targets()
        weights, shares = self._weights(q)
        out = self._divergence(shares)
        return _Found(out.loss, weights, shares, out.agree, out.alpha)

    def _cross_entropy(self, summed: bool) -> _Found:
        """Of the targets, without a teacher: what DFlash minimises."""
        assert self.target_ids is not None
        coefficient = sum(part.coefficient for part in self.recipe.parts)
        if summed and self.confidence is None:
            weights, shares = self._weights(None)
            out = self.rows.weighted(self.target_ids, coefficient * shares, active=self.block_mask, with_correct=True)
            assert out.correct is not None
            return _Found(out.loss, weights, shares, out.correct)
        each = self.rows.per_row(self.target_ids, self.block_mask, with_correct=True)
        weights, shares = self._weights(torch.exp(-each.nll.detach()))
        assert each.correct is not None
        value = coefficient * each.nll
        return _Found(sum_of_rows(value, shares), weights, shares, each.correct, value=value)

    def _rows(self) -> _Found:
        """The divergence of each row, whose weights may be made of it."""
        if self.settings.alpha == "mean" and self.confidence is None:
            return self._rows_beside_their_mean()
        each = self._divergence(self._on, reduction="none")
        weights, shares = self._weights(self._confidence(each))
        return _Found(sum_of_rows(each.loss, shares), weights, shares, each.agree, each.alpha, each.loss)

    def _rows_beside_their_mean(self) -> _Found:
        """The same where the mean of a is that of rows whose weights are known, as it is for their sum."""
        weights, shares = self._weights(None)
        each = self._divergence(shares, reduction="none")
        value = each.loss / torch.where(shares != 0, shares, 1.0)  # each.loss is 0 there
        return _Found(each.loss.sum(), weights, shares, each.agree, each.alpha, value)

    @property
    def _on(self) -> torch.Tensor:
        """1 for every row that is read."""
        return (self.block_mask != 0).to(self.rows.acc)

    def _confidence(self, each: Divergence) -> torch.Tensor | None:
        """a, or the draft's probability of a token: where the divergence is that token's NLL, it is there already."""
        (part, *others), untempered = self.recipe.parts, self.settings.temperature == 1
        if self.confidence is None:
            return None
        if self.confidence == "acceptance":
            return each.alpha.clamp(0, 1)
        if part.kind == "teacher_ce" and self.confidence == "teacher" and not others and untempered:
            return torch.exp(-each.value / part.coefficient)
        if self.confidence == "target":
            return self._of_targets()
        asked = {"kind": "teacher_ce", "temperature": 1.0, **dict.fromkeys(OPTIONS)}
        with torch.no_grad():
            return torch.exp(-self._divergence(self._on, **asked).value)

    def _of_targets(self) -> torch.Tensor:
        """The draft's probability of the target tokens."""
        assert self.target_ids is not None
        with torch.no_grad():
            return torch.exp(-self.rows.per_row(self.target_ids, self.block_mask).nll)

    def _weights(self, q: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What the rows weigh, before and over the denominator."""
        weights = self.settings._row_weights(self.mask, self.block_size, q)
        return weights, self.settings._normalized(weights, self.mask, self.block_size, self.counts)

    def _divergence(self, weights: torch.Tensor, **changes: Any) -> Divergence:
        """Of the active rows; ``changes`` to what is asked for."""
        assert self.teacher.x is not None
        asked = {name: getattr(self.settings, name) for name in ("kind", "temperature", "teacher_transform", *OPTIONS)}
        asked |= self.teacher.options | changes
        if self.recipe.wants_targets and "kind" not in changes:
            asked["targets"] = self.target_ids
        return self.rows.divergence(self.teacher.x, weights, **asked)
