"""The cases of the benchmarks at small size, for pytest-benchmark: ``pytest benchmarks --benchmark-only``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import losses, measure
from dllm_kernels import corruption, ops
from dllm_kernels.collate import DLLMCollator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = "toy"


@pytest.fixture
def options() -> argparse.Namespace:
    """Defaults of the command line, toy size."""
    parsed = measure.parse(measure.arguments("test"), ["--size", SIZE, "--device", DEVICE, "--threads", "1"])
    parsed.compiled = False
    return parsed


def timed(benchmark: Any, run: Callable[[], object]) -> None:
    """Time a call, the device's work included."""

    def finished() -> None:
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(finished, rounds=20, warmup_rounds=2)


@pytest.mark.parametrize("who", ["ours", "reference"])
@pytest.mark.parametrize("phase", ["forward", "both"])
@pytest.mark.parametrize("name", losses.SUBJECTS)
def test_loss(name: str, phase: str, who: str, options: argparse.Namespace, benchmark: Any) -> None:
    """Every loss, ours and the plain one; first the gradients against float64."""
    build, by_size = losses.SUBJECTS[name]
    draw = losses.Draw(by_size[SIZE], 0.5, options)
    off = losses.errors(build, draw)
    assert off["ours"] <= 2 * off["reference"] + torch.finfo(options.dtype).eps
    case = build(draw)
    step = losses.candidate(case, case.losses[who], phase)
    timed(benchmark, lambda: step.run(step.prepare(0)))


def _rows(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = losses.Draw(losses.SUBJECTS["mdlm"][1][SIZE], 0.5, options)
    return draw.logits(), draw.hidden(), draw.head(frozen=False), draw.ids(), draw.mask().float()


@pytest.mark.parametrize(
    "op",
    ["token_nll", "weighted_nll", "row_stats", "linear_token_nll", "weighted_linear_nll", "linear_row_stats"],
)
def test_op(op: str, options: argparse.Namespace, benchmark: Any) -> None:
    """Every differentiable primitive, forward and backward."""
    logits, hidden, head, ids, weights = _rows(options)

    def linear_row_stats() -> torch.Tensor:
        return ops.linear_row_stats(hidden, head, ids, entropy=True).entropy.sum()  # type: ignore[union-attr]

    calls: dict[str, Callable[[], torch.Tensor]] = {
        "token_nll": lambda: ops.token_nll(logits, ids).nll.sum(),
        "weighted_nll": lambda: ops.weighted_nll(logits, ids, weights).loss,
        "row_stats": lambda: ops.row_stats(logits, ids, entropy=True).entropy.sum(),  # type: ignore[union-attr]
        "linear_row_stats": linear_row_stats,
        "linear_token_nll": lambda: ops.linear_token_nll(hidden, head, ids).nll.sum(),
        "weighted_linear_nll": lambda: ops.weighted_linear_nll(hidden, head, ids, weights).loss,
    }
    timed(benchmark, lambda: calls[op]().backward())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_linear_sample(temperature: float, options: argparse.Namespace, benchmark: Any) -> None:
    """A token of each row, without a gradient."""
    _, hidden, head, *_ = _rows(options)
    timed(benchmark, lambda: ops.linear_sample(hidden, head, temperature=temperature))


@pytest.mark.parametrize("routine", ["uniform", "blockwise", "uniform_random", "all_masked", "gumbel_topk"])
def test_corruption(routine: str, benchmark: Any) -> None:
    """Every corruption routine, and the selection on its own."""
    ids = torch.randint(1000, (2, 256), device=DEVICE)
    supervised = torch.ones_like(ids, dtype=torch.bool)
    log_w, k = torch.randn(2, 256, device=DEVICE), torch.tensor([7, 99], device=DEVICE)
    calls: dict[str, Callable[[], object]] = {
        "uniform": lambda: corruption.corrupt_uniform(ids, supervised, 0),
        "blockwise": lambda: corruption.corrupt_blockwise(ids, supervised, 0, block_size=32),
        "uniform_random": lambda: corruption.corrupt_uniform_random(ids, supervised, 1000),
        "all_masked": lambda: corruption.corrupt_all_masked(ids, supervised, 0),
        "gumbel_topk": lambda: ops.gumbel_topk_mask(log_w, k),
    }
    timed(benchmark, calls[routine])


def test_collate(benchmark: Any) -> None:
    """The collator, blocks and padding."""
    sample = {"input_ids": list(range(200)), "loss_mask": [0] * 50 + [1] * 150, "attention_mask": [1] * 200}
    collator = DLLMCollator(eos_token_id=1, block_size=32, pad_seq_len_divisible=64)
    timed(benchmark, lambda: collator([sample] * 4))
