"""Deferred logits: equal values and gradients for every use, and no computation without a use."""

import copy
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree

from dllm_kernels.deferred._head import FusedHead, deferred_logits
from dllm_kernels.deferred._logits import DeferredLogits
from tests.conftest import DEVICE

V, D = 7, 5


class Model(nn.Module):
    def __init__(self, after=lambda z: z):
        super().__init__()
        torch.manual_seed(0)
        self.lm_head, self.after = nn.Linear(D, V), after

    def forward(self, hidden):
        return self.after(self.lm_head(hidden))


def deferred(after=lambda z: z):
    """Return the model's output, its hidden states, and the logits that it would compute."""
    model, hidden = Model(after).to(DEVICE), torch.randn(2, 3, D, device=DEVICE, requires_grad=True)
    with deferred_logits(model) as defers:
        assert defers
        out = model(hidden)
    assert "forward" not in vars(model.lm_head)
    return out, hidden, model(hidden)


USES = {
    "a function": lambda z: torch.softmax(z, -1),
    "a function of several": lambda z: torch.cat([torch.zeros_like(z), z, z.detach()], 1),
    "a loss": lambda z: F.cross_entropy(z.flatten(0, 1), torch.zeros(6, dtype=torch.long, device=DEVICE)),
    "a method": lambda z: z.log_softmax(-1),
    "an attribute": lambda z: z.mT.contiguous(),
    "an index": lambda z: z[:, 1:, None],
    "arithmetic": lambda z: (2 - 3 * z + z / 2) ** 2 - z @ torch.ones(V, 1, device=DEVICE) + 1 / z.exp(),
    "itself": lambda z: z * z + z,
    "a negative": operator.neg,
    "a comparison": lambda z: torch.where(z > 0, z, 0.0),
    "an absolute value": abs,
    "a remainder": lambda z: z % 0.7,
    "a positive": lambda z: (+z) * z,
    "equality": lambda z: torch.where(z == z.max().item(), z, 0.0) + torch.where(z != z.min().item(), z, 0.0),
    "a cast to integers": lambda z: z.to(torch.int32) * z,
    "iteration": lambda z: torch.stack([*z, z[len(z) - 1]]),
    "out of place, in place": lambda z: z.clone().mul_(2),
    "half of a cap": lambda z: torch.tanh(z / 2.0),
    "a cap of other sizes": lambda z: torch.tanh(z / 2.0) * 3.0,
    "a tensor for a cap": lambda z: torch.tanh(z / torch.full((V,), 2.0, device=DEVICE)) * 2.0,
    "a negative cap": lambda z: torch.tanh(z / -2.0) * -2.0,
    "a second cap": lambda z: torch.tanh(torch.tanh(z / 2.0) * 2.0 / 3.0) * 3.0,
    "no cap": lambda z: z.tanh() * 2.0,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_operation_applies_to_the_logits(use):
    for inside in (True, False):
        out, hidden, logits = deferred(use if inside else lambda z: z)
        out = out if inside else use(out)
        out = out.materialize() if isinstance(out, DeferredLogits) else out
        expected = logits if inside else use(logits)
        torch.testing.assert_close(out, expected)
        got, want = (torch.autograd.grad(x.sum(), hidden)[0] for x in (out, expected))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_a_cast_that_changes_values_is_computed(dtype):
    out, _, logits = deferred(lambda z: z.to(dtype))
    assert torch.is_tensor(out)
    assert out.dtype == dtype
    assert torch.equal(out.to(torch.complex64), logits.to(torch.complex64))


@pytest.mark.parametrize("use", [lambda z: z // 0.7, lambda z: 2 // z, lambda z: 2 % z, lambda z: 0.7 // z % z])
def test_operations_without_a_gradient_equal_those_on_the_logits(use):
    out, _, logits = deferred()
    torch.testing.assert_close(use(out), use(logits))


IN_PLACE = [
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow
]  # fmt: skip


@pytest.mark.parametrize("change", IN_PLACE, ids=lambda change: change.__name__)
def test_in_place_changes_are_visible_through_every_reference(change):
    out, _, logits = deferred()
    changed = change(out, 2)
    assert changed is out or changed is out.materialize()
    torch.testing.assert_close(torch.as_tensor(out.materialize()), change(logits, 2))
    changed += 1
    assert torch.equal(out.float(), logits + 1)


def test_their_truth_value_is_that_of_the_tensor():
    out, _, _ = deferred()
    for question in (bool, float, int):
        with pytest.raises((RuntimeError, ValueError), match=r"ambiguous|converted to"), torch.no_grad():
            question(out)
    out, _, logits = deferred()
    assert logits.max().item() in out
    assert 1e9 not in out
    assert {out: 1}[out] == 1  # they hash by identity, as tensors do


CAP = 2.5
HANDED_ON = {
    "nothing": (lambda z: z, None, torch.float32),
    "float": (lambda z: z.float(), None, torch.float32),
    "a cast": (lambda z: z.to(torch.float16), None, torch.float16),
    "a cast by name": (lambda z: z.to(dtype=torch.bfloat16), None, torch.bfloat16),
    "a cap": (lambda z: torch.tanh(z / CAP) * CAP, CAP, torch.float32),
    "a cap, by methods": (lambda z: CAP * (z.float() / CAP).tanh(), CAP, torch.float32),
    "a cap of an int": (lambda z: torch.tanh(z / 3) * 3, 3, torch.float32),
}


@pytest.mark.parametrize(("after", "softcap", "dtype"), HANDED_ON.values(), ids=HANDED_ON)
def test_casts_and_soft_caps_are_remembered(after, softcap, dtype):
    out, hidden, logits = deferred(after)
    assert out.usable
    assert torch.equal(out.hidden, hidden)
    assert (out.softcap, out.shape, out.dtype, out.device) == (softcap, logits.shape, dtype, logits.device)
    assert out.usable  # none of these operations computes the logits
    assert logits.dtype == dtype
    torch.testing.assert_close(out.materialize(), logits)


def test_logits_changed_in_place_are_no_longer_deferred():
    out, _, _ = deferred()
    out.mul_(0)
    assert not out.usable
    assert out.materialize().eq(0).all()
    assert out.float().eq(0).all()
    assert (out / CAP).eq(0).all()


def test_the_head_is_called_at_most_once_and_only_if_needed(monkeypatch):
    calls = []
    inner = FusedHead.logits
    monkeypatch.setattr(FusedHead, "logits", lambda self, *args: calls.append(args[1]) or inner(self, *args))
    out, hidden, _ = deferred()
    assert not calls
    assert out.materialize() is out.materialize()
    assert len(calls) == 1
    assert torch.equal(calls[0][0], hidden)


def test_a_second_forward_pass_defers_too():
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE)
    with deferred_logits(model):
        first = model(hidden)
        first.materialize()
        assert isinstance(model(hidden), DeferredLogits)


def test_copies_and_pytrees_keep_the_deferred_logits():
    out, _, logits = deferred(lambda z: torch.tanh(z / CAP) * CAP)
    leaves, spec = _pytree.tree_flatten({"logits": out})
    again = _pytree.tree_unflatten(leaves, spec)["logits"]
    assert again is out
    assert again.usable
    assert again.softcap == CAP
    torch.testing.assert_close(copy.copy(out), logits)
    torch.testing.assert_close(pickle.loads(pickle.dumps(out)), logits)
    operator.iadd(out, 1)
    torch.testing.assert_close(_pytree.tree_map(lambda leaf: leaf, out).materialize(), logits + 1)


class Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def hooked():
    head = nn.Linear(D, V)
    head.register_forward_hook(lambda module, args, output: output * 2)
    return head


@pytest.mark.parametrize("head", [Adapted(D, V), hooked(), nn.Sequential(nn.Linear(D, V)), None], ids=str)
def test_a_head_that_is_more_than_linear_computes_its_logits(head):
    model, hidden = Model(), torch.randn(2, 3, D)
    model.lm_head = head
    with deferred_logits(model) as defers:
        assert not defers
        assert head is None or torch.is_tensor(model(hidden))


def test_a_compiled_model_computes_its_logits():
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE)
    expected, compiled = model(hidden), torch.compile(model, backend="eager")
    for _ in range(2):
        with deferred_logits(compiled):
            torch.testing.assert_close(compiled(hidden), expected)
        torch.testing.assert_close(compiled(hidden), expected)


@pytest.mark.exhaustive
def test_a_model_of_transformers_passes_them_on():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).to(DEVICE), torch.randint(0, V, (2, 3), device=DEVICE)
    with deferred_logits(model) as defers:
        out = model(input_ids=ids).logits
    assert defers
    assert out.usable
    torch.testing.assert_close(out.materialize(), model(input_ids=ids).logits)
    torch.testing.assert_close(out.hidden, model(input_ids=ids, output_hidden_states=True).hidden_states[-1])


def test_under_autocast_they_have_its_dtype():
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16), deferred_logits(model):
        out = model(hidden)
        assert out.dtype == torch.bfloat16
        assert out.usable
        assert out.materialize().dtype == torch.bfloat16


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_logits_of_a_call_without_gradients_are_constants(mode):
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE)
    with deferred_logits(model), mode():
        out = model(hidden)
        assert out.usable
    assert not out.requires_grad
    assert not F.cross_entropy(out[0], torch.zeros(3, dtype=torch.long, device=DEVICE)).requires_grad
    materialized = out.materialize()
    assert not materialized.requires_grad
    torch.testing.assert_close(materialized.clone(), model(hidden).detach())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_reading_them_under_no_grad_keeps_their_gradient(mode):
    out, hidden, logits = deferred()
    with mode():
        out.argmax(-1)
    (got,) = torch.autograd.grad(out.materialize().square().sum(), hidden)
    (expected,) = torch.autograd.grad(logits.square().sum(), hidden)
    torch.testing.assert_close(got, expected)


def test_the_autocast_state_of_the_call_is_used():
    model, hidden = Model(lambda z: z.float()).to(DEVICE), torch.randn(2, 3, D, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected = model(hidden)
        with deferred_logits(model):
            out = model(hidden.bfloat16())
    torch.testing.assert_close(torch.softmax(out, -1), torch.softmax(expected, -1))
    with deferred_logits(model):
        out = model(hidden)
    with torch.autocast(DEVICE, torch.bfloat16):
        materialized = out.materialize()
    torch.testing.assert_close(materialized, model(hidden))


def test_hidden_states_modified_before_the_first_use_raise():
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE)
    for use in (DeferredLogits.materialize, lambda z: z[:, 1:].argmax(-1), lambda z: z.float().exp()):
        with deferred_logits(model):
            out, seen = model(hidden), model(hidden)
        materialized = seen.materialize()
        hidden.mul_(2)
        with pytest.raises(RuntimeError, match="modified between the head and the use of its"):
            use(out)
        assert seen.materialize() is materialized


def test_a_cast_to_the_same_dtype_returns_the_same_object():
    out, _, _ = deferred()
    assert out.float() is out
    assert out.to(torch.float32) is out
    assert out.double() is not out
