"""Pure PyTorch oracle of every documented routine: the plainest code, straight from the equations.

Imports torch and the standard library, and nothing of ``dllm_kernels``: an oracle that shares code with what
it judges is no oracle.
"""

from reference.block_diffusion import block_diffusion_loss
from reference.dflash import decay_weights, dflash_loss, draft_accuracy_per_position
from reference.encoder_ar import encoder_ar_loss
from reference.hybrid import HybridLoss, hybrid_loss
from reference.linear_nll import linear_logits, linear_token_nll, weighted_linear_nll
from reference.mdlm import mdlm_loss
from reference.token_nll import argmax_match, compute_per_token_nll, token_lse, token_nll, weighted_nll

__all__ = [
    "HybridLoss",
    "argmax_match",
    "block_diffusion_loss",
    "compute_per_token_nll",
    "decay_weights",
    "dflash_loss",
    "draft_accuracy_per_position",
    "encoder_ar_loss",
    "hybrid_loss",
    "linear_logits",
    "linear_token_nll",
    "mdlm_loss",
    "token_lse",
    "token_nll",
    "weighted_linear_nll",
    "weighted_nll",
]
