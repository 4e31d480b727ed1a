"""Corruption routines: equality with the reference for equal draws, equal bits on every path, and edge cases."""

import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import reference
from dllm_kernels import corruption
from tests.support.parity import same
from tests.support.uniforms import draws

pytestmark = pytest.mark.indices

MASK, V = 126_336, 126_464


def batch(B, L, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (B, L), generator=g)
    loss_mask = torch.rand(B, L, generator=g) < 0.7
    return ids.to(device), loss_mask.to(device), torch.randint(-(2**62), 2**62, (B,), generator=g).to(device)


def make_levels(ids, block_size=None):
    """Return levels per row, or per block, including 0 and 1 if there are enough of them.

    The levels of a row do not depend on its batch. They are computed on the CPU, because a GPU replaces a division by a
    constant by a product with its reciprocal, which changes the last bit.
    """
    n = 1 if block_size is None else max(-(-ids.shape[1] // block_size), 1)
    first = ((ids.cpu().sum(1, keepdim=True) + 4) % 11).float() / 10
    return ((first + torch.arange(n, device="cpu") * 0.3) % 1.1).clamp(max=1)


class Routine:
    """A routine of the package with its options, called as ``(ids, mask, **source of the draws)``.

    ``inputs`` computes the further tensor arguments from the ids, on the CPU. A routine with two outputs gets a
    third one, of ones, so that tests can treat all routines alike.
    """

    def __init__(self, name, *args, inputs=lambda ids: {}, **options):
        self.name, self.args, self.inputs, self.options = name, args, inputs, options

    def launch(self, ids, mask, **kw):
        return getattr(corruption, self.name)(ids, mask, *self.args, **self.options, **kw)

    def __call__(self, ids, mask, **kw):
        return three(self.launch(ids, mask, **self.inputs_on(ids), **kw))

    def inputs_on(self, ids):
        return {name: t.to(ids.device) for name, t in self.inputs(ids).items()}

    def oracle(self, ids, mask, seeds):
        """Compute the outputs of the oracle, on the CPU, for one seed per row or an int, the seed of the batch."""
        function, L = getattr(reference, self.name), ids.shape[1]
        names = inspect.signature(function).parameters
        given = inspect.signature(function).bind(ids, mask, *self.args, **self.options, **self.inputs(ids)).arguments
        size = 1 if "segment_ids" in given else given.get("block_size") or L
        drawn = draws(seeds, len(ids), -(-L // min(size, L)), L, "tokens" in names)
        of = {"t_uniform": drawn.levels, "m_uniform": drawn.levels, "uniform": drawn.coins}
        if given.get("exact") or "m_uniform" in names:
            of["uniform"] = drawn.fine
        if "tokens" in names:
            of["tokens"] = drawn.token(given["vocab_size"] - 2 * (self.name == "corrupt_mix"))
        return three(function(**given, **{name: t for name, t in of.items() if name in names}))


def three(out):
    return out if len(out) == 3 else (*out, torch.ones(out[0].shape, device=out[0].device))


def uniform(*args, **options):
    return Routine("corrupt_uniform", MASK, *args, **options)


def blockwise(*args, **options):
    return Routine("corrupt_blockwise", MASK, *args, **options)


def tokens(*args, **options):
    return Routine("corrupt_uniform_random", V, *args, **options)


def row_levels(ids):
    return {"level": make_levels(ids)}


def block_levels(ids):
    return {"level": make_levels(ids, 6)}


def mix_probabilities(ids):
    return {"mask_prob": make_levels(ids)[:, 0] / 2, "uniform_prob": 0.5 - make_levels(ids) / 3}


def documents(ids):
    """Return segment ids: runs, ids that occur again later, and positions in no segment."""
    return {"segment_ids": ids // 7 % 5 - 1}


ROUTINES = {
    "uniform": uniform(),
    "uniform, block 7": uniform(block_size=7),
    "sequence": blockwise(),
    "block 1": blockwise(1),
    "block 5": blockwise(5),
    "block 32": blockwise(32),
    "steep": blockwise(8, 0.0, 1e-3),
    "tokens": tokens(),
    "tokens, block 1": tokens(1),
    "tokens, block 6": tokens(6, 0.2),
    "exact": uniform(exact=True),
    "levels": uniform(inputs=row_levels),
    "levels, block 6": uniform(block_size=6, inputs=block_levels),
    "exact levels": uniform(exact=True, inputs=row_levels),
    "sequence levels": blockwise(inputs=row_levels),
    "block levels": blockwise(6, inputs=block_levels),
    "token levels": tokens(6, inputs=block_levels),
    "mix": Routine("corrupt_mix", MASK, V, inputs=mix_probabilities),
}
# Enough for tests whose result does not depend on the block size.
FEW = [ROUTINES[name] for name in ("uniform", "block 5", "tokens, block 6")]
some_routines = pytest.mark.parametrize("routine", FEW, ids=["uniform", "block 5", "tokens, block 6"])
every_routine = pytest.mark.parametrize("routine", ROUTINES.values(), ids=ROUTINES.keys())
ENDS = {
    "levels of 0 and 1": lambda ids: {"level": (torch.arange(len(ids)) % 2).float()},
    "a level near 0": lambda ids: {"level": torch.full((len(ids),), 0.01)},
}
# More options, for comparisons with the oracle and of code paths.
MORE = ROUTINES | {
    "eps": uniform(0.05, exact=True),
    "one level per row": uniform(block_size=7, inputs=lambda ids: {"level": make_levels(ids)[:, 0]}),
    "segments": uniform(0.05, inputs=documents),
    "segment levels": uniform(inputs=lambda ids: documents(ids) | {"level": make_levels(ids, 1)}),
    "a block beyond the row": blockwise(10_000, 0.5, 0.05),
    "flat": blockwise(4, 0.0, 1.0),
    "level of blocks": blockwise(7, inputs=row_levels),
    "tokens beyond the row": tokens(10_000),
    **{f"{n} tokens": Routine("corrupt_uniform_random", n, 6) for n in (1, 7, 2**22, 2**22 + 1, 2**31)},
    "all masked": Routine("corrupt_all_masked", MASK),
    **{f"exact, {name}": uniform(exact=True, inputs=level) for name, level in ENDS.items()},
    **{f"blocks, {name}": blockwise(8, inputs=level) for name, level in ENDS.items()},
    "sequence, a level of 0": blockwise(inputs=ENDS["levels of 0 and 1"]),
    "tokens, levels of 0 and 1": tokens(8, inputs=ENDS["levels of 0 and 1"]),
    "eps of 1": uniform(1, exact=True),
    "eps of 1, blocks": blockwise(7, 1.0),
    "eps of 1, tokens": tokens(7, 1),
}
more_routines = pytest.mark.parametrize("routine", MORE.values(), ids=MORE.keys())


def seed_of_a_call(generator):
    """Draw the seed of a call; guaranteed to stored states of generators."""
    return int(torch.randint(-(2**63), 2**63 - 1, (), generator=generator))


@pytest.mark.covering(2)
@more_routines
@pytest.mark.parametrize("shape", [(1, 1), (3, 50), (2, 129)], ids=str)
@pytest.mark.parametrize("source", ["seeds", "generator", "default generator"])
def test_equals_the_oracle_on_the_draws_of_numpy(routine, shape, source, backend, device):
    """The choice of a row depends on its seed, and without seeds each call draws one from its generator."""
    ids, loss_mask, seeds = batch(*shape)
    ids[:, ::5] = MASK
    on_device = [t.to(device) for t in (ids, loss_mask)]
    if source == "seeds":
        got = [routine(*on_device, seeds=seeds.to(device), backend=backend)]
        expected = [routine.oracle(ids, loss_mask, seeds)]
    else:
        generator = torch.Generator().manual_seed(1) if source == "generator" else None
        torch.manual_seed(1)
        got = [routine(*on_device, generator=generator, backend=backend) for _ in range(2)]
        again = torch.Generator(device if generator is None else "cpu").manual_seed(1)
        expected = [routine.oracle(ids, loss_mask, seed_of_a_call(again)) for _ in range(2)]
    for ours, theirs in zip(got, expected, strict=True):
        assert same([t.cpu() for t in ours], theirs)
        assert all(t.is_contiguous() for t in ours)


@pytest.mark.gpu
@every_routine
def test_the_same_on_cpu_and_gpu(routine):
    ids, loss_mask, seeds = batch(8, 500)
    on_cpu = [routine(ids, loss_mask, seeds=seeds), routine(ids, loss_mask, generator=torch.Generator().manual_seed(3))]
    ids, loss_mask, seeds = ids.cuda(), loss_mask.cuda(), seeds.cuda()
    on_gpu = [routine(ids, loss_mask, seeds=seeds), routine(ids, loss_mask, generator=torch.Generator().manual_seed(3))]
    assert all(same(a, [x.cpu() for x in b]) for a, b in zip(on_cpu, on_gpu, strict=True))


@some_routines
def test_outputs_are_their_own_memory(routine, backend, device):
    ids, loss_mask, seeds = batch(2, 20, device)
    nothing = torch.zeros_like(loss_mask)
    storages = {
        t.untyped_storage().data_ptr() for t in (ids, nothing, *routine(ids, nothing, seeds=seeds, backend=backend))
    }
    assert len(storages) == 5


@every_routine
def test_a_stored_seed_keeps_its_mask(routine):
    # Frozen: a change here breaks every run that stored a seed. The mask is stored as bits, the first position highest.
    _, noise, _ = routine(torch.zeros(1, 32, dtype=torch.int64), torch.ones(1, 32), seeds=torch.tensor([12345]))
    value = int("".join(str(int(n)) for n in noise[0]), 2)
    name = next(name for name, r in ROUTINES.items() if r is routine)
    assert f"{value:08x}" == STORED[name]


STORED = {
    "uniform": "ffedbfff",
    "uniform, block 7": "fe093dc0",
    "sequence": "bff7d3bf",
    "block 1": "8650be54",
    "block 5": "b852407d",
    "block 32": "bff7d3bf",
    "steep": "3f010f03",
    "tokens": "fb7ffff7",
    "tokens, block 1": "877bbfc4",
    "tokens, block 6": "f93fcd83",
    "exact": "bff7d3bf",
    "levels": "40292fe7",
    "levels, block 6": "43afece7",
    "exact levels": "b656c018",
    "sequence levels": "1656501b",
    "block levels": "16dfc11f",
    "token levels": "837fc1c7",
    "mix": "917bddc7",
}


# Levels and lengths: both clamps, rounding half to even (2.5, 3.5, 0.5, 1.5), and float32 products that round to a
# half.
COUNTS = [
    (0.5, 5), (0.5, 7), (0.5, 1), (0.5, 3), (0.25, 2), (0.75, 2), (0.001, 4), (0.001, 1), (1.0, 9), (0.9999, 8),
    (0.3, 5), (0.7, 5), (0.1, 5), (0.49999997, 5), (0.50000006, 5), (0.83333331, 3), (0.5, 4095), (0.99999994, 131071),
]  # fmt: skip


@pytest.mark.parametrize("in_sequence", [True, False])
def test_counts_round_half_to_even_and_clamp(in_sequence, backend, device):
    for m, n in COUNTS[: None if backend == "torch" else -1]:
        ids, level = torch.zeros(1, n, dtype=torch.int64, device=device), torch.tensor([m], device=device)
        seeds, block_size = torch.tensor([3], device=device), None if in_sequence else n
        _, noise, _ = corruption.corrupt_blockwise(
            ids, None, MASK, block_size, level=level, seeds=seeds, backend=backend
        )
        assert int(noise.sum()) == reference.corruption.number_to_mask(level[0].cpu(), n, at_least=int(in_sequence))


@pytest.mark.parametrize("half_life_ratio", [1e-300, 1e-30, 1e30])
def test_extreme_biases_still_choose_exactly_k(half_life_ratio, backend, device):
    ids, _, seeds = batch(4, 24, device)
    _, noise, p = corruption.corrupt_blockwise(
        ids, None, MASK, 8, half_life_ratio=half_life_ratio, seeds=seeds, backend=backend
    )
    assert torch.equal(noise.view(4, 3, 8).sum(2), (p[:, ::8] * 8).round().long())
    if half_life_ratio < 1:  # so steep that the last positions of a block win
        assert (noise.view(4, 3, 8).int().diff(dim=2) >= 0).float().mean() > 0.9


def test_threads_draw_separately_also_if_the_first_draw_is_in_inference_mode():
    ids, mask, seeds = batch(1, 2000)
    expected = [corruption.corrupt_uniform(ids, mask, MASK, seeds=seeds + i) for i in range(8)]
    with_generator = corruption.corrupt_uniform(ids, mask, MASK, generator=torch.Generator().manual_seed(3))
    results = {}

    def draw(i):
        for mode in (True, False):
            with torch.inference_mode(mode):
                generator = torch.Generator().manual_seed(3)
                results[i, mode] = corruption.corrupt_uniform(ids, mask, MASK, generator=generator)
        for _ in range(50):
            results[i] = corruption.corrupt_uniform(ids, mask, MASK, seeds=seeds + i)

    threads = [threading.Thread(target=draw, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 24
    for i, found in results.items():
        assert same(found, with_generator if isinstance(i, tuple) else expected[i])


@pytest.mark.everyday(1)
def test_levels_lie_in_their_range(backend, device):
    ids, loss_mask, _ = batch(64, 8, device)
    seeds = torch.arange(64, device=device)
    for eps in (0.0, 0.001, 0.9, 0.999999):
        for routine in (corruption.corrupt_uniform, corruption.corrupt_blockwise):
            p = routine(ids, loss_mask, MASK, eps=eps, seeds=seeds, backend=backend)[2]
            assert float(p.min()) >= np.float32(eps)
            assert float(p.max()) <= 1


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_empty_batches(shape, backend, device):
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    loss_mask = torch.zeros(shape, dtype=torch.bool, device=device)
    of_segments = uniform(segment_ids=ids)
    for routine in (*ROUTINES.values(), of_segments):
        for start in (None, ids.new_zeros(shape[0])):
            outputs = routine(ids, loss_mask, start=start, backend=backend)
            assert [t.shape for t in outputs] == [ids.shape] * 3
            assert [t.dtype for t in outputs] == [torch.int64, torch.bool, torch.float32]
    assert corruption.corrupt_all_masked(ids, loss_mask, MASK, backend=backend)[1].shape == shape


NO_FMA = """
from tools import launches
functions = launches.corrupt, launches.with_level, launches.topk
calls = [call for call in launches.real() if call.func in functions]
found = launches.specimens("sm_90", lambda: iter(calls))
found = {name: s for name, s in found.items() if s.kernel in ("corrupt_topk", "gumbel_topk")}
assert {s.kernel for s in found.values()} == {"corrupt_topk", "gumbel_topk"}
for name, specimen in found.items():
    ptx = specimen.compile().asm["ptx"]
    assert "fma.rn.f" not in ptx, name
    assert "exact" in name or ("mul.rn.f64" in ptx and "div.rn.f64" in ptx), name  # an exact share compares bits alone
"""


@pytest.mark.exhaustive
def test_a_product_and_a_sum_are_rounded_separately():
    # The masks agree between devices only if the compiler rounds every step. Kernels in this process may be
    # interpreted.
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", NO_FMA], env=environment, check=True, cwd=Path(__file__).parents[2])


@pytest.mark.gpu
@every_routine
def test_one_launch_and_no_host_sync(routine):
    """``tests/support/mock_gpu_checks.py`` counts launches and syncs on a mock GPU, too."""
    ids, loss_mask, seeds = batch(8, 512, "cuda")
    inputs = routine.inputs_on(ids)
    routine.launch(ids, loss_mask, **inputs, seeds=seeds)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            routine.launch(ids, loss_mask, **inputs, seeds=seeds)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    launches = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launches) == 1, launches


SIGNATURES = {
    "gumbel_topk": ["log_w", "k"],
    "batched_gumbel_topk": ["log_w", "k", "generator"],
    "corrupt_uniform": ["input_ids", "loss_mask", "mask_token_id", "eps", "generator"],
    "corrupt_blockwise": [
        "input_ids", "loss_mask", "mask_token_id", "block_size", "eps", "half_life_ratio", "generator",
    ],
    "corrupt_uniform_random": ["input_ids", "loss_mask", "vocab_size", "block_size", "eps", "generator"],
    "corrupt_all_masked": ["input_ids", "loss_mask", "mask_token_id"],
}  # fmt: skip
DEFAULTS = {"eps": 1e-3, "half_life_ratio": 0.25, "block_size": None, "generator": None}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_documented(name):
    parameters = inspect.signature(getattr(corruption, name)).parameters
    positional = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == SIGNATURES[name]
    assert all(p.default == DEFAULTS[p.name] for p in positional if p.default is not p.empty)
    assert all(p.default is not p.empty for p in parameters.values() if p.kind is p.KEYWORD_ONLY)


IDS, LOSS, _ = batch(2, 6)
# Arguments that replace valid ones; the routines with such an argument; the error message. ``test_sources.py`` has
# sources of the draws.
BAD = [
    ({"input_ids": [[1]]}, "mask", TypeError, "input_ids must be a torch.Tensor, got list"),
    ({"input_ids": IDS.float()}, "mask", ValueError, "input_ids must have dtype int64, .* got float32"),
    ({"input_ids": IDS[0]}, "mask", ValueError, r"input_ids must have shape \[B, L\], got \(6,\)"),
    ({"loss_mask": [1]}, "mask", TypeError, "loss_mask must be a torch.Tensor, got list"),
    ({"loss_mask": LOSS[:, :3]}, "mask", ValueError, r"loss_mask must have shape \(2, 6\) .* got \(2, 3\)"),
    ({"loss_mask": LOSS.to("meta")}, "mask", ValueError, "loss_mask must be on cpu like input_ids, got meta"),
    ({"loss_mask": LOSS.to(torch.complex64)}, "mask", ValueError, "loss_mask must have dtype bool, .* got complex64"),
    ({"loss_mask": None}, "uniform", TypeError, "loss_mask must be a torch.Tensor, got NoneType"),
    ({"mask_token_id": 1.5}, "mask", TypeError, "mask_token_id must be an int, got float"),
    ({"mask_token_id": 2**63}, "mask", ValueError, "mask_token_id must fit the int64 of input_ids, .* got 9223"),
    ({"eps": 1.001}, "uniform", ValueError, r"eps must lie in \[0, 1\], got 1.001"),
    ({"eps": -1e-3}, "blockwise", ValueError, r"eps must lie in \[0, 1\], got -0.001"),
    ({"eps": float("nan")}, "random", ValueError, r"eps must lie in \[0, 1\], got nan"),
    ({"eps": "small"}, "uniform", TypeError, "eps must be a float, got str"),
    ({"half_life_ratio": 0}, "blockwise", ValueError, "half_life_ratio must be above 0, got 0"),
    ({"half_life_ratio": float("nan")}, "blockwise", ValueError, "half_life_ratio must be above 0, got nan"),
    ({"half_life_ratio": None}, "blockwise", TypeError, "half_life_ratio must be a float, got NoneType"),
    ({"block_size": 0}, "blockwise", ValueError, "block_size must be at least 1, got 0"),
    ({"block_size": 2.0}, "random", TypeError, "block_size must be an int, got float"),
    ({"vocab_size": 0}, "random", ValueError, "vocab_size must be at least 1, got 0"),
    ({"vocab_size": 2**31 + 1}, "random", ValueError, r"vocab_size must be at most 2\*\*31, got 2147483649"),
    ({"input_ids": IDS.to(torch.int16)}, "random", ValueError, "vocab_size - 1 must fit the int16 of input_ids"),
]
CALLS = {
    "uniform": (corruption.corrupt_uniform, {"mask_token_id": MASK}),
    "blockwise": (corruption.corrupt_blockwise, {"mask_token_id": MASK}),
    "all": (corruption.corrupt_all_masked, {"mask_token_id": MASK}),
    "random": (corruption.corrupt_uniform_random, {"vocab_size": V}),
}
GROUPS = {"mask": ("uniform", "blockwise", "all")}


@pytest.mark.parametrize(("arguments", "group", "error", "message"), BAD)
def test_errors(arguments, group, error, message):
    for name in GROUPS.get(group, (group,)):
        call, good = CALLS[name]
        with pytest.raises(error, match=message):
            call(**({"input_ids": IDS, "loss_mask": LOSS} | good | arguments))


def test_a_default_device_changes_nothing():
    ids, mask, seeds = batch(3, 11)
    for routine in FEW:
        expected = routine(ids, mask, seeds=seeds)
        with torch.device("meta"):
            got = routine(ids, mask, seeds=seeds)
        assert all(torch.equal(x, y) for x, y in zip(expected, got, strict=True))


def test_all_masked_is_called_like_the_others():
    ids, mask, seeds = batch(2, 5)
    expected = corruption.corrupt_all_masked(ids, mask, MASK)
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    for inputs in ({"seeds": seeds}, {"generator": generator}):
        got = corruption.corrupt_all_masked(ids, mask, MASK, **inputs)
        assert all(torch.equal(x, y) for x, y in zip(expected, got, strict=True))
    assert torch.equal(generator.get_state(), state)


def test_numbers_may_come_from_numpy():
    ids, mask, seeds = batch(2, 9)
    inputs = corruption.corrupt_blockwise(ids, mask, MASK, np.int64(4), np.float32(0.25), np.float64(0.5), seeds=seeds)
    expected = corruption.corrupt_blockwise(ids, mask, MASK, 4, 0.25, 0.5, seeds=seeds)
    assert all(torch.equal(x, y) for x, y in zip(expected, inputs, strict=True))
    inputs = corruption.corrupt_uniform_random(ids, mask, np.int64(7), np.int32(4), seeds=seeds)
    expected = corruption.corrupt_uniform_random(ids, mask, 7, 4, seeds=seeds)
    assert all(torch.equal(x, y) for x, y in zip(expected, inputs, strict=True))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_an_empty_batch_does_not_hide_an_unknown_backend(shape):
    ids = torch.zeros(shape, dtype=torch.long)
    for routine in (*FEW, lambda *a, **kw: corruption.corrupt_all_masked(*a, MASK, **kw)):
        assert [t.shape for t in routine(ids, ids > 0)] == [shape] * 3
        with pytest.raises(ValueError, match="backend must be one of auto, triton, torch, got 'cuda'"):
            routine(ids, ids > 0, backend="cuda")


def test_a_token_of_1_masks(device):
    """By default, Triton passes an integer equal to 1 as a constant."""
    ids, mask, seeds = batch(2, 9, device)
    for routine in (corruption.corrupt_uniform, corruption.corrupt_blockwise):
        kernel = routine(ids, mask, 1, seeds=seeds, backend="triton")
        plain = routine(ids, mask, 1, seeds=seeds, backend="torch")
        assert all(torch.equal(x, y) for x, y in zip(kernel, plain, strict=True))
