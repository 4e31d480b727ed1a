"""Philox 4x32-10 in registers; ``ops/_philox.py`` holds the layout of the counters and the source."""

import triton
import triton.language as tl

SELECT = tl.constexpr(0)
LEVEL = tl.constexpr(1)
TOKEN_HIGH = tl.constexpr(2)
TOKEN_LOW = tl.constexpr(3)

_M0 = tl.constexpr(0xD2511F53)
_M1 = tl.constexpr(0xCD9E8D57)
_W0 = tl.constexpr(0x9E3779B9)
_W1 = tl.constexpr(0xBB67AE85)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds on uint32 tensors of broadcastable shapes; the first rounds stay in the smaller shapes."""
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, tl.full(c0.shape, _M0, tl.uint32))
        high1 = tl.umulhi(c2, tl.full(c2.shape, _M1, tl.uint32))
        low0 = c0 * _M0
        low1 = c2 * _M1
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = k0 + _W0
        k1 = k1 + _W1
    return c0, c1, c2, c3


@triton.jit
def _words(seed, row, block, group, STREAM: tl.constexpr):
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    stream = tl.full(group.shape, STREAM, tl.uint32)
    return philox4x32(group.to(tl.uint32), block.to(tl.uint32), row.to(tl.uint32), stream, k0, k1)


@triton.jit
def position_bits(seed, row, block, first, STREAM: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    """Words of the columns first .. first + BLOCK - 1 (both multiples of 4), uint32 [R, BLOCK].

    seed, row and block are [R, 1]. One counter serves four columns.
    """
    group = (first // 4 + tl.arange(0, BLOCK // 4))[None, :]
    w0, w1, w2, w3 = _words(seed, row, block, group, STREAM)
    w0, w1, w2, w3 = (
        tl.broadcast_to(w0, [R, BLOCK // 4]),
        tl.broadcast_to(w1, [R, BLOCK // 4]),
        tl.broadcast_to(w2, [R, BLOCK // 4]),
        tl.broadcast_to(w3, [R, BLOCK // 4]),
    )
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [R, BLOCK])


@triton.jit
def level_bits(seed, row, block):
    """The word of each block's level, in the shape of the arguments."""
    w0, w1, w2, w3 = _words(seed, row, tl.zeros_like(block), block // 4, LEVEL)
    place = block % 4
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@triton.jit
def uniform(bits):
    """(2 (bits >> 9) + 1) 2^-24, float32, exact."""
    return ((bits >> 8) | 1).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def fine_uniform(bits):
    """(2 bits + 1) 2^-33, float64, exact."""
    return (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
