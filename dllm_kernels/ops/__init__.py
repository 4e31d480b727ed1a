"""Functional ops below the losses and corruption routines, for writing new ones."""

from dllm_kernels.corruption._gumbel_topk import gumbel_topk_mask
from dllm_kernels.ops.divergence import Divergence, divergence, linear_divergence
from dllm_kernels.ops.dpace_weights import dpace_weights
from dllm_kernels.ops.linear_nll import linear_token_nll, weighted_linear_nll
from dllm_kernels.ops.linear_sample import LinearSample, linear_sample
from dllm_kernels.ops.row_objective import RowObjective, linear_row_objective, row_objective
from dllm_kernels.ops.row_stats import RowStats, linear_row_stats, row_stats
from dllm_kernels.ops.soft_embedding import soft_embedding
from dllm_kernels.ops.token_log_probs import TokenLogProbs, token_log_probs
from dllm_kernels.ops.token_nll import TokenNLL, WeightedNLL, token_nll, weighted_nll
from dllm_kernels.ops.topk_divergence import linear_topk_divergence, topk_divergence
from dllm_kernels.rows._logits import LinearLogits

__all__ = [
    "Divergence",
    "LinearLogits",
    "LinearSample",
    "RowObjective",
    "RowStats",
    "TokenLogProbs",
    "TokenNLL",
    "WeightedNLL",
    "divergence",
    "dpace_weights",
    "gumbel_topk_mask",
    "linear_divergence",
    "linear_row_objective",
    "linear_row_stats",
    "linear_sample",
    "linear_token_nll",
    "linear_topk_divergence",
    "row_objective",
    "row_stats",
    "soft_embedding",
    "token_log_probs",
    "token_nll",
    "topk_divergence",
    "weighted_linear_nll",
    "weighted_nll",
]
