"""Arithmetic per row that the NLL ops share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dllm_kernels._graph._opaque import Spec
from dllm_kernels.rows._setup import Setup


def in_rows(results: Iterable[Tensor], rows: torch.Size, setup: Setup) -> Any:
    """Return (nll, lse, correct, ids) in the shape of the caller's rows; None for those that were not requested."""
    each, flags = iter(results), (True, setup.with_lse, setup.with_correct, setup.with_ids)
    return [next(each).view(rows) if flag else None for flag in flags]


def argmax_specs(y: Tensor, setup: Setup) -> list[Spec]:
    """Return shape and dtype of (correct, ids) of the rows ``y``."""
    requested = ((setup.with_correct, torch.bool), (setup.with_ids, torch.int64))
    return [(y.shape, dtype) if flag else None for flag, dtype in requested]


def logsumexp(row_max: Any, log_sum: Any, setup: Setup) -> Any:
    """Return the logsumexp if requested."""
    return row_max + log_sum if setup.with_lse else None


def rounded(nll: Tensor, round_nll: bool, setup: Setup) -> Tensor:
    """Round the NLL to the dtype of the logits, if requested, like a cross-entropy computed in that dtype."""
    return nll.to(setup.chunk_dtype).to(nll.dtype) if round_nll else nll


def weighted_sum(nll: Tensor, weights: Tensor, mask_zero: bool) -> Tensor:
    """Sum weights * nll. If rows of weight 0 are active, their NaN are masked out."""
    product = nll * weights
    return (product.masked_fill_(weights == 0, 0.0) if mask_zero else product).sum()
