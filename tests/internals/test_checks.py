"""Choice of the backend where Triton is missing."""

import re
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest

from dllm_kernels._checks import _backend


@pytest.mark.parametrize("module", [None, ModuleType("triton")], ids=["blocked", "a stub"])
def test_a_gpu_without_triton_warns_once(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.setattr(_backend, "triton_available", _backend.triton_available.__wrapped__)
    monkeypatch.delenv("DLLM_KERNELS_BACKEND", raising=False)
    _backend._warn_without_triton.cache_clear()
    on_gpu, on_cpu = (SimpleNamespace(is_cuda=cuda, device=SimpleNamespace(type="cuda")) for cuda in (True, False))
    message = r"^tensors on cuda take the slower PyTorch path, because triton is not installed; .*: pip install 'triton"
    with pytest.warns(UserWarning, match=message):
        assert _backend.use_triton("auto", on_gpu) is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(_backend.use_triton("auto", t) for t in (on_gpu, on_cpu))
        assert not _backend.use_triton("torch", on_gpu)
    _backend._warn_without_triton.cache_clear()
    with pytest.raises(ValueError, match=r"^backend='triton' was asked for, but triton is not installed; GPU builds"):
        _backend.use_triton("triton", on_gpu)


def test_a_triton_that_is_too_old():
    package = pytest.importorskip("dllm_kernels.backends.triton")
    message = "triton must be of version 3.6 or later, got 3.5.1; upgrade it, or pass backend='torch' or set "
    with pytest.raises(ImportError, match=re.escape(message)):
        package.check_version("3.5.1")
    for version in ("3.6.0", "3.10.0", "3.6.0+git1a2b", "4.0.0a1"):
        package.check_version(version)
