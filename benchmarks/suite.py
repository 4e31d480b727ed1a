"""``python -m benchmarks all``: every subject, sweeps over rows, vocabulary and active share, tables and pictures.

Each subject runs in a separate process, so a failure or lack of memory affects only this subject. It writes its raw
results as JSON and its table as Markdown to the folder. The pictures are drawn from the JSON of the sweeps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import linear_nll, measure, peers, record, shapes, token_nll
from benchmarks.shapes import Shape

Record = dict[str, Any]
STEMS = (
    "token_nll", "linear_nll", "fused_head", "gathered", "row_stats", "linear_sample", "head_options", "policy",
    "divergence", "losses", "corruption", "collate",
)  # fmt: skip
SHARES = (1.0, 0.5, 0.15)
#: Candidates that compute less than the loss: lower bounds, not implementations.
BOUNDS = (linear_nll.BARE, "products", "product")
#: The base case of the sweeps, by size: large enough to fill the device, small enough for the plain code.
CENTRES = {
    "toy": Shape("sweep", 1, 64, 257, 32, block_size=16, chunk=16),
    "small": Shape("sweep", 1, 1024, 32_000, 256, block_size=16, chunk=256),
    "full": Shape("sweep", 1, 16_384, 128_256, 4096, block_size=16, chunk=None),
}


def subject_commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command line of each subject: the shared options, and the options of the subject."""
    shared = ["--size", options.size, "--device", options.device, "--backend", options.backend]
    shared += ["--dtype", str(options.dtype).removeprefix("torch."), "--samples", str(options.samples)]
    shared += ["--warmup", str(options.warmup), "--cache", options.cache, "--seed", str(options.seed)]
    if options.threads:
        shared += ["--threads", str(options.threads)]
    own = (
        {stem: ["--compiled"] for stem in ("token_nll", "linear_nll", "gathered", "row_stats", "divergence", "losses")}
        if options.compiled
        else {}
    )
    return {stem: [stem, *shared, *own.get(stem, [])] for stem in STEMS}


def run_subject(command: Sequence[str], folder: Path) -> bool:
    """Run one subject; its output is shown and goes to ``folder/NAME.md``, its raw results to ``folder/NAME.json``.

    Each case is shown and written as soon as it is measured, so that an interrupted run keeps it.
    """
    name = command[0]
    words = [sys.executable, "-m", "benchmarks", *command, "--live", "--out", str(folder / f"{name}.json")]
    start = time.perf_counter()
    print(f"=== {name}", flush=True)
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as run,
        Path(folder, f"{name}.md").open("w", encoding="utf-8") as file,
    ):
        file.write(f"# {name}\n")
        assert run.stdout is not None
        for line in run.stdout:
            file.write(line)
            file.flush()
            print(line, end="", flush=True)
    state = "done" if run.returncode == 0 else f"FAILED with status {run.returncode}"
    print(f"{name}: {state} in {time.perf_counter() - start:.0f} s", flush=True)
    return run.returncode == 0


def sweep_cases(size: str) -> dict[str, list[tuple[Shape, tuple[float, ...]]]]:
    """Return name of the sweep -> its shapes, each with its active shares."""
    centre = CENTRES[size]
    return {
        "rows": [(replace(centre, name=f"{N} rows", length=N), (0.5,)) for N in shapes.ROWS[size]],
        "vocabulary": [(replace(centre, name=f"V {V}", vocab=V), (0.5,)) for V in shapes.VOCABULARIES[size]],
        "active share": [(centre, SHARES)],
    }


def sweep(options: argparse.Namespace, folder: Path) -> list[Record]:
    """Run the sweeps of the two primitives, the linear one with a frozen and with a trainable head."""
    options.compiled, options.input_sets, options.phase = False, 1, None
    options.weighted, options.recipe_chunk, options.dense_limit, options.alone = False, False, 24e9, False
    found: list[Record] = []
    for name, cases in sweep_cases(options.size).items():
        for shape, shares in cases:
            runs = {
                "token_nll": token_nll.run(options, (shape,), shares)[0],
                "linear_nll frozen": linear_nll.run(options, (replace(shape, frozen=True),), shares)[0],
                "linear_nll trainable": linear_nll.run(options, (shape,), shares)[0],
            }
            for subject, results in runs.items():
                found += [{**result.to_json(), "sweep": name, "subject": subject} for result in results]
    record.write_json(folder / "sweeps.json", [], options, sweeps=found)
    return found


def _x(entry: Record) -> float:
    """Return the position of the entry on the axis of its sweep."""
    key = {"rows": "rows", "vocabulary": "V", "active share": "active"}[entry["sweep"]]
    value = str(entry["case"][key])
    return float(value.rstrip("%"))


def lines(entries: Iterable[Record], value: Callable[[Record], float | None]) -> dict[str, list[tuple[float, float]]]:
    """Return candidate -> its points, sorted along the axis; entries without the value are omitted."""
    found: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        y = value(entry)
        if y:
            found.setdefault(entry["name"], []).append((_x(entry), y))
    return {name: sorted(points) for name, points in found.items()}


def _milliseconds(entry: Record) -> float | None:
    return None if entry["timing"] is None else 1e3 * float(entry["timing"]["q50_s"])


def _mebibytes(entry: Record) -> float | None:
    return None if entry["peak_bytes"] is None else float(entry["peak_bytes"]) / (1 << 20)


def _panel(axes: Any, entries: Sequence[Record], value: Callable[[Record], float | None], label: str) -> None:
    for name, points in lines(entries, value).items():
        ours = name == "ours"
        axes.plot(
            *zip(*points, strict=True), marker="o", linewidth=2.4 if ours else 1.2, label=name, zorder=3 if ours else 2
        )
    name = entries[0]["sweep"]
    axes.set(xlabel={"active share": "active rows (%)"}.get(name, name), ylabel=label, yscale="log")
    if name != "active share":
        axes.set_xscale("log", base=2)
    ticks = sorted({_x(entry) for entry in entries})
    axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw(entries: Sequence[Record], title: str, path: Path) -> None:
    """Draw time and peak memory of forward plus backward along every sweep of one subject."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sweeps = list(dict.fromkeys(entry["sweep"] for entry in entries))
    figure, axes = pyplot.subplots(2, len(sweeps), figsize=(4.6 * len(sweeps), 7), layout="constrained", squeeze=False)
    for column, name in enumerate(sweeps):
        chosen = [entry for entry in entries if entry["sweep"] == name]
        _panel(axes[0][column], chosen, _milliseconds, "time (ms)")
        _panel(axes[1][column], chosen, _mebibytes, "peak memory (MiB)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_all(entries: Sequence[Record], device: str, folder: Path) -> list[Path]:
    """Draw one picture for each subject of the sweeps."""
    pictures = []
    for subject in dict.fromkeys(entry["subject"] for entry in entries):
        chosen = [entry for entry in entries if entry["subject"] == subject and entry["phase"] == "both"]
        path = folder / f"{subject.replace(' ', '_')}.png"
        draw(chosen, f"{subject}, forward + backward, {device}", path)
        pictures.append(path)
    return pictures


def compared(records: Mapping[str, Record]) -> dict[str, dict[str, float]]:
    """Return case -> median of each candidate in it, for the cases in which ours and another candidate were timed."""
    found: dict[str, dict[str, float]] = {}
    for subject, written in records.items():
        for entry in written["results"]:
            if entry["timing"] is not None and entry["name"] not in BOUNDS:
                case = f"{subject} {json.dumps([entry['case'], entry['phase'], entry['cache']])}"
                found.setdefault(case, {})[entry["name"]] = entry["timing"]["q50_s"]
    return {case: medians for case, medians in found.items() if "ours" in medians and len(medians) > 1}


def lost_cases(medians_of: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Describe every compared case in which the median of another candidate was below ours."""
    found = []
    for case, medians in medians_of.items():
        name = min(medians, key=lambda who: medians[who])
        if medians[name] < medians["ours"]:
            found.append(f"{case}: {name} takes {medians[name] / medians['ours']:.2f} of our time")
    return found


def verdict(medians_of: Mapping[str, Mapping[str, float]], folder: Path) -> str:
    """Write the lost cases to ``lost.md`` and summarise; without a compared case, say that nothing was compared."""
    if not medians_of:
        return "nothing was compared: no case has a time of ours and of another candidate"
    lost = lost_cases(medians_of)
    (folder / "lost.md").write_text("".join(f"- {line}\n" for line in lost), encoding="utf-8")
    return f"another candidate was faster in {len(lost)} of {len(medians_of)} cases: {folder / 'lost.md'}"


def main(argv: list[str]) -> int:
    """Run everything into one folder; 1 if a subject failed."""
    parser = measure.arguments("all", __doc__)
    parser.add_argument("--compiled", action="store_true", help="also torch.compile of the plain code (slow to start)")
    parser.add_argument("--subject", action="append", choices=STEMS, help="default: all")
    parser.add_argument("--no-sweeps", action="store_true", help="omit the sweeps and pictures")
    options = measure.parse(parser, argv)
    device = record.device_name(options.device)
    options.out = options.out or Path("benchmarks/results") / device.lower().replace(" ", "-")
    options.out.mkdir(parents=True, exist_ok=True)
    commands = {name: words for name, words in subject_commands(options).items() if name in (options.subject or STEMS)}
    print(
        f"subjects on {device}: {', '.join(commands)}; each prints its cases when they are measured, and its duration"
    )
    print("\n".join(peers.listed()), flush=True)
    start, failed = time.time(), []
    for number, (name, command) in enumerate(commands.items(), start=1):
        print(f"[{number}/{len(commands)}] ", end="")
        if not run_subject(command, options.out):
            failed.append(name)
    paths = {name: options.out / f"{name}.json" for name in commands}
    written = {
        name: json.loads(path.read_text())
        for name, path in paths.items()
        if path.exists() and path.stat().st_mtime >= start  # not the result of an earlier run
    }
    print(verdict(compared(written), options.out), flush=True)
    if not options.no_sweeps:
        torch.manual_seed(options.seed)
        for path in draw_all(sweep(options, options.out), device, options.out):
            print(f"picture: {path}")
    print(f"results: {options.out}" + (f"   FAILED: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))
