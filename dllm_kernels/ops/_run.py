"""The ops on plain tensors: rows flattened, then the eager Function or, under torch.compile, the compiled op."""

from __future__ import annotations

from types import ModuleType

import torch

from dllm_kernels.ops import _eager
from dllm_kernels.ops._checks import check_inplace
from dllm_kernels.ops._plan import LinearJob, LogitsJob, Plan
from dllm_kernels.ops._results import TokenNLL, WeightedNLL, row_targets
from dllm_kernels.ops._rows import as_blv


def token_nll(job: LogitsJob, plan: Plan) -> TokenNLL:
    """NLL of rows of logits, with a gradient a row."""
    if plan.inplace_backward:
        check_inplace(job.logits, as_blv(job.logits))
    y = row_targets(job.targets, job.active, plan)
    return TokenNLL.of(plan, job.targets.shape, *_implementation().token_nll(job.logits, y, plan))


def weighted_linear_nll(job: LinearJob, plan: Plan) -> WeightedNLL:
    """Weighted sum of the NLL of rows of hidden states, its gradients made in the forward pass."""
    loss, *rows = _implementation().weighted_linear_nll(_flat(job, plan), plan)
    return WeightedNLL(loss, *TokenNLL.of(plan, job.targets.shape, *rows))


def linear_token_nll(job: LinearJob, plan: Plan) -> TokenNLL:
    """NLL of rows of hidden states, with a gradient a row."""
    return TokenNLL.of(plan, job.targets.shape, *_implementation().linear_token_nll(_flat(job, plan), plan))


def _implementation() -> ModuleType:
    """The compiled ops are loaded only while a graph is traced, since registering them costs import time."""
    if not torch.compiler.is_compiling():
        return _eager
    from dllm_kernels.ops import _compiled

    return _compiled


def _flat(job: LinearJob, plan: Plan) -> LinearJob:
    """The job over N rows, those that do not count marked in the targets."""
    weights = None if job.weights is None else job.weights.reshape(-1).contiguous()
    y = row_targets(job.targets, job.active, plan)
    return LinearJob(job.hidden.reshape(-1, job.hidden.shape[-1]), job.weight, job.bias, y, weights)
