"""The demo's picture: both loss curves, their difference, and draft accuracy where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REFERENCE, OURS, GREY = "#c4581b", "#1f5fa8", "#777777"
COLOURS = {"reference": REFERENCE, "ours": OURS}


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last ``window`` values at each place (of fewer at the start)."""
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
    axes.axhline(guess, color=GREY, linestyle="--", linewidth=1, label="token frequencies alone, held-out")
    values = [*smoothed(curves["ours"]["train"], window), *curves["ours"]["heldout"], guess]
    margin = 0.06 * (max(values) - min(values))
    axes.set(xlabel="step", ylabel="loss (nats)", ylim=(min(values) - margin, max(values) + margin))
    axes.legend(frameon=False, fontsize=8)


def _difference(axes: Any, curves: Mapping[str, Any]) -> None:
    pairs = zip(curves["ours"]["train"], curves["reference"]["train"], strict=True)
    relative = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
    floor = 1e-9
    steps = range(1, len(relative) + 1)
    axes.semilogy(steps, [max(r, floor) for r in relative], ".", color=OURS, markersize=3)
    axes.axhline(2**-23, color=GREY, linestyle="--", linewidth=1, label="one float32 rounding step")
    axes.set(xlabel="step", ylabel="|ours - reference| / reference", ylim=(floor / 2, max(*relative, 1e-6) * 3))
    ticks = [10.0**power for power in range(-8, 1) if 10.0**power <= axes.get_ylim()[1]]
    axes.set_yticks([floor, *ticks], ["equal", *(f"{tick:.0e}" for tick in ticks)], minor=False)
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)


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
    axes.legend(frameon=False, fontsize=8, title="offset in the block", ncols=2)


def draw(path: Path, title: str, curves: Mapping[str, Any], guess: float) -> None:
    """Write the PNG.

    Args:
        path: where to.
        title: above the picture.
        curves: ``eval_steps``, and for "reference" and "ours" a dict of ``train`` (one loss a step),
            ``heldout`` and ``accuracy`` (one per evaluation; accuracies by offset, or empty).
        guess: the held-out loss of someone who knows the tokens' frequencies alone.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    has_accuracy = bool(curves["ours"]["accuracy"])
    panels = 3 if has_accuracy else 2
    ratios = [1.6, 1, 1][:panels]
    figure, axes = pyplot.subplots(1, panels, figsize=(5.2 * panels, 4.4), width_ratios=ratios, layout="constrained")
    _curves(axes[0], curves, guess)
    _difference(axes[1], curves)
    if has_accuracy:
        _accuracy(axes[2], curves)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
