"""The kinds of rows for which every row op is tested: code paths, shapes, layouts and extreme values."""

import math

import pytest
import torch

from tests.conftest import DEVICE, usually
from tests.support.parity import small_blocks, small_tiles

NAN, INF = math.nan, math.inf
LOWEST = torch.finfo(torch.float32).min
PATHS = ("torch", "torch, one row at a time", "torch, on three threads", "triton", "triton, split rows")
# One path of each backend, with all of the code that depends on the layout and the size of a row.
of_each_backend = pytest.mark.parametrize(
    "path", usually(("torch, one row at a time", "triton, split rows"), PATHS), indirect=True
)
HEAD_PATHS = ("torch", "torch, on three threads", "triton")
# (shape of the rows, V): one row and several, V of one column, odd and even, at the edge of a tile and beyond it.
SHAPES = (((1,), 1), ((2, 2), 2), ((5,), 3), ((1, 3), 16), ((2, 3), 53), ((2, 1, 2), 17))


def on_path(path, monkeypatch, splits=1):
    """Set the backend: torch (small blocks, or threads as for large logits) or Triton (small tiles, whole or split).

    ``splits``: parts of a row that a path of Triton does not split, 2 for the chunks of ``HEAD_PATHS``.
    """
    if "," in path:
        small_blocks(monkeypatch, threads=3 if "three" in path else 1)
    if path.startswith("triton"):
        small_tiles(monkeypatch, splits=3 if "split" in path else splits)
    return path.split(",")[0]


# Memory layouts of logits of some 37 columns.
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
)  # rows that cannot be written in place


def laid_out(kind):
    """Return the logits with one of these memory layouts, created on the device, because a copy may lose the layout."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return LAYOUTS[kind]()


# Rows of finite numbers, far apart or far from 0, as changes of ordinary ones.
SPREAD = {
    "peaked": lambda x: x.index_fill(-1, torch.tensor([4]), 40.0),
    "flat": lambda x: torch.full_like(x, 3.0),
    "two peaks": lambda x: x.index_fill(-1, torch.tensor([4, 9]), 90.0),
    "shifted far": lambda x: x + 1e4,
    "spread far": lambda x: 60 * x,
}
# Four logits, to be repeated so that they span tiles and splits.
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


def in_separate_memory(t, offset):
    """Copy the rows to memory with an odd row stride, beginning ``offset`` columns into it."""
    memory = torch.full((*t.shape[:-1], t.shape[-1] + 5 + t.shape[-1] % 2), NAN, dtype=t.dtype, device=DEVICE)
    return memory[..., offset : offset + t.shape[-1]].copy_(t)


def extreme_rows(V):
    """Return extreme rows of V columns, each with its target."""
    return {
        kind: (torch.tensor(four, dtype=torch.float64).repeat(V // 4 + 1)[:V], 22) for kind, four in EXTREME.items()
    }


def between_ordinary_rows(rows, dtype):
    """Return (names, logits, targets) of the rows, each between two ordinary rows that must not be affected."""
    V = len(next(iter(rows.values()))[0])
    tame = (torch.linspace(-1, 1, V, dtype=torch.float64), V - 1)
    rows = {"before": tame, **rows, "after": tame}
    logits, targets = zip(*rows.values(), strict=True)
    return list(rows), torch.stack(logits).to(DEVICE, dtype), torch.tensor(targets, device=DEVICE)


def around_a_transform(V, skipped, high):
    """Return rows and targets of logits with a skipped column; a cap, if any, maps no logit above ``high``."""
    base = torch.linspace(-3, 3, V, dtype=torch.float64)

    def with_(value, *columns, row=base):
        row = row.clone()
        row[list(columns)] = value
        return row

    return {
        "all -inf but the skipped": (with_(-INF, *(v for v in range(V) if v != skipped)), 5),
        "nan in the skipped column": (with_(NAN, skipped), 5),
        "inf in the skipped column": (with_(INF, skipped), 5),
        "the skipped one is the largest": (with_(9.0, skipped), V - 1),
        "the target is skipped": (base, skipped),
        "the target is out of range": (base, V),
        "near the cap": (1.5 * base, V - 1),
        "at the cap, first of equals": (with_(high, 4, 20, 21, V - 1), 4),
        "at the cap, second of equals": (with_(high, 4, 20, 21, V - 1), 20),
        "at the cap, last of equals": (with_(high, 4, 20, 21, V - 1), V - 1),
        "at the cap, a lower one is smaller": (with_(0.9 * high, 4, row=with_(high, 20)), 20),
        "a tie with the skipped column": (with_(3.2, skipped, skipped + 1), skipped + 1),
    }
