"""Corruption in nemo_automodel's recipe: one call for a batch, with the recipe's seed for each row."""

import ast
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dllm_kernels
from dllm_kernels.integrations import nemo_automodel as integration

absent = [name for name in ("nemo_automodel", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.peer, pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} not installed")]
RECIPE = "nemo_automodel.recipes.dllm.train_ft"
V, MASK, EPS, L = 50, 49, 0.1, 24
MODES = {
    "uniform": ("mdlm", None),
    "sequences": ("hybrid", None),
    "blocks": ("hybrid", 10),
    "random tokens": ("block_diffusion", None),
    "mixed": ("scdd", None),
    "all masked": ("idlm", None),
}


def source():
    """Return the recipe's loop and its function of seeds as source, without the packages that its module imports."""
    folder = importlib.import_module("nemo_automodel.recipes.dllm").__path__[0]
    body = ast.parse((Path(folder) / "train_ft.py").read_text()).body
    (recipe,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == "DiffusionLMSFTRecipe")
    recipe.bases, recipe.body = [], [node for node in recipe.body if getattr(node, "name", "") == "_apply_corruption"]
    wanted = [
        node
        for node in body
        if (isinstance(node, ast.Assign) and "SEED" in ast.unparse(node.targets[0]))
        or (isinstance(node, ast.Assign) and "CORRUPTION" in ast.unparse(node.targets[0]))
        or getattr(node, "name", "") == "corruption_sample_seed"
    ]
    return "import torch\n" + "\n".join(map(ast.unparse, [*wanted, recipe]))


class Finder:
    """Finds the module of the recipe, with the code of :func:`source` or a changed one."""

    code = None

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == RECIPE else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(self.code, vars(module))


@pytest.fixture
def finder(monkeypatch):
    finder = Finder()
    finder.code = source()
    for home in integration.HOMES:
        importlib.import_module(f"nemo_automodel.{home}")
    importlib.import_module("nemo_automodel.recipes.dllm.strategy")
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, RECIPE, raising=False)
    yield finder
    integration.unpatch()
    sys.modules.pop(RECIPE, None)


@pytest.fixture
def module(finder):
    return importlib.import_module(RECIPE)


def recipe_of(module, mode, strategy=None, **more):
    name, block_size = MODES[mode]
    strategy = strategy or importlib.import_module("nemo_automodel.recipes.dllm.strategy").get_dllm_strategy(name)
    strategy.create_loss_fn({"vocab_size": V, "mask_token_id": MASK, "num_timesteps": 20})
    recipe = module.DiffusionLMSFTRecipe()
    vars(recipe).update(
        dllm_strategy=strategy, mask_token_id=MASK, step_scheduler=SimpleNamespace(step=3, grad_acc_steps=2),
        dllm_eps=EPS, dllm_block_size=block_size, dllm_half_life_ratio=None, _self_cond_base_seed=2**62 + 11, **more,
    )  # fmt: skip
    return recipe


def batch(B, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, MASK, (B, L), generator=g), (torch.rand(B, L, generator=g) < 0.8).float()


def direct(mode, ids, loss_mask, seeds):
    """Call the routines of this package as the host's strategies do."""
    if mode == "uniform":
        return dllm_kernels.corrupt_uniform(ids, loss_mask, MASK, eps=EPS, seeds=seeds)
    if mode == "sequences":
        return dllm_kernels.corrupt_uniform(ids, loss_mask, MASK, eps=EPS, seeds=seeds)
    if mode == "blocks":
        return dllm_kernels.corrupt_blockwise(ids, loss_mask, MASK, 10, eps=EPS, seeds=seeds)
    return dllm_kernels.corrupt_uniform_random(ids, loss_mask, V, eps=EPS, seeds=seeds)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_takes_one_call_with_a_seed_for_each_row(module, mode, B):
    recipe, (ids, loss_mask) = recipe_of(module, mode), batch(B)
    before = ids.clone()
    theirs, original = recipe._apply_corruption(ids, loss_mask, 1), vars(module.DiffusionLMSFTRecipe).copy()
    report = integration.patch()
    assert report.batched == ("DiffusionLMSFTRecipe._apply_corruption",)
    assert "  DiffusionLMSFTRecipe._apply_corruption corrupts a batch in one call" in str(report).splitlines()
    ours = recipe._apply_corruption(ids, loss_mask, microbatch_idx=1)
    assert torch.equal(ids, before)
    for o, t in zip(ours, theirs, strict=True):
        assert (o.shape, o.dtype, o.is_contiguous()) == (t.shape, t.dtype, t.is_contiguous())
    seeds = [module.corruption_sample_seed(2**62 + 11, 3, 0, 1, B, 2, 1, row) for row in range(B)]
    if mode == "all masked":
        expected = theirs
    elif mode == "mixed":  # each row alone

        def of_step(*arguments):
            return seeds[min(arguments[-1] + row, B - 1)]

        rows = []
        for row in range(B):
            with pytest.MonkeyPatch.context() as m:
                m.setattr(module, "corruption_sample_seed", of_step)
                integration.unpatch()
                integration.patch()
                rows.append(recipe._apply_corruption(ids[row : row + 1], loss_mask[row : row + 1], 0))
        expected = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    else:
        expected = direct(mode, ids, loss_mask, torch.tensor(seeds))
    for o, e in zip(ours, expected, strict=True):
        assert torch.equal(o, e)
    integration.unpatch()
    assert vars(module.DiffusionLMSFTRecipe) == original
    for o, t in zip(recipe._apply_corruption(ids, loss_mask, 1), theirs, strict=True):
        assert torch.equal(o, t)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("mode", MODES)
def test_noise_does_not_depend_on_the_number_of_ranks(module, mode, monkeypatch):
    """Samples are dealt to the ranks in turn."""
    integration.patch()
    ids, loss_mask = batch(6)
    alone = recipe_of(module, mode)._apply_corruption(ids, loss_mask, 0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in range(3):
        ranks = {"_get_dp_rank": lambda rank=rank: rank, "_get_dp_group_size": lambda: 3}
        mine = recipe_of(module, mode, **ranks)._apply_corruption(ids[rank::3], loss_mask[rank::3], 0)
        for one, all_rows in zip(mine, alone, strict=True):
            assert torch.equal(one, all_rows[rank::3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", MODES)
def test_noise_has_the_distribution_of_the_host(module, mode):
    """Means over 1,500 rows of what each row has: its level, its noise, their products, and the noise by position."""
    B = 1500
    ids, _ = batch(B)
    recipe = recipe_of(module, mode)

    def moments():
        noisy, noise, p = (t.double() for t in recipe._apply_corruption(ids, torch.ones(B, L), 0))
        masked = (noisy == MASK).double()
        columns = [p[:, :1], p[:, :1] ** 2, noise, (noise * p).mean(1, True), (noise / p).mean(1, True), masked]
        found = torch.cat(columns, 1)
        return found.mean(0), found.var(0) / B

    theirs, variance = moments()
    integration.patch()
    ours, other_variance = moments()
    assert ((ours - theirs).abs() <= 5 * (variance + other_variance).sqrt() + 1e-12).all()


def test_seeds_of_another_version_are_computed_one_by_one(module, monkeypatch):
    """The differences of consecutive seeds are not equal."""
    seeds = torch.tensor([7, 8, 2**62, 3])
    monkeypatch.setattr(module, "corruption_sample_seed", lambda *arguments: seeds.tolist()[arguments[-1]])
    integration.patch()
    ids, loss_mask = batch(4)
    for o, e in zip(
        recipe_of(module, "uniform")._apply_corruption(ids, loss_mask),
        direct("uniform", ids, loss_mask, seeds),
        strict=True,
    ):
        assert torch.equal(o, e)


def uses_the_generator(self, input_ids, loss_mask, mask_token_id, *, eps, block_size, half_life_ratio, generator=None):
    noise = torch.rand(input_ids.shape, generator=generator).lt(0.5)
    return torch.where(noise, mask_token_id, input_ids), noise, torch.full(input_ids.shape, 0.5)


def in_a_closure(draw):
    def apply_corruption(self, *arguments, **options):
        return draw(self, *arguments, **options)

    return apply_corruption


@pytest.mark.parametrize("draw", [uses_the_generator, in_a_closure(uses_the_generator)])
@pytest.mark.parametrize("on_object", [False, True])
def test_a_strategy_of_the_user_keeps_the_loop(module, draw, on_object):
    strategies = importlib.import_module("nemo_automodel.recipes.dllm.strategy")
    strategy = type("Strategy", (strategies.MDLMStrategy,), {} if on_object else {"apply_corruption": draw})()
    if on_object:
        strategy.apply_corruption = types.MethodType(draw, strategy)
    recipe, inputs = recipe_of(module, "uniform", strategy), batch(4)
    expected = recipe._apply_corruption(*inputs)
    integration.patch()
    for o, e in zip(recipe._apply_corruption(*inputs), expected, strict=True):
        assert torch.equal(o, e)


@pytest.mark.parametrize("name", ["corrupt_uniform", "_apply_corruption"])
def test_an_excluded_name_keeps_the_loop(module, name):
    """The loop of an excluded routine gives the host's noise, and an excluded loop the noise of generators."""
    recipe, inputs = recipe_of(module, "uniform"), batch(4)
    theirs = recipe._apply_corruption(*inputs)
    report = integration.patch(exclude=[name])
    assert (name, "excluded") in report.kept
    assert report.batched == (() if name == "_apply_corruption" else ("DiffusionLMSFTRecipe._apply_corruption",))
    assert torch.equal(recipe._apply_corruption(*inputs)[1], theirs[1]) == (name == "corrupt_uniform")


CHANGED = (".manual_seed(seed)", ".manual_seed(seed ^ hash(self))")


@pytest.mark.everyday(1)
@pytest.mark.parametrize("imported", [False, True])
def test_an_unknown_loop_is_kept_and_reported(finder, imported):
    finder.code = finder.code.replace(*CHANGED)
    what = rf"^{RECIPE}\.DiffusionLMSFTRecipe\._apply_corruption seeds or corrupts its rows in an unknown way"
    if not imported:
        integration.patch(strict=True)
        with pytest.warns(UserWarning, match=f"{what}; it stays as it is"):
            importlib.import_module(RECIPE)
    else:
        importlib.import_module(RECIPE)
        with pytest.raises(RuntimeError, match=f"nothing was replaced:\n  {what[1:]}"):
            integration.patch(strict=True)
        with pytest.warns(UserWarning, match="_apply_corruption stay as they are:"):
            report = integration.patch()
        assert report.batched == ()
        assert "_apply_corruption" in dict(report.kept)
    assert sys.modules[RECIPE].DiffusionLMSFTRecipe._apply_corruption.__module__ == RECIPE
    assert not hasattr(sys.modules[RECIPE].DiffusionLMSFTRecipe._apply_corruption, "__wrapped__")


def test_a_version_without_the_loop_has_nothing_to_replace(finder):
    finder.code = "class DiffusionLMSFTRecipe:\n    def _apply_corruption(self):\n        return 1\n"
    importlib.import_module(RECIPE)
    report = integration.patch(strict=True)
    assert report.batched == ()


def test_a_recipe_imported_after_patch_is_patched_and_restored(finder):
    before = list(sys.meta_path)
    integration.patch()
    module = importlib.import_module(RECIPE)
    assert sys.meta_path == before
    assert module.__loader__ is module.__spec__.loader is finder
    recipe, (ids, loss_mask) = recipe_of(module, "uniform"), batch(4)
    seeds = torch.tensor([module.corruption_sample_seed(2**62 + 11, 3, 0, 1, 4, 2, 0, row) for row in range(4)])
    assert torch.equal(recipe._apply_corruption(ids, loss_mask)[0], direct("uniform", ids, loss_mask, seeds)[0])
    integration.unpatch()
    assert not hasattr(module.DiffusionLMSFTRecipe._apply_corruption, "__wrapped__")
    del sys.modules[RECIPE]
    integration.patch()
    integration.unpatch()
    assert sys.meta_path == before
    late = importlib.import_module(RECIPE)
    assert not hasattr(late.DiffusionLMSFTRecipe._apply_corruption, "__wrapped__")


def test_no_rows(module):
    integration.patch()
    with pytest.raises((RuntimeError, ValueError), match="non-empty list"):  # as in the host
        recipe_of(module, "uniform")._apply_corruption(*batch(0))
