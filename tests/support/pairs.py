"""Tables of features against features: a short list of cases in which each pair of values occurs."""

import contextlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tests.conftest import DEVICE
from tests.support.defaults import default_dtype

Feature = tuple[str, int]  # a feature, and the place of its value in the table


@contextlib.contextmanager
def surrounding(name, device=DEVICE):
    """Enter a mode of torch; a name of no mode has no effect."""
    with contextlib.ExitStack() as stack:
        if name in ("no_grad", "inference_mode"):
            stack.enter_context(getattr(torch, name)())
        elif name == "autocast":
            stack.enter_context(torch.autocast(device, torch.bfloat16))
        elif name == "saved on the CPU":
            stack.enter_context(torch.autograd.graph.save_on_cpu())
        elif name == "deterministic":
            stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            torch.use_deterministic_algorithms(True)
        elif name == "default dtype":
            stack.enter_context(default_dtype(torch.float64))
        yield


def pairs(
    table: Mapping[str, Sequence[Any]], excluded: Callable[[dict[str, Any]], bool] = lambda case: False, seed: int = 0
) -> list[dict[str, Any]]:
    """Draw cases, one value of each feature, until each pair of values of two features has occurred.

    Args:
        table: feature -> its values.
        excluded: True for a case, or a part of one, with values that do not go together.
        seed: of the draws.
    """
    draw = random.Random(seed)
    features = [[(name, i) for i in range(len(values))] for name, values in table.items()]

    def named(case: Sequence[Feature]) -> dict[str, Any]:
        return {name: table[name][i] for name, i in case}

    def key(one: Feature, other: Feature) -> tuple[Feature, Feature]:
        return (one, other) if one < other else (other, one)

    every = itertools.chain.from_iterable(itertools.starmap(itertools.product, itertools.combinations(features, 2)))
    missing = {key(*pair): None for pair in every if not excluded(named(pair))}
    cases = []
    while missing:
        case = list(next(iter(missing)))
        rest = [values for values in features if values[0][0] not in dict(case)]
        for values in draw.sample(rest, len(rest)):
            fits = [value for value in values if not excluded(named([*case, value]))]
            assert fits, f"no value of {values[0][0]} goes with {named(case)}"
            case.append(max(fits, key=lambda value: (sum(key(value, of) in missing for of in case), draw.random())))
        for pair in itertools.combinations(case, 2):
            missing.pop(key(*pair), None)
        cases.append({name: named(case)[name] for name in table})
    return cases
