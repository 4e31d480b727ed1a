"""Corruption routines: equality with the reference for equal draws, equal bits on every path, and edge cases."""

import functools
import os
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

import reference
from dllm_kernels import corruption
from tests.support.parity import same
from tests.support.readme import ROOT
from tests.support.routines import FIRSTS, MASK, MORE, OTHERS, ROUTINES, batch, row_by_hand, seed_of_a_call

pytestmark = pytest.mark.indices

every_routine = pytest.mark.parametrize("routine", ROUTINES.values(), ids=ROUTINES)
more_routines = pytest.mark.parametrize("routine", MORE.values(), ids=MORE)

BY_HAND = [(name, case, example) for name, case in ROUTINES.items() for example in case.examples]


def test_every_function_has_a_case_an_oracle_and_a_place_in_the_documentation():
    """A case in ``ROUTINES``, or a call in ``OTHERS`` if it corrupts nothing."""
    named, exported = FIRSTS.keys() | OTHERS.keys(), {*corruption.__all__}
    levels = {(case.routine, "level" in case.inputs(IDS)) for case in ROUTINES.values() if "level" in case.parameters}
    page, changes = ((ROOT / file).read_text() for file in ("docs/corruption.md", "CHANGELOG.md"))
    missing = {
        "tests/support/routines.py": exported.union(n for n in vars(corruption) if n.startswith("corrupt_")) - named,
        "tests/support/routines.py, with a drawn level and a given one": {
            name for name, _ in levels if not levels >= {(name, False), (name, True)}
        },
        "tests/support/routines.py, by hand": FIRSTS.keys() - {case.routine for _, case, _ in BY_HAND},
        "__all__ of dllm_kernels/corruption/__init__.py": named - exported,
        "reference/corruption.py": {name for name in FIRSTS if not hasattr(reference.corruption, name)},
        "__all__ of reference/corruption.py": {n for n in named if not hasattr(reference, n)},
        "the table of docs/corruption.md": {name for name in FIRSTS if f"\n| [`{name}`][{name}] |" not in page},
        "CHANGELOG.md": {name for name in named if f"`{name}`" not in changes},
    }
    assert {place: names for place, names in missing.items() if names} == {}


@pytest.mark.parametrize(("case", "example"), [parts[1:] for parts in BY_HAND], ids=[name for name, *_ in BY_HAND])
def test_equals_the_result_worked_out_by_hand(case, example, backend, device):
    """The oracle and the routine; both leave their arguments as they are."""
    case = case.of_example(example)
    for dtype, mask_dtype in ((torch.int64, torch.bool), (torch.int32, torch.int64), (torch.int64, torch.float32)):
        ids, mask, seeds = given = row_by_hand(dtype, mask_dtype)
        before = [t.clone() for t in given]
        here = [t.to(device) for t in given]
        for out in case.oracle(ids, mask, seeds), case(*here[:2], seeds=here[2], backend=backend):
            assert [(t.dtype, t.shape) for t in out] == [(d, ids.shape) for d in (dtype, torch.bool, torch.float32)]
            expected = [example.changed.get(i, token) for i, token in enumerate(before[0][0].tolist())]
            assert same(out[0], torch.tensor([expected]).to(out[0]), "noisy_input_ids")
            assert out[1][0].nonzero().flatten().tolist() == sorted(example.changed)
            assert out[2][0].tolist() == pytest.approx(np.broadcast_to(example.p, 8).tolist(), abs=1e-6)
            assert mask.data_ptr() != out[1].data_ptr()
        assert same(given, before)
    assert not case.oracle(ids, mask * 0, seeds)[1].any()


LONG = 4200  # more positions than a kernel holds in registers
WHOLE = [name for name, case in ROUTINES.items() if case.number and case.columns(LONG) == 1]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("routine", [ROUTINES[name] for name in WHOLE], ids=WHOLE)
def test_an_exact_number_of_a_row_longer_than_the_registers(routine, padded, backend, device):
    ids, loss_mask, seeds = batch(2, LONG, device)
    starts, levels = [3, 4100] if padded else [0, 0], torch.tensor([1e-5, 0.7])  # a share of less than one position
    given = {"level": levels} if "level" in routine.inputs(ids) else {}
    more = given | {"start": torch.tensor(starts)} if padded else given
    out = routine(ids, loss_mask, seeds=seeds, backend=backend, **{name: t.to(device) for name, t in more.items()})
    for b, first in enumerate(starts):
        row = slice(b, b + 1)
        alone = replace(routine, inputs=lambda _, of_row=row: {name: t[of_row] for name, t in given.items()})
        expected = alone.oracle(ids[row, first:].cpu(), loss_mask[row, first:].cpu(), seeds[row].cpu())
        assert same([t[row, first:].cpu() for t in out], expected)


@pytest.mark.covering(2)
@more_routines
@pytest.mark.parametrize("shape", [(1, 1), (3, 48), (2, 129)], ids=str)
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
        masks = loss_mask, None if routine.takes_no_mask else loss_mask
        of_call = {"generator": generator, "backend": backend}
        got = [routine(on_device[0], mask if mask is None else on_device[1], **of_call) for mask in masks]
        again = torch.Generator(device if generator is None else "cpu").manual_seed(1)
        expected = [routine.oracle(ids, mask, seed_of_a_call(again)) for mask in masks]
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


@every_routine
def test_a_stored_seed_keeps_its_mask(routine):
    """The corrupted positions as hexadecimal bits, the first one highest."""
    _, noise, _ = routine(torch.arange(32)[None] * 11, torch.ones(1, 32), seeds=torch.tensor([12345]))
    assert f"{int(''.join(str(int(n)) for n in noise[0]), 2):08x}" == routine.stored


@pytest.mark.covering(1, most=2)
@every_routine
def test_only_supervised_positions_change_and_no_input(routine, backend, device):
    ids, loss_mask, seeds = batch(9, 50, device)
    given = {"input_ids": ids, "loss_mask": loss_mask, "seeds": seeds, **routine.inputs_on(ids)}
    before = {name: t.clone() for name, t in given.items()}
    outputs = noisy, noise, p = routine(ids, loss_mask, seeds=seeds, backend=backend)
    assert all(torch.equal(t, given[name]) for name, t in before.items())
    assert [(t.dtype, t.shape) for t in outputs] == [(d, ids.shape) for d in (ids.dtype, torch.bool, torch.float32)]
    assert not (noise & ~loss_mask).any()
    assert torch.equal(noisy[~noise], ids[~noise])
    assert ((p >= 0) & (p <= 1)).all()
    new = noisy[noise]
    assert (new == MASK).all() if routine.masks else ((new >= 0) & (new < routine.constants()["vocab_size"])).all()
    assert noise.any()
    nothing = torch.zeros_like(loss_mask)
    outputs = routine(ids, nothing, seeds=seeds, backend=backend)
    assert len({t.untyped_storage().data_ptr() for t in (ids, nothing, *outputs)}) == 5


@pytest.mark.covering(1, most=2)
@every_routine
def test_all_positions_are_supervised_without_a_mask(routine, backend, device):
    """The choice among all positions is also that under a mask, unless the number depends on the mask."""
    ids, loss_mask, seeds = batch(9, 50, device)
    everywhere = routine(ids, torch.ones_like(loss_mask), seeds=seeds, backend=backend)
    if not routine.of_supervised:
        under_mask = routine(ids, loss_mask, seeds=seeds, backend=backend)
        assert torch.equal(under_mask[1], everywhere[1] & loss_mask)
        assert torch.equal(under_mask[0], torch.where(loss_mask, everywhere[0], ids))
    if routine.takes_no_mask:
        assert same(routine(ids, None, seeds=seeds, backend=backend), everywhere)
        return
    with pytest.raises(TypeError, match=r"^loss_mask must be a torch\.Tensor, got NoneType"):
        routine(ids, None, seeds=seeds, backend=backend)


@pytest.mark.covering(1, most=2)
@every_routine
def test_a_row_depends_on_its_seed_alone(routine, backend, device):
    """The same in other batches and layouts; other seeds give other noise."""
    ids, loss_mask, seeds = batch(6, 40, device)
    whole = routine(ids, loss_mask, seeds=seeds, backend=backend)
    for rows in ([2], [5, 0, 3, 3]):
        assert same(
            [t[rows] for t in whole],
            routine(ids[rows].t().contiguous().t(), loss_mask[rows].float(), seeds=seeds[rows], backend=backend),
        )
    equal = ids[:1].expand(6, 40), torch.ones_like(loss_mask)
    noise = routine(*equal, seeds=seeds, backend=backend)[1]
    assert len({*map(tuple, noise.tolist())}) > 1 or noise.all()
    assert torch.equal(noise[1:2], routine(*equal, seeds=seeds[[1] * 6], backend=backend)[1].unique(dim=0))


@pytest.mark.covering(1, most=2)
@every_routine
def test_a_level_is_used_as_it_is(routine, backend, device):
    """Levels of each part, in any floating dtype and stride: ``p_mask`` holds them; 0 masks nothing, 1 everything."""
    if "level" not in routine.parameters:
        return
    ids, loss_mask, seeds = batch(5, 30, device)
    parts = routine.parts(ids.cpu()).to(device)
    most = int(parts.max()) + 1
    given = torch.tensor([0.0, 0.25, 0.5, 1.0, 0.75], device=device)[torch.arange(5 * most, device=device) % 5]
    columns = routine.columns(30)
    level = torch.nn.functional.pad(given.view(5, most), (0, columns - most), value=0.5)
    expected = routine.of_positions(torch.where(parts < 0, 1.0, level.gather(1, parts.clamp(min=0))))
    of_call = {"seeds": seeds, "backend": backend}
    noise = routine(ids, loss_mask, level=level, **of_call)[1]
    assert routine.number or not noise[expected == 0].any()
    assert torch.equal(noise[expected == 1], (loss_mask & (parts >= 0))[expected == 1])
    others = [level[:, 0]] if columns == 1 else []
    for t in (level.double(), level.half(), level.bfloat16(), level.t().contiguous().t(), *others):
        assert same(routine(ids, loss_mask, level=t, **of_call)[1:], (noise, expected))


# Level, length, and their product rounded half to even (2.5, 3.5, 0.5, 1.5), also of float32 products that round to a
# half. A sequence masks at least one position.
COUNTS = [
    (0.5, 5, 2), (0.5, 7, 4), (0.5, 1, 0), (0.51, 1, 1), (0.5, 3, 2), (0.25, 2, 0), (0.75, 2, 2), (0.001, 4, 0),
    (0.001, 1, 0), (1.0, 9, 9), (0.9999, 8, 8), (0.3, 5, 2), (0.7, 5, 4), (0.1, 5, 0), (0.49999997, 5, 2),
    (0.50000006, 5, 3), (0.83333331, 3, 2), (0.15, 4, 1), (0.5, 4095, 2048), (0.99999994, 131071, 131071),
]  # fmt: skip


@pytest.mark.parametrize("in_sequence", [True, False])
def test_counts_round_half_to_even_and_clamp(in_sequence, backend, device):
    for m, n, k in COUNTS[: None if backend == "torch" else -1]:
        ids, level = torch.zeros(1, n, dtype=torch.int64, device=device), torch.tensor([m], device=device)
        seeds, block_size = torch.tensor([3], device=device), None if in_sequence else n
        _, noise, _ = corruption.corrupt_blockwise(
            ids, None, MASK, block_size, level=level, seeds=seeds, backend=backend
        )
        assert int(noise.sum()) == reference.corruption.number_to_mask(level[0].cpu(), n, at_least=int(in_sequence))
        assert int(noise.sum()) == max(k, in_sequence)


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


@pytest.mark.covering(1, most=2)
@every_routine
def test_levels_lie_in_their_range(routine, backend, device):
    if "eps" not in routine.parameters or "level" in routine.inputs(IDS):
        return
    ids, loss_mask, _ = batch(64, 8, device)
    seeds = torch.arange(64, device=device)
    for eps in (0.0, 0.001, 0.9, 0.999999):
        p = routine(ids, loss_mask, eps=eps, seeds=seeds, backend=backend)[2]
        assert (p >= routine.of_positions(torch.full_like(p, eps))).all()
        assert float(p.max()) <= 1


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_empty_batches(shape, backend, device):
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    loss_mask = torch.zeros(shape, dtype=torch.bool, device=device)
    for routine in ROUTINES.values():
        for start in (None, ids.new_zeros(shape[0])):
            outputs = routine(ids, loss_mask, start=start, backend=backend)
            assert [t.shape for t in outputs] == [ids.shape] * 3
            assert [t.dtype for t in outputs] == [torch.int64, torch.bool, torch.float32]
        with pytest.raises(ValueError, match="backend must be one of auto, triton, torch, got 'cuda'"):
            routine(ids, loss_mask, backend="cuda")


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
    logarithm = specimen.constants.get("KIND") != "exact"  # an exact share compares bits alone
    assert not logarithm or ("mul.rn.f64" in ptx and "div.rn.f64" in ptx), name
"""


@pytest.mark.exhaustive
def test_a_product_and_a_sum_are_rounded_separately():
    # The masks agree between devices only if the compiler rounds every step. Kernels in this process may be
    # interpreted.
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", NO_FMA], env=environment, check=True, cwd=ROOT)


@pytest.mark.gpu
@every_routine
def test_one_launch_and_no_host_sync(routine):
    """``tests/support/mock_gpu_checks.py`` counts launches and syncs on a mock GPU, too."""
    if not routine.one_launch:
        return
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


IDS, LOSS, _ = batch(2, 6)
ONES = torch.ones(2)
META = torch.zeros(2, device="meta")
# Arguments that replace valid ones of every routine that has them; the error message. ``test_sources.py`` has sources
# of the draws, and ``test_padding.py`` the start.
BAD = [
    ({"input_ids": [[1]]}, TypeError, "input_ids must be a torch.Tensor, got list"),
    ({"input_ids": IDS.float()}, ValueError, "input_ids must have dtype int64, .* got float32"),
    ({"input_ids": IDS[0]}, ValueError, r"input_ids must have shape \[B, L\], got \(6,\)"),
    ({"input_ids": IDS.to(torch.int16)}, ValueError, "(mask_token_id|vocab_size - 1) must fit the int16 of input_ids"),
    ({"loss_mask": [1]}, TypeError, "loss_mask must be a torch.Tensor, got list"),
    ({"loss_mask": LOSS[:, :3]}, ValueError, r"loss_mask must have shape \(2, 6\) .* got \(2, 3\)"),
    ({"loss_mask": LOSS.to(torch.complex64)}, ValueError, "loss_mask must have dtype bool, .* got complex64"),
    ({"mask_token_id": 1.5}, TypeError, "mask_token_id must be an int, got float"),
    ({"mask_token_id": True}, TypeError, "mask_token_id must be an int, got bool"),
    ({"mask_token_id": -1}, ValueError, "mask_token_id must not be negative, got -1"),
    ({"mask_token_id": -100}, ValueError, "mask_token_id must not be negative, got -100"),
    ({"mask_token_id": 2**63}, ValueError, "mask_token_id must fit the int64 of input_ids, .* got 9223"),
    ({"eps": 1.001}, ValueError, r"eps must lie in \[0, 1\], got 1.001"),
    ({"eps": -1e-3}, ValueError, r"eps must lie in \[0, 1\], got -0.001"),
    ({"eps": float("nan")}, ValueError, r"eps must lie in \[0, 1\], got nan"),
    ({"eps": "small"}, TypeError, "eps must be a float, got str"),
    ({"half_life_ratio": 0}, ValueError, "half_life_ratio must be above 0, got 0"),
    ({"half_life_ratio": float("nan")}, ValueError, "half_life_ratio must be above 0, got nan"),
    ({"half_life_ratio": None}, TypeError, "half_life_ratio must be a float, got NoneType"),
    ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
    ({"block_size": 2.0}, TypeError, "block_size must be an int, got float"),
    ({"vocab_size": 0}, ValueError, "vocab_size must be at least 1, got 0"),
    ({"vocab_size": 2**31 + 1}, ValueError, r"vocab_size must be at most 2\*\*31, got 2147483649"),
    ({"level": 0.5}, TypeError, "level must be a torch.Tensor, got float"),
    ({"level": IDS[:, 0]}, ValueError, "level must have dtype float16, .* got int64"),
    ({"level": torch.ones(2, 3)}, ValueError, r"level must have shape \(2,\) or \(2, 1\), got \(2, 3\)"),
    (
        {"level": torch.ones(3), "block_size": 2}, ValueError,
        r"level must have shape \(2,\) or \(2, 1\) or \(2, 3\), got \(3,\)",
    ),
    ({"level": META}, ValueError, "level must be on cpu like input_ids, got meta"),
    ({"level": ONES * 1.25}, ValueError, r"level must lie in \[0, 1\], got values from 1.25 to 1.25"),
    ({"level": ONES * -0.5}, ValueError, r"level must lie in \[0, 1\], got values from -0.5 to -0.5"),
    ({"level": ONES * float("nan")}, ValueError, r"level must lie in \[0, 1\], got values from nan to nan"),
]  # fmt: skip
of_a_routine = pytest.mark.parametrize("case", FIRSTS.values(), ids=FIRSTS)


@of_a_routine
def test_errors(case):
    good = {"input_ids": IDS, "loss_mask": LOSS} | case.constants() | case.inputs(IDS)
    for arguments, error, message in BAD:
        if arguments.keys() <= case.parameters.keys():
            with pytest.raises(error, match=f"^{message}"):
                getattr(corruption, case.routine)(**good | arguments)


@of_a_routine
def test_tensor_arguments_take_no_gradient(case):
    """A tensor that requires a gradient raises an error, except under no_grad."""
    floating = {name: t for name, t in case.inputs(IDS).items() if t.is_floating_point()}
    floating |= {"level": ONES / 2} if "level" in case.parameters else {}
    for name, t in floating.items():
        call = functools.partial(case, IDS, LOSS, **{name: t.clone().requires_grad_()})
        with pytest.raises(ValueError, match=f"^{name} must not require a gradient"):
            call()
        with torch.no_grad():
            assert not any(out.requires_grad for out in call())


def test_all_masked_draws_nothing():
    ids, mask, _ = batch(2, 5)
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    corruption.corrupt_all_masked(ids, mask, MASK, generator=generator)
    assert torch.equal(generator.get_state(), state)


def test_numbers_may_come_from_numpy():
    ids, mask, seeds = batch(2, 9)
    inputs = corruption.corrupt_blockwise(ids, mask, MASK, np.int64(4), np.float32(0.25), np.float64(0.5), seeds=seeds)
    expected = corruption.corrupt_blockwise(ids, mask, MASK, 4, 0.25, 0.5, seeds=seeds)
    assert all(torch.equal(x, y) for x, y in zip(expected, inputs, strict=True))


def test_a_token_of_1_masks(device):
    """By default, Triton passes an integer equal to 1 as a constant."""
    ids, mask, seeds = batch(2, 9, device)
    for routine in (corruption.corrupt_uniform, corruption.corrupt_blockwise):
        kernel = routine(ids, mask, 1, seeds=seeds, backend="triton")
        plain = routine(ids, mask, 1, seeds=seeds, backend="torch")
        assert all(torch.equal(x, y) for x, y in zip(kernel, plain, strict=True))
