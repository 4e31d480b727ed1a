r"""What the corruption routines share: levels, coins, tokens, the choice of backend, and the torch path.

A batch ``[B, L]`` is a grid of B rows, ``blocks`` blocks of ``size`` positions, the last of a row possibly short;
without a block size the row is one block of L. ``_philox`` says which random word belongs to which place.

    level      m = fl(fl((1 - eps) U) + eps)                    float32, one a block
    coin       u < m                                            float32 comparison, one a position
    weight     log w_i = fl(fl(rate (1 - m)) i),  rate = ln 2 / (half_life_ratio size)              float32
    count      k = round(fl(m length)), half to even, clamped

fl(.) is rounding to float32: every step by itself, never contracted, so that all devices agree.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from dllm_kernels.ops import _philox
from dllm_kernels.ops._backend import use_triton
from dllm_kernels.ops.gumbel_topk import on_host, select_exact

Corrupted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Grid(NamedTuple):
    """Rows, positions of a row, blocks of a row, positions of a block."""

    B: int
    L: int
    blocks: int
    size: int

    @classmethod
    def of(cls, input_ids: torch.Tensor, block_size: int | None) -> Grid:
        """The grid of a batch; without a block size, or with one beyond L, a row is one block of L."""
        B, L = input_ids.shape
        size = L if block_size is None else min(block_size, L)
        return cls(B, L, -(-L // size), size)

    def spread(self, of_block: torch.Tensor) -> torch.Tensor:
        """A value of each block, ``[rows, blocks]``, at each of its positions, ``[rows, L]``."""
        return of_block[:, torch.arange(self.L, device=of_block.device) // self.size]

    def flat(self, at_place: torch.Tensor) -> torch.Tensor:
        """``[rows, blocks, size]`` as ``[rows, L]``, without the places beyond the end of a short last block.

        By index, for torch 2.11 to 2.13 compile ``reshape(...)[:, :L]`` of an expanded tensor for the CPU to garbage.
        """
        place = torch.arange(self.L, device=at_place.device)
        return at_place[:, place // self.size, place % self.size]

    def draw(self, stream: int) -> _philox.Draw:
        """One word for each position."""
        return _philox.Draw(stream, self.blocks, self.size)

    def draw_levels(self) -> _philox.Draw:
        """One word for each block."""
        return _philox.Draw(_philox.STREAM_LEVEL, 1, self.blocks)


def mask_tokens(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    mask_token_id: int,
    eps: float,
    seed: torch.Tensor,
    backend: str,
) -> Corrupted:
    """Mask each position with its row's probability; see :func:`dllm_kernels.corruption.corrupt_uniform`."""
    if torch.compiler.is_compiling():
        from dllm_kernels.ops._compiled_corruption import mask_tokens_op

        return mask_tokens_op(input_ids, loss_mask, mask_token_id, eps, seed, backend)
    if use_triton(backend, input_ids):
        from dllm_kernels.kernels.corruption import mask_tokens as kernel

        return kernel(input_ids, loss_mask, mask_token_id, eps, seed)
    grid = Grid.of(input_ids, None)
    if on_host(input_ids.device):
        from dllm_kernels.ops import _corruption_host

        return _corruption_host.mask_tokens(input_ids, loss_mask, mask_token_id, eps, seed, grid)
    level_bits, bits = _philox.random_bits(seed, grid.B, grid.draw_levels(), grid.draw(_philox.STREAM_SELECT))
    level = _levels(level_bits, eps)
    noise = _supervised(_coins(grid, level, bits), loss_mask)
    return torch.where(noise, mask_token_id, input_ids), noise, grid.spread(level)


def replace_tokens(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    vocab_size: int,
    block_size: int | None,
    eps: float,
    seed: torch.Tensor,
    backend: str,
) -> Corrupted:
    """Random tokens; see :func:`dllm_kernels.corruption.corrupt_uniform_random`."""
    if torch.compiler.is_compiling():
        from dllm_kernels.ops._compiled_corruption import replace_tokens_op

        return replace_tokens_op(input_ids, loss_mask, vocab_size, block_size, eps, seed, backend)
    grid = Grid.of(input_ids, block_size)
    if use_triton(backend, input_ids):
        from dllm_kernels.kernels.corruption import replace_tokens as kernel

        return kernel(input_ids, loss_mask, vocab_size, grid.blocks, grid.size, eps, seed)
    if on_host(input_ids.device):
        from dllm_kernels.ops import _corruption_host

        return _corruption_host.replace_tokens(input_ids, loss_mask, vocab_size, eps, seed, grid)
    streams = (_philox.STREAM_SELECT, _philox.STREAM_TOKEN_HIGH, _philox.STREAM_TOKEN_LOW)
    draws = (grid.draw_levels(), *(grid.draw(stream) for stream in streams))
    level_bits, bits, high, low = _philox.random_bits(seed, grid.B, *draws)
    noise = _supervised(_coins(grid, _levels(level_bits, eps), bits), loss_mask)
    tokens = grid.flat(_philox.token_from_bits(high, low, vocab_size)).to(input_ids.dtype)
    return torch.where(noise, tokens, input_ids), noise, _ones(input_ids)


def mask_all(input_ids: torch.Tensor, loss_mask: torch.Tensor, mask_token_id: int, backend: str) -> Corrupted:
    """Mask every supervised position; see :func:`dllm_kernels.corruption.corrupt_all_masked`."""
    if torch.compiler.is_compiling():
        from dllm_kernels.ops._compiled_corruption import mask_all_op

        return mask_all_op(input_ids, loss_mask, mask_token_id, backend)
    if use_triton(backend, input_ids):
        from dllm_kernels.kernels.corruption import mask_all as kernel

        return kernel(input_ids, loss_mask, mask_token_id)
    noise = loss_mask != 0
    return torch.where(noise, mask_token_id, input_ids), noise, _ones(input_ids)


def mask_topk(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    mask_token_id: int,
    block_size: int | None,
    eps: float,
    half_life_ratio: float,
    seed: torch.Tensor,
    backend: str,
) -> Corrupted:
    """Mask exactly k positions of a block; see :func:`dllm_kernels.corruption.corrupt_blockwise`."""
    if torch.compiler.is_compiling():
        from dllm_kernels.ops._compiled_corruption import mask_topk_op

        return mask_topk_op(input_ids, loss_mask, mask_token_id, block_size, eps, half_life_ratio, seed, backend)
    grid = Grid.of(input_ids, block_size)
    rate = position_rate(half_life_ratio, grid.L if block_size is None else block_size)
    at_least = int(block_size is None)
    if use_triton(backend, input_ids):
        from dllm_kernels.kernels.corruption import mask_topk as kernel

        return kernel(input_ids, loss_mask, mask_token_id, grid.blocks, grid.size, eps, rate, at_least, seed)
    if on_host(input_ids.device):
        from dllm_kernels.ops import _corruption_host

        return _corruption_host.mask_topk(input_ids, loss_mask, mask_token_id, eps, rate, at_least, seed, grid)
    level_bits, bits = _philox.random_bits(seed, grid.B, grid.draw_levels(), grid.draw(_philox.STREAM_SELECT))
    level = _levels(level_bits, eps)
    noise = _supervised(_chosen(grid, level, rate, at_least, bits), loss_mask)
    return torch.where(noise, mask_token_id, input_ids), noise, grid.spread(level)


def position_rate(half_life_ratio: float, size: int) -> float:
    """``ln 2 / (half_life_ratio size)``, the log-weight a position gains on the one before it at m = 0."""
    # The largest log-weight, rate * size, stays finite in float32: infinite ones would be told apart by index only.
    return min(math.log(2.0) / (half_life_ratio * size), torch.finfo(torch.float32).max / size)


def _levels(bits: torch.Tensor, eps: float) -> torch.Tensor:
    """The m of each block, float32 ``[rows, blocks]``."""
    return _philox.uniform_from_bits(bits[:, 0]) * (1.0 - eps) + eps


def _coins(grid: Grid, level: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """``u < m`` for each position, bool ``[rows, L]``.

    With ``u = (2 q + 1) 2^-24`` and ``q = bits >> 9`` that is ``bits < 2^9 ceil(2^23 m - 1/2)``: one comparison.
    """
    bound = torch.ceil(level.to(torch.float64) * 2.0**23 - 0.5).to(torch.int64) << 9
    return grid.flat(bits < bound[..., None])


def number_to_mask(level: torch.Tensor, length: torch.Tensor, at_least: int) -> torch.Tensor:
    """``round(m length)``, half to even, within [at_least, length]; int64."""
    k = torch.round(level * length.to(torch.float32)).to(torch.int64)
    return torch.minimum(k.clamp(min=at_least), length)


def _chosen(grid: Grid, level: torch.Tensor, rate: float, at_least: int, bits: torch.Tensor) -> torch.Tensor:
    """The k positions of each block, bool ``[rows, L]``."""
    last = grid.L - (grid.blocks - 1) * grid.size
    length = torch.full((grid.blocks,), grid.size, device=level.device)
    length[-1:] = last
    k = number_to_mask(level, length, at_least)
    place = torch.arange(grid.size, device=level.device, dtype=torch.float32)
    log_w = ((1.0 - level) * rate)[..., None] * place
    log_w[:, -1, last:] = -torch.inf
    u = _philox.fine_uniform_from_bits(bits)
    chosen = select_exact(log_w.view(-1, grid.size), u.reshape(-1, grid.size), k.view(-1))
    return grid.flat(chosen.view(u.shape))


def _supervised(chosen: torch.Tensor, loss_mask: torch.Tensor | None) -> torch.Tensor:
    return chosen if loss_mask is None else chosen & (loss_mask != 0)


def _ones(input_ids: torch.Tensor) -> torch.Tensor:
    return torch.ones(input_ids.shape, dtype=torch.float32, device=input_ids.device)
