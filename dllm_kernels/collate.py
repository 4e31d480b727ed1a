"""Collation of variable-length samples into block-aligned tensors, in one pass over the batch."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

FIELDS = ("input_ids", "loss_mask", "attention_mask")
Row = np.ndarray[Any, np.dtype[Any]]


class DLLMCollator:
    """Pad samples to one length: their content, then a block fill, then a global pad.

    ========================  ==============  =============================  ==================================
    tensor                    content         block fill                     global pad
    ========================  ==============  =============================  ==================================
    input_ids                 as given        eos, or else pad id            pad id
    loss_mask                 as given        1                              0, or 1 with ``supervise_padding``
    attention_mask            as given        0, or 1 in ``response_window``  0
    ========================  ==============  =============================  ==================================

    Content longer than ``max_seq_len`` is cut. The fill ends at the next multiple of ``block_size``, counted from 0, or
    in ``response_window`` from the first supervised position (where there is none, from the end of the content). All
    rows are as long as the longest fill, rounded up to ``lcm(block_size, pad_seq_len_divisible)``, then cut to
    ``max_seq_len``, and at least 1.

    Args:
        pad_token_id: token of the global pad.
        eos_token_id: token of the block fill; None: the pad token.
        block_size: positions of a block; None: no block fill.
        pad_seq_len_divisible: the length becomes a multiple of this (and of ``block_size``); None or 1: no rounding.
        max_seq_len: the length is at most this, also after rounding.
        supervise_padding: whether the global pad is supervised.
        response_window: align blocks on the response instead of on position 0 and attend to the fill. Each sample must
            then have at most one supervised run.
        pin_memory: make the tensors in page-locked memory, for a non-blocking copy to a GPU.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size < 1.
    """

    def __init__(
        self,
        pad_token_id: int = 0,
        eos_token_id: int | None = None,
        block_size: int | None = None,
        pad_seq_len_divisible: int | None = None,
        max_seq_len: int | None = None,
        supervise_padding: bool = False,
        response_window: bool = False,
        *,
        pin_memory: bool = False,
    ) -> None:
        sizes = {"block_size": block_size, "pad_seq_len_divisible": pad_seq_len_divisible, "max_seq_len": max_seq_len}
        for name, value in sizes.items():
            _check_size(name, value)
        self.pad_token_id = pad_token_id
        self.eos_token_id = eos_token_id
        self.block_size = block_size
        self.pad_seq_len_divisible = pad_seq_len_divisible
        self.max_seq_len = max_seq_len
        self.block_pad_token_id = pad_token_id if eos_token_id is None else eos_token_id
        self.supervise_padding = supervise_padding
        self.response_window = response_window
        self.pin_memory = pin_memory

    def __call__(self, batch: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate a batch.

        Args:
            batch: samples with ``input_ids``, ``loss_mask`` and ``attention_mask``, lists (or 1-d tensors or arrays) of
                one length. Other keys, such as ``___PAD_TOKEN_IDS___``, are ignored; samples are not modified.

        Returns:
            ``input_ids`` int64, ``loss_mask`` float32 and ``attention_mask`` int64, each ``[B, L]``; ``input_lengths``
            int64 ``[B]``, the lengths before any cut.

        Raises:
            TypeError: a field is not a sequence of numbers.
            ValueError: a field is missing or as long as no other, or, in ``response_window``, a sample has more than one
                supervised run; the sample and the field are named.
        """
        rows = [_rows_of(i, sample) for i, sample in enumerate(batch)]
        lengths = torch.tensor([len(row["input_ids"]) for row in rows], dtype=torch.int64)
        starts = torch.zeros_like(lengths)
        if self.response_window:
            starts = torch.tensor(
                [_response_start(i, row["loss_mask"]) for i, row in enumerate(rows)], dtype=torch.int64
            )
        ends = self._block_fill_ends(lengths, starts)
        L = self._compute_target_length(ends)
        values = {
            "input_ids": (self.pad_token_id, self.block_pad_token_id, torch.int64),
            "loss_mask": (int(self.supervise_padding), 1, torch.float32),
            "attention_mask": (0, int(self.response_window), torch.int64),
        }
        out = {
            field: self._pad_and_fill([row[field] for row in rows], lengths, ends, L, *values[field])
            for field in FIELDS
        }
        return {**out, "input_lengths": lengths.pin_memory() if self.pin_memory else lengths}

    @staticmethod
    def _first_supervised_index(loss_mask: Sequence[Any], default: int) -> int:
        """The first position whose mask is nonzero, else ``default``."""
        supervised = np.flatnonzero(np.asarray(loss_mask))
        return int(supervised[0]) if supervised.size else default

    def _block_fill_ends(self, content_lengths: torch.Tensor, prefix_lengths: torch.Tensor) -> torch.Tensor:
        """Where each sample's fill ends ``[B]``: whole blocks from its prefix on, after cutting to ``max_seq_len``."""
        content = content_lengths if self.max_seq_len is None else content_lengths.clamp(max=self.max_seq_len)
        if self.block_size is None:
            return content.clone()
        prefix = torch.minimum(prefix_lengths, content)
        blocks = (content - prefix + self.block_size - 1) // self.block_size
        return prefix + blocks * self.block_size

    def _compute_target_length(self, fill_ends: torch.Tensor) -> int:
        """The length of all rows: the longest fill, rounded up, cut to ``max_seq_len``, at least 1."""
        length = int(fill_ends.max()) if fill_ends.numel() else 0
        if self.pad_seq_len_divisible is not None and self.pad_seq_len_divisible > 1:
            multiple = math.lcm(self.block_size or 1, self.pad_seq_len_divisible)
            length = -(-length // multiple) * multiple
        if self.max_seq_len is not None:
            length = min(length, self.max_seq_len)
        return max(length, 1)

    def _pad_and_fill(
        self,
        samples: Sequence[Any],
        content_lengths: torch.Tensor,
        fill_ends: torch.Tensor,
        target_len: int,
        pad_value: int,
        block_pad_value: int,
        dtype: torch.dtype = torch.long,
    ) -> torch.Tensor:
        """One field of all samples as ``[B, target_len]``: content, fill up to ``fill_ends``, then pad."""
        out = torch.full((len(samples), target_len), pad_value, dtype=dtype, pin_memory=self.pin_memory)
        view = out.numpy()
        ends, lengths = fill_ends.tolist(), content_lengths.tolist()
        for row, sample, length, end in zip(view, samples, lengths, ends, strict=True):
            content = _as_row("samples", sample)[:length]
            row[: len(content)] = content[:target_len]
            row[length:end] = block_pad_value
        return out


def _check_size(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int or None, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _rows_of(i: int, sample: Mapping[str, Any]) -> dict[str, Row]:
    """The fields of sample i as arrays of one length."""
    if not isinstance(sample, Mapping):
        raise TypeError(f"sample {i} must be a dict, got {type(sample).__name__}")
    rows = {}
    for field in FIELDS:
        if field not in sample:
            raise ValueError(f"sample {i} has no field {field!r}; it has {', '.join(map(repr, sample)) or 'none'}")
        rows[field] = _as_row(f"sample {i}, field {field!r}", sample[field], fractions=field == "loss_mask")
        if len(rows[field]) != len(rows["input_ids"]):
            raise ValueError(
                f"sample {i}, field {field!r} must be as long as its 'input_ids', {len(rows['input_ids'])}, "
                f"got {len(rows[field])}"
            )
    return rows


def _as_row(name: str, values: Any, fractions: bool = True) -> Row:
    """A 1-d array of what a field holds: int64 from whole numbers, else, where ``fractions`` may be, floating."""
    if isinstance(values, (list, tuple)):
        try:
            # Packing a list into bytes is several times as fast as torch.tensor or numpy.array, which look at each
            # element's type first; it takes whole numbers only.
            return np.frombuffer(struct.pack(f"{len(values)}q", *values), dtype=np.int64)
        except struct.error:
            pass
    try:
        row = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a sequence of numbers, got {type(values).__name__}") from error
    kinds = "biuf" if fractions else "biu"
    if row.ndim != 1 or (row.dtype.kind not in kinds and row.size):
        wanted = "numbers" if fractions else "whole numbers"
        raise TypeError(
            f"{name} must be a sequence of {wanted}, got {type(values).__name__} of shape {row.shape} and {row.dtype}"
        )
    return row


def _response_start(i: int, loss_mask: Row) -> int:
    """The first supervised position of sample i, or its length; more than one supervised run is an error."""
    supervised = loss_mask != 0
    edges = np.flatnonzero(np.diff(supervised, prepend=False))
    runs = (len(edges) + 1) // 2
    if runs > 1:
        raise ValueError(
            f"sample {i}, field 'loss_mask' must have at most one supervised run in response_window, got {runs}: "
            "supervise the last turn only"
        )
    return int(edges[0]) if runs else len(loss_mask)
