"""Shared parts of the losses: the return type, checks of masks and counts, denominators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph._named import replaced
from dllm_kernels._graph._plain import plain_count
from dllm_kernels.rows._call import times_upstream
from dllm_kernels.rows._interface import IGNORE

Count = int | Tensor | None
REDUCTIONS = ("total", "none")


class DLLMLossOutput(NamedTuple):
    """Return type of every loss.

    Attributes:
        total_loss: 0-d, the loss to call ``backward`` on.
        dllm_loss: 0-d, detached: the diffusion part alone, for logging.
        draft_correct_per_pos: ``[block_size - 1]`` float32, the number of correctly drafted tokens per block offset on
            this rank (DFlash and distillation, else None). A token is correct if it is the argmax. Sum over ranks
            before dividing by ``draft_count_per_pos``.
        draft_count_per_pos: ``[block_size - 1]`` float32, the number of valid drafted tokens per block offset on this
            rank (DFlash and distillation, else None).
        weight_sum: 0-d, detached: the sum of the weights of all rows of this call, before any denominator. Rows with a
            target of -100 are included. For a weighted sum of NLLs over one denominator, ``total_loss`` times the
            denominator is ``sum_i w_i nll_i``, and ``weight_sum`` is ``sum_i w_i``. Both can be summed over
            micro-batches and ranks, so that a trainer can normalize by the weights of the whole step. For a loss with
            two parts it is the sum over both, including the factor between them. None in an output that was constructed
            without it.
        draft_correct: ``[B, T]`` bool, True for correctly drafted tokens, False for rows that predict nothing. Input of
            :func:`acceptance_length` (DFlash and distillation, else None). In distillation, a token is correct if it is
            the teacher's argmax. ``[B, blocks, k]`` if DFlash's rows are in blocks, as then all results per row.
        row_losses: ``[B, L]`` with ``reduction="none"``, else None: the contribution ``w_i nll_i`` of each row before
            any denominator, differentiable with any gradient per row; 0 for rows that are not read. For a loss with two
            parts it is ``[B, 2 L]``. I-DLM: the rows of the masked copy, then the rows of the clean copy. Hybrid: the
            diffusion rows, then the AR rows (``[B, L]`` without an AR part). Row i of a next-token part, and of a
            diffusion loss with ``shift=True``, predicts token i + 1, and the last row is 0.
        row_weights: with ``reduction="none"``, else None: ``w_i``, detached, of the shape of ``row_losses``. Their sum
            is ``weight_sum``, including rows with a target of -100.
        acceptance_rate: ``[B, T]``, the probability that speculative sampling accepts each drafted token, 0 for rows
            that predict nothing (distillation with a teacher only, else None).
        prefix: ``[B, blocks]`` int64, the number of given tokens at the start of each block, the anchor included:
            ``prefix`` of DFlash, or ``decay_from + 1`` in distillation. :func:`acceptance_length` reads it. None: 1.

    Custom denominators are possible in two ways. With one denominator per step, pass no count (or a count of 1), and
    divide the sum of ``total_loss`` over micro-batches and ranks by the sum of ``weight_sum``. The gradient is then
    still computed in the forward pass. With one denominator per sequence, construct the loss with ``reduction="none"``
    and reduce ``row_losses``. The mean over each sequence and then over the batch is
    ``(row_losses.sum(1) / tokens_of_each.clamp(min=1)).mean()``. The unweighted NLL of a row is
    ``row_losses / row_weights`` if the weight is not 0.
    """

    total_loss: Tensor
    dllm_loss: Tensor
    draft_correct_per_pos: Tensor | None = None
    draft_count_per_pos: Tensor | None = None
    weight_sum: Tensor | None = None
    draft_correct: Tensor | None = None
    row_losses: Tensor | None = None
    row_weights: Tensor | None = None
    acceptance_rate: Tensor | None = None
    prefix: Tensor | None = None


def single_loss(loss: Tensor, weights: Tensor, row_losses: Tensor | None = None) -> DLLMLossOutput:
    """Build the output of a loss with one part. ``weights`` are the row weights before the denominator.

    The logged value is a copy.
    """
    weights = weights.detach() if weights.requires_grad else weights
    out = DLLMLossOutput(total_loss=loss, dllm_loss=loss.detach().clone(), weight_sum=weights.sum())
    return out if row_losses is None else replaced(out, row_losses=row_losses, row_weights=weights)


def divide(weights: Tensor, count: Count, counted: Tensor | None = None) -> Tensor:
    """Divide row weights by max(count, 1), without a host sync. If the count is None, it is the sum of ``counted``.

    If both are None, return the weights.
    The weights are divided instead of the sum, because gradients computed in the forward pass then need no scaling in
    backward if the upstream gradient is 1.
    """
    count = counted.sum() if count is None and counted is not None else plain_count(count)
    if count is None:
        return weights
    if isinstance(count, Tensor):
        # Cast, because dividing 0-d weights by a 0-d count promotes.
        return weights / count.detach().reshape(()).clamp(min=1).to(weights.dtype)
    return weights if count <= 1 else weights / count  # max() would recompile for each float before torch 2.13


def weighted_rows(nll: Tensor, weights: Tensor) -> Tensor:
    """Compute weight * NLL per row, 0 for a row of weight 0 even if its NLL is NaN.

    A row whose upstream gradient is 0 has the gradient 0 even if its weight is NaN, as those of D-PACE may be.
    """
    return _WeightedRows.apply(nll, weights)  # type: ignore[no-untyped-call,no-any-return]


class _WeightedRows(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(nll: Tensor, weights: Tensor) -> Tensor:
        return torch.where(weights != 0, nll * weights, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return times_upstream(ctx.saved_tensors[0], grads[0]), None


def sum_of_rows(nll: Tensor, weights: Tensor) -> Tensor:
    """Sum :func:`weighted_rows`."""
    return weighted_rows(nll, weights).sum()


def logged_sum(nll: Tensor, weights: Tensor) -> Tensor:
    """Sum one part of a loss, for logging, from the detached NLL of its rows."""
    return (nll * weights.to(nll.dtype)).sum()


def check_counts(**counts: object) -> None:
    """Check denominators, including unused ones."""
    for name, count in counts.items():
        _checks.check_total(name, count)
        _checks.check_constant(name, count)


def as_batch(t: Any, dims: int = 1) -> Any:
    """Add a batch dimension of 1 to a tensor of ``dims`` dimensions; return anything else unchanged."""
    return t.unsqueeze(0) if isinstance(t, Tensor) and t.dim() == dims else t


def shift_left(t: Tensor, fill: float = 0, by: int = 1) -> Tensor:
    """Return ``t[..., i + by]`` at position i of the last dimension, and ``fill`` at the last ``by`` positions.

    Next-token losses shift targets and masks, not logits: slicing ``[B, L, V]`` would copy it forward and pad it
    backward.
    """
    by = min(by, t.shape[-1])
    return torch.nn.functional.pad(t[..., by:], (0, by), value=fill)


def next_token_mask(segment_ids: Tensor) -> Tensor:
    """Select the tokens of packed documents that a next-token loss may predict.

    They are the tokens whose previous token is in the same document. Multiply the mask of the predicted tokens by this
    mask: ``loss_mask`` of a loss with ``shift=True``, ``loss_mask_ar`` of :class:`HybridDiffusionLLMLoss`,
    ``answer_mask`` of :class:`IDLMLoss`. :func:`encoder_ar_loss` takes ``segment_ids`` itself.

    Examples:
        >>> next_token_mask(torch.tensor([[0, 0, 0, 1, 1, -1]])).int().tolist()
        [[0, 1, 1, 0, 1, 0]]

    Args:
        segment_ids: integers ``[..., L]``, equal at the positions of one document, and negative at positions in none.

    Returns:
        bool ``[..., L]``.

    Raises:
        TypeError: ``segment_ids`` is not a tensor.
        ValueError: ``segment_ids`` does not hold integers, or has no dimension.
    """
    _checks.check_ids("segment_ids", segment_ids)
    if not segment_ids.dim():
        raise ValueError("segment_ids must have at least one dimension, got a 0-d tensor")
    ids = segment_ids.long()
    before = torch.nn.functional.pad(ids[..., :-1], (min(1, ids.shape[-1]), 0), value=-1)
    return (ids == before) & (ids >= 0)


def next_tokens(target_ids: Tensor) -> Tensor:
    """Return the int64 target of each position: the next token, and -100 at the last position."""
    return shift_left(target_ids.long(), IGNORE)
