"""Any argument of any public function with a value of a wrong type or an absurd size: accepted, or named in the error.

``test_errors.py`` compares whole messages.
"""

import fractions
import functools
import inspect
import re

import numpy as np
import pytest
import torch

import dllm_kernels as dk
from dllm_kernels.integrations import names, speculators, transformers, trl
from tests.conftest import every_time
from tests.support.routines import FIRSTS

B, L, V, D = 2, 4, 7, 4
X, H, W = torch.ones(B, L, V), torch.ones(B, L, D), torch.ones(V, D)
Y, ON, P = torch.arange(B * L).view(B, L) % (V - 2), torch.ones(B, L), torch.full((B, L), 0.5)
BOOL, SEEDS = ON.bool(), torch.arange(B)
VIEWS = dk.policy_views(Y, BOOL, V - 1, "elbo", num=2, seeds=SEEDS)


class Model(torch.nn.Module):
    """A model with an LM head."""

    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(D, V)


class Decoder(torch.nn.Module):
    """A model of each token, its position, and nothing else."""

    def __init__(self, vocabulary=126, length=130):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = torch.nn.Embedding(vocabulary, D), torch.nn.Embedding(length, D)
        self.lm_head = torch.nn.Linear(D, vocabulary)

    def forward(self, ids):
        return self.lm_head(self.tokens(ids % 126) + self.places.weight[: ids.shape[1]])


# Values of the arguments without a default.
VALID = {
    **dict.fromkeys(("logits", "teacher_logits", "encoder_logits"), X),
    **dict.fromkeys(("hidden", "teacher_hidden", "logits_or_hidden", "hidden_states"), H),
    **dict.fromkeys(("weight", "lm_head_weight", "head", "embedding", "lm_weight"), W),
    **dict.fromkeys(("targets", "ids", "target_ids", "input_ids", "noisy_input_ids", "labels"), Y),
    **dict.fromkeys(("weights", "mask", "block_mask", "token_nll"), ON),
    **dict.fromkeys(("loss_mask", "noise_mask", "valid_mask", "answer_mask", "loss_mask_ar", "output"), BOOL),
    **dict.fromkeys(("p_mask", "confidence", "log_w", "t", "scores"), P),
    **dict.fromkeys(("advantages", "mask_prob", "k"), torch.ones(B)),
    "k": torch.ones(B, dtype=torch.long), "uniform_prob": torch.zeros(B), "mask_token_id": V - 1, "vocab_size": V,
    "top_ids": Y[..., None], "top_log_probs": -torch.ones(B, L, 1), "B": B, "shape": (B, 1), "num": 2, "block_size": 3,
    "base": 0.5, "max_ratio": 0.1, "gamma_shape": 1.0, "t_peak": 0.5, "anchors": torch.zeros(B, 1, dtype=torch.long),
    "scheme": "elbo", "log_probs": -torch.ones(2, B, L), "views": VIEWS, "old": -P, "seq_len": L, "depth": 0,
    "model": Model(), "loss_fn": dk.MaskedCrossEntropy(), "objective": dk.PolicyObjective(), "noisy": VIEWS.noisy,
    "scored": VIEWS.scored, "segment_ids": Y,
}  # fmt: skip
OTHERS = {
    "gumbel_topk": {"log_w": P[0], "k": 2}, "acceptance_length": {"block_size": 5},
    "acceptance_stats": {"block_size": 5}, "draft_accuracy": {"output": dk.DLLMLossOutput(P, P)},
    "calculate_mtp_loss": {"mtp_per_depth_logits": [X]},
    "IDLMLoss.forward": {"logits": X.repeat(1, 2, 1)}, "IDLMLoss.forward_fused": {"hidden": H.repeat(1, 2, 1)},
    "PolicyLoss.forward": {"logits": X.expand(2, B, L, V)}, "PolicyViews": {"weights": VIEWS.weights},
    "PolicyLoss.forward_fused": {"hidden": H.expand(2, B, L, D)}, "SCDDLoss.forward": {"noisy_input_ids": Y},
    "SCDDLoss.forward_fused": {"noisy_input_ids": Y}, "token_log_probs": {"weight": W},
}  # fmt: skip
# They call a function of the user, or run a model.
LEFT_OUT = {
    "row_objective", "linear_row_objective", "nll_weights", "calculate_loss", "fused_head", "diffusion_generate",
    "mtp_loss_scaling_factor", "PipelineCausalLMLoss",
}  # fmt: skip


def functions():
    """Return the public functions, constructors with checks, and methods of losses, by name."""
    found = {}
    for name in set(dk.__all__) - LEFT_OUT:
        value = getattr(dk, name)
        if inspect.isfunction(value):
            found[name] = value
        elif name.endswith(("Loss", "CrossEntropy", "Collator", "Views", "PolicyObjective")):
            found[name] = value
            made = value(**required(name, value)) if name.endswith(("Loss", "CrossEntropy")) else None
            for method in ("forward", "forward_fused"):
                if hasattr(made, method):
                    found[f"{name}.{method}"] = getattr(made, method)
    found |= {name: function for name, (function, _) in OF_HOSTS.items()}
    return dict(sorted(found.items()))


def parameters_of(function):
    return {
        name: p for name, p in inspect.signature(function).parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }  # fmt: skip


def required(name, function):
    """Return the arguments of a valid call."""
    if name in OF_HOSTS:
        return OF_HOSTS[name][1]
    given = {p.name: VALID[p.name] for p in parameters_of(function).values() if p.default is p.empty}
    return given | ({"head": VALID["head"]} if name == "linear_sample" else {}) | OTHERS.get(name, {})


BOOLS = torch.ones(1, L, dtype=torch.bool)
NAMES = names.FusedLinearDiffusionCrossEntropyLoss, names.FusedLinearForPPO
# name -> function outside of the package's __all__, or one that runs a model, and its arguments without a default
OF_HOSTS = {
    "diffusion_generate": (
        dk.diffusion_generate,
        {"model": Decoder(), "prompt_ids": Y, "mask_token_id": 125, "max_new_tokens": 2, "steps": 1},
    ),
    "diffusion_generate, infill": (
        functools.partial(dk.diffusion_generate, Decoder(), Y, infill=True, temperature=1.0),
        {"mask_token_id": 0, "max_new_tokens": 0, "steps": 1},
    ),
    "diffusion_rollout": (trl.diffusion_rollout, {"mask_token_id": V, "steps": 1}),
    "DiffusionPolicyMixin": (trl.DiffusionPolicyMixin, {"mask_token_id": V}),
    "row_seeds": (trl.row_seeds, {"input_ids": Y, "attention_mask": ON, "logits_to_keep": 1}),
    "MaskedDiffusionCollator": (transformers.MaskedDiffusionCollator, {"mask_token_id": V}),
    "set_epoch": (transformers.MaskedDiffusionCollator(V).set_epoch, {"epoch": 1}),
    "pack_labels": (
        transformers.pack_labels, {"input_ids": Y, "loss_mask": BOOL, "noise_mask": BOOL, "p_mask": P},
    ),
    "unpack_labels": (transformers.unpack_labels, {"labels": transformers.pack_labels(Y, BOOL, BOOL, P)}),
    "speculators_metrics": (
        functools.partial(speculators.speculators_metrics, confidence_logits=torch.zeros(1, L)),
        {"hidden": H[:1], "weight": W, "teacher_hidden": H[:1], "loss_mask": BOOLS, "block_size": 2},
    ),
    **{loss.__name__: (loss, {"logits": X, "targets": X}) for loss in speculators.LOSSES[:-1]},
    "FusedLinearDiffusionCrossEntropyLoss": (NAMES[0], {}),
    "FusedLinearDiffusionCrossEntropyLoss.forward": (NAMES[0]().forward, {"x": H, "target": Y, "weight": W}),
    "FusedLinearForPPO": (NAMES[1], {}),
    "FusedLinearForPPO.forward": (NAMES[1]().forward, {"hidden_states": H, "vocab_weights": W, "input_ids": Y}),
    "linear_cross_entropy": (names.linear_cross_entropy, {"hidden": H, "weight": W, "labels": Y}),
    "token_entropy": (names.token_entropy, {"logits": X}),
    "masked_soft_cross_entropy": (
        names.masked_soft_cross_entropy, {"logits": X, "target_probs": X / V, "position_mask": ON[..., None]},
    ),
}  # fmt: skip


class Odd:
    """A type that nobody expects."""


BAD = {
    "object": Odd(), "array": np.array([1.0, 2.0]), "2**70": 2**70, "sparse": torch.eye(3).to_sparse(),
    "str": "x", "bytes": b"x", "list": [1], "tuple": (P, "a"), "dict": {}, "set": {1}, "class": int, "function": len,
    "array of 1": np.ones(1), "complex": 1j, "2**40": 2**40, "2**63": 2**63, "-2**70": -(2**70), "-1": -1, "0": 0,
    "inf": float("inf"), "nan": float("nan"), "1e300": 1e300, "-1e300": -1e300, "5e-324": 5e-324, "True": True,
    "None": None, "0-d": torch.tensor(1.0), "empty": torch.zeros(0), "complex tensor": P * 1j, "bools": BOOL, "ids": Y,
    "floats": P, "3-d": X, "meta": P.to("meta"), "float8": P.to(torch.float8_e4m3fn), "uint16": Y.to(torch.uint16),
    "large": torch.full((B, L), 2**62), "generator": torch.Generator(), "device": torch.device("cpu"),
    "dtype": torch.int32, "np.int64": np.int64(3), "np.float32": np.float32(0.5),
    "module": torch.nn.Linear(2, 3),
}  # fmt: skip
FEW = 4


def stored_otherwise(value):
    """Return a valid tensor in layouts that no function takes."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return {}
    nested = {
        str(layout): torch.nested.nested_tensor(list(value), layout=layout) for layout in (torch.strided, torch.jagged)
    }
    return {"its sparse form": value.to_sparse(), **nested}


@pytest.mark.parametrize("count", every_time([FEW], [FEW, len(BAD)]))
@pytest.mark.parametrize("name", FUNCTIONS := functions())
def test_a_bad_argument(name, count):
    function, found = FUNCTIONS[name], []
    given, parameters = required(name, function), parameters_of(function)
    known = {*parameters, *inspect.signature(type(getattr(function, "__self__", Odd()))).parameters}
    function(**given)
    for argument in parameters:
        for kind, bad in [*list(BAD.items())[:count], *stored_otherwise(given.get(argument)).items()]:
            try:
                function(**given | {argument: bad})
            except (TypeError, ValueError, IndexError, RuntimeError) as error:
                message = str(error)
                if not any(re.search(rf"\b{other}\b", message) for other in known):
                    found.append((argument, kind, message))
            except Exception as error:
                found.append((argument, kind, repr(error)))
    assert not found


# Values of optional arguments, where they are valid without others
OPTIONAL = {
    **dict.fromkeys(("bias", "lm_bias", "lm_head_bias"), torch.zeros(V)), "active": BOOL, "seeds": SEEDS,
    "start": torch.zeros(B, dtype=torch.long), "draft_to_target": torch.arange(V), "teacher_weight": W, "weights": P,
    "segment_ids": Y, "seq_idx": torch.zeros(B, L, dtype=torch.int32), "p_mask": P, "loss_mask": BOOL, "mask": ON,
}  # fmt: skip
# Not read, or not by the loss of a class.
UNREAD = {
    "noisy_input_ids", "BlockDiffusion noise_mask", "BlockDiffusion p_mask", "SCDD noise_mask",
    "calculate_mtp_loss lm_weight", "calculate_mtp_loss lm_bias",
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tensor_on_another_device_is_named(name):
    function, given = FUNCTIONS[name], required(name, FUNCTIONS[name])
    loss = re.sub(r"(CrossEntropy)?Loss\.forward.*", "", name)
    for argument in parameters_of(function):
        value = given.get(argument, OPTIONAL.get(argument))
        others = [name for name, t in given.items() if isinstance(t, torch.Tensor) and name != argument]
        if not isinstance(value, torch.Tensor) or not others:
            continue
        if (loss != "SCDD" and argument in UNREAD) or f"{loss} {argument}" in UNREAD:
            function(**given | {argument: value.to("meta")})
            continue
        with pytest.raises(ValueError, match=r"must be on (cpu|meta) like .*, got (meta|cpu)$") as error:
            function(**given | {argument: value.to("meta")})
        found = "weights" if (name, argument) == ("speculators_metrics", "loss_mask") else argument
        assert re.search(rf"\b{found}\b", str(error.value)), argument


# Arguments without a gradient, which do not say so: scores, masks that are compared, teachers, and inputs of draws.
DETACHED = {
    "teacher_logits", "teacher_hidden", "log_w", "confidence", "lm_weight", "position_mask", "attention_mask",
    "targets",
}  # fmt: skip
DETACHED_IN = {
    "MaskedCrossEntropy.forward": {"mask"}, "acceptance_length": {"mask"}, "acceptance_stats": {"mask"},
    "dpace_weights": {"mask"}, "BlockDiffusionCrossEntropyLoss.forward": {"p_mask"},
    "BlockDiffusionCrossEntropyLoss.forward_fused": {"p_mask"}, "linear_sample": {"hidden", "head"},
    "soft_embedding": {"hidden", "head", "embedding"}, "pack_labels": {"p_mask"}, "scdd_schedule": {"t"},
    "diffusion_generate": {"head"}, "diffusion_generate, infill": {"head"},
}  # fmt: skip


@pytest.mark.parametrize("name", [*FUNCTIONS, "weighted_mean"])
def test_an_argument_that_requires_a_gradient_has_one_or_is_refused(name):
    """Constants are named in the error."""
    function = FUNCTIONS[name] if name in FUNCTIONS else dk.DFlashDecayLoss().weighted_mean
    given = required(name, function)
    for argument in parameters_of(function).keys() - DETACHED - DETACHED_IN.get(name, set()):
        value = given.get(argument, VALID.get(argument))
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        leaf = value.clone().requires_grad_()
        try:
            out = function(**given | {argument: leaf})
        except ValueError as error:
            assert str(error).startswith(f"{argument} must not require a gradient"), argument  # noqa: PT017
            continue
        assert argument != "weights" or name == "PolicyViews"
        found = [t for t in torch.utils._pytree.tree_leaves(tensors(out)) if t.requires_grad]
        gradients = torch.autograd.grad([t.sum() for t in found], leaf, allow_unused=True)
        assert gradients[0] is not None, argument


LONG = torch.arange(240).view(2, 120) % 100
MIXED_ON = LONG % 7 != 0
OF_NOISE = {"mask_token_id": 101, "vocab_size": 102, "block_size": 50}
# Calls in which a product or a difference of the integers, or of one and a size, leaves 8 bits or becomes negative.
CALLS = {
    "diffusion_generate": (
        dk.diffusion_generate,
        {"mask_token_id": 125, "max_new_tokens": 16, "steps": 16, "block_size": 4, "eos_token_id": 7, "suppress_ids": 9,
         "chunk_size": 100}, {"model": Decoder(), "prompt_ids": LONG[:, :3]},
    ),
    "diffusion_generate, infill": (
        dk.diffusion_generate, {"mask_token_id": 99, "max_new_tokens": 12, "steps": 120, "block_size": 10},
        {"model": Decoder(), "prompt_ids": LONG[:1, 90:101], "infill": True},
    ),
    "sample_anchors": (dk.sample_anchors, {"num": 100, "block_size": 16}, {"loss_mask": MIXED_ON, "overlap": False}),
    "sample_prefix": (dk.sample_prefix, {"block_size": 100}, {"shape": (2, 100), "base": 0.9}),
    "block_targets": (dk.block_targets, {"block_size": 100}, {"ids": LONG, "anchors": LONG}),
    "DFlashDecayLoss": (
        dk.DFlashDecayLoss(), {"block_size": 121, "num_tokens": 100},
        {"logits": torch.ones(2, 120, 100), "target_ids": LONG, "block_mask": MIXED_ON},
    ),
    "acceptance_stats": (dk.acceptance_stats, {"block_size": 121}, {"output": MIXED_ON, "mask": LONG >= 0}),
    **{
        name: (
            getattr(dk, name), {n: value for n, value in OF_NOISE.items() if n in case.parameters},
            {"input_ids": LONG, "loss_mask": MIXED_ON, **case.inputs(LONG)},
        )
        for name, case in FIRSTS.items()
    },
    "policy_views": (
        dk.policy_views, {"mask_token_id": 101, "num": 100},
        {"ids": LONG, "loss_mask": MIXED_ON, "scheme": "quadrature"},
    ),
    "DLLMCollator": (
        lambda **sizes: dk.DLLMCollator(**sizes)([dict.fromkeys(dk.collate.FIELDS, [1] * 90)]),
        {"pad_token_id": 100, "eos_token_id": 101, "block_size": 100, "pad_seq_len_divisible": 64}, {},
    ),
}  # fmt: skip


def tensors(result):
    if isinstance(result, dk.PolicyViews):
        result = result.noisy, result.scored, result.weights
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else [result]
    return [part for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize("integer", every_time([np.uint8], [np.int8, np.uint8, np.uint64]))
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("error")
def test_integers_of_numpy_do_not_overflow(name, integer):
    """A small unsigned or signed integer of NumPy stays one in a sum, a product and a difference."""
    function, integers, others = CALLS[name]

    def call(**changed):
        torch.manual_seed(0)
        return tensors(function(**integers | others | changed))

    expected = call()
    for argument, value in integers.items():
        for got, same in zip(call(**{argument: integer(value)}), expected, strict=True):
            assert torch.equal(got, same), argument


@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy_are_computed_in_the_digits_of_python():
    settings, t = {"max_ratio": 0.125, "gamma_shape": 9.5, "t_peak": 0.375}, torch.linspace(0, 1, 9)
    narrow = {name: np.float16(value) for name, value in settings.items()}
    got, same = (vars(dk.scdd_schedule(t, **numbers)) for numbers in (narrow, settings))
    for name, value in same.items():
        assert torch.equal(got[name], value), name


def test_a_fraction_is_no_number():
    half = fractions.Fraction(1, 2)
    with pytest.raises(TypeError, match=r"^dpace_alpha must be a number, got fractions\.Fraction$"):
        dk.DFlashDecayLoss(position_weights="dpace", dpace_alpha=half)
    with pytest.raises(
        TypeError, match=r"^num_diffusion_tokens must be a number or a 0-d tensor, got fractions\.Fraction$"
    ):
        dk.MDLMCrossEntropyLoss()(X, Y, BOOL, P, BOOL, num_diffusion_tokens=half)
