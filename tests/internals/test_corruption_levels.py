"""Levels, exact counts and the two-channel corruption, compared with the oracle on equal random bits."""

import numpy as np
import pytest
import torch

from dllm_kernels import corruption
from dllm_kernels._graph import _opaque
from dllm_kernels.corruption import _philox, _rules, _seeds, corrupt_blockwise, corrupt_uniform, sample_level
from dllm_kernels.corruption._philox import Layout
from reference import corruption as reference
from tests.corruption.test_corruption_levels import MASK, V, batch, mixed, same


def drawn(seeds, L, blocks, whole_words=False):
    """Return (u of the levels, draws, words) of the rows for the reference."""
    levels, draws, words = _philox.random_bits(seeds, len(seeds), Layout(blocks, L, whole_words))
    return _rules.uniform(levels), draws, words


LEVELS = [(routine, shape) for routine in ("blockwise", "random") for shape in ((4,), (4, 1), (4, 7))]


@pytest.mark.everyday(5)
@pytest.mark.parametrize(("routine", "shape"), [("uniform", (4,)), ("uniform", (4, 1)), *LEVELS], ids=str)
def test_a_given_level_equals_the_reference(routine, shape, backend, device):
    L, block_size = 50, 8
    ids, loss_mask, seeds = batch(4, L, device)
    level = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(device)
    _, draws, words = drawn(seeds, L, 1 if routine == "uniform" else 7, routine == "random")
    u = _rules.uniform(draws)
    keywords = {"level": level, "seeds": seeds, "backend": backend}
    if routine == "uniform":
        got = corrupt_uniform(ids, loss_mask, MASK, **keywords)
        expected = reference.corrupt_uniform(ids, loss_mask, MASK, level=level, uniform=u)
    elif routine == "blockwise":
        got = corrupt_blockwise(ids, loss_mask, MASK, block_size, **keywords)
        fine = _rules.fine_uniform(draws)
        expected = reference.corrupt_blockwise(ids, loss_mask, MASK, block_size, level=level, uniform=fine)
    else:
        got = corruption.corrupt_uniform_random(ids, loss_mask, V, block_size, **keywords)
        tokens = _rules.token(words, V)
        expected = reference.corrupt_uniform_random(
            ids, loss_mask, V, block_size, level=level, uniform=u, tokens=tokens
        )
    assert same(got, expected)


@pytest.mark.everyday(4)
@pytest.mark.parametrize(("B", "L"), [(1, 1), (3, 50), (2, 129)])
@pytest.mark.parametrize("with_level", [False, True])
def test_exact_equals_the_reference(B, L, with_level, backend, device):
    ids, loss_mask, seeds = batch(B, L, device)
    u, draws, _ = drawn(seeds, L, 1)
    level = torch.rand(B, device=device) if with_level else None
    expected = reference.corrupt_uniform(
        ids, loss_mask, MASK, 0.05, level=level, exact=True, t_uniform=u[:, 0], uniform=_rules.fine_uniform(draws)
    )
    got = corrupt_uniform(ids, loss_mask, MASK, 0.05, level=level, exact=True, seeds=seeds, backend=backend)
    assert same(got, expected)


def test_equal_draws_go_to_the_lower_index():
    from dllm_kernels.corruption._topk import select_largest

    draws = np.array([[5, 7, 7, 7, 2**32 - 1]], np.uint32)
    choosable = np.array([[True, True, False, True, True]])
    for k, expected in ((0, []), (1, [4]), (2, [1, 4]), (3, [1, 3, 4]), (4, [0, 1, 3, 4])):
        by_numpy = select_largest(draws, choosable, np.array([k]))
        by_torch = select_largest(
            torch.from_numpy(draws.astype(np.int64)), torch.from_numpy(choosable), torch.tensor([k])
        )
        assert by_numpy[0].nonzero()[0].tolist() == expected
        assert by_torch[0].nonzero().flatten().tolist() == expected


METHODS = ["uniform", "antithetic", "stratified"]


@pytest.mark.covering(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("B", [1, 2, 7, 64, 300])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.2, 0.7)])
def test_sample_level_equals_the_reference(method, B, low, high, backend, device):
    generator = torch.Generator().manual_seed(9)
    got = sample_level(B, method=method, low=low, high=high, generator=generator, device=device, backend=backend)
    seed = _seeds.resolve_seed(torch.device("cpu"), B, torch.Generator().manual_seed(9), None)
    u = _rules.uniform(_philox.random_bits(seed, B, Layout(1, 0))[0])[:, 0]
    expected = reference.sample_level(B, method, low, high, uniform=u)
    assert got.dtype == torch.float32
    assert got.shape == (B,)
    # float32 rounds u + b / B, the product and the sum
    assert float((got.cpu().double() - expected).abs().max()) <= 3 * 2.0**-25


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("source", ["seeds", "generator"])
def test_sample_level_is_the_same_on_every_path(method, source, device, monkeypatch):
    from dllm_kernels.corruption import _corrupt as ops

    def run(backend):
        keywords = {"seeds": torch.arange(50, device=device)} if source == "seeds" else {}
        keywords = keywords or {"generator": torch.Generator().manual_seed(2), "device": device}
        return sample_level(50, method=method, low=0.1, high=0.9, backend=backend, **keywords)

    kernel, host = run("triton"), run("torch")
    monkeypatch.setattr(ops, "on_host", lambda device: False)
    assert torch.equal(kernel, run("torch"))
    assert torch.equal(kernel, host)


@pytest.mark.parametrize(("B", "L"), [(1, 1), (4, 60)])
@pytest.mark.parametrize("flat", [True, False])
def test_mix_equals_the_reference(B, L, flat, backend, device):
    ids, loss_mask, seeds = batch(B, L, device)
    ids[:, ::5] = MASK
    g = torch.Generator().manual_seed(4)
    p, q = (torch.rand(B, generator=g).to(device) / 2 for _ in range(2))
    p[-1], q[-1] = 0.0, 1.0
    if not flat:
        p, q = p[:, None], q[:, None]
    _, draws, words = drawn(seeds, L, 1, whole_words=True)
    expected = reference.corrupt_mix(
        ids.cpu(), loss_mask.cpu(), MASK, V, mask_prob=p.cpu(), uniform_prob=q.cpu(),
        uniform=_rules.uniform(draws).cpu(), tokens=_rules.token(words, V - 2).cpu(),
    )  # fmt: skip
    got = mixed(ids, loss_mask, mask_prob=p, uniform_prob=q, seeds=seeds, backend=backend)
    assert same([x.cpu() for x in got], expected)


def test_mix_leaves_rows_with_too_large_a_sum_unchanged_off_the_cpu(backend, device, monkeypatch):
    from dllm_kernels.corruption import _corrupt as ops

    monkeypatch.setattr(ops, "_check_sum", lambda p, q: None)  # as on a GPU
    ids, loss_mask, seeds = batch(3, 50, device)
    p, q = torch.tensor([0.9, 0.5, float("nan")], device=device), torch.full((3,), 0.5, device=device)
    noisy, noise = mixed(ids, loss_mask, mask_prob=p, uniform_prob=q, seeds=seeds, backend=backend)
    assert noise.any(1).tolist() == [False, True, False]
    assert torch.equal(noisy[::2], ids[::2])


@pytest.mark.parametrize("on_request", [False, True])
def test_mix_checks_the_sums_on_request(on_request, monkeypatch):
    from dllm_kernels.corruption import _corrupt as ops

    reads = []
    monkeypatch.setattr(ops, "_check_sum", lambda p, q: reads.append(1))
    ids, loss_mask, seeds = (t.to("meta") for t in batch(2, 5))
    half = torch.full((2,), 0.5, device="meta")
    monkeypatch.setattr(ops, "on_host", lambda device: False)
    monkeypatch.setattr(_opaque, "traced", lambda x: False)
    mixed(ids, loss_mask, mask_prob=half, uniform_prob=half, seeds=seeds, backend="torch", check=on_request)
    assert len(reads) == int(on_request)
