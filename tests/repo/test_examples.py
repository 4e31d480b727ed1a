"""Every example runs, is short, and has the documented loss."""

import importlib.util
import math
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dllm_kernels import DLLMCollator, corrupt_uniform, fused_head, policy_views, sample_level
from tests.support import trainers
from tests.support.distributed_checks import CHECKS
from tests.support.distributed_workers import distributed_readme  # noqa: F401  (it registers its checks)

EXAMPLES = Path(__file__).parents[2] / "examples"
# Tested with their integrations, and in several processes.
ELSEWHERE = {"huggingface_trainer", "nemo_automodel_patch", "fsdp2_tensor_parallel"}


def load(name):
    """Return the module of an example; skip the test if its framework is not installed."""
    spec = importlib.util.spec_from_file_location(f"examples.{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] == "dllm_kernels":
            raise
        pytest.skip(f"{error.name} is not installed")
    return module


def test_every_example_is_tested_and_short():
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__"}
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert names == ELSEWHERE | (tested & names)
    assert "example_fsdp2_tensor_parallel" in CHECKS[4]
    for name in names:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80, name


@pytest.mark.exhaustive
def test_huggingface_encoder():
    example = load("huggingface_encoder")
    before, after = example.main(steps=120)
    assert after < 0.8 * before < torch.inf


@pytest.mark.exhaustive
def test_packed_documents():
    packed, alone = load("packed_documents").main(steps=120)
    assert packed == pytest.approx(alone, rel=1e-5)
    assert packed < 0.6 * math.log(32)


@pytest.mark.exhaustive
def test_llada_sft():
    """The loss equals that of LLaDA's guidelines, line by line, and a trained model answers."""
    example = load("llada_sft")
    torch.manual_seed(0)
    model = example.Denoiser().double()
    collate = DLLMCollator(pad_token_id=example.EOS, supervise_padding=True)
    batch = collate([example.chat(random.Random(i)) for i in range(8)])
    ids, loss_mask, seeds = batch["input_ids"], batch["loss_mask"], torch.arange(8)
    assert len(set(batch["input_lengths"].tolist())) > 1
    assert (loss_mask[:, -1] == 1).all()  # the padding is learned
    noisy, masked, p_mask = corrupt_uniform(ids, loss_mask, example.MASK, seeds=seeds)
    logits = model.lm_head(model(noisy))
    token_loss = F.cross_entropy(logits[masked], ids[masked], reduction="none") / p_mask[masked]
    answer_lengths = loss_mask.sum(1, keepdim=True).expand_as(ids)
    expected = (token_loss / answer_lengths[masked]).sum() / len(ids)
    torch.testing.assert_close(example.loss_of(model, batch, seeds), expected, rtol=1e-6, atol=0)
    before, after = example.main(steps=30)
    assert after < 0.5 * before


@pytest.mark.parametrize("right_shift", [False, True])
@pytest.mark.parametrize("norm", ["token", "sequence", "batch"])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_dllm_mdlm(schedule, norm, right_shift):
    """The loss equals the trainer's own steps: shifted logits, times weights, over the norm."""
    example = load("dllm_mdlm")
    torch.manual_seed(0)
    model, ids = example.Model().double(), torch.randint(0, 49, (4, 16))
    labels, seeds = ids.masked_fill(torch.rand(4, 16) < 0.3, -100), torch.arange(4)
    options = {"loss_norm": norm, "right_shift": right_shift, "seeds": seeds}
    found = example.compute_loss(
        model, {"input_ids": ids, "labels": labels}, 49, schedule=getattr(example, schedule), **options
    )
    t = sample_level(4, low=1e-3, seeds=seeds).double()
    alpha = 1 - t if schedule == "linear" else 1 - torch.cos(math.pi / 2 * (1 - t))
    slope = -torch.ones_like(t) if schedule == "linear" else -math.pi / 2 * torch.sin(math.pi / 2 * (1 - t))
    noisy, masked, _ = corrupt_uniform(ids, labels != -100, 49, level=(1 - alpha).float(), seeds=seeds)
    assert masked.any()
    logits = model.lm_head(model(noisy))
    if right_shift:
        logits = torch.cat([logits[:, :1], logits[:, :-1]], 1)
    nll = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none") * masked * (-slope / (1 - alpha))[:, None]
    if norm == "token":
        nll = nll / (labels != -100).sum()
    elif norm == "sequence":
        nll = nll / (labels != -100).sum(1, keepdim=True) / 4
    else:
        nll = nll / 4
    torch.testing.assert_close(found, nll.sum(), rtol=1e-5, atol=0)  # the levels are float32


@pytest.mark.parametrize("loss_type", ["dflash", *load("specforge_dflash").VARIANTS])
def test_specforge_dflash(loss_type):
    """All four terms and the gradient equal those of SpecForge's own method. With D-PACE, blocks have no hole."""
    example = load("specforge_dflash")
    torch.manual_seed(0)
    B, N, block_size, V, D = 2, 3, 5, 11, 8
    head, ids = torch.randn(V, D), torch.randint(0, V, (B, N, block_size))
    weight_mask = (torch.rand(B, N, block_size) < 0.7).float()
    if loss_type != "dflash":
        weight_mask = weight_mask.cumprod(-1)
    weight_mask[:, :, 0] = 0
    hidden = torch.randn(B, N, block_size, D, requires_grad=True)
    found = example.objective_terms(example.loss_fn_of(loss_type, gamma=4.0), hidden, head, ids, weight_mask)
    (grad,) = torch.autograd.grad(found[0], hidden)
    with trainers.loaded(trainers.SPECFORGE, "algorithms.common.dflash_family_model") as specforge:
        model = specforge.dflash_family_model.OnlineDFlashModel
        lm_head = torch.nn.Linear(D, V, bias=False)
        lm_head.weight.data.copy_(head)
        options = {"loss_decay_gamma": 4.0, "loss_type": loss_type, "dpace_alpha": 0.5}
        theirs = model(None, lm_head, None, mask_token_id=0, block_size=block_size, **options)
        expected = theirs._dflash_objective_chunk_terms(hidden, ids, weight_mask)
        (expected_grad,) = torch.autograd.grad(expected[0], hidden)
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other)
    torch.testing.assert_close(grad, expected_grad)


def test_examples_of_a_trainer_run():
    assert len(load("dllm_mdlm").main()) == 6
    losses = load("specforge_dflash").main()
    assert all(math.isfinite(loss) and 0 <= accuracy <= 1 for loss, accuracy in losses.values())


def test_dflash_anchors():
    first, last, accepted = load("dflash_anchors").main(steps=45)
    assert last < 0.5 * first
    assert accepted > 2


def policies(example):
    """Create three similar policies in float64, completions, rewards and seeds, for an example of policy gradients."""
    torch.manual_seed(0)
    several = [example.Policy().double() for _ in range(3)]
    for p in several[1:]:
        p.load_state_dict({k: v + 0.05 * torch.randn_like(v) for k, v in several[0].state_dict().items()})
    ids, rewards = torch.randint(0, example.MASK, (8, example.L)), torch.rand(8).double()
    return several, ids, rewards, torch.arange(8)


def log_probs_of(example, policy, noisy, ids):
    """Compute log-probabilities of the tokens under each view from the full logits."""
    logits = policy.lm_head(policy(noisy))[..., : example.MASK]
    return logits.log_softmax(-1).gather(-1, ids.expand_as(noisy)[..., None])[..., 0]


def check_update(example, policy, found, expected):
    """Compare a loss whose backward pass has run, and its gradients, with the formula; then the reward increases."""
    grads = [p.grad for p in policy.parameters()]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads, list(torch.autograd.grad(expected, policy.parameters())))
    means = example.main(steps=8)
    assert sum(means[-3:]) > sum(means[:3]) + 0.3


def test_coupled_grpo():
    """Loss and gradient equal those of DiffuCoder's formula, and the reward increases."""
    example = load("coupled_grpo")
    several, ids, rewards, seeds = policies(example)
    found = example.update(*several, ids, rewards, seeds)
    found.loss.backward()

    behind = example.BEHIND.expand_as(ids)
    views = policy_views(ids, behind, example.MASK, "coupled", seeds=seeds)
    full, masked, complement = views.scored
    assert torch.equal(full, behind)
    assert torch.equal(masked ^ complement, behind)
    t = 0.5 / views.weights[1].amax(1, keepdim=True)
    assert ((t > 0.2) & (t < 0.8)).all()

    def score(policy):
        full_scores, masked_scores, complement_scores = log_probs_of(example, policy, views.noisy, ids)
        return (full_scores + torch.where(masked, masked_scores / t, complement_scores / (1 - t))) / 2

    new, old, ref = map(score, several)
    ratio, A = (new - old.detach()).exp(), ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
    assert found.clip_fraction > 0
    k3 = (ref.detach() - new).exp() - (ref.detach() - new) - 1
    per_token = 0.02 * k3 - torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
    check_update(example, several[0], found.loss, per_token[behind].mean())


@pytest.mark.exhaustive
def test_espo():
    """Loss and gradient equal those of the formula, in which all views are one batch. The reward increases."""
    example = load("espo")
    several, ids, rewards, seeds = policies(example)
    found = example.backward(*several, ids, rewards, seeds)

    n = example.L - example.PROMPT
    views = policy_views(ids, example.BEHIND.expand_as(ids), example.MASK, "count", num=example.PAIRS, seeds=seeds)
    masked = views.scored.sum(-1)  # [2 PAIRS, 8]
    assert (masked[::2] + masked[1::2] == n).all()

    def score(policy):
        log_p = torch.where(views.scored, log_probs_of(example, policy, views.noisy, ids), 0.0).sum(-1)
        return ((n + 1) / masked.clamp(min=1) * log_p).sum(0) / (2 * example.PAIRS) / n

    new, old, ref = map(score, several)
    ratio, A = (new - old.detach()).exp(), (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    k2 = (new - ref.detach()).square() / 2
    expected = (0.02 * k2 - torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)).mean()
    check_update(example, several[0], found, expected)


def test_vrpo():
    """Loss and gradient equal those of DPO on the ELBOs. The preferred completions become more likely."""
    example = load("vrpo")
    (policy, reference, _), ids, _, seeds = policies(example)
    found = example.preference_loss(policy, reference, ids[:4], ids[4:], seeds[:4])
    found.backward()

    seeds = seeds[:4].repeat(2)
    views = policy_views(ids, example.BEHIND.expand_as(ids), example.MASK, "elbo", num=example.VIEWS, seeds=seeds)
    assert torch.equal(views.scored[:, :4], views.scored[:, 4:])
    new, ref = ((views.weights * log_probs_of(example, p, views.noisy, ids)).sum((0, 2)) for p in (policy, reference))
    away = new - ref.detach()
    expected = F.softplus(-example.BETA * (away[:4] - away[4:])).mean()
    check_update(example, policy, found, expected)


@pytest.mark.exhaustive
def test_trl_diffusion():
    rewards = load("trl_diffusion").main(steps=16)
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2


@pytest.mark.exhaustive
def test_llada2_confidence():
    """The loss and gradient equal those of the formula. The second term lowers the entropy of correct predictions."""
    example = load("llada2_confidence")
    torch.manual_seed(0)
    ids, noise_mask = torch.randint(0, example.MASK, (4, 16)), torch.rand(4, 16) < 0.6
    p_mask, head = torch.full((4, 16), 0.6).double(), torch.randn(example.V, 8).double().requires_grad_()
    hidden = (2 * head.detach()[ids] + torch.randn(4, 16, 8)).requires_grad_()  # correct in some rows
    out = example.loss_of(hidden, head, ids, noise_mask, p_mask)
    grads = torch.autograd.grad(out.loss, (hidden, head))
    log_p = (hidden @ head.T)[..., : example.MASK].log_softmax(-1)
    nll = -log_p.gather(-1, ids[..., None])[..., 0]
    correct, entropy = log_p.argmax(-1) == ids, -(log_p.exp() * log_p).sum(-1)
    assert 0 < (correct & noise_mask).sum() < noise_mask.sum()
    expected = ((nll + 0.5 * entropy * correct) * noise_mask / p_mask).sum() / ids.numel()
    torch.testing.assert_close(out.loss, expected)
    for found, exact in zip(grads, torch.autograd.grad(expected, (hidden, head)), strict=True):
        torch.testing.assert_close(found, exact)
    without, with_it = example.main(steps=30)
    assert with_it < without


def test_speculators_draft():
    """The acceptance rate increases.

    ``integrations/test_speculators.py`` compares loss and metrics with speculators' own.
    """
    example = load("speculators_draft")
    first, last = example.main(steps=100, weighting="dpace")
    assert last > 2 * first


def test_speculators_patch():
    """A model of speculators trains equally unpatched, with both tables patched, and from hidden states."""
    # Its models import the code that makes training data.
    for needed in ("speculators", "openai", "loguru", "datasets", "hs_connectors"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    example = load("speculators_patch")
    theirs = example.main(steps=8, implementation="eager")
    ours = {"hidden states": example.main(steps=8, step=example.from_hidden_states)}
    report = example.speculators.patch()
    try:
        assert ("speculators.models.dflash.metrics", "kl_div_loss") in report.replaced
        ours |= {table: example.main(steps=8, implementation=table) for table in ("eager", "fused")}
    finally:
        example.speculators.unpatch()
    for found in ours.values():
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=0)
    assert theirs[-1] < 0.9 * theirs[0]


def value_and_gradients(model, loss):
    return [loss, *torch.autograd.grad(loss, model.parameters())]


@pytest.mark.everyday(2)
@pytest.mark.parametrize("loop", ["llada", "dllm", "dream", "block_diffusion", "of_the_model"])
def test_fused_head_sft(loop):
    """Each loop has the loss and the gradients of the same loop without the context."""
    example = load("fused_head_sft")
    loss_of = getattr(example, loop)
    torch.manual_seed(0)
    model, ids = example.Denoiser().double(), torch.randint(0, 63, (2, 16))
    batch = corrupt_uniform(ids, torch.ones_like(ids), example.MASK, seeds=torch.arange(2))
    plain = value_and_gradients(model, loss_of(model, ids, *batch))
    with fused_head(model, on_logits="raise"):
        torch.testing.assert_close(value_and_gradients(model, loss_of(model, ids, *batch)), plain, check_dtype=False)
    losses = example.main(loss_of, steps=12)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_fused_head_rl_draft():
    """The losses equal those without the context, and go down."""
    example = load("fused_head_rl_draft")
    torch.manual_seed(0)
    model, ids = example.Model().double(), torch.randint(0, example.VOCABULARY, (2, 9))
    mask, old, advantages = torch.ones(2, 8), torch.randn(2, 8) - 4, torch.randn(2)
    blocks = torch.randint(0, example.VOCABULARY, (2, 2, example.BLOCK - 1))

    def losses():
        policy = example.grpo(model, ids, mask, old, advantages)
        draft, accuracy = example.dflash(model, ids[:, :8], blocks, torch.ones(2, 2, 3))
        return [*value_and_gradients(model, policy), *value_and_gradients(model, draft), accuracy]

    plain = losses()
    with fused_head(model, on_logits="raise"):
        torch.testing.assert_close(losses(), plain)
    before, after = example.main()
    assert after[0] < before[0]
    assert after[1] < before[1]


def test_tour(capsys):
    """All forms have the loss and the gradient of the plain loop, and ours need less memory."""
    found = load("tour").main(vocabulary=8000, length=64, width=16, repeats=1)
    (loss, grad, peak, _), *others = found.values()
    assert len(others) == 2
    for its_loss, its_grad, its_peak, seconds in others:
        assert its_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(its_grad, grad)
        assert its_peak < 0.7 * peak
        assert seconds > 0
    assert len([line for line in capsys.readouterr().out.splitlines() if "MiB" in line]) == 3
