"""Shared parts of the losses of drafted blocks: the settings, and one call with validated arguments.

:class:`DraftLoss` validates, and makes a :class:`BlockWeights` and a :class:`DraftCall`, which know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import all_plain
from dllm_kernels.losses import _block_weights, _common
from dllm_kernels.losses._base import TransformedLoss
from dllm_kernels.losses._block_weights import BlockWeights, Counts, rows_in_prefix, rows_of_block
from dllm_kernels.losses._common import DLLMLossOutput, check_counts, sum_of_rows
from dllm_kernels.losses._model_output import ModelOutput
from dllm_kernels.ops.dpace_weights import VARIANTS
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._transform import Transform

# A loss of the same settings under the names of SpecForge and NeMo AutoModel: loss_type -> position_weights.
LOSS_TYPES = {"dflash": "decay", **{name: name for name in VARIANTS}}


def _check_gamma(loss_gamma: Any) -> None:
    _checks.check_constant("loss_gamma", loss_gamma)
    if isinstance(loss_gamma, Tensor):
        _checks.check_count("loss_gamma", loss_gamma)
    elif loss_gamma is not None and not (isinstance(loss_gamma, str) and loss_gamma == "paper"):
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

    def __get__(self, loss: Any, owner: type | None = None) -> Any:
        if loss is None:
            return self.compute
        weighting = _Weighting(loss._weighting)
        weighting.compute = self.compute.__get__(loss)
        return weighting

    def __set__(self, loss: Any, name: Any) -> None:
        loss._weighting = name


class DraftLoss(TransformedLoss):
    """Loss of blocks of drafted tokens ``[B, T]``, weighted by position decay or by D-PACE.

    Arguments are documented on the subclasses; ``common`` are further arguments of :class:`TransformedLoss`.
    """

    _weighting: str

    def __init__(
        self, transform: Transform, loss_gamma: float | str | None, normalize: str, position_weights: str,
        dpace_alpha: float, anchor_row: bool, decay_from: int = 0, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(transform, **common)
        _check_gamma(loss_gamma)  # before the conversion to float, which drops a gradient and accepts strings
        self.loss_gamma = loss_gamma if loss_gamma is None or isinstance(loss_gamma, str) else float(loss_gamma)
        self.normalize, self.dpace_alpha = normalize, dpace_alpha
        object.__setattr__(self, "position_weights", position_weights)  # nn.Module would register a module
        self.anchor_row, self.decay_from = anchor_row, decay_from
        self._checked_weighting()

    def _checked_weighting(self) -> BlockWeights:
        """Validate the settings, on every call because attributes may have been reassigned; return the row weights."""
        _check_gamma(self.loss_gamma)
        _checks.check_choice("normalize", self.normalize, _block_weights.NORMALIZE)
        _checks.check_choice("position_weights", self._weighting, _block_weights.POSITION_WEIGHTS)
        _checks.check_probability("dpace_alpha", self.dpace_alpha)
        _checks.checked_bool("anchor_row", self.anchor_row)
        decay_from = _checks.checked_int("decay_from", self.decay_from, 0)
        gamma = self.loss_gamma
        # gamma != gamma tests for NaN, because a graph with a symbolic float cannot hold math.isnan
        if gamma is not None and not isinstance(gamma, str) and (gamma == 0 or gamma != gamma):
            raise ValueError(f"loss_gamma must be a number other than 0, or None, got {self.loss_gamma}")
        return BlockWeights(self._weighting, gamma, self.dpace_alpha, self.normalize, self.anchor_row, decay_from)

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
        weighting = self._checked_weighting()
        _checks.check_tensor("block_mask", block_mask)
        _checks.check_mask("block_mask", block_mask, block_mask.shape)
        block_size = _checks.checked_size("block_size", block_size)
        shape = block_mask.shape
        if len(shape) == 3:
            block_size = _block_weights.size_of_blocks("block_mask", block_mask, block_size, self.anchor_row)
        else:
            _checks.check_ndim("block_mask", block_mask, 2, "[B, T] or [B, blocks, k]")
        q = None
        if not weighting.decays:
            if token_nll is None:
                raise ValueError(f"token_nll must be given for position_weights={self._weighting!r}, got None")
            _checks.check_like("block_mask", block_mask, _checks.FLOAT_DTYPES, token_nll=token_nll)
            q = torch.exp(-token_nll.detach().to(accum_dtype(token_nll.dtype)))
        block_mask, prefix, q = all_plain(block_mask, prefix, q)
        if len(shape) == 3:
            block_mask, q = block_mask.flatten(1), None if q is None else q.flatten(1)
        if prefix is not None:
            block_mask, prefix = self._checked_prefix(prefix, block_mask, block_size)
        mask = block_mask.detach().to(torch.float32 if q is None else q.dtype)
        return weighting.row_weights(mask, block_size, q, prefix).reshape(shape)

    def _checked_prefix(self, prefix: Tensor, block_mask: Tensor, block_size: int | None) -> tuple[Tensor, Tensor]:
        """Check the prefix against the blocks of the mask; return the mask of the predicted rows, and the prefix."""
        if block_size is None or self._weighting != "decay":
            raise ValueError("prefix must be None without a block_size, or with position_weights other than 'decay'")
        rows = rows_of_block(block_mask.shape[1], block_size, self.anchor_row)
        prefix = _block_weights.checked_prefix(prefix, "block_mask", block_mask, rows)
        return torch.where(rows_in_prefix(prefix, rows).flatten(1), 0, block_mask), prefix

    def _checked_counts(self, counts: Counts, target_ids: Tensor) -> Counts:
        """Check the counts of the whole step, also if unused; return them as plain tensors."""
        counts = Counts(*all_plain(*counts))
        check_counts(num_tokens=counts.tokens, num_sequences=counts.sequences, total_weight=counts.weight)
        blocks: Any = counts.blocks
        if blocks is None or self.normalize != "sequence_blocks":
            check_counts(num_blocks=blocks)
        else:
            _checks.check_mask("num_blocks", blocks, target_ids.shape[:1], "one entry per sequence")
            if blocks.dtype == torch.bool:
                raise ValueError("num_blocks must hold counts, got a bool tensor; sum the mask, any() does not count")
            _checks.check_same_device("target_ids", target_ids, num_blocks=blocks)
            _checks.check_constant("num_blocks", blocks)
        return counts


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
    """One call of a loss of drafted blocks, with checked arguments in plain tensors.

    ``returns_rows``: True if the output has per-row losses.
    """

    weighting: BlockWeights
    returns_rows: bool
    rows: ModelOutput
    target_ids: Tensor
    block_mask: Tensor
    block_size: int | None
    counts: Counts
    prefix: Tensor | None = field(default=None, kw_only=True)

    def cross_entropy(self, coefficient: float = 1.0, *, per_row: bool = False) -> DraftResult:
        """Compute the cross-entropy as a weighted sum.

        It is computed per row if rows are requested, or if the weights depend on the target probabilities.
        """
        if not (per_row or self.returns_rows) and self.weighting.decays:
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
        weights = self.weighting.row_weights(mask, self.block_size, q, self.prefix)
        return weights, self.weighting.normalized(weights, mask, self.block_size, self.counts)

    def output(self, result: DraftResult) -> DLLMLossOutput:
        """Build the output with the draft accuracy and acceptance rates, both without rows before ``decay_from``."""
        weighting, mask, correct, a, prefix = self.weighting, self.block_mask, result.correct, result.a, self.prefix
        if weighting.decays and weighting.decay_from:
            B, T = mask.shape
            in_block = rows_of_block(T, self.block_size, weighting.anchor_row)
            prefix = torch.full((B, T // in_block), weighting.decay_from + 1, device=mask.device)
            mask = torch.where(rows_in_prefix(prefix, in_block).flatten(1), 0, mask)
            correct, a = correct & (mask != 0), None if a is None else torch.where(mask != 0, a, 0.0)
        size = self.block_size
        rows = size if size is None or weighting.anchor_row else size - 1
        hits, count = _block_weights.counts_per_offset(correct, mask, rows)
        row_losses = None
        if result.value is not None and self.returns_rows:
            row_losses = _common.weighted_rows(result.value, result.weights)
        out = _common.single_loss(result.loss, result.weights, row_losses)
        return replaced(
            out, draft_correct_per_pos=hits, draft_count_per_pos=count, draft_correct=correct, acceptance_rate=a,
            prefix=prefix,
        )  # fmt: skip
