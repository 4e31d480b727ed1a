"""Every loss with what a training loop does around it: each pair of features once, against the oracle."""

import contextlib
import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from dllm_kernels import fused_head
from tests.conftest import DEVICE
from tests.support.cases import Case
from tests.support.distributed_checks import BY_NAME, B, D, L, V
from tests.support.pairs import pairs
from tests.support.parity import OUR_DRAWS, PLAIN_DRAWS, assert_as_good_as_plain, largest_error, reduction_sizes

TABLE = {
    "case": list(BY_NAME),
    "form": ["logits", "hidden", "deferred"],
    "head": ["frozen", "trained", "frozen weight", "tied", "computed"],
    "dtype": [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    "autocast": [False, True],
    "checkpoint": ["no", "loss", "reentrant loss"],
    "calls": ["one", "two, added", "two backwards", "eval, then train", "frozen, then trained"],
    "scale": [1.0, 64.0],
    "loss": ["as made", "copied", "pickled"],
    "rows": ["drawn", "none active", "no sequences"],
    "run": ["eager", "compiled", "torch.func", "no_grad", "inference"],
}


def excluded(case):
    """Return True for values that torch does not take together, or that mean nothing together."""
    run, checkpointed = case.get("run", "eager"), case.get("checkpoint", "no") != "no"
    if run in ("compiled", "torch.func") and (
        case.get("checkpoint") == "reentrant loss" or case.get("form") == "deferred"
    ):
        return True
    if run in ("compiled", "torch.func", "no_grad", "inference") and case.get("calls", "one") not in (
        "one",
        "two, added",
    ):
        return True
    if run in ("torch.func", "no_grad", "inference") and checkpointed:
        return True
    return case.get("autocast") is True and case.get("dtype") is torch.float16


CASES = pairs(TABLE, excluded)


def inputs_of(chosen):
    """Draw the inputs; some batches have no row that counts, or no sequence."""
    case = BY_NAME[chosen["case"]]
    inputs = case.draw(B, L, V)
    if chosen["rows"] == "none active":
        masks = [name for name, role in case.roles.items() if role in ("mask", "noise", "weight") and name in inputs]
        for name in masks:
            inputs[name] = torch.zeros_like(inputs[name])
        if not masks:
            inputs[case.targets] = torch.full_like(inputs[case.targets], -100)
    if chosen["rows"] == "no sequences":
        inputs = {name: t[:0] if t.dim() else t for name, t in inputs.items()}
    return case, {name: t.to(DEVICE) for name, t in inputs.items()}


def copied(loss, how):
    return {"copied": copy.deepcopy, "pickled": lambda x: pickle.loads(pickle.dumps(x))}.get(how, lambda x: x)(loss)


@pytest.mark.parametrize(
    "number",
    [pytest.param(i, marks=pytest.mark.exhaustive if c["run"] == "compiled" else ()) for i, c in enumerate(CASES)],
)
@pytest.mark.everyday(30)
def test_pairs_of_training(number, monkeypatch):
    chosen = CASES[number]
    case, inputs = inputs_of(chosen)
    form, dtype = chosen["form"], chosen["dtype"]
    b = 0 if chosen["rows"] == "no sequences" else B
    ids = torch.randint(0, V, (b, L * case.width), device=DEVICE)
    of = Case._of
    monkeypatch.setattr(Case, "_of", staticmethod(lambda loss, form: of(copied(loss, chosen["loss"]), form)))
    trained = chosen["head"] in ("trained", "tied", "computed")

    def head(x, weight, bias, low_rank):
        """Return hidden states, weight and bias of a case."""
        weight, bias = (weight, bias) if trained else (weight.detach(), bias)
        bias = bias.detach() if chosen["head"] == "frozen" else bias
        if chosen["head"] == "tied":
            x = x + F.embedding(ids, weight)
        if chosen["head"] == "computed":
            weight = weight + low_rank @ low_rank[:D].t()
        return x, weight, bias

    def ours(form):
        def value(*leaves):
            x, weight, bias = head(*leaves)
            if form == "hidden":
                return case.hidden_form(x, weight, bias, inputs)
            if form == "logits":
                return case.logits_form(F.linear(x, weight, bias), inputs)
            linear = torch.nn.Linear(D, V, device=DEVICE, dtype=dtype)
            for name, t in (("weight", weight), ("bias", bias)):
                del linear._parameters[name]
                setattr(linear, name, t)
            with fused_head(linear, head=linear, on_logits="allow"):
                return case.logits_form(linear(x), inputs)

        return value

    def plain(*leaves):
        x, weight, bias = head(*leaves)
        logits = F.linear(x, weight, bias)
        if case.equation:
            return case.oracle(logits, inputs) + 0 * logits.sum()  # that of a policy has no graph without a row
        form_of_case = case.hidden_form if form == "hidden" else case.logits_form
        return form_of_case(*((x, weight, bias) if form == "hidden" else (logits,)), inputs)

    def loss_of(value, *leaves):
        """Compute the loss as the training loop of the case does."""
        if chosen["calls"] == "eval, then train":
            with torch.no_grad():
                value(*leaves)
        if chosen["calls"] == "frozen, then trained":
            value(leaves[0], *(t.detach() for t in leaves[1:]))
        call = value
        if chosen["checkpoint"] != "no":
            reentrant = chosen["checkpoint"] == "reentrant loss"
            call = functools.partial(torch.utils.checkpoint.checkpoint, value, use_reentrant=reentrant)
        return call(*leaves) + call(*leaves) if chosen["calls"] == "two, added" else call(*leaves)

    def results(value, leaves, upstream):
        """Return the value and the gradients, which are zeros where the loop computes none."""
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        autocast = torch.autocast(DEVICE, torch.bfloat16) if chosen["autocast"] else contextlib.nullcontext()
        loss = functools.partial(loss_of, value)
        if chosen["run"] in ("no_grad", "inference"):
            with autocast, torch.no_grad() if chosen["run"] == "no_grad" else torch.inference_mode():
                return [loss(*leaves).clone()]
        for _ in range(2 if chosen["calls"] == "two backwards" else 1):
            with autocast:
                out = loss(*leaves)
            out.backward(upstream.to(out))
        return [out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]

    def draw(seed):
        torch.manual_seed(seed)
        leaves = [torch.randn(b, L * case.width, D), torch.randn(V, D), torch.randn(V), torch.randn(V, 2) / 4]
        upstream = torch.randn(b, L * case.width) if case.per_row else torch.ones(())
        return [t.to(DEVICE, dtype) for t in leaves], chosen["scale"] * upstream.to(DEVICE)

    value = ours(form)
    if chosen["run"] == "compiled":
        torch.compiler.reset()
        value = torch.compile(value, backend="aot_eager")
    if chosen["run"] == "torch.func":  # refused
        with pytest.raises(NotImplementedError, match=r"^dllm_kernels does not support the transforms of torch\.func"):
            torch.func.vjp(functools.partial(loss_of, value), *draw(0)[0])
        return
    draws = [draw(seed) for seed in range(PLAIN_DRAWS)]
    found = [results(value, *one) for one in draws[:OUR_DRAWS]]
    of_plain = [results(plain, *one) for one in draws]
    exact = [results(plain, [leaf.double() for leaf in leaves], upstream) for leaves, upstream in draws]
    for place in range(len(found[0])):
        got, p, e = ([run[place] for run in runs] for runs in (found, of_plain, exact))
        assert_as_good_as_plain(got, e, largest_error(p, e), f"{chosen}, {place}", reduction_sizes(draws[0][0]))
