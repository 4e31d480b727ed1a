"""Launch on the GPU that holds the tensors, whichever is current: Triton launches on the current one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Launcher = TypeVar("Launcher", bound=Callable[..., Any])


def on_its_device(launcher: Launcher) -> Launcher:
    """Make the device of the first argument, a tensor, the current one during a launcher; nothing on CPU."""

    @functools.wraps(launcher)
    def launch(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(tensor):
            return launcher(tensor, *args, **kwargs)

    return launch  # type: ignore[return-value]
