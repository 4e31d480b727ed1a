"""Every loss in both forms against the oracle, and the contract of each loss."""

import contextlib
import copy
import itertools
import math
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import reference
from dllm_kernels import (
    DFlashDecayLoss,
    DLLMLossOutput,
    DraftDistillationLoss,
    HybridDiffusionLLMLoss,
    IDLMLoss,
    MDLMCrossEntropyLoss,
    SCDDLoss,
    acceptance_length,
    acceptance_stats,
    compute_per_token_nll,
    dpace_weights,
    draft_accuracy,
    encoder_ar_loss,
    encoder_ar_loss_fused,
    fused_head,
    scdd_schedule,
)
from dllm_kernels.ops import LinearLogits, linear_token_nll
from tests.conftest import DEVICE
from tests.support.cases import (
    BLOCK,
    BY_NAME,
    CASES,
    FIRSTS,
    LOSSES,
    MASK_ID,
    SUMS,
    Case,
    to_device,
    upstream_for,
    value_of,
)
from tests.support.parity import assert_as_good_as_plain, assert_parity, largest_error, value_and_grads

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# the losses are torch code over two primitives, whose own tests run the kernels in every dtype
PATHS = [("torch", d) for d in DTYPES] + [("triton", d) for d in (DTYPES if DEVICE == "cuda" else (torch.float32,))]
NAN = math.nan
V, D = 19, 8
forms = pytest.mark.parametrize("form", ["logits", "hidden"])


def cases(selection=CASES):
    return pytest.mark.parametrize("case", selection, ids=lambda case: case.name)


def raises(error, message, function, *args, **options):
    with pytest.raises(error, match="^" + re.escape(message)):
        function(*args, **options)


def parity_of_every_path(function):
    """Parametrize with all paths of the first case of each loss.

    The other cases have one path of each backend, in bfloat16 and with float32 kernels. A loss that differs from
    another only in an option needs no kernels. ``make test-every-case`` runs the other paths.
    """

    def marks(case, backend, dtype):
        alone = ("torch", torch.bfloat16), ("triton", torch.float32)
        omitted = case not in FIRSTS and ((backend, dtype) not in alone or (case.variant and backend == "triton"))
        return pytest.mark.every_case if omitted else ()

    selection = [
        pytest.param(case, *path, marks=marks(case, *path), id="-".join(map(str, (case.name, *path))))
        for case in CASES for path in PATHS
    ]  # fmt: skip
    return pytest.mark.parametrize(("case", "backend", "dtype"), selection)(function)


def draw(case, B=2, L=6, device=DEVICE, seed=0):
    torch.manual_seed(seed)
    return to_device(case.draw(B, L, V), device)


def leaves_of(case, form, dtype=torch.float32, B=2, L=6):
    """Draw the logits, or hidden states and a head with a bias."""
    if form == "logits":
        return [(3 * torch.randn(B, L * case.width, V, device=DEVICE)).to(dtype)]
    shapes = (B, L * case.width, D), (V, D), (V,)
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def function_of(case, form, inputs, **options):
    """Return the value as a function of the leaves."""
    if form == "logits":
        return lambda x: case.logits_form(x, inputs, **options)
    return lambda h, w, b: case.hidden_form(h, w, b, inputs, chunk_size=5, **options)


@pytest.mark.everyday(14)
@forms
@parity_of_every_path
def test_parity(case, form, dtype, backend):
    inputs = draw(case)
    project = F.linear if form == "hidden" else lambda x: x
    assert_parity(
        function_of(case, form, inputs, backend=backend),
        lambda *leaves: case.oracle(project(*leaves), inputs),
        lambda _: (leaves_of(case, form, dtype), upstream_for(case, 2, 6).to(DEVICE)),
    )


def leaves_with_logits_of_0_and_minus_64(case, dtype):
    """Return leaves whose rounded NLLs do not depend on the order of summation.

    Every NLL is log k or 64 + log k. None is so near to the midpoint of two numbers of the dtype that the last bit of a
    logarithm decides its rounding.
    """
    noise = 4 * torch.finfo(torch.float32).eps
    for nll in (torch.arange(1, V + 1).double().log(), 64 + torch.arange(1, V + 1).double().log()):
        assert torch.equal((nll * (1 - noise)).to(dtype), (nll * (1 + noise)).to(dtype))
    hidden = F.one_hot(torch.randint(0, D, (1, 4 * case.width)), D)
    weight = -64.0 * (torch.rand(V, D) < 0.5)
    return [t.to(DEVICE, dtype) for t in (hidden, weight, torch.zeros(V))]


@cases([case for case in CASES if case.rounds])
@forms
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_without_the_upcast_each_nll_is_rounded_to_the_input_dtype(case, form, dtype):
    inputs = draw(case, 1, 4)
    leaves = leaves_with_logits_of_0_and_minus_64(case, dtype)
    x = F.linear(*leaves)
    leaves = [x] if form == "logits" else leaves
    rounded, exact = (function_of(case, form, inputs, fp32_upcast=upcast)(*leaves) for upcast in (False, True))
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    oracle = case.oracle(x, inputs, fp32_upcast=False)
    assert_as_good_as_plain([rounded], [oracle.double()], 0.0, sizes=(x[..., 0].numel(),))


@pytest.mark.everyday(33)
@pytest.mark.covering(2, most=2)
@cases(SUMS)
@forms
def test_no_weight_at_all_gives_a_zero_that_carries_zero_gradients(case, form, backend):
    masks = {"weights"} | {name for name, role in case.roles.items() if role in ("mask", "weight")}
    inputs = {name: torch.zeros_like(t) if name in masks else t for name, t in draw(case).items()}
    leaves = leaves_of(case, form)
    leaves[0].fill_(NAN)
    results = value_and_grads(function_of(case, form, inputs, backend=backend), leaves, torch.ones(()))
    assert all(t.eq(0).all() for t in results)


def diffusion(B=2, L=6, seed=0):
    torch.manual_seed(seed)
    return to_device(BY_NAME["mdlm"].draw(B, L, V), DEVICE)


@forms
@pytest.mark.parametrize("name", ["mdlm", "block diffusion", "hybrid, one tensor", "scdd, counted"])
def test_a_shifted_loss_is_the_loss_of_shifted_rows(name, form):
    """A loop moves the logits instead: ``cat([z[:, :1], z[:, :-1]], 1)``. Token 0 is then not supervised."""
    case, L = BY_NAME[name], 6
    inputs = draw(case) | dict.fromkeys(case.counts)
    inputs["p_mask"][0, 0] += 0 if case.loss is SCDDLoss else NAN  # token 0 is not read, except as the time of SCDD
    inputs["loss_mask"][:, 0] = 1
    aligned = inputs | {"loss_mask": F.pad(inputs["loss_mask"][:, 1:], (1, 0)), "p_mask": inputs["p_mask"].nan_to_num()}
    leaves = leaves_of(case, form)

    def plain(x, *head):
        moved = torch.cat([x[:, :1], x[:, : L - 1], x[:, L:]], 1)
        return case.output(form, case.arguments(form, moved, aligned, head), reduction="none")

    def ours(x, *head):
        shifting = replace(case, settings={**case.settings, "shift": True})
        return shifting.output(form, case.arguments(form, x, inputs, head), reduction="none")

    got, expected = ours(*leaves), plain(*leaves)
    rows = [shift_rows(t, L) for t in (expected.row_losses, expected.row_weights)]
    torch.testing.assert_close([got.row_losses, got.row_weights], rows)
    values = [value_and_grads(lambda *x, f=f: f(*x).total_loss, leaves, torch.ones(())) for f in (ours, plain)]
    torch.testing.assert_close(*values)
    assigned = case.loss(**case.settings)
    assigned.shift = True
    out = Case._of(assigned, form)(**case.arguments(form, leaves[0], inputs, tuple(leaves[1:])))
    torch.testing.assert_close(out.total_loss, values[0][0])


def shift_rows(rows, L):
    """Move the rows of tokens 1 .. L - 1 to the rows that predict them; rows of another branch stay."""
    return torch.cat([rows[:, 1:L], torch.zeros_like(rows[:, :1]), rows[:, L:]], 1)


def test_one_token_has_no_row_that_predicts_it():
    i = {name: t[:, :1] for name, t in draw(BY_NAME["scdd"]).items()}
    x = torch.randn(2, 1, V, device=DEVICE, requires_grad=True)
    for length in (1, 0):
        rest, rows = {name: t[:, :length] for name, t in i.items()}, x[:, :length]
        for loss in (MDLMCrossEntropyLoss(shift=True), SCDDLoss(MASK_ID, shift=True)):
            out = loss(rows, **rest)
            assert out.total_loss == 0
            assert torch.autograd.grad(out.total_loss, x)[0].eq(0).all()


CLASSES = [case for case in LOSSES if isinstance(case.loss, type)]
WITHOUT_AR = replace(BY_NAME["hybrid, one tensor"], name="hybrid without AR", draw=BY_NAME["mdlm"].draw, width=1)


@forms
@cases([*CLASSES, WITHOUT_AR])
def test_the_logged_loss_equals_the_oracle_is_detached_and_aliases_nothing(case, form):
    inputs, leaves = draw(case), [leaf.requires_grad_() for leaf in leaves_of(case, form)]
    out = case.output(form, case.arguments(form, leaves[0], inputs, tuple(leaves[1:])))
    assert isinstance(out, DLLMLossOutput)
    assert out.total_loss.requires_grad
    assert not out.dllm_loss.requires_grad
    assert out.total_loss.dim() == out.dllm_loss.dim() == 0
    if case.width == 2:  # of two parts; the other losses log their only one
        x = leaves[0] if form == "logits" else F.linear(*leaves)
        torch.testing.assert_close(out.dllm_loss, case.oracle_output(x, inputs).dllm_loss.detach())
    before = out.dllm_loss.clone()
    assert torch.equal(out.total_loss, out.dllm_loss) == (case.width == 1)  # losses of one or two parts
    with torch.no_grad():
        out.total_loss.fill_(7.0)
    assert torch.equal(out.dllm_loss, before)


def counted_as_one(case):
    """Draw inputs with a target in every row, and set each count to 1."""
    inputs = draw(case)
    targets = {case.targets: inputs[case.targets].clamp(min=0)}
    block_counts = {"num_blocks": torch.ones(2, device=DEVICE)} if case.name == "dflash, sequence blocks" else {}
    return inputs | targets | block_counts | {name: 1 for name, role in case.roles.items() if role == "count"}


def sum_denominator(case, out):
    """Return the denominator of the sum if every count is 1."""
    return out.weight_sum + 1e-6 if case.settings.get("normalize") == "mean" else 1.0


@forms
@cases([case for case in CLASSES if case.normalized])
def test_loss_denominator_and_weight_sum_are_consistent(case, form):
    """If all tokens are equally likely, every NLL is log V, so the sum of weights * NLL is weight_sum * log V."""
    inputs = counted_as_one(case)
    rows = torch.zeros(2, 6 * case.width, V if form == "logits" else D, device=DEVICE)
    head = (torch.zeros(V, D, device=DEVICE), torch.zeros(V, device=DEVICE))
    out = case.output(form, case.arguments(form, rows, inputs, head if form == "hidden" else ()))
    assert out.weight_sum > 0
    torch.testing.assert_close(out.total_loss * sum_denominator(case, out), out.weight_sum * math.log(V))


@pytest.mark.everyday(21)
@forms
@cases(CLASSES)
def test_the_weight_sum_is_additive_and_independent_of_counts(case, form):
    inputs = draw(case)
    rows, *head = leaves_of(case, form)
    rows.requires_grad_()

    def weight_sum(changes, part=slice(None)):
        part_inputs = {name: t[part] if isinstance(t, torch.Tensor) and t.dim() else t for name, t in changes.items()}
        return case.output(form, case.arguments(form, rows[part], part_inputs, tuple(head))).weight_sum

    whole = weight_sum(inputs)
    assert whole.dim() == 0
    assert whole.dtype == torch.float32
    assert not whole.requires_grad
    counts = {name for name, role in case.roles.items() if role == "count"}
    if case.settings.get("auto_balance"):  # the weight of the clean part depends on the losses of the call
        torch.testing.assert_close(weight_sum(inputs | dict.fromkeys(counts, 7)), whole)
    else:
        assert torch.equal(weight_sum(inputs | dict.fromkeys(counts, 7)), whole)
        torch.testing.assert_close(weight_sum(inputs, slice(1)) + weight_sum(inputs, slice(1, 2)), whole)


@pytest.mark.parametrize("max_ratio", [0.0, 0.3])
def test_the_weight_sum_of_scdd_is_steps_times_tokens(max_ratio):
    i = draw(BY_NAME["scdd"])
    out = SCDDLoss(MASK_ID, num_timesteps=50, max_ratio=max_ratio)(torch.randn(2, 6, V, device=DEVICE), **i)
    assert out.weight_sum == 50 * i["loss_mask"].sum()


COUNTS = {
    **{f"{n}, at least 1": n for n in (0, 0.5)},
    "int64 of 0": torch.tensor(0),
    "int": 5,
    "float": 5.0,
    "int64": torch.tensor(5),
    "float32": torch.tensor(5.0),
    "float64": torch.tensor(5.0, dtype=torch.float64),
    "one element": torch.tensor([5]),
    "numpy": np.int64(5),
}


def loss_with_count(case, form, count):
    """Compute the loss with all counts set to this one."""
    inputs = draw(case) | dict.fromkeys(case.counts, count)
    torch.manual_seed(1)
    return function_of(case, form, inputs)(*leaves_of(case, form))


@pytest.mark.everyday(49)
@pytest.mark.covering(2, most=2)
@forms
@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
@cases([case for case in LOSSES if case.counts and not case.counted_locally])
def test_counts_are_numbers_or_tensors(case, count, form):
    value = loss_with_count(case, form, count)
    assert value.dtype == torch.float32
    assert value.dim() == 0
    torch.testing.assert_close(value, loss_with_count(case, form, 1) / max(float(count), 1))


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.uint8, torch.float16, torch.bfloat16], ids=str)
def test_dflash_masks_of_any_dtype_are_equivalent(kind, backend):
    x, mask = torch.randn(2, 6, V, device=DEVICE), torch.tensor([[1, 0, 1, 1, 1, 0]] * 2, device=DEVICE)
    y = torch.randint(0, V, (2, 6), device=DEVICE)
    out = DFlashDecayLoss(backend=backend)(x, y, mask.to(kind), block_size=BLOCK)
    expected = reference.dflash_loss(x, y, mask, block_size=BLOCK)
    torch.testing.assert_close(out.total_loss, expected)
    torch.testing.assert_close(out.draft_count_per_pos, torch.tensor([4.0, 2.0, 2.0], device=DEVICE))


def test_p_of_zero_is_clamped_and_p_outside_the_masks_is_not_read():
    x = torch.zeros(1, 3, 2, device=DEVICE)  # every NLL is ln 2
    y, on = torch.zeros(1, 3, dtype=torch.long, device=DEVICE), torch.ones(1, 3, device=DEVICE)
    p, noise = torch.tensor([[0.5, NAN, 0.25]], device=DEVICE), torch.tensor([[1, 0, 1]], device=DEVICE)
    out = MDLMCrossEntropyLoss()(x, y, noise, p, on)
    assert out.total_loss.item() == pytest.approx(6 * math.log(2))
    out = MDLMCrossEntropyLoss()(x, y, on, torch.zeros(1, 3, device=DEVICE), on)
    assert out.total_loss.item() == pytest.approx(3e8 * math.log(2))


def test_hybrid_runs_ar_only_with_ar_logits_and_an_ar_mask():
    i, x = diffusion(), torch.randn(2, 6, V, device=DEVICE)
    causal, ar = torch.randn(2, 6, V, device=DEVICE), torch.rand(2, 6, device=DEVICE)
    loss = HybridDiffusionLLMLoss(alpha=0.25)
    mdlm = MDLMCrossEntropyLoss()(x, **i).total_loss
    both = torch.cat([x, causal], 1)
    for without in (loss(x, **i), loss(x, **i, causal_logits=causal), loss(x, **i, loss_mask_ar=ar), loss(both, **i)):
        torch.testing.assert_close(without.total_loss, 0.25 * mdlm)
        torch.testing.assert_close(without.dllm_loss, 0.25 * mdlm)
    next_token = (reference.token_nll(causal[:, :-1], i["target_ids"][:, 1:]) * ar[:, 1:]).sum()
    for out in (loss(x, **i, causal_logits=causal, loss_mask_ar=ar), loss(both, **i, loss_mask_ar=ar)):
        torch.testing.assert_close(out.total_loss, 0.25 * mdlm + next_token)
        torch.testing.assert_close(out.dllm_loss, 0.25 * mdlm)


@pytest.mark.parametrize("reduction", ["total", "none"])
def test_branches_of_hybrid_with_heads_of_their_own(reduction):
    i = BY_NAME["mdlm"].draw(2, 6, V) | {"loss_mask_ar": torch.rand(2, 6)}
    i = {name: t.to(DEVICE) for name, t in i.items()}
    loss, results = HybridDiffusionLLMLoss(0.5, reduction=reduction), []
    leaves = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in ((2, 6, 8), (V, 8)) * 2]
    for logits_of in (LinearLogits, F.linear):
        out = loss(logits_of(*leaves[:2]), **i, causal_logits=logits_of(*leaves[2:]))
        value = out.total_loss if reduction == "total" else out.row_losses.sum()
        results.append((value.detach(), out.dllm_loss, *torch.autograd.grad(value, leaves)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("form", ["separate", "one tensor", "hidden"])
def test_an_alpha_of_zero_makes_the_diffusion_rows_inert(form):
    i, x, ar = diffusion(), torch.randn(2, 6, V, device=DEVICE), torch.rand(2, 6, device=DEVICE)
    bad = torch.full_like(x, NAN)
    loss = HybridDiffusionLLMLoss(alpha=0.0)
    if form == "separate":
        out = loss(bad, **i, causal_logits=x, loss_mask_ar=ar)
    elif form == "one tensor":
        out = loss(torch.cat([bad, x], 1), **i, loss_mask_ar=ar)
    else:
        out = loss.forward_fused(bad, torch.eye(V, device=DEVICE), **i, causal_hidden=x, loss_mask_ar=ar)
    expected = (reference.token_nll(x[:, :-1], i["target_ids"][:, 1:]) * ar[:, 1:]).sum()
    torch.testing.assert_close(out.total_loss, expected)
    assert out.dllm_loss == 0


@pytest.mark.parametrize("margin", [12.0, 60.0])
def test_the_balance_of_idlm_with_a_near_zero_clean_loss(margin, backend):
    """With a clean copy of loss 1e-4, alpha equalises both terms. With loss 0, alpha is noisy / 1e-6."""
    i = draw(BY_NAME["idlm"])
    i["target_ids"] = i["target_ids"].clamp(min=0)
    sure = margin * F.one_hot(F.pad(i["target_ids"][:, 1:], (0, 1)), V)
    x = torch.cat([torch.randn(2, 6, V, device=DEVICE), sure], 1).double()
    loss, one = IDLMLoss(auto_balance=True, backend=backend), torch.ones((), device=DEVICE)
    found = value_and_grads(lambda x: loss(x, **i, seq_len=6).total_loss, [x], one)
    expected = value_and_grads(lambda x: reference.idlm_loss(x, **i, auto_balance=True).total_loss, [x], one)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("settings", [(0.1, 1.0, 0.5), (0.0, 1.0, 0.5), (0.7, 3.0, 0.2), (0.3, 0.0, 0.5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_schedule_of_scdd(settings, dtype):
    """The masses are probabilities, as close to float64's as float32 allows.

    With a broad peak, gamma and rho never grow.
    """
    t = torch.cat([torch.tensor([-0.5]), torch.linspace(0, 1, 257), torch.tensor([1.5])]).to(DEVICE, dtype)
    options = dict(zip(("max_ratio", "gamma_shape", "t_peak"), settings, strict=True))
    ours, exact = scdd_schedule(t, **options), reference.scdd_schedule(t.double(), **options)
    plain = reference.scdd_schedule(t, **options)
    for name in exact._fields:
        one, acc = getattr(ours, name), torch.promote_types(dtype, torch.float32)
        assert one.dtype == acc
        error = largest_error([getattr(plain, name)], [getattr(exact, name)])
        assert_as_good_as_plain([one], [getattr(exact, name)], error, name, sizes=(1,))
    torch.testing.assert_close(ours.clean_mass + ours.uniform_mass + ours.absorbed_mass, torch.ones_like(ours.gamma))
    for falls in (ours.gamma, ours.rho) if settings[1] <= 1 else ():
        assert (falls.diff() <= 4 * torch.finfo(falls.dtype).eps).all()
    assert (ours.gamma[0], ours.rho[0], ours.gamma[-1], ours.rho[-1]) == (1, 1, 0, 0) or settings[1] == 0


@pytest.mark.everyday(1)
def test_the_first_and_the_last_moment_of_scdd(backend):
    """If a mass is 0, the loss and its gradient are finite, also for tokens that cannot occur at that time."""
    i = draw(BY_NAME["scdd"], 4)
    i["p_mask"] = torch.tensor([0.0, 1e-6, 0.2, 1.0], device=DEVICE)[:, None].expand(4, 6).contiguous()
    x = torch.randn(4, 6, V, device=DEVICE)
    x[:, 1, 5:], i["loss_mask"][:] = -300.0, 1  # practically impossible
    i["noisy_input_ids"][:, 0], i["target_ids"][:, 2] = i["target_ids"][:, 0].clamp(min=0), 7
    i["noisy_input_ids"][1, 1] = i["target_ids"][1, 1] = 7  # kept, and impossible in the last step
    for loss in (SCDDLoss(MASK_ID, 5, backend=backend), SCDDLoss(MASK_ID, 1000, max_ratio=0.5, backend=backend)):
        value, grad = value_and_grads(lambda x, loss=loss: loss(x, **i).total_loss, [x], torch.ones((), device=DEVICE))
        assert value.isfinite()
        assert grad.isfinite().all()
        assert grad[..., MASK_ID].eq(0).all()
    only = {name: t[:1] for name, t in i.items()}
    loss = SCDDLoss(MASK_ID, 5, backend=backend)
    assert loss(x[:1], **only).total_loss == 0  # nothing has happened yet, so there is nothing to learn


def test_scdd_with_any_token_as_mask(backend):
    """Token 0 is possible, too: renaming the tokens does not change the loss."""
    i, x = draw(BY_NAME["scdd"]), torch.randn(2, 6, V, device=DEVICE)
    other = torch.arange(V, device=DEVICE)
    other[[0, MASK_ID]] = other[[MASK_ID, 0]]
    renamed = {
        name: torch.where(i[name] < 0, i[name], other[i[name].clamp(min=0)])
        for name in ("target_ids", "noisy_input_ids")
    }
    expected = SCDDLoss(MASK_ID, 5, backend=backend)(x, **i).total_loss
    got = SCDDLoss(0, 5, backend=backend)(x[..., other], **(i | renamed)).total_loss
    torch.testing.assert_close(got, expected)


@pytest.mark.everyday(1)
@pytest.mark.usefixtures("unchecked")
def test_scdd_is_finite_for_a_clean_mask_and_nan_for_a_bad_token(backend):
    """A clean MASK cannot be predicted; a token outside the vocabulary is an error in the data."""
    i, x, loss = draw(BY_NAME["scdd"]), torch.randn(2, 6, V, device=DEVICE), SCDDLoss(MASK_ID, 5, backend=backend)
    i["loss_mask"][:] = 1
    i["target_ids"][0, 0] = i["noisy_input_ids"][0, 0] = MASK_ID
    value, grad = value_and_grads(lambda x: loss(x, **i).total_loss, [x], torch.ones((), device=DEVICE))
    reference_i = {name: t for name, t in i.items() if name != "noise_mask"}
    torch.testing.assert_close(value, reference.scdd_loss(x, **reference_i, mask_token_id=MASK_ID, num_timesteps=5))
    assert grad.isfinite().all()
    for name, bad in (("target_ids", V), ("target_ids", -1), ("noisy_input_ids", V), ("noisy_input_ids", -100)):
        worse = i[name].clone()
        worse[1, 2] = bad
        assert loss(x, **(i | {name: worse})).total_loss.isnan()


def test_hybrid_from_hidden_states_logs_the_rounded_diffusion_part():
    i = diffusion()
    h, w = torch.randn(2, 6, D, device=DEVICE).bfloat16(), torch.randn(V, D, device=DEVICE).bfloat16()
    out = HybridDiffusionLLMLoss(fp32_upcast=False).forward_fused(h, w, **i)
    torch.testing.assert_close(out.dllm_loss, out.total_loss)


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_token_ids_of_any_integer_dtype(ids_dtype):
    i, d = draw(BY_NAME["encoder AR"]), diffusion()
    d["target_ids"] = d["target_ids"].clamp(min=0)
    x = torch.randn(2, 6, V, device=DEVICE)
    ar = torch.ones(2, 6, device=DEVICE)
    expected = encoder_ar_loss(x, **i), HybridDiffusionLLMLoss()(x, **d, causal_logits=x, loss_mask_ar=ar).total_loss
    i["input_ids"], d["target_ids"] = i["input_ids"].to(ids_dtype), d["target_ids"].to(ids_dtype)
    got = encoder_ar_loss(x, **i), HybridDiffusionLLMLoss()(x, **d, causal_logits=x, loss_mask_ar=ar).total_loss
    assert got == expected


def test_a_block_that_begins_with_a_hole():
    """It accepts nothing and does not count, unless the hole is the row of an anchor that predicts nothing."""
    rates, mask = torch.tensor([[0.5, 0.5, math.nan]], device=DEVICE), torch.tensor([[0, 1, 0]], device=DEVICE)
    assert [t.item() for t in acceptance_stats(rates, mask, 4, sampling=True)] == [0, 0]
    assert [t.item() for t in acceptance_stats(rates, mask, 3, anchor_row=True, sampling=True)] == [0.5, 1]
    first = torch.tensor([[1, 0, 1]], device=DEVICE)
    assert [t.item() for t in acceptance_stats(rates, first, 4, sampling=True)] == [0.5, 1]


def test_draft_accuracy_without_counted_positions():
    out = DFlashDecayLoss()(
        torch.randn(1, 3, V), torch.zeros(1, 3, dtype=torch.long), torch.tensor([[1, 1, 0]]), block_size=BLOCK
    )
    assert draft_accuracy(out)["draft_acc_k3"] == 0
    assert draft_accuracy(DFlashDecayLoss()(torch.randn(1, 3, V), torch.zeros(1, 3).long(), torch.ones(1, 3))) == {}


def test_dflash_counts_are_none_without_whole_blocks():
    x, y, mask = torch.randn(1, 7, V), torch.zeros(1, 7, dtype=torch.long), torch.ones(1, 7)
    flat = DFlashDecayLoss(loss_gamma=None)
    for out in (flat(x, y, mask), flat(x, y, mask, block_size=1), flat(x, y, mask, block_size=BLOCK)):
        assert out.draft_correct_per_pos is None
        assert out.draft_count_per_pos is None
        torch.testing.assert_close(out.total_loss, reference.token_nll(x, y).sum())


@pytest.mark.parametrize("block_size", [BLOCK, 1])
def test_decay_needs_whole_blocks(block_size):
    x, y, mask = torch.randn(1, 7, V), torch.zeros(1, 7, dtype=torch.long), torch.ones(1, 7)
    with pytest.raises(ValueError, match=f"multiple of block_size - 1 .* got T=7 and block_size={block_size}"):
        DFlashDecayLoss()(x, y, mask, block_size=block_size)


@pytest.mark.parametrize(
    ("T", "block_size", "gamma"), [(6, 4, 7.0), (6, None, 2.0), (6, 4, None), (0, 4, 7.0), (5, 2, 1.0)]
)
def test_decay_weights(T, block_size, gamma):
    weights = DFlashDecayLoss(loss_gamma=gamma)._decay_weights(T, block_size, "cpu", torch.float64)
    expected = reference.decay_weights(T, block_size, gamma, torch.float64)
    torch.testing.assert_close(weights, expected)


FAMILY = [case for case in LOSSES if case.loss is DFlashDecayLoss]


@cases(FAMILY)
def test_a_frozen_head_costs_two_products_for_any_weights(case):
    inputs, (h, w, _) = draw(case), leaves_of(case, "hidden")
    inputs["block_mask"] = torch.ones_like(inputs["block_mask"])
    inputs["target_ids"] = inputs["target_ids"].clamp(min=0)
    in_place = lambda c, a, b, **_: 2 * a[0] * a[1] * b[1]  # noqa: E731
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        case.hidden_form(h.requires_grad_(), w, None, inputs, chunk_size=5, backend="torch").backward()
    assert counter.get_total_flops() == 2 * 2 * (2 * 6) * D * V


@forms
def test_a_sequence_without_pairs_is_not_counted(form):
    h, w, ids = torch.randn(3, 5, D, device=DEVICE), torch.randn(V, D, device=DEVICE), torch.randint(0, V, (3, 5))
    ids, valid = ids.to(DEVICE), torch.ones(3, 5, dtype=torch.bool, device=DEVICE)
    valid[1] = torch.tensor([True, False, True, False, True])  # no two valid tokens are adjacent
    if form == "logits":
        loss = encoder_ar_loss(h @ w.t(), ids, valid, normalize="sequences")
    else:
        loss = encoder_ar_loss_fused(h, w, ids, valid, normalize="sequences")
    of_sequences = [encoder_ar_loss(h[i : i + 1] @ w.t(), ids[i : i + 1]) for i in (0, 2)]
    torch.testing.assert_close(loss, sum(of_sequences) / 2)
    torch.testing.assert_close(loss, reference.encoder_ar_loss(h @ w.t(), ids, valid, normalize="sequences"))


@forms
def test_parts_of_a_step_add_up(form):
    """The parts receive the counts of the whole step: per block, per sequence, and per block of each sequence."""
    d = draw(BY_NAME["dflash"], 2, 12) | {"num_tokens": None}
    d["block_mask"][1, 3:] = 0
    x, w = torch.randn(2, 12, V if form == "logits" else D, device=DEVICE), torch.randn(V, D, device=DEVICE)
    valid = (d["block_mask"] != 0).reshape(2, -1, BLOCK - 1).any(-1)
    counts = {
        "blocks": {"num_blocks": valid.sum()},
        "sequences": {"num_sequences": 2},
        "sequence_blocks": {"num_blocks": valid.sum(1), "num_sequences": 2},
    }
    for variant, normalize in itertools.product(("decay", "dpace", "prefix", "continuation"), counts):
        loss = DFlashDecayLoss(normalize=normalize, position_weights=variant)

        def value(part, loss=loss, **part_counts):
            i = {name: t[:, part] if isinstance(t, torch.Tensor) else t for name, t in d.items()}
            rows = (x[:, part],) if form == "logits" else (x[:, part], w)
            return (loss if form == "logits" else loss.forward_fused)(*rows, **i, block_size=BLOCK, **part_counts)

        whole = value(slice(None)).total_loss
        parts = [value(part, **counts[normalize]) for part in (slice(3), slice(3, 9), slice(9, 12))]
        torch.testing.assert_close(sum(part.total_loss for part in parts), whole)


@cases([case for case in CASES if case.loss is not DraftDistillationLoss])
def test_a_record_in_the_place_of_logits_gives_the_bits_of_the_form_from_hidden_states(case):
    inputs = draw(case, 2, 6)
    leaves = [torch.randn(size, device=DEVICE) for size in ((2, 6 * case.width, D), (V, D), (V,))]

    def from_record(h, w, b):
        arguments = case.arguments("hidden", h, inputs)
        rows = {case.rows[1]: case.rows[0], "causal_hidden": "causal_logits"}
        records = {
            rows[name]: LinearLogits(arguments.pop(name), w, b, chunk_size=5) for name in rows.keys() & arguments
        }
        return value_of(case.output("logits", records | arguments))

    upstream = upstream_for(case, 2, 6)
    expected = value_and_grads(lambda h, w, b: case.hidden_form(h, w, b, inputs, chunk_size=5), leaves, upstream)
    for found, wanted in zip(value_and_grads(from_record, leaves, upstream), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_record_in_the_place_of_logits_of_the_nll_per_token():
    ids, options = draw(BY_NAME["mdlm"], 2, 6)["target_ids"], {"softcap": 2.0, "skip_id": 3}
    h, w = torch.randn(2, 6, D, device=DEVICE), torch.randn(V, D, device=DEVICE)
    ids = torch.where(ids == 3, 4, ids)
    for record in (LinearLogits(h, w), LinearLogits(h, w, **options)):
        nll = compute_per_token_nll(record, ids, **({} if record.softcap else options))
        assert torch.equal(nll, linear_token_nll(h, w, ids, **options).nll)


SETTINGS_OF_DRAFTS = {
    "decay": {"loss_gamma": 3.0}, "no decay": {"loss_gamma": None}, "dpace": {"position_weights": "dpace"},
    "prefix": {"position_weights": "prefix", "dpace_alpha": 0.2}, "anchor": {"anchor_row": True, "loss_gamma": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("form", ["logits", "deferred"])
@pytest.mark.parametrize("settings", SETTINGS_OF_DRAFTS)
def test_dflash_methods_of_the_next_release(settings, form):
    """Weights, NLL and weighted mean are the parts of the loss with ``normalize="mean"``."""
    d = draw(BY_NAME["dflash"], 2, 12) | {"num_tokens": None}
    d["block_mask"][1, 3:8] = 0
    model = torch.nn.Linear(D, V, bias=False, device=DEVICE)
    size = 4 if SETTINGS_OF_DRAFTS[settings].get("anchor_row") else BLOCK
    loss = DFlashDecayLoss(normalize="mean", **SETTINGS_OF_DRAFTS[settings])
    h = torch.randn(2, 12, D, device=DEVICE, requires_grad=True)
    expected = loss(F.linear(h, model.weight), **d, block_size=size)
    with fused_head(model, on_logits="raise", head=model) if form == "deferred" else contextlib.nullcontext():
        out, nll = loss.forward_with_token_nll(model(h), **d, block_size=size)
    for found, wanted in zip(out, expected, strict=True):
        if wanted is not None:
            torch.testing.assert_close(found, wanted)
    plain = F.cross_entropy(F.linear(h, model.weight).transpose(1, 2), d["target_ids"].long(), reduction="none")
    read = d["block_mask"] != 0
    torch.testing.assert_close(nll, torch.where(read, plain, 0.0))
    weights = loss.position_weights(d["block_mask"], size, nll)
    assert not weights.requires_grad
    if loss.position_weights == "decay":
        assert torch.equal(weights, loss.position_weights(d["block_mask"], size))
    mean = loss.weighted_mean(nll, weights)
    torch.testing.assert_close(mean, (nll * weights).sum() / (weights.sum() + 1e-6))
    torch.testing.assert_close(mean, expected.total_loss)
    upstream = torch.randn(2, 12, device=DEVICE)
    grads = [
        torch.autograd.grad(a + (upstream * b).sum(), [h, model.weight], retain_graph=True)
        for a, b in ((out.total_loss, nll), (expected.total_loss, torch.where(read, plain, 0.0)))
    ]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_position_weights_is_a_name_and_a_method():
    loss, mask = DFlashDecayLoss(2.0), torch.tensor([[1.0, 1.0, 0.5, 0.0]])
    assert loss.position_weights == "decay"
    assert isinstance(loss.position_weights, str)
    assert f"{loss.position_weights}" == "decay"
    decay = torch.exp(-torch.arange(4) / 2)
    torch.testing.assert_close(loss.position_weights(mask), decay * mask)
    twice = torch.tensor([1.0, decay[1]]).repeat(2)
    torch.testing.assert_close(loss.position_weights(mask, 3), twice * mask)
    prefix = torch.tensor([[2, 1]])
    given = loss.position_weights(mask, 3, prefix=prefix)
    torch.testing.assert_close(given, torch.tensor([[0.0, 1.0, 0.5, 0.0]]))
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        other.loss_gamma = None
        assert torch.equal(other.position_weights(mask), mask)
    assert pickle.loads(pickle.dumps(loss.position_weights)) == "decay"
    loss.position_weights = DFlashDecayLoss(9.0).position_weights  # the name alone is set
    torch.testing.assert_close(loss.position_weights(mask), decay * mask)
    loss.position_weights = "dpace"
    assert loss.position_weights == loss.loss_type == "dpace"
    raises(ValueError, "token_nll must be given for position_weights='dpace', got None", loss.position_weights, mask)
    q = torch.tensor([[0.5, 0.25, 0.1, 0.9]])
    want = dpace_weights(q, mask, alpha=0.5)
    torch.testing.assert_close(loss.position_weights(mask, token_nll=-q.log()), want)
    raises(ValueError, "prefix must be None ", loss.position_weights, mask, 3, -q.log(), prefix=prefix)
    raises(ValueError, "block_mask must have shape ", loss.position_weights, mask[0])
    raises(ValueError, "block_mask must hold no negative number, NaN or ", loss.position_weights, mask * math.nan)
    raises(ValueError, "weights must have shape ", loss.weighted_mean, q, mask[0])
    assert loss.weighted_mean(torch.tensor([[1.0, math.nan]]), torch.tensor([[1, 0]])).item() == pytest.approx(1)
    assert loss.weighted_mean(torch.ones(1, 2), torch.zeros(1, 2)) == 0


def test_loss_type_is_another_name_of_the_weights():
    assert DFlashDecayLoss().loss_type == "dflash"
    assert DFlashDecayLoss(loss_type="dflash").position_weights == "decay"
    for name in ("dpace", "dpace-cumulative-confidence-only", "dpace-continuation-value-only"):
        loss = DFlashDecayLoss(loss_type=name, dpace_alpha=0.2)
        assert loss.position_weights == loss.loss_type == name
    loss.loss_type = "dflash"
    assert loss.position_weights == "decay"
    raises(ValueError, "loss_type must be one of dflash, dpace, ", DFlashDecayLoss, loss_type="decay")
    raises(ValueError, "loss_type must be one of dflash, dpace, ", setattr, loss, "loss_type", None)
    message = "position_weights must agree with loss_type='dflash', got 'dpace'"
    raises(ValueError, message, DFlashDecayLoss, loss_type="dflash", position_weights="dpace")


def test_dflash_methods_of_the_original():
    d, x = draw(BY_NAME["dflash"]), torch.randn(2, 6, V, device=DEVICE, requires_grad=True)
    h, w = torch.randn(6, D, device=DEVICE, requires_grad=True), torch.randn(V, D, device=DEVICE)
    loss = DFlashDecayLoss(loss_gamma=3.0)
    nll = compute_per_token_nll(x, d["target_ids"])
    counts = loss._draft_acc_per_pos(x.argmax(-1) == d["target_ids"], d["block_mask"], BLOCK)
    reduced = loss._reduce(nll, d["block_mask"], d["num_tokens"], BLOCK, *counts)
    whole = loss(x, **d, block_size=BLOCK)
    for name in set(whole._fields) - {"draft_correct"}:  # which a sum of NLLs does not contain
        torch.testing.assert_close(getattr(reduced, name), getattr(whole, name))
    (a,), (b,) = torch.autograd.grad(reduced.total_loss, x), torch.autograd.grad(whole.total_loss, x)
    torch.testing.assert_close(a, b)
    nll, correct = DFlashDecayLoss._chunk_nll(h, w, None, d["target_ids"][0])
    torch.testing.assert_close(nll, reference.token_nll(F.linear(h, w), d["target_ids"][0]))
    assert torch.equal(correct, reference.argmax_match(F.linear(h, w), d["target_ids"][0]))
    upstream = torch.randn(6, device=DEVICE)
    (a,) = torch.autograd.grad(nll, h, upstream)
    (b,) = torch.autograd.grad(reference.token_nll(F.linear(h, w), d["target_ids"][0]), h, upstream)
    torch.testing.assert_close(a, b)


def test_dflash_reduce_keeps_nan_of_masked_rows_out():
    nll, mask = torch.tensor([[1.0, NAN]]), torch.tensor([[1.0, 0.0]])
    assert DFlashDecayLoss()._reduce(nll, mask, None, None).total_loss.item() == 1.0


@pytest.mark.parametrize(
    ("nll", "mask", "message"),
    [
        (torch.ones(1, 4), torch.ones(4), "block_mask must have shape (1, 4) (that of token_nll), got (4,)"),
        (torch.ones(2, 4), torch.ones(1, 4), "block_mask must have shape (2, 4) (that of token_nll), got (1, 4)"),
        (torch.ones(4), torch.ones(4), "token_nll must have shape [B, T], got (4,)"),
        (torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 4), "token_nll must have dtype float16, "),
    ],
)
@pytest.mark.parametrize("position_weights", ["decay", "dpace"])
def test_dflash_reduce_takes_one_nll_and_one_mask_entry_per_position(nll, mask, message, position_weights):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        DFlashDecayLoss(position_weights=position_weights)._reduce(nll, mask, None, None)


def test_dflash_attributes():
    loss = DFlashDecayLoss(loss_gamma=5, use_fused_linear_ce=True, chunk_size=64, normalize="mean")
    assert (loss.loss_gamma, loss.use_fused_linear_ce, loss.chunk_size, loss.normalize) == (5.0, True, 64, "mean")
    assert isinstance(loss.loss_gamma, float)
    assert DFlashDecayLoss(None).loss_gamma is None


@pytest.mark.everyday(48)
@cases()
def test_empty_batches(case, backend):
    inputs = draw(case, 0, 6)
    for form in ("logits", "hidden"):
        function = function_of(case, form, inputs, backend=backend)
        for t in value_and_grads(function, leaves_of(case, form, B=0), upstream_for(case, 0, 6)):
            assert t.sum() == 0


@cases()
def test_sequences_without_positions(case):
    inputs = draw(case, 2, 0)
    for form in ("logits", "hidden"):
        assert function_of(case, form, inputs)(*leaves_of(case, form, L=0)).sum().item() == 0


@pytest.mark.parametrize("extra", [1, 4, 6, 9])
def test_hybrid_without_an_ar_part_takes_any_number_of_rows_after_the_diffusion_ones(extra):
    inputs = draw(BY_NAME["hybrid, one tensor"])
    ids, masks = inputs["target_ids"], {k: inputs[k] for k in ("noise_mask", "p_mask", "loss_mask")}
    B, L = ids.shape
    loss = HybridDiffusionLLMLoss(alpha=0.3)
    x, head = torch.randn(B, L + extra, V, device=DEVICE), torch.randn(V, V, device=DEVICE)
    for function in (lambda t: loss(t, ids, **masks), lambda t: loss.forward_fused(t, head, ids, **masks)):
        expected, got = x[:, :L].clone().requires_grad_(), x.clone().requires_grad_()
        outputs = [function(t) for t in (expected, got)]
        for a, b in zip(*(out[:2] for out in outputs), strict=True):
            torch.testing.assert_close(a, b)
        for out in outputs:
            out.total_loss.backward()
        torch.testing.assert_close(got.grad[:, :L], expected.grad)
        assert got.grad[:, L:].count_nonzero() == 0
    ar = torch.ones_like(masks["p_mask"])
    if extra != L:
        with pytest.raises(ValueError, match="logits must have shape"):
            loss(x, ids, **masks, loss_mask_ar=ar)


def test_draft_accuracy_of_fractions():
    """``correct`` may be a float, a fraction of hits, as the documentation says. Invalid positions are not counted."""
    correct = torch.tensor([[0.5, 1.0, NAN, 0.25, 0.0, 1.0]])
    valid = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.5, 0.5]])
    hits, count = DFlashDecayLoss._draft_acc_per_pos(correct, valid, 4)
    assert hits.tolist() == [0.75, 1.0, 0.5]
    assert count.tolist() == [2.0, 1.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_an_alpha_that_is_a_tensor(dtype):
    case = BY_NAME["hybrid"]
    (rows,), inputs = leaves_of(case, "logits"), draw(case)
    for reduction in ("total", "none"):
        expected, got = (
            HybridDiffusionLLMLoss(a, reduction=reduction)(rows, **inputs)
            for a in (2, torch.full((1,), 2, dtype=dtype))
        )
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dflash_reduces_a_low_precision_nll_in_float32(dtype):
    loss, count = DFlashDecayLoss(loss_gamma=None), 100_001
    nll = torch.full((1, 70_001), 2.0, dtype=dtype, device=DEVICE, requires_grad=True)
    for n in (count, torch.tensor(count, device=DEVICE)):
        out = loss._reduce(nll, torch.ones(1, 70_001, device=DEVICE), n, None)
        torch.testing.assert_close(out.total_loss, torch.tensor(2 * 70_001 / count, device=DEVICE))
        assert out.weight_sum == 70_001
        assert torch.autograd.grad(out.total_loss, nll)[0].dtype == dtype


@pytest.mark.parametrize("L", [1, 4])
def test_the_last_position_predicts_nothing(L, backend):
    x = torch.randn(2, L, V, device=DEVICE)
    x[:, -1] = NAN
    x.requires_grad_()
    ids = torch.randint(0, V, (2, L), device=DEVICE)
    loss = encoder_ar_loss(x, ids, backend=backend)
    loss.backward()
    torch.testing.assert_close(loss, reference.encoder_ar_loss(x.detach(), ids))
    assert x.grad[:, -1].eq(0).all()


def test_acceptance_length_by_hand():
    """All correct; two correct, a wrong one; a correct one, then a hole; wrong at once; nothing to predict."""
    correct = torch.tensor([[1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1]], device=DEVICE)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0]], device=DEVICE)
    assert acceptance_length(correct, mask, BLOCK) == (3 + 2 + 1 + 0) / 4
    assert acceptance_length(correct, mask, BLOCK, bonus=True) == (4 + 3 + 2 + 1) / 4
    assert acceptance_length(correct, 0 * mask, BLOCK, bonus=True) == 0
    assert [t.item() for t in acceptance_stats(correct, mask, BLOCK)] == [6, 4]
    assert [t.item() for t in acceptance_stats(correct, mask, BLOCK, bonus=True)] == [10, 4]
