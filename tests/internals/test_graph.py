"""Graphs: torch's checks of each custom op, typed arguments by name, and tensors without readable values."""

import inspect
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from dllm_kernels import corruption
from dllm_kernels._checks import _compiled
from dllm_kernels._graph import _call_state, _changing, _custom_ops, _plain, _private
from dllm_kernels.corruption import _philox
from dllm_kernels.losses import sample_anchors, sample_prefix
from dllm_kernels.ops import LinearLogits, gumbel_topk_mask, weighted_linear_nll
from dllm_kernels.policy._quadrature import quadrature_rule
from dllm_kernels.rows._setup import Setup
from tests.conftest import DEVICE
from tests.support.op_cases import OF_EVERY_KIND, OF_LOGITS, Rows, name_of
from tests.support.opcheck import opcheck_calls
from tests.support.routines import FIRSTS, OTHERS

N, V, D, R = 5, 19, 8, 3
IDS = torch.tensor([2, 3, 4, 5, 17], device=DEVICE)
ACTIVE = torch.tensor([1, 0, 1, 1, 1], device=DEVICE)
ROWS = Rows.of(IDS, ACTIVE > 0, torch.tensor([1.0, 0.7, 1.0, 0.5, 1.0], device=DEVICE))
TRANSFORM = {"softcap": 3.0, "scale": 0.7, "skip_id": 1}
CHUNKS = [{"chunk_size": 2}, {"chunk_size": 2, "num_active": 5, **TRANSFORM}]

# Hidden states, weight, bias and the low-rank part. With fewer of them, an op has fewer outputs of the same kinds.
TRAINS = [(1, 1, 1, 1, 1), (1, 0, 0, 1, 0)]
TRAINS += [pytest.param(few, marks=pytest.mark.every_case) for few in ((0, 0, 0, 0, 1), (0, 0, 0, 0, 0))]
TOKENS = torch.arange(2 * 12, device=DEVICE).view(2, 12) % 7
SUPERVISED = TOKENS % 3 != 0
OF_ROWS = {"seeds": torch.tensor([5, -8], device=DEVICE), "start": torch.tensor([0, 2], device=DEVICE)}
OF_BITS = {
    **{name: lambda case=case: case(TOKENS, SUPERVISED, **OF_ROWS) for name, case in FIRSTS.items()},
    **{name: lambda call=call: call(TOKENS, SUPERVISED, seeds=OF_ROWS["seeds"]) for name, call in OTHERS.items()},
    "child_seeds": lambda: _philox.child_seeds(OF_ROWS["seeds"], 3),
    "sample_anchors": lambda: sample_anchors(SUPERVISED, 3, 2, seeds=OF_ROWS["seeds"], segment_ids=TOKENS)[0],
    "sample_prefix": lambda: sample_prefix((2, 3), 5, 0.7, seeds=OF_ROWS["seeds"]),
    "quadrature_rule": lambda: quadrature_rule(TOKENS, 3)[0],
    "gumbel_topk_mask": lambda: gumbel_topk_mask(torch.zeros(2, 12, device=DEVICE), TOKENS[:, 3], **OF_ROWS),
}


@pytest.mark.parametrize("name", OF_BITS)
def test_ops_of_random_bits(name, monkeypatch):
    assert len(check(OF_BITS[name], monkeypatch)) == 1


def check(total, monkeypatch):
    def run():
        value = total()
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.backward()

    return opcheck_calls(run, monkeypatch)


@pytest.mark.everyday(2)
@pytest.mark.covering(1, most=1)  # an op is one function for all dtypes, options and backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, TRANSFORM], ids=["plain", "transform"])
@pytest.mark.parametrize("case", [case for kind, case in OF_EVERY_KIND if kind == "stored"], ids=name_of)
def test_ops_of_logits(case, options, dtype, backend, monkeypatch):
    x = torch.randn(N, V, device=DEVICE).to(dtype).requires_grad_()
    options = case.accepted(**options)
    assert check(lambda: case.total(x, ROWS, backend=backend, **options), monkeypatch)


def record(leaves, options):
    hidden, weight, bias, *extra = leaves
    return LinearLogits(hidden, weight, bias, tuple(extra), **options)


@pytest.mark.everyday(2)
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", CHUNKS, ids=["chunks", "transform"])
@pytest.mark.parametrize("trains", TRAINS, ids=str)
@pytest.mark.parametrize("case", OF_LOGITS, ids=name_of)
def test_ops_of_hidden_states(case, trains, options, dtype, monkeypatch):
    leaves = [torch.randn(s, device=DEVICE).to(dtype) for s in ((N, D), (V, D), (V,), (N, R), (V, R))]
    leaves = [t.requires_grad_(bool(train)) for t, train in zip(leaves, trains, strict=True)]
    assert bool(check(lambda: case.total(record(leaves, options), ROWS), monkeypatch)) != case.traced


def test_float16_without_a_row(monkeypatch):
    h, w = torch.randn(0, D, device=DEVICE).half().requires_grad_(), torch.randn(V, D, device=DEVICE).half()
    none = ROWS.map(lambda t: t[:0])
    assert check(lambda: weighted_linear_nll(h, w.requires_grad_(), none.ids, none.weights).loss, monkeypatch)


def test_every_custom_op_is_checked_here(monkeypatch):
    x = torch.randn(N, V, device=DEVICE, requires_grad=True)
    leaves = [torch.randn(s, device=DEVICE, requires_grad=True) for s in ((N, D), (V, D), (V,), (N, R), (V, R))]
    monkeypatch.setattr(torch.library, "opcheck", lambda *_: None)
    logits = {"stored": x, "head": record(leaves, {})}
    totals = [partial(case.total, logits[kind], ROWS, backend="torch") for kind, case in OF_EVERY_KIND]
    totals += OF_BITS.values()
    assert set().union(*(check(total, monkeypatch) for total in totals)) == set(_custom_ops.OPS)


def test_arguments_are_typed_and_have_the_names_of_the_function():
    for name in _custom_ops.OPS:
        op = _custom_ops.OPS[name]
        if name in OF_BITS or op.function.__module__.startswith(corruption.__name__):
            continue
        arguments = {argument.name: str(argument.type) for argument in op.overload._schema.arguments}
        of_transform = {"setup_transform_softcap": "float", "setup_transform_skip_id": "Optional[int]"}
        assert {**of_transform, "setup_triton": "bool"}.items() <= arguments.items(), name
        own = [p for p in inspect.signature(op.function).parameters if p in arguments]
        assert own, name


def test_only_the_split_of_a_call_on_dtensors_is_no_argument():
    for name, op in _custom_ops.OPS.items():
        records = [kind for kind in op.kinds.values() if kind not in _custom_ops.TYPES]
        for kind in records:
            held = _custom_ops._fields(kind)
            assert {*kind._fields} - held.keys() == ({"split"} if kind is Setup else set()), (name, kind)
            records += [of_field for of_field in held.values() if of_field not in _custom_ops.TYPES]


def test_floats_that_change_are_one_tensor_of_a_graph():
    def step(x, a):
        return x.neg(), _changing.packed([a, (0.5, a), None]), _changing.equals(a, 1.5), _changing.printable(a)

    torch.compiler.reset()
    compiled, x = torch.compile(step, backend="eager", fullgraph=True), torch.zeros(1, device=DEVICE)
    for function in (step, compiled):
        assert function(x, 1.5)[1:] == (([1.5, (0.5, 1.5), 0.0], None), True, 1.5)
    counters.clear()
    for a in (2.5, 1.5, 3.5):
        _, (values, changing), equal, printed = compiled(x, a)
        assert (values, equal, printed) == ([0.0, [0.0, 0.0], 0.0], False, "another")
        assert changing.dtype == torch.float64
        assert _changing.unpacked(values, changing) == [a, [0.5, a], 0.0]
    assert counters["stats"]["unique_graphs"] == 1
    assert _changing.unpacked([1.5, [0.5]], None) == [1.5, [0.5]]


def test_opcheck_of_the_check_of_targets():
    targets = torch.tensor([0, 3, -100], device=DEVICE)
    torch.library.opcheck(_compiled.target_range, (targets, "targets", V, -100, 0))


def test_tensors_without_readable_values():
    assert _plain.readable_without_sync(ACTIVE)
    assert not _plain.readable_without_sync(None)
    assert not _plain.readable_without_sync(ACTIVE.to("meta"))
    with FakeTensorMode() as mode:
        assert not _plain.readable_without_sync(mode.from_tensor(ACTIVE))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float32, torch.int64])
def test_entries_of_every_width_are_read(dtype):
    ones, others, zeros = (
        _call_state._bits(_call_state._sample(t.to(dtype))) for t in torch.tensor([[1] * 3, [1] * 3, [0] * 3])
    )
    assert ones == others != zeros


def test_a_backward_pass_is_told_from_the_rest_of_a_program():
    seen, t = [], torch.ones(1, requires_grad=True)
    t.register_hook(lambda grad: seen.append(_private.backward_task()))
    t.sum().backward(retain_graph=True)
    t.sum().backward()
    assert seen[1] > seen[0] > -1
    assert _private.backward_task() == -1
