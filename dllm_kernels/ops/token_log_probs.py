"""Log-probabilities and entropies of given tokens, for policy training: current, old and reference policies."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph._named import replaced
from dllm_kernels.ops.row_stats import row_stats_unchecked
from dllm_kernels.rows._call import checked
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._logits import LinearLogits, Logits
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._stats_interface import StatsFlags
from dllm_kernels.rows._transform import Transform

NAMES = _checks.Names("logits_or_hidden", "ids", hidden="logits_or_hidden")


class TokenLogProbs(NamedTuple):
    """Per-token results in nats, of the shape of the ids, differentiable in one backward pass; 0 for missing ids.

    Attributes:
        log_probs: log-probability of each id, float32 (float64 for float64 input).
        entropy: entropy of the predicted distribution, or None unless requested.
    """

    log_probs: Tensor
    entropy: Tensor | None = None


def token_log_probs(
    logits_or_hidden: Logits, ids: Tensor, *, weight: Tensor | None = None,
    bias: Tensor | None = None, extra: _checks.Extra | None = None, temperature: float = 1.0,
    with_entropy: bool = False, active: Tensor | None = None, softcap: float | None = None,
    skip_id: int | None = None, chunk_size: int | None = None, num_active: int | None = None,
    logits_dtype: torch.dtype | None = None, check_targets: bool | None = None, backend: str = "auto",
) -> TokenLogProbs:  # fmt: skip
    r"""Compute ``log softmax(z / temperature)[id]`` of each token, from logits or from hidden states and the LM head.

    Under ``torch.no_grad``, as for old and reference policies, the LM head takes one matrix product and nothing is
    saved. Tokens with id -100 or ``active`` 0 are neither read nor projected.

    Examples:
        >>> hidden = torch.zeros(1, 3, 8)
        >>> weight = torch.zeros(10, 8)
        >>> ids = torch.tensor([[3, 1, -100]])
        >>> out = token_log_probs(
        ...     hidden, ids, weight=weight, temperature=0.7, with_entropy=True
        ... )
        >>> (
        ...     [round(x, 4) for x in out.log_probs[0].tolist()],
        ...     [round(x, 4) for x in out.entropy[0].tolist()],
        ... )
        ([-2.3026, -2.3026, 0.0], [2.3026, 2.3026, 0.0])

    Args:
        logits_or_hidden: logits ``[..., V]`` or, with ``weight``, hidden states ``[..., D]``; float16, bfloat16,
            float32 or float64.
        ids: ``[...]``, integers in ``[0, V)`` or -100; any other value, or ``skip_id``, gives NaN in that entry.
        weight: the LM head ``[V, D]``, or None for logits.
        bias: ``[V]``, only with ``weight``.
        extra: low-rank second part of the head, in its dtype, (u ``[..., r]``, one row per row of hidden states; U
            ``[V, r]``), or None. ``U u`` is added to the logits. Only with ``weight``.
        temperature: T > 0. The logits are divided by T, after the cap.
        with_entropy: also return the entropy of the predicted distribution of each token, differentiable.
        active: ``[...]``, bool or numeric; tokens with entry 0 are inactive. None: every token with an id other than
            -100.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        skip_id: column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the
            NLL or log-probability of a target or id equal to it is NaN. None: every column can be predicted.
        chunk_size: rows per chunk of logits; None: chosen from the sizes and the memory of the device. Only with
            ``weight``.
        num_active: upper bound on the number of active rows; None: read back from a GPU, a host sync. If the bound is
            too small, all floating results and all gradients are NaN, flags are False, and the ids of ``with_ids`` are
            -100. Only with ``weight``.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32, also for the argmax.
            The gradient of the logits is rounded once, before its matrix products. None: the dtype of the operands.
            Only with ``weight``.
        check_targets: raise an IndexError that names the first out-of-range target or id of an active row. None: the
            environment variable ``DLLM_KERNELS_CHECK``, 1 or 0; if it is unset, True for eager calls on a CPU, and
            False elsewhere. True also rejects ``skip_id``, and costs a host sync on a GPU.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`TokenLogProbs`.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, an argument that needs ``weight``
            is given without it, or the backend is unknown.
        IndexError: an id is out of range and checked, see ``check_targets``.

    Source: the definition, :func:`row_stats` and :func:`linear_row_stats` with ``scale=1 / temperature``.
    """
    flags = StatsFlags(entropy=_checks.checked_bool("with_entropy", with_entropy))
    hidden: Any = logits_or_hidden
    record = LinearLogits(hidden, weight, bias, extra, logits_dtype, chunk_size, num_active)  # type: ignore[arg-type]
    for name, value in zip(record._fields[2:], record[2:], strict=True):
        if value is not None and weight is None:
            raise ValueError(f"{name} requires weight, got weight=None")
    logits = logits_or_hidden if weight is None else record
    options = Options(
        Transform(softcap, 1 / _checks.checked_temperature(temperature), skip_id), check_targets=check_targets,
        backend=backend,
    )  # fmt: skip
    call = checked(NAMES, logits, ids, options, active=active)
    scored = call.ids.long() != IGNORE  # int64, because -100 equals 156 in uint8
    scored = scored if call.active is None else scored & (call.active != 0)
    out = row_stats_unchecked(replaced(call, active=scored), None, flags)
    return TokenLogProbs(out.log_probs, out.entropy)
