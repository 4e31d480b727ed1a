"""The figures in README and docs equal the committed results."""

import json
import re

import pytest

from benchmarks import plots
from benchmarks.result import Timing
from examples.demo import train
from tests.support.readme import DOCS, README, ROOT

RESULTS = ROOT / "benchmarks" / "results"
MEASURED = RESULTS / "amd-epyc-2-cores"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="a source distribution holds no results")
SIZES = ({"B": 1, "L": 1024}, {"B": 8, "L": 4096}, {"B": 64, "L": 4096})
HALF = {"shape": "CPU 2x960", "active": "50%"}
LINEAR = {"V": 32000, "D": 512, "active": "50%"}
# First words of a row -> (file, phase, compared implementation, its cases).
ROWS = {
    "MDLM loss": ("token_nll", "both", "original", [HALF | {"V": 32000}]),
    "DFlash from hidden states, frozen head": ("linear_nll", "both", "original", [LINEAR | {"head": "frozen"}]),
    "DFlash from hidden states, trainable head": ("linear_nll", "both", "original", [LINEAR | {"head": "trainable"}]),
    "`fused_head` around a loop over masked rows": ("fused_head", "both", "plain", [{"loop": "masked rows"}]),
    "`fused_head` around a loop over all rows": ("fused_head", "both", "plain", [{"loop": "all rows"}]),
    "log-probabilities and entropy": ("row_stats", "both", "plain", [HALF | {"form": "logits", "V": 32000}]),
    "SCDD loss": ("scdd", "both", "original", [HALF | {"loss": "scdd"}]),
    "`corrupt_blockwise`": (
        *("corruption", "forward", "original"), [s | {"routine": "blockwise", "block": 32} for s in SIZES]
    ),
    "`corrupt_uniform_random`": (
        *("corruption", "forward", "original"), [s | {"routine": "uniform_random", "block": 32} for s in SIZES]
    ),
    "`corrupt_uniform`": (
        *("corruption", "forward", "original"), [s | {"routine": "uniform", "block": "-"} for s in SIZES]
    ),
    "`corrupt_mix`": ("corruption", "forward", "original", [s | {"routine": "mix", "block": "-"} for s in SIZES]),
    "`corrupt_all_masked`": ("corruption", "forward", "original", [SIZES[1] | {"routine": "all_masked", "block": "-"}]),
    "the collator": (
        *("collate", "collate", "original"), [{"samples": 8, "up to": 1024}, {"samples": 32, "up to": 4096}]
    ),
}  # fmt: skip


def results(path):
    return json.loads(path.read_text())


def ratios(found, phase, other, case):
    """Return (speed, memory) of the package relative to the other; the slower one of several settings of one size."""
    by_case = {}
    for result in found:
        if result["phase"] == phase and case.items() <= result["case"].items():
            by_case.setdefault(tuple(result["case"].items()), {})[result["name"]] = result
    assert by_case, case
    pairs = [(names["ours"], names[other]) for names in by_case.values()]
    speed, ours, theirs = min((b["timing"]["q50_s"] / a["timing"]["q50_s"], a, b) for a, b in pairs)
    return speed, ours["peak_bytes"] and theirs["peak_bytes"] and ours["peak_bytes"] / theirs["peak_bytes"]


def printed(cell):
    return re.findall(r"([\d.]+)x", cell)


def agree(shown, exact):
    """Compare to as many decimals as are printed."""
    decimals = len(shown.partition(".")[2])
    return abs(float(shown) - exact) <= 0.5 * 10**-decimals


def table(path):
    text = re.split("## Masked rows gathered|Compared with a loop that gathers", path.read_text())[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| .*\dx", line)]
    assert rows
    return rows


@pytest.mark.parametrize("page", [README, DOCS / "benchmarks.md"], ids=lambda path: path.name)
def test_the_table_equals_the_results(page):
    for label, _, speeds, *memory in table(page):
        (name,) = (name for name in ROWS if re.match(re.escape(name) + r"(\W|$)", label))
        file, phase, other, cases = ROWS[name]
        found = results(MEASURED / f"{file}.json")
        exact = [ratios(found["results"], phase, other, case) for case in cases]
        shown = printed(speeds)
        assert len(shown) >= len(exact)
        for figure, (speed, _) in zip(shown, exact, strict=False):
            assert agree(figure, speed), (label, figure, speed)
        if len(shown) > len(exact):  # next to it, in words, the figure over the counted rows alone
            assert "only the active rows are gathered" in speeds
            assert agree(shown[1], ratios(found["results"], phase, "gather", cases[0])[0])
        if memory and printed(memory[0]):
            assert agree(printed(memory[0])[0], exact[0][1]), label
        if page.parent == DOCS:
            samples = re.search(r"medians of (\d+)", label)
            assert found["options"]["samples"] == int(samples[1] if samples else 20), label


def gathered():
    """Return (loss, compared loop) -> (speeds of the package in the rounds, its memory over that of the loop)."""
    found = {(r["case"]["loss"], r["name"]): r for r in results(MEASURED / "gathered.json")["results"]}
    ours = {loss: result for (loss, name), result in found.items() if name == "ours"}
    return {
        (loss, name): (
            [b / a for a, b in zip(ours[loss]["samples_s"], other["samples_s"], strict=True)],
            ours[loss]["peak_bytes"] / other["peak_bytes"],
        )
        for (loss, name), other in found.items()
    }


@pytest.mark.parametrize("page", [README, DOCS / "benchmarks.md"], ids=lambda path: path.name)
def test_the_loop_over_gathered_rows_equals_the_results(page):
    """Speeds are quantiles of the ratios within a round; the sentence of the first screen has their medians."""
    file, ratios_of = results(MEASURED / "gathered.json"), gathered()
    assert not file["environment"]["modified"]
    assert (file["options"]["threads"], file["options"]["processor_time"]) == (1, True)
    text = re.split("## Masked rows gathered|Compared with a loop that gathers", page.read_text())[1]
    assert f"ratios in {file['options']['samples']} rounds" in " ".join(text.split())
    rows = re.findall(r"^\| (MDLM|DFlash|`fused_head`) (.*) \|$", text.split("## ")[0], re.MULTILINE)
    assert [label for label, _ in rows] == ["MDLM", "DFlash", "`fused_head`"]
    for label, cells in rows:
        shown = re.findall(r"([\d.]+)x \(([\d.]+) to ([\d.]+)\) \| ([\d.]+)x", cells)
        for (speed, low, high, memory), name in zip(shown, ("gather", "gather, compiled"), strict=True):
            rounds, exact = ratios_of[label.strip("`"), name]
            timing = Timing(tuple(rounds))
            for figure, q in ((speed, 0.5), (low, 0.2), (high, 0.8)):
                assert agree(figure, timing.quantile(q)), (label, name, figure)
            assert agree(memory, exact), (label, name, memory)


def test_the_first_screen_states_the_loop_over_gathered_rows():
    text = " ".join(README.read_text().split())
    factors = r"([\d.]+) to ([\d.]+) times"
    shown = re.findall(rf"takes {factors} as long[^,]*, with {factors} the memory", text)
    for figures, name in zip(shown, ("gather", "gather, compiled"), strict=True):
        found = [value for (_, other), value in gathered().items() if other == name]
        speeds, memories = [Timing(tuple(rounds)).median for rounds, _ in found], [1 / m for _, m in found]
        for figure, exact in zip(figures, (min(speeds), max(speeds), min(memories), max(memories)), strict=True):
            assert agree(figure, exact), (name, figure, exact)


def test_the_loops_equal_the_results():
    text = (DOCS / "code-bases.md").read_text().split("## How fast the loops are")[1].split("\n## ")[0]
    found = results(MEASURED / "fused_head.json")["results"]
    rows = re.findall(r"^\| (.*) \| (.*) \| ([\d.]+)x \| ([\d.]+)x \|$", text, re.MULTILINE)
    assert {row[0] for row in rows} == {result["case"]["loop"] for result in found}
    for loop, _, *shown in rows:
        for figure, exact in zip(shown, ratios(found, "both", "plain", {"loop": loop}), strict=True):
            assert agree(figure, exact), (loop, figure, exact)


def test_the_divergences_equal_the_results():
    text = (DOCS / "benchmarks.md").read_text().split("## Divergences")[1]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    assert [kind for kind, _ in rows] == ["kl", "jsd", "tv", "l1", "nla"]
    file = results(MEASURED / "divergence_kinds.json")
    assert file["options"]["samples"] == 3
    found = file["results"]
    for kind, cells in rows:
        case = {"shape": "CPU 2x960 frozen", "rows": 960, "V": 32000, "kind": kind}
        speed, memory = ratios(found, "both", "plain", case)
        products, _ = ratios(found, "both", "products", case)
        for figure, exact in zip(printed(cells), (speed, memory, products), strict=True):
            assert agree(figure, exact), (kind, figure, exact)


def test_the_options_of_the_head_equal_the_results():
    text = (DOCS / "benchmarks.md").read_text().split("## Options of the head")[1].split("## ")[0]
    rows = [printed(line) for line in text.splitlines() if re.match(r"\| .*\dx", line)]
    nll, sample = (results(MEASURED / f"{file}.json") for file in ("head_options", "linear_sample"))
    assert not nll["environment"]["modified"]
    assert [f"medians of {file['options']['samples']}" in text for file in (nll, sample)] == [True] * 2
    by_case = {(i, result["name"]): result for i, file in enumerate((nll, sample)) for result in file["results"]}
    pairs = [(0, "float32 logits", "plain, float32 logits"), (0, "LoRA", "plain, LoRA"), (0, "ours", "plain")]
    pairs += [(1, name, "plain") for name in ("ours", "greedy", "top 8")]
    for figures, (i, name, other) in zip(rows, pairs, strict=True):
        this, that = by_case[i, name], by_case[i, other]
        assert agree(figures[0], that["timing"]["q50_s"] / this["timing"]["q50_s"]), name
        assert agree(figures[1], this["peak_bytes"] / that["peak_bytes"]), name
        if i:
            assert agree(figures[2], by_case[1, "product"]["timing"]["q50_s"] / this["timing"]["q50_s"]), name
    two = results(MEASURED / "linear_sample_two_threads.json")
    found = {result["name"]: result["timing"]["q50_s"] for result in two["results"]}
    shown = re.search(r"with medians of (\d+), the last column is ([\d.]+), ([\d.]+) and ([\d.]+), because", text)
    assert int(shown[1]) == two["options"]["samples"]
    for figure, name in zip(shown.groups()[1:], ("ours", "greedy", "top 8"), strict=True):
        assert agree(figure, found["product"] / found[name]), name


def test_the_policy_update_equals_the_results():
    text = (DOCS / "benchmarks.md").read_text().split("## Policy gradients")[1].split("## ")[0]
    rows = [printed(line) for line in text.splitlines() if re.match(r"\| .*\dx", line)]
    file = results(MEASURED / "policy.json")
    assert f"medians of {file['options']['samples']}" in text
    assert not file["environment"]["modified"]
    found = {result["name"]: result for result in file["results"]}
    for name, figures in zip(("ours", "gather", "trl"), rows, strict=True):
        this, plain = found[name], found["plain"]
        assert agree(figures[0], plain["timing"]["q50_s"] / this["timing"]["q50_s"]), name
        assert agree(figures[1], this["peak_bytes"] / plain["peak_bytes"]), name


def test_the_demo_equals_the_results():
    found = results(MEASURED / "demo_mdlm.json")
    assert {name: found["options"][name] for name in train.PRESETS["cpu"]} == train.PRESETS["cpu"]
    plain, ours = found["table"]
    assert ours["heldout_last"] < found["frequency_guess"]
    memory, time = ours["peak_bytes"] / plain["peak_bytes"], ours["step_seconds"] / plain["step_seconds"]
    text = " ".join((DOCS / "examples.md").read_text().split())
    (shown,) = re.findall(r"the step takes ([\d.]+)x the memory and ([\d.]+)x the time", text)
    assert agree(shown[0], memory)
    assert agree(shown[1], time)
    (shown,) = re.findall(r"held-out text ends at ([\d.]+) nats, .* alone gives ([\d.]+):", text)
    assert agree(shown[0], ours["heldout_last"])
    assert agree(shown[1], found["frequency_guess"])
    shown = f"{found['options']['steps']} steps on two cores of an {found['environment']['cpu']['model']}"
    assert f"The figure shows {shown}" in text
    assert f"a vocabulary of {found['options']['vocab']:,}" in text
    (shown,) = re.findall(r"in (\d+) s of processor time", text)
    assert agree(shown, found["processor_seconds"])
    assert found["processor_seconds"] < 120  # README: under two minutes, also if all of it ran on one core


def test_results_are_of_one_commit():
    """The page states that all rows but those of `fused_head` are of one commit; nothing was uncommitted."""
    found = {file: results(MEASURED / f"{file}.json")["environment"] for file in {row[0] for row in ROWS.values()}}
    assert not any(environment["modified"] for environment in found.values())
    assert len({environment["commit"] for file, environment in found.items() if file != "fused_head"}) == 1


def test_the_pictures_equal_the_results():
    """``python -m benchmarks plots`` has drawn them from the committed results."""
    for name, text in plots.drawn(MEASURED).items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, name
    assert not results(MEASURED / "memory.json")["environment"]["modified"]


def test_the_first_screen_states_the_times_of_the_table():
    """The smallest and the largest share of the baseline's time, over the losses of the table."""
    rows = [row for row in table(README) if "forward + backward" in row[0] or "DFlash" in row[0]]
    shares = []
    for label, *_ in rows:
        (name,) = (name for name in ROWS if re.match(re.escape(name) + r"(\W|$)", label))
        file, phase, other, cases = ROWS[name]
        shares.append(1 / ratios(results(MEASURED / f"{file}.json")["results"], phase, other, cases[0])[0])
    (shown,) = re.findall(r"losses take ([\d.]+) to ([\d.]+) of the time", " ".join(README.read_text().split()))
    assert agree(shown[0], min(shares))
    assert agree(shown[1], max(shares))
