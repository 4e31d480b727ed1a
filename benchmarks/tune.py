"""Search the tile sizes of the kernels over rows of logits, and say what ``kernels/_tiles.py`` would have to change.

Each candidate tile is put in the place of the rule in ``_tiles.py``, timed on the shapes of real models with all rows
active, and compared with what the rule picks. Nothing is written back: a new rule is a decision, noted beside it with
the device and the numbers. Needs a GPU; on a CPU only ``--size toy`` runs, under Triton's interpreter, to show that the
search itself works.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.measure import Result, arguments, ceilings, compare, parse
from benchmarks.record import report
from benchmarks.shapes import LOGITS, Shape

BLOCKS = {"toy": (64, 256), "full": (1024, 2048, 4096, 8192, 16384)}
WARPS = {"toy": (4,), "full": (4, 8, 16)}
SPLITS = {"toy": (1, 2), "full": (1, 2, 4, 8, 16)}


@contextlib.contextmanager
def tile_in_place(rule: str, tile: Any) -> Iterator[None]:
    """``_tiles.<rule>`` returns this tile, whatever the shape."""
    from dllm_kernels.kernels import _tiles

    kept = getattr(_tiles, rule)
    setattr(_tiles, rule, lambda *_, **__: tile)
    try:
        yield
    finally:
        setattr(_tiles, rule, kept)


def search_space(rule: str, size: str, rows: int) -> list[Any]:
    """Tiles to try for a rule."""
    from dllm_kernels.kernels._tiles import Tile

    size = "toy" if size == "toy" else "full"
    split = SPLITS[size] if rule == "token_nll_fwd" and (size == "toy" or rows < 2048) else (1,)
    return [Tile(b, w, s) for b in BLOCKS[size] for w in WARPS[size] for s in split]


def launches(shape: Shape, dtype: torch.dtype, device: str) -> dict[str, tuple[Callable[[], object], int]]:
    """Rule -> (launch of its kernel, fewest bytes that it moves)."""
    from dllm_kernels.kernels import linear_nll, token_nll

    logits = torch.randn(1, shape.rows, shape.vocab, device=device, dtype=dtype)
    targets = torch.randint(0, shape.vocab, (shape.rows,), device=device)
    flags: dict[str, Any] = {"with_correct": False}
    nll, row_max, log_sum, _, _ = token_nll.row_stats(logits, targets, **flags)
    scale = torch.rand_like(nll)
    out = torch.empty_like(logits)
    chunk = logits[0, :2048].clone()
    rows = chunk.shape[0]
    nbytes = logits.nbytes

    def backward() -> None:
        token_nll.row_grad(logits, targets, scale, row_max, log_sum, out)

    return {
        "token_nll_fwd": (lambda: token_nll.row_stats(logits, targets, **flags), nbytes),
        "token_nll_bwd": (backward, 2 * nbytes),
        "linear_nll_rows": (
            lambda: linear_nll.row_nll_grad_(chunk, targets[:rows], scale[:rows], **flags),
            2 * chunk.nbytes,
        ),
    }


def _name(tile: Any) -> str:
    return f"{tile.block_v} x {tile.num_warps} warps" + (f" / {tile.splits}" if tile.splits > 1 else "")


def _timed(rule: str, tile: Any, launch: Callable[[], object]) -> Callable[[int], object]:
    def run(_: int) -> object:
        with contextlib.nullcontext() if tile is None else tile_in_place(rule, tile):
            return launch()

    return run


def main(argv: list[str]) -> int:
    """Print, for every kernel and shape, all tiles beside what the rule picks, and write the JSON."""
    options = parse(arguments("tune", __doc__), argv)
    if torch.device(options.device).type == "cpu":
        if options.size != "toy":
            print("tuning needs a GPU; --size toy shows the search under Triton's interpreter", file=sys.stderr)
            return 2
        if os.environ.get("TRITON_INTERPRET") != "1":
            again = [sys.executable, "-m", "benchmarks", "tune", *argv]
            return subprocess.run(again, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
    measured = ceilings(options.device, options.dtype, options.size)
    results: list[Result] = []
    for shape in LOGITS[options.size]:
        for rule, (launch, nbytes) in launches(shape, options.dtype, options.device).items():
            candidates = {"rule": _timed(rule, None, launch)}
            for tile in search_space(rule, options.size, shape.rows):
                candidates[_name(tile)] = _timed(rule, tile, launch)
            case = {"kernel": rule, "shape": shape.name}
            results += compare(
                "tune", case, "launch", candidates, options, floor_s=nbytes / measured["copy_bytes_per_s"], memory=False
            )
    report(results, options, baseline="rule", measured_ceilings=measured)
    return 0
