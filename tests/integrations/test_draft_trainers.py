"""Steps of the draft trainers of NeMo AutoModel and speculators under ``fused_head`` equal their steps from logits."""

import contextlib
import importlib

import pytest
import torch
from torch import nn

from dllm_kernels import fused_head
from dllm_kernels.integrations import speculators as integration
from tests.conftest import DEVICE
from tests.support import trainers

pytestmark = pytest.mark.peer
B, S, V, D, BLOCK, ANCHORS = 2, 24, 19, 8, 4, 3


class Draft(nn.Module):
    """Draft model with the interface that the trainers of AutoModel call."""

    input_embedding_scale = 1.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.context = nn.Linear(D, D, device=DEVICE), nn.Linear(2 * D, D, device=DEVICE)

    def forward(self, position_ids, noise_embedding, target_hidden, attention_mask):
        return torch.tanh(self.mix(noise_embedding) + self.context(target_hidden).mean(1, keepdim=True))

    def compute_logits(self, hidden, lm_head):
        return lm_head(hidden)


def frozen_head(seed):
    torch.manual_seed(seed)
    return nn.Linear(D, V, bias=False, device=DEVICE).requires_grad_(False)


def step(trainer, heads, call, on_logits):
    """Return loss, metrics and gradients of a step, and the number of materialized head calls; None: no fused head."""
    trainer.zero_grad()
    torch.manual_seed(3)  # the trainer draws its blocks
    with contextlib.ExitStack() as stack:
        fused = [
            stack.enter_context(fused_head(trainer, head=head, on_logits=on_logits)) for head in heads if on_logits
        ]
        out = call()
        loss, metrics = (out[0], out[1]) if isinstance(out, tuple) else (out.loss, vars(out))
        loss.backward()
    grads = {name: p.grad.clone() for name, p in trainer.named_parameters() if p.grad is not None}
    assert grads
    assert any(g.abs().sum() > 0 for g in grads.values())
    values = {name: t.detach() for name, t in metrics.items() if isinstance(t, torch.Tensor)}
    return (loss.detach(), values, grads), sum(each.materialized for each in fused)


def assert_same_step(trainer, heads, call, *, materialized=0):
    plain, _ = step(trainer, heads, call, None)
    fused, count = step(trainer, heads, call, "allow" if materialized else "raise")
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
    assert count == materialized


def inputs():
    torch.manual_seed(1)
    return {
        "input_ids": torch.randint(0, V - 1, (B, S), device=DEVICE),
        "hidden_states": torch.randn(B, S, 2 * D, device=DEVICE),
        "loss_mask": (torch.rand(B, S, device=DEVICE) < 0.8).float(),
    }


def of_automodel(module, name, **options):
    """Return a trainer of AutoModel, and the head of the target model, which the draft shares."""
    head, embedding = frozen_head(1), nn.Embedding(V, D, device=DEVICE).requires_grad_(False)
    trainer = getattr(module, name)(
        Draft(), head, embedding, V - 1, block_size=BLOCK, attention_backend="sdpa", num_anchors=ANCHORS, **options
    ).to(DEVICE)
    return trainer, head


def test_jetspec_of_automodel():
    """Its teacher is gathered along the sequence, and both models enter a softmax: each head materializes once."""
    with trainers.loaded(trainers.AUTOMODEL, "components.speculative.dflash.jetspec_core") as modules:
        trainer, head = of_automodel(modules.jetspec_core, "JetSpecTrainerModule")
        teacher, states = frozen_head(2), torch.randn(B, S, D, device=DEVICE)

        def call():
            return trainer(**inputs(), target_logits=teacher(states))

        assert_same_step(trainer, [head, teacher], call, materialized=2)


@pytest.mark.parametrize("terms", [{"ce": 1.0, "l1": 0.0}, {"ce": 0.1, "l1": 0.9}], ids=str)
def test_dspark_of_automodel(terms):
    """Neither the cross-entropy nor the distance of two softmaxes needs the logits of a head."""
    with trainers.loaded(trainers.AUTOMODEL, "components.speculative.dspark.loss") as modules:
        common = importlib.import_module("nemo_automodel.components.speculative.dspark.common")
        draft, head, teacher = Draft(), frozen_head(1), frozen_head(2)
        shape = B, ANCHORS, BLOCK
        torch.manual_seed(2)
        states, of_teacher = torch.randn(B, ANCHORS * BLOCK, D, device=DEVICE), torch.randn(*shape, D, device=DEVICE)
        mask = torch.rand(shape, device=DEVICE) < 0.8
        keep, targets = (
            torch.ones(shape[:2], dtype=torch.bool, device=DEVICE),
            torch.randint(0, V, shape, device=DEVICE),
        )

        def call():
            hidden = draft(None, states, torch.zeros(B, 1, 2 * D, device=DEVICE), None)
            outputs = common.DSparkForwardOutput(
                draft_logits=head(hidden).view(*shape, V), target_ids=targets, eval_mask=mask, block_keep_mask=keep,
                confidence_pred=None, aligned_target_logits=teacher(of_teacher) if terms["l1"] else None,
            )  # fmt: skip
            return modules.loss.compute_dspark_loss(
                outputs=outputs, loss_decay_gamma=2.0, ce_loss_alpha=terms["ce"], l1_loss_alpha=terms["l1"],
                confidence_head_alpha=0.0, return_terms=True,
            )  # fmt: skip

        assert_same_step(draft, [head, teacher], call)


LOSSES = [{name: 1.0} for name in integration.KINDS] + [{"ce": 0.1, "tv": 0.9}]


@pytest.mark.covering(1)
@pytest.mark.parametrize("losses", LOSSES, ids="+".join)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("algorithm", ["dflash", "dspark", "eagle3"])
def test_trainers_of_speculators(algorithm, losses, trained):
    """The draft's head and the verifier's, whose logits are the targets: neither materializes."""
    with trainers.loaded(trainers.SPECULATORS, "losses.utils", "losses.eager") as modules:
        metrics = importlib.import_module(f"speculators.models.{algorithm}.metrics")
        eager = {name: (modules.utils._EAGER_LOSS_FN_MAP[name], weight) for name, weight in losses.items()}
        integration.patch()
        try:
            ours = {name: (modules.utils._EAGER_LOSS_FN_MAP[name], weight) for name, weight in losses.items()}
            model = Draft()
            model.lm_head, model.verifier_lm_head = frozen_head(1).requires_grad_(trained), frozen_head(2)
            torch.manual_seed(2)
            T = ANCHORS * BLOCK
            states, verifier = torch.randn(1, T, D, device=DEVICE), torch.randn(1, S, D, device=DEVICE)
            mask = (torch.rand(1, T, device=DEVICE) < 0.8).float()
            mask[:, ::BLOCK] = 0
            anchors = torch.arange(T, device=DEVICE) + 3

            def call(config):
                hidden = model(None, states, torch.zeros(1, 1, 2 * D, device=DEVICE), None)
                with torch.no_grad():  # as in the forward of the draft models
                    targets = torch.roll(model.verifier_lm_head(verifier), 1, dims=1)[:, anchors]
                logits = model.lm_head(hidden)
                if algorithm == "eagle3":
                    return metrics.compute_metrics(logits, targets, mask, None, 1, 0.8, config)
                if algorithm == "dspark":
                    return metrics.compute_metrics(
                        logits, targets, None, mask, BLOCK, config, sample_from_anchor=False,
                        tv_loss_fn=modules.utils._EAGER_LOSS_FN_MAP["tv"],
                    )  # fmt: skip
                return metrics.compute_metrics(logits, targets, mask, BLOCK, loss_config=config)

            heads = [model.lm_head, model.verifier_lm_head]
            plain, _ = step(model, heads, lambda: call(eager), None)
            fused, count = step(model, heads, lambda: call(ours), "raise")
            torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
            assert count == 0
        finally:
            integration.unpatch()
