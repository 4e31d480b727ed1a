"""Custom ops of the functions decorated with ``opaque``; importing this module registers them, which is slow.

Floats that change between calls are 0 in their own argument and held by a tensor, see ``_changing``. The argument of a
record has a name that begins with ``changing``.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from dllm_kernels._graph import _changing
from dllm_kernels._graph._defined import DEFINED, Opaque

TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int: "SymInt", int | None: "SymInt?", float: "float",
    str: "str", Tensor | int: "Tensor",
}  # fmt: skip


class _Parameter:
    """One argument of an opaque function, and the arguments of the custom op that make it up.

    A record without the method ``arguments`` has one field for each argument of its ``schema``.
    """

    def __init__(self, name: str, kind: Any) -> None:
        self.name, self.record = name, kind if hasattr(kind, "schema") else None
        schema = f"{TYPES[kind]} {name}" if self.record is None else kind.schema()
        self.arguments = [argument.split()[-1] for argument in schema.split(", ")]
        self.schema = schema.split(", ")

    def flattened(self, value: Any) -> dict[str, Any]:
        if self.record is None:
            return {self.name: value}
        if hasattr(self.record, "arguments"):
            return value.arguments()  # type: ignore[no-any-return]
        return dict(zip(self.arguments, value, strict=True))

    def restored(self, given: dict[str, Any]) -> Any:
        values = {name: given[name] for name in self.arguments}
        if self.record is None:
            return values[self.name]
        if hasattr(self.record, "arguments"):
            return self.record.from_arguments(**values)
        return self.record(*values.values())


class _CustomOp:
    """The custom op of an opaque function: tensors first, then all else by keyword."""

    def __init__(self, defined: Opaque) -> None:
        self.specs, self.function = defined.specs, defined.function
        function = self.function
        hints = get_type_hints(function)
        self.parameters = [_Parameter(name, hints[name]) for name in inspect.signature(function).parameters]
        self.floats = [parameter.name for parameter in self.parameters if hints[parameter.name] is float]
        arguments = [argument for parameter in self.parameters for argument in parameter.schema]
        if self.floats:
            arguments.append("Tensor? changing_numbers")
        tensors = [a for a in arguments if a.startswith("Tensor")]
        others = [a for a in arguments if not a.startswith("Tensor")]
        self.tensors = [a.split()[-1] for a in tensors]
        schema = f"({', '.join([*tensors, '*', *others])}) -> Tensor[]"

        def implementation(*given: Any, **keywords: Any) -> list[Tensor]:
            with torch.cuda.device_of(given[0]):  # type: ignore[no-untyped-call]
                return [t for t in function(*self.restored(given, keywords)) if t is not None]

        def fake(*given: Any, **keywords: Any) -> list[Tensor]:
            # The values of floats that change between calls are unknown, and no shape depends on them.
            specs = self.specs(*self.restored(given, keywords, fake=True))
            return [given[0].new_empty(shape, dtype=dtype) for shape, dtype in filter(None, specs)]

        op = torch.library.custom_op(f"dllm_kernels::{defined.name}", implementation, mutates_args=(), schema=schema)
        op.register_fake(fake)
        self.overload = getattr(torch.ops.dllm_kernels, defined.name).default

    def restored(self, given: Sequence[Any], keywords: dict[str, Any], *, fake: bool = False) -> list[Any]:
        """Rebuild the arguments of the function from those of the op."""
        arguments = dict(zip(self.tensors, given, strict=True)) | keywords
        if fake:
            arguments.update(dict.fromkeys(name for name in arguments if name.startswith("changing")))
        elif self.floats:
            numbers = _changing.unpacked([arguments[name] for name in self.floats], arguments["changing_numbers"])
            arguments.update(zip(self.floats, numbers, strict=True))
        return [parameter.restored(arguments) for parameter in self.parameters]


OPS = {defined.name: _CustomOp(defined) for defined in DEFINED}


def call(defined: Opaque, args: Sequence[Any]) -> list[Tensor | None]:
    """Call the custom op of an opaque function; return what the function would return."""
    op = OPS[defined.name]
    flat: dict[str, Any] = {}
    for parameter, value in zip(op.parameters, args, strict=True):
        flat.update(parameter.flattened(value))
    if op.floats:
        numbers, flat["changing_numbers"] = _changing.packed([flat[name] for name in op.floats])
        flat.update(zip(op.floats, numbers, strict=True))
    tensors = [flat.pop(name) for name in op.tensors]
    made = iter(op.overload(*tensors, **flat))
    return [None if spec is None else next(made) for spec in defined.specs(*args)]
