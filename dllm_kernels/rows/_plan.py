"""What is to be computed (a job: a few tensors) and how (one frozen plan), as every layer below the public functions takes it.

A public function checks its arguments, makes both once, and hands them to ``rows/_route.py``. A new option is a new field of
the plan, read where it is needed; nothing between has to know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from dllm_kernels.base import _changing
from dllm_kernels.base._plain import autocasts
from dllm_kernels.base._rows import SKIP, RowPrimitives
from dllm_kernels.base._transform import NO_TRANSFORM, Transform
from dllm_kernels.rows._backends import row_primitives

Packed = tuple[list[int], list[float], torch.Tensor | None]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Job(NamedTuple):
    """The tensors of a call: rows of logits, or of hidden states with the LM head, and what is known of each row.

    At the public functions rows have the caller's shape ``[...]``; below ``rows/_run.py`` there are N of them.

    Attributes:
        x: logits ``[..., V]``, in any strides also below; or hidden states ``[..., D]``.
        weight: the head ``[V, D]``, None for logits.
        bias: ``[V]`` or None.
        ids: int64 ``[...]`` or ``[..., K]``, the targets or the ids to look up; below ``[N, K]``, -1 for what no column has.
        active: ``[...]``, zero where a row does not count, or None; below int64 ``[N]``, ``SKIP`` in such a row.
        weights: ``[...]`` of a weighted sum, else None.
        a: ``[...]`` of the mixture ``log(a + b p)``, or None.
        b: likewise.
        extra_x: ``[..., r]``, the rows of the head's second part, or None.
        extra_weight: ``[V, r]``: extra_x extra_weight^T is added to the logits.
    """

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    ids: torch.Tensor
    active: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    extra_x: torch.Tensor | None = None
    extra_weight: torch.Tensor | None = None

    @classmethod
    def of(cls, leaves: Sequence[Any], of_rows: Sequence[Any]) -> Job:
        """The job of these :attr:`leaves` and :attr:`of_rows`."""
        return cls(*leaves[:3], *of_rows, *leaves[3:])

    @property
    def leaves(self) -> tuple[torch.Tensor | None, ...]:
        """What may want a gradient, in the order of :class:`Needs`."""
        return (*self[:3], *self[-2:])

    @property
    def of_rows(self) -> tuple[torch.Tensor | None, ...]:
        """What is known of each row, a constant: the others."""
        return self[3:-2]

    @property
    def head(self) -> torch.Tensor:
        """The weight, where there is one."""
        assert self.weight is not None
        return self.weight

    @property
    def marks(self) -> torch.Tensor:
        """``active`` as it is below: ``SKIP`` in a row that does not count."""
        assert self.active is not None
        return self.active


class Gradients(NamedTuple):
    """Those of a job's leaves; None for what wants none."""

    x: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    extra_x: torch.Tensor | None = None
    extra_weight: torch.Tensor | None = None


def placed(gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a job's leaves, in their order, where these stand in it."""
    return Job.of(gradients, (None,) * (len(Job._fields) - LEAVES))


class Needs(NamedTuple):
    """Which of a job's leaves want a gradient."""

    x: bool = False
    weight: bool = False
    bias: bool = False
    extra_x: bool = False
    extra_weight: bool = False

    @classmethod
    def of(cls, *inputs: torch.Tensor | None) -> Needs:
        """Asked in the public function: inside a Function's forward they would seem to, even under ``torch.no_grad``."""
        grad = torch.is_grad_enabled()
        return cls(*(t is not None and t.requires_grad and grad for t in inputs))

    @property
    def frozen(self) -> bool:
        """Only the rows want one, each of which depends on the upstream gradient of that row alone."""
        return (self.x or self.extra_x) and not (self.weight or self.bias or self.extra_weight)


NO_GRADIENTS = Needs()
LEAVES = len(Needs._fields)


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
        objective: an ``Objective`` (``_objective.py``) of the row statistics, where one is asked for; not in compiled ops.
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
    objective: Any = None

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
        """What a compiled op has to know, as its schema can carry it: integers, and the floats of :mod:`_changing`."""
        integers: list[int] = [_DTYPES.index(self.dtype)]
        for name, of_type in _PACKED.items():
            value = getattr(self, name)
            integers += [_packed(v) for v in (value if of_type is Needs else (value,))]
        return [*integers, _packed(self.transform.skip_id)], *_changing.packed(self.transform.factors)

    @classmethod
    def unpack(cls, packed: Sequence[int], factors: Sequence[float], changing: torch.Tensor | None = None) -> Plan:
        """The plan of :meth:`pack`; while a graph is traced, the factors in ``changing`` are not known and left out."""
        dtype, *integers, skip_id = packed
        values: dict[str, Any] = {}
        for name, of_type in _PACKED.items():
            size = len(Needs._fields) if of_type is Needs else 1
            these, integers = integers[:size], integers[size:]
            values[name] = of_type(*map(bool, these)) if of_type is Needs else _unpacked(these[0], of_type)
        transform = Transform.of(_changing.unpacked(factors, changing), _unpacked(skip_id, int))
        return cls(_DTYPES[dtype], transform=transform, **values)


def _packed(value: Any) -> int:
    return _NONE if value is None else int(value)


def _unpacked(value: int, of_type: type) -> Any:
    return None if value == _NONE else bool(value) if of_type is bool else value


_NONE = -(1 << 62)
_TYPES = {"bool": bool, "int": int, "int | None": int, "Needs": Needs}
# Every field but the dtype, the transform and the row primitives, none of which is one integer.
_PACKED = {f.name: _TYPES[str(f.type)] for f in fields(Plan) if f.type in _TYPES}


def compute_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The dtype of the logits, as ``F.linear`` would choose it, autocast included."""
    if autocasts(hidden) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype
