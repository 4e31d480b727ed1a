"""speculators patched and unpatched: the package's losses, and its metrics from hidden states, give equal results."""

import functools
import importlib
import inspect
import json
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dllm_kernels.integrations import speculators as integration
from tests.conftest import DEVICE
from tests.support import trainers
from tests.support.hosts import assert_patched_once, defined_in
from tests.support.pairs import pairs, surrounding
from tests.support.parity import assert_as_good_as_plain, largest_error, value_and_grads

pytestmark = pytest.mark.peer
B, N, BLOCK, V, D = 1, 6, 4, 19, 8
T = N * BLOCK
NAMES = sorted(integration.REPLACEMENTS)


@pytest.fixture
def host():
    """Provide its losses and metrics, unpatched; all patches of the test are undone afterwards."""
    with trainers.loaded(trainers.SPECULATORS, "losses.utils", "losses.eager") as modules:
        metrics = "dflash.metrics", "dspark.metrics"
        dflash, dspark = (importlib.import_module(f"speculators.models.{name}") for name in metrics)
        yield SimpleNamespace(utils=modules.utils, eager=modules.eager, dflash=dflash, dspark=dspark)
        integration.unpatch()


def host_attributes():
    """Return every attribute, table entry and function default of the host's loaded modules."""
    found = {}
    for name, module in sys.modules.items():
        if name.split(".")[0] != "speculators":
            continue
        for attribute, value in vars(module).items():
            if attribute.startswith("__"):
                continue
            found[name, attribute] = value
            if isinstance(value, dict):
                found |= {(name, attribute, key): entry for key, entry in value.items()}
            if inspect.isfunction(value):
                found[name, attribute, "defaults"] = value.__defaults__
    return found


def test_patching_replaces_every_reference_and_unpatching_restores_them(host):
    before = host_attributes()
    report = integration.patch()
    places = set(report.replaced)
    for name in NAMES:
        assert ("speculators.losses.utils", name) in places
        assert ("speculators.losses.eager", name) in places
        assert ("speculators.losses", name) in places
    for table in ("_FUSED_LOSS_FN_MAP", "_EAGER_LOSS_FN_MAP"):
        assert {("speculators.losses.utils", f"{table}[{key!r}]") for key in integration.KINDS} <= places
    for place in (
        ("speculators.losses.utils", "loss_function.__defaults__"),
        ("speculators.models.dflash.metrics", "_DEFAULT_LOSS_CONFIG['kl_div']"),
        ("speculators.models.dspark.metrics", "compute_metrics.__defaults__"),
    ):
        assert place in places
    after = host_attributes()
    originals = {id(before["speculators." + home, name]) for home in integration.TABLES for name in NAMES}
    assert not [place for place, value in after.items() if id(value) in originals]
    assert report.version == "0.9.0"
    assert str(report).startswith(f"speculators 0.9.0 patched, {len(places)} places:\n  speculators.")
    again = integration.patch()
    assert again.already
    assert again.replaced == report.replaced
    assert "was patched already" in str(again)
    assert set(integration.unpatch()) == places
    assert integration.unpatch() == ()
    restored = host_attributes()
    assert restored.keys() == before.keys()
    assert not [place for place in before if before[place] is not restored[place] and before[place] != restored[place]]


def test_a_module_imported_after_patch_is_patched_and_restored(host):
    del sys.modules["speculators.models.dspark.metrics"]
    integration.patch()
    late = importlib.import_module("speculators.models.dspark.metrics")
    assert late.tv_loss is host.utils.tv_loss
    integration.unpatch()
    assert late.tv_loss is host.utils.tv_loss
    assert late.tv_loss.__module__ == "speculators.losses.utils"
    assert inspect.signature(late.compute_metrics).parameters["tv_loss_fn"].default is late.tv_loss


def test_names_can_be_excluded(host):
    original = host.utils.tv_loss
    report = integration.patch(exclude=["tv_loss"])
    assert host.utils.tv_loss is original
    assert report.kept == ("tv_loss",)
    assert str(report).endswith("tv_loss kept: excluded")
    with pytest.raises(
        RuntimeError, match=r"^speculators is patched already, with exclude=\['tv_loss'\]; unpatch\(\) first"
    ):
        integration.patch()
    with pytest.raises(ValueError, match=r"^exclude must hold names among .* got \['mse_loss'\]"):
        integration.patch(exclude="mse_loss")


def test_another_signature_keeps_its_name_or_is_rejected(host):
    """The error and the warning list all differences."""

    def tv_loss(logits, targets, mask): ...

    def lk_hybrid_loss(logits, targets, eta=2.0): ...

    tv_loss, lk_hybrid_loss = defined_in(host.utils, tv_loss), defined_in(host.eager, lk_hybrid_loss)
    host.utils.tv_loss, host.eager.lk_hybrid_loss = tv_loss, lk_hybrid_loss
    del host.utils.ce_loss
    before = host_attributes()
    listed = (
        "  speculators.losses.eager.lk_hybrid_loss: eta defaults to 2.0, ours to 3.0\n"
        "  speculators.losses.utils has no ce_loss\n"
        "  speculators.losses.utils.tv_loss: takes mask, which ours does not"
    )
    differ = "speculators 0.9.0 has unexpected definitions; "
    with pytest.raises(RuntimeError, match="^" + re.escape(f"{differ}nothing was replaced:\n{listed}")):
        integration.patch(strict=True)
    assert host_attributes() == before
    assert integration.unpatch() == ()
    names = [f"speculators.losses.{name}" for name in ("eager.lk_hybrid_loss", "utils.ce_loss", "utils.tv_loss")]
    message = f"{differ}{', '.join(names)} stay as they are:\n{listed}"
    with pytest.warns(UserWarning, match="^" + re.escape(message)):
        report = integration.patch()
    assert [name for name, _ in report.kept] == names
    assert (host.utils.tv_loss, host.eager.lk_hybrid_loss) == (tv_loss, lk_hybrid_loss)
    assert ("speculators.losses.eager", "tv_loss") in report.replaced
    assert ("speculators.losses.utils", "lk_hybrid_loss") in report.replaced
    integration.unpatch()
    assert host_attributes() == before


def test_two_threads_patch_once(host, monkeypatch):
    assert_patched_once(integration, host_attributes, monkeypatch)


def drawn(seed, dtype):
    torch.manual_seed(seed)
    return [(2 * torch.randn(1, T, V)).to(dtype).to(DEVICE) for _ in range(2)]


@pytest.mark.many_draws
@pytest.mark.everyday(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key", integration.KINDS)
def test_losses_of_both_tables_equal_the_eager_ones_of_the_host(host, key, dtype):
    """The fused table is included; its original losses need a GPU. The host computes in float32 for every dtype."""
    original = host.utils._EAGER_LOSS_FN_MAP[key]
    upstream = torch.randn(1, T, device=DEVICE)
    draws = [drawn(seed, dtype) for seed in range(4)]
    theirs = [value_and_grads(lambda z: original(z, t), [z], upstream) for z, t in draws]  # noqa: B023
    exact = [
        value_and_grads(
            lambda z: integration.REPLACEMENTS[original.__name__](z, t.double()),  # noqa: B023
            [z.double()],
            upstream.double(),
        )
        for z, t in draws
    ]
    integration.patch()
    for table in (host.utils._EAGER_LOSS_FN_MAP, host.utils._FUSED_LOSS_FN_MAP):
        ours = [value_and_grads(lambda z: table[key](z, t), [z], upstream) for z, t in draws]  # noqa: B023
        for place, name in enumerate(("value", "gradient")):
            got, host_s, e = ([run[place] for run in runs] for runs in (ours, theirs, exact))
            assert_as_good_as_plain(got, e, largest_error(host_s, e), name, (V, T))
            if dtype == torch.float32:
                for a, b in zip(got, host_s, strict=True):
                    torch.testing.assert_close(a, b)
        assert ours[0][0].shape == (1, T)
        assert ours[0][0].dtype == torch.float32
        assert ours[0][1].dtype == dtype


@pytest.mark.many_draws
def test_eta_of_lk(host):
    z, t = drawn(0, torch.float32)
    original = host.eager.lk_hybrid_loss
    integration.patch()
    for call in (lambda f: f(z, t, 1.5), lambda f: f(z, t, eta=1.5)):
        torch.testing.assert_close(call(host.eager.lk_hybrid_loss), call(original))


@pytest.mark.many_draws
@pytest.mark.everyday(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("eta", [0, 1e4, 1e6, 1e30, math.inf, -1.5, np.float32(2e4)], ids=str)
def test_every_eta_of_the_host(host, eta, dtype):
    """Value and gradient are equal. With a large eta, the loss is tv."""
    z, t = drawn(0, dtype)
    upstream = torch.randn(1, T, device=DEVICE)
    theirs = value_and_grads(lambda z: host.eager.lk_hybrid_loss(z, t, eta=eta), [z], upstream)
    tv = host.eager.tv_loss(z, t)
    integration.patch()
    for table in (host.eager, host.utils):
        ours = value_and_grads(lambda z: table.lk_hybrid_loss(z, t, eta=eta), [z], upstream)  # noqa: B023
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
        if eta >= 1e6:
            torch.testing.assert_close(ours[0], tv)
    with pytest.raises(ValueError, match=r"^eta must lie in \[-inf, inf\], got nan$"):
        host.eager.lk_hybrid_loss(z, t, eta=math.nan)


@pytest.mark.parametrize("shape", [(), (1, T), (1,)])
def test_an_eta_that_is_a_tensor(host, shape):
    """It may have one value per row, and a gradient."""
    z, t = drawn(0, torch.float32)
    eta, upstream = 3 * torch.rand(shape, device=DEVICE), torch.randn(1, T, device=DEVICE)
    theirs = value_and_grads(lambda z, eta: host.eager.lk_hybrid_loss(z, t, eta), [z, eta], upstream)
    integration.patch()
    for table in (host.eager, host.utils):
        ours = value_and_grads(lambda z, eta: table.lk_hybrid_loss(z, t, eta), [z, eta], upstream)  # noqa: B023
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_targets_of_another_dtype(host):
    z, t = drawn(0, torch.float32)
    original = host.eager.kl_div_loss
    integration.patch()
    z = z.bfloat16().requires_grad_()
    torch.testing.assert_close(host.utils.kl_div_loss(z, t), original(z, t))
    assert torch.autograd.grad(host.utils.kl_div_loss(z, t).sum(), z)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(("change", "error", "message"), [
    (lambda t: t[:, 1:], ValueError, r"targets must have shape \(1, 24, 19\) \(that of logits\)"),
    (lambda t: t[..., 1:], ValueError, r"targets must have shape \(1, 24, 19\) \(that of logits\)"),
    (lambda t: None, TypeError, r"targets must be a torch\.Tensor, got NoneType"),
])  # fmt: skip
@pytest.mark.parametrize("name", NAMES)
def test_bad_targets(name, change, error, message):
    z, t = drawn(0, torch.float32)
    with pytest.raises(error, match=f"^{message}"):
        integration.REPLACEMENTS[name](z, change(t))


def test_only_eager_losses_give_targets_a_gradient(host):
    z, t = drawn(0, torch.float32)
    original = host.eager.kl_div_loss
    expected = torch.autograd.grad(original(z, t.requires_grad_()).sum(), t)[0]
    integration.patch()
    assert torch.equal(torch.autograd.grad(host.eager.kl_div_loss(z, t).sum(), t)[0], expected)
    assert not host.utils.kl_div_loss(z, t).requires_grad
    with torch.no_grad():
        torch.testing.assert_close(host.eager.kl_div_loss(z, t), original(z, t))


def test_the_metrics_of_the_host_run_on_the_packages_losses(host):
    """This includes its default configuration and, on a CPU, its fused losses."""
    z, t = drawn(0, torch.float32)
    mask = torch.rand(1, T, device=DEVICE) < 0.8
    config = host.utils.resolve_loss_config('{"ce": 0.5, "lk_hybrid": 0.5}', "eager")
    expected = host.dspark.compute_metrics(z, t, None, mask, BLOCK, config, tv_loss_fn=host.eager.tv_loss)
    kl, _ = host.dflash.compute_metrics(
        z, t, mask, BLOCK, loss_config=host.utils.resolve_loss_config("kl_div", "eager")
    )
    integration.patch()
    config = host.utils.resolve_loss_config('{"ce": 0.5, "lk_hybrid": 0.5}')
    loss, metrics = host.dspark.compute_metrics(z, t, None, mask, BLOCK, config)
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(metrics, expected[1])
    torch.testing.assert_close(host.dflash.compute_metrics(z, t, mask, BLOCK)[0], kl)


# Metrics from hidden states -------------------------------------------------------------------------------------------


def sequence(seed=0, masked_anchor=True, holes=True):
    torch.manual_seed(seed)
    mask = torch.rand(1, T) < 0.8
    if not holes:
        mask = mask.view(-1, BLOCK).int().cumprod(1).bool().view(1, T)
    if masked_anchor:
        mask[:, ::BLOCK] = False
    drawn = {
        "hidden": torch.randn(1, T, D), "head": torch.randn(V, D), "teacher": torch.randn(1, T, D), "mask": mask,
        "confidence": torch.randn(1, T),
    }  # fmt: skip
    return SimpleNamespace(**{name: t.to(DEVICE) for name, t in drawn.items()})


CONFIGS = ['{"kl_div": 1.0}', '{"ce": 0.1, "tv": 0.9}', '{"kl_div": 0.5, "rkl": 0.2, "nla": 0.1, "jsd": 0.3}']


def tv_loss(logits, targets):
    """The user's loss, under a name of the framework."""


def config_weights(config):
    return {name: weight for name, (_, weight) in config.items()}


@pytest.mark.parametrize("spec", ['{"kl_div": 0}', '{"ce": 0, "tv": 0}'])
def test_the_confidence_head_alone(host, spec):
    """With coefficients of 0 only the confidence head learns."""
    i, config = sequence(masked_anchor=False), {}
    for name, weight in json.loads(spec).items():
        config[name] = host.utils.resolve_loss_config(name, "eager")[name][0], float(weight)
    options = {"loss_config": config, "sample_from_anchor": True}
    leaves, found = [x.requires_grad_() for x in (i.hidden, i.head, i.confidence)], []
    z, t = F.linear(i.hidden, i.head), F.linear(i.teacher, i.head).detach()
    for loss, metrics in (
        integration.speculators_metrics(
            *leaves[:2], i.teacher, i.mask, BLOCK, acceptance=True, confidence_logits=i.confidence, **options
        ),
        host.dspark.compute_metrics(z, t, i.confidence, i.mask, BLOCK, tv_loss_fn=host.eager.tv_loss, **options),
    ):
        found.append((loss.detach(), *torch.autograd.grad(loss, leaves, materialize_grads=True), metrics))
    torch.testing.assert_close(*found, check_dtype=False)


@pytest.mark.parametrize("weighting", integration.WEIGHTS)
def test_rows_outside_of_the_mask_are_not_read(host, weighting):
    i, config = sequence(holes=False), host.utils.resolve_loss_config("kl_div", "eager")
    arguments = {"loss_config": config, "per_position_loss_weight": weighting, "acceptance": True}
    losses = []
    for value in (0.0, torch.nan):
        hidden = i.hidden.masked_fill(~i.mask.unsqueeze(-1), value).requires_grad_()
        loss, metrics = integration.speculators_metrics(hidden, i.head, i.teacher, i.mask, BLOCK, **arguments)
        losses.append((loss.detach(), *torch.autograd.grad(loss, hidden), *metrics.values()))
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    assert losses[1][1].any()


@pytest.mark.parametrize("weighting", integration.WEIGHTS)
def test_an_anchor_that_predicts_nothing_is_not_counted_masked_or_not(weighting):
    masked, unmasked = sequence(), sequence()
    unmasked.mask[:, ::BLOCK] = True
    rates = []
    for i in (masked, unmasked):
        options = {"per_position_loss_weight": weighting, "confidence_logits": i.confidence}
        rates.append(integration.speculators_metrics(i.hidden, i.head, i.teacher, i.mask, BLOCK, **options)[1])
    for name in rates[0]:
        if "loss" not in name:
            torch.testing.assert_close(rates[1][name], rates[0][name], msg=name)


@pytest.mark.parametrize("weight", [1e-2, 1e-4, 1e-9])
def test_the_logged_loss_of_a_term_does_not_depend_on_its_coefficient(weight):
    i = sequence()
    _, single_term = integration.speculators_metrics(
        i.hidden, i.head, i.teacher, i.mask, BLOCK, loss_config={"kl_div": 1}
    )
    config = {"nla": 1, "ce": 2, "kl_div": weight}
    _, metrics = integration.speculators_metrics(i.hidden, i.head, i.teacher, i.mask, BLOCK, loss_config=config)
    torch.testing.assert_close(metrics["kl_div_loss_sum"], single_term["loss_sum"])


# Pairs of features of the metrics. Those of acceptance and accuracy cover another vocabulary with draft_to_target.
PAIRS = {
    "config": [*CONFIGS, *(f'{{"{key}": 1.0}}' for key in integration.KINDS), '{"lk_hybrid": -0.5, "ce": 2, "tv": 1}'],
    "weighting": integration.WEIGHTS,
    "of": ["dflash", "dspark", "dspark with confidence"],
    "from_anchor": [False, True],
    "head": ["trained", "frozen", "with bias", "with extra"],
    "teacher": ["the draft's", "its own", "with bias", "with extra"],
    "rows": ["in place", "others"],
    "draft_to_target": [False, True],
    "chunk_size": [None, 1, 7],
    "gamma": [4.0, -2.0, math.inf],
    "alphas": [False, True],
    "mask": [torch.bool, torch.float32, torch.int64],
    "block_size": [4, 2, 12],
    "dtype": [torch.float32, torch.float64],
    "patched": [False, True],
    "around": ["nothing", "default dtype", "no_grad"],
}  # fmt: skip


def excluded(case):
    """Return True for values that no call takes together, or that the host computes otherwise."""
    if case.get("weighting") == "dpace" and len(json.loads(case.get("config", "{}"))) > 1:
        return True
    own = case.get("teacher", "its own") != "the draft's"
    if case.get("draft_to_target") and (not own or case.get("of") == "dspark with confidence"):
        return True
    return not own and case.get("head") in ("with bias", "with extra")  # whose second part the teacher's head lacks


CASES = pairs(PAIRS, excluded)


@pytest.mark.many_draws
@pytest.mark.parametrize("number", range(len(CASES)))
def test_pairs_of_features_of_the_metrics(host, number):
    chosen, size = CASES[number], CASES[number]["block_size"]
    config = host.utils.resolve_loss_config(chosen["config"], "eager")
    torch.manual_seed(number)
    mask = torch.rand(1, T, device=DEVICE) < 0.8
    if chosen["weighting"] == "dpace":  # D-PACE differs from the host's after a hole
        mask = mask.view(-1, size).int().cumprod(1).bool().view(1, T)
    if not chosen["from_anchor"]:
        mask[:, ::size] = False
    columns, teacher_rows = torch.randperm(V + 3)[:V], torch.randint(0, 2 * T, (1, T))
    wide, k = V + 3 * chosen["draft_to_target"], 2 * T
    shapes = [(1, T, D), (V, D), (V,), (1, T, 2), (V, 2), (1, k, D), (wide, D), (wide,), (1, k, 2), (wide, 2), (1, T)]
    h, w, b, u, U, teacher, tw, tb, tu, tU, confidence = (
        torch.randn(*shape).to(DEVICE, chosen["dtype"]) for shape in shapes
    )
    rows = chosen["rows"] == "others"
    teacher, tu = (t if rows else t[:, :T] for t in (teacher, tu))
    options = (
        {"bias": b} if chosen["head"] == "with bias" else {"extra": (u, U)} if chosen["head"] == "with extra" else {}
    )
    z_of = lambda h, w: F.linear(h, w, options.get("bias")) + (u @ U.T if "extra" in options else 0)  # noqa: E731
    t = F.linear(teacher, w if chosen["teacher"] == "the draft's" else tw)
    if chosen["teacher"] != "the draft's":
        options["teacher_weight"] = tw
    if chosen["teacher"] == "with bias":
        options["teacher_bias"], t = tb, t + tb
    if chosen["teacher"] == "with extra":
        options["teacher_extra"], t = (tu, tU), t + tu @ tU.T
    if rows:
        options["teacher_rows"], t = teacher_rows.to(DEVICE), t[:, teacher_rows[0]]
    if chosen["draft_to_target"]:
        options["draft_to_target"], t = columns.to(DEVICE), t[..., columns]
    common = {
        "gamma": chosen["gamma"], "per_position_loss_weight": chosen["weighting"],
        "sample_from_anchor": chosen["from_anchor"],
    }  # fmt: skip
    dspark = chosen["of"] != "dflash"
    if chosen["alphas"]:
        common |= {"dpace_alpha": 0.3, **({"confidence_head_alpha": 0.7} if dspark else {})}
    scores = [confidence] if "confidence" in chosen["of"] else []
    compute = (
        functools.partial(host.dspark.compute_metrics, tv_loss_fn=host.eager.tv_loss)
        if dspark
        else host.dflash.compute_metrics
    )
    if chosen["patched"]:
        integration.patch()

    def ours(h, *others):
        head, *s = others if chosen["head"] != "frozen" else (w, *others)
        return integration.speculators_metrics(
            h, head, teacher, mask.to(chosen["mask"]), size, acceptance=dspark, confidence_logits=s[0] if s else None,
            loss_config=config if number % 2 else config_weights(config), chunk_size=chosen["chunk_size"], **common,
            **options,
        )  # fmt: skip

    def theirs(h, *others):
        head, *s = others if chosen["head"] != "frozen" else (w, *others)
        given = (s[0] if s else None,) if dspark else ()
        return compute(z_of(h, head), t.detach(), *given, mask, size, loss_config=config, **common)

    with surrounding(chosen["around"]):
        leaves = [x.requires_grad_() for x in (h, *([] if chosen["head"] == "frozen" else [w]), *scores)]
        found = [function(*leaves) for function in (ours, theirs)]
    torch.testing.assert_close(found[0][0], found[1][0], check_dtype=False)
    assert found[0][1].keys() == found[1][1].keys()
    assert not [name for name, value in found[0][1].items() if value.requires_grad or value.dim()]
    for name, value in found[1][1].items():
        if "loss" in name or not chosen["draft_to_target"]:
            torch.testing.assert_close(
                found[0][1][name], value, check_dtype=False, msg=lambda m, name=name: f"{name}: {m}"
            )
    if chosen["around"] != "no_grad":
        for got, same in zip(*(torch.autograd.grad(x[0], leaves) for x in found), strict=True):
            torch.testing.assert_close(got, same, rtol=1e-4, atol=1e-5)  # the host computes in float32


def test_metrics_without_the_host():
    """The teacher's rows are read in place, with a separate head and a Markov head.

    The result equals that of full logits.
    """
    i, columns = sequence(), torch.randperm(V + 3, device=DEVICE)[:V]
    hidden, *drawn = (torch.randn(s, device=DEVICE) for s in ((1, 40, 5), (V + 3, 5), (V + 3,), (1, T, 2), (V, 2)))
    own, extra, rows = drawn[:2], tuple(drawn[2:]), torch.randint(0, 40, (1, T), device=DEVICE)
    arguments = {"teacher_weight": own[0], "teacher_bias": own[1], "teacher_rows": rows, "draft_to_target": columns}
    arguments |= {"loss_config": {"ce": 1}, "acceptance": True, "extra": extra, "chunk_size": 5}
    loss, metrics = integration.speculators_metrics(i.hidden, i.head, hidden, i.mask, BLOCK, **arguments)
    z, t = F.linear(i.hidden, i.head) + F.linear(*extra), F.linear(hidden, *own)[:, rows[0]][..., columns]
    k = torch.arange(T, device=DEVICE) % BLOCK
    decay = torch.exp(-(k - 1).clamp(min=0) / 4) * (k > 0) * i.mask
    ce = F.cross_entropy(z[0], t[0].argmax(-1), reduction="none")
    torch.testing.assert_close(loss, (decay * ce).sum() / (i.mask.sum() + 1e-5))
    whole = F.linear(hidden, *own)[:, rows[0]]
    right = (columns[z.argmax(-1)] == whole.argmax(-1)) & i.mask
    assert metrics["full_acc_sum"] == right.sum()
    assert metrics["position_2_acc_sum"] == right[:, 2::BLOCK].sum()
    a = torch.minimum(z.softmax(-1), whole.softmax(-1)[..., columns]).sum(-1)
    torch.testing.assert_close(metrics["accept_rate_sum"], a[i.mask].sum())


def test_float32_logits_of_16_bit_operands():
    """Loss and metrics are those of the hidden states and head cast to float32."""
    i = sequence()
    narrow = [t.bfloat16() for t in (i.hidden, i.head, i.teacher)]
    found = [
        integration.speculators_metrics(*tensors, i.mask, BLOCK, acceptance=True, **options)
        for tensors, options in (
            (narrow, {"logits_dtype": torch.float32}), ([t.float() for t in narrow], {}), (narrow, {}),
        )
    ]  # fmt: skip
    torch.testing.assert_close(found[0], found[1], rtol=2e-6, atol=1e-6)
    assert found[0][0] != found[2][0]


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "loss_config must be a dict of losses and weights, got {}", {"loss_config": {}}),
        (
            ValueError, "loss_config must be one of kl_div, rkl, jsd, ce, tv, nla, lk_hybrid, got 'l1'",
            {"loss_config": {"l1": 1}},
        ),
        (TypeError, "loss_config['tv'] must be a number, got str", {"loss_config": {"tv": "1"}}),
        (
            ValueError,
            "loss_config['tv'] must hold speculators' tv_loss, because its functions are not called, got "
            "tests.integrations.test_speculators.tv_loss",
            {"loss_config": {"tv": (tv_loss, 1)}},
        ),
        (
            ValueError,
            "loss_config['tv'] must hold speculators' tv_loss, because its functions are not called, got "
            "dllm_kernels.integrations.speculators.ce_loss",
            {"loss_config": {"tv": (integration.ce_loss, 1)}},
        ),
        (ValueError, "loss_config['tv'] must be finite, got inf", {"loss_config": {"ce": 1, "tv": float("inf")}}),
        (
            ValueError, "loss_mask must hold 0 or 1, got 0.5 at position (0, 0)",
            {"loss_mask": torch.full((1, T), 0.5), "loss_config": {"ce": 1}, "per_position_loss_weight": "dpace"},
        ),
        (
            ValueError, "loss_config must have one loss with D-PACE, got ce, tv",
            {"loss_config": {"ce": 1, "tv": 1}, "per_position_loss_weight": "dpace"},
        ),
        (ValueError, "per_position_loss_weight must be one of fixed-exp-decay, dpace, got 'none'",
            {"per_position_loss_weight": "none"}),
        (ValueError, "dpace_alpha must lie in [0, 1], got 2", {"dpace_alpha": 2}),
        (ValueError, "gamma must be a number other than 0, got 0", {"gamma": 0}),
        (ValueError, "hidden must have a multiple of block_size=5 rows, got 24", {"block_size": 5}),
        (ValueError, "loss_mask must have shape (1, 24) ", {"loss_mask": torch.ones(1, 3)}),
        (ValueError, "confidence_logits must have shape (1, 24) (that of loss_mask), got (1, 3)",
            {"confidence_logits": torch.ones(1, 3)}),
        (ValueError, "teacher_hidden must have shape ", {"teacher_hidden": torch.ones(1, 3, D)}),
        (TypeError, "sample_from_anchor must be a bool, got str", {"sample_from_anchor": "yes"}),
        (TypeError, "confidence_head_alpha must be a number, got NoneType", {"confidence_head_alpha": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_arguments_of_the_metrics(error, message, changes):
    i = sequence()
    arguments = {
        "hidden": i.hidden.cpu(), "weight": i.head.cpu(), "teacher_hidden": i.teacher.cpu(), "loss_mask": i.mask.cpu(),
        "block_size": BLOCK,
    }  # fmt: skip
    with pytest.raises(error, match="^" + re.escape(message)):
        integration.speculators_metrics(**arguments | changes)
