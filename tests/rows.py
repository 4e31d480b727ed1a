"""The kinds of rows that every row op goes through: the paths that read them, their shapes, layouts and extremes."""

import math

import torch

from tests.parity import small_blocks, small_tiles

NAN, INF = math.nan, math.inf
LOWEST = torch.finfo(torch.float32).min
PATHS = ("torch", "torch, one row at a time", "torch, on three threads", "triton", "triton, split rows")
# (shape of the rows, V): one row and several, V of one column, odd and even, at the edge of a tile and beyond it.
SHAPES = (((1,), 1), ((2, 2), 2), ((5,), 3), ((1, 3), 16), ((2, 3), 53), ((2, 1, 2), 17))


def on_path(path, monkeypatch):
    """The backend, in small blocks or on threads as large logits are, in small tiles and by either forward kernel."""
    if "," in path:
        small_blocks(monkeypatch, threads=3 if "three" in path else 1)
    if path.startswith("triton"):
        small_tiles(monkeypatch, splits=3 if "split" in path else 1)
    return path.split(",")[0]


# How logits of some 37 columns may lie in memory.
LAYOUTS = {
    "batch slice": lambda: torch.randn(6, 5, 37)[1:5:3],
    "position slice": lambda: torch.randn(2, 6, 37)[:, :-1],
    "every second position": lambda: torch.randn(2, 10, 37)[:, ::2],
    "transposed batch": lambda: torch.randn(5, 2, 37).transpose(0, 1),
    "transposed columns": lambda: torch.randn(2, 37, 5).transpose(1, 2),
    "every second column": lambda: torch.randn(2, 5, 74)[..., ::2],
    "expanded batch": lambda: torch.randn(1, 5, 37).expand(2, 5, 37),
    "expanded positions": lambda: torch.randn(2, 1, 37).expand(2, 5, 37),
    "expanded columns": lambda: torch.randn(2, 5, 1).expand(2, 5, 37),
    "four dimensions": lambda: torch.randn(2, 5, 1, 37),
    "four, sliced": lambda: torch.randn(2, 3, 4, 37)[:, 1:, ::2],
    "two dimensions": lambda: torch.randn(5, 37),
    "two, sliced": lambda: torch.randn(5, 40)[:, 2:39],
    "one dimension": lambda: torch.randn(37),
    "one column": lambda: torch.randn(2, 5, 3)[..., 1:2],
    "no batch": lambda: torch.randn(0, 5, 37),
    "no position": lambda: torch.randn(2, 0, 37),
    "no row of four dimensions": lambda: torch.randn(2, 3, 0, 37),
}
SHARED = (
    "expanded batch",
    "expanded positions",
    "transposed columns",
    "four, sliced",
)  # rows that none can write in place


def laid_out(kind):
    """Logits whose memory is laid out in one of these ways."""
    torch.manual_seed(0)
    return LAYOUTS[kind]()


# Rows of finite numbers, far apart or far from 0, as changes of tame ones.
SPREAD = {
    "peaked": lambda x: x.index_fill(-1, torch.tensor([4]), 40.0),
    "flat": lambda x: torch.full_like(x, 3.0),
    "two peaks": lambda x: x.index_fill(-1, torch.tensor([4, 9]), 90.0),
    "shifted far": lambda x: x + 1e4,
    "spread far": lambda x: 60 * x,
}
# Four logits that are to be repeated, so that they span tiles and splits.
EXTREME = {
    "shifted up": [1e4, 1e4 + 1, 1e4 - 2, 1e4],
    "shifted down": [-1e4, -1e4 - 1, -1e4 + 2, -1e4],
    "huge": [1e38, -1e38, 9e37, 0.0],
    "largest": [-LOWEST, LOWEST, 0.0, 1.0],
    "filled with the lowest": [LOWEST, LOWEST, 1.0, LOWEST],
    "all the lowest": [LOWEST] * 4,
    "some -inf": [0.0, -INF, 1.0, -INF],
    "first -inf": [-INF, -INF, -INF, 2.0],
    "target -inf": [0.0, 1.0, -INF, 2.0],
    "all -inf": [-INF] * 4,
    "one inf": [0.0, INF, 1.0, 2.0],
    "target inf": [0.0, 1.0, INF, 2.0],
    "nan": [0.0, NAN, 1.0, 2.0],
    "target nan": [0.0, 1.0, NAN, 2.0],
    "nan and -inf": [NAN, -INF, -INF, -INF],
    "inf and -inf": [INF, -INF, INF, 0.0],
}
