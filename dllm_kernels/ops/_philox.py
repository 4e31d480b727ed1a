r"""The counter-based random bits of every corruption routine: Philox 4x32-10, and who gets which word.

One call maps a 128-bit counter and a 64-bit key to four 32-bit words (J. K. Salmon, M. A. Moraes, R. O. Dror,
D. E. Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3; ten rounds).

**Layout.** It is part of the package's promise: a stored seed means the same mask in every later version.

========  ==========================================================================================
key       the int64 seed: word 0 its low, word 1 its high 32 bits
counter   ``(column // 4, block, row, stream)``, each an unsigned 32-bit word, word 0 first
output    word ``column % 4`` of the four belongs to ``column``
========  ==========================================================================================

``row``: with ``seeds`` given, one a row, every row is row 0 under its own seed, so that it depends on nothing
but that seed; with a generator one seed is drawn for the call and row b is row b under it. ``block``: 0 where
there are no blocks. ``column``: the position inside the block (SELECT and both TOKEN streams), or the block's
number (LEVEL, whose own block is 0).

==============  ==================================================================================
stream          what it draws
==============  ==================================================================================
0 SELECT        which positions: the coin of a position, or the uniform behind its Gumbel noise
1 LEVEL         the level (t or m) of a sequence or block
2 TOKEN_HIGH    high 32 bits from which a replacement token is made
3 TOKEN_LOW     low 32 bits of the same
==============  ==================================================================================

**From bits to numbers**, all exact in the type named, so that every device agrees:

* coins and levels: ``u = (2 (bits >> 9) + 1) 2^-24`` in float32, 2^23 values strictly inside (0, 1);
* Gumbel noise: ``u = (2 bits + 1) 2^-33`` in float64, 2^32 values strictly inside (0, 1), fine enough that two
  of 131,072 positions hardly ever tie;
* tokens: ``floor((high 2^32 + low) vocab_size / 2^64)``, in integers. No token is likelier than another by more
  than a factor of ``1 + vocab_size 2^-64``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

STREAM_SELECT, STREAM_LEVEL, STREAM_TOKEN_HIGH, STREAM_TOKEN_LOW = range(4)

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox 4x32-10 of broadcastable int64 tensors that hold 32-bit words.

    Args:
        counter: the four counter words.
        key: the two key words.

    Returns:
        The four output words, int64 in [0, 2^32), in the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products pass 2^63 and wrap; their bits are right, and the mask drops the copies of the sign.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((product1 >> 32) ^ c1 ^ k0) & _MASK32, product1 & _MASK32
        c2, c3 = ((product0 >> 32) ^ c3 ^ k1) & _MASK32, product0 & _MASK32
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


class Draw(NamedTuple):
    """One stream's words for every block and column of a row."""

    stream: int
    blocks: int
    columns: int


def random_bits(seed: torch.Tensor, rows: int, *draws: Draw) -> list[torch.Tensor]:
    """The words that the layout above gives to a batch.

    Args:
        seed: int64 on the device of the results: 0-d, shared by the rows, or ``[rows]``, one each.
        rows: rows of the batch.
        draws: what to draw.

    Returns:
        For each draw int64 ``[rows, blocks, columns]``, values in [0, 2^32).
    """
    if torch.compiler.is_compiling():
        from dllm_kernels.ops._compiled_philox import _random_bits_op

        return [_random_bits_op(seed, rows, *draw) for draw in draws]
    return [words(seed, rows, draw) for draw in draws]


def uniform_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Coins and levels: ``(2 (bits >> 9) + 1) 2^-24``, float32, exact, strictly inside (0, 1)."""
    return ((bits >> 8) | 1).to(torch.float32) * 2.0**-24


def fine_uniform_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Gumbel noise: ``(2 bits + 1) 2^-33``, float64, exact, strictly inside (0, 1)."""
    return (bits.to(torch.float64) + 0.5) * 2.0**-32


def token_from_bits(high: torch.Tensor, low: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """``floor((high 2^32 + low) vocab_size / 2^64)``, int64; exact for ``vocab_size <= 2^31``."""
    return (high * vocab_size + ((low * vocab_size) >> 32)) >> 32


def resolve_seed(
    device: torch.device, rows: int, generator: torch.Generator | None, seeds: torch.Tensor | None
) -> torch.Tensor:
    """The seed tensor of one call, without a host sync.

    Args:
        device: where the call's tensors live.
        rows: rows of the batch.
        generator: what to draw one seed from; None is the device's default generator. One on the CPU serves
            tensors anywhere: the seed is then drawn there, so that its state gives the same mask on every device.
        seeds: int64 ``[rows]`` instead, one a row.

    Returns:
        int64 on ``device``: ``seeds`` itself, or a fresh 0-d seed.

    Raises:
        TypeError: ``generator`` or ``seeds`` of another type.
        ValueError: both given, ``seeds`` of another shape, dtype or device, a generator on another GPU.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    if seeds is not None:
        if generator is not None:
            raise ValueError("generator and seeds exclude each other: expected one of them, got both")
        return _checked_seeds(seeds, rows, device)
    source = device if generator is None else generator.device
    if source.type != "cpu" and not _same_device(source, device):
        allowed = "cpu" if device.type == "cpu" else f"cpu or on {device}"
        raise ValueError(f"generator must be on {allowed} like the tensors, got one on {source}")
    # The whole int64 range but its last value, which randint's open upper end cannot name.
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=source, generator=generator)
    return seed.to(device, non_blocking=True)


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (a.index is None or b.index is None or a.index == b.index)


def _checked_seeds(seeds: torch.Tensor, rows: int, device: torch.device) -> torch.Tensor:
    if not isinstance(seeds, torch.Tensor):
        raise TypeError(f"seeds must be a torch.Tensor, got {type(seeds).__name__}")
    if seeds.dtype != torch.int64:
        raise ValueError(f"seeds must have dtype int64, got {str(seeds.dtype).removeprefix('torch.')}")
    if tuple(seeds.shape) != (rows,):
        raise ValueError(f"seeds must have shape {(rows,)}, one a row, got {tuple(seeds.shape)}")
    if seeds.device != device:
        raise ValueError(f"seeds must be on {device} like the tensors, got {seeds.device}")
    return seeds.contiguous()


def words(seed: torch.Tensor, rows: int, draw: Draw) -> torch.Tensor:
    """``random_bits`` of one draw, in torch."""
    groups = -(-draw.columns // 4)
    key = seed.view(-1, 1, 1)
    counter = (
        torch.arange(groups, device=seed.device).view(1, 1, -1),
        torch.arange(draw.blocks, device=seed.device).view(1, -1, 1),
        torch.arange(rows, device=seed.device).view(-1, 1, 1) * int(seed.dim() == 0),
        torch.full((1, 1, 1), draw.stream, device=seed.device),
    )
    four = philox4x32(counter, (key & _MASK32, (key >> 32) & _MASK32))
    shape = (rows, draw.blocks, groups)
    stacked = torch.stack([word.expand(shape) for word in four], dim=-1)
    return stacked.view(rows, draw.blocks, 4 * groups)[..., : draw.columns]


# 0-d arrays: a numpy scalar would be converted anew by every call, which costs as much as a short call itself.
_HALF, _LOW, _M0, _M1, _W0, _W1 = (
    np.array(value, np.uint64) for value in (32, _MASK32, *_MULTIPLIERS, *(weyl << 32 for weyl in _WEYL))
)

_Array = npt.NDArray[np.uint64]


def words_on_host(seed: _Array, rows: range, draws: Sequence[Draw]) -> list[_Array]:
    """``random_bits`` in numpy, several times as fast as in torch: uint64 ``[rows, blocks, 4 ceil(columns / 4)]``.

    Two words share a uint64, the first in the high half: x = (c0, c1) and y = (c2, c3). A round is then

        x, y = m1 (y >> 32) ^ (x << 32) ^ k0,   m0 (x >> 32) ^ (y << 32) ^ k1

    with the key words in the high halves, where their sums wrap by themselves. The states of all draws lie side by
    side, so that a round is ten numpy calls however many streams are drawn.
    """
    shapes = [(len(rows), draw.blocks, -(-draw.columns // 4)) for draw in draws]
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    x, y = np.empty(ends[-1], np.uint64), np.empty(ends[-1], np.uint64)
    parts = [slice(end - math.prod(shape), end) for end, shape in zip(ends, shapes, strict=True)]
    shared = seed.ndim == 0
    row = np.arange(rows.start, rows.stop, dtype=np.uint64) if shared else np.zeros(1, np.uint64)
    k0, k1 = seed << _HALF, seed >> _HALF << _HALF
    for draw, shape, part in zip(draws, shapes, parts, strict=True):
        _first_two_rounds(draw, row, k0, k1, x[part].reshape(shape), y[part].reshape(shape))
    if not shared:
        k0, k1 = (np.concatenate([np.repeat(k, math.prod(shape[1:])) for shape in shapes]) for k in (k0, k1))
    _last_eight_rounds(x, y, k0 + _W0, k1 + _W1)
    return [_unpack(x[part].reshape(shape), y[part].reshape(shape)) for shape, part in zip(shapes, parts, strict=True)]


def _first_two_rounds(draw: Draw, row: _Array, k0: _Array, k1: _Array, x: _Array, y: _Array) -> None:
    """Two rounds from the counter into x and y; until then most words are equal along whole rows or columns."""
    k0, k1 = k0.reshape(-1, 1, 1), k1.reshape(-1, 1, 1)
    block = np.arange(draw.blocks, dtype=np.uint64)[:, None]
    group = np.arange(x.shape[-1], dtype=np.uint64)
    x1 = row[:, None, None] * _M1 ^ block << _HALF ^ k0
    y1 = group * _M0 ^ np.uint64(draw.stream << 32) ^ k1
    np.bitwise_xor((y1 >> _HALF) * _M1, x1 << _HALF ^ k0 + _W0, x)
    np.bitwise_xor((x1 >> _HALF) * _M0, y1 << _HALF ^ k1 + _W1, y)


def _last_eight_rounds(x: _Array, y: _Array, k0: _Array, k1: _Array) -> None:
    product0, product1 = np.empty_like(x), np.empty_like(y)
    for _ in range(_ROUNDS - 2):
        k0, k1 = np.add(k0, _W0), np.add(k1, _W1)
        np.multiply(np.right_shift(x, _HALF, product0), _M0, product0)
        np.multiply(np.right_shift(y, _HALF, product1), _M1, product1)
        np.bitwise_xor(np.bitwise_xor(np.left_shift(x, _HALF, x), product1, x), k0, x)
        np.bitwise_xor(np.bitwise_xor(np.left_shift(y, _HALF, y), product0, y), k1, y)


def _unpack(x: _Array, y: _Array) -> _Array:
    rows, blocks, groups = x.shape
    words = np.empty((rows, blocks, groups, 4), np.uint64)
    np.right_shift(x, _HALF, words[..., 0])
    np.bitwise_and(x, _LOW, words[..., 1])
    np.right_shift(y, _HALF, words[..., 2])
    np.bitwise_and(y, _LOW, words[..., 3])
    return words.reshape(rows, blocks, 4 * groups)
