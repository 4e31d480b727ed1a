"""Blocks for training a block drafter: anchors in a sequence, the tokens of their blocks, and random prefixes.

All draws are those of the corruption routines (``_random/_philox.py``): a seed gives the same blocks on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dllm_kernels._random import _philox, _seeds
from dllm_kernels._utils import _checks
from dllm_kernels._utils._checks import type_name
from dllm_kernels._utils._plain import all_plain

_LAST = torch.iinfo(torch.int64).max
# The longest block of a sampled prefix, whose lengths are compared one by one.
MOST_PREFIX = 2**16


def sample_anchors(
    loss_mask: Tensor,
    num: int,
    block_size: int,
    *,
    seeds: Tensor | None = None,
    generator: torch.Generator | None = None,
    segment_ids: Tensor | None = None,
    overlap: bool = True,
) -> tuple[Tensor, Tensor]:
    """Sample the first positions of blocks to train a drafter on, ``num`` per row, without replacement.

    A candidate is a supervised position with ``block_size - 1`` supervised tokens directly after it, in the same
    segment. In a row that has no such position, positions with at least one supervised token after them are candidates.
    All candidates of a row are equally likely. With ``overlap=False`` they are drawn one after the other, each among
    the candidates whose block shares no token with the blocks before.

    Examples:
        >>> loss_mask = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0]])
        >>> # only positions 1 and 2 begin a whole block
        >>> sample_anchors(loss_mask, 3, 4, seeds=torch.tensor([7]))
        (tensor([[1, 2, 0]]), tensor([[ True,  True, False]]))

    Args:
        loss_mask: {loss_mask}
        num: anchors per row.
        block_size: positions of a block, the anchor included.
        seeds: int64 ``[B]``, one seed per row, instead of a generator. Row b then depends only on ``seeds[b]``, its own
            mask and segments, and the options.
        generator: {generator}
        segment_ids: ``[B, L]`` integers, the document of each token of a packed row; None: one document per row. Equal
            ids of adjacent tokens mean the same document, a negative id means none.
        overlap: False: the blocks of a row share no tokens.

    Returns:
        (anchors, real): int64 and bool ``[B, num]``. The anchors of a row ascend. A row with fewer candidates ends with
        anchors 0 that are not real.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, or both ``generator`` and
            ``seeds`` are given.

    Source: random anchors of the DFlash paper.
    """
    _checks.check_mask("loss_mask", loss_mask, getattr(loss_mask, "shape", ()))
    _checks.check_ndim("loss_mask", loss_mask, 2, "[B, L]")
    _checks.check_int("num", num, 1, _checks.MOST_SIZE)
    _checks.check_int("block_size", block_size, 2, _checks.MOST_SIZE)
    overlap = _checks.checked_bool("overlap", overlap)
    if segment_ids is not None:
        _checks.check_ids("segment_ids", segment_ids)
        _checks.check_shape("segment_ids", segment_ids, loss_mask.shape, "that of loss_mask")
        _checks.check_same_device("loss_mask", loss_mask, segment_ids=segment_ids)
    loss_mask, segment_ids = all_plain(loss_mask, segment_ids)
    B, L = loss_mask.shape
    seed = _seeds.resolve_seed(loss_mask.device, B, generator, seeds)
    after = _supervised_after(loss_mask != 0, segment_ids)
    whole = after >= block_size - 1
    candidates = torch.where(whole.any(1, keepdim=True), whole, after > 0)
    position = torch.arange(L, device=loss_mask.device)
    draws = _philox.random_bits(seed, B, _philox.Layout(0, L))[1]
    keys = torch.where(candidates, (draws << 30) + position, _LAST)  # the first of equal draws wins
    anchors = _first(keys, num) if overlap else _disjoint(keys, num, after.clamp(max=block_size - 1) + 1)
    anchors = anchors.sort(1).values
    real = anchors < L
    return torch.where(real, anchors, 0), real


def _supervised_after(mask: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Count the supervised tokens directly after each position ``[B, L]``; 0 if it is not supervised itself."""
    B, L = mask.shape
    linked = mask[:, :-1] & mask[:, 1:]
    if segment_ids is not None:
        linked = linked & (segment_ids[:, :-1] == segment_ids[:, 1:]) & (segment_ids[:, :-1] >= 0)
    position = torch.arange(L, device=mask.device).expand(B, L)
    last = torch.cat([linked, linked.new_zeros(B, min(L, 1))], 1)
    ends = torch.where(last, L, position)  # a position that is not linked to the next one ends its run
    return ends.flip(1).cummin(1).values.flip(1) - position if L else position


def _first(keys: Tensor, num: int) -> Tensor:
    """Return the positions of the ``num`` smallest keys of each row, L for those without a candidate."""
    (B, L), count = keys.shape, min(num, keys.shape[1])
    smallest = keys.topk(count, 1, largest=False)
    found = torch.where(smallest.values == _LAST, L, smallest.indices)
    return torch.cat([found, found.new_full((B, num - count), L)], 1)


def _disjoint(keys: Tensor, num: int, length: Tensor) -> Tensor:
    """Return positions as :func:`_first`, each the smallest key whose block of ``length`` tokens is disjoint."""
    L, found = keys.shape[1], []
    position = torch.arange(L, device=keys.device)
    for _ in range(num if L else 0):
        key, chosen = keys.min(1, keepdim=True)
        end = chosen + length.gather(1, chosen)
        keys = torch.where((position < end) & (position + length > chosen), _LAST, keys)
        found.append(torch.where(key == _LAST, L, chosen))
    return torch.cat(found, 1) if found else keys.new_full((len(keys), num), L)


def block_targets(ids: Tensor, anchors: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Gather the tokens after each anchor, the targets of a drafted block.

    Call it with the segments, or the loss mask as integers, in place of the ids to gather these too, with -100 where
    ``inside`` is False.

    Examples:
        >>> block_targets(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 2]]), block_size=3)
        (tensor([[   6,    7,    8, -100]]), tensor([[ True,  True,  True, False]]))

    Args:
        ids: ``[B, L]`` integers.
        anchors: ``[B, num]`` integers, as from :func:`sample_anchors`.
        block_size: positions of a block, the anchor included.

    Returns:
        (targets, inside): int64 and bool ``[B, num * (block_size - 1)]``. ``inside`` is False, and the target -100, for
        positions beyond the end of the row, and for the whole block of an anchor outside [0, L), such as a padding of
        -1.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, or ``block_size`` < 2.

    Source: the block layout of the DFlash paper.
    """
    for name, t in (("ids", ids), ("anchors", anchors)):
        _checks.check_ids(name, t)
        _checks.check_ndim(name, t, 2, "[B, L]" if name == "ids" else "[B, num]")
    _checks.check_int("block_size", block_size, 2, _checks.MOST_SIZE)
    _checks.check_same_device("ids", ids, anchors=anchors)
    if len(ids) != len(anchors):
        raise ValueError(f"anchors must have the rows of ids, {len(ids)}, got {len(anchors)}")
    ids, anchors = all_plain(ids, anchors)
    B, L = ids.shape
    anchors = anchors.to(torch.int64)  # in int8 or uint8, L would wrap around
    place = anchors.unsqueeze(2) + torch.arange(1, block_size, device=ids.device)
    place = place.flatten(1)
    known = (anchors >= 0) & (anchors < L)
    inside = (place < L) & known.repeat_interleave(block_size - 1, 1)
    padded = torch.cat([ids.to(torch.int64), ids.new_full((B, 1), 0, dtype=torch.int64)], 1)  # L may be 0
    return torch.where(inside, padded.gather(1, torch.where(inside, place, L)), -100), inside


def sample_prefix(
    shape: Sequence[int],
    block_size: int,
    base: float,
    *,
    seeds: Tensor | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Sample how many tokens of each block precede the first predicted one, the anchor included.

    The length l lies in [min(2, block_size - 1), block_size - 1] and has a probability proportional to ``base ** l``.
    Pass the result to :class:`DFlashDecayLoss` as ``prefix``. The anchor alone is never the prefix of a block of more
    than two positions. To also train blocks of which only the anchor is given, set some entries to 1.

    Args:
        shape: shape of the result, such as (B, num).
        block_size: positions of a block, the anchor included.
        base: a positive number; below 1 short prefixes are more likely.
        seeds: int64 ``[shape[0]]``, one seed per row, instead of a generator. Use other seeds than for the anchors,
            because both take their draws from the same stream.
        generator: {generator}
        device: device of the result; None: the device of the generator or the seeds, otherwise the CPU.

    Returns:
        int64 of ``shape``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of range, or both ``generator`` and ``seeds`` are given.

    Source: random prefixes of drafted blocks, as speculative decoding leaves them.
    """
    if isinstance(shape, (str, int)) or not isinstance(shape, Sequence) or not len(shape):
        raise TypeError(f"shape must be a tuple of ints, such as (B, num), got {type_name(shape)}")
    for size in shape:
        _checks.check_int("shape", size, 0, _checks.MOST_SIZE)
    _checks.check_int("block_size", block_size, 2, MOST_PREFIX)
    _checks.check_number("base", base)
    if not 0 < base < math.inf:
        raise ValueError(f"base must be positive and finite, got {base}")
    if device is None:
        device = getattr(generator if seeds is None else seeds, "device", "cpu")
    place = _seeds.as_device(device)
    rows, per_row = shape[0], math.prod(shape[1:])
    seed = _seeds.resolve_seed(place, rows, generator, seeds)
    draws = _philox.random_bits(seed, rows, _philox.Layout(0, per_row))[1]
    shortest, longest = min(2, block_size - 1), block_size - 1
    least = shortest + torch.zeros_like(draws)
    for bound in _bounds(float(base), longest - shortest + 1):
        least += draws >= bound
    return least.view(*shape)


def _bounds(base: float, count: int) -> list[int]:
    """Return the draws, of 2^32, from which on each outcome but the first applies; outcome i has weight base^i."""
    logs = [i * math.log(base) for i in range(count)]
    weights = [math.exp(x - max(logs)) for x in logs]
    return [round(2**32 * (part / sum(weights))) for part in accumulate(weights[:-1])]
