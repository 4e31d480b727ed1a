"""Losses of NeMo AutoModel from hidden states with LoRA on the LM head equal the losses of the model's logits."""

import importlib.util
import itertools

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from dllm_kernels.integrations.nemo_automodel import deferred_logits
from dllm_kernels.integrations.transformers import loss_in_head
from tests.conftest import every_time
from tests.support import nemo_lora as host
from tests.support.hosts import found
from tests.support.nemo_lora import LOSSES, adapted, batch, results

absent = [name for name in ("nemo_automodel", "transformers", "peft") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.peer, pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} not installed")]
KINDS = ["LinearLoRA", "patched", "plain autograd", "Triton", "PEFT", "PEFT, trained copy"]
SHARDED, UNITS = ("LinearLoRA", "patched", "PEFT"), ("a unit of its own", "in the root")


@pytest.fixture(autouse=True, scope="module")
def fused():
    """Patch the host as with ``fuse_head=True``."""
    with host.fused():
        yield


def assert_same(loss, model, inputs, trained):
    from_hidden_states, from_logits = (results(one, model, inputs) for one in LOSSES[loss])
    assert {name for name, grad in from_logits.items() if grad is not None} == {"loss", "hidden", *trained}
    for name, expected in from_logits.items():
        if expected is None:
            assert from_hidden_states[name] is None, name
        else:
            torch.testing.assert_close(from_hidden_states[name], expected, rtol=1e-10, atol=1e-10, msg=name)
            assert expected.abs().max() > 0


def trained_names(model):
    head = model.get_output_embeddings()
    return {name for name, p in head.named_parameters() if p.requires_grad}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_with_lora_trains_as_from_logits(loss, kind):
    model = adapted(kind)
    trained = trained_names(model)
    assert len(trained) in (2, 3)  # A and B, and the bias of B in PEFT; weight and bias of a copy
    assert_same(loss, model, batch(), trained)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["LinearLoRA", "patched", "plain autograd", "Triton"])
@pytest.mark.parametrize("loss", every_time(["calculate_loss", "PipelineCausalLMLoss", "hybrid"], LOSSES))
def test_dropout_before_the_adapter_draws_the_same_as_from_logits(loss, kind):
    model = adapted(kind, dropout=0.4, dropout_position="pre")
    kept = results(LOSSES[loss][0], model, batch())["loss"]
    assert_same(loss, model, batch(), trained_names(model))
    assert kept != results(LOSSES[loss][0], model.eval(), batch())["loss"]


REFUSED = {
    "dropout": ({"dropout": 0.4, "dropout_position": "post"}, "dropout after lora_B"),
    "DoRA": ({"use_dora": True}, "DoRA"),
}
TAKE_WEIGHTS = [loss for loss in LOSSES if "loss" in loss.lower() and loss != "encoder_ar_loss"]


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("loss", TAKE_WEIGHTS)
def test_adapters_beyond_low_rank_are_rejected_by_name(loss, message):
    options, reason = REFUSED[message]
    for kind in ("LinearLoRA", "patched"):
        name = rf"nemo_automodel\.components\._peft\.lora\.{'Linear' if kind == 'LinearLoRA' else 'PatchedLinear'}LoRA"
        with pytest.raises(
            ValueError, match=rf"^the LM head must be an nn\.Linear .*, got {name} with {reason}; use a"
        ):
            results(LOSSES[loss][0], adapted(kind, **options), batch())


@pytest.mark.parametrize("message", REFUSED)
def test_logits_of_rejected_adapters_are_not_deferred(message):
    model = adapted(**REFUSED[message][0])
    with deferred_logits(model) as defers:
        assert not defers
        assert torch.is_tensor(model(batch()[0]))


def quantized(model):
    """Mark a head as the host marks a base layer of bitsandbytes, whose forward the head then calls."""
    model.lm_head.super_fwd = lambda hidden: hidden


def packed(model):
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(7, 1, dtype=torch.uint8), requires_grad=False)


def hooked(model):
    model.lm_head.register_forward_hook(lambda *_: None)


def hooked_within(model):
    model.lm_head.lora_B.register_forward_hook(lambda *_: None)


def replaced(model):
    model.lm_head.forward = lambda hidden: hidden


CHANGES = {
    quantized: "with a base layer that is quantized or of another library",
    packed: r"PatchedLinearLoRA with a weight \(7, 1\) of uint8; ",
    hooked: "got a hook",
    hooked_within: "with a hook",
    replaced: "with a forward set on the object",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_head_that_computes_something_else_is_rejected(change):
    model = adapted()
    change(model)
    with pytest.raises(ValueError, match=rf"^the LM head must .*{CHANGES[change]}"):
        host.calculate_loss(model, *batch())
    with deferred_logits(model) as defers:
        assert not defers


PARTS = {
    "all of it": lambda head: head,
    "base_layer": lambda head: head.base_layer,
    "lora_A": lambda head: head.lora_A["default"],
    "lora_B": lambda head: head.lora_B["default"],
    "the copy": lambda head: head.modules_to_save["default"],
}
CALLS = [
    *itertools.product(["PEFT"], ["all of it", "base_layer", "lora_A", "lora_B"]),
    *itertools.product(["PEFT, trained copy"], ["all of it", "the copy"]),
]


def scaled(module):
    module.forward = lambda hidden, forward=module.forward: 2 * forward(hidden)


def offloaded(module):
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(module, hooks.ModelHook())


CHANGED_CALLS = {
    scaled: r"with a forward set on the object; ",
    offloaded: r"with a forward set on the object; ",
    lambda module: module.register_forward_hook(lambda *_: None): " hook, ",
    lambda module: module.register_forward_pre_hook(lambda *_: None): " hook, ",
}


@pytest.mark.everyday(8)
@pytest.mark.parametrize("change", CHANGED_CALLS)
@pytest.mark.parametrize(("kind", "part"), CALLS)
def test_a_changed_call_of_a_head_of_peft_is_rejected_and_kept(kind, part, change):
    model = adapted(kind).eval()
    head = model.get_output_embeddings()
    change(PARTS[part](head))
    hidden = batch()[0][0]
    expected, message = model(hidden), rf"^the LM head must .*{CHANGED_CALLS[change]}"
    with pytest.raises(ValueError, match=message), loss_in_head(model, lambda *_, **__: None):
        pass
    with pytest.raises(ValueError, match=message):
        host.calculate_loss(model, *batch())
    with deferred_logits(model) as defers:
        assert not defers
    assert torch.equal(model(hidden), expected)


@pytest.mark.parametrize("kind", ["LinearLoRA", "patched", *KINDS[-2:], "plain"])
def test_a_call_within_another_call_of_the_same_head_is_rejected(kind):
    model = host.Model().double() if kind == "plain" else adapted(kind).eval()
    head, hidden, ours = model.get_output_embeddings(), batch()[0][0], torch.zeros(3)
    expected = model(hidden)
    message = "^the LM head must .* with the forward of another call that replaces the same head and has .*; "
    for outer in (loss_in_head(model, lambda *_, **__: ours), deferred_logits(model)):
        with outer:
            during = head.forward
            with pytest.raises(ValueError, match=message), loss_in_head(model, lambda *_, **__: None):
                pass
            assert head.forward == during
        assert "forward" not in vars(head)
    assert torch.equal(model(hidden), expected)


@pytest.mark.parametrize(("kind", "part"), [("PEFT", "base_layer"), ("PEFT, trained copy", "original_module")])
def test_quantized_weights_in_plain_layers_are_rejected_by_name(kind, part):
    """torchao's weights are tensor subclasses in an nn.Linear.

    PEFT's LoRA of such a layer has the forward of a plain one.
    """
    model = adapted(kind)
    model.base_model.disable_adapter_layers()
    linear = getattr(model.get_output_embeddings(), part)
    linear.weight = torch.nn.Parameter(TwoTensor(linear.weight.data, linear.weight.data), requires_grad=False)
    with pytest.raises(ValueError, match=r"^the LM head must .*, got torch\.nn\..*Linear with a weight of .*Tensor; "):
        host.calculate_loss(model, *batch())
    with deferred_logits(model) as defers:
        assert not defers


def test_a_merged_adapter_that_is_then_disabled():
    """PEFT unmerges it from the weight at the next call of the head."""
    model, inputs = adapted("PEFT", lora_bias=False), batch()
    plain = model.get_output_embeddings().base_layer.weight.detach().clone()
    model.base_model.merge_adapter()
    merged = results(host.calculate_loss, model, inputs)["loss"]
    model.base_model.disable_adapter_layers()
    head = model.get_output_embeddings()
    assert merged != results(host.calculate_loss, model, inputs)["loss"]
    torch.testing.assert_close(head.base_layer.weight.detach(), plain)


@pytest.mark.parametrize("loss", every_time(["calculate_loss"], LOSSES))
@pytest.mark.parametrize("position", ["pre", "post"])
def test_inactive_dropout(loss, position):
    model = adapted(dropout=0.4, dropout_position=position).eval()
    if loss == "PipelineCausalLMLoss":  # MTP runs in training mode only
        model.training = True
    assert_same(loss, model, batch(), trained_names(model))
    model = adapted(dropout=0.0, dropout_position=position)
    assert_same(loss, model, batch(), trained_names(model))


@pytest.mark.parametrize("loss", every_time(["hybrid"], LOSSES))
def test_a_frozen_adapter_still_adds_to_the_logits(loss):
    model = adapted()
    model.requires_grad_(False)
    assert_same(loss, model, batch(), set())


@pytest.mark.parametrize("kind", ["PEFT", "PEFT, trained copy"])
@pytest.mark.parametrize("loss", every_time(["calculate_loss", "MDLM"], LOSSES))
def test_a_disabled_adapter_adds_nothing(loss, kind):
    model, inputs = adapted(kind), batch()
    plain = results(LOSSES[loss][1], adapted("LinearLoRA").requires_grad_(False), inputs)["loss"]
    with model.disable_adapter():
        assert_same(loss, model, inputs, set())
        assert plain != results(LOSSES[loss][0], model, inputs)["loss"]


@pytest.mark.parametrize("loss", every_time(["calculate_loss"], LOSSES))
def test_a_trained_base_layer_gets_its_gradient_too(loss):
    model = adapted()
    model.lm_head.weight.requires_grad_(True)
    model.lm_head.bias.requires_grad_(True)
    assert_same(loss, model, batch(), {"weight", "bias", "lora_A.weight", "lora_B.weight"})


@pytest.mark.parametrize("loss", every_time(["PipelineCausalLMLoss", "MDLM"], LOSSES))
def test_float32_adapters_of_a_bfloat16_head(loss):
    """The host needs autocast to compute these logits. The package's are as close to float64 as the host's."""
    model = adapted(dtype=torch.bfloat16, lora_dtype="float32", dropout_position="pre")
    exact_model = adapted(lora_dtype=torch.float64, dropout_position="pre")
    exact_model.load_state_dict(model.state_dict())
    inputs = batch(torch.bfloat16)
    wide = (inputs[0].detach().double().requires_grad_(True), *inputs[1:])
    exact = results(LOSSES[loss][1], exact_model, wide)
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = (results(one, model, inputs) for one in LOSSES[loss])
    for name in ("loss", "hidden", "lora_A.weight", "lora_B.weight"):
        assert ours[name].dtype == (torch.bfloat16 if name == "hidden" else torch.float32), name
        error, plain_error = ((got[name].double() - exact[name]).norm() for got in (ours, plain))
        assert error <= 2 * plain_error + 2**-8 * exact[name].norm(), name
    cast = results(LOSSES[loss][0], model, inputs)  # the adapters are cast to bfloat16 like the head
    torch.testing.assert_close(cast["loss"], ours["loss"], rtol=2**-6, atol=0)


def test_deferred_logits_lead_to_every_trained_parameter():
    """DistributedDataParallel waits for the gradients of all parameters reachable from the model's output."""
    model = adapted()
    with deferred_logits(model):
        logits = model(batch()[0])
    logits.sum().backward()
    assert {name for name, p in model.lm_head.named_parameters() if p.grad is not None} == trained_names(model)
    assert logits.shape == (3, 2, 8, host.V)


@pytest.fixture(scope="module")
def ranks(several_processes):
    """Return the results of the two ranks of ``nemo_lora_ranks.py``."""
    return found(several_processes, "lora")


def sharded_cases():
    """Each loss runs with one kind and one unit; ``test_a_head_with_lora_trains_as_from_logits`` has all kinds."""
    for case in itertools.product(LOSSES, SHARDED, UNITS):
        i = [*LOSSES].index(case[0])
        rare = [] if case[1:] == (SHARDED[i % 3], UNITS[i % 2]) else [pytest.mark.every_case]
        yield pytest.param(*case, marks=[pytest.mark.ranks("lora", case), *rare])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("loss", "kind", "unit"), [*sharded_cases()])
def test_a_sharded_head_with_lora_trains_as_from_logits(ranks, loss, kind, unit):
    for of_rank in ranks:
        sharded, expected = of_rank[loss, kind, unit]
        assert sum("lora_" in name for name, grad in expected.items() if grad is not None) >= 2
        for name, value in expected.items():
            if value is None:
                assert sharded[name] is None, name
            else:
                torch.testing.assert_close(sharded[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.exhaustive
@pytest.mark.ranks("lora", ())
def test_adapters_split_by_tensor_parallelism_are_rejected(ranks):
    for of_rank in ranks:
        for error, placement in zip(of_rank["tensor parallel"], ("Replicate()", "Shard(dim=0)"), strict=True):
            assert error.startswith("the adapter of the LM head must not be split by tensor parallelism for hidden")
            assert f"got ({placement},); use a base loss from logits" in error


def test_the_low_rank_part_of_the_losses_is_checked():
    loss_fn, (hidden, labels, _, _) = host.fused_loss(), batch()
    u, second = torch.randn(2, 8, 3).double(), torch.randn(host.V, 3).double()
    weight = torch.randn(host.V, host.D).double()
    with pytest.raises(ValueError, match=r"^extra\[0\] must have shape"):
        loss_fn(hidden[0], labels, weight, extra=(u[:, 1:], second))
    model = adapted().requires_grad_(False)
    model.lm_head = torch.nn.Linear(host.D, host.V).double()
    with pytest.raises(ValueError, match=r"^extra\[0\] must have shape \(2, B, S, r\), .*, got \(3, 2, 8, 3\)"):
        host.calculate_mtp_loss(model, *batch(), extra=(torch.stack([u] * 3), second))
    masked = host.module("components.loss.masked_ce").MaskedCrossEntropy()
    logits = model(hidden[0])
    with pytest.raises(ValueError, match=r"^extra must be None for .*MaskedCrossEntropy, whose forward does not take"):
        host.module("components.loss.utils").calculate_loss(masked, logits=logits, labels=labels, extra=(u, second))
