"""A row op on plain tensors: rows flattened, then the autograd Function or, under torch.compile, the compiled op.

Where a tensor is a DTensor, ``distributed/`` makes the job local to its rank first. Nothing here knows of it: the package's
``__init__`` says what to load, at the first DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from dllm_kernels.base._checks import check_inplace
from dllm_kernels.base._named import replaced
from dllm_kernels.base._plain import check_no_tangent, has_values, is_dtensor
from dllm_kernels.base._rows import as_blv
from dllm_kernels.rows import _eager
from dllm_kernels.rows._plan import Job, Options, Plan
from dllm_kernels.rows._records import RowOp
from dllm_kernels.rows._teacher import Pair

Run = Callable[[RowOp, Job, Plan], Any]
_of_dtensors: list[Callable[[], Run]] = []


def dtensors_by(load: Callable[[], Run]) -> None:
    """Say how to load what runs an op where a tensor of the job is a DTensor."""
    _of_dtensors[:] = [load]


def run(op: RowOp, job: Job, options: Options, objective: Any = None, pair: Pair | None = None) -> Any:
    """What the op returns to its caller, in the shape of the caller's rows; the job and its options have been checked."""
    check_no_tangent(*job.leaves)
    plan = Plan.of(job, options, objective, pair)
    if not any(is_dtensor(t) for t in (*job, *(plan.pair.tensors if plan.pair is not None else ()))):
        return run_plain(op, job, plan)
    (load,) = _of_dtensors
    return load()(op, job, plan)


def run_plain(op: RowOp, job: Job, plan: Plan) -> Any:
    """The same on plain tensors."""
    if plan.options.inplace_backward:
        check_inplace(job.x, as_blv(job.x))
    if plan.objective is not None:
        N = job.x.shape[:-1].numel()
        plan = replaced(
            plan, objective=plan.objective.map(lambda t: t.detach().reshape(N, *t.shape[job.x.dim() - 1 :]))
        )
    if plan.pair is not None:
        plan = replaced(plan, pair=plan.pair.flat())
    shown = _implementation(job).call(op, _flat(op, job, plan), plan)
    return op.result(plan, job.ids.shape, job.x.shape[:-1], *shown)


def _implementation(job: Job) -> ModuleType:
    """The compiled ops serve tensors without values too. They are loaded only then, since registering takes time."""
    if not torch.compiler.is_compiling() and has_values(job.x):
        return _eager
    from dllm_kernels.rows import _compiled

    return _compiled


def _flat(op: RowOp, job: Job, plan: Plan) -> Job:
    """The job over N rows, as :class:`Job` describes it; logits stay as they are."""
    x = job.x if job.weight is None else job.x.reshape(-1, job.x.shape[-1])
    u = None if job.extra_x is None else job.extra_x.reshape(-1, job.extra_x.shape[-1])
    per_row = (None if t is None else t.detach().reshape(-1).to(plan.acc).contiguous() for t in job.of_rows[2:])
    return Job.of((x, job.weight, job.bias, u, job.extra_weight), (*op.rows(job, plan), *per_row), job.table)
