"""DFlash: decay-weighted cross-entropy of a block-diffusion draft model, with its accuracy at each block offset."""

from __future__ import annotations

from typing import Any

import torch

from dllm_kernels.base import _checks
from dllm_kernels.base._plain import all_plain
from dllm_kernels.losses._common import Count, DLLMLossOutput, check_counts, check_masks, divide, single_loss
from dllm_kernels.losses._rows import Rows
from dllm_kernels.losses._transformed import TransformedLoss
from dllm_kernels.ops import linear_token_nll

NORMALIZE = ("tokens", "mean")


class DFlashDecayLoss(TransformedLoss):
    r"""Cross-entropy of the drafted tokens, each weighted by how early in its block it stands.

    .. math:: \text{loss} = \frac{1}{N} \sum_i w_{k(i)} m_i \, \text{nll}_i, \qquad w_k = e^{-(k-1)/\gamma}

    k = 1, 2, ... counts the predicted positions of a block, the anchor before them being given. An early mistake costs
    every later token of the block, hence the decay. Rows with ``block_mask`` 0 are not read.

    Source: the DFlash paper, eq. 4; defaults of gamma in appendix A.1: 7, 5, 4 for blocks of 16, 10, 8.

    Args:
        loss_gamma: gamma; None weighs all positions alike.
        use_fused_linear_ce: for the training loop to read: whether it should call :meth:`forward_fused` with hidden
            states or :meth:`forward` with logits. Each method does what its name says whatever this is.
        chunk_size: rows of logits that exist at a time in :meth:`forward_fused`. The default keeps the documented
            memory; larger chunks are faster on a GPU, None chooses.
        normalize: "tokens" divides by ``num_tokens``, "mean" by the sum of the weights (plus 1e-6).
        softcap: as in :class:`MDLMCrossEntropyLoss`.
        scale: as in :class:`MDLMCrossEntropyLoss`.
        skip_id: as in :class:`MDLMCrossEntropyLoss`.
        backend: "auto", "triton" or "torch".

    Raises:
        TypeError: ``chunk_size`` is not an int, ``use_fused_linear_ce`` no bool.
        ValueError: ``normalize`` is neither, or ``chunk_size`` < 1. Both also at a call, for attributes assigned since.
    """

    def __init__(
        self,
        loss_gamma: float | None = 7.0,
        use_fused_linear_ce: bool = False,
        chunk_size: int | None = 1024,
        normalize: str = "tokens",
        *,
        softcap: float | None = None,
        scale: float | None = None,
        skip_id: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(softcap, scale, skip_id)
        _checks.check_constant("loss_gamma", loss_gamma)  # before it is a float, which has no gradient
        self.loss_gamma = None if loss_gamma is None else float(loss_gamma)
        self.use_fused_linear_ce = _checks.checked_bool("use_fused_linear_ce", use_fused_linear_ce)
        self.chunk_size = chunk_size
        self.normalize = normalize
        self.backend = backend
        self._check_settings()

    def forward(
        self,
        logits: torch.Tensor,
        target_ids: torch.Tensor,
        block_mask: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        block_size: int | None = None,
    ) -> DLLMLossOutput:
        """Compute the loss and the draft accuracy from logits.

        Args:
            logits: ``[B, T, V]`` of the predicted positions, T = blocks * (block_size - 1).
            target_ids: ``[B, T]`` integers; -100 counts as NLL 0 and never as correct.
            block_mask: ``[B, T]``, 0 where there is nothing to predict; fractions are kept as weights, constant ones.
            num_tokens: divides the sum, as ``max(n, 1)``; int or 0-d tensor. None: the sum itself. Not used with
                ``normalize="mean"``.
            block_size: positions of a block, the anchor included: the decay restarts with each block, and accuracy is
                counted at each offset. None: one block, no accuracy.

        Returns:
            :class:`DLLMLossOutput` with ``total_loss == dllm_loss`` and the counts, or None for them where
            ``block_size`` is None or 1 or does not divide T.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices that do not fit, or T is not a multiple of ``block_size - 1``.
        """
        rows = Rows.of_logits(logits, backend=self.backend, **self.transform)
        return self._loss(rows, target_ids, block_mask, num_tokens, block_size)

    def forward_fused(
        self,
        hidden: torch.Tensor,
        lm_head_weight: torch.Tensor,
        target_ids: torch.Tensor,
        block_mask: torch.Tensor,
        num_tokens: int | torch.Tensor | None = None,
        block_size: int | None = None,
        lm_head_bias: torch.Tensor | None = None,
    ) -> DLLMLossOutput:
        """Compute the same from hidden states and the LM head; the logits exist one chunk at a time.

        The gradient is made in the forward pass, on the active rows only: two matrix products with a frozen head, three
        with a trainable one, nothing recomputed.

        Args:
            hidden: ``[B, T, D]`` of the predicted positions.
            lm_head_weight: ``[V, D]``.
            target_ids: as in :meth:`forward`.
            block_mask: as in :meth:`forward`.
            num_tokens: as in :meth:`forward`.
            block_size: as in :meth:`forward`.
            lm_head_bias: ``[V]`` or None.

        Returns:
            :class:`DLLMLossOutput` as in :meth:`forward`. Accuracy is judged on logits rounded to the compute dtype.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices that do not fit, or T is not a multiple of ``block_size - 1``.
        """
        rows = Rows.of_hidden(
            hidden, lm_head_weight, lm_head_bias, chunk_size=self.chunk_size, backend=self.backend, **self.transform
        )
        return self._loss(rows, target_ids, block_mask, num_tokens, block_size)

    def _loss(
        self, rows: Rows, target_ids: torch.Tensor, block_mask: torch.Tensor, num_tokens: Count, block_size: int | None
    ) -> DLLMLossOutput:
        rows.check(target_ids)
        self._check_settings()
        target_ids, block_mask = all_plain(target_ids, block_mask)
        check_masks(target_ids, block_mask=block_mask)
        _checks.check_constant("block_mask", block_mask)
        check_counts(num_tokens=num_tokens)
        if block_size is not None:
            _checks.check_positive_int("block_size", block_size)
        decay = self._decay_weights(target_ids.shape[1], block_size, target_ids.device, rows.acc)
        weights = decay * block_mask.detach().to(rows.acc)
        out = rows.weighted(
            target_ids, self._normalized(weights, weights, num_tokens), active=block_mask, with_correct=True
        )
        assert out.correct is not None
        hits, count = self._draft_acc_per_pos(out.correct, block_mask, block_size)
        return single_loss(out.loss, weights)._replace(draft_correct_per_pos=hits, draft_count_per_pos=count)

    def _check_settings(self) -> None:
        """Also at each call, since they are attributes that may have been assigned since."""
        _checks.check_constant("loss_gamma", self.loss_gamma)
        if self.normalize not in NORMALIZE:
            raise ValueError(f"normalize must be one of {', '.join(NORMALIZE)}, got {self.normalize!r}")
        if self.loss_gamma is not None and not self.loss_gamma > 0:
            raise ValueError(f"loss_gamma must be positive or None, got {self.loss_gamma}")
        if self.chunk_size is not None:
            _checks.check_positive_int("chunk_size", self.chunk_size)

    def _decay_weights(
        self, T: int, block_size: int | None, device: torch.device | str, dtype: torch.dtype
    ) -> torch.Tensor:
        """Decay of T predicted positions ``[T]``, restarting each block; all ones without a gamma."""
        if self.loss_gamma is None:
            return torch.ones(T, device=device, dtype=dtype)
        k_minus_1 = torch.arange(T, device=device)
        if block_size is not None:
            _check_blocks(T, block_size)
            k_minus_1 = k_minus_1 % max(block_size - 1, 1)
        return torch.exp(-k_minus_1.to(dtype) / self.loss_gamma)

    def _reduce(
        self,
        token_nll: torch.Tensor,
        block_mask: torch.Tensor,
        num_tokens: int | torch.Tensor | None,
        block_size: int | None,
        draft_correct_per_pos: torch.Tensor | None = None,
        draft_count_per_pos: torch.Tensor | None = None,
    ) -> DLLMLossOutput:
        """Weigh, mask, sum and normalise a per-token NLL ``[B, T]`` that was computed elsewhere.

        For code that calls it, and so is ``_chunk_nll``: :meth:`forward` and :meth:`forward_fused` give the weights to
        one op instead, so overriding these two does not change them.
        """
        mask = block_mask.to(token_nll.dtype)
        weights = self._decay_weights(token_nll.shape[1], block_size, token_nll.device, token_nll.dtype) * mask
        loss = torch.where(weights != 0, token_nll * weights, 0.0).sum()
        out = single_loss(self._normalized(loss, weights, num_tokens), weights)
        return out._replace(draft_correct_per_pos=draft_correct_per_pos, draft_count_per_pos=draft_count_per_pos)

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

    @staticmethod
    def _chunk_nll(
        hidden_chunk: torch.Tensor,
        lm_head_weight: torch.Tensor,
        lm_head_bias: torch.Tensor | None,
        target_chunk: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """NLL and argmax-match ``[chunk]`` of rows ``[chunk, D]``, the NLL with a gradient per row."""
        names = _checks.Names("hidden_chunk", "target_chunk", "lm_head_weight", "lm_head_bias")
        _checks.check_row_targets(names, hidden_chunk, target_chunk, lm_head_weight, lm_head_bias)
        rows = linear_token_nll(hidden_chunk, lm_head_weight, target_chunk, bias=lm_head_bias, with_correct=True)
        assert rows.correct is not None
        return rows.nll, rows.correct

    def _normalized(
        self, x: torch.Tensor, weights: torch.Tensor, num_tokens: int | torch.Tensor | None
    ) -> torch.Tensor:
        if self.normalize == "mean":
            return x / (weights.sum() + 1e-6)
        return divide(x, num_tokens)


def _check_blocks(T: int, block_size: int) -> None:
    if T % max(block_size - 1, 1) != 0 or (block_size == 1 and T > 0):
        raise ValueError(
            f"T must be a multiple of block_size - 1 for the decay to restart with each block, got T={T} and "
            f"block_size={block_size}"
        )


def draft_accuracy(output: DLLMLossOutput, group: Any = None) -> dict[str, torch.Tensor]:
    r"""Draft accuracy overall and at each block offset, from the raw sums of one loss call.

    .. math:: \text{draft\_acc} = \sum_k c_k / \sum_k n_k, \qquad \text{draft\_acc\_k}k = c_k / n_k

    Args:
        output: what :class:`DFlashDecayLoss` returned for a ``block_size``.
        group: process group to sum the counts over before dividing; None: this rank alone.

    Returns:
        ``draft_acc`` and ``draft_acc_k{k}`` for k = 1 .. block_size - 1, 0-d float32 tensors; 0 where nothing was
        counted. Empty when the output has no counts.
    """
    hits, count = output.draft_correct_per_pos, output.draft_count_per_pos
    if hits is None or count is None:
        return {}
    if group is not None:
        from dllm_kernels.distributed.reduce import summed_over

        hits, count = summed_over(torch.stack([hits, count]), group).unbind()
    overall = hits.sum() / count.sum().clamp(min=torch.finfo(torch.float32).tiny)
    per_offset = torch.where(count > 0, hits / count.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    return {
        "draft_acc": overall,
        **{f"draft_acc_k{k}": a for k, a in enumerate(per_offset.unbind(), start=1)},
    }
