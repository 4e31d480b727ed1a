"""Deferred logits: hidden states and LM head in place of logits, until an operation needs the logits themselves.

``RULES`` maps the name of an operation to a function that records it or computes it from chunks of logits. Operations
without a rule, and calls for which the rule returns ``NotImplemented``, materialize the logits first.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dllm_kernels import ops
from dllm_kernels._checks import FACTOR_RANGE, FLOAT_DTYPES, check_target_range
from dllm_kernels._graph._call_state import CallState, Versions
from dllm_kernels._graph._plain import is_dtensor, readable_without_sync
from dllm_kernels.deferred._graph import Recipe, Step
from dllm_kernels.deferred._moves import MOVES, Call, Move
from dllm_kernels.deferred._nll import NO_INDEX, DeferredNLL, dtype_after, target_ids
from dllm_kernels.deferred._nll_rules import NEW, new_tensor
from dllm_kernels.deferred._pending import DeferredStat, NeededStats, argmax_of, product_key, rows_key
from dllm_kernels.deferred._record import NO_SHIFT, ClassBias, Shift, Stats
from dllm_kernels.deferred._tensor import DeferredTensor, arguments, meta_after, registers, strided
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._logits import LinearLogits, not_narrowed

Tensor = torch.Tensor
ONE = Fraction(1)


class Overwritten(NamedTuple):
    """Rows of log-probabilities that were set to constants.

    Attributes:
        mask: True for these rows.
        seen: the caller's mask, and its version.
        fill: value of their classes.
        ids: one class per row with another value, or None.
        value: that value.
    """

    mask: Tensor
    seen: tuple[Tensor, int]
    fill: float
    ids: Tensor | None = None
    value: float = 0.0

    def at(self, ids: Tensor) -> Tensor | float:
        """Return the log-probabilities of classes, one per row, in these rows."""
        return self.fill if self.ids is None else torch.where(self.ids == ids, self.value, self.fill)


class Rows:
    """Parts of deferred logits, and what is done to the logits; read in place of the logits by the NLL of rows.

    Attributes:
        parts: hidden states with D in the place of the classes, rows ``s A h`` of LoRA adapters, laid out like these,
            or None, and the parameters of the head call.
        needs: for each part, True if it had a gradient at the head call.
        head: the head, a ``FusedHead``.
        split_head: the linear layer and its adapters, as they were at the head call.
        axis: class dimension.
        state: autocast state of the head call.
        versions: detects changes of the hidden states and of the head's parameters.
        scale: factor after the cap.
        cap: soft cap, or None.
        log_probs: True for log-probabilities.
        bias_factor: factor of the bias, in sums of logits.
        columns: classes of the head, None for all.
        skip: class that is never predicted, because its logit is -inf or so low that its probability is 0, or None.
        skip_finite: True if that logit is not -inf.
        overwritten: rows of log-probabilities that were replaced, or None.
        shift: numbers per row that are added to the logits.
        class_bias: constants that are added to the bias of the head, or None.
        pending: statistics of logits of this head call that are not computed yet.
    """

    parts: tuple[Tensor | None, ...]
    needs: tuple[bool, ...]
    head: Any
    split_head: Any
    axis: int
    state: CallState
    versions: Versions
    pending: list[Any]
    owner: Callable[[], Any]
    scale: Fraction = ONE
    cap: Fraction | None = None
    log_probs: bool = False
    bias_factor: Fraction = ONE
    columns: range | None = None
    skip: int | None = None
    skip_finite: bool = False
    overwritten: Overwritten | None = None
    shift: Shift = NO_SHIFT
    class_bias: ClassBias | None = None

    @property
    def hidden(self) -> Tensor:
        """Hidden states, without a graph."""
        return self.parts[0]  # type: ignore[return-value]

    @property
    def logits_fields(self) -> dict[str, Any]:
        """Fields of the records that the head sets; float32 logits if constants are added, not to round them again."""
        fields: dict[str, Any] = self.head.logits_fields
        added = self.class_bias is not None and self.class_bias.filled is None
        return fields | {"logits_dtype": torch.float32} if added and self.hidden.dtype != torch.float64 else fields

    @property
    def softcap(self) -> float | None:
        """Soft cap of the logits, or None."""
        return None if self.cap is None else float(self.cap)

    @property
    def factor(self) -> float | None:
        """Factor after the cap; None for 1."""
        return None if self.scale == ONE else float(self.scale)

    def restored(self) -> Any:
        """Restore the autocast state of the head call."""
        return self.state.restored(self.hidden)

    def rows_of(self, parts: Any) -> LinearLogits:
        """Return the record of parts whose last dimension is that of the classes."""
        self.check_unchanged()
        with self.restored():
            head = self.head.weights(self.split_head, parts)
        bias = head.bias if head.bias is None or self.bias_factor == ONE else head.bias * float(self.bias_factor)
        if self.class_bias is not None:
            bias = self.class_bias.added_to(bias, head.weight.dtype)
        logits = LinearLogits(
            parts[0], head.weight, bias, head.extra, softcap=self.softcap, scale=self.factor, skip_id=self.skip,
            compute_dtype=self.state.dtype_of_products(parts[0], head.weight), source=self.identity,
            **self.logits_fields,
        )  # fmt: skip
        return not_narrowed(logits)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.split_head.out_features if self.columns is None else len(self.columns)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Head with its active adapters, the classes, and the factor of the bias and what is added to it."""
        return self.split_head.identity, self.columns, self.bias_factor, self.class_bias

    def check_unchanged(self, gathered: Sequence[Tensor | None] | None = None) -> None:
        """Raise RuntimeError if hidden states or head, or parts gathered again, changed since the head call."""
        merged = self.split_head.merges() != self.split_head.merged
        if merged or (self.versions.changed() if gathered is None else self.versions.differ(gathered)):
            raise RuntimeError(
                "hidden states and LM head must not be modified between the head and the use of its logits, got a "
                "modified tensor; use the logits before that, or modify a copy"
            )

    def filled_parts(self, parts: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Return parts with the values of parameters that sharding has freed since."""
        filled: tuple[Tensor | None, ...] = self.split_head.filled(parts)
        if filled is not parts:
            self.check_unchanged((None, None, *filled[2:]))
        return filled

    def copied(self) -> Any:
        """Return a copy that is not a tensor, so that a graph may hold it."""
        copy = Rows()
        vars(copy).update({name: getattr(self, name) for name in (*FIELDS, "parts")}, owner=weakref.ref(self))
        return copy


FIELDS = (
    "head", "split_head", "axis", "state", "versions", "scale", "cap", "log_probs", "needs", "bias_factor", "columns",
    "skip", "skip_finite", "overwritten", "pending", "shift", "class_bias",
)  # fmt: skip


class DeferredLogits(Rows, DeferredTensor):
    """Logits of an LM head, or rows of them, that have not been computed.

    Attributes:
        owns: True if no other tensor shares memory with these logits, although they are computed from others.
    """

    owns: bool = False
    _indexed: tuple[Any, ...] | None = None  # hidden states, key and index of the last index by a tensor, and its rows

    @classmethod
    def from_head(
        cls, head: Any, split: Any, parts: Sequence[Tensor | None], state: CallState, dtype: torch.dtype
    ) -> Any:
        """Return the output of a head."""
        hidden: Any = parts[0]
        meta = torch.empty((*hidden.shape[:-1], split.out_features), dtype=dtype, device="meta")
        needs = tuple(t is not None and t.requires_grad and torch.is_grad_enabled() for t in parts)
        recipe = Recipe(functools.partial(head.logits, split), lambda: state.restored(hidden), needs)
        versions = Versions.of(parts, split.parameters)
        recipe.sums = head.sums
        return cls.create(
            meta, parts, recipe, head=head, split_head=split, axis=hidden.dim() - 1, state=state, versions=versions,
            needs=needs, pending=[],
        )  # fmt: skip

    @property
    def usable(self) -> bool:
        """True if an op may take rows and head in place of the logits."""
        same_acc = accum_dtype(self.dtype) == accum_dtype(self.hidden.dtype)  # an op computes in the dtype of its rows
        plain = not self.log_probs and self.skip is None and not self.shift and not self.fills_classes
        return self.fusible and same_acc and self.axis == len(self.shape) - 1 and plain

    @property
    def fusible(self) -> bool:
        """True if an operation may compute from the hidden states, which have the digits of the logits."""
        return self.deferred and (self.dtype != torch.float64 or self.hidden.dtype == torch.float64)

    @property
    def is_plain(self) -> bool:
        """True if no class was set and nothing was added."""
        return self.skip is None and self.class_bias is None and not self.shift

    @property
    def fills_classes(self) -> bool:
        """True if several classes were set; an op does not know that they have no gradient if they are targets."""
        return self.class_bias is not None and self.class_bias.filled is not None

    @property
    def infinite(self) -> bool:
        """True if a class has or may have a logit of -inf."""
        skipped = self.skip is not None and not self.skip_finite
        return skipped or (self.class_bias is not None and self.class_bias.infinite)

    @property
    def sums_classes(self) -> bool:
        """True if the sum of all logits of a row is a product of its hidden states and the sum of the head's rows."""
        plain = self.cap is None and self.skip is None and not self.fills_classes
        return plain and not any(t is not None and is_dtensor(t) for t in self.parts)

    @property
    def rows_key(self) -> tuple[Any, ...]:
        """Equal for logits of the same rows, but for the dtype and the log-softmax."""
        return id(self.pending), self.axis, self.shape, *rows_key(self.parts, self)

    @property
    def product_key(self) -> tuple[Any, ...]:
        """Equal for logits of the same rows, but for what is done to them."""
        return id(self.pending), self.axis, self.shape, *product_key(self.parts, self)

    @property
    def source(self) -> tuple[Any, ...]:
        """Head with its active adapters, soft cap and scale."""
        return self.identity, self.softcap, self.factor

    def filled(self) -> tuple[Tensor | None, ...]:
        """Return the parts with the values of freed ones; the parts of a derived tensor have their values."""
        return self.parts if self.sources else self.filled_parts(self.parts)

    def before_values(self, use: str) -> None:
        """Check and report that the values of the output of the head are computed."""
        self.check_unchanged()
        self.head.report(use, self.shape)

    def rows(self) -> LinearLogits:
        """Return the record, with the classes as the last dimension."""
        return self.rows_of(self.classes_last())

    def record(self) -> LinearLogits | None:
        """Return the record that an op takes, or None if it needs the logits."""
        return self.rows() if self.usable else None

    def classes_last(self) -> tuple[Tensor | None, ...]:
        """Return the parts, in the graph, with the classes as the last dimension."""
        h, u, *parameters = self.tapped()
        return h.movedim(self.axis, -1), None if u is None else u.movedim(self.axis, -1), *parameters  # type: ignore[union-attr]

    def after(self, sources: Sequence[Any], step: Callable[..., Tensor], parts: Any = None, **changes: Any) -> Any:
        """Return the logits ``step(*sources)``, with other parts, attributes or ``meta``."""
        meta = changes.pop("meta", None)
        if meta is None:
            meta, _ = meta_after(step, *sources) or (self._copy_meta(parts, changes.get("axis", self.axis)), False)
        attributes = {name: getattr(self, name) for name in FIELDS} | changes
        if attributes["log_probs"]:
            attributes["shift"] = NO_SHIFT
        state, hidden = self.state, self.hidden
        parts = self.tapped() if parts is None else parts
        return self.create(meta, parts, Step(step, lambda: state.restored(hidden), sources), **attributes)

    def _copy_meta(self, parts: Any, axis: int) -> Tensor:
        """Return the meta tensor of a copy whose shape depends on values: an index."""
        sizes = list(parts[0].shape)
        sizes[axis] = self.shape[self.axis]
        return torch.empty(sizes, dtype=self.dtype, device="meta")

    def elementwise(self, step: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None, **changes: Any) -> Any:
        """Return the logits after an operation that keeps their shape."""
        memory_format = torch.contiguous_format if changes.get("log_probs") else torch.preserve_format  # as log_softmax
        meta = torch.empty_like(self.meta, dtype=dtype or self.dtype, memory_format=memory_format)
        return self.after([self], step, meta=meta, owns=True, **changes)

    def change(self, step: Callable[[Tensor], Tensor], view: Any = None, **changes: Any) -> Any:
        """Change these logits in place, as ``step`` would a copy, if only ``view`` may share their memory."""
        derived = any(x is not None and x is not view for x in (ref() for ref in self._derived))
        changes_values_alone = self.requires_grad and not torch.is_grad_enabled()  # without gradients
        if derived or changes_values_alone or not self._is_alone():
            return NotImplemented
        return self.become(self.twin().elementwise(step, **changes))

    def _rows_after(self, move: Move, index: Any) -> tuple[Any, Any]:
        """Return the rows after a move; equal indices that are tensors give the same copies, with their statistics."""
        h, u, *_ = self.tapped()
        key = (id(index), index._version) if isinstance(index, Tensor) and not index.is_inference() else None
        if key is None or self._indexed is None or self._indexed[0] is not h or self._indexed[1] != key:
            rows = move.apply(h), None if u is None else move.apply(u)  # type: ignore[arg-type]
            if key is None:
                return rows
            self._indexed = h, key, index, rows
        return self._indexed[3]  # type: ignore[no-any-return]

    def _is_alone(self) -> bool:
        """Return True if no other tensor shares memory with these logits and their views.

        Nothing may refer to the logits that these are a view of, which a copy then replaces as the source of values.
        """
        if self.owns or not self.sources:
            return True
        source: Any = self.sources[0]
        if len(self.sources) > 1 or not isinstance(source, DeferredLogits) or source.watched or not source.deferred:
            return False
        del source
        twin = self.replace_source(0)
        return twin is not None and bool(twin._is_alone())

    def moved(self, move: Move, step: Callable[..., Any], index: Any = None) -> Any:
        """Apply a move of rows to the hidden states; ``index``: of an index by one tensor."""
        after_step = meta_after(step, self)
        if after_step is not None and after_step[0] is self.meta:
            return self
        h, u, *rest = self.tapped()
        hidden, low_rank = self._rows_after(move, index)
        shift = self.shift if self.shift.rows is None else self.shift._replace(rows=move.apply(self.shift.rows))
        if not isinstance(hidden, tuple | list):
            axis = move.axis % hidden.dim()
            meta = self._copy_meta([hidden], axis) if after_step is None else after_step[0]
            owns = after_step is None or not after_step[1]
            return self.after([self], step, (hidden, low_rank, *rest), axis=axis, meta=meta, owns=owns, shift=shift)
        results = []
        for i, (h, meta) in enumerate(zip(hidden, after_step[0], strict=True)):  # type: ignore[index]
            u = None if low_rank is None else low_rank[i]
            axis = move.axis % h.dim()
            step = strided(meta, meta.storage_offset() - self.meta.storage_offset())
            part = shift if shift.rows is None else shift._replace(rows=shift.rows[i])
            results.append(self.after([self], step, (h, u, *rest), axis=axis, meta=meta, shift=part))
        return type(hidden)(results) if type(hidden) in (tuple, list) else tuple(results)


Rule = Callable[[DeferredLogits, Call], Any]
RULES: dict[str, Rule] = {}
DeferredLogits.rules = RULES


rule = registers(RULES)


def move_rule(name: str) -> Rule:
    """Return the rule of a move of rows."""

    def move(x: DeferredLogits, call: Call) -> Any:
        if x.overwritten is not None or any(isinstance(a, DeferredLogits) for a in call.args):
            return NotImplemented
        row_move = MOVES[name](x.shape, x.axis, call)
        index = call.args[0] if name == "__getitem__" else None
        return NotImplemented if row_move is None else x.moved(row_move, call.on, index)

    return move


RULES |= {name: move_rule(name) for name in MOVES}


@rule("view_as", "reshape_as", "expand_as")
def like(_: Any, call: Call) -> Any:
    """Change the shape of a tensor to that of another one, of which nothing else is read."""
    tensor, other = (*call.args, *call.kwargs.values())
    return getattr(tensor, call.function.__name__.removesuffix("_as"))(tuple(other.shape))


@rule("cat", "concat", "concatenate", "stack")
def _joined(parts: Any, call: Call) -> Any:
    args = arguments(("dim",), call.args, call.kwargs)
    dim, stacks = args.pop("dim", 0), call.function.__name__ == "stack"
    if args or not all(isinstance(z, DeferredLogits) and _alike(z, parts[0]) for z in parts):
        return NotImplemented
    first = parts[0]
    dim %= first.ndim + stacks
    if dim == first.axis and not stacks:
        return NotImplemented

    def joined(*tensors: Tensor) -> Tensor:
        return call.function(list(tensors), dim)  # type: ignore[no-any-return]

    tapped = [z.tapped() for z in parts]
    hidden = joined(*(t[0] for t in tapped))
    low_rank = None if tapped[0][1] is None else joined(*(t[1] for t in tapped))
    axis = first.axis + (stacks and dim <= first.axis)
    return first.after(parts, joined, (hidden, low_rank, *tapped[0][2:]), axis=axis, owns=True)


def _alike(x: DeferredLogits, y: DeferredLogits) -> bool:
    fields = (
        "source", "axis", "state", "dtype", "log_probs", "logits_fields", "needs", "needs_grad", "skip", "skip_finite",
        "shift",
    )  # fmt: skip
    same_rows = x.overwritten is None and x.shift.rows is None and y.shift.rows is None
    return x.deferred and same_rows and all(getattr(x, name) == getattr(y, name) for name in fields)


def _same_device(value: Any, device: torch.device) -> bool:
    """Return True if an argument of ``to`` or ``type`` is this device, or is not a device."""
    if isinstance(value, str) and value.startswith("torch."):  # type("torch.DoubleTensor")
        return False
    if isinstance(value, bool) or not isinstance(value, int | str | torch.device):
        return True
    other = torch.device(value)
    return other.type == device.type and other.index in (None, device.index)


CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def cast_dtype(x: Any, call: Call) -> torch.dtype | None:
    """Return the floating-point dtype to which a call casts, on the same device; None for any other call."""
    dtype = CASTS.get(call.function.__name__)
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif hasattr(value, "dtype") and hasattr(value, "device"):
            if value.device != x.device:
                return None
            dtype = value.dtype
        elif value is True or not _same_device(value, x.device):  # True: a copy, or without waiting
            return None
    dtype = dtype or x.dtype
    return dtype if dtype in FLOAT_DTYPES else None


@rule("to", "type", "type_as", *CASTS)
def _cast(x: DeferredLogits, call: Call) -> Any:
    dtype = cast_dtype(x, call)
    if dtype is None or dtype == x.dtype:
        return NotImplemented if dtype is None else x
    return x.elementwise(lambda z: z.to(dtype), dtype)


@rule("detach", "data")
def _detached(x: DeferredLogits, call: Call) -> Any:
    with torch.no_grad():
        return x.after([x], call.on)


rule(*NEW)(new_tensor)


def _number(value: Any) -> Fraction | None:
    """Return a positive number as an exact fraction, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not FACTOR_RANGE[0] < value < FACTOR_RANGE[1]:
        return None
    return Fraction(value)


def _scaled(x: DeferredLogits, call: Call, factor: Fraction | None) -> Any:
    if factor is None or x.log_probs or call.kwargs or x.skip_finite:
        return NotImplemented
    scale = x.scale * factor
    if not FACTOR_RANGE[0] < scale < FACTOR_RANGE[1]:
        return NotImplemented
    return x.elementwise(call.on, scale=scale, shift=x.shift.times(factor), class_bias=_scaled_bias(x))


def _scaled_bias(x: DeferredLogits) -> ClassBias | None:
    """Return the bias of logits that are multiplied by a number, which may make a low logit -inf."""
    bias = x.class_bias
    return bias if bias is None or bias.filled is None else ClassBias(bias.values, bias.filled, infinite=True)


@rule("mul")
def _multiplied(x: DeferredLogits, call: Call) -> Any:
    return _scaled(x, call, _number(call.args[0]) if len(call.args) == 1 else None)


@rule("div")
def _divided(x: DeferredLogits, call: Call) -> Any:
    factor = _number(call.args[0]) if len(call.args) == 1 else None
    return _scaled(x, call, factor and 1 / factor)


@rule("tanh")
def _capped(x: DeferredLogits, call: Call) -> Any:
    """``tanh(s z)`` is ``s c tanh(z / c)`` for the cap ``c = 1 / s``."""
    bias = NotImplemented if call.args or call.kwargs else bias_before_cap(x)
    return bias if bias is NotImplemented else x.elementwise(call.on, cap=1 / x.scale, class_bias=bias, shift=NO_SHIFT)


def bias_before_cap(x: DeferredLogits) -> Any:
    """Return the bias of logits that get a soft cap, which a number that is added to them is a part of."""
    bias = x.class_bias
    if x.cap is not None or x.log_probs or x.skip is not None or x.fills_classes:
        return NotImplemented
    if x.shift.rows is not None or x.shift.best:
        return NotImplemented
    return added_bias(x, torch.full((), float(x.shift.number), device="cpu")) if x.shift.number else bias


def added_bias(x: DeferredLogits, constants: Tensor) -> Any:
    """Return the bias after constants ``[V]`` or ``[]`` were added to the logits; NotImplemented if not as exact."""
    if x.cap is not None or any(t is not None and is_dtensor(t) for t in x.parts):
        return NotImplemented
    operands = x.rows()
    dtype = operands.compute_dtype or operands.hidden.dtype
    values = constants.to(x.device, accum_dtype(x.hidden.dtype)) / float(x.scale)
    values = values.expand(x.shape[x.axis])
    if dtype != accum_dtype(dtype):
        exact = readable_without_sync(values) and bool((values.to(dtype) == values).all())
        if operands.bias is not None or not exact:
            return NotImplemented
    before = x.class_bias
    return ClassBias(values) if before is None else ClassBias(before.values + values, before.filled, before.infinite)


@rule("mul_", "div_")
def _scaled_in_place(x: DeferredLogits, call: Call) -> Any:
    """Change the scale of these logits, if nothing else refers to their memory."""
    factor = _number(call.args[0]) if len(call.args) == 1 and not call.kwargs else None
    if factor is None or x.log_probs or x.skip_finite:
        return NotImplemented
    value, divides = call.args[0], "div" in call.function.__name__
    factor = 1 / factor if divides else factor
    return x.change(
        lambda z: z / value if divides else z * value, scale=x.scale * factor, shift=x.shift.times(factor),
        class_bias=_scaled_bias(x),
    )  # fmt: skip


def on_classes(x: DeferredLogits, dim: Any) -> bool:
    """Return True if ``dim`` is the class dimension."""
    return isinstance(dim, int) and -x.ndim <= dim < x.ndim and dim % x.ndim == x.axis


@rule("log_softmax")
def _log_softmax(x: DeferredLogits, call: Call) -> Any:
    names = ("dim", "dtype") if call.function is not F.log_softmax else ("dim", "_stacklevel", "dtype")
    args = arguments(names, call.args, call.kwargs)
    dtype = args.get("dtype")
    if not on_classes(x, args.get("dim")) or dtype not in (None, *FLOAT_DTYPES):
        return NotImplemented
    dtype = dtype or dtype_after(lambda z: z.log_softmax(-1), x.dtype, x.device)

    def step(z: Tensor) -> Tensor:  # the meta device has no autocast
        return call.on(z).to(dtype)  # type: ignore[no-any-return]

    return x.elementwise(step, dtype, log_probs=True)


@rule("cross_entropy", "nll_loss")
def _cross_entropy(x: DeferredLogits, call: Call) -> Any:
    log_probs = call.function.__name__ == "nll_loss"
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    args = arguments(names, call.args, call.kwargs)
    target = known_ids(args.get("target"))
    unsupported = any(args.get(name) is not None for name in ("size_average", "reduce")) or not x.fusible
    if log_probs != x.log_probs or x.axis != (1 if x.ndim > 1 else 0) or unsupported:
        return NotImplemented
    if not isinstance(target, Tensor) or target.is_floating_point():
        return NotImplemented
    rows = x.shape[: x.axis] + x.shape[x.axis + 1 :]
    reduction, ignored = args.get("reduction", "mean"), args.get("ignore_index", -100)
    if target.shape != rows or reduction not in ("none", "sum", "mean") or takes_skipped(x, target):
        return NotImplemented

    def plain(z: Tensor) -> Tensor:
        return call.function(z, torch.zeros(1, dtype=torch.long, device=z.device))  # type: ignore[no-any-return]

    dtype = dtype_after(plain, x.dtype, x.device)
    weight, smoothing = args.get("weight"), args.get("label_smoothing", 0.0)
    if smoothing:
        return NotImplemented if weight is not None else _smoothed(x, target, ignored, smoothing, reduction, dtype)
    nll = DeferredNLL.of(x, target, ignored, dtype)
    if weight is not None:
        return _with_class_weights(nll, weight, reduction)
    if reduction == "none":
        return nll.result()
    return nll.reduced(None if reduction == "sum" else (target != ignored).sum())


def _with_class_weights(nll: DeferredNLL, weight: Any, reduction: str) -> Any:
    """Multiply the NLL by the weight of its target; the mean is weighted, too."""
    usable = type(weight) is Tensor and not weight.requires_grad and weight.shape == (nll.logits.classes,)
    if not usable or weight.device != nll.device:
        return NotImplemented
    counted = nll.target != nll.ignore_index
    each = torch.where(counted, weight[nll.target.clamp(0, len(weight) - 1)], 0.0)
    if reduction == "mean":
        each = each / each.sum()
    weighted = nll.weighted(each, nll.dtype)
    return weighted.result() if reduction == "none" else weighted.reduced()


def _smoothed(
    x: DeferredLogits, target: Tensor, ignored: int, smoothing: Any, reduction: str, dtype: torch.dtype
) -> Any:
    """Return the cross-entropy with smoothed labels, which needs the sum of all logits of a row."""
    if not x.sums_classes or not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
        return NotImplemented
    V, dropped = x.shape[x.axis], target == ignored

    def values(stats: Stats) -> Tensor:
        uniform = stats.lse - stats.total / V
        nll: Tensor = -stats.log_probs[..., 0]
        return torch.where(dropped, 0.0, (1 - smoothing) * nll + smoothing * uniform)

    ids = target_ids(target, ignored)
    check_target_range(readable_without_sync(target) or None, "targets", target, V, ignored)
    each = stat(x, "smoothed", values, dtype, ids=ids, total=True)
    if reduction == "none":
        return each
    return each.sum() if reduction == "sum" else each.sum() / (~dropped).sum()


@rule("gather", "take_along_dim")
def _gathered(x: DeferredLogits, call: Call) -> Any:
    ids, dtype, log_probs = class_ids(x, call), x.dtype, x.log_probs
    if ids is None or takes_skipped(x, ids) or (x.overwritten is not None and ids.shape[-1] > 1):
        return NotImplemented
    if log_probs and ids.shape[-1] == 1:
        return DeferredNLL.of(x, ids.squeeze(-1), NO_INDEX, dtype, -1.0).unsqueezed(x.axis).result()
    shift, axis = NO_SHIFT if log_probs else x.shift, x.axis

    def values(stats: Stats) -> Tensor:
        added = 0.0 if log_probs else (stats.lse + shift.of(stats, axis)).unsqueeze(-1)
        return (stats.log_probs + added).to(dtype)  # type: ignore[no-any-return]

    return picked(x, ids, values, dtype, best=shift.best)


def known_ids(ids: Any) -> Any:
    """Return ids, computed if they are deferred."""
    return ids.materialize() if isinstance(ids, DeferredTensor) else ids


def class_ids(x: DeferredLogits, call: Call) -> Tensor | None:
    """Return the ids that ``gather`` along the classes takes, with the classes last; None for any other call."""
    if call.function.__name__ == "take_along_dim":
        args = arguments(("indices", "dim"), call.args, call.kwargs)
        args["index"] = args.get("indices")
    else:
        args = arguments(("dim", "index", "sparse_grad"), call.args, call.kwargs)
    index = known_ids(args.get("index"))
    usable = x.fusible and on_classes(x, args.get("dim"))
    if not usable or not isinstance(index, Tensor) or args.get("sparse_grad"):
        return None
    rest = [d for d in range(x.ndim) if d != x.axis]
    if index.dim() != x.ndim or any(index.shape[d] != x.shape[d] for d in rest):
        return None
    return index.movedim(x.axis, -1)


def picked(
    x: DeferredLogits, ids: Tensor, finish: Callable[[Stats], Tensor], dtype: torch.dtype, best: bool = False
) -> Any:
    """Return values of the ids, with their dimension at the class dimension of the logits."""
    axis = x.axis
    ids = ids.where(ids != -100, -1)  # -100 is out of range
    check_target_range(readable_without_sync(ids) or None, "ids", ids, x.shape[axis], None)  # as torch checks them
    meta = torch.empty(ids.movedim(-1, axis).shape, dtype=dtype, device="meta")
    request = NeededStats(lambda stats: finish(stats).movedim(-1, axis), ids, best=best)
    return DeferredStat.from_logits(x, "picked", request, meta)


def takes_skipped(x: DeferredLogits, ids: Tensor) -> bool:
    """Return True if an id is a class that was set, on a CPU; on a GPU, the result of such an id is NaN, or as low."""
    filled = None if x.class_bias is None else x.class_bias.filled
    if (x.skip is None and filled is None) or not readable_without_sync(ids):
        return False
    if filled is not None and bool(filled[ids.clamp(0, len(filled) - 1)].any()):
        return True
    return x.skip is not None and bool((ids == x.skip).any())


def stat(
    x: DeferredLogits, kind: str, values: Callable[[Stats], Tensor], dtype: torch.dtype, keepdim: Any = False,
    **needed: Any,
) -> Any:  # fmt: skip
    """Return a statistic of each row, with a dimension in the place of the classes or not."""
    axis = x.axis if keepdim else None
    shape = [1 if i == x.axis else n for i, n in enumerate(x.shape) if keepdim or i != x.axis]

    def finish(stats: Stats) -> Tensor:
        value = values(stats).to(dtype)
        return value if axis is None else value.unsqueeze(axis)

    meta = torch.empty(shape, dtype=dtype, device="meta")
    return DeferredStat.from_logits(x, kind, NeededStats(finish, **needed), meta, axis)


def class_dim(x: DeferredLogits, dim: Any) -> bool:
    """Return True if ``dim`` is the class dimension, or a list of it alone."""
    return on_classes(x, dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim)


@rule("logsumexp")
def _logsumexp(x: DeferredLogits, call: Call) -> Any:
    args = arguments(("dim", "keepdim"), call.args, call.kwargs)
    if x.log_probs or not x.fusible or not class_dim(x, args.get("dim")):
        return NotImplemented
    dtype, shift, axis = dtype_after(lambda z: z.logsumexp(-1), x.dtype, x.device), x.shift, x.axis
    keepdim = args.get("keepdim")
    return stat(x, "lse", lambda stats: stats.lse + shift.of(stats, axis), dtype, keepdim, best=shift.best)


@rule("argmax")
def _argmax(x: DeferredLogits, call: Call) -> Any:
    args = arguments(("dim", "keepdim"), call.args, call.kwargs)
    if not on_classes(x, args.get("dim")) or x.overwritten is not None:
        return NotImplemented
    x.check_unchanged()
    if (ids := argmax_of(x)) is None:
        with torch.no_grad():
            ids = ops.linear_sample(x.rows()._replace(scale=None), temperature=0).ids
    return ids.unsqueeze(x.axis) if args.get("keepdim") else ids
