"""A ``num_active`` that is too small: everything that a call computes is NaN, results and gradients alike."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dllm_kernels.losses import (
    BlockDiffusionCrossEntropyLoss,
    DFlashDecayLoss,
    HybridDiffusionLLMLoss,
    MDLMCrossEntropyLoss,
    SCDDLoss,
)
from dllm_kernels.ops import (
    LinearLogits,
    linear_divergence,
    linear_sample,
    row_objective,
    row_stats,
    soft_embedding,
    token_log_probs,
    token_nll,
    topk_divergence,
    weighted_nll,
)
from tests.conftest import DEVICE, usually

N, V, D, R = 6, 11, 5, 2
INACTIVE = 1  # one row is not active; the others are one more than num_active
SKIPPED = 3


def blind(stats, weights):
    """Ignore NaN statistics, as an objective may."""
    return torch.where(stats.log_probs.isfinite(), stats.log_probs, 0.0) * weights


@dataclass
class Call:
    """Leaves and constants of one call, and the options that every op takes."""

    leaves: list[Any]
    options: dict[str, Any]
    num_active: int
    chunk_size: int | None = None

    def __post_init__(self):
        torch.manual_seed(0)
        self.ids = torch.tensor([0, 1, 2, 4, 5, 6], device=DEVICE)
        self.active = torch.ones(N, device=DEVICE)
        self.active[INACTIVE] = 0
        self.teacher = torch.randn(N, D, device=DEVICE).to(self.leaves[0].dtype)

    def logits(self, h):
        _, w, b, u, second = self.leaves
        return LinearLogits(h, w, b, (u, second), num_active=self.num_active, chunk_size=self.chunk_size)


def nll(h, call):
    targets = call.ids.masked_fill(call.active == 0, -100)
    out = token_nll(call.logits(h), targets, with_lse=True, with_correct=True, with_ids=True, **call.options)
    return out.nll.sum(), out


def weighted(h, call):
    out = weighted_nll(call.logits(h), call.ids, call.active, **call.options)
    return out.loss, out


def statistics(h, call):
    mix = (call.active + 1, call.active + 1)
    out = row_stats(call.logits(h), call.ids, entropy=True, mix=mix, active=call.active, **call.options)
    return sum(t.sum() for t in (out.log_probs, out.lse, out.entropy, out.mix)), out


def entropy_alone(h, call):
    out = row_stats(call.logits(h), call.ids, entropy=True, active=call.active, **call.options)
    return out.entropy[2:].sum(), out  # some rows have no upstream gradient


def objective(h, call):
    x, aux = call.logits(h), call.active + 1
    out = row_objective(x, call.ids, blind, aux, entropy=True, active=call.active, **call.options)
    return out.loss, out


def divergence(reduction):
    def run(h, call):
        _, w, b, u, second = call.leaves
        out = linear_divergence(
            h, w, call.teacher, call.active, bias=b, extra=(u, second), kind={"kl": 1.0, "tv": 0.5},
            reduction=reduction, num_active=call.num_active, chunk_size=call.chunk_size, **call.options,
        )  # fmt: skip
        return out.loss.sum(), out

    return run


def topk(reduction):
    def run(h, call):
        ids = torch.stack([call.ids, (call.ids + 1) % 3 + 7], -1)
        log_q = torch.full_like(call.active, -2.0)[:, None].expand(ids.shape)
        out = topk_divergence(call.logits(h), ids, log_q, call.active, reduction=reduction, **call.options)
        return out.loss.sum(), out

    return run


def log_probs(h, call):
    out = token_log_probs(call.logits(h), call.ids, active=call.active, with_entropy=True, **call.options)
    return (out.log_probs + out.entropy).sum(), out


def embedding(h, call):
    table = torch.ones(V, 3, device=DEVICE, dtype=h.dtype)
    return None, (soft_embedding(call.logits(h.detach()), None, table, active=call.active, **call.options),)


def samples(h, call):
    seeds = torch.arange(N, device=DEVICE)
    return None, linear_sample(call.logits(h), seeds=seeds, active=call.active, return_top=2, **call.options)


OPS = {
    "token_nll": nll, "weighted_nll": weighted, "row_stats": statistics, "row_stats, some rows": entropy_alone,
    "row_objective": objective, "divergence": divergence("sum"), "divergence of each row": divergence("none"),
    "topk_divergence": topk("sum"), "topk_divergence of each row": topk("none"), "token_log_probs": log_probs,
    "soft_embedding": embedding, "linear_sample": samples,
}  # fmt: skip
TRAINED = {"head": (0, 1, 2, 3, 4), "rows": (0, 3), "hidden": (0,), "bias": (2,)}


def make_leaves(dtype, trained):
    torch.manual_seed(1)
    shapes = [(N, D), (V, D), (V,), (N, R), (V, R)]
    leaves = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    return [leaf.requires_grad_(i in trained) for i, leaf in enumerate(leaves)]


def floats(results):
    return [t for t in results if t is not None and t.is_floating_point()]


def assert_all_nan(op, trained, dtype=torch.float32, bound=N - 2, run=None, chunk_size=None, **options):
    leaves = make_leaves(dtype, trained)
    loss, out = (run or OPS[op])(leaves[0], Call(leaves, {"skip_id": SKIPPED, **options}, bound, chunk_size))
    assert floats(out)
    for t in out:
        if t is not None and t.dtype == torch.bool:
            assert not t.any()
        elif t is not None and t.is_floating_point():
            assert t.isnan().all()
        elif t is not None:  # ids, which an embedding may read
            assert ((t == -100) | (t >= 0) & (t < V)).all()
    if loss is not None:
        loss.backward()
        for i in trained:
            assert leaves[i].grad.isnan().all(), i


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("bound", [N - 2, 1, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("op", OPS)
def test_every_result_and_gradient_is_nan(op, trained, dtype, bound, backend):
    assert_all_nan(op, TRAINED[trained], dtype, bound, chunk_size=3, backend=backend)


@pytest.mark.covering(1)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("op", OPS)
def test_a_bound_that_is_exact_changes_nothing(op, trained):
    exact, unbounded = (make_leaves(torch.float32, TRAINED[trained]) for _ in range(2))
    results = []
    for leaves, bound in ((exact, N - 1), (unbounded, None)):
        loss, out = OPS[op](leaves[0], Call(leaves, {"skip_id": SKIPPED}, bound, 3))
        if loss is not None:
            loss.backward()
        results.append([*floats(out), *(leaf.grad for leaf in leaves if leaf.requires_grad and loss is not None)])
    for got, expected in zip(*results, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, expected)


IN_A_GRAPH = ["weighted_nll", "row_objective", "token_log_probs"]


@pytest.mark.exhaustive
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("op", usually(IN_A_GRAPH, [name for name in OPS if "some" not in name]))
@pytest.mark.parametrize("trained", ["head", "rows"])
def test_every_result_and_gradient_of_a_graph_is_nan(op, trained):
    torch.compiler.reset()
    assert_all_nan(op, TRAINED[trained], run=torch.compile(OPS[op], backend="aot_eager", fullgraph=True))


def batch():
    torch.manual_seed(0)
    ids, ones = torch.arange(6, device=DEVICE).view(2, 3), torch.ones(2, 3, device=DEVICE)
    return {"target_ids": ids, "noise_mask": ones, "p_mask": ones / 2, "loss_mask": ones}


MASK = 9
LOSSES = {
    "mdlm": (MDLMCrossEntropyLoss, batch),
    "block diffusion": (BlockDiffusionCrossEntropyLoss, batch),
    "hybrid": (HybridDiffusionLLMLoss, batch),
    "scdd": (lambda: SCDDLoss(MASK), lambda: batch() | {"noisy_input_ids": torch.full((2, 3), MASK, device=DEVICE)}),
    "dflash": (DFlashDecayLoss, lambda: {"target_ids": batch()["target_ids"], "block_mask": batch()["loss_mask"]}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_its_gradients_are_nan(name, backend):
    make, inputs = LOSSES[name]
    h = torch.randn(2, 3, D, device=DEVICE, requires_grad=True)
    w = torch.randn(V, D, device=DEVICE, requires_grad=True)
    loss = make()
    loss.backend = backend
    out = loss.forward_fused(h, w, **inputs(), num_active=5)
    out.total_loss.backward()
    for t in (out.total_loss, out.dllm_loss, h.grad, w.grad):
        assert t.isnan().all()


def test_the_bound_of_two_branches_is_that_of_both_together():
    B, L, D, V = 2, 3, 4, 7
    hidden, causal, head = (torch.randn(*s, D, device=DEVICE) for s in ((B, L), (B, L), (V,)))
    ids, on = torch.arange(B * L, device=DEVICE).view(B, L), torch.ones(B, L, device=DEVICE)
    masks = on, on / 2, on, on

    def total(**options):
        loss = HybridDiffusionLLMLoss()
        return loss.forward_fused(hidden, head, ids, *masks, causal_hidden=causal, **options).total_loss

    torch.testing.assert_close(total(num_active=2 * B * L), total(), rtol=0, atol=0)
    with pytest.raises(ValueError, match=rf"^num_active must be an int in \[0, {2 * B * L}\], got {2 * B * L + 1}$"):
        total(num_active=2 * B * L + 1)
