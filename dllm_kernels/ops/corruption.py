"""The corruption routines of ``noise/_corrupt.py``, each a single op under torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dllm_kernels.noise import _corrupt

METHODS = ("uniform", "antithetic", "stratified")
Routine = TypeVar("Routine", bound=Callable[..., Any])


def _opaque(routine: Routine) -> Routine:
    """Under torch.compile a call is one op."""

    @functools.wraps(routine)
    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            from dllm_kernels.noise import _compiled

            return getattr(_compiled, routine.__name__)(*args)
        return routine(*args)

    return call  # type: ignore[return-value]


mask_tokens = _opaque(_corrupt.mask_tokens)
replace_tokens = _opaque(_corrupt.replace_tokens)
mask_all = _opaque(_corrupt.mask_all)
mask_topk = _opaque(_corrupt.mask_topk)
mix_tokens = _opaque(_corrupt.mix_tokens)
complement = _opaque(_corrupt.complement)
sample_level = _opaque(_corrupt.sample_level)
