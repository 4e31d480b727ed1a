"""Compiled steps in which everything changes at once: batch size, length, counts and numbers, ten times over.

Every public function is part of a graph without breaks. The first step compiles it, the second one with symbols for
all that changed, and no later step compiles anything.
"""

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

import dllm_kernels as ours
from tests.conftest import DEVICE, every_time, usually
from tests.support.cases import FIRSTS, value_of
from tests.support.op_cases import FIRST_OPS, OpCase, Rows
from tests.support.routines import ROUTINES

V, D, MASK = 19, 8, 2
STEPS = 10
# Batch sizes and lengths that are neither 1 nor equal to each other or to V and D in the second step.
SHAPES = [(2 + k % 4, 3 * (4 + (5 * k) % 7)) for k in range(STEPS)]

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Step:
    """Draws of step k: shape, tensors of usual kinds, and numbers that change with k."""

    def __init__(self, k: int):
        torch.manual_seed(k)
        self.k, (self.B, self.L) = k, SHAPES[k]
        self.shape = self.B, self.L
        self.factor = 0.5 + 0.03 * k  # a scale, a temperature, a probability
        self.count = 5 + 7 * k
        self.all_rows = self.B * self.L  # a bound on the number of active rows

    def floats(self, *columns: int) -> torch.Tensor:
        return torch.randn(*self.shape, *columns, device=DEVICE)

    def leaf(self, *columns: int) -> torch.Tensor:
        return self.floats(*columns).requires_grad_()

    def logits(self, kind: str) -> Any:
        """Return logits of the kind; the numbers of a record change, too."""
        if kind == "stored":
            return self.leaf(V)
        return ours.LinearLogits(self.leaf(D), self.head(), num_active=self.all_rows, chunk_size=5 + self.k)

    def rows(self) -> Rows:
        return Rows.drawn(*self.shape, V=V, low=MASK + 1, device=DEVICE)

    def head(self) -> torch.Tensor:
        return torch.randn(V, D, device=DEVICE, requires_grad=True)

    def ids(self) -> torch.Tensor:
        return torch.randint(MASK + 1, V, self.shape, device=DEVICE)

    def mask(self) -> torch.Tensor:
        return torch.rand(self.shape, device=DEVICE) < 0.7

    def seeds(self) -> torch.Tensor:
        return torch.randint(1 << 40, (self.B,), device=DEVICE)


Draw = Callable[[Step], dict[str, Any]]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(D, V, bias=False, device=DEVICE)


MODEL = Model()


def pipeline(depths, labels, count):
    output = {"logits": MODEL.lm_head(depths[0]), "hidden_states": depths[0], "mtp_per_depth_h": depths[1:]}
    loss = ours.PipelineCausalLMLoss(ours.MaskedCrossEntropy(), MODEL, scaling_factor=0.3)
    return loss(output, labels)


def accepted(output, mask):
    drafts = ours.DFlashDecayLoss()(output, mask.long(), mask, None, 4)
    return ours.acceptance_length(drafts, mask, 4), ours.acceptance_stats(drafts, mask, 4), ours.draft_accuracy(drafts)


def mtp(first, second, labels, weight, count):
    loss = ours.FusedLinearCrossEntropy()
    return loss(first, labels, weight, num_label_tokens=count) + ours.calculate_mtp_loss(
        loss, mtp_per_depth_h=[second], labels=labels, model=MODEL, num_label_tokens=count
    )


def masked_cross_entropy(logits, labels, count):
    return ours.calculate_loss(ours.MaskedCrossEntropy(), logits=logits, labels=labels, num_label_tokens=count)


def step_of_op(case: OpCase, kind: str) -> tuple[Callable[..., Any], Draw]:
    """Return a call of an op, and its arguments: all floats, and a coefficient of a mixture, change."""

    def draw(step):
        x, r = step.logits(kind) if case.kinds else None, step.rows()
        changing, mixture = dict.fromkeys(case.floats, step.factor), case.options(x, r).get("kind")
        if isinstance(mixture, dict):
            changing["kind"] = mixture | {"kl": step.factor}
        return {"x": x, "r": r, **changing}

    return case, draw


OPS: dict[str, tuple[Callable[..., Any], Draw]] = {case.name: step_of_op(case, "head") for case in FIRST_OPS}
STORED = {f"{case.name} of stored logits": step_of_op(case, "stored") for case in FIRST_OPS if "stored" in case.kinds}
CALLS: dict[str, tuple[Callable[..., Any], Draw]] = OPS | STORED | {
    "linear_sample, greedy": (
        lambda x, seeds: ours.linear_sample(x, seeds=seeds, temperature=0),
        lambda s: {"x": s.logits("head"), "seeds": s.seeds()},
    ),
    "compute_per_token_nll": (
        ours.compute_per_token_nll, lambda s: {"logits": s.leaf(V), "target_ids": s.ids(), "scale": s.factor},
    ),
    "encoder_ar_loss": (
        ours.encoder_ar_loss, lambda s: {"encoder_logits": s.leaf(V), "input_ids": s.ids(), "num_tokens": s.count},
    ),
    "encoder_ar_loss_fused": (
        ours.encoder_ar_loss_fused,
        lambda s: {
            "hidden": s.leaf(D), "lm_head_weight": s.head(), "input_ids": s.ids(), "valid_mask": s.mask(),
            "num_tokens": s.count, "num_active": s.all_rows,
        },
    ),
    "scdd_schedule": (
        lambda t, ratio: ours.scdd_schedule(t, max_ratio=ratio, gamma_shape=1.0, t_peak=0.5),
        lambda s: {"t": torch.rand(s.B, device=DEVICE), "ratio": s.factor / 4},
    ),
    "acceptance_length": (accepted, lambda s: {"output": s.floats(V), "mask": s.mask().float()}),
    "MaskedCrossEntropy": (
        masked_cross_entropy, lambda s: {"logits": s.leaf(V), "labels": s.ids(), "count": s.count},
    ),
    "calculate_mtp_loss": (
        mtp,
        lambda s: {
            "first": s.leaf(D), "second": s.leaf(D), "labels": s.ids(), "weight": s.head(), "count": s.count,
        },
    ),
    "PipelineCausalLMLoss": (
        pipeline, lambda s: {"depths": [s.leaf(D), s.leaf(D)], "labels": s.ids(), "count": s.count},
    ),
    "nll_weights": (
        lambda log_probs, old, advantages, beta: ours.nll_weights(
            lambda x: beta * ours.PolicyObjective()(x, old, advantages).sum(), log_probs
        ),
        lambda s: {"log_probs": s.leaf(), "old": s.floats(), "advantages": s.floats(), "beta": torch.tensor(s.factor)},
    ),
    "mtp_labels": (lambda labels: ours.mtp_labels(labels, 1), lambda s: {"labels": s.ids()}),
    "corrupt_uniform": (
        lambda ids, mask, share, inputs, seeds: (
            *(
                case(ids, mask, **inputs[name], **dict.fromkeys(case.floats, share), seeds=seeds)
                for name, case in ROUTINES.items()
            ),
            ours.complementary(mask, ids > V // 2),
            ours.sample_level(len(ids), method="stratified", low=share, seeds=seeds, device=DEVICE),
        ),
        lambda s: {
            "ids": (ids := s.ids()), "mask": s.mask(), "share": s.factor / 9, "seeds": s.seeds(),
            "inputs": {name: case.inputs_on(ids) for name, case in ROUTINES.items()},
        },
    ),
    "gumbel_topk": (
        lambda log_w, k, each_k, u, seeds: (
            ours.gumbel_topk(log_w[0], k, uniform=u),
            ours.batched_gumbel_topk(log_w, each_k, seeds=seeds),
            ours.gumbel_topk_mask(log_w, k, seeds=seeds),
        ),
        lambda s: {
            "log_w": s.floats(), "k": 2 + s.k, "each_k": torch.full((s.B,), 2 + s.k, device=DEVICE),
            "u": torch.rand(s.L, device=DEVICE) * 0.9 + 0.05, "seeds": s.seeds(),
        },
    ),
    "next_token_mask": (ours.next_token_mask, lambda s: {"segment_ids": s.ids()}),
}  # fmt: skip
# Names that no entry of CALLS is called after.
COVERED = {
    **{case.older: case.name for case in FIRST_OPS if case.older},
    "calculate_loss": "MaskedCrossEntropy",
    "FusedLinearCrossEntropy": "calculate_mtp_loss",
    "draft_accuracy": "acceptance_length",
    "acceptance_stats": "acceptance_length",
    **dict.fromkeys({case.routine for case in ROUTINES.values()} - {"corrupt_uniform"}, "corrupt_uniform"),
    **dict.fromkeys(("complementary", "sample_level"), "corrupt_uniform"),
    **dict.fromkeys(("batched_gumbel_topk", "gumbel_topk_mask"), "gumbel_topk"),
    **{case.loss.__name__: case.name for case in FIRSTS if isinstance(case.loss, type)},
}
NOT_IN_A_GRAPH = {
    "diffusion_generate": "calls a model in a loop, with its head replaced in eager mode",
    "DLLMCollator": "runs on the host",
    "fused_head": "replaces the head of a model in eager mode",
    "mtp_loss_scaling_factor": "reads an attribute of a model",
}
OF_BLOCKS = dict.fromkeys(("sample_anchors", "block_targets", "sample_prefix"), "tests/losses/test_draft_sampling.py")
ELSEWHERE = dict.fromkeys(set(ours.policy.__all__) - {"nll_weights"}, "tests/policy") | OF_BLOCKS


def test_every_public_function_has_a_case():
    names = {name for name in ours.__all__ if callable(getattr(ours, name)) and not is_record(getattr(ours, name))}
    calls = CALLS.keys() - STORED - {"linear_sample, greedy"}
    assert names == {*calls, *COVERED, *NOT_IN_A_GRAPH, *(names & ELSEWHERE.keys())}


def is_record(value):
    return isinstance(value, type) and (issubclass(value, tuple) or is_dataclass(value))


def evaluate(function, arguments):
    """Return all floating results, and the gradients of the sum of their squares; integers and masks as they are."""
    leaves = [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor) and t.requires_grad]
    results = [t for t in tree_leaves(function(**arguments)) if isinstance(t, torch.Tensor)]
    differentiable = [t.square().sum() for t in results if t.requires_grad]
    grads = torch.autograd.grad(sum(differentiable), leaves, materialize_grads=True) if differentiable else ()
    return [t.detach() for t in (*results, *grads)]


def assert_two_graphs(function, draw, steps=STEPS):
    """Assert the results of eager mode in each step, no graph break, and no graph after the second step."""
    counters.clear()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for k in range(steps):
        expected, got = (evaluate(f, draw(Step(k))) for f in (function, compiled))
        torch.testing.assert_close(got, expected)
        assert counters["stats"]["unique_graphs"] <= min(k + 1, 2), f"step {k}"
    assert not counters["graph_break"]


EVERY_DAY = {"weighted_nll"}
# Their form from hidden states, or the function that they call or that calls them, runs more of the code of a graph.
CONTAINED = {
    *STORED, "token_log_probs", "gumbel_topk_mask", "compute_per_token_nll", "encoder_ar_loss", "MaskedCrossEntropy",
}  # fmt: skip


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    "name", [*every_time(EVERY_DAY, [name for name in CALLS if name not in CONTAINED]), *usually((), sorted(CONTAINED))]
)
def test_two_graphs_serve_all_steps(name):
    assert_two_graphs(*CALLS[name])


def draw_case(case, form):
    def draw(step):
        inputs = {name: t.to(DEVICE) for name, t in case.draw(step.B, step.L, V).items()}
        inputs |= {name: step.count + i for i, name in enumerate(case.counts)}
        rows = torch.randn(step.B, step.L * case.width, V if form == "logits" else D, device=DEVICE)
        return {
            "rows": rows.requires_grad_(), "weight": step.head(), "bias": torch.randn(V, device=DEVICE),
            "inputs": inputs, "num_active": rows[..., 0].numel(),
        }  # fmt: skip

    return draw


CLASSES = [case for case in FIRSTS if isinstance(case.loss, type)]
# The hybrid loss calls the same functions as MDLM and block diffusion.
LARGEST = [case for case in CLASSES if case.name not in ("mdlm", "block diffusion")]


def step_of(case, form):
    """Return a function of the arguments of ``draw_case`` that calls the loss."""
    loss = case.loss(**case.settings)

    def step(rows, weight, bias, inputs, num_active):
        if form == "logits":
            return value_of(loss(**case.arguments(form, rows, inputs)))
        arguments = case.arguments(form, rows, inputs, (weight, bias))
        return value_of(loss.forward_fused(**arguments, num_active=num_active))

    return step


@pytest.mark.exhaustive
@pytest.mark.covering(1, most=1)  # the ops below the two forms have cases above
@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("case", usually(LARGEST, CLASSES, lambda case: case.name))
def test_two_graphs_serve_all_steps_of_a_loss(case, form):
    assert_two_graphs(step_of(case, form), draw_case(case, form))
