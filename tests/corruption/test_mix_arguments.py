"""Invalid arguments of corrupt_mix and related functions, such as bad probabilities or a vocabulary without MASK."""

import re

import pytest
import torch

from dllm_kernels import IDLMLoss
from dllm_kernels.corruption import corrupt_mix

IDS, ON = torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8)


def mix(mask_token_id=6, vocab_size=7, p=(0.3, 0.3), q=(0.2, 0.2), **options):
    probabilities = {"mask_prob": torch.tensor(p), "uniform_prob": torch.tensor(q)}
    return corrupt_mix(IDS, ON, mask_token_id, vocab_size, **probabilities, seeds=torch.arange(2), **options)


def raises(error, message, function, *args, **options):
    with pytest.raises(error, match="^" + re.escape(message)):
        function(*args, **options)


def test_probabilities_lie_between_0_and_1():
    raises(ValueError, "mask_prob must lie in [0, 1], got values from -0.5 to 0.30000001192092896", mix, p=(0.3, -0.5))
    raises(ValueError, "uniform_prob must lie in [0, 1], got values from -0.25 to 0.5", mix, q=(0.5, -0.25))
    raises(ValueError, "mask_prob must lie in [0, 1], got values from 0.5 to 1.5", mix, p=(0.5, 1.5), q=(0.0, -0.75))
    raises(ValueError, "uniform_prob must lie in [0, 1], got values from nan", mix, q=(0.5, float("nan")))
    raises(ValueError, "mask_prob + uniform_prob must be at most 1, got up to 1.25", mix, p=(0.75, 0.0), q=(0.5, 0.0))
    mix(p=(-1e-7, 1.0), q=(1.0, 1e-6))  # rounding


@pytest.mark.parametrize(("mask_token_id", "vocab_size"), [(7, 7), (100, 7)])
def test_mask_is_one_of_the_tokens(mask_token_id, vocab_size):
    message = (
        f"mask_token_id must lie in [0, vocab_size) = [0, {vocab_size}), MASK being one of the vocab_size tokens, got "
    )
    raises(ValueError, f"{message}{mask_token_id}", mix, mask_token_id, vocab_size)
    noisy, _ = mix(0, 3)
    assert noisy.max() <= 2


def test_auto_balance_is_a_bool():
    for word in ("no", 2, None, 1.0):
        raises(TypeError, f"auto_balance must be a bool, got {type(word).__name__}", IDLMLoss, auto_balance=word)
    loss = IDLMLoss()
    loss.auto_balance = "no"
    x, y = torch.randn(1, 4, 5), torch.zeros(1, 2, dtype=torch.long)
    raises(TypeError, "auto_balance must be a bool, got str", loss, x, y, y + 1, y + 1, seq_len=2)
