"""Every fence of README runs as printed, and gives the numbers in the text around it.

``test_docs.py`` tests the pages of docs.
"""

import re

import pytest
import torch
import torch.nn.functional as F

import dllm_kernels
from tests.support.readme import DOCS, README, blocks, fences, python, run

ROOT = README.parent


def test_the_code_runs_as_printed():
    """Values and gradients equal those of the plain formulas in float64."""
    _, on_gpu = python(README.read_text())
    torch.manual_seed(0)
    n = {}
    run(on_gpu, n)
    ids, noise_mask, p_mask = n["ids"], n["noise_mask"], n["p_mask"].double()
    assert 0 < noise_mask.sum() < ids.numel()

    def nll(logits):
        return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")

    h, w = (n[name].detach().double().requires_grad_() for name in ("hidden", "head"))
    expected = (nll(h @ w.T) * noise_mask / p_mask).sum() / ids.numel()
    expected.backward()
    torch.testing.assert_close(n["out"].total_loss, expected.float())
    for name, leaf in (("hidden", h), ("head", w)):
        torch.testing.assert_close(n[name].grad, leaf.grad.float())


def test_the_two_commands():
    """They do not run here: ``make test`` is this suite, and ``test_demo.py`` runs the program of ``make demo``."""
    shell = [code for language, code in blocks(README.read_text()) if language == "sh"]
    commands = [line.split("#")[0].strip() for line in shell[0].splitlines()]
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


@pytest.mark.parametrize(("name", "most"), [("README.md", 140), ("CONTRIBUTING.md", 150)])
def test_it_is_short(name, most):
    assert len((ROOT / name).read_text().splitlines()) <= most


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
    assert f"Version {dllm_kernels.__version__}, alpha:" in first
    assert "Development Status :: 3 - Alpha" in (ROOT / "pyproject.toml").read_text()
    assert f"Version {dllm_kernels.__version__}, alpha: the Triton kernels have not been run on a GPU yet" in " ".join(
        (DOCS / "index.md").read_text().split()
    )


def test_the_first_screen_is_that_of_the_site():
    """The same picture, and the same loop."""
    front, readme = (DOCS / "index.md").read_text(), README.read_text()
    assert "](docs/memory.svg)" in readme
    assert "](memory.svg)" in front
    assert python(front)[0] == python(readme)[0]
