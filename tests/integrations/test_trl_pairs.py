"""TRL's policies and rollouts with heads, models and what surrounds a call: each pair of features once."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from dllm_kernels import policy_views
from dllm_kernels.integrations import trl as integration
from tests.conftest import every_time
from tests.support.generation import MASK, OF_PEFT, D, Encoder, N, V, adapt, expected
from tests.support.pairs import pairs, surrounding

EOS, PAD = V - 2, V - 3


class Model(Encoder):
    """A model that TRL calls, with a head and an output of chosen kinds."""

    def __init__(self, head="linear", output=lambda z: z, checkpoint=None):
        super().__init__()
        self.output, self.checkpoint = output, checkpoint
        self.seen = SimpleNamespace(append=lambda _: None)
        if head == "no bias":
            self.lm_head.bias = None
        elif head == "more rows":  # whose weight is replaced by a larger one
            self.lm_head = nn.Linear(D, 3)
            self.lm_head.weight, self.lm_head.bias = nn.Parameter(torch.randn(V, D)), nn.Parameter(torch.randn(V))
        if head in OF_PEFT:
            adapt(self, head)

    def forward(self, input_ids, attention_mask=None, output_router_logits=False):
        if self.checkpoint is None:
            hidden = self.body(input_ids, attention_mask)
        else:
            tap = torch.zeros((), requires_grad=True)  # without an input that requires grad, there is no reentrance
            hidden = torch.utils.checkpoint.checkpoint(
                lambda ids, on, _: self.body(ids, on), input_ids, attention_mask, tap,
                use_reentrant=self.checkpoint == "reentrant",
            )  # fmt: skip
        z = self.lm_head(hidden)
        out = SimpleNamespace(logits=self.output(z))
        if output_router_logits:
            out.aux_loss = 0.1 * self.places.sum()
        return out


class Loop:
    """The parts of TRL's trainers that the mixin needs."""

    def __init__(self, model=None, autocast=False, **args):
        context = (lambda: torch.autocast("cpu", torch.bfloat16)) if autocast else contextlib.nullcontext
        self.accelerator = SimpleNamespace(
            unwrap_model=lambda m: m, autocast=context, device=torch.device("cpu")
        )  # fmt: skip
        self.args = SimpleNamespace(steps_per_generation=2, max_completion_length=N, **args)
        self.temperature, self.num_iterations, self._step, self.model = 0.7, 2, 0, model
        self.processing_class = SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS)

    def _tokenize_prompts(self, prompts):
        return [[int(word) for word in p.split()] for p in prompts], None, {}


class Trainer(integration.DiffusionPolicyMixin, Loop):
    pass


OUTPUTS = {
    "unchanged": lambda z: z,
    "cast": lambda z: z.to(torch.promote_types(z.dtype, torch.float32)),
    "copy": lambda z: z.contiguous().clone(),
}
HEADS = ["linear", "no bias", "frozen", "more rows", *OF_PEFT]
SCORES = {
    "scheme": [("full", 1, 0.0), ("full", 2, 0.4), ("coupled", 1, 0.0), ("elbo", 3, 0.0), ("count", 2, 0.0),
               ("quadrature", 3, 0.0)],
    "shift": [False, True],
    "padding": [(0, 0), (2, 0), (0, 1), (1, 2)],
    "mask": [torch.int64, torch.bool, torch.float32],
    "head": HEADS,
    "output": list(OUTPUTS),
    "entropy": ["none", "logged", "trained"],
    "batch_size": [None, 1, 3, 8],
    "auxiliary": [False, True],
    "dtype": [torch.float64, torch.float32],
    "options": [{}, {"logits_dtype": torch.float32}, {"cast_lm_head_to_fp32": True}],
    "autocast": [False, True],
    "iteration": [None, 5, lambda trainer: trainer._step + 1],
    "temperature": [1.0, 0.7],
    "checkpoint": [None, "reentrant", "not reentrant"],
    "around": ["nothing", "no_grad", "inference_mode", "default dtype", "saved on the CPU"],
    "upstream": ["sum", "of rows", "square root"],
}  # fmt: skip


def excluded(case):
    """Return True for values that are no reference: logits of 16 bits, or another product."""
    if case.get("autocast") and case.get("dtype") == torch.float32:
        return True
    if case.get("head") == "LoRA" and case.get("checkpoint") == "reentrant":
        return True  # nothing in the checkpoint is trained, which torch refuses
    # float64 operands have no narrower logits
    return bool(case.get("options")) and (case.get("dtype") == torch.float64 or bool(case.get("autocast")))


CASES = pairs(SCORES, excluded)
EVERY_DAY = [number for number, case in enumerate(CASES) if not case["head"].startswith("trained")]


def batch(before=0, after=0, B=4):
    """Return ids, mask and completion length, with left-padded prompts and right-padded completions."""
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, PAD, (B, 9), generator=g)
    on = torch.ones(B, 9, dtype=torch.int64)
    on[1, :2] = on[2, 7:] = 0
    ids = nn.functional.pad(ids.where(on != 0, PAD), (before, after), value=PAD)
    return ids, nn.functional.pad(on, (before, after)), 5 + after


def by_views(model, trainer, ids, on, keep, shift, scheme, number):
    """Return scores and entropies of the completions from all logits, with the views of rows without padding."""
    name, num, prompt_prob = scheme
    L, options = ids.shape[1], {"scheme": name, "num": num, "prompt_prob": prompt_prob}
    seeds, completion = integration.row_seeds(ids, on, keep, number), torch.arange(L) >= L - keep
    scored, weights, noisy = [], [], []
    for b, there in enumerate(on != 0):
        supervised = (there & completion)[there][None]
        if shift:
            supervised[:, 0] = False
        views = policy_views(ids[b, there][None], supervised, MASK, seeds=seeds[b : b + 1], **options)
        for whole, part, rest in (
            (noisy, views.noisy, ids[b]),
            (scored, views.scored, False),
            (weights, views.weights, 0),
        ):
            row = torch.as_tensor(rest).expand(len(part), L).clone().to(part.dtype)
            row[:, there] = part[:, 0]
            whole.append(row)
    noisy, scored, weights = (torch.stack(parts, 1) for parts in (noisy, scored, weights))
    z = torch.stack([model(x, on).logits for x in noisy]) / trainer.temperature
    log_p = z.index_fill(-1, torch.tensor(MASK), -torch.inf).log_softmax(-1)
    weights = weights.to(log_p.dtype)
    scores = (weights * log_p.gather(-1, ids.expand(scored.shape)[..., None])[..., 0]).sum(0)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)
    mean = (weights * entropy).sum(0) / torch.where(weights.sum(0) > 0, weights.sum(0), 1.0)
    return scores[:, L - keep :], mean[:, L - keep :]


@pytest.mark.parametrize("number", every_time(EVERY_DAY, range(len(CASES))))
def test_pairs_of_scores(number):
    chosen = CASES[number]
    torch.manual_seed(number)
    model = Model(chosen["head"], OUTPUTS[chosen["output"]], chosen["checkpoint"]).to(chosen["dtype"])
    if chosen["head"] == "frozen":
        model.lm_head.requires_grad_(False)
    plain = copy.deepcopy(model)
    plain.checkpoint, plain.output, model.shift = None, OUTPUTS["unchanged"], int(chosen["shift"])
    name, num, prompt_prob = chosen["scheme"]
    given = {k: v for k, v in chosen["options"].items() if k == "logits_dtype"}
    given |= {"shift": True} if chosen["shift"] else {}  # otherwise, the default
    trainer = Trainer(
        mask_token_id=MASK, scheme=name, num=num, prompt_prob=prompt_prob, iteration=chosen["iteration"],
        autocast=chosen["autocast"], **given,
    )  # fmt: skip
    trainer.temperature = chosen["temperature"]
    trainer.args.cast_lm_head_to_fp32 = "cast_lm_head_to_fp32" in chosen["options"]
    ids, on, keep = batch(*chosen["padding"])
    with surrounding(chosen["around"]):
        scores, entropies, auxiliary = trainer._get_per_token_logps_and_entropies(
            model, ids, on.to(chosen["mask"]), keep, batch_size=chosen["batch_size"],
            compute_entropy=chosen["entropy"] != "none", compute_aux_loss=chosen["auxiliary"],
            num_images=None,
        )  # fmt: skip
    of_iteration = {None: 0, 5: 5}.get(chosen["iteration"], 1)
    theirs, mean = by_views(plain, trainer, ids, on, keep, chosen["shift"], chosen["scheme"], of_iteration)
    exact = {"check_dtype": False, "rtol": 1e-4, "atol": 1e-5} if chosen["dtype"] == torch.float32 else {}
    torch.testing.assert_close(scores, theirs, **exact)
    assert (entropies is not None) == (chosen["entropy"] != "none")
    if entropies is not None:
        torch.testing.assert_close(entropies, mean, **exact)
    assert (auxiliary is not None) == chosen["auxiliary"]
    if chosen["around"] in ("no_grad", "inference_mode"):
        assert not scores.requires_grad
        return

    upstream = torch.linspace(-1, 2, scores.numel()).view_as(scores) if chosen["upstream"] == "of rows" else 1

    def loss(of_tokens, entropies):
        total = (of_tokens * upstream).sum()
        return total + 0.3 * entropies.sum() if chosen["entropy"] == "trained" else total

    if chosen["upstream"] == "square root":  # its slope is infinite at tokens that no view scores
        ours, plain_scores = (-scores).sqrt()[scores != 0], (-theirs[scores != 0]).sqrt()
    else:
        ours, plain_scores = scores, theirs
    found = loss(ours, entropies) + (0 if auxiliary is None else auxiliary)
    wanted = loss(plain_scores, mean) + (0.1 * plain.places.sum() if chosen["auxiliary"] else 0)
    found.backward()
    wanted.backward()
    for part, other in zip(model.parameters(), plain.parameters(), strict=True):
        got, same = (torch.zeros_like(p) if p.grad is None else p.grad for p in (part, other))
        torch.testing.assert_close(got, same, **exact)


# Rollouts -------------------------------------------------------------------------------------------------------------

ROLLOUTS = {
    "choice": [{}, {"remasking": "random"}, {"remasking": "margin"},
               {"remasking": "entropy", "position_temperature": 0.2},
               {"threshold": 0.1, "steps": None}, {"threshold": 0.2, "steps": 3, "remasking": "margin"}],
    "temperature": [None, 0, 1.0],
    "of_trainer": [{}, {"top_k": 4}, {"top_p": 0.8, "min_p": 0.02}, {"top_k": 0, "top_p": 1.0, "min_p": None}],
    "plan": [{"steps": 6}, {"steps": 4, "block_size": 3}, {"steps": 1}, {"steps": 3, "block_size": 4}],
    "cfg_scale": [0.0, 0.7],
    "suppress_ids": [None, 3, [2, 7]],
    "eos": ["none", "one", "several", "one, delayed"],
    "prompts": ["text", "tokens", "holes"],
    "pad": [PAD, None],
    "shift": [False, True],
    "head": HEADS,
    "mode": ["training", "evaluation"],
    "length": [None, N],
    "with_logprobs": [False, True],
    "processing": ["tokenizer", "processor"],
    "autocast": [False, True],
    "around": ["nothing", "no_grad", "inference_mode", "default dtype"],
}  # fmt: skip
OF_ROLLOUTS = pairs(ROLLOUTS)
DAILY = [number for number, case in enumerate(OF_ROLLOUTS) if case["head"] not in OF_PEFT]


@pytest.mark.parametrize("number", every_time(DAILY, range(len(OF_ROLLOUTS))))
def test_pairs_of_rollouts(number):
    chosen = OF_ROLLOUTS[number]
    torch.manual_seed(number)
    model = Model(chosen["head"]).double().train(chosen["mode"] == "training")
    plain = copy.deepcopy(model)
    model.shift = int(chosen["shift"])
    prompts = [[1, MASK, 3], [4], [5, MASK]] if chosen["prompts"] == "holes" else [[1, 2, 3], [4], [1, 2, 3]]
    eos = {"none": None, "several": list(range(5, 12))}.get(chosen["eos"], 9)
    trainer = Loop(model, chosen["autocast"])
    trainer.processing_class = SimpleNamespace(pad_token_id=chosen["pad"], eos_token_id=eos)
    if chosen["processing"] == "processor":
        trainer.processing_class = SimpleNamespace(tokenizer=trainer.processing_class)
    for name, value in chosen["of_trainer"].items():
        setattr(trainer, name, value)
    options = {
        **chosen["plan"], **chosen["choice"], "cfg_scale": chosen["cfg_scale"], "infill": chosen["prompts"] == "holes",
        "delay_eos": "delayed" in chosen["eos"],
    }  # fmt: skip
    names = "temperature", "suppress_ids", "shift", "length", "with_logprobs"
    given = {name: chosen[name] for name in names if not any(chosen[name] is default for default in (None, False))}
    rollout = integration.diffusion_rollout(MASK, **options, **given)
    torch.manual_seed(3)
    with surrounding(chosen["around"]):
        found = rollout([" ".join(map(str, p)) for p in prompts] if chosen["prompts"] == "text" else prompts, trainer)
    assert model.training == (chosen["mode"] == "training")
    torch.manual_seed(3)
    seeds = torch.empty(3, dtype=torch.int64).random_().tolist()
    suppressed = [3] if chosen["suppress_ids"] == 3 else chosen["suppress_ids"] or []
    tokens_that_end = [] if eos is None else eos if isinstance(eos, list) else [eos]
    plain.forward = lambda ids, forward=plain.forward: forward(ids).logits
    for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        with torch.no_grad():
            tokens, log_probs, steps = expected(
                plain, prompt, seed, temperature=0.7 if chosen["temperature"] is None else chosen["temperature"],
                eos_token_ids=tokens_that_end, suppress_ids=suppressed,
                **options, **chosen["of_trainer"],
            )  # fmt: skip
        first = len(prompt) if options["infill"] else 0
        count = sum(step >= 0 for step in steps[first:])
        assert found["completion_ids"][row] == tokens[first : first + count]
        assert all(type(token) is int for token in found["completion_ids"][row])
        assert found["prompt_ids"][row] == (tokens[:first] if options["infill"] else prompt)
        if chosen["with_logprobs"]:
            torch.testing.assert_close(found["logprobs"][row], log_probs[first : first + count])
    assert chosen["with_logprobs"] or found["logprobs"] is None
