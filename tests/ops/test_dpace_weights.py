"""D-PACE's position weights: by hand, the oracle, a trainer's formula, compiled, parts of DTensors, bad input."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

import reference
from dllm_kernels import dpace_weights
from tests.conftest import DEVICE
from tests.support import trainers
from tests.support.parity import assert_as_good_as_plain

NAN = float("nan")
VARIANTS = ("dpace", "prefix", "continuation")
variants = pytest.mark.parametrize("variant", VARIANTS)

# alpha 1/2: smoothed to 3/4, 1/2 and 1. A block ends at a masked position. In the last variant the third weighs 1/2.
CONFIDENCE = [0.5, 0.0, 1.0]
BY_HAND = {
    ("dpace", (1, 1, 1)): [0.75 + 0.375 + 0.375, 0.75, 0.375],
    ("prefix", (1, 1, 1)): [0.75, 0.375, 0.375],
    ("continuation", (1, 1, 1)): [2.0, 2.0, 1.0],
    ("dpace", (1, 0, 1)): [0.75, 0.0, 0.0],
    ("prefix", (1, 0, 1)): [0.75, 0.0, 0.0],
    ("continuation", (1, 0, 1)): [1.0, 0.0, 0.0],
    ("dpace", (0, 1, 1)): [0.0, 0.0, 0.0],
    ("dpace", (1, 1, 0.5)): [0.75 + 0.375 + 0.1875, 0.375 + 0.1875, 0.1875 * 0.5],
    ("prefix", (1, 1, 0.5)): [0.75, 0.375, 0.1875],
    ("continuation", (1, 1, 0.5)): [1.75, 1.5, 0.25],
    ("dpace", (0, 0, 0)): [0.0, 0.0, 0.0],
}


@pytest.mark.parametrize(("variant", "mask"), BY_HAND, ids=str)
@pytest.mark.parametrize("function", [dpace_weights, reference.dpace_weights], ids=["ours", "oracle"])
def test_by_hand(function, variant, mask):
    q, mask_of_it = torch.tensor(CONFIDENCE, device=DEVICE), torch.tensor(mask, device=DEVICE)
    weights = function(q, mask_of_it, alpha=0.5, variant=variant)
    torch.testing.assert_close(weights, torch.tensor(BY_HAND[variant, mask], device=DEVICE))


def test_the_row_of_an_anchor_that_predicts_nothing():
    q, mask = torch.tensor(CONFIDENCE, device=DEVICE), torch.tensor([0, 1, 1], device=DEVICE)
    q[0] = NAN
    for function in (dpace_weights, reference.dpace_weights):
        assert function(q, mask, alpha=0.5, anchor_row=True).tolist() == [0.0, 1.0, 0.5]
    mask[1] = 0
    q[2] = NAN  # not read
    for function in (dpace_weights, reference.dpace_weights):
        assert function(q, mask, alpha=0.5, anchor_row=True).tolist() == [0.0, 0.0, 0.0]


def test_alpha_of_0_and_1():
    """With alpha 1, each token counts as accepted.

    With alpha 0, nothing is smoothed, and tokens after an impossible token have weight 0.
    """
    q, on = torch.tensor([0.5, 0.0, 1.0], device=DEVICE), torch.ones(3, device=DEVICE)
    assert dpace_weights(q, on, alpha=1).tolist() == [3.0, 2.0, 1.0]
    for variant, expected in (("dpace", [0.5, 0.0, 0.0]), ("continuation", [1.0, 0.0, 0.0])):
        assert dpace_weights(q, on, alpha=0.0, variant=variant).tolist() == expected
        assert reference.dpace_weights(q, on, 0.0, variant).tolist() == expected
    q = torch.tensor([1e-30, 1e-30, 0.5], device=DEVICE)  # the products C underflow, the ratios S / C do not
    for function in (dpace_weights, reference.dpace_weights):
        assert function(q, on, alpha=0.0, variant="continuation").tolist() == [1.0, 1.5, 1.0]


def draw(shape, dtype=torch.float32):
    torch.manual_seed(0)
    mask = torch.rand(shape) * (torch.rand(shape) < 0.8)
    return torch.rand(shape).to(dtype).to(DEVICE), mask.to(DEVICE)


@variants
@pytest.mark.parametrize("shape", [(7,), (3, 1), (2, 4, 15), (0, 5), (4, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_parity(dtype, shape, variant):
    q, mask = draw(shape, dtype)
    weights = dpace_weights(q, mask, alpha=0.3, variant=variant)
    assert weights.dtype == torch.promote_types(dtype, torch.float32)
    assert weights.shape == shape
    exact = reference.dpace_weights(q.double(), mask, 0.3, variant)
    if exact.numel():
        assert_as_good_as_plain([weights], [exact], 0.0, sizes=(shape[-1], shape[-1]))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("dpace-cumulative-confidence-only", "prefix"), ("dpace-continuation-value-only", "continuation")],
)
def test_variants_have_the_names_of_the_trainers(theirs, ours):
    q, mask = draw((2, 5))
    assert torch.equal(dpace_weights(q, mask, variant=theirs), dpace_weights(q, mask, variant=ours))


@pytest.fixture(scope="module")
def specforge():
    with trainers.loaded(trainers.SPECFORGE, "algorithms.common.dflash_family_model") as modules:
        yield modules.dflash_family_model.OnlineDFlashModel


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "name", ["dpace", "dpace-cumulative-confidence-only", "dpace-continuation-value-only"], ids=str
)
def test_weights_equal_those_of_a_trainer(specforge, name, alpha):
    """Variants have the trainer's names. The trainer multiplies its prefix weights by the mask later.

    Masks have no hole: after one the trainer continues the block. The first position is the anchor's.
    """
    q, mask = draw((3, 4, 16))
    mask = torch.where((mask[..., 1:] != 0).int().cumprod(-1) != 0, mask[..., 1:], 0)
    mask = torch.cat([torch.zeros_like(mask[..., :1]), mask], -1)
    trainer = SimpleNamespace(dpace_alpha=alpha)
    theirs = specforge._dpace_weight(trainer, q, mask, mask > 0, name) * mask
    torch.testing.assert_close(dpace_weights(q, mask, alpha=alpha, variant=name, anchor_row=True), theirs)


@variants
def test_confidence_outside_the_mask_is_not_read(variant):
    q, mask = draw((3, 6))
    expected = dpace_weights(q, mask, variant=variant)
    for value in (NAN, 7.0, float("inf")):
        q[mask == 0] = value
        assert torch.equal(dpace_weights(q, mask, variant=variant), expected)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.uint8, torch.float64, torch.bfloat16], ids=str)
def test_masks_of_any_dtype_are_equivalent(kind):
    q, mask = draw((3, 6))
    assert torch.equal(dpace_weights(q, (mask != 0).to(kind)), dpace_weights(q, (mask != 0).float()))


@pytest.mark.everyday(1)
@variants
def test_compiled(variant):
    q, mask = draw((2, 3, 5))
    step = lambda q: dpace_weights(q, mask, variant=variant)  # noqa: E731
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), step(q))


def test_no_value_is_read_back_from_the_device():
    """Tensors without values stand in for GPU tensors, because reading one raises."""
    weights = dpace_weights(torch.empty(2, 5, device="meta"), torch.empty(2, 5, device="meta"))
    assert weights.shape == (2, 5)


Q, ON = torch.rand(2, 3), torch.ones(2, 3)
BAD = [
    (TypeError, "confidence must be a torch.Tensor, got float", (0.5, ON), {}),
    (ValueError, "confidence must have dtype float16, bfloat16, float32, float64, got bool", (ON.bool(), ON), {}),
    (ValueError, "confidence must have shape [..., k], got ()", (torch.tensor(0.5), torch.tensor(1)), {}),
    (TypeError, "mask must be a torch.Tensor, got list", (Q, [1]), {}),
    (ValueError, "mask must have shape (2, 3) (that of confidence), got (3,)", (Q, ON[0]), {}),
    (ValueError, "mask must have dtype bool, ", (Q, ON.to(torch.complex64)), {}),
    (ValueError, "alpha must lie in [0, 1], got -0.1", (Q, ON), {"alpha": -0.1}),
    (ValueError, "alpha must lie in [0, 1], got 1.5", (Q, ON), {"alpha": 1.5}),
    (ValueError, "alpha must lie in [0, 1], got nan", (Q, ON), {"alpha": NAN}),
    (TypeError, "alpha must be a number, got str", (Q, ON), {"alpha": "0.5"}),
    (
        ValueError,
        "variant must be one of dpace, prefix, continuation, dpace-cumulative-confidence-only, "
        "dpace-continuation-value-only, got 'suffix'",
        (Q, ON),
        {"variant": "suffix"},
    ),
    (ValueError, "variant must be one of dpace, ", (Q, ON), {"variant": None}),
    (ValueError, "confidence must lie in [0, 1] where it is used, got 3.0 at position (0, 0)", (Q + 3 - Q, ON), {}),
    (ValueError, "confidence must lie in [0, 1] where it is used, got -1.0 at position (0, 0)", (0 * Q - 1, ON), {}),
]


@pytest.mark.parametrize(("error", "message", "args", "options"), BAD, ids=range(len(BAD)))
def test_bad_input(error, message, args, options):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        dpace_weights(*args, **options)


def test_the_rounding_of_a_probability_is_no_error():
    assert dpace_weights(torch.tensor([1.0078125], dtype=torch.bfloat16), torch.ones(1)).isfinite().all()


def test_a_prefix_weight_near_zero():
    """Prefixes are subnormal float32 numbers. A continuation is a ratio, which is not small if both terms are small."""
    confidence, mask = torch.full((1, 6), 1e-9, device=DEVICE), torch.ones(1, 6, device=DEVICE)
    options = {"alpha": 0.0, "variant": "continuation"}
    got = dpace_weights(confidence, mask, **options)
    torch.testing.assert_close(got, reference.dpace_weights(confidence, mask, **options), atol=0.0, rtol=1e-5)
    assert got[0, :5].tolist() == pytest.approx([1.0] * 5)


@pytest.mark.parametrize("variant", ["dpace", "prefix", "continuation"])
def test_a_nan_reaches_the_weights_of_its_block_alone(variant):
    """A row with NaN logits must not vanish from a loss, so its weight and the weights that depend on it are NaN."""
    confidence, mask = torch.full((2, 4), 0.5), torch.ones(2, 4)
    confidence[0, 1] = math.nan
    weights = dpace_weights(confidence, mask, variant=variant)
    assert weights[0, 1].isnan()
    assert weights[1].isfinite().all()
    mask[0, 1] = 0
    assert dpace_weights(confidence, mask, variant=variant).isfinite().all()
