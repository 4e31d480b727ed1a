"""Run the kernels on the GPU where there is one, else on CPU tensors under Triton's interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import pytest

if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items):
    no_gpu = pytest.mark.skip(reason="needs a CUDA or ROCm device")
    for item in items:
        if "gpu" in item.keywords and DEVICE == "cpu":
            item.add_marker(no_gpu)


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    return request.param
