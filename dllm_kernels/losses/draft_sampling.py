"""Blocks for training a block drafter: anchors in a sequence, the tokens of their blocks, and random prefixes.

All draws are those of the corruption routines (``corruption/_philox.py``): a seed gives the same blocks on every
device. As there, the arrays are NumPy's on a CPU, where a NumPy call costs a fifth of a torch call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._checks import type_name
from dllm_kernels._graph._opaque import Spec, opaque
from dllm_kernels._graph._plain import all_plain
from dllm_kernels.corruption import _philox, _seeds
from dllm_kernels.corruption._rules import Array
from dllm_kernels.corruption._topk import on_host
from dllm_kernels.rows._interface import IGNORE

# The longest block of a sampled prefix, whose lengths are compared one by one.
MOST_PREFIX = 2**16
# The key of a candidate is its draw, then its position, so that the first of equal draws wins. NONE: no candidate.
_POSITION_BITS, _NONE = 30, 2**63 - 1


def sample_anchors(
    loss_mask: Tensor, num: int, block_size: int, *, seeds: Tensor | None = None,
    generator: torch.Generator | None = None, segment_ids: Tensor | None = None, overlap: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
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
        loss_mask: ``[B, L]``, bool or numeric, nonzero for supervised positions; as integers, 0 and 1.
        num: anchors per row.
        block_size: positions of a block, the anchor included.
        seeds: int64 ``[B]``, one seed per row, instead of a generator. Row b then depends only on ``seeds[b]``, its own
            mask and segments, and the options.
        generator: source of one seed per call, which each row uses with its index. A CPU generator can be used for
            tensors on any device and gives the same result on all of them. None: the default generator of the device.
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
    _checks.check_tensor("loss_mask", loss_mask)
    _checks.check_mask("loss_mask", loss_mask, loss_mask.shape, no_ids=True)
    _checks.check_ndim("loss_mask", loss_mask, 2, "[B, L]")
    num = _checks.checked_int("num", num, 1, _checks.MOST_SIZE)
    block_size = _checks.checked_int("block_size", block_size, 2, _checks.MOST_SIZE)
    overlap = _checks.checked_bool("overlap", overlap)
    _check_segments("loss_mask", loss_mask, segment_ids)
    loss_mask, segment_ids = all_plain(loss_mask, segment_ids)
    seed = _seeds.resolve_seed(loss_mask.device, loss_mask.shape[0], generator, seeds)
    anchors, real = _sampled_anchors(loss_mask, segment_ids, seed, num, block_size, overlap)
    return anchors, real


def _check_segments(name: str, like: Tensor, segment_ids: Tensor | None) -> None:
    """Raise unless ``segment_ids`` are None, or integers of the shape and device of the argument ``name``."""
    if segment_ids is not None:
        _checks.check_like(name, like, _checks.INT_DTYPES, segment_ids=segment_ids)


def _specs_of_anchors(loss_mask: Tensor, _segment_ids: Any, _seed: Any, num: int, *_: Any) -> list[Spec]:
    shape = loss_mask.shape[0], num
    return [(shape, torch.int64), (shape, torch.bool)]


@opaque("sample_anchors", _specs_of_anchors)
def _sampled_anchors(
    loss_mask: Tensor, segment_ids: Tensor | None, seed: Tensor, num: int, block_size: int, overlap: bool
) -> list[Tensor]:
    """Compute :func:`sample_anchors` of validated arguments."""
    B, L = loss_mask.shape
    count = min(num, L) if B else 0
    positions = torch.zeros(B, 0, dtype=torch.int64, device=loss_mask.device)
    if count:
        keys, length = _anchor_keys(loss_mask, segment_ids, seed, block_size)
        smallest = _smallest(keys, count) if overlap else _disjoint(keys, count, length, min(block_size, L))
        positions = torch.as_tensor(smallest & ((1 << _POSITION_BITS) - 1), device=loss_mask.device)
    anchors = F.pad(positions.clamp(max=L), (0, num - count), value=L).sort(1).values
    real = anchors < L
    return [torch.where(real, anchors, 0), real]


def _anchor_keys(loss_mask: Tensor, segment_ids: Tensor | None, seed: Tensor, block_size: int) -> tuple[Array, Array]:
    """Return the key of each position, and the number of tokens of its block, ``[B, L]``."""
    B, L = loss_mask.shape
    mask, position = _array(loss_mask) != 0, _array(torch.arange(L, device=loss_mask.device))
    linked = mask[:, :-1] & mask[:, 1:]
    if segment_ids is not None:
        linked = linked & _in_one_document(_array(segment_ids))
    length = (_run_ends(linked) - position + 1).clip(max=block_size)
    whole = length == block_size
    candidates = whole | ((length > 1) & ~whole.any(1)[:, None])
    keys = (_draws(seed, B, L) << _POSITION_BITS) + position
    keys[~candidates] = _NONE
    return keys, length


def _array(t: Tensor) -> Array:
    """Return a tensor on a CPU as a NumPy array."""
    return t.numpy() if on_host(t) else t


def _draws(seed: Tensor, rows: int, per_row: int) -> Array:
    """Draw 32 bits per place, int64 ``[rows, per_row]``."""
    layout = _philox.Layout(0, per_row)
    if on_host(seed):
        return _philox.bits_on_host(seed, range(rows), layout)[1].astype(np.int64)
    return _philox.random_bits(seed, rows, layout)[1]


def _in_one_document(segment_ids: Array) -> Array:
    """Return True for the positions ``[B, L - 1]`` that lie in the document of the next one."""
    return (segment_ids[:, :-1] == segment_ids[:, 1:]) & (segment_ids[:, 1:] >= 0)


def _run_ends(linked: Array) -> Array:
    """Return the last position of the run of each one ``[B, L]``; ``linked [B, L - 1]`` to the next one of the run."""
    B, L = linked.shape[0], linked.shape[1] + 1
    ends: Array
    if isinstance(linked, Tensor):
        ends = torch.where(F.pad(linked, (0, 1)), L, torch.arange(L, device=linked.device))
        return ends.flip(1).cummin(1).values.flip(1)
    ends = np.full((B, L), L - 1)
    ends[:, :-1] = np.where(linked, L, np.arange(L - 1))
    return np.minimum.accumulate(ends[:, ::-1], 1)[:, ::-1]


def _smallest(keys: Array, count: int) -> Array:
    """Return the ``count`` smallest keys of each row, in any order."""
    if isinstance(keys, Tensor):
        return keys.topk(count, 1, largest=False, sorted=False).values
    return np.partition(keys, count - 1, axis=1)[:, :count]


def _disjoint(keys: Array, count: int, length: Array, longest: int) -> Array:
    """Return keys of each row in ascending order, each the smallest whose block is disjoint from those before.

    Overwrites the keys.
    """
    (B, L), is_torch = keys.shape, isinstance(keys, Tensor)
    xp: Any = torch if is_torch else np
    arange = partial(torch.arange, device=keys.device) if is_torch else np.arange
    row, window, chosen = arange(B)[:, None], arange(1 - longest, longest), []
    for _ in range(count):
        first = keys.argmin(1)[:, None]
        chosen.append(keys[row, first])
        near = (first + window).clip(0, L - 1)
        meets = (near < first + length[row, first]) & (near + length[row, near] > first)
        keys[row, near] = xp.where(meets, _NONE, keys[row, near])
    return xp.concatenate(chosen, 1)


def block_targets(
    ids: Tensor, anchors: Tensor, block_size: int, *, segment_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gather the tokens after each anchor, the targets of a drafted block.

    Call it with the loss mask as integers in place of the ids to gather this too, with -100 where ``inside`` is False.

    Examples:
        >>> ids, anchors = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 2]])
        >>> block_targets(ids, anchors, block_size=3)
        (tensor([[   6,    7,    8, -100]]), tensor([[ True,  True,  True, False]]))
        >>> documents = torch.tensor([[1, 1, 2, 2]])
        >>> block_targets(ids, anchors, block_size=3, segment_ids=documents)[1]
        tensor([[ True, False,  True, False]])

    Args:
        ids: ``[B, L]`` integers.
        anchors: ``[B, num]`` integers, as from :func:`sample_anchors`.
        block_size: positions of a block, the anchor included.
        segment_ids: ``[B, L]``, as in :func:`sample_anchors`; None: one document per row.

    Returns:
        (targets, inside): int64 and bool ``[B, num * (block_size - 1)]``. ``inside`` is False, and the target -100, for
        positions beyond the end of the anchor's document, and for the whole block of an anchor that lies in no
        document, or outside [0, L), such as a padding of -1.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, or ``block_size`` < 2.

    Source: the block layout of the DFlash paper.
    """
    for name, t in (("ids", ids), ("anchors", anchors)):
        _checks.check_ids(name, t)
        _checks.check_ndim(name, t, 2, "[B, L]" if name == "ids" else "[B, num]")
    block_size = _checks.checked_int("block_size", block_size, 2, _checks.MOST_SIZE)
    _checks.check_same_device("ids", ids, anchors=anchors)
    if len(ids) != len(anchors):
        raise ValueError(f"anchors must have the rows of ids, {len(ids)}, got {len(anchors)}")
    _check_segments("ids", ids, segment_ids)
    ids, anchors, segment_ids = all_plain(ids, anchors, segment_ids)
    L = ids.shape[1]
    anchors = anchors.to(torch.int64)  # in int8 or uint8, L would wrap around
    known = (anchors >= 0) & (anchors < L)
    last: Any = L - 1
    if segment_ids is not None:  # position L is no document
        ends = _run_ends(F.pad(_in_one_document(segment_ids), (0, 1)))
        last = ends.gather(1, torch.where(known, anchors, L)).unsqueeze(2)
    place = anchors.unsqueeze(2) + torch.arange(1, block_size, device=ids.device)
    inside = (known.unsqueeze(2) & (place <= last)).flatten(1)
    padded = F.pad(ids.to(torch.int64), (0, 1))  # L may be 0
    return torch.where(inside, padded.gather(1, torch.where(inside, place.flatten(1), L)), IGNORE), inside


def sample_prefix(
    shape: Sequence[int], block_size: int, base: float, *, seeds: Tensor | None = None,
    generator: torch.Generator | None = None, device: torch.device | str | None = None,
) -> Tensor:  # fmt: skip
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
        generator: source of one seed per call, which each row uses with its index. A CPU generator can be used for
            tensors on any device and gives the same result on all of them. None: the default generator of the device.
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
    shape = [_checks.checked_int("shape", size, 0, _checks.MOST_SIZE) for size in shape]
    block_size = _checks.checked_int("block_size", block_size, 2, MOST_PREFIX)
    _checks.check_number("base", base)
    if not 0 < base < math.inf:
        raise ValueError(f"base must be positive and finite, got {base}")
    rows, per_row = shape[0], math.prod(shape[1:])
    seed = _seeds.resolve_seed(_seeds.device_of(device, generator, seeds), rows, generator, seeds)
    (lengths,) = _sampled_prefix(seed, rows, per_row, block_size, float(base))
    return lengths.view(*shape)


@opaque("sample_prefix", lambda _, rows, per_row, *others: [((rows, per_row), torch.int64)])
def _sampled_prefix(seed: Tensor, rows: int, per_row: int, block_size: int, base: float) -> list[Tensor]:
    """Compute :func:`sample_prefix` of validated arguments, ``[rows, per_row]``."""
    draws, shortest = _draws(seed, rows, per_row), min(2, block_size - 1)
    lengths: Array = shortest + 0 * draws
    for bound in _bounds(base, block_size - shortest):
        lengths += draws >= bound
    return [torch.as_tensor(lengths, device=seed.device)]


def _bounds(base: float, count: int) -> list[int]:
    """Return the draws, of 2^32, from which on each outcome but the first applies; outcome i has weight base^i."""
    logs = [i * math.log(base) for i in range(count)]
    weights = [math.exp(x - max(logs)) for x in logs]
    return [round(2**32 * (part / sum(weights))) for part in accumulate(weights[:-1])]
