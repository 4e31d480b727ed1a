"""Changing the caller's default device has no effect, because the package creates tensors on explicit devices."""

import ast
import re
import threading
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import dllm_kernels
from dllm_kernels import corruption

FACTORIES = set(
    re.split(
        " ",
        "empty zeros ones full arange range tensor as_tensor asarray scalar_tensor rand randn randint randperm normal "
        "eye linspace logspace empty_strided tril_indices triu_indices complex polar sparse_coo_tensor",
    )
)
FILES = sorted(Path(dllm_kernels.__file__).parent.rglob("*.py"))
IDS, SUPERVISED = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.bool)


def without_device(source):
    """Return the lines that call a factory function of torch without a device."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in FACTORIES:
            present = {keyword.arg for keyword in call.keywords}
            if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch" and "device" not in present:
                yield call.lineno


def test_the_search_finds_a_call_without_device():
    assert list(without_device("import torch\ntorch.empty(3, dtype=torch.int64)\ntorch.ones(2, device='cpu')")) == [2]


@pytest.mark.everyday(45)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_tensor_is_created_on_an_explicit_device(file):
    assert list(without_device(file.read_text())) == []


def in_a_new_thread(function):
    """Run in a thread that has not drawn anything yet."""
    out = []
    thread = threading.Thread(target=lambda: out.append(function()))
    thread.start()
    thread.join()
    assert out, "the thread ended in an exception"
    return out[0]


def drawn():
    generator = torch.Generator("cpu").manual_seed(3)
    masks = corruption.corrupt_uniform(IDS, SUPERVISED, 99, generator=generator)
    return (*masks, corruption.sample_level(4, generator=generator))


def test_corruption_under_another_default_device():
    expected = in_a_new_thread(drawn)

    def under_meta():
        with torch.device("meta"):
            first = drawn()
        return first, drawn()

    for got in in_a_new_thread(under_meta):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_corruption_after_a_first_call_with_fake_tensors():
    expected = in_a_new_thread(drawn)

    def fake_first():
        try:
            with FakeTensorMode() as mode:
                corruption.corrupt_uniform(mode.from_tensor(IDS), mode.from_tensor(SUPERVISED), 99)
        except Exception:  # which has no values to read
            return drawn()
        return drawn()

    assert all(torch.equal(a, b) for a, b in zip(expected, in_a_new_thread(fake_first), strict=True))
