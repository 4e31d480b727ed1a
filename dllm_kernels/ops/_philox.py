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

import numpy as np
import torch

STREAM_SELECT, STREAM_LEVEL, STREAM_TOKEN_HIGH, STREAM_TOKEN_LOW = range(4)

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# Counters worked on at a time: measured best of 2^14, 2^15 and 2^16 on an EPYC 7003.
_CHUNK = 1 << 15

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


def random_bits(
    seed: torch.Tensor, stream: int, rows: int, blocks: int, columns: int, device: torch.device
) -> torch.Tensor:
    """The words that the layout above gives to a grid of rows, blocks and columns.

    Args:
        seed: int64 on ``device``: 0-d, shared by the rows, or ``[rows]``, one each.
        stream: one of the ``STREAM_*``.
        rows: rows.
        blocks: blocks of a row.
        columns: columns of a block.
        device: where the result lives.

    Returns:
        int64 ``[rows, blocks, columns]``, values in [0, 2^32).
    """
    groups = -(-columns // 4)
    if device.type == "cpu" and not torch.compiler.is_compiling():
        words = torch.from_numpy(_grid_numpy(seed.numpy().view(np.uint64), stream, rows, blocks, groups))
    else:
        words = _grid_torch(seed, stream, rows, blocks, groups, device)
    return words.view(rows, blocks, 4 * groups)[..., :columns]


def uniform_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Coins and levels: ``(2 (bits >> 9) + 1) 2^-24``, float32, exact, strictly inside (0, 1)."""
    return ((bits >> 9) * 2 + 1).to(torch.float32) * 2.0**-24


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
        raise ValueError(f"generator must be on cpu or on {device} like the tensors, got one on {source}")
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


def _grid_torch(
    seed: torch.Tensor, stream: int, rows: int, blocks: int, groups: int, device: torch.device
) -> torch.Tensor:
    shared = seed.dim() == 0
    key = seed.view(-1, 1, 1)
    row = torch.arange(rows, device=device).view(-1, 1, 1) * int(shared)
    counter = (
        torch.arange(groups, device=device).view(1, 1, -1),
        torch.arange(blocks, device=device).view(1, -1, 1),
        row,
        torch.full((1, 1, 1), stream, device=device),
    )
    words = philox4x32(counter, (key & _MASK32, (key >> 32) & _MASK32))
    return torch.stack([word.expand(rows, blocks, groups) for word in words], dim=-1)


def _grid_numpy(
    seed: np.typing.NDArray[np.uint64], stream: int, rows: int, blocks: int, groups: int
) -> np.typing.NDArray[np.int64]:
    """``_grid_torch`` on the host, several times as fast: a slice of [rows * blocks] at a time, in place."""
    out = np.empty((rows * blocks, groups, 4), np.uint64)
    row, block = np.divmod(np.arange(rows * blocks, dtype=np.uint64)[:, None], np.uint64(max(blocks, 1)))
    group = np.arange(groups, dtype=np.uint64)[None, :]
    step = max(1, _CHUNK // max(groups, 1))
    for start in range(0, rows * blocks, step):
        part = slice(start, start + step)
        if seed.ndim == 0:
            _philox_numpy(group, block[part], row[part], stream, seed.reshape(1, 1), out[part])
        else:
            key = np.repeat(seed[row[part].astype(np.int64)], groups, axis=1)
            _philox_numpy(group, block[part], np.zeros_like(row[part]), stream, key, out[part])
    return out.view(np.int64)


def _philox_numpy(
    c0: np.typing.NDArray[np.uint64],
    c1: np.typing.NDArray[np.uint64],
    c2: np.typing.NDArray[np.uint64],
    stream: int,
    key: np.typing.NDArray[np.uint64],
    out: np.typing.NDArray[np.uint64],
) -> None:
    """Philox with two words to a uint64: x = (c0, c1) and y = (c2, c3), the first of each in the high half.

    A round is then ``x, y = m1 (y >> 32) ^ (x << 32) ^ k0,  m0 (x >> 32) ^ (y << 32) ^ k1`` with the key words in
    the high halves, where their sums wrap by themselves. Round 1 stays in the broadcast shapes.
    """
    half = np.uint64(32)
    m0, m1 = (np.uint64(m) for m in _MULTIPLIERS)
    weyl0, weyl1 = (np.uint64(w << 32) for w in _WEYL)
    k0, k1 = key << half, key & np.uint64(_MASK32 << 32)
    x = c2 * m1 ^ (c1 << half) ^ k0
    y = c0 * m0 ^ np.uint64(stream << 32) ^ k1
    k0, k1 = k0 + weyl0, k1 + weyl1
    x, y = (y >> half) * m1 ^ (x << half) ^ k0, (x >> half) * m0 ^ (y << half) ^ k1
    product0, product1 = np.empty_like(x), np.empty_like(y)
    for _ in range(_ROUNDS - 2):
        k0 += weyl0
        k1 += weyl1
        np.multiply(np.right_shift(x, half, out=product0), m0, out=product0)
        np.multiply(np.right_shift(y, half, out=product1), m1, out=product1)
        np.left_shift(x, half, out=x)
        np.left_shift(y, half, out=y)
        x ^= product1
        y ^= product0
        x ^= k0
        y ^= k1
    low = np.uint64(_MASK32)
    np.right_shift(x, half, out=out[..., 0])
    np.bitwise_and(x, low, out=out[..., 1])
    np.right_shift(y, half, out=out[..., 2])
    np.bitwise_and(y, low, out=out[..., 3])
