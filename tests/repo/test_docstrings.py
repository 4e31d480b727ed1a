"""The examples in docstrings run and print the documented output."""

import doctest
import inspect
import math
import re

import pytest
import torch

import dllm_kernels as ours
from dllm_kernels import distributed, mtp
from dllm_kernels.integrations import nemo_automodel, speculators, transformers, trl

EXAMPLES = doctest.DocTestFinder(recurse=False)
PUBLIC = {name: vars(ours)[name] for name in ours.__all__}
# Calls that take several tensors of a meaning of their own, or a function, or give back more than one thing.
NOT_OBVIOUS = {
    *("DFlashDecayLoss", "DLLMCollator", "HybridDiffusionLLMLoss", "MDLMCrossEntropyLoss", "calculate_mtp_loss"),
    *("complementary", "corrupt_blockwise", "encoder_ar_loss", "gumbel_topk_mask", "linear_row_objective"),
    *("row_objective", "row_stats", "token_log_probs", "weighted_linear_nll"),
}


def test_what_is_not_obvious_has_an_example():
    assert {name for name in PUBLIC if ">>>" in (inspect.getdoc(PUBLIC[name]) or "")} >= NOT_OBVIOUS


@pytest.mark.parametrize("name", [n for n, o in PUBLIC.items() if ">>>" in (inspect.getdoc(o) or "")])
def test_the_example_of(name, capsys):
    (example,) = EXAMPLES.find(PUBLIC[name], name, globs={**PUBLIC, "torch": torch, "math": math})
    assert doctest.DocTestRunner().run(example).failed == 0, capsys.readouterr().out


def arguments_of(function):
    """What its docstring lists, one or several a line."""
    _, _, listed = (inspect.getdoc(function) or "").partition("Args:\n")
    lines = re.findall(r"^    (\*{0,2}\w+(?:, \w+)*):", listed.partition("\n\n")[0], re.MULTILINE)
    return [name.lstrip("*") for line in lines for name in line.split(", ")]


def described():
    """Public functions, and the public methods that public classes of ours define, each once."""
    modules = [ours, distributed, mtp, nemo_automodel, speculators, transformers, trl]
    things = [thing for module in modules for name, thing in vars(module).items() if not name.startswith("_")]
    found = [thing for thing in things if inspect.isfunction(thing)]
    for owner in {base for thing in things if inspect.isclass(thing) for base in thing.__mro__}:
        methods = [value for name, value in vars(owner).items() if not name.startswith("_") or name == "__call__"]
        found += [m.__func__ if isinstance(m, (classmethod, staticmethod)) else m for m in methods]
    of_ours = {f for f in found if inspect.isfunction(f) and f.__module__.startswith("dllm_kernels.")}
    return sorted(of_ours, key=lambda f: (f.__module__, f.__qualname__))


def test_shared_descriptions_are_inserted():
    """In functions, in classes, and in a method that a class inherits."""
    docs = [inspect.getdoc(thing) or "" for thing in (*described(), *PUBLIC.values())]
    assert not [doc for doc in docs if re.search(r"^ *\w+: \{\w+\}", doc, re.MULTILINE)]
    assert "the logits. In a drafter's Markov head, u is" in " ".join(
        ours.DFlashDecayLoss.forward_fused.__doc__.split()
    )
    assert "extra: low-rank second part" in ours.MDLMCrossEntropyLoss.forward_fused.__doc__
    assert max(map(len, "\n".join(docs).splitlines())) <= 120


@pytest.mark.parametrize("function", described(), ids=lambda f: f"{f.__module__}.{f.__qualname__}")
def test_every_argument_is_described_in_its_place(function):
    """Where arguments are listed at all: all of them, in their order, and nothing else."""
    listed = arguments_of(function)
    assert listed in ([], [name for name in inspect.signature(function).parameters if name not in ("self", "cls")])
