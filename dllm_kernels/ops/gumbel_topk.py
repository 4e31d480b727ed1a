"""The public function of the top-k selection; ``_random/_topk.py`` does it and says how."""

from __future__ import annotations

import operator

import torch

from dllm_kernels._random import _philox
from dllm_kernels._random._topk import choose, counts
from dllm_kernels._utils import _checks


def gumbel_topk_mask(
    log_w: torch.Tensor,
    k: torch.Tensor | int,
    *,
    uniform: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    seeds: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Choose ``k`` positions of each row without replacement, with odds given by the row's weights.

    ``score_i = log_w_i - ln(-ln u_i)``; the k largest scores are chosen, the lower index first among equals.

    Examples:
        >>> log_w = torch.tensor([[0.0, 0.0, -math.inf, 0.0]])  # the third is never chosen
        >>> chosen = gumbel_topk_mask(log_w, k=3, seeds=torch.tensor([7]))
        >>> chosen.tolist()
        [[True, True, False, True]]

    Args:
        log_w: log-weights ``[N, D]``, floating, of any strides. A position of log-weight -inf or NaN is never chosen.
        k: how many, an int or an integer tensor ``[N]``. More than the choosable positions means all of them, 0 none.
        uniform: the draws u ``[N, D]``, float32 or float64, strictly inside (0, 1); a value at or beyond an end is
            moved just inside it. By default they are drawn.
        generator: what to draw from; None is the device's default generator. A CPU generator serves tensors on any
            device, and its state then gives the same mask on all of them.
        seeds: int64 ``[N]`` instead: row n then depends on ``seeds[n]`` alone.
        backend: "auto", "triton" or "torch".

    Returns:
        bool ``[N, D]``, exactly ``min(k, choosable)`` True in each row. It is not differentiable.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or device that does not fit, a k of more than 64 bits, a negative k (in a tensor on
            a GPU, where looking would be a host sync, a negative k counts as 0), ``uniform`` beside ``generator`` or
            ``seeds``.

    Source: Kool, van Hoof and Welling 2019, "Stochastic Beams and Where to Find Them", arXiv:1903.06059, section 2.3.
    """
    _checks.check_float("log_w", log_w)
    _checks.check_ndim("log_w", log_w, 2, "[N, D]")
    check_k(k, log_w)
    if uniform is not None:
        _checks.check_tensor("uniform", uniform)
        _checks.check_dtype("uniform", uniform, (torch.float32, torch.float64))
        _checks.check_shape("uniform", uniform, log_w.shape, "that of log_w")
        _checks.check_same_device("log_w", log_w, uniform=uniform)
    k = k if isinstance(k, torch.Tensor) else operator.index(k)
    if uniform is not None and not (generator is None and seeds is None):
        raise ValueError("uniform excludes generator and seeds: expected one source of draws, got several")
    seed = None if uniform is not None else _philox.resolve_seed(log_w.device, log_w.shape[0], generator, seeds)
    if torch.compiler.is_compiling():
        from dllm_kernels._random._compiled import gumbel_topk_mask as op

        mask: torch.Tensor = op(log_w.detach(), counts(k, log_w), uniform, seed, backend)
        return mask
    with torch.no_grad():
        return choose(log_w, k, uniform, seed, backend)


def check_k(k: torch.Tensor | int, log_w: torch.Tensor) -> None:
    """Raise unless ``k`` is an int of at least 0, or an integer tensor ``[N]`` of such."""
    if not isinstance(k, torch.Tensor):
        if not _checks.is_int(k):
            raise TypeError(f"k must be an int or a torch.Tensor, got {_checks.type_name(k)}")
        _checks.check_int("k", k, 0)
        _checks.check_int64("k", k)
        return
    _checks.check_dtype("k", k, _checks.INT_DTYPES)
    _checks.check_shape("k", k, log_w.shape[:1], "the rows of log_w")
    _checks.check_same_device("log_w", log_w, k=k)
    if k.device.type == "cpu" and not torch.compiler.is_compiling() and bool((k < 0).any()):
        raise ValueError(f"k must be at least 0, got {int(k.min())} in row {int(k.argmin())}")
