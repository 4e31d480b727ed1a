"""Every option of ``diffusion_generate`` with models, heads and what surrounds a call: each pair once."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from dllm_kernels import fused_head
from dllm_kernels.generate import schedule
from tests.conftest import DEVICE, every_time
from tests.support.generation import (
    CHOICES,
    EOS,
    MASK,
    OF_PEFT,
    PLANS,
    PROMPTS,
    SEEDS,
    TRUNCATIONS,
    D,
    Encoder,
    N,
    V,
    adapt,
    children,
    expected,
    generate,
    padded,
)
from tests.support.pairs import pairs, surrounding

TABLE = {
    "choice": CHOICES,
    "temperature": [0, 1.0, 0.6],
    "truncation": [*TRUNCATIONS, {"top_k": 0, "top_p": 1, "min_p": 0}],
    "plan": PLANS,
    "cfg_scale": [0, 0.7, 1.5],
    "suppress_ids": [None, {3, 7, 11}, torch.tensor([2, 4])],
    "eos": ["none", "one", "many", "many, delayed", "many, padded by another"],
    "prompts": ["given", "with holes", "with MASK tokens that stay"],
    "shift": [False, True],
    "padding": ["long", "bool", "float", "more than needed", "none"],
    "seeds": ["seeds", "generator", "default generator"],
    "output": ["tensor", "object", "mapping", "tuple", "cast", "copy"],
    "head": ["linear", "no bias", "given", "LoRA", "trained copy", "trained rows", "more rows", "parametrized"],
    "dtype": [torch.float64, torch.float32],
    "around": ["nothing", "no_grad", "inference_mode", "autocast", "default dtype", "deterministic", "fused before",
               "checkpoint", "subclass of int"],
    "mode": ["training", "evaluation"],
    "ids": [torch.int64, torch.int32, torch.uint8],
    "chunk_size": [None, 1, 5],
    "logits_dtype": [None, torch.float32],
    "backend": ["torch", "triton"],
}  # fmt: skip
OUTPUTS = {
    "tensor": lambda z: z,
    "object": lambda z: SimpleNamespace(logits=z),
    "mapping": lambda z: {"loss": None, "logits": z},
    "tuple": lambda z: (z, None),
    "cast": lambda z: {"logits": z.to(torch.promote_types(z.dtype, torch.float32)).contiguous()},
    "copy": lambda z: [z.clone().view(z.shape)],
}


def excluded(case):
    """Return True for values that no call takes together; their errors are those of ``test_bad_input``."""
    if case.get("around") == "autocast" and case.get("dtype") == torch.float32:
        return True  # logits of 16 bits, rounded differently by another number of rows, decide otherwise
    return case.get("prompts") == "with holes" and "steps" not in case.get("plan", {"steps": 1})


class Dropping(Encoder):
    """The model with a head of a chosen kind, dropout, and an output of a chosen kind."""

    def __init__(self, head, output):
        super().__init__()
        self.dropout, self.output = nn.Dropout(0.5), OUTPUTS[output]
        if head == "given":
            self.project, self.lm_head = self.lm_head, None
        elif head == "no bias":
            self.lm_head.bias = None
        elif head == "more rows":
            self.lm_head = nn.Linear(D, 3)  # whose weight is replaced by a larger one
            self.lm_head.weight, self.lm_head.bias = nn.Parameter(torch.randn(V, D)), nn.Parameter(torch.randn(V))
        elif head == "parametrized":
            parametrize.register_parametrization(self.lm_head, "weight", Doubled())

    def forward(self, ids, attention_mask=None):
        head, self.lm_head = self.lm_head, self.lm_head or self.project
        try:
            z = super().forward(ids.long(), attention_mask)
        finally:
            self.lm_head = head
        return self.output(z)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Int(int):
    pass


def model_of(chosen):
    torch.manual_seed(0)
    head = chosen["head"]
    model = Dropping(head, chosen["output"])
    if head in OF_PEFT:
        adapt(model, head)
    return model.to(DEVICE, chosen["dtype"]).train(chosen["mode"] == "training")


def steps_of_blocks(step_map, P, options):
    """Count the steps of each block: each row with a masked token in the block decodes at least one per step."""
    for start, stop, _ in schedule(N, options.get("block_size") or N, options["steps"], infill=True):
        block = step_map[:, P + start if start else 0 : P + stop]
        yield max(len(set(row) - {-1}) for row in block.tolist())


def call(chosen, model, ids, on, **options):
    if chosen["around"] == "checkpoint":
        return torch.utils.checkpoint.checkpoint(generate, model, ids, on, **options, use_reentrant=False)
    return generate(model, ids, on, **options)


CASES = pairs(TABLE, excluded)
EVERY_DAY = [number for number, case in enumerate(CASES) if case["head"] not in OF_PEFT][:14]  # its import is slow


@pytest.mark.parametrize("number", every_time(EVERY_DAY, range(len(CASES))))
def test_pairs_of_features(number):
    chosen = CASES[number]
    torch.manual_seed(number)
    model = model_of(chosen)
    prompts = PROMPTS if chosen["prompts"] == "given" else ([1, MASK, 3, MASK], [4], [5, MASK])
    infill = chosen["prompts"] == "with holes"
    if chosen["padding"] == "none":
        prompts = [[1, MASK, 3, MASK], [4, 1, 5, 2], [5, MASK, 1, 2]]
        prompts = [[1, 2, 3, 4]] * 3 if chosen["prompts"] == "given" else prompts
    ids, on = padded(prompts, before=2 * (chosen["padding"] == "more than needed"))
    on = None if chosen["padding"] == "none" else on.to(getattr(torch, chosen["padding"], torch.int64))
    options = {"temperature": chosen["temperature"], **chosen["truncation"], **chosen["plan"], **chosen["choice"]}
    if "threshold" in options and options["steps"] == N:
        options["steps"] = None
    eos = {"none": (), "one": (9,)}.get(chosen["eos"], EOS)
    suppressed = [] if chosen["suppress_ids"] is None else [int(token) for token in chosen["suppress_ids"]]
    of_oracle = {
        "eos_token_ids": eos, "pad_token_id": 1 if "another" in chosen["eos"] else eos[0] if eos else 0,
        "delay_eos": "delayed" in chosen["eos"], "suppress_ids": suppressed, "cfg_scale": chosen["cfg_scale"],
        "infill": infill, **options,
    }  # fmt: skip
    ours = {
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None, "delay_eos": "delayed" in chosen["eos"],
        "pad_token_id": 1 if "another" in chosen["eos"] else None, "infill": infill, **options,
        **{name: chosen[name] for name in ("suppress_ids", "cfg_scale", "shift", "chunk_size", "backend")},
        "head": model.project if chosen["head"] == "given" else None,
    }  # fmt: skip
    if chosen["around"] == "subclass of int":
        ours |= {name: Int(value) for name, value in ours.items() if type(value) is int}
    if chosen["dtype"] == torch.float32:
        ours["logits_dtype"] = chosen["logits_dtype"]
    rows, drawn = SEEDS, {"seeds": SEEDS}
    if chosen["seeds"] != "seeds":
        drawn = {"generator": torch.Generator(DEVICE).manual_seed(7)} if chosen["seeds"] == "generator" else {}
        source = drawn.get("generator") or torch.default_generator
        state = source.get_state()
        word = torch.empty((), dtype=torch.int64, device=DEVICE).random_(-(2**63), 2**63 - 1, generator=source)
        source.set_state(state)
        rows = torch.from_numpy(children(word.item(), len(prompts)))
    modes, plain = [m.training for m in model.modules()], copy.deepcopy(model).eval()
    plain.output = lambda z: z
    model.shift = int(chosen["shift"])
    if chosen["around"] == "fused before" and model.lm_head is not None:
        with fused_head(model, on_logits="allow"):
            pass
    with surrounding(chosen["around"]):
        out = call(chosen, model, ids.to(chosen["ids"]), on, **ours, **drawn)
    assert [m.training for m in model.modules()] == modes
    assert not any(t.requires_grad for t in out)
    assert type(out.ids) is torch.Tensor
    P = ids.shape[1]
    assert torch.equal(out.ids[:, :P][~out.generated[:, :P]], ids[~out.generated[:, :P]])
    assert torch.equal(out.generated, out.step_map >= 0)
    if chosen["eos"] == "none":  # no decoded token is cut off
        assert len(model.seen) == sum(steps_of_blocks(out.step_map, P, options))
        assert {len(seen) for seen, _ in model.seen} == {len(prompts) * (1 + (chosen["cfg_scale"] > 0))}
    for row, (prompt, seed) in enumerate(zip(prompts, rows.tolist(), strict=True)):
        with torch.no_grad():
            tokens, log_probs, steps = expected(plain, prompt, seed, **of_oracle)
        before = P - len(prompt) if infill else P
        assert out.ids[row, before:].tolist() == tokens
        assert out.ids[row, P - len(prompt) : before].tolist() == prompt[: before - P + len(prompt)]
        assert out.step_map[row].tolist() == [-1] * before + steps
        exact = torch.tensor([0.0] * before + log_probs, dtype=out.log_probs.dtype, device=DEVICE)
        torch.testing.assert_close(out.log_probs[row], exact)
