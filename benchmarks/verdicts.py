"""The bars that a GPU has to meet, each beside what was measured: one line a bar, from the raw results of the subjects."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """What is claimed.

    Attributes:
        claim: in words.
        results: the file that decides it.
        case: what its case must hold, besides the phase.
        phase: of the measurement.
        measured: from the records of that case, by candidate; None where one is missing.
        least: the bar.
    """

    claim: str
    results: str
    case: dict[str, object]
    phase: str
    measured: Callable[[dict[str, Record]], float | None]
    least: float


def _median(them: dict[str, Record], name: str) -> float | None:
    timing = them.get(name, {}).get("timing")
    return None if timing is None else float(timing["q50_s"])


def of_floor(them: dict[str, Record]) -> float | None:
    """The least time at this run's ceilings, as a share of ours."""
    ours = _median(them, "ours")
    return None if ours is None else float(them["ours"]["floor_s"]) / ours


def than(name: str) -> Callable[[dict[str, Record]], float | None]:
    """How many times as long a candidate takes."""

    def ratio(them: dict[str, Record]) -> float | None:
        ours, other = _median(them, "ours"), _median(them, name)
        return None if ours is None or other is None else other / ours

    return ratio


def than_the_fastest(them: dict[str, Record]) -> float | None:
    """How many times as long the fastest of the others takes."""
    found = [ratio for name in them if name not in ("ours", "bare products") and (ratio := than(name)(them))]
    return min(found, default=None)


def as_predicted(them: dict[str, Record]) -> float | None:
    """The measured share of a kernel beside the predicted one."""
    predicted, share = them["ours"]["extra"].get("predicted_share"), of_floor(them)
    return None if predicted is None or share is None else share / predicted


_LLADA: dict[str, object] = {"shape": "LLaDA SFT 4x1024", "active": "100%"}
_DFLASH: dict[str, object] = {"shape": "DFlash Qwen3-4B", "active": "50%"}
_BATCH: dict[str, object] = {"routine": "blockwise", "B": 64, "L": 4096, "block": 32}
BARS = (
    Bar("token NLL [4096, 126464] bf16, forward, of a copy's speed", "token_nll", _LLADA, "forward", of_floor, 0.9),
    Bar("token NLL [4096, 126464] bf16, forward and backward, of a copy's speed", "token_nll", _LLADA, "both", of_floor, 0.9),
    Bar("the same, time of the fastest other over ours", "token_nll", _LLADA, "both", than_the_fastest, 1.0),
    Bar("DFlash 7,680 x 151,936 x 2,560, frozen, half active, of its two bare products", "linear_nll", _DFLASH, "both",
        than("bare products"), 0.85),
    Bar("the same, time of the fastest other over ours", "linear_nll", _DFLASH, "both", than_the_fastest, 1.0),
    Bar("corruption 64 x 4096, blocks of 32, time of the original over ours", "corruption", _BATCH, "forward",
        than("original"), 10.0),
    Bar("corruption 512 x 4096, blocks of 32, of a copy's speed", "corruption", _BATCH | {"B": 512}, "forward", of_floor, 0.5),
    Bar("log p and entropy over [8192, 151936] bf16, of a copy's speed", "row_stats",
        {"shape": "policy 1x8192", "form": "logits", "active": "100%"}, "forward", of_floor, 0.9),
)  # fmt: skip


def _cases(results: Path) -> list[tuple[Record, str, dict[str, Record]]]:
    """(case, phase, candidate -> record) of a file of results; nothing where there is none."""
    if not results.exists():
        return []
    found: dict[str, tuple[Record, str, dict[str, Record]]] = {}
    for record in json.loads(results.read_text())["results"]:
        key = json.dumps([record["case"], record["phase"]])
        found.setdefault(key, (record["case"], record["phase"], {}))[2][record["name"]] = record
    return list(found.values())


def _verdict(bar: Bar, folder: Path) -> str:
    for case, phase, them in _cases(folder / f"{bar.results}.json"):
        if phase == bar.phase and bar.case.items() <= case.items() and (value := bar.measured(them)) is not None:
            return f"- {'met' if value >= bar.least else 'NOT MET'}: {bar.claim}: {value:.3g}, bar {bar.least:g}"
    return f"- not measured: {bar.claim}, bar {bar.least:g}"


def _surprise(case: Record, name: str, them: dict[str, Record]) -> str:
    ratio = as_predicted(them)
    if ratio is None:
        return f"- not predicted: {case['kernel']} at V {case['V']}"
    word = "met" if abs(ratio - 1) <= 0.1 else "NOT MET"
    return f"- {word}: {case['kernel']} at V {case['V']}, {name}: {ratio:.2f} of its prediction, bar 0.9 to 1.1"


def verdicts(folder: Path) -> list[str]:
    """A line for each bar, for each kernel that the model speaks of."""
    lines = [_verdict(bar, folder) for bar in BARS]
    return lines + [_surprise(*found) for found in _cases(folder / "predicted.json")]
