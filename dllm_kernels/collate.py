"""Collation of variable-length samples into block-aligned tensors, in one pass over the batch."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllm_kernels import _checks

__all__ = ["DLLMCollator"]

FIELDS = ("input_ids", "loss_mask", "attention_mask")
PACKED = {"position_ids": 0, "segment_ids": -1}  # fields of packed documents, and what they are padded with
FROM_LABELS = "from labels it is [int(label != -100) for label in labels]"
Row = np.ndarray[Any, np.dtype[Any]]


class DLLMCollator:
    """Pad samples to one length: their content, then a block fill, then a global pad.

    ========================  ==============  =============================  ==================================
    tensor                    content         block fill                     global pad
    ========================  ==============  =============================  ==================================
    input_ids                 as given        eos, or else pad id            pad id
    loss_mask                 as given        1                              0, or 1 with ``supervise_padding``
    attention_mask            as given        0, or 1 in ``response_window``  0
    position_ids (if any)     as given        0                              0
    segment_ids (if any)      as given        -1                             -1
    ========================  ==============  =============================  ==================================

    Content longer than ``max_seq_len`` is truncated. The fill ends at the next multiple of ``block_size``, counted from
    position 0. With ``response_window`` it is counted from the first supervised position, or from the end of the
    content if no position is supervised. The common length is the end of the longest fill, rounded up to
    ``lcm(block_size, pad_seq_len_divisible)``, then truncated to ``max_seq_len``, and at least 1.

    Examples:
        >>> ids = [7, 8, 9]
        >>> long = {"input_ids": ids, "loss_mask": [0, 1, 1], "attention_mask": [1, 1, 1]}
        >>> short = {"input_ids": [5], "loss_mask": [1], "attention_mask": [1]}
        >>> batch = DLLMCollator(pad_token_id=0, eos_token_id=2, block_size=2)([long, short])
        >>> batch["input_ids"].tolist(), batch["loss_mask"].tolist()
        ([[7, 8, 9, 2], [5, 2, 0, 0]], [[0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])

    Args:
        pad_token_id: token of the global pad.
        eos_token_id: token of the block fill; None: the pad token.
        block_size: positions per block; None: no block fill.
        pad_seq_len_divisible: round the length up to a multiple of this and of ``block_size``; None or less than 2: no
            rounding.
        max_seq_len: maximum length, also after rounding; the length is at least 1. None: no maximum.
        supervise_padding: True to supervise the global pad.
        response_window: True to align blocks with the start of the response instead of position 0, and to attend to the
            fill. Each sample must then have at most one supervised run.
        pin_memory: True to allocate the tensors in pinned memory, for a non-blocking copy to a GPU. Use it if the
            collator runs in the training process. With worker processes use ``DataLoader(pin_memory=True)`` instead.

    Raises:
        TypeError: a token or a size is not an int, or a flag is not a bool.
        ValueError: ``block_size`` < 1, a size is 2^31 or more, or a token has more than 64 bits.
    """

    def __init__(
        self, pad_token_id: int = 0, eos_token_id: int | None = None, block_size: int | None = None,
        pad_seq_len_divisible: int | None = None, max_seq_len: int | None = None, supervise_padding: bool = False,
        response_window: bool = False, *, pin_memory: bool = False,
    ) -> None:  # fmt: skip
        self.pad_token_id = _checks.checked_int64("pad_token_id", pad_token_id)
        self.eos_token_id = None if eos_token_id is None else _checks.checked_int64("eos_token_id", eos_token_id)
        self.block_size = _checked_size("block_size", block_size, 1)
        self.pad_seq_len_divisible = _checked_size("pad_seq_len_divisible", pad_seq_len_divisible)
        self.max_seq_len = _checked_size("max_seq_len", max_seq_len)
        self.block_pad_token_id = self.pad_token_id if self.eos_token_id is None else self.eos_token_id
        self.supervise_padding = _checks.checked_bool("supervise_padding", supervise_padding)
        self.response_window = _checks.checked_bool("response_window", response_window)
        self.pin_memory = _checks.checked_bool("pin_memory", pin_memory)

    def __call__(self, batch: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Collate a batch.

        Args:
            batch: samples with ``input_ids``, ``loss_mask`` and ``attention_mask``: lists, 1-d tensors or arrays of
                equal length. Fractions in a ``loss_mask`` are kept. Samples of packed documents may also have
                ``position_ids`` and ``segment_ids``, in which a negative id belongs to no document; if one sample of a
                batch has such a field, all must have it. Other keys, such as ``___PAD_TOKEN_IDS___``, are ignored, and
                samples are not modified. An empty batch gives tensors of shape ``[0, 1]``.

        Returns:
            ``input_ids`` int64, ``loss_mask`` float32 and ``attention_mask`` int64, each ``[B, L]``; ``input_lengths``
            int64 ``[B]``, the lengths before truncation; ``position_ids`` and ``segment_ids`` int64 ``[B, L]`` if the
            samples have them.

        Raises:
            TypeError: the batch is not a list of dicts, or a field is not a sequence of numbers.
            ValueError: a field is missing, is not as long as ``input_ids``, is not 1-d, or holds a value other than a
                64-bit whole number, or a ``loss_mask`` holds an integer above 1. With ``response_window``, also if a
                sample has more than one supervised run (the original raises AssertionError). Every message names the
                sample and the field.
        """
        samples = checked_samples("batch", batch)
        packed = {name: pad for name, pad in PACKED.items() if any(name in sample for sample in samples)}
        fields = (*FIELDS, *packed)
        counts = [_length(i, sample, fields) for i, sample in enumerate(samples)]
        lengths = torch.tensor(counts, dtype=torch.int64, device="cpu")
        rows = {field: self._rows(samples, field) for field in fields}
        starts = torch.zeros_like(lengths)
        if self.response_window:
            for i, row in enumerate(rows["loss_mask"]):
                _check_one_run(i, row)
            firsts = [self._first_supervised_index(row, len(row)) for row in rows["loss_mask"]]
            starts = torch.tensor(firsts, dtype=torch.int64, device="cpu")
        ends = self._block_fill_ends(lengths, starts)
        L = self._compute_target_length(ends)
        values = {
            "input_ids": (self.pad_token_id, self.block_pad_token_id, torch.int64),
            "loss_mask": (int(self.supervise_padding), 1, torch.float32),
            "attention_mask": (0, int(self.response_window), torch.int64),
            **{name: (pad, pad, torch.int64) for name, pad in packed.items()},
        }
        out = {field: self._pad_and_fill(rows[field], lengths, ends, L, *values[field]) for field in fields}
        if out["loss_mask"].numpy().max(initial=0) > 1:
            for i, row in enumerate(rows["loss_mask"]):
                if row.dtype.kind in "iu":
                    mask = torch.from_numpy(row.astype("i8"))
                    _checks.check_mask_values(f"sample {i}, field 'loss_mask'", mask, no_ids=True)
        return {**out, "input_lengths": lengths.pin_memory() if self.pin_memory else lengths}

    def _rows(self, samples: Sequence[Mapping[str, Any]], field: str) -> list[Row]:
        """Convert one field of every sample to an array, truncated to ``max_seq_len`` first to save time."""
        is_mask = field == "loss_mask"  # a run after the truncation still counts as a second run
        limit = None if self.max_seq_len is None or (is_mask and self.response_window) else max(self.max_seq_len, 1)
        names = (f"sample {i}, field {field!r}" for i in range(len(samples)))
        rows = {name: _as_row(name, sample[field], limit, is_mask) for name, sample in zip(names, samples, strict=True)}
        if field in ("loss_mask", "attention_mask"):
            for name, row in rows.items():
                if row.dtype.kind in "if":  # a list of small numbers, the common case, is packed into unsigned bytes
                    with np.errstate(over="ignore"):  # what overflows is an infinity, which is rejected
                        values = row.astype(np.float32 if is_mask else np.float64)
                    _checks.check_mask_values(name, torch.from_numpy(values))
        return list(rows.values())

    @staticmethod
    def _first_supervised_index(loss_mask: Sequence[Any] | Row, default: int) -> int:
        """Return the first position whose mask is nonzero, else ``default``."""
        supervised = np.flatnonzero(_as_row("loss_mask", loss_mask))
        return int(supervised[0]) if supervised.size else default

    def _block_fill_ends(self, content_lengths: Tensor, prefix_lengths: Tensor) -> Tensor:
        """Return the end of each sample's fill ``[B]``: truncated content plus whole blocks from the prefix on."""
        content = content_lengths if self.max_seq_len is None else content_lengths.clamp(max=self.max_seq_len)
        if self.block_size is None:
            return content.clone()
        prefix = torch.minimum(prefix_lengths, content)
        blocks = (content - prefix + self.block_size - 1) // self.block_size
        return prefix + blocks * self.block_size

    def _compute_target_length(self, fill_ends: Tensor) -> int:
        """Return the common length: the longest fill, rounded up, truncated to ``max_seq_len``, at least 1."""
        length = int(fill_ends.max()) if fill_ends.numel() else 0
        if self.pad_seq_len_divisible is not None and self.pad_seq_len_divisible > 1:
            multiple = math.lcm(self.block_size or 1, self.pad_seq_len_divisible)
            length = -(-length // multiple) * multiple
        if self.max_seq_len is not None:
            length = min(length, self.max_seq_len)
        return max(length, 1)

    def _pad_and_fill(
        self, samples: Sequence[Any], content_lengths: Tensor, fill_ends: Tensor, target_len: int,
        pad_value: int, block_pad_value: int, dtype: torch.dtype = torch.long,
    ) -> Tensor:  # fmt: skip
        """Build ``[B, target_len]`` from one field of all samples: content, fill up to ``fill_ends``, then pad."""
        out = torch.empty((len(samples), target_len), dtype=dtype, device="cpu", pin_memory=self.pin_memory)
        view = out.numpy()
        view.fill(pad_value)  # NumPy, because torch would use all cores
        ends, lengths = fill_ends.tolist(), content_lengths.tolist()
        for row, sample, length, end in zip(view, samples, lengths, ends, strict=True):
            content = _as_row("samples", sample, min(length, target_len))
            row[: len(content)] = content
            row[length:end] = block_pad_value
        return out


def _checked_size(name: str, value: Any, least: int | None = None) -> int | None:
    return None if value is None else _checks.checked_int(name, value, least, _checks.MOST_SIZE)


def checked_samples(name: str, samples: object) -> list[Mapping[str, Any]]:
    """Return the samples of a batch; raise TypeError unless they are dicts. ``name`` is that of the argument."""
    if isinstance(samples, (Mapping, Tensor)) or not isinstance(samples, Iterable):
        hint = "; put a single sample into a list" if isinstance(samples, Mapping) else ""
        raise TypeError(f"{name} must be a list of dicts, got {_checks.type_name(samples)}{hint}")
    batch = list(samples)
    for i, sample in enumerate(batch):
        if not isinstance(sample, Mapping):
            raise TypeError(f"sample {i} must be a dict, got {_checks.type_name(sample)}")
    return batch


def _length(i: int, sample: Mapping[str, Any], fields: Sequence[str]) -> int:
    """Return the common length of the fields of sample i; raise if they differ."""
    for field in fields:
        if field not in sample:
            hint = f"; {FROM_LABELS}" if field == "loss_mask" and "labels" in sample else ""
            has = ", ".join(map(repr, sample)) or "none"
            raise ValueError(f"sample {i} has no field {field!r}; it has {has}{hint}")
        try:
            length = len(sample[field])
        except TypeError as error:
            raise _not_numbers(f"sample {i}, field {field!r}", sample[field]) from error
        if length != (size := len(sample["input_ids"])):
            raise ValueError(f"sample {i}, field {field!r} must be as long as its 'input_ids', {size}, got {length}")
    return length


def _not_numbers(name: str, values: object) -> TypeError:
    what = _checks.type_name(values)
    if isinstance(values, (list, tuple)):
        what += " of " + ", ".join(sorted({_checks.type_name(value) for value in values}))
    return TypeError(f"{name} must be a sequence of numbers, got {what}")


def _as_row(name: str, values: Any, limit: int | None = None, fractions: bool = True) -> Row:
    """Convert the first ``limit`` values to a 1-d array: integers, or floats if ``fractions`` are allowed."""
    if isinstance(values, (list, tuple)):
        values = _packed(name, values if limit is None or len(values) <= limit else values[:limit])
    if isinstance(values, Tensor):
        if values.is_meta:
            raise _not_numbers(name, values)
        # Cast, because NumPy has no bfloat16.
        values = values.detach().cpu().to(torch.float64 if values.is_floating_point() else values.dtype)
    try:
        row = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise _not_numbers(name, values) from error
    if row.dtype.kind not in "biuf":
        raise _not_numbers(name, values)
    if row.ndim != 1:
        raise ValueError(f"{name} must be 1-d, got shape {row.shape}")
    row = row[:limit]
    if not fractions and (row.dtype.kind == "f" or row.dtype == np.uint64):
        _check_whole(name, row)
    return row


def _packed(name: str, values: Sequence[Any]) -> Any:
    """Convert a list of numbers to an array of bytes (masks), int64 or float64; return anything else unchanged.

    Packing a list is several times faster than ``numpy.array`` and ``torch.tensor``, which inspect the type of each
    element first. Packing into single bytes is several times faster again; it fails at the first number beyond 255.
    """
    try:
        return np.frombuffer(bytearray(values), dtype=np.uint8)
    except (TypeError, ValueError, OverflowError):
        pass
    for code, dtype in (("q", np.int64), ("d", np.float64)):
        try:
            row = np.frombuffer(struct.pack(f"{len(values)}{code}", *values), dtype=dtype)
        except (struct.error, OverflowError, TypeError):
            continue
        if code == "d":
            _check_exact(name, values, row)
        return row
    return values


def _check_exact(name: str, values: Sequence[Any], row: Row) -> None:
    """Raise if an int of the list is rounded in its float64 row, because float64 is exact up to 2**53 only."""
    for i in np.flatnonzero(np.abs(row) >= 2.0**53).tolist():
        if _checks.is_int(values[i]) and int(values[i]) != int(row[i]):
            raise ValueError(f"{name} must hold no floats beside an int beyond 2**53, got {values[i]} at position {i}")


def _check_whole(name: str, row: Row) -> None:
    """Raise unless every value is a whole number in the range of int64."""
    wide = row.astype(np.float64)  # float64, because 2**63 overflows float16
    bad = np.flatnonzero(~((wide == np.trunc(wide)) & (np.abs(wide) < 2.0**63)))
    if bad.size:
        raise ValueError(f"{name} must hold whole numbers of 64 bits, got {row[bad[0]]} at position {bad[0]}")


def _check_one_run(i: int, loss_mask: Row) -> None:
    """Raise if sample i has more than one run of supervised positions."""
    supervised = loss_mask != 0
    runs = int(np.count_nonzero(supervised[1:] & ~supervised[:-1])) + int(supervised[:1].any())
    if runs > 1:
        raise ValueError(
            f"sample {i}, field 'loss_mask' must have at most one supervised run in response_window, got {runs}: "
            "supervise the last turn only"
        )
