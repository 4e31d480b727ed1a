"""torch's checks of the custom ops that a call runs: schema, fake tensors, autograd registration, tracing."""

import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dllm_kernels._graph import _opaque
from dllm_kernels._graph._defined import DEFINED


class Recorder(TorchDispatchMode):
    """Records the calls of custom ops of the package."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dllm_kernels":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def signature(func, *arguments):
    """Return what the checks depend on: the layouts of tensors, and other arguments. Chunks of a call share it."""
    leaves = tree_leaves(arguments)
    return func, *((t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else t for t in leaves)


def opcheck_calls(run, monkeypatch):
    """Check each custom op that ``run`` calls, with its arguments; return their names.

    All opaque functions run as custom ops, as in a compiled graph.
    """
    monkeypatch.setattr(_opaque, "traced", lambda x: True)
    with Recorder() as recorder:
        run()
    for func, args, kwargs in {signature(*call): call for call in recorder.calls}.values():
        args = tuple(t.detach().clone() if isinstance(t, torch.Tensor) else t for t in args)
        torch.library.opcheck(func, args, kwargs)
    return {func._opname for func, _, _ in recorder.calls}


def check_specs():
    """Let each direct call of an opaque function compare its results with the specs of its custom op."""
    for defined in DEFINED:
        called = vars(sys.modules[defined.function.__module__])[defined.function.__name__]
        cells = dict(zip(called.__code__.co_freevars, called.__closure__, strict=True))
        cells["function"].cell_contents = _checked(defined)


def _checked(defined):
    def function(*args):
        results = defined.function(*args)
        expected = [spec and (torch.Size(spec[0]), spec[1]) for spec in defined.specs(*args)]
        assert [None if t is None else (t.shape, t.dtype) for t in results] == expected, defined.name
        return results

    return function
