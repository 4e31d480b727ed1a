r"""Sample k positions of a row without replacement, by Gumbel noise on log-weights.

    score_i = log_w_i - ln(-ln u_i),      chosen = the k largest scores, the lower index first among equals.

The same u gives the same set on every device, because ``corruption/_gumbel.py`` defines the score, operation by
operation.

On the CPU a sort of float32 scores decides almost every row: if the k-th and the next score differ by more than their
error bound, the set is the same. Exact scores decide the other rows, about one in several thousand at 32 positions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dllm_kernels._checks._backend import use_triton
from dllm_kernels._graph._opaque import opaque
from dllm_kernels.corruption import _gumbel, _philox, _rules
from dllm_kernels.corruption._rules import Array

# Positions processed at a time, with some 20 bytes of temporaries each. With fewer, the overhead of NumPy calls
# dominates. With more, the temporaries exceed the L2 cache and, if freed memory is returned to the system, cause a page
# fault per 4 KB. Best of 2^12 to 2^18 at [64, 4096], measured on two AMD EPYC and two Intel Xeon cores.
_SLICE = 1 << 15

_LOWEST = np.finfo(np.float32).min


@opaque("gumbel_topk_mask", lambda log_w, *_: [(log_w.shape, torch.bool)])
def choose(
    log_w: Tensor, k: Tensor | int, uniform: Tensor | None, seed: Tensor | None, start: Tensor | None, backend: str
) -> tuple[Tensor]:
    """Compute ``gumbel_topk_mask`` for validated arguments and a drawn seed."""
    check_start_range(start, log_w.shape[1])
    if use_triton(backend, log_w):
        from dllm_kernels.backends.triton.gumbel_topk import gumbel_topk_mask as kernel

        return (kernel(log_w, k, uniform, seed, start),)
    if log_w.numel() == 0:
        return (torch.empty(log_w.shape, dtype=torch.bool, device=log_w.device),)
    on_rows = _gumbel_topk_host if on_host(log_w) else _gumbel_topk_torch
    if start is None:
        return (on_rows(log_w, counts(k, log_w), uniform, seed),)
    padding = Padding(start, log_w.shape[1])
    left = padding.to_left(log_w).masked_fill(~padding.real, -torch.inf)
    return (padding.back(on_rows(left, counts(k, log_w), uniform, seed)),)


def counts(k: Tensor | int, log_w: Tensor) -> Tensor:
    """Return k of each row, as a tensor ``[N]``."""
    return torch.full(log_w.shape[:1], k, device=log_w.device) if isinstance(k, int) else k


class Padding:
    """Left padding of rows ``[N, D]``: moves rows to column 0 and back, so that draw i belongs to column start + i.

    Attributes:
        length: number of columns of each row that are not padding, int64 ``[N, 1]``.
        real: bool ``[N, D]``, True for these columns after :meth:`to_left`; the padding is then behind them.
    """

    def __init__(self, start: Tensor, D: int) -> None:
        column, start = torch.arange(D, device=start.device), start.clamp(0, D)[:, None]
        self.length = D - start
        self.real = column < self.length
        self._to_left, self._back = (column + start) % D, (column - start) % D

    def to_left(self, t: Tensor) -> Tensor:
        """Move the first column that is not padding to column 0, and the padding behind the row."""
        return t.gather(1, self._to_left)

    def back(self, t: Tensor) -> Tensor:
        """Undo :meth:`to_left`."""
        return t.gather(1, self._back)


def check_start_range(start: Tensor | None, D: int) -> None:
    """Raise if a first column lies outside [0, D]. Not checked on a GPU, because reading it would be a host sync."""
    if start is not None and start.is_cpu:
        values = start.numpy()
        if not ((values >= 0) & (values <= D)).all():
            raise ValueError(f"start must lie in [0, {D}], got values from {values.min()} to {values.max()}")


# Range that ``uniform`` is clamped to; -ln u is about 709 and 1.1e-16 at its ends.
MIN_UNIFORM = 2.0**-1022
MAX_UNIFORM = 1.0 - 2.0**-53


def on_host(tensor: Tensor) -> bool:
    """Return True if the torch backend uses NumPy for this tensor."""
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


def select_exact(log_w: Tensor, uniform: Tensor, k: Tensor) -> Tensor:
    """Select the k largest scores of each row ``[N, D]``, see the module docstring; ``uniform`` in (0, 1), no NaN."""
    score: Tensor = _gumbel.score(log_w, uniform)
    return k_largest(score, k) & (score > -torch.inf)


def k_largest(keys: Tensor, k: Tensor) -> Tensor:
    """Select the k largest keys of each row, the lower index first among equals."""
    order = torch.sort(keys, dim=1, descending=True, stable=True).indices
    first = torch.arange(keys.shape[1], device=keys.device) < k[:, None]
    return torch.zeros_like(first).scatter_(1, order, first)


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
    """Split the rows into ranges of at most ``times * _SLICE`` positions, or of one row."""
    step = max(1, times * _SLICE // columns)
    return [range(start, min(start + step, rows)) for start in range(0, rows, step)]


def select_largest(draws: Array, choosable: Array, k: Array) -> Array:
    """Select the k largest draws, integers below 2^32, among the choosable positions of each row.

    Torch or NumPy. The lower index wins a tie. ``draws`` and ``choosable`` are ``[N, D]``. ``k [N]`` is at most the
    number of choosable positions. Returns bool ``[N, D]``.
    """
    N, D = draws.shape
    if isinstance(draws, Tensor):
        return k_largest(draws.masked_fill(~choosable, -1), k)
    key = draws.astype(np.int64)
    key *= D
    key += np.arange(D - 1, -1, -1)  # no two keys are equal
    key[~choosable] = -1
    ordered = np.empty((N, D + 1), np.int64)
    ordered[:, :D], ordered[:, D] = key, np.iinfo(np.int64).max
    ordered.sort(axis=1)
    return key >= ordered[np.arange(N), D - k][:, None]


def select_on_host(log_w: Array, uniform: Array, k: Array, largest: float) -> Array:
    """Compute ``select_exact`` with NumPy, from float32 scores where their error allows.

    float32 scores are fast, but differ between machines. ``largest`` bounds the absolute values of the finite
    log-weights.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # an overflow or a NaN makes the row unsure
        score = np.asarray(log_w, np.float32) - _log_exponential(uniform)
        kth, below = _boundary(score, k)
        chosen = score >= np.maximum(kth, _LOWEST)[:, None]
        unsure = _unsure(kth, below, largest)
    if unsure.any():
        rows = unsure.nonzero()[0]
        chosen[rows] = _select_exact_host(log_w[rows], uniform[rows], k[rows])
    return chosen


def select_of_draws(log_w: Array, draws: Array, k: Array, largest: float) -> Array:
    """Compute ``select_on_host`` from draws, for log-weights in [0, ``largest``], or -16 for padding, which ranks last.

    The largest scores are the smallest ``-ln u / exp(log_w)``. Unlike a difference of logarithms, this quotient is
    accurate enough in float32 if u is one of 2^32 values and the weights are of similar size. Positive floats are
    sorted as integers with the same bits, which takes two thirds of the time.
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
    # The error of a key is below 2^-22 + 2^-20 key. The first term is the rounding of u, which a logarithm near 0
    # inherits. The second is 4 units in the last place of the logarithm and of the exponential. The bound allows for
    # the errors of two keys, times 2 to be safe.
    safe = ordered.take(place + 1) > kth * (1 + _ROUNDING * 4) + _ROUNDING
    chosen = key <= kth[:, None]
    if not np.logical_and.reduce(safe):
        rows = np.flatnonzero(~safe)
        u = _rules.fine_uniform(draws.reshape(N, D)[rows])
        chosen[rows] = _select_exact_host(log_w[rows], u, k[rows])
    return chosen


# Largest log-ratio of weights for which small keys exceed the errors of large keys.
_MILD = 4.0
_ROUNDING = 2.0**-20


def _keys(log_w: Array, draws: Array) -> Array:
    """Compute ``-ln u / exp(log_w)``, float32."""
    key = draws.astype(np.float32).reshape(log_w.shape)
    key += 0.5
    np.divide(2.0**32, key, out=key)
    np.log(key, out=key)
    key /= np.exp(log_w)
    return key


def _select_exact_host(log_w: Array, uniform: Array, k: Array) -> Array:
    """Compute ``select_exact`` of a few rows with NumPy."""
    score = _gumbel.score(log_w, uniform)
    order = np.argsort(-score, axis=1, kind="stable")
    chosen = np.zeros(score.shape, np.bool_)
    np.put_along_axis(chosen, order, np.arange(score.shape[1]) < k[:, None], axis=1)
    chosen &= score > -np.inf
    return chosen


def _log_exponential(uniform: Array) -> Array:
    """Compute ``ln(-ln u)`` in float64, because float32 has no digits of ``ln u`` near u = 1; return float32.

    NumPy is used even where its logarithm is not vectorised, because torch starts threads. If another process occupies
    one of two cores, waiting for them takes 20 times as long as the work.
    """
    exponential = np.log(uniform)
    np.negative(exponential, out=exponential)
    return np.log(exponential, out=exponential).astype(np.float32)


def _unsure(kth: Array, below: Array, largest: float) -> Array:
    """Flag rows in which rounding may have swapped the k-th and the next score.

    A score near t is the difference of a log-weight bounded by ``largest`` and a logarithm bounded by |t| +
    ``largest``. Rounding the log-weight, the logarithm and the difference to float32 adds an error below
    2^-22 (1 + |t| + largest). The bound allows for the errors of two scores, times 2 to be safe.
    """
    # Negated, so that NaN counts as unsure: it is the gap between two scores that are infinite, maybe only in float32.
    safe = kth - below > np.float32(2.0**-20) * (1 + largest + np.minimum(np.abs(kth), np.abs(below)))
    return ~safe


def _boundary(score: Array, k: Array) -> tuple[Array, Array]:
    """Return the k-th largest score of each row and the next one; inf for k = 0, and -inf after the last."""
    N, D = score.shape
    ordered = np.empty((N, D + 2), np.float32)
    ordered[:, 0], ordered[:, -1] = -np.inf, np.inf
    ordered[:, 1:-1] = score
    # For many short rows this takes a tenth of the time of torch.sort, which also tracks indices.
    ordered[:, 1:-1].sort(axis=1)
    row, below = np.arange(N), D - np.minimum(np.maximum(k.astype(np.int64), 0), D)
    return ordered[row, below + 1], ordered[row, below]
