"""Generators, seeds and backends are checked even if nothing is drawn from them."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dllm_kernels import corruption as c
from dllm_kernels import ops, policy_views
from dllm_kernels.integrations.transformers import pack_labels
from dllm_kernels.losses import sample_prefix
from tests.support.routines import FIRSTS, ROUTINES

B, L, V, D = 2, 4, 9, 3
IDS, ON, LEVEL = torch.zeros(B, L, dtype=torch.long), torch.ones(B, L, dtype=torch.bool), torch.full((B,), 0.5)
H, W = torch.randn(B, L, D), torch.randn(V, D)
STEPS = torch.arange(L).expand(B, L)
CALLS = {
    **{name: lambda case=case, **o: case(IDS, ON, **o) for name, case in ROUTINES.items()},
    "no columns": lambda **o: c.corrupt_uniform(IDS[:, :0], ON[:, :0], 8, **o),
    "all masked, no columns": lambda **o: c.corrupt_all_masked(IDS[:, :0], ON[:, :0], 8, **o),
    "sample_level": lambda **o: c.sample_level(B, method="stratified", low=0.5, high=0.5, **o),
    "batched_gumbel_topk": lambda **o: c.batched_gumbel_topk(ON.float(), torch.zeros(B, dtype=torch.long), **o),
    "gumbel_topk_mask, no columns": lambda **o: ops.gumbel_topk_mask(ON[:, :0].float(), 0, **o),
    "policy_views, full": lambda **o: policy_views(IDS, ON, 8, "full", **o),
    "policy_views, trace": lambda **o: policy_views(IDS, ON, 8, "trace", step_map=STEPS, **o),
    "linear_sample, greedy": lambda **o: ops.linear_sample(H, W, temperature=0, **o),
}
SEEDS = torch.arange(B)
calls = pytest.mark.parametrize("name", CALLS)


def raises(error, message, function, *args, **options):
    with pytest.raises(error, match="^" + re.escape(message)):
        function(*args, **options)


@calls
def test_sources_are_checked_where_nothing_is_drawn(name):
    call, generator = CALLS[name], torch.Generator()
    call(generator=generator)
    call(seeds=SEEDS)
    raises(TypeError, "generator must be a torch.Generator or None, got int", call, generator=3)
    raises(TypeError, "seeds must be a torch.Tensor, got list", call, seeds=[1, 2])
    raises(ValueError, "seeds must have dtype int64, got int32", call, seeds=SEEDS.int())
    both = "generator and seeds exclude each other: expected one of them, got both"
    raises(ValueError, both, call, generator=generator, seeds=SEEDS)
    raises(ValueError, "backend must be one of auto, triton, torch, got 'foo'", call, backend="foo")
    if not name.startswith("linear_sample"):  # its seeds may have the shape of any leading dimensions
        raises(ValueError, "seeds must have shape (2,), one per row, got (3,)", call, seeds=torch.arange(3))
    else:
        raises(ValueError, "seeds must have the shape of leading dimensions", call, seeds=torch.arange(3))


@pytest.mark.parametrize(
    "call",
    [
        lambda **o: c.corrupt_uniform(IDS[:0], ON[:0], 8, **o),
        lambda **o: c.gumbel_topk(ON[0].float(), 0, **o),
        lambda **o: ops.gumbel_topk_mask(ON[:0].float(), 0, **o),
    ],
    ids=["no rows", "one row", "no rows of top-k"],
)
def test_other_calls_without_draws(call):
    raises(TypeError, "generator must be a torch.Generator or None, got int", call, generator=3)
    raises(ValueError, "backend must be one of auto, triton, torch, got 'foo'", call, backend="foo")


@pytest.mark.parametrize(
    "call",
    [lambda **o: c.sample_level(B, **o), lambda **o: sample_prefix((B, 3), 4, 2.0, **o)],
    ids=["level", "prefix"],
)
def test_a_device_without_an_index_is_that_of_the_seeds(call):
    assert torch.equal(call(seeds=SEEDS, device="cpu:0"), call(seeds=SEEDS))
    raises(ValueError, "seeds must be on meta like the tensors, got cpu", call, seeds=SEEDS, device="meta")


def test_seeds_on_a_gpu_are_on_the_device_cuda():
    with FakeTensorMode():
        seeds = torch.zeros(B, dtype=torch.int64, device="cuda:0")
        assert c.sample_level(B, seeds=seeds, device="cuda").device == seeds.device
        raises(ValueError, "seeds must be on cuda:1 like", c.sample_level, B, seeds=seeds, device="cuda:1")


@pytest.fixture
def dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda t: distribute_tensor(t, mesh, [Replicate()])
    torch.distributed.destroy_process_group()


def test_dtensors_are_refused_in_our_words(dtensor):
    half, seeds, log_w = dtensor(LEVEL), dtensor(SEEDS), dtensor(torch.zeros(B, L))
    message = "{} must be a plain torch.Tensor, got DTensor; pass its to_local(), with seeds for its rows"
    for name, call in CALLS.items():
        if name.startswith("linear_sample"):
            assert torch.equal(call(seeds=seeds).ids, call(seeds=SEEDS).ids)
        else:
            raises(TypeError, message.format("seeds"), call, seeds=seeds)
        raises(ValueError, "seeds must have dtype int64, got int32", call, seeds=SEEDS.int())
    for case in FIRSTS.values():
        given = {"input_ids": IDS, "loss_mask": ON} | case.constants() | case.inputs(IDS)
        tensors = {"level": LEVEL, "segment_ids": IDS, "start": SEEDS} | given
        for name in tensors.keys() & case.parameters.keys() - case.constants().keys():
            changed = given | {name: dtensor(tensors[name])}
            raises(TypeError, message.format(name), getattr(c, case.routine), **changed)
    raises(TypeError, message.format("level"), policy_views, IDS, ON, 8, "elbo", level=half)
    raises(TypeError, message.format("log_w"), c.batched_gumbel_topk, log_w, SEEDS)
    raises(TypeError, message.format("k"), c.batched_gumbel_topk, torch.zeros(B, L), seeds)
    raises(TypeError, message.format("uniform"), c.batched_gumbel_topk, torch.zeros(B, L), SEEDS, uniform=log_w)
    raises(TypeError, message.format("noise_mask"), c.complementary, dtensor(ON), ON)
    raises(TypeError, message.format("loss_mask"), c.complementary, ON, dtensor(ON))
    masks = {"loss_mask": ON, "noise_mask": ON, "p_mask": torch.ones(B, L)}
    for name, t in masks.items():
        raises(TypeError, message.format(name), pack_labels, IDS, **masks | {name: dtensor(t)})
    raises(TypeError, message.format("input_ids"), pack_labels, dtensor(IDS), **masks)


def test_the_mask_id_of_views_is_not_negative():
    """``test_corruption.py`` has that of the routines."""
    for bad in (-1, -100):
        raises(ValueError, f"mask_token_id must not be negative, got {bad}", policy_views, IDS, ON, bad, "full")
