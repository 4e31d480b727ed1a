"""The collator compared with the original and the plain one, on samples of Python lists as a dataset yields them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from benchmarks import peers
from benchmarks.measure import Result, arguments, compare, parse
from benchmarks.record import report
from dllm_kernels.collate import DLLMCollator
from reference import collate

Batch = list[dict[str, list[int]]]
# (samples, tokens of the longest, max_seq_len): a training batch, a small batch, documents far above max_seq_len
USUAL = ((32, 4096, 4096), (8, 1024, 1024), (8, 32768, 4096))
SIZES = {"toy": ((2, 32, 32), (2, 32, 16)), "small": USUAL, "full": USUAL}


def make_batch(samples: int, longest: int, seed: int) -> Batch:
    """Build ``samples`` samples of a quarter to all of ``longest`` tokens, with the second half of each supervised."""
    draw = random.Random(seed)
    batch = []
    for _ in range(samples):
        n = draw.randint(max(1, longest // 4), longest)
        ids = [draw.randrange(150_000) for _ in range(n)]
        batch.append({"input_ids": ids, "loss_mask": [int(i >= n // 2) for i in range(n)], "attention_mask": [1] * n})
    return batch


def collators(options: dict[str, Any]) -> dict[str, Callable[[Batch], Any]]:
    """Return ours and the other collators, by name."""
    found: dict[str, Callable[[Batch], Any]] = {
        "ours": DLLMCollator(**options),
        "plain": lambda batch: collate(batch, **options),
    }
    if (peer := peers.module("nemo_automodel.components.datasets.dllm.collate")) is not None:
        found["original"] = peer.DLLMCollator(**options)
    return found


def main(argv: list[str]) -> int:
    """Print the table and write the JSON."""
    options = parse(arguments("collate", __doc__), argv)
    results: list[Result] = []
    base = "plain"
    for samples, longest, max_seq_len in SIZES[options.size]:
        batch = make_batch(samples, longest, options.seed)
        for response_window in (False, True):
            settings = {
                "eos_token_id": 1, "block_size": 32, "pad_seq_len_divisible": 128, "max_seq_len": max_seq_len,
                "response_window": response_window,
            }  # fmt: skip
            found = collators(settings)
            base = peers.baseline(found)
            case = {"samples": samples, "up to": longest, "cut to": max_seq_len, "response window": response_window}
            timed = {name: (lambda _, f=f, batch=batch: f(batch)) for name, f in found.items()}
            results += compare("collate", case, "collate", timed, options)
    return report(results, options, baseline=base)
