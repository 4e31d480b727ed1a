"""Deferred logits, and what is computed from them, in the sample calls of PyTorch's own tests of its operations."""

import contextlib
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from dllm_kernels.deferred._head import deferred_logits

GROUPS, SAMPLES = 60, 6


def first_ids(z):
    return torch.zeros(z.shape[:-1], dtype=torch.int64)


OF_LOGITS = {
    "logits": lambda z: z, "transposed": lambda z: z.mT, "halved": lambda z: z / 2, "exp": torch.exp,
    "capped": lambda z: (z / 3).tanh() * 3,
    "a class set": lambda z: z.masked_fill(torch.arange(z.shape[-1]) == 1, -torch.inf),
    "probabilities": lambda z: z.softmax(-1), "log-probabilities": lambda z: z.log_softmax(-1),
}  # fmt: skip
OF_ROWS = {
    "NLL": lambda z: F.cross_entropy(z.movedim(-1, 1), first_ids(z), reduction="none"),
    "logsumexp": lambda z: z.logsumexp(-1), "maximum": lambda z: z.max(-1).values, "class": lambda z: z[..., 2],
    "gathered": lambda z: z.gather(-1, first_ids(z)[..., None]).squeeze(-1),
    "entropy": lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1),
    "function": lambda z: z.softmax(-1).square().sum(-1),
}  # fmt: skip
# Random results, and those of which a rounding step is no rounding step
INEXACT = (
    "bernoulli", "cauchy", "dropout", "empty", "exponential", "geometric", "multinomial", "normal", "rand", "rrelu",
    "bfloat16", "float", "half", "hash",
)  # fmt: skip


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.lm_head = nn.Linear(*weight.T.shape, bias=False, dtype=weight.dtype)
        self.lm_head.weight.data.copy_(weight)

    def forward(self, hidden):
        return self.lm_head(hidden)


def outcome(function, sample, receive, deferred, in_place):
    """Return what a call returns, which results require a gradient, and the gradients; or the error that it raises."""
    leaves = []

    def received(t):
        tensor = isinstance(t, torch.Tensor) and t.dtype == torch.float64 and t.layout == torch.strided
        if not tensor or t.dim() <= (receive in OF_LOGITS) or not t.numel() or not t.isfinite().all():
            return t.detach().clone() if isinstance(t, torch.Tensor) else t
        hidden, weight = t.mT if receive == "transposed" else t, None
        if receive in OF_ROWS:
            hidden, weight = torch.stack([t, t / 2], -1), torch.arange(6.0).sin().view(3, 2).double()
        hidden = hidden.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        model = Head(torch.eye(hidden.shape[-1]).double() if weight is None else weight)
        leaves.extend([hidden, model.lm_head.weight])
        with deferred_logits(model) if deferred else contextlib.nullcontext():
            logits = model(hidden)
        return (OF_ROWS | OF_LOGITS)[receive](logits)

    torch.manual_seed(0)
    args, kwargs = tree_map(received, ([sample.input, *sample.args], sample.kwargs))
    try:
        results = tree_leaves((function(*args, **kwargs), args[0] if in_place else None))
        tensors = [t for t in results if isinstance(t, torch.Tensor)]
        trained = [t for t in tensors if t.requires_grad]
        loss = sum((t * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum().abs() for t in trained)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if trained else ()
    except Exception as error:
        return error
    results = [torch.as_tensor(t.detach()).clone() if isinstance(t, torch.Tensor) else t for t in results]
    nan = [g is not None and g.isnan().any() for g in gradients]  # that of a class is one of its row
    gradients = [torch.full_like(g, torch.nan) if is_nan else g for g, is_nan in zip(gradients, nan, strict=True)]
    return results, [t.requires_grad for t in tensors], gradients


@pytest.fixture
def operations(monkeypatch):
    pytest.importorskip("expecttest")  # which their module imports
    monkeypatch.setattr(torch.backends, "disable_global_flags", lambda: None)  # which it calls
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

        yield [op for op in op_db if torch.float64 in op.dtypes]


@pytest.mark.everyday(4)
@pytest.mark.parametrize("group", range(GROUPS))
def test_they_have_the_results_and_gradients_that_they_have_of_tensors(group, operations):
    receivers, calls = itertools.cycle([*OF_LOGITS, *OF_ROWS]), 0
    for op in operations[group::GROUPS]:
        samples = itertools.islice(op.sample_inputs("cpu", torch.float64), SAMPLES)
        functions = dict.fromkeys(f for f in (op.op, op.method_variant, op.inplace_variant) if f)
        for sample, function in itertools.product(samples, functions):
            receive, in_place = next(receivers), function is op.inplace_variant
            call = f"{op.name} of {receive}: {sample}"
            expected, found = (outcome(function, sample, receive, deferred, in_place) for deferred in (False, True))
            if isinstance(expected, Exception):  # ours keep what backward needs, where torch refuses the change
                assert isinstance(found, Exception) or "modified by an inplace" in str(expected), call
                continue
            if isinstance(found, NotImplementedError) and "must not be called" in str(found):
                continue
            assert not isinstance(found, Exception), f"{call} raises {found!r}"
            calls += 1
            if not any(name in op.name for name in INEXACT):
                torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda m, call=call: f"{call}\n{m}")
    assert calls > 20
