"""When a fast path is right: no tolerance is chosen anywhere, float64 and plain PyTorch in the same dtype set it.

    |ours - exact| <= 2 plain + eps_out |exact| + eps_acc max |exact| sum of sqrt(reduction sizes)

``exact`` is the oracle of ``reference/`` on the same (already rounded) inputs in float64, ``plain`` the largest error
of the oracle run in the dtype that ours is run in, ``eps_out`` one rounding step of the output. The last term is the
noise that summing in another order makes: a sum of n numbers drifts by about sqrt(n) rounding steps of the
accumulator, float32 or float64, and what is compared has been through sums over the vocabulary, the hidden size and
the rows. Maxima are taken over the tensor and over several draws of the inputs, because on a few numbers plain
PyTorch may be exact, and a sum nearly zero, by luck. A quantity that is exactly 0 in every draw has no scale of its
own, because it is a difference of equal numbers. The largest of the numbers that cancel, such as the logits, then
takes the place of max |exact|: a compiler may fuse the product that makes such a number with the subtraction, which
leaves the rounding error of the product. For float64 plain and exact are one computation, so that the last two terms
stand alone: its error cannot be had from float32's, whose roundings are other draws of luck.

``tests/repo/test_parity.py`` holds this to what it must let pass and what it must catch.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

from dllm_kernels._backends.torch import _blocks

Function = Callable[..., torch.Tensor]
Draw = tuple[Sequence[torch.Tensor], torch.Tensor]
OUR_DRAWS, PLAIN_DRAWS = 2, 8  # the interpreter is slow, plain PyTorch is not


def value_and_grads(function: Function, leaves: Sequence[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    """``function(*leaves)`` and its gradients for the given upstream gradient, on fresh copies of the leaves."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    value = function(*leaves)
    grads = torch.autograd.grad(value, leaves, upstream.to(value.dtype))
    return [value.detach(), *grads]


def reduction_sizes(leaves: Sequence[torch.Tensor]) -> set[int]:
    """How many numbers the sums over these tensors have: along their last dimension, and along their rows."""
    return {n for leaf in leaves if leaf.numel() for n in (leaf.shape[-1], leaf.numel() // leaf.shape[-1])}


def largest(t: torch.Tensor) -> float:
    finite = t[t.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def largest_error(got: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Over the draws, where both are finite."""
    return max(largest(g.double() - e) for g, e in zip(got, exact, strict=True))


def assert_same_specials(ours: torch.Tensor, exact: torch.Tensor, label: str = "") -> None:
    """NaN and infinities stand in the same places."""
    assert ours.shape == exact.shape, label
    assert torch.equal(ours.isnan(), exact.isnan()), f"{label}: NaN elsewhere than in float64"
    overflow = exact.abs() > torch.finfo(ours.dtype).max  # a finite float64 that the output's dtype cannot hold
    infinite = exact.isinf() | overflow
    assert torch.equal(ours.isinf(), infinite), f"{label}: infinite elsewhere than in float64"
    assert torch.equal(ours[infinite].sign().double(), exact[infinite].sign()), f"{label}: wrong sign of an infinity"


def assert_as_good_as_plain(
    ours: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    plain_error: float,
    label: str = "",
    sizes: Collection[int] = (),
    terms: float = 0.0,
) -> None:
    """Judge the draws of one quantity together; ``exact`` may go on with draws that ours was not run on.

    ``sizes``: of the sums that the quantity has been through. ``terms``: the largest of the numbers that cancel where
    it is 0.
    """
    assert 0 < len(ours) <= len(exact)
    assert all(e.dtype == torch.float64 for e in exact)
    noise = (max(map(largest, exact)) or terms) * sum(map(math.sqrt, sizes))
    for o, e in zip(ours, exact, strict=False):
        assert_same_specials(o, e, label)
        out, summed = torch.finfo(o.dtype), torch.finfo(torch.promote_types(o.dtype, torch.float32))
        allowed = 2 * plain_error + summed.eps * noise
        excess = (o.double() - e).abs() - out.eps * e.abs().clamp(min=out.tiny)
        worst = largest(excess.clamp(min=0))
        assert worst <= allowed, f"{label}: error {worst:.3g} above one rounding step, {allowed:.3g} is allowed"


def assert_parity(
    ours: Function, plain: Function, draw: Callable[[int], Draw], constants: Collection[int] = ()
) -> None:
    """Value and every gradient of ``ours`` against ``plain``, where ``draw(seed)`` is (leaves, upstream gradient).

    Also the dtype of the value, float32 (float64 for float64 leaves); autograd itself sees to that of a gradient.
    ``constants``: the sizes of sums over what is no leaf, beside those that the leaves show.
    """
    draws = [draw(seed) for seed in range(PLAIN_DRAWS)]
    results = [value_and_grads(ours, *one) for one in draws[:OUR_DRAWS]]
    exact = [value_and_grads(plain, [leaf.double() for leaf in leaves], upstream) for leaves, upstream in draws]
    same_dtype = [value_and_grads(plain, *one) for one in draws]
    for result, (leaves, _) in zip(results, draws, strict=False):
        assert result[0].dtype == torch.promote_types(leaves[0].dtype, torch.float32), f"value in {result[0].dtype}"
    for place in range(len(results[0])):
        got, p, e = ([run[place] for run in runs] for runs in (results, same_dtype, exact))
        label = f"gradient {place}" if place else "value"
        sizes = [*reduction_sizes(draws[0][0]), *constants]
        assert_as_good_as_plain(got, e, largest_error(p, e), label, sizes)


class Spoilt(torch.autograd.Function):
    """Identity whose gradient ``change(gradient)`` alters in place: what a check of gradients has to notice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        ctx.change(grad)
        return grad, None


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``torch.empty`` return the worst that fresh memory may hold, so that what is not written shows."""
    empty = torch.empty
    # The functions that a device context replaces, listed once per process: with this one patched, it would stay out.
    _device_constructors()

    def poisoned(*args: Any, **options: Any) -> torch.Tensor:
        out = empty(*args, **options)
        if out.is_floating_point():
            return out.fill_(torch.nan)
        return out.fill_(True) if out.dtype == torch.bool else out.fill_(torch.iinfo(out.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)


def small_blocks(monkeypatch: pytest.MonkeyPatch, threads: int = 1) -> None:
    """The torch path takes one row at a time, on so many threads, as it takes many rows of large inputs."""
    monkeypatch.setattr(_blocks, "BLOCK_BYTES", 1)
    monkeypatch.setattr(_blocks, "COMMON_BLOCK_BYTES", 1)
    monkeypatch.setattr(_blocks, "num_threads", lambda: threads)


def small_tiles(monkeypatch: pytest.MonkeyPatch, splits: int = 1) -> None:
    """Tiles of 16 columns, so that small inputs meet every edge large ones do; ``splits`` programs a row forward."""
    tiles = pytest.importorskip("dllm_kernels._backends.triton._tiles")
    monkeypatch.setattr(tiles, "token_nll_fwd", lambda V, itemsize: tiles.Tile(16, 1, splits))
    monkeypatch.setattr(tiles, "token_nll_bwd", lambda V, itemsize: tiles.Tile(16, 1, 2))
    monkeypatch.setattr(tiles, "sample", lambda V, itemsize: tiles.Tile(64, 1, splits))
    for rule in ("linear_nll_rows", "divergence_rows"):
        monkeypatch.setattr(tiles, rule, lambda V, itemsize, **_: tiles.Tile(16, 1))
