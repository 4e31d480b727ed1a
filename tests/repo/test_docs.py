"""Every fence of docs runs as printed, and gives the numbers in the text around it.

The fences of a page share their names and run in order. Then the page's check, defined here, compares the results with
plain PyTorch in float64. The fences of the pages about many GPUs are checks of ``distributed_readme.py``, run by
``test_distributed.py``.
"""

import ast
import importlib.util
import inspect
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import dllm_kernels as ours
import reference
from dllm_kernels.integrations import speculators, trl
from dllm_kernels.ops import RowStats
from tests.support import trainers
from tests.support.distributed_checks import CHECKS
from tests.support.distributed_workers import distributed_readme
from tests.support.parity import assert_as_good_as_plain, largest_error, reduction_sizes
from tests.support.readme import DOCS, ROOT, blocks, python, run


def drop_in(code):
    """The comment holds the replaced line. Both classes give equal results for equal arguments."""
    found, replaced = {}, {}
    run(code, found)
    assert found["MDLMCrossEntropyLoss"] is ours.MDLMCrossEntropyLoss
    pytest.importorskip("nemo_automodel")
    run(code.replace("# ", "", 1).splitlines()[0], replaced)
    assert replaced["MDLMCrossEntropyLoss"] is not ours.MDLMCrossEntropyLoss
    masks = (torch.rand(2, 8) < 0.5, torch.rand(2, 8).clamp(min=0.1), torch.ones(2, 8))
    loss_inputs = torch.randn(2, 8, 11), torch.randint(0, 11, (2, 8)), *masks
    out, theirs = (f["MDLMCrossEntropyLoss"]()(*loss_inputs, num_diffusion_tokens=16) for f in (found, replaced))
    assert out._fields[: len(theirs._fields)] == theirs._fields  # additions come last
    torch.testing.assert_close(out.total_loss, theirs.total_loss)


def framework(code):
    """Check the framework's losses after the patch."""
    automodel = pytest.importorskip("dllm_kernels.integrations.nemo_automodel")
    theirs = pytest.importorskip("nemo_automodel.components.loss.dllm_loss")
    try:
        run(code, {})
        assert theirs.MDLMCrossEntropyLoss is ours.MDLMCrossEntropyLoss
    finally:
        automodel.unpatch()
    assert theirs.MDLMCrossEntropyLoss is not ours.MDLMCrossEntropyLoss


def loop_with_a_strategy(code):
    """The loop trains with the package's loss."""
    pytest.importorskip("nemo_automodel.recipes.dllm.strategy")
    names = {}
    try:
        run(code, names)
    finally:
        names["nemo_automodel"].unpatch()
    assert type(names["loss_fn"]) is ours.MDLMCrossEntropyLoss
    assert names["losses"][-1] < 0.8 * names["losses"][0]


def trainer(code):
    """The Trainer trains. ``integrations/test_transformers.py`` compares its loss."""
    for needed in ("transformers", "accelerate"):
        pytest.importorskip(needed)
    names = {}
    run(code, names)
    mixin, host = names["MaskedDiffusionTrainerMixin"], names["Trainer"]
    assert names["DiffusionTrainer"].compute_loss is mixin.compute_loss is not host.compute_loss
    state = names["trainer"].state
    assert state.global_step == 10
    assert 0 < state.log_history[-1]["train_loss"] < 2 * math.log(names["V"])


def decoder(code):
    """The loss is that of the logits of V tokens. Each position depends on all tokens."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    n = {}
    run(code, n)
    model, V = n["model"], n["V"]
    with torch.no_grad():
        logits = model(input_ids=n["noisy"]).logits[..., :V]
        other = n["noisy"].clone()
        other[:, 1:] = (other[:, 1:] + 1) % V
        assert not torch.allclose(model(input_ids=other).logits[:, 0, :V], logits[:, 0])
    nll = plain_nll(logits, n["ids"])
    same(n["out"].total_loss, (nll * n["noise_mask"] / n["p_mask"]).sum() / n["loss_mask"].sum())
    assert model.lm_head.weight.grad[V:].abs().max() == 0
    assert n["MASK"] >= V
    return n


def attention_in_any_version(code):
    """The mask of zeros gives what ``is_causal=False`` gives, also if that has no effect."""
    n = decoder(python(PAGES["decoder.md"])[0])
    run(code, n)
    torch.testing.assert_close(n["hidden_of_all"], n["hidden"])
    n["model"].config.is_causal = True
    run(code, n)
    torch.testing.assert_close(n["hidden_of_all"], n["hidden"])


def padded(code):
    """A bias of -inf equals the head without its last rows, in the gradient, too."""
    n = decoder(python(PAGES["decoder.md"])[0])
    before = n["model"].lm_head.weight.grad.clone()
    n["model"].zero_grad()
    run(code, n)
    n["with_bias"].total_loss.backward()
    torch.testing.assert_close(n["model"].lm_head.weight.grad, before)


def facts(code):
    """The vocabulary and the head of the table are those of the configuration."""
    pytest.importorskip("transformers")
    n = {}
    run(code, n)
    assert n["facts"] == (151_936, False, None)
    table = PAGES["models.md"]
    assert "| 151,936; the tokenizer has fewer tokens |" in table
    from transformers.models.diffusion_gemma import configuration_diffusion_gemma as gemma

    text = gemma.DiffusionGemmaTextConfig()
    assert (f"{text.vocab_size:,}", text.tie_word_embeddings) == ("262,144", True)
    assert "| 262,144 | tied |" in table
    sources = set(re.findall(r"\[(\d)\] \|", table))
    assert sources == set(re.findall(r"^(\d)\. ", table, re.MULTILINE))


def patched_speculators(code):
    """After the patch, speculators' tables hold the package's losses."""
    with trainers.loaded(trainers.SPECULATORS, "losses.utils") as host:
        theirs = dict(host.utils._EAGER_LOSS_FN_MAP)
        try:
            run(code, {})
            assert not set(theirs.values()) & set(host.utils._EAGER_LOSS_FN_MAP.values())
        finally:
            speculators.unpatch()
        assert theirs == host.utils._EAGER_LOSS_FN_MAP


def loop_with_speculators(code):
    """The draft learns. The last loss is KL with the decay from row 1 on, over the valid rows.

    The acceptance rate is that of the predicting rows.
    """
    n = {}
    run(code, n)
    assert n["rates"][-1] > 2 * n["rates"][0]
    h, w = n["hidden"].detach().double(), n["head"].double()
    log_p, q = (h @ w.T).log_softmax(-1), (n["teacher_hidden"].double() @ w.T).softmax(-1)
    k = torch.arange(h.shape[1]) % n["block_size"]
    kl = F.kl_div(log_p, q, reduction="none").sum(-1)
    same(n["loss"], (kl * torch.exp(-(k - 1).double() / 4) * (k > 0)).sum() / (len(k) + 1e-5))
    same(n["metrics"]["accept_rate_sum"], torch.minimum(log_p.exp(), q).sum(-1)[:, k > 0].sum())


def patched_trl(code):
    """After the patch, TRL's function is that of the package."""
    kernels = pytest.importorskip("trl.kernels")
    original = kernels.ChunkedLogProbFunction
    try:
        run(code, {})
        assert isinstance(kernels.ChunkedLogProbFunction, trl.ChunkedLogProbs)
    finally:
        trl.unpatch()
    assert kernels.ChunkedLogProbFunction is original


def policy_of_trl(code):
    """The trainer takes its steps. The example in ``test_examples.py`` trains longer."""
    for needed in ("trl", "pandas", "datasets", "tokenizers"):
        pytest.importorskip(needed)
    names = {}
    run(code, names)
    assert names["DiffusionGRPO"].__mro__[1:3] == (names["DiffusionPolicyMixin"], names["GRPOTrainer"])
    assert names["trainer"].state.global_step == 2


def names_of_others(code):
    """The sum over the masked tokens of nll / p, and a policy gradient with an entropy bonus."""
    n = {}
    run(code, n)
    ids, head = n["ids"], n["lm_head"].weight.double()
    nll = plain_nll(n["body"](n["noisy"]).double() @ head.T, ids)
    same(n["loss"], (nll * n["masked"] / n["p_mask"]).sum() / ids.numel())
    log_p = (n["body"](ids[:, :-1]).double() @ head.T / 0.9).log_softmax(-1)
    gained = log_p.gather(-1, ids[:, 1:, None])[..., 0] * n["advantages"]
    same(n["policy"], -gained.mean() + 0.01 * (log_p.exp() * log_p).sum(-1).mean())


PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
CHECK = {}
FENCE_CHECKS = {
    "decoder.md": (decoder, attention_in_any_version, padded),
    "models.md": (facts,),
    "frameworks/nemo-automodel.md": (framework, loop_with_a_strategy),
    "frameworks/hugging-face.md": (trainer,),
    "frameworks/speculators.md": (patched_speculators, loop_with_speculators),
    "frameworks/trl.md": (patched_trl, policy_of_trl),
    "frameworks/other-names.md": (names_of_others,),
    "migrate/nemo-automodel.md": (drop_in,),
}  # function that runs and checks each fence
SHELL = {"sh", "console"}


def page(name):
    """Register the check of a page; it is called with the names defined by the fences."""
    return lambda check: CHECK.setdefault(name, check)


def plain_nll(logits, ids):
    """Compute the NLL in float64; -100 gives 0."""
    return F.cross_entropy(logits.double().flatten(0, -2), ids.flatten(), reduction="none").view(ids.shape)


def leaf(t):
    return t.detach().double().requires_grad_()


def same(found, expected):
    """Compare float32 with float64, with the defaults of ``assert_close`` for float32."""
    torch.testing.assert_close(found.detach().float(), expected.detach().float())


def mdlm_sum(logits, n):
    nll = plain_nll(logits, n["ids"])
    return (nll * (n["noise_mask"] & (n["loss_mask"] != 0)) / n["p_mask"].double()).sum()


def loop_of_the_first_screen():
    """Return the names that the first fence of README and of the front page takes from the reader's program."""
    ids = torch.randint(0, 49, (2, 12))
    return {"model": OutputModel(), "ids": ids, "loss_mask": torch.ones(2, 12), "mask_token_id": 49}


class OutputModel(torch.nn.Module):
    """A model that returns its logits as the models of transformers do."""

    def __init__(self):
        super().__init__()
        self.body, self.lm_head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.lm_head(self.body(input_ids)))


def check_the_loop_of_the_first_screen(n):
    """The gradient of the loop is that of the logits."""
    model, found = n["model"], [p.grad.clone() for p in n["model"].parameters()]
    model.zero_grad()
    (plain_nll(model(n["noisy"]).logits, n["ids"]) * n["masked"] / n["p"]).sum().backward()
    for grad, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad)


@page("gpu.md")
def on_your_gpu(n):
    logits = (n["hidden"] @ n["lm_head"].weight.T.to(n["hidden"].dtype)).float()
    found, exact = n["out"].total_loss.float(), mdlm_sum(logits, n) / n["ids"].numel()
    torch.testing.assert_close(found.cpu(), exact.float().cpu(), rtol=2**-7, atol=0)
    assert all(p.grad is not None for p in n["model"].parameters())


@page("masks.md")
def masks(n):
    assert not (n["noise_mask"] & (n["labels"] == -100)).any()
    nll = plain_nll(n["logits"], n["input_ids"])
    same(n["out"].total_loss, (nll * n["noise_mask"] / n["p_mask"]).sum() / n["count"])


@page("published-noise.md")
def published_noise(n):
    """``corruption/test_published.py`` compares the distributions of its functions."""
    tokens = 9
    _, noise_mask, _ = ours.corrupt_uniform(torch.zeros(20_000, tokens).long(), torch.ones(20_000, tokens), 1)
    assert "with a probability of about 1 / (n + 1)" in " ".join(PAGES["published-noise.md"].split())
    assert abs((~noise_mask.any(1)).double().mean() - 1 / (tokens + 1)) < 0.01


@page("packed-data.md")
def packed_data(n):
    """The loss and its gradient are those of each document alone, without a mask."""
    model, grad = n["model"], n["model"].lm_head.weight.grad.clone()
    model.zero_grad()
    total, shifted, next_token, pairs, L = 0.0, 0.0, 0.0, 0, n["ids"].shape[1]
    for b, segments in enumerate(n["segments"]):
        for j in range(int(segments.max()) + 1):
            place = b, segments == j
            ids, noise, p = (n[name][place][None] for name in ("ids", "noise_mask", "p_mask"))
            assert len(p.unique()) == 1
            logits = model(input_ids=n["noisy"][place][None]).logits
            diffusion = logits.index_fill(-1, torch.tensor([n["MASK"]]), -math.inf)
            total = total + (plain_nll(diffusion, ids) * noise / p).sum()
            following = plain_nll(logits[:, :-1], ids[:, 1:])
            shifted = shifted + (following * noise[:, 1:] / p[:, 1:]).sum()
            next_token, pairs = next_token + following.sum(), pairs + following.numel()
    assert n["predicted"].sum() == pairs == n["loss_mask"].sum() - len(n["documents"])
    assert len(n["segments"]) < len(n["documents"])
    (total / n["loss_mask"].sum()).backward()
    same(n["out"].total_loss, total / n["loss_mask"].sum())
    same(grad, model.lm_head.weight.grad)
    same(n["shifted"].total_loss, shifted / pairs)
    same(n["next_token"], next_token / pairs)
    assert n["inputs"]["attention_mask"].shape == (len(n["segments"]), 1, L, L)
    assert torch.equal(n["inputs"]["segment_ids"], n["segments"])
    text = " ".join(PAGES["packed-data.md"].split())
    with torch.no_grad():  # the statements on attention
        exact = model(input_ids=n["ids"], attention_mask=n["same"], position_ids=n["batch"]["position_ids"]).logits
        inside = n["segments"] >= 0

        def differs(mask):
            other = model(input_ids=n["ids"], attention_mask=mask, position_ids=n["batch"]["position_ids"]).logits
            return not torch.allclose(other[inside], exact[inside], atol=1e-5)

        assert "transformers 5.24 attends to the whole row, whatever the positions are" in text
        assert differs(None)
        assert differs(n["batch"]["attention_mask"])
        model.set_attn_implementation("eager")
        assert "a bool would only add 1 to the scores within a document" in text
        assert differs(n["same"])
        assert "`torch.where(same, 0.0, torch.finfo(torch.float32).min)`" in text
        assert not differs(torch.where(n["same"], 0.0, torch.finfo(torch.float32).min))


@page("index.md")
def start(n):
    check_the_loop_of_the_first_screen(n["first_screen"])
    x, h, w = leaf(n["logits"]), leaf(n["hidden"]), leaf(n["head"])
    assert 0 < n["noise_mask"].sum() < n["ids"].numel()
    (mdlm_sum(x, n) / n["ids"].numel()).backward()
    expected = mdlm_sum(h @ w.T, n) / n["ids"].numel()
    expected.backward()
    same(n["out"].total_loss, expected)
    for name, exact in (("logits", x), ("hidden", h), ("head", w)):
        same(n[name].grad, exact.grad)
    same(n["loss"], (plain_nll(x, n["ids"]) * n["weights"]).sum())
    same(n["linear_loss"], (plain_nll(h @ w.T, n["ids"]) * n["weights"]).sum())


@page("losses/index.md")
def quotient(n):
    weights = (n["noise_mask"] / n["p_mask"]).double()
    same(n["of_sequences"], (plain_nll(n["logits"], n["ids"]) * weights).sum(1).mean() / 8)
    same(n["mean"], (plain_nll(n["logits"], n["ids"]) * weights).sum() / weights.sum())


@page("losses/mdlm.md")
def mdlm(n):
    logits = n["hidden"].double() @ n["head"].double().T
    logits[..., n["MASK"]] = -math.inf
    same(n["out"].total_loss, mdlm_sum(logits, n) / n["ids"].numel())
    assert n["head"].grad[n["MASK"]].count_nonzero() == 0


@page("losses/block-diffusion.md")
def block_diffusion(n):
    same(n["out"].total_loss, plain_nll(n["logits"], n["ids"]).mean())
    assert 0 < n["noise_mask"].sum() < n["ids"].numel()


@page("losses/hybrid.md")
def hybrid(n):
    head = n["head"].double()
    diffusion = 0.3 * mdlm_sum(n["hidden"].double() @ head.T, n) / 128
    ar = plain_nll((n["causal_hidden"].double() @ head.T)[:, :-1], n["ids"][:, 1:]).sum() / 124
    same(n["out"].dllm_loss, diffusion)
    same(n["out"].total_loss, diffusion + ar)
    same(n["autoregressive"], ar)


@page("losses/idlm.md")
def idlm(n):
    noisy, clean = n["logits"].split(n["L"], 1)
    terms = [plain_nll(z[:, :-1], n["ids"][:, 1:])[:, 3:].mean() for z in (noisy, clean)]
    same(n["out"].total_loss, terms[0] + 0.2 * terms[1])
    same(n["out"].dllm_loss, terms[0])


@page("losses/scdd.md")
def scdd(n):
    inputs = (n["ids"], n["times"], n["loss_mask"], n["noisy"], n["MASK"], None, 1000, *n["schedule"].values())
    logits = n["logits"].detach()
    exact = reference.scdd_loss(logits.double(), *inputs)
    plain = largest_error([reference.scdd_loss(logits, *inputs)], [exact])
    assert_as_good_as_plain([n["out"].total_loss.detach()], [exact], plain, "loss", reduction_sizes([logits]))
    assert (n["noisy"] == n["MASK"]).any()
    (code,) = python(PAGES["losses/scdd.md"])
    large = {}  # the page's own probabilities, with which a uniform draw often repeats the clean token
    run(code.replace("4, 32, 100, 99", "400, 500, 4, 3"), large)
    mass = large["mass"]
    expected_mass = (mass.clean_mass + mass.uniform_mass / (large["V"] - 1)).double()
    variance = (expected_mass * (1 - expected_mass)).mean() / large["ids"].numel()
    assert abs((large["noisy"] == large["ids"]).double().mean() - expected_mass.mean()) < 5 * variance.sqrt()


@page("losses/dflash.md")
def dflash(n):
    k = torch.arange(n["T"]) % 7
    weights = torch.exp(-k.double() / 4).expand(2, -1)
    logits = n["hidden"].double() @ n["head"].double().T
    same(n["out"].total_loss, (plain_nll(logits, n["targets"]) * weights).sum() / (weights.sum() + 1e-6))
    assert list(n["accuracy"]) == ["draft_acc", *(f"draft_acc_k{k}" for k in range(1, 8))]
    correct = (logits.argmax(-1) == n["targets"]).view(2, 3, 7)
    same(n["accuracy"]["draft_acc"], correct.double().mean())
    same(n["accepted"], correct.long().cumprod(-1).sum(-1).double().mean())
    steps = 1 + k.expand(2, -1) - n["prefix"].repeat_interleave(7, 1)
    weights = torch.where(steps >= 0, torch.exp(-steps.double() / 4), 0.0) * n["valid"]
    nll = plain_nll(logits, n["block_ids"].clamp(min=0))
    same(n["varied"].total_loss, (nll * weights).sum() / (weights.sum() + 1e-6))
    assert n["valid"].any()


@page("losses/draft-distillation.md")
def draft_distillation(n):
    weights = torch.exp(-(torch.arange(n["T"]) % 7).double() / 4).expand(2, -1)
    h, w = leaf(n["hidden"]), n["head"].double()
    log_p, q = (h @ w.T).log_softmax(-1), (n["teacher_hidden"].double() @ w.T).softmax(-1)
    kl = F.kl_div(log_p, q, reduction="none").sum(-1)
    loss = (kl * weights).sum() / (weights.sum() + 1e-6)
    loss.backward()
    same(n["out"].total_loss, loss)
    same(n["hidden"].grad, h.grad)
    agree, a = log_p.argmax(-1) == q.argmax(-1), torch.minimum(log_p.exp(), q).sum(-1)
    same(n["greedy"], agree.double().view(2, 3, 7).cumprod(-1).sum(-1).mean())
    same(n["sampled"], a.view(2, 3, 7).cumprod(-1).sum(-1).mean())
    d = n["draft_to_target"]
    p, q = (h @ w[d].T).softmax(-1), q[..., d]
    kl = (q * (q / q.sum(-1, keepdim=True) / p).log()).sum(-1)
    weights = torch.exp(-(torch.arange(n["T"]) % 7).double() / 7).expand(2, -1)
    same(n["full"].total_loss, (kl * weights).sum() / (weights.sum() + 1e-6))
    same(n["full"].acceptance_rate, torch.minimum(p, q).sum(-1))


@page("losses/encoder-ar.md")
def encoder_ar(n):
    pairs = n["valid"][:, :-1] & n["valid"][:, 1:]
    nll = plain_nll(n["logits"][:, :-1], n["ids"][:, 1:])
    same(n["loss"], nll[pairs].mean())
    pairs[:, 5] = False  # of the last token of one document and the first of the next
    same(n["of_sequences"], torch.stack([row[on].mean() for row, on in zip(nll, pairs, strict=True)]).mean())


@page("losses/mtp.md")
def mtp(n):
    weight, labels = n["model"].lm_head.weight.double(), n["labels"]
    depths = [
        plain_nll((h.double() @ weight.T)[:, : -k - 1], labels[:, k + 1 :]).mean()
        for k, h in enumerate(n["hidden_of_depths"])
    ]
    same(n["loss"], 0.1 / 2 * sum(depths))


@page("ops/nll.md")
def ops_nll(n):
    linear = n["hidden"].double() @ n["head"].double().T
    nll, linear_nll = plain_nll(n["logits"], n["ids"]), plain_nll(linear, n["ids"])
    same(n["nll"], nll)
    same(n["linear_nll"], linear_nll)
    same(n["loss"], (nll * n["weights"]).sum())
    same(n["linear_loss"], (linear_nll * n["weights"]).sum())
    two_parts = linear + n["u"].double() @ n["U"].double().T
    same(n["two_parts"], (plain_nll(two_parts, n["ids"]) * n["weights"]).sum())
    logits = leaf(n["logits"])
    nll = plain_nll(logits, n["ids"])
    focal = ((1 - (-nll).exp()) ** 2 * nll).sum()
    same(n["focal"], focal)
    same(n["focal_grad"], torch.autograd.grad(focal, logits)[0])


@page("ops/row-stats.md")
def ops_row_stats(n):
    x, h, w = (leaf(n[name]) for name in ("logits", "hidden", "head"))
    log_p, linear = F.log_softmax(x, -1), F.log_softmax(h @ w.T, -1)
    pick = lambda log_p, ids: log_p.gather(-1, ids[..., None])[..., 0]  # noqa: E731
    entropy = lambda log_p: -(log_p.exp() * log_p).sum(-1)  # noqa: E731
    same(n["stats"].log_probs, pick(log_p, n["ids"]))
    same(n["stats"].entropy, entropy(log_p))
    same(n["stats"].lse, x.logsumexp(-1))
    same(n["several"], torch.stack([pick(log_p, n["ids"]), pick(log_p, n["ids"].roll(1))], -1))
    (pick(linear, n["ids"]) + 0.01 * entropy(linear)).sum().backward()
    same(n["hidden"].grad, h.grad)
    same(n["head"].grad, w.grad)
    cooler = F.log_softmax(h @ w.T / 0.7, -1)
    same(n["out"].log_probs, pick(cooler, n["ids"]))
    same(n["out"].entropy, entropy(cooler))
    assert torch.equal(n["old"], n["out"].log_probs)


@page("ops/row-objective.md")
def ops_row_objective(n):
    h, w = leaf(n["hidden"]), leaf(n["head"])
    log_p = -plain_nll(h @ w.T / 0.7, n["ids"])
    ratio = (log_p - log_p.detach()).exp()
    loss = -torch.minimum(ratio * n["advantages"], ratio.clamp(0.8, 1.2) * n["advantages"]).sum()
    loss.backward()
    same(n["policy"].loss, loss)
    same(n["hidden"].grad, h.grad)
    same(n["head"].grad, w.grad)
    stats = RowStats(torch.tensor([3.0, 0.5, 3.0, 0.5]).log(), *[torch.zeros(4)] * 3, None)
    clipped = n["clipped_ratio"](stats, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]))
    same(clipped, torch.tensor([-1.2, -0.5, 3.0, 0.8]).double())
    assert not n["policy"].value.requires_grad
    assert n["policy"].value.shape == n["ids"].shape


@page("ops/divergence.md")
def ops_divergence(n):
    x, q = leaf(n["logits"]), (n["teacher_logits"].double() / 2).softmax(-1)
    loss = 4 * F.kl_div((x / 2).log_softmax(-1), q, reduction="none").sum(-1).mean()
    loss.backward()
    same(n["loss"], loss)
    same(n["logits"].grad, x.grad)
    h, w = leaf(n["hidden"]), n["head"].double()
    p, q = (h @ w.T).softmax(-1), (n["teacher_hidden"].double() @ w.T).softmax(-1)
    mixed = 0.1 * plain_nll(h @ w.T, n["ids"]).mean() + 0.9 * (p - q).abs().sum(-1).mean()
    mixed.backward()
    same(n["out"].loss, mixed)
    same(n["hidden"].grad, h.grad)
    h = leaf(n["student"])
    log_p, log_q = (h @ w.T).log_softmax(-1), n["teacher_logits"].double().log_softmax(-1)
    held = torch.zeros_like(log_q, dtype=torch.bool).scatter(-1, n["top_ids"], True)
    pairs = (log_p.gather(-1, n["top_ids"]), log_q.gather(-1, n["top_ids"]))
    rest = (t.exp().masked_fill(held, 0).sum(-1, keepdim=True).log() for t in (log_p, log_q))
    p, q = (torch.cat(both, -1) for both in zip(pairs, rest, strict=True))
    sparse = (q.exp() * (q - p)).sum(-1).mean()
    sparse.backward()
    same(n["sparse"].loss, sparse)
    same(n["student"].grad, h.grad)


@page("ops/soft-embedding.md")
def ops_soft_embedding(n):
    logits, table = n["hidden"].double() @ n["head"].double().T, n["embedding"].double()
    skipped = torch.where(torch.arange(100) == 99, -math.inf, logits / 0.8)
    same(n["guess"], skipped.softmax(-1) @ table)
    bumped = logits + 20.0 * F.one_hot(n["decided"].clamp(min=0), 100) * (n["decided"] >= 0)[..., None]
    same(n["certain"], bumped.softmax(-1) @ table)


@page("ops/sampling.md")
def ops_sampling(n):
    logits = n["hidden"].double() @ n["head"].double().T
    logits[..., 99] = -math.inf
    assert torch.equal(n["greedy"].ids, logits.argmax(-1))
    same(n["drawn"].log_probs, (logits / 0.7).log_softmax(-1).gather(-1, n["drawn"].ids[..., None])[..., 0])
    assert torch.equal(n["drawn"].top_ids, logits.topk(5).indices)
    assert ((n["ids"] != 99).sum(1) == 4).all()
    assert torch.equal(n["noisy"] == 99, n["masked"] & ~n["shown"])


@page("generation.md")
def generation(n):
    """The model in float64, row by row: the steps keep the most confident tokens, and each has its log-probability."""
    out, model, P = n["out"], n["model"].double().eval(), 3
    whole = out.generated[:, P:].all(1).nonzero()[:, 0].tolist()  # after an EOS, the model also saw dropped tokens
    assert whole
    for row, on in ((i, n["prompts"][i] != n["PAD"]) for i in whole):
        decoded = out.step_map[row]
        for step in range(8):
            seen = out.ids[row].masked_fill(decoded >= step, n["MASK"])
            z = model(seen[None], F.pad(on, (0, 16), value=True)[None])[0]
            z[:, n["MASK"]] = -math.inf
            log_p = torch.log_softmax(reference.truncated(z / 0.7, top_p=0.95), -1)
            at = (decoded == step).nonzero()[:, 0]
            same(out.log_probs[row, at], log_p[at, out.ids[row, at]])


@page("ops/transforms.md")
def ops_transforms(n):
    x = leaf(n["logits"])
    z = 30 * torch.tanh(x / 30) / 0.7
    z = torch.where(torch.arange(100) == 99, -math.inf, z)
    loss = plain_nll(z, n["ids"]).sum()
    loss.backward()
    same(n["loss"], loss)
    same(n["logits"].grad, x.grad)
    z, without = (
        torch.nn.functional.linear(h.double(), n["weight"].double()) for h in (n["hidden"], n["unconditional"])
    )
    b, c = n["bias"].double(), n["c"]
    by_hand = {
        "tempered": (z + b) / n["T"].double(),
        "guided": (c + 1) * (z + b) - c * (without + b),
        "capped": 30 * torch.tanh(0.25 * (z + b) / 30),
    }
    for name, logits in by_hand.items():
        log_p = logits.log_softmax(-1)
        same(n[name].log_probs, log_p.gather(1, n["tokens"][:, None])[:, 0])
    log_p = by_hand["tempered"].log_softmax(-1)
    same(n["tempered"].entropy, -(log_p.exp() * log_p).sum(-1))


@page("corruption.md")
def corruption(n):
    supervised = n["loss_mask"] != 0
    for name in ("noise_mask", "exact_mask", "block_mask", "mixed_mask", "other_mask"):
        assert not (n[name] & ~supervised).any(), name
    assert not supervised[:, :12].any()
    assert supervised[:, 12:].all()
    for start in range(16, 64, 16):  # whole supervised blocks: an exact share
        m = n["m"][:, start]
        assert torch.equal(n["block_mask"][:, start : start + 16].sum(1), (16 * m).round().long())
    assert (n["exact_mask"].sum(1) == round(0.25 * 52)).all()
    assert torch.equal(n["mixed_mask"], n["mixed"] != n["ids"])
    assert torch.equal(n["other_mask"], supervised & ~n["noise_mask"])
    assert torch.equal(n["p_mask"], n["levels"][:, None].expand_as(n["p_mask"]))
    assert torch.equal(n["packed"] != n["ids"], n["packed_noise"])
    assert all(len(row.unique()) == 2 for row in n["p_of_document"])
    assert torch.equal(n["of_blocks"] != n["ids"], n["block_noise"])
    assert n["chosen"].sum(1).tolist() == [5, 10, 20, 52]
    assert not (n["chosen"] & ~supervised).any()
    steps = n["levels"].sort().values.diff()
    torch.testing.assert_close(steps, torch.full((3,), (1 - 1e-3) / 4))
    means = {
        method: torch.stack(
            [ours.sample_level(8, method=method, seeds=torch.arange(8) + 8 * s).mean() for s in range(400)]
        )
        for method in ("uniform", "stratified")
    }
    assert 0.8 < means["uniform"].var() * 12 * 8 < 1.2
    assert 0.8 < means["stratified"].var() * 12 * 8**2 < 1.2


@page("policy/index.md")
def policy_index(n):
    ids, A, MASK, head = n["ids"], n["advantages"].double(), n["MASK"], n["head"].double()
    body, embedding = (n[name].double() for name in ("body", "embedding"))

    def log_p(model, views):
        logits = (model(embedding(views.noisy)) @ head.T)[..., :MASK]
        return torch.where(views.scored, -plain_nll(logits, ids.expand_as(views.noisy)), 0.0) * views.weights.double()

    views = ours.policy_views(ids, n["loss_mask"], MASK, "coupled", seeds=torch.tensor([1, 2, 3, 4]))
    new, ref = (log_p(model, views).sum(0) for model in (body, torch.nn.Identity()))
    away = ref - new  # the ratio is 1
    same(n["out"].loss, (0.04 * (away.exp() - away - 1) - A[:, None])[:, 8:].mean())
    assert n["logged"]["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert n["logged"]["clipped"] == 0
    same(n["logged"]["kl"], (away.exp() - away - 1)[:, 8:].mean())
    assert len(n["views"].noisy) == 16
    parameters = list(body.parameters())
    scores = log_p(body, n["views"]).sum((0, 2)) / 24
    for p, exact in zip(parameters, torch.autograd.grad(-(scores * A).mean(), parameters), strict=True):
        torch.testing.assert_close(p.grad, exact, rtol=1e-4, atol=1e-6)


@page("policy/views.md")
def policy_views(n):
    logits = n["hidden"].double() @ n["head"].double().T
    log_p = -plain_nll(logits, n["ids"].expand(3, -1, -1))
    tokens = (log_p * n["views"].weights.double()).sum(0)
    same(n["tokens"], tokens)
    scores = tokens.sum(-1) / 24
    same(n["scores"], scores)
    r, away = (scores - n["old"].double()).exp(), n["ref"].double() - scores
    A = n["advantages"].double()
    loss = 0.04 * (away.exp() - away - 1) - torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
    parameters = [*n["body"].parameters(), *n["embedding"].parameters()]
    for p, exact in zip(parameters, torch.autograd.grad(loss.mean(), parameters), strict=True):
        torch.testing.assert_close(p.grad, exact, rtol=1e-4, atol=1e-6)
    assert n["trace"].scored.sum((1, 2)).tolist() == [16] * 6
    assert n["grouped"].scored.sum((1, 2)).tolist() == [48] * 2


@page("collator.md")
def collator(n):
    assert n["batch"]["input_lengths"].tolist() == [3, 6]


def asserts_by_itself(n):
    """The page's own code compares the results."""


for name in ("bd3lm", "cut-cross-entropy", "d1", "dllm", "dream", "llada", "torch"):
    page(f"migrate/{name}.md")(asserts_by_itself)
page("ops/index.md")(asserts_by_itself)


@page("any-loop.md")
def any_loop(n):
    """Each loop of the page is the last one defined, with its loss before and after."""
    check_the_loop_of_the_first_screen(n["first_screen"])
    assert n["first_screen"]["fused"].materialized == 0
    model = n["model"]
    for name in ("llada", "dream", "block_diffusion", "grpo", "dflash", "of_the_model"):
        loop, head = n[name], n["fused_head"]
        plain = [loss := loop(model), *torch.autograd.grad(loss, model.parameters())]
        with head(model, on_logits="raise"):
            found = [loss := loop(model), *torch.autograd.grad(loss, model.parameters())]
        torch.testing.assert_close(found, plain)
    torch.testing.assert_close(n["after"], n["before"])


@page("migrate/liger.md")
def liger(n):
    """The page compares the means. A z-loss is 1e-4 times the square of the logsumexp."""
    assert sum(code.count("torch.testing.assert_close(") for code in python(PAGES["migrate/liger.md"])) == 2
    logits, on = n["logits"].detach().double(), n["targets"] != -100
    each = plain_nll(logits, n["targets"].clamp(min=0)) + 1e-4 * logits.logsumexp(-1) ** 2
    same(n["with_z"], each[on].mean())


@pytest.mark.everyday(3)
@pytest.mark.parametrize("name", sorted(CHECK))
def test_the_code_runs_as_printed(name):
    if name == "migrate/torch.md" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    torch.manual_seed(0)
    names, codes = {}, python(PAGES[name])
    if any("from transformers import" in code for code in codes):
        pytest.importorskip("transformers")
    if name in ("index.md", "any-loop.md"):
        names["first_screen"] = loop_of_the_first_screen()
        run(codes.pop(0), names["first_screen"])
        names |= {name: names["first_screen"][name] for name in ("F", "corrupt_uniform", "fused_head")}
    for code in codes:
        run(code, names)
    if CHECK[name] is asserts_by_itself:
        assert sum(code.count("torch.testing.assert_close(") for code in python(PAGES[name])) >= 1
    CHECK[name](names)


# Importing NeMo AutoModel takes longer than all other fences. The same line is in integrations/test_nemo.py.
LONG = {framework: pytest.mark.exhaustive, loop_with_a_strategy: pytest.mark.exhaustive}


@pytest.mark.parametrize(
    ("name", "fence"),
    [
        pytest.param(name, i, marks=LONG.get(runner, ()))
        for name, runners in FENCE_CHECKS.items()
        for i, runner in enumerate(runners)
    ],
)
def test_the_code_of_a_framework_runs_as_printed(name, fence, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # trainers create their output folder
    codes = python(PAGES[name])
    assert len(codes) == len(FENCE_CHECKS[name])
    FENCE_CHECKS[name][fence](codes[fence])


def test_no_fence_goes_without_a_test():
    """Each page with Python has a check, and every fence is Python or a command."""
    with_python = {name for name, text in PAGES.items() if python(text)}
    assert with_python == CHECK.keys() | FENCE_CHECKS.keys() | distributed_readme.PAGES.keys()
    for name, text in PAGES.items():
        assert {language for language, _ in blocks(text)} <= {"python", *SHELL}, name
        assert len(blocks(text)) == text.count("```") / 2, name


def test_every_fence_for_many_processes_has_a_scenario():
    found = distributed_readme.FENCES
    assert found.keys() == distributed_readme.SCENARIOS.keys()
    for paragraph, codes in found.items():
        assert len(inspect.signature(distributed_readme.SCENARIOS[paragraph]).parameters) == len(codes), paragraph
    assert {f"readme[{paragraph}]" for paragraph in found} <= CHECKS[distributed_readme.WORLD].keys()


def test_commands_exist():
    """Check ``make`` targets, modules and files; other commands must be ``pip install``."""
    makefile = (ROOT / "Makefile").read_text()
    lines = [
        line
        for text in PAGES.values()
        for language, code in blocks(text)
        if language in SHELL
        for line in code.splitlines()
    ]
    assert lines
    for line in filter(None, (line.split("#")[0].strip() for line in lines)):
        command, *rest = line.split()
        if command == "make":
            assert re.search(rf"^{rest[0]}:", makefile, re.MULTILINE), line
        elif command == "python" and rest[0] == "-m":
            assert importlib.util.find_spec(rest[1]), line
        elif command in ("python", "torchrun"):
            assert any((ROOT / word).is_file() for word in rest), line
        else:
            assert line.startswith(("pip install ", "pip download ")), line


def test_code_fits_beside_both_menus():
    """At 1280 pixels, 85 columns of code are visible."""
    long = [
        (name, line) for name, text in PAGES.items() for _, code in blocks(text) for line in code.splitlines()
        if len(line) > 85
    ]  # fmt: skip
    assert long == []


def test_every_example_has_a_page_with_its_output():
    """The navigation lists the page. ``docs/_make/examples_of.py`` records the output."""
    names = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__"}
    recorded = {path.stem for path in (DOCS / "_make" / "outputs").glob("*.txt") if path.read_text().strip()}
    assert recorded == names
    assert set(re.findall(r"examples/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())) == names
    assert set(re.findall(r"\]\(examples/(\w+)\.md\)", PAGES["examples.md"])) == names


BUILT = {"site/"}  # by ``make docs``


def test_pages_for_contributors_name_existing_files_and_identifiers():
    """Check files, relative to the root or the package, and identifiers in code font.

    ``<...>`` stands for a new one.
    """
    folders = ("dllm_kernels", "reference", "benchmarks", "tools", "tests")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    words = set().union(*(re.findall(r"\w+", path.read_text()) for path in sources))
    found, pages = [], {name: text for name, text in PAGES.items() if name.startswith("develop/")}
    for name, text in pages.items():
        for code in set(re.findall(r"`([^`<>\n]+)`", text)) - BUILT:
            if re.fullmatch(r"[\w.*-]*/[\w./*-]*", code):
                missing = [code] if not any([*base.glob(code)] for base in (ROOT, ROOT / "dllm_kernels")) else []
            else:
                names = re.fullmatch(r"@?((?:\w+\.)*\w+)(\(.*\))?", code)
                missing = [w for w in names[1].split(".") if "_" in w and w not in words] if names else []
            found += [(name, word) for word in missing]
    assert len(pages) > 10
    assert found == []


def test_the_documented_effect_of_a_wrong_count():
    """In a step of one sequence, sum(1/p over the masked) / masked is 1/p. Its mean over t is ln(1/eps) / (1 - eps)."""
    assert "`eps=1e-3`, the loss of a model that predicts uniformly averages about seven times log V" in " ".join(
        PAGES["many-gpus.md"].split()
    )
    assert inspect.signature(ours.corrupt_uniform).parameters["eps"].default == 1e-3
    N, L = 400, 500
    ids, loss_mask = torch.zeros(N, L, dtype=torch.long), torch.ones(N, L)
    _, noise_mask, p_mask = ours.corrupt_uniform(ids, loss_mask, 1, seeds=torch.arange(N))
    weights, masked = (noise_mask / p_mask.double()).sum(1), noise_mask.sum(1)
    torch.testing.assert_close((weights / masked)[masked > 0], (1 / p_mask[:, 0].double())[masked > 0])
    right = weights / L
    assert abs(right.mean() - 1) < 5 * right.std() / math.sqrt(N)
    t = (torch.arange(100_000).double() + 0.5) / 100_000
    assert round((1 / ((1 - 1e-3) * t + 1e-3)).mean().item()) == round(math.log(1e3) / (1 - 1e-3)) == 7


def as_text(node):
    """Return a message as in the code, with ``{}`` for inserted values."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return as_text(node.left) + as_text(node.right)
    return "{}"


def messages():
    """Yield the message of every error that the package raises, and of every warning."""
    errors = {"TypeError", "ValueError", "IndexError", "RuntimeError", "NotImplementedError", "ImportError"}
    for path in (ROOT / "dllm_kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                error, arguments = getattr(node.exc.func, "id", ""), node.exc.args
                if error in errors and arguments:
                    yield as_text(arguments[0]).replace("\n", "⏎")
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "warn":
                yield as_text(node.args[0]).replace("\n", "⏎")


def test_every_error_is_listed_with_its_cause():
    """Each message matches a row of the page of errors, and every row matches a message."""
    rows = re.findall(r"^\| (`.*?) \| [^|]+ \| [^|]*\|$", PAGES["troubleshooting/errors.md"], re.MULTILINE)
    patterns = [
        p for row in rows for p in re.findall(r"`([^`]+)`", row) if "…" in p or " must " in p or len(p.split()) > 4
    ]
    assert len(patterns) > 80
    found = list(messages())
    used = {p: re.compile(re.escape(p).replace("…", ".*") + (".*" if p.endswith("…") else "")) for p in patterns}
    assert [m for m in found if not any(regex.fullmatch(m) for regex in used.values())] == []
    assert [p for p, regex in used.items() if not any(regex.fullmatch(m) for m in found)] == []


def test_the_most_frequent_errors_are_quoted_as_the_package_raises_them():
    section = PAGES["troubleshooting/index.md"].split("## It stops with an error")[1].split("\n## ")[0]
    quoted, found = re.findall(r"^\| `([^`]+)`", section, re.MULTILINE), list(messages())
    assert len(quoted) > 8
    for text in quoted:  # without names and values, which messages insert
        longest = max(re.split(r"…|'\w+'|NoneType|\b\w+_\w+\b", text), key=len).strip(" ,")
        assert any(longest in message for message in found), text
