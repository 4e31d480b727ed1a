"""Test configuration: kernels run on the GPU if there is one, otherwise on CPU tensors under Triton's interpreter."""

import fcntl
import functools
import gc
import heapq
import importlib.util
import inspect
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import hypothesis
import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import pytest

gc.set_threshold(50_000, 20, 100)  # collect garbage rarely, because collecting tests and Dynamo make many objects

# Inductor's disk cache ignores the vector width of its code. Code from another kind of processor, or from a run with
# another ATEN_CPU_CAPABILITY, does not compile or gives wrong numbers (torch 2.13).
VECTORS = torch.backends.cpu.get_cpu_capability().lower()
CACHE = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}_{VECTORS}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE))

if os.environ.get("PYTEST_XDIST_WORKER") and "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # for a missing device, each seed records its caller, which is slow
    for backend in (torch.cuda, torch.xpu, torch.mtia):
        backend.manual_seed_all = lambda seed: None
EXECUTED = "tools.ptx.plugin" in sys.modules  # by `make ptx`: kernels are compiled, and their PTX is executed
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None

if INTERPRETED:
    from tests.support import interpreter

    interpreter.install()


def every_time(chosen, values, name=None):
    """Return ``values`` as parameters: the ``chosen`` ones run every day, the others with the exhaustive tests.

    A tuple is several parameters. ``name(value)`` is the name of a value in the test id.
    """
    return _marked(chosen, values, name, pytest.mark.exhaustive)


def usually(chosen, values, name=None):
    """Return ``values`` as parameters, all but the ``chosen`` ones for ``make test-every-case``; see ``every_time``."""
    return _marked(chosen, values, name, pytest.mark.every_case)


def _marked(chosen, values, name, mark):
    params = []
    for value in values:
        several = value if isinstance(value, tuple) else (value,)
        params.append(pytest.param(*several, marks=() if value in chosen else mark, id=name(value) if name else None))
    return params


def drawn(everyday=8, exhaustive=32, **strategies):
    """Let Hypothesis draw these arguments: ``examples`` examples every day, ``exhaustive`` in the exhaustive half.

    The examples are always the same, because a counterexample found by luck does not test the change at hand. With
    ``exhaustive=None``, the test is given its number of ``examples`` elsewhere.
    """

    def decorated(test):
        fixtures = [name for name in inspect.signature(test).parameters if name not in strategies]

        def run_examples(examples, **values):
            profile = hypothesis.settings(max_examples=examples, deadline=None, derandomize=True)
            profile(hypothesis.given(**strategies)(lambda **example: test(**values, **example)))()

        functools.update_wrapper(run_examples, test)
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (*fixtures, "examples")]
        run_examples.__signature__ = inspect.Signature(parameters)
        if exhaustive is None:
            return run_examples
        return pytest.mark.parametrize("examples", every_time([everyday], [everyday, exhaustive]))(run_examples)

    return decorated


def covering(items, strength, chosen=(), *, balanced=False):
    """Return a small subset of the cases in which any ``strength`` parameters take all combinations of their values.

    The result does not repeat combinations of the ``chosen`` cases. A case is a test item, or pytest's record of its
    parameters. If several cases add as many combinations, the first one is taken, or if ``balanced`` the one whose
    combinations of one parameter more were taken least often.
    """

    numbers = {}  # combinations of integers are faster to hash than those of values

    def numbered(item):
        params = getattr(item, "callspec", item).params
        return sorted(numbers.setdefault((name, repr(value)), len(numbers)) for name, value in params.items())

    def combinations(values, strength):
        return set(itertools.combinations(values, min(strength, len(values))))

    values, of_chosen = [numbered(item) for item in items], [numbered(item) for item in chosen]
    each = [combinations(v, strength) for v in values]
    wanted = set().union(*each).difference(*(combinations(v, strength) for v in of_chosen))
    larger = [combinations(v, strength + 1) for v in values] if balanced else [()] * len(items)
    taken = Counter(c for v in of_chosen for c in combinations(v, strength + 1)) if balanced else Counter()

    # The rank of a case only becomes worse, so a heap of earlier ranks has the best one on top once it is current.
    heap = [(-len(combined & wanted), 0, i) for i, combined in enumerate(each)]
    heapq.heapify(heap)
    more = []
    while wanted:
        adds, often, i = heap[0]
        current = (-len(each[i] & wanted), often, i)
        if current[0] == adds:
            current = (adds, sum(taken[c] for c in larger[i]), i)
        if current > heap[0]:
            heapq.heapreplace(heap, current)
            continue
        more.append(items[i])
        wanted -= each[i]
        taken.update(larger[i])
    return more


def pytest_sessionstart():
    from tests.support import opcheck

    opcheck.check_specs()


def pytest_addoption(parser):
    parser.addoption("--every-case", action="store_true", help="omit no case of any test: run whole products")


@pytest.hookimpl(trylast=True)  # after every parametrization
def pytest_generate_tests(metafunc):
    """Choose the cases of a test before pytest creates an item of each, because items of whole products take seconds.

    Cases that do not run every day are marked ``exhaustive``, and those that only ``--every-case`` runs are omitted.
    """
    every, option = metafunc._calls, metafunc.config.option  # the list of cases and their marks has no public name
    only_everyday = option.markexpr == "not exhaustive" and not option.every_case

    def without(name, calls):
        return [call for call in calls if name not in {mark.name for mark in call.marks}]

    kept = calls = without("every_case", every)
    if mark := metafunc.definition.get_closest_marker("covering"):
        frequent = []
        if mark.args:
            if not metafunc.definition.get_closest_marker("exhaustive"):
                frequent = covering(without("exhaustive", calls), *mark.args)
            everyday = set(map(id, frequent))
            for call in every:
                if id(call) not in everyday:
                    call.marks.append(pytest.mark.exhaustive.mark)
        if not (only_everyday and frequent):
            most = mark.kwargs.get("most", 3)
            kept = [*frequent, *covering(calls, most, frequent, balanced=most < 3)]
    if only_everyday:
        kept = without("exhaustive", kept) or kept[:1]  # pytest would deselect the others; a test needs a case
    if not option.every_case:
        ids = set(map(id, kept))
        every[:] = [call for call in every if id(call) in ids]


#: Files of a group each: their tests share what one of them makes in a minute, for which a second worker would wait, or
#: they are slow, and the last one would keep one worker busy alone.
GROUPS = re.compile(r"tests/(distributed/|kernels/test_(mock_gpu|offline_compile|pretended_gpu)\.py|repo/\w+\.py)")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``--dist loadgroup``, run each of the ``GROUPS`` in one worker, before all other tests."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            group = GROUPS.match(nodeid)
            return group[0] if group else nodeid

    return Groups(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest evaluates the marks
def pytest_collection_modifyitems(config, items):
    if not config.option.every_case:
        items[:] = [item for item in items if not item.get_closest_marker("every_case")]
    slow = defaultdict(list)
    for item in items:
        if item.get_closest_marker("everyday") and not item.get_closest_marker("exhaustive"):
            slow[item.path, item.originalname].append(item)
    for cases in slow.values():
        (most,) = cases[0].get_closest_marker("everyday").args
        # The first cases of a covering subset differ in all of their parameters, such as form, dtype and backend.
        several = len(cases[0].callspec.params) > 1
        kept = set(covering(cases, 1)[:most]) if several else {cases[i * len(cases) // most] for i in range(most)}
        for item in set(cases).difference(kept):
            item.add_marker("exhaustive")
    no_gpu = pytest.mark.skip(reason="needs a CUDA or ROCm device")
    for item in items:
        if item.get_closest_marker("gpu") and DEVICE == "cpu":
            item.add_marker(no_gpu)


def pytest_collection_finish():
    """Freeze all current objects, so that garbage collections skip them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """Fail a run in which every test was skipped, because it would look like one in which every test passed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus != pytest.ExitCode.OK or reporter is None or session.config.option.collectonly:
        return
    if os.environ.get("PYTEST_XDIST_WORKER") or any(reporter.stats.get(kind) for kind in ("passed", "xfailed")):
        return
    reporter.write_line("no test was executed", red=True)
    session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_unconfigure():
    gc.unfreeze()  # otherwise nanobind reports these objects as leaked


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """(name, make) -> a path created by ``make(path)``, once for all pytest workers; the other workers wait for it."""
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent

    def create_once(name, make):
        path = folder / name
        with Path(folder, name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                make(path)
        return path

    return create_once


DEADLINE = 900  # seconds for all checks in several processes, while other tests run; the timeout of a group is 30


def run_in_several_processes(items, folder):
    """Run the checks that the tests of a session request by ``ranks``, in one start of the workers."""
    requested = defaultdict(list)
    for group, name in (mark.args for item in items for mark in item.iter_markers("ranks")):
        requested[group].append(name)
    folder.mkdir()
    Path(folder, "asked.json").write_text(json.dumps(requested))
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"TRITON_INTERPRET": "1", "STARTED_BY": str(os.getpid())}
    environment["DLLM_KERNELS_CHECK"] = "0"  # bad targets reach the ops, as on a GPU
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.distributed_workers", str(folder)]
    with Path(folder, "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=Path(__file__).parent.parent, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        process.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def several_processes(once, request):
    """Folder with the results of the requested checks in several processes, one subfolder per group."""
    return once("several_processes", lambda folder: run_in_several_processes(request.session.items, folder))


def seed_by(name):
    """Seed torch, NumPy and ``random`` by the name of a test."""
    seed = zlib.crc32(name.encode())
    for set_seed in (torch.manual_seed, np.random.seed, random.seed):
        set_seed(seed)


@pytest.fixture(autouse=True)
def seeded(request):
    """Let every test draw the same values in every run, whichever tests ran before it."""
    seed_by(request.node.nodeid)


@pytest.fixture(autouse=True)
def overflow(request):
    """In tests marked ``indices``, 32-bit integer overflow in a kernel is an error."""
    if not INTERPRETED or not request.node.get_closest_marker("indices"):
        yield
        return
    with interpreter.checked_overflow():
        yield


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fill new memory with NaN and the largest integers; modules of tests about rows request it by ``usefixtures``."""
    from tests.support.parity import poison_empty

    poison_empty(monkeypatch)


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture
def fused_products():
    """Round sums and differences of products only once, as compiled kernels may and Triton's interpreter does not."""
    if not INTERPRETED:
        pytest.skip("the compiler decides on fusion in compiled kernels")
    with interpreter.products_fused():
        yield


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    return request.param


@pytest.fixture
def unchecked(monkeypatch):
    """Switch the check of targets off, so that a bad target reaches the kernels on a CPU, too."""
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "0")
