"""The check of ids out of range: the values that enable it, and the names of the two kinds of ids in its errors."""

import re

import pytest
import torch

from dllm_kernels import (
    FusedLinearCrossEntropy,
    HybridDiffusionLLMLoss,
    MaskedCrossEntropy,
    MDLMCrossEntropyLoss,
    PolicyLoss,
    PolicyObjective,
    SCDDLoss,
    calculate_mtp_loss,
    ops,
    policy_views,
)
from dllm_kernels.ops import token_nll

B, L, V, D = 2, 3, 10, 4
X, Y, ON = torch.randn(B, L, V), torch.zeros(B, L, dtype=torch.long), torch.ones(B, L)
H, W, P = torch.randn(B, L, D), torch.randn(V, D), torch.full((B, L), 0.5)
BOTH = torch.cat([X, X], 1)  # rows of the diffusion part, followed by those of the AR part
BAD = torch.tensor([[0, V, 0], [0, 0, 0]])
HEAD = torch.nn.Linear(D, V)


def first(stats):
    return stats.log_probs


def of_policy(ids, on, shift=False):
    views = policy_views(ids.clamp(max=V - 1), on, V - 1, "full")
    return PolicyLoss(PolicyObjective("reinforce"), shift=shift)(X[None], ids, views, None, torch.ones(B))


def of_hybrid(logits, ids, on, causal=None):
    return HybridDiffusionLLMLoss()(logits, ids, 0 * ON, P, ON, loss_mask_ar=on, causal_logits=causal).total_loss


def of_depths(ids, on):
    return calculate_mtp_loss(
        FusedLinearCrossEntropy(), mtp_per_depth_h=[H], mtp_per_depth_targets=[ids], labels=Y, model=HEAD, lm_weight=W,
        loss_weights=on,
    )  # fmt: skip


def of_depths_from_logits(ids, on):
    return calculate_mtp_loss(
        MaskedCrossEntropy(), mtp_per_depth_logits=[X], mtp_per_depth_targets=[ids], labels=Y, model=HEAD,
        loss_weights=on,
    )  # fmt: skip


# (ids, mask of the rows that count) -> result; the argument that an error names. tests/ops/test_errors.py has the other
# losses and ops.
CALLS = {
    "row_objective": (lambda y, on: ops.row_objective(X, y, first, active=on), "ids"),
    "linear_row_objective": (lambda y, on: ops.linear_row_objective(H, W, y, first, active=on), "ids"),
    "token_log_probs": (lambda y, on: ops.token_log_probs(X, y, active=on), "ids"),
    "divergence": (lambda y, on: ops.divergence(X, X, on, kind={"ce": 1, "kl": 1}, targets=y), "targets"),
    "soft_embedding": (lambda y, on: ops.soft_embedding(H, W, W, bump=1.0, bump_ids=y, active=on), "bump_ids"),
    "mdlm, noise": (lambda y, on: MDLMCrossEntropyLoss().forward_fused(H, W, y, on, P, ON), "target_ids"),
    "hybrid, AR": (lambda y, on: of_hybrid(X, y, on, X), "target_ids"),
    "hybrid, AR rows last": (lambda y, on: of_hybrid(BOTH, y, on), "target_ids"),
    "policy": (of_policy, "ids"),
    "policy, shift": (lambda y, on: of_policy(y, on, shift=True), "ids"),
    "MaskedCrossEntropy": (lambda y, on: MaskedCrossEntropy()(X, y, mask=on), "labels"),
    "MTP": (of_depths, r"mtp_per_depth_targets\[0\]"),
    "MTP from logits": (of_depths_from_logits, r"mtp_per_depth_targets\[0\]"),
}


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv("DLLM_KERNELS_CHECK", raising=False)


@pytest.mark.parametrize("name", CALLS)
def test_on_a_cpu_a_bad_target_of_a_row_that_counts_is_an_error(name, monkeypatch):
    call, argument = CALLS[name]
    message = rf"^{argument} must lie in \[0, 10\) or be -100, got {{}} at position \(0, 1\)$"
    for bad in (V, -1, -99):
        with pytest.raises(IndexError, match=message.format(bad)):
            call(torch.where(BAD == V, bad, Y), ON)
    call(torch.where(BAD == V, -100, Y), ON)
    call(BAD, (BAD != V).float())  # the row does not count
    call(BAD.to(torch.int8), BAD != V)
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "0")
    call(BAD, ON)


def test_targets_that_no_ar_row_predicts_are_not_checked():
    """The first target of each sequence, and all targets if the loss has no AR part."""
    for logits, mask, causal in ((X, ON, None), (X, None, X), (BOTH, None, None)):
        assert of_hybrid(logits, BAD, mask, causal) == 0
    for logits, causal in ((X, X), (BOTH, None)):
        assert of_hybrid(logits, torch.tensor([[V, 0, 0], [-1, 0, 0]]), ON, causal).isfinite()


def test_a_skipped_target_is_an_error_on_request_only():
    """Its probability is 0, so its NLL is NaN, but it is a column."""
    assert token_nll(X, Y, skip_id=0).nll.isnan().all()
    with pytest.raises(IndexError, match=r"^targets must lie in \[0, 10\) and not be skip_id, 0 or be -100, got 0"):
        token_nll(X, Y, skip_id=0, check_targets=True)
    with pytest.raises(IndexError, match="not be skip_id, 0"):
        torch.compile(lambda x: token_nll(x, Y, skip_id=0, check_targets=True).nll, backend="eager")(X)


def test_the_argument_switches_the_check_off():
    assert token_nll(X, BAD, check_targets=False).nll[0, 1].isnan()
    with pytest.raises(IndexError, match=r"^teacher_rows must lie in \[0, 6\), got 10 at position \(0, 1\)$"):
        ops.divergence(X, X, teacher_rows=BAD)
    on = (BAD != V).float()
    assert ops.divergence(X, X, on, teacher_rows=BAD).loss.isfinite()


def test_ids_of_several_columns():
    with pytest.raises(IndexError, match=r"^ids must lie in \[0, 10\) or be -100, got 10 at position \(0, 1, 1\)$"):
        ops.row_stats(X, torch.stack([Y, BAD], -1))
    ops.row_stats(X, torch.stack([Y, BAD], -1), active=BAD != V)


def test_empty_targets():
    assert token_nll(X[:0], Y[:0]).nll.shape == (0, L)


def test_no_target_is_read_in_a_graph():
    torch._dynamo.reset()
    compiled = torch.compile(lambda y: token_nll(X, y).nll, backend="eager", fullgraph=True)
    assert compiled(BAD)[0, 1].isnan()


@pytest.mark.parametrize("word", ["1", "true", "TRUE", "Yes", "on", " 1 ", "", " ", "0", "false", "No", "off"])
def test_values_that_enable_and_disable_the_check(word, monkeypatch):
    """An empty value is the default, which is a check on the CPU."""
    monkeypatch.setenv("DLLM_KERNELS_CHECK", word)
    if word in ("0", "false", "No", "off"):
        assert token_nll(X, BAD).nll[0, 1].isnan()
        return
    with pytest.raises(IndexError, match=r"^targets must lie in \[0, 10\) or be -100, got 10 at position \(0, 1\)$"):
        token_nll(X, BAD)


@pytest.mark.parametrize("word", ["2", "ture", "-1", "None"])
def test_other_values_are_errors(word, monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_CHECK", word)
    message = f"DLLM_KERNELS_CHECK must be one of 1, true, yes, on, 0, false, no, off or empty, got {word.lower()!r}"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        token_nll(X, Y)
    assert token_nll(X, Y, check_targets=False).nll.isfinite().all()


@pytest.mark.everyday(1)
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
