"""PolicyLoss compared with the policy losses of verl, if installed: values, gradients, metrics, in float64."""

import pytest
import torch

from dllm_kernels import PolicyLoss, PolicyObjective, policy_views

algos = pytest.importorskip("verl.trainer.ppo.core_algos", exc_type=ImportError)
B, L, V, MASK = 4, 9, 13, 12
# Their mean over the n tokens of a sequence divides by n + 1e-8.
OF_SEQUENCES = 1e-8
MODES = [("token-mean", "tokens", 1e-11), ("seq-mean-token-mean", "sequences", OF_SEQUENCES)]


def config(**settings):
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **settings)


@pytest.fixture
def step():
    """(logits, ids, views, log-probs, old, ref, advantages) of completions of 4 to 7 tokens after a large step."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(MASK, (B, L), generator=generator)
    loss_mask = torch.arange(L) < torch.tensor([[4], [7], [5], [6]])
    views = policy_views(ids, loss_mask, MASK, "full", seeds=torch.arange(B))
    logits = 2 * torch.randn(1, B, L, V, dtype=torch.float64, generator=generator)
    log_probs = logits.requires_grad_().log_softmax(-1)[0].gather(-1, ids[..., None])[..., 0]
    old, ref = (log_probs.detach() + torch.randn(B, L, dtype=torch.float64, generator=generator) for _ in range(2))
    advantages = torch.tensor([1.5, -1.0, 0.5, -2.0], dtype=torch.float64)
    return logits, ids, views, log_probs, old, ref, advantages


def assert_equal_losses(theirs, ours, logits, rtol=1e-11):
    """Compare two losses and their gradients in the logits."""
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-12)
    grads = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, theirs)]
    assert grads[1].abs().sum() > 0
    torch.testing.assert_close(*grads, rtol=rtol, atol=1e-13)


@pytest.mark.parametrize(("mode", "normalize", "rtol"), MODES)
def test_clip(mode, normalize, rtol, step):
    logits, ids, views, log_probs, old, _, advantages = step
    settings_of_verl = config(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
    mask = views.scored[0]
    arguments = old, log_probs, advantages[:, None].expand(B, L), mask.double()
    theirs, metrics = algos.compute_policy_loss_vanilla(*arguments, loss_agg_mode=mode, config=settings_of_verl)
    objective = PolicyObjective(clip_low=0.2, clip_high=0.28, dual_clip=3.0, log_ratio_clamp=20.0)
    ours = PolicyLoss(objective, normalize=normalize)(logits, ids, views, old, advantages)
    assert_equal_losses(theirs, ours.loss, logits, rtol)
    either = metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]  # no score is clipped by both
    assert metrics["actor/pg_clipfrac_lower"] > 0
    assert ours.clip_fraction.item() == pytest.approx(either)


@pytest.mark.parametrize(("mode", "normalize", "rtol"), MODES)
def test_cispo(mode, normalize, rtol, step):
    logits, ids, views, log_probs, old, _, advantages = step
    arguments = old, log_probs, advantages[:, None].expand(B, L), views.scored[0].double()
    settings_of_verl = config(clip_ratio_low=1.0, clip_ratio_high=0.28)  # the only lower bound of a weight is 0
    theirs, metrics = algos.compute_policy_loss_cispo(*arguments, loss_agg_mode=mode, config=settings_of_verl)
    ours = PolicyLoss(PolicyObjective("cispo", clip_high=0.28), normalize=normalize)
    out = ours(logits, ids, views, old, advantages)
    assert_equal_losses(theirs, out.loss, logits, rtol)
    assert out.clip_fraction.item() == pytest.approx(metrics["actor/pg_clipfrac"])


def test_sequence_ratios(step):
    logits, ids, views, log_probs, old, _, advantages = step
    old = log_probs.detach() + 0.3 * (old - log_probs.detach())
    mask = views.scored[0].double()
    arguments = old, log_probs, advantages[:, None].expand(B, L), mask
    settings_of_verl = config(clip_ratio_low=0.05, clip_ratio_high=0.08)
    theirs, _ = algos.compute_policy_loss_gspo(*arguments, loss_agg_mode="seq-mean-token-mean", config=settings_of_verl)
    ours = PolicyLoss(PolicyObjective(clip_low=0.05, clip_high=0.08), level="sequence", normalize="sequences")
    out = ours(logits, ids, views, (old * mask).sum(1) / mask.sum(1), advantages)
    assert_equal_losses(theirs, out.loss, logits, OF_SEQUENCES)
    assert 0 < out.clip_fraction < 1


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_penalties(kind, step):
    logits, ids, views, log_probs, _, ref, advantages = step
    mask = views.scored[0].double()
    penalty = algos.kl_penalty(log_probs, ref, kind)
    theirs = -(advantages[:, None] * log_probs * mask).sum() + 0.3 * (penalty * mask).sum()
    ours = PolicyLoss(PolicyObjective("reinforce", kl=kind, kl_coef=0.3), normalize="none")
    out = ours(logits, ids, views, None, advantages, ref)
    assert_equal_losses(theirs, out.loss, logits)
    assert out.kl.item() == pytest.approx((penalty * mask).sum().item() / mask.sum().item())
