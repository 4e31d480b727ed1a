"""One update of a policy from hidden states: old, reference and current log-probabilities, loss and backward.

Half of the tokens are supervised. ``coupled`` is coupled-GRPO: it has three views of each sequence, so a third of all
rows is scored. ``full`` is diffu-GRPO: it has one view, and half of its rows are scored. Ours is compared with plain
code (logits, log_softmax, gather, autograd) on all rows and on the scored rows. It is also compared with the
log-probability functions of TRL, verl and Liger on the scored rows, if they are installed. These use the plain scores,
loss and masks. Liger's GRPO loss has one row per token and cannot sum views, so it is a peer of ``full`` only. It
projects every row. The floor counts one product each for the log-probabilities of the old and the reference policy. For
the current log-probabilities and their gradient it counts two with a frozen head and three with a trained head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import measure, peers
from benchmarks.record import report
from benchmarks.shapes import UPDATES, Shape
from dllm_kernels import PolicyLoss, PolicyObjective, PolicyViews, ops, policy_views

CLIP, KL_COEF = 0.2, 0.04
ERROR_SEQUENCES = 1
SCHEMES = ("coupled", "full")
LogProbs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden ``[N, D]``, head, ids ``[N]``) -> log-probabilities ``[N]``."""


class Inputs(NamedTuple):
    """Hidden states ``[K, B, L, D]`` of the three policies, their head, tokens, views, and one advantage per row."""

    hidden: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    head: torch.Tensor
    ids: torch.Tensor
    views: PolicyViews
    advantages: torch.Tensor

    def leaves(self) -> list[torch.Tensor]:
        """Return the tensors with a gradient."""
        return [t for t in (self.hidden, self.head) if t.requires_grad]

    def first(self, B: int, dtype: torch.dtype) -> Inputs:
        """Return new leaves in another dtype, for the first sequences only."""
        hidden, old, ref = (t[:, :B].detach().to(dtype) for t in (self.hidden, self.old, self.ref))
        views = replace(
            self.views,
            **{name: getattr(self.views, name)[:, :B] for name in ("noisy", "scored", "weights")},
            num_supervised=None if self.views.num_supervised is None else self.views.num_supervised[:B],
        )
        head = self.head.detach().to(dtype).requires_grad_(self.head.requires_grad)
        return Inputs(hidden.requires_grad_(), old, ref, head, self.ids[:B], views, self.advantages[:B])


Update = Callable[[Inputs], torch.Tensor]


def make_inputs(shape: Shape, share: float, options: Any, scheme: str) -> Inputs:
    """Draw random inputs: views of the scheme, a ``share`` of the tokens supervised, and three similar policies."""
    B, L, D, V, on = shape.batch, shape.length, shape.hidden, shape.vocab, {"device": options.device}
    ids, loss_mask = torch.randint(0, V - 1, (B, L), **on), torch.rand(B, L, **on) < share
    views = policy_views(ids, loss_mask, V - 1, scheme, seeds=torch.arange(B, **on))
    base = torch.randn(len(views.noisy), B, L, D, **on)
    hidden, old, ref = ((base + size * torch.randn_like(base)).to(options.dtype) for size in (0.0, 0.02, 0.02))
    head = (torch.randn(V, D, **on) / D**0.5).to(options.dtype).requires_grad_(not shape.frozen)
    return Inputs(hidden.requires_grad_(), old, ref, head, ids, views, torch.randn(B, **on))


def updates(options: Any, scheme: str) -> dict[str, Update]:
    """Return ours and, unless ``options.alone``, the plain code and the available peers; each returns the loss."""
    loss = PolicyLoss(PolicyObjective(clip_low=CLIP, clip_high=CLIP, kl="k3", kl_coef=KL_COEF))

    def scores(hidden: torch.Tensor, i: Inputs) -> torch.Tensor:
        given = {"weight": i.head, "active": i.views.scored, "backend": options.backend}
        return i.views.token_scores(ops.token_log_probs(hidden, i.ids.expand(hidden.shape[:-1]), **given).log_probs)

    def ours(i: Inputs) -> torch.Tensor:
        with torch.no_grad():
            old, ref = scores(i.old, i), scores(i.ref, i)
        out = loss.forward_fused(i.hidden, i.head, i.ids, i.views, old, i.advantages, ref, backend=options.backend)
        return out.loss

    if options.alone:
        return {"ours": ours}
    found: dict[str, Update] = {"ours": ours, "plain": _plain, "gather": _gathering(_log_probs)}
    for name, function in log_probs_of_peers(options.device).items():
        found[name] = _gathering(function)
    if scheme == "full" and (liger := peers.module("liger_kernel.chunked_loss")) is not None:
        found["liger, GRPO loss"] = _liger_grpo(liger.LigerFusedLinearGRPOLoss)
    return found


def log_probs_of_peers(device: torch.device | str) -> dict[str, LogProbs]:
    """Return the importable log-probability functions of policy trainers; print the others."""
    found: dict[str, LogProbs] = {}
    for name in ("trl", "verl"):
        if peers.module(peers.MODULES[name][0]) is None:
            print(f"{name} is not measured: {peers.refusal(peers.MODULES[name][0])}")
    if (trl := peers.module("trl.kernels")) is not None:
        # Vocabulary columns per block, as set by its trainers.
        found["trl"] = lambda h, w, ids: trl.ChunkedLogProbFunction.apply(h, w, None, ids, 1.0, 32768, None, 1.0, ())[0]
    if (verl := peers.module("verl.utils.experimental.torch_functional")) is not None:
        found["verl"] = lambda h, w, ids: verl.FusedLinearForPPO()(h, w, ids)[0]
    liger = peers.module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    if liger is not None and torch.device(device).type == "cuda":
        function = liger.LigerFusedLinearScaledCrossEntropyFunction
        found["liger"] = lambda h, w, ids: -function.apply(h, w, ids, 1.0, -100, 1, False)  # without entropy, no tuple
    return found


def _log_probs(hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, head)
    log_p = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _loss(current: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, i: Inputs) -> torch.Tensor:
    """Compute the loss from log-probabilities ``[K, B, L]``."""
    s, old, ref = ((i.views.weights * torch.where(i.views.scored, t, 0.0)).sum(0) for t in (current, old, ref))
    ratio, away, A = (s - old).exp(), ref - s, i.advantages[:, None]
    value = KL_COEF * (away.exp() - away - 1) - torch.minimum(ratio * A, ratio.clamp(1 - CLIP, 1 + CLIP) * A)
    supervised = i.views.scored.any(0)
    return torch.where(supervised, value, 0.0).sum() / supervised.sum()


def _plain(i: Inputs) -> torch.Tensor:
    ids = i.ids.expand(i.hidden.shape[:-1])
    with torch.no_grad():
        old, ref = _log_probs(i.old, i.head, ids), _log_probs(i.ref, i.head, ids)
    return _loss(_log_probs(i.hidden, i.head, ids), old, ref, i)


def _gathering(log_probs: LogProbs) -> Update:
    """Return the log-probabilities of the scored rows only."""

    def run(i: Inputs) -> torch.Tensor:
        scored, ids = i.views.scored, i.ids.expand(i.hidden.shape[:-1])[i.views.scored]

        def placed(hidden: torch.Tensor) -> torch.Tensor:
            found = log_probs(hidden[scored], i.head, ids)
            return found.new_zeros(scored.shape).masked_scatter(scored, found)

        with torch.no_grad():
            old, ref = placed(i.old), placed(i.ref)
        return _loss(placed(i.hidden), old, ref, i)

    return run


def _liger_grpo(loss_class: Any) -> Update:
    """Liger's loss of one view, which scores the reference too; the old log-probabilities a sequence at a time."""

    def run(i: Inputs) -> torch.Tensor:
        (hidden,), (scored,) = i.hidden, i.views.scored
        # The peak of memory on a CPU is measured under a mode that torch.compile cannot trace.
        loss = loss_class(
            beta=KL_COEF, epsilon_low=CLIP, epsilon_high=CLIP, loss_type="bnpo", compiled=hidden.is_cuda
        )  # fmt: skip
        with torch.no_grad():
            old = torch.stack([_log_probs(h, i.head, ids) for h, ids in zip(i.old[0], i.ids, strict=True)])
        given = {"old_per_token_logps": old, "ref_input": i.ref[0], "ref_weight": i.head.detach()}
        total: torch.Tensor = loss(hidden, i.head, i.ids, scored.to(hidden.dtype), i.advantages, **given)[0]
        return total

    return run


def candidate(update: Update, i: Inputs) -> measure.Candidate:
    """Build one candidate."""
    return measure.Candidate(lambda _: update(i).backward(), measure.without_gradients(i.leaves()))  # type: ignore[no-untyped-call]


def errors(candidates: dict[str, Update], inputs: Inputs) -> tuple[dict[str, float], float]:
    """Compare the gradients of the first sequences with float64; also return the largest allowed error."""

    def gradient(update: Update, dtype: torch.dtype) -> torch.Tensor:
        here = inputs.first(ERROR_SEQUENCES, dtype)
        update(here).backward()  # type: ignore[no-untyped-call]
        assert here.hidden.grad is not None
        return here.hidden.grad

    dtype = inputs.hidden.dtype
    exact = gradient(_plain, torch.float64)
    plain = measure.relative_error(gradient(_plain, dtype), exact)
    found = measure.each_error(candidates, lambda update: measure.relative_error(gradient(update, dtype), exact))
    return found, measure.allowed_error(plain, dtype)


def floor(shape: Shape, scored: int, measured: dict[str, float]) -> float:
    """Return the minimum seconds at this run's ceilings."""
    products = 2 + (2 if shape.frozen else 3)
    return 2 * products * scored * shape.vocab * shape.hidden / measured["gemm_flop_per_s"]


def run(options: Any, shapes: tuple[Shape, ...], measured: dict[str, float]) -> list[measure.Result]:
    """Measure all shapes under each scheme."""
    results = []
    for shape, scheme in itertools.product(shapes, options.scheme or SCHEMES):
        inputs, candidates = make_inputs(shape, options.share, options, scheme), updates(options, scheme)
        (K, B, L), (off, allowed) = inputs.views.scored.shape, errors(candidates, inputs)
        case = {"shape": shape.name, "scheme": scheme, "views": K, "rows": B * L, "V": shape.vocab}
        case["supervised"] = f"{options.share:.0%}"
        each = {name: candidate(update, inputs) for name, update in candidates.items()}
        least = floor(shape, int(inputs.views.scored.sum()), measured)
        results += measure.compare(
            "policy", case, "both", each, options, errors=off, allowed_error=allowed, floor_s=least
        )
    return results


def main(argv: list[str]) -> int:
    """Print the table and write the JSON."""
    parser = measure.arguments("policy", __doc__)
    parser.add_argument("--share", type=float, default=0.5, help="share of supervised tokens (default: 0.5)")
    parser.add_argument("--scheme", action="append", choices=SCHEMES, help="default: all")
    measure.add_alone(parser)
    measure.add_shape(parser)
    options = measure.parse(parser, argv)
    measured = measure.ceilings(options.device, options.dtype, options.size)
    with peers.trl_without_trainers():
        results = run(options, measure.chosen(UPDATES[options.size], options), measured)
    return report(results, options, baseline="plain", measured_ceilings=measured)
