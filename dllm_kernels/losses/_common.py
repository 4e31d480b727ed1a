"""What the losses share: the return type, masks, denominators."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dllm_kernels.ops import _checks
from dllm_kernels.ops._plain import all_plain, plain_count

P_MASK_MIN = 1e-8
LOGITS = _checks.Names("logits", "target_ids")
HIDDEN = _checks.Names("hidden", "target_ids", "lm_head_weight", "lm_head_bias")


class DLLMLossOutput(NamedTuple):
    """What every loss returns.

    Attributes:
        total_loss: 0-d, the loss to call ``backward`` on.
        dllm_loss: 0-d, detached: the diffusion part alone, for logging.
        draft_correct_per_pos: ``[block_size - 1]`` float32, how many drafted tokens at each block offset were the argmax
            on this rank (DFlash only, else None). Sum over ranks before dividing by ``draft_count_per_pos``.
        draft_count_per_pos: ``[block_size - 1]`` float32, how many drafted tokens at each block offset were valid on this
            rank (DFlash only, else None).
    """

    total_loss: torch.Tensor
    dllm_loss: torch.Tensor
    draft_correct_per_pos: torch.Tensor | None = None
    draft_count_per_pos: torch.Tensor | None = None


def single_loss(loss: torch.Tensor) -> DLLMLossOutput:
    """The output of a loss with one part; the logged value is a copy of its own."""
    return DLLMLossOutput(total_loss=loss, dllm_loss=loss.detach().clone())


def divide(loss: torch.Tensor, count: int | float | torch.Tensor | None) -> torch.Tensor:
    """Loss / max(count, 1), or the loss itself when there is no count; a tensor count is never read by the host."""
    count = plain_count(count)
    if count is None:
        return loss
    if isinstance(count, torch.Tensor):
        return loss / count.detach().reshape(()).clamp(min=1).to(loss.dtype)  # 0-d by 0-d would promote
    return loss if count <= 1 else loss / count  # not max(): before torch 2.13 it made each float a graph of its own


def normalized(weights: torch.Tensor, count: int | float | torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Row weights / max(count, 1), in the dtype that sums over ``like`` are made in.

    On the linear path the denominator goes into the weights: the gradients are made in the forward pass, and backward
    has nothing left to scale when the upstream gradient is 1.
    """
    return divide(weights.to(torch.promote_types(like.dtype, torch.float32)), count)


def check_bl(
    names: _checks.Names,
    x: torch.Tensor,
    target_ids: torch.Tensor,
    lm_head_weight: torch.Tensor | None = None,
    lm_head_bias: torch.Tensor | None = None,
    *,
    width: int | None = None,
    shift: int = 0,
) -> None:
    """Check ``x [B, width or L, V or D]``, ``target_ids [B, L]`` and the LM head, if any.

    ``shift``: how many positions before a token stands the row that it is the target of.
    """
    V = _checks.check_rows(names, x, target_ids, lm_head_weight, lm_head_bias)
    _checks.check_ndim(names.rows, x, 3, "[B, L, D]" if names.weight else "[B, L, V]")
    _checks.check_ndim(names.targets, target_ids, 2, "[B, L]")
    B, L = target_ids.shape
    expected = (B, L if width is None else width)
    if tuple(x.shape[:2]) != expected:
        raise ValueError(
            f"{names.rows} must have shape {(*expected, x.shape[2])} to go with {names.targets} of shape {(B, L)}, "
            f"got {tuple(x.shape)}"
        )
    targets = plain(target_ids)[:, shift:] if shift else target_ids
    _checks.check_target_range(None, names.targets, targets, V, shift=shift)


def check_masks(target_ids: torch.Tensor, **masks: torch.Tensor) -> None:
    """Check that every mask has the shape of ``target_ids`` and lies on its device."""
    for name, mask in masks.items():
        _checks.check_mask(name, mask, target_ids.shape, "that of target_ids")
    _checks.check_same_device("target_ids", target_ids, **masks)


def check_optional(target_ids: torch.Tensor, loss_mask_ar: torch.Tensor | None, **tensors: object) -> None:
    """Check what may be None, used or not: what was meant for another argument must not vanish in it."""
    if loss_mask_ar is not None:
        check_masks(target_ids, loss_mask_ar=loss_mask_ar)
    for name, value in tensors.items():
        if value is not None:
            _checks.check_tensor(name, value)


def check_counts(**counts: object) -> None:
    """Check counts to divide by, used or not."""
    for name, count in counts.items():
        _checks.check_count(name, count)
        _checks.check_constant(name, count)


def check_not_swapped(p_mask: torch.Tensor | None) -> None:
    """Raise where ``p_mask`` can only be a mask, found without looking at its values."""
    if p_mask is not None and p_mask.dtype == torch.bool:
        raise ValueError("p_mask must hold probabilities, got bool; are noise_mask and p_mask swapped?")


def _check_probabilities(noise_mask: torch.Tensor, p_mask: torch.Tensor, loss_mask: torch.Tensor) -> None:
    """Raise where probabilities are out of range, or stand in the mask; on CPU, for a GPU would have to be waited for."""
    if p_mask.device.type != "cpu" or torch.compiler.is_compiling():
        return
    supervised = loss_mask.bool()
    where = _checks.first_true(supervised & noise_mask.bool() & ~((p_mask >= 0) & (p_mask <= 1)))
    if where is not None:
        raise ValueError(f"p_mask must lie in [0, 1] where it is used, got {p_mask[where].item()} at position {where}")
    where = _checks.first_true(supervised & (noise_mask > 0) & (noise_mask < 1))
    if where is not None:
        raise ValueError(
            f"noise_mask must hold no fractions, got {noise_mask[where].item()} at position {where}; "
            "are noise_mask and p_mask swapped?"
        )


def mdlm_weights(
    like: torch.Tensor,
    target_ids: torch.Tensor,
    noise_mask: torch.Tensor,
    p_mask: torch.Tensor,
    loss_mask: torch.Tensor,
) -> torch.Tensor:
    """(noise_mask & loss_mask) / max(p_mask, 1e-8), 0 outside the masks whatever ``p_mask`` holds there.

    In the dtype that sums over ``like`` are made in.
    """
    target_ids, noise_mask, p_mask, loss_mask = all_plain(target_ids, noise_mask, p_mask, loss_mask)
    check_masks(target_ids, noise_mask=noise_mask, p_mask=p_mask, loss_mask=loss_mask)
    check_not_swapped(p_mask)
    _checks.check_constant("p_mask", p_mask)
    _check_probabilities(noise_mask, p_mask, loss_mask)
    p = p_mask.detach().to(torch.promote_types(like.dtype, torch.float32))
    return torch.where(noise_mask.bool() & loss_mask.bool(), p.clamp(min=P_MASK_MIN).reciprocal(), 0.0)


def shift_left(target_ids: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Next-token targets ``[B, L]``: position i gets ``target_ids[:, i + 1]``, the last one none.

    The targets are shifted and not the logits: slicing ``[B, L, V]`` would copy it forward and pad it backward.
    """
    shifted = torch.nn.functional.pad(target_ids[:, 1:].long(), (0, 1), value=ignore_index)
    return shifted[:, : target_ids.shape[1]]  # of no position when there was none
