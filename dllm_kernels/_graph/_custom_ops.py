"""Custom ops of the functions decorated with ``opaque``; importing this module registers them, which is slow.

The arguments of an op are the arguments of its function, with a record replaced by its fields: field ``b`` of argument
``a`` is ``a_b``. A float that may be None is 0 instead. Floats that change between calls are 0 in their own argument
and held by the tensor ``changing_numbers``, see ``_changing``. A record is rebuilt by its class, or by the class method
``from_fields`` if it has one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, get_type_hints

import torch
from torch import Tensor

from dllm_kernels._graph import _changing
from dllm_kernels._graph._defined import DEFINED, Opaque

TYPES: dict[Any, str] = {
    Tensor: "Tensor", Tensor | None: "Tensor?", Any: "Tensor?", Tensor | int: "Tensor", bool: "bool", int: "SymInt",
    int | None: "SymInt?", float: "float", float | None: "float", tuple[float, ...]: "float[]", str: "str",
    tuple[str, ...]: "str[]", torch.dtype: "ScalarType",
}  # fmt: skip


@functools.cache
def _fields(record: Any) -> dict[str, Any]:
    """Return the types of the fields of a NamedTuple; those that no op can hold are omitted, and keep their default."""
    return {name: kind for name, kind in get_type_hints(record).items() if kind in TYPES or hasattr(kind, "_fields")}


def _leaves(kind: Any, value: str) -> Iterator[tuple[str, str]]:
    """Yield expression and type of each argument of an op that holds a part of ``value``, an expression itself."""
    if kind in TYPES:
        yield value, TYPES[kind]
    else:
        for field, field_type in _fields(kind).items():
            yield from _leaves(field_type, f"{value}.{field}")


def _rebuilt(kind: Any, values: Iterator[Any]) -> Any:
    """Return an argument of a function from the arguments of the op."""
    if kind not in TYPES:
        fields = {field: _rebuilt(field_type, values) for field, field_type in _fields(kind).items()}
        return getattr(kind, "from_fields", kind)(**fields)
    value = next(values)
    return None if kind == float | None and value == 0 else value


def _name(value: str) -> str:
    return value.replace(".", "_")


class _CustomOp:
    """The custom op of an opaque function: tensors first, then all else by keyword."""

    def __init__(self, defined: Opaque) -> None:
        self.specs, self.function = defined.specs, defined.function
        function, hints = self.function, get_type_hints(self.function)
        self.kinds = {name: hints[name] for name in inspect.signature(function).parameters}
        leaves = dict(chain.from_iterable(_leaves(kind, name) for name, kind in self.kinds.items()))
        tensors, floats = ([v for v in leaves if leaves[v].startswith(kind)] for kind in ("Tensor", "float"))
        others = [value for value in leaves if value not in (*tensors, *floats)]
        self.names, self.tensors, self.floats = ([*map(_name, values)] for values in (leaves, tensors, floats))
        positional, keywords = ([f"{leaves[v]} {_name(v)}" for v in values] for values in (tensors, floats + others))
        if floats:
            positional.append("Tensor? changing_numbers")
            self.tensors.append("changing_numbers")
        schema = f"({', '.join([*positional, '*', *keywords])}) -> Tensor[]"
        # One expression, because Dynamo traces each step of a loop over fields, and guards on what the loop reads: the
        # first compilation of a loss took 2 to 3 % longer.
        split = f"[{', '.join(tensors)}], [{', '.join(floats)}], dict({', '.join(f'{_name(v)}={v}' for v in others)})"
        self.split = eval(f"lambda {', '.join(self.kinds)}: ({split})")

        def implementation(*args: Any, **keywords: Any) -> list[Tensor]:
            with torch.cuda.device_of(args[0]):  # type: ignore[no-untyped-call]
                return [t for t in function(*self.rebuilt(args, keywords)) if t is not None]

        def fake(*args: Any, **keywords: Any) -> list[Tensor]:
            # The values of floats that change between calls are unknown, and no shape depends on them.
            specs = self.specs(*self.rebuilt(args, keywords, fake=True))
            return [args[0].new_empty(shape, dtype=dtype) for shape, dtype in filter(None, specs)]

        op = torch.library.custom_op(f"dllm_kernels::{defined.name}", implementation, mutates_args=(), schema=schema)
        op.register_fake(fake)
        self.overload = getattr(torch.ops.dllm_kernels, defined.name).default

    def arguments(self, args: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the op, by position and by keyword, from those of the function."""
        tensors, floats, others = self.split(*args)
        if floats:
            numbers, changing = _changing.packed(floats)
            tensors.append(changing)
            others.update(zip(self.floats, numbers, strict=True))
        return tensors, others

    def rebuilt(self, tensors: Sequence[Any], keywords: dict[str, Any], *, fake: bool = False) -> list[Any]:
        """Rebuild the arguments of the function from :meth:`arguments`."""
        flat = dict(zip(self.tensors, tensors, strict=True)) | keywords
        if self.floats and not fake:
            numbers = _changing.unpacked([flat[name] for name in self.floats], flat["changing_numbers"])
            flat.update(zip(self.floats, numbers, strict=True))
        values = iter([flat[name] for name in self.names])
        return [_rebuilt(kind, values) for kind in self.kinds.values()]


OPS = {defined.name: _CustomOp(defined) for defined in DEFINED}


def call(defined: Opaque, args: Sequence[Any]) -> list[Tensor | None]:
    """Call the custom op of an opaque function; return what the function would return."""
    op = OPS[defined.name]
    tensors, others = op.arguments(args)
    results = iter(op.overload(*tensors, **others))
    return [None if spec is None else next(results) for spec in defined.specs(*args)]
