"""Checks of tensor parallelism: split vocabularies, in logits and in heads."""

import functools
import itertools
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import dllm_kernels as ours
from dllm_kernels import ops
from tests.support.cases import FEWER
from tests.support.distributed_checks import (
    BY_NAME,
    POLICIES,
    B,
    D,
    Job,
    L,
    Model,
    Sent,
    V,
    all_close,
    check,
    close,
    drawn,
    mesh_of,
    raises,
    same_gradients,
    set_up,
    shard,
    upstream,
)
from tests.support.distributed_layouts import as_it_is, over, summed_over_rows
from tests.support.parity import assert_parity
from tests.support.statistics import EVERY_FLAG, FLAGS, differentiable

NAMES = [case.name for case in (*FEWER, *POLICIES)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CHUNKED = tuple(zip(DTYPES, (5, None, 5, None), strict=True))
FEW = ("token_nll", "row_stats", "hybrid, one tensor", "dflash", "token_nll, softcap scale skip_id", "policy")
EVERY_OUTPUT = {"with_correct": True, "with_ids": True, "with_lse": True}
FEWEST = ("row_stats", "hybrid, one tensor", "token_nll, softcap scale skip_id")  # on four ranks


def logits_parity(case, inputs, laid, dtype=torch.float64, columns=V, rows=B, **options):
    """Compare a loss from logits, distributed by ``laid``, with the oracle."""
    assert_parity(
        lambda x: case.logits_form(laid(x), inputs, **{"backend": "torch"} | options),
        lambda x: case.oracle(x, inputs),
        lambda _: ([(3 * torch.randn(rows, L * case.width, columns)).to(dtype)], upstream(case, rows)),
    )


def hidden_parity(case, inputs, laid, head_laid, dtype=torch.float64, columns=V, rows=B, **options):
    """Compare a loss from hidden states and head, distributed by ``laid`` and ``head_laid``, with the oracle."""
    shapes = (rows, L * case.width, D), (columns, D), (columns,)
    options = {"backend": "torch"} | options
    assert_parity(
        lambda h, w, b: case.hidden_form(laid(h), head_laid(w), head_laid(b), inputs, **options),
        lambda h, w, b: case.oracle(torch.nn.functional.linear(h, w, b), inputs),
        lambda _: ([torch.randn(shape).to(dtype) for shape in shapes], upstream(case, rows)),
    )


@check(2, whole=True, name=NAMES)
@check(4, name=FEWEST)
def tp_logits(name):
    """Every loss, from logits split along the vocabulary; in every dtype those that differ in their ops."""
    case, inputs, mesh = set_up(name, "tp")
    for dtype in DTYPES if name in FEW and mesh.size() == 2 else DTYPES[:1]:
        logits_parity(case, inputs, over(mesh, Shard(2)), dtype)


@check(2, name=NAMES)
@check(4, name=FEWEST)
def tp_hidden(name):
    """The vocabulary of the head is split, the hidden states are equal on every rank, in several chunks or one."""
    case, inputs, mesh = set_up(name, "tp")
    for dtype, chunk_size in CHUNKED if name in FEW and mesh.size() == 2 else CHUNKED[:1]:
        hidden_parity(case, inputs, as_it_is, over(mesh, Shard(0)), dtype, chunk_size=chunk_size)


@check(2)
def tp_float32_logits():
    """With 16-bit operands and a head split by vocabulary, results equal those of the operands cast to float32."""
    mesh, wide = mesh_of("tp"), {"logits_dtype": torch.float32, "chunk_size": 5}
    h, w, b, t = (torch.randn(s).bfloat16() for s in ((B, L, D), (V, D), (V,), (B, L, D)))
    y, weights = torch.randint(0, V, (B, L)), torch.rand(B, L)
    head, bias = shard(w, mesh, Shard(0)), shard(b, mesh, Shard(0))
    values = (
        (ops.weighted_linear_nll(h, head, y, weights, bias=bias, **wide).loss,
         ops.weighted_linear_nll(h.float(), w.float(), y, weights, bias=b.float()).loss),
        (ops.linear_row_stats(h, head, y, bias=bias, entropy=True, **wide).entropy,
         ops.linear_row_stats(h.float(), w.float(), y, bias=b.float(), entropy=True).entropy),
        (ops.linear_divergence(h, head, t, weights, bias=bias, **wide).loss,
         ops.linear_divergence(h.float(), w.float(), t.float(), weights, bias=b.float()).loss),
    )  # fmt: skip
    for got, expected in values:
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)
    seeds = torch.arange(B)
    sampled = ops.linear_sample(h, head, bias=bias, seeds=seeds, **wide)
    wide_sample = ops.linear_sample(h.float(), w.float(), bias=b.float(), seeds=seeds)
    assert torch.equal(sampled.ids, wide_sample.ids)
    torch.testing.assert_close(sampled.log_probs, wide_sample.log_probs, rtol=2e-6, atol=2e-6)
    mean = ops.soft_embedding(h, head, head, bias=bias, **wide)
    exact = ops.soft_embedding(h.double(), w.double(), w.double(), bias=b.double())
    torch.testing.assert_close(mean.double(), exact, rtol=2**-7, atol=2**-7)


@check(2, name=("MTP", "pipeline"))
def tp_mtp(name):
    """The main loss and two depths, from split logits and a split head; hidden states are split along the sequence."""
    mesh = mesh_of("tp")
    for form in ("logits", "hidden", "sequence"):
        job = Job(name, "logits" if form == "logits" else "hidden")
        loss, grads = job.expected(Model(), 1)
        model = Model()

        def run(ids, function, model=model, form=form):
            hidden, head = model(ids), [shard(p, mesh, Shard(0)) for p in (model.lm_head.weight, model.lm_head.bias)]
            if form == "logits":
                return function(shard(model.lm_head(hidden), mesh, Shard(2)))
            return function(shard(hidden, mesh, Shard(1)) if form == "sequence" else hidden, *head)

        value = job.loss(run)
        value.backward()
        close(value.detach(), loss)
        same_gradients(model, grads)


@check(2, name=("row_stats", "dflash"))
def tp_kernels(name):
    """The Triton kernels give equal results; special values and transforms run through them in the checks below."""
    case, mesh = BY_NAME[name], mesh_of("tp")
    inputs, options = drawn(case, rows=2), {"dtype": torch.float32, "rows": 2, "backend": "triton"}
    logits_parity(case, inputs, over(mesh, Shard(2)), **options)
    hidden_parity(case, inputs, as_it_is, over(mesh, Shard(0)), **options)


@check(2)
def a_skipped_column_is_one_of_the_whole_row():
    """The column is on each rank in turn, and is the largest logit, a tie, or the target."""
    mesh = mesh_of("tp")
    for skip_id in (0, V // 2, V - 1):
        x, y = torch.randn(5, V, dtype=torch.float64), (torch.arange(5) + 5) % V
        x[:, skip_id] = 20.0
        x[1, y[1]] = 9.0
        y[2] = skip_id
        for backend in ("torch", "triton") if skip_id == V // 2 else ("torch",):
            flags = {"softcap": 6.0, "scale": 1.4, "skip_id": skip_id, "backend": backend, **EVERY_OUTPUT}
            out = ops.token_nll(shard(x, mesh, Shard(1)), y, **flags)
            assert torch.equal(out.nll.isnan(), y == skip_id)
            assert out.correct[1]
            split, g = shard(x, mesh, Shard(1)), torch.randn(5).double()
            _same(lambda t, f=flags, y=y: ops.token_nll(t, y, **f), x, split, g)


@check(2, name=FEW)
def tp_frozen_head(name):
    """Only the hidden states have a gradient. No collective has a dimension of the vocabulary or of a shard of it."""
    case, inputs, mesh = set_up(name, "tp")
    h, w = torch.randn(B, L * case.width, D).double(), torch.randn(V, D).double()
    g = upstream(case).double()
    expected_h = h.clone().requires_grad_()
    case.hidden_form(expected_h, w, None, inputs, backend="torch").backward(g)
    ours_h, head = h.clone().requires_grad_(), distribute_tensor(w, mesh, [Shard(0)])
    with Sent() as sent:
        case.hidden_form(ours_h, head, None, inputs, backend="torch").backward(g)
    close(ours_h.grad, expected_h.grad)
    assert head.grad is None
    assert not any(n in (V, 10, 9) for shape in sent.shapes for n in shape)


@check(2, name=FEW)
def sequence_parallel_hidden(name):
    """Hidden states are split over the ranks that split the vocabulary, also unevenly, or equal on all of them.

    Replicated ones on the head's mesh mean tensor parallelism for any dimension name.
    """
    case = BY_NAME[name]
    inputs = drawn(case)
    for placement in (Shard(0), Shard(1), Replicate()):
        mesh = mesh_of("some_name" if placement == Replicate() else "tp")
        with Sent() as sent:
            hidden_parity(case, inputs, over(mesh, placement), over(mesh, Shard(0)))
        assert sent.calls


@check(2, name=NAMES)
def split_rows_of_logits(name):
    """Logits are split along the batch or the sequence. Every rank has the loss of the whole tensor."""
    case, inputs, mesh = set_up(name, "tp")
    for dim in (0, 1):
        logits_parity(case, inputs, over(mesh, Shard(dim)))


@check(2, name=FEW)
def split_rows_of_hidden(name):
    """Every rank has the whole head.

    Hidden states are split along the sequence or their features, or not (tensor parallel without a split).

    The gradient of the head is summed over ranks that have different rows, and not if all ranks have equal rows.
    """
    case, inputs, mesh = set_up(name, "tp")
    for rows in (Shard(1), Shard(2), Replicate()):
        hidden_parity(case, inputs, over(mesh, rows), over(mesh, Replicate()))


@check(4, name=NAMES)
def rows_and_vocabulary_of_logits(name):
    """On a 2-D mesh, the batch is split over one dimension, and the vocabulary over the other."""
    case, inputs, mesh = set_up(name, "dp", "tp")
    for placements in ((Shard(0), Shard(2)), (Replicate(), Shard(2)), (Shard(1), Replicate())):
        logits_parity(case, inputs, over(mesh, *placements))


@check(4, name=FEWEST)
def rows_of_hidden_and_vocabulary(name):
    """On a 2-D mesh, hidden states are split over one dimension, and the head by vocabulary over the other alone."""
    case, inputs, mesh = set_up(name, "dp", "tp")
    rows = over(mesh, Shard(0), Replicate())
    hidden_parity(case, inputs, rows, functools.partial(summed_over_rows, mesh))
    # On the whole mesh, like the hidden states: FSDP2 is not involved, and the gradients are summed.
    hidden_parity(case, inputs, rows, over(mesh, Replicate(), Shard(0)))


@check(2)
def gradient_keeps_the_placement():
    mesh = mesh_of("tp")
    for placement in (Shard(2), Shard(1), Replicate()):
        logits = distribute_tensor(torch.randn(B, L, V), mesh, [placement]).requires_grad_()
        ops.token_nll(logits, torch.randint(0, V, (B, L))).nll.sum().backward()
        assert logits.grad.placements == (placement,)
        assert logits.grad.shape == (B, L, V)
        assert logits.grad.to_local().shape == logits.to_local().shape


SPECIAL = {
    "ties": lambda x: x.round().clamp(-1, 1),
    "-inf in one shard": lambda x: torch.cat([torch.full_like(x[..., :10], -math.inf), x[..., 10:]], -1),
    "-inf everywhere in a row": lambda x: x.index_fill(0, torch.tensor([1]), -math.inf),
    "NaN": lambda x: x.index_fill(1, torch.tensor([12]), math.nan),
    "inf": lambda x: x.index_fill(1, torch.tensor([3]), math.inf),
    "large": lambda x: 1e4 * x,
    "targets at the edges": lambda x: x,
}
OF_MERGES = ("ties", "-inf in one shard", "targets at the edges")  # kinds whose shards differ; the kernels run on them
# The rows for the kernels, because under Triton's interpreter a row takes as long as a call does elsewhere. Special ids
# are in the first four, special values in row 1 or in all; targets at the edges of the shards are in these rows.
OF_KERNELS = [0, 1, 2, 3, 9, 10, 18]


@check(2, kind=SPECIAL)
@check(4, kind=("-inf in one shard", "targets at the edges"))
def special_values(kind):
    """NLL, logsumexp, argmax match and gradient of special values, from logits and from hidden states."""
    mesh, N = mesh_of("tp"), 24
    with_kernels = OF_MERGES if mesh.size() == 2 else ()
    x = SPECIAL[kind](torch.randn(N, V)).double()
    y = torch.randint(0, V, (N,))
    y[:4] = torch.tensor([-100, V, -7, 1 << 40])
    if kind == "targets at the edges":
        y = torch.arange(N) % V
    active, g = torch.rand(N) < 0.8, torch.randn(N).double() * (torch.rand(N) < 0.8)
    for ignore_index in (-100, 0, 9, 10):
        for backend in ("torch", "triton") if ignore_index == 10 and kind in with_kernels else ("torch",):
            rows = slice(None) if backend == "torch" else OF_KERNELS
            flags = {"active": active[rows], "ignore_index": ignore_index, "backend": backend, **EVERY_OUTPUT}
            split = shard(x[rows], mesh, Shard(1))
            _same(lambda t, f=flags, y=y[rows]: ops.token_nll(t, y, **f), x[rows], split, g[rows])
    eye = torch.eye(V).double()  # logits = hidden: 0 * inf is NaN, so finite ones only
    if kind in ("ties", "large", "targets at the edges"):
        for ignore_index in (-100, 10):
            flags = {"active": active, "ignore_index": ignore_index, **EVERY_OUTPUT}
            expected = ops.linear_token_nll(x, eye, y, **flags)
            got = ops.linear_token_nll(x, shard(eye, mesh, Shard(0)), y, **flags)
            all_close(got, expected)


@check(2, kind=SPECIAL)
@check(4, kind=("-inf in one shard", "targets at the edges"))
def special_row_statistics(kind):
    """Every statistic and their joint gradient, with ids of all kinds and a skipped column."""
    mesh, N = mesh_of("tp"), 24
    with_kernels = OF_MERGES if mesh.size() == 2 else ()
    x = SPECIAL[kind](torch.randn(N, V)).double()
    ids = torch.randint(0, V, (N, 3))
    ids[:4, 1] = torch.tensor([-100, V, -7, 1 << 40])
    if kind == "targets at the edges":
        ids = torch.stack([torch.arange(N) % V] * 2, 1)
    active, mix = torch.rand(N) < 0.8, (torch.rand(N).double() * (torch.rand(N) < 0.7), torch.rand(N).double() + 0.1)
    transforms = {}, {"skip_id": 9}, {"softcap": 3.0, "scale": 0.6, "skip_id": V - 1}
    of_kernels = transforms[1 if kind == "-inf in one shard" else 2]  # which keeps infinities
    for transform in transforms:
        for backend in ("torch", "triton") if transform is of_kernels and kind in with_kernels else ("torch",):
            rows = slice(None) if backend == "torch" else OF_KERNELS
            flags = {"active": active[rows], "mix": [t[rows] for t in mix], **EVERY_FLAG, **transform}
            leaves = [t.detach().clone().requires_grad_() for t in (x[rows], shard(x[rows], mesh, Shard(1)))]
            expected = ops.row_stats(leaves[0], ids[rows], **flags)
            got = ops.row_stats(leaves[1], ids[rows], backend=backend, **flags)
            grads = [torch.randn_like(t) * (torch.rand(t.shape) < 0.8) for t in differentiable(expected)]
            all_close(got, expected, plain=True)
            for out in (expected, got):
                torch.autograd.backward(differentiable(out), grads)
            close(leaves[1].grad, leaves[0].grad)


@check(2)
def row_statistics_in_few_bytes():
    """Each pass over the logits has one collective: maximum, sum, entropy, ids. A mixture adds one for its two sums."""
    mesh, K = mesh_of("tp"), 2
    logits = distribute_tensor(torch.randn(B, L, V), mesh, [Shard(2)]).requires_grad_()
    ids, ones = torch.randint(0, V, (B, L, K)), torch.ones(B, L)
    first, second = ("all_gather", (B * L, 3 + K), 4 * B * L * (3 + K)), ("all_reduce", (2, B * L), 8 * B * L)
    for mix, calls in ((None, [first]), ((ones, ones), [first, second])):
        with Sent() as sent:
            out = ops.row_stats(logits, ids, entropy=True, mix=mix)
            sum(t.sum() for t in differentiable(out)).backward()
        assert sent.calls == calls


@check(2)
def row_statistics_of_split_rows_in_the_global_shape():
    """Logits are split along the sequence, ids have a K dimension or not.

    Results equal one process, with one small sum.
    """
    mesh, x = mesh_of("cp"), torch.randn(B, L, V).double()
    for ids in (torch.randint(0, V, (B, L)), torch.randint(0, V, (B, L, 3))):
        expected = ops.row_stats(x, ids, **EVERY_FLAG)
        logits = distribute_tensor(x, mesh, [Shard(1)])
        with Sent() as sent:
            got = ops.row_stats(logits, ids, **EVERY_FLAG)
        assert [call[0] for call in sent.calls] == ["all_reduce"]
        all_close(got, expected)


@check(2)
def token_log_probs_with_a_split_head():
    """From split logits and from a split head, at a temperature."""
    mesh, h, w = mesh_of("tp"), torch.randn(B, L, D).double(), torch.randn(V, D).double()
    y = torch.randint(0, V, (B, L)).index_fill(0, torch.tensor([0]), -100)
    expected = ops.token_log_probs(h @ w.T, y, temperature=0.7, with_entropy=True)
    from_logits = ops.token_log_probs(shard(h @ w.T, mesh, Shard(2)), y, temperature=0.7, with_entropy=True)
    from_head = ops.token_log_probs(h, y, weight=shard(w, mesh, Shard(0)), temperature=0.7, with_entropy=True)
    for got in (from_logits, from_head):
        all_close(got, expected)


@check(2)
def policy_loss_with_a_sharded_head():
    """Loss, metrics and gradients with a split vocabulary, and with a head sharded as by FSDP2 and split sequences."""
    for case in POLICIES:
        inputs = drawn(case)
        h, w = torch.randn(B, L * case.width, D).double(), torch.randn(V, D).double()
        results = []
        for name in (None, "tp", "cp"):
            mesh = None if name is None else mesh_of(name)
            head = w.clone() if mesh is None else distribute_tensor(w, mesh, [Shard(0)])
            leaf = h.clone().requires_grad_()
            given = case.arguments("hidden", leaf, inputs, (head.requires_grad_(),))
            if name == "cp":
                given["hidden"] = shard(given["hidden"], mesh, Shard(2))
            objective = ours.PolicyObjective(kl="k2", kl_coef=0.1)
            settings = {"level": case.settings.get("level", "token"), "normalize": case.settings["normalize"]}
            out = ours.PolicyLoss(objective, **settings).forward_fused(**given, with_entropy=True, chunk_size=5)
            out.loss.backward()
            assert name is None or head.grad.placements == (Shard(0),)
            results.append((*out, leaf.grad, (mesh.size() if name == "cp" else 1) * head.grad))
        for got, label in zip(results[1:], ("tp", "cp"), strict=True):
            for name, a, b in zip((*out._fields, "hidden", "head"), got, results[0], strict=True):
                close(a, b, f"{case.name}, {label}, {name}")


def _same(function, whole, sharded, g):
    whole, sharded = whole.clone().requires_grad_(), sharded.detach().clone().requires_grad_()
    expected, got = function(whole), function(sharded)
    all_close(got, expected, plain=True)
    expected.nll.backward(g)
    got.nll.backward(g)
    close(sharded.grad, whole.grad)


@check(4)
def fewer_columns_than_ranks():
    """V = 3 on four ranks, and V = 5 as 2, 2, 1, 0: the last rank holds nothing; one row is included."""
    mesh = mesh_of("tp")
    for columns in (1, 3, 5):
        for shape in ((7,), (2, 3), (2, 2, 2), ()):
            x, y = torch.randn(*shape, columns).double(), torch.randint(0, columns, shape)
            for backend in ("torch", "triton") if columns == 5 and not shape else ("torch",):
                flags = {"backend": backend, **EVERY_OUTPUT}
                split, g = shard(x, mesh, Shard(len(shape))), torch.randn(shape).double()
                _same(lambda t, f=flags, y=y: ops.token_nll(t, y, **f), x, split, g)
            h, w = torch.randn(*shape, D).double(), torch.randn(columns, D).double()
            grads = []
            for head in (w, shard(w, mesh, Shard(0)).detach()):
                leaf, head = h.clone().requires_grad_(), head.clone().requires_grad_()
                ops.weighted_linear_nll(leaf, head, y, torch.ones(shape)).loss.backward()
                grads.append((leaf.grad, head.grad))
            all_close(grads[1], grads[0])
    x = torch.randn(0, V)
    assert ops.token_nll(shard(x, mesh, Shard(1)), torch.zeros(0, dtype=torch.long)).nll.shape == (0,)


@check(4, name=FEWEST)
def a_rank_without_columns(name):
    """V = 5 as 2, 2, 1, 0, with every parameter trained: the last rank holds no column of logits, head or bias."""
    case, mesh, columns = BY_NAME[name], mesh_of("tp"), 5
    torch.manual_seed(0)
    inputs = case.draw(B, L, columns)
    for dtype, chunk_size in CHUNKED[1:3]:  # in a wide dtype and a narrow one
        logits_parity(case, inputs, over(mesh, Shard(2)), dtype, columns)
        hidden_parity(case, inputs, as_it_is, over(mesh, Shard(0)), dtype, columns, chunk_size=chunk_size)


@check(4, loss=("weighted_linear_nll", "linear_token_nll"))
def a_rank_without_columns_gets_an_empty_gradient(loss):
    """Leaves are DTensors, the weight is frozen or not, the bias trains; both backends."""
    mesh, columns = mesh_of("tp"), 3
    h, w, b = torch.randn(1, 4, D), torch.randn(columns, D), torch.randn(columns)
    y, weights = torch.arange(4).view(1, 4) % columns, torch.ones(1, 4)

    def gradients(hidden, weight, bias, backend, trained):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained), bias.clone().requires_grad_()
        rows = {"weighted_linear_nll": (y, weights), "linear_token_nll": (y,)}[loss]
        getattr(ops, loss)(*leaves[:2], *rows, bias=leaves[2], backend=backend)[0].sum().backward()
        return [leaf.grad for leaf in leaves]

    split = shard(w, mesh, Shard(0)).detach(), shard(b, mesh, Shard(0)).detach()
    for backend, trained in itertools.product(("torch", "triton"), (True, False)):
        expected = gradients(h, w, b, "torch", trained)
        got = gradients(h, *split, backend, trained)
        assert (got[1] is not None) == trained
        assert got[2].to_local().numel() == (mesh.get_local_rank() < columns)
        all_close(got, expected)


@check(4, op=("token_nll", "weighted_nll", "row_stats", "divergence", "linear_row_stats", "linear_divergence"))
def a_rank_without_columns_launches_nothing(op):
    """V = 3 on four ranks with the Triton backend, whose kernels cannot be launched on rows without columns."""
    mesh, columns = mesh_of("tp"), 3
    torch.manual_seed(0)
    x, h, w = torch.randn(1, 4, columns), torch.randn(1, 4, D), torch.randn(columns, D)
    y, weights, mix = torch.arange(4).view(1, 4) % columns, torch.rand(1, 4), (torch.rand(1, 4), torch.rand(1, 4))
    teacher = x.roll(1, 1)  # distributed afterwards, because a DTensor has no roll in torch 2.11
    calls = {
        "token_nll": lambda x, **o: ops.token_nll(x, y, with_ids=True, **o),
        "weighted_nll": lambda x, **o: ops.weighted_nll(x, y, weights, **o),
        "row_stats": lambda x, **o: ops.row_stats(x, y, **EVERY_FLAG, mix=mix, **o),
        "divergence": lambda x, **o: ops.divergence(x, like(x, teacher), weights, kind="l1", **o),
        "linear_row_stats": lambda w, **o: ops.linear_row_stats(h, w, y, **FLAGS, mix=mix, **o),
        "linear_divergence": lambda w, **o: ops.linear_divergence(h, w, h.roll(1, 1), weights, **o),
    }
    leaf, dim = (w, 0) if op.startswith("linear") else (x, 2)

    def like(x, t):
        return shard(t, mesh, Shard(dim)) if isinstance(x, DTensor) else t

    results = []
    for backend, t in (("torch", leaf.clone()), ("triton", shard(leaf, mesh, Shard(dim)).detach())):
        t.requires_grad_()
        found = [out for out in calls[op](t, backend=backend) if out is not None]
        sum(out.sum() for out in found if out.requires_grad).backward()
        results.append([*found, t.grad])
    all_close(results[1], results[0])


@check(2)
def gradient_over_the_logits():
    mesh = mesh_of("tp")
    x, y, g = torch.randn(B, L, V).double(), torch.randint(0, V, (B, L)), torch.randn(B, L).double()
    expected = x.clone().requires_grad_()
    ops.token_nll(expected, y).nll.backward(g)
    logits = shard(x, mesh, Shard(2)).detach().clone().requires_grad_()
    before = logits.to_local().data_ptr()
    ops.token_nll(logits * 1, y, inplace_backward=True).nll.backward(g)
    close(logits.grad, expected.grad)
    assert logits.to_local().data_ptr() == before


@check(2)
def bytes_from_logits():
    """Forward has one collective of 16 bytes per row (32 in float64), backward has none."""
    mesh = mesh_of("tp")
    for dtype, row_bytes in ((torch.bfloat16, 16), (torch.float32, 16), (torch.float64, 32)):
        logits = distribute_tensor(torch.randn(B, L, V).to(dtype), mesh, [Shard(2)]).requires_grad_()
        with Sent() as sent:
            out = ops.weighted_nll(logits, torch.randint(0, V, (B, L)), torch.rand(B, L), **EVERY_OUTPUT)
            out.loss.backward()
        assert len(sent.calls) == 1, sent.calls
        assert sent.nbytes == row_bytes * B * L <= 32 * B * L


@check(2)
def bytes_from_hidden():
    """A call in one chunk sends the statistics in one collective, and hidden's gradient, but not the head's."""
    mesh = mesh_of("tp")
    for chunk_size, collectives in ((None, 1), (7, 4)):
        hidden = torch.randn(B, L, D, requires_grad=True)
        head = distribute_tensor(torch.randn(V, D), mesh, [Shard(0)]).requires_grad_()
        with Sent() as sent:
            ops.weighted_linear_nll(
                hidden, head, torch.randint(0, V, (B, L)), torch.rand(B, L) + 0.1, chunk_size=chunk_size
            ).loss.backward()
        statistics = [call for call in sent.calls if call[0] == "all_gather"]
        assert len(statistics) == collectives
        assert sum(n for *_, n in statistics) == 12 * B * L  # 16 with the argmax match
        rest = [call for call in sent.calls if call not in statistics]
        assert rest == [("all_reduce", (B, L, D), hidden.nbytes)], rest
        assert head.grad.placements == (Shard(0),)


@check(2)
def only_active_rows_are_sent():
    """Rows of weight 0 are neither projected nor sent."""
    mesh = mesh_of("tp")
    head = distribute_tensor(torch.randn(V, D), mesh, [Shard(0)])
    weights = (torch.arange(B * L) < 7).view(B, L)
    with Sent() as sent:
        ops.weighted_linear_nll(torch.randn(B, L, D), head, torch.randint(0, V, (B, L)), weights)
    assert sent.calls == [("all_gather", (7, 3), 7 * 12)], sent.calls


@check(2)
def every_rank_cuts_the_same_chunks():
    """Ranks hold 10 and 9 columns, but must take part in the same collectives."""
    mesh = mesh_of("tp")
    hidden, y, w = torch.randn(B, L, D), torch.randint(0, V, (B, L)), torch.randn(V, D)
    expected = ops.weighted_linear_nll(hidden, w, y, torch.ones(B, L)).loss
    for chunk_size in (1, 8, None):
        head = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
        with Sent() as sent:
            got = ops.weighted_linear_nll(hidden, head, y, torch.ones(B, L), chunk_size=chunk_size).loss
        close(got, expected.detach())
        assert len(sent.calls) == {1: 24, 8: 3, None: 1}[chunk_size], sent.calls
    got = ops.weighted_linear_nll(hidden, head, y, torch.arange(B * L).view(B, L) < 5, num_active=6).loss
    close(got, ops.weighted_linear_nll(hidden, w, y, torch.arange(B * L).view(B, L) < 5).loss)


@check(2)
def a_short_bound_with_a_split_head():
    """All results and gradients of every rank are NaN, also in the columns of a skipped id."""
    mesh = mesh_of("tp")
    w, y = torch.randn(V, D), torch.randint(1, V, (B, L))
    for op in (ops.weighted_linear_nll, ops.linear_token_nll, ops.linear_row_stats):
        head = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
        hidden = torch.randn(B, L, D, requires_grad=True)
        weights = (torch.ones(B, L),) if op is ops.weighted_linear_nll else ()
        out = op(hidden, head, y, *weights, num_active=B * L - 1, chunk_size=5, skip_id=0)
        assert all(t.isnan().all() for t in out if t is not None)
        out[0].sum().backward()
        assert hidden.grad.isnan().all()
        assert head.grad.to_local().isnan().all()
    sampled = ops.linear_sample(hidden, head, seeds=torch.arange(B), num_active=B * L - 1)
    assert sampled.log_probs.isnan().all()
    assert ((sampled.ids >= 0) & (sampled.ids < V)).all()


@check(2)
def autocast_with_a_split_head():
    """Products have the dtype of autocast, or that of the record of the logits."""
    mesh = mesh_of("tp")
    hidden, y, w = torch.randn(B, L, D), torch.randint(0, V, (B, L)), torch.randn(V, D)
    for outside, dtype in ((True, None), (False, torch.bfloat16), (False, torch.float32)):
        grads = []
        for head in (w, distribute_tensor(w, mesh, [Shard(0)])):
            h, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=outside):
                loss = ops.weighted_nll(ops.LinearLogits(h, head, compute_dtype=dtype), y, torch.ones(B, L)).loss
            loss.backward()
            assert h.grad.dtype == head.grad.dtype == torch.float32
            grads.append((loss.detach(), head.grad))
        rounded = dtype or torch.bfloat16
        close(grads[1][0], grads[0][0])
        close(grads[1][1].full_tensor().to(rounded), grads[0][1].to(rounded))
    narrow, head = hidden.bfloat16(), distribute_tensor(w, mesh, [Shard(0)])
    raises(ValueError, "dtype of hidden", ops.weighted_linear_nll, narrow, head, y, torch.ones(B, L))


@check(2, name=BY_NAME)
def targets_and_masks_as_dtensors(name):
    case, inputs, mesh = set_up(name, "tp")
    x = torch.randn(B, L * case.width, V).double()
    expected = case.logits_form(x, inputs, backend="torch")
    for placement in (Replicate(), Shard(0)):
        spread = {k: distribute_tensor(t, mesh, [placement if t.dim() else Replicate()]) for k, t in inputs.items()}
        close(case.logits_form(shard(x, mesh, Shard(2)), spread, backend="torch"), expected)
        close(case.logits_form(x, spread, backend="torch"), expected)


@check(2)
def dflash_accuracy():
    """Counts that need the argmax over a split vocabulary."""
    _, inputs, mesh = set_up("dflash", "tp")
    loss, x = ours.DFlashDecayLoss(), torch.randn(B, L, V).round()
    w = torch.randn(V, D).round()
    for placement in (Shard(2), Shard(1), Replicate()):
        expected = loss(x, **inputs, block_size=4)
        got = loss(shard(x, mesh, placement), **inputs, block_size=4)
        all_close(got, expected)
    h = torch.randn(B, L, D).round()
    expected = loss.forward_fused(h, w, **inputs, block_size=4)
    all_close(loss.forward_fused(h, shard(w, mesh, Shard(0)), **inputs, block_size=4), expected)


@check(2)
def mtp_with_a_split_head():
    """Two depths with packing, each with its own loss; ``tp_mtp`` has their sum, and split logits."""
    mesh = mesh_of("tp")
    labels, seq_idx = torch.randint(0, V, (B, L)), (torch.arange(L) // 4).expand(B, L)
    h, w = [torch.randn(B, L, D).double() for _ in range(2)], torch.randn(V, D).double()
    values = []
    for head in (w, shard(w, mesh, Shard(0)).detach()):
        leaves, head = [t.clone().requires_grad_() for t in h], head.clone().requires_grad_()
        out = ours.calculate_mtp_loss(
            ours.FusedLinearCrossEntropy(), mtp_per_depth_h=leaves, labels=labels, model=torch.nn.Module(),
            lm_weight=head, seq_idx=seq_idx, num_label_tokens=9, return_per_depth=True,
        )  # fmt: skip
        out.loss.backward()
        values.append((out.loss.detach(), *(t.grad for t in leaves), head.grad))
    all_close(values[1], values[0])


@check(2)
def layouts_that_cannot_be_served():
    mesh, y = mesh_of("tp"), torch.zeros(B, L, dtype=torch.long)
    partial = DTensor.from_local(torch.zeros(B, L, V), mesh, [Partial()], run_check=False)
    raises(ValueError, "redistribute", ops.token_nll, partial, y)
    uneven, whole = torch.zeros(B, L, 3 + 4 * mesh.get_local_rank()), {"shape": (B, L, 10), "stride": (L * 10, 10, 1)}
    odd = DTensor.from_local(uneven, mesh, [Shard(2)], run_check=False, **whole)
    raises(ValueError, "torch.chunk", ops.token_nll, odd, y)
    hidden, w, bias = torch.zeros(B, L, D), torch.zeros(V, D), torch.zeros(V)
    columns, rows, whole = (distribute_tensor(w, mesh, [p]) for p in (Shard(1), Shard(0), Replicate()))
    raises(ValueError, "Shard(0)", ops.linear_token_nll, hidden, columns, y)
    for weight, its_bias, message in (
        (rows, bias, "bias must be laid out like its weight"),
        (rows, distribute_tensor(bias, mesh, [Replicate()]), "bias must be laid out like its weight"),
        (whole, bias, "got a plain tensor; redistribute it"),
        (w, distribute_tensor(bias, mesh, [Shard(0)]), "bias must be laid out like its weight"),
    ):
        raises(ValueError, message, ops.linear_token_nll, hidden, weight, y, bias=its_bias)
    uneven, its_shape = torch.zeros(B, 1 + 4 * mesh.get_local_rank(), D), {"shape": (B, L, D), "stride": (L * D, D, 1)}
    odd = DTensor.from_local(uneven, mesh, [Shard(1)], run_check=False, **its_shape)
    raises(ValueError, "hidden states must be split as torch.chunk", ops.linear_token_nll, odd, whole, y)
    partial_head = DTensor.from_local(w, mesh, [Partial()], run_check=False)
    raises(ValueError, "redistribute", ops.linear_token_nll, hidden, partial_head, y)
    record = ops.LinearLogits(hidden, rows)
    raises(ValueError, "only plain tensors or only DTensors", ops.divergence, record, torch.zeros(B, L, V))
    logits = distribute_tensor(torch.zeros(B, L, V), mesh, [Shard(2)])
    raises(ValueError, "targets must have shape", ops.token_nll, logits, y[:1])
    raises(IndexError, "(0, 0)", ops.token_nll, logits, y + V, check_targets=True)


@check(2)
def a_mesh_dimension_of_one_rank():
    """It splits nothing, so that its place among the mesh dimensions does not matter."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "fsdp"))
    hidden, w, y = torch.randn(B, L, D), torch.randn(V, D), torch.randint(0, V, (B, L))
    head = distribute_tensor(w, mesh, [Shard(0), Shard(0)])
    close(ops.linear_token_nll(hidden, head, y).nll, ops.linear_token_nll(hidden, w, y).nll)


@check(4)
def layouts_that_cannot_be_served_in_two_dimensions():
    mesh, y = mesh_of("dp", "tp"), torch.zeros(B, L, dtype=torch.long)
    twice = distribute_tensor(torch.zeros(B, L, V), mesh, [Shard(2), Shard(2)])
    raises(ValueError, "one mesh dimension", ops.token_nll, twice, y)
    for d in (0, 1, 2):
        places, local = [Replicate(), _StridedShard(d, split_factor=2)], torch.zeros(B, L, 8).chunk(2, d)[0]
        strided = DTensor.from_local(local, mesh, places, run_check=False, shape=(B, L, 8), stride=(8 * L, 8, 1))
        raises(ValueError, "logits must be split by Shard placements", ops.token_nll, strided, y)
    places = [Replicate(), _StridedShard(0, split_factor=2)]
    strided = DTensor.from_local(torch.zeros(4, D), mesh, places, run_check=False, shape=(8, D), stride=(D, 1))
    raises(ValueError, "weight must be split by Shard", ops.linear_token_nll, torch.zeros(B, L, D), strided, y)
    head = distribute_tensor(torch.zeros(V, D), mesh, [Shard(0), Shard(0)])
    raises(ValueError, "tensor parallelism first", ops.linear_token_nll, torch.zeros(B, L, D), head, y)
    flat, h, w = mesh_of("tp"), torch.zeros(B, L, D), torch.zeros(V, D)
    for hidden_layout, head_layout in (
        ((mesh, [Shard(0), Shard(1)]), (flat, [Replicate()])),
        ((flat, [Shard(0)]), (mesh, [Replicate(), Replicate()])),
    ):
        hidden, head = distribute_tensor(h, *hidden_layout), distribute_tensor(w, *head_layout)
        raises(ValueError, "the mesh that splits the rows", ops.linear_token_nll, hidden, head, y)


@check(2, form=("logits", "hidden states"))
def inside_a_compiled_step(form):
    """The call runs outside of the graph. With ``fullgraph=True``, the error gives the reason."""
    mesh, y = mesh_of("tp"), torch.randint(0, V, (B, L))
    x, h, w = torch.randn(B, L, V).double(), torch.randn(B, L, D).double(), torch.randn(V, D).double()

    def from_logits(t):
        return ops.weighted_nll(t.tanh(), y, torch.ones(B, L)).loss.square()

    def from_hidden(t, head):
        return ops.weighted_linear_nll(t.tanh(), head, y, torch.ones(B, L)).loss.square()

    step, whole, sharded = {
        "logits": (from_logits, (x,), (shard(x, mesh, Shard(2)),)),
        "hidden states": (from_hidden, (h, w), (h, shard(w, mesh, Shard(0)))),
    }[form]
    results = []
    for function, given in ((step, whole), (torch.compile(step, backend="aot_eager"), sharded)):
        leaves = [t.detach().clone().requires_grad_() for t in given]
        value = function(*leaves)
        value.backward()
        results.append((value.detach(), *(leaf.grad for leaf in leaves)))
    all_close(results[1], results[0])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="losses on DTensors run outside the graph"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(*sharded)
