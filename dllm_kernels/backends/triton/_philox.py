"""Philox 4x64-10 in registers; ``corruption/_philox.py`` defines the layout of keys, counters and draws."""

import triton
import triton.language as tl

from dllm_kernels.corruption._philox import MULTIPLIERS, ROUNDS, WEYL, ZERO

_ZERO, _ROUNDS = tl.constexpr(ZERO), tl.constexpr(ROUNDS)
_M0, _M1 = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)
_W0, _W1 = (tl.constexpr(increment) for increment in WEYL)


@triton.jit
def seed_and_row(seed_ptr, b, B, SHARED_SEED: tl.constexpr):
    """Return the seed of the rows b and their number under it: b for a shared seed, 0 for a seed per row."""
    if SHARED_SEED:
        return tl.load(seed_ptr), b
    else:
        return tl.load(seed_ptr + b, mask=b < B), b * 0


@triton.jit
def philox4x64(c0, c1, c2, c3, k0, k1):
    """Run ten rounds on uint64 counters of one shape, with keys of a broadcastable shape."""
    m0 = tl.full(c0.shape, _M0, tl.uint64)
    m1 = tl.full(c0.shape, _M1, tl.uint64)
    for _ in tl.static_range(_ROUNDS):
        high0 = tl.umulhi(c0, m0)
        high1 = tl.umulhi(c2, m1)
        low0 = c0 * m0
        low1 = c2 * m1
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = k0 + tl.full(k0.shape, _W0, tl.uint64)
        k1 = k1 + tl.full(k1.shape, _W1, tl.uint64)
    return c0, c1, c2, c3


@triton.jit
def counter_words(seed, number, counter, STREAM: tl.constexpr):
    """Compute the words of counters ``[n]``, counted from ``_ZERO``, uint64 ``[4 n]``, for a scalar seed and number."""
    low = (counter + _ZERO).to(tl.uint64)
    zero = tl.zeros_like(low)
    key = tl.zeros_like(low) + seed.to(tl.uint64)
    w0, w1, w2, w3 = philox4x64(low, zero + STREAM, zero + number.to(tl.uint64), zero, key, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [4 * counter.shape[0]])


@triton.jit
def halves(word):
    """Split words ``[n]`` into draws ``[2 n]``, uint32, the low half first."""
    return tl.reshape(tl.join(word, word >> 32).to(tl.uint32), [2 * word.shape[0]])


@triton.jit
def _counted(seed, row, stride, at):
    """Compute the four words of the counter that holds word ``at``, in the shape of ``at``."""
    counter = (row.to(tl.int64) * stride + (at >> 2) + _ZERO).to(tl.uint64)
    zero = tl.zeros_like(counter)
    key = seed.to(tl.uint64)
    return philox4x64(counter, zero, zero, zero, key, tl.full(key.shape, 0, tl.uint64))


@triton.jit
def _one_of(w0, w1, w2, w3, at):
    """Select word ``at & 3`` of the four."""
    return tl.where((at & 2) == 0, tl.where((at & 1) == 0, w0, w1), tl.where((at & 1) == 0, w2, w3))


@triton.jit
def words(seed, row, stride, start, SHARE: tl.constexpr, N: tl.constexpr):
    """Compute words start .. start + N - 1 of the rows, uint64 [R, N].

    Row and start are [R, 1], and seed is [R, 1] or a scalar. SHARE (1, 2 or 4) divides every start; it is the number of
    words that are taken from a counter at a time.
    """
    at = start.to(tl.int64) + (tl.arange(0, N // SHARE) * SHARE)[None, :]
    w0, w1, w2, w3 = _counted(seed, row, stride, at)
    if SHARE == 1:
        return _one_of(w0, w1, w2, w3, at)
    elif SHARE == 2:
        low = (at & 2) == 0
        return tl.reshape(tl.join(tl.where(low, w0, w2), tl.where(low, w1, w3)), [at.shape[0], N])
    else:
        return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [at.shape[0], N])


@triton.jit
def draws(seed, row, stride, start, SHARE: tl.constexpr, N: tl.constexpr):
    """Compute draws start .. start + N - 1 of the rows, uint32 [R, N]; see ``words``, with SHARE 1, 2, 4 or 8."""
    if SHARE == 1:
        d = start.to(tl.int64) + tl.arange(0, N)[None, :]
        return _half(_one_of_draw(seed, row, stride, d), d)
    else:
        pair = words(seed, row, stride, start >> 1, SHARE // 2, N // 2)
        low, high = _half(pair, tl.zeros_like(pair)), _half(pair, tl.full(pair.shape, 1, tl.uint64))
        return tl.reshape(tl.join(low, high), [pair.shape[0], N])


@triton.jit
def _one_of_draw(seed, row, stride, d):
    w0, w1, w2, w3 = _counted(seed, row, stride, d >> 1)
    return _one_of(w0, w1, w2, w3, d >> 1)


@triton.jit
def _half(word, d):
    return tl.where((d & 1) == 0, word, word >> 32).to(tl.uint32)


@triton.jit
def level_draws(seed, row, stride, block):
    """Draw each block's level, in the shape of the arguments."""
    d = -1 - block.to(tl.int64)
    return _half(_one_of_draw(seed, row, stride, d), d)


@triton.jit
def uniform(q):
    """Compute (2 q + 1) 2^-24 from the high 23 bits q of a draw or word, float32, exact."""
    return (2 * q + 1).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def fine_uniform(draw):
    """Compute (2 draw + 1) 2^-33, float64, exact."""
    return (draw.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def token_of(word, n):
    """Draw one of n tokens from the low 41 bits r of a word: floor(r n / 2^41), int64."""
    return tl.umulhi(word << 23, (tl.zeros_like(word) + n).to(tl.uint64)).to(tl.int64)
