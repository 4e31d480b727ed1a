"""Shared parts of the losses of drafted blocks: row weights, denominators, accuracy per offset."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels._utils import _checks
from dllm_kernels._utils._dtypes import accum_dtype
from dllm_kernels._utils._named import replaced
from dllm_kernels._utils._plain import all_plain, readable_without_sync
from dllm_kernels._utils._target_range import first_true
from dllm_kernels.losses import _common
from dllm_kernels.losses._base import TransformedLoss
from dllm_kernels.losses._common import Count, DLLMLossOutput, check_counts, divide, sum_of_rows
from dllm_kernels.losses._model_output import ModelOutput
from dllm_kernels.ops.dpace_weights import VARIANTS, weights_of_blocks

PAPER_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # block size: gamma, the DFlash paper, appendix A.1
POSITION_WEIGHTS = ("decay", *VARIANTS)
# A loss of the same settings under the names of SpecForge and NeMo AutoModel: loss_type -> position_weights.
LOSS_TYPES = {"dflash": "decay", **{name: name for name in VARIANTS}}
MEAN_EPS = 1e-6  # added to the sum of the weights that divides a mean
NORMALIZE = ("tokens", "rows", "mean", "blocks", "sequences", "sequence_blocks")


class Counts(NamedTuple):
    """Normalization counts for the whole step. None: counted from this call.

    ``blocks`` is ``[B]`` with "sequence_blocks". ``weight`` is the sum of the weights and has no minimum.
    """

    tokens: Count
    blocks: Count
    sequences: Count
    weight: float | Tensor | None = None

    def as_batch(self) -> Counts:
        """Return the counts of packed rows as those of a batch of one sequence."""
        return replaced(self, blocks=_common.as_batch(self.blocks, 0))


def rows_of_block(T: int, block_size: int | None, anchor_row: bool = False) -> int:
    """Return the rows per block of T rows; T itself if ``block_size`` is None.

    Raises:
        ValueError: T is not a whole number of blocks.
    """
    if block_size is None:
        return max(T, 1)
    rows = block_size if anchor_row else block_size - 1
    if T % max(rows, 1) != 0 or (rows == 0 and T > 0):
        of = "block_size" if anchor_row else "block_size - 1"
        raise ValueError(
            f"T must be a multiple of {of} for a whole number of blocks, got T={T} and block_size={block_size}"
        )
    return max(rows, 1)


def size_of_blocks(name: str, blocks: Tensor, block_size: int | None, anchor_row: bool = False) -> int:
    """Return the ``block_size`` of rows ``[B, blocks, k]``: k + 1, or k with ``anchor_row``.

    Raises:
        TypeError: ``block_size`` is not an int.
        ValueError: ``block_size`` is another number.
    """
    if block_size is not None:
        _checks.check_positive_int("block_size", block_size)
    k = blocks.shape[2]
    size = k if anchor_row else k + 1
    if block_size is not None and block_size != size:
        rows = "block_size" if anchor_row else "block_size - 1"
        raise ValueError(
            f"block_size must be {size} for {name} [B, blocks, k] = {tuple(blocks.shape)}, because a block has {rows} "
            f"rows with anchor_row={anchor_row}, got {block_size}"
        )
    return size


def in_blocks(t: Tensor, rows: int) -> Tensor:
    """Reshape ``[B, T]`` to ``[B, T / rows, rows]``."""
    return t.reshape(t.shape[0], t.shape[1] // rows, rows)


def _of_rows(blocks: Tensor, rows: int) -> Tensor:
    """Repeat the value of each block ``[B, blocks]`` for its rows, ``[B, blocks * rows]``."""
    return blocks.unsqueeze(2).expand(*blocks.shape, rows).flatten(1)


def predicted_mask(block_mask: Tensor, prefix: Tensor, block_size: int, anchor_row: bool) -> Tensor:
    """Set the mask of the rows that the prefix of their block covers to 0."""
    T = block_mask.shape[1]
    rows = rows_of_block(T, block_size, anchor_row)
    given = torch.arange(T, device=block_mask.device) % rows + 1 < _of_rows(prefix, rows)
    return torch.where(given, 0, block_mask)


def _over_total(weights: Tensor, total: float | Tensor) -> Tensor:
    """Divide row weights by the step total, clamped to avoid division by zero; a negative total gives NaN."""
    total = torch.as_tensor(total, dtype=weights.dtype, device=weights.device).detach().reshape(())
    return weights / total.clamp(min=torch.finfo(weights.dtype).tiny).masked_fill(total < 0, torch.nan)


def _check_gamma(loss_gamma: Any) -> None:
    _checks.check_constant("loss_gamma", loss_gamma)
    if loss_gamma is not None and not isinstance(loss_gamma, Tensor) and loss_gamma != "paper":
        _checks.check_number("loss_gamma", loss_gamma, "a number or None")


class _Weighting(str):
    """Name of position weights, which computes the weights when it is called."""

    compute: Callable[..., Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.compute(*args, **kwargs)

    def __reduce__(self) -> Any:
        return str, (str(self),)


class _WeightingSetting:
    """Attribute for the name of the position weights, and method that computes them, under one name.

    The name is stored in ``_weighting``, which the code of the losses reads.
    """

    def __init__(self, compute: Callable[..., Tensor]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, loss: Any, owner: type | None = None) -> Any:
        if loss is None:
            return self.compute
        name = loss._weighting
        if not isinstance(name, str):
            return name
        weighting = _Weighting(name)
        weighting.compute = self.compute.__get__(loss)
        return weighting

    def __set__(self, loss: Any, name: Any) -> None:
        loss._weighting = str(name) if isinstance(name, str) else name


class DraftLoss(TransformedLoss):
    """Loss of blocks of drafted tokens ``[B, T]``, weighted by position decay or by D-PACE.

    Arguments are documented on the subclasses; ``common`` are the arguments of :class:`TransformedLoss`.
    """

    _weighting: str

    def __init__(
        self, loss_gamma: float | str | None, chunk_size: int | None, normalize: str, position_weights: str,
        dpace_alpha: float, anchor_row: bool, decay_from: int = 0, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(**common)
        _check_gamma(loss_gamma)  # before the conversion to float, which drops a gradient and accepts strings
        self.loss_gamma = loss_gamma if loss_gamma is None or isinstance(loss_gamma, str) else float(loss_gamma)
        self.chunk_size = chunk_size
        self.normalize = normalize
        self.position_weights = position_weights
        self.dpace_alpha = dpace_alpha
        self.anchor_row = anchor_row
        self.decay_from = decay_from
        self._check_settings()

    def _check_settings(self) -> None:
        """Validate the settings, on every call because attributes may have been reassigned."""
        _check_gamma(self.loss_gamma)
        _checks.check_choice("normalize", self.normalize, NORMALIZE)
        _checks.check_choice("position_weights", self._weighting, POSITION_WEIGHTS)
        _checks.check_probability("dpace_alpha", self.dpace_alpha)
        _checks.checked_bool("anchor_row", self.anchor_row)
        _checks.check_int("decay_from", self.decay_from, 0)
        _checks.checked_chunk_size(self.chunk_size)
        gamma = self.loss_gamma
        # gamma != gamma tests for NaN, because a graph with a symbolic float cannot hold math.isnan
        if gamma is not None and not isinstance(gamma, str) and (gamma == 0 or gamma != gamma):
            raise ValueError(f"loss_gamma must be a number other than 0, or None, got {self.loss_gamma}")

    @_WeightingSetting
    def position_weights(
        self, block_mask: Tensor, block_size: int | None = None, token_nll: Tensor | None = None, *,
        prefix: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute the weights ``w m`` of the rows, before any denominator.

        The attribute of this name is the name of the weighting, a str that can be called: ``loss.position_weights`` is
        equal to "decay", and ``loss.position_weights(block_mask)`` are its weights. NeMo AutoModel has announced a
        method of this name, and not released it. The arguments may differ from those of its release.

        Args:
            block_mask: ``[B, T]`` or ``[B, blocks, k]``, 0 for rows that predict nothing. Fractions are weights.
            block_size: positions of a block, the anchor included; None: each sequence ``[T]`` is one block.
            token_nll: of the shape of ``block_mask``, the NLL of each target, from which D-PACE computes its weights,
                as a constant. Not used with the decay.
            prefix: ``[B, blocks]``, as in the call of :class:`DFlashDecayLoss`, or None.

        Returns:
            The shape of ``block_mask``, float32 (float64 for a float64 ``token_nll``), detached; 0 where ``block_mask``
            is 0.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices do not match, T is not a whole number of blocks, ``block_size`` is not
                that of blocks of k rows, or D-PACE gets no ``token_nll``.
        """
        self._check_settings()
        _checks.check_mask("block_mask", block_mask, getattr(block_mask, "shape", ()))
        if block_size is not None:
            _checks.check_positive_int("block_size", block_size)
        shape = block_mask.shape
        if len(shape) == 3:
            block_size = size_of_blocks("block_mask", block_mask, block_size, self.anchor_row)
        else:
            _checks.check_ndim("block_mask", block_mask, 2, "[B, T] or [B, blocks, k]")
        q = None
        if self._weighting != "decay":
            if token_nll is None:
                raise ValueError(f"token_nll must be given for position_weights={self._weighting!r}, got None")
            _checks.check_like("block_mask", block_mask, _checks.FLOAT_DTYPES, token_nll=token_nll)
            q = torch.exp(-token_nll.detach().to(accum_dtype(token_nll.dtype)))
        block_mask, prefix, q = all_plain(block_mask, prefix, q)
        if len(shape) == 3:
            block_mask, q = block_mask.flatten(1), None if q is None else q.flatten(1)
        if prefix is not None:
            prefix = self._checked_prefix(prefix, block_mask, block_size)
            block_mask = predicted_mask(block_mask, prefix, int(block_size or 0), self.anchor_row)
        mask = block_mask.detach().to(torch.float32 if q is None else q.dtype)
        return self._row_weights(mask, block_size, q, prefix).reshape(shape)

    def _checked_prefix(self, prefix: Tensor, block_mask: Tensor, block_size: int | None) -> Tensor:
        """Check the prefix against the blocks of the mask; return it as a plain tensor."""
        if block_size is None or self._weighting != "decay":
            raise ValueError("prefix must be None without a block_size, or with position_weights other than 'decay'")
        (B, T), rows = block_mask.shape, rows_of_block(block_mask.shape[1], block_size, self.anchor_row)
        _checks.check_ids("prefix", prefix)
        _checks.check_shape("prefix", prefix, (B, T // rows), "an entry for each block")
        _checks.check_same_device("block_mask", block_mask, prefix=prefix)
        (prefix,) = all_plain(prefix)
        if readable_without_sync(prefix) and (where := first_true((prefix < 1) | (prefix > rows))) is not None:
            raise ValueError(f"prefix must lie in [1, {rows}], got {int(prefix[where])} at position {where}")
        return prefix

    def _gamma(self, block_size: int | None) -> float | None:
        """Return gamma of blocks of this size.

        Raises:
            ValueError: ``loss_gamma="paper"``, and the paper has no gamma for the size.
        """
        if not isinstance(self.loss_gamma, str):
            return self.loss_gamma
        if block_size not in PAPER_GAMMAS:
            sizes = ", ".join(map(str, PAPER_GAMMAS))
            raise ValueError(f"block_size must be one of {sizes} with loss_gamma='paper', got {block_size}")
        return PAPER_GAMMAS[block_size]

    def _decay_weights(
        self, T: int, block_size: int | None, device: torch.device | str, dtype: torch.dtype,
        *, prefix: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute the decay of T predicted positions ``[T]``, restarting at each block; all ones without a gamma.

        With a ``prefix [B, blocks]`` it is ``[B, T]`` and begins at the row ``prefix - 1`` of each block, counted from
        0.
        """
        gamma = self._gamma(block_size)
        if gamma is None and not self.decay_from and prefix is None:
            return torch.ones(T, device=device, dtype=dtype)
        rows = rows_of_block(T, block_size, self.anchor_row)
        if prefix is None:
            return self._decay_of_block(gamma, rows, device, dtype).repeat(T // rows)
        steps = torch.arange(T, device=device) % rows - (_of_rows(prefix, rows) - 1)
        return torch.where(steps < 0, 0.0, torch.exp(-steps.to(dtype) / (math.inf if gamma is None else gamma)))

    def _decay_of_block(self, gamma: float | None, rows: int, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Compute the decay of the rows of one block."""
        rising = torch.arange(self.decay_from, self.decay_from - rows, -1, device=device, dtype=dtype)
        decay = torch.exp(rising / (math.inf if gamma is None else gamma))
        return torch.where(rising > 0, 0.0, decay) if self.decay_from else decay

    def _row_weights(
        self, mask: Tensor, block_size: int | None, q: Tensor | None = None, prefix: Tensor | None = None
    ) -> Tensor:
        """Compute the detached row weights ``[B, T]`` before the denominator.

        The decay needs no confidence ``q``, and D-PACE takes no ``prefix``.
        """
        T = mask.shape[1]
        decays = self._weighting == "decay"
        if decays and prefix is not None:
            return self._decay_weights(T, block_size, mask.device, mask.dtype, prefix=prefix) * mask
        gamma = self._gamma(block_size) if decays else None
        if decays and gamma is None and not self.decay_from:
            return mask.clone()  # the caller may own the mask
        rows = rows_of_block(T, block_size, self.anchor_row)
        valid = in_blocks(mask, rows)
        if decays:
            return (self._decay_of_block(gamma, rows, mask.device, mask.dtype) * valid).flatten(1)
        assert q is not None
        q = in_blocks(q.detach(), rows)
        variant = VARIANTS[self._weighting]
        return weights_of_blocks(q, valid, self.dpace_alpha, variant, self.anchor_row).reshape(mask.shape)

    def _normalized(self, weights: Tensor, mask: Tensor, block_size: int | None, counts: Counts) -> Tensor:
        """Divide row weights ``[B, T]`` by the denominator.

        A block or a sequence counts if its mask is not all 0. T must be a whole number of blocks only if they count.
        """
        if self.normalize == "mean":
            return (
                weights / (weights.sum() + MEAN_EPS) if counts.weight is None else _over_total(weights, counts.weight)
            )
        if self.normalize == "rows":
            return divide(weights, counts.tokens, mask)
        if self.normalize == "tokens":
            return divide(weights, counts.tokens)
        size = None if self.normalize == "sequences" else block_size
        valid = in_blocks(mask != 0, rows_of_block(mask.shape[1], size, self.anchor_row)).any(-1)
        if self.normalize == "blocks":
            return divide(weights, counts.blocks, valid)
        if self.normalize == "sequence_blocks":
            blocks: Any = valid.sum(1) if counts.blocks is None else counts.blocks
            weights = weights / blocks.detach().clamp(min=1).to(weights.dtype).unsqueeze(1)
        return divide(weights, counts.sequences, valid.any(1))

    def _checked_counts(self, counts: Counts, block_size: int | None, target_ids: Tensor) -> Counts:
        """Check ``block_size`` and the counts of the whole step, also if unused; return the counts as plain tensors."""
        if block_size is not None:
            _checks.check_positive_int("block_size", block_size)
        counts = Counts(*all_plain(*counts))
        check_counts(num_tokens=counts.tokens, num_sequences=counts.sequences, total_weight=counts.weight)
        blocks: Any = counts.blocks
        if blocks is None or self.normalize != "sequence_blocks":
            check_counts(num_blocks=blocks)
        else:
            _checks.check_mask("num_blocks", blocks, target_ids.shape[:1], "one entry per sequence")
            _checks.check_same_device("target_ids", target_ids, num_blocks=blocks)
            _checks.check_constant("num_blocks", blocks)
        return counts

    @staticmethod
    def _draft_acc_per_pos(
        correct: Tensor, block_mask: Tensor, block_size: int | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sum ``correct * block_mask`` and ``block_mask``, both ``[B, T]``, over batch and blocks, per offset.

        Float32; ``correct`` may be bool or float. (None, None) if ``block_size`` is None or at most 1, or T is not a
        multiple of ``block_size - 1``.
        """
        if block_size is None or block_size <= 1 or correct.shape[1] % (block_size - 1) != 0:
            return None, None
        valid = block_mask.to(torch.float32).reshape(-1, block_size - 1)
        if correct.dtype == torch.bool:
            hits = correct.reshape(valid.shape) * valid
        else:  # it may be NaN in invalid positions
            hits = torch.where(valid != 0, correct.to(torch.float32).reshape(valid.shape) * valid, 0.0)
        return hits.sum(dim=0), valid.sum(dim=0)


class DraftResult(NamedTuple):
    """Results of one call.

    Attributes:
        loss: 0-d, without the confidence term.
        weights: row weights before the denominator.
        divided: row weights over the denominator.
        correct: True for correctly drafted tokens.
        a: the acceptance rates, or None without a teacher.
        value: differentiable loss per row, or None if rows are not requested.
    """

    loss: Tensor
    weights: Tensor
    divided: Tensor
    correct: Tensor
    a: Tensor | None = None
    value: Tensor | None = None


@dataclass(frozen=True)
class DraftCall:
    """One call of a loss of drafted blocks, with checked arguments in plain tensors."""

    loss: DraftLoss
    rows: ModelOutput
    target_ids: Tensor | None
    block_mask: Tensor
    block_size: int | None
    counts: Counts
    prefix: Tensor | None = field(default=None, kw_only=True)

    def cross_entropy(self, summed: bool, coefficient: float = 1.0) -> DraftResult:
        """Compute the cross-entropy as a weighted sum, or per row if the weights depend on the target probabilities."""
        assert self.target_ids is not None
        if summed and self.loss._weighting == "decay":
            weights, divided = self.weights()
            scaled = divided if coefficient == 1 else coefficient * divided
            out = self.rows.weighted(self.target_ids, scaled, active=self.block_mask, with_correct=True)
            assert out.correct is not None
            return DraftResult(out.loss, weights, divided, out.correct)
        each = self.rows.per_row(self.target_ids, self.block_mask, with_correct=True)
        weights, divided = self.weights(torch.exp(-each.nll.detach()))
        assert each.correct is not None
        value = each.nll if coefficient == 1 else coefficient * each.nll
        return DraftResult(sum_of_rows(value, divided), weights, divided, each.correct, value=value)

    def weights(self, q: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the row weights before and over the denominator; the decay needs no confidence ``q``."""
        mask = self.block_mask.detach().to(self.rows.accum_dtype)
        weights = self.loss._row_weights(mask, self.block_size, q, self.prefix)
        return weights, self.loss._normalized(weights, mask, self.block_size, self.counts)

    def output(self, found: DraftResult) -> DLLMLossOutput:
        """Build the output with the draft accuracy and acceptance rates, both without rows before ``decay_from``."""
        loss, mask, correct, a = self.loss, self.block_mask, found.correct, found.a
        if loss._weighting == "decay" and loss.decay_from:
            T = mask.shape[1]
            row = torch.arange(T, device=mask.device) % rows_of_block(T, self.block_size, loss.anchor_row)
            mask = torch.where(row >= loss.decay_from, mask, 0)
            correct, a = correct & (mask != 0), None if a is None else torch.where(mask != 0, a, 0.0)
        block_size = self.block_size
        if block_size is not None and loss.anchor_row:
            block_size += 1  # _draft_acc_per_pos takes block_size - 1 rows per block
        hits, count = loss._draft_acc_per_pos(correct, mask, block_size)
        row_losses = None
        if found.value is not None and loss._returns_rows():
            row_losses = _common.weighted_rows(found.value, found.weights)
        out = _common.single_loss(found.loss, found.weights, row_losses)
        return replaced(
            out, draft_correct_per_pos=hits, draft_count_per_pos=count, draft_correct=correct, acceptance_rate=a
        )
