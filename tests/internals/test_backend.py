"""Choice of the backend where Triton is missing."""

import warnings
from types import SimpleNamespace

import pytest

from dllm_kernels._backends import _backend


def test_a_gpu_without_triton_warns_once(monkeypatch):
    monkeypatch.setattr(_backend, "triton_available", lambda: False)
    monkeypatch.delenv("DLLM_KERNELS_BACKEND", raising=False)
    _backend._warn_without_triton.cache_clear()
    on_gpu, on_cpu = (SimpleNamespace(is_cuda=cuda, device=SimpleNamespace(type="cuda")) for cuda in (True, False))
    message = r"^tensors on cuda take the slower PyTorch path, because triton is not installed; .*: pip install 'triton"
    with pytest.warns(UserWarning, match=message):
        assert not _backend.use_triton("auto", on_gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(_backend.use_triton("auto", t) for t in (on_gpu, on_cpu))
        assert not _backend.use_triton("torch", on_gpu)
    _backend._warn_without_triton.cache_clear()
    with pytest.raises(ValueError, match=r"^backend='triton' was asked for, but triton is not installed; GPU builds"):
        _backend.use_triton("triton", on_gpu)
