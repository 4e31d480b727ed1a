"""PTX of one kernel: its parameters, registers and basic blocks, and where divergent threads meet again."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

# Names of the NumPy types of registers, by the type in the declaration.
REGISTERS = {"pred": "b", "b16": "u2", "b32": "u4", "b64": "u8"}

_STATEMENT = re.compile(
    r"\s*(?:(?P<label>\$[\w$]+):|(?P<loc>\.loc\s[^\n]*)|\.reg\s+\.(?P<type>\w+)\s+(?P<names>[^;]*);"
    r"|(?P<skipped>\.(?:pragma|shared)\s[^;]*;)|(?P<brace>[{}])|(?P<instruction>[^;{}][^;]*);)"
)


@dataclass
class Instruction:
    """One instruction.

    Attributes:
        name: the name without its modifiers, such as ``ld``.
        modifiers: what follows it between dots, such as ``global`` and ``b32``.
        operands: registers, numbers, ``[address]`` and ``{registers}``.
        guard: predicate of the threads that execute it, None: all; ``!`` in front of it negates it.
        line: file and line of the Python source.
    """

    name: str
    modifiers: list[str]
    operands: list[str]
    guard: str | None
    line: str

    @functools.cached_property
    def writes(self) -> list[str]:
        """Registers that the instruction writes, in order; ``_`` is none."""
        return [] if self.name in ("st", "stmatrix", "bar", "bra", "ret") else re.findall(r"[%\w]+", self.operands[0])

    @functools.cached_property
    def reads(self) -> list[str]:
        """Registers (and other words) that the instruction reads; with a guard also those that it writes."""
        operands = self.operands[1 if self.writes else 0 :]
        read = [word for operand in operands for word in re.findall(r"%?[\w$.]+", operand)]
        return read if self.guard is None else [*read, self.guard.lstrip("!"), *self.writes]


@dataclass
class Block:
    """Instructions that run one after another.

    Attributes:
        instructions: all but the branch at the end.
        branch: predicate of the threads that jump to the last of ``successors``, if there are two.
        successors: the blocks that may follow; none after a return.
        meeting: the block at which threads that took different successors meet again.
    """

    instructions: list[Instruction]
    branch: str | None = None
    successors: list[int] = field(default_factory=list)
    meeting: int = -1


class Kernel:
    """The kernel in a PTX file.

    Attributes:
        parameters: names of the parameters.
        threads: threads of a program.
        registers: their types, by name.
        blocks: the basic blocks; the first one is the entry.
    """

    def __init__(self, text: str) -> None:
        found = re.search(r"\.visible \.entry (.*?)\)\s*(?:\.[a-z]+ [^\n]*\s*)*\{(.*?)\n\}", text, re.DOTALL)
        unsupported = re.search(r"\.func\b|\.local\b|\.b8 \w+\[\d+\];", text)
        threads = re.search(r"\.reqntid (\d+)", text)
        if found is None or threads is None or unsupported:
            raise NotImplementedError(f"PTX with {unsupported[0] if unsupported else 'no kernel'}")
        self.threads = int(threads[1])
        self.parameters = re.findall(r"\.param[^\n]*?(\w+_param_\d+)", found[1])
        self.registers: dict[str, str] = {}
        files = {number: path.rpartition("/")[2] for number, path in re.findall(r'\.file\s+(\d+) "([^"]*)"', text)}
        self.blocks = _basic_blocks(*self._instructions(re.sub(r"//[^\n]*", "", found[2]), files))
        _find_meetings(self.blocks)

    def _instructions(self, body: str, files: dict[str, str]) -> tuple[list[Instruction], dict[str, int]]:
        """Return all instructions, and the position of each label."""
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        scopes: list[dict[str, str]] = []  # names declared in braces, and the unique names that replace them
        end, line = 0, "?"
        for found in _STATEMENT.finditer(body):
            if body[end : found.start()].strip():
                break
            end = found.end()
            if found["label"]:
                labels[found["label"]] = len(instructions)
            elif found["loc"]:
                _, number, row, *_ = found["loc"].split()
                line = f"{files.get(number, '?')}:{row}"
            elif found["type"]:
                self._declare(found["type"], found["names"], scopes)
            elif found["brace"] == "{":
                scopes.append({})
            elif found["brace"]:
                scopes.pop()
            elif found["instruction"]:
                words = " ".join(found["instruction"].split())
                for name, unique in ((name, unique) for scope in scopes for name, unique in scope.items()):
                    words = re.sub(rf"(?<![\w%$]){re.escape(name)}(?!\w)", unique, words)
                instructions.append(_instruction(words, line))
        if body[end:].strip():
            raise NotImplementedError(f"PTX: {body[end:].strip()[:80]}")
        return instructions, labels

    def _declare(self, kind: str, names: str, scopes: list[dict[str, str]]) -> None:
        for name in map(str.strip, names.split(",")):
            several = re.fullmatch(r"(%?\w+)<(\d+)>", name)
            if several:
                self.registers |= {f"{several[1]}{i}": REGISTERS[kind] for i in range(int(several[2]))}
            else:
                unique = f"{name}__{len(self.registers)}" if scopes else name
                self.registers[unique] = REGISTERS[kind]
                if scopes:
                    scopes[-1][name] = unique


def _instruction(words: str, line: str) -> Instruction:
    guard = re.match(r"@(\S+)\s+", words)
    name, _, operands = words[guard.end() if guard else 0 :].partition(" ")
    name, *modifiers = name.replace("::", "_").split(".")
    split = re.findall(r"(?:\{[^}]*\}|[^,{])+", operands)  # commas in braces do not separate operands
    return Instruction(name, modifiers, [s.strip() for s in split], guard[1] if guard else None, line)


def _basic_blocks(instructions: list[Instruction], labels: dict[str, int]) -> list[Block]:
    targets = {labels[i.operands[0]] for i in instructions if i.name == "bra"}
    after = {k + 1 for k, i in enumerate(instructions) if i.name in ("bra", "ret")}
    starts = sorted({0, *targets, *after} - {len(instructions)})
    blocks = []
    for k, start in enumerate(starts):
        block = Block(instructions[start : (*starts, len(instructions))[k + 1]], successors=[k + 1])
        last = block.instructions[-1]
        if last.name in ("bra", "ret"):
            block.instructions.pop()
            block.successors = [] if last.name == "ret" else [starts.index(labels[last.operands[0]])]
            if last.guard is not None:
                if last.name == "ret":
                    raise NotImplementedError("PTX: a conditional return")
                block.branch, block.successors = last.guard, [k + 1, *block.successors]
        blocks.append(block)
    return blocks


def _find_meetings(blocks: list[Block]) -> None:
    """Set ``meeting`` to the immediate post-dominator of each block, or to the number of blocks for the end."""
    end = len(blocks)
    everything = set(range(end + 1))
    after = [everything] * end + [{end}]  # blocks on each path from a block to the end, with itself
    changed = True
    while changed:
        changed = False
        for k, block in reversed([*enumerate(blocks)]):
            found = {k} | set.intersection(*(after[s] for s in block.successors or [end]))
            changed |= found != after[k]
            after[k] = found
    for k, block in enumerate(blocks):
        block.meeting = max(after[k] - {k}, key=lambda other: len(after[other]))
