"""Compile every kernel that public functions launch, without a GPU, and report its static roofline.

Registers, spills and shared memory come from ``cuobjdump --dump-resource-usage`` (it ships with Triton) for NVIDIA and
from the metadata of the code object for AMD. Occupancy is theoretical: the number of programs that fit on a
multiprocessor (compute unit) by registers, shared memory, warps and number of programs.

For sm_80 and sm_90, the instructions of each loop over memory are counted as well (``machine_code``), or those of the
whole kernel if it has no such loop. The counts are issue slots and ALU slots per element, and loads in flight per
thread. With the number of resident programs, the bytes in flight per multiprocessor follow. From the rates of a GPU
(``gpus``) follow five shares of its copy bandwidth, and the lowest is the bound:

    issue     slots available in the time of the element's bytes / slots needed
    ALU       as issue, for the pipe of integer arithmetic, comparisons and selections, which has half the slots
    MUFU      as issue, for exponentials, logarithms, reciprocals and conversions, which have an eighth of the slots
    latency   bytes per iteration times resident warps / (waits of an iteration, one latency each + its instructions)
    memory    1: the kernel moves its bytes at copy bandwidth

An iteration skips all code that it can skip without moving fewer elements. The skipped code, such as a tile that holds
a requested id, is listed separately as ``rare``. ``tail`` counts the instructions of a program outside the loops that
read or write memory: prologue, ragged ends, reductions. Merge kernels consist of a tail only.

A kernel that reads a row to its end, once or twice, before it writes any of it has phases. If one program fills a
multiprocessor, no other program runs while a phase waits, so bandwidth that a phase does not use is lost. ``phases`` is
the remaining share of the copy bandwidth. It is given for two assumptions: every pass after the first finds all of its
bytes in the L2 cache, or 90 % of them. In this model, the warps of each scheduler queue for issue and for the
scheduler's share of the bandwidth, and wait for the latency in between. The model is the mean value analysis of a
closed network. It assumes varying service times, so the result tends to be too low. An iteration waits for the slowest
of its loads. One miss in ten therefore delays every third iteration of four loads.

**The model ignores** the time an instruction waits for the result of another instruction, all other pipes,
predicated-off instructions (they are counted), L2 hits outside of ``phases``, uneven tails, and clock throttling. It is
an upper bound. Its purpose is to compare two kernels and to find the limit of one. Kernels that search keys in memory
have no roofline, because the number of reads depends on the data.

For a kernel that draws random bits, the instructions per draw are counted. They are all instructions of a thread
divided by the number of positions for which it draws. The longest path is counted or, if keys lie in memory, the loop
over tiles that draws and writes them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.record import markdown, size
from tools import machine_code
from tools.gpus import GPU, GPUS, REGISTER_UNIT, TARGETS, Limits

if TYPE_CHECKING:
    from tools.machine_code import Instruction
    from tools.mock_gpu import Specimen

CALLS = ("real", "odd")
COUNTED = tuple(dict.fromkeys(gpu.target for gpu in GPUS.values()))


@dataclass(frozen=True)
class Roof:
    """Limits of one pass on one GPU: shares of the copy bandwidth, and the name of the lowest."""

    issue: float
    alu: float
    mufu: float
    latency: float
    bound: str
    share: float


@dataclass(frozen=True)
class Pass:
    """A loop over memory, or a whole kernel without such a loop.

    Attributes:
        slots: issue slots per element.
        alu_slots: issue slots on the ALU pipe.
        xu_slots: issue slots on the pipe for special functions.
        rare_slots: additional slots of an iteration that does not skip the rare code.
        bytes: bytes moved per element.
        load_width: bytes per load.
        loads_in_flight: loads in flight per thread.
        bytes_in_flight: bytes in flight per multiprocessor.
        roofs: limits by GPU.
    """

    slots: float
    alu_slots: float
    xu_slots: float
    rare_slots: float
    bytes: float
    load_width: int
    loads_in_flight: int
    bytes_in_flight: int
    roofs: dict[str, Roof]


@dataclass(frozen=True)
class Report:
    """One kernel on one target.

    Attributes:
        kernel: name of the specimen.
        function: name of the kernel.
        dtype: Triton's name of the dtype of the data.
        constants: compile-time numbers and flags.
        target: ``sm_80`` and so on.
        registers: vector registers per thread.
        spills: stack bytes per thread (NVIDIA), or spilled registers plus scratch bytes (AMD); it should be 0.
        shared: bytes of shared memory per program.
        widest_access: bytes of the widest global load or store of a thread.
        num_warps: warps per program.
        programs: number of programs that fit on a multiprocessor.
        occupancy: theoretical share of the warps that a multiprocessor can hold.
        passes: the static roofline, if available.
        tail: issue slots of a thread outside its loops over memory; None if not counted.
        phases: GPU -> shares of its copy bandwidth if phases do not overlap, by share of L2 hits.
        slots_a_draw: issue slots per random draw; None if nothing is drawn, or if not counted.
    """

    kernel: str
    function: str
    dtype: str
    constants: dict[str, bool | int]
    target: str
    registers: int
    spills: int
    shared: int
    widest_access: int
    num_warps: int
    programs: int
    occupancy: float
    passes: list[Pass] = field(default_factory=list)
    tail: int | None = None
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    slots_a_draw: float | None = None


def report(name: str, specimen: Specimen, target: str, roofline: bool = True) -> Report:
    """Compile one specimen for one target and analyse the result; disassembling takes as long as compiling."""
    limits = TARGETS[target]
    compiled = specimen.compile(target)
    asm, shared, num_warps = compiled.asm, int(compiled.metadata.shared), int(compiled.metadata.num_warps)
    registers, spills = _nvidia_resources(asm["cubin"]) if "cubin" in asm else _amd_resources(asm["amdgcn"])
    programs = _programs(limits, registers, shared, num_warps)
    code = machine_code.disassemble(asm["cubin"]) if roofline and target in COUNTED else []
    return Report(
        kernel=name,
        function=specimen.kernel,
        dtype=specimen.dtype,
        constants={k: v for k, v in specimen.constants.items() if isinstance(v, int)},
        target=target,
        registers=registers,
        spills=spills,
        shared=shared,
        widest_access=_widest_access(asm),
        num_warps=num_warps,
        programs=programs,
        occupancy=programs * num_warps / limits.warps,
        passes=_passes(specimen, code, target, num_warps, programs) if code else [],
        tail=machine_code.tail(code) if code else None,
        phases=_phases(machine_code.passes(code), target, num_warps) if programs == 1 else {},
        slots_a_draw=_slots_a_draw(specimen, code, num_warps) if code else None,
    )


def _nvidia_resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers, stack bytes) of the only kernel in a cubin."""
    text = machine_code.cuobjdump("--dump-resource-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no resources: {text!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _amd_resources(assembly: str) -> tuple[int, int]:
    """Return (vector registers, spilled registers + scratch bytes) from the metadata of an AMD code object."""

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        if found is None:
            raise RuntimeError(f"the AMD metadata has no {name}")
        return int(found.group(1))

    spills = number("vgpr_spill_count") + number("sgpr_spill_count") + number("private_segment_fixed_size")
    return number("vgpr_count"), spills


def _widest_access(asm: dict[str, Any]) -> int:
    """Return the bytes of the widest global load or store of a thread."""
    if "ptx" in asm:
        found = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", asm["ptx"])
        return max((int(v or 1) * int(bits) // 8 for v, bits in found), default=0)
    words = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2, "byte": 1, "ubyte": 1}
    found = re.findall(r"(?:global|buffer)_(?:load|store)_([a-z0-9]+)", asm["amdgcn"])
    return max((words.get(name, 0) for name in found), default=0)


def _programs(limits: Limits, registers: int, shared: int, num_warps: int) -> int:
    """Return the number of programs that fit on a multiprocessor."""
    per_warp = -(-max(registers, 1) // REGISTER_UNIT) * REGISTER_UNIT * limits.warp_size
    return min(
        limits.registers // per_warp // num_warps,
        limits.warps // num_warps,
        limits.shared // shared if shared else limits.programs,
        limits.programs,
    )


def _slots_a_draw(specimen: Specimen, code: Sequence[Instruction], num_warps: int) -> float | None:
    """Return the issue slots per draw of a kernel that draws random bits."""
    constants = specimen.constants
    if "seed_ptr" not in specimen.types or "BLOCK" not in constants:
        return None
    draws: float = max(1.0, constants.get("R", 1) * constants["BLOCK"] / (32 * num_warps))
    in_memory = "key_ptr" in specimen.types
    return (machine_code.slots_of_products(code) if in_memory else machine_code.whole(code).slots) / draws


def _passes(specimen: Specimen, code: Sequence[Instruction], target: str, num_warps: int, programs: int) -> list[Pass]:
    """Return the static roofline of each loop over memory, or of the kernel."""
    constants, threads = specimen.constants, 32 * num_warps
    if "key_ptr" in specimen.types or specimen.kernel.endswith("_merge"):
        return []
    itemsize = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}.get(specimen.dtype)
    loops = machine_code.passes(code)
    if loops and itemsize:
        return [_pass(cost, cost.loaded / itemsize, target, num_warps, programs) for cost in loops]
    tile = constants.get("R", 1) * constants.get("BLOCK_V", constants.get("BLOCK", 0))
    return [_pass(machine_code.whole(code), max(1, tile / threads), target, num_warps, programs)]


def _pass(cost: machine_code.Cost, elements: float, target: str, num_warps: int, programs: int) -> Pass:
    return Pass(
        slots=cost.slots / elements,
        alu_slots=cost.alu_slots / elements,
        xu_slots=cost.xu_slots / elements,
        rare_slots=cost.rare_slots / elements,
        bytes=(cost.loaded + cost.stored) / elements,
        load_width=cost.load_width,
        loads_in_flight=cost.in_flight,
        bytes_in_flight=cost.in_flight * cost.load_width * 32 * num_warps * programs,
        roofs={name: _roof(cost, name, num_warps * programs) for name, gpu in GPUS.items() if gpu.target == target},
    )


def _roof(cost: machine_code.Cost, name: str, warps: int) -> Roof:
    """Return the shares of the copy bandwidth that the module docstring defines."""
    gpu, moved = GPUS[name], cost.loaded + cost.stored
    slots = gpu.slots(moved)
    turn = cost.waits * gpu.latency * gpu.clock + max(cost.slots, 2 * cost.alu_slots)
    shares = {
        "issue": slots / cost.slots,
        "ALU": slots / 2 / max(cost.alu_slots, 1),
        "MUFU": slots / 8 / max(cost.xu_slots, 1),
        "latency": warps * 32 * moved / turn * gpu.multiprocessors * gpu.clock / gpu.copy_bandwidth,
        "memory": 1.0,
    }
    bound = min(shares, key=lambda share: (shares[share], share != "memory"))
    return Roof(shares["issue"], shares["ALU"], shares["MUFU"], shares["latency"], bound, shares[bound])


HITS = (1.0, 0.9)


def _phases(passes: Sequence[machine_code.Cost], target: str, num_warps: int) -> dict[str, dict[str, float]]:
    """Return GPU -> share of L2 hits -> share of the copy bandwidth; empty for a kernel that writes while it reads."""
    if len(passes) < 2 or not passes[-1].stored or any(one.stored for one in passes[:-1]):
        return {}
    return {
        name: {f"{hits:.0%}": _share_of_phases(passes, gpu, num_warps, hits) for hits in HITS}
        for name, gpu in GPUS.items()
        if gpu.target == target
    }


def _share_of_phases(passes: Sequence[machine_code.Cost], gpu: GPU, num_warps: int, hits: float) -> float:
    """Simulate all passes over a row in sequence, one program per multiprocessor; the first pass has no L2 hits."""
    schedulers = 4
    warps = max(1, num_warps // schedulers)
    clocks_a_byte = 32 * gpu.multiprocessors * schedulers * gpu.clock / gpu.copy_bandwidth  # for a whole warp
    far, near = gpu.latency * gpu.clock, gpu.l2_latency * gpu.clock
    clocks = 0.0  # per byte of a row
    for number, cost in enumerate(passes):
        found = hits if number else 0.0
        missed = 1 - found ** (cost.loaded / cost.load_width)  # share of iterations that wait for memory
        moved = cost.stored + (1 - found) * cost.loaded
        waiting = cost.waits * (missed * far + (1 - missed) * near)
        clocks += _clocks_a_turn(cost.slots, clocks_a_byte * moved, waiting, warps) / cost.loaded
    return clocks_a_byte * (1 + passes[-1].stored / passes[-1].loaded) / clocks


def _clocks_a_turn(issue: float, memory: float, waiting: float, warps: int) -> float:
    """Return the clocks between the ends of two iterations; each iteration of each warp queues twice and waits once."""
    queues = [0.0, 0.0]
    between = 0.0
    for number in range(1, warps + 1):
        stays = [issue * (1 + queues[0]), memory * (1 + queues[1])]
        between = (sum(stays) + waiting) / number
        queues = [stay / between for stay in stays]
    return between


def inspect(
    targets: Iterable[str] = TARGETS,
    names: Iterable[str] | None = None,
    calls: str = "real",
    counted: Iterable[str] | None = None,
) -> list[Report]:
    """Compile and report.

    Args:
        targets: names out of ``TARGETS``.
        names: substrings of kernel names to select; None: all.
        calls: the calls of ``tools.launches`` to use: "real" or "odd".
        counted: substrings of the names of kernels whose instructions are counted; None: all.

    Returns:
        One report per kernel and target.
    """
    from tools import launches  # imports the kernels

    wanted = []
    for target in targets:
        for name, specimen in launches.specimens(target, getattr(launches, calls)).items():
            if _named(name, names):
                wanted.append((name, specimen, target, _named(name, counted)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Triton's passes and tools release the GIL
        return list(pool.map(lambda w: report(*w), wanted))


def _named(name: str, parts: Iterable[str] | None) -> bool:
    return parts is None or any(part in name for part in parts)


def _rows(reports: Iterable[Report]) -> list[dict[str, str]]:
    rows = []
    for r in reports:
        resources = {
            "kernel": r.kernel, "target": r.target, "registers": str(r.registers), "spills": str(r.spills),
            "shared": str(r.shared), "access": str(r.widest_access), "warps": str(r.num_warps),
            "programs": str(r.programs), "occupancy": f"{r.occupancy:.0%}",
        }  # fmt: skip
        if r.tail is not None:
            resources["tail"] = str(r.tail)
        if r.slots_a_draw is not None:
            resources["slots a draw"] = f"{r.slots_a_draw:.0f}"
        phases = {"bound": ", ".join(f"{gpu} phases {_percents(shares)}" for gpu, shares in r.phases.items())}
        rows += [resources | _roofline_cells(p) | (phases if r.phases else {}) for p in r.passes] or [resources]
    return rows


def _percents(shares: dict[str, float]) -> str:
    return " / ".join(f"{share:.0%}" for share in shares.values())


def _roofline_cells(p: Pass) -> dict[str, str]:
    return {
        "slots": f"{p.slots:.2f}",
        "ALU": f"{p.alu_slots:.2f}",
        "MUFU": f"{p.xu_slots:.2f}",
        "rare": f"{p.rare_slots:.2f}",
        "bytes": f"{p.bytes:.3g}",
        "loads": f"{p.loads_in_flight} x {p.load_width}",
        "in flight": size(p.bytes_in_flight),
        "bound": ", ".join(f"{name} {roof.bound} {roof.share:.0%}" for name, roof in p.roofs.items()),
    }


def _print_tables(reports: list[Report]) -> None:
    print("Issue slots at copy bandwidth, for each bf16 logit that is read once:\n")
    budgets = [
        {
            "GPU": name,
            "slots": f"{gpu.slots(2):.1f}",
            "ALU": f"{gpu.slots(2) / 2:.1f}",
            "MUFU": f"{gpu.slots(2) / 8:.1f}",
            "in flight": size(gpu.bytes_in_flight()),
            "copy": f"{gpu.copy_bandwidth / 1e12:.3g} TB/s",
        }
        for name, gpu in GPUS.items()
    ]
    print(markdown(budgets) + "\n\nSlots, ALU slots and bytes are of one element.\n\n" + markdown(_rows(reports)))


def main(argv: list[str]) -> int:
    """Print the tables; return 1 if a kernel spills, 2 if no kernel was selected."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--kernel", action="append", help="select kernels whose name contains this")
    parser.add_argument(
        "--calls", choices=CALLS, default="real", help="calls that launch the kernels: training or odd sizes"
    )
    count = parser.add_mutually_exclusive_group()
    count.add_argument("--no-roofline", action="store_true", help="do not count the machine code, which is faster")
    count.add_argument("--roofline", action="append", help="count only the kernels whose name contains this")
    parser.add_argument("--json", action="store_true", help="print the records as JSON instead of the tables")
    parser.add_argument("--out", type=Path, help="also write the records as JSON")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 is set, so no kernel is compiled: unset it", file=sys.stderr)
        return 2
    reports = inspect(args.target or list(TARGETS), args.kernel, args.calls, [] if args.no_roofline else args.roofline)
    if not reports:
        print("no kernel name contains these words", file=sys.stderr)
        return 2
    records = json.dumps([asdict(r) for r in reports], indent=1)
    if args.json:
        print(records)
    else:
        _print_tables(reports)
    if args.out:
        args.out.write_text(records)
    spilling = [f"{r.kernel} on {r.target} ({r.spills} bytes)" for r in reports if r.spills]
    if spilling:
        print(f"these kernels spill: {', '.join(spilling)}", file=sys.stderr)
    return 1 if spilling else 0
