"""Cost of a kernel from its machine code: instructions of its loops, by pipe, and the overlap of its loads.

NVIDIA's disassembler (``cuobjdump``, shipped with Triton) prints one instruction per line. A loop is a branch to an
earlier instruction. For a kernel without a loop over memory, the longest path from entry to exit is counted.
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

# Instructions of the pipe for integer arithmetic, logic, comparisons and selections. It has 16 lanes per clock and
# scheduler for warps of 32 threads. Source: documentation of Nsight Compute, "Pipelines". Multiplications use another
# pipe.
_ALU = re.compile(
    "BMSK|CS2R|FCHK|FLO|FMNMX3?|FSEL|FSETP?|HMNMX2|HSETP?2|I2FP|IABS|IADD3|IMNMX|ISETP|LEA|LOP3?|MOV|P2R|PLOP3|POPC|"
    "PRMT|R2P|SEL|SGXT|SHF|SHL|SHR|VABSDIFF|VIADD|VIADDMNMX|VIMNMX3?|VOTE"
)

# Instructions of the pipe for special functions and conversions, with 4 lanes per clock and scheduler.
_XU = re.compile("F2F|F2I|FRND|I2F|MUFU")

# Assumed number of steps of the search for the k-th largest key, because the code does not determine it. Simulated on
# random scores: 19 on average for a row of 4,096, 37 for the slowest of 16 rows of 32.
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
        """Name of the operation without its modifiers."""
        return self.op.partition(".")[0]

    @property
    def width(self) -> int:
        """Bytes per thread of a load or store."""
        return next((_WIDTHS[part] for part in self.op.split(".")[1:] if part in _WIDTHS), 4)

    @property
    def branches_to(self) -> int | None:
        """Target address of a branch."""
        found = _ADDRESS.search(self.rest) if self.name == "BRA" else None
        return int(found.group(1), 16) if found else None

    @cached_property
    def registers(self) -> frozenset[int]:
        """Numbers of the registers in the operands."""
        return frozenset(int(n) for n in _REGISTER.findall(self.rest))

    @property
    def loaded(self) -> frozenset[int]:
        """Numbers of the registers that a load from memory fills."""
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
    """Cost per thread of one loop iteration, or of a whole kernel without a loop over memory.

    Attributes:
        slots: instructions issued.
        alu_slots: instructions issued on the ALU pipe.
        xu_slots: instructions issued on the pipe for exponentials, logarithms, reciprocals and conversions.
        rare_slots: additional instructions that an iteration issues only if it does not skip them.
        load_width: bytes per load, for the width that transfers the most bytes; narrower loads read values per row.
        loaded: bytes that loads of this width read from global memory.
        stored: bytes written to global memory.
        in_flight: maximum number of loads of this width in flight.
        waits: number of waits for loads; each waits for all loads in flight.
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
    """Return the instructions of the only kernel in a cubin."""
    return parse(cuobjdump("--dump-sass", cubin))


def parse(listing: str) -> list[Instruction]:
    """Return the instructions of a disassembler listing."""
    lines = (_LINE.match(line) for line in listing.splitlines())
    return [Instruction(int(m["address"], 16), (m["guard"] or "").strip(), m["op"], m["rest"]) for m in lines if m]


def cuobjdump(what: str, cubin: bytes) -> str:
    """Return the tool's report on a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), what, file.name], capture_output=True, text=True, check=True).stdout


def _all_loops(code: Sequence[Instruction]) -> list[range]:
    """Return every loop, as index ranges of the code."""
    place = {instruction.address: i for i, instruction in enumerate(code)}
    return [
        range(place[target], i + 1)
        for i, instruction in enumerate(code)
        if (target := instruction.branches_to) is not None and target in place and place[target] < i
    ]


def loops(code: Sequence[Instruction]) -> list[range]:
    """Return the innermost loops, as index ranges of the code."""
    found = _all_loops(code)
    return [a for a in found if not any(b != a and b.start >= a.start and b.stop <= a.stop for b in found)]


def passes(code: Sequence[Instruction]) -> list[Cost]:
    """Return the innermost loops that read global memory, in the order of the code.

    If an enclosing loop has more loads, the pass is that loop. The inner loop is then a part that most iterations skip:
    a sample computes the exact scores of a tile only if the tile may hold the largest.
    """
    return [_pass(code, *pair) for pair in dict.fromkeys(_with_outer(code, loop) for loop in memory_loops(code))]


def _with_outer(code: Sequence[Instruction], loop: range) -> tuple[range, range]:
    """Return (the pass, its inner loop), see :func:`passes`; an innermost loop has an empty inner loop."""

    def loads(loop: range) -> int:
        return sum(code[i].name == "LDG" for i in loop)

    around = [a for a in _all_loops(code) if a.start <= loop.start and loop.stop <= a.stop]
    outer = min((a for a in around if loads(a) > loads(loop) > 0), key=len, default=loop)
    return outer, range(0) if outer == loop else loop


def memory_loops(code: Sequence[Instruction], accesses: Collection[str] = ("LDG",)) -> list[range]:
    """Return the innermost loops with one of these accesses to global memory, as index ranges of the code."""
    return [loop for loop in loops(code) if any(code[i].name in accesses for i in loop)]


def _pass(code: Sequence[Instruction], loop: range, inner: range) -> Cost:
    """Count a typical iteration, without code that a branch skips and that moves no element (a requested column)."""
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
    """Count the instructions on the longest path outside the loops over memory, which do not depend on the row length.

    A loop that only writes, such as one that fills a row with zeros, is a loop over memory, too. Searches and other
    loops are counted as in ``whole``.
    """
    turns = _turns(code)
    for loop in memory_loops(code, ("LDG", "STG")):
        for i in _with_outer(code, loop)[0]:
            turns[i] = 0
    return sum(turns[i] for i in _longest_way(code, turns))


def whole(code: Sequence[Instruction]) -> Cost:
    """Count the longest path from entry to exit, with ``SEARCH_STEPS`` iterations for each search."""
    turns = _turns(code)
    way = _longest_way(code, turns)
    return _cost([code[i] for i in way for _ in range(turns[i])], [code[i] for i in way])


def slots_of_products(code: Sequence[Instruction]) -> int:
    """Count an iteration of the innermost loop with the most integer products, or the whole kernel without loops."""
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
    """Return (maximum number of loads of this width in flight, waits per iteration).

    A thread stops at the first instruction that names a register of a load in flight. When this load arrives, the loads
    issued before it or shortly after it have arrived, too. The second of two iterations is counted, because a load may
    be issued for the next iteration.
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
    """Return the number of times that each reachable instruction is issued."""
    turns = [1] * len(code)
    for loop in loops(code):
        for i in loop:
            turns[i] = SEARCH_STEPS
    return turns


def _longest_way(code: Sequence[Instruction], turns: Sequence[int]) -> list[int]:
    """Return the indices of the instructions on the path with the most of them; no loop is entered twice."""
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
