"""Deferred logits without ``fused_head``: heads that are refused silently, and operators of Python."""

import math
import operator
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from dllm_kernels.deferred import _expressions
from dllm_kernels.deferred._classes import ConstantRows, DeferredColumn
from dllm_kernels.deferred._head import deferred_logits
from dllm_kernels.deferred._logits import DeferredLogits
from dllm_kernels.deferred._nll import DeferredNLL
from dllm_kernels.deferred._pending import DeferredStat
from dllm_kernels.deferred._terms import Term
from tests.conftest import DEVICE

V, D = 7, 5


class Model(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = head or nn.Linear(D, V)

    def forward(self, hidden):
        return self.lm_head(hidden)


def deferred():
    """Return deferred logits, and the logits."""
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE, requires_grad=True)
    with deferred_logits(model) as defers:
        assert defers
        out = model(hidden)
    assert "forward" not in vars(model.lm_head)
    return out, model(hidden)


IN_PLACE = [
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow
]  # fmt: skip


@pytest.mark.parametrize("change", IN_PLACE, ids=lambda change: change.__name__)
def test_in_place_changes_are_visible_through_every_reference(change):
    out, logits = deferred()
    changed = change(out, 2)
    assert changed is out or changed is out.materialize()
    torch.testing.assert_close(torch.as_tensor(out.materialize()), change(logits, 2))
    changed += 1
    assert torch.equal(out.float(), logits + 1)


def test_their_truth_value_is_that_of_the_tensor():
    out, logits = deferred()
    for question in (bool, float, int):
        with pytest.raises((RuntimeError, ValueError), match=r"ambiguous|converted to"), torch.no_grad():
            question(out)
    assert logits.max().item() in out
    assert 1e9 not in out
    assert {out: 1}[out] == 1  # they hash by identity, as tensors do


def test_an_operation_that_changes_nothing_returns_the_same_object():
    out, _ = deferred()
    lse = out.logsumexp(-1)
    assert lse.flatten(0, 0) is lse
    loss = nn.functional.cross_entropy(out.flatten(0, -2), torch.zeros(6, dtype=torch.int64, device=DEVICE))
    assert loss.to(loss.dtype) is loss


class Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def hooked():
    head = nn.Linear(D, V)
    head.register_forward_hook(lambda module, args, output: output * 2)
    return head


@pytest.mark.parametrize("head", [Adapted(D, V), hooked(), nn.Sequential(nn.Linear(D, V))], ids=str)
def test_a_head_that_is_more_than_linear_computes_its_logits(head):
    model, hidden = Model(head), torch.randn(2, 3, D)
    with deferred_logits(model) as defers:
        assert not defers
        assert torch.is_tensor(model(hidden))


def test_a_model_without_a_head_is_left_alone():
    with deferred_logits(nn.Sequential()) as defers:
        assert not defers


def test_the_autocast_state_of_the_call_is_used():
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16), deferred_logits(model):
        narrow = model(hidden)
    with deferred_logits(model):
        wide = model(hidden)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected, found = model(hidden), wide.materialize()
    torch.testing.assert_close(narrow.materialize(), expected)
    torch.testing.assert_close(torch.softmax(narrow.float(), -1), torch.softmax(expected.float(), -1))
    torch.testing.assert_close(found, model(hidden))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_reading_them_under_no_grad_keeps_their_gradient(mode):
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE, requires_grad=True)
    with deferred_logits(model):
        out = model(hidden)
    with mode():
        out.argmax(-1)
        out.exp()
    got, expected = (torch.autograd.grad(z.square().sum(), hidden)[0] for z in (out.materialize(), model(hidden)))
    torch.testing.assert_close(got, expected)


PASSES = {
    "a sum": (lambda rows: rows.exp().sum(), 1),
    "a sum of weighted rows": (lambda rows: (rows.sqrt() * torch.ones(3, device=DEVICE)).mean(), 1),
    "values": (lambda rows: (lambda r: torch.min(r * 2, r.clamp(max=1) + 1).sum() + r.sum())(rows.exp()), 2),
}


@pytest.mark.parametrize("name", PASSES)
def test_sums_of_a_function_of_rows_take_one_pass_and_other_uses_share_the_values(name, monkeypatch):
    calls, evaluated, (loss, passes) = [], _expressions._evaluated, PASSES[name]
    monkeypatch.setattr(_expressions, "_evaluated", lambda *args, **kw: (calls.append(0), evaluated(*args, **kw))[1])
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE)
    with deferred_logits(model):
        loss(model(hidden).softmax(-1).square().sum(-1)).backward()
    assert len(calls) == passes


TARGETS = torch.tensor([[0, 1, 6], [2, 3, 4]], device=DEVICE)
RECEIVERS = {
    "logits": lambda z: z,
    "log-probabilities": lambda z: z.log_softmax(-1),
    "NLL": lambda z: F.cross_entropy(z.flatten(0, 1), TARGETS.flatten(), reduction="none").view(2, 3),
    "probabilities": lambda z: z.softmax(-1),
    "statistic": lambda z: z.logsumexp(-1),
    "constant": lambda z: torch.full_like(z, 1.0),
    "class": lambda z: z[..., 2],
}
X, MASK = "itself", torch.ones(2, 3, V, device=DEVICE) > 0
ROWS = TARGETS.float()
ODD = [  # operands after the first one, or all of them
    (), (2,), (True,), (math.nan,), (-1,), (1j,), (MASK[0, 0].float().requires_grad_(),), (ROWS[..., None],), (ROWS,),
    (MASK.double(),), (MASK,), (TARGETS[..., None],), ((-1, 0),), (..., 0), (..., ..., 0), (TARGETS < 2,), (X,), (X, X),
    (TARGETS < 2, 0.5), (TARGETS < 2, ROWS), (MASK, 1.5), (MASK.float(), X), (0, True), (-1, True), (0, 0), (1, -1, 2),
    (X, ROWS, X), (MASK, X, 1.0), (TARGETS[..., None] < 2, X), (TARGETS < 2, X, ROWS), (TARGETS < 2, X, X),
    (ROWS, {"alpha": math.inf}), (2, {"alpha": 2}), (ROWS, {"out": ROWS.clone()}), ({"dtype": torch.float64},),
    (torch.float64, True), ({"dim": ()},), (ROWS[0],), (ROWS[:, 0],), (ROWS[:, :1],), (math.inf,),
    ("ij,ij->ij", X, X), ("ij,ij", X, ROWS), ("ij,ij", X, ROWS.double()), ("ij,jk->ik", X, ROWS.mT), ("ij->ji", X),
    ("ij,kl->ijkl", X, ROWS), ("...,...->...", X, ROWS), ("ijk,ijk->ij", X, MASK.float()), ("ijk->ik", X),
]  # fmt: skip
UNLIKE = {"rand_like", "randn_like", "empty_like", "new_empty", "to", "type", "huber_loss"}
# random, a number is a dtype, or the backward refuses other dtypes


TYPES = {
    "logits": DeferredLogits, "log-probabilities": DeferredLogits, "NLL": DeferredNLL, "probabilities": Term,
    "statistic": DeferredStat, "constant": ConstantRows, "class": DeferredColumn,
}  # fmt: skip
NAMES = {kind: {rule: name for name, rule in t.rules.items() if name not in UNLIKE} for kind, t in TYPES.items()}
CALLS = [
    pytest.param(kind, function, id=f"{kind}-{name}")
    for kind in RECEIVERS
    for name in NAMES[kind].values()
    if (function := next(filter(callable, (getattr(place, name, None) for place in (torch.Tensor, torch, F))), None))
]


@pytest.mark.parametrize(("kind", "function"), CALLS)
def test_functions_with_odd_operands_return_what_they_do_for_tensors(kind, function):
    """One function of each rule. What torch refuses may be refused later, when the values are computed."""
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE)
    logits = model(hidden)

    def result(operands, z):
        x = RECEIVERS[kind](z)
        args = [x if o is X else o.clone() if isinstance(o, torch.Tensor) else o for o in operands]
        named = args.pop() if args and isinstance(args[-1], dict) else {}
        value = function(*args, **named)
        return x, tree_map(lambda t: t.materialize() if hasattr(t, "materialize") else t, value)

    with deferred_logits(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operands in ODD:
            operands = operands if any(o is X for o in operands[1:]) else (X, *operands)
            try:
                expected = result(operands, logits.clone())
            except Exception:
                continue
            if expected[1] is not NotImplemented:
                torch.testing.assert_close(result(operands, model(hidden)), expected, equal_nan=True)
