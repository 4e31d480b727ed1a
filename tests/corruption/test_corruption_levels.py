"""Level samplers, complements, the two-channel corruption, and errors of segments."""

import pytest
import torch

from dllm_kernels.corruption import complementary, corrupt_mix, corrupt_uniform, sample_level
from reference import corruption as reference
from tests.support.parity import values_at
from tests.support.routines import batch as batch_of_all_tokens
from tests.support.routines import seed_of_a_call
from tests.support.uniforms import draws

MASK, V = 126, 130


def batch(*sizes):
    ids, *others = batch_of_all_tokens(*sizes)
    return ids % V, *others


# Level samplers


@pytest.mark.covering(2)
@pytest.mark.parametrize("source", ["seeds", "generator"])
@pytest.mark.parametrize("method", ["uniform", "antithetic", "stratified"])
@pytest.mark.parametrize("B", [1, 2, 7, 64, 300])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.2, 0.7)])
def test_sample_level_equals_the_oracle(source, method, B, low, high, backend, device):
    """Levels that depend on each other follow the first seed; independent ones are those of corruption."""
    if source == "seeds":
        given = {"seeds": torch.arange(B) * 5 + 3}
        u = draws(given["seeds"] if method == "uniform" else 3, B, 1, 0).levels
        given = {"seeds": given["seeds"].to(device)}
    else:
        given = {"generator": torch.Generator().manual_seed(9), "device": device}
        u = draws(seed_of_a_call(torch.Generator().manual_seed(9)), B, 1, 0).levels
    got = sample_level(B, method=method, low=low, high=high, backend=backend, **given)
    expected = reference.sample_level(B, method, low, high, uniform=u[:, 0])
    assert (got.dtype, got.shape) == (torch.float32, (B,))
    # float32 rounds u + b / B, the product and the sum
    near = (got.cpu().double() - expected).abs() <= 3 * 2.0**-25
    assert bool(near.all()), f"level {values_at(got, expected, ~near)}"


def test_the_seed_of_a_call_is_any_int64(device):
    ours, plain = (torch.Generator().manual_seed(9) for _ in range(2))
    levels = torch.cat([sample_level(1, generator=ours, device=device) for _ in range(20)]).cpu()
    expected = torch.cat([draws(seed_of_a_call(plain), 1, 1, 0).levels[0] for _ in range(20)])
    torch.testing.assert_close(levels, expected.float(), rtol=0, atol=1e-6)


def test_no_stratified_level_is_rounded_to_1(backend, device):
    """The first level plus 308 / 1000 is 2.8e-8 below 1, nearer to 1 than to the next lower number in float32."""
    seeds = torch.full((1000,), 36815, device=device)
    level = sample_level(1000, method="stratified", seeds=seeds, backend=backend)
    assert level.max() == level[308] == 1 - 2.0**-24


def test_antithetic_pairs_add_up_to_1():
    level = sample_level(9, method="antithetic", generator=torch.Generator().manual_seed(1))
    assert (level[:8:2] + level[1:8:2] == 1).all()
    assert len(set(level.tolist())) == 9


def test_sampled_levels_are_on_the_cpu_by_default():
    assert sample_level(2).device.type == "cpu"
    assert sample_level(2, seeds=torch.tensor([1, 2])).device.type == "cpu"


# Complements


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_complementary_is_the_reference(dtype, backend, device):
    ids, loss_mask, seeds = batch(3, 2000, device)
    noise = corrupt_uniform(ids, loss_mask, MASK, seeds=seeds)[1]
    other = complementary(noise.to(dtype), loss_mask.to(dtype), backend=backend)
    assert other.dtype == torch.bool
    assert torch.equal(other, reference.complementary(noise, loss_mask))
    assert torch.equal(other | noise, loss_mask)
    assert not (other & noise).any()
    turned = noise.t().contiguous().t()
    assert torch.equal(complementary(turned, loss_mask, backend=backend), other)


# Two channels


def mixed(ids, loss_mask, **keywords):
    return corrupt_mix(ids, loss_mask, MASK, V, **keywords)


@pytest.mark.parametrize("vocab_size", [3, 2**31])
def test_mix_at_the_ends_of_vocabularies(vocab_size, backend, device):
    seeds = torch.arange(2, device=device)
    clean = torch.tensor([[0, 1, vocab_size - 2, vocab_size - 1] * 10] * 2, device=device)
    everywhere = torch.ones_like(clean, dtype=torch.bool)
    ones = torch.ones(2, device=device)
    for mask_token in {0, 1, vocab_size - 1}:
        noisy, noise = corrupt_mix(
            clean,
            everywhere,
            mask_token,
            vocab_size,
            mask_prob=0 * ones,
            uniform_prob=ones,
            seeds=seeds,
            backend=backend,
        )
        assert torch.equal(noise, clean != mask_token)
        assert (noisy[noise] != clean[noise]).all()
        assert (noisy[noise] != mask_token).all()
        assert int(noisy.min()) >= 0
        assert int(noisy.max()) < vocab_size


def test_mix_accepts_rounding_errors(backend, device):
    """Sums slightly above 1 and probabilities slightly below 0 are accepted, as float32 schedules produce them."""
    ids, loss_mask, seeds = batch(2, 50, device)
    p, q = torch.tensor([-6e-8, 1.0], device=device), torch.tensor([1.0, 9e-6], device=device)
    noisy, noise = mixed(ids, loss_mask, mask_prob=p, uniform_prob=q, seeds=seeds, backend=backend)
    assert torch.equal(noise[0], loss_mask[0] & (ids[0] != MASK))
    assert not (noisy[0] == MASK)[noise[0]].any()
    assert torch.equal(noise[1], loss_mask[1])
    assert (noisy[1][noise[1]] == MASK).all()


# Segments


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_the_largest_id_of_a_narrow_type_is_a_segment_of_a_padded_row(dtype, backend, device):
    """Padding was marked by -1, which is 255 in uint8."""
    segment_ids = torch.tensor([[255] * 6 + [7] * 6], dtype=dtype, device=device)
    ids, start = torch.arange(12, device=device)[None], torch.tensor([2], device=device)
    _, noise, _ = corrupt_uniform(
        ids, torch.ones_like(ids), MASK, segment_ids=segment_ids, start=start, level=torch.ones(1, device=device),
        backend=backend,
    )  # fmt: skip
    assert torch.equal(noise, ids >= 2)


# Errors

IDS, LOSS = torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8)
HALF = torch.full((2,), 0.5)
GOOD = {
    "uniform": lambda **kw: corrupt_uniform(IDS, LOSS, MASK, **kw),
    "mix": lambda **kw: corrupt_mix(
        IDS, LOSS, **({"mask_token_id": MASK, "vocab_size": V, "mask_prob": HALF, "uniform_prob": HALF} | kw)
    ),
    "sample": lambda **kw: sample_level(**({"B": 3} | kw)),
}
SHAPES = r"level must have shape \(2,\) or \(2, 1\) or "


@pytest.mark.parametrize(
    ("call", "arguments", "error", "message"),
    [
        ("uniform", {"exact": 1}, TypeError, "exact must be a bool, got int"),
        *(
            ("uniform", {"exact": True, **part}, ValueError,
             "exact must be False with block_size or segment_ids, got True")
            for part in ({"block_size": 2}, {"segment_ids": IDS})
        ),
        ("uniform", {"block_size": 2, "segment_ids": IDS}, ValueError, "block_size and segment_ids exclude each other"),
        ("uniform", {"segment_ids": [0]}, TypeError, "segment_ids must be a torch.Tensor, got list"),
        ("uniform", {"segment_ids": LOSS}, ValueError, "segment_ids must have dtype int64, .*, got float32"),
        (
            "uniform", {"segment_ids": IDS[:1]}, ValueError,
            r"segment_ids must have shape \(2, 8\) \(that of input_ids\), got",
        ),
        ("uniform", {"block_size": 2, "level": LOSS}, ValueError, rf"{SHAPES}\(2, 4\), got \(2, 8\)"),
        ("uniform", {"segment_ids": IDS, "level": LOSS[:, :2]}, ValueError, rf"{SHAPES}\(2, 8\), got"),
        (
            "uniform", {"segment_ids": IDS, "level": LOSS * 2}, ValueError,
            r"level must lie in \[0, 1\], got values from 2.0 to 2.0",
        ),
        ("mix", {"vocab_size": 2}, ValueError, "vocab_size must be at least 3, got 2"),
        ("mix", {"mask_prob": 0.5}, TypeError, "mask_prob must be a torch.Tensor, got float"),
        (
            "mix", {"uniform_prob": torch.ones(2, 2)}, ValueError,
            r"uniform_prob must have shape \(2,\) or \(2, 1\), got",
        ),
        ("mix", {"check": 1}, TypeError, "check must be a bool, got int"),
        *(
            ("mix", {name: torch.tensor(values)}, ValueError, rf"^{name} must lie in \[0, 1\], got values from {got}")
            for name, values, got in (
                ("mask_prob", (0.5, -0.5), "-0.5 to 0.5"), ("uniform_prob", (0.5, -0.25), "-0.25 to 0.5"),
                ("mask_prob", (0.5, 1.5), "0.5 to 1.5"), ("uniform_prob", (0.5, float("nan")), "nan"),
            )
        ),
        ("mix", {"mask_prob": HALF * 1.5}, ValueError, r"^mask_prob \+ uniform_prob must be at most 1, got up to 1.25"),
        *(
            ("mix", {"mask_token_id": n, "vocab_size": 7}, ValueError,
             rf"^mask_token_id must lie in \[0, vocab_size\) = \[0, 7\), MASK being one of .* tokens, got {n}")
            for n in (7, 100)
        ),
        ("sample", {"B": 0}, ValueError, "B must be at least 1, got 0"),
        ("sample", {"B": 2.0}, TypeError, "B must be an int, got float"),
        (
            "sample", {"method": "sobol"}, ValueError,
            "method must be one of uniform, antithetic, stratified, got 'sobol'",
        ),
        ("sample", {"low": 0.5, "high": 0.2}, ValueError, "low and high must satisfy .* got 0.5 and 0.2"),
        ("sample", {"high": 1.5}, ValueError, "low and high must satisfy .* got 0.0 and 1.5"),
        ("sample", {"low": "0"}, TypeError, "low must be a float, got str"),
    ],
)  # fmt: skip
def test_errors(call, arguments, error, message):
    with pytest.raises(error, match=message):
        GOOD[call](**arguments)


@pytest.mark.parametrize(
    ("noise", "loss", "error", "message"),
    [
        ([1], LOSS, TypeError, "noise_mask must be a torch.Tensor, got list"),
        (HALF, LOSS, ValueError, r"noise_mask must have shape \[B, L\], got \(2,\)"),
        (LOSS, HALF, ValueError, r"loss_mask must have shape \(2, 8\) \(that of noise_mask\), got \(2,\)"),
        (LOSS.to(torch.complex64), LOSS, ValueError, "noise_mask must have dtype bool, .* got complex64"),
    ],
)
def test_errors_of_complementary(noise, loss, error, message):
    with pytest.raises(error, match=message):
        complementary(noise, loss)
