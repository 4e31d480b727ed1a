"""NLL from hidden states of 16 bits with options of the head: float32 logits, and LoRA on a frozen head.

``ours`` is the weighted NLL with logits in the dtype of the operands, and the baseline of the table. ``float32 logits``
keeps the logits in float32, and ``LoRA`` trains an adapter of rank 16 beside the frozen head. The plain forms
materialise the logits and use autograd: ``plain`` rounds them, ``plain, float32 logits`` multiplies widened operands,
and ``plain, LoRA`` adds the adapter's output to the logits, as PEFT does. The floor counts the flops of two products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import measure
from benchmarks.record import report
from benchmarks.shapes import HEAD_OPTIONS
from dllm_kernels import ops

RANK = 16


def candidates(hidden: torch.Tensor, head: torch.Tensor, options: Any) -> dict[str, measure.CandidateLike]:
    """Return the calls by name."""
    N, V, device = len(hidden), len(head), hidden.device
    targets, weights = torch.randint(V, (N,), device=device), torch.rand(N, device=device) / N
    down = (torch.randn(RANK, hidden.shape[1], device=device) / RANK).to(hidden.dtype).requires_grad_()
    up = torch.randn(V, RANK, device=device).to(hidden.dtype).requires_grad_()

    def ours(**more: Any) -> None:
        ops.weighted_linear_nll(hidden, head, targets, weights, backend=options.backend, **more).loss.backward()  # type: ignore[no-untyped-call]

    def plain(logits: torch.Tensor) -> None:
        (F.cross_entropy(logits.float(), targets, reduction="none") * weights).sum().backward()  # type: ignore[no-untyped-call]

    calls: dict[str, Any] = {
        "ours": ours,
        "float32 logits": lambda: ours(logits_dtype=torch.float32),
        "LoRA": lambda: ours(extra=(F.linear(hidden, down), up)),
    }
    if not options.alone:
        calls["plain"] = lambda: plain(F.linear(hidden, head))
        calls["plain, float32 logits"] = lambda: plain(F.linear(hidden.float(), head.float()))
        calls["plain, LoRA"] = lambda: plain(F.linear(hidden, head) + F.linear(F.linear(hidden, down), up))

    dropped = measure.without_gradients([hidden, down, up])
    return {name: measure.Candidate(lambda _, call=call: call(), dropped) for name, call in calls.items()}  # type: ignore[misc]


def main(argv: list[str]) -> int:
    """Print the table and write the JSON."""
    parser = measure.arguments("head_options", __doc__)
    measure.add_alone(parser)
    measure.add_shape(parser)
    parser.set_defaults(dtype="bfloat16")
    options = measure.parse(parser, argv)
    measured = measure.ceilings(options.device, options.dtype, options.size)
    results = []
    for shape in measure.chosen(HEAD_OPTIONS[options.size], options):
        hidden = torch.randn(shape.rows, shape.hidden, device=options.device).to(options.dtype).requires_grad_()
        head = (torch.randn(shape.vocab, shape.hidden, device=options.device) / shape.hidden**0.5).to(options.dtype)
        case = {"shape": shape.name, "rows": shape.rows, "V": shape.vocab, "D": shape.hidden}
        floor = 2 * 2 * shape.rows * shape.vocab * shape.hidden / measured["gemm_flop_per_s"]
        each = candidates(hidden, head, options)
        results += measure.compare("head_options", case, "both", each, options, floor_s=floor)
    return report(results, options, baseline="ours", measured_ceilings=measured)
