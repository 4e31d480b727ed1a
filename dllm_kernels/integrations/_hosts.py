"""Monkey-patching helpers: find a framework's loaded modules, swap objects, compare signatures."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from dllm_kernels._checks import type_name

P = ParamSpec("P")
R = TypeVar("R")
Homes = Mapping[str, Collection[str]]  # module -> names
Pairs = Sequence[tuple[Any, Any]]  # (original, replacement)
Problems = dict[str, list[str]]  # name -> what keeps it from being replaced
# (module, place) of an attribute, an entry of a table, or the defaults of a function
Places = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PatchReport:
    """Result of a ``patch()``; print it.

    Attributes:
        version: version of the framework.
        replaced: ``(module, place)`` of each replacement: an attribute, an entry of a table, or a default of a
            function.
        kept: names that were not replaced, or ``(name, reason)`` of each: excluded, or of another signature than ours.
        original: ``(module, name)`` of other losses, and of functions in the same modules, that still run the
            framework's code.
        fused: ``class.method`` of every training step that takes hidden states instead of logits (``fuse_head``).
        batched: ``class.method`` of every loop over the rows of a batch that becomes one call, also if its module is
            still to be imported.
        already: True if the framework was patched before and this call changed nothing.
        host: name of the framework.
    """

    version: str
    replaced: Places
    kept: tuple[Any, ...] = ()
    original: tuple[tuple[str, str], ...] = ()
    fused: tuple[str, ...] = ()
    batched: tuple[str, ...] = ()
    already: bool = False
    host: str = ""

    def __str__(self) -> str:
        when = "was patched already" if self.already else "patched"
        reasons = [(name, "excluded") if isinstance(name, str) else name for name in self.kept]
        lines = [f"{self.host} {self.version} {when}, {len(self.replaced)} places:"]
        lines += [f"  {module}.{place}" for module, place in self.replaced]
        lines += [f"  {name} kept: {reason}" for name, reason in reasons]
        lines += [f"  {step} takes hidden states" for step in self.fused]
        lines += [f"  {loop} corrupts a batch in one call" for loop in self.batched]
        lines += [f"  still the host's own: {module}.{name}" for module, name in self.original]
        return "\n".join(lines)


class Host:
    """Framework whose objects can be replaced; at most one patch is active, whatever thread made it.

    ``same_defaults``: argument name -> equivalent defaults.
    """

    def __init__(self, name: str, same_defaults: Mapping[str, tuple[Any, ...]]) -> None:
        self.name, self.same_defaults = name, same_defaults
        self.report: PatchReport | None = None  # of the active patch
        self._lock = threading.RLock()
        self._arguments: dict[str, Any] = {}
        self._problems: Problems = {}
        self._pairs: Pairs = ()
        self._methods: list[tuple[type, str, Any]] = []  # (class, method, original)
        self._awaited: list[_Awaited] = []

    def exclusive(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function that patches or unpatches: a second thread waits until the first has returned.

        Otherwise the second thread would take the replacements of the first for the originals.
        """

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._lock:
                return function(*args, **kwargs)

        return call

    def module(self, home: str) -> ModuleType:
        """Import a module of the framework."""
        return importlib.import_module(f"{self.name}.{home}")

    def loaded_module(self, home: str) -> ModuleType | None:
        """Return a module of the framework if it is loaded."""
        return sys.modules.get(f"{self.name}.{home}")

    def earlier(self, strict: bool, **arguments: Any) -> PatchReport | None:
        """Return the report of the active patch, or None.

        Raise RuntimeError if it was made with other arguments, or if it kept names that ``strict`` does not allow.
        """
        if self.report is None:
            return None
        if arguments != self._arguments:
            with_these = " and ".join(f"{name}={value}" for name, value in self._arguments.items())
            raise RuntimeError(f"{self.name} is patched already, with {with_these}; unpatch() first")
        if strict and self._problems:
            names = ", ".join(self._problems)
            raise RuntimeError(f"{self.name} is patched already, without {names}; unpatch() first")
        return replace(self.report, already=True)

    def pairs(
        self, homes: Homes, excluded: Collection[str], replacement_for: Callable[[str, str, Any], Any]
    ) -> tuple[list[tuple[Any, Any]], Problems]:
        """Return (original, replacement) of every name that can be replaced, and what prevents that for the others.

        Args:
            homes: module -> the names in it.
            excluded: names to skip.
            replacement_for: returns the replacement for ``(module, name, original)``.
        """
        pairs: list[tuple[Any, Any]] = []
        problems: Problems = {}
        for home, names in homes.items():
            held, missing = self._held(home)
            for name in [name for name in names if name not in excluded]:
                ambiguous = sum(name in others for others in homes.values()) > 1
                label = f"{self.name}.{home}.{name}" if ambiguous else name
                original = held.get(name)
                if original is None:
                    problems[label] = [missing or f"{self.name}.{home} has no {name}"]
                elif not self.owns(original):
                    problems[label] = [f"{self.name}.{home}.{name} is {origin(original)}, not the framework's own"]
                elif lines := self.differences(label, original, replacement := replacement_for(home, name, original)):
                    problems[label] = lines
                else:
                    pairs.append((original, replacement))
        return pairs, problems

    def owns(self, value: Any) -> bool:
        """Return True if the framework defines the class or function, or if it is an active replacement of one."""
        home = str(getattr(value, "__module__", None))
        defined = home.startswith(self.name) and is_defined_in(home, value)
        return defined or any(value is replacement for _, replacement in self._pairs)

    def _held(self, home: str) -> tuple[dict[str, Any], str]:
        """Return the attributes of a module, and what is missing if the framework does not have it."""
        try:
            return vars(self.module(home)), ""
        except ModuleNotFoundError as error:
            if not str(error.name).startswith(f"{self.name}."):
                raise
            return {}, f"{self.name} has no module {home}"

    def differences(self, name: str, original: Any, replacement: Any) -> list[str]:
        """List signature differences that can make the replacement, or a public method of it, misread a call."""
        if inspect.isclass(original) != inspect.isclass(replacement):
            return [f"{name}: is {'a' if inspect.isclass(original) else 'no'} class, unlike ours"]
        calls = {name: (original, replacement)}
        if inspect.isclass(original):
            for method, value in vars(original).items():
                if inspect.isfunction(value) and (method == "__call__" or not method.startswith("_")):
                    calls[f"{name}.{method}"] = value, getattr(replacement, method, None)
        return [
            f"{label}: {problem}"
            for label, (old, new) in calls.items()
            for problem in (["not offered here"] if new is None else self._signature_problems(old, new))
        ]

    def _signature_problems(self, original: Any, replacement: Any) -> Iterator[str]:
        expected, offered = inspect.signature(original).parameters, inspect.signature(replacement).parameters
        positional = [p.name for p in offered.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        for place, (name, parameter) in enumerate(expected.items()):
            counterpart = offered.get(name)
            if counterpart is None:
                yield f"takes {name}, which ours does not"
            elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and positional[place : place + 1] != [name]:
                other = f"argument {positional.index(name)}" if name in positional else "keyword-only"
                yield f"{name} is argument {place}, ours is {other}"
            elif not _same_default(parameter.default, counterpart.default, self.same_defaults.get(name, ())):
                yield f"{name} defaults to {_default(parameter)}, ours to {_default(counterpart)}"
        for name, counterpart in offered.items():
            variadic = counterpart.kind in (counterpart.VAR_POSITIONAL, counterpart.VAR_KEYWORD)
            if name not in expected and counterpart.default is counterpart.empty and not variadic:
                yield f"does not take {name}, which ours needs"

    def patch(
        self, version: str, pairs: Pairs, problems: Problems, strict: bool, arguments: dict[str, Any], **reported: Any
    ) -> PatchReport:
        """Replace the first object of each pair by the second, and warn of the names that have problems.

        With ``strict``, raise RuntimeError for them, and replace nothing.
        """
        if problems:
            listed = "\n  ".join(line for lines in problems.values() for line in lines)
            host, names = f"{self.name} {version}", ", ".join(problems)
            if strict:
                raise RuntimeError(f"{host} has unexpected definitions; nothing was replaced:\n  {listed}")
            warnings.warn(f"{host} has unexpected definitions; {names} stay as they are:\n  {listed}", stacklevel=4)
        self._pairs, self._arguments, self._problems = pairs, arguments, problems
        unchanged = (*reported.pop("kept", ()), *((name, "; ".join(lines)) for name, lines in problems.items()))
        self.report = PatchReport(version, _swap(self.name, pairs), unchanged, host=self.name, **reported)
        return self.report

    def replace_method(self, owner: type, name: str, method: Any) -> None:
        """Replace a method of a class until :meth:`unpatch`."""
        self._methods.append((owner, name, vars(owner)[name]))
        setattr(owner, name, method)

    def when_imported(self, home: str, action: Callable[[ModuleType], None]) -> None:
        """Call ``action`` with a module of the framework now if it is loaded, else right after its import."""
        if (module := self.loaded_module(home)) is not None:
            action(module)
        else:
            self._awaited.append(_Awaited(f"{self.name}.{home}", action))
            sys.meta_path.insert(0, self._awaited[-1])

    def unpatch(self) -> Places:
        """Restore the originals, also in modules imported since."""
        for awaited in self._awaited:
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(awaited)
        self._awaited.clear()
        for owner, name, original in self._methods:
            setattr(owner, name, original)
        self._methods.clear()
        restored = _swap(self.name, [(replacement, original) for original, replacement in self._pairs])
        self.report, self._pairs, self._problems = None, (), {}
        return restored


class _Awaited(importlib.abc.MetaPathFinder):
    """Finder that leaves the import of a module to the others, and calls ``action`` with the module after it."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name, self.action = name, action

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders find, with a loader that also calls the action."""
        if name != self.name:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(importlib.abc.Loader):
    """Loader of an awaited module, which the module forgets once it is loaded."""

    def __init__(self, loader: Any, awaited: _Awaited) -> None:
        self.loader, self.awaited = loader, awaited

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        return self.loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, and call the action with it."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self.awaited)
        self.awaited.action(module)


def check_before_host(mixin: type, cls: type, method: str) -> None:
    """Raise TypeError if a class has the mixin behind a base whose ``method`` the mixin replaces."""
    mro = cls.__mro__
    position = mro.index(mixin)
    before, behind = ([c for c in part if method in vars(c)] for part in (mro[:position], mro[position + 1 :]))
    hosts = [c.__name__ for c in before if not issubclass(c, mixin)]
    if hosts and not behind:
        raise TypeError(
            f"{mixin.__name__} must come before {hosts[0]} among the bases, got {cls.__name__}("
            f"{', '.join(c.__name__ for c in cls.__bases__)}), in which it has no effect"
        )


def checked_excluded(exclude: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the names to keep, sorted; raise TypeError unless they are strings, ValueError for an unknown name."""
    names = [exclude] if isinstance(exclude, str) else list(exclude) if isinstance(exclude, Iterable) else [exclude]
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"exclude must be names, a list of str, got {type_name(wrong[0])}")
    excluded, known = set(names), set(known)
    if not excluded <= known:
        raise ValueError(f"exclude must hold names among {sorted(known)}, got {sorted(excluded - known)}")
    return sorted(excluded)


def _swap(host: str, pairs: Pairs) -> Places:
    """Replace the first object of each pair by the second wherever a loaded module of the host holds it."""
    new = {id(old): (old, replacement) for old, replacement in pairs}
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
            elif inspect.isfunction(value) and value.__module__ == module.__name__:
                put = functools.partial(setattr, value, "__defaults__")
                places.append((f"{name}.__defaults__", put, value.__defaults__))
            for place, put, held in places:
                if (replacement := swapped(held)) is not held:
                    put(replacement)
                    done.append((module.__name__, place))
    return tuple(sorted(done))


def is_defined_in(home: str, value: Any) -> bool:
    """Return True if a function was defined in the loaded module ``home``, or if a class is the one of this name there.

    The globals of a function tell, because a decorator copies its name and module.
    """
    held = vars(sys.modules[home]) if home in sys.modules else {}
    if inspect.isfunction(value):
        return value.__globals__ is held
    return inspect.isclass(value) and held.get(value.__name__) is value


def origin(value: Any) -> str:
    """Return module and name of a class or function, or those of the type of any other object."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def loaded(host: str) -> list[ModuleType]:
    """Return the loaded modules of the host, each once, because some are registered under two names."""
    named = [module for name, module in list(sys.modules.items()) if f"{name}.".startswith(f"{host}.")]
    return list({id(module): module for module in named if isinstance(module, ModuleType)}.values())


def _same_default(expected: Any, offered: Any, same: tuple[Any, ...]) -> bool:
    return (expected in same and offered in same) or (type(expected) is type(offered) and expected == offered)


def _default(parameter: inspect.Parameter) -> str:
    return "nothing" if parameter.default is parameter.empty else repr(parameter.default)
