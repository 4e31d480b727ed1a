"""Log-probabilities of tokens: both forms equal plain code; their cost, temperature, bad input."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dllm_kernels import TokenLogProbs, token_log_probs
from tests.conftest import DEVICE
from tests.support.inputs import EVERY_KIND, Source

B, L, V, D = 2, 5, 37, 6


def draw(dtype=torch.float64):
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(s, dtype=dtype, device=DEVICE) for s in ((B, L, D), (V, D), (V,)))
    ids = torch.randint(0, V, (B, L), device=DEVICE)
    ids[0, 1], ids[1, 0] = -100, -100
    return [t.requires_grad_() for t in (hidden, weight, bias)], ids


def plain(logits, ids, temperature=1.0):
    log_p = torch.log_softmax(logits / temperature, -1)
    there = ids != -100
    return (
        torch.where(there, log_p.gather(-1, ids.clamp(min=0)[..., None]).squeeze(-1), 0.0),
        torch.where(there, -(log_p.exp() * log_p).sum(-1), 0.0),
    )


@pytest.mark.everyday(6)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_input_equals_plain_code(kind, temperature, backend):
    source = Source(kind, chunk_size=3)
    leaves = [leaf.requires_grad_() for leaf in source.leaves((B, L), V, torch.float64, D=D)]
    ids = draw()[1]
    expected = plain(source.logits(*leaves), ids, temperature)
    grads = [torch.randn_like(t) for t in expected]
    options = {"temperature": temperature, "with_entropy": True, "backend": backend}
    out = token_log_probs(source.argument(*leaves), ids, **options)
    assert isinstance(out, TokenLogProbs)
    torch.testing.assert_close(tuple(out), expected)
    torch.testing.assert_close(*(torch.autograd.grad(values, leaves, grads) for values in (out, expected)))


def test_without_grad_one_product_over_the_tokens_with_an_id(backend):
    (hidden, weight, _), ids = draw(torch.float32)
    active = torch.ones(B, L, device=DEVICE)
    active[1, 1] = 0
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = token_log_probs(hidden, ids, weight=weight, active=active, backend=backend)
    assert counter.get_total_flops() == 2 * (B * L - 3) * V * D
    assert not out.log_probs.requires_grad
    assert out.entropy is None
    assert not out.log_probs[(ids == -100) | (active == 0)].any()


def test_soft_cap_and_skipped_column():
    (hidden, weight, _), ids = draw()
    logits = hidden @ weight.T
    ids = torch.where(ids == 4, 5, ids)
    capped = 2 * torch.tanh(logits / 2)
    capped[..., 4] = -torch.inf
    got = token_log_probs(logits, ids, temperature=0.5, softcap=2.0, skip_id=4).log_probs
    torch.testing.assert_close(got, plain(capped, ids, 0.5)[0])


def test_a_uint8_id_of_156_is_an_id():
    logits = torch.zeros(1, 256, device=DEVICE)
    got = token_log_probs(logits, torch.tensor([156], dtype=torch.uint8, device=DEVICE)).log_probs
    torch.testing.assert_close(got, torch.log_softmax(logits, -1)[:, 156])


def raises(error, message, *args, **options):
    with pytest.raises(error, match="^" + re.escape(message)):
        token_log_probs(*args, **options)


def test_bad_input():
    (hidden, weight, bias), ids = draw()
    logits = hidden @ weight.T
    raises(TypeError, "logits_or_hidden must be a torch.Tensor, got list", [0.0], ids)
    raises(TypeError, "ids must be a torch.Tensor, got NoneType", logits, None)
    shape = "ids must have shape (2, 5) (that of logits_or_hidden without its last dimension), got (2, 4)"
    raises(ValueError, shape, logits, ids[:, 1:])
    raises(ValueError, "logits_or_hidden must have shape [..., 6] to go with weight", logits, ids, weight=weight)
    raises(TypeError, "temperature must be a number, got str", logits, ids, temperature="hot")
    raises(TypeError, "temperature must be a number, got bool", logits, ids, temperature=True)
    for temperature in (0, -1.0, float("nan"), float("inf")):
        message = f"temperature must be positive, from 1e-18 to 1e+18, got {temperature}"
        raises(ValueError, message, logits, ids, temperature=temperature)
    raises(ValueError, "bias requires weight, got weight=None", logits, ids, bias=bias)
    raises(ValueError, "chunk_size requires weight, got weight=None", logits, ids, chunk_size=4)
    raises(ValueError, "num_active requires weight, got weight=None", logits, ids, num_active=4)
    raises(ValueError, "active must have shape (2, 5) (that of ids), got (2, 4)", logits, ids, active=ids[:, 1:])
    raises(IndexError, "ids", logits, torch.full_like(ids, V), check_targets=True)
