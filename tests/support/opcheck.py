"""torch's checks of the custom ops: schema, fake tensors, autograd registration, tracing."""

import torch

from dllm_kernels._core import _compiled
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
