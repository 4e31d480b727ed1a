"""What the GPUs offer that kernels are compiled for: limits of a multiprocessor, and rates of those that are sold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


@dataclass(frozen=True)
class Limits:
    """What a kind of GPU offers.

    Attributes:
        backend: ``cuda`` or ``hip``.
        arch: as Triton names it.
        warp_size: threads of a warp.
        registers: 32-bit registers of a multiprocessor (compute unit).
        shared: its shared memory in bytes.
        warps: how many it holds.
        programs: how many it holds.
        threads_of_grid: most threads that a launch may have along its first dimension; None where only programs count.
    """

    backend: str
    arch: int | str
    warp_size: int
    registers: int
    shared: int
    warps: int
    programs: int
    threads_of_grid: int | None = None

    def gpu_target(self) -> GPUTarget:
        """The target as Triton names it."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.warp_size)


# CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; AMD CDNA 3 ISA guide and white
# paper (gfx942: 4 SIMDs of 512 vector registers a lane and 8 waves each); HIP documentation of hipModuleLaunchKernel.
TARGETS = {
    "sm_80": Limits("cuda", 80, 32, 65536, 163 * 1024, 64, 32),
    "sm_90": Limits("cuda", 90, 32, 65536, 227 * 1024, 64, 32),
    "sm_100": Limits("cuda", 100, 32, 65536, 227 * 1024, 64, 32),
    "gfx942": Limits("hip", "gfx942", 64, 4 * 512 * 64, 64 * 1024, 32, 32, 2**32 - 1),
}
# Programs along the three dimensions of a launch.
GRID = (2**31 - 1, 65535, 65535)
REGISTER_UNIT = 8  # registers of a thread are given out by the 8


@dataclass(frozen=True)
class GPU:
    """One that is sold, at the clock and the copy bandwidth (bytes read and written) that it keeps up.

    A multiprocessor issues for 4 warps of 32 threads a clock, on its ALU pipes for half as many, on that
    for special functions for an eighth.
    """

    target: str
    multiprocessors: int
    clock: float
    copy_bandwidth: float
    latency: float = 720e-9  # of a load from memory while many are under way, assumed
    l2_latency: float = 280e-9  # of one that finds its bytes in the L2 cache, assumed

    def slots(self, nbytes: float) -> float:
        """Issue slots of a thread in the time that ``nbytes`` take at the bandwidth of a copy."""
        return self.multiprocessors * 4 * 32 * self.clock * nbytes / self.copy_bandwidth

    def bytes_in_flight(self) -> float:
        """Bytes that a multiprocessor must have on their way to keep up the bandwidth of a copy."""
        return self.copy_bandwidth * self.latency / self.multiprocessors


# Copy bandwidths of H100 and H200 measured, that of A100 (80 GB) and the clocks taken from others' reports.
GPUS = {
    "A100": GPU("sm_80", 108, 1.41e9, 1.77e12),
    "H100": GPU("sm_90", 132, 1.75e9, 3.0e12),
    "H200": GPU("sm_90", 132, 1.83e9, 4.3e12),
}
