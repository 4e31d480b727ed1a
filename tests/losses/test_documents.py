"""Packed documents: collator, noise and losses give what the same documents give alone."""

import pytest
import torch

from dllm_kernels import (
    DLLMCollator,
    HybridDiffusionLLMLoss,
    IDLMLoss,
    MDLMCrossEntropyLoss,
    corrupt_uniform,
    encoder_ar_loss,
    encoder_ar_loss_fused,
    next_token_mask,
)

N, L, V, D, MASK = 1000, 64, 30, 8, 29


def documents():
    """Draw documents of random lengths, some of whose tokens are not supervised."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 41, (N,), generator=g).tolist()
    return [
        {
            "input_ids": torch.randint(0, MASK, (n,), generator=g).tolist(),
            "loss_mask": (torch.rand(n, generator=g) < 0.8).int().tolist(),
            "attention_mask": [1] * n,
        }
        for n in lengths
    ]


def packed(documents):
    """Return samples of up to L tokens, and the row and the columns of each document."""
    samples, places = [], []
    for document in documents:
        n = len(document["input_ids"])
        if not samples or len(samples[-1]["input_ids"]) + n > L:
            samples.append({key: [] for key in (*document, "position_ids", "segment_ids")})
        row = samples[-1]
        start = len(row["input_ids"])
        places.append((len(samples) - 1, slice(start, start + n)))
        numbers = {"position_ids": list(range(n)), "segment_ids": [max(row["segment_ids"], default=-1) + 1] * n}
        for key, values in {**document, **numbers}.items():
            row[key] = row[key] + values
    return samples, places


@pytest.fixture(scope="module")
def batch():
    """Provide the collated batch, its noise, and the places of the documents."""
    samples, places = packed(documents())
    batch = DLLMCollator(pad_token_id=MASK)(samples)
    seeds = torch.arange(len(samples))
    noisy, noise, p = corrupt_uniform(
        batch["input_ids"], batch["loss_mask"], MASK, segment_ids=batch["segment_ids"], seeds=seeds
    )
    return batch, (noisy, noise, p), places


def test_the_batch_holds_every_document(batch):
    batch, _, places = batch
    for document, place in zip(documents(), places, strict=True):
        for name, values in document.items():
            assert batch[name][place].tolist() == values
        assert batch["position_ids"][place].tolist() == list(range(len(document["input_ids"])))
        assert len(set(batch["segment_ids"][place].tolist())) == 1
    padding = batch["attention_mask"] == 0
    assert (batch["segment_ids"][padding] == -1).all()
    assert (batch["position_ids"][padding] == 0).all()


def test_the_noise_of_each_document_has_a_level_of_its_own(batch):
    """Levels are uniform and independent, and the coins of a document have its level."""
    batch, (noisy, noise, p), places = batch
    levels = torch.stack([p[place].unique().squeeze(0) for place in places]).double()
    z = (levels.mean() - 0.5) * (12 * N) ** 0.5
    assert z.abs() < 4
    assert (levels.sort().values - torch.arange(N) / N).abs().max() < 1.95 / N**0.5  # Kolmogorov-Smirnov, 1e-3
    assert torch.corrcoef(torch.stack([levels[1:], levels[:-1]]))[0, 1].abs() < 4 / N**0.5
    supervised = batch["loss_mask"] != 0
    expected = torch.where(supervised & (batch["segment_ids"] >= 0), p.double(), 0.0)
    z = (noise.double() - expected).sum() / (expected * (1 - expected)).sum().sqrt()
    assert z.abs() < 4
    assert torch.equal(noisy, torch.where(noise, MASK, batch["input_ids"]))
    assert not (noise & ~supervised).any()


def hidden(ids, segments, table):
    """Return the hidden states of a model whose tokens see all tokens of their document, and no other."""
    same = (segments[:, :, None] == segments[:, None, :]).double()
    return torch.tanh(table[ids] + same @ table[ids] / same.sum(-1, keepdim=True))


CALLS = {
    "MDLM": lambda x, w, t: MDLMCrossEntropyLoss().forward_fused(x, w, t["ids"], *t["masks"]).total_loss,
    "MDLM of a shifted model": lambda x, w, t: (
        MDLMCrossEntropyLoss(shift=True).forward_fused(x, w, t["ids"], *t["masks"][:2], t["masks"][2] * t["next"])
    ).total_loss,
    "hybrid": lambda x, w, t: (
        HybridDiffusionLLMLoss(0.5)(
            torch.cat([x @ w.t()] * 2, 1), t["ids"], *t["masks"], loss_mask_ar=t["masks"][2] * t["next"]
        ).total_loss
    ),
    "I-DLM": lambda x, w, t: (
        IDLMLoss(0.3).forward_fused(
            torch.cat([x, 2 * x], 1), w, t["ids"], t["masks"][2] * t["next"], torch.ones_like(t["ids"]),
            seq_len=t["ids"].shape[1], num_diffusion_tokens=1,
        ).total_loss
    ),
    "encoder AR": lambda x, w, t: encoder_ar_loss(
        x @ w.t(), t["ids"], t["masks"][2], num_tokens=1, segment_ids=t["segments"]
    ),
    "encoder AR from hidden states": lambda x, w, t: encoder_ar_loss_fused(
        x, w, t["ids"], t["masks"][2], num_tokens=1, segment_ids=t["segments"]
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(batch):
    """Provide the documents one per row, with the noise that they have in the packed rows."""
    rows, (_, noise, p), places = DLLMCollator(pad_token_id=MASK)(documents()), *batch[1:]
    of_row = [torch.zeros_like(rows["loss_mask"]) for _ in range(2)]
    for number, place in enumerate(places):
        for t, source in zip(of_row, (noise, p), strict=True):
            t[number, : rows["input_lengths"][number]] = source[place].float()
    noise, p = of_row
    noisy = torch.where(noise.bool(), MASK, rows["input_ids"])
    return {
        "ids": rows["input_ids"], "noisy": noisy, "masks": (noise, p, rows["loss_mask"]),
        "next": torch.ones_like(noisy), "segments": None, "same": rows["attention_mask"] - 1,
    }  # fmt: skip


@pytest.mark.parametrize("loss", CALLS)
def test_losses_of_packed_documents_are_those_of_the_documents_alone(batch, alone, loss):
    """Sums, and gradients of the head and of the embedding."""
    batch, (noisy, noise, p), _ = batch
    segments = batch["segment_ids"]
    together = {
        "ids": batch["input_ids"], "noisy": noisy, "masks": (noise, p, batch["loss_mask"]),
        "next": next_token_mask(segments), "segments": segments, "same": segments,
    }  # fmt: skip
    results = []
    for t in (together, alone):
        g = torch.Generator().manual_seed(1)
        table, head = (torch.randn(V, D, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2))
        total = CALLS[loss](hidden(t["noisy"], t["same"], table), head, t)
        results.append((total.detach(), *torch.autograd.grad(total, [table, head])))
    assert results[0][0] > N
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_next_token_mask():
    segments = torch.tensor([[4, 4, 2, 2, -1, -1, 0], [-1, 0, 0, 0, 0, 1, 0]])
    expected = [[0, 1, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0]]
    for dtype in (torch.int64, torch.int8):
        assert next_token_mask(segments.to(dtype)).int().tolist() == expected
    assert next_token_mask(segments[0]).int().tolist() == expected[0]
    assert next_token_mask(segments[:, :0]).shape == (2, 0)
    assert next_token_mask(torch.tensor([255, 255], dtype=torch.uint8)).tolist() == [False, True]
    with pytest.raises(ValueError, match=r"^segment_ids must have at least one dimension, got a 0-d tensor$"):
        next_token_mask(torch.tensor(1))
    with pytest.raises(ValueError, match=r"^segment_ids must have dtype int64, .*, got float32"):
        next_token_mask(torch.ones(2))
