"""NLL from hidden states and the LM head: :func:`token_nll` and :func:`weighted_nll` of :class:`LinearLogits`."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_kernels._checks import Extra
from dllm_kernels.ops.token_nll import TokenNLL, WeightedNLL, token_nll, weighted_nll
from dllm_kernels.rows._logits import LinearLogits


def linear_token_nll(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, extra: Extra | None = None,
    active: Tensor | None = None, ignore_index: int = -100, with_lse: bool = False, with_correct: bool = False,
    with_ids: bool = False, chunk_size: int | None = None, num_active: int | None = None,
    logits_dtype: torch.dtype | None = None, softcap: float | None = None, scale: float | None = None,
    skip_id: int | None = None, check_targets: bool | None = None, backend: str = "auto",
) -> TokenNLL:  # fmt: skip
    """Compute :func:`token_nll` of ``LinearLogits(hidden, weight, bias, extra, ...)``, whose arguments it takes."""
    logits = LinearLogits(hidden, weight, bias, extra, logits_dtype, chunk_size, num_active, softcap, scale, skip_id)
    return token_nll(
        logits, targets, active=active, ignore_index=ignore_index, with_lse=with_lse, with_correct=with_correct,
        with_ids=with_ids, check_targets=check_targets, backend=backend,
    )  # fmt: skip


def weighted_linear_nll(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, *, bias: Tensor | None = None,
    extra: Extra | None = None, active: Tensor | None = None, ignore_index: int = -100, with_lse: bool = False,
    with_correct: bool = False, with_ids: bool = False, round_nll: bool = False, chunk_size: int | None = None,
    num_active: int | None = None, logits_dtype: torch.dtype | None = None, softcap: float | None = None,
    scale: float | None = None, skip_id: int | None = None, check_targets: bool | None = None, backend: str = "auto",
) -> WeightedNLL:  # fmt: skip
    """Compute :func:`weighted_nll` of ``LinearLogits(hidden, weight, bias, extra, ...)``, whose arguments it takes."""
    logits = LinearLogits(hidden, weight, bias, extra, logits_dtype, chunk_size, num_active, softcap, scale, skip_id)
    return weighted_nll(
        logits, targets, weights, active=active, ignore_index=ignore_index, with_lse=with_lse,
        with_correct=with_correct, with_ids=with_ids, round_nll=round_nll, check_targets=check_targets, backend=backend,
    )  # fmt: skip
