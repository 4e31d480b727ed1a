"""The corruption routines as torch.compile sees them: opaque ops, of which it writes no code of its own.

Their integer products pass 2^63 and wrap. In the C++ that inductor writes for a CPU that is undefined, and its compiler
made other bits of them; where the last block is short, inductor left the end of a spread or reshaped tensor unwritten.

Loaded only while a graph is traced, since registering costs import time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dllm_kernels.ops import corruption, gumbel_topk


def _ids(input_ids: torch.Tensor) -> torch.Tensor:
    return input_ids.new_empty(input_ids.shape)


def _mask(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(like.shape, dtype=torch.bool)


def _corrupted(input_ids: torch.Tensor, *_: Any) -> corruption.Corrupted:
    return _ids(input_ids), _mask(input_ids), input_ids.new_empty(input_ids.shape, dtype=torch.float32)


def _op(function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    routine = getattr(function, "__wrapped__", function)
    op = torch.library.custom_op(f"dllm_kernels::{routine.__name__.strip('_')}", routine, mutates_args=())
    op.register_fake(fake)
    return op


mask_tokens = _op(corruption.mask_tokens, _corrupted)
replace_tokens = _op(corruption.replace_tokens, _corrupted)
mask_all = _op(corruption.mask_all, _corrupted)
mask_topk = _op(corruption.mask_topk, _corrupted)
mix_tokens = _op(corruption.mix_tokens, lambda ids, *_: (_ids(ids), _mask(ids)))
complement = _op(corruption.complement, lambda noise_mask, *_: _mask(noise_mask))
sample_level = _op(
    corruption.sample_level, lambda B, method, low, high, seed, _: seed.new_empty(B, dtype=torch.float32)
)


@torch.library.custom_op("dllm_kernels::gumbel_topk_mask", mutates_args=())
def gumbel_topk_mask(
    log_w: torch.Tensor, k: torch.Tensor, uniform: torch.Tensor | None, seed: torch.Tensor | None, backend: str
) -> torch.Tensor:
    """``gumbel_topk.choose``."""
    return gumbel_topk.choose(log_w, k, uniform, seed, backend)


@gumbel_topk_mask.register_fake
def _(log_w: torch.Tensor, *_: Any) -> torch.Tensor:
    return _mask(log_w)
