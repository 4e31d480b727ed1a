"""What it takes to put functions of ours in the place of a host framework's: its modules, and whether calls would be alike."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

SameDefaults = Mapping[str, tuple[Any, ...]]


def loaded(host: str) -> list[ModuleType]:
    """The host's loaded modules, each once: some are there under two names."""
    found = {
        id(module): module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (name == host or name.startswith(host + "."))
    }
    return list(found.values())


def differences(theirs: inspect.Signature, ours: inspect.Signature, same_defaults: SameDefaults) -> list[str]:
    """Why a call that the original takes might not be taken, or be taken otherwise, by ours.

    ``same_defaults``: by the name of an argument, defaults that mean the same.
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
