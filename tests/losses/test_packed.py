"""Packed input without a batch dimension is a batch of one sequence."""

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
    acceptance_length,
    acceptance_stats,
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


def dflash(loss, **options):
    def changed(change):
        return {name: change(t) if isinstance(t, torch.Tensor) and t.dim() else t for name, t in options.items()}

    return {
        "logits": lambda change: loss(change(X[:T]), change(IDS), change(ON), block_size=4, **changed(change)),
        "hidden": lambda change: loss.forward_fused(
            change(H[:T]), W, change(IDS), change(ON), block_size=4, extra=(change(U[:T]), SECOND), **changed(change)
        ),
    }


def distillation(loss, ids=IDS, rows=None, **options):
    """``rows``: teacher rows, which are then those of all sequences; ``options`` per row are ``confidence_logits``."""
    t = slice(T, None) if rows is None else slice(None)

    def common(change):
        per_row = {"teacher_rows": rows, **options}
        per_row = {name: t if t is None or name == "draft_to_target" else change(t) for name, t in per_row.items()}
        return {"block_size": 4, **per_row}

    def target(change):
        return (None if ids is None else change(ids), change(ON))

    return {
        "logits": lambda change: loss(change(X[:T]), change(X[t]), *target(change), **common(change)),
        "hidden": lambda change: loss.forward_fused(
            change(H[:T]), W, change(H[t]), *target(change), extra=(change(U[:T]), SECOND),
            teacher_extra=(change(U[t]), SECOND), **common(change),
        ),
    }  # fmt: skip


BLOCKS = {"normalize": "sequence_blocks", "position_weights": "dpace"}
CALLS = {
    "dflash": dflash(DFlashDecayLoss()),
    "dflash, prefix": dflash(DFlashDecayLoss(normalize="mean"), prefix=torch.tensor([2, 1])),
    "dflash, blocks of each sequence": dflash(DFlashDecayLoss(**BLOCKS), num_blocks=torch.tensor([3])),
    "dflash, rows": dflash(DFlashDecayLoss(reduction="none"), num_tokens=torch.tensor(5)),
    "distillation": distillation(DraftDistillationLoss("kl")),
    "distillation, no targets": distillation(
        DraftDistillationLoss("tv"),
        None,
        torch.tensor([3, 9, 0, 1, 7, 11]),
        confidence_logits=P,
        draft_to_target=torch.arange(V).flip(0),
    ),
    "distillation, rows": distillation(DraftDistillationLoss({"ce": 0.5, "l1": 1.0}, reduction="none", **BLOCKS)),
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
    packed, batch = ([out] if isinstance(out, torch.Tensor) else out for out in (packed, batch))
    assert batch[0].count_nonzero()
    for got, wanted in zip(packed, batch, strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            assert wanted.isfinite().all()
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_the_gradient_has_the_shape_of_the_input():
    x = X[:T].clone().requires_grad_()
    MDLMCrossEntropyLoss()(x, *MASKS).total_loss.backward()
    assert x.grad.shape == x.shape
    assert x.grad.abs().sum() > 0


def test_nll_takes_any_shape():
    assert torch.equal(compute_per_token_nll(X[:T], IDS), compute_per_token_nll(X[None, :T], IDS[None])[0])


def test_the_number_of_blocks_of_a_packed_sequence_is_0_d():
    loss = DFlashDecayLoss(**BLOCKS)
    packed = loss(X[:T], IDS, ON, block_size=4, num_blocks=torch.tensor(3))
    batch = loss(X[None, :T], IDS[None], ON[None], block_size=4, num_blocks=torch.tensor([3]))
    assert torch.equal(packed.total_loss, batch.total_loss)


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("anchor_row", [False, True])
def test_metrics_of_packed_rows(sampling, anchor_row):
    loss = DraftDistillationLoss("tv", anchor_row=anchor_row)
    size = 3 if anchor_row else 4
    options = {"anchor_row": anchor_row, "sampling": sampling}
    out = loss(X[:T], X[T:], None, ON, block_size=size)
    given = out.acceptance_rate if sampling else out.draft_correct
    want = acceptance_stats(given, ON[None], size, **options)
    assert want[1] > 0
    for output in (out, given, given[0]):
        assert torch.equal(torch.stack(acceptance_stats(output, ON, size, **options)), torch.stack(want))
        assert acceptance_length(output, ON, size, **options) == want[0] / want[1]
    with pytest.raises(ValueError, match=r"^mask must have shape \(1, 6\) \(that of correct\), got \(5,\)$"):
        acceptance_stats(given, ON[1:], size, **options)


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"^loss_mask must have shape \(1, 6\)"):
        MDLMCrossEntropyLoss()(X[:T], IDS, NOISE, P, ON[1:])
    for loss in (MDLMCrossEntropyLoss(), DFlashDecayLoss()):
        masks = MASKS[1:] if isinstance(loss, MDLMCrossEntropyLoss) else (ON,)
        with pytest.raises(ValueError, match=r"^logits must have shape \[B, L, V\], got \(6, 9\)$"):
            loss(X[:T], IDS[None], *masks)
    with pytest.raises(ValueError, match=r"^block_mask must have shape \(1, 6\)"):
        DFlashDecayLoss()(X[:T], IDS, ON[1:])
