"""Block diffusion with uniform corruption: the plain mean cross-entropy over the supervised canvas."""

from __future__ import annotations

import torch
from torch import nn

from dllm_kernels.losses._common import (
    HIDDEN,
    LOGITS,
    DLLMLossOutput,
    check_bl,
    check_counts,
    check_masks,
    check_not_swapped,
    check_optional,
    divide,
    normalized,
    single_loss,
)
from dllm_kernels.ops import weighted_linear_nll, weighted_nll
from dllm_kernels.ops._plain import all_plain


class BlockDiffusionCrossEntropyLoss(nn.Module):
    r"""Mean cross-entropy over every supervised position, corrupted or not.

    .. math:: \text{loss} = \frac{1}{N} \sum_{i\,\in\,\text{supervised}} \text{nll}_i

    Corruption replaces tokens by random ones (D3PM with a uniform kernel), which has no 1/t weight, so the loss is flat
    whatever ``p_mask`` says.

    Source: Austin et al. 2021, "Structured Denoising Diffusion Models in Discrete State-Spaces", sections 3.1 and 3.4
    (uniform kernel, cross-entropy term).

    Args:
        fp32_upcast: as in :class:`MDLMCrossEntropyLoss`.
        backend: "auto", "triton" or "torch".
    """

    def __init__(self, fp32_upcast: bool = True, *, backend: str = "auto") -> None:
        super().__init__()
        self.fp32_upcast = fp32_upcast
        self.backend = backend

    def forward(
        self,
        logits: torch.Tensor,
        target_ids: torch.Tensor,
        noise_mask: torch.Tensor,
        p_mask: torch.Tensor,
        loss_mask: torch.Tensor,
        loss_mask_ar: torch.Tensor | None = None,
        num_diffusion_tokens: int | torch.Tensor | None = None,
        num_ar_tokens: int | torch.Tensor | None = None,
        causal_logits: torch.Tensor | None = None,
        noisy_input_ids: torch.Tensor | None = None,
    ) -> DLLMLossOutput:
        """Compute the loss from logits.

        Args:
            logits: ``[B, L, V]``, any float dtype.
            target_ids: ``[B, L]`` integers, the clean tokens; -100 counts as NLL 0.
            noise_mask: not used; there so that all losses are called alike.
            p_mask: not used.
            loss_mask: ``[B, L]``, nonzero where the token is supervised.
            loss_mask_ar: not used.
            num_diffusion_tokens: divides the sum, as ``max(n, 1)``; None: the number of supervised positions here.
            num_ar_tokens: not used.
            causal_logits: not used.
            noisy_input_ids: not used.

        Returns:
            :class:`DLLMLossOutput` with ``total_loss == dllm_loss``.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices that do not fit.
        """
        check_bl(LOGITS, logits, target_ids)
        check_counts(num_diffusion_tokens=num_diffusion_tokens, num_ar_tokens=num_ar_tokens)
        unused = {"noise_mask": noise_mask, "p_mask": p_mask, "causal_logits": causal_logits}
        check_optional(target_ids, loss_mask_ar, noisy_input_ids=noisy_input_ids, **unused)
        check_not_swapped(p_mask)
        weights, count = _weights(target_ids, loss_mask, num_diffusion_tokens)
        rows = weighted_nll(logits, target_ids, weights, round_nll=not self.fp32_upcast, backend=self.backend)
        return single_loss(divide(rows.loss, count))

    def forward_fused(
        self,
        hidden: torch.Tensor,
        lm_head_weight: torch.Tensor,
        target_ids: torch.Tensor,
        noise_mask: torch.Tensor,
        p_mask: torch.Tensor,
        loss_mask: torch.Tensor,
        loss_mask_ar: torch.Tensor | None = None,
        num_diffusion_tokens: int | torch.Tensor | None = None,
        num_ar_tokens: int | torch.Tensor | None = None,
        noisy_input_ids: torch.Tensor | None = None,
        *,
        lm_head_bias: torch.Tensor | None = None,
        chunk_size: int | None = None,
    ) -> DLLMLossOutput:
        """Compute the same loss from hidden states and the LM head; the logits exist one chunk at a time.

        Args:
            hidden: ``[B, L, D]``.
            lm_head_weight: ``[V, D]``.
            target_ids: as in :meth:`forward`.
            noise_mask: not used.
            p_mask: not used.
            loss_mask: as in :meth:`forward`.
            loss_mask_ar: not used.
            num_diffusion_tokens: as in :meth:`forward`.
            num_ar_tokens: not used.
            noisy_input_ids: not used.
            lm_head_bias: ``[V]`` or None.
            chunk_size: rows of logits that exist at a time; None chooses.

        Returns:
            :class:`DLLMLossOutput` with ``total_loss == dllm_loss``.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices that do not fit.
        """
        check_bl(HIDDEN, hidden, target_ids, lm_head_weight, lm_head_bias)
        check_counts(num_diffusion_tokens=num_diffusion_tokens, num_ar_tokens=num_ar_tokens)
        unused = {"noise_mask": noise_mask, "p_mask": p_mask}
        check_optional(target_ids, loss_mask_ar, noisy_input_ids=noisy_input_ids, **unused)
        check_not_swapped(p_mask)
        weights, count = _weights(target_ids, loss_mask, num_diffusion_tokens)
        rows = weighted_linear_nll(
            hidden, lm_head_weight, target_ids, normalized(weights, count, hidden), bias=lm_head_bias, chunk_size=chunk_size,
            round_nll=not self.fp32_upcast, backend=self.backend,
        )  # fmt: skip
        return single_loss(rows.loss)


def _weights(
    target_ids: torch.Tensor, loss_mask: torch.Tensor, count: int | torch.Tensor | None
) -> tuple[torch.Tensor, int | torch.Tensor]:
    target_ids, loss_mask = all_plain(target_ids, loss_mask)
    check_masks(target_ids, loss_mask=loss_mask)
    supervised = loss_mask.bool()
    return supervised, supervised.sum() if count is None else count
