"""Every fence of README runs, as printed, and gives the numbers that the text around it promises.

The pages of docs are ``test_docs.py``'s.
"""

import inspect
import re

import pytest
import torch
import torch.nn.functional as F

import dllm_kernels as ours
from tests.parity import assert_as_good_as_plain, largest_error, reduction_sizes
from tests.readme import README, fences, run

ROOT = README.parent


def drop_in(code):
    """The line in the comment is the one replaced: both classes make the same of the same arguments."""
    found, replaced = {}, {}
    run(code, found)
    assert found["MDLMCrossEntropyLoss"] is ours.MDLMCrossEntropyLoss
    pytest.importorskip("nemo_automodel")
    run(code.replace("# ", "", 1).splitlines()[0], replaced)
    assert replaced["MDLMCrossEntropyLoss"] is not ours.MDLMCrossEntropyLoss
    masks = (torch.rand(2, 8) < 0.5, torch.rand(2, 8).clamp(min=0.1), torch.ones(2, 8))
    given = torch.randn(2, 8, 11), torch.randint(0, 11, (2, 8)), *masks
    out, theirs = (f["MDLMCrossEntropyLoss"]()(*given, num_diffusion_tokens=16) for f in (found, replaced))
    assert out._fields[: len(theirs._fields)] == theirs._fields  # additions come last
    torch.testing.assert_close(out.total_loss, theirs.total_loss)


def two_commands(code):
    """Not run here: ``make test`` is what CI runs, this suite; ``test_demo.py`` runs the program of ``make demo``."""
    commands = [line.split("#")[0].strip() for line in code.splitlines()]
    assert commands == ["make test", "make demo"]
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert re.search(r"^test: .*\n\t.* -m pytest", makefile, re.MULTILINE)
    assert re.search(r"^demo: .*\n\t.* -m benchmarks train", makefile, re.MULTILINE)


def losses_and_primitives(losses, primitives, statistics, objective):
    """Values and gradients are those of the plain formulas, in float64."""
    torch.manual_seed(0)
    names = {}
    run(losses, names)
    x, h, w = (names[name].detach().double().requires_grad_() for name in ("logits", "hidden", "head"))
    ids, noise_mask, p_mask = names["ids"], names["noise_mask"], names["p_mask"].double()

    def mdlm(logits):
        nll = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        return (nll * noise_mask / p_mask).sum() / ids.numel()

    assert 0 < noise_mask.sum() < ids.numel()
    mdlm(x).backward()
    expected = mdlm(h @ w.T)
    expected.backward()
    torch.testing.assert_close(names["out"].total_loss, expected.float())
    for name, leaf in (("logits", x), ("hidden", h), ("head", w)):
        torch.testing.assert_close(names[name].grad, leaf.grad.float())

    run(primitives, names)
    for prefix, logits in (("", x), ("linear_", h @ w.T)):
        nll = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        torch.testing.assert_close(names[prefix + "nll"], nll.float())
        torch.testing.assert_close(names[prefix + "loss"], (nll * names["weights"]).sum().float())

    for leaf in (h, w):
        leaf.grad = names["hidden"].grad = names["head"].grad = None
    run(statistics, names)
    log_p = {"stats": F.log_softmax(x, -1), "out": F.log_softmax(h @ w.T / 0.7, -1)}
    picked = {key: value.gather(-1, ids[..., None])[..., 0] for key, value in log_p.items()}
    entropy = {key: -(value.exp() * value).sum(-1) for key, value in log_p.items()}
    for key in log_p:
        torch.testing.assert_close(names[key].log_probs, picked[key].float())
        torch.testing.assert_close(names[key].entropy, entropy[key].float())
    assert torch.equal(names["old"], names["out"].log_probs)
    (picked["out"] + 0.01 * entropy["out"]).sum().backward()
    for name, leaf in (("hidden", h), ("head", w)):
        torch.testing.assert_close(names[name].grad, leaf.grad.float())

    for leaf in (h, w):
        leaf.grad = names["hidden"].grad = names["head"].grad = None
    advantages = torch.randn(ids.shape)
    run(objective.replace("torch.randn(B, L)", "advantages"), names | {"advantages": advantages})

    def plain(h, w):
        log_p = F.log_softmax(h @ w.T / 0.7, -1).gather(-1, ids[..., None])[..., 0]
        ratio = (log_p - log_p.detach()).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()

    exact = torch.autograd.grad(plain(h, w), (h, w))
    rounded = [names[name].detach().requires_grad_() for name in ("hidden", "head")]
    same_dtype = torch.autograd.grad(plain(*rounded), rounded)
    for name, e, p in zip(("hidden", "head"), exact, same_dtype, strict=True):
        assert_as_good_as_plain([names[name].grad], [e], largest_error([p], [e]), name, reduction_sizes([h, w]))


def framework(code):
    """What its losses are afterwards, and what the report says."""
    automodel = pytest.importorskip("dllm_kernels.integrations.nemo_automodel")
    theirs = pytest.importorskip("nemo_automodel.components.loss.dllm_loss")
    try:
        run(code, {})
        assert theirs.MDLMCrossEntropyLoss is ours.MDLMCrossEntropyLoss
    finally:
        automodel.unpatch()
    assert theirs.MDLMCrossEntropyLoss is not ours.MDLMCrossEntropyLoss


def trainer(code):
    """The class that the examples build on: the loss is the mixin's. ``test_integrations_transformers.py`` trains with it."""
    transformers = pytest.importorskip("transformers")
    names = {}
    run(code, names)
    made, mixin = names["DiffusionTrainer"], names["MaskedDiffusionTrainerMixin"]
    assert issubclass(made, transformers.Trainer)
    assert made.compute_loss is mixin.compute_loss is not transformers.Trainer.compute_loss
    assert callable(names["MaskedDiffusionCollator"])


# Name of a paragraph -> what runs its fences, all of them: it takes as many as the paragraph has.
HERE = {
    "dllm_kernels": drop_in,
    "Two commands": two_commands,
    "What it does": losses_and_primitives,
    "NeMo AutoModel": framework,
    "Hugging Face Trainer": trainer,
}


@pytest.mark.parametrize("paragraph", HERE)
def test_the_example_runs_as_printed(paragraph):
    HERE[paragraph](*fences(README.read_text())[paragraph])


def not_run(text):
    """Paragraphs with a fence that no test runs, or without one that a test looks for."""
    found, runners = fences(text), HERE
    missing = found.keys() ^ runners.keys()
    for paragraph in found.keys() & runners.keys():
        if len(inspect.signature(runners[paragraph]).parameters) != len(found[paragraph]):
            missing.add(paragraph)
    return missing


def test_no_fence_goes_without_a_test():
    text = README.read_text()
    assert not_run(text) == set()
    assert sum(len(codes) for codes in fences(text).values()) == text.count("```") / 2


@pytest.mark.parametrize("fence", ["```python\nx = 1\n```", "~~~\nmake x\n~~~", "- a list\n\n  ```py\n  x = 1\n  ```"])
def test_a_fence_more_or_less_is_found(fence):
    """In a paragraph of its own, and in one that has fences already."""
    text = README.read_text()
    assert not_run(f"{text}\n\n**Something new.** See:\n\n{fence}\n") == {"Something new"}
    assert not_run(text.replace("## Inside a framework", f"{fence}\n\n## Inside a framework")) == {"What it does"}
    assert not_run(text.replace("## How it is checked", f"{fence}\n\n## How it is checked")) == {"On many GPUs"}
    assert not_run(text.split("**NeMo AutoModel**")[0]) == {"NeMo AutoModel", "Hugging Face Trainer"}


def test_the_other_documents_hold_no_code():
    """Their fences are pictures of the tree."""
    for path in {*ROOT.glob("*.md")} - {README}:
        for codes in fences(path.read_text()).values():
            assert all(code.startswith("dllm_kernels/\n") for code in codes), path


def test_the_first_claim_says_what_was_not_run():
    """Beside the first claim, not at the end."""
    first = README.read_text().split("\n\n")[1]
    assert "Triton kernels" in first
    assert "have not been run on a GPU yet" in " ".join(first.split())
