"""Bool options reject other values, and constants reject tensors that require a gradient."""

import inspect
import re
from dataclasses import is_dataclass

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import dllm_kernels
from dllm_kernels import corruption, ops
from dllm_kernels.integrations import names, nemo_automodel, speculators, transformers, trl
from dllm_kernels.losses import BlockDiffusionCrossEntropyLoss, MDLMCrossEntropyLoss, scdd_schedule
from tests.support.op_cases import FIRST_OPS, Rows
from tests.support.routines import FIRSTS as ROUTINES

X, W, IDS = torch.randn(3, 7), torch.randn(7, 7), torch.tensor([0, 1, 2])
LABELS, ON = torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3)
INTEGRATIONS = names, nemo_automodel, speculators, transformers, trl
ROWS = Rows.of(IDS, IDS >= 0, torch.ones(3))
VIEWS = dllm_kernels.policy_views(LABELS, ON, 6, "full")
OBJECTIVE = dllm_kernels.PolicyObjective("reinforce")
OF_POLICY = LABELS, VIEWS, None, torch.ones(1)


def model():
    made = torch.nn.Module()
    made.body, made.lm_head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)
    made.forward = lambda input_ids, **_: made.lm_head(made.body(input_ids))
    return made


def of_kind(case):
    return X if "stored" in case.kinds else ops.LinearLogits(X, W)


# Calls of all ops, and of everything else public that takes a flag. The name of a class stands for its constructor.
CALLS = {
    **{case.name: lambda case=case, **o: case(of_kind(case), ROWS, **o) for case in FIRST_OPS},
    **{case.older: lambda case=case, **o: case.of_hidden(X, W, ROWS, **o) for case in FIRST_OPS if case.older},
    "MDLMCrossEntropyLoss": dllm_kernels.MDLMCrossEntropyLoss,
    "BlockDiffusionCrossEntropyLoss": dllm_kernels.BlockDiffusionCrossEntropyLoss,
    "HybridDiffusionLLMLoss": dllm_kernels.HybridDiffusionLLMLoss,
    "SCDDLoss": lambda **o: dllm_kernels.SCDDLoss(6, **o),
    "IDLMLoss": dllm_kernels.IDLMLoss,
    "DFlashDecayLoss": dllm_kernels.DFlashDecayLoss,
    "DraftDistillationLoss": dllm_kernels.DraftDistillationLoss,
    "MaskedCrossEntropy": dllm_kernels.MaskedCrossEntropy,
    "acceptance_length": lambda **o: dllm_kernels.acceptance_length(ON.repeat(1, 4), ON.repeat(1, 4), 4, **o),
    "acceptance_stats": lambda **o: dllm_kernels.acceptance_stats(ON.repeat(1, 4), ON.repeat(1, 4), 4, **o),
    "sample_anchors": lambda **o: dllm_kernels.sample_anchors(ON, 1, 2, **o),
    "calculate_mtp_loss": lambda **o: dllm_kernels.calculate_mtp_loss(
        dllm_kernels.MaskedCrossEntropy(), mtp_per_depth_logits=[X[None]], labels=LABELS, model=None, **o
    ),
    "PolicyViews.sequence_scores": lambda **o: VIEWS.sequence_scores(VIEWS.weights, **o),
    "PolicyLoss": lambda **o: dllm_kernels.PolicyLoss(OBJECTIVE, **o),
    "PolicyLoss.forward": lambda **o: dllm_kernels.PolicyLoss(OBJECTIVE)(X[None, None], *OF_POLICY, **o),
    "PolicyLoss.forward_fused": lambda **o: dllm_kernels.PolicyLoss(OBJECTIVE).forward_fused(
        X[None, None], W, *OF_POLICY, **o
    ),
    "DLLMCollator": dllm_kernels.DLLMCollator,
    **{
        name: lambda case=case, **o: case(LABELS, ON, **o)
        for name, case in ROUTINES.items()
        if any("bool" in p.annotation.split(" ") for p in case.parameters.values())
    },
    "diffusion_generate": lambda **o: dllm_kernels.diffusion_generate(
        model(), LABELS, mask_token_id=6, max_new_tokens=2, steps=1, eos_token_id=1, **o
    ),
    "nemo_automodel.patch": nemo_automodel.patch,
    "speculators.patch": speculators.patch,
    "speculators.speculators_metrics": lambda **o: speculators.speculators_metrics(
        X[None], W, X[None], ON, confidence_logits=None, **o
    ),
    "transformers.MaskedDiffusionCollator": lambda **o: transformers.MaskedDiffusionCollator(6, **o),
    "transformers.mdlm_loss_func": lambda **o: transformers.mdlm_loss_func((X[None],), LABELS - 100, **o),
    "transformers.MaskedDiffusionTrainerMixin": transformers.MaskedDiffusionTrainerMixin,
    "trl.patch": trl.patch,
    "trl.DiffusionPolicyMixin": lambda **o: trl.DiffusionPolicyMixin(mask_token_id=6, **o),
    "trl.diffusion_rollout": lambda **o: trl.diffusion_rollout(6, steps=1, **o),
}
# Need a framework for a flag that is accepted.
WITH_HOST = {name for name in CALLS if name.endswith((".patch", "Mixin"))}
# Methods that frameworks call.
OF_HOST = [f"transformers.MaskedDiffusionTrainerMixin.{name}" for name in ("compute_loss", "prediction_step")]


def public_functions():
    """Yield (name, function) of everything public; the name of a class is that of its constructor."""
    for module in (dllm_kernels, *INTEGRATIONS):
        prefix = "" if module is dllm_kernels else module.__name__.rpartition(".")[2] + "."
        own = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
        for name in getattr(module, "__all__", list(own)):
            value = getattr(module, name)
            if name.startswith("_") or not callable(value):
                continue
            yield prefix + name, value
            for method, function in inspect.getmembers(value, inspect.isfunction) if inspect.isclass(value) else ():
                if function.__module__.startswith("dllm_kernels.") and not method.startswith("_"):
                    yield f"{prefix}{name}.{method}", function


def flags_of(function):
    record = inspect.isclass(function) and (issubclass(function, tuple | torch.Tensor) or is_dataclass(function))
    parameters = {} if record else inspect.signature(function).parameters
    return {name: "None" in p.annotation for name, p in parameters.items() if p.annotation in ("bool", "bool | None")}


FLAGS = [
    (name, flag, optional)
    for name, function in public_functions()
    if name not in OF_HOST
    for flag, optional in flags_of(function).items()
]
of_every_flag = pytest.mark.parametrize(("name", "flag", "optional"), FLAGS)


def test_every_function_with_a_flag_has_a_call():
    ops_without = {case.name for case in FIRST_OPS if not flags_of(case.op)}
    assert {name for name, *_ in FLAGS} == CALLS.keys() - ops_without


@of_every_flag
def test_a_flag_is_a_bool(name, flag, optional):
    for value in ("no", 0, 1, 1.0, np.int64(1), torch.tensor(True), [], *([] if optional else [None])):
        kind = type(value).__qualname__ if isinstance(value, str | int | float | list) else r"[a-zA-Z]+\.\w+"
        with pytest.raises(TypeError, match=f"^{flag} must be a bool, got {'NoneType' if value is None else kind}$"):
            called(name, flag, value)


@of_every_flag
def test_a_flag_may_be_a_bool_of_numpy(name, flag, optional):
    if name in WITH_HOST:
        return
    for value in (True, False):
        found, expected = (tree_leaves(seeded(name, flag, cast(value))) for cast in (np.bool_, bool))
        for a, b in zip(found, expected, strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def called(name, flag, value):
    made = CALLS[name](**{flag: value})
    # A loss checks the settings of a constructor, which may be assigned later, in each call.
    return made(X[None, None], *OF_POLICY) if isinstance(made, dllm_kernels.PolicyLoss) else made


def seeded(name, flag, value):
    torch.manual_seed(0)
    return called(name, flag, value)


def test_flags_that_are_stored_are_bools():
    assert dllm_kernels.DFlashDecayLoss(use_fused_linear_ce=np.bool_(True)).use_fused_linear_ce is True
    assert dllm_kernels.IDLMLoss(np.float32(0.5), np.bool_(True)).auto_balance is True
    assert dllm_kernels.DLLMCollator(response_window=np.bool_(False)).response_window is False


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_setting_assigned_after_construction(reduction):
    loss, mtp = dllm_kernels.MDLMCrossEntropyLoss(), dllm_kernels.MaskedCrossEntropy(reduction=reduction)
    loss.fp32_upcast = mtp.fp32_upcast = "no"
    on = torch.ones(1, 3)
    for call in (
        lambda: loss(X[None], LABELS, on, on, on),
        lambda: loss.forward_fused(X[None], W, LABELS, on, on, on),
        lambda: mtp(X[None], LABELS),
    ):
        with pytest.raises(TypeError, match=r"^fp32_upcast must be a bool, got str$"):
            call()


@pytest.mark.parametrize(("count", "error"), [(8, TypeError), (8.0, TypeError), (torch.tensor(8), ValueError)])
@pytest.mark.parametrize("loss", ["MDLMCrossEntropyLoss", "BlockDiffusionCrossEntropyLoss", "HybridDiffusionLLMLoss"])
def test_a_count_in_the_place_of_the_ar_mask(loss, count, error):
    on = torch.ones(1, 3)
    with pytest.raises(error, match=r"^loss_mask_ar must .*; a count goes by its keyword, num_diffusion_tokens=$"):
        getattr(dllm_kernels, loss)()(X[None], LABELS, on, on, on, count)


@pytest.mark.parametrize("name", ["pad_token_id", "eos_token_id"])
def test_tokens_have_64_bits(name):
    for value in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match=f"^{name} must be an int of 64 bits, got {value}$"):
            dllm_kernels.DLLMCollator(**{name: value})
    dllm_kernels.DLLMCollator(**{name: np.int64(-(2**63))})


def test_complementary_rejects_probabilities():
    ids, mask = torch.arange(12).view(2, 6), torch.tensor([[0.0] + [1.0] * 5, [0.5] * 6])
    _, noise, p = corruption.corrupt_uniform(ids, mask, 99, seeds=torch.arange(2))
    with pytest.raises(
        ValueError, match=r"^noise_mask must hold no fractions, got 0\.\d+ at position \(0, 1\); is it p_mask\?$"
    ):
        corruption.complementary(p, mask)
    expected = corruption.complementary(noise, mask)
    assert torch.equal(corruption.complementary(noise.float(), mask), expected)
    noise = torch.where(mask == 0, p, noise.float())  # unsupervised positions may hold any value
    assert torch.equal(corruption.complementary(noise, mask), expected)


def test_a_schedule_is_differentiable():
    t = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64, requires_grad=True)
    settings = {"max_ratio": 0.3, "gamma_shape": 1.5, "t_peak": 0.4}
    assert torch.autograd.gradcheck(lambda t: tuple(vars(scdd_schedule(t, **settings)).values()), [t])


WEIGHTED = {
    "token_nll(...).nll * weights": lambda w: ops.weighted_nll(X, IDS, w),
    "token_nll(...).nll * weights ": lambda w: ops.weighted_linear_nll(X, W, IDS, w),
    'reduction="none" and loss * weights': lambda w: ops.divergence(X, X + 1, w),
    'reduction="none" and loss * weights ': lambda w: ops.linear_divergence(X, W, X + 1, w),
}


@pytest.mark.parametrize("instead", WEIGHTED)
def test_weights_take_no_gradient(instead):
    """If weights were detached, their parameters would silently not train."""
    weights = torch.ones(len(IDS), requires_grad=True)
    message = (
        f"weights must not require a gradient, since it is taken as a constant; detach it, or use {instead.strip()}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        WEIGHTED[instead](weights)
    with torch.no_grad():
        WEIGHTED[instead](weights)
    assert WEIGHTED[instead](weights.detach()).loss.isfinite()


@pytest.mark.parametrize("name", ["block diffusion", "mdlm"])
def test_a_mask_that_only_switches_rows_on_may_require_a_gradient(name):
    """The loss computes the weights, which depend on such a mask only through the positions of its nonzero entries."""
    loss, ones = (
        {"block diffusion": BlockDiffusionCrossEntropyLoss, "mdlm": MDLMCrossEntropyLoss}[name](),
        torch.ones(1, 3),
    )
    mask = torch.tensor([[0.0, 1.0, 1.0]])
    x, y = (X[None].clone().requires_grad_() for _ in range(2))
    loss(x, IDS[None], ones, ones, mask.clone().requires_grad_()).total_loss.backward()
    loss(y, IDS[None], ones, ones, mask).total_loss.backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("place", [0, 1])
def test_a_mixture_is_not_negative(place):
    mix = [torch.rand(3), torch.rand(3)]
    mix[place][1] = -0.25
    with pytest.raises(ValueError, match=rf"^mix\[{place}\] must not be negative, got -0.25$"):
        ops.row_stats(X, IDS, mix=tuple(mix))
