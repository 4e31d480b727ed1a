"""Sampling of one token per row of hidden states, with statistics of its distribution; one matrix product per chunk."""

from __future__ import annotations

import torch

from dllm_kernels._backends._row_stats import StatsRequest, StatsResult
from dllm_kernels._backends._rows import IGNORE
from dllm_kernels._core import _op
from dllm_kernels._core._chunks import Chunks, no_autocast
from dllm_kernels._core._inputs import NO_GRADIENTS, RowInputs
from dllm_kernels._core._plan import Plan
from dllm_kernels._core._results import LinearSample
from dllm_kernels._core._stats import row_ids
from dllm_kernels._random._noise import Noise
from dllm_kernels._utils._transform import NO_TRANSFORM


def _forward(inputs: RowInputs, plan: Plan) -> _op.Outputs:
    """Choose a token in each row of a chunk; then compute log-probabilities of it and of the most likely tokens."""
    options, k = plan.options, plan.options.return_top or 0
    with no_autocast(inputs):
        chunks = Chunks(inputs, plan, NO_GRADIENTS)
        rows, primitives, device = chunks.rows, chunks.primitives, inputs.x.device
        ids = rows.empty(1 + k, dtype=torch.int64, device=device)
        log_probs = rows.empty(1 + k, dtype=plan.accum_dtype, device=device)
        entropy = rows.empty(dtype=plan.accum_dtype, device=device)
        for chunk, _, targets, logits in chunks:
            noise = None
            if inputs.seeds is not None and inputs.row_numbers is not None:
                noise = Noise(rows.take(inputs.seeds, chunk), rows.take(inputs.row_numbers, chunk))
            whole = kept = logits, options.transform
            if options.truncation is not None:
                kept = primitives.truncated(*whole, options.truncation), NO_TRANSFORM
            chosen = primitives.sample(*kept, noise)[1].unsqueeze(1)
            if k:
                chosen = torch.cat([chosen, primitives.largest(logits, k, options.transform)[1]], 1)
            x, transform = whole if options.untruncated_log_probs else kept
            request = StatsRequest(chosen, targets, transform=transform, entropy=True)
            result = StatsResult(*primitives.stats.forward(x[None], request))
            rows.put_each([ids, log_probs, entropy], chunk, [chosen, result.log_probs, result.entropy])
        ids, log_probs, entropy = rows.finished([ids, log_probs, entropy])
    # If the softmax is NaN any id will do, but it must be valid, because an embedding would read out of bounds.
    ids = ids.masked_fill(log_probs[:, :1].isnan(), int(options.transform.skip_id == 0))
    ids = ids.masked_fill((inputs.targets == IGNORE).unsqueeze(1), IGNORE)
    outputs = {"ids": ids[:, 0].clone(), "log_probs": log_probs[:, 0].clone(), "entropy": entropy}
    if k:
        outputs |= {"top_ids": ids[:, 1:].clone(), "top_log_probs": log_probs[:, 1:].clone()}
    return outputs


def _top(dtype: torch.dtype | None) -> _op.SpecOf:
    """Make the spec of an output ``[N, return_top]``."""

    def spec(inputs: RowInputs, plan: Plan) -> _op.Spec | None:
        k = plan.options.return_top
        return None if k is None else ((inputs.x.shape[0], k), dtype or plan.accum_dtype)

    return spec


LINEAR_SAMPLE = _op.RowOp(
    name="linear_sample",
    rows=row_ids,
    outputs=(
        _op.Output("ids", _op.per_row(dtype=torch.int64)), _op.Output("log_probs", _op.per_row()),
        _op.Output("entropy", _op.per_row()),
        _op.Output("top_ids", _top(torch.int64)), _op.Output("top_log_probs", _top(None)),
    ),
    forward=_forward,
    result=LinearSample,
)  # fmt: skip
