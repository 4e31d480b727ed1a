"""The corruption routines as torch.compile sees them: opaque ops, of which it writes no code of its own.

Their integer products pass 2^63 and wrap. In the C++ that inductor writes for a CPU that is undefined, and its compiler
made other bits of them; where the last block is short, inductor left the end of a spread or reshaped tensor unwritten.

Loaded only while a graph is traced, since registering costs import time.
"""

from __future__ import annotations

from typing import Any

import torch

from dllm_kernels.ops import corruption
from dllm_kernels.ops.gumbel_topk import _mask


@torch.library.custom_op("dllm_kernels::mask_tokens", mutates_args=())
def mask_tokens_op(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, token: int, eps: float, seed: torch.Tensor, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return corruption.mask_tokens(input_ids, loss_mask, token, eps, seed, backend)


@torch.library.custom_op("dllm_kernels::replace_tokens", mutates_args=())
def replace_tokens_op(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    vocab_size: int,
    block_size: int | None,
    eps: float,
    seed: torch.Tensor,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return corruption.replace_tokens(input_ids, loss_mask, vocab_size, block_size, eps, seed, backend)


@torch.library.custom_op("dllm_kernels::mask_all", mutates_args=())
def mask_all_op(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, token: int, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return corruption.mask_all(input_ids, loss_mask, token, backend)


@torch.library.custom_op("dllm_kernels::mask_topk", mutates_args=())
def mask_topk_op(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    token: int,
    block_size: int | None,
    eps: float,
    half_life_ratio: float,
    seed: torch.Tensor,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return corruption.mask_topk(input_ids, loss_mask, token, block_size, eps, half_life_ratio, seed, backend)


def _like(input_ids: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p_mask = input_ids.new_empty(input_ids.shape, dtype=torch.float32)
    return input_ids.new_empty(input_ids.shape), p_mask.new_empty(p_mask.shape, dtype=torch.bool), p_mask


for _op in (mask_tokens_op, replace_tokens_op, mask_all_op, mask_topk_op):
    _op.register_fake(_like)


@torch.library.custom_op("dllm_kernels::gumbel_topk_mask", mutates_args=())
def gumbel_topk_op(
    log_w: torch.Tensor,
    k: torch.Tensor,
    uniform: torch.Tensor | None,
    seed: torch.Tensor | None,
    triton: bool,
) -> torch.Tensor:
    return _mask(log_w, k, uniform, seed, triton)


@gumbel_topk_op.register_fake
def _(
    log_w: torch.Tensor, k: torch.Tensor, uniform: torch.Tensor | None, seed: torch.Tensor | None, triton: bool
) -> torch.Tensor:
    return log_w.new_empty(log_w.shape, dtype=torch.bool)
