"""Train a decoder as a masked diffusion LM on packed documents of counting numbers. No download.

pip install transformers
python examples/packed_documents.py
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dllm_kernels import DLLMCollator, MDLMCrossEntropyLoss, corrupt_uniform

NUMBERS, MASK = 32, 32
COLLATE, LOSS = DLLMCollator(pad_token_id=0), MDLMCrossEntropyLoss(skip_id=MASK)


def documents_of(n, generator=None):
    """Draw n documents of 2 to 24 tokens that count up from a random start."""
    drawn = zip(*(torch.randint(*r, (n,), generator=generator).tolist() for r in ((2, 25), (0, NUMBERS))), strict=True)
    return [[(start + i) % NUMBERS for i in range(length)] for length, start in drawn]


def packed(documents, per_row):
    """Collate rows of ``per_row`` documents."""
    return COLLATE([sample_of(documents[i : i + per_row]) for i in range(0, len(documents), per_row)])


def sample_of(row):
    """Return a row of documents as a sample."""
    ids = [token for document in row for token in document]
    positions = [i for document in row for i in range(len(document))]
    segments = [number for number, document in enumerate(row) for _ in document]
    masks = dict.fromkeys(("loss_mask", "attention_mask"), [1] * len(ids))
    return {"input_ids": ids, "position_ids": positions, "segment_ids": segments, **masks}


def noise_of(batch):
    """Draw one noise level for each document; return noisy tokens, their mask and their probabilities."""
    ids, segments = batch["input_ids"], batch["segment_ids"]
    return corrupt_uniform(ids, batch["loss_mask"], MASK, segment_ids=segments)


def loss_of(model, batch, noise):
    """Compute the loss; no token sees another document."""
    segments, loss_mask, (noisy, *masks) = batch["segment_ids"], batch["loss_mask"], noise
    same = segments[:, None, :, None] == segments[:, None, None, :]
    hidden = model.model(input_ids=noisy, attention_mask=same, position_ids=batch["position_ids"]).last_hidden_state
    rows = hidden, model.lm_head.weight, batch["input_ids"], *masks, loss_mask
    return LOSS.forward_fused(*rows, num_diffusion_tokens=loss_mask.count_nonzero()).total_loss


def main(steps=200):
    """Train; return the loss of held-out documents in packed rows, and in a row each with the same noise."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=NUMBERS + 1, is_causal=False, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        batch = packed(documents_of(32), 4)
        loss = loss_of(model, batch, noise_of(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    documents = documents_of(64, torch.Generator().manual_seed(1))
    batches = packed(documents, 4), packed(documents, 1)
    noise = noise_of(batches[0])
    here, there = (batch["loss_mask"].bool() for batch in batches)  # the same tokens in the same order
    moved = [torch.zeros(there.shape, dtype=t.dtype).masked_scatter(there, t[here]) for t in noise]
    with torch.no_grad():
        losses = [loss_of(model, *given).item() for given in zip(batches, (noise, moved), strict=True)]
    print(f"held out: {losses[0]:.5f} in {len(here)} packed rows, {losses[1]:.5f} in {len(there)} rows of one document")
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
