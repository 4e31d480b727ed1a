"""Compare the row kernels on a GPU with the predictions of the static roofline.

Each kernel runs with the tile of its rule, all rows active, in bf16, at the vocabularies of LLaDA, Qwen3 and Gemma. The
divergence runs with two passes and with three. The measured share of this run's copy bandwidth is printed next to the
share that the machine code predicts for this GPU. The predictions are read from ``--model FILE``, which can be computed
without a GPU:

    python -m benchmarks inspect --target sm_90 --kernel '[bf16' --out FILE

On a CPU only ``--size toy`` runs, under Triton's interpreter. A prediction then has no meaning.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from benchmarks import tune
from benchmarks.measure import Result, arguments, ceilings, compare, parse
from benchmarks.record import card, environment, markdown, report
from benchmarks.shapes import GEMMA_BATCH, LLADA_SHORT, POLICY, TOY_ROWS
from tools.gpus import GPUS

KERNELS = {"token_nll_fwd": "token_nll_fwd_split"}  # kernel of a rule; other kernels have the name of their rule
# Suffixes with which ``inspect`` distinguishes the launches of ``tune``.
WORDS = {"argmax-match": ", correct", "kl": ", grad, fast", "l1": ", grad, fast, tv=i64"}


def shares(model: Path | None, gpu: str | None) -> dict[str, float]:
    """Return kernel -> predicted share of copy bandwidth, the lowest of all passes and phases.

    {} without a model, and on a GPU for which none exists.
    """
    if gpu is None or model is None or not model.is_file():
        return {}
    reports = json.loads(model.read_text())
    of_this = (r for r in reports if r["passes"] and r["target"] == GPUS[gpu].target)
    return {
        r["kernel"]: min([p["roofs"][gpu]["share"] for p in r["passes"]] + list(r["phases"].get(gpu, {}).values())[:1])
        for r in of_this
    }


def kernel_of(name: str, rule: str) -> str:
    """Return the name that ``inspect`` gives to the kernel of a launch of ``tune.launches`` in bf16."""
    return f"{KERNELS.get(rule, rule)}[bf16{WORDS.get(name.partition(', ')[2], '')}]"


def _call(launch: tune.Launch, _: int) -> object:
    return launch.call()


def main(argv: list[str]) -> int:
    """Print measured and predicted shares and write the JSON."""
    parser = arguments("predicted", __doc__)
    parser.add_argument("--model", type=Path, help="output file of inspect (default: no predictions)")
    options = parse(parser, argv)
    on_cpu = torch.device(options.device).type == "cpu"
    if on_cpu and options.size != "toy":
        print("a GPU is required; --size toy runs on a CPU as a test", file=sys.stderr)
        return 2
    if on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        again = [sys.executable, "-m", "benchmarks", "predicted", *argv]
        return subprocess.run(again, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
    gpu, measured = card(environment(options.device)["gpu"]), ceilings(options.device, torch.bfloat16, options.size)
    model, results, rows = shares(options.model, gpu), list[Result](), []
    for shape in (TOY_ROWS,) if options.size == "toy" else (LLADA_SHORT, POLICY, GEMMA_BATCH):
        for name, launch in tune.launches(shape, torch.bfloat16, options.device).items():
            kernel = kernel_of(name, launch.rule)
            floor = launch.nbytes / measured["copy_bytes_per_s"]
            case, timed = {"kernel": kernel, "shape": shape.name, "V": shape.vocab}, {"ours": partial(_call, launch)}
            (result,) = compare("predicted", case, name, timed, options, floor_s=floor, memory=False)
            result.extra |= {"gpu": gpu, "predicted_share": model.get(kernel)}
            results.append(result)
            if result.timing is not None:
                said = f"{model[kernel]:.0%}" if kernel in model else "-"
                share = f"{floor / result.timing.median:.1%}"
                rows.append({"kernel": kernel, "V": shape.vocab, "measured": share, "predicted": said})
    status = report(results, options, baseline="ours", measured_ceilings=measured)
    print(f"\nShares of the copy bandwidth, predicted for {gpu or 'no GPU, because this one has no model'}:\n")
    print(markdown(rows))
    return status
