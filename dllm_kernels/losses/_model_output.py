"""Model output: logits, or hidden states plus LM head. The only place where the two forms of a loss differ."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from dllm_kernels import _checks
from dllm_kernels._checks._backend import use_triton
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import all_plain, has_values
from dllm_kernels.losses import _common
from dllm_kernels.ops import divergence, linear_divergence
from dllm_kernels.ops.linear_nll import linear_token_nll_unchecked, weighted_linear_nll_unchecked
from dllm_kernels.ops.row_stats import Mix, linear_row_stats_unchecked, row_stats_unchecked
from dllm_kernels.ops.token_nll import token_nll_unchecked, weighted_nll_unchecked
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import RowPrimitives
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._primitives import row_primitives
from dllm_kernels.rows._results import Divergence, RowStats, TokenNLL, WeightedNLL
from dllm_kernels.rows._setup import Head, compute_dtype

LOGITS = _checks.Names("logits", "target_ids")
HIDDEN = _checks.Names("hidden", "target_ids", "lm_head_weight", "lm_head_bias")


class ModelOutput(NamedTuple):
    """Logits, or hidden states and LM head, with the options of the ops.

    A loss calls :meth:`check` once; the methods that run ops do not check again, except for the teacher.

    Attributes:
        names: the caller's names of the rows, the targets and the LM head.
        options: options of every op call.
        x: logits ``[..., V]``, or hidden states ``[..., D]``.
        weight: LM head ``[V, D]`` with hidden states.
        bias: ``[V]`` or None.
        extra: low-rank second part of the head, or None.
    """

    names: _checks.Names
    options: Options
    x: torch.Tensor
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    extra: _checks.Extra | None = None

    def of(self, x: torch.Tensor, name: str) -> ModelOutput:
        """Return this output with other rows ``x`` of the same kind; ``name`` is their argument name."""
        return replaced(self, x=x, names=replaced(self.names, rows=name))

    def packed(self, target_ids: Any) -> bool:
        """Return True if the rows ``[T, V]`` or ``[T, D]`` and the targets ``[T]`` have no batch dimension."""
        tensors = isinstance(self.x, torch.Tensor) and isinstance(target_ids, torch.Tensor)
        return tensors and self.x.dim() == 2 and target_ids.dim() == 1

    def as_batch(self) -> ModelOutput:
        """Return packed rows as a batch of one sequence."""
        return replaced(self, x=self.x.unsqueeze(0), extra=_common.extra_as_batch(self.extra))

    def of_blocks(self, target_ids: Any) -> bool:
        """Return True if the rows ``[B, blocks, k, V]`` or ``[B, blocks, k, D]`` or the targets are those of blocks.

        Raises:
            ValueError: the shape of the targets ``[B, blocks, k]`` is not that of the rows.
        """
        tensors = isinstance(self.x, torch.Tensor) and isinstance(target_ids, torch.Tensor)
        if not tensors or (self.x.dim() != 4 and target_ids.dim() != 3):
            return False
        last = "V" if self.weight is None else "D"
        if self.x.dim() == 3:
            raise ValueError(
                f"{self.names.rows} must have shape [B, blocks, k, {last}] to go with {self.names.targets} of shape "
                f"{tuple(target_ids.shape)}, got {tuple(self.x.shape)}"
            )
        of = f"[B, blocks, k] of {self.names.rows} [B, blocks, k, {last}]"
        _checks.check_shape(self.names.targets, target_ids, self.x.shape[:-1], of)
        return True

    def blocks_as_sequences(self) -> ModelOutput:
        """Return rows of blocks ``[B, blocks, k, ...]`` as rows of sequences ``[B, blocks * k, ...]``."""
        extra = self.extra
        if extra is not None and isinstance(extra[0], torch.Tensor) and extra[0].dim() == 4:
            extra = extra[0].flatten(1, 2), extra[1]
        return replaced(self, x=self.x.flatten(1, 2), extra=extra)

    def stack(self, other: ModelOutput) -> ModelOutput:
        """Stack with other rows in a new dimension, because cat along a sharded sequence dimension gathers DTensors."""
        return replaced(self, x=torch.stack([self.x, other.x]))

    def transformed(self, **fields: Any) -> ModelOutput:
        """Return this output with other fields of the transform of its logits."""
        transform = replaced(self.options.transform, **fields)
        return replaced(self, options=replaced(self.options, transform=transform))

    @property
    def accum_dtype(self) -> torch.dtype:
        """Dtype of sums over the rows."""
        return accum_dtype(self.x.dtype)

    @property
    def vocabulary(self) -> int:
        """Vocabulary size V."""
        return self.x.shape[-1] if self.weight is None else self.weight.shape[0]

    def primitives_on(self, like: torch.Tensor) -> RowPrimitives | None:
        """Return the backend's row primitives for a plain tensor.

        None if kernels cannot read it: it is traced, or has no values.
        """
        if torch.compiler.is_compiling() or not has_values(like):
            return None
        return row_primitives(use_triton(self.options.backend, like))

    def check(self, target_ids: torch.Tensor, *, width: int | None = None) -> None:
        """Check ``x [B, width or L, V or D]``, ``target_ids [B, L]`` and the LM head, if any."""
        names, x = self.names, self.x
        _checks.check_rows(names, x, target_ids, self.weight, self.bias)
        _checks.check_ndim(names.rows, x, 3, "[B, L, V]" if self.weight is None else "[B, L, D]")
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

    def check_targets(self, target_ids: torch.Tensor, counted: torch.Tensor, *, shift: int = 0) -> None:
        """Check the range of the plain ``target_ids [B, L]`` from column ``shift`` on, the first that is predicted.

        ``counted [B, L - shift]``: 0 for targets of rows that do not count.
        """
        targets, skip_id = target_ids[:, shift:] if shift else target_ids, self.options.transform.skip_id
        _checks.check_target_range(
            None, self.names.targets, targets, self.vocabulary, counted=counted, shift=shift, skip_id=skip_id
        )

    def weighted(
        self, targets: torch.Tensor, weights: torch.Tensor, *, active: torch.Tensor | None = None, **overrides: Any
    ) -> WeightedNLL:
        """Compute the weighted sum of NLLs, for weights that are known before the forward pass."""
        weights = (weights.detach() if weights.requires_grad else weights).to(self.accum_dtype)
        targets, weights, active = all_plain(targets, weights, active)
        arguments: dict[str, Any] = {"targets": targets, "weights": weights, "active": active}
        arguments["options"] = self._checked_options(overrides)
        if self.weight is None:
            return weighted_nll_unchecked(self.x, **arguments)
        return weighted_linear_nll_unchecked(self.x, self.head, **arguments)

    def per_row(self, targets: torch.Tensor, active: torch.Tensor, **overrides: Any) -> TokenNLL:
        """Compute the differentiable NLL of the active rows, for weights that are not known before the forward pass."""
        targets, active = all_plain(targets, active)
        options = self._checked_options(overrides)
        if self.weight is None:
            rows = token_nll_unchecked(self.x, targets=targets, active=active, options=options)
        else:
            rows = linear_token_nll_unchecked(self.x, self.head, targets=targets, active=active, options=options)
        if not self.options.round_nll:
            return rows
        dtype = self.x.dtype if self.weight is None else compute_dtype(self.x, self.weight)
        dtype = self.options.logits_dtype or dtype
        return replaced(rows, nll=_rounded(rows.nll, dtype))

    def stats(self, ids: torch.Tensor, active: torch.Tensor, mix: Mix | None = None, **overrides: Any) -> RowStats:
        """Compute differentiable statistics of the active rows, for losses that are not a sum of NLLs."""
        ids, active = all_plain(ids, active)
        arguments: dict[str, Any] = {"ids": ids, "active": active, "mix": mix and all_plain(*mix)}
        arguments["options"] = self._checked_options(overrides)
        if self.weight is None:
            return row_stats_unchecked(self.x, **arguments)  # type: ignore[no-any-return]
        return linear_row_stats_unchecked(self.x, self.head, **arguments)  # type: ignore[no-any-return]

    def divergence(self, teacher: torch.Tensor, weights: torch.Tensor, /, **overrides: Any) -> Divergence:
        """Compute the divergence to the teacher's logits or hidden states; the op checks the teacher."""
        keywords = self.keywords() | overrides
        if self.weight is None:
            return divergence(self.x, teacher, weights.detach(), **keywords)
        return linear_divergence(self.x, self.weight, teacher, weights.detach(), **keywords)

    def keywords(self) -> dict[str, Any]:
        """Return the options, and the rest of the LM head if there is one, as keyword arguments of a public op."""
        o = self.options
        keywords = {**o.transform._asdict(), "check_targets": o.check_targets, "backend": o.backend}
        if self.weight is None:
            return keywords
        of_head = {"bias": self.bias, "extra": self.extra, "chunk_size": o.chunk_size, "num_active": o.num_active}
        return {**keywords, **of_head, "logits_dtype": o.logits_dtype}

    @property
    def head(self) -> Head:
        """The LM head, which must be present."""
        assert self.weight is not None
        return Head(self.weight, self.bias, *(self.extra or (None, None)))

    def _checked_options(self, overrides: dict[str, Any]) -> Options:
        options = replaced(self.options, **overrides) if overrides else self.options
        return options.checked(self.vocabulary, self.x.shape[:-1].numel())


def _rounded(nll: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round the NLL to ``dtype`` without rounding its gradient, which a cast there and back would do."""
    change = (nll.to(dtype).to(nll.dtype) - nll).detach()
    return nll + change.nan_to_num(0.0, math.inf)  # NaN if the NLL is infinite
