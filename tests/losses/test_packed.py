"""Packed input without a batch dimension is a batch of one sequence."""

import pytest
import torch

from dllm_kernels import (
    DFlashDecayLoss,
    DraftDistillationLoss,
    MDLMCrossEntropyLoss,
    acceptance_length,
    acceptance_stats,
    compute_per_token_nll,
)
from tests.support.cases import LOSSES, ROWS

T, V, D, R = 6, 9, 4, 2
X, H, W, IDS = torch.randn(2 * T, V), torch.randn(2 * T, D), torch.randn(V, D), torch.randint(0, V - 1, (T,))
U, SECOND = torch.randn(2 * T, R), torch.randn(V, R)
NOISE, P, ON = torch.tensor([1, 0, 1, 1, 0, 1]), torch.full((T,), 0.5), torch.tensor([1, 1, 1, 0, 1, 1])
MASKS = (IDS, NOISE, P, ON)


def assert_packed_equals_batch(call):
    """``call(change)`` receives tensors with a batch dimension of 1, and changes them to packed ones."""
    packed, batch = call(lambda t: t[0]), call(lambda t: t)
    packed, batch = ([out] if isinstance(out, torch.Tensor) else out for out in (packed, batch))
    assert batch[0].count_nonzero()
    for got, wanted in zip(packed, batch, strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            assert wanted.isfinite().all()
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("case", [*LOSSES, *ROWS], ids=lambda case: case.name)
def test_packed_input_is_a_batch_of_one(case, form):
    torch.manual_seed(3)  # with a loss other than 0 in each case
    rows, of_both = 2 * T if case.width == 2 else T, ("extra", "teacher_extra")
    head = () if form == "logits" else (W, W[:, 0])
    arguments = case.arguments(form, (X if form == "logits" else H)[None, :rows], case.draw(1, T, V), head)
    if form == "hidden" and not case.separate:
        taught = ["teacher_extra"] * ("teacher_hidden" in arguments)
        arguments |= dict.fromkeys(["extra", *taught], (U[None, :rows], SECOND))

    def call(change):
        changed = {
            name: change(t)
            for name, t in arguments.items()
            if isinstance(t, torch.Tensor) and t.dim() > 1 and name not in (*case.head, "teacher_weight")
        }
        changed |= {name: (change(arguments[name][0]), SECOND) for name in of_both if name in arguments}
        return case.output(form, arguments | changed)

    assert_packed_equals_batch(call)


PREFIX, BLOCKS = torch.tensor([[2, 1]]), {"normalize": "sequence_blocks", "position_weights": "dpace"}
TEACHER_ROWS, COLUMNS = torch.tensor([[3, 9, 0, 1, 7, 11]]), torch.arange(V).flip(0)


@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_other_arguments_of_packed_drafts(form):
    def called(loss, *teacher, ids=IDS, **options):
        def call(change):
            changed = {name: change(options[name]) for name in options.keys() - {"num_blocks", "draft_to_target"}}
            rest = (*map(change, teacher), None if ids is None else change(ids[None]), change(ON[None]))
            if form == "logits":
                return loss(change(X[None, :T]), *rest, block_size=4, **(options | changed))
            return loss.forward_fused(change(H[None, :T]), W, *rest, block_size=4, **(options | changed))

        return call

    assert_packed_equals_batch(called(DFlashDecayLoss(normalize="mean"), prefix=PREFIX))
    assert_packed_equals_batch(called(DFlashDecayLoss(**BLOCKS), num_blocks=torch.tensor([3])))
    teacher = (X if form == "logits" else H)[None]
    options = {"teacher_rows": TEACHER_ROWS, "confidence_logits": P[None], "draft_to_target": COLUMNS}
    assert_packed_equals_batch(called(DraftDistillationLoss("tv"), teacher, ids=None, **options))


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
    with pytest.raises(ValueError, match=r"^mask must have shape \(1, 6\) \(that of output\), got \(5,\)$"):
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
