"""Losses: the row ops that a loss runs, their number and chunks, and what is checked before them."""

import collections
import functools
import os
import re
import sys

import pytest
import torch

from dllm_kernels import (
    BlockDiffusionCrossEntropyLoss,
    DraftDistillationLoss,
    HybridDiffusionLLMLoss,
    IDLMLoss,
    MDLMCrossEntropyLoss,
    SCDDLoss,
    _checks,
)
from dllm_kernels.mtp import FusedLinearCrossEntropy, MaskedCrossEntropy, calculate_mtp_loss
from dllm_kernels.ops import LinearLogits, WeightedNLL
from dllm_kernels.policy import PolicyLoss, PolicyObjective
from dllm_kernels.rows import _chunks, _setup
from tests.conftest import DEVICE, usually
from tests.losses.test_losses import D, V, draw, leaves_of
from tests.mtp.test_mtp import B as BATCH
from tests.mtp.test_mtp import D as DEPTHS
from tests.mtp.test_mtp import H, Model, hiddens, labels_with_padding
from tests.mtp.test_mtp import S as LENGTH
from tests.ops.test_errors import FLOATS, META, ON, Call, X, Y, all_on, probable, raises
from tests.policy.test_loss import V as POLICY_V
from tests.policy.test_loss import batch as policy_batch
from tests.support.cases import BY_NAME, CASES, FIRSTS, LOSSES, MASK_ID, ROWS, to_device, value_of
from tests.support.parity import value_and_grads
from tests.support.recorded import ReadBack, record_ops


@pytest.mark.parametrize("auto_balance", [False, True])
def test_idlm_makes_one_call(auto_balance, monkeypatch):
    seen = record_ops(monkeypatch.setattr)
    x = torch.randn(2, 12, V, device=DEVICE)
    IDLMLoss(auto_balance=auto_balance)(x, **draw(BY_NAME["idlm"]), seq_len=6)
    assert len(seen) == 1
    assert seen[0].call.x is x


def in_chunks_of_five(case, arguments, options):
    """Return the output of the fused form of the loss, in chunks of five rows on the code path of a GPU."""
    settings = {**case.settings, "backend": "triton"}
    if isinstance(case.loss, tuple):
        return case.loss[1](**arguments, **settings, **options, chunk_size=5)
    if case.chunks_at_construction:
        return case.loss(**settings, chunk_size=5).forward_fused(**arguments, **options)
    return case.loss(**settings).forward_fused(**arguments, **options, chunk_size=5)


WITH_BOUND = [case for case in (*LOSSES, *ROWS) if not case.transform]
# The cases of a loss that have other passes over the rows than its first one.
OTHER_PASSES = (
    "hybrid, one tensor", "dflash, dpace", "idlm, balanced", "scdd, no uniform noise, shift", "mdlm, counted, rows"
)  # fmt: skip


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    "case",
    usually([c for c in WITH_BOUND if c in FIRSTS or c.name in OTHER_PASSES], WITH_BOUND, lambda case: case.name),
)
def test_a_bound_of_the_active_rows_avoids_the_host_sync(case, monkeypatch):
    """A training step on the path of a GPU has the loss and gradients of one without the bound."""
    found, active_rows = [], _chunks.ActiveRows
    monkeypatch.setattr(_chunks, "ActiveRows", lambda *args: found.append(active_rows(*args)) or found[-1])
    i, leaves = draw(case), leaves_of(case, "hidden")

    def step(**options):
        def value(h, w, b):
            return value_of(in_chunks_of_five(case, case.arguments("hidden", h, i, (w, b)), options))

        with ReadBack() as read_back:
            results = value_and_grads(value, leaves, torch.ones(()).expand(shape))
        return results, read_back.count

    shape = value_of(case.output("hidden", case.arguments("hidden", leaves[0], i, leaves[1:]))).shape
    expected, syncs = step()
    assert syncs > 0
    active, rows = max(each.count for each in found), found[-1].total  # weights of 0 leave a second pass fewer rows
    assert 0 < active < rows
    for bound in (active, rows):
        results, syncs = step(num_active=bound)
        assert syncs == 0
        for result, other in zip(results, expected, strict=True):
            torch.testing.assert_close(result, other)
    assert step(num_active=active - 1)[0][0].isnan().any()
    for wrong in (rows + 1, -1, 1.5):
        with pytest.raises(ValueError, match=re.escape(f"num_active must be an int in [0, {rows}], got {wrong}")):
            step(num_active=wrong)


class WeightsAnyRow(MDLMCrossEntropyLoss):
    """A derived loss that weights unsupervised rows."""


def every_row(target_ids, noise_mask, p_mask, loss_mask):
    return torch.ones_like(p_mask)


@pytest.mark.peer
@pytest.mark.parametrize(
    "loss",
    [None, BlockDiffusionCrossEntropyLoss(), every_row, WeightsAnyRow()],
    ids=["mdlm", "block", "own", "derived"],
)
def test_a_trainer_passes_on_the_count_of_its_batches(loss, tmp_path, monkeypatch):
    """The count is passed in every training step, so that no step has a host sync."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from tests.support import trainer_ranks

    seen, active_rows = [], _chunks.ActiveRows
    monkeypatch.setattr(_chunks, "ActiveRows", lambda *args: seen.append(args) or active_rows(*args))
    trainer_ranks.trained(trainer_ranks.model(), tmp_path, 4, 2, loss=loss)
    assert len(seen) == 4
    for targets, bound, *_ in seen:
        assert bound == (None if isinstance(loss, WeightsAnyRow) else (targets != -100).sum())


@pytest.mark.many_draws
def test_the_chunks_of_scdd(monkeypatch):
    """The chunk size of the call takes precedence over the loss's own. From logits, there are no chunks."""
    seen = record_ops(monkeypatch.setattr)
    i, h, w = draw(BY_NAME["scdd"]), torch.randn(2, 6, D, device=DEVICE), torch.randn(V, D, device=DEVICE)
    a, b, c = (
        SCDDLoss(MASK_ID, chunk_size=own).forward_fused(h, w, **i, chunk_size=in_call).total_loss
        for own, in_call in ((1024, None), (1024, 3), (None, None))
    )
    assert [run.call.logits.chunk_size for run in seen] == [1024, 3, None]
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(a, c)


@pytest.mark.parametrize("return_per_depth", [False, True])
def test_all_depths_go_through_one_call(monkeypatch, return_per_depth):
    calls = record_ops(monkeypatch.setattr)
    calculate_mtp_loss(
        FusedLinearCrossEntropy(),
        mtp_per_depth_h=hiddens(),
        labels=labels_with_padding(),
        model=Model(),
        return_per_depth=return_per_depth,
    )
    assert [(run.op, run.call.x.shape) for run in calls] == [
        ("token_nll" if return_per_depth else "weighted_nll", (DEPTHS, BATCH, LENGTH, H))
    ]


@probable
def test_no_value_is_read_on_another_device(case, monkeypatch):
    """A meta tensor has no values to read. The primitive is replaced, because it has no kernel for meta tensors."""
    seen = record_ops(monkeypatch.setattr, WeightedNLL(ON, ON))
    call = Call(case, "logits")
    on = {name: t.to(META) for name, t in (call.arguments | all_on(call)).items()}
    call(**(on | {"p_mask": on["p_mask"] * 2}))
    assert seen[0].call.weights.device == META
    message = "p_mask must hold probabilities, got bool"
    raises(ValueError, message, call, **(on | {"p_mask": on["p_mask"].bool()}))


def test_the_ar_branch_of_hybrid_is_checked_before_any_kernel_runs(monkeypatch):
    runs = record_ops(monkeypatch.setattr)
    call = functools.partial(HybridDiffusionLLMLoss(), X, Y, ON, ON, ON, ON)
    raises(ValueError, f"causal_logits must have dtype {FLOATS}, got int64", call, causal_logits=X.long())
    raises(
        ValueError,
        "causal_logits must have shape (2, 3, 5) to go with target_ids of shape (2, 3), got (2, 2, 5)",
        call, causal_logits=X[:, :2],
    )  # fmt: skip
    assert not runs


# Options of a call


FORMS = [(case, form) for case in CASES for form in ("logits", "hidden")]
every_form = pytest.mark.parametrize(("case", "form"), FORMS, ids=lambda value: getattr(value, "name", value))


def called(case, form, **options):
    torch.manual_seed(0)
    shapes = [(2, 6 * case.width, V)] if form == "logits" else [(2, 6 * case.width, D), (V, D), (V,)]
    rows, *head = (torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes)
    arguments = case.arguments(form, rows, to_device(case.draw(2, 6, V), DEVICE), tuple(head))
    return case.output(form, arguments, **options)


@pytest.mark.everyday(48)
@every_form
def test_the_backend(case, form, monkeypatch):
    requested, torch_primitives = set(), _setup.row_primitives(False)
    monkeypatch.setattr(_setup, "row_primitives", lambda triton: requested.add(triton) or torch_primitives)
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "triton")  # the backend of a call that names none
    called(case, form, backend="torch")
    assert requested <= {False}  # a short path requests none
    requested.clear()
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "torch")
    called(case, form, backend="triton")
    assert requested == {True}


@pytest.mark.parametrize("case", [case for case, form in FORMS if form == "hidden"], ids=lambda case: case.name)
def test_the_size_of_a_chunk(case, monkeypatch):
    def choose(*_):
        raise AssertionError("chosen")

    monkeypatch.setattr(_chunks, "choose_chunk", choose)
    called(case, "hidden", chunk_size=5)


def test_the_size_of_a_chunk_in_the_cross_entropy_of_a_distillation(monkeypatch):
    """Cross-entropy needs no teacher, and therefore runs another op."""
    sizes = []
    monkeypatch.setattr(_chunks, "choose_chunk", lambda *_: sizes.append(1) or 4)
    hidden, weight = torch.randn(2, 6, D, device=DEVICE), torch.randn(V, D, device=DEVICE)
    targets, mask = torch.zeros(2, 6, dtype=torch.int64, device=DEVICE), torch.ones(2, 6, device=DEVICE)
    for chunk_size in (5, None):
        loss = DraftDistillationLoss(kind="ce", chunk_size=chunk_size)
        loss.forward_fused(hidden, weight, None, targets, mask, block_size=3)
        assert bool(sizes) is (chunk_size is None)


TWO_COMPARISONS = BY_NAME["distillation, dpace of the teacher, rows"]
CHECKS = os.path.dirname(_checks.__file__)


def repeated_checks(call):
    """Return (check, values) of the checks outside of constructors that were called twice, with their callers."""
    callers = collections.defaultdict(list)

    def look(frame, event, _):
        name, caller = frame.f_code.co_name, frame.f_back
        inside = [f.f_code.co_filename.startswith(CHECKS) for f in (frame, caller)]
        values = ["tensor" if isinstance(v, torch.Tensor) else v for v in frame.f_locals.values()]
        if event != "call" or inside != [True, False] or not name.startswith("check") or None in values[:2]:
            return
        place, names = f"{caller.f_code.co_filename}:{caller.f_code.co_name}", set()
        while caller is not None:
            names.add(caller.f_code.co_name)
            caller = caller.f_back
        if "__init__" not in names:
            callers[(name, *map(repr, values))].append(place)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {check: places for check, places in callers.items() if len(places) > 1}


@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("case", usually([*FIRSTS, TWO_COMPARISONS], CASES, lambda case: case.name))
def test_a_loss_and_its_ops_check_a_value_once(case, form):
    rows, *head = leaves_of(case, form)
    arguments = case.arguments(form, rows, draw(case), tuple(head))
    options = {"chunk_size": 5} if form == "hidden" else {}
    assert not repeated_checks(lambda: case.output(form, arguments, **options))


@pytest.mark.parametrize("loss", ["depths", "policy, by row", "policy"])
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_depths_and_chunks_check_a_value_once(loss, form):
    model, labels, hidden = Model(), labels_with_padding(), hiddens()
    records = [LinearLogits(h, model.lm_head.weight, chunk_size=5) for h in hidden]
    logits = records if form == "hidden" else [model.lm_head(h) for h in hidden]
    if loss == "depths":
        base, options = MaskedCrossEntropy(softcap=3.0, ignore_index=-1), {"labels": labels, "model": model}
        options |= {"num_label_tokens": 7, "loss_weights": torch.rand(labels.shape)}
        call = functools.partial(calculate_mtp_loss, base, mtp_per_depth_logits=logits, **options)
    else:
        ids, _, views, *constants = policy_batch("full" if loss == "policy" else "count", "token")
        weight, rows = torch.randn(POLICY_V, 3), torch.randn(*views.scored.shape, 3, requires_grad=True)
        logits = LinearLogits(rows, weight, chunk_size=4) if form == "hidden" else rows @ weight.t()
        policy_loss = PolicyLoss(PolicyObjective(kl="k3", kl_coef=0.1))
        call = functools.partial(policy_loss, logits, ids, views, *constants, softcap=3.0)
    assert not repeated_checks(call)
