"""The examples in docstrings run and print the documented output."""

import doctest
import inspect
import math
import re

import pytest
import torch

import dllm_kernels as ours
from dllm_kernels import distributed, mtp
from dllm_kernels.integrations import names, nemo_automodel, speculators, transformers, trl
from tests.support.readme import ROOT

EXAMPLES = doctest.DocTestFinder(recurse=False)
PUBLIC = {name: getattr(ours, name) for name in ours.__all__}
# Calls with several tensors of different meaning, with a function argument, or with several results.
COMPLEX_CALLS = {
    *("DFlashDecayLoss", "DLLMCollator", "HybridDiffusionLLMLoss", "MDLMCrossEntropyLoss", "calculate_mtp_loss"),
    *("complementary", "corrupt_blockwise", "encoder_ar_loss", "gumbel_topk_mask", "LinearLogits"),
    *("row_objective", "row_stats", "token_log_probs"),
}


def test_complex_calls_have_an_example():
    assert {name for name in PUBLIC if ">>>" in (inspect.getdoc(PUBLIC[name]) or "")} >= COMPLEX_CALLS


def test_examples_fit_beside_both_menus():
    """At 1280 pixels, 85 columns of code are visible."""
    source = "\n".join(path.read_text() for path in (ROOT / "dllm_kernels").rglob("*.py"))
    examples = re.findall(r"^ +((?:>>>|\.\.\.) .*)$", source, re.MULTILINE)
    assert len(examples) > 100
    assert [line for line in examples if len(line) > 85] == []


@pytest.mark.parametrize("name", [n for n, o in PUBLIC.items() if ">>>" in (inspect.getdoc(o) or "")])
def test_the_example_of(name, capsys):
    (example,) = EXAMPLES.find(PUBLIC[name], name, globs={**PUBLIC, "torch": torch, "math": math})
    assert doctest.DocTestRunner().run(example).failed == 0, capsys.readouterr().out


def documented_arguments(function):
    """Return the arguments, or the fields of a named tuple, listed in the docstring, one or several per line."""
    text = (inspect.getdoc(function) or "").replace("\nAttributes:\n", "\nArgs:\n")
    _, _, listed = text.partition("Args:\n")
    lines = re.findall(r"^    (\*{0,2}\w+(?:, \w+)*):", listed.partition("\n\n")[0], re.MULTILINE)
    return [name.lstrip("*") for line in lines for name in line.split(", ")]


def described():
    """Return the public functions and named tuples, and the public methods of the package's classes, each once."""
    modules = [ours, distributed, mtp, names, nemo_automodel, speculators, transformers, trl]
    public_objects = [
        public_object for module in modules for name, public_object in vars(module).items() if not name.startswith("_")
    ]
    found = [public for public in public_objects if inspect.isfunction(public) or hasattr(public, "_fields")]
    for owner in {
        base for public_object in public_objects if inspect.isclass(public_object) for base in public_object.__mro__
    }:
        methods = [value for name, value in vars(owner).items() if not name.startswith("_") or name == "__call__"]
        found += [m.__func__ if isinstance(m, (classmethod, staticmethod)) else m for m in methods]
    found = filter(lambda f: inspect.isfunction(f) or inspect.isclass(f), found)
    own = {f for f in found if f.__module__.startswith("dllm_kernels.")}
    return sorted(own, key=lambda f: (f.__module__, f.__qualname__))


@pytest.mark.parametrize("function", described(), ids=lambda f: f"{f.__module__}.{f.__qualname__}")
def test_every_argument_is_described_in_order(function):
    """If a docstring lists arguments, it lists all of them, in order, and nothing else."""
    listed = documented_arguments(function)
    assert listed in ([], [name for name in inspect.signature(function).parameters if name not in ("self", "cls")])
