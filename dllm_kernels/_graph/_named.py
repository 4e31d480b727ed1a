"""Replacement for ``_replace`` of named tuples in code that torch.compile traces."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=tuple[Any, ...])


def replaced(t: T, **fields: Any) -> T:
    """Replace fields; works around torch 2.11, where a NamedTuple produced by ``_replace`` cannot be a graph output."""
    if not torch.compiler.is_compiling():
        return t._replace(**fields)  # type: ignore[attr-defined, no-any-return]
    return type(t)(**{**t._asdict(), **fields})  # type: ignore[attr-defined]
