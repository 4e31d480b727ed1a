"""``pytest -p tools.ptx.plugin``: the kernels that tests launch are compiled for sm_90, and their PTX is executed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tools.kernel_files import every_kernel
from tools.ptx import driver, threads
from tools.ptx.memory import UNWRITTEN

driver.install()  # before a test, or the configuration of the tests, imports Triton
_tests: set[str] = set()  # those that launched a kernel


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--every-kernel", action="store_true", help="fail unless every kernel was executed")


def pytest_configure(config: pytest.Config) -> None:
    """Let the package launch kernels on tensors of the CPU, with the options of a GPU."""
    from dllm_kernels._checks import _backend
    from dllm_kernels.backends.triton import _launch

    assert _launch.on_nvidia()
    _backend.interpreting = lambda: True
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(owner, name, _unwritten(getattr(owner, name)))


def _unwritten(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``make`` with the contents that the executor reports if a kernel reads them."""

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> torch.Tensor:
        out = make(*args, **options)
        if type(out) is torch.Tensor and out.is_cpu and not torch.compiler.is_compiling():
            nbytes = out.untyped_storage().nbytes()
            memory = (ctypes.c_uint8 * nbytes).from_address(out.untyped_storage().data_ptr())
            np.ctypeslib.as_array(memory)[:] = np.tile(UNWRITTEN, nbytes // 8 + 1)[:nbytes]
        return out

    return made


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of the torch path."""
    left_out = [item for item in items if _of_torch(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not _of_torch(item)]


def _of_torch(item: pytest.Item) -> bool:
    words = [v.split(",")[0] for v in getattr(getattr(item, "callspec", None), "params", {}).values() if type(v) is str]
    return bool({"torch", "threads"} & {*words}) and "triton" not in words


@pytest.fixture(autouse=True)
def no_fault(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test if a launch had a fault, even if the test expected an exception."""
    before, launches = len(threads.faults), threads.executed.total()
    yield
    if threads.executed.total() > launches:
        _tests.add(request.node.nodeid)
    if threads.faults[before:]:
        pytest.fail("\n".join(threads.faults[before:]), pytrace=False)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Take over the counts of a worker process."""
    counts = getattr(node, "workeroutput", {})
    threads.executed.update(counts.get("executed", {}))
    _tests.update(counts.get("tests", ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Report the counts of a worker process, or fail the session if a kernel was not executed."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {"executed": dict(threads.executed), "tests": sorted(_tests)}
    elif session.config.option.every_kernel and not every_kernel() <= threads.executed.keys():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what was executed."""
    kernels = every_kernel()
    missing = f"; not executed: {sorted(kernels - threads.executed.keys())}" if config.option.every_kernel else ""
    terminalreporter.write_line(
        f"{threads.executed.total()} launches of {len(kernels & threads.executed.keys())} of {len(kernels)} kernels "
        f"executed as PTX of sm_90 in {len(_tests)} tests{missing}"
    )
