"""Deferred logits: hidden states and LM head in place of logits, until an operation needs the logits themselves.

``RULES`` maps the name of an operation to a function that records it or computes it from chunks of logits. Operations
without a rule, and calls for which the rule returns ``NotImplemented``, materialize the logits first.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch

from dllm_kernels._checks import FACTOR_RANGE, FLOAT_DTYPES
from dllm_kernels._graph._call_state import CallState, Versions
from dllm_kernels.deferred._graph import Recipe, Step
from dllm_kernels.deferred._moves import MOVES, Call, Move
from dllm_kernels.deferred._nll import dtype_after
from dllm_kernels.deferred._nll_rules import NEW, new_tensor
from dllm_kernels.deferred._pending import product_key
from dllm_kernels.deferred._record import NO_SHIFT, Form
from dllm_kernels.deferred._released import replace_source
from dllm_kernels.deferred._tensor import DeferredTensor, arguments, meta_after, registers, softmax_arguments, strided
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._logits import LinearLogits, not_narrowed

Tensor = torch.Tensor


class Rows(Form):
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
        pending: statistics of logits of this head call that are not computed yet.
        sums: losses of calls of the head, in the thread of this call, that are not computed yet.
        noted: tensors without a graph that have entries of logits of this head call.
    """

    parts: tuple[Tensor | None, ...]
    needs: tuple[bool, ...]
    head: Any
    split_head: Any
    axis: int
    state: CallState
    versions: Versions
    pending: list[Any]
    sums: list[Any]
    noted: list[Any]
    owner: Callable[[], Any]

    @property
    def hidden(self) -> Tensor:
        """Hidden states, without a graph."""
        return self.parts[0]  # type: ignore[return-value]

    @property
    def logits_fields(self) -> dict[str, Any]:
        """Fields of the records that the head sets; float32 logits if constants are added, not to round them again."""
        fields: dict[str, Any] = self.head.logits_fields
        adds = self.class_bias is not None and not self.fills_classes
        return fields | {"logits_dtype": torch.float32} if adds and self.hidden.dtype != torch.float64 else fields

    def restored(self) -> Any:
        """Restore the autocast state of the head call."""
        return self.state.restored(self.hidden)

    def rows_of(self, parts: Any) -> LinearLogits:
        """Return the record of parts whose last dimension is that of the classes."""
        self.check_unchanged()
        with self.restored():
            head = self.head.weights(self.split_head, parts)
        logits = LinearLogits(
            parts[0], head.weight, self.bias_of(head), head.extra, softcap=self.softcap, scale=self.factor,
            skip_id=self.skip, compute_dtype=self.state.dtype_of_products(parts[0], head.weight), source=self.identity,
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


FIELDS = "head", "split_head", "axis", "state", "versions", "needs", "pending", "sums", "noted", *Form.__annotations__


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
            needs=needs, pending=[], sums=recipe.sums, noted=[],
        )  # fmt: skip

    @property
    def fusible(self) -> bool:
        """True if an operation may compute from the hidden states, which have the digits of the logits."""
        return self.deferred and (self.dtype != torch.float64 or self.hidden.dtype == torch.float64)

    @property
    def product_key(self) -> tuple[Any, ...]:
        """Equal for logits of the same rows, but for what is done to them."""
        return id(self.pending), self.axis, self.shape, *product_key(self.parts, self)

    @property
    def values_key(self) -> tuple[Any, ...]:
        """Equal for logits with the same values."""
        shift, log_probs = (self.shift._replace(rows=None), id(self.shift.rows)), (self.log_probs, self.of_probs)
        return *self.product_key, *self.transform_key, self.dtype, *log_probs, shift, id(self.overwritten)

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
        same_acc = accum_dtype(self.dtype) == accum_dtype(self.hidden.dtype)  # an op computes in the dtype of its rows
        plain = not self.log_probs and self.skip is None and not self.shift and not self.fills_classes
        return self.rows() if self.fusible and same_acc and self.axis == len(self.shape) - 1 and plain else None

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
        twin = replace_source(self, 0)
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
        results, values = [], functools.lru_cache(1)(step)  # of all parts, whose backward is one operation then
        for i, (h, meta) in enumerate(zip(hidden, after_step[0], strict=True)):  # type: ignore[index]
            u = None if low_rank is None else low_rank[i]
            axis = move.axis % h.dim()
            step = strided(meta, meta.storage_offset() - self.meta.storage_offset())
            part = shift if shift.rows is None else shift._replace(rows=shift.rows[i])
            changes = {"axis": axis, "meta": meta, "shift": part, "_together": lambda z, i=i: values(z)[i]}
            results.append(self.after([self], step, (h, u, *rest), **changes))
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
    if args or not all(isinstance(z, DeferredLogits) and _joins(z, parts[0]) for z in parts):
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


def alike(x: DeferredLogits, y: DeferredLogits, *more: str) -> bool:
    """Return True for logits of one head that were computed in the same way, but for their form."""
    fields = ("columns", "axis", "state", "dtype", "logits_fields", "needs", "needs_grad", *more)
    same = x.split_head.identity == y.split_head.identity and x.hidden.dtype == y.hidden.dtype
    return same and all(getattr(x, name) == getattr(y, name) for name in fields)


def _joins(x: DeferredLogits, y: DeferredLogits) -> bool:
    same_rows = x.overwritten is None and x.shift.rows is None and y.shift.rows is None
    return x.deferred and same_rows and alike(x, y, *Form.__annotations__.keys() - {"overwritten"})


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


def _rescaled(x: DeferredLogits, call: Call) -> dict[str, Any] | None:
    """Return the changes of logits that are multiplied or divided by a positive number; None for any other call."""
    factor = _number(call.args[0]) if len(call.args) == 1 and not call.kwargs else None
    if factor is None or x.log_probs or x.skip_finite:
        return None
    factor = 1 / factor if "div" in call.function.__name__ else factor
    if not FACTOR_RANGE[0] < x.scale * factor < FACTOR_RANGE[1]:
        return None
    bias = x.class_bias and x.class_bias.scaled()
    return {"scale": x.scale * factor, "shift": x.shift.times(factor), "class_bias": bias}


@rule("mul", "div")
def _scaled(x: DeferredLogits, call: Call) -> Any:
    changes = _rescaled(x, call)
    return NotImplemented if changes is None else x.elementwise(call.on, **changes)


@rule("mul_", "div_")
def _scaled_in_place(x: DeferredLogits, call: Call) -> Any:
    """Change the scale of these logits, if nothing else refers to their memory."""
    changes, factor = _rescaled(x, call), (*call.args, 1)[0]
    divides = "div" in call.function.__name__
    return NotImplemented if changes is None else x.change(lambda z: z / factor if divides else z * factor, **changes)


def on_classes(x: DeferredLogits, dim: Any) -> bool:
    """Return True if ``dim`` is the class dimension."""
    return isinstance(dim, int) and -x.ndim <= dim < x.ndim and dim % x.ndim == x.axis


@rule("log_softmax")
def _log_softmax(x: DeferredLogits, call: Call) -> Any:
    args = softmax_arguments(call)
    dtype = args.get("dtype")
    if not on_classes(x, args.get("dim")) or dtype not in (None, *FLOAT_DTYPES) or x.overwritten is not None:
        return NotImplemented
    dtype = dtype or dtype_after(lambda z: z.log_softmax(-1), x.dtype, x.device)

    def step(z: Tensor) -> Tensor:  # the meta device has no autocast
        return call.on(z).to(dtype)  # type: ignore[no-any-return]

    return x.elementwise(step, dtype, log_probs=True, of_probs=None)
