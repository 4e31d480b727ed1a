"""What the GPUs offer that kernels are compiled for: limits of a multiprocessor, and rates of those that are sold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor or compute unit offers: 32-bit registers, shared memory in bytes, warps, programs.

    Attributes:
        grid: most programs along the first dimension; where ``grid_threads`` is given, most threads.
    """

    backend: str
    arch: int | str
    warp_size: int
    registers: int
    shared: int
    warps: int
    register_unit: int
    programs: int = 32

    def gpu_target(self) -> GPUTarget:
        """The target as Triton names it."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.warp_size)


# CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; AMD CDNA 3 ISA guide and white
# paper (gfx942: 4 SIMDs of 512 vector registers a lane and 8 waves each).
TARGETS = {
    "sm_80": Limits("cuda", 80, 32, 65536, 163 * 1024, 64, 8),
    "sm_90": Limits("cuda", 90, 32, 65536, 227 * 1024, 64, 8),
    "sm_100": Limits("cuda", 100, 32, 65536, 227 * 1024, 64, 8),
    "gfx942": Limits("hip", "gfx942", 64, 4 * 512 * 64, 64 * 1024, 32, 8),
}
