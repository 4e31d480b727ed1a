"""Compile every kernel at its real tiles for GPUs that need not be here, and report what the compiler made of it.

Registers, spills and shared memory come from ``cuobjdump --dump-resource-usage`` (it ships with Triton) for NVIDIA and
from the code object's metadata for AMD. Occupancy is the theoretical one: how many of the warps that a multiprocessor
(compute unit) can hold fit beside each other, by registers, shared memory and warps.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Limits:
    """What one multiprocessor or compute unit offers: 32-bit registers, shared memory in bytes, warps."""

    backend: str
    arch: int | str
    warp_size: int
    registers: int
    shared: int
    warps: int
    register_unit: int


# CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"; AMD CDNA 3 ISA guide and white
# paper (gfx942: 4 SIMDs of 512 vector registers a lane and 8 waves each).
TARGETS = {
    "sm_80": Limits("cuda", 80, 32, 65536, 163 * 1024, 64, 8),
    "sm_90": Limits("cuda", 90, 32, 65536, 227 * 1024, 64, 8),
    "sm_100": Limits("cuda", 100, 32, 65536, 227 * 1024, 64, 8),
    "gfx942": Limits("hip", "gfx942", 64, 4 * 512 * 64, 64 * 1024, 32, 8),
}


@dataclass(frozen=True)
class Report:
    """One kernel on one target.

    Attributes:
        kernel: name of the specimen.
        target: ``sm_80`` and so on.
        registers: vector registers of a thread.
        spills: bytes of stack a thread (NVIDIA) or spilled registers and scratch bytes (AMD); 0 is the only good number.
        shared: bytes of shared memory a program.
        widest_access: bytes of the widest global load or store a thread issues.
        num_warps: warps a program.
        occupancy: theoretical share of the warps that a multiprocessor can hold.
    """

    kernel: str
    target: str
    registers: int
    spills: int
    shared: int
    widest_access: int
    num_warps: int
    occupancy: float


def specimens() -> list[Any]:
    """The specimens of every module in ``dllm_kernels.kernels`` that has some."""
    package = importlib.import_module("dllm_kernels.kernels")
    found: list[Any] = []
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("_"):
            found += importlib.import_module(f"dllm_kernels.kernels.{module.name}").specimens()
    return found


def compile_specimen(specimen: Any, limits: Limits) -> Any:
    """Compile one specimen for one target, as ``triton.compile`` would at its first launch there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = specimen.kernel.arg_names
    signature = {name: specimen.signature.get(name, "constexpr") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in specimen.divisible
    }
    source = ASTSource(specimen.kernel, signature, constexprs=specimen.constexprs, attrs=aligned)
    options = {
        "num_warps": specimen.num_warps,
        "num_stages": specimen.num_stages,
        "enable_fp_fusion": specimen.fp_fusion,
    }
    target = GPUTarget(limits.backend, limits.arch, limits.warp_size)
    return triton.compile(source, target=target, options=options)


def _nvidia_resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of the one kernel in a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no resources: {text!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _amd_resources(assembly: str) -> tuple[int, int]:
    """(vector registers, spilled registers + scratch bytes) from the metadata of an AMD code object."""

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        if found is None:
            raise RuntimeError(f"the AMD metadata has no {name}")
        return int(found.group(1))

    spills = field("vgpr_spill_count") + field("sgpr_spill_count") + field("private_segment_fixed_size")
    return field("vgpr_count"), spills


def _widest_access(asm: dict[str, Any]) -> int:
    """Bytes of the widest global load or store of a thread."""
    if "ptx" in asm:
        found = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", asm["ptx"])
        return max((int(v or 1) * int(bits) // 8 for v, bits in found), default=0)
    words = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2, "byte": 1, "ubyte": 1}
    found = re.findall(r"(?:global|buffer)_(?:load|store)_([a-z0-9]+)", asm["amdgcn"])
    return max((words.get(name, 0) for name in found), default=0)


def _occupancy(limits: Limits, registers: int, shared: int, num_warps: int) -> float:
    unit = limits.register_unit
    per_warp = -(-max(registers, 1) // unit) * unit * limits.warp_size
    programs = min(
        limits.registers // per_warp // num_warps,
        limits.warps // num_warps,
        limits.shared // shared if shared else limits.warps,
    )
    return programs * num_warps / limits.warps


def inspect(targets: list[str] | None = None, names: list[str] | None = None) -> list[dict[str, Any]]:
    """Compile and report.

    Args:
        targets: names out of ``TARGETS``; None: all.
        names: only specimens whose name contains one of these; None: all.

    Returns:
        One record per specimen and target, the fields of :class:`Report`.
    """
    records = []
    for specimen in specimens():
        if names is not None and not any(name in specimen.name for name in names):
            continue
        for target in targets or list(TARGETS):
            limits = TARGETS[target]
            compiled = compile_specimen(specimen, limits)
            asm = compiled.asm
            nvidia = limits.backend == "cuda"
            registers, spills = _nvidia_resources(asm["cubin"]) if nvidia else _amd_resources(asm["amdgcn"])
            shared = int(compiled.metadata.shared)
            occupancy = _occupancy(limits, registers, shared, specimen.num_warps)
            records.append(
                asdict(
                    Report(
                        specimen.name,
                        target,
                        registers,
                        spills,
                        shared,
                        _widest_access(asm),
                        specimen.num_warps,
                        occupancy,
                    )
                )
            )
    return records


def _print_table(records: list[dict[str, Any]]) -> None:
    print("| kernel | target | registers | spills | shared | widest access | warps | occupancy |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for r in records:
        print(
            f"| {r['kernel']} | {r['target']} | {r['registers']} | {r['spills']} | {r['shared']} | "
            f"{r['widest_access']} | {r['num_warps']} | {r['occupancy']:.0%} |"
        )


def main(argv: list[str]) -> int:
    """Print the table; returns 1 when a kernel spills."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks inspect", description=__doc__)
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--kernel", action="append", help="only kernels whose name contains this")
    parser.add_argument("--out", type=Path, help="also write the records as JSON")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 leaves nothing to compile: unset it", file=sys.stderr)
        return 2
    records = inspect(args.target, args.kernel)
    _print_table(records)
    if args.out:
        args.out.write_text(json.dumps(records, indent=1))
    spilling = [f"{r['kernel']} on {r['target']}" for r in records if r["spills"]]
    if spilling:
        print(f"these spill: {', '.join(spilling)}", file=sys.stderr)
    return 1 if spilling else 0
