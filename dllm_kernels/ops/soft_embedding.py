r"""Expected embedding of the predicted token, the input of self-conditioned denoisers at the next step.

    e_i = sum_v p_iv E_v,      p_i = softmax(transform(W h_i + b) + t_i onehot(k_i)).

The probabilities exist one chunk at a time and overwrite the logits of the chunk. A chunk takes two matrix products.
Between them are two passes over the chunk: the first computes the normalizer, the second overwrites the logits with p.

The gradient of the logsumexp is p, so the backward pass of the row statistics writes p over the logits. A bump t is
added to the transformed logit of column b of a row, without an additional pass. The logit z_b is read and replaced by
the lowest number. With S the sum over the other columns,

    p'_v = e^{z_v - M} / Z for v != b,      p'_b = e^{z_b + t - M} / Z,      Z = S + e^{z_b + t - M},

which needs one coefficient for the row and one for column b. Z is a sum of positive terms. The alternative,
1 - p_b + p_b e^t, cancels if p_b is nearly 1 and t is far below 0. With a soft cap the lowest number still has a
probability p_0, at most that of any other column, so that S is the rest of the sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._graph import _changing
from dllm_kernels._graph._opaque import Spec, opaque
from dllm_kernels._graph._plain import any_dtensor, plain
from dllm_kernels.rows._call import Call, as_linear_logits, checked, flat_ids, flat_values, row_marks
from dllm_kernels.rows._chunks import Chunks, no_autocast
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import IGNORE
from dllm_kernels.rows._logits import Head, Logits, flat_rows
from dllm_kernels.rows._options import Options
from dllm_kernels.rows._setup import Setup, Split
from dllm_kernels.rows._stats_interface import Coefficients, StatsRequest, StatsResult
from dllm_kernels.rows._transform import Transform, transformed

NAMES = _checks.Names("hidden", "bump_ids", "head")


def soft_embedding(
    hidden: Logits, head: Tensor | None, embedding: Tensor, *, bias: Tensor | None = None,
    extra: _checks.Extra | None = None, bump: float | Tensor | None = None, bump_ids: Tensor | None = None,
    active: Tensor | None = None, chunk_size: int | None = None, num_active: int | None = None,
    logits_dtype: torch.dtype | None = None, softcap: float | None = None, scale: float | None = None,
    skip_id: int | None = None, check_targets: bool | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    r"""Compute the expected row of ``embedding`` under the predicted distribution of each position.

    .. math:: e_i = \sum_v p_{iv} E_v, \qquad
        p_i = \text{softmax}(\text{transform}(W h_i + b) + t_i \, \text{onehot}(k_i))

    Self-conditioning adds the result to the input of the next denoising step. All tensors are constants: the result has
    no gradient, even if the inputs require one. The logits exist one chunk at a time. The op takes two matrix products.

    Args:
        hidden: ``[..., D]``, float16, bfloat16, float32 or float64. Or :class:`LinearLogits`, with ``head`` None.
        head: ``[V, D]``, the LM head, of the dtype of ``hidden`` unless autocast is on.
        embedding: ``[V, E]``, of the dtype of ``hidden`` unless autocast is on. If embedding and head are tied, pass
            the head. The caller must apply any factor by which the model scales its embeddings.
        bias: ``[V]`` or None.
        extra: low-rank second part of the head, in its dtype, (u ``[..., r]``, one row per row of hidden states; U
            ``[V, r]``), or None. ``U u`` is added to the logits.
        bump: t, a number or ``[...]``, added to the logit of ``bump_ids`` after the transform, for example the logit of
            a token that is already decided. -inf in a tensor excludes the token from its row. A large bump causes no
            loss of precision.
        bump_ids: k, ``[...]`` integers; -100: no bump in this row. Any other value outside ``[0, V)`` raises an
            IndexError on a CPU and gives NaN in that row on a GPU; ``skip_id`` gives NaN. Required with ``bump``; None
            without it.
        active: ``[...]``, bool or numeric. Rows with entry 0 are not projected, and their result is 0. None: all rows.
        chunk_size: rows per chunk of logits; None: chosen from the sizes and the memory of the device.
        num_active: upper bound on the number of active rows; None: read back from a GPU, a host sync. If the bound is
            too small, all floating results and all gradients are NaN, flags are False, and the ids of ``with_ids`` are
            -100.
        logits_dtype: torch.float32 keeps the logits of float16 and bfloat16 operands in float32. The probabilities are
            rounded once, to the dtype of the operands, before they multiply the embedding. None: the dtype of the
            operands.
        softcap: c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.
        scale: s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.
        skip_id: column that is never predicted, such as the MASK column; its probability is 0. None: every column can
            be predicted.
        check_targets: raise an IndexError that names the first out-of-range target or id of an active row. None: the
            environment variable ``DLLM_KERNELS_CHECK``, 1 or 0; if it is unset, True for eager calls on a CPU, and
            False elsewhere. True also rejects ``skip_id``, and costs a host sync on a GPU. The ids are ``bump_ids``.
        backend: "auto", "triton" or "torch".

    Returns:
        ``[..., E]``, detached, in the dtype of ``hidden``, or in the autocast dtype. With DTensors, head and embedding
        must be sharded over the vocabulary in the same way. Every rank returns the full result as a plain tensor.

    Raises:
        TypeError: an argument that should be a tensor or a number is not.
        ValueError: shapes, dtypes or devices do not match, a number is out of range, only one of ``bump`` and
            ``bump_ids`` is given, rows and head have incompatible shardings, or the backend is unknown.
        IndexError: an entry of ``bump_ids`` is out of range and checked, see ``check_targets``.

    Source: self-conditioning as in DiffusionGemma; introduced by Chen et al. 2022, arXiv 2208.04202, section 3.2.
    """
    logits = as_linear_logits(hidden, head, bias, extra, logits_dtype, chunk_size, num_active)
    x, weight = logits.hidden, logits.weight
    _checks.check_float("hidden", x)
    if (bump is None) != (bump_ids is None):
        name = "bump_ids" if bump is None else "bump"
        raise ValueError(f"bump and bump_ids must both be given or neither, got {name} alone")
    if bump_ids is None:
        bump_ids = torch.full(x.shape[:-1], IGNORE, dtype=torch.int64, device=x.device)
    options = Options(Transform(softcap, scale, skip_id), check_targets=check_targets, backend=backend)
    call = checked(NAMES, logits, bump_ids, options, active=active).detached
    _check_embedding(x, weight, embedding)
    call.options.transform.check_leaves_a_column(weight.shape[0])
    assert call.head is not None
    table = call.head.weight if embedding is weight else embedding.detach()  # tied
    return soft_embedding_unchecked(call, _checked_bump(x, bump), embedding=table)


def _check_embedding(hidden: Tensor, head: Tensor, embedding: Tensor) -> None:
    _checks.check_float("embedding", embedding)
    _checks.check_gathered(embedding=embedding)
    V = head.shape[0]
    if embedding.dim() != 2 or embedding.shape[0] != V or embedding.shape[1] < 1:
        raise ValueError(
            f"embedding must have shape ({V}, E) with E >= 1, as many rows as head, got {tuple(embedding.shape)}"
        )
    _checks.check_same_device("hidden", hidden, embedding=embedding)
    _checks.check_dtypes("hidden", hidden, {"embedding": embedding})


def _checked_bump(hidden: Tensor, bump: Any) -> Tensor | None:
    """Validate the bump; return one value per row."""
    if bump is None:
        return None
    rows = hidden.shape[:-1]
    if isinstance(bump, Tensor):
        bump = plain(bump)
        _checks.check_weights("bump", bump, rows, "that of hidden without its last dimension")
        _checks.check_same_device("hidden", hidden, bump=bump)
        return bump  # type: ignore[no-any-return]
    _checks.check_number("bump", bump, "a number or a tensor")
    dtype = accum_dtype(hidden.dtype)
    most = torch.finfo(dtype).max
    if not -most <= bump <= most:
        raise ValueError(f"bump must be finite in {dtype}, got {_changing.printable(bump)}")
    return torch.full(rows, float(bump), dtype=dtype, device=hidden.device)


def soft_embedding_unchecked(call: Call, bump: Tensor | None, embedding: Tensor, split: Split | None = None) -> Tensor:
    """Compute :func:`soft_embedding` of validated constants; ``call.ids`` are the columns of the bumps."""
    hidden, head, rows = call.x, call.head, call.rows
    assert head is not None
    if call.on_ranks or any_dtensor(embedding):
        from dllm_kernels.distributed.run import on_this_rank

        return on_this_rank(soft_embedding_unchecked, call, {"bump": bump}, embedding=embedding)  # type: ignore[no-any-return]
    if split is not None and split.other_rows:
        raise ValueError(
            "hidden must not have its rows split over ranks that have the same columns of the head, got rows "
            f"{tuple(hidden.shape[:-1])} of {split.shape} here; give each rank's own, hidden.to_local(), with a head "
            "that is plain or split by vocabulary"
        )
    setup = Setup.of(call.logits, call.options, split)
    columns = flat_ids(call.ids, rows, setup.transform)
    values = None if bump is None else flat_values(bump, setup.accum_dtype)
    table = None if embedding is head.weight else embedding
    (out,) = _expectation(flat_rows(hidden), head.flat, table, row_marks(call.active), columns, values, setup)
    return out.view(*rows, out.shape[1])


def _specs(
    hidden: Tensor, head: Head, embedding: Tensor | None, _marks: Any, _ids: Tensor, _bump: Any, setup: Setup
) -> list[Spec]:
    table = head.weight if embedding is None else embedding
    return [((hidden.shape[0], table.shape[1]), setup.dtype)]


@opaque("soft_embedding", _specs)
def _expectation(
    hidden: Tensor, head: Head, embedding: Tensor | None, marks: Tensor | None, ids: Tensor, bump: Tensor | None,
    setup: Setup,
) -> list[Tensor]:  # fmt: skip
    """Compute ``[N, E]`` in the dtype of the operands, zero in inactive rows.

    ``embedding``: None for the weight of the head. ``marks [N]``: ``IGNORE`` in inactive rows; None if every row is
    active.
    """
    transform = setup.transform
    with no_autocast(hidden):
        own_table = None if embedding is None else embedding.to(setup.dtype)  # before Chunks, which may sync
        chunks = Chunks(hidden, head, marks, setup)
        rows, primitives = chunks.rows, chunks.primitives
        table = chunks.weight if own_table is None else own_table
        dtype = setup.dtype if primitives.add_parts is None else setup.accum_dtype
        out = rows.empty(table.shape[1], dtype=dtype, device=hidden.device)
        untransformed = transform.softcap is None and transform.scale is None
        for chunk, _, targets, logits in chunks:
            request = StatsRequest(rows.take(ids, chunk), targets, transform=transform, through_transform=untransformed)
            bumped = None
            if bump is not None:
                z = _taken_out(logits, request.ids, chunks)
                bumped = z + rows.take(bump, chunk).unsqueeze(1)
            result = primitives.stats.forward(logits[None], request)
            c = _coefficients(request, result, bumped)
            primitives.stats.backward(logits[None], request, c, result.norms, logits[None])
            rows.put(out, chunk, torch.mm(logits.to(setup.dtype), table))
        (out,) = rows.finished([out])
        return [out if primitives.add_parts is None else primitives.add_parts(out.contiguous()).to(setup.dtype)]


def _taken_out(logits: Tensor, ids: Tensor, chunks: Chunks) -> Tensor:
    """Return the transformed logits ``[C, 1]`` of the ids, and overwrite them by the lowest number.

    The number is chosen such that no scale makes it -inf.
    """
    V, primitives = logits.shape[1], chunks.primitives
    transform, acc = chunks.setup.transform, chunks.setup.accum_dtype
    if primitives.local_ids is not None:
        ids = primitives.local_ids(ids)
    if V:
        in_range, row = (ids >= 0) & (ids < V), torch.arange(len(ids), device=ids.device).unsqueeze(1)
        at = row, ids.clamp(0, V - 1)
        z = logits[at]
        lowest = torch.finfo(logits.dtype).min / max(1.0, 2 * (transform.scale or 1))
        logits[at] = z.masked_fill(in_range, lowest)  # on a CPU, scatter_ of bfloat16 copies all logits
        z = z.to(acc)
        z = transformed(z, transform.pointwise, z).masked_fill(~in_range, 0)
    else:
        z = torch.zeros(ids.shape, dtype=acc, device=logits.device)
    return z if primitives.add_parts is None else primitives.add_parts(z)


def _coefficients(request: StatsRequest, result: StatsResult, bumped: Tensor | None) -> Coefficients:
    """Compute the factor S / Z of the row and, for column b, p'_b minus the S / Z p_0 that the factor gives it."""
    log_p = result.log_probs
    if bumped is None:
        return Coefficients(torch.zeros_like(log_p), torch.ones_like(result.row_max))
    in_range, log_sum = request.ids != IGNORE, result.log_sum.unsqueeze(1)
    p_lowest = torch.exp(log_p.clamp(max=0))
    others = log_sum + torch.log1p(-p_lowest)
    bumped = bumped - result.row_max.unsqueeze(1)
    log_z = torch.logaddexp(others, bumped)
    share = torch.where(others == -math.inf, 0.0, torch.exp(log_sum - log_z))  # 0: the row has no other column
    grad_ids = torch.where(in_range, torch.exp(bumped - log_z) - share * p_lowest, 0.0)
    return Coefficients(grad_ids, torch.where(in_range, share, 1.0).squeeze(1))
