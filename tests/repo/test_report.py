"""``python -m dllm_kernels.report``: the information that it prints, and the information that it must not print."""

import getpass
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dllm_kernels
from dllm_kernels import report

ROOT = Path(__file__).parents[2]


def facts():
    return dict(line.split(": ", 1) for line in report.report().splitlines())


@pytest.fixture
def plain(monkeypatch):
    """No variable set, and Triton not interpreted."""
    for name in report.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_versions_device_and_backends(plain):
    found = facts()
    assert found["dllm_kernels"] == dllm_kernels.__version__
    assert found["python"].endswith(platform.python_version())
    assert found["torch"].startswith(torch.__version__ + ", built for ")
    assert f"{torch.get_num_threads()} threads" in found["cpu"]
    assert not found.keys() & set(report.VARIABLES)
    assert found["backend=auto on cpu"] == found["backend=torch on cpu"] == "torch, right"
    assert found["backend=triton on cpu"].startswith("no, backend='triton' ")
    assert found["numpy"] == np.__version__
    assert "no-such-package" not in found


def test_what_is_not_installed_is_not_named(plain, monkeypatch):
    monkeypatch.setattr(report, "BESIDE", ("torch", "no-such-package"))
    assert "no-such-package" not in facts()


@pytest.mark.exhaustive  # a process that imports all anew
def test_kernels_through_the_interpreter(plain, monkeypatch):
    triton = pytest.importorskip("triton")
    version, numpy = (tuple(map(int, v.split(".")[:2])) for v in (triton.__version__, np.__version__))
    # The interpreter of Triton 3.6 fails with NumPy 2.4, unless it is mended as in tests/support/interpreter.py: a
    # report says so.
    found = "fails, InterpreterError" if version < (3, 7) and numpy >= (2, 4) else "triton, right"
    command = [sys.executable, "-W", "error", "-m", "dllm_kernels.report"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=True
    )
    assert f"backend=triton on cpu: {found}" in done.stdout.splitlines()
    assert "TRITON_INTERPRET: 1" in done.stdout.splitlines()
    assert not done.stderr


def test_it_names_no_path_machine_or_user(plain, monkeypatch):
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-of-somebody")
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", str(ROOT))
    text = report.report()
    private = [str(ROOT), str(Path.home()), sys.prefix, "somebody", platform.node(), getpass.getuser()]
    assert not [word for word in private if len(word) > 4 and word in text]
    assert "/" not in text.replace("built for", "")
    assert "\\" not in text
    assert "DLLM_KERNELS_BACKEND: (no word)" in text
    assert "backend=auto on cpu: fails, ValueError" in text  # whose message has the path


def broken(*args, **options):
    out = dllm_kernels.ops.weighted_nll(*args, **options)
    return out._replace(loss=out.loss + 1)


def one_gradient_broken(logits, *args, **options):
    out = dllm_kernels.ops.weighted_nll(logits, *args, **options)
    return out._replace(loss=out.loss + 2 * (logits[0, 0] - logits[0, 0].detach()))


def breaks(*args, **options):
    raise RuntimeError(f"no compiler in {ROOT}")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (broken, "torch, WRONG by 1.0e+00"),
        (one_gradient_broken, "torch, WRONG by 2.0e+00"),
        (breaks, "fails, RuntimeError"),
    ],
)
def test_a_loss_that_is_wrong_or_fails_is_said(plain, monkeypatch, function, said):
    monkeypatch.setattr(dllm_kernels, "weighted_nll", function)
    assert facts()["backend=torch on cpu"] == said


def test_gpus_are_named_by_their_kind(plain, monkeypatch):
    """Those that are not there: what is tried on them fails, and the report goes on."""
    kinds = [
        SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=139 * 2**30),
        SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942", total_memory=192 * 2**30),
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: kinds[i])
    monkeypatch.setattr(report, "_tried", lambda device, backend: f"{backend} {device}")
    found = facts()
    assert found["gpu 0"] == "NVIDIA H200, sm_90, 139 GiB"
    assert found["gpu 1"] == "AMD Instinct MI300X, gfx942, 192 GiB"
    assert "gpu" not in found
    assert found["backend=triton on cuda"] == "triton cuda"
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert facts()["torch"].endswith("built for ROCm 7.1")
