"""Every fence of README runs as printed, and gives the numbers in the text around it.

``test_docs.py`` tests the pages of docs, and fences that they share with README.
"""

import re

import pytest
import torch
import torch.nn.functional as F

from tests.support.readme import DOCS, README, blocks, fences, python, run

ROOT = README.parent


def test_the_code_runs_as_printed():
    """Values and gradients equal those of the plain formulas in float64.

    Fences that patch a framework run in ``test_docs.py``.
    """
    from_logits, from_hidden, own, corruption, framework = python(README.read_text())
    assert framework in python((DOCS / "frameworks.md").read_text())
    torch.manual_seed(0)
    n = {}
    run(from_logits, n)
    token_loss = F.cross_entropy(n["model"](n["noisy"]).transpose(1, 2), n["ids"], reduction="none")
    torch.testing.assert_close(n["loss"], (token_loss * n["noise_mask"] / n["p_mask"]).sum() / n["ids"].numel())
    x = n["logits"].detach().double().requires_grad_()
    ids, noise_mask, p_mask = n["ids"], n["noise_mask"], n["p_mask"].double()
    assert 0 < noise_mask.sum() < ids.numel()

    def nll(logits):
        return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")

    def mdlm(logits):
        return (nll(logits) * noise_mask / p_mask).sum() / ids.numel()

    expected = mdlm(x)
    expected.backward()
    torch.testing.assert_close(n["out"].total_loss, expected.float())
    torch.testing.assert_close(n["logits"].grad, x.grad.float())

    run(from_hidden, n)
    h, w = (n[name].detach().double().requires_grad_() for name in ("hidden", "head"))
    expected = mdlm(h @ w.T)
    expected.backward()
    torch.testing.assert_close(n["out"].total_loss, expected.float())
    for name, leaf in (("hidden", h), ("head", w)):
        torch.testing.assert_close(n[name].grad, leaf.grad.float())

    torch.manual_seed(1)
    run(own, n)
    torch.manual_seed(1)
    torch.testing.assert_close(n["loss"], (nll(h @ w.T) * torch.rand(ids.shape)).sum().float())

    run(corruption, n)
    blockwise = n["noise_mask"].sum(1)
    assert torch.equal(n["p_mask"][:, 0], n["level"])
    assert torch.equal(blockwise, (n["level"] * 64).round().clamp(min=1).long())
    again = n["noisy"]
    run(corruption.replace('sample_level(B, method="stratified")', "level"), n)
    assert torch.equal(n["noisy"], again)  # the same seeds


def test_the_two_commands():
    """They do not run here: ``make test`` is this suite, and ``test_demo.py`` runs the program of ``make demo``."""
    commands = [line.split("#")[0].strip() for line in blocks(README.read_text())[0][1].splitlines()]
    assert commands == ["make test", "make demo"]
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert re.search(r"^test: .*\n\t.* -m pytest", makefile, re.MULTILINE)
    assert re.search(r"^demo: .*\n\t.* -m benchmarks train", makefile, re.MULTILINE)


def test_no_fence_goes_without_a_test():
    """Python fences run above; commands are checked in ``test_docs.py``."""
    text = README.read_text()
    assert {language for language, _ in blocks(text)} == {"python", "sh"}
    assert len(blocks(text)) == text.count("```") / 2


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_it_is_short(name):
    assert len((ROOT / name).read_text().splitlines()) <= 150


def anchors(text):
    """Return the anchors of the headings of a page, as GitHub and the site create them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_have_a_target(name):
    links = re.findall(r"\]\(([^)#]+)#?([^)]*)\)", (ROOT / name).read_text())
    assert links
    for target, anchor in links:
        assert target.startswith("https://") or (ROOT / target).exists(), target
        assert target.startswith("https://") or not anchor or anchor in anchors((ROOT / target).read_text()), anchor


def test_the_other_documents_contain_no_code():
    """Their only fences are pictures of the tree."""
    for path in {*ROOT.glob("*.md")} - {README}:
        for codes in fences(path.read_text()).values():
            assert all(code.startswith("dllm_kernels/\n") for code in codes), path


def test_the_first_claim_names_its_limitation():
    """The limitation is stated beside the first claim, not at the end."""
    first = README.read_text().split("\n\n")[1]
    assert "Triton kernels" in first
    assert "have not been run on a GPU yet" in " ".join(first.split())
