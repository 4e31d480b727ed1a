"""Imports point one way: losses, mtp, corruption -> ops ~> kernels -> triton, and the oracle stands alone."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dllm_kernels"


def imports(path):
    """(module, whether at the top level of the file) for every import of a file."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, id(node) in top
            yield from ((f"{node.module}.{alias.name}", id(node) in top) for alias in node.names)


def files(*parts):
    place = PACKAGE.joinpath(*parts)
    return [place] if place.suffix == ".py" else sorted(place.rglob("*.py"))


def within(module, *packages):
    return any(module == p or module.startswith(p + ".") for p in packages)


def everything():
    return sorted(PACKAGE.rglob("*.py"))


def layer(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", everything(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_triton_only_in_kernels(path):
    if layer(path) != "kernels":
        assert not [m for m, _ in imports(path) if within(m, "triton")]


@pytest.mark.parametrize("path", everything(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_distributed_only_in_distributed(path):
    if layer(path) not in {"distributed", "integrations"}:
        assert not [m for m, _ in imports(path) if within(m, "torch.distributed")]


@pytest.mark.parametrize("path", everything(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_frameworks_only_in_integrations(path):
    if layer(path) != "integrations":
        assert not [
            m for m, _ in imports(path) if within(m, "nemo_automodel", "transformers", "dllm_kernels.integrations")
        ]


UPPER = ("dllm_kernels.losses", "dllm_kernels.mtp", "dllm_kernels.corruption", "dllm_kernels.collate")


def test_ops_do_not_look_up_and_reach_kernels_and_distributed_lazily():
    for path in files("ops"):
        for module, at_top in imports(path):
            assert not within(module, *UPPER), (path, module)
            if within(module, "dllm_kernels.kernels", "dllm_kernels.distributed"):
                assert not at_top, (path, module)


def test_kernels_know_only_each_other():
    for path in files("kernels"):
        for module, _ in imports(path):
            if within(module, "dllm_kernels"):
                assert within(module, "dllm_kernels.kernels"), (path, module)


def test_losses_and_their_like_do_not_reach_past_ops():
    for part in ("losses", "mtp.py", "corruption.py", "collate.py"):
        for path in files(part):
            for module, at_top in imports(path):
                assert not within(module, "dllm_kernels.kernels"), (path, module)
                if within(module, "dllm_kernels.distributed"):
                    assert not at_top, (path, module)


def test_kernels_know_no_modules():
    for path in files("kernels"):
        assert "nn.Module" not in path.read_text(), path


def test_the_oracle_stands_alone():
    allowed = {"torch", "reference", *sys.stdlib_module_names}
    for path in sorted((ROOT / "reference").rglob("*.py")):
        for module, _ in imports(path):
            assert module.split(".")[0] in allowed, (path, module)


def run(code, **environment):
    command = [sys.executable, "-c", code]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_works_without_triton():
    run("""
import sys
sys.modules["triton"] = None
import torch
from dllm_kernels import DFlashDecayLoss, MDLMCrossEntropyLoss, corrupt_blockwise
ids, ones = torch.randint(0, 9, (2, 8)), torch.ones(2, 8)
noisy, noise, p = corrupt_blockwise(ids, ones, 9, block_size=4)
logits = torch.randn(2, 8, 10, requires_grad=True)
MDLMCrossEntropyLoss()(logits, ids, noise, p, ones).total_loss.backward()
DFlashDecayLoss().forward_fused(torch.randn(2, 8, 4, requires_grad=True), torch.randn(10, 4), ids, ones).total_loss.backward()
try:
    MDLMCrossEntropyLoss(backend="triton")(logits, ids, noise, p, ones)
except ValueError as error:
    assert "triton is not installed" in str(error), error
else:
    raise AssertionError("an explicit choice of triton was switched silently")
""")


def test_importing_loads_neither_triton_nor_frameworks():
    loaded = run("""
import sys, torch
before = set(sys.modules)
import dllm_kernels
print(" ".join(sorted({m.split(".")[0] for m in set(sys.modules) - before})))
print("torch.distributed.tensor" in set(sys.modules) - before)
""").splitlines()
    assert not {"triton", "transformers", "nemo_automodel"} & set(loaded[0].split())
    assert loaded[1] == "False"


def test_importing_takes_under_50_ms_on_top_of_torch(tmp_path):
    """From the second time on, as Python caches bytecode. Processor time: what others do meanwhile is not counted."""
    code = "import torch, time; start = time.process_time(); import dllm_kernels; print(time.process_time() - start)"
    cached = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    assert min(float(run(code, **cached)) for _ in range(5)) < 0.05
