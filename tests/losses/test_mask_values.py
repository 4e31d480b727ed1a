"""Masks whose values show that they were swapped raise an error on CPU, even if the loss does not use them."""

import re

import pytest
import torch

from dllm_kernels import BlockDiffusionCrossEntropyLoss, HybridDiffusionLLMLoss, MDLMCrossEntropyLoss, SCDDLoss
from tests.conftest import every_time

B, L, V, D = 2, 4, 7, 5
X, H, W, Y = torch.randn(B, L, V), torch.randn(B, L, D), torch.randn(V, D), torch.zeros(B, L, dtype=torch.long)
ON = torch.ones(B, L)
NOISE = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0]])
TIMES = torch.tensor([[0.5], [0.25]]).expand(B, L)
LOSSES = {
    "mdlm": MDLMCrossEntropyLoss,
    "hybrid": HybridDiffusionLLMLoss,
    "block diffusion": BlockDiffusionCrossEntropyLoss,
    "scdd": lambda: SCDDLoss(V - 1),
    "scdd, no uniform noise": lambda: SCDDLoss(V - 1, max_ratio=0.0),
}
losses = pytest.mark.parametrize("name", LOSSES)
forms = pytest.mark.parametrize("form", ["logits", "hidden"])


def call(name, form, noise=NOISE, p=TIMES, mask=ON):
    loss = LOSSES[name]()
    masks = {"noise_mask": noise, "p_mask": p, "loss_mask": mask, "noisy_input_ids": torch.where(NOISE != 0, V - 1, Y)}
    out = loss(X, Y, **masks) if form == "logits" else loss.forward_fused(H, W, Y, **masks)
    return out.total_loss


def raises(message, name, form, **masks):
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        call(name, form, **masks)


@forms
@losses
def test_noise_and_probabilities_swapped(name, form):
    message = "noise_mask must hold no fractions, got 0.5 at position (0, 0); are noise_mask and p_mask swapped?"
    for kind in (torch.float32, torch.int64, torch.float16):
        raises(message, name, form, noise=TIMES, p=NOISE.to(kind))
    raises(message, name, form, noise=TIMES.bfloat16(), p=NOISE)


@forms
@losses
def test_probabilities_and_supervision_swapped(name, form):
    message = (
        "loss_mask must hold no fractions beside a p_mask of 0 and 1, got 0.5 at position (0, 0); "
        "are p_mask and loss_mask swapped?"
    )
    for supervised in (NOISE, NOISE.long(), 0 * ON):
        raises(message, name, form, p=supervised, mask=TIMES)


@forms
@losses
def test_plausible_masks_are_accepted(name, form):
    """Collators may create fractions outside of the supervision, values above 1, and a loss_mask with fractions."""
    expected = call(name, form)
    for kind in (torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        torch.testing.assert_close(call(name, form, noise=NOISE.to(kind), mask=ON.to(kind)), expected)
    torch.testing.assert_close(call(name, form, noise=3 * NOISE, mask=ON / 2), expected)
    half = torch.tensor([[0.5, 1.0, 1.0, 0.0]] * B)
    torch.testing.assert_close(call(name, form, noise=half, mask=half == 1), call(name, form, noise=ON, mask=half == 1))
    assert call(name, form, p=ON).isfinite()
    assert call(name, form, p=ON, mask=ON / 2) == call(name, form, p=ON)
    assert call(name, form, noise=torch.zeros(B, L), p=torch.zeros(B, L)).isfinite()


@forms
@pytest.mark.parametrize("name", [name for name in LOSSES if name.startswith("scdd")])
def test_a_sequence_has_one_time(name, form):
    """All supervised positions of a sequence share one time. Other positions are not read."""
    varying = TIMES.clone()
    varying[1, 2] = 0.75
    message = (
        "p_mask must hold one time for each sequence, got 0.25 at position (1, 0) and 0.75 at position (1, 2); "
        "are noise_mask and p_mask swapped?"
    )
    raises(message, name, form, p=varying)
    mask = ON.clone()
    mask[1, 2] = 0
    assert torch.equal(call(name, form, p=varying, mask=mask), call(name, form, mask=mask))
    varying[1, 0], mask[1, 0] = 0.0, 0  # like a prompt, where nothing is supervised
    raises(message.replace("got 0.25", "got 0.0").replace("0.75 at position (1, 2)", "0.25 at position (1, 1)"),
           name, form, p=varying, mask=mask)  # fmt: skip


@pytest.mark.parametrize("name", every_time(["mdlm"], LOSSES))
def test_no_value_is_read_in_a_graph(name):
    torch._dynamo.reset()  # otherwise Dynamo would treat the losses as one function
    compiled = torch.compile(lambda *masks: call(name, "logits", *masks), backend="eager", fullgraph=True)
    assert compiled(NOISE, TIMES).isfinite()
    assert not compiled(TIMES, NOISE).isnan()
