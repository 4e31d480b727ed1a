"""Few logits: what a call costs is then the number of operations, so these are all active rows at once, in the caller's thread.

Nothing is done for what is not there, and each function returns None where something is out of the ordinary: a transform, an id
that no column has (which torch refuses), a row of which nothing is finite. Then ``rows_torch/_stats.py`` does the work, a block
of rows at a time. The arithmetic of both is the same: which way a row goes follows the size of its batch, and its bits must not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dllm_kernels.base._row_stats import FARTHEST, StatsRequest, StatsResult, Upstream
from dllm_kernels.base._rows import NLL, SKIP
from dllm_kernels.base._transform import NO_TRANSFORM, Transform
from dllm_kernels.rows_torch._blocks import FEW, GRAIN, places, sum_rows

Rows = torch.Tensor | None
LONG = 256  # logits of a row
MORE = 5 << 18  # logits of which a weighted sum is still made at once: 5 MiB of them, half of 8 x 512 rows of 512


def forward(logits: torch.Tensor, request: StatsRequest) -> StatsResult | None:
    """The statistics; see ``base/_row_stats.py``."""
    if request.a is not None or request.correct or not _may_be_few(logits, request.transform):
        return None
    rows = None if request.all_on or request.active.amin().item() >= 0 else places(request.active != SKIP)
    ids = _taken(request.ids, rows)
    if (z := _listed(logits, rows)) is None:
        return None
    log_p, N = torch.log_softmax(z, 1), request.active.shape[0]
    try:
        log_probs = log_p.gather(1, ids)
    except (IndexError, RuntimeError):  # an id that no column has
        return None
    lse = (None, None) if not request.lse else _normalizer(z, log_p, rows, N)
    if lse is None:
        return None
    entropy = (0 - sum_rows(log_p.exp().mul_(log_p.clamp_(min=FARTHEST)))).squeeze(1) if request.entropy else None
    row_max, log_sum = lse
    return StatsResult(
        _whole(log_probs, rows, N), row_max, log_sum, None if entropy is None else _whole(entropy, rows, N)
    )


class Active(NamedTuple):
    """The rows that weigh anything: their numbers, None for all, targets, weights and, of few, logits in the dtype of sums."""

    rows: Rows
    ids: torch.Tensor
    scale: torch.Tensor
    z: torch.Tensor | None = None

    @classmethod
    def of(cls, targets: torch.Tensor, scale: torch.Tensor) -> Active:
        """From those ``[N]`` of all rows."""
        rows = _nonzero(scale)
        return cls(rows, _taken(targets, rows), _taken(scale, rows))

    @property
    def with_target(self) -> Active:
        """Without those whose target is none."""
        kept = places(self.ids != SKIP)
        return Active(kept if self.rows is None else self.rows[kept], self.ids[kept], self.scale[kept])


def weighted_sum(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Active] | None:
    """The sum of weights * NLL, the NLL, both of the shape of the rows, and what :func:`weighted_grad` takes."""
    acc = torch.float64 if logits.dtype == torch.float64 else torch.float32
    dtypes = (targets.dtype, weights.dtype)
    if not _may_be_few(logits, NO_TRANSFORM) or dtypes != (torch.int64, acc) or weights.requires_grad:
        return None
    y, w = targets.reshape(-1), weights.reshape(-1)
    rows = _nonzero(w)
    if (z := _listed(logits, rows, MORE)) is None:
        return None
    # Of most rows, a copy kept until backward would be more than what plain PyTorch keeps.
    keeps = z.numel() <= FEW and (rows is None or 3 * z.shape[0] <= 2 * w.numel())
    # Where these are all rows, targets and weights are the caller's, who may write into them.
    ids, scale = (y.clone(), w.clone()) if rows is None else (y.index_select(0, rows), w.index_select(0, rows))
    log_p = torch.log_softmax(z, 1) if keeps or rows is None else torch.log_softmax(z, 1, out=z)
    found = _nll(log_p, ids, rows, w.numel())
    if found is None:
        return None
    nll = found.view(targets.shape)
    return (nll * weights).sum(), nll, Active(rows, ids, scale, z if keeps else None)


def _nll(log_p: torch.Tensor, ids: torch.Tensor, rows: Rows, N: int) -> torch.Tensor | None:
    """Of all rows, 0 in those that are not listed."""
    try:
        found = torch.nn.functional.nll_loss(log_p, ids, ignore_index=SKIP, reduction="none")
    except (IndexError, RuntimeError):  # a target that no column has
        return None
    return found.add_(0.0) if rows is None else found.new_zeros(N).index_add_(0, rows, found)  # either way no -0


def weighted_nll(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, transform: Transform, with_lse: bool
) -> tuple[Any, ...] | None:
    """The NLL of the rows that weigh anything; see ``base/_rows.py``."""
    if not _may_be_few(logits, transform):
        return None
    # A row without a target adds 0 by itself; its logsumexp does not, and is that of no row that is read.
    rows = _nonzero(weights.masked_fill(targets == SKIP, 0) if with_lse else weights)
    if (z := _listed(logits, rows)) is None:
        return None
    log_p, N = torch.log_softmax(z, 1), weights.numel()
    nll = _nll(log_p, _taken(targets, rows), rows, N)
    lse = (None, None) if not with_lse else _normalizer(z, log_p, rows, N)
    return None if nll is None or lse is None else (nll * weights, nll, *lse, None)


def nll_grad(
    logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None, transform: Transform,
    out: torch.Tensor,
) -> bool:  # fmt: skip
    """The gradient of the NLL; False where nothing was done."""
    if not (_may_be_few(logits, transform) and out.is_contiguous()):
        return False
    active = Active.of(targets, scale)
    if active.ids.numel() and active.ids.amin().item() < 0:
        active = active.with_target
    over = out.data_ptr() == logits.data_ptr()
    if over and active.ids.numel() and active.ids.amax().item() >= logits.shape[-1]:
        return False  # which would show only after the logits, that the other way reads, have been written over
    times = 1.0 if factor is None else factor.item()
    return bool(times) and _are_few(logits, active.rows) and _grad(logits, active, times, out)


def weighted_grad(logits: torch.Tensor, active: Active, factor: torch.Tensor) -> torch.Tensor:
    """The gradient of :func:`weighted_sum`, times a factor."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device="cpu")
    if not (times := factor.item()):
        return out.zero_()
    if not (_grad(logits, active, times, out) or _grad(logits, active.with_target, times, out)):
        raise AssertionError("these targets were columns in the forward pass")
    return out


def _grad(logits: torch.Tensor, active: Active, factor: float, out: torch.Tensor) -> bool:
    rows, plain = active.rows, active.scale.unsqueeze(1)
    if factor != 1:
        plain = plain * factor
    grad, made = _room(len(plain), plain.dtype, rows, out)
    z = active.z
    if z is None:
        z = _wide(logits, None) if rows is None else _copied(logits, rows, grad)
    try:
        torch.softmax(z, 1, out=grad).mul_(plain).scatter_add_(1, active.ids.unsqueeze(1), -plain)
    except (IndexError, RuntimeError):  # a target that no column has, or none at all
        return False
    _put(made, rows, out)
    return True


def small_backward(
    logits: torch.Tensor, request: StatsRequest, found: StatsResult, upstream: Upstream
) -> torch.Tensor | None:
    """The gradient of the statistics in the logits ``[N, V]``, from what ``base/_row_stats.py`` calls (g_k, A, B)."""
    if request.a is not None or not request.whole or not _may_be_few(logits, request.transform):
        return None
    rows = None if request.all_on or request.active.amin().item() >= 0 else places(request.active != SKIP)
    ids, log_probs = _taken(request.ids, rows), _taken(found.log_probs, rows)
    # Of a finite log-probability all of its row is finite or -inf, and a gradient of 0 makes zeros of it.
    if (z := _listed(logits, rows)) is None or not _finite(log_probs):
        return None
    of_ids, of_lse, of_entropy = (None if t is None else _taken(t, rows) for t in upstream[:3])
    # Of an id that is none it is 0 whatever the row holds; where a gradient comes to one, ``scatter_add_`` refuses it below.
    if of_ids is None and not _finite(_taken(found.row_max + found.log_sum, rows)):
        return None
    plain = torch.zeros_like(z[:, 0]) if of_ids is None else -of_ids.sum(1)
    if of_lse is not None:
        plain += of_lse
    out = torch.empty(request.active.shape[0], logits.shape[-1], dtype=logits.dtype, device=logits.device)
    grad, made = _room(len(z), z.dtype, rows, out)
    if of_entropy is None:
        torch.softmax(z, 1, out=grad).mul_(plain.unsqueeze(1))
    else:
        row_max, log_sum, entropy = (_taken(t, rows) for t in (found.row_max, found.log_sum, found.entropy))
        of_log = -of_entropy
        plain = plain.sub_(of_entropy * entropy).sub_(of_log * log_sum).unsqueeze(1)
        d = torch.sub(z, row_max.unsqueeze(1)).clamp_(min=FARTHEST)
        torch.addcmul(plain, d, of_log.unsqueeze(1), out=grad).mul_(torch.softmax(z, 1))
    if of_ids is not None:
        try:
            grad.scatter_add_(1, ids, of_ids)
        except (IndexError, RuntimeError):
            return None
    _put(made, rows, out)
    return out


def first(
    nll: Callable[..., NLL], many: Callable[..., tuple[Any, ...]], grad: Callable[..., None]
) -> tuple[Callable[..., NLL], Callable[..., tuple[Any, ...]], Callable[..., None]]:
    """The row primitives of the NLL, those here tried before the ones that are given."""

    def weighted(
        logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, *, with_correct: bool,
        transform: Transform = NO_TRANSFORM, with_lse: bool = True,
    ) -> tuple[Any, ...]:  # fmt: skip
        few = None if with_correct else weighted_nll(logits, targets, weights, transform, with_lse)
        options: dict[str, Any] = {"with_correct": with_correct, "transform": transform, "with_lse": with_lse}
        return many(logits, targets, weights, **options) if few is None else few

    def gradient(
        logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, row_max: Any, log_sum: Any, out: torch.Tensor, *,
        factor: torch.Tensor | None = None, transform: Transform = NO_TRANSFORM,
    ) -> None:  # fmt: skip
        if not nll_grad(logits, targets, scale, factor, transform, out):
            grad(logits, targets, scale, row_max, log_sum, out, factor=factor, transform=transform)

    return nll, weighted, gradient


def _may_be_few(logits: torch.Tensor, transform: Transform) -> bool:
    return logits.is_cpu and 0 < logits.numel() <= 2 * MORE and logits.is_contiguous() and transform == NO_TRANSFORM


def _nonzero(t: torch.Tensor) -> Rows:
    rows = places(t)
    return None if rows.numel() == t.numel() else rows


def _taken(t: Any, rows: Rows) -> Any:
    return t if rows is None else t.index_select(0, rows)


def _are_few(logits: torch.Tensor, rows: Rows, few: int = FEW) -> bool:
    most = few if torch.get_num_threads() == 1 else GRAIN  # more than one core would wait for the others
    return 0 < (logits.numel() if rows is None else rows.numel() * logits.shape[-1]) <= most


def _listed(logits: torch.Tensor, rows: Rows, few: int = FEW) -> torch.Tensor | None:
    """As :func:`_wide`; None unless they are few."""
    return _wide(logits, rows) if _are_few(logits, rows, few) else None


def _wide(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """These rows in the dtype of sums, which may be memory of the logits."""
    z: torch.Tensor = _taken(logits.detach().view(-1, logits.shape[-1]), rows)
    return z if z.dtype in (torch.float32, torch.float64) else z.float()


def _copied(logits: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As :func:`_wide`, in the memory of ``out``."""
    flat = logits.detach().view(-1, logits.shape[-1])
    if flat.dtype == out.dtype:
        return torch.index_select(flat, 0, rows, out=out)
    return out.copy_(flat.index_select(0, rows))


def _normalizer(z: torch.Tensor, log_p: torch.Tensor, rows: Rows, N: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """M and log S; None where a row is all -inf."""
    row_max = z.amax(1)
    return (_whole(row_max, rows, N), _whole(log_p.amax(1).neg_(), rows, N)) if _finite(row_max) else None


def _finite(t: torch.Tensor) -> bool:
    return math.isfinite(t.sum().item())


def _whole(t: torch.Tensor, rows: Rows, N: int) -> torch.Tensor:
    """Of all rows, 0 in the others."""
    return t if rows is None else t.new_zeros(N, *t.shape[1:]).index_copy_(0, rows, t)


def _room(n: int, acc: torch.dtype, rows: Rows, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory for the gradient of n rows, the same with a row of zeros behind it where :func:`_put` wants one)."""
    V = out.shape[-1]
    if rows is None and out.dtype == acc:
        made = out if out.dim() == 2 else out.view(-1, V)
        return made, made
    if rows is None or (V >= LONG and out.dtype == acc):
        return (torch.empty(n, V, dtype=acc, device=out.device),) * 2
    made = torch.empty(n + 1, V, dtype=acc, device=out.device)
    made[n].zero_()
    return made[:n], made


def _put(made: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
    """Write rows of :func:`_room` to ``out``, and zeros to the others.

    Adding rows to zeros takes half the time of ``index_copy_``, but some per row, and longer where the dtype is a narrow one:
    then all rows are gathered, a row of zeros among them.
    """
    V = out.shape[-1]
    if rows is None:
        if made.dtype != out.dtype:  # else it is the same memory
            out.view(-1, V).copy_(made)
    elif len(made) == len(rows):
        out.zero_().view(-1, V).index_add_(0, rows, made)
    else:
        n = len(rows)
        place = torch.full((out.numel() // V,), n, device=out.device)
        place.index_copy_(0, rows, torch.arange(n, device=out.device))
        torch.index_select(made.to(out.dtype), 0, place, out=out.view(-1, V))
