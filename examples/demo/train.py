"""Train a small diffusion language model on real text twice from one seed, with the plain loss and with ours.

Both runs use the same batches with the same corruption and alternate their steps. Their curves must therefore agree
up to rounding, and their times are comparable. The output is a table, a picture of the curves, and text generated
by the model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from benchmarks import measure, record
from examples.demo import data, plot
from examples.demo.model import LanguageModel
from examples.demo.tasks import TASKS, Batch, Filled, Loss, Sample, Task

NAMES = ("reference", "ours")
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "steps": 20, "batch": 4, "length": 32, "width": 32, "layers": 2, "heads": 2, "vocab": 512,
        "corpus_bytes": 200_000, "evals": 2, "heldout": 4, "block_size": 8, "draft_block": 4, "blocks": 2,
        "lr": 1e-2,
    },
    "cpu": {
        "steps": 300, "batch": 8, "length": 64, "width": 128, "layers": 2, "heads": 4, "vocab": 8192,
        "corpus_bytes": 3_000_000, "evals": 5, "heldout": 64, "block_size": 16, "draft_block": 8,
        "blocks": 8, "lr": 3e-3,
    },
    "gpu": {
        "steps": 1000, "batch": 32, "length": 512, "width": 512, "layers": 6, "heads": 8, "vocab": 16384,
        "corpus_bytes": 20_000_000, "evals": 20, "heldout": 128, "block_size": 32, "draft_block": 8,
        "blocks": 32, "lr": 2e-3,
    },
}  # fmt: skip
#: Fraction of "steps" for modes with more expensive steps: hybrid runs the model twice, idlm runs it on two copies of
#: the text, mtp runs the head three times, distill trains four models.
STEPS_SHARE = {"hybrid": 0.5, "idlm": 0.5, "distill": 0.5, "mtp": 0.4}
#: Modes with a draft model, whose target model is trained first.
WITH_TARGET = ("dflash", "distill")
#: Minimum number of steps with ``--minutes``.
LEAST_STEPS = 10
#: Minimum values other than 1: the tokenizer starts with 256 bytes and 2 special tokens, and a drafted block starts
#: with a known token.
LEAST = {"length": 2, "vocab": 258, "draft_block": 2}


def _whole(low: int) -> Callable[[str], int]:
    """Return a parser of ints of at least ``low``."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (value := int(text)) >= low:
                return value
        raise argparse.ArgumentTypeError(f"must be an int of at least {low}, got {text!r}")

    return parse


def _real(zero: bool) -> Callable[[str], float]:
    """Return a parser of finite numbers above 0, or of at least 0 if ``zero``."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if math.isfinite(value := float(text)) and (value > 0 or (zero and value == 0)):
                return value
        raise argparse.ArgumentTypeError(
            f"must be a finite number {'of at least' if zero else 'above'} 0, got {text!r}"
        )

    return parse


def _device(text: str) -> str:
    try:
        kind = torch.device(text).type
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"must be a device of torch, got {text!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"must be a device that is here, got {text!r}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks train", description=__doc__)
    add = parser.add_argument
    modes = "; ".join(f"{mode}: {task.title} ({task.source})" for mode, task in TASKS.items())
    add("--mode", choices=tuple(TASKS), default="mdlm", help=f"which loss. {modes}")
    add("--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--backend", choices=("auto", "triton", "torch"), default="auto", help="backend of our loss")
    add(
        "--corruption",
        choices=("ours", "reference"),
        default="ours",
        help="corruption routines that both runs use",
    )
    add("--out", type=Path, default=Path("demo-out"), help="folder for the picture, the curves and the text")
    add("--seed", type=_whole(0), default=0)
    add("--threads", type=_whole(1), help="CPU threads of torch")
    add("--dtype", choices=tuple(measure.DTYPES), help="autocast dtype; default: bfloat16 on a GPU, none on CPU")
    add("--tiny", action="store_true", help="use a small model and corpus, for tests")
    add(
        "--minutes",
        type=_real(zero=False),
        help="approximate training time of both models together; replaces --steps, keeps model and text",
    )
    add("--alpha", type=_real(zero=True), default=0.3, help="weight of the diffusion part, hybrid")
    add("--temperature", type=_real(zero=True), default=0.7, help="sampling temperature; 0 takes the likeliest tokens")
    add("--cache", type=Path, help="cache folder of the tokens, default ~/.cache/dllm-kernels-demo")
    for name, value in PRESETS["cpu"].items():
        kind = _real(zero=False) if isinstance(value, float) else _whole(LEAST.get(name, 1))
        add("--" + name.replace("_", "-"), type=kind, help=f"on CPU: {value}")
    return parser


def options_from(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options; defaults come from the preset of the device, or from "tiny"."""
    options = _parser().parse_args(argv)
    if options.minutes is not None and options.steps is not None:
        _refuse("minutes", "not allowed with --steps")
    preset = "tiny" if options.tiny else "gpu" if torch.device(options.device).type == "cuda" else "cpu"
    for name, value in PRESETS[preset].items():
        if getattr(options, name) is None:
            share = STEPS_SHARE.get(options.mode, 1.0) if name == "steps" else 1
            setattr(options, name, type(value)(value * share))
    on_gpu = torch.device(options.device).type == "cuda"
    options.dtype = measure.DTYPES[options.dtype or ("bfloat16" if on_gpu else "float32")]
    _check(options)
    return options


def _refuse(name: str, problem: str) -> NoReturn:
    """Exit with status 2, as the parser does."""
    _parser().error(f"argument --{name}: {problem}")


def _check(options: argparse.Namespace) -> None:
    """Check the constraints between arguments, whether passed or from a preset."""
    if options.seed >= 2**32:  # the seeds of rows are multiples of it, in 64 bits
        _refuse("seed", f"must be less than 2**32, got {options.seed}")
    if options.width % (2 * options.heads):
        _refuse("heads", f"must divide --width {options.width} into even parts, got {options.heads}")
    # A causal model needs a prompt of at least one token, and a draft needs at least one known token.
    causal = options.mode in ("idlm", "mtp", *WITH_TARGET)
    most, named = (
        options.length - causal,
        f"--length less 1, {options.length - 1}" if causal else f"--length {options.length}",
    )
    for name in ("block_size", "draft_block") if options.mode in ("idlm", *WITH_TARGET) else ("block_size",):
        if getattr(options, name) > most:
            _refuse(name.replace("_", "-"), f"must be at most {named}, got {getattr(options, name)}")


def _check_corpus(corpus: data.Corpus, options: argparse.Namespace) -> None:
    tokens = min(len(corpus.train), len(corpus.heldout))
    if tokens <= options.length:
        _refuse("corpus-bytes", f"must give texts longer than --length {options.length} tokens, got {tokens}")


@dataclass
class Run:
    """One training run: a model, its optimiser, and the recorded values."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: list[float] = field(default_factory=list)
    heldout: list[float] = field(default_factory=list)
    accuracy: list[list[float]] = field(default_factory=list)
    accepted: list[list[float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    loss_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def curves(self) -> dict[str, list[Any]]:
        """Return the curves for the picture."""
        return {"train": self.train, "heldout": self.heldout, "accuracy": self.accuracy}


def _autocast(options: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    kind = torch.device(options.device).type
    return torch.autocast(kind, options.dtype, enabled=options.dtype in (torch.bfloat16, torch.float16))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def forward_backward(task: Task, name: str, model: nn.Module, batch: Batch) -> tuple[Loss, float]:
    """Compute the gradients of one step; return the loss and its time in seconds, forward and backward.

    The autograd graph is cut at the inputs of the loss. Their gradients are passed on, so the results do not change.
    """
    with _autocast(task.options):
        outputs = task.outputs(model, batch)
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in outputs]
        start = _now(task.device)
        loss = task.implementation(name)(leaves, batch)
    loss.total.backward()  # type: ignore[no-untyped-call]
    seconds = _now(task.device) - start
    pairs = [(x, leaf.grad) for x, leaf in zip(outputs, leaves, strict=True) if x.requires_grad]
    torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
    return loss, seconds


def rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: linear warm-up over a twentieth of the steps, then cosine decay to a tenth."""
    warm = max(steps // 20, 1)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1))))


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Clip the gradients, update the parameters and clear the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)


def train_step(task: Task, run: Run, batch: Batch, lr: float) -> None:
    """Run and record one step of one run."""
    start = _now(task.device)
    loss, loss_seconds = forward_backward(task, run.name, run.model, batch)
    optimizer_step(run.model, run.optimizer, lr)
    run.step_seconds.append(_now(task.device) - start)
    run.loss_seconds.append(loss_seconds)
    run.train.append(loss.total.item())


@torch.no_grad()
def evaluate(task: Task, run: Run, batches: Sequence[Batch]) -> None:
    """Record the held-out loss and, for a draft, the accuracy at each offset and the tokens per check."""
    losses, hits, counts, accepted = [], [], [], []
    for batch in batches:
        with _autocast(task.options):
            loss = task.implementation(run.name)(task.outputs(run.model, batch), batch)
        losses.append(loss.total.item())
        if loss.hits is not None and loss.rows is not None:
            hits.append(loss.hits)
            counts.append(loss.rows)
        if loss.accepted is not None:
            accepted.append(loss.accepted)
    run.heldout.append(sum(losses) / len(losses))
    if hits:
        run.accuracy.append((torch.stack(hits).sum(0) / torch.stack(counts).sum(0)).tolist())
    if accepted:
        sizes = torch.tensor([[float(len(batch.ids))] for batch in batches], device=accepted[0].device)
        run.accepted.append(((torch.stack(accepted) * sizes).sum(0) / sizes.sum()).tolist())


def peak_of_a_step(task: Task, run: Run, batch: Batch) -> int:
    """Return the peak memory of forward, loss and backward, excluding model and optimiser."""
    peak = measure.peak_memory(lambda _: forward_backward(task, run.name, run.model, batch)[1], task.device)
    run.optimizer.zero_grad(set_to_none=True)
    return peak


def train_target(task: Task, corpus: data.Corpus, options: argparse.Namespace) -> nn.Module:
    """Train the target of a draft model: a small causal language model, with plain cross-entropy."""
    torch.manual_seed(options.seed + 1)
    model = LanguageModel(task.size).to(task.device)
    optimizer = new_optimizer(model)
    bar = tqdm(range(options.steps), desc="target", disable=not sys.stderr.isatty())
    for step in bar:
        ids = data.random_windows(corpus.train, options.batch, options.length, -1 - step).to(task.device)
        with _autocast(options):
            loss = F.cross_entropy(model(ids[:, :-1], causal=True).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer_step(model, optimizer, rate(step, options.steps, options.lr))
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return model


def heldout_batches(task: Task, corpus: data.Corpus, options: argparse.Namespace) -> list[Batch]:
    """Build batches of windows spread over the held-out files, with the same corruption at every evaluation."""
    windows = data.even_windows(corpus.heldout, options.heldout, options.length).to(task.device)
    return [task.batch(ids, 1_000_000 + number) for number, ids in enumerate(torch.split(windows, options.batch))]


def new_run(task: Task, name: str, seed: int) -> Run:
    """Build a run with a new model from the seed; the model is the same for every name."""
    torch.manual_seed(seed)
    model = task.model().to(task.device)
    return Run(name, model, new_optimizer(model))


def new_runs(task: Task, seed: int) -> list[Run]:
    """Build the runs of the reference, of ours, and the additional runs of the mode."""
    return [new_run(task, name, seed) for name in (*NAMES, *task.beside)]


def train(task: Task, corpus: data.Corpus, options: argparse.Namespace) -> tuple[list[Run], list[int], float]:
    """Train all runs in alternating steps; return runs, evaluation steps and the baseline's held-out loss."""
    runs = new_runs(task, options.seed)
    held = heldout_batches(task, corpus, options)
    log_unigram = corpus.log_unigram()
    guess = sum(task.guess(batch, log_unigram) for batch in held) / len(held)
    eval_steps: list[int] = []
    due = {round(options.steps * part / options.evals) for part in range(options.evals + 1)}
    bar = tqdm(range(options.steps + 1), desc=options.mode, disable=not sys.stderr.isatty())
    for step in bar:
        if step in due:
            eval_steps.append(step)
            for run in runs:
                evaluate(task, run, held)
        if step == options.steps:
            break
        ids = data.random_windows(corpus.train, options.batch, options.length, options.seed + step)
        batch = task.batch(ids.to(task.device), options.seed + step)
        for run in runs if step % 2 else reversed(runs):  # alternate, so that cold caches affect all runs
            train_step(task, run, batch, rate(step, options.steps, options.lr))
        bar.set_postfix({run.name: f"{run.train[-1]:.3f}" for run in runs} | {"held-out": f"{runs[1].heldout[-1]:.3f}"})
    for run in runs:
        run.peak_bytes = peak_of_a_step(task, run, held[0])
    return runs, eval_steps, guess


def steps_within(task: Task, corpus: data.Corpus, options: argparse.Namespace) -> int:
    """Estimate the number of steps that fit into ``--minutes``, from a few steps of temporary models."""
    few, target_seconds = 4, 0.0
    if options.mode in WITH_TARGET:
        start = _now(task.device)
        task.prepare(train_target(task, corpus, argparse.Namespace(**{**vars(options), "steps": few})))
        target_seconds = (_now(task.device) - start) / few
    runs, held = new_runs(task, options.seed), heldout_batches(task, corpus, options)
    for step in range(few + 1):
        ids = data.random_windows(corpus.train, options.batch, options.length, step)
        batch = task.batch(ids.to(task.device), step)
        for run in runs:
            train_step(task, run, batch, 0.0)
    start = _now(task.device)
    for run in runs:
        evaluate(task, run, held)
    evaluations = (options.evals + 1) * (_now(task.device) - start)
    a_step = target_seconds + sum(sum(run.step_seconds[1:]) / few for run in runs)  # the first step warms up
    return max(int((60 * options.minutes - evaluations) / a_step), LEAST_STEPS)


def _tenth(values: Sequence[float]) -> int:
    return max(len(values) // 10, 1)


def summary(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row of the table; times are medians without the first step, which warms up."""
    step, loss = (statistics.median(seconds[1:] or seconds) for seconds in (run.step_seconds, run.loss_seconds))
    return {
        "loss": run.name,
        "train_first": sum(run.train[: _tenth(run.train)]) / _tenth(run.train),
        "train_last": sum(run.train[-_tenth(run.train) :]) / _tenth(run.train),
        "heldout_first": run.heldout[0],
        "heldout_last": run.heldout[-1],
        "step_seconds": step,
        "loss_seconds": loss,
        "tokens_per_s": options.batch * options.length / step,
        "peak_bytes": run.peak_bytes,
        "loss_share": loss / step,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a table; the last row is the ratio of ours to the reference."""
    plain, ours = rows
    shown = [
        {
            "loss": row["loss"],
            "training, first 10 %": f"{row['train_first']:.4f}",
            "training, last 10 %": f"{row['train_last']:.4f}",
            "held-out, before": f"{row['heldout_first']:.4f}",
            "held-out, after": f"{row['heldout_last']:.4f}",
            "peak of a step": record.size(row["peak_bytes"]),
            "loss, a step": record.duration(row["loss_seconds"]),
            "whole step": record.duration(row["step_seconds"]),
            "tokens/s": f"{row['tokens_per_s']:.0f}",
            "loss's share": f"{100 * row['loss_share']:.0f} %",
        }
        for row in rows
    ]
    ratios = {
        "peak of a step": "peak_bytes",
        "loss, a step": "loss_seconds",
        "whole step": "step_seconds",
        "tokens/s": "tokens_per_s",
    }
    last = dict.fromkeys(shown[0], "") | {"loss": "ours / reference"}
    return record.markdown(
        [*shown, last | {column: f"{ours[key] / plain[key]:.2f}x" for column, key in ratios.items()}]
    )


def look_at(result: dict[str, Any]) -> str:
    """Explain the table, one line per result."""
    plain, ours = result["table"]
    first, whole, guess = (
        result[key] for key in ("largest_difference_first_tenth", "largest_difference", "frequency_guess")
    )
    after = ours["heldout_last"]
    learnt = "below it: it uses the context" if after < guess else "not below it yet: train longer, --minutes 10"
    lines = [
        f"the same training: both loss columns agree, the curves to {first:.1e} of the loss in the first tenth and to "
        f"{whole:.1e} over all steps (rounding, amplified by training)",
        f"the model learns: held-out loss {ours['heldout_first']:.3f} -> {after:.3f}; copying the visible tokens and "
        f"predicting the others by frequency alone gives {guess:.3f}, and the model is {learnt}",
        f"memory: the peak of a step is {ours['peak_bytes'] / plain['peak_bytes']:.2f}x that of the reference, without "
        "model and optimiser",
        f"time: the loss takes {ours['loss_seconds'] / plain['loss_seconds']:.2f}x the time of the reference, and the "
        f"whole step {ours['step_seconds'] / plain['step_seconds']:.2f}x; the model's time is the same",
    ]
    if accepted := result["curves"]["accepted"]:
        gains = "; ".join(
            f"{name} {values[-1][0]:.2f} by sampling, {values[-1][1]:.2f} greedily" for name, values in accepted.items()
        )
        lines.append(f"objectives of the draft model: tokens for each check by the target, held-out text: {gains}")
    return "What to look at\n" + "\n".join(f"- {line}" for line in lines)


def largest_difference(runs: Sequence[Run], steps: int | None = None) -> float:
    """Return the largest difference between the training curves, relative to the loss, over all or the first steps.

    NaN if any loss is NaN; Python's ``max`` would ignore it.
    """
    plain, ours = (torch.tensor(run.train[:steps], dtype=torch.float64) for run in runs)
    return float(((plain - ours).abs() / plain.abs().clamp(min=1e-12)).max())


def _indented(text: str) -> str:
    return "\n".join("    | " + line for line in text.splitlines())


def describe(sample: Sample, filled: Filled | None, size: str) -> str:
    """Format text samples of the model: filled-in masked tokens, if any, and generated text."""
    heading, parts = f"{size}. This is far too little to write meaningful text.", list[tuple[str, str]]()
    if filled is not None:
        heading += (
            f"\nOf {filled.tokens:,} masked tokens of held-out text, {100 * filled.right:.0f} % are predicted "
            f"correctly in one pass; always predicting the most frequent token gives {100 * filled.frequent:.0f} %."
        )
        parts += [("held-out text, masked", filled.given), ("filled in by the model, dark where wrong", filled.text)]
    parts += [("a prompt to write on from", sample.prompt)]
    parts += [(f"after {number}/4 of the steps", step) for number, step in enumerate(sample.steps, start=1)]
    parts += [("written by the model", sample.text), ("what the file says", sample.truth)]
    text = "\n".join(f"--- {title}\n{_indented(body)}" for title, body in parts)
    return f"{heading}\n{text}" + (f"\n({sample.note})" if sample.note else "")


def size_of(model: nn.Module, options: argparse.Namespace) -> str:
    """Describe the model size and the number of training tokens."""
    parameters, tokens = sum(p.numel() for p in model.parameters()), options.steps * options.batch * options.length
    return (
        f"The model has {parameters / 1e6:.1f} million parameters in {options.layers} layers of width {options.width}, "
        f"trained on {tokens:,} tokens"
    )


def report(
    task: Task,
    runs: Sequence[Run],
    eval_steps: list[int],
    guess: float,
    learnt: str,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Print the table and the samples; write picture, curves and text; return the content of the JSON file."""
    both, rows = runs[:2], [summary(run, options) for run in runs[:2]]
    result = {
        "mode": options.mode,
        "environment": record.environment(options.device),
        "options": {
            key: value if isinstance(value, int | float) else str(value) for key, value in vars(options).items()
        },
        "table": rows,
        "largest_difference": largest_difference(both),
        "largest_difference_first_tenth": largest_difference(both, _tenth(both[0].train)),
        "frequency_guess": guess,
        "processor_seconds": time.process_time(),
        "curves": {
            "eval_steps": eval_steps,
            **{run.name: run.curves() for run in both},
            "accepted": {task.objectives[run.name]: run.accepted for run in runs if run.accepted},
        },
    }
    title = f"{options.mode}: {task.title}, {record.device_name(options.device)}"
    options.out.mkdir(parents=True, exist_ok=True)
    picture, curves, text = (options.out / f"{options.mode}.{kind}" for kind in ("png", "json", "txt"))
    plot.draw(picture, title, result["curves"], guess, rows)
    curves.write_text(json.dumps(result, indent=1) + "\n")
    text.write_text(learnt + "\n", encoding="utf-8")
    print(
        f"\n{title}\n\n{table(rows)}\n\n{look_at(result)}\n\n{learnt}\n\n"
        f"picture: {picture}   curves: {curves}   text: {text}"
    )
    return result


def main(argv: list[str]) -> int:
    """Train and report; return 1 if the held-out loss did not fall."""
    options = options_from(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    start = time.perf_counter()
    corpus = data.load(options.vocab, options.corpus_bytes, options.cache)
    _check_corpus(corpus, options)
    print(
        f"text: {len(corpus.train):,} training tokens, {len(corpus.heldout):,} held out, "
        f"vocabulary {corpus.vocab_size:,} ({time.perf_counter() - start:.1f} s)"
    )
    task = TASKS[options.mode](options, corpus)
    if options.minutes is not None:
        options.steps = steps_within(task, corpus, options)
        print(f"{options.steps} steps in about {options.minutes:g} minutes")
    if options.mode in WITH_TARGET:
        task.prepare(train_target(task, corpus, options))
    runs, eval_steps, guess = train(task, corpus, options)
    text = data.even_windows(corpus.heldout, 5, options.length)[2].to(task.device)
    with torch.no_grad(), _autocast(options):
        model = runs[1].model.eval()
        sample = task.sample(model, text)
        filled = task.fill(model, data.even_windows(corpus.heldout, options.heldout, options.length).to(task.device))
    report(task, runs, eval_steps, guess, describe(sample, filled, size_of(model, options)), options)
    print(f"done in {time.perf_counter() - start:.0f} s, {time.process_time():.0f} s of processor time")
    return int(options.steps >= 10 and not runs[1].heldout[-1] < runs[1].heldout[0])  # NaN counts as not fallen
