"""nemo_automodel patched and unpatched: its own recipe and strategies compute the same, and nothing is left behind."""

import importlib
import importlib.util
import inspect
import os
import pickle
import runpy
import subprocess
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
from tests.parity import assert_as_good_as_plain, largest_error

absent = [name for name in ("nemo_automodel", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.peer, pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} not installed")]
ROOT = Path(__file__).parent.parent


def module(name):
    return importlib.import_module(f"nemo_automodel.{name}")


@pytest.fixture
def strategy():
    """The host's strategies, unpatched; whatever the test patches is put back."""
    for home in integration.HOMES:
        module(home)
    yield module("recipes.dllm.strategy")
    integration.unpatch()


@pytest.fixture
def patched(strategy):
    return integration.patch()


def held():
    """Every attribute of every loaded module of the host."""
    modules = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "nemo_automodel"}
    return {(n, a): v for n, m in modules.items() for a, v in vars(m).items() if not a.startswith("__")}


def assert_identical(before, after):
    assert before.keys() == after.keys()
    assert not [key for key in before if before[key] is not after[key]]


# Through the host's recipe and strategies -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    out = tmp_path_factory.mktemp("recipe") / "steps.pt"
    command = [sys.executable, "-W", "ignore", "-m", "tests.nemo_recipe", str(out)]
    done = subprocess.run(command, cwd=ROOT, env={"OMP_NUM_THREADS": "1"} | os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize("mode", ["mdlm", "hybrid", "dflash", "dflash logits"])
def test_a_recipe_step_gives_the_same_loss_and_gradients(steps, mode):
    case = steps["cases"][mode]
    assert len(case["ours"][0]["results"]) > 2
    for place in range(len(case["ours"][0]["results"])):
        ours, host, exact = ([run["results"][place] for run in case[who]] for who in ("ours", "host", "exact"))
        assert all(o.dtype == h.dtype for o, h in zip(ours, host, strict=True))
        assert_as_good_as_plain(ours, exact, largest_error(host, exact), f"{mode}, result {place}", steps["sizes"])


@pytest.mark.parametrize("mode", ["dflash", "dflash logits"])
def test_a_recipe_step_counts_the_same_draft_accuracy(steps, mode):
    for ours, host in zip(steps["cases"][mode]["ours"], steps["cases"][mode]["host"], strict=True):
        assert len(ours["counts"]) == 2
        for o, h in zip(ours["counts"], host["counts"], strict=True):
            assert o.shape == (3,)
            assert torch.equal(o, h)


def test_a_strategy_whose_loss_is_not_replaced_computes_what_it_did(steps):
    for ours, host in zip(steps["cases"]["scdd"]["ours"], steps["cases"]["scdd"]["host"], strict=True):
        assert all(torch.equal(o, h) for o, h in zip(ours["results"], host["results"], strict=True))


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


def test_the_two_channel_corruption_of_a_strategy_is_ours(strategy):
    """As SCDD's strategy calls it; the original refuses the same sums."""
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
    before = held()
    report = integration.patch()
    assert {name for _, name in report.replaced} == {name for names in integration.HOMES.values() for name in names}
    assert ("nemo_automodel.recipes.dllm.strategy", "MDLMCrossEntropyLoss") in report.replaced
    assert strategy.MDLMCrossEntropyLoss is dllm_kernels.MDLMCrossEntropyLoss
    assert isinstance(strategy.MDLMStrategy().create_loss_fn({}), dllm_kernels.MDLMCrossEntropyLoss)
    after = held()
    assert {key for key in before if before[key] is not after[key]} == set(report.replaced)
    assert integration.unpatch() == report.replaced
    assert_identical(before, held())
    assert integration.unpatch() == ()


def test_a_second_patch_does_nothing(patched):
    before = held()
    again = integration.patch()
    assert_identical(before, held())
    assert again.already
    assert not patched.already
    assert again.replaced == patched.replaced


def test_the_report_reads_well(patched):
    lines = str(patched).splitlines()
    assert lines[0] == f"nemo_automodel {patched.version} patched, {len(patched.replaced)} names:"
    assert "  nemo_automodel.components.loss.mtp.calculate_mtp_loss" in lines
    assert any(line.startswith("  MTPLossConfig kept: ") for line in lines)
    assert "was patched already" in str(integration.patch())


def test_modules_imported_after_patch_are_restored_too(patched, monkeypatch):
    later = types.ModuleType("nemo_automodel.later")
    monkeypatch.setitem(sys.modules, later.__name__, later)
    exec("from nemo_automodel.components.loss.dllm_loss import DFlashDecayLoss as Loss", vars(later))
    assert later.Loss is dllm_kernels.DFlashDecayLoss
    assert ("nemo_automodel.later", "Loss") in integration.unpatch()
    assert later.Loss.__module__ == "nemo_automodel.components.loss.dllm_loss"


def test_names_can_be_left_alone(strategy):
    original = strategy.corrupt_uniform
    report = integration.patch(exclude=["corrupt_uniform", "corrupt_blockwise"])
    assert strategy.corrupt_uniform is original
    assert strategy.corrupt_all_masked is dllm_kernels.corrupt_all_masked
    assert ("corrupt_uniform", "excluded") in report.kept
    with pytest.raises(RuntimeError, match=r"patched already, with exclude=\['corrupt_blockwise', 'corrupt_uniform'\]"):
        integration.patch()
    with pytest.raises(ValueError, match=r"exclude must hold names among .*, got \['scdd_schedule'\]"):
        integration.patch(exclude=["scdd_schedule"])


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
def test_other_signatures_are_refused_before_anything_is_replaced(strategy, monkeypatch, forward, problems):
    loss = module("components.loss.dllm_loss")
    other = type(
        "MDLMCrossEntropyLoss", (nn.Module,), {"__init__": constructor, "forward": forward, "new_method": constructor}
    )
    monkeypatch.setattr(loss, "MDLMCrossEntropyLoss", other)
    monkeypatch.delattr(module("components.datasets.dllm.corruption"), "gumbel_topk")
    before = held()
    with pytest.raises(
        RuntimeError, match=r"^nemo_automodel 0\.\S+ differs from what can be replaced; nothing was:"
    ) as error:
        integration.patch()
    assert_identical(before, held())
    listed = str(error.value).splitlines()
    missing = "nemo_automodel.components.datasets.dllm.corruption has no gumbel_topk"
    for problem in [*problems, "MDLMCrossEntropyLoss.new_method: not offered here", missing]:
        assert f"  {problem}" in listed
    assert integration.unpatch() == ()


def test_a_version_that_passes_fewer_arguments_is_served(strategy, monkeypatch):
    other = type("MDLMCrossEntropyLoss", (nn.Module,), {"__init__": constructor, "forward": fewer_arguments})
    monkeypatch.setattr(module("components.loss.dllm_loss"), "MDLMCrossEntropyLoss", other)
    assert integration.patch().replaced
    assert integration.unpatch()


# The token losses and MTP ---------------------------------------------------------------------------------------------

V, D = 17, 6


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
    """The host's own linear loss needs a GPU, so its loss from logits is what both of ours are held to."""
    hidden, depths, labels = batch()
    host_mtp, losses = module("components.loss.mtp"), module("components.loss.loss")
    model = Model().double().train()

    def run(loss_fn):
        model.zero_grad()
        loss_of = host_mtp.MTPLossConfig(scaling_factor=0.3).build(loss_fn, model)
        h, d = hidden.double(), [x.double() for x in depths]
        if name.startswith("Fused") and loss_fn is not plain:
            output = SimpleNamespace(hidden_states=h, logits=None, mtp_per_depth_h=d)
            loss_of.cu_seqlens = None if seq_idx is None else torch.tensor([0, 4, 9])
        else:
            output = (model.lm_head(h), *d, *(() if seq_idx is None else (seq_idx,)))
        loss = loss_of(output, labels)
        loss.backward()
        return loss.detach(), model.lm_head.weight.grad

    plain = losses.build_loss_module("MaskedCrossEntropy", fp32_upcast=False)
    host = run(plain)
    integration.patch()
    ours = run(losses.build_loss_module(name))
    for o, h in zip(ours, host, strict=True):
        torch.testing.assert_close(o, h)


def test_the_functions_take_what_the_recipes_pass(patched):
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
        scaling_factor=0.1, ignore_index=-100, cu_seqlens=None, logits_dtype=torch.float32, return_per_depth=True, **common,
    )  # fmt: skip
    assert isinstance(auxiliary, module("components.loss.mtp").MTPLossOutput)
    assert len(auxiliary.per_depth_losses) == 2
    torch.testing.assert_close(auxiliary.loss, 0.05 * sum(auxiliary.per_depth_losses))


def test_masked_cross_entropy_takes_the_layouts_of_the_host(strategy):
    """Packed sequences bring logits ``[1, T, V]`` and labels ``[T]``; a mask may be of any shape."""
    logits, labels = torch.randn(1, 10, V), torch.randint(0, V, (10,))
    mask, weights = torch.arange(10).reshape(2, 5) % 3, torch.rand(10)
    home = module("components.loss.masked_ce")
    host = home.MaskedCrossEntropy()(logits, labels.clone(), mask, 4, weights)
    integration.patch()
    ours = home.MaskedCrossEntropy()(logits, labels, mask, 4, weights)
    with pytest.raises(ValueError, match="must have shape"):
        home.MaskedCrossEntropy()(logits, labels[:9])
    torch.testing.assert_close(ours, host)


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


def test_a_biased_head_keeps_its_bias(patched):
    hidden, _, labels = batch()
    model = Model()
    model.lm_head = nn.Linear(D, V)
    fused, plain = (
        module("components.loss.linear_ce").FusedLinearCrossEntropy(),
        module("components.loss.masked_ce").MaskedCrossEntropy(),
    )
    ours = module("components.loss.utils").calculate_loss(fused, hidden_states=hidden, labels=labels, model=model)
    torch.testing.assert_close(ours, plain(model.lm_head(hidden), labels))


class ForeignLinear(nn.Module):
    """A linear layer of another library, whose weight the host takes, whatever its class is."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, hidden):
        return nn.functional.linear(hidden, self.weight)


class AdaptedLinear(nn.Linear):
    """What the host's LoRA makes of a linear layer, of which its fused loss takes the weight all the same."""

    def __init__(self):
        super().__init__(D, V, bias=False)
        self.lora_A, self.lora_B = nn.Linear(D, 2, bias=False), nn.Linear(2, V, bias=False)

    def forward(self, hidden):
        return super().forward(hidden) + self.lora_B(self.lora_A(hidden))


class CappedModel(nn.Module):
    """Its logits are capped after the head, as its configuration says."""

    def __init__(self, cap):
        super().__init__()
        self.lm_head = nn.Linear(8, 33, bias=False)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(final_logit_softcapping=cap))
        self.cap = cap

    def forward(self, hidden):
        return self.cap * torch.tanh(self.lm_head(hidden) / self.cap)


def test_a_model_with_a_cap_of_its_own_has_it_in_the_loss_from_hidden_states_too(patched):
    torch.manual_seed(0)
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
    """What each replaced function makes of the model's head."""
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


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_linear_layer_of_another_library_serves_as_head(patched, function):
    model = Model()
    expected = fused_losses(model)[function]()
    model.lm_head = ForeignLinear(model.lm_head)
    torch.testing.assert_close(fused_losses(model)[function](), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_adapter_of_the_head_that_would_not_train_is_an_error(patched, function):
    model = Model()
    model.lm_head = AdaptedLinear()
    with pytest.raises(ValueError, match=r"lora_A\.weight, lora_B\.weight of the LM head would not train"):
        fused_losses(model)[function]()
    model.lm_head.lora_A.requires_grad_(False)
    model.lm_head.lora_B.requires_grad_(False)
    assert fused_losses(model)[function]().isfinite()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_parametrized_head_trains(patched, function):
    model = Model()
    nn.utils.parametrizations.weight_norm(model.lm_head)
    fused_losses(model)[function]().backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


def test_speculative_and_unreplaced_losses_use_the_replaced_parts(patched):
    """I-DLM's loss is the host's, on our per-token NLL and our output type."""
    loss = module("components.loss.dllm_loss")
    assert loss.IDLMLoss.__module__ == "nemo_automodel.components.loss.dllm_loss"
    logits, ids = torch.randn(2, 12, V, requires_grad=True), torch.randint(0, V, (2, 6))
    out = loss.IDLMLoss()(logits, ids, torch.ones(2, 6, dtype=torch.bool), torch.ones(2, 6), seq_len=6)
    assert isinstance(out, dllm_kernels.DLLMLossOutput)
    out.total_loss.backward()
    assert logits.grad.isfinite().all()


def test_the_collator_of_the_host_and_ours_agree(strategy):
    home = module("components.datasets.dllm.collate")
    samples = [
        {"input_ids": [*range(5, 5 + n)], "loss_mask": [0] * 2 + [1] * (n - 2), "attention_mask": [1] * n}
        for n in (5, 9)
    ]
    options = {
        "pad_token_id": 3,
        "eos_token_id": 2,
        "block_size": 4,
        "pad_seq_len_divisible": 6,
        "response_window": True,
    }
    host = home.DLLMCollator(**options)(samples)
    integration.patch()
    ours = home.DLLMCollator(**options)(samples)
    integration.unpatch()
    assert host.keys() == ours.keys()
    for name in host:
        assert ours[name].dtype == host[name].dtype
        assert torch.equal(ours[name], host[name])


def test_the_example_runs(strategy, capsys):
    assert runpy.run_path(str(ROOT / "examples" / "nemo_automodel_patch.py"))["main"]() == "dllm_kernels.losses.mdlm"
    assert "nemo_automodel.recipes.dllm.strategy.MDLMCrossEntropyLoss" in capsys.readouterr().out
    assert strategy.MDLMCrossEntropyLoss is not dllm_kernels.MDLMCrossEntropyLoss
