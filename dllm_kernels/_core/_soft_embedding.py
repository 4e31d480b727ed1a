r"""Mean embedding of each row's distribution: probabilities, written over the logits, times the embedding.

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

import torch

from dllm_kernels._backends._row_stats import Coefficients, StatsRequest, StatsResult
from dllm_kernels._backends._rows import IGNORE, RowPrimitives
from dllm_kernels._core._chunks import Chunks, no_autocast
from dllm_kernels._core._inputs import NO_GRADIENTS, RowInputs
from dllm_kernels._core._op import Output, Outputs, RowOp
from dllm_kernels._core._plan import Plan
from dllm_kernels._core._stats import row_ids
from dllm_kernels._utils._transform import Transform, transformed


def _forward(inputs: RowInputs, plan: Plan) -> Outputs:
    """Compute ``[N, E]`` in the dtype of the operands, zero in inactive rows. ``ids`` are the columns of the bumps."""
    with no_autocast(inputs):
        tied, transform = inputs.embedding is inputs.weight, plan.options.transform
        own_table = None if tied else inputs.embedding.to(plan.dtype)  # before Chunks, which may sync
        chunks = Chunks(inputs, plan, NO_GRADIENTS)
        rows, primitives = chunks.rows, chunks.primitives
        table = chunks.weight if own_table is None else own_table
        dtype = plan.dtype if primitives.add_parts is None else plan.accum_dtype
        out = rows.empty(table.shape[1], dtype=dtype, device=inputs.x.device)
        through = transform.softcap is None and transform.scale is None
        for chunk, _, targets, logits in chunks:
            request = StatsRequest(rows.take(inputs.ids, chunk), targets, transform=transform, through=through)
            bumped = None
            if inputs.bump is not None:
                z = _taken_out(logits, request.ids, transform, primitives, plan.accum_dtype)
                bumped = z + rows.take(inputs.bump, chunk).to(plan.accum_dtype).unsqueeze(1)
            result = StatsResult(*primitives.stats.forward(logits[None], request))
            c = _coefficients(request, result, bumped)
            primitives.stats.backward(logits[None], request, c, result.row_max, result.log_sum, logits[None])
            rows.put(out, chunk, torch.mm(logits.to(plan.dtype), table))
        (out,) = rows.finished([out])
        return {"out": out if primitives.add_parts is None else primitives.add_parts(out.contiguous()).to(plan.dtype)}


def _taken_out(
    logits: torch.Tensor, ids: torch.Tensor, transform: Transform, primitives: RowPrimitives, acc: torch.dtype
) -> torch.Tensor:
    """Return the transformed logits ``[C, 1]`` of the ids, and overwrite them by the lowest number.

    The number is chosen such that no scale makes it -inf.
    """
    V = logits.shape[1]
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


def _coefficients(request: StatsRequest, result: StatsResult, bumped: torch.Tensor | None) -> Coefficients:
    """Compute the factor S / Z of the row and, for column b, p'_b minus the S / Z p_0 that the factor gives it."""
    log_p = result.log_probs
    if bumped is None:
        return Coefficients(torch.zeros_like(log_p), torch.ones_like(result.row_max), None, None)
    in_range, log_sum = request.ids != IGNORE, result.log_sum.unsqueeze(1)
    of_lowest = torch.exp(log_p.clamp(max=0))
    others = log_sum + torch.log1p(-of_lowest)
    bumped = bumped - result.row_max.unsqueeze(1)
    log_z = torch.logaddexp(others, bumped)
    share = torch.where(others == -math.inf, 0.0, torch.exp(log_sum - log_z))  # 0: the row has no other column
    of_ids = torch.where(in_range, torch.exp(bumped - log_z) - share * of_lowest, 0.0)
    return Coefficients(of_ids, torch.where(in_range, share, 1.0).squeeze(1), None, None)


SOFT_EMBEDDING = RowOp(
    name="soft_embedding",
    rows=row_ids,
    outputs=(Output("out", lambda inputs, plan: ((inputs.x.shape[0], inputs.embedding.shape[1]), plan.dtype)),),
    forward=_forward,
    result=lambda out: out,
)
