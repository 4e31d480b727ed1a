"""Evaluation of a caller's objective of row statistics: its value and its gradients in the statistics, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dllm_kernels._backends._row_stats import StatsResult, Upstream
from dllm_kernels._backends._rows import SKIP
from dllm_kernels._core._results import RowStats
from dllm_kernels._utils._checks import type_name


@dataclass(frozen=True)
class Objective:
    """``fn(stats, *aux) -> [R]`` of R rows.

    Attributes:
        fn: the caller's function.
        several: whether the caller's ids have one dimension more than the rows.
    """

    fn: Callable[..., Tensor]
    several: bool

    def of(self, found: StatsResult, active: Tensor, aux: Sequence[Tensor], needed: bool) -> tuple[Tensor, Upstream]:
        """Return (value per row, 0 in skipped rows; gradients of their sum, None for statistics that fn does not use)."""
        leaves = [found.log_probs, found.row_max + found.log_sum, found.entropy]
        leaves = [None if t is None else t.detach().clone().requires_grad_(needed) for t in leaves]
        with torch.enable_grad() if needed else torch.no_grad():
            value = self._called(leaves, found.correct, aux)
            total = torch.where(active != SKIP, value, 0.0)
            grads = self._gradients(total.sum(), [t for t in leaves if t is not None]) if needed else []
        those = iter(grads)
        upstream = [None if t is None or not needed else next(those) for t in leaves]
        return total.detach(), Upstream(upstream[0], upstream[1], upstream[2], None)

    def _called(self, leaves: list[Any], correct: Tensor | None, aux: Sequence[Tensor]) -> Tensor:
        log_probs, lse, entropy = leaves
        stats = RowStats(log_probs if self.several else log_probs.squeeze(1), lse, entropy, None, correct)
        return checked_value(self.fn(stats, *aux), lse)

    @staticmethod
    def _gradients(total: Tensor, leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
        if total.grad_fn is None or not total.requires_grad:
            return (None,) * len(leaves)
        mine = {id(t) for t in leaves}
        if any(id(t) not in mine for t in _leaves_of(total)):
            raise ValueError(
                "fn must not use a tensor that requires a gradient, which it would not get; detach it, or compute the "
                "objective from linear_row_stats"
            )
        return torch.autograd.grad(total, leaves, allow_unused=True)


def checked_value(value: Any, lse: Tensor) -> Tensor:
    """Validate the value that ``fn`` returned for rows with this logsumexp ``[R]``; cast it to its dtype."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = f"dtype {value.dtype}" if isinstance(value, Tensor) else type_name(value)
        raise TypeError(f"fn must return a floating tensor, got {got}")
    if value.shape != lse.shape:
        raise ValueError(
            f"fn must return one number for each of its {lse.numel()} rows, got shape {tuple(value.shape)}"
        )
    return value.to(lse.dtype)


def _leaves_of(t: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors that a result would send gradients to."""
    seen: set[Any] = set()
    waiting = [t.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        waiting += [following for following, _ in node.next_functions]
