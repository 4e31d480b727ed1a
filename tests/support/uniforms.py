"""The random numbers of corruption and the uniforms behind samples, by NumPy alone."""

from typing import NamedTuple

import numpy as np
import torch


class Draws(NamedTuple):
    """Draws of the rows of a batch, each exact: levels and coins in float32, Gumbel uniforms in float64, 41-bit ints.

    ``levels`` is ``[B, levels]``; ``coins``, ``fine`` and ``tokens``, of draws or of whole words, are ``[B, L]``.
    """

    levels: torch.Tensor
    coins: torch.Tensor
    fine: torch.Tensor
    tokens: np.ndarray

    def token(self, n: int) -> torch.Tensor:
        """Return one of n tokens per position."""
        return torch.from_numpy((self.tokens * n >> 41).astype(np.int64))


def draws(seeds: torch.Tensor | int, B: int, levels: int, L: int, whole_words: bool = False) -> Draws:
    """Draw under the seed of each row, or row b of one seed, in the layout of ``dllm_kernels.corruption``."""
    before = -(-levels // 8)
    n = before + -(-L // (4 if whole_words else 8))
    keys = [(seeds, b * n) for b in range(B)] if isinstance(seeds, int) else [(seed, 0) for seed in seeds.tolist()]
    starts = [(seed % 2**64, 2**32 - 1 - before + row) for seed, row in keys]
    words = np.array([np.random.Philox(key=key, counter=start).random_raw(4 * n) for key, start in starts], np.uint64)
    bits, words = words.view(np.uint32), words[:, 4 * before :][:, :L]
    of_levels, bits = bits[:, : 8 * before][:, ::-1][:, :levels], bits[:, 8 * before :][:, :L]
    bits = words >> np.uint64(32) if whole_words else bits
    levels_, coins = (torch.from_numpy((2.0 * (x >> 9) + 1) * 2.0**-24).float() for x in (of_levels, bits))
    fine = torch.from_numpy((2.0 * bits + 1) * 2.0**-33)
    return Draws(levels_, coins, fine, words.astype(object) & (2**41 - 1))


def uniforms(seeds: torch.Tensor, rows: torch.Tensor, V: int) -> torch.Tensor:
    """Compute the uniforms behind the noise of V columns, float64 ``[..., V]``, strictly inside (0, 1).

    ``(2 (high 2^32 + low) + 1) 2^-49``. ``high`` is the v-th piece of 16 bits of NumPy's Philox stream under the row's
    seed from the counter ``(2^32, 1, r, 0)`` on, ``low`` the v-th piece of 32 bits from ``(2^32, 2, r, 0)`` on, for row
    r; in a word the low piece comes first.

    Args:
        seeds: int64 ``[...]``.
        rows: int64 ``[...]``, the number of each row under its seed.
        V: size of the vocabulary.

    Returns:
        float64 ``[..., V]`` on the CPU.

    Source: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", by ``numpy.random.Philox``.
    """
    keys = list(zip(seeds.flatten().tolist(), rows.flatten().tolist(), strict=True))

    def pieces(stream: int, columns: int, dtype: str) -> np.ndarray:
        n = 16 // columns * -(-V // 16)
        starts = [(seed % 2**64, 2**32 - 1 + (stream << 64) + (row << 128)) for seed, row in keys]
        words = [np.random.Philox(key=seed, counter=start).random_raw(4 * n) for seed, start in starts]
        return np.array(words, dtype=np.uint64).reshape(-1, 4 * n).view(dtype)[:, :V].astype(np.float64)

    u = (pieces(1, 16, "<u2") * 2.0**32 + pieces(2, 8, "<u4") + 0.5) * 2.0**-48
    return torch.from_numpy(u).view(*seeds.shape, V)
