"""Chunks of the linear ops: their number of rows, their accumulation, their memory."""

import math
from types import SimpleNamespace

import pytest
import torch

from benchmarks.measure import peak_memory
from dllm_kernels.backends.torch import _blocks
from dllm_kernels.ops import linear_token_nll, weighted_linear_nll
from dllm_kernels.rows import _active_rows, _chunks
from tests.conftest import DEVICE
from tests.ops.test_linear_nll import NAN, inputs, oracle
from tests.support.memory import copied_by_products
from tests.support.parity import value_and_grads
from tests.support.rows import HEAD_PATHS, on_head_path

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ROOM = 10_000  # rows of a chunk that fit into memory, more than any chunk has


@pytest.fixture(params=HEAD_PATHS)
def path(request, monkeypatch):
    return on_head_path(request.param, monkeypatch)


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


def test_a_chunk_has_at_least_one_row_and_whole_tiles():
    assert _active_rows.choose_chunk(10_000, 1000, 64, True, 132, ROOM) % 128 == 0
    assert _active_rows.choose_chunk(0, 1000, 64, True, None, ROOM) >= 1


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


@pytest.mark.everyday(1)
@pytest.mark.skipif(DEVICE != "cpu", reason="counts the allocations of the CPU")
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("form", ["weighted", "rows"])
@pytest.mark.parametrize("trains_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory_is_one_chunk(dtype, trains_head, form, monkeypatch):
    """Neither ``[N, V]`` nor a float32 copy of a chunk exists at any time, forward or backward."""
    monkeypatch.undo()  # poisoning fresh memory allocates nothing, but takes time
    N, V, D, chunk = 1024, 16384, 8, 512
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(N, D).to(dtype).requires_grad_(),
        torch.randn(V, D).to(dtype).requires_grad_(trains_head),
    )
    bias = torch.zeros(V, dtype=dtype, requires_grad=trains_head)
    targets, weights = torch.randint(0, V, (N,)), (torch.arange(N) % 3 != 0).float()

    def run(_):
        if form == "weighted":
            weighted_linear_nll(hidden, weight, targets, weights, bias=bias, chunk_size=chunk).loss.backward()
        else:
            linear_token_nll(
                hidden, weight, targets, bias=bias, active=weights != 0, chunk_size=chunk
            ).nll.sum().backward()
        hidden.grad = weight.grad = bias.grad = None

    run(0)
    logits = chunk * V * dtype.itemsize
    grads = 2 * N * D * 4 + (V * D + V) * (4 + 2 * dtype.itemsize) * trains_head
    threads, size = _blocks.partition(chunk, V, torch.float32, hidden.is_cpu)
    slab = 4 * chunk * _chunks.SLAB  # of the gradient, in float32 for the product that sums grad_weight
    blocks = max(threads * size * V * 4, slab if dtype != torch.float32 else 0)
    copies = copied_by_products(chunk, V, D, dtype)
    assert logits <= peak_memory(run, "cpu") <= logits + grads + copies + blocks + 32 * N
    assert grads + blocks + 32 * N < chunk * V * 4  # so a float32 copy of the chunk would exceed the bound
