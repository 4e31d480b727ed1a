"""Metrics of a block drafter: accuracy per offset, and accepted tokens per block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._checks._target_range import first_true
from dllm_kernels._graph._plain import plain, readable_without_sync
from dllm_kernels.losses._block_weights import checked_prefix, rows_in_prefix, rows_of_block, size_of_blocks
from dllm_kernels.losses._common import DLLMLossOutput, as_batch
from dllm_kernels.ops.dpace_weights import accepted_prefix, accepted_rows, anchor_rows, check_probabilities


def draft_accuracy(output: DLLMLossOutput, group: Any = None) -> dict[str, Tensor]:
    r"""Compute the draft accuracy, overall and per offset in a block, from the counts of one loss call.

    .. math:: \text{draft\_acc} = \sum_k c_k / \sum_k n_k, \qquad \text{draft\_acc\_k}k = c_k / n_k

    :math:`c_k` is the number of correct tokens at offset k, :math:`n_k` the number of valid tokens.

    Source: the metrics ``draft_acc`` and ``draft_acc_k`` that DFlash training logs.

    Args:
        output: output of :class:`DFlashDecayLoss` or :class:`DraftDistillationLoss`, called with a ``block_size``.
        group: process group over which the counts are summed before dividing; None: the counts of this rank only.

    Returns:
        ``draft_acc`` and ``draft_acc_k{k}`` for k = 1 .. block_size - 1, 0-d float32 tensors; 0 if nothing was
        counted. The dict is empty if the output has no counts.

    Raises:
        TypeError: ``output`` is not the output of a loss.
    """
    if not isinstance(output, DLLMLossOutput):
        raise TypeError(f"output must be the output of a loss, got {_checks.type_name(output)}")
    hits, count = output.draft_correct_per_pos, output.draft_count_per_pos
    if hits is None or count is None:
        return {}
    hits, count = _summed(torch.stack([hits, count]), group)
    overall = hits.sum() / count.sum().clamp(min=torch.finfo(torch.float32).tiny)
    per_offset = torch.where(count > 0, hits / count.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    return {"draft_acc": overall, **{f"draft_acc_k{k}": a for k, a in enumerate(per_offset.unbind(), start=1)}}


def acceptance_length(
    output: DLLMLossOutput | Tensor, mask: Tensor, block_size: int, *, anchor_row: bool = False,
    bonus: bool = False, sampling: bool = False, group: Any = None, prefix: Tensor | None = None,
) -> Tensor:  # fmt: skip
    r"""Compute the mean number of accepted drafted tokens per block, by greedy verification or by sampling.

    .. math:: \frac{1}{N} \sum_{\text{blocks}} \sum_j m_j \prod_{i \le j} [\text{correct}_i \text{ and } m_i \ne 0]

    m is ``mask``; a row is valid if its entry is not 0. The mean is over the N blocks whose first row is valid. A block
    is accepted up to its first wrong token, and ends before its first row that is not valid. With
    ``sampling`` the result is the expected number of tokens that speculative sampling accepts: the acceptance rate
    :math:`a_i` replaces [correct]. If the draft is given a prefix of l tokens, the first row of a block is the one that
    predicts the token after them: a perfect draft has ``block_size - l`` accepted tokens.

    Source: greedy verification and speculative sampling, Leviathan et al. 2023, arXiv:2211.17192, section 2.

    Args:
        output: output of :class:`DFlashDecayLoss` or :class:`DraftDistillationLoss`. Or a tensor ``[B, T]``, 1 or True
            if the drafted token is the target model's token, otherwise 0; with ``sampling``, the acceptance rates in
            [0, 1].
        mask: ``[B, T]``, the ``block_mask`` of the loss call: 0 for rows that predict nothing. Fractions are weights.
            ``[T]``, with an ``output`` of packed rows or a tensor ``[T]``, is a batch of one sequence. ``[B, blocks,
            k]`` with an ``output`` of rows in blocks.
        block_size: ``block_size`` of the loss call: positions of a block, including the anchor. A block has
            ``block_size - 1`` rows.
        anchor_row: ``anchor_row`` of the loss: a block has ``block_size`` rows, the first of which is the anchor's. If
            the anchor's row is not valid, the block begins at its second row.
        bonus: also count the token that the target model samples after the accepted tokens, 1 per block.
        sampling: use acceptance rates instead of matches. :class:`DraftDistillationLoss` returns them if it has a
            teacher.
        group: process group over which the sums are reduced before dividing; None: this rank only.
        prefix: ``[B, blocks]``, the ``prefix`` of the loss call, if ``output`` is a tensor. None: that of an output of
            the loss, otherwise 1, the anchor.

    Returns:
        0-d float32, detached; 0 if no block counts.

    Raises:
        TypeError: an argument that should be a tensor, an int or a bool is not.
        ValueError: shapes, dtypes or devices do not match, T is not a whole number of blocks, or ``output`` comes from
            another loss. On CPU, also if a match is neither 0 nor 1, a rate of a valid row is outside [0, 1], or a
            prefix is outside [1, rows of a block] or not that of the loss call.
    """
    flags = {"anchor_row": anchor_row, "bonus": bonus, "sampling": sampling}
    stats = acceptance_stats(output, mask, block_size, prefix=prefix, **flags)
    total, count = _summed(torch.stack(stats), group)
    return total / count.clamp(min=1)


def acceptance_stats(
    output: DLLMLossOutput | Tensor, mask: Tensor, block_size: int, *, anchor_row: bool = False,
    bonus: bool = False, sampling: bool = False, prefix: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""Return numerator and denominator of :func:`acceptance_length`, to be summed over micro-batches and ranks.

    Examples:
        >>> correct = torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
        >>> # a wrong token, and a masked row
        >>> total, count = acceptance_stats(correct, mask, block_size=4)
        >>> total.item(), count.item()
        (3.0, 2.0)

    Args:
        output, mask, block_size, anchor_row, bonus, sampling, prefix: as in :func:`acceptance_length`.

    Returns:
        (sum, count), 0-d float32, detached: the number of accepted tokens, or with ``sampling`` its expectation, and
        the number of blocks whose first row is valid.

    Raises:
        TypeError: as in :func:`acceptance_length`.
        ValueError: as in :func:`acceptance_length`.

    Source: as in :func:`acceptance_length`.
    """
    _checks.check_flags(anchor_row=anchor_row, bonus=bonus, sampling=sampling)
    rates, prefix = _rates_of(output) if sampling else _matches_of(output), _prefix_of(output, prefix)
    block_size = _checks.checked_int("block_size", block_size, 1)
    if isinstance(mask, Tensor) and mask.dim() == 1 and mask.numel() == rates.numel():
        rates, mask, prefix = map(as_batch, (rates, mask, prefix))  # a loss of packed rows returns a batch of one
    _checks.check_masks_like("output", rates, mask=mask)
    if rates.dim() == 3:
        size_of_blocks("output", rates, block_size, anchor_row)
    else:
        _checks.check_ndim("output", rates, 2, "[B, T] or [B, blocks, k]")
    mask, T = plain(mask.detach()), rates.shape[1:].numel()
    rows = rows_of_block(T, block_size, anchor_row)
    valid = mask.to(torch.float32).reshape(mask.shape[0], T // rows, rows)
    may_be_missing = anchor_rows(valid) if anchor_row else None
    if prefix is not None:
        in_prefix = rows_in_prefix(checked_prefix(prefix, "mask", valid.flatten(1), rows), rows)
        valid = torch.where(in_prefix, 0.0, valid)
        may_be_missing = in_prefix if may_be_missing is None else in_prefix | may_be_missing
    if sampling:
        check_probabilities("output", rates, valid.reshape(rates.shape))
    rates = rates.to(torch.float32).reshape(valid.shape)
    count = accepted_rows(valid, may_be_missing).any(-1).sum().to(torch.float32)
    total = (accepted_prefix(rates, valid, may_be_missing) * valid).sum()
    return total + count if bonus else total, count


def _summed(sums: Tensor, group: Any) -> tuple[Tensor, ...]:
    """Unbind the sums, all-reduced over the group if there is one."""
    if group is not None:
        from dllm_kernels.distributed import summed_over

        sums = summed_over(sums, group)
    return sums.unbind()


def _rates_of(output: Any) -> Tensor:
    """Return the acceptance rates of a loss output, or the given tensor, plain and detached."""
    rates = output.acceptance_rate if isinstance(output, DLLMLossOutput) else output
    if rates is None:
        raise ValueError(
            "output must have acceptance_rate, which DraftDistillationLoss returns if it has a teacher, got None"
        )
    _checks.check_float("output", rates)
    return plain(rates.detach())  # type: ignore[no-any-return]


def _matches_of(output: Any) -> Tensor:
    """Return the matches of a loss output, or the given tensor, plain and detached."""
    matches = output.draft_correct if isinstance(output, DLLMLossOutput) else output
    if matches is None:
        raise ValueError("output must have draft_correct, which DFlashDecayLoss returns, got None")
    _checks.check_tensor("output", matches)
    _checks.check_mask("output", matches, matches.shape)
    matches = plain(matches.detach())
    if readable_without_sync(matches) and (where := first_true((matches != 0) & (matches != 1))) is not None:
        raise ValueError(
            f"output must hold 0 or 1, got {matches[where].item()} at position {where}; pass sampling=True with "
            "acceptance rates"
        )
    return matches  # type: ignore[no-any-return]


def _prefix_of(output: Any, prefix: Tensor | None) -> Tensor | None:
    """Return the prefix of a loss output, or the given one; raise if they differ."""
    output_prefix = output.prefix if isinstance(output, DLLMLossOutput) else None
    if prefix is None or output_prefix is None:
        return output_prefix if prefix is None else prefix
    _checks.check_ids("prefix", prefix)
    prefix = plain(prefix)
    batched = as_batch(prefix)
    known = readable_without_sync(batched) and readable_without_sync(output_prefix)
    if batched.shape != output_prefix.shape or (known and not torch.equal(batched.long(), output_prefix)):
        raise ValueError("prefix must be that of the loss call, which output holds, or None, got another one")
    return output_prefix
