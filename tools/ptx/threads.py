"""Launches: all threads of several programs run in step, and threads that branch apart meet again as soon as possible.

The order of two threads has no influence on a result: what depends on it is a fault (``memory``). Barriers and
instructions of a whole warp are faults if only a part of their threads executes them.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tools.ptx.arithmetic import UNSIGNED, i8, u4
from tools.ptx.memory import BARRIERS, PROGRAM, UNSET, UNWRITTEN, WARP_BARRIERS, Array, FaultError, Global, Shared
from tools.ptx.translate import program

AT_ONCE = 4096  # threads
MOST_BLOCKS = 5_000_000  # executed by a launch that is not an endless loop
executed: Counter[str] = Counter()  # launches of each kernel
faults: list[str] = []


@dataclass
class Launch:
    """A launch.

    Attributes:
        name: name of the kernel.
        text: its PTX.
        grid: number of programs along each dimension.
        shared: bytes of shared memory of a program.
        parameters: bytes of each parameter; missing ones are 0.
        tensors: names and tensors of the pointers among them.
    """

    name: str
    text: str
    grid: tuple[int, int, int]
    shared: int
    parameters: Sequence[bytes]
    tensors: Sequence[tuple[str, torch.Tensor]]


def launch(launched: Launch) -> None:
    """Execute a launch; a fault is recorded in ``faults`` and raised."""
    executed[launched.name] += 1
    code = program(launched.text)
    memory = Global(launched.tensors)
    programs = np.array([*itertools.product(*map(range, reversed(launched.grid)))], np.uint32).reshape(-1, 3)[:, ::-1]
    at_once = max(AT_ONCE // code.THREADS, 1)
    threads = None
    try:
        with np.errstate(all="ignore"):
            for first in range(0, len(programs), at_once):
                threads = Threads(launched, code, memory, programs[first : first + at_once], first)
                threads.run()
                threads.shared.memory.check(written=False)
            for piece in memory.memories:
                piece.check(written=True)
    except FaultError as fault:
        at = f" at {threads.line}" if threads else ""
        faults.append(f"{launched.name}{at}: {fault}")
        raise FaultError(faults[-1]) from None


class Threads:
    """All threads of some programs of a launch.

    Attributes that the code of a kernel reads: ``tid``, ``ctaid`` and ``nctaid`` by dimension, ``parameters`` and
    ``spaces``.
    """

    def __init__(self, launched: Launch, code: Any, memory: Global, programs: Array, first: int) -> None:
        self.code, self.size, self.first, self.line = code, code.THREADS, first, "?"
        self.count = self.size * len(programs)
        number = np.tile(np.arange(self.size, dtype=u4), len(programs))
        self.tid = {"x": number, "y": u4(0), "z": u4(0)}
        one = len(programs) == 1
        self.ctaid = {d: p[0] if one else np.repeat(p, self.size) for d, p in zip("xyz", programs.T, strict=True)}
        self.nctaid = {d: u4(n) for d, n in zip("xyz", launched.grid, strict=True)}
        self.parameters = [*launched.parameters, *[bytes(8)] * (code.PARAMETERS - len(launched.parameters))]
        self.shared = Shared(launched.shared, len(programs))
        self.spaces = {"global": memory, "shared": self.shared}
        self.alive = np.ones(self.count, bool)
        # See ``memory``: the program, the barriers passed and the number of each thread.
        self.codes = (np.repeat(np.arange(first, first + len(programs)), self.size) << PROGRAM) + number.astype(i8)
        self.shuffles = np.zeros(self.count, i8)

    def run(self) -> None:
        """Execute the kernel; the stack holds (block, block at which to stop, threads or None for all)."""
        blocks, functions = self.code.BLOCKS, self.code.FUNCTIONS
        registers = [np.bool_(False) if dtype == "b" else UNSET.view(dtype)[0] for dtype in self.code.REGISTERS]
        stack: list[tuple[int, int, Array | None]] = [(0, len(blocks), None)]
        for _ in range(MOST_BLOCKS):
            if not stack:
                return
            number, stop, active = stack.pop()
            if number == stop:
                continue
            successors, meeting = blocks[number]
            chosen = functions[number](self, registers, active)
            if not successors:
                if active is None:
                    return
                self.alive &= ~active
                stack = [(n, s, rest) for n, s, m in stack if (rest := self.both(m, self.alive)).any()]
                continue
            if chosen is None or np.ndim(chosen) == 0:
                stack.append((successors[bool(chosen)], stop, active))
                continue
            taken, rest = self.both(active, chosen), self.both(active, ~chosen)
            if not taken.any() or not rest.any():
                stack.append((successors[bool(taken.any())], stop, active))
            else:
                stack.append((meeting, stop, active))
                stack += [(successors[0], meeting, rest), (successors[1], meeting, taken)]
        raise FaultError("an endless loop")

    def both(self, active: Array | None, guard: Any) -> Any:
        """Return the active threads whose guard is True; None for all threads."""
        if np.ndim(guard) == 0:
            return active if guard else np.zeros(self.count, bool)
        return guard if active is None else guard & active

    # --------------------------------------------------------------------------------------------------------- memory

    def load(self, line: str, space: Any, active: Array | None, address: Any, itemsize: int, count: int) -> Array:
        """Load ``count`` numbers per thread: [count, threads], 0 for threads that are not active."""
        self.line = line
        chosen = slice(None) if active is None else np.flatnonzero(active)
        loaded = np.zeros((count, self.count), UNSIGNED[itemsize])
        loaded[:, chosen] = self._read(space, chosen, address, itemsize, count).T
        return loaded

    def store(self, line: str, space: Any, active: Array | None, address: Any, values: Sequence[Any]) -> None:
        """Store one number per thread for each of ``values``."""
        self.line = line
        chosen: Any = slice(None) if active is None else np.flatnonzero(active)
        self._write(space, chosen, address, np.stack([np.broadcast_to(x, (self.count,))[chosen] for x in values], 1))

    def _find(self, space: Any, chosen: Any, address: Any, width: int) -> Iterator[tuple[Any, Array, Any, Array]]:
        """Yield (memory, offsets, indices in ``chosen``, codes) of accesses of a width."""
        # A shuffle orders the accesses of a warp to global memory before and after it, because each thread waits for
        # the values of others. For shared memory, only ``bar.warp.sync`` does.
        codes = (self.codes if space is self.shared else self.codes + self.shuffles)[chosen]
        addresses = np.broadcast_to(address, (self.count,))[chosen]
        for memory, offset, index in space.find(addresses, width, codes, self.first) if len(codes) else ():
            yield memory, offset, index, codes[index]

    def _read(self, space: Any, chosen: Any, address: Any, itemsize: int, count: int) -> Array:
        values = np.empty((len(self.codes[chosen]), count), UNSIGNED[itemsize])
        for memory, offset, index, codes in self._find(space, chosen, address, itemsize * count):
            values[index] = memory.read(offset, itemsize, count, codes, self.line)
        if space is not self.shared and itemsize > 1 and (values == UNWRITTEN.view(values.dtype)[0]).any():
            raise FaultError("reads what nobody wrote")
        return values

    def _write(self, space: Any, chosen: Any, address: Any, values: Array) -> None:
        for memory, offset, index, codes in self._find(space, chosen, address, values.itemsize * values.shape[1]):
            memory.write(offset, values[index], codes, self.line)

    def _rows(self, line: str, active: Array | None, count: int) -> tuple[Array, Array]:
        """Return the warps that execute an instruction over matrices, and the threads that hold addresses of rows."""
        self._whole_warps(line, active)
        lanes = np.arange(self.count).reshape(-1, 32)
        warps = np.arange(len(lanes)) if active is None else np.flatnonzero(active.reshape(-1, 32)[:, 0])
        return warps, lanes[warps, : 8 * count].ravel()

    def load_matrices(self, line: str, active: Array | None, address: Any, count: int, trans: bool) -> Array:
        """Load matrices of 8 x 8 numbers of 16 bits, two adjacent ones of a row per thread: [count, threads]."""
        warps, rows = self._rows(line, active, count)
        matrices = self._read(self.shared, rows, address, 2, 8).reshape(-1, count, 8, 8)
        matrices = np.ascontiguousarray(matrices.swapaxes(2, 3) if trans else matrices)
        loaded = np.zeros((count, self.count // 32, 32), u4)
        loaded[:, warps] = matrices.view(u4).reshape(-1, count, 32).swapaxes(0, 1)
        return loaded.reshape(count, -1)

    def store_matrices(self, line: str, active: Array | None, address: Any, values: Sequence[Any], trans: bool) -> None:
        """Store matrices, the reverse of :meth:`load_matrices`."""
        warps, rows = self._rows(line, active, len(values))
        held = np.stack([np.broadcast_to(x, (self.count,)).reshape(-1, 32)[warps] for x in values], 1)
        matrices = held.view(np.uint16).reshape(-1, 8, 8)
        matrices = matrices.swapaxes(1, 2) if trans else matrices
        self._write(self.shared, rows, address, matrices.reshape(-1, 8))

    # ------------------------------------------------------------------------------------------------ synchronisation

    def barrier(self, line: str, active: Array | None) -> None:
        """Wait for all threads of a program."""
        self.line = line
        if active is not None:
            waiting, alive = active.reshape(-1, self.size), self.alive.reshape(-1, self.size)
            if (waiting.any(1) & (waiting != alive).any(1)).any():
                raise FaultError("a barrier that only some threads of a program reach")
        self.codes += (1 if active is None else active) * np.int64(1 << BARRIERS)

    def warp_barrier(self, line: str, active: Array | None) -> None:
        """Wait for all threads of a warp."""
        self._whole_warps(line, active)
        self.codes += (1 if active is None else active) * np.int64(1 << WARP_BARRIERS)

    def _whole_warps(self, line: str, active: Array | None, members: Any = 0xFFFFFFFF) -> None:
        self.line = line
        warps = None if active is None else active.reshape(-1, 32)
        partial = np.any((members != 0xFFFFFFFF) & (True if active is None else active))  # a register in few kernels
        if partial or (warps is not None and (warps.any(1) != warps.all(1)).any()):
            raise FaultError("an instruction of a warp that only some of its threads execute")

    def shuffle(self, line: str, active: Array | None, kind: str, value: Any, by: Any, clamp: Any, members: Any) -> Any:
        """Return the value of another thread of the warp, or its own if there is no such thread."""
        self._whole_warps(line, active, members)
        self.shuffles += (1 if active is None else active) * np.int64(1 << WARP_BARRIERS)
        if np.ndim(value) == 0:
            return value
        source = _cached_source if np.ndim(by) == 0 else _source
        return value[source(self.count, kind, by.astype(i8), int(clamp))]

    def reduce(self, line: str, active: Array | None, function: Any, value: Any, members: Any) -> Any:
        """Combine the values of the threads of a warp."""
        self._whole_warps(line, active, members)
        warps = np.broadcast_to(value, (self.count,)).reshape(-1, 32)
        return np.repeat(function.reduce(warps, 1, dtype=warps.dtype), 32)


def _source(count: int, kind: str, by: Any, clamp: int) -> Array:
    """Return the thread whose value each thread gets from ``shfl.sync``."""
    thread = np.arange(count)
    lane = thread % 32
    segment = clamp >> 8 & 31
    last = (lane & segment) | (clamp & 31 & ~segment)
    sources = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": (lane & segment) | (by & 31 & ~segment)}
    source = sources[kind]
    return thread - lane + np.where(source >= last if kind == "up" else source <= last, source, lane)


_cached_source: Callable[..., Array] = functools.cache(_source)
