"""The Trainer mixin with losses, data, noise, heads and arguments of a Trainer: each pair of features once."""

import functools
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dllm_kernels
from dllm_kernels.integrations.transformers import MaskedDiffusionCollator, unpack_labels
from tests.support.pairs import pairs

absent = [name for name in ("transformers", "accelerate", "peft") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.peer,
    pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} not installed"),
]


def weights_of(target_ids, noise_mask, p_mask, loss_mask):
    return noise_mask * (1 + p_mask)


LOSSES = {
    "mdlm": lambda shift: dllm_kernels.MDLMCrossEntropyLoss(shift=shift),
    "block diffusion": lambda shift: dllm_kernels.BlockDiffusionCrossEntropyLoss(shift=shift),
    "weights": lambda shift: weights_of,
    "none": lambda shift: None,
}
NOISE = {
    "uniform": {},
    "blocks": {"block_size": 4},
    "levels": {"level": functools.partial(dllm_kernels.sample_level, method="stratified", low=0.2)},
    "blockwise": {"corrupt": dllm_kernels.corrupt_blockwise, "block_size": 8},
    "all masked": {"corrupt": lambda ids, mask, token, seeds: dllm_kernels.corrupt_all_masked(ids, mask, token)},
}
PEFT = {
    "LoRA": {"target_modules": ["decoder", "Wqkv"], "r": 2},
    "trained copy": {"target_modules": ["Wqkv"], "modules_to_save": ["decoder"]},
    "trained rows": {"target_modules": ["Wqkv"], "trainable_token_indices": {"decoder": [3, 22]}},
}
TABLE = {
    "loss": list(LOSSES),
    "shift": ["no", "of the mixin", "of the loss"],
    "noise": list(NOISE),
    "data": ["plain", "packed", "some unsupervised", "one token"],
    "head": ["tied", "frozen", *PEFT],
    "batch": [(4, 1), (1, 4), (3, 2)],
    "seeds": ["field", "drawn"],
    "dtype": [torch.float64, torch.float32],
    "dropout": [0.0, 0.2],
    "logits_dtype": [None, torch.float32],
    "evaluation": ["loss", "predictions"],
    "arguments": [
        {}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"max_grad_norm": 0.3, "average_tokens_across_devices": False}, {"dataloader_drop_last": True},
    ],
    "collate": ["padded to 16", "blocks of 8", "attended padding"],
}  # fmt: skip


def excluded(case):
    """Return True for values that no call takes together."""
    if case.get("loss") in ("weights", "none") and case.get("shift") == "of the loss":
        return True
    # operands may not be wider than their logits
    return case.get("logits_dtype") is not None and case.get("dtype") == torch.float64


CASES = pairs(TABLE, excluded)


@pytest.fixture
def ranks():
    from tests.support import trainer_ranks

    return trainer_ranks


def by_hand(outputs, labels, num_items_in_batch=None, *, loss, shift):
    """Compute the loss from all logits by its equation."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    targets, noise, p, supervised = unpack_labels(labels)
    if shift:  # row i predicts token i + 1
        logits, supervised = torch.cat([logits[:, :1], logits[:, :-1]], 1), supervised.clone()
        supervised[:, 0] = False
    weights = {"block diffusion": torch.ones_like(p), "weights": noise * (1 + p)}.get(loss, noise / p.clamp(min=1e-8))
    nll = F.cross_entropy(logits.transpose(1, 2), targets.clamp(min=0), reduction="none")
    count = supervised.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return torch.where(supervised, weights * nll, 0.0).sum() / count


def samples_of(kind, ranks):
    samples = ranks.samples()
    for i, sample in enumerate(samples):
        n = len(sample["input_ids"])
        if kind == "packed":
            lengths = [2, n - 2] if n > 4 else [n]
            sample["segment_ids"] = [j for j, k in enumerate(lengths) for _ in range(k)]
            sample["position_ids"] = [i for k in lengths for i in range(k)]
        elif kind == "some unsupervised":
            sample["loss_mask"] = [int(j >= n // 2 and i != 3) for j in range(n)]
        elif kind == "one token" and i % 2:
            sample.update({name: sample[name][:1] for name in ("input_ids", "loss_mask", "attention_mask")})
    return samples


def model_of(chosen, ranks):
    net = ranks.model(tied=chosen["head"] == "tied")
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = chosen["dropout"]
    nn.init.normal_(net.get_output_embeddings().bias)
    if chosen["head"] == "frozen":
        net.get_output_embeddings().requires_grad_(False)
    if chosen["head"] in PEFT:
        import peft

        net = peft.get_peft_model(net, peft.LoraConfig(init_lora_weights=False, **PEFT[chosen["head"]]))
    return net.to(chosen["dtype"])


@pytest.mark.parametrize("number", range(len(CASES)))
def test_pairs_of_features(number, ranks, tmp_path):
    from transformers import Trainer

    chosen = CASES[number]
    collate = {
        "padded to 16": ranks.PAD_TO_16, "blocks of 8": dllm_kernels.DLLMCollator(ranks.PAD, ranks.PAD - 1, 8),
        "attended padding": dllm_kernels.DLLMCollator(ranks.PAD, pad_seq_len_divisible=8, supervise_padding=True),
    }[chosen["collate"]]  # fmt: skip
    shift, samples = chosen["shift"] != "no", samples_of(chosen["data"], ranks)
    field = "seed" if chosen["seeds"] == "field" else None
    found = []
    for ours in (True, False):
        torch.manual_seed(number)
        net = model_of(chosen, ranks)
        collator = MaskedDiffusionCollator(
            ranks.MASK, collate, seed_field=field, shift=shift and not ours, **NOISE[chosen["noise"]]
        )
        options = {"data_collator": collator, "train_dataset": samples, "arguments": chosen["arguments"]}
        if ours:
            loss = LOSSES[chosen["loss"]](chosen["shift"] == "of the loss")
            options |= {
                "loss": loss,
                "shift": chosen["shift"] == "of the mixin",
                "logits_dtype": chosen["logits_dtype"],
            }
        else:
            function = functools.partial(by_hand, loss=chosen["loss"], shift=shift)
            options |= {"kind": Trainer, "compute_loss_func": function}
            if field:
                options["callbacks"] = [ranks.AtEpochs(collator.set_epoch)]
        trainer = ranks.trainer(net, tmp_path, *chosen["batch"], 2, eval_dataset=samples[:4], **options)
        if not ours:
            trainer._loss_shifts_labels = shift  # it counts label 0 otherwise
        trainer.train()
        losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        collator.set_epoch(0)
        evaluated = []
        if field:
            evaluated.append(trainer.evaluate()["eval_loss"])
            if chosen["evaluation"] == "predictions":
                predicted = trainer.predict(samples[:4])
                evaluated += [
                    predicted.metrics["test_loss"],
                    *map(torch.as_tensor, (predicted.predictions, predicted.label_ids)),
                ]
        found.append((losses, {k: v.detach().clone() for k, v in net.state_dict().items()}, evaluated))
    exact = {"rtol": 1e-3, "atol": 1e-5} if chosen["dtype"] == torch.float32 else {}
    for name in found[0][1]:
        torch.testing.assert_close(
            found[0][1][name], found[1][1][name], **exact, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    for got, same in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(got, same, **exact)
