r"""What a row of logits says of itself: log p at given ids, logsumexp, entropy, a sum of log-mixtures, the argmax's match.

For what no sum of weighted NLLs is: policy gradients (log-probabilities with ratios and clipping on top, entropy bonuses),
distances between distributions that are known at a few ids, bounds with a sum over the whole vocabulary in them. All outputs
but ``correct`` take an upstream gradient at once, and one backward pass serves them all (``base/_row_stats.py``).
"""

from __future__ import annotations

from typing import Any

import torch

from dllm_kernels.base import _checks
from dllm_kernels.base._backend import use_triton
from dllm_kernels.base._plain import all_plain, values_are_there
from dllm_kernels.base._transform import Transform
from dllm_kernels.rows._plan import Job, Needs, Plan, compute_dtype
from dllm_kernels.rows._records import ROW_STATS
from dllm_kernels.rows._results import RowStats
from dllm_kernels.rows._route import route

Mix = tuple[torch.Tensor, torch.Tensor]
LOGITS = _checks.Names("logits", "ids")
LINEAR = _checks.Names("hidden", "ids", "weight", "bias")


def row_stats(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    entropy: bool = False,
    mix: Mix | None = None,
    active: torch.Tensor | None = None,
    with_correct: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> RowStats:
    r"""Statistics of the softmax p of each active row of logits, differentiable together.

    .. math::
        \log p_k, \qquad \text{lse} = \log \sum_v e^{z_v}, \qquad H = -\sum_v p_v \log p_v, \qquad
        F = \sum_v \log(a + b p_v)

    F runs over the columns that are not skipped. A row whose entry of ``active`` is zero is not read: its results and its
    gradient are 0 even where it holds NaN, and so is the gradient of a row to which no upstream gradient comes. NaN stays
    in its own row. A logit of ``-inf`` is a probability of 0, which adds nothing to H and log a to F; a row of nothing else
    gives NaN, and ``lse`` -inf.

    Args:
        logits: ``[..., V]``, float16, bfloat16, float32 or float64; any strides.
        ids: ``[...]`` or ``[..., K]``, K >= 1, integers in ``[0, V)``; -100: none, log p is 0. Anything else, or ``skip_id``,
            gives NaN in its own place and, where a gradient comes to it, in its row of the gradient.
        entropy: also return H.
        mix: (a, b), each ``[...]``, floating, not negative, taken as constants (detached): also return F. a = 0 and b = 0
            are legal; F is -inf where a logarithm is.
        active: ``[...]``, bool or numeric; zero switches a row off. None: every row counts.
        with_correct: also return whether the first id is the argmax.
        softcap: as in :func:`token_nll`.
        scale: as in :func:`token_nll`; a temperature T is 1 / T.
        skip_id: as in :func:`token_nll`.
        check_targets: raise an IndexError that names the first bad id; reads the ids back to the host. None follows the
            environment variable ``DLLM_KERNELS_CHECK``.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`RowStats`.

    Raises:
        TypeError: an argument is not a tensor, or no number.
        ValueError: shapes, dtypes or devices that do not fit, a number out of range, or an unknown backend.
        IndexError: ``check_targets`` found a bad id.
    """
    _checks.check_flags(entropy=entropy, with_correct=with_correct)
    ids, active, mix = _plain_rows(ids, active, mix)
    V = _checks.check_rows(LOGITS, logits, ids)
    transform = _checks.checked_transform(V, softcap, scale, skip_id)
    a, b = check_per_row(LOGITS, logits, ids, mix, active, V, check_targets, transform)
    plan = Plan(
        logits.dtype, use_triton(backend, logits), with_correct=with_correct, with_entropy=entropy,
        needs=Needs.of(logits, None, None), transform=transform,
    )  # fmt: skip
    return route(ROW_STATS, Job(logits, None, None, ids, active, a=a, b=b), plan)  # type: ignore[no-any-return]


def linear_row_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    extra: _checks.Extra | None = None,
    entropy: bool = False,
    mix: Mix | None = None,
    active: torch.Tensor | None = None,
    with_correct: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    num_active: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> RowStats:
    r"""Statistics of ``softmax(weight @ hidden + bias)`` of each active row; the logits exist one chunk at a time.

    As :func:`row_stats`. Backward makes the logits again, so that nothing of a row's length is kept: 3 products with a
    frozen head, 4 with a trainable one, 1 where nothing wants a gradient.

    Args:
        hidden: ``[..., D]``, float16, bfloat16, float32 or float64.
        weight: ``[V, D]``, the LM head, of the dtype of ``hidden`` unless autocast is on.
        ids: ``[...]`` or ``[..., K]``, as in :func:`row_stats`.
        bias: ``[V]`` or None.
        extra: as in :func:`weighted_linear_nll`.
        entropy: also return the entropy.
        mix: as in :func:`row_stats`.
        active: ``[...]``, rows to project; None: all.
        with_correct: also return whether the first id is the argmax of the logits as rounded to the compute dtype.
        chunk_size: rows of logits that exist at a time; None chooses.
        memory_budget: bytes that a chunk of logits may take where ``chunk_size`` is None.
        num_active: an upper bound of the number of active rows, which saves reading it back from a GPU. Too small a bound
            gives NaN.
        softcap: as in :func:`token_nll`.
        scale: as in :func:`token_nll`.
        skip_id: as in :func:`token_nll`.
        check_targets: as in :func:`row_stats`.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`RowStats`, differentiable in hidden, weight, bias and extra.

    Raises:
        TypeError: an argument is not a tensor, or no number.
        ValueError: shapes, dtypes or devices that do not fit, ``chunk_size`` < 1, a number out of range, or an unknown
            backend.
        IndexError: ``check_targets`` found a bad id.
    """
    _checks.check_flags(entropy=entropy, with_correct=with_correct)
    ids, active, mix = _plain_rows(ids, active, mix)
    V = _checks.check_rows(LINEAR, hidden, ids, weight, bias)
    transform = _checks.checked_transform(V, softcap, scale, skip_id)
    u, second = _checks.checked_extra(LINEAR, hidden, weight, extra)
    a, b = check_per_row(LINEAR, hidden, ids, mix, active, V, check_targets, transform)
    rows = hidden.shape[:-1].numel()
    sizes = _checks.checked_sizes(rows, num_active, chunk_size=chunk_size, memory_budget=memory_budget)
    plan = Plan(
        compute_dtype(hidden, weight), use_triton(backend, hidden), with_correct=with_correct, with_entropy=entropy,
        needs=Needs.of(hidden, weight, bias, u, second), transform=transform, **sizes,
    )  # fmt: skip
    job = Job(hidden, weight, bias, ids, active, a=a, b=b, extra_x=u, extra_weight=second)
    return route(ROW_STATS, job, plan)  # type: ignore[no-any-return]


def _plain_rows(ids: Any, active: Any, mix: Any) -> tuple[Any, Any, Any]:
    return (*all_plain(ids, active), all_plain(*mix) if isinstance(mix, (tuple, list)) else mix)


def check_per_row(
    names: _checks.Names, rows: torch.Tensor, ids: torch.Tensor, mix: Mix | None, active: torch.Tensor | None, V: int,
    check_targets: bool | None, transform: Transform,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Check what there is of each row; returns (a, b)."""
    shape = tuple(rows.shape[:-1])
    if tuple(ids.shape) != shape and (tuple(ids.shape[:-1]) != shape or ids.shape[-1] < 1):
        of = f"that of {names.rows} without its last dimension, or one more of K >= 1 ids"
        raise ValueError(f"ids must have shape {shape} or {(*shape, 'K')} ({of}), got {tuple(ids.shape)}")
    _checks.check_active(names, rows, active)
    _checks.check_target_range(check_targets, "ids", ids, V, skip_id=transform.skip_id)
    if mix is None:
        return None, None
    if not isinstance(mix, (tuple, list)) or len(mix) != 2:
        raise TypeError(f"mix must be a tuple of two tensors (a, b), got {_described(mix)}")
    for name, t in zip(("mix[0]", "mix[1]"), mix, strict=True):
        _checks.check_float(name, t)
        _checks.check_shape(name, t, shape, f"that of {names.rows} without its last dimension")
        _checks.check_same_device(names.rows, rows, **{name: t})
        _checks.check_constant(name, t)
        if values_are_there(t) and bool((t < 0).any()):  # not on a GPU, where looking would cost a sync
            raise ValueError(f"{name} must not be negative, got {t.min().item()}")
    return mix[0], mix[1]


def _described(mix: Any) -> str:
    return f"{len(mix)} of them" if isinstance(mix, (tuple, list)) else type(mix).__name__
