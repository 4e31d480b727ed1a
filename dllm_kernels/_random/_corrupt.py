r"""The corruption routines below the public functions: the choice of backend, and the torch path.

A batch ``[B, L]`` is a grid of B rows, ``blocks`` blocks of ``size`` positions, the last of a row possibly short;
without a block size the row is one block of L. A routine is a body over rows of that grid, for numpy and torch alike:
from the draws it makes the chosen positions, what to put there and the level of each block, by the arithmetic of
``_rules``. On CPU tensors ``_host`` runs it in numpy, a slice of the rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from dllm_kernels._backends._backend import use_triton
from dllm_kernels._random import _host, _philox, _rules
from dllm_kernels._random._grid import Change, Corrupted, Grid, Rows, lengths
from dllm_kernels._random._rules import Array
from dllm_kernels._random._topk import on_host, select_exact, select_largest

METHODS = ("uniform", "antithetic", "stratified")  # of sample_level


def mask_tokens(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    mask_token_id: int,
    eps: float,
    exact: bool,
    level: torch.Tensor | None,
    seed: torch.Tensor,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask each position with its row's probability; see :func:`dllm_kernels.corruption.corrupt_uniform`."""
    check_level(level)
    if use_triton(backend, input_ids):
        from dllm_kernels._backends.triton.corruption import corrupt_independent, corrupt_topk

        L = input_ids.shape[1]
        if exact:
            return corrupt_topk(input_ids, loss_mask, mask_token_id, 1, L, eps, 0.0, 0, level, seed, exact=True)
        return corrupt_independent(input_ids, loss_mask, mask_token_id, 1, L, eps, level, seed, "mask")
    grid = Grid.of(input_ids, None)

    def body(rows: Rows) -> Change:
        m = _level(rows, level, eps)
        return Change(_exactly(rows, m) if exact else _coins(grid, rows, m), mask_token_id, m)

    return _corrupt(input_ids, loss_mask, seed, grid, grid.layout(), body, 1 if exact else 4)


def replace_tokens(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    vocab_size: int,
    block_size: int | None,
    eps: float,
    level: torch.Tensor | None,
    seed: torch.Tensor,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens; see :func:`dllm_kernels.corruption.corrupt_uniform_random`."""
    check_level(level)
    grid = Grid.of(input_ids, block_size)
    if use_triton(backend, input_ids):
        from dllm_kernels._backends.triton.corruption import corrupt_independent

        return corrupt_independent(input_ids, loss_mask, vocab_size, grid.blocks, grid.size, eps, level, seed, "tokens")

    def body(rows: Rows) -> Change:
        m = _level(rows, level, eps)
        token = _rules.token(rows.words, vocab_size)
        return Change(_coins(grid, rows, m), token, None if level is None else m)

    return _corrupt(input_ids, loss_mask, seed, grid, grid.layout(whole_words=True), body)


def mask_all(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, mask_token_id: int, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask every supervised position; see :func:`dllm_kernels.corruption.corrupt_all_masked`."""
    if use_triton(backend, input_ids):
        from dllm_kernels._backends.triton.corruption import corrupt_independent

        return corrupt_independent(input_ids, loss_mask, mask_token_id, 1, input_ids.shape[1], 0.0, None, None, "all")
    if on_host(input_ids):
        return _host.mask_all(input_ids, loss_mask, mask_token_id)
    noise = loss_mask != 0
    p_mask = torch.ones(input_ids.shape, dtype=torch.float32, device=input_ids.device)
    return torch.where(noise, mask_token_id, input_ids), noise, p_mask


def mask_topk(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    mask_token_id: int,
    block_size: int | None,
    eps: float,
    half_life_ratio: float,
    level: torch.Tensor | None,
    seed: torch.Tensor,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask exactly k positions of a block; see :func:`dllm_kernels.corruption.corrupt_blockwise`."""
    check_level(level)
    grid = Grid.of(input_ids, block_size)
    rate = position_rate(half_life_ratio, grid.L if block_size is None else block_size)
    at_least = int(block_size is None)
    if use_triton(backend, input_ids):
        from dllm_kernels._backends.triton.corruption import corrupt_topk

        return corrupt_topk(
            input_ids, loss_mask, mask_token_id, grid.blocks, grid.size, eps, rate, at_least, level, seed
        )
    topk_of_blocks = _host.topk_of_blocks if on_host(input_ids) else _topk_of_blocks

    def body(rows: Rows) -> Change:
        m = _level(rows, level, eps)
        return Change(topk_of_blocks(grid, rows.draws, m, rate, at_least), mask_token_id, m)

    return _corrupt(input_ids, loss_mask, seed, grid, grid.layout(), body, 2)


def mix_tokens(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    mask_token_id: int,
    vocab_size: int,
    mask_prob: torch.Tensor,
    uniform_prob: torch.Tensor,
    check: bool,
    seed: torch.Tensor,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks and other tokens; see :func:`dllm_kernels.corruption.corrupt_mix`."""
    if check or input_ids.is_cpu:
        _check_sum(mask_prob, uniform_prob)
    if use_triton(backend, input_ids):
        from dllm_kernels._backends.triton.corruption import mix_tokens as kernel

        return kernel(input_ids, loss_mask, mask_token_id, vocab_size, mask_prob, uniform_prob, seed)
    grid = Grid.of(input_ids, None)

    def body(rows: Rows) -> Change:
        p, q = (rows_of(prob, rows) for prob in (mask_prob, uniform_prob))
        absorbed, changed = _rules.channels(p, q, rows.draws)
        other = _rules.other_token(rows.words, rows.ids, mask_token_id, vocab_size)
        chosen = absorbed | (changed & (rows.ids != mask_token_id))
        return Change(chosen, other - (other - mask_token_id) * absorbed, None)

    noisy, noise, _ = _corrupt(input_ids, loss_mask, seed, grid, grid.layout(whole_words=True), body)
    return noisy, noise


def complement(noise_mask: torch.Tensor, loss_mask: torch.Tensor, backend: str) -> torch.Tensor:
    """Select the other supervised positions; see :func:`dllm_kernels.corruption.complementary`."""
    if use_triton(backend, noise_mask):
        from dllm_kernels._backends.triton.corruption import complement as kernel

        return kernel(noise_mask, loss_mask)
    return (loss_mask != 0) & (noise_mask == 0)


def sample_level(B: int, method: str, low: float, high: float, seed: torch.Tensor, backend: str) -> torch.Tensor:
    """One level a row; see :func:`dllm_kernels.corruption.sample_level`."""
    if use_triton(backend, seed):
        from dllm_kernels._backends.triton.corruption import sample_level as kernel

        return kernel(B, method, low, high, seed)
    layout = _philox.Layout(1, 0)
    if on_host(seed):
        return _host.sample_level(B, method, low, high, seed, layout)
    u = _rules.uniform(_philox.random_bits(seed, B, layout)[0])[:, 0]
    level: torch.Tensor = _rules.scaled(_rules.coupled(u, torch.arange(B, device=seed.device), method), low, high)
    return level


def position_rate(half_life_ratio: float, size: int) -> float:
    """``ln 2 / (half_life_ratio size)``, the log-weight a position gains on the one before it at m = 0."""
    # The largest log-weight, rate * size, stays finite in float32: infinite ones would be told apart by index only.
    return min(math.log(2.0) / (half_life_ratio * size), torch.finfo(torch.float32).max / size)


def check_level(level: torch.Tensor | None) -> None:
    """Raise where a level lies outside [0, 1]; on a GPU looking would be a host sync."""
    if level is not None and level.is_cpu:
        values = level.numpy()
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"level must lie in [0, 1], got values from {values.min()} to {values.max()}")


def _check_sum(mask_prob: torch.Tensor, uniform_prob: torch.Tensor) -> None:
    on_cpu = mask_prob.is_cpu
    p, q = (prob.numpy() if on_cpu else prob for prob in (mask_prob, uniform_prob))
    fits, total = (p >= LEAST) & (q >= LEAST), p + q
    fits &= total <= _rules.MOST
    if np.logical_and.reduce(fits, axis=None) if on_cpu else fits.all():
        return
    for name, prob in (("mask_prob", p), ("uniform_prob", q)):
        if not ((prob >= LEAST) & (prob <= _rules.MOST)).all():
            raise ValueError(f"{name} must lie in [0, 1], got values from {float(prob.min())} to {float(prob.max())}")
    raise ValueError(f"mask_prob + uniform_prob must be at most 1, got up to {float(total.max())}")


#: The smallest number that passes for a probability of 0 which rounding, as of 1 - p, has made a little less.
LEAST = -1e-5


def rows_of(tensor: torch.Tensor, rows: Rows) -> Array:
    """Take some rows of a tensor beside the batch, in the library of the rows."""
    return (tensor if isinstance(rows.draws, torch.Tensor) else tensor.numpy())[rows.part]


def _level(rows: Rows, given: torch.Tensor | None, eps: float) -> Array:
    """Return m of each block, float32 ``[rows, blocks]``, or ``[rows, 1]`` for all blocks of a row."""
    return _rules.level(rows.levels, eps) if given is None else rows_of(given, rows)


def _coins(grid: Grid, rows: Rows, level: Array) -> Array:
    """``u < m`` for each position."""
    return _rules.below(grid.fold(rows.draws), grid.beside(level)).reshape(-1, grid.L)


def _exactly(rows: Rows, level: Array) -> Array:
    """Exactly round(m supervised) of the supervised positions, those of the largest draws."""
    assert rows.supervised is not None
    length = rows.supervised.sum(1)
    k = _rules.number_to_mask(level[:, 0], length, (level[:, 0] > 0) * 1)
    return select_largest(rows.draws, rows.supervised, k)


def _topk_of_blocks(grid: Grid, draws: torch.Tensor, level: torch.Tensor, rate: float, at_least: int) -> torch.Tensor:
    """Select the k positions of each block, bool ``[rows, L]``."""
    device = draws.device
    level = level.expand(-1, grid.blocks)
    length = torch.tensor(lengths(grid), device=device)
    k = _rules.number_to_mask(level, length, at_least)
    place = torch.arange(grid.size, device=device)
    log_w = _rules.log_weights(level[..., None], rate, place.to(torch.float32))
    log_w = log_w.masked_fill(place >= length[:, None], -torch.inf)
    room = draws.new_zeros(len(draws), grid.blocks * grid.size)
    room[:, : grid.L] = draws
    u = _rules.fine_uniform(room).view(-1, grid.size)
    chosen = select_exact(log_w.reshape(-1, grid.size), u, k.reshape(-1))
    return chosen.view(len(draws), -1)[:, : grid.L]


def _corrupt(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    seed: torch.Tensor,
    grid: Grid,
    layout: _philox.Layout,
    body: Callable[[Rows], Change],
    times: int = 1,
) -> Corrupted:
    """Draw, run the body on all rows, write the outputs; ``times`` is for ``host_slices``."""
    if on_host(input_ids):
        return _host.corrupt(input_ids, loss_mask, seed, grid, layout, body, times)
    levels, draws, words = _philox.random_bits(seed, grid.B, layout)
    supervised = None if loss_mask is None else loss_mask != 0
    chosen, token, level = body(Rows(slice(None), input_ids, supervised, levels, draws, words))
    noise = chosen if supervised is None else chosen & supervised
    p_mask = torch.ones(input_ids.shape, dtype=torch.float32, device=input_ids.device)
    if level is not None:
        grid.fold(p_mask)[...] = grid.beside(level)
    new = token.to(input_ids.dtype) if isinstance(token, torch.Tensor) else token
    return torch.where(noise, new, input_ids), noise.contiguous(), p_mask
