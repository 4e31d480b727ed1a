"""Features of corruption and of collators against each other: each pair of values once.

A corrupted batch is compared with its rows alone, without padding, as contiguous int64 and bool, by the torch path.
"""

import contextlib
import copy
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

import reference
from dllm_kernels import DLLMCollator, corruption
from dllm_kernels.corruption import sample_level
from dllm_kernels.integrations.transformers import MaskedDiffusionCollator, unpack_labels
from tests.conftest import DEVICE
from tests.support.defaults import default_dtype
from tests.support.pairs import pairs
from tests.support.routines import FIRSTS

MASK, V, L, BLOCK = 60, 61, 9, 4
CASES = {name: replace(case, tokens={"mask_token_id": MASK, "vocab_size": V}) for name, case in FIRSTS.items()}
NOISE = {
    "routine": list(CASES),
    "ids": [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8],
    "mask": [
        torch.bool, torch.int64, torch.uint8, torch.float32, torch.float16, torch.bfloat16, torch.float64, None,
    ],
    "supervised": ["some", "all", "none"],
    "rows": [3, 1, 0],
    "layout": ["contiguous", "transposed", "strided", "expanded"],
    "source": ["seeds", "generator", "default generator"],
    "level": [None, "[B]", "[B, 1]", "[B, parts]", "double"],
    "parts": ["row", "blocks", "segments"],
    "exact": [False, True],
    "start": [False, True],
    "eps": [None, 0.0, 1.0],
    "backend": ["torch", "triton"],
    "around": ["nothing", "inference", "no_grad", "float64 by default", "bfloat16 by default", "compiled"],
}  # fmt: skip
HAS = {name: {*case.parameters} for name, case in CASES.items()}


def without(case):
    """Return True for values of which the routine has no argument."""
    routine, parts = case.get("routine"), case.get("parts", "row")
    if case.get("exact") and parts != "row":  # refused
        return True
    if routine is None:
        return all(without(case | {"routine": name}) for name in CASES)
    missing = {"level", "exact", "eps"} - HAS[routine]
    if any(case.get(name) is not None and case[name] is not False for name in missing):
        return True
    if "mask" in case and case["mask"] is None and not CASES[routine].takes_no_mask:
        return True
    return {"row": "input_ids", "blocks": "block_size", "segments": "segment_ids"}[parts] not in HAS[routine]


SEED = int(os.environ.get("PAIRS_SEED", 0))  # other tables, to search by hand
NOISE_CASES = pairs(NOISE, without, SEED)


def laid_out(t, layout):
    if t is None or layout == "contiguous" or t.dim() < 2:
        return t
    if layout == "strided":
        return torch.stack([t, t], -1)[..., 0]
    return t.t().contiguous().t()


def call(case, ids, mask, **keywords):
    """Call the routine of a case; returns noisy ids, noise and, if there is one, p_mask."""
    given = {name: value for name, value in keywords.items() if value is not None}
    return CASES[case["routine"]].launch(ids, mask, **given)


def options_of(case, ids):
    """Draw the tensor options of a case."""
    B, parts = ids.shape[0], {"row": 1, "blocks": -(-L // BLOCK), "segments": L}[case["parts"]]
    options = {"exact": case["exact"] or None, "eps": case["eps"]}
    if case["parts"] == "blocks":
        options["block_size"] = BLOCK
    if case["parts"] == "segments":
        dtype = (torch.int64, torch.int32, torch.int16, torch.int8)[torch.randint(4, ())]
        options["segment_ids"] = torch.randint(-1, 3, (B, L), dtype=dtype)
    options |= CASES[case["routine"]].inputs(ids)
    if case["level"]:
        shape = {"[B]": (B,), "[B, 1]": (B, 1), "double": (B,)}.get(case["level"], (B, parts))
        options["level"] = torch.rand(shape, dtype=torch.float64 if case["level"] == "double" else torch.float32)
    return {name: t for name, t in options.items() if t is not None}


def surrounding(name):
    return {
        "inference": torch.inference_mode,
        "no_grad": torch.no_grad,
        "float64 by default": lambda: default_dtype(torch.float64),
        "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    }.get(name, contextlib.nullcontext)()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, marks=pytest.mark.exhaustive if case["around"] == "compiled" else ())
        for i, case in enumerate(NOISE_CASES)
    ],
)
def test_corruption(number):
    case = NOISE_CASES[number]
    B = case["rows"]
    ids = torch.randint(0, V - 1, (B, L), dtype=case["ids"])
    if case["layout"] == "expanded" and B:
        ids = ids[:1].expand(B, L)
    mask = {"all": torch.ones(B, L), "none": torch.zeros(B, L)}.get(
        case["supervised"], (torch.rand(B, L) < 0.7).float()
    )
    options = options_of(case, ids)
    start = torch.arange(B) % 4 if case["start"] else None
    if start is not None:
        mask[torch.arange(L) < start.unsqueeze(1)] = 0
    typed = None if case["mask"] is None else mask.to(case["mask"])
    seeds = torch.randint(-(2**62), 2**62, (B,)) if case["source"] == "seeds" else None
    generators = [None, None]
    if case["source"] == "generator":
        generators = [torch.Generator(DEVICE).manual_seed(number) for _ in range(2)]

    def on_device(tensors):
        return {
            k: laid_out(t, case["layout"]).to(DEVICE) if isinstance(t, torch.Tensor) else t for k, t in tensors.items()
        }

    before = [laid_out(t, case["layout"]) if case["layout"] != "expanded" else t for t in (ids, typed)]
    given = [None if t is None else t.to(DEVICE) for t in before]
    kept = [None if t is None else t.clone() for t in given]
    source = on_device({"seeds": seeds, "start": start})
    run, arguments = call, {"backend": case["backend"], "generator": generators[0], **on_device(options), **source}
    if case["around"] == "compiled" and case["source"] == "seeds":
        torch.compiler.reset()
        run = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.manual_seed(number)
    with surrounding(case["around"]):
        found = run(case, *given, **arguments)
    assert all(t is None or torch.equal(t, k) for t, k in zip(given, kept, strict=True))
    noisy, noise, *p = (t.cpu() for t in found)
    assert noisy.dtype == case["ids"]
    assert noise.dtype == torch.bool
    assert all(t.dtype == torch.float32 and t.shape == (B, L) for t in p)
    supervised = torch.ones(B, L, dtype=torch.bool) if typed is None else mask != 0
    assert not (noise & ~supervised).any()
    if CASES[case["routine"]].masks:
        assert torch.equal(noisy, torch.where(noise, MASK, ids))
    assert torch.equal(noisy[~noise], ids[~noise])
    plain_mask = None if typed is None else mask.bool()
    if seeds is None:  # the rows of a batch share one source
        torch.manual_seed(number)
        arguments = {"input_ids": ids.long(), "loss_mask": plain_mask, "start": start, **options}
        arguments = {k: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for k, t in arguments.items()}
        want = call(case, arguments.pop("input_ids"), arguments.pop("loss_mask"), generator=generators[1], **arguments)
        assert_equal(found, want)
        return
    for b in range(B):
        a = 0 if start is None or case["parts"] == "blocks" else int(start[b])
        row = {name: t[b : b + 1] if isinstance(t, torch.Tensor) else t for name, t in options.items()}
        if "segment_ids" in row:
            row["segment_ids"] = row["segment_ids"][:, a:]
            if case["level"] == "[B, parts]":
                row["level"] = row["level"][:, : L - a]
        of_row = None if plain_mask is None else plain_mask[b : b + 1, a:]
        other = {"start": start[b : b + 1]} if start is not None and not a else {}
        want = call(case, ids[b : b + 1, a:].long(), of_row, seeds=seeds[b : b + 1], **row, **other)
        assert_equal([t[b : b + 1, a:] for t in found], want)


def assert_equal(found, want):
    for t, expected in zip(found, want, strict=True):
        assert torch.equal(t.cpu().to(expected.dtype), expected.cpu())


COLLATED = {
    "block_size": [None, 1, 4],
    "divisible": [None, 1, 6],
    "max_seq_len": [None, 1, 5, 20],
    "eos": [None, 2],
    "supervise_padding": [False, True],
    "response_window": [False, True],
    "container": ["list", "tuple", "int32", "numpy", "bool mask", "bfloat16 mask", "fractions"],
    "lengths": [(3, 7, 5), (1,), (0, 4), ()],
    "supervised": ["end", "none", "all", "start"],
    "packed": ["no", "both", "segments", "positions"],
    "copied": ["no", "deepcopy", "pickle"],
    "others": [False, True],
    "default dtype": [False, True],
}
COLLATED_CASES = pairs(COLLATED, seed=SEED)


def drawn_samples(case):
    """Draw the samples of a case as lists."""
    samples = []
    for n in case["lengths"]:
        first = {"end": n // 2, "none": n}.get(case["supervised"], 0)
        last = max(n // 2, 1) if case["supervised"] == "start" else n
        sample = {"input_ids": torch.randint(3, 300, (n,)).tolist(), "attention_mask": [1] * n}
        sample["loss_mask"] = [int(first <= i < last) for i in range(n)]
        if case["packed"] in ("both", "positions"):
            sample["position_ids"] = [i % 3 for i in range(n)]
        if case["packed"] in ("both", "segments"):
            sample["segment_ids"] = [i // 3 for i in range(n)]
        if case["others"]:
            sample |= {"___PAD_TOKEN_IDS___": {"input_ids": 9}, "text": "unused"}
        if case["container"] == "fractions":
            sample["loss_mask"] = [m * 0.5 for m in sample["loss_mask"]]
        samples.append(sample)
    return samples


def contained(field, values, container):
    """Convert a list to the container of a case."""
    if not isinstance(values, list) or container in ("list", "fractions"):
        return values
    if container in ("bool mask", "bfloat16 mask") and "mask" in field:
        return torch.tensor(values, dtype=torch.bool if container == "bool mask" else torch.bfloat16)
    makers = {
        "tuple": tuple,
        "int32": lambda v: torch.tensor(v, dtype=torch.int32),
        "numpy": lambda v: np.array(v, "i4"),
    }
    return makers.get(container, list)(values)


@pytest.mark.parametrize("number", range(len(COLLATED_CASES)))
def test_collator(number):
    case = COLLATED_CASES[number]
    settings = {
        "block_size": case["block_size"],
        "pad_seq_len_divisible": case["divisible"],
        "eos_token_id": case["eos"],
    }
    settings |= {name: case[name] for name in ("max_seq_len", "supervise_padding", "response_window")}
    collator = DLLMCollator(1, **settings)
    collator = {"deepcopy": copy.deepcopy, "pickle": lambda c: pickle.loads(pickle.dumps(c))}.get(
        case["copied"], lambda c: c
    )(collator)
    samples = drawn_samples(case)
    given = [{k: contained(k, v, case["container"]) for k, v in sample.items()} for sample in samples]
    with default_dtype(torch.float64 if case["default dtype"] else torch.float32):
        found = collator(given)
    expected = reference.collate(samples, 1, **settings)
    if not samples:
        expected = {name: t for name, t in expected.items() if name in found}
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        assert found[name].dtype == t.dtype, name
        assert torch.equal(found[name], t), name


TRAINED = {
    "routine": ["corrupt_uniform", "corrupt_blockwise", "corrupt_all_masked"],
    "padding": ["right", "left"],
    "packed": [False, True],
    "seeds": ["field", "drawn", "generator", "fixed"],
    "level": [None, "uniform", "stratified"],
    "block_size": [None, 4],
    "shift": [False, True],
    "attend": [False, True],
    "supervised": ["end", "none", "all", "holes"],
    "copied": ["no", "deepcopy", "pickle"],
    "workers": [0, 1],
    "lengths": [(3, 7, 5), (1,), (6, 6)],
}


def untrained(case):
    """Return True for values that the collator refuses or that need more than one case."""
    if case.get("routine") == "corrupt_all_masked" and (case.get("level") or case.get("block_size")):
        return True
    return case.get("workers") == 1 and case.get("seeds") == "generator"  # each would hold a copy


TRAINED_CASES = pairs(TRAINED, untrained, SEED)


def left_padded(samples):
    """Collate with padding on the left."""
    n = max(len(sample["input_ids"]) for sample in samples)
    pads = {"input_ids": 0, "loss_mask": 0, "attention_mask": 0, "position_ids": 0, "segment_ids": -1}
    return {
        name: torch.tensor([[pad] * (n - len(s[name])) + s[name] for s in samples])
        for name, pad in pads.items()
        if name in samples[0]
    }


@pytest.mark.parametrize("number", range(len(TRAINED_CASES)))
def test_collator_of_a_trainer(number):
    """Labels hold what the routine masked, under the seed of each sample; packed documents have levels of their own."""
    case = TRAINED_CASES[number]
    samples = drawn_samples(case | {"packed": "both" if case["packed"] else "no", "others": False, "container": "list"})
    for i, sample in enumerate(samples):
        sample["seed"] = 1000 * number + i
        if case["supervised"] == "holes":
            sample["loss_mask"] = [j % 2 for j in range(len(sample["input_ids"]))]
    plain = left_padded if case["padding"] == "left" else DLLMCollator(eos_token_id=1)
    routine, options = getattr(corruption, case["routine"]), {}
    if case["block_size"]:
        options["block_size"] = 4
    if case["seeds"] == "generator":
        options["generator"] = torch.Generator().manual_seed(number)
    if case["seeds"] == "fixed":
        options["seeds"] = torch.arange(len(samples))
    level = None
    if case["level"]:
        level = lambda n, **source: sample_level(n, method=case["level"], **source)  # noqa: E731
    field = "seed" if case["seeds"] == "field" else None
    settings = {"seed_field": field, "level": level, "attend_supervised": case["attend"], "shift": case["shift"]}
    if case["copied"] == "pickle":  # pickle takes no lambda
        settings["level"] = None
    collator = MaskedDiffusionCollator(MASK, plain, routine, **settings, **options)
    copied = {"deepcopy": copy.deepcopy, "pickle": lambda c: pickle.loads(pickle.dumps(c))}
    if case["seeds"] != "generator":
        collator = copied.get(case["copied"], lambda c: c)(collator)
    clean = plain(samples)
    if case["workers"]:
        loader = torch.utils.data.DataLoader(
            samples, len(samples), collate_fn=collator, num_workers=1 if number % 8 == 0 else 0
        )
        (batch,) = loader
    else:
        batch = collator(samples)
    supervised = clean["loss_mask"] != 0
    ids, labels = batch["input_ids"], batch["labels"]
    noise = ids != clean["input_ids"]
    assert torch.equal(ids, torch.where(noise, MASK, clean["input_ids"]))
    assert not (noise & ~supervised).any()
    targets, masked, _, counted = unpack_labels(labels)
    predicted = supervised
    if case["shift"] and case["packed"]:
        segments = clean["segment_ids"]
        first = torch.ones_like(supervised)
        first[:, 1:] = segments[:, 1:] != segments[:, :-1]
        predicted = supervised & ~first & (segments >= 0)
    assert torch.equal(counted, predicted)
    assert torch.equal(masked, noise & predicted)
    assert torch.equal(targets[predicted], clean["input_ids"][predicted])
    if case["packed"]:
        assert torch.equal(batch["segment_ids"], clean["segment_ids"])
        assert torch.equal(batch["position_ids"], clean["position_ids"])
    if field and settings["level"] is None:
        seeds = torch.tensor([s["seed"] for s in samples])
        more = {"segment_ids": clean["segment_ids"]} if case["packed"] and routine is corruption.corrupt_uniform else {}
        more = {} if case["block_size"] else more
        want = routine(clean["input_ids"], supervised, MASK, seeds=seeds, **options, **more)
        assert torch.equal(ids, want[0])
