"""Deferred negative log-likelihoods of rows: their weighted sum is one op, which skips rows of weight 0.

Affine functions of the NLL of rows with constant coefficients, also sums over some dimensions, are recorded as row
weights and an offset. A sum or mean over all rows is then ``weighted_linear_nll``, which computes its gradients in the
forward pass. Any other use computes the NLL of each row by ``linear_token_nll``. ``_nll_rules.py`` has the rules.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dllm_kernels import ops
from dllm_kernels._checks import check_target_range
from dllm_kernels._graph._own_graph import own_graph
from dllm_kernels._graph._plain import readable_without_sync
from dllm_kernels._graph._private import disable_dynamo, plainly, saved_tensors_hooks
from dllm_kernels.deferred._affine import VALUES, AffineRows, active_rows, affine_of
from dllm_kernels.deferred._expressions import RowFunction, row_numbers, row_values, weighted_rows
from dllm_kernels.deferred._graph import Recipe, Step
from dllm_kernels.deferred._pending import NeededStats, Pending, add_alive, compute
from dllm_kernels.deferred._record import Stats
from dllm_kernels.deferred._tensor import meta_after, replaced
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._interface import IGNORE

Tensor = torch.Tensor
NO_INDEX = -(2**31)  # ignore_index of log-probabilities, for which no id is ignored


class DeferredNLL(AffineRows):
    """Weighted NLL of rows, ``factor * row_weights * nll + offset``, summed over the last dimension of the rows or not.

    Parts: those of the logits, with the classes as the last dimension.

    Target and weights are copies, because the caller may write into the originals.

    Attributes:
        logits: a copy of the attributes of the logits that the rows are from.
        target: integers, one per row.
        ignore_index: target with NLL 0.
        function: function whose value takes the place of the NLL, with the index of the row as the target; or None.
    """

    logits: Any
    target: Tensor
    ignore_index: int
    function: RowFunction | None

    @classmethod
    def of(cls, logits: Any, target: Tensor, ignore_index: int, dtype: torch.dtype, factor: float = 1.0) -> Any:
        """Return the NLL of logits with the classes in any dimension."""
        nll = cls._new(
            logits.classes_last(), dtype, logits=logits.copied(), target=target.detach().clone(),
            ignore_index=ignore_index, function=None, **VALUES | {"factor": factor},
        )  # fmt: skip
        if logits.overwritten is None:
            return nll
        values = -factor * logits.overwritten.at(target)
        if ignore_index != NO_INDEX:
            values = torch.where(target == ignore_index, 0.0, values)
        return nll.masked(~logits.overwritten.mask, values)

    @classmethod
    def of_function(cls, logits: Any, parts: Any, function: RowFunction, dtype: torch.dtype) -> Any:
        """Return the value of a function of each row of logits with the classes last, computed from ``parts``."""
        target = row_numbers(logits.shape[:-1], logits.device)
        return cls._new(
            parts, dtype, logits=logits.copied(), target=target, ignore_index=NO_INDEX, function=function, **VALUES
        )

    @classmethod
    def _new(
        cls, parts: Any, dtype: torch.dtype, recipe: Any = None, meta: Any = None, needs: Any = None, **fields: Any
    ) -> Any:
        logits, target = fields["logits"], fields["target"]
        if needs is None:
            needs = [n and t is not None and t.requires_grad for t, n in zip(parts, logits.needs, strict=True)]
        if meta is None:
            meta = torch.empty(target.shape[: target.dim() - fields["summed"]], dtype=dtype, device="meta")
        recipe = recipe or Recipe(functools.partial(_values, dtype=dtype, **fields), logits.restored, needs)
        nll = cls.create(meta, parts, recipe, needs=needs, graph_parts=parts, **fields)
        nll.join()
        return nll

    @property
    def open(self) -> bool:
        """True if the values may be computed with others in one pass; a view uses the values of its base."""
        return not self.sources and self.function is None and super().open

    def needed_stats(self) -> NeededStats:
        """Return the statistics that the NLL needs of a pass that computes others too."""
        fields, ids = {name: getattr(self, name) for name in VALUES}, target_ids(self.target, self.ignore_index)
        return NeededStats(lambda stats: affine_of(-stats.log_probs[..., 0], self.dtype, **fields), ids)

    def result(self) -> Tensor:
        """Return the NLL; without a graph, such as old log-probabilities, its values, because the head may change."""
        return self if self.requires_grad else self.materialize()

    def changed(self, dtype: torch.dtype | None = None, recipe: Step | None = None, **changes: Any) -> Any:
        """Return the NLL of the same rows with other weights or dtype."""
        fields, dtype = {name: getattr(self, name) for name in FIELDS} | changes, dtype or self.dtype
        # Other uses of a function of values need its values, too.
        same = [x for x in (self, *self.sources) if self.sources and self.function and x.target is self.target]
        bare = [x for x in same if x.bare]
        if recipe is None and bare:
            affine = functools.partial(affine_of, dtype=dtype, **{name: fields[name] for name in VALUES})
            recipe = Step(affine, self.logits.restored, bare[:1])
        return self._new(self.tapped(), dtype, recipe, **fields)

    def after(self, sources: Sequence[Any], step: Callable[..., Tensor]) -> Any:
        """Return the NLL as another tensor."""
        fields = {name: getattr(self, name) for name in FIELDS}
        recipe = Step(step, self.logits.restored, sources)
        return self._new(self.tapped(), self.dtype, recipe, step(self.meta), self.needs, **fields)

    def reduced(self, count: Tensor | int | None = None) -> Tensor:
        """Return the sum over all rows, or the sum divided by a count."""
        divisor = max(count, 1) if isinstance(count, int) else 1 if count is None else count.clamp(min=1)
        weights = self.coefficients().to(accum_dtype(self.logits.hidden.dtype))
        weights = weights if count is None else weights / divisor
        weights = weights if self.finite is None else weights * self.finite
        offset = None if self.offset is None else self.offset.sum() / divisor
        dtype = self.dtype

        def finish(loss: Tensor) -> Tensor:
            loss = loss if offset is None else loss + offset
            if count is not None and not (isinstance(count, int) and count):
                counts = count if isinstance(count, Tensor) else torch.zeros((), device=loss.device)
                loss = torch.where(counts > 0, loss, torch.nan)  # 0 / 0
            return loss.to(dtype)

        total: DeferredSum = DeferredSum.of(self, weights, finish)
        if self.finite is not None:
            out = total.weighted(total.graph_parts)
            infinite = not (out.nll * weights).isfinite().all()
            return finish(self.materialize("nan_to_num").sum(dtype=weights.dtype) / divisor if infinite else out.loss)
        return total.result()

    def moved(self, move: Callable[[Tensor], Tensor]) -> Any:
        """Apply a move of rows, which must also accept tensors with more trailing dimensions than this one."""
        meta, is_view = meta_after(move, self) or (None, False)
        recipe = Step(move, self.logits.restored, [self]) if is_view else None  # a copy reads only its rows
        offset = None if self.offset is None else move(self.offset)
        return self._with_rows(move, recipe, meta if is_view else None, offset=offset)

    def _with_rows(self, move: Callable[[Tensor], Tensor], recipe: Any = None, meta: Any = None, **changes: Any) -> Any:
        h, u, *rest = self.tapped()
        fields = {name: getattr(self, name) for name in FIELDS} | changes
        fields |= {name: move(fields[name]) for name in PER_ROW if fields[name] is not None}
        return self._new((move(h), None if u is None else move(u), *rest), self.dtype, recipe, meta, **fields)  # type: ignore[arg-type]

    def summed_over(self, dims: Sequence[int], factor: float = 1.0) -> Any:
        """Return the sum over some dimensions, times a number."""
        first = self.ndim - len(dims)

        def rows(t: Tensor) -> Tensor:
            return t.movedim(tuple(dims), tuple(range(first, self.ndim))).flatten(first, self.ndim - 1 + self.summed)

        offset = None if self.offset is None else self.offset.sum(tuple(dims)) * factor
        return self._with_rows(rows, summed=True, factor=self.factor * factor, offset=offset)

    def unsqueezed(self, dim: int) -> Any:
        """Return the NLL with a new dimension at ``dim``, not negative."""
        return self.moved(lambda t: t.unsqueeze(dim))


class DeferredSum(Pending):
    """Sum of the weighted NLL of all rows; every operation computes it, and receives an ordinary tensor.

    Attributes:
        logits: see :class:`DeferredNLL`.
        target: see :class:`DeferredNLL`.
        ignore_index: see :class:`DeferredNLL`.
        row_weights: constants, one per row.
        finish: returns the value of this tensor from the weighted sum.
        weighted: returns the result of ``weighted_nll`` from the parts.
    """

    logits: Any
    target: Tensor
    ignore_index: int
    row_weights: Tensor
    finish: Callable[[Tensor], Tensor]
    weighted: Callable[[Any], Any]
    function: RowFunction | None
    _waits: bool = False

    @classmethod
    def of(cls, nll: DeferredNLL, row_weights: Tensor, finish: Callable[[Tensor], Tensor]) -> Any:
        """Return the sum of an NLL with constant weights; errors are raised here, not when the value is computed."""
        logits, target = nll.logits, nll.target
        logits.check_unchanged()
        if nll.function is None:
            check_target_range(
                readable_without_sync(target) or None, "targets", target, logits.classes, nll.ignore_index,
                counted=row_weights, excluded=logits.skip,
            )  # fmt: skip
        fields = {"logits": logits, "target": target, "ignore_index": nll.ignore_index, "function": nll.function}
        weighted: Any = functools.partial(_weighted, row_weights=row_weights, **fields)
        recipe = Recipe(lambda parts: finish(weighted(parts).loss), logits.restored, nll.needs)
        meta, parts = torch.empty((), dtype=nll.dtype, device="meta"), nll.tapped()
        return cls.create(
            meta, parts, recipe, needs=nll.needs, graph_parts=parts, row_weights=row_weights, finish=finish,
            weighted=weighted, **fields,
        )  # fmt: skip

    @property
    def open(self) -> bool:
        """True if the value may be computed with others in one pass."""
        return self.function is None and super().open

    def result(self) -> Tensor:
        """Return this sum, or its values if it has no graph or if hooks count the tensors saved for backward.

        Operands of a function are not copied, so its sum is computed before the caller may write into them.
        """
        if not self.needs_grad or saved_tensors_hooks() is not None or self.function is not None:
            return self.materialize()
        self._waits = True
        self.join()
        add_alive(self.logits.sums, self)
        return self

    def needed_stats(self) -> NeededStats:
        """Return the statistics that the sum needs of a pass that computes others too."""
        weights, finish = self.row_weights, self.finish

        def total(stats: Stats) -> Tensor:
            return finish((torch.where(weights != 0, -stats.log_probs[..., 0], 0.0) * weights).sum())

        return NeededStats(total, target_ids(self.target, self.ignore_index))

    def materialize(self, use: str = "materialize") -> Tensor:
        """Return the value, computed in one pass with the values of other pending members."""
        if self._value is None and self.open and (members := self.together()):
            compute(members)
        elif self._value is None:
            inference = torch.is_inference_mode_enabled() and not self.needs_grad
            graph = own_graph() if self._waits else contextlib.nullcontext()  # a checkpoint computes it once
            with torch.inference_mode(inference), torch.set_grad_enabled(self.needs_grad), graph:
                parts = self.graph_parts if self.filled() is self.parts else self.tapped()  # with values freed since
                self.receive(self.finish(self.weighted(parts).loss))
        else:
            self.sync()
        return self._value  # type: ignore[no-any-return]

    def receive(self, value: Tensor) -> None:
        """Set the value, and release the tensors that it was computed from."""
        with plainly():
            self._value = value
            self.detach_()
        self.sync()
        released = ("graph_parts", "logits", "target", "row_weights", "finish", "weighted", "_recipe", "_tapped")
        vars(self).update(dict.fromkeys(released), parts=())

    @classmethod
    @disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call_with_values(func, args, kwargs)

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


def _call_with_values(func: Any, args: Any, kwargs: Any) -> Any:
    sums: list[DeferredSum] = []

    def value(x: Any) -> Any:
        if not isinstance(x, DeferredSum):
            return x
        sums.append(x)
        return x.materialize()

    kwargs = kwargs or {}
    result = func(*replaced(args, value), **dict(zip(kwargs, replaced(kwargs.values(), value), strict=True)))
    for x in sums:
        x.sync()
    return next((x for x in sums if x._value is result), result)  # such as x.to(x.dtype), which is x


def _weighted(parts: Any, logits: Any, target: Tensor, ignore_index: int, function: Any, row_weights: Tensor) -> Any:
    record = logits.rows_of(parts)
    if function is not None:
        return weighted_rows(record, function, target, row_weights)
    return ops.weighted_nll(record, target, row_weights, ignore_index=ignore_index, check_targets=False)


def target_ids(target: Tensor, ignore_index: int) -> Tensor:
    """Return targets as ids ``[..., 1]`` of statistics, which take -100 for a missing id."""
    return target.masked_fill(target == IGNORE, -1).masked_fill(target == ignore_index, IGNORE).unsqueeze(-1)


FIELDS = "logits", "target", "ignore_index", "function", *VALUES
PER_ROW = "target", "row_weights", "finite"


def _values(
    parts: Any, logits: Any, target: Tensor, ignore_index: int, function: RowFunction | None, dtype: torch.dtype,
    **affine: Any,
) -> Tensor:  # fmt: skip
    active = active_rows(**affine)
    record, checks = logits.rows_of(parts), readable_without_sync(target) or None  # as torch checks them
    if function is not None:
        return affine_of(row_values(record, function, target, active), dtype, **affine)
    nll = ops.token_nll(record, target, ignore_index=ignore_index, active=active, check_targets=checks).nll
    return affine_of(nll, dtype, **affine)


def dtype_after(function: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the result of a function that keeps the dtype of its input, unless autocast changes it."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return dtype
    return function(torch.zeros(1, 2, dtype=dtype, device=device)).dtype
