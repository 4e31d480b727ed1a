"""Training steps of nemo_automodel's own recipe and strategies, unpatched and patched, on a tiny model.

Run in a process of its own by ``tests/support/distributed_workers.py``: the recipe imports packages that its losses do
not need and that may be missing, and here they are replaced by empty modules.
"""

import collections
import contextlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from types import SimpleNamespace

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dllm_kernels import DLLMLossOutput, MDLMCrossEntropyLoss
from dllm_kernels.deferred._logits import DeferredLogits
from dllm_kernels.integrations import nemo_automodel as integration
from reference.dflash import dflash_loss
from reference.scdd import scdd_loss
from tests.support.recorded import record_ops

# Optional dependencies, and a LoRA kernel whose autotuning keys newer Triton versions refuse.
ABSENT = ("torchao", "torchdata", "datasets", "nemo_automodel.components._peft.lora_kernel")
V, D, MASK, CAP = 37, 12, 36, 2.0
SEEDS = range(4)
NOT_REPLACED = "excluded", "built before", "of this package"


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if any(name == a or name.startswith(a + ".") for a in ABSENT):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return EmptyModule(spec.name)

    def exec_module(self, module):
        pass


class EmptyModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_recipe():
    finder = EmptyModules()
    sys.meta_path.insert(0, finder)
    recipe = importlib.import_module("nemo_automodel.recipes.dllm.train_ft")
    sys.meta_path.remove(finder)
    return recipe


class Denoiser(nn.Module):
    """A model that computes logits from the tokens, and a causal branch if the batch is a hybrid one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.lm_head = nn.Linear(D, V, bias=False)

    def forward(self, input_ids, masked_indices=None, labels=None, skip_loss=None, attention_mask=None,
                position_ids=None, use_cache=None):  # fmt: skip
        if masked_indices is None:
            return SimpleNamespace(logits=self.lm_head(self.embed(input_ids)))
        noisy = torch.where(masked_indices, MASK, input_ids)
        logits = self.lm_head(torch.tanh(self.embed(noisy)))
        return SimpleNamespace(logits=logits, causal_logits=self.lm_head(self.embed(input_ids)))


class BlockDenoiser(Denoiser):
    """A model that computes logits of the canvas and of the clean sequence, in float32 with Gemma's soft cap."""

    def forward(self, input_ids, canvas_ids, do_self_conditioning=None, decoder_attention_mask=None):
        logits = self.capped(torch.tanh(self.embed(canvas_ids)))
        return SimpleNamespace(logits=logits, encoder_logits=self.capped(self.embed(input_ids)))

    def capped(self, hidden):
        logits = self.lm_head(hidden)
        return torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float32)) / CAP) * CAP


class Draft(nn.Module):
    """A model that computes hidden states of drafted blocks from embeddings and the mean of the target's context."""

    def __init__(self):
        super().__init__()
        self.block_size, self.target_layer_ids = 4, [0, 1]
        self.mix = nn.Linear(3 * D, D)

    def forward(self, target_hidden, noise_embedding, position_ids, use_cache, is_causal, attention_mask):
        context = target_hidden.mean(1, keepdim=True).expand(-1, noise_embedding.shape[1], -1)
        return self.mix(torch.cat([noise_embedding, context], -1))


class OracleDFlash:
    """Replaces the host's loss by the oracle, because the host computes in float32 for every dtype."""

    def __init__(self, gamma):
        self.gamma = gamma

    def __call__(self, logits, target_ids, block_mask, num_tokens, block_size):
        loss = dflash_loss(logits, target_ids, block_mask, num_tokens, block_size, self.gamma)
        return DLLMLossOutput(loss, loss.detach())

    def forward_fused(self, hidden, lm_head_weight, target_ids, block_mask, num_tokens, block_size, lm_head_bias):
        logits = nn.functional.linear(hidden, lm_head_weight, lm_head_bias)
        return self(logits, target_ids, block_mask, num_tokens, block_size)


class OracleSCDD:
    """Replaces the host's loss by the oracle, because the host computes its schedule in float32."""

    def __init__(self, loss):
        self.settings = {name: getattr(loss, name) for name in ("num_timesteps", "max_ratio", "gamma_shape", "t_peak")}

    def __call__(self, logits, target_ids, p_mask, loss_mask, num_diffusion_tokens, noisy_input_ids, **unused):
        rows = logits, target_ids, p_mask, loss_mask, noisy_input_ids
        loss = scdd_loss(*rows, self.mask_token_id, num_diffusion_tokens, **self.settings)
        return DLLMLossOutput(loss, loss.detach())


def samples(seed):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(12, 24, (3,), generator=random).tolist()
    ids = [torch.randint(0, MASK, (n,), generator=random).tolist() for n in lengths]
    return [{"input_ids": i, "loss_mask": [0] * 3 + [1] * (len(i) - 3), "attention_mask": [1] * len(i)} for i in ids]


def bare_recipe(module, strategy, model, config, **more):
    """Create a recipe with only the attributes that a step reads, without data loader, optimizer or model hub."""
    recipe = SimpleNamespace(
        dllm_strategy=strategy, model_parts=[model], mask_token_id=MASK, cfg=config, device_mesh=None, te_fp8=None,
        dist_env=SimpleNamespace(device=torch.device("cpu")), distributed_config=SimpleNamespace(),
        step_scheduler=SimpleNamespace(step=0), dllm_eps=1e-3, dllm_half_life_ratio=None, _dllm_loss_buffer=[],
        _dflash_correct_per_pos_buffer=[], _dflash_count_per_pos_buffer=[], canvas_length=8, self_conditioning_p=0.5,
        block_diffusion_sliding_window=16, _self_cond_base_seed=42, _encoder_loss_weight=0.7, **more,
    )  # fmt: skip
    owner = module.DiffusionGemmaSFTRecipe if isinstance(model, BlockDenoiser) else module.DiffusionLMSFTRecipe
    for name, value in inspect.getmembers(owner, inspect.isfunction):
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        if not name.startswith("__"):
            setattr(recipe, name, value if static else types.MethodType(value, recipe))
    recipe._get_dp_group_size = lambda include_cp: 1
    return recipe


def step(module, mode, seed, dtype, noise=None, fused=None, target=None, loss_fn=None):
    """Run one training step; return the strategy's draws, the loss, its diffusion part and every gradient."""
    torch.manual_seed(seed)
    strategy = module.get_dllm_strategy(mode)
    model = {"dflash": Draft, "block_diffusion": BlockDenoiser}.get(mode, Denoiser)().to(dtype)
    config = {"vocab_size": V, "mask_token_id": MASK, "ar_loss_alpha": 0.3, "num_timesteps": 20}
    config["clean_loss_weight"] = 0.4
    config["dflash"] = {"target_model_id": target, "target_torch_dtype": str(dtype).removeprefix("torch."),
                        "num_blocks_per_sample": 3, "use_fused_linear_ce": fused, "ce_chunk_size": 5}  # fmt: skip
    recipe = bare_recipe(module, strategy, model, config, dllm_block_size=8 if mode == "hybrid" else None)
    recipe.dllm_loss_fn = loss_fn or strategy.create_loss_fn(config)
    strategy.setup_extra(recipe)
    if mode == "dflash" and dtype == torch.float64:
        strategy.dflash_loss_fn = OracleDFlash(strategy.dflash_loss_fn.loss_gamma)
    if mode == "scdd" and dtype == torch.float64:
        recipe.dllm_loss_fn = OracleSCDD(recipe.dllm_loss_fn)
        recipe.dllm_loss_fn.mask_token_id = MASK
    batch = module.DLLMCollator(eos_token_id=1, block_size=8, response_window=mode == "block_diffusion")(samples(seed))
    torch.manual_seed(seed)
    num_noise, num_supervised = strategy.pre_step(recipe, [batch])
    drawn = {k: v.clone() for k, v in batch.items() if torch.is_tensor(v)}
    if noise is not None:
        batch.update({k: v.to(dtype) if v.is_floating_point() else v for k, v in noise.items()})
        num_noise = int(noise["_noise_mask"].sum()) if "_noise_mask" in noise else num_noise
    losses = []
    strategy.forward_backward(
        recipe, 0, batch, loss_buffer=losses, num_batches=1, num_ar_tokens=num_supervised,
        num_diffusion_tokens=num_noise if strategy.normalization_mode == "noise" else num_supervised,
    )  # fmt: skip
    results = [losses[0], recipe._dllm_loss_buffer[0], *(p.grad for p in model.parameters() if p.grad is not None)]
    counts = [*recipe._dflash_correct_per_pos_buffer, *recipe._dflash_count_per_pos_buffer]
    return {"drawn": drawn, "results": [r.detach() for r in results], "counts": counts}


def compare(module, mode, **options):
    """Run steps of the host in float64 and float32, then steps with the package on the same noise."""
    host = [step(module, mode, seed, torch.float32, **options) for seed in SEEDS]
    noise = [h["drawn"] for h in host]
    exact = [step(module, mode, s, torch.float64, n, **options) for s, n in zip(SEEDS, noise, strict=True)]
    integration.patch()
    ours = [step(module, mode, s, torch.float32, n, **options) for s, n in zip(SEEDS, noise, strict=True)]
    integration.unpatch()
    found = {"host": host, "exact": exact, "ours": ours}
    if mode != "dflash":
        integration.patch(fuse_head=True)
        with counted() as found["calls"]:
            found["fused"] = [
                step(module, mode, s, torch.float32, n, **options) for s, n in zip(SEEDS, noise, strict=True)
            ]
        integration.unpatch()
    if mode == "mdlm":
        found |= {variant: not_replaced(module, variant, noise) for variant in NOT_REPLACED}
    return found


def not_replaced(module, variant, noise):
    """Run steps under ``fuse_head`` with a loss that is not replaced, and count how the losses were computed."""
    before = module.get_dllm_strategy("mdlm").create_loss_fn({})
    integration.patch(fuse_head=True, exclude=["MDLMCrossEntropyLoss"] if variant == "excluded" else [])
    loss_fn = {"built before": before, "of this package": MDLMCrossEntropyLoss(), "excluded": None}[variant]
    with counted() as calls:
        runs = [step(module, "mdlm", s, torch.float32, n, loss_fn=loss_fn) for s, n in zip(SEEDS, noise, strict=True)]
    integration.unpatch()
    return {"runs": runs, "calls": calls}


@contextlib.contextmanager
def counted():
    """Count losses from logits, losses from hidden states, and deferred logits that a head computed after all."""
    calls, made, replaced = collections.Counter(), DeferredLogits.materialize, []

    def replace(owner, name, value):
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def counted_made(logits, *use):
        calls.update(["made"])
        return made(logits, *use)

    replace(DeferredLogits, "materialize", counted_made)
    runs = record_ops(replace)
    yield calls
    calls.update(f"{run.op} of {'logits' if run.call.head is None else 'hidden states'}" for run in runs)
    for owner, name, value in replaced:
        setattr(owner, name, value)


def target_model(folder):
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=V, num_key_value_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def main(out):
    module = import_recipe()
    target = target_model(out.with_suffix(".model"))
    cases = {mode: compare(module, mode) for mode in ("mdlm", "hybrid", "scdd", "idlm", "block_diffusion")}
    for name, fused in (("dflash", True), ("dflash logits", False)):
        cases[name] = compare(module, "dflash", fused=fused, target=target)
    report = integration.patch()
    held = {
        f"{name}.{attribute}": getattr(sys.modules[name], attribute).__module__ for name, attribute in report.replaced
    }
    tokens = max(run["drawn"]["input_ids"].numel() for run in cases["mdlm"]["host"])
    torch.save({"cases": cases, "held": held, "sizes": (V, D, tokens)}, out)
