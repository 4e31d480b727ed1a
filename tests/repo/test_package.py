import os
import re
import runpy
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

import dllm_kernels
from tests.conftest import usually

ROOT = Path(__file__).parents[2]


REPOSITORY = {
    "GITHUB_SERVER_URL": "https://forge.example",
    "GITHUB_REPOSITORY": "who/what",
    "GITHUB_REF_NAME": "v1.2.3",
}


def run(folder, *command, **environment):
    """Return the output of a command in a folder, without the variables that the tests or a runner set."""
    kept = {name: value for name, value in os.environ.items() if name not in (*REPOSITORY, "PYTHONPATH")}
    command = [str(part) for part in command]
    done = subprocess.run(command, cwd=folder, env=kept | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind, source, out, **environment):
    run(out, sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, source, **environment)
    (path,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with zipfile.ZipFile(build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


def read_metadata(wheel):
    (name,) = (n for n in wheel.namelist() if n.endswith("METADATA"))
    return wheel.read(name).decode()


def test_holds_the_package_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"dllm_kernels", f"dllm_kernels-{dllm_kernels.__version__}.dist-info"}
    packed = {name for name in wheel.namelist() if name.startswith("dllm_kernels/")}
    here = {p.relative_to(ROOT).as_posix() for p in (ROOT / "dllm_kernels").rglob("*") if p.suffix in {".py", ".typed"}}
    assert packed == here


def test_carries_types_and_license(wheel):
    names = wheel.namelist()
    assert "dllm_kernels/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)


def test_metadata(wheel):
    metadata = read_metadata(wheel)
    assert f"Version: {dllm_kernels.__version__}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert "Requires-Dist: torch>=2.11" in metadata
    assert "Classifier: Programming Language :: Python :: 3.13" in metadata
    assert "Project-URL" not in metadata  # built without a named repository


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Build the sdist, and the wheel from it, as ``make dist`` and a release do, in a named repository."""
    folder = tmp_path_factory.mktemp("release")
    sdist = build("sdist", ROOT, folder, **REPOSITORY)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return sdist, build("wheel", source, folder, **REPOSITORY), source


@pytest.mark.exhaustive
def test_the_sdist_builds_the_same_wheel_and_names_its_repository(release, wheel):
    _, path, _ = release
    with zipfile.ZipFile(path) as built:
        same = {name for name in built.namelist() if name.startswith("dllm_kernels/")}
        assert same == {name for name in wheel.namelist() if name.startswith("dllm_kernels/")}
        assert all(built.read(name) == wheel.read(name) for name in same)
        metadata = read_metadata(built)
    assert "Project-URL: Issues, https://forge.example/who/what/issues\n" in metadata
    _, _, readme = metadata.partition("\n\n")
    links = re.findall(r"\]\(([^)]*)\)", readme)
    assert "https://forge.example/who/what/blob/v1.2.3/CONTRIBUTING.md" in links
    assert all(re.match("https?://|#", link) for link in links)
    _, _, elsewhere = read_metadata(wheel).partition("\n\n")
    assert elsewhere.strip() == (ROOT / "README.md").read_text().strip()


def test_links_of_the_readme_work_outside_of_the_repository():
    pytest.importorskip("hatchling")
    absolute = runpy.run_path(str(ROOT / "hatch_build.py"))["absolute"]
    text = "[a](docs/a.md#b), ![c d](e/f.png) [g](https://h.example) [i](#j) `x[0](y)` [`k`](l)\n```\nx[0](y)\n```\n"
    assert absolute(text, "https://f.example/o/r", "v1") == (
        "[a](https://f.example/o/r/blob/v1/docs/a.md#b), ![c d](https://f.example/o/r/raw/v1/e/f.png) "
        "[g](https://h.example) [i](#j) `x[0](y)` [`k`](https://f.example/o/r/blob/v1/l)\n```\nx[0](y)\n```\n"
    )


@pytest.mark.exhaustive
def test_the_sdist_contains_the_files_that_its_tests_read(release):
    sdist, *_ = release
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no checkout of git, which knows what belongs to the project")
    ours = {name for name in listed.stdout.splitlines() if not name.startswith("benchmarks/results/")}
    with tarfile.open(sdist) as archive:  # building a wheel has left compiled files in the unpacked folder
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert packed - ours == {"PKG-INFO"}
    assert not ours - packed


@pytest.mark.exhaustive
def test_the_metadata_passes_the_check_of_an_index(release):
    pytest.importorskip("twine")
    sdist, wheel, _ = release
    printed = run(sdist.parent, sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    assert printed.count("PASSED") == 2


INSTALLED = """
import runpy, dllm_kernels
print(dllm_kernels.__file__)
runpy.run_module("dllm_kernels.report", run_name="__main__")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", usually(["wheel"], ["wheel", "sdist"]))  # the release builds its wheel from the sdist
def test_it_installs_into_a_fresh_environment(release, kind, tmp_path):
    """It uses this environment's torch and hatchling, so that nothing is downloaded, and sees nothing else of it."""
    fresh = tmp_path / "fresh"
    pips = [int(found.version.partition(".")[0]) for found in distributions(name="pip")]
    another = (
        max(pips, default=0) < 23
    )  # an older one installs nowhere else; a pip for the environment alone takes seconds
    venv.create(fresh, with_pip=another)
    python = fresh / ("Scripts" if os.name == "nt" else "bin") / "python"
    (site,) = fresh.rglob("site-packages")
    Path(site, "others.pth").write_text(str(Path(torch.__file__).parent.parent))
    quiet = ("--disable-pip-version-check", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    pip = (python, "-m", "pip") if another else (sys.executable, "-m", "pip", "--python", python)
    run(tmp_path, *pip, "install", *quiet, "--force-reinstall", release[0 if kind == "sdist" else 1])
    where, report = run(tmp_path, python, "-c", INSTALLED).split("\n", 1)
    assert Path(where).is_relative_to(site)
    assert f"dllm_kernels: {dllm_kernels.__version__}" in report
    assert "backend=torch on cpu: torch, right" in report
