import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_kernels.collate import DLLMCollator
from reference import collate


def sample(n, loss_mask=None, start=1):
    loss_mask = [1] * n if loss_mask is None else loss_mask
    return {"input_ids": list(range(start, start + n)), "loss_mask": loss_mask, "attention_mask": [1] * n}


def run_mask(draw, n):
    a, b = sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
    return [int(a <= i < b) for i in range(n)]


@st.composite
def batches(draw):
    response_window = draw(st.booleans())
    batch = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(0, 13))
        if response_window:
            loss_mask = run_mask(draw, n)
        else:
            loss_mask = draw(st.lists(st.sampled_from([0, 1, True, 0.5]), min_size=n, max_size=n))
        batch.append(
            {
                "input_ids": draw(st.lists(st.integers(0, 2**40), min_size=n, max_size=n)),
                "loss_mask": loss_mask,
                "attention_mask": draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)),
            }
        )
    size = st.none() | st.integers(1, 9)
    options = {
        "pad_token_id": 7,
        "eos_token_id": draw(st.none() | st.just(0)),
        "block_size": draw(size),
        "pad_seq_len_divisible": draw(size),
        "max_seq_len": draw(size | st.just(50)),
        "supervise_padding": draw(st.booleans()),
        "response_window": response_window,
    }
    return batch, options


@settings(max_examples=400, deadline=None)
@given(batches())
def test_equals_the_reference(case):
    batch, options = case
    before = copy.deepcopy(batch)
    ours, expected = DLLMCollator(**options)(batch), collate(batch, **options)
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name
    assert batch == before


def test_plain_padding():
    out = DLLMCollator(pad_token_id=9)([sample(3), sample(1)])
    assert out["input_ids"].tolist() == [[1, 2, 3], [1, 9, 9]]
    assert out["loss_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert out["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert out["input_lengths"].tolist() == [3, 1]
    assert [out[k].dtype for k in ("input_ids", "loss_mask", "attention_mask", "input_lengths")] == [
        torch.int64,
        torch.float32,
        torch.int64,
        torch.int64,
    ]


def test_block_fill_is_supervised_and_not_attended():
    out = DLLMCollator(0, eos_token_id=8, block_size=4)([sample(5, [0, 0, 1, 1, 0]), sample(2)])
    assert out["input_ids"].tolist() == [[1, 2, 3, 4, 5, 8, 8, 8], [1, 2, 8, 8, 0, 0, 0, 0]]
    assert out["loss_mask"].tolist() == [[0, 0, 1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]]
    assert out["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]


def test_response_window_counts_blocks_from_the_response_and_attends_to_the_fill():
    out = DLLMCollator(0, eos_token_id=8, block_size=4, response_window=True)(
        [sample(5, [0, 0, 0, 1, 1]), sample(2, [0, 0])]
    )
    assert out["input_ids"].tolist() == [[1, 2, 3, 4, 5, 8, 8], [1, 2, 0, 0, 0, 0, 0]]
    assert out["loss_mask"].tolist() == [[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]]
    assert out["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]]


def test_supervised_padding():
    out = DLLMCollator(0, block_size=2, supervise_padding=True)([sample(4), sample(1, [0])])
    assert out["loss_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]


def test_length_is_rounded_to_the_common_multiple_and_then_capped():
    assert DLLMCollator(block_size=4, pad_seq_len_divisible=6)([sample(5)])["input_ids"].shape == (1, 12)
    assert DLLMCollator(block_size=4, pad_seq_len_divisible=6, max_seq_len=10)([sample(5)])["input_ids"].shape == (
        1,
        10,
    )
    assert DLLMCollator(pad_seq_len_divisible=1)([sample(5)])["input_ids"].shape == (1, 5)


def test_content_is_cut_and_its_length_is_not():
    out = DLLMCollator(max_seq_len=3)([sample(5)])
    assert out["input_ids"].tolist() == [[1, 2, 3]]
    assert out["input_lengths"].tolist() == [5]


def test_length_is_at_least_one():
    assert DLLMCollator(pad_token_id=4)([sample(0)])["input_ids"].tolist() == [[4]]


def test_takes_tensors_and_arrays_and_ignores_other_keys():
    lists = sample(3, [0, 1, 1])
    others = {
        "input_ids": torch.tensor(lists["input_ids"]),
        "loss_mask": np.array(lists["loss_mask"], dtype=np.float64),
        "attention_mask": tuple(lists["attention_mask"]),
        "___PAD_TOKEN_IDS___": {"input_ids": 0},
    }
    expected, got = DLLMCollator()([lists]), DLLMCollator()([others])
    assert all(torch.equal(expected[k], got[k]) for k in expected)
    assert "___PAD_TOKEN_IDS___" in others


def test_documented_helpers():
    collator = DLLMCollator(0, 5, 4, 6, 20)
    assert (collator.block_pad_token_id, DLLMCollator(3).block_pad_token_id) == (5, 3)
    assert DLLMCollator._first_supervised_index([0, 0, 2, 1], 9) == 2
    assert DLLMCollator._first_supervised_index([0, 0], 9) == 9
    ends = collator._block_fill_ends(torch.tensor([5, 30]), torch.tensor([2, 3]))
    assert ends.tolist() == [6, 23]
    assert collator._compute_target_length(torch.tensor([13])) == 20
    rows = collator._pad_and_fill([[1, 2], [3]], torch.tensor([2, 1]), torch.tensor([3, 1]), 4, 9, 5)
    assert rows.tolist() == [[1, 2, 5, 9], [3, 9, 9, 9]]
    assert rows.dtype == torch.int64


def test_more_than_one_run_is_an_error_on_every_batch():
    collator = DLLMCollator(block_size=4, response_window=True)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"sample 1, field 'loss_mask' must have at most one supervised run .* got 2"
        ):
            collator([sample(3), sample(4, [1, 0, 0, 1])])
    DLLMCollator(block_size=4)([sample(4, [1, 0, 0, 1])])


@pytest.mark.parametrize("field", ["input_ids", "loss_mask", "attention_mask"])
def test_a_missing_field_is_named(field):
    bad = sample(3)
    del bad[field]
    with pytest.raises(ValueError, match=f"sample 1 has no field '{field}'"):
        DLLMCollator()([sample(2), bad])


@pytest.mark.parametrize("field", ["loss_mask", "attention_mask"])
def test_unequal_lengths_are_named(field):
    bad = sample(3) | {field: [1, 1]}
    with pytest.raises(ValueError, match=f"sample 0, field '{field}' must be as long as its 'input_ids', 3, got 2"):
        DLLMCollator()([bad])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_ids", [1, 2.5]),
        ("attention_mask", ["a", "b"]),
        ("input_ids", 7),
        ("loss_mask", [[1], [2]]),
        ("loss_mask", [None, 1]),
    ],
)
def test_what_is_not_a_row_of_numbers_is_named(field, value):
    with pytest.raises(TypeError, match=f"sample 0, field '{field}' must be a sequence of"):
        DLLMCollator()([sample(2) | {field: value}])


def test_a_sample_that_is_no_dict_is_named():
    with pytest.raises(TypeError, match="sample 1 must be a dict, got list"):
        DLLMCollator()([sample(2), [1, 2]])


@pytest.mark.parametrize("name", ["block_size", "pad_seq_len_divisible", "max_seq_len"])
def test_sizes_are_checked(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        DLLMCollator(**{name: 0})
    with pytest.raises(TypeError, match=f"{name} must be an int or None, got float"):
        DLLMCollator(**{name: 2.0})


@pytest.mark.gpu
def test_pinned_memory():
    out = DLLMCollator(pin_memory=True)([sample(3)])
    assert all(tensor.is_pinned() for tensor in out.values())
