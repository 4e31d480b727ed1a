"""Who does a job: ``ops/_run.py`` where all tensors are plain, and a registered handler where one is a DTensor.

Nothing here knows who handles DTensors. The package's ``__init__`` says how to load them, at the first DTensor; on loading
they register themselves, and call ``_run`` with what is local to their rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dllm_kernels.ops._plain import is_dtensor
from dllm_kernels.ops._plan import Plan

Op = Callable[[Any, Plan], Any]
Handler = TypeVar("Handler", bound=Op)

_handlers: dict[str, Op] = {}
_load: Callable[[], object] = int


def handlers_from(loader: Callable[[], object]) -> None:
    """Say what to call before a handler is needed: it has to register them."""
    global _load
    _load = loader


def handles(op: Op) -> Callable[[Handler], Handler]:
    """Register a function as the one that does an op of ``_run`` where a tensor of the job is a DTensor.

    It stays out of what torch.compile traces: it communicates, and sizes its work by the rank.
    """

    def register(handler: Handler) -> Handler:
        outside = torch.compiler.disable(handler, reason="losses on DTensors run outside the graph")  # type: ignore[no-untyped-call]
        _handlers[op.__name__] = outside
        return handler

    return register


def route(op: Op, job: Any, plan: Plan) -> Any:
    """Do a job."""
    if not any(is_dtensor(t) for t in job):
        return op(job, plan)
    _load()
    return _handlers[op.__name__](job, plan)
