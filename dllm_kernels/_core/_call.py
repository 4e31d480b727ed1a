"""Shared entry point of the row ops: validate tensors and options once, then run the op.

Losses validate their own arguments, using the caller's argument names, and call ``run`` directly.
"""

from __future__ import annotations

from typing import Any

import torch

from dllm_kernels._core._inputs import PER_ROW, RowInputs
from dllm_kernels._core._op import RowOp
from dllm_kernels._core._plan import Options
from dllm_kernels._core._run import run
from dllm_kernels._utils import _checks
from dllm_kernels._utils._named import replaced
from dllm_kernels._utils._plain import all_plain, values_are_there


def call(
    op: RowOp, names: _checks.Names, inputs: RowInputs, options: Options, *, extra: Any = None, several: bool = False
) -> Any:
    """Validate inputs and options as :func:`checked` does, and run the op."""
    return run(op, *checked(names, inputs, options, extra=extra, several=several))


def checked(
    names: _checks.Names, inputs: RowInputs, options: Options, *, extra: Any = None, several: bool = False
) -> tuple[RowInputs, Options]:
    """Return the inputs with plain tensors per row, weights in the accumulation dtype, and the validated options.

    ``extra``: the low-rank part of the head, as the caller gave it. ``several``: ids may be ``[..., K]``.

    Raises:
        TypeError: an argument is not a tensor, or not a number.
        ValueError: shapes, dtypes or devices do not match, or a number is out of range.
        IndexError: a target is out of range and the check for it is on.
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
    _checks.check_active(names, x, inputs.active)
    if inputs.weights is not None:
        inputs = replaced(inputs, weights=_checks.checked_weights(names, inputs.weights, x, ids))
    for name, t in (("mix[0]", inputs.mix_a), ("mix[1]", inputs.mix_b)):
        if t is not None:
            _check_part_of_mix(name, t, names, x)
    _checks.check_target_range(
        options.check_targets, names.targets, ids, V, options.ignore_index, skip_id=options.transform.skip_id
    )
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


def _check_part_of_mix(name: str, t: torch.Tensor, names: _checks.Names, x: torch.Tensor) -> None:
    _checks.check_float(name, t)
    _checks.check_shape(name, t, x.shape[:-1], f"that of {names.rows} without its last dimension")
    _checks.check_same_device(names.rows, x, **{name: t})
    _checks.check_constant(name, t)
    if values_are_there(t) and bool((t < 0).any()):  # not on a GPU, where looking would cost a sync
        raise ValueError(f"{name} must not be negative, got {t.min().item()}")
