"""Rows: chunks and their sizes, options that arrive, transforms, divergences, and rows of an op that are not copied."""

import importlib
import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_kernels import ops
from dllm_kernels._graph import _custom_ops
from dllm_kernels.distributed.vocab_parallel import ShardPrimitives
from dllm_kernels.ops import linear_topk_divergence, token_nll, topk_divergence, weighted_linear_nll
from dllm_kernels.rows import _active_rows, _chunks, _rest, _setup
from dllm_kernels.rows._divergence_spec import Comparison, checked_spec
from dllm_kernels.rows._fused import Fused
from dllm_kernels.rows._primitives import RowPrimitives, row_primitives
from dllm_kernels.rows._setup import Setup
from dllm_kernels.rows._teacher import Teacher
from dllm_kernels.rows._transform import NO_TRANSFORM, Transform
from tests.conftest import DEVICE
from tests.ops.test_divergence import MANY
from tests.ops.test_linear_nll import NAN, inputs, oracle
from tests.ops.test_token_nll import inputs as inputs_of_logits
from tests.ops.test_topk_divergence import V, teacher
from tests.repo.test_imports import PACKAGE, home, imports
from tests.support.parity import value_and_grads
from tests.support.rows import HEAD_PATHS, on_path

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Chunks


ROOM = 10_000  # rows of a chunk that fit into memory, more than any chunk has


@pytest.fixture(params=HEAD_PATHS)
def path(request, monkeypatch):
    return on_path(request.param, monkeypatch, splits=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_a_chunk_with_padding_between_them(dtype, path, monkeypatch):
    """On a GPU, rows of the buffer begin at multiples of 64 elements. The memory between them is never used."""

    def padded_rows(rows, V, **options):
        return torch.full((rows, V + 11), math.nan, **options)[:, :V]

    leaves, targets, weights = inputs(dtype=dtype)
    leaves = leaves[:2]

    def run():
        def loss(h, w):
            return weighted_linear_nll(h, w, targets, weights, chunk_size=4, backend=path).loss

        return value_and_grads(loss, leaves, torch.tensor(1.0))

    together = run()
    monkeypatch.setattr(_chunks, "aligned_rows", padded_rows)
    for a, b in zip(run(), together, strict=True):
        torch.testing.assert_close(a, b)


def test_every_row_primitive_has_a_contract_and_a_form_for_a_split_vocabulary():
    for primitives in map(type, map(row_primitives, (False, True))):
        new = {name for name in vars(primitives) if name[0] != "_"} - {*dir(RowPrimitives), "stats"}
        assert not new, f"add the abstract methods {sorted(new)} to RowPrimitives in rows/_primitives.py"
    missing = sorted(ShardPrimitives.__abstractmethods__)
    assert not missing, f"add the methods {missing} to ShardPrimitives in distributed/vocab_parallel.py"


def test_every_backward_pass_raises_if_it_is_differentiated():
    missing = [f"{f.__module__}.{f.__name__}" for f in Fused.__subclasses__() if not hasattr(f.backward, "__wrapped__")]
    assert not missing, f"decorate the backward of {missing} with first_order"


def test_a_chunk_has_at_least_one_row_and_whole_tiles():
    assert _active_rows.choose_chunk(10_000, 1000, 64, True, 132, ROOM) % 128 == 0
    assert _active_rows.choose_chunk(0, 1000, 64, True, None, ROOM) >= 1
    chunks = [_active_rows.choose_chunk(rows, 1000, 64, True, None, ROOM) for rows in (600, 10 * 512)]
    assert chunks == [384, 512]  # on a CPU, of equal size


@pytest.mark.parametrize(("rows", "V", "D"), [(7680, 151_936, 2560), (32_768, 151_936, 4096), (4096, 126_464, 4096)])
def test_chunks_fill_whole_waves_of_the_multiprocessors(rows, V, D):
    """The product with the fewest tiles, grad_hidden's with tiles of 128 x 256, fills the 132 of an H100 or H200."""
    size = _active_rows.choose_chunk(rows, V, D, False, 132, ROOM)
    chunks = [min(size, rows - start) for start in range(0, rows, size)]
    waves = sum(math.ceil(math.ceil(c / 128) * (D / 256) / 132) for c in chunks)
    assert waves <= 1.05 * (rows / 128) * (D / 256) / 132 + 1


@pytest.mark.parametrize(("rows", "chunk"), [(16_384, 8192), (4096, 4096)])
def test_a_head_that_trains_takes_chunks_of_8192_rows(rows, chunk):
    """Each chunk reads and writes the head's float32 gradient, 4.3 GB at V = 131,072 and D = 4,096."""
    assert _active_rows.choose_chunk(rows, 131_072, 4096, True, 132, ROOM) == chunk


def limits(monkeypatch, total):
    gpu = SimpleNamespace(multi_processor_count=132, total_memory=int(total))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    return _active_rows.limits_of_chunks(torch.device("cuda"))


def test_a_chunk_takes_a_sixteenth_of_the_memory_of_a_gpu(monkeypatch):
    """GPUs of one kind choose equal chunks, although their memory differs by a per cent."""
    sms, memory = limits(monkeypatch, 24 * 2**30)
    assert sms == 132
    for bytes_per_column in (2, 6):  # float32 logits and their gradient in bfloat16
        size = _active_rows.choose_chunk(16_384, 262_144, 2304, True, sms, memory // (bytes_per_column * 262_144))
        assert size % 128 == 0
        assert 24 * 2**30 / 64 < size * bytes_per_column * 262_144 <= 24 * 2**30 / 16
    assert _active_rows.choose_chunk(16_384, 262_144, 2304, True, sms, 5) == 128
    for a, b in ((23.6, 24.0), (39.4, 39.6), (79.1, 79.7), (139.8, 140.4), (178.0, 183.0), (191.9, 192.0)):
        assert limits(monkeypatch, a * 2**30) == limits(monkeypatch, b * 2**30)
    memory = limits(monkeypatch, 79.1 * 2**30)[1]
    assert memory > 8192 * 2 * 2 * 151_936  # bfloat16 logits of a student and of its teacher
    assert memory > 8192 * 2 * 262_144


@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_the_buffers_of_a_chunk_on_a_cpu_have_a_largest_size(logits_dtype, monkeypatch):
    sizes, allocate = [], _chunks.aligned_rows
    monkeypatch.setattr(_chunks, "aligned_rows", lambda rows, *_, **o: sizes.append(rows) or allocate(rows, *_, **o))
    N, D, V = 600, 5, 37
    per_row = (2 if logits_dtype is None else 6) * V + 4 * D * 2
    monkeypatch.setattr(_active_rows, "CPU_CHUNK_BYTES", 256 * per_row)
    h, w = (torch.randn(n, D, dtype=torch.bfloat16) for n in (N, V))
    arguments = torch.zeros(N, dtype=torch.int64), torch.ones(N)
    weighted_linear_nll(h, w, *arguments, logits_dtype=logits_dtype, backend="torch")
    assert sizes == [256]


def test_the_choice_of_a_chunk_is_cached(monkeypatch):
    """A GPU idles during the choice.

    Equal sizes are therefore cached, and another row count reuses the costs of the shape.
    """
    evaluated, cost = [], _active_rows._gpu_cost
    monkeypatch.setattr(_active_rows, "_gpu_cost", lambda *args: evaluated.append(1) or cost(*args))

    def choose(rows):
        evaluated.clear()
        return _active_rows.choose_chunk(rows, 126_467, 4097, True, 132, ROOM)  # a shape that no other test uses

    size = choose(8000)
    assert len(evaluated) == 63
    assert choose(8000) == size
    assert evaluated == []
    shapes = _active_rows._chunk_costs.cache_info().misses
    choose(7999)
    assert len(evaluated) == 63
    assert _active_rows._chunk_costs.cache_info().misses == shapes


def test_all_rows_are_taken_while_a_graph_is_captured(path, monkeypatch):
    """Compaction needs the number of rows on the host. A capture projects all rows, and masks inactive ones."""
    leaves, targets, weights = inputs()
    leaves[0][weights == 0] = NAN
    expected = value_and_grads(oracle(targets, weights), leaves, torch.tensor(1.0))
    monkeypatch.setattr(_active_rows, "_captured", lambda mask: True)
    got = value_and_grads(
        lambda h, w, b: weighted_linear_nll(h, w, targets, weights, bias=b, chunk_size=4, backend=path).loss,
        leaves,
        torch.tensor(1.0),
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(leaves[0].isnan().any(1), weights == 0)  # the caller's rows are not modified


def test_a_slice_of_a_batch_is_not_copied():
    """Rows are addressed by batch and position strides."""
    from dllm_kernels.rows._interface import as_blv

    x = torch.randn(6, 8, 37, device=DEVICE)
    for view in (x[1:5], x[:, 1:], x[::2, :-1], x[:, :, 3:], x[2], x.view(2, 3, 8, 37)):
        assert as_blv(view).data_ptr() == view.data_ptr()


def test_the_environment_chooses_the_backend(monkeypatch):
    logits, targets = inputs_of_logits()
    used = []
    rows = _setup.row_primitives
    monkeypatch.setattr(_setup, "row_primitives", lambda triton: used.append(triton) or rows(triton))
    monkeypatch.delenv("DLLM_KERNELS_BACKEND", raising=False)
    token_nll(logits, targets)
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "triton")
    token_nll(logits, targets)
    token_nll(logits, targets, backend="torch")
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "torch")
    token_nll(logits, targets, backend="triton")
    assert used == [DEVICE == "cuda", True, False, True]


def test_a_scale_of_one_is_omitted():
    assert Transform(scale=1).checked(53) == NO_TRANSFORM
    assert Transform(3, 1.0, 0).checked(53) == Transform(3.0, None, 0)


def test_the_smallest_and_the_largest_factor_are_accepted():
    assert Transform(1e-18, 1e18).checked(53) == Transform(1e-18, 1e18, None)


# Divergences


def test_names():
    """Aliases, twice tv and the ends of jsd map to existing kinds; a custom op takes a comparison as its arguments."""
    assert checked_spec("kl_div") == checked_spec("kl") == checked_spec("jsd", beta=0) == checked_spec({"kl": 1})
    assert checked_spec("rkl") == checked_spec("jsd", beta=1.0)
    assert checked_spec("lk_hybrid", alpha="mean").lam_of_mean
    assert checked_spec({"l1": 0.5, "tv": 1, "kl": 0}) == checked_spec({"tv": 2.0})
    for transform in (Transform(), Transform(3.0, 0.7, 0)):
        comparison = Comparison(checked_spec(MANY, beta=0.3, base="soft_ce"), transform, 4.0, True)
        x, op = torch.ones(2, 3), _custom_ops.OPS["divergence"]
        args = [x, Teacher(x), None, x[:, 0], comparison, Setup(transform, chunk_dtype=torch.float16)]
        assert op.rebuilt(*op.arguments(args)) == args  # tensors are compared by identity


class Casts(TorchDispatchMode):
    """Record the shapes of tensors that are cast or indexed, and "read back" if the number of nonzero elements is."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.nonzero.default:
            self.seen.append("read back")
        elif function in (torch.ops.aten._to_copy.default, torch.ops.aten.index_select.default):
            self.seen.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_the_teacher_s_head_is_converted_before_the_host_sync(reduction):
    """Otherwise a GPU would idle meanwhile. The head is converted once per pass over the rows, not once per chunk."""
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    head, columns = torch.randn(9, 5), torch.randperm(9)[:7]
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
        ops.linear_divergence(
            hidden, weight, torch.randn(6, 5), torch.ones(6), teacher_weight=head, draft_to_target=columns,
            reduction=reduction, chunk_size=2, kind="lk", alpha="mean",
        ).loss.sum().backward()  # fmt: skip
    casts_of_head = [i for i, event in enumerate(casts.seen) if event in ((9, 5), (7, 5))]
    read_back = [i for i, event in enumerate(casts.seen) if event == "read back"]
    # Forward casts the whole head, and selects rows for the pass of the mean; backward selects rows, then casts them.
    assert len(casts_of_head) == 2 + 2 * (reduction == "none")
    assert casts_of_head[0] < read_back[0]


def test_rows_are_not_copied_if_all_are_active():
    hidden, weight, ids = torch.randn(6, 4, requires_grad=True), torch.randn(7, 4), torch.zeros(6, dtype=torch.int64)
    with Casts() as casts:
        weighted_linear_nll(hidden, weight, ids, torch.ones(6), backend="torch").loss.backward()
    assert casts.seen == ["read back"]


def test_importing_the_package_loads_no_engine():
    """The kinds are data beside the interface of the backends. The worker threads register a hook of forks."""
    loaded, new = set(), {PACKAGE / "__init__.py"}
    while new:
        loaded |= new
        modules = [module.split(".") for path in new for module, at_top in imports(path) if at_top]
        packages = {home(".".join(module[:n])) for module in modules for n in range(1, len(module) + 1)}
        new = {path for path in packages - loaded - {None} if path.is_relative_to(PACKAGE)}
    assert PACKAGE / "ops" / "divergence.py" in loaded
    assert not {home(f"dllm_kernels.backends.torch.{name}") for name in ("_divergence", "_workers", "_blocks")} & loaded


public = importlib.import_module("dllm_kernels.ops.topk_divergence")  # the package exports the function of this name


def test_blocks_of_rows_do_not_change_the_result(backend, monkeypatch):
    ids, log_q, weights = teacher(8, 2, 5)
    for x in (torch.randn(2, 5, V, device=DEVICE), torch.randn(5, 2, V, device=DEVICE).transpose(0, 1)):
        one = topk_divergence(x, ids, log_q, weights, backend=backend)
        with monkeypatch.context() as patch:
            patch.setattr(_rest, "BLOCK_ELEMENTS", 3 * V)
            many = topk_divergence(x, ids, log_q, weights, backend=backend)
        torch.testing.assert_close(many, one, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", ["logits", "hidden"])
def test_a_repeated_id_is_nan_where_values_cannot_be_read(form, backend, monkeypatch):
    """On a GPU, and under torch.compile, the row is NaN; other rows and missing entries are not affected."""
    monkeypatch.setattr(public, "readable_without_sync", lambda _: False)
    ids, log_q = torch.tensor([[1, 2, 1], [3, -100, -100], [4, 5, 6]], device=DEVICE), torch.full((3, 3), -2.0)
    z, log_q = torch.randn(3, V, device=DEVICE), log_q.to(DEVICE)
    x = z.clone().requires_grad_()
    if form == "logits":
        out = topk_divergence(x, ids, log_q, backend=backend)
    else:
        eye = torch.eye(V, device=DEVICE)
        out = linear_topk_divergence(x, eye, ids, log_q, reduction="none", backend=backend)
    assert out.value.isnan().tolist() == [True, False, False]
    (grad,) = torch.autograd.grad(out.loss.sum(), x)
    assert grad[0].isnan().all()
    assert grad[1:].isfinite().all()
