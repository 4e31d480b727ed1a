"""Model output: the logits of a loss, stored or made by a head, and the ops on them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._checks._backend import use_triton
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import all_plain, has_values
from dllm_kernels.losses import _common
from dllm_kernels.ops.divergence import Compared, TeacherInput
from dllm_kernels.ops.row_stats import Mix, RowStats, row_stats_unchecked
from dllm_kernels.ops.token_nll import TokenNLL, WeightedNLL, token_nll_unchecked, weighted_nll_unchecked
from dllm_kernels.rows._call import Call, checked_logits, names_of
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._logits import LinearLogits, Logits, map_rows, opened, rows_of, vocabulary_of
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._primitives import RowPrimitives, row_primitives
from dllm_kernels.rows._setup import dtypes_of
from dllm_kernels.rows._stats_interface import StatsFlags

NAMES = _checks.Names("logits", "target_ids", "lm_head_weight", "lm_head_bias")
CAUSAL = _checks.Names("causal_logits", "target_ids", "lm_head_weight", "lm_head_bias", "causal_hidden")


class ModelOutput(NamedTuple):
    """Logits, or the record of those that a head makes, with the options of the ops.

    A loss calls :meth:`checked` once; the methods that run ops do not check again, except for the teacher.

    Attributes:
        names: the caller's names of the rows, the targets and the LM head.
        options: options of every op call.
        logits: logits ``[..., V]``, or their record.
        chunk_rows: rows per chunk of logits of a record that does not say it, or None.
    """

    names: _checks.Names
    options: Options
    logits: Logits
    chunk_rows: int | None = None

    @classmethod
    def of(cls, logits: Any, options: Options, names: _checks.Names = NAMES, size: int | None = None) -> ModelOutput:
        """Take logits, stored, deferred or a record, in chunks of ``size`` rows unless a record has its own size."""
        logits = opened(logits, options.transform)
        return cls(names_of(names, logits), options, logits, size)

    @property
    def x(self) -> Any:
        """Logits ``[..., V]`` or hidden states ``[..., D]``, maybe not validated."""
        return rows_of(self.logits)

    @property
    def stored(self) -> bool:
        """True for logits, False for a record."""
        return not isinstance(self.logits, LinearLogits)

    def packed(self, target_ids: Any) -> bool:
        """Return True if the rows ``[T, V]`` or ``[T, D]`` and the targets ``[T]`` have no batch dimension."""
        x = self.x
        tensors = isinstance(x, Tensor) and isinstance(target_ids, Tensor)
        return tensors and x.dim() == 2 and target_ids.dim() == 1

    def as_batch(self) -> ModelOutput:
        """Return packed rows as a batch of one sequence."""
        return replaced(self, logits=map_rows(self.logits, lambda t: _common.as_batch(t, 2)))

    def has_blocks(self, target_ids: Any) -> bool:
        """Return True if the rows ``[B, blocks, k, V]`` or ``[B, blocks, k, D]`` or the targets are those of blocks.

        Raises:
            ValueError: the shape of the targets ``[B, blocks, k]`` is not that of the rows.
        """
        tensors = isinstance(self.x, Tensor) and isinstance(target_ids, Tensor)
        if not tensors or (self.x.dim() != 4 and target_ids.dim() != 3):
            return False
        last = "V" if self.stored else "D"
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
        logits = map_rows(self.logits, lambda t: t.flatten(1, 2) if isinstance(t, Tensor) and t.dim() == 4 else t)
        return replaced(self, logits=logits)

    def stack(self, *others: ModelOutput) -> ModelOutput | None:
        """Stack with other rows of the same head in a new dimension, or return None if the heads differ.

        cat along a sharded sequence dimension would gather DTensors.
        """
        first, records = self.logits, [self.logits, *(other.logits for other in others)]
        transform = self.options.transform
        if not isinstance(first, LinearLogits) or any(o.options.transform != transform for o in others):
            return None
        if not all(isinstance(z, LinearLogits) and z.same_head(first) for z in records):
            return None
        extra = first.extra and (torch.stack([z.extra[0] for z in records]), first.extra[1])  # type: ignore[union-attr,index]
        hidden = torch.stack([rows_of(z) for z in records])
        return replaced(self, logits=replaced(first, hidden=hidden, extra=extra))

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
        return vocabulary_of(self.logits)

    def primitives_on(self, like: Tensor) -> RowPrimitives | None:
        """Return the backend's row primitives for a plain tensor.

        None if kernels cannot read it: it is traced, or has no values.
        """
        if torch.compiler.is_compiling() or not has_values(like):
            return None
        return row_primitives(use_triton(self.options.backend, like))

    def checked_any_shape(self, target_ids: Tensor, branches: int = 1) -> ModelOutput:
        """Validate options, rows ``[..., V or D]``, the dtype and device of the targets, and the LM head, if any."""
        logits, options, _ = checked_logits(self.names, self.logits, target_ids, self.options, branches)
        if isinstance(logits, LinearLogits) and self.chunk_rows is not None:
            logits = logits.in_chunks_of(self.chunk_rows)
        return ModelOutput(self.names, options, logits)

    def checked(self, target_ids: Tensor, *, width: int | None = None, branches: int = 1) -> ModelOutput:
        """Validate options, rows ``[B, width or L, V or D]``, ``target_ids [B, L]`` and the LM head, if any."""
        names, checked = self.names, self.checked_any_shape(target_ids, branches)
        x = checked.x
        _checks.check_ndim(names.rows, x, 3, "[B, L, V]" if self.stored else "[B, L, D]")
        _checks.check_ndim(names.targets, target_ids, 2, "[B, L]")
        B, L = target_ids.shape
        expected = (B, L if width is None else width)
        if tuple(x.shape[:2]) != expected:
            raise ValueError(
                f"{names.rows} must have shape {(*expected, x.shape[2])} to go with {names.targets} of shape {(B, L)}, "
                f"got {tuple(x.shape)}"
            )
        return checked

    def beside(self, raw: ModelOutput, valid: ModelOutput) -> ModelOutput | None:
        """Return this output without a check if it is like ``raw``, which was found ``valid``; otherwise None."""
        x, other = self.x, raw.x
        if self.options is not raw.options or not type(x) is type(other) is Tensor:
            return None
        if (x.shape, x.dtype, x.device) != (other.shape, other.dtype, other.device):
            return None
        if not isinstance(self.logits, LinearLogits):
            return replaced(valid, names=self.names, logits=self.logits) if raw.stored else None
        if self.logits.extra is not None or not self.logits.like(raw.logits):
            return None
        record: Any = valid.logits
        return replaced(valid, names=self.names, logits=replaced(record, hidden=self.x))

    def check_targets(self, target_ids: Tensor, counted: Tensor, *, shift: int = 0) -> None:
        """Check the range of the plain ``target_ids [B, L]`` from column ``shift`` on, the first that is predicted.

        ``counted [B, L - shift]``: 0 for targets of rows that do not count.
        """
        targets = target_ids[:, shift:] if shift else target_ids
        transform, V = self.options.transform, vocabulary_of(self.logits)
        transform.check_targets(None, self.names.targets, targets, V, counted=counted, shift=shift)

    def weighted(self, targets: Tensor, weights: Tensor, active: Tensor | None = None, **overrides: Any) -> WeightedNLL:
        """Compute the weighted sum of NLLs, for weights that are known before the forward pass."""
        weights = (weights.detach() if weights.requires_grad else weights).to(self.accum_dtype)
        return weighted_nll_unchecked(self._call(overrides, targets, active, weights))

    def per_row(self, targets: Tensor, active: Tensor, **overrides: Any) -> TokenNLL:
        """Compute the differentiable NLL of the active rows, for weights that are not known before the forward pass."""
        rows = token_nll_unchecked(self._call(overrides, targets, active))
        if not self.options.round_nll:
            return rows
        return replaced(rows, nll=_rounded(rows.nll, dtypes_of(self.logits)[1]))

    def stats(self, ids: Tensor, active: Tensor, mix: Mix | None = None, **flags: bool) -> RowStats:
        """Compute differentiable statistics of the active rows, for losses that are not a sum of NLLs.

        ``ids``: int64 ``[B, L]`` or ``[B, L, K]``. ``active``: ``[B, L]``. ``mix``: two floating tensors ``[B, L]``.
        ``flags``: see :class:`StatsFlags`.

        Raises:
            ValueError: NLLs are to be rounded. Statistics have no rounded form.
        """
        if self.options.round_nll:
            raise ValueError("fp32_upcast must be True for a loss that is not a sum of NLLs, got False")
        return row_stats_unchecked(self._call({}, ids, active), mix and all_plain(*mix), StatsFlags(**flags))  # type: ignore[no-any-return]

    def compared(self, teacher: TeacherInput, targets: Tensor, weights: Tensor) -> Compared:
        """Compare with a teacher, which is checked here."""
        return Compared.checked(self.names, self._call({}, targets, None, weights.detach()), teacher)

    def _call(self, overrides: dict[str, Any], ids: Tensor, active: Any, weights: Any = None) -> Call:
        options = replaced(self.options, **overrides) if overrides else self.options
        ids, active, weights = all_plain(ids, active, weights)
        return Call(self.logits, options, ids, active, weights)


def _rounded(nll: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the NLL to ``dtype`` without rounding its gradient, which a cast there and back would do."""
    change = (nll.to(dtype).to(nll.dtype) - nll).detach()
    return nll + change.nan_to_num(posinf=math.inf)  # NaN if the NLL is infinite
