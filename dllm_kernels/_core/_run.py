"""Shared entry point of the row ops: validate tensors and options once, and run the op.

Losses validate their own arguments, using the caller's argument names, and call ``run`` directly. On plain tensors it
flattens the rows, then calls the autograd Function or, under torch.compile, the compiled op.

If any input is a DTensor, ``distributed/`` first converts the inputs to local tensors of its rank. This module does not
import it: the package's ``__init__`` registers a function that loads it at the first DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from dllm_kernels._backends._rows import as_blv
from dllm_kernels._core import _eager
from dllm_kernels._core._inputs import PER_ROW, RowInputs, flattened
from dllm_kernels._core._op import Output, RowOp
from dllm_kernels._core._plan import Options, Plan
from dllm_kernels._utils import _checks
from dllm_kernels._utils._dtypes import accum_dtype
from dllm_kernels._utils._named import replaced
from dllm_kernels._utils._plain import all_plain, any_dtensor, check_no_tangent, has_values, readable_without_sync

Run = Callable[[RowOp, RowInputs, Plan], Any]
_dtensor_loaders: list[Callable[[], Run]] = []


def dtensors_by(load: Callable[[], Run]) -> None:
    """Register ``load``, which imports and returns the function that runs an op on DTensors."""
    _dtensor_loaders[:] = [load]


def call(
    op: RowOp, names: _checks.Names, inputs: RowInputs, options: Options, *, extra: Any = None, several: bool = False
) -> Any:
    """Validate inputs and options as :func:`checked` does, and run the op."""
    return run(op, *checked(names, inputs, options, extra=extra, several=several))


def checked(
    names: _checks.Names, inputs: RowInputs, options: Options, *, extra: Any = None, several: bool = False
) -> tuple[RowInputs, Options]:
    """Return the inputs with plain tensors per row, weights in the accumulation dtype, and the validated options.

    ``extra``: the low-rank part of the head, as the caller gave it. ``several``: True if ids may be ``[..., K]``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, or a number is out of range.
        IndexError: a target is out of range, and the check for it is on.
    """
    x, weight = inputs.x, inputs.weight
    per_row = all_plain(*(getattr(inputs, name) for name in PER_ROW))
    inputs = replaced(inputs, **dict(zip(PER_ROW, per_row, strict=True)))
    V = _checks.check_rows(names, x, inputs.ids, weight, inputs.bias)
    if weight is not None and extra is not None:
        u, second = _checks.checked_extra(names, x, weight, extra)
        inputs = replaced(inputs, extra_x=u, extra_weight=second)
    options = options.checked(V, x.shape[:-1].numel())
    ids = inputs.ids
    if not several or ids.dim() != x.dim() or ids.shape[:-1] != x.shape[:-1] or ids.shape[-1] < 1:
        _check_ids_shape(names, x, ids, several)
    if inputs.active is not None:
        _checks.check_mask("active", inputs.active, x.shape[:-1], f"that of {names.targets}")
        _checks.check_same_device(names.rows, x, active=inputs.active)
    if inputs.weights is not None:
        _checks.check_weights("weights", inputs.weights, ids.shape, f"that of {names.targets}")
        _checks.check_same_device(names.targets, ids, weights=inputs.weights)
        inputs = replaced(inputs, weights=inputs.weights.detach().to(accum_dtype(x.dtype)))
    for name, t in (("mix[0]", inputs.mix_a), ("mix[1]", inputs.mix_b)):
        if t is not None:
            _checks.check_float(name, t)
            _checks.check_shape(name, t, x.shape[:-1], f"that of {names.rows} without its last dimension")
            _checks.check_same_device(names.rows, x, **{name: t})
            _checks.check_constant(name, t)
            if readable_without_sync(t) and bool((t < 0).any()):  # not tested on a GPU, to avoid a sync
                raise ValueError(f"{name} must not be negative, got {t.min().item()}")
    counted = inputs.weights if inputs.active is None else inputs.active
    if counted is not None and ids.dim() > counted.dim():
        counted = counted.unsqueeze(-1)
    _checks.check_target_range(
        options.check_targets, names.targets, ids, V, options.ignore_index, counted=counted,
        skip_id=options.transform.skip_id,
    )  # fmt: skip
    return inputs, options


def _check_ids_shape(names: _checks.Names, x: torch.Tensor, ids: torch.Tensor, several: bool) -> None:
    of, shape = f"that of {names.rows} without its last dimension", tuple(x.shape[:-1])
    if not several:
        _checks.check_shape(names.targets, ids, shape, of)
    elif tuple(ids.shape) != shape:
        raise ValueError(
            f"{names.targets} must have shape {shape} or {(*shape, 'K')} ({of}, or one more of K >= 1 ids), "
            f"got {tuple(ids.shape)}"
        )


def run(
    op: RowOp, inputs: RowInputs, options: Options, objective: Any = None
) -> Any:
    """Run an op whose inputs and options have been validated; return its result in the shape of the caller's rows."""
    check_no_tangent(*inputs.grad_inputs)
    plan = Plan.of(inputs, options, objective)
    if not any_dtensor(*inputs.tensors):
        return run_plain(op, inputs, plan)
    (load,) = _dtensor_loaders
    return load()(op, inputs, plan)


def run_plain(op: RowOp, inputs: RowInputs, plan: Plan) -> Any:
    """Run an op on plain tensors."""
    if plan.options.inplace_backward:
        _checks.check_inplace(inputs.x, as_blv(inputs.x))
    flat = flattened(inputs, plan.accum_dtype, *op.rows(inputs, plan))
    outputs = _implementation(inputs.x).call(op, flat, plan)
    return op.result(**{out.name: _shaped(out, outputs.get(out.name), inputs) for out in op.outputs if out.public})


def _shaped(out: Output, t: torch.Tensor | None, inputs: RowInputs) -> torch.Tensor | None:
    """Reshape an output over N rows to the shape of the caller's rows."""
    if t is None or not t.dim():
        return t
    return t.view(inputs.ids.shape if out.like_ids else (*inputs.x.shape[:-1], *t.shape[1:]))


def _implementation(x: torch.Tensor) -> ModuleType:
    """Return the module that runs ops on ``x``: :mod:`_eager`, or :mod:`_compiled` for traced, meta and fake tensors.

    The compiled ops are imported lazily, because registration is slow.
    """
    if not torch.compiler.is_compiling() and has_values(x):
        return _eager
    from dllm_kernels._core import _compiled

    return _compiled
