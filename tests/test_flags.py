"""Options that are yes or no take nothing that only looks so, and what is a constant takes no gradient."""

import pytest
import torch

from dllm_kernels import corruption, ops
from dllm_kernels.losses import scdd_schedule

X, W, IDS = torch.randn(3, 7), torch.randn(7, 7), torch.tensor([0, 1, 2])
FLAGS = [
    *((ops.token_nll, (X, IDS), flag) for flag in ("with_lse", "with_correct", "inplace_backward")),
    *((ops.weighted_nll, (X, IDS, IDS), f) for f in ("with_lse", "with_correct", "inplace_backward", "round_nll")),
    *((ops.weighted_linear_nll, (X, W, IDS, IDS), f) for f in ("with_lse", "with_correct", "round_nll")),
    *((ops.linear_token_nll, (X, W, IDS), flag) for flag in ("with_lse", "with_correct")),
    *((ops.row_stats, (X, IDS), flag) for flag in ("entropy", "with_correct")),
    *((ops.linear_row_stats, (X, W, IDS), flag) for flag in ("entropy", "with_correct")),
    (ops.token_log_probs, (X, IDS), "with_entropy"),
]


@pytest.mark.parametrize("value", ["yes", 1, None], ids=str)
@pytest.mark.parametrize(
    ("op", "given", "flag"), FLAGS, ids=lambda x: getattr(x, "__name__", x if isinstance(x, str) else "")
)
def test_an_option_that_is_yes_or_no(op, given, flag, value):
    with pytest.raises(TypeError, match=f"^{flag} must be a bool, got {type(value).__name__}$"):
        op(*given, **{flag: value})


def test_a_schedule_is_differentiable():
    t = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64, requires_grad=True)
    settings = {"max_ratio": 0.3, "gamma_shape": 1.5, "t_peak": 0.4}
    assert torch.autograd.gradcheck(lambda t: tuple(vars(scdd_schedule(t, **settings)).values()), [t])


@pytest.mark.parametrize("name", ["level", "mask_prob", "uniform_prob"])
def test_a_probability_takes_no_gradient(name):
    ids, mask, p = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.bool), torch.full((2,), 0.3)
    wanting = p.clone().requires_grad_()
    if name == "level":
        calls = [
            lambda x, r=r: r(ids, mask, 99, level=x) for r in (corruption.corrupt_uniform, corruption.corrupt_blockwise)
        ]
    else:
        calls = [
            lambda x: corruption.corrupt_mix(ids, mask, 99, 100, **({"mask_prob": p, "uniform_prob": p} | {name: x}))
        ]
    for call in calls:
        with pytest.raises(ValueError, match=f"^{name} must not require a gradient"):
            call(wanting)
        with torch.no_grad():
            call(wanting)


@pytest.mark.parametrize(
    "op", [lambda **o: ops.token_nll(X, IDS, **o), lambda **o: ops.linear_row_stats(X, W, IDS, **o)]
)
def test_check_targets_is_a_bool(op):
    with pytest.raises(TypeError, match=r"^check_targets must be a bool, got str$"):
        op(check_targets="no")


@pytest.mark.parametrize("place", [0, 1])
def test_a_mixture_is_not_negative(place):
    mix = [torch.rand(3), torch.rand(3)]
    mix[place][1] = -0.25
    with pytest.raises(ValueError, match=rf"^mix\[{place}\] must not be negative, got -0.25$"):
        ops.row_stats(X, IDS, mix=tuple(mix))


def test_statistics_can_be_written_to_before_backward():
    """As plain torch's can that it does not need any more."""
    gradients = []
    for overwrite in (False, True):
        x = X.clone().requires_grad_()
        out = ops.row_stats(x, IDS, entropy=True)
        total = out.log_probs.sum() + out.entropy.square().sum() + out.lse.sum()
        if overwrite:
            with torch.no_grad():
                out.log_probs.zero_()
                out.lse.zero_()
        total.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
