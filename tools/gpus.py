"""Properties of the GPUs that kernels are compiled for: limits of a multiprocessor, and rates of products on sale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


@dataclass(frozen=True)
class Limits:
    """Limits of a GPU architecture.

    Attributes:
        backend: ``cuda`` or ``hip``.
        arch: Triton's name of the architecture.
        warp_size: threads of a warp.
        registers: 32-bit registers of a multiprocessor (compute unit).
        shared: shared memory of a multiprocessor in bytes.
        warps: maximum number of resident warps per multiprocessor.
        programs: maximum number of resident programs per multiprocessor.
        threads_of_grid: maximum number of threads along the first dimension of a launch; None if only the number of
            programs is limited.
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
        """Return the target as a Triton object."""
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
# Maximum number of programs along the three dimensions of a launch.
GRID = (2**31 - 1, 65535, 65535)
REGISTER_UNIT = 8  # registers of a thread are allocated in units of 8


@dataclass(frozen=True)
class GPU:
    """A GPU product with its sustained clock and copy bandwidth (bytes read plus bytes written).

    Per clock, a multiprocessor issues for 4 warps of 32 threads. Its ALU pipes accept half as many instructions, and
    its pipe for special functions an eighth.
    """

    target: str
    multiprocessors: int
    clock: float
    copy_bandwidth: float
    latency: float = 720e-9  # of a load from memory with many loads in flight; assumed
    l2_latency: float = 280e-9  # of a load that hits the L2 cache; assumed

    def slots(self, nbytes: float) -> float:
        """Return the issue slots of a thread in the time that ``nbytes`` take at copy bandwidth."""
        return self.multiprocessors * 4 * 32 * self.clock * nbytes / self.copy_bandwidth

    def bytes_in_flight(self) -> float:
        """Return the bytes that a multiprocessor must have in flight to sustain copy bandwidth."""
        return self.copy_bandwidth * self.latency / self.multiprocessors


# The copy bandwidths of H100 and H200 were measured. The bandwidth of A100 (80 GB) and the clocks are from reports of
# others.
GPUS = {
    "A100": GPU("sm_80", 108, 1.41e9, 1.77e12),
    "H100": GPU("sm_90", 132, 1.75e9, 3.0e12),
    "H200": GPU("sm_90", 132, 1.83e9, 4.3e12),
}
