"""A rehearsal of the run on a GPU: its plan, its time limits, its results after a kill, and its verdicts."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import carried, on_gpu, shapes, tune, verdicts
from benchmarks import record as record_of
from benchmarks.on_gpu import Step
from benchmarks.record import CARDS
from tests.conftest import DEVICE, usually
from tools import predicted, prepare
from tools.gpus import GPUS

FIRST = [
    "verify", "headline", "gpu_tests", "peers", "linear_nll", "trained_head", "token_nll", "corruption", "parity_nll",
]  # fmt: skip
SECOND = ["parity_losses", "parity_noise", "predicted", "row_stats"]
STEPS = on_gpu.steps(Path("work"))
NAMES = [step.name for step in STEPS]


def test_the_most_decisive_steps_come_first():
    assert NAMES[: len(FIRST + SECOND)] == FIRST + SECOND == [step.name for step in STEPS if step.decides]
    assert sum(step.minutes for step in STEPS[:1]) * 60 + STARTING <= 70  # right or wrong
    assert sum(step.minutes for step in STEPS[:2]) * 60 + STARTING <= 120  # the headline
    assert all(step.minutes <= 2 for step in STEPS if step.name in on_gpu.PARITY)


@pytest.mark.parametrize("minutes", [0.5, 9, 17, 28, 60])
def test_the_plan_keeps_to_its_minutes(minutes):
    fits, remaining = on_gpu.plan(STEPS, minutes)
    assert sum(step.minutes for step in fits) <= max(minutes - on_gpu.RESERVE / 60, 0)
    assert sorted(s.name for s in (*fits, *remaining)) == sorted(NAMES)
    assert [s for s in STEPS if s in fits] == fits


STARTING, ENDING = 8, 2  # s until the first step of a call begins, and to end a step and write its outcome; assumed


@pytest.mark.parametrize("share", [0.5, 0.65, 0.8, 1.0])
def test_what_decides_runs_in_fifteen_minutes(share, rehearse, monkeypatch, tmp_path, capsys):
    """Every step takes this share of its minutes. The second call begins half a minute after the first one."""
    now, began, calls = [0.0], [], []

    def step(self, step):
        began.append((step.name, now[0]))
        now[0] += 60 * step.minutes * share + ENDING
        self.done[step.name] = {"outcome": "ok"}
        self.save()

    def environment(device):
        now[0] += STARTING
        return {"gpu": None}

    monkeypatch.setattr(on_gpu, "RESERVE", RESERVE)
    monkeypatch.setattr(on_gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(on_gpu, "environment", environment)
    monkeypatch.setattr(on_gpu.Run, "step", step)
    now[0] = 60 * on_gpu.START  # until the machine has started
    _, out = rehearse(on_gpu_steps, "--total", "15", "--minutes", "9")
    calls.append(now[0] / 60 - on_gpu.START)
    waiting = [name for name in FIRST + SECOND if name not in outcomes(out)]
    if waiting:
        assert f"because these decide: {', '.join(waiting)}" in capsys.readouterr().out
    earlier = out.rename(tmp_path / "earlier")
    now[0] += 30
    rehearse(on_gpu_steps, "--total", "15", "--minutes", "9", "--resume", str(earlier))
    assert {name for name, _ in began} >= {*FIRST, *SECOND}
    assert len({name for name, _ in began}) == len(began)  # no step twice
    assert calls[0] <= 9
    assert now[0] <= 15 * 60
    assert "because these decide" not in capsys.readouterr().out
    if share == 1:
        assert [name for name, at in began] == FIRST + SECOND


def test_predictions_are_of_the_kernels_that_are_measured():
    launches = tune.launches(shapes.TOY_ROWS, torch.bfloat16, DEVICE)
    assert {predicted.kernel_of(name, launch.rule) for name, launch in launches.items()} == {*prepare.PREDICTED}


def test_every_step_has_its_requirements():
    by_name = {step.name: step for step in STEPS}
    for name in ("memcheck", "racecheck"):
        assert by_name[name].settings == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for name in on_gpu.PARITY:
        words = " ".join(by_name[name].command)
        assert "-n 12 -m not exhaustive" in words
        assert "-v" in words
    assert all(by_name[name].settings == {"OMP_NUM_THREADS": "1"} for name in ("gpu_tests", *on_gpu.PARITY))
    assert by_name["predicted"].command[-2:] == ("--model", str(by_name["predicted"].input))
    assert by_name["predicted"].input.name == carried.MODEL
    # What measures a time or imports a peer waits for the installation of the peers.
    assert {step.name for step in STEPS if step.beside} == {"verify", "gpu_tests", *on_gpu.PARITY}


def shell(name, text, minutes=1.0, **options):
    return Step(name, minutes, ("sh", "-c", text), ("sh", "-c", text), **options)


def test_a_step_whose_packages_are_missing_is_left_out(rehearse, capfd):
    plan = [shell("tests", "exit 1", modules=("torch", "no_such_package")), shell("measurement", "true")]
    status, out = rehearse(lambda work: plan)
    assert status == 0
    assert outcomes(out) == {"tests": "left out: no_such_package is not installed", "measurement": "ok"}
    assert "cannot run: tests (no_such_package is not installed)" in capfd.readouterr().out


def test_a_step_without_its_input_is_left_out_and_runs_when_it_is_there(rehearse, tmp_path, capfd):
    """``predicted`` without the predictions was ok."""

    def make(work):
        return [shell("predicted", "true", input=work / "model.json")]

    status, out = rehearse(make)
    assert (status, outcomes(out)) == (0, {"predicted": "left out: model.json is missing"})
    earlier = out.rename(tmp_path / "earlier")
    folder = tmp_path / "prepared"
    folder.mkdir()
    (folder / carried.MODEL).write_text("[]")
    (folder / carried.RECORD).write_text(json.dumps({"triton": "0.1", "target": "sm_90"}))
    (folder / carried.KERNELS).write_bytes(b"cut")  # a cache that cannot be filled does not stop the run
    _, out = rehearse(make, "--resume", str(earlier), "--prepared", str(folder))  # of another Triton
    assert outcomes(out) == {"predicted": "left out: model.json is missing"}
    pytest.importorskip("triton")
    (folder / carried.RECORD).write_text(json.dumps({"triton": record_of.version("triton"), "target": "sm_90"}))
    _, out = rehearse(make, "--resume", str(earlier), "--prepared", str(folder))
    assert outcomes(out) == {"predicted": "ok"}
    assert "model.json" in contents(out)  # a later call needs no folder
    assert "prepared: predictions alone, ReadError: " in capfd.readouterr().out


def test_the_tests_have_the_packages_of_the_project_s_own_configuration():
    """``-n`` is an option of xdist, ``timeout`` is one of pytest-timeout, and tests/conftest.py imports hypothesis."""
    for step in STEPS:
        assert (step.modules == on_gpu.TEST_MODULES) == ("pytest" in step.command)


def quick(work):
    """Return all steps, each of which ends immediately with results."""
    return [shell(name, f"""echo table of {name}; echo '{{"results": []}}' > {work}/{name}.json""") for name in NAMES]


def hanging(step, work):
    """Return this step as one that leaves its process group and never ends."""
    escaped = f"echo \\$\\$ > {work}/escaped.pid; trap '' TERM; while true; do sleep 0.1; done"
    text = f"""echo '{{"results": [1]}}' > {work}/{step.name}.json; setsid sh -c "{escaped}" & sleep 60"""
    return shell(step.name, text, minutes=0.02)


RESERVE, on_gpu_steps = on_gpu.RESERVE, on_gpu.steps  # fixtures replace them


@pytest.fixture
def rehearse(monkeypatch, tmp_path):
    """Return a function: (function that creates the steps, arguments) -> (status, folder of results)."""
    monkeypatch.setattr(on_gpu, "REFRESH", 0.1)
    monkeypatch.setattr(on_gpu, "RESERVE", 0.0)
    monkeypatch.setattr(on_gpu, "PATIENCE", 0.3)
    monkeypatch.setattr(on_gpu, "verdicts", lambda folder, size: ["- a verdict"])

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))

    def run(make, *words):
        monkeypatch.setattr(on_gpu, "steps", make)
        out = tmp_path / "out"
        return on_gpu.main(["--out", str(out), "--rehearse", *words]), out

    return run


def contents(out):
    with tarfile.open(out / "results.tar.gz") as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive.getmembers()}


def outcomes(out):
    return {name: step["outcome"] for name, step in json.loads((out / "summary.json").read_text())["steps"].items()}


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_every_step_runs_and_all_results_are_in_three_files(rehearse, capfd):
    status, out = rehearse(quick)
    assert status == 0
    assert sorted(path.name for path in out.iterdir()) == ["results.tar.gz", "summary.json", "verdicts.md"]
    assert outcomes(out) == dict.fromkeys(NAMES, "ok")
    found = contents(out)
    assert {f"{name}{end}" for name in NAMES for end in (".json", ".log")} < set(found)
    assert found["tune.log"] == "table of tune\n"
    printed = capfd.readouterr().out
    # The result of the verification is the first line, then come its tables, the plan and the other steps.
    assert printed.startswith("- a verdict\n")
    order = ["table of verify", "=== verify: ok", "fits: headline", "table of headline", "=== headline: ok"]
    assert sorted(order, key=printed.index) == order
    assert "left out for lack of time: nothing" in printed


@pytest.mark.everyday(1)
@pytest.mark.parametrize("place", usually([0, len(NAMES) - 1], range(len(NAMES)), NAMES.__getitem__))
def test_a_step_past_its_share_is_killed_with_its_children(place, rehearse, monkeypatch):
    seen = []

    def make(work):
        cut, *rest = quick(work)[place : place + 2]
        seen.append(work)
        return [hanging(cut, work), *rest]

    real = on_gpu._of_mark
    pids = []

    def noted(mark):
        with_pid = seen[-1] / "escaped.pid"
        pids.extend([int(with_pid.read_text())] if with_pid.exists() else [])
        return real(mark)

    monkeypatch.setattr(on_gpu, "_of_mark", noted)
    status, out = rehearse(make)
    assert status == 1
    assert pids
    assert not any(map(alive, pids))
    first, *rest = outcomes(out).values()
    assert first == "ended after its 0.02 minutes"
    assert set(rest) <= {"ok"}
    assert json.loads(contents(out)[f"{NAMES[place]}.json"]) == {"results": [1]}  # measured before the cut


def test_steps_that_do_not_fit_are_named_and_remaining_time_is_used(rehearse, capfd):
    """The second of three steps is too long. The third one fits, but not if the first took its whole share."""

    def make(work):
        return [shell("a", "true", 0.9), shell("b", "true", 5), shell("c", "true", 0.9)]

    status, out = rehearse(make, "--minutes", "1")
    printed = capfd.readouterr().out
    assert status == 0
    assert outcomes(out) == {"a": "ok", "c": "ok"}
    assert "fits: a 0.9 min" in printed
    assert "fits only if others take less: b, c" in printed
    assert "left out for lack of time: b" in printed


def test_a_resumed_run_continues_and_keeps_earlier_results(rehearse, tmp_path):
    _, out = rehearse(quick, "--steps", "verify", "tune", "--minutes", "28")
    earlier = out.rename(tmp_path / "earlier")
    assert set(outcomes(earlier)) == {"verify", "tune"}

    def make(work):
        return [shell(s.name, "exit 1") if s.name in ("verify", "tune") else s for s in quick(work)]

    status, out = rehearse(make, "--resume", str(earlier))
    assert status == 0  # neither ran again
    assert outcomes(out) == dict.fromkeys(["verify", "tune", *NAMES], "ok")
    assert {"verify.log", "verify.json", "parity_nll.log"} < set(contents(out))


def test_a_verification_that_was_ended_runs_again(rehearse, tmp_path):
    """Without it no verdict counts. Other steps that were ended keep what they have measured."""
    _, out = rehearse(lambda work: [shell(name, "sleep 60", minutes=0.01) for name in ("verify", "tune")])
    assert set(outcomes(out).values()) == {"ended after its 0.01 minutes"}
    earlier = out.rename(tmp_path / "earlier")
    status, out = rehearse(lambda work: [shell(name, "true") for name in ("verify", "tune")], "--resume", str(earlier))
    assert (status, outcomes(out)) == (0, {"tune": "ended after its 0.01 minutes", "verify": "ok"})


def test_the_environment_is_queried_once_and_before_the_first_step(rehearse, monkeypatch, tmp_path):
    """The query runs git and nvidia-smi, which would take time from the measurements."""
    queried = tmp_path / "asked"

    def environment(device):
        with queried.open("a") as file:
            file.write(f"{device}\n")
        return {"gpu": None}

    monkeypatch.setattr(on_gpu, "environment", environment)
    status, out = rehearse(lambda work: [shell("a", f"sleep 0.5; cat {queried}"), shell("b", "true")])
    assert (status, queried.read_text(), contents(out)["a.log"]) == (0, "cpu\n", "cpu\n")
    assert json.loads((out / "summary.json").read_text())["environment"] == {"gpu": None}


def test_a_failure_does_not_stop_other_steps(rehearse):
    status, out = rehearse(lambda work: [shell("a", "exit 7"), shell("b", "true")])
    assert status == 1
    assert outcomes(out) == {"a": "failed with status 7", "b": "ok"}


def test_a_sanitizer_that_refuses_the_device_is_no_failure(rehearse):
    text = "echo '========= Error: Device not supported. Please refer to the \"Supported Devices\" section'; exit 1"
    status, out = rehearse(lambda work: [shell("memcheck", text, needs="sh"), shell("racecheck", "exit 3", needs="sh")])
    assert status == 1
    assert outcomes(out) == {"memcheck": "left out: sh refuses this device", "racecheck": "failed with status 3"}


def test_parts_of_a_wheel_in_several_folders_are_joined(tmp_path):
    parts = {"b": "big-1.0-py3-none-any.whl.part-ab", "a": "big-1.0-py3-none-any.whl.part-aa", "c": "small.whl"}
    for name, file in parts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_bytes(name.encode())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = carried.joined([tmp_path / name for name in parts], scratch)
    assert {path.name: path.read_bytes() for path in found} == {"big-1.0-py3-none-any.whl": b"ab", "small.whl": b"c"}


@pytest.mark.exhaustive
def test_wheels_that_cannot_be_installed_do_not_stop_the_run(rehearse, tmp_path, capfd):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "peer-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    status, out = rehearse(lambda work: [shell("a", "echo $PYTHONPATH")], "--wheels", str(wheels))
    assert status == 0
    assert "pip rejects peer-1.0-py3-none-any.whl: measured without it" in capfd.readouterr().out
    assert contents(out)["a.log"].startswith("/")


def test_all_wheels_are_installed_by_one_call_of_pip(tmp_path, monkeypatch):
    """Ten calls take longer than a step. A wheel that is no wheel costs one more call for each of the others."""
    wheels = [tmp_path / f"{name}-1.0-py3-none-any.whl" for name in ("a", "b", "c", "cut")]
    for wheel in wheels[:3]:
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr("module.py", "")
    wheels[3].write_bytes(wheels[0].read_bytes()[:20])
    calls = []

    def rejects(some, into):
        calls.append([wheel.name[0] for wheel in some])
        return wheels[bad] in some

    monkeypatch.setattr(carried, "_rejects", rejects)
    for bad, expected in ((3, [["a", "b", "c"]]), (1, [["a", "b", "c"], ["a"], ["b"], ["c"]])):
        calls.clear()
        rejected = carried.install(wheels, tmp_path)
        assert calls == expected
        assert rejected == ([wheels[3]] if bad == 3 else [wheels[3], wheels[1]])


def test_wheels_are_installed_beside_the_first_step(rehearse, tmp_path, monkeypatch, capfd):
    """Steps that may run beside the installation do not wait for it, unless it brings what they need."""
    order, verified = [], threading.Event()

    def rejects(some, into):
        verified.wait(60)
        order.append("installed")
        into.mkdir()
        (into / "brought.py").touch()
        return False

    def step(self, step, real=on_gpu.Run.step):
        real(self, step)
        order.append(step.name)
        verified.set() if step.name == "beside" else None

    monkeypatch.setattr(carried, "_rejects", rejects)
    monkeypatch.setattr(on_gpu.Run, "step", step)
    with zipfile.ZipFile(tmp_path / "a-1.0-py3-none-any.whl", "w"):
        pass
    plan = [
        shell("verify", "true", beside=True),
        shell("beside", "true", beside=True),
        shell("measured", "test -n $PYTHONPATH"),
        shell("tests", "true", beside=True, modules=("brought",)),
    ]
    status, out = rehearse(lambda work: plan, "--wheels", str(tmp_path))
    assert (status, order) == (0, ["verify", "beside", "installed", "measured", "tests"])
    assert "cannot run without the wheels: tests (brought is not installed)" in capfd.readouterr().out
    assert set(outcomes(out).values()) == {"ok"}


PREPARED = """
import os, sys
from pathlib import Path
from benchmarks import carried
from tools import prepare
from triton import knobs

folder, cache, work = map(Path, sys.argv[1:])
assert prepare.main(["--out", str(folder), "--size", "toy"]) == 0
os.environ["TRITON_CACHE_DIR"] = str(cache)
print(carried.use_prepared(folder, work))
hits = []
knobs.compilation.listener = lambda **found: hits.append(found["cache_hit"])
print(prepare.compile_of_verify("sm_90", "toy", cache), all(hits), len(hits))
"""


@pytest.mark.exhaustive
def test_prepared_kernels_are_found_in_the_cache_of_another_machine(tmp_path):
    pytest.importorskip("triton")
    folders = [tmp_path / name for name in ("prepared", "cache", "work")]
    folders[2].mkdir()
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PREPARED, *map(str, folders)]
    done = subprocess.run(command, cwd=on_gpu.ROOT, env=kept, capture_output=True, text=True, check=True)
    *_, prepared_line, used, found = done.stdout.splitlines()
    assert "1 predictions, " in prepared_line
    assert used.startswith("prepared: predictions, and ")
    count, all_hits, hits = found.split()
    assert (count, all_hits) == (hits, "True")
    assert predicted.shares(folders[2] / carried.MODEL, "H100").keys() == {prepare.PREDICTED[0]}


KILLED = """
import sys
from tests.repo import test_on_gpu as t
t.on_gpu.REFRESH = 0.1
t.on_gpu.steps = lambda work: [t.quick(work)[0], t.shell("tune", f"echo 1 > {work}/tune.json; echo $$; sleep 60")]
t.on_gpu.main(["--out", sys.argv[1], "--rehearse"])
"""


@pytest.mark.exhaustive
def test_a_killed_run_keeps_its_measurements(tmp_path):
    """Measurements of the running step are included."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=on_gpu.ROOT, stdout=subprocess.DEVNULL
    )
    deadline, found = time.monotonic() + 120, {}
    while time.monotonic() < deadline and not found.get("tune.log"):
        time.sleep(0.2)
        found = contents(tmp_path) if (tmp_path / "results.tar.gz").exists() else {}
    process.kill()
    process.wait()
    os.killpg(int(found["tune.log"]), signal.SIGKILL)
    assert (found["verify.json"], found["tune.json"]) == ('{"results": []}\n', "1\n")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (list(summary["steps"]), summary["running"]) == (["verify"], "tune")
    assert len(list(tmp_path.iterdir())) <= 8


def record(name, seconds, case, phase="forward", floor=1.0, subject="token_nll", **more):
    timing = {"q20_s": seconds, "q50_s": seconds, "q80_s": seconds}
    extra = more.pop("extra", {})
    return {"case": case, "phase": phase, "name": name, "timing": timing, "floor_s": floor, "extra": extra} | {
        "subject": subject, **more
    }  # fmt: skip


H100 = {"name": "NVIDIA H100 80GB HBM3", "multiprocessors": 132}
HERE = {"sources": "1234", "gpu": H100}
RIGHT = {"check": "NLL", "quantity": "nll", "error": 0.1, "allowed": 0.2, "passed": True}
OF_ONE = "kernels verified: 1 comparisons with float64 on all rows\n"
VERIFIED = {"environment": HERE, "complete": True, "findings": [RIGHT]}


def written(folder, verify=VERIFIED, where=HERE, **files):
    (folder / "verify.json").write_text(json.dumps(verify))
    for name, records in files.items():
        (folder / f"{name}.json").write_text(json.dumps({"environment": where, "results": records}))
    return verdicts.verdicts(folder)


FULL = shapes.HEADLINE["full"]
LLADA = {"shape": FULL.logits.name, "active": "100%"}
ALL, HALF = ({"shape": FULL.frozen[0].name, "active": share} for share in ("100%", "50%"))
LINEAR = {"phase": "both", "subject": "linear_nll"}
BATCH = {"routine": "blockwise", "B": 64, "L": 4096, "block": 32}


def test_every_bar_has_its_verdict(tmp_path):
    policy = {"shape": FULL.policy.name, "form": "logits", "active": "100%"}
    lines = written(
        tmp_path,
        headline=[
            record("ours", 1.05, LLADA), record("ours", 2.0, LLADA, "both"),
            record("ours", 8e-4, policy, subject="row_stats"),
            record("ours", 1.1, ALL, **LINEAR), record("bare products", 1.0, ALL, **LINEAR),
            record("ours", 0.6, HALF, **LINEAR),
        ],
        token_nll=[record("ours", 2.0, LLADA, "both"), record("liger", 1.9, LLADA, "both")],
        linear_nll=[
            record("ours", 1.0, HALF, peak_bytes=10, **LINEAR), record("plain", 3.0, HALF, peak_bytes=20, **LINEAR),
            record("liger", 2.0, HALF, peak_bytes=30, **LINEAR),
        ],
        row_stats=[record(name, s, policy, "both", subject="row_stats") for name, s in (("ours", 1.0), ("trl", 1.2))],
        trained_head=[record(name, s, {"shape": FULL.trained.name, "active": "100%"}, **LINEAR)
                      for name, s in (("ours", 1.05), ("quack", 1.0))],
        corruption=[record(name, s, BATCH, subject="corruption") for name, s in (("ours", 1.0), ("original", 11.0))],
        predicted=[record("ours", 2.0, {"kernel": "k", "V": 7}, "chunk", floor=1.2, extra={"predicted_share": 0.8})],
    )  # fmt: skip
    bars_of_8b = ["not measured"] * 4
    assert [line.split(":")[0].removeprefix("- ") for line in lines] == [
        "kernels verified", "met", "NOT MET", "NOT MET", "met", "met", "met", "met", *bars_of_8b,
        "met", "met", "met", "met", "not measured", "NOT MET",
    ]  # fmt: skip
    assert lines[4].endswith("of its two bare products: 0.909, bar 0.88")
    assert lines[1].endswith("of a copy's speed: 0.952, bar 0.9")
    assert lines[5].endswith("time with all active over half: 1.83, bar 1.8")
    assert lines[6].endswith("fastest other over ours: 2, bar 1 (beside plain, liger)")
    assert lines[7].endswith("smallest other over ours: 2, bar 1 (beside plain, liger)")
    assert lines[-1] == "- NOT MET: k at V 7, chunk: 0.75 of its prediction, bar 0.9 to 1.1"


@pytest.mark.parametrize(
    ("device", "multiprocessors", "word"),
    [
        ("NVIDIA H100 80GB HBM3", 132, "met"),
        ("NVIDIA H200", 132, "NOT MET"),
        ("NVIDIA A100-SXM4-80GB", 108, "no bar"),
        ("NVIDIA GH200 480GB", 132, "no bar"),
        ("NVIDIA H200 NVL", 132, "no bar"),
        ("NVIDIA H100 PCIe", 114, "no bar"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, "no bar"),
        ("NVIDIA H100 80GB HBM3", 60, "no bar"),
    ],
)
def test_a_bar_of_a_device_does_not_judge_another(device, multiprocessors, word, tmp_path):
    where = HERE | {"gpu": {"name": device, "multiprocessors": multiprocessors}}
    found = [record("ours", 1.0, ALL, **LINEAR), record("bare products", 0.89, ALL, **LINEAR)]
    lines = written(tmp_path, VERIFIED | {"environment": where}, where, headline=found)
    assert lines[4].startswith(f"- {word}: frozen head")
    assert ("no bar for this device" in lines[4]) == (word == "no bar")


def test_the_cards_of_bars_and_models_are_the_same():
    models = {name: gpu.multiprocessors for name, gpu in GPUS.items()}
    assert dict(CARDS.values()) == models
    assert {key for bar in verdicts.bars("full") if isinstance(bar.least, dict) for key in bar.least} <= models.keys()
    assert record_of.card(None) is None


def test_every_figure_of_the_bars_is_measured():
    """Steps on a GPU measure them, and those of a rehearsal at toy size."""
    named = [*shapes.LOGITS["full"], *shapes.LINEAR["full"], shapes.POLICY]
    commands = {step.name: " ".join(step.command) for step in STEPS}
    for bar in verdicts.bars("full"):
        if bar.results == "corruption":
            assert shapes.MaskShape(*(bar.case[key] for key in ("B", "L", "block"))) in shapes.MASKS["full"]
        else:
            (shape,) = {shape for shape in named if shape.name == bar.case["shape"]}
            if bar.results == "headline":
                assert shape in (FULL.logits, FULL.policy, *FULL.frozen, FULL.trained)
            else:
                assert any(f"--shape {shape.name[:n]} " in commands[bar.results] for n in range(len(shape.name) + 1))
                assert f"--share {float(bar.case['active'].rstrip('%')) / 100}" in commands[bar.results]
                assert "--compiled" in commands[bar.results]


@pytest.mark.parametrize(
    ("verify", "line"),
    [
        ({}, "KERNELS NOT VERIFIED: the step verify did not come to its end\n"),
        (VERIFIED | {"complete": False}, "KERNELS NOT VERIFIED: the step verify did not come to its end\n"),
        (VERIFIED | {"findings": [RIGHT, RIGHT | {"passed": False}]}, "KERNELS WRONG: NLL: nll\n"),
        (VERIFIED | {"environment": HERE | {"sources": "5678"}}, OF_ONE),
        (VERIFIED | {"environment": HERE | {"gpu": None}}, OF_ONE),
        (VERIFIED | {"environment": HERE | {"gpu": H100 | {"multiprocessors": 60}}}, OF_ONE),
    ],
    ids=["missing", "cut", "wrong", "other sources", "another device", "a slice"],
)
def test_without_a_verification_every_verdict_is_unverified(verify, line, tmp_path):
    found = {"headline": [record("ours", 1.0, LLADA)], "corruption": [record("ours", 1.0, BATCH | {"B": 512})]}
    found["corruption"][0]["subject"] = "corruption"
    predicted = [record("ours", 2.0, {"kernel": "k", "V": 7}, "chunk", floor=1.6, extra={"predicted_share": 0.8})]
    first, *lines = written(tmp_path, verify, **found, predicted=predicted)
    assert first == line
    assert {line.split(":")[0] for line in lines} == {"- unverified", "- not measured"}
    assert sum(line.startswith("- unverified") for line in lines) == 3


def test_a_result_with_too_large_an_error_is_wrong_at_any_speed(tmp_path):
    fast = record("ours", 1.0, LLADA, allowed_error=0.02)
    for error, word in (
        (0.01, "met"),
        (0.03, "WRONG (error 0.03, allowed 0.02)"),
        (None, "WRONG (error None, allowed 0.02)"),
    ):
        assert written(tmp_path, headline=[fast | {"error": error}])[1].startswith(f"- {word}: NLL")


def test_failed_candidates_are_named(tmp_path):
    """A failed peer is listed next to those that ran.

    A failure of the package replaces the number, and a failed import appears once.
    """
    failed = {"timing": None, "extra": {"failed": "RuntimeError: no"}}
    (tmp_path / "peers.json").write_text(json.dumps({"imports": {"quack": "ImportError: none", "liger_kernel": None}}))
    lines = written(
        tmp_path,
        headline=[record("ours", 1.0, LLADA) | failed],
        token_nll=[record("ours", 1.0, LLADA, "both"), record("plain", 2.0, LLADA, "both"),
                   record("liger", 1.0, LLADA, "both") | failed],
    )  # fmt: skip
    assert lines[1] == "- not imported: quack (ImportError: none)"
    assert lines[2].startswith("- FAILED: NLL")
    assert lines[2].endswith("copy's speed: RuntimeError: no")
    assert lines[4].endswith("2, bar 1 (beside plain; liger failed: RuntimeError: no)")


def test_a_candidate_of_ours_is_compared_with_its_prediction(tmp_path):
    case = {"what": "chunk", "V": 7}
    times = {"ours": (1.0, None), "one pass": (0.8, 1.14), "no hint": (1.1, None), "in parts": (2.0, 1.5)}
    found = [record(n, s, case, "launch", subject="variants", extra={"gain": gain}) for n, (s, gain) in times.items()]
    assert [line for line in written(tmp_path, variants=found) if "candidate" in line] == [
        "- faster: candidate one pass for chunk, 7: 1.25 times as fast as ours, predicted 1.14",
        "- not faster: candidate in parts for chunk, 7: 0.50 times as fast as ours, predicted 1.50",
    ]
    assert written(tmp_path, {}, variants=found)[-1].startswith("- unverified: candidate in parts")


def test_a_candidate_that_did_not_fit_decides_nothing(tmp_path):
    records = [record("ours", 1.0, LLADA, "both"), record("plain", 1.0, LLADA, "both") | {"timing": None}]
    assert written(tmp_path, token_nll=records)[3].startswith("- not measured")


WRONG = """
import sys
from benchmarks import verify
from dllm_kernels.backends.triton import linear_nll

right = linear_nll.nll_and_grad_

def wrong(logits, *arguments, **options):
    found = right(logits, *arguments, **options)
    logits[-1] *= 1.1
    return found

linear_nll.nll_and_grad_ = wrong
every = verify.checks
verify.checks = lambda options: {name: every(options)[name] for name in ("trained head", "corruption")}
sys.exit(verify.main(sys.argv[1:]))
"""


@pytest.mark.exhaustive
def test_a_wrong_kernel_fails_the_run_and_leaves_every_verdict_unverified(rehearse, monkeypatch, capfd):
    monkeypatch.setattr(on_gpu, "verdicts", verdicts.verdicts)
    real = on_gpu.steps

    def make(work):
        by_name = {step.name: step for step in real(work)}
        *_, subject = by_name["verify"].toy[:4]
        assert subject == "verify"
        wrong = (sys.executable, "-c", WRONG, *by_name["verify"].toy[4:])
        return [replace(by_name["verify"], toy=wrong, minutes=5.0), replace(by_name["headline"], minutes=5.0)]

    status, out = rehearse(make, "--minutes", "11")
    assert status == 1
    assert outcomes(out) == {"verify": "failed with status 1", "headline": "ok"}
    first, empty, *lines = (out / "verdicts.md").read_text().splitlines()
    assert empty == ""
    assert re.match(
        "KERNELS WRONG: NLL from hidden states .* trained head, two chunks: gradient of hidden, worst row", first
    )
    assert "blocks of" not in first  # corruption is correct
    assert {line.split(":")[0] for line in lines} == {"- unverified", "- not measured"}
    assert sum(line.startswith("- unverified") for line in lines) == 5
    assert capfd.readouterr().out.startswith(f"{first}\n")


def test_predictions_are_read_and_never_computed_there(tmp_path):
    roofs = {"H100": {"share": 0.9}, "H200": {"share": 0.8}}
    reports = [
        {
            "kernel": "k",
            "target": "sm_90",
            "passes": [{"roofs": roofs}, {"roofs": {"H200": {"share": 0.7}}}],
            "phases": {},
        },
        {"kernel": "k", "target": "sm_80", "passes": [{"roofs": {"A100": {"share": 0.1}}}], "phases": {}},
        {"kernel": "merge", "target": "sm_90", "passes": [], "phases": {}},
        {
            "kernel": "chunk",
            "target": "sm_90",
            "passes": [{"roofs": roofs}],
            "phases": {"H200": {"100%": 0.6, "90%": 0.5}},
        },
    ]
    model = tmp_path / "model.json"
    model.write_text(json.dumps(reports))
    assert predicted.shares(model, "H200") == {"k": 0.7, "chunk": 0.6}
    assert predicted.shares(None, "H200") == predicted.shares(tmp_path / "none.json", "H200") == {}
    assert predicted.shares(model, None) == {}  # not that of another GPU


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "nothing"], "--steps: must be of verify, .*, got nothing"),
        (["--prepared", "nowhere"], "--prepared: must be a folder with prepared.json, got nowhere"),
        (["--wheels", "nowhere"], "--wheels: must be a folder, got nowhere"),
        (["--resume", "nowhere"], "--resume: must be a folder with results.tar.gz, got nowhere"),
    ],
)
def test_bad_arguments(words, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        on_gpu.main(["--out", str(tmp_path), "--rehearse", *words])
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
