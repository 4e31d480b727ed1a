"""Functions that row statistics and their objectives share, from constants per row to the gradient of the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels._graph._opaque import Spec
from dllm_kernels.rows import _chain_rule
from dllm_kernels.rows._active_rows import ActiveRows
from dllm_kernels.rows._call import Call, as_marks, flat_ids, flat_values, row_marks
from dllm_kernels.rows._primitives import RowPrimitives
from dllm_kernels.rows._rest import rest_backward, with_rest
from dllm_kernels.rows._setup import Setup
from dllm_kernels.rows._stats_interface import Coefficients, Combined, StatsFlags, StatsRequest, StatsResult, Upstream

# Names of the outputs without a gradient, and of all outputs in the order in which the autograd Functions return them.
CONSTANT = (*(name for name in StatsFlags._fields if name not in Upstream._fields), "correct", "ids")
OUTPUTS = Upstream._fields + CONSTANT


class RequestedStats(NamedTuple):
    """Statistics requested for N rows, and constants per row.

    Attributes:
        ids: int64 ``[N, K]``, -1 for an id without a column.
        marks: int64 ``[N]``, ``IGNORE`` in inactive rows, 0 in all others; None if every row of a head is active.
        mix_a: a of the mixture ``log(a + b p)``, ``[N]``, or None.
        mix_b: b of the mixture, ``[N]``, or None.
        flags: further statistics that are requested.
        with_rest: True if the log-probability of all columns except the ids is requested.
        with_best: True if ``log_probs`` of the caller has the log-probability of the argmax last.
    """

    ids: Tensor
    marks: Tensor | None
    mix_a: Tensor | None
    mix_b: Tensor | None
    flags: StatsFlags
    with_rest: bool
    with_best: bool = False

    @classmethod
    def of(cls, call: Call, mix: Sequence[Tensor] | None, flags: StatsFlags, setup: Setup) -> RequestedStats:
        """Flatten the validated tensors of a call."""
        ids = flat_ids(call.ids, call.rows, setup.transform)
        a, b = (None, None) if mix is None else (flat_values(t, setup.accum_dtype) for t in mix)
        marks = row_marks(call.active)
        if isinstance(call.logits, Tensor):
            marks = as_marks(marks, ids)
        return cls(ids, marks, a, b, flags, call.options.rest, call.options.with_best)

    def request(self, setup: Setup, marks: Tensor | None = None, *, lse: bool = True) -> StatsRequest:
        """Return the request for the backend; ``marks``: ``self.marks`` as a tensor, if the caller has it."""
        return StatsRequest(
            self.ids, as_marks(self.marks, self.ids) if marks is None else marks, self.mix_a, self.mix_b,
            setup.transform, self.flags, setup.with_correct, setup.with_ids, any(setup.needs), lse=lse,
        )  # fmt: skip

    def specs(self, setup: Setup, *, lse: bool = True) -> list[Spec]:
        """Return shape and dtype of each field of :class:`StatsResult`."""
        (N, K), acc = self.ids.shape, setup.accum_dtype
        row: Spec = ((N,), acc)
        mix, lses, rest = (row if flag else None for flag in (self.mix_a is not None, lse, self.with_rest))
        fields: dict[str, Spec] = {
            "log_probs": ((N, K), acc), "row_max": lses, "log_sum": lses, "mix": mix,
            "mix_weight": mix if any(setup.needs) else None, "rest": rest, "rest_max": rest, "rest_sum": rest,
            "correct": ((N,), torch.bool) if setup.with_correct else None,
            "best": ((N,), torch.int64) if setup.with_ids else None, **dict.fromkeys(self.flags.requested, row),
        }  # fmt: skip
        return [fields.get(name) for name in StatsResult._fields]

    def empty(self, rows: ActiveRows, setup: Setup) -> list[Tensor | None]:
        """Allocate the fields of :class:`StatsResult`, for the chunks to fill."""
        device = self.ids.device
        return [
            None if spec is None else rows.empty(*spec[0][1:], dtype=spec[1], device=device)
            for spec in self.specs(setup)
        ]


def chunk_request(request: StatsRequest, rows: ActiveRows, chunk: slice, targets: Tensor) -> StatsRequest:
    """Return the request for the rows of a chunk, ``IGNORE`` in ``targets`` for inactive ones."""
    a, b = (None if t is None else rows.take(t, chunk) for t in (request.a, request.b))
    return request._replace(ids=rows.take(request.ids, chunk), targets=targets, a=a, b=b)


def statistics(primitives: RowPrimitives, logits: Tensor, request: StatsRequest, *, rest: bool) -> StatsResult:
    """Compute the statistics of logits ``[B, L, V]``."""
    result = primitives.stats.forward(logits, request)
    return with_rest(primitives, logits, request, result) if rest else result


def coefficients(primitives: RowPrimitives, request: StatsRequest, result: StatsResult, upstream: Upstream) -> Combined:
    """Combine the upstream gradients as ``_chain_rule.coefficients`` does; the backend does so for all but log r."""
    combine = primitives.stats.coefficients if upstream.rest is None else _chain_rule.coefficients
    return combine(request, result, upstream)


def each(function: Callable[[Tensor], Tensor], c: Coefficients) -> Coefficients:
    """Apply a function to all coefficients."""
    return Coefficients(*[None if t is None else function(t) for t in c])  # type: ignore[arg-type]


def divided(c: Coefficients, size: Tensor) -> Coefficients:
    """Divide all coefficients of a row by its entry of ``size``, if it is not 0."""
    size = torch.where(size == 0, 1.0, size)
    return each(lambda t: t / (size.unsqueeze(1) if t.dim() == 2 else size), c)


def write_gradient(
    primitives: RowPrimitives, logits: Tensor, request: StatsRequest, c: Coefficients, result: StatsResult, out: Tensor
) -> None:
    """Write the gradient with respect to the logits to ``out``; both ``[B, L, V]``, and maybe the same tensor."""
    if c.rest_coef is None:
        primitives.stats.backward(logits, request, c, result.norms, out)
    else:
        rest_backward(primitives, logits, request, c, result, out)


def outputs_of(result: StatsResult, *, lse: bool = True) -> tuple[Upstream, list[Tensor | None]]:
    """Return the differentiable outputs and the outputs ``CONSTANT``, None for outputs that were not requested."""
    row_lse = result.row_max + result.log_sum if lse else None
    differentiable = [row_lse if name == "lse" else getattr(result, name) for name in Upstream._fields]
    return Upstream(*differentiable), [result.best if n == "ids" else getattr(result, n) for n in CONSTANT]


def by_name(values: Iterable[Any], requested: RequestedStats, setup: Setup) -> dict[str, Any]:
    """Name the outputs of a Function, or their gradients: the entries of :func:`outputs_of` that are not None."""
    included = {
        "log_probs": True, "lse": setup.with_lse, "mix": requested.mix_a is not None, "rest": requested.with_rest,
        "correct": setup.with_correct, "ids": setup.with_ids, **requested.flags._asdict(),
    }  # fmt: skip
    return dict(zip([name for name in OUTPUTS if included[name]], values, strict=False))


def in_rows(values: Mapping[str, Tensor], call: Call) -> dict[str, Any]:
    """Return outputs ``[N, K]`` and ``[N]`` in the shape of the caller's ids and rows."""
    rows = call.rows
    ids = (*rows, values["log_probs"].shape[-1]) if call.options.with_best else call.ids.shape
    return {name: t.view(ids if name == "log_probs" else rows) for name, t in values.items()}


def record(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Return a record of statistics from values by name; None for statistics that were not requested."""
    return kind(*[values.get(name) for name in kind._fields])
