"""What losses of drafted blocks share: what each row weighs, what the sum is divided by, accuracy at each offset."""

from __future__ import annotations

import torch

from dllm_kernels.base import _checks
from dllm_kernels.losses._blocks import NORMALIZE, Counts, in_blocks, normalized, rows_of_block
from dllm_kernels.losses._transformed import TransformedLoss
from dllm_kernels.ops.dpace_weights import VARIANTS, check_alpha, check_choice, weights_of_blocks

POSITION_WEIGHTS = ("decay", *VARIANTS)


class DraftLoss(TransformedLoss):
    """A loss of blocks of drafted tokens ``[B, T]``, each row weighed by its place or by D-PACE.

    Args:
        loss_gamma: gamma of the decay; None weighs all positions alike. The decay alone has one.
        chunk_size: rows of logits that exist at a time where they are made from hidden states; None chooses.
        normalize: what the sum is divided by, one of ``NORMALIZE``.
        position_weights: "decay", or a variant of :func:`dpace_weights`.
        dpace_alpha: its least smoothed confidence.
        anchor_row: a block has ``block_size`` rows and not one less, the first of them the anchor's.
        decay_from: the row of its block that the decay begins at; those before it weigh nothing. The decay alone has one.
        softcap: as in :class:`TransformedLoss`.
        scale: likewise.
        skip_id: likewise.
        reduction: likewise.
        backend: "auto", "triton" or "torch".

    Raises:
        TypeError: one of them has another type.
        ValueError: one of them is out of range.
    """

    def __init__(
        self,
        loss_gamma: float | None,
        chunk_size: int | None,
        normalize: str,
        *,
        position_weights: str,
        dpace_alpha: float,
        anchor_row: bool,
        decay_from: int = 0,
        softcap: float | None = None,
        scale: float | None = None,
        skip_id: int | None = None,
        reduction: str = "total",
        backend: str = "auto",
    ) -> None:
        """The arguments are described with the class."""
        super().__init__(softcap, scale, skip_id, reduction, backend)
        _checks.check_constant("loss_gamma", loss_gamma)  # before it is a float, which has no gradient
        self.loss_gamma = None if loss_gamma is None else float(loss_gamma)
        self.chunk_size = chunk_size
        self.normalize = normalize
        self.position_weights = position_weights
        self.dpace_alpha = dpace_alpha
        self.anchor_row = anchor_row
        self.decay_from = decay_from
        self._check_settings()

    def _check_settings(self) -> None:
        """Also at each call, since they are attributes that may have been assigned since."""
        _checks.check_constant("loss_gamma", self.loss_gamma)
        check_choice("normalize", self.normalize, NORMALIZE)
        check_choice("position_weights", self.position_weights, POSITION_WEIGHTS)
        check_alpha("dpace_alpha", self.dpace_alpha)
        _checks.checked_bool("anchor_row", self.anchor_row)
        if not _checks.is_int(self.decay_from):
            raise TypeError(f"decay_from must be an int, got {type(self.decay_from).__name__}")
        if self.decay_from < 0:
            raise ValueError(f"decay_from must be at least 0, got {self.decay_from}")
        if self.loss_gamma is not None and not self.loss_gamma > 0:
            raise ValueError(f"loss_gamma must be positive or None, got {self.loss_gamma}")
        if self.chunk_size is not None:
            _checks.check_positive_int("chunk_size", self.chunk_size)

    def _decay_weights(
        self, T: int, block_size: int | None, device: torch.device | str, dtype: torch.dtype
    ) -> torch.Tensor:
        """Decay of T predicted positions ``[T]``, restarting each block; all ones without a gamma."""
        if self.loss_gamma is None and not self.decay_from:
            return torch.ones(T, device=device, dtype=dtype)
        row = torch.arange(T, device=device) % rows_of_block(T, block_size, self.anchor_row)
        steps = row - self.decay_from
        decay = (
            torch.ones_like(steps, dtype=dtype)
            if self.loss_gamma is None
            else torch.exp(-steps.to(dtype) / self.loss_gamma)
        )
        return torch.where(steps < 0, 0.0, decay) if self.decay_from else decay

    def _row_weights(self, mask: torch.Tensor, block_size: int | None, q: torch.Tensor | None = None) -> torch.Tensor:
        """What each row weighs before the denominator ``[B, T]``, detached; the decay needs no confidence ``q``."""
        T = mask.shape[1]
        if self.position_weights == "decay":
            return self._decay_weights(T, block_size, mask.device, mask.dtype) * mask
        assert q is not None
        rows = rows_of_block(T, block_size, self.anchor_row)
        q, valid = in_blocks(q.detach(), rows), in_blocks(mask, rows)
        return weights_of_blocks(q, valid, self.dpace_alpha, VARIANTS[self.position_weights]).reshape(mask.shape)

    def _normalized(
        self, weights: torch.Tensor, mask: torch.Tensor, block_size: int | None, counts: Counts
    ) -> torch.Tensor:
        """Row weights over the denominator; only where it counts blocks there must be a whole number of them."""
        by_blocks = self.normalize in ("blocks", "sequence_blocks")
        rows = rows_of_block(mask.shape[1], block_size if by_blocks else None, self.anchor_row)
        return normalized(weights, mask, rows, self.normalize, counts)

    def _with_anchor(self, block_size: int | None) -> int | None:
        """The size of a block of as many rows, all of them behind an anchor."""
        return block_size + 1 if self.anchor_row and block_size is not None else block_size

    @staticmethod
    def _draft_acc_per_pos(
        correct: torch.Tensor, block_mask: torch.Tensor, block_size: int | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Sums over batch and blocks of ``correct * block_mask`` and of ``block_mask``, both ``[B, T]``, at each offset.

        Float32; ``correct`` may be bool or float. (None, None) when ``block_size`` is None or at most 1, or T is not a
        multiple of ``block_size - 1``.
        """
        if block_size is None or block_size <= 1 or correct.shape[1] % (block_size - 1) != 0:
            return None, None
        valid = block_mask.to(torch.float32).reshape(-1, block_size - 1)
        hits = torch.where(valid != 0, correct.to(torch.float32).reshape(valid.shape) * valid, 0.0)
        return hits.sum(dim=0), valid.sum(dim=0)
