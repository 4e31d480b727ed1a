"""Train a masked diffusion policy in TRL's GRPOTrainer, on a model and tokenizer built here. No download.

pip install trl==1.16.0
python examples/trl_diffusion.py
"""

import sys
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, GenerationConfig, PreTrainedTokenizerFast, set_seed
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from dllm_kernels.integrations.trl import DiffusionPolicyMixin, diffusion_rollout

NUMBERS, LENGTH = 24, 8  # number words in the vocabulary, tokens per completion
WORDS = ["[PAD]", "[MASK]", "[EOS]", *map(str, range(NUMBERS))]
MASK = WORDS.index("[MASK]")


class DiffusionGRPO(DiffusionPolicyMixin, GRPOTrainer):
    """TRL's trainer; the mixin replaces the log-probabilities only."""


def tokenizer_of_words():
    """Build a tokenizer whose tokens are the words."""
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "eos_token": "[EOS]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, padding_side="left", **names)


def bidirectional_model(width=32):
    """Build an encoder with random weights."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes))
    model.generation_config = GenerationConfig()  # the trainer sets an attribute of it, and an encoder has none
    return model


def reward(completions, **_):
    """Return the fraction of even numbers in each completion."""
    return [sum(int(w) % 2 == 0 for w in text.split() if w.isdigit()) / LENGTH for text in completions]


def main(steps=30, scheme="coupled", loss_type="grpo"):
    """Train and return the mean reward of each step."""
    set_seed(0)
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=16, num_generations=8,
        max_completion_length=LENGTH, num_iterations=2, learning_rate=3e-3, loss_type=loss_type, use_cpu=True,
        bf16=False, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = DiffusionGRPO(
        model=bidirectional_model(),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [f"{i} {i + 1}" for i in range(16)]}),
        reward_funcs=reward,
        processing_class=tokenizer_of_words(),
        rollout_func=diffusion_rollout(MASK, steps=4),
        mask_token_id=MASK,
        scheme=scheme,
    )
    trainer.remove_callback(PrinterCallback)  # only the mean rewards are printed, at the end
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    rewards = main(*map(int, sys.argv[1:]))
    print("mean reward:", *(f"{r:.2f}" for r in rewards[::5]), f"{rewards[-1]:.2f}")
