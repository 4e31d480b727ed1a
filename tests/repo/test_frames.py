"""Frames and files of the package on the stack when a kernel is launched."""

import sys

import pytest
import torch

import dllm_kernels
from dllm_kernels import MDLMCrossEntropyLoss
from dllm_kernels.corruption import corrupt_blockwise
from dllm_kernels.ops import linear_divergence, token_nll
from tests.conftest import INTERPRETED

N, V, D = 4, 16, 8
IDS, MASK = torch.randint(0, V, (1, N)), torch.ones(1, N, dtype=torch.bool)
HIDDEN, WEIGHT = torch.randn(1, N, D, requires_grad=True), torch.randn(V, D)
PACKAGE = dllm_kernels.__path__[0]

CALLS = {
    "token_nll": (lambda: token_nll(torch.randn(1, N, V), IDS, backend="triton"), "token_nll", (7, 4)),
    "MDLM": (
        lambda: MDLMCrossEntropyLoss(backend="triton").forward_fused(
            HIDDEN, WEIGHT, IDS, MASK, torch.full((1, N), 0.5), MASK, num_diffusion_tokens=3
        ),
        "linear_nll",
        (10, 6),
    ),
    "linear_divergence": (
        lambda: linear_divergence(HIDDEN[0], WEIGHT, HIDDEN[0].detach(), kind="kl", backend="triton"),
        "divergence",
        (9, 5),
    ),
    "corrupt_blockwise": (
        lambda: corrupt_blockwise(IDS, MASK, 3, block_size=2, seeds=IDS[:, 0], backend="triton"),
        "corruption",
        (5, 4),
    ),
}


def stack_at_a_launch(call, module):
    """Return the frames of the package below which Triton is entered from ``backends/triton/<module>.py``."""
    found = []

    def look(frame, event, _):
        if event != "call" or found or "triton/runtime" not in frame.f_code.co_filename.replace("\\", "/"):
            return
        files = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                files.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
            frame = frame.f_back
        if files and files[0].split(":")[0].endswith(f"triton/{module}.py"):
            found.append(files)

    call()  # imports and caches
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found[0]


@pytest.mark.skipif(not INTERPRETED, reason="kernels run in the interpreter")
@pytest.mark.parametrize("name", CALLS)
def test_frames_and_files_from_a_call_to_a_kernel(name):
    call, module, (most_frames, most_files) = CALLS[name]
    frames = stack_at_a_launch(call, module)
    files = {frame.split(":")[0] for frame in frames}
    assert len(frames) <= most_frames, frames
    assert len(files) <= most_files, frames
