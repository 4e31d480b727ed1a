"""Collation of token lists into block-aligned tensors, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Sample = Mapping[str, Sequence[Any]]


def rounded_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple


def first_supervised(loss_mask: Sequence[Any], default: int) -> int:
    """Return the first position whose mask is nonzero, else ``default``."""
    for i, supervised in enumerate(loss_mask):
        if supervised:
            return i
    return default


def supervised_runs(loss_mask: Sequence[Any]) -> int:
    """Count the runs of supervised positions."""
    runs, before = 0, False
    for supervised in loss_mask:
        runs += bool(supervised) and not before
        before = bool(supervised)
    return runs


def fill_end(sample: Sample, block_size: int | None, max_seq_len: int | None, response_window: bool) -> int:
    """Return the end of a sample's block fill: a whole number of blocks from 0 or from its response."""
    length = len(sample["input_ids"])
    content = length if max_seq_len is None else min(length, max_seq_len)
    if block_size is None:
        return content
    start = min(first_supervised(sample["loss_mask"], length), content) if response_window else 0
    return start + rounded_up(content - start, block_size)


def filled_row(content: Sequence[Any], end: int, L: int, fill: int, pad: int) -> list[Any]:
    """Return ``L`` values: the content, then ``fill`` up to ``end``, then ``pad``."""
    row = []
    for i in range(L):
        if i < len(content):
            row.append(content[i])
        else:
            row.append(fill if i < end else pad)
    return row


def collate(
    batch: Sequence[Sample],
    pad_token_id: int = 0,
    eos_token_id: int | None = None,
    block_size: int | None = None,
    pad_seq_len_divisible: int | None = None,
    max_seq_len: int | None = None,
    supervise_padding: bool = False,
    response_window: bool = False,
) -> dict[str, torch.Tensor]:
    """Pad samples to one length: content, then a block fill, then a global pad.

    ``L = max(1, min(max_seq_len, round_up(max_b end_b, lcm(block_size, pad_seq_len_divisible))))``, with ``end_b`` the
    next multiple of ``block_size`` after the content, counted from position 0 or from the response.

    | | content | block fill | global pad |
    |---|---|---|---|
    | input_ids | as given | eos, or else pad id | pad id |
    | loss_mask | as given | 1 | 0, or 1 with ``supervise_padding`` |
    | attention_mask | as given | 0, or 1 in ``response_window`` | 0 |
    | position_ids | as given | 0 | 0 |
    | segment_ids | as given | -1 | -1 |

    Args:
        batch: samples with the lists ``input_ids``, ``loss_mask`` and ``attention_mask``, and, of packed documents,
            ``position_ids`` and ``segment_ids``; other keys are ignored.
        pad_token_id: token of the global pad.
        eos_token_id: token of the block fill; None: ``pad_token_id``.
        block_size: positions per block; None: no block fill.
        pad_seq_len_divisible: round L up to a multiple of this and of the block size.
        max_seq_len: maximum of the content length and of L; None: no maximum.
        supervise_padding: True to supervise the global pad.
        response_window: True to count blocks from the first supervised position and to attend to the block fill.

    Returns:
        ``input_ids`` int64, ``loss_mask`` float32, ``attention_mask`` int64, each ``[B, L]``;
        ``input_lengths`` int64 ``[B]``, the lengths before truncation; ``position_ids`` and ``segment_ids`` int64
        ``[B, L]`` if the samples have them.

    Raises:
        ValueError: in ``response_window``, a sample with more than one supervised run.

    Source: the documentation of the original collator.
    """
    for b, sample in enumerate(batch):
        if response_window and supervised_runs(sample["loss_mask"]) > 1:
            raise ValueError(
                f"sample {b}: loss_mask must have one supervised run in a response window, "
                f"got {supervised_runs(sample['loss_mask'])}"
            )
    ends = [fill_end(sample, block_size, max_seq_len, response_window) for sample in batch]
    L = max(ends, default=0)
    if pad_seq_len_divisible is not None and pad_seq_len_divisible > 1:
        L = rounded_up(L, math.lcm(block_size or 1, pad_seq_len_divisible))
    L = max(L if max_seq_len is None else min(L, max_seq_len), 1)

    eos = pad_token_id if eos_token_id is None else eos_token_id
    fills = {"input_ids": eos, "loss_mask": 1, "attention_mask": int(response_window)}
    pads = {"input_ids": pad_token_id, "loss_mask": int(supervise_padding), "attention_mask": 0}
    dtypes = {"input_ids": torch.int64, "loss_mask": torch.float32, "attention_mask": torch.int64}
    for key, padding in (("position_ids", 0), ("segment_ids", -1)):
        if any(key in sample for sample in batch):
            fills[key], pads[key], dtypes[key] = padding, padding, torch.int64
    out = {}
    for key, dtype in dtypes.items():
        rows = [filled_row(sample[key], end, L, fills[key], pads[key]) for sample, end in zip(batch, ends, strict=True)]
        out[key] = torch.tensor(rows, dtype=dtype).reshape(len(batch), L)
    out["input_lengths"] = torch.tensor([len(sample["input_ids"]) for sample in batch], dtype=torch.int64)
    return out
