"""Divergence from a teacher, from hidden states through a shared frozen head, forward and backward, for each kind.

Ours is compared with the plain form (two ``linear``, both softmaxes, the divergence and autograd), with the compiled
plain form (``--compiled``), and with the losses of speculators and Liger where available. Liger's loss is the mean over
the rows, without weights. ``products`` runs only the three matrix products that every implementation needs: two compute
logits, and one computes the gradient. The time that ours and the plain form take beyond these products is printed below
the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import peers
from benchmarks.measure import (
    Candidate,
    Result,
    add_shape,
    arguments,
    ceilings,
    chosen,
    compare,
    parse,
    relative_error,
    without_gradients,
)  # fmt: skip
from benchmarks.record import report
from benchmarks.shapes import LINEAR, Shape
from dllm_kernels import ops

ERROR_ROWS = 64
FLOOR = 1e-5


class Inputs(NamedTuple):
    """Hidden states of both models ``[N, D]``, the frozen head ``[V, D]``, and one weight per row."""

    hidden: torch.Tensor
    teacher: torch.Tensor
    head: torch.Tensor
    weights: torch.Tensor

    def first(self, N: int, dtype: torch.dtype) -> Inputs:
        """Return the first rows in another dtype; the student's hidden states are a new leaf."""
        hidden, teacher, head = (t.detach().to(dtype) for t in (self.hidden[:N], self.teacher[:N], self.head))
        return Inputs(hidden.requires_grad_(), teacher, head, self.weights[:N])


Loss = Callable[[Inputs], torch.Tensor]
Rows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _kl(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.kl_div(torch.log_softmax(z, -1), torch.softmax(t, -1), reduction="none").sum(-1)


def _rkl(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.kl_div(torch.log_softmax(t, -1), torch.log_softmax(z, -1), reduction="none", log_target=True).sum(-1)


def _jsd(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    p, q = torch.softmax(z, -1), torch.softmax(t, -1)
    log_m = (0.5 * (p + q)).log()
    return 0.5 * (F.kl_div(log_m, q, reduction="none") + F.kl_div(log_m, p, reduction="none")).sum(-1)


def _overlap(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.minimum(torch.softmax(z, -1), torch.softmax(t, -1)).sum(-1)


PLAIN: dict[str, Rows] = {
    "kl": _kl,
    "rkl": _rkl,
    "jsd": _jsd,
    "tv": lambda z, t: 1 - _overlap(z, t),
    "l1": lambda z, t: (torch.softmax(z, -1) - torch.softmax(t, -1)).abs().sum(-1),
    "nla": lambda z, t: -_overlap(z, t).clamp(min=FLOOR).log(),
}


def make_inputs(shape: Shape, options: Any) -> Inputs:
    """Draw random inputs; the teacher's hidden states are close to the student's, as during training."""
    on: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
    hidden = torch.randn(shape.rows, shape.hidden, **on)
    teacher = hidden + 0.5 * torch.randn(shape.rows, shape.hidden, **on)
    head = torch.randn(shape.vocab, shape.hidden, **on) / shape.hidden**0.5
    return Inputs(hidden.requires_grad_(), teacher, head, torch.rand(shape.rows, device=options.device))


def losses(kind: str, options: Any) -> dict[str, Loss]:
    """Return ours, the plain form and, if requested, the compiled plain form."""
    rows = PLAIN[kind]

    def ours(i: Inputs) -> torch.Tensor:
        return ops.linear_divergence(i.hidden, i.head, i.teacher, i.weights, kind=kind, backend=options.backend).loss

    def plain(i: Inputs) -> torch.Tensor:
        with torch.no_grad():
            t = F.linear(i.teacher, i.head)
        z = F.linear(i.hidden, i.head)
        wide = torch.promote_types(z.dtype, torch.float32)
        return (i.weights * rows(z.to(wide), t.to(wide))).sum()

    out: dict[str, Loss] = {"ours": ours, "plain": plain}
    if options.compiled:
        torch._dynamo.reset()
        out["compiled"] = torch.compile(plain)

    def called(loss: Callable[..., torch.Tensor]) -> Loss:
        return lambda i: loss(i.hidden, i.teacher, i.head, i.weights)

    return out | {name: called(loss) for name, loss in peers.divergence_losses(kind, options.device).items()}


def products(i: Inputs) -> torch.Tensor:
    """Return the matrix products that every implementation needs."""
    with torch.no_grad():
        z, _ = i.hidden @ i.head.t(), i.teacher @ i.head.t()
        return z @ i.head


def candidate(loss: Loss, i: Inputs) -> Candidate:
    """Build forward and backward."""
    return Candidate(lambda _: torch.autograd.backward(loss(i)), without_gradients([i.hidden]))


def errors(candidates: dict[str, Loss], inputs: Inputs) -> dict[str, float]:
    """Compare each candidate's gradient of the hidden states with the plain form in float64, on the first rows.

    The compiled form is omitted, because it would be recompiled. Liger is omitted, because it has no weights.
    """
    exact = inputs.first(ERROR_ROWS, torch.float64)
    torch.autograd.backward(candidates["plain"](exact))
    found = {}
    for name in candidates.keys() - {"compiled", "liger"}:
        here = inputs.first(ERROR_ROWS, inputs.hidden.dtype)
        torch.autograd.backward(candidates[name](here))
        assert here.hidden.grad is not None
        assert exact.hidden.grad is not None
        found[name] = relative_error(here.hidden.grad, exact.hidden.grad)
    return found


def run(options: Any, shapes: tuple[Shape, ...], measured: dict[str, float]) -> list[Result]:
    """Measure all kinds on all shapes."""
    results = []
    for shape in shapes:
        inputs = make_inputs(shape, options)
        least = 3 * 2 * shape.rows * shape.vocab * shape.hidden / measured["gemm_flop_per_s"]
        for kind in options.kind or PLAIN:
            each = losses(kind, options)
            case = {"shape": shape.name, "kind": kind, "rows": shape.rows, "V": shape.vocab}
            timed = {"products": Candidate(lambda _: products(inputs))}  # noqa: B023  (run before inputs change)
            timed |= {name: candidate(loss, inputs) for name, loss in each.items()}
            results += compare("divergence", case, "both", timed, options, errors=errors(each, inputs), floor_s=least)
    return results


def beyond(results: list[Result]) -> list[str]:
    """Return one line per case: time of ours and of the plain form beyond the products; saved with the results."""
    lines = []
    for bare in (r for r in results if r.name == "products"):
        took = {r.name: r for r in results if r.case == bare.case and r is not bare}
        if bare.timing is None or any(took[name].timing is None for name in ("ours", "plain")):
            continue
        for r in took.values():
            if r.timing is not None:
                r.extra["beyond_products_s"] = r.timing.median - bare.timing.median
        ours, plain = (took[name].extra["beyond_products_s"] for name in ("ours", "plain"))
        share = f"{ours / plain:.2f}" if plain > 0 else "-"
        case = f"{bare.case['shape']}, {bare.case['kind']}"
        lines.append(
            f"beyond the products, {case}: ours {1e3 * ours:.1f} ms, plain {1e3 * plain:.1f} ms, {share} of it"
        )
    return lines


def main(argv: list[str]) -> int:
    """Print the table and write the JSON."""
    parser = arguments("divergence", __doc__)
    parser.add_argument("--kind", action="append", choices=tuple(PLAIN), help="default: all")
    parser.add_argument("--rows", type=int, help="rows of each shape")
    parser.add_argument("--compiled", action="store_true", help="the plain form under torch.compile too")
    add_shape(parser)
    options = parse(parser, argv)
    shapes = tuple(shape for shape in chosen(LINEAR[options.size], options) if shape.frozen)
    if options.rows:
        shapes = tuple(replace(shape, batch=1, length=options.rows) for shape in shapes)
    measured = ceilings(options.device, options.dtype, options.size)
    results = run(options, shapes, measured)
    lines = beyond(results)
    status = report(results, options, baseline="plain", measured_ceilings=measured)
    print("\n" + "\n".join(lines))
    return status
