import collections
import copy
import re

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from dllm_kernels.collate import DLLMCollator
from dllm_kernels.integrations.transformers import MaskedDiffusionCollator
from reference import collate
from tests.conftest import drawn


def sample(n, loss_mask=None, start=1):
    loss_mask = [1] * n if loss_mask is None else loss_mask
    return {"input_ids": list(range(start, start + n)), "loss_mask": loss_mask, "attention_mask": [1] * n}


def packed(*lengths):
    """Return one sample of packed documents."""
    positions = [i for n in lengths for i in range(n)]
    segments = [j for j, n in enumerate(lengths) for _ in range(n)]
    return sample(len(positions)) | {"position_ids": positions, "segment_ids": segments}


def run_mask(draw, n):
    a, b = sorted((draw(st.integers(0, n)), draw(st.integers(0, n))))
    return [int(a <= i < b) for i in range(n)]


@st.composite
def batches(draw):
    response_window = draw(st.booleans())
    packed = draw(st.lists(st.sampled_from(["position_ids", "segment_ids"]), unique=True))
    batch = []
    for _ in range(draw(st.integers(0, 4))):
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
            | {field: draw(st.lists(st.integers(-1, 300), min_size=n, max_size=n)) for field in packed}
        )
    size = st.none() | st.integers(1, 9)
    options = {
        "pad_token_id": 7,
        "eos_token_id": draw(st.none() | st.just(0)),
        "block_size": draw(size),
        "pad_seq_len_divisible": draw(size),
        "max_seq_len": draw(st.none() | st.integers(1, 20)),
        "supervise_padding": draw(st.booleans()),
        "response_window": response_window,
    }
    return batch, options


@drawn(30, 150, case=batches())
def test_equals_the_reference(case):
    batch, options = case
    before = copy.deepcopy(batch)
    ours, expected = DLLMCollator(**options)(batch), collate(batch, **options)
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name
    assert batch == before


@pytest.mark.peer
@drawn(exhaustive=60, case=batches())
def test_equals_the_original(case):
    original = pytest.importorskip("nemo_automodel.components.datasets.dllm.collate").DLLMCollator
    batch, options = case
    for s in batch:
        s["loss_mask"] = [int(v > 0) for v in s["loss_mask"]]  # the reference truncates fractions
    ours, expected = DLLMCollator(**options)(batch), original(**options)(batch)
    assert ours.keys() - {"position_ids", "segment_ids"} == expected.keys()  # it drops these
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


def ours(batch, **options):
    return DLLMCollator(**options)(batch)


FIELDS = ["input_ids", "loss_mask", "attention_mask", "position_ids", "segment_ids"]
both = pytest.mark.parametrize("collated", [ours, collate], ids=["package", "oracle"])
FILL, WINDOW = {"eos_token_id": 8, "block_size": 4}, {"eos_token_id": 8, "block_size": 4, "response_window": True}
BY_HAND = {  # options, batch; rows of ids, of loss_mask, of attention_mask, of position_ids, of segment_ids
    "plain": (
        {"pad_token_id": 9}, [sample(3, [0, 1, 1]) | {"attention_mask": [1, 0, 1], "ignored": {"pad": 0}}, sample(1)],
        [[1, 2, 3], [1, 9, 9]], [[0, 1, 1], [1, 0, 0]], [[1, 0, 1], [1, 0, 0]],
    ),
    "a block fill is supervised and not attended": (
        FILL, [sample(5, [0, 0, 1, 1, 0]), sample(2)],
        [[1, 2, 3, 4, 5, 8, 8, 8], [1, 2, 8, 8, 0, 0, 0, 0]],
        [[0, 0, 1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0]], [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]],
    ),
    "whole blocks": ({"block_size": 2}, [sample(4)], [[1, 2, 3, 4]], [[1] * 4], [[1] * 4]),
    "blocks of one": ({"block_size": 1}, [sample(3)], [[1, 2, 3]], [[1] * 3], [[1] * 3]),
    "fill of the pad id": ({"pad_token_id": 7, "block_size": 2}, [sample(1)], [[1, 7]], [[1, 1]], [[1, 0]]),
    "fill of eos 0": (
        {"pad_token_id": 7, "eos_token_id": 0, "block_size": 2}, [sample(1)], [[1, 0]], [[1, 1]], [[1, 0]],
    ),
    "blocks from the response on, with an attended fill": (
        WINDOW, [sample(5, [0, 0, 0, 1, 1]), sample(2, [0, 1]), sample(2, [0, 0])],
        [[1, 2, 3, 4, 5, 8, 8], [1, 2, 8, 8, 8, 0, 0], [1, 2, 0, 0, 0, 0, 0]],
        [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0], [0] * 7],
        [[1] * 7, [1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0]],
    ),
    "a response ends with the content": (
        WINDOW, [sample(4, [0, 1, 0, 0])], [[1, 2, 3, 4, 8]], [[0, 1, 0, 0, 1]], [[1] * 5],
    ),
    "a window without blocks": (
        {"eos_token_id": 8, "response_window": True}, [sample(3, [0, 1, 1]), sample(1)],
        [[1, 2, 3], [1, 0, 0]], [[0, 1, 1], [1, 0, 0]], [[1, 1, 1], [1, 0, 0]],
    ),
    "a response past the cut has no fill": (
        WINDOW | {"max_seq_len": 6}, [sample(9, [0] * 8 + [1]), sample(3, [0, 1, 1])],
        [[1, 2, 3, 4, 5, 6], [1, 2, 3, 8, 8, 0]], [[0] * 6, [0, 1, 1, 1, 1, 0]], [[1] * 6, [1, 1, 1, 1, 1, 0]],
    ),
    "a fill is cut where the row ends": (
        FILL | {"max_seq_len": 7}, [sample(5), sample(1)],
        [[1, 2, 3, 4, 5, 8, 8], [1, 8, 8, 8, 0, 0, 0]],
        [[1] * 7, [1, 1, 1, 1, 0, 0, 0]], [[1, 1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0]],
    ),
    "a cap within a block": (
        {"block_size": 3, "pad_seq_len_divisible": 4, "max_seq_len": 4}, [sample(5)],
        [[1, 2, 3, 4]], [[1] * 4], [[1] * 4],
    ),
    "content is cut, its length is not": (
        {"max_seq_len": 3}, [sample(5, [0, 0, 1, 1, 1]), sample(1)],
        [[1, 2, 3], [1, 0, 0]], [[0, 0, 1], [1, 0, 0]], [[1, 1, 1], [1, 0, 0]],
    ),
    "supervised padding": (
        {"block_size": 2, "pad_seq_len_divisible": 3, "supervise_padding": True}, [sample(2, [0, 1]), sample(1, [0])],
        [[1, 2, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]], [[0, 1, 1, 1, 1, 1]] * 2, [[1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]],
    ),
    "packed documents": (
        FILL, [packed(3, 2), packed(4)], [[1, 2, 3, 4, 5, 8, 8, 8], [1, 2, 3, 4, 0, 0, 0, 0]],
        [[1] * 8, [1] * 4 + [0] * 4], [[1] * 5 + [0] * 3, [1] * 4 + [0] * 4],
        [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0, 0]],
        [[0, 0, 0, 1, 1, -1, -1, -1], [0, 0, 0, 0, -1, -1, -1, -1]],
    ),
    "at least one position": ({"pad_token_id": 4, "block_size": 4}, [sample(0)], [[4]], [[0]], [[0]]),
    "no row": (WINDOW, [], [], [], []),
}  # fmt: skip


@both
@pytest.mark.parametrize("case", BY_HAND.values(), ids=BY_HAND)
def test_by_hand(collated, case):
    options, batch, *rows = case
    out = collated(batch, **options)
    fields = ("input_ids", "loss_mask", "attention_mask", "position_ids", "segment_ids")
    expected = dict(zip(fields, rows, strict=False)) | {"input_lengths": [len(s["input_ids"]) for s in batch]}
    assert {name: t.tolist() for name, t in out.items()} == expected
    assert {t.dtype for name, t in out.items() if name != "loss_mask"} == {torch.int64}
    assert out["loss_mask"].dtype == torch.float32
    assert batch or out["input_ids"].shape == (0, 1)


@both
@pytest.mark.parametrize(
    ("n", "block_size", "divisible", "L"),
    [
        (5, None, None, 5),
        (5, None, 1, 5),
        (5, None, 4, 8),
        (8, None, 4, 8),
        (5, 4, 1, 8),
        (5, 4, 6, 12),
        (13, 4, 6, 24),
    ],
)
def test_length_is_rounded_to_the_common_multiple_and_then_capped(collated, n, block_size, divisible, L):
    options = {"block_size": block_size, "pad_seq_len_divisible": divisible}
    assert collated([sample(n)], **options)["input_ids"].shape == (1, L)
    assert collated([sample(n)], **options, max_seq_len=10)["input_ids"].shape == (1, min(L, 10))


def test_a_generator_is_a_batch():
    assert DLLMCollator()(sample(n) for n in (1, 2))["input_ids"].tolist() == [[1, 0], [1, 2]]


@pytest.mark.parametrize(
    "ones",
    [
        [1.0, 1.0],
        [True, 1.0],
        np.ones(2, dtype=np.float16),
        np.ones(2, dtype=np.uint64),
        torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        torch.ones(2, dtype=torch.bool),
        [torch.tensor(1), np.int32(1)],
        collections.deque([1, 1]),
        range(1, 2 + 1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("field", ["input_ids", "loss_mask", "attention_mask"])
def test_whole_numbers_are_taken_in_any_form(ones, field):
    expected = [1, 2] if isinstance(ones, range) else [1, 1]
    if isinstance(ones, range) and field == "loss_mask":
        ones, expected = range(2), [0, 1]
    assert DLLMCollator()([sample(2) | {field: ones}])[field].tolist() == [expected]
    assert DLLMCollator(max_seq_len=1)([sample(2) | {field: ones}])[field].tolist() == [expected[:1]]


def test_documented_helpers():
    collator = DLLMCollator(0, 5, 4, 6, 20)
    assert (collator.block_pad_token_id, DLLMCollator(3).block_pad_token_id) == (5, 3)
    assert (collator.pad_token_id, collator.eos_token_id, collator.block_size) == (0, 5, 4)
    assert (collator.pad_seq_len_divisible, collator.max_seq_len) == (6, 20)
    assert DLLMCollator._first_supervised_index([0, 0, 2, 1], 9) == 2
    assert DLLMCollator._first_supervised_index([0, 0], 9) == 9
    ends = collator._block_fill_ends(torch.tensor([5, 30]), torch.tensor([2, 3]))
    assert ends.tolist() == [6, 23]
    assert collator._block_fill_ends(torch.tensor([5]), torch.tensor([9])).tolist() == [5]
    assert collator._compute_target_length(torch.tensor([13])) == 20
    rows = collator._pad_and_fill([[1, 2], [3]], torch.tensor([2, 1]), torch.tensor([3, 1]), 4, 9, 5)
    assert rows.tolist() == [[1, 2, 5, 9], [3, 9, 9, 9]]
    assert rows.dtype == torch.int64
    rows = collator._pad_and_fill([[0.5, 2, 3]], torch.tensor([2]), torch.tensor([9]), 3, 9, 5, dtype=torch.float32)
    assert rows.tolist() == [[0.5, 2, 5]]
    assert rows.dtype == torch.float32
    rows = collator._pad_and_fill([[1, 2, 3], [1]], torch.tensor([2, 1]), torch.tensor([2, 1]), 4, 9, 5)
    assert rows.tolist() == [[1, 2, 9, 9], [1, 9, 9, 9]]
    assert collator._pad_and_fill([[1, 2]], torch.tensor([2]), torch.tensor([2]), 1, 9, 5).tolist() == [[1]]


def test_helpers_of_a_subclass_are_used():
    class Second(DLLMCollator):
        @staticmethod
        def _first_supervised_index(loss_mask, default):
            return 2

    out = Second(0, 8, block_size=4, response_window=True)([sample(5)])
    assert out["input_ids"].tolist() == [[1, 2, 3, 4, 5, 8]]


@both
def test_more_than_one_run_is_an_error_on_every_batch(collated):
    batch = [sample(3), sample(4, [1, 0, 0, 1])]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"sample 1.*loss_mask.* one supervised run .* got 2"):
            collated(batch, block_size=4, response_window=True)
    collated(batch, block_size=4)


def test_a_run_past_the_cut_is_still_a_second_run():
    with pytest.raises(ValueError, match=r"sample 0, field 'loss_mask' .* got 3"):
        DLLMCollator(block_size=4, max_seq_len=2, response_window=True)([sample(6, [0.5, 0, 1, 0, True, True])])


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(field):
    bad = packed(1, 2)
    del bad[field]
    with pytest.raises(ValueError, match=f"sample 1 has no field '{field}'"):
        DLLMCollator()([packed(2), bad])


def test_a_loss_mask_can_be_made_from_labels():
    """Data for causal models has labels. A Trainer keeps them, and drops a ``loss_mask``."""
    of_model = {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [-100, 2]}
    way = r"from labels it is \[int\(label != -100\) for label in labels\]"
    with pytest.raises(ValueError, match=rf"^sample 0 has no field 'loss_mask'; it has 'input_ids', .*; {way}$"):
        DLLMCollator()([of_model])
    message = rf"^every sample must have a field 'loss_mask', got input_ids, attention_mask, labels; {way}; if the data"
    with pytest.raises(ValueError, match=message):
        MaskedDiffusionCollator(9)([of_model])


@pytest.mark.parametrize("field", FIELDS[1:])
def test_unequal_lengths_are_named(field):
    bad = sample(3) | {field: [1, 1]}
    with pytest.raises(ValueError, match=f"sample 0, field '{field}' must be as long as its 'input_ids', 3, got 2"):
        DLLMCollator()([bad])


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("value", "got"),
    [
        (7, "int"),
        ("12", "str"),
        ({3, 4}, "set"),
        (torch.tensor(1), "torch.Tensor"),
        (["a", 2], "list of int, str"),
        ([None, 1], "list of NoneType, int"),
        ([[1], [2, 3]], "list of list"),
        ((1j, 1), "tuple of complex, int"),
        ([1, 10**400], "list of int"),
    ],
)
def test_a_field_that_is_not_a_sequence_of_numbers_raises(field, value, got):
    with pytest.raises(TypeError, match=f"sample 1, field '{field}' must be a sequence of numbers, got {got}$"):
        DLLMCollator()([packed(3), packed(2) | {field: value}])


@pytest.mark.parametrize("field", [field for field in FIELDS if field != "loss_mask"])
@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([1, 2.5], "2.5"),
        ([1, float("nan")], "nan"),
        ([1, float("-inf")], "-inf"),
        ([1, 2**63], "9.2"),
        (np.array([1, 2**63], dtype=np.uint64), "9223372036854775808"),
        (torch.tensor([1, 0.5]), "0.5"),
    ],
)
def test_a_field_with_fractions_or_large_numbers_raises(field, value, got):
    message = f"sample 1, field '{field}' must hold whole numbers of 64 bits, got {got}.* at position 1"
    with pytest.raises(ValueError, match=message):
        DLLMCollator()([packed(3), packed(2) | {field: value}])


@pytest.mark.parametrize("field", ["input_ids", "loss_mask", "attention_mask"])
@pytest.mark.parametrize("large", [2**53 + 1, -(2**53) - 1, 2**60 + 1, np.int64(2**53 + 1)])
def test_an_int_that_float64_cannot_represent_raises(field, large):
    """A list with a float is a list of floats, which cannot represent odd integers beyond 2**53."""
    message = f"sample 1, field '{field}' must hold no floats beside an int beyond 2**53, got {large} at position 1"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DLLMCollator()([sample(3), sample(3) | {field: [1.0, large, 2]}])


def test_whole_numbers_of_a_mixed_list_are_exact():
    ids = [1.0, 2**53 - 1, 2**60, float(2**62)]
    batch = DLLMCollator()([sample(4) | {"input_ids": ids}])
    assert batch["input_ids"].tolist() == [[int(i) for i in ids]]
    alone = [2**53 + 1, 2**63 - 1, 3, 4]
    assert DLLMCollator()([sample(4) | {"input_ids": alone}])["input_ids"].tolist() == [alone]


@pytest.mark.parametrize("value", [[[1], [2]], torch.ones(2, 3)])
def test_a_nested_field_raises(value):
    with pytest.raises(ValueError, match=r"sample 0, field 'loss_mask' must be 1-d, got shape \(2, "):
        DLLMCollator()([sample(2) | {"loss_mask": value}])


def test_a_sample_that_is_not_a_dict_raises():
    with pytest.raises(TypeError, match="sample 1 must be a dict, got list"):
        DLLMCollator()([sample(2), [1, 2]])
    with pytest.raises(TypeError, match=r"^batch must be a list of dicts, got dict; put a single sample into a list$"):
        DLLMCollator()(sample(2))
    with pytest.raises(TypeError, match=r"^batch must be a list of dicts, got NoneType$"):
        DLLMCollator()(None)


def test_the_block_size_is_at_least_1():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        DLLMCollator(block_size=0)


@pytest.mark.parametrize("divisor", [0, -4, 1])
def test_a_divisor_below_2_does_not_round_the_length(divisor):
    out = DLLMCollator(block_size=4, pad_seq_len_divisible=divisor)([sample(5)])
    assert out["input_ids"].shape == (1, 8)


@pytest.mark.parametrize("response_window", [False, True])
@pytest.mark.parametrize("limit", [0, -3])
def test_a_length_limit_below_1_leaves_one_position(limit, response_window):
    """Match the original, whose rows have at least one position."""
    samples = [sample(5), sample(2)]
    options = {"eos_token_id": 8, "block_size": 4, "response_window": response_window}
    out = DLLMCollator(max_seq_len=limit, **options)(samples)
    expected = DLLMCollator(max_seq_len=1, **options)(samples)
    assert all(torch.equal(out[name], expected[name]) for name in expected)
    assert out["input_ids"].tolist() == [[s["input_ids"][0]] for s in samples]


@pytest.mark.parametrize("name", ["block_size", "pad_seq_len_divisible", "max_seq_len"])
def test_sizes_are_checked(name):
    with pytest.raises(TypeError, match=f"{name} must be an int, got float"):
        DLLMCollator(**{name: 2.0})


@pytest.mark.parametrize(("name", "value"), [("pad_token_id", None), ("pad_token_id", True), ("eos_token_id", 2.0)])
def test_tokens_are_checked(name, value):
    with pytest.raises(TypeError, match=f"{name} must be an int, got {type(value).__name__}"):
        DLLMCollator(**{name: value})


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_pinned_memory_needs_an_accelerator():
    with pytest.raises(RuntimeError, match=r"pin_memory|Found no NVIDIA driver"):  # depends on the build
        DLLMCollator(pin_memory=True)([sample(3)])


@pytest.mark.gpu
def test_pinned_memory():
    out = DLLMCollator(pin_memory=True)([sample(3)])
    assert all(tensor.is_pinned() for tensor in out.values())


def test_a_weight_beyond_float32_is_an_infinity():
    sample = {"input_ids": [1, 2], "loss_mask": [1.0, 1e300], "attention_mask": [1, 1]}
    with pytest.raises(ValueError, match=r"^sample 0, field 'loss_mask' must hold no negative number, NaN or infinity"):
        DLLMCollator()([sample])
