"""pytest plugin that pretends there is a GPU, to find tests that would fail on one although the kernels are right.

``python -m pytest -p tests.support.pretended_gpu tests/ops``; ``kernels/test_pretended_gpu.py`` runs it on all files
with device code.

All memory is CPU memory. A storage that was created for a CUDA device, or computed from such a storage, counts as
memory of ``cuda:0``. Outside torch and Triton, ``device``, ``is_cuda`` and ``is_cpu`` report that. An operation on CPU
and CUDA memory raises, 0-d CPU tensors aside. So does ``numpy()`` of CUDA memory, and a copy of Python numbers to CUDA
memory by the package, because it would be a host sync. Kernels run in Triton's interpreter, but ``TRITON_INTERPRET`` is
0, so ``backend="triton"`` refuses tensors on the CPU. If the package launches a kernel outside of
``torch.cuda.device_of``, the test fails: the kernel would run on the current device, not on that of its tensors.

Tests of what cannot be pretended are skipped: ``gpu`` and ``many_draws`` marks, activation checkpointing,
``torch.func``, forward mode, pickle, threads, ``torch.compile`` and everything else that traces.

``--cases N`` runs at most N cases of each test, first and last included, because a test mixes devices in all its cases.
With ``--cases 1`` it is the first of one test and the last of the next, so that both backends run in each file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import pkgutil
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

os.environ["TRITON_INTERPRET"] = "1"  # while the kernels are imported, below

import pytest
import torch
import torch.distributed  # some of its functions are compared by identity, so it must see torch as it is
import torch.utils.checkpoint
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime.interpreter import GridExecutor

from dllm_kernels.deferred import _graph, _head, _nll, _pending
from dllm_kernels.deferred._tensor import DeferredTensor

T = torch.Tensor
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
REAL_DEVICE = torch._C.TensorBase.device.__get__
# Storages in CUDA memory, by address. A weak reference keeps the address from being used again.
IN_CUDA: dict[int, StorageWeakRef] = {}
# Take tensors of both devices, or set rather than compute.
TRANSFERS = {T.copy_, T.to, T.type, T.set_, T.backward, T.register_hook, torch.promote_types, torch.result_type}
TRANSFERS |= {torch._has_compatible_shallow_copy_type, torch.autograd.grad}  # of Module.to, and like T.backward
# Take indices on the CPU beside a tensor on a GPU.
INDEXING = {T.__getitem__, T.__setitem__, T.index_put_, torch.index_put, T.index_put}
# Copy Python numbers. Only the integrations may, see the table of host syncs.
OF_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, T.new_tensor}
lenient = False  # within torch.autograd.gradcheck, whose numerical gradients have new memory
guards = 0  # number of ``torch.cuda.device_of`` around the code that runs


def storage_of(t: torch.Tensor) -> int | None:
    """Return the address of the storage; None if the tensor has none (meta, fake and wrapper tensors)."""
    if isinstance(t, DeferredTensor):
        return None
    try:
        return t.untyped_storage()._cdata if REAL_DEVICE(t).type == "cpu" else None
    except (NotImplementedError, RuntimeError):
        return None


def in_cuda(t: torch.Tensor) -> bool:
    if isinstance(t, DeferredTensor):
        return bool(t._device == CUDA)
    return storage_of(t) in IN_CUDA


def move(t: Any) -> Any:
    """Count the storage of a tensor as CUDA memory."""
    address = storage_of(t)
    if address is not None and address not in IN_CUDA:
        IN_CUDA[address] = StorageWeakRef(t.untyped_storage())
    return t


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for each in value for t in tensors_in(each)] if isinstance(value, (list, tuple)) else []


def device_type(value: Any) -> str | None:
    """Return "cuda" or "cpu" if the value is such a device or its name."""
    name = value.type if isinstance(value, torch.device) else value.split(":")[0] if isinstance(value, str) else None
    return name if name in ("cuda", "cpu") else None


def called_by_torch(depth: int = 2) -> bool:
    return sys._getframe(depth).f_globals.get("__name__", "").partition(".")[0] in ("torch", "triton")


class PretendedGpu(TorchFunctionMode):
    """Run operations for CUDA on the CPU, and keep track of which memory counts as CUDA memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "__set__":
            return func(*args, **kwargs)
        for other in types:
            if issubclass(other, DeferredTensor) and torch._C._is_torch_function_enabled():  # computes in the mode
                with PretendedGpu():
                    return other.__torch_function__(func, types, args, kwargs)
        if func is T.untyped_storage:
            return func(*args, **kwargs)
        if func in (T.to, T.cuda, T.cpu):
            return self.transfer(func, args, kwargs)
        to = device_type(kwargs.get("device"))
        if to == "cuda":
            kwargs["device"] = CPU
        given = tensors_in((args, kwargs))
        here = [t for t in given if in_cuda(t)]
        if here:
            self.check(func, name, given)
        if func in OF_NUMBERS and (here or to == "cuda") and not isinstance(args[-1], torch.Tensor):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            inside = caller.startswith("dllm_kernels.") and not caller.startswith("dllm_kernels.integrations.")
            assert not inside, f"{caller}: a host sync"
        if "out_dtype" in kwargs:  # a CUDA feature of matrix products
            return self.wide_product(func, args, kwargs)
        result = func(*args, **kwargs)
        if to == "cuda" or (here and to is None):
            for t in tensors_in(result):
                move(t)
        return result

    def transfer(self, func: Any, args: Any, kwargs: Any) -> Any:
        source = args[0]
        named = [device_type(a) for a in (*args[1:], *kwargs.values())]
        like = [a for a in args[1:] if isinstance(a, torch.Tensor)]
        on = "cuda" if in_cuda((like or [source])[0]) else "cpu"
        to = {T.cuda: "cuda", T.cpu: "cpu"}.get(func) or next(filter(None, named), None) or on
        args = [CPU if device_type(a) == "cuda" else a for a in args]
        kwargs = {k: CPU if device_type(v) == "cuda" else v for k, v in kwargs.items()}
        moved = (to == "cuda") != in_cuda(source)
        result = source if func in (T.cuda, T.cpu) else func(*args, **kwargs)
        if moved and storage_of(result) == storage_of(source):
            result = result.clone()
        return move(result) if to == "cuda" else result

    def check(self, func: Any, name: str, given: list[torch.Tensor]) -> None:
        """Raise as CUDA does for memory of two devices, and for NumPy."""
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu()")
        if lenient or func in TRANSFERS or name == "__get__" or (func in INDEXING and in_cuda(given[0])):
            return
        there = [t for t in given if t.dim() and REAL_DEVICE(t).type == "cpu" and storage_of(t) and not in_cuda(t)]
        if there:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got {tuple(there[0].shape)} on cpu and "
                "others on cuda:0 (pretended GPU)"
            )

    def wide_product(self, func: Any, args: Any, kwargs: Any) -> Any:
        dtype, out = kwargs.pop("out_dtype"), kwargs.pop("out", None)
        result = func(*(a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
        return move(result) if out is None else out.copy_(result)


def patch_tensors() -> None:
    def seen(value: Any, real: Any) -> property:
        return property(lambda t: real(t) if called_by_torch() or not in_cuda(t) else value)

    T.device = seen(CUDA, REAL_DEVICE)
    T.is_cuda = seen(True, torch._C.TensorBase.is_cuda.__get__)
    T.is_cpu = seen(False, torch._C.TensorBase.is_cpu.__get__)
    T.get_device = lambda t: 0 if in_cuda(t) else -1


def patch_autograd() -> None:
    """Run backward passes of Functions in the mode, and count their upstream gradients as memory of what they saved."""
    node = torch.autograd.function.BackwardCFunction
    apply, save, gradcheck = node.apply, node.save_for_backward, torch.autograd.gradcheck

    def saved(self: Any, *tensors: Any) -> None:
        with torch._C.DisableTorchFunction():  # the mode would report pretended devices
            self.saved_cuda_tensors = any(map(in_cuda, tensors_in(tensors)))
        save(self, *tensors)

    def pretended(self: Any, *grads: Any) -> Any:
        if getattr(self, "saved_cuda_tensors", False):
            for g in tensors_in(grads):
                move(g)
        with PretendedGpu():
            return apply(self, *grads)

    def check(*args: Any, **kwargs: Any) -> bool:
        global lenient
        lenient = True
        try:
            return gradcheck(*args, **kwargs)
        finally:
            lenient = False

    node.apply, node.save_for_backward = pretended, saved
    torch.autograd.gradcheck = check


class Generator(torch.Generator):
    """A generator that knows its pretended device."""

    devices: ClassVar[weakref.WeakKeyDictionary[Any, torch.device]] = weakref.WeakKeyDictionary()

    def __new__(cls, device: Any = "cpu") -> Generator:
        made = super().__new__(cls, "cpu")
        cls.devices[made] = CUDA if device_type(device) == "cuda" else CPU
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:
        """The pretended device, but not for torch."""
        return CPU if called_by_torch() else self.devices.get(self, CPU)


def patch_cuda() -> None:
    torch.backends.cudnn.enabled = False  # that of a CUDA build crashes without a GPU
    properties = SimpleNamespace(
        multi_processor_count=132, name="pretended", total_memory=80 << 30, major=9, minor=0, warp_size=32
    )
    values = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "synchronize": None,
        "empty_cache": None,
        "get_device_name": "pretended",
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "is_current_stream_capturing": False,
        "manual_seed": None,
        "manual_seed_all": None,
    }
    for name, value in values.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = lambda *_: torch.get_rng_state(), lambda *_: None
    for other in (torch.xpu, torch.mtia):
        other.manual_seed_all = lambda seed: None
    torch.Generator = Generator
    autocast = torch.autocast.__init__
    torch.autocast.__init__ = lambda self, device_type, *a, **k: autocast(self, "cpu", *a, **k)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        real = getattr(torch, name)
        setattr(torch, name, functools.partial(lambda f, *d: f(*("cpu" for _ in d)), real))


class DeviceOf:
    """``torch.cuda.device_of``, which only counts."""

    def __init__(self, t: torch.Tensor) -> None:
        self.count = int(t.is_cuda)

    def __enter__(self) -> None:
        global guards
        guards += self.count

    def __exit__(self, *_: object) -> None:
        global guards
        guards -= self.count


def launched_by() -> str:
    """Return the module that called a launcher of the package, or launched a kernel itself."""
    frame: Any = sys._getframe(2)
    while (name := frame.f_globals.get("__name__", "")).startswith(("triton.", "dllm_kernels.backends.triton.")):
        frame = frame.f_back
    return str(name)


def patch_launches() -> None:
    """Fail if the package launches a kernel outside of ``torch.cuda.device_of``."""
    torch.cuda.device_of = DeviceOf
    launch = GridExecutor.__call__

    def guarded(self: Any, *args: Any, **options: Any) -> None:
        by = launched_by()
        assert guards or not by.startswith("dllm_kernels."), f"{by} launches {self.fn.__name__} without device_of"
        launch(self, *args, **options)

    GridExecutor.__call__ = guarded


def patch_comparison() -> None:
    assert_close = torch.testing.assert_close

    def compared(actual: Any, expected: Any, **options: Any) -> None:
        if options.get("check_device", True):
            for a, e in zip(tensors_in(actual), tensors_in(expected), strict=False):
                with torch._C.DisableTorchFunction():  # the mode would report pretended devices
                    same = in_cuda(a) == in_cuda(e)
                assert same, "The values for attribute 'device' do not match (pretended GPU)"
        global lenient
        was, lenient = lenient, True
        try:
            assert_close(actual, expected, **options)
        finally:
            lenient = was

    torch.testing.assert_close = compared


def patch_wrappers() -> None:
    """Make tensor subclasses without memory on the CPU, because autograd asks their device for its stream."""
    placeholder, of = _graph.placeholder, _graph.PartsGradient.of.__func__
    _graph.placeholder = lambda cls, meta, device, *rest: placeholder(cls, meta, CPU, *rest)
    _head.FOLDERS += (__file__,)  # whose frames are not the place of a use
    _graph.PartsGradient.of = classmethod(lambda cls, like, *rest: of(cls, (*like[:2], CPU), *rest))
    _pending.compute = _nll.compute = in_mode(_pending.compute)


def in_mode(function: Any) -> Any:
    """Return a function that runs in the mode also below ``__torch_function__``, which torch leaves for it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with PretendedGpu() if torch.overrides._get_current_function_mode() is None else contextlib.nullcontext():
            return function(*args, **kwargs)

    return run


def cannot(what: str) -> Any:
    def skipped(*_: Any, **__: Any) -> NoReturn:
        pytest.skip(f"a pretended GPU cannot {what}")

    return skipped


def import_kernels() -> None:
    """Import all kernels as the interpreter's, then hide the setting, as on a machine with a GPU."""
    from tests.support import interpreter

    interpreter.install()
    knobs.runtime.interpret = True  # of Triton itself, also after the setting is hidden
    triton = importlib.import_module("dllm_kernels.backends.triton")
    for module in pkgutil.iter_modules(triton.__path__):
        importlib.import_module(f"{triton.__name__}.{module.name}")
    os.environ["TRITON_INTERPRET"] = "0"


import_kernels()
patch_tensors()
patch_autograd()
patch_cuda()
patch_launches()
patch_comparison()
patch_wrappers()
for owner, name in ((torch, "compile"), (torch.export, "export"), (torch.library, "opcheck")):
    setattr(owner, name, cannot("trace"))
torch.utils.checkpoint.checkpoint = cannot("recompute in a backward pass")
for owner, name in (
    (torch.autograd.forward_ad, "make_dual"),
    *((torch.func, name) for name in torch.func.__all__ if name != "functional_call"),
):
    setattr(owner, name, cannot("wrap tensors"))


def dumps(*args: Any, real: Any = pickle.dumps, **kwargs: Any) -> bytes:
    if sys._getframe(1).f_globals.get("__name__", "").startswith("tests."):
        pytest.skip("a pretended GPU cannot pickle its memory")
    return real(*args, **kwargs)


def start(thread: threading.Thread, real: Any = threading.Thread.start) -> None:
    if getattr(thread._target, "__module__", "").startswith("tests."):
        pytest.skip("a pretended GPU cannot run kernels in several threads, as Triton's interpreter")
    real(thread)


pickle.dumps, threading.Thread.start = dumps, start
MODE = PretendedGpu()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, help="run at most this number of cases of each test")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need a real GPU, and choose cases of each test, evenly spaced."""
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("many_draws"):
            item.add_marker(pytest.mark.skip(reason="needs more than a pretended GPU"))
    if (most := config.option.cases) is not None:
        tests: dict[Any, list[pytest.Item]] = {}
        for item in items:
            tests.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
        last = max(most - 1, 1)
        kept = {
            c[at * (len(c) - 1) // last]
            for k, c in enumerate(tests.values())
            for at in (range(most) if most > 1 else [k % 2])
        }
        items[:] = [item for item in items if item in kept]


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Any:
    """Import test modules, which create tensors, in the mode."""
    with MODE:
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol() -> Any:
    """Run each test in the mode."""
    with MODE:
        yield
