"""Monkey-patching helpers: find a framework's loaded modules, swap objects, compare signatures."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

SameDefaults = Mapping[str, tuple[Any, ...]]
Pairs = Sequence[tuple[Any, Any]]  # (original, replacement)
Places = tuple[
    tuple[str, str], ...
]  # (module, place) of an attribute, an entry of a table, or the defaults of a function


@dataclass(frozen=True)
class PatchReport:
    """Result of a ``patch()``; print it.

    Attributes:
        version: version of the framework.
        replaced: ``(module, place)`` of each replacement: an attribute, an entry of a table, or a default of a
            function.
        kept: names that were not replaced, or ``(name, reason)`` of each.
        original: ``(module, name)`` of other losses, and of functions next to them, that still run the framework's
            code.
        fused: ``class.method`` of every training step that takes hidden states instead of logits (``fuse_head``).
        already: the framework was patched before, and this call changed nothing.
        host: name of the framework.
    """

    version: str
    replaced: Places
    kept: tuple[Any, ...] = ()
    original: tuple[tuple[str, str], ...] = ()
    fused: tuple[str, ...] = ()
    already: bool = False
    host: str = ""

    def __str__(self) -> str:
        when = "was patched already" if self.already else "patched"
        reasons = [(name, "excluded") if isinstance(name, str) else name for name in self.kept]
        lines = [f"{self.host} {self.version} {when}, {len(self.replaced)} places:"]
        lines += [f"  {module}.{place}" for module, place in self.replaced]
        lines += [f"  {name} kept: {reason}" for name, reason in reasons]
        lines += [f"  {step} takes hidden states" for step in self.fused]
        lines += [f"  still the host's own: {module}.{name}" for module, name in self.original]
        return "\n".join(lines)


class Host:
    """Framework whose objects can be replaced; one patch at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.report: PatchReport | None = None  # of the active patch
        self._asked: dict[str, Any] = {}
        self._pairs: Pairs = ()

    def earlier(self, **asked: Any) -> PatchReport | None:
        """Return the report of the active patch, or None; raise RuntimeError if it was made with other arguments."""
        if self.report is None:
            return None
        if asked != self._asked:
            with_these = " and ".join(f"{name}={value}" for name, value in self._asked.items())
            raise RuntimeError(f"{self.name} is patched already, with {with_these}; unpatch() first")
        return replace(self.report, already=True)

    def patch(self, version: str, pairs: Pairs, problems: Sequence[str], **asked: Any) -> PatchReport:
        """Replace the first object of each pair by the second; if there are problems, raise and replace nothing."""
        if problems:
            listed = "\n  ".join(problems)
            raise RuntimeError(f"{self.name} {version} has unexpected signatures; nothing was replaced:\n  {listed}")
        self._pairs, self._asked = pairs, asked
        self.report = PatchReport(version, _swap(self.name, pairs), tuple(asked["exclude"]), host=self.name)
        return self.report

    def unpatch(self) -> Places:
        """Restore the originals, also in modules imported since."""
        restored = _swap(self.name, [(ours, original) for original, ours in self._pairs])
        self.report, self._pairs = None, ()
        return restored


def checked_excluded(exclude: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the names to keep, sorted; raise ValueError for an unknown name."""
    excluded, known = {exclude} if isinstance(exclude, str) else set(exclude), set(known)
    if not excluded <= known:
        raise ValueError(f"exclude must hold names among {sorted(known)}, got {sorted(excluded - known)}")
    return sorted(excluded)


def _swap(host: str, pairs: Pairs) -> Places:
    """Replace the first object of each pair by the second wherever a loaded module of the host holds it."""
    new = {id(old): (old, ours) for old, ours in pairs}
    done = []

    def swapped(value: Any) -> Any:
        """Return the replacement of a value, or the value itself; replace inside tuples too."""
        if isinstance(value, tuple) and any(id(one) in new for one in value):
            return tuple(map(swapped, value))
        return new[id(value)][1] if id(value) in new else value

    for module in loaded(host):
        for name, value in list(vars(module).items()):
            places = [(name, functools.partial(setattr, module, name), value)]
            if isinstance(value, dict) and not name.startswith("__"):
                places = [(f"{name}[{key!r}]", functools.partial(value.__setitem__, key), value[key]) for key in value]
            elif inspect.isfunction(value) and value.__module__ == module.__name__ and value.__defaults__:
                places.append(
                    (f"{name}.__defaults__", functools.partial(setattr, value, "__defaults__"), value.__defaults__)
                )
            for place, put, held in places:
                if (ours := swapped(held)) is not held:
                    put(ours)
                    done.append((module.__name__, place))
    return tuple(sorted(done))


def loaded(host: str) -> list[ModuleType]:
    """Return the loaded modules of the host, each once, because some are registered under two names."""
    found = {
        id(module): module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (name == host or name.startswith(host + "."))
    }
    return list(found.values())


def differences(theirs: inspect.Signature, ours: inspect.Signature, same_defaults: SameDefaults) -> list[str]:
    """List the reasons why the replacement might reject or misread a call that the original accepts.

    ``same_defaults``: argument name -> equivalent defaults.
    """
    positional = [p.name for p in ours.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    problems = []
    for place, parameter in enumerate(theirs.parameters.values()):
        mine = ours.parameters.get(parameter.name)
        if mine is None:
            problems.append(f"takes {parameter.name}, which ours does not")
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and positional[place : place + 1] != [parameter.name]:
            problems.append(f"{parameter.name} is argument {place}, ours is {_place(positional, parameter.name)}")
        elif not _same_default(parameter, mine, same_defaults.get(parameter.name, ())):
            problems.append(f"{parameter.name} defaults to {_default(parameter)}, ours to {_default(mine)}")
    for mine in ours.parameters.values():
        variadic = mine.kind in (mine.VAR_POSITIONAL, mine.VAR_KEYWORD)
        if mine.name not in theirs.parameters and mine.default is mine.empty and not variadic:
            problems.append(f"does not take {mine.name}, which ours needs")
    return problems


def _place(positional: list[str], name: str) -> str:
    return f"argument {positional.index(name)}" if name in positional else "keyword-only"


def _same_default(theirs: inspect.Parameter, ours: inspect.Parameter, same: tuple[Any, ...]) -> bool:
    both_same = theirs.default in same and ours.default in same
    return both_same or (type(theirs.default) is type(ours.default) and theirs.default == ours.default)


def _default(parameter: inspect.Parameter) -> str:
    return "nothing" if parameter.default is parameter.empty else repr(parameter.default)
