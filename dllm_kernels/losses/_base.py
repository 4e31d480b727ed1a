"""Base classes of the losses: constructor arguments, and the signature and checks of the diffusion losses.

A diffusion loss implements only :meth:`DiffusionLoss._weights`, which returns the row weights before and over the
denominator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dllm_kernels import _checks
from dllm_kernels._checks import Extra
from dllm_kernels._checks._target_range import first_fraction, first_true
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import all_plain, plain_count, readable_without_sync
from dllm_kernels.losses import _common
from dllm_kernels.losses._common import Count, DLLMLossOutput, next_tokens, shift_left
from dllm_kernels.losses._model_output import CAUSAL, NAMES, ModelOutput
from dllm_kernels.rows._interface import P_MASK_MIN
from dllm_kernels.rows._logits import LinearLogits, Logits
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._transform import Transform

Aligned = tuple[Tensor, Tensor, Tensor]  # target of each row, and its weight before and over the denominator


class TransformedLoss(nn.Module):
    """Base module with the options common to all losses: logits transform, reduction and backend.

    The arguments of the transform are documented in :func:`dllm_kernels.ops.token_nll`.
    """

    reductions: tuple[str, ...] = _common.REDUCTIONS
    chunk_size: int | None = None

    def __init__(self, transform: Transform, reduction: str, backend: str) -> None:
        super().__init__()
        self.softcap, self.scale, self.skip_id = transform.check()
        self.reduction = reduction
        self._returns_rows()
        self.backend = backend

    @property
    def transform(self) -> Transform:
        """Transform of the logits, read on every call because attributes may have been reassigned."""
        return Transform(self.softcap, self.scale, self.skip_id)

    def _options(self, **others: Any) -> Options:
        """Return the options of the ops."""
        return Options(self.transform, backend=self.backend, **others)

    def _rows(self, logits: Any, options: Options, names: _checks.Names = NAMES) -> ModelOutput:
        """Take logits, stored, deferred or a record, in chunks of ``chunk_size`` rows unless the record has its own."""
        return ModelOutput.of(logits, options, names, _checks.checked_size("chunk_size", self.chunk_size))

    def _returns_rows(self) -> bool:
        """Return True if the output has per-row losses. Validated on every call: the attribute may be reassigned."""
        _checks.check_choice("reduction", self.reduction, self.reductions)
        return self.reduction == "none"


class Batch(NamedTuple):
    """Per-token inputs ``[B, L]`` of a loss, described in :meth:`DiffusionLoss.forward`, as plain tensors."""

    target_ids: Tensor
    noise_mask: Tensor
    p_mask: Tensor
    loss_mask: Tensor
    loss_mask_ar: Tensor | None
    noisy_input_ids: Any
    num_diffusion_tokens: Count
    num_ar_tokens: Count
    shift: bool

    @property
    def supervised(self) -> Tensor:
        """The supervised tokens, bool ``[B, L]``; with ``shift`` without token 0, which no row predicts."""
        on = self.loss_mask.bool()
        return F.pad(on[:, 1:], (min(1, on.shape[1]), 0)) if self.shift else on

    def as_batch(self) -> Batch:
        """Add a batch dimension to per-token inputs ``[T]`` of packed rows."""
        packed = {name: _common.as_batch(t) for name, t in self._asdict().items() if not name.startswith("num_")}
        batch: Batch = replaced(self, **packed)
        return batch

    def check_unused(self, *, causal: ModelOutput | None = None, **tensors: Tensor | None) -> None:
        """Validate unused arguments, so that a misplaced one raises."""
        if causal is not None:
            tensors[causal.names.rows] = causal.x
        _common.check_counts(num_diffusion_tokens=self.num_diffusion_tokens, num_ar_tokens=self.num_ar_tokens)
        if self.loss_mask_ar is not None:
            _check_no_count(self.loss_mask_ar, self.target_ids.shape)
            _checks.check_masks_like("target_ids", self.target_ids, loss_mask_ar=self.loss_mask_ar)
        check_optional_tensors(**tensors)

    def check_noise(self, **others: Tensor) -> None:
        """Check the masks of a loss that reads ``p_mask``: shape, device, order, constant."""
        _checks.check_masks_like("target_ids", self.target_ids, **others, loss_mask=self.loss_mask)
        _checks.check_like("target_ids", self.target_ids, p_mask=self.p_mask)
        self.check_not_swapped()
        _checks.check_constant("p_mask", self.p_mask)

    def check_unused_noise(self) -> None:
        """Check the values of a ``noise_mask`` that the loss does not use."""
        if self.noise_mask is not None and self.noise_mask.dtype in _checks.MASK_DTYPES:
            _checks.check_mask_values("noise_mask", self.noise_mask)

    def check_not_swapped(self) -> None:
        """Raise if two masks appear swapped, judged by dtype and, on CPU, by value; also checks unused masks."""
        p_mask, noise_mask, loss_mask = self.p_mask, self.noise_mask, self.loss_mask
        if p_mask is not None and p_mask.dtype == torch.bool:
            raise ValueError("p_mask must hold probabilities, got bool; are noise_mask and p_mask swapped?")
        where = first_fraction(noise_mask, loss_mask)
        if where is not None:
            raise ValueError(
                f"noise_mask must hold no fractions, got {noise_mask[where].item()} at position {where}; "
                "are noise_mask and p_mask swapped?"
            )
        where = first_fraction(loss_mask, loss_mask)
        # A p_mask of ones is no sign of a swap, because routines that mask every position return it.
        if where is not None and readable_without_sync(p_mask) and _holds_zeros_and_ones(p_mask):
            raise ValueError(
                f"loss_mask must hold no fractions beside a p_mask of 0 and 1, got {loss_mask[where].item()} "
                f"at position {where}; are p_mask and loss_mask swapped?"
            )

    def mdlm_weights(self, rows: ModelOutput, factor: Any = None) -> tuple[Tensor, Tensor]:
        """Compute factor (noise_mask & loss_mask) / max(p_mask, 1e-8), before and over the denominator.

        It is 0 outside the masks even if ``p_mask`` is NaN there.
        """
        self.check_noise(noise_mask=self.noise_mask)
        in_range, dtype, count = self._check_probabilities(), rows.accum_dtype, self.num_diffusion_tokens
        fused = rows.primitives_on(self.p_mask)
        if fused is not None and fused.mdlm_weights is not None:
            loss_mask = self.supervised if self.shift else self.loss_mask
            return fused.mdlm_weights(self.p_mask, self.noise_mask, loss_mask, factor, plain_count(count), dtype)
        on = self.noise_mask.bool() & self.supervised
        weights = on / self.p_mask.to(dtype).clamp(min=P_MASK_MIN)
        if not in_range:  # skipped if possible, because masked_fill_ branches per entry on CPU
            weights.masked_fill_(~on, 0.0)
        if isinstance(factor, Tensor):
            factor = factor.reshape(()).to(dtype)
        weights = weights if factor is None else factor * weights
        return weights, _common.divide(weights, count)

    def _check_probabilities(self) -> bool:
        """Raise if a used probability is out of range. Skipped on GPU to avoid a sync.

        Return True if all probabilities are known to be in range.
        """
        p_mask, noise_mask = self.p_mask, self.noise_mask
        if not readable_without_sync(p_mask):
            return False
        if p_mask.numel():
            least, most = torch.aminmax(p_mask)
            if least.item() >= 0 and most.item() <= 1:
                return True
        self.check_range(self.supervised & noise_mask.bool())
        return False

    def check_range(self, used: Tensor) -> None:
        """Raise if a probability is out of range in the first columns, where ``used`` is True. Reads values."""
        p_mask = self.p_mask[:, : used.shape[1]]
        where = first_true(used & ~((p_mask >= 0) & (p_mask <= 1)))
        if where is not None:
            got = p_mask[where].item()
            raise ValueError(f"p_mask must lie in [0, 1] where it is used, got {got} at position {where}")


def check_optional_tensors(**tensors: Tensor | None) -> None:
    """Raise TypeError if an optional argument is given and is not a tensor."""
    for name, value in tensors.items():
        if value is not None:
            _checks.check_tensor(name, value)


def _holds_zeros_and_ones(mask: Tensor) -> bool:
    """Return True if a mask holds only zeros and ones, and at least one zero."""
    zero = mask == 0
    return bool(zero.any()) and bool((zero | (mask == 1)).all())


def _check_no_count(loss_mask_ar: Any, shape: torch.Size) -> None:
    """Raise if ``loss_mask_ar`` is a count that was passed by position."""
    hint = "; a count goes by its keyword, num_diffusion_tokens="
    if isinstance(loss_mask_ar, (int, float)):
        raise TypeError(f"loss_mask_ar must be a torch.Tensor, got {_checks.type_name(loss_mask_ar)}{hint}")
    if isinstance(loss_mask_ar, Tensor) and loss_mask_ar.dim() == 0:
        raise ValueError(f"loss_mask_ar must have shape {tuple(shape)} (that of target_ids), got (){hint}")


class DiffusionLoss(TransformedLoss):
    """Base class of the diffusion losses of tokens ``[B, L]``, from logits or from hidden states.

    Args:
        fp32_upcast, softcap, scale, skip_id, reduction, backend, shift: see :class:`MDLMCrossEntropyLoss`.

    Raises:
        TypeError: ``fp32_upcast`` or ``shift`` is not a bool.
        ValueError: ``reduction`` is unknown. Every call checks all three again.
    """

    def __init__(
        self, fp32_upcast: bool = True, *, softcap: float | None = None, scale: float | None = None,
        skip_id: int | None = None, reduction: str = "total", backend: str = "auto", shift: bool = False,
    ) -> None:  # fmt: skip
        """Initialize; the arguments are documented on the class."""
        super().__init__(Transform(softcap, scale, skip_id), reduction, backend)
        self.fp32_upcast = _checks.checked_bool("fp32_upcast", fp32_upcast)
        self.shift = _checks.checked_bool("shift", shift)

    def forward(
        self, logits: Logits, target_ids: Tensor, noise_mask: Tensor, p_mask: Tensor, loss_mask: Tensor,
        loss_mask_ar: Tensor | None = None, num_diffusion_tokens: Count = None, num_ar_tokens: Count = None,
        causal_logits: Logits | None = None, noisy_input_ids: Tensor | None = None,
    ) -> DLLMLossOutput:  # fmt: skip
        """Compute the loss from logits. All losses take the same arguments and also check the unused ones.

        Packed input without a batch dimension, ``[T, V]`` with targets and masks ``[T]``, is a batch of one sequence.

        Args:
            logits: ``[B, L, V]``, any float dtype; for the hybrid loss also ``[B, 2 L, V]``, the diffusion logits
                followed by the AR logits.
            target_ids: ``[B, L]`` integers, the clean tokens; -100 counts as NLL 0.
            noise_mask: ``[B, L]``, nonzero if the token was masked (not used by block diffusion and SCDD).
            p_mask: ``[B, L]``, the probability with which the token was masked, in [0, 1], a constant. Not used by
                block diffusion. SCDD reads column 0, the time of the sequence, which must be equal at all supervised
                positions.
            loss_mask: ``[B, L]``, nonzero if the token is supervised.
            loss_mask_ar: ``[B, L]``, the weight of each token as an AR target, a constant that may be fractional; None:
                no AR part (hybrid).
            num_diffusion_tokens: divides the diffusion sum, as ``max(n, 1)``; int or 0-d tensor. None: no division; for
                block diffusion and SCDD the number of supervised positions of this call.
            num_ar_tokens: divides the AR sum in the same way (hybrid).
            causal_logits: ``[B, L, V]`` separate AR logits; None: the AR logits in ``logits``, if any (hybrid).
            noisy_input_ids: ``[B, L]`` integers, the noisy tokens, input of the model (required by SCDD).

        Returns:
            :class:`DLLMLossOutput`: ``dllm_loss`` is the diffusion part of ``total_loss``, detached.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices do not match; on CPU, a ``p_mask`` outside [0, 1] where it is used;
                masks that are detectably swapped; a constant or count that requires a gradient.
        """
        counts = (num_diffusion_tokens, num_ar_tokens)
        tensors = all_plain(target_ids, noise_mask, p_mask, loss_mask, loss_mask_ar, noisy_input_ids, *counts)
        batch = Batch._make((*tensors, _checks.checked_bool("shift", self.shift)))
        options = self._options(round_nll=self._rounds())
        rows, causal = self._rows(logits, options), None
        if causal_logits is not None:
            causal = ModelOutput.of(causal_logits, options, CAUSAL)
        if rows.packed(batch.target_ids):
            batch, rows, causal = batch.as_batch(), rows.as_batch(), causal and causal.as_batch()
        return self._loss(rows, batch, causal)

    def forward_fused(
        self, hidden: Tensor, lm_head_weight: Tensor, target_ids: Tensor, noise_mask: Tensor, p_mask: Tensor,
        loss_mask: Tensor, loss_mask_ar: Tensor | None = None, num_diffusion_tokens: Count = None,
        num_ar_tokens: Count = None, noisy_input_ids: Tensor | None = None, *, causal_hidden: Tensor | None = None,
        lm_head_bias: Tensor | None = None, extra: Extra | None = None, chunk_size: int | None = None,
        num_active: int | None = None, logits_dtype: torch.dtype | None = None,
    ) -> DLLMLossOutput:  # fmt: skip
        """Compute :meth:`forward` of ``LinearLogits(hidden, lm_head_weight, lm_head_bias, extra, ...)``.

        ``causal_hidden [B, L, D]`` are the hidden states of ``causal_logits``, of the same head without ``extra``.
        """
        logits = LinearLogits(hidden, lm_head_weight, lm_head_bias, extra, logits_dtype, chunk_size, num_active)
        causal = None if causal_hidden is None else replaced(logits, hidden=causal_hidden)
        if causal is not None and extra is not None:
            raise ValueError(
                "extra must be None with causal_hidden, got both; pass both branches as one hidden [B, 2 L, D], with "
                "one row of extra[0] per row"
            )
        return DiffusionLoss.forward(
            self, logits, target_ids, noise_mask, p_mask, loss_mask, loss_mask_ar, num_diffusion_tokens,
            num_ar_tokens, causal, noisy_input_ids,
        )  # fmt: skip

    def _rounds(self) -> bool:
        """Return True if the NLL is rounded. Validated on every call because the attribute may have been reassigned."""
        return not _checks.checked_bool("fp32_upcast", self.fp32_upcast)

    def _loss(self, rows: ModelOutput, batch: Batch, causal: ModelOutput | None) -> DLLMLossOutput:
        rows = rows.checked(batch.target_ids)
        batch.check_unused(causal=causal, noisy_input_ids=batch.noisy_input_ids)
        weights, divided = self._weights(batch, rows)
        return self._single_part_output(rows, *self._aligned(rows, batch, weights, divided))

    @staticmethod
    def _aligned(rows: ModelOutput, batch: Batch, weights: Tensor, divided: Tensor) -> Aligned:
        """Check the targets; return the target of each row and both its weights, given the weights of the tokens."""
        if not batch.shift:
            rows.check_targets(batch.target_ids, weights)
            return batch.target_ids, weights, divided
        rows.check_targets(batch.target_ids, weights[:, 1:], shift=1)
        return next_tokens(batch.target_ids), shift_left(weights), shift_left(divided)

    def _single_part_output(
        self, rows: ModelOutput, targets: Tensor, weights: Tensor, divided: Tensor
    ) -> DLLMLossOutput:
        """Compute the output of a loss with one part from the row weights and the weights over the denominator."""
        if not self._returns_rows():
            return _common.single_loss(rows.weighted(targets, divided).loss, weights)
        nll = rows.per_row(targets, weights).nll
        return _common.single_loss(_common.sum_of_rows(nll, divided), weights, _common.weighted_rows(nll, weights))

    def _weights(self, batch: Batch, rows: ModelOutput) -> tuple[Tensor, Tensor]:
        """Return the weight of each token ``[B, L]``, 0 for rows not to be read, before and over the denominator."""
        raise NotImplementedError
