"""Draft distillation: compared with the trainers' code and formulas; number of products; bad input."""

import importlib
import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import reference
from dllm_kernels import DraftDistillationLoss, acceptance_length
from dllm_kernels.ops import LinearLogits
from tests.conftest import DEVICE
from tests.support import trainers
from tests.support.parity import value_and_grads

NAN = math.nan
B, N, BLOCK, V, D = 2, 3, 4, 19, 8  # blocks of BLOCK rows, including the anchor's
T = N * BLOCK
forms = pytest.mark.parametrize("form", ["logits", "hidden"])


def drawn(seed=0, dtype=torch.float32):
    """Draw hidden states of both models, their head, targets, counted rows (no anchors), logits of the confidence."""
    torch.manual_seed(seed)
    mask = torch.rand(B, T) < 0.7
    mask[:, ::BLOCK] = False
    drawn = {
        "hidden": torch.randn(B, T, D, dtype=dtype),
        "head": torch.randn(V, D, dtype=dtype),
        "teacher": torch.randn(B, T, D, dtype=dtype),
        "targets": torch.randint(0, V, (B, T)),
        "mask": mask,
        "confidence": torch.randn(B, T, dtype=dtype),
    }
    return SimpleNamespace(**{name: t.to(DEVICE) for name, t in drawn.items()})


def total(loss, form, i, h, w, **arguments):
    """Return the loss in either form, with a teacher that shares the head."""
    if form == "logits":
        teacher = F.linear(i.teacher, w).detach()
        return loss(F.linear(h, w), teacher, i.targets, i.mask, **arguments)
    return loss.forward_fused(h, w, i.teacher, i.targets, i.mask, **arguments)


def assert_same(ours, theirs, *leaves):
    """The value and all gradients."""
    one = torch.ones((), device=DEVICE)
    for a, b in zip(value_and_grads(ours, leaves, one), value_and_grads(theirs, leaves, one), strict=True):
        torch.testing.assert_close(a, b)


def labelled(value):
    """Name a parameter in test ids independently of its random numbers, so that all processes agree."""
    if isinstance(value, dict):
        return ",".join(f"{k}={labelled(v)}" for k, v in value.items()) or "default"
    return f"tensor{list(value.shape)}" if isinstance(value, torch.Tensor) else str(value)


# The trainers' objectives --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def specforge():
    with trainers.loaded(trainers.SPECFORGE, "algorithms.common.dflash_family_model") as modules:
        yield modules.dflash_family_model


@pytest.fixture(scope="module")
def speculators():
    metrics = "speculators.models.dflash.metrics", "speculators.models.dspark.metrics"
    with trainers.loaded(trainers.SPECULATORS, "losses.utils", "losses.eager") as losses:
        dflash, dspark = map(importlib.import_module, metrics)
        yield SimpleNamespace(losses=losses.utils, eager=losses.eager, dflash=dflash, dspark=dspark)


def specforge_model(owner, w, **settings):
    """Create a training wrapper of this class without a draft model.

    Its objective depends only on hidden states and head.
    """
    model = owner.__new__(owner)
    torch.nn.Module.__init__(model)
    model.lm_head = lambda h: F.linear(h, w)
    model.block_size, model.objective_chunk_blocks = BLOCK, 0
    for name, value in settings.items():
        setattr(model, name, value)
    return model


def in_blocks(t):
    return t.reshape(B, N, BLOCK, *t.shape[2:])


def specforge_dflash(specforge, i, h, w, loss_type="dflash", gamma=None, alpha=0.5):
    """Run the part of its forward pass after the draft model, over the chunks of blocks."""
    model = specforge_model(
        specforge.OnlineDFlashModel, w, loss_type=loss_type, loss_decay_gamma=gamma, dpace_alpha=alpha
    )
    rows = (in_blocks(t) for t in (h, i.targets, i.mask.to(h.dtype)))
    numerator, denominator, *_ = specforge.checkpointed_chunk_reduce(
        model._dflash_objective_chunk_terms, *rows, chunk_size=2, dim=1
    )
    return numerator / (denominator if loss_type == "dflash" else float(B))


def specforge_dspark(specforge, i, h, w, s, gamma, teacher_rows):
    """Run DSpark. The teacher's hidden states cover the sequence; each row takes the one before its label's."""
    draft_model = SimpleNamespace(
        apply_logits_head=lambda base, **_: base, predict_confidence=lambda *_, **__: in_blocks(s), confidence_head=True
    )
    model = specforge_model(
        specforge.OnlineDSparkModel, w, loss_decay_gamma=gamma, dspark_ce_loss_alpha=0.1, dspark_l1_loss_alpha=0.9,
        dspark_confidence_head_alpha=1.0,
    )  # fmt: skip
    vars(model)["draft_model"] = draft_model
    loss, metrics = model._compute_dspark_loss(
        output_hidden=h, target_ids=in_blocks(i.targets), eval_mask=in_blocks(i.mask),
        prev_token_ids=in_blocks(i.targets), safe_label_indices=in_blocks(teacher_rows % T) + 1,
        target_last_hidden_states=F.pad(i.teacher, (0, 0, 0, 1)),
    )  # fmt: skip
    return loss, metrics["ratio_metrics"]


LABELS = ("dpace", "dpace-cumulative-confidence-only", "dpace-continuation-value-only")
DFLASH = [("dflash", None), ("dflash", 5.0), *((name, None) for name in LABELS)]


def ours_of_dflash(loss_type, gamma, i):
    if loss_type == "dflash":
        loss = DraftDistillationLoss.preset("specforge-dflash", loss_gamma=gamma)
    else:
        loss = DraftDistillationLoss.preset("specforge-dpace", position_weights=loss_type)
    arguments = {"num_sequences": B, "block_size": BLOCK}
    return lambda h, w: loss.forward_fused(h, w, None, i.targets, i.mask, **arguments).total_loss


@pytest.mark.parametrize(("loss_type", "gamma"), DFLASH)
def test_specforge_without_a_teacher(specforge, loss_type, gamma):
    """Blocks have no hole: with D-PACE the trainer continues a block after one."""
    i = drawn()
    i.mask[:, 1::BLOCK] = True
    i.mask[:, 3::BLOCK] &= i.mask[:, 2::BLOCK]
    ours = ours_of_dflash(loss_type, gamma, i)
    assert_same(ours, lambda h, w: specforge_dflash(specforge, i, h, w, loss_type, gamma), i.hidden, i.head)


def draw_teacher_rows():
    """Return teacher rows within each sequence, in any order and with repetitions."""
    torch.manual_seed(1)
    return (torch.randint(0, T, (B, T)) + T * torch.arange(B)[:, None]).to(DEVICE)


def ours_of_dspark(i, gamma, teacher_rows, found):
    loss = DraftDistillationLoss.preset("specforge-dspark", loss_gamma=gamma)

    def value(h, w, s):
        arguments = {"block_size": BLOCK, "teacher_rows": teacher_rows, "confidence_logits": s}
        found.append(loss.forward_fused(h, w, i.teacher, i.targets, i.mask, **arguments))
        return found[-1].total_loss

    return value


@pytest.mark.parametrize("gamma", [None, 3.0])
def test_dspark_of_specforge(specforge, gamma):
    """Loss and metrics are compared: agreement with the teacher, and the length accepted by sampling, plus a bonus.

    In SpecForge, an invalid row ends the block. The test therefore makes all later rows of the block invalid, too.
    """
    i, rows, found, metrics = drawn(), draw_teacher_rows(), [], []
    i.mask = in_blocks(torch.rand(B, T, device=DEVICE) < 0.8).int().cumprod(-1).bool().reshape(B, T)

    def theirs(h, w, s):
        loss, call_metrics = specforge_dspark(specforge, i, h, w, s, gamma, rows)
        metrics.append(call_metrics)
        return loss

    assert_same(ours_of_dspark(i, gamma, rows, found), theirs, i.hidden, i.head, i.confidence)
    agreed, counted = metrics[0]["teacher_agreement"]
    assert found[0].draft_correct.sum() == agreed
    assert i.mask.sum() == counted
    lengths, blocks = metrics[0]["tau_probabilistic"]
    length = acceptance_length(found[0], i.mask, BLOCK, anchor_row=True, bonus=True, sampling=True)
    torch.testing.assert_close(length, (lengths / blocks).float())


# (preset, changes, loss function of speculators, its weighting, whether the anchor predicts)
SPECULATORS = {
    "dflash, as trained": ("speculators-dflash", {}, "ce", "dpace", False),
    "dflash, as its function": (
        "speculators-dflash", {"kind": "kl", "position_weights": "decay"}, "kl_div", "fixed-exp-decay", False,
    ),
    "dspark": ("speculators-dspark", {}, "kl_div", "fixed-exp-decay", True),
    "dspark, two kinds": (
        "speculators-dspark", {"kind": {"teacher_ce": 0.1, "tv": 0.9}}, '{"ce": 0.1, "tv": 0.9}', "fixed-exp-decay",
        True,
    ),
}  # fmt: skip


def speculators_metrics(speculators, i, h, w, s, loss_fn, weighting, from_anchor):
    config = speculators.losses.resolve_loss_config(loss_fn, "eager")
    z, t, mask = (
        F.linear(h, w).reshape(1, B * T, V),
        F.linear(i.teacher, w).detach().reshape(1, B * T, V),
        i.mask.reshape(1, -1),
    )
    settings = {
        "block_size": BLOCK, "gamma": 4.0, "loss_config": config, "per_position_loss_weight": weighting,
        "sample_from_anchor": from_anchor,
    }  # fmt: skip
    if s is None:
        return speculators.dflash.compute_metrics(z, t, mask, **settings)
    return speculators.dspark.compute_metrics(
        z, t, s.reshape(1, -1), mask, tv_loss_fn=speculators.eager.tv_loss, **settings
    )


def speculators_case(name, i, found):
    """Return (loss of the package, its leaves, further arguments of the loss of speculators)."""
    preset, changes, *theirs = SPECULATORS[name]
    loss = DraftDistillationLoss.preset(preset, **changes)
    if theirs[-1]:
        i.mask[:, ::BLOCK] = True
    leaves = [i.hidden, i.head] + ([i.confidence] if preset == "speculators-dspark" else [])

    def ours(h, w, s=None):
        arguments = {"num_tokens": i.mask.sum() + 1e-5, "block_size": BLOCK, "confidence_logits": s}
        found.append(total(loss, "hidden", i, h, w, **arguments))
        return found[-1].total_loss

    return ours, leaves, theirs


@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators(speculators, name):
    """Loss and metrics are compared: accuracy at each position, and the accepted length, greedy and by sampling.

    In speculators, an invalid row ends the block. The test therefore makes all later rows of the block invalid, too.
    """
    i, found, metrics = drawn(), [], []
    i.mask = in_blocks(i.mask | (torch.arange(T, device=DEVICE) % BLOCK == 0)).int().cumprod(-1).bool().reshape(B, T)
    i.mask[:, ::BLOCK] = False
    ours, leaves, theirs = speculators_case(name, i, found)

    def value(h, w, s=None):
        loss, call_metrics = speculators_metrics(speculators, i, h, w, s, *theirs)
        metrics.append(call_metrics)
        return loss

    assert_same(ours, value, *leaves)
    out, call_metrics, first = found[0], metrics[0], 0 if theirs[-1] else 1
    for k in range(first, BLOCK):
        assert out.draft_correct_per_pos[k] == call_metrics[f"position_{k}_acc_sum"]
        assert out.draft_count_per_pos[k] == call_metrics[f"position_{k}_acc_total"]
    arguments = {"anchor_row": True, "bonus": True}
    torch.testing.assert_close(
        acceptance_length(out, i.mask, BLOCK, **arguments), call_metrics["eal_sum"] / call_metrics["eal_total"]
    )
    if "accept_len_sum" in call_metrics:
        by_sampling = acceptance_length(out, i.mask, BLOCK, sampling=True, **arguments)
        torch.testing.assert_close(by_sampling, call_metrics["accept_len_sum"] / call_metrics["accept_len_total"])
        torch.testing.assert_close(out.acceptance_rate.sum(), call_metrics["accept_rate_sum"])


@pytest.mark.parametrize(
    ("name", "anchor"), [("specforge-dflash", 0), ("speculators-dflash", 0), ("specforge-dspark", 1)]
)
@pytest.mark.parametrize("loss_gamma", [None, 4.0])
def test_the_weight_of_an_anchor_that_is_not_masked(name, anchor, loss_gamma):
    i = drawn()
    loss = DraftDistillationLoss.preset(name, position_weights="decay", loss_gamma=loss_gamma, reduction="none")
    arguments = {"confidence_logits": i.confidence} if name == "specforge-dspark" else {}
    weights = loss.forward_fused(
        i.hidden, i.head, i.teacher, i.targets, torch.ones_like(i.mask), block_size=BLOCK, **arguments
    ).row_weights.view(B, N, BLOCK)
    second = math.exp(-1 / loss_gamma) if loss_gamma and anchor else 1.0
    torch.testing.assert_close(weights[..., 1] / second, torch.ones_like(weights[..., 1]))
    assert (weights[..., 0] == anchor).all()


def test_an_unknown_preset():
    message = (
        "name must be one of specforge-dflash, specforge-dpace, specforge-dspark, speculators-dflash, "
        "speculators-dspark, got 'dspark'"
    )
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        DraftDistillationLoss.preset("dspark")


# Components -----------------------------------------------------------------------------------------------------------


@forms
def test_the_teacher_is_a_constant_and_options_reach_the_op(form):
    """The options are a smaller vocabulary, a temperature, transforms per side, and a separate head of the teacher."""
    i, columns = drawn(), torch.randperm(V + 5, device=DEVICE)[:V]
    own = torch.randn(V + 5, 6, device=DEVICE, requires_grad=True), torch.randn(V + 5, device=DEVICE)
    teacher = torch.randn(B, T, 6, device=DEVICE, requires_grad=True)
    options = {"softcap": 9.0, "teacher_transform": {"scale": 0.5}, "temperature": 2.0}
    loss = DraftDistillationLoss({"lk": 0.5, "nla": 0.5}, None, eta=2.0, floor=1e-3, kl_scale=0.7, **options)
    h = i.hidden.clone().requires_grad_()
    op_options = {"kind": loss.kind, "eta": 2.0, "floor": 1e-3, "kl_scale": 0.7, "draft_to_target": columns, **options}
    if form == "hidden":
        out = loss.forward_fused(
            h, i.head, teacher, None, i.mask, teacher_weight=own[0], teacher_bias=own[1], draft_to_target=columns
        )
    else:
        out = loss(F.linear(h, i.head), F.linear(teacher, *own), None, i.mask, draft_to_target=columns)
    expected = reference.divergence(F.linear(h, i.head), F.linear(teacher, *own), i.mask.float(), **op_options)
    torch.testing.assert_close(out.total_loss, expected.loss)
    torch.testing.assert_close(out.acceptance_rate, expected.acceptance_rate)
    assert torch.equal(out.draft_correct, expected.agree)
    (grad,) = torch.autograd.grad(out.total_loss, h)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.loss, h)[0])
    again = loss(F.linear(h, i.head), F.linear(teacher, *own), None, i.mask, draft_to_target=columns).total_loss
    assert torch.autograd.grad(again, [teacher, own[0]], allow_unused=True) == (None, None)


@forms
@pytest.mark.parametrize("settings", [{}, {"position_weights": "dpace", "confidence": "acceptance"}], ids=labelled)
def test_the_confidence_learns_only_the_acceptance_rate(form, settings):
    """The logits of the confidence receive no gradient through a, and invalid rows are not read."""
    i = drawn()
    loss = DraftDistillationLoss("tv", confidence_weight=0.3, reduction="none", anchor_row=True, **settings)
    s = i.confidence.masked_fill(~i.mask, NAN).requires_grad_()
    h = i.hidden.clone().requires_grad_()
    out = total(loss, form, i, h, i.head, block_size=BLOCK, confidence_logits=s)
    weights, a = out.row_weights, out.acceptance_rate
    bce = F.binary_cross_entropy_with_logits(i.confidence, a.clamp(0, 1), reduction="none")
    torch.testing.assert_close(out.row_losses, torch.where(i.mask, weights * (1 - a + 0.3 * bce), 0.0))
    torch.testing.assert_close(out.total_loss, out.row_losses.sum())
    torch.testing.assert_close(out.dllm_loss, (weights * (1 - a))[i.mask].sum())
    grad_s, grad_h = torch.autograd.grad(out.row_losses.sum(), (s, h))
    torch.testing.assert_close(grad_s, torch.where(i.mask, 0.3 * weights * (i.confidence.sigmoid() - a), 0.0))
    without = total(loss, form, i, h, i.head, block_size=BLOCK)
    torch.testing.assert_close(grad_h, torch.autograd.grad(without.total_loss, h)[0])


def test_sampling_accepts_by_hand():
    rates = torch.tensor([[0.5, 0.5, 1.0, 0.25, 1.0, 1.0]], device=DEVICE)
    mask = torch.tensor([[1, 1, 1, 1, 0, 1]], device=DEVICE)
    length = acceptance_length(rates, mask, 4, sampling=True)
    assert length.item() == pytest.approx((0.5 + 0.25 + 0.25 + 0.25) / 2)  # the second block ends at its hole
    assert acceptance_length(rates, mask, 4, sampling=True, bonus=True).item() == pytest.approx(1.625)
    logits = torch.randn(1, 6, V, device=DEVICE)
    with pytest.raises(ValueError, match=r"^output must have acceptance_rate, which DraftDistillationLoss returns"):
        acceptance_length(DraftDistillationLoss("ce")(logits, None, mask, mask), mask, 4, sampling=True)


PRODUCTS = [
    ("kl", {}, 3),
    ({"ce": 0.1, "l1": 0.9}, {}, 3),
    ("kl", {"position_weights": "dpace", "confidence": "acceptance"}, 3),
    ("teacher_ce", {"position_weights": "dpace", "confidence": "teacher"}, 3),
    ("kl", {"position_weights": "dpace"}, 4),
    ("kl", {"position_weights": "dpace", "confidence": "teacher"}, 5),
    ("kl", {"reduction": "none"}, 3),
]


@pytest.mark.parametrize(("kind", "settings", "products"), PRODUCTS, ids=labelled)
def test_products_with_a_frozen_head(kind, settings, products):
    i = drawn()
    i.mask = torch.ones_like(i.mask)
    loss = DraftDistillationLoss(kind, chunk_size=5, backend="torch", **settings)
    in_place = lambda c, a, b, **_: 2 * a[0] * a[1] * b[1]  # noqa: E731
    h = i.hidden.clone().requires_grad_()
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        total(loss, "hidden", i, h, i.head).total_loss.backward()
    assert counter.get_total_flops() == products * 2 * B * T * D * V


def test_a_total_weight_on_any_device():
    i, loss = drawn(), DraftDistillationLoss(normalize="mean")
    one, *others = [
        total(loss, "hidden", i, i.hidden, i.head, total_weight=n).total_loss
        for n in (2.5, torch.tensor(2.5), torch.tensor(2.5, device=DEVICE))
    ]
    assert others == [one, one]


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["", "draft", "teacher"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "settings", [{"chunk_size": 2}, {"position_weights": "dpace", "confidence": "teacher"}], ids=labelled
)
def test_each_model_has_stored_logits_or_a_record(stored, packed, settings):
    i = drawn(dtype=torch.float64)
    h, teacher, targets, mask = (t[0] if packed else t for t in (i.hidden, i.teacher, i.targets, i.mask))
    own = torch.randn(V, D, dtype=torch.float64, device=DEVICE)
    capped = 2.0 * torch.tanh(F.linear(teacher, own) / 2.0)
    loss = DraftDistillationLoss({"tv": 1.0, "kl": 0.5}, temperature=1.4, **settings)

    def of_records(h, w):
        z = F.linear(h, w) if stored == "draft" else LinearLogits(h, w)
        q = capped if stored == "teacher" else LinearLogits(teacher, own, softcap=2.0)
        return loss(z, q, targets, mask).total_loss

    assert_same(of_records, lambda h, w: loss(F.linear(h, w), capped, targets, mask).total_loss, h, i.head)


X, Y, ON, W = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3), torch.randn(5, 4)
H = torch.randn(2, 3, 4)
NEEDED = [
    ("target_ids must be given for kind='ce', got None", {"kind": "ce"}, {"target_ids": None}),
    ("target_ids must be given for confidence='target', got None", {"position_weights": "dpace"}, {"target_ids": None}),
    ("teacher_{} must be given for kind='kl', got None", {}, {"teacher": None}),
    (
        "teacher_{} must be given for confidence='acceptance', got None",
        {"kind": "ce", "position_weights": "dpace", "confidence": "acceptance"}, {"teacher": None},
    ),
    (
        "teacher_{} must be given for confidence_logits, got None",
        {"kind": "ce"}, {"teacher": None, "confidence_logits": ON},
    ),
    ("teacher_{} must be given for temperature=2.0, got None", {"kind": "ce", "temperature": 2.0}, {"teacher": None}),
    ("teacher_{} must be given with teacher_rows, got None", {"kind": "ce"}, {"teacher": None, "teacher_rows": Y}),
]  # fmt: skip
WRONG = [
    (
        ValueError, "confidence_logits must have shape (2, 3) (that of block_mask), got (2,)",
        {"confidence_logits": ON[:, 0]},
    ),
    (ValueError, "confidence_logits must have dtype float16, ", {"confidence_logits": Y}),
    (ValueError, "confidence_logits must be on cpu like block_mask, got meta", {"confidence_logits": ON.to("meta")}),
    (TypeError, "total_weight must be a number or a 0-d tensor, got ", {"total_weight": "3"}),
    (ValueError, "total_weight must not be negative, got -1", {"total_weight": -1}),
    (ValueError, "total_weight must not be negative, got -0.5", {"total_weight": torch.tensor(-0.5)}),
    (TypeError, "block_mask must be a torch.Tensor, got list", {"target_ids": None, "block_mask": [1]}),
    (ValueError, "{} must have shape (2, 2, {}) to go with block_mask of shape (2, 2), got (2, 3, {})",
        {"target_ids": None, "block_mask": ON[:, :2]}),
    (ValueError, "block_size must be", {"block_size": 0}),
    (ValueError, "T must be a multiple of block_size - 1 ", {"block_size": 3}),
    (ValueError, "teacher_rows must have shape (2, 3) ", {"teacher_rows": Y[0]}),
    (TypeError, "teacher_{} must be a torch.Tensor, got list", {"teacher": [1]}),
]  # fmt: skip


def call(form, settings, **changes):
    """Call the loss with rows of either form and these changes."""
    loss = DraftDistillationLoss(**settings)
    arguments = {"teacher": X if form == "logits" else H, "target_ids": Y, "block_mask": ON} | changes
    arguments[f"teacher_{form}"] = arguments.pop("teacher")
    return loss(X, **arguments) if form == "logits" else loss.forward_fused(H, W, **arguments)


@forms
def test_missing_targets_pass_the_check_of_targets(form, monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "1")
    assert call(form, {}, target_ids=None).total_loss.isfinite()


@forms
def test_a_step_without_weight_has_the_loss_0(form):
    assert call(form, {"normalize": "mean"}, block_mask=0 * ON, total_weight=0).total_loss == 0


@forms
@pytest.mark.parametrize(("message", "settings", "changes"), NEEDED, ids=labelled)
def test_arguments_that_the_settings_require(form, message, settings, changes):
    with pytest.raises(ValueError, match="^" + re.escape(message.format(form))):
        call(form, settings, **changes)


@forms
@pytest.mark.parametrize(("error", "message", "changes"), WRONG, ids=labelled)
def test_bad_arguments(form, error, message, changes):
    size = X.shape[-1] if form == "logits" else H.shape[-1]
    message = message.format(form) if "teacher_{}" in message else message.format(form, size, size)
    with pytest.raises(error, match="^" + re.escape(message)):
        call(form, {}, **changes)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (
            "teacher_hidden must have shape [..., 4] to go with lm_head_weight [V, D] = (5, 4), got (2, 3, 5)",
            {"teacher": X},
        ),
        ("teacher_hidden must have dtype float16, ", {"teacher": Y}),
        ("teacher_bias requires teacher_weight", {"teacher_bias": W[:, 0]}),
        ("teacher_weight must have shape [V, D]", {"teacher_weight": W[0]}),
    ],
    ids=labelled,
)
def test_a_wrong_teacher(message, changes):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        call("hidden", {}, **changes)


@pytest.mark.exhaustive
def test_a_negative_total_weight_that_cannot_be_read_makes_the_loss_nan():
    """In a compiled step, as on a GPU, reading it would be a host sync."""
    step = torch.compile(
        lambda n: call("hidden", {"normalize": "mean"}, total_weight=n), backend="aot_eager", fullgraph=True
    )
    assert step(torch.tensor(-1.0)).total_loss.isnan()
    torch.testing.assert_close(
        step(torch.tensor(2.0)).total_loss, call("hidden", {"normalize": "mean"}, total_weight=2).total_loss
    )
