"""One ``OpCase`` per op, and one per further path through its code: all that tests need to know about an op.

All lists of ops in tests are created here. A case calls its op with logits, stored or a ``LinearLogits``, and with
``Rows``, which have one entry per row of logits.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

import reference
from dllm_kernels import ops
from dllm_kernels.ops import LinearLogits
from dllm_kernels.rows._logits import detached, map_rows, replaced, vocabulary_of
from tests.support.statistics import DIFFERENTIABLE as STATISTICS
from tests.support.statistics import EVERY_FLAG, FLAGS


class Rows(NamedTuple):
    """Inputs of the ops besides logits, each ``[...]``.

    Attributes:
        ids: int64, at least ``low`` and at most V - 2.
        mask: bool.
        weights: floating, 0 outside of the mask.
        positive: floating, between 0.1 and 1.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    positive: torch.Tensor

    @classmethod
    def drawn(cls, *shape: int, V: int, low: int = 0, device: Any = None) -> "Rows":
        """Draw them from torch's default generator, about a third of the mask False."""
        ids = torch.randint(low, V - 1, shape, device=device)
        positive = torch.rand(shape, device=device) * 0.9 + 0.1
        return cls.of(ids, torch.rand(shape, device=device) < 0.7, positive)

    @classmethod
    def of(cls, ids: torch.Tensor, mask: torch.Tensor, positive: torch.Tensor) -> "Rows":
        """Build them from ids, a mask and positive numbers."""
        return cls(ids, mask, positive * mask, positive)

    @property
    def small(self) -> torch.Tensor:
        """Numbers from 0 to 1, some of them 0."""
        return self.positive.pow(9) * (self.ids % 4 != 0)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Rows":
        """Apply a function to each tensor."""
        return Rows(*map(function, self))


def teacher_of(x: Any) -> Any:
    """Return logits of a teacher, without the low-rank part of a head. Each row is a function of the student's."""
    # A roll, which DTensors of torch 2.11 do not have.
    teacher = map_rows(detached(x), lambda t: 1.5 * torch.cat([t[..., -1:], t[..., :-1]], -1))
    return replaced(teacher, extra=None) if isinstance(x, LinearLogits) else teacher


def other_teacher(x: Any) -> Any:
    """Return five rows of a teacher that do not depend on the student's, one for each ``ids % 5``."""

    def waves(t):
        table = torch.linspace(-9, 9, 5 * t.shape[-1], dtype=torch.float32, device=t.device).sin()
        return table.view(5, -1).to(t.dtype)

    teacher = map_rows(detached(x), waves)
    return replaced(teacher, num_active=None) if isinstance(x, LinearLogits) else teacher


def larger_teacher(x: Any) -> Any:
    """Return logits of a teacher with twice as many columns."""
    teacher = teacher_of(x)
    if not isinstance(x, LinearLogits):
        return torch.cat([teacher, 0.5 * teacher], -1)
    bias = None if x.bias is None else torch.cat([teacher.bias, teacher.bias])
    return replaced(teacher, weight=torch.cat([teacher.weight, 0.5 * teacher.weight]), bias=bias, skip_id=None)


def focal(stats: ops.RowStats, weights: torch.Tensor) -> torch.Tensor:
    """Compute a focal loss, with a slope of 0 at statistics that are NaN, as an objective may have."""
    log_probs = torch.where(stats.log_probs.isfinite(), stats.log_probs, 0.0)
    return -0.1 * weights * (1 - log_probs.exp()).square() * log_probs  # of size 1 over a batch


def _top(x: Any, r: Rows) -> tuple[Any, ...]:
    """Return two ids per row, their log-probabilities of a teacher, and weights."""
    return torch.stack([r.ids, r.ids + 1], -1), torch.stack([-1 - r.positive, -1.5 - r.positive], -1), r.weights


def _topk_oracle(z: torch.Tensor, r: Rows, **options: Any) -> list[torch.Tensor]:
    return [reference.topk_divergence(z, *_top(z, r), **options).loss]


def _stats_oracle(z: torch.Tensor, r: Rows, names: tuple[str, ...] = STATISTICS) -> list[torch.Tensor]:
    out = reference.row_stats(z, r.ids, (r.small, r.positive), r.mask)
    return [getattr(out, name) for name in names]


def _in_columns(x: Any, r: Rows) -> dict[str, Any]:
    """Return the options of a teacher that has every second of its columns in common with the student."""
    columns = 2 * torch.arange(vocabulary_of(x), device=r.ids.device)
    return {"draft_to_target": columns, "teacher": "full"}


@dataclass(frozen=True, eq=False)
class OpCase:
    """Description of an op for the tests.

    Attributes:
        name: public name of the op, and after a comma the path through its code. It is part of the ids of its tests.
        arguments: (logits, rows) -> the positional arguments after the logits; of ``older``, the first are hidden
            states.
        options: (logits, rows) -> keywords. A call may replace them.
        differentiable: names of the differentiable results; none for an op without a backward pass.
        kinds: the kinds of logits that the op takes, "stored" and "head"; none for an op of other tensors.
        older: name of the function of hidden states and head that is the op of a record, if there is one.
        oracle: (stored logits, rows) -> the differentiable results.
        products: matrix products of the rows in the mask, if nothing, the rows, rows and head, or the head require
            gradients.
        syncs: host syncs of forward, of backward with a frozen head, and of backward with a trained head.
        instead: function with a second derivative, which the error names.
        independent: whether the results of a row do not depend on other rows.
        traced: whether a record runs no custom op, because a graph contains what follows the products.
        ids: name of the argument for the ids, if all other arguments but the factors are optional.
        factors: names of the arguments that multiply rows, in which the results are linear.
        kernels: the launches that are expected on a GPU, a key of ``KERNELS`` in ``tests/support/mock_gpu_checks.py``;
            None: kernels of the file with the name of the op.
    """

    name: str
    arguments: Callable[[Any, Rows], tuple[Any, ...]] = lambda x, r: (r.ids,)
    options: Callable[[Any, Rows], Mapping[str, Any]] = lambda x, r: {"active": r.mask}
    differentiable: tuple[str, ...] = ("loss",)
    kinds: tuple[str, ...] = ("stored", "head")
    older: str | None = None
    oracle: Callable[[torch.Tensor, Rows], list[torch.Tensor]] | None = None
    products: tuple[int, int, int, int] | None = None
    syncs: tuple[int, int, int] | None = None
    instead: str = "log_softmax"
    independent: bool = True
    traced: bool = False
    ids: str | None = None
    factors: tuple[str, ...] = ()
    kernels: str | None = None

    @property
    def op(self) -> Callable[..., Any]:
        """The public function."""
        return getattr(ops, self.name.partition(",")[0])

    def __call__(self, x: Any, r: Rows, **options: Any) -> Any:
        """Call the op; ``x`` is not used if it takes no logits."""
        logits = (x,) if self.kinds else ()
        return self.op(*logits, *self.arguments(x, r), **{**self.options(x, r), **options})

    def of_hidden(self, h: torch.Tensor, w: torch.Tensor, r: Rows, **options: Any) -> Any:
        """Call the older function."""
        return getattr(ops, self.older)(h, w, *self.arguments(h, r), **{**self.options(h, r), **options})

    def values(self, out: Any) -> list[torch.Tensor]:
        """Return the differentiable results."""
        return [getattr(out, name) for name in self.differentiable]

    def total(self, x: Any, r: Rows, **options: Any) -> torch.Tensor:
        """Return the sum of the differentiable results."""
        return sum(t.sum() for t in self.values(self(x, r, **options)))

    def accepted(self, **options: Any) -> dict[str, Any]:
        """Return the options that the op has; a scale is the inverse of a temperature if it has only that."""
        parameters = inspect.signature(self.op).parameters
        if "scale" in options and "scale" not in parameters:
            options["temperature"] = 1 / options["scale"]
        return {name: value for name, value in options.items() if name in parameters}

    @property
    def floats(self) -> list[str]:
        """Names of the float arguments, all of which may change between calls of a compiled op."""
        parameters = inspect.signature(self.op).parameters.items()
        return [name for name, p in parameters if p.annotation in ("float", "float | None", float, float | None)]


def results(out: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a result by name."""
    return {"": out} if isinstance(out, torch.Tensor) else {k: t for k, t in out._asdict().items() if t is not None}


WITH_ARGMAX = {"with_correct": True, "with_ids": True}
_TOKEN_NLL = OpCase(
    "token_nll", options=lambda x, r: {"active": r.mask, "with_lse": True, **WITH_ARGMAX}, differentiable=("nll",),
    older="linear_token_nll", oracle=lambda z, r: [reference.token_nll(z, r.ids, active=r.mask)],
    products=(1, 2, 4, 3), syncs=(1, 0, 1), instead="cross_entropy", ids="targets", kernels="nll",
)  # fmt: skip
_WEIGHTED_NLL = OpCase(
    "weighted_nll", lambda x, r: (r.ids, r.weights), lambda x, r: {"with_lse": True, **WITH_ARGMAX},
    older="weighted_linear_nll", oracle=lambda z, r: [reference.weighted_nll(z, r.ids, r.weights)],
    products=(1, 2, 3, 2), syncs=(1, 0, 0), instead="cross_entropy", ids="targets", factors=("weights",),
    kernels="nll",
)  # fmt: skip
_ROW_STATS = OpCase(
    "row_stats",
    options=lambda x, r: {"mix": (r.small, r.positive), "active": r.mask, **EVERY_FLAG},
    differentiable=STATISTICS, older="linear_row_stats", oracle=_stats_oracle,
    products=(1, 3, 4, 3), syncs=(1, 1, 1), ids="ids",
    kernels="row_stats",
)  # fmt: skip
_ROW_OBJECTIVE = OpCase(
    "row_objective", lambda x, r: (r.ids, focal, r.positive),
    lambda x, r: {"entropy": True, "active": r.mask, **WITH_ARGMAX}, older="linear_row_objective",
    oracle=lambda z, r: [reference.row_objective(z, r.ids, focal, r.positive, active=r.mask)],
    products=(1, 2, 3, 2), syncs=(1, 0, 0), traced=True,
    kernels="row_objective",
)  # fmt: skip
_TOKEN_LOG_PROBS = OpCase(
    "token_log_probs", options=lambda x, r: {"active": r.mask, "with_entropy": True},
    differentiable=("log_probs", "entropy"), products=(1, 3, 4, 3), syncs=(1, 1, 1),
    oracle=lambda z, r: _stats_oracle(z, r._replace(mask=r.mask & (r.ids != -100)), ("log_probs", "entropy")),
    kernels="row_stats",
)  # fmt: skip
_DIVERGENCE = OpCase(
    "divergence", lambda x, r: (teacher_of(x), r.weights),
    lambda x, r: {"kind": {"kl": 0.5, "jsd": 0.3, "nla": 0.2, "lk": 1.0, "ce": 0.1}, "targets": r.ids, "alpha": "mean"},
    older="linear_divergence", syncs=(1, 0, 0), instead="softmax", independent=False,
    kernels="divergence",
)  # fmt: skip
_TOPK = OpCase(
    "topk_divergence", _top, lambda x, r: {"kind": "jsd"}, older="linear_topk_divergence",
    oracle=lambda z, r: _topk_oracle(z, r, kind="jsd"), products=(1, 2, 3, 2), syncs=(1, 0, 0), traced=True,
    kernels="topk_divergence",
)  # fmt: skip
_LINEAR_SAMPLE = OpCase(
    "linear_sample", lambda x, r: (), lambda x, r: {"seeds": r.ids, "active": r.mask, "return_top": 2},
    differentiable=(), kinds=("head",), products=(1, 1, 1, 1), syncs=(1, 0, 0),
    kernels="sample",
)  # fmt: skip
_SOFT_EMBEDDING = OpCase(
    "soft_embedding", lambda x, r: (None, x.weight.detach()[:, :3]),
    lambda x, r: {"active": r.mask, "bump": r.positive, "bump_ids": r.ids}, differentiable=(), kinds=("head",),
    syncs=(1, 0, 0),
    kernels="row_stats",
)  # fmt: skip
_DPACE_WEIGHTS = OpCase(
    "dpace_weights", lambda x, r: (r.positive, r.mask), lambda x, r: {}, differentiable=(), kinds=(),
)  # fmt: skip
_GUMBEL_TOPK_MASK = OpCase(
    "gumbel_topk_mask", lambda x, r: (r.positive.log(), r.ids[..., 0] % 3), lambda x, r: {"seeds": r.ids[..., 0]},
    differentiable=(), kinds=(),
)  # fmt: skip


_OF_ROWS = replace(_DIVERGENCE, independent=True)
OP_CASES = (
    _TOKEN_NLL,
    _WEIGHTED_NLL,
    replace(
        _WEIGHTED_NLL, name="weighted_nll, active, rounded",
        options=lambda x, r: {"active": r.mask, "round_nll": True}, oracle=None,
    ),
    _ROW_STATS,
    replace(
        _ROW_STATS, name="row_stats, two ids of all rows", arguments=lambda x, r: _top(x, r)[:1],
        options=lambda x, r: FLAGS, differentiable=tuple(name for name in STATISTICS if name != "mix"), oracle=None,
        products=None, syncs=(0, 1, 1),
    ),
    _ROW_OBJECTIVE,
    replace(
        _ROW_OBJECTIVE, name="row_objective, all rows", options=lambda x, r: {}, oracle=None, products=None,
        syncs=(0, 0, 0),
    ),
    _TOKEN_LOG_PROBS,
    _DIVERGENCE,
    replace(
        _OF_ROWS, name="divergence, all rows", arguments=lambda x, r: (teacher_of(x),), options=lambda x, r: {},
        syncs=(0, 0, 0),
    ),
    replace(
        _OF_ROWS, name="divergence, rows", options=lambda x, r: {"kind": "tv", "reduction": "none"}, syncs=(1, 0, 1)
    ),
    replace(
        _OF_ROWS, name="divergence, other teacher", arguments=lambda x, r: (other_teacher(x), r.weights),
        options=lambda x, r: {"kind": {"kl": 0.5, "tv": 1.0, "ce": 0.2}, "targets": r.ids, "teacher_rows": r.ids % 5},
    ),
    replace(
        _OF_ROWS, name="divergence, columns", arguments=lambda x, r: (larger_teacher(x), r.weights),
        options=_in_columns,
    ),
    _TOPK,
    replace(
        _TOPK, name="topk_divergence, rows without a tail", products=None, syncs=(1, 1, 1), traced=False,
        options=lambda x, r: {"tail": False, "reduction": "none"},
        oracle=lambda z, r: _topk_oracle(z, r, tail=False, reduction="none"),
    ),
    _LINEAR_SAMPLE,
    replace(
        _LINEAR_SAMPLE, name="linear_sample, truncated", products=None, syncs=(0, 0, 0),
        options=lambda x, r: {"seeds": r.ids, "top_k": 5, "top_p": 0.8},
    ),
    replace(
        _LINEAR_SAMPLE, name="linear_sample, greedy", products=None, syncs=(0, 0, 0),
        options=lambda x, r: {"temperature": 0},
    ),
    _SOFT_EMBEDDING,
    replace(
        _SOFT_EMBEDDING, name="soft_embedding, tied", arguments=lambda x, r: (None, x.weight.detach()),
        options=lambda x, r: {"bump": 1.0, "bump_ids": r.ids}, syncs=(0, 0, 0),
    ),
    _DPACE_WEIGHTS,
    _GUMBEL_TOPK_MASK,
)  # fmt: skip
OP_BY_NAME = {case.name: case for case in OP_CASES}
FIRST_OPS = tuple(case for case in OP_CASES if "," not in case.name)
OF_LOGITS = tuple(case for case in OP_CASES if case.kinds)
DIFFERENTIABLE = tuple(case for case in OP_CASES if case.differentiable)
# Each case with each kind of logits that its op takes, as parameters of a test.
OF_EVERY_KIND = [(kind, case) for case in OF_LOGITS for kind in case.kinds]


def name_of(value: Any) -> str | None:
    """Return the name of a case for the id of a test."""
    return value.name if isinstance(value, OpCase) else None
