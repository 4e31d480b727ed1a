"""Deferred logits: hidden states and LM head in place of logits, until an operation needs the logits themselves.

``RULES`` maps the name of an operation to a function that records it or computes it from chunks of logits. Operations
without a rule, and calls for which the rule returns ``NotImplemented``, materialize the logits first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree

from dllm_kernels import ops
from dllm_kernels._utils._call_state import CallState, Versions
from dllm_kernels._utils._checks import FACTOR_RANGE, FLOAT_DTYPES
from dllm_kernels._utils._deferred import DeferredRows, HeadRows
from dllm_kernels._utils._dtypes import accum_dtype
from dllm_kernels._utils._own_graph import own_graph
from dllm_kernels._utils._plain import is_dtensor, readable_without_sync
from dllm_kernels.fused._moves import MOVES, Call, Move
from dllm_kernels.fused._nll import NEW, NO_INDEX, DeferredNLL, dtype_after, new_tensor
from dllm_kernels.fused._object import TorchObject, arguments

Tensor = torch.Tensor
ONE = Fraction(1)


class _Logits(TorchObject, DeferredRows):
    """Attributes and methods of deferred logits.

    Attributes:
        hidden: input of the head, with D in the place of the classes.
        low_rank: rows ``s A h`` of LoRA adapters, laid out like ``hidden``, or None.
        head: the head, a ``FusedHead``.
        parts: the linear layer and its adapters, as they were at the head call.
        axis: class dimension.
        state: autograd and autocast state of the head call.
        dtype: dtype of the logits.
        versions: version counters of the hidden states and of the head's parameters.
        used: empty views of the parameters of the head, which are in the future autograd graph of the logits.
        scale: factor after the cap.
        cap: soft cap, or None.
        log: True for log-probabilities.
        made: the logits from which these were made, and the operation; None for the output of the head.
    """

    hidden: Tensor
    low_rank: Tensor | None
    head: Any
    parts: Any
    axis: int
    state: CallState
    versions: Versions
    used: list[Tensor]
    scale: Fraction = ONE
    cap: Fraction | None = None
    log: bool = False
    made: tuple[tuple[Any, ...], Callable[..., Tensor]] | None = None
    _logits: Tensor | None = None
    _derived: weakref.WeakSet[Any]

    def changed(self, **changes: Any) -> Any:
        """Return a copy with changed attributes that is not materialized."""
        other = object.__new__(type(self))
        vars(other).update({**vars(self), **changes, "_derived": weakref.WeakSet()})
        sources = other.made[0] if other.made else ()
        for source in {id(each): each for each in sources}.values():  # each once, also in cat([z, z])
            source._derived.add(other)
        return other

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        sizes = list(self.hidden.shape)
        sizes[self.axis] = self.parts.base.out_features
        return torch.Size(sizes)

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.hidden.device

    @property
    def requires_grad(self) -> bool:
        """True if the logits are part of an autograd graph."""
        adapters = (adapter.b.weight for adapter in self.parts.adapters)
        tensors = (self.hidden, self.low_rank, *self.parts.current(), *adapters)
        return self.state.grad and any(t is not None and t.requires_grad for t in tensors)

    @property
    def logits_dtype(self) -> torch.dtype | None:
        """Dtype of the chunks of logits in fused operations; None: the dtype of the operands."""
        return None if self.hidden.dtype == torch.float64 else self.head.logits_dtype

    @property
    def deferred(self) -> bool:
        """True if the logits have not been materialized."""
        return self._logits is None and all(source.deferred for source in (self.made[0] if self.made else ()))

    @property
    def usable(self) -> bool:
        """True if the logits have not been materialized, and an op may take rows and head in their place."""
        widened = accum_dtype(self.dtype) != accum_dtype(self.hidden.dtype)  # an op of logits computes in float64 then
        return self.deferred and self.axis == len(self.shape) - 1 and not self.log and not widened

    @property
    def source(self) -> tuple[Any, ...]:
        """Head with its active adapters, soft cap and scale."""
        return self.parts.identity, self.softcap, None if self.scale == ONE else float(self.scale)

    @property
    def softcap(self) -> float | None:
        """Soft cap of the logits, or None."""
        return None if self.cap is None else float(self.cap)

    def restored(self) -> Any:
        """Restore the autocast state of the head call; record gradients if the call did and they are enabled now."""
        return self.state.restored(self.hidden, narrow=True)

    def rows(self) -> HeadRows:
        """Take the head apart, with the classes as the last dimension."""
        self.check_unchanged()
        hidden, u = self._classes_last()
        weight, bias, extra = self.head.weights(self.parts, hidden, u)
        scale = None if self.scale == ONE else float(self.scale)
        return HeadRows(hidden, weight, bias, extra, self.softcap, scale)

    def _classes_last(self) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states and low-rank rows with the dimension of the classes at the end."""
        low_rank = None if self.low_rank is None else self.low_rank.movedim(self.axis, -1)
        return self.hidden.movedim(self.axis, -1), low_rank

    def check_unchanged(self) -> None:
        """Raise RuntimeError if hidden states or head were modified in place since the head call."""
        if self.versions.changed():
            raise RuntimeError(
                "hidden states and LM head must not be modified in place between the head and the use of its logits, "
                "got a modified tensor; use the logits before that, or modify a copy"
            )

    def materialize(self, use: str = "materialize") -> Tensor:
        """Return the logits, computed at the first call under the autograd and autocast state of the head call."""
        if self._logits is None:
            sources, step = self.made or ((), None)
            if step is None:
                self.check_unchanged()
                self.head.report(use, self.shape)
                with self.state.restored(self.hidden), own_graph():  # once, also in a function that is run again
                    hidden, u = self._classes_last()
                    self._logits = self.head.logits(self.parts, hidden, u).movedim(-1, self.axis)
            else:
                made = [source.materialize(use) for source in sources]
                with self.state.restored(self.hidden), own_graph():
                    self._logits = step(*made)
        return self._logits

    def transformed(self, z: Tensor) -> Tensor:
        """Apply the recorded cap, scale, cast and log-softmax to the output of the head."""
        if self.cap is not None:
            z = torch.tanh(z / float(self.cap)) * float(self.cap)
        z = (z if self.scale == ONE else z * float(self.scale)).to(self.dtype)
        return z.log_softmax(self.axis) if self.log else z

    def before_in_place(self, use: str) -> Tensor:
        """Materialize before a change in place, after everything that was derived, which has the old values."""
        for each in list(self._derived):
            each.materialize(use)
        return self.materialize(use)

    def but(self, sources: Sequence[Any], step: Callable[..., Tensor], **changes: Any) -> Any:
        """Return the logits after ``step``, with changed attributes."""
        if not torch.is_grad_enabled():
            changes.setdefault("state", self.state._replace(grad=False))
        return self.changed(**changes, made=(tuple(sources), step), _logits=None)

    def rebuilt(self, hidden: Tensor, low_rank: Tensor | None, logits: Tensor | None) -> Any:
        """Return the logits after a function was applied to their tensors by DDP or FSDP."""
        if hidden.dtype != self.hidden.dtype:  # FSDP casts the outputs of a module
            return self.but([self], lambda z: z.to(hidden.dtype), dtype=hidden.dtype)
        other = self.changed(hidden=hidden, low_rank=low_rank, _logits=logits)
        if self.made is not None and hidden is not self.hidden:
            head = other.changed(scale=ONE, cap=None, log=False, made=None, _logits=None)
            other = other.changed(made=((head,), other.transformed))
        return other

    def moved(self, move: Move, step: Callable[..., Any]) -> Any:
        """Apply a move of rows to the hidden states."""
        self.check_unchanged()
        hidden = move.apply(self.hidden)
        low_rank = None if self.low_rank is None else move.apply(self.low_rank)
        several = isinstance(hidden, tuple | list)
        made = []
        for i, h in enumerate(hidden if several else [hidden]):
            u = low_rank[i] if several and low_rank is not None else low_rank
            pick = (lambda z, i=i: step(z)[i]) if several else step
            made.append(self.but([self], pick, hidden=h, low_rank=u, axis=move.axis % h.dim()))
        if several:
            return type(hidden)(made) if type(hidden) in (tuple, list) else tuple(made)
        return made[0]

    def attribute(self, name: str) -> Any:
        """Return an attribute that plain tensors do not have: of a DTensor."""
        if is_dtensor(self.hidden) and hasattr(self.hidden, name):
            return getattr(self.materialize(name), name)
        return super().attribute(name)

    def __copy__(self) -> Any:
        return self.changed()


class _Source:
    """Deferred logits as they were before a function was applied to their fields."""

    def __init__(self, logits: DeferredLogits) -> None:
        self.logits = logits


@dataclass(repr=False, eq=False, init=False)
class DeferredLogits(_Logits):
    """Stand-in for the logits of an LM head, or for rows of them.

    A dataclass, because DDP searches the fields of a dataclass for tensors, and FSDP2 casts them and rebuilds it.
    """

    hidden: Tensor
    used: list[Tensor]
    source_logits: _Source

    def __init__(self, hidden: Tensor, used: list[Tensor], source_logits: _Source) -> None:
        x = source_logits.logits
        vars(self).update(vars(x.rebuilt(hidden, x.low_rank, x._logits)))

    @classmethod
    def of(cls, **attributes: Any) -> DeferredLogits:
        """Return the output of a head."""
        made: DeferredLogits = object.__new__(cls)
        vars(made).update(attributes, _derived=weakref.WeakSet())
        return made


DeferredLogits.source_logits = property(_Source)  # type: ignore[assignment]


def _flatten(x: DeferredLogits) -> tuple[list[Tensor], Any]:
    tensors = (x.hidden, x.low_rank, x._logits)
    return [t for t in tensors if t is not None], (x, [t is not None for t in tensors])


def _unflatten(children: Any, context: Any) -> Any:
    x, present = context
    children = list(children)
    if not all(isinstance(t, Tensor) for t in children):  # torch 2.11's checkpoint maps tensors to None
        return children
    given = iter(children)
    return x.rebuilt(*(next(given) if there else None for there in present))


# FSDP2 and DDP search the output of a module for tensors whose gradients they must wait for.
_pytree.register_pytree_node(DeferredLogits, _flatten, _unflatten)

Rule = Callable[[DeferredLogits, Call], Any]
RULES: dict[str, Rule] = {}
DeferredLogits.rules = RULES


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _move_rule(name: str) -> Rule:
    def move(x: DeferredLogits, call: Call) -> Any:
        if any(isinstance(a, DeferredLogits) for a in call.args):
            return NotImplemented
        found = MOVES[name](x.shape, x.axis, call)
        return NotImplemented if found is None else x.moved(found, call.on)

    return move


RULES |= {name: _move_rule(name) for name in MOVES}


@rule("view_as", "reshape_as", "expand_as")
def _like(x: DeferredLogits, call: Call) -> Any:
    name = call.function.__name__.removesuffix("_as")
    return RULES[name](x, Call(getattr(Tensor, name), (tuple(call.args[0].shape),), {}))


@rule("cat", "concat", "concatenate", "stack")
def _joined(parts: Any, call: Call) -> Any:
    given = arguments(("dim",), call.args, call.kwargs)
    dim, stacks = given.pop("dim", 0), call.function.__name__ == "stack"
    if given or not all(isinstance(z, DeferredLogits) and _alike(z, parts[0]) for z in parts):
        return NotImplemented
    first = parts[0]
    dim %= first.ndim + stacks
    if dim == first.axis and not stacks:
        return NotImplemented
    for z in parts:
        z.check_unchanged()

    def joined(*tensors: Tensor) -> Tensor:
        return call.function(list(tensors), dim)  # type: ignore[no-any-return]

    hidden = joined(*(z.hidden for z in parts))
    low_rank = None if first.low_rank is None else joined(*(z.low_rank for z in parts))
    axis = first.axis + (stacks and dim <= first.axis)
    versions = Versions.of([hidden, *first.versions.tensors[1:]])
    return first.but(parts, joined, hidden=hidden, low_rank=low_rank, axis=axis, versions=versions)


def _alike(x: DeferredLogits, y: DeferredLogits) -> bool:
    fields = ("source", "axis", "state", "dtype", "log", "logits_dtype")
    return x.deferred and all(getattr(x, name) == getattr(y, name) for name in fields)


def _same_device(value: Any, device: torch.device) -> bool:
    """Return True if an argument of ``to`` or ``type`` names the device, or is no device."""
    if isinstance(value, str) and value.startswith("torch."):  # type("torch.DoubleTensor")
        return False
    if isinstance(value, bool) or not isinstance(value, int | str | torch.device):
        return True
    given = torch.device(value)
    return given.type == device.type and given.index in (None, device.index)


CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


@rule("to", "type", "type_as", *CASTS)
def _cast(x: DeferredLogits, call: Call) -> Any:
    dtype = CASTS.get(call.function.__name__)
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif hasattr(value, "dtype") and hasattr(value, "device"):
            if value.device != x.device:
                return NotImplemented
            dtype = value.dtype
        elif value is True or not _same_device(value, x.device):  # True: a copy, or without waiting
            return NotImplemented
    dtype = dtype or x.dtype
    if dtype not in FLOAT_DTYPES:
        return NotImplemented
    return x if dtype == x.dtype else x.but([x], lambda z: z.to(dtype), dtype=dtype)


@rule("detach")
def _detached(x: DeferredLogits, call: Call) -> Any:
    low_rank = None if x.low_rank is None else x.low_rank.detach()
    state = x.state._replace(grad=False)
    return x.but([x], Tensor.detach, hidden=x.hidden.detach(), low_rank=low_rank, state=state)


rule(*NEW)(new_tensor)


def _number(value: Any) -> Fraction | None:
    """Return a positive number as an exact fraction, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not FACTOR_RANGE[0] < value < FACTOR_RANGE[1]:
        return None
    return Fraction(value)


def _scaled(x: DeferredLogits, call: Call, factor: Fraction | None) -> Any:
    if factor is None or x.log or call.kwargs:
        return NotImplemented
    scale = x.scale * factor
    if not FACTOR_RANGE[0] < scale < FACTOR_RANGE[1]:
        return NotImplemented
    return x.but([x], call.on, scale=scale)


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
    if x.cap is not None or x.log or call.args or call.kwargs:
        return NotImplemented
    return x.but([x], call.on, cap=1 / x.scale)


@rule("mul_", "div_")
def _scaled_in_place(x: DeferredLogits, call: Call) -> Any:
    """Change the scale of these logits, if nothing else refers to their memory."""
    factor = _number(call.args[0]) if len(call.args) == 1 and not call.kwargs else None
    if factor is None or x.log or x.made is not None or len(x._derived):
        return NotImplemented
    if x.requires_grad and not torch.is_grad_enabled():  # changes the values, not the graph
        return NotImplemented
    before = x.changed()
    x.scale = x.scale / factor if "div" in call.function.__name__ else x.scale * factor
    x.made = ((before,), call.on)
    return x


def _on_classes(x: DeferredLogits, dim: Any) -> bool:
    return isinstance(dim, int) and -x.ndim <= dim < x.ndim and dim % x.ndim == x.axis


@rule("log_softmax")
def _log_softmax(x: DeferredLogits, call: Call) -> Any:
    names = ("dim", "dtype") if call.function is not F.log_softmax else ("dim", "_stacklevel", "dtype")
    given = arguments(names, call.args, call.kwargs)
    dtype = given.get("dtype")
    if not _on_classes(x, given.get("dim")) or dtype not in (None, *FLOAT_DTYPES):
        return NotImplemented
    dtype = dtype or dtype_after(lambda z: z.log_softmax(-1), x.dtype, x.device)
    return x.but([x], call.on, log=True, dtype=dtype)


@rule("cross_entropy", "nll_loss")
def _cross_entropy(x: DeferredLogits, call: Call) -> Any:
    of_log = call.function.__name__ == "nll_loss"
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = arguments(names, call.args, call.kwargs)
    target = given.get("target")
    unsupported = any(given.get(name) is not None for name in ("weight", "size_average", "reduce"))
    if of_log != x.log or x.axis != (1 if x.ndim > 1 else 0) or unsupported or given.get("label_smoothing"):
        return NotImplemented
    if not isinstance(target, Tensor) or target.is_floating_point():
        return NotImplemented
    rows = x.shape[: x.axis] + x.shape[x.axis + 1 :]
    reduction, ignored = given.get("reduction", "mean"), given.get("ignore_index", -100)
    if target.shape != rows or reduction not in ("none", "sum", "mean"):
        return NotImplemented

    def plain(z: Tensor) -> Tensor:
        return call.function(z, torch.zeros(1, dtype=torch.long, device=z.device))  # type: ignore[no-any-return]

    nll = DeferredNLL.of(x, target, ignored, dtype_after(plain, x.dtype, x.device))
    if reduction == "none":
        return nll
    return nll.reduced(None if reduction == "sum" else (target != ignored).sum())


@rule("gather")
def _gathered(x: DeferredLogits, call: Call) -> Any:
    given = arguments(("dim", "index", "sparse_grad"), call.args, call.kwargs)
    index = given.get("index")
    if not _on_classes(x, given.get("dim")) or not isinstance(index, Tensor) or given.get("sparse_grad"):
        return NotImplemented
    rest = [d for d in range(x.ndim) if d != x.axis]
    if index.dim() != x.ndim or any(index.shape[d] != x.shape[d] for d in rest):
        return NotImplemented
    ids = index.movedim(x.axis, -1)
    if x.log and ids.shape[-1] == 1:
        return DeferredNLL.of(x, ids.squeeze(-1), NO_INDEX, x.dtype, -1.0).unsqueezed(x.axis)
    out = _stats(x, ids.where(ids != -100, -1))  # an id of -100 is out of range, not a missing one
    picked = out.log_probs if x.log else out.log_probs + out.lse.unsqueeze(-1)
    return picked.to(x.dtype).movedim(-1, x.axis)


def _stats(x: DeferredLogits, ids: Tensor) -> Any:
    with x.restored():
        hidden, weight, bias, extra, softcap, scale = x.rows()
        options: dict[str, Any] = {"softcap": softcap, "scale": scale, "logits_dtype": x.logits_dtype}
        options["check_targets"] = readable_without_sync(ids) or None  # as torch checks them
        return ops.linear_row_stats(hidden, weight, ids, bias=bias, extra=extra, **options)


@rule("logsumexp")
def _logsumexp(x: DeferredLogits, call: Call) -> Any:
    given = arguments(("dim", "keepdim"), call.args, call.kwargs)
    dim = given.get("dim")
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if x.log or not _on_classes(x, dim):
        return NotImplemented
    rest = x.shape[: x.axis] + x.shape[x.axis + 1 :]
    lse = _stats(x, torch.full(rest, -100, device=x.device)).lse
    lse = lse.to(dtype_after(lambda z: z.logsumexp(-1), x.dtype, x.device))
    return lse.unsqueeze(x.axis) if given.get("keepdim") else lse


@rule("argmax")
def _argmax(x: DeferredLogits, call: Call) -> Any:
    given = arguments(("dim", "keepdim"), call.args, call.kwargs)
    if not _on_classes(x, given.get("dim")):
        return NotImplemented
    with torch.no_grad(), x.restored():
        hidden, weight, bias, extra, softcap, _ = x.rows()
        plain = weight.detach() if not is_dtensor(weight) else weight
        options: dict[str, Any] = {"softcap": softcap, "logits_dtype": x.logits_dtype}
        ids = ops.linear_sample(hidden, plain, temperature=0, bias=bias, extra=extra, **options).ids
    return ids.unsqueeze(x.axis) if given.get("keepdim") else ids
