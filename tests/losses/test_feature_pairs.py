"""Every op and loss with what surrounds it in a training loop: each pair of features once, against the oracle."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import reference
from dllm_kernels import fused_head
from tests.conftest import DEVICE
from tests.support.cases import BY_NAME, FIRSTS, SKIP_ID, upstream_for, value_of
from tests.support.pairs import pairs, surrounding
from tests.support.parity import assert_parity

B, L, V, D = 2, 6, 11, 8
TRANSFORMS = {"none": {}, "softcap": {"softcap": 3.0}, "scale": {"scale": 0.7}, "skip": {"skip_id": SKIP_ID}}
TABLE = {
    "case": [*(case.name for case in FIRSTS), "dflash, dpace", "idlm, balanced", "scdd, shift", "mdlm, counted, rows"],
    "form": ["logits", "hidden", "deferred"],
    "head": ["frozen", "trained", "trained with bias"],
    "dtype": [torch.float32, torch.float64],
    "transform": list(TRANSFORMS),
    "around": ["nothing", "checkpoint", "saved on the CPU", "deterministic", "default dtype"],
    "layout": ["contiguous", "strided", "transposed", "one sequence"],
    "chunk_size": [None, 1, 5],
    "masks": ["drawn", torch.float64, torch.bfloat16, torch.int64],
    "counts": ["tensor", "int", "float", "numpy"],
    "calls": [1, 2],
}


def excluded(case):
    """Return True for values that no call takes together."""
    form, name = case.get("form", "hidden"), case.get("case", "mdlm")
    if form != "hidden" and (
        case.get("chunk_size") is not None or (form == "logits" and "bias" in case.get("head", ""))
    ):
        return True
    if form == "deferred" and name == "distillation":  # the teacher's logits are not made from the draft's head
        return True
    # SCDD skips MASK, and the oracle of a mixture takes no transformed logits
    return case.get("transform") == "skip" and name.startswith(("scdd", "row_stats"))


CASES = pairs(TABLE, excluded)


def drawn_inputs(chosen):
    """Draw the inputs of a case with the types of masks and counts that are chosen."""
    case, skip_id = BY_NAME[chosen["case"]], TRANSFORMS[chosen["transform"]].get("skip_id", -1)
    inputs = case.draw(1 if chosen["layout"] == "one sequence" else B, L, V)
    targets = inputs[case.targets]
    inputs[case.targets] = torch.where(targets == skip_id, -100 if case.targets == "top_ids" else V - 1, targets)
    if case.targets == "input_ids":
        inputs["input_ids"] = inputs["input_ids"].clamp(min=0)
    exact = {name: t.to(DEVICE) for name, t in inputs.items()}
    count = {"tensor": lambda n: n, "int": int, "float": float, "numpy": lambda n: np.int64(int(n))}[chosen["counts"]]
    ours = dict(exact)
    for name, role in case.roles.items():
        if name in ours and role in ("mask", "noise") and chosen["masks"] != "drawn":
            ours[name] = ours[name].to(chosen["masks"])
        elif name in ours and role == "count":
            ours[name] = count(ours[name])
    return case, exact, ours


def laid_out(t, layout):
    if layout == "strided":
        return torch.stack([t, t], -1)[..., 0]
    return t.transpose(0, 1).contiguous().transpose(0, 1) if layout == "transposed" else t


@pytest.mark.everyday(6)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_pairs_of_features(number):
    chosen = CASES[number]
    torch.manual_seed(number)
    case, exact, inputs = drawn_inputs(chosen)
    form, transform, dtype = chosen["form"], TRANSFORMS[chosen["transform"]], chosen["dtype"]
    b = len(exact[case.targets])
    frozen = torch.randn(V, D, device=DEVICE).to(dtype)
    options = dict(transform) if chosen["chunk_size"] is None else {**transform, "chunk_size": chosen["chunk_size"]}

    def value(x, *head):
        """Call the loss on logits, or on hidden states and the head."""
        x = laid_out(x, chosen["layout"])
        weight, *bias = head or (frozen,)
        if form == "hidden":
            return value_of(
                case.output("hidden", case.arguments("hidden", x, inputs, (weight, *bias, None)[:2]), **options)
            )
        if form == "logits":
            return value_of(case.output("logits", case.arguments("logits", x, inputs), **options))
        linear = torch.nn.Linear(D, V, bias=bool(bias), device=DEVICE, dtype=dtype)
        for name, t in zip(("weight", "bias"), (weight, *bias), strict=False):
            del linear._parameters[name]
            setattr(linear, name, t)
        with fused_head(linear, head=linear, on_logits="raise"):
            return value_of(case.output("logits", case.arguments("logits", linear(x), inputs), **options))

    def ours(*leaves):
        with surrounding(chosen["around"]):
            if chosen["around"] == "checkpoint":
                checkpoint = torch.utils.checkpoint.checkpoint
                return sum(checkpoint(value, *leaves, use_reentrant=False) for _ in range(chosen["calls"]))
            return sum(value(*leaves) for _ in range(chosen["calls"]))

    def oracle(x, *head):
        logits = x if form == "logits" else F.linear(x, *(head or (frozen.to(x.dtype),)))
        return chosen["calls"] * case.oracle(reference.transformed(logits, **transform) if transform else logits, exact)

    def draw(seed):
        torch.manual_seed(seed)
        leaves = [torch.randn(b, L * case.width, V if form == "logits" else D)]
        leaves += [torch.randn(V, D)] * (form != "logits" and chosen["head"] != "frozen")
        leaves += [torch.randn(V)] * (form != "logits" and "bias" in chosen["head"])
        return [t.to(DEVICE, dtype) for t in leaves], upstream_for(case, b, L).to(DEVICE)

    assert_parity(ours, oracle, draw)
