"""Computations inside the forward of an LM head, which returns their result in place of logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from dllm_kernels._checks import type_name
from dllm_kernels._graph._private import plainly
from dllm_kernels.head._lora import linear_logits, replaced_forward
from dllm_kernels.head._module import head_module
from dllm_kernels.rows._logits import LinearLogits

CASTS = ("bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type", "type_as")
COPIES = ("clone", "contiguous", "detach", "reshape", "view", "view_as")  # DDP clones outputs, DeepSpeed detaches them


HeadFunction = Callable[[LinearLogits], Tensor]
Run = Callable[[Callable[[], Any], HeadFunction], tuple[Tensor, Any]]


class HeadOutput(Tensor):
    """Tensor that the LM head returned in place of logits, such as the loss.

    Casts, and copies and views of the same shape, keep the class. Any other operation that returns or modifies a tensor
    raises ValueError, because the model would have applied it to its logits. The values are not compared, because they
    do not show a scale that begins at 1 or a large cap, and because reading them would sync with the GPU. It is a
    tensor subclass, because wrappers copy the outputs of a model, evaluation has no autograd graph, and
    ``torch.compile`` traces ``__torch_function__``.

    A cast rounds the values, so they are only a sign that the model returned them: :func:`result_of_head` returns what
    the head computed.
    """

    advice = ""  # end of the error message, set by each derived class

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        try:
            result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        except (IndexError, RuntimeError, TypeError):  # an index or a shape that is valid for logits only
            refuse_output(f"a call of {name} on it", cls.advice)
        if name == "__get__":  # attribute access
            return result
        tensors = [x for x in _pytree.tree_leaves(result) if isinstance(x, Tensor)]
        shapes = [x.shape for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)]
        keeps_class = name in (*CASTS, *COPIES) and all(x.shape in shapes and x.is_floating_point() for x in tensors)
        if result is None or (tensors and not keeps_class):  # None: an assignment or another in-place function
            refuse_output(f"a call of {name} on it", cls.advice)
        return result


def refuse_output(got: str, advice: str) -> NoReturn:
    """Raise ValueError for a model that changes the output of its head; ``got`` names the operation."""
    raise ValueError(
        "the model must call its LM head once and return its output unchanged, with no scale, bias or soft cap, got "
        f"{got}; {advice}"
    )


@contextlib.contextmanager
def computed_in_head(head: Any, compute: HeadFunction, advice: str) -> Iterator[None]:
    """Make the LM head return ``compute(logits)``, of the record of its logits, within the context.

    The caller checks that the model returns the output of its head unchanged.

    Args:
        head: the LM head, or None if the model has none, an error.
        compute: returns the output of the head.
        advice: end of the error message.

    Raises:
        ValueError: :func:`~dllm_kernels.head._lora.check_head` does not accept the head.
    """

    def forward(hidden: Tensor) -> Tensor:
        return compute(linear_logits(head, hidden))

    with replaced_forward(head, forward, advice):
        yield


@contextlib.contextmanager
def running_in_head(head: Any, output: type[HeadOutput]) -> Iterator[Run]:
    """Yield ``run(call, rows)``, which calls a model whose head computes ``rows(logits)``, of a record.

    ``run`` returns the rows, see :func:`result_of_head`, and the output of the model. ``output`` is the class in which
    the rows pass through the model. Within the context, also between two calls, the head belongs to this context:
    another one of the same head raises.
    """
    computed, current = list[Tensor](), list[HeadFunction]()

    def in_head(logits: LinearLogits) -> Tensor:
        computed.append(current[-1](logits))
        return computed[-1].as_subclass(output)

    def run(call: Callable[[], Any], rows: HeadFunction) -> tuple[Tensor, Any]:
        computed.clear()
        current[:] = [rows]
        outputs = call()
        return result_of_head(computed, outputs, output), outputs

    with computed_in_head(head, in_head, output.advice):
        yield run


def result_of_head(computed: list[Tensor], outputs: Any, output: type[HeadOutput]) -> Tensor:
    """Return a copy of what the head computed, on the device of the model's output; see :class:`_Unrounded`.

    Args:
        computed: the results of the calls of the head.
        outputs: output of the model.
        output: class in which the result passed through the model.

    Raises:
        ValueError: the model did not call its head once and return the result, possibly cast or copied.
    """
    returned = returned_logits(outputs)
    if len(computed) != 1 or not isinstance(returned, output):
        got = "another tensor" if len(computed) == 1 else f"{len(computed)} calls of the head"
        refuse_output(got, output.advice)
    with plainly():
        returned = returned.as_subclass(Tensor)
    result: Tensor = _Unrounded.apply(computed[0] if returned.requires_grad else computed[0].detach(), returned)  # type: ignore[no-untyped-call]
    return result


class _Unrounded(torch.autograd.Function):
    """Copy the result of the head, with its gradient, and pass the gradient zero to the output of the model.

    Neither the value nor the gradient is rounded by a cast in the model. In float16, a cast would also overflow for the
    gradient of a loss, which is the scale of a gradient scaler. The output stays in the graph, because DDP, FSDP and
    DeepSpeed attach hooks to it that must run before the backward of the head. They do, because the engine runs the
    backward of the head after that of everything computed from it.

    A result that was computed without a gradient, as in a reentrant checkpoint, leaves the gradient to the output.
    """

    @staticmethod
    def forward(ctx: Any, result: Tensor, output: Tensor) -> Tensor:
        ctx.device, ctx.like = result.device, (output.shape, output.dtype, output.device)
        return result.to(output.device, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        shape, dtype, device = ctx.like
        if not ctx.needs_input_grad[0]:
            return None, grad.to(dtype)
        return grad.to(ctx.device), torch.zeros(shape, dtype=dtype, device=device)


def returned_logits(outputs: Any) -> Any:
    """Return the logits of a model's output: itself, its entry or attribute ``logits``, or its first element.

    Raises:
        ValueError: the output has none of them.
    """
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        if "logits" in outputs:
            return outputs["logits"]
    elif hasattr(outputs, "logits"):
        return outputs.logits
    elif isinstance(outputs, Sequence) and outputs:
        return outputs[0]
    raise ValueError(
        "the model must return its logits, an object or a mapping with logits, or a tuple that begins with them, got "
        f"{_described(outputs)}"
    )


def _described(outputs: Any) -> str:
    if not isinstance(outputs, Mapping):
        return type_name(outputs)
    return f"{type_name(outputs)} with {', '.join(map(str, outputs)) or 'nothing'}"


def head_of(model: nn.Module, head: nn.Module | None) -> nn.Module:
    """Return the given head, or else the LM head of the model.

    Raises:
        TypeError: ``model`` or ``head`` is not a module.
        ValueError: the model has no LM head.
    """
    for name, module in (("model", model), ("head", head)):
        if not isinstance(module, nn.Module) and (name == "model" or module is not None):
            raise TypeError(f"{name} must be an nn.Module, got {type_name(module)}")
    lm_head = head_module(model) if head is None else head
    if lm_head is None:
        raise ValueError(
            "model must have get_output_embeddings() or a module named lm_head, unless head is given, got "
            f"{type_name(model)}"
        )
    return lm_head
