"""Hybrid diffusion + AR: masked diffusion on one branch of the model, next-token prediction on the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_kernels._checks import Extra, check_constant, check_finite, check_number, check_tensor
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import plain
from dllm_kernels.losses._base import Aligned, Batch, DiffusionLoss
from dllm_kernels.losses._common import (
    Count,
    DLLMLossOutput,
    divide,
    logged_sum,
    next_tokens,
    shift_left,
    single_loss,
    sum_of_rows,
    weighted_rows,
)
from dllm_kernels.losses._model_output import ModelOutput
from dllm_kernels.rows._interface import IGNORE


class HybridDiffusionLLMLoss(DiffusionLoss):
    r"""``alpha`` times the masked-diffusion loss plus next-token cross-entropy on the causal branch.

    .. math::
        \text{loss} = \frac{\alpha}{N_d} \sum_{i\,\in\,\text{noise} \cap \text{supervised}} \frac{\text{nll}_i}{p_i}
                    + \frac{1}{N_{ar}} \sum_{i < L} m^{ar}_{i+1} \, \text{nll}(z^{ar}_i, x_{i+1})

    The AR part exists only if AR logits and ``loss_mask_ar`` are given. Its targets are shifted, not its logits. The
    legacy layout ``[B, L + L, V]``, diffusion logits then AR logits, is one call over the whole tensor. ``dllm_loss``
    is ``alpha`` times the diffusion part.

    Source: Sahoo et al. 2024 (MDLM), eq. 10, for the diffusion part; the sum of both as in Nemotron-Labs-Diffusion.

    Examples:
        >>> ids, noise_mask = torch.tensor([[3, 1, 4, 1]]), torch.tensor([[1, 0, 1, 0]])
        >>> masks = noise_mask, torch.full((1, 4), 0.5), torch.ones(1, 4)
        >>> # the diffusion logits of 4 positions, then their AR logits
        >>> logits = torch.zeros(1, 8, 10)
        >>> counts = {"num_diffusion_tokens": 4, "num_ar_tokens": 3}
        >>> out = HybridDiffusionLLMLoss(alpha=0.5)(
        ...     logits, ids, *masks, loss_mask_ar=torch.ones(1, 4), **counts
        ... )
        >>> # 1 + 0.5, and 0.5
        >>> [
        ...     round((part / math.log(10)).item(), 4)
        ...     for part in (out.total_loss, out.dllm_loss)
        ... ]
        [1.5, 0.5]

    Args:
        alpha: weight of the diffusion part, a finite constant.
        fp32_upcast: the loss is always computed in float32 (float64 for float64 logits). False rounds each token's NLL
            to the dtype of the logits, like a cross-entropy computed in that dtype.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
        reduction: "total", or "none" to also return the loss of each row: ``[B, 2 L]``, the rows of the diffusion part,
            with ``alpha`` in their weights, followed by the rows of the AR part; without an AR part ``[B, L]``.
        backend: "auto", "triton" or "torch".
        shift: True for a model whose row i predicts token i + 1 (Dream, DiffuCoder, Fast-dLLM v2). Targets, masks and
            weights are shifted, never the logits. Token 0 is not predicted. Row i of ``row_losses`` and ``row_weights``
            holds token i + 1, and the last row is 0. This applies to the diffusion part. The rows of the AR part always
            predict the next token.
    """

    def __init__(
        self, alpha: float = 1.0, fp32_upcast: bool = True, *, softcap: float | None = None, scale: float | None = None,
        skip_id: int | None = None, reduction: str = "total", backend: str = "auto", shift: bool = False,
    ) -> None:  # fmt: skip
        """Initialize; the arguments are documented on the class."""
        super().__init__(
            fp32_upcast, softcap=softcap, scale=scale, skip_id=skip_id, reduction=reduction, backend=backend,
            shift=shift,
        )  # fmt: skip
        self.alpha = alpha
        self._check_alpha()

    def forward_fused(  # type: ignore[override]
        self, hidden: Tensor, lm_head_weight: Tensor, target_ids: Tensor, noise_mask: Tensor, p_mask: Tensor,
        loss_mask: Tensor, loss_mask_ar: Tensor | None = None, num_diffusion_tokens: Count = None,
        num_ar_tokens: Count = None, causal_hidden: Tensor | None = None, noisy_input_ids: Tensor | None = None, *,
        lm_head_bias: Tensor | None = None, extra: Extra | None = None, chunk_size: int | None = None,
        num_active: int | None = None, logits_dtype: torch.dtype | None = None,
    ) -> DLLMLossOutput:  # fmt: skip
        """Compute :meth:`forward` of ``LinearLogits(hidden, lm_head_weight, lm_head_bias, extra, ...)``.

        ``causal_hidden [B, L, D]`` are the hidden states of ``causal_logits``, of the same head without ``extra``. As
        in the original, it precedes ``noisy_input_ids``.
        """
        return super().forward_fused(
            hidden, lm_head_weight, target_ids, noise_mask, p_mask, loss_mask, loss_mask_ar, num_diffusion_tokens,
            num_ar_tokens, noisy_input_ids, causal_hidden=causal_hidden, lm_head_bias=lm_head_bias, extra=extra,
            chunk_size=chunk_size, num_active=num_active, logits_dtype=logits_dtype,
        )  # fmt: skip

    def _loss(self, rows: ModelOutput, batch: Batch, causal: ModelOutput | None) -> DLLMLossOutput:
        ids = batch.target_ids
        check_tensor(rows.names.rows, rows.x)
        check_tensor("target_ids", ids)
        both = rows.x.dim() == 3 and ids.dim() == 2
        concatenated = causal is None and both and rows.x.shape[1] > ids.shape[1]
        branches = concatenated and batch.loss_mask_ar is not None
        # without an AR part, any number of positions may follow the diffusion rows
        width = 2 * ids.shape[1] if branches else rows.x.shape[1] if concatenated else None
        outputs = 1 if causal is None or batch.loss_mask_ar is None else 2
        raw, rows = rows, rows.checked(ids, width=width, branches=outputs)
        batch.check_unused(causal=causal, noisy_input_ids=batch.noisy_input_ids)
        self._check_alpha()
        check_constant("alpha", self.alpha)
        check_constant("loss_mask_ar", batch.loss_mask_ar)
        weights, divided = self._weights(batch, rows)
        aligned = self._aligned(rows, batch, weights, divided)
        if batch.loss_mask_ar is not None and (branches or causal is not None):
            rows.check_targets(ids, batch.loss_mask_ar[:, 1:], shift=1)
        if causal is None or batch.loss_mask_ar is None:
            return self._one_call(rows, batch, aligned)
        return self._two_branches(rows, causal.beside(raw, rows) or causal.checked(ids, branches=2), batch, aligned)

    def _check_alpha(self) -> None:
        """Validate ``alpha``, on every call because the attribute may have been reassigned."""
        alpha: Any = self.alpha
        if not isinstance(alpha, Tensor):
            check_number("alpha", alpha, "a number or a 0-d tensor")
            check_finite("alpha", alpha)
        elif alpha.numel() != 1 or alpha.is_complex():
            raise ValueError(
                f"alpha must be a number or a 0-d tensor, got a tensor of shape {tuple(alpha.shape)}, {alpha.dtype}"
            )

    def _weights(self, batch: Batch, rows: ModelOutput) -> tuple[Tensor, Tensor]:
        return batch.mdlm_weights(rows, plain(self.alpha))

    def _one_call(self, rows: ModelOutput, batch: Batch, aligned: Aligned) -> DLLMLossOutput:
        """Compute one call over the concatenated rows. Rows after those of the batch are the AR branch, or ignored.

        ``aligned``: of the rows of the diffusion part.
        """
        targets, weights, divided = aligned
        targets, L = targets.long(), targets.shape[1]
        num_trailing = rows.x.shape[1] - L
        if not num_trailing:
            return self._single_part_output(rows, targets, weights, divided)
        if batch.loss_mask_ar is None:
            targets = F.pad(targets, (0, num_trailing), value=IGNORE)
            all_weights, all_divided = (F.pad(t, (0, num_trailing)) for t in (weights, divided))
        else:
            shifted, ar, divided_ar = _shifted(batch, rows.accum_dtype)
            pairs = (targets, shifted), (weights, ar), (divided, divided_ar)
            targets, all_weights, all_divided = (torch.cat(pair, 1) for pair in pairs)
        if not self._returns_rows():
            out = rows.weighted(targets, all_divided)
            return DLLMLossOutput(out.loss, logged_sum(out.nll[:, :L], divided), weight_sum=all_weights.sum())
        nll = rows.per_row(targets, all_weights).nll
        if batch.loss_mask_ar is None:
            return single_loss(sum_of_rows(nll[:, :L], divided), weights, weighted_rows(nll[:, :L], weights))
        return _per_row_output(nll, all_weights, all_divided, L)

    def _two_branches(self, rows: ModelOutput, other: ModelOutput, batch: Batch, aligned: Aligned) -> DLLMLossOutput:
        """Compute both branches: two calls on logits, or one pass over the LM head; see :meth:`_one_call`."""
        targets, weights, divided = aligned
        targets = targets.long()
        shifted, ar, divided_ar = _shifted(batch, rows.accum_dtype)
        both = rows.stack(other)
        if not self._returns_rows():
            weight_sum = weights.sum() + ar.sum()
            if both is None:
                diffusion = rows.weighted(targets, divided).loss
                total = diffusion + other.weighted(shifted, divided_ar).loss
                return DLLMLossOutput(total, diffusion.detach().clone(), weight_sum=weight_sum)
            out = both.weighted(torch.stack([targets, shifted]), torch.stack([divided, divided_ar]))
            return DLLMLossOutput(out.loss, logged_sum(out.nll[0], divided), weight_sum=weight_sum)
        if both is None:
            nlls = rows.per_row(targets, weights).nll, other.per_row(shifted, ar).nll
        else:
            nlls = (*both.per_row(torch.stack([targets, shifted]), torch.stack([weights, ar])).nll,)
        nll, all_weights, all_divided = (torch.cat(pair, 1) for pair in (nlls, (weights, ar), (divided, divided_ar)))
        return _per_row_output(nll, all_weights, all_divided, targets.shape[1])


def _per_row_output(nll: Tensor, weights: Tensor, divided: Tensor, L: int) -> DLLMLossOutput:
    """Build the output with the rows of both parts; the first L rows are the diffusion part."""
    diffusion = sum_of_rows(nll[:, :L], divided[:, :L])
    out = single_loss(diffusion + sum_of_rows(nll[:, L:], divided[:, L:]), weights, weighted_rows(nll, weights))
    return replaced(out, dllm_loss=diffusion.detach().clone())


def _shifted(batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return next-token targets and the detached, possibly fractional AR weights, before and over the denominator."""
    assert batch.loss_mask_ar is not None
    ar = shift_left(batch.loss_mask_ar.detach().to(dtype))
    return next_tokens(batch.target_ids), ar, divide(ar, batch.num_ar_tokens)
