"""Validation of the tensors of a call, and their layout: N rows, one entry per row."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import all_plain, any_dtensor
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._logits import Head, LinearLogits, Logits, detached, opened, rows_of
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform


class Call(NamedTuple):
    """Validated arguments of a call, with plain tensors per row.

    Attributes:
        logits: logits ``[..., V]``, or the record of those of a head, without a transform.
        options: validated options, with the transform of the logits.
        ids: targets ``[...]`` or ids ``[..., K]``, integers.
        active: mask ``[...]`` or None.
        weights: ``[...]`` in the accumulation dtype, detached, or None.
    """

    logits: Logits
    options: Options
    ids: Tensor
    active: Tensor | None = None
    weights: Any = None

    @property
    def x(self) -> Tensor:
        """Logits or hidden states."""
        return rows_of(self.logits)

    @property
    def rows(self) -> torch.Size:
        """Shape of the rows."""
        return self.x.shape[:-1]

    @property
    def head(self) -> Head | None:
        """The LM head, or None for stored logits."""
        return self.logits.head if isinstance(self.logits, LinearLogits) else None

    @property
    def detached(self) -> Call:
        """The call with rows and head as constants."""
        return replaced(self, logits=detached(self.logits))

    @property
    def on_ranks(self) -> bool:
        """True if an input is a DTensor, so that each rank computes a part of the call."""
        return any_dtensor(self.logits) if self.head is None else any_dtensor(self.x, *self.head)


def checked(
    names: _checks.Names, logits: Any, ids: Any, options: Options, *, active: Any = None, weights: Any = None,
    several: bool = False,
) -> Call:  # fmt: skip
    """Validate a call; deferred logits become the record of their head.

    Args:
        names: the caller's names of the arguments.
        logits: logits ``[..., V]``, or their record.
        ids: targets or ids.
        options: options as the caller gave them.
        active: mask of the rows, or None.
        weights: weights of the rows, or None.
        several: True if ids may be ``[..., K]``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, or a number is out of range.
        IndexError: a target is out of range, and the check for it is on.
    """
    ids, active, weights = all_plain(ids, active, weights)
    logits, options, V = checked_logits(names, opened(logits, options.transform), ids, options)
    names, x = names_of(names, logits), rows_of(logits)
    rows = x.shape[:-1]
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
    options.transform.check_targets(options.check_targets, names.targets, ids, V, options.ignore_index, counted=counted)
    return Call(logits, options, ids, active, weights)


def checked_logits(
    names: _checks.Names, logits: Logits, ids: Tensor, options: Options, branches: int = 1
) -> tuple[Logits, Options, int]:
    """Validate logits or their record, and the options; return both and V.

    The record comes without its transform, which precedes that of the options. ``branches``: number of tensors of such
    rows that one call takes.
    """
    logits, transform, V = checked_rows(names, logits, ids, options.transform, branches)
    options = options if transform is options.transform else replaced(options, transform=transform)
    return logits, options.checked(V), V


def checked_rows(
    names: _checks.Names, logits: Logits, ids: Tensor, transform: Transform, branches: int = 1
) -> tuple[Logits, Transform, int]:
    """Validate logits or their record; return them, both transforms composed but not validated, and V."""
    if not isinstance(logits, LinearLogits):
        return logits, transform, _checks.check_rows(names, logits, ids)
    names, x, casts = names.for_hidden, logits.hidden, logits.compute_dtype is not None
    V = _checks.check_rows(names, x, ids, (logits.weight, logits.bias), casts=casts)
    extra: Any = logits.extra
    if extra is not None:
        extra = _checks.checked_extra(names, x, logits.weight, extra, casts=casts)
    transform = logits.transform.then(transform)
    logits = replaced(
        logits,
        **NO_TRANSFORM._asdict(),
        extra=extra,
        logits_dtype=_checks.checked_logits_dtype(logits.logits_dtype),
        chunk_size=_checks.checked_size("chunk_size", logits.chunk_size),
        num_active=_checks.checked_up_to("num_active", logits.num_active, branches * x.shape[:-1].numel()),
    )
    return logits, transform, V


def names_of(names: _checks.Names, logits: Logits) -> _checks.Names:
    """Return the caller's names, with that of the hidden states for the rows of a record."""
    return names.for_hidden if isinstance(logits, LinearLogits) else names


def name_of_rows(names: _checks.Names, logits: Logits) -> str:
    """Return the caller's name of logits, or of the hidden states of a record."""
    return names_of(names, logits).rows


def as_linear_logits(hidden: Any, head: Any, *options: Any) -> Any:
    """Return the record of hidden states and head, for ops that take no stored logits.

    Raises:
        TypeError: ``hidden`` is a tensor, and no head is given.
        ValueError: ``hidden`` is a record already, and an argument of its head is given.
    """
    if head is None:
        hidden = opened(hidden)
    if not isinstance(hidden, LinearLogits):
        if head is None and isinstance(hidden, Tensor):
            raise TypeError(
                "head must be a torch.Tensor, got NoneType; pass hidden states and the head, or LinearLogits(hidden, "
                "head): stored logits are not taken"
            )
        return LinearLogits(hidden, head, *options)
    for name, value in zip(("head", *LinearLogits._fields[2:]), (head, *options), strict=False):
        if value is not None:
            raise ValueError(f"{name} must be None for hidden={type(hidden).__name__}(...), which has its own")
    return hidden


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
    y = options.transform.possible(y)
    return y.contiguous() if inactive is None else y.masked_fill(inactive, IGNORE)


def flat_ids(ids: Tensor, rows: torch.Size, transform: Transform) -> Tensor:
    """Flatten ids ``[...]`` or ``[..., K]`` to int64 ``[N, K]``, with -1 for the skipped column."""
    flat = ids.detach().reshape(rows.numel(), ids.shape[-1] if ids.dim() > len(rows) else 1)
    return transform.possible(flat.to(torch.int64).contiguous())


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
