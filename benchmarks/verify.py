"""Comparison of ours with float64 on all rows at the headline shapes, without which no figure counts.

The most doubtful checks run first. The first is a trained head in two chunks, whose second product is added to its own
output (``addmm`` with ``out=`` one of its inputs). Then follow NLL from logits (also in place, and of rows with an odd
stride), log-probabilities with entropy, a frozen head with half of the rows active, and float32 logits of 16-bit
operands (``mm`` with ``out_dtype`` and ``out=``). Corruption and samples are compared with NumPy's random bits. Each
call runs twice and must give the same bits.

A quantity passes if its largest error is at most

    2 plain + eps_out + eps_acc sum of sqrt(reduction sizes).

``plain`` is the largest error of the oracle in the dtype of ours, and ``eps_out`` is one rounding step of the result.
The last term is the rounding noise of a different summation order. This is the rule of ``tests/support/parity.py``, but
errors are relative to the terms of a number (logits) or of a row (hidden states and heads), because a row whose terms
nearly cancel has a large relative error in every implementation, which would hide faults in other rows. Logits have a
standard deviation of ``SPREAD``, so that softmax and targets contribute equally to the gradients. The exit status is 1
unless everything passes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import reference
from benchmarks import measure
from benchmarks.corruption import routines
from benchmarks.record import environment, markdown, said, write_whole
from benchmarks.shapes import HEADLINE, Headline, MaskShape, Shape
from dllm_kernels import corruption, ops

SPREAD = 3.0
TINY = 1e-300  # divisor if all terms are 0: every nonzero error is then too large
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Finding:
    """One comparison.

    Attributes:
        check: description of the call.
        quantity: name of the compared result.
        error: largest error, or number of elements that differ.
        allowed: largest error that passes.
    """

    check: str
    quantity: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """True if the error is allowed; False for a NaN."""
        return self.error <= self.allowed


class Errors:
    """Largest errors of ours and of plain PyTorch against float64, by quantity, over all parts of a tensor."""

    def __init__(self, check: str, sizes: Sequence[int]) -> None:
        self.check, self.sizes = check, sizes
        self._found: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}

    def add(
        self, quantity: str, ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Compare a part elementwise, each error divided by the size of the element's terms."""
        largest = [((t.double() - exact).abs() / scale.clamp(min=TINY)).amax() for t in (ours, plain)]
        self._found.setdefault((quantity, ours.dtype), []).append(torch.stack(largest))

    def add_rows(
        self, quantity: str, ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor
    ) -> None:
        """Compare a part row by row, each error divided by the size of the terms of the row, see :func:`_row_terms`."""
        scale = scale.clamp(min=TINY)
        largest = [(torch.linalg.vector_norm(t.double() - exact, dim=-1) / scale).amax() for t in (ours, plain)]
        self._found.setdefault((quantity, ours.dtype), []).append(torch.stack(largest))

    def findings(self, compute_dtype: torch.dtype) -> Iterator[Finding]:
        """Return one finding per quantity; ``compute_dtype`` is the dtype to which the logits of a head are rounded."""
        for (quantity, dtype), parts in self._found.items():
            ours, plain = torch.stack(parts).amax(0).tolist()
            wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
            step = max(torch.finfo(dtype).eps, torch.finfo(compute_dtype).eps)
            yield Finding(self.check, quantity, ours, 2 * plain + step + wide * sum(map(math.sqrt, self.sizes)))


def same_bits(check: str, first: Tensors, second: Tensors) -> Finding:
    """Count the elements that differ between two results."""
    differing = sum(int((first[name] != second[name]).sum()) for name in first)
    return Finding(check, "elements that differ between two calls", differing, 0)


def _targets(shape: Shape, share: float, device: str) -> Tensors:
    N = shape.rows
    weights = torch.rand(N, device=device) * 0.9 + 0.1
    return {
        "targets": torch.randint(0, shape.vocab, (N,), device=device),
        "weights": torch.where(torch.rand(N, device=device) < share, weights, 0.0),
        "upstream": torch.rand((), device=device) + 0.5,
    }


def _oracle(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, upstream: torch.Tensor) -> Tensors:
    """Compute NLL and gradient of some rows, in the dtype of the logits."""
    leaf = logits.detach().requires_grad_()
    nll = reference.token_nll(leaf, targets, active=weights != 0)
    (grad,) = torch.autograd.grad((nll * weights.to(nll.dtype)).sum(), leaf, upstream.to(nll.dtype))
    return {"nll": nll.detach(), "gradient": grad}


def _terms(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, upstream: torch.Tensor) -> Tensors:
    """Return the size of the terms of ``_oracle``'s results: |lse| + |z_y|, and |w| (p + [v = y])."""
    active = (weights != 0).double()
    lse, picked = logits.logsumexp(-1), logits.gather(-1, targets.unsqueeze(-1))
    terms = (logits - lse.unsqueeze(-1)).exp_().scatter_add_(-1, targets.unsqueeze(-1), torch.ones_like(picked))
    return {
        "nll": active * (lse.abs() + picked.squeeze(-1).abs()),
        "gradient": terms.mul_((weights.double() * upstream.double()).abs().unsqueeze(-1)),
    }


def _row_terms(grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the size of the terms of each row of ``grad @ factor``: sum_j |grad_ij| |factor_j|, factor_j a row."""
    terms: torch.Tensor = grad.abs() @ torch.linalg.vector_norm(factor, dim=-1)
    return terms


def nll_from_logits(shape: Shape, options: argparse.Namespace) -> Iterator[Finding]:
    """Check ``weighted_nll``: contiguous, in place, and on rows that begin at odd addresses."""
    N, V, given = shape.rows, shape.vocab, _targets(shape, 0.85, options.device)
    odd = torch.empty(N, V + 1 + V % 2, device=options.device, dtype=options.dtype)[:, :V]
    odd.copy_(torch.randn(N, V, device=options.device, dtype=options.dtype) * SPREAD)
    logits = odd.contiguous()

    def ours(rows: torch.Tensor, inplace: bool = False) -> Tensors:
        leaf = rows.detach().requires_grad_()
        out = ops.weighted_nll(
            leaf, given["targets"], given["weights"], inplace_backward=inplace, backend=options.backend
        )
        (grad,) = torch.autograd.grad(out.loss, leaf, given["upstream"])
        return {"nll": out.nll, "gradient": grad}

    name = f"NLL from logits {N} x {V}"
    first = ours(logits)
    yield same_bits(name, first, ours(logits))
    in_place = ours(logits.clone(), inplace=True)
    ways = {name: first, f"{name}, in place": in_place, f"{name}, odd stride": ours(odd)}
    found = {way: Errors(way, (V,)) for way in ways}
    for rows in measure.slices(N, V):
        part = given["targets"][rows], given["weights"][rows], given["upstream"]
        z, exact_z = logits[rows], logits[rows].double()
        plain, exact = _oracle(z, *part), _oracle(exact_z, *part)
        terms = _terms(exact_z, *part)
        for way, result in ways.items():
            for key in exact:
                found[way].add(key, result[key][rows], plain[key], exact[key], terms[key])
    for errors in found.values():
        yield from errors.findings(torch.float32)


def policy_from_logits(shape: Shape, options: argparse.Namespace) -> Iterator[Finding]:
    """Check ``token_log_probs`` with entropy, and the gradient of both."""
    N, V, device = shape.rows, shape.vocab, options.device
    logits = torch.randn(N, V, device=device, dtype=options.dtype) * SPREAD
    ids, upstream = torch.randint(0, V, (N,), device=device), torch.randn(2, N, device=device)

    def ours() -> Tensors:
        leaf = logits.detach().requires_grad_()
        out = ops.token_log_probs(leaf, ids, with_entropy=True, backend=options.backend)
        assert out.entropy is not None
        (grad,) = torch.autograd.grad([out.log_probs, out.entropy], leaf, list(upstream))
        return {"log p": out.log_probs.detach(), "entropy": out.entropy.detach(), "gradient": grad}

    def oracle(z: torch.Tensor, rows: slice) -> Tensors:
        leaf = z.detach().requires_grad_()
        out = reference.row_stats(leaf, ids[rows])
        of = list(upstream[:, rows].to(out.entropy.dtype))
        (grad,) = torch.autograd.grad([out.log_probs, out.entropy], leaf, of)
        return {"log p": out.log_probs.detach(), "entropy": out.entropy.detach(), "gradient": grad}

    def terms(z: torch.Tensor, rows: slice, entropy: torch.Tensor) -> Tensors:
        lse, at = z.logsumexp(-1), ids[rows].unsqueeze(-1)
        of_log_p, of_entropy = upstream[:, rows].double().abs().unsqueeze(-1)
        log_p = z - lse.unsqueeze(-1)
        p = log_p.exp()
        gradient = p * (of_log_p + of_entropy * (log_p.abs() + entropy.unsqueeze(-1)))
        return {
            "log p": lse.abs() + z.gather(-1, at).squeeze(-1).abs(),
            "entropy": lse.abs() + (p * z.abs()).sum(-1),
            "gradient": gradient.scatter_add_(-1, at, of_log_p),
        }

    name = f"log p and entropy {N} x {V}"
    result = ours()
    yield same_bits(name, result, ours())
    errors = Errors(name, (V,))
    for rows in measure.slices(N, V):
        exact_z = logits[rows].double()
        plain, exact = oracle(logits[rows], rows), oracle(exact_z, rows)
        size = terms(exact_z, rows, exact["entropy"])
        for key in exact:
            errors.add(key, result[key][rows], plain[key], exact[key], size[key])
    yield from errors.findings(torch.float32)


def nll_from_hidden(
    shape: Shape, options: argparse.Namespace, share: float, chunks: dict[str, int | None]
) -> Iterator[Finding]:
    """Check ``weighted_linear_nll`` with the named chunk sizes; the head trains unless the shape freezes it."""
    N, V, D, device, dtype = shape.rows, shape.vocab, shape.hidden, options.device, options.dtype
    given = _targets(shape, share, device)
    hidden = torch.randn(N, D, device=device, dtype=dtype) * SPREAD
    head = torch.randn(V, D, device=device, dtype=dtype) * D**-0.5

    def ours(chunk: int | None) -> Tensors:
        leaves = {"gradient of hidden": hidden.detach().requires_grad_()}
        weight = head.detach().requires_grad_(not shape.frozen)
        if not shape.frozen:
            leaves["gradient of head"] = weight
        out = ops.weighted_linear_nll(
            leaves["gradient of hidden"], weight, given["targets"], given["weights"], chunk_size=chunk,
            backend=options.backend,
        )  # fmt: skip
        grads = torch.autograd.grad(out.loss, list(leaves.values()), given["upstream"])
        return {"nll": out.nll, **dict(zip(leaves, grads, strict=True))}

    name = f"NLL from hidden states {N} x {V} x {D}, {'frozen' if shape.frozen else 'trained'} head"
    ways = {f"{name}{label}": ours(chunk) for label, chunk in chunks.items()}
    (label, chunk), *_ = chunks.items()
    yield same_bits(f"{name}{label}", ways[f"{name}{label}"], ours(chunk))
    found = {way: Errors(way, (V, D, N)) for way in ways}
    whole = {way: {key: measure.Distance() for key in ("gradient of hidden", "gradient of head")} for way in ways}
    plain_whole = {key: measure.Distance() for key in ("gradient of hidden", "gradient of head")}

    def compare(key: str, rows: slice, plain: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor) -> None:
        plain_whole[key].add(plain, exact)
        for way, result in ways.items():
            found[way].add_rows(f"{key}, worst row", result[key][rows], plain, exact, terms)
            whole[way][key].add(result[key][rows], exact)

    exact_head, wide = head.double(), torch.promote_types(dtype, torch.float32)
    of_head = None if shape.frozen else (torch.zeros_like(head, dtype=wide), torch.zeros_like(exact_head))
    terms_of_head = exact_head.new_zeros(V)
    for rows in measure.slices(N, V):
        part = given["targets"][rows], given["weights"][rows], given["upstream"]
        h, exact_h = hidden[rows], hidden[rows].double()
        exact_z = exact_h @ exact_head.t()
        plain, exact = _oracle(h @ head.t(), *part), _oracle(exact_z, *part)
        terms = _terms(exact_z, *part)
        for way, result in ways.items():
            found[way].add("nll", result["nll"][rows], plain["nll"], exact["nll"], terms["nll"])
        of_hidden = plain["gradient"] @ head, exact["gradient"] @ exact_head
        compare("gradient of hidden", rows, *of_hidden, _row_terms(exact["gradient"], exact_head))
        if of_head is not None:
            terms_of_head += _row_terms(exact["gradient"].t(), exact_h)
            of_head[0].addmm_(plain["gradient"].t().to(wide), h.to(wide))
            of_head[1].addmm_(exact["gradient"].t(), exact_h)
    if of_head is not None:
        for rows in measure.slices(V, D):
            compare("gradient of head", rows, of_head[0][rows].to(dtype), of_head[1][rows], terms_of_head[rows])
    for way, errors in found.items():
        yield from errors.findings(dtype)
        for key in [key for key in ways[way] if key != "nll"]:
            allowed = measure.allowed_error(plain_whole[key].relative(), dtype)
            yield Finding(way, f"{key}, all rows", whole[way][key].relative(), allowed)


def float32_logits(shape: Shape, options: argparse.Namespace) -> Iterator[Finding]:
    """Check ``logits_dtype=torch.float32``, a trained head, two chunks: products of 16-bit operands into float32."""
    N, V, D, device, dtype = shape.rows, shape.vocab, shape.hidden, options.device, options.dtype
    given = _targets(shape, 1.0, device)
    hidden = (torch.randn(N, D, device=device, dtype=dtype) * SPREAD).requires_grad_()
    head = (torch.randn(V, D, device=device, dtype=dtype) * D**-0.5).requires_grad_()
    bias, extra = torch.randn(V, device=device, dtype=dtype), (hidden.detach()[:, :8], head.detach()[:, :8])

    def ours() -> Tensors:
        out = ops.weighted_linear_nll(
            hidden, head, given["targets"], given["weights"], bias=bias, extra=extra, chunk_size=-(-N // 2),
            logits_dtype=torch.promote_types(dtype, torch.float32), backend=options.backend,
        )  # fmt: skip
        of_hidden, of_head = torch.autograd.grad(out.loss, [hidden, head], given["upstream"])
        return {"nll": out.nll, "gradient of hidden": of_hidden, "gradient of head": of_head}

    check = f"NLL from hidden states {N} x {V} x {D}, float32 logits"
    result = ours()
    yield same_bits(check, result, ours())
    of_nll, of_rows = Errors(check, (V, D, N)), Errors(check, (V, D, N))
    for rows in measure.slices(N, V):
        part = given["targets"][rows], given["weights"][rows], given["upstream"]
        found = []
        for wide in (torch.promote_types(dtype, torch.float32), torch.float64):
            h, w, b, u, U = (t.detach().to(wide) for t in (hidden[rows], head, bias, extra[0][rows], extra[1]))
            logits = torch.addmm(b, h, w.t()).addmm_(u, U.t())
            of_logits = _oracle(logits, *part)
            gradient = of_logits["gradient"] if wide == torch.float64 else of_logits["gradient"].to(dtype).to(wide)
            found.append((logits, of_logits["nll"], gradient @ w, _row_terms(gradient, w)))
        (_, plain, plain_gradient, _), (logits, exact, exact_gradient, terms) = found
        of_nll.add("nll", result["nll"][rows], plain, exact, _terms(logits, *part)["nll"])
        of_rows.add_rows(
            "gradient of hidden, worst row",
            result["gradient of hidden"][rows],
            plain_gradient.to(dtype),
            exact_gradient,
            terms,
        )
    yield from of_nll.findings(torch.promote_types(dtype, torch.float32))
    yield from of_rows.findings(dtype)


def corrupted(shape: MaskShape, options: argparse.Namespace) -> Iterator[Finding]:
    """Check that the corruption routines with seeds draw the same bits as NumPy on the CPU."""
    ids = torch.randint(126_464, (shape.batch, shape.length))
    supervised = torch.rand(ids.shape) < 0.7
    seeds = torch.randint(0, 2**62, (shape.batch,))
    here = [t.to(options.device) for t in (ids, supervised)]
    on_device = routines(corruption, shape.block_size, seeds=seeds.to(options.device), backend=options.backend)
    for routine, in_numpy in routines(corruption, shape.block_size, seeds=seeds, backend="torch").items():
        found, again, wanted = on_device[routine](*here), on_device[routine](*here), in_numpy(ids, supervised)
        check = f"{routine} {shape.batch} x {shape.length}, blocks of {shape.block_size}"
        first, second, exact = ({str(i): t.cpu() for i, t in enumerate(x)} for x in (found, again, wanted))
        yield same_bits(check, first, second)
        differing = sum(int((first[i] != exact[i]).sum()) for i in exact)
        yield Finding(check, "elements that differ from NumPy's", differing, 0)


def sampled(shape: Shape, options: argparse.Namespace) -> Iterator[Finding]:
    """Check that samples with seeds are the same tokens as with NumPy on the CPU.

    Hidden states and head are small multiples of 1/4, so that the logits are exact in every dtype.
    """
    N, V, D = min(shape.rows, 512), shape.vocab, 8
    hidden = torch.randint(-1, 2, (N, D)).to(options.dtype)
    head = (torch.randint(-6, 7, (V, D)) / 4).to(options.dtype)
    seeds = torch.randint(0, 2**62, (N,))
    here = [t.to(options.device) for t in (hidden, head, seeds)]
    for temperature in (0, 0.7):

        def ours(tensors: Sequence[torch.Tensor], backend: str, temperature: float = temperature) -> Tensors:
            h, w, own = tensors
            out = ops.linear_sample(h, w, temperature=temperature, seeds=own, return_top=8, backend=backend)
            assert out.top_ids is not None
            return {"ids": out.ids.cpu(), "top_ids": out.top_ids.cpu()}

        check = f"samples {N} x {V} at temperature {temperature}"
        found, exact = ours(here, options.backend), ours((hidden, head, seeds), "torch")
        yield same_bits(check, found, ours(here, options.backend))
        differing = sum(int((found[name] != exact[name]).sum()) for name in exact)
        yield Finding(check, "tokens that differ from the CPU's", differing, 0)


def checks(options: argparse.Namespace) -> dict[str, Callable[[], Iterator[Finding]]]:
    """Return name -> check, most doubtful first."""
    shapes = HEADLINE[options.size]
    if options.size == "toy":  # Triton's interpreter takes about 0.2 s per row
        logits, policy, frozen, trained = (
            replace(shape, batch=1, length=12)
            for shape in (shapes.logits, shapes.policy, shapes.frozen[0], shapes.trained)
        )
        shapes = Headline(logits, policy, (frozen,), trained, shapes.masks)
    chunks = {", two chunks": -(-shapes.trained.rows // 2), "": None}
    return {
        "trained head": lambda: nll_from_hidden(shapes.trained, options, 1.0, chunks),
        "logits": lambda: nll_from_logits(shapes.logits, options),
        "policy": lambda: policy_from_logits(shapes.policy, options),
        "frozen head": lambda: nll_from_hidden(shapes.frozen[0], options, 0.5, {"": None}),
        "float32 logits": lambda: float32_logits(shapes.trained, options),
        "corruption": lambda: corrupted(shapes.masks, options),
        "samples": lambda: sampled(shapes.policy, options),
    }


def run(options: argparse.Namespace) -> list[Finding]:
    """Run every check; print the findings, and write them to ``--out``, immediately."""
    findings: list[Finding] = []
    todo = checks(options)
    for number, (name, check) in enumerate(todo.items(), 1):
        before = len(findings)
        try:
            findings += check()
        except Exception as error:  # continue, because the other checks give more information
            findings.append(Finding(name, said(error), math.inf, 0.0))
        if torch.device(options.device).type == "cuda":
            torch.cuda.empty_cache()
        print(f"\n{markdown([_row(f) for f in findings[before:]])}", flush=True)
        _write(findings, options, complete=number == len(todo))
    return findings


def _row(finding: Finding) -> dict[str, Any]:
    numbers = {key: f"{value:.2g}" for key, value in (("error", finding.error), ("allowed", finding.allowed))}
    return {
        "check": finding.check, "quantity": finding.quantity, **numbers, "": "ok" if finding.passed else "WRONG",
    }  # fmt: skip


def _write(findings: Sequence[Finding], options: argparse.Namespace, *, complete: bool) -> None:
    if options.out is None:
        return
    record = {
        "environment": environment(options.device),
        "complete": complete,
        "findings": [{**asdict(f), "passed": f.passed} for f in findings],
    }
    write_whole(options.out, json.dumps(record, indent=1) + "\n")


def main(argv: Sequence[str]) -> int:
    """Print every finding and write the JSON; return 1 unless all pass."""
    options = measure.parse(measure.arguments("verify", __doc__), argv)
    wrong = [f"{f.check}: {f.quantity}" for f in run(options) if not f.passed]
    print("\nverified" if not wrong else f"\nWRONG: {'; '.join(wrong)}", flush=True)
    return int(bool(wrong))
