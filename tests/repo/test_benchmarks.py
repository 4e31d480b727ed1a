"""The benchmark harness measures correctly."""

import importlib
import importlib.util
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from benchmarks import __main__ as command
from benchmarks import measure, peers, policy, record
from benchmarks.shapes import Shape
from tests.support.parity import Spoilt
from tests.support.readme import DOCS, ROOT

CPU = torch.device("cpu")
RESULTS = ROOT / "benchmarks" / "results" / "amd-epyc-2-cores"


@pytest.fixture
def options(tmp_path):
    parser = measure.arguments("test")
    argv = ["--device", "cpu", "--samples", "4", "--warmup", "1", "--out", str(tmp_path / "sub" / "x.json")]
    return measure.parse(parser, argv)


def test_peers_interleave_and_inputs_rotate():
    calls = []
    names = {"a": lambda i: calls.append(("a", i)), "b": lambda i: calls.append(("b", i))}
    timings = measure.measure(names, device=CPU, input_sets=2, samples=2, warmup=1)
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 0), ("b", 0)]
    assert [len(timing.samples) for timing in timings.values()] == [2, 2]


def test_preparation_and_the_call_before_a_hot_one_are_not_timed():
    calls = []

    def prepare(index):
        time.sleep(0.05)
        calls.append(index)
        return index

    timing = measure.measure(
        {"a": measure.Candidate(calls.append, prepare)}, device=CPU, input_sets=2, samples=1, warmup=1, cache="hot"
    )["a"]
    assert timing.median < 0.05
    assert calls == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("run", "tensors"),
    [(lambda x: x + 1, 1), (lambda x: (x + 1) * 2, 2), (lambda x: x.mul_(1.0), 0), (lambda x: x[:5], 0)],
    ids=["one output", "a temporary", "in place", "a view"],
)
def test_peak_memory_is_exact_to_the_byte(run, tensors):
    x = torch.zeros(1000, 100)
    # the Python scalar of an elementwise op temporarily becomes a 0-d tensor: up to 16 bytes
    assert 0 <= measure.peak_memory(lambda _: run(x), CPU) - tensors * x.nbytes <= 16


def test_peak_memory_sees_inside_composite_ops_and_autograd():
    logits, targets = torch.randn(64, 1000, requires_grad=True), torch.zeros(64, dtype=torch.long)
    forward = lambda _: F.cross_entropy(logits, targets)  # noqa: E731
    for run, tensors in (
        (forward, 1),  # log-softmax, and three scalars
        (lambda i: forward(i).backward(), 3),  # log-softmax, its gradient, the logits' gradient
        (measure.Candidate(lambda loss: loss.backward(), forward), 2),  # without those of the forward pass
    ):
        assert 0 <= measure.peak_memory(run, CPU) - tensors * logits.nbytes <= 64


def test_the_device_sleeps_longer_than_the_host_needs_to_queue_a_call(monkeypatch):
    events = []
    event = SimpleNamespace(record=lambda: events.append("event"), elapsed_time=lambda other: 7.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: events.append(("sleep", clocks)))
    monkeypatch.setattr(measure, "_flusher", lambda device: lambda: events.append("flush"))

    def slow_to_launch(_):
        events.append("call")
        time.sleep(1e-3)

    timing = measure.measure({"a": slow_to_launch}, device="cuda", samples=1, warmup=1)["a"]
    assert timing.samples == (7e-3,)
    assert 1e-3 <= timing.host < 1e-2
    *_, sleep, flush, start, call, end, waited = events
    assert (flush, start, call, end, waited) == ("flush", "event", "call", "event", "synchronize")
    assert sleep[1] >= min(timing.host, measure.SLEEP[1]) * 1.98e9  # clock rate of a GPU at its fastest
    assert events.count("call") == 5  # one warm-up, three for the host's time, one sample
    assert measure._sleep_for(1.0) == int(measure.CLOCK * 2e-3)  # a call that waits would wait for its own sleep


def test_a_candidate_that_raises_does_not_affect_the_others(options, capsys):
    """It raises in its first call, or in a later one, which is timed.

    If the package's own code raises, the run fails.
    """
    calls = []

    def on_a_later_call(_):
        calls.append("later")
        if len(calls) > 3:
            raise ValueError("not\nnow")

    def on_first_call(_):
        raise torch.OutOfMemoryError("too much")

    def ours(_):
        raise RuntimeError("broken")

    candidates = {"liger": on_a_later_call, "plain": lambda _: None, "quack": on_first_call, "ours": ours}
    results = {r.name: r for r in measure.compare("test", {"N": 1}, "forward", candidates, options)}
    failed = {name: result.extra.get("failed") for name, result in results.items()}
    assert failed == {
        "liger": "ValueError: not", "plain": None, "quack": "out of memory", "ours": "RuntimeError: broken",
    }  # fmt: skip
    assert [name for name, result in results.items() if result.timing is not None] == ["plain"]
    assert len(results["plain"].timing.samples) == options.samples
    assert "RuntimeError: broken" in capsys.readouterr().err
    assert record.report(list(results.values()), options) == 1
    del results["ours"]
    assert record.report(list(results.values()), options) == 0
    assert "ValueError: not" in capsys.readouterr().out
    assert [r["extra"] for r in json.loads(options.out.read_text())["results"]] == [
        {"failed": "ValueError: not"}, {}, {"failed": "out of memory"},
    ]  # fmt: skip


def wrong_last_row(grad):
    grad.flatten(0, -2)[-1] *= 3


@pytest.mark.parametrize("subject", ["token_nll", "linear_nll"])
def test_errors_cover_all_rows(subject, monkeypatch):
    """Rows for which a float64 copy has no memory beside the others are included."""
    module = importlib.import_module(f"benchmarks.{subject}")
    monkeypatch.setattr(measure, "ROWS_BYTES", 8 * 257 * 30)  # 30 rows at a time
    shape = Shape("test", 2, 50, 257, 32, frozen=True)
    if subject == "token_nll":
        inputs, plain = module.make_inputs(shape, 1.0, torch.float32, "cpu"), peers.plain_mdlm
    else:
        inputs, plain = module.make_inputs(shape, 1.0, torch.float32, "cpu", True), peers.plain_linear
    candidates = {"ours": plain, "wrong": lambda x, *more: plain(Spoilt.apply(x, wrong_last_row), *more)}
    found, allowed = module.errors(candidates, inputs, *([shape] if subject == "linear_nll" else []))
    assert 0 < found["ours"] <= allowed < 1e-5 < found["wrong"]


@pytest.mark.gpu
def test_peak_memory_on_a_gpu():
    x = torch.zeros(1 << 20, device="cuda")
    assert measure.peak_memory(lambda _: (x + 1) * 2, "cuda") == 2 * x.nbytes


@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_the_losses_that_are_compared_equal_the_formula(form):
    hidden, head, targets = torch.randn(1, 6, 8), torch.randn(50, 8), torch.arange(6)[None]
    weights, z = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0]]), hidden @ head.T
    losses = peers.logits_losses("cpu", False) if form == "logits" else peers.linear_losses("cpu", False)
    inputs = (z, targets, weights) if form == "logits" else (hidden, head, targets, weights, 4)
    expected = ((z.logsumexp(-1) - z.gather(-1, targets[..., None])[..., 0]) * weights).sum()
    assert {"plain", "gather"} <= losses.keys()
    for name, loss in losses.items():
        torch.testing.assert_close(loss(*inputs), expected, msg=name)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("scheme", policy.SCHEMES)
def test_all_candidates_of_a_policy_update_agree(scheme, frozen, options):
    options.alone = False
    shape = Shape("test", 3, 20, 50, 16, frozen=frozen)
    torch.manual_seed(0)
    inputs, updates = policy.make_inputs(shape, 0.5, options, scheme), policy.updates(options, scheme)
    assert {"ours", "plain", "gather"} <= updates.keys()
    assert ("trl" in updates) == (importlib.util.find_spec("trl") is not None)
    results = {}
    with peers.trl_without_trainers():
        for name, update in updates.items():
            for leaf in inputs.leaves():
                leaf.grad = None
            loss = update(inputs)
            loss.backward()
            results[name] = [loss.detach(), *(leaf.grad for leaf in inputs.leaves())]
        off, allowed = policy.errors(updates, inputs)
    assert sys.modules.get("trl.trainer.utils") is peers.module("trl.trainer.utils")  # None, or TRL's own
    for result in results.values():
        torch.testing.assert_close(result, results["plain"], rtol=1e-4, atol=1e-6)
    assert off.keys() == updates.keys()
    assert max(off.values()) <= allowed


def test_a_missing_requirement_is_named_before_anything_runs(monkeypatch, capsys):
    there = importlib.util.find_spec("torch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name in ("tqdm", "tokenizers") else there)
    monkeypatch.setattr(command, "run", lambda *_: pytest.fail("it ran"))
    assert command.main(["train"]) == 2
    assert "train needs tokenizers, tqdm, not installed; run: pip install '.[demo]'" in capsys.readouterr().err
    assert command.main(["smoke", "collate"]) == 2
    assert "collate needs tqdm" in capsys.readouterr().err


def test_the_extras_install_the_needs_of_every_subject():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((Path(command.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    always = project["dependencies"]
    for name, subject in command.SUBJECTS.items():
        given = {re.match(r"[\w-]+", r)[0] for r in (*always, *project["optional-dependencies"][subject.extra])}
        assert set(subject.needs) <= given, name


@pytest.mark.skipif(not RESULTS.exists(), reason="a source distribution holds no results")
def test_the_pictures_are_drawn_from_the_committed_results(tmp_path):
    assert command.main(["plots", str(RESULTS), "--out", str(tmp_path)]) == 0
    for path in tmp_path.iterdir():
        assert path.read_text() == (DOCS / path.name).read_text(), path.name
