"""Graphs: torch's checks of each custom op, typed arguments by name, and tensors without readable values."""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dllm_kernels import corruption
from dllm_kernels._checks import _compiled
from dllm_kernels._graph import _custom_ops, _plain
from dllm_kernels.corruption import _philox
from dllm_kernels.losses import sample_anchors, sample_prefix
from dllm_kernels.ops import (
    divergence,
    gumbel_topk_mask,
    linear_divergence,
    linear_row_stats,
    linear_sample,
    linear_token_nll,
    linear_topk_divergence,
    row_stats,
    soft_embedding,
    token_nll,
    topk_divergence,
    weighted_linear_nll,
    weighted_nll,
)
from dllm_kernels.policy._quadrature import quadrature_rule
from dllm_kernels.rows._setup import Setup
from tests.conftest import DEVICE
from tests.support.opcheck import opcheck_calls
from tests.support.routines import FIRSTS, OTHERS
from tests.support.statistics import FLAGS, differentiable

N, V, D, R = 5, 19, 8, 3
IDS = torch.tensor([0, 3, -100, 5, 18], device=DEVICE)
WEIGHTS = torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0], device=DEVICE)
ACTIVE = torch.tensor([1, 0, 1, 1, 1], device=DEVICE)
SEEDS = torch.arange(N, device=DEVICE) % 3
TRANSFORM = {"softcap": 3.0, "scale": 0.7, "skip_id": 1}
CHUNKS = [{"chunk_size": 2}, {"chunk_size": 2, "num_active": 5, **TRANSFORM}]
PAIR = {"kind": {"ce": 0.1, "lk": 0.9}, "alpha": "mean", "targets": IDS, "temperature": 2.0}
TOP = torch.tensor([[0, 3]] * N, device=DEVICE), torch.full((N, 2), -2.0, device=DEVICE)
KEPT = torch.tensor([4, 1, 9, 0, 17, 12, 3], device=DEVICE)


def of_logits(name, x, o):
    return {
        "token_nll": lambda: token_nll(x, IDS, with_correct=True, with_ids=True, with_lse=True, **o).nll.sum(),
        "weighted_nll": lambda: weighted_nll(x, IDS, WEIGHTS, round_nll=True, **o).loss,
        "weighted_nll, active": lambda: weighted_nll(x, IDS, WEIGHTS, active=ACTIVE, **o).loss,
        "row_stats": lambda: sum(
            t.sum() for t in differentiable(row_stats(x, IDS, **FLAGS, mix=(WEIGHTS, WEIGHTS), **o))
        ),
        "row_stats, rest": lambda: topk_divergence(x, *TOP, WEIGHTS, **o).loss,
        "divergence": lambda: divergence(x, x.detach().flip(0), WEIGHTS, **PAIR, **o).loss,
        "divergence, rows": lambda: divergence(x, x.detach().flip(0), WEIGHTS, reduction="none", **o).loss.sum(),
        "divergence, columns": lambda: (
            divergence(x[:, : len(KEPT)], x.detach(), draft_to_target=KEPT, teacher="full", backend=o["backend"]).loss
        ),
    }[name]


def of_hidden(name, leaves, o):
    h, w, b, u, U = leaves
    head = {"bias": b, "extra": (u, U), **o}
    return {
        "linear_token_nll": lambda: linear_token_nll(h, w, IDS, with_correct=True, with_ids=True, **head).nll.sum(),
        "weighted_linear_nll": lambda: weighted_linear_nll(h, w, IDS, WEIGHTS, with_lse=True, **head).loss,
        "linear_row_stats": lambda: linear_row_stats(h, w, torch.stack([IDS, IDS], 1), **FLAGS, **head).lse.sum(),
        "linear_row_stats, mix": lambda: linear_row_stats(
            h, w, IDS, mix=(WEIGHTS, WEIGHTS), active=ACTIVE, with_correct=True, with_ids=True, **head
        ).mix.sum(),
        "linear_row_stats, rest": lambda: linear_topk_divergence(
            h, w, *TOP, WEIGHTS, reduction="none", **head
        ).loss.sum(),
        "linear_divergence": lambda: linear_divergence(h, w, h.detach().flip(0), WEIGHTS, **PAIR, **head).loss,
        "linear_divergence, rows": lambda: linear_divergence(
            h, w, h.detach().flip(0), WEIGHTS, reduction="none", **head
        ).loss.sum(),
        "linear_divergence, teacher": lambda: linear_divergence(
            h,
            w,
            h.detach(),
            WEIGHTS,
            teacher_weight=torch.cat([w, w]).detach(),
            teacher="full",
            teacher_rows=SEEDS,
            draft_to_target=torch.arange(V, device=DEVICE) * 2,
            reduction="none",
            **head,
        ).loss.sum(),
        "linear_sample": lambda: linear_sample(
            h, w, seeds=SEEDS, return_top=2, top_k=9, top_p=0.8, active=ACTIVE, **head
        ).log_probs.sum(),
        "linear_sample, greedy": lambda: linear_sample(h, w, temperature=0, **head).log_probs.sum(),
        "soft_embedding": lambda: soft_embedding(h, w, w, bump=1.0, bump_ids=IDS.clamp(min=2), **head).sum(),
        "soft_embedding, table": lambda: soft_embedding(h, w, w[:, :R], active=ACTIVE, **head).sum(),
    }[name]


OF_LOGITS = (
    "token_nll", "weighted_nll", "weighted_nll, active", "row_stats", "row_stats, rest", "divergence",
    "divergence, rows", "divergence, columns",
)  # fmt: skip
OF_HIDDEN = (
    "linear_token_nll", "weighted_linear_nll", "linear_row_stats", "linear_row_stats, mix",
    "linear_row_stats, rest", "linear_divergence", "linear_divergence, rows",
    "linear_divergence, teacher", "linear_sample",
    "linear_sample, greedy", "soft_embedding", "soft_embedding, table",
)  # fmt: skip


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
@pytest.mark.parametrize("name", OF_LOGITS)
def test_ops_of_logits(name, options, dtype, backend, monkeypatch):
    x = torch.randn(N, V, device=DEVICE).to(dtype).requires_grad_()
    if "divergence, columns" in name:
        options = {}
    assert check(of_logits(name, x, {**options, "backend": backend}), monkeypatch)


@pytest.mark.everyday(2)
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", CHUNKS, ids=["chunks", "transform"])
@pytest.mark.parametrize("trains", TRAINS, ids=str)
@pytest.mark.parametrize("name", OF_HIDDEN)
def test_ops_of_hidden_states(name, trains, options, dtype, monkeypatch):
    leaves = [torch.randn(s, device=DEVICE).to(dtype) for s in ((N, D), (V, D), (V,), (N, R), (V, R))]
    leaves = [t.requires_grad_(bool(train)) for t, train in zip(leaves, trains, strict=True)]
    assert check(of_hidden(name, leaves, options), monkeypatch)


def test_float16_without_a_row(monkeypatch):
    h, w = torch.randn(0, D, device=DEVICE).half().requires_grad_(), torch.randn(V, D, device=DEVICE).half()
    none = IDS[:0]
    assert check(lambda: weighted_linear_nll(h, w.requires_grad_(), none, WEIGHTS[:0]).loss, monkeypatch)


def test_every_custom_op_is_checked_here(monkeypatch):
    x = torch.randn(N, V, device=DEVICE, requires_grad=True)
    leaves = [torch.randn(s, device=DEVICE, requires_grad=True) for s in ((N, D), (V, D), (V,), (N, R), (V, R))]
    monkeypatch.setattr(torch.library, "opcheck", lambda *_: None)
    totals = [of_logits(name, x, {"backend": "torch"}) for name in OF_LOGITS]
    totals += [of_hidden(name, leaves, {}) for name in OF_HIDDEN]
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


def test_opcheck_of_the_check_of_targets():
    targets = torch.tensor([0, 3, -100], device=DEVICE)
    torch.library.opcheck(_compiled.target_range, (targets, "targets", V, -100, 0))


def test_tensors_without_readable_values():
    assert _plain.readable_without_sync(ACTIVE)
    assert not _plain.readable_without_sync(None)
    assert not _plain.readable_without_sync(ACTIVE.to("meta"))
    with FakeTensorMode() as mode:
        assert not _plain.readable_without_sync(mode.from_tensor(ACTIVE))
