"""Masked diffusion (MDLM, LLaDA): cross-entropy of the masked tokens, weighted by 1/t."""

from __future__ import annotations

from torch import Tensor

from dllm_kernels.losses._base import Batch, DiffusionLoss
from dllm_kernels.losses._model_output import ModelOutput


class MDLMCrossEntropyLoss(DiffusionLoss):
    r"""Masked diffusion cross-entropy with the weight 1/t of a linear schedule.

    .. math:: \text{loss} = \frac{1}{N} \sum_{i\,\in\,\text{noise} \cap \text{supervised}} \frac{\text{nll}_i}{p_i}

    :math:`p_i` is the probability with which position i was masked, at least 1e-8. N is ``num_diffusion_tokens``: the
    number of supervised tokens of the whole step, masked or not, because 1/p accounts for the unmasked tokens. With the
    number of masked tokens as N, the loss is not a bound on the likelihood, and its scale depends on the fraction of
    masked tokens.

    Positions outside the masks are not read, so a NaN in them affects neither the loss nor the gradient. (An
    implementation that multiplies by 0 returns NaN.)

    Source: Sahoo et al. 2024, "Simple and Effective Masked Diffusion Language Models", eq. 10; Nie et al. 2025, "Large
    Language Diffusion Models", eq. 3.

    Examples:
        >>> # equal probabilities: each NLL is log 10
        >>> ids, logits = torch.tensor([[3, 1, 4, 1]]), torch.zeros(1, 4, 10)
        >>> noise_mask = torch.tensor([[True, False, True, False]])
        >>> p_mask = torch.full((1, 4), 0.5)
        >>> loss_fn = MDLMCrossEntropyLoss()
        >>> out = loss_fn(
        ...     logits,
        ...     ids,
        ...     noise_mask,
        ...     p_mask,
        ...     loss_mask=torch.ones(1, 4),
        ...     num_diffusion_tokens=4,
        ... )
        >>> round(out.total_loss.item(), 4)  # two masked tokens of four, 1 / 0.5 each
        2.3026
        >>> hidden, weight = torch.zeros(1, 4, 8), torch.zeros(10, 8)  # without logits
        >>> masks = noise_mask, p_mask, torch.ones(1, 4)
        >>> fused = loss_fn.forward_fused(
        ...     hidden, weight, ids, *masks, num_diffusion_tokens=4
        ... )
        >>> bool(fused.total_loss == out.total_loss)
        True

    Args:
        fp32_upcast: the loss is always computed in float32 (float64 for float64 logits). False rounds each token's NLL
            to the dtype of the logits, like a cross-entropy computed in that dtype.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
        reduction: "total" returns the loss only. "none" also returns ``row_losses`` and ``row_weights`` of
            :class:`DLLMLossOutput`, for custom denominators. ``row_losses`` is :math:`\text{nll}_i / p_i`, before the
            division by N, differentiable with any gradient per row. From hidden states with a trainable head the logits
            are then computed twice.
        backend: "auto", "triton" or "torch".
        shift: True for a model whose row i predicts token i + 1 (Dream, DiffuCoder, Fast-dLLM v2). Targets, masks and
            weights are shifted, never the logits. Token 0 is not predicted. Row i of ``row_losses`` and ``row_weights``
            holds token i + 1, and the last row is 0. N is used as given, so do not count token 0 in it.
    """

    def _weights(self, batch: Batch, rows: ModelOutput) -> tuple[Tensor, Tensor]:
        return batch.mdlm_weights(rows)
