"""``python -m dllm_kernels.report``: the information that it prints, and the information that it must not print."""

import contextlib
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


def facts():
    ours, _ = report.report().split("\n\n", 1)
    return dict(line.split(": ", 1) for line in ours.splitlines())


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_versions_and_backends(plain, mode, environment, monkeypatch):
    monkeypatch.setattr(report, "BESIDE", ("torch", "no-such-package"))
    with mode():
        ours, of_torch = report.report().split("\n\n", 1)
    found = dict(line.split(": ", 1) for line in ours.splitlines())
    assert next(iter(found.items())) == ("cpu", "right")  # the verdict comes first
    assert found["dllm_kernels"] == dllm_kernels.__version__
    assert found["torch"] == importlib.metadata.version("torch")  # of a CUDA wheel, without +cu130
    assert found["CPU threads of torch"] == str(torch.get_num_threads())
    assert not found.keys() & {*report.VARIABLES, "no-such-package"}
    assert found["backend=auto on cpu"] == found["backend=torch on cpu"] == "torch, right"
    assert found["backend=triton on cpu"].startswith("no, backend='triton' ")
    lines = of_torch.splitlines()
    assert f"PyTorch version: {torch.__version__}" in lines
    assert any(line.startswith(f"Python version: {platform.python_version()} ") for line in lines)
    assert not any(line.startswith(("Vulnerability", "Flags")) for line in lines)
    if environment.pip_packages is not None:
        assert f"[pip3] numpy=={np.__version__}" in lines


@pytest.mark.exhaustive  # in a process that imports everything anew
def test_kernels_through_the_interpreter(plain, monkeypatch):
    """Also with Triton 3.6 and NumPy 2.4, whose interpreter the package fixes."""
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "error", "-m", "dllm_kernels.report"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "backend=triton on cpu: triton, right" in done.stdout.splitlines()
    assert done.stdout.startswith("cpu: right\n")
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
    without_addresses = re.sub(r"http://www.nvidia.com\S*", "", text)  # of the driver, on a CUDA build without a GPU
    assert not re.search(r"(?<!\w)/\w|\w/\w+/", without_addresses)  # "N/A" and "GNU/Linux" are no paths
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


def broken(function, **wrong):
    """Return the function with results that are changed."""

    def changed(*args, **options):
        out = function(*args, **options)
        return out._replace(**{name: change(getattr(out, name)) for name, change in wrong.items()})

    return changed


def one_gradient_broken(logits, *args, **options):
    out = dllm_kernels.ops.weighted_nll(logits, *args, **options)
    z = logits[0] if isinstance(logits, tuple) else logits
    return out._replace(loss=out.loss + 2 * (z[0, 0] - z[0, 0].detach()))


def rows_of_a_head_broken(logits, *args, **options):
    out = dllm_kernels.ops.weighted_nll(logits, *args, **options)
    return out._replace(loss=1.1 * out.loss) if isinstance(logits, tuple) else out


def one_bit(ids, *args, **options):
    noisy, mask, p_mask = dllm_kernels.corruption.corrupt_uniform(ids, *args, **options)
    return noisy, mask ^ (torch.arange(16) == 0), p_mask


def raises(error):
    def run(*args, **options):
        raise error

    return run


ALL_OPS, OPS = dllm_kernels, dllm_kernels.ops
BOTH_NLLS = "float32 NLL by .*, NLL of a split row by .*"


@pytest.mark.parametrize(
    ("module", "name", "wrong", "reported"),
    [
        (ALL_OPS, "weighted_nll", broken(OPS.weighted_nll, loss=lambda t: t + 1), BOTH_NLLS),
        (ALL_OPS, "weighted_nll", one_gradient_broken, BOTH_NLLS),
        (ALL_OPS, "weighted_nll", broken(OPS.weighted_nll, loss=lambda t: t * float("nan")), "float32 NLL by nan, .*"),
        (ALL_OPS, "weighted_nll", rows_of_a_head_broken, "bfloat16 linear NLL by 9.9e-02"),
        (OPS, "token_log_probs", broken(OPS.token_log_probs, entropy=lambda t: 1.001 * t), "row statistics by 1.0e-03"),
        (ALL_OPS, "corrupt_uniform", one_bit, "corruption by 2.0e[+]00"),
        (OPS, "linear_sample", broken(OPS.linear_sample, ids=lambda t: t.roll(1)), "sample by 4.0e[+]00"),
    ],
)  # fmt: skip
def test_a_wrong_result_is_reported_first(plain, monkeypatch, module, name, wrong, reported):
    monkeypatch.setattr(module, name, wrong)
    monkeypatch.setattr(report, "BACKENDS", ("auto",))
    found = dict(report._devices())
    assert re.fullmatch(f"WRONG: {reported}", found["cpu"])
    assert found["backend=auto on cpu"] == f"torch, {found['cpu']}"


def test_the_limit_of_an_error_is_twice_that_of_the_dtype_beside_rounding():
    def times(low):
        return lambda a, b: [x * (1 if x.dtype == torch.float64 else low) for x in (a, b.sum())]

    leaves = [torch.tensor([1.0, -2.0]).bfloat16(), torch.ones(4).bfloat16()]
    assert report._error(times(1.5), times(0.75), leaves, "cpu") == (0.5, 2 * 0.25 + 2**-7 + 2 * 2**-23)


NO_COMPILER = "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl."


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(NO_COMPILER), NO_COMPILER),
        (RuntimeError(f"no compiler in {ROOT}"), "no compiler in (path)"),
        (RuntimeError("cannot read '/home/some body', nor C:\\Users\\x y\nsecond line"),
         "cannot read (path), nor (path) y"),
        (RuntimeError("see https://pytorch.org/x, not https://me@host.of.mine/x"),
         "see https://pytorch.org/x, not (path)"),
        (AssertionError("libcuda.so cannot found!\nfiles are located at /usr/lib"),
         "AssertionError: libcuda.so cannot found!"),
        (FileNotFoundError(2, "No such file", str(ROOT)), "FileNotFoundError: [Errno 2] No such file: (path)"),
        (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "/tmp/main.c"]), "gcc ended with status 1"),
        (KeyError("uid"), "KeyError: 'uid'"),
        (RuntimeError(), "RuntimeError: "),
    ],
)  # fmt: skip
def test_an_exception_is_reported_by_its_first_line_without_paths(plain, monkeypatch, error, said):
    monkeypatch.setattr(dllm_kernels, "weighted_nll", raises(error))
    found = dict(report._devices())
    assert found["backend=torch on cpu"] == f"fails, {said}"
    assert found["cpu"] == f"not usable: {said}"


@pytest.mark.parametrize("build", ["cuda", "hip"])
def test_a_gpu_that_torch_cannot_use_is_reported_with_the_reason(plain, monkeypatch, build):
    old = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"
    monkeypatch.setattr(torch.version, build, "13.0")
    monkeypatch.setattr(torch.cuda, "_lazy_init", raises(RuntimeError(f"{old}\nor install another torch")))
    monkeypatch.setattr(report, "CHECKS", {})
    found = report._devices()
    assert found[:2] == [("cpu", "right"), ("cuda", f"not usable: {old}")]
    assert not any(name.endswith("on cuda") for name, _ in found)


def test_every_backend_is_tried_on_a_gpu(plain, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report, "_unusable", lambda device: None)
    monkeypatch.setattr(report, "_tried", lambda device, backend: f"{backend}, {device}")
    found = facts()
    assert found["backend=triton on cuda"] == "triton, cuda"
    assert found["backend=torch on cpu"] == "torch, cpu"


ON_A_GPU = """
import os
from unittest import mock
from tests.support import pretended_gpu
from triton.runtime import build
from dllm_kernels import report
from dllm_kernels.backends.triton import _launch

def threads(num_warps):
    build._build("launcher", "main.c", ".", [], [], [], [])

with pretended_gpu.MODE:
    print(*report._devices(), sep="\\n")
    for variables in ({"PATH": "/nowhere"}, {"CC": "/bin/false"}):
        with mock.patch.object(_launch, "threads", threads), mock.patch.dict(os.environ, variables):
            print(report._tried("cuda", "auto"))
"""


@pytest.mark.exhaustive  # ten seconds
def test_the_report_on_a_pretended_gpu_with_and_without_a_compiler():
    pytest.importorskip("triton")
    kept = {k: v for k, v in os.environ.items() if k not in (*report.VARIABLES, "CC")}
    done = subprocess.run(
        [sys.executable, "-c", ON_A_GPU], cwd=ROOT, env=kept, stdout=subprocess.PIPE, text=True, check=True
    )
    *right, first, second = done.stdout.splitlines()
    assert right[:2] == ["('cpu', 'right')", "('cuda', 'right')"]
    assert right[-3:] == [f"('backend={b} on cuda', '{b.replace('auto', 'triton')}, right')" for b in report.BACKENDS]
    assert (first, second) == (f"fails, {NO_COMPILER}", "fails, false ended with status 1")
