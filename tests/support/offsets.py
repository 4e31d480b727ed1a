"""Ranges of a kernel's integers, from its Triton IR and the arguments of one launch: does an offset exceed 32 bits?

Every value gets an interval: arguments have their value, program ids the grid, loops their range; sums and products
follow. Values from memory or floating point are unknown, and nothing is claimed about them.
"""

import linecache
import os
import re

LINE = re.compile(r"^\s*(?P<name>%[\w#:]+) = \"?(?P<op>[\w.]+)\"? ?(?P<rest>.*)$")
FOR = re.compile(r"scf\.for (%\w+) = (%\w+) to (%\w+) step")
INT32 = range(-(2**31), 2**31)


def corners(a, b, operation):
    found = [operation(x, y) for x in a for y in b]
    return min(found), max(found)


def quotient(a, b):
    return corners(a, b, lambda x, y: int(x / y)) if b[0] > 0 else None


def remainder(a, b):
    return (0, min(a[1], b[1] - 1)) if a[0] >= 0 and b[0] > 0 else None


OPERATIONS = {
    "arith.addi": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "arith.subi": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "arith.muli": lambda a, b: corners(a, b, lambda x, y: x * y),
    "arith.divsi": quotient,
    "arith.remsi": remainder,
    "arith.minsi": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "arith.maxsi": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "arith.select": lambda _, a, b: (min(a[0], b[0]), max(a[1], b[1])),
}
SAME = {"arith.extsi", "arith.extui", "arith.trunci", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape"}


def narrow_offsets(ttir, arguments, grid):
    """Return the lines of the source with 32-bit values behind an address that this launch takes past 32 bits.

    Args:
        ttir: Triton IR of a kernel.
        arguments: argument -> value.
        grid: programs along each dimension.
    """
    bounds = {f"%{name}": (value, value) for name, value in arguments.items() if type(value) is int}
    needs, too_wide, addresses = {}, {}, []
    for line in ttir.splitlines():
        if loop := FOR.search(line):
            variable, low, high = loop.groups()
            if low in bounds and high in bounds:
                bounds[variable] = (bounds[low][0], max(bounds[low][0], bounds[high][1] - 1))
        if not (found := LINE.match(line)):
            continue
        name, op, rest = found.group("name", "op", "rest")
        operands = re.findall(r"%[\w#]+", rest.partition(" : ")[0])
        needs[name] = operands
        bounds[name] = bounds_of(op, rest, [bounds.get(operand) for operand in operands], grid)
        if op == "tt.addptr":
            addresses.append(operands[1])
        elif re.search(r"[ x]i32>?( loc.*)?$", rest) and bounds[name] and not all(b in INT32 for b in bounds[name]):
            too_wide[name] = source_of(line.strip(), ttir)
    return [*dict.fromkeys(too_wide[name] for name in sources(addresses, needs) if name in too_wide)]


def source_of(text, ttir):
    """Return the file, line and source of a line of the IR; of an inlined function, its own line."""
    while at := re.search(r"#loc\d*\b", text):
        text = re.search(rf"^{at[0]} = (.*)$", ttir, re.MULTILINE)[1]
    known = re.search(r'"(.*)":(\d+)', text)
    if known is None:
        return text
    path, line = known.groups()
    return f"{os.path.relpath(path)}:{line}: {linecache.getline(path, int(line)).strip()}"


def bounds_of(op, rest, operands, grid):
    """Return the interval of an operation's result, or None if it is unknown."""
    if op == "arith.constant":
        number = re.match(r"(?:dense<)?(-?\d+)>? : ", rest)
        return (int(number.group(1)),) * 2 if number else None
    if op == "tt.get_program_id":
        return 0, grid["xyz".index(rest[0])] - 1
    if op == "tt.make_range":
        end, start = (int(re.search(rf"{word} = (\d+)", rest).group(1)) for word in ("end", "start"))
        return start, end - 1
    if op in SAME:
        return operands[0]
    known = operands[1:] if op == "arith.select" else operands
    return OPERATIONS[op](*operands) if op in OPERATIONS and None not in known else None


def sources(names, needs):
    """Return all values from which these values are computed, including themselves."""
    seen, left = {}, list(names)
    while left:
        name = left.pop()
        if name not in seen:
            seen[name] = None
            left += needs.get(name, [])
    return list(seen)
