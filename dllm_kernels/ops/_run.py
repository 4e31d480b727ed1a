"""The ops on plain tensors: rows flattened, then the eager Function or, under torch.compile, the compiled op."""

from __future__ import annotations

from types import ModuleType

import torch

from dllm_kernels.ops import _eager
from dllm_kernels.ops._checks import check_inplace
from dllm_kernels.ops._plan import LinearJob, LinearStatsJob, LogitsJob, Plan, StatsJob
from dllm_kernels.ops._results import RowStats, TokenNLL, WeightedNLL, row_ids, row_marks, row_targets
from dllm_kernels.ops._rows import as_blv
from dllm_kernels.ops._stats import ask_of
from dllm_kernels.ops._stats_rows import Ask


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


def row_stats(job: StatsJob, plan: Plan) -> RowStats:
    """Statistics of rows of logits, with a gradient a row and output."""
    rows = job.logits.shape[:-1]
    return RowStats.of(job.ids.shape, rows, *_implementation().row_stats(job.logits, _ask(job, rows, plan), plan))


def linear_row_stats(job: LinearStatsJob, plan: Plan) -> RowStats:
    """Statistics of rows of hidden states, with a gradient a row and output."""
    rows = job.hidden.shape[:-1]
    flat = job._replace(hidden=job.hidden.reshape(-1, job.hidden.shape[-1]))
    return RowStats.of(job.ids.shape, rows, *_implementation().linear_row_stats(flat, _ask(job, rows, plan), plan))


def _ask(job: StatsJob | LinearStatsJob, rows: torch.Size, plan: Plan) -> Ask:
    ids = row_ids(job.ids, rows, plan)
    a, b = (None if t is None else t.detach().reshape(-1).to(plan.acc).contiguous() for t in (job.a, job.b))
    return ask_of(plan, ids, row_marks(job.active, ids), a, b)


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
