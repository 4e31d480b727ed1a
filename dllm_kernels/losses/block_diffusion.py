"""Block diffusion with uniform corruption: mean cross-entropy over the supervised positions."""

from __future__ import annotations

import torch

from dllm_kernels._checks import check_masks_like
from dllm_kernels.losses._base import Batch, DiffusionLoss, check_given
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
        fp32_upcast: {fp32_upcast}
        softcap: {softcap}
        scale: {scale}
        skip_id: {skip_id}
        reduction: "total", or "none" to also return the loss of each row, here the NLL of the supervised positions.
        backend: "auto", "triton" or "torch".
        shift: {shift} If N is counted, it does not include token 0.
    """

    def _weights(self, batch: Batch, rows: ModelOutput) -> tuple[torch.Tensor, torch.Tensor]:
        check_given(noise_mask=batch.noise_mask, p_mask=batch.p_mask)
        check_masks_like("target_ids", batch.target_ids, loss_mask=batch.loss_mask)
        batch.check_unused_noise()
        batch.check_not_swapped()
        supervised = batch.supervised
        weights = supervised.to(rows.accum_dtype)
        return weights, divide(weights, batch.num_diffusion_tokens, supervised)
