"""Rule for the correctness of a fast path. It has no tolerances: float64 and plain PyTorch determine the allowed error.

    |ours - exact| <= 2 plain + eps_out |exact| + eps_acc max |exact| sum of sqrt(reduction sizes)

``exact`` is the oracle of ``reference/`` in float64, on the same (already rounded) inputs. ``plain`` is the largest
error of the oracle in the dtype of ours, and ``eps_out`` is one rounding step of the output. The last term is the noise
of a different summation order: a sum of n numbers drifts by about sqrt(n) rounding steps of the accumulator, which is
float32 or float64. The compared results are computed from sums over the vocabulary, the hidden size and the rows.

Maxima are taken over the tensor and over several draws of the inputs. With few numbers, plain PyTorch may be exact by
luck, or a sum may be nearly zero.

A quantity that is exactly 0 in every draw is a difference of equal numbers and has no scale. The largest of the numbers
that cancel, such as the logits, then replaces max |exact|. The reason is that a compiler may fuse the product that
computes such a number with the subtraction, which leaves the rounding error of the product.

For float64, plain and exact are the same computation, so only the last two terms remain. The error of float64 cannot be
derived from the error of float32, because the roundings of float32 are independent random draws.

``tests/repo/test_parity.py`` tests that this rule accepts correct results and rejects wrong ones.
"""

import functools
import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

from dllm_kernels.backends.torch import _blocks

Function = Callable[..., torch.Tensor]
Draw = tuple[Sequence[torch.Tensor], torch.Tensor]
OUR_DRAWS, PLAIN_DRAWS = 2, 8  # the interpreter is slow, plain PyTorch is not


def value_and_grads(function: Function, leaves: Sequence[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    """Return ``function(*leaves)`` and its gradients for the upstream gradient, on fresh copies of the leaves."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    value = function(*leaves)
    grads = torch.autograd.grad(value, leaves, upstream.to(value))
    return [value.detach(), *grads]


def assert_close_with_grads(
    ours: Function, plain: Function, leaves: Sequence[torch.Tensor], upstream: torch.Tensor
) -> None:
    """Compare value and gradients by the default tolerances of ``torch.testing``."""
    for got, expected in zip(*(value_and_grads(f, leaves, upstream) for f in (ours, plain)), strict=True):
        torch.testing.assert_close(got, expected)


def reduction_sizes(leaves: Sequence[torch.Tensor]) -> set[int]:
    """Return the sizes of the sums over these tensors: along their last dimension, and along their rows."""
    return {n for leaf in leaves if leaf.numel() for n in (leaf.shape[-1], leaf.numel() // leaf.shape[-1])}


def largest(t: torch.Tensor) -> float:
    finite = t[t.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def largest_error(got: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Return the largest error over the draws, where both values are finite."""
    return max(largest(g.double() - e) for g, e in zip(got, exact, strict=True))


def values_at(ours: torch.Tensor, exact: torch.Tensor, where: torch.Tensor) -> str:
    """Return the first index of an element that ``where`` selects, its two values, and the number of such elements."""
    index = tuple(where.nonzero()[0].tolist())
    of_all = f"{int(where.sum())} of {where.numel()} elements"
    return f"at {[*index]} it is {ours[index].item():.9g}, expected {exact[index].item():.9g}; {of_all}"


def same(ours: Any, exact: Any, label: str = "result") -> bool:
    """Return True for equal tensors, or equal tuples of them; otherwise raise an error that names the first element."""
    if torch.is_tensor(ours):
        kinds = [(tuple(t.shape), t.dtype) for t in (ours, exact)]
        assert kinds[0] == kinds[1], f"{label}: it is {kinds[0]}, expected {kinds[1]}"
        assert torch.equal(ours, exact), f"{label}: {values_at(ours, exact, ours != exact)}"
        return True
    names = getattr(ours, "_fields", range(len(ours)))
    return all(same(x, y, f"{label} {name}") for name, x, y in zip(names, ours, exact, strict=True))


def assert_same_specials(ours: torch.Tensor, exact: torch.Tensor, label: str = "") -> None:
    """Assert that NaN and infinities are at the same positions."""
    assert ours.shape == exact.shape, label
    overflow = exact.abs() > torch.finfo(ours.dtype).max  # a finite float64 that the output's dtype cannot hold
    infinite = exact.isinf() | overflow
    for wrong, what in (
        (ours.isnan() != exact.isnan(), "NaN elsewhere than in float64"),
        (ours.isinf() != infinite, "infinite elsewhere than in float64"),
        (infinite & (ours.sign().double() != exact.sign()), "wrong sign of an infinity"),
    ):
        assert not wrong.any(), f"{label}: {what}, {values_at(ours, exact, wrong)}"


def assert_as_good_as_plain(
    ours: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    plain_error: float,
    label: str = "",
    sizes: Collection[int] = (),
    terms: float = 0.0,
) -> None:
    """Judge all draws of one quantity together; ``exact`` may have more draws than ours.

    ``sizes``: sizes of the sums from which the quantity was computed. ``terms``: the largest of the numbers that
    cancel, for a quantity that is 0.
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
        assert worst <= allowed, (
            f"{label}: error {worst:.3g} above one rounding step, {allowed:.3g} is allowed; "
            f"{values_at(o, e, excess.isfinite() & (excess > allowed))}"
        )


def assert_parity(
    ours: Function, plain: Function, draw: Callable[[int], Draw], constants: Collection[int] = ()
) -> None:
    """Compare value and gradients of ``ours`` with ``plain``; ``draw(seed)`` returns (leaves, upstream gradient).

    The dtype of the value must be float32 (float64 for float64 leaves); autograd enforces the dtype of a gradient.
    ``constants``: sizes of sums over tensors that are not leaves, in addition to the sizes of the leaves.
    """
    draws = [draw(seed) for seed in range(PLAIN_DRAWS)]
    results = [value_and_grads(ours, *one) for one in draws[:OUR_DRAWS]]
    exact = [value_and_grads(plain, [leaf.double() for leaf in leaves], upstream) for leaves, upstream in draws]
    wide = draws[0][0][0].dtype == torch.float64  # then both are the same computation
    same_dtype = exact if wide else [value_and_grads(plain, *one) for one in draws]
    for result, (leaves, _) in zip(results, draws, strict=False):
        assert result[0].dtype == torch.promote_types(leaves[0].dtype, torch.float32), f"value in {result[0].dtype}"
    for place in range(len(results[0])):
        got, p, e = ([run[place] for run in runs] for runs in (results, same_dtype, exact))
        label = f"gradient {place}" if place else "value"
        sizes = [*reduction_sizes(draws[0][0]), *constants]
        assert_as_good_as_plain(got, e, largest_error(p, e), label, sizes)


def assert_equal_but_for_contraction(got: torch.Tensor, expected: torch.Tensor, backend: str = "auto") -> None:
    """Assert equal bits from the torch path on a CPU, and equality up to rounding from kernels or on a GPU.

    Two kernels, or two specialisations of one, may contract products and order sums differently.
    """
    if got.is_cpu and not backend.startswith("triton"):
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected)


class Spoilt(torch.autograd.Function):
    """Identity whose gradient is changed in place by ``change(gradient)``, as an error that a check must detect."""

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
    """Make ``torch.empty`` return extreme values, so that unwritten memory is detected."""
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
    """Make the torch path process one row at a time on several threads, as it processes blocks of large inputs."""
    monkeypatch.setattr(_blocks, "BLOCK_BYTES", 1)
    monkeypatch.setattr(_blocks, "COMMON_BLOCK_BYTES", 1)
    monkeypatch.setattr(_blocks, "num_threads", lambda: threads)


@functools.cache
def tile_rules() -> list[tuple[Any, str, bool]]:
    """Return (module, name, whether it splits long rows) of every function of the kernels that returns a ``Tile``."""
    package = importlib.import_module("dllm_kernels.backends.triton")
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    functions = [(m, *item) for m in modules for item in inspect.getmembers(m, inspect.isfunction)]
    tile = ("Tile", "_tiles.Tile", importlib.import_module(f"{package.__name__}._tiles").Tile)
    rules = [(m, name, f) for m, name, f in functions if f.__annotations__.get("return") in tile]
    return [(m, name, f(2**20, 2).splits > 1) for m, name, f in rules]


def small_tiles(monkeypatch: pytest.MonkeyPatch, splits: int = 1, columns: int = 16) -> None:
    """Set tiles of few columns, so that small inputs cover every edge that large ones have.

    A compiled kernel has at least a column per thread, because in place another thread might overwrite a column before
    a thread without columns of its own reads it. ``splits``: programs per row in forward.
    """
    tiles = pytest.importorskip("dllm_kernels.backends.triton._tiles")
    launch = importlib.import_module("dllm_kernels.backends.triton._launch")
    columns = columns if launch.INTERPRETED else max(columns, launch.threads(1))
    others = {"sample": tiles.Tile(64, 1, splits), "token_nll_bwd": tiles.Tile(columns, 1, 2)}
    for module, name, split in tile_rules():
        tile = others.get(name, tiles.Tile(columns, 1, splits if split else 1))
        monkeypatch.setattr(module, name, lambda *_, tile=tile, **__: tile)
