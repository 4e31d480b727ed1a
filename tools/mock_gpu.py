"""A GPU that is not there: the package runs as on one, and its launches are written down instead of executed.

    with MockGPU("sm_90") as gpu:
        logits = torch.empty(4, 1024, 126464, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        torch.autograd.grad(ops.token_nll(logits, targets).nll.sum(), logits)
    gpu.launches, gpu.specimens

Tensors made on ``"cuda"`` in there have a shape, strides and an address but no memory ("meta" tensors), so that sizes
may be those of real training. Everyone but torch itself sees them on ``cuda:0``. Whatever would read a value back to
the host raises, but for ``nonzero``, of whose result :attr:`MockGPU.active_share` tells the length.

Triton's driver and its compiler stand behind a curtain: every launch has its arguments specialised by Triton as on a
GPU (alignment, ones, types, and on AMD which buffers are below 2 GiB) and asks for a compilation where it needs a new
kernel. It gets a :class:`Specimen`, which compiles when it is asked to, for this GPU or another of its make.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget

from tools.gpus import TARGETS

LAUNCH_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
_GPU = torch.device("cuda", 0)
_real_device = torch._C.TensorBase.device.__get__
_sessions = itertools.count()


@dataclass(frozen=True, eq=False)
class Specimen:
    """One kernel, specialised for one launch: what Triton would compile.

    Attributes:
        source: the kernel with the types of its arguments, its constants and what is known of alignment.
        target: the GPU.
        options: launch options such as ``num_warps``.
        gpu: who writes down the launches.
    """

    source: Any
    target: GPUTarget
    options: dict[str, Any]
    gpu: MockGPU

    @property
    def kernel(self) -> str:
        """The name of the kernel's function, without its leading underscore."""
        return str(self.source.fn.__name__).lstrip("_")

    @property
    def dtype(self) -> str:
        """Triton's name for the type of what it works on, which its first argument points at."""
        return str(self.source.signature[self.source.fn.arg_names[0]]).removeprefix("*")

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time values: those declared so, None for a pointer that is not given, 1 for an integer that is 1."""
        names = self.source.fn.arg_names
        values = {names[path[0]]: value for path, value in self.source.constants.items()}
        return {name: getattr(value, "value", value) for name, value in values.items()}

    @property
    def types(self) -> dict[str, str]:
        """Types of the run-time arguments, with what is known of each: ``*bf16 D`` is divisible by 16."""
        marks = {"tt.divisibility": "D", "tt.pointer_range": "S"}
        names = self.source.fn.arg_names
        known = {names[path[0]]: "".join(marks[name] for name, _ in found) for path, found in self.source.attrs.items()}
        signature = {name: kind for name, kind in self.source.signature.items() if kind != "constexpr"}
        return {name: f"{kind} {known.get(name, '')}".strip() for name, kind in signature.items()}

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes it another kernel than the rest; the same on every GPU of a make but for ``tt.pointer_range``."""
        options = tuple(self.options.get(name) for name in LAUNCH_OPTIONS)
        constants = {name: str(value) for name, value in self.constants.items()}
        return self.kernel, *self.types.items(), *constants.items(), options

    def compile(self, target: str | None = None) -> Any:
        """The compiled kernel, for this GPU or another of the same make."""
        if target is None:
            gpu_target, options = self.target, self.options
        else:
            # What a target decides for itself is left to it.
            gpu_target = TARGETS[target].gpu_target()
            options = {name: self.options[name] for name in LAUNCH_OPTIONS if name in self.options}
        return triton.compile(self.source, target=gpu_target, options=options)

    # What Triton asks of a compiled kernel at its launch.
    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        """Nothing: no tool listens."""

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        """Write the launch down; the kernel's arguments stand at the end of ``rest``."""
        names = self.source.fn.arg_names
        arguments = {name: _outlined(value) for name, value in zip(names, rest[-len(names) :], strict=True)}
        self.gpu.launches.append(Launch(self, (x, y, z), arguments))


@dataclass(frozen=True)
class Outline:
    """What a launch keeps of a tensor: the tensor itself would stay alive, and autograd copy a gradient others hold."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def _outlined(value: Any) -> Any:
    return Outline(tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Launch:
    """A launch: which kernel, how many programs, the arguments by name, tensors as their outlines."""

    specimen: Specimen
    grid: tuple[int, int, int]
    arguments: dict[str, Any]


class MockGPU:
    """A context in which ``"cuda"`` is this GPU.

    Args:
        name: one of ``tools.gpus.TARGETS``.

    Attributes:
        launches: every launch so far.
        specimens: every kernel that a launch needed, in the order of its first use, which is when it is compiled.
        active_share: what share of a mask ``nonzero`` finds.
        syncs: number of calls of ``nonzero`` so far, each of which waits for the GPU.
    """

    def __init__(self, name: str) -> None:
        self.limits = TARGETS[name]
        self.target = self.limits.gpu_target()
        self.launches: list[Launch] = []
        self.specimens: list[Specimen] = []
        self.active_share = 0.5
        self.syncs = 0
        self._session = next(_sessions)
        self._is_capturing = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> MockGPU:
        with contextlib.ExitStack() as stack:
            for place, name, value in self._replacements():
                stack.enter_context(mock.patch.object(place, name, value))
            stack.enter_context(_OnMeta(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """The current stream is being captured into a CUDA graph."""
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        yield triton.runtime.driver, "_active", _Driver(self.target, self._session)
        yield triton.compiler, "compile", self._specimen
        yield torch.Tensor, "device", property(lambda t: _GPU if _seems_on_gpu(t) else _real_device(t))
        yield torch.Tensor, "is_cuda", property(lambda t: _seems_on_gpu(t))
        yield torch.cuda, "is_current_stream_capturing", lambda: self._is_capturing
        yield torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
        yield torch.version, "hip", "mock" if self.limits.backend == "hip" else None
        yield torch.autograd.function.BackwardCFunction, "apply", _with_modes_of_forward(self)

    def _specimen(self, source: Any, target: GPUTarget, options: dict[str, Any]) -> Specimen:
        """In the place of ``triton.compile``."""
        specimen = Specimen(source, target, dict(options), self)
        self.specimens.append(specimen)
        return specimen


def _seems_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether it is one of ours, asked from outside of torch, which must know the truth to work on it."""
    asking = sys._getframe(2).f_globals.get("__name__", "")
    return tensor.is_meta and asking.partition(".")[0] != "torch"


def _with_modes_of_forward(gpu: MockGPU) -> Any:
    """``backward`` of an ``autograd.Function`` under the mode that the call of ``torch.autograd.grad`` put aside."""
    apply: Any = torch.autograd.function.BackwardCFunction.apply

    def run(self: Any, *grads: Any) -> Any:
        with _OnMeta(gpu):
            return apply(self, *grads)

    return run


class _OnMeta(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on "meta"; what has no meaning there is stood in for."""

    def __init__(self, gpu: MockGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        args = tuple(_meta_device(a) for a in args)
        if "device" in kwargs:
            kwargs["device"] = _meta_device(kwargs["device"], always=True)
        if func in (torch.nonzero, torch.Tensor.nonzero):
            self.gpu.syncs += 1
            found = round(args[0].numel() * self.gpu.active_share)
            return torch.empty(found, args[0].dim(), dtype=torch.int64, device="meta")
        if func is torch.addmm and "out_dtype" in kwargs:  # torch 2.11 has it on a GPU alone
            return kwargs["out"]
        return func(*args, **kwargs)


def _meta_device(value: Any, always: bool = False) -> Any:
    """The device "meta" for a CUDA device; a string only where one can be nothing else."""
    if isinstance(value, torch.device) or (always and isinstance(value, str)):
        return torch.device("meta") if torch.device(value).type == "cuda" else value
    return value


@dataclasses.dataclass(frozen=True)
class _Driver:
    """What Triton asks of its driver at a launch; a device of its own for each mock, since Triton caches by device."""

    target: GPUTarget
    session: int

    def get_current_device(self) -> str:
        return f"mock {self.session}"

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target
