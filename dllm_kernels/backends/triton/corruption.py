"""Corruption in one launch: ids and mask in; noisy ids, noise mask and probabilities out.

A program processes a tile [R blocks, BLOCK positions]. Block n of the batch is block n % blocks of row n // blocks.
With ``start``, the positions of a row begin at column ``start``, and the columns before it, which are left padding,
follow the last one (see ``_places``). Levels, coins and tokens are drawn in registers. The arithmetic is that of
``corruption/_rules.py``, rounded step by step; therefore the kernels are launched without contraction into fused
multiply-adds.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from dllm_kernels.backends.triton import _philox, _tiles
from dllm_kernels.backends.triton._aligned import all_multiples, multiple, rounded_up
from dllm_kernels.backends.triton._launch import alone_on_a_multiprocessor
from dllm_kernels.backends.triton._select import NEVER, chosen_of_tile, keys, score, threshold_in_memory, topk, widen
from dllm_kernels.corruption._rules import MOST

_INDEPENDENT = ("mask", "tokens", "all")  # kinds with independent positions
_EXACT = ("exact", "topk")  # kinds with an exact number of positions
# Not specialised on, because compiling a kernel per class of lengths would stall training with variable lengths.
SIZES = [
    "B", "L", "size", "stride", "token", "vocab_size", "stride_b", "mask_stride_b", "level_stride_b", "level_stride_n",
    "p_stride", "q_stride",
]  # fmt: skip
# Specialised on being 1 (integers) or None (pointers), but not on alignment.
ONES = [
    "blocks", "stride_l", "mask_stride_l", "seed_ptr", "level_ptr", "mask_prob_ptr", "uniform_prob_ptr", "start_ptr",
    "segment_ptr", "rate_ptr",
]  # fmt: skip
_MOST = tl.constexpr(MOST)


@triton.jit
def _level(levels, seed, row, b, block, B, stride, HAS_LEVEL: tl.constexpr):
    """Load or draw the level of each block; ``levels`` holds the pointer, two strides, eps and 1 - eps."""
    level_ptr, stride_b, stride_n, eps, one_minus_eps = levels
    if HAS_LEVEL:
        at = b.to(tl.int64) * stride_b + block.to(tl.int64) * stride_n  # of a column of a wide tensor, say
        return tl.load(level_ptr + at, mask=b < B)
    else:
        return _philox.uniform(_philox.level_draws(seed, row, stride, block) >> 9) * one_minus_eps + eps


@triton.jit
def _first_column(start_ptr, b, B, L):
    """Load the first column of the rows b that is not padding, clamped to [0, L]."""
    return tl.minimum(tl.maximum(tl.load(start_ptr + b, mask=b < B), 0), L).to(tl.int32)


@triton.jit
def _places(b, block, i, sizes, ALIGNED: tl.constexpr):
    """Return the columns of the positions i of the blocks within the rows b, and their mask.

    ``sizes`` holds B, L, the size of a block and the first column of each row or None. ``ALIGNED``: see ``multiple``.
    """
    B, L, size, start = sizes
    at = block * multiple(size, ALIGNED) + i
    inside = (b < B) & (i < multiple(size, ALIGNED)) & (at < multiple(L, ALIGNED))
    if start is not None:
        at = tl.where(at < L - start, at + start, at - (L - start))
    return at, inside


@triton.jit
def _length(block, sizes):
    """Return the number of positions of each block that are not padding."""
    _, L, size, start = sizes
    if start is None:
        return tl.minimum(size, L - block * size)
    else:
        return tl.minimum(size, tl.maximum(L - start - block * size, 0))


@triton.jit
def _read_as(batch, b, block, i, sizes, HAS_MASK: tl.constexpr, ALIGNED: tl.constexpr):
    ids_ptr, loss_mask_ptr, stride_b, stride_l, mask_stride_b, mask_stride_l = batch
    at, inside = _places(b, block, i, sizes, ALIGNED)
    b = b.to(tl.int64)  # b * L exceeds int32 if the batch has 2**31 positions
    at = at.to(tl.int64)
    ids = tl.load(ids_ptr + b * multiple(stride_b, ALIGNED) + at * stride_l, mask=inside)
    if sizes[3] is not None:
        inside = inside & (at >= sizes[3])  # padding is not supervised
    if HAS_MASK:
        places = loss_mask_ptr + b * multiple(mask_stride_b, ALIGNED) + at * mask_stride_l
        inside = inside & (tl.load(places, mask=inside) != 0)
    return ids, inside


@triton.jit
def _read(batch, b, block, i, sizes, HAS_MASK: tl.constexpr):
    """Load the ids and the mask of supervised positions; ``batch``: their pointers, and two strides of each."""
    if all_multiples(sizes[1], sizes[2], batch[2], batch[4]):
        ids, supervised = _read_as(batch, b, block, i, sizes, HAS_MASK, True)
    else:
        ids, supervised = _read_as(batch, b, block, i, sizes, HAS_MASK, False)
    return ids, supervised


@triton.jit
def _write_as(outputs, b, block, i, sizes, noisy, noise, p, ALIGNED: tl.constexpr):
    noisy_ptr, noise_ptr, p_ptr = outputs
    at, inside = _places(b, block, i, sizes, ALIGNED)
    out = b.to(tl.int64) * multiple(sizes[1], ALIGNED) + at.to(tl.int64)
    tl.store(noisy_ptr + out, noisy, mask=inside)
    tl.store(noise_ptr + out, noise, mask=inside)
    if p_ptr is not None:
        if sizes[3] is not None:
            p = tl.where((at >= sizes[3]) | (sizes[2] >= sizes[1]), p, 1.0)  # padding is in no block
        tl.store(p_ptr + out, p, mask=inside)


@triton.jit
def _write(outputs, b, block, i, sizes, ids, noise, token, p):
    """Write the token where ``noise`` is True and the ids elsewhere; write the noise, and p unless it is None."""
    noisy = tl.where(noise, token.to(ids.dtype), ids)
    if all_multiples(sizes[1], sizes[2], 0, 0):
        _write_as(outputs, b, block, i, sizes, noisy, noise, p, True)
    else:
        _write_as(outputs, b, block, i, sizes, noisy, noise, p, False)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ONES)
def _corrupt_independent(
    ids_ptr, loss_mask_ptr, seed_ptr, level_ptr, start_ptr, noisy_ptr, noise_ptr, p_ptr, segment_ptr,
    B, L, blocks, size, stride, token, stride_b, stride_l, mask_stride_b, mask_stride_l, level_stride_b, level_stride_n,
    eps, one_minus_eps,
    KIND: tl.constexpr, SHARED_SEED: tl.constexpr, HAS_LEVEL: tl.constexpr, SHARE: tl.constexpr,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = (ids_ptr, loss_mask_ptr, stride_b, stride_l, mask_stride_b, mask_stride_l)
    levels = (level_ptr, level_stride_b, level_stride_n, eps, one_minus_eps)
    tiles = tl.cdiv(size, BLOCK)
    first = (tl.program_id(0) % tiles) * BLOCK
    n = ((tl.program_id(0) // tiles) * R + tl.arange(0, R))[:, None]
    b = n // blocks
    block = n % blocks
    i = (first + tl.arange(0, BLOCK))[None, :]
    sizes = (B, L, size, None if start_ptr is None else _first_column(start_ptr, b, B, L))
    ids, noise = _read(batch, b, block, i, sizes, True)
    p = tl.full([R, BLOCK], 1.0, tl.float32)
    if KIND != "all":
        seed, row = _philox.seed_and_row(seed_ptr, b, B, SHARED_SEED)
        if segment_ptr is None:
            level = _level(levels, seed, row, b, block, B, stride, HAS_LEVEL)
        else:
            at, inside = _places(b, block, i, sizes, False)
            number = tl.load(segment_ptr + b.to(tl.int64) * L + at, mask=inside, other=-1).to(tl.int32)
            level = _level(levels, seed, row, b, tl.maximum(number, 0), B, stride, HAS_LEVEL)
            noise = noise & (number >= 0)
            level = tl.where(number >= 0, level, 1.0)
        start = block * size + first
        if KIND == "tokens":
            word = _philox.words(seed, row, stride, start, SHARE, BLOCK)
            noise = noise & (_philox.uniform(word >> 41) < level)
            token = _philox.token_of(word, token)
        else:
            tl.static_assert(KIND == "mask", f"_corrupt_independent has no branch for the kind {KIND}")
            noise = noise & (_philox.uniform(_philox.draws(seed, row, stride, start, SHARE, BLOCK) >> 9) < level)
        if (KIND == "mask") | HAS_LEVEL:
            p = tl.broadcast_to(level, [R, BLOCK])
    _write((noisy_ptr, noise_ptr, p_ptr), b, block, i, sizes, ids, noise, token, p)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ONES)
def _corrupt_mix(
    ids_ptr, loss_mask_ptr, seed_ptr, mask_prob_ptr, uniform_prob_ptr, start_ptr, noisy_ptr, noise_ptr,
    B, L, stride, token, vocab_size, stride_b, stride_l, mask_stride_b, mask_stride_l, p_stride, q_stride,
    SHARED_SEED: tl.constexpr, SHARE: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = (ids_ptr, loss_mask_ptr, stride_b, stride_l, mask_stride_b, mask_stride_l)
    tiles = tl.cdiv(L, BLOCK)
    first = (tl.program_id(0) % tiles) * BLOCK
    b = ((tl.program_id(0) // tiles) * R + tl.arange(0, R))[:, None]
    i = (first + tl.arange(0, BLOCK))[None, :]
    sizes = (B, L, L, None if start_ptr is None else _first_column(start_ptr, b, B, L))
    ids, supervised = _read(batch, b, b * 0, i, sizes, True)
    mask_prob = tl.load(mask_prob_ptr + b.to(tl.int64) * p_stride, mask=b < B)
    total = mask_prob + tl.load(uniform_prob_ptr + b.to(tl.int64) * q_stride, mask=b < B)
    supervised = supervised & (total <= _MOST)
    seed, row = _philox.seed_and_row(seed_ptr, b, B, SHARED_SEED)
    word = _philox.words(seed, row, stride, first + b * 0, SHARE, BLOCK)
    u = _philox.uniform(word >> 41)
    absorbed = supervised & (u < mask_prob)
    other = _philox.token_of(word, vocab_size - 2)
    clean = ids.to(tl.int64)
    other += (other >= tl.minimum(clean, token)).to(tl.int64)
    other += (other >= tl.maximum(clean, token)).to(tl.int64)
    noise = absorbed | (supervised & (u < total) & (clean != token))
    new = tl.where(absorbed, tl.zeros_like(other) + token, other)
    _write((noisy_ptr, noise_ptr, None), b, b * 0, i, sizes, ids, noise, new, None)


@triton.jit
def number_to_mask(level, length, at_least):
    """Return round(level * length), half to even, clamped to [at_least, length]."""
    product = level * length.to(tl.float32)
    down = tl.floor(product)
    rest = product - down
    k = down.to(tl.int32)
    k += ((rest > 0.5) | ((rest == 0.5) & (k % 2 == 1))).to(tl.int32)
    return tl.minimum(tl.maximum(k, at_least), length.to(tl.int32))


@triton.jit
def _position_keys(draw, choosable, first, level, rate, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute keys [R, BLOCK] of the positions of each block from ``first``: the draws, or biased Gumbel scores."""
    if KIND == "exact":
        return tl.where(choosable, draw.to(tl.int64), NEVER)
    else:
        tl.static_assert(KIND == "topk", f"_position_keys has no branch for the kind {KIND}")
        i = (first + tl.arange(0, BLOCK))[None, :]
        log_w = ((1.0 - level) * rate) * i.to(tl.float32)
        return keys(score(log_w, _philox.fine_uniform(draw)), choosable)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ONES)
def _corrupt_topk(
    ids_ptr, loss_mask_ptr, seed_ptr, level_ptr, start_ptr, noisy_ptr, noise_ptr, p_ptr, rate_ptr,
    B, L, blocks, size, stride, token, stride_b, stride_l, mask_stride_b, mask_stride_l, level_stride_b, level_stride_n,
    eps, one_minus_eps, rate, at_least,
    KIND: tl.constexpr, HAS_MASK: tl.constexpr, SHARED_SEED: tl.constexpr, HAS_LEVEL: tl.constexpr,
    SHARE: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mask k positions of each block by biased scores; kind "exact": k supervised ones by their draws."""
    batch = (ids_ptr, loss_mask_ptr, stride_b, stride_l, mask_stride_b, mask_stride_l)
    levels = (level_ptr, level_stride_b, level_stride_n, eps, one_minus_eps)
    n = (tl.program_id(0) * R + tl.arange(0, R))[:, None]
    b = n // blocks
    block = n % blocks
    i = tl.arange(0, BLOCK)[None, :]
    sizes = (B, L, size, None if start_ptr is None else _first_column(start_ptr, b, B, L))
    ids, supervised = _read(batch, b, block, i, sizes, HAS_MASK)
    seed, row = _philox.seed_and_row(seed_ptr, b, B, SHARED_SEED)
    level = _level(levels, seed, row, b, block, B, stride, HAS_LEVEL)
    draw = _philox.draws(seed, row, stride, block * size, SHARE, BLOCK)
    if KIND == "exact":
        length = tl.sum(supervised.to(tl.int32), 1)[:, None]
        at_least = (level > 0).to(tl.int32)
        key = _position_keys(draw, supervised, 0, level, rate, KIND, BLOCK)
    else:
        length = _length(block, sizes)
        if rate_ptr is not None:
            rate = tl.load(rate_ptr + b, mask=b < B)
        key = _position_keys(draw, i < length, 0, level, rate, KIND, BLOCK)
    chosen = topk(key, tl.reshape(number_to_mask(level, length, at_least), [R]))
    p = tl.broadcast_to(level, [R, BLOCK])
    _write((noisy_ptr, noise_ptr, p_ptr), b, block, i, sizes, ids, chosen & supervised, token, p)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ONES)
def _corrupt_topk_long(
    ids_ptr, loss_mask_ptr, seed_ptr, level_ptr, start_ptr, noisy_ptr, noise_ptr, p_ptr, rate_ptr, key_ptr,
    B, L, blocks, size, stride, token, stride_b, stride_l, mask_stride_b, mask_stride_l, level_stride_b, level_stride_n,
    eps, one_minus_eps, rate, at_least,
    KIND: tl.constexpr, HAS_MASK: tl.constexpr, SHARED_SEED: tl.constexpr, HAS_LEVEL: tl.constexpr,
    SHARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Like ``_corrupt_topk``, for blocks whose keys do not fit into registers."""
    batch = (ids_ptr, loss_mask_ptr, stride_b, stride_l, mask_stride_b, mask_stride_l)
    levels = (level_ptr, level_stride_b, level_stride_n, eps, one_minus_eps)
    n = tl.program_id(0)
    b = (n // blocks) + tl.zeros([1, 1], tl.int32)
    block = (n % blocks) + tl.zeros([1, 1], tl.int32)
    sizes = (B, L, size, None if start_ptr is None else _first_column(start_ptr, b, B, L))
    length = tl.max(tl.reshape(_length(block, sizes), [1]), 0)
    if rate_ptr is not None:
        rate = tl.load(rate_ptr + b)
    seed, row = _philox.seed_and_row(seed_ptr, b, B, SHARED_SEED)
    level = _level(levels, seed, row, b, block, B, stride, HAS_LEVEL)
    num_keys = rounded_up(size)
    key_ptr += n.to(tl.int64) * num_keys
    lo = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    hi = tl.full([], NEVER, tl.int64)
    choosable = tl.zeros([], tl.int32)
    for start in range(0, num_keys, BLOCK):
        i = start + tl.arange(0, BLOCK)
        may = (i < length)[None, :]
        if KIND == "exact":
            _, may = _read(batch, b, block, i[None, :], sizes, HAS_MASK)
        draw = _philox.draws(seed, row, stride, block * size + start, SHARE, BLOCK)
        key = tl.reshape(_position_keys(draw, may, start, level, rate, KIND, BLOCK), [BLOCK])
        tl.store(key_ptr + i, key, mask=i < num_keys)
        lo, hi, choosable = widen(lo, hi, choosable, key)
    tl.debug_barrier()  # other threads read the keys back
    if KIND == "exact":
        k = number_to_mask(level, choosable + tl.zeros([1, 1], tl.int32), (level > 0).to(tl.int32))
    else:
        k = number_to_mask(level, length, at_least)
    k = tl.max(tl.reshape(k, [1]), 0)
    threshold, missing = threshold_in_memory(key_ptr, num_keys, k, lo, hi, choosable, BLOCK)
    p = tl.broadcast_to(level, [1, BLOCK])
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = tl.load(key_ptr + i, mask=i < num_keys)
        chosen, missing = chosen_of_tile(key, threshold, missing)
        ids, supervised = _read(batch, b, block, i[None, :], sizes, HAS_MASK)
        noise = chosen[None, :] & supervised
        _write((noisy_ptr, noise_ptr, p_ptr), b, block, i[None, :], sizes, ids, noise, token, p)


@triton.jit
def _complement_as(batch, out_ptr, b, i, sizes, ALIGNED: tl.constexpr):
    noise, supervised = _read_as(batch, b, b * 0, i, sizes, True, ALIGNED)
    at, inside = _places(b, b * 0, i, sizes, ALIGNED)
    tl.store(out_ptr + b * multiple(sizes[1], ALIGNED) + at, supervised & (noise == 0), mask=inside)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ONES)
def _complement(
    noise_ptr, loss_mask_ptr, out_ptr, B, L, stride_b, stride_l, mask_stride_b, mask_stride_l, BLOCK: tl.constexpr
):
    batch = (noise_ptr, loss_mask_ptr, stride_b, stride_l, mask_stride_b, mask_stride_l)
    tiles = tl.cdiv(L, BLOCK)
    b = (tl.program_id(0) // tiles).to(tl.int64) + tl.zeros([1], tl.int64)
    i = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    if all_multiples(L, stride_b, mask_stride_b, 0):
        _complement_as(batch, out_ptr, b, i, (B, L, L, None), True)
    else:
        _complement_as(batch, out_ptr, b, i, (B, L, L, None), False)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ONES)
def _sample_level(
    seed_ptr, out_ptr, B, low, span, high, METHOD: tl.constexpr, SHARED_SEED: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed, row = _philox.seed_and_row(seed_ptr, b, B, SHARED_SEED)
    if METHOD == "antithetic":
        row -= b % 2
    if METHOD == "stratified":
        row *= 0
    x = _philox.uniform(_philox.level_draws(seed, row, 1, tl.zeros_like(b)) >> 9)
    if METHOD == "antithetic":
        x = tl.where(b % 2 == 1, 1.0 - x, x)
    if METHOD == "stratified":
        place = x.to(tl.float64) + b.to(tl.float64) / tl.full([BLOCK], B, tl.int64).to(tl.float64)
        place = tl.where(place >= 1.0, place - 1.0, place)
        x = tl.minimum(place.to(tl.float32), 1.0 - 5.9604644775390625e-08)
    tl.store(out_ptr + b, tl.minimum(x * span + low, high), mask=b < B)


Tensor = torch.Tensor
Corrupted = tuple[Tensor, Tensor, Tensor]


def _stride(blocks: int, L: int, words: bool = False) -> int:
    """Return the number of counters of a row in the layout of ``corruption/_philox.py``."""
    return -(-blocks // 8) - (-L // (4 if words else 8))


def corrupt(
    input_ids: Tensor, loss_mask: Tensor | None, level: Tensor | None, seed: Tensor | None, start: Tensor | None,
    segments: Tensor | None, routine: Any, grid: Any, rate: float | Tensor,
) -> Corrupted:  # fmt: skip
    """Launch the kernel of a ``_corrupt.Routine``; only "topk" uses ``rate``, a number or one per row."""
    kind, token, block_size, eps, _ = routine
    B, L, blocks, size = grid
    noisy = torch.empty(input_ids.shape, dtype=input_ids.dtype, device=input_ids.device)
    noise = torch.empty(noisy.shape, dtype=torch.bool, device=noisy.device)
    out = noisy, noise, torch.empty(noisy.shape, dtype=torch.float32, device=noisy.device)
    mask_strides = (0, 0) if loss_mask is None else loss_mask.stride()
    # A level [B, 1] applies to all blocks of a row.
    level_strides = (0, 0) if level is None else (level.stride(0), level.stride(1) if level.shape[1] > 1 else 0)
    pointers = (input_ids, loss_mask, seed, level, None if start is None else start.contiguous(), *out)
    levels = blocks if segments is None else L
    numbers = (
        B, L, blocks, size, _stride(levels, L, kind == "tokens"), token, *input_ids.stride(), *mask_strides,
        *level_strides, eps, 1.0 - eps,
    )  # fmt: skip
    flags: dict[str, Any] = {"SHARED_SEED": seed is not None and seed.dim() == 0, "HAS_LEVEL": level is not None}
    flags |= {"enable_fp_fusion": False}
    if kind in _INDEPENDENT:
        sizes = blocks, size, 4 if kind == "tokens" else 8
        R, block, share, num_warps = _tiles.independent(*sizes, segments is not None)
        programs = (triton.cdiv(B * blocks, R) * triton.cdiv(size, block),)
        flags |= {"KIND": kind, "SHARE": share, "R": R, "BLOCK": block, "num_warps": num_warps}
        _corrupt_independent[programs](*pointers, segments, *numbers, **flags)
        return out
    assert kind in _EXACT, f"no kernel in backends/triton/corruption.py lists the kind {kind}"
    tile = _tiles.select(size, _tiles.CORRUPT_IN_MEMORY if start is None else _tiles.PADDED_IN_MEMORY)
    share = _tiles.share(blocks, size, tile.block, 8)
    flags |= {"KIND": kind, "HAS_MASK": loss_mask is not None, "SHARE": share, "BLOCK": tile.block}
    flags |= {"num_warps": tile.num_warps} | (alone_on_a_multiprocessor(16) if tile.num_warps == 16 else {})
    row_rates, call_rate = (rate, 0.0) if isinstance(rate, Tensor) else (None, rate)
    numbers = (*numbers, call_rate, int(block_size is None))
    if tile.in_memory:
        scratch = torch.empty((B * blocks, 16 * triton.cdiv(size, 16)), dtype=torch.int64, device=input_ids.device)
        _corrupt_topk_long[(B * blocks,)](*pointers, row_rates, scratch, *numbers, **flags)
    else:
        programs = (triton.cdiv(B * blocks, tile.rows),)
        _corrupt_topk[programs](*pointers, row_rates, *numbers, **flags, R=tile.rows)
    return out


def mix_tokens(
    input_ids: Tensor, loss_mask: Tensor, mask_token_id: int, vocab_size: int, mask_prob: Tensor, uniform_prob: Tensor,
    seed: Tensor, start: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See ``_corrupt.mix_tokens``."""
    B, L = input_ids.shape
    noisy = torch.empty((B, L), dtype=input_ids.dtype, device=input_ids.device)
    noise = torch.empty(noisy.shape, dtype=torch.bool, device=noisy.device)
    R, block, share, num_warps = _tiles.independent(1, L, 4)
    grid = (triton.cdiv(B, R) * triton.cdiv(L, block),)
    first = None if start is None else start.contiguous()
    _corrupt_mix[grid](
        input_ids, loss_mask, seed, mask_prob, uniform_prob, first, noisy, noise,
        B, L, _stride(1, L, True), mask_token_id, vocab_size, *input_ids.stride(), *loss_mask.stride(),
        mask_prob.stride(0), uniform_prob.stride(0),
        SHARED_SEED=seed.dim() == 0, SHARE=share, R=R, BLOCK=block, num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return noisy, noise


def complement(noise_mask: Tensor, loss_mask: Tensor) -> Tensor:
    """See ``_corrupt.complement``."""
    B, L = noise_mask.shape
    out = torch.empty((B, L), dtype=torch.bool, device=noise_mask.device)
    if out.numel():
        sizes = B, L, *noise_mask.stride(), *loss_mask.stride()
        grid = (B * triton.cdiv(L, 1024),)
        _complement[grid](noise_mask, loss_mask, out, *sizes, BLOCK=1024, enable_fp_fusion=False)
    return out


def sample_level(seed: Tensor, B: int, method: str, low: float, high: float) -> Tensor:
    """See ``_corrupt.sample_level``."""
    out = torch.empty(B, dtype=torch.float32, device=seed.device)
    _sample_level[(triton.cdiv(B, 128),)](
        seed, out, B, low, high - low, high,
        METHOD=method, SHARED_SEED=seed.dim() == 0, BLOCK=128, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
