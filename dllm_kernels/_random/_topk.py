r"""Sampling k positions of a row without replacement, by Gumbel noise on log-weights.

    score_i = log_w_i - ln(-ln u_i),      chosen = the k largest scores, the lower index first among equals.

**One set, everywhere.** Two math libraries round a logarithm differently, and a last bit is enough to swap two
positions. So the score is *defined*, operation by operation: ``log_w`` and ``u`` are widened to float64, and ``ln`` is
``exact_log`` below, which is nothing but integer operations and float64 additions, subtractions, products and
quotients, each rounded by itself as IEEE 754 says. The kernels compute the same sequence with contraction into fused
multiply-adds turned off. The same u therefore gives the same set on every device, bit for bit.

``exact_log`` errs by less than 2 ulp, so an oracle that uses another float64 logarithm picks the same set unless two
scores at the k-th place lie within about 1e-15 of each other.

On the CPU a sort of float32 scores decides almost every row: where the k-th and the next differ by more than those
scores can err, the set is the same. The few other rows, one in some thousands of 32 positions, are decided by the exact
scores.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dllm_kernels._backends._backend import use_triton
from dllm_kernels._random import _philox, _rules
from dllm_kernels._random._rules import Array

# Positions to work on at a time where each takes some 20 bytes of temporaries. Fewer pay the cost of a call of numpy's
# too often; more leave the second-level cache and, where the system takes back the memory of every temporary, make a
# page fault for each 4 KB of the next. Measured best of 2^12 to 2^18 at [64, 4096], on two AMD EPYC and two Intel Xeon
# cores.
_SLICE = 1 << 15

_LOWEST = np.finfo(np.float32).min

_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
# ln 2 in two parts: the first has 32 significant bits, so that its product with an exponent is exact.
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
# The coefficients of fdlibm's e_log.c (Sun Microsystems, 1993), for x^2 <= 0.0295.
LOG_COEFFICIENTS = tuple(map(float.fromhex, (
    "0x1.2f112df3e5244p-3", "0x1.39a09d078c69fp-3", "0x1.7466496cb03dep-3", "0x1.c71c51d8e78afp-3",
    "0x1.2492494229359p-2", "0x1.999999997fa04p-2", "0x1.5555555555593p-1",
)))  # fmt: skip


def choose(log_w: Tensor, k: Tensor | int, uniform: Tensor | None, seed: Tensor | None, backend: str) -> Tensor:
    """``gumbel_topk_mask`` of checked arguments, the seed drawn."""
    if use_triton(backend, log_w):
        from dllm_kernels._backends.triton.gumbel_topk import gumbel_topk_mask as kernel

        return kernel(log_w, k, uniform, seed)
    if log_w.numel() == 0:
        return torch.empty(log_w.shape, dtype=torch.bool, device=log_w.device)
    if on_host(log_w):
        return _gumbel_topk_host(log_w, counts(k, log_w), uniform, seed)
    return _gumbel_topk_torch(log_w, counts(k, log_w), uniform, seed)


def counts(k: Tensor | int, log_w: Tensor) -> Tensor:
    """Return k of each row, as a tensor ``[N]``."""
    return torch.full(log_w.shape[:1], k, device=log_w.device) if isinstance(k, int) else k


# Where a given u at or beyond an end of (0, 1) is moved to; -ln u is then about 709 and 1.1e-16.
MIN_UNIFORM = 2.0**-1022
MAX_UNIFORM = 1.0 - 2.0**-53


def on_host(tensor: Tensor) -> bool:
    """Whether numpy does the torch path's work on a tensor."""
    return tensor.is_cpu


def _gumbel_topk_torch(log_w: Tensor, k: Tensor, uniform: Tensor | None, seed: Tensor | None) -> Tensor:
    N, D = log_w.shape
    if uniform is None:
        assert seed is not None
        u = _rules.fine_uniform(_philox.random_bits(seed, N, _philox.Layout(0, D))[1])
    else:
        u = uniform.to(torch.float64).clamp(MIN_UNIFORM, MAX_UNIFORM)
    never = torch.isnan(log_w) | torch.isnan(u)
    return select_exact(log_w.masked_fill(never, -torch.inf), u.masked_fill(never, 0.5), k)


def exact_log(x: Array) -> Array:
    """``ln x`` of normal positive float64 numbers, torch's or numpy's, the same to the last bit wherever it runs.

    With ``x = 2^e (1 + f)``, ``1 + f`` in [sqrt(1/2), sqrt(2)), and ``s = f / (2 + f)``, it is
    ``ln(1 + f) = f - s (f - R(s^2))``; R is the polynomial of fdlibm's e_log.c.
    """
    integer, floating = (torch.int64, torch.float64) if isinstance(x, Tensor) else (np.int64, np.float64)
    bits = x.view(integer)
    e = (bits - _SQRT_HALF_BITS) >> 52
    f = (bits - (e << 52)).view(floating) - 1.0
    s = f / (f + 2.0)
    z = s * s
    poly = LOG_COEFFICIENTS[0] * z + LOG_COEFFICIENTS[1]
    for c in LOG_COEFFICIENTS[2:]:
        poly = poly * z + c
    exponent = _rules.float64(e)
    return exponent * _LN2_HIGH + (exponent * _LN2_LOW + (f - s * (f - z * poly)))


def select_exact(log_w: Tensor, uniform: Tensor, k: Tensor) -> Tensor:
    """Select the k largest scores of each row ``[N, D]``, see the module docstring; ``uniform`` in (0, 1), no NaN."""
    score: Tensor = log_w.to(torch.float64) - exact_log(-exact_log(uniform))
    order = torch.sort(score, dim=1, descending=True, stable=True).indices
    first = torch.arange(score.shape[1], device=score.device) < k[:, None]
    return torch.zeros_like(first).scatter_(1, order, first) & (score > -torch.inf)


def _gumbel_topk_host(log_w: Tensor, k: Tensor, uniform: Tensor | None, seed: Tensor | None) -> Tensor:
    N, D = log_w.shape
    mask = np.empty((N, D), np.bool_)
    layout = _philox.Layout(0, D)
    for rows in host_slices(N, D):
        part = slice(rows.start, rows.stop)
        if seed is not None:
            u = _rules.fine_uniform(_philox.bits_on_host(seed, rows, layout)[1])
        else:
            assert uniform is not None
            u = uniform.detach()[part].to(torch.float64).numpy().clip(MIN_UNIFORM, MAX_UNIFORM)
        weights = log_w.detach()[part].to(torch.float64).numpy()
        never = np.isnan(weights) | np.isnan(u)
        if never.any():
            weights, u = np.where(never, -np.inf, weights), np.where(never, 0.5, u)
        largest = float(np.abs(weights[np.isfinite(weights)]).max(initial=0.0))
        mask[part] = select_on_host(weights, u, k[part].numpy(), largest)
    return torch.from_numpy(mask)


def host_slices(rows: int, columns: int, times: int = 1) -> list[range]:
    """Rows to work on at a time: ``times _SLICE`` positions, or one row."""
    step = max(1, times * _SLICE // columns)
    return [range(start, min(start + step, rows)) for start in range(0, rows, step)]


def select_largest(draws: Array, choosable: Array, k: Array) -> Array:
    """Select the k largest draws (integers below 2^32) of the choosable ones of each row; the lower index wins a tie.

    Torch or numpy; ``draws`` and ``choosable`` ``[N, D]``, k ``[N]``, at most the number of choosable ones; bool
    ``[N, D]``.
    """
    N, D = draws.shape
    if isinstance(draws, Tensor):
        key = draws.masked_fill(~choosable, -1)
        order = torch.sort(key, dim=1, descending=True, stable=True).indices
        first = torch.arange(D, device=draws.device) < k[:, None]
        return torch.zeros_like(first).scatter_(1, order, first)
    key = draws.astype(np.int64)
    key *= D
    key += np.arange(D - 1, -1, -1)  # no two keys are equal
    key[~choosable] = -1
    ordered = np.empty((N, D + 1), np.int64)
    ordered[:, :D], ordered[:, D] = key, np.iinfo(np.int64).max
    ordered.sort(axis=1)
    return key >= ordered[np.arange(N), D - k][:, None]


def select_on_host(log_w: Array, uniform: Array, k: Array, largest: float) -> Array:
    """``select_exact`` in numpy, by way of float32 scores that are fast but not the same on every machine.

    ``largest`` bounds the finite log-weights' absolute values.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # an overflow or a NaN makes the row unsure
        score = log_w.astype(np.float32, copy=False) - _log_exponential(uniform)
        kth, below = _boundary(score, k)
        chosen = score >= np.maximum(kth, _LOWEST)[:, None]
        unsure = _unsure(kth, below, largest)
    if unsure.any():
        rows = unsure.nonzero()[0]
        chosen[rows] = _select_exact_host(log_w[rows], uniform[rows], k[rows])
    return chosen


def select_of_draws(log_w: Array, draws: Array, k: Array, largest: float) -> Array:
    """``select_on_host`` of the uniforms behind draws, and log-weights from 0 to ``largest``, or -16: those are last.

    The largest scores are the smallest ``-ln u / exp(log_w)``. These, unlike a difference of logarithms, float32 holds
    well enough where u is one of 2^32 and the weights are of one size; and positive floats are sorted as the integers
    that they look like, in two thirds of the time.
    """
    N, D = log_w.shape
    if largest > _MILD:
        return select_on_host(log_w, _rules.fine_uniform(draws).reshape(N, D), k, largest)
    key = _keys(log_w, draws)
    ordered = np.empty((N, D + 2), np.float32)
    ordered[:, 0], ordered[:, -1] = 0.0, np.inf
    ordered[:, 1:-1] = key
    ordered.view(np.int32)[:, 1:-1].sort(axis=1)
    place = np.arange(0, N * (D + 2), D + 2) + k
    ordered = ordered.reshape(-1)
    kth = ordered.take(place)
    # A key errs by less than 2^-22 + 2^-20 key: by what the roundings of u leave of a logarithm near 0, and by 4 units
    # in the last place of the logarithm and of the exponential. For two keys, and twice to be safe:
    safe = ordered.take(place + 1) > kth * (1 + _ROUNDING * 4) + _ROUNDING
    chosen = key <= kth[:, None]
    if not np.logical_and.reduce(safe):
        rows = np.flatnonzero(~safe)
        u = _rules.fine_uniform(draws.reshape(N, D)[rows])
        chosen[rows] = _select_exact_host(log_w[rows], u, k[rows])
    return chosen


# Up to this ratio of weights, as a logarithm, small keys stand out from the errors of large ones.
_MILD = 4.0
_ROUNDING = 2.0**-20


def _keys(log_w: Array, draws: Array) -> Array:
    """``-ln u / exp(log_w)``, float32."""
    key = draws.astype(np.float32).reshape(log_w.shape)
    key += 0.5
    np.divide(2.0**32, key, out=key)
    np.log(key, out=key)
    key /= np.exp(log_w)
    return key


def _select_exact_host(log_w: Array, uniform: Array, k: Array) -> Array:
    """``select_exact`` of a few rows."""
    score = log_w.astype(np.float64) - exact_log(-exact_log(uniform))
    order = np.argsort(-score, axis=1, kind="stable")
    chosen = np.zeros(score.shape, np.bool_)
    np.put_along_axis(chosen, order, np.arange(score.shape[1]) < k[:, None], axis=1)
    chosen &= score > -np.inf
    return chosen


def _log_exponential(uniform: Array) -> Array:
    """``ln(-ln u)``, float32 of float64: near u = 1 float32 would leave nothing of ``ln u``.

    By numpy, also where its logarithm is not vectorised: torch's starts threads, which another process on one of two
    cores makes 20 times as slow as the work.
    """
    exponential = np.log(uniform)
    np.negative(exponential, out=exponential)
    return np.log(exponential, out=exponential).astype(np.float32)


def _unsure(kth: Array, below: Array, largest: float) -> Array:
    """Flag rows in which rounding may have swapped the k-th and the next score.

    A score near t is made of a log-weight within ``largest`` and a logarithm within |t| + ``largest``. Three roundings
    to float32, of the log-weight, of the logarithm and of the difference, err by less than 2^-22 (1 + |t| + largest).
    Twice that for two scores, and twice again to be safe.
    """
    # Written so that a NaN, the gap between two infinite scores, counts as unsure: float32 may have made them so.
    safe = kth - below > np.float32(2.0**-20) * (1 + largest + np.minimum(np.abs(kth), np.abs(below)))
    return ~safe


def _boundary(score: Array, k: Array) -> tuple[Array, Array]:
    """Return the k-th largest score of each row and the next: inf before the first, -inf after the last."""
    N, D = score.shape
    ordered = np.empty((N, D + 2), np.float32)
    ordered[:, 0], ordered[:, -1] = -np.inf, np.inf
    ordered[:, 1:-1] = score
    # Many short rows take a tenth of the time of torch's sort, which also tracks indices.
    ordered[:, 1:-1].sort(axis=1)
    row, below = np.arange(N), D - np.minimum(np.maximum(k.astype(np.int64), 0), D)
    return ordered[row, below + 1], ordered[row, below]
