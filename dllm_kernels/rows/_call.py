"""What a public function does of rows, below its docstring: its tensors and its options are checked, once, and the job done.

A loss checks its arguments by itself, under the names that its caller knows, and has the job done.
"""

from __future__ import annotations

from typing import Any

import torch

from dllm_kernels.base import _checks
from dllm_kernels.base._named import replaced
from dllm_kernels.base._plain import all_plain, values_are_there
from dllm_kernels.rows._plan import Job, Options
from dllm_kernels.rows._records import RowOp
from dllm_kernels.rows._run import run


def call(
    op: RowOp, names: _checks.Names, job: Job, options: Options, *, extra: Any = None, several: bool = False
) -> Any:
    """Check a job and its options, as :func:`checked` does, and do it."""
    return run(op, *checked(names, job, options, extra=extra, several=several))


def checked(
    names: _checks.Names, job: Job, options: Options, *, extra: Any = None, several: bool = False
) -> tuple[Job, Options]:
    """The job with plain tensors a row, weights in the dtype of sums, and its options.

    ``extra``: the second part of the head, as the caller gave it. ``several``: ids may be ``[..., K]``.

    Raises:
        TypeError: an argument is not a tensor, or no number.
        ValueError: shapes, dtypes or devices that do not fit, a number out of range.
        IndexError: a bad target was looked for, and found.
    """
    x, weight, bias = job[:3]
    job = Job.of(job.leaves, all_plain(*job.of_rows), job.table)
    V = _checks.check_rows(names, x, job.ids, weight, bias)
    if weight is not None and extra is not None:
        u, second = _checks.checked_extra(names, x, weight, extra)
        job = replaced(job, extra_x=u, extra_weight=second)
    options = options.checked(V, x.shape[:-1].numel())
    if not several or job.ids.dim() != x.dim() or job.ids.shape[:-1] != x.shape[:-1] or job.ids.shape[-1] < 1:
        _check_ids_shape(names, x, job.ids, several)
    _checks.check_active(names, x, job.active)
    if job.weights is not None:
        job = replaced(job, weights=_checks.checked_weights(names, job.weights, x, job.ids))
    for name, t in (("mix[0]", job.a), ("mix[1]", job.b)):
        if t is not None:
            _check_part_of_mix(name, t, names, x)
    _checks.check_target_range(
        options.check_targets, names.targets, job.ids, V, options.ignore_index, skip_id=options.transform.skip_id
    )
    return job, options


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
