"""Uniforms that rows of logits are sampled with, and their random bits; ``_philox.py`` defines the layout."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_kernels.corruption._philox import MASK32, ZERO, philox4x64, words_from
from dllm_kernels.corruption._rules import Array

# Second counter word of the high 16 and of the low 32 bits of a uniform.
HIGH, LOW = 1, 2
# Up to this many columns, setting NumPy's generator for each is faster than some 250 NumPy calls for all at once.
_FEW = 100


class Noise(NamedTuple):
    """Uniforms of 48 bits for a range of columns of R rows; each depends on seed, row number and column only.

    Attributes:
        seeds: int64 ``[R]``.
        row_numbers: int64 ``[R]``, number of the row under its seed.
        first: the first column of the range.
    """

    seeds: Tensor
    row_numbers: Tensor
    first: int = 0

    @property
    def first_counter(self) -> int:
        """Counter of the high bits of the first column, counted from ``_philox.ZERO``."""
        return self.first // 16


def high_on_host(noise: Noise, count: int) -> Array:
    """Compute :func:`high` with NumPy, uint16."""
    skip, first = noise.first % 16, ZERO + noise.first_counter
    words = np.empty((len(noise.row_numbers), 4 * -(-(skip + count) // 16)), np.uint64)
    for to, seed, number in zip(words, noise.seeds.tolist(), noise.row_numbers.tolist(), strict=True):
        to[:] = words_from(seed, first, HIGH, number=number).random_raw(len(to))
    return words.view(np.uint16)[:, skip : skip + count]


def high(noise: Noise, count: int) -> Tensor:
    """Draw the high 16 bits of ``count`` columns, int64 ``[R, count]``."""
    return _pieces(noise, noise.first_counter, HIGH, 16, count)


def low(noise: Noise, count: int) -> Tensor:
    """Draw the low 32 bits of ``count`` columns, int64 ``[R, count]``."""
    return _pieces(noise, 2 * noise.first_counter, LOW, 32, count)


def _pieces(noise: Noise, first: int, stream: int, bits: int, count: int) -> Tensor:
    """Split the words that begin at the counter ``first`` into pieces of ``bits`` bits, the lowest of a word first."""
    skip, number = noise.first % 16, noise.row_numbers[:, None]
    counter = first + torch.arange(-(-(skip + count) * bits // 256), device=number.device)
    words = _words(noise.seeds[:, None], number, counter, stream)
    pieces = torch.stack([(words >> shift) & ((1 << bits) - 1) for shift in range(0, 64, bits)], dim=-1)
    return pieces.view(len(number), -1)[:, skip : skip + count]


def low_of_on_host(noise: Noise, row: Array, column: Array) -> Array:
    """Draw the low 32 bits of single columns ``[n]``, int64, with NumPy, because torch would start threads."""
    v = column + noise.first % 16
    counter = 2 * noise.first_counter + (v >> 3) + ZERO
    seed, number = noise.seeds.numpy()[row], noise.row_numbers.numpy()[row]
    if len(v) <= _FEW:
        states = zip(seed.tolist(), counter.tolist(), number.tolist(), strict=True)
        four = [words_from(s, c, LOW, number=n).random_raw(4) for s, c, n in states]
        words: Array = np.array(four, np.uint64).reshape(-1, 4).view(np.int64).T
    else:
        zero = np.zeros_like(counter)
        words = philox4x64((counter, zero + LOW, number, zero), (seed, zero))
    return (np.choose((v >> 1) & 3, words) >> ((v & 1) << 5)) & MASK32


def _words(seed: Tensor, number: Tensor, counter: Tensor, stream: int) -> Tensor:
    """Draw the four words of each counter, counted from ``ZERO``, of rows ``[R, 1]``, int64 ``[R, n, 4]``."""
    zero = torch.zeros_like(number + counter)
    return torch.stack(philox4x64((zero + counter + ZERO, zero + stream, zero + number, zero), (seed, zero)), dim=-1)
