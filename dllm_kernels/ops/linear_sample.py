r"""Samples from hidden states and the LM head: chosen tokens, their log-probabilities and entropies, without logits.

The logits exist one chunk at a time, from one matrix product. A token is drawn by the Gumbel-max trick (Gumbel 1954;
Maddison, Tarlow, Minka 2014, arXiv 1411.0030): with independent uniforms u_v,

    argmax_v x_v - ln(-ln u_v)

has the distribution softmax(x). It needs no normaliser and no second look at the row, and u is a function of the row's
seed and the column (``_random/_philox.py``): neither the chunk nor the batch nor the device decides what is drawn.
"""

from __future__ import annotations

from typing import Any

import torch

from dllm_kernels._core._inputs import GRAD_INPUTS, RowInputs
from dllm_kernels._core._plan import Options
from dllm_kernels._core._results import LinearSample
from dllm_kernels._core._run import checked, run
from dllm_kernels._core._sample import LINEAR_SAMPLE
from dllm_kernels._random._philox import resolve_seed
from dllm_kernels._utils import _checks
from dllm_kernels._utils._named import replaced
from dllm_kernels._utils._plain import any_dtensor, plain
from dllm_kernels._utils._transform import Transform

NAMES = _checks.Names("hidden", "active", "head", "bias")


def linear_sample(
    hidden: torch.Tensor,
    head: torch.Tensor,
    *,
    temperature: float = 1.0,
    seeds: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    bias: torch.Tensor | None = None,
    extra: _checks.Extra | None = None,
    top_k: int | None = None,
    active: torch.Tensor | None = None,
    chunk_size: int | None = None,
    num_active: int | None = None,
    logits_dtype: torch.dtype | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    skip_id: int | None = None,
    backend: str = "auto",
) -> LinearSample:
    r"""Choose a token for each row of hidden states: the most likely one, or a sample at a temperature.

    .. math:: x = \text{transform}(W h + b) / T, \qquad \text{id} = \arg\max_v \; x_v - \ln(-\ln u_v)

    The sample is exact: no probability is truncated or sorted. The uniform u of a column has 48 bits of the Philox
    stream of the row's seed. Equal logits therefore give the same token on a CPU and on a GPU, in any batch, with any
    ``chunk_size``, and with a vocabulary that is split over ranks. (A matrix product may round differently for another
    chunk or device, and then the logits are not equal to the last bit.) The result has no gradient.

    Examples:
        >>> hidden, head = torch.eye(3), torch.tensor([[0.0, 1.0, 5.0], [4.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
        >>> linear_sample(hidden, head, temperature=0).ids.tolist()  # of equal logits the lowest id
        [1, 0, 0]
        >>> out = linear_sample(hidden, head, seeds=torch.tensor([1, 2, 3]), top_k=2)
        >>> out.top_ids.tolist()
        [[1, 0], [0, 1], [0, 1]]

    Args:
        hidden: ``[..., D]``, float16, bfloat16, float32 or float64.
        head: ``[V, D]``, the LM head, of the dtype of ``hidden`` unless autocast is on.
        temperature: T >= 0, by which the transformed logits are divided. 0 takes the most likely token, the lowest id
            among equals; log-probabilities and entropy are then those of T = 1.
        seeds: int64, of the leading dimensions of ``hidden``: all of them, one seed per row; or fewer, such as ``[B]``
            for ``[B, L, D]``, one seed per sequence whose rows are numbered in their order. Equal seeds give equal
            noise: take other seeds at each step. Not read at T = 0.
        generator: draws a seed for the call if there are no ``seeds``; None: the default generator of the device.
        bias: ``[V]`` or None.
        extra: a second part of the head, of its dtype: (u ``[..., r]``, U ``[V, r]``) adds ``U u`` to the logits; or
            None.
        top_k: also return so many of the most likely tokens of each row.
        active: ``[...]``, bool or numeric. A row whose entry is 0 is not projected. None: all rows.
        chunk_size: number of rows whose logits exist at a time; None: chosen from the sizes.
        num_active: an upper bound of the number of active rows, else read back from a GPU. Too small a bound gives NaN.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32, where ties are judged
            too. None: the dtype of the operands.
        softcap: c > 0 makes each logit ``c tanh(z / c)``, as Gemma's are; None: no cap.
        scale: s > 0 multiplies each logit, after the cap; None: 1.
        skip_id: a column that is never chosen, such as MASK's.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`LinearSample`: ids, log-probabilities, entropies; ids and log-probabilities of the ``top_k``. The
        log-probabilities are those of ``softmax(x)``, what :func:`token_log_probs` gives at the same temperature.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not fit, a number is out of range, both ``seeds`` and ``generator`` are
            given, neither is and the head is a DTensor, whose ranks would draw different noise, or an unknown backend.
    """
    _checks.check_float("hidden", hidden)
    _checks.check_number("temperature", temperature)
    _checks.check_factor("scale", scale)
    rows = hidden.shape[:-1]
    noise: dict[str, Any] = {}
    if temperature != 0:
        scale = (1.0 if scale is None else scale) / _checks.checked_temperature(temperature)
        if seeds is None and generator is None and any_dtensor(hidden, head):
            raise ValueError("seeds or generator must be given where hidden or head is a DTensor, got neither")
        noise = _seeds_and_numbers(hidden, seeds, generator)
    options = Options(
        Transform(softcap, scale, skip_id), check_targets=False, backend=backend, chunk_size=chunk_size,
        num_active=num_active, logits_dtype=logits_dtype, top_k=top_k,
    )  # fmt: skip
    ids = torch.zeros((), dtype=torch.int64, device=hidden.device).expand(rows)  # known only once logits are there
    inputs, options = checked(NAMES, RowInputs(hidden, ids, head, bias, active=active), options, extra=extra)
    constants = {n: None if t is None else t.detach() for n, t in zip(GRAD_INPUTS, inputs.grad_inputs, strict=True)}
    return run(LINEAR_SAMPLE, replaced(inputs, **constants, **noise), options)  # type: ignore[no-any-return]


def _seeds_and_numbers(
    hidden: torch.Tensor, seeds: torch.Tensor | None, generator: torch.Generator | None
) -> dict[str, torch.Tensor]:
    """Return the seed of each row, and the number of the row among those that have the same one."""
    rows = hidden.shape[:-1]
    if seeds is None:
        seeds = resolve_seed(hidden.device, 1, generator, None)
    else:
        _checks.check_tensor("seeds", seeds)
        seeds = plain(seeds)
        assert seeds is not None
        if generator is not None:
            raise ValueError("generator and seeds exclude each other: expected one of them, got both")
        _checks.check_dtype("seeds", seeds, (torch.int64,))
        if seeds.dim() > len(rows) or seeds.shape != rows[: seeds.dim()]:
            raise ValueError(
                f"seeds must have the shape of leading dimensions of hidden, of {tuple(rows)}, got {tuple(seeds.shape)}"
            )
        _checks.check_same_device("hidden", hidden, seeds=seeds)
    rest = rows[seeds.dim() :]
    numbers = torch.arange(rest.numel(), device=hidden.device).view(rest)
    return {"seeds": seeds.reshape(seeds.shape + (1,) * len(rest)).expand(rows), "numbers": numbers.expand(rows)}
