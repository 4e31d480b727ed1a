"""Corruption in one launch: ids and mask in; noisy ids, noise mask and probabilities out.

A program works on a tile [R blocks, BLOCK positions]; block n of the batch is block n % blocks of row n // blocks.
Levels, coins and tokens are drawn in registers. The arithmetic is that of ``ops/corruption.py``, rounded step by step:
the kernels are launched without contraction into fused multiply-adds.
"""

import torch
import triton
import triton.language as tl

from dllm_kernels.kernels import _corruption_tiles
from dllm_kernels.kernels._launch import on_its_device
from dllm_kernels.kernels._philox import (
    SELECT,
    TOKEN_HIGH,
    TOKEN_LOW,
    fine_uniform,
    level_bits,
    position_bits,
    uniform,
)
from dllm_kernels.kernels._select import (
    NEVER,
    chosen_of_tile,
    keys,
    score,
    threshold_in_memory,
    topk,
    widen,
)

_MASK = tl.constexpr(0)
_TOKENS = tl.constexpr(1)
_ALL = tl.constexpr(2)


@triton.jit
def _seed_and_row(seed_ptr, b, B, SHARED_SEED: tl.constexpr):
    """The key of the rows b and their number under it: b itself, or 0 under a seed of their own."""
    if SHARED_SEED:
        return tl.load(seed_ptr + b * 0), b
    else:
        return tl.load(seed_ptr + b, mask=b < B, other=0), b * 0


@triton.jit
def _level(seed, row, block, eps, one_minus_eps):
    return uniform(level_bits(seed, row, block)) * one_minus_eps + eps


@triton.jit
def _write(
    ids_ptr, loss_mask_ptr, noisy_ptr, noise_ptr, p_ptr, b, at, inside, chosen, token, p,
    L, stride_b, stride_l, mask_stride_b, mask_stride_l, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Corrupt the chosen positions ``at`` of the rows b that are supervised."""
    b = b.to(tl.int64)  # b * L passes int32 once the batch has 2**31 positions
    at = at.to(tl.int64)
    ids = tl.load(ids_ptr + b * stride_b + at * stride_l, mask=inside, other=0)
    noise = chosen
    if HAS_MASK:
        supervised = tl.load(loss_mask_ptr + b * mask_stride_b + at * mask_stride_l, mask=inside, other=0)
        noise = noise & (supervised != 0)
    out = b * L + at
    tl.store(noisy_ptr + out, tl.where(noise, token.to(ids.dtype), ids), mask=inside)
    tl.store(noise_ptr + out, noise, mask=inside)
    tl.store(p_ptr + out, p, mask=inside)


@triton.jit
def _token(seed, row, block, first, vocab_size, R: tl.constexpr, BLOCK: tl.constexpr):
    high = position_bits(seed, row, block, first, TOKEN_HIGH, R, BLOCK).to(tl.int64)
    low = position_bits(seed, row, block, first, TOKEN_LOW, R, BLOCK).to(tl.int64)
    return (high * vocab_size + ((low * vocab_size) >> 32)) >> 32


@triton.jit(do_not_specialize=["B", "token"])
def _corrupt_independent(
    ids_ptr, loss_mask_ptr, seed_ptr, noisy_ptr, noise_ptr, p_ptr,
    B, L, blocks, size, token, stride_b, stride_l, mask_stride_b, mask_stride_l, eps, one_minus_eps,
    WHAT: tl.constexpr, SHARED_SEED: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(size, BLOCK)
    first = (tl.program_id(0) % tiles) * BLOCK
    n = ((tl.program_id(0) // tiles) * R + tl.arange(0, R))[:, None]
    b = n // blocks
    block = n % blocks
    i = (first + tl.arange(0, BLOCK))[None, :]
    at = block * size + i
    inside = (b < B) & (i < size) & (at < L)
    p = tl.full([R, BLOCK], 1.0, tl.float32)
    chosen = inside
    if WHAT != _ALL:
        seed, row = _seed_and_row(seed_ptr, b, B, SHARED_SEED)
        level = _level(seed, row, block, eps, one_minus_eps)
        chosen = inside & (uniform(position_bits(seed, row, block, first, SELECT, R, BLOCK)) < level)
        if WHAT == _TOKENS:
            token = _token(seed, row, block, first, token, R, BLOCK)
        else:
            p = tl.broadcast_to(level, [R, BLOCK])
    _write(
        ids_ptr, loss_mask_ptr, noisy_ptr, noise_ptr, p_ptr, b, at, inside, chosen, token, p,
        L, stride_b, stride_l, mask_stride_b, mask_stride_l, True,
    )  # fmt: skip


@triton.jit
def number_to_mask(level, length, at_least):
    """round(level * length), half to even, within [at_least, length]."""
    product = level * length.to(tl.float32)
    down = tl.floor(product)
    rest = product - down
    k = down.to(tl.int32)
    k += ((rest > 0.5) | ((rest == 0.5) & (k % 2 == 1))).to(tl.int32)
    return tl.minimum(tl.maximum(k, at_least), length.to(tl.int32))


@triton.jit
def _position_keys(seed, row, block, first, level, rate, length, R: tl.constexpr, BLOCK: tl.constexpr):
    """Keys [R, BLOCK] of the positions first .. of each block; those beyond its length are never chosen."""
    i = (first + tl.arange(0, BLOCK))[None, :]
    log_w = ((1.0 - level) * rate) * i.to(tl.float32)
    u = fine_uniform(position_bits(seed, row, block, first, SELECT, R, BLOCK))
    return keys(score(log_w, u), i < length)


@triton.jit(do_not_specialize=["B", "token"])
def _corrupt_topk(
    ids_ptr, loss_mask_ptr, seed_ptr, noisy_ptr, noise_ptr, p_ptr,
    B, L, blocks, size, token, stride_b, stride_l, mask_stride_b, mask_stride_l, eps, one_minus_eps, rate, at_least,
    HAS_MASK: tl.constexpr, SHARED_SEED: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(0) * R + tl.arange(0, R))[:, None]
    b = n // blocks
    block = n % blocks
    length = tl.where(b < B, tl.minimum(size, L - block * size), 0)
    seed, row = _seed_and_row(seed_ptr, b, B, SHARED_SEED)
    level = _level(seed, row, block, eps, one_minus_eps)
    key = _position_keys(seed, row, block, 0, level, rate, length, R, BLOCK)
    k = tl.reshape(number_to_mask(level, length, at_least), [R])
    chosen = topk(key, k)
    i = tl.arange(0, BLOCK)[None, :]
    at = block * size + i
    inside = (b < B) & (i < size) & (at < L)  # not i < length, in which the compiler sees no alignment
    _write(
        ids_ptr, loss_mask_ptr, noisy_ptr, noise_ptr, p_ptr, b, at, inside, chosen, token,
        tl.broadcast_to(level, [R, BLOCK]), L, stride_b, stride_l, mask_stride_b, mask_stride_l, HAS_MASK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B", "token"])
def _corrupt_topk_long(
    ids_ptr, loss_mask_ptr, seed_ptr, noisy_ptr, noise_ptr, p_ptr, key_ptr,
    B, L, blocks, size, token, stride_b, stride_l, mask_stride_b, mask_stride_l, eps, one_minus_eps, rate, at_least,
    HAS_MASK: tl.constexpr, SHARED_SEED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    b = (n // blocks) + tl.zeros([1, 1], tl.int32)
    block = (n % blocks) + tl.zeros([1, 1], tl.int32)
    length = tl.minimum(size, L - (n % blocks) * size)
    seed, row = _seed_and_row(seed_ptr, b, B, SHARED_SEED)
    level = _level(seed, row, block, eps, one_minus_eps)
    key_ptr += n.to(tl.int64) * size
    lo = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    hi = tl.full([], NEVER, tl.int64)
    choosable = tl.zeros([], tl.int32)
    for start in range(0, size, BLOCK):
        key = tl.reshape(_position_keys(seed, row, block, start, level, rate, length, 1, BLOCK), [BLOCK])
        i = start + tl.arange(0, BLOCK)
        tl.store(key_ptr + i, key, mask=i < size)
        lo, hi, choosable = widen(lo, hi, choosable, key)
    tl.debug_barrier()  # other threads read the keys back
    k = tl.max(tl.reshape(number_to_mask(level, length, at_least), [1]), 0)
    threshold, missing = threshold_in_memory(key_ptr, size, k, lo, hi, choosable, BLOCK)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = tl.load(key_ptr + i, mask=i < size, other=NEVER)
        chosen, missing = chosen_of_tile(key, threshold, missing)
        i = i[None, :]
        _write(
            ids_ptr, loss_mask_ptr, noisy_ptr, noise_ptr, p_ptr, b, block * size + i, i < length, chosen[None, :], token,
            tl.broadcast_to(level, [1, BLOCK]), L, stride_b, stride_l, mask_stride_b, mask_stride_l, HAS_MASK,
        )  # fmt: skip


Corrupted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _outputs(input_ids: torch.Tensor) -> Corrupted:
    shape, device = input_ids.shape, input_ids.device
    return (
        torch.empty(shape, dtype=input_ids.dtype, device=device),
        torch.empty(shape, dtype=torch.bool, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def _launch_independent(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    seed: torch.Tensor | None,
    token: int,
    blocks: int,
    size: int,
    eps: float,
    what: int,
) -> Corrupted:
    B, L = input_ids.shape
    out = _outputs(input_ids)
    R, block, num_warps = _corruption_tiles.independent(size)
    grid = (triton.cdiv(B * blocks, R) * triton.cdiv(size, block),)
    _corrupt_independent[grid](
        input_ids, loss_mask, seed, *out, B, L, blocks, size, token, *input_ids.stride(), *loss_mask.stride(),
        eps, 1.0 - eps, WHAT=what, SHARED_SEED=seed is not None and seed.dim() == 0, R=R, BLOCK=block,
        num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@on_its_device
def mask_tokens(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, mask_token_id: int, eps: float, seed: torch.Tensor
) -> Corrupted:
    """``ops.corruption.mask_tokens``."""
    L = input_ids.shape[1]
    return _launch_independent(input_ids, loss_mask, seed, mask_token_id, 1, L, eps, _MASK.value)


@on_its_device
def replace_tokens(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    vocab_size: int,
    blocks: int,
    size: int,
    eps: float,
    seed: torch.Tensor,
) -> Corrupted:
    """``ops.corruption.replace_tokens``."""
    return _launch_independent(input_ids, loss_mask, seed, vocab_size, blocks, size, eps, _TOKENS.value)


@on_its_device
def mask_all(input_ids: torch.Tensor, loss_mask: torch.Tensor, mask_token_id: int) -> Corrupted:
    """``ops.corruption.mask_all``."""
    L = input_ids.shape[1]
    return _launch_independent(input_ids, loss_mask, None, mask_token_id, 1, L, 0.0, _ALL.value)


@on_its_device
def mask_topk(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    mask_token_id: int,
    blocks: int,
    size: int,
    eps: float,
    rate: float,
    at_least: int,
    seed: torch.Tensor,
) -> Corrupted:
    """``ops.corruption.mask_topk``."""
    B, L = input_ids.shape
    out = _outputs(input_ids)
    tile = _corruption_tiles.select(size, _corruption_tiles.CORRUPT_IN_MEMORY)
    mask_strides = (0, 0) if loss_mask is None else loss_mask.stride()
    pointers = (input_ids, loss_mask, seed, *out)
    numbers = (B, L, blocks, size, mask_token_id, *input_ids.stride(), *mask_strides, eps, 1.0 - eps, rate, at_least)
    flags = {"HAS_MASK": loss_mask is not None, "SHARED_SEED": seed.dim() == 0, "BLOCK": tile.block}
    options = {"num_warps": tile.num_warps, "enable_fp_fusion": False}
    if tile.in_memory:
        scratch = torch.empty((B * blocks, size), dtype=torch.int64, device=input_ids.device)
        _corrupt_topk_long[(B * blocks,)](*pointers, scratch, *numbers, **flags, **options)
    else:
        grid = (triton.cdiv(B * blocks, tile.rows),)
        _corrupt_topk[grid](*pointers, *numbers, **flags, R=tile.rows, **options)
    return out
