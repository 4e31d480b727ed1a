"""A model whose LM head has LoRA, and the losses of NeMo AutoModel from its hidden states and from its logits."""

import contextlib
import importlib
import sys
import types
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import dllm_kernels
from dllm_kernels.integrations import nemo_automodel as integration
from dllm_kernels.integrations.nemo_automodel import deferred_logits

V, D, B, S, DEPTHS = 19, 6, 2, 8, 2
MTP_FACTOR = 0.3


def module(name):
    return importlib.import_module(f"nemo_automodel.{name}")


def lora():
    """The host's LoRA; newer Triton versions refuse the autotuning keys of its kernels, which no test here runs."""
    name = "nemo_automodel.components._peft.lora_kernel"
    try:
        importlib.import_module(name)
    except ValueError:
        sys.modules[name] = kernels = types.ModuleType(name)
        for wrapper in ("lora_da_dx_update_wrapper", "lora_db_update_wrapper", "lora_forward_wrapper"):
            setattr(kernels, wrapper, None)
    return module("components._peft.lora")


_patched = {}  # options of the patch in force


@contextlib.contextmanager
def fused(**options):
    """Patch the host as with ``fuse_head=True``, except for its recipes, which need packages that may be missing."""
    lora()
    for home in integration.HOMES:
        module(home)
    with mock.patch.object(integration, "STEPS", {}):
        integration.patch(fuse_head=True, **options)
        _patched.update(options)
        try:
            yield
        finally:
            _patched.clear()
            integration.unpatch()


class Model(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.lm_head = nn.Linear(D, V, bias=bias)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, hidden):
        return self.lm_head(hidden)


def adapted(kind="patched", *, dtype=torch.float64, bias=True, **options):
    """Return a model whose head is ``kind``, with nonzero adapters and a copy that differs from the original."""
    torch.manual_seed(1)
    model = Model(bias).to(dtype)
    head, options = model.lm_head, {"dim": 3, "alpha": 5, **options}
    if kind == "LinearLoRA":
        model.lm_head = lora().LinearLoRA(head, **options)
    elif kind == "patched":
        lora().patch_linear_module(head, use_triton=False, **options)
    elif kind == "plain autograd":
        lora().patch_linear_module(head, use_triton=False, use_memory_efficient_lora=False, **options)
    elif kind == "Triton":  # its kernels need a GPU
        lora().patch_linear_module(head, use_triton=True, use_memory_efficient_lora=False, **options)
    else:
        model = wrap_with_peft(model, kind, lora_bias=options.get("lora_bias", True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            nn.init.normal_(parameter)
    return model


def wrap_with_peft(model, kind, lora_bias):
    peft = importlib.import_module("peft")
    options = {
        "PEFT": {"target_modules": ["lm_head"], "r": 3, "lora_alpha": 5, "lora_bias": lora_bias, "lora_dropout": 0.2},
        "PEFT, trained copy": {"target_modules": ["other"], "modules_to_save": ["lm_head"]},
    }[kind]
    model.other = nn.Linear(D, D).to(model.lm_head.weight.dtype)
    dtype = model.lm_head.weight.dtype
    return peft.get_peft_model(model, peft.LoraConfig(**options)).to(dtype)


def batch(dtype=torch.float64):
    """Draw hidden states of the main path and of the depths in one tensor, labels, and masks of a diffusion loss."""
    torch.manual_seed(2)
    hidden = torch.randn(1 + DEPTHS, B, S, D, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, V, (B, S))
    labels[0, :3] = -100
    noise, p = torch.rand(B, S) < 0.6, torch.rand(B, S) * 0.9 + 0.1
    return hidden, labels, noise, p


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=-100)


def mtp_of_logits(model, hidden, labels):
    shifted = [F.pad(labels[:, k + 1 :], (0, k + 1), value=-100) for k in range(DEPTHS)]
    parts = [cross_entropy(model(h), t) for h, t in zip(hidden[1:], shifted, strict=True)]
    return MTP_FACTOR / DEPTHS * sum(parts)


def fused_loss():
    return module("components.loss.linear_ce").FusedLinearCrossEntropy()


# Losses from hidden states, as the host calls them -----------------------------------------------------------------


def calculate_loss(model, hidden, labels, noise, p, **given):
    options = {"hidden_states": hidden[0], "labels": labels, "model": model, **given}
    return module("components.loss.utils").calculate_loss(fused_loss(), **options)


def with_gathered_weight(model, hidden, labels, noise, p, **given):
    weight = module("components.loss.utils").prepare_lm_weight(fused_loss(), model)
    return calculate_loss(model, hidden, labels, noise, p, lm_weight=weight, **given)


def calculate_mtp_loss(model, hidden, labels, noise, p, loss_fn=None, **given):
    options = {"mtp_per_depth_h": list(hidden[1:]), "labels": labels, "model": model, "scaling_factor": MTP_FACTOR}
    return module("components.loss.mtp").calculate_mtp_loss(loss_fn or fused_loss(), **options, **given)


def all_depths_in_one_call(*args, **given):
    """The loss of this package, not of the host's class, computes all depths in one call."""
    weight = module("components.loss.utils").prepare_lm_weight(fused_loss(), args[0])
    return calculate_mtp_loss(*args, loss_fn=dllm_kernels.FusedLinearCrossEntropy(), lm_weight=weight, **given)


def pipeline(model, hidden, labels, noise, p):
    model_loss = module("components.loss.mtp").PipelineCausalLMLoss(fused_loss(), model, scaling_factor=MTP_FACTOR)
    output = SimpleNamespace(hidden_states=hidden[0], logits=None, mtp_per_depth_h=list(hidden[1:]))
    return model_loss(output, labels)


def deferred(loss):
    """Compute a loss of the logits that the head of the model defers."""

    def from_hidden_states(model, hidden, labels, noise, p):
        with deferred_logits(model, **_patched) as defers:
            assert defers
            logits = [model(h) for h in hidden[:2]]
            value = loss(*logits, labels, noise, p)
        assert logits[0].record() is not None
        return value

    return from_hidden_states


def mdlm(logits, other, labels, noise, p):
    on = labels != -100
    loss = module("components.loss.dllm_loss").MDLMCrossEntropyLoss()
    return loss(logits, labels.clamp(min=0), noise, p, on).total_loss


def hybrid(logits, other, labels, noise, p):
    on = labels != -100
    loss = module("components.loss.dllm_loss").HybridDiffusionLLMLoss(0.7)
    return loss(logits, labels.clamp(min=0), noise, p, on, on, causal_logits=other).total_loss


def encoder_ar(logits, other, labels, noise, p):
    return module("components.loss.dllm_loss").encoder_ar_loss(logits, labels.clamp(min=0), labels != -100)


def scdd(logits, other, labels, noise, p):
    ids, on = labels.clamp(min=0, max=V - 2), labels != -100
    loss = module("components.loss.dllm_loss").SCDDLoss(V - 1, 20, max_ratio=0.2)
    times, noisy = p[:, :1].expand(p.shape), torch.where(noise, V - 1, ids)
    return loss(logits, ids, noise, times, on, noisy_input_ids=noisy).total_loss


def idlm(logits, other, labels, noise, p):
    ids, on = labels[:, 4:].clamp(min=0), torch.ones(len(labels), 4)
    return module("components.loss.dllm_loss").IDLMLoss()(logits, ids, on.bool(), on, seq_len=4).total_loss


def mtp_depths_from_logits(loss):
    return lambda model, hidden, *rest: loss(*(model(h) for h in hidden[:2]), *rest)


# From hidden states, and the same loss from logits; the model is in training mode.
def _main(model, hidden, labels, noise, p):
    return cross_entropy(model(hidden[0]), labels)


def _mtp(model, hidden, labels, noise, p):
    return mtp_of_logits(model, hidden, labels)


LOSSES = {
    "calculate_loss": (calculate_loss, _main),
    "calculate_loss, the head gathered": (with_gathered_weight, _main),
    "calculate_mtp_loss": (calculate_mtp_loss, _mtp),
    "calculate_mtp_loss, one call": (all_depths_in_one_call, _mtp),
    "PipelineCausalLMLoss": (pipeline, lambda *args: _main(*args) + _mtp(*args)),
    "MDLM": (deferred(mdlm), mtp_depths_from_logits(mdlm)),
    "hybrid": (deferred(hybrid), mtp_depths_from_logits(hybrid)),
    "encoder_ar_loss": (deferred(encoder_ar), mtp_depths_from_logits(encoder_ar)),
    "SCDD": (deferred(scdd), mtp_depths_from_logits(scdd)),
    "I-DLM": (deferred(idlm), mtp_depths_from_logits(idlm)),
}


def results(loss, model, inputs):
    """Return the loss and its gradients: of the hidden states and of all parameters of the head, None if frozen."""
    torch.manual_seed(3)  # of dropout
    value = loss(model, *inputs)
    for leaf in (inputs[0], *model.parameters()):
        leaf.grad = None
    value.backward()
    head = dict(model.get_output_embeddings().named_parameters())
    return {"loss": value.detach(), "hidden": inputs[0].grad, **{name: p.grad for name, p in head.items()}}
