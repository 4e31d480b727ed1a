"""nemo_automodel patched and unpatched: recipe and strategies give equal results, and unpatching restores all."""

import collections
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import pickle
import re
import runpy
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dllm_kernels
from dllm_kernels import mtp
from dllm_kernels.integrations import nemo_automodel as integration
from dllm_kernels.integrations.nemo_automodel import deferred_logits
from tests.conftest import every_time
from tests.support import nemo_lora
from tests.support.hosts import assert_patched_once, attributes_of, defined_in, found
from tests.support.pairs import pairs, surrounding
from tests.support.parity import assert_as_good_as_plain, largest_error

absent = [name for name in ("nemo_automodel", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.peer, pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} not installed")]
ROOT = Path(__file__).parents[2]
V, D = 17, 6
NAMES = {name for names in integration.HOMES.values() for name in names}


def module(name):
    return importlib.import_module(f"nemo_automodel.{name}")


@pytest.fixture
def strategy():
    """Provide the host's strategies, unpatched; all patches of the test are undone afterwards."""
    for home in integration.HOMES:
        module(home)
    yield module("recipes.dllm.strategy")
    integration.unpatch()


@pytest.fixture
def patched(strategy):
    return integration.patch()


host_attributes = functools.partial(attributes_of, "nemo_automodel")


def assert_identical(before, after):
    assert before.keys() == after.keys()
    assert not [key for key in before if before[key] is not after[key]]


# Through the host's recipe and strategies -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps(several_processes):
    """Results of steps of the recipe, whose imports take long, so the exhaustive half makes them."""
    return found(several_processes, "recipe")


def with_recipe(test):
    return pytest.mark.exhaustive(pytest.mark.ranks("recipe", "")(test))


RECIPES = ("mdlm", "hybrid", "scdd", "idlm", "block_diffusion")


@with_recipe
@pytest.mark.parametrize(
    ("mode", "variant"), [*itertools.product(RECIPES, ("ours", "fused")), ("dflash", "ours"), ("dflash logits", "ours")]
)
def test_a_recipe_step_gives_the_same_loss_and_gradients(steps, mode, variant):
    """This also holds if the model passes hidden states to the loss."""
    case = steps["cases"][mode]
    assert len(case[variant][0]["results"]) > 2
    for place in range(len(case[variant][0]["results"])):
        ours, host, exact = ([run["results"][place] for run in case[one]] for one in (variant, "host", "exact"))
        assert all(o.dtype == h.dtype for o, h in zip(ours, host, strict=True))
        assert_as_good_as_plain(ours, exact, largest_error(host, exact), f"{mode}, result {place}", steps["sizes"])


@with_recipe
@pytest.mark.parametrize("mode", ["dflash", "dflash logits"])
def test_a_recipe_step_counts_the_same_draft_accuracy(steps, mode):
    for ours, host in zip(steps["cases"][mode]["ours"], steps["cases"][mode]["host"], strict=True):
        assert len(ours["counts"]) == 2
        for o, h in zip(ours["counts"], host["counts"], strict=True):
            assert o.shape == (3,)
            assert torch.equal(o, h)


@with_recipe
@pytest.mark.parametrize("mode", RECIPES)
def test_a_recipe_step_from_hidden_states_computes_no_logits(steps, mode):
    """A step calls one linear op, or two if the encoder also has a loss. Soft caps are passed on."""
    calls = steps["cases"][mode]["calls"]
    op = "row_stats of hidden states" if mode == "scdd" else "weighted_nll of hidden states"
    assert calls == {op: len(steps["cases"][mode]["fused"]) * (2 if mode == "block_diffusion" else 1)}


@with_recipe
@pytest.mark.parametrize("variant", ["excluded", "built before", "of this package"])
def test_a_recipe_step_with_a_loss_that_is_not_replaced(steps, variant):
    """A loss of the host and a loss of this package are computed from hidden states."""
    case = steps["cases"]["mdlm"]
    runs, calls = case[variant]["runs"], case[variant]["calls"]
    for run, host in zip(runs, case["host"], strict=True):
        torch.testing.assert_close(run["results"], host["results"])
    if variant == "of this package":
        assert calls == {"weighted_nll of hidden states": len(runs)}
    else:
        assert "made" not in calls


@with_recipe
@pytest.mark.parametrize("mode", ["mdlm", "hybrid"])
def test_a_recipe_corrupts_within_its_rules(steps, mode):
    for ours, host in zip(steps["cases"][mode]["ours"], steps["cases"][mode]["host"], strict=True):
        o, h = ours["drawn"], host["drawn"]
        assert {k: (v.shape, v.dtype) for k, v in o.items()} == {k: (v.shape, v.dtype) for k, v in h.items()}
        for name in ("input_ids", "loss_mask", "attention_mask", "input_lengths", "_clean_input_ids"):
            assert torch.equal(o[name], h[name]), name
        noise = o["_noise_mask"]
        assert noise.any()
        assert not noise[o["loss_mask"] == 0].any()
        assert torch.equal(o["_noisy_input_ids"], torch.where(noise, 36, o["input_ids"]))
        assert (o["_p_mask"] >= 1e-3).all()
        assert (o["_p_mask"] <= 1).all()


@with_recipe
def test_names_in_imported_recipes_are_replaced(steps):
    ours = {name for name, home in steps["held"].items() if home.startswith("dllm_kernels")}
    assert {
        "nemo_automodel.recipes.dllm.train_ft.DLLMCollator",
        "nemo_automodel.recipes.dllm.train_ft.encoder_ar_loss",
        "nemo_automodel.recipes.dllm.strategy.HybridDiffusionLLMLoss",
        "nemo_automodel.recipes.llm.train_ft.calculate_mtp_loss",
        "nemo_automodel.recipes.llm.train_ft.calculate_loss",
    } <= ours
    assert {
        "nemo_automodel.recipes.llm.train_ft.MaskedCrossEntropy",
        "nemo_automodel._transformers.infrastructure.MaskedCrossEntropy",
    } <= steps["held"].keys()


def test_the_two_channel_corruption_of_a_strategy_is_replaced(strategy):
    """It is called as by SCDD's strategy. The original rejects the same sums."""
    original = strategy.corrupt_mix
    integration.patch()
    assert strategy.corrupt_mix is dllm_kernels.corrupt_mix
    ids, loss_mask = torch.arange(60).view(2, 30), torch.ones(2, 30)
    keywords = {"mask_prob": torch.tensor([0.3, 0.0]), "uniform_prob": torch.tensor([0.3, 0.0])}
    for routine in (strategy.corrupt_mix, original):
        noisy, noise = routine(ids, loss_mask, 99, 100, generator=torch.Generator().manual_seed(1), **keywords)
        assert (noisy.dtype, noise.dtype, noisy.shape, noise.shape) == (ids.dtype, torch.bool, ids.shape, ids.shape)
        assert torch.equal(noise, noisy != ids)
        assert noise.any(1).tolist() == [True, False]
        with pytest.raises(ValueError, match="mask_prob"):
            routine(ids, loss_mask, 99, 100, mask_prob=torch.ones(2), uniform_prob=torch.full((2,), 0.1))


# Replacing and restoring ----------------------------------------------------------------------------------------------


def test_everything_offered_is_replaced_and_restored(strategy):
    before = host_attributes()
    report = integration.patch()
    assert {name for _, name in report.replaced} == {name for names in integration.HOMES.values() for name in names}
    assert ("nemo_automodel.recipes.dllm.strategy", "MDLMCrossEntropyLoss") in report.replaced
    assert strategy.MDLMCrossEntropyLoss is dllm_kernels.MDLMCrossEntropyLoss
    assert isinstance(strategy.MDLMStrategy().create_loss_fn({}), dllm_kernels.MDLMCrossEntropyLoss)
    after = host_attributes()
    assert {key for key in before if before[key] is not after[key]} == set(report.replaced)
    assert integration.unpatch() == report.replaced
    assert_identical(before, host_attributes())
    assert integration.unpatch() == ()


def test_a_second_patch_does_nothing(patched):
    before = host_attributes()
    again = integration.patch()
    assert_identical(before, host_attributes())
    assert again.already
    assert not patched.already
    assert again.replaced == patched.replaced


def test_the_report_reads_well(patched):
    lines = str(patched).splitlines()
    assert lines[0] == f"nemo_automodel {patched.version} patched, {len(patched.replaced)} places:"
    assert "  nemo_automodel.components.loss.mtp.calculate_mtp_loss" in lines
    assert any(line.startswith("  MTPLossConfig kept: ") for line in lines)
    assert "  still the host's own: nemo_automodel.components.loss.chunked_ce.ChunkedCrossEntropy" in lines
    assert "was patched already" in str(integration.patch())


def test_the_report_lists_code_that_still_runs_the_original(patched):
    """The report lists losses and related functions, with excluded ones, but none that is replaced or only imported."""
    names = {name for _, name in patched.original}
    assert {"ChunkedCrossEntropy", "LinearCrossEntropy", "prepare_lm_weight", "build_loss_module"} <= names
    assert not names & {name for home in integration.HOMES.values() for name in home}
    assert all(getattr(sys.modules[m], name).__module__ == m for m, name in patched.original)
    integration.unpatch()
    with_exclusion = integration.patch(exclude=["SCDDLoss"])
    assert {name for _, name in with_exclusion.original} == names | {"SCDDLoss"}


FUSED_STEPS = {
    "DiffusionLMSFTRecipe._forward_backward_step",
    "DiffusionGemmaSFTRecipe._forward_backward_step",
    "IDLMStrategy.forward_backward",
}


def test_steps_from_hidden_states_are_replaced_and_restored(strategy, monkeypatch):
    recipe = types.ModuleType("nemo_automodel.recipes.dllm.train_ft")  # which imports packages that may be missing

    class DiffusionLMSFTRecipe:
        def _forward_backward_step(self):
            return self.model_parts[0](torch.ones(1, D))

    class DiffusionGemmaSFTRecipe(DiffusionLMSFTRecipe):
        def _forward_backward_step(self):
            raise NotImplementedError

    recipe.DiffusionLMSFTRecipe, recipe.DiffusionGemmaSFTRecipe = DiffusionLMSFTRecipe, DiffusionGemmaSFTRecipe
    monkeypatch.setitem(sys.modules, recipe.__name__, recipe)
    owners = (DiffusionLMSFTRecipe, DiffusionGemmaSFTRecipe, strategy.IDLMStrategy)
    before = [dict(vars(owner)) for owner in owners]
    step = DiffusionLMSFTRecipe()
    step.model_parts = [nn.Sequential(collections.OrderedDict(lm_head=nn.Linear(D, V)))]
    report = integration.patch(fuse_head=True)
    assert set(report.fused) == FUSED_STEPS
    assert "  IDLMStrategy.forward_backward takes hidden states" in str(report).splitlines()
    assert type(step._forward_backward_step()) is not torch.Tensor  # deferred logits
    assert integration.patch(fuse_head=True).already
    with pytest.raises(RuntimeError, match=r"patched already, with exclude=\[\] and fuse_head=True"):
        integration.patch()
    integration.unpatch()
    assert type(step._forward_backward_step()) is torch.Tensor
    assert [dict(vars(owner)) for owner in owners] == before
    del DiffusionGemmaSFTRecipe._forward_backward_step
    unpatched = host_attributes()
    missing = "recipes.dllm.train_ft has no DiffusionGemmaSFTRecipe._forward_backward_step"
    with pytest.raises(RuntimeError, match=re.escape(missing)):
        integration.patch(fuse_head=True, strict=True)
    assert_identical(unpatched, host_attributes())
    with pytest.warns(UserWarning, match=re.escape(missing)):
        report = integration.patch(fuse_head=True)
    assert set(report.fused) == FUSED_STEPS - {"DiffusionGemmaSFTRecipe._forward_backward_step"}
    integration.unpatch()
    assert integration.patch().fused == ()


def deferred_from(logits):
    """Return the placeholder for these logits, with a separate head."""
    head = nn.Linear(V, V, bias=False)
    head.weight.data = 2 * torch.eye(V)
    with deferred_logits(nn.Sequential(collections.OrderedDict(lm_head=head))) as defers:
        assert defers
        return head(logits / 2)


@pytest.fixture
def fused(strategy, monkeypatch):
    monkeypatch.setattr(integration, "STEPS", {})
    integration.patch(fuse_head=True)
    return module("components.loss.dllm_loss")


def test_fused_losses_take_logits_and_deferred_logits(fused):
    """Arguments are passed by position and by name.

    With two caps, two heads or half of a cap, the logits themselves are used.
    """
    ids, on = torch.randint(0, V, (2, 6)), torch.ones(2, 6)
    x, y = torch.randn(2, 6, V), torch.randn(2, 6, V)
    loss = fused.HybridDiffusionLLMLoss(0.5)
    assert type(loss) is dllm_kernels.HybridDiffusionLLMLoss
    assert type(pickle.loads(pickle.dumps(loss))) is type(loss)
    masks = (ids, on, on / 2, on, on, 5, 4)
    expected = loss(x, *masks, y).total_loss
    with deferred_logits(model := nn.Sequential(collections.OrderedDict(lm_head=nn.Linear(V, V, bias=False)))):
        model.lm_head.weight.data = torch.eye(V)
        one, other = model(x), model(y)
    torch.testing.assert_close(loss(one, *masks, other).total_loss, expected)
    torch.testing.assert_close(loss(one, *masks, causal_logits=other).total_loss, expected)
    assert one.record() is not None
    torch.testing.assert_close(loss(one, *masks, deferred_from(y)).total_loss, expected)  # another head
    torch.testing.assert_close(loss(deferred_from(x), *masks, y).total_loss, expected)
    capped = torch.tanh(x / 3.0) * 3.0
    mdlm = fused.MDLMCrossEntropyLoss(softcap=2.0)
    z = torch.tanh(deferred_from(x) / 3.0) * 3.0
    torch.testing.assert_close(mdlm(z, *masks[:4]).total_loss, mdlm(capped, *masks[:4]).total_loss)
    assert z.record() is None
    z = torch.tanh(deferred_from(x) / 3.0) * 3.0
    plain = fused.MDLMCrossEntropyLoss()
    torch.testing.assert_close(plain(z, *masks[:4]).total_loss, plain(capped, *masks[:4]).total_loss)
    assert z.record() is not None
    assert plain.softcap is None
    half = deferred_from(x) / 3.0
    torch.testing.assert_close(plain(half, *masks[:4]).total_loss, plain(x / 3.0, *masks[:4]).total_loss)
    torch.testing.assert_close(fused.encoder_ar_loss(deferred_from(x), ids), fused.encoder_ar_loss(x, ids))
    z = torch.tanh(deferred_from(x) / 3.0) * 3.0
    torch.testing.assert_close(fused.encoder_ar_loss(z, ids, on), fused.encoder_ar_loss(capped, ids, on))


ASKED_ONCE = [loss for loss in nemo_lora.LOSSES if loss.startswith("calculate")]


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    ("way", "loss"),
    [
        *(("patch", loss) for loss in nemo_lora.LOSSES if loss != "calculate_mtp_loss, one call"),  # not the host's
        *(("call", loss) for loss in ASKED_ONCE),
    ],
)
def test_float32_logits_of_16_bit_operands(strategy, way, loss):
    """The option of ``patch`` applies everywhere, the host's own argument to one call.

    Without either, logits are rounded.
    """
    model, (hidden, *rest) = nemo_lora.Model().bfloat16(), nemo_lora.batch(torch.bfloat16)
    from_hidden_states, from_logits = nemo_lora.LOSSES[loss]
    option = {"logits_dtype": torch.float32}
    patch_options, call_options = (option, {}) if way == "patch" else ({}, option)
    with nemo_lora.fused(**patch_options):
        found = from_hidden_states(model, hidden, *rest, **call_options)
    with nemo_lora.fused():
        rounded = from_hidden_states(model, hidden, *rest)
        exact = from_logits(model.double(), hidden.double(), *rest)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=0)
    assert rounded != found


def test_float64_operands_keep_their_logits(strategy):
    with nemo_lora.fused(logits_dtype=torch.float32):
        for from_hidden_states, from_logits in nemo_lora.LOSSES.values():
            model, inputs = nemo_lora.Model().double(), nemo_lora.batch()
            torch.testing.assert_close(
                from_hidden_states(model, *inputs), from_logits(model, *inputs), rtol=1e-10, atol=0
            )


def test_another_dtype_of_the_logits_is_rejected(strategy):
    for dtype_option, error, message in (
        (torch.bfloat16, ValueError, "torch.float32 or None, got torch.bfloat16"),
        ("float32", TypeError, "a torch.dtype or None, got str"),
    ):
        with pytest.raises(error, match=f"^logits_dtype must be {message}$"):
            integration.patch(logits_dtype=dtype_option)
    integration.patch()
    with pytest.raises(RuntimeError, match=r"patched already, with .* and logits_dtype=None; unpatch"):
        integration.patch(logits_dtype=torch.float32)


def built_before(name):
    return getattr(module("components.loss.dllm_loss"), name)


def excluded(name):
    integration.patch(exclude=[name], fuse_head=True)
    return getattr(module("components.loss.dllm_loss"), name)


def from_this_package(name):
    return getattr(dllm_kernels, name)


@pytest.mark.parametrize("source", [built_before, excluded, from_this_package])
@pytest.mark.parametrize("name", ["MDLMCrossEntropyLoss", "BlockDiffusionCrossEntropyLoss", "HybridDiffusionLLMLoss"])
def test_a_loss_that_is_not_replaced_takes_deferred_logits(strategy, monkeypatch, name, source):
    """A loss of the host and a loss of this package are computed from hidden states."""
    monkeypatch.setattr(integration, "STEPS", {})
    x, ids, on = torch.randn(2, 6, V), torch.randint(0, V, (2, 6)), torch.ones(2, 6)
    masks = (ids, on.bool(), on / 2, on, on, 5, 4)
    expected = getattr(dllm_kernels, name)()(x, *masks, causal_logits=x).total_loss
    loss = source(name)()
    if source is not excluded:
        integration.patch(fuse_head=True)
    for causal in (None, x):
        z = deferred_from(x)
        out = loss(z, *masks, causal_logits=causal if causal is None else z)
        assert z.record() is not None
        if causal is not None:
            torch.testing.assert_close(out.total_loss, expected)
    integration.unpatch()
    torch.testing.assert_close(loss(x, *masks, causal_logits=x).total_loss, expected)


def test_a_subclass_of_a_loss_takes_deferred_logits(fused):
    class Doubled(dllm_kernels.MDLMCrossEntropyLoss):
        def forward(self, logits, *args, **kwargs):
            out = super().forward(logits, *args, **kwargs)
            return out._replace(total_loss=2 * out.total_loss)

    x, ids, on = torch.randn(2, 6, V), torch.randint(0, V, (2, 6)), torch.ones(2, 6)
    z = deferred_from(x)
    loss = Doubled()(z, ids, on, on / 2, on).total_loss
    assert z.record() is not None
    torch.testing.assert_close(loss, 2 * dllm_kernels.MDLMCrossEntropyLoss()(x, ids, on, on / 2, on).total_loss)


@pytest.mark.parametrize("gamma", [-2.0, -0.5, -math.inf, math.inf])
@pytest.mark.parametrize("normalize", ["tokens", "mean"])
def test_every_gamma_of_dflash(strategy, gamma, normalize):
    """A negative gamma, with which the weights grow, is included."""
    x, ids, on = torch.randn(2, 6, V), torch.randint(0, V, (2, 6)), torch.ones(2, 6)
    host = module("components.loss.dllm_loss").DFlashDecayLoss(gamma, normalize=normalize)
    ours = dllm_kernels.DFlashDecayLoss(gamma, normalize=normalize)
    for block_size in (None, 4):
        expected = host(x, ids, on, 5, block_size).total_loss
        assert expected.isfinite()
        torch.testing.assert_close(ours(x, ids, on, 5, block_size).total_loss, expected)


@pytest.mark.everyday(3)
@pytest.mark.parametrize("max_ratio", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("chunk_size", [1024, 5, None])
def test_scdd_equals_the_host(strategy, max_ratio, chunk_size):
    """Value and gradient are as close as the host's float32 schedule is to the exact one; there are few steps."""
    home, mask = module("components.loss.dllm_loss"), 5
    x0 = torch.randint(0, V - 1, (3, 8))
    x0 += x0 >= mask
    kind, other = torch.rand(3, 8), torch.randint(mask + 1, V, (3, 8))
    z = torch.where(kind < 0.4, mask, torch.where(kind < 0.7, x0, other))
    t = torch.tensor([[0.2], [0.7], [0.9]]).expand(3, 8)
    supervised = (torch.rand(3, 8) < 0.8).float()
    masks = {"target_ids": x0, "noise_mask": z != x0, "p_mask": t, "loss_mask": supervised, "noisy_input_ids": z}
    settings = {"num_timesteps": 10, "max_ratio": max_ratio, "gamma_shape": 1.5, "t_peak": 0.4}
    settings["chunk_size"] = chunk_size
    losses = home.SCDDLoss(mask, **settings), dllm_kernels.SCDDLoss(mask, **settings)
    for count in (None, 13):
        found = []
        for loss in losses:
            x = torch.randn(3, 8, V, generator=torch.Generator().manual_seed(1)).requires_grad_()
            value = loss(x, **masks, num_diffusion_tokens=count).total_loss
            found.append((value.detach(), *torch.autograd.grad(value, x)))
        for host, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, host)


def test_idlm_equals_the_host(strategy):
    home, ids = module("components.loss.dllm_loss"), torch.randint(0, V, (3, 8))
    answer, valid = torch.rand(3, 8) < 0.7, (torch.rand(3, 8) < 0.9).long()
    for settings in ({}, {"clean_loss_weight": 0.7}, {"auto_balance": True}):
        for count in (None, 13):
            found = []
            for loss in (home.IDLMLoss(**settings), dllm_kernels.IDLMLoss(**settings)):
                x = torch.randn(3, 16, V, generator=torch.Generator().manual_seed(1)).requires_grad_()
                out = loss(x, ids, answer, valid, seq_len=8, num_diffusion_tokens=count)
                found.append((*out[:2], *torch.autograd.grad(out.total_loss, x)))
            for host, ours in zip(*found, strict=True):
                torch.testing.assert_close(ours, host)


@pytest.mark.parametrize(
    ("max_ratio", "gamma_shape", "t_peak"),
    [(0.1, 1.0, 0.5), (0.0, 1.0, 0.5), (0.7, 3.0, 0.2), *((0.2, shape, 0.4) for shape in (-0.5, -2.0, 0))],
)
def test_the_schedule_of_scdd_is_the_host_s(strategy, max_ratio, gamma_shape, t_peak):
    options = {"max_ratio": max_ratio, "gamma_shape": gamma_shape, "t_peak": t_peak}
    t = torch.linspace(-0.1, 1.1, 241) if gamma_shape > 0 else torch.linspace(0.1, 0.9, 81)
    ours = dllm_kernels.scdd_schedule(t, **options)
    host = module("components.loss.dllm_loss").scdd_schedule(t, **options)
    torch.testing.assert_close(dataclasses.asdict(ours), dataclasses.asdict(host))


def test_modules_imported_after_patch_are_restored_too(patched, monkeypatch):
    later = types.ModuleType("nemo_automodel.later")
    monkeypatch.setitem(sys.modules, later.__name__, later)
    exec("from nemo_automodel.components.loss.dllm_loss import DFlashDecayLoss as Loss", vars(later))
    assert later.Loss is dllm_kernels.DFlashDecayLoss
    assert ("nemo_automodel.later", "Loss") in integration.unpatch()
    assert later.Loss.__module__ == "nemo_automodel.components.loss.dllm_loss"


def test_names_can_be_excluded(strategy):
    original = strategy.corrupt_uniform
    report = integration.patch(exclude=["corrupt_uniform", "corrupt_blockwise"])
    assert strategy.corrupt_uniform is original
    assert strategy.corrupt_all_masked is dllm_kernels.corrupt_all_masked
    assert ("corrupt_uniform", "excluded") in report.kept
    with pytest.raises(
        RuntimeError,
        match=r"patched already, with exclude=\['corrupt_blockwise', 'corrupt_uniform'\] and fuse_head=False",
    ):
        integration.patch()
    with pytest.raises(ValueError, match=r"exclude must hold names among .*, got \['prepare_lm_weight'\]"):
        integration.patch(exclude=["prepare_lm_weight"])


def constructor(self, fp32_upcast=True):
    pass


def new_default(self, logits, target_ids, noise_mask, p_mask, loss_mask, loss_mask_ar=0, num_diffusion_tokens=None):
    pass


def new_order(self, target_ids, logits):
    pass


def new_argument(self, logits, target_ids, noise_mask, p_mask, loss_mask, temperature=1.0):
    pass


def fewer_arguments(self, logits, target_ids, noise_mask, p_mask, loss_mask, loss_mask_ar=None):
    pass


@pytest.mark.parametrize(
    ("forward", "problems"),
    [
        (new_default, ["MDLMCrossEntropyLoss.forward: loss_mask_ar defaults to 0, ours to None"]),
        (
            new_order,
            [
                "MDLMCrossEntropyLoss.forward: target_ids is argument 1, ours is argument 2",
                "MDLMCrossEntropyLoss.forward: does not take noise_mask, which ours needs",
            ],
        ),
        (new_argument, ["MDLMCrossEntropyLoss.forward: takes temperature, which ours does not"]),
    ],
)
def test_other_signatures_keep_their_names_or_are_rejected(strategy, monkeypatch, forward, problems):
    loss = module("components.loss.dllm_loss")
    other = type(
        "MDLMCrossEntropyLoss", (nn.Module,), {"__init__": constructor, "forward": forward, "new_method": constructor}
    )
    monkeypatch.setattr(loss, "MDLMCrossEntropyLoss", defined_in(loss, other))
    monkeypatch.delattr(module("components.datasets.dllm.corruption"), "gumbel_topk")
    before = host_attributes()
    with pytest.raises(
        RuntimeError, match=r"^nemo_automodel 0\.\S+ has unexpected definitions; nothing was replaced:"
    ) as error:
        integration.patch(strict=True)
    assert_identical(before, host_attributes())
    assert integration.unpatch() == ()
    names = "MDLMCrossEntropyLoss, gumbel_topk"
    with pytest.warns(
        UserWarning, match=rf"^nemo_automodel 0\.\S+ has unexpected definitions; {names} stay as they are:\n"
    ) as warned:
        report = integration.patch()
    assert warned[0].filename == __file__
    missing = "nemo_automodel.components.datasets.dllm.corruption has no gumbel_topk"
    for said in (error.value, warned[0].message):
        for problem in [*problems, "MDLMCrossEntropyLoss.new_method: not offered here", missing]:
            assert f"  {problem}" in str(said).splitlines()
    kept = dict(report.kept)
    assert set(kept) == {*integration.KEPT, "MDLMCrossEntropyLoss", "gumbel_topk"}
    reasons = kept["MDLMCrossEntropyLoss"].split("; ")
    assert {*problems, "MDLMCrossEntropyLoss.new_method: not offered here"} <= {*reasons}
    assert f"  gumbel_topk kept: {missing}" in str(report).splitlines()
    assert {name for _, name in report.replaced} == {*NAMES} - {"MDLMCrossEntropyLoss", "gumbel_topk"}
    assert loss.MDLMCrossEntropyLoss is other
    assert integration.patch().kept == report.kept
    with pytest.raises(RuntimeError, match=r"patched already, without MDLMCrossEntropyLoss, gumbel_topk; unpatch"):
        integration.patch(strict=True)
    integration.unpatch()
    assert_identical(before, host_attributes())


class DFlashDecayLoss(nn.Module):
    """The loss of drafts as a later version of the host declares it."""

    def __init__(self, loss_gamma=7.0, use_fused_linear_ce=False, chunk_size=1024, normalize="tokens", loss_type="x"):
        super().__init__()

    def forward(self, logits, target_ids, block_mask, num_tokens=None, block_size=None):
        return "the host's"

    def position_weights(self, T):
        return "the host's"


def test_a_later_version_is_patched_where_it_fits(strategy, monkeypatch):
    """A class with new arguments and methods, one that became a function, and a module that moved."""
    loss = module("components.loss.dllm_loss")
    monkeypatch.setattr(loss, "DFlashDecayLoss", defined_in(loss, DFlashDecayLoss))
    linear = module("components.loss.linear_ce")
    monkeypatch.setattr(linear, "FusedLinearCrossEntropy", defined_in(linear, lambda *args, **kwargs: None))
    collate = "nemo_automodel.components.datasets.dllm.collate"
    monkeypatch.setitem(sys.modules, collate, None)
    with monkeypatch.context() as m:
        m.setattr(importlib, "import_module", functools.partial(imported_except, collate))
        with pytest.warns(UserWarning, match=r"DFlashDecayLoss\.position_weights: takes T, which ours does not"):
            report = integration.patch()
    kept = {"DFlashDecayLoss", "FusedLinearCrossEntropy", "DLLMCollator"}
    assert {name for _, name in report.replaced} == {*NAMES} - kept
    reasons = dict(report.kept)
    assert reasons["DFlashDecayLoss"].startswith("DFlashDecayLoss: loss_type is argument 4, ours is keyword-only; ")
    assert reasons["FusedLinearCrossEntropy"] == "FusedLinearCrossEntropy: is no class, unlike ours"
    assert reasons["DLLMCollator"] == "nemo_automodel has no module components.datasets.dllm.collate"
    assert loss.DFlashDecayLoss().position_weights(4) == "the host's"
    assert loss.MDLMCrossEntropyLoss is dllm_kernels.MDLMCrossEntropyLoss


def imported_except(missing, name, import_module=importlib.import_module):
    if name == missing:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return import_module(name)


def test_a_module_that_cannot_be_imported_for_another_reason_is_an_error(strategy, monkeypatch):
    monkeypatch.setattr(
        importlib, "import_module", lambda _: exec("raise ModuleNotFoundError('No module named numpy', name='numpy')")
    )
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        integration.patch()


def test_two_threads_patch_once(strategy, monkeypatch):
    assert_patched_once(integration, host_attributes, monkeypatch)


def test_a_version_that_passes_fewer_arguments_is_supported(strategy, monkeypatch):
    other = type("MDLMCrossEntropyLoss", (nn.Module,), {"__init__": constructor, "forward": fewer_arguments})
    loss = module("components.loss.dllm_loss")
    monkeypatch.setattr(loss, "MDLMCrossEntropyLoss", defined_in(loss, other))
    assert "MDLMCrossEntropyLoss" in {name for _, name in integration.patch().replaced}
    assert integration.unpatch()


def own_loss(logits, *args):
    return "the user's"


@pytest.mark.parametrize(
    ("home", "name", "value"),
    [
        ("components.loss.dllm_loss", "encoder_ar_loss", own_loss),
        ("components.loss.dllm_loss", "MDLMCrossEntropyLoss", type("MDLMCrossEntropyLoss", (nn.Module,), {})),
        ("components.datasets.dllm.corruption", "corrupt_uniform", functools.partial(own_loss)),
        ("components.loss.utils", "calculate_loss", "wrapped"),
    ],
)
def test_what_the_user_put_in_the_place_of_a_name_is_kept(strategy, monkeypatch, home, name, value):
    """It has the name of the host's, and a wrapped function its module."""
    loss = module(home)
    if value == "wrapped":
        value = functools.wraps(getattr(loss, name))(lambda *args, **kwargs: "the user's")
    monkeypatch.setattr(loss, name, value)
    with pytest.warns(
        UserWarning, match=rf"unexpected definitions; {name} stay as they are:\n  .*{name} is .* not the "
    ):
        report = integration.patch()
    assert getattr(loss, name) is value
    assert name not in {name for _, name in report.replaced}
    assert dict(report.kept)[name].endswith("not the framework's own")


# The token losses and MTP ---------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(D, V, bias=False)

    def get_output_embeddings(self):
        return self.lm_head


def batch(B=2, S=9, depths=2):
    torch.manual_seed(0)
    labels = torch.randint(0, V, (B, S))
    labels[0, :3] = -100
    return torch.randn(B, S, D), [torch.randn(B, S, D) for _ in range(depths)], labels


def test_losses_pass_the_checks_of_the_host(patched):
    linear, masked = module("components.loss.linear_ce"), module("components.loss.masked_ce")
    fused = module("components.loss.loss").build_loss_module("FusedLinearCrossEntropy")
    plain = module("components.loss.loss").build_loss_module(masked.MaskedCrossEntropy, reduction="sum")
    assert isinstance(fused, mtp.FusedLinearCrossEntropy)
    assert isinstance(fused, module("components.loss.linear_ce_base").LinearCrossEntropy)
    assert isinstance(plain, mtp.MaskedCrossEntropy)
    assert not isinstance(plain, module("components.loss.linear_ce_base").LinearCrossEntropy)
    for loss, home in ((fused, linear), (plain, masked)):
        assert type(loss) is getattr(home, type(loss).__name__)
        assert "loss_weights" in inspect.signature(loss.forward).parameters
        assert type(pickle.loads(pickle.dumps(loss))) is type(loss)


@pytest.mark.parametrize("name", ["MaskedCrossEntropy", "FusedLinearCrossEntropy"])
@pytest.mark.parametrize("seq_idx", [None, torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]], dtype=torch.int32).expand(2, 9)])
def test_the_pipeline_loss_with_mtp_equals_the_host_from_logits(strategy, name, seq_idx):
    """The host's own linear loss needs a GPU, so both losses of this package are compared with its loss from logits."""
    hidden, depths, labels = batch()
    host_mtp, losses = module("components.loss.mtp"), module("components.loss.loss")
    model = Model().double().train()

    def run(loss_fn):
        model.zero_grad()
        pipeline_loss = host_mtp.MTPLossConfig(scaling_factor=0.3).build(loss_fn, model)
        h, d = hidden.double(), [x.double() for x in depths]
        if name.startswith("Fused") and loss_fn is not plain:
            output = SimpleNamespace(hidden_states=h, logits=None, mtp_per_depth_h=d)
            pipeline_loss.cu_seqlens = None if seq_idx is None else torch.tensor([0, 4, 9])
        else:
            output = (model.lm_head(h), *d, *(() if seq_idx is None else (seq_idx,)))
        loss = pipeline_loss(output, labels)
        loss.backward()
        return loss.detach(), model.lm_head.weight.grad

    plain = losses.build_loss_module("MaskedCrossEntropy", fp32_upcast=False)
    host = run(plain)
    integration.patch()
    ours = run(losses.build_loss_module(name))
    for o, h in zip(ours, host, strict=True):
        torch.testing.assert_close(o, h)


TAKEN = (
    "MaskedCrossEntropy FusedLinearCrossEntropy calculate_loss calculate_mtp_loss PipelineCausalLMLoss MTPLossConfig"
)


@pytest.mark.parametrize("name", TAKEN.split())
def test_the_package_accepts_all_arguments_of_the_host(strategy, name):
    """Every argument is accepted without ``fuse_head``, too, in the same order and with the same default."""
    original = next(getattr(m, name) for m in map(module, integration.HOMES) if hasattr(m, name))
    assert original.__module__.startswith("nemo_automodel")
    assert integration._host.differences(name, original, getattr(dllm_kernels, name)) == []


def test_token_weights_mean_the_same_as_in_the_host(strategy):
    hidden, _, labels = batch()
    logits, weights = Model().lm_head(hidden).detach(), torch.rand(labels.shape)
    for options in ({"loss_weights": weights}, {"loss_weights": weights, "num_label_tokens": 11}, {}):
        host = module("components.loss.masked_ce").MaskedCrossEntropy()(logits, labels, **options)
        torch.testing.assert_close(dllm_kernels.MaskedCrossEntropy()(logits, labels, **options), host)
        fused = dllm_kernels.FusedLinearCrossEntropy()(logits, labels, torch.eye(V), **options)
        torch.testing.assert_close(fused, host)


@pytest.mark.parametrize("index", [-100, -1])
def test_without_an_ignore_index_that_of_the_loss_is_used(strategy, index):
    hidden, depths, labels = batch()
    labels, model = labels.masked_fill(labels == -100, index), Model().train()
    output = (model.lm_head(hidden), *depths)

    def losses(home, loss_fn):
        auxiliary = home.calculate_mtp_loss(
            loss_fn, mtp_per_depth_h=depths, labels=labels, model=model, ignore_index=None, logits_dtype=torch.float32,
            lm_weight=model.lm_head.weight,
        )  # fmt: skip
        config = home.MTPLossConfig(scaling_factor=0.3, ignore_index=None).build(loss_fn, model)
        return (
            auxiliary,
            config(output, labels),
            home.PipelineCausalLMLoss(loss_fn, model, ignore_index=None)(output, labels),
        )

    host = losses(
        module("components.loss.mtp"), module("components.loss.masked_ce").MaskedCrossEntropy(ignore_index=index)
    )
    for ours, theirs in zip(losses(mtp, mtp.MaskedCrossEntropy(ignore_index=index)), host, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_functions_accept_the_arguments_of_the_recipes(patched):
    hidden, depths, labels = batch()
    model, utils = Model(), module("components.loss.utils")
    loss_fn = module("components.loss.linear_ce").FusedLinearCrossEntropy()
    weight = utils.prepare_lm_weight(loss_fn, model, grad_reduce_group=None)
    common = {"labels": labels, "model": model, "lm_weight": weight, "num_label_tokens": 7, "grad_reduce_group": None}
    common["loss_weights"] = torch.full(labels.shape, 0.5)
    loss = utils.calculate_loss(loss_fn, logits=torch.empty(2, 1, V), hidden_states=hidden, **common)
    plain = module("components.loss.masked_ce").MaskedCrossEntropy()
    expected = plain(model.lm_head(hidden), labels, num_label_tokens=14)
    torch.testing.assert_close(loss, expected)
    auxiliary = module("components.loss.mtp").calculate_mtp_loss(
        loss_fn, mtp_per_depth_h=depths, mtp_per_depth_logits=None, mtp_per_depth_targets=None, seq_idx=None,
        scaling_factor=0.1, ignore_index=-100, cu_seqlens=None, logits_dtype=torch.float32, return_per_depth=True,
        **common,
    )  # fmt: skip
    assert isinstance(auxiliary, module("components.loss.mtp").MTPLossOutput)
    assert len(auxiliary.per_depth_losses) == 2
    torch.testing.assert_close(auxiliary.loss, 0.05 * sum(auxiliary.per_depth_losses))


@pytest.mark.parametrize("name", ["calculate_loss", "calculate_mtp_loss"])
def test_the_group_reaches_the_function_that_gathers_the_head(name, patched, monkeypatch):
    """If the recipe passes no head, the host gathers it, and reduces its gradient over the recipe's group."""
    hidden, depths, labels = batch()
    model, group, seen = Model(), object(), []
    weight, utils = model.lm_head.weight.double(), module("components.loss.utils")  # in another dtype, to be cast
    monkeypatch.setattr(
        utils, "prepare_lm_weight", lambda *_, grad_reduce_group: seen.append(grad_reduce_group) or weight
    )
    loss_fn = module("components.loss.linear_ce").FusedLinearCrossEntropy()
    common = {"labels": labels, "model": model, "grad_reduce_group": group}
    if name == "calculate_loss":
        utils.calculate_loss(loss_fn, hidden_states=hidden, **common)
    else:
        host_mtp = module("components.loss.mtp")
        host_mtp.calculate_mtp_loss(loss_fn, mtp_per_depth_h=depths[:1], scaling_factor=0.1, **common)
    assert seen == [group]


def test_losses_of_the_host_keep_its_own_path(strategy):
    hidden, depths, labels = batch()
    model, utils, host_mtp = Model(), module("components.loss.utils"), module("components.loss.mtp")
    chunked = module("components.loss.chunked_ce").ChunkedCrossEntropy(chunk_len=4, compile=False)

    def run():
        main = utils.calculate_loss(chunked, hidden_states=hidden, labels=labels, model=model)
        extra = host_mtp.calculate_mtp_loss(chunked, mtp_per_depth_h=depths, labels=labels, model=model)
        output = SimpleNamespace(hidden_states=hidden, logits=None, mtp_per_depth_h=depths)
        return main, extra, host_mtp.PipelineCausalLMLoss(chunked, model)(output, labels)

    host = run()
    integration.patch()
    assert all(torch.equal(o, h) for o, h in zip(run(), host, strict=True))
    torch.testing.assert_close(host[2], host[0] + host[1])


class ForeignLinear(nn.Module):
    """A linear layer of another library. The host takes its weight, whatever its class."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, hidden):
        return nn.functional.linear(hidden, self.weight)


class AdaptedLinear(nn.Linear):
    """An adapter of another library. The host's fused loss takes only its weight."""

    def __init__(self):
        super().__init__(D, V, bias=False)
        self.lora_A, self.lora_B = nn.Linear(D, 2, bias=False), nn.Linear(2, V, bias=False)

    def forward(self, hidden):
        return super().forward(hidden) + self.lora_B(self.lora_A(hidden))


class CappedModel(nn.Module):
    """A model that caps its logits after the head, as its configuration says."""

    def __init__(self, cap):
        super().__init__()
        self.lm_head = nn.Linear(8, 33, bias=False)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(final_logit_softcapping=cap))
        self.cap = cap

    def forward(self, hidden):
        return self.cap * torch.tanh(self.lm_head(hidden) / self.cap)


def test_the_cap_of_a_model_applies_to_the_loss_from_hidden_states(patched):
    model, hidden, labels = CappedModel(0.5), torch.randn(2, 9, 8), torch.randint(0, 33, (2, 9))
    calculate_loss = module("components.loss.utils").calculate_loss
    masked = module("components.loss.masked_ce").MaskedCrossEntropy()
    expected = calculate_loss(masked, logits=model(hidden), labels=labels, num_label_tokens=18)
    pipeline = module("components.loss.mtp").PipelineCausalLMLoss
    for fused in (
        module("components.loss.linear_ce").FusedLinearCrossEntropy(),
        module("components.loss.linear_ce").FusedLinearCrossEntropy(logit_softcapping=0.5),
    ):
        own = fused.logit_softcapping
        got = calculate_loss(fused, hidden_states=hidden, labels=labels, model=model, num_label_tokens=18)
        torch.testing.assert_close(got, expected)
        output = SimpleNamespace(logits=None, hidden_states=hidden)
        torch.testing.assert_close(pipeline(fused, model.eval())(output, labels), expected * 18)
        assert fused.logit_softcapping == own
    other = module("components.loss.linear_ce").FusedLinearCrossEntropy(logit_softcapping=0.2)
    assert calculate_loss(other, hidden_states=hidden, labels=labels, model=model, num_label_tokens=18) != expected


def fused_losses(model):
    """Return calls of each replaced function with the model's head."""
    hidden, depths, labels = batch()
    fused, utils = module("components.loss.linear_ce").FusedLinearCrossEntropy(), module("components.loss.utils")
    host_mtp, output = module("components.loss.mtp"), SimpleNamespace(hidden_states=hidden, logits=None)
    return {
        "calculate_loss": lambda: utils.calculate_loss(fused, hidden_states=hidden, labels=labels, model=model),
        "calculate_mtp_loss": lambda: host_mtp.calculate_mtp_loss(
            fused, mtp_per_depth_h=depths, labels=labels, model=model
        ),
        "calculate_loss, the head gathered": lambda: utils.calculate_loss(
            fused, hidden_states=hidden, labels=labels, model=model, lm_weight=model.lm_head.weight
        ),
        "PipelineCausalLMLoss": lambda: host_mtp.PipelineCausalLMLoss(fused, model)(output, labels),
    }


FUNCTIONS = ("calculate_loss", "calculate_loss, the head gathered", "calculate_mtp_loss", "PipelineCausalLMLoss")


OF_PEFT = {
    "LoRA": {"target_modules": ["lm_head"]},
    "trained copy": {"target_modules": ["body"], "modules_to_save": ["lm_head"]},
    "trained rows": {"target_modules": ["body"], "trainable_token_indices": {"lm_head": [3, V - 1]}},
}
PAIRS = {
    "function": FUNCTIONS,
    "head": ["linear", "with bias", "frozen", "of another library", "parametrized", *OF_PEFT, "trained rows alone"],
    "labels": [torch.int64, torch.int32],
    "loss_weights": [False, True],
    "count": [None, 7, torch.tensor(7)],
    "cap": [None, "of the model", "of the loss"],
    "ignore_index": [-100, 3],
    "dtype": [torch.float64, torch.float32],
    "logits_dtype": [None, torch.float32],
    "exclude": [(), ("MaskedCrossEntropy", "DLLMCollator")],
    "layout": ["batch", "packed"],
    "around": ["nothing", "autocast", "default dtype", "no_grad"],
}  # fmt: skip


def no_pair(case):
    """Return True for values that no call takes together."""
    name = case.get("function", "calculate_loss")
    if not name.startswith("calculate_loss") and (case.get("loss_weights") or case.get("count") is not None):
        return True
    if name == "calculate_mtp_loss" and case.get("cap") == "of the model":  # which no head of a depth applies
        return True
    if case.get("layout") == "packed" and name in ("calculate_mtp_loss", "PipelineCausalLMLoss"):
        return True
    return case.get("around") == "autocast" and case.get("dtype") == torch.float32  # rounds logits to 16 bits


PAIRED = pairs(PAIRS, no_pair)
OF_DEPTHS = {case["head"]: n for n, case in enumerate(PAIRED) if case["function"] == "calculate_mtp_loss"}
OTHERS = [n for n, case in enumerate(PAIRED) if not case["head"].startswith(("trained", "LoRA"))]
DAILY = [*OTHERS, OF_DEPTHS["LoRA"], OF_DEPTHS["trained rows alone"]]


def model_of_pairs(head):
    model = Model()
    model.body, model.config = nn.Linear(D, D), SimpleNamespace(model_type="custom")
    if head == "with bias":
        model.lm_head = nn.Linear(D, V)
    elif head == "of another library":
        model.lm_head = ForeignLinear(model.lm_head)
    elif head == "parametrized":
        nn.utils.parametrizations.weight_norm(model.lm_head)
    elif head == "frozen":
        model.lm_head.requires_grad_(False)
    elif head != "linear":
        peft = pytest.importorskip("peft")
        config = peft.TrainableTokensConfig(target_modules=["lm_head"], token_indices=[3, V - 1])
        if head in OF_PEFT:
            config = peft.LoraConfig(r=2, init_lora_weights=False, **OF_PEFT[head])
        model.config = {"model_type": "custom"}
        model = peft.get_peft_model(model, config).base_model.model
        for name, p in model.named_parameters():
            if "delta" in name or "modules_to_save" in name:
                nn.init.normal_(p)
    return model


@pytest.mark.parametrize("number", every_time(DAILY, range(len(PAIRED))))
def test_pairs_of_features_of_the_losses(strategy, number):
    chosen = PAIRED[number]
    torch.manual_seed(number)
    model = model_of_pairs(chosen["head"]).to(chosen["dtype"]).train()
    hidden, depths, labels = batch()
    hidden, depths = hidden.to(chosen["dtype"]).requires_grad_(), [d.to(chosen["dtype"]) for d in depths]
    ignore, cap = chosen["ignore_index"], None if chosen["cap"] is None else 0.8
    labels = torch.where(labels == -100, ignore, labels).to(chosen["labels"])
    if chosen["layout"] == "packed":
        hidden, labels = hidden.detach().flatten(0, 1)[None].requires_grad_(), labels.flatten()[None]
    weights = torch.rand(labels.shape) if chosen["loss_weights"] else None
    config = SimpleNamespace(final_logit_softcapping=cap if chosen["cap"] == "of the model" else None)
    model.config = SimpleNamespace(get_text_config=lambda: config)
    integration.patch(logits_dtype=chosen["logits_dtype"], exclude=chosen["exclude"])
    own = cap if chosen["cap"] == "of the loss" else None
    fused = module("components.loss.linear_ce").FusedLinearCrossEntropy(ignore_index=ignore, logit_softcapping=own or 0)
    utils, host_mtp = module("components.loss.utils"), module("components.loss.mtp")

    def of_logits(h, labels, weights=None, count=None):
        z = model.lm_head(h)
        z = z if cap is None else cap * torch.tanh(z / cap)
        nll = nn.functional.cross_entropy(
            z.flatten(0, 1), labels.long().flatten(), ignore_index=ignore, reduction="none"
        )
        total = nll.sum() if weights is None else (nll * weights.flatten()).sum()
        return total if count is None else total / count

    def ours():
        options = {"labels": labels, "model": model, "loss_weights": weights, "num_label_tokens": chosen["count"]}
        if chosen["function"] == "calculate_mtp_loss":
            return host_mtp.calculate_mtp_loss(
                fused, mtp_per_depth_h=depths, labels=labels, model=model, ignore_index=ignore
            )
        if chosen["function"] == "PipelineCausalLMLoss":
            output = SimpleNamespace(hidden_states=hidden, logits=None)
            return host_mtp.PipelineCausalLMLoss(fused, model, ignore_index=ignore)(output, labels)
        gathered = {"lm_weight": model.lm_head.weight} if "gathered" in chosen["function"] else {}
        return utils.calculate_loss(fused, hidden_states=hidden, **options, **gathered)

    def theirs():
        if chosen["function"] != "calculate_mtp_loss":
            return of_logits(hidden, labels, weights, chosen["count"])
        shifted = [nn.functional.pad(labels[:, k:], (0, k), value=ignore) for k in (1, 2)]
        return 0.1 / 2 * sum(of_logits(h, y) for h, y in zip(depths, shifted, strict=True))

    with surrounding(chosen["around"], "cpu"):
        found = [function() for function in (ours, theirs)]
    torch.testing.assert_close(*found, check_dtype=False)
    trained = [p for p in (hidden, *model.parameters()) if p.requires_grad]
    if chosen["around"] != "no_grad" and found[1].requires_grad:
        grads = [torch.autograd.grad(loss, trained, allow_unused=True) for loss in found]
        for got, same in zip(*grads, strict=True):
            assert (got is None) == (same is None)
            if got is not None:
                torch.testing.assert_close(got, same)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_adapter_of_the_head_that_would_not_train_is_an_error(patched, function):
    model = Model()
    model.lm_head = AdaptedLinear()
    with pytest.raises(
        ValueError,
        match=r"^the LM head must train no parameter besides its weight and bias .* "
        r"got lora_A\.weight, lora_B\.weight;",
    ):
        fused_losses(model)[function]()
    model.lm_head.lora_A.requires_grad_(False)
    model.lm_head.lora_B.requires_grad_(False)
    assert fused_losses(model)[function]().isfinite()


def test_excluded_losses_use_the_replaced_parts(strategy):
    """I-DLM's loss is then the host's, but uses the package's per-token NLL and output type."""
    integration.patch(exclude=["IDLMLoss"])
    loss = module("components.loss.dllm_loss")
    assert loss.IDLMLoss.__module__ == "nemo_automodel.components.loss.dllm_loss"
    logits, ids = torch.randn(2, 12, V, requires_grad=True), torch.randint(0, V, (2, 6))
    out = loss.IDLMLoss()(logits, ids, torch.ones(2, 6, dtype=torch.bool), torch.ones(2, 6), seq_len=6)
    assert isinstance(out, dllm_kernels.DLLMLossOutput)
    out.total_loss.backward()
    assert logits.grad.isfinite().all()


SAMPLES = [
    {"input_ids": [*range(5, 5 + n)], "loss_mask": [0] * m + [1] * (n - m), "attention_mask": [1] * n}
    for n, m in ((5, 2), (2, 1), (9, 2))
]


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("sizes", [{"pad_seq_len_divisible": 0}, {"pad_seq_len_divisible": -3}, {"max_seq_len": 0},
                                   {"max_seq_len": -2}, {"pad_seq_len_divisible": 6, "pad_token_id": 3}],
                         ids=str)  # fmt: skip
def test_the_collator_of_the_host_and_ours_agree(strategy, sizes, window):
    home, options = module("components.datasets.dllm.collate"), {"block_size": 4, "eos_token_id": 2, **sizes}
    host = home.DLLMCollator(response_window=window, **options)(SAMPLES)
    integration.patch()
    ours = home.DLLMCollator(response_window=window, **options)(SAMPLES)
    assert host.keys() == ours.keys()
    for name in host:
        assert ours[name].dtype == host[name].dtype
        assert torch.equal(ours[name], host[name])


def test_the_example_runs(strategy, capsys):
    assert runpy.run_path(str(ROOT / "examples" / "nemo_automodel_patch.py"))["main"]() == "dllm_kernels.losses.mdlm"
    assert "nemo_automodel.recipes.dllm.strategy.MDLMCrossEntropyLoss" in capsys.readouterr().out
    assert strategy.MDLMCrossEntropyLoss is not dllm_kernels.MDLMCrossEntropyLoss
