"""Result of measuring one candidate."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

QUANTILES = (0.2, 0.5, 0.8)
OUT_OF_MEMORY = "out of memory"
#: Candidates that are not code of this project. A benchmark succeeds even if one of them fails.
PEERS = frozenset(
    {
        "original", "compiled", "gather, compiled", "torch chunked", "liger", "liger, SM90", "liger, SM90 sum",
        "liger, GRPO loss", "cut-cross-entropy", "quack", "speculators, eager", "speculators, fused", "trl", "verl",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """Samples of one candidate in seconds, in the order of measurement, and on a GPU the host time of a call."""

    samples: tuple[float, ...]
    host: float | None = None

    def quantile(self, q: float) -> float:
        """Return the q-quantile, linearly interpolated between order statistics."""
        ordered = sorted(self.samples)
        place = q * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    @property
    def median(self) -> float:
        """The 50 % quantile, in seconds."""
        return self.quantile(0.5)


@dataclass
class Result:
    """One line of a table: one candidate on one case in one phase.

    Attributes:
        subject: name of the benchmark.
        case: description of the case: sizes, dtype, active share, ...
        phase: "forward", "backward", "both", or another phase of the subject.
        name: the candidate.
        cache: "hot" or "cold".
        timing: the samples; None if only memory or error was measured.
        peak_bytes: peak of allocated bytes above those held before the call.
        error: distance from float64, see ``relative_error``.
        allowed_error: the largest ``error`` that counts as correct.
        floor_s: lower bound of the time at this run's ceilings.
        floor_bytes: lower bound of the extra memory.
        extra: further values of the subject; ``failed`` is the reason if the candidate has no timing.
    """

    subject: str
    case: dict[str, Any]
    phase: str
    name: str
    cache: str = "cold"
    timing: Timing | None = None
    peak_bytes: int | None = None
    error: float | None = None
    allowed_error: float | None = None
    floor_s: float | None = None
    floor_bytes: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values, with the quantiles beside the samples."""
        record = asdict(self)
        timing = self.timing
        record["timing"] = None if timing is None else {f"q{int(100 * q)}_s": timing.quantile(q) for q in QUANTILES}
        record["samples_s"] = None if timing is None else list(timing.samples)
        record["host_s"] = None if timing is None else timing.host
        return record
