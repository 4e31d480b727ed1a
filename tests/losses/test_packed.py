"""Packed input without a batch dimension is a batch of one sequence."""

import re

import pytest
import torch

from dllm_kernels import (
    BlockDiffusionCrossEntropyLoss,
    DFlashDecayLoss,
    DraftDistillationLoss,
    HybridDiffusionLLMLoss,
    IDLMLoss,
    MDLMCrossEntropyLoss,
    SCDDLoss,
    compute_per_token_nll,
    encoder_ar_loss,
    encoder_ar_loss_fused,
)

T, V, D, R = 6, 9, 4, 2
X, H, W, IDS = torch.randn(2 * T, V), torch.randn(2 * T, D), torch.randn(V, D), torch.randint(0, V - 1, (T,))
U, SECOND = torch.randn(2 * T, R), torch.randn(V, R)
NOISE, P, ON = torch.tensor([1, 0, 1, 1, 0, 1]), torch.full((T,), 0.5), torch.tensor([1, 1, 1, 0, 1, 1])
MASKS = (IDS, NOISE, P, ON)
Z = torch.where(NOISE != 0, V - 1, IDS)


def of_loss(loss, x=T, **options):
    """Return the loss from logits and from hidden states, as functions of a change of every tensor."""

    def changed(change):
        return {name: change(t) if isinstance(t, torch.Tensor) else t for name, t in options.items()}

    def logits(change):
        other = {"causal_logits": change(X[T:])} if "loss_mask_ar" in options and x == T else {}
        return loss(change(X[:x]), *map(change, MASKS), **changed(change), **other)

    def hidden(change):
        other = {"causal_hidden": change(H[T:])} if "loss_mask_ar" in options and x == T else {}
        extra = None if other else (change(U[:x]), SECOND)
        return loss.forward_fused(
            change(H[:x]), W, *map(change, MASKS), **changed(change), **other, extra=extra
        )  # fmt: skip

    return {"logits": logits, "hidden": hidden}


def idlm(loss):
    options = {"seq_len": T}
    return {
        "logits": lambda change: loss(change(X), change(IDS), change(ON), change(ON), **options),
        "hidden": lambda change: loss.forward_fused(change(H), W, change(IDS), change(ON), change(ON), **options),
    }


def encoder(**options):
    return {
        "logits": lambda change: encoder_ar_loss(change(X[:T]), change(IDS), change(ON), **options),
        "hidden": lambda change: encoder_ar_loss_fused(
            change(H[:T]), W, change(IDS), change(ON), extra=(change(U[:T]), SECOND), **options
        ),
    }


CALLS = {
    "mdlm": of_loss(MDLMCrossEntropyLoss(), num_diffusion_tokens=torch.tensor([5])),
    "mdlm, rows": of_loss(MDLMCrossEntropyLoss(reduction="none"), num_diffusion_tokens=5),
    "block": of_loss(BlockDiffusionCrossEntropyLoss()),
    "hybrid": of_loss(HybridDiffusionLLMLoss(), loss_mask_ar=ON, num_ar_tokens=3),
    "hybrid, one tensor": of_loss(HybridDiffusionLLMLoss(reduction="none"), 2 * T, loss_mask_ar=ON),
    "scdd": of_loss(SCDDLoss(V - 1), noisy_input_ids=Z),
    "idlm": idlm(IDLMLoss()),
    "idlm, rows": idlm(IDLMLoss(reduction="none")),
    "encoder_ar": encoder(),
    "encoder_ar, rows": encoder(reduction="none"),
}


@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("name", CALLS)
def test_packed_input_is_a_batch_of_one(name, form):
    call = CALLS[name][form]
    packed, batch = call(lambda t: t), call(lambda t: t if t.shape == (1,) else t[None])
    for got, wanted in zip(*([out] if isinstance(out, torch.Tensor) else out for out in (packed, batch)), strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            assert wanted.isfinite().all()
            assert wanted.abs().sum() > 0
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_the_gradient_has_the_shape_of_the_input():
    x = X[:T].clone().requires_grad_()
    MDLMCrossEntropyLoss()(x, *MASKS).total_loss.backward()
    assert x.grad.shape == x.shape
    assert x.grad.abs().sum() > 0


def test_nll_takes_any_shape():
    assert torch.equal(compute_per_token_nll(X[:T], IDS), compute_per_token_nll(X[None, :T], IDS[None])[0])


@pytest.mark.parametrize(
    ("call", "rows", "layout"),
    [
        (lambda: DFlashDecayLoss()(X[:T], IDS, ON), "logits", "V"),
        (lambda: DFlashDecayLoss().forward_fused(H[:T], W, IDS, ON), "hidden", "D"),
        (lambda: DraftDistillationLoss("kl")(X[:T], X[:T], IDS, ON), "logits", "V"),
    ],
)
def test_losses_of_blocks_say_what_to_do(call, rows, layout):
    sizes = {"V": V, "D": D}
    message = (
        f"{rows} must have shape [B, L, {layout}], got {(T, sizes[layout])}; pass packed rows as a batch of one "
        "sequence, every tensor with unsqueeze(0)"
    )
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        call()


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"^loss_mask must have shape \(1, 6\)"):
        MDLMCrossEntropyLoss()(X[:T], IDS, NOISE, P, ON[1:])
    with pytest.raises(ValueError, match=r"^logits must have shape \[B, L, V\], got \(6, 9\)$"):
        MDLMCrossEntropyLoss()(X[:T], IDS[None], NOISE, P, ON)
