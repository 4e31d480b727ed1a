"""D-PACE: position weights of drafted blocks, computed from the confidence of the draft."""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._checks._target_range import first_true
from dllm_kernels._graph._plain import all_plain, readable_without_sync
from dllm_kernels.rows._dtypes import accum_dtype

# Name -> variant; the long names are used by trainers.
VARIANTS = {
    "dpace": "dpace",
    "prefix": "prefix",
    "continuation": "continuation",
    "dpace-cumulative-confidence-only": "prefix",
    "dpace-continuation-value-only": "continuation",
}
ROUNDING = 0.01  # tolerance for probabilities computed in bfloat16


def dpace_weights(
    confidence: Tensor, mask: Tensor, *, alpha: float = 0.5, variant: str = "dpace", anchor_row: bool = False
) -> Tensor:
    r"""Position weights of drafted blocks, computed from the confidence of the draft instead of a fixed decay.

    .. math::
        \tilde q_i = (1 - \alpha) \, q_i + \alpha, \qquad C_j = \prod_{i \le j} \tilde q_i, \qquad
        S_j = \sum_{m \ge j} C_m \, \text{mask}_m

    A block ends before its first position whose mask is 0: :math:`\tilde q_i = 0` from there on. The prefix product C
    is the smoothed probability that a block is accepted up to position j. The suffix sum S is the expected number of
    accepted tokens from j on. S / C is this expected number given that all tokens up to j are accepted. Early positions
    have larger weights because more tokens depend on them. Positions after one of low confidence have smaller weights.
    The weights are detached.

    Source: D-PACE, arXiv 2605.18810.

    Args:
        confidence: ``[..., k]`` floating, in [0, 1], one block per row: the draft's probability of each target token,
            ``exp(-nll)``, or the acceptance rate of the token. Ignored if the mask is 0, and after such a position.
        mask: ``[..., k]``, 0 for positions that predict nothing. The block ends there. Fractions are weights.
        alpha: smoothing, in [0, 1]: the minimum of the smoothed confidence. With 1, S is the number of tokens from j
            on. With 0, all tokens after a token of confidence 0 have the weight 0.
        variant: "dpace" is S, "prefix" is C and "continuation" is S / C, each times the mask. The trainers' names
            "dpace-cumulative-confidence-only" and "dpace-continuation-value-only" mean "prefix" and "continuation".
        anchor_row: True: the first position is the anchor's, and may have the mask 0 without ending the block.

    Returns:
        ``[..., k]``, float32 (float64 for float64 confidence), detached.

    Raises:
        TypeError: ``confidence`` or ``mask`` is not a tensor, ``alpha`` is not a number, or ``anchor_row`` is not a
            bool.
        ValueError: shapes, dtypes or devices do not match, ``alpha`` is outside [0, 1], or ``variant`` is unknown. On
            CPU, also if a confidence with nonzero mask is outside [0, 1] by more than 0.01.
    """
    _checks.check_float("confidence", confidence)
    _checks.check_masks_like("confidence", confidence, mask=mask)
    if confidence.dim() == 0:
        raise ValueError("confidence must have shape [..., k], got ()")
    _checks.check_probability("alpha", alpha)
    _checks.check_choice("variant", variant, VARIANTS)
    anchor_row = _checks.checked_bool("anchor_row", anchor_row)
    confidence, mask = all_plain(confidence, mask)
    check_probabilities("confidence", confidence, mask)
    q = confidence.detach().to(accum_dtype(confidence.dtype))
    return weights_of_blocks(q, mask.detach().to(q.dtype), alpha, VARIANTS[variant], anchor_row)


def anchor_rows(like: Tensor) -> Tensor:
    """Return True for the first row of blocks ``[..., k]``, bool ``[k]``."""
    return torch.arange(like.shape[-1], device=like.device) == 0


def accepted_rows(mask: Tensor, may_be_missing: Tensor | None) -> Tensor:
    """Return True for the valid rows of blocks ``[..., k]`` before the first one whose mask is 0, which ends the block.

    Rows that ``may_be_missing`` do not end it.
    """
    valid = mask != 0
    passed = valid if may_be_missing is None else valid | may_be_missing
    return (passed.to(torch.int32).cumprod(-1) != 0) & valid


def accepted_prefix(rates: Tensor, mask: Tensor, may_be_missing: Tensor | None) -> Tensor:
    """Return the products of the rates up to each row of a block, 0 from its end on; other rates are not read."""
    factors = torch.where(accepted_rows(mask, may_be_missing), rates, 0.0)
    if may_be_missing is not None:
        factors = torch.where(may_be_missing & (mask == 0), 1.0, factors)
    return factors.cumprod(-1)


def weights_of_blocks(q: Tensor, mask: Tensor, alpha: float, variant: str, anchor_row: bool) -> Tensor:
    """Compute :func:`dpace_weights` from validated arguments, both in the dtype of the result."""
    dtype = q.dtype
    q = q.double() if variant == "continuation" else q  # S / C may be large even if C underflows in float32
    prefix = accepted_prefix((1 - alpha) * q + alpha, mask, anchor_rows(mask) if anchor_row else None)
    if variant == "prefix":
        return prefix * mask
    suffix = (prefix * mask).flip(-1).cumsum(-1).flip(-1)
    if variant == "continuation":
        suffix = torch.where(prefix <= 0, 0.0, suffix / prefix).to(dtype)  # NaN propagates
    return suffix * mask


def check_probabilities(name: str, values: Tensor, mask: Tensor) -> None:
    """Raise if a used value is not a probability. Accepts NaN. Skipped on GPU, because it would cost a sync."""
    if not (readable_without_sync(values) and readable_without_sync(mask)):
        return
    outside = (values < -ROUNDING) | (values > 1 + ROUNDING)
    if (where := first_true((mask != 0) & outside)) is not None:
        raise ValueError(f"{name} must lie in [0, 1] where it is used, got {values[where].item()} at position {where}")
