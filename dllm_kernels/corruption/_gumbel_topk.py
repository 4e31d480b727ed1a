"""Gumbel top-k selection; implemented in ``corruption/_topk.py``."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph._opaque import traced
from dllm_kernels._graph._plain import all_plain, readable_without_sync
from dllm_kernels.corruption import _seeds
from dllm_kernels.corruption._topk import choose, counts


def gumbel_topk_mask(
    log_w: Tensor, k: Tensor | int, *, uniform: Tensor | None = None, generator: torch.Generator | None = None,
    seeds: Tensor | None = None, start: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Choose ``k`` positions of each row without replacement, with odds given by the row's weights.

    The positions with the k largest ``score_i = log_w_i - ln(-ln u_i)`` are chosen. The lower index wins a tie.

    Examples:
        >>> log_w = torch.tensor([[0.0, 0.0, -math.inf, 0.0]])  # the third is never chosen
        >>> chosen = gumbel_topk_mask(log_w, k=3, seeds=torch.tensor([7]))
        >>> chosen.tolist()
        [[True, True, False, True]]

    Args:
        log_w: log-weights ``[N, D]``, floating, any strides. Positions with log-weight -inf or NaN are never chosen.
        k: number of positions to choose, an int or an integer tensor ``[N]``. If it exceeds the number of positions
            that can be chosen, all of them are chosen.
        uniform: uniform numbers u ``[N, D]``, float32 or float64, strictly inside (0, 1); values outside are clamped to
            the nearest value inside. None: drawn.
        generator: source of one seed per call, which each row uses with its index. A CPU generator can be used for
            tensors on any device and gives the same result on all of them. None: the default generator of the device.
        seeds: int64 ``[N]``, instead of a generator: row n then depends only on ``seeds[n]``.
        start: int64 ``[N]``, in [0, D], the first column of each row that is not left padding; None: 0. Draw i belongs
            to column ``start[n] + i``, so that with ``seeds`` a row has the same choice as without padding. Columns
            before ``start[n]`` are never chosen. Not with ``uniform``. Checked on CPU; clamped on a GPU.
        backend: "auto", "triton" or "torch".

    Returns:
        bool ``[N, D]``, not differentiable. Each row has exactly ``min(k, n)`` True entries, with n the number of
        positions that can be chosen.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, k is negative or has more than 64 bits, ``start`` is out of
            range, or ``uniform`` is combined with ``generator``, ``seeds`` or ``start``. Negative entries of a GPU
            tensor count as 0 instead, because a check would cost a host sync.

    Source: Kool, van Hoof and Welling 2019, "Stochastic Beams and Where to Find Them", arXiv:1903.06059, section 2.3.
    """
    _checks.check_float("log_w", log_w)
    for name, value in (("log_w", log_w), ("k", k), ("uniform", uniform)):
        _checks.check_whole_tensor(name, value)
    log_w, k, uniform = all_plain(log_w, k, uniform)
    _checks.check_ndim("log_w", log_w, 2, "[N, D]")
    check_k(k, log_w)
    if uniform is not None:
        _checks.check_tensor("uniform", uniform)
        _checks.check_dtype("uniform", uniform, (torch.float32, torch.float64))
        _checks.check_shape("uniform", uniform, log_w.shape, "that of log_w")
        _checks.check_same_device("log_w", log_w, uniform=uniform)
    k = k if isinstance(k, Tensor | int) else operator.index(k)  # an int may be a symbol of a graph
    if uniform is not None and not (generator is None and seeds is None):
        raise ValueError("uniform excludes generator and seeds: expected one source of draws, got several")
    if start is not None:
        check_start(start, log_w, "log_w")
        if uniform is not None:
            raise ValueError("start must be None with uniform, which already has one value per column, got a tensor")
    seed = None if uniform is not None else _seeds.resolve_seed(log_w.device, log_w.shape[0], generator, seeds)
    row_k = counts(k, log_w) if traced(log_w) else k
    with torch.no_grad():
        (mask,) = choose(log_w.detach(), row_k, uniform, seed, start, backend)
    return mask


def check_k(k: Tensor | int, log_w: Tensor) -> None:
    """Raise unless ``k`` is an int >= 0 or an integer tensor ``[N]`` of values >= 0 (checked on CPU only)."""
    if not isinstance(k, Tensor):
        if not _checks.is_int(k):
            raise TypeError(f"k must be an int or a torch.Tensor, got {_checks.type_name(k)}")
        _checks.checked_int("k", k, 0)
        _checks.checked_int64("k", k)
        return
    _checks.check_dtype("k", k, _checks.INT_DTYPES)
    _checks.check_shape("k", k, log_w.shape[:1], "the rows of log_w")
    _checks.check_same_device("log_w", log_w, k=k)
    if readable_without_sync(k) and bool((k < 0).any()):
        raise ValueError(f"k must be at least 0, got {int(k.min())} in row {int(k.argmin())}")


def check_start(start: Tensor, rows: Tensor, name: str) -> None:
    """Raise unless ``start`` is int64 ``[N]`` on the device of ``rows [N, D]``; ``choose`` checks its values."""
    _checks.check_tensor("start", start)
    _checks.check_dtype("start", start, (torch.int64,))
    _checks.check_shape("start", start, rows.shape[:1], f"the rows of {name}")
    _checks.check_same_device(name, rows, start=start)
