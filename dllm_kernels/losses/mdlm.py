"""Masked diffusion (MDLM, LLaDA): cross-entropy of the masked tokens, weighted by 1/t."""

from __future__ import annotations

import torch
from torch import nn

from dllm_kernels.losses._common import (
    HIDDEN,
    LOGITS,
    DLLMLossOutput,
    check_bl,
    check_counts,
    check_optional,
    divide,
    mdlm_weights,
    normalized,
    single_loss,
)
from dllm_kernels.ops import weighted_linear_nll, weighted_nll


class MDLMCrossEntropyLoss(nn.Module):
    r"""Masked diffusion cross-entropy with the weight 1/t of a linear schedule.

    .. math:: \text{loss} = \frac{1}{N} \sum_{i\,\in\,\text{noise} \cap \text{supervised}} \frac{\text{nll}_i}{p_i}

    with :math:`p_i` the probability with which position i was masked, at least 1e-8, and N ``num_diffusion_tokens``.
    Positions outside the masks are not read: NaN there reaches neither the loss nor the gradient (an implementation that
    multiplies by 0 returns NaN).

    Source: Sahoo et al. 2024, "Simple and Effective Masked Diffusion Language Models", eq. 10; Nie et al. 2025, "Large
    Language Diffusion Models", eq. 3.

    Args:
        fp32_upcast: the loss is always computed in float32 (float64 for float64 logits). False rounds each token's NLL
            to the dtype of the logits, which is what a cross-entropy computed in that dtype returns.
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
            noise_mask: ``[B, L]``, nonzero where the token was masked.
            p_mask: ``[B, L]``, the probability with which it was.
            loss_mask: ``[B, L]``, nonzero where the token is supervised.
            loss_mask_ar: not used; there so that all losses are called alike.
            num_diffusion_tokens: divides the sum, as ``max(n, 1)``; int or 0-d tensor. None: the sum itself.
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
        check_optional(target_ids, loss_mask_ar, causal_logits=causal_logits, noisy_input_ids=noisy_input_ids)
        weights = mdlm_weights(logits, target_ids, noise_mask, p_mask, loss_mask)
        rows = weighted_nll(logits, target_ids, weights, round_nll=not self.fp32_upcast, backend=self.backend)
        return single_loss(divide(rows.loss, num_diffusion_tokens))

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
            target_ids: as in :meth:`forward`, and so the masks and counts.
            noise_mask: as in :meth:`forward`.
            p_mask: as in :meth:`forward`.
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
        check_optional(target_ids, loss_mask_ar, noisy_input_ids=noisy_input_ids)
        weights = mdlm_weights(hidden, target_ids, noise_mask, p_mask, loss_mask)
        rows = weighted_linear_nll(
            hidden, lm_head_weight, target_ids, normalized(weights, num_diffusion_tokens, hidden),
            bias=lm_head_bias, chunk_size=chunk_size, round_nll=not self.fp32_upcast, backend=self.backend,
        )  # fmt: skip
        return single_loss(rows.loss)
