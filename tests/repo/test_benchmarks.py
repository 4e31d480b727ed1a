"""The benchmark harness measures correctly."""

import importlib
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from benchmarks import __main__ as command
from benchmarks import measure, on_gpu, peers, policy, record, suite
from benchmarks.result import PEERS
from benchmarks.shapes import Shape
from dllm_kernels import ops
from tests.support import trainers
from tests.support.parity import Spoilt

CPU = torch.device("cpu")


@pytest.fixture
def options(tmp_path):
    parser = measure.arguments("test")
    argv = ["--device", "cpu", "--samples", "4", "--warmup", "1", "--out", str(tmp_path / "sub" / "x.json")]
    return measure.parse(parser, argv)


def test_quantiles_interpolate_between_order_statistics():
    timing = measure.Timing((5.0, 1.0, 4.0, 2.0, 3.0))
    assert timing.median == 3.0
    assert timing.quantile(0.2) == pytest.approx(1.8)
    assert timing.quantile(0.8) == pytest.approx(4.2)
    assert measure.Timing((7.0,)).quantile(0.8) == 7.0


def test_peers_interleave_and_inputs_rotate():
    calls = []
    names = {"a": lambda i: calls.append(("a", i)), "b": lambda i: calls.append(("b", i))}
    timings = measure.measure(names, device=CPU, input_sets=2, samples=2, warmup=1)
    assert calls == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 0), ("b", 0)]
    assert [len(timing.samples) for timing in timings.values()] == [2, 2]


def test_hot_runs_the_same_call_untimed_just_before():
    calls = []
    measure.measure({"a": calls.append}, device=CPU, input_sets=2, samples=1, warmup=1, cache="hot")
    assert calls == [0, 0, 1, 1]


def test_preparation_is_not_timed():
    def slow(index):
        time.sleep(0.05)
        return index

    timing = measure.measure({"a": measure.Candidate(lambda _: None, slow)}, device=CPU, samples=3)["a"]
    assert timing.median < 0.05


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
    forward = measure.peak_memory(lambda _: F.cross_entropy(logits, targets), CPU)
    assert 0 <= forward - logits.nbytes <= 64  # log-softmax, and three scalars
    both = measure.peak_memory(lambda _: F.cross_entropy(logits, targets).backward(), CPU)
    assert 0 <= both - 3 * logits.nbytes <= 64  # log-softmax, its gradient, the logits' gradient


def test_peak_memory_of_a_backward_pass_does_not_count_its_forward_pass():
    logits, targets = torch.randn(64, 1000, requires_grad=True), torch.zeros(64, dtype=torch.long)
    backward = measure.Candidate(lambda loss: loss.backward(), lambda _: F.cross_entropy(logits, targets))
    assert 0 <= measure.peak_memory(backward, CPU) - 2 * logits.nbytes <= 64


class FakeGPU:
    """Record the calls of torch.cuda that ``measure`` makes."""

    def __init__(self, monkeypatch):
        self.events = []
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.events.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: self.events.append(("sleep", clocks)))
        monkeypatch.setattr(measure, "_flusher", lambda device: lambda: self.events.append("flush"))

    def record(self):
        self.events.append("event")

    def elapsed_time(self, other):
        return 7.0


def test_the_device_sleeps_longer_than_the_host_needs_to_queue_a_call(monkeypatch):
    gpu = FakeGPU(monkeypatch)

    def slow_to_launch(_):
        gpu.events.append("call")
        time.sleep(1e-3)

    timing = measure.measure({"a": slow_to_launch}, device="cuda", samples=1, warmup=1)["a"]
    assert timing.samples == (7e-3,)
    assert 1e-3 <= timing.host < 1e-2
    *_, sleep, flush, start, call, end, waited = gpu.events
    assert (flush, start, call, end, waited) == ("flush", "event", "call", "event", "synchronize")
    assert sleep[1] >= min(timing.host, measure.SLEEP[1]) * 1.98e9  # clock rate of a GPU at its fastest
    assert gpu.events.count("call") == 5  # one warm-up, three for the host's time, one sample


def test_the_sleep_is_bounded():
    assert measure._sleep_for(0.0) == int(measure.CLOCK * 50e-6)
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


@pytest.mark.everyday(1)
@pytest.mark.parametrize("subject", ["token_nll", "linear_nll", "row_stats"])
def test_a_peer_that_raises_does_not_affect_the_results_of_the_others(subject, tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no kernel image")

    module = importlib.import_module(f"benchmarks.{subject}")
    name = "statistics" if subject == "row_stats" else "losses"
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *options: {"liger": broken, **real(*options)})
    out = tmp_path / "out.json"
    toy = ["--size", "toy", "--samples", "1", "--warmup", "1", "--cache", "hot", "--device", "cpu", "--out", str(out)]
    assert module.main([*toy, *([] if subject == "row_stats" else ["--phase", "both"])]) == 0
    results = json.loads(out.read_text())["results"]
    liger_results, other_results = ([r for r in results if (r["name"] == "liger") == is_it] for is_it in (True, False))
    assert {(r["extra"]["failed"], r["timing"]) for r in liger_results} == {("RuntimeError: no kernel image", None)}
    assert all(r["timing"] is not None for r in other_results)
    assert all(0 < r["error"] <= r["allowed_error"] for r in other_results if r["name"] == "ours")


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


def test_relative_error():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert measure.relative_error(exact + torch.tensor([0.0, 1.0]), exact) == pytest.approx(0.2)
    assert measure.relative_error(torch.ones(4), torch.zeros(4)) == 2.0


@pytest.mark.parametrize("name", ["plain", "gather"])
def test_errors_are_measured_against_float64(name):
    generator = torch.Generator().manual_seed(0)
    logits, hidden, head = (torch.randn(*s, generator=generator) for s in ((1, 4, 50), (1, 4, 8), (50, 8)))
    targets, weights = torch.arange(4)[None], torch.rand(1, 4, generator=generator)
    arguments = targets, weights.double()
    found = {
        "logits": peers.logits_losses("cpu", False)[name](logits.double(), *arguments),
        "hidden": peers.linear_losses("cpu", False)[name](hidden.double(), head.double(), *arguments, None),
    }
    for form, z in {"logits": logits.double(), "hidden": hidden.double() @ head.double().T}.items():
        nll = z.logsumexp(-1) - z.gather(-1, targets[..., None])[..., 0]
        torch.testing.assert_close(found[form], (nll * weights.double()).sum(), rtol=1e-14, atol=0)


@pytest.mark.peer
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_the_original_is_the_plain_loss(form):
    pytest.importorskip(peers.DLLM_LOSS)
    torch.manual_seed(0)
    logits, hidden, head = torch.randn(1, 6, 50), torch.randn(1, 6, 8), torch.randn(50, 8)
    targets, weights = torch.arange(6)[None], torch.tensor([[0.0, 1.0, 2.0, 0.0, 3.0, 4.0]])
    if form == "logits":
        losses, loss_inputs = peers.logits_losses("cpu", False), (logits, targets, weights)
    else:
        losses, loss_inputs = peers.linear_losses("cpu", False), (hidden, head, targets, weights, 4)
    torch.testing.assert_close(losses["original"](*loss_inputs), losses["plain"](*loss_inputs))


@pytest.fixture
def broken_peers(tmp_path, monkeypatch):
    """Make quack fail on import, give liger no functions, and forget earlier imports."""
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack" / "__init__.py").write_text("raise RuntimeError('no cutlass\\nfor you')")
    (tmp_path / "liger_kernel").mkdir()
    for name in ("__init__", "transformers"):
        (tmp_path / "liger_kernel" / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    peers.module.cache_clear()
    yield
    peers.module.cache_clear()
    for name in [name for name in sys.modules if name.startswith(("quack", "liger_kernel"))]:
        del sys.modules[name]


@pytest.mark.exhaustive
def test_the_report_of_peers_and_their_import_errors(broken_peers, tmp_path, capsys):
    assert peers.main(["--out", str(tmp_path / "peers.json")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"quack +\| quack.cross_entropy +\| no: RuntimeError: no cutlass *\|", printed)
    assert re.search(r"liger +\| liger_kernel.transformers +\| yes", printed)
    written = json.loads((tmp_path / "peers.json").read_text())["imports"]
    assert (written["quack.cross_entropy"], written["liger_kernel.transformers"]) == ("RuntimeError: no cutlass", None)
    assert "ModuleNotFoundError: " in written["cut_cross_entropy"]
    assert set(peers.MODULES) <= PEERS


def test_a_peer_without_the_called_function_is_named_and_not_measured(broken_peers, capsys):
    losses = peers.logits_losses("cuda", False)
    assert {"plain", "gather"} <= losses.keys()
    assert not {"liger", "quack"} & losses.keys()
    assert "liger is not measured: AttributeError: " in capsys.readouterr().err


def test_a_trainers_divergences_equal_the_ones_compared_with_them():
    hidden, teacher, head, weights = torch.randn(6, 4), torch.randn(6, 4), torch.randn(11, 4), torch.rand(6)
    try:
        with trainers.loaded(trainers.SPECULATORS, "losses.eager"):
            peers.module.cache_clear()
            for kind in peers.SPECULATORS:
                found = peers.divergence_losses(kind, "cpu")["speculators, eager"](hidden, teacher, head, weights)
                torch.testing.assert_close(found, ops.linear_divergence(hidden, head, teacher, weights, kind=kind).loss)
    finally:
        peers.module.cache_clear()
    assert peers.divergence_losses("l1", "cpu") == {}


class GRPOLoss:
    """Liger's GRPO loss in plain PyTorch, limited to the benchmark's calls."""

    def __init__(self, *, beta, epsilon_low, epsilon_high, loss_type, compiled):
        assert loss_type == "bnpo"  # over the tokens of the call
        assert not compiled
        self.beta, self.low, self.high = beta, 1 - epsilon_low, 1 + epsilon_high

    def __call__(self, hidden, head, ids, mask, advantages, *, old_per_token_logps, ref_input, ref_weight):
        log_p, ref = (
            F.linear(h, w).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
            for h, w in ((hidden, head), (ref_input, ref_weight))
        )
        ratio, away, A = (log_p - old_per_token_logps).exp(), ref - log_p, advantages[:, None]
        value = self.beta * (away.exp() - away - 1) - torch.minimum(ratio * A, ratio.clamp(self.low, self.high) * A)
        return (value * mask).sum() / mask.sum(), ()


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("scheme", policy.SCHEMES)
def test_all_candidates_of_a_policy_update_agree(scheme, frozen, options, monkeypatch):
    """The package, the plain code and the peers agree.

    With one row per token, Liger's GRPO loss, or a stand-in for it, is included.
    """
    installed, found = peers.module("liger_kernel.chunked_loss"), peers.module
    liger = installed or SimpleNamespace(LigerFusedLinearGRPOLoss=GRPOLoss)
    monkeypatch.setattr(peers, "module", lambda name: liger if name == "liger_kernel.chunked_loss" else found(name))
    options.alone = False
    shape = Shape("test", 3, 20, 50, 16, frozen=frozen)
    torch.manual_seed(0)
    inputs, updates = policy.make_inputs(shape, 0.5, options, scheme), policy.updates(options, scheme)
    assert {"ours", "plain", "gather"} <= updates.keys()
    assert ("liger, GRPO loss" in updates) == (scheme == "full")
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


def test_table_and_json(options, capsys):
    x = torch.randn(100, 100)
    peers = {"plain": lambda _: (x + 1) * 2, "ours": lambda _: x * 2}
    given = {"errors": {"ours": 1e-7}, "floor_s": 1e-9, "floor_bytes": x.nbytes}
    results = measure.compare("test", {"N": 100}, "forward", peers, options, **given)
    ceilings = measure.ceilings(CPU, torch.float32, "toy")
    record.report(results, options, baseline="plain", measured_ceilings=ceilings)
    printed = capsys.readouterr().out
    for column in ("median", "20-80 %", "speed / plain", "of floor", "peak / plain", "peak floor", "error"):
        assert column in printed
    assert "0.50" in printed  # the package needs half the memory
    written = json.loads(options.out.read_text())
    assert {"date", "commit", "sources", "torch", "python", "packages", "cpu", "gpu"} <= written["environment"].keys()
    assert set(written["ceilings"]) == {"copy_bytes_per_s", "gemm_flop_per_s"}
    assert written["ceilings"]["copy_bytes_per_s"] > 0
    (plain, ours) = written["results"]
    assert (plain["name"], ours["name"]) == ("plain", "ours")
    assert len(ours["samples_s"]) == 4
    assert set(ours["timing"]) == {"q20_s", "q50_s", "q80_s"}
    assert ours["floor_bytes"] == x.nbytes


def test_every_subject_has_its_module_and_a_main():
    for subject in command.SUBJECTS.values():
        assert callable(importlib.import_module(subject.module).main)


def test_command_line_names_its_subjects(capsys):
    assert command.main([]) == 2
    assert command.main(["no-such-subject"]) == 2
    assert "no-such-subject" in capsys.readouterr().err
    assert command.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in command.SUBJECTS)


def test_smoke_fails_when_a_subject_fails(monkeypatch, capsys):
    monkeypatch.setattr(command, "SUBJECTS", {"gone": command.Subject("benchmarks.no_such_module", "")})
    assert command.smoke([]) == 1
    assert "FAILED: gone" in capsys.readouterr().out


def test_smoke_names_unknown_subjects(capsys):
    assert command.main(["smoke", "inspekt"]) == 2
    assert "unknown subjects 'inspekt'" in capsys.readouterr().err
    assert command.main(["smoke", "--help"]) == 0
    assert "SUBJECT" in capsys.readouterr().out


def test_a_missing_requirement_is_named_before_anything_runs(monkeypatch, capsys):
    """The command that installs it is named, too, and the overview lists all missing modules."""
    found = importlib.util.find_spec
    gone = {"tqdm", "tokenizers"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in gone else found(name, *more))
    monkeypatch.setattr(command, "run", lambda *_: pytest.fail("it ran"))
    assert command.main(["all", "--no-sweeps"]) == 2
    assert "all needs tqdm, not installed; run: pip install '.[bench]'" in capsys.readouterr().err
    assert command.main(["train"]) == 2
    assert "train needs tokenizers, tqdm, not installed; run: pip install '.[demo]'" in capsys.readouterr().err
    assert command.main(["smoke", "collate"]) == 2
    assert "collate needs tqdm" in capsys.readouterr().err
    assert command.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "not installed: tqdm; run: pip install '.[bench]'" in printed
    assert "in the root of a clone" in printed


def test_the_extras_install_the_needs_of_every_subject():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((Path(command.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    always = project["dependencies"]
    for name, subject in command.SUBJECTS.items():
        given = {re.match(r"[\w-]+", r)[0] for r in (*always, *project["optional-dependencies"][subject.extra])}
        assert set(subject.needs) <= given, name


def timed(name, seconds, case="a"):
    return {"name": name, "case": {"N": case}, "phase": "both", "cache": "hot", "timing": {"q50_s": seconds}}


def test_the_summary_never_says_that_nothing_was_faster_when_nothing_was_compared(tmp_path):
    alone = {"token_nll": {"results": [timed("ours", 1.0), timed("plain", 2.0, "b"), timed("bare products", 0.1)]}}
    for records in (
        {},
        alone,
        {"token_nll": {"results": [timed("ours", 1.0), timed("plain", 1.0) | {"timing": None}]}},
    ):
        assert suite.verdict(suite.compared(records), tmp_path).startswith("nothing was compared")
    both = [timed("ours", 1.0), timed("plain", 2.0), timed("ours", 1.0, "b"), timed("plain", 0.5, "b")]
    said = suite.verdict(suite.compared({"token_nll": {"results": both}}), tmp_path)
    assert said == f"another candidate was faster in 1 of 2 cases: {tmp_path / 'lost.md'}"
    assert "plain takes 0.50 of our time" in (tmp_path / "lost.md").read_text()


def test_all_reports_a_failure_of_every_subject(tmp_path, monkeypatch, capsys):
    """Results of an earlier run in the same folder are not reported as those of this run."""
    old = tmp_path / "collate.json"
    old.write_text(json.dumps({"results": [timed("ours", 1.0), timed("plain", 2.0)]}))
    os.utime(old, (0, 0))
    monkeypatch.setattr(suite, "run_subject", lambda *_: False)
    argv = ["--size", "toy", "--device", "cpu", "--subject", "collate", "--no-sweeps", "--out", str(tmp_path)]
    assert suite.main(argv) == 1
    printed = capsys.readouterr().out
    assert "nothing was compared" in printed
    assert "FAILED: collate" in printed
    assert re.search(r"^peers installed: .*\npeers not installed: ", printed, re.MULTILINE)


def test_a_case_is_announced_with_its_duration(options, capsys):
    measure.compare("test", {"N": 1}, "forward", {"ours": lambda _: None}, options)
    assert re.search(r"^test forward N=1: 1 candidates, [\d.]+ s$", capsys.readouterr().err, re.MULTILINE)


def test_durations_are_those_of_the_steps_on_a_gpu(capsys):
    """A subject whose step adds options, such as one shape, has no estimate of its own."""
    steps = {step.name: step.minutes for step in on_gpu.steps(Path("work")) if len(step.command) <= 7}
    steps["on_gpu"] = on_gpu._parser().get_default("minutes")
    stated = {name: subject.minutes for name, subject in command.SUBJECTS.items() if subject.minutes is not None}
    assert stated.keys() >= {"headline", "verify", "corruption", "losses", "on_gpu"}
    assert stated == {name: steps[name] for name in stated}
    assert command.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"headline .*\(estimated 0.8 minutes on an H200\)$", printed, re.MULTILINE)
