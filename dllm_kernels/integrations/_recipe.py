"""Corruption of a whole batch in one call, in place of the loop over its rows in NeMo AutoModel's recipe.

The recipe seeds a generator for each row. The corruption routines of this package take the seeds of all rows instead.
The strategy's ``apply_corruption`` stays the framework's code. It is called once, with the seeds as its ``generator``,
and with routines and a ``torch.rand`` that take them so. It must therefore do nothing else with the generator:
:func:`takes_seeds` reads that from the names in its code. All other strategies keep the loop over rows.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dllm_kernels._random import _philox
from dllm_kernels.corruption import sample_level

Routines = Mapping[str, Callable[..., Any]]

LOOP, SEED_OF = "_apply_corruption", "corruption_sample_seed"  # of the recipe
# Names in the code of the loop: another version with other names may seed its rows in another way.
KNOWN_LOOP = frozenset((
    "int", "step_scheduler", "step", "torch", "distributed", "is_initialized", "_get_dp_rank", "_get_dp_group_size",
    "size", "getattr", "range", "corruption_sample_seed", "Generator", "device", "manual_seed", "dllm_strategy",
    "apply_corruption", "mask_token_id", "dllm_eps", "dllm_block_size", "dllm_half_life_ratio", "append", "cat",
))  # fmt: skip
# Names in the code of a strategy besides those of corruption routines. Only ``torch.rand`` draws random numbers.
HARMLESS = frozenset((
    "_vocab_size", "ValueError", "torch", "rand", "int64", "shape", "device", "to", "float", "clamp", "expand_as",
    "scdd_schedule", "uniform_mass", "absorbed_mass", "_num_timesteps", "_max_ratio", "_gamma_shape", "_t_peak",
))  # fmt: skip


def batched(loop: Any, seed_of: Callable[..., int], routines: Routines) -> Any:
    """Return a replacement of the recipe's loop that corrupts the whole batch in one call where it can.

    Args:
        loop: the recipe's method, whose code has the names of ``KNOWN_LOOP``.
        seed_of: the recipe's ``corruption_sample_seed``.
        routines: name -> routine of this package, for each routine that is replaced.
    """

    @functools.cache
    def of_batch(apply_corruption: Any) -> Any:
        return with_seeds(apply_corruption, routines)

    @functools.wraps(loop)
    def _apply_corruption(
        self: Any, input_ids: torch.Tensor, loss_mask: torch.Tensor, microbatch_idx: int = 0
    ) -> tuple[torch.Tensor, ...]:
        strategy = self.dllm_strategy
        apply = of_batch(type(strategy).apply_corruption) if "apply_corruption" not in vars(strategy) else None
        if apply is None or len(input_ids) == 0:
            found: tuple[torch.Tensor, ...] = loop(self, input_ids, loss_mask, microbatch_idx)
            return found
        noisy, noise, p = apply(
            strategy, input_ids, loss_mask, self.mask_token_id, eps=self.dllm_eps, block_size=self.dllm_block_size,
            half_life_ratio=self.dllm_half_life_ratio, generator=_seeds(self, input_ids, microbatch_idx, seed_of),
        )  # fmt: skip
        return noisy.contiguous(), noise.contiguous(), p.contiguous()

    return _apply_corruption


def names_in(function: Any) -> frozenset[str]:
    """Return the global names and attributes in the code of a function; empty for anything else."""
    return frozenset(getattr(getattr(function, "__code__", None), "co_names", ()))


def with_seeds(apply_corruption: Any, routines: Routines) -> Any:
    """Return the strategy's method with routines that take seeds as ``generator``, or None if it may use it itself."""
    code = getattr(apply_corruption, "__code__", None)
    if code is None or apply_corruption.__closure__ or not takes_seeds(code, routines):
        return None
    replaced: dict[str, Any] = {name: functools.partial(_seeded, routine) for name, routine in routines.items()}
    replaced["torch"] = _Torch()
    function = types.FunctionType(
        code, apply_corruption.__globals__ | replaced, code.co_name, apply_corruption.__defaults__
    )
    function.__kwdefaults__ = apply_corruption.__kwdefaults__
    return function


def takes_seeds(code: types.CodeType, routines: Routines) -> bool:
    """Return True if the code names nothing but replaced routines and harmless names, and defines no function."""
    nested = any(isinstance(constant, types.CodeType) for constant in code.co_consts)
    return not nested and frozenset(code.co_names) <= HARMLESS | routines.keys()


def _seeded(routine: Callable[..., Any], *args: Any, generator: Any = None, **kwargs: Any) -> Any:
    return routine(*args, **kwargs) if generator is None else routine(*args, seeds=generator, **kwargs)


class _Torch:
    """The module torch, whose ``rand`` takes seeds of rows as ``generator``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def rand(size: tuple[int], *, device: Any, generator: torch.Tensor) -> torch.Tensor:
        """Draw one number for each row, independent of what the routines draw from the same seeds."""
        return sample_level(*size, seeds=_philox.child_seeds(generator, 1)[:, 0]).to(device)


def _seeds(recipe: Any, input_ids: torch.Tensor, microbatch_idx: int, seed_of: Callable[..., int]) -> torch.Tensor:
    """Return the recipe's seed of each row, ``[B]`` int64, computed on the device of the rows.

    The seeds of consecutive rows have a constant difference, modulo 2^63. If those of another version have not, each
    is computed by the recipe's function.
    """
    ranks = (recipe._get_dp_rank(), recipe._get_dp_group_size()) if torch.distributed.is_initialized() else (0, 1)
    B, base = len(input_ids), int(getattr(recipe, "_self_cond_base_seed", 42))
    steps = int(getattr(recipe.step_scheduler, "grad_acc_steps", 1))
    of_row = functools.partial(seed_of, base, int(recipe.step_scheduler.step), *ranks, B, steps, microbatch_idx)
    first, modulus = of_row(0), 2**63
    stride = (of_row(1) - first) % modulus
    if (first + stride * (B - 1)) % modulus != of_row(B - 1):
        return torch.tensor([of_row(row) for row in range(B)], device=input_ids.device)
    return (torch.arange(B, device=input_ids.device) * stride + first) & (modulus - 1)
