"""What is to be computed (a job: a few tensors) and how (one frozen plan), as every layer below the public doors takes it.

A door checks its arguments, makes both once, and hands them to ``ops/_route.py``. A new option is a new field of the plan,
read where it is needed; nothing between has to know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dllm_kernels.ops import _changing
from dllm_kernels.ops._backend import row_primitives
from dllm_kernels.ops._rows import SKIP, RowPrimitives
from dllm_kernels.ops._transform import NO_TRANSFORM, Transform

Packed = tuple[list[int], list[float], torch.Tensor | None]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class LogitsJob(NamedTuple):
    """Rows of logits ``[..., V]`` and their targets ``[...]``; ``active [...]`` or None, zero where a row is off."""

    logits: torch.Tensor
    targets: torch.Tensor
    active: torch.Tensor | None = None


class LinearJob(NamedTuple):
    """Hidden states ``[..., D]``, the head ``[V, D]`` and ``[V]``, targets ``[...]``, and what is known of each row.

    ``weights [...]`` are those of a weighted sum, else None; ``active`` as in :class:`LogitsJob`.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    weights: torch.Tensor | None = None
    active: torch.Tensor | None = None


class StatsJob(NamedTuple):
    """Rows of logits ``[..., V]``, ids ``[..., K]`` or ``[...]``, (a, b) of the mixture ``[...]`` or None, ``active`` likewise."""

    logits: torch.Tensor
    ids: torch.Tensor
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    active: torch.Tensor | None = None


class LinearStatsJob(NamedTuple):
    """Hidden states ``[..., D]``, the head ``[V, D]`` and ``[V]``; the rest as in :class:`StatsJob`."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    ids: torch.Tensor
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    active: torch.Tensor | None = None


class Needs(NamedTuple):
    """Which inputs of a job want a gradient; logits stand in the place of hidden states."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    @classmethod
    def of(cls, *inputs: torch.Tensor | None) -> Needs:
        """Asked at the door: inside a Function's forward they would seem to, even under ``torch.no_grad``."""
        grad = torch.is_grad_enabled()
        return cls(*(t is not None and t.requires_grad and grad for t in inputs))

    @property
    def frozen(self) -> bool:
        """Only hidden wants one, each row of which depends on the upstream gradient of that row alone."""
        return self.hidden and not self.weight and not self.bias


NO_GRADIENTS = Needs()


@dataclass(frozen=True)
class Plan:
    """How a job is done.

    Attributes:
        dtype: of the logits.
        triton: whether the Triton kernels run, or plain torch.
        ignore_index: the target that switches a row off.
        with_lse: return the logsumexp.
        with_correct: return the argmax-match.
        with_entropy: return the entropy.
        round_nll: round each NLL to ``dtype`` before it is weighted.
        read_beyond: rows of weight 0 are read too, so their NaN has to be kept out of the sum.
        inplace_backward: write the gradient over the logits.
        chunk_size: rows of logits that exist at a time; None chooses.
        memory_budget: bytes of such a chunk where ``chunk_size`` is None.
        num_active: an upper bound of the number of active rows, where the caller gave one.
        needs: which inputs want a gradient.
        one_pass: read a chunk of logits once, where the backend and the dtype allow; unproven, see ``_backend.one_pass``.
        transform: of the logits, before they become probabilities.
        rows: row primitives that stand where the backend's would: those of a split vocabulary.
    """

    dtype: torch.dtype
    triton: bool
    ignore_index: int = SKIP
    with_lse: bool = False
    with_correct: bool = False
    with_entropy: bool = False
    round_nll: bool = False
    read_beyond: bool = False
    inplace_backward: bool = False
    chunk_size: int | None = None
    memory_budget: int | None = None
    num_active: int | None = None
    needs: Needs = NO_GRADIENTS
    one_pass: bool = False
    transform: Transform = NO_TRANSFORM
    rows: RowPrimitives | None = None

    @property
    def acc(self) -> torch.dtype:
        """The dtype sums are made in."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def narrow(self) -> bool:
        """Whether small gradients underflow in the dtype of the logits: float16's least is 6e-8."""
        return self.dtype == torch.float16

    def primitives(self) -> RowPrimitives:
        """The row primitives to work with."""
        return row_primitives(self.triton) if self.rows is None else self.rows

    def pack(self) -> Packed:
        """What a compiled op has to know below the doors, as its schema can carry it: integers and :mod:`_changing` floats."""
        flags = (
            self.triton, self.with_correct, self.with_entropy, self.round_nll, self.read_beyond, self.one_pass, *self.needs
        )  # fmt: skip
        sizes = (self.chunk_size, self.memory_budget, self.num_active, self.transform.skip_id)
        packed = [_DTYPES.index(self.dtype), *(int(f) for f in flags), *(-1 if s is None else s for s in sizes)]
        return packed, *_changing.packed(self.transform.factors)

    @classmethod
    def unpack(cls, packed: Sequence[int], factors: Sequence[float], changing: torch.Tensor | None = None) -> Plan:
        """The plan of :meth:`pack`; while a graph is traced, the factors in ``changing`` are not known and left out."""
        dtype, *flags, chunk_size, memory_budget, num_active, skip_id = packed
        triton, with_correct, with_entropy, round_nll, read_beyond, one_pass, *needs = (bool(f) for f in flags)
        return cls(
            _DTYPES[dtype],
            triton,
            with_correct=with_correct,
            with_entropy=with_entropy,
            round_nll=round_nll,
            read_beyond=read_beyond,
            chunk_size=None if chunk_size < 0 else chunk_size,
            memory_budget=None if memory_budget < 0 else memory_budget,
            num_active=None if num_active < 0 else num_active,
            needs=Needs(*needs),
            one_pass=one_pass,
            transform=Transform.of(_changing.unpacked(factors, changing), None if skip_id < 0 else skip_id),
        )


def compute_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The dtype of the logits, as ``F.linear`` would choose it, autocast included."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    return hidden.dtype
