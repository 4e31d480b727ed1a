"""Calls of the peers: the arguments fit the functions of the installed package, and the results are what is measured.

Most peers cannot be imported without a GPU. Their signatures are therefore read from their sources.
"""

import ast
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import peers, policy, row_stats

pytestmark = pytest.mark.peer
N, V, D = 5, 11, 4
LIGER, LIGER_ROWS = "liger_kernel.transformers", "liger_kernel.ops.fused_linear_scaled_cross_entropy"


def source(module):
    """Return the syntax tree of a module; skip the test if its package is not installed."""
    root, *rest = module.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{root} is not installed")
    path = Path(spec.submodule_search_locations[0], *rest)
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def signature(module, *names):
    """Return the signature of a function or of a method, without ``self`` and ``ctx``."""
    found = source(module)
    for name in names:
        (found,) = (node for node in found.body if getattr(node, "name", None) == name)
    arguments, kinds = found.args, inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parameters = [
        kinds(a.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if i < required else None)
        for i, a in enumerate(positional)
        if a.arg not in ("self", "ctx")
    ]
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(kinds(a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    return inspect.Signature(parameters)


class StandIn:
    """A function, a module's class or an autograd Function that binds its arguments and returns ``result``.

    ``given`` has the arguments of all calls by name, without defaults.
    """

    def __init__(self, result, *signatures):
        self.result, self.signatures, self.given = result, list(signatures), {}

    def __call__(self, *arguments, **options):
        self.given |= self.signatures.pop(0).bind(*arguments, **options).arguments
        return self if self.signatures else self.result

    apply = __call__


ROWS, ONE = torch.zeros(N), torch.zeros(())
# Peer -> (its module, names of the functions that are called one after another, result, reduction).
FUNCTIONS = {
    "liger, logits": (f"{LIGER}.cross_entropy", [("LigerCrossEntropyLoss", "__init__"),
                      ("LigerCrossEntropyLoss", "forward")], ROWS, "none"),
    "quack, logits": ("quack.cross_entropy", [("cross_entropy",)], ROWS, "none"),
    "liger, hidden": (f"{LIGER}.fused_linear_cross_entropy", [("LigerFusedLinearCrossEntropyLoss", "__init__"),
                      ("LigerFusedLinearCrossEntropyLoss", "forward")], ONE, "sum"),
    "liger, SM90": (peers.LIGER_SM90, [("LigerFusedScaledCrossEntropySM90Function", "forward")], ROWS, None),
    "liger, SM90 sum": (peers.LIGER_SM90_SUM, [("LigerFusedLinearCrossEntropySM90Function", "forward")], ONE, "sum"),
    "verl, kernel": (peers.VERL_KERNEL, [("LinearCrossEntropy", "forward")], (ROWS, ROWS), "none"),
    "cut-cross-entropy": ("cut_cross_entropy.linear_cross_entropy", [("linear_cross_entropy",)], ROWS[None], "none"),
    "quack, hidden": ("quack.linear_cross_entropy", [("chunked_linear_cross_entropy",)], ONE, "sum"),
    "liger, divergence": (f"{LIGER}.fused_linear_jsd", [("LigerFusedLinearJSD", "__init__"),
                          ("LigerFusedLinearJSD", "forward")], ONE, None),
    "trl, rows": (peers.TRL_ROWS, [("selective_log_softmax_and_entropy",)], (ROWS[None], ROWS[None]), None),
    "liger, rows": (LIGER_ROWS, [("LigerFusedLinearScaledCrossEntropyFunction", "apply")], (ROWS, ROWS), None),
    "trl, policy": ("trl.kernels.chunked_logprob", [("ChunkedLogProbFunction", "forward")], (ROWS,), None),
    "verl, policy": (peers.VERL_CHUNKED, [("FusedLinearForPPO", "__init__"), ("FusedLinearForPPO", "forward")],
                     (ROWS, ROWS), None),
    "liger, policy": (LIGER_ROWS, [("LigerFusedLinearScaledCrossEntropyFunction", "apply")], ROWS, None),
}  # fmt: skip
ADAPTERS = {
    "liger, logits": peers._liger_mdlm,
    "quack, logits": peers._quack_mdlm,
    "liger, hidden": peers._liger_linear,
    "liger, SM90": peers._liger_sm90_linear,
    "liger, SM90 sum": peers._liger_sm90_sum,
    "verl, kernel": peers._verl_linear,
    "cut-cross-entropy": peers._cce_linear,
    "quack, hidden": peers._quack_linear,
}
ALIASES = {"LinearCrossEntropy": "linear_cross_entropy"}  # the name under which the module exports its Function


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(1, N, D, generator=generator), torch.randn(V, D, generator=generator)
    return hidden, head, torch.arange(N)[None], torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_arguments_fit_the_installed_function(name, monkeypatch):
    module, functions, result, reduction = FUNCTIONS[name]
    called = StandIn(result, *(signature(module, *names) for names in functions))
    reduces = any("reduction" in s.parameters for s in called.signatures)
    owner = functions[0][0]
    peer = SimpleNamespace(**{ALIASES.get(owner, owner): called})
    hidden, head, targets, weights = inputs()
    if name in ADAPTERS:
        one = (hidden @ head.T,) if name.endswith("logits") else (hidden, head)
        more = () if name.endswith("logits") else (None,)
        found, shape = ADAPTERS[name](peer)(*one, targets, weights, *more), ()
    elif name == "liger, divergence":
        found, shape = peers._liger_divergence(peer, 0.5)(hidden[0], hidden[0], head, weights[0]), ()
    elif name.endswith("rows"):
        rows = SimpleNamespace(rows=hidden[0], head=head, ids=targets[0], active=weights[0] != 0)
        call = row_stats._trl if name.startswith("trl") else row_stats._liger
        (found, entropy), shape = call(called, rows), (N,)
        assert entropy.shape == shape
    else:
        root = module.partition(".")[0]
        monkeypatch.setattr(peers, "module", lambda asked: peer if asked.partition(".")[0] == root else None)
        monkeypatch.setattr(peers, "refusal", lambda name: "not asked for")
        found, shape = policy.log_probs_of_peers("cuda")[name.split(",")[0]](hidden[0], head, targets[0]), (N,)
    assert not called.signatures  # all of them were called
    assert found.shape == shape
    assert called.given.get("reduction") == reduction
    assert reduces == (reduction is not None)  # a default may change, as quack's did
