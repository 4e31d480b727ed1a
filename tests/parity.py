"""When a fast path is right: no tolerance is chosen anywhere, plain PyTorch in the same dtype sets it.

    |ours - exact| <= 2 max |plain - exact| + one rounding step of the output,        exact in float64,

where plain is the oracle of ``reference/`` run in the dtype that ours is run in, and exact is the oracle run on the same
(already rounded) inputs in float64. The maxima are taken over the tensor and over several draws of the inputs, because on
a few numbers plain PyTorch may be exact by luck. For float64 inputs plain and exact are one computation; its error is
taken to be that of plain float32, scaled by the ratio of the two rounding steps, and allowed once more for being in
``exact`` too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

Function = Callable[..., torch.Tensor]
Draw = tuple[Sequence[torch.Tensor], torch.Tensor]
OUR_DRAWS, PLAIN_DRAWS = 2, 8  # the interpreter is slow, plain PyTorch is not


def value_and_grads(function: Function, leaves: Sequence[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    """``function(*leaves)`` and its gradients for the given upstream gradient, on fresh copies of the leaves."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    value = function(*leaves)
    grads = torch.autograd.grad(value, leaves, upstream.to(value.dtype))
    return [value.detach(), *grads]


def _excess(ours: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distance from exact beyond one rounding step of the output."""
    info = torch.finfo(ours.dtype)
    step = info.eps * exact.abs().clamp(min=info.tiny)
    return (ours.double() - exact).abs() - step


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
) -> None:
    """Judge the draws of one quantity together."""
    worst = -1.0
    for o, e in zip(ours, exact, strict=True):
        assert e.dtype == torch.float64
        assert_same_specials(o, e, label)
        finite = e.isfinite() & o.isfinite()
        if finite.any():
            worst = max(worst, _excess(o[finite], e[finite]).max().item())
    allowed = 2 * plain_error
    assert worst <= allowed, f"{label}: error {worst:.3g} above one rounding step, plain PyTorch allows {allowed:.3g}"


def _largest_difference(plain: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    worst = 0.0
    for p, e in zip(plain, exact, strict=True):
        finite = p.isfinite() & e.isfinite()
        if finite.any():
            worst = max(worst, (p[finite].double() - e[finite]).abs().max().item())
    return worst


def _plain_errors(plain: Function, draws: Sequence[Draw]) -> list[float]:
    """Largest error of plain PyTorch over the draws, of the value and of each gradient."""
    wide = draws[0][0][0].dtype == torch.float64
    pairs = []
    for leaves, upstream in draws:
        leaves = [leaf.float() if wide else leaf for leaf in leaves]
        exact = value_and_grads(plain, [leaf.double() for leaf in leaves], upstream)
        pairs.append((value_and_grads(plain, leaves, upstream), exact))
    errors = [
        _largest_difference([p[place] for p, _ in pairs], [e[place] for _, e in pairs])
        for place in range(len(pairs[0][0]))
    ]
    scale = 1.5 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return [error * scale for error in errors] if wide else errors


def assert_parity(ours: Function, plain: Function, draw: Callable[[int], Draw]) -> None:
    """Value and every gradient of ``ours`` against ``plain``, where ``draw(seed)`` is (leaves, upstream gradient).

    Also the dtypes: values in float32 (float64 for float64 leaves), gradients in the dtype of their leaf.
    """
    draws = [draw(seed) for seed in range(PLAIN_DRAWS)]
    judged = draws[:OUR_DRAWS]
    results = [value_and_grads(ours, *one) for one in judged]
    exact = [value_and_grads(plain, [leaf.double() for leaf in leaves], upstream) for leaves, upstream in judged]
    for result, (leaves, _) in zip(results, judged, strict=True):
        assert result[0].dtype == torch.promote_types(leaves[0].dtype, torch.float32)
        assert [grad.dtype for grad in result[1:]] == [leaf.dtype for leaf in leaves]
    for place, plain_error in enumerate(_plain_errors(plain, draws)):
        label = "value" if place == 0 else f"gradient {place}"
        assert_as_good_as_plain([r[place] for r in results], [e[place] for e in exact], plain_error, label)


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``torch.empty`` return the worst that fresh memory may hold, so that what is not written shows."""
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> torch.Tensor:
        out = empty(*args, **options)
        if out.is_floating_point():
            return out.fill_(torch.nan)
        return out.fill_(True) if out.dtype == torch.bool else out.fill_(torch.iinfo(out.dtype).max)

    monkeypatch.setattr(torch, "empty", poisoned)


def small_tiles(monkeypatch: pytest.MonkeyPatch, splits: int = 1, fused_rows: bool = False) -> None:
    """Tiles of 16 columns, so that small inputs meet every edge that large ones do; ``splits`` programs a row forward.

    ``fused_rows``: chunks of a linear loss go through the kernel for many rows however few they are.
    """
    tiles = pytest.importorskip("dllm_kernels.kernels._tiles")
    monkeypatch.setattr(tiles, "token_nll_fwd", lambda N, V, itemsize: tiles.Tile(16, 4, splits))
    monkeypatch.setattr(tiles, "token_nll_bwd", lambda V, itemsize: tiles.Tile(16, 4))
    monkeypatch.setattr(tiles, "linear_nll_rows", lambda V, itemsize: tiles.Tile(16, 4))
    if fused_rows:
        monkeypatch.setattr(tiles, "TARGET_PROGRAMS", 0)
