"""Memory that kernels access: bounds, alignment, memory that nobody wrote, and accesses that no barrier separates.

Each access is noted with the number of its thread and of the barriers that the thread has passed. Two threads race for
an address if one writes there, another one reads or changes it, and nothing orders them. Threads of two programs are
never ordered, those of a program by ``bar.sync``, and those of a warp by ``bar.warp.sync``, too. Threads of one program
may write the same value to one address.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tools.ptx.arithmetic import UNSIGNED

Array = NDArray[Any]
# First bits of the parts of a thread's code: its number (lane and warp), the warp barriers and the barriers that it has
# passed, its program.
WARP, WARP_BARRIERS, BARRIERS, PROGRAM = 5, 11, 27, 43
READ, WRITE, CHANGE = 0, 1, 2  # kinds of accesses; a write does not change memory that has its value already
#: True: if threads store different values at one place, the first one stays, which is no fault.
FIRST_STAYS = os.environ.get("PTX_WINNER") == "first"
#: Contents of memory that nobody wrote, and of registers: NaN in most dtypes, an unusual integer, no bool.
UNWRITTEN, UNSET = (np.frombuffer(bytes([low, 0x7F] * 4), np.uint8) for low in (0xDE, 0xAD))


class FaultError(AssertionError):
    """An access or a synchronisation that a GPU does not allow, or whose outcome it leaves open."""


class Memory:
    """One piece of memory.

    Args:
        name: name for messages.
        base: address of the first byte.
        data: the bytes.
        granule: bytes of the smallest access.
        inside: True for each byte that belongs to a tensor; None: all do.
    """

    def __init__(self, name: str, base: int, data: Array, granule: int, inside: Array | None = None) -> None:
        self.name, self.base, self.data, self.granule, self.inside = name, base, data, granule, inside
        self._log: list[tuple[Array, Array, Array, str]] = []

    def read(self, offset: Array, itemsize: int, count: int, codes: Array, line: str) -> Any:
        """Return ``count`` numbers of ``itemsize`` bytes from each offset."""
        numbers, places = self._elements(offset, itemsize, count)
        self._note(offset, itemsize * count, codes, READ, line)
        return numbers[places]

    def write(self, offset: Array, values: Array, codes: Array, line: str) -> None:
        """Store one row of ``values`` at each offset."""
        numbers, places = self._elements(offset, values.itemsize, values.shape[1])
        kinds = np.where((numbers[places] != values).any(1), CHANGE, WRITE)
        if FIRST_STAYS:  # copies, because NumPy does not follow the order of a view
            places, values = places[::-1].copy(), values[::-1].copy()
        numbers[places] = values
        if (numbers[places] != values).any() and not FIRST_STAYS:
            raise FaultError(f"threads store different values at one place of {self.name}")
        self._note(offset, values.itemsize * values.shape[1], codes, kinds, line)

    def _elements(self, offset: Array, itemsize: int, count: int) -> tuple[Array, Array]:
        """Return the memory as numbers of ``itemsize`` bytes, and the places [n, count] of accesses in it."""
        numbers = self.data[: len(self.data) // itemsize * itemsize].view(UNSIGNED[itemsize])
        return numbers, offset[:, None] // itemsize + np.arange(count)

    def _note(self, offset: Array, width: int, codes: Array, kinds: Any, line: str) -> None:
        """Note the accesses of one instruction for :meth:`check`."""
        granules = offset[:, None] // self.granule + np.arange(max(width // self.granule, 1))
        kinds = np.broadcast_to(np.reshape(kinds, (-1, 1)), granules.shape)
        self._log.append((granules.ravel(), np.repeat(codes, granules.shape[1]), kinds.ravel(), line))

    def check(self, *, written: bool) -> None:
        """Raise an error if two noted accesses race or, if not ``written`` before, one reads what nobody wrote."""
        log, self._log = self._log, []
        if not log or (written and not any(kinds.any() for _, _, kinds, _ in log)):
            return
        place, code, kind = (np.concatenate([entry[k] for entry in log]) for k in range(3))
        entry = np.repeat(np.arange(len(log)), [len(granules) for granules, *_ in log])
        if not written:
            first = np.zeros(place.max() + 1, int)
            first[place[::-1]] = np.arange(len(place))[::-1]
            unwritten = np.flatnonzero(kind[first[place]] == READ)
            if len(unwritten):
                line = log[entry[unwritten[0]]][3]
                raise FaultError(f"{line} reads {self._byte(place[unwritten[0]])}, which nobody wrote")
        # Only places that several threads access, and one writes, are sorted.
        thread = code >> PROGRAM << WARP_BARRIERS | code & 2047
        last = np.zeros(place.max() + 1, int)
        last[place] = thread
        several, writes = np.zeros((2, len(last)), bool)
        several[place[last[place] != thread]] = True
        writes[place[kind != READ]] = True
        place, code, kind, entry = (x[(several & writes)[place]] for x in (place, code, kind, entry))
        if not len(place):
            return
        warp = code >> WARP & 63
        for by, who, what in (
            (0, code >> PROGRAM, "program"),
            (code >> BARRIERS, warp, "warp"),
            (code >> WARP_BARRIERS << 6 | warp, code & 2047, "thread"),
        ):
            by = np.broadcast_to(by, place.shape)
            order = np.lexsort((by, place))  # in each group, accesses stay in the order of execution
            p, b, w, k = place[order], by[order], who[order], kind[order]
            new = np.append(True, (p[1:] != p[:-1]) | (b[1:] != b[:-1]))
            starts = np.flatnonzero(new)
            apart = np.maximum.reduceat(w, starts) != np.minimum.reduceat(w, starts)
            some_read, some_write = np.minimum.reduceat(k, starts) == READ, np.maximum.reduceat(k, starts) != READ
            # Threads that store with one instruction store the same value; a change that comes later is another value.
            first = entry[order[starts]][np.cumsum(new) - 1]
            later = np.maximum.reduceat(np.where(entry[order] == first, READ, k), starts) == CHANGE
            racing = np.flatnonzero(apart & some_write & (some_read | later | (what == "program")))
            if len(racing):
                group = order[starts[racing[0]] : np.append(starts, len(p))[racing[0] + 1]]
                a = group[kind[group] != READ][0]
                other = group[who[group] != who[a]][0]
                both = " and ".join(f"{log[entry[i]][3]} ({what} {who[i]})" for i in (a, other))
                raise FaultError(f"{both} access {self._byte(place[a])} in any order")

    def _byte(self, granule: int) -> str:
        return f"byte {granule * self.granule} of {self.name}"


class Shared:
    """Shared memory of several programs, ``size`` bytes each."""

    def __init__(self, size: int, programs: int) -> None:
        self.size, self.room = size, -(-size // 16) * 16
        self.memory = Memory("shared memory", 0, np.tile(UNWRITTEN, self.room * programs // 8), 1)

    def find(self, address: Array, width: int, codes: Array, first: int) -> Iterator[tuple[Memory, Array, Any]]:
        """See :meth:`Global.find`; the address is that in the program's own memory."""
        offset = address.astype(np.int64)
        if (offset % width).any() or (offset > self.size - width).any():
            raise FaultError(f"{width} bytes at {offset.max():#x} of {self.size} bytes of shared memory")
        yield self.memory, offset + ((codes >> PROGRAM) - first) * self.room, slice(None)


class Global:
    """The memory of the tensors (name, tensor) of a launch."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        views: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors:
            if tensor.untyped_storage().nbytes():
                views.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
        self.memories = [self._memory(base, views[base]) for base in sorted(views)]
        self._bases = np.array([memory.base for memory in self.memories], np.uint64)

    @staticmethod
    def _memory(base: int, views: list[tuple[str, torch.Tensor]]) -> Memory:
        nbytes = views[0][1].untyped_storage().nbytes()
        data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(base))
        inside = np.zeros(nbytes, bool)
        for _, t in views:
            shape, strides = (*t.shape, t.element_size()), (*(s * t.element_size() for s in t.stride()), 1)
            torch.as_strided(torch.from_numpy(inside), shape, strides, t.data_ptr() - base).fill_(True)
        granule = min(t.element_size() for _, t in views)
        return Memory("+".join(name for name, _ in views), base, data, granule, None if inside.all() else inside)

    def find(self, address: Array, width: int, codes: Array, first: int) -> Iterator[tuple[Memory, Array, Any]]:
        """Yield (memory, offsets, indices of the threads) of accesses of a width, after checking them."""
        if (address % np.uint64(width)).any():
            raise FaultError(f"misaligned access of {width} bytes")
        pieces = np.searchsorted(self._bases, address, side="right") - 1
        for piece in np.unique(pieces):
            index = slice(None) if pieces[0] == piece and (pieces == piece).all() else np.flatnonzero(pieces == piece)
            memory = self.memories[piece]
            offset = (address[index] - self._bases[piece]).astype(np.int64)
            outside = offset > len(memory.data) - width if piece >= 0 else np.ones(len(offset), bool)
            if memory.inside is not None and not outside.any():
                outside = ~memory.inside[offset[:, None] + np.arange(width)].all(1)
            if outside.any():
                raise FaultError(f"{width} bytes at byte {offset[outside][0]} of {memory.name}, outside of the tensor")
            yield memory, offset, index
