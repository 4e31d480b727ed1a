"""Internals of Gumbel top-k: logarithms, keys, and the selection on the host."""

import numpy as np
import pytest
import torch

from dllm_kernels.corruption import _gumbel
from dllm_kernels.corruption import _topk as op
from dllm_kernels.corruption._gumbel_topk import gumbel_topk_mask
from tests.ops.test_gumbel_topk import SHAPES, example

pytestmark = pytest.mark.indices


@pytest.mark.parametrize(("N", "D"), SHAPES)
def test_torch_and_its_host_shortcut_choose_the_same(N, D, monkeypatch):
    log_w, k, uniform = example(N, D)
    seeds = torch.arange(N)
    by_host = [gumbel_topk_mask(log_w, k, backend="torch", **kw) for kw in ({"seeds": seeds}, {"uniform": uniform})]
    monkeypatch.setattr(op, "on_host", lambda device: False)
    by_torch = [gumbel_topk_mask(log_w, k, backend="torch", **kw) for kw in ({"seeds": seeds}, {"uniform": uniform})]
    assert all(torch.equal(a, b) for a, b in zip(by_host, by_torch, strict=True))


def test_a_given_uniform_equals_the_draws_of_a_seed(backend, device):
    log_w, k, _ = (t.to(device) for t in example(6, 50))
    seeds = torch.arange(6, device=device)
    _, bits, _ = op._philox.random_bits(seeds, 6, op._philox.Layout(0, 50))
    uniform = op._rules.fine_uniform(bits)
    drawn = gumbel_topk_mask(log_w, k, seeds=seeds, backend=backend)
    assert torch.equal(gumbel_topk_mask(log_w, k, uniform=uniform, backend=backend), drawn)


def test_equal_scores_of_either_zero_tie(backend, device):
    # E = 1 at u = 1/e in the arithmetic of exact_log. Log-weights -0 and 0 then give the scores -0 and 0.
    candidates = torch.tensor(np.exp(-1.0) + np.arange(-4, 5) * 2.0**-54)
    (exact,) = torch.nonzero(-_gumbel.exact_log(candidates) == 1.0, as_tuple=True)
    u = candidates[exact[0]]
    log_w = torch.tensor([[-0.0, 0.0, -0.0]], dtype=torch.float64, device=device)
    uniform = u.repeat(1, 3).to(device)
    assert gumbel_topk_mask(log_w, 1, uniform=uniform, backend=backend).tolist() == [[True, False, False]]


def test_many_slices_of_rows_equal_one(monkeypatch):
    log_w, k, _ = example(30, 40)
    whole = gumbel_topk_mask(log_w, k, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(op, "_SLICE", 300)
    assert torch.equal(gumbel_topk_mask(log_w, k, generator=torch.Generator().manual_seed(2)), whole)


EDGES = [0, 1, 2, 2**24 - 1, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 257, 2**32 - 128, 2**32 - 2, 2**32 - 1]


def test_quick_keys_are_within_their_error_bound():
    rng = np.random.default_rng(0)
    near_one = 2**32 - 1 - rng.integers(0, 2**12, 50_000)
    draws = np.concatenate([np.repeat(EDGES, 1000), near_one, rng.integers(0, 2**32, 500_000)]).astype(np.uint32)
    log_w = rng.uniform(0, op._MILD, len(draws)).astype(np.float32)
    exact = -np.log(op._rules.fine_uniform(draws)) / np.exp(log_w.astype(np.float64))
    error = np.abs(op._keys(log_w, draws) - exact)
    assert (error <= op._ROUNDING * (0.25 + exact)).all()
    assert (error > 0).mean() > 0.9


@pytest.mark.parametrize("spread", [1, 64, 2**20, 2**32], ids=lambda n: f"{n} draws")
@pytest.mark.parametrize("steepest", [0.0, 1e-6, 3.9, 50.0])
def test_draws_equal_in_float32_are_decided_exactly(spread, steepest):
    rng = np.random.default_rng(1)
    draws = (2**32 - 1 - rng.integers(0, spread, (200, 24))).astype(np.uint32)
    log_w = (rng.random((200, 1)) * np.linspace(0, steepest, 24)).astype(np.float32)
    k = rng.integers(0, 25, 200)
    u = op._rules.fine_uniform(draws)
    expected = op.select_exact(*(torch.from_numpy(x) for x in (log_w, u, k)))
    assert op.select_of_draws(log_w, draws, k, steepest).tolist() == expected.tolist()


@pytest.mark.parametrize("u", [0.5, None])
def test_the_exact_choice_is_the_same_in_numpy(u):
    rng = np.random.default_rng(2)
    uniform = rng.random((60, 17)) if u is None else np.full((60, 17), u)
    log_w = rng.integers(-3, 4, (60, 17)).astype(np.float64)
    log_w[rng.random((60, 17)) < 0.2] = -np.inf
    k = rng.integers(0, 20, 60)
    expected = op.select_exact(*(torch.from_numpy(x) for x in (log_w, uniform, k)))
    assert op._select_exact_host(log_w, uniform, k).tolist() == expected.tolist()


def test_exact_log_is_accurate():
    g = torch.Generator().manual_seed(0)
    x = torch.cat(
        [
            torch.rand(4000, generator=g, dtype=torch.float64),
            1 + (torch.rand(4000, generator=g, dtype=torch.float64) - 0.5) * 1e-3,
            torch.exp(torch.randn(4000, generator=g, dtype=torch.float64) * 100),
            torch.tensor([2.0**-1022, 1 - 2.0**-53, 1.0, 2.0, 709.0, 2.0**-0.5, 2.0**0.5], dtype=torch.float64),
        ]
    )
    exact = np.log(x.numpy().astype(np.longdouble))
    error = np.abs(_gumbel.exact_log(x).numpy() - exact) / np.spacing(np.abs(exact).astype(np.float64))
    assert float(error[exact != 0].max()) < 2
    assert float(_gumbel.exact_log(torch.ones(1, dtype=torch.float64))) == 0.0
