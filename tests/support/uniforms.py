"""The uniforms behind samples, by NumPy alone."""

import numpy as np
import torch


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
