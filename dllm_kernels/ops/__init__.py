"""The functional primitives under every loss and corruption, for people who write a new one."""

from dllm_kernels.ops._results import TokenNLL, WeightedNLL
from dllm_kernels.ops.gumbel_topk import gumbel_topk_mask
from dllm_kernels.ops.linear_nll import linear_token_nll, weighted_linear_nll
from dllm_kernels.ops.token_nll import token_nll, weighted_nll

__all__ = [
    "TokenNLL",
    "WeightedNLL",
    "gumbel_topk_mask",
    "linear_token_nll",
    "token_nll",
    "weighted_linear_nll",
    "weighted_nll",
]
