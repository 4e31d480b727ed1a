"""Checks that hold for the patch of every framework, and results of frameworks in processes of their own."""

import contextlib
import inspect
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import torch


def found(several_processes, group):
    """Return the results of a group of processes; fail with the end of their output if there are none."""
    folder = several_processes / group
    logs = [several_processes / "log", *sorted(folder.glob("*.log"))]
    assert (folder / "found.pt").exists(), "\n".join(path.read_text()[-3000:] for path in logs)
    return torch.load(folder / "found.pt", weights_only=False)


def attributes_of(package):
    """Return every attribute of every loaded module of a framework."""
    modules = {n: m for n, m in sys.modules.items() if n.split(".")[0] == package and isinstance(m, types.ModuleType)}
    return {(n, a): v for n, m in modules.items() for a, v in vars(m).items() if not a.startswith("__")}


def defined_in(module, value):
    """Return a function or class as a version of the framework would define it in ``module``."""
    if inspect.isclass(value):
        value.__module__ = module.__name__
        return value
    other = types.FunctionType(value.__code__, vars(module), value.__name__, value.__defaults__)
    other.__module__ = module.__name__
    return other


def assert_patched_once(integration, host_attributes, monkeypatch):
    """Check that two threads that patch at once patch once, so that one ``unpatch`` restores everything.

    Each thread waits for the other where it looks a module of the framework up, after it has seen that nothing is
    patched.
    """
    before, both, reports = host_attributes(), threading.Barrier(2), []
    look_up = integration._host.module

    def module(home):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.1)
        return look_up(home)

    monkeypatch.setattr(integration._host, "module", module)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: reports.append(integration.patch()), range(2)))
    assert sorted(report.already for report in reports) == [False, True]
    assert reports[0].replaced == reports[1].replaced
    assert set(integration.unpatch()) == set(reports[0].replaced)
    after = host_attributes()
    assert not [place for place in before if before[place] is not after[place] and before[place] != after[place]]
