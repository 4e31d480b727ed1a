r"""Noisy views of completions, and scores computed from them.

    S_b = sum_k sum_i w_kbi l_kbi,      l_kbi = log p(y_bi | view k),

with i over the tokens scored in view k. The expected sum of the weights of a supervised token is 1, so that S has the
scale of a log-likelihood. Under "coupled" it is 3/2, because each of the three views contributes 1/2.

**Random bits.** Each row has a seed. Draw n of a row is a level and one number per position, as the corruption routines
draw them under child seed n (``dllm_kernels.corruption._philox`` documents the layout). ``seeds`` are the seeds of the
rows. With a generator, one seed per call is drawn from it, and its child seed b is the seed of row b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dllm_kernels import _checks
from dllm_kernels._checks._backend import use_triton
from dllm_kernels._graph._plain import is_dtensor, plain, readable_without_sync
from dllm_kernels.corruption import (
    _philox,
    _seeds,
    check_batch,
    checked_mask_id,
    checked_start,
    corrupt_uniform,
    sample_level,
)
from dllm_kernels.corruption._topk import check_start_range
from dllm_kernels.losses._common import shift_left
from dllm_kernels.policy._quadrature import quadrature_rule
from dllm_kernels.rows._dtypes import accum_dtype

_LEAST_LEVEL = 2.0**-24  # of drawn levels, as in the corruption routines; the maximum is 1 minus this
_EUBO_SCHEMES = ("full", "elbo")  # their weights are 1 / (K t_k)


@dataclass(frozen=True, eq=False)
class PolicyViews:
    """Noisy views of a batch of completions, from :func:`policy_views`; unpacks to the first three attributes.

    Attributes:
        noisy: noisy tokens of each view ``[K, B, L]``, in the dtype of the ids.
        scored: bool ``[K, B, L]``, True for tokens that are scored in a view; these are masked in the view.
        weights: weights of the scored tokens, float32 ``[K, B, L]``; 0 if a token is not scored.
        num_supervised: number of supervised tokens per row, int64 ``[B]``, the denominator of the mean score. It cannot
            be computed from ``scored``, because a random mask may omit a token in every view. None: the number of
            tokens that are scored in any view.
        scheme: scheme of the views, or None; :func:`eubo` supports only some schemes. Copies with other tensors (a
            slice, several views concatenated) may keep it: only views as :func:`policy_views` returned them are taken
            to score each token at most once.

    Raises:
        TypeError: a field has the wrong type, or is a DTensor.
        ValueError: shapes, dtypes or devices do not match, or the scheme is unknown; on a CPU, a number of supervised
            tokens is negative.
    """

    noisy: Tensor
    scored: Tensor
    weights: Tensor
    num_supervised: Tensor | None = None
    scheme: str | None = None
    # Version of ``scored`` in which no token is scored in two views; None: not known. A copy does not have it.
    _scored_once_in: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Validate the fields."""
        fields = {"noisy": _checks.INT_DTYPES, "scored": (torch.bool,), "weights": _checks.FLOAT_DTYPES}
        for name, dtypes in fields.items():
            _check_field(name, getattr(self, name), dtypes)
        _checks.check_ndim("scored", self.scored, 3, "[K, B, L]")
        for name in ("noisy", "weights"):
            _checks.check_shape(name, getattr(self, name), self.scored.shape, "that of scored")
        if self.num_supervised is not None:
            _check_field("num_supervised", self.num_supervised, _checks.INT_DTYPES)
            _checks.check_shape("num_supervised", self.num_supervised, self.scored.shape[1:2], "one per row")
            _checks.check_none_negative("num_supervised", self.num_supervised)
        others: dict[str, Any] = {name: getattr(self, name) for name in ("noisy", "weights", "num_supervised")}
        _checks.check_same_device("scored", self.scored, **others)
        if self.scheme is not None:
            _checks.check_choice("scheme", self.scheme, SCHEMES)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield noisy, scored and weights."""
        return iter((self.noisy, self.scored, self.weights))

    def token_scores(self, log_probs: Tensor) -> Tensor:
        r"""Score each token: :math:`\sum_k w_{kbi} \, l_{kbi}`.

        Args:
            log_probs: log p of each token under each view ``[K, B, L]``, floating. NaN or infinity for a token that is
                not scored affects neither score nor gradient.

        Returns:
            ``[B, L]``, float32 (float64 for float64 input), differentiable; 0 for tokens that are scored in no view.

        Raises:
            TypeError: ``log_probs`` is not a tensor.
            ValueError: ``log_probs`` has another shape or device than the views, or is not floating.
        """
        log_probs = torch.where(self.scored, _checked_log_probs(log_probs, self), 0.0)
        return (self.weights.to(log_probs.dtype) * log_probs).sum(0)

    def sequence_scores(self, log_probs: Tensor, *, mean: bool = False) -> Tensor:
        r"""Score each sequence: :math:`S_b = \sum_k \sum_i w_{kbi} \, l_{kbi}`.

        Args:
            log_probs: log p of each token under each view ``[K, B, L]``, floating, as in :meth:`token_scores`.
            mean: divide by the number of supervised tokens.

        Returns:
            ``[B]``, float32 (float64 for float64 input), differentiable; 0 for rows without supervised tokens.

        Raises:
            TypeError: as in :meth:`token_scores`, or ``mean`` is not a bool.
            ValueError: as in :meth:`token_scores`.
        """
        _checks.check_flags(mean=mean)
        total = self.token_scores(log_probs).sum(-1)
        if not mean:
            return total
        return total / supervised_tokens(self).clamp(min=1)


def supervised_tokens(views: PolicyViews) -> Tensor:
    """Return the number of supervised tokens per row, int64 ``[B]``, or if unknown of tokens scored in any view."""
    return views.scored.any(0).sum(-1) if views.num_supervised is None else views.num_supervised


def scored_once(views: PolicyViews) -> bool:
    """Return True if no token can be scored in two views, without reading values; not called while a graph is traced.

    More than one view are known to do so if :func:`policy_views` made them and ``scored`` was not modified since.
    """
    return len(views.scored) == 1 or views._scored_once_in == _version(views.scored)


def next_token_views(views: PolicyViews) -> PolicyViews:
    """Return views in which row i scores token i + 1. Token 0 is neither scored nor, if a view scores it, counted."""
    n = views.num_supervised
    n = None if n is None else n - views.scored[..., :1].any(0).sum(-1)
    return PolicyViews(views.noisy, shift_left(views.scored), shift_left(views.weights), n, views.scheme)


def _version(t: Tensor) -> int:
    """Return the number of in-place modifications of a tensor; -1 if torch does not count them."""
    return -1 if t.is_inference() else t._version


def policy_views(
    ids: Tensor, loss_mask: Tensor, mask_token_id: int, scheme: str, *, num: int = 1,
    level: float | Tensor | None = None, prompt_prob: float = 0.0, step_map: Tensor | None = None,
    seeds: Tensor | None = None, generator: torch.Generator | None = None, start: Tensor | None = None,
    backend: str = "auto",
) -> PolicyViews:  # fmt: skip
    r"""Build noisy views of completions, with the weights of their log-probabilities in the score.

    With n supervised tokens in a row and t a level in (0, 1):

    ========== ======= ===============================================================================================
    scheme     K       views, and the weights of the tokens that they score
    ========== ======= ===============================================================================================
    full       num     every supervised token is masked, weight 1 / num
    coupled    3 num   per draw three views, one after another: every supervised token masked, weight 1/2; masked
                       with probability t, 1 / (2 t); the complement, 1 / (2 (1 - t)); all over num; t is uniform in
                       (0.2, 0.8)
    elbo       num     masked with probability t_k, weight 1 / (num t_k); the t_k of a row are stratified
    count      2 num   exactly x of the n masked, weight (n + 1) / (2 x num); the complement,
                       (n + 1) / (2 (n - x) num); x is uniform over 0 to n, stratified
    quadrature num     masked with probability t_k, weight g_k / t_k; t_k and g_k are the nodes and weights of
                       Gauss-Legendre quadrature on (0, 1)
    trace      steps   view s masks the tokens that were decoded at step s or later and scores those of step s,
                       weight 1
    ========== ======= ===============================================================================================

    Scored tokens are always supervised and masked in their view. A row without supervised tokens has no scored tokens.

    **Levels.** Stratified levels of a row are ``(u + k / num) mod 1``, k = 0 .. num - 1, with u the level of draw 0,
    clamped to [2^-24, 1 - 2^-24] so that no weight is infinite. ``x = floor(t (n + 1))`` with such a t. Under "count"
    without ``seeds`` the rows are stratified too: u is ``u_0 + b / (B num)`` with one u_0 for the call. With ``seeds``
    the u of each row comes from the seed of the row, because a row must not depend on its batch.

    **Draws.** With ``seeds``, the views of row b depend only on ``seeds[b]``, its tokens and the options. The bits are
    equal on CPU and GPU and in any batch. The position draws of view (or pair) n do not depend on ``num``, so "full"
    and "coupled" give the same first views for any ``num``. Draw n of a row equals the draw of the corruption routines
    under child seed n. Child seed n is word n of ``numpy.random.Philox(key=(seed, 1)).random_raw()``. With a generator,
    the seed of row b is child b of one drawn seed. "trace", and "full" without ``prompt_prob``, draw nothing.

    Examples:
        >>> ids, loss_mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 1, 1]])
        >>> step_map = torch.tensor([[-1, 1, 0, 1]])
        >>> views = policy_views(ids, loss_mask, 99, "trace", step_map=step_map)
        >>> views.noisy.tolist()
        [[[5, 99, 99, 99]], [[5, 99, 7, 99]]]
        >>> views.scored.int().tolist()
        [[[0, 0, 1, 0]], [[0, 1, 0, 1]]]
        >>> views.sequence_scores(torch.full((2, 1, 4), -0.5), mean=True)
        tensor([-0.5000])

    Args:
        ids: clean tokens ``[B, L]``, integer: prompts and completions.
        loss_mask: ``[B, L]``, bool or numeric, nonzero for supervised tokens, the tokens of the completions.
        mask_token_id: id of the MASK token.
        scheme: "full", "coupled", "elbo", "count", "quadrature" or "trace".
        num: number of views, pairs or triples to draw. For "trace", the number of groups of consecutive decoding steps.
            Step s of the T steps of a row belongs to group ``floor(num s / T)``, and each group is treated as one step.
            For "trace", 1 means that every step is a group, and K is read back from a GPU, a host sync; in a graph of
            ``torch.compile`` this raises. (One group of all steps would be "full".)
        level: levels to use instead of drawn levels, in [0, 1]: a number, ``[B]``, or ``[num, B]`` with one level per
            draw. Only for "coupled", "elbo" and "count". For "count", x is ``round(level n)`` (half to even, at least
            one if the level is not 0).
        prompt_prob: for "full", the probability of also masking each unsupervised token, drawn independently in each
            view. Unsupervised tokens are never scored.
        step_map: for "trace", the step at which each token was decoded, integers ``[B, L]`` from 0 on; negative for
            tokens that were not generated. A generated token is masked also if it is not supervised.
        seeds: int64 ``[B]``, one seed per row.
        generator: source of random bits if there are no ``seeds``, see :mod:`dllm_kernels.corruption`.
        start: int64 ``[B]``, in [0, L], the first column of each row that is not left padding; None: 0. The row is
            corrupted as if it began there, so that with ``seeds`` it has the same noise as without padding. Columns
            before it never change. Checked on CPU; on a GPU it is clamped, because a check would cost a host sync. They
            are not supervised either.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`PolicyViews`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, a value is out of range, an option belongs to another
            scheme, or both ``generator`` and ``seeds`` are given.

    Source: "full": d1, arXiv:2504.12216; "coupled": DiffuCoder, arXiv:2506.20639; "elbo": LLaDA 1.5, arXiv:2505.19223;
    "count": ESPO, arXiv:2512.03759; "quadrature": GDPO, arXiv:2510.08554; "trace": TraceRL, arXiv:2509.06949.
    """
    check_batch(ids, loss_mask, "ids")
    mask_id = checked_mask_id(mask_token_id, ids, "ids")
    use_triton(backend, ids)  # raises if the backend is invalid, also if nothing is drawn
    _check_scheme(scheme)
    num = _checks.checked_int("num", num, 1, _checks.MOST_SIZE)
    _checks.check_whole_tensor("step_map", step_map)
    prob = _checked_prompt_prob(prompt_prob, scheme)
    supervised = loss_mask != 0
    start = checked_start(start, ids, "ids")
    if start is not None:
        if readable_without_sync(start):
            check_start_range(start, ids.shape[1])
        real = torch.arange(ids.shape[1], device=ids.device) >= start[:, None]
        supervised = supervised & real
    if scheme == "trace":
        step_map = _checked_step_map(step_map, ids, num)
        step_map = step_map if start is None else torch.where(real, step_map.long(), -1)  # -1 is 255 in uint8
    elif step_map is not None:
        raise ValueError(f"step_map must be None unless scheme is 'trace', got it with scheme={scheme!r}")
    levels = _checked_level(level, ids, num, scheme)
    draws = scheme not in ("full", "trace") or prob > 0
    draw_seeds, call_seed = _seeds_of_views(ids, num, seeds, generator, draws)
    rows = _ViewArguments(ids, supervised, mask_id, num, draw_seeds, call_seed, backend, levels, prob, step_map, start)
    result = SCHEMES[scheme](rows)
    weights = torch.where(result.scored, result.weight[..., None], 0.0)
    noisy = torch.where(result.masked, mask_id, ids)
    views = PolicyViews(noisy, result.scored, weights, supervised.sum(-1), scheme)
    once = scheme == "trace" or (scheme == "count" and num == 1)  # the view of a step; a mask and its complement
    if once and not torch.compiler.is_compiling() and (version := _version(result.scored)) >= 0:
        object.__setattr__(views, "_scored_once_in", version)
    return views


def eubo(log_probs: Tensor, views: PolicyViews, beta: float = 1.5) -> Tensor:
    r"""Compute an upper bound on the evidence of each sequence, for completions with negative advantage.

    .. math::
        U_b = \frac{1}{\beta} \; \text{mean}_i \; \log \Big( \frac{1}{K}
        \sum_k \frac{e^{\beta \, l_{kbi}} \, [i \text{ scored in } k]}{t_k} \Big)

    with i over the tokens that are scored in any view. Supported schemes are "elbo" and "full" (with t = 1), because
    the sum over k needs the weights ``1 / (K t_k)``, which other schemes do not have.

    Args:
        log_probs: log p of each token under each view ``[K, B, L]``, floating. NaN or infinity for a token that is not
            scored affects neither result nor gradient.
        views: from :func:`policy_views` with scheme "elbo" or "full", or constructed with ``scheme=None`` and weights
            ``1 / (K t_k)``.
        beta: order of the bound, above 0; it is an upper bound if beta is at least 1.

    Returns:
        ``[B]``, float32 (float64 for float64 input), differentiable; 0 for rows without scored tokens.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: shapes, dtypes or devices do not match, ``beta`` is not above 0, or ``views`` has another scheme.

    Source: SPG, arXiv:2510.09541, the evidence upper bound, as a mean over tokens.
    """
    if not isinstance(views, PolicyViews):
        raise TypeError(f"views must be PolicyViews, got {_checks.type_name(views)}")
    if views.scheme is not None and views.scheme not in _EUBO_SCHEMES:
        raise ValueError(f"views must be of scheme {' or '.join(_EUBO_SCHEMES)} for eubo, got {views.scheme!r}")
    log_probs = _checked_log_probs(log_probs, views)
    _checks.check_finite("beta", beta)
    if not beta > 0:
        raise ValueError(f"beta must be above 0, got {beta}")
    scored, anywhere = views.scored, views.scored.any(0)
    weights = views.weights.to(log_probs.dtype)  # before the logarithm, which 16 bits would round
    beta = float(beta)
    term = beta * torch.where(scored, log_probs, 0.0) + torch.where(scored, weights, 1.0).log()
    # Exclude tokens without a score, because a logsumexp of only -inf has the gradient NaN.
    term = torch.where(scored | ~anywhere, term, -torch.inf)
    per_token = torch.where(anywhere, torch.logsumexp(term, 0), 0.0)
    return per_token.sum(-1) / (beta * anywhere.sum(-1).clamp(min=1).to(per_token.dtype))


class _ViewArguments(NamedTuple):
    """Validated arguments. ``seeds``: int64 ``[num, B]``; ``call``: the seed of the call ``[1]``; None if not drawn.

    ``level``: the given levels, float32 ``[num, B]``, or None. A field typed ``Any`` is a tensor where it is read.
    """

    ids: Tensor
    supervised: Tensor
    mask_id: int
    num: int
    seeds: Any
    call: Tensor | None
    backend: str
    level: Tensor | None
    prompt_prob: float
    step_map: Any
    start: Tensor | None

    @property
    def everywhere(self) -> Tensor:
        """Mask of supervised tokens, repeated for each draw, ``[num, B, L]``."""
        return self.supervised.expand(self.num, -1, -1)

    def masks(self, level: Tensor, *, exact: bool = False, among: Tensor | None = None) -> Tensor:
        """Draw one mask per draw and row, ``[num, B, L]``, at the levels ``[num, B]``."""
        shape, among = (self.num, *self.ids.shape), self.supervised if among is None else among
        ids, among = (t.expand(shape).flatten(0, 1) for t in (self.ids, among))
        start = None if self.start is None else self.start.repeat(self.num)
        row_options: dict[str, Any] = {"level": level.flatten(), "seeds": self.seeds.flatten(), "start": start}
        noise = corrupt_uniform(ids, among, self.mask_id, exact=exact, backend=self.backend, **row_options)[1]
        return noise.view(shape)

    def filled(self, value: float, columns: int) -> Tensor:
        """Return a float32 ``[num, columns]`` filled with one value."""
        return torch.full((self.num, columns), value, dtype=torch.float32, device=self.ids.device)

    def levels(self, seeds: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Draw the level of each seed."""
        if seeds.numel() == 0:
            return torch.empty(seeds.shape, dtype=torch.float32, device=seeds.device)
        drawn = sample_level(seeds.numel(), low=low, high=high, seeds=seeds.flatten(), backend=self.backend)
        return drawn.view(seeds.shape)

    def stratified(self, u: Tensor) -> Tensor:
        """Spread ``u [B]`` over the draws, ``[num, B]`` float32, strictly inside (0, 1)."""
        place = torch.arange(self.num, device=u.device, dtype=torch.float64)[:, None] / self.num
        level = u.to(torch.float64) + place
        return (level - level.floor()).to(torch.float32).clamp(_LEAST_LEVEL, 1.0 - _LEAST_LEVEL)


class _Masks(NamedTuple):
    """Masked and scored tokens, bool ``[K, B, L]``, and the weight of the scored ones, ``[K, B]`` or ``[K, 1]``."""

    masked: Tensor
    scored: Tensor
    weight: Tensor


def _full(rows: _ViewArguments) -> _Masks:
    masked = scored = rows.everywhere
    if rows.prompt_prob > 0:
        level = rows.filled(rows.prompt_prob, len(rows.ids))
        masked = scored | rows.masks(level, among=~rows.supervised)
    return _Masks(masked, scored.contiguous(), rows.filled(1.0 / rows.num, 1))


def _coupled(rows: _ViewArguments) -> _Masks:
    level = rows.levels(rows.seeds, 0.2, 0.8) if rows.level is None else rows.level
    mask = rows.masks(level)
    scored = torch.stack([rows.everywhere, mask, rows.everywhere & ~mask], 1).flatten(0, 1)
    half = 0.5 / rows.num
    weight = torch.stack([torch.full_like(level, half), half / level, half / (1.0 - level)], 1).flatten(0, 1)
    return _Masks(scored, scored, weight)


def _elbo(rows: _ViewArguments) -> _Masks:
    level = rows.stratified(rows.levels(rows.seeds[0])) if rows.level is None else rows.level
    scored = rows.masks(level)
    return _Masks(scored, scored, 1.0 / (rows.num * level))


def _count(rows: _ViewArguments) -> _Masks:
    n, level = rows.supervised.sum(-1), rows.level
    if level is None:
        B = len(rows.ids)
        if rows.call is None:
            u = rows.levels(rows.seeds[0])
        else:
            place = torch.arange(B, device=n.device, dtype=torch.float64) / (B * rows.num)
            u = rows.levels(rows.call).to(torch.float64) + place
        x = torch.minimum((rows.stratified(u) * (n + 1)).floor(), n.to(torch.float32))
        level = x / n.clamp(min=1)
    mask = rows.masks(level, exact=True)
    scored = torch.stack([mask, rows.everywhere & ~mask], 1).flatten(0, 1)
    # Clamp the size of an empty view, whose weight is not used.
    return _Masks(scored, scored, (n + 1).to(torch.float32) / (2 * rows.num * scored.sum(-1).clamp(min=1)))


def _quadrature(rows: _ViewArguments) -> _Masks:
    (rule,) = quadrature_rule(rows.ids, rows.num)
    level, weight = rule[..., None]
    scored = rows.masks(level.expand(-1, rows.ids.shape[0]))
    return _Masks(scored, scored, weight)


def _trace(rows: _ViewArguments) -> _Masks:
    step = rows.step_map.to(torch.int64).clamp(min=-1)
    last = torch.nn.functional.pad(step, (0, 1)).amax(-1)  # at least 0, also without tokens
    every = rows.num == 1
    # A host sync on a GPU if each step is a group. The padding is the last step of a batch without rows.
    K = int(torch.nn.functional.pad(last, (0, 1)).max()) + 1 if every else rows.num
    view = torch.arange(K, device=step.device)[:, None]
    # The least step of group g of T = last + 1 steps is ceil(g T / K). Neither T nor K times a step need fit int64.
    least = view if every else view * (last // K) + (view * (last % K + 1) + K - 1) // K
    masked = step >= least[..., None]
    scored = torch.cat([masked[:-1] & ~masked[1:], masked[-1:]]) & rows.supervised
    return _Masks(masked, scored, torch.ones(K, 1, dtype=torch.float32, device=step.device))


SCHEMES: dict[str, Callable[[_ViewArguments], _Masks]] = {
    "full": _full, "coupled": _coupled, "elbo": _elbo, "count": _count, "quadrature": _quadrature, "trace": _trace,
}  # fmt: skip
# Published methods, and the scheme with their views.
METHODS = {
    "d1": "full", "diffu-grpo": "full", "wd1": "full", "diffucoder": "coupled", "coupled-grpo": "coupled",
    "vrpo": "elbo", "llada-1.5": "elbo", "bgpo": "elbo", "spg": "elbo", "espo": "count", "gdpo": "quadrature",
    "tracerl": "trace", "dipo": "trace", "mdpo": "trace",
}  # fmt: skip


def _seeds_of_views(
    ids: Tensor, num: int, seeds: Tensor | None, generator: torch.Generator | None, draws: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the seeds of the draws ``[num, B]``, and the seed of the call ``[1]`` if no ``seeds`` are given."""
    _seeds.check_sources(generator, seeds, ids.shape[:1], ids.device)
    if not draws and seeds is None:
        return None, None
    B = len(ids)
    seed = _seeds.resolve_seed(ids.device, B, generator, seeds)
    call = None
    if seed.dim() == 0:
        call = seed.clone().view(1)
        seed = _philox.child_seeds(call, B).view(B)
    return _philox.child_seeds(seed, num).T.contiguous(), call


def _checked_prompt_prob(prompt_prob: float, scheme: str) -> float:
    _checks.check_probability("prompt_prob", prompt_prob, "a float")
    if prompt_prob != 0 and scheme != "full":
        raise ValueError(f"prompt_prob must be 0 unless scheme is 'full', got {prompt_prob} with scheme={scheme!r}")
    return float(prompt_prob)


def _check_scheme(scheme: Any) -> None:
    method = scheme.lower().replace("_", "-").replace(" ", "-") if isinstance(scheme, str) else None
    if method in METHODS:
        raise ValueError(
            f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}; pass {METHODS[method]!r}, the views of this "
            "method"
        )
    _checks.check_choice("scheme", scheme, SCHEMES)


def _checked_step_map(step_map: Tensor | None, ids: Tensor, num: int) -> Tensor:
    if step_map is None:
        raise ValueError("step_map must be given for scheme 'trace', got None")
    if num == 1 and torch.compiler.is_compiling():
        raise ValueError(
            "num must be at least 2 for scheme 'trace' in a graph of torch.compile, where the number of steps is not "
            "known, got 1"
        )
    _checks.check_like("ids", ids, _checks.INT_DTYPES, step_map=step_map)
    return step_map


def _checked_level(level: float | Tensor | None, ids: Tensor, num: int, scheme: str) -> Tensor | None:
    """Convert the level to float32 ``[num, B]``; the corruption routine checks the values of a tensor."""
    if level is None:
        return None
    if scheme not in ("coupled", "elbo", "count"):
        raise ValueError(f"level must be None unless scheme is 'coupled', 'elbo' or 'count', got it with {scheme!r}")
    shape = num, len(ids)
    if not isinstance(level, Tensor):
        _checks.check_probability("level", level, "a float or a tensor")
        return torch.full(shape, float(level), dtype=torch.float32, device=ids.device)
    _checks.check_float("level", level)
    _checks.check_whole_tensor("level", level)
    if tuple(level.shape) not in ((), shape[1:], shape):
        raise ValueError(f"level must have shape {shape[1:]} or {shape}, got {tuple(level.shape)}")
    _checks.check_same_device("ids", ids, level=level)
    _checks.check_constant("level", level)
    return level.detach().to(torch.float32).expand(shape).contiguous()


def _check_field(name: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    _checks.check_tensor(name, value)
    if is_dtensor(value):
        raise TypeError(f"{name} must be a plain torch.Tensor, got DTensor; pass its full_tensor()")
    _checks.check_dtype(name, value, dtypes)


def _checked_log_probs(log_probs: Tensor, views: PolicyViews) -> Tensor:
    """Validate log-probabilities; return them as a plain tensor in the dtype of sums."""
    _checks.check_float("log_probs", log_probs)
    log_probs = plain(log_probs)
    _checks.check_shape("log_probs", log_probs, views.scored.shape, "that of the views")
    _checks.check_same_device("views", views.scored, log_probs=log_probs)
    return log_probs.to(accum_dtype(log_probs.dtype))
