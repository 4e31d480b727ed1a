"""torch's checks of the custom ops: schema, fake tensors, autograd registration, tracing."""

import contextlib
from unittest import mock

import torch

from dllm_kernels._core import _compiled, _custom_ops, _fused
from dllm_kernels._core._inputs import RowInputs

TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(op, inputs, plan, tests=TESTS):
    """Check the forward custom op and, if it is opaque, the backward one."""
    torch.library.opcheck(_compiled._rows, (op.name, *inputs.tensors, *plan.pack()), test_utils=tests)
    if not any(plan.needs) or op.inline_backward(plan) is not None:
        return
    inputs = RowInputs(*(None if t is None else t.detach() for t in inputs.tensors))
    outputs = op.forward(inputs, plan)
    differentiable = [outputs.get(out.name) for out in op.outputs if out.differentiable]
    upstream = [None if t is None else torch.randn_like(t) for t in differentiable]
    of_inputs, of_outputs = op.saved(plan)
    saved = [*(getattr(inputs, name) for name in of_inputs), *(outputs.get(name) for name in of_outputs)]
    torch.library.opcheck(_compiled._rows_backward, (op.name, saved, upstream, *plan.pack()))


@contextlib.contextmanager
def checked_ops():
    """Run every opaque function as its custom op, and let torch check each call; yields the names of the ops."""
    names, call = [], _custom_ops.call

    def checked(defined, args):
        op, flat = _custom_ops.OPS[defined.name], {}
        for parameter, value in zip(op.parameters, args, strict=True):
            flat.update(parameter.flattened(value))
        # Only autograd Functions call the ops, which have no formula for gradients of their own.
        flat = {name: t.detach() if isinstance(t, torch.Tensor) else t for name, t in flat.items()}
        tensors = [flat.pop(name) for name in op.tensors]
        torch.library.opcheck(op.overload, tuple(tensors), flat, test_utils=TESTS)
        names.append(defined.name)
        return call(defined, args)

    with mock.patch.object(_fused, "traced", lambda _: True), mock.patch.object(_custom_ops, "call", checked):
        yield names
