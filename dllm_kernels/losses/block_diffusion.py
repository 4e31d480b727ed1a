"""Block diffusion with uniform corruption: mean cross-entropy over the supervised positions."""

from __future__ import annotations

from torch import Tensor

from dllm_kernels._checks import check_masks_like
from dllm_kernels.losses._base import Batch, DiffusionLoss, check_optional_tensors
from dllm_kernels.losses._common import divide
from dllm_kernels.losses._model_output import ModelOutput


class BlockDiffusionCrossEntropyLoss(DiffusionLoss):
    r"""Mean cross-entropy over every supervised position, corrupted or not.

    .. math:: \text{loss} = \frac{1}{N} \sum_{i\,\in\,\text{supervised}} \text{nll}_i

    Corruption replaces tokens by random ones (D3PM with a uniform kernel). Its loss has no weight 1/t, so every
    supervised position has the weight 1 and ``p_mask`` is not used. N is ``num_diffusion_tokens``, or if None the
    number of supervised positions of this call.

    Source: Austin et al. 2021, "Structured Denoising Diffusion Models in Discrete State-Spaces", sections 3.1 and 3.4
    (uniform kernel, cross-entropy term).

    Args:
        fp32_upcast: the loss is always computed in float32 (float64 for float64 logits). False rounds each token's NLL
            to the dtype of the logits, like a cross-entropy computed in that dtype.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
        reduction: "total", or "none" to also return the loss of each row, here the NLL of the supervised positions.
        backend: "auto", "triton" or "torch".
        shift: True for a model whose row i predicts token i + 1 (Dream, DiffuCoder, Fast-dLLM v2). Targets, masks and
            weights are shifted, never the logits. Token 0 is not predicted. Row i of ``row_losses`` and ``row_weights``
            holds token i + 1, and the last row is 0. If N is counted, it does not include token 0.
    """

    def _weights(self, batch: Batch, rows: ModelOutput) -> tuple[Tensor, Tensor]:
        check_optional_tensors(noise_mask=batch.noise_mask, p_mask=batch.p_mask)
        check_masks_like("target_ids", batch.target_ids, loss_mask=batch.loss_mask)
        batch.check_unused_noise()
        batch.check_not_swapped()
        supervised = batch.supervised
        weights = supervised.to(rows.accum_dtype)
        return weights, divide(weights, batch.num_diffusion_tokens, supervised)
