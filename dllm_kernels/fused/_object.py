"""Objects that torch treats like tensors, by ``__torch_function__``, methods, operators and attributes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch.utils import _pytree

from dllm_kernels._utils._deferred import Deferred
from dllm_kernels.fused._moves import Call

Tensor = torch.Tensor
OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul"),
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "and", "or", "xor", "getitem", "setitem"),
    *("bool", "int", "float", "contains"),
)
ALIASES = {
    "__mul__": "mul", "__rmul__": "mul", "multiply": "mul", "__truediv__": "div", "true_divide": "div", "divide": "div",
    "__neg__": "neg", "negative": "neg", "__imul__": "mul_", "__idiv__": "div_", "multiply_": "mul_",
    "__itruediv__": "div_", "true_divide_": "div_", "divide_": "div_",
}  # fmt: skip
CHANGES = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")
IN_PLACE = ("__setitem__", *(f"__i{name}__" for name in CHANGES))
# Answered from shape and dtype.
OF_SHAPE = (
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "stride", "storage_offset",
)  # fmt: skip
OF_DEVICE = ("is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "layout", "is_sparse", "is_quantized", "is_nested")
VIEWS = ("T", "mT", "H", "mH")
RENAMED = {"axis": "dim", "keepdims": "keepdim"}
Rule = Callable[[Any, Call], Any]


class UnknownArgumentError(Exception):
    """A rule does not know an argument by name."""


class TorchObject(Deferred):
    """Base class of deferred tensors: dispatches every operation to ``rules``, otherwise to the computed tensor."""

    rules: ClassVar[dict[str, Rule]]
    dtype: torch.dtype
    __array_ufunc__ = None  # np.float64(2) * x is x.__rmul__

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Device of the tensor."""
        raise NotImplementedError

    @property
    def requires_grad(self) -> bool:
        """True if the tensor is part of an autograd graph."""
        raise NotImplementedError

    @property
    def deferred(self) -> bool:
        """True if the tensor has not been computed."""
        raise NotImplementedError

    def before_in_place(self, use: str) -> Tensor:
        """Compute the tensor before it is changed in place."""
        return self.materialize(use)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        name, kwargs, args = ALIASES.get(name, name), dict(kwargs or {}), list(args)
        if not args:  # the first argument by name
            args = [kwargs.pop("input" if "input" in kwargs else next(iter(kwargs)))]
        objects = _objects((args, kwargs))
        if func is torch.autograd.grad:
            _check_inputs(args[1])
        if name in OF_SHAPE:
            return func(torch.empty(objects[0].shape, dtype=objects[0].dtype, device="meta"), *args[1:], **kwargs)
        rule = objects[0].rules.get(name) if all(x.deferred for x in objects) else None
        if rule is not None:
            first, *others = args
            if name == "mul" and not isinstance(first, TorchObject) and others:
                first, others = others[0], [first]
            if isinstance(first, TorchObject | tuple | list):  # a sequence: cat, stack
                with contextlib.suppress(UnknownArgumentError):
                    named = {RENAMED.get(key, key): value for key, value in kwargs.items()}
                    result = rule(first, Call(func, tuple(others), named))
                    if result is not NotImplemented:
                        return result
        in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))

        def value(x: Any) -> Any:
            if not isinstance(x, TorchObject):
                return x
            return x.before_in_place(name) if in_place and x is args[0] else x.materialize(name)

        args, kwargs = _pytree.tree_map(value, (args, kwargs), is_leaf=lambda x: isinstance(x, TorchObject))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # private names and protocols of NumPy and pickle
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        if not hasattr(Tensor, name):
            return self.attribute(name)
        member = getattr(Tensor, name)
        if name in VIEWS:
            return self.__torch_function__(_attribute(name), (), (self,))
        if callable(member):
            return functools.partial(self._method, member)
        return getattr(self.device_tensor if name in OF_DEVICE else self.materialize(name), name)

    def attribute(self, name: str) -> Any:
        """Return an attribute that plain tensors do not have."""
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    @property
    def device_tensor(self) -> Tensor:
        """A tensor on the device of this one."""
        return torch.empty(0, device=self.device)

    def _method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(method, (), (self, *args), kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._method(Tensor.unbind, 0))

    def __len__(self) -> int:
        return len(torch.empty(self.shape, device="meta"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize("pickle").__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Any:
        return self.materialize("deepcopy").__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    __hash__ = object.__hash__


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, f"__{name}__")

    def operator(self: TorchObject, *args: Any) -> Any:
        return self.__torch_function__(method, (), (self, *args))

    return operator


for _name in OPERATORS:
    if hasattr(Tensor, f"__{_name}__"):
        setattr(TorchObject, f"__{_name}__", _operator(_name))


@functools.cache
def _attribute(name: str) -> Callable[[Tensor], Any]:
    def attribute(t: Tensor) -> Any:
        return getattr(t, name)

    attribute.__name__ = name
    return attribute


def _objects(tree: Any) -> list[TorchObject]:
    leaves = _pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, TorchObject))
    return [x for x in leaves if isinstance(x, TorchObject)]


def _check_inputs(inputs: Sequence[Any]) -> None:
    """Raise RuntimeError if ``torch.autograd.grad`` is asked for the gradient of a tensor that was never computed."""
    for x in inputs:
        if isinstance(x, TorchObject) and x.deferred:
            raise RuntimeError(
                "inputs of torch.autograd.grad must be tensors that the loss was computed from, got deferred ones of "
                f"shape {tuple(x.shape)}, which a fused loss never computes; call materialize() of them before the loss"
            )


def arguments(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function of torch by name.

    Raises:
        UnknownArgumentError: an argument has another name or place, so the operation needs the tensor.
    """
    if len(args) > len(names) or not kwargs.keys() <= set(names):
        raise UnknownArgumentError
    return {**dict(zip(names, args, strict=False)), **kwargs}
