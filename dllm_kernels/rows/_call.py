"""Validation of the tensors of a call, and their layout: N rows, one entry per row."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph._plain import all_plain
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._setup import Head


class Checked(NamedTuple):
    """Validated arguments of a call, with plain tensors per row.

    Attributes:
        head: the LM head, or None for logits.
        ids: targets ``[...]`` or ids ``[..., K]``, integers.
        active: mask ``[...]`` or None.
        weights: ``[...]`` in the accumulation dtype, detached, or None.
        options: validated options.
    """

    head: Any
    ids: Tensor
    active: Tensor | None
    weights: Any
    options: Options


def checked(
    names: _checks.Names, x: Tensor, ids: Any, options: Options, head: tuple[Any, Any, Any] | None = None, *,
    active: Any = None, weights: Any = None, several: bool = False,
) -> Checked:  # fmt: skip
    """Validate a call.

    Args:
        names: the caller's names of the arguments.
        x: logits ``[..., V]`` or hidden states ``[..., D]``.
        ids: targets or ids.
        options: options as the caller gave them.
        head: (weight, bias, extra) of the LM head as the caller gave them; None for logits.
        active: mask of the rows, or None.
        weights: weights of the rows, or None.
        several: True if ids may be ``[..., K]``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, or a number is out of range.
        IndexError: a target is out of range, and the check for it is on.
    """
    ids, active, weights = all_plain(ids, active, weights)
    weight, bias, extra = head or (None, None, None)
    V, rows = _checks.check_rows(names, x, ids, weight, bias), x.shape[:-1]
    u, U = (None, None) if weight is None or extra is None else _checks.checked_extra(names, x, weight, extra)
    options = options.checked(V, rows.numel())
    if not several or ids.dim() != x.dim() or ids.shape[:-1] != rows or ids.shape[-1] < 1:
        _check_ids_shape(names, x, ids, several)
    if active is not None:
        _checks.check_mask("active", active, rows, f"that of {names.targets}")
        _checks.check_same_device(names.rows, x, active=active)
    if weights is not None:
        _checks.check_weights("weights", weights, ids.shape, f"that of {names.targets}")
        _checks.check_same_device(names.targets, ids, weights=weights)
        weights = weights.detach().to(accum_dtype(x.dtype))
    counted = weights if active is None else active
    if counted is not None and ids.dim() > counted.dim():
        counted = counted.unsqueeze(-1)
    _checks.check_target_range(
        options.check_targets, names.targets, ids, V, options.ignore_index, counted=counted,
        skip_id=options.transform.skip_id,
    )  # fmt: skip
    return Checked(None if weight is None else Head(weight, bias, u, U), ids, active, weights, options)


def _check_ids_shape(names: _checks.Names, x: Tensor, ids: Tensor, several: bool) -> None:
    of, shape = f"that of {names.rows} without its last dimension", tuple(x.shape[:-1])
    if not several:
        _checks.check_shape(names.targets, ids, shape, of)
    elif tuple(ids.shape) != shape:
        raise ValueError(
            f"{names.targets} must have shape {shape} or {(*shape, 'K')} ({of}, or one more of K >= 1 ids), "
            f"got {tuple(ids.shape)}"
        )


def flat_targets(targets: Tensor, active: Tensor | None, options: Options) -> Tensor:
    """Flatten targets to int64 ``[N]``, with ``IGNORE`` in inactive rows and -1 for the skipped column."""
    y = targets.detach().reshape(-1).to(torch.int64)
    inactive = None if active is None else active.detach().reshape(-1) == 0
    if options.ignore_index != IGNORE:
        ignored = y == options.ignore_index
        y = y.masked_fill(y == IGNORE, -1)  # -100 is an out-of-range target like any other here
        inactive = ignored if inactive is None else inactive | ignored
    if options.transform.skip_id is not None:
        y = y.masked_fill(y == options.transform.skip_id, -1)
    return y.contiguous() if inactive is None else y.masked_fill(inactive, IGNORE)


def flat_ids(ids: Tensor, rows: torch.Size, skip_id: int | None) -> Tensor:
    """Flatten ids ``[...]`` or ``[..., K]`` to int64 ``[N, K]``, with -1 for the skipped column."""
    flat = ids.detach().reshape(rows.numel(), ids.shape[-1] if ids.dim() > len(rows) else 1)
    flat = flat.to(torch.int64).contiguous()
    return flat if skip_id is None else flat.masked_fill(flat == skip_id, -1)


def row_marks(active: Tensor | None) -> Tensor | None:
    """Return int64 ``[N]``: ``IGNORE`` in inactive rows, 0 in all others; None if every row is active."""
    if active is None:
        return None
    active = active.detach().reshape(-1)
    return torch.zeros(active.shape, dtype=torch.int64, device=active.device).masked_fill(active == 0, IGNORE)


def as_marks(marks: Tensor | None, like: Tensor) -> Tensor:
    """Return the result of :func:`row_marks` as a tensor; ``like [N, ...]``."""
    return torch.zeros(like.shape[0], dtype=torch.int64, device=like.device) if marks is None else marks


def flat_values(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Flatten constants per row, such as weights, to ``[N]`` in this dtype."""
    return t.detach().reshape(-1).to(dtype).contiguous()


def times_upstream(value: Tensor, upstream: Tensor) -> Tensor:
    """Multiply by an upstream gradient; 0 if one factor is 0, even if the other one is infinite or NaN."""
    return torch.where((value != 0) & (upstream != 0), value * upstream, 0.0)


def flat_index(t: Tensor) -> Tensor:
    """Flatten integers per row to int64 ``[N]``."""
    return flat_values(t, torch.int64)
