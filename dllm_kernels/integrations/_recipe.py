"""Corruption of a whole batch in one call, in place of the loop over its rows in NeMo AutoModel's recipe.

The recipe's loop passes each row to its strategy, with a generator that it seeds for this row. Here the loop runs
unchanged with a stand-in for the strategy, which records the rows and the seeds. The strategy then corrupts the
recorded rows in one call. Its code is the framework's: it passes its ``generator`` on to a corruption routine or to
``torch.rand``, both of which take the recorded seeds.

The loop is used as it is if the strategy is not the framework's own or calls a routine that is not this package's, and
if the recorded calls are not those of single rows with different seeds.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dllm_kernels.corruption import sample_level
from dllm_kernels.corruption._seeds import RowSeeds
from dllm_kernels.integrations._hosts import is_defined_in

LOOP = "_apply_corruption"  # of the recipe


class NotByRowError(Exception):
    """The recorded calls cannot be replaced by one call."""


def batched(loop: Any, home: str, routines: Mapping[str, Callable[..., Any]]) -> Any:
    """Return a replacement of the recipe's loop that corrupts the whole batch in one call if it can.

    Args:
        loop: the recipe's method.
        home: the framework's module of strategies.
        routines: name -> routine of this package, for the routines that strategies use.
    """

    def takes_seeds(strategy: Any) -> bool:
        method = getattr(getattr(strategy, "apply_corruption", None), "__func__", None)
        held = vars(sys.modules[home]) if home in sys.modules else {}
        return is_defined_in(home, method) and all(held.get(name) is routine for name, routine in routines.items())

    @functools.wraps(loop)
    def _apply_corruption(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = getattr(self, "dllm_strategy", None)
        if takes_seeds(strategy):
            recorder = _Recorder(strategy)
            placed = loop(_Recipe(self, recorder), *args, **kwargs)
            with contextlib.suppress(NotByRowError):
                return recorder.corrupted(placed)
        return loop(self, *args, **kwargs)

    return _apply_corruption


class _Recipe:
    """The recipe with another strategy."""

    def __init__(self, recipe: Any, strategy: _Recorder) -> None:
        vars(self).update(_recipe=recipe, dllm_strategy=strategy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recipe, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._recipe, name, value)


class _Recorder:
    """A strategy that records the calls of the loop; each returns its number in place of corrupted rows."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.strategy, name)

    def apply_corruption(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        number = torch.full((1, 1), len(self.calls), device="cpu")
        self.calls.append((args, options))
        return number, number, number

    def corrupted(self, placed: Any) -> tuple[Tensor, ...]:
        """Corrupt the recorded rows in one call; ``placed`` is the result of the loop.

        Raise NotByRowError unless each call had one row, a generator with a seed of its own and otherwise equal
        arguments, and the loop returned the rows in the order of the calls.
        """
        numbers = torch.arange(len(self.calls), device="cpu")[:, None]
        rows = [args[:2] for args, _ in self.calls]
        others = [(args[2:], {**options, "generator": None}) for args, options in self.calls]
        seeds = [options["generator"].initial_seed() for _, options in self.calls if options.get("generator")]
        in_order = isinstance(placed, tuple) and all(torch.equal(p, numbers) for p in placed)
        single = in_order and all(len(row) == 2 and len(row[0]) == len(row[1]) == 1 for row in rows)
        if not (single and all(other == others[0] for other in others) and len(set(seeds)) == len(rows)):
            raise NotByRowError
        ids, loss_mask = (torch.cat(parts) for parts in zip(*rows, strict=True))
        signed = torch.tensor([seed - (seed >> 63 << 64) for seed in seeds], device="cpu")
        generator = RowSeeds(signed.to(ids.device, non_blocking=True))
        more, options = others[0]
        with _Draws(generator):
            result = self.strategy.apply_corruption(ids, loss_mask, *more, **{**options, "generator": generator})
        return tuple(t.contiguous() for t in result)


class _Draws(TorchFunctionMode):
    """Let ``torch.rand`` draw one number for each row from a :class:`RowSeeds`; any other draw raises NotByRowError."""

    def __init__(self, generator: RowSeeds) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not self.generator:
            return function(*args, **kwargs)
        seeds = self.generator.take()
        if function is not torch.rand or args != ((len(seeds),),) or kwargs.keys() - {"generator", "device"}:
            raise NotByRowError
        return sample_level(len(seeds), seeds=seeds).to(kwargs.get("device"))
