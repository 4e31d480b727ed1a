"""The examples in docstrings run, and print what they say."""

import doctest
import inspect
import math

import pytest
import torch

import dllm_kernels as ours

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
