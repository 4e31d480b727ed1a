"""Ours alone at the shapes of the verdicts, with the speed of a copy and the bare products of the same shapes.

These are the most important figures, without peers: NLL from logits, log-probabilities with entropy, and NLL from
hidden states. The latter runs through frozen heads (all rows active, then half of them) and through a trained head.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import linear_nll, measure, row_stats, token_nll
from benchmarks.record import report
from benchmarks.shapes import HEADLINE

SHARES = (1.0, 0.5)  # fraction of active rows with a frozen head


def main(argv: Sequence[str]) -> int:
    """Print the table and write the JSON."""
    options = measure.parse(measure.arguments("headline", __doc__), argv)
    options.alone, options.compiled, options.input_sets, options.share = True, False, 1, [1.0]
    options.weighted, options.recipe_chunk, options.dense_limit = False, False, 0.0
    shapes = HEADLINE[options.size]
    options.phase = ["forward", "both"]
    results, measured, _ = token_nll.run(options, (shapes.logits,), (1.0,))
    results += row_stats.run(options, "logits", (shapes.policy,), measured)
    options.phase = ["both"]
    for frozen in shapes.frozen:
        results += linear_nll.run(options, (frozen,), SHARES)[0]
    results += linear_nll.run(options, (shapes.trained,), (1.0,))[0]
    return report(results, options, measured_ceilings=measured)
