"""Deferred logits at the door of losses and ops: the form from hidden states runs in place of the form from logits.

``fused_head`` makes an LM head return objects that hold hidden states and the head in place of logits. Every public
function that takes logits is decorated with :func:`from_hidden_states`, and functions of log-probabilities or NLL with
:func:`of_computed`. Only these look for deferred tensors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from dllm_kernels._graph._plain import Deferred

Function = TypeVar("Function", bound=Callable[..., Any])
# Arguments that may be deferred logits -> the argument of the form from hidden states that takes their rows.
ROWS = {
    "logits": "hidden", "encoder_logits": "hidden", "logits_or_hidden": "logits_or_hidden",
    "causal_logits": "causal_hidden", "teacher_logits": "teacher_hidden",
}  # fmt: skip
SECOND = "causal_logits", "teacher_logits"


class HeadRows(NamedTuple):
    """Logits ``scale * cap(hidden weight^T + bias + u U^T)``, in the form of the arguments of an op.

    Attributes:
        hidden: ``[..., D]``.
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        extra: low-rank part ``(u, U)`` of the head, or None.
        softcap: cap, or None.
        scale: factor after the cap, or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    extra: tuple[torch.Tensor, torch.Tensor] | None
    softcap: float | None
    scale: float | None


class DeferredRows(Deferred):
    """Base class of deferred logits."""

    @property
    def hidden(self) -> torch.Tensor:
        """Hidden states, without a graph."""
        raise NotImplementedError

    @property
    def logits_dtype(self) -> torch.dtype | None:
        """Option of the ops that receive the rows."""
        raise NotImplementedError

    @property
    def usable(self) -> bool:
        """True if an op may use the rows in place of the logits."""
        raise NotImplementedError

    @property
    def source(self) -> tuple[Any, ...]:
        """Head and transform of the logits: equal for logits that one call of an op can take together."""
        raise NotImplementedError

    def rows(self) -> HeadRows:
        """Take the head apart; call within :meth:`restored`."""
        raise NotImplementedError

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """Restore the autograd and autocast state of the head call within the context."""
        raise NotImplementedError


def from_hidden_states(fused: str | Callable[..., Any]) -> Callable[[Function], Function]:
    """Decorate a function of logits: called with deferred logits, it calls ``fused`` with hidden states and LM head.

    The logits are materialized instead if the function and the logits have a soft cap each, if only one of two
    arguments is deferred, or if the two come from different heads and the function takes one.

    Args:
        fused: the form from hidden states: a function, or the name of a method or of a function in the same module.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            for value in args:
                if isinstance(value, Deferred):
                    return _of_deferred(function, fused, args, kwargs)
            for value in kwargs.values():
                if isinstance(value, Deferred):
                    return _of_deferred(function, fused, args, kwargs)
            return function(*args, **kwargs)

        return wrapped  # type: ignore[return-value]

    return decorate


def computed(value: Any, use: str) -> Any:
    """Materialize a deferred value, also in a tuple or list; return anything else unchanged."""
    if isinstance(value, Deferred):
        return value.materialize(use)
    if type(value) in (tuple, list):
        return type(value)(computed(each, use) for each in value)
    return value


def of_computed(function: Function) -> Function:
    """Decorate a function of tensors: called with deferred ones (of ``fused_head``), it receives their values."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Deferred):
                use = function.__qualname__
                args = tuple(computed(value, use) for value in args)
                return function(*args, **{name: computed(value, use) for name, value in kwargs.items()})
        return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def _of_deferred(function: Callable[..., Any], fused: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    signature = inspect.signature(function)  # only here, because a graph cannot hold a signature
    bound = signature.bind(*args, **kwargs)
    given, use = bound.arguments, function.__qualname__
    rows = {name: z for name, z in given.items() if name in ROWS and isinstance(z, DeferredRows)}
    for name in given.keys() - rows.keys():
        given[name] = computed(given[name], use)
    transform = _transform(signature, given, rows)
    if transform is None:
        given.update({name: z.materialize(use) for name, z in rows.items()})
        return function(*bound.args, **bound.kwargs)
    owner = given.pop("self", None)
    if isinstance(fused, str):
        fused = getattr(owner, fused) if owner is not None else function.__globals__[fused]
    parameters = inspect.signature(fused).parameters
    given.pop("inplace_backward", None)  # there are no logits to overwrite
    changed = {name: value for name, value in transform.items() if name not in signature.parameters}
    given |= transform if not changed else {}
    if changed:  # options of a loss that are set at its construction
        owner = copy.copy(owner)
        vars(owner).update(changed)
        fused = getattr(owner, fused.__name__)
    first = next(iter(rows.values()))
    with first.restored():
        given = {name: value for name, value in given.items() if name not in ROWS} | _arguments(rows, parameters)
        if first.logits_dtype is not None and given.get("logits_dtype") is None:
            given["logits_dtype"] = first.logits_dtype
        return fused(*_positional(given, parameters), **given)


def _transform(
    signature: inspect.Signature, given: dict[str, Any], rows: dict[str, DeferredRows]
) -> dict[str, Any] | None:
    """Return the options that apply the recorded transform and then the function's own; None if no call can."""
    present = [name for name in ROWS if given.get(name) is not None]
    if set(present) != rows.keys() or not all(z.usable for z in rows.values()):
        return None
    first, *others = (rows[name] for name in present)
    for other in others:
        if other.source[1:] != first.source[1:] or ("causal_logits" in rows and other.source != first.source):
            return None
        if other.hidden.dtype != first.hidden.dtype:
            return None
    owner, parameters = given.get("self"), signature.parameters
    names = [name for name in ("softcap", "scale", "temperature") if name in parameters or hasattr(owner, name)]
    own: dict[str, Any] = {name: given.get(name, getattr(owner, name, None)) for name in names}
    cap, scale = first.source[1:]
    if (cap is None and scale is None) or not names:
        return {} if (cap, scale) == (None, None) else None
    if given.get("teacher_transform") is not None:
        return None
    factor: float = 1.0 if scale is None else scale
    options: dict[str, Any] = {}
    if own.get("softcap") is not None:
        if cap is not None:
            return None
        cap = float(own["softcap"]) / factor
    options["softcap"] = cap
    if scale is not None:
        if "scale" in own:
            options["scale"] = factor * (1.0 if own["scale"] is None else own["scale"])
        elif "temperature" in own:
            options["temperature"] = (1.0 if own["temperature"] is None else own["temperature"]) / factor
        else:
            return None
    return options


def _arguments(rows: dict[str, DeferredRows], parameters: Any) -> dict[str, Any]:
    """Return rows and head as arguments of the form from hidden states."""
    names = list(rows)
    parts = [rows[name].rows() for name in names]
    first = parts[0]
    prefix = "lm_head_" if "lm_head_weight" in parameters else ""
    given: dict[str, Any] = {ROWS[names[0]]: first.hidden, f"{prefix}weight": first.weight}
    given |= {f"{prefix}bias": first.bias, "extra": first.extra}
    if len(names) == 1:
        return given
    second = parts[1]
    if names[1] == "teacher_logits":
        if rows[names[0]].source[0] != rows[names[1]].source[0]:
            given |= {"teacher_weight": second.weight, "teacher_bias": second.bias}
        return given | {"teacher_hidden": second.hidden, "teacher_extra": second.extra}
    if first.extra is None or second.extra is None:
        return given | {"causal_hidden": second.hidden}
    # With a low-rank part, the loss takes both branches as one tensor.
    u = torch.cat([first.extra[0], second.extra[0]], 1)
    return given | {"hidden": torch.cat([first.hidden, second.hidden], 1), "extra": (u, first.extra[1])}


def _positional(given: dict[str, Any], parameters: Any) -> list[Any]:
    """Remove and return the arguments that must be positional, because a variable number of others follows."""
    variable = next((p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    if variable is None:
        return []
    first = [given.pop(p.name) for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [*first, *given.pop(variable, ())]
