"""Deferred log-probabilities and NLL at the door of functions of tensors: they are computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from dllm_kernels._utils._deferred import Deferred, computed

Function = TypeVar("Function", bound=Callable[..., Any])


def of_computed(function: Function) -> Function:
    """Decorate a function of tensors: called with deferred ones (of ``fused_head``), it receives their values."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Deferred):
                use = function.__qualname__
                args = tuple(computed(value, use) for value in args)
                return function(*args, **{name: computed(value, use) for name, value in kwargs.items()})
        return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]
