"""One token per row of hidden states with its log-probability and the entropy, as a sampler needs them.

Ours runs greedily, with sampling, and with the eight most likely tokens. It is compared with the minimum work of any
sampler: the bare product and ``log_softmax``, in chunks of 512 rows. ``plain`` is the code of samplers of diffusion
LMs: logits of all rows in float64, with noise of the same size. The floor counts the flops of the product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import measure
from benchmarks.record import report
from benchmarks.shapes import SAMPLES
from dllm_kernels import ops

CHUNK = 512


def candidates(hidden: torch.Tensor, head: torch.Tensor, options: Any) -> dict[str, measure.CandidateLike]:
    """Return the calls by name."""
    seeds = torch.arange(len(hidden), device=hidden.device)

    def ours(**more: Any) -> object:
        return ops.linear_sample(hidden, head, seeds=seeds, backend=options.backend, **more)

    def product(_: int) -> None:
        for rows in torch.split(hidden, CHUNK):
            torch.log_softmax(F.linear(rows, head), -1, dtype=torch.float32)

    def plain(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden, head).double()
        ids = (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)
        return ids, torch.softmax(logits, -1).gather(-1, ids[:, None])

    drawn: dict[str, measure.CandidateLike]
    drawn = {"ours": lambda _: ours(), "greedy": lambda _: ours(temperature=0), "top 8": lambda _: ours(return_top=8)}
    return drawn if options.alone else {**drawn, "product": product, "plain": plain}


def main(argv: list[str]) -> int:
    """Print the table and write the JSON."""
    parser = measure.arguments("linear_sample", __doc__)
    measure.add_alone(parser)
    measure.add_shape(parser)
    options = measure.parse(parser, argv)
    measured = measure.ceilings(options.device, options.dtype, options.size)
    results = []
    for shape in measure.chosen(SAMPLES[options.size], options):
        hidden = torch.randn(shape.rows, shape.hidden, device=options.device, dtype=options.dtype)
        head = torch.randn(shape.vocab, shape.hidden, device=options.device, dtype=options.dtype) / shape.hidden**0.5
        case = {"shape": shape.name, "rows": shape.rows, "V": shape.vocab, "D": shape.hidden}
        floor = 2 * shape.rows * shape.vocab * shape.hidden / measured["gemm_flop_per_s"]
        each = candidates(hidden, head, options)
        results += measure.compare("linear_sample", case, "forward", each, options, floor_s=floor)
    return report(results, options, baseline="plain", measured_ceilings=measured)
