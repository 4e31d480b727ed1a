"""Rows of logits, given or made from hidden states by an LM head: all that tells the two forms of a loss apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from dllm_kernels.base import _checks
from dllm_kernels.base._plain import all_plain, plain
from dllm_kernels.base._transform import Transform
from dllm_kernels.ops import (
    linear_row_stats,
    linear_token_nll,
    row_stats,
    token_nll,
    weighted_linear_nll,
)
from dllm_kernels.ops.token_nll import checked_weighted_nll
from dllm_kernels.rows._plan import compute_dtype
from dllm_kernels.rows._results import RowStats, TokenNLL, WeightedNLL


@dataclass(frozen=True)
class Rows:
    """What a loss is computed from.

    Attributes:
        x: logits ``[..., V]``, or hidden states ``[..., D]``.
        names: what the caller calls them, the targets and the LM head.
        options: for the ops, the same in every call.
        weight: LM head ``[V, D]`` with hidden states.
        bias: ``[V]`` or None.
        extra: the second part of the head, or None.
    """

    x: torch.Tensor
    names: _checks.Names
    options: dict[str, Any]
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    extra: _checks.Extra | None = None

    @classmethod
    def of_logits(cls, logits: torch.Tensor, *, names: _checks.Names | None = None, **options: Any) -> Rows:
        """Rows of logits."""
        return cls(logits, names or _checks.Names("logits", "target_ids"), options)

    @classmethod
    def of_hidden(
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        names: _checks.Names | None = None,
        extra: _checks.Extra | None = None,
        **options: Any,
    ) -> Rows:
        """Rows that an LM head makes of hidden states, one chunk at a time."""
        names = names or _checks.Names("hidden", "target_ids", "lm_head_weight", "lm_head_bias")
        return cls(hidden, names, options, weight, bias, extra)

    def of(self, x: torch.Tensor, name: str) -> Rows:
        """Other rows of the same kind, which the caller calls ``name``."""
        return replace(self, x=x, names=self.names._replace(rows=name))

    @property
    def fused(self) -> bool:
        """Whether there is an LM head."""
        return bool(self.names.weight)

    @property
    def acc(self) -> torch.dtype:
        """The dtype that sums over the rows are made in."""
        return torch.promote_types(self.x.dtype, torch.float32)

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.x.shape[-1] if self.weight is None else self.weight.shape[0]

    @property
    def _head(self) -> dict[str, Any]:
        """What an LM head has beside its weight."""
        return {"bias": self.bias, "extra": self.extra}

    def check(self, target_ids: torch.Tensor, *, width: int | None = None, shift: int = 0) -> None:
        """Check ``x [B, width or L, V or D]``, ``target_ids [B, L]`` and the LM head, if any.

        ``shift``: how many positions before a token stands the row that it is the target of.
        """
        names, x = self.names, self.x
        V = _checks.check_rows(names, x, target_ids, self.weight, self.bias)
        transform = _checks.checked_transform(V, *(self.options.get(step) for step in Transform._fields))
        _checks.check_ndim(names.rows, x, 3, "[B, L, D]" if self.fused else "[B, L, V]")
        _checks.check_ndim(names.targets, target_ids, 2, "[B, L]")
        B, L = target_ids.shape
        expected = (B, L if width is None else width)
        if tuple(x.shape[:2]) != expected:
            raise ValueError(
                f"{names.rows} must have shape {(*expected, x.shape[2])} to go with {names.targets} of shape {(B, L)}, "
                f"got {tuple(x.shape)}"
            )
        if self.weight is not None:
            _checks.checked_extra(names, x, self.weight, self.extra)
        targets = plain(target_ids)[:, shift:] if shift else target_ids
        _checks.check_target_range(None, names.targets, targets, V, shift=shift, skip_id=transform.skip_id)

    def weighted(self, targets: torch.Tensor, weights: torch.Tensor, **flags: Any) -> WeightedNLL:
        """The sum of weights * NLL: what a loss is whose weights are known."""
        if self.weight is None:  # which :meth:`check` has checked, and the loss what is known of its rows
            options = {**self.options, **flags}
            options.pop("check_targets", None)
            transform = _checks.checked_transform(self.vocabulary, *(options.pop(s, None) for s in Transform._fields))
            targets, weights = all_plain(targets, weights.detach().to(self.acc))
            return checked_weighted_nll(self.x, targets, weights, transform, **options)
        return weighted_linear_nll(self.x, self.weight, targets, weights, **self._head, **self.options, **flags)

    def per_row(self, targets: torch.Tensor, active: torch.Tensor, **flags: Any) -> TokenNLL:
        """The NLL of the active rows, differentiable: for weights that are not known before the forward pass."""
        options = {**self.options, **flags}
        rounds = options.pop("round_nll", False)
        if self.weight is None:
            rows, dtype = token_nll(self.x, targets, active=active, **options), self.x.dtype
        else:
            rows = linear_token_nll(self.x, self.weight, targets, active=active, **self._head, **options)
            dtype = compute_dtype(self.x, self.weight)
        return rows._replace(nll=_rounded(rows.nll, dtype)) if rounds else rows

    def stats(self, ids: torch.Tensor, active: torch.Tensor, **asked: Any) -> RowStats:
        """Statistics of the active rows, differentiable: for what is no sum of NLLs."""
        options = {name: option for name, option in self.options.items() if name != "round_nll"}  # there is no NLL
        if self.weight is None:
            return row_stats(self.x, ids, active=active, **options, **asked)
        return linear_row_stats(self.x, self.weight, ids, active=active, **self._head, **options, **asked)


def _rounded(nll: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The NLL as rounded to ``dtype``, with the gradient of what it was, which a cast there and back would round too."""
    change = (nll.to(dtype).to(nll.dtype) - nll).detach()
    return nll + change.nan_to_num(0.0, math.inf)  # of an infinite NLL it is NaN
