"""Definition of a row op: its output table, forward, backward, and what backward reads.

Support for autograd, torch.compile and DTensors is written once, for all records (``_eager.py``, ``_compiled.py``,
``_run.py``, ``distributed/``). A new op needs a record, in the file of its forward pass, and a public function that
builds its inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from dllm_kernels._core._inputs import OF_ROWS, Gradients, RowInputs
from dllm_kernels._core._plan import Plan

Tensor = torch.Tensor
Spec = tuple[tuple[int, ...], torch.dtype]
# Tensors by the name of the output; an output that was not requested is absent or None.
Outputs = dict[str, Any]
Backward = Callable[[RowInputs, Outputs, Outputs, Plan], Gradients]
Names = tuple[str, ...]
SpecOf = Callable[[RowInputs, Plan], Spec | None]

LOGITS = "the logits, torch.nn.functional.linear(hidden, weight, bias)"


def _no_gradient(*_: object) -> NoReturn:
    raise AssertionError("the op takes constants only")


class Output(NamedTuple):
    """One output of a row op.

    Attributes:
        name: field of the result, or of what backward reads.
        spec: (inputs, plan) -> (shape, dtype), or None if not requested.
        differentiable: True if the caller may backpropagate through it.
        public: True if it is returned to the caller.
        like_ids: True if it has the shape of the ids, False if it has that of the rows.
    """

    name: str
    spec: SpecOf
    differentiable: bool = False
    public: bool = True
    like_ids: bool = False


class RowOp(NamedTuple):
    """Definition of a row op over N rows.

    Attributes:
        name: key of the record in compiled ops.
        rows: (inputs of the caller, plan) -> flattened (ids, targets).
        outputs: the output table, in the order of the compiled op's results.
        forward: (inputs, plan) -> outputs by name.
        result: builds the caller's result from the public outputs, by name.
        saved: plan -> names of the inputs and of the outputs that backward reads.
        backward: (saved inputs, saved outputs, upstream gradients by name, plan) -> gradients, None if not needed. By
            default the op takes constants only.
        instead: functions with a second derivative, from logits and from hidden states.
        inline_backward: plan -> backward made of plain torch ops, traced by torch.compile instead of hidden in the
            custom op; or None.
        before_backward: (inputs, plan) -> function that an eager backward calls first; or None.
    """

    name: str
    rows: Callable[[RowInputs, Plan], tuple[Tensor, Tensor]]
    outputs: tuple[Output, ...]
    forward: Callable[[RowInputs, Plan], Outputs]
    result: Callable[..., Any]
    saved: Callable[[Plan], tuple[Names, Names]] = lambda _: ((), ())
    backward: Backward = _no_gradient
    instead: tuple[str, str] = ("", "")
    inline_backward: Callable[[Plan], Backward | None] = lambda _: None
    before_backward: Callable[[RowInputs, Plan], Callable[[], None] | None] | None = None

    def requested(self, inputs: RowInputs, plan: Plan) -> list[tuple[Output, Spec]]:
        """List the outputs that forward computes, each with its shape and dtype."""
        return [(out, spec) for out in self.outputs if (spec := out.spec(inputs, plan)) is not None]


def per_row(
    requested: Callable[[Plan], bool] = lambda _: True, columns: tuple[int, ...] = (), dtype: torch.dtype | None = None
) -> SpecOf:
    """Make the spec of an output ``[N, *columns]``, by default in the accumulation dtype."""
    return lambda inputs, plan: (
        ((inputs.ids.shape[0], *columns), dtype or plan.accum_dtype) if requested(plan) else None
    )


def scalar(requested: Callable[[Plan], bool] = lambda _: True) -> SpecOf:
    """Make the spec of a 0-d output in the accumulation dtype."""
    return lambda _, plan: ((), plan.accum_dtype) if requested(plan) else None


def gradient_outputs(
    computed: Callable[[Plan], bool], fields: Names = Gradients._fields, *, scaled: Callable[[Plan], bool] | None = None
) -> tuple[Output, ...]:
    """List the outputs ``grad_*`` of a forward pass that computes gradients.

    They are contiguous, whatever the strides of the inputs. If ``scaled(plan)`` is True, the gradients of the head are
    in the accumulation dtype.
    """

    def spec(field: str) -> SpecOf:
        def of(inputs: RowInputs, plan: Plan) -> Spec | None:
            t: Tensor | None = getattr(inputs, field)
            if t is None or not getattr(plan.needs, field) or not computed(plan):
                return None
            wide = scaled is not None and field not in OF_ROWS and scaled(plan)
            return tuple(t.shape), plan.accum_dtype if wide else t.dtype

        return of

    return tuple(Output(f"grad_{field}", spec(field), public=False) for field in fields)


GRADS: Names = tuple(f"grad_{field}" for field in Gradients._fields)


def as_outputs(grads: Gradients) -> Outputs:
    """Name gradients as :func:`gradient_outputs` does."""
    return dict(zip(GRADS, grads, strict=True))


def gradients_of(outputs: Outputs) -> Gradients:
    """Return the gradients that forward has computed."""
    return Gradients(*(outputs.get(name) for name in GRADS))


class SingleUseBackward:
    """Raises if gradients computed in forward are requested a second time, or would be dropped."""

    def __init__(self, name: str, instead: str, inputs: RowInputs, plan: Plan) -> None:
        self.name, self.instead, self.consumed = name, instead, False
        needed = zip(Gradients._fields, inputs.grad_inputs, plan.needs, strict=True)
        head = [t for field, t, needs in needed if needs and t is not None and field not in OF_ROWS]
        self.head = [weakref.ref(t) for t in head]

    def __call__(self) -> None:
        if self.consumed:
            raise RuntimeError(
                f"{self.name} computes its gradients in the forward pass and frees them in the first backward; "
                f"recompute the loss to run backward again, or use {self.instead}"
            )
        self.consumed = True
        for parameter in (ref() for ref in self.head):
            # FSDP2 may have freed the gathered head. No other check detects that, because backward does not read it.
            if parameter is not None and parameter.numel() and not parameter.untyped_storage().size():
                raise RuntimeError(
                    "weight, bias or extra[1] was freed before its gradient arrived, which would be lost: under "
                    "fully_shard with reshard_after_forward=False, run the loss inside the head's forward "
                    "(dllm_kernels.distributed.LossHead) where the head is also called by itself in the same step"
                )


def scaled_rows(grad: Tensor | None, factor: Tensor | None) -> Tensor | None:
    """Multiply each row by a factor, such as its upstream gradient. A factor of 0 gives 0 even if the row has NaN."""
    if grad is None or factor is None:
        return None
    factor = factor.reshape(-1, 1)
    return torch.where(factor != 0, grad * factor, 0.0).to(grad.dtype)
