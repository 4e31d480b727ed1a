"""``python -m dllm_kernels.report``: the information that it prints, and the information that it must not print."""

import getpass
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils import collect_env

import dllm_kernels
from dllm_kernels import report

ROOT = Path(__file__).parents[2]


def facts():
    ours, _ = report.report().split("\n\n", 1)
    return dict(line.split(": ", 1) for line in ours.splitlines())


@pytest.fixture(autouse=True, scope="module")
def environment():
    """The environment report of torch, which runs many commands, computed once."""
    patch = pytest.MonkeyPatch()
    found = collect_env.get_env_info()
    patch.setattr(collect_env, "get_env_info", lambda: found)
    yield found
    patch.undo()


@pytest.fixture
def plain(monkeypatch):
    """Unset all variables, and do not interpret Triton."""
    for name in report.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_versions_and_backends(plain):
    found = facts()
    assert found["dllm_kernels"] == dllm_kernels.__version__
    assert found["CPU threads of torch"] == str(torch.get_num_threads())
    assert not found.keys() & set(report.VARIABLES)
    assert found["backend=auto on cpu"] == found["backend=torch on cpu"] == "torch, right"
    assert found["backend=triton on cpu"].startswith("no, backend='triton' ")
    assert "no-such-package" not in found


def test_the_report_of_torch(plain, environment):
    lines = report.report().split("\n\n", 1)[1].splitlines()
    assert f"PyTorch version: {torch.__version__}" in lines
    assert f"Is CUDA available: {torch.cuda.is_available()}" in lines
    assert any(line.startswith(f"Python version: {platform.python_version()} ") for line in lines)
    if environment.pip_packages is not None:
        assert f"[pip3] numpy=={np.__version__}" in lines


def test_packages_that_are_not_installed_are_not_listed(plain, monkeypatch):
    monkeypatch.setattr(report, "BESIDE", ("torch", "no-such-package"))
    assert "no-such-package" not in facts()
    assert facts()["torch"] == importlib.metadata.version("torch")  # of a CUDA wheel, without +cu130


@pytest.mark.exhaustive  # in a process that imports everything anew
def test_kernels_through_the_interpreter(plain, monkeypatch):
    """Also with Triton 3.6 and NumPy 2.4, whose interpreter the package fixes."""
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "error", "-m", "dllm_kernels.report"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True
    )
    assert "backend=triton on cpu: triton, right" in done.stdout.splitlines()
    assert "TRITON_INTERPRET: 1" in done.stdout.splitlines()
    assert not done.stderr


def test_the_report_contains_no_path_machine_or_user(plain, monkeypatch, environment):
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-of-somebody")
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", str(ROOT))
    libraries = f"Probably one of the following:\n{ROOT}/lib/libcudnn.so.9.1\nC:\\Users\\somebody\\cudnn64_9.dll"
    found = environment._replace(cudnn_version=libraries, nvidia_driver_version="580.1", python_platform="somebody")
    monkeypatch.setattr(collect_env, "get_env_info", lambda: found)
    text = report.report()
    private = [str(ROOT), str(Path.home()), sys.prefix, "somebody", platform.node(), getpass.getuser()]
    assert not [word for word in private if len(word) > 4 and word in text]
    assert not re.search(r"(?<!\w)/\w|\w/\w+/", text)  # "N/A" and "GNU/Linux" are no paths
    assert "\\" not in text
    assert {"libcudnn.so.9.1", "cudnn64_9.dll"} <= set(text.splitlines())
    assert "DLLM_KERNELS_BACKEND: (no word)" in text
    assert "backend=auto on cpu: no, DLLM_KERNELS_BACKEND must be one of auto, triton, torch, got (no word)" in text


@pytest.mark.parametrize("name", ["DLLM_KERNELS_BACKEND", "DLLM_KERNELS_CHECK"])
def test_a_hidden_value_is_not_shown_in_an_error(plain, monkeypatch, name):
    monkeypatch.setenv(name, "my secret")
    found = facts()
    assert found[name] == "(no word)"
    assert found["backend=auto on cpu"].startswith(f"no, {name} must be one of ")
    assert not any("secret" in value for value in found.values())
    monkeypatch.setenv(name, "foo")
    assert found.keys() == facts().keys()
    assert facts()["backend=auto on cpu"].endswith("got 'foo'")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_report_without_gradient_mode(plain, mode):
    with mode():
        assert facts()["backend=torch on cpu"] == "torch, right"


def broken(*args, **options):
    out = dllm_kernels.ops.weighted_nll(*args, **options)
    return out._replace(loss=out.loss + 1)


def one_gradient_broken(logits, *args, **options):
    out = dllm_kernels.ops.weighted_nll(logits, *args, **options)
    return out._replace(loss=out.loss + 2 * (logits[0, 0] - logits[0, 0].detach()))


def breaks(*args, **options):
    raise RuntimeError(f"no compiler in {ROOT}")


@pytest.mark.parametrize(
    ("function", "reported"),
    [
        (broken, "torch, WRONG by 1.0e+00"),
        (one_gradient_broken, "torch, WRONG by 2.0e+00"),
        (breaks, "fails, RuntimeError"),
    ],
)
def test_a_loss_that_is_wrong_or_fails_is_reported(plain, monkeypatch, function, reported):
    monkeypatch.setattr(dllm_kernels, "weighted_nll", function)
    assert facts()["backend=torch on cpu"] == reported


def test_every_backend_is_tried_on_a_gpu(plain, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report, "_tried", lambda device, backend: f"{backend} {device}")
    found = facts()
    assert found["backend=triton on cuda"] == "triton cuda"
    assert found["backend=torch on cpu"] == "torch cpu"
