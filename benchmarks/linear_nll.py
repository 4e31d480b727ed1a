"""Fused linear cross-entropy from hidden states: ours compared with the original's chunked path and with peers.

Measures forward plus backward, because backward alone is meaningless if forward computes the gradient, and forward
without gradients. The floor counts the matrix products on the active rows at the rate of a square product: two with a
frozen head, three with a trainable head. ``bare products`` runs only these products, at their actual shapes. A GPU that
throttles under load slows both down equally.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks import measure, peers
from benchmarks.record import report
from benchmarks.shapes import LINEAR, Shape
from dllm_kernels import ops

BARE = "bare products"
PHASES = ("both", "evaluate")
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(shape: Shape, share: float, dtype: torch.dtype, device: torch.device | str, weighted: bool) -> Inputs:
    """Draw (hidden, head, targets, weights that are nonzero for a ``share`` of the rows, a random upstream scalar)."""
    size = (shape.batch, shape.length)
    hidden = torch.randn(*size, shape.hidden, device=device, dtype=dtype).requires_grad_()
    head = (torch.randn(shape.vocab, shape.hidden, device=device, dtype=dtype) * shape.hidden**-0.5).requires_grad_(
        not shape.frozen
    )
    targets = torch.randint(0, shape.vocab, size, device=device)
    weights = torch.rand(size, device=device) * 0.9 + 0.1 if weighted else torch.ones(size, device=device)
    weights = torch.where(torch.rand(size, device=device) < share, weights, 0.0)
    return hidden, head, targets, weights, torch.rand((), device=device) + 0.5


def ours(options: Any, chunk_size: int | None = None) -> peers.Loss:
    """Return ``weighted_linear_nll`` with this chunk size, or with the caller's one if ``options.recipe_chunk``."""

    def run(
        hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, chunk: int | None
    ) -> torch.Tensor:
        size = chunk if options.recipe_chunk else chunk_size
        return ops.weighted_linear_nll(hidden, head, targets, weights, chunk_size=size, backend=options.backend).loss

    return run


def losses(options: Any, weighted: bool, dense: bool) -> dict[str, peers.Loss]:
    """Return ours and, unless ``options.alone``, the available peers; peers that hold all logits only if ``dense``."""
    if options.alone:
        return {"ours": ours(options)}
    found = peers.linear_losses(options.device, compiled=options.compiled)
    left_out = () if dense else ("plain", "gather", "compiled", peers.GATHER_COMPILED)
    unweighted = peers.UNWEIGHTED if weighted else ()
    return {"ours": ours(options), **{k: v for k, v in found.items() if k not in (*left_out, *unweighted)}}


def candidate(loss: peers.Loss, inputs: Inputs, shape: Shape, phase: str) -> measure.Candidate:
    """Build one loss in one phase."""
    hidden, head, targets, weights, upstream = inputs

    def both(_: None) -> None:
        torch.autograd.backward(loss(hidden, head, targets, weights, shape.chunk), upstream)

    def evaluate(_: None) -> torch.Tensor:
        with torch.no_grad():
            return loss(hidden, head, targets, weights, shape.chunk)

    return measure.Candidate(both if phase == "both" else evaluate, measure.without_gradients([hidden, head]))


def bare_products(inputs: Inputs, shape: Shape, phase: str) -> measure.Candidate:
    """Return only the matrix products of a phase on the active rows, a lower bound for every fused loss."""
    hidden, head, _, weights, _ = (t.detach() for t in inputs)
    rows = hidden.flatten(0, 1)[weights.flatten() != 0]
    logits = rows.new_empty(len(rows), shape.vocab)
    outputs = (
        () if phase == "evaluate" else (torch.empty_like(rows), *(() if shape.frozen else (torch.empty_like(head),)))
    )

    def run(_: int) -> None:
        torch.mm(rows, head.t(), out=logits)
        if outputs:
            torch.mm(logits, head, out=outputs[0])
        if len(outputs) > 1:
            torch.mm(logits.t(), rows, out=outputs[1])

    return measure.Candidate(run)


def _gradient(loss: peers.Loss, inputs: Inputs, head: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Compute the gradient of the hidden states, for new leaves of the head's dtype."""
    hidden, _, targets, weights, upstream = (t.detach() for t in inputs)
    leaf = hidden.to(head.dtype, copy=True).requires_grad_()
    head = head.detach().requires_grad_(not shape.frozen)
    wide = torch.promote_types(head.dtype, torch.float32)
    value = loss(leaf, head, targets, weights.to(wide), shape.chunk)
    (grad,) = torch.autograd.grad(value, leaf, upstream.to(wide))
    return grad


def errors(candidates: dict[str, peers.Loss], inputs: Inputs, shape: Shape) -> tuple[dict[str, float], float]:
    """Return the error of each candidate's gradient of the hidden states on all rows, and the largest allowed error."""
    hidden, head, targets, weights, upstream = (t.detach() for t in inputs)
    frozen = replace(shape, frozen=True)  # the reference needs only the gradient of the hidden states

    def by_parts(head: torch.Tensor) -> torch.Tensor:
        """Compute the plain form in the head's dtype, a few rows at a time."""
        grads = []
        for chunk in measure.slices(shape.rows, shape.vocab):
            part = [t.flatten(0, 1)[chunk][None] for t in (hidden, targets, weights)]
            operands = (part[0], head, *part[1:], upstream)
            grads.append(_gradient(peers.plain_linear, operands, head, frozen))  # type: ignore[arg-type]
        return torch.cat(grads, 1).view_as(hidden)

    exact = by_parts(head.double())
    found = measure.each_error(
        candidates, lambda loss: measure.relative_error(_gradient(loss, inputs, head, shape), exact)
    )
    return found, measure.allowed_error(measure.relative_error(by_parts(head), exact), head.dtype)


def floor_flops(shape: Shape, active: int, phase: str) -> int:
    """Return the minimum of floating-point operations: one product to evaluate, two or three to train."""
    products = 1 if phase == "evaluate" else 2 if shape.frozen else 3
    return products * 2 * active * shape.vocab * shape.hidden


def floor_memory(shape: Shape, itemsize: int, chunk: int, phase: str) -> int:
    """Return the minimum of extra memory: a chunk of logits, grad_hidden, and the head's gradient if it trains."""
    if phase == "evaluate":
        return chunk * shape.vocab * itemsize
    head = 0 if shape.frozen else shape.vocab * shape.hidden * itemsize
    return chunk * shape.vocab * itemsize + shape.rows * shape.hidden * itemsize + head


def run(
    options: Any, shapes: tuple[Shape, ...], shares: tuple[float, ...]
) -> tuple[list[measure.Result], dict[str, float], str]:
    """Measure all cases; returns the results, the ceilings and the name of the baseline."""
    measured = measure.ceilings(options.device, options.dtype, options.size)
    results: list[measure.Result] = []
    base = "plain"
    for shape in shapes:
        dense = 3 * shape.rows * shape.vocab * 4 < options.dense_limit
        candidates = losses(options, options.weighted, dense)
        base = peers.baseline(candidates)
        for share in shares:
            inputs = make_inputs(shape, share, options.dtype, options.device, options.weighted)
            active = int((inputs[3] != 0).sum())
            off, allowed = errors(candidates, inputs, shape)
            case = {
                "shape": shape.name, "rows": shape.rows, "V": shape.vocab, "D": shape.hidden,
                "head": "frozen" if shape.frozen else "trainable", "active": f"{share:.0%}",
            }  # fmt: skip
            for phase in options.phase or PHASES:
                results += measure.compare(
                    "linear_nll",
                    case,
                    phase,
                    {name: candidate(loss, inputs, shape, phase) for name, loss in candidates.items()}
                    | {BARE: bare_products(inputs, shape, phase)},
                    options,
                    errors=off,
                    allowed_error=allowed,
                    floor_s=floor_flops(shape, active, phase) / measured["gemm_flop_per_s"],
                    floor_bytes=floor_memory(shape, options.dtype.itemsize, shape.chunk or 1024, phase),
                )
    return results, measured, base


def main(argv: list[str]) -> int:
    """Print the table and write the JSON."""
    parser = measure.arguments("linear_nll", __doc__)
    parser.add_argument("--compiled", action="store_true", help="also torch.compile of the plain code (slow to start)")
    parser.add_argument("--share", type=float, action="append", help="share of active rows (default: a sweep)")
    parser.add_argument(
        "--weighted", action="store_true", help="one random weight per row; omits peers without weights"
    )
    parser.add_argument("--recipe-chunk", action="store_true", help="run ours with the chunk size of the recipe")
    parser.add_argument(
        "--dense-limit", type=float, default=24e9, help="maximum bytes of logits for candidates that hold all of them"
    )
    measure.add_alone(parser)
    measure.add_phases(parser, PHASES)
    measure.add_shape(parser)
    options = measure.parse(parser, argv)
    shares = tuple(options.share or {"full": (1.0, 0.5, 0.15), "small": (0.5,), "toy": (0.5,)}[options.size])
    results, measured, base = run(options, measure.chosen(LINEAR[options.size], options), shares)
    return report(results, options, baseline=base, measured_ceilings=measured)
