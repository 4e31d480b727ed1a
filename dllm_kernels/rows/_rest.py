r"""Log-probability of all columns of a row other than its ids, accurate also if the ids hold nearly all of the mass.

With the transformed logits z of a row, (M, log S) of all columns, and (M', log S') of the columns that are not ids,

    log r = (M' - M) + log S' - log S.

1 - sum_k p_k would be a difference of nearly equal numbers: in float32 it loses a mass below 1e-7, and its logarithm
and gradient with it. The sum S' is therefore a second pass, over a copy of some rows with -inf at the ids.

For upstream gradients g_k of log p_k, h of log r and A = g_lse - sum_k g_k - h,

    dL/dz_v = (r A + h) p_v / r    for columns v that are not ids,        dL/dz_k = g_k + p_k A,

and p_v / r = exp(z_v - M' - log S') is at most 1. One pass of the gradient primitive with this normalizer computes all
columns. The columns of the ids, in which it may overflow, are then overwritten.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dllm_kernels.rows._chunks import aligned_rows
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import IGNORE, column_of
from dllm_kernels.rows._primitives import RowPrimitives
from dllm_kernels.rows._stats_interface import Coefficients, StatsRequest, StatsResult
from dllm_kernels.rows._transform import transformed, with_slope

# Logits that are copied at a time, 64 MiB in float32.
BLOCK_ELEMENTS = 1 << 24


def with_rest(primitives: RowPrimitives, logits: Tensor, request: StatsRequest, result: StatsResult) -> StatsResult:
    """Add log r, M' and log S' of logits ``[B, L, V]``.

    log r is -inf if no other column has a finite logit, and 0 in inactive rows.
    """
    (B, L, V), acc, ids = logits.shape, accum_dtype(logits.dtype), request.ids
    if (column := request.transform.skip_id) is not None:
        ids = torch.cat([ids, ids.new_full((len(ids), 1), column)], 1)
    ids = local_ids(primitives, ids)
    columns, out_of_range = column_of(ids, V)
    if out_of_range is not None:
        columns = columns.masked_fill(out_of_range, V)  # column V of the copy is not read
    # If the vocabulary is split, every rank must make the same number of blocks, whatever its number of columns.
    size = max(1, BLOCK_ELEMENTS // (V + 1) if primitives.local_ids is None else B * L)
    copy = aligned_rows(min(size, B * L), V + 1, dtype=acc, device=logits.device)
    unused = torch.zeros(len(copy), 1, dtype=torch.int64, device=logits.device)  # an id for a log-probability
    row_max, log_sum = torch.empty_like(result.row_max), torch.empty_like(result.log_sum)
    evenly_spaced = B == 1 or logits.stride(0) == L * logits.stride(1)
    start = 0
    for rows in (logits.flatten(0, 1),) if evenly_spaced else logits.unbind(0):
        for block in torch.split(rows, size):
            n, span = len(block), slice(start, start + len(block))
            z = copy[:n, :V]
            transformed(z.copy_(block), request.transform.pointwise, z)
            copy[:n].scatter_(1, columns[span], -math.inf)
            part = primitives.stats.forward(z[None], StatsRequest(unused[:n], request.targets[span]))
            row_max[span], log_sum[span], start = part.row_max, part.log_sum, start + n
    rest = (row_max - result.row_max) + (log_sum - result.log_sum)
    rest = rest.clamp_(max=0).masked_fill_(request.targets == IGNORE, 0)
    return result._replace(rest=rest, rest_max=row_max, rest_sum=log_sum)


def rest_backward(
    primitives: RowPrimitives, logits: Tensor, request: StatsRequest, c: Coefficients, result: StatsResult, out: Tensor
) -> None:
    """Write the gradient with respect to the logits ``[B, L, V]`` to ``out``, which may be the logits themselves.

    Not for the entropy or a mixture.
    """
    assert c.p_logp_coef is None
    assert c.mix_coef is None
    assert c.rest_coef is not None
    assert result.rest is not None
    rest, V, ids = result.rest, logits.shape[-1], local_ids(primitives, request.ids)
    A, empty = c.p_coef - c.rest_coef, rest == -math.inf
    others = (A * rest.exp() + c.rest_coef).masked_fill_(empty, 0)
    row_max = torch.where(empty, result.row_max, result.rest_max)
    log_sum = torch.where(empty, result.log_sum, result.rest_sum)
    held = (ids >= 0) & (ids < V)
    # An id without a column on this rank repeats the row's first id that has one.
    first_held = held.to(torch.int64).argmax(1, keepdim=True)
    column = torch.where(held, ids, ids.gather(1, first_held))
    any_held = held.any(1, keepdim=True)
    column = column.masked_fill(~any_held, 0)
    grad_ids = _id_grads(logits, request, c.grad_ids + result.log_probs.exp() * A.unsqueeze(1), column) if V else None
    # Not whole: a backend may normalize whole rows by itself.
    no_ids = request._replace(ids=torch.full_like(ids[:, :1], IGNORE), whole=False)
    coefficients = Coefficients(torch.zeros_like(c.grad_ids[:, :1]), others)
    primitives.stats.backward(logits, no_ids, coefficients, (row_max, log_sum), out)
    if grad_ids is None:
        return
    grad_ids = torch.where(held, grad_ids, grad_ids.gather(1, first_held)).to(out.dtype)
    shape = (*out.shape[:2], ids.shape[1])
    column = column.view(shape)
    out.scatter_(2, column, torch.where(any_held.view(*shape[:2], 1), grad_ids.view(shape), out.gather(2, column)))


def _id_grads(logits: Tensor, request: StatsRequest, grad: Tensor, column: Tensor) -> Tensor:
    """Backpropagate the gradients ``[N, K]`` of transformed logits at these columns; 0 in inactive rows."""
    transform, shape = request.transform.pointwise, (*logits.shape[:2], grad.shape[1])
    z = logits.gather(2, column.view(shape)).view(grad.shape).to(grad.dtype)
    _, slope = with_slope(z, transform, torch.empty_like(z), torch.empty_like(z))
    return (grad * slope).masked_fill_((request.targets == IGNORE).unsqueeze(1), 0)


def local_ids(primitives: RowPrimitives, ids: Tensor) -> Tensor:
    """Return the columns of the ids on this rank, ``IGNORE`` for a column of another rank."""
    return ids if primitives.local_ids is None else primitives.local_ids(ids)
