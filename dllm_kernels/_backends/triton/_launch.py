"""Launch on the GPU that holds the tensors, whichever is current: Triton launches on the current one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton

Launcher = TypeVar("Launcher", bound=Callable[..., Any])


def on_its_device(launcher: Launcher) -> Launcher:
    """Make the device of the first argument, a tensor, the current one during a launcher; nothing on CPU."""

    @functools.wraps(launcher)
    def launch(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(tensor):
            return launcher(tensor, *args, **kwargs)

    return launch  # type: ignore[return-value]


def threads(num_warps: int) -> int:
    """Threads of a program: a warp has 32 of them or, on AMD's larger GPUs, 64."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return 32 * num_warps
    return num_warps * int(triton.runtime.driver.active.get_current_target().warp_size)


def on_nvidia() -> bool:
    """Whether kernels are compiled for a GPU of NVIDIA's."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return False
    return bool(triton.runtime.driver.active.get_current_target().backend == "cuda")


def alone_on_a_multiprocessor() -> dict[str, int]:
    """Launch options for one 16-warp program, or two of 8 warps, that occupy an SM alone: raise the register limit.

    Otherwise ptxas saves registers for one more program: it moves loads to where they are used, or spills.
    """
    return {"maxnreg": 128} if on_nvidia() else {}
