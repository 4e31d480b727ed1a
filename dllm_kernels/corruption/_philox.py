r"""Counter-based random bits of all corruption routines: Philox 4x64-10, and the layout of its words.

One call maps a 256-bit counter and a 128-bit key to four 64-bit words (J. K. Salmon, M. A. Moraes, R. O. Dror, D. E.
Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3; ten rounds). The words are equal to
``numpy.random.Philox(key=..., counter=...).random_raw()``, a stream that NumPy promises never to change. On the CPU,
NumPy draws them. NumPy increments the counter before it draws: its ``counter`` is one less than that of its first
words.

**Layout.** The layout is guaranteed: a stored seed gives the same mask in every later version.

========  ==========================================================================================
key       ``(seed, 0)``: the int64 seed as an unsigned word
counter   ``(2^32 + row * stride + (d >> 3), 0, 0, 0)`` holds eight 32-bit draws d
draw      the low (d even) or the high half (d odd) of word ``(d & 7) >> 1`` of the four
========  ==========================================================================================

``row``: if ``seeds`` are given, one per row, every row is row 0 under its own seed, so that it depends on that seed
alone. With a generator, one seed is drawn for the call, and row b of the batch is row b under it. ``d`` is the number
of a draw within its row, negative for levels:

=======================  =====================================================================================
d = -1 - j               level (t or m) of block j, or of the row if there are no blocks
d = i                    position i of the row, if the routine takes one draw per position: the coin, or the
                         uniform of the Gumbel noise
d = 2i and 2i + 1        position i, if the routine takes a whole word: 23 bits for the coin, 41 for a token
=======================  =====================================================================================

With ``start``, positions are counted from the first column that is not left padding. Segments use the levels of blocks
of one position, segment j that of block j.

``stride`` is the number of counters of a row, ``ceil(levels / 8) + ceil(draws of its positions / 8)``. The draws of a
batch are therefore contiguous in the stream. ``gumbel_topk_mask`` draws no levels.

The noise of a row of logits (``linear_sample``) has 48 bits per column v, whatever the number of columns. The high 16
bits rule out most columns:

========  ===================================================================================
high      16 bits, quarter ``v & 3`` from the low end of word ``(v >> 2) & 3`` of the counter
          ``(2^32 + (v >> 4), 1, row, 0)``
low       32 bits, half ``v & 1`` of word ``(v >> 1) & 3`` of the counter
          ``(2^32 + (v >> 3), 2, row, 0)``
========  ===================================================================================

**Child seeds.** A row may need several independent masks, such as the views of a policy gradient. Each mask uses a
child of the row's seed in place of the seed. Child j is word j of ``numpy.random.Philox(key=(seed, 1)).random_raw()``,
as an int64. It does not depend on the number of children. The second word of the key is 1 for child seeds and 0 for
draws, so that no word is used for both.

**From bits to numbers.** All conversions are exact in the dtype named, so that all devices agree:

* coins and levels: ``u = (2 q + 1) 2^-24`` in float32 with q the high 23 bits of the draw or word, 2^23 values strictly
  inside (0, 1);
* Gumbel noise: ``u = (2 draw + 1) 2^-33`` in float64, 2^32 values strictly inside (0, 1), fine enough that two
  of 131,072 positions hardly ever tie;
* noise of logits: ``u = (2 (high 2^32 + low) + 1) 2^-49`` in float64;
* tokens: ``floor(r n / 2^41)`` with r the low 41 bits of the word, for one of n tokens. The probabilities of two tokens
  differ by at most a factor of ``1 + n 2^-41``.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dllm_kernels._graph._opaque import opaque

COIN_BITS, TOKEN_BITS = 23, 41
# Counter of draw 0 of row 0. The levels of row 0, up to 2^35 of them, have smaller counters.
ZERO = 1 << 32
MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10
_CHILDREN = 1  # second key word of child seeds
_Array = np.ndarray[Any, Any]
Words = tuple[Any, Any, Any, Any]


class Layout(NamedTuple):
    """Draws of a row: one per level, and one draw or one whole word per position."""

    levels: int
    positions: int
    whole_words: bool = False

    @property
    def before(self) -> int:
        """Number of counters of the levels of a row."""
        return -(-self.levels // 8)

    @property
    def stride(self) -> int:
        """Number of counters of a row."""
        return self.before + -(-self.positions // (4 if self.whole_words else 8))


def philox4x64(counter: Words, key: tuple[Any, Any]) -> Words:
    """Compute Philox 4x64-10 of four counter words and two key words, broadcastable int64 tensors or arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _signed(WEYL[0]), k1 + _signed(WEYL[1])
    return c0, c1, c2, c3


def _product(a: Any, m: int) -> tuple[Any, Any]:
    """Return the high and the low word of an unsigned product; signed products of 32-bit halves wrap to its bits."""
    a1, a0, m1, m0 = _high(a), a & MASK32, m >> 32, m & MASK32
    middle = a1 * m0 + _high(a0 * m0)
    carry = a0 * m1 + (middle & MASK32)
    return a1 * m1 + _high(middle) + _high(carry), a * _signed(m)


def _high(a: Any) -> Any:
    return (a >> 32) & MASK32


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)


def random_bits(seed: Tensor, rows: int, layout: Layout) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw the bits of a batch in the layout above, under an int64 seed: 0-d if shared, or ``[rows]``.

    Returns:
        (draws of the levels ``[rows, levels]``, draws of the positions ``[rows, positions]``, words or None), int64.
        Draws lie in [0, 2^32). With ``whole_words`` the words of the positions are returned too, and the draws of the
        positions are their high halves.
    """
    shared = seed.dim() == 0
    row = torch.arange(rows, device=seed.device)[:, None] * int(shared)
    counter = ZERO - layout.before + row * layout.stride + torch.arange(layout.stride, device=seed.device)
    zero = torch.zeros_like(counter)
    words = torch.stack(philox4x64((counter, zero, zero, zero), (seed.view(-1, 1), zero)), dim=-1)
    draws = torch.stack([words & MASK32, _high(words)], dim=-1).flatten(1)
    levels = draws[:, : 8 * layout.before].flip(1)[:, : layout.levels]
    if layout.whole_words:
        whole = words.flatten(1)[:, 4 * layout.before :][:, : layout.positions]
        return levels, _high(whole), whole
    return levels, draws[:, 8 * layout.before :][:, : layout.positions], None


_local = threading.local()


def words_from(seed: int, counter: int, stream: int = 0, family: int = 0, number: int = 0) -> Any:
    """Set this thread's NumPy generator to begin at a counter; five times as fast as constructing a generator."""
    try:
        philox = _local.philox
    except AttributeError:
        philox = _local.philox = np.random.Philox(0)
    state = {"counter": (counter - 1, stream, number, 0), "key": (seed & _MASK64, family)}
    unused = {"buffer": (0, 0, 0, 0), "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}
    philox.state = {"bit_generator": "Philox", "state": state, **unused}
    return philox


def bits_on_host(seed: Tensor, rows: range, layout: Layout) -> tuple[_Array, _Array, _Array | None]:
    """Compute ``random_bits`` of some rows with NumPy: uint32 draws, int64 words.

    With ``whole_words`` the draws of the positions are the words as uint64, because a coin is the high bits of either.
    """
    before, stride = layout.before, layout.stride
    if seed.dim() == 0:
        first = ZERO - before + rows.start * stride
        words = words_from(int(seed.item()), first).random_raw((len(rows), 4 * stride))
    else:
        words = np.empty((len(rows), 4 * stride), np.uint64)
        for row, key in zip(words, seed[rows.start : rows.stop].tolist(), strict=True):
            row[:] = words_from(key, ZERO - before).random_raw(4 * stride)
    draws = words.view(np.uint32)  # the low half first, because all platforms of torch are little-endian
    levels = draws[:, : 8 * before][:, ::-1][:, : layout.levels]
    if layout.whole_words:
        whole = words[:, 4 * before : 4 * before + layout.positions]
        return levels, whole, whole.view(np.int64)
    return levels, draws[:, 8 * before : 8 * before + layout.positions], None


def child_seeds(seeds: Tensor, count: int) -> Tensor:
    """Derive ``count`` child seeds of each of the int64 ``seeds [B]``, int64 ``[B, count]``; see the module."""
    (children,) = _child_seeds(seeds, count)
    return children  # type: ignore[no-any-return]


@opaque("child_seeds", lambda seeds, count: [((seeds.shape[0], count), torch.int64)])
def _child_seeds(seeds: Tensor, count: int) -> Any:
    if seeds.is_cpu:
        words = np.empty((len(seeds), count), np.uint64)
        for row, key in zip(words, seeds.tolist(), strict=True):
            row[:] = words_from(key, 1, family=_CHILDREN).random_raw(count)
        return (torch.from_numpy(words.view(np.int64)),)
    return (_child_seeds_torch(seeds, count),)


def _child_seeds_torch(seeds: Tensor, count: int) -> Tensor:
    counter = 1 + torch.arange(-(-count // 4), device=seeds.device)
    zero = torch.zeros_like(counter)
    words = philox4x64((counter, zero, zero, zero), (seeds.view(-1, 1), zero + _CHILDREN))
    return torch.stack(words, dim=-1).flatten(1)[:, :count].contiguous()
