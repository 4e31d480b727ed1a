"""The check of ids out of range: the values that enable it, and the names of the two kinds of ids in its errors."""

import re

import pytest
import torch

from dllm_kernels import SCDDLoss
from dllm_kernels.ops import token_nll

B, L, V = 2, 3, 10
X, Y, ON = torch.randn(B, L, V), torch.zeros(B, L, dtype=torch.long), torch.ones(B, L)
BAD = torch.tensor([[0, V, 0], [0, 0, 0]])


@pytest.mark.parametrize("word", ["1", "true", "TRUE", "Yes", "on", " 1 "])
def test_values_that_enable_the_check(word, monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_CHECK", word)
    with pytest.raises(IndexError, match=r"^targets must lie in \[0, 10\) or be -100, got 10 at position \(0, 1\)$"):
        token_nll(X, BAD)


@pytest.mark.parametrize("word", ["", "0", "false", "No", "off"])
def test_values_that_disable_the_check(word, monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_CHECK", word)
    assert token_nll(X, BAD).nll[0, 1].isnan()


@pytest.mark.parametrize("word", ["2", "ture", "-1", "None"])
def test_other_values_are_errors(word, monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_CHECK", word)
    message = f"DLLM_KERNELS_CHECK must be one of 1, true, yes, on, 0, false, no, off or empty, got {word.lower()!r}"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        token_nll(X, Y)
    assert token_nll(X, Y, check_targets=False).nll.isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("max_ratio", [0.1, 0.0])
def test_scdd_names_the_argument_with_the_bad_id(max_ratio, compiled, monkeypatch):
    """``noisy_input_ids`` are checked only at supervised positions. MASK is a valid id."""
    loss = SCDDLoss(V - 1, max_ratio=max_ratio)
    torch._dynamo.reset()

    def loss_of(y, z, mask):
        return loss(X, y, mask, torch.full((B, L), 0.5), mask, noisy_input_ids=z).total_loss

    function = torch.compile(loss_of, backend="eager", fullgraph=True) if compiled else loss_of

    def call(y=Y, z=Y, mask=ON):
        return function(y, z, mask.clone())

    monkeypatch.setenv("DLLM_KERNELS_CHECK", "1")
    for bad in (V, V + 1, -1, -100):
        message = rf"^noisy_input_ids must lie in \[0, 10\), got {bad} at position \(0, 1\)$"
        with pytest.raises(IndexError, match=message):
            call(z=torch.where(BAD == V, bad, Y))
    with pytest.raises(IndexError, match=r"^target_ids must lie in \[0, 10\) or be -100, got 10 at position \(0, 1\)$"):
        call(y=BAD)
    assert call(z=torch.where(ON == 1, V - 1, Y), y=torch.where(BAD == V, -100, Y)).isfinite()
    mask = (BAD != V).float()
    assert call(z=BAD + 1, mask=mask).isfinite()
