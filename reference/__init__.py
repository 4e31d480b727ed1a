"""Pure PyTorch oracle of every documented routine, written as simply as possible from the equations.

Imports only torch and the standard library, not ``dllm_kernels``, because an oracle must not share code with the
package that it tests.
"""

from reference.block_diffusion import block_diffusion_loss
from reference.collate import collate
from reference.corruption import *  # noqa: F403
from reference.corruption import __all__ as _of_corruption
from reference.dflash import (
    acceptance_length,
    acceptance_stats,
    decay_weights,
    dflash_loss,
    draft_accuracy_per_position,
)
from reference.divergence import Divergence, divergence, linear_divergence, row_divergence
from reference.dpace_weights import dpace_weights
from reference.draft_distillation import draft_distillation_loss
from reference.draft_sampling import block_targets, prefix_probabilities, prefix_weights, sample_anchors
from reference.encoder_ar import encoder_ar_loss
from reference.generate import diffusion_generate, num_transfer_tokens, steps_of_blocks
from reference.gumbel_topk import batched_gumbel_topk, gumbel_topk
from reference.hybrid import HybridLoss, hybrid_loss
from reference.idlm import IDLMLoss, idlm_loss
from reference.linear_nll import linear_logits, linear_token_nll, weighted_linear_nll
from reference.linear_sample import linear_sample, truncated
from reference.mdlm import mdlm_loss
from reference.mtp import (
    MTPLoss,
    masked_cross_entropy,
    mtp_labels,
    mtp_loss,
    seq_idx_from_cu_seqlens,
)
from reference.policy import (
    PolicyViews,
    eubo,
    policy_loss,
    policy_objective,
    policy_views,
    sequence_scores,
    token_scores,
)
from reference.row_objective import linear_row_objective, row_objective
from reference.row_stats import RowStats, linear_row_stats, row_stats
from reference.scdd import SCDDSchedule, scdd_loss, scdd_schedule
from reference.soft_embedding import soft_embedding
from reference.token_nll import (
    argmax_match,
    compute_per_token_nll,
    predicted_ids,
    token_lse,
    token_nll,
    weighted_nll,
)
from reference.topk_divergence import linear_topk_divergence, topk_divergence
from reference.transform import possible_targets, transformed

__all__ = [
    *_of_corruption,
    "Divergence",
    "HybridLoss",
    "IDLMLoss",
    "MTPLoss",
    "PolicyViews",
    "RowStats",
    "SCDDSchedule",
    "acceptance_length",
    "acceptance_stats",
    "argmax_match",
    "batched_gumbel_topk",
    "block_diffusion_loss",
    "block_targets",
    "collate",
    "compute_per_token_nll",
    "decay_weights",
    "dflash_loss",
    "diffusion_generate",
    "divergence",
    "dpace_weights",
    "draft_accuracy_per_position",
    "draft_distillation_loss",
    "encoder_ar_loss",
    "eubo",
    "gumbel_topk",
    "hybrid_loss",
    "idlm_loss",
    "linear_divergence",
    "linear_logits",
    "linear_row_objective",
    "linear_row_stats",
    "linear_sample",
    "linear_token_nll",
    "linear_topk_divergence",
    "masked_cross_entropy",
    "mdlm_loss",
    "mtp_labels",
    "mtp_loss",
    "num_transfer_tokens",
    "policy_loss",
    "policy_objective",
    "policy_views",
    "possible_targets",
    "predicted_ids",
    "prefix_probabilities",
    "prefix_weights",
    "row_divergence",
    "row_objective",
    "row_stats",
    "sample_anchors",
    "scdd_loss",
    "scdd_schedule",
    "seq_idx_from_cu_seqlens",
    "sequence_scores",
    "soft_embedding",
    "steps_of_blocks",
    "token_lse",
    "token_nll",
    "token_scores",
    "topk_divergence",
    "transformed",
    "truncated",
    "weighted_linear_nll",
    "weighted_nll",
]
