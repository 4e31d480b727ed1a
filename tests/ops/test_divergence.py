"""Divergences to a teacher: compared with float64 autograd of the oracle, number of matrix products, and edge cases."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import reference
from benchmarks import measure
from dllm_kernels.ops import LinearLogits, divergence, linear_divergence
from tests.conftest import DEVICE
from tests.support.kinds import ALIASES, HALVES, NAMES, OF_BOTH
from tests.support.parity import assert_parity, small_blocks

V, D, R = 23, 6, 7
NAN, INF = math.nan, math.inf
SUM = {"ce": 0.1, "l1": 0.9}
MANY = {"rkl": 0.3, "jsd": 1.0, "nla": 0.2, "soft_ce": 0.1, "teacher_ce": 0.4, "kl": 0.5, "lk": 0.7}
ALL = {
    **{name: {"kind": name} for name in NAMES},
    **{f"{name}, halves": {"kind": name, **halves} for name, halves in HALVES.items()},
    "jsd of 0": {"kind": "jsd", "beta": 0.0},
    "jsd of 1": {"kind": "jsd", "beta": 1.0},
    "nla, high floor": {"kind": "nla", "floor": 0.5},
    "lk, mean": {"kind": "lk", "alpha": "mean", "eta": 2.0},
    "lk, soft_ce": {"kind": "lk", "base": "soft_ce", "kl_scale": 0.5},
    "lk, eta of 1e6": {"kind": "lk", "eta": 1e6},
    "lk, negative eta": {"kind": "lk", "eta": -1.5},
    "a difference": {"kind": {"kl": 1.0, "tv": -0.5}},
    "ce and l1": {"kind": SUM},
    "many": {"kind": MANY, "alpha": "mean"},
    "every kind": {"kind": {name: 0.1 + 0.05 * i for i, name in enumerate(NAMES) if name not in ALIASES}},
}
every_kind = pytest.mark.parametrize("name", ALL)
TRANSFORMS = {
    "": {},
    "transformed": {"softcap": 4.0, "scale": 0.7, "skip_id": 3, "temperature": 1.6},
    "the teacher otherwise": {"scale": 1.3, "skip_id": 2, "teacher_transform": {"softcap": 3.0, "skip_id": 2}},
    "the teacher plain": {"softcap": 5.0, "teacher_transform": {}},
}


def both_options(name, *rows):
    """Return (options of the op, options of the oracle); the oracle has no aliases."""
    ours = dict(ALL[name])
    if "ce" in (ours["kind"] if isinstance(ours["kind"], dict) else (ours["kind"],)):
        y = torch.randint(4, V, rows, device=DEVICE)
        y.view(-1)[1] = -100
        ours["targets"] = y
    kind = ours["kind"]
    return ours, ours | {"kind": ALIASES.get(kind, kind) if isinstance(kind, str) else kind}


def drawn(*rows):
    """Draw weights, including zeros, and rows of a teacher with R rows, in any order and with repetitions."""
    torch.manual_seed(0)
    weights = torch.rand(rows, device=DEVICE).masked_fill_(torch.rand(rows, device=DEVICE) < 0.3, 0)
    weights.view(-1)[0] = 0.5
    return weights, torch.randint(0, R, rows, device=DEVICE)


TEACHER = (V, V)  # the sums of its softmax and of the divergence


def logits_draw(dtype, reduction, rows=(2, 5)):
    def draw(seed):
        torch.manual_seed(seed + 100)
        up = torch.randn(rows if reduction == "none" else (), device=DEVICE)
        return [(2 * torch.randn(*rows, V, device=DEVICE)).to(dtype)], up

    return draw


def hidden_draw(dtype, reduction):
    def draw(seed):
        torch.manual_seed(seed + 100)
        leaves = [torch.randn(s, device=DEVICE).to(dtype) for s in ((2, 5, D), (V, D), (V,))]
        return leaves, torch.randn((2, 5) if reduction == "none" else (), device=DEVICE)

    return draw


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.everyday(13)
@every_kind
@pytest.mark.covering(1, most=1)  # from hidden states, each kind runs in torch, and tests/kernels has each in a kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("transform", "reduction"), list(zip(TRANSFORMS, ("sum", "none", "sum", "none"), strict=True)))
def test_parity_from_logits(name, dtype, transform, reduction, backend):
    weights, rows = drawn(2, 5)
    ours, oracle = both_options(name, 2, 5)
    same = {**TRANSFORMS[transform], "reduction": reduction, "teacher_rows": rows}
    teacher = (2 * torch.randn(R, V, device=DEVICE)).to(dtype)
    assert_parity(
        lambda z: divergence(z, teacher, weights, backend=backend, **ours, **same).loss,
        lambda z: reference.divergence(z, teacher.to(z), weights, **oracle, **same).loss,
        logits_draw(dtype, reduction),
        TEACHER,
    )


SETTINGS = {  # of hidden states: (chunk_size, num_active, reduction, the teacher's head)
    "chunks of a row": (1, None, "sum", "shared"),
    "of a prime, a bound": (3, 10, "none", "its own"),
    "one chunk": (None, None, "sum", "some of its columns"),
    "a longer one": (64, None, "none", "shared"),
    "some columns, the full teacher": (4, None, "none", "some of its columns"),
}


@pytest.mark.everyday(13)
@every_kind
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_parity_from_hidden_states(name, dtype, setting):
    parity_from_hidden_states(name, dtype, setting, "torch")


@pytest.mark.everyday(1)
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_parity_from_hidden_states_through_the_kernel(dtype, setting):
    parity_from_hidden_states("many", dtype, setting, "triton")


def parity_from_hidden_states(name, dtype, setting, backend):
    chunk_size, num_active, reduction, head = SETTINGS[setting]
    weights, rows = drawn(2, 5)
    ours, oracle = both_options(name, 2, 5)
    teacher = torch.randn(R, D, device=DEVICE).to(dtype)
    same = {"reduction": reduction, "teacher_rows": rows}
    teacher_head = {}
    if head != "shared":
        columns = V if head == "its own" else 2 * V
        teacher_head = {"teacher_weight": (columns, D), "teacher_bias": (columns,)}
        teacher_head = {key: torch.randn(shape, device=DEVICE).to(dtype) for key, shape in teacher_head.items()}
        u, second = (torch.randn(s, device=DEVICE).to(dtype) for s in ((R, 2), (columns, 2)))
        teacher_head["teacher_extra"] = (u, second)
    if head == "some of its columns":
        same["draft_to_target"] = torch.randperm(2 * V, device=DEVICE)[:V]
        same["teacher"] = "full" if "full" in setting else "draft"

    def plain(h, w, b):
        own = {k: tuple(t.to(h) for t in v) if isinstance(v, tuple) else v.to(h) for k, v in teacher_head.items()}
        return reference.linear_divergence(h, w, teacher.to(h), weights, bias=b, **own, **oracle, **same).loss

    sizes = {"chunk_size": chunk_size, "num_active": num_active}
    assert_parity(
        lambda h, w, b: (
            linear_divergence(
                h, w, teacher, weights, bias=b, backend=backend, **teacher_head, **ours, **same, **sizes
            ).loss
        ),
        plain,
        hidden_draw(dtype, reduction),
        (D, *TEACHER),
    )


def test_the_same_bits_from_however_many_blocks(monkeypatch):
    weights, rows = drawn(11)
    z, teacher = torch.randn(11, V, device=DEVICE), torch.randn(R, V, device=DEVICE)
    results = []
    for threads in (0, 1, 3):
        if threads:
            small_blocks(monkeypatch, threads)
        leaf = z.clone().requires_grad_()
        out = divergence(leaf, teacher, weights, teacher_rows=rows, kind=MANY, backend="torch")
        results.append((*out[1:], *torch.autograd.grad(out.loss, leaf)))
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


OPTIONS_OF_RECORDS = {
    "": {},
    "of both": {"scale": 0.8, "temperature": 1.6},
    "of the teacher": {"scale": 1.3, "teacher_transform": {"scale": 0.5}, "kind": "tv", "reduction": "none"},
}
HEADS = {  # the teacher's weight, columns compared, and transform; None: the student's
    "shared": (None, None, {}),
    "shared, a transform": (None, None, {"softcap": 3.0, "scale": 0.7, "skip_id": 3}),
    "its own": (V, None, {"softcap": 2.0}),
    "some of its columns": (2 * V, torch.arange(V, device=DEVICE) * 2, {"scale": 0.6}),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("stored", ["", "student", "teacher"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("options", OPTIONS_OF_RECORDS)
def test_each_model_has_stored_logits_or_a_record(stored, head, options, backend):
    """Each record has its own head, low-rank part and transform, and the options of the call follow its transform."""
    torch.manual_seed(0)
    columns, picked, transform = HEADS[head]
    shapes = (4, D), (V, D), (V,), (4, 2), (V, 2), (R, D), (columns or V, D), (R, 2), (columns or V, 2)
    h, w, b, u, U, t, own, teacher_u, teacher_U = (torch.randn(s, dtype=torch.float64, device=DEVICE) for s in shapes)
    leaves = [x.requires_grad_() for x in (h, w, b, u, U)]
    student = LinearLogits(h, w, b, (u, U), softcap=4.0, skip_id=3, chunk_size=3)
    of_teacher = (w, b) if columns is None else (own, None)
    teacher = LinearLogits(t, *of_teacher, (teacher_u, teacher_U), **transform)
    z, q = (
        reference.transformed(reference.linear_logits(r.hidden, r.weight, r.bias, extra=r.extra), *r.transform)
        for r in (student, teacher)
    )
    weights, rows = drawn(4)
    given = {"kind": {"tv": 1.0, "jsd": 0.5}, "teacher_rows": rows, "draft_to_target": picked}
    given |= OPTIONS_OF_RECORDS[options]
    pair = (z if stored == "student" else student), (q.detach() if stored == "teacher" else teacher)
    found = divergence(*pair, weights, backend=backend, **given)
    results = []
    for out in (found, reference.divergence(z, q.detach(), weights, **given)):
        grads = torch.autograd.grad(out.loss.sum(), leaves, retain_graph=True)
        results.append((*(x.detach() for x in out), *grads))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("stored", ["student", "teacher"])
def test_a_record_beside_stored_logits_keeps_its_dtype(stored):
    h, w, z = torch.randn(4, D, device=DEVICE), torch.randn(V, D, device=DEVICE), torch.randn(4, V, device=DEVICE)
    h, w, z = (t.bfloat16() for t in (h, w, z))
    record, wide = LinearLogits(h, w, logits_dtype=torch.float32), (h.float() @ w.float().t(), z.float())
    pair, expected = ((z, record), wide[::-1]) if stored == "student" else ((record, z), wide)
    torch.testing.assert_close(divergence(*pair), divergence(*expected))


@pytest.mark.everyday(1)
def test_identical_rows(backend):
    """kl and related kinds are exactly 0 in torch. Sums, and kernels that contract products, leave rounding errors."""
    z = 3 * torch.randn(5, V, device=DEVICE)
    for name in OF_BOTH:
        leaf = z.clone().requires_grad_()
        out = divergence(leaf, z.clone(), kind=name, backend=backend)
        (grad,) = torch.autograd.grad(out.loss, leaf)
        torch.testing.assert_close(out.acceptance_rate, torch.ones(5, device=DEVICE))
        assert out.agree.all()
        assert grad.abs().max() <= (0 if name in ("kl", "soft_ce") and backend == "torch" else 1e-6), name
        assert name == "soft_ce" or out.value.abs().max() < 1e-6


@pytest.mark.parametrize("kind", OF_BOTH)
def test_rows_without_a_column_in_common(kind, backend):
    z = torch.tensor([[2.0, 1.0, -INF, -INF]], device=DEVICE, requires_grad=True)
    t = torch.tensor([[-INF, -INF, 1.0, 1.0]], device=DEVICE)
    out = divergence(z, t, kind=kind, backend=backend)
    want = {"tv": 1, "l1": 2, "nla": 5 * math.log(10), "jsd": math.log(2)}.get(kind, INF)
    assert out.value.item() == pytest.approx(want)
    assert out.acceptance_rate.item() == 0
    (grad,) = torch.autograd.grad(out.loss, z)
    if kind == "rkl":
        assert grad[0, :2].isnan().all()
    elif kind in ("kl", "soft_ce", "lk"):
        p = z.detach().softmax(-1)
        torch.testing.assert_close(grad, p - t.softmax(-1))
    else:
        torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-7, rtol=0)


@pytest.mark.everyday(1)
def test_ties_of_p_and_q_count_as_below(backend):
    """p and q differ only in the rounding of their sums.

    The gradient -p (1 - sum p) is then nearly 0; counting all ties as above would be equivalent.
    """
    z = torch.randn(40, 700, device=DEVICE)
    t = z + 5 * torch.rand(40, 1, device=DEVICE)  # equal to z as probabilities
    t[20:, 0] += 3  # one column above moves all other columns below or above by far more than rounding
    leaf = z.clone().requires_grad_()
    out = divergence(leaf, t, kind="tv", backend=backend)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    assert grad[:20].abs().max() < 1e-6
    exact = z.double().requires_grad_()
    (want,) = torch.autograd.grad(reference.divergence(exact, t.double(), kind="tv").loss, exact)
    torch.testing.assert_close(grad.double(), want, atol=1e-6, rtol=1e-4)


@pytest.mark.everyday(1)
def test_rows_of_weight_0_and_nan(backend):
    """NaN on either side has no effect if the weight is 0; otherwise it stays in its own row."""
    h, w, th = torch.randn(6, D, device=DEVICE), torch.randn(V, D, device=DEVICE), torch.randn(6, D, device=DEVICE)
    weights = torch.tensor([0.0, 1, 0, 1, 1, 1], device=DEVICE)
    h[0], th[2], h[4], th[5] = NAN, NAN, NAN, NAN
    for kind in ("kl", "tv", "teacher_ce", MANY):
        leaves = [t.clone().requires_grad_() for t in (h, w)]
        out = linear_divergence(*leaves, th, weights, kind=kind, reduction="none", backend=backend)
        assert out.value.isnan().tolist() == out.acceptance_rate.isnan().tolist() == [False] * 4 + [True] * 2
        assert out.agree[4:].tolist() == [False, False]
        grads = torch.autograd.grad(out.loss[:4].sum(), leaves, retain_graph=True)
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][[0, 2]] == 0).all()
        assert torch.autograd.grad(out.loss.sum(), leaves[0])[0][4:].isnan().all()


@pytest.mark.parametrize("kind", ["kl", "rkl", "jsd", "tv", "teacher_ce", MANY], ids=str)
def test_the_whole_gradient_of_a_row_with_a_nan_is_nan(kind, backend):
    """Also where the student's probability is 0."""
    z, t = torch.zeros(2, V, device=DEVICE), torch.zeros(2, V, device=DEVICE)
    z[:, 3], t[1, 5] = 1e3, NAN
    leaf = z.requires_grad_()
    (grad,) = torch.autograd.grad(divergence(leaf, t, kind=kind, backend=backend).loss, leaf)
    assert grad.isnan().all(1).tolist() == [False, True]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("kind", ["kl", "l1"])
def test_the_teacher_may_share_memory_with_the_logits(kind, backend):
    """The gradient has separate memory.

    Rows of the same tensor, in another order, therefore give the same result as a copy.
    """
    z = 2 * torch.randn(R, V, device=DEVICE)
    before, rows = z.clone(), torch.arange(R, device=DEVICE).roll(1)
    grads = []
    for teacher in (before, z):
        leaf = z.detach().requires_grad_()
        loss = divergence(leaf, teacher, kind=kind, teacher_rows=rows, backend=backend).loss
        grads.append(torch.autograd.grad(loss, leaf)[0])
    assert torch.equal(*grads)
    assert torch.equal(z, before)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_a_row_missing_in_the_teacher(form, backend):
    rows = torch.tensor([0, -1, R, 2], device=DEVICE)
    w = torch.randn(V, D, device=DEVICE)
    h, th = torch.randn(4, D, device=DEVICE, requires_grad=True), torch.randn(R, D, device=DEVICE)
    weights = torch.tensor([1.0, 1, 1, 0], device=DEVICE)
    if form == "logits":
        out = divergence(h @ w.t(), th @ w.t(), weights, teacher_rows=rows, backend=backend)
        check = lambda: divergence(h @ w.t(), th @ w.t(), weights, teacher_rows=rows, check_targets=True)  # noqa: E731
    else:
        out = linear_divergence(h, w, th, weights, teacher_rows=rows, backend=backend)
        check = lambda: linear_divergence(h, w, th, weights, teacher_rows=rows, check_targets=True)  # noqa: E731
    assert out.value.isnan().tolist() == [False, True, True, False]
    (grad,) = torch.autograd.grad(out.loss, h)
    assert grad.isnan().any(1).tolist() == [False, True, True, False]
    with pytest.raises(IndexError, match=r"^teacher_rows must lie in \[0, 7\), got -1 at position \(1,\)$"):
        check()
    weights[1:], th = 0, th[:1]  # rows of weight 0 are not checked
    check()


@pytest.mark.usefixtures("unchecked")
def test_targets(backend):
    """With -100, the cross-entropy is 0; with an id out of range, it is NaN in its row.

    Other kinds ignore the targets.
    """
    z, t = torch.randn(4, V, device=DEVICE, requires_grad=True), torch.randn(4, V, device=DEVICE)
    y = torch.tensor([2, -100, V, 3], device=DEVICE)
    out = divergence(z, t, kind=SUM, targets=y, skip_id=3, reduction="none", backend=backend)
    (grad,) = torch.autograd.grad(out.loss.sum(), z)
    assert out.value.isnan().tolist() == grad.isnan().any(1).tolist() == [False, False, True, True]
    l1 = divergence(z, t, kind="l1", skip_id=3, backend=backend)
    torch.testing.assert_close(out.value[1], 0.9 * l1.value[1])


FROZEN, TRAINED, NOTHING = (True, False), (True, True), (False, False)


@pytest.mark.everyday(6)
@pytest.mark.parametrize(
    ("needs", "options", "products"),
    [
        (FROZEN, {}, 3), (FROZEN, {"reduction": "none"}, 3), (TRAINED, {}, 4), (TRAINED, {"reduction": "none"}, 6),
        (NOTHING, {}, 2), ((False, True), {}, 3), (FROZEN, {"kind": "lk", "alpha": "mean"}, 5),
        (FROZEN, {"kind": SUM, "targets": torch.zeros(9, dtype=torch.long)}, 3),
    ],
    ids=str,
)  # fmt: skip
def test_products(needs, options, products, backend):
    """A frozen head shared by student and teacher takes three products, counted over the rows with a nonzero weight."""
    weights, rows = drawn(9)
    h, w = (torch.randn(s, device=DEVICE, requires_grad=need) for s, need in zip(((9, D), (V, D)), needs, strict=True))
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with FlopCounterMode(display=False) as counter:
        out = linear_divergence(
            h, w, torch.randn(R, D, device=DEVICE), weights, teacher_rows=rows, backend=backend, **options
        )
        if any(needs):
            out.loss.sum().backward()
    assert counter.get_total_flops() == products * 2 * int((weights != 0).sum()) * w.numel()
    assert [t.grad is not None for t in (h, w)] == list(needs)


def test_gradients_only_for_leaves_that_require_them():
    """No gradient is computed for a teacher that requires grad by mistake.

    The same holds for its head and the head's second part.
    """
    h, w, th, own, u, second = (
        torch.randn(s, device=DEVICE, requires_grad=True) for s in ((4, D), (V, D), (4, D), (V, D), (4, 2), (V, 2))
    )
    loss = linear_divergence(
        h, w, th, extra=(u, second), teacher_weight=own, teacher_extra=(u, second), kind="jsd", backend="torch"
    ).loss
    grads = torch.autograd.grad(loss, (h, w, th, own, u, second), allow_unused=True)
    assert [g is not None for g in grads] == [True, True, False, False, True, True]
    with torch.no_grad():
        assert not linear_divergence(h, w, th, kind="kl").loss.requires_grad


@pytest.mark.exhaustive
@pytest.mark.many_draws
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_two_chunks(dtype):
    """Memory holds two chunks of logits, the gradient of the hidden states and cache-sized blocks, but never [N, V]."""
    N, V, chunk = 2048, 4096, 64
    h, th = (torch.randn(N, D).to(dtype) for _ in range(2))
    h.requires_grad_()
    w = torch.randn(V, D).to(dtype)
    y = torch.zeros(N, dtype=torch.long)

    def step(_):
        linear_divergence(h, w, th, kind=SUM, targets=y, chunk_size=chunk, backend="torch").loss.backward()

    peak, whole = measure.peak_memory(step, torch.device("cpu")), N * V * h.element_size()
    assert 2 * chunk * V * h.element_size() < peak < whole / 4, (peak, whole)


LAYOUTS = {
    "positions sliced": lambda: (torch.randn(2, 6, V)[:, :-1], torch.randn(2, 6, V)[:, 1:]),
    "transposed": lambda: (torch.randn(5, 2, V).transpose(0, 1), torch.randn(2, 5, V)),
    "columns apart": lambda: (torch.randn(2, 5, 2 * V)[..., ::2], torch.randn(2, V, 5).transpose(1, 2)),
    "expanded": lambda: (torch.randn(2, 5, V), torch.randn(1, 1, V).expand(2, 5, V)),
    "four dimensions": lambda: (torch.randn(2, 5, 1, V), torch.randn(2, 5, 1, V)),
    "none": lambda: (torch.randn(2, 0, V), torch.randn(2, 0, V)),
}


@pytest.mark.everyday(2)
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("columns", [False, True])
def test_layouts(layout, columns, backend):
    z, t = (x.to(DEVICE) for x in LAYOUTS[layout]())
    weights = torch.rand(z.shape[:-1], device=DEVICE).round()
    same = {"targets": torch.randint(0, V, weights.shape, device=DEVICE)}
    if columns:
        same["draft_to_target"] = torch.randperm(V, device=DEVICE)
    results = []
    for function in (divergence, reference.divergence):
        leaf = z.detach().requires_grad_()
        chosen = {"backend": backend} if function is divergence else {}
        out = function(leaf, t, weights, kind={"jsd": 1.0, "ce": 0.5}, **same, **chosen)
        results.append((*(x.detach() for x in out), torch.autograd.grad(out.loss, leaf)[0]))
    torch.testing.assert_close(*results)


def test_a_column_missing_in_the_teacher_raises():
    z, t = torch.randn(3, V), torch.randn(3, V)
    columns = torch.arange(V) + 1
    with pytest.raises(IndexError, match=r"^draft_to_target must lie in \[0, 23\), got 23 at position \(22,\)$"):
        divergence(z, t, draft_to_target=columns)


@pytest.mark.exhaustive
def test_a_column_missing_in_the_teacher_gives_nan_where_it_cannot_be_checked():
    """Such as in a graph, and on a GPU by default."""
    z, t, columns = smaller_vocabulary()
    columns[5], columns[7] = -1, 3 * V
    heads = [torch.eye(size, dtype=z.dtype, device=DEVICE) for size in (V, 3 * V)]
    step = torch.compile(
        lambda columns: linear_divergence(z, heads[0], t, teacher_weight=heads[1], draft_to_target=columns),
        backend="eager", fullgraph=True,
    )  # fmt: skip
    assert step(columns).loss.isnan()
    columns[5], columns[7] = smaller_vocabulary()[2][[5, 7]]
    assert step(columns).loss.isfinite()


def smaller_vocabulary(dtype=torch.float64, vocabulary=3 * V):
    """Draw student logits, logits of a teacher with a larger vocabulary, and the teacher's ids of the student's."""
    torch.manual_seed(0)
    columns = torch.randperm(vocabulary, device=DEVICE)[:V]
    z, t = (2 * torch.randn(9, size, dtype=dtype, device=DEVICE) for size in (V, vocabulary))
    t[3, columns[z[3].argmax()]] = 9  # the argmax of both
    return z, t, columns


@every_kind
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("teacher", ["draft", "full"])
@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_metrics_cover_the_whole_vocabulary_of_the_teacher(name, teacher, form, transform, backend):
    """a and the agreement are those of speculative sampling; value and gradient are of the truncated teacher or not."""
    z, t, columns = smaller_vocabulary()
    weights, rows = drawn(9)[0], torch.randint(0, 9, (9,), device=DEVICE)
    rows[:4] = torch.arange(4, device=DEVICE)
    ours, oracle = both_options(name, 9)
    ours, oracle = (o | TRANSFORMS[transform] for o in (ours, oracle))
    same = {"teacher_rows": rows, "draft_to_target": columns, "teacher": teacher, "reduction": "none"}
    one_hot = {"weight": torch.eye(V, dtype=z.dtype, device=DEVICE)}
    of_teacher = torch.eye(t.shape[1], dtype=z.dtype, device=DEVICE)
    results = []
    for function, options in ((divergence, ours | {"backend": backend}), (reference.divergence, oracle)):
        leaf = z.clone().requires_grad_()
        if function is divergence and form == "hidden":
            out = linear_divergence(leaf, one_hot["weight"], t, weights, teacher_weight=of_teacher, **same, **options)
        else:
            out = function(leaf, t, weights, **same, **options)
        results.append((*(x.detach() for x in out), torch.autograd.grad(out.loss.sum(), leaf)[0]))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_the_mass_outside_of_the_draft_s_vocabulary(backend):
    """A fifth of the mass is outside: it is not in a, and the kl of the full teacher has 0.8 of the weight."""
    q = torch.tensor([[0.3, 0.2, 0.4, 0.1]], dtype=torch.float64, device=DEVICE)
    columns = torch.tensor([2, 0, 3], device=DEVICE)
    z = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64, device=DEVICE).log().requires_grad_()
    draft, full = (
        divergence(z, q.log(), kind="kl", draft_to_target=columns, teacher=teacher, backend=backend)
        for teacher in ("draft", "full")
    )
    for out in (draft, full):
        assert out.acceptance_rate.item() == pytest.approx(0.4 + 0.3 + 0.1)
        assert out.agree.item()
    assert full.loss.item() == pytest.approx(0.8 * draft.loss.item())
    torch.testing.assert_close(*(0.8 * torch.autograd.grad(draft.loss, z)[0], torch.autograd.grad(full.loss, z)[0]))
    tv = divergence(z, q.log(), kind="tv", draft_to_target=columns, teacher="full", backend=backend)
    assert tv.loss.item() == pytest.approx(0.2)
    jsd = {"kind": "jsd", "beta": 0.3, "draft_to_target": columns, "teacher": "full"}
    found, expected = divergence(z, q.log(), **jsd, backend=backend), reference.divergence(z, q.log(), **jsd)
    torch.testing.assert_close(found.loss, expected.loss)
    best = divergence(z, q.log(), kind="teacher_ce", draft_to_target=columns, teacher="full", backend=backend)
    of_best = torch.eye(3, dtype=z.dtype, device=DEVICE)[:1]  # of the teacher's token 2
    torch.testing.assert_close(torch.autograd.grad(best.loss, z)[0], z.detach().exp() - of_best)
    without = divergence(z[:, 1:], q.log(), kind="teacher_ce", draft_to_target=columns[1:], teacher="full")
    assert not without.agree.item()  # the teacher's argmax is not a token of the draft
    assert without.loss.item() == 0
    assert torch.autograd.grad(without.loss, z)[0].abs().sum() == 0


def test_acceptance_equals_a_simulation_of_speculative_sampling():
    """10^5 draws of a draft with a third of the vocabulary, each accepted with probability min(1, q / p)."""
    z, t, columns = smaller_vocabulary(torch.float32)
    a = divergence(z, t, draft_to_target=columns).acceptance_rate
    p, q = z.softmax(-1), t.softmax(-1)[:, columns]
    drawn_tokens = torch.multinomial(p, 100_000, replacement=True)
    accepted = torch.rand(drawn_tokens.shape, device=DEVICE) < (q / p).gather(1, drawn_tokens)
    rate = accepted.double().mean(1)
    assert ((rate - a).abs() <= 4 * (a * (1 - a) / 100_000).sqrt()).all()


@pytest.mark.parametrize("columns", [torch.zeros(V, dtype=torch.long), torch.arange(V) // 4 * 3], ids=["0", "offsets"])
def test_repeated_columns_raise(columns):
    z, t = torch.randn(3, V), torch.randn(3, 2 * V)
    with pytest.raises(ValueError, match=r"^draft_to_target must hold .*EAGLE-3; pass torch.arange\(n\) \+ d2t"):
        divergence(z, t, draft_to_target=columns)
    divergence(z, t, draft_to_target=torch.arange(V) + torch.arange(V) // 4)


def test_a_nan_outside_of_the_compared_columns(backend):
    """It makes the metrics of its row NaN, and with the full teacher value and gradient too."""
    z, t, columns = smaller_vocabulary()
    outside = next(v for v in range(t.shape[1]) if v not in columns.tolist())
    t[1, outside] = NAN
    for teacher in ("draft", "full"):
        leaf = z.clone().requires_grad_()
        out = divergence(
            leaf, t, kind="kl", draft_to_target=columns, teacher=teacher, reduction="none", backend=backend
        )
        assert out.acceptance_rate.isnan().tolist() == [i == 1 for i in range(9)]
        assert not out.agree[1]
        (grad,) = torch.autograd.grad(out.loss.sum(), leaf)
        assert out.value.isnan().tolist() == [i == 1 and teacher == "full" for i in range(9)]
        assert grad.isnan().any(1).tolist() == out.value.isnan().tolist()


@pytest.mark.exhaustive
@pytest.mark.covering(1, most=1)
@pytest.mark.parametrize("form", ["logits", "hidden"])
@pytest.mark.parametrize("teacher", ["draft", "full"])
def test_one_graph_of_a_smaller_vocabulary(form, teacher):
    z, t, columns = smaller_vocabulary()
    head, of_teacher = (torch.eye(x.shape[1], dtype=z.dtype, device=DEVICE) for x in (z, t))
    same = {"draft_to_target": columns, "teacher": teacher, "kind": {"lk": 1.0, "kl": 0.5}, "skip_id": 2}

    def step(z, t):
        if form == "logits":
            out = divergence(z, t, **same)
        else:
            out = linear_divergence(z, head, t, teacher_weight=of_teacher, **same)
        return out.loss, out.acceptance_rate, out.agree

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        leaf = z.clone().requires_grad_()
        loss, *rest = function(leaf, t)
        results.append((loss.detach(), *rest, torch.autograd.grad(loss, leaf)[0]))
    torch.testing.assert_close(*results)


@pytest.mark.exhaustive
def test_a_beta_that_reaches_0_or_1_in_one_graph():
    """jsd is defined as kl at 0 and as rkl at 1. The formula of jsd does not have these limits."""
    kinds = {"jsd": 0.5, "kl": 1.0}
    z, t = (torch.randn(4, 9, device=DEVICE) for _ in range(2))
    step = torch.compile(
        lambda z, beta: divergence(z, t, kind=kinds, beta=beta).loss, backend="aot_eager", fullgraph=True
    )
    for beta in (0.5, 0.25, 0.0, 1.0):
        found = []
        for function in (step, lambda z, beta: divergence(z, t, kind=kinds, beta=beta).loss):
            x = z.clone().requires_grad_()
            loss = function(x, beta)
            found.append((loss.detach(), *torch.autograd.grad(loss, x)))
        torch.testing.assert_close(*found)


THREE, ROWS = torch.zeros(3, dtype=torch.long), (torch.zeros(3, D), torch.zeros(V, D))
VALID = {
    divergence: {"logits": torch.zeros(3, V), "teacher_logits": torch.zeros(3, V)},
    linear_divergence: {"hidden": torch.zeros(3, D), "weight": torch.zeros(V, D), "teacher_hidden": torch.zeros(3, D)},
}
BAD = [
    ({"kind": "hinge"}, ValueError, "kind must be one of kl, rkl, .*, got 'hinge'$"),
    ({"kind": ["kl"]}, TypeError, "kind must be a name or a dict"),
    ({"kind": {"kl": "1"}}, TypeError, r"kind\['kl'\] must be a number, got str$"),
    ({"kind": {"kl": INF}}, ValueError, r"kind\['kl'\] must be finite, got inf$"),
    ({"kind": {"kl": 0}}, ValueError, "kind must have a coefficient that is not 0"),
    ({"beta": 0.5}, ValueError, "beta only applies to kind='jsd', got kind='kl'$"),
    ({"alpha": "row"}, ValueError, "alpha only applies to kind='lk', got kind='kl'$"),
    ({"kind": "jsd", "beta": 2}, ValueError, r"beta must lie in \[0.0, 1.0\], got 2.0$"),
    ({"kind": "nla", "floor": "low"}, TypeError, "floor must be a number, got str$"),
    ({"kind": "lk", "alpha": "max"}, ValueError, "alpha must be one of row, mean, got 'max'$"),
    ({"kind": "lk", "base": "tv"}, ValueError, "base must be one of kl, soft_ce, got 'tv'$"),
    ({"teacher": "whole"}, ValueError, "teacher must be one of draft, full, got 'whole'$"),
    ({"kind": "ce"}, ValueError, "targets must be given for kind 'ce', got None$"),
    ({"targets": THREE}, ValueError, "targets only apply to kind='ce', "),
    ({"kind": "ce", "targets": THREE[:2]}, ValueError, r"targets must have shape \(3,\)"),
    ({"weights": torch.ones(4)}, ValueError, r"weights must have shape \(3,\)"),
    ({"logits": None}, TypeError, "logits must be a torch.Tensor, got NoneType$"),
    ({"teacher_logits": None}, TypeError, "teacher_logits must be a torch.Tensor, got NoneType$"),
    (
        {"teacher_logits": torch.zeros(3, V, dtype=torch.float64)}, ValueError,
        "teacher_logits must have dtype float32, got float64$",
    ),
    ({"teacher_logits": torch.zeros(3, 0)}, ValueError, r"teacher_logits must have shape \[..., V\]"),
    (
        {"teacher_logits": torch.zeros(4, V)}, ValueError,
        r"teacher_logits must have shape \(3, '\*'\), the rows of logits, unless teacher_rows is given, got \(4, 23\)$",
    ),
    (
        {"teacher_logits": torch.zeros(3, V + 1)}, ValueError,
        "teacher_logits must have the vocabulary of logits, 23 columns, unless draft_to_target is given, got 24$",
    ),
    (
        {"teacher_logits": torch.zeros(0, V), "teacher_rows": THREE}, ValueError,
        "teacher_logits must have at least one row",
    ),
    ({"teacher_rows": THREE[:2]}, ValueError, r"teacher_rows must have shape \(3,\)"),
    ({"teacher_rows": torch.ones(3)}, ValueError, "teacher_rows must have dtype"),
    ({"draft_to_target": THREE}, ValueError, r"draft_to_target must have shape \(23,\)"),
    ({"reduction": "mean"}, ValueError, "reduction must be sum or none, got 'mean'$"),
    ({"temperature": None}, TypeError, "temperature must be a number, got NoneType$"),
    ({"temperature": 0.0}, ValueError, "temperature must be positive"),
    ({"teacher_transform": 3.0}, TypeError, "teacher_transform must be a dict or None"),
    ({"teacher_transform": {"cap": 3.0}}, ValueError, "teacher_transform must have no keys but softcap, scale, "),
    ({"teacher_transform": {"skip_id": V}}, ValueError, r"skip_id must lie in \[0, 23\), got 23$"),
    (
        {"teacher_logits": LinearLogits(*ROWS, skip_id=2), "draft_to_target": torch.arange(V)}, ValueError,
        "skip_id of teacher_logits must be None with draft_to_target, got 2; ",
    ),
    (
        {"teacher_logits": LinearLogits(*ROWS, softcap=3.0), "softcap": 2.0}, ValueError,
        "softcap must be None for logits that have one, 3.0, got 2.0$",
    ),
    (
        {"logits": LinearLogits(*ROWS), "teacher_logits": torch.zeros(3, V).double()}, ValueError,
        "teacher_logits must have dtype float32, got float64$",
    ),
    (
        {"logits": LinearLogits(*ROWS), "teacher_logits": LinearLogits(*(t.double() for t in ROWS))}, ValueError,
        "teacher_hidden must have the dtype of hidden, torch.float32, got torch.float64$",
    ),
    (
        {"logits": LinearLogits(*ROWS), "teacher_logits": torch.zeros(4, V)}, ValueError,
        r"teacher_logits must have shape \(3, '\*'\), the rows of hidden, ",
    ),
]  # fmt: skip
BAD_HIDDEN = [
    ({"hidden": None}, TypeError, "hidden must be a torch.Tensor, got NoneType$"),
    ({"teacher_bias": torch.zeros(V)}, ValueError, "teacher_bias requires teacher_weight: "),
    (
        {"teacher_hidden": torch.zeros(3, D + 1)}, ValueError,
        r"teacher_hidden must have shape \[..., 6\] to go with weight",
    ),
    (
        {"teacher_weight": torch.zeros(V, D + 1)}, ValueError,
        r"teacher_hidden must have shape \[..., 7\] to go with teacher_weight",
    ),
    (
        {"teacher_hidden": torch.zeros(3, D).double(), "teacher_weight": torch.zeros(V, D).double()}, ValueError,
        "teacher_hidden must have the dtype of hidden, torch.float32, got torch.float64$",
    ),
    (
        {"teacher_extra": (torch.zeros(3, 2), torch.zeros(V, 3))}, ValueError,
        r"teacher_extra\[0\] must have shape \(3, 3\)",
    ),
    ({"chunk_size": 0}, ValueError, "chunk_size must be at least 1, got 0$"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "given", "error", "message"),
    [(divergence, *each) for each in BAD] + [(linear_divergence, *each) for each in BAD_HIDDEN],
)
def test_bad_input(function, given, error, message):
    with pytest.raises(error, match=f"^{message}"):
        function(**VALID[function] | given)
