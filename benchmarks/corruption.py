"""The corruption routines compared with the original and the plain ones.

The floor of a routine is the time of its memory traffic at this run's copy bandwidth: ids, mask and probabilities, 22
bytes per position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import reference.corruption
from benchmarks import peers
from benchmarks.measure import Result, arguments, ceilings, compare, parse
from benchmarks.record import report
from benchmarks.shapes import MASKS, MaskShape
from dllm_kernels import corruption

VOCAB = 126_464
MASK_TOKEN = 126_336
BYTES_A_POSITION = 8 + 1 + 8 + 1 + 4
# The batches of the published CPU figures.
BARS = (MaskShape(64, 4096, 32), MaskShape(64, 4096, None))
# The plain code loops over blocks in Python, which takes seconds per call for larger batches.
LARGEST_PLAIN = 2048

Inputs = list[tuple[torch.Tensor, torch.Tensor]]
Routine = Callable[[torch.Tensor, torch.Tensor], Any]


def make_inputs(shape: MaskShape, device: str, sets: int) -> Inputs:
    """Draw ids and a mask that supervises 70 % of them."""
    size = (shape.batch, shape.length)
    return [(torch.randint(VOCAB, size, device=device), torch.rand(size, device=device) < 0.7) for _ in range(sets)]


def routines(package: Any, block_size: int | None, **options: Any) -> dict[str, Routine]:
    """Return the routines of one implementation; all take the arguments of the original."""
    found: dict[str, Routine] = {
        "blockwise": lambda ids, mask: package.corrupt_blockwise(ids, mask, MASK_TOKEN, block_size, **options),
        "uniform_random": lambda ids, mask: package.corrupt_uniform_random(ids, mask, VOCAB, block_size, **options),
    }
    if block_size is None:
        found["uniform"] = lambda ids, mask: package.corrupt_uniform(ids, mask, MASK_TOKEN, **options)
        found["all_masked"] = lambda ids, mask: package.corrupt_all_masked(ids, mask, MASK_TOKEN, **options)
        found["mix"] = lambda ids, mask: package.corrupt_mix(
            ids, mask, MASK_TOKEN, VOCAB, mask_prob=_of_row(ids, 0.4), uniform_prob=_of_row(ids, 0.2), **options
        )
    return found


def _of_row(ids: torch.Tensor, probability: float) -> torch.Tensor:
    return torch.full((len(ids),), probability, device=ids.device)


def implementations(shape: MaskShape, backend: str) -> dict[str, dict[str, Routine]]:
    """Return implementation -> routine -> callable, for the implementations available at this size."""
    found = {"ours": routines(corruption, shape.block_size, backend=backend)}
    if (peer := peers.module(peers.DLLM_CORRUPTION)) is not None:
        found["original"] = routines(peer, shape.block_size)
    if shape.batch * shape.length <= LARGEST_PLAIN:
        found["plain"] = routines(reference.corruption, shape.block_size)
    return found


def run_shape(shape: MaskShape, options: Any, copy_bytes_per_s: float) -> list[Result]:
    """Measure every routine at one shape."""
    inputs = make_inputs(shape, options.device, sets=2)
    found = implementations(shape, options.backend)
    results: list[Result] = []
    for routine in found["ours"]:
        case = {"routine": routine, "B": shape.batch, "L": shape.length, "block": shape.block_size or "-"}
        timed = {name: (lambda index, run=them[routine]: run(*inputs[index])) for name, them in found.items()}
        floor = shape.batch * shape.length * BYTES_A_POSITION / copy_bytes_per_s
        # On the CPU, numpy allocates memory that the profiler does not see.
        on_gpu = torch.device(options.device).type == "cuda"
        results += compare("corruption", case, "forward", timed, options, input_sets=2, floor_s=floor, memory=on_gpu)
    return results


def main(argv: list[str]) -> int:
    """Print the table and write the JSON."""
    options = parse(arguments("corruption", __doc__), argv)
    measured = ceilings(options.device, options.dtype, options.size)
    shapes = [*MASKS[options.size], *(BARS if options.size == "small" else ())]
    results = [r for shape in shapes for r in run_shape(shape, options, measured["copy_bytes_per_s"])]
    names = {result.name: None for result in results}
    return report(results, options, baseline=peers.baseline(names), measured_ceilings=measured)
