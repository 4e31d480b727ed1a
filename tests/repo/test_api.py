"""Drop-in replacement: names, modules, order, keywords and defaults equal the original's documentation."""

import importlib
import inspect
import pydoc
import re
import typing

import pytest
import torch

import dllm_kernels
import dllm_kernels.ops
import reference
from dllm_kernels import DFlashDecayLoss, DLLMLossOutput, losses
from dllm_kernels.integrations import nemo_automodel
from tests.support.cases import FIRSTS, LOSSES
from tests.support.op_cases import FIRST_OPS
from tests.support.readme import ROOT

NO_LOSSES = (
    losses.DLLMLossOutput, losses.SCDDSchedule, losses.acceptance_length, losses.acceptance_stats,
    losses.block_targets, losses.sample_anchors, losses.sample_prefix, losses.compute_per_token_nll,
    losses.draft_accuracy, losses.next_token_mask, losses.scdd_schedule,
)  # fmt: skip
HOMES = {
    "losses": " ".join(
        ["_compute_per_token_nll", *(public_object.__name__ for public_object in NO_LOSSES)]
        + [function.__name__ for case in FIRSTS if case in LOSSES for function in case.functions]
    ),
    "mtp": "calculate_mtp_loss calculate_loss PipelineCausalLMLoss MTPLossConfig MTPLossOutput MaskedCrossEntropy "
    "FusedLinearCrossEntropy",
    "corruption": "gumbel_topk batched_gumbel_topk _batched_gumbel_topk corrupt_uniform corrupt_blockwise "
    "corrupt_uniform_random corrupt_all_masked",
    "collate": "DLLMCollator",
}
OPS = [name for case in FIRST_OPS for name in (case.name, case.older) if name]


@pytest.mark.parametrize(("home", "name"), [(home, name) for home, names in HOMES.items() for name in names.split()])
def test_every_name_is_in_its_module_and_in_the_package(home, name):
    module = importlib.import_module(f"dllm_kernels.{home}")
    assert getattr(module, name) is getattr(dllm_kernels, name)


@pytest.mark.parametrize("name", OPS)
def test_ops(name):
    ops = dllm_kernels.ops
    advice = f"import {name} in dllm_kernels/ops/__init__.py, and add it to its __all__"
    assert callable(getattr(ops, name, None)), advice
    assert name in ops.__all__, advice
    assert getattr(dllm_kernels, name) is getattr(ops, name)


def test_the_return_type_of_every_op_is_exported():
    ops = dllm_kernels.ops
    types = {typing.get_type_hints(vars(ops)[name])["return"] for name in OPS}
    missing = {t.__name__ for t in types if t.__module__.startswith("dllm_kernels.")} - {*ops.__all__}
    assert not missing, f"import {sorted(missing)} in dllm_kernels/ops/__init__.py, and add them to its __all__"


def test_every_oracle_is_exported():
    """Of each op, and of each file with a function of its name."""
    names = {path.stem for path in (ROOT / "reference").glob("*.py") if f"def {path.stem}(" in path.read_text()}
    assert len(names) > 5
    names |= {case.name for case in FIRST_OPS} - {"token_log_probs", "gumbel_topk_mask"}  # their oracles have more uses
    missing = names - {name for name in reference.__all__ if callable(getattr(reference, name, None))}
    assert not missing, f"import {sorted(missing)} in reference/__init__.py, and add them to its __all__"


@pytest.mark.parametrize("name", [case.name for case in FIRST_OPS])
def test_every_op_has_a_line_in_the_changelog_and_in_the_table_of_ops(name):
    """The older form of an op is named in the list of shorthands."""
    assert f"`{name}`" in (ROOT / "CHANGELOG.md").read_text(), f"add a line about `{name}` to CHANGELOG.md"
    table = (ROOT / "docs" / "ops" / "index.md").read_text()
    assert f"\n| [`{name}`][{name}] |" in table, f"add a row of [`{name}`][{name}] to docs/ops/index.md"


@pytest.mark.parametrize("module", ["", ".losses", ".ops", ".distributed"])
def test_all_resolves_without_repeats_and_is_in_dir(module):
    """Two modules import some of their names on first use."""
    module = importlib.import_module("dllm_kernels" + module)
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    assert all(hasattr(module, name) for name in module.__all__)


def test_aliases():
    assert losses._compute_per_token_nll is losses.compute_per_token_nll
    assert dllm_kernels._batched_gumbel_topk is dllm_kernels.batched_gumbel_topk


def test_the_version_is_one_of_a_release():
    assert dllm_kernels.__version__.split(".")[0].isdigit()


# The original's documentation, as Python. Newer versions of the original also pass the parameters in ADDED.
DOCUMENTED = {
    case.functions[0].__name__ + rest: signature for case in LOSSES for rest, signature in case.documented.items()
} | {
    "scdd_schedule": "t, *, max_ratio, gamma_shape, t_peak",
    "SCDDSchedule": "clean_mass, uniform_mass, absorbed_mass, gamma, rho",
    "_compute_per_token_nll": "logits, target_ids",
    "gumbel_topk": "log_w, k",
    "_batched_gumbel_topk": "log_w, k, generator=None",
    "corrupt_uniform": "input_ids, loss_mask, mask_token_id, eps=0.001, generator=None",
    "corrupt_blockwise": "input_ids, loss_mask, mask_token_id, block_size=None, eps=0.001, half_life_ratio=0.25, "
    "generator=None",
    "corrupt_uniform_random": "input_ids, loss_mask, vocab_size, block_size=None, eps=0.001, generator=None",
    "corrupt_all_masked": "input_ids, loss_mask, mask_token_id",
    "DLLMCollator": "pad_token_id=0, eos_token_id=None, block_size=None, pad_seq_len_divisible=None, max_seq_len=None, "
    "supervise_padding=False, response_window=False",
    "PipelineCausalLMLoss": "loss_fn, model, scaling_factor=None, ignore_index=-100",
    "MTPLossConfig": "scaling_factor=None, ignore_index=-100",
}
ADDED = {"noisy_input_ids", "grad_reduce_group"}


def resolve(path):
    public_object = dllm_kernels
    for name in path.split("."):
        public_object = getattr(public_object, name)
    return public_object


@pytest.mark.parametrize("path", DOCUMENTED)
def test_signatures(path):
    parameters = list(inspect.signature(resolve(path)).parameters.values())
    namespace: dict[str, typing.Any] = {}
    exec(f"def documented({DOCUMENTED[path]}): ...", namespace)
    documented = list(inspect.signature(namespace["documented"]).parameters.values())
    ours = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert ours[: len(documented)] == documented
    for added in ours[len(documented) :]:
        assert added.kind == inspect.Parameter.KEYWORD_ONLY or added.name in ADDED, added
        assert added.default is not added.empty or added.name in ADDED, added
        assert added.default is not inspect.Parameter.empty, added


def test_calculate_mtp_loss_takes_keywords():
    parameters = inspect.signature(dllm_kernels.calculate_mtp_loss).parameters
    names = """mtp_per_depth_h mtp_per_depth_logits labels model scaling_factor num_label_tokens ignore_index cu_seqlens
    seq_idx lm_weight return_per_depth"""
    documented = names.split()
    assert next(iter(parameters)) == "loss_fn"
    assert all(parameters[name].kind == inspect.Parameter.KEYWORD_ONLY for name in documented)
    defaults = {name: parameters[name].default for name in documented}
    assert defaults["labels"] is defaults["model"] is inspect.Parameter.empty
    assert (defaults["scaling_factor"], defaults["ignore_index"], defaults["return_per_depth"]) == (0.1, -100, False)
    none = ("mtp_per_depth_h", "mtp_per_depth_logits", "num_label_tokens", "cu_seqlens", "seq_idx", "lm_weight")
    assert all(defaults[name] is None for name in none)


@pytest.mark.parametrize("case", [case for case in LOSSES if isinstance(case.loss, type)], ids=lambda case: case.name)
def test_loss_classes_are_modules_with_the_documented_parameters(case):
    loss = case.loss(**case.settings)
    assert isinstance(loss, torch.nn.Module)
    assert tuple(loss.state_dict()) == tuple(dict(loss.named_parameters())) == case.learns
    assert loss.backend == "auto"


def test_every_loss_has_a_case_and_the_module_of_the_framework():
    """A loss without a case would miss all tests that run for every loss."""
    named = {function.__name__ for case in LOSSES for function in case.functions}
    public = {name for name in losses.__all__ if getattr(losses, name) not in NO_LOSSES}
    assert named == public
    homes = {(case.home, case.functions[0].__name__) for case in LOSSES if case.home}
    replaced = {(home, name) for home, names in nemo_automodel.HOMES.items() for name in names if name in public}
    assert homes == replaced


def test_static_methods_are_static():
    for name in ("_draft_acc_per_pos", "_chunk_nll"):
        assert isinstance(inspect.getattr_static(DFlashDecayLoss, name), staticmethod)


def test_the_output_is_a_named_tuple_of_the_documented_fields():
    documented = ("total_loss", "dllm_loss", "draft_correct_per_pos", "draft_count_per_pos")
    assert DLLMLossOutput._fields[:4] == documented
    out = DLLMLossOutput(torch.tensor(1.0), torch.tensor(2.0))
    assert all(field is None for field in out[2:])
    assert isinstance(out, tuple)


def test_every_loss_can_be_called_by_position():
    x, ids = torch.randn(2, 6, 7), torch.randint(0, 7, (2, 6))
    on, p = torch.ones(2, 6), torch.rand(2, 6)
    for name in ("MDLMCrossEntropyLoss", "BlockDiffusionCrossEntropyLoss", "HybridDiffusionLLMLoss"):
        loss = getattr(dllm_kernels, name)()
        assert loss(x, ids, on, p, on, on, 3, 4, x, ids).total_loss.isfinite()
    assert dllm_kernels.HybridDiffusionLLMLoss(0.5, False).alpha == 0.5
    dflash = DFlashDecayLoss(5.0, True, 64, "mean")
    assert dflash(x, ids, on, 12, 4).draft_count_per_pos.tolist() == [4.0, 4.0, 4.0]
    assert dflash.forward_fused(x, torch.eye(7), ids, on, 12, 4, torch.zeros(7)).total_loss.isfinite()
    intro = dllm_kernels.IDLMLoss(0.5, True)(torch.randn(2, 12, 7), ids, on, on, seq_len=6, num_diffusion_tokens=3)
    assert intro.total_loss.isfinite()
    assert dllm_kernels.encoder_ar_loss(x, ids, on, 5).isfinite()


PUBLIC = {name: getattr(dllm_kernels, name) for name in dllm_kernels.__all__ if name != "__version__"}
PUBLIC |= {f"ops.{name}": getattr(dllm_kernels.ops, name) for name in dllm_kernels.ops.__all__}
PUBLIC |= {
    f"{name}.{method}": vars(public_object)[method]
    for name, public_object in PUBLIC.items()
    for method in ("forward", "forward_fused")
    if method in getattr(public_object, "__dict__", ())
}


MODULES = [
    name
    for name, public_object in PUBLIC.items()
    if isinstance(public_object, type) and issubclass(public_object, torch.nn.Module)
]


@pytest.mark.parametrize("name", MODULES)
def test_the_help_of_a_module_describes_it_before_nn_module(name):
    """nn.Module provides descriptions for a constructor and a ``forward`` without docstring."""
    text = pydoc.plaintext.document(PUBLIC[name])
    own, inherited, _ = text.partition("inherited from torch.nn.modules.module.Module")
    first = inspect.getdoc(PUBLIC[name]).splitlines()[0]
    assert own.index(first) < own.index("Method resolution order")
    assert inherited
    for method in (torch.nn.Module.__init__, torch.nn.Module.forward):
        words = (inspect.getdoc(method) or "Define the computation performed at every call.").splitlines()[0]
        assert words not in own


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring_with_its_arguments(name):
    """Only own docstrings count: ``inspect.getdoc`` gives a class without one that of nn.Module or of tuple."""
    own = vars(PUBLIC[name]).get("__doc__") if isinstance(PUBLIC[name], type) else PUBLIC[name].__doc__
    assert own
    owner, _, last = name.rpartition(".")
    if last.startswith(("linear_", "weighted_linear_")) or last.endswith("_fused"):  # the arguments of an op and a head
        other = re.search(r":(?:func|meth):`(\w+)`", own)[1]
        op = getattr(getattr(dllm_kernels, owner) if owner else dllm_kernels, other)
        own = "\n".join([own, op.__doc__, dllm_kernels.LinearLogits.__doc__])
    assert not own.startswith(f"{name}(")  # the docstring that Python generates for a named tuple or a dataclass
    parameters = [p for p in inspect.signature(PUBLIC[name]).parameters if p != "self"]
    assert not [p for p in parameters if not re.search(rf"\b{p}\b", own)]
