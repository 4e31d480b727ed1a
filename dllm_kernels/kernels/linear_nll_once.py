r"""NLL of a chunk of logits, and its gradient but for a factor a row, in ONE pass over the chunk: 4 bytes a logit, not 6.

Unproven: it has not run on a GPU, and is off unless asked for (``base/_backend.py``, ``one_pass``).

``kernels/linear_nll.py`` reads a row twice, since the softmax needs its sum first. Here the sum goes into the products that
follow instead. With c the maximum of the row's first tile, every logit is replaced by

    E_v = exp(z_v - c),   S = sum_v E_v,   and then   E_y <- E_y - S,

so that for a row of weight w the gradient is s E with s = w / S, and

    grad_hidden = s (E W),    grad_weight += E^T (s hidden).

E keeps the relative precision of its dtype, whatever its size, so bfloat16 and float32 serve; float16 has not the range.

**A later tile may exceed c.** A lane whose maximum passes c + LIMIT stops: from that tile on it writes back what it read, and
remembers where. If any lane has, the row is done again with its true maximum M in the place of c: what is already E is
multiplied by exp(c - M), the rest is still z. Otherwise E is at most exp(LIMIT), and sums and products stay far from overflow.
"""

import torch
import triton
import triton.language as tl

from dllm_kernels.kernels import _tiles
from dllm_kernels.kernels._launch import on_its_device, threads
from dllm_kernels.kernels._math import (
    FUSED,
    LOG2E,
    SKIP,
    column_of,
    finite,
    load_target_logit,
    ragged_columns,
    tied_below,
    wide_columns,
)
from dllm_kernels.kernels.linear_nll import _zero_row
from dllm_kernels.kernels.token_nll import NLL, _acc, _skip_row, _store, new_rows

LIMIT = tl.constexpr(30.0)


@triton.jit
def _store_exp(x, tile_ptr, i, mask, c, tile, lane_max, lane_sum, stop, WIDE: tl.constexpr, ACC: tl.constexpr):
    """One tile: E over the logits, but for lanes that have stopped; their maxima, their sums, and where they stopped."""
    LANES: tl.constexpr = lane_max.shape[0]
    BLOCK_V: tl.constexpr = x.shape[0]
    z = tl.reshape(x.to(ACC), [BLOCK_V // (LANES * WIDE), LANES, WIDE])
    top = tl.max(tl.max(z, 2), 0)
    goes_on = (stop == tile) & (top <= c + LIMIT)
    stop = tl.where(goes_on, tile + BLOCK_V, stop)
    e = tl.exp2((z - c) * LOG2E)
    # A select and not a mask: behind such a mask Triton 3.6 has no 16-byte store.
    out = tl.reshape(tl.where(goes_on[None, :, None], e, z), [BLOCK_V])
    tl.store(tile_ptr + i, out.to(tile_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    return tl.maximum(lane_max, top), lane_sum + tl.sum(tl.sum(e, 2), 0), stop


@triton.jit
def _relative(x, row_max, factor, is_exp, WIDE: tl.constexpr, ACC: tl.constexpr):
    """E relative to row_max of one tile [REPS, LANES, WIDE], of whose lanes some hold an E already."""
    LANES: tl.constexpr = is_exp.shape[0]
    x = tl.reshape(x.to(ACC), [x.shape[0] // (LANES * WIDE), LANES, WIDE])
    return tl.where(is_exp[None, :, None], x * factor, tl.exp2((x - row_max) * LOG2E))


@triton.jit
def _again(tile_ptr, i, wide, c, row_max, stop, WIDE: tl.constexpr, ACC: tl.constexpr):
    """E relative to row_max over a row that has E relative to c up to where its lanes stopped; the sum."""
    LANES: tl.constexpr = stop.shape[0]
    BLOCK_V: tl.constexpr = i.shape[0]
    factor = tl.exp2((c - row_max) * LOG2E)
    lane_sum = tl.zeros([LANES], ACC)
    whole = wide // BLOCK_V * BLOCK_V
    for tile in range(0, whole, BLOCK_V):
        x = tl.load(tile_ptr + tile + i)
        e = _relative(x, row_max, factor, tile < stop, WIDE, ACC)
        lane_sum += tl.sum(tl.sum(e, 2), 0)
        tl.store(tile_ptr + tile + i, tl.reshape(e, [BLOCK_V]).to(tile_ptr.dtype.element_ty))
    if whole < wide:
        rest = i < wide - whole
        x = tl.load(tile_ptr + whole + i, mask=rest, other=0.0)
        e = _relative(x, row_max, factor, whole < stop, WIDE, ACC)
        lane_sum += tl.sum(tl.sum(tl.where(tl.reshape(rest, e.shape), e, 0.0), 2), 0)
        tl.store(tile_ptr + whole + i, tl.reshape(e, [BLOCK_V]).to(tile_ptr.dtype.element_ty), mask=rest)
    return tl.sum(lane_sum, 0)


@triton.jit(do_not_specialize=["stride_n", "V"])
def _linear_nll_rows_once(
    logits_ptr, target_ptr, scale_ptr, nll_ptr, max_ptr, log_sum_ptr, correct_ptr, factor_ptr,
    stride_n, V,
    WITH_CORRECT: tl.constexpr, BLOCK_V: tl.constexpr, THREADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    LANES: tl.constexpr = min(THREADS, BLOCK_V // WIDE)
    n = tl.program_id(0)
    out = (nll_ptr, max_ptr, log_sum_ptr, correct_ptr, None, None)
    y64 = tl.load(target_ptr + n)
    scale = tl.load(scale_ptr + n).to(ACC)
    row = n.to(tl.int64) * stride_n
    if y64 != SKIP:
        at, first, wide = wide_columns(row, 0, V, WIDE)
        tile_ptr = logits_ptr + at
        i = tl.arange(0, BLOCK_V)
        y = column_of(y64, V)
        target_logit = load_target_logit(logits_ptr + row, y64, V, (None, None, None), ACC)
        v, there = ragged_columns(0, V, first, wide, WIDE)
        ragged = tl.load(logits_ptr + row + v, mask=there, other=-float("inf")).to(ACC)
        nearest = tl.load(tile_ptr + i, mask=i < wide, other=-float("inf")).to(ACC)
        c = finite(tl.maximum(tl.max(nearest, 0), tl.max(ragged, 0)))
        tied = tl.max(((ragged == target_logit) & (v < y)).to(tl.int32), 0) > 0
        if WITH_CORRECT:
            tied = tied | tied_below(tile_ptr, first, wide, y, target_logit, (None, None, None), BLOCK_V, ACC)
        tl.debug_barrier()  # everything of the row that is needed as it was has been read
        lane_max = tl.full([LANES], -float("inf"), ACC)
        lane_sum = tl.zeros([LANES], ACC)
        before = lane_max
        stop = tl.zeros([LANES], tl.int32)
        whole = wide // BLOCK_V * BLOCK_V
        for tile in range(0, whole, BLOCK_V):
            x = tl.load(tile_ptr + tile + i, eviction_policy="evict_first")
            lane_max, lane_sum, stop = _store_exp(
                x, tile_ptr + tile, i, None, c, tile, lane_max, lane_sum, stop, WIDE, ACC
            )
            if WITH_CORRECT:
                before = tl.where(first + tile + BLOCK_V <= y, lane_max, before)
        if whole < wide:
            rest = i < wide - whole
            last = tl.load(tile_ptr + whole + i, mask=rest, other=-float("inf"), eviction_policy="evict_first")
            lane_max, lane_sum, stop = _store_exp(
                last, tile_ptr + whole, i, rest, c, whole, lane_max, lane_sum, stop, WIDE, ACC
            )
            if WITH_CORRECT:
                before = tl.where(first + wide <= y, lane_max, before)
        row_max = finite(tl.maximum(tl.max(lane_max, 0), tl.max(ragged, 0)))
        row_sum = tl.sum(lane_sum, 0)
        if row_max > c + LIMIT:
            row_sum = _again(tile_ptr, i, wide, c, row_max, stop, WIDE, ACC)
            c = row_max
        e = tl.exp2((ragged - c) * LOG2E)
        row_sum += tl.sum(e, 0)
        tl.store(logits_ptr + row + v, e.to(logits_ptr.dtype.element_ty), mask=there)
        log_sum = tl.log(row_sum)
        nll = tl.where(row_sum == 0, float("nan"), (c - target_logit) + log_sum)
        if WITH_CORRECT:
            tied = tied | (tl.max(before, 0) == target_logit)
        beaten = (row_max > target_logit) | ((row_max == target_logit) & tied)
        _store(n, nll, row_max, log_sum + (c - row_max), (nll == nll) & (beaten == 0), out, WITH_CORRECT)
        tl.store(factor_ptr + n, tl.where(scale == 0, 0.0, tl.where(y >= 0, scale / row_sum, float("nan"))))
        tl.debug_barrier()  # the target's column has its E
        if scale == 0:
            _zero_row(logits_ptr, row, V, BLOCK_V)
        else:
            at_target = tl.exp2((target_logit - c) * LOG2E) - row_sum
            tl.store(logits_ptr + row + y, at_target.to(logits_ptr.dtype.element_ty), mask=y >= 0)
    else:
        _skip_row(n, out, WITH_CORRECT)
        tl.store(factor_ptr + n, 0.0)
        _zero_row(logits_ptr, row, V, BLOCK_V)


@on_its_device
def row_nll_factored_(
    logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, *, with_correct: bool
) -> tuple[NLL, torch.Tensor]:
    """Launch over a chunk ``logits [C, V]``, which then holds E; see ``base._rows`` for the contract."""
    C, V = logits.shape
    found = new_rows(C, torch.float32, logits.device, with_correct)
    factor = torch.empty_like(found[0])
    tile = _tiles.linear_nll_rows_once(V, logits.element_size())
    _linear_nll_rows_once[(C,)](
        logits, targets, scale, *found, factor, logits.stride(0), V,
        WITH_CORRECT=with_correct, BLOCK_V=tile.block_v, THREADS=threads(tile.num_warps), ACC=_acc(torch.float32),
        num_warps=tile.num_warps, **FUSED,
    )  # fmt: skip
    return found, factor
