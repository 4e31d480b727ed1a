r"""Candidate for ``backends/triton/linear_nll.py``: NLL and gradient of a chunk in one pass, 4 bytes per logit, not 6.

The package's kernel reads a row twice, because the softmax needs its sum first. Here the sum moves to the products that
follow. With c the maximum of the row's first tile, every logit is replaced by

    E_v = exp(z_v - c),   S = sum_v E_v,   and then   E_y <- E_y - S,

so that for a row of weight w the gradient is s E with s = w / S, and

    grad_hidden = s (E W),    grad_weight += E^T (s hidden).

E keeps the relative precision of its dtype whatever its size, so bfloat16 and float32 are possible, and float16 is not.

**A later tile may exceed c.** A lane whose maximum exceeds c + LIMIT stops: from this tile on it writes back what it
has read, and remembers where. If any lane has stopped, the row is read again with its maximum M in the place of c: what
is already E is multiplied by exp(c - M), the rest is still z. Otherwise E is at most exp(LIMIT), far from overflow.

A measurement decides: ``variants`` compares both. The package had this kernel until it was removed as a second path for
the same result that no GPU had shown to be faster. A row in the registers of a cluster is no candidate, because Triton
3.6 does not compile it (``docs/develop/decisions.md``).
"""

import torch
import triton
import triton.language as tl

from dllm_kernels.backends.triton import _launch, _math, _tiles, token_nll
from dllm_kernels.backends.triton._math import IGNORE, LOG2E
from dllm_kernels.backends.triton.linear_nll import _zero_row
from dllm_kernels.rows._interface import NLL

LIMIT = tl.constexpr(30.0)


@triton.jit
def _store_exp(x, tile_ptr, i, mask, c, tile, lane_max, lane_sum, stop, WIDE: tl.constexpr, ACC: tl.constexpr):
    """Store E of a tile, except in lanes that have stopped; return the lanes' maxima, sums and where they stopped."""
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
    """Return E relative to row_max of a tile [REPS, LANES, WIDE], of which some lanes hold an E already."""
    LANES: tl.constexpr = is_exp.shape[0]
    x = tl.reshape(x.to(ACC), [x.shape[0] // (LANES * WIDE), LANES, WIDE])
    return tl.where(is_exp[None, :, None], x * factor, tl.exp2((x - row_max) * LOG2E))


@triton.jit
def _again(tile_ptr, i, wide, c, row_max, stop, WIDE: tl.constexpr, ACC: tl.constexpr):
    """Store E relative to row_max over a row that holds E relative to c until its lanes stopped; return the sum."""
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


@triton.jit(do_not_specialize_on_alignment=_launch.PER_ROW, do_not_specialize=["stride_n", "V"])
def _linear_nll_rows_once(
    logits_ptr, target_ptr, scale_ptr, nll_ptr, max_ptr, log_sum_ptr, factor_ptr, stride_n, V,
    BLOCK_V: tl.constexpr, THREADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    LANES: tl.constexpr = min(THREADS, BLOCK_V // WIDE)
    n = tl.program_id(0)
    out = (nll_ptr, max_ptr, log_sum_ptr, None, None, None, None)
    y64 = tl.load(target_ptr + n)
    scale = tl.load(scale_ptr + n).to(ACC)
    row = n.to(tl.int64) * stride_n
    if y64 != IGNORE:
        at, first, wide = _math.wide_columns(row, 0, V, WIDE)
        tile_ptr = logits_ptr + at
        i = tl.arange(0, BLOCK_V)
        y = _math.column_of(y64, V)
        target_logit = _math.load_target_logit(logits_ptr + row, y64, V, (None, None, None), ACC)
        v, there = _math.ragged_columns(0, V, first, wide, WIDE)
        ragged = tl.load(logits_ptr + row + v, mask=there, other=-float("inf")).to(ACC)
        nearest = tl.load(tile_ptr + i, mask=i < wide, other=-float("inf")).to(ACC)
        c = _math.finite(tl.maximum(tl.max(nearest, 0), tl.max(ragged, 0)))
        tl.debug_barrier()  # all threads must load what they need of the row as it was before a store
        lane_max = tl.full([LANES], -float("inf"), ACC)
        lane_sum = tl.zeros([LANES], ACC)
        stop = tl.zeros([LANES], tl.int32)
        whole = wide // BLOCK_V * BLOCK_V
        for tile in range(0, whole, BLOCK_V):
            x = tl.load(tile_ptr + tile + i, eviction_policy="evict_first")
            lane_max, lane_sum, stop = _store_exp(
                x, tile_ptr + tile, i, None, c, tile, lane_max, lane_sum, stop, WIDE, ACC
            )
        if whole < wide:
            rest = i < wide - whole
            last = tl.load(tile_ptr + whole + i, mask=rest, other=-float("inf"), eviction_policy="evict_first")
            lane_max, lane_sum, stop = _store_exp(
                last, tile_ptr + whole, i, rest, c, whole, lane_max, lane_sum, stop, WIDE, ACC
            )
        row_max = _math.finite(tl.maximum(tl.max(lane_max, 0), tl.max(ragged, 0)))
        row_sum = tl.sum(lane_sum, 0)
        if row_max > c + LIMIT:
            row_sum = _again(tile_ptr, i, wide, c, row_max, stop, WIDE, ACC)
            c = row_max
        e = tl.exp2((ragged - c) * LOG2E)
        row_sum += tl.sum(e, 0)
        tl.store(logits_ptr + row + v, e.to(logits_ptr.dtype.element_ty), mask=there)
        log_sum = tl.log(row_sum)
        nll = tl.where(row_sum == 0, float("nan"), (c - target_logit) + log_sum)
        token_nll.store_row(n, nll, row_max, log_sum + (c - row_max), False, IGNORE, out, False, False)
        tl.store(factor_ptr + n, tl.where(scale == 0, 0.0, tl.where(y >= 0, scale / row_sum, float("nan"))))
        tl.debug_barrier()  # the column of the target must hold its E before the next store
        if scale == 0:
            _zero_row(logits_ptr, row, V, BLOCK_V)
        else:
            at_target = tl.exp2((target_logit - c) * LOG2E) - row_sum
            tl.store(logits_ptr + row + y, at_target.to(logits_ptr.dtype.element_ty), mask=y >= 0)
    else:
        token_nll.store_row(n, 0.0, 0.0, 0.0, False, IGNORE, out, False, False)
        tl.store(factor_ptr + n, 0.0)
        _zero_row(logits_ptr, row, V, BLOCK_V)


def nll_and_factor_(logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor) -> tuple[NLL, torch.Tensor]:
    """Return the NLL and the factors of rows ``[C, V]``, which then hold E: the gradient is the factor times E."""
    C, V = logits.shape
    out = token_nll.new_rows(C, torch.float32, logits.device, False, False)
    factor = torch.empty_like(out[0])
    block = max(64, min(16384 // logits.element_size(), triton.next_power_of_2(V)))
    warps = _tiles.at_most_a_thread_a_column(block * logits.element_size() // 2048, block)
    tile = _tiles.Tile(block, warps)
    _linear_nll_rows_once[(C,)](
        logits, targets, scale, *out[:3], factor, logits.stride(0), V, ACC=tl.float32, **_launch.tile_options(tile)
    )
    return out, factor
