"""Compile every kernel that public functions launch, for GPUs that need not be here, and report its static roofline.

Registers, spills and shared memory come from ``cuobjdump --dump-resource-usage`` (it ships with Triton) for NVIDIA and
from the code object's metadata for AMD. Occupancy is the theoretical one: how many programs fit on a multiprocessor
(compute unit) by registers, shared memory, warps and number.

For sm_80 and sm_90 the machine code is counted besides, each loop over memory (``machine_code``), or the whole kernel
where it has none: issue slots and ALU slots of an element, loads on their way at a time in a thread and, with the
programs that fit, bytes on their way in a multiprocessor. Beside the rates of a GPU (``gpus``) five shares of its copy
bandwidth follow, and the lowest is the bound:

    issue     slots that pass in the time of the element's bytes / slots that it takes
    ALU       the same for the pipe of integer arithmetic, comparisons and selections, which has half the slots
    MUFU      the same for exponentials, logarithms, reciprocals and conversions, which have an eighth of the slots
    latency   bytes of a turn, times the warps that fit / (waits of a turn, one latency each + its instructions)
    memory    1: the kernel moves what it must at the speed of a copy

A turn is one that jumps over what it can without moving fewer elements; what it jumps over (a tile that holds the id
which a row asks for) stands as ``rare`` beside it. ``tail`` is what a program issues outside the loops that read or
write memory: beginning, ragged ends, reductions; merges are nothing else.

A kernel that reads a row to its end, once or twice, before it writes any of it goes through phases. Where one program
fills a multiprocessor, nothing else runs in it while a phase is held up, and a share of the bandwidth that a phase does
not take is lost. ``phases`` is the share of the copy bandwidth that is left, if every reading after the first finds all
of its bytes in the L2 cache, or 90 % of them: each scheduler's warps queue for issue and for the scheduler's share of
the bandwidth, and wait out the latency in between (mean value analysis of a closed network: service times that vary,
hence rather too low than too high). A turn waits for the slowest of its loads, so that one miss in ten holds up every
third turn of four.

**What the model leaves out**: how long an instruction waits for the result of another one, all other pipes, predicated
instructions that do nothing (they count), hits in L2 but for the phases, uneven ends, clocks that sag. It is an upper
bound, made to tell which of two kernels is better and what holds one back. Kernels that search their keys in memory
read them as often as the data demand: they get no roofline.

Of a kernel that draws random bits the instructions a draw are counted, all that a thread issues divided by the
positions that it draws for: those of its longest way or, where keys lie in memory, of the loop over tiles that draws
and writes them.
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
    """What bounds one pass on one GPU: shares of its copy bandwidth, and the name of the lowest."""

    issue: float
    alu: float
    mufu: float
    latency: float
    bound: str
    share: float


@dataclass(frozen=True)
class Pass:
    """One loop over memory, or a whole kernel without one.

    Attributes:
        slots: issue slots an element.
        alu_slots: those on the ALU pipe.
        xu_slots: those on the pipe for special functions.
        rare_slots: what a turn issues besides if it does not jump over it.
        bytes: bytes moved an element.
        load_width: bytes of a load.
        loads_in_flight: loads of a thread on their way at a time.
        bytes_in_flight: bytes of a multiprocessor on their way at a time.
        roofs: by GPU.
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
        dtype: Triton's name for the type of what it works on.
        constants: compile-time numbers and flags.
        target: ``sm_80`` and so on.
        registers: vector registers of a thread.
        spills: bytes of stack a thread (NVIDIA) or spilled registers and scratch bytes (AMD); 0 is the only good
            number.
        shared: bytes of shared memory a program.
        widest_access: bytes of the widest global load or store a thread issues.
        num_warps: warps a program.
        programs: how many fit on a multiprocessor.
        occupancy: theoretical share of the warps that a multiprocessor can hold.
        passes: the static roofline, where there is one.
        tail: issue slots of a thread outside its loops over memory; None where nothing was counted.
        phases: GPU -> shares of its copy bandwidth where phases do not overlap, by share of L2 hits.
        slots_a_draw: issue slots for each random draw; None where nothing is drawn, or nothing was counted.
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
    """Compile one specimen for one target and look at what came out; the disassembler takes as long as the compiler."""
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
    """(registers, stack bytes) of the one kernel in a cubin."""
    text = machine_code.cuobjdump("--dump-resource-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no resources: {text!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _amd_resources(assembly: str) -> tuple[int, int]:
    """(vector registers, spilled registers + scratch bytes) from the metadata of an AMD code object."""

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        if found is None:
            raise RuntimeError(f"the AMD metadata has no {name}")
        return int(found.group(1))

    spills = number("vgpr_spill_count") + number("sgpr_spill_count") + number("private_segment_fixed_size")
    return number("vgpr_count"), spills


def _widest_access(asm: dict[str, Any]) -> int:
    """Bytes of the widest global load or store of a thread."""
    if "ptx" in asm:
        found = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", asm["ptx"])
        return max((int(v or 1) * int(bits) // 8 for v, bits in found), default=0)
    words = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2, "byte": 1, "ubyte": 1}
    found = re.findall(r"(?:global|buffer)_(?:load|store)_([a-z0-9]+)", asm["amdgcn"])
    return max((words.get(name, 0) for name in found), default=0)


def _programs(limits: Limits, registers: int, shared: int, num_warps: int) -> int:
    """How many programs fit on a multiprocessor."""
    per_warp = -(-max(registers, 1) // REGISTER_UNIT) * REGISTER_UNIT * limits.warp_size
    return min(
        limits.registers // per_warp // num_warps,
        limits.warps // num_warps,
        limits.shared // shared if shared else limits.programs,
        limits.programs,
    )


def _slots_a_draw(specimen: Specimen, code: Sequence[Instruction], num_warps: int) -> float | None:
    """Issue slots for each draw of a kernel that draws."""
    constants = specimen.constants
    if "seed_ptr" not in specimen.types or "BLOCK" not in constants:
        return None
    draws: float = max(1.0, constants.get("R", 1) * constants["BLOCK"] / (32 * num_warps))
    in_memory = "key_ptr" in specimen.types
    return (machine_code.slots_of_products(code) if in_memory else machine_code.whole(code).slots) / draws


def _passes(specimen: Specimen, code: Sequence[Instruction], target: str, num_warps: int, programs: int) -> list[Pass]:
    """The static roofline of each loop over memory, or of the kernel."""
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
    """The shares of the copy bandwidth that the docstring above defines."""
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
    """GPU -> share of L2 hits -> share of the copy bandwidth; empty for a kernel that writes as it reads."""
    if len(passes) < 2 or not passes[-1].stored or any(one.stored for one in passes[:-1]):
        return {}
    return {
        name: {f"{hits:.0%}": _share_of_phases(passes, gpu, num_warps, hits) for hits in HITS}
        for name, gpu in GPUS.items()
        if gpu.target == target
    }


def _share_of_phases(passes: Sequence[machine_code.Cost], gpu: GPU, num_warps: int, hits: float) -> float:
    """All passes over a row in turn, one program a multiprocessor; only the first finds nothing in the L2 cache."""
    schedulers = 4
    warps = max(1, num_warps // schedulers)
    clocks_a_byte = 32 * gpu.multiprocessors * schedulers * gpu.clock / gpu.copy_bandwidth  # of a whole warp
    far, near = gpu.latency * gpu.clock, gpu.l2_latency * gpu.clock
    clocks = 0.0  # of each byte of a row
    for number, cost in enumerate(passes):
        found = hits if number else 0.0
        missed = 1 - found ** (cost.loaded / cost.load_width)  # turns that wait for memory
        moved = cost.stored + (1 - found) * cost.loaded
        waiting = cost.waits * (missed * far + (1 - missed) * near)
        clocks += _clocks_a_turn(cost.slots, clocks_a_byte * moved, waiting, warps) / cost.loaded
    return clocks_a_byte * (1 + passes[-1].stored / passes[-1].loaded) / clocks


def _clocks_a_turn(issue: float, memory: float, waiting: float, warps: int) -> float:
    """Clocks between two turns' ends: each turn of each of the warps queues twice and waits once."""
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
        names: only kernels whose name contains one of these; None: all.
        calls: which calls of ``tools.launches`` launch them: "real" or "odd".
        counted: instructions are counted only of kernels whose name contains one of these; None: of all.

    Returns:
        One report a kernel and target.
    """
    from tools import launches  # which loads the kernels

    wanted = []
    for target in targets:
        for name, specimen in launches.specimens(target, getattr(launches, calls)).items():
            if _named(name, names):
                wanted.append((name, specimen, target, _named(name, counted)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Triton's passes and its tools do not hold the interpreter's lock
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
    print("At the speed of a copy, for each bf16 logit that is read once:\n")
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
    """Print the tables; returns 1 when a kernel spills, 2 when there is none to look at."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--kernel", action="append", help="only kernels whose name contains this")
    parser.add_argument("--calls", choices=CALLS, default="real", help="of which calls: sizes of training, or odd ones")
    count = parser.add_mutually_exclusive_group()
    count.add_argument("--no-roofline", action="store_true", help="leave the machine code uncounted, which is faster")
    count.add_argument("--roofline", action="append", help="count that only of kernels whose name contains this")
    parser.add_argument("--json", action="store_true", help="print the records as JSON instead of the tables")
    parser.add_argument("--out", type=Path, help="also write the records as JSON")
    args = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 leaves nothing to compile: unset it", file=sys.stderr)
        return 2
    reports = inspect(args.target or list(TARGETS), args.kernel, args.calls, [] if args.no_roofline else args.roofline)
    if not reports:
        print("no kernel has such a name", file=sys.stderr)
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
        print(f"these spill: {', '.join(spilling)}", file=sys.stderr)
    return 1 if spilling else 0
