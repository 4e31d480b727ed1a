"""Fused losses and corruption for training diffusion language models: change the import, keep the code."""

# ruff: noqa: F403, F405 -- the names of each package are listed in its __all__, and those of this one below
from dllm_kernels._core._run import Run, dtensors_by
from dllm_kernels.collate import DLLMCollator
from dllm_kernels.corruption import *
from dllm_kernels.losses import *
from dllm_kernels.mtp import *
from dllm_kernels.ops import *

__version__ = "0.1.0"

_batched_gumbel_topk = batched_gumbel_topk
_compute_per_token_nll = compute_per_token_nll


def _run_of_dtensors() -> Run:
    from dllm_kernels.distributed.run import run

    return run


dtensors_by(_run_of_dtensors)

__all__ = [
    "BlockDiffusionCrossEntropyLoss",
    "DFlashDecayLoss",
    "DLLMCollator",
    "DLLMLossOutput",
    "Divergence",
    "DraftDistillationLoss",
    "FusedLinearCrossEntropy",
    "HybridDiffusionLLMLoss",
    "IDLMLoss",
    "MDLMCrossEntropyLoss",
    "MTPLossConfig",
    "MTPLossOutput",
    "MaskedCrossEntropy",
    "PipelineCausalLMLoss",
    "RowObjective",
    "RowStats",
    "SCDDLoss",
    "SCDDSchedule",
    "TokenLogProbs",
    "__version__",
    "acceptance_length",
    "batched_gumbel_topk",
    "calculate_loss",
    "calculate_mtp_loss",
    "complementary",
    "compute_per_token_nll",
    "corrupt_all_masked",
    "corrupt_blockwise",
    "corrupt_mix",
    "corrupt_uniform",
    "corrupt_uniform_random",
    "divergence",
    "dpace_weights",
    "draft_accuracy",
    "encoder_ar_loss",
    "encoder_ar_loss_fused",
    "gumbel_topk",
    "gumbel_topk_mask",
    "linear_divergence",
    "linear_row_objective",
    "linear_row_stats",
    "linear_token_nll",
    "row_objective",
    "row_stats",
    "sample_level",
    "scdd_schedule",
    "soft_embedding",
    "token_log_probs",
    "token_nll",
    "weighted_linear_nll",
    "weighted_nll",
]
