r"""Arithmetic of corruption, written once for torch tensors and NumPy arrays, and once more in the Triton kernels.

    level      m = fl(fl((1 - eps) u) + eps)                    float32, one per block
    coin       u < m                                            one per position
    weight     log w_i = fl(fl(rate (1 - m)) i),  rate = ln 2 / (half_life_ratio size)              float32
    count      k = round(fl(m length)), half to even, clamped

fl(.) rounds to float32. Every step is rounded by itself and never contracted, so that all devices agree. Draws are 32
random bits, in int64 (torch) or uint32 (NumPy). Words are 64 random bits, in int64. ``_philox`` defines their layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllm_kernels.corruption._philox import COIN_BITS, TOKEN_BITS

#: A torch.Tensor or a numpy.ndarray; functions return the kind that they take.
Array = Any


def _library(x: Array) -> Any:
    return torch if isinstance(x, Tensor) else np


def float32(x: Array) -> Array:
    """Cast to float32."""
    return x.to(torch.float32) if isinstance(x, Tensor) else x.astype(np.float32)


def float64(x: Array) -> Array:
    """Cast to float64."""
    return x.to(torch.float64) if isinstance(x, Tensor) else x.astype(np.float64)


def uniform(draws: Array) -> Array:
    """Compute the u of coins and levels: ``(2 q + 1) 2^-24``, q the high 23 bits; float32, exact, inside (0, 1)."""
    return float32((draws >> 8) | 1) * 2.0**-24


def fine_uniform(draws: Array) -> Array:
    """Compute the u of Gumbel noise: ``(2 draw + 1) 2^-33``, float64, exact, inside (0, 1)."""
    u = float64(draws)
    u += 0.5
    u *= 2.0**-32
    return u


def level(draws: Array, eps: float) -> Array:
    """Compute m of each block from its draw, ``(1 - eps) uniform(draws) + eps``, float32.

    The factor of the uniform, a power of 2, is multiplied into ``1 - eps``, which rounds nothing.
    """
    return (float32(coin_bits(draws)) + 0.5) * ((1.0 - eps) * 2.0**-COIN_BITS) + eps


def level_of_segment(level: Array, number: Array) -> Array:
    """Return the level of the segment of each position, 1 for positions in no segment (number -1).

    ``level`` is ``[rows, L]``, where column j belongs to segment j, or ``[rows, 1]`` for all segments.
    """
    if level.shape[1] > 1:
        column = number.clip(0)
        level = level.gather(1, column) if isinstance(level, Tensor) else np.take_along_axis(level, column, 1)
    return _library(level).where(number >= 0, level, 1.0)


def coin_bits(draws: Array) -> Array:
    """Return the 23 random bits q of each position's coin."""
    return draws >> (32 - COIN_BITS)


def coin_bound(level: Array, bits: Array) -> Array:
    """Return ``ceil(2^23 m - 1/2)`` in the dtype of ``bits``: ``u < m`` if and only if q is below it."""
    bound = _library(level).ceil(level * 2.0**COIN_BITS - 0.5)
    return bound.to(bits.dtype) if isinstance(bound, Tensor) else bound.astype(bits.dtype)


def below(draws: Array, level: Array) -> Array:
    """Toss the coin ``u < m`` of each draw."""
    if isinstance(draws, Tensor):
        bits = coin_bits(draws)
        return bits < coin_bound(level, bits)
    bound = coin_bound(level, draws)
    # Test q < bound by comparing the draw, or the whole word, with the largest one below the bound, which saves the
    # pass that would shift it. A bound of 2^23 wraps to the largest integer, which is the right one.
    heads = draws <= (bound << (8 * draws.itemsize - COIN_BITS)) - 1
    return heads if np.logical_and.reduce(bound, axis=None) else heads & (bound != 0)


def token(words: Array, n: int) -> Array:
    """Draw one of n tokens, n at most 2^31, from the low 41 bits r of a word: ``floor(r n / 2^41)``, int64."""
    r = words & ((1 << TOKEN_BITS) - 1)
    if n <= 1 << 22:  # the product is below 2^63
        r *= n
        r >>= TOKEN_BITS
        return r
    return ((r >> 9) * n + (((r & 511) * n) >> 9)) >> 32


def number_to_mask(level: Array, length: Array, at_least: Array | int) -> Array:
    """Return ``round(m length)``, half to even, clamped to [at_least, length]; int64."""
    share = level * float32(length)
    if isinstance(share, Tensor):
        return torch.minimum(share.round().to(torch.int64).clip(at_least), length)
    return np.minimum(np.maximum(np.rint(share).astype(np.int64), at_least), length)


def log_weights(level: Array, rate: float, place: Array) -> Array:
    """Compute log-weights that favour later positions of a block."""
    return ((1.0 - level) * rate) * place


def channels(mask_prob: Array, uniform_prob: Array, draws: Array) -> tuple[Array, Array]:
    """Select the positions that become MASK, and the positions that become MASK or another token.

    The conditions are ``u < mask_prob`` and ``u < mask_prob + uniform_prob``, summed in float32. In a row whose sum
    exceeds 1 + 1e-5 no position is selected.
    """
    xp, total = _library(mask_prob), mask_prob + uniform_prob
    # Rounding can make a probability slightly negative, which would wrap to a huge unsigned bound.
    mask_prob, total = (xp.where((total <= MOST) & (p > 0), p, 0.0) for p in (mask_prob, total))
    absorbed = below(draws, mask_prob)
    return absorbed, absorbed | below(draws, total)


#: Largest accepted sum of two probabilities, float32.
MOST = float(np.float32(1.0 + 1e-5))


def other_token(words: Array, ids: Array, mask_token: int, vocab_size: int) -> Array:
    """Draw a token other than MASK and the current one: one of ``vocab_size - 2``, shifted past both."""
    other = token(words, vocab_size - 2)
    other += other >= ids.clip(max=mask_token)
    other += other >= ids.clip(min=mask_token)
    return other


def coupled(u: Array, row: Array, method: str) -> Array:
    """Compute levels in [0, 1) from one u per row, float32; see :func:`dllm_kernels.corruption.sample_level`."""
    if method == "uniform":
        return u
    xp = _library(u)
    if method == "antithetic":
        first = u[row - row % 2]
        return xp.where(row % 2 == 1, 1.0 - first, first)
    x = float64(u[:1]) + float64(row) / len(row)
    return float32(x - xp.floor(x)).clip(max=1.0 - 2.0**-24)  # rounding to float32 may give 1


def scaled(x: Array, low: float, high: float) -> Array:
    """Return ``low + (high - low) x``, float32, at most ``high``."""
    return (x * (high - low) + low).clip(max=high)
