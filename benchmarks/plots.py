"""The pictures of README and the site, drawn from committed results: ``python -m benchmarks plots RESULTS --out docs``.

``memory.svg`` shows the result of ``python -m benchmarks memory``. ``benchmarks.svg`` shows time and peak memory of the
package relative to a baseline, for the main subjects.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.svg import Picture, Point

Record = dict[str, Any]
GIB = 1 << 30
#: Models with the vocabularies of the memory picture.
MODELS = {126_464: "LLaDA", 151_936: "Qwen3", 262_144: "Gemma"}
HALF = {"V": 32_000, "active": "50%"}
#: (label, file, name of the baseline, entries of the case)
BARS: tuple[tuple[str, str, str, Record], ...] = (
    ("MDLM loss from logits", "token_nll", "original", HALF),
    ("NLL from hidden states, frozen head", "linear_nll", "plain", HALF | {"head": "frozen"}),
    ("NLL from hidden states, trained head", "linear_nll", "plain", HALF | {"head": "trainable"}),
    ("log p and entropy from logits", "row_stats", "plain", HALF | {"form": "logits"}),
    ("SCDD loss from logits", "scdd", "original", {"active": "50%"}),
    ("coupled-GRPO update, frozen head", "policy", "plain", {"scheme": "coupled"}),
    ("KL to a teacher, frozen head", "divergence_kinds", "plain", {"kind": "kl"}),
)
BASELINES = {"original": "NeMo AutoModel", "plain": "plain PyTorch"}


def memory(found: Record) -> Picture:
    """Draw peak memory against the vocabulary, measured points and the size of the logits alone."""
    results, case = found["results"], found["results"][0]["case"]
    bytes_each = {"float32": 4, "bfloat16": 2, "float16": 2}[case["dtype"]]
    points = {
        name: [(r["case"]["V"], r["peak_bytes"] / GIB) for r in results if r["name"] == name]
        for name in ("plain", "ours")
    }
    right, top = max(v for v, _ in points["plain"]), 1.08 * max(y for _, y in points["plain"])
    picture = Picture(580, 340, "Peak memory of the loss against the vocabulary: the plain loss and this package")
    x0, y0, width, height = 44, 290, 404, 230

    def at(v: float, y: float) -> Point:
        return x0 + width * v / right, y0 - height * y / top

    picture.text(16, 24, f"Peak memory of one loss, forward + backward, {case['rows']:,} tokens", bold=True, size=16)
    step = next(step for step in (0.5, 1, 2, 5, 10) if top / step < 8)
    for i in range(int(top / step) + 1):
        _, y = at(0, i * step)
        picture.line([(x0, y), (x0 + width, y)], colour="grid")
        picture.text(x0 - 8, y + 5, f"{i * step:g}", colour="soft", anchor="end", size=15)
    picture.text(16, 48, "GiB", colour="soft", size=15)
    for v in (32_000, 64_000, *MODELS):
        x, _ = at(v, 0)
        picture.line([(x, y0), (x, y0 + 5)], colour="soft")
        anchor = {126_464: "end", 151_936: "start"}.get(v, "middle")  # these two are close to each other
        picture.text(x, y0 + 19, MODELS.get(v, f"{v // 1000}k"), colour="soft", anchor=anchor, size=15)
        if v in MODELS:
            picture.text(x, y0 + 36, f"{v:,}", colour="soft", anchor=anchor, size=15)
    logits = [(0.0, 0.0), (right, case["rows"] * bytes_each * right / GIB)]
    picture.line([at(*p) for p in logits], colour="soft", width=1.5, dashed=True)
    for name, colour in (("plain", "plain"), ("ours", "ours")):
        picture.line([at(*p) for p in points[name]], colour=colour, width=2.5)
        for p in points[name]:
            picture.dot(*at(*p), colour=colour)
    labels = {"plain": (points["plain"][-1], "plain loss"), "ours": (points["ours"][-1], "dllm_kernels")}
    for name, (p, label) in labels.items():
        x, y = at(*p)
        picture.text(x + 8, y - 2, label, colour=name, bold=True, size=15)
        picture.text(x + 8, y + 15, f"{p[1]:.2f} GiB", colour=name, size=15)
    x, y = at(*logits[1])
    picture.text(x + 8, y + 4, "the logits alone", colour="soft", size=15)
    return picture


def ratio(results: Sequence[Record], baseline: str, case: Record) -> tuple[float, float]:
    """Return (time, peak memory) of the package over the baseline, forward and backward."""
    them = {r["name"]: r for r in results if r["phase"] == "both" and case.items() <= r["case"].items()}
    ours, other = them["ours"], them[baseline]
    return ours["timing"]["q50_s"] / other["timing"]["q50_s"], ours["peak_bytes"] / other["peak_bytes"]


def bars(folder: Path) -> Picture:
    """Draw time and peak memory relative to the baseline of each subject; the bar of a baseline would end at 1."""
    picture = Picture(760, 58 + 46 * len(BARS), "Time and peak memory of the package relative to a baseline")
    columns = {"time": (290, 0), "memory": (530, 1)}
    width = 170
    for name, (x, _) in columns.items():
        picture.text(x, 26, f"{name}, relative", bold=True)
        picture.line([(x + width, 36), (x + width, 46 + 46 * len(BARS))], colour="soft", dashed=True)
        picture.text(x + width, 26, "1", colour="soft", anchor="middle")
    for row, (label, file, baseline, case) in enumerate(BARS):
        y = 48 + 46 * row
        values = ratio(json.loads((folder / f"{file}.json").read_text())["results"], baseline, case)
        picture.text(16, y + 13, label)
        picture.text(16, y + 28, f"compared with {BASELINES[baseline]}", colour="soft", size=11)
        for x, i in columns.values():
            picture.box(x, y, width, 22, fill="wash", radius=3)
            picture.box(x, y, width * min(values[i], 1.0), 22, fill="ours", radius=3)
            picture.text(x + width + 6, y + 16, f"{values[i]:.2f}x", size=12)
    return picture


def drawn(folder: Path) -> dict[str, str]:
    """Return file name -> SVG of each picture, from the results in a folder."""
    return {
        "memory.svg": str(memory(json.loads((folder / "memory.json").read_text()))),
        "benchmarks.svg": str(bars(folder)),
    }


def main(argv: Sequence[str]) -> int:
    """Write the pictures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plots", description=__doc__)
    parser.add_argument("results", type=Path, help="folder with the results")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, text in drawn(options.results).items():
        (options.out / name).write_text(text, encoding="utf-8")
        print(f"picture: {options.out / name}")
    return 0
