"""Whole draft models of speculators and NeMo AutoModel: one training step, as it is and with this package.

The models of speculators import the code that makes training data. They need packages that ``make test`` does not
install: ``pip install openai loguru datasets`` and ``pip install --no-deps hs-connectors==0.9.0``. Without these, their
tests are skipped.
"""

import contextlib
import copy
import importlib
import importlib.util

import pytest
import torch
from torch import nn

import dllm_kernels
from dllm_kernels import fused_head
from dllm_kernels.integrations import speculators as integration
from tests.conftest import DEVICE
from tests.support import trainers
from tests.support.parity import assert_as_good_as_plain, largest_error

pytestmark = pytest.mark.peer
V, D, LENGTH, BLOCK, ANCHORS = 32, 16, 24, 4, 3
DRAWS = 3


def to_dtype(batch, dtype):
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}


def run(model, step, batch, dtype):
    """Return loss, metrics and gradients of a step on a copy of the model."""
    model = copy.deepcopy(model).to(dtype)
    torch.manual_seed(5)  # the models draw their blocks
    loss, metrics = step(model, to_dtype(batch, dtype))
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert sum(g.abs().sum() > 0 for g in grads.values()) > 2
    values = {name: t.detach() for name, t in metrics.items() if isinstance(t, torch.Tensor)}
    return {"loss": loss.detach(), **values, **grads}


def assert_parity_of_steps(build, draw, plain, ours):
    """Compare loss, metrics and gradients of two steps with those of the first step in float64."""
    runs = []
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        model, batch = build(), draw()
        steps = [(plain, torch.float64), (plain, torch.float32), (ours, torch.float32)]
        runs.append([run(model, step, batch, dtype) for step, dtype in steps])
    for name in runs[0][0]:
        exact, same_dtype, found = ([each[place][name] for each in runs] for place in range(3))
        if not found[0].is_floating_point():
            assert all(map(torch.equal, found, same_dtype)), name
            continue
        exact = [t.double() for t in exact]
        error = largest_error(same_dtype, exact)
        assert_as_good_as_plain(found, exact, error, name, [V, D, ANCHORS * BLOCK, LENGTH])


# speculators ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def models():
    """Provide its models, unpatched afterwards."""
    for needed in ("speculators", "openai", "loguru", "datasets", "hs_connectors"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    yield importlib.import_module("speculators.models")
    integration.unpatch()


def layer_of(config, attn_implementation="eager", **options):
    return config(
        vocab_size=V, hidden_size=D, intermediate_size=2 * D, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=D // 2, attn_implementation=attn_implementation, **options,
    )  # fmt: skip


def build_of_speculators(algorithm, models):
    """Return a function that builds a draft model on random weights."""
    transformers = importlib.import_module("transformers")
    if algorithm == "eagle3":
        config = models.Eagle3SpeculatorConfig(
            transformer_layer_config=layer_of(transformers.LlamaConfig), draft_vocab_size=V,
            eagle_aux_hidden_state_layer_ids=[0],
        )  # fmt: skip
        draft = models.Eagle3DraftModel
    else:
        name = {"dflash": "DFlash", "dspark": "DSpark"}[algorithm]
        options = {"markov_rank": 4} if algorithm == "dspark" else {}
        config = getattr(models, f"{name}SpeculatorConfig")(
            transformer_layer_config=layer_of(transformers.Qwen3Config), draft_vocab_size=V, block_size=BLOCK,
            aux_hidden_state_layer_ids=[0], mask_token_id=V - 1, **options,
        )  # fmt: skip
        draft = getattr(models, f"{name}DraftModel")

    def build():
        model = draft(config)
        for p in model.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.3)
        return model.to(DEVICE)

    return build


def batch_of_speculators():
    tokens = torch.randint(0, V - 1, (1, LENGTH), device=DEVICE)
    states = torch.randn(2, 1, LENGTH, D, device=DEVICE)
    mask = (torch.rand(1, LENGTH, device=DEVICE) < 0.9).float()
    mask[:, :ANCHORS] = 1
    return {
        "input_ids": tokens, "hidden_states": states[0], "verifier_last_hidden_states": states[1], "loss_mask": mask,
        "document_ids": torch.zeros(1, LENGTH, dtype=torch.long, device=DEVICE),
    }  # fmt: skip


# Head calls of a step that are materialized: DSpark adds its Markov head to the draft's logits, and a divergence from
# logits needs the logits of the teacher as well.
MATERIALIZED = {"dflash": 0, "dspark": 2, "eagle3": 0}


@pytest.mark.parametrize("loss", ["kl_div", '{"ce": 0.1, "tv": 0.9}'])
@pytest.mark.parametrize("way", ["patch", "fused head", "fused head, their losses"])
@pytest.mark.parametrize("algorithm", MATERIALIZED)
def test_a_step_of_a_model_of_speculators(algorithm, way, loss, models):
    """With ``patch()`` and ``fused_head`` no logits are materialized, except where the model adds to them."""
    resolve = importlib.import_module("speculators.losses").resolve_loss_config
    theirs = resolve(loss, "eager")
    if way != "fused head, their losses":
        integration.patch()
    config = theirs if way == "fused head, their losses" else resolve(loss, "fused")
    options = {"ttt_steps": 2} if algorithm == "eagle3" else {"max_anchors": ANCHORS}
    materialized = []

    def plain(model, batch):
        return model(**batch, loss_config=theirs, **options)[1:]

    def ours(model, batch):
        if way == "patch":
            return model(**batch, loss_config=config, **options)[1:]
        with contextlib.ExitStack() as stack:
            heads = model.lm_head, model.verifier_lm_head
            fused = [stack.enter_context(fused_head(model, head=head, on_logits="allow")) for head in heads]
            out = model(**batch, loss_config=config, **options)[1:]
            materialized.append(sum(each.materialized for each in fused))
        return out

    assert_parity_of_steps(build_of_speculators(algorithm, models), batch_of_speculators, plain, ours)
    if way == "fused head":
        assert set(materialized) == {MATERIALIZED[algorithm]}


# NeMo AutoModel -------------------------------------------------------------------------------------------------------

TTT = 2


@contextlib.contextmanager
def of_automodel(*names):
    """Provide modules of AutoModel that hold draft models and trainers."""
    pytest.importorskip("transformers")
    with trainers.loaded(
        trainers.AUTOMODEL, *(f"components.speculative.{name}" for name in names), whole_models=True
    ) as m:
        yield m


def frozen(module):
    nn.init.normal_(module.weight, std=0.5)
    return module.to(DEVICE).requires_grad_(False)


class WithTarget(nn.Module):
    """Trainer and the frozen modules of its target model, to which it refers without registering them.

    All are copied and cast together.
    """

    def __init__(self, build, **target):
        super().__init__()
        self.target = nn.ModuleDict({name: frozen(module) for name, module in target.items()})
        self.trainer = build(**self.target).to(DEVICE)


def head():
    return nn.Linear(D, V, bias=False)


def qwen3_draft(modules, **options):
    """Return AutoModel's DFlash draft model with two context layers."""
    config = layer_of(importlib.import_module("transformers").Qwen3Config, "sdpa", num_target_layers=4)
    config.dflash_config = {"target_layer_ids": [0, 1], "mask_token_id": V - 1, "block_size": BLOCK, **options}
    return modules.draft_qwen3.Qwen3DFlashDraftModel(config)


def batch_of_dflash():
    return {
        "input_ids": torch.randint(0, V - 1, (2, LENGTH), device=DEVICE),
        "hidden_states": torch.randn(2, LENGTH, 2 * D, device=DEVICE),
        "loss_mask": (torch.rand(2, LENGTH, device=DEVICE) < 0.9).float(),
    }


def steps_of(call, names, others=lambda model: []):
    """Return the step, the step under ``fused_head``, and the numbers of materialized head calls of the second."""
    materialized = []

    def result(out):
        return out.loss, {name: t for name, t in vars(out).items() if name != "loss"}

    def plain(model, batch):
        return result(call(model, batch))

    def ours(model, batch):
        with contextlib.ExitStack() as stack:
            heads = [model.target[name] for name in names] + others(model)
            fused = [stack.enter_context(fused_head(model, head=each, on_logits="allow")) for each in heads]
            out = result(call(model, batch))
            materialized.append(sum(each.materialized for each in fused))
        return out

    return plain, ours, materialized


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("gamma", [None, 2.0])
@pytest.mark.parametrize("objective", ["dflash", "variable_prefix"])
def test_dflash_of_automodel(objective, gamma, patched, monkeypatch):
    """The head's logits are scaled and capped, as those of Muse Glimmer; none are materialized.

    Neither the loss of the host nor this package's needs them, and the metrics do not, either.
    """
    with of_automodel("dflash.draft_qwen3", "dflash.core") as modules:
        if patched:
            monkeypatch.setattr(modules.core, "DFlashDecayLoss", dllm_kernels.DFlashDecayLoss)  # as patch() does

        def trainer(lm_head, embed):
            draft = qwen3_draft(modules, output_multiplier=1.5, final_logit_softcapping=3.0)
            return modules.core.DFlashTrainerModule(
                draft, lm_head, embed, V - 1, block_size=BLOCK, attention_backend="sdpa", num_anchors=ANCHORS,
                loss_type=objective, loss_decay_gamma=gamma,
            )  # fmt: skip

        def build():
            return WithTarget(trainer, lm_head=head(), embed=nn.Embedding(V, D))

        plain, ours, materialized = steps_of(lambda model, batch: model.trainer(**batch), ["lm_head"])
        assert_parity_of_steps(build, batch_of_dflash, plain, ours)
        assert materialized == [0] * DRAWS


@pytest.mark.parametrize("shifted", [False, True])
def test_domino_of_automodel(shifted):
    """The correction is added to the logits of the blocks, which materializes them once."""
    with of_automodel("dflash.draft_qwen3", "dflash.domino_core") as modules:

        def trainer(lm_head, embed):
            draft = qwen3_draft(modules, projector_type="domino", emb_dim=6, gru_hidden_dim=5)
            return modules.domino_core.DominoTrainerModule(
                draft, lm_head, embed, V - 1, block_size=BLOCK, attention_backend="sdpa", num_anchors=ANCHORS,
                loss_decay_gamma=2.0, shift_label=shifted,
            )  # fmt: skip

        def build():
            return WithTarget(trainer, lm_head=head(), embed=nn.Embedding(V, D))

        def call(model, batch):
            return model.trainer(**batch, lambda_base=0.3)

        plain, ours, materialized = steps_of(call, ["lm_head"])
        assert_parity_of_steps(build, batch_of_dflash, plain, ours)
        assert materialized == [1] * DRAWS


def batch_of_eagle():
    return {
        "input_ids": torch.randint(0, V, (2, LENGTH), device=DEVICE),
        "attention_mask": torch.ones(2, LENGTH, dtype=torch.long, device=DEVICE),
        "loss_mask": (torch.rand(2, LENGTH, device=DEVICE) < 0.8).long(),
        "states": torch.randn(4, 2, LENGTH, D, device=DEVICE),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", [None, "alpha", "lambda"], ids=["soft CE", "alpha", "lambda"])
def test_eagle3_of_automodel(loss):
    """The softmax of the target model materializes its logits once; no step of the unrolled loop materializes any."""
    with of_automodel("eagle.draft_llama", "eagle.core") as modules:
        kept = torch.arange(0, V, 2, device=DEVICE)

        def trainer(**_):
            config = layer_of(importlib.import_module("transformers").LlamaConfig)
            config.draft_vocab_size = len(kept)
            draft = modules.draft_llama.LlamaEagle3DraftModel(config)
            mask = torch.zeros(V, dtype=torch.bool, device=DEVICE)
            mask[kept] = True
            return modules.core.Eagle3TrainerModule(
                draft, selected_token_ids=kept, selected_token_mask=mask, ttt_steps=TTT, lk_loss_type=loss
            )

        def call(model, batch):
            given = dict(batch)
            states = given.pop("states")
            aux = states[:3].movedim(0, 2).flatten(2)
            return model.trainer(**given, aux_hidden_states=aux, target_logits=model.target["teacher"](states[3]))

        plain, ours, materialized = steps_of(call, ["teacher"], lambda model: [model.trainer.draft_model.lm_head])
        assert_parity_of_steps(lambda: WithTarget(trainer, teacher=head()), batch_of_eagle, plain, ours)
        assert materialized == [1] * DRAWS


@pytest.mark.parametrize("rank", [0.0, 0.01])
def test_eagle1_of_automodel(rank):
    """The draft's logits are a product with the weight of the head, which ``fused_head`` leaves as it is."""
    with of_automodel("eagle.draft_llama_v12", "eagle.core_v12") as modules:

        def trainer(teacher):
            config = layer_of(importlib.import_module("transformers").LlamaConfig)
            draft = modules.draft_llama_v12.LlamaEagleDraftModel(config)
            return modules.core_v12.EagleTrainerModule(
                draft, target_lm_head=teacher, rank_loss_weight=rank, rank_loss_topk=5
            )

        def call(model, batch):
            given = dict(batch)
            states = given.pop("states")
            return model.trainer(
                **given, input_hidden_states=states[0], target_hidden_states=states[1],
                target_logits=model.target["teacher"](states[1]),
            )  # fmt: skip

        plain, ours, materialized = steps_of(call, ["teacher"])
        assert_parity_of_steps(lambda: WithTarget(trainer, teacher=head()), batch_of_eagle, plain, ours)
        assert materialized == [1] * DRAWS
