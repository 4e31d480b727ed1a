"""The row kernels on a GPU beside what the static roofline says of them: does the model order them as the machine does?

Each kernel runs with the tile that its rule picks, all rows active, in bf16. Beside its share of this run's copy bandwidth
stands the share that ``python -m benchmarks inspect`` predicts from its machine code for the GPU of that name. On a CPU only
``--size toy`` runs, under Triton's interpreter, without a prediction's meaning.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial

import torch

from benchmarks import tune
from benchmarks.gpus import GPUS
from benchmarks.measure import Result, arguments, ceilings, compare, parse
from benchmarks.record import markdown, report
from benchmarks.shapes import LLADA_SHORT, TOY_ROWS

KERNELS = {"token_nll_fwd": "token_nll_fwd_split"}  # of a rule; the others are called like theirs


def gpu_of(device: str) -> str:
    """The GPU of ``benchmarks.gpus`` that this is; H200 for one that is not among them."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""
    return next((known for known in GPUS if known in name), "H200")


def shares(gpu: str) -> dict[str, float]:
    """Kernel -> predicted share of the copy bandwidth, the lowest of its passes; compiled in a process of its own."""
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = (
        sys.executable,
        "-m",
        "benchmarks",
        "inspect",
        "--target",
        GPUS[gpu].target,
        "--kernel",
        "[bf16",
        "--json",
    )
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
    return {
        r["kernel"]: min(p["roofs"][gpu]["share"] for p in r["passes"]) for r in json.loads(done.stdout) if r["passes"]
    }


def _call(launch: tune.Launch, _: int) -> object:
    return launch.call()


def main(argv: list[str]) -> int:
    """Print measured and predicted shares and write the JSON."""
    options = parse(arguments("predicted", __doc__), argv)
    on_cpu = torch.device(options.device).type == "cpu"
    if on_cpu and options.size != "toy":
        print("this needs a GPU; --size toy shows that it runs", file=sys.stderr)
        return 2
    if on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        again = [sys.executable, "-m", "benchmarks", "predicted", *argv]
        return subprocess.run(again, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
    gpu, measured = gpu_of(options.device), ceilings(options.device, torch.bfloat16, options.size)
    model, results, rows = shares(gpu), list[Result](), []
    shape = TOY_ROWS if options.size == "toy" else LLADA_SHORT
    for name, launch in tune.launches(shape, torch.bfloat16, options.device).items():
        kernel = KERNELS.get(launch.rule, launch.rule)
        kernel += "[bf16, correct]" if "argmax" in name else "[bf16]"
        floor = launch.nbytes / measured["copy_bytes_per_s"]
        case = {"kernel": kernel, "shape": shape.name}
        (result,) = compare(
            "predicted", case, name, {"ours": partial(_call, launch)}, options, floor_s=floor, memory=False
        )
        result.extra |= {"gpu": gpu, "predicted_share": model[kernel]}
        results.append(result)
        if result.timing is not None:
            got = floor / result.timing.median
            rows.append({"kernel": kernel, "measured": f"{got:.1%}", f"predicted for {gpu}": f"{model[kernel]:.0%}"})
    report(results, options, baseline="ours", measured_ceilings=measured)
    print("\nOf the copy bandwidth:\n\n" + markdown(rows))
    return 0
