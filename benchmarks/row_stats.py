"""Log-probability of the chosen token and entropy of each row, for policy trainers, from logits and hidden states.

Ours is compared with the plain form (log_softmax, gather, entropy) on all rows and on the active rows, with
``torch.compile`` of it, and with the kernels of TRL (from logits), verl and Liger (from hidden states) if they are
installed. Both outputs have random upstream gradients. Measures forward without a graph, as for old and
reference policies, and both passes. The floors count the fewest bytes or flops. Logits are read in forward, and read
and written in backward. A head computes its logits once in forward. With backward, it computes them once more, plus one
product per gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import measure, peers
from benchmarks.record import report
from benchmarks.shapes import ACTIVE_SHARES, LINEAR, LOGITS, POLICY, Shape
from dllm_kernels import ops

Outputs = tuple[torch.Tensor, torch.Tensor]
ERROR_ROWS = 64


class Inputs(NamedTuple):
    """Logits ``[N, V]``, or hidden states ``[N, D]`` with head; ids, active rows, and gradients of both outputs."""

    rows: torch.Tensor
    head: torch.Tensor | None
    ids: torch.Tensor
    active: torch.Tensor
    upstream: tuple[torch.Tensor, torch.Tensor]

    def first(self, N: int, dtype: torch.dtype) -> Inputs:
        """Return new leaves in another dtype, for the first rows only."""
        rows, ids, active = self.rows[:N].detach().to(dtype).requires_grad_(), self.ids[:N], self.active[:N]
        head = None if self.head is None else self.head.detach().to(dtype).requires_grad_(self.head.requires_grad)
        return Inputs(rows, head, ids, active, (self.upstream[0][:N], self.upstream[1][:N]))


Statistics = Callable[[Inputs], Outputs]


def make_inputs(shape: Shape, form: str, share: float, options: Any) -> Inputs:
    """Draw random inputs, a ``share`` of the rows active."""
    N, on = shape.rows, {"device": options.device}
    columns = shape.vocab if form == "logits" else shape.hidden
    rows = torch.randn(N, columns, dtype=options.dtype, **on).requires_grad_()
    head = None
    if form == "hidden":
        head = torch.randn(shape.vocab, columns, dtype=options.dtype, **on) / columns**0.5
        head.requires_grad_(not shape.frozen)
    ids, active = torch.randint(0, shape.vocab, (N,), **on), torch.rand(N, **on) < share
    return Inputs(rows, head, ids, active, (torch.randn(N, **on), torch.randn(N, **on)))


def statistics(options: Any, form: str) -> dict[str, Statistics]:
    """Return ours and, unless ``options.alone``, the available peers; their inactive rows may have any value."""

    def ours(i: Inputs) -> Outputs:
        out = ops.token_log_probs(
            i.rows, i.ids, weight=i.head, with_entropy=True, active=i.active, backend=options.backend
        )
        assert out.entropy is not None
        return out.log_probs, out.entropy

    def gather(i: Inputs) -> Outputs:
        listed = i.active.nonzero().squeeze(1)
        found = _plain(i.rows[listed], i.head, i.ids[listed])
        return tuple(  # type: ignore[return-value]
            torch.zeros_like(i.upstream[0], dtype=t.dtype).index_copy(0, listed, t) for t in found
        )

    if options.alone:
        return {"ours": ours}
    out: dict[str, Statistics] = {"ours": ours, "plain": _plain_of, "gather": gather}
    if options.compiled:
        out["compiled"] = torch.compile(_plain_of)
    if torch.device(options.device).type == "cuda":
        out |= _on_gpu(form)
    return out


def _on_gpu(form: str) -> dict[str, Statistics]:
    """Return the peers that run on a GPU only."""
    if form == "logits":
        trl = peers.module(peers.TRL_ROWS)
        return {} if trl is None else {"trl": lambda i: _trl(trl.selective_log_softmax_and_entropy, i)}
    out: dict[str, Statistics] = {}
    if (liger := peers.module("liger_kernel.ops.fused_linear_scaled_cross_entropy")) is not None:
        out["liger"] = lambda i: _liger(liger.LigerFusedLinearScaledCrossEntropyFunction, i)
    if (verl := peers.module(peers.VERL_KERNEL)) is not None:
        out["verl"] = lambda i: verl.linear_cross_entropy(i.rows, i.head, i.ids, 1.0, "none", None)
    return out


def _plain_of(i: Inputs) -> Outputs:
    return _plain(i.rows, i.head, i.ids)


def _plain(rows: torch.Tensor, head: torch.Tensor | None, ids: torch.Tensor) -> Outputs:
    logits = rows if head is None else F.linear(rows, head)
    log_p = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def _trl(function: Any, i: Inputs) -> Outputs:
    """TRL's kernel for ``[B, L, V]``, with its mask of the rows."""
    log_probs, entropy = function(i.rows[None], i.ids[None], 1.0, i.active[None])
    return log_probs[0], entropy[0]


def _liger(function: Any, i: Inputs) -> Outputs:
    nll, entropy = function.apply(i.rows, i.head, torch.where(i.active, i.ids, -100), 1.0, -100, 1, True)
    return -nll, entropy


def _backward(out: Outputs, i: Inputs) -> None:
    torch.autograd.backward(
        out, [torch.where(i.active, g.to(t.dtype), 0.0) for g, t in zip(i.upstream, out, strict=True)]
    )


def candidate(function: Statistics, i: Inputs, phase: str) -> measure.Candidate:
    """Build one candidate in one phase."""

    def forward(_: None) -> Outputs:
        with torch.no_grad():
            return function(i)

    def both(_: None) -> None:
        _backward(function(i), i)

    return measure.Candidate(forward if phase == "forward" else both, measure.without_gradients((i.rows, i.head)))


def errors(candidates: dict[str, Statistics], inputs: Inputs) -> tuple[dict[str, float], float]:
    """Compare the gradients of the first rows with float64; also return the largest allowed error.

    Only the first rows are compared, because a float64 copy of all rows does not fit into memory.
    """

    def gradient(function: Statistics, dtype: torch.dtype) -> torch.Tensor:
        here = inputs.first(ERROR_ROWS, dtype)
        _backward(function(here), here)
        assert here.rows.grad is not None
        return here.rows.grad

    dtype = inputs.rows.dtype
    exact = gradient(_plain_of, torch.float64)
    plain = measure.relative_error(gradient(_plain_of, dtype), exact)
    found = measure.each_error(candidates, lambda function: measure.relative_error(gradient(function, dtype), exact))
    return found, measure.allowed_error(plain, dtype)


def floor(shape: Shape, form: str, active: int, phase: str, measured: dict[str, float], itemsize: int) -> float:
    """Return the minimum seconds at this run's ceilings."""
    if form == "hidden":
        products = 1 if phase == "forward" else 3 if shape.frozen else 4
        return 2 * products * active * shape.vocab * shape.hidden / measured["gemm_flop_per_s"]
    forward = active * shape.vocab * itemsize
    moved = forward if phase == "forward" else 2 * forward + shape.rows * shape.vocab * itemsize
    return moved / measured["copy_bytes_per_s"]


def run(options: Any, form: str, shapes: tuple[Shape, ...], measured: dict[str, float]) -> list[measure.Result]:
    """Measure all cases of a form."""
    candidates, results = statistics(options, form), []
    for shape in shapes:
        for share in options.share or ACTIVE_SHARES[options.size]:
            inputs = make_inputs(shape, form, share, options)
            active, (off, allowed) = int(inputs.active.sum()), errors(candidates, inputs)
            case = {"shape": shape.name, "form": form, "rows": shape.rows, "V": shape.vocab, "active": f"{share:.0%}"}
            for phase in ("forward", "both"):
                least = floor(shape, form, active, phase, measured, options.dtype.itemsize)
                each = {name: candidate(function, inputs, phase) for name, function in candidates.items()}
                results += measure.compare(
                    "row_stats", case, phase, each, options, errors=off, allowed_error=allowed, floor_s=least
                )
    return results


def main(argv: list[str]) -> int:
    """Print the table and write the JSON."""
    parser = measure.arguments("row_stats", __doc__)
    parser.add_argument("--share", type=float, action="append", help="share of active rows (default: a sweep)")
    parser.add_argument("--form", action="append", choices=("logits", "hidden"), help="default: both")
    parser.add_argument("--compiled", action="store_true", help="also torch.compile of the plain code (slow to start)")
    measure.add_alone(parser)
    measure.add_shape(parser)
    options = measure.parse(parser, argv)
    measured = measure.ceilings(options.device, options.dtype, options.size)
    sizes = {
        "logits": LOGITS[options.size] + ((POLICY,) if options.size == "full" else ()),
        "hidden": LINEAR[options.size],
    }
    results = []
    for form in options.form or sizes:
        results += run(options, form, measure.chosen(sizes[form], options), measured)
    return report(results, options, baseline="plain", measured_ceilings=measured)
