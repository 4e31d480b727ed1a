"""Configuration of one call of a row op, without tensors: validated options and settings derived from the inputs.

A new option is a new field of :class:`Options`. The code that uses it reads it there; no layer in between changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch

from dllm_kernels._backends._backend import use_triton
from dllm_kernels._backends._primitives import row_primitives
from dllm_kernels._backends._rows import RowPrimitives
from dllm_kernels._core._inputs import NO_GRADIENTS, NeedsGrad, RowInputs
from dllm_kernels._core._options import Options
from dllm_kernels._core._setup import compute_dtype
from dllm_kernels._utils import _changing, _checks
from dllm_kernels._utils._dtypes import accum_dtype
from dllm_kernels._utils._transform import Transform

Packed = tuple[list[int], list[float], torch.Tensor | None]


class Plan(NamedTuple):
    """Validated options and settings derived from the input tensors.

    Attributes:
        dtype: dtype of the matrix products, and of the logits unless ``wide_logits``.
        triton: True for the Triton kernels, False for plain torch.
        options: the validated options.
        needs: flags of the inputs that require a gradient.
        from_hidden: True if logits are computed from hidden states.
        wide_logits: True if the logits of 16-bit hidden states are kept in float32.
        with_mix: True if the mixture of the row statistics is requested.
        mask_zero_weight: True if rows of weight 0 may be active, so that their NaN must be masked out of the sum.
        rows: row primitives that replace those of the backend, for a split vocabulary; otherwise None.
        objective: the ``Objective`` of row statistics, or None; eager only.
    """

    dtype: torch.dtype
    triton: bool
    options: Options = Options()
    needs: NeedsGrad = NO_GRADIENTS
    from_hidden: bool = False
    wide_logits: bool = False
    with_mix: bool = False
    mask_zero_weight: bool = False
    rows: RowPrimitives | None = None
    objective: Any = None

    @classmethod
    def of(
        cls, inputs: RowInputs, options: Options, objective: Any = None
    ) -> Plan:
        """Make the plan of a call whose inputs and options have been validated."""
        dtype = inputs.x.dtype if inputs.weight is None else compute_dtype(inputs.x, inputs.weight)
        wide, narrow = options.logits_dtype == torch.float32, dtype in (torch.float16, torch.bfloat16)
        if options.logits_dtype not in (None, dtype) and not (wide and narrow):
            allowed = f"torch.float32, {dtype}" if narrow else dtype
            raise ValueError(f"logits_dtype must be {allowed} or None for this head, got {options.logits_dtype}")
        return cls(
            dtype, use_triton(options.backend, inputs.x), options, NeedsGrad.of(inputs.grad_inputs),
            from_hidden=inputs.weight is not None, wide_logits=wide and narrow, with_mix=inputs.mix_a is not None,
            mask_zero_weight=inputs.weights is not None and inputs.active is not None,
            objective=objective,
        )  # fmt: skip

    @property
    def logits_dtype(self) -> torch.dtype:
        """Dtype of the logits."""
        return torch.float32 if self.wide_logits else self.dtype

    @property
    def accum_dtype(self) -> torch.dtype:
        """Dtype of sums and of all results per row."""
        return accum_dtype(self.dtype)

    @property
    def needs_loss_scaling(self) -> bool:
        """True if the gradient of the logits is float16, whose smallest number is 6e-8, so that gradients underflow."""
        return self.dtype == torch.float16

    @property
    def keeps_normalizer(self) -> bool:
        """True if (row_max, log_sum) are computed, for the requested logsumexp or for backward."""
        if self.options.with_lse or self.triton or self.rows is not None or self.from_hidden or self.with_mix:
            return True
        return self.options.entropy and any(self.needs)

    @property
    def nll_options(self) -> dict[str, Any]:
        """Keywords of the primitives of the NLL."""
        options = {"with_correct": self.options.with_correct, "transform": self.options.transform}
        return options if self.keeps_normalizer else {**options, "with_lse": False}

    def primitives(self) -> RowPrimitives:
        """Return the row primitives to call."""
        return row_primitives(self.triton) if self.rows is None else self.rows

    def pack(self) -> Packed:
        """Encode the plan for the schema of a compiled op: integers, and floats as in :mod:`_changing`."""
        transform = self.options.transform
        values = [_checks.FLOAT_DTYPES.index(self.dtype), *self.needs, transform.skip_id]
        values += [getattr(self, name) for name in _OF_PLAN] + [getattr(self.options, name) for name in _OF_OPTIONS]
        shares = [0.0 if share is None else share for share in (self.options.top_p, self.options.min_p)]
        integers, floats = [_integer(value) for value in values], [*transform.factors, *shares]
        return integers, *_changing.packed(floats)

    @classmethod
    def unpack(cls, packed: Sequence[int], factors: Sequence[float], changing: torch.Tensor | None = None) -> Plan:
        """Decode the output of :meth:`pack`; while a graph is traced, factors in ``changing`` are unknown (0)."""
        integers = iter(packed)
        dtype = _checks.FLOAT_DTYPES[next(integers)]
        needs = NeedsGrad(*(bool(next(integers)) for _ in NeedsGrad._fields))
        skip_id = next(integers)
        of_plan, of_options = (_fields(kinds, integers) for kinds in (_OF_PLAN, _OF_OPTIONS))
        floats = _changing.unpacked(factors, changing)
        top_p, min_p = (None if share == 0 else share for share in floats[2:4])
        transform = Transform.of(floats[:2], None if skip_id == _NONE else skip_id)
        options = Options(transform, top_p=top_p, min_p=min_p, **of_options)
        return cls(dtype, options=options, needs=needs, **of_plan)


_NONE = -(1 << 62)


def _integer(value: bool | int | None) -> int:
    """Encode a field; an int stays as it is, because it may be symbolic while a graph is traced."""
    return _NONE if value is None else int(value) if isinstance(value, bool) else value


def _fields(kinds: dict[str, Any], integers: Iterator[int]) -> dict[str, Any]:
    """Decode fields of these types from the next integers of :meth:`Plan.pack`."""
    values = {name: next(integers) for name in kinds}
    return {name: None if i == _NONE else bool(i) if kinds[name] is bool else i for name, i in values.items()}


def _integers(of: type) -> dict[str, Any]:
    """Return name and type of each field that one integer can encode."""
    return {name: kind for name, kind in get_type_hints(of).items() if kind in (bool, int, int | None)}


_OF_PLAN, _OF_OPTIONS = _integers(Plan), _integers(Options)
