"""``LinearLogits`` in the place of logits: its transform precedes that of the call; its fields; the older functions."""

import inspect
from dataclasses import replace

import pytest
import torch

import reference
from dllm_kernels import ops
from dllm_kernels.ops import LinearLogits
from tests.conftest import DEVICE
from tests.support.cases import BY_NAME, SKIP_ID, to_device, upstream_for
from tests.support.inputs import Source
from tests.support.op_cases import FIRST_OPS, Rows, results
from tests.support.parity import assert_close_with_grads

B, L, V, D = 2, 6, 11, 5
NAMES = (
    "token_nll", "weighted_nll", "row_stats", "row_objective", "topk_divergence", "mdlm", "block diffusion",
    "hybrid, one tensor", "idlm", "scdd",
)  # fmt: skip
IDS, ON = torch.arange(B * L, device=DEVICE).view(B, L) % 9 + 2, torch.ones(B, L, device=DEVICE)
every_case = pytest.mark.parametrize("name", NAMES)


def drawn(name):
    """Draw the inputs of a case; no target is the skipped column."""
    torch.manual_seed(0)
    inputs = to_device(BY_NAME[name].draw(B, L, V), DEVICE)
    ids = inputs[BY_NAME[name].targets]
    if name == "topk_divergence":
        return inputs | {"top_ids": torch.where(ids == SKIP_ID, -100, ids)}
    return inputs | {BY_NAME[name].targets: torch.where(ids == SKIP_ID, SKIP_ID + 2, ids)}


# Transforms of the record, and of the call.
TRANSFORMS = [
    ({"softcap": 3.0}, {"scale": 0.7}),
    ({"scale": 1.3}, {"softcap": 2.0}),
    ({"scale": 1.3, "skip_id": SKIP_ID}, {"softcap": 2.0, "scale": 0.7}),
    ({"softcap": 3.0, "scale": 1.3}, {"scale": 0.7, "skip_id": SKIP_ID}),
    ({"skip_id": SKIP_ID}, {"softcap": 2.0, "skip_id": SKIP_ID}),
    ({"softcap": 3.0, "scale": 1.3, "skip_id": SKIP_ID}, {}),
]


def twice_transformed(logits, first, second, *, skip=True):
    """Apply both transforms; a skipped column stays -inf."""
    for transform in (first, second):
        logits = reference.transformed(logits, **{k: v for k, v in transform.items() if k != "skip_id"})
    return reference.transformed(logits, skip_id=(first | second).get("skip_id") if skip else None)


@every_case
@pytest.mark.covering(1, most=2)
@pytest.mark.parametrize(("first", "second"), TRANSFORMS, ids=str)
def test_the_transform_of_the_record_precedes_that_of_the_call(name, first, second, backend):
    if name in ("scdd", "row_stats"):  # skips MASK by itself; a skipped column is no term of a mixture, see below
        first, second = ({k: v for k, v in steps.items() if k != "skip_id"} for steps in (first, second))
    case, inputs, source = BY_NAME[name], drawn(name), Source("low rank", chunk_size=4)
    loss = replace(case, transform=second)
    assert_close_with_grads(
        lambda *x: loss.logits_form(source.argument(*x, **first), inputs, backend=backend),
        lambda *x: case.oracle(twice_transformed(source.logits(*x), first, second), inputs),
        source.leaves((B, case.width * L), V, torch.float64, D=D),
        upstream_for(case, B, L).to(DEVICE),
    )


@pytest.mark.parametrize(("first", "second"), TRANSFORMS, ids=str)
def test_the_transform_of_the_record_precedes_that_of_other_ops(first, second):
    source = Source("head")
    leaves = source.leaves((B, L), V, torch.float64, D=D)
    transformed = twice_transformed(source.logits(*leaves), first, second)
    x, table = source.argument(*leaves, **first), torch.randn(V, 3, dtype=torch.float64, device=DEVICE)
    got = ops.linear_sample(x, temperature=0, **second)
    assert torch.equal(got.ids, transformed.argmax(-1))
    torch.testing.assert_close(got.log_probs, transformed.log_softmax(-1).amax(-1))
    torch.testing.assert_close(ops.soft_embedding(x, None, table, **second), transformed.softmax(-1) @ table)
    options = {k: v for k, v in second.items() if k != "scale"}
    log_probs = ops.token_log_probs(x, IDS, temperature=1 / second.get("scale", 1.0), **options).log_probs
    torch.testing.assert_close(log_probs, transformed.log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1))
    mix, skip_id = (ON.double() / 4, ON.double() / 2), (first | second).get("skip_id")
    plain = twice_transformed(source.logits(*leaves), first, second, skip=False)
    mixture = ops.row_stats(x, IDS, mix=mix, **second).mix
    torch.testing.assert_close(mixture, reference.row_stats(plain, IDS, mix, skip_id=skip_id).mix)


H, W = torch.randn(B, L, D), torch.randn(V, D)
# Fields of a record, options of the call, and the error.
BAD = [
    ({"softcap": 3.0}, {"softcap": 2.0}, ValueError, r"softcap must be None for logits that have one, 3\.0, got 2\.0"),
    ({"skip_id": 1}, {"skip_id": 2}, ValueError, r"skip_id must be that of the logits, 1, or None, got 2"),
    ({"softcap": -1.0}, {}, ValueError, r"softcap must be positive, from 1e-18 to 1e\+18, got -1\.0"),
    ({"scale": "2"}, {}, TypeError, r"scale must be a number or None, got str"),
    ({"skip_id": V}, {}, ValueError, rf"skip_id must lie in \[0, {V}\), got {V}"),
    ({"chunk_size": 0}, {}, ValueError, r"chunk_size must be at least 1, got 0"),
    ({"chunk_size": 2.0}, {}, TypeError, r"chunk_size must be an int, got float"),
    ({"num_active": -1}, {}, ValueError, r"num_active must be an int in \[0, 1?\d+\], got -1"),
    ({"num_active": 99}, {}, ValueError, r"num_active must be an int in \[0, 1?\d+\], got 99"),
    ({"logits_dtype": "float32"}, {}, TypeError, r"logits_dtype must be a torch\.dtype or None, got str"),
    ({"logits_dtype": torch.float16}, {}, ValueError, r"logits_dtype must be torch\.float32 or None for this head"),
    ({"extra": H}, {}, TypeError, r"extra must be a tuple of two tensors \(u, U\), got torch\.Tensor"),
    ({"bias": W}, {}, ValueError, r"\w*bias must have shape \(11,\) \(one entry per row of \w*weight\), got \(11, 5\)"),
]


@every_case
@pytest.mark.parametrize(("fields", "options", "error", "message"), BAD, ids=[bad[-1][:40] for bad in BAD])
def test_a_bad_field_of_the_record_is_named(name, fields, options, error, message):
    case, inputs = BY_NAME[name], {key: t.cpu() for key, t in drawn(name).items()}
    if name == "scdd" and "skip_id" in fields | options:
        pytest.skip("skips the MASK by itself")
    hidden = H.repeat(1, case.width, 1)
    with pytest.raises(error, match=f"^{message}"):
        replace(case, transform=options).logits_form(LinearLogits(hidden, W, **fields), inputs)


def test_a_head_beside_a_record_is_an_error():
    x = LinearLogits(H, W)
    for call in (ops.linear_sample, lambda x, **o: ops.soft_embedding(x, o.pop("head", None), W, **o)):
        for name, value in {"head": W, "bias": W[:, 0], "extra": (H, W), "num_active": 3, "chunk_size": 2}.items():
            with pytest.raises(ValueError, match=rf"^{name} must be None for hidden=LinearLogits\(...\), "):
                call(x, **{name: value})


OLDER = [case for case in FIRST_OPS if case.older]
OF_TEACHER = {"teacher_hidden", "teacher_weight", "teacher_bias", "teacher_extra"}
OF_HEAD = {"bias", "extra", "chunk_size", "num_active", "logits_dtype"}


@pytest.mark.parametrize("case", OLDER, ids=lambda case: case.older)
def test_an_older_function_has_the_signature_of_its_op_and_the_head(case):
    older, op = (inspect.signature(function).parameters for function in (getattr(ops, case.older), case.op))
    teacher = OF_TEACHER if case.name == "divergence" else {list(op)[1]}
    assert list(older)[2] in teacher
    of_op = op.keys() - {"logits", "teacher_logits", "inplace_backward"}
    assert older.keys() - {"hidden", "weight"} == of_op | OF_HEAD | teacher
    assert list(older)[:2] == ["hidden", "weight"]
    for parameter in older.values():
        if parameter.name in op:
            assert (parameter.default, parameter.kind) == (op[parameter.name].default, op[parameter.name].kind)
        elif parameter.name in OF_HEAD:
            assert (parameter.default, parameter.kind) == (None, parameter.KEYWORD_ONLY)


@pytest.mark.parametrize("case", OLDER, ids=lambda case: case.older)
def test_an_older_function_is_its_op_of_a_record(case, backend):
    source, r = Source("low rank"), Rows.drawn(B, L, V=V, low=2, device=DEVICE)
    head = {"chunk_size": 4, "num_active": 12, "logits_dtype": torch.float32}
    options = {"softcap": 5.0, "scale": 0.7, "skip_id": 1, "backend": backend}
    found = []
    for function in (
        lambda h, w, b, *extra: case.of_hidden(h, w, r, bias=b, extra=list(extra), **head, **options),
        lambda *x: case(source.argument(*x, **head), r, **options),
    ):
        leaves = [leaf.requires_grad_() for leaf in source.leaves((B, L), V, torch.float16, D=D)]
        out = function(*leaves)
        grads = torch.autograd.grad([t.sum() for t in case.values(out)], leaves)
        found.append([*results(out).values(), *grads])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
