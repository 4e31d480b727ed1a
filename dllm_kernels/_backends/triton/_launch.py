"""Launch on the GPU that holds the tensors, whichever is current: Triton launches on the current one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import triton

from dllm_kernels._backends._backend import interpreting

Launcher = TypeVar("Launcher", bound=Callable[..., Any])

# Evaluated once, because ``triton.jit`` also decides when it decorates a kernel.
INTERPRETED = interpreting()


def on_its_device(launcher: Launcher) -> Launcher:
    """Make the device of the first argument, a tensor, the current one during a launcher; nothing on CPU."""

    @functools.wraps(launcher)
    def launch(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(tensor):
            return launcher(tensor, *args, **kwargs)

    return launch  # type: ignore[return-value]


def threads(num_warps: int) -> int:
    """Threads of a program: a warp has 32 of them or, on AMD's larger GPUs, 64."""
    return 32 * num_warps if INTERPRETED else num_warps * int(_current_target().warp_size)


def on_nvidia() -> bool:
    """Whether kernels are compiled for a GPU of NVIDIA's."""
    return not INTERPRETED and bool(_current_target().backend == "cuda")


def alone_on_a_multiprocessor() -> dict[str, int]:
    """Launch options for one 16-warp program, or two of 8 warps, that occupy an SM alone: raise the register limit.

    Otherwise ptxas saves registers for one more program: it moves loads to where they are used, or spills.
    """
    return {"maxnreg": 128} if on_nvidia() else {}


def _current_target() -> Any:
    return _target(triton.runtime.driver.active.get_current_device())


@functools.cache
def _target(device: Hashable) -> Any:
    """Return Triton's target of the current device, which is ``device``; looked up once per device."""
    return triton.runtime.driver.active.get_current_target()
