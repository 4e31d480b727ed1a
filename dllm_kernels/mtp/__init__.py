r"""Multi-token prediction (MTP): the auxiliary loss, its base losses and its pipeline wrapper.

Depth k = 0 .. D-1 predicts the token k + 2 positions ahead of its input. Its labels are therefore the labels shifted
left by k + 1. Positions without such a label, or with a label from another packed sub-sequence, are ignored:

    L_MTP = scaling_factor / D * sum_k CE(depth k, labels shifted by k + 1).

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2, eq. 24 and 25.
"""

from dllm_kernels.mtp.cross_entropy import FusedLinearCrossEntropy, MaskedCrossEntropy, calculate_loss
from dllm_kernels.mtp.depths import MTPLossOutput, calculate_mtp_loss, mtp_labels
from dllm_kernels.mtp.pipeline import MTPLossConfig, PipelineCausalLMLoss, mtp_loss_scaling_factor

__all__ = [
    "FusedLinearCrossEntropy", "MTPLossConfig", "MTPLossOutput", "MaskedCrossEntropy", "PipelineCausalLMLoss",
    "calculate_loss", "calculate_mtp_loss", "mtp_labels", "mtp_loss_scaling_factor",
]  # fmt: skip
