"""The oracle of the losses: numbers worked out by hand, gradcheck, and each sentence of their semantics.

Logits are logarithms of small integer odds: under odds (1, 2, 1) token 1 has NLL ln 2 and token 0 has 2 ln 2.
"""

import math

import pytest
import torch

from reference import (
    acceptance_length,
    argmax_match,
    block_diffusion_loss,
    decay_weights,
    dflash_loss,
    draft_accuracy_per_position,
    draft_distillation_loss,
    encoder_ar_loss,
    hybrid_loss,
    idlm_loss,
    mdlm_loss,
    policy_loss,
    policy_views,
    scdd_loss,
    scdd_schedule,
)

LN2 = math.log(2.0)
NAN = math.nan
MASK_DTYPES = [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16]
COUNTS = [5, 5.0, torch.tensor(5), torch.tensor(5.0), torch.tensor([5]).squeeze()]


def odds_121(L):
    """Return logits ``[1, L, 3]`` of odds (1, 2, 1) everywhere."""
    return torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64).log().repeat(1, L, 1)


def row(*values, dtype=None):
    return torch.tensor([values], dtype=dtype)


def backward(loss):
    """Compute the gradients, and return the number."""
    loss.backward()
    return loss.item()


def with_nan_rows(logits, positions):
    """Return a leaf copy of ``logits [1, L, V]`` with NaN in the rows at ``positions``."""
    logits = logits.clone()
    logits[0, positions] = NAN
    return logits.requires_grad_()


# MDLM: positions are corrupted and supervised, supervised only, corrupted only, both, both without a target.
TARGETS = row(1, 1, 0, 0, -100)
NOISE = row(1, 0, 1, 1, 1)
SUPERVISED = row(1, 1, 0, 1, 1)
P = row(0.5, 0.25, 0.5, 0.25, 0.5)
MDLM = 10 * LN2  # ln 2 / 0.5 + 2 ln 2 / 0.25 = 2 ln 2 + 8 ln 2


@pytest.mark.parametrize("dtype", MASK_DTYPES)
def test_mdlm_value(dtype):
    loss = mdlm_loss(odds_121(5), TARGETS, NOISE.to(dtype), P, SUPERVISED.to(dtype))
    assert loss.item() == pytest.approx(MDLM)


@pytest.mark.parametrize(("count", "divisor"), [*((n, 5) for n in COUNTS), (0, 1), (1, 1), (torch.tensor(0), 1)])
def test_the_sum_is_divided_by_the_count_or_by_one_at_least(count, divisor):
    assert mdlm_loss(odds_121(5), TARGETS, NOISE, P, SUPERVISED, count).item() == pytest.approx(MDLM / divisor)
    assert block_diffusion_loss(odds_121(5), TARGETS, SUPERVISED, count).item() == pytest.approx(BLOCK / divisor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("p", [0.0, 1e-12])
def test_mdlm_probabilities_are_clamped_at_1e_8_also_where_their_dtype_cannot_hold_it(p, dtype):
    loss = mdlm_loss(odds_121(1), row(1), row(1), row(p, dtype=dtype), row(1))
    assert loss.item() == pytest.approx(LN2 * 1e8)


def test_mdlm_rows_of_weight_zero_are_inert():
    logits = with_nan_rows(odds_121(5), [1, 2, 4])
    assert backward(mdlm_loss(logits, TARGETS, NOISE, row(0.5, NAN, NAN, 0.25, 0.5), SUPERVISED)) == pytest.approx(MDLM)
    # weight * (softmax - one-hot): 2 * (1/4, -1/2, 1/4) and 4 * (-3/4, 1/2, 1/4)
    zero = [0.0, 0.0, 0.0]
    expected = [[[0.5, -1.0, 0.5], zero, zero, [-3.0, 2.0, 1.0], zero]]
    torch.testing.assert_close(logits.grad, torch.tensor(expected, dtype=torch.float64))


# Block diffusion: the supervised positions are 0, 1, 3 and 4, and 4 has no target: ln 2 + ln 2 + 2 ln 2.
BLOCK = 4 * LN2


@pytest.mark.parametrize("dtype", MASK_DTYPES)
def test_block_diffusion_divides_by_the_supervised_positions_here(dtype):
    loss = block_diffusion_loss(odds_121(5), TARGETS, SUPERVISED.to(dtype))
    assert loss.item() == pytest.approx(BLOCK / 4)


def test_block_diffusion_is_zero_over_nothing():
    logits = with_nan_rows(odds_121(2), [0, 1])
    assert backward(block_diffusion_loss(logits, row(0, 1), row(0, 0))) == 0.0
    assert logits.grad.eq(0).all()


def test_block_diffusion_loss_mask_counts_nonzero_as_one_and_its_zeros_are_inert():
    logits = with_nan_rows(odds_121(5), [2])
    assert backward(block_diffusion_loss(logits, TARGETS, row(2.0, 0.5, 0.0, -1.0, 1.0))) == pytest.approx(BLOCK / 4)
    assert logits.grad.isfinite().all()


# Hybrid. Next-token targets 1, 0, 0, -100 with weights AR[1:]: 2 * ln 2 + 0 + 0.5 * 2 ln 2 + 1 * 0 = 3 ln 2.
AR = row(9.0, 2.0, 0.0, 0.5, 1.0)
NEXT = 3 * LN2


def hybrid(logits=None, loss_mask_ar=AR, **options):
    logits = odds_121(5) if logits is None else logits
    return hybrid_loss(logits, TARGETS, NOISE, P, SUPERVISED, loss_mask_ar, **options)


def test_hybrid_is_alpha_times_diffusion_plus_next_token():
    total, diffusion = hybrid(causal_logits=odds_121(5), alpha=0.3)
    assert diffusion.item() == pytest.approx(0.3 * MDLM)
    assert total.item() == pytest.approx(0.3 * MDLM + NEXT)


def test_hybrid_parts_have_their_own_denominators():
    both = hybrid(causal_logits=odds_121(5), num_diffusion_tokens=5, num_ar_tokens=torch.tensor(2))
    assert both.total_loss.item() == pytest.approx(MDLM / 5 + NEXT / 2)
    one = hybrid(causal_logits=odds_121(5), num_ar_tokens=4)
    assert one.total_loss.item() == pytest.approx(MDLM + NEXT / 4)
    clamped = hybrid(causal_logits=odds_121(5), num_diffusion_tokens=0, num_ar_tokens=0)
    assert clamped.total_loss.item() == pytest.approx(MDLM + NEXT)


@pytest.mark.parametrize("logits", [odds_121(5), odds_121(10)])
def test_hybrid_has_no_next_token_part_without_its_mask(logits):
    assert hybrid(logits, loss_mask_ar=None).total_loss.item() == pytest.approx(MDLM)


def test_hybrid_has_no_next_token_part_without_causal_logits():
    assert hybrid().total_loss.item() == pytest.approx(MDLM)


def test_hybrid_rows_of_weight_zero_are_inert_in_both_parts():
    # the causal rows in use are 0, 2 (weights 2 and 0.5); row 3 has no target, row 4 predicts nothing
    logits = with_nan_rows(odds_121(5), [1, 2, 4])
    causal = with_nan_rows(odds_121(5), [1, 3, 4])
    total, _ = hybrid(logits, causal_logits=causal)
    total.backward()
    assert total.item() == pytest.approx(MDLM + NEXT)
    # targets 1 and 0: 2 * (1/4, -1/2, 1/4), 0.5 * (-3/4, 1/2, 1/4)
    zero = [0.0, 0.0, 0.0]
    expected = [[[0.5, -1.0, 0.5], zero, [-0.375, 0.25, 0.125], zero, zero]]
    torch.testing.assert_close(causal.grad, torch.tensor(expected, dtype=torch.float64))
    assert logits.grad.isfinite().all()


# DFlash. gamma = 1 / ln 2 makes the weight halve with each position: w_k = exp(-(k - 1) ln 2) = 2**-(k - 1).
GAMMA = 1.0 / LN2


def test_decay_weights():
    assert decay_weights(4, None, GAMMA).tolist() == pytest.approx([1.0, 0.5, 0.25, 0.125])
    assert decay_weights(4, 3, GAMMA).tolist() == pytest.approx([1.0, 0.5, 1.0, 0.5])  # k starts over
    assert decay_weights(3, 2, GAMMA).tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert decay_weights(3, None, None).tolist() == [1.0, 1.0, 1.0]
    assert decay_weights(0, 3, GAMMA).tolist() == []
    assert decay_weights(2, None, 7.0, torch.float64).dtype == torch.float64


@pytest.mark.parametrize(("T", "block_size"), [(5, 3), (1, 3), (1, 1), (3, 1)])
def test_decay_over_a_broken_block_is_an_error_and_no_decay_is_not(T, block_size):
    with pytest.raises(ValueError, match=rf"multiple of block_size - 1 = {block_size - 1} .* got {T}"):
        decay_weights(T, block_size, GAMMA)
    assert decay_weights(T, block_size, None).tolist() == [1.0] * T


# Targets 1, 0, 0, 1: NLL ln 2 * (1, 2, 2, 1). Mask 1, 1, 0.5, 0 times decay 1, .5, 1, .5:
# weights 1, .5, .5, 0, so ln 2 * (1 + 1 + 1 + 0) = 3 ln 2 and a weight sum of 2.
DRAFT = row(1, 0, 0, 1)
VALID = row(1.0, 1.0, 0.5, 0.0)


def dflash(logits=None, **options):
    options = {"block_size": 3, "loss_gamma": GAMMA, **options}
    return dflash_loss(odds_121(4) if logits is None else logits, DRAFT, VALID, **options)


def test_dflash_value_for_each_denominator():
    assert dflash().item() == pytest.approx(3 * LN2)
    assert dflash(num_tokens=6).item() == pytest.approx(LN2 / 2)
    assert dflash(num_tokens=torch.tensor(6)).item() == pytest.approx(LN2 / 2)
    assert dflash(num_tokens=0).item() == pytest.approx(3 * LN2)
    # 3 ln 2 / (2 + 1e-6), independent of the count; approx alone would not detect the 1e-6
    assert dflash(normalize="mean", num_tokens=6).item() == pytest.approx(3 * LN2 / 2.000001, rel=1e-12)


def test_dflash_without_decay_and_as_one_block():
    assert dflash(loss_gamma=None).item() == pytest.approx(4 * LN2)  # 1 * 1 + 1 * 2 + 0.5 * 2
    assert dflash(block_size=None).item() == pytest.approx(2.25 * LN2)  # 1 * 1 + 0.5 * 2 + 0.25 * 0.5 * 2


@pytest.mark.parametrize("dtype", MASK_DTYPES)
def test_dflash_masks_of_any_dtype(dtype):
    loss = dflash_loss(odds_121(4), DRAFT, row(1, 1, 0, 0).to(dtype), block_size=3, loss_gamma=GAMMA)
    assert loss.item() == pytest.approx(2 * LN2)  # 1 * 1 + 0.5 * 2


def test_dflash_rows_of_weight_zero_are_inert_and_a_zero_sum_is_zero():
    logits = with_nan_rows(odds_121(4), [3])
    assert backward(dflash(logits, normalize="mean")) == pytest.approx(3 * LN2 / 2)
    assert logits.grad[0, 3].eq(0).all()
    for normalize in ("tokens", "mean"):
        empty = dflash_loss(logits, DRAFT, torch.zeros(1, 4), 0, 3, normalize=normalize)
        assert empty.item() == 0.0


def test_dflash_refuses_another_normalisation():
    with pytest.raises(
        ValueError, match="normalize must be 'tokens', 'rows', 'mean' or a count of blocks or sequences, got 'sum'"
    ):
        dflash(normalize="sum")


# Two sequences of two blocks of two rows, NLL ln 2 * (1, 2, 2, 1) and ln 2 * (1, 1, 1, 1); in the second one block is
# valid. Sums of w nll, halved at the second row of a block, in ln 2: 1 + 1, then 2 + 0 (masked); 1 + .5, then none.
PAIR = torch.tensor([[1, 0, 0, 1], [1, 1, 1, 1]])
PAIR_VALID = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("normalize", "counts", "expected"),
    [
        ("tokens", {}, 5.5),
        ("blocks", {}, 5.5 / 3),
        ("blocks", {"num_blocks": 5}, 1.1),
        ("sequences", {}, 5.5 / 2),
        ("sequences", {"num_sequences": 4}, 5.5 / 4),
        ("sequence_blocks", {}, (4 / 2 + 1.5 / 1) / 2),
        ("sequence_blocks", {"num_sequences": 5}, 3.5 / 5),
        ("sequence_blocks", {"num_blocks": torch.tensor([4, 3])}, (4 / 4 + 1.5 / 3) / 2),
    ],
)
def test_dflash_over_blocks_and_sequences(normalize, counts, expected):
    options = {"block_size": 3, "loss_gamma": GAMMA, "normalize": normalize, **counts}
    loss = dflash_loss(odds_121(4).repeat(2, 1, 1), PAIR, PAIR_VALID, **options)
    assert loss.item() == pytest.approx(expected * LN2)
    nothing = dflash_loss(odds_121(4).repeat(2, 1, 1), PAIR, torch.zeros(2, 4), **options)
    assert nothing.item() == 0


def test_dflash_with_a_row_of_the_anchor():
    options = {"block_size": 2, "loss_gamma": GAMMA, "anchor_row": True}
    assert dflash_loss(odds_121(4), DRAFT, VALID, **options).item() == pytest.approx(3 * LN2)  # as blocks of 3 without


@pytest.mark.parametrize(
    ("variant", "expected"),
    # confidence 1/2 and 1/4, alpha 1/2: smoothed 3/4 and 5/8, C = 3/4, 15/32; S = 39/32, 15/32
    [("prefix", 3 / 4 + 2 * 15 / 32), ("dpace", 39 / 32 + 2 * 15 / 32), ("continuation", 39 / 24 + 2)],
)
def test_dflash_by_dpace(variant, expected):
    logits = odds_121(2).requires_grad_()
    loss = dflash_loss(logits, row(1, 0), row(1, 1), block_size=3, position_weights=variant)
    assert loss.item() == pytest.approx(expected * LN2)
    (grad,) = torch.autograd.grad(loss, logits)
    first = {"prefix": 3 / 4, "dpace": 39 / 32, "continuation": 39 / 24}[variant]
    assert grad[0, 0].tolist() == pytest.approx([first / 4, -first / 2, first / 4])  # the weight is a constant


# Blocks of three: all correct; wrong at the second; the second masked, so skipped; wrong at once; nothing valid.
ACCEPTED = torch.tensor([[1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1]]).bool()
DRAFTED = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0]])


def distilled(**settings):
    """Compute the loss of blocks of two rows. The fourth row is idle.

    Rows have odds (1, 2, 1) and the teacher's (2, 1, 1), so a = 3/4 and kl = ln 2 / 4.
    """
    teacher = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64).log().repeat(1, 4, 1)
    logits, targets = with_nan_rows(odds_121(4), [3]), row(1, 0, -100, 0)
    arguments = {"block_size": 3, "loss_gamma": 1 / LN2} | settings
    return draft_distillation_loss(logits, teacher, targets, row(1, 1, 0.5, 0), **arguments).item()


def test_distillation():
    """The weights of the rows are 1, 1/2 and 1/2."""
    assert distilled() == pytest.approx(2 * LN2 / 4)
    assert distilled(kind="tv", normalize="mean") == pytest.approx(1 / 4)
    assert distilled(kind="l1", normalize="rows") == pytest.approx(2 * 0.5 / 2.5)
    assert distilled(kind="teacher_ce", loss_gamma=None, num_tokens=5) == pytest.approx(2.5 * 2 * LN2 / 5)
    assert distilled(kind={"ce": 0.5, "tv": 2.0}) == pytest.approx(0.5 * (LN2 + 0.5 * 2 * LN2) + 2.0 * 2 / 4)
    assert distilled(kind="tv", normalize="blocks", decay_from=1) == pytest.approx(1 / 4 / 2)
    assert distilled(kind="tv", normalize="mean", total_weight=8) == pytest.approx(2 / 4 / 8)


def test_distillation_by_dpace():
    """Confidence 3/4 everywhere is smoothed to 7/8: prefixes 7/8, 49/64 and 7/8."""
    loss_options = {"kind": "tv", "position_weights": "prefix", "confidence": "acceptance"}
    assert distilled(**loss_options) == pytest.approx((7 / 8 + 49 / 64 + 7 / 16) / 4)
    loss_options["confidence"] = "teacher"  # 1/4, smoothed to 5/8
    assert distilled(**loss_options) == pytest.approx((5 / 8 + 25 / 64 + 5 / 16) / 4)
    loss_options["confidence"] = "target"  # 1/2 and 1/4, and none: 3/4, 5/8, 1
    assert distilled(**loss_options) == pytest.approx((3 / 4 + 15 / 32 + 1 / 2) / 4)


def test_distillation_of_a_confidence():
    """A confidence logit of 0 gives a loss of ln 2 for any a."""
    found = distilled(kind="tv", confidence_logits=row(0.0, 0.0, 0.0, NAN), confidence_weight=0.5)
    assert found == pytest.approx(2 / 4 + 0.5 * 2 * LN2)


def test_acceptance_length():
    assert acceptance_length(ACCEPTED, DRAFTED, 3).item() == (3 + 2 + 1 + 0) / 4
    assert acceptance_length(ACCEPTED, DRAFTED, 3, bonus=True).item() == (4 + 3 + 2 + 1) / 4
    assert acceptance_length(ACCEPTED, torch.zeros(1, 15), 3, bonus=True).item() == 0


def test_draft_accuracy_sums_each_offset_over_batch_and_blocks():
    correct = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]]).bool()
    valid = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    hits, count = draft_accuracy_per_position(correct, valid, 3)
    # offset 1: positions 0 and 2 of both rows: hits 1 + 0 + 1 + 0, valid 1 + 1 + 1 + 0
    # offset 2: positions 1 and 3: hits 1 + 0 + 0 + 0, valid 1 + 0 + 1 + 0
    assert (hits.tolist(), count.tolist()) == ([2.0, 1.0], [3.0, 2.0])
    assert hits.dtype == count.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64, torch.bfloat16])
def test_draft_accuracy_is_float32_and_exact_for_any_dtype_of_masks(dtype):
    correct = torch.ones(3, 400, dtype=torch.bool)
    hits, count = draft_accuracy_per_position(correct, torch.ones(3, 400).to(dtype), 2)
    assert (hits.tolist(), count.tolist()) == ([1200.0], [1200.0])  # bfloat16 would stop at 256
    assert hits.dtype == count.dtype == torch.float32


@pytest.mark.parametrize(("T", "block_size"), [(4, None), (4, 1), (4, 0), (5, 3)])
def test_draft_accuracy_is_none_without_whole_blocks(T, block_size):
    ones = torch.ones(1, T)
    assert draft_accuracy_per_position(ones.bool(), ones, block_size) == (None, None)


def test_draft_accuracy_of_matches_ignores_invalid_and_untargeted_rows():
    logits = with_nan_rows(odds_121(4), [3])
    correct = argmax_match(logits, row(1, -100, 0, 1))
    hits, count = draft_accuracy_per_position(correct, row(1, 1, 1, 0), 3)
    assert (hits.tolist(), count.tolist()) == ([1.0, 0.0], [2.0, 1.0])


# Encoder: ids 2, 1, 0, 1, -100 so targets 1, 0, 1, -100, NLL ln 2 * (1, 2, 1, 0).
IDS = row(2, 1, 0, 1, -100)


def test_encoder_ar_value():
    assert encoder_ar_loss(odds_121(5), IDS).item() == pytest.approx(LN2)  # 4 ln 2 over 4 pairs
    assert encoder_ar_loss(odds_121(5), IDS, num_tokens=8).item() == pytest.approx(LN2 / 2)
    assert encoder_ar_loss(odds_121(5), IDS, num_tokens=torch.tensor(8)).item() == pytest.approx(LN2 / 2)
    assert encoder_ar_loss(odds_121(5), IDS, num_tokens=0).item() == pytest.approx(4 * LN2)


@pytest.mark.parametrize("valid", [row(1, 1, 0, 1, 1), row(1, 2, 0, 4, 8), row(0.5, 1.0, 0.0, 1.0, 1.0)])
def test_encoder_ar_scores_pairs_of_valid_positions(valid):
    # pairs (0, 1) and (3, 4): ln 2 + 0, over 2; the integers 1 and 2 have no bit in common and are both True
    logits = with_nan_rows(odds_121(5), [1, 2, 4])
    assert backward(encoder_ar_loss(logits, IDS, valid)) == pytest.approx(LN2 / 2)
    assert logits.grad[0, 1:].eq(0).all()


def test_encoder_ar_of_nothing_is_zero_with_zero_gradient():
    for L, valid in ((3, row(1, 0, 1)), (1, None)):
        logits = with_nan_rows(odds_121(L), list(range(L)))
        assert backward(encoder_ar_loss(logits, IDS[:, :L], valid)) == 0.0
        assert logits.grad.eq(0).all()


# I-DLM: ids 2, 1, 0, 1 and the answer the last three, of which the last is padding: the rows 0 and 1 are scored, with
# the targets 1 and 0. Under odds (1, 2, 1) their NLL is ln 2 and 2 ln 2, under equal odds ln 3 each.
INTRO = (row(2, 1, 0, 1), row(0, 1, 1, 1), row(1, 1, 1, 0))
LN3 = math.log(3.0)


def introspective(**options):
    logits = torch.cat([odds_121(4), torch.zeros(1, 4, 3, dtype=torch.float64)], 1)
    logits = with_nan_rows(logits, [2, 3, 6, 7])
    return idlm_loss(logits, *INTRO, **options), logits


@pytest.mark.parametrize("count", [None, 2, torch.tensor(2.0)])
def test_idlm_value_and_gradient(count):
    out, logits = introspective(num_diffusion_tokens=count, clean_loss_weight=0.5)
    assert out.dllm_loss.item() == pytest.approx(1.5 * LN2)
    assert not out.dllm_loss.requires_grad
    assert out.total_loss.item() == pytest.approx(1.5 * LN2 + 0.5 * LN3)
    out.total_loss.backward()
    zero = [0.0, 0.0, 0.0]
    masked, clean = [[0.125, -0.25, 0.125], [-0.375, 0.25, 0.125]], [[1 / 12, -1 / 6, 1 / 12], [-1 / 6, 1 / 12, 1 / 12]]
    torch.testing.assert_close(logits.grad, torch.tensor([[*masked, zero, zero, *clean, zero, zero]]).double())


def test_idlm_counts_and_balances():
    assert introspective(num_diffusion_tokens=6)[0].total_loss.item() == pytest.approx((3 * LN2 + 0.4 * LN3) / 6)
    assert introspective(num_diffusion_tokens=0)[0].dllm_loss.item() == pytest.approx(3 * LN2)
    balanced, logits = introspective(auto_balance=True)
    assert balanced.total_loss.item() == pytest.approx(3 * LN2)  # both terms alike
    balanced.total_loss.backward()
    alpha = 1.5 * LN2 / LN3  # a constant: the clean rows have alpha times the gradient of their own term
    assert logits.grad[0, 4].tolist() == pytest.approx([alpha / 6, -alpha / 3, alpha / 6])
    logits = torch.tensor([0.0, 60.0, 0.0], dtype=torch.float64).repeat(1, 8, 1)  # the clean loss is nearly 0
    answer = row(0, 1, 0, 0)
    out = idlm_loss(logits, row(2, 1, 0, 1), answer, answer, auto_balance=True)
    assert out.total_loss.item() == pytest.approx(2e-26, rel=0.2)


def test_idlm_without_an_answer_is_zero():
    for auto_balance in (False, True):
        out = idlm_loss(odds_121(8), *INTRO[:2], row(0, 0, 0, 0), auto_balance=auto_balance)
        assert out == (0.0, 0.0)


# SCDD with a = b = 1 and c = 4 t (1 - t): at 1/2 the masses are 1/4, 1/2, 1/4, at 3/4 they are 1/7, 3/7, 3/7. Token 2
# is MASK: under odds (1, 2, anything) p = (1/3, 2/3), and K = 2.
PEAKED = {"max_ratio": 0.5, "gamma_shape": 2.0, "t_peak": 0.5}
TIMES = torch.tensor([0.0, 0.5, 0.75, 1.0], dtype=torch.float64)


def test_scdd_schedule():
    found = scdd_schedule(TIMES, **PEAKED)
    assert found.clean_mass.tolist() == pytest.approx([1, 1 / 4, 1 / 7, 0])
    assert found.uniform_mass.tolist() == pytest.approx([0, 1 / 2, 3 / 7, 0])
    assert found.absorbed_mass.tolist() == pytest.approx([0, 1 / 4, 3 / 7, 1])
    assert found.gamma.tolist() == pytest.approx([1, 3 / 4, 4 / 7, 0])
    assert found.rho.tolist() == pytest.approx([1, 1 / 3, 1 / 4, 0])
    assert scdd_schedule(torch.tensor([-1.0, 2.0]), **PEAKED).gamma.tolist() == [1.0, 0.0]
    skewed = scdd_schedule(torch.tensor([0.2]), max_ratio=0.3, gamma_shape=5.0, t_peak=0.2)
    assert skewed.uniform_mass.item() == pytest.approx(0.3)


def scdd(t, z, x, T, **options):
    logits = torch.tensor([1.0, 2.0, 9.0], dtype=torch.float64).log().repeat(1, len(z), 1).requires_grad_()
    p_mask = torch.full((1, len(z)), t, dtype=torch.float64)
    ones = torch.ones(1, len(z))
    return scdd_loss(logits, row(*x), p_mask, ones, row(*z), 2, num_timesteps=T, **(PEAKED | options)), logits


@pytest.mark.parametrize(
    ("z", "x", "loss"),
    [
        (2, 1, math.log(3 / 2)),  # its whole mass is released in the one step down to s = 0
        (2, 0, math.log(3)),
        (1, 1, math.log(5 / 6)),  # u = r = 1/3: -(log p - log((1 + p) / 3))
        (0, 1, -math.log(3 / 2)),  # -1/3 (log 2/3 - log 4/9) over 1/3
    ],
)
def test_scdd_value_of_the_last_step(z, x, loss):
    found, _ = scdd(0.5, [z], [x], 2)
    assert found.item() == pytest.approx(2 * loss)


def test_scdd_value_on_the_way():
    """From 3/4 to 1/2, 5/12 is released, base_s = 1/3, base_t = 3/8, terms 4/9 and 5/9, u = 1/8, r = 3/4."""
    zero, one = math.log(4 / 9), math.log(5 / 9)
    found, _ = scdd(0.75, [2], [1], 4)
    assert found.item() == pytest.approx(-4 * 5 / 12 * ((zero + one) / 3 + one / 3))
    D = math.log(11 / 24)
    found, _ = scdd(0.75, [0], [1], 4)
    expected = ((zero + one - 2 * D) / 24 + (one - D) / 24 + (zero - D) / 4) / (3 / 8)
    assert found.item() == pytest.approx(-4 * expected)
    D = math.log(13 / 24)
    found, _ = scdd(0.75, [1], [1], 4)
    expected = ((zero + one - 2 * D) / 24 + (one - D) / 24 + (one - D) / 4 + (one - D) / 4) / (5 / 8)
    assert found.item() == pytest.approx(-4 * expected)


def test_scdd_without_uniform_noise_is_mdlm():
    found, logits = scdd(0.75, [2, 2, 1, 0], [1, 0, 1, 1], 1000, max_ratio=0.0, num_diffusion_tokens=3)
    assert found.item() == pytest.approx((math.log(3 / 2) + math.log(3)) / 0.75 / 3)
    found.backward()
    assert logits.grad[0, 2:].abs().max() < 1e-12
    assert logits.grad[0, 0].tolist() == pytest.approx([(1 / 3) / 2.25, -(1 / 3) / 2.25, 0])


def test_scdd_of_impossible_times_is_finite_and_unsupervised_rows_are_inert():
    for t in (0.0, 1e-9, 1.0):
        found, logits = scdd(t, [2, 1, 0], [1, 1, 1], 10)
        found.backward()
        assert found.isfinite()
        assert logits.grad.isfinite().all()
    logits = with_nan_rows(odds_121(3), [0, 2])
    noisy, t = row(2, 2, 0), torch.full((1, 3), 0.5)
    found = scdd_loss(logits, row(1, 1, -100), t, row(0, 1, 1), noisy, 2, num_timesteps=2, **PEAKED)
    found.backward()
    assert found.item() == pytest.approx(math.log(3 / 2))  # over two supervised tokens, one of them without a target
    assert logits.grad[0, [0, 2]].eq(0).all()


def test_policy_loss_by_hand():
    """One sequence of two tokens and one of one token, with probabilities 1/2, 1/4 and 1/2, and ratios 1, 2 and 1/2."""
    ids, loss_mask = torch.tensor([[0, 0], [0, 0]]), torch.tensor([[1, 1], [1, 0]])
    p = torch.tensor([[0.5, 0.25], [0.5, 0.9]], dtype=torch.float64)
    logits = torch.stack([p, 1 - p], -1).log()[None]
    views = policy_views(ids, loss_mask, 2, "full")
    old = torch.tensor([[0.5, 0.125], [1.0, 0.1]]).log()
    A = torch.tensor([1.0, -2.0])
    # per token: -1, -1.2 (clipped) and 1.6 (clipped at 0.8)
    for normalize, expected in (("none", -0.6), ("tokens", -0.2), ("sequences", (-1.1 + 1.6) / 2)):
        assert policy_loss(logits, ids, views, loss_mask, old, A, normalize=normalize) == pytest.approx(expected)
    assert policy_loss(logits, ids, views, loss_mask, old, A, num_tokens=6) == pytest.approx(-0.1)
    per_sequence = torch.tensor([math.log(0.125) - math.log(1.1) * 2, 0.0]) / torch.tensor([2, 1])  # ratios 1.1 and 1/2
    for normalize, expected in (("none", 0.5), ("tokens", (-2.2 + 1.6) / 3), ("sequences", 0.25)):
        found = policy_loss(logits, ids, views, loss_mask, per_sequence, A, level="sequence", normalize=normalize)
        assert found == pytest.approx(expected)
    with_kl = policy_loss(logits, ids, views, loss_mask, old, A, old, normalize="none", kl="k1", kl_coef=0.5)
    assert with_kl == pytest.approx(-0.6 + 0.5 * math.log(2 * 0.5))


def test_rows_that_predict_the_next_token():
    """Row i is judged by token i + 1: tokens 1, 2, 3 have the NLLs ln 2, 2 ln 2, ln 2 in rows 0, 1, 2."""
    odds = torch.tensor([[[1.0, 2, 1], [2, 1, 1], [2, 1, 1], [1, 1, 2]]], dtype=torch.float64)
    targets, noise, p, supervised = row(0, 1, 2, 0), row(1, 1, 1, 1), row(NAN, 0.25, 0.5, 0.5), row(1, 1, 0, 1)
    arguments = odds.log(), targets, noise, p, supervised
    assert mdlm_loss(*arguments, shift=True).item() == pytest.approx(6 * LN2)  # 4 ln 2 and 2 ln 2
    rows = mdlm_loss(*arguments, shift=True, reduction="none")
    torch.testing.assert_close(rows, torch.tensor([[4, 0, 2, 0]]) * LN2, check_dtype=False)
    assert block_diffusion_loss(odds.log(), targets, supervised, shift=True).item() == pytest.approx(LN2)
    ar = row(0, 1, 0, 0)
    both = hybrid_loss(*arguments, ar, causal_logits=odds.log(), alpha=0.5, shift=True)
    assert both.total_loss.item() == pytest.approx(3 * LN2 + LN2)
    times = torch.full((1, 4), 0.5, dtype=torch.float64)  # each step from 1/2 to 0 unmasks every masked token
    noisy = row(2, 2, 2, 2)
    settings = {"mask_token_id": 2, "num_timesteps": 2, "max_ratio": 0.0, "shift": True}
    targets = row(0, 1, 1, 0)  # without the column of MASK the odds are (1, 2), (2, 1), (2, 1)
    scdd = scdd_loss(odds.log(), targets, times, supervised, noisy, **settings)
    assert scdd.item() == pytest.approx(2 * (math.log(3 / 2) + math.log(3 / 2)) / 2)


def test_gradcheck():
    logits, causal = (torch.randn(1, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    check = torch.autograd.gradcheck
    assert check(lambda x: mdlm_loss(x, TARGETS, NOISE, P, SUPERVISED, 3), logits)
    assert check(lambda x: block_diffusion_loss(x, TARGETS, SUPERVISED), logits)
    assert check(lambda x, c: hybrid(x, causal_logits=c, alpha=0.3).total_loss, (logits, causal))
    assert check(lambda x: dflash_loss(x, TARGETS, SUPERVISED, normalize="mean"), logits)
    assert check(
        lambda x: idlm_loss(x, *INTRO).total_loss, torch.randn(1, 8, 3, dtype=torch.float64, requires_grad=True)
    )
    noisy, t = row(2, 2, 0, 1, 1), torch.full((1, 5), 0.6)
    assert check(lambda x: scdd_loss(x, row(0, 1, 0, 1, 0), t, SUPERVISED, noisy, 2, **PEAKED), logits)
    assert check(lambda x: encoder_ar_loss(x, IDS, row(1, 1, 0, 1, 1)), logits)
