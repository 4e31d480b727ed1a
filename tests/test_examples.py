"""Every example runs, is short, and its loss is the one that it says."""

import importlib.util
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
ELSEWHERE = {"huggingface_trainer", "nemo_automodel_patch"}  # beside the tests of their integrations


def load(name):
    """The module of an example; the test is skipped where what it is about is not installed."""
    spec = importlib.util.spec_from_file_location(f"examples.{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] == "dllm_kernels":
            raise
        pytest.skip(f"{error.name} is not installed")
    return module


def test_every_example_is_tested_and_short():
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"__init__"}
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert names == ELSEWHERE | (tested & names)
    for name in names:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80, name


def test_huggingface_encoder():
    example = load("huggingface_encoder")
    before, after = example.main(steps=120)
    assert after < 0.8 * before < torch.inf
