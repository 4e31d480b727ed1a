"""A fused loss uses the weight of a head instead of the head, so the head must consist of weight and bias only."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import reference
from dllm_kernels import mtp
from dllm_kernels.distributed import LossHead, set_gradient_divide_factor
from dllm_kernels.integrations.transformers import loss_in_head

B, S, H, V = 2, 7, 4, 9
FUSED, FROM_LOGITS = mtp.FusedLinearCrossEntropy, mtp.MaskedCrossEntropy


class LoRALinear(nn.Linear):
    """A linear layer as an adapter library modifies it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.a, self.b = nn.Parameter(torch.randn(2, H)), nn.Parameter(torch.randn(V, 2))

    def forward(self, hidden):
        return super().forward(hidden) + hidden @ self.a.t() @ self.b.t()


class DoublesInput(LossHead):
    def forward(self, hidden, loss=None):
        return super().forward(2 * hidden, loss)


class SameAsLinear(nn.Linear):
    """A subclass that computes the same as nn.Linear."""

    def a_method(self):
        pass


def with_hook(register):
    def make():
        head = nn.Linear(H, V)
        getattr(head, register)(lambda *_: None)
        return head

    return make


def with_forward():
    head = nn.Linear(H, V)
    head.forward = lambda hidden: nn.functional.linear(2 * hidden, head.weight, head.bias)
    return head


MORE = {
    "adapter": (lambda: LoRALinear(H, V), r"tests\.losses\.test_head\.LoRALinear with a forward of its own"),
    "subclass of LossHead": (
        lambda: DoublesInput(H, V),
        r"tests\.losses\.test_head\.DoublesInput with a forward of its own",
    ),
    "forward set on it": (with_forward, r"torch\.nn\.modules\.linear\.Linear with a forward set on the object"),
    "forward hook": (with_hook("register_forward_hook"), r"torch\.nn\.modules\.linear\.Linear with a hook, .*lambda"),
    "forward pre-hook": (with_hook("register_forward_pre_hook"), r"torch\.nn\.modules\.linear\.Linear with a hook"),
    "backward hook": (with_hook("register_full_backward_hook"), r"torch\.nn\.modules\.linear\.Linear with a hook"),
    "backward pre-hook": (
        with_hook("register_full_backward_pre_hook"),
        r"torch\.nn\.modules\.linear\.Linear with a hook",
    ),
}


class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.lm_head = head
        self.train()

    def get_output_embeddings(self):
        return self.lm_head


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(B, S, H, dtype=dtype), torch.randint(0, V, (B, S))


def in_head(model, base):
    """Compute the loss inside the head's forward, as the Trainer's mixin does."""
    hidden, labels = inputs()

    def loss(h, weight, bias):
        return FUSED()(h, labels, weight, lm_bias=bias)

    with loss_in_head(model, loss):
        return model.lm_head(hidden)


def loss_head(model, base):
    hidden, labels = inputs()
    return LossHead.of(model.lm_head)(hidden, lambda h, weight, bias: FUSED()(h, labels, weight, lm_bias=bias))


def main_loss(model, base):
    hidden, labels = inputs()
    logits = model.lm_head(hidden) if base is FROM_LOGITS else None
    return mtp.calculate_loss(base(), logits=logits, hidden_states=hidden, labels=labels, model=model)


def one_depth(model, base):
    hidden, labels = inputs()
    targets = [labels]  # not shifted, so that every entry gives one loss
    return mtp.calculate_mtp_loss(
        base(), mtp_per_depth_h=[hidden], mtp_per_depth_targets=targets, labels=labels, model=model, scaling_factor=1.0
    )


def pipeline(model, base):
    hidden, labels = inputs()
    return mtp.PipelineCausalLMLoss(base(), model)(model.lm_head(hidden) if base is FROM_LOGITS else hidden, labels)


INSIDE = {"loss_in_head": in_head, "LossHead.of": loss_head}
BY_WEIGHT = {"calculate_loss": main_loss, "calculate_mtp_loss": one_depth, "PipelineCausalLMLoss": pipeline}
ENTRY_POINTS = INSIDE | BY_WEIGHT
ADVICE = {
    "loss_in_head": "compute_loss_func=mdlm_loss_func",
    "LossHead.of": "call the head itself and give its logits to the loss",
} | dict.fromkeys(BY_WEIGHT, "MaskedCrossEntropy, whose logits the head computes")


def expected(head):
    hidden, labels = inputs()
    return reference.masked_cross_entropy(head(hidden), labels)


@pytest.mark.parametrize("kind", MORE)
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_a_head_that_does_more_is_not_bypassed(entry, kind):
    make, description = MORE[kind]
    with pytest.raises(ValueError, match=rf"must do no more than an nn\.Linear.*, got {description}.*{ADVICE[entry]}"):
        ENTRY_POINTS[entry](Model(make()), FUSED)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", MORE)
@pytest.mark.parametrize("entry", BY_WEIGHT)
def test_from_logits_the_head_itself_is_called_and_trains(entry, kind):
    model = Model(MORE[kind][0]())
    loss = BY_WEIGHT[entry](model, FROM_LOGITS)
    torch.testing.assert_close(loss, expected(model.lm_head))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("make", [nn.Linear, SameAsLinear, LossHead])
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_a_head_that_is_a_linear_layer_is_used(entry, make):
    model = Model(make(H, V))
    loss = ENTRY_POINTS[entry](model, FUSED)
    torch.testing.assert_close(loss, expected(model.lm_head))
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("entry", ["loss_in_head", *BY_WEIGHT])
def test_a_parametrized_weight_trains_its_original_parameters(entry):
    head = parametrizations.weight_norm(nn.Linear(H, V))
    model = Model(head)
    wanted = torch.autograd.grad(expected(head), list(model.parameters()))
    loss = ENTRY_POINTS[entry](model, FUSED)
    torch.testing.assert_close(loss, expected(head))
    loss.backward()
    for p, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_a_loss_head_cannot_take_over_a_parametrization():
    head = parametrizations.weight_norm(nn.Linear(H, V))
    assert parametrize.is_parametrized(head)
    with pytest.raises(ValueError, match=r"must do no more than an nn\.Linear.* with a parametrized weight"):
        LossHead.of(head)


def test_a_loss_head_is_created_from_a_linear_layer():
    with pytest.raises(TypeError, match=r"linear must be an nn\.Linear, got torch\.nn\.modules\.sparse\.Embedding"):
        LossHead.of(nn.Embedding(V, H))


def test_a_loss_head_must_be_created_before_sharding_adds_its_hooks():
    """FSDP2 gathers in a hook, which a head created after sharding would lack."""
    head = nn.Linear(H, V)

    def gather(*_):
        pass

    gather.__module__ = "torch.distributed.fsdp._fully_shard._fsdp_state"
    head.register_forward_pre_hook(gather)
    head.register_forward_pre_hook(functools.partial(gather))
    in_head(Model(head), FUSED)
    main_loss(Model(head), FUSED)
    with pytest.raises(ValueError, match=r"torch\.nn\.modules\.linear\.Linear with a hook, .*gather"):
        LossHead.of(head)


class NormHead(nn.Module):
    """A head of another class, whose logits are not computed from its weight alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(V, H))

    def forward(self, hidden):
        return nn.functional.linear(hidden, nn.functional.normalize(self.weight))


class Adapted(nn.Module):
    """A wrapper as adapter libraries create it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.adapter = base, nn.Linear(H, V, bias=False)

    def forward(self, hidden):
        return self.base_layer(hidden) + self.adapter(hidden)


class FoundByName(nn.Module):
    """A model whose head is found only by its name."""

    def __init__(self, head, name="lm_head"):
        super().__init__()
        self.body = nn.Linear(H, H)
        setattr(self, name, head)


@pytest.mark.parametrize("model", [Model(NormHead()), FoundByName(NormHead())])
@pytest.mark.parametrize("entry", BY_WEIGHT)
def test_a_head_of_another_class_is_not_bypassed(entry, model):
    with pytest.raises(ValueError, match=r"got tests\.losses\.test_head\.NormHead with a forward of its own"):
        BY_WEIGHT[entry](model, FUSED)


@pytest.mark.parametrize("name", ["lm_head", "my_lm_head"])
@pytest.mark.parametrize(
    ("head", "description"),
    [
        (Adapted(nn.Linear(H, V)), r"tests\.losses\.test_head\.Adapted with a forward of its own"),
        (
            nn.Sequential(nn.Dropout(0.5), nn.Linear(H, V)),
            r"torch\.nn\.modules\.container\.Sequential with a forward of its own",
        ),
        (nn.ModuleList([LoRALinear(H, V)]), r"tests\.losses\.test_head\.LoRALinear with a forward of its own"),
    ],
)
@pytest.mark.parametrize("entry", BY_WEIGHT)
def test_a_parameter_inside_a_head_does_not_replace_it(entry, head, description, name):
    with pytest.raises(ValueError, match=f"got {description}"):
        BY_WEIGHT[entry](FoundByName(head, name), FUSED)


@pytest.mark.parametrize("make", [lambda h: nn.ModuleList([h]), lambda h: nn.ModuleDict({"a": h}), lambda h: h.weight])
@pytest.mark.parametrize("entry", BY_WEIGHT)
def test_the_only_parameter_of_a_head_is_used(entry, make):
    head = nn.Linear(H, V, bias=False)
    torch.testing.assert_close(BY_WEIGHT[entry](FoundByName(make(head), "my_lm_head"), FUSED), expected(head))


@pytest.mark.parametrize(
    ("entry", "base"), [*((entry, FUSED) for entry in BY_WEIGHT), ("calculate_mtp_loss", FROM_LOGITS)]
)
def test_a_tied_embedding_and_a_plain_container_are_used(entry, base):
    """Neither has a forward that takes hidden states. A hook on an embedding does not affect the logits."""
    embedding, holder = nn.Embedding(V, H), nn.Module()
    embedding.register_forward_hook(lambda *_: None)
    holder.weight = nn.Parameter(embedding.weight.detach().clone())
    for head in (embedding, holder):
        wanted = expected(lambda hidden, w=head.weight: hidden @ w.t())
        torch.testing.assert_close(BY_WEIGHT[entry](Model(head), base), wanted)


def test_a_head_without_a_weight_is_named():
    with pytest.raises(
        ValueError, match=r"the LM head must have a weight, got torch\.nn\.modules\.container\.ModuleList"
    ):
        main_loss(Model(nn.ModuleList()), FUSED)


def test_an_explicit_weight_is_accepted():
    """An explicit weight is accepted for a head of another class whose logits depend only on its weight."""
    hidden, labels = inputs()
    model = Model(LoRALinear(H, V, bias=False))
    wanted = reference.masked_cross_entropy(hidden @ model.lm_head.weight.t(), labels)
    arguments = {"labels": labels, "model": model, "lm_weight": model.lm_head.weight}
    torch.testing.assert_close(mtp.calculate_loss(FUSED(), hidden_states=hidden, **arguments), wanted)
    got = mtp.calculate_mtp_loss(
        FUSED(), mtp_per_depth_h=[hidden], mtp_per_depth_targets=[labels], scaling_factor=1.0, **arguments
    )
    torch.testing.assert_close(got, wanted)


@pytest.mark.exhaustive
def test_the_head_is_checked_within_a_compiled_graph():
    hidden, labels = inputs()
    model, loss_fn = Model(nn.Linear(H, V)), FUSED()

    def loss(hidden):
        return mtp.calculate_mtp_loss(loss_fn, mtp_per_depth_h=[hidden], labels=labels, model=model)

    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden), loss(hidden))


@pytest.mark.parametrize(
    ("head", "factor", "error", "message"),
    [
        (nn.Linear(2, 3), 0, ValueError, "factor must be positive and finite, got 0"),
        (nn.Linear(2, 3), float("inf"), ValueError, "factor must be positive and finite, got inf"),
        (nn.Linear(2, 3), "1", TypeError, "factor must be a number, got str"),
        (torch.ones(3, 2), 1.0, TypeError, "head must be an nn.Module or parameters, got torch.Tensor"),
        (["weight"], 1.0, TypeError, "head must be an nn.Module or parameters, got str"),
    ],
)
def test_bad_arguments_of_the_gradient_divide_factor(head, factor, error, message):
    with pytest.raises(error, match=message):
        set_gradient_divide_factor(head, factor)
