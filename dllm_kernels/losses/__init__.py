"""Losses of diffusion language models. Each builds targets, row weights and a denominator and calls one op."""

from dllm_kernels.losses._common import DLLMLossOutput, next_token_mask
from dllm_kernels.losses.block_diffusion import BlockDiffusionCrossEntropyLoss
from dllm_kernels.losses.dflash import DFlashDecayLoss
from dllm_kernels.losses.draft_distillation import DraftDistillationLoss
from dllm_kernels.losses.draft_metrics import acceptance_length, acceptance_stats, draft_accuracy
from dllm_kernels.losses.draft_sampling import block_targets, sample_anchors, sample_prefix
from dllm_kernels.losses.encoder_ar import compute_per_token_nll, encoder_ar_loss, encoder_ar_loss_fused
from dllm_kernels.losses.hybrid import HybridDiffusionLLMLoss
from dllm_kernels.losses.idlm import IDLMLoss
from dllm_kernels.losses.mdlm import MDLMCrossEntropyLoss
from dllm_kernels.losses.scdd import SCDDLoss, SCDDSchedule, scdd_schedule

_compute_per_token_nll = compute_per_token_nll

__all__ = [
    "BlockDiffusionCrossEntropyLoss",
    "DFlashDecayLoss",
    "DLLMLossOutput",
    "DraftDistillationLoss",
    "HybridDiffusionLLMLoss",
    "IDLMLoss",
    "MDLMCrossEntropyLoss",
    "SCDDLoss",
    "SCDDSchedule",
    "acceptance_length",
    "acceptance_stats",
    "block_targets",
    "compute_per_token_nll",
    "draft_accuracy",
    "encoder_ar_loss",
    "encoder_ar_loss_fused",
    "next_token_mask",
    "sample_anchors",
    "sample_prefix",
    "scdd_schedule",
]
