"""DFlash on rows in blocks, ``[B, blocks, k, V]``: the oracle's loss, and the results of the rows ``[B, T, V]``."""

import re

import pytest
import torch
import torch.nn.functional as F

from dllm_kernels import DFlashDecayLoss, acceptance_length, acceptance_stats, draft_accuracy, fused_head
from tests.conftest import DEVICE

B, BLOCKS, K, V, D, R = 2, 3, 4, 19, 8, 2
SHAPE, T = (B, BLOCKS, K), BLOCKS * K
PER_ROW = "draft_correct", "row_losses", "row_weights"
SETTINGS = {
    "decay, tokens": {"loss_gamma": 3.0},
    "decay, mean": {"loss_gamma": 2.0, "normalize": "mean"},
    "no decay, blocks": {"loss_gamma": None, "normalize": "blocks"},
    "dpace, sequences": {"position_weights": "dpace", "normalize": "sequences"},
    "anchor, sequence blocks": {"anchor_row": True, "normalize": "sequence_blocks"},
}
FORMS = "logits", "hidden", "deferred"


def per_row():
    """Return targets, one of which is -100, and a mask with a hole, fractions and an empty block."""
    torch.manual_seed(0)
    targets = torch.randint(0, V, SHAPE, device=DEVICE)
    mask = torch.rand(SHAPE, device=DEVICE)
    targets[0, 0, 1], mask[0, 1, 2], mask[1, 2] = -100, 0, 0
    return targets, mask


def size_of(loss):
    return K if loss.anchor_row else K + 1


def call(loss, form, h, w, targets, mask, method="forward", **options):
    """Call the loss on ``h [..., D]`` and ``w [V, D]``, or on the logits that they make."""
    if form == "hidden":
        return loss.forward_fused(h, w, targets, mask, **options)
    if form == "logits":
        return getattr(loss, method)(F.linear(h, w), targets, mask, **options)
    head = torch.nn.Linear(D, V, bias=False, device=DEVICE)
    head.weight = torch.nn.Parameter(w.detach())
    with fused_head(head, head=head, on_logits="raise"):
        return getattr(loss, method)(head(h), targets, mask, **options)


@pytest.mark.parametrize("size_given", [False, True], ids=["no block_size", "block_size"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SETTINGS)
def test_results_are_those_of_sequences(name, form, size_given):
    """Equal bits; results per row have the shape of the targets."""
    targets, mask = per_row()
    h, w = torch.randn(*SHAPE, D, device=DEVICE), torch.randn(V, D, device=DEVICE)
    for reduction in ("total", "none"):
        loss = DFlashDecayLoss(**SETTINGS[name], reduction=reduction)
        size = size_of(loss)
        options = {"num_blocks": torch.tensor([3, 2], device=DEVICE)} if name.endswith("sequence blocks") else {}
        if loss.position_weights == "decay":
            options["prefix"] = torch.tensor([[1, 2, 3], [K, 1, 1]], device=DEVICE)
        given = {"block_size": size} if size_given else {}
        got = call(loss, form, h, w, targets, mask, **options, **given)
        flat = call(loss, form, h.flatten(1, 2), w, targets.flatten(1), mask.flatten(1), block_size=size, **options)
        for field, ours, want in zip(got._fields, got, flat, strict=True):
            assert (ours is None) == (want is None)
            if want is not None:
                assert ours.shape == (SHAPE if field in PER_ROW else want.shape)
                assert torch.equal(ours, want.reshape(ours.shape))
        assert draft_accuracy(got) == draft_accuracy(flat)
        assert len(draft_accuracy(got)) == 1 + K
        of_blocks = {"anchor_row": loss.anchor_row}
        for of, prefix in ((got, None), (got.draft_correct, got.prefix)):
            stats = acceptance_stats(of, mask, size, **of_blocks, prefix=prefix)
            want = acceptance_stats(flat, mask.flatten(1), size, **of_blocks)
            assert stats == want
            assert acceptance_length(of, mask, size, **of_blocks, prefix=prefix) == want[0] / want[1]


def test_the_decay_restarts_at_each_block():
    """By hand: uniform logits have the NLL log V, and the weights of a block are 1, 1/2, 1/4, 1/8."""
    gamma = 1 / torch.log(torch.tensor(2.0)).item()
    logits, targets = torch.zeros(1, 2, 4, 5), torch.zeros(1, 2, 4, dtype=torch.long)
    out = DFlashDecayLoss(gamma)(logits, targets, torch.ones(1, 2, 4))
    torch.testing.assert_close(out.total_loss, torch.tensor(2 * 1.875) * torch.log(torch.tensor(5.0)))
    torch.testing.assert_close(out.weight_sum, torch.tensor(2 * 1.875))
    paper = DFlashDecayLoss("paper")(torch.zeros(1, 1, 7, 5), targets.new_zeros(1, 1, 7), torch.ones(1, 1, 7))
    torch.testing.assert_close(paper.weight_sum, torch.exp(-torch.arange(7) / 4).sum())


@pytest.mark.parametrize("form", ["logits", "deferred"])
@pytest.mark.parametrize("name", SETTINGS)
def test_weights_and_nll(name, form):
    targets, mask = per_row()
    h, w = torch.randn(*SHAPE, D, device=DEVICE), torch.randn(V, D, device=DEVICE)
    loss = DFlashDecayLoss(**SETTINGS[name])
    out, nll = call(loss, form, h, w, targets, mask, "forward_with_token_nll")
    plain = F.cross_entropy(F.linear(h, w).flatten(0, 2), targets.flatten(), reduction="none").view(SHAPE)
    torch.testing.assert_close(nll, torch.where(mask != 0, plain, 0.0))
    weights = loss.position_weights(mask, token_nll=nll)
    flat = loss.position_weights(mask.flatten(1), size_of(loss), nll.flatten(1))
    assert torch.equal(weights, flat.view(SHAPE))
    torch.testing.assert_close(weights.sum(), out.weight_sum)
    mean = loss.weighted_mean(nll, weights)
    torch.testing.assert_close(mean, (nll * weights).sum() / (weights.sum() + 1e-6))
    if loss.position_weights == "decay":
        prefix = torch.tensor([[1, 2, 3], [K, 1, 1]], device=DEVICE)
        flat = loss.position_weights(mask.flatten(1), size_of(loss), prefix=prefix)
        assert torch.equal(loss.position_weights(mask, prefix=prefix), flat.view(SHAPE))


def test_non_contiguous_rows_and_no_blocks():
    targets, mask = per_row()
    logits = torch.randn(B, K, V, BLOCKS, device=DEVICE).permute(0, 3, 1, 2)
    loss = DFlashDecayLoss(normalize="mean")
    assert torch.equal(loss(logits, targets, mask).total_loss, loss(logits.contiguous(), targets, mask).total_loss)
    none = loss(logits[:, :0], targets[:, :0], mask[:, :0])
    assert none.total_loss == 0
    assert none.draft_correct.shape == (B, 0, K)


@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_shapes_that_do_not_fit(form):
    targets, mask = per_row()
    h, w = torch.randn(*SHAPE, D, device=DEVICE), torch.randn(V, D, device=DEVICE)
    name, last = ("logits", V) if form == "logits" else ("hidden", D)
    letter = "V" if form == "logits" else "D"

    def raises(message, h, targets, mask, error=ValueError, anchor_row=False, **options):
        with pytest.raises(error, match="^" + re.escape(message)):
            call(DFlashDecayLoss(anchor_row=anchor_row), form, h, w, targets, mask, **options)

    of = f"([B, blocks, k] of {name} [B, blocks, k, {letter}])"
    raises(f"target_ids must have shape (2, 3, 4) {of}, got (2, 3, 3)", h, targets[..., 1:], mask)
    raises(f"target_ids must have shape (2, 3, 4) {of}, got (2, 12)", h, targets.flatten(1), mask)
    flat = f"{name} must have shape [B, blocks, k, {letter}] to go with target_ids of shape (2, 3, 4), "
    raises(f"{flat}got (2, 12, {last})", h.flatten(1, 2), targets, mask)
    raises("block_mask must have shape (2, 3, 4) (that of target_ids), got (2, 12)", h, targets, mask.flatten(1))
    blocks = "block_size must be 5 for target_ids [B, blocks, k] = (2, 3, 4), because a block has block_size - 1 rows "
    raises(f"{blocks}with anchor_row=False, got 4", h, targets, mask, block_size=4)
    blocks = "block_size must be 4 for target_ids [B, blocks, k] = (2, 3, 4), because a block has block_size rows "
    raises(f"{blocks}with anchor_row=True, got 5", h, targets, mask, block_size=5, anchor_row=True)
    raises("block_size must be an int, got str", h, targets, mask, TypeError, block_size="5")
    prefix = torch.ones(B, BLOCKS + 1, dtype=torch.long, device=DEVICE)
    raises("prefix must have shape (2, 3) (an entry for each block), got (2, 4)", h, targets, mask, prefix=prefix)
    raises("block_mask must be a torch.Tensor, got None", h, targets, None, TypeError)
    raises("block_mask must not require a gradient", h, targets, mask.requires_grad_())


def test_metrics_of_shapes_that_do_not_fit():
    mask = torch.ones(SHAPE)
    with pytest.raises(ValueError, match=r"^block_size must be 5 for output \[B, blocks, k\] = \(2, 3, 4\), because "):
        acceptance_length(mask, mask, 4)
    with pytest.raises(ValueError, match=r"^block_size must be 5 for block_mask \[B, blocks, k\] = \(2, 3, 4\), "):
        DFlashDecayLoss().position_weights(mask, 4)
    with pytest.raises(ValueError, match=r"^mask must have shape \(2, 3, 4\) \(that of output\), got \(2, 12\)$"):
        acceptance_length(mask, mask.flatten(1), 5)


@pytest.mark.exhaustive
def test_in_a_compiled_graph():
    targets, mask = per_row()
    loss = DFlashDecayLoss(normalize="mean")
    step = torch.compile(lambda x, t, m: loss(x, t, m), backend="aot_eager", fullgraph=True, dynamic=True)
    logits = torch.randn(*SHAPE, V, device=DEVICE)
    got, want = step(logits, targets, mask), loss(logits, targets, mask)
    for ours, plain in zip(got, want, strict=True):
        if plain is not None:
            torch.testing.assert_close(ours, plain)
