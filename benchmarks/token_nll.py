"""Per-token NLL from logits, weighted and summed as in the MDLM loss: ours compared with the original and peers.

Measures forward, backward and both, with a random upstream gradient, at several shares of active rows. The floor counts
the fewest bytes: forward reads the active rows; backward reads them once more and writes every row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import measure, peers
from benchmarks.record import report
from benchmarks.shapes import LOGITS, MDLM_SHARES, Shape
from dllm_kernels import ops

PHASES = ("forward", "backward", "both")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(shape: Shape, share: float, dtype: torch.dtype, device: torch.device | str) -> Inputs:
    """Draw (logits with gradient, targets, MDLM weights 1/p for a ``share`` of the rows, a random upstream scalar)."""
    size = (shape.batch, shape.length)
    logits = torch.randn(*size, shape.vocab, device=device, dtype=dtype).requires_grad_()
    targets = torch.randint(0, shape.vocab, size, device=device)
    p_mask = torch.rand(size, device=device) * 0.9 + 0.1
    weights = torch.where(torch.rand(size, device=device) < share, p_mask.reciprocal(), 0.0)
    return logits, targets, weights, torch.rand((), device=device) + 0.5


def losses(options: Any) -> dict[str, peers.Loss]:
    """Return ours and, unless ``options.alone``, the available peers, by name."""

    def ours(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ops.weighted_nll(logits, targets, weights, backend=options.backend).loss

    return {"ours": ours, **({} if options.alone else peers.logits_losses(options.device, compiled=options.compiled))}


def candidate(loss: peers.Loss, inputs: list[Inputs], phase: str) -> measure.Candidate:
    """Build one loss in one phase. The previous gradient is dropped before, untimed, so that a new one is allocated."""

    def dropped(index: int) -> int:
        inputs[index][0].grad = None
        return index

    def forward(index: int) -> torch.Tensor:
        logits, targets, weights, _ = inputs[index]
        return loss(logits, targets, weights)

    def backward(state: tuple[torch.Tensor, int]) -> None:
        torch.autograd.backward(state[0], inputs[state[1]][3])

    def both(index: int) -> None:
        torch.autograd.backward(forward(index), inputs[index][3])

    if phase == "backward":
        return measure.Candidate(backward, lambda index: (forward(dropped(index)), index))
    return measure.Candidate(both if phase == "both" else forward, dropped)


def _gradient(loss: peers.Loss, rows: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Compute the gradient of the logits, for a new leaf of the dtype."""
    logits, targets, weights, upstream = rows
    leaf = logits.detach().to(dtype, copy=True).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    (grad,) = torch.autograd.grad(loss(leaf, targets, weights.to(wide)), leaf, upstream.to(wide))
    return grad


def errors(candidates: dict[str, peers.Loss], inputs: Inputs) -> tuple[dict[str, float], float]:
    """Compare each candidate's gradient of all rows with the plain form in float64; also return the allowed error."""
    logits, targets, weights, upstream = inputs
    dtype, rows = logits.dtype, logits.shape[:2].numel()

    def part(chunk: slice) -> Inputs:
        first, second, third = (t.detach().flatten(0, 1)[chunk][None] for t in (logits, targets, weights))
        return first, second, third, upstream

    def error(gradient_of: Callable[[slice], torch.Tensor]) -> float:
        distance = measure.Distance()
        for chunk in measure.slices(rows, logits.shape[-1]):
            distance.add(gradient_of(chunk), _gradient(peers.plain_mdlm, part(chunk), torch.float64)[0])
        return distance.relative()

    def of_all(loss: peers.Loss) -> float:
        grad = _gradient(loss, inputs, dtype).flatten(0, 1)
        return error(lambda chunk: grad[chunk])

    plain = error(lambda chunk: _gradient(peers.plain_mdlm, part(chunk), dtype)[0])
    return measure.each_error(candidates, of_all), measure.allowed_error(plain, dtype)


def floor_bytes_moved(shape: Shape, active: int, itemsize: int, phase: str) -> int:
    """Return the fewest bytes that a phase can move."""
    forward = active * shape.vocab * itemsize
    backward = forward + shape.rows * shape.vocab * itemsize
    return {"forward": forward, "backward": backward, "both": forward + backward}[phase]


def run(
    options: Any, shapes: tuple[Shape, ...], shares: tuple[float, ...]
) -> tuple[list[measure.Result], dict[str, float], str]:
    """Measure all cases; returns the results, the ceilings and the name of the baseline."""
    measured = measure.ceilings(options.device, options.dtype, options.size)
    candidates = losses(options)
    results: list[measure.Result] = []
    for shape in shapes:
        for share in shares:
            inputs = [make_inputs(shape, share, options.dtype, options.device) for _ in range(options.input_sets)]
            active = int((inputs[0][2] != 0).sum())
            off, allowed = errors(candidates, inputs[0])
            case = {"shape": shape.name, "rows": shape.rows, "V": shape.vocab, "active": f"{share:.0%}"}
            for phase in options.phase or PHASES:
                moved = floor_bytes_moved(shape, active, options.dtype.itemsize, phase)
                results += measure.compare(
                    "token_nll",
                    case,
                    phase,
                    {name: candidate(loss, inputs, phase) for name, loss in candidates.items()},
                    options,
                    input_sets=len(inputs),
                    errors=off,
                    allowed_error=allowed,
                    floor_s=moved / measured["copy_bytes_per_s"],
                    floor_bytes=0 if phase == "forward" else shape.rows * shape.vocab * options.dtype.itemsize,
                )
    return results, measured, peers.baseline(candidates)


def main(argv: list[str]) -> int:
    """Print the table and write the JSON."""
    parser = measure.arguments("token_nll", __doc__)
    parser.add_argument("--compiled", action="store_true", help="also torch.compile of the plain code (slow to start)")
    parser.add_argument("--input-sets", type=int, default=1, help="sets of inputs to rotate through")
    parser.add_argument("--share", type=float, action="append", help="share of active rows (default: a sweep)")
    measure.add_alone(parser)
    measure.add_phases(parser, PHASES)
    measure.add_shape(parser)
    options = measure.parse(parser, argv)
    shares = tuple(options.share or {"full": MDLM_SHARES, "small": (0.5,), "toy": (0.5,)}[options.size])
    results, measured, base = run(options, measure.chosen(LOGITS[options.size], options), shares)
    return report(results, options, baseline=base, measured_ceilings=measured)
