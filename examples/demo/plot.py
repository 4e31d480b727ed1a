"""Figure of the demo: loss curves of both runs and their difference, memory, time, and draft accuracy if available."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REFERENCE, OURS, GREY = "#c4581b", "#1f5fa8", "#777777"
COLOURS = {"reference": REFERENCE, "ours": OURS}


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the last ``window`` values at each position (fewer at the start)."""
    means = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def _curves(axes: Any, curves: Mapping[str, Any], guess: float) -> None:
    steps = range(1, len(curves["reference"]["train"]) + 1)
    window = max(len(steps) // 20, 1)
    for name, width, style in (("reference", 4.0, "-"), ("ours", 1.4, "-")):
        train, colour = curves[name]["train"], COLOURS[name]
        axes.plot(steps, train, color=colour, alpha=0.18, linewidth=0.8)
        alpha = 0.45 if name == "reference" else 1.0
        axes.plot(
            steps,
            smoothed(train, window),
            style,
            color=colour,
            alpha=alpha,
            linewidth=width,
            label=f"{name}, training",
        )
    for name, marker, size in (("reference", "o", 9), ("ours", "x", 6)):
        face = "none" if marker == "o" else COLOURS[name]
        axes.plot(
            curves["eval_steps"], curves[name]["heldout"], marker, color=COLOURS[name],
            markersize=size, markerfacecolor=face, markeredgewidth=1.6, label=f"{name}, held-out",
        )  # fmt: skip
    axes.axhline(guess, color=GREY, linestyle="--", linewidth=1, label="token frequencies alone")
    values = [*smoothed(curves["ours"]["train"], window), *curves["ours"]["heldout"], guess]
    margin = 0.06 * (max(values) - min(values))
    axes.set(xlabel="step", ylabel="loss (nats)", ylim=(min(values) - margin, max(values) + margin))
    axes.legend(frameon=False)


def _difference(axes: Any, curves: Mapping[str, Any]) -> None:
    pairs = zip(curves["ours"]["train"], curves["reference"]["train"], strict=True)
    relative = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
    floor = 1e-9
    steps = range(1, len(relative) + 1)
    axes.semilogy(steps, [max(r, floor) for r in relative], ".", color=OURS, markersize=3)
    axes.axhline(2**-23, color=GREY, linestyle="--", linewidth=1, label="one float32 rounding step")
    axes.set(xlabel="step", ylabel="difference / loss", ylim=(floor / 2, max(*relative, 1e-6) * 3))
    ticks = [10.0**power for power in range(-8, 1) if 10.0**power <= axes.get_ylim()[1]]
    axes.set_yticks([floor, *ticks], ["equal", *(f"{tick:.0e}" for tick in ticks)], minor=False)
    axes.minorticks_off()
    axes.legend(frameon=False)


def _accuracy(axes: Any, curves: Mapping[str, Any]) -> None:
    import matplotlib as mpl

    found = curves["ours"]["accuracy"]
    offsets = len(found[0])
    colours = mpl.colormaps["viridis"]
    for offset in range(offsets):
        line = [100 * accuracies[offset] for accuracies in found]
        colour = colours(0.9 * offset / max(offsets - 1, 1))
        axes.plot(curves["eval_steps"], line, color=colour, marker=".", label=f"k = {offset + 1}")
    axes.set(xlabel="step", ylabel="held-out draft accuracy (%)", ylim=(0, None))
    axes.legend(frameon=False, title="offset in the block", ncols=2)


def _accepted(axes: Any, curves: Mapping[str, Any]) -> None:
    """Plot the accepted tokens: solid lines for sampling, dashed lines for greedy decoding."""
    import matplotlib as mpl

    colours = mpl.colormaps["viridis"]
    for place, (name, values) in enumerate(curves["accepted"].items()):
        for way, style in enumerate(("-", "--")):
            line = [gained[way] for gained in values]
            label = None if way else name
            axes.plot(curves["eval_steps"], line, style, color=colours(0.4 * place), marker=".", label=label)
    most = max(tokens for values in curves["accepted"].values() for gained in values for tokens in gained)
    axes.set(xlabel="step", ylabel="held-out tokens a check", ylim=(1, 1 + 1.5 * max(most - 1, 0.1)))
    axes.legend(frameon=False, loc="upper left", ncols=3, title="solid: by sampling, dashed: greedy")


def _memory(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    largest = max(row["peak_bytes"] for row in rows)
    unit, divisor = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    for row in rows:
        size = row["peak_bytes"] / divisor
        axes.barh(row["loss"], size, color=COLOURS[row["loss"]], height=0.62)
        _beside(axes, row["loss"], size, f"{size:.3g} {unit}")
    _titled(axes, f"peak memory of a step: {_ratio(rows, 'peak_bytes')}")
    axes.set(xlim=(0, 1.4 * largest / divisor))


def _time(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        whole, loss = (1000 * row[key] for key in ("step_seconds", "loss_seconds"))
        axes.barh(row["loss"], loss, color=COLOURS[row["loss"]], height=0.62)
        axes.barh(row["loss"], whole - loss, left=loss, color=COLOURS[row["loss"]], alpha=0.3, height=0.62)
        digits = 0 if whole >= 100 else 1
        _beside(axes, row["loss"], whole, f"{loss:.{digits}f} of {whole:.{digits}f} ms")
    _titled(axes, f"time of a step: {_ratio(rows, 'step_seconds')} (dark, the loss: {_ratio(rows, 'loss_seconds')})")
    axes.set(xlim=(0, 1.75 * max(1000 * row["step_seconds"] for row in rows)))


def _beside(axes: Any, bar: str, end: float, text: str) -> None:
    axes.annotate(text, (end, bar), xytext=(5, 0), textcoords="offset points", va="center")


def _ratio(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    """Format the ratio of ours to the reference."""
    plain, ours = (row[key] for row in rows)
    return f"{ours / plain:.2f}x"


def _titled(axes: Any, title: str) -> None:
    """Draw bars from the top in the order of the rows, labelled with their values instead of an axis."""
    axes.set_title(title, loc="left")
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.spines["bottom"].set_visible(False)


def draw(path: Path, title: str, curves: Mapping[str, Any], guess: float, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the figure as a PNG that is readable at page width.

    Args:
        path: output path.
        title: title of the figure.
        curves: ``eval_steps``, and for "reference" and "ours" a dict of ``train`` (one loss per step),
            ``heldout`` and ``accuracy`` (one per evaluation; accuracies by offset, or empty). ``accepted`` maps each
            training objective to the tokens gained per check at each evaluation, by sampling and greedily.
        guess: held-out loss of the unigram baseline.
        rows: table rows of the reference and of ours, with ``loss`` (the name), ``peak_bytes``, ``step_seconds`` and
            ``loss_seconds``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    last = "accepted" if curves["accepted"] else "accuracy" if curves["ours"]["accuracy"] else "time"
    layout: list[Any] = [["loss", "memory"], ["loss", "time"], ["difference", last]]
    with pyplot.rc_context({"font.size": 11, "axes.titlesize": 11, "legend.fontsize": 9.5}):
        figure, panels = pyplot.subplot_mosaic(
            layout, figsize=(10.4, 6.6), width_ratios=[1.5, 1], height_ratios=[1.1, 1, 1.1], layout="constrained"
        )
        for panel in panels.values():
            panel.spines[["top", "right"]].set_visible(False)
        for name in ("loss", "difference", "accuracy", "accepted"):
            if name in panels:
                panels[name].grid(alpha=0.25)
        _curves(panels["loss"], curves, guess)
        _difference(panels["difference"], curves)
        _memory(panels["memory"], rows)
        _time(panels["time"], rows)
        if "accuracy" in panels:
            _accuracy(panels["accuracy"], curves)
        if "accepted" in panels:
            _accepted(panels["accepted"], curves)
        figure.suptitle(f"{title}: two trainings from one seed, the plain loss and ours", fontsize=12)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)
