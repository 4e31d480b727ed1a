"""Bool options reject other values, and constants reject tensors that require a gradient."""

import re

import numpy as np
import pytest
import torch

import dllm_kernels
from dllm_kernels import corruption, ops
from dllm_kernels.integrations import nemo_automodel
from dllm_kernels.losses import BlockDiffusionCrossEntropyLoss, MDLMCrossEntropyLoss, scdd_schedule

X, W, IDS = torch.randn(3, 7), torch.randn(7, 7), torch.tensor([0, 1, 2])
FLAGS = [
    *((ops.token_nll, (X, IDS), flag) for flag in ("with_lse", "with_correct", "inplace_backward")),
    *((ops.weighted_nll, (X, IDS, IDS), f) for f in ("with_lse", "with_correct", "inplace_backward", "round_nll")),
    *((ops.weighted_linear_nll, (X, W, IDS, IDS), f) for f in ("with_lse", "with_correct", "round_nll")),
    *((ops.linear_token_nll, (X, W, IDS), flag) for flag in ("with_lse", "with_correct")),
    *((ops.row_stats, (X, IDS), flag) for flag in ("entropy", "with_correct")),
    *((ops.linear_row_stats, (X, W, IDS), flag) for flag in ("entropy", "with_correct")),
    (ops.token_log_probs, (X, IDS), "with_entropy"),
]


@pytest.mark.parametrize("value", ["yes", 1, None], ids=str)
@pytest.mark.parametrize(
    ("op", "arguments", "flag"), FLAGS, ids=lambda x: getattr(x, "__name__", x if isinstance(x, str) else "")
)
def test_a_bool_option_rejects_other_values(op, arguments, flag, value):
    with pytest.raises(TypeError, match=f"^{flag} must be a bool, got {type(value).__name__}$"):
        op(*arguments, **{flag: value})


LABELS = torch.zeros(1, 3, dtype=torch.long)
SETTINGS = [
    *((loss, (), "fp32_upcast") for loss in (
        dllm_kernels.MDLMCrossEntropyLoss,
        dllm_kernels.BlockDiffusionCrossEntropyLoss,
        dllm_kernels.HybridDiffusionLLMLoss,
        dllm_kernels.MaskedCrossEntropy,
    )),
    (dllm_kernels.DFlashDecayLoss, (), "use_fused_linear_ce"),
    (dllm_kernels.IDLMLoss, (), "auto_balance"),
    *((dllm_kernels.DLLMCollator, (), flag) for flag in ("supervise_padding", "response_window", "pin_memory")),
    (nemo_automodel.patch, (), "fuse_head"),
    (ops.token_nll, (X, IDS), "check_targets"),
    (ops.linear_token_nll, (X, W, IDS), "check_targets"),
]  # fmt: skip


@pytest.mark.parametrize("value", ["no", 2, 1.0], ids=str)
@pytest.mark.parametrize(("make", "arguments", "flag"), SETTINGS, ids=lambda x: getattr(x, "__name__", x))
def test_a_bool_setting_rejects_other_values(make, arguments, flag, value):
    with pytest.raises(TypeError, match=f"^{flag} must be a bool, got {type(value).__name__}$"):
        make(*arguments, **{flag: value})


def test_settings_of_0_and_1_are_bools():
    assert dllm_kernels.DFlashDecayLoss(use_fused_linear_ce=1).use_fused_linear_ce is True
    assert dllm_kernels.DLLMCollator(response_window=np.bool_(False)).response_window is False
    assert dllm_kernels.MDLMCrossEntropyLoss(fp32_upcast=0).fp32_upcast is False


def test_return_per_depth_is_a_bool():
    with pytest.raises(TypeError, match=r"^return_per_depth must be a bool, got str$"):
        dllm_kernels.calculate_mtp_loss(
            dllm_kernels.MaskedCrossEntropy(),
            mtp_per_depth_logits=[X[None]],
            labels=LABELS,
            model=None,
            return_per_depth="no",
        )


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


def test_a_mask_token_is_no_bool():
    ids, mask = torch.arange(12).view(2, 6), torch.ones(2, 6)
    for corrupt in (corruption.corrupt_uniform, corruption.corrupt_blockwise, corruption.corrupt_all_masked):
        with pytest.raises(TypeError, match=r"^mask_token_id must be an int, got bool$"):
            corrupt(ids, mask, True)


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


@pytest.mark.parametrize("name", ["level", "mask_prob", "uniform_prob"])
def test_a_probability_takes_no_gradient(name):
    ids, mask, p = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.bool), torch.full((2,), 0.3)
    wanting = p.clone().requires_grad_()
    if name == "level":
        calls = [
            lambda x, r=r: r(ids, mask, 99, level=x) for r in (corruption.corrupt_uniform, corruption.corrupt_blockwise)
        ]
    else:
        calls = [
            lambda x: corruption.corrupt_mix(ids, mask, 99, 100, **({"mask_prob": p, "uniform_prob": p} | {name: x}))
        ]
    for call in calls:
        with pytest.raises(ValueError, match=f"^{name} must not require a gradient"):
            call(wanting)
        with torch.no_grad():
            call(wanting)


WEIGHTED = {
    "token_nll(...).nll * weights": lambda w: ops.weighted_nll(X, IDS, w),
    "linear_token_nll(...).nll * weights": lambda w: ops.weighted_linear_nll(X, W, IDS, w),
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


@pytest.mark.parametrize(
    "op", [lambda **o: ops.token_nll(X, IDS, **o), lambda **o: ops.linear_row_stats(X, W, IDS, **o)]
)
def test_check_targets_is_a_bool(op):
    with pytest.raises(TypeError, match=r"^check_targets must be a bool, got str$"):
        op(check_targets="no")


@pytest.mark.parametrize("place", [0, 1])
def test_a_mixture_is_not_negative(place):
    mix = [torch.rand(3), torch.rand(3)]
    mix[place][1] = -0.25
    with pytest.raises(ValueError, match=rf"^mix\[{place}\] must not be negative, got -0.25$"):
        ops.row_stats(X, IDS, mix=tuple(mix))


def test_statistics_can_be_written_to_before_backward():
    """Match plain torch, whose backward does not need them."""
    gradients = []
    for overwrite in (False, True):
        x = X.clone().requires_grad_()
        out = ops.row_stats(x, IDS, entropy=True)
        total = out.log_probs.sum() + out.entropy.square().sum() + out.lse.sum()
        if overwrite:
            with torch.no_grad():
                out.log_probs.zero_()
                out.lse.zero_()
        total.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
