"""Mock GPU: the package behaves as on a GPU, but kernel launches are recorded instead of executed.

    with MockGPU("sm_90") as gpu:
        logits = torch.empty(4, 1024, 126464, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        torch.autograd.grad(ops.token_nll(logits, targets).nll.sum(), logits)
    gpu.launches, gpu.specimens

Tensors created on ``"cuda"`` in this context have a shape, strides and an address but no memory ("meta" tensors).
Their sizes may therefore be those of real training. All code except torch sees them on ``cuda:0``. Reading a value back
to the host raises an error, or returns 0 if ``reads_zeros``. ``nonzero`` never does: :attr:`MockGPU.active_share` sets
the length of its result.

Triton's driver and compiler are replaced. Triton specialises the arguments of every launch as on a GPU (alignment,
ones, types, and on AMD the buffers below 2 GiB), and requests a compilation if it needs a new kernel. The result is a
:class:`Specimen`, which compiles on demand, for this GPU or for another GPU of the same vendor.
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

T = torch.Tensor
# Operations that read values back to the host.
READS = {T.cpu, T.item, T.tolist, T.__bool__, T.__float__, T.__index__, T.__int__}
LAUNCH_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
_GPU = torch.device("cuda", 0)
_real_device = torch._C.TensorBase.device.__get__
_sessions = itertools.count()


@dataclass(frozen=True, eq=False)
class Specimen:
    """A kernel specialised for one launch: the input of Triton's compiler.

    Attributes:
        source: the kernel with the types and alignment of its arguments and its constants.
        target: the GPU.
        options: launch options such as ``num_warps``.
        gpu: the mock GPU that records the launches.
    """

    source: Any
    target: GPUTarget
    options: dict[str, Any]
    gpu: MockGPU

    @property
    def kernel(self) -> str:
        """Name of the kernel function, without its leading underscore."""
        return str(self.source.fn.__name__).lstrip("_")

    @property
    def dtype(self) -> str:
        """Triton's name of the dtype of the data, to which the first argument points."""
        return str(self.source.signature[self.source.fn.arg_names[0]]).removeprefix("*")

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time values: declared constants, None for a missing pointer, 1 for an integer equal to 1."""
        names = self.source.fn.arg_names
        values = {names[path[0]]: value for path, value in self.source.constants.items()}
        return {name: getattr(value, "value", value) for name, value in values.items()}

    @property
    def types(self) -> dict[str, str]:
        """Types of the run-time arguments with their specialisation: ``*bf16 D`` is divisible by 16."""
        marks = {"tt.divisibility": "D", "tt.pointer_range": "S"}
        names = self.source.fn.arg_names
        known = {names[path[0]]: "".join(marks[name] for name, _ in found) for path, found in self.source.attrs.items()}
        signature = {name: kind for name, kind in self.source.signature.items() if kind != "constexpr"}
        return {name: f"{kind} {known.get(name, '')}".strip() for name, kind in signature.items()}

    @property
    def key(self) -> tuple[Any, ...]:
        """Identity of the kernel; the same on every GPU of a vendor except for ``tt.pointer_range``."""
        options = tuple(self.options.get(name) for name in LAUNCH_OPTIONS)
        constants = {name: str(value) for name, value in self.constants.items()}
        return self.kernel, *self.types.items(), *constants.items(), options

    def compile(self, target: str | None = None) -> Any:
        """Compile the kernel for this GPU or another GPU of the same vendor."""
        if target is None:
            gpu_target, options = self.target, self.options
        else:
            # Options with target-specific defaults are not passed on.
            gpu_target = TARGETS[target].gpu_target()
            options = {name: self.options[name] for name in LAUNCH_OPTIONS if name in self.options}
        return triton.compile(self.source, target=gpu_target, options=options)

    # Methods that Triton calls on a compiled kernel at a launch.
    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        """Return None, because no profiling tool is attached."""

    def run(self, x: int, y: int, z: int, *rest: Any) -> None:
        """Record the launch; the arguments of the kernel are the last entries of ``rest``."""
        names = self.source.fn.arg_names
        arguments = {name: _outlined(value) for name, value in zip(names, rest[-len(names) :], strict=True)}
        self.gpu.launches.append(Launch(self, (x, y, z), arguments))


@dataclass(frozen=True)
class Outline:
    """Metadata of a tensor in a launch.

    A reference to the tensor itself would keep it alive, and would make autograd copy a gradient that others hold.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def _outlined(value: Any) -> Any:
    return Outline(tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Launch:
    """A launch: the kernel, the number of programs, and the arguments by name, with tensors as outlines."""

    specimen: Specimen
    grid: tuple[int, int, int]
    arguments: dict[str, Any]


class MockGPU:
    """A context in which ``"cuda"`` is this GPU.

    Args:
        name: one of ``tools.gpus.TARGETS``.
        memory: size of its memory in bytes.
        reads_zeros: True to return zeros where values are read back to the host.

    Attributes:
        launches: every launch so far.
        specimens: every kernel that a launch needed, in the order of first use, when Triton would compile it.
        active_share: fraction of a mask that ``nonzero`` reports as nonzero.
        syncs: number of calls of ``nonzero`` so far; on a GPU, each is a host sync.
    """

    def __init__(self, name: str, memory: int = 80 << 30, *, reads_zeros: bool = False) -> None:
        self.limits, self.memory, self.reads_zeros = TARGETS[name], memory, reads_zeros
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
        """Simulate that the current stream is being captured into a CUDA graph."""
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        yield triton.runtime.driver, "_active", Driver(self.target, self._session)
        yield triton.compiler, "compile", self._specimen
        yield torch.Tensor, "device", property(lambda t: _GPU if _seems_on_gpu(t) else _real_device(t))
        yield torch.Tensor, "is_cuda", property(lambda t: _seems_on_gpu(t))
        yield torch.cuda, "is_current_stream_capturing", lambda: self._is_capturing
        properties = SimpleNamespace(multi_processor_count=132, total_memory=self.memory)
        yield torch.cuda, "get_device_properties", lambda device: properties
        yield torch.version, "hip", "mock" if self.limits.backend == "hip" else None
        yield torch.autograd.function.BackwardCFunction, "apply", _with_modes_of_forward(self)

    def _specimen(self, source: Any, target: GPUTarget, options: dict[str, Any]) -> Specimen:
        """Replacement of ``triton.compile``."""
        specimen = Specimen(source, target, dict(options), self)
        self.specimens.append(specimen)
        return specimen


def _seems_on_gpu(tensor: torch.Tensor) -> bool:
    """Return True for a mock tensor if the caller is not torch, because torch must see the real device."""
    asking = sys._getframe(2).f_globals.get("__name__", "")
    return tensor.is_meta and asking.partition(".")[0] != "torch"


def _with_modes_of_forward(gpu: MockGPU) -> Any:
    """Wrap ``backward`` of an ``autograd.Function``, because ``torch.autograd.grad`` disables the mode of forward."""
    apply: Any = torch.autograd.function.BackwardCFunction.apply

    def run(self: Any, *grads: Any) -> Any:
        with _OnMeta(gpu):
            return apply(self, *grads)

    return run


class _OnMeta(TorchFunctionMode):
    """Creates tensors for "cuda" on "meta", and replaces operations that "meta" does not support."""

    def __init__(self, gpu: MockGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self.gpu.reads_zeros and func in READS and args[0].is_meta:
            return func(torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu"), *args[1:], **kwargs)
        args = tuple(_meta_device(a, always=func is T.to) for a in args)
        if "device" in kwargs:
            kwargs["device"] = _meta_device(kwargs["device"], always=True)
        if func in (torch.nonzero, T.nonzero) and args[0].is_meta:
            self.gpu.syncs += 1
            found = round(args[0].numel() * self.gpu.active_share)
            return torch.empty(found, args[0].dim(), dtype=torch.int64, device="meta")
        if func is torch.addmm and "out_dtype" in kwargs:  # torch 2.11 supports this only on a GPU
            return kwargs["out"]
        return func(*args, **kwargs)


def _meta_device(value: Any, always: bool = False) -> Any:
    """Map a CUDA device to "meta"; a string is mapped only if ``always``, because it may not be a device."""
    if isinstance(value, torch.device) or (always and isinstance(value, str)):
        return torch.device("meta") if torch.device(value).type == "cuda" else value
    return value


@dataclasses.dataclass(frozen=True)
class Driver:
    """Replacement of Triton's driver. Each mock has a unique device, because Triton caches by device."""

    target: GPUTarget
    session: int

    def get_current_device(self) -> str:
        """Return the unique device."""
        return f"mock {self.session}"

    def get_current_stream(self, device: Any = None) -> int:
        """Return the default stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return the GPU for which Triton compiles."""
        return self.target
