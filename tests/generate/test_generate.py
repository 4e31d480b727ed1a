"""Generation: the oracle's tokens and steps, dependence on seeds only, EOS, products, heads, modes, bad input."""

import contextlib
import copy
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import reference
from benchmarks.measure import peak_memory
from dllm_kernels import DiffusionGeneration, policy_views
from dllm_kernels.generate import _Tokens, schedule
from tests.conftest import DEVICE, every_time
from tests.support.generation import (
    MASK,
    PROMPTS,
    SEEDS,
    D,
    Encoder,
    N,
    V,
    assert_rows_as_expected,
    children,
    expected,
    generate,
    model_of,
    padded,
)


@pytest.mark.many_draws
@pytest.mark.parametrize("masked", every_time([5], range(1, 8)))
def test_the_tokens_of_a_step_are_those_of_llada(masked):
    """``get_num_transfer_tokens`` of LLaDA's sampler, written as there."""
    model, ids = model_of(), padded(before=N)[0][:1]
    for steps in range(1, masked + 1):
        mask_num = torch.tensor([[masked]])
        base, remainder = mask_num // steps, mask_num % steps
        num_transfer_tokens = torch.zeros(1, steps, dtype=torch.int64) + base
        num_transfer_tokens[0, : remainder[0]] += 1
        assert reference.num_transfer_tokens(masked, steps) == num_transfer_tokens[0].tolist()
        for blocks in (1, 2):
            size = masked if blocks == 2 else None
            out = generate(model, ids, max_new_tokens=blocks * masked, steps=blocks * steps, block_size=size)
            counts = torch.bincount(out.step_map[0, ids.shape[1] :].cpu(), minlength=blocks * steps)
            assert counts.tolist() == num_transfer_tokens[0].tolist() * blocks


@pytest.mark.parametrize(("length", "size"), [(9, 8), (100, 64), (129, 128), (16, 8), (5, 7), (7, 3)])
def test_steps_are_in_proportion_to_the_tokens(length, size):
    """As many steps as tokens is one token per step, also in a short last block."""
    starts = range(0, length, size)
    for steps in range(len(starts), length + 1):
        plan = schedule(length, size, steps)
        assert [block.steps for block in plan] == reference.steps_of_blocks(length, size, steps)
        assert sum(block.steps for block in plan) == steps
        for start, (first, stop, own) in zip(starts, plan, strict=True):
            assert (first, stop) == (start, min(start + size, length))
            assert 1 <= own <= stop - start
            assert abs(own - steps * (stop - start) / length) < 1
    assert [stop - start for start, stop, _ in plan] == [own for *_, own in plan]


@pytest.mark.many_draws
def test_the_generator_decides_without_seeds():
    """Row b has child b of one drawn seed. If nothing is drawn, the generator stays as it is."""
    model, (ids, on) = model_of(), padded()
    generator = torch.Generator().manual_seed(1)
    drawn = [generate(model, ids, on, temperature=1.0, generator=generator) for _ in range(2)]
    assert not torch.equal(drawn[0].ids, drawn[1].ids)
    generator = torch.Generator().manual_seed(1)
    call = torch.empty((), dtype=torch.int64).random_(-(2**63), 2**63 - 1, generator=generator)
    rows = torch.from_numpy(children(call.item(), 3)).to(DEVICE)
    assert torch.equal(drawn[0].ids, generate(model, ids, on, temperature=1.0, seeds=rows).ids)
    state, default = generator.get_state(), torch.get_rng_state()
    generate(model, ids, on, generator=generator)
    generate(model, ids, on, temperature=1.0, seeds=SEEDS[: len(ids)])
    assert torch.equal(torch.get_rng_state(), default)
    assert torch.equal(generator.get_state(), state)
    generate(model, ids, on, generator=generator, remasking="random")
    assert not torch.equal(generator.get_state(), state)


@pytest.mark.many_draws
def test_random_remasking_is_uniform():
    """Each token is as likely in every step: 1,000 rows, within 4 standard errors."""
    B, ids = 1000, torch.ones(1000, 1, dtype=torch.int64, device=DEVICE)
    out = generate(model_of(), ids, remasking="random", steps=N, seeds=torch.arange(B, device=DEVICE))
    of_steps = torch.stack([(out.step_map[:, 1:] == s).double().mean(0) for s in range(N)])
    p = 1 / N
    assert (of_steps - p).abs().max() < 4 * (p * (1 - p) / B) ** 0.5
    pairs = (out.step_map[:, 1] + N * out.step_map[:, 2]).unique(return_counts=True)[1]
    assert len(pairs) == N * (N - 1)
    p = 1 / (N * (N - 1))
    assert (pairs / B - p).abs().max() < 4 * (p * (1 - p) / B) ** 0.5


@pytest.mark.parametrize("block_size", [None, 2])
def test_the_step_map_gives_the_views_of_the_trace(block_size):
    """View s of scheme "trace" is what the model has seen in step s, up to the tokens of later blocks."""
    model, (ids, on) = model_of(), padded()
    out = generate(model, ids, on, temperature=1.0, seeds=SEEDS, steps=5, block_size=block_size)
    views = policy_views(out.ids, out.generated, MASK, "trace", step_map=out.step_map)
    assert len(model.seen) == len(views.noisy) == 5
    for (seen, mask), noisy, scored in zip(model.seen, views.noisy, views.scored, strict=True):
        assert torch.equal(seen, noisy)
        assert torch.equal(mask, torch.cat([on, torch.ones_like(mask[:, -N:])], 1))
        assert scored.any(1).all()
    assert torch.equal(views.scored.sum(0).bool(), out.generated)


@pytest.mark.many_draws
@pytest.mark.parametrize("several", [None, list, set, torch.tensor, np.array])
@torch.no_grad()
def test_a_row_ends_after_its_first_eos(several):
    model, (ids, on) = model_of(3), padded()
    options = {"temperature": 1.0, "block_size": 2, "steps": 6}
    whole = generate(model, ids, on, seeds=SEEDS, **options)
    P = ids.shape[1]
    eos = [int(whole.ids[0, P + 1]), int(whole.ids[1, P + 2])] if several else [int(whole.ids[0, P + 1])]
    model.seen.clear()
    given = {"eos_token_id": several(eos), "pad_token_id": 0} if several else {"eos_token_id": eos[0]}
    pad = 0 if several else eos[0]
    out = generate(model, ids, on, seeds=SEEDS, **options, **given)
    ended = []
    for row, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS.tolist(), strict=True)):
        tokens, _, steps = expected(model, prompt, seed, eos_token_ids=eos, pad_token_id=pad, **options)
        assert out.ids[row, P:].tolist() == tokens
        assert out.step_map[row, P:].tolist() == steps
        assert torch.equal(out.generated[row], out.step_map[row] >= 0)
        assert not out.log_probs[row][~out.generated[row]].any()
        ended.append(int(out.generated[row].sum()))
    assert ended[0] == 2
    assert max(ended) > 2
    model.seen.clear()
    generate(model, ids[:1], on[:1], seeds=SEEDS[:1], **options, **given)
    assert len(model.seen) == 2  # the steps of the first block


@pytest.mark.parametrize(
    ("options", "products"),
    [({}, 1), ({"temperature": 1.0}, 1), ({"temperature": 0.5}, 2), ({"top_k": 3}, 2),
     ({"temperature": 0.5, "remasking": "random"}, 1), ({"remasking": "margin"}, 1),
     ({"remasking": "entropy", "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, 1),
     ({"remasking": "margin", "temperature": 0.5}, 2), ({"cfg_scale": 2.0, "suppress_ids": [1], "temperature": 1.0}, 1),
     ({"position_temperature": 0.3}, 1), ({"threshold": 1.0}, 1)],
    ids=str,
)  # fmt: skip
def test_only_masked_tokens_of_the_block_are_projected(options, products):
    """No other product has the size of the vocabulary."""
    model, (ids, on) = model_of(), padded()
    with FlopCounterMode(display=False) as counter:
        generate(model, ids, on, seeds=SEEDS, steps=4, block_size=3, **options)
    masked = 2 * (3 + 1)  # of two blocks of three tokens; the first step of each decodes two
    assert counter.get_total_flops() == products * 2 * 3 * masked * V * D


def test_rows_that_have_ended_are_not_projected():
    model, (ids, on) = model_of(3), padded()
    options = {"block_size": 2, "steps": 3, "seeds": SEEDS, "temperature": 1.0}
    eos = int(generate(model, ids, on, **options).ids[0, -N])
    with FlopCounterMode(display=False) as counter:
        out = generate(model, ids, on, eos_token_id=eos, **options)
    new = out.ids[:, -N:]
    left = [3, *(int(((new[:, :stop] != eos).all(1)).sum()) for stop in (2, 4))]
    assert left[0] > left[1] > 0
    assert counter.get_total_flops() == 2 * 2 * sum(left) * V * D


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_in_evaluation_mode_and_each_mode_is_restored(fails):
    model, (ids, on) = model_of().train(), padded()
    model.frozen = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)).eval()
    model.frozen[1].train()
    modes, during = [module.training for module in model.modules()], []

    def hook(*_):
        during.append((torch.is_grad_enabled(), any(module.training for module in model.modules())))
        return 1 / 0 if fails else None

    model.embedding.register_forward_hook(hook)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        out = generate(model, ids, on)
        assert not any(t.requires_grad for t in out)
    assert set(during) == {(False, False)}
    assert [module.training for module in model.modules()] == modes
    assert "forward" not in vars(model.lm_head)
    assert torch.is_grad_enabled()


class Returning(nn.Module):
    """A model with another output."""

    def __init__(self, model, change):
        super().__init__()
        self.body, self.change = model, change

    def forward(self, ids, **inputs):
        return self.change(self.body(ids, **inputs))


class Flat(nn.Module):
    """A model whose head receives the tokens of all rows in one dimension."""

    def __init__(self, model):
        super().__init__()
        self.embedding, self.lm_head = model.embedding, model.lm_head

    def forward(self, ids):
        return self.lm_head(self.embedding(ids).flatten(0, 1))


class Careless(Encoder):
    """A model that modifies its inputs, or reuses what it has computed for the tensor that it has seen last."""

    def __init__(self, how):
        super().__init__()
        self.how, self.last, self.out = how, None, None

    def forward(self, ids, attention_mask):
        given = ids.clone(), attention_mask.clone()
        if self.how == "modifies ids":
            ids.fill_(0)
        elif self.how == "modifies mask":
            attention_mask.fill_(0)
        elif self.last is ids:
            return self.out
        self.last = ids
        self.out = super().forward(*given)
        return self.out


@pytest.mark.parametrize("how", ["modifies ids", "modifies mask", "compares ids"])
def test_the_model_has_copies_of_its_inputs(how):
    (ids, on), model = padded(), model_of()
    expected = generate(model, ids, on)
    careless = Careless(how).to(DEVICE, torch.float64)
    careless.load_state_dict(model.state_dict())
    assert torch.equal(generate(careless, ids, on).ids, expected.ids)


def test_a_model_generates_for_one_caller_at_a_time(monkeypatch):
    """A second caller raises before it changes the mode of a module, also between two steps of the first."""
    model, (ids, on) = model_of().train(), padded()
    step, modes = _Tokens._step, []

    def between_steps(tokens, *arguments):
        monkeypatch.setattr(_Tokens, "_step", step)
        with pytest.raises(ValueError, match="with the forward of another call that replaces the same head and has "):
            generate(model, ids, on)
        modes.append(model.training)
        step(tokens, *arguments)

    expected = generate(model, ids, on)
    monkeypatch.setattr(_Tokens, "_step", between_steps)
    assert torch.equal(generate(model, ids, on).ids, expected.ids)
    assert modes == [False]
    assert model.training


@pytest.mark.parametrize(
    ("output", "named"),
    [(None, "NoneType"), ((), "tuple"), ({"loss": None, "z": 1}, "dict with loss, z"), (SimpleNamespace(), "types")],
    ids=str,
)  # fmt: skip
def test_an_output_without_logits(output, named):
    model, (ids, on) = model_of(), padded()
    message = "^the model must return its logits, an object or a mapping with logits, or a tuple that begins with them"
    with pytest.raises(ValueError, match=f"{message}, got {named}"):
        generate(Returning(model, lambda _: output), ids, on)


@pytest.mark.many_draws
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_of_the_logits_does_not_round_the_tokens(dtype):
    model, (ids, on) = model_of(vocabulary=3_001), padded()
    given = {"mask_token_id": 3_000, "seeds": SEEDS, "temperature": 1.0}
    expected = generate(model, ids, on, **given)
    assert not torch.equal(expected.ids, expected.ids.to(dtype).long())
    found = generate(Returning(model, lambda z: z.to(dtype)), ids, on, **given)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_of_other_models_are_float32(dtype):
    assert generate(model_of().to(dtype), *padded()).log_probs.dtype == torch.float32


def test_a_head_that_is_not_found_by_its_name():
    ids, on = padded()
    model = model_of()
    expected = generate(model, ids, on)
    vocabulary = model.lm_head
    del model.lm_head
    model.vocabulary = vocabulary
    model.__dict__["lm_head"] = vocabulary.__call__
    with pytest.raises(
        ValueError, match=r"^model must have get_output_embeddings\(\) or a module named lm_head, unless"
    ):
        generate(model, ids, on)
    assert torch.equal(generate(model, ids, on, head=vocabulary).ids, expected.ids)


def test_an_eos_is_delayed_until_nothing_else_is_left():
    """Without a threshold, or with one that every other token reaches, EOS tokens come last, one per step."""
    model, (ids, on) = model_of(), padded(PROMPTS[:1])
    P = ids.shape[1]
    plain = generate(model, ids, on, steps=1).ids[0, P:].tolist()
    late = torch.tensor([token == plain[0] for token in plain])
    assert not late.all()
    out = generate(model, ids, on, threshold=0.0, steps=None, eos_token_id=plain[0], delay_eos=True)
    assert torch.equal(out.step_map[0, P:].cpu() == 0, ~late)
    assert len(model.seen) - 1 == 1 + int(late.sum())


def test_infilling():
    """A prompt alone may be filled. MASK under padding stays, and an EOS of the prompt ends no row."""
    model, (ids, on) = model_of(), padded(([1, MASK, 3, MASK], [4, MASK]), before=2)
    ids[on == 0] = MASK
    options = {"infill": True, "max_new_tokens": 0, "steps": 2}
    out = generate(model, ids, on, **options)
    holes = (ids == MASK) & (on != 0)
    assert torch.equal(out.generated, holes)
    assert torch.equal(out.ids.masked_fill(holes, MASK), ids)
    assert (out.ids[holes] != MASK).all()
    assert len(model.seen) == 2
    eos = out.ids[holes].tolist()
    assert torch.equal(generate(model, ids, on, eos_token_id=eos, **options).ids, out.ids)
    assert torch.equal(generate(model, out.ids, on, **options).ids, out.ids)  # nothing to fill: no further call
    assert len(model.seen) == 4
    options = {"infill": True, "steps": N + 2, "temperature": 1.0}
    more = generate(model, ids, on, seeds=SEEDS[:2], **options)
    with torch.no_grad():
        assert_rows_as_expected(more, model, ([1, MASK, 3, MASK], [4, MASK]), **options)
    assert torch.equal(more.step_map[0].sort().values[4:], torch.arange(N + 2, device=DEVICE))  # one token per step
    assert int(more.step_map[1].max()) == N  # a hole less


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"remasking": "random"}, {"position_temperature": 9.0}], ids=str
)
def test_tokens_around_a_masked_one_have_draws_of_their_own(options):
    """An attention mask may be 0 in the middle of a prompt, which is no padding: two tokens shared their draws."""
    model, ids = model_of(), torch.tensor([[MASK, MASK, 0, MASK, 3]], device=DEVICE)
    model.lm_head.weight.data.zero_()  # equal distributions
    common = {"infill": True, "max_new_tokens": 1, "steps": 4, **options}
    on = torch.tensor([[1, 1, 0, 1, 1]], device=DEVICE)
    seeds = torch.arange(40, device=DEVICE)
    ones, holes = (
        generate(model, ids.expand(40, -1), mask.expand(40, -1), seeds=seeds, **common) for mask in (on * 0 + 1, on)
    )
    assert torch.equal(ones.ids, holes.ids)
    assert torch.equal(ones.step_map, holes.step_map)


def test_inputs_of_the_model_with_guidance():
    """Tensors with one entry per row are repeated, others and what is no tensor stay."""
    model, (ids, on) = model_of(), padded()
    seen = {}

    class Taking(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = model.lm_head

        def forward(self, ids, attention_mask, **inputs):
            seen.update(inputs, ids=ids, mask=attention_mask)
            return model(ids, attention_mask)

    given = {"position_ids": torch.arange(27, device=DEVICE).view(3, 9), "table": torch.ones(4, device=DEVICE), "n": 3}
    generate(Taking(), ids, on, cfg_scale=1.0, model_kwargs=given)
    assert torch.equal(seen["position_ids"], given["position_ids"].repeat(2, 1))
    assert torch.equal(seen["mask"], torch.cat([on, on.new_ones(3, N)], 1).repeat(2, 1))
    assert seen["table"] is given["table"]
    assert torch.equal(seen["ids"][:3, -N:], seen["ids"][3:, -N:])
    assert (seen["ids"][3:, :-N] == MASK).all()
    assert torch.equal(seen["ids"][:3, :-N], ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_guidance_takes_the_memory_of_one_forward_pass_and_a_chunk(dtype):
    """The logits of a chunk are the largest tensor; those of the rows without the prompt do not exist."""
    vocabulary, C = 20_000, 2 * N
    model, ids = model_of(vocabulary=vocabulary, width=64).cpu().to(dtype), torch.ones(2, 3, dtype=torch.int64)
    options = {"steps": 1, "mask_token_id": vocabulary - 1, "chunk_size": C}

    def peak(rows, **more):
        return peak_memory(lambda _: generate(model, rows, **options, **more), "cpu")

    peak(ids, cfg_scale=1.0)
    guided, plain = peak(ids, cfg_scale=1.0), peak(ids)
    assert plain > 2 * N * vocabulary * dtype.itemsize  # the chunk
    assert guided < plain + 2 * N * vocabulary * dtype.itemsize / 20


@torch.no_grad()
def test_float32_logits_of_16_bit_operands():
    model, (ids, on) = model_of().bfloat16(), padded()
    narrow, wide = (generate(model, ids, on, steps=1, logits_dtype=dtype) for dtype in (None, torch.float32))
    head = copy.deepcopy(model.lm_head).float()
    hidden = []
    model.lm_head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    model(torch.cat([ids, torch.full_like(ids[:, :1], MASK).expand(-1, N)], 1), torch.cat([on, on.new_ones(3, N)], 1))
    log_p = head(hidden[0].float())[..., :MASK].log_softmax(-1).amax(-1)[:, -N:]
    torch.testing.assert_close(wide.log_probs[:, -N:], log_p, rtol=2e-2, atol=2e-2)
    assert not torch.equal(narrow.log_probs, wide.log_probs)


def test_no_prompt_no_row_and_masks_of_other_dtypes():
    model = model_of()
    none = torch.empty(2, 0, dtype=torch.int64, device=DEVICE)
    out = generate(model, none)
    assert torch.equal(out.ids[0], out.ids[1])
    assert out.ids.shape == (2, N)
    assert (out.ids != MASK).all()
    for options in ({"eos_token_id": 1}, {"remasking": "random"}, {"seeds": SEEDS[:0], "temperature": 1.0}):
        assert [t.shape for t in generate(model, none[:0], **options)] == [(0, N)] * 4
    ids, on = padded()
    expected = generate(model, ids, on)
    model.seen.clear()
    for dtype in (torch.bool, torch.float32):
        assert torch.equal(generate(model, ids.int(), on.to(dtype)).ids, expected.ids)
        assert model.seen[-1][1].dtype == dtype
    given = {"attention_mask": torch.cat([on, on.new_ones(3, N)], 1)}
    assert torch.equal(generate(model, ids, model_kwargs=given).ids, expected.ids)


@pytest.mark.exhaustive
def test_a_compiled_model():
    model, (ids, on) = model_of(), padded()
    model.seen = SimpleNamespace(append=lambda _: None)
    options = {"temperature": 0.8, "seeds": SEEDS, "block_size": 3}
    expected = generate(model, ids, on, **options)
    compiled = torch.compile(model, backend="eager")
    found = generate(compiled, ids, on, **options)
    assert torch.equal(found.ids, expected.ids)
    torch.compiler.reset()


def test_bad_input():
    model, (ids, on) = model_of(), padded()
    cpu_ids, cpu_on = ids.cpu(), on.cpu()
    model = model.cpu()

    def raises(error, message, model=model, ids=cpu_ids, **options):
        model.seen.clear() if isinstance(model, Encoder) else None
        with pytest.raises(error, match="^" + re.escape(message)):
            generate(model, ids, **options)
        assert not isinstance(model, Encoder) or not model.seen  # before the model runs

    raises(TypeError, "model must be an nn.Module, got function", model=lambda ids: ids)
    raises(TypeError, "head must be an nn.Module, got torch.Tensor", head=torch.ones(2))
    raises(
        ValueError, "the LM head must be an nn.Linear for the loss to run inside it, got torch.nn.modules.sparse.Embed",
        head=model.embedding,
    )  # fmt: skip
    raises(TypeError, "prompt_ids must be a torch.Tensor, got list", ids=[[1]])
    raises(ValueError, "prompt_ids must have dtype int64, int32, ", ids=cpu_ids.float())
    raises(ValueError, "prompt_ids must have shape [B, P], got (3,)", ids=cpu_ids[0])
    raises(TypeError, "mask_token_id must be an int, got NoneType", mask_token_id=None)
    raises(ValueError, "mask_token_id must not be negative, got -1", mask_token_id=-1)
    raises(ValueError, "mask_token_id must lie in [0, 21), got 21", mask_token_id=V)
    for name in ("max_new_tokens", "steps", "block_size"):
        raises(TypeError, f"{name} must be an int, got float", **{name: 1.0})
        raises(ValueError, f"{name} must be at least 1, got 0", **{name: 0})
    between = "steps must lie between the number of blocks and that of tokens, "
    raises(ValueError, between + "1 and 6, got 7", steps=7)
    raises(ValueError, between + "3 and 6, got 2", steps=2, block_size=2)
    raises(ValueError, "remasking must be one of confidence, margin, entropy, random, got 'low'", remasking="low")
    raises(TypeError, "temperature must be a number, got NoneType", temperature=None)
    raises(ValueError, "temperature must be 0, or positive", temperature=-1.0)
    raises(ValueError, "top_k must lie in [0, 21], the size of the vocabulary, or be None, got -1", top_k=-1)
    raises(ValueError, "top_p must lie in (0, 1], or be None, got 2", top_p=2)
    raises(ValueError, "min_p must lie in [0, 1], or be None, got -1", min_p=-1)
    raises(TypeError, "attention_mask must be a torch.Tensor, got list", attention_mask=[1])
    raises(ValueError, "attention_mask must have shape (3, 3) (that of prompt_ids)", attention_mask=cpu_on[:, 1:])
    raises(ValueError, "attention_mask must hold no negative number", attention_mask=-cpu_on)
    raises(
        ValueError, "attention_mask must be 1 in the last column of a prompt, got 0 in row 1; pad on the left",
        attention_mask=cpu_on.flip(1),
    )  # fmt: skip
    raises(TypeError, "model_kwargs must be a mapping or None, got list", model_kwargs=[])
    raises(
        ValueError, "attention_mask must be given once, got it in model_kwargs, too",
        attention_mask=cpu_on, model_kwargs={"attention_mask": cpu_on},
    )  # fmt: skip
    raises(TypeError, "eos_token_id must be an int, got str", eos_token_id="</s>")
    raises(TypeError, "eos_token_id must be an int, got float", eos_token_id=torch.ones(1))
    raises(TypeError, "eos_token_id must be an int, got bool", eos_token_id=True)
    raises(TypeError, "pad_token_id must be an int, got float", pad_token_id=0.0)
    raises(TypeError, "pad_token_id must be an int, got list", pad_token_id=[0])
    for name in ("eos_token_id", "pad_token_id", "suppress_ids"):
        raises(ValueError, f"{name} must be at least 0, got -1", **{name: -1})
        raises(ValueError, f"{name} must lie in [0, 21), got 21", **{name: V})
        if name != "suppress_ids":
            raises(ValueError, f"{name} must not be the MASK token, got 20", **{name: MASK})
    for bad in ([1, -1], {V}, torch.tensor([[1], [V]])):
        raises(ValueError, "eos_token_id must ", eos_token_id=bad)
    raises(
        ValueError, "suppress_ids must leave a token to choose beside MASK, got all 20 others",
        suppress_ids=range(V - 1),
    )  # fmt: skip
    for name in ("delay_eos", "infill", "shift"):
        raises(TypeError, f"{name} must be a bool, got str", **{name: "no"})
    raises(ValueError, "eos_token_id must be given for delay_eos=True, got none", delay_eos=True)
    raises(TypeError, "position_temperature must be a number, got NoneType", position_temperature=None)
    raises(ValueError, "position_temperature must be 0, or positive, from ", position_temperature=-0.1)
    drawn = "position_temperature must be 0 for remasking='random', got 0.1"
    raises(ValueError, drawn, position_temperature=0.1, remasking="random")
    raises(TypeError, "threshold must be a number or None, got str", threshold="0.9")
    raises(ValueError, "threshold must lie in [0, 1], got 1.5", threshold=1.5)
    for name in ("random", "entropy"):
        raises(ValueError, f"threshold must be None for remasking={name!r}, got 0.9", threshold=0.9, remasking=name)
    both = "threshold and position_temperature exclude each other: expected one of them, got both"
    raises(ValueError, both, threshold=0.9, position_temperature=0.1)
    raises(ValueError, "steps must be given unless threshold is, got None for both", steps=None)
    raises(TypeError, "cfg_scale must be a number, got NoneType", cfg_scale=None)
    raises(ValueError, "cfg_scale must be finite and non-negative, got -0.5", cfg_scale=-0.5)
    raises(
        ValueError, "prompt_ids must not begin with MASK for shift=True and infill=True, got it in row 1",
        ids=torch.tensor([[1, 2], [0, MASK]]), attention_mask=torch.tensor([[1, 1], [0, 1]]), shift=True, infill=True,
    )  # fmt: skip
    raises(ValueError, "steps must be at least 3, the number of blocks, got 2", steps=2, block_size=2, infill=True)
    empty = "prompt_ids must have a token in every row for shift=True, got none in row "
    raises(ValueError, empty + "0", ids=cpu_ids[:, :0], shift=True)
    raises(ValueError, empty + "1", attention_mask=cpu_on * torch.tensor([[1], [0], [1]]), shift=True)
    raises(ValueError, "seeds must have shape (3,), one per row, got (2,)", seeds=SEEDS[:2].cpu())
    raises(ValueError, "generator and seeds exclude each other", seeds=SEEDS.cpu(), generator=torch.Generator())
    raises(TypeError, "generator must be a torch.Generator or None, got int", generator=1)
    raises(ValueError, "logits_dtype must be torch.float32 or None", logits_dtype=torch.float16)
    raises(ValueError, "chunk_size must be at least 1, got 0", chunk_size=0)
    raises(ValueError, "backend must be one of", backend="cuda")
    changed = (
        "the model must call its LM head once and return its output unchanged, with no scale, bias or soft cap, got "
    )
    raises(ValueError, changed + "a call of ", model=Returning(model, lambda z: 2 * z))
    raises(ValueError, changed + "another tensor; diffusion_generate", model=Returning(model, lambda z: torch.ones(1)))
    raises(
        ValueError, "the LM head must receive hidden states of shape (3, 9, 'D'), one row per token, got (27, 8); ",
        model=Flat(model),
    )  # fmt: skip


def test_the_result_cannot_be_changed():
    out = generate(model_of(), padded()[0])
    assert isinstance(out, DiffusionGeneration)
    with pytest.raises(AttributeError):
        out.ids = None
