"""Ops that a loss runs, recorded where losses call them; and counted host syncs and matrix products."""

from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dllm_kernels.losses import _model_output
from dllm_kernels.rows._call import Call

SUFFIX = "_unchecked"


class Run(NamedTuple):
    """Name of the op, and its validated arguments."""

    op: str
    call: Call


def record_ops(replace, result=None):
    """Record the ops of all losses from now on; ``replace(owner, name, value)`` sets an attribute.

    The recorded ops return ``result``, or run if it is None.
    """
    runs = []

    def recording(name, function):
        def recorded(call, *others, **options):
            runs.append(Run(name.removesuffix(SUFFIX), call))
            return function(call, *others, **options) if result is None else result

        return recorded

    for name, function in list(vars(_model_output).items()):
        if name.endswith(SUFFIX):
            replace(_model_output, name, recording(name, function))
    return runs


class ReadBack(TorchDispatchMode):
    """Count how often the number of nonzero elements is read back, which is a host sync on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.nonzero.default
        return function(*args, **(kwargs or {}))


def multiplications(function):
    """Count the multiplications of all matrix products."""
    # torch's counter does not know addmm_.
    mapping = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        function()
    return counter.get_total_flops() // 2
