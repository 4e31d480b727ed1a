"""Anchors, targets and prefixes of drafted blocks."""

from __future__ import annotations

import torch


def sample_anchors(
    loss_mask: torch.Tensor,
    draws: torch.Tensor,
    num: int,
    block_size: int,
    segment_ids: torch.Tensor | None = None,
    overlap: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the candidates of each row in the order of their draws, at most ``num``.

    A candidate is a supervised position with ``block_size - 1`` supervised tokens directly after it in its segment, or
    with at least one if the row has no such position.

    Args:
        loss_mask: ``[B, L]``, nonzero for supervised positions.
        draws: ``[B, L]`` integers, one per position; the lower position wins a tie.
        num: anchors per row.
        block_size: positions of a block, including the anchor.
        segment_ids: ``[B, L]``; negative: no segment.
        overlap: False to skip candidates whose block shares a token with an earlier one.

    Returns:
        (anchors, real) ``[B, num]``; ascending, then 0 and False.

    Source: the random anchors of the DFlash paper.
    """
    B, L = loss_mask.shape
    anchors, real = torch.zeros(B, num, dtype=torch.int64), torch.zeros(B, num, dtype=torch.bool)
    for b in range(B):
        segments = [0] * L if segment_ids is None else segment_ids[b].tolist()
        supervised = [bool(m) for m in loss_mask[b].tolist()]
        after = []
        for i in range(L):
            n = 0
            while supervised[i] and i + n + 1 < L and supervised[i + n + 1] and 0 <= segments[i] == segments[i + n + 1]:
                n += 1
            after.append(min(n, block_size - 1))
        least = block_size - 1 if block_size - 1 in after else 1
        order = sorted((int(draws[b, i]), i) for i in range(L) if after[i] >= least)
        chosen: list[int] = []
        for _, i in order:
            tokens = set(range(i, i + after[i] + 1))
            if overlap or not any(tokens & set(range(j, j + after[j] + 1)) for j in chosen):
                chosen.append(i)
        for n, i in enumerate(sorted(chosen[:num])):
            anchors[b, n], real[b, n] = i, True
    return anchors, real


def block_targets(
    ids: torch.Tensor, anchors: torch.Tensor, block_size: int, segment_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``block_size - 1`` tokens after each anchor, -100 beyond its document, and a mask of those inside.

    Args:
        ids: ``[B, L]``.
        anchors: ``[B, num]``.
        block_size: positions of a block, including the anchor.
        segment_ids: ``[B, L]``, equal for adjacent tokens of a document; negative: no document. None: one per row.

    Returns:
        Both ``[B, num * (block_size - 1)]``.

    Source: the block layout of the DFlash paper.
    """
    B, L = ids.shape
    shape = B, anchors.shape[1] * (block_size - 1)
    targets, inside = torch.full(shape, -100), torch.zeros(shape, dtype=torch.bool)
    for b in range(B):
        segments = [0] * L if segment_ids is None else segment_ids[b].tolist()
        for n, anchor in enumerate(anchors[b].tolist()):
            for k in range(1, block_size):
                place = anchor + k
                if not 0 <= anchor < L or place >= L or segments[place] != segments[anchor] or segments[anchor] < 0:
                    break
                targets[b, n * (block_size - 1) + k - 1] = ids[b, place]
                inside[b, n * (block_size - 1) + k - 1] = True
    return targets, inside


def prefix_probabilities(block_size: int, base: float) -> dict[int, float]:
    """Return the probability of each length l of a prefix, proportional to ``base ** l``.

    Args:
        block_size: positions of a block, including the anchor.
        base: the base.

    Returns:
        l -> probability, for l from ``min(2, block_size - 1)`` to ``block_size - 1``.

    Source: random prefixes of drafted blocks.
    """
    lengths = range(min(2, block_size - 1), block_size)
    total = sum(base**length for length in lengths)
    return {length: base**length / total for length in lengths}


def prefix_weights(prefix: torch.Tensor, rows: int, gamma: float | None) -> torch.Tensor:
    """Compute ``w_k = exp(-(k - l) / gamma)`` from k = l on, and 0 before, of blocks with k = 1 .. rows.

    Args:
        prefix: l of each block ``[B, num]``.
        rows: rows per block.
        gamma: decay length; None: no decay.

    Returns:
        ``[B, num * rows]``, float64.

    Source: the DFlash paper, Eq. 4, counted from the first predicted token.
    """
    B, num = prefix.shape
    weights = torch.zeros(B, num, rows, dtype=torch.float64)
    for b in range(B):
        for n in range(num):
            for k in range(1, rows + 1):
                steps = k - int(prefix[b, n])
                if steps >= 0:
                    decay = 0.0 if gamma is None else steps / gamma
                    weights[b, n, k - 1] = torch.exp(torch.tensor(-decay, dtype=torch.float64))
    return weights.reshape(B, num * rows)
