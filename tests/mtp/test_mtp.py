import functools
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import reference
from dllm_kernels import mtp
from dllm_kernels.mtp import (
    FusedLinearCrossEntropy,
    MaskedCrossEntropy,
    MTPLossConfig,
    PipelineCausalLMLoss,
    calculate_loss,
    calculate_mtp_loss,
)
from dllm_kernels.mtp.cross_entropy import as_targets, position_weights
from dllm_kernels.mtp.depths import head_weight
from dllm_kernels.ops import LinearLogits
from tests.conftest import DEVICE
from tests.support.parity import assert_parity

B, S, H, V, D = 2, 11, 8, 37, 3
BASES = [MaskedCrossEntropy, FusedLinearCrossEntropy]


class Model(nn.Module):
    """A head, and nothing else that the loss reads."""

    def __init__(self, weight=None, bias=None):
        super().__init__()
        weight = torch.randn(V, H, dtype=torch.float64) if weight is None else weight
        self.lm_head = nn.Linear(H, V, bias=bias is not None, dtype=weight.dtype, device=weight.device)
        self.lm_head.weight = nn.Parameter(weight)
        if bias is not None:
            self.lm_head.bias = nn.Parameter(bias)


class HeadWithLeaf(nn.Module):
    """A head whose weight is a leaf of the test, not a parameter."""

    def __init__(self, weight):
        super().__init__()
        self.head = nn.Linear(1, 1, bias=False)
        del self.head.weight
        self.head.weight = weight

    def get_output_embeddings(self):
        return self.head


def mtp_loss(loss_fn, hidden, labels, model, **options):
    return calculate_mtp_loss(loss_fn, mtp_per_depth_h=hidden, labels=labels, model=model, **options)


def labels_with_padding():
    labels = torch.randint(0, V, (B, S))
    labels[0, 3] = labels[1, 0] = -100
    return labels


def hiddens(dtype=torch.float64, grad=True):
    return [torch.randn(B, S, H, dtype=dtype).requires_grad_(grad) for _ in range(D)]


def packings():
    return {
        "none": {},
        "cu_seqlens": {"cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32)},
        "cu_seqlens on the chunk edge": {"cu_seqlens": torch.tensor([[0, 5, 10, S]])},
        "seq_idx": {"seq_idx": torch.tensor([[0] * 5 + [1] * 6, [3] * 2 + [7] * 8 + [3]])},
        "flat seq_idx": {"seq_idx": torch.tensor([0] * 5 + [1] * 6)},
        "seq_idx wins": {"seq_idx": torch.zeros(B, S, dtype=torch.int64), "cu_seqlens": torch.tensor([0, 4, S])},
    }


@pytest.mark.everyday(2)
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packing", packings())
@pytest.mark.parametrize("base", BASES)
def test_value_and_gradients_equal_the_reference(base, packing, dtype, backend):
    if base is FusedLinearCrossEntropy and dtype == torch.bfloat16 and backend == "triton" and DEVICE == "cpu":
        pytest.skip("the interpreter truncates to bfloat16 where a GPU rounds")
    torch.manual_seed(0)
    labels, options = labels_with_padding().to(DEVICE), packings()[packing]
    options = {name: t.to(DEVICE) for name, t in options.items()}

    def draw(seed):
        torch.manual_seed(seed)
        leaves = [*hiddens(dtype, grad=False), torch.randn(V, H).to(dtype)]
        return [leaf.to(DEVICE) for leaf in leaves], torch.randn((), device=DEVICE)

    def ours(*leaves):
        chunked = {"chunk_size": 5} if base is FusedLinearCrossEntropy else {}
        return mtp_loss(
            base(backend=backend, **chunked),
            list(leaves[:-1]),
            labels,
            HeadWithLeaf(leaves[-1]),
            num_label_tokens=17,
            **options,
        )

    def plain(*leaves):
        logits = [h @ leaves[-1].t() for h in leaves[:-1]]
        return reference.mtp_loss(logits, labels, 0.1, 17, **options).loss

    assert_parity(ours, plain, draw)


@pytest.mark.parametrize("base", BASES)
def test_depths_come_unscaled_and_with_their_graphs(base):
    hidden, labels, model = hiddens(), labels_with_padding(), Model(bias=torch.randn(V, dtype=torch.float64))
    expected = reference.mtp_loss([model.lm_head(h) for h in hidden], labels, 0.2, 9)
    out = mtp_loss(base(), hidden, labels, model, scaling_factor=0.2, num_label_tokens=9, return_per_depth=True)
    assert isinstance(out, mtp.MTPLossOutput)
    assert len(out.per_depth_losses) == D
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(out.loss, 0.2 / D * sum(out.per_depth_losses))
    for k in range(D):
        torch.testing.assert_close(out.per_depth_losses[k], expected.per_depth_losses[k])
        ours = torch.autograd.grad(out.per_depth_losses[k], [hidden[k], *model.parameters()], retain_graph=True)
        plain = torch.autograd.grad(expected.per_depth_losses[k], [hidden[k], *model.parameters()], retain_graph=True)
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_the_weight_sum_of_the_labels_of_all_depths(base, weighted):
    """The weight sum is needed for a custom denominator. It includes neither a count nor the scaling."""
    hidden, labels, model = hiddens(), labels_with_padding(), Model()
    weights = torch.rand(labels.shape, dtype=torch.float64) if weighted else torch.ones(labels.shape)
    options = {"loss_weights": weights} if weighted else {}
    out = mtp_loss(base(), hidden, labels, model, num_label_tokens=9, return_per_depth=True, **options)
    expected = sum(weights[reference.mtp_labels(labels, k) != -100].sum() for k in range(D))
    torch.testing.assert_close(out.weight_sum, expected.to(out.weight_sum.dtype))
    assert not out.weight_sum.requires_grad
    assert out.weight_sum.dim() == 0


def test_logits_and_given_targets():
    labels = labels_with_padding()
    logits = [torch.randn(B, S, V, dtype=torch.float64) for _ in range(D)]
    targets = [reference.mtp_labels(labels, k, -100) for k in range(D)]
    expected = reference.mtp_loss(logits, labels, 0.1).loss
    for targets_option in ({}, {"mtp_per_depth_targets": targets}):
        got = calculate_mtp_loss(
            MaskedCrossEntropy(), mtp_per_depth_logits=logits, labels=labels, model=Model(), **targets_option
        )
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("base", BASES)
def test_a_loss_with_its_own_ignore_index(base):
    labels, hidden, model = labels_with_padding(), hiddens(), Model()
    labels[0, 5] = 7
    elsewhere = torch.where(labels == 7, -100, labels)
    expected = mtp_loss(base(), hidden, elsewhere, model)
    for index in (-100, None, 7):
        got = mtp_loss(base(ignore_index=7), hidden, labels, model, ignore_index=index)
        torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match="ignore_index must be -100 or that of loss_fn, 7, got 3"):
        mtp_loss(base(ignore_index=7), hidden, labels, model, ignore_index=3)


@pytest.mark.parametrize("base", BASES)
def test_loss_weights_and_counts(base):
    labels, hidden, model = labels_with_padding(), hiddens(), Model()
    weights = torch.rand(B, S, dtype=torch.float64)
    expected = 0
    for k, h in enumerate(hidden):
        targets = reference.mtp_labels(labels, k, -100)
        expected = expected + (reference.token_nll(model.lm_head(h), targets) * weights).sum() / 13
    for count in (13, torch.tensor(13)):
        got = mtp_loss(base(), hidden, labels, model, loss_weights=weights, num_label_tokens=count)
        torch.testing.assert_close(got, expected * 0.1 / D)
    for count in (0, torch.tensor(0)):
        got = mtp_loss(base(), hidden, labels, model, num_label_tokens=count)
        assert got.item() == 0


@pytest.mark.exhaustive
def test_a_negative_count_raises():
    """A negative count would change the sign of the loss, which would then be maximised."""
    labels, hidden, model = labels_with_padding(), hiddens(), Model()
    call = functools.partial(mtp_loss, FusedLinearCrossEntropy(), hidden, labels, model)
    for count in (-3, torch.tensor(-3)):
        with pytest.raises(ValueError, match=r"^num_label_tokens must not be negative, got -3$"):
            call(num_label_tokens=count)
    step = torch.compile(lambda n: call(num_label_tokens=n), backend="aot_eager", fullgraph=True)
    assert step(torch.tensor(-3)).isnan()
    torch.testing.assert_close(step(torch.tensor(3)), call(num_label_tokens=3))


@pytest.mark.parametrize("base", BASES)
def test_more_depths_than_positions(base):
    model = Model()
    hidden = [torch.randn(B, 2, H, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    labels = torch.randint(0, V, (B, 2))
    got = mtp_loss(base(), hidden, labels, model)
    expected = reference.token_nll(model.lm_head(hidden[0][:, :1]), labels[:, 1:]).sum() * 0.1 / 4
    torch.testing.assert_close(got, expected)
    got.backward()
    assert all(h.grad.abs().sum() == 0 for h in hidden[1:])


def raises(error, message, function, *args, **options):
    with pytest.raises(error, match=re.escape(message)):
        function(*args, **options)


GIVEN = "must be given to dllm_kernels.mtp.cross_entropy."


def test_bad_input():
    hidden, labels, model, meta = hiddens(), labels_with_padding(), Model(), torch.zeros(B, S, device="meta").int()
    masked, fused = MaskedCrossEntropy(), FusedLinearCrossEntropy()

    def wrong(error, message, loss_fn=masked, **changes):
        given = {"mtp_per_depth_h": hidden, "labels": labels, "model": model, **changes}
        raises(error, message, calculate_mtp_loss, loss_fn, **given)

    one = "exactly one of mtp_per_depth_h and mtp_per_depth_logits must be given, got "
    wrong(ValueError, one + "neither", mtp_per_depth_h=None)
    wrong(ValueError, one + "both", mtp_per_depth_logits=hidden)
    wrong(ValueError, "mtp_per_depth_h must hold at least one depth, got an empty list", mtp_per_depth_h=[])
    logits = {"mtp_per_depth_h": None, "mtp_per_depth_logits": hidden}
    wrong(ValueError, f"mtp_per_depth_h {GIVEN}FusedLinearCrossEntropy", fused, **logits)
    depth = "mtp_per_depth_h[1] must have shape (2, 11, 8)"
    wrong(ValueError, depth, mtp_per_depth_h=[hidden[0], hidden[1][:, :5]])
    wrong(ValueError, "seq_idx must have shape (2, 11) like labels", seq_idx=torch.zeros(3, S))
    wrong(TypeError, "seq_idx must be a torch.Tensor, got list", seq_idx=[0])
    wrong(ValueError, "cu_seqlens must have shape [num_seqs + 1]", cu_seqlens=torch.zeros(2, 3))
    wrong(TypeError, "cu_seqlens must be a torch.Tensor, got list", cu_seqlens=[0, 4])
    wrong(
        ValueError,
        "cu_seqlens must have dtype int64, int32, int16, int8, uint8, got float32",
        cu_seqlens=torch.tensor([0.0, 4.0]),
    )
    wrong(ValueError, "cu_seqlens must be on cpu like labels, got meta", cu_seqlens=meta[0])
    targets = "mtp_per_depth_targets"
    wrong(ValueError, f"{targets} must not be combined", mtp_per_depth_targets=[labels] * D, seq_idx=labels)
    wrong(ValueError, f"{targets} must hold 3 tensors, one per depth, got 2", mtp_per_depth_targets=[labels] * 2)
    wrong(ValueError, f"{targets}[0] must have shape", mtp_per_depth_targets=[labels[:1]] * D)
    wrong(ValueError, "model must have get_output_embeddings", fused, model=nn.Linear(2, 2))
    wrong(TypeError, "labels must be a torch.Tensor, got list", labels=[1])


def test_bad_input_of_the_base_losses():
    hidden, labels, model = hiddens()[0], labels_with_padding(), Model()
    masked, fused, x = MaskedCrossEntropy, FusedLinearCrossEntropy, model.lm_head(hidden)
    raises(ValueError, "reduction must be one of sum, mean, none, got 'avg'", masked, reduction="avg")
    count = "num_label_tokens must be None unless reduction is 'sum', got reduction='mean'"
    raises(ValueError, count, masked(reduction="mean"), x, labels, num_label_tokens=3)
    weights, call = "loss_weights must be None unless reduction is 'sum'", fused(reduction="none")
    raises(ValueError, weights, call, hidden, labels, model.lm_head.weight, loss_weights=torch.ones(B, S))
    softcap = "logit_softcapping must be positive, from 1e-18 to 1e+18, got 1e+19"
    raises(ValueError, softcap, fused, logit_softcapping=-1e19)
    raises(TypeError, "logit_softcapping must be a number or None, got str", fused, logit_softcapping="30")
    raises(ValueError, "chunk_size must be at least 1, got 0", fused, chunk_size=0)
    raises(TypeError, "chunk_size must be an int, got str", fused, chunk_size="8")
    call.chunk_size = True
    raises(TypeError, "chunk_size must be an int, got bool", call, hidden, labels, model.lm_head.weight)
    raises(ValueError, "mask must have shape (22,)", masked(), x, labels, mask=torch.ones(3))
    raises(ValueError, f"logits {GIVEN}MaskedCrossEntropy, got None", calculate_loss, masked(), labels=labels)
    raises(ValueError, f"labels {GIVEN}MaskedCrossEntropy, got None", calculate_loss, masked(), logits=x)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_base_losses_agree_with_the_reference(reduction):
    model, hidden, labels = Model(), hiddens()[0], labels_with_padding()
    logits = model.lm_head(hidden)
    before = labels.clone()
    mask = torch.rand(B, S) < 0.7
    expected = reference.masked_cross_entropy(logits, labels, reduction=reduction)
    torch.testing.assert_close(MaskedCrossEntropy(reduction=reduction)(logits, labels), expected)
    fused = FusedLinearCrossEntropy(reduction=reduction)(hidden, labels, model.lm_head.weight)
    torch.testing.assert_close(fused, expected)
    masked = MaskedCrossEntropy(reduction=reduction)(logits, labels, mask=mask)
    kept = torch.where(mask, labels, -100)
    torch.testing.assert_close(masked, reference.masked_cross_entropy(logits, kept, reduction=reduction))
    assert torch.equal(labels, before)


TRANSFORM = {"softcap": 3.0, "scale": 1.4, "skip_id": 5}


def transformed_losses(reduction="sum"):
    """Return both base losses with the same transform."""
    softcap, *rest = TRANSFORM.values()
    scale, skip_id = rest
    fused = FusedLinearCrossEntropy(logit_softcapping=softcap, reduction=reduction, scale=scale, skip_id=skip_id)
    return MaskedCrossEntropy(reduction=reduction, **TRANSFORM), fused


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_transforms_of_base_losses_agree_with_the_reference(reduction):
    model, hidden, labels = Model(), hiddens()[0], labels_with_padding()
    labels = torch.where(labels == 5, 6, labels)
    logits = model.lm_head(hidden)
    masked, fused = transformed_losses(reduction)
    for softcap in (TRANSFORM["softcap"], None):
        masked.softcap = fused.logit_softcapping = softcap
        transformed = reference.transformed(logits, **(TRANSFORM | {"softcap": softcap}))
        expected = reference.masked_cross_entropy(transformed, labels, reduction=reduction)
        torch.testing.assert_close(masked(logits, labels), expected)
        torch.testing.assert_close(fused(hidden, labels, model.lm_head.weight), expected)


@pytest.mark.parametrize("return_per_depth", [False, True])
def test_every_depth_goes_through_the_transform(return_per_depth):
    model, hidden, labels = Model(), hiddens(), labels_with_padding()
    labels = torch.where(labels == 5, 6, labels)
    transformed = [reference.transformed(model.lm_head(h), **TRANSFORM) for h in hidden]
    expected = reference.mtp_loss(transformed, labels, 0.1).loss
    for loss_fn in transformed_losses():
        options = {"labels": labels, "model": model, "mtp_per_depth_h": hidden}
        out = calculate_mtp_loss(loss_fn, return_per_depth=return_per_depth, **options)
        torch.testing.assert_close(out.loss if return_per_depth else out, expected)


@pytest.mark.parametrize("base", BASES)
def test_a_mean_over_nothing_is_zero(base):
    model, hidden = Model(), hiddens()[0]
    labels = torch.full((B, S), -100)
    first = (model.lm_head(hidden),) if base is MaskedCrossEntropy else (hidden,)
    rest = () if base is MaskedCrossEntropy else (model.lm_head.weight,)
    loss = base(reduction="mean")(*first, labels, *rest)
    assert loss.item() == 0
    loss.backward()
    assert hidden.grad.abs().sum() == 0


def test_fp32_upcast_false_rounds_each_token():
    logits, labels = torch.randn(B, S, V).bfloat16(), torch.randint(0, V, (B, S))
    exact = MaskedCrossEntropy(reduction="none")(logits, labels)
    rounded = MaskedCrossEntropy(fp32_upcast=False, reduction="none")(logits, labels)
    assert not torch.equal(exact, rounded)
    assert torch.equal(exact.bfloat16().float(), rounded)
    assert torch.equal(MaskedCrossEntropy(fp32_upcast=False)(logits, labels), rounded.sum())
    beyond = torch.tensor([6e4, -6e4, -torch.inf], dtype=torch.float16).expand(1, 2, 3)  # NLLs of 1.2e5 and of inf
    none = MaskedCrossEntropy(fp32_upcast=False, reduction="none")(beyond, torch.tensor([[1, 2]]))
    assert none.flatten().tolist() == [torch.inf, torch.inf]


class ByParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.my_lm_head_matrix = nn.Parameter(torch.randn(V, H, dtype=torch.float64))


class ByGetter(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(1, 1)
        self.out = nn.Linear(H, V, bias=False, dtype=torch.float64)

    def get_output_embeddings(self):
        return self.out


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("model", [ByParameter(), ByGetter(), nn.ModuleDict({"inner": Model()})])
def test_the_head_is_found(base, model):
    weight = max((p for p in model.parameters()), key=torch.Tensor.numel)
    hidden, labels = hiddens(grad=False), labels_with_padding()
    got = mtp_loss(base(), hidden, labels, model)
    torch.testing.assert_close(got, reference.mtp_loss([h @ weight.t() for h in hidden], labels, 0.1).loss)


class Stage(Model):
    def __init__(self, factor=None, logits=False):
        super().__init__()
        if factor is not None:
            self.mtp_config = SimpleNamespace(loss_scaling_factor=factor)
        self.mtp_outputs_are_logits = logits


def main_and_mtp(model, logits, hidden, labels, factor, **packing):
    main = reference.masked_cross_entropy(logits, labels)
    return main + reference.mtp_loss([model.lm_head(h) for h in hidden], labels, factor, **packing).loss


def test_pipeline_loss_accepts_every_form_of_output():
    model, hidden, labels = Stage(), hiddens(), labels_with_padding()
    logits = torch.randn(B, S, V, dtype=torch.float64, requires_grad=True)
    group = object()
    loss_fn = MTPLossConfig().build(MaskedCrossEntropy(), model, grad_reduce_group=group)
    assert loss_fn.grad_reduce_group is group
    main = reference.masked_cross_entropy(logits, labels)
    seq_idx = torch.randint(0, 2, (B, S), dtype=torch.int32)
    expected = main_and_mtp(model, logits, hidden, labels, 0.1)
    torch.testing.assert_close(loss_fn(logits, labels), main)
    torch.testing.assert_close(loss_fn(SimpleNamespace(logits=logits), labels), main)
    torch.testing.assert_close(loss_fn(SimpleNamespace(logits=logits, mtp_per_depth_h=hidden), labels), expected)
    torch.testing.assert_close(loss_fn((logits, *hidden), labels), expected)
    torch.testing.assert_close(loss_fn((logits,), labels), main)
    packed = main_and_mtp(model, logits, hidden, labels, 0.1, seq_idx=seq_idx)
    torch.testing.assert_close(loss_fn((logits, *hidden, seq_idx), labels), packed)
    loss_fn.cu_seqlens = torch.tensor([0, 4, S])
    by_length = main_and_mtp(model, logits, hidden, labels, 0.1, cu_seqlens=loss_fn.cu_seqlens)
    torch.testing.assert_close(loss_fn((logits, *hidden), labels), by_length)
    torch.testing.assert_close(loss_fn((logits, *hidden, seq_idx), labels), packed)


def test_pipeline_loss_adds_mtp_only_in_training():
    model, hidden, labels = Stage().eval(), hiddens(), labels_with_padding()
    logits = torch.randn(B, S, V, dtype=torch.float64)
    got = PipelineCausalLMLoss(MaskedCrossEntropy(), model)((logits, *hidden), labels)
    torch.testing.assert_close(got, reference.masked_cross_entropy(logits, labels))


@pytest.mark.parametrize(
    ("own", "output", "config", "expected"),
    [(0.7, 0.5, 0.3, 0.7), (None, 0.5, 0.3, 0.5), (None, None, 0.3, 0.3), (None, None, None, 0.1)],
)
def test_pipeline_scaling(own, output, config, expected):
    model, hidden, labels = Stage(config), hiddens(), labels_with_padding()
    logits = torch.randn(B, S, V, dtype=torch.float64)
    stage_output = SimpleNamespace(logits=logits, mtp_per_depth_h=hidden)
    if output is not None:
        stage_output.mtp_loss_scaling_factor = output
    got = PipelineCausalLMLoss(MaskedCrossEntropy(), model, own)(stage_output, labels)
    torch.testing.assert_close(got, main_and_mtp(model, logits, hidden, labels, expected))


def test_pipeline_with_depth_logits():
    model, labels = Stage(logits=True), labels_with_padding()
    logits = [torch.randn(B, S, V, dtype=torch.float64) for _ in range(D + 1)]
    expected = reference.masked_cross_entropy(logits[0], labels) + reference.mtp_loss(logits[1:], labels, 0.1).loss
    torch.testing.assert_close(PipelineCausalLMLoss(MaskedCrossEntropy(), model)(tuple(logits), labels), expected)


def records(hidden, weight, **options):
    return [LinearLogits(h, weight, **options) for h in hidden]


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_a_record_in_the_place_of_logits_gives_the_bits_of_the_loss_from_hidden_states(reduction):
    model, (hidden, *_), labels = Model(), hiddens(), labels_with_padding()
    weight, (masked, fused) = model.lm_head.weight, transformed_losses(reduction)
    labels = torch.where(labels == TRANSFORM["skip_id"], 6, labels)
    expected = fused(hidden, labels, weight)
    (record,) = records([hidden], weight)
    for y in (labels, labels.flatten()):
        assert torch.equal(masked(record, y), expected)
    (record,) = records([hidden], weight, **TRANSFORM)
    found = MaskedCrossEntropy(reduction=reduction)(record, labels)
    assert torch.equal(found, expected)
    for ours, other in zip(*(torch.autograd.grad(x.sum(), [hidden, weight]) for x in (found, expected)), strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("per_depth", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_records_of_one_head_are_one_call_of_all_depths(flat, per_depth):
    model, hidden, labels = Model(), hiddens(), labels_with_padding()
    if flat:
        hidden, labels = [h[:1] for h in hidden], labels[0]
    weight, options = model.lm_head.weight, {"labels": labels, "model": model, "return_per_depth": per_depth}
    expected = calculate_mtp_loss(FusedLinearCrossEntropy(), mtp_per_depth_h=hidden, **options)
    depths = records(hidden, weight)
    two_heads = [*records(hidden[:1], weight), *records(hidden[1:], weight.clone())]
    bounds = [int((mtp.mtp_labels(labels, k) != -100).sum()) for k in range(D)]
    bounded = [LinearLogits(h, weight, num_active=bound) for h, bound in zip(hidden, bounds, strict=True)]
    found, *others = (
        calculate_mtp_loss(MaskedCrossEntropy(), mtp_per_depth_logits=logits, **options)
        for logits in (depths, two_heads, bounded)
    )
    if per_depth:
        assert torch.equal(found.weight_sum, expected.weight_sum)
        assert all(map(torch.equal, found.per_depth_losses, expected.per_depth_losses))
        found, expected, *others = (x.loss for x in (found, expected, *others))
    assert torch.equal(found, expected)
    for other in others:
        torch.testing.assert_close(other, expected)
    for ours, wanted in zip(*(torch.autograd.grad(x, [*hidden, weight]) for x in (found, expected)), strict=True):
        assert torch.equal(ours, wanted)
    scaled = [LinearLogits(h, weight, scale=1.0 + k) for k, h in enumerate(hidden)]
    stored = [(1.0 + k) * h @ weight.t() for k, h in enumerate(hidden)]
    results = (calculate_mtp_loss(MaskedCrossEntropy(), mtp_per_depth_logits=x, **options) for x in (scaled, stored))
    torch.testing.assert_close(*(x.loss if per_depth else x for x in results))


def test_pipeline_loss_of_records():
    model, hidden, labels = Stage(logits=True), hiddens(), labels_with_padding()
    main, *depths = records(hidden, model.lm_head.weight)
    loss_fn = PipelineCausalLMLoss(MaskedCrossEntropy(), model)
    expected = FusedLinearCrossEntropy()(hidden[0], labels, model.lm_head.weight)
    assert torch.equal(loss_fn(main, labels), expected)
    assert torch.equal(loss_fn(SimpleNamespace(logits=main), labels), expected)
    expected = expected + mtp_loss(FusedLinearCrossEntropy(), hidden[1:], labels, model)
    assert torch.equal(loss_fn((main, *depths), labels), expected)


def test_a_low_rank_part_beside_records_raises():
    model, hidden, labels = Model(), hiddens(), labels_with_padding()
    options = {"mtp_per_depth_logits": records(hidden, model.lm_head.weight), "labels": labels, "model": model}
    extra = torch.randn(D, B, S, 2, dtype=torch.float64), torch.randn(V, 2, dtype=torch.float64)
    message = "extra must be None for dllm_kernels.mtp.cross_entropy.MaskedCrossEntropy"
    raises(ValueError, message, calculate_mtp_loss, MaskedCrossEntropy(), **options, extra=extra)


def test_pipeline_with_the_fused_loss():
    model, hidden, labels = Stage(), hiddens(), labels_with_padding()
    loss_fn = PipelineCausalLMLoss(FusedLinearCrossEntropy(), model)
    main = reference.masked_cross_entropy(model.lm_head(hidden[0]), labels)
    torch.testing.assert_close(loss_fn(hidden[0], labels), main)
    output = SimpleNamespace(logits=None, hidden_states=[None, hidden[0]], mtp_per_depth_h=hidden[1:])
    expected = main_and_mtp(model, model.lm_head(hidden[0]), hidden[1:], labels, 0.1)
    torch.testing.assert_close(loss_fn(output, labels), expected)
    with pytest.raises(
        ValueError, match=r"output must not be a tuple for dllm_kernels\.mtp\.cross_entropy\.FusedLinearCrossEntropy"
    ):
        loss_fn((hidden[0], *hidden[1:]), labels)


@pytest.mark.parametrize("packing", ["seq_idx", "cu_seqlens"])
def test_a_row_of_packing_beside_labels_of_one_dimension(packing):
    model, labels = Model(), torch.randint(0, V, (S,))
    hidden = [h[0] for h in hiddens()]
    one = {"seq_idx": torch.tensor([0] * 5 + [1] * 6), "cu_seqlens": torch.tensor([0, 5, S])}[packing]
    flat, row = (mtp_loss(MaskedCrossEntropy(), hidden, labels, model, **{packing: t}) for t in (one, one[None]))
    torch.testing.assert_close(flat, row)
    both = [h.expand(2, -1, -1) for h in hidden]
    torch.testing.assert_close(
        mtp_loss(MaskedCrossEntropy(), both, labels.expand(2, -1), model, **{packing: one}), 2 * row
    )


def test_seq_idx_tail():
    tail = torch.zeros(B, S, dtype=torch.int32)
    x = torch.zeros(B, S, V)
    extract = PipelineCausalLMLoss._extract_seq_idx_tail
    assert extract((x, tail))[0] is tail
    assert extract((x, tail))[1] == (x,)
    for output in ((x, tail.long()), (x, tail[0]), (), x, [x, tail]):
        assert extract(output) == (None, output)


def test_pipeline_checks_its_ignore_index():
    with pytest.raises(ValueError, match="ignore_index must be -100 or that of loss_fn, -100, got 5"):
        PipelineCausalLMLoss(MaskedCrossEntropy(), Model(), ignore_index=5)
    assert PipelineCausalLMLoss(MaskedCrossEntropy(ignore_index=5), Model()).ignore_index == 5


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("base", BASES)
def test_a_custom_ignore_index_is_not_a_bad_target(base, reduction, monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "1")
    torch.manual_seed(0)
    model, h = Model(), torch.randn(B, S, H, dtype=torch.float64)
    labels = torch.where(torch.rand(B, S) < 0.3, -1, torch.randint(0, V, (B, S)))
    loss_fn = base(ignore_index=-1, reduction=reduction)
    first = (h, labels, model.lm_head.weight) if base is FusedLinearCrossEntropy else (model.lm_head(h), labels)
    assert loss_fn(*first).isfinite().all()
    if reduction != "none":
        depths = [h, h]
        for return_per_depth in (False, True):
            total = mtp_loss(loss_fn, depths, labels, model, return_per_depth=return_per_depth)
            assert (total.loss if return_per_depth else total).isfinite()
    with pytest.raises(IndexError, match="got 37 at position"):
        loss_fn(*first[:1], torch.full_like(labels, V), *first[2:])


class Doubled(FusedLinearCrossEntropy):
    def forward(self, hidden_states, labels, lm_weight, **options):
        return 2 * super().forward(hidden_states, labels, lm_weight, **options)


@pytest.mark.parametrize("how", ["subclass", "hook", "replaced"])
def test_a_modified_loss_is_called_for_every_depth(how):
    """A loss with additional behaviour is called once per depth, not bypassed."""
    model, depths = Model(), [torch.randn(B, S, H, dtype=torch.float64) for _ in range(D)]
    common = {"mtp_per_depth_h": depths, "labels": torch.randint(0, V, (B, S)), "model": model}
    loss_fn = Doubled() if how == "subclass" else FusedLinearCrossEntropy()
    if how == "hook":
        loss_fn.register_forward_hook(lambda module, args, out: 2 * out)
    if how == "replaced":
        plain = FusedLinearCrossEntropy()
        loss_fn.forward = lambda hidden_states, labels, lm_weight: 2 * plain(hidden_states, labels, lm_weight)
    expected = 2 * calculate_mtp_loss(FusedLinearCrossEntropy(), **common)
    torch.testing.assert_close(calculate_mtp_loss(loss_fn, **common), expected)


@pytest.mark.parametrize("how", ["one call", "per depth", "subclass", "flat labels"])
def test_a_low_rank_part_of_the_head(how):
    """The bias also differs from the bias of the model's head."""
    model, hidden, labels = Model(), hiddens(), labels_with_padding()
    if how == "flat labels":
        hidden, labels = [h[:1] for h in hidden], labels[0]
    u = torch.randn(D, *hidden[0].shape[:-1], 2, dtype=torch.float64, requires_grad=True)
    second, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((V, 2), (V,)))
    logits = [model.lm_head(h) + v @ second.t() + bias for h, v in zip(hidden, u, strict=True)]
    expected = (2 if how == "subclass" else 1) * reference.mtp_loss(logits, labels.reshape(-1, S), 0.3).loss
    loss_fn = Doubled() if how == "subclass" else FusedLinearCrossEntropy()
    options = {"extra": (u, second), "lm_bias": bias, "return_per_depth": how == "per depth"}
    got = mtp_loss(loss_fn, hidden, labels, model, scaling_factor=0.3, **options)
    got = got.loss if how == "per depth" else got
    torch.testing.assert_close(got, expected)
    leaves = [*hidden, u, second, bias, *model.parameters()]
    for ours, plain in zip(*(torch.autograd.grad(value, leaves) for value in (got, expected)), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_a_low_rank_part_of_the_head_in_the_main_loss(reduction):
    model, hidden, labels = Model(bias=torch.randn(V, dtype=torch.float64)), hiddens()[0], labels_with_padding()
    extra = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((B, S, 2), (V, 2))]
    logits = model.lm_head(hidden) + extra[0] @ extra[1].t()
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
    loss_fn = FusedLinearCrossEntropy(reduction=reduction)
    got = mtp.calculate_loss(loss_fn, hidden_states=hidden, labels=labels, model=model, extra=tuple(extra))
    torch.testing.assert_close(got, expected)
    leaves = [hidden, *extra, *model.parameters()]
    for ours, plain in zip(*(torch.autograd.grad(value.sum(), leaves) for value in (got, expected)), strict=True):
        torch.testing.assert_close(ours, plain)


LAYOUTS = {  # shapes of the logits without their last dimension, and of the labels
    "flat labels": ((2, 12), (24,)),
    "flat logits": ((24,), (2, 12)),
    "both flat": ((24,), (24,)),
    "packed": ((1, 24), (24,)),
    "packed labels": ((24,), (1, 24)),
    "heads": ((2, 3, 4), (2, 12)),
    "merged in part": ((2, 12), (2, 3, 4)),
    "ones": ((2, 1, 12, 1), (1, 2, 12)),
    "one row": ((), (1,)),
    "one label": ((1,), ()),
    "none": ((0, 3), (0,)),
    "empty rows": ((3, 0), (0, 3)),
}


def host_loss(**options):
    """Return the corresponding loss of NeMo AutoModel, if installed."""
    return pytest.importorskip("nemo_automodel.components.loss.masked_ce").MaskedCrossEntropy(**options)


def documented_loss(logits, labels, mask=None, num_label_tokens=None, loss_weights=None, reduction="sum"):
    """Compute the documented result for any layout: rows and entries are flattened, and correspond in order."""
    rows, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if mask is not None:
        targets = torch.where(mask.reshape(-1) != 0, targets, -100)
    if loss_weights is None:
        return reference.masked_cross_entropy(rows, targets, None, num_label_tokens, reduction=reduction)
    loss = (reference.token_nll(rows, targets) * loss_weights.reshape(-1)).sum()
    return loss if num_label_tokens is None else loss / num_label_tokens


def masks(shape):
    mask = (torch.arange(torch.Size(shape).numel()) + 1) % 3
    return {"none": None, "same": mask.reshape(shape), "flat": mask, "column": mask.float()[:, None], "bool": mask > 0}


@pytest.mark.everyday(20)
@pytest.mark.parametrize("mask", masks((1,)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_labels_in_another_layout_than_logits(layout, mask):
    rows, shape = LAYOUTS[layout]
    logits, labels = torch.randn(*rows, V), torch.randint(0, V, shape)
    labels.reshape(-1)[1::5] = -100
    weights, mask = torch.rand(shape), masks(shape)[mask]
    calls = [("sum", {}), ("sum", {"num_label_tokens": 5, "loss_weights": weights}), ("none", {})]
    for reduction, options in calls + [("mean", {})] * bool(labels.numel()):
        leaves = [logits.clone().requires_grad_() for _ in range(3)]
        ours = MaskedCrossEntropy(reduction=reduction)(leaves[0], labels, mask, **options)
        plain = documented_loss(leaves[1], labels, mask, **options, reduction=reduction)
        host = host_loss(reduction=reduction)(leaves[2], labels.clone(), mask, **options)
        for leaf, other in zip(leaves[1:], (plain, host), strict=True):
            torch.testing.assert_close(ours, other)
            grads = [
                torch.autograd.grad(v.sum(), x, retain_graph=True)[0] for v, x in ((ours, leaves[0]), (other, leaf))
            ]
            torch.testing.assert_close(*grads)


@pytest.mark.parametrize("on", [True, False])
def test_a_mask_of_one_entry_applies_to_every_label(on):
    logits, labels = torch.randn(B, S, V), torch.randint(0, V, (B, S))
    mask = torch.tensor([on])
    ours = MaskedCrossEntropy()(logits, labels, mask)
    torch.testing.assert_close(ours, MaskedCrossEntropy()(logits, labels) * on)
    torch.testing.assert_close(ours, host_loss()(logits, labels.clone(), mask))


def test_labels_whose_layout_does_not_fit_the_logits():
    loss_fn, logits, labels = MaskedCrossEntropy(), torch.randn(2, 6, V), torch.zeros(2, 6, dtype=torch.long)
    for shape in ((6, 2), (3, 4), (2, 5), (2, 6, 1, 2), (1,), ()):
        message = f"labels must have shape (2, 6) (that of logits without its last dimension), got {shape}"
        raises(ValueError, message, loss_fn, logits, torch.zeros(shape, dtype=torch.long))
    raises(TypeError, "labels must be a torch.Tensor, got list", loss_fn, logits, [1])
    raises(TypeError, "mask must be a torch.Tensor, got list", loss_fn, logits, labels, mask=[1])
    message = "loss_weights must have shape (12,) (that of labels), got (2, 6)"
    raises(ValueError, message, loss_fn, logits, labels.flatten(), loss_weights=torch.ones(2, 6))


NARROW = [torch.uint8, torch.int8, torch.int16, torch.int32]


@pytest.mark.parametrize("packing", ["none", "seq_idx"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("base", BASES)
def test_labels_of_a_narrow_type(base, dtype, packing):
    """-100 does not fit into uint8, in which it would become 156."""
    size = 200 if dtype == torch.uint8 else 100
    model, hidden = Model(torch.randn(size, H, dtype=torch.float64)), hiddens()
    labels = torch.randint(0, size, (B, S))
    if dtype == torch.uint8:
        labels[:, 2::3] = 156
    options = packings()[packing]
    narrow, wide = (mtp_loss(base(), hidden, y, model, **options) for y in (labels.to(dtype), labels))
    assert torch.equal(narrow, wide)
    torch.testing.assert_close(
        wide, reference.mtp_loss([model.lm_head(h) for h in hidden], labels, 0.1, **options).loss
    )
    rest = (model.lm_head.weight,) if base is FusedLinearCrossEntropy else ()
    first = hidden[0] if rest else model.lm_head(hidden[0])
    for index in (-100, 300):
        narrow, wide = (
            loss_by_both_calls(base(ignore_index=index), first, y, rest) for y in (labels.to(dtype), labels)
        )
        assert torch.equal(narrow, wide)


def loss_by_both_calls(loss_fn, first, labels, rest):
    """Call the loss directly and through ``calculate_loss``, and compare the results."""
    direct = loss_fn(first, labels, *rest)
    named = {"hidden_states": first, "lm_weight": rest[0]} if rest else {"logits": first}
    assert torch.equal(calculate_loss(loss_fn, labels=labels, **named), direct)
    return direct


def test_the_labels_of_a_depth_can_hold_every_ignore_index():
    labels = torch.tensor([[200, 156, 3, 7]], dtype=torch.uint8)
    assert mtp.mtp_labels(labels, 0).tolist() == [[156, 3, 7, -100]]
    assert mtp.mtp_labels(labels, 1, 1000, torch.tensor([[0, 0, 1, 1]])).tolist() == [[1000] * 4]
    assert mtp.mtp_labels(labels, 1).dtype == torch.int64


def test_a_narrow_dtype_of_cu_seqlens_holds_only_its_boundaries():
    model = Model()
    hidden, labels = [torch.randn(1, 300, H, dtype=torch.float64)], torch.randint(0, V, (1, 300))
    boundaries = torch.tensor([0, 100, 120])
    expected = reference.mtp_loss([model.lm_head(h) for h in hidden], labels, 0.1, cu_seqlens=boundaries).loss
    for dtype in (torch.int8, torch.int32):
        got = mtp_loss(MaskedCrossEntropy(), hidden, labels, model, cu_seqlens=boundaries.to(dtype))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("base", BASES)
def test_an_ignore_index_is_an_int(base):
    loss_fn = base(ignore_index=np.int64(7))
    assert type(loss_fn.ignore_index) is int
    raises(TypeError, "ignore_index must be an int, got NoneType", base, ignore_index=None)
    raises(TypeError, "ignore_index must be an int, got bool", base, ignore_index=True)


def test_a_numpy_ignore_index_in_a_foreign_loss():
    class Theirs(MaskedCrossEntropy):
        ignore_index = property(lambda self: np.int64(7), lambda self, value: None)

    assert PipelineCausalLMLoss(Theirs(), Model(), ignore_index=7).ignore_index == 7


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("count", [5, 5.0, np.int64(5), np.float32(5), torch.tensor([5]), torch.tensor(5.0).double(), 0,
                                   np.int64(0), 0.0, torch.tensor(0.0)], ids=repr)  # fmt: skip
def test_counts_are_numbers_or_tensors(base, count):
    model, hidden = Model(torch.randn(V, H)), hiddens(torch.float32)
    labels = labels_with_padding()
    rest = (model.lm_head.weight,) if base is FusedLinearCrossEntropy else ()
    first = hidden[0] if rest else model.lm_head(hidden[0])
    got = base()(first, labels, *rest, num_label_tokens=count)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, base()(first, labels, *rest) * (0.2 if float(count) else 0))
    with pytest.raises(TypeError, match="num_label_tokens must be a number or a 0-d tensor, got str"):
        base()(first, labels, *rest, num_label_tokens="5")


class Plain(nn.Module):
    """A loss with only the required arguments."""

    def forward(self, logits, labels):
        return reference.masked_cross_entropy(logits, labels)


class PlainLinear(nn.Module):
    def forward(self, hidden_states, labels, lm_weight):
        return reference.masked_cross_entropy(hidden_states @ lm_weight.t(), labels)


def test_the_sign_of_a_soft_cap_has_no_effect():
    """The sign has no effect in the original either, because tanh is odd."""
    hidden, labels, weight = hiddens()[0], labels_with_padding(), torch.randn(V, H, dtype=torch.float64)
    positive, negative = (FusedLinearCrossEntropy(logit_softcapping=c) for c in (2.5, -2.5))
    assert torch.equal(negative(hidden, labels, weight), positive(hidden, labels, weight))
    assert (negative.logit_softcapping, negative.softcap) == (-2.5, 2.5)


@pytest.mark.parametrize("loss_fn", [Plain(), PlainLinear()])
def test_arguments_that_the_base_loss_does_not_accept_raise(loss_fn):
    """Dropping a count, weights or a bias of the head that the base loss does not accept would train another loss."""
    model, hidden, labels = Model(), hiddens(), labels_with_padding()
    call = {"mtp_per_depth_h": hidden, "labels": labels, "model": model}
    expected = reference.mtp_loss([model.lm_head(h) for h in hidden], labels, 0.1).loss
    torch.testing.assert_close(calculate_mtp_loss(loss_fn, grad_reduce_group=object(), **call), expected)
    for option in ({"num_label_tokens": 3}, {"loss_weights": torch.ones(B, S)}):
        message = (
            f"{next(iter(option))} must be None for {__name__}.{type(loss_fn).__name__}, whose forward does not take it"
        )
        with pytest.raises(ValueError, match=message):
            calculate_mtp_loss(loss_fn, **call, **option)
    call["model"] = Model(bias=torch.randn(V, dtype=torch.float64))
    if isinstance(loss_fn, PlainLinear):
        with pytest.raises(ValueError, match=r"lm_bias must be None for tests\.mtp\.test_mtp\.PlainLinear"):
            calculate_mtp_loss(loss_fn, **call)
    else:
        expected = reference.mtp_loss([call["model"].lm_head(h) for h in hidden], labels, 0.1).loss
        torch.testing.assert_close(calculate_mtp_loss(loss_fn, **call), expected)


def test_decorated_compiled_and_replaced_forwards_receive_their_arguments():
    class Decorated(Plain):
        @functools.wraps(Plain.forward)
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    class PassedOn(FusedLinearCrossEntropy):
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    replaced, labels, model = Plain(), labels_with_padding(), Model()
    replaced.forward = lambda hidden_states, labels, lm_weight: PlainLinear()(hidden_states, labels, lm_weight)
    compiled = [torch.compile(base(), backend="eager") for base in BASES]
    hidden = hiddens(grad=False)
    expected = reference.mtp_loss([model.lm_head(h) for h in hidden], labels, 0.1).loss
    for loss_fn in (Decorated(), replaced, PassedOn(), *compiled):
        got = mtp_loss(loss_fn, hidden, labels, model)
        torch.testing.assert_close(got, expected)


def test_pipeline_loss_of_a_mapping():
    """A dict has its depths under a key. If they were ignored, they would train nothing."""
    model, hidden, labels = Stage(), hiddens(), labels_with_padding()
    logits = model.lm_head(hidden[0])
    expected = main_and_mtp(model, logits, hidden[1:], labels, 0.4)
    output = {
        "logits": logits,
        "hidden_states": hidden[0],
        "mtp_per_depth_h": hidden[1:],
        "mtp_loss_scaling_factor": 0.4,
    }
    for base in BASES:
        torch.testing.assert_close(PipelineCausalLMLoss(base(), model)(output, labels), expected)
    with pytest.raises(
        ValueError, match=r"logits must be given to dllm_kernels\.mtp\.cross_entropy\.MaskedCrossEntropy, got None"
    ):
        PipelineCausalLMLoss(MaskedCrossEntropy(), model)({"hidden_states": hidden[0]}, labels)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("depths", [[], (), None])
def test_pipeline_loss_of_a_mapping_without_depths(base, depths):
    model, hidden, labels = Stage(), hiddens(), labels_with_padding()
    output = {"logits": model.lm_head(hidden[0]), "hidden_states": hidden[0]}
    expected = reference.masked_cross_entropy(output["logits"], labels)
    for name in ("mtp_per_depth_h", "mtp_per_depth_logits"):
        got = PipelineCausalLMLoss(base(), model)(output | {name: depths}, labels)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("output", "got"),
    [
        (lambda logits: [logits], "list"),
        (lambda logits: [logits, logits], "list"),
        (lambda logits: None, "NoneType"),
        (lambda logits: (), "a tuple without them"),
        (lambda logits: (torch.zeros(B, S, dtype=torch.int32),), "a tuple without them"),
        (lambda logits: ([logits],), "a tuple without them"),
    ],
)
def test_pipeline_loss_of_another_output(output, got):
    """The base loss, which may be from any library, does not receive such an output."""
    model, logits, labels = Stage(), torch.randn(B, S, V), labels_with_padding()
    message = (
        "output must be a tensor, a tuple whose first element is the logits, or an object or mapping with logits or "
        f"hidden_states, got {got}"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        PipelineCausalLMLoss(MaskedCrossEntropy(), model)(output(logits), labels)


def test_pipeline_loss_with_depths_in_both_forms():
    model, hidden, labels = Stage(), hiddens(), labels_with_padding()
    logits = model.lm_head(hidden[0])
    output = SimpleNamespace(logits=logits, mtp_per_depth_h=hidden, mtp_per_depth_logits=[logits])
    with pytest.raises(ValueError, match=r"exactly one of mtp_per_depth_h and mtp_per_depth_logits .* got both"):
        PipelineCausalLMLoss(MaskedCrossEntropy(), model)(output, labels)


def test_a_head_that_is_a_parameter_of_an_inner_module():
    """The surrounding module need not be a plain head, but a module named like a head must be one."""

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head_weight = torch.nn.Parameter(torch.randn(5, 4))

        def forward(self, hidden):
            return torch.tanh(hidden) @ self.lm_head_weight.t()

    model = torch.nn.Module()
    model.decoder = Decoder()
    assert head_weight(model) is model.decoder.lm_head_weight
    model = torch.nn.Module()
    model.my_lm_head = Decoder()
    with pytest.raises(ValueError, match="Decoder"):
        head_weight(model)


@pytest.mark.parametrize("offsets", [[0, 6, 3, S], [0, 4, S + 1], [2, 4, S], [], [0, 5, S, 2 * S]])
def test_invalid_boundaries_raise(offsets):
    """Concatenated boundaries of a whole batch are rejected too, because each row would take them for its own."""
    call = {"mtp_per_depth_h": hiddens(), "labels": labels_with_padding(), "model": Model()}
    message = rf"^cu_seqlens must rise from 0 to {S}, the length of labels, or less, got {re.escape(str(offsets))}$"
    with pytest.raises(ValueError, match=message):
        calculate_mtp_loss(MaskedCrossEntropy(), cu_seqlens=torch.tensor(offsets, dtype=torch.int32), **call)


@pytest.mark.parametrize(("depth", "error"), [(-1, ValueError), (0.5, TypeError)])
def test_an_invalid_depth_raises(depth, error):
    with pytest.raises(error, match=r"^depth must be "):
        mtp.depths.mtp_labels(torch.arange(6), depth)


@pytest.mark.parametrize("base", BASES)
def test_a_given_head_is_used_by_every_base_loss(base):
    """Losses from logits ignored a given bias, and asked for a head of the model beside a given weight."""
    hidden, labels = hiddens(grad=False), labels_with_padding()
    weight, bias = torch.randn(V, H, dtype=torch.float64), torch.randn(V, dtype=torch.float64)
    expected = reference.mtp_loss([h @ weight.T + bias for h in hidden], labels, 0.1).loss
    for model, head in ((nn.Module(), {"lm_weight": weight, "lm_bias": bias}), (Model(weight), {"lm_bias": bias})):
        torch.testing.assert_close(mtp_loss(base(), hidden, labels, model, **head), expected)
    with pytest.raises(TypeError, match=r"lm_weight must be a torch\.Tensor, got"):
        mtp_loss(base(), hidden, labels, Model(), lm_weight=nn.Linear(H, V))
    with pytest.raises(ValueError, match=r"lm_bias must have shape \(37,\)"):
        mtp_loss(base(), hidden, labels, Model(), lm_bias=bias[1:])


@pytest.mark.parametrize("base", BASES)
def test_the_scaling_factor_is_a_constant_number(base):
    """A tensor with several elements weighted positions, and the gradient of a factor was dropped by one base loss."""
    call = functools.partial(mtp_loss, base(), hiddens(), labels_with_padding(), Model())
    factor = torch.tensor(0.5, dtype=torch.float64)
    torch.testing.assert_close(call(scaling_factor=factor), call(scaling_factor=0.5))
    for wrong, error, message in (
        (factor.clone().requires_grad_(), ValueError, "must not require a gradient"),
        (torch.ones(S), ValueError, "must be a number or a 0-d tensor"),
        (None, TypeError, "must be a number or a 0-d tensor, got NoneType"),
    ):
        with pytest.raises(error, match=f"scaling_factor {message}"):
            call(scaling_factor=wrong)
    with pytest.raises(TypeError, match=r"logits_dtype must be a torch.dtype or None, got str"):
        call(logits_dtype="float32")


def test_depths_in_one_tensor():
    hidden, labels, model = torch.stack(hiddens(grad=False)), labels_with_padding(), Model()
    expected = mtp_loss(MaskedCrossEntropy(), list(hidden), labels, model)
    torch.testing.assert_close(mtp_loss(MaskedCrossEntropy(), hidden, labels, model), expected)
    got = calculate_mtp_loss(
        MaskedCrossEntropy(), mtp_per_depth_logits=model.lm_head(hidden), labels=labels, model=model
    )
    torch.testing.assert_close(got, expected)
    with pytest.raises(ValueError, match=r"mtp_per_depth_h\[0\] must have shape"):
        mtp_loss(MaskedCrossEntropy(), hidden[0, 0, 0], labels, model)


def test_a_foreign_loss_with_other_argument_names():
    with pytest.raises(TypeError, match=r"loss_fn must take labels in its forward, got torch.*takes input, target"):
        mtp_loss(nn.CrossEntropyLoss(), hiddens(), labels_with_padding(), Model())


def test_a_seq_idx_of_another_dtype_is_named():
    model, hidden = Model(), hiddens(grad=False)
    output = (model.lm_head(hidden[0]), *hidden, torch.zeros(B, S, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"^output\[4\] must be .* seq_idx, int32 \[B, S\], got int64 of shape \(2, 11\)"
    ):
        PipelineCausalLMLoss(MaskedCrossEntropy(), model)(output, labels_with_padding())


def test_the_usual_ignored_label_has_weight_0_beside_another_one():
    targets = as_targets(torch.tensor([3, -100, 5]), ignore_index=3)
    weights = position_weights(torch.ones(1), targets, None, None)
    assert weights.tolist() == [0, 0, 1]
