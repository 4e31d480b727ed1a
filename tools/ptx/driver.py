"""Triton's launches, executed here: Triton itself chooses the kernel for the arguments and compiles it for sm_90."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import triton
from triton.backends.nvidia.compiler import CUDABackend

from tools.gpus import TARGETS
from tools.mock_gpu import Driver
from tools.ptx.threads import Launch, launch

_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d", "*": "Q",
}  # fmt: skip


class Executed:
    """A compiled kernel as Triton launches it."""

    function = packed_metadata = None

    def __init__(self, source: Any, target: Any, options: dict[str, Any]) -> None:
        self._compiled = triton.compile(source, target=target, options=options)
        self._types = {name: kind for name, kind in source.signature.items() if kind != "constexpr"}
        self._names = source.fn.arg_names

    def launch_metadata(self, *_: Any) -> None:
        """Return None, because no profiling tool is attached."""

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        """Execute a launch; the arguments of the kernel are the last entries of ``rest``."""
        arguments = dict(zip(self._names, rest[-len(self._names) :], strict=True))
        parameters, tensors = [], []
        for name, kind in self._types.items():
            value = arguments[name]
            if kind.startswith("*"):
                tensors.append((name, value))
                kind, value = "*", value.data_ptr()
            parameters.append(struct.pack("<" + _FORMATS[kind], value))
        metadata, text = self._compiled.metadata, self._compiled.asm["ptx"]
        launch(Launch(metadata.name, text, (x, y, z), metadata.shared, parameters, tensors))


def install() -> None:
    """Make Triton compile kernels for sm_90, up to PTX, and execute their launches on tensors of the CPU."""
    os.environ["TRITON_INTERPRET"] = "0"
    # A cache of its own, because its kernels have no machine code.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "ptx"))
    CUDABackend.make_cubin = lambda self, src, *_: src.encode()
    triton.runtime.driver._active = Driver(TARGETS["sm_90"].gpu_target(), -1)
    triton.compiler.compile = Executed
