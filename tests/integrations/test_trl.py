"""TRL patched and unpatched: values, gradients and products of its log-probabilities; policies of diffusion LMs."""

import contextlib
import copy
import functools
import importlib
import importlib.util
import itertools
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dllm_kernels.integrations import nemo_automodel, speculators
from dllm_kernels.integrations import trl as integration
from dllm_kernels.integrations.transformers import loss_in_head
from tests.integrations.test_trl_pairs import PAD, Loop, Model, Trainer, batch
from tests.support.generation import MASK, D, N, V
from tests.support.hosts import assert_patched_once, attributes_of, defined_in
from tests.support.parity import OUR_DRAWS, PLAIN_DRAWS, assert_as_good_as_plain, largest_error, reduction_sizes

H = D
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")


@pytest.fixture
def host(monkeypatch):
    """Provide its kernels, unpatched, and the module of its trainers; all patches of the test are undone afterwards.

    The latter needs pandas, datasets and other packages, which are not installed everywhere.
    """
    kernels = importlib.import_module("trl.kernels")
    try:
        utils = importlib.import_module("trl.trainer.utils")
    except ImportError:
        utils = types.ModuleType("trl.trainer.utils")
        utils._ChunkedLogProbFunction = kernels.ChunkedLogProbFunction
        utils.maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()
        monkeypatch.setitem(sys.modules, utils.__name__, utils)
    yield SimpleNamespace(kernels=kernels, utils=utils, original=kernels.ChunkedLogProbFunction)
    integration.unpatch()


# Replacing and restoring ----------------------------------------------------------------------------------------------


host_attributes = functools.partial(attributes_of, "trl")


PLACES = {
    ("trl.kernels", "ChunkedLogProbFunction"),
    ("trl.kernels.chunked_logprob", "ChunkedLogProbFunction"),
    ("trl.trainer.utils", "_ChunkedLogProbFunction"),
}


@needs_trl
def test_patching_replaces_every_reference_and_unpatching_restores_them(host):
    before = host_attributes()
    report = integration.patch()
    assert set(report.replaced) == PLACES
    assert report.version == "1.16.0"
    assert str(report).splitlines()[0] == "trl 1.16.0 patched, 3 places:"
    after = host_attributes()
    assert {place for place in before if before[place] is not after[place]} == PLACES
    assert host.utils._ChunkedLogProbFunction is host.kernels.ChunkedLogProbFunction
    again = integration.patch()
    assert again.already
    assert again.replaced == report.replaced
    assert set(integration.unpatch()) == PLACES
    assert integration.unpatch() == ()
    restored = host_attributes()
    assert not [place for place in before if before[place] is not restored[place]]


def longer(ctx, hidden, weight, bias, targets, temperature, chunk_size, cap=None, logit_scale=1.0, outputs=(), top=1):
    raise NotImplementedError


@needs_trl
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"forward": longer}, "ChunkedLogProbFunction.forward: takes cap, which ours does not"),
        ({"forward": longer}, "ChunkedLogProbFunction.forward: takes top, which ours does not"),
        ({"forward": longer}, r"outputs defaults to \(\), ours to \('entropy', "),
        ({}, "trl.kernels has no ChunkedLogProbFunction.forward"),
        (None, "trl.kernels has no ChunkedLogProbFunction"),
        (SimpleNamespace(forward=longer), "types.SimpleNamespace, not the framework's own"),
    ],
)
def test_another_signature_keeps_the_function_or_is_rejected(host, monkeypatch, changed, message):
    if isinstance(changed, dict):
        changed = defined_in(host.kernels, type("ChunkedLogProbFunction", (), changed))
    monkeypatch.setattr(host.kernels, "ChunkedLogProbFunction", changed)
    before = host_attributes()
    differ = r"^trl 1\.16\.0 has unexpected definitions; "
    with pytest.raises(RuntimeError, match=rf"{differ}nothing was replaced:\n(.|\n)*{message}"):
        integration.patch(strict=True)
    with pytest.warns(UserWarning, match=rf"{differ}ChunkedLogProbFunction stay as they are:\n(.|\n)*{message}"):
        report = integration.patch()
    assert report.replaced == ()
    assert [name for name, _ in report.kept] == ["ChunkedLogProbFunction"]
    after = host_attributes()
    assert not [place for place in before if before[place] is not after[place]]
    assert integration.unpatch() == ()


@needs_trl
def test_two_threads_patch_once(host, monkeypatch):
    assert_patched_once(integration, host_attributes, monkeypatch)


@pytest.mark.parametrize("call", [integration.patch, speculators.patch, nemo_automodel.patch])
def test_an_invalid_strictness_is_rejected(call):
    with pytest.raises(TypeError, match=r"^strict must be a bool, got str$"):
        call(strict="yes")


@pytest.mark.parametrize("call", [speculators.patch, nemo_automodel.patch])
@pytest.mark.parametrize("exclude", [None, 3, [3]], ids=str)
def test_excluded_names_are_strings(call, exclude):
    with pytest.raises(TypeError, match=r"^exclude must be names, a list of str, got (NoneType|int)$"):
        call(exclude=exclude)


# The log-probabilities ------------------------------------------------------------------------------------------------

OUTPUTS = [
    ("log_probs",),
    ("log_probs", "entropy"),
    ("entropy", "is_top1"),
    ("mean_logits",),
    ("is_top1", "mean_logits", "entropy"),
    ("log_sum_sq_probs", "entropy"),
]
TRANSFORMS = {
    "plain": (1.0, None, 1.0),
    "temperature": (0.7, None, 1.0),
    "scaled": (1.3, None, 0.6),
    "capped": (0.7, 3.0, 1.4),
}


def formula(hidden, weight, bias, targets, temperature, _, cap, scale, outputs):
    """Compute the documented results of TRL in the dtype of the arguments."""
    z = (hidden @ weight.T + (0 if bias is None else bias)) * scale
    z = (z if cap is None else cap * torch.tanh(z / cap)) / temperature
    inside = (targets >= 0) & (targets < V)
    target_logit = z.gather(1, targets.where(inside, 0)[:, None])[:, 0].where(inside, 0.0)
    log_p = z.log_softmax(-1)
    further_outputs = {
        "entropy": lambda: -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": lambda: (2 * log_p).logsumexp(-1).detach(),
        "mean_logits": lambda: z.mean(-1).detach(),
        "is_top1": lambda: z.argmax(-1) == targets,
    }
    return target_logit - z.logsumexp(-1), *(
        further_outputs[name]() if name in outputs else None for name in integration.OUTPUTS
    )


def results(apply, tensors, frozen, upstream, *options_of_call):
    """Return the requested float outputs and the gradients; then ``is_top1``."""
    hidden, weight, bias, targets = tensors
    leaves = [
        t.detach().clone().requires_grad_() for t in (hidden, *(() if frozen else (weight, bias))) if t is not None
    ]
    arguments = [*leaves, weight, bias] if frozen else [*leaves, bias][:3]
    *floats, top = apply(*arguments, targets, *options_of_call)
    floats = [f for f in floats if f is not None]
    differentiable = [f for f in floats if f.requires_grad]
    grads = torch.autograd.grad(
        differentiable, leaves, [u.to(f.dtype) for u, f in zip(upstream, differentiable, strict=False)]
    )
    return [*(f.detach() for f in floats), *grads], top


@pytest.mark.everyday(2)
@needs_trl
@pytest.mark.covering(2, most=2)
@pytest.mark.parametrize("outputs", OUTPUTS, ids="+".join)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_values_and_gradients_are_as_good_as_those_of_trl(host, outputs, transform, dtype, with_bias, frozen):
    T, cap, scale = TRANSFORMS[transform]
    options_of_call = T, 8, cap, scale, outputs
    integration.patch()
    ours, plain, exact, sizes = [], [], [], set()
    for seed in range(PLAIN_DRAWS):
        torch.manual_seed(seed)
        hidden, weight = torch.randn(N, H).to(dtype), torch.randn(V, H).to(dtype)
        bias = torch.randn(V).to(dtype) if with_bias else None
        tensors, upstream = (hidden, weight, bias, torch.randint(0, V, (N,))), torch.randn(2, N)
        sizes |= reduction_sizes([hidden, weight])
        plain.append(results(host.original.apply, tensors, frozen, upstream, *options_of_call)[0])
        double = [t if t is None or not t.is_floating_point() else t.double() for t in tensors]
        found, top = results(formula, double, frozen, upstream, *options_of_call)
        exact.append(found)
        if seed < OUR_DRAWS:
            found, our_top = results(
                host.utils._ChunkedLogProbFunction.apply, tensors, frozen, upstream, *options_of_call
            )
            ours.append(found)
            assert (our_top is None) == (top is None)
            assert top is None or dtype != torch.float32 or torch.equal(our_top, top)
    for place in range(len(plain[0])):
        got, p, e = ([run[place] for run in runs] for runs in (ours, plain, exact))
        assert [o.dtype for o in got] == [o.dtype for o in p[:OUR_DRAWS]]
        assert_as_good_as_plain(got, e, largest_error(p, e), f"result {place}", sizes)


@needs_trl
@pytest.mark.parametrize("frozen", [False, True])
def test_targets_outside_the_vocabulary_ties_and_no_rows(host, frozen):
    """A target outside of the vocabulary has the log-probability of a logit of 0.

    Of equal logits, the lowest index is the argmax.
    """
    integration.patch()
    hidden, weight, bias = torch.randn(4, H), torch.randn(V, H), torch.randn(V)
    outputs = "entropy", "is_top1"
    for targets in (torch.tensor([-100, 3, V, -1]), torch.tensor([1, 2, 3, 4])):
        tensors, upstream = (hidden, weight, bias, targets), torch.randn(2, 4)
        for one in ((1.0, 8, None, 1.0, outputs), (0.5, 8, 2.0, 3.0, outputs), (0.5, 8, 2.0, 3.0, outputs[:1])):
            found, theirs = (
                results(f.apply, tensors, frozen, upstream, *one)
                for f in (host.utils._ChunkedLogProbFunction, host.original)
            )
            for ours, other in zip(found[0], theirs[0], strict=True):
                torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)
            assert torch.equal(found[1], theirs[1]) if "is_top1" in one[-1] else found[1] is None
    # A target outside is the most likely token if no logit exceeds 0.
    for most in (-1.0, 0.0, 1.0):
        largest = torch.zeros(V, H), most - torch.rand(V).index_fill(0, torch.tensor([2]), 0.0)
        targets = torch.tensor([-100, 3, V, -1])
        for one in ((1.0, 8, None, 1.0, outputs), (0.5, 8, 2.0, 3.0, outputs)):
            tops = [
                f.apply(hidden.requires_grad_(frozen), *largest, targets, *one)[-1]
                for f in (host.utils._ChunkedLogProbFunction, host.original)
            ]
            assert tops[0].tolist() == tops[1].tolist() == [most <= 0, False, most < 0, most <= 0]
    same = torch.zeros(V, H)
    for f in (host.utils._ChunkedLogProbFunction, host.original):
        top = f.apply(
            hidden.requires_grad_(), same.requires_grad_(not frozen), None, torch.arange(4), 1.0, 8, None, 1.0, outputs
        )[-1]
        assert top.tolist() == [True, False, False, False]
    none = host.utils._ChunkedLogProbFunction.apply(hidden[:0], weight, bias, torch.arange(0), 1.0, 8)
    assert [tuple(t.shape) for t in none] == [(0,)] * 5


def in_place_product(_, a, b, **__):
    """Count the operations of ``addmm_``, which torch's counter does not know."""
    return 2 * a[0] * a[1] * b[1]


@pytest.mark.everyday(4)
@needs_trl
@pytest.mark.parametrize("outputs", [OUTPUTS[1], OUTPUTS[4]], ids="+".join)
@pytest.mark.parametrize(
    ("frozen", "upstream", "ours", "theirs"),
    [
        (True, "none", 1, 1),
        (True, "log_probs", 2, 3),
        (True, "entropy", 4, 3),
        (False, "none", 1, 1),
        (False, "log_probs", 4, 4),
        (False, "entropy", 4, 4),
    ],
)
def test_a_frozen_head_takes_two_products_where_trl_takes_three(host, outputs, frozen, upstream, ours, theirs):
    """The gradient of the entropy is computed only if the entropy has an upstream gradient."""
    integration.patch()
    hidden, weight = torch.randn(64, 32), torch.randn(48, 32).requires_grad_(not frozen)
    for f, expected in ((host.utils._ChunkedLogProbFunction, ours), (host.original, theirs)):
        leaf = hidden.clone().requires_grad_()
        counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place_product})
        with counter, torch.set_grad_enabled(upstream != "none"):
            log_probs, entropy, *_ = f.apply(
                leaf, weight, None, torch.arange(48).repeat(2)[:64], 0.7, 48, None, 1.0, outputs
            )
            if upstream != "none":
                (log_probs if upstream == "log_probs" else log_probs + entropy).sum().backward()
        assert counter.get_total_flops() == expected * 2 * 64 * 32 * 48


@needs_trl
@pytest.mark.parametrize(
    ("temperature", "cap", "scale", "outputs"),
    [
        (1.0, None, 0.0, ()),
        (1.0, None, -2.0, ()),
        (-1.0, None, 1.0, ()),
        (1.0, 3.0, 1.0, ("mean_logits",)),
        (1.0, None, 1.0, ("log_sum_sq_probs",)),
    ],
)
def test_unsupported_calls_are_passed_to_trl(host, monkeypatch, temperature, cap, scale, outputs):
    integration.patch()
    ours, calls = host.utils._ChunkedLogProbFunction, []
    monkeypatch.setattr(ours, "original", SimpleNamespace(apply=lambda *arguments: calls.append(arguments)))
    arguments = torch.randn(N, H), torch.randn(V, H), None, torch.arange(N), temperature, 8, cap, scale, outputs
    assert ours.apply(*arguments) is None
    assert [len(call) for call in calls] == [9]
    assert all(a is b for a, b in zip(calls[0], arguments, strict=True))
    ours.apply(arguments[0], nn.Parameter(arguments[1]), *arguments[2:6])  # the defaults request all outputs
    assert len(calls[1]) == 6
    partitioned = nn.Parameter(arguments[1])
    partitioned.ds_id = 0  # set by DeepSpeed ZeRO-3, which gathers it again in backward
    ours.apply(arguments[0], partitioned, *arguments[2:4], 1.0, 8, None, 1.0, ())
    assert len(calls) == 3


@needs_trl
@pytest.mark.parametrize("entropy", [False, True])
def test_autocast_and_a_head_of_another_dtype(host, entropy):
    """Products have the dtype of autocast, otherwise that of the hidden states.

    Each gradient has the dtype of its tensor. The mean of the logits, which TRL only logs, stays in float32.
    """
    integration.patch()
    hidden, weight, targets = torch.randn(N, H), torch.randn(V, H), torch.arange(N)
    for autocast, frozen, dtype in itertools.product([False, True], [False, True], [torch.float32, torch.bfloat16]):
        found = []
        for f in (host.utils._ChunkedLogProbFunction, host.original):
            h, w = hidden.clone().requires_grad_(), weight.to(dtype, copy=True).requires_grad_(not frozen)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                log_probs, entropy_values, _, mean, _ = f.apply(
                    h, w, None, targets, 0.5, 8, None, 1.0, ("entropy", "mean_logits")
                )
            if f is not host.original:
                torch.testing.assert_close(mean, 2 * (hidden @ w.detach().float().T).mean(1))
            (log_probs + entropy_values if entropy else log_probs).sum().backward()
            found.append([log_probs.detach(), h.grad, *([] if frozen else [w.grad])])
        for ours, theirs in zip(*found, strict=True):
            assert ours.dtype == theirs.dtype
            loose = 0.1 if autocast or dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(ours, theirs, rtol=loose, atol=loose)


@pytest.mark.everyday(8)
@needs_trl
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("frozen", [False, True])
def test_float32_logits_of_16_bit_operands(host, transform, dtype, frozen):
    """Log-probabilities and entropies equal those of TRL's own function for the operands cast to float32."""
    T, cap, scale = TRANSFORMS[transform]
    options_of_call = T, 8, cap, scale, ("entropy", "is_top1")
    integration.patch(logits_dtype=torch.float32)
    torch.manual_seed(0)
    tensors = torch.randn(N, H).to(dtype), torch.randn(V, H).to(dtype), torch.randn(V).to(dtype), torch.arange(N)
    wide = [t.to(torch.promote_types(dtype, torch.float32)) for t in tensors[:3]]
    upstream = torch.randn(2, N)
    found, top = results(host.utils._ChunkedLogProbFunction.apply, tensors, frozen, upstream, *options_of_call)
    expected, their_top = results(host.original.apply, (*wide, tensors[3]), frozen, upstream, *options_of_call)
    assert torch.equal(top, their_top)
    # A log-probability near 0 is a difference of float32 numbers of the size of the logits, which both implementations
    # round.
    size = (wide[0] @ wide[1].t() + wide[2]).abs().max().item() * scale / T
    rounding = 4 * torch.finfo(torch.float32).eps * max(size, 1)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=rounding, check_dtype=False)
    loose = 4 * max(torch.finfo(dtype).eps, 1e-6)  # TRL adds in float32
    for ours, theirs in zip(found[2:], expected[2:], strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=loose, atol=loose * theirs.abs().max().item())
    with pytest.raises(RuntimeError, match=r"trl is patched already, with logits_dtype=torch\.float32; unpatch"):
        integration.patch()


@needs_trl
@pytest.mark.parametrize(("arguments", "error", "message"), [
    (torch.bfloat16, ValueError, "torch.float32 or None, got torch.bfloat16"),
    ("float32", TypeError, "a torch.dtype or None, got str"),
])  # fmt: skip
def test_another_dtype_of_the_logits_is_rejected(host, arguments, error, message):
    for call in (
        integration.patch,
        functools.partial(Trainer, mask_token_id=MASK),
        functools.partial(integration.diffusion_rollout, MASK, steps=1),
    ):
        with pytest.raises(error, match=f"^logits_dtype must be {message}$"):
            call(logits_dtype=arguments)
    assert host.kernels.ChunkedLogProbFunction is host.original


@needs_trl
@pytest.mark.parametrize("name", ["grpo", "rloo", "dpo", "kto", "sft", "async_grpo"])
def test_trainers_of_trl_build_their_heads_on_the_patched_function(name, host, monkeypatch):
    """``add_fused_lm_head`` looks the function up at each call."""
    if not hasattr(host.utils, "add_fused_lm_head"):
        pytest.skip("trl.trainer.utils cannot be imported")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    folder = "experimental.async_grpo" if name == "async_grpo" else "trainer"
    build = importlib.import_module(f"trl.{folder}.{name}_trainer").add_fused_lm_head
    integration.patch()
    assert build.__globals__["_ChunkedLogProbFunction"] is host.kernels.ChunkedLogProbFunction
    assert isinstance(host.kernels.ChunkedLogProbFunction, integration.ChunkedLogProbs)


@needs_trl
def test_models_of_trl_run_the_patched_function(host, monkeypatch):
    """The trainers call ``add_fused_lm_head``, which uses the patched function."""
    if not hasattr(host.utils, "add_fused_lm_head"):
        pytest.skip("trl.trainer.utils cannot be imported")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, **sizes))
    host.utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy", "is_top1"))
    ids = torch.randint(0, V, (2, 7))
    labels = ids.masked_fill(torch.rand(2, 7) < 0.3, -100)
    found = []
    for patched in (False, True):
        if patched:
            integration.patch()
        model.zero_grad()
        out = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (out.loss + out.entropy.sum()).backward()
        found.append([out.log_probs, out.entropy, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


# Policies of diffusion LMs --------------------------------------------------------------------------------------------


def test_empty_completions_have_no_log_probs():
    ids, not_padding, _ = batch()
    trainer = Trainer(mask_token_id=MASK)
    log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        Model(), ids, not_padding, 0, compute_entropy=True
    )
    assert log_probs.shape == entropies.shape == (4, 0)


@pytest.mark.parametrize(
    ("frozen", "entropy", "upstream", "products"),
    [
        (True, False, "log_probs", 2),
        (True, True, "log_probs", 2),
        (True, True, "entropy", 4),
        (True, True, "both", 4),
        (False, True, "log_probs", 4),
        (False, True, "both", 4),
    ],
)
def test_products_of_the_mixin(frozen, entropy, upstream, products):
    """TRL always requests the entropy, and usually only logs it."""
    model, (ids, not_padding, keep) = Model(output=lambda z: z.float().contiguous().clone()), batch()
    model.lm_head.requires_grad_(not frozen)
    trainer = Trainer(mask_token_id=MASK, scheme="coupled")
    with FlopCounterMode(display=False) as counter:
        scores, entropies, _ = trainer._get_per_token_logps_and_entropies(
            model, ids, not_padding, keep, compute_entropy=entropy
        )
        loss = scores.sum() if upstream == "log_probs" else entropies.sum()
        (loss + scores.sum() if upstream == "both" else loss).backward()
    scored = 2 * int(not_padding[:, -keep:].sum())  # the full view, and a mask and its complement
    assert counter.get_total_flops() == products * 2 * scored * H * V


def finalised(x):
    """Apply splitmix64's finaliser, in Python's integers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


@pytest.mark.parametrize("iteration", [0, 1, 2**40])
def test_seeds_are_the_documented_hash(iteration):
    ids, not_padding, keep = batch(before=1, after=2)
    gamma, expected = 0x9E3779B97F4A7C15, []
    for row, on in zip(ids.tolist(), not_padding.tolist(), strict=True):
        tokens = [(token, i >= len(row) - keep) for i, (token, o) in enumerate(zip(row, on, strict=True)) if o]
        total = sum(finalised((token + gamma * (2 * n + c)) % 2**64) for n, (token, c) in enumerate(tokens, 1))
        expected.append(finalised((total + gamma * iteration) % 2**64))
    seeds = integration.row_seeds(ids, not_padding, keep, iteration)
    assert [seed % 2**64 for seed in seeds.tolist()] == expected
    assert len(set(expected)) == len(expected)
    assert seeds.dtype == torch.int64


def test_masks_stay_with_a_row_within_a_generation():
    """The rows are shuffled, padded further, split into chunks, and used in several iterations.

    The next generation sees others.
    """
    model, trainer = Model(), Trainer(mask_token_id=MASK, scheme="elbo", num=2)
    model.places.data.zero_()  # otherwise, padding on the right changes positions

    def scores(ids, not_padding, keep, **options):
        with torch.no_grad():
            return trainer._get_per_token_logps_and_entropies(model, ids, not_padding, keep, **options)[0]

    first = scores(*batch())
    order = torch.tensor([2, 0, 3, 1])
    ids, not_padding, keep = batch(before=2, after=3)
    torch.testing.assert_close(scores(ids[order], not_padding[order], keep, batch_size=2)[:, :5], first[order])
    for step, same in ((1, True), (3, True), (4, False)):  # a generation serves 2 steps in each of 2 iterations
        trainer._step = step
        assert torch.equal(scores(*batch()), first) == same


def test_the_iteration_that_changes_the_masks_is_an_option():
    """The number is constant for all generations, or returned by a function of the trainer."""
    model, (ids, not_padding, keep) = Model(), batch()

    def scores(step, **options):
        trainer = Trainer(mask_token_id=MASK, scheme="elbo", num=2, **options)
        trainer._step = step
        with torch.no_grad():
            return trainer._get_per_token_logps_and_entropies(model, ids, not_padding, keep)[0]

    generations = [scores(step) for step in (0, 4, 8)]
    assert not torch.equal(generations[1], generations[2])
    assert all(torch.equal(scores(step, iteration=1), generations[1]) for step in (0, 4, 8))
    assert torch.equal(scores(4, iteration=lambda trainer: trainer._step // 2), generations[2])
    for whole in (np.int64(1), np.uint8(1), np.array(1), torch.tensor(1), torch.tensor(1, dtype=torch.int32)):
        assert torch.equal(scores(8, iteration=whole), generations[1])
        assert torch.equal(scores(8, iteration=lambda _: whole), generations[1])  # noqa: B023
        assert torch.equal(
            integration.row_seeds(ids, not_padding, keep, whole), integration.row_seeds(ids, not_padding, keep, 1)
        )
    assert torch.equal(integration.row_seeds(ids, not_padding, keep), integration.row_seeds(ids, not_padding, keep, 0))
    tensors = torch.tensor(1.0), torch.tensor(True), torch.ones(1).int()
    for wrong in ("1", True, 1.0, np.float64(1), np.bool_(True), *tensors):
        with pytest.raises(TypeError, match=r"^iteration must be an int, a function of the trainer or None, got "):
            scores(0, iteration=wrong)
        with pytest.raises(TypeError, match=r"^iteration must be a function that returns an int, got "):
            scores(0, iteration=lambda _: wrong)  # noqa: B023
        with pytest.raises(TypeError, match=r"^iteration must be an int, got "):
            integration.row_seeds(ids, not_padding, keep, wrong)
    with pytest.raises(TypeError, match=r"^iteration must be a function that returns an int, got NoneType"):
        scores(0, iteration=lambda _: None)


def test_the_head_can_run_in_float32_and_the_model_can_have_an_auxiliary_loss():
    ids, not_padding, keep = batch()
    model = Model().bfloat16()
    plain, wide, older = (Trainer(mask_token_id=MASK, cast_lm_head_to_fp32=on) for on in (False, True, False))
    vars(older.args).pop("cast_lm_head_to_fp32")  # older arguments have no such field
    trainers = plain, wide, older
    low, high, same = (
        t._get_per_token_logps_and_entropies(model, ids, not_padding, keep)[0].detach() for t in trainers
    )
    assert torch.equal(same, low)
    assert high.dtype == torch.float32
    assert not torch.equal(low, high)
    torch.testing.assert_close(low, high, rtol=0.05, atol=0.05)
    options_of_call = {"compute_aux_loss": True, "batch_size": 3}
    assert plain._get_per_token_logps_and_entropies(model, ids, not_padding, keep, **options_of_call)[2].dim() == 0
    own = model.forward
    model.forward = lambda output_router_logits, **given: own(**given)
    assert plain._get_per_token_logps_and_entropies(model, ids, not_padding, keep, **options_of_call)[2] is None


@pytest.mark.parametrize("trained", [False, True])
def test_the_logits_can_be_float32(trained):
    """``cast_lm_head_to_fp32`` gives equal results, but here the products have 16-bit operands."""
    model = Model().bfloat16()
    model.lm_head.requires_grad_(trained)
    wide, cast = Trainer(mask_token_id=MASK, logits_dtype=torch.float32), Trainer(mask_token_id=MASK)
    cast.args.cast_lm_head_to_fp32 = True
    ours, theirs = (t._get_per_token_logps_and_entropies(model, *batch(), compute_entropy=True) for t in (wide, cast))
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda z: 0.5 * z, "a call of .*mul"),
        (lambda z: z[:, 1:], "a call of __getitem__"),
        (torch.relu, "a call of relu"),
        (lambda z: z.view(-1), "a call of view"),
        (lambda z: z.long(), "a call of long"),
    ],
)
def test_a_model_that_changes_its_logits_is_rejected(change, named):
    trainer = Trainer(mask_token_id=MASK)
    with pytest.raises(
        ValueError, match=f"return its output unchanged, .* got {named} on it; the mixin needs such a head"
    ):
        trainer._get_per_token_logps_and_entropies(Model(output=change), *batch())
    found = trainer._get_per_token_logps_and_entropies(
        Model(output=lambda z: z.float().contiguous().clone()), *batch()
    )[0]
    assert type(found) is torch.Tensor


def test_a_cast_of_the_logits_rounds_neither_scores_nor_gradients():
    found = []
    for change in (lambda z: z, lambda z: z.half()):
        torch.manual_seed(0)
        model = Model(output=change)
        out = Trainer(mask_token_id=MASK)._get_per_token_logps_and_entropies(model, *batch(), compute_entropy=True)
        (out[0] / 3).sum().backward()
        found.append((*out[:2], model.lm_head.weight.grad))
    for plain, cast in zip(*found, strict=True):
        assert plain.dtype == cast.dtype
        assert torch.equal(plain, cast)


def test_bad_arguments_of_the_mixin():
    for options, message in (
        ({"scheme": "none"}, "scheme must be"),
        ({"scheme": "trace"}, "step_map must be given"),
        ({"num": 0}, "num must be"),
        ({"scheme": "elbo", "prompt_prob": 0.5}, "prompt_prob must be 0 unless"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(mask_token_id=MASK, **options)
    with pytest.raises(ValueError, match="takes text only, got image_sizes, pixel_values"):
        Trainer(mask_token_id=MASK)._get_per_token_logps_and_entropies(
            Model(), *batch(), pixel_values=torch.ones(1), image_sizes=[1], num_tiles=None
        )


# Rollouts -------------------------------------------------------------------------------------------------------------

PROMPTS = ["1 2 3", "4", "1 2 3"]


@torch.no_grad()
def test_rollouts_with_float32_logits():
    """Log-probabilities equal those of a float32 head."""
    model = Model().bfloat16()
    found = []
    for options in ({"logits_dtype": torch.float32}, {}):
        rollout = integration.diffusion_rollout(MASK, length=6, steps=1, temperature=0, with_logprobs=True, **options)
        found.append(rollout(PROMPTS, Loop(model))["logprobs"])
    head = nn.Linear(H, V)
    head.load_state_dict({name: p.float() for name, p in model.lm_head.state_dict().items()})
    ids = torch.tensor([[1, 2, 3] + [MASK] * 6])
    with loss_in_head(model, lambda hidden, *_: hidden):
        hidden = model(ids, torch.ones_like(ids)).logits
    log_p = head(hidden.float())[0, 3:].index_fill(-1, torch.tensor(MASK), -torch.inf).log_softmax(-1).amax(-1)
    torch.testing.assert_close(torch.tensor(found[0][0]), log_p[: len(found[0][0])], rtol=2e-6, atol=2e-6)
    assert found[0] != found[1]


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, lambda p: [np.int64(t) for t in p]])
def test_prompts_of_tokens_may_be_any_sequence_of_integers(kind):
    rollout, prompts = integration.diffusion_rollout(MASK, steps=2, length=N, temperature=0), [[1, 2], [3]]
    found = rollout([kind(p) for p in prompts], Loop(model := Model()))
    assert found == rollout(prompts, Loop(model))
    assert all(type(token) is int for row in found["prompt_ids"] for token in row)
    assert rollout([], Loop(model)) == {"prompt_ids": [], "completion_ids": [], "logprobs": None}


def test_a_trainer_without_a_length():
    trainer = Loop(Model())
    trainer.args.max_completion_length = None
    with pytest.raises(
        ValueError, match=r"^length must be given for a trainer without a max_completion_length, got None$"
    ):
        integration.diffusion_rollout(MASK, steps=2)([[1]], trainer)


def test_the_mixin_comes_before_the_trainer():
    class Host(Loop):
        def __init_subclass__(cls, name=""):
            super().__init_subclass__()
            cls.name = name

        def _get_per_token_logps_and_entropies(self):
            pass

    assert type("Fine", (integration.DiffusionPolicyMixin, Host), {}, name="GRPO").name == "GRPO"
    message = r"^DiffusionPolicyMixin must come before Host among the bases, got Wrong\(Host, DiffusionPolicyMixin\), "
    with pytest.raises(TypeError, match=message):
        type("Wrong", (Host, integration.DiffusionPolicyMixin), {})


def test_rollouts_differ_between_rows_and_calls():
    torch.manual_seed(0)
    trainer, rollout = Loop(Model()), integration.diffusion_rollout(MASK, steps=2)
    trainer.processing_class.eos_token_id = None
    first = rollout(PROMPTS * 8, trainer)
    assert first["logprobs"] is None
    assert {len(row) for row in first["completion_ids"]} == {N}
    assert not any(MASK in row for row in first["completion_ids"])
    assert len({tuple(row) for row in first["completion_ids"]}) > 16
    assert rollout(PROMPTS * 8, trainer)["completion_ids"] != first["completion_ids"]
    torch.manual_seed(0)
    trainer.model = Model()
    assert rollout(PROMPTS * 8, trainer)["completion_ids"] == first["completion_ids"]


def test_rollouts_refuse_what_they_cannot_honour():
    rollout = integration.diffusion_rollout(MASK, steps=2)
    trainer = Loop(Model(), generation_kwargs={})
    trainer.repetition_penalty = 1.0
    rollout(PROMPTS, trainer)
    trainer.repetition_penalty = 1.1
    with pytest.raises(ValueError, match=r"^repetition_penalty must be 1 with diffusion_rollout, got 1\.1$"):
        rollout(PROMPTS, trainer)
    more = {"no_repeat_ngram_size": 2}
    with pytest.raises(
        ValueError, match=r"^generation_kwargs must be None with diffusion_rollout, got \{'no_repeat_ng"
    ):
        rollout(PROMPTS, Loop(Model(), generation_kwargs=more))


def shifted(model):
    other = copy.deepcopy(model)
    other.shift = 1
    return other


def test_a_shifted_model_does_not_predict_the_first_token():
    """Without a prompt, the first token of a row is neither masked nor scored, with and without left padding."""
    ids = torch.tensor([[PAD, 1, 2, 3, 8, 9], [4, 5, 6, 7, 8, 9]])
    trainer = Trainer(mask_token_id=MASK, shift=True)
    scores = trainer._get_per_token_logps_and_entropies(shifted(Model()), ids, (ids != PAD).long(), 6)[0]
    assert (scores != 0).tolist() == [[False, False, *[True] * 4], [False, *[True] * 5]]


@pytest.mark.parametrize("fails", [False, True])
def test_rollouts_restore_the_mode_of_every_module(fails):
    """The dropout of a frozen part may be off while the rest trains."""
    model = Model()
    model.frozen = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)).eval()
    model.frozen[1].train()
    modes, during = [module.training for module in model.modules()], []

    def change(z):
        during.extend(module.training for module in model.modules())
        return 1 / 0 if fails else z

    model.output = change
    rollout = integration.diffusion_rollout(MASK, steps=2)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        rollout([[1, 2]], Trainer(model, mask_token_id=MASK))
    assert during
    assert not any(during)
    assert [module.training for module in model.modules()] == modes


def test_rollouts_for_a_trainer_that_takes_none():
    """A trainer like RLOO's generates from tokens, with the rollout function of the mixin, if any."""

    class Other(Loop):
        def _generate_single_turn(self, prompt_ids, images):
            return ["its own"]

    class Generating(integration.DiffusionPolicyMixin, Other):
        pass

    prompts = [[1, 2], [3]]
    assert Generating(mask_token_id=MASK)._generate_single_turn(prompts, None) == ["its own"]
    rollout, model, state = integration.diffusion_rollout(MASK, steps=2), Model(), torch.get_rng_state()
    trainer = Generating(model, mask_token_id=MASK, scheme="elbo", rollout_func=rollout)
    assert torch.equal(torch.get_rng_state(), state)
    trainer.processing_class.eos_token_id = None
    found = trainer._generate_single_turn(prompts, None)
    assert [len(row) for row in found] == [N, N]

    class Taking(Loop):
        def __init__(self, rollout_func):
            super().__init__()
            self.rollout_func = rollout_func

    class Passing(integration.DiffusionPolicyMixin, Taking):
        pass

    assert Passing(rollout_func=rollout, mask_token_id=MASK).rollout_func is rollout


def test_bad_arguments_of_rollouts():
    for options, message in (
        ({"steps": 0}, "steps must be"),
        ({"steps": 5, "length": 4}, "steps must lie between the number of blocks and that of tokens, 1 and 4, got 5"),
        ({"steps": 1, "length": 4, "block_size": 2}, "2 and 4, got 1"),
        ({"steps": 1, "length": 4, "block_size": 2, "infill": True}, "steps must be at least 2, the number of blocks"),
        ({"steps": 1, "length": -1}, "length must be"),
        ({"steps": 1, "block_size": 0}, "block_size must be"),
        ({"steps": 1, "temperature": -1.0}, "temperature must be 0, or positive, .*, got -1.0"),
        ({"steps": 1, "mask_token_id": -1}, "mask_token_id must not be negative, got -1"),
        ({"steps": 1, "remasking": "low"}, "remasking must be one of confidence, margin, entropy, random, got 'low'"),
        ({"steps": 1, "threshold": 2}, r"threshold must lie in \[0, 1\], got 2"),
        ({"steps": 1, "cfg_scale": -1}, "cfg_scale must be finite and non-negative, got -1"),
        ({"steps": 1, "suppress_ids": [-1]}, "suppress_ids must be at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            integration.diffusion_rollout(**{"mask_token_id": MASK} | options)
    for name, bad in (("mask_token_id", True), ("temperature", "1"), ("steps", None), ("delay_eos", 1)):
        with pytest.raises(TypeError, match=f"{name} must be "):
            integration.diffusion_rollout(**{"mask_token_id": MASK, "steps": 1} | {name: bad})
    with pytest.raises(TypeError, match="with_logprobs"):
        integration.diffusion_rollout(MASK, steps=1, with_logprobs=1)
    with pytest.raises(ValueError, match=r"^every prompt must have a token for shift=True, got an empty prompt$"):
        integration.diffusion_rollout(MASK, steps=2, shift=True)([[1], []], Loop(shifted(Model())))
    for build in (integration.diffusion_rollout, Trainer):
        with pytest.raises(TypeError, match=r"^shift must be a bool, got str$"):
            build(mask_token_id=MASK, shift="no", **({"steps": 2} if build is not Trainer else {}))
    with pytest.raises(ValueError, match="1 and 6, got 7"):
        integration.diffusion_rollout(MASK, steps=7)(PROMPTS, Loop(Model()))


# In TRL's own trainers ------------------------------------------------------------------------------------------------


def needs_trainers():
    """Skip the test without the packages that TRL's trainers import, which are not installed everywhere."""
    for needed in ("pandas", "datasets", "jinja2"):
        pytest.importorskip(needed)
    return importlib.import_module("trl"), importlib.import_module("examples.trl_diffusion")


QUIET = {
    "use_cpu": True, "bf16": False, "report_to": [], "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


@pytest.mark.exhaustive
@needs_trl
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_a_policy_learns_in_the_trainers_of_trl(name, tmp_path):
    """There are two iterations on each generation. The first one starts at the old log-probabilities."""
    trl, example = needs_trainers()
    example.set_seed(0)
    args = getattr(trl, f"{name}Config")(
        output_dir=str(tmp_path), max_steps=16, per_device_train_batch_size=16, num_generations=8, num_iterations=2,
        max_completion_length=example.LENGTH, learning_rate=3e-3, beta=0.0, **QUIET,
    )  # fmt: skip
    further_outputs = type("Diffusion", (integration.DiffusionPolicyMixin, getattr(trl, f"{name}Trainer")), {})
    seen = []

    class Watched(further_outputs):
        def _get_per_token_logps_and_entropies(self, *arguments, **options):
            out = super()._get_per_token_logps_and_entropies(*arguments, **options)
            seen.append((self._step, torch.is_grad_enabled(), out[0].detach().sort(0).values))
            return out

    trainer = Watched(
        model=example.bidirectional_model(),
        args=args,
        train_dataset=example.Dataset.from_dict({"prompt": [f"{i} {i + 1}" for i in range(16)]}),
        reward_funcs=example.reward,
        processing_class=example.tokenizer_of_words(),
        rollout_func=integration.diffusion_rollout(example.MASK, steps=4),
        mask_token_id=example.MASK,
        scheme="elbo",
    )
    for module in trainer.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trainer.train()
    old = {step: scores for step, with_grad, scores in reversed(seen) if not with_grad}
    new = {step: scores for step, with_grad, scores in seen if with_grad}
    assert len(old) == 8
    for step, scores in old.items():  # the rows are shuffled in between
        torch.testing.assert_close(new[step], scores)
        assert not torch.equal(new[step + 1], scores)
        assert torch.equal(new[step + 1] == 0, scores == 0)  # tokens that no view scores
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2


@pytest.mark.exhaustive
@needs_trl
@pytest.mark.parametrize("adapter", [False, True])
def test_the_reference_model_sees_the_masks_of_the_policy(adapter, tmp_path):
    """The penalty is 0 before the first update, for a copy of the policy and for a policy with its adapter off."""
    trl, example = needs_trainers()
    example.set_seed(0)
    model = example.bidirectional_model()
    model.save_pretrained(tmp_path / "model")
    model.config._name_or_path = str(tmp_path / "model")  # from which the trainer loads the reference model
    options = {}
    if adapter:
        peft = pytest.importorskip("peft")
        options["peft_config"] = peft.LoraConfig(target_modules="all-linear", r=4)
    args = trl.GRPOConfig(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=8, num_generations=4, beta=0.1,
        max_completion_length=example.LENGTH, learning_rate=3e-2, disable_dropout=True, **QUIET,
    )  # fmt: skip
    trainer = example.DiffusionGRPO(
        model=model, args=args, train_dataset=example.Dataset.from_dict({"prompt": [f"{i} {i + 1}" for i in range(8)]}),
        reward_funcs=example.reward, processing_class=example.tokenizer_of_words(), mask_token_id=example.MASK,
        rollout_func=integration.diffusion_rollout(example.MASK, steps=2), scheme="coupled", **options,
    )  # fmt: skip
    trainer.train()
    first, *later = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert first == pytest.approx(0, abs=1e-6)
    assert len(later) == 3
    assert min(later) > 1e-4, later


def autoregressive_trainer(name, trl, example, folder):
    """Create TRL's trainer of a small Llama, whose reference model it loads itself."""
    number = [f"{i} {i + 1} {i + 2}" for i in range(8)]
    columns = {
        "SFT": {"prompt": number, "completion": number[::-1]},
        "DPO": {"prompt": number, "chosen": number[::-1], "rejected": number[1:] + number[:1]},
        "KTO": {"prompt": number, "completion": number[::-1], "label": [True, False] * 4},
        "GRPO": {"prompt": number},
        "RLOO": {"prompt": number},
    }[name]
    online = name in ("GRPO", "RLOO")
    options = {"num_generations": 4, "max_completion_length": 4, "beta": 0.1, "temperature": 0.8} if online else {}
    options |= {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.5, "optim": "sgd"}
    args = getattr(trl, f"{name}Config")(output_dir=str(folder), **options, **QUIET)
    rewarded = {"reward_funcs": example.reward} if online else {}
    return getattr(trl, f"{name}Trainer")(
        model=str(folder), args=args, train_dataset=example.Dataset.from_dict(columns),
        processing_class=example.tokenizer_of_words(), **rewarded,
    )  # fmt: skip


@pytest.mark.exhaustive
@needs_trl
@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "GRPO", "RLOO"])
def test_patched_trainers_train_as_they_do_unpatched(name, host, monkeypatch, tmp_path):
    """Logs of each step, and the parameters after three steps, are equal."""
    trl, example = needs_trainers()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None}
    example.set_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(example.WORDS), **sizes, **ends)).save_pretrained(tmp_path)
    calls, apply = [], integration.ChunkedLogProbs.apply
    counted = functools.wraps(apply)(lambda *arguments: calls.append(len(arguments)) or apply(*arguments))
    monkeypatch.setattr(integration.ChunkedLogProbs, "apply", counted)
    found = []
    for patched in (False, True):
        if patched:
            integration.patch()
        example.set_seed(0)
        trainer = autoregressive_trainer(name, trl, example, tmp_path)
        trainer.train()
        assert bool(calls) == patched
        logged = [
            {key: float(value) for key, value in entry.items() if not key.endswith(("time", "runtime", "per_second"))}
            for entry in trainer.state.log_history
        ]
        found.append((logged, [p.detach() for p in trainer.model.parameters()]))
    (theirs, before), (ours, after) = found
    assert [entry.keys() for entry in ours] == [entry.keys() for entry in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert all(entry["grad_norm"] > 0 for entry in ours[:3])
    torch.testing.assert_close(after, before)
