"""Run a row op whose inputs contain DTensors: on local tensors, with results of the global shape."""

from __future__ import annotations

from typing import Any

import torch

from dllm_kernels._core._inputs import RowInputs
from dllm_kernels._core._op import RowOp
from dllm_kernels._core._plan import Plan
from dllm_kernels._core._results import Divergence, RowObjective, WeightedNLL
from dllm_kernels._core._run import run_plain
from dllm_kernels._core._soft_embedding import SOFT_EMBEDDING
from dllm_kernels.distributed._layout import Rows, outside_the_graph, sum_over
from dllm_kernels.distributed.linear import local_hidden
from dllm_kernels.distributed.vocab_parallel import local_logits


@outside_the_graph
def run(op: RowOp, inputs: RowInputs, plan: Plan) -> Any:
    """Run the op; return plain tensors of the global shape, equal on every rank that shares the rows.

    Differentiable outputs stay differentiable.
    """
    here, plan, rows = (local_hidden if plan.from_hidden else local_logits)(inputs, plan)
    if op is SOFT_EMBEDDING and rows.groups:
        raise ValueError(
            "hidden must not have its rows split over ranks that have the same columns of the head, got rows "
            f"{rows.local_shape} of {rows.shape} here; give each rank's own, hidden.to_local(), with a head that is plain or split "
            "by vocabulary"
        )
    out = run_plain(op, here, plan)
    if not rows.groups:
        return out
    if isinstance(out, (WeightedNLL, RowObjective)) or (isinstance(out, Divergence) and not out.loss.dim()):
        return type(out)(sum_over(out.loss, rows.groups), *_whole(rows, out[1:]))  # type: ignore[arg-type]
    return type(out)(*_whole(rows, out))


def _whole(rows: Rows, out: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    """Each ``[...]`` or ``[..., K]`` of this rank's rows in the global shape, in one sum over the ranks."""
    dtype = out[0].dtype  # type: ignore[union-attr]
    local = [t for t in out if t is not None]
    parts = [part for t in local for part in (t.unbind(-1) if t.dim() > len(rows.shape) else (t,))]
    whole = iter(rows.whole(*(t.to(dtype) for t in parts)))

    def made(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None:
            return None
        several = t.dim() > len(rows.shape)
        value = torch.stack([next(whole) for _ in range(t.shape[-1])], -1) if several else next(whole)
        value = value if t.requires_grad else value.detach()
        return value != 0 if t.dtype == torch.bool else value

    return [made(t) for t in out]
