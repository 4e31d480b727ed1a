"""Corruption of clean tokens for training: masking, exact-count masking with a position bias, random tokens.

Every routine returns ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``: ids in the dtype of the input, a bool
mask of the corrupted positions, and a float32 probability. Inputs are never written. On a GPU a routine is one kernel
launch, beside the draw of a seed; nothing waits for the GPU.

**Randomness.** Every draw is Philox 4x32-10 of a 64-bit seed and the position (``dllm_kernels.ops._philox`` holds the
layout), the same bits on CPU and GPU, under Triton and under torch.

* ``generator``: one seed a call is drawn from it, row b is row b under that seed. A CPU generator serves tensors on any
  device, and the same state of it gives the same mask on all of them. A CUDA generator draws its seed on the GPU, and
  its stream of seeds is its own: torch gives a CUDA and a CPU generator of one ``manual_seed`` different numbers.
  ``None`` is the default generator of the tensors' device.
* ``seeds``: int64 ``[B]``, instead of a generator. Row b is then a function of ``seeds[b]``, of L and of the options
  alone, in whatever batch and on whatever device it is corrupted.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence

import torch

from dllm_kernels.ops import _philox, corruption
from dllm_kernels.ops._backend import use_triton
from dllm_kernels.ops._checks import (
    check_ids,
    check_mask,
    check_ndim,
    check_positive_int,
    check_same_device,
    check_tensor,
)
from dllm_kernels.ops.gumbel_topk import gumbel_topk_mask

__all__ = [
    "batched_gumbel_topk",
    "corrupt_all_masked",
    "corrupt_blockwise",
    "corrupt_uniform",
    "corrupt_uniform_random",
    "gumbel_topk",
]


def gumbel_topk(
    log_w: torch.Tensor,
    k: int | torch.Tensor,
    *,
    generator: torch.Generator | None = None,
    uniform: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Choose ``k`` positions without replacement, with odds given by their weights.

    ``score_i = log_w_i - ln(-ln u_i)``; the k largest are chosen, the lower index first among equals.

    Args:
        log_w: log-weights ``[D]``, floating; a position of -inf or NaN is never chosen.
        k: how many, an int or a 0-d tensor; more than the choosable positions means all of them.
        generator: what to draw from, see the module.
        uniform: the draws u ``[D]`` instead, float32 or float64, strictly inside (0, 1).
        backend: "auto", "triton" or "torch".

    Returns:
        bool ``[D]``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or device that does not fit, or a negative k.

    Source: Kool, van Hoof and Welling 2019, arXiv:1903.06059, section 2.3.
    """
    check_tensor("log_w", log_w)
    check_ndim("log_w", log_w, 1, "[D]")
    if uniform is not None:
        check_tensor("uniform", uniform)
        check_ndim("uniform", uniform, 1, "[D]")
        uniform = uniform[None]
    if isinstance(k, torch.Tensor) and k.dim() == 0:
        k = k[None]
    return gumbel_topk_mask(log_w[None], k, uniform=uniform, generator=generator, backend=backend)[0]


def batched_gumbel_topk(
    log_w: torch.Tensor,
    k: torch.Tensor,
    generator: torch.Generator | None = None,
    *,
    seeds: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Choose ``k[i]`` positions of row i without replacement, with odds given by the row's weights.

    ``score_i = log_w_i - ln(-ln u_i)``; the k largest are chosen, the lower index first among equals.

    Args:
        log_w: log-weights ``[N, D]``, floating; a position of -inf or NaN is never chosen.
        k: how many of each row, an integer tensor ``[N]``, or an int for all; 0 gives a row of False.
        generator: what to draw from, see the module.
        seeds: int64 ``[N]`` instead: row n then depends on ``seeds[n]`` alone.
        uniform: the draws u ``[N, D]`` instead, float32 or float64, strictly inside (0, 1).
        backend: "auto", "triton" or "torch".

    Returns:
        bool ``[N, D]``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or device that does not fit, a negative k, two sources of draws.

    Source: Kool, van Hoof and Welling 2019, arXiv:1903.06059, section 2.3.
    """
    return gumbel_topk_mask(log_w, k, uniform=uniform, generator=generator, seeds=seeds, backend=backend)


_batched_gumbel_topk = batched_gumbel_topk


def corrupt_uniform(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    mask_token_id: int,
    eps: float = 1e-3,
    generator: torch.Generator | None = None,
    *,
    seeds: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask each supervised position independently, with one probability for each sequence.

    ``p_b = (1 - eps) t_b + eps``, ``t_b`` uniform in (0, 1); position i is masked where ``u_{b,i} < p_b``.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, bool or number, nonzero is True.
        mask_token_id: the token that masks.
        eps: smallest probability, in [0, 1).
        generator: what to draw from, see the module.
        seeds: int64 ``[B]`` instead, one a row, see the module.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``; ``p_mask`` holds ``p_b``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype, device or range that does not fit, or both ``generator`` and ``seeds``.

    Source: Nie et al. 2025 (LLaDA), arXiv:2502.09992, section 2.2, the forward process of Eq. 3.
    """
    _check_batch(input_ids, loss_mask, optional=False)
    mask_id = _checked_mask_id(mask_token_id, input_ids)
    eps = _checked_eps(eps)
    seed = _philox.resolve_seed(input_ids.device, input_ids.shape[0], generator, seeds)
    if input_ids.numel() == 0:
        return _nothing(input_ids, backend)
    return corruption.mask_tokens(input_ids, loss_mask, mask_id, eps, seed, backend)


def corrupt_blockwise(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor | None,
    mask_token_id: int,
    block_size: int | None = None,
    eps: float = 1e-3,
    half_life_ratio: float = 0.25,
    generator: torch.Generator | None = None,
    *,
    seeds: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask an exact share of every sequence or block, later positions first when the share is small.

    ``m = (1 - eps) U + eps``, ``k = round(m length)`` (half to even), and k positions without replacement with
    ``log w_i = ln 2 / (half_life_ratio size) (1 - m) i``. ``size`` is L or ``block_size``; ``length`` counts the
    positions that are there, fewer in a short last block. k lies in [1, L] for a sequence, in [0, length] for a block.
    All positions take part; of the chosen ones the unsupervised are dropped afterwards.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, bool or number, nonzero is True; None for all.
        mask_token_id: the token that masks.
        block_size: positions of a block; None for whole sequences.
        eps: smallest share, in [0, 1).
        half_life_ratio: distance over which a weight doubles as m goes to 0, as a share of ``size``; above 0.
        generator: what to draw from, see the module.
        seeds: int64 ``[B]`` instead, one a row, see the module.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``; ``p_mask`` holds m.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype, device or range that does not fit, or both ``generator`` and ``seeds``.

    Source: the position bias w_i(m) = exp(lambda (1 - m) i) of Nemotron-Labs-Diffusion training; the selection of
    Kool, van Hoof and Welling 2019, arXiv:1903.06059, section 2.3.
    """
    _check_batch(input_ids, loss_mask, optional=True)
    mask_id = _checked_mask_id(mask_token_id, input_ids)
    eps = _checked_eps(eps)
    block_size = _checked_block_size(block_size)
    half_life_ratio = _checked_real("half_life_ratio", half_life_ratio)
    if not half_life_ratio > 0:
        raise ValueError(f"half_life_ratio must be above 0, got {half_life_ratio}")
    seed = _philox.resolve_seed(input_ids.device, input_ids.shape[0], generator, seeds)
    if input_ids.numel() == 0:
        return _nothing(input_ids, backend)
    return corruption.mask_topk(input_ids, loss_mask, mask_id, block_size, eps, half_life_ratio, seed, backend)


def corrupt_uniform_random(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    vocab_size: int,
    block_size: int | None = None,
    eps: float = 1e-3,
    generator: torch.Generator | None = None,
    *,
    seeds: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace supervised positions by random tokens, with one probability for each sequence or block.

    ``t = (1 - eps) U + eps``; where ``u < t`` a supervised position becomes a token uniform over [0, vocab_size),
    which may be the token that was there.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, bool or number, nonzero is True.
        vocab_size: how many tokens there are to draw from, at most 2^31.
        block_size: positions of a block; None for whole sequences.
        eps: smallest probability, in [0, 1).
        generator: what to draw from, see the module.
        seeds: int64 ``[B]`` instead, one a row, see the module.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``; ``p_mask`` is all ones, for the loss is flat.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype, device or range that does not fit, or both ``generator`` and ``seeds``.

    Source: Austin et al. 2021 (D3PM), arXiv:2107.03006, section 3.1, the uniform transition.
    """
    _check_batch(input_ids, loss_mask, optional=False)
    check_positive_int("vocab_size", vocab_size)
    if vocab_size > 2**31:
        raise ValueError(f"vocab_size must be at most 2**31, got {vocab_size}")
    _check_fits("vocab_size - 1", vocab_size - 1, input_ids)
    eps, block_size, vocab_size = _checked_eps(eps), _checked_block_size(block_size), int(vocab_size)
    seed = _philox.resolve_seed(input_ids.device, input_ids.shape[0], generator, seeds)
    if input_ids.numel() == 0:
        return _nothing(input_ids, backend)
    return corruption.replace_tokens(input_ids, loss_mask, vocab_size, block_size, eps, seed, backend)


def corrupt_all_masked(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    mask_token_id: int,
    *,
    generator: torch.Generator | None = None,
    seeds: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mask every supervised position: ``noise = supervised``, ``p = 1``. Nothing is random.

    Args:
        input_ids: clean tokens ``[B, L]``, integer.
        loss_mask: supervised positions ``[B, L]``, bool or number, nonzero is True.
        mask_token_id: the token that masks.
        generator: not used, since nothing is drawn; there so that all routines are called alike.
        seeds: not used, likewise.
        backend: "auto", "triton" or "torch".

    Returns:
        ``(noisy_input_ids, noise_mask, p_mask)``, each ``[B, L]``; ``p_mask`` is all ones.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a shape, dtype or device that does not fit.

    Source: the all-masked training of I-DLM, arXiv:2604.11035.
    """
    _check_batch(input_ids, loss_mask, optional=False)
    mask_id = _checked_mask_id(mask_token_id, input_ids)
    if input_ids.numel() == 0:
        return _nothing(input_ids, backend)
    return corruption.mask_all(input_ids, loss_mask, mask_id, backend)


def _nothing(input_ids: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    use_triton(backend, input_ids)  # which raises where the choice is a bad one
    p_mask = torch.empty(input_ids.shape, dtype=torch.float32, device=input_ids.device)
    return input_ids.clone(), torch.empty_like(p_mask, dtype=torch.bool), p_mask


def _check_batch(input_ids: torch.Tensor, loss_mask: torch.Tensor | None, *, optional: bool) -> None:
    check_ids("input_ids", input_ids)
    check_ndim("input_ids", input_ids, 2, "[B, L]")
    if optional and loss_mask is None:
        return
    check_mask("loss_mask", loss_mask, _shape(input_ids), "that of input_ids")
    check_same_device("input_ids", input_ids, loss_mask=loss_mask)


def _shape(tensor: torch.Tensor) -> Sequence[int]:
    return tuple(tensor.shape)


def _checked_mask_id(mask_token_id: int, input_ids: torch.Tensor) -> int:
    try:
        index = operator.index(mask_token_id)
    except TypeError:
        raise TypeError(f"mask_token_id must be an int, got {type(mask_token_id).__name__}") from None
    _check_fits("mask_token_id", index, input_ids)
    return index


def _check_fits(name: str, token: int, input_ids: torch.Tensor) -> None:
    limits = torch.iinfo(input_ids.dtype)
    if not limits.min <= token <= limits.max:
        dtype = str(input_ids.dtype).removeprefix("torch.")
        raise ValueError(f"{name} must fit the {dtype} of input_ids, [{limits.min}, {limits.max}], got {token}")


def _checked_real(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):  # NumPy's numbers too
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    return float(value)


def _checked_eps(eps: float) -> float:
    eps = _checked_real("eps", eps)
    if not 0 <= eps < 1:
        raise ValueError(f"eps must lie in [0, 1), got {eps}")
    return eps


def _checked_block_size(block_size: int | None) -> int | None:
    if block_size is None:
        return None
    check_positive_int("block_size", block_size)
    return int(block_size)
