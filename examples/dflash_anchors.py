"""Train a tiny DFlash draft: sampled anchors, masked blocks, and the acceptance length.

The draft sees the anchor and predicts the rest of its block at once. The target model here is a fixed table: token v is
followed by token 3 v + 1. A row packs three documents, and no block crosses from one into the next.

python examples/dflash_anchors.py
"""

import torch

from dllm_kernels import DFlashDecayLoss, acceptance_stats, block_targets, sample_anchors

V, D, BLOCK = 32, 64, 8
MASK = V  # the id of MASK, which the draft never predicts


class Draft(torch.nn.Module):
    """Embedding of tokens and positions in the block, and one layer of attention within each block."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(V + 1, D), torch.nn.Embedding(BLOCK, D)
        self.layer = torch.nn.TransformerEncoderLayer(D, 4, 2 * D, dropout=0.0, batch_first=True)

    def forward(self, blocks):
        """Map ``[B, num, BLOCK]`` tokens to hidden states of the predicted positions, ``[B, num * (BLOCK - 1), D]``."""
        x = self.tokens(blocks) + self.places.weight
        return self.layer(x.flatten(0, 1))[:, 1:].reshape(len(blocks), -1, D)


def packed_rows(B, L):
    """Draw rows of three documents of the target model, whose first tokens are the prompt, and their numbers."""
    segment_ids, place = torch.arange(L) // (L // 3), torch.arange(L) % (L // 3)
    ids = torch.randint(0, V, (B, L))
    for i in place.nonzero()[:, 0]:
        ids[:, i] = (3 * ids[:, i - 1] + 1) % V
    return ids, (place >= 4).long().expand(B, L), segment_ids.expand(B, L)


def blocks_of(ids, loss_mask, segment_ids, num, seeds):
    """Return the input blocks ``[B, num, BLOCK]``, and targets and mask of the predicted rows."""
    anchors, real = sample_anchors(loss_mask, num, BLOCK, seeds=seeds, segment_ids=segment_ids)
    targets, inside = block_targets(ids, anchors, BLOCK, segment_ids=segment_ids)
    supervised = block_targets(loss_mask, anchors, BLOCK)[0] > 0
    mask = inside & supervised & real.repeat_interleave(BLOCK - 1, 1)
    blocks = torch.full((*anchors.shape, BLOCK), MASK)
    blocks[..., 0] = ids.gather(1, anchors)
    return blocks, targets, mask


def main(steps=60):
    """Train, and return the first and the last loss and the acceptance length at the end."""
    torch.manual_seed(0)
    draft, head = Draft(), torch.randn(V, D) / D**0.5
    optimizer, loss_fn = torch.optim.Adam(draft.parameters(), 1e-2), DFlashDecayLoss("paper", normalize="mean")
    losses = []
    for step in range(steps):
        rows = packed_rows(16, 48)
        blocks, targets, mask = blocks_of(*rows, 4, seeds=1000 * step + torch.arange(16))
        out = loss_fn.forward_fused(draft(blocks), head, targets, mask, block_size=BLOCK)
        out.total_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.total_loss.item())
    total, count = acceptance_stats(out, mask, BLOCK)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, acceptance length {(total / count).item():.2f} of {BLOCK - 1}")
    return losses[0], losses[-1], (total / count).item()


if __name__ == "__main__":
    main()
