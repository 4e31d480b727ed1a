"""Configuration of one call of a row op, without tensors: validated options and settings derived from the inputs.

A new option is a new field of :class:`Options`. The code that uses it reads it there; no layer in between changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch

from dllm_kernels._backends._backend import use_triton
from dllm_kernels._backends._primitives import row_primitives
from dllm_kernels._backends._rows import IGNORE, RowPrimitives
from dllm_kernels._core._divergence_spec import DivergencePlan
from dllm_kernels._core._inputs import NO_GRADIENTS, NeedsGrad, RowInputs
from dllm_kernels._utils import _changing, _checks
from dllm_kernels._utils._dtypes import accum_dtype
from dllm_kernels._utils._named import replaced
from dllm_kernels._utils._plain import autocasts
from dllm_kernels._utils._transform import NO_TRANSFORM, Transform
from dllm_kernels._utils._truncation import Truncation

Packed = tuple[list[int], list[float], torch.Tensor | None]


class Options(NamedTuple):
    """Options of a call as the caller gave them; :meth:`checked` validates them.

    Public functions and losses list their options as keywords. All layers below pass this object on.

    Attributes:
        transform: transform of the logits, applied before the softmax.
        ignore_index: target that marks a row to skip.
        check_targets: True if an out-of-range target raises; None: see ``check_target_range``.
        backend: "auto", "triton" or "torch".
        chunk_size: rows of logits that exist at a time; None: chosen from the sizes.
        num_active: upper bound on the number of active rows; None: counted.
        logits_dtype: float32 keeps the logits of 16-bit operands in float32; None: the dtype of the operands.
        with_lse: return the logsumexp.
        with_correct: return the argmax-match.
        entropy: return the entropy.
        round_nll: round each NLL to the dtype of the logits before it is weighted.
        inplace_backward: write the gradient over the logits.
        rest: return the log-probability of all columns but the ids.
        return_top: number of most likely ids to return, or None.
        top_k: see ``Truncation``, in ``_utils/_truncation.py``.
        top_p: see ``Truncation``; 1 is None.
        min_p: see ``Truncation``; 0 is None.
        untruncated_log_probs: take log-probabilities and entropy from the softmax before its truncation.
    """

    transform: Transform = NO_TRANSFORM
    ignore_index: int = IGNORE
    check_targets: bool | None = None
    backend: str = "auto"
    chunk_size: int | None = None
    num_active: int | None = None
    logits_dtype: torch.dtype | None = None
    with_lse: bool = False
    with_correct: bool = False
    entropy: bool = False
    round_nll: bool = False
    inplace_backward: bool = False
    rest: bool = False
    return_top: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    untruncated_log_probs: bool = False

    def checked(self, V: int, num_rows: int) -> Options:
        """Validate the options for ``num_rows`` rows of V logits, and convert them to Python types.

        Raises:
            TypeError: an option of the wrong type.
            ValueError: an option out of range. The backend is resolved by ``use_triton``.
        """
        flags = {name: _checks.checked_bool(name, getattr(self, name)) for name in FLAGS}
        _checks.check_int("ignore_index", self.ignore_index)
        _checks.check_logits_dtype(self.logits_dtype)
        for name, k in (("return_top", self.return_top), ("top_k", self.top_k)):
            if k is not None:
                _checks.check_int(name, k)
                if not 1 <= k <= V:
                    raise ValueError(f"{name} must lie in [1, {V}], the size of the vocabulary, or be None, got {k}")
        return replaced(
            self,
            **flags,
            top_p=_checks.checked_share("top_p", self.top_p, keeps_all=1),
            min_p=_checks.checked_share("min_p", self.min_p, keeps_all=0),
            transform=_checks.checked_transform(V, *self.transform),
            chunk_size=_checks.checked_chunk_size(self.chunk_size),
            num_active=_checks.checked_num_active(self.num_active, num_rows),
        )

    @property
    def truncation(self) -> Truncation | None:
        """The truncation of the softmax, or None."""
        if self.top_k is None and self.top_p is None and self.min_p is None:
            return None
        return Truncation(self.top_k, self.top_p, self.min_p)


FLAGS = tuple(name for name, default in Options._field_defaults.items() if default is False)


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
        divergence: the ``DivergencePlan`` of a divergence, or None.
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
    divergence: Any = None
    objective: Any = None

    @classmethod
    def of(
        cls, inputs: RowInputs, options: Options, divergence: DivergencePlan | None = None, objective: Any = None
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
            divergence=divergence, objective=objective,
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
        transform, divergence = self.options.transform, self.divergence
        values = [_checks.FLOAT_DTYPES.index(self.dtype), *self.needs, transform.skip_id]
        values += [getattr(self, name) for name in _OF_PLAN] + [getattr(self.options, name) for name in _OF_OPTIONS]
        shares = [0.0 if share is None else share for share in (self.options.top_p, self.options.min_p)]
        integers, floats = [_integer(value) for value in values], [*transform.factors, *shares]
        if divergence is not None:
            integers, floats = [*integers, *divergence.integers], [*floats, *divergence.floats]
        return integers, *_changing.packed(floats)

    @classmethod
    def unpack(cls, packed: Sequence[int], factors: Sequence[float], changing: torch.Tensor | None = None) -> Plan:
        """Decode the output of :meth:`pack`; while a graph is traced, factors in ``changing`` are unknown (0)."""
        integers = iter(packed)
        dtype = _checks.FLOAT_DTYPES[next(integers)]
        needs = NeedsGrad(*(bool(next(integers)) for _ in NeedsGrad._fields))
        skip_id = next(integers)
        of_plan, of_options = (_fields(kinds, integers) for kinds in (_OF_PLAN, _OF_OPTIONS))
        rest, floats = list(integers), _changing.unpacked(factors, changing)
        top_p, min_p = (None if share == 0 else share for share in floats[2:4])
        transform = Transform.of(floats[:2], None if skip_id == _NONE else skip_id)
        options = Options(transform, top_p=top_p, min_p=min_p, **of_options)
        divergence = DivergencePlan.unpacked(rest, floats[4:]) if rest else None
        return cls(dtype, options=options, needs=needs, divergence=divergence, **of_plan)


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


def compute_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of the logits as ``F.linear`` would choose it, autocast included."""
    if autocasts(hidden) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype
