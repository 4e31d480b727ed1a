"""Calls with visible overhead: small calls, and calls on a million logits or more that plain PyTorch does well.

Compares ours with plain PyTorch and, for the MDLM loss, with the original if it is installed. Half of the rows are
masked. Torch uses one thread unless ``--threads`` is passed, and the inputs are in the cache. ``--busy`` keeps this
many other processes busy during the measurement, as a data loader does.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from benchmarks import measure, peers, record
from dllm_kernels import ops
from dllm_kernels.losses import MDLMCrossEntropyLoss

Call = Callable[[torch.Tensor], object]
BUSY = "while True: pass"


class Case(NamedTuple):
    """A call: the function of logits with this shape and dtype, and whether backward runs as well."""

    what: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    both: bool


FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = (
    Case("log p", (1, 1, 100), FP32, False),
    Case("log p, entropy", (1, 1, 100), FP32, True),
    Case("mdlm", (2, 64, 1000), FP32, True),
    Case("mdlm", (8, 512, 512), BF16, True),
    Case("mdlm", (8, 512, 512), FP16, True),
    Case("mdlm", (1, 512, 8000), BF16, True),
    Case("mdlm", (1, 512, 32000), BF16, False),
    Case("log p", (1, 256, 32000), FP32, False),
    Case("mdlm", (64, 512, 16), FP32, True),
)
TOY = tuple(case for case in CASES if case.shape[-1] * case.shape[-2] <= 64_000)


def _policy(ids: torch.Tensor, entropy: bool, backend: str) -> dict[str, Call]:
    def ours(logits: torch.Tensor) -> torch.Tensor:
        out = ops.token_log_probs(logits, ids, with_entropy=entropy, backend=backend)
        return out.log_probs if out.entropy is None else out.log_probs + out.entropy

    def plain(logits: torch.Tensor) -> torch.Tensor:
        log_p = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        found = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return found - (log_p.exp() * log_p).sum(-1) if entropy else found

    return {"ours": ours, "plain": plain}


def _mdlm(ids: torch.Tensor, backend: str) -> dict[str, Call]:
    noise, supervised = torch.rand(ids.shape, device=ids.device) < 0.5, torch.ones_like(ids, dtype=torch.bool)
    p_mask, count = torch.rand(ids.shape, device=ids.device) * 0.9 + 0.1, ids.numel()
    weights = torch.where(noise, 1 / p_mask, 0.0) / count
    found: dict[str, Call] = {}
    losses = {"ours": MDLMCrossEntropyLoss(backend=backend)}
    if (original := peers.module(peers.DLLM_LOSS)) is not None:
        losses["original"] = original.MDLMCrossEntropyLoss()
    for name, loss in losses.items():
        found[name] = lambda x, loss=loss: (
            loss(x, ids, noise, p_mask, supervised, num_diffusion_tokens=count).total_loss
        )  # type: ignore[misc]
    return {**found, "plain": lambda logits: peers.plain_mdlm(logits, ids, weights)}


def candidates(case: Case, options: argparse.Namespace) -> dict[str, measure.Candidate]:
    """Return ours and the peers, on the same logits."""
    logits = torch.randn(case.shape, device=options.device).to(case.dtype).requires_grad_(case.both)
    ids = torch.randint(case.shape[-1], case.shape[:-1], device=options.device)
    entropy = "entropy" in case.what
    calls = _mdlm(ids, options.backend) if case.what == "mdlm" else _policy(ids, entropy, options.backend)

    def both(call: Call) -> None:
        call(logits).sum().backward()  # type: ignore[attr-defined]

    dropped = measure.without_gradients([logits])
    run = both if case.both else lambda call: call(logits)
    return {
        name: measure.Candidate(lambda _, call=call: run(call), dropped)  # type: ignore[misc]
        for name, call in calls.items()
    }


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep this many other processes busy."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def run(options: argparse.Namespace) -> list[measure.Result]:
    """Measure every call."""
    results: list[measure.Result] = []
    with busy(options.busy):
        for case in TOY if options.size == "toy" else CASES:
            label = {
                "call": case.what,
                "logits": " x ".join(map(str, case.shape)),
                "dtype": str(case.dtype).removeprefix("torch."),
                "busy": options.busy,
            }
            phase = "both" if case.both else "forward"
            found = measure.compare("calls", label, phase, candidates(case, options), options, memory=False)
            for result in found:
                assert result.timing is not None
                result.extra["best_us"] = 1e6 * min(result.timing.samples)
            results += found
    return results


def main(argv: Sequence[str]) -> int:
    """Print the table and write the JSON."""
    parser = measure.arguments("calls", __doc__)
    parser.add_argument("--busy", type=int, default=0, help="number of other busy processes")
    parser.set_defaults(samples=100, cache="hot", threads=1)
    options = measure.parse(parser, argv)
    return record.report(run(options), options, baseline="plain")
