"""Every kernel that public functions launch, compiled for four GPUs without one: no spills, and the bounds of each."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

# The first run on a machine compiles every kernel for two GPUs, which takes minutes. Later runs find them in Triton's
# cache.
pytestmark = pytest.mark.timeout(3600)

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "dllm_kernels" / "backends" / "triton"
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])

# Rows of bfloat16 whose instructions are judged: plain and scaled NLLs, statistics, samples, and kinds of divergences.
JUDGED = (
    *("[bf16]", "[bf16, correct]", "[bf16, ids]", "[bf16, weight=*fp32]", "[bf16, correct, weight=*fp32]"),
    "[bf16, factor=*fp32]",
    *("[bf16, logit_scale=i64]", "[bf16, correct, logit_scale=i64]", "[bf16, entropy]", "[bf16, correct, entropy]"),
    *("row_stats_bwd[bf16, BLOCK", "row_stats_bwd[bf16, log, BLOCK", "sample[bf16, noise", "[bf16, grad, fast]"),
    *("[bf16, grad, fast, tv=i64]", "[bf16, grad, fast, rkl=i64]", "[bf16, grad, fast, jsd=i64]"),
    "[bf16, grad, fast, out=",
)
# Arguments of ``inspect``. To disassemble a kernel takes a second, so it is limited to kernels whose instructions are
# tested.
USUAL = "--kernel [bf16 --kernel [fp32 --kernel [i64 --kernel [u1"
RUNS = {
    "real": f"--target sm_90 --target gfx942 {USUAL} " + " ".join(f"--roofline '{n}'" for n in JUDGED),
    "real, other dtypes": "--no-roofline --target sm_90 --target gfx942 --kernel [fp16 --kernel [fp64",
    "real, bf16": "--target sm_80 --target sm_100 --kernel [bf16 --roofline [bf16",
    "real, others": "--target sm_80 --target sm_100 --no-roofline",
    "odd": "--no-roofline --calls odd --target sm_90 --kernel [bf16",
    "odd, others": "--no-roofline --calls odd --target sm_90 --kernel [fp --kernel [i",
    "odd, AMD": "--no-roofline --calls odd --target gfx942",
}


def inspect(run, out):
    """Run ``inspect`` in a separate process, because Triton interprets in this one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    arguments = [*shlex.split(RUNS[run]), "--json", "--out", str(out)]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks", "inspect", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr[-2000:]
    assert json.loads(done.stdout) == json.loads(out.read_text())


@pytest.fixture(scope="session")
def reports(once):
    """Return a function from the name of a run to the records of ``python -m benchmarks inspect``."""
    return lambda run: json.loads(once(f"inspect_{run}.json", partial(inspect, run)).read_text())


def spills(records):
    """Return the kernels that spill, with bytes; raise an error if the report is empty."""
    assert records, "nothing was compiled"
    assert all(r["registers"] > 0 for r in records)
    return [(r["kernel"], r["spills"]) for r in records if r["spills"] != 0]


def usual(reports, target):
    """Return the records of the usual calls: of the usual dtypes, and for two similar GPUs those of bfloat16."""
    run = "real" if target in COMPILED["real"] else "real, bf16"
    return [r for r in reports(run) if r["target"] == target]


# The kernels of bfloat16 have nearly the most registers, and float32 the widest rows. These, and the kernels of token
# ids, are compiled for two GPUs, and unaligned calls of bfloat16 for one. All others are compiled with every case.
COMPILED = {
    "real": ("sm_90", "gfx942"), "real, other dtypes": ("sm_90", "gfx942"),
    "real, bf16": ("sm_80", "sm_100"), "real, others": ("sm_80", "sm_100"),
    "odd": ("sm_90",), "odd, others": ("sm_90",), "odd, AMD": ("gfx942",),
}  # fmt: skip
# The compiler of Triton 3.6 spills some bytes of a few kernels.
MOST_BYTES_SPILLED = {((3, 6), "gfx942"): 20, ((3, 6), "sm_90"): 8}
OF_TRITON_3_9 = 1.02 if TRITON < (3, 9) else 1.0  # most issue slots over those of Triton 3.9, to which limits refer
EVERY_CASE = "real, other dtypes", "real, bf16", "real, others", "odd, others", "odd, AMD"
exhaustive = pytest.mark.exhaustive


def of_targets(targets):
    """Return the parameter ``target``; two GPUs run with every case only, because sm_90 is similar."""
    similar = pytest.mark.every_case
    return pytest.mark.parametrize(
        "target", [pytest.param(t, marks=similar if t in COMPILED["real, bf16"] else ()) for t in targets]
    )


@exhaustive
@pytest.mark.parametrize(
    ("run", "target"),
    [
        pytest.param(run, target, marks=pytest.mark.every_case if run in EVERY_CASE else ())
        for run, targets in COMPILED.items()
        for target in targets
    ],
)
def test_nothing_spills(run, target, reports):
    allowed = MOST_BYTES_SPILLED.get((TRITON, target), 0)
    spilled = spills([r for r in reports(run) if r["target"] == target])
    assert [(kernel, nbytes) for kernel, nbytes in spilled if nbytes > allowed] == []


def jit_nodes():
    """Yield every function of the package under ``triton.jit``."""
    for path in sorted(KERNELS.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                yield node


def jit_functions():
    """Yield the name of each of these functions, and the names that it mentions."""
    for node in jit_nodes():
        names = (getattr(n, "id", getattr(n, "attr", None)) for n in ast.walk(node))  # f, and f of module.f
        yield node.name, {*names}


def test_no_tuple_is_assigned_to_a_nested_tuple():
    """Triton 3.6 does not compile ``a, (b,) = ...``; its interpreter runs it."""
    targets = (
        (node.name, target)
        for node in jit_nodes()
        for n in ast.walk(node)
        for target in (n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.For) else [])
    )
    nested = [
        f"{name}: {ast.unparse(target)}"
        for name, target in targets
        if any(isinstance(element, (ast.Tuple, ast.List)) for element in getattr(target, "elts", []))
    ]
    assert nested == []


@exhaustive
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_every_kernel_is_launched_by_a_public_function(target, reports):
    functions = [*jit_functions()]  # two files may use the same name
    called = set().union(*(names for _, names in functions))
    launched = {r["function"] for r in usual(reports, target)}
    assert {name.lstrip("_") for name, _ in functions if name not in called} == launched


@exhaustive
@of_targets(TARGETS)
def test_rows_of_logits_move_sixteen_bytes_at_a_time(target, reports):
    records = usual(reports, target)
    rows = [r for r in records if "nll" in r["function"] and r["function"] != "token_nll_merge"]
    assert rows
    assert [r["kernel"] for r in rows if r["widest_access"] != 16] == []


WITH_ARGMAX = re.compile("correct|ids")
# Static roofline of bf16 rows: required values, so that a later change cannot lose them unnoticed.
MOST_SLOTS = {"forward": 9, "gradient": 12}
WEIGHTS = ("weight=*fp32", "factor=*fp32")
LEAST_LOADS, LEAST_BYTES_IN_FLIGHT = 4, 24 * 1024
counted_targets = of_targets(("sm_80", "sm_90"))


def counted(reports, target):
    return [r for r in usual(reports, target) if "[bf16" in r["kernel"]]


def row_passes(reports, target):
    """Return (kernel, kind of pass, its figures) of the kernels over rows of bf16 logits.

    A pass that stores computes the gradient. Logits are plain or scaled. Kernels with a cap or a skipped column are
    omitted, because both need extra slots.
    """
    rows = [r for r in counted(reports, target) if "nll" in r["function"]]
    rows = [r for r in rows if "inv_softcap=" not in r["kernel"] and "skip_id=" not in r["kernel"]]
    rows = [r for r in rows if not r["function"].endswith("merge")]
    assert all(r["passes"] for r in rows)
    return [(r["kernel"], "gradient" if p["bytes"] > 2 else "forward", p) for r in rows for p in r["passes"]]


@exhaustive
@counted_targets
def test_every_row_kernel_is_counted(target, reports):
    found = {}
    for kernel, which, _ in row_passes(reports, target):
        found.setdefault(kernel.partition("[")[0], []).append((which, *WITH_ARGMAX.findall(kernel)))
    forward, gradient = ({(which,), (which, "correct"), (which, "ids")} for which in ("forward", "gradient"))
    assert set(found.pop("token_nll_bwd")) == {("gradient",)}
    assert set(found.pop("linear_nll_rows")) == forward | gradient
    passes = {kernel: set(passes) for kernel, passes in found.items()}
    assert passes == {"token_nll_fwd": forward, "token_nll_fwd_split": forward}


@exhaustive
@counted_targets
def test_weights_cost_nothing_per_element(target, reports):
    """Weights are per row. A pass issues as many slots as without weights, up to the compiler's layout of a loop."""
    slots = {kernel: p["slots"] for kernel, _, p in row_passes(reports, target)}
    weighed = {kernel: kernel.replace(f", {word}", "") for kernel in slots for word in WEIGHTS if word in kernel}
    assert {kernel.partition("[")[0] for kernel in weighed} == {"token_nll_fwd", "token_nll_fwd_split", "token_nll_bwd"}
    assert [kernel for kernel, plain in weighed.items() if slots[kernel] > 1.02 * slots[plain]] == []


@exhaustive
@counted_targets
def test_few_issue_slots_of_row_statistics(target, reports):
    """The statistics are log-probabilities and entropy, of plain logits."""
    most = {"row_stats_parts": 11, "row_stats_bwd": 13.1}  # 13.06 on sm_80 with Triton 3.6, 12.4 with 3.9
    found = {function: [] for function in most}
    for r in counted(reports, target):
        if r["function"] in most and not any(word in r["kernel"] for word in ("mix", "logit_scale=", "skip_id=")):
            found[r["function"]] += [p["slots"] for p in r["passes"]]
    assert all(found.values())
    assert {function: max(slots) for function, slots in found.items() if max(slots) > most[function]} == {}


# 16 bits of noise and one logarithm per column. The exact scores of a tile are computed only if they may win.
MOST_SLOTS_OF_SAMPLES = {"sample[bf16]": 23, "sample[bf16, noise]": 72, "sample[bf16, noise, logit_scale=i64]": 100}


@exhaustive
@counted_targets
def test_few_issue_slots_of_a_sample(target, reports):
    """A greedy sample, one of plain logits, and one of capped and scaled logits with a skipped column."""
    found = {r["kernel"]: r["passes"] for r in counted(reports, target) if r["function"] == "sample"}
    slots = {kernel: [p["slots"] for p in passes] for kernel, passes in found.items()}
    assert slots.keys() == MOST_SLOTS_OF_SAMPLES.keys()
    assert {kernel: len(each) for kernel, each in slots.items() if len(each) != 1} == {}
    most = {kernel: OF_TRITON_3_9 * slots for kernel, slots in MOST_SLOTS_OF_SAMPLES.items()}
    assert {kernel: each for kernel, each in slots.items() if each[0] > most[kernel]} == {}


@exhaustive
@counted_targets
def test_few_issue_slots_of_a_mixture(target, reports):
    """One loop computes one logarithm for four terms.

    The other one is for terms that are too small or too large for it.
    """
    found = [r for r in counted(reports, target) if r["function"] == "row_stats_mix"]
    assert {len(r["passes"]) for r in found} == {2}
    least = {r["kernel"]: min(p["slots"] for p in r["passes"]) for r in found}
    assert {kernel: slots for kernel, slots in least.items() if slots > 30} == {}


# Most issue slots per pass for a pair of columns (student and teacher), by the properties that distinguish the kernels.
# The budget of an H100 is 39.4 for a pass that reads both, and 59 for one that also writes the gradient.
MOST_SLOTS_OF_PAIRS = {
    "grad, fast": (17, 22),  # kl; 1.3 slots of the first pass move a tile that was loaded one iteration earlier
    "grad, fast, tv=i64": (17, 18, 17.5),
    "grad, fast, rkl=i64": (22.5, 21.5),
    "grad, fast, jsd=i64": (17, 33, 26),
}


@exhaustive
@counted_targets
@pytest.mark.parametrize("kind", MOST_SLOTS_OF_PAIRS)
def test_pairs_of_rows_are_bound_by_memory(kind, target, reports):
    """On an A100 and an H100, each pass reads both rows, 16 bytes at a time. The last pass also writes the gradient."""
    (found,) = (r for r in counted(reports, target) if r["kernel"] == f"divergence_rows[bf16, {kind}]")
    passes, most = found["passes"], MOST_SLOTS_OF_PAIRS[kind]
    assert [2 * p["bytes"] for p in passes] == [4.0] * (len(most) - 1) + [6.0]
    assert [i for i, p in enumerate(passes) if 2 * p["slots"] > OF_TRITON_3_9 * most[i]] == []
    assert all(p["load_width"] == 16 and p["bytes_in_flight"] >= LEAST_BYTES_IN_FLIGHT for p in passes)
    bound = {gpu: {p["roofs"][gpu]["bound"] for p in passes} for gpu in passes[0]["roofs"]}
    if "jsd" in kind:  # its exponentials and logarithms allow 90 % of the copy rate of an H200
        bound.pop("H200", None)
    assert set(map(frozenset, bound.values())) == {frozenset({"memory"})}


@exhaustive
@counted_targets
def test_the_gradient_from_kept_statistics_is_one_pass(target, reports):
    # Only these kernels write the gradient to separate memory.
    found = [r for r in counted(reports, target) if r["function"] == "divergence_rows" and "out=" in r["kernel"]]
    passes = {r["kernel"]: [2 * p["bytes"] for p in r["passes"]] for r in found if "grad" in r["kernel"].split(", ")}
    assert len(passes) == 2  # kl, tv
    assert set(map(tuple, passes.values())) == {(6.0,)}


@exhaustive
@counted_targets
def test_memory_is_the_bound(target, reports):
    """Few issue slots per element, wide loads that leave together, and enough bytes in flight."""
    passes = row_passes(reports, target)
    assert {kind for _, kind, _ in passes} == set(MOST_SLOTS)
    for kernel, kind, p in passes:
        assert {roof["bound"] for roof in p["roofs"].values()} == {"memory"}, kernel
        assert p["slots"] <= MOST_SLOTS[kind], kernel
        assert p["bytes_in_flight"] >= LEAST_BYTES_IN_FLIGHT, kernel
        if kind == "forward":
            assert p["load_width"] == 16, kernel
            assert p["loads_in_flight"] >= LEAST_LOADS, kernel
