"""Train a small masked diffusion LM with a Hugging Face Trainer, on counting sequences. No download.

pip install transformers accelerate
python examples/huggingface_trainer.py
"""

import random
import sys
import tempfile

import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM, Trainer, TrainingArguments

from dllm_kernels import DLLMCollator
from dllm_kernels.integrations.transformers import MaskedDiffusionCollator, MaskedDiffusionTrainerMixin

VOCABULARY, PAD, MASK = 34, 32, 33


class DiffusionTrainer(MaskedDiffusionTrainerMixin, Trainer):
    """Trainer with the masked-diffusion loss, computed without materialising the full logits."""


def count_up(index):
    """Build a sample: a prompt of two tokens and a response that keeps counting; index and epoch seed its noise."""
    source = random.Random(index)
    length, start = source.randint(12, 20), source.randrange(32)
    ids = [(start + i) % 32 for i in range(length)]
    return {"input_ids": ids, "loss_mask": [0] * 2 + [1] * (length - 2), "attention_mask": [1] * length, "seed": index}


def main(steps=150):
    """Train and return the evaluation loss before and after training."""
    torch.manual_seed(0)
    specials = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), PAD)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ModernBertForMaskedLM(ModernBertConfig(vocab_size=VOCABULARY, **sizes, **specials))
    pad = DLLMCollator(pad_token_id=PAD, pad_seq_len_divisible=4)
    trainer = DiffusionTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=steps,
            learning_rate=3e-3,
            remove_unused_columns=False,  # the collator needs loss_mask
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[count_up(i) for i in range(4000)],
        eval_dataset=[count_up(i) for i in range(4000, 4064)],
        data_collator=MaskedDiffusionCollator(MASK, pad, eps=0.05, seed_field="seed"),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"evaluation loss {before:.3f} before, {after:.3f} after {steps} steps")
    return before, after


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
