"""Any argument of any public function with a value of a wrong type or an absurd size: accepted, or named in the error.

``test_errors.py`` compares whole messages.
"""

import inspect
import re

import numpy as np
import pytest
import torch

import dllm_kernels as dk
from tests.conftest import every_time

B, L, V, D = 2, 4, 7, 4
X, H, W = torch.ones(B, L, V), torch.ones(B, L, D), torch.ones(V, D)
Y, ON, P = torch.arange(B * L).view(B, L) % (V - 2), torch.ones(B, L), torch.full((B, L), 0.5)
BOOL, SEEDS = ON.bool(), torch.arange(B)
VIEWS = dk.policy_views(Y, BOOL, V - 1, "elbo", num=2, seeds=SEEDS)


class Model(torch.nn.Module):
    """A model with an LM head."""

    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(D, V)


# Values of the arguments without a default.
VALID = {
    **dict.fromkeys(("logits", "teacher_logits", "encoder_logits"), X),
    **dict.fromkeys(("hidden", "teacher_hidden", "logits_or_hidden", "hidden_states"), H),
    **dict.fromkeys(("weight", "lm_head_weight", "head", "embedding", "lm_weight"), W),
    **dict.fromkeys(("targets", "ids", "target_ids", "input_ids", "noisy_input_ids", "labels"), Y),
    **dict.fromkeys(("weights", "mask", "block_mask"), ON),
    **dict.fromkeys(("loss_mask", "noise_mask", "valid_mask", "answer_mask", "loss_mask_ar", "output"), BOOL),
    **dict.fromkeys(("p_mask", "confidence", "log_w", "t", "scores"), P),
    **dict.fromkeys(("advantages", "mask_prob", "k"), torch.ones(B)),
    "k": torch.ones(B, dtype=torch.long), "uniform_prob": torch.zeros(B), "mask_token_id": V - 1, "vocab_size": V,
    "top_ids": Y[..., None], "top_log_probs": -torch.ones(B, L, 1), "B": B, "shape": (B, 1), "num": 2, "block_size": 3,
    "base": 0.5, "max_ratio": 0.1, "gamma_shape": 1.0, "t_peak": 0.5, "anchors": torch.zeros(B, 1, dtype=torch.long),
    "scheme": "elbo", "log_probs": -torch.ones(2, B, L), "views": VIEWS, "old": -P, "seq_len": L, "depth": 0,
    "model": Model(), "loss_fn": dk.MaskedCrossEntropy(), "objective": dk.PolicyObjective(), "noisy": VIEWS.noisy,
    "scored": VIEWS.scored, "segment_ids": Y,
}  # fmt: skip
OTHERS = {
    "gumbel_topk": {"log_w": P[0], "k": 2}, "acceptance_length": {"block_size": 5},
    "acceptance_stats": {"block_size": 5}, "draft_accuracy": {"output": dk.DLLMLossOutput(P, P)},
    "calculate_mtp_loss": {"mtp_per_depth_logits": [X]},
    "IDLMLoss.forward": {"logits": X.repeat(1, 2, 1)}, "IDLMLoss.forward_fused": {"hidden": H.repeat(1, 2, 1)},
    "PolicyLoss.forward": {"logits": X.expand(2, B, L, V)}, "PolicyViews": {"weights": VIEWS.weights},
    "PolicyLoss.forward_fused": {"hidden": H.expand(2, B, L, D)}, "SCDDLoss.forward": {"noisy_input_ids": Y},
    "SCDDLoss.forward_fused": {"noisy_input_ids": Y}, "token_log_probs": {"weight": W},
}  # fmt: skip
# They call a function of the user, or run a model.
LEFT_OUT = {
    "row_objective", "linear_row_objective", "nll_weights", "calculate_loss", "fused_head", "diffusion_generate",
    "mtp_loss_scaling_factor", "PipelineCausalLMLoss",
}  # fmt: skip


def functions():
    """Return the public functions, constructors with checks, and methods of losses, by name."""
    found = {}
    for name in set(dk.__all__) - LEFT_OUT:
        value = getattr(dk, name)
        if inspect.isfunction(value):
            found[name] = value
        elif name.endswith(("Loss", "CrossEntropy", "Collator", "Views", "PolicyObjective")):
            found[name] = value
            made = value(**required(name, value)) if name.endswith(("Loss", "CrossEntropy")) else None
            for method in ("forward", "forward_fused"):
                if hasattr(made, method):
                    found[f"{name}.{method}"] = getattr(made, method)
    return dict(sorted(found.items()))


def parameters_of(function):
    return {
        name: p for name, p in inspect.signature(function).parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }  # fmt: skip


def required(name, function):
    """Return the arguments of a valid call."""
    given = {p.name: VALID[p.name] for p in parameters_of(function).values() if p.default is p.empty}
    return given | OTHERS.get(name, {})


class Odd:
    """A type that nobody expects."""


BAD = {
    "object": Odd(), "array": np.array([1.0, 2.0]), "2**70": 2**70, "sparse": torch.eye(3).to_sparse(),
    "str": "x", "bytes": b"x", "list": [1], "tuple": (P, "a"), "dict": {}, "set": {1}, "class": int, "function": len,
    "array of 1": np.ones(1), "complex": 1j, "2**40": 2**40, "2**63": 2**63, "-2**70": -(2**70), "-1": -1, "0": 0,
    "inf": float("inf"), "nan": float("nan"), "1e300": 1e300, "-1e300": -1e300, "5e-324": 5e-324, "True": True,
    "None": None, "0-d": torch.tensor(1.0), "empty": torch.zeros(0), "complex tensor": P * 1j, "bools": BOOL, "ids": Y,
    "floats": P, "3-d": X, "meta": P.to("meta"), "float8": P.to(torch.float8_e4m3fn), "uint16": Y.to(torch.uint16),
    "large": torch.full((B, L), 2**62), "generator": torch.Generator(), "device": torch.device("cpu"),
    "dtype": torch.int32, "np.int64": np.int64(3), "np.float32": np.float32(0.5),
    "module": torch.nn.Linear(2, 3),
}  # fmt: skip
FEW = 4


@pytest.mark.parametrize("count", every_time([FEW], [FEW, len(BAD)]))
@pytest.mark.parametrize("name", FUNCTIONS := functions())
def test_a_bad_argument(name, count):
    function, found = FUNCTIONS[name], []
    given, parameters = required(name, function), parameters_of(function)
    known = {*parameters, *inspect.signature(type(getattr(function, "__self__", Odd()))).parameters}
    function(**given)
    for argument in parameters:
        for kind, bad in list(BAD.items())[:count]:
            try:
                function(**given | {argument: bad})
            except (TypeError, ValueError, IndexError, RuntimeError) as error:
                message = str(error)
                if not any(re.search(rf"\b{other}\b", message) for other in known):
                    found.append((argument, kind, message))
            except Exception as error:
                found.append((argument, kind, repr(error)))
    assert not found
