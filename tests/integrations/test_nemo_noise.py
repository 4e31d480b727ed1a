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
from tests.support.hosts import defined_in

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


def corrupt_uniform(input_ids, loss_mask, mask_token_id, eps=1e-3, generator=None):
    """Mask half of the tokens: the user's noise under the name of the framework's routine."""
    noise = torch.rand(input_ids.shape, generator=generator).lt(0.5)
    return torch.where(noise, mask_token_id, input_ids), noise, torch.full(input_ids.shape, 0.5)


def of_a_name(self, input_ids, loss_mask, mask_token_id, *, eps, block_size, half_life_ratio, generator=None):
    return corrupt_uniform(input_ids, loss_mask, mask_token_id, eps=eps, generator=generator)


def in_a_closure(self, *arguments, eps, block_size, half_life_ratio, **options):
    return (lambda: corrupt_uniform(*arguments, **options))()


@pytest.mark.parametrize("draw", [of_a_name, in_a_closure])
@pytest.mark.parametrize("place", ["class", "object", "class of the framework"])
def test_a_strategy_of_the_user_keeps_the_loop(module, monkeypatch, draw, place):
    strategies = importlib.import_module("nemo_automodel.recipes.dllm.strategy")
    strategy = type("Strategy", (strategies.MDLMStrategy,), {"apply_corruption": draw} if place == "class" else {})()
    if place == "object":
        strategy.apply_corruption = types.MethodType(draw, strategy)
    elif place == "class of the framework":
        monkeypatch.setattr(strategies.MDLMStrategy, "apply_corruption", draw)
    recipe, inputs = recipe_of(module, "uniform", strategy), batch(4)
    expected = recipe._apply_corruption(*inputs)
    integration.patch()
    for o, e in zip(recipe._apply_corruption(*inputs), expected, strict=True):
        assert torch.equal(o, e)


@pytest.mark.filterwarnings("ignore:.*unexpected definitions")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("home", ["recipes.dllm.strategy", "components.datasets.dllm.corruption", "both"])
def test_a_routine_of_the_user_in_a_module_of_the_framework_is_called(module, monkeypatch, home, when):
    strategies, routines = (
        importlib.import_module(f"nemo_automodel.{name}")
        for name in ("recipes.dllm.strategy", "components.datasets.dllm.corruption")
    )
    places = {"both": [strategies, routines], routines.__name__[15:]: [routines]}.get(home, [strategies])
    recipe, inputs, loop = recipe_of(module, "uniform"), batch(4), module.DiffusionLMSFTRecipe._apply_corruption
    if when == "after":
        integration.patch()
    with monkeypatch.context() as m:  # undone before unpatch
        for place in places:
            m.setattr(place, "corrupt_uniform", corrupt_uniform)
        expected = loop(recipe, *inputs)
        if when == "before":
            integration.patch()
        assert all(place.corrupt_uniform is corrupt_uniform for place in places)
        for o, e in zip(recipe._apply_corruption(*inputs), expected, strict=True):
            assert torch.equal(o, e) or strategies not in places
        assert (o == 0.5).all() == (strategies in places)


@pytest.mark.parametrize("name", ["corrupt_uniform", "_apply_corruption"])
def test_an_excluded_name_keeps_the_loop(module, name):
    """The loop of an excluded routine gives the host's noise, and an excluded loop the noise of generators."""
    recipe, inputs = recipe_of(module, "uniform"), batch(4)
    theirs = recipe._apply_corruption(*inputs)
    report = integration.patch(exclude=[name])
    assert (name, "excluded") in report.kept
    assert report.batched == ()
    assert torch.equal(recipe._apply_corruption(*inputs)[1], theirs[1]) == (name == "corrupt_uniform")


CHANGED = {
    "seeds": (".manual_seed(seed)", ".manual_seed(seed + 5)"),
    "one generator": (".manual_seed(seed)", ".manual_seed(base_seed)"),
    "other order": ("noisy_parts.append(n_j)", "noisy_parts.insert(0, n_j)"),
    "two rows": ("[j:j + 1]", "[j // 2:j // 2 + 2]"),
    "options": ("eps=self.dllm_eps", "eps=self.dllm_eps * j"),
    "no generator": ("generator=gen", "generator=None"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_the_loop_of_another_version(finder, change):
    """Rows with seeds of their own are corrupted in one call; any other loop runs as it is."""
    old, new = CHANGED[change]
    assert old in finder.code
    finder.code = finder.code.replace(old, new)
    module = importlib.import_module(RECIPE)
    integration.patch(strict=True)
    recipe, (ids, loss_mask) = recipe_of(module, "uniform"), batch(4)
    torch.manual_seed(0)
    ours = recipe._apply_corruption(ids, loss_mask)
    if change == "seeds":
        seeds = [module.corruption_sample_seed(2**62 + 11, 3, 0, 1, 4, 2, 0, row) + 5 for row in range(4)]
        expected = direct("uniform", ids, loss_mask, torch.tensor(seeds))
    else:
        torch.manual_seed(0)
        expected = module.DiffusionLMSFTRecipe._apply_corruption.__wrapped__(recipe, ids, loss_mask)
    for o, e in zip(ours, expected, strict=True):
        assert torch.equal(o, e)


def test_a_draw_that_no_seeds_of_rows_give_keeps_the_loop(module, monkeypatch):
    """The strategy of a later version draws one number for each position."""
    strategies = importlib.import_module("nemo_automodel.recipes.dllm.strategy")

    def apply_corruption(self, input_ids, loss_mask, mask_token_id, *, generator=None, **_):
        noise = torch.rand(input_ids.shape, generator=generator) < 0.5
        return torch.where(noise, mask_token_id, input_ids), noise, noise.float()

    monkeypatch.setattr(strategies.MDLMStrategy, "apply_corruption", defined_in(strategies, apply_corruption))
    recipe, inputs = recipe_of(module, "uniform"), batch(4)
    expected = recipe._apply_corruption(*inputs)
    integration.patch()
    for o, e in zip(recipe._apply_corruption(*inputs), expected, strict=True):
        assert torch.equal(o, e)


def test_a_method_that_is_no_loop_stays_as_it_is(finder):
    finder.code = "class DiffusionLMSFTRecipe:\n    def _apply_corruption(self):\n        return 1\n"
    integration.patch(strict=True)
    assert importlib.import_module(RECIPE).DiffusionLMSFTRecipe()._apply_corruption() == 1


def test_the_loop_may_write_to_the_recipe_and_read_the_strategy(finder):
    counted = "self.steps = getattr(self, 'steps', 0) + self.dllm_strategy.size; base_seed = "
    finder.code = finder.code.replace("base_seed = ", counted)
    module = importlib.import_module(RECIPE)
    integration.patch()
    recipe = recipe_of(module, "uniform")
    recipe.dllm_strategy.size = 3
    recipe._apply_corruption(*batch(4))
    assert recipe.steps == 3


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
