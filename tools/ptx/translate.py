"""Basic blocks of PTX as Python functions over arrays of all threads.

In the code of a block, ``t`` holds the threads (``threads.Threads``), ``R`` the registers that live across blocks, and
``m`` is True for the threads that execute the block, or None if all do. A register that all threads hold the same value
of may be a NumPy scalar.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tools.ptx import arithmetic, parse
from tools.ptx.parse import REGISTERS, Block, Instruction, Kernel

# NumPy types of the operands of an instruction, by its suffix. "bf" are the bits of bfloat16.
TYPES = {
    **REGISTERS, "b8": "u1", "u16": "u2", "u32": "u4", "u64": "u8", "s16": "i2", "s32": "i4", "s64": "i8",
    "f16": "f2", "bf16": "bf", "f32": "f4", "f64": "f8",
}  # fmt: skip
_SAME = ("rn", "ftz", "approx")  # modifiers that do not choose another function below
_OF_BOTH = {
    "add": "{} + {}", "sub": "{} - {}", "neg": "-{}", "abs": "np.abs({})", "min.NaN": "np.minimum({}, {})",
    "max.NaN": "np.maximum({}, {})", "selp": "where({2}, {0}, {1})",
}  # fmt: skip
_OF_FLOATS = _OF_BOTH | {
    "mul": "{} * {}", "div": "{} / {}", "div.full": "div_full({}, {})", "fma": "fma({}, {}, {})",
    "min": "minimum({}, {})", "max": "maximum({}, {})", "ex2": "ex2({})", "lg2": "lg2({})", "rcp": "rcp({})",
}  # fmt: skip
_OF_INTEGERS = _OF_BOTH | {
    "mul.lo": "{} * {}", "mad.lo": "{} * {} + {}", "mul.hi": "mul_hi({}, {})", "div": "div({}, {})",
    "min": "np.minimum({}, {})", "max": "np.maximum({}, {})", "and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}",
    "not": "~{}", "shl": "shl({}, {})", "shr": "shr({}, {})", "bfe": "bfe({}, {}, {})", "prmt": "prmt({}, {}, {})",
    "bfi": "bfi({}, {}, {}, {})", "popc": "np.bitwise_count({}).astype(u4)",
    "mul.wide": "{}.astype({wide}) * {}.astype({wide})", "mad.wide": "{}.astype({wide}) * {}.astype({wide}) + {}",
}  # fmt: skip
# Operands from this one on have another type: they are numbers of bits, u4, or the condition.
_LATER = {"shl": (1, "u4"), "shr": (1, "u4"), "bfe": (1, "u4"), "bfi": (2, "u4"), "selp": (2, "b")}
_WIDER = {"u2": "u4", "i2": "i4", "u4": "u8", "i4": "i8"}
_BEFORE = {"ftz": "ftz", "rzi": "np.trunc", "rni": "np.rint", "rmi": "np.floor", "rpi": "np.ceil"}
_ORDERED = {
    "eq": "{0} == {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "num": "({0} == {0}) & ({1} == {1})",
}  # fmt: skip
_UNORDERED = {"ne": "eq", "nan": "num", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}  # the negation of these
_CACHED = re.compile(r"(L1_evict_\w+|L2_cache_hint|nc|v\d)$")  # modifiers of an access that need no function
_BITS = r"(0[fF](?P<f4>\w{8})|0[dD](?P<f8>\w{16})|(?P<negative>-)?(0[xX](?P<hex>\w+?)|(?P<decimal>\d+))U?)"


def size(dtype: str) -> int:
    """Return the bytes of a type."""
    return 2 if dtype == "bf" else 0 if dtype == "b" else int(dtype[1])


@functools.cache
def program(text: str) -> Any:
    """Return a Python module that executes the kernel in a PTX file.

    It defines THREADS (per program), PARAMETERS (their number), REGISTERS (their types), BLOCKS (successors, and where
    threads that branch apart meet again) and FUNCTIONS, one ``(t, R, m)`` per block. A function returns the threads
    that take the branch to the second successor, or None.

    The module is kept beside the kernels that Triton has compiled, because to translate a kernel takes longer than to
    execute it.
    """
    digest = hashlib.sha256()
    for part in (parse, arithmetic, sys.modules[__name__]):
        digest.update(Path(str(part.__file__)).read_bytes())
    digest.update(text.encode())
    folder = Path(os.environ.get("TRITON_CACHE_DIR", tempfile.gettempdir()), "python")
    path = folder / f"ptx_{digest.hexdigest()}.py"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_text(_Translator(Kernel(text)).source())
        written.rename(path)
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def constant(dtype: str, bits: int) -> Any:
    """Return the number of a type with these bits."""
    return np.frombuffer(bits.to_bytes(size(dtype), "little"), dtype)[0]


class _Translator:
    """Writes the Python code of a kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.number = {name: k for k, name in enumerate(kernel.registers)}
        self._across = {name for block in kernel.blocks for name in _read_first(block)} & kernel.registers.keys()
        self._constants: set[tuple[str, int]] = set()

    def source(self) -> str:
        """Return the source of the module."""
        blocks = [self._block(k, block) for k, block in enumerate(self.kernel.blocks)]
        return "\n".join(
            [
                f"from {__name__} import constant",
                f"from {arithmetic.__name__} import *",
                f"THREADS, PARAMETERS = {self.kernel.threads}, {len(self.kernel.parameters)}",
                f"REGISTERS = {[*self.kernel.registers.values()]}",
                f"BLOCKS = {[(block.successors, block.meeting) for block in self.kernel.blocks]}",
                *(f"c_{dtype}_{bits} = constant({dtype!r}, {bits})" for dtype, bits in sorted(self._constants)),
                *blocks,
                f"FUNCTIONS = [{', '.join(f'block_{k}' for k in range(len(blocks)))}]",
            ]
        )

    def _block(self, k: int, block: Block) -> str:
        self._lines: list[str] = []
        self._values: dict[str, dict[str, str]] = {}  # register -> type -> variable
        self._written: set[str] = set()
        for instruction in block.instructions:
            try:
                self._instruction(instruction)
            except (LookupError, ValueError) as error:
                raise NotImplementedError(f"PTX: {instruction}: {error!r}") from error
        branch = "None" if block.branch is None else self._value(block.branch, "b")
        for name in sorted(self._written & self._across):
            value, place = self._value(name, self.kernel.registers[name]), f"R[{self.number[name]}]"
            self._lines.append(f"{place} = {value} if m is None else where(m, {value}, {place})")
        return "\n ".join([f"def block_{k}(t, R, m):", *self._lines, f"return {branch}"])

    # ------------------------------------------------------------------------------------------------------- operands

    def _new(self, expression: str) -> str:
        name = f"v{len(self._lines)}"
        self._lines.append(f"{name} = {expression}")
        return name

    def _constant(self, dtype: str, bits: int) -> str:
        bits &= 256 ** size(dtype) - 1
        self._constants.add((dtype, bits))
        return f"c_{dtype}_{bits}"

    def _value(self, operand: str, dtype: str) -> str:
        """Return the variable of an operand in a type; from a wider register its lower bits."""
        if dtype == "bf":
            return self._new(f"from_bf16({self._value(operand, 'u2')})")
        if operand.startswith("!"):
            return self._new(f"~{self._value(operand[1:], dtype)}")
        special = re.fullmatch(r"%(tid|ctaid|nctaid)\.([xyz])", operand)
        if special:
            return self._new(f"t.{special[1]}['{special[2]}']")
        if operand == "global_smem":
            return self._constant(dtype, 0)
        if operand not in self.kernel.registers:
            number = re.fullmatch(_BITS, operand)
            if number is None:
                raise ValueError(operand)
            digits = number["f4"] or number["f8"] or number["hex"]
            bits = int(digits, 16) if digits else int(number["decimal"])
            return self._constant(dtype, -bits if number["negative"] else bits) if dtype != "b" else f"bool_({bits})"
        declared = self.kernel.registers[operand]
        if operand not in self._values:
            self._values[operand] = {declared: self._new(f"R[{self.number[operand]}]")}
        known = self._values[operand]
        if dtype not in known:
            have = next(iter(known))
            if size(dtype) > size(have) or "b" in (dtype, have):
                raise ValueError(f"{operand} as {dtype}")
            narrow = "" if size(dtype) == size(have) else f".view(u{size(have)}).astype(u{size(dtype)})"
            known[dtype] = self._new(f"{known[have]}{narrow}.view({dtype})")
        return known[dtype]

    def _set(self, operand: str, dtype: str, expression: str, guard: str | None) -> None:
        if operand == "_":
            return
        declared = self.kernel.registers[operand]
        if size(dtype) != size(declared):  # the result of an instruction on 8 or 16 bits, or a wider register
            expression, dtype = f"np.asarray({expression}).astype({declared})", declared
        new = self._new(expression)
        if guard is not None:
            new = self._new(f"where({guard}, {new}, {self._value(operand, dtype)})")
        self._values[operand] = {dtype: new}
        self._written.add(operand)

    def _address(self, operand: str) -> str:
        """Return the variable of an address ``[register + number]``, u8, or u4 of shared memory."""
        base, _, offset = operand.strip("[]").replace(" ", "").partition("+")
        dtype = self.kernel.registers.get(base, "u4")
        start = self._value(base, dtype)
        return start if int(offset or 0) == 0 else self._new(f"{start} + {self._constant(dtype, int(offset))}")

    # --------------------------------------------------------------------------------------------------- instructions

    def _instruction(self, i: Instruction) -> None:
        guard = None if i.guard is None else self._value(i.guard, "b")
        of_name = getattr(self, f"_of_{i.name}", self._arithmetic)
        of_name(i, guard, "m" if guard is None else f"t.both(m, {guard})")

    def _arithmetic(self, i: Instruction, guard: str | None, _: str) -> None:
        dtype = TYPES[i.modifiers[-1]]
        function = ".".join([i.name, *(word for word in i.modifiers[:-1] if word not in _SAME)])
        template = (_OF_FLOATS if dtype[0] == "f" else _OF_INTEGERS)[function]
        result = _WIDER[dtype] if "wide" in i.modifiers else "u4" if i.name == "popc" else dtype
        start, later = _LATER.get(i.name, (2, result))
        operands = [self._value(x, later if k >= start else dtype) for k, x in enumerate(i.operands[1:])]
        if "ftz" in i.modifiers and i.name != "rcp":
            template, operands = f"ftz({template})", [f"ftz({x})" for x in operands]
        self._set(i.operands[0], result, template.format(*operands, wide=result), guard)

    def _of_mov(self, i: Instruction, guard: str | None, _: str) -> None:
        target, source = i.operands
        dtype = TYPES[i.modifiers[0]]
        parts = re.findall(r"[%\w]+", target if target.startswith("{") else source)
        narrow = f"u{size(dtype) // len(parts)}"
        if target.startswith("{"):
            whole = self._value(source, dtype)
            for k, part in enumerate(parts):
                shifted = f"({whole} >> {self._constant(dtype, 8 * size(narrow) * k)})"
                self._set(part, narrow, f"{shifted}.astype({narrow})", guard)
        elif source.startswith("{"):
            wide = [f"{self._value(part, narrow)}.astype({dtype})" for part in parts]
            shifts = [f"({x} << {self._constant(dtype, 8 * size(narrow) * k)})" for k, x in enumerate(wide)]
            self._set(target, dtype, " | ".join(shifts), guard)
        else:
            self._set(target, dtype, self._value(source, dtype), guard)

    def _of_setp(self, i: Instruction, guard: str | None, _: str) -> None:
        comparison, packed = i.modifiers[0], i.modifiers[-1].endswith("x2")
        dtype = TYPES[i.modifiers[-1].removesuffix("x2")]
        if comparison in ("ne", "neu"):  # ne is False for NaN
            expression = "({0} < {1}) | ({0} > {1})" if comparison == "ne" and dtype[0] in "fb" else "{0} != {1}"
        else:
            inverse = _UNORDERED.get(comparison)
            expression = f"~({_ORDERED[inverse]})" if inverse else _ORDERED[comparison]
        for k, target in enumerate(i.writes):  # two of packed numbers, the lower ones first
            operands = [self._half(x, k, dtype) if packed else self._value(x, dtype) for x in i.operands[1:]]
            self._set(target, "b", expression.format(*operands), guard)

    def _half(self, operand: str, k: int, dtype: str) -> str:
        """Return the variable of the lower (0) or upper (1) float of 16 bits in a register."""
        bits = self._new(f"({self._value(operand, 'u4')} >> u4({16 * k})).astype(u2)")
        return self._new(f"from_bf16({bits})" if dtype == "bf" else f"{bits}.view({dtype})")

    def _of_cvt(self, i: Instruction, guard: str | None, _: str) -> None:
        *how, target, source = i.modifiers
        if target in ("bf16x2", "f16x2"):
            halves = ", ".join(f"to_{target[:-2]}({self._value(x, 'f4')})" for x in i.operands[1:])
            return self._set(i.operands[0], "u4", f"pair({halves})", guard)
        x = self._value(i.operands[1], TYPES[source])
        for word, function in _BEFORE.items():
            if word in how:
                x = f"{function}({x})"
        dtype = TYPES[target]
        if target in ("bf16", "f16"):
            return self._set(i.operands[0], "u2", f"to_{target}({x})", guard)
        integer = source[0] in "bf" and target[0] in "us"
        self._set(i.operands[0], dtype, f"to_integer({x}, {dtype})" if integer else f"{x}.astype({dtype})", guard)

    def _of_ld(self, i: Instruction, guard: str | None, active: str) -> None:
        dtype = TYPES[i.modifiers[-1]]
        if i.modifiers[0] == "param":
            k = self.kernel.parameters.index(i.operands[1].strip("[] "))
            return self._set(i.operands[0], dtype, f"np.frombuffer(t.parameters[{k}], {dtype}, 1)[0]", guard)
        registers, place = i.writes, self._place(i, active, i.operands[1])
        values = self._new(f"t.load({place}, {size(dtype)}, {len(registers)})")
        for k, register in enumerate(registers):
            self._set(register, f"u{size(dtype)}", f"{values}[{k}]", guard)

    def _of_st(self, i: Instruction, _: str | None, active: str) -> None:
        dtype = f"u{size(TYPES[i.modifiers[-1]])}"
        values = ", ".join(self._value(r, dtype) for r in re.findall(r"[%\w]+", i.operands[1]))
        self._lines.append(f"t.store({self._place(i, active, i.operands[0])}, [{values}])")

    def _place(self, i: Instruction, active: str, address: str) -> str:
        """Return the first arguments of every access: line, space, threads, address."""
        space, *rest = i.modifiers[:-1]
        if any(_CACHED.match(word) is None for word in rest):
            raise ValueError(f"modifiers {rest}")
        return f"{i.line!r}, t.spaces[{space.removesuffix('_cta')!r}], {active}, {self._address(address)}"

    def _of_ldmatrix(self, i: Instruction, guard: str | None, active: str) -> None:
        registers, trans = i.writes, "trans" in i.modifiers
        place = f"{i.line!r}, {active}, {self._address(i.operands[1])}"
        values = self._new(f"t.load_matrices({place}, {len(registers)}, {trans})")
        for k, register in enumerate(registers):
            self._set(register, "u4", f"{values}[{k}]", guard)

    def _of_stmatrix(self, i: Instruction, _: str | None, active: str) -> None:
        values = [self._value(r, "u4") for r in re.findall(r"[%\w]+", i.operands[1])]
        place = f"{i.line!r}, {active}, {self._address(i.operands[0])}"
        self._lines.append(f"t.store_matrices({place}, [{', '.join(values)}], {'trans' in i.modifiers})")

    def _of_bar(self, i: Instruction, _: str | None, active: str) -> None:
        name = {"sync": "barrier", "warp": "warp_barrier"}[i.modifiers[0]]
        if i.operands[-1] not in ("0", "-1", "0xffffffff"):
            raise ValueError("another barrier")
        self._lines.append(f"t.{name}({i.line!r}, {active})")

    def _of_shfl(self, i: Instruction, guard: str | None, active: str) -> None:
        value, *others = (self._value(x, "u4") for x in i.operands[1:])
        found = f"t.shuffle({i.line!r}, {active}, {i.modifiers[1]!r}, {value}, {', '.join(others)})"
        self._set(i.operands[0], "u4", found, guard)

    def _of_redux(self, i: Instruction, guard: str | None, active: str) -> None:
        dtype = TYPES[i.modifiers[2]]
        value, members = self._value(i.operands[1], dtype), self._value(i.operands[2], "u4")
        function = {"add": "np.add", "min": "np.minimum", "max": "np.maximum"}[i.modifiers[1]]
        self._set(i.operands[0], dtype, f"t.reduce({i.line!r}, {active}, {function}, {value}, {members})", guard)

    def _of_createpolicy(self, i: Instruction, guard: str | None, _: str) -> None:
        self._set(i.operands[0], "u8", "u8(0)", guard)


def _read_first(block: Block) -> set[str]:
    """Return the names that a block reads before it writes them."""
    found: set[str] = set()
    written: set[str] = set()
    for instruction in block.instructions:
        found |= set(instruction.reads) - written
        written |= set(instruction.writes)
    return found if block.branch is None else found | ({block.branch.lstrip("!")} - written)
