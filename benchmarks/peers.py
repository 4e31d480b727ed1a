"""Other implementations of the same losses, if installed, each called with its best settings.

Every peer is a function of the same arguments as ours and returns a scalar loss. ``original`` is nemo-automodel, whose
losses this package replaces. ``compiled`` is ``torch.compile`` of the plain code. ``gather`` gathers the active rows
and then runs plain PyTorch. It separates the effect of skipping rows from the speed of a kernel.

Liger's losses from logits, and the reduction of each chunk in its losses from hidden states, choose CuTe kernels by
themselves on Hopper and newer GPUs where ``nvidia-cutlass-dsl`` is installed, otherwise Triton kernels. Its kernels
that project and reduce at once are separate functions for Hopper: ``liger, SM90`` has a gradient per row, and
``liger, SM90 sum`` computes the gradient of the hidden states in forward. ``LIGER_KERNEL_IMPL=cutedsl`` is not set: in
0.8.5 the loss class then passes more arguments than its CuTe function takes.
``python -m benchmarks peers`` lists the peers that can be imported here, and the reason for the others.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.record import PACKAGES, markdown, said, version, write_whole

Loss = Callable[..., torch.Tensor]
DLLM_LOSS, DLLM_CORRUPTION = (
    "nemo_automodel.components.loss.dllm_loss",
    "nemo_automodel.components.datasets.dllm.corruption",
)
LIGER_SM90 = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
LIGER_SM90_SUM = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
TRL_ROWS = "trl.kernels.logprob_entropy"
VERL_CHUNKED, VERL_KERNEL = "verl.utils.experimental.torch_functional", "verl.utils.kernel.linear_cross_entropy"
#: Name of a peer -> the modules of its candidates.
MODULES = {
    "original": (DLLM_LOSS, DLLM_CORRUPTION),
    "liger": (
        "liger_kernel.transformers",
        "liger_kernel.transformers.fused_linear_jsd",
        "liger_kernel.ops.fused_linear_scaled_cross_entropy",
        "liger_kernel.chunked_loss",
    ),
    "cut-cross-entropy": ("cut_cross_entropy",),
    "quack": ("quack.cross_entropy", "quack.linear_cross_entropy"),
    "liger, SM90": (LIGER_SM90,),
    "liger, SM90 sum": (LIGER_SM90_SUM,),
    "speculators, eager": ("speculators.losses.eager",),
    "speculators, fused": ("speculators.losses.utils",),
    "trl": ("trl.kernels", TRL_ROWS),
    "verl": (VERL_CHUNKED, VERL_KERNEL),
}
_refused: dict[str, str] = {}


@functools.cache
def module(name: str) -> Any:
    """Import the module. If this fails, return None; ``refusal`` then has the reason."""
    try:
        if name.startswith("verl.") and module("ray") is None:
            _without_init("verl", "verl.utils")
        return importlib.import_module(name)
    except Exception as error:  # a package with incompatible requirements may raise any exception
        _refused[name] = said(error)
        return None


def _without_init(*packages: str) -> None:
    """Make the modules of packages importable without running ``__init__`` of the packages.

    That of verl imports ray and tensordict, which its kernels do not use.
    """
    for name in packages:
        spec = importlib.util.find_spec(name)
        if name not in sys.modules and spec is not None:
            sys.modules[name] = bare = types.ModuleType(name)
            bare.__spec__ = spec  # find_spec raises for a module in sys.modules without it
            bare.__path__ = list(spec.submodule_search_locations or ())


@contextlib.contextmanager
def trl_without_trainers() -> Iterator[None]:
    """Let the backward pass of TRL's kernels run where only ``trl`` itself is installed.

    It imports a context from ``trl.trainer.utils`` that gathers what DeepSpeed ZeRO-3 partitions, and otherwise does
    nothing. That module needs pandas, datasets and others; where it cannot be imported, another stands in for it.
    """
    name = "trl.trainer.utils"
    if module("trl.kernels") is None or module(name) is not None:
        yield
        return
    stand_in: Any = types.ModuleType(name)
    stand_in.maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


def _add(losses: dict[str, Loss], name: str, module_name: str, make: Callable[[Any], Loss]) -> None:
    """Add the peer if its module can be imported and has the attributes that ``make`` uses."""
    if (peer := module(module_name)) is None:
        return
    try:
        losses[name] = make(peer)
    except Exception as error:
        print(f"{name} is not measured: {said(error)}", file=sys.stderr)


def refusal(name: str) -> str | None:
    """Import the module; return the reason why it cannot be imported, or None if it can."""
    return None if module(name) is not None else _refused[name]


def listed() -> list[str]:
    """Return two lines: the peers that are installed, and those that are not. Nothing is imported."""
    roots = {name: {module.split(".")[0] for module in modules} for name, modules in MODULES.items()}
    there = {name: all(importlib.util.find_spec(root) is not None for root in found) for name, found in roots.items()}
    lines = {"peers installed": True, "peers not installed": False}
    return [
        f"{line}: {'; '.join(n for n, on in there.items() if on == which) or 'none'}" for line, which in lines.items()
    ]


def main(argv: Sequence[str]) -> int:
    """Print the peers that can be imported, and the reason for the others."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=main.__doc__)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    options = parser.parse_args(argv)
    versions, why = {name: version(name) for name in PACKAGES}, dict[str, str | None]()
    for name in (name for names in MODULES.values() for name in names):
        why[name] = refusal(name)
        if options.out is not None:  # at once, because the next import may take more time than is left
            write_whole(options.out, json.dumps({"imports": why, "versions": versions}, indent=1) + "\n")
    rows = [
        {"peer": peer, "module": name, "imported": "yes" if why[name] is None else f"no: {why[name]}"}
        for peer, names in MODULES.items()
        for name in names
    ]
    print(markdown(rows))
    print("\nversions: " + ", ".join(f"{name} {found}" for name, found in versions.items() if found is not None))
    return 0


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """Cast ``[N, V]`` to float32; float64 is kept, for the oracle."""
    return logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))


def plain_mdlm(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The plain form: NLL of every token, times the weights."""
    nll = F.cross_entropy(_wide(logits), targets.flatten(), reduction="none")
    return (nll * weights.flatten()).sum()


def _gather_mdlm(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gather the active rows, then run plain PyTorch."""
    rows = weights.flatten().nonzero().squeeze(1)
    active = logits.flatten(0, -2).index_select(0, rows)
    nll = F.cross_entropy(_wide(active), targets.flatten()[rows], reduction="none")
    return (nll * weights.flatten()[rows]).sum()


def _original_mdlm(peer: Any) -> Loss:
    loss = peer.MDLMCrossEntropyLoss()

    def run(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        active = weights != 0
        p_mask = torch.where(active, weights, 1.0).reciprocal()
        total: torch.Tensor = loss(logits, targets, active, p_mask, active).total_loss
        return total

    return run


def _liger_mdlm(peer: Any) -> Loss:
    loss = peer.LigerCrossEntropyLoss(reduction="none")

    def run(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        # With ignore_index, liger skips rows of weight 0. Its kernel overwrites the logits, so they are not copied.
        labels = torch.where(weights != 0, targets, -100).flatten()
        nll = loss(logits.flatten(0, -2), labels)
        total: torch.Tensor = (nll * weights.flatten()).sum()
        return total

    return run


def logits_losses(device: torch.device | str, compiled: bool) -> dict[str, Loss]:
    """Return name -> loss(logits [B, L, V], targets [B, L], weights [B, L]) of the available implementations."""
    losses: dict[str, Loss] = {"plain": plain_mdlm, "gather": _gather_mdlm}
    _add(losses, "original", DLLM_LOSS, _original_mdlm)
    if compiled:
        losses["compiled"] = torch.compile(plain_mdlm)
    if torch.device(device).type == "cuda":
        _add(losses, "liger", "liger_kernel.transformers", _liger_mdlm)
        _add(losses, "quack", "quack.cross_entropy", _quack_mdlm)
    return losses


def _quack_mdlm(peer: Any) -> Loss:
    def run(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        nll = peer.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")  # 0.6 defaults to the mean
        total: torch.Tensor = (nll * weights.flatten()).sum()
        return total

    return run


def plain_linear(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, chunk: int | None
) -> torch.Tensor:
    """Compute all logits at once."""
    nll = F.cross_entropy(_wide(F.linear(hidden, weight)), targets.flatten(), reduction="none")
    return (nll * weights.flatten()).sum()


def _gather_linear(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, chunk: int | None
) -> torch.Tensor:
    rows = weights.flatten().nonzero().squeeze(1)
    h, y, w = (t[rows] for t in (hidden.flatten(0, -2), targets.flatten(), weights.flatten()))
    return (F.cross_entropy(_wide(F.linear(h, weight)), y, reduction="none") * w).sum()


def _original_linear(peer: Any) -> Loss:
    def run(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, chunk: int | None
    ) -> torch.Tensor:
        loss = peer.DFlashDecayLoss(loss_gamma=None, chunk_size=chunk or 1024)
        total: torch.Tensor = loss.forward_fused(hidden, weight, targets, weights).total_loss
        return total

    return run


def _torch_chunked(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, chunk: int | None
) -> torch.Tensor:
    """PyTorch's chunked op. It has no weight per row, so it is compared only on rows of equal weight."""
    labels = torch.where(weights != 0, targets, -100).flatten()
    options = torch.nn.LinearCrossEntropyOptions()
    loss: torch.Tensor = F.linear_cross_entropy(
        hidden.flatten(0, -2), weight, labels, reduction="sum", ignore_index=-100, options=options
    )
    return loss


def _liger_linear(peer: Any) -> Loss:
    loss = peer.LigerFusedLinearCrossEntropyLoss(reduction="sum")

    def run(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, chunk: int | None
    ) -> torch.Tensor:
        total: torch.Tensor = loss(weight, hidden.flatten(0, -2), torch.where(weights != 0, targets, -100).flatten())
        return total

    return run


def _liger_sm90_linear(peer: Any) -> Loss:
    """Liger's projection and NLL in one CuTe kernel, for Hopper and bfloat16. It has a gradient per row."""
    apply = peer.LigerFusedScaledCrossEntropySM90Function.apply

    def run(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, chunk: int | None
    ) -> torch.Tensor:
        labels = torch.where(weights != 0, targets, -100).flatten()
        total: torch.Tensor = (apply(hidden.flatten(0, -2), weight, labels) * weights.flatten()).sum()
        return total

    return run


def _liger_sm90_sum(peer: Any) -> Loss:
    """Liger's projection and summed NLL in CuTe kernels, for Hopper and bfloat16."""
    apply = peer.LigerFusedLinearCrossEntropySM90Function.apply

    def run(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, chunk: int | None
    ) -> torch.Tensor:
        labels = torch.where(weights != 0, targets, -100).flatten()
        total: torch.Tensor = apply(hidden.flatten(0, -2), weight, labels, -100, "sum")
        return total

    return run


def _verl_linear(peer: Any) -> Loss:
    """The NLL of verl's Triton kernel, which computes the entropy as well."""

    def run(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, chunk: int | None
    ) -> torch.Tensor:
        log_probs, _ = peer.linear_cross_entropy(hidden.flatten(0, -2), weight, targets.flatten(), 1.0, "none", None)
        total: torch.Tensor = -(log_probs * weights.flatten()).sum()
        return total

    return run


def _cce_linear(peer: Any) -> Loss:
    def run(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, chunk: int | None
    ) -> torch.Tensor:
        labels = torch.where(weights != 0, targets, -100)
        nll = peer.linear_cross_entropy(hidden, weight, labels, reduction="none", filter_eps=None)
        total: torch.Tensor = (nll * weights).sum()
        return total

    return run


def _quack_linear(peer: Any) -> Loss:
    def run(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, chunk: int | None
    ) -> torch.Tensor:
        labels = torch.where(weights != 0, targets, -100).flatten()
        total: torch.Tensor = peer.chunked_linear_cross_entropy(hidden.flatten(0, -2), weight, labels, reduction="sum")
        return total

    return run


#: Peers without a weight per row. They are compared only if all active rows have weight 1.
UNWEIGHTED = ("torch chunked", "liger", "liger, SM90 sum", "quack")


def linear_losses(device: torch.device | str, compiled: bool) -> dict[str, Loss]:
    """Return name -> loss(hidden, weight, targets, weights, chunk) of the available implementations."""
    losses: dict[str, Loss] = {"plain": plain_linear, "gather": _gather_linear}
    _add(losses, "original", DLLM_LOSS, _original_linear)
    if compiled:
        losses["compiled"] = torch.compile(plain_linear)
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        losses["torch chunked"] = _torch_chunked
    if torch.device(device).type == "cuda":
        _add(losses, "liger", "liger_kernel.transformers", _liger_linear)
        if torch.cuda.get_device_capability(device) == (9, 0):
            _add(losses, "liger, SM90", LIGER_SM90, _liger_sm90_linear)
            _add(losses, "liger, SM90 sum", LIGER_SM90_SUM, _liger_sm90_sum)
        _add(losses, "cut-cross-entropy", "cut_cross_entropy", _cce_linear)
        _add(losses, "quack", "quack.linear_cross_entropy", _quack_linear)
        _add(losses, "verl", VERL_KERNEL, _verl_linear)
    return losses


#: Name in ops.divergence -> speculators' function name, and Liger's beta (0 for KL(q || p)).
SPECULATORS = {
    "kl": "kl_div_loss",
    "rkl": "reverse_kl_div_loss",
    "jsd": "js_div_loss",
    "tv": "tv_loss",
    "nla": "neg_log_acceptance_loss",
}
LIGER_BETA = {"kl": 0.0, "jsd": 0.5, "rkl": 1.0}


def _speculators_divergence(loss: Loss) -> Loss:
    """Use the full logits of both models, as the trainer of speculators does."""

    def run(hidden: torch.Tensor, teacher: torch.Tensor, head: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            targets = F.linear(teacher, head)
        rows = loss(F.linear(hidden, head).unsqueeze(0), targets.unsqueeze(0))
        return (rows.squeeze(0) * weights).sum()

    return run


def _liger_divergence(peer: Any, beta: float) -> Loss:
    loss = peer.LigerFusedLinearJSD(jsd_beta=beta)

    def run(hidden: torch.Tensor, teacher: torch.Tensor, head: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = loss(
            hidden, head, teacher, head, None
        )  # the mean over the rows, because it has no weight per row
        return total

    return run


def divergence_losses(kind: str, device: torch.device | str) -> dict[str, Loss]:
    """Return name -> loss(hidden [N, D], teacher [N, D], head [V, D], weights [N]) of the available implementations."""
    losses: dict[str, Loss] = {}
    on_gpu = torch.device(device).type == "cuda"

    def of_speculators(peer: Any) -> Loss:
        return _speculators_divergence(getattr(peer, SPECULATORS[kind]))

    if kind in SPECULATORS:
        _add(losses, "speculators, eager", "speculators.losses.eager", of_speculators)
    if on_gpu and kind in SPECULATORS:
        _add(losses, "speculators, fused", "speculators.losses.utils", of_speculators)
    if on_gpu and kind in LIGER_BETA:
        found = "liger_kernel.transformers.fused_linear_jsd"
        _add(losses, "liger", found, lambda peer: _liger_divergence(peer, LIGER_BETA[kind]))
    return losses


def baseline(losses: Mapping[str, Any]) -> str:
    """Return the baseline of ratios: the original if it is installed, otherwise the plain code."""
    return "original" if "original" in losses else "plain"
