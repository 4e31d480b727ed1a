"""The torch path on CPU tensors outside torch.compile: the arithmetic of ``corruption``, in numpy.

Hosts corrupt on the CPU, often a sample at a time, where a numpy call costs a fifth of a torch call. Tests hold both to
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dllm_kernels.ops import _philox
from dllm_kernels.ops.corruption import Corrupted, Grid
from dllm_kernels.ops.gumbel_topk import fine_uniform, host_slices, seed_on_host, select_on_host

_Array = npt.NDArray[Any]
# (bits of levels, bits of each stream, first and end row) -> chosen, token, p_mask, each of [rows, blocks, size]
_Body = Callable[..., tuple[_Array, "_Array | int", "_Array | float"]]


def mask_tokens(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, mask_token_id: int, eps: float, seed: torch.Tensor, grid: Grid
) -> Corrupted:
    """``corruption.mask_tokens``."""

    def body(level_bits: _Array, coin_bits: _Array) -> tuple[_Array, int, _Array]:
        level = _levels(level_bits, eps)
        return _coins(level, coin_bits), mask_token_id, level

    return _corrupt(input_ids, loss_mask, seed, grid, (_philox.STREAM_SELECT,), body)


def replace_tokens(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, vocab_size: int, eps: float, seed: torch.Tensor, grid: Grid
) -> Corrupted:
    """``corruption.replace_tokens``."""

    def body(level_bits: _Array, coin_bits: _Array, high: _Array, low: _Array) -> tuple[_Array, _Array, float]:
        half, size = np.uint64(32), np.uint64(vocab_size)
        low *= size
        low >>= half
        high *= size
        high += low
        high >>= half
        return _coins(_levels(level_bits, eps), coin_bits), high, 1.0

    streams = (_philox.STREAM_SELECT, _philox.STREAM_TOKEN_HIGH, _philox.STREAM_TOKEN_LOW)
    return _corrupt(input_ids, loss_mask, seed, grid, streams, body)


def mask_topk(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    mask_token_id: int,
    eps: float,
    rate: float,
    at_least: int,
    seed: torch.Tensor,
    grid: Grid,
) -> Corrupted:
    """``corruption.mask_topk``."""
    last = grid.L - (grid.blocks - 1) * grid.size
    length = np.full((grid.blocks, 1), grid.size, np.int64)
    length[-1] = last
    place = np.arange(grid.size, dtype=np.float32)

    def body(level_bits: _Array, bits: _Array) -> tuple[_Array, int, _Array]:
        level = _levels(level_bits, eps)
        k = number_to_mask(level, length, at_least)
        log_w = (np.float32(1.0) - level) * np.float32(rate) * place
        log_w[:, -1, last:] = -np.inf
        u = fine_uniform(bits).reshape(-1, grid.size)
        chosen = select_on_host(log_w.reshape(-1, grid.size), u, k.reshape(-1), rate * grid.size)
        return chosen.reshape(bits.shape), mask_token_id, level

    return _corrupt(input_ids, loss_mask, seed, grid, (_philox.STREAM_SELECT,), body)


def _corrupt(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    seed: torch.Tensor,
    grid: Grid,
    streams: tuple[int, ...],
    body: _Body,
) -> Corrupted:
    """Run ``body`` on a slice of rows at a time and write the outputs."""
    noisy, noise, p_mask = (
        torch.empty(input_ids.shape, dtype=dtype, device="cpu")
        for dtype in (input_ids.dtype, torch.bool, torch.float32)
    )
    out_noise, out_p = noise.numpy(), p_mask.numpy()
    supervised = None if loss_mask is None else _as_bool(loss_mask).numpy()
    draws = (grid.draw_levels(), *(grid.draw(stream) for stream in streams))
    for rows in host_slices(grid.B, grid.L):
        part = slice(rows.start, rows.stop)
        level_bits, *bits = _philox.words_on_host(seed_on_host(seed, part), rows, draws)
        at_place = [b[..., : grid.size] for b in bits]
        chosen, token, p = body(level_bits[:, 0, : grid.blocks, None], *at_place)
        _spread(grid, p, chosen.shape, out_p[part])
        if supervised is None:
            out_noise[part] = _flat(grid, chosen)
        else:
            np.logical_and(_flat(grid, chosen), supervised[part], out=out_noise[part])
        new = (
            torch.tensor(token, device="cpu")
            if isinstance(token, int)
            else torch.from_numpy(_flat(grid, token).view(np.int64))
        )
        torch.where(noise[part], new.to(input_ids.dtype), input_ids[part], out=noisy[part])
    return noisy, noise, p_mask


def _as_bool(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask != 0


def _flat(grid: Grid, at_place: _Array) -> _Array:
    return at_place.reshape(len(at_place), -1)[:, : grid.L]


def _spread(grid: Grid, of_block: _Array | float, shape: tuple[int, ...], out: _Array) -> None:
    """Write a value of each block at each of its positions; in one pass where no block is short."""
    if grid.blocks * grid.size == grid.L:
        out.reshape(shape)[...] = of_block
    else:
        out[...] = _flat(grid, np.broadcast_to(of_block, shape))


def _levels(bits: _Array, eps: float) -> _Array:
    """The m of each block, float32 ``[rows, blocks, 1]``."""
    u = ((bits >> np.uint64(8)) | np.uint64(1)).astype(np.float32) * np.float32(2.0**-24)
    level: _Array = u * np.float32(1.0 - eps) + np.float32(eps)
    return level


def number_to_mask(level: _Array, length: _Array, at_least: int) -> _Array:
    """``corruption.number_to_mask``."""
    k = np.rint(level * length.astype(np.float32)).astype(np.int64)
    clamped: _Array = np.minimum(np.maximum(k, at_least), length)
    return clamped


def _coins(level: _Array, bits: _Array) -> _Array:
    """``u < m``; see ``corruption._coins`` for the comparison that does it."""
    bound = np.ceil(level.astype(np.float64) * 2.0**23 - 0.5).astype(np.uint64) << np.uint64(9)
    coins: _Array = bits < bound
    return coins
