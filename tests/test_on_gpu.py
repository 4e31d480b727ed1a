"""The run on a lent GPU, rehearsed: its plan, every cut, what is left when it is killed, and the verdicts."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks import on_gpu, shapes, verdicts
from benchmarks.on_gpu import Step
from tools import predicted

ORDER = ["predicted", "token_nll", "linear_nll", "row_stats", "corruption", "divergence", "gpu_tests", "parity"]
NAMES = [step.name for step in on_gpu.steps(Path("work"))]


def test_what_decides_most_comes_first():
    assert NAMES[: len(ORDER)] == ORDER


@pytest.mark.parametrize("minutes", [0.5, 9, 17, 28, 60])
def test_the_plan_keeps_to_its_minutes(minutes):
    steps = on_gpu.steps(Path("work"))
    fits, left = on_gpu.plan(steps, minutes)
    assert sum(step.minutes for step in fits) <= max(minutes - on_gpu.RESERVE / 60, 0)
    assert sorted(s.name for s in (*fits, *left)) == sorted(NAMES)
    assert [s for s in steps if s in fits] == fits


def test_a_call_of_9_minutes_holds_what_is_measured_and_three_of_them_what_is_tested():
    steps = on_gpu.steps(Path("work"))
    first, left = on_gpu.plan(steps, 9)
    second, left = on_gpu.plan(left, 9)
    assert [s.name for s in first] == ORDER[:6]
    assert [s.name for s in second] == ORDER[6:]


def test_every_step_has_what_it_needs():
    by_name = {step.name: step for step in on_gpu.steps(Path("work"), Path("model.json"))}
    for name in ("memcheck", "racecheck"):
        assert by_name[name].settings == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    words = " ".join(by_name["parity"].command)
    assert "-m not exhaustive -x" in words
    assert "-v" in words
    assert "--model" in by_name["predicted"].command


def shell(name, text, minutes=1.0, **options):
    return Step(name, minutes, ("sh", "-c", text), ("sh", "-c", text), **options)


def quick(work):
    """All steps, each done at once, with results."""
    return [shell(name, f"""echo table of {name}; echo '{{"results": []}}' > {work}/{name}.json""") for name in NAMES]


def hanging(step, work):
    """That step, which leaves its group, and never ends."""
    escaped = f"echo \\$\\$ > {work}/escaped.pid; trap '' TERM; while true; do sleep 0.1; done"
    text = f"""echo '{{"results": [1]}}' > {work}/{step.name}.json; setsid sh -c "{escaped}" & sleep 60"""
    return shell(step.name, text, minutes=0.02)


@pytest.fixture
def rehearse(monkeypatch, tmp_path):
    """(make the steps, arguments) -> (status, folder of results)."""
    monkeypatch.setattr(on_gpu, "REFRESH", 0.1)
    monkeypatch.setattr(on_gpu, "RESERVE", 0.0)
    monkeypatch.setattr(on_gpu, "PATIENCE", 0.3)
    monkeypatch.setattr(on_gpu, "verdicts", lambda folder: ["- a verdict"])

    def run(make, *words):
        monkeypatch.setattr(on_gpu, "steps", lambda work, model=None: make(work))
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


def test_every_step_runs_and_everything_comes_home_in_three_files(rehearse, capfd):
    status, out = rehearse(quick)
    assert status == 0
    assert sorted(path.name for path in out.iterdir()) == ["results.tar.gz", "summary.json", "verdicts.md"]
    assert outcomes(out) == dict.fromkeys(NAMES, "ok")
    found = contents(out)
    assert {f"{name}{end}" for name in NAMES for end in (".json", ".log")} < set(found)
    assert found["tune.log"] == "table of tune\n"
    printed = capfd.readouterr().out
    assert (
        printed.index("table of predicted") < printed.index("=== predicted: ok") < printed.index("table of token_nll")
    )
    assert "left out for lack of time: nothing" in printed


EACH = [
    pytest.param(place, id=name, marks=[pytest.mark.exhaustive] if name not in (NAMES[0], NAMES[-1]) else [])
    for place, name in enumerate(NAMES)
]


@pytest.mark.parametrize("place", EACH)
def test_a_step_past_its_share_is_ended_with_all_it_started(place, rehearse, monkeypatch):
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
    assert json.loads(contents(out)[f"{NAMES[place]}.json"]) == {"results": [1]}  # what was measured before the cut


def test_what_does_not_fit_is_named_and_time_that_is_left_is_used(rehearse, capfd):
    """The second of three is too long; the third fits, though not if the first took its share."""

    def make(work):
        return [shell("a", "true", 0.9), shell("b", "true", 5), shell("c", "true", 0.9)]

    status, out = rehearse(make, "--minutes", "1")
    printed = capfd.readouterr().out
    assert status == 0
    assert outcomes(out) == {"a": "ok", "c": "ok"}
    assert "fits: a 0.9 min" in printed
    assert "fits only if others take less: b, c" in printed
    assert "left out for lack of time: b" in printed


def test_a_resumed_run_goes_on_and_keeps_what_there_is(rehearse, tmp_path):
    _, out = rehearse(quick, "--steps", "predicted", "tune")
    earlier = out.rename(tmp_path / "earlier")
    assert set(outcomes(earlier)) == {"predicted", "tune"}

    def make(work):
        return [shell(s.name, "exit 1") if s.name in ("predicted", "tune") else s for s in quick(work)]

    status, out = rehearse(make, "--resume", str(earlier))
    assert status == 0  # neither ran again
    assert outcomes(out) == dict.fromkeys(["predicted", "tune", *NAMES], "ok")
    assert {"predicted.log", "predicted.json", "parity.log"} < set(contents(out))


def test_a_failure_keeps_nothing_from_running(rehearse):
    status, out = rehearse(lambda work: [shell("a", "exit 7"), shell("b", "true")])
    assert status == 1
    assert outcomes(out) == {"a": "failed with status 7", "b": "ok"}


def test_a_sanitizer_that_refuses_the_device_is_no_failure(rehearse):
    text = "echo '========= Error: Device not supported. Please refer to the \"Supported Devices\" section'; exit 1"
    status, out = rehearse(lambda work: [shell("memcheck", text, needs="sh"), shell("racecheck", "exit 3", needs="sh")])
    assert status == 1
    assert outcomes(out) == {"memcheck": "left out: sh refuses this device", "racecheck": "failed with status 3"}


def test_wheels_that_cannot_be_installed_do_not_cost_the_run(rehearse, tmp_path, capfd):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "peer-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    status, out = rehearse(lambda work: [shell("a", "echo $PYTHONPATH")], "--wheels", str(wheels))
    assert status == 0
    assert "measured without peers" in capfd.readouterr().out
    assert contents(out)["a.log"].startswith("/")


KILLED = """
import sys
from tests import test_on_gpu as t
t.on_gpu.REFRESH = 0.1
t.on_gpu.steps = lambda work, model=None: [t.quick(work)[0], t.shell("tune", f"echo 1 > {work}/tune.json; echo $$; sleep 60")]
t.on_gpu.main(["--out", sys.argv[1], "--rehearse"])
"""


def test_whoever_kills_it_has_what_was_measured(tmp_path):
    """Also of the step that was under way."""
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
    assert (found["predicted.json"], found["tune.json"]) == ('{"results": []}\n', "1\n")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (list(summary["steps"]), summary["running"]) == (["predicted"], "tune")
    assert len(list(tmp_path.iterdir())) <= 8


def record(name, seconds, case, phase="forward", floor=1.0, **extra):
    timing = {"q20_s": seconds, "q50_s": seconds, "q80_s": seconds}
    return {"case": case, "phase": phase, "name": name, "timing": timing, "floor_s": floor, "extra": extra}


def written(folder, **files):
    for name, records in files.items():
        (folder / f"{name}.json").write_text(json.dumps({"results": records}))
    return verdicts.verdicts(folder)


def test_every_bar_has_its_verdict(tmp_path):
    llada, dflash = verdicts._LLADA | {"rows": 4096}, verdicts._DFLASH
    lines = written(
        tmp_path,
        token_nll=[record("ours", 1.05, llada), record("ours", 2.0, llada, "both"), record("liger", 1.9, llada, "both")],
        linear_nll=[record("ours", 1.1, dflash, "both"), record("bare products", 1.0, dflash, "both")],
        corruption=[record("ours", 1.0, verdicts._BATCH), record("original", 11.0, verdicts._BATCH)],
        predicted=[record("ours", 2.0, {"kernel": "k", "V": 7}, "chunk", floor=1.2, predicted_share=0.8)],
    )  # fmt: skip
    assert [line.split(":")[0] for line in lines] == [
        "- met", "- NOT MET", "- NOT MET", "- met", "- not measured", "- met", "- not measured", "- not measured", "- NOT MET",
    ]  # fmt: skip
    assert lines[0].endswith("of a copy's speed: 0.952, bar 0.9")
    assert lines[8] == "- NOT MET: k at V 7, chunk: 0.75 of its prediction, bar 0.9 to 1.1"


def test_what_the_bars_ask_for_is_measured():
    named = {shape.name for shape in (*shapes.LOGITS["full"], *shapes.LINEAR["full"], shapes.POLICY)}
    commands = {step.name: " ".join(step.command) for step in on_gpu.steps(Path("work"))}
    for bar in verdicts.BARS:
        if bar.results == "corruption":
            assert shapes.MaskShape(*(bar.case[key] for key in ("B", "L", "block"))) in shapes.MASKS["full"]
        else:
            (shape,) = (name for name in named if name == bar.case["shape"])
            assert any(f"--shape {shape[:n]} " in commands[bar.results] for n in range(len(shape) + 1))
            assert f"--share {float(bar.case['active'].rstrip('%')) / 100}" in commands[bar.results]


def test_a_candidate_that_did_not_fit_decides_nothing(tmp_path):
    llada = verdicts._LLADA
    records = [record("ours", 1.0, llada, "both"), record("plain", 1.0, llada, "both") | {"timing": None}]
    assert written(tmp_path, token_nll=records)[2].startswith("- not measured")


def test_predictions_are_read_and_never_made_there(tmp_path):
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
    assert predicted.shares(None, "H200") == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "nothing"], "--steps: must be of predicted, .*, got nothing"),
        (["--wheels", "nowhere"], "--wheels: must be a folder, got nowhere"),
        (["--model", "nowhere"], "--model: must be a file, got nowhere"),
        (["--resume", "nowhere"], "--resume: must be a folder with results.tar.gz, got nowhere"),
    ],
)
def test_bad_arguments(words, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        on_gpu.main(["--out", str(tmp_path), "--rehearse", *words])
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))
