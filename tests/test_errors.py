"""Bad input: each message names the argument, what was expected and what came, before any kernel runs."""

import re
import subprocess
import sys

import pytest
import torch

from dllm_kernels import (
    BlockDiffusionCrossEntropyLoss,
    DFlashDecayLoss,
    HybridDiffusionLLMLoss,
    MDLMCrossEntropyLoss,
    compute_per_token_nll,
    encoder_ar_loss,
    encoder_ar_loss_fused,
)
from dllm_kernels.ops import linear_token_nll, token_nll, weighted_linear_nll, weighted_nll

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


def test_the_losses_check_targets_too(monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "1")
    raises(IndexError, "targets must lie in [0, 5) or be -100, got 6", MDLMCrossEntropyLoss(), X, Y + 6, ON, ON, ON)


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


@pytest.mark.parametrize("form", ["logits", "hidden"])
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
    raises(ValueError, "targets must have shape (2, 3)", compute_per_token_nll, X, Y[:, :2])


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


def test_nothing_is_written_before_the_checks():
    x = X.clone().requires_grad_()
    raises(ValueError, "targets must have shape", token_nll, x, Y[:, :2])
    assert x._version == 0
