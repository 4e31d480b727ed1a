"""Arithmetic per row that the NLL ops share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dllm_kernels._core._setup import Setup


def in_rows(made: Iterable[Tensor], rows: torch.Size, setup: Setup) -> Any:
    """Return (nll, lse, correct) in the shape of the caller's rows; None for those that were not requested."""
    each = iter(made)
    return [next(each).view(rows) if given else None for given in (True, setup.with_lse, setup.with_correct)]


def logsumexp(row_max: Any, log_sum: Any, setup: Setup) -> Any:
    """Return the logsumexp if requested."""
    return row_max + log_sum if setup.with_lse else None


def rounded(nll: Tensor, round_nll: bool, setup: Setup) -> Tensor:
    """Round the NLL to the dtype of the logits, if requested, like a cross-entropy computed in that dtype."""
    return nll.to(setup.logits_dtype).to(nll.dtype) if round_nll else nll


def weighted_sum(nll: Tensor, weights: Tensor, mask_zero: bool) -> Tensor:
    """Sum weights * nll. If rows of weight 0 are active, their NaN are masked out."""
    product = nll * weights
    return (product.masked_fill_(weights == 0, 0.0) if mask_zero else product).sum()
