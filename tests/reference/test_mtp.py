"""The oracle of multi-token prediction: labels by hand, losses in closed form, gradcheck.

Logits are logarithms of odds (1, 2, 1): token 1 has NLL ln 2, tokens 0 and 2 have 2 ln 2.
"""

import math

import pytest
import torch

from reference import masked_cross_entropy, mtp_labels, mtp_loss, seq_idx_from_cu_seqlens

LN2 = math.log(2.0)
NAN = math.nan
X = -100


def odds_121(*shape):
    return torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64).log().repeat(*shape, 1)


def test_labels_shift_left_by_depth_plus_one():
    labels = torch.tensor([[5, 6, 7, X], [1, 2, 3, 4]])
    assert mtp_labels(labels, 0).tolist() == [[6, 7, X, X], [2, 3, 4, X]]
    assert mtp_labels(labels, 1).tolist() == [[7, X, X, X], [3, 4, X, X]]
    assert mtp_labels(labels, 3).tolist() == [[X] * 4] * 2
    assert mtp_labels(labels, 9).tolist() == [[X] * 4] * 2  # deeper than the sequence is long
    assert labels.tolist() == [[5, 6, 7, X], [1, 2, 3, 4]]


def test_labels_of_another_ignore_index():
    assert mtp_labels(torch.tensor([5, 6, 7]), 0, ignore_index=-1).tolist() == [6, 7, -1]


def test_labels_do_not_cross_packed_sub_sequences():
    labels = torch.tensor([[10, 11, 12, 13, 14, 15]])
    seq_idx = torch.tensor([3, 3, 3, 0, 0, 7])  # only equality counts
    assert mtp_labels(labels, 0, seq_idx=seq_idx).tolist() == [[11, 12, X, 14, X, X]]
    assert mtp_labels(labels, 1, seq_idx=seq_idx[None]).tolist() == [[12, X, X, X, X, X]]


def test_labels_of_a_sub_sequence_index_that_comes_back_follow_equality():
    # position 0 looks at position 2 two steps on, whose index is its own
    assert mtp_labels(torch.tensor([5, 6, 7]), 1, seq_idx=torch.tensor([1, 0, 1])).tolist() == [7, X, X]


def test_a_boundary_belongs_to_the_new_sequence_and_padding_to_its_own():
    assert seq_idx_from_cu_seqlens(torch.tensor([0, 3, 5]), 7).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert seq_idx_from_cu_seqlens(torch.tensor([[0, 2, 2, 4]]), 4).tolist() == [0, 0, 2, 2]  # an empty one


# Two depths over labels 0 1 0 1: depth 0 sees 1 0 1, ln 2 + 2 ln 2 + ln 2 = 4 ln 2; depth 1 sees 0 1, 3 ln 2.
LABELS = torch.tensor([[0, 1, 0, 1]])


def two_depths():
    return [odds_121(1, 4), odds_121(1, 4)]


def test_loss_is_the_scaled_mean_of_the_depths_sums():
    loss, per_depth = mtp_loss(two_depths(), LABELS, 0.1)
    assert [x.item() for x in per_depth] == pytest.approx([4 * LN2, 3 * LN2])
    assert loss.item() == pytest.approx(0.1 / 2 * 7 * LN2)


@pytest.mark.parametrize("count", [4, torch.tensor(4), 4.0])
def test_loss_divides_by_the_count_of_labels(count):
    loss, per_depth = mtp_loss(two_depths(), LABELS, 0.1, num_label_tokens=count)
    assert [x.item() for x in per_depth] == pytest.approx([LN2, 0.75 * LN2])
    assert loss.item() == pytest.approx(0.1 / 2 * 1.75 * LN2)


@pytest.mark.parametrize("count", [0, torch.tensor(0)])
def test_a_count_of_zero_gives_zero_with_zero_gradient(count):
    logits = torch.full((1, 4, 3), NAN, requires_grad=True)
    loss, _ = mtp_loss([logits], LABELS, 0.1, num_label_tokens=count)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad.eq(0).all()


def test_packed_sequences_by_boundaries_and_by_index():
    # labels within (0 1) and (0 1): depth 0 keeps 1 and 1, 2 ln 2; depth 1 keeps nothing
    for packing in ({"cu_seqlens": torch.tensor([0, 2, 4])}, {"seq_idx": torch.tensor([8, 8, 9, 9])}):
        loss, per_depth = mtp_loss(two_depths(), LABELS, 0.1, **packing)
        assert [x.item() for x in per_depth] == pytest.approx([2 * LN2, 0.0])
        assert loss.item() == pytest.approx(0.1 * LN2)


def test_seq_idx_wins_over_boundaries():
    loss, _ = mtp_loss(two_depths(), LABELS, 0.1, cu_seqlens=torch.tensor([0, 2, 4]), seq_idx=torch.zeros(1, 4))
    assert loss.item() == pytest.approx(0.1 / 2 * 7 * LN2)


def test_flat_labels_beside_logits_with_a_batch_of_one():
    for packing in ({"cu_seqlens": torch.tensor([0, 2, 4])}, {"seq_idx": torch.tensor([[8, 8, 9, 9]])}):
        loss, _ = mtp_loss(two_depths(), LABELS[0], 0.1, **packing)
        assert loss.item() == pytest.approx(0.1 * LN2)


def test_rows_without_a_label_are_inert():
    logits = odds_121(1, 4)
    logits[0, 3] = NAN  # the last position of depth 0 predicts nothing
    logits.requires_grad_()
    loss, _ = mtp_loss([logits], LABELS, 1.0)
    loss.backward()
    assert loss.item() == pytest.approx(4 * LN2)
    assert logits.grad[0, 3].eq(0).all()


def test_masked_cross_entropy():
    logits, labels = odds_121(4), torch.tensor([1, 0, X, 2])
    assert masked_cross_entropy(logits, labels).item() == pytest.approx(5 * LN2)  # 1 + 2 + 0 + 2
    assert masked_cross_entropy(logits, labels, num_label_tokens=10).item() == pytest.approx(LN2 / 2)
    assert masked_cross_entropy(logits, labels, reduction="mean").item() == pytest.approx(5 * LN2 / 3)
    rows = masked_cross_entropy(logits[None], labels[None], reduction="none")
    assert rows.tolist() == pytest.approx([LN2, 2 * LN2, 0.0, 2 * LN2])


@pytest.mark.parametrize("mask", [[1, 1, 1, 0], [True, True, True, False], [0.5, 2.0, 1.0, 0.0]])
def test_masked_cross_entropy_ignores_masked_labels_without_modifying_them(mask):
    logits, labels = odds_121(4), torch.tensor([1, 0, X, 2])
    logits[3] = NAN
    assert masked_cross_entropy(logits, labels, torch.tensor(mask)).item() == pytest.approx(3 * LN2)
    assert labels.tolist() == [1, 0, X, 2]


def test_gradcheck():
    depths = tuple(torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    labels = torch.tensor([[0, 1, 2, 1], [X, 2, 0, 0]])
    assert torch.autograd.gradcheck(lambda *x: mtp_loss(x, labels, 0.3, 5).loss, depths)
