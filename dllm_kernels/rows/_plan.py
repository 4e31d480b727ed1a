"""What is to be computed (a job: a few tensors) and how (one frozen plan), as every layer below the public functions takes it.

A public function makes a job and :class:`Options` of its arguments and has them checked, once (``rows/_call.py``). A new option
is a new field, read where it is needed; nothing between has to know of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch

from dllm_kernels.base import _changing, _checks
from dllm_kernels.base._backend import use_triton
from dllm_kernels.base._named import replaced
from dllm_kernels.base._plain import autocasts
from dllm_kernels.base._rows import SKIP, RowPrimitives
from dllm_kernels.base._transform import NO_TRANSFORM, Transform
from dllm_kernels.rows._backends import row_primitives
from dllm_kernels.rows._teacher import Pair

Packed = tuple[list[int], list[float], torch.Tensor | None, list[torch.Tensor]]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Job(NamedTuple):
    """The tensors of a call: rows of logits, or of hidden states with the LM head, and what is known of each row.

    At the public functions rows have the caller's shape ``[...]``; below ``rows/_run.py`` there are N of them.

    Attributes:
        x: logits ``[..., V]``, in any strides also below; or hidden states ``[..., D]``.
        weight: the head ``[V, D]``, None for logits.
        bias: ``[V]`` or None.
        ids: int64 ``[...]`` or ``[..., K]``, the targets or the ids to look up; below ``[N, K]``, -1 for what no column has.
        active: ``[...]``, zero where a row does not count, or None; below int64 ``[N]``: ``SKIP`` in such a row, in others the
            target, or 0 where a row has none.
        weights: ``[...]`` of a weighted sum, else None.
        a: ``[...]`` of the mixture ``log(a + b p)``, or None.
        b: likewise.
        extra_x: ``[..., r]``, the rows of the head's second part, or None.
        extra_weight: ``[V, r]``: extra_x extra_weight^T is added to the logits.
        table: ``[V, E]``, a row for each column, of which the op makes a mean; or None.
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
    table: torch.Tensor | None = None

    @classmethod
    def of(cls, leaves: Sequence[Any], of_rows: Sequence[Any], table: torch.Tensor | None = None) -> Job:
        """The job of these :attr:`leaves` and :attr:`of_rows`."""
        return cls._make((*leaves[:3], *of_rows, *leaves[3:], table))

    @property
    def leaves(self) -> tuple[torch.Tensor | None, ...]:
        """What may want a gradient, in the order of :class:`Needs`."""
        return (*self[:3], self.extra_x, self.extra_weight)

    @property
    def of_rows(self) -> tuple[torch.Tensor | None, ...]:
        """What is known of each row, a constant."""
        return self[3:8]

    @property
    def head(self) -> torch.Tensor:
        """The weight, where there is one."""
        assert self.weight is not None
        return self.weight


class Gradients(NamedTuple):
    """Those of a job's leaves; None for what wants none."""

    x: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    extra_x: torch.Tensor | None = None
    extra_weight: torch.Tensor | None = None


def placed(gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a job's leaves, in their order, where these stand in it."""
    return Job.of(gradients, (None,) * OF_ROWS)


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
        if not torch.is_grad_enabled():
            return NO_GRADIENTS
        return cls(*[t is not None and t.requires_grad for t in inputs])

    @property
    def frozen(self) -> bool:
        """Only the rows want one, each of which depends on the upstream gradient of that row alone."""
        return (self.x or self.extra_x) and not (self.weight or self.bias or self.extra_weight)


NO_GRADIENTS = Needs()
LEAVES = len(Needs._fields)
OF_ROWS = 5


class Options(NamedTuple):
    """What a caller asks of an op besides its tensors, as it was given until it is :meth:`checked`.

    Public functions and losses list what each of them takes; below them this one object travels. A new option is a new field
    here, read where it is needed.

    Attributes:
        transform: of the logits, before they become probabilities.
        ignore_index: the target that switches a row off.
        check_targets: whether a target out of range raises; None follows the environment.
        backend: "auto", "triton" or "torch".
        chunk_size: rows of logits that exist at a time; None chooses.
        num_active: an upper bound of the number of active rows, where the caller has one.
        with_lse: return the logsumexp.
        with_correct: return the argmax-match.
        entropy: return the entropy.
        round_nll: round each NLL to the dtype of the logits before it is weighted.
        inplace_backward: write the gradient over the logits.
    """

    transform: Transform = NO_TRANSFORM
    ignore_index: int = SKIP
    check_targets: bool | None = None
    backend: str = "auto"
    chunk_size: int | None = None
    num_active: int | None = None
    with_lse: bool = False
    with_correct: bool = False
    entropy: bool = False
    round_nll: bool = False
    inplace_backward: bool = False

    def checked(self, V: int, rows: int) -> Options:
        """The options, in Python's own types, for so many rows of V logits each.

        Raises:
            TypeError: one of the wrong type.
            ValueError: one out of range. What the backend is is found out by ``use_triton``.
        """
        (softcap, scale, skip_id), ignore_index, _, _, chunk_size, num_active, *flags = self
        given = (softcap, scale, skip_id, chunk_size, num_active)
        if type(ignore_index) is int and all(g is None for g in given) and all(type(flag) is bool for flag in flags):
            return self
        _checks.check_flags(
            with_lse=self.with_lse, with_correct=self.with_correct, entropy=self.entropy, round_nll=self.round_nll,
            inplace_backward=self.inplace_backward,
        )  # fmt: skip
        _checks.check_int("ignore_index", self.ignore_index)
        return replaced(
            self,
            transform=_checks.checked_transform(V, *self.transform),
            chunk_size=_checks.checked_chunk_size(self.chunk_size),
            num_active=_checks.checked_num_active(self.num_active, rows),
        )


class Plan(NamedTuple):
    """How a job is done: the options, checked, and what follows from the tensors.

    Attributes:
        dtype: of the logits.
        triton: whether the Triton kernels run, or plain torch.
        options: those that were asked for.
        needs: which inputs want a gradient.
        read_beyond: rows of weight 0 are read too, so their NaN has to be kept out of the sum.
        rows: row primitives that stand where the backend's would: those of a split vocabulary.
        pair: the teacher and how rows are compared with its, where a divergence is asked for.
        objective: an ``Objective`` (``_objective.py``) of the row statistics, where one is asked for; not in compiled ops.
    """

    dtype: torch.dtype
    triton: bool
    options: Options = Options()
    needs: Needs = NO_GRADIENTS
    read_beyond: bool = False
    rows: RowPrimitives | None = None
    pair: Pair | None = None
    objective: Any = None

    @classmethod
    def of(cls, job: Job, options: Options, objective: Any = None, pair: Pair | None = None) -> Plan:
        """The plan of a job as the public functions have it, whose tensors and options have been checked."""
        return cls(
            job.x.dtype if job.weight is None else compute_dtype(job.x, job.weight),
            use_triton(options.backend, job.x),
            options,
            Needs.of(*job.leaves),
            read_beyond=job.weights is not None and job.active is not None,
            pair=pair,
            objective=objective,
        )

    @property
    def acc(self) -> torch.dtype:
        """The dtype sums are made in."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def narrow(self) -> bool:
        """Whether small gradients underflow in the dtype of the logits: float16's least is 6e-8."""
        return self.dtype == torch.float16

    def keeps_lse(self, job: Job) -> bool:
        """Whether (row_max, log_sum) are made: the caller wants the logsumexp, or what backward runs reads it."""
        if self.options.with_lse or self.triton or self.rows is not None or job.weight is not None or job.a is not None:
            return True
        return self.options.entropy and any(self.needs)

    def primitives(self) -> RowPrimitives:
        """The row primitives to work with."""
        return row_primitives(self.triton) if self.rows is None else self.rows

    @property
    def for_backward(self) -> Plan:
        """The plan without the teacher's tensors: what backward needs of these is kept with the others."""
        return self if self.pair is None else replaced(self, pair=replaced(self.pair, teacher=None))

    def pack(self) -> Packed:
        """What a compiled op has to know, as its schema can carry it: integers, the floats of :mod:`_changing`, tensors."""
        transform, pair = self.options.transform, self.pair
        values = [_DTYPES.index(self.dtype), *self.needs, transform.skip_id]
        values += [getattr(self, name) for name in _OF_PLAN] + [getattr(self.options, name) for name in _OF_OPTIONS]
        packed = [_NONE if value is None else int(value) for value in values]
        if pair is None:
            return packed, *_changing.packed(transform.factors), []
        return [*packed, *pair.integers], *_changing.packed([*transform.factors, *pair.floats]), pair.tensors

    @classmethod
    def unpack(
        cls, packed: Sequence[int], factors: Sequence[float], changing: torch.Tensor | None = None,
        tensors: Sequence[torch.Tensor] = (),
    ) -> Plan:  # fmt: skip
        """The plan of :meth:`pack`; while a graph is traced, the factors in ``changing`` are not known and left out."""
        integers = iter(packed)
        dtype, needs = _DTYPES[next(integers)], Needs(*(bool(next(integers)) for _ in Needs._fields))
        skip_id = next(integers)
        of_plan, of_options = (_fields(kinds, integers) for kinds in (_OF_PLAN, _OF_OPTIONS))
        of_pair, floats = list(integers), _changing.unpacked(factors, changing)
        options = Options(Transform.of(floats[:2], None if skip_id == _NONE else skip_id), **of_options)
        pair = Pair.unpacked(of_pair, floats[2:], tensors) if of_pair else None
        return cls(dtype, options=options, needs=needs, pair=pair, **of_plan)


_NONE = -(1 << 62)


def _fields(kinds: dict[str, Any], integers: Iterator[int]) -> dict[str, Any]:
    """Fields of these kinds, from the next integers of :meth:`Plan.pack`."""
    values = {name: next(integers) for name in kinds}
    return {name: None if i == _NONE else bool(i) if kinds[name] is bool else i for name, i in values.items()}


def _integers(of: type) -> dict[str, Any]:
    """The fields that one integer holds, by name, and the type of each."""
    return {name: kind for name, kind in get_type_hints(of).items() if kind in (bool, int, int | None)}


_OF_PLAN, _OF_OPTIONS = _integers(Plan), _integers(Options)


def compute_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The dtype of the logits, as ``F.linear`` would choose it, autocast included."""
    if autocasts(hidden) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype
