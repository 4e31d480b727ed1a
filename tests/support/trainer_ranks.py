"""Two ranks training: a Trainer under DDP, and the loss inside a head that FSDP2 shards.

Run by ``tests/support/distributed_workers.py``.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from dllm_kernels import DLLMCollator
from dllm_kernels.integrations.transformers import MaskedDiffusionCollator, MaskedDiffusionTrainerMixin

V, PAD, MASK = 23, 21, 22
SPECIALS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), PAD)
# The noise depends on the length of a batch, so the length is the same for any batching.
PAD_TO_16 = DLLMCollator(pad_token_id=PAD, pad_seq_len_divisible=16)
COLLATOR = MaskedDiffusionCollator(MASK, PAD_TO_16, eps=0.2, seed_field="seed")


class DiffusionTrainer(MaskedDiffusionTrainerMixin, Trainer):
    pass


class TensorParallelTrainer(DiffusionTrainer):
    """Declares that the two ranks load the same samples. The model is not split, which does not affect the noise."""

    def get_tp_size(self):
        return 2


class AtEpochs(TrainerCallback):
    """Call a function with the epoch that begins, as a plain Trainer needs for a collator with a ``seed_field``."""

    def __init__(self, function):
        self.function = function

    def on_epoch_begin(self, args, state, control, **_):
        self.function(int(state.epoch))


def samples(n=8):
    random = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 15, (n,), generator=random).tolist()
    return [
        {
            "input_ids": torch.randint(0, PAD, (length,), generator=random).tolist(),
            "loss_mask": [1] * length,
            "attention_mask": [1] * length,
            "seed": i,
        }
        for i, length in enumerate(lengths)
    ]


def model(tied=True):
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ModernBertConfig(vocab_size=V, tie_word_embeddings=tied, **sizes, **SPECIALS)
    return ModernBertForMaskedLM(config).double()


def trainer(model, folder, batch_size, accumulation, steps=2, kind=DiffusionTrainer, arguments=(), **more):
    defaults = {
        "output_dir": str(folder), "per_device_train_batch_size": batch_size, "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": accumulation, "max_steps": steps, "remove_unused_columns": False,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant", "logging_steps": 1, "average_tokens_across_devices": True,
    }  # fmt: skip
    args = TrainingArguments(**defaults | dict(arguments))
    options = {"data_collator": COLLATOR, "train_dataset": samples(), **more}
    return kind(model=model, args=args, optimizers=(torch.optim.SGD(model.parameters(), 0.05), None), **options)


def trained(*args, **options):
    """Return the parameters after the steps, and the loss logged at each."""
    created = trainer(*args, **options)
    created.train()
    losses = [float(entry["loss"]) for entry in created.state.log_history if "loss" in entry]
    return {k: v.detach().clone() for k, v in created.model.state_dict().items()}, losses


def head_gradients(net, folder, batch, count):
    """Return gradients of the mixin's loss of one micro-batch, over the tokens of ``count``."""
    trainer(net, folder, 4, 1).compute_loss(net, batch, num_items_in_batch=count).backward()
    return {k: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for k, p in net.named_parameters()}


NOISE = {
    "drawn": {},
    "drawn by workers": {"dataloader_num_workers": 2},
    "drawn by spawned workers": {
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "dataloader_multiprocessing_context": "spawn",
    },
    "seeded": {"seed_field": "seed"},
    "seeded, by persistent workers": {
        "seed_field": "seed",
        "dataloader_num_workers": 2,
        "dataloader_persistent_workers": True,
    },
    "tensor parallel": {"kind": TensorParallelTrainer},
    "tensor parallel, by workers": {"kind": TensorParallelTrainer, "dataloader_num_workers": 2},
}


def noise_of_two_epochs(folder, *, kind=DiffusionTrainer, seed_field=None, **arguments):
    """Return the label rows of 16 samples with one text, as each rank trains on them."""
    alike = [{"input_ids": [5] * 32, "loss_mask": [1] * 32, "attention_mask": [1] * 32, "seed": i} for i in range(16)]
    collator = MaskedDiffusionCollator(MASK, PAD_TO_16, eps=0.5, seed_field=seed_field)
    options = {"kind": kind, "arguments": arguments, "data_collator": collator, "train_dataset": alike}
    created, rows = trainer(model(), folder, 2, 1, 8, **options), []
    compute = created.compute_loss
    created.compute_loss = lambda net, inputs, **more: (
        rows.extend(inputs["labels"].tolist()),
        compute(net, inputs, **more),
    )[1]
    rank = os.environ.pop("RANK")  # the process group alone knows the rank
    try:
        created.train()
    finally:
        os.environ["RANK"] = rank
    del created.compute_loss  # refers to the trainer, whose data workers would run until a garbage collection
    return everywhere([tuple(row) for row in rows])


def everywhere(value):
    """Return the values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def refused(folder, mesh):
    """Return the error of each rank for a causal model, of which a rank sees one position, and if it is sharded."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    net = LlamaForCausalLM(LlamaConfig(vocab_size=V, num_key_value_heads=2, **sizes, **SPECIALS)).double()
    fully_shard(net.model.layers[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    collator = MaskedDiffusionCollator(MASK, DLLMCollator(PAD, max_seq_len=1 if dist.get_rank() else None), eps=0.2)
    try:
        trainer(net, folder, 4, 1).compute_loss(net, dict(collator(samples())))
        message = ""
    except ValueError as error:
        message = str(error)
    return everywhere((message, all(isinstance(p, DTensor) for p in net.parameters())))


def main(out, kinds):
    """Write the results of the ranks to a file: with DDP, with FSDP2, and for the requested kinds of ``NOISE``."""
    ddp = trained(model(), out + ".run", 2, 2)
    noise = {
        kind: [noise_of_two_epochs(out + ".run", **NOISE[kind]) for _ in range(1 if "parallel" in kind else 2)]
        for kind in kinds
    }  # training as peers is not repeated
    net, ranks = model(tied=False), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(net.get_output_embeddings(), mesh=mesh)
    fully_shard(net, mesh=mesh)
    whole = COLLATOR(samples())
    count = int((whole["labels"] != -100).sum())
    mine = {k: v.chunk(ranks)[dist.get_rank()] for k, v in whole.items()}
    errors = refused(out + ".run", mesh)
    fsdp = head_gradients(net, out + ".run", mine, count)  # FSDP averages over the ranks, which the Trainer undoes
    if dist.get_rank() == 0:
        torch.save({"ddp": ddp, "fsdp": fsdp, "noise": noise, "refused": errors}, out)
    dist.destroy_process_group()
