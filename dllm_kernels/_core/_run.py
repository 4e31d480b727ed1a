"""Run a row op on plain tensors: flatten the rows, then call the autograd Function or, under torch.compile, the compiled op.

If any input is a DTensor, ``distributed/`` makes the inputs local to its rank first. Nothing here depends on it: the
package's ``__init__`` registers how to load it at the first DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from dllm_kernels._backends._rows import as_blv
from dllm_kernels._core import _eager
from dllm_kernels._core._inputs import RowInputs, flattened
from dllm_kernels._core._op import Output, RowOp
from dllm_kernels._core._plan import Options, Plan
from dllm_kernels._core._recipes import DivergencePlan
from dllm_kernels._utils._checks import check_inplace
from dllm_kernels._utils._plain import any_dtensor, check_no_tangent, has_values

Run = Callable[[RowOp, RowInputs, Plan], Any]
_dtensor_loaders: list[Callable[[], Run]] = []


def dtensors_by(load: Callable[[], Run]) -> None:
    """Register how to load the function that runs an op on DTensors."""
    _dtensor_loaders[:] = [load]


def run(
    op: RowOp, inputs: RowInputs, options: Options, divergence: DivergencePlan | None = None, objective: Any = None
) -> Any:
    """Run an op whose inputs and options have been validated; return its result in the shape of the caller's rows."""
    check_no_tangent(*inputs.grad_inputs)
    plan = Plan.of(inputs, options, divergence, objective)
    if not any_dtensor(*inputs.tensors):
        return run_plain(op, inputs, plan)
    (load,) = _dtensor_loaders
    return load()(op, inputs, plan)


def run_plain(op: RowOp, inputs: RowInputs, plan: Plan) -> Any:
    """Run an op on plain tensors."""
    if plan.options.inplace_backward:
        check_inplace(inputs.x, as_blv(inputs.x))
    flat = flattened(inputs, plan.accum_dtype, *op.rows(inputs, plan))
    outputs = _implementation(inputs.x).call(op, flat, plan)
    return op.result(**{out.name: _shaped(out, outputs.get(out.name), inputs) for out in op.outputs if out.public})


def _shaped(out: Output, t: torch.Tensor | None, inputs: RowInputs) -> torch.Tensor | None:
    """Reshape an output over N rows to the shape of the caller's rows."""
    if t is None or not t.dim():
        return t
    return t.view(inputs.ids.shape if out.like_ids else (*inputs.x.shape[:-1], *t.shape[1:]))


def _implementation(x: torch.Tensor) -> ModuleType:
    """Meta and fake tensors also use the compiled ops. They are imported lazily because registration is slow."""
    if not torch.compiler.is_compiling() and has_values(x):
        return _eager
    from dllm_kernels._core import _compiled

    return _compiled
