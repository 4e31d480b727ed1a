"""I-DLM: training an autoregressive model to decode in parallel, with a masked and a clean copy in one forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._checks import Extra
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import all_plain
from dllm_kernels.losses import _common
from dllm_kernels.losses._base import TransformedLoss
from dllm_kernels.losses._common import Count, DLLMLossOutput, divide, logged_sum, next_tokens, shift_left
from dllm_kernels.losses._model_output import ModelOutput
from dllm_kernels.rows._logits import LinearLogits, Logits
from dllm_kernels.rows._transform import Transform

CLEAN_MIN = 1e-6


class IDLMLoss(TransformedLoss):
    r"""Next-token cross-entropy of the answer on the masked copy of a sequence, and on its clean copy.

    .. math::
        \text{loss} = \text{CE}(z^{noisy}) + \alpha \, \text{CE}(z^{clean}), \qquad
        \text{CE}(z) = \frac{1}{N} \sum_{i < L,\; i + 1\,\in\,\text{answer} \cap \text{valid}} \text{nll}(z_i, x_{i+1})

    The first term trains the model to decode masked tokens, the second to verify them. N is ``num_diffusion_tokens``,
    or if None the number of scored positions of this call. Both halves are one call over ``[B, 2 L, V]``: the targets
    are shifted, not the logits, so no slice is copied. Rows that are not scored are not read.

    Source: Introspective Diffusion Language Models, arXiv 2604.11035, eq. 2 for the balance.

    Args:
        clean_loss_weight: alpha, a finite constant.
        auto_balance: True to use the constant alpha ``CE(noisy) / max(CE(clean), 1e-6)`` instead, so that both terms
            have equal weight. It is known only after the forward pass, so from hidden states with a trainable head the
            logits are computed twice.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
        reduction: "total", or "none" to also return the loss of each row: ``[B, 2 L]``, the rows of the masked copy
            followed by the rows of the clean copy, with alpha in their weights.
        backend: "auto", "triton" or "torch".

    Raises:
        TypeError: ``clean_loss_weight`` is not a number, or ``auto_balance`` is not a bool.
        ValueError: ``clean_loss_weight`` is not finite. Every call checks both again.
    """

    def __init__(
        self, clean_loss_weight: float = 0.2, auto_balance: bool = False, *, softcap: float | None = None,
        scale: float | None = None, skip_id: int | None = None, reduction: str = "total", backend: str = "auto",
    ) -> None:  # fmt: skip
        """Initialize; the arguments are documented on the class."""
        super().__init__(Transform(softcap, scale, skip_id), reduction, backend)
        self.auto_balance = _checks.checked_bool("auto_balance", auto_balance)
        _checks.check_finite("clean_loss_weight", clean_loss_weight)
        self.clean_loss_weight = float(clean_loss_weight)  # a Fraction cannot multiply a tensor

    def forward(
        self, logits: Logits, target_ids: Tensor, answer_mask: Tensor, valid_mask: Tensor, *,
        seq_len: int, num_diffusion_tokens: int | Tensor | None = None,
    ) -> DLLMLossOutput:  # fmt: skip
        """Compute the loss from logits.

        Packed input without a batch dimension, ``[2 T, V]`` with targets and masks ``[T]``, is a batch of one sequence.

        Args:
            logits: ``[B, 2 L, V]``, any float dtype: the masked copy, then the clean copy.
            target_ids: ``[B, L]`` integers, the clean tokens; -100 counts as NLL 0.
            answer_mask: ``[B, L]``, nonzero if the token belongs to the answer. The previous row predicts it, so the
                last row of the prompt is scored for the first token of the answer.
            valid_mask: ``[B, L]``, nonzero if the token is not padding.
            seq_len: L.
            num_diffusion_tokens: divides both sums, as ``max(n, 1)``; int or 0-d tensor. None: the number of scored
                positions of this call.

        Returns:
            :class:`DLLMLossOutput`: ``dllm_loss`` is CE(noisy), detached.

        Raises:
            TypeError: an argument that should be a tensor or an int is not.
            ValueError: shapes, dtypes or devices do not match, a ``seq_len`` other than L, or a count that requires a
                gradient.
        """
        rows = self._rows(logits, self._options())
        _checks.checked_bool("auto_balance", self.auto_balance)  # the attributes may have been reassigned
        _checks.check_finite("clean_loss_weight", self.clean_loss_weight)
        if rows.packed(target_ids):
            rows = rows.as_batch()
            target_ids, answer_mask, valid_mask = map(_common.as_batch, (target_ids, answer_mask, valid_mask))
        _checks.check_tensor("target_ids", target_ids)
        rows = rows.checked(target_ids, width=2 * target_ids.shape[1] if target_ids.dim() == 2 else None)
        target_ids, answer_mask, valid_mask = all_plain(target_ids, answer_mask, valid_mask)
        targets, L = next_tokens(target_ids), target_ids.shape[1]
        _checks.checked_int("seq_len", seq_len)
        if seq_len != L:
            raise ValueError(f"seq_len must be the length of target_ids, {L}, got {seq_len}")
        _checks.check_masks_like("target_ids", target_ids, answer_mask=answer_mask, valid_mask=valid_mask)
        _common.check_counts(num_diffusion_tokens=num_diffusion_tokens)
        # A row is scored if its next token is a valid token of the answer.
        scored = shift_left(answer_mask.bool() & valid_mask.bool())
        rows.check_targets(target_ids, scored[:, :-1], shift=1)
        count = scored.sum()
        weights = divide(scored.to(rows.accum_dtype), count if num_diffusion_tokens is None else num_diffusion_tokens)
        both = torch.cat([targets, targets], 1)
        returns_rows = self._returns_rows()
        if self.auto_balance or returns_rows:
            return self._per_row_output(rows, both, scored.to(rows.accum_dtype), weights, returns_rows)
        out = rows.weighted(both, torch.cat([weights, self.clean_loss_weight * weights], 1))
        weight_sum = (1 + self.clean_loss_weight) * count.to(rows.accum_dtype)
        return DLLMLossOutput(out.loss, logged_sum(out.nll[:, :L], weights), weight_sum=weight_sum)

    def forward_fused(
        self, hidden: Tensor, lm_head_weight: Tensor, target_ids: Tensor, answer_mask: Tensor, valid_mask: Tensor, *,
        seq_len: int, num_diffusion_tokens: Count = None, lm_head_bias: Tensor | None = None,
        extra: Extra | None = None, chunk_size: int | None = None, num_active: int | None = None,
        logits_dtype: torch.dtype | None = None,
    ) -> DLLMLossOutput:  # fmt: skip
        """Compute :meth:`forward` of ``LinearLogits(hidden, lm_head_weight, lm_head_bias, extra, ...)``."""
        logits = LinearLogits(hidden, lm_head_weight, lm_head_bias, extra, logits_dtype, chunk_size, num_active)
        return IDLMLoss.forward(
            self, logits, target_ids, answer_mask, valid_mask, seq_len=seq_len,
            num_diffusion_tokens=num_diffusion_tokens,
        )  # fmt: skip

    def _per_row_output(
        self, rows: ModelOutput, both: Tensor, scored: Tensor, weights: Tensor, returns_rows: bool
    ) -> DLLMLossOutput:
        """Compute the output from per-row NLLs of both halves ``[B, 2 L]``; ``weights`` is ``scored`` / count."""
        L = weights.shape[1]
        factor = 1.0 if self.auto_balance else self.clean_loss_weight  # rows of weight 0 are not read
        nll = rows.per_row(both, torch.cat([weights, factor * weights], 1)).nll
        noisy, clean = (nll[:, :L] * weights).sum(), (nll[:, L:] * weights).sum()
        alpha = (noisy / clean.clamp(min=CLEAN_MIN)).detach() if self.auto_balance else self.clean_loss_weight
        out = DLLMLossOutput(noisy + alpha * clean, noisy.detach().clone(), weight_sum=(1 + alpha) * scored.sum())
        if not returns_rows:
            return out
        row_weights = torch.cat([scored, alpha * scored], 1)
        return replaced(out, row_losses=_common.weighted_rows(nll, row_weights), row_weights=row_weights)
