"""Train a Hugging Face encoder as a masked diffusion LM in a plain loop, on counting sequences. No download.

pip install transformers
python examples/huggingface_encoder.py
"""

import sys
import time

import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

from dllm_kernels import MDLMCrossEntropyLoss, corrupt_uniform, sample_level

NUMBERS, MASK = 32, 32
B, L = 16, 24


def model_of(width=64):
    """Build a bidirectional transformer with random weights; any ``...ForMaskedLM`` with a plain LM head works."""
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ModernBertForMaskedLM(ModernBertConfig(vocab_size=NUMBERS + 1, **sizes, **special))


def batch_of(generator):
    """Draw sequences that count up from a random start, with all positions supervised."""
    start = torch.randint(0, NUMBERS, (B, 1), generator=generator)
    return (start + torch.arange(L)) % NUMBERS, torch.ones(B, L)


def loss_of(model, loss_fn, ids, loss_mask, seeds):
    """Corrupt the batch and compute the loss from hidden states; the full logits are never materialised."""
    level = sample_level(len(ids), method="stratified", low=1e-2, seeds=seeds)
    noisy, noise_mask, p_mask = corrupt_uniform(ids, loss_mask, MASK, level=level, seeds=seeds)
    hidden = model.head(model.model(input_ids=noisy).last_hidden_state)  # the model without its LM head
    head = model.get_output_embeddings()
    out = loss_fn.forward_fused(
        hidden, head.weight, ids, noise_mask, p_mask, loss_mask,
        num_diffusion_tokens=loss_mask.count_nonzero(), lm_head_bias=head.bias,
    )  # fmt: skip
    return out.total_loss


def main(steps=300):
    """Train and return the loss on held-out sequences before and after training."""
    torch.manual_seed(0)
    generator, held_out = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    model, loss_fn = model_of(), MDLMCrossEntropyLoss(skip_id=MASK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    test, test_seeds = batch_of(held_out), torch.arange(B)

    def evaluate():
        with torch.no_grad():
            return loss_of(model, loss_fn, *test, test_seeds).item()

    before, start = evaluate(), time.perf_counter()
    for step in range(1, steps + 1):
        seeds = step * B + torch.arange(B)  # the noise is a function of the step
        loss = loss_of(model, loss_fn, *batch_of(generator), seeds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(
                f"step {step}: loss {loss.item():.3f}, held out {evaluate():.3f}, {time.perf_counter() - start:.0f} s"
            )
    return before, evaluate()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
