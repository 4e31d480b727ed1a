"""Every op has a case in ``tests/support/op_cases.py``, which describes its results; and what holds for every case."""

import inspect
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from dllm_kernels import ops
from tests.conftest import DEVICE
from tests.support.inputs import KINDS, Source
from tests.support.memory import without_garbage_collection
from tests.support.op_cases import (
    DIFFERENTIABLE,
    FIRST_OPS,
    OF_EVERY_KIND,
    OP_BY_NAME,
    OP_CASES,
    Rows,
    name_of,
    results,
)

# With the ops that take no logits.
ALL = [*OF_EVERY_KIND, *((None, case) for case in OP_CASES if not case.kinds)]
of_every_kind = pytest.mark.parametrize(("kind", "case"), ALL, ids=name_of)


def drawn(kind, *, active=True):
    """Return leaves, which are NaN if no row is active, and rows."""
    r = Rows.drawn(2, 3, V=11, device=DEVICE)
    leaves = Source(kind).leaves((2, 3), 11) if kind else [r.positive]
    if not active:
        leaves[0].fill_(torch.nan)
        r = Rows.of(r.ids, r.mask & False, r.positive)
    return [leaf.requires_grad_() for leaf in leaves], r


def called(kind, case, leaves, r, **options):
    x = Source(kind).argument(*leaves) if kind else None
    return case(x, r, **case.accepted(**options))


def test_every_op_has_a_case():
    functions = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    missing = functions - {name for case in FIRST_OPS for name in (case.name, case.older)}
    assert not missing, f"no OpCase in tests/support/op_cases.py has the name of {', '.join(sorted(missing))}"
    assert {case.op for case in OP_CASES} == {case.op for case in FIRST_OPS}


def test_every_case_of_an_op_of_logits_has_what_tests_compare_with():
    """Except for products of a teacher or an embedding. Without a gradient, the tests of the file judge the values."""
    cases = [case for case in FIRST_OPS if case.kinds]
    unset = {f"{f} of {case.name}" for case in cases for f in ("oracle", "products", "syncs") if not getattr(case, f)}
    unset -= {f"{field} of {name}" for field in ("oracle", "products") for name in ("divergence", "soft_embedding")}
    missing = sorted(unset - {"oracle of linear_sample"})
    assert not missing, f"add {missing} to tests/support/op_cases.py"


def test_every_file_of_an_op_has_tests_of_its_own():
    here = Path(__file__).parent
    files = Path(ops.__file__).parent.glob("[a-z]*.py")
    missing = [file.name for file in files if not (here / f"test_{file.name}").exists()]
    assert not missing, f"add tests/ops/test_<op>.py for {missing} of dllm_kernels/ops"


@of_every_kind
def test_the_results_that_a_case_names_are_differentiable(kind, case):
    leaves, r = drawn(kind)
    out = results(called(kind, case, leaves, r))
    assert {name for name, t in out.items() if t.requires_grad} == set(case.differentiable)
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            found = results(called(kind, case, leaves, r))
            assert not any(t.requires_grad for t in found.values())
            torch.testing.assert_close(found, out)


# Seeds have 64 bits.
TAKE_IDS = [(kind, case) for kind, case in ALL if "seeds" not in inspect.signature(case.op).parameters]


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize(("kind", "case"), TAKE_IDS, ids=name_of)
def test_ids_of_any_integer_dtype(kind, case, dtype, backend):
    leaves, r = drawn(kind)
    narrow = r._replace(ids=r.ids.to(dtype))
    found = (results(called(kind, case, leaves, rows, backend=backend)) for rows in (narrow, r))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["stored", "low rank"])
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=name_of)
def test_gradients_of_float16(case, kind, backend):
    """Shapes and dtypes of all that the custom ops return are compared with their specs, see ``check_specs``."""
    source, r = Source(kind, backend, chunk_size=4), Rows.drawn(2, 3, V=11, device=DEVICE)
    leaves = [leaf.requires_grad_() for leaf in source.leaves((2, 3), 11, torch.float16, size=1.0)]
    case.total(source.argument(*leaves), r, **case.accepted(backend=backend)).backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()
        assert leaf.grad.any()


@pytest.mark.parametrize("case", [case for case in OP_CASES if case.oracle], ids=name_of)
def test_the_oracle_of_a_case_has_its_results(case, backend):
    """From logits; further results from hidden states are equal, also if one pass computes gradients, too."""
    source, r = Source("low rank", backend, chunk_size=4), Rows.drawn(2, 3, V=11, device=DEVICE)
    leaves = [leaf.requires_grad_() for leaf in source.leaves((2, 3), 11, torch.float64)]
    logits = source.logits(*leaves)
    out = case(logits, r, backend=backend)
    torch.testing.assert_close(case.values(out), case.oracle(logits, r), check_dtype=False)
    torch.testing.assert_close(results(case(source.argument(*leaves), r, backend=backend)), results(out))


@pytest.mark.covering(1, most=2)
@of_every_kind
def test_inputs_are_not_modified(kind, case, backend):
    leaves, r = drawn(kind)
    tensors = [*leaves, *r]
    before, versions = [t.clone() for t in tensors], [t._version for t in tensors]
    out = called(kind, case, leaves, r, backend=backend)
    if case.differentiable:
        torch.autograd.grad([t.sum() for t in case.values(out)], leaves)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))
    assert [t._version for t in tensors] == versions


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize(("kind", "case"), OF_EVERY_KIND, ids=name_of)
def test_inputs_are_freed(kind, case, with_grad, backend):
    with without_garbage_collection():
        leaves, r = drawn(kind)
        seen, x = [weakref.ref(leaf) for leaf in leaves], Source(kind).argument(*leaves)
        out = case(x, r, backend=backend)
        if with_grad and case.differentiable:
            sum(t.sum() for t in case.values(out)).backward()
        del leaves, x, out
        assert [ref() for ref in seen] == [None] * len(seen)


COUNTED = [(kind, case) for kind, case in OF_EVERY_KIND if case.syncs and case.syncs[0]]  # that have a mask


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("bound", [None, 0])
@pytest.mark.parametrize(("kind", "case"), COUNTED, ids=name_of)
def test_no_active_row(kind, case, bound, backend):
    """No row is read. Every result and every gradient is 0, for any upstream gradient, and ids are -100."""
    leaves, r = drawn(kind, active=False)
    out = case(Source(kind, num_active=bound).argument(*leaves), r, backend=backend)
    for t in results(out).values():
        assert t.eq(-100 if t.dtype == torch.int64 else 0).all()
    if case.differentiable:
        values = case.values(out)
        grads = torch.autograd.grad(values, leaves, [torch.full_like(t, torch.inf) for t in values])
        assert all(grad.eq(0).all() for grad in grads)


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(("kind", "case"), COUNTED, ids=name_of)
def test_inactive_rows_are_not_read(kind, case, dtype, backend):
    """Logits or hidden states may be NaN and ids impossible. Results and gradients are 0, and ids are -100."""
    (leaves, r), found = drawn(kind), []
    idle = r.ids.flatten().argsort().view(2, 3) % 3 == 0
    r = Rows(r.ids, (~idle).to(dtype), r.positive * ~idle, r.positive)
    for spoilt in (False, True):
        if spoilt:
            r.ids[idle] = 10**9 // 5 * 5
            Source(kind).spoil(leaves, idle)
        out = called(kind, case, leaves, r, backend=backend)
        grads = torch.autograd.grad([t.sum() for t in case.values(out)], leaves) if case.differentiable else ()
        found.append((results(out), grads))
    torch.testing.assert_close(*found)
    for t in (*found[1][0].values(), *grads[:1]):
        assert t.dim() == 0 or t[idle].eq(-100 if t.dtype == torch.int64 else 0).all()


OF_IDS = [(kind, case) for kind, case in OF_EVERY_KIND if {"nll", "log_probs"} & set(case.differentiable)]


@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize(
    ("kind", "case"), [*OF_IDS, *((kind, OP_BY_NAME["divergence, rows"]) for kind in KINDS)], ids=name_of
)
def test_rows_with_an_upstream_gradient_of_0_are_inert(kind, case, path):
    """They may be active and NaN."""
    (leaves, r), found = drawn(kind), []
    idle, r = r.ids.flatten().argsort().view(2, 3) % 3 == 0, Rows.of(r.ids, r.ids >= 0, r.positive)
    for spoilt in (False, True):
        if spoilt:
            Source(kind).spoil(leaves, idle)
        values = case.values(case(Source(kind).argument(*leaves), r, backend=path))
        upstream = [torch.ones_like(t).index_put_((idle,), torch.zeros((), device=DEVICE)) for t in values]
        found.append(torch.autograd.grad(values, leaves, upstream))
    torch.testing.assert_close(*found)
    assert found[1][0][idle].eq(0).all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize(("kind", "case"), OF_IDS, ids=name_of)
def test_ids_out_of_range_make_what_depends_on_them_nan(kind, case, path):
    leaves, r = [leaf.requires_grad_() for leaf in Source(kind).leaves((2, 6), 37)], Rows.drawn(2, 6, V=37)
    r, name, found = Rows.of(r.ids, r.ids >= 0, r.positive).map(lambda t: t.to(DEVICE)), case.differentiable[0], []
    bad = torch.tensor([37, -1, -101, 2**31, -(2**31), 2**62], device=DEVICE)
    for ids in (r.ids, torch.stack([bad, r.ids[1]])):
        out = case(Source(kind).argument(*leaves), r._replace(ids=ids), backend=path)
        values = getattr(out, name).view(2, 6, -1)[..., 0]
        found.append((results(out), values, torch.autograd.grad(values.sum(), leaves)[0]))
    (expected, *of_ids), (got, *others) = found
    for a, b in zip(of_ids, others, strict=True):
        torch.testing.assert_close(b[1], a[1])
        assert b[0].isnan().all()
    assert not got.pop("correct", values > 0)[0].any()
    for key in got.keys() - {name, "mix"}:  # the coefficients of a mixture are drawn from the ids
        torch.testing.assert_close(got[key], expected[key])


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("bound", [None, 6])
@pytest.mark.parametrize(("kind", "case"), [k for k in OF_EVERY_KIND if k[1].differentiable], ids=name_of)
def test_results_can_be_written_to(kind, case, bound, backend):
    """Backward does not need them, as in plain PyTorch."""
    (leaves, r), grads = drawn(kind), []
    for written in (False, True):
        out = case(Source(kind, num_active=bound).argument(*leaves), r, backend=backend)
        values = case.values(out)
        doubled = written and len(values) == 1  # several are views, which torch does not let a graph write to
        totals = [(t.mul_(2) if doubled else t).sum() for t in values]
        with torch.no_grad():
            for t in results(out).values() if written else ():
                t.zero_()
        grads.append([grad / (1 + doubled) for grad in torch.autograd.grad(totals, leaves)])
    torch.testing.assert_close(*grads)


def apart(t):
    """Return a copy whose entries are apart in memory."""
    return torch.stack([t.detach()] * 2, -1)[..., 0]


def turned(t):
    """Return a copy whose rows of the first dimension lie between each other."""
    return t.detach().transpose(0, -2).contiguous().transpose(0, -2) if t.dim() > 1 else t.detach().clone()


@pytest.mark.parametrize(("kind", "case"), OF_EVERY_KIND, ids=name_of)
def test_any_leading_shape_and_strides(kind, case, backend):
    """All rows are active, so that nothing is copied. Upstream gradients have strides, too."""
    source = Source("low rank" if kind == "head" else kind, backend)

    def run(leaves, r, laid_out):
        leaves = [laid_out(leaf.detach()).requires_grad_() for leaf in leaves]
        out = case(source.argument(*leaves), r.map(laid_out), backend=backend)
        values = case.values(out)
        upstream = [laid_out(torch.linspace(0.5, 2, t.numel(), device=DEVICE).view(t.shape)) for t in values]
        return [*results(out).values(), *(torch.autograd.grad(values, leaves, upstream) if values else ())]

    for shape in ((2, 1, 3), ()):
        leaves, r = source.leaves(shape, 11), Rows.drawn(*shape, V=11, device=DEVICE)
        r = Rows.of(r.ids, r.ids >= 0, r.positive)
        flat = [leaf.reshape(-1, leaf.shape[-1]) if i in (0, 3) else leaf for i, leaf in enumerate(leaves)]
        expected = run(flat, r.map(lambda t: t.reshape(-1)), torch.clone)
        for laid_out in (apart, turned)[: 1 + len(shape)]:
            for got, want in zip(run(leaves, r, laid_out), expected, strict=True):
                torch.testing.assert_close(got, want.view(got.shape))


@pytest.mark.parametrize(("kind", "case"), OF_EVERY_KIND, ids=name_of)
def test_autocast(kind, case):
    """A head casts its operands as ``torch.nn.functional.linear`` does; stored logits are used as they are."""
    source, r = Source("low rank" if kind == "head" else kind), Rows.drawn(2, 3, V=11, device=DEVICE)
    narrow = source.leaves((2, 3), 11, torch.bfloat16)
    wide = [leaf.float() for leaf in narrow]
    expected = results(case(source.argument(*(wide if kind == "stored" else narrow)), r))
    with torch.autocast(DEVICE, torch.bfloat16):
        torch.testing.assert_close(results(case(source.argument(*wide), r)), expected, check_dtype=False)


# Of sums from a head, whose gradients are computed in the forward pass.
ADVICE = {
    "weighted_nll": "recompute the loss to run backward again, or use linear_token_nll",
    "row_objective": "linear_row_objective computes its gradients .* use linear_row_stats",
    "divergence": 'linear_divergence computes its gradients .* use reduction="none"',
    "topk_divergence": "computes its gradients in the forward pass",
}


@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind, case in OF_EVERY_KIND if case in DIFFERENTIABLE], ids=name_of
)
def test_backward_twice(kind, case, backend):
    leaves, r = drawn(kind)
    values = case.values(case(Source(kind).argument(*leaves), r, backend=backend))
    upstream = [torch.randn_like(t) for t in values]
    first = torch.autograd.grad(values, leaves, upstream, retain_graph=True)
    if kind == "head" and not values[0].dim():
        with pytest.raises(RuntimeError, match=ADVICE[case.name.partition(",")[0]]):
            torch.autograd.grad(values, leaves, upstream)
        return
    assert all(map(torch.equal, first, torch.autograd.grad(values, leaves, upstream)))


@pytest.mark.parametrize("freed", ["weight", "bias", "U"])
@pytest.mark.parametrize("case", [c for c in FIRST_OPS if c.differentiable == ("loss",)], ids=name_of)
def test_a_parameter_that_was_freed_before_backward(case, freed):
    """FSDP2 may free the gathered head. Its gradient, computed in the forward pass, would be lost."""
    source, r = Source("low rank"), Rows.drawn(2, 3, V=11, device=DEVICE)
    leaves = [leaf.requires_grad_() for leaf in source.leaves((2, 3), 11)]
    loss = case.total(source.argument(*leaves), r)
    leaves[("hidden", "weight", "bias", "u", "U").index(freed)].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was freed before its gradient arrived"):
        loss.backward()


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has another kind of group")
@pytest.mark.parametrize(("kind", "case"), OF_EVERY_KIND, ids=name_of)
def test_dtensors_of_one_rank(kind, case, mesh):
    """Logits or a head whose vocabulary is split over one rank give the results and gradients of plain tensors."""
    leaves, r = drawn(kind)
    placements = [Shard(2)] if kind == "stored" else [Replicate(), Shard(0), Shard(0)]
    found = []
    for split in (False, True):
        pairs = zip(leaves, placements, strict=True)
        tensors = [DTensor.from_local(t, mesh, [p]) for t, p in pairs] if split else leaves
        out = case(Source(kind).argument(*tensors), r)
        grads = torch.autograd.grad([t.sum() for t in case.values(out)], leaves) if case.differentiable else ()
        found.append((results(out), grads))
    torch.testing.assert_close(*found)
