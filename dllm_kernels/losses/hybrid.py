"""Hybrid diffusion + AR: masked diffusion on one branch of the model, next-token prediction on the other."""

from __future__ import annotations

import functools

import torch
from torch import nn

from dllm_kernels.losses._common import (
    HIDDEN,
    LOGITS,
    DLLMLossOutput,
    check_bl,
    check_counts,
    check_optional,
    divide,
    mdlm_weights,
    normalized,
    shift_left,
)
from dllm_kernels.ops import weighted_linear_nll, weighted_nll
from dllm_kernels.ops._checks import check_constant
from dllm_kernels.ops._plain import all_plain

Count = int | torch.Tensor | None


class HybridDiffusionLLMLoss(nn.Module):
    r"""``alpha`` times the masked-diffusion loss plus next-token cross-entropy on the causal branch.

    .. math::
        \text{loss} = \frac{\alpha}{N_d} \sum_{i\,\in\,\text{noise} \cap \text{supervised}} \frac{\text{nll}_i}{p_i}
                    + \frac{1}{N_{ar}} \sum_{i < L} m^{ar}_{i+1} \, \text{nll}(z^{ar}_i, x_{i+1})

    The AR part exists only when there are AR logits and ``loss_mask_ar`` is given. Its targets are shifted, not its
    logits. The legacy layout ``[B, L + L, V]``, diffusion logits then AR logits, is one call over the whole tensor.

    Source: Sahoo et al. 2024 (MDLM), eq. 10, for the diffusion part; the sum of both as in Nemotron-Labs-Diffusion.

    Args:
        alpha: weight of the diffusion part.
        fp32_upcast: as in :class:`MDLMCrossEntropyLoss`.
        backend: "auto", "triton" or "torch".
    """

    def __init__(self, alpha: float = 1.0, fp32_upcast: bool = True, *, backend: str = "auto") -> None:
        super().__init__()
        self.alpha = alpha
        self.fp32_upcast = fp32_upcast
        self.backend = backend

    def forward(
        self,
        logits: torch.Tensor,
        target_ids: torch.Tensor,
        noise_mask: torch.Tensor,
        p_mask: torch.Tensor,
        loss_mask: torch.Tensor,
        loss_mask_ar: torch.Tensor | None = None,
        num_diffusion_tokens: int | torch.Tensor | None = None,
        num_ar_tokens: int | torch.Tensor | None = None,
        causal_logits: torch.Tensor | None = None,
        noisy_input_ids: torch.Tensor | None = None,
    ) -> DLLMLossOutput:
        """Compute the loss from logits.

        Args:
            logits: ``[B, L, V]``; or ``[B, 2 L, V]``, the diffusion logits followed by the AR logits.
            target_ids: ``[B, L]`` integers, the clean tokens; -100 counts as NLL 0.
            noise_mask: ``[B, L]``, nonzero where the token was masked.
            p_mask: ``[B, L]``, the probability with which it was.
            loss_mask: ``[B, L]``, nonzero where the token is supervised by the diffusion part.
            loss_mask_ar: ``[B, L]``, the weight of each token as an AR target (fractions are kept); None: no AR part.
            num_diffusion_tokens: divides the diffusion sum, as ``max(n, 1)``; int or 0-d tensor. None: the sum itself.
            num_ar_tokens: divides the AR sum likewise.
            causal_logits: ``[B, L, V]`` AR logits of their own; None: those in ``logits``, if it has them.
            noisy_input_ids: not used; there so that all losses are called alike.

        Returns:
            :class:`DLLMLossOutput`: ``total_loss`` of both parts, ``dllm_loss`` the detached ``alpha * diffusion``.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices that do not fit.
        """
        concatenated = causal_logits is None and _is_concatenated(logits, target_ids)
        width = _width(logits, target_ids, loss_mask_ar) if concatenated else None
        check_bl(LOGITS, logits, target_ids, width=width)
        check_counts(num_diffusion_tokens=num_diffusion_tokens, num_ar_tokens=num_ar_tokens)
        check_optional(target_ids, loss_mask_ar, causal_logits=causal_logits, noisy_input_ids=noisy_input_ids)
        self._check_constants(loss_mask_ar)
        if causal_logits is not None and loss_mask_ar is not None:
            check_bl(LOGITS._replace(rows="causal_logits"), causal_logits, target_ids)
        weights = mdlm_weights(logits, target_ids, noise_mask, p_mask, loss_mask)
        summed = functools.partial(weighted_nll, round_nll=not self.fp32_upcast, backend=self.backend)
        if concatenated:
            targets, both = self._both(logits, target_ids, weights, loss_mask_ar, num_diffusion_tokens, num_ar_tokens)
            rows = summed(logits, targets, both)
            return DLLMLossOutput(rows.loss, _diffusion_part(rows.nll, both, target_ids.shape[1]))
        diffusion = divide(summed(logits, target_ids, self.alpha * weights).loss, num_diffusion_tokens)
        if causal_logits is None or loss_mask_ar is None:
            return DLLMLossOutput(diffusion, diffusion.detach().clone())
        ar = summed(causal_logits, shift_left(target_ids), _ar_weights(target_ids, loss_mask_ar))
        return DLLMLossOutput(diffusion + divide(ar.loss, num_ar_tokens), diffusion.detach().clone())

    def forward_fused(
        self,
        hidden: torch.Tensor,
        lm_head_weight: torch.Tensor,
        target_ids: torch.Tensor,
        noise_mask: torch.Tensor,
        p_mask: torch.Tensor,
        loss_mask: torch.Tensor,
        loss_mask_ar: torch.Tensor | None = None,
        num_diffusion_tokens: int | torch.Tensor | None = None,
        num_ar_tokens: int | torch.Tensor | None = None,
        causal_hidden: torch.Tensor | None = None,
        noisy_input_ids: torch.Tensor | None = None,
        *,
        lm_head_bias: torch.Tensor | None = None,
        chunk_size: int | None = None,
    ) -> DLLMLossOutput:
        """Compute the same loss from hidden states and the LM head, both branches in one pass over the head.

        Args:
            hidden: ``[B, L, D]``; or ``[B, 2 L, D]``, the diffusion branch followed by the AR branch.
            lm_head_weight: ``[V, D]``.
            target_ids: as in :meth:`forward`, and so the masks and counts.
            noise_mask: as in :meth:`forward`.
            p_mask: as in :meth:`forward`.
            loss_mask: as in :meth:`forward`.
            loss_mask_ar: as in :meth:`forward`.
            num_diffusion_tokens: as in :meth:`forward`.
            num_ar_tokens: as in :meth:`forward`.
            causal_hidden: ``[B, L, D]`` hidden states of the AR branch; None: those in ``hidden``, if it has them.
            noisy_input_ids: not used.
            lm_head_bias: ``[V]`` or None.
            chunk_size: rows of logits that exist at a time; None chooses.

        Returns:
            :class:`DLLMLossOutput` as in :meth:`forward`.

        Raises:
            TypeError: an argument that should be a tensor is not.
            ValueError: shapes, dtypes or devices that do not fit.
        """
        concatenated = causal_hidden is None and _is_concatenated(hidden, target_ids)
        width = _width(hidden, target_ids, loss_mask_ar) if concatenated else None
        check_bl(HIDDEN, hidden, target_ids, lm_head_weight, lm_head_bias, width=width)
        check_counts(num_diffusion_tokens=num_diffusion_tokens, num_ar_tokens=num_ar_tokens)
        check_optional(target_ids, loss_mask_ar, causal_hidden=causal_hidden, noisy_input_ids=noisy_input_ids)
        self._check_constants(loss_mask_ar)
        stacked = causal_hidden is not None and loss_mask_ar is not None
        if causal_hidden is not None and stacked:
            names = HIDDEN._replace(rows="causal_hidden")
            check_bl(names, causal_hidden, target_ids, lm_head_weight, lm_head_bias)
        weights = mdlm_weights(hidden, target_ids, noise_mask, p_mask, loss_mask)
        if concatenated or stacked:
            targets, both = self._both(hidden, target_ids, weights, loss_mask_ar, num_diffusion_tokens, num_ar_tokens)
        else:
            targets, both = target_ids, self.alpha * normalized(weights, num_diffusion_tokens, hidden)
        if causal_hidden is not None and stacked:
            # Along a new dimension: of DTensors split along the sequence, cat along it would gather the whole.
            hidden = torch.stack([hidden, causal_hidden])
            targets, both = (torch.stack(t.chunk(2, dim=1)) for t in (targets, both))
        rows = weighted_linear_nll(
            hidden, lm_head_weight, targets, both, bias=lm_head_bias, chunk_size=chunk_size,
            round_nll=not self.fp32_upcast, backend=self.backend,
        )  # fmt: skip
        diffusion = (rows.nll[0], both[0]) if stacked else (rows.nll, both)
        return DLLMLossOutput(rows.loss, _diffusion_part(*diffusion, target_ids.shape[1]))

    def _check_constants(self, loss_mask_ar: torch.Tensor | None) -> None:
        check_constant("alpha", self.alpha)
        check_constant("loss_mask_ar", loss_mask_ar)

    def _both(
        self,
        like: torch.Tensor,
        target_ids: torch.Tensor,
        weights: torch.Tensor,
        loss_mask_ar: torch.Tensor | None,
        num_diffusion_tokens: Count,
        num_ar_tokens: Count,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Targets and weights of all rows of both branches, each weight with its own denominator folded in."""
        (target_ids,) = all_plain(target_ids)
        diffusion = self.alpha * normalized(weights, num_diffusion_tokens, like)
        if loss_mask_ar is None:
            rest = (0, like.shape[1] - target_ids.shape[1])
            return nn.functional.pad(target_ids.long(), rest, value=-100), nn.functional.pad(diffusion, rest)
        ar = normalized(_ar_weights(target_ids, loss_mask_ar), num_ar_tokens, like)
        return torch.cat([target_ids, shift_left(target_ids)], 1), torch.cat([diffusion, ar.to(diffusion)], 1)


def _is_concatenated(x: torch.Tensor, target_ids: torch.Tensor) -> bool:
    tensors = isinstance(x, torch.Tensor) and isinstance(target_ids, torch.Tensor)
    return tensors and x.dim() == 3 and target_ids.dim() == 2 and x.shape[1] > target_ids.shape[1]


def _width(x: torch.Tensor, target_ids: torch.Tensor, loss_mask_ar: torch.Tensor | None) -> int:
    """Positions that both branches together must have; without an AR part any number may follow the diffusion rows."""
    return x.shape[1] if loss_mask_ar is None else 2 * target_ids.shape[1]


def _ar_weights(target_ids: torch.Tensor, loss_mask_ar: torch.Tensor) -> torch.Tensor:
    """The AR mask of the token each position predicts; fractions are kept as weights."""
    target_ids, loss_mask_ar = all_plain(target_ids, loss_mask_ar)
    dtype = torch.promote_types(loss_mask_ar.dtype, torch.float32)
    return torch.nn.functional.pad(loss_mask_ar[:, 1:].to(dtype), (0, 1))[:, : target_ids.shape[1]]


def _diffusion_part(nll: torch.Tensor, weights: torch.Tensor, L: int) -> torch.Tensor:
    """The diffusion rows' share of the loss, detached; the other rows come after them."""
    return (nll[:, :L] * weights[:, :L].to(nll.dtype)).sum()
