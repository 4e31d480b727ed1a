"""Peak memory of one loss along the vocabulary: the plain loss, which materialises the logits, compared with ours.

Both compute a masked-diffusion loss from hidden states, forward and backward, with half of the tokens masked. The head
is frozen, because the gradient of a trained head has the same size in both. Only memory is measured, not time.
``python -m benchmarks plots`` draws the picture of README from the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks import linear_nll, measure, peers
from benchmarks.record import report
from benchmarks.result import Result
from benchmarks.shapes import Shape

VOCABULARIES = {
    "toy": (257, 1024),
    "small": (32_000, 64_000, 126_464, 151_936, 262_144),
    "full": (32_000, 64_000, 126_464, 151_936, 262_144),
}
ROWS = {"toy": 64, "small": 1024, "full": 16_384}
WIDTH = {"toy": 32, "small": 64, "full": 4096}
SHARE = 0.5


def main(argv: Sequence[str]) -> int:
    """Print the table and write the JSON."""
    options = measure.parse(measure.arguments("memory", __doc__), argv)
    options.recipe_chunk = False
    losses = {"plain": peers.plain_linear, "ours": linear_nll.ours(options)}
    results = []
    for vocab in VOCABULARIES[options.size]:
        shape = Shape(f"V {vocab}", 1, ROWS[options.size], vocab, WIDTH[options.size], frozen=True)
        inputs = linear_nll.make_inputs(shape, SHARE, options.dtype, options.device, True)
        dtype = str(options.dtype).removeprefix("torch.")
        case = {"rows": shape.rows, "V": vocab, "D": shape.hidden, "dtype": dtype, "active": f"{SHARE:.0%}"}
        for name, loss in losses.items():
            peak = measure.peak_memory(linear_nll.candidate(loss, inputs, shape, "both"), options.device)
            results.append(Result("memory", case, "both", name, options.cache, peak_bytes=peak))
        print(f"V {vocab}: measured", flush=True)
    torch.manual_seed(options.seed)
    return report(results, options, baseline="plain")
