"""Performance targets ("bars") for a GPU, each compared with its measurement: one line per bar, from the raw results.

A verdict counts only together with ``verify.json`` of the same sources and device in which every comparison passes.
Otherwise each line says ``unverified``. A bar whose error against float64 is too large is ``WRONG`` at any speed.

Some bars differ by device, because what a kernel can reach depends on the ratio of bandwidth to arithmetic. They come
from the model of ``docs/develop/measuring.md`` and were set before any measurement. On other devices, such a value is
reported without a verdict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.linear_nll import BARE
from benchmarks.record import card
from benchmarks.shapes import HEADLINE, Shape

Record = dict[str, Any]
Candidates = dict[str, Record]
Find = Callable[..., Candidates]
Measured = Callable[[Candidates, Find], float | None]
BASES = ("ours", BARE)  # candidates that do not compete


@dataclass(frozen=True)
class Bar:
    """A performance target.

    Attributes:
        claim: description.
        results: name of the step with the results.
        case: entries that the case of the records must have; ``subject`` is the subject of the records.
        phase: phase of the measurement.
        measured: function of the candidates of the case, and of a lookup of another case by its differences. It returns
            None if a measurement is missing.
        least: smallest value that meets the bar, or one such value per card (``record.CARDS``).
    """

    claim: str
    results: str
    case: dict[str, object]
    phase: str
    measured: Measured
    least: float | Mapping[str, float]

    def on(self, card: str | None) -> float | None:
        """Return the smallest value that meets the bar on a card; None if the bar does not exist there."""
        return self.least.get(card or "") if isinstance(self.least, Mapping) else self.least


def _median(them: Candidates, name: str) -> float | None:
    timing = them.get(name, {}).get("timing")
    return None if timing is None else float(timing["q50_s"])


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or not denominator else numerator / denominator


def of_floor(them: Candidates, _: Find) -> float | None:
    """Return the minimum time at this run's ceilings, as a share of our time."""
    return _ratio(them.get("ours", {}).get("floor_s"), _median(them, "ours"))


def per_second(them: Candidates, _: Find) -> float | None:
    """Return the calls per second."""
    return _ratio(1.0, _median(them, "ours"))


def than(name: str) -> Measured:
    """Return a candidate's time divided by ours."""
    return lambda them, _: _ratio(_median(them, name), _median(them, "ours"))


def than_the_fastest(them: Candidates, _: Find) -> float | None:
    """Return the time of the fastest other candidate divided by ours."""
    times = [time for name in them if name not in BASES and (time := _median(them, name)) is not None]
    return _ratio(min(times, default=None), _median(them, "ours"))


def than_the_leanest(them: Candidates, _: Find) -> float | None:
    """Return the smallest peak memory of the other candidates divided by ours."""
    peaks = [peak for name in them if name not in BASES and (peak := them[name].get("peak_bytes")) is not None]
    return _ratio(min(peaks, default=None), them.get("ours", {}).get("peak_bytes"))


def than_with(**case: object) -> Measured:
    """Return our time in another case, given by its differences, divided by our time in this case."""
    return lambda them, find: _ratio(_median(find(**case), "ours"), _median(them, "ours"))


def as_predicted(them: Candidates) -> float | None:
    """Return the measured share of a kernel divided by the predicted share."""
    return _ratio(of_floor(them, dict), them["ours"]["extra"].get("predicted_share"))


def bars(size: str) -> list[Bar]:
    """Return every bar at the shapes of this size; only the bars of "full" are meaningful."""
    shapes = HEADLINE[size]

    def of(subject: str, shape: Shape, share: str = "100%", **more: object) -> dict[str, object]:
        return {"subject": subject, "shape": shape.name, "active": share, **more}

    def masks(batch: int) -> dict[str, object]:
        found = {"B": batch, "L": shapes.masks.length, "block": shapes.masks.block_size}
        return {"subject": "corruption", "routine": "blockwise", **found}

    logits, policy = of("token_nll", shapes.logits), of("row_stats", shapes.policy, form="logits")
    size_of_logits = f"NLL from logits [{shapes.logits.rows}, {shapes.logits.vocab}]"
    found = [
        Bar(f"{size_of_logits}, forward, of a copy's speed", "headline", logits, "forward", of_floor, 0.9),
        Bar(f"{size_of_logits}, forward and backward, of a copy's speed", "headline", logits, "both", of_floor, 0.9),
        Bar(f"{size_of_logits}, time of the fastest other over ours", "token_nll", logits, "both", than_the_fastest,
            1.0),
    ]  # fmt: skip
    # The products with D = 2,560 leave less time for the kernel between them.
    of_products: dict[int, float | Mapping[str, float]] = {2560: {"H100": 0.88, "H200": 0.90}}
    for shape in shapes.frozen:
        name = f"frozen head {shape.rows} x {shape.vocab} x {shape.hidden}"
        whole, half = of("linear_nll", shape), of("linear_nll", shape, "50%")
        found += [
            Bar(f"{name}, all active, of its two bare products", "headline", whole, "both", than(BARE),
                of_products.get(shape.hidden, 0.9)),
            Bar(f"{name}, time with all active over half", "headline", half, "both", than_with(active="100%"), 1.8),
            Bar(f"{name}, half active, time of the fastest other over ours", "linear_nll", half, "both",
                than_the_fastest, 1.0),
            Bar(f"{name}, half active, peak memory of the smallest other over ours", "linear_nll", half, "both",
                than_the_leanest, 1.0),
        ]  # fmt: skip
    trained = shapes.trained
    name = f"trained head {trained.rows} x {trained.vocab} x {trained.hidden}"
    batch = f"{shapes.masks.length}, blocks of {shapes.masks.block_size}"
    few, many = shapes.masks.batch, 8 * shapes.masks.batch
    found += [
        Bar(f"{name}, time of quack over ours", "trained_head", of("linear_nll", trained), "both", than("quack"),
            1 / 1.1),
        # The H100's is a published time, 0.89 ms. On an H200 the same share of a copy's speed takes 0.62 ms.
        Bar(f"log p and entropy [{shapes.policy.rows}, {shapes.policy.vocab}], forward, calls per second", "headline",
            policy, "forward", per_second, {"H100": 1 / 0.89e-3, "H200": 1 / 0.62e-3}),
        Bar(f"log p and entropy [{shapes.policy.rows}, {shapes.policy.vocab}], time of the fastest other over ours",
            "row_stats", policy, "both", than_the_fastest, 1.0),
        Bar(f"corruption {few} x {batch}, time of the original over ours", "corruption", masks(few), "forward",
            than("original"), 10.0),
        Bar(f"corruption {many} x {batch}, of a copy's speed", "corruption", masks(many), "forward", of_floor,
            {"H100": 0.35, "H200": 0.35}),
    ]  # fmt: skip
    return found


def _read(path: Path) -> Record:
    found: Record = json.loads(path.read_text()) if path.exists() else {}
    return found


def _gpu(written: Record) -> Record:
    return (written.get("environment") or {}).get("gpu") or {}


def _where(written: Record) -> tuple[object, ...]:
    """Return the values that must agree between a measurement and the verification: package sources and device."""
    gpu = _gpu(written)
    return (written.get("environment") or {}).get("sources"), gpu.get("name"), gpu.get("multiprocessors")


def _cases(written: Record) -> list[tuple[Record, str, Candidates]]:
    """Return (case and subject, phase, candidate -> record) for each case in a file of results."""
    found: dict[str, tuple[Record, str, Candidates]] = {}
    for record in written.get("results", ()):
        case = {**record["case"], "subject": record["subject"]}
        key = json.dumps([case, record["phase"]])
        found.setdefault(key, (case, record["phase"], {}))[2][record["name"]] = record
    return list(found.values())


def _candidates(written: Record, case: dict[str, object], phase: str) -> Candidates:
    for found, its_phase, them in _cases(written):
        if its_phase == phase and case.items() <= found.items():
            return them
    return {}


def _beside(them: Candidates) -> str:
    """Describe the other candidates that ran, and those that raised."""
    others = {name: record.get("extra", {}).get("failed") for name, record in them.items() if name not in BASES}
    ran = ", ".join(name for name, failed in others.items() if failed is None)
    failed = "".join(f"; {name} failed: {reason}" for name, reason in others.items() if reason is not None)
    return f" (beside {ran or 'no other'}{failed})" if others else ""


def _verdict(bar: Bar, written: Record, verified: Record | None) -> str:
    them = _candidates(written, bar.case, bar.phase)
    ours = them.get("ours", {})
    if (failed := ours.get("extra", {}).get("failed")) is not None:
        return f"- FAILED: {bar.claim}: {failed}"
    value = bar.measured(them, lambda **other: _candidates(written, bar.case | other, bar.phase))
    least = bar.on(card(_gpu(written)))
    limit = "no bar for this device" if least is None else f"bar {least:.3g}"
    if value is None:
        return f"- not measured: {bar.claim}, {limit}{_beside(them)}"
    word = "no bar" if least is None else "met" if value >= least else "NOT MET"
    error, allowed = ours.get("error"), ours.get("allowed_error")
    if allowed is not None and not (error is not None and error <= allowed):
        word = f"WRONG (error {error}, allowed {allowed:.2g})"
    elif verified is None or _where(written) != _where(verified):
        word = "unverified"
    return f"- {word}: {bar.claim}: {value:.3g}, {limit}{_beside(them)}"


def _surprise(case: Record, name: str, them: Candidates, verified: bool) -> str:
    ratio = as_predicted(them)
    if ratio is None:
        return f"- not predicted: {case['kernel']} at V {case['V']}"
    word = "unverified" if not verified else "met" if abs(ratio - 1) <= 0.1 else "NOT MET"
    return f"- {word}: {case['kernel']} at V {case['V']}, {name}: {ratio:.2f} of its prediction, bar 0.9 to 1.1"


def _gains(case: Record, them: Candidates, verified: bool) -> list[str]:
    """Return a line for each candidate of ``variants`` whose gain was predicted, or that is faster than ours."""
    lines = []
    what = ", ".join(str(value) for key, value in case.items() if key != "subject")
    for name, found in them.items():
        gain, predicted = _ratio(_median(them, "ours"), _median(them, name)), found["extra"].get("gain")
        if name != "ours" and gain is not None and (predicted is not None or gain > 1):
            word = "unverified" if not verified else "faster" if gain > 1 else "not faster"
            said = "" if predicted is None else f", predicted {predicted:.2f}"
            lines.append(f"- {word}: candidate {name} for {what}: {gain:.2f} times as fast as ours{said}")
    return lines


def _verification(written: Record) -> tuple[Record | None, str]:
    """Return (the verification if it holds, a line that describes it)."""
    wrong = [f"{f['check']}: {f['quantity']}" for f in written.get("findings", ()) if not f["passed"]]
    if wrong:
        return None, f"KERNELS WRONG: {'; '.join(wrong)}\n"
    if not written.get("complete"):
        return None, "KERNELS NOT VERIFIED: the step verify did not come to its end\n"
    return written, f"kernels verified: {len(written['findings'])} comparisons with float64 on all rows\n"


def verdicts(folder: Path, size: str = "full") -> list[str]:
    """Return lines: the verification, missing peers, one per bar, per predicted kernel, and per candidate."""
    verified, line = _verification(_read(folder / "verify.json"))
    missing = {name: why for name, why in _read(folder / "peers.json").get("imports", {}).items() if why is not None}
    lines = [line]
    if missing:
        lines.append("- not imported: " + "; ".join(f"{name} ({why})" for name, why in missing.items()))
    lines += [_verdict(bar, _read(folder / f"{bar.results}.json"), verified) for bar in bars(size)]
    predicted, variants = (_read(folder / f"{name}.json") for name in ("predicted", "variants"))
    here = None if verified is None else _where(verified)
    lines += [_surprise(*found, here == _where(predicted)) for found in _cases(predicted)]
    return lines + [line for case, _, them in _cases(variants) for line in _gains(case, them, here == _where(variants))]
