"""A rehearsal of the run on a GPU: its outcomes and results, and what it says without a verification."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import carried, on_gpu, shapes, verdicts
from benchmarks import record as record_of
from benchmarks.on_gpu import Step
from tools import predicted, prepare

STEPS = on_gpu.steps(Path("work"))


class ParsedError(Exception):
    """The arguments are right."""


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_command_of_a_step_parses(step, monkeypatch):
    """``benchmarks smoke`` runs each subject at toy size."""
    files = [word for word in step.command if word.startswith("tests/")]
    assert all((on_gpu.ROOT / file).exists() for file in files)
    assert (step.modules == on_gpu.TEST_MODULES) == ("pytest" in step.command) == bool(files)
    if "compute-sanitizer" in step.command:
        assert step.settings == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if files:
        return

    def parse(*arguments, real=argparse.ArgumentParser.parse_args):
        found = real(*arguments)
        named = [*shapes.LOGITS["full"], *shapes.LINEAR["full"], shapes.POLICY]
        for name in getattr(found, "shape", None) or ():
            assert any(shape.name.startswith(name) for shape in named)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    for _, _, _, subject, *words in (step.command, step.toy):
        with pytest.raises(ParsedError):
            importlib.import_module(command.SUBJECTS[subject].module).main(words)


def shell(name, text, minutes=1.0, **options):
    return Step(name, minutes, ("sh", "-c", text), ("sh", "-c", text), **options)


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


def test_results_are_written_while_steps_run(rehearse, capfd, tmp_path):
    """The second step sees those of the first one and itself, as they stay if the run is killed then."""

    def make(work):
        out = tmp_path / "out"
        seen = f"echo table; sleep 1; tar -xzOf {out}/results.tar.gz b.log; cat {out}/summary.json"
        return [shell("verify", f"echo '{{}}' > {work}/verify.json; echo verified"), shell("b", seen)]

    status, out = rehearse(make)
    assert (status, outcomes(out)) == (0, {"verify": "ok", "b": "ok"})
    assert sorted(path.name for path in out.iterdir()) == ["results.tar.gz", "summary.json", "verdicts.md"]
    found = contents(out)
    assert (found["verify.json"], found["verify.log"]) == ("{}\n", "verified\n")
    assert found["b.log"].startswith("table\ntable\n{")
    assert json.loads(found["b.log"].removeprefix("table\ntable\n"))["running"] == "b"
    printed = capfd.readouterr().out
    assert printed.startswith("- a verdict\n")  # the result of the verification comes before its tables
    assert "left out for lack of time: nothing" in printed


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_every_step_has_its_outcome_and_does_not_stop_the_others(rehearse, capfd):
    """A step that hangs has left its process group. The sanitizer runs on some devices only."""

    def make(work):
        escaped = f"echo \\$\\$ > {work}/pid; trap '' TERM; while true; do sleep 0.1; done"
        hangs = f"""echo 1 > {work}/hangs.json; setsid sh -c "{escaped}" & sleep 60"""
        return [
            shell("hangs", hangs, minutes=0.02),
            shell("fails", f"cp {work}/pid {work}/pid.json; exit 7"),
            shell("too long", "true", minutes=60),
            shell("memcheck", "echo 'Error: Device not supported'; exit 1", needs="sh"),
            shell("tests", "exit 1", modules=("torch", "no_such_package")),
            shell("predicted", "true", input=work / "model.json"),
            shell("measured", "true"),
        ]

    status, out = rehearse(make, "--minutes", "5")
    pids = contents(out)["pid.json"].split()
    assert pids
    assert not any(map(alive, pids))
    assert contents(out)["hangs.json"] == "1\n"  # measured before the end
    assert status == 1
    assert outcomes(out) == {
        "hangs": "ended after its 0.02 minutes",
        "fails": "failed with status 7",
        "memcheck": "left out: sh refuses this device",
        "tests": "left out: no_such_package is not installed",
        "predicted": "left out: model.json is missing",
        "measured": "ok",
    }
    printed = capfd.readouterr().out
    assert "cannot run: tests (no_such_package is not installed), predicted (model.json is missing)" in printed
    assert "left out for lack of time: too long" in printed


def test_a_resumed_run_keeps_results_and_runs_what_is_missing(rehearse, tmp_path, capfd):
    """A verification that was ended runs again, because without it no verdict counts."""

    def make(work):
        first = not (tmp_path / "earlier").exists()
        return [
            shell("verify", "sleep 60" if first else "true", minutes=0.01 if first else 1),
            shell("tune", "echo first" if first else "exit 1"),
            shell("predicted", "true", input=work / "model.json"),
        ]

    _, out = rehearse(make)
    assert outcomes(out)["verify"].startswith("ended")
    out.rename(tmp_path / "earlier")
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / carried.MODEL).write_text("[]")
    (tmp_path / "prepared" / carried.KERNELS).write_bytes(b"cut")  # a cache that cannot be filled stops nothing
    here = {"triton": record_of.version("triton"), "target": "sm_90"}
    for triton, ran in (("0.1", "left out: model.json is missing"), (here["triton"], "ok")):
        (tmp_path / "prepared" / carried.RECORD).write_text(json.dumps(here | {"triton": triton}))
        words = ("--resume", str(tmp_path / "earlier"), "--prepared", str(tmp_path / "prepared"))
        status, out = rehearse(make, *words)
        assert (status, outcomes(out)) == (0, {"verify": "ok", "tune": "ok", "predicted": ran})
    assert contents(out)["tune.log"] == "first\n"
    assert "prepared: predictions alone, ReadError: " in capfd.readouterr().out


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
    done = subprocess.run(command, cwd=on_gpu.ROOT, env=kept, stdout=subprocess.PIPE, text=True, check=True)
    *_, used, found = done.stdout.splitlines()
    assert used.startswith("prepared: predictions, and ")
    count, all_hits, hits = found.split()
    assert (count, all_hits) == (hits, "True")
    assert predicted.shares(folders[2] / carried.MODEL, "H100").keys() == {prepare.PREDICTED[0]}


LLADA = {"shape": shapes.HEADLINE["full"].logits.name, "active": "100%"}
H100 = {"name": "NVIDIA H100 80GB HBM3", "multiprocessors": 132}
HERE = {"sources": "1234", "gpu": H100}
RIGHT = {"check": "NLL", "quantity": "nll", "error": 0.1, "allowed": 0.2, "passed": True}
VERIFIED = {"environment": HERE, "complete": True, "findings": [RIGHT]}
OF_ONE = "kernels verified: 1 comparisons with float64 on all rows\n"


def record(seconds, case, phase, subject, **extra):
    timing = {"q20_s": seconds, "q50_s": seconds, "q80_s": seconds}
    of_case = {"case": case, "phase": phase, "name": "ours", "subject": subject}
    return {"environment": HERE, "results": [of_case | {"timing": timing, "floor_s": 1.0, "extra": extra}]}


@pytest.mark.parametrize(
    ("verify", "line"),
    [
        ({}, "KERNELS NOT VERIFIED: the step verify did not come to its end\n"),
        (VERIFIED | {"complete": False}, "KERNELS NOT VERIFIED: the step verify did not come to its end\n"),
        (VERIFIED | {"findings": [RIGHT, RIGHT | {"passed": False}]}, "KERNELS WRONG: NLL: nll\n"),
        (VERIFIED | {"environment": HERE | {"sources": "5678"}}, OF_ONE),
        (VERIFIED | {"environment": HERE | {"gpu": H100 | {"multiprocessors": 60}}}, OF_ONE),
    ],
    ids=["missing", "cut", "wrong", "other sources", "a slice"],
)
def test_without_a_verification_every_verdict_is_unverified(verify, line, tmp_path):
    chunk = record(2.0, {"kernel": "k", "V": 7}, "chunk", "predicted", predicted_share=0.8)
    files = {"verify": verify, "headline": record(1.0, LLADA, "forward", "token_nll"), "predicted": chunk}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    first, *lines = verdicts.verdicts(tmp_path)
    assert first == line
    assert {line.split(":")[0] for line in lines} == {"- unverified", "- not measured"}
    assert sum(line.startswith("- unverified") for line in lines) == 2
