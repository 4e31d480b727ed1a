"""torch's checks of the custom ops that a call runs: schema, fake tensors, autograd registration, tracing."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dllm_kernels._graph import _opaque


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
