"""Named tuples in code that torch.compile traces."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=tuple[Any, ...])


def replaced(t: T, **fields: Any) -> T:
    """``t._replace(**fields)``, but what that makes under torch 2.11 cannot leave a graph: it is an error, or arrives empty."""
    if not torch.compiler.is_compiling():
        return t._replace(**fields)  # type: ignore[attr-defined, no-any-return]
    return type(t)(**{**t._asdict(), **fields})  # type: ignore[attr-defined]
