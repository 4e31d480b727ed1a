"""Search the tile sizes of the kernels over rows of logits, and report changes for ``backends/triton/_tiles.py``.

Each candidate tile replaces the rule in ``_tiles.py``, is timed on the shapes of real models with all rows active, and
is compared with the tile of the rule. Nothing is written back: change a rule by hand, and note the device and the
numbers next to it. Needs a GPU. On a CPU only ``--size toy`` runs, under Triton's interpreter, as a test of the search
itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.measure import Result, arguments, ceilings, compare, parse
from benchmarks.record import report
from benchmarks.shapes import LOGITS, TOY_ROWS, Shape

BLOCKS = {"toy": (256,), "full": (1024, 2048, 4096, 8192, 16384)}
WARPS = {"toy": (4,), "full": (2, 4, 8, 16)}
SPLITS = {"toy": (1, 2), "full": (1, 2, 4, 8, 16, 32)}
SPLIT = {"token_nll_fwd", "token_nll_bwd"}  # rules of kernels that split a row between programs


class Launch(NamedTuple):
    """A kernel launch: the rule of its tile, the call, and the fewest bytes that it moves."""

    rule: str
    call: Callable[[], object]
    nbytes: int


@contextlib.contextmanager
def tile_in_place(rule: str, tile: Any) -> Iterator[None]:
    """Make ``_tiles.<rule>`` return this tile for every shape."""
    from dllm_kernels.backends.triton import _tiles

    kept = getattr(_tiles, rule)
    setattr(_tiles, rule, lambda *_, **__: tile)
    try:
        yield
    finally:
        setattr(_tiles, rule, kept)


def search_space(rule: str, size: str, itemsize: int) -> list[Any]:
    """Return the tiles to try for a rule: one to eight accesses of 16 bytes per thread."""
    from dllm_kernels.backends.triton._tiles import Tile

    size = "toy" if size == "toy" else "full"
    tiles = [(b, w) for b in BLOCKS[size] for w in WARPS[size] if size == "toy" or 1 <= b * itemsize / (512 * w) <= 8]
    return [Tile(b, w, s) for b, w in tiles for s in (SPLITS[size] if rule in SPLIT else (1,))]


def launches(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, Launch]:
    """Return the launches of the kernels over rows of logits, with and without the argmax match and the argmax.

    The divergence runs on a chunk of pairs of rows: kl takes two passes, l1 three.
    """
    from dllm_kernels.backends.triton import divergence, linear_nll, token_nll
    from dllm_kernels.rows._divergence import DivergenceRequest
    from dllm_kernels.rows._divergence_spec import checked_spec

    logits = torch.randn(1, shape.rows, shape.vocab, device=device, dtype=dtype)
    targets = torch.randint(0, shape.vocab, (shape.rows,), device=device)
    nll, row_max, log_sum, *_ = token_nll.nll(logits, targets, with_correct=False)
    scale = torch.rand_like(nll)
    out = torch.empty_like(logits)
    chunk = logits[0, :2048].clone()  # in place: its content after a launch is equally valid input
    y, s = targets[: chunk.shape[0]], scale[: chunk.shape[0]]

    def backward() -> None:
        token_nll.nll_grad(logits, targets, scale, row_max, log_sum, out)

    found = {"backward": Launch("token_nll_bwd", backward, 2 * logits.nbytes)}
    requests = {"": (False, False), ", argmax-match": (True, False), ", argmax": (False, True)}
    for label, flags in requests.items():
        options: dict[str, Any] = dict(zip(("with_correct", "with_ids"), flags, strict=True))
        found |= {
            f"forward{label}": Launch(
                "token_nll_fwd",
                functools.partial(token_nll.nll, logits, targets, **options),
                logits.nbytes,
            ),
            f"chunk{label}": Launch(
                "linear_nll_rows",
                functools.partial(linear_nll.nll_and_grad_, chunk, y, s, **options),
                2 * chunk.nbytes,
            ),
        }
    teacher = torch.randn_like(chunk)
    for kind in ("kl", "l1"):
        request = DivergenceRequest(checked_spec(kind), teacher[None], s)
        pairs = functools.partial(divergence.divergence, chunk[None], request, with_grad=True)
        found[f"pairs, {kind}"] = Launch("divergence_rows", pairs, 2 * chunk.nbytes + teacher.nbytes)
    return found


def _name(tile: Any) -> str:
    return f"{tile.block_v} x {tile.num_warps} warps" + (f" / {tile.splits}" if tile.splits > 1 else "")


def _timed(rule: str, tile: Any, launch: Callable[[], object]) -> Callable[[int], object]:
    def run(_: int) -> object:
        with contextlib.nullcontext() if tile is None else tile_in_place(rule, tile):
            return launch()

    return run


def main(argv: list[str]) -> int:
    """Print, for every kernel and shape, all tiles compared with the tile of the rule, and write the JSON."""
    options = parse(arguments("tune", __doc__), argv)
    if torch.device(options.device).type == "cpu":
        if options.size != "toy":
            print("tuning requires a GPU; --size toy tests the search under Triton's interpreter", file=sys.stderr)
            return 2
        if os.environ.get("TRITON_INTERPRET") != "1":
            again = [sys.executable, "-m", "benchmarks", "tune", *argv]
            return subprocess.run(again, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
    measured = ceilings(options.device, options.dtype, options.size)
    results: list[Result] = []
    for shape in (TOY_ROWS,) if options.size == "toy" else LOGITS[options.size]:
        for name, launch in launches(shape, options.dtype, options.device).items():
            candidates = {"rule": _timed(launch.rule, None, launch.call)}
            for tile in search_space(launch.rule, options.size, options.dtype.itemsize):
                candidates[_name(tile)] = _timed(launch.rule, tile, launch.call)
            case = {"kernel": name, "rule": launch.rule, "shape": shape.name}
            floor = launch.nbytes / measured["copy_bytes_per_s"]
            results += compare("tune", case, "launch", candidates, options, floor_s=floor, memory=False)
    return report(results, options, baseline="rule", measured_ceilings=measured)
