"""Masks whose values show that they were swapped raise an error on CPU, even if the loss does not use them."""

import math
import re

import numpy as np
import pytest
import torch

from dllm_kernels import (
    BlockDiffusionCrossEntropyLoss,
    DFlashDecayLoss,
    DLLMCollator,
    DraftDistillationLoss,
    HybridDiffusionLLMLoss,
    IDLMLoss,
    MaskedCrossEntropy,
    MDLMCrossEntropyLoss,
    SCDDLoss,
    acceptance_length,
    corruption,
    encoder_ar_loss,
    ops,
    policy_views,
)
from dllm_kernels.distributed import gather_head, global_token_count
from dllm_kernels.integrations.transformers import MaskedDiffusionCollator, pack_labels
from tests.conftest import usually
from tests.support.routines import FIRSTS

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
    message = "p_mask must hold probabilities, got bool; are noise_mask and p_mask swapped?"
    raises(message, name, form, noise=TIMES, p=NOISE.bool())


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
    for kind in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64):
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
    even = torch.tensor([1.0, 0.0, 1.0, 0.0]).expand(B, L)
    only = torch.where(even == 1, TIMES, math.nan)
    assert torch.equal(call(name, form, p=only, mask=even), call(name, form, mask=even))
    varying[1, 0], mask[1, 0] = 0.0, 0  # like a prompt, where nothing is supervised
    raises(message.replace("got 0.25", "got 0.0").replace("0.75 at position (1, 2)", "0.25 at position (1, 1)"),
           name, form, p=varying, mask=mask)  # fmt: skip


TWICE = torch.cat([X, X], 1)
MASKS = {
    "mdlm, noise_mask": lambda m: MDLMCrossEntropyLoss()(X, Y, m, TIMES, ON),
    "mdlm, loss_mask": lambda m: MDLMCrossEntropyLoss().forward_fused(H, W, Y, ON, TIMES, m),
    "mdlm, loss_mask_ar": lambda m: MDLMCrossEntropyLoss()(X, Y, ON, TIMES, ON, m),
    "hybrid, loss_mask_ar": lambda m: HybridDiffusionLLMLoss()(X, Y, ON, TIMES, ON, m, causal_logits=X),
    "block, loss_mask": lambda m: BlockDiffusionCrossEntropyLoss()(X, Y, ON, TIMES, m),
    "block, noise_mask": lambda m: BlockDiffusionCrossEntropyLoss()(X, Y, m, TIMES, ON),
    "scdd, loss_mask": lambda m: SCDDLoss(V - 1)(X, Y, ON, TIMES, m, noisy_input_ids=Y),
    "scdd, noise_mask": lambda m: SCDDLoss(V - 1)(X, Y, m, TIMES, ON, noisy_input_ids=Y),
    "idlm, answer_mask": lambda m: IDLMLoss()(TWICE, Y, m, ON, seq_len=L),
    "idlm, valid_mask": lambda m: IDLMLoss()(TWICE, Y, ON, m, seq_len=L),
    "encoder_ar, valid_mask": lambda m: encoder_ar_loss(X, Y, m),
    "dflash, block_mask": lambda m: DFlashDecayLoss()(X, Y, m),
    "dflash reduced, block_mask": lambda m: DFlashDecayLoss()._reduce(ON, m, None, None),
    "distillation, block_mask": lambda m: DraftDistillationLoss("kl")(X, X, None, m),
    "acceptance, mask": lambda m: acceptance_length(ON, m, L + 1),
    "acceptance, output": lambda m: acceptance_length(m, ON, L + 1),
    "dpace, mask": lambda m: ops.dpace_weights(ON, m),
    "token_nll, active": lambda m: ops.token_nll(X, Y, active=m),
    "weighted_nll, active": lambda m: ops.weighted_nll(X, Y, ON, active=m),
    "linear_row_stats, active": lambda m: ops.linear_row_stats(H, W, Y, active=m),
    "linear_sample, active": lambda m: ops.linear_sample(H, W, active=m),
    "soft_embedding, active": lambda m: ops.soft_embedding(H, W, W, active=m),
    "MTP, mask": lambda m: MaskedCrossEntropy()(X.flatten(0, 1), Y.flatten(), mask=m.flatten()),
    **{f"{name}, loss_mask": lambda m, case=case: case(Y, m) for name, case in FIRSTS.items()},
    "complementary, noise_mask": lambda m: corruption.complementary(m, ON),
    "complementary, loss_mask": lambda m: corruption.complementary(ON, m),
    "policy_views, loss_mask": lambda m: policy_views(Y, m, 6, "full"),
}
ROUTINES = *FIRSTS, "complementary", "policy_views"
LABELS, ADDITIVE = "; it looks like labels, pass labels != -100", "; it looks like an additive attention mask, "
NO_MASKS = {
    -100: LABELS,
    -torch.inf: ADDITIVE + "pass mask == 0",
    torch.finfo(torch.float32).min: ADDITIVE + "pass mask == 0",
    -1e3: ADDITIVE + "pass mask == 0",
    -999: "; pass a mask of 0 and 1",
    torch.nan: "; pass a mask of 0 and 1",
    torch.inf: "; pass a mask of 0 and 1",
}


@pytest.mark.parametrize("name", MASKS)
def test_a_tensor_that_is_no_mask(name):
    for value, hint in NO_MASKS.items():
        mask = ON.clone()
        mask[1, 2] = value
        where = "(6,)" if name.startswith("MTP") else "(1, 2)"
        message = f"{name.split(', ')[1]} must hold no negative number, NaN or infinity, got "
        with pytest.raises(
            ValueError, match="^" + re.escape(f"{message}{float(value)} at position {where}{hint}") + "$"
        ):
            MASKS[name](mask)
        if value in (-100, -999):
            with pytest.raises(ValueError, match="^" + re.escape(f"{message}{value} at position {where}{hint}") + "$"):
                MASKS[name](mask.short())


def test_the_value_that_says_most_is_named():
    mask = torch.tensor([[-1.0, torch.nan, -100.0, -torch.inf]])
    with pytest.raises(ValueError, match=r"got -100.0 at position \(0, 2\); it looks like labels"):
        corruption.corrupt_uniform(Y[:1], mask, 6)
    with pytest.raises(ValueError, match=r"got -inf at position \(0, 1\); it looks like an additive attention mask"):
        corruption.corrupt_uniform(Y[:1], mask[:, [0, 3, 1, 1]], 6)


def test_weights_may_be_negative():
    assert ops.weighted_nll(X, Y, -ON).loss == -ops.weighted_nll(X, Y, ON).loss
    ops.weighted_nll(X, Y, -100 * ON)


@pytest.mark.parametrize("field", ["loss_mask", "attention_mask"])
def test_a_field_of_a_sample_that_is_no_mask(field):
    sample = {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1], "attention_mask": [1, 1, 1]}
    for values in ([1, 1, -100], torch.tensor([1, 1, -100]), [1.0, 1.0, -100.0]):
        message = (
            rf"^sample 1, field '{field}' must hold no negative number, NaN or infinity, got -100.0 at position \(2,"
        )
        with pytest.raises(ValueError, match=message + r"\); it looks like labels, pass labels != -100$"):
            DLLMCollator()([sample, {**sample, field: values}])
    assert DLLMCollator()([{**sample, "input_ids": [-100, -1, 3]}])["input_ids"].tolist() == [[-100, -1, 3]]


TAKE_IDS = {
    **{name: call for name, call in MASKS.items() if name.endswith(", loss_mask") and name.split(",")[0] in ROUTINES},
    "pack_labels, loss_mask": lambda m: pack_labels(Y, m, ON, TIMES),
}


@pytest.mark.parametrize("name", TAKE_IDS)
def test_an_integer_loss_mask_with_an_entry_above_1_is_ids(name):
    """Tokens and mask of a routine that were swapped masked the first token of the vocabulary everywhere."""
    for dtype in (torch.int64, torch.int16, torch.uint8):
        ids = torch.tensor([[1, 0, 1, 1], [1, 2, 57, 0]], dtype=dtype)
        message = "loss_mask must hold no integer above 1, got 2 at position (1, 1); it looks like token ids"
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            TAKE_IDS[name](ids)
        TAKE_IDS[name](ids.clamp(max=1))
        TAKE_IDS[name](ids.float())  # weights above 1 are legal


@pytest.mark.parametrize(
    "ids", [[1, 2, 57], [1, 2, 3000], (True, 2, 57), torch.tensor([1, 2, 57]), np.uint8([1, 2, 57])]
)
def test_ids_as_the_loss_mask_of_a_sample(ids):
    sample = {"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1], "attention_mask": [1, 1, 1]}
    message = (
        r"^sample 1, field 'loss_mask' must hold no integer above 1, got 2 at position \(1,\); it looks like token"
    )
    for collate in (DLLMCollator(), MaskedDiffusionCollator(6)):
        with pytest.raises(ValueError, match=message):
            collate([sample, {**sample, "loss_mask": ids}])
    weights = [0.5, 1.0, 2.0]
    assert DLLMCollator()([{**sample, "loss_mask": weights}])["loss_mask"].tolist() == [weights]


def test_a_count_is_not_negative():
    masks = (Y, ON, TIMES, ON)
    calls = {
        "num_diffusion_tokens": lambda n: MDLMCrossEntropyLoss()(X, *masks, num_diffusion_tokens=n),
        "num_ar_tokens": lambda n: BlockDiffusionCrossEntropyLoss()(X, *masks, num_ar_tokens=n),
        "num_tokens": lambda n: encoder_ar_loss(X, Y, num_tokens=n),
        "num_blocks": lambda n: DFlashDecayLoss(normalize="blocks")(X, Y, ON, block_size=3, num_blocks=n),
        "num_sequences": lambda n: DFlashDecayLoss(normalize="sequences")(X, Y, ON, num_sequences=n),
    }
    for name, call in calls.items():
        for count in (-1, -0.5, torch.tensor(-1), torch.tensor([-1.0]), np.int64(-1)):
            with pytest.raises(ValueError, match=rf"^{name} must not be negative, got -"):
                call(count)
        assert call(0).__class__
    with pytest.raises(ValueError, match=r"^num_diffusion_tokens must not be negative, got -3$"):
        IDLMLoss()(TWICE, Y, ON, ON, seq_len=L, num_diffusion_tokens=-3)
    loss = DFlashDecayLoss(normalize="sequence_blocks")
    with pytest.raises(ValueError, match=r"^num_blocks must hold no negative number"):
        loss(X, Y, ON, block_size=3, num_blocks=torch.tensor([1, -1]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", usually(["mdlm", "scdd"], LOSSES))  # the others have the checks of these
def test_no_value_is_read_in_a_graph(name):
    torch._dynamo.reset()  # otherwise Dynamo would treat the losses as one function
    compiled = torch.compile(lambda *masks: call(name, "logits", *masks), backend="eager", fullgraph=True)
    assert compiled(NOISE, TIMES).isfinite()
    assert not compiled(TIMES, NOISE).isnan()


@pytest.mark.parametrize("count", [math.inf, math.nan, torch.tensor(math.inf), torch.tensor(math.nan)], ids=str)
@pytest.mark.parametrize("name", ["num_diffusion_tokens", "num_ar_tokens"])
def test_a_count_that_is_not_finite_is_rejected(name, count):
    on = torch.ones(1, 4)
    with pytest.raises(ValueError, match=f"^{name} must be finite, got (inf|nan)"):
        MDLMCrossEntropyLoss()(torch.randn(1, 4, 9), torch.zeros(1, 4).long(), on, on / 2, on, **{name: count})


def test_a_bool_tensor_is_no_count():
    on = torch.ones(1, 4)
    arguments = torch.randn(1, 4, 9), torch.zeros(1, 4).long(), on, on / 2, on
    with pytest.raises(ValueError, match=r"^num_diffusion_tokens must be a count, got a bool tensor; sum the mask"):
        MDLMCrossEntropyLoss()(*arguments, num_diffusion_tokens=on.bool().any())


@pytest.mark.parametrize("bad", [-100.0, -math.inf, math.nan])
def test_counting_over_ranks_takes_masks_only(bad):
    with pytest.raises(ValueError, match=r"^mask must hold no negative number, NaN or infinity"):
        global_token_count(torch.tensor([1.0, bad]))
    with pytest.raises(TypeError, match=r"^mask must be a torch\.Tensor, got list"):
        global_token_count([1, 0])


def test_a_head_to_gather_is_a_tensor_with_values():
    hidden = torch.randn(2, 8)
    with pytest.raises(TypeError, match=r"; pass its \.weight"):
        gather_head(torch.nn.Linear(8, 11), hidden)
    with pytest.raises(ValueError, match="must hold its values, got an empty tensor"):
        gather_head(torch.empty(0), hidden)
