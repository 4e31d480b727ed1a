"""The oracle of the collator: rows written out by hand."""

import pytest
import torch

from reference import collate

PAD, EOS = 0, 9


def sample(*loss_mask, attention=None):
    """Build a sample of tokens 1, 2, 3, ... with the given loss mask."""
    n = len(loss_mask)
    return {
        "input_ids": list(range(1, n + 1)),
        "loss_mask": list(loss_mask),
        "attention_mask": [1] * n if attention is None else attention,
    }


def rows(batch, **options):
    out = collate(batch, pad_token_id=PAD, eos_token_id=options.pop("eos_token_id", EOS), **options)
    return {key: value.tolist() for key, value in out.items()}


def test_dtypes_and_plain_padding():
    out = collate([sample(0, 1, 1, attention=[1, 0, 1]), sample(1)], pad_token_id=7)
    assert {key: value.dtype for key, value in out.items()} == {
        "input_ids": torch.int64,
        "loss_mask": torch.float32,
        "attention_mask": torch.int64,
        "input_lengths": torch.int64,
    }
    assert out["input_ids"].tolist() == [[1, 2, 3], [1, 7, 7]]
    assert out["loss_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert out["attention_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert out["input_lengths"].tolist() == [3, 1]


def test_content_then_block_fill_then_global_pad():
    # ends at the next multiple of 4: 8 for five tokens, 4 for two; L = 8
    out = rows([sample(0, 0, 1, 1, 1), sample(0, 1)], block_size=4)
    assert out["input_ids"] == [[1, 2, 3, 4, 5, EOS, EOS, EOS], [1, 2, EOS, EOS, PAD, PAD, PAD, PAD]]
    assert out["loss_mask"] == [[0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0, 0, 0]]
    assert out["attention_mask"] == [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]
    assert out["input_lengths"] == [5, 2]


def test_content_of_whole_blocks_gets_no_fill():
    assert rows([sample(1, 1, 1, 1)], block_size=2)["input_ids"] == [[1, 2, 3, 4]]
    assert rows([sample(1, 1, 1)], block_size=1)["input_ids"] == [[1, 2, 3]]


@pytest.mark.parametrize(("eos", "fill"), [(None, 7), (0, 0), (5, 5)])
def test_fill_token_is_eos_or_else_the_pad_id(eos, fill):
    out = collate([sample(1)], pad_token_id=7, eos_token_id=eos, block_size=2)
    assert out["input_ids"].tolist() == [[1, fill]]


def test_supervised_padding():
    out = rows([sample(0, 1), sample(0)], block_size=2, pad_seq_len_divisible=3, supervise_padding=True)
    # ends 2 and 2; L = lcm(2, 3) = 6
    assert out["loss_mask"] == [[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]]
    assert out["attention_mask"] == [[1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("n", "block_size", "divisible", "L"),
    [
        (5, None, None, 5),
        (5, None, 1, 5),
        (5, None, 4, 8),
        (8, None, 4, 8),
        (5, 4, 1, 8),
        (5, 4, 6, 12),  # lcm(4, 6) = 12
        (13, 4, 6, 24),  # the fill ends at 16
    ],
)
def test_length_is_rounded_up_to_the_least_common_multiple(n, block_size, divisible, L):
    out = rows([sample(*[1] * n)], block_size=block_size, pad_seq_len_divisible=divisible)
    assert len(out["input_ids"][0]) == L


def test_content_is_clamped_to_max_seq_len_and_lengths_are_not():
    out = rows([sample(0, 0, 1, 1, 1), sample(1)], max_seq_len=3)
    assert out["input_ids"] == [[1, 2, 3], [1, PAD, PAD]]
    assert out["loss_mask"] == [[0, 0, 1], [1, 0, 0]]
    assert out["input_lengths"] == [5, 1]


def test_length_is_capped_after_rounding_even_within_a_block():
    # four tokens of five are kept, the fill would end at 6 and the rounding at 12; the cap is 4, then 5
    assert rows([sample(*[1] * 5)], block_size=3, pad_seq_len_divisible=4, max_seq_len=4)["input_ids"] == [[1, 2, 3, 4]]
    out = rows([sample(1, 1, 1, 1)], block_size=3, max_seq_len=5)
    assert out["input_ids"] == [[1, 2, 3, 4, EOS]]


def test_length_is_at_least_one():
    assert rows([sample()])["input_ids"] == [[PAD]]
    assert rows([sample()], block_size=4)["input_ids"] == [[PAD]]  # nothing is a whole number of blocks
    empty = collate([])
    assert empty["input_ids"].shape == (0, 1)
    assert empty["input_lengths"].shape == (0,)


def test_response_window_counts_blocks_from_the_first_supervised_position_and_attends_to_the_fill():
    # responses of two (from 3) and one (from 1): ends 3 + 4 and 1 + 4
    out = rows([sample(0, 0, 0, 1, 1), sample(0, 1)], block_size=4, response_window=True)
    assert out["input_ids"] == [[1, 2, 3, 4, 5, EOS, EOS], [1, 2, EOS, EOS, EOS, PAD, PAD]]
    assert out["loss_mask"] == [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0]]
    assert out["attention_mask"] == [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]


def test_response_window_measures_to_the_end_of_the_content():
    # supervised at 1 alone, content to 4: three from the response on, the block ends at 1 + 4
    out = rows([sample(0, 1, 0, 0)], block_size=4, response_window=True)
    assert out["input_ids"] == [[1, 2, 3, 4, EOS]]
    assert out["loss_mask"] == [[0, 1, 0, 0, 1]]


def test_response_window_without_a_response_gets_no_fill():
    assert rows([sample(0, 0, 0)], block_size=4, response_window=True)["input_ids"] == [[1, 2, 3]]


def test_response_window_with_the_response_cut_off_gets_no_fill():
    out = rows([sample(0, 0, 0, 1)], block_size=4, max_seq_len=2, response_window=True)
    assert out["input_ids"] == [[1, 2]]


def test_response_window_rejects_a_second_run_and_names_the_sample():
    one, two = sample(0, 1, 1, 0), sample(1, 0, 1)
    collate([one], response_window=True)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"sample 1: loss_mask must have one supervised run .* got 2"):
            collate([one, two], response_window=True)
    collate([one, two])


def test_other_keys_are_ignored_and_samples_are_not_modified():
    with_other_key = {**sample(1, 1), "___PAD_TOKEN_IDS___": {"input_ids": 3}}
    before = {key: value.copy() for key, value in with_other_key.items()}
    out = collate([with_other_key], block_size=4)
    assert set(out) == {"input_ids", "loss_mask", "attention_mask", "input_lengths"}
    assert with_other_key == before
