r"""The mean embedding of each row's distribution, over N rows: probabilities where a chunk's logits were, times the embedding.

The gradient of the logsumexp is p, so the statistics' backward pass writes p over the logits. A row's bump t of the column b,
which stands behind the transform, needs no pass of its own: with p as it is without it,

    p'_v = p_v / Z for v != b,      p'_b = p_b e^t / Z,      Z = (1 - p_b) + p_b e^t,

which is one coefficient for the row and one for that column.
"""

from __future__ import annotations

import torch

from dllm_kernels.base._row_stats import Coefficients, StatsRequest, StatsResult
from dllm_kernels.base._rows import SKIP
from dllm_kernels.rows._chunks import Chunks, no_autocast
from dllm_kernels.rows._plan import NO_GRADIENTS, Job, Plan


def table_of(job: Job) -> torch.Tensor:
    """The embedding ``[V, E]``."""
    assert job.table is not None
    return job.table


def forward(job: Job, plan: Plan) -> torch.Tensor:
    """``[N, E]`` in the dtype of the logits, zeros in a row that is off; the ids are those of the bumps, the weights their size."""
    with no_autocast(job):
        chunks = Chunks(job, plan, NO_GRADIENTS)
        rows, primitives = chunks.rows, chunks.primitives
        table, transform = table_of(job), plan.options.transform
        table = chunks.weight if table is job.weight else table.to(plan.dtype)  # tied
        dtype = plan.dtype if primitives.add_parts is None else plan.acc
        out = rows.empty(table.shape[1], dtype=dtype, device=job.x.device)
        through = transform.softcap is None and transform.scale is None
        for chunk, _, marks, logits in chunks:
            request = StatsRequest(rows.take(job.ids, chunk), marks, transform=transform, through=through)
            found = StatsResult(*primitives.stats.forward(logits[None], request))
            bump = None if job.weights is None else rows.take(job.weights, chunk)
            c = _coefficients(request, found, bump)
            primitives.stats.backward(logits[None], request, c, found.row_max, found.log_sum, logits[None])
            rows.put(out, chunk, torch.mm(logits, table))
        if rows.overflow is not None:
            out.masked_fill_(rows.overflow, float("nan"))
        out = rows.whole(out)
        return out if primitives.add_parts is None else primitives.add_parts(out.contiguous()).to(plan.dtype)


def _coefficients(request: StatsRequest, found: StatsResult, bump: torch.Tensor | None) -> Coefficients:
    """1 / Z, and for the column what p'_b is beyond p_b / Z."""
    log_p = found.log_probs
    if bump is None:
        return Coefficients(torch.zeros_like(log_p), torch.ones_like(found.row_max), None, None)
    there = request.ids != SKIP
    bumped = log_p + bump.unsqueeze(1)
    others = torch.log(-torch.expm1(log_p.clamp(max=0)))  # log(1 - p_b)
    log_z = torch.where(there, torch.logaddexp(others, bumped), 0.0)
    of_ids = torch.where(there, torch.exp(bumped - log_z) - torch.exp(log_p - log_z), 0.0)
    return Coefficients(of_ids, torch.exp(-log_z).squeeze(1), None, None)
