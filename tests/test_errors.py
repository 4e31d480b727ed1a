"""Bad input: each message names the argument, what was expected and what came, before any kernel runs."""

import functools
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from dllm_kernels import (
    BlockDiffusionCrossEntropyLoss,
    DFlashDecayLoss,
    FusedLinearCrossEntropy,
    HybridDiffusionLLMLoss,
    IDLMLoss,
    MaskedCrossEntropy,
    MDLMCrossEntropyLoss,
    SCDDLoss,
    calculate_mtp_loss,
    compute_per_token_nll,
    encoder_ar_loss,
    encoder_ar_loss_fused,
    losses,
    scdd_schedule,
)
from dllm_kernels.ops import (
    WeightedNLL,
    linear_row_stats,
    linear_token_nll,
    row_stats,
    token_nll,
    weighted_linear_nll,
    weighted_nll,
)

B, L, V, D = 2, 3, 5, 4
X, H, W, BIAS = torch.randn(B, L, V), torch.randn(B, L, D), torch.randn(V, D), torch.randn(V)
Y, ON = torch.zeros(B, L, dtype=torch.long), torch.ones(B, L)
META = torch.device("meta")


def raises(error, message, function, *args, **options):
    with pytest.raises(error, match="^" + re.escape(message)):
        function(*args, **options)


LOGITS_OPS = {
    "token_nll": lambda x, y, **o: token_nll(x, y, **o),
    "weighted_nll": lambda x, y, **o: weighted_nll(x, y, ON, **o),
}
LINEAR_OPS = {
    "linear_token_nll": lambda h, w, y, **o: linear_token_nll(h, w, y, **o),
    "weighted_linear_nll": lambda h, w, y, **o: weighted_linear_nll(h, w, y, ON, **o),
}
logits_ops = pytest.mark.parametrize("op", LOGITS_OPS.values(), ids=LOGITS_OPS)
linear_ops = pytest.mark.parametrize("op", LINEAR_OPS.values(), ids=LINEAR_OPS)
FLOATS = "float16, bfloat16, float32, float64"
INTS = "int64, int32, int16, int8, uint8"


@logits_ops
def test_logits_ops(op):
    raises(TypeError, "logits must be a torch.Tensor, got list", op, [[0.0]], Y)
    raises(TypeError, "targets must be a torch.Tensor, got list", op, X, [0])
    raises(ValueError, f"logits must have dtype {FLOATS}, got int64", op, X.long(), Y)
    raises(ValueError, f"targets must have dtype {INTS}, got float32", op, X, Y.float())
    raises(ValueError, f"targets must have dtype {INTS}, got bool", op, X, Y.bool())
    raises(
        ValueError,
        "targets must have shape (3, 3) (that of logits without its last dimension), got (2, 3)",
        op, torch.randn(3, 3, V), Y,
    )  # fmt: skip
    raises(ValueError, "logits must have shape [..., V] with V >= 1, got (2, 3, 0)", op, X[..., :0], Y)
    raises(TypeError, "active must be a torch.Tensor, got int", op, X, Y, active=1)
    raises(ValueError, "active must have shape (2, 3) (that of targets), got (2, 1)", op, X, Y, active=ON[:, :1])
    raises(ValueError, "active must have dtype bool, ", op, X, Y, active=ON.to(torch.complex64))
    raises(ValueError, "active must be on cpu like logits, got meta", op, X, Y, active=ON.to(META))
    raises(ValueError, "backend must be one of auto, triton, torch, got 'cuda'", op, X, Y, backend="cuda")


STATISTICS = {
    "row_stats": ("logits", lambda y, **o: row_stats(X, y, **o)),
    "linear_row_stats": ("hidden", lambda y, **o: linear_row_stats(H, W, y, **o)),
}


@pytest.mark.parametrize(("rows", "op"), STATISTICS.values(), ids=STATISTICS)
def test_row_statistics(rows, op):
    raises(TypeError, "ids must be a torch.Tensor, got list", op, [0])
    raises(ValueError, f"ids must have dtype {INTS}, got float32", op, Y.float())
    raises(ValueError, f"ids must be on cpu like {rows}, got meta", op, Y.to(META))
    shape = f"ids must have shape (2, 3) or (2, 3, 'K') (that of {rows} without its last dimension, or one more of K >= 1 ids)"
    for bad in (Y[:, 1:], Y[..., None][..., :0], Y[..., None, None], Y[0]):
        raises(ValueError, f"{shape}, got {tuple(bad.shape)}", op, bad)
    raises(TypeError, "active must be a torch.Tensor, got int", op, Y, active=1)
    raises(ValueError, "active must have shape (2, 3) (that of ids), got (2, 1)", op, Y, active=ON[:, :1])
    raises(TypeError, "mix must be a tuple of two tensors (a, b), got Tensor", op, Y, mix=ON)
    raises(TypeError, "mix must be a tuple of two tensors (a, b), got 1 of them", op, Y, mix=(ON,))
    raises(TypeError, "mix[1] must be a torch.Tensor, got float", op, Y, mix=(ON, 1.0))
    raises(ValueError, f"mix[0] must have dtype {FLOATS}, got int64", op, Y, mix=(Y, ON))
    of = f"(that of {rows} without its last dimension)"
    raises(ValueError, f"mix[1] must have shape (2, 3) {of}, got (2, 2)", op, Y, mix=(ON, ON[:, 1:]))
    raises(ValueError, f"mix[1] must be on cpu like {rows}, got meta", op, Y, mix=(ON, ON.to(META)))
    wants = ON.clone().requires_grad_()
    raises(ValueError, "mix[0] must not require a gradient, since it is taken as a constant", op, Y, mix=(wants, ON))
    raises(ValueError, f"skip_id must lie in [0, {V}), got {V}", op, Y, skip_id=V)
    raises(ValueError, "softcap must be positive", op, Y, softcap=0.0)
    raises(ValueError, "backend must be one of auto, triton, torch, got 'cuda'", op, Y, backend="cuda")
    raises(IndexError, "ids", op, torch.stack([Y, Y + V], -1), check_targets=True)
    raises(IndexError, "ids", op, Y, check_targets=True, skip_id=0)


def test_row_statistics_of_bad_rows():
    raises(ValueError, "logits must have shape [..., V] with V >= 1, got (2, 3, 0)", row_stats, X[..., :0], Y)
    raises(TypeError, "logits must be a torch.Tensor, got list", row_stats, [[0.0]], Y)
    raises(ValueError, "weight must have shape [V, D], got (4,)", linear_row_stats, H, W[0], Y)
    raises(
        ValueError,
        "bias must have shape (5,) (one entry per row of weight), got (4,)",
        linear_row_stats,
        H,
        W,
        Y,
        bias=BIAS[1:],
    )
    raises(ValueError, "chunk_size must be at least 1, got 0", linear_row_stats, H, W, Y, chunk_size=0)
    raises(ValueError, "num_active must be an int in [0, 6], got 7", linear_row_stats, H, W, Y, num_active=7)


def test_a_scalar_is_no_row_of_logits():
    raises(ValueError, "logits must have shape [..., V] with V >= 1, got ()", token_nll, torch.tensor(1.0), Y)


def test_targets_on_another_device():
    raises(ValueError, "targets must be on cpu like logits, got meta", token_nll, X, Y.to(META))
    raises(ValueError, "targets must be on cpu like hidden, got meta", linear_token_nll, H, W, Y.to(META))


@pytest.mark.parametrize(
    "op", [lambda w: weighted_nll(X, Y, w), lambda w: weighted_linear_nll(H, W, Y, w)], ids=["logits", "linear"]
)
def test_weights(op):
    raises(TypeError, "weights must be a torch.Tensor, got float", op, 1.0)
    raises(ValueError, "weights must have shape (2, 3) (that of targets), got (3,)", op, ON[0])
    raises(ValueError, "weights must have dtype bool, ", op, ON.to(torch.complex64))
    raises(ValueError, "weights must be on cpu like targets, got meta", op, ON.to(META))


@linear_ops
def test_linear_ops(op):
    raises(TypeError, "hidden must be a torch.Tensor, got NoneType", op, None, W, Y)
    raises(TypeError, "weight must be a torch.Tensor, got Linear", op, H, torch.nn.Linear(2, 2), Y)
    raises(ValueError, f"hidden must have dtype {FLOATS}, got int64", op, H.long(), W, Y)
    raises(ValueError, f"weight must have dtype {FLOATS}, got int64", op, H, W.long(), Y)
    raises(ValueError, f"targets must have dtype {INTS}, got float32", op, H, W, Y.float())
    raises(ValueError, "weight must have shape [V, D], got (4,)", op, H, W[0], Y)
    raises(
        ValueError, "hidden must have shape [..., 5] to go with weight [V, D] = (4, 5), got (2, 3, 4)", op, H, W.t(), Y
    )
    raises(ValueError, "weight must have shape [V, D] with V >= 1 and D >= 1, got (0, 4)", op, H, W[:0], Y)
    raises(ValueError, "weight must have shape [V, D] with V >= 1 and D >= 1, got (5, 0)", op, H[..., :0], W[:, :0], Y)
    raises(
        ValueError,
        "targets must have shape (3, 3) (that of hidden without its last dimension), got (2, 3)",
        op, torch.randn(3, 3, D), W, Y,
    )  # fmt: skip
    raises(TypeError, "bias must be a torch.Tensor, got float", op, H, W, Y, bias=0.0)
    raises(ValueError, "bias must have shape (5,) (one entry per row of weight), got (4,)", op, H, W, Y, bias=BIAS[1:])
    raises(ValueError, f"bias must have dtype {FLOATS}, got int64", op, H, W, Y, bias=BIAS.long())
    raises(ValueError, "active must have shape (2, 3) (that of targets), got (3,)", op, H, W, Y, active=ON[0])
    raises(ValueError, "weight must be on cpu like hidden, got meta", op, H, W.to(META), Y)
    raises(ValueError, "bias must be on cpu like hidden, got meta", op, H, W, Y, bias=BIAS.to(META))
    for name, options in (("weight", {}), ("bias", {"bias": BIAS.bfloat16()})):
        raises(
            ValueError,
            f"{name} must have the dtype of hidden, torch.float32, unless torch.autocast is on, got torch.bfloat16",
            op, H, W if options else W.bfloat16(), Y, **options,
        )  # fmt: skip
    raises(ValueError, "chunk_size must be at least 1, got 0", op, H, W, Y, chunk_size=0)
    raises(TypeError, "chunk_size must be an int, got float", op, H, W, Y, chunk_size=2.0)
    raises(TypeError, "chunk_size must be an int, got bool", op, H, W, Y, chunk_size=True)
    raises(ValueError, "memory_budget must be at least 1, got -5", op, H, W, Y, memory_budget=-5)
    raises(ValueError, "num_active must be an int in [0, 6], got 7", op, H, W, Y, num_active=7)
    raises(ValueError, "num_active must be an int in [0, 6], got -1", op, H, W, Y, num_active=-1)
    raises(ValueError, "num_active must be an int in [0, 6], got 2.0", op, H, W, Y, num_active=2.0)
    raises(ValueError, "num_active must be an int in [0, 6], got True", op, H, W, Y, num_active=True)
    raises(ValueError, "backend must be one of auto, triton, torch, got None", op, H, W, Y, backend=None)


BAD_TARGETS = ((-1, (1, 2)), (-99, (0, 0)), (V, (0, 1)), (10**12, (1, 0)))


@pytest.mark.parametrize(("bad", "where"), BAD_TARGETS)
@pytest.mark.parametrize("by", ["argument", "environment"])
@pytest.mark.parametrize(
    "op",
    [
        lambda y, **o: token_nll(X, y, **o),
        lambda y, **o: weighted_nll(X, y, ON, **o),
        lambda y, **o: linear_token_nll(H, W, y, **o),
        lambda y, **o: weighted_linear_nll(H, W, y, ON, **o),
    ],
    ids=["token_nll", "weighted_nll", "linear_token_nll", "weighted_linear_nll"],
)
def test_targets_out_of_range_are_named_on_request(op, by, bad, where, monkeypatch):
    y = Y.clone()
    y[where] = bad
    y[1, 1] = -100
    message = f"targets must lie in [0, 5) or be -100, got {bad} at position {where}"
    monkeypatch.delenv("DLLM_KERNELS_CHECK", raising=False)
    op(y)  # not asked for: NaN, tested elsewhere
    if by == "argument":
        raises(IndexError, message, op, y, check_targets=True)
    else:
        monkeypatch.setenv("DLLM_KERNELS_CHECK", "1")
        raises(IndexError, message, op, y)
        op(y, check_targets=False)
    op(Y, check_targets=True)


def test_a_bad_target_of_a_single_row():
    message = f"targets must lie in [0, {V}) or be -100, got 7 at position ()"
    raises(IndexError, message, token_nll, X[0, 0], torch.tensor(7), check_targets=True)


LOSSES = {
    "mdlm": MDLMCrossEntropyLoss,
    "block": BlockDiffusionCrossEntropyLoss,
    "hybrid": HybridDiffusionLLMLoss,
}


@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("name", LOSSES)
def test_diffusion_losses(name, form):
    loss = LOSSES[name]()
    layout, width = ("logits", "[B, L, V]") if form == "logits" else ("hidden", "[B, L, D]")
    good = X if form == "logits" else H

    def call(x=good, y=Y, noise=ON, p=ON, mask=ON, **options):
        if form == "logits":
            return loss(x, y, noise, p, mask, **options)
        return loss.forward_fused(x, W, y, noise, p, mask, **options)

    size = good.shape[-1]
    raises(TypeError, f"{layout} must be a torch.Tensor, got NoneType", call, None)
    raises(ValueError, f"{layout} must have dtype {FLOATS}, got int64", call, good.long())
    raises(ValueError, f"{layout} must have shape {width}, got (6, {size})", call, good.reshape(6, -1))
    raises(TypeError, "target_ids must be a torch.Tensor, got int", call, y=3)
    raises(ValueError, f"target_ids must have dtype {INTS}, got float32", call, y=Y.float())
    raises(ValueError, "target_ids must have shape [B, L], got (6,)", call, y=Y.flatten())
    raises(
        ValueError,
        f"{layout} must have shape (2, 3, {size}) to go with target_ids of shape (2, 3), got (2, 2, {size})",
        call, good[:, :2],
    )  # fmt: skip
    raises(ValueError, "loss_mask must have shape (2, 3) (that of target_ids), got (2, 2)", call, mask=ON[:, :2])
    raises(TypeError, "loss_mask must be a torch.Tensor, got bool", call, mask=True)
    raises(ValueError, "loss_mask must be on cpu like target_ids, got meta", call, mask=ON.to(META))
    if name != "block":
        raises(ValueError, "noise_mask must have shape (2, 3) (that of target_ids), got (3,)", call, noise=ON[0])
        raises(ValueError, "p_mask must have shape (2, 3) (that of target_ids), got (2, 1)", call, p=ON[:, :1])
    counts = ["num_diffusion_tokens"] + ["num_ar_tokens"] * (name == "hybrid")
    for count in counts:
        raises(TypeError, f"{count} must be a number or a 0-d tensor, got str", call, **{count: "3"})
        raises(TypeError, f"{count} must be a number or a 0-d tensor, got bool", call, **{count: True})
        raises(
            ValueError,
            f"{count} must be a number or a 0-d tensor, got a tensor of shape (2,)",
            call, **{count: torch.ones(2)},
        )  # fmt: skip
    if name == "hybrid":
        ar = {"loss_mask_ar": ON[:, :2], f"causal_{layout}": good}
        raises(ValueError, "loss_mask_ar must have shape (2, 3) (that of target_ids), got (2, 2)", call, **ar)
        raises(
            ValueError,
            f"causal_{layout} must have shape (2, 3, {size}) to go with target_ids of shape (2, 3), got (2, 2, {size})",
            call, loss_mask_ar=ON, **{f"causal_{layout}": good[:, :2]},
        )  # fmt: skip
        raises(
            ValueError,
            f"{layout} must have shape (2, 6, {size}) to go with target_ids of shape (2, 3), got (2, 5, {size})",
            call, torch.cat([good, good[:, :2]], 1), loss_mask_ar=ON,
        )  # fmt: skip


def caller(name, form):
    """A call of a diffusion loss in either form, every argument with a good default."""
    loss = LOSSES[name]()

    def call(x=X if form == "logits" else H, y=Y, noise=ON, p=ON, mask=ON, **options):
        return (
            loss(x, y, noise, p, mask, **options)
            if form == "logits"
            else loss.forward_fused(x, W, y, noise, p, mask, **options)
        )

    return call


forms = pytest.mark.parametrize("form", ["logits", "hidden"])
diffusion = pytest.mark.parametrize("name", LOSSES)


@forms
@diffusion
def test_loss_mask_ar_is_checked_whether_it_is_used_or_not(name, form):
    """A count handed over in its place does not vanish."""
    call = caller(name, form)
    raises(TypeError, "loss_mask_ar must be a torch.Tensor, got int", call, loss_mask_ar=6)
    of = "(that of target_ids)"
    for count in (torch.tensor(6), torch.tensor([6.0])):
        message = f"loss_mask_ar must have shape (2, 3) {of}, got {tuple(count.shape)}"
        raises(ValueError, message, call, loss_mask_ar=count)
    raises(ValueError, f"loss_mask_ar must have shape (2, 3) {of}, got (2, 2)", call, loss_mask_ar=ON[:, :2])
    raises(ValueError, "loss_mask_ar must have dtype bool, ", call, loss_mask_ar=ON.to(torch.complex64))
    raises(ValueError, "loss_mask_ar must be on cpu like target_ids, got meta", call, loss_mask_ar=ON.to(META))
    for mask in (None, ON, ON.bool(), ON.long()):
        assert torch.equal(call(loss_mask_ar=mask).total_loss, call().total_loss)


@forms
@diffusion
def test_what_a_loss_does_not_use_is_of_the_right_type(name, form):
    call, causal = caller(name, form), "causal_logits" if form == "logits" else "causal_hidden"
    names = {"noisy_input_ids": Y, causal: X if form == "logits" else H}
    if form == "hidden" and name != "hybrid":
        del names[causal]
    if name == "block":
        names |= {"noise": ON, "p": ON * 7}
    for argument, good in names.items():
        shown = {"noise": "noise_mask", "p": "p_mask"}.get(argument, argument)
        raises(TypeError, f"{shown} must be a torch.Tensor, got int", call, **{argument: 6})
        for value in (None, good, good[:1]):  # as the original, which does not look at them
            assert torch.equal(call(**{argument: value}).total_loss, call().total_loss)
    raises(TypeError, "num_ar_tokens must be a number or a 0-d tensor, got list", call, num_ar_tokens=[6])
    message = "num_ar_tokens must be a number or a 0-d tensor, got a tensor of shape (2, 3)"
    raises(ValueError, message, call, num_ar_tokens=ON)


@forms
@diffusion
def test_swapped_masks_are_found(name, form):
    call = caller(name, form)
    noise, p = torch.tensor([[True, False, True]] * B), torch.full((B, L), 0.5)
    message = "p_mask must hold probabilities, got bool; are noise_mask and p_mask swapped?"
    raises(ValueError, message, call, noise=p, p=noise)
    raises(ValueError, message, call, noise=noise, p=noise)
    if name == "block":  # which uses neither
        assert call(noise=noise, p=7 * p).total_loss == call().total_loss
        return
    message = "noise_mask must hold no fractions, got 0.5 at position (0, 0); are noise_mask and p_mask swapped?"
    raises(ValueError, message, call, noise=p, p=noise.float())
    raises(ValueError, message, call, noise=p, p=noise.long())
    for kind in (torch.bool, torch.int64, torch.float32, torch.bfloat16):
        assert call(noise=noise.to(kind), p=p).total_loss == call(noise=noise, p=p).total_loss
    whole = torch.tensor([[1.0, 0.5, 3.0]] * B)  # where it is supervised
    assert call(noise=whole, p=p, mask=noise).total_loss == call(noise=noise, p=p).total_loss


@pytest.mark.parametrize("bad", [-0.5, 1.5, float("nan"), float("inf"), 2])
@forms
@pytest.mark.parametrize("name", ["mdlm", "hybrid"])
def test_probabilities_lie_between_0_and_1_where_they_are_used(name, form, bad):
    call = caller(name, form)
    p = ON.clone() if isinstance(bad, float) else ON.long()
    p[1, 2] = bad
    message = f"p_mask must lie in [0, 1] where it is used, got {bad} at position (1, 2)"
    raises(ValueError, message, call, p=p)
    off = ON.clone()
    off[1, 2] = 0
    assert call(p=p, noise=off).total_loss.isfinite()
    assert call(p=p, mask=off).total_loss.isfinite()
    for good in (torch.zeros(B, L), ON, ON.long(), ON.half()):
        assert call(p=good).total_loss.isfinite()


@pytest.mark.parametrize("name", ["mdlm", "hybrid"])
def test_no_value_is_looked_at_while_compiling(name):
    call = caller(name, "logits")
    compiled = torch.compile(lambda p: call(p=p).total_loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ON / 2), call(p=ON / 2).total_loss)
    compiled(ON * 2)


@pytest.mark.parametrize("name", ["mdlm", "hybrid"])
def test_no_value_is_looked_at_on_another_device(name, monkeypatch):
    """Of a meta tensor none can be; the primitive stands aside, since it has no kernel there."""
    seen = []
    monkeypatch.setattr(
        "dllm_kernels.losses._rows.weighted_nll", lambda *a, **_: seen.append(a[2]) or WeightedNLL(ON, ON)
    )
    x, y, on = X.to(META), Y.to(META), ON.to(META)
    LOSSES[name]()(x, y, on, 2 * on, on)
    assert seen[0].device == META
    raises(ValueError, "p_mask must hold probabilities, got bool", LOSSES[name](), x, y, on, on.bool(), on)


def introspective(form, **settings):
    """I-DLM's loss in either form, every argument with a good default."""
    loss = IDLMLoss(**settings)

    def call(x=None, y=Y, answer=ON, valid=ON, seq_len=L, w=W, **options):
        x = (X if form == "logits" else H).repeat(1, 2, 1) if x is None else x
        head = (w,) if form == "hidden" else ()
        function = loss if form == "logits" else loss.forward_fused
        return function(x, *head, y, answer, valid, seq_len=seq_len, **options)

    return call


@forms
@pytest.mark.parametrize("auto_balance", [False, True])
def test_idlm(form, auto_balance):
    call, (name, good) = (
        introspective(form, auto_balance=auto_balance),
        (("logits", X), ("hidden", H))[form == "hidden"],
    )
    size = good.shape[-1]
    raises(TypeError, f"{name} must be a torch.Tensor, got list", call, [])
    raises(ValueError, "target_ids must have shape [B, L], got (6,)", call, y=Y.flatten())
    for rows in (3, 5, 7):  # of a single copy, and of more or less than two
        raises(
            ValueError,
            f"{name} must have shape (2, 6, {size}) to go with target_ids of shape (2, 3), got (2, {rows}, {size})",
            call, good.repeat(1, 3, 1)[:, :rows],
        )  # fmt: skip
    for mask in ("answer", "valid"):
        raises(TypeError, f"{mask}_mask must be a torch.Tensor, got int", call, **{mask: 6})
        raises(
            ValueError,
            f"{mask}_mask must have shape (2, 3) (that of target_ids), got (2, 2)",
            call,
            **{mask: ON[:, :2]},
        )
        raises(ValueError, f"{mask}_mask must be on cpu like target_ids, got meta", call, **{mask: ON.to(META)})
        raises(ValueError, f"{mask}_mask must have dtype bool, ", call, **{mask: ON.to(torch.complex64)})
    raises(ValueError, "seq_len must be the length of target_ids, 3, got 6", call, seq_len=6)
    raises(TypeError, "seq_len must be an int, got float", call, seq_len=3.0)
    raises(TypeError, "seq_len must be an int, got bool", call, seq_len=True)
    raises(TypeError, "num_diffusion_tokens must be a number or a 0-d tensor, got str", call, num_diffusion_tokens="3")
    message = "num_diffusion_tokens must be a number or a 0-d tensor, got a tensor of shape (2,)"
    raises(ValueError, message, call, num_diffusion_tokens=torch.ones(2))
    assert call(seq_len=np.int64(3)).total_loss.isfinite()
    if form == "hidden":
        raises(ValueError, "chunk_size must be at least 1, got 0", call, chunk_size=0)
        raises(TypeError, "lm_head_bias must be a torch.Tensor, got float", call, lm_head_bias=0.0)


def test_idlm_settings():
    raises(TypeError, "clean_loss_weight must be a number, got str", IDLMLoss, "0.2")
    raises(TypeError, "clean_loss_weight must be a number, got bool", IDLMLoss, True)
    raises(TypeError, "clean_loss_weight must be a number, got Parameter", IDLMLoss, torch.nn.Parameter(torch.ones(())))
    raises(ValueError, "clean_loss_weight must be finite, got nan", IDLMLoss, float("nan"))
    loss = IDLMLoss(np.float32(0.5), 1)
    assert loss.auto_balance is True
    loss.clean_loss_weight = float("inf")
    raises(ValueError, "clean_loss_weight must be finite, got inf", loss, X.repeat(1, 2, 1), Y, ON, ON, seq_len=L)


def correcting(form, **settings):
    """SCDD's loss in either form, every argument with a good default."""
    loss = SCDDLoss(**({"mask_token_id": V - 1} | settings))

    def call(x=X if form == "logits" else H, y=Y, noise=ON, p=ON / 2, mask=ON, w=W, z=Y, **options):
        head = (w,) if form == "hidden" else ()
        function = loss if form == "logits" else loss.forward_fused
        return function(x, *head, y, noise, p, mask, noisy_input_ids=z, **options)

    return call


@forms
@pytest.mark.parametrize("max_ratio", [0.1, 0.0])
def test_scdd(form, max_ratio):
    call, (name, good) = correcting(form, max_ratio=max_ratio), (("logits", X), ("hidden", H))[form == "hidden"]
    of, size = "(that of target_ids)", good.shape[-1]
    raises(
        ValueError,
        f"{name} must have shape (2, 3, {size}) to go with target_ids of shape (2, 3), got (2, 2, {size})",
        call, good[:, :2],
    )  # fmt: skip
    for argument, shown in (("p", "p_mask"), ("mask", "loss_mask")):
        raises(TypeError, f"{shown} must be a torch.Tensor, got float", call, **{argument: 0.5})
        raises(ValueError, f"{shown} must have shape (2, 3) {of}, got (2, 1)", call, **{argument: ON[:, :1]})
        raises(ValueError, f"{shown} must be on cpu like target_ids, got meta", call, **{argument: ON.to(META)})
    message = "noisy_input_ids must be given, the tokens that the model saw, got None"
    raises(ValueError, message, call, z=None)
    raises(TypeError, "noisy_input_ids must be a torch.Tensor, got list", call, z=[])
    raises(ValueError, f"noisy_input_ids must have dtype {INTS}, got bool", call, z=Y.bool())
    raises(ValueError, f"noisy_input_ids must have shape (2, 3) {of}, got (2, 2)", call, z=Y[:, :2])
    raises(ValueError, "noisy_input_ids must be on cpu like target_ids, got meta", call, z=Y.to(META))
    raises(TypeError, "noise_mask must be a torch.Tensor, got int", call, noise=6)
    raises(TypeError, f"causal_{name} must be a torch.Tensor, got int", call, **{f"causal_{name}": 6})
    raises(ValueError, f"loss_mask_ar must have shape (2, 3) {of}, got ()", call, loss_mask_ar=torch.tensor(6))
    for count in ("num_diffusion_tokens", "num_ar_tokens"):
        raises(TypeError, f"{count} must be a number or a 0-d tensor, got str", call, **{count: "3"})
    message = "p_mask must hold probabilities, got bool; are noise_mask and p_mask swapped?"
    raises(ValueError, message, call, p=ON.bool())
    for unused in (ON[:1], ON * 7):  # as the original, which does not look at it
        assert torch.equal(call(noise=unused).total_loss, call().total_loss)


@forms
@pytest.mark.parametrize("max_ratio", [0.1, 0.0])
@pytest.mark.parametrize("bad", [-0.5, 1.5, float("nan"), float("inf")])
def test_times_of_scdd_lie_between_0_and_1_where_they_are_used(form, max_ratio, bad):
    call, p, off = correcting(form, max_ratio=max_ratio), ON / 2, ON.clone()
    p[1], off[1] = bad, 0
    raises(ValueError, f"p_mask must lie in [0, 1] where it is used, got {bad} at position (1, 0)", call, p=p)
    assert call(p=p, mask=off).total_loss.isfinite()  # of a sequence that is not supervised


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"mask_token_id": 1.0}, TypeError, "mask_token_id must be an int, got float"),
        ({"mask_token_id": True}, TypeError, "mask_token_id must be an int, got bool"),
        ({"mask_token_id": -1}, ValueError, "mask_token_id must be at least 0, got -1"),
        ({"num_timesteps": 1}, ValueError, "num_timesteps must be at least 2, got 1"),
        ({"num_timesteps": 10.0}, TypeError, "num_timesteps must be an int, got float"),
        ({"max_ratio": 1.0}, ValueError, "max_ratio must lie in [0, 1), got 1.0"),
        ({"gamma_shape": None}, TypeError, "gamma_shape must be a number, got NoneType"),
        ({"t_peak": 1.0}, ValueError, "t_peak must lie in (0, 1), got 1.0"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0"),
        ({"chunk_size": "8"}, TypeError, "chunk_size must be an int, got str"),
    ],
)
def test_scdd_settings(setting, error, message):
    """At construction, and of attributes assigned since."""
    raises(error, message, SCDDLoss, **({"mask_token_id": 1} | setting))
    for form in (SCDDLoss.forward, functools.partial(SCDDLoss.forward_fused, lm_head_weight=W)):
        loss = SCDDLoss(1)
        for name, value in setting.items():
            setattr(loss, name, value)
        x = {"logits": X} if form is SCDDLoss.forward else {"hidden": H}
        batch = {"target_ids": Y, "noise_mask": ON, "p_mask": ON, "loss_mask": ON, "noisy_input_ids": Y}
        raises(error, message, form, self=loss, **x, **batch)


@forms
def test_the_mask_of_scdd_lies_in_the_vocabulary(form):
    message = f"mask_token_id must lie in [0, {V}), got {V}"
    raises(ValueError, message, correcting(form, mask_token_id=V))


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"max_ratio": 1.0}, ValueError, "max_ratio must lie in [0, 1), got 1.0"),
        ({"max_ratio": -0.1}, ValueError, "max_ratio must lie in [0, 1), got -0.1"),
        ({"max_ratio": float("nan")}, ValueError, "max_ratio must lie in [0, 1), got nan"),
        ({"max_ratio": "0.1"}, TypeError, "max_ratio must be a number, got str"),
        ({"gamma_shape": -1.0}, ValueError, "gamma_shape must be finite and at least 0, got -1.0"),
        ({"gamma_shape": float("inf")}, ValueError, "gamma_shape must be finite and at least 0, got inf"),
        ({"gamma_shape": True}, TypeError, "gamma_shape must be a number, got bool"),
        ({"t_peak": 0.0}, ValueError, "t_peak must lie in (0, 1), got 0.0"),
        ({"t_peak": 1}, ValueError, "t_peak must lie in (0, 1), got 1"),
        ({"t_peak": None}, TypeError, "t_peak must be a number, got NoneType"),
    ],
)
def test_scdd_schedule_settings(setting, error, message):
    good = {"max_ratio": 0.1, "gamma_shape": 1.0, "t_peak": 0.5}
    raises(error, message, scdd_schedule, torch.rand(2), **(good | setting))


def test_scdd_schedule_times():
    good = {"max_ratio": 0.1, "gamma_shape": 1.0, "t_peak": 0.5}
    raises(TypeError, "t must be a torch.Tensor, got float", scdd_schedule, 0.5, **good)
    raises(ValueError, f"t must have dtype {FLOATS}, got int64", scdd_schedule, torch.tensor([1]), **good)


LEARNT = {
    "p_mask": lambda t: MDLMCrossEntropyLoss()(X, Y, ON, t, ON),
    "p_mask, fused": lambda t: MDLMCrossEntropyLoss().forward_fused(H, W, Y, ON, t, ON),
    "p_mask, hybrid": lambda t: HybridDiffusionLLMLoss()(X, Y, ON, t, ON),
    "loss_mask_ar": lambda t: HybridDiffusionLLMLoss()(X, Y, ON, ON, ON, t, causal_logits=X),
    "loss_mask_ar, fused": lambda t: HybridDiffusionLLMLoss().forward_fused(H, W, Y, ON, ON, ON, t, causal_hidden=H),
    "block_mask": lambda t: DFlashDecayLoss()(X, Y, t),
    "block_mask, fused": lambda t: DFlashDecayLoss().forward_fused(H, W, Y, t),
    "loss_weights": lambda t: MaskedCrossEntropy()(X, Y, loss_weights=t),
    "loss_weights, fused": lambda t: FusedLinearCrossEntropy()(H, Y, W, loss_weights=t),
    "alpha": lambda t: HybridDiffusionLLMLoss(t[0, 0])(X, Y, ON, ON, ON),
    "alpha, parameter": lambda t: HybridDiffusionLLMLoss(torch.nn.Parameter(t[0, 0].detach()))(X, Y, ON, ON, ON),
    "alpha, fused": lambda t: HybridDiffusionLLMLoss(t[0, 0]).forward_fused(H, W, Y, ON, ON, ON),
    "num_diffusion_tokens": lambda t: MDLMCrossEntropyLoss()(X, Y, ON, ON, ON, num_diffusion_tokens=t.sum()),
    "num_diffusion_tokens, block": lambda t: BlockDiffusionCrossEntropyLoss()(X, Y, ON, ON, ON, None, t.sum()),
    "num_ar_tokens": lambda t: HybridDiffusionLLMLoss()(X, Y, ON, ON, ON, num_ar_tokens=t.sum()),
    "p_mask, scdd": lambda t: correcting("logits")(p=t),
    "p_mask, scdd fused": lambda t: correcting("hidden")(p=t),
    "num_diffusion_tokens, scdd": lambda t: correcting("logits")(num_diffusion_tokens=t.sum()),
    "num_diffusion_tokens, idlm": lambda t: introspective("logits")(num_diffusion_tokens=t.sum()),
    "num_diffusion_tokens, idlm fused": lambda t: introspective("hidden")(num_diffusion_tokens=t.sum()),
    "num_tokens": lambda t: encoder_ar_loss(X, Y, num_tokens=t.sum()),
    "num_label_tokens": lambda t: MaskedCrossEntropy()(X, Y, num_label_tokens=t.sum()),
}


@pytest.mark.parametrize("name", LEARNT)
def test_what_is_taken_as_a_constant_must_not_require_a_gradient(name):
    """The original would give it one."""
    message = f"{name.split(',')[0]} must not require a gradient, since it is taken as a constant; detach it"
    raises(ValueError, message, LEARNT[name], torch.ones(B, L, requires_grad=True))
    with torch.no_grad():
        LEARNT[name](torch.ones(B, L, requires_grad=True))
    if name != "alpha, parameter":
        LEARNT[name](torch.ones(B, L))


def test_masks_that_are_only_compared_may_require_a_gradient():
    """They have none in the original either."""
    on = torch.ones(B, L, requires_grad=True)
    for loss in LOSSES.values():
        assert torch.equal(loss()(X, Y, ON, ON, on).total_loss, loss()(X, Y, ON, ON, ON).total_loss)
    assert torch.equal(encoder_ar_loss(X, Y, on), encoder_ar_loss(X, Y, ON))
    out = MDLMCrossEntropyLoss()(X, Y, ON, ON, ON, loss_mask_ar=on, causal_logits=on)
    assert torch.equal(out.total_loss, MDLMCrossEntropyLoss()(X, Y, ON, ON, ON).total_loss)


@forms
def test_dflash(form):
    def call(x=X if form == "logits" else H, y=Y, mask=ON, **options):
        loss = DFlashDecayLoss()
        return loss(x, y, mask, **options) if form == "logits" else loss.forward_fused(x, W, y, mask, **options)

    name = form
    raises(TypeError, f"{name} must be a torch.Tensor, got list", call, [])
    raises(ValueError, "block_mask must have shape (2, 3) (that of target_ids), got (2, 2)", call, mask=ON[:, :2])
    raises(ValueError, "block_mask must be on cpu like target_ids, got meta", call, mask=ON.to(META))
    raises(ValueError, "block_size must be at least 1, got 0", call, block_size=0)
    raises(TypeError, "block_size must be an int, got float", call, block_size=4.0)
    raises(ValueError, "T must be a multiple of block_size - 1", call, block_size=3)
    raises(TypeError, "num_tokens must be a number or a 0-d tensor, got list", call, num_tokens=[1])


def test_dflash_settings():
    raises(ValueError, "normalize must be one of tokens, mean, got 'sum'", DFlashDecayLoss, normalize="sum")
    raises(ValueError, "loss_gamma must be positive or None, got 0", DFlashDecayLoss, 0)
    raises(ValueError, "loss_gamma must be positive or None, got nan", DFlashDecayLoss, float("nan"))
    raises(ValueError, "chunk_size must be at least 1, got 0", DFlashDecayLoss, chunk_size=0)


SIZES = ((TypeError, "must be an int, got str", "8"), (TypeError, "must be an int, got float", 1.5),
         (TypeError, "must be an int, got bool", True), (ValueError, "must be at least 1, got 0", 0))  # fmt: skip


@pytest.mark.parametrize(("error", "message", "size"), SIZES, ids=str)
def test_chunk_sizes(error, message, size):
    """Wherever a chunk size is taken, and where the attribute is assigned after construction."""
    message = f"chunk_size {message}"
    raises(error, message, DFlashDecayLoss, chunk_size=size)
    raises(error, message, FusedLinearCrossEntropy, chunk_size=size)
    raises(error, message, encoder_ar_loss_fused, H, W, Y, chunk_size=size)
    for loss in LOSSES.values():
        raises(error, message, loss().forward_fused, H, W, Y, ON, ON, ON, chunk_size=size)
    dflash, linear = DFlashDecayLoss(), FusedLinearCrossEntropy()
    dflash.chunk_size = linear.chunk_size = size
    raises(error, message, dflash.forward_fused, H, W, Y, ON)
    raises(error, message, dflash, X, Y, ON)
    raises(error, message, linear, H, Y, W)


def test_dflash_settings_assigned_after_construction():
    for name, value, message in (
        ("normalize", "sum", "normalize must be one of tokens, mean, got 'sum'"),
        ("loss_gamma", -1.0, "loss_gamma must be positive or None, got -1.0"),
        ("loss_gamma", torch.nn.Parameter(torch.tensor(2.0)), "loss_gamma must not require a gradient"),
    ):
        loss = DFlashDecayLoss()
        setattr(loss, name, value)
        raises(ValueError, message, loss, X, Y, ON)
        raises(ValueError, message, loss.forward_fused, H, W, Y, ON)


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_integers_of_numpy_are_integers(integer):
    sizes = {"num_active": 6, "chunk_size": 2, "memory_budget": 999}
    numpys = {name: integer(min(size, 255)) for name, size in sizes.items()}
    for op in (LINEAR_OPS["linear_token_nll"], LINEAR_OPS["weighted_linear_nll"]):
        torch.testing.assert_close(op(H, W, Y, **numpys).nll, op(H, W, Y, **sizes).nll)
    loss = DFlashDecayLoss(chunk_size=integer(2))
    torch.testing.assert_close(loss.forward_fused(H, W, Y, ON)[:2], DFlashDecayLoss().forward_fused(H, W, Y, ON)[:2])


@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_encoder_ar(form):
    def call(x=X if form == "logits" else H, y=Y, **options):
        return encoder_ar_loss(x, y, **options) if form == "logits" else encoder_ar_loss_fused(x, W, y, **options)

    raises(
        TypeError, ("encoder_logits" if form == "logits" else "hidden") + " must be a torch.Tensor, got dict", call, {}
    )
    raises(ValueError, "valid_mask must have shape (2, 3) (that of input_ids), got (2, 2)", call, valid_mask=ON[:, :2])
    raises(TypeError, "valid_mask must be a torch.Tensor, got bool", call, valid_mask=True)
    raises(ValueError, "valid_mask must be on cpu like input_ids, got meta", call, valid_mask=ON.to(META))
    raises(TypeError, "num_tokens must be a number or a 0-d tensor, got str", call, num_tokens="all")
    raises(ValueError, "backend must be one of auto, triton, torch, got 'numpy'", call, backend="numpy")


def test_encoder_ar_calls_its_ids_by_their_name():
    raises(ValueError, "input_ids must have shape [B, L], got (6,)", encoder_ar_loss, X, Y.flatten())
    raises(ValueError, f"input_ids must have dtype {INTS}, got float32", encoder_ar_loss, X, Y.float())
    raises(
        ValueError,
        "encoder_logits must have shape (2, 3, 5) to go with input_ids of shape (2, 3)",
        encoder_ar_loss,
        X[:, :2],
        Y,
    )


def test_compute_per_token_nll():
    raises(TypeError, "logits must be a torch.Tensor, got NoneType", compute_per_token_nll, None, Y)
    raises(TypeError, "target_ids must be a torch.Tensor, got list", compute_per_token_nll, X, [[0] * L] * B)
    raises(
        ValueError,
        "target_ids must have shape (2, 3) (that of logits without its last dimension), got (2, 2)",
        compute_per_token_nll, X, Y[:, :2],
    )  # fmt: skip
    raises(ValueError, "target_ids must be on cpu like logits, got meta", compute_per_token_nll, X, Y.to(META))
    raises(
        ValueError, "logits must have shape [..., V] with V >= 1, got (2, 3, 0)", compute_per_token_nll, X[..., :0], Y
    )


def twice(rows):
    """Rows of a masked and of a clean copy."""
    return rows.repeat(1, 2, 1) if isinstance(rows, torch.Tensor) else rows


FUSED = {
    "mdlm": (
        lambda h, w, y, b=None: MDLMCrossEntropyLoss().forward_fused(h, w, y, ON, ON, ON, lm_head_bias=b),
        ("hidden", "lm_head_weight", "target_ids", "lm_head_bias"),
    ),
    "block": (
        lambda h, w, y, b=None: BlockDiffusionCrossEntropyLoss().forward_fused(h, w, y, ON, ON, ON, lm_head_bias=b),
        ("hidden", "lm_head_weight", "target_ids", "lm_head_bias"),
    ),
    "hybrid": (
        lambda h, w, y, b=None: HybridDiffusionLLMLoss().forward_fused(h, w, y, ON, ON, ON, lm_head_bias=b),
        ("hidden", "lm_head_weight", "target_ids", "lm_head_bias"),
    ),
    "hybrid, the other branch": (
        lambda h, w, y, b=None: HybridDiffusionLLMLoss().forward_fused(
            torch.zeros(B, L, W.shape[1]), w, y, ON, ON, ON, ON, causal_hidden=h, lm_head_bias=b
        ),
        ("causal_hidden", "lm_head_weight", "target_ids", "lm_head_bias"),
    ),
    "dflash": (
        lambda h, w, y, b=None: DFlashDecayLoss().forward_fused(h, w, y, ON, lm_head_bias=b),
        ("hidden", "lm_head_weight", "target_ids", "lm_head_bias"),
    ),
    "idlm": (
        lambda h, w, y, b=None: introspective("hidden")(twice(h), y, w=w, lm_head_bias=b),
        ("hidden", "lm_head_weight", "target_ids", "lm_head_bias"),
    ),
    "idlm, balanced": (
        lambda h, w, y, b=None: introspective("hidden", auto_balance=True)(twice(h), y, w=w, lm_head_bias=b),
        ("hidden", "lm_head_weight", "target_ids", "lm_head_bias"),
    ),
    "scdd": (
        lambda h, w, y, b=None: correcting("hidden")(h, y, w=w, lm_head_bias=b),
        ("hidden", "lm_head_weight", "target_ids", "lm_head_bias"),
    ),
    "scdd, no uniform noise": (
        lambda h, w, y, b=None: correcting("hidden", max_ratio=0.0)(h, y, w=w, lm_head_bias=b),
        ("hidden", "lm_head_weight", "target_ids", "lm_head_bias"),
    ),
    "encoder AR": (
        lambda h, w, y, b=None: encoder_ar_loss_fused(h, w, y, lm_head_bias=b),
        ("hidden", "lm_head_weight", "input_ids", "lm_head_bias"),
    ),
    "linear cross-entropy": (
        lambda h, w, y, b=None: FusedLinearCrossEntropy()(h, y, w, lm_bias=b),
        ("hidden_states", "lm_weight", "labels", "lm_bias"),
    ),
    "chunk of DFlash": (
        lambda h, w, y, b=None: DFlashDecayLoss._chunk_nll(h, w, b, y),
        ("hidden_chunk", "lm_head_weight", "target_chunk", "lm_head_bias"),
    ),
}


@pytest.mark.parametrize(("loss", "names"), FUSED.values(), ids=FUSED)
def test_losses_from_hidden_states_call_their_arguments_as_the_caller_does(loss, names, request):
    rows = 2 * L if "idlm" in request.node.name else L
    hidden, weight, targets, bias = names
    first = "hidden" if hidden == "causal_hidden" else hidden  # what goes wrong for both branches is said of the first
    raises(TypeError, f"{hidden} must be a torch.Tensor, got list", loss, [], W, Y)
    raises(TypeError, f"{weight} must be a torch.Tensor, got NoneType", loss, H, None, Y)
    raises(TypeError, f"{targets} must be a torch.Tensor, got int", loss, H, W, 3)
    raises(TypeError, f"{bias} must be a torch.Tensor, got float", loss, H, W, Y, 0.0)
    raises(ValueError, f"{weight} must have dtype {FLOATS}, got int64", loss, H, W.long(), Y)
    raises(ValueError, f"{weight} must have shape [V, D], got (4,)", loss, H, W[0], Y)
    raises(ValueError, f"{weight} must have shape [V, D] with V >= 1 and D >= 1, got (0, 4)", loss, H, W[:0], Y)
    raises(
        ValueError, f"{hidden} must have shape [..., 4] to go with {weight} [V, D] = (5, 4), got (2, {rows}, 3)",
        loss, H[..., :3], W, Y,
    )  # fmt: skip
    raises(
        ValueError, f"{bias} must have shape (5,) (one entry per row of {weight}), got (4,)", loss, H, W, Y, BIAS[1:]
    )
    raises(ValueError, f"{bias} must be on cpu like {first}, got meta", loss, H, W, Y, BIAS.to(META))
    raises(ValueError, f"{weight} must be on cpu like {first}, got meta", loss, H, W.to(META), Y)
    raises(ValueError, f"{targets} must be on cpu like {first}, got meta", loss, H, W, Y.to(META))
    raises(
        ValueError,
        f"{bias} must have the dtype of {first}, torch.float32, unless torch.autocast is on, got torch.bfloat16",
        loss, H, W, Y, BIAS.bfloat16(),
    )  # fmt: skip
    raises(
        ValueError,
        f"{weight} must have the dtype of {hidden}, torch.bfloat16, unless torch.autocast is on, got torch.float32",
        loss, H.bfloat16(), W, Y,
    )  # fmt: skip
    if hidden in ("hidden_states", "hidden_chunk"):
        raises(
            ValueError, f"{targets} must have shape (2, 3) (that of {hidden} without its last dimension), got (2, 2)",
            loss, H, W, Y[:, :2],
        )  # fmt: skip


UNFUSED = {
    "mdlm": (lambda x, y: MDLMCrossEntropyLoss()(x, y, ON, ON, ON), "logits", "target_ids"),
    "block": (lambda x, y: BlockDiffusionCrossEntropyLoss()(x, y, ON, ON, ON), "logits", "target_ids"),
    "hybrid": (lambda x, y: HybridDiffusionLLMLoss()(x, y, ON, ON, ON), "logits", "target_ids"),
    "dflash": (lambda x, y: DFlashDecayLoss()(x, y, ON), "logits", "target_ids"),
    "idlm": (lambda x, y: introspective("logits")(twice(x), y), "logits", "target_ids"),
    "idlm, balanced": (
        lambda x, y: introspective("logits", auto_balance=True)(twice(x), y),
        "logits",
        "target_ids",
    ),
    "scdd": (lambda x, y: correcting("logits")(x, y), "logits", "target_ids"),
    "encoder AR": (encoder_ar_loss, "encoder_logits", "input_ids"),
    "compute_per_token_nll": (compute_per_token_nll, "logits", "target_ids"),
    "masked cross-entropy": (lambda x, y: MaskedCrossEntropy()(x, y), "logits", "labels"),
}


def test_every_loss_stands_in_the_lists():
    """A loss that is exported and not listed here would have none of these tests."""
    exported = {name: getattr(losses, name) for name in losses.__all__}
    classes = {
        name: loss for name, loss in exported.items() if isinstance(loss, type) and issubclass(loss, torch.nn.Module)
    }
    alike = {loss for loss in classes.values() if issubclass(loss, losses.MDLMCrossEntropyLoss.__base__)}
    assert alike - {losses.SCDDLoss} == set(LOSSES.values())  # which also needs the noisy ids, and has tests of its own
    for table in (FUSED, UNFUSED):
        assert [name for name in classes if not name.lower().startswith(tuple(key.split()[0] for key in table))] == []


@pytest.mark.parametrize(("loss", "logits", "targets"), UNFUSED.values(), ids=UNFUSED)
def test_losses_from_logits_call_their_arguments_as_the_caller_does(loss, logits, targets, request):
    rows = 2 * L if "idlm" in request.node.name else L
    raises(TypeError, f"{logits} must be a torch.Tensor, got list", loss, [], Y)
    raises(TypeError, f"{targets} must be a torch.Tensor, got int", loss, X, 3)
    raises(ValueError, f"{targets} must have dtype {INTS}, got float32", loss, X, Y.float())
    raises(ValueError, f"{logits} must have shape [..., V] with V >= 1, got (2, {rows}, 0)", loss, X[..., :0], Y)
    raises(ValueError, f"{targets} must be on cpu like {logits}, got meta", loss, X, Y.to(META))


def test_the_other_branch_of_hybrid_is_checked_before_any_kernel_runs(monkeypatch):
    monkeypatch.setattr("dllm_kernels.losses._rows.weighted_nll", None)
    call = functools.partial(HybridDiffusionLLMLoss(), X, Y, ON, ON, ON, ON)
    raises(ValueError, f"causal_logits must have dtype {FLOATS}, got int64", call, causal_logits=X.long())
    raises(
        ValueError,
        "causal_logits must have shape (2, 3, 5) to go with target_ids of shape (2, 3), got (2, 2, 5)",
        call, causal_logits=X[:, :2],
    )  # fmt: skip


@pytest.mark.parametrize(("loss", "names"), FUSED.values(), ids=FUSED)
def test_bad_targets_of_losses_from_hidden_states(loss, names, monkeypatch, request):
    assert_bad_targets_are_named(lambda y: loss(H, W, y), names[2], monkeypatch, "idlm" in request.node.name)


@pytest.mark.parametrize(("loss", "logits", "targets"), UNFUSED.values(), ids=UNFUSED)
def test_bad_targets_of_losses_from_logits(loss, logits, targets, monkeypatch, request):
    assert_bad_targets_are_named(lambda y: loss(X, y), targets, monkeypatch, "idlm" in request.node.name)


def assert_bad_targets_are_named(loss, name, monkeypatch, shifts):
    """By the position in the caller's tensor, also where the loss shifts it and the first token is no target."""
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "1")
    message = f"{name} must lie in [0, {V}) or be -100, got 7 at position "
    for where in ((1, 2), (0, 1)):
        y = Y.clone()
        y[where], y[1, 1] = 7, -100
        raises(IndexError, message + str(where), loss, y)
    first = Y.clone()
    first[:, 0] = 7
    if shifts or name == "input_ids":
        loss(first)
    else:
        raises(IndexError, message + "(0, 0)", loss, first)


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(D, V)


class Subclass(FusedLinearCrossEntropy):
    def forward(self, hidden_states, labels, lm_weight, **options):
        return super().forward(hidden_states, labels, lm_weight, **options)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("loss_fn", "made_from"),
    [
        (MaskedCrossEntropy(), "logits"),
        (MaskedCrossEntropy(), "h"),
        (FusedLinearCrossEntropy(), "h"),
        (Subclass(), "h"),
    ],
    ids=["masked, logits", "masked", "fused", "subclass"],
)
def test_bad_labels_of_mtp_are_named_where_the_caller_has_them(loss_fn, made_from, flat, monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "1")
    depths = [torch.randn(1, 6, D if made_from == "h" else V) for _ in range(2)]

    def call(labels, **options):
        labels = labels.flatten() if flat else labels
        return calculate_mtp_loss(
            loss_fn, labels=labels, model=Head(), **{f"mtp_per_depth_{made_from}": depths}, **options
        )

    for place in (1, 4, 5):
        labels = torch.zeros(1, 6, dtype=torch.long)
        labels[0, place] = 7
        where = (place,) if flat else (0, place)
        raises(IndexError, f"labels must lie in [0, {V}) or be -100, got 7 at position {where}", call, labels)
        given = [torch.zeros_like(labels), labels]
        given = [t.flatten() for t in given] if flat else given
        message = f"mtp_per_depth_targets[1] must lie in [0, {V}) or be -100, got 7 at position {where}"
        raises(IndexError, message, call, torch.zeros_like(labels), mtp_per_depth_targets=given)
    labels = torch.full((1, 6), -100)
    labels[0, 0] = 7  # no depth has it as a target
    assert call(labels).item() == 0


def test_mtp_calls_its_arguments_as_the_caller_does():
    h, labels = [torch.randn(B, L, D)] * 2, Y
    fused = functools.partial(calculate_mtp_loss, FusedLinearCrossEntropy(), labels=labels, model=Head())
    masked = functools.partial(calculate_mtp_loss, MaskedCrossEntropy(), labels=labels, model=Head())
    raises(TypeError, "labels must be a torch.Tensor, got list", fused, mtp_per_depth_h=h, labels=[0])
    raises(TypeError, "mtp_per_depth_h[1] must be a torch.Tensor, got list", fused, mtp_per_depth_h=[h[0], []])
    for call in (fused, masked):
        raises(
            ValueError, f"mtp_per_depth_h[0] must have dtype {FLOATS}, got int64", call, mtp_per_depth_h=[h[0].long()]
        )
    logits = [torch.zeros(B, L, V).long()]
    raises(
        ValueError, f"mtp_per_depth_logits[0] must have dtype {FLOATS}, got int64", masked, mtp_per_depth_logits=logits
    )
    raises(ValueError, "lm_weight must have shape [V, D], got (4,)", fused, mtp_per_depth_h=h, lm_weight=W[0])
    raises(
        ValueError, "mtp_per_depth_h[1] must have shape [..., 4] to go with lm_weight [V, D] = (5, 4), got (2, 3, 3)",
        fused, mtp_per_depth_h=[h[0], h[1][..., :3]],
    )  # fmt: skip
    targets = [Y, Y.float()]
    raises(
        ValueError, f"mtp_per_depth_targets[1] must have dtype {INTS}, got float32",
        fused, mtp_per_depth_h=h, mtp_per_depth_targets=targets,
    )  # fmt: skip


@pytest.mark.parametrize("loss", [MDLMCrossEntropyLoss, BlockDiffusionCrossEntropyLoss, HybridDiffusionLLMLoss])
def test_an_unknown_backend_of_a_loss(loss):
    raises(ValueError, "backend must be one of auto, triton, torch, got 'tpu'", loss(backend="tpu"), X, Y, ON, ON, ON)


def test_an_unknown_backend_in_the_environment(monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "fast")
    raises(ValueError, "DLLM_KERNELS_BACKEND must be one of auto, triton, torch, got 'fast'", token_nll, X, Y)


def test_inplace_backward_under_compile():
    def step(x):
        return token_nll(x, Y, inplace_backward=True).nll.sum()

    with pytest.raises(Exception, match=r"inplace_backward must be False under torch.compile, got True"):
        torch.compile(step, backend="eager", fullgraph=True)(X.clone().requires_grad_())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tensors lie on the CPU on purpose")
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_triton_on_cpu_tensors_without_the_interpreter(by, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    source, options = "DLLM_KERNELS_BACKEND", {}
    if by == "argument":
        source, options = "backend", {"backend": "triton"}
    else:
        monkeypatch.setenv("DLLM_KERNELS_BACKEND", "triton")
    raises(
        ValueError,
        f"{source}='triton' needs a CUDA or ROCm tensor, got one on cpu; set TRITON_INTERPRET=1",
        token_nll,
        X,
        Y,
        **options,
    )


def test_triton_that_is_not_installed():
    code = """
import sys
sys.modules["triton"] = None
import torch
from dllm_kernels.ops import token_nll
try:
    token_nll(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), backend="triton")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "backend='triton' was asked for, but triton is not installed"
