"""SpecForge's DFlash objective, its D-PACE variants and its accuracy, from hidden states, as additive terms.

SpecForge sums (loss numerator, loss denominator, correct, accuracy denominator) over chunks of blocks and over ranks,
and divides at the end. ``objective_terms`` returns these four terms for SpecForge's tensors. It can replace
``OnlineDFlashModel._dflash_objective_chunk_terms`` and does not materialise the logits of the whole chunk.

python examples/specforge_dflash.py
"""

import torch

from dllm_kernels import DFlashDecayLoss

VARIANTS = {
    "dpace": "dpace",
    "dpace-cumulative-confidence-only": "prefix",
    "dpace-continuation-value-only": "continuation",
}


def loss_fn_of(loss_type="dflash", gamma=None, dpace_alpha=0.5):
    """Build the loss for SpecForge's options; without a count it returns the sum, which is the numerator."""
    if loss_type == "dflash":
        return DFlashDecayLoss(loss_gamma=gamma or None)
    return DFlashDecayLoss(position_weights=VARIANTS[loss_type], dpace_alpha=dpace_alpha)


def objective_terms(loss_fn, hidden, head, target_ids, weight_mask):
    """Compute the four additive terms.

    Args:
        loss_fn: the loss returned by ``loss_fn_of``.
        hidden: ``[B, N, block_size, D]``, hidden states of N blocks; the anchor, position 0, is not scored.
        head: ``[V, D]``, the frozen LM head of the target.
        target_ids: ``[B, N, block_size]``.
        weight_mask: ``[B, N, block_size]``, 0 at anchors and at positions without a prediction.
    """
    block_size = hidden.shape[2]
    rows, ids, mask = (x[:, :, 1:].flatten(1, 2) for x in (hidden, target_ids, weight_mask))
    out = loss_fn.forward_fused(rows, head, ids, mask, block_size=block_size)
    decays = loss_fn.position_weights == "decay"
    denominator = out.weight_sum if decays else torch.zeros_like(out.weight_sum)
    correct = (out.draft_correct & (mask > 0.5)).sum().float()
    return out.total_loss, denominator, correct, mask.sum()


def main():
    """Run one step over two chunks of blocks; return loss and accuracy of each variant."""
    torch.manual_seed(0)
    B, N, block_size, V, D = 2, 4, 8, 100, 16
    head, target_ids = torch.randn(V, D), torch.randint(0, V, (B, N, block_size))
    weight_mask = (torch.rand(B, N, block_size) < 0.9).float()
    weight_mask[:, :, 0] = 0
    results = {}
    for loss_type in ("dflash", *VARIANTS):
        hidden = torch.randn(B, N, block_size, D, requires_grad=True)
        loss_fn, totals = loss_fn_of(loss_type, gamma=7.0), [0.0] * 4
        for chunk in torch.arange(N).split(2):
            terms = objective_terms(loss_fn, hidden[:, chunk], head, target_ids[:, chunk], weight_mask[:, chunk])
            totals = [total + term for total, term in zip(totals, terms, strict=True)]
        numerator, denominator, correct, count = totals
        loss = numerator / (denominator if loss_type == "dflash" else B)  # D-PACE is divided by the batch size
        loss.backward()
        results[loss_type] = loss.item(), (correct / count).item()
        print(f"{loss_type:34} loss {results[loss_type][0]:.3f}, accuracy {results[loss_type][1]:.3f}")
    return results


if __name__ == "__main__":
    main()
