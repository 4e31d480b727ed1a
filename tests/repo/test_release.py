"""Requirements of a release besides the code: consistent workflows, forms, metadata and texts."""

import re
from pathlib import Path

import pytest

import dllm_kernels

yaml = pytest.importorskip("yaml")
tomllib = pytest.importorskip("tomllib")  # of Python 3.11
ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((GITHUB / "workflows").glob("*.yml"))}
FORMS = {p.stem: yaml.safe_load(p.read_text()) for p in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if p.stem != "config"}
REPORT = "python -m dllm_kernels.report"


def steps():
    for name, workflow in WORKFLOWS.items():
        for job in workflow["jobs"].values():
            yield from ((name, step) for step in job["steps"])


def targets():
    """Return the targets of the Makefile that can be called by name."""
    names = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert all(re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for name in names)
    return names


def test_workflows_run_the_commands_that_a_person_runs():
    commands = {command for _, step in steps() for command in step.get("run", "").splitlines()}
    make_targets = {name for command in commands for name in re.findall(r"\bmake ([\w-]+)", command)}
    assert make_targets == {"test", "test-every-case", "dist"}
    assert make_targets <= set(targets())
    assert ".ci/run" in commands
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    modules = {name for command in commands for name in re.findall(r"-m ([\w.]+)", command)}
    assert modules == {"dllm_kernels.report"}


def test_the_matrix_equals_the_supported_versions():
    matrix = WORKFLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]
    pythons = [c.split(" :: ")[-1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert matrix["python"] == pythons
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    extras = PROJECT["optional-dependencies"]
    required = [*PROJECT["dependencies"], *extras["triton"]]
    assert set(extras["triton"]) < set(extras["test"])
    assert not [name for name in PROJECT["dependencies"] if "triton" in name]  # it would overwrite torch's own
    floors = dict(re.match(r"([\w-]+)>=([\d.]+)", dependency).groups() for dependency in required)
    (pinned,) = re.findall(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    torches = matrix["torch"]
    assert torches[0].startswith(floors["torch"] + ".")
    assert pinned in torches
    tritons = {pair["torch"]: pair["triton"] for pair in matrix["include"]}
    assert list(tritons) == torches == sorted(torches, key=lambda version: [int(part) for part in version.split(".")])
    assert tritons[torches[0]].startswith(floors["triton"] + ".")
    runs = [step["run"] for step in WORKFLOWS["ci"]["jobs"]["oldest"]["steps"] if "run" in step]
    oldest = f"torch=={torches[0]}\\ntriton=={tritons[torches[0]]}\\n"
    assert runs == [f"printf '{oldest}' > constraints.txt", "make test-every-case"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"It requires torch >= {floors['torch']}, and for the kernels Triton >= {floors['triton']}" in readme
    newest = re.search(
        r"`make test` also passes with torch ([\d.]+) .*? and Triton ([\d.]+) under Python ([\d.]+), "
        r"and with torch ([\d.]+) and Triton ([\d.]+) under Python ([\d.]+)\.",
        readme,
    )
    assert newest
    assert (newest[1], newest[4]) == (torches[-1], torches[0])
    assert tritons[torches[-1]].startswith(newest[2] + ".")
    assert tritons[torches[0]].startswith(newest[5] + ".")
    assert {newest[3], newest[6]} <= set(pythons)


def test_publishing_has_no_secret_and_only_it_may_sign():
    text = "".join((GITHUB / "workflows" / f"{name}.yml").read_text() for name in WORKFLOWS)
    assert "secrets." not in text
    assert "password" not in text
    for workflow in WORKFLOWS.values():
        assert workflow["permissions"] == {"contents": "read"}
    jobs = WORKFLOWS["release"]["jobs"]
    assert "permissions" not in jobs["build"]
    publish = jobs["publish"]
    assert (publish["permissions"], publish["needs"], publish["environment"]) == (
        {"id-token": "write"},
        "build",
        "pypi",
    )
    *_, last = publish["steps"]
    assert last["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert last["with"] == {"attestations": True}
    assert not [step for step in publish["steps"] if "run" in step]  # nothing else runs in the job with the identity
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}  # YAML reads "on" as a bool


def test_dependencies_of_workflows_have_a_version():
    used = [step["uses"] for _, step in steps() if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w./-]+@(v\d+|release/v\d+)", name) for name in used)


def test_every_form_asks_for_the_report():
    assert FORMS.keys() == {"bug", "gpu", "request"}
    for name, form in FORMS.items():
        assert form["name"]
        assert form["description"]
        fields = {field["id"]: field for field in form["body"]}
        assert len(fields) == len(form["body"])
        report = fields["report"]
        assert report["attributes"]["label"] == f"Output of `{REPORT}`"
        assert report.get("validations", {}).get("required", False) == (name != "request")


def test_hooks_before_a_commit_are_targets_of_make():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = [hook["entry"] for repository in config["repos"] for hook in repository["hooks"]]
    assert entries == ["make lint", "make types"]
    assert {"lint", "types"} <= set(targets())


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == dllm_kernels.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["title"].startswith("dllm_kernels")
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


def test_the_changelog_keeps_its_format():
    """Keep a Changelog 1.1.0: newest first, a section for unreleased changes, kinds of changes, dates."""
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in versions[1:])
    released = [tuple(map(int, re.findall(r"\d+", version)[:3])) for version in versions[1:]]
    assert released == sorted(released, reverse=True)
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    names_this_version = f"[{dllm_kernels.__version__}]" in text
    unreleased = text.split("## ")[1]
    assert names_this_version or re.search(rf"\b{re.escape(dllm_kernels.__version__)}\b", unreleased)


@pytest.mark.parametrize("name", ["CODE_OF_CONDUCT.md", "SECURITY.md"])
def test_reporting_policies_name_the_security_tab(name):
    text = (ROOT / name).read_text()
    assert "Security tab" in " ".join(text.split())
    assert "@" not in text
