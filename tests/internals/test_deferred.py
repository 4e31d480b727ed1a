"""Deferred logits without ``fused_head``: heads that are refused silently, and operators of Python."""

import math
import operator
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from dllm_kernels.deferred import _expressions
from dllm_kernels.deferred._classes import ConstantRows, DeferredColumn
from dllm_kernels.deferred._head import deferred_logits
from dllm_kernels.deferred._logits import DeferredLogits
from dllm_kernels.deferred._maxima import BestIds
from dllm_kernels.deferred._nll import DeferredNLL
from dllm_kernels.deferred._pending import DeferredStat
from dllm_kernels.deferred._term_rules import Stack
from dllm_kernels.deferred._terms import Term
from tests.conftest import DEVICE
from tests.support.fused_programs import Same

V, D = 7, 5


class Model(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = head or nn.Linear(D, V)

    def forward(self, hidden):
        return self.lm_head(hidden)


def deferred():
    """Return deferred logits, and the logits."""
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE, requires_grad=True)
    with deferred_logits(model) as defers:
        assert defers
        out = model(hidden)
    assert "forward" not in vars(model.lm_head)
    return out, model(hidden)


IN_PLACE = [
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow
]  # fmt: skip


@pytest.mark.parametrize("change", IN_PLACE, ids=lambda change: change.__name__)
def test_in_place_changes_are_visible_through_every_reference(change):
    out, logits = deferred()
    view, copy = out[:, 1:], out / 2
    changed = change(out, 2)
    assert changed is out or changed is out.materialize()
    torch.testing.assert_close(copy.materialize(), logits / 2)
    torch.testing.assert_close(torch.as_tensor(out.materialize()), change(logits, 2))
    changed += 1
    assert torch.equal(view.float(), logits[:, 1:] + 1)
    out.data = logits.data
    assert torch.equal(out.float(), logits)


def test_their_truth_value_is_that_of_the_tensor():
    out, logits = deferred()
    for question in (bool, float, int):
        with pytest.raises((RuntimeError, ValueError), match=r"ambiguous|converted to"), torch.no_grad():
            question(out)
    assert logits.max().item() in out
    assert 1e9 not in out
    assert {out: 1}[out] == 1  # they hash by identity, as tensors do


def test_an_operation_that_changes_nothing_returns_the_same_object():
    out, _ = deferred()
    lse = out.logsumexp(-1)
    assert lse.flatten(0, 0) is lse
    loss = nn.functional.cross_entropy(out.flatten(0, -2), torch.zeros(6, dtype=torch.int64, device=DEVICE))
    assert loss.to(loss.dtype) is loss
    assert repr(out) == f"DeferredLogits(shape=(2, 3, {V}), dtype=torch.float32, device={out.device})"
    assert all(type(out * factor) is DeferredLogits for factor in (0, -0.5, -1, 2))
    assert out.detach_() is out
    assert not out.requires_grad


class Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def hooked():
    head = nn.Linear(D, V)
    head.register_forward_hook(lambda module, args, output: output * 2)
    return head


@pytest.mark.parametrize("head", [Adapted(D, V), hooked(), nn.Sequential(nn.Linear(D, V))], ids=str)
def test_a_head_that_is_more_than_linear_computes_its_logits(head):
    model, hidden = Model(head), torch.randn(2, 3, D)
    with deferred_logits(model) as defers:
        assert not defers
        assert torch.is_tensor(model(hidden))


def test_a_model_without_a_head_is_left_alone():
    with deferred_logits(nn.Sequential()) as defers:
        assert not defers


def test_the_autocast_state_of_the_call_is_used():
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16), deferred_logits(model):
        narrow = model(hidden)
    with deferred_logits(model):
        wide = model(hidden)
    with torch.autocast(DEVICE, torch.bfloat16):
        expected, found = model(hidden), wide.materialize()
    torch.testing.assert_close(narrow.materialize(), expected)
    torch.testing.assert_close(torch.softmax(narrow.float(), -1), torch.softmax(expected.float(), -1))
    torch.testing.assert_close(found, model(hidden))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_reading_them_under_no_grad_keeps_their_gradient(mode):
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE, requires_grad=True)
    with deferred_logits(model):
        out = model(hidden)
    with mode():
        out.argmax(-1)
        out.exp()
    got, expected = (torch.autograd.grad(z.square().sum(), hidden)[0] for z in (out.materialize(), model(hidden)))
    torch.testing.assert_close(got, expected)


PASSES = {
    "a sum": (lambda rows: rows.exp().sum(), 1),
    "a function of two values": (lambda rows: (rows.exp() / rows.log1p() - rows).sum(), 1),
    "a sum of weighted rows": (lambda rows: (rows.sqrt() * torch.ones(3, device=DEVICE)).mean(), 1),
    "values": (lambda rows: (lambda r: torch.min(r * 2, r.clamp(max=1) + 1).sum() + r.sum())(rows.exp()), 2),
}


@pytest.mark.parametrize(("fitting", "rows"), [(1, [64, 64, 22]), (130, [128, 22]), (9999, [150])])
def test_a_chunk_of_a_function_of_rows_fits_a_cache_of_a_cpu(fitting, rows, monkeypatch):
    chunks, evaluate = [], _expressions.RowFunction.__call__
    monkeypatch.setattr(_expressions, "CPU_CHUNK_BYTES", fitting * V * 4)
    monkeypatch.setattr(
        _expressions.RowFunction,
        "__call__",
        lambda self, z, index: (chunks.append(len(z)), evaluate(self, z, index))[1],
    )
    model = Model()
    with deferred_logits(model):
        model(torch.randn(150, D)).softmax(-1).square().sum(-1).sum().backward()
    assert chunks == rows


@pytest.mark.parametrize("name", PASSES)
def test_sums_of_a_function_of_rows_take_one_pass_and_other_uses_share_the_values(name, monkeypatch):
    calls, evaluated, (loss, passes) = [], _expressions._evaluated, PASSES[name]
    monkeypatch.setattr(_expressions, "_evaluated", lambda *args, **kw: (calls.append(0), evaluated(*args, **kw))[1])
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE)
    with deferred_logits(model):
        loss(model(hidden).softmax(-1).square().sum(-1)).backward()
    assert len(calls) == passes


PARTS = {
    "chunk": lambda z: z.chunk(2, 1), "split": lambda z: z.split(1, 1), "unbind": lambda z: z.unbind(0),
    "a permuted split": lambda z: [part.mT for part in z.split(2, 1)],
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_logits_are_materialized_by_one_operation_as_those_of_tensors_are(name):
    """Its backward concatenates their gradients, where that of each would make a gradient of all logits."""
    model, hidden = Model().to(DEVICE), torch.randn(2, 4, D, device=DEVICE, requires_grad=True)
    with deferred_logits(model):
        first, second, *_ = PARTS[name](3 * torch.tanh(model(hidden) / 3))
    nodes = [part.sin().grad_fn.next_functions[0][0] for part in (first, second)]
    while nodes[0].name() == "TransposeBackward0":
        nodes = [node.next_functions[0][0] for node in nodes]
    assert nodes[0] is nodes[1]
    assert nodes[0].name() in ("SplitBackward0", "UnbindBackward0")


REFUSED = {
    "a class": lambda z: z[..., V],
    "a class that is set": lambda z: z.__setitem__((..., -V - 1), -torch.inf),
    "three indices of two dimensions": lambda z: z[0, 0, 0, 0],
    "a dimension": lambda z: z.logsumexp(3),
    "a dimension of an NLL": lambda z: nll(z).sum(2),
    "a product of other sizes": lambda z: nll(z) @ torch.ones(1, device=DEVICE),
    "targets of other rows": lambda z: F.cross_entropy(z.mT, TARGETS[:, :2]),
    "class weights of other classes": lambda z: F.cross_entropy(z.mT, TARGETS, weight=torch.ones(2, device=DEVICE)),
    "class weights with a gradient": lambda z: F.cross_entropy(z.mT, TARGETS, weight=z[0, 0].detach().requires_grad_()),
    "ids of more rows": lambda z: z.gather(-1, TARGETS.repeat(2, 1)[..., None]),
    "top of too many": lambda z: z.topk(V + 1),
    "a reduction": lambda z: F.mse_loss(z, MASK.float(), reduction="batchmean"),
    "values of other rows in an NLL": lambda z: nll(z).__setitem__(TARGETS < 2, ROWS),
    "a condition of numbers": lambda z: torch.where(MASK.float(), z, 1.0),
    "ids of more classes": lambda z: torch.zeros_like(z).scatter(0, TARGETS[..., None].repeat(1, 1, V + 1), 2.0),
    "a leaf in place": lambda z: z.detach().requires_grad_().add_(1),
    "a teacher of another size": lambda z: F.kl_div(z, z[..., :2]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name):
    model, hidden = Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE)
    errors = RuntimeError, IndexError, NotImplementedError, ValueError
    with pytest.raises(errors):
        REFUSED[name](model(hidden))
    with pytest.raises(errors), deferred_logits(model):
        REFUSED[name](model(hidden)).materialize()


TARGETS = torch.tensor([[0, 1, 6], [2, 3, 4]], device=DEVICE)
X, MASK, CLASSES = "itself", torch.ones(2, 3, V, device=DEVICE) > 0, torch.arange(V, device=DEVICE)
ROWS, FEW_CLASSES = TARGETS.float(), torch.arange(V, device=DEVICE) < 2


def nll(z):
    return F.cross_entropy(z.mT, TARGETS, reduction="none")


RECEIVERS = {
    "logits": (DeferredLogits, [
        lambda z: z, lambda z: z.mT, lambda z: (3 * torch.tanh(z / 3)).masked_fill(CLASSES == 2, -torch.inf),
        lambda z: z.masked_fill(CLASSES == 2, -1e6), lambda z: z.masked_fill(FEW_CLASSES, -torch.inf),
        lambda z: z + CLASSES / 5, lambda z: z - z.max(-1, keepdim=True).values, lambda z: z + ROWS[..., None],
        lambda z: z.log_softmax(-1), lambda z: z.log_softmax(-1).mT,
        lambda z: z.log_softmax(-1).masked_fill(ROWS[..., None] < 2, -3.0),
        lambda z: z.__setitem__((..., 2), -9.0) or z,
    ]),
    "NLL": (DeferredNLL, [
        nll, lambda z: nll(z).mT.mT, lambda z: nll(z) * ROWS, lambda z: nll(z) + 1,
        lambda z: nll(z).sum(-1, keepdim=True),
        lambda z: nll(z).nan_to_num(), lambda z: z.softmax(-1).square().sum(-1),
    ]),
    "probabilities": (Term, [
        lambda z: z.softmax(-1), torch.exp, lambda z: z.softmax(-1).log2() * 2, lambda z: z.mT.softmax(1),
        lambda z: z.softmax(-1) * z.log_softmax(-1), lambda z: z.softmax(-1) + 1e-10, torch.square,
        lambda z: z.masked_fill(CLASSES == 2, -torch.inf).softmax(-1), lambda z: z.exp().sqrt().sum(-1, keepdim=True),
        lambda z: (lambda p: p * (p + 0.0).log())(z.masked_fill(CLASSES == 2, -torch.inf).softmax(-1)),
    ]),
    "mixture": (Stack, [lambda z: torch.stack([z.softmax(-1), MASK.float()])]),
    "statistic": (DeferredStat, [
        lambda z: z.logsumexp(-1), lambda z: z.logsumexp(-1, keepdim=True), lambda z: z.exp().sum(-1, keepdim=True),
        lambda z: z.max(-1, keepdim=True).values, lambda z: z.gather(-1, TARGETS[..., None])[..., 0],
    ]),
    "constant": (ConstantRows, [
        lambda z: torch.full_like(z, 1.0), lambda z: torch.zeros_like(z).scatter(-1, TARGETS[..., None], 2.0),
    ]),
    "class": (DeferredColumn, [lambda z: z[..., 2], lambda z: z.log_softmax(-1)[..., 2]]),
    "ids": (BestIds, [lambda z: z.max(-1).indices, lambda z: z.softmax(-1).max(-1, keepdim=True).indices]),
}  # fmt: skip
ODD = [  # operands after the first one, or all of them
    (), (2,), (True,), (math.nan,), (-1,), (1j,), (MASK[0, 0].float().requires_grad_(),), (ROWS[..., None],), (ROWS,),
    (MASK.double(),), (MASK,), (TARGETS[..., None],), ((-1, 0),), (..., 0), (..., ..., 0), (TARGETS < 2,), (X,), (X, X),
    (TARGETS < 2, 0.5), (TARGETS < 2, ROWS), (MASK, 1.5), (MASK.float(), X), (0, True), (-1, True), (0, 0), (1, -1, 2),
    (X, ROWS, X), (MASK, X, 1.0), (TARGETS[..., None] < 2, X), (TARGETS < 2, X, ROWS), (TARGETS < 2, X, X),
    (ROWS, {"alpha": math.inf}), (2, {"alpha": 2}), (2, {"alpha": True}), (ROWS, {"out": ROWS.clone()}),
    ({"dtype": torch.float64},),
    (torch.float64, True), ({"dim": ()},), (ROWS[0],), (ROWS[:, 0],), (ROWS[:, :1],), (math.inf,),
    ("ij,ij->ij", X, X), ("ij,ij", X, ROWS), ("ij,ij", X, ROWS.double()), ("ij,jk->ik", X, ROWS.mT), ("ij->ji", X),
    ("ij,kl->ijkl", X, ROWS), ("...,...->...", X, ROWS), ("ijk,ijk->ij", X, MASK.float()), ("ijk->ik", X),
    ("ij,ij->ij", X, ROWS[:1]), (2, {"rounding_mode": "floor"}),
    # indices and the values that are set there
    ((..., slice(1, 4)),), ((..., slice(3, 3)),), ((torch.tensor([[0], [1]]), torch.tensor([2, 0]), -TARGETS[:, :2]),),
    ((..., 3), -math.inf), ((..., -2), -1e6), ((..., True), -math.inf), ((0, ..., 3), -math.inf), ((..., 3), True),
    ((..., [0, 1]), -math.inf), ((..., FEW_CLASSES), -1e9), ((..., TARGETS[0]), -1e9), ((..., slice(5, None)), -1e9),
    (..., -math.inf), ((..., ...), -math.inf), ((TARGETS < 2, TARGETS[TARGETS < 2]), 0.0), ((..., 3), ROWS),
    (TARGETS[:, 0] < 2, 0.5),
    (FEW_CLASSES, -math.inf), (FEW_CLASSES, torch.tensor(-1e9)), (FEW_CLASSES[None], X, -math.inf), (CLASSES < 0, -1e9),
    (FEW_CLASSES, -math.inf, X), (FEW_CLASSES.int(), X, -math.inf), (CLASSES >= 0, -1e9), (FEW_CLASSES, 0.5),
    # dimensions and sizes
    (-1, -3, 2), (-1, torch.tensor(1), 2), (0, torch.tensor([1, 0])), (-1, torch.tensor([1, 0])), (2, -1, False),
    (-1, torch.float64), (2, torch.float32), ((0, -1),), (-1, False, torch.float64), ((2, 2, 3, V),), (6, V), (1, 1),
    (1, (0, 1)), (2, 1), ([1, 2], 1), (1, (3, 1)), (V, -1), ([X, X],), ([X, X], -1), ([X, MASK.float()], 1),
    (-1, TARGETS[:, :2, None]), (MASK.float()[None],), (X, X, {"alpha": 2}), (X, X, {"alpha": 1e30}),
    # losses
    (MASK.float(), {"reduction": "sum"}), (MASK.float(), {"reduction": "batchmean"}),
    (MASK.float(), {"size_average": False}),
]  # fmt: skip
FEW = {  # operands for other receivers than the first
    "logits": [
        (), (2,), (-1,), (X,), (ROWS[..., None],), (CLASSES / 5,), (-1, TARGETS[..., None]), ((..., slice(1, 4)),),
        (FEW_CLASSES, -math.inf), ((..., 3), -1e9), (TARGETS[..., None] < 2, 0.5), (TARGETS < 2, -9),
        ((TARGETS < 2, TARGETS[TARGETS < 2]), 0.0), (TARGETS, {"weight": CLASSES / 5, "reduction": "none"}),
        (TARGETS, {"ignore_index": 1}), (TARGETS, {"weight": nn.Parameter(CLASSES / 5, False)}),
        (TARGETS, {"label_smoothing": 0.1, "reduction": "sum"}), (TARGETS, {"size_average": False}),
        (MASK.mT / V, {"label_smoothing": 0.1}), (MASK.mT / V, {"reduction": "sum"}),
    ],
    "NLL": [(), (2,), (-1,), (X,), (ROWS,), (TARGETS < 2, 0.5)],
    "probabilities": [(), (2,), (-1,), (X,), (-1, TARGETS[..., None])],
    "statistic": [(), (2,), (-1,), (..., None)],
    "constant": [(-1, TARGETS[..., None], 2.0), (MASK, X, 1.0)],
    "class": [(2,)],
}  # fmt: skip
# Random, rounded, a number is a dtype, the backward refuses other dtypes; or another name of the same rules.
UNLIKE = {
    "rand_like", "randn_like", "empty_like", "new_empty", "bfloat16", "half", "to", "type", "huber_loss", "subtract",
    "clamp_", "clamp_max_", "clamp_min_", "exp_", "log_", "mul_", "sub_", "special_expit", "moveaxis", "swapdims",
    "clamp_min", "concatenate", "ravel",
}  # fmt: skip


def names_of(rules):
    """Return the first and the last name of each rule, and one between them."""
    return sorted(
        {"matmul"} & rules.keys()
        | {name for items in (rules.items(), reversed(rules.items())) for name in {r: n for n, r in items}.values()}
    )


CALLS = [
    pytest.param(kind, receivers, function, id=f"{kind}-{name}")
    for kind, (deferred_type, receivers) in RECEIVERS.items()
    for name in names_of(deferred_type.rules)
    if name not in UNLIKE
    if (function := next(filter(callable, (getattr(place, name, None) for place in (torch.Tensor, torch, F))), None))
]


def differentiable(results):
    return [t.requires_grad for t in tree_leaves(results) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize(("kind", "receivers", "function"), CALLS)
def test_functions_with_odd_operands_return_what_they_do_for_tensors(kind, receivers, function):
    """One function of each rule. What torch refuses is refused, perhaps later, when the values are computed."""
    plain, model, hidden = Model().to(DEVICE), Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE)

    def read(t):
        """Return the last item or the sum of each row, then the values, because rules do not apply to known values."""
        rows = isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() > 1 and t.numel()
        last = TARGETS.new_full((*t.shape[:-1], 1), t.shape[-1] - 1) if rows else None
        stats = [t.gather(-1, last) if kind == "logits" else t.sum(-1)] if rows else []
        return [v.materialize() if hasattr(v, "materialize") else v for v in (*stats, t)]

    def result(model, receive, operands):
        x = receive(model(hidden))
        args = [[x if i is X else i for i in o] if isinstance(o, list) else x if o is X else o for o in operands]
        args = [o.clone() if isinstance(o, torch.Tensor) and o is not x else o for o in args]
        named = args.pop() if args and isinstance(args[-1], dict) else {}
        value = function(*args, **named)
        if value is NotImplemented:
            return value
        return tree_map(read, x if value is None or value is x else value)  # of __setitem__, or in place

    with deferred_logits(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for receive, operands in [(r, o) for i, r in enumerate(receivers) for o in (FEW[kind] if i else ODD)]:
            whole = any(o is X for o in operands[1:]) or (operands and isinstance(operands[0], list))
            operands = operands if whole else (X, *operands)
            try:
                expected = result(plain, receive, operands)
            except Exception:
                with pytest.raises((RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)):
                    result(model, receive, operands)
                continue
            if expected is not NotImplemented:
                found = result(model, receive, operands)
                torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)
                assert differentiable(found) == differentiable(expected)


@pytest.mark.parametrize("kind", RECEIVERS)
def test_code_below_autograd_reads_the_values_and_leaves_the_graph(kind):
    """A Function that returns its input, and ``torch.tensor``, for which torch calls no ``__torch_function__``."""
    plain, model, hidden = Model().to(DEVICE), Model().to(DEVICE), torch.randn(2, 3, D, device=DEVICE)
    with deferred_logits(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.tensor of a tensor
        for receive in RECEIVERS[kind][1]:
            x, expected = receive(model(hidden)), receive(plain(hidden))
            torch.testing.assert_close(Same.apply(receive(model(hidden))).materialize(), expected, equal_nan=True)
            torch.testing.assert_close(torch.tensor(x), torch.tensor(expected), equal_nan=True)
            if expected.requires_grad:
                weights = [m.lm_head.weight for m in (model, plain)]
                grads = [torch.autograd.grad(t.sum(), w)[0] for t, w in zip((x, expected), weights, strict=True)]
                torch.testing.assert_close(*grads, equal_nan=True)


@pytest.mark.parametrize(("step", "bias"), [(0.25, False), (0.1, False), (0.25, True)])
def test_numbers_per_class_of_16_bit_logits_are_a_bias_if_this_is_exact(step, bias):
    model, hidden = Model(nn.Linear(D, V, bias)).bfloat16().to(DEVICE), torch.randn(2, 3, D, device=DEVICE).bfloat16()
    numbers = CLASSES * step
    expected = (model(hidden) + numbers).logsumexp(-1)
    with deferred_logits(model):
        out = model(hidden) + numbers
        exact = step == 0.25 and not bias and DEVICE == "cpu"  # on a GPU, reading the numbers would be a host sync
        assert isinstance(out, DeferredLogits if exact else Term)
        torch.testing.assert_close(out.logsumexp(-1).materialize(), expected, rtol=0.02, atol=0.02)
