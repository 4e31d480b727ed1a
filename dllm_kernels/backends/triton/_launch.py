"""Shared code of launchers: strides, alignment, launch options, arguments to specialise on.

Triton launches on the current device. Callers make it that of the tensors: ``opaque`` (``_graph/_opaque.py``) does so
for all launchers below it.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from dllm_kernels._checks._backend import interpreting
from dllm_kernels.backends.triton._interpreter import fix_indices
from dllm_kernels.backends.triton._tiles import Tile

# Launch option: contract products and sums into fused multiply-adds, which are more exact here. Passed at every launch,
# because Triton is about to change the default and warns if the option is missing.
FUSED = {"enable_fp_fusion": True}
# Pointers of kernels over rows of logits that are not specialised on alignment, because a slice or a chunk may begin
# anywhere. They hold one value per row, K values per row, or one per call.
PER_ROW = [
    "target_ptr", "weight_ptr", "scale_ptr", "factor_ptr", "max_ptr", "log_sum_ptr", "ids_ptr", "active_ptr", "a_ptr",
    "b_ptr", "row_ptr", "mean_acceptance_ptr", "value_ptr", "acceptance_ptr", "agree_ptr", "stats_ptr", "hot_ptr",
]  # fmt: skip
# Arguments that are not specialised on at all, so that another shape or transform does not compile another kernel.
SIZES = [
    "L", "stride_b", "stride_l", "teacher_L", "teacher_stride_b", "teacher_stride_l", "out_stride_b", "out_stride_l",
    "V", "K", "R", "logit_scale", "inv_softcap", "skip_id", "teacher_logit_scale", "teacher_inv_softcap",
    "teacher_skip_id", "TILES", "SPLITS",
]  # fmt: skip
# The transform of the logits (``_transform.py``) among them.
TRANSFORM = ["logit_scale", "inv_softcap", "skip_id"]
# Evaluated at import, like the decision of ``triton.jit``, which is made when it decorates a kernel.
INTERPRETED = interpreting()
if INTERPRETED:
    fix_indices()


def threads(num_warps: int) -> int:
    """Return the number of threads of a program; a warp has 32 threads or, on AMD's larger GPUs, 64."""
    return 32 * num_warps if INTERPRETED else num_warps * int(_current_target().warp_size)


def on_nvidia() -> bool:
    """Return True if kernels are compiled for an NVIDIA GPU."""
    return not INTERPRETED and bool(_current_target().backend == "cuda")


def alone_on_a_multiprocessor(num_warps: int) -> dict[str, int]:
    """Launch options for one 16-warp program, or two of 8 warps, that occupy an SM alone: raise the register limit.

    Otherwise ptxas saves registers for one more program: it delays loads until their use, or spills. A smaller program,
    for a short row, may have more registers per thread than this limit.
    """
    return {"maxnreg": 128} if num_warps >= 8 and on_nvidia() else {}


def _current_target() -> Any:
    return _target(triton.runtime.driver.active.get_current_device())


@functools.cache
def _target(device: Hashable) -> Any:
    """Return Triton's target of ``device``, which must be the current device; cached per device."""
    return triton.runtime.driver.active.get_current_target()


def tile_options(tile: Tile) -> dict[str, Any]:
    """Return the arguments and launch options of a kernel over rows of logits that follow from its tile."""
    return {"BLOCK_V": tile.block_v, "THREADS": threads(tile.num_warps), "num_warps": tile.num_warps, **FUSED}


def acc(dtype: torch.dtype) -> tl.dtype:
    """Convert an accumulation dtype to Triton's type."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def is_flat(t: torch.Tensor) -> bool:
    """Return True if all rows of ``[B, L, V]`` are at equal distances."""
    return t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1)


def strides(t: torch.Tensor, flat: bool | None = None) -> tuple[int | None, int, int]:
    """Return (L, stride_b, stride_l) for ``row_offset``; ``flat``: result of :func:`is_flat`, None: compute it."""
    flat = is_flat(t) if flat is None else flat
    return (None, 0, t.stride(1)) if flat else (t.shape[1], t.stride(0), t.stride(1))


def strides_of_both(t: torch.Tensor, out: torch.Tensor) -> tuple[tuple[int | None, int, int, int, int], bool]:
    """Return ((L, stride_b, stride_l, out_stride_b, out_stride_l), True if both tensors have equal strides)."""
    flat = is_flat(t) and is_flat(out)
    t_strides, out_strides = strides(t, flat), strides(out, flat)
    return (*t_strides, *out_strides[1:]), t_strides == out_strides


def share(V: int, tile: Tile) -> tuple[int, int]:
    """Return (tiles of a row per program, programs per row)."""
    tiles = triton.cdiv(triton.cdiv(V, tile.splits), tile.block_v)
    return tiles, triton.cdiv(V, tiles * tile.block_v)


def aligned(*tensors: torch.Tensor | None) -> bool:
    """Return True if all rows of the given ``[B, L, V]`` tensors begin at a multiple of 16 bytes."""
    present = [t for t in tensors if t is not None]
    distances = [stride * t.element_size() for t in present for stride in t.stride()[1 if is_flat(t) else 0 : 2]]
    return all(number % 16 == 0 for number in (*distances, *(t.data_ptr() for t in present)))
