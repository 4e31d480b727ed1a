"""The torch path on CPU tensors: the bodies of ``corruption`` on numpy arrays, a slice of the rows at a time.

Hosts corrupt on the CPU, often a sample at a time, where a numpy call costs a fifth of a torch call. Tests hold both to
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dllm_kernels._random import _philox, _rules
from dllm_kernels._random._grid import Change, Corrupted, Grid, Rows, lengths
from dllm_kernels._random._topk import host_slices, select_of_draws

Array = _rules.Array


def corrupt(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    seed: torch.Tensor,
    grid: Grid,
    layout: _philox.Layout,
    body: Callable[[Rows], Change],
    times: int,
) -> Corrupted:
    """Draw, run the body, write the outputs, so many rows at a time as ``host_slices`` says."""
    ids, supervised = input_ids.numpy(), None if loss_mask is None else _as_bool(loss_mask)
    noisy, noise, p_mask = (
        np.empty(ids.shape, ids.dtype),
        np.empty(ids.shape, np.bool_),
        np.empty(ids.shape, np.float32),
    )
    for rows in host_slices(grid.B, grid.L, times):
        part = slice(rows.start, rows.stop)
        levels, draws, words = _philox.bits_on_host(seed, rows, layout)
        where = None if supervised is None else supervised[part]
        chosen, token, level = body(Rows(part, ids[part], where, levels, draws, words))
        if where is None:
            noise[part] = chosen
        else:
            np.logical_and(chosen, where, out=noise[part])
        _put(ids[part], noise[part], token, out=noisy[part])
        if level is None:
            p_mask[part] = 1.0
        else:
            grid.fold(p_mask[part])[...] = grid.beside(level)
    return torch.from_numpy(noisy), torch.from_numpy(noise), torch.from_numpy(p_mask)


def mask_all(input_ids: torch.Tensor, loss_mask: torch.Tensor, mask_token_id: int) -> Corrupted:
    """``_corrupt.mask_all``."""
    ids, noise = input_ids.numpy(), np.array(_as_bool(loss_mask), order="C")
    noisy, p_mask = np.empty(ids.shape, ids.dtype), np.empty(ids.shape, np.float32)
    for rows in host_slices(*ids.shape):
        part = slice(rows.start, rows.stop)
        _put(ids[part], noise[part], mask_token_id, out=noisy[part])
    p_mask.fill(1.0)
    return torch.from_numpy(noisy), torch.from_numpy(noise), torch.from_numpy(p_mask)


def _as_bool(mask: torch.Tensor) -> Array:
    return mask.numpy() if mask.dtype == torch.bool else (mask != 0).numpy()


def _put(ids: Array, noise: Array, token: Array | int, out: Array) -> None:
    """``where(noise, token, ids)`` as ``ids + noise (token - ids)``, which wraps back to the same.

    ``numpy.where`` and ``torch.where`` branch at every position: six times as long where the mask is random.
    """
    np.subtract(token, ids, out=out, dtype=ids.dtype, casting="unsafe")
    np.multiply(out, noise, out=out)
    np.add(out, ids, out=out)


def topk_of_blocks(grid: Grid, draws: Array, level: Array, rate: float, at_least: int) -> Array:
    """``corruption._topk_of_blocks``."""
    length = np.array([grid.size] if grid.even else lengths(grid))
    if level.shape[1] < grid.blocks:
        level = level.repeat(grid.blocks, axis=1)
    k = _rules.number_to_mask(level, length, at_least)
    log_w = _rules.log_weights(level[..., None], rate, np.arange(grid.size, dtype=np.float32))
    if not grid.even:
        log_w[:, -1, length[-1] :] = -16.0  # u = 2^-33 has a score of -3.2, the least that there is
        room = np.zeros((len(draws), grid.blocks * grid.size), np.uint32)
        room[:, : grid.L] = draws
        draws = room
    chosen = select_of_draws(log_w.reshape(-1, grid.size), draws, k.reshape(-1), rate * grid.size)
    return chosen.reshape(len(draws), -1)[:, : grid.L]


def sample_level(
    B: int, method: str, low: float, high: float, seed: torch.Tensor, layout: _philox.Layout
) -> torch.Tensor:
    """``corruption.sample_level``."""
    u = _rules.uniform(_philox.bits_on_host(seed, range(B), layout)[0])[:, 0]
    level = _rules.scaled(_rules.coupled(u, np.arange(B), method), low, high)
    return torch.from_numpy(np.ascontiguousarray(level))
