"""Two ranks training: a Trainer under DDP, and the loss inside a head that FSDP2 shards.

Run by ``python -m torch.distributed.run --nproc-per-node 2 -m tests.trainer_ranks OUT``.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import ModernBertConfig, ModernBertForMaskedLM, Trainer, TrainingArguments

from dllm_kernels import DLLMCollator, MDLMCrossEntropyLoss
from dllm_kernels.integrations.transformers import (
    MaskedDiffusionCollator,
    MaskedDiffusionTrainerMixin,
    loss_in_head,
    unpack_labels,
)

V, PAD, MASK = 23, 21, 22
SPECIALS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), PAD)
# The length of a batch is one of the things that its noise depends on, so it is the same however samples are batched.
COLLATOR = MaskedDiffusionCollator(
    MASK, DLLMCollator(pad_token_id=PAD, pad_seq_len_divisible=16), eps=0.2, seed_field="seed"
)


class DiffusionTrainer(MaskedDiffusionTrainerMixin, Trainer):
    pass


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
    options = dict(
        output_dir=str(folder), per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation,
        per_device_eval_batch_size=4, max_steps=steps, remove_unused_columns=False, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, max_grad_norm=0.0, lr_scheduler_type="constant", logging_steps=1,
    )  # fmt: skip
    args = TrainingArguments(**options | dict(arguments))
    options = {"data_collator": COLLATOR, "train_dataset": samples(), **more}
    return kind(model=model, args=args, optimizers=(torch.optim.SGD(model.parameters(), 0.05), None), **options)


def trained(*args, **options):
    """Parameters after the steps, and the loss that was logged at each."""
    made = trainer(*args, **options)
    made.train()
    losses = [float(entry["loss"]) for entry in made.state.log_history if "loss" in entry]
    return {k: v.detach().clone() for k, v in made.model.state_dict().items()}, losses


def head_gradients(net, batch, count):
    """Gradients of the loss that runs inside the head, over the tokens of ``count``."""
    labels = batch.pop("labels")
    masks = unpack_labels(labels)

    def loss(hidden, weight, bias):
        out = MDLMCrossEntropyLoss().forward_fused(
            hidden, weight, *masks, num_diffusion_tokens=count, lm_head_bias=bias
        )
        return out.total_loss

    with loss_in_head(net, loss):
        net(**batch).logits.backward()
    return {k: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for k, p in net.named_parameters()}


def main(out):
    ddp = trained(model(), out + ".run", 2, 2)
    net, ranks = model(tied=False), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(net.get_output_embeddings(), mesh=mesh)
    fully_shard(net, mesh=mesh)
    whole = COLLATOR(samples())
    count = int((whole["labels"] != -100).sum())
    mine = {k: v.chunk(ranks)[dist.get_rank()] for k, v in whole.items()}
    fsdp = head_gradients(net, mine, count / ranks)  # FSDP averages over the ranks
    if dist.get_rank() == 0:
        torch.save({"ddp": ddp, "fsdp": fsdp}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
