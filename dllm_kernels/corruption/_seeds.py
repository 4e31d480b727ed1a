"""Seeds of a call: validated, or drawn from a generator."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dllm_kernels._checks import check_dtype, check_tensor, check_whole_tensor, type_name
from dllm_kernels.corruption._philox import child_seeds

_local = threading.local()
_CPU = torch.device("cpu")


class RowSeeds(torch.Generator):
    """Seeds of rows in place of a generator, for the code of a framework that passes its ``generator`` on.

    The first call that takes them uses the seeds themselves, a later one seeds derived from them.
    """

    def __new__(cls, seeds: Tensor) -> RowSeeds:
        """Create a generator on the device of ``seeds``, int64 ``[B]``."""
        return super().__new__(cls, seeds.device)  # type: ignore[call-arg]

    def __init__(self, seeds: Tensor) -> None:
        self._seeds, self._taken = seeds, 0

    def take(self) -> Tensor:
        """Return the seeds of the next call, int64 ``[B]``."""
        self._taken += 1
        return self._seeds if self._taken == 1 else child_seeds(self._seeds, self._taken - 1)[:, -1]


def resolve_seed(device: torch.device, rows: int, generator: torch.Generator | None, seeds: Tensor | None) -> Tensor:
    """Return the seed of a call without a host sync: the validated ``seeds [rows]``, or a drawn 0-d int64 seed.

    A drawn seed is valid until this thread's next call. A CPU generator is accepted for tensors on any device: the seed
    is then drawn on the CPU, so that a generator state gives the same mask on every device. None is the default
    generator of the device.
    """
    if isinstance(generator, RowSeeds):
        seeds, generator = generator.take(), None
    check_sources(generator, seeds, (rows,), device)
    if seeds is not None:
        return seeds.contiguous()
    source = device if generator is None else generator.device
    if device == _CPU and not torch.compiler.is_compiling():
        return _seed_on_host().random_(*_SEED_RANGE, generator=generator)
    seed = torch.randint(*_SEED_RANGE, (), dtype=torch.int64, device=source, generator=generator)
    return seed if source == device else seed.to(device, non_blocking=True)


# The int64 range without its last value, because the upper end is exclusive.
_SEED_RANGE = (-(2**63), 2**63 - 1)


def _seed_on_host() -> Tensor:
    """Per-thread buffer for drawn seeds; takes half the time of allocating one per call."""
    try:
        seed: Tensor = _local.seed
    except AttributeError:
        with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
            seed = torch.empty((), dtype=torch.int64, device="cpu")
        if type(seed) is Tensor:  # a fake tensor must not be cached
            _local.seed = seed
    return seed


def device_of(device: Any, generator: torch.Generator | None, seeds: Tensor | None) -> torch.device:
    """Return the ``device`` of a call; None: that of its source of randomness, otherwise the CPU."""
    if device is None:
        device = getattr(generator if seeds is None else seeds, "device", _CPU)
    if isinstance(device, str):
        return torch.device(device)
    if not isinstance(device, torch.device):
        raise TypeError(f"device must be a torch.device or its name, got {type_name(device)}")
    return device


def _same_device(a: torch.device, b: torch.device) -> bool:
    """Return True if the devices are equal; one without an index, as a user writes it, equals any of its type."""
    return a.type == b.type and (a.index is None or b.index is None or a.index == b.index)


def check_sources(generator: Any, seeds: Any, rows: Sequence[int] | None, device: torch.device) -> None:
    """Raise unless the sources of randomness of a call are valid; also called if nothing is drawn.

    Args:
        generator: a generator or None.
        seeds: int64 seeds or None; then ``generator`` must be None.
        rows: the shape that the seeds must have; None: the caller checks the shape.
        device: device of the tensors.

    Raises:
        TypeError: an argument has the wrong type, or ``seeds`` is a DTensor.
        ValueError: both are given, or shape, dtype or device do not match.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type_name(generator)}")
    if seeds is not None:
        if generator is not None:
            raise ValueError("generator and seeds exclude each other: expected one of them, got both")
        check_tensor("seeds", seeds)
        check_whole_tensor("seeds", seeds)
        check_dtype("seeds", seeds, (torch.int64,))
        if rows is not None and tuple(seeds.shape) != tuple(rows):
            raise ValueError(f"seeds must have shape {tuple(rows)}, one per row, got {tuple(seeds.shape)}")
        if not _same_device(seeds.device, device):
            raise ValueError(f"seeds must be on {device} like the tensors, got {seeds.device}")
    elif generator is not None and generator.device != _CPU and not _same_device(generator.device, device):
        allowed = "cpu" if device.type == "cpu" else f"cpu or on {device}"
        raise ValueError(f"generator must be on {allowed} like the tensors, got one on {generator.device}")
