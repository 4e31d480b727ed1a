"""A Hugging Face Trainer with the loss inside the LM head trains like one with that loss from logits."""

import copy
import functools
import importlib.util
import itertools
import multiprocessing.context
import os
import pickle
import re
import runpy
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import dllm_kernels
from dllm_kernels.integrations import transformers as module
from dllm_kernels.integrations.transformers import (
    MaskedDiffusionCollator,
    MaskedDiffusionTrainerMixin,
    loss_in_head,
    mdlm_loss_func,
    pack_labels,
    unpack_labels,
)
from dllm_kernels.ops import LinearLogits, weighted_linear_nll
from reference.mdlm import mdlm_loss
from tests.conftest import every_time
from tests.support.hosts import found
from tests.support.memory import without_garbage_collection

ROOT = Path(__file__).parents[2]
absent = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
peer = [pytest.mark.peer, pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} not installed")]


def needs_trainer(test):
    for mark in peer:
        test = mark(test)
    return test


@pytest.fixture
def ranks():
    """Import the code of the two ranks late, because it needs transformers."""
    from tests.support import trainer_ranks

    return trainer_ranks


# Labels and batches ---------------------------------------------------------------------------------------------------


def noised(B=3, L=17, seed=0, **options):
    torch.manual_seed(seed)
    ids, loss_mask = torch.randint(0, 2**31 - 1, (B, L)), torch.rand(B, L) < 0.7
    return ids, loss_mask, *dllm_kernels.corrupt_blockwise(ids, loss_mask, 7, block_size=4, **options)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_labels_keep_every_bit(dtype):
    ids, loss_mask, _, noise, p = noised(eps=0.0)
    labels = pack_labels(ids, loss_mask.to(dtype), noise.to(dtype), p)
    assert labels.dtype == torch.int64
    assert (labels != -100).sum() == loss_mask.sum()
    assert noise.any()
    assert not noise.all()
    targets, unpacked_noise, unpacked_p, supervised = unpack_labels(labels)
    assert torch.equal(targets, torch.where(loss_mask, ids, -100))
    assert torch.equal(unpacked_noise, noise)
    assert torch.equal(supervised, loss_mask)
    assert torch.equal(unpacked_p, torch.where(loss_mask, p, 0.0))


def test_the_smallest_and_largest_probabilities_survive():
    p = torch.tensor([[0.0, 2.0**-149, 2.0**-126, 1e-3, 1.0]])
    ones = torch.ones(1, 5)
    for noised_at in (ones, 1 - ones):
        labels = pack_labels(torch.full((1, 5), 2**31 - 1), ones, noised_at, p)
        targets, noise, unpacked, _ = unpack_labels(labels)
        assert torch.equal(noise, noised_at.bool())
        assert torch.equal(unpacked, p)
        assert targets.eq(2**31 - 1).all()
        assert labels.ge(0).all()


def sample(length, seed=0):
    return {
        "input_ids": [*range(1, length + 1)],
        "loss_mask": [0] + [1] * (length - 1),
        "attention_mask": [1] * length,
        "seed": seed,
    }


def test_a_batch_has_the_arguments_of_the_models():
    collator = MaskedDiffusionCollator(99, dllm_kernels.DLLMCollator(pad_token_id=50), eps=0.5)
    batch = collator([sample(5), sample(9)])
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    targets, noise, p, supervised = unpack_labels(batch["labels"])
    assert noise.any()
    assert torch.equal(batch["input_ids"] == 99, noise)
    assert batch["attention_mask"].sum(1).tolist() == [5, 9]
    assert supervised.sum(1).tolist() == [4, 8]
    assert targets[1].tolist() == [-100, *range(2, 10)]
    assert (p[noise] >= 0.5).all()
    assert batch["input_ids"][0, 5:].tolist() == [50] * 4


def counts_of(labels):
    _, noise, _, supervised = unpack_labels(labels)
    return int(noise.sum()), int(supervised.sum())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_supervised_positions_are_attended_to(dtype):
    """The fill of a block and supervised padding are targets, so the model must see the noisy tokens there."""

    def collate(samples):
        batch = dllm_kernels.DLLMCollator(50, block_size=8, supervise_padding=True)(samples)
        return batch | {"attention_mask": batch["attention_mask"].to(dtype)}

    samples = [sample(3), sample(13)]
    before, batch = collate(samples), MaskedDiffusionCollator(99, collate, eps=0.5)(samples)
    assert before["attention_mask"].sum(1).tolist() == [3, 13]
    assert batch["attention_mask"].tolist() == [[1] * 16] * 2
    assert batch["attention_mask"].dtype == dtype
    kept = MaskedDiffusionCollator(99, collate, attend_supervised=False)(samples)
    assert torch.equal(kept["attention_mask"], before["attention_mask"])
    with pytest.raises(TypeError, match=r"^attend_supervised must be a bool, got str$"):
        MaskedDiffusionCollator(99, attend_supervised="no")


def test_what_collate_returns():
    """Positions that restart in packed documents were dropped, and 1 was added to the scores of an additive mask."""
    samples = [{"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1], "attention_mask": [1, 1, 1]}] * 2
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "loss_mask": torch.ones(2, 3)}
    batch |= {"attention_mask": torch.ones(2, 3), "position_ids": torch.tensor([[0, 1, 0]] * 2), "input_lengths": 3}
    collated = lambda **changes: MaskedDiffusionCollator(9, lambda _: batch | changes)(samples)  # noqa: E731
    assert list(collated()) == ["input_ids", "attention_mask", "labels", "position_ids"]
    assert torch.equal(collated()["position_ids"], batch["position_ids"])
    for changes, message in (
        (
            {"attention_mask": torch.tensor([[0, -1e9, 0]] * 2)},
            "the attention_mask that collate returns must hold no neg",
        ),
        (
            {name: t[:1] for name, t in batch.items() if name.endswith(("ids", "mask"))},
            "collate must return one row per",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            collated(**changes)
    with pytest.raises(ValueError, match=r"^collate must return attention_mask, got input_ids"):
        MaskedDiffusionCollator(9, lambda _: {"input_ids": batch["input_ids"], "loss_mask": 1})(samples)
    with pytest.raises(TypeError, match=r"^collate must return a dict, got NoneType$"):
        MaskedDiffusionCollator(9, lambda _: None)(samples)
    for name in ("collate", "level"):
        with pytest.raises(TypeError, match=f"^{name} must be a function or None, got int$"):
            MaskedDiffusionCollator(9, **{name: 3})


def packed_sample(*lengths, seed=0, **more):
    """Return a sample of packed documents."""
    ids = torch.randint(0, 21, (sum(lengths),), generator=torch.Generator().manual_seed(seed)).tolist()
    numbers = {
        "position_ids": [i for n in lengths for i in range(n)],
        "segment_ids": [j for j, n in enumerate(lengths) for _ in range(n)],
    }
    return {"input_ids": ids, "loss_mask": [1] * len(ids), "attention_mask": [1] * len(ids), **numbers, **more}


def half_then_full(B, **_):
    return torch.tensor([0.5, 1.0]).repeat(B)[:B]


LEVELS = {
    "drawn": ({}, True),
    "of a sampler": ({"level": functools.partial(dllm_kernels.sample_level, low=0.1)}, True),
    "of a partial routine": ({"corrupt": functools.partial(dllm_kernels.corrupt_uniform, eps=0.3)}, True),
    "of a routine without segments": ({"corrupt": dllm_kernels.corrupt_blockwise}, False),
    "of blocks": ({"block_size": 4}, False),
}


@pytest.mark.parametrize("name", LEVELS)
def test_the_documents_of_a_packed_row_have_levels_of_their_own(name):
    """The noise of a sample does not depend on the other samples of the batch."""
    options, by_document = LEVELS[name]
    collator = MaskedDiffusionCollator(
        22, dllm_kernels.DLLMCollator(pad_seq_len_divisible=32), seed_field="seed", **options
    )
    samples = [packed_sample(5, 9, 4, seed=1), packed_sample(17, seed=2), packed_sample(2, 3, 4, 3, 6, seed=3)]
    samples = [sample | {"seed": i} for i, sample in enumerate(samples)]
    batch = collator(samples)
    assert list(batch) == ["input_ids", "attention_mask", "labels", "position_ids", "segment_ids"]
    _, noise, p, supervised = unpack_labels(batch["labels"])
    for b, sample in enumerate(samples):
        n = len(sample["input_ids"])
        assert batch["segment_ids"][b].tolist() == sample["segment_ids"] + [-1] * (32 - n)
        assert batch["position_ids"][b].tolist() == sample["position_ids"] + [0] * (32 - n)
        for key, row in collator([sample]).items():
            assert torch.equal(row[0], batch[key][b])
        levels = [p[b, batch["segment_ids"][b] == j].unique() for j in range(max(sample["segment_ids"]) + 1)]
        if by_document:
            assert len(torch.cat(levels).unique()) == len(torch.cat(levels)) == len(levels)
        elif name != "of blocks":
            assert len(torch.cat(levels).unique()) == 1
    assert torch.equal(supervised, batch["segment_ids"] >= 0)
    assert noise.any()


def test_levels_of_packed_documents():
    """A sampler is called once for all documents; column j of its levels belongs to the j-th document of a row."""
    collator = MaskedDiffusionCollator(22, level=half_then_full)
    _, noise, p, _ = unpack_labels(collator([packed_sample(3, 4, 2), packed_sample(2, 2)])["labels"])
    assert p.tolist() == [[0.5] * 3 + [1.0] * 4 + [0.5] * 2, [1.0, 1.0, 0.5, 0.5] + [0.0] * 5]
    assert noise[0, 3:7].all()
    none = packed_sample(3, 4) | {"segment_ids": [-1] * 7}
    assert not unpack_labels(collator([none])["labels"])[1].any()
    with pytest.raises(ValueError, match=r"^level must return as many levels as asked for, 3, got 2$"):
        MaskedDiffusionCollator(22, level=lambda B, **_: torch.ones(2))([packed_sample(3, 4, 2)])
    with pytest.raises(ValueError, match=r"^exact must be False with block_size or segment_ids, got True"):
        MaskedDiffusionCollator(22, exact=True)([packed_sample(3, 4, 2)])
    seeds = torch.tensor([7])
    given = MaskedDiffusionCollator(22, seeds=seeds)([packed_sample(3, 4, 2)])
    sample = {name: torch.tensor([values]) for name, values in packed_sample(3, 4, 2).items()}
    noisy, *_ = dllm_kernels.corrupt_uniform(
        sample["input_ids"], sample["loss_mask"], 22, segment_ids=sample["segment_ids"], seeds=seeds
    )
    assert torch.equal(given["input_ids"], noisy)


@needs_trainer
@pytest.mark.parametrize("shift", [False, True])
def test_the_loss_of_packed_documents_is_that_of_the_documents_alone(ranks, tmp_path, shift):
    """A shifted model does not predict the first token of a document, and the Trainer does not count it."""
    samples = [packed_sample(5, 9, 4, seed=1), packed_sample(7, 6, seed=2)]

    def collate(samples):
        batch = dllm_kernels.DLLMCollator()(samples)
        segments = batch["segment_ids"]
        return batch | {"attention_mask": segments[:, None, :, None] == segments[:, None, None, :]}

    collator = MaskedDiffusionCollator(ranks.MASK, collate, eps=0.5, seeds=torch.tensor([3, 4]))
    net = ranks.model().eval()
    net.set_attn_implementation("sdpa")
    created = ranks.trainer(net, tmp_path, 2, 1, data_collator=collator, eval_dataset=samples, shift=shift)
    batch = collator(samples)
    targets, noise, p, _ = unpack_labels(batch["labels"])
    total, count = 0.0, 0
    for b, j in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
        row, columns = slice(b, b + 1), batch["segment_ids"][b] == j
        part = [t[row, columns] for t in (targets, noise, p)]
        logits = net(input_ids=batch["input_ids"][row, columns]).logits
        loss = dllm_kernels.MDLMCrossEntropyLoss(shift=shift)
        total += loss(logits, *part, torch.ones_like(part[0])).total_loss
        count += int(columns.sum()) - shift
    assert created.evaluate()["eval_loss"] == pytest.approx(total.item() / count)
    inputs = next(iter(created.get_eval_dataloader()))
    assert (inputs["labels"][:, shift:] != -100).sum() == count
    assert not collator.shift


def test_what_is_no_list_of_samples():
    """A single sample, as of ``DataLoader(batch_size=None)``, was reported as samples without a field."""
    with pytest.raises(
        TypeError, match=r"^samples must be a list of dicts, got dict; put a single sample into a list$"
    ):
        DRAWING(sample(4))
    with pytest.raises(TypeError, match=r"^sample 1 must be a dict, got NoneType$"):
        DRAWING([sample(4), None])
    assert len(DRAWING(sample(4) for _ in range(3))["labels"]) == 3


def test_unsupervised_padding_and_other_attention_masks_are_left_as_they_are():
    def collate(change, samples):
        batch = dllm_kernels.DLLMCollator(50)(samples)
        return batch | {"attention_mask": change(batch["attention_mask"])}

    samples = [sample(3), sample(5)]
    for change, expected in (
        (lambda mask: mask, [[1, 1, 1, 0, 0], [1] * 5]),
        (lambda mask: mask * 7, [[7, 7, 7, 0, 0], [7] * 5]),  # ids of packed documents
        (lambda mask: mask[:, None] & mask[:, :, None], None),
    ):
        given = functools.partial(collate, change)
        mask = MaskedDiffusionCollator(99, given)(samples)["attention_mask"]
        assert mask.tolist() == (expected or given(samples)["attention_mask"].tolist())


def test_a_batch_carries_its_counts(monkeypatch):
    """A DataLoader and accelerate keep the counts of a batch, also of one that they rebuild from its entries."""
    batch = MaskedDiffusionCollator(9)([sample(5), sample(7, seed=1)])
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t.clone())
    pinned = torch.utils.data._utils.pin_memory.pin_memory(batch)
    for kept in (batch, pickle.loads(pickle.dumps(batch)), batch.to("cpu", non_blocking=True), pinned):
        assert kept.counts == counts_of(batch["labels"])
        assert all(torch.equal(kept[name], t) for name, t in batch.items())
    halves = type(batch)({name: t[:1] for name, t in batch.items()})
    assert halves.counts == counts_of(batch["labels"][:1])
    moved = pinned.to("meta").to("meta")  # as on a GPU, whose labels cannot be counted without a sync
    assert moved["labels"].is_meta
    assert moved.counts == counts_of(batch["labels"])
    assert type(moved)(moved).counts is None


CHANGES_OF_A_BATCH = {
    "|=": lambda b, new: b.__ior__({"labels": new}),
    "update": lambda b, new: b.update(labels=new),
    "an item": lambda b, new: b.__setitem__("labels", new),
    "pop and setdefault": lambda b, new: (b.pop("labels"), b.setdefault("labels", new)),
    "del and setdefault": lambda b, new: (b.__delitem__("labels"), b.setdefault("labels", new)),
    "popitem": lambda b, new: (b.popitem(), b.setdefault("labels", new)),
    "clear": lambda b, new: (b.clear(), b.setdefault("labels", new)),
    "an index": lambda b, new: b["labels"].__setitem__(..., new),
    "copy_": lambda b, new: b["labels"].copy_(new),
    "masked_fill_": lambda b, new: b["labels"].masked_fill_(torch.ones_like(b["labels"], dtype=bool), int(new.max())),
    "in place of a view": lambda b, new: b["labels"][:1].copy_(new[:1]),
    "|": lambda b, new: b.__setitem__("labels", (b | {"labels": new})["labels"]),
}


@pytest.mark.parametrize("change", CHANGES_OF_A_BATCH.values(), ids=CHANGES_OF_A_BATCH)
def test_the_counts_of_a_batch_follow_its_labels(change):
    """On a CPU they are those of the present labels. On another device they are None after a change."""
    collator, everywhere = MaskedDiffusionCollator(9, seed_field="seed"), MaskedDiffusionCollator(9, eps=1 - 1e-6)
    batch, new = collator([sample(5), sample(7, seed=1)]), everywhere([sample(5), sample(7)])["labels"]
    moved = batch.to("meta")
    assert moved.counts == batch.counts != counts_of(new)
    for changed, given in (
        (batch, new),
        (moved, new.to("meta") if change is not CHANGES_OF_A_BATCH["masked_fill_"] else new),
    ):
        change(changed, given)
    assert batch.counts == counts_of(batch["labels"])
    assert moved.counts is None


@pytest.mark.parametrize("edit", [lambda t: t.numpy(), lambda t: t.data, torch.from_dlpack])
def test_the_counts_of_a_batch_on_a_cpu_follow_an_edit_that_torch_does_not_notice(edit):
    batch = MaskedDiffusionCollator(9)([sample(5), sample(7, seed=1)]).to("cpu")
    edit(batch["labels"])[1:] = -100
    assert batch.counts == counts_of(batch["labels"])


@pytest.mark.parametrize("when", ["in the batch", "after the move"])
def test_labels_edited_in_place_give_the_loss_of_the_edited_labels(when):
    """More rows than before have a weight, so the count of the former labels would drop some of them."""

    class Edits(BareTrainer):
        def compute_loss(self, model, inputs, **options):
            if when == "after the move":
                inputs["labels"].copy_(new)
            return super().compute_loss(model, inputs, **options)

    few, every = (MaskedDiffusionCollator(12, level=lambda B, p=p, **_: torch.full((B,), p)) for p in (0.1, 1.0))
    batch, new = few([sample(9)] * 2), every([sample(9)] * 2)["labels"]
    model, hidden = ChangingModel(), torch.randn(2, 9, 4)
    del batch["input_ids"], batch["attention_mask"]
    batch |= {"hidden": hidden}
    expected = mdlm_loss_func((model(hidden),), new)
    trainer = Edits()
    if when == "in the batch":
        batch["labels"].copy_(new)
    torch.testing.assert_close(trainer.compute_loss(model, trainer._prepare_inputs(batch)), expected)


def test_noise_of_a_seed_does_not_depend_on_the_batch():
    collator = MaskedDiffusionCollator(99, corrupt=dllm_kernels.corrupt_blockwise, seed_field="seed", block_size=4)
    alone, together = collator([sample(9, 7)]), collator([sample(9, 3), sample(9, 7)])
    assert torch.equal(alone["labels"][0], together["labels"][1])
    assert torch.equal(alone["input_ids"][0], together["input_ids"][1])
    assert not torch.equal(together["labels"][0], together["labels"][1])


def test_a_level_sampler_determines_the_levels():
    sampler = functools.partial(dllm_kernels.sample_level, method="stratified", low=0.2)
    for options in ({"seed_field": "seed"}, {}, {"generator": torch.Generator().manual_seed(3)}):
        collator = MaskedDiffusionCollator(99, level=sampler, **options)
        labels = collator([sample(200, seed) for seed in range(4)])["labels"]
        _, noise, p, _ = unpack_labels(labels)
        levels = torch.stack([row[at].unique() for row, at in zip(p, noise, strict=True)])[:, 0].double()
        strata = (levels - 0.2) / 0.8 * 4
        assert sorted(strata.floor().tolist()) == [0, 1, 2, 3]
        assert levels.min() >= 0.2
    # under seeds, they are the sampler's own
    fixed = MaskedDiffusionCollator(99, level=sampler, seed_field="seed")([sample(200, seed) for seed in range(4)])
    expected = sampler(4, seeds=torch.arange(4))
    _, noise, p, _ = unpack_labels(fixed["labels"])
    assert torch.equal(p[noise], expected[:, None].expand_as(p)[noise])


# Noise ----------------------------------------------------------------------------------------------------------------

DRAWING = MaskedDiffusionCollator(99, eps=0.3)  # one row has no masked token: p >= 0.3, 63 times in a row, never
SEEDED = MaskedDiffusionCollator(99, eps=0.3, seed_field="seed")


def rows(batches):
    """Return every row of labels, which hold the noise and its probability."""
    return [tuple(row) for batch in batches for row in batch["labels"].tolist()]


def all_differ(*runs):
    every = [row for run in runs for row in run]
    return len(set(every)) == len(every)


def two_equal_batches(collator):
    """Return two batches of two equal samples, from a fixed state of the default generator."""
    torch.manual_seed(3)
    return rows(collator([sample(64), sample(64)]) for _ in range(2))


def test_without_seeds_the_default_generator_is_used():
    assert two_equal_batches(DRAWING) == two_equal_batches(DRAWING)
    assert all_differ(two_equal_batches(DRAWING))
    state = torch.get_rng_state()
    following = rows([DRAWING([sample(64)])])
    torch.set_rng_state(state)
    assert rows([DRAWING([sample(64)])]) == following


def test_ranks_draw_differently_from_equal_generators(monkeypatch):
    runs = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        runs.append(two_equal_batches(DRAWING))
        passed = MaskedDiffusionCollator(99, eps=0.3, rank=rank)
        monkeypatch.setenv("RANK", "7")
        assert two_equal_batches(passed) == runs[rank]  # as tensor-parallel peers of this rank must
    assert all_differ(*runs)
    monkeypatch.delenv("RANK")
    assert two_equal_batches(DRAWING) == runs[0]


OUT_OF_RANGE = (2**63, -(2**63) - 1)


def test_numbers_have_64_bits():
    for number in OUT_OF_RANGE:
        with pytest.raises(ValueError, match=f"^rank must be an int of 64 bits, got {number}$"):
            MaskedDiffusionCollator(99, rank=number)
        with pytest.raises(ValueError, match=f"^epoch must be an int of 64 bits, got {number}$"):
            MaskedDiffusionCollator(99).set_epoch(number)
        with pytest.raises(ValueError, match=f"^sample 1, field 'seed' must be an int of 64 bits, got {number}$"):
            SEEDED([sample(4), sample(4, number)])
    MaskedDiffusionCollator(99, rank=np.int64(3)).set_epoch(np.int64(2))
    of_ranks = []
    for rank in (3, np.int32(3), np.uint64(3)):  # the product with the stride stayed an int32, or failed
        torch.manual_seed(0)
        of_ranks.append(rows([MaskedDiffusionCollator(99, rank=rank)([sample(64)])]))
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    limits = [2**63 - 1, np.int64(-(2**63)), torch.tensor(2**63 - 1)]
    assert rows([SEEDED([sample(64, limits[0])])]) == rows([SEEDED([sample(64, limits[2])])])
    assert all_differ(rows([SEEDED([sample(64, seed) for seed in limits[:2]])]))


@pytest.mark.parametrize("number", ["0", 1.5, True, None])
def test_numbers_are_whole(number):
    kind = type(number).__name__
    if number is not None:  # which stands for the rank of the process
        with pytest.raises(TypeError, match=f"^rank must be an int, got {kind}$"):
            MaskedDiffusionCollator(99, rank=number)
    with pytest.raises(TypeError, match=f"^epoch must be an int, got {kind}$"):
        MaskedDiffusionCollator(99).set_epoch(number)
    with pytest.raises(TypeError, match=f"^sample 0, field 'seed' must be an int, got {kind}$"):
        SEEDED([sample(4, number), sample(4)])


@pytest.mark.parametrize(("own", "ranks", "expected"), [(None, 1, None), (None, 2, 2), (0, 2, 0)])
def test_ranks_of_tensor_parallelism_draw_the_same_noise(own, ranks, expected):
    attributes = {"_shift": False, "args": SimpleNamespace(process_index=5), "add_callback": lambda *_: None}
    trainer = type("Loop", (), {**attributes, "get_tp_size": lambda _: ranks})()
    trainer.data_collator = MaskedDiffusionCollator(5, rank=own)
    MaskedDiffusionTrainerMixin._follow_epochs(trainer)
    assert trainer.data_collator.rank == expected


def test_a_corruption_that_does_not_mask_is_rejected():
    for random in (
        dllm_kernels.corrupt_uniform_random,
        functools.partial(dllm_kernels.corrupt_uniform_random, eps=0.1),
    ):
        with pytest.raises(
            ValueError, match=r"^corrupt must take the token that masks as its third argument, got .*vocab_size$"
        ):
            MaskedDiffusionCollator(99, corrupt=random)
    assert MaskedDiffusionCollator(99, corrupt=torch.clone).corrupt is torch.clone  # which has no signature
    with pytest.raises(TypeError, match=r"^corrupt must be a function, got str$"):
        MaskedDiffusionCollator(99, corrupt="uniform")
    message = r"^corrupt must take the options of the collator, but it got an unexpected keyword argument 'epsilon'$"
    with pytest.raises(TypeError, match=message):
        MaskedDiffusionCollator(99, epsilon=0.1)
    assert MaskedDiffusionCollator(99, corrupt=lambda ids, mask, token, **options: None, epsilon=0.1)
    with pytest.raises(TypeError, match=r"^mask_token_id must be an int, got NoneType$"):  # of a tokenizer without MASK
        MaskedDiffusionCollator(None)
    mix = functools.partial(
        dllm_kernels.corrupt_mix, vocab_size=100, mask_prob=torch.tensor([0.5]), uniform_prob=torch.tensor([0.1])
    )
    with pytest.raises(
        ValueError, match=r"^corrupt must return \(noisy_input_ids, noise_mask, p_mask\), got 2 values$"
    ):
        MaskedDiffusionCollator(99, corrupt=mix)([sample(4)])
    for got, returned in (("torch.Tensor", torch.ones(3)), ("NoneType", None)):
        with pytest.raises(ValueError, match=rf"^corrupt must return \(noisy_input_ids, .*, got {got}$"):
            MaskedDiffusionCollator(99, corrupt=lambda *_, returned=returned, **__: returned)([sample(4)] * 3)
    MaskedDiffusionCollator(99, corrupt=lambda *batch, seeds: dllm_kernels.corrupt_uniform(*batch, seeds=seeds))(
        [sample(4)]
    )


def test_other_labels_are_rejected():
    ids, loss_mask, _, noise, p = noised()
    for wrong, message in (
        ((ids.float(), loss_mask, noise, p), "input_ids must have dtype int64, .* got float32"),
        ((ids, loss_mask[:, :1], noise, p), r"loss_mask must have shape \(3, 17\) \(that of input_ids\), got \(3, 1\)"),
        ((ids, loss_mask, p, noise), "p_mask must have dtype float16, .* got bool"),
        ((ids, loss_mask, noise, p.double()), "p_mask must have dtype float32, got float64"),
        ((ids, loss_mask, noise, p[:, :1]), r"p_mask must have shape \(3, 17\) \(that of input_ids\), got \(3, 1\)"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            pack_labels(*wrong)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("input_ids", 2**31, r"input_ids must lie in \[0, 2\^31\) at supervised positions, got 2147483648"),
        ("input_ids", 2**40 + 5, r"input_ids must lie in \[0, 2\^31\) at supervised positions, got 1099511627781"),
        ("input_ids", -1, r"input_ids must lie in \[0, 2\^31\) at supervised positions, got -1"),
        ("p_mask", -0.5, r"p_mask must lie in \[0, 1\] at supervised positions, got -0\.5"),
        ("p_mask", 1.5, r"p_mask must lie in \[0, 1\] at supervised positions, got 1\.5"),
        ("p_mask", float("nan"), r"p_mask must lie in \[0, 1\] at supervised positions, got nan"),
        ("p_mask", float("inf"), r"p_mask must lie in \[0, 1\] at supervised positions, got inf"),
    ],
)
@pytest.mark.parametrize("supervised", [True, False])
def test_labels_out_of_range_are_rejected_where_they_are_used(name, value, message, supervised):
    given = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "loss_mask": torch.ones(2, 3, dtype=torch.int64)}
    given |= {"noise_mask": torch.ones(2, 3, dtype=torch.bool), "p_mask": torch.full((2, 3), 0.5)}
    given[name][1, 2] = value
    given["loss_mask"][1, 2] = supervised
    if supervised:
        with pytest.raises(ValueError, match=rf"^{message} at position \(1, 2\)$"):
            pack_labels(**given)
    else:
        targets, _, p, _ = unpack_labels(pack_labels(**given))
        assert (targets[1, 2], p[1, 2]) == (-100, 0)


def test_a_negative_zero_is_a_probability():
    labels = pack_labels(torch.ones(1, 1).long(), torch.ones(1, 1), torch.zeros(1, 1), torch.tensor([[-0.0]]))
    assert labels.signbit().sum() == 0
    assert unpack_labels(labels)[2].tolist() == [[0.0]]


NOT_PACKED = (
    r"labels must be packed by pack_labels, got .*; pass data_collator=MaskedDiffusionCollator\(mask_token_id\)"
)


@pytest.mark.parametrize("label", [0, 3, 2**31, 2**60, -1, -101])
def test_labels_that_are_not_packed_are_rejected(label):
    """An ordinary collator of masked tokens gives token ids, which would mean: not masked, so no loss."""
    packed = pack_labels(*noised()[:2], *noised()[3:]).masked_fill(torch.tensor(False), 0)
    labels = packed.clone()
    labels[1, 3] = label
    for call in (
        lambda: unpack_labels(labels),
        lambda: mdlm_loss_func((torch.zeros(3, 17, 13),), labels),
        lambda: mdlm_loss_func((torch.zeros(3, 17, 13),), labels, loss=dllm_kernels.BlockDiffusionCrossEntropyLoss()),
        lambda: BareTrainer().compute_loss(ChangingModel(), {"hidden": torch.zeros(3, 17, 4), "labels": labels}),
    ):
        with pytest.raises(ValueError, match=NOT_PACKED):
            call()
    with pytest.raises(ValueError, match=r"labels must be packed by pack_labels, got int32"):
        unpack_labels(labels.int())
    assert unpack_labels(packed)[3].any()
    assert not unpack_labels(torch.full_like(packed, -100))[3].any()


@needs_trainer
def test_a_collator_of_masked_tokens_is_rejected(ranks, tmp_path):
    """The Trainer's own collator gives token ids of the masked tokens as labels."""

    def masked_tokens(samples):
        ids = torch.tensor([s["input_ids"][:4] for s in samples])
        return {"input_ids": torch.where(ids > 9, ranks.MASK, ids), "labels": torch.where(ids > 9, ids, -100)}

    for collator, message in (
        (masked_tokens, NOT_PACKED),
        (dllm_kernels.DLLMCollator(), "the batch must have labels, got loss_mask; pass data_collator=MaskedDiffusion"),
    ):
        created = ranks.trainer(ranks.model(), tmp_path, 4, 1, data_collator=collator, eval_dataset=ranks.samples())
        for run in (created.train, created.evaluate):
            with pytest.raises(ValueError, match=message):
                run()


def test_epochs_differ_and_each_is_reproducible():
    samples, runs = [sample(64, seed) for seed in (5, 6)], []
    collator = MaskedDiffusionCollator(99, eps=0.3, seed_field="seed")
    for epoch in (0, 1, 2):
        collator.set_epoch(epoch)
        runs.append(rows([collator(samples)]))
        assert rows([collator(samples[1:])]) == runs[epoch][1:]
    assert all_differ(*runs)
    assert runs[0] == rows([SEEDED(samples)])
    collator.set_epoch(1)
    assert rows([collator(samples)]) == runs[1]


def test_a_generator_of_the_caller_is_used_unchanged():
    ids, ones = torch.arange(1, 65)[None], torch.tensor([[0.0] + [1.0] * 63])
    collator = MaskedDiffusionCollator(99, generator=torch.Generator().manual_seed(8))
    expected = dllm_kernels.corrupt_uniform(ids, ones, 99, generator=torch.Generator().manual_seed(8))
    assert torch.equal(collator([sample(64)])["labels"], pack_labels(ids, ones, *expected[1:]))
    both = MaskedDiffusionCollator(99, seed_field="seed", generator=torch.Generator())
    with pytest.raises(ValueError, match="generator and seeds exclude each other"):
        both([sample(64)])


def test_seeds_and_a_seed_field_exclude_each_other():
    with pytest.raises(ValueError, match=r"^seeds must be None with a seed_field, "):
        MaskedDiffusionCollator(99, seed_field="seed", seeds=torch.arange(1))
    fixed = MaskedDiffusionCollator(99, eps=0.3, seeds=torch.arange(1))
    assert rows([fixed([sample(64)])]) == rows([fixed([sample(64)])]) == rows([SEEDED([sample(64)])])


@pytest.mark.parametrize("options", [{"seed_field": "seed"}, {"rank": 1}], ids=str)
def test_seeds_of_none_change_nothing(options):
    batches = []
    for others in ({}, {"seeds": None}):
        torch.manual_seed(0)
        batches.append(MaskedDiffusionCollator(99, **options, **others)([sample(50, 7)]))
    assert torch.equal(batches[0]["labels"], batches[1]["labels"])


def test_another_default_device_has_no_effect():
    batches = []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(device):
            batches.append([DRAWING([sample(64)]), SEEDED([sample(64)])])
    assert rows(batches[0]) == rows(batches[1])


def loaded(collator, samples, **options):
    """Return the rows of two epochs, from a fixed state of the default generator."""
    torch.manual_seed(3)
    loader = torch.utils.data.DataLoader(
        samples, batch_size=2, collate_fn=collator, worker_init_fn=seeded_alike, **options
    )
    seen = []
    for epoch in range(2):
        collator.set_epoch(epoch)
        seen += rows(loader)
    collator.set_epoch(0)
    return seen


@pytest.mark.everyday(1)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("collator", [DRAWING, SEEDED])
def test_workers_and_epochs_differ_reproducibly(collator, persistent):
    """The epoch may be set while the workers run, and a ``worker_init_fn`` may give them equal seeds."""
    samples = [sample(64, 0 if collator is DRAWING else seed) for seed in range(8)]
    options = {"num_workers": 2, "persistent_workers": persistent, "multiprocessing_context": "fork"}
    runs = [loaded(collator, samples, **options) for _ in range(2)]
    assert all_differ(runs[0])
    assert runs[0] == runs[1]


def seeded_alike(worker):
    torch.manual_seed(0)


class EachOf:
    """Collate the same samples with each of several collators."""

    def __init__(self, collators):
        self.collators = collators

    def __call__(self, samples):
        return [collator(samples) for collator in self.collators]


@pytest.mark.parametrize(
    ("context", "persistent"),
    [
        ("fork", True),
        pytest.param("spawn", True, marks=pytest.mark.exhaustive),
        # Workers of one epoch alone start in it; test_workers_and_epochs_differ_reproducibly has such workers.
        *(pytest.param(context, False, marks=pytest.mark.every_case) for context in ("fork", "spawn")),
    ],
)
def test_copies_have_a_separate_epoch_that_workers_receive(context, persistent):
    samples, expected = [sample(64, seed) for seed in range(2)], []
    for epoch in range(2):
        fresh = MaskedDiffusionCollator(99, eps=0.3, seed_field="seed")
        fresh.set_epoch(epoch)
        expected.append(rows([fresh(samples)]))
    assert all_differ(*expected)
    original = MaskedDiffusionCollator(99, eps=0.3, seed_field="seed")
    copies = [copy.copy(original), copy.deepcopy(original), pickle.loads(pickle.dumps(original))]
    options = {"num_workers": 1, "persistent_workers": persistent, "multiprocessing_context": context}
    loader = torch.utils.data.DataLoader(samples, batch_size=2, collate_fn=EachOf(copies), **options)
    for epoch in range(2):
        for each in copies:
            each.set_epoch(epoch)
        (batches,) = loader
        assert [rows([batch]) for batch in batches] == [expected[epoch]] * 3
    assert rows([original(samples)]) == expected[0]
    original.set_epoch(2)
    (batches,) = loader
    assert [rows([batch]) for batch in batches] == [expected[1]] * 3


def test_a_copy_starts_in_the_epoch_of_its_original():
    samples, original = [sample(64, 5)], MaskedDiffusionCollator(99, eps=0.3, seed_field="seed")
    original.set_epoch(3)
    for created in (copy.copy(original), copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert rows([created(samples)]) == rows([original(samples)])


@pytest.fixture
def rank_of_two():
    """Return a function that makes this process one of two ranks, without environment variables or communication."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank):
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())

    yield become
    torch.distributed.destroy_process_group()


def first_rows(context):
    """Return rows of a worker, with equal states of the default generator."""
    torch.manual_seed(3)
    options = {"num_workers": 1, "multiprocessing_context": context} if context else {}
    return rows(torch.utils.data.DataLoader([sample(64)] * 2, batch_size=2, collate_fn=DRAWING, **options))


@pytest.mark.parametrize(
    "context",
    [
        *every_time([None, "fork"], [None, "fork", "spawn"]),
        pytest.param("forkserver", marks=pytest.mark.every_case),  # it pickles the collator as "spawn" does
    ],
)
def test_workers_of_different_ranks_draw_differently(monkeypatch, rank_of_two, context):
    """The rank is known to the process group only, which a spawned worker does not have. A repetition is equal."""
    monkeypatch.delenv("RANK", raising=False)
    runs = []
    for rank in (0, 1):
        rank_of_two(rank)
        runs.append(first_rows(context))
        assert first_rows(context and "fork") == runs[rank]
    assert all_differ(*runs)


def test_a_worker_has_the_rank_of_the_process_that_spawned_it(monkeypatch):
    """A collator knows the rank of the process that pickled it for another one, which may fork workers itself."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(multiprocessing.context, "get_spawning_popen", object)
    sent = pickle.loads(pickle.dumps(DRAWING))
    monkeypatch.setenv("RANK", "0")
    for parent, worker, rank in ((0, 5, 1), (1, 5, 0), (0, None, 0), (0, 6, 1)):
        pid = os.getpid() + parent
        info = worker and SimpleNamespace(seed=worker)
        monkeypatch.setattr(multiprocessing, "parent_process", lambda pid=pid: SimpleNamespace(pid=pid))
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda info=info: info)
        found = []
        for collator in (sent, MaskedDiffusionCollator(99, eps=0.3, rank=rank)):
            monkeypatch.setattr(module, "_of_worker", None)
            found.append(two_equal_batches(collator))
            drawn = not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(3).get_state())
            assert drawn == (worker is None)
        assert found[0] == found[1]
        assert all_differ(found[0])


def draws_in_a_rank(i, rank, collator, path):
    """Draw in a process of this rank, which may have received the collator when it was spawned, and in a worker."""
    os.environ["RANK"] = str(rank)
    found = [two_equal_batches(collator)]
    torch.manual_seed(3)
    options = {"num_workers": 1, "multiprocessing_context": "fork"}
    found.append(rows(torch.utils.data.DataLoader([sample(64)], collate_fn=collator, **options)))
    Path(path, str(rank)).write_bytes(pickle.dumps(found))


@pytest.mark.exhaustive
def test_a_collator_sent_to_spawned_ranks_has_no_rank_yet(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")  # the rank of the launching process
    draws_in_a_rank(0, 0, DRAWING, tmp_path)
    torch.multiprocessing.spawn(draws_in_a_rank, (1, DRAWING, tmp_path))
    one, other = (pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(2))
    for mine, theirs in zip(one, other, strict=True):
        assert all_differ(mine, theirs)


def test_a_copy_does_not_keep_the_rank_of_its_original(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    copies = [copy.copy(DRAWING), copy.deepcopy(DRAWING), pickle.loads(pickle.dumps(DRAWING))]
    expected = two_equal_batches(DRAWING)
    assert all(two_equal_batches(each) == expected for each in copies)
    monkeypatch.setenv("RANK", "2")
    assert all(all_differ(expected, two_equal_batches(each)) for each in copies)


class Several:
    """Two collators and a copy, as of a mixture of tasks."""

    def __init__(self):
        self.collators = [MaskedDiffusionCollator(99) for _ in range(2)]

    def __call__(self, samples):
        return [rows([collator(samples)]) for collator in (*self.collators, copy.deepcopy(self.collators[0]))]


def test_collators_in_one_worker_draw_differently():
    loader = torch.utils.data.DataLoader(
        [sample(64)] * 2, 1, collate_fn=Several(), num_workers=1, multiprocessing_context="fork"
    )
    assert all_differ(*(noise for found in loader for noise in found))


@pytest.mark.parametrize("field", ["loss_mask", "seed"])
def test_a_field_removed_by_a_trainer_is_named(field):
    samples = [sample(4), {k: v for k, v in sample(4).items() if k != field}]
    with pytest.raises(ValueError, match=rf"every sample must have a field '{field}', got input_ids, .*columns=False"):
        MaskedDiffusionCollator(99, seed_field="seed")(samples)


def test_samples_with_labels_are_told_how_to_make_the_mask():
    samples = [{"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [-100, 2]}]
    for collate in (MaskedDiffusionCollator(99), dllm_kernels.DLLMCollator()):
        with pytest.raises(ValueError, match=r"'loss_mask'.* \[int\(label != -100\) for label in labels\]"):
            collate(samples)


@pytest.mark.parametrize("count", [None, 11, torch.tensor(11.0)])
@pytest.mark.parametrize("wrap", [lambda x: {"logits": x}, lambda x: (x,)])
def test_the_loss_function_is_the_masked_diffusion_loss(count, wrap):
    ids, loss_mask, _, noise, p = noised()
    ids, logits = ids % 13, torch.randn(*ids.shape, 13, dtype=torch.float64, requires_grad=True)
    loss = mdlm_loss_func(wrap(logits), pack_labels(ids, loss_mask, noise, p), count)
    expected = mdlm_loss(logits, ids, noise, p, loss_mask, int(loss_mask.sum()) if count is None else 11)
    torch.testing.assert_close(loss, expected)
    grads = [torch.autograd.grad(value, logits)[0] for value in (loss, expected)]
    torch.testing.assert_close(*grads)


# Other losses ---------------------------------------------------------------------------------------------------------


def cosine_level(B, **seeds):
    return 1 - torch.cos(torch.pi / 2 * dllm_kernels.sample_level(B, low=1e-3, **seeds))


def cosine_weights(target_ids, noise_mask, p_mask, loss_mask):
    angle = torch.acos(1 - p_mask)
    return noise_mask * torch.pi / 2 * angle.sin() / p_mask.clamp(min=1e-8)


def flat(target_ids, noise_mask, p_mask, loss_mask):
    return loss_mask  # a bool, for every token


def mdlm_of_a_function(target_ids, noise_mask, p_mask, loss_mask):
    return (1 / p_mask.double()).masked_fill(~noise_mask & loss_mask, 0.0)  # infinite at unsupervised positions


FUNCTIONS = {
    "weights of MDLM": (mdlm_of_a_function, dllm_kernels.MDLMCrossEntropyLoss()),
    "weights of 1": (flat, dllm_kernels.BlockDiffusionCrossEntropyLoss()),
}


def test_a_bad_count_is_named_as_the_argument_that_it_is():
    labels = torch.full((1, 3), -100)
    with pytest.raises(ValueError, match=r"^num_items_in_batch must not be negative, got -3"):
        mdlm_loss_func((torch.randn(1, 3, 7),), labels, -3)


def test_a_record_that_a_model_returns_keeps_its_dtype():
    ids, loss_mask, _, noise, p = noised()
    labels = pack_labels(ids % 13, loss_mask, noise, p)
    hidden, weight = torch.randn(*ids.shape, 4).bfloat16(), torch.randn(13, 4).bfloat16()
    expected = mdlm_loss_func((hidden.float() @ weight.float().T,), labels)
    wide, narrow = (LinearLogits(hidden, weight, logits_dtype=dtype) for dtype in (torch.float32, None))
    torch.testing.assert_close(mdlm_loss_func({"logits": wide}, labels), expected)
    assert mdlm_loss_func({"logits": narrow}, labels) != mdlm_loss_func({"logits": wide}, labels)


@pytest.mark.parametrize("count", [None, 11, torch.tensor(11)])
@pytest.mark.parametrize(("function", "loss"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_of_row_weights_is_the_loss_with_these_weights(function, loss, count):
    ids, loss_mask, _, noise, p = noised()
    labels, model = pack_labels(ids % 13, loss_mask, noise, p), ChangingModel().double()
    hidden = torch.randn(*ids.shape, 4, dtype=torch.float64)
    logits = model(hidden).detach()
    expected = loss(logits, *unpack_labels(labels), num_diffusion_tokens=loss_mask.sum() if count is None else 11)
    for passed in (function, loss):
        torch.testing.assert_close(mdlm_loss_func((logits,), labels, count, loss=passed), expected.total_loss)
        trainer = BareTrainer(loss=passed)
        inputs = {"hidden": hidden, "labels": labels}
        torch.testing.assert_close(trainer.compute_loss(model, inputs, num_items_in_batch=count), expected.total_loss)


@pytest.mark.parametrize(
    ("noise", "weights"), [({"eps": 0.1}, None), ({"level": cosine_level}, cosine_weights)], ids=["linear", "cosine"]
)
def test_a_uniform_prediction_has_a_loss_of_log_v(noise, weights):
    """The average over the noise is log V only if weights and levels match, and supervised tokens are the denominator.

    Each of the batches has 20 rows with noise of their own.
    """
    V, n, B = 16, 20, 20
    torch.manual_seed(4)
    collator = MaskedDiffusionCollator(V, **noise)
    text = {"input_ids": [3] * 32, "loss_mask": [0] * 8 + [1] * 24, "attention_mask": [1] * 32}
    batches = [collator([text] * B)["labels"] for _ in range(n)]
    losses = torch.stack([mdlm_loss_func((torch.zeros(B, 32, V),), b, loss=weights) for b in batches])
    spread = losses.std() / n**0.5
    assert abs(losses.mean() - torch.tensor(V).log()) < 4 * spread
    assert spread < 0.1


SHIFTED = {  # a loss, and the loss and ``shift`` that are passed for a model whose row i predicts token i + 1
    "default": (None, None, True),
    "block": (dllm_kernels.BlockDiffusionCrossEntropyLoss(),) * 2 + (True,),
    "function": (cosine_weights, cosine_weights, True),
    "own": (None, dllm_kernels.MDLMCrossEntropyLoss(shift=True), False),
    "once": (None, dllm_kernels.MDLMCrossEntropyLoss(shift=True), True),
}


@pytest.mark.parametrize(("loss", "shifted", "shift"), SHIFTED.values(), ids=SHIFTED)
def test_a_shifted_model_predicts_the_next_token(loss, shifted, shift):
    """Row i of the logits is compared with token i + 1. Token 0 is neither predicted nor counted."""
    ids, loss_mask, _, noise, p = noised()
    ids, loss_mask[:, :2] = ids % 13, True
    model, hidden = ChangingModel().double(), torch.randn(3, 17, 4, dtype=torch.float64)
    labels = pack_labels(ids, loss_mask, noise, p)
    rest = pack_labels(ids[:, 1:], loss_mask[:, 1:], noise[:, 1:], p[:, 1:].contiguous())
    expected = mdlm_loss_func((model(hidden[:, :-1]),), rest, loss=loss)
    trainer = BareTrainer(loss=shifted, shift=shift)
    got = trainer.compute_loss(model, {"hidden": hidden, "labels": labels})
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(mdlm_loss_func((model(hidden),), labels, loss=shifted, shift=shift), expected)
    grads = [torch.autograd.grad(x, model.lm_head.weight, retain_graph=True)[0] for x in (got, expected)]
    torch.testing.assert_close(*grads)
    assert trainer._loss_shifts_labels
    assert mdlm_loss_func((model(hidden),), labels, loss=loss) != expected


def test_the_noisy_tokens_of_a_shifted_model_are_those_of_its_targets():
    loss, model = dllm_kernels.SCDDLoss(12, num_timesteps=5, max_ratio=0.4), ChangingModel()
    batch = MaskedDiffusionCollator(12, corrupt=scdd_noise, seed_field="seed")([sample(11, seed) for seed in range(3)])
    labels, noisy, embedding = batch["labels"], batch["input_ids"], nn.Embedding(13, 4)
    targets, masked, p, supervised = (x[:, 1:] for x in unpack_labels(labels))
    times = p.amax(1, keepdim=True).expand_as(p)
    logits = model(embedding(noisy))[:, :-1]
    expected = loss(logits, targets, masked, times, supervised, noisy_input_ids=noisy[:, 1:]).total_loss
    model.forward = lambda input_ids: model.lm_head(embedding(input_ids))
    inputs = {"input_ids": noisy, "labels": labels}
    torch.testing.assert_close(BareTrainer(loss=loss, shift=True).compute_loss(model, dict(inputs)), expected)
    loss = dllm_kernels.SCDDLoss(12, num_timesteps=5, max_ratio=0.4, shift=True)
    torch.testing.assert_close(BareTrainer(loss=loss).compute_loss(model, dict(inputs)), expected)


def scdd_noise(input_ids, loss_mask, mask_token_id, *, seeds):
    """Corrupt with masked and wrong tokens, at one time per sequence, as a collator's ``corrupt``."""
    t = dllm_kernels.sample_level(len(input_ids), seeds=seeds, low=0.1, high=0.9)[:, None]
    at = dllm_kernels.scdd_schedule(t, max_ratio=0.4, gamma_shape=1.0, t_peak=0.5)
    probabilities = {"mask_prob": at.absorbed_mass, "uniform_prob": at.uniform_mass}
    noisy, noise = dllm_kernels.corrupt_mix(
        input_ids, loss_mask, mask_token_id, mask_token_id + 1, seeds=seeds, **probabilities
    )
    return noisy, noise, t.expand(input_ids.shape).contiguous()


def test_scdd_receives_the_noisy_tokens_of_the_model():
    """Its time is read from the first column, and known even if the first token is not supervised."""
    collator = MaskedDiffusionCollator(12, corrupt=scdd_noise, seed_field="seed")
    samples = [{**sample(11, seed), "loss_mask": [0] * 2 + [1] * (9 - seed) + [0] * seed} for seed in range(3)]
    batch = collator(samples)
    noise, supervised = batch["input_ids"], unpack_labels(batch["labels"])[3]
    assert ((noise != 12) & (noise != torch.tensor(samples[0]["input_ids"])) & supervised).any()
    loss = dllm_kernels.SCDDLoss(12, num_timesteps=5, max_ratio=0.4)
    targets, masked, p, _ = unpack_labels(batch["labels"])
    times = p.amax(1, keepdim=True).expand_as(p)
    model = ChangingModel()
    embedding = nn.Embedding(13, 4)
    expected = loss(model(embedding(noise)), targets, masked, times, supervised, noisy_input_ids=noise).total_loss
    model.forward = lambda input_ids: model.lm_head(embedding(input_ids))
    inputs = {"input_ids": noise, "labels": batch["labels"]}
    for wants_logits in (False, True):
        trainer = BareTrainer(loss=loss)
        trainer._wants_logits = wants_logits
        torch.testing.assert_close(trainer.compute_loss(model, dict(inputs)), expected)
    with pytest.raises(
        ValueError, match="noisy_input_ids must be given, got None; pass the tokens that the model received"
    ):
        mdlm_loss_func((model(noise),), batch["labels"], loss=loss)


class Compiled:
    """A loss as torch.compile returns it, which was called for row weights."""

    _orig_mod = dllm_kernels.MDLMCrossEntropyLoss()

    def __call__(self, *args, **kwargs):
        return self._orig_mod(*args, **kwargs)


NO_LOSSES = {
    "a class": (
        dllm_kernels.MDLMCrossEntropyLoss,
        TypeError,
        "be a loss or a function .*, got the class MDLMCrossEntropyLoss",
    ),
    "compiled": (Compiled(), TypeError, "be a loss itself, got .*Compiled of .*MDLMCrossEntropyLoss; compile the .*"),
    "partial": (functools.partial(dllm_kernels.MDLMCrossEntropyLoss()), TypeError, "be a loss itself, got .*"),
    "a word": ("mdlm", TypeError, "be a loss or a function that returns row weights, got str"),
    "other arguments": (
        dllm_kernels.IDLMLoss(),
        ValueError,
        r"take target_ids, .* got dllm_kernels\.losses\.idlm\.IDLMLoss, which takes others",
    ),
}


@pytest.mark.parametrize(("loss", "error", "message"), NO_LOSSES.values(), ids=NO_LOSSES)
def test_an_invalid_loss_is_rejected(loss, error, message):
    with pytest.raises(error, match=f"^loss must {message}$"):
        BareTrainer(loss=loss)
    with pytest.raises(error, match=f"^loss must {message}$"):
        mdlm_loss_func((torch.zeros(1, 4, 13),), torch.zeros(1, 4, dtype=torch.int64), loss=loss)


def test_invalid_weights_are_rejected():
    ones = torch.ones(2, 4)
    labels, x = pack_labels(ones.long(), ones, ones, ones), torch.zeros(2, 4, 13)
    for returned, error, message in (
        (1.0, TypeError, "must be a torch.Tensor, got float"),
        (torch.ones(2), ValueError, r"must have shape \(2, 4\) \(that of the labels\), got \(2,\)"),
        (torch.ones(2, 4, requires_grad=True), ValueError, "must not require a gradient"),
    ):
        with pytest.raises(error, match=f"^the weights that loss returns {message}"):
            mdlm_loss_func((x,), labels, loss=lambda *_, returned=returned: returned)


@needs_trainer
def test_training_by_random_tokens_equals_that_from_logits(ranks, tmp_path):
    """The loss is block diffusion. Its corruption takes the size of the vocabulary."""
    from transformers import Trainer

    def random_tokens(input_ids, loss_mask, mask_token_id, **seeds):
        return dllm_kernels.corrupt_uniform_random(input_ids, loss_mask, mask_token_id, **seeds)

    collator = MaskedDiffusionCollator(ranks.MASK, ranks.PAD_TO_16, corrupt=random_tokens, rank=0)
    loss = dllm_kernels.BlockDiffusionCrossEntropyLoss()
    plain = functools.partial(mdlm_loss_func, loss=loss)
    results = []
    for options in ({"loss": loss}, {"kind": Trainer, "compute_loss_func": plain}):
        torch.manual_seed(3)
        results.append(ranks.trained(ranks.model(), tmp_path, 4, 2, data_collator=collator, **options))
    assert_same_training(*results)


# The loss inside the head ---------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.lm_head = head


def test_the_head_is_restored_afterwards():
    model = Model(nn.Linear(4, 6))
    x = torch.randn(2, 4)
    before = model.lm_head(x)
    with loss_in_head(model, lambda hidden, weight, bias: hidden.sum() + weight.sum() + bias.sum()):
        torch.testing.assert_close(model.lm_head(x), x.sum() + model.lm_head.weight.sum() + model.lm_head.bias.sum())
    assert torch.equal(model.lm_head(x), before)

    def fails():
        with loss_in_head(model, lambda hidden, weight, bias: 1 / 0):
            model.lm_head(x)

    with pytest.raises(ZeroDivisionError):
        fails()
    assert "forward" not in vars(model.lm_head)


class Linear(nn.Module):
    """A layer of another library with the same class name as torch's."""

    def forward(self, hidden):
        return hidden


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (nn.Bilinear(2, 2, 3), "torch.nn.modules.linear.Bilinear"),
        (None, "NoneType"),
        (Linear(), "tests.integrations.test_transformers.Linear"),
    ],
    ids=str,
)
def test_a_head_that_is_not_linear_is_rejected(head, name):
    message = f"must be an nn.Linear for the loss to run inside it, got {name};"
    with pytest.raises(ValueError, match=re.escape(message)), loss_in_head(Model(head), lambda *_: None):
        pass


def replaced_rows(V):
    """Return a head whose weight and bias were replaced by V rows, so that ``out_features`` is stale."""
    head = nn.Linear(4, 6)
    head.weight, head.bias = nn.Parameter(torch.randn(V, 4)), nn.Parameter(torch.randn(V))
    return head


def stale_columns():
    """Return what PEFT's ``ensure_weight_tying`` makes of an LM head: ``in_features`` is V."""
    head = nn.Linear(6, 4, bias=False)
    head.weight = nn.Parameter(torch.randn(6, 4))
    return head


def partitioned():
    """Return a head as DeepSpeed ZeRO-3 keeps it: without values, except in its forward."""
    head, values = nn.Linear(4, 6, bias=False), torch.randn(6, 4)

    def gather(*_):
        head.weight.data = values

    def free(*_):
        head.weight.data = torch.empty(0)

    gather.__module__ = free.__module__ = "deepspeed.runtime.zero.parameter_offload"
    head.register_forward_pre_hook(gather)
    head.register_forward_hook(free)
    free()
    return head


HEADS = {
    "more rows": lambda: replaced_rows(9),
    "fewer rows": lambda: replaced_rows(5),
    "tied by PEFT": stale_columns,
    "partitioned by ZeRO-3": partitioned,
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_taken_as_torch_takes_its_weight(name):
    """The message was: the LM head must be an nn.Linear, got torch.nn.modules.linear.Linear."""
    torch.manual_seed(0)
    model, x = Model(HEADS[name]()), torch.randn(2, 4)
    expected, got = model.lm_head(x), []
    with loss_in_head(model, lambda *head: got.append(nn.functional.linear(*head)) or got[-1].sum()):
        assert model.lm_head(x) == expected.sum()
    assert torch.equal(got[0], expected)
    if name != "partitioned by ZeRO-3":  # its weight is gone when the loss reads the logits
        with dllm_kernels.fused_head(model, on_logits="raise") as fused:
            nll = nn.functional.cross_entropy(model.lm_head(x), torch.tensor([1, 4]))
        torch.testing.assert_close(nll, nn.functional.cross_entropy(expected, torch.tensor([1, 4])))
        assert fused.materialized == 0


def test_a_weight_that_is_no_matrix_of_floats_is_named():
    head = nn.Linear(4, 6)
    head.weight = nn.Parameter(torch.zeros(6, 2, dtype=torch.uint8), requires_grad=False)
    message = r"must be an nn\.Linear .*, got torch\.nn\.modules\.linear\.Linear with a weight \(6, 2\) of uint8; "
    with pytest.raises(ValueError, match=message), loss_in_head(Model(head), lambda *_: None):
        pass


# A Trainer ------------------------------------------------------------------------------------------------------------


def assert_same_training(one, other):
    (parameters, losses), (other_parameters, other_losses) = one, other
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(other_losses))  # a Trainer logs them in float32
    assert parameters.keys() == other_parameters.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(value, other_parameters[name], msg=lambda m, name=name: f"{name}: {m}")


@needs_trainer
def test_training_equals_that_from_logits(ranks, tmp_path):
    from transformers import Trainer

    ours = ranks.trained(ranks.model(), tmp_path, 4, 1, 4)
    plain = ranks.trained(
        ranks.model(), tmp_path, 4, 1, 4,
        kind=Trainer, compute_loss_func=mdlm_loss_func, callbacks=[ranks.AtEpochs(ranks.COLLATOR.set_epoch)],
    )  # fmt: skip
    ranks.COLLATOR.set_epoch(0)
    assert len(ours[1]) == 4
    assert_same_training(ours, plain)
    start = ranks.model().state_dict()
    assert not any(torch.equal(value, start[name]) for name, value in ours[0].items() if "decoder" in name)


@needs_trainer
@pytest.mark.parametrize(("batch_size", "accumulation"), every_time([(2, 4)], [(4, 2), (2, 4), (1, 8)]))
def test_accumulated_micro_batches_are_one_batch(ranks, tmp_path, batch_size, accumulation):
    """Their token counts differ, so a mean of means would be wrong."""
    whole = ranks.trained(ranks.model(), tmp_path, 8, 1)
    assert_same_training(ranks.trained(ranks.model(), tmp_path, batch_size, accumulation), whole)


def llama(ranks, kind="Llama", attention="eager", **options):
    """Return a decoder with random weights; it is causal unless an option changes that."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
    options = {"vocab_size": ranks.V, "num_key_value_heads": 2, **sizes, **ranks.SPECIALS, **options}
    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation=attention).double()


IS_CAUSAL = (
    r"^the model must attend to later tokens, got a causal model, .*; config\.is_causal is (not set|None|True), and "
    r"False makes a decoder attend to all tokens from transformers 5\.2 on .* allow_causal=True"
)


@needs_trainer
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_a_causal_model_is_rejected(ranks, tmp_path, kind, attention):
    """``is_causal=False`` makes it bidirectional, also after it was built. Another option of some models does not."""
    batch = ranks.COLLATOR(ranks.samples()[:4])
    for options in ({}, {"use_bidirectional_attention": True}):
        model = llama(ranks, kind, attention, **options)
        with pytest.raises(ValueError, match=IS_CAUSAL):
            ranks.trainer(model, tmp_path, 4, 1).compute_loss(model, dict(batch))
        assert ranks.trainer(model, tmp_path, 4, 1, allow_causal=True).compute_loss(model, dict(batch)) > 0
        model.config.is_causal = False
        assert ranks.trainer(model, tmp_path, 4, 1).compute_loss(model, dict(batch)) > 0
    model = llama(ranks, kind, attention, is_causal=False)
    assert ranks.trainer(model, tmp_path, 4, 1).compute_loss(model, dict(batch)) > 0
    model = llama(ranks, kind, attention)  # what the message advises for other versions
    zeros = batch["attention_mask"].new_zeros(4, 1, 16, 16, dtype=torch.float64)
    assert ranks.trainer(model, tmp_path, 4, 1).compute_loss(model, batch | {"attention_mask": zeros}) > 0


def test_the_message_of_a_causal_model_says_what_was_done(monkeypatch):
    """In transformers 5.1 and before, ``is_causal=False`` has no effect, and the message advised it again."""
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.0.0"))
    model = Mixing(torch.tril)
    model.config = SimpleNamespace(is_causal=False)
    with pytest.raises(
        ValueError, match=r"; config\.is_causal is False, and False .* transformers 5\.2 on \(here 5\.0\.0\)"
    ):
        BareTrainer().compute_loss(model, mixing_batch())


class Mixing(nn.Module):
    """Add tokens to the hidden states of others, through a mask ``[L, L]`` and a strength that may begin at 0."""

    def __init__(self, mask, strength=1.0):
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(13, 4), nn.Linear(4, 13)
        self.strength, self.mask = nn.Parameter(torch.tensor(strength)), mask
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(()))
        self.shapes = []

    def forward(self, input_ids, attention_mask=None):
        self.calls += 1
        self.replaced = self.replaced + 1
        self.shapes.append(input_ids.shape)
        x = self.embedding(input_ids)
        mask = self.mask(torch.ones(input_ids.shape[1], input_ids.shape[1]))
        if attention_mask is not None:
            mask = mask * attention_mask[:, None]
        return self.lm_head(self.dropout(x + self.strength * mask @ x))


def mixing_batch(L=9, lengths=(9, 4)):
    samples = [sample(n, i) for i, n in enumerate(lengths)]
    batch = MaskedDiffusionCollator(12, dllm_kernels.DLLMCollator(pad_seq_len_divisible=L), eps=0.5)(samples)
    return dict(batch)


def blocks_of(ones, size):
    """Attention of block diffusion: to all tokens of the same block and of the blocks before it."""
    block = torch.arange(len(ones)) // size
    return ones * (block[:, None] >= block)


MIXES = {
    "bidirectional": (lambda ones: ones, False),
    "bidirectional in a window": (lambda ones: ones.tril(1).triu(-1), False),
    "causal": (lambda ones: ones.tril(), True),
    "causal in a window": (lambda ones: ones.tril().triu(-1), True),
    "causal without the token itself": (lambda ones: ones.tril(-1), True),
    "anticausal": (lambda ones: ones.triu(), False),
    "causal between blocks": (lambda ones: blocks_of(ones, 5), False),
    "causal between small blocks": (lambda ones: blocks_of(ones, 2), False),
    "no attention": (lambda ones: ones * 0, False),
}


@pytest.mark.parametrize(("mask", "causal"), MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("lengths", [(9, 4), (1, 1)])
def test_causality_is_a_matter_of_positions(mask, causal, lengths):
    """Padding does not hide it."""
    model, trainer = Mixing(mask), BareTrainer()
    if causal:
        for _ in range(2):  # each step raises
            with pytest.raises(ValueError, match=IS_CAUSAL):
                trainer.compute_loss(model, mixing_batch(lengths=lengths))
    else:
        assert trainer.compute_loss(model, mixing_batch(lengths=lengths)).isfinite()
    assert BareTrainer(allow_causal=True).compute_loss(model, mixing_batch(lengths=lengths)).isfinite()


def test_a_causal_model_is_detected_once_it_mixes_positions():
    """An attention whose output is 0 at first shows nothing. A batch of one position does not, either."""
    for model, first in ((Mixing(torch.tril, 0.0), mixing_batch()), (Mixing(torch.tril), mixing_batch(1, (1,)))):
        trainer = BareTrainer()
        trainer.compute_loss(model, first)
        model.strength.data.fill_(1.0)
        with pytest.raises(ValueError, match=IS_CAUSAL):
            trainer.compute_loss(model, mixing_batch())


def test_a_model_is_tested_in_the_first_training_step_only():
    model, trainer = Mixing(lambda ones: ones), BareTrainer()
    with torch.no_grad():
        trainer.compute_loss(model, mixing_batch())
    assert len(model.shapes) == 1
    for _ in range(3):
        trainer.compute_loss(model, mixing_batch())
    assert len(model.shapes) == 1 + 4 + 3


@pytest.mark.parametrize("fails", [False, True])
def test_the_test_of_a_model_leaves_no_trace(fails):
    """Modes, buffers and random numbers are those of a first step without it."""
    model, batch = Mixing(torch.tril if fails else torch.ones_like), mixing_batch()
    model.dropout.eval()
    buffers = dict(model.named_buffers())
    torch.manual_seed(7)
    expected = BareTrainer(allow_causal=True).compute_loss(copy.deepcopy(model), dict(batch))
    torch.manual_seed(7)
    before = torch.get_rng_state()
    if fails:
        with pytest.raises(ValueError, match=IS_CAUSAL):
            BareTrainer().compute_loss(model, dict(batch))
        assert torch.equal(torch.get_rng_state(), before)
    else:
        assert torch.equal(BareTrainer().compute_loss(model, dict(batch)), expected)
    assert [m.training for m in model.modules()] == [m is not model.dropout for m in model.modules()]
    assert int(model.calls) == int(model.replaced) == (not fails)
    assert model.calls is buffers["calls"]
    assert all(p.grad is None for p in model.parameters())


@needs_trainer
def test_position_0_of_a_causal_model_counts(ranks, tmp_path):
    """A Trainer counts the labels of a causal model from position 1 on, because it expects shifted labels."""
    created = ranks.trainer(llama(ranks), tmp_path, 4, 2, allow_causal=True)
    counts, compute = [], created.compute_loss
    created.compute_loss = lambda *a, **k: counts.append(k["num_items_in_batch"]) or compute(*a, **k)
    created.train()
    supervised = sum(len(s["input_ids"]) for s in ranks.samples())
    assert [int(c) for c in counts] == [supervised] * 4
    shifted = ranks.trainer(llama(ranks), tmp_path, 4, 2, allow_causal=True, shift=True)
    assert int(shifted._get_num_items_in_batch([ranks.COLLATOR(ranks.samples())], "cpu")) == supervised - 8


@needs_trainer
def test_logits_are_computed_only_on_request(ranks, tmp_path):
    net = ranks.model()
    created = ranks.trainer(net, tmp_path, 4, 1, eval_dataset=ranks.samples())
    shapes = []
    net.register_forward_hook(lambda module, args, outputs: shapes.append(tuple(outputs.logits.shape)))
    loss = created.evaluate()["eval_loss"]
    assert shapes == [()] * 2
    predicted = created.predict(ranks.samples())
    assert shapes[2:] == [(4, 16, ranks.V)] * 2
    assert predicted.predictions.shape == (8, 16, ranks.V)
    assert predicted.metrics["test_loss"] == pytest.approx(loss)
    created.evaluate()
    assert shapes[4:] == [()] * 2  # omitted again


@needs_trainer
def test_a_model_that_changes_its_logits_is_rejected(ranks, tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
    model = Gemma2ForCausalLM(
        Gemma2Config(vocab_size=ranks.V, num_key_value_heads=2, **sizes, **ranks.SPECIALS)
    ).double()
    with pytest.raises(ValueError, match=r"return its output unchanged, .* got a call of div on it"):
        ranks.trained(model, tmp_path, 4, 1)


class Adapted(nn.Linear):
    """A head with an adapter that is not part of its weight."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.adapter = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, hidden):
        return super().forward(hidden) + nn.functional.linear(hidden, self.adapter)


@needs_trainer
def test_an_adapter_of_the_head_is_rejected_and_trains_from_logits(ranks, tmp_path):
    from transformers import Trainer

    model = ranks.model(tied=False)
    model.decoder = Adapted(8, ranks.V, dtype=torch.float64)
    with pytest.raises(
        ValueError,
        match=r"got tests\.integrations\.test_\w+\.Adapted with a forward of its own; "
        r"a plain Trainer with compute_loss_func",
    ):
        ranks.trained(model, tmp_path, 4, 1)
    trained, _ = ranks.trained(model, tmp_path, 4, 1, kind=Trainer, compute_loss_func=mdlm_loss_func)
    assert trained["decoder.adapter"].abs().sum() > 0


ONES = torch.ones(3)


def adapted(ranks, kind):
    """Return a model whose head has adapters of PEFT."""
    peft = pytest.importorskip("peft")
    model = ranks.model(tied=False)
    options = {"target_modules": ["decoder", "Wqkv"], "r": 3, "lora_alpha": 5, "lora_dropout": 0.0}
    if kind == "trained copy":
        options |= {"target_modules": ["Wqkv"], "modules_to_save": ["decoder"]}
    options |= {"a bias": {"lora_bias": True}, "dora": {"use_dora": True}}.get(kind, {})
    if kind == "tokens":
        options |= {"target_modules": ["Wqkv"], "trainable_token_indices": {"decoder": [ranks.MASK]}}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    if kind == "two adapters":
        model.add_adapter("other", peft.LoraConfig(**options | {"r": 2, "lora_alpha": 7}))
        model.base_model.set_adapter(["default", "other"])
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "delta" in name:  # B is zero at first, so A would have no gradient
            torch.nn.init.normal_(parameter, std=0.1)
    return model.double()


@pytest.mark.everyday(1)
@needs_trainer
@pytest.mark.parametrize(
    "kind",
    every_time(["two adapters", "trained copy"], ["an adapter", "two adapters", "a bias", "trained copy", "tokens"]),
)
def test_a_head_with_adapters_of_peft_trains_as_from_logits(ranks, tmp_path, kind):
    from transformers import Trainer

    torch.manual_seed(3)
    model = adapted(ranks, kind)
    plain = copy.deepcopy(model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    ours = ranks.trained(model, tmp_path, 4, 1, 4)
    theirs = ranks.trained(
        plain, tmp_path, 4, 1, 4, kind=Trainer, compute_loss_func=mdlm_loss_func,
        callbacks=[ranks.AtEpochs(ranks.COLLATOR.set_epoch)],
    )  # fmt: skip
    ranks.COLLATOR.set_epoch(0)
    assert_same_training(ours, theirs)
    changed = {name for name, value in ours[0].items() if name in start and not torch.equal(value, start[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}
    assert sum("decoder" in name for name in changed) >= 1


@needs_trainer
@pytest.mark.parametrize(
    ("kind", "state"),
    [
        *itertools.product(["an adapter", "two adapters"], ["active", "disabled", "merged"]),
        *itertools.product(["a bias", "trained copy"], ["active", "disabled"]),  # these cannot be merged
        *itertools.product(["tokens"], ["active", "disabled", "merged", "merged, then disabled"]),
    ],
)
def test_the_parts_of_a_head_give_the_logits_of_peft(ranks, kind, state):
    model, hidden = adapted(ranks, kind), torch.randn(3, 8).double()
    if "merged" in state:
        model.base_model.merge_adapter()
    if "disabled" in state:
        model.base_model.disable_adapter_layers()
    head, seen = model.get_output_embeddings(), []

    def logits(hidden, weight, bias, extra=None):
        seen.append(extra)
        low_rank = 0 if extra is None else extra[0] @ extra[1].t()
        return nn.functional.linear(hidden, weight, bias) + low_rank

    with loss_in_head(model, logits):
        got = head(hidden)
    torch.testing.assert_close(got, head(hidden))
    assert (seen[0] is not None) == (state == "active" and kind not in ("trained copy", "tokens"))


@needs_trainer
def test_float32_adapters_of_a_bfloat16_head(ranks):
    """PEFT creates such adapters by default. The head computes in bfloat16, and the adapters get float32 gradients."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    options = {"target_modules": ["decoder"], "r": 3, "lora_bias": True, "init_lora_weights": False}
    model = peft.get_peft_model(ranks.model(tied=False).bfloat16(), peft.LoraConfig(**options))
    head, hidden, targets = model.get_output_embeddings(), torch.randn(3, 8).bfloat16(), torch.arange(3)
    assert head.lora_A["default"].weight.dtype == torch.float32

    def loss(hidden, weight, bias, extra):
        return weighted_linear_nll(hidden, weight, targets, torch.ones(3), bias=bias, extra=extra).loss

    expected = nn.functional.cross_entropy(head(hidden).float(), targets, reduction="sum")
    with loss_in_head(model, loss):
        got = head(hidden)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=0)
    trained = [p for p in head.parameters() if p.requires_grad]
    for ours, theirs in zip(*(torch.autograd.grad(value, trained) for value in (got, expected)), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=5e-2, atol=5e-2 * theirs.abs().max().item())


@needs_trainer
@pytest.mark.parametrize("loss", [None, lambda target_ids, noise_mask, p_mask, loss_mask: noise_mask / p_mask])
def test_the_logits_of_16_bit_operands_can_be_float32(ranks, tmp_path, loss):
    """The loss is one of this package, or a function of row weights. The hidden states are computed by the model."""
    model, batch = ranks.model().bfloat16(), ranks.COLLATOR(ranks.samples()[:4])
    wide, rounded = (
        ranks.trainer(model, tmp_path, 4, 1, loss=loss, logits_dtype=dtype).compute_loss(model, dict(batch))
        for dtype in (torch.float32, None)
    )
    labels, head = batch.pop("labels"), model.get_output_embeddings()
    with loss_in_head(model, lambda hidden, *_: hidden):
        hidden = model(**batch).logits
    logits = nn.functional.linear(hidden.double(), head.weight.double(), head.bias.double())
    exact = mdlm_loss_func({"logits": logits}, labels)
    torch.testing.assert_close(wide.double(), exact, rtol=2e-6, atol=0)
    assert rounded != wide
    with pytest.raises(TypeError, match=r"^logits_dtype must be a torch\.dtype or None, got str$"):
        ranks.trainer(model, tmp_path, 4, 1, logits_dtype="float32")


@needs_trainer
def test_an_adapter_beyond_low_rank_is_rejected_by_name(ranks, tmp_path):
    with pytest.raises(ValueError, match=r"got peft\.tuners\.lora\.variants\.DoraLinearVariant; a plain Trainer with"):
        ranks.trained(adapted(ranks, "dora"), tmp_path, 4, 1)


@needs_trainer
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "embed_tokens"]], ids=["trained copy", "LoRA"])
def test_a_head_that_peft_ties_to_the_embedding_trains_as_from_logits(ranks, tmp_path, targets):
    """``ensure_weight_tying`` leaves a head whose ``in_features`` is the vocabulary."""
    peft = pytest.importorskip("peft")
    model = llama(ranks, tie_word_embeddings=True, is_causal=False)
    saved = None if "embed_tokens" in targets else ["embed_tokens"]
    options = {"target_modules": targets, "modules_to_save": saved, "ensure_weight_tying": True}
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **options)).double()
    batch, trained = ranks.COLLATOR(ranks.samples()[:4]), [p for p in model.parameters() if p.requires_grad]
    losses = (
        ranks.trainer(model, tmp_path, 4, 1).compute_loss(model, dict(batch), num_items_in_batch=7),
        mdlm_loss_func(model(batch["input_ids"], batch["attention_mask"]), batch["labels"], 7),
    )
    torch.testing.assert_close(*losses)
    for ours, theirs in zip(*(torch.autograd.grad(loss, trained) for loss in losses), strict=True):
        torch.testing.assert_close(ours, theirs)


@needs_trainer
@pytest.mark.parametrize("alone", [False, True])
def test_trained_rows_of_a_head(ranks, alone):
    """The merged weight is computed for each call. PEFT adds no bias while it replaces rows."""
    peft = pytest.importorskip("peft")
    model = adapted(ranks, "tokens")
    if alone:  # without LoRA, the head is PEFT's layer itself
        config = peft.TrainableTokensConfig(target_modules=["decoder"], token_indices=[ranks.MASK])
        model = peft.get_peft_model(ranks.model(tied=False), config).double()
    head, hidden, targets = model.get_output_embeddings(), torch.randn(3, 8).double(), torch.tensor([1, 5, ranks.MASK])
    (trained,) = (p for p in head.parameters() if p.requires_grad)
    for p in (trained, head.get_base_layer().bias if alone else head.token_adapter.base_layer.bias):
        torch.nn.init.normal_(p)

    def losses():
        fused = dllm_kernels.FusedLinearCrossEntropy()
        yield dllm_kernels.calculate_loss(fused, hidden_states=hidden[None], labels=targets[None], model=model)
        with loss_in_head(model, lambda *head: weighted_linear_nll(head[0], head[1], targets, ONES, bias=head[2]).loss):
            yield head(hidden)
        with dllm_kernels.fused_head(model, on_logits="raise"):
            yield nn.functional.cross_entropy(head(hidden), targets, reduction="sum")

    expected = nn.functional.cross_entropy(head(hidden), targets, reduction="sum")
    for got in losses():
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(*(torch.autograd.grad(x, trained, retain_graph=True) for x in (got, expected)))
    of_values = [expected]
    for change in (
        model.base_model.disable_adapter_layers,
        model.base_model.enable_adapter_layers,
        model.merge_adapter,
    ):
        change()
        of_values.append(nn.functional.cross_entropy(head(hidden), targets, reduction="sum"))
        for got in losses():
            torch.testing.assert_close(got, of_values[-1])
    assert of_values[2] == expected
    assert len({x.item() for x in of_values}) == 3  # with rows, with the bias, with both


@needs_trainer
def test_a_second_loss_function_is_rejected_also_when_assigned(ranks, tmp_path):
    with pytest.raises(ValueError, match="compute_loss_func must be None"):
        ranks.trainer(ranks.model(), tmp_path, 4, 1, compute_loss_func=mdlm_loss_func)
    created = ranks.trainer(ranks.model(), tmp_path, 4, 1)
    with pytest.raises(ValueError, match="compute_loss_func must be None"):
        created.compute_loss_func = mdlm_loss_func


@needs_trainer
@pytest.mark.parametrize("workers", every_time([0], [0, 2]))
def test_a_deleted_trainer_frees_its_model_at_once(ranks, tmp_path, workers):
    """Data workers end at once, too. In a reference cycle, the collector waits 5 seconds for each persistent one."""
    arguments = {"dataloader_num_workers": workers, "dataloader_persistent_workers": workers > 0}
    with without_garbage_collection():
        created = ranks.trainer(ranks.model(), tmp_path, 4, 1, 2, arguments=arguments, eval_dataset=ranks.samples())
        created.train()
        created.evaluate()
        model = weakref.ref(created.model)
        del created
        assert model() is None


@needs_trainer
def test_a_trainer_that_takes_packed_labels_for_tokens_fails(ranks, tmp_path):
    """No vocabulary has a packed label."""
    from transformers import Trainer

    with pytest.raises(IndexError, match=r"^Target \d{19} is out of bounds"):
        ranks.trainer(ranks.model(), tmp_path, 4, 1, steps=1, kind=Trainer).train()


class Bare:
    """The parts of a Trainer that the mixin needs, so that a test can set the output of its model."""

    def __init__(self, parallelism_config=None, **arguments):
        self.compute_loss_func = None
        self.args = SimpleNamespace(**{"n_gpu": 1, "label_smoothing_factor": 0.0} | arguments)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model, parallelism_config=parallelism_config)

    def _prepare_inputs(self, inputs):
        return dict(inputs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return self.compute_loss_func((model(**inputs),), labels, num_items_in_batch=num_items_in_batch)


class BareTrainer(MaskedDiffusionTrainerMixin, Bare):
    pass


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        *(({name: "no"}, TypeError, f"^{name} must be a bool, got str$")
          for name in ("shift", "allow_causal", "seed_evaluation")),
        ({"n_gpu": 2}, ValueError, "one process must see one GPU, got 2: start it with torchrun"),
        ({"label_smoothing_factor": 0.1}, ValueError,
         r"label_smoothing_factor must be 0, got 0\.1: the masked-diffusion loss has no label smoothing"),
        *(({"parallelism_config": SimpleNamespace(cp_size=cp, sp_size=sp)}, ValueError,
           f"parallelism_config must have cp_size and sp_size 1, got {cp} and {sp}") for cp, sp in ((2, 1), (1, 4))),
    ],
)  # fmt: skip
def test_invalid_arguments_of_the_trainer_are_rejected(arguments, error, message):
    with pytest.raises(error, match=message):
        BareTrainer(**arguments)


def test_the_mixin_comes_before_the_trainer():
    class Logs:
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    class Part(MaskedDiffusionTrainerMixin):
        pass

    class Named(Bare):
        def __init_subclass__(cls, name=""):
            cls.name = name

    assert type("Fine", (Logs, Part, Bare), {}).__mro__[-2] is Bare
    assert type("Fine", (MaskedDiffusionTrainerMixin, Named), {}, name="SFT").name == "SFT"
    for bases in ((Bare, MaskedDiffusionTrainerMixin), (Bare, Part), (Logs, Bare, Part)):
        names = ", ".join(base.__name__ for base in bases)
        message = rf"^MaskedDiffusionTrainerMixin must come before \w+ among the bases, got Wrong\({names}\), "
        with pytest.raises(TypeError, match=message):
            type("Wrong", bases, {})


class ChangingModel(nn.Module):
    """Return given hidden states. A function is applied to the logits, or to the loss in their place."""

    def __init__(self, after=lambda x: x):
        super().__init__()
        self.lm_head, self.after = nn.Linear(4, 13, bias=False), after

    def forward(self, hidden):
        return self.after(self.lm_head(hidden))


def step(trainer, model, noise=True, scale=1.0, seed=0, device="cpu", **options):
    ids, loss_mask, _, noised_at, p = noised(seed=seed)
    labels = pack_labels(ids % 13, loss_mask, noised_at & noise, p)
    hidden = torch.randn(*ids.shape, 4) * scale
    return trainer.compute_loss(model, {"hidden": hidden.to(device), "labels": labels.to(device)}, **options)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_nan_loss_is_not_reported_as_misuse(scale):
    trainer, model = BareTrainer(), ChangingModel()
    assert not step(trainer, model, scale=scale).isfinite()
    assert step(trainer, model).isfinite()


KEEPS = {
    "nothing": lambda x: x,
    "a cast": lambda x: x.float(),
    "a wider cast": lambda x: x.to(torch.float64),
    "a view": lambda x: x.view_as(x),
    "a contiguous one": lambda x: x.contiguous(),
    "a look at its attributes": lambda x: (x.shape, x.dtype, x.dim(), x.grad_fn, x)[-1],
}


class Detaches(torch.autograd.Function):
    """Detach the outputs of a module, as DeepSpeed does."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def assert_scales(loss):
    """Check gradients that are scaled in place, as by a Trainer on several ranks."""
    value = loss.item()
    loss *= 2
    assert loss.item() == 2 * value


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("after", [*KEEPS.values(), Detaches.apply], ids=[*KEEPS, "a Function"])
def test_a_model_may_cast_and_view_its_logits(after, training):
    trainer, model = BareTrainer(), ChangingModel(after).train(training)
    for seed in range(2):
        with torch.set_grad_enabled(training):
            trainer._wants_logits = True
            expected = step(trainer, model, seed=seed)
            trainer._wants_logits = False
            loss = step(trainer, model, seed=seed)
        assert type(loss) is torch.Tensor
        torch.testing.assert_close(loss, expected, check_dtype=False)
        if training:
            (gradient,) = torch.autograd.grad(loss, model.lm_head.weight, retain_graph=True)
            assert gradient.abs().sum() > 0
        assert_scales(loss)


NARROW = {
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "float16": lambda x: x.half(),
    "bfloat16 and back": lambda x: x.bfloat16().float(),
    "a copy by a Function": lambda x: Detaches.apply(x.half()),
}


@pytest.mark.parametrize("after", NARROW.values(), ids=NARROW)
def test_a_cast_of_the_logits_rounds_neither_loss_nor_gradient(after):
    plain, cast = ChangingModel(), ChangingModel(after)
    cast.load_state_dict(plain.state_dict())
    losses = [step(BareTrainer(), model) for model in (plain, cast)]
    assert losses[0].dtype == losses[1].dtype
    assert losses[0] == losses[1] != losses[0].bfloat16()
    for loss in losses:
        (loss * 2**16 / 3).backward()  # the scale of a gradient scaler, more than the largest float16
    assert torch.equal(plain.lm_head.weight.grad, cast.lm_head.weight.grad)


@pytest.mark.parametrize("after", [lambda x: x, torch.Tensor.bfloat16], ids=["unchanged", "cast"])
def test_a_hook_on_the_output_runs_before_the_backward_of_the_head(after):
    """FSDP gathers the weights in such a hook."""
    ran, model = [], ChangingModel(after)
    model.lm_head.weight.register_hook(lambda grad: ran.append("weight"))
    model.register_forward_hook(lambda _, args, x: x.register_hook(lambda grad: ran.append("output")) and None)
    step(BareTrainer(), model).backward()
    assert ran == ["output", "weight"]


class Recomputed(torch.autograd.Function):
    """Take the gradient of an output that was computed without one, as a reentrant checkpoint does."""

    @staticmethod
    def forward(ctx, x, anchor):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def test_the_output_has_the_gradient_if_the_head_ran_without():
    model, anchor = ChangingModel(), torch.ones((), requires_grad=True)
    head = torch.no_grad()(model.lm_head.__call__)
    model.forward = lambda hidden: Recomputed.apply(head(hidden), anchor)
    step(BareTrainer(), model).backward()
    assert anchor.grad == 1


def in_place(function):
    def after(x):
        function(x)
        return x

    return after


ONE = nn.Parameter(torch.ones(()))
CHANGES = {
    "a trained scale": ("mul", lambda x: x * ONE),
    "a trained scale before it": ("mul", lambda x: ONE * x),
    "a large cap": ("div", lambda x: 1e6 * torch.tanh(x / 1e6)),
    "a temperature": ("div", lambda x: x / 1.0),
    "a bias": ("add", lambda x: x + torch.zeros(())),
    "a scale in place": ("mul_", in_place(lambda x: x.mul_(1.0))),
    "a scale in place of a view": ("mul_", in_place(lambda x: x.view_as(x).mul_(1.0))),
    "a scale in place of its data": ("mul_", in_place(lambda x: x.data.mul_(1.0))),
    "a scale in place of a list": ("_foreach_mul_", in_place(lambda x: torch._foreach_mul_([x], 1.0))),
    "an output argument": ("mul", in_place(lambda x: torch.mul(x, 1.0, out=x.detach()))),
    "an assignment": ("__setitem__", in_place(lambda x: x.__setitem__((), 1.0))),
    "other data": ("__set__", in_place(lambda x: setattr(x, "data", torch.ones(())))),
    "fewer columns": ("__getitem__", lambda x: x[..., :5]),
    "another layout": ("transpose", lambda x: x.transpose(0, 1)),
    "another shape": ("view", lambda x: x.view(3, 17, 13)),
    "one more dimension": ("view", lambda x: x.view(1)),
    "whole numbers": ("long", lambda x: x.long()),
    "a bound": ("clamp", lambda x: x.clamp(max=1e9)),
}


@pytest.mark.everyday(12)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "after"), CHANGES.values(), ids=CHANGES)
def test_a_model_that_changes_its_logits_is_detected_for_any_values(name, after, training):
    """Detection is repeated in every step, also after a step that passed."""
    trainer, model = BareTrainer(), ChangingModel()
    message = f"^the model must call its LM head once and return its output unchanged, .*, got a call of {name} on it; "
    with torch.set_grad_enabled(training):
        assert step(trainer, model).isfinite()
        model.after = after
        for inputs in ({}, {"scale": float("nan")}, {"noise": False}):
            with pytest.raises(ValueError, match=message):
                step(trainer, model, **inputs)


@pytest.mark.parametrize("after", [lambda x: torch.ones(()), lambda x: torch.tensor(x.tolist())])
def test_another_tensor_in_place_of_logits_is_rejected(after):
    with pytest.raises(ValueError, match="got another tensor; a plain Trainer with compute_loss_func=mdlm_loss_func"):
        step(BareTrainer(), ChangingModel(after))


@pytest.mark.parametrize("calls", [0, 2])
def test_a_head_that_is_not_called_once_is_rejected(calls):
    model = ChangingModel()
    model.forward = lambda hidden: [hidden, *(model.lm_head(hidden) for _ in range(calls))][-1]
    with pytest.raises(ValueError, match=f"must call its LM head once .*, got {calls} calls of the head; "):
        step(BareTrainer(), model)


def test_the_loss_is_not_read_back():
    """Reading it would be a host sync. A tensor on the meta device cannot be read."""
    trainer, model = BareTrainer(), ChangingModel(KEEPS["a cast"]).to("meta")
    assert step(trainer, model, device="meta", num_items_in_batch=11).device.type == "meta"
    with pytest.raises(ValueError, match="got a call of mul on it"):
        step(trainer, ChangingModel(lambda x: x * 1.0).to("meta"), device="meta", num_items_in_batch=11)


@pytest.mark.exhaustive
def test_a_compiled_model_is_compiled_once_for_all_counts():
    graphs = []
    model = torch.compile(ChangingModel(), backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    trainer, losses, batches = BareTrainer(), [], []
    for seed in range(4):
        ids, loss_mask, _, noise, p = noised(seed=seed)
        batches.append({"hidden": torch.randn(3, 17, 4), "labels": pack_labels(ids % 13, loss_mask, noise, p)})
        losses.append(trainer.compute_loss(model, trainer._prepare_inputs(dict(batches[-1]))))
        assert trainer._counts is not None
    assert len({batch["labels"].ge(2**62).sum().item() for batch in batches}) > 1
    assert len(graphs) == 1
    plain = [trainer.compute_loss(model._orig_mod, dict(batch)) for batch in batches]
    torch.testing.assert_close(losses, plain)


@pytest.mark.exhaustive
@pytest.mark.parametrize("training", [True, False])
def test_a_compiled_model_is_checked_while_it_is_traced(training):
    model, changing = ChangingModel(KEEPS["a cast"]), ChangingModel(CHANGES["a trained scale"][1])
    with torch.set_grad_enabled(training):
        loss = step(BareTrainer(), torch.compile(model, backend="aot_eager", fullgraph=True))
        torch.testing.assert_close(loss, step(BareTrainer(), model))
        assert_scales(loss)
    if training:  # the change is found while the model is traced, before any gradient
        with pytest.raises(ValueError, match="got a call of mul on it"):
            step(BareTrainer(), torch.compile(changing, backend="eager"))


# Two ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@needs_trainer
@pytest.mark.ranks("trainer", "")
def test_two_ranks_train_as_one(ranks, two_ranks, tmp_path):
    """DDP over micro-batches, and FSDP2 with the head as a separate unit, equal one process with the whole batch."""
    assert_same_training(two_ranks["ddp"], ranks.trained(ranks.model(), tmp_path, 2, 4))
    whole = ranks.COLLATOR(ranks.samples())
    single = ranks.head_gradients(ranks.model(tied=False), tmp_path, whole, int((whole["labels"] != -100).sum()))
    assert two_ranks["fsdp"].keys() == single.keys()
    for name, gradient in single.items():
        torch.testing.assert_close(two_ranks["fsdp"][name], gradient, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.exhaustive
@needs_trainer
@pytest.mark.ranks("trainer", "")
def test_all_ranks_reject_a_causal_model(two_ranks):
    """FSDP2 shards the model again. One of the ranks has a batch of one position, which shows nothing."""
    for message, sharded in two_ranks["refused"]:
        assert re.match(IS_CAUSAL, message)
        assert sharded


@pytest.fixture(scope="module")
def two_ranks(several_processes):
    """Return the results of the two ranks, see ``trainer_ranks.main``."""
    return found(several_processes, "trainer")


def kinds(*names, rare=()):
    """Return kinds of noise, each of which takes two trainings.

    The rare ones are contained in those by workers, or, without a Trainer, in
    ``test_a_collator_sent_to_spawned_ranks_has_no_rank_yet`` and ``test_workers_of_different_ranks_draw_differently``.
    """
    marks = {name: [pytest.mark.ranks("trainer", name)] for name in (*names, *rare)}
    return [
        pytest.param(name, marks=[*m, *([pytest.mark.every_case] if name in rare else [])]) for name, m in marks.items()
    ]


@pytest.mark.exhaustive  # as all others that start a Trainer on two ranks
@needs_trainer
@pytest.mark.parametrize(
    "kind",
    kinds("drawn by workers", "seeded, by persistent workers", rare=["drawn", "seeded", "drawn by spawned workers"]),
)
def test_noise_differs_between_ranks_and_epochs_reproducibly(two_ranks, kind):
    """Samples have equal tokens. There are 2 ranks, 2 epochs of 4 batches, and a repetition of the training."""
    first, again = two_ranks["noise"][kind]
    assert [len(run) for run in first] == [16, 16]
    assert all_differ(*first)
    assert first == again


@pytest.mark.exhaustive
@needs_trainer
@pytest.mark.parametrize("kind", kinds("tensor parallel, by workers", rare=["tensor parallel"]))
def test_tensor_parallel_peers_see_the_same_noise(two_ranks, kind):
    """The two ranks form one data-parallel rank."""
    ((one, other),) = two_ranks["noise"][kind]
    assert all_differ(one)
    assert one == other


@needs_trainer
@pytest.mark.parametrize("seed_field", every_time(["seed"], ["seed", None]))
def test_training_resumed_within_an_epoch(ranks, tmp_path, seed_field):
    """With seeds, it equals uninterrupted training. Without seeds, the noise differs but training continues."""
    collator = MaskedDiffusionCollator(ranks.MASK, ranks.PAD_TO_16, eps=0.2, seed_field=seed_field)
    saving = {"save_strategy": "steps", "save_steps": 3}

    def created():
        return ranks.trainer(ranks.model(), tmp_path, 2, 2, 6, arguments=saving, data_collator=collator)

    whole, resumed = created(), created()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.epoch == 3.0
    weights, others = (t.model.state_dict() for t in (whole, resumed))
    same = [torch.equal(weights[name], others[name]) for name in weights]
    assert all(same) if seed_field else not all(same)


@needs_trainer
def test_evaluation_sees_the_same_noise_at_any_time(ranks, tmp_path):
    created = ranks.trainer(ranks.model(), tmp_path, 4, 1, 4, eval_dataset=ranks.samples())
    before, seen = rows(created.get_eval_dataloader()), []
    created.add_callback(ranks.AtEpochs(lambda _: seen.append(rows(created.get_eval_dataloader()))))
    created.train()
    assert seen == [before, before]
    assert rows(created.get_test_dataloader(ranks.samples())) == before
    assert created.data_collator is ranks.COLLATOR  # the noise of training again
    assert rows([ranks.COLLATOR(ranks.samples()[:4])]) == before[:4]  # the caller's collator is unchanged


@needs_trainer
@pytest.mark.parametrize("workers", every_time([0], [0, 2]))
@pytest.mark.parametrize("options", [{}, {"generator": torch.Generator()}])
def test_evaluation_without_seeds_sees_the_same_noise(ranks, tmp_path, options, workers):
    """It depends on the tokens of a sample, and changes neither the state nor the draws of the training."""
    collator = MaskedDiffusionCollator(ranks.MASK, ranks.PAD_TO_16, eps=0.2, **options)
    data = [{k: v for k, v in s.items() if k != "seed"} for s in ranks.samples()] + [ranks.samples()[0]]
    arguments = {"dataloader_num_workers": workers, "dataloader_persistent_workers": workers > 0}
    shared = {"data_collator": collator, "train_dataset": data, "eval_dataset": data, "arguments": arguments}
    created = ranks.trainer(ranks.model(), tmp_path, 4, 1, 2, **shared)
    torch.manual_seed(0)
    state = torch.get_rng_state(), collator.options.get("generator", torch.Generator()).get_state()
    first, seen = created.evaluate()["eval_loss"], rows(created.get_eval_dataloader())
    created.model.requires_grad_(False)
    assert created.evaluate()["eval_loss"] == created.predict(data).metrics["test_loss"] == first
    assert torch.equal(collator.options.get("generator", torch.Generator()).get_state(), state[1])
    torch.set_rng_state(state[0])
    created.evaluate()
    assert torch.equal(torch.get_rng_state(), state[0])
    assert rows(created.get_eval_dataloader()) == seen
    assert all_differ(seen[:8])
    alone = created.get_eval_dataloader(data[::-1])
    assert sorted(rows(alone)) == sorted(seen)
    anew = ranks.trainer(ranks.model(), tmp_path, 4, 1, 2, **shared, seed_evaluation=False)
    assert rows(anew.get_eval_dataloader()) != rows(anew.get_eval_dataloader())


def test_equal_rows_of_a_batch_have_different_noise_in_evaluation():
    trainer = BareTrainer()
    trainer.data_collator = MaskedDiffusionCollator(99, eps=0.3)
    with trainer._noise_of_epoch_0():
        batches = [
            trainer.data_collator(samples)
            for samples in ([sample(64)] * 3, [sample(64)], [sample(40), sample(64)], [sample(40)])
        ]
        later = [sample(64) | {"loss_mask": [0] + [1] * 60 + [0] * 3} for _ in range(2)]
        later[0]["input_ids"] = [*later[0]["input_ids"][:-1], 7]  # behind the last supervised token
        unlike, same = ([rows([trainer.data_collator([s])])[0] for s in samples] for samples in (later, later[1:] * 2))
    three, one, two, short = (rows([batch]) for batch in batches)
    assert all_differ(three)
    assert one[0] == three[0] == two[1]
    assert two[0][:40] == short[0]
    assert unlike[0] != unlike[1] == same[0] == same[1]


@needs_trainer
def test_a_collator_of_another_kind_is_not_modified(ranks, tmp_path):
    created = ranks.trainer(ranks.model(), tmp_path, 4, 1, 1, eval_dataset=ranks.samples())
    created.data_collator = other = lambda samples: ranks.COLLATOR(samples)
    created.train()
    assert created.evaluate()["eval_loss"] > 0
    assert created.data_collator is other


@pytest.mark.exhaustive
@needs_trainer
def test_the_example_learns(capsys, monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "torch")  # as where Triton does not interpret
    before, after = runpy.run_path(str(ROOT / "examples" / "huggingface_trainer.py"))["main"](100)
    assert after < 0.8 * before
    assert "after 100 steps" in capsys.readouterr().out


def test_without_labels_the_trainers_own_loss_is_used():
    class Host:
        def compute_loss(self, *passed, **options):
            return passed, options

    class Ours(MaskedDiffusionTrainerMixin, Host):
        def __init__(self):
            self._wants_logits = False

    passed = "model", {"input_ids": torch.zeros(1, 2)}
    got = Ours().compute_loss(*passed, return_outputs=True, num_items_in_batch=3)
    assert got == (passed, {"return_outputs": True, "num_items_in_batch": 3})
