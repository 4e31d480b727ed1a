"""Functions that torch.compile does not trace: kernels, the chunk loop, random bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dllm_kernels._graph._defined import DEFINED, Opaque, Spec
from dllm_kernels._graph._plain import check_no_transform, has_values

__all__ = ["Spec", "opaque", "traced"]
Function = TypeVar("Function", bound=Callable[..., Any])


def traced(x: Tensor) -> bool:
    """Return True if there is nothing to compute: while a graph is traced, and for meta and fake tensors."""
    return torch.compiler.is_compiling() or not has_values(x)


def opaque(name: str, specs: Callable[..., Sequence[Spec]]) -> Callable[[Function], Function]:
    """Make a function one custom op of compiled graphs, and of calls with meta and fake tensors; else call it directly.

    The schema of the op is that of the function's annotations. ``specs`` and ``name``: see :class:`Opaque`. The
    function must return as many tensors, or None, as ``specs``, and none of them may be an input. It runs with the
    device of its first argument, a tensor, as the current one, because Triton launches on the current device.
    """

    def decorate(function: Function) -> Function:
        defined = Opaque(name, function, specs)
        DEFINED.append(defined)

        @functools.wraps(function)
        def wrapped(x: Tensor, *args: Any) -> Any:
            if not traced(x):
                check_no_transform()
                if not x.is_cuda:
                    return function(x, *args)
                with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
                    return function(x, *args)
            from dllm_kernels._graph import _custom_ops  # imported lazily, because registration is slow

            return _custom_ops.call(defined, (x, *args))

        return wrapped  # type: ignore[return-value]

    return decorate
