"""Sampling of k positions per row without replacement: the k largest log_w_i - ln(-ln u_i), in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dllm_kernels.backends.triton import _tiles
from dllm_kernels.backends.triton._aligned import all_multiples, multiple, rounded_up
from dllm_kernels.backends.triton._launch import alone_on_a_multiprocessor
from dllm_kernels.backends.triton._philox import draws, fine_uniform, seed_and_row
from dllm_kernels.backends.triton._select import NEVER, chosen_of_tile, keys, score, threshold_in_memory, topk, widen

# Range that ``uniform`` is clamped to, as in corruption/_topk.py: 2^-1022 and 1 - 2^-53. As bits, because a float
# literal may be rounded to float32 in an expression with a float64 tensor.
_MIN_UNIFORM = tl.constexpr(0x0010000000000000)
_MAX_UNIFORM = tl.constexpr(0x3FEFFFFFFFFFFFFF)


# As in corruption.py: not specialised on lengths.
SIZES = ["N", "D", "k_const", "stride_n", "uniform_stride_n"]
ONES = ["stride_d", "uniform_stride_d", "k_ptr", "seed_ptr", "start_ptr"]


@triton.jit
def _load_as(ptr, n, d, sizes, stride_n, stride_d, ALIGNED: tl.constexpr):
    N, D = sizes
    inside = (n < N) & (d < multiple(D, ALIGNED))
    return tl.load(ptr + n * multiple(stride_n, ALIGNED) + d * stride_d, mask=inside)


@triton.jit
def _load(ptr, n, d, sizes, stride_n, stride_d):
    """Load the columns d of the rows n of a tensor with two strides."""
    if all_multiples(sizes[1], stride_n, 0, 0):
        x = _load_as(ptr, n, d, sizes, stride_n, stride_d, True)
    else:
        x = _load_as(ptr, n, d, sizes, stride_n, stride_d, False)
    return x


@triton.jit
def _store_as(out_ptr, n, d, sizes, chosen, ALIGNED: tl.constexpr):
    N, D = sizes
    columns = multiple(D, ALIGNED)
    tl.store(out_ptr + n * columns + d, chosen, mask=(n < N) & (d < columns))


@triton.jit
def _store(out_ptr, n, d, sizes, chosen):
    if all_multiples(sizes[1], 0, 0, 0):
        _store_as(out_ptr, n, d, sizes, chosen, True)
    else:
        _store_as(out_ptr, n, d, sizes, chosen, False)


@triton.jit
def _columns(start_ptr, n, d, N, D):
    """Return the columns of the positions d of the rows n, and True for positions that are not padding.

    With ``start``, the positions of a row begin at column ``start``; the columns before it follow the last one.
    """
    if start_ptr is None:
        return d, d < D
    else:
        start = tl.minimum(tl.maximum(tl.load(start_ptr + n, mask=n < N), 0), D)
        real = d < D - start
        return tl.where(real, d + start, tl.where(d < D, d - (D - start), d)), real


@triton.jit
def _row_keys(
    log_w_ptr, uniform_ptr, seed_ptr, start_ptr, n, first, N, D, stride_n, stride_d, uniform_stride_n, uniform_stride_d,
    HAS_UNIFORM: tl.constexpr, SHARED_SEED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute keys [R, BLOCK] of the rows n [R, 1] (int64), positions from ``first``."""
    d, real = _columns(start_ptr, n, (first + tl.arange(0, BLOCK))[None, :].to(tl.int64), N, D)
    inside = (n < N) & real
    if HAS_UNIFORM:
        u = _load(uniform_ptr, n, d, (N, D), uniform_stride_n, uniform_stride_d).to(tl.float64)
        inside = inside & (u == u)
        low = tl.full(u.shape, _MIN_UNIFORM, tl.int64).to(tl.float64, bitcast=True)
        high = tl.full(u.shape, _MAX_UNIFORM, tl.int64).to(tl.float64, bitcast=True)
        u = tl.where(u > low, tl.where(u < high, u, high), low)
    else:
        seed, row = seed_and_row(seed_ptr, n, N, SHARED_SEED)
        u = fine_uniform(draws(seed, row, tl.cdiv(D, 8), first + n * 0, 8 if BLOCK >= 8 else BLOCK, BLOCK))
    log_w = _load(log_w_ptr, n, d, (N, D), stride_n, stride_d)
    if log_w.dtype.primitive_bitwidth == 16:
        log_w = log_w.to(tl.float32)
    return keys(score(log_w, u), inside)


@triton.jit
def _count(k_ptr, k_const, n, N, HAS_K: tl.constexpr):
    """Load k of the rows n, clamped to at least 0."""
    if HAS_K:
        # Clamp before the cast to int32, because a count beyond int32 means all positions.
        k = tl.load(k_ptr + n, mask=n < N).to(tl.int64)
        return tl.minimum(tl.maximum(k, 0), 0x7FFFFFFF).to(tl.int32)
    else:
        return (n * 0).to(tl.int32) + k_const


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ONES)
def _gumbel_topk(
    log_w_ptr, k_ptr, uniform_ptr, seed_ptr, start_ptr, out_ptr,
    N, D, k_const, stride_n, stride_d, uniform_stride_n, uniform_stride_d,
    HAS_K: tl.constexpr, HAS_UNIFORM: tl.constexpr, SHARED_SEED: tl.constexpr,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    key = _row_keys(
        log_w_ptr, uniform_ptr, seed_ptr, start_ptr, n[:, None], 0, N, D,
        stride_n, stride_d, uniform_stride_n, uniform_stride_d, HAS_UNIFORM, SHARED_SEED, BLOCK,
    )  # fmt: skip
    k = _count(k_ptr, k_const, n, N, HAS_K)
    chosen = topk(key, k)
    d, _ = _columns(start_ptr, n[:, None], tl.arange(0, BLOCK)[None, :], N, D)
    _store(out_ptr, n[:, None], d, (N, D), chosen)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=ONES)
def _gumbel_topk_long(
    log_w_ptr, k_ptr, uniform_ptr, seed_ptr, start_ptr, out_ptr, key_ptr,
    N, D, k_const, stride_n, stride_d, uniform_stride_n, uniform_stride_d,
    HAS_K: tl.constexpr, HAS_UNIFORM: tl.constexpr, SHARED_SEED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    num_keys = rounded_up(D)
    key_ptr += n * num_keys
    lo = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    hi = tl.full([], NEVER, tl.int64)
    choosable = tl.zeros([], tl.int32)
    for start in range(0, num_keys, BLOCK):
        key = _row_keys(
            log_w_ptr, uniform_ptr, seed_ptr, start_ptr, n + tl.zeros([1, 1], tl.int64), start, N, D,
            stride_n, stride_d, uniform_stride_n, uniform_stride_d, HAS_UNIFORM, SHARED_SEED, BLOCK,
        )  # fmt: skip
        key = tl.reshape(key, [BLOCK])
        i = start + tl.arange(0, BLOCK)
        tl.store(key_ptr + i, key, mask=i < num_keys)
        lo, hi, choosable = widen(lo, hi, choosable, key)
    tl.debug_barrier()  # other threads read the keys back
    k = _count(k_ptr, k_const, n, N, HAS_K)
    threshold, missing = threshold_in_memory(key_ptr, num_keys, k, lo, hi, choosable, BLOCK)
    for start in range(0, D, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = tl.load(key_ptr + i, mask=i < num_keys)
        chosen, missing = chosen_of_tile(key, threshold, missing)
        row = n + tl.zeros([1, 1], tl.int64)
        d, _ = _columns(start_ptr, row, i[None, :], N, D)
        _store(out_ptr, row, d, (N, D), chosen[None, :])


def gumbel_topk_mask(
    log_w: Tensor, k: Tensor | int, uniform: Tensor | None, seed: Tensor | None, start: Tensor | None
) -> Tensor:
    """Launch the kernel on the validated arguments of ``ops.gumbel_topk_mask`` and a drawn seed."""
    N, D = log_w.shape
    out = torch.empty((N, D), dtype=torch.bool, device=log_w.device)
    if out.numel() == 0:
        return out
    tile = _tiles.select(D, _tiles.TOPK_IN_MEMORY if start is None else _tiles.PADDED_IN_MEMORY)
    k_ptr, k_const = (None, min(k, D)) if isinstance(k, int) else (k.contiguous(), 0)
    uniform_strides = (0, 0) if uniform is None else uniform.stride()
    pointers = (log_w, k_ptr, uniform, seed, None if start is None else start.contiguous(), out)
    sizes = (N, D, k_const, *log_w.stride(), *uniform_strides)
    flags = {"HAS_K": k_ptr is not None, "HAS_UNIFORM": uniform is not None, "BLOCK": tile.block}
    flags["SHARED_SEED"] = seed is not None and seed.dim() == 0
    options = {"num_warps": tile.num_warps, "enable_fp_fusion": False}
    if tile.in_memory:
        options |= {} if start is None else alone_on_a_multiprocessor(tile.num_warps)  # it would spill on sm_90
        scratch = torch.empty((N, 16 * triton.cdiv(D, 16)), dtype=torch.int64, device=log_w.device)
        _gumbel_topk_long[(N,)](*pointers, scratch, *sizes, **flags, **options)
    else:
        grid = (triton.cdiv(N, tile.rows),)
        _gumbel_topk[grid](*pointers, *sizes, **flags, R=tile.rows, **options)
    return out
