"""Graphs of autograd that a call builds and differentiates before it returns."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from dllm_kernels._graph._private import saved_tensors_hooks_enabled


def own_graph() -> contextlib.AbstractContextManager[Any]:
    """Hide the graph that is built inside from the caller's hooks of saved tensors.

    Under activation checkpointing without reentrant autograd, reading a saved tensor recomputes the checkpointed
    function. A graph that is differentiated inside that function would therefore run it once more for each call, and
    ``save_on_cpu`` would copy each tensor to the host and back.
    """
    if torch.compiler.is_compiling() or not saved_tensors_hooks_enabled():
        return contextlib.nullcontext()  # there are no hooks, and setting any would raise
    return torch.autograd.graph.saved_tensors_hooks(with_version, unchanged)


class ModifiedError(RuntimeError):
    """A tensor that a backward pass needs was modified in place; without hooks, torch raises a RuntimeError."""


def with_version(t: Tensor) -> tuple[Tensor, int]:
    """Return a tensor and the version of its values."""
    return t, 0 if t.is_inference() else t._version


def unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """Return the tensor of :func:`with_version`, or raise if it was modified since."""
    t, version = saved
    if not t.is_inference() and t._version != version:
        raise ModifiedError(
            "tensors that the backward pass needs must not be modified in place before it, got a modified "
            f"{str(t.dtype).removeprefix('torch.')} tensor of shape {tuple(t.shape)}"
        )
    return t
