r"""Corruption routines below the public functions: dispatch to a backend, and the implementation in torch and NumPy.

A batch ``[B, L]`` is a grid of B rows, each of ``blocks`` blocks of ``size`` positions. The last block of a row may be
short. Without a block size, a row is one block of L positions. A routine is a body over rows of the grid, written once
for NumPy and torch. From the draws it computes the chosen positions, their new tokens and the level of each block, with
the arithmetic of ``_rules``.

Left padding is moved behind the row for the body, and back afterwards. With segments, the grid has blocks of one
position, each with the level of its segment.

On CPU tensors the body runs on NumPy arrays, a slice of the rows at a time. Training frameworks corrupt on the CPU,
often one sample at a time, where a NumPy call costs a fifth of a torch call. Tests require the same bits from both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_kernels._checks._backend import use_triton
from dllm_kernels._graph._opaque import Spec, opaque
from dllm_kernels.corruption import _philox, _rules, _topk
from dllm_kernels.corruption._philox import Layout
from dllm_kernels.corruption._topk import Padding, check_start_range, on_host

Array = _rules.Array
Corrupted = tuple[Tensor, Tensor, Tensor]
METHODS = ("uniform", "antithetic", "stratified")  # methods of sample_level


class Grid(NamedTuple):
    """Shape of a batch: B rows of L positions, each split into ``blocks`` blocks of ``size`` positions."""

    B: int
    L: int
    blocks: int
    size: int

    @classmethod
    def of(cls, input_ids: Tensor, block_size: int | None) -> Grid:
        """Make the grid of a batch; without a block size, or with one larger than L, a row is one block of L."""
        B, L = input_ids.shape
        size = L if block_size is None else min(block_size, L)
        return cls(B, L, -(-L // size), size)

    @property
    def even(self) -> bool:
        """True if no block is short."""
        return self.blocks * self.size == self.L

    @property
    def lengths(self) -> list[int]:
        """Number of positions of each block of a row."""
        return [self.size] * (self.blocks - 1) + [self.L - (self.blocks - 1) * self.size]

    def fold(self, per_position: Array) -> Array:
        """View ``[rows, L]`` as ``[rows, blocks, size]`` if there are several blocks and none is short."""
        return per_position.reshape(-1, self.blocks, self.size) if self.blocks > 1 and self.even else per_position

    def expand_to_positions(self, per_block: Array) -> Array:
        """Expand ``[rows, blocks]``, or ``[rows, 1]`` for all blocks, to broadcast against the result of ``fold``."""
        if self.even and self.blocks > 1:
            return per_block[..., None]
        if per_block.shape[1] == 1:
            return per_block
        repeat = torch.repeat_interleave if isinstance(per_block, Tensor) else np.repeat
        return repeat(per_block, self.size, 1)[:, : self.L]


class BatchRows(NamedTuple):
    """A slice of the batch's rows, with their random bits.

    Attributes:
        part: the slice of the batch.
        ids: token ids ``[rows, L]``.
        supervised: bool ``[rows, L]``; None if all positions are supervised.
        levels: draws of the levels; None without a seed, as ``draws`` and ``words``.
        draws: draws of the positions.
        words: whole words of the positions; None if the routine takes one draw per position.
    """

    part: slice
    ids: Array
    supervised: Array
    levels: Array
    draws: Array
    words: Array


class CorruptionResult(NamedTuple):
    """Chosen positions, their new token (an int or ``[rows, L]``), and the level of each block (None: 1)."""

    chosen: Array
    token: Array | int
    level: Array | None


Body = Callable[[BatchRows], CorruptionResult]


class Mix(NamedTuple):
    """Parameters of :func:`dllm_kernels.corruption.corrupt_mix`; ``check`` requests the check of the sums on a GPU."""

    mask_token_id: int
    vocab_size: int
    check: bool


# Size of the slices of a kind on the host, as a multiple, where more than 1 was measured to be faster: ``host_slices``.
TIMES = {"mask": 4, "topk": 2}


class Routine(NamedTuple):
    """A routine of :mod:`dllm_kernels.corruption` and its parameters.

    ======  =================================================  ===========================================
    kind    public function                                    chosen positions
    ======  =================================================  ===========================================
    mask    ``corrupt_uniform``                                each with the probability of its row
    exact   ``corrupt_uniform`` with ``exact``                 an exact number per row
    topk    ``corrupt_blockwise``                              an exact number per block, biased by position
    tokens  ``corrupt_uniform_random``                         each with the probability of its block
    all     ``corrupt_all_masked``                             all; takes no seed
    ======  =================================================  ===========================================

    ``token`` is the id of MASK; for ``tokens``, the number of tokens from which the replacements are drawn.
    """

    kind: str
    token: int
    block_size: int | None = None
    eps: float = 0.0
    half_life_ratio: float = 1.0


def _specs(input_ids: Tensor, *_: Any) -> list[Spec]:
    shape = input_ids.shape
    return [(shape, input_ids.dtype), (shape, torch.bool), (shape, torch.float32)]


@opaque("corrupt", _specs)
def corrupt(
    input_ids: Tensor, loss_mask: Tensor | None, level: Tensor | None, seed: Tensor | None, start: Tensor | None,
    segment_ids: Tensor | None, routine: Routine, backend: str,
) -> Corrupted:  # fmt: skip
    """Corrupt supervised positions.

    A custom op in a graph: integer products exceed 2^63 and wrap, and signed overflow is undefined in the C++ that
    inductor generates for a CPU. If the last block is short, inductor also left the end of a reshaped tensor unwritten.
    """
    kind, token, block_size, eps, _ = routine
    times = TIMES.get(kind, 1)
    check_start_range(start, input_ids.shape[1])
    if input_ids.numel() == 0:
        return _empty_result(input_ids, backend)
    check_level(level)
    grid = Grid.of(input_ids, block_size)
    segments = None if segment_ids is None else segment_numbers(segment_ids, start)
    rate = _rate(routine, grid.L, start) if kind == "topk" else 0.0
    if use_triton(backend, input_ids):
        from dllm_kernels.backends.triton.corruption import corrupt as kernel

        return kernel(input_ids, loss_mask, level, seed, start, segments, routine, grid, rate)
    padding = None if start is None else Padding(start, grid.L)
    if segments is not None:
        grid = Grid(grid.B, grid.L, grid.L, 1)
        segments = segments if padding is None else padding.to_left(segments)

    def body(rows: BatchRows) -> CorruptionResult:
        if kind == "all":
            return CorruptionResult(rows.supervised, token, None)
        m = _rules.level(rows.levels, eps) if level is None else rows_of(level, rows)
        if kind == "exact":  # the round(m * supervised) supervised positions with the largest draws
            k = _rules.number_to_mask(m[:, 0], rows.supervised.sum(1), (m[:, 0] > 0) * 1)
            return CorruptionResult(_topk.select_largest(rows.draws, rows.supervised, k), token, m)
        if kind == "topk":
            length = None if padding is None else rows_of(padding.length, rows)
            row_rate = rows_of(rate, rows) if isinstance(rate, Tensor) else rate
            chosen = _topk_of_blocks(grid, rows.draws, m, row_rate, int(block_size is None), length)
            return CorruptionResult(chosen, token, m)
        number = None if segments is None else rows_of(segments, rows)
        m = m if number is None else _rules.level_of_segment(m, number)
        coins = _rules.below(grid.fold(rows.draws), grid.expand_to_positions(m)).reshape(-1, grid.L)
        if kind == "tokens":
            return CorruptionResult(coins, _rules.token(rows.words, token), None if level is None else m)
        assert kind == "mask", f"body in corruption/_corrupt.py has no branch for the kind {kind}"
        return CorruptionResult(coins if number is None else coins & (number >= 0), token, m)

    layout = Layout(grid.blocks, grid.L, whole_words=kind == "tokens")
    return _corrupt(input_ids, loss_mask, seed, padding, grid, layout, body, times)


def _rate(routine: Routine, L: int, start: Tensor | None) -> float | Tensor:
    """Compute the difference of the log-weights of adjacent positions at m = 0; float32 ``[B, 1]`` if rows differ.

    The largest log-weight, rate * size, must be finite in float32, because infinite ones would be ordered by index
    only.
    """
    ratio, half, most = routine.half_life_ratio, math.log(2.0), torch.finfo(torch.float32).max
    if start is None or routine.block_size is not None:
        size = routine.block_size or L
        return min(half / (ratio * size), most / size)
    sizes = (L - start.clamp(0, L)).clamp(min=1).to(torch.float64)[:, None]
    # Torch divides a number by a tensor as a product with the reciprocal, which has other roundings.
    bounds = (torch.full_like(sizes, number) for number in (half, most))
    rates = torch.minimum(*(bound / by for bound, by in zip(bounds, (sizes * ratio, sizes), strict=True)))
    return rates.to(torch.float32)


def segment_numbers(segment_ids: Tensor, start: Tensor | None) -> Tensor:
    """Return the number of the segment of each position, in the order in which they begin, int64 ``[B, L]``; -1: none.

    A number depends on which ids of a row are equal, and not on their values.
    """
    column = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    inside = segment_ids >= 0
    if start is not None:
        inside &= column >= start[:, None]
    signed = segment_ids.to(torch.promote_types(segment_ids.dtype, torch.int8))  # -1 is 255 in uint8
    ids, order = torch.where(inside, signed, -1).sort(dim=1, stable=True)
    opens = torch.ones_like(inside)
    opens[:, 1:] = ids[:, 1:] != ids[:, :-1]
    opener = order.gather(1, torch.where(opens, column, 0).cummax(1).values)  # first column of the segment, sorted
    begins = torch.zeros_like(inside).scatter(1, order, opens) & inside
    number = torch.empty_like(order).scatter(1, order, (begins.cumsum(1) - 1).gather(1, opener))
    return torch.where(inside, number, -1).contiguous()  # the kernel takes no strides


@opaque("mix_tokens", lambda *args: _specs(*args)[:2])
def mix_tokens(
    input_ids: Tensor, loss_mask: Tensor, mask_prob: Tensor, uniform_prob: Tensor, seed: Tensor, start: Tensor | None,
    mix: Mix, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Replace positions by MASK or by another token; see :func:`dllm_kernels.corruption.corrupt_mix`."""
    mask_token_id, vocab_size, check = mix
    check_start_range(start, input_ids.shape[1])
    if input_ids.numel() == 0:
        return _empty_result(input_ids, backend)[:2]
    if check or input_ids.is_cpu:
        _check_sum(mask_prob, uniform_prob)
    if use_triton(backend, input_ids):
        from dllm_kernels.backends.triton.corruption import mix_tokens as kernel

        return kernel(input_ids, loss_mask, mask_token_id, vocab_size, mask_prob, uniform_prob, seed, start)
    grid = Grid.of(input_ids, None)

    def body(rows: BatchRows) -> CorruptionResult:
        p, q = (rows_of(prob, rows) for prob in (mask_prob, uniform_prob))
        absorbed, changed = _rules.channels(p, q, rows.draws)
        other = _rules.other_token(rows.words, rows.ids, mask_token_id, vocab_size)
        chosen = absorbed | (changed & (rows.ids != mask_token_id))
        return CorruptionResult(chosen, other - (other - mask_token_id) * absorbed, None)

    padding = None if start is None else Padding(start, grid.L)
    return _corrupt(input_ids, loss_mask, seed, padding, grid, Layout(1, grid.L, whole_words=True), body, 1)[:2]


@opaque("complement", lambda noise_mask, *_: [(noise_mask.shape, torch.bool)])
def complement(noise_mask: Tensor, loss_mask: Tensor, backend: str) -> tuple[Tensor]:
    """Select the other supervised positions; see :func:`dllm_kernels.corruption.complementary`."""
    if use_triton(backend, noise_mask):
        from dllm_kernels.backends.triton.corruption import complement as kernel

        return (kernel(noise_mask, loss_mask),)
    return ((loss_mask != 0) & (noise_mask == 0),)


@opaque("sample_level", lambda _, B, *others: [((B,), torch.float32)])
def sample_level(seed: Tensor, B: int, method: str, low: float, high: float, backend: str) -> tuple[Tensor]:
    """Sample one level per row; see :func:`dllm_kernels.corruption.sample_level`."""
    if use_triton(backend, seed):
        from dllm_kernels.backends.triton.corruption import sample_level as kernel

        return (kernel(seed, B, method, low, high),)
    host, layout = on_host(seed), Layout(1, 0)
    draws: Array = (_philox.bits_on_host(seed, range(B), layout) if host else _philox.random_bits(seed, B, layout))[0]
    row: Array = np.arange(B) if host else torch.arange(B, device=seed.device)
    level = _rules.scaled(_rules.coupled(_rules.uniform(draws)[:, 0], row, method), low, high)
    return (level if isinstance(level, Tensor) else torch.from_numpy(level),)


def _empty_result(input_ids: Tensor, backend: str) -> Corrupted:
    use_triton(backend, input_ids)  # raises if the backend is invalid
    p_mask = torch.empty(input_ids.shape, dtype=torch.float32, device=input_ids.device)
    return input_ids.clone(), torch.empty_like(p_mask, dtype=torch.bool), p_mask


def check_level(level: Tensor | None) -> None:
    """Raise if a level lies outside [0, 1]. Not checked on a GPU, because reading it would be a host sync."""
    if level is not None and level.is_cpu:
        values = level.numpy()
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"level must lie in [0, 1], got values from {values.min()} to {values.max()}")


def _check_sum(mask_prob: Tensor, uniform_prob: Tensor) -> None:
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


#: Smallest accepted probability, because rounding, as in 1 - p, can make a probability of 0 slightly negative.
LEAST = -1e-5


def rows_of(tensor: Tensor, rows: BatchRows) -> Array:
    """Slice a tensor with one entry per row of the batch; as a NumPy array if ``rows`` holds NumPy arrays."""
    return (tensor if isinstance(rows.draws, Tensor) else tensor.numpy())[rows.part]


def _topk_of_blocks(
    grid: Grid, draws: Array, level: Array, rate: float | Array, at_least: int, row_length: Array | None
) -> Array:
    """Select the k positions of each block, bool ``[rows, L]``.

    ``rate`` and ``row_length``, the number of columns before the padding of a row, may be ``[rows, 1]``.
    """
    lengths, host = grid.lengths, not isinstance(draws, Tensor)
    place: Array = np.arange(grid.size) if host else torch.arange(grid.size, device=draws.device)
    if level.shape[1] < grid.blocks:
        level = level.repeat(grid.blocks, axis=1) if host else level.expand(-1, grid.blocks)
    first: Array = np.arange(grid.blocks) if host else torch.arange(grid.blocks, device=draws.device)
    length = ((grid.L if row_length is None else row_length) - first * grid.size).clip(0, grid.size)
    k = _rules.number_to_mask(level, length, at_least).reshape(-1)
    slope = rate if isinstance(rate, float) else rate[..., None]
    log_w = _rules.log_weights(level[..., None], slope, _rules.float32(place))
    # The draws of missing positions are set to 0, so u = 2^-33. Its Gumbel noise, -3.2, is the smallest, and -16 puts
    # it below all scores.
    if not grid.even:
        log_w[:, -1, lengths[-1] :] = -16.0
        missing = grid.size - lengths[-1]
        draws = np.pad(draws, ((0, 0), (0, missing))) if host else F.pad(draws, (0, missing))
    if row_length is not None:
        inside = place < length[..., None]
        where, lowest = (np.where, np.float32(-16.0)) if host else (torch.where, -16.0)
        log_w, draws = where(inside, log_w, lowest), where(inside.reshape(draws.shape), draws, 0)
    log_w = log_w.reshape(-1, grid.size)
    chosen: Array
    if host:
        largest = rate * grid.size if isinstance(rate, float) else float((rate * row_length).max())
        chosen = _topk.select_of_draws(log_w, draws, k, largest)
    else:
        chosen = _topk.select_exact(log_w, _rules.fine_uniform(draws).view(-1, grid.size), k)
    return chosen.reshape(len(level), -1)[:, : grid.L]


def _corrupt(
    input_ids: Tensor, loss_mask: Tensor | None, seed: Tensor | None, padding: Padding | None, grid: Grid,
    layout: Layout, body: Body, times: int,
) -> Corrupted:  # fmt: skip
    """Draw if there is a seed, run the body on all rows, and write the outputs; for ``times`` see ``host_slices``."""
    if padding is not None:
        real = padding.real
        left_mask = real if loss_mask is None else padding.to_left(loss_mask != 0) & real
        left = _corrupt(padding.to_left(input_ids), left_mask, seed, None, grid, layout, body, times)
        p_mask = left[2] if grid.blocks == 1 else left[2].masked_fill(~real, 1.0)
        return padding.back(left[0]), padding.back(left[1]), padding.back(p_mask)
    if on_host(input_ids):
        return _corrupt_on_host(input_ids, loss_mask, seed, grid, layout, body, times)
    bits = (None, None, None) if seed is None else _philox.random_bits(seed, grid.B, layout)
    supervised = None if loss_mask is None else loss_mask != 0
    chosen, token, level = body(BatchRows(slice(None), input_ids, supervised, *bits))
    noise = chosen if supervised is None else chosen & supervised
    p_mask = torch.ones(input_ids.shape, dtype=torch.float32, device=input_ids.device)
    if level is not None:
        grid.fold(p_mask)[...] = grid.expand_to_positions(level)
    new = token.to(input_ids.dtype) if isinstance(token, Tensor) else token
    return torch.where(noise, new, input_ids), noise.contiguous(), p_mask


def _corrupt_on_host(
    input_ids: Tensor, loss_mask: Tensor | None, seed: Tensor | None, grid: Grid, layout: Layout, body: Body, times: int
) -> Corrupted:
    """Draw, run the body and write the outputs, one of the ``host_slices`` at a time."""
    ids = input_ids.numpy()
    supervised = None if loss_mask is None else (loss_mask if loss_mask.dtype == torch.bool else loss_mask != 0).numpy()
    noisy, noise, p_mask = (np.empty(ids.shape, dtype) for dtype in (ids.dtype, np.bool_, np.float32))
    for rows in _topk.host_slices(grid.B, grid.L, times):
        part = slice(rows.start, rows.stop)
        bits = (None, None, None) if seed is None else _philox.bits_on_host(seed, rows, layout)
        where = None if supervised is None else supervised[part]
        chosen, token, level = body(BatchRows(part, ids[part], where, *bits))
        np.logical_and(chosen, True if where is None else where, out=noise[part])
        _write_tokens(ids[part], noise[part], token, out=noisy[part])
        grid.fold(p_mask[part])[...] = 1.0 if level is None else grid.expand_to_positions(level)
    return torch.from_numpy(noisy), torch.from_numpy(noise), torch.from_numpy(p_mask)


def _write_tokens(ids: Array, noise: Array, token: Array | int, out: Array) -> None:
    """Write ``where(noise, token, ids)``, computed as ``ids + noise * (token - ids)``; an overflow wraps back.

    ``numpy.where`` and ``torch.where`` branch at every position, which takes six times as long for a random mask.
    """
    np.subtract(token, ids, out=out, dtype=ids.dtype, casting="unsafe")
    np.multiply(out, noise, out=out)
    np.add(out, ids, out=out)
