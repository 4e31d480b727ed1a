"""The row ops that a loss runs: their number, backend and chunk sizes."""

import re

import pytest
import torch

from dllm_kernels import (
    BlockDiffusionCrossEntropyLoss,
    DFlashDecayLoss,
    DraftDistillationLoss,
    HybridDiffusionLLMLoss,
    IDLMLoss,
    MDLMCrossEntropyLoss,
    SCDDLoss,
)
from dllm_kernels.rows import _chunks
from tests.conftest import DEVICE, usually
from tests.losses.test_losses import D, V, draw, leaves_of
from tests.support.cases import BY_NAME, CASES, FIRSTS, MASK_ID, value_of
from tests.support.parity import value_and_grads
from tests.support.recorded import ReadBack, record_ops


@pytest.mark.parametrize("auto_balance", [False, True])
def test_idlm_makes_one_call(auto_balance, monkeypatch):
    seen = record_ops(monkeypatch.setattr)
    x = torch.randn(2, 12, V, device=DEVICE)
    IDLMLoss(auto_balance=auto_balance)(x, **draw(BY_NAME["idlm"]), seq_len=6)
    assert len(seen) == 1
    assert seen[0].call.x is x


BOUNDED = (
    MDLMCrossEntropyLoss, BlockDiffusionCrossEntropyLoss, HybridDiffusionLLMLoss, SCDDLoss, IDLMLoss, DFlashDecayLoss,
    DraftDistillationLoss, BY_NAME["encoder AR"].loss,
)  # fmt: skip


def in_chunks_of_five(case, arguments, options):
    """Return the output of the fused form of the loss, in chunks of five rows on the code path of a GPU."""
    settings = {**case.settings, "backend": "triton"}
    if isinstance(case.loss, tuple):
        return case.loss[1](**arguments, **settings, **options, chunk_size=5)
    if case.chunks_at_construction:
        return case.loss(**settings, chunk_size=5).forward_fused(**arguments, **options)
    return case.loss(**settings).forward_fused(**arguments, **options, chunk_size=5)


WITH_BOUND = [case for case in CASES if case.loss in BOUNDED and not case.transform]
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
