"""What a kernel's machine code says of its cost: instructions of its loops, by pipe, and how its loads overlap.

NVIDIA's disassembler (``cuobjdump``, shipped with Triton) prints one instruction a line. A loop is a branch to where
the code has already been; a kernel without a loop over memory is taken along its longest way from entry to exit.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_LINE = re.compile(r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P[\dT]\s+)?(?P<op>[A-Z0-9_.]+)(?P<rest>.*?);")
_REGISTER = re.compile(r"(?<![A-Z0-9_])R(\d+)")
_ADDRESS = re.compile(r"0x([0-9a-f]+)")
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}

# Instructions of the pipe for integer arithmetic, logic, comparisons and selections, 16 lanes a clock and scheduler
# where there are 32 threads to a warp. Nsight Compute's documentation, "Pipelines"; products go elsewhere.
_ALU = re.compile(
    "BMSK|CS2R|FCHK|FLO|FMNMX3?|FSEL|FSETP?|HMNMX2|HSETP?2|I2FP|IABS|IADD3|IMNMX|ISETP|LEA|LOP3?|MOV|P2R|PLOP3|POPC|"
    "PRMT|R2P|SEL|SGXT|SHF|SHL|SHR|VABSDIFF|VIADD|VIADDMNMX|VIMNMX3?|VOTE"
)

# Those of the pipe for special functions and conversions, 4 lanes a clock and scheduler.
_XU = re.compile("F2F|F2I|FRND|I2F|MUFU")

# Halvings until the k-th largest key is found, which no code can tell. Simulated on drawn scores: 19 on average for a
# row of 4,096, 37 for the slowest of 16 rows of 32.
SEARCH_STEPS = 32


@dataclass(frozen=True)
class Instruction:
    """One line of SASS."""

    address: int
    guard: str
    op: str
    rest: str

    @property
    def name(self) -> str:
        """The operation without its modifiers."""
        return self.op.partition(".")[0]

    @property
    def width(self) -> int:
        """Bytes a thread moves, for a load or store."""
        return next((_WIDTHS[part] for part in self.op.split(".")[1:] if part in _WIDTHS), 4)

    @property
    def branches_to(self) -> int | None:
        """Where it may jump to."""
        found = _ADDRESS.search(self.rest) if self.name == "BRA" else None
        return int(found.group(1), 16) if found else None

    @cached_property
    def registers(self) -> frozenset[int]:
        """Numbers of the registers that it names."""
        return frozenset(int(n) for n in _REGISTER.findall(self.rest))

    @property
    def loaded(self) -> frozenset[int]:
        """The registers that a load from memory fills."""
        if self.name != "LDG":
            return frozenset()
        first = _REGISTER.search(self.rest)
        return (
            frozenset(range(int(first.group(1)), int(first.group(1)) + max(1, self.width // 4)))
            if first
            else frozenset()
        )


@dataclass(frozen=True)
class Cost:
    """A loop's turn, or the whole of a kernel that has no loop over memory; all figures are a thread's.

    Attributes:
        slots: instructions issued.
        alu_slots: those of them on the ALU pipe.
        xu_slots: those on the pipe for exponentials, logarithms, reciprocals and conversions.
        rare_slots: instructions besides, which a turn issues only if it does not jump over them.
        load_width: bytes of a load of the width that brings the most bytes; narrower ones are numbers of a row.
        loaded: bytes that those loads bring from global memory.
        stored: bytes written there.
        in_flight: most of those loads on their way at a time.
        waits: how often it waits for loads, each time for all that are on their way.
    """

    slots: int
    alu_slots: int
    xu_slots: int
    rare_slots: int
    load_width: int
    loaded: int
    stored: int
    in_flight: int
    waits: int


def disassemble(cubin: bytes) -> list[Instruction]:
    """The instructions of the one kernel in a cubin."""
    return parse(cuobjdump("--dump-sass", cubin))


def parse(listing: str) -> list[Instruction]:
    """The instructions of a disassembler's listing."""
    lines = (_LINE.match(line) for line in listing.splitlines())
    return [Instruction(int(m["address"], 16), (m["guard"] or "").strip(), m["op"], m["rest"]) for m in lines if m]


def cuobjdump(what: str, cubin: bytes) -> str:
    """The tool's report on a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), what, file.name], capture_output=True, text=True, check=True).stdout


def _all_loops(code: Sequence[Instruction]) -> list[range]:
    place = {instruction.address: i for i, instruction in enumerate(code)}
    return [
        range(place[target], i + 1)
        for i, instruction in enumerate(code)
        if (target := instruction.branches_to) is not None and target in place and place[target] < i
    ]


def loops(code: Sequence[Instruction]) -> list[range]:
    """Innermost loops, as places in the code."""
    found = _all_loops(code)
    return [a for a in found if not any(b != a and b.start >= a.start and b.stop <= a.stop for b in found)]


def passes(code: Sequence[Instruction]) -> list[Cost]:
    """The innermost loops that read global memory, in the order of the code.

    If a loop around one of them reads more than that one does, the pass is the outer loop, and the inner one is a part
    that most turns jump over (a sample computes the exact scores of a tile only if they may win).
    """
    return [_pass(code, *pair) for pair in dict.fromkeys(_with_outer(code, loop) for loop in memory_loops(code))]


def _with_outer(code: Sequence[Instruction], loop: range) -> tuple[range, range]:
    """Return (the pass, its inner loop), see :func:`passes`; the inner loop of an innermost one is empty."""

    def loads(loop: range) -> int:
        return sum(code[i].name == "LDG" for i in loop)

    around = [a for a in _all_loops(code) if a.start <= loop.start and loop.stop <= a.stop]
    outer = min((a for a in around if loads(a) > loads(loop) > 0), key=len, default=loop)
    return outer, range(0) if outer == loop else loop


def memory_loops(code: Sequence[Instruction], accesses: Collection[str] = ("LDG",)) -> list[range]:
    """The innermost loops that have one of these accesses to global memory, as places in the code."""
    return [loop for loop in loops(code) if any(code[i].name in accesses for i in loop)]


def _pass(code: Sequence[Instruction], loop: range, inner: range) -> Cost:
    """A turn as most are: without what a branch jumps over, if no element moves there (a column a row asks for)."""
    whole_turn = [code[i] for i in loop]
    wide = _cost(whole_turn, whole_turn).load_width
    rare = set(inner)
    place = {instruction.address: i for i, instruction in enumerate(code)}
    for i in loop:
        over = range(i + 1, place.get(code[i].branches_to or -1, 0))
        moves = any(code[j].name in ("LDG", "STG") and code[j].width >= wide for j in over)
        if code[i].guard and over and over.stop in loop and not moves:
            rare.update(over)
    body = [code[i] for i in loop if i not in rare]
    return _cost(body, body, rare_slots=len(rare))


def tail(code: Sequence[Instruction]) -> int:
    """Instructions on the longest way outside the loops over memory: what a program issues however short its rows are.

    A loop that only writes, such as one that fills a row with zeros, is over memory too. Searches and other loops turn
    as in ``whole``.
    """
    turns = _turns(code)
    for loop in memory_loops(code, ("LDG", "STG")):
        for i in _with_outer(code, loop)[0]:
            turns[i] = 0
    return sum(turns[i] for i in _longest_way(code, turns))


def whole(code: Sequence[Instruction]) -> Cost:
    """The longest way from entry to exit, its searches taken to turn ``SEARCH_STEPS`` times."""
    turns = _turns(code)
    way = _longest_way(code, turns)
    return _cost([code[i] for i in way for _ in range(turns[i])], [code[i] for i in way])


def slots_of_products(code: Sequence[Instruction]) -> int:
    """Instructions issued in a turn of the innermost loop with the most integer products, or without loops in all."""
    found = [Counter(code[i].name for i in loop) for loop in loops(code)]
    most = max(found, key=lambda names: names["IMAD"], default=Counter[str]())
    return most.total() if most["IMAD"] else whole(code).slots


def _cost(issued: Sequence[Instruction], in_order: Sequence[Instruction], rare_slots: int = 0) -> Cost:
    bytes_by_width: Counter[int] = Counter()
    for instruction in in_order:
        if instruction.name == "LDG":
            bytes_by_width[instruction.width] += instruction.width
    loaded, width = max(((total, width) for width, total in bytes_by_width.items()), default=(0, 0))
    most, waits = _overlap(in_order, width)
    return Cost(
        slots=len(issued),
        alu_slots=sum(_ALU.fullmatch(i.name) is not None for i in issued),
        xu_slots=sum(_XU.fullmatch(i.name) is not None for i in issued),
        rare_slots=rare_slots,
        load_width=width,
        loaded=loaded,
        stored=sum(i.width for i in in_order if i.name == "STG"),
        in_flight=most,
        waits=waits,
    )


def _overlap(body: Sequence[Instruction], width: int) -> tuple[int, int]:
    """(most loads of that width on their way at a time, waits in a turn).

    A thread stops at the first instruction that names a register still to be filled; by the time that load is there, so
    are those that left before it or just after. The second of two turns counts: a load may be meant for the next one.
    """
    on_their_way: list[Instruction] = []
    most = waits = 0
    for _ in range(2):
        waits = 0
        for instruction in body:
            if any(load.loaded & instruction.registers for load in on_their_way):
                most = max(most, sum(load.width == width for load in on_their_way))
                on_their_way = []
                waits += 1
            if instruction.name == "LDG":
                on_their_way.append(instruction)
    return max(most, sum(load.width == width for load in on_their_way)), waits


def _turns(code: Sequence[Instruction]) -> list[int]:
    """How often each instruction is issued where it is reached."""
    turns = [1] * len(code)
    for loop in loops(code):
        for i in loop:
            turns[i] = SEARCH_STEPS
    return turns


def _longest_way(code: Sequence[Instruction], turns: Sequence[int]) -> list[int]:
    """Places of the instructions on the way with the most of them, no loop entered twice."""
    place = {instruction.address: i for i, instruction in enumerate(code)}
    length, following = [0] * (len(code) + 1), [len(code)] * len(code)
    for i in reversed(range(len(code))):
        target = place.get(code[i].branches_to or -1, -1)
        after = [] if code[i].name in ("EXIT", "RET", "BRA") and not code[i].guard else [i + 1]
        after += [target] if target > i else []
        following[i] = max(after, key=lambda j: length[j], default=len(code))
        length[i] = turns[i] + length[following[i]]
    way, i = [], 0
    while i < len(code):
        way.append(i)
        i = following[i]
    return way
