"""Who does a job: ``rows/_run.py`` where all tensors are plain, and what ``distributed/`` registers where one is a DTensor.

Nothing here knows who handles DTensors. The package's ``__init__`` says how to load it, at the first DTensor; on loading it
registers itself, and calls ``_run`` with what is local to its rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dllm_kernels.base._plain import is_dtensor
from dllm_kernels.rows import _run
from dllm_kernels.rows._plan import Job, Plan
from dllm_kernels.rows._records import RowOp

Run = Callable[[RowOp, Job, Plan], Any]

_load: Callable[[], object] = int
_of_dtensors: list[Run] = []


def handlers_from(loader: Callable[[], object]) -> None:
    """Say what to call before a handler of DTensors is needed: it has to register one."""
    global _load
    _load = loader


def handles_dtensors(run: Run) -> Run:
    """Register the function that does any op where a tensor of the job is a DTensor.

    It stays out of what torch.compile traces: it communicates, and sizes its work by the rank.
    """
    _of_dtensors[:] = [torch.compiler.disable(run, reason="losses on DTensors run outside the graph")]  # type: ignore[no-untyped-call]
    return run


def route(op: RowOp, job: Job, plan: Plan) -> Any:
    """Do a job."""
    if not any(is_dtensor(t) for t in (*job, *(plan.pair.tensors if plan.pair is not None else ()))):
        return _run.run(op, job, plan)
    _load()
    return _of_dtensors[0](op, job, plan)
