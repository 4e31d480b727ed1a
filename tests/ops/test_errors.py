"""Bad input: each message names the argument, the expected condition and the value, before any kernel runs."""

import functools
import itertools
import math
import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dllm_kernels import (
    BlockDiffusionCrossEntropyLoss,
    DFlashDecayLoss,
    DLLMLossOutput,
    FusedLinearCrossEntropy,
    MaskedCrossEntropy,
    MDLMCrossEntropyLoss,
    SCDDLoss,
    acceptance_length,
    calculate_mtp_loss,
    compute_per_token_nll,
    corrupt_uniform,
    draft_accuracy,
    scdd_schedule,
)
from dllm_kernels.ops import (
    LinearLogits,
    divergence,
    linear_divergence,
    linear_sample,
    linear_token_nll,
    row_stats,
    soft_embedding,
    token_log_probs,
    token_nll,
    weighted_nll,
)
from tests.conftest import usually
from tests.support.cases import BY_NAME, FIRSTS, LOSSES, Case
from tests.support.op_cases import FIRST_OPS

B, L, V, D = 2, 3, 5, 4
X, H, W, BIAS = torch.randn(B, L, V), torch.randn(B, L, D), torch.randn(V, D), torch.randn(V)
Y, ON = torch.zeros(B, L, dtype=torch.long), torch.ones(B, L)
META = torch.device("meta")


def raises(error, message, function, *args, **options):
    with pytest.raises(error, match="^" + re.escape(message)):
        function(*args, **options)


FLOATS = "float16, bfloat16, float32, float64"
INTS = "int64, int32, int16, int8, uint8"


ROWS = {"stored": ("logits", X), "head": ("hidden", LinearLogits(H, W))}


@pytest.mark.parametrize("kind", ROWS)
def test_row_statistics(kind):
    rows, x = ROWS[kind]
    op = functools.partial(row_stats, x)
    shape = (
        f"ids must have shape (2, 3) or (2, 3, 'K') (that of {rows} without its last dimension, "
        "or one more of K >= 1 ids)"
    )
    for bad in (Y[:, 1:], Y[..., None][..., :0], Y[..., None, None], Y[0]):
        raises(ValueError, f"{shape}, got {tuple(bad.shape)}", op, bad)
    raises(TypeError, "mix must be a tuple of two tensors (a, b), got torch.Tensor", op, Y, mix=ON)
    raises(TypeError, "mix must be a tuple of two tensors (a, b), got 1 of them", op, Y, mix=(ON,))
    raises(TypeError, "mix[1] must be a torch.Tensor, got float", op, Y, mix=(ON, 1.0))
    raises(ValueError, f"mix[0] must have dtype {FLOATS}, got int64", op, Y, mix=(Y, ON))
    of = f"(that of {rows} without its last dimension)"
    raises(ValueError, f"mix[1] must have shape (2, 3) {of}, got (2, 2)", op, Y, mix=(ON, ON[:, 1:]))
    raises(ValueError, f"mix[1] must be on cpu like {rows}, got meta", op, Y, mix=(ON, ON.to(META)))
    wants = ON.clone().requires_grad_()
    raises(ValueError, "mix[0] must not require a gradient, since it is taken as a constant", op, Y, mix=(wants, ON))
    raises(IndexError, "ids", op, torch.stack([Y, Y + V], -1), check_targets=True)
    raises(IndexError, "ids", op, Y, check_targets=True, skip_id=0)


def test_a_scalar_is_no_row_of_logits():
    raises(ValueError, "logits must have shape [..., V] with V >= 1, got ()", token_nll, torch.tensor(1.0), Y)


BAD_TARGETS = ((-1, (1, 2)), (-99, (0, 0)), (V, (0, 1)), (10**12, (1, 0)))


@pytest.mark.parametrize(("bad", "where"), BAD_TARGETS)
@pytest.mark.parametrize("by", ["argument", "environment"])
@pytest.mark.parametrize("x", [x for _, x in ROWS.values()], ids=ROWS)
@pytest.mark.parametrize("weights", [(), (ON,)], ids=["token_nll", "weighted_nll"])
def test_targets_out_of_range_are_named_on_request(x, weights, by, bad, where, monkeypatch):
    def op(y, **options):
        return (weighted_nll if weights else token_nll)(x, y, *weights, **options)

    y = Y.clone()
    y[where] = bad
    y[1, 1] = -100
    message = f"targets must lie in [0, 5) or be -100, got {bad} at position {where}"
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "0")
    op(y)  # without the check, the result is NaN, which other tests cover
    if by == "argument":
        raises(IndexError, message, op, y, check_targets=True)
    else:
        monkeypatch.setenv("DLLM_KERNELS_CHECK", "1")
        raises(IndexError, message, op, y)
        op(y, check_targets=False)
    op(Y, check_targets=True)


def test_a_bad_target_of_a_single_row():
    message = f"targets must lie in [0, {V}) or be -100, got 7 at position ()"
    raises(IndexError, message, token_nll, X[0, 0], torch.tensor(7), check_targets=True)


SIZES = ((TypeError, "must be an int, got str", "8"), (TypeError, "must be an int, got float", 1.5),
         (TypeError, "must be an int, got bool", True), (ValueError, "must be at least 1, got 0", 0))  # fmt: skip
forms = pytest.mark.parametrize("form", ["logits", "hidden"])


# Losses. Each call below has one bad argument, chosen by its role in ``tests/support/cases.py``; all others are valid.


def _per_token(logits, target_ids, **options):
    return compute_per_token_nll(logits, target_ids, **options)


def _chunk(hidden_chunk, lm_head_weight, lm_head_bias, target_chunk):
    return DFlashDecayLoss._chunk_nll(hidden_chunk, lm_head_weight, lm_head_bias, target_chunk)[0]


def _masked(logits, labels, **options):
    return MaskedCrossEntropy()(logits, labels, **options)


def _linear(hidden_states, labels, lm_weight, lm_bias=None, **options):
    return FusedLinearCrossEntropy()(hidden_states, labels, lm_weight, lm_bias=lm_bias, **options)


def any_shape(name, loss, targets, rows, roles=(), head=("lm_head_weight", "lm_head_bias")):
    """Build a case of an op, or of a loss that is not in ``dllm_kernels.losses``, and takes rows of any shape."""
    draw = lambda B, L, V: {targets: torch.randint(0, V, (B, L))}  # noqa: E731
    return Case(name, loss, draw, None, roles={targets: "targets", **dict(roles)}, rows=rows, head=head)


def op_case(case):
    """Build a case of an op whose other arguments are valid."""
    roles = {"active": "active", **dict.fromkeys(case.factors, "factor")}

    def of_rows(**arguments):
        return case.op(**dict.fromkeys(case.factors, ON) | arguments)[0].sum()

    return any_shape(case.name, of_rows, case.ids, ("logits", "hidden"), roles, ("weight", "bias"))


MTP_ROLES = {"loss_weights": "weight", "num_label_tokens": "count"}
OPS = [op_case(case) for case in FIRST_OPS if case.ids]
OTHERS = (
    *((case, form) for case in OPS for form in ("logits", "hidden")),
    (any_shape("compute_per_token_nll", (_per_token, None), "target_ids", ("logits", "")), "logits"),
    (any_shape("chunk of DFlash", (None, _chunk), "target_chunk", ("", "hidden_chunk")), "hidden"),
    (any_shape("masked cross-entropy", (_masked, None), "labels", ("logits", ""), MTP_ROLES), "logits"),
    (
        any_shape(
            "linear cross-entropy", (None, _linear), "labels", ("", "hidden_states"), MTP_ROLES,
            ("lm_weight", "lm_bias"),
        ),
        "hidden",
    ),
)  # fmt: skip
FORMS = [(case, form) for case in LOSSES for form in ("logits", "hidden")]
# Cases that differ in their arguments, or in whether they shift; the others only in settings.
DISTINCT = {(case.loss, *case.roles.items(), case.shifted, case.extra): case for case in reversed(LOSSES)}.values()


def of_losses(cases):
    """Parametrize with these pairs of a case and a form, with those of other settings only with every case."""
    usual = [(case, form) for case, form in cases if case in DISTINCT or case not in LOSSES]
    return pytest.mark.parametrize(("case", "form"), usually(usual, cases, lambda pair: f"{pair[0].name}-{pair[1]}"))


every_loss, losses_alone = of_losses([*FORMS, *OTHERS]), of_losses(FORMS)


def losses_with_roles(*roles):
    """Parametrize with the losses, in both forms, that have an argument with one of these roles."""
    return of_losses([(case, form) for case, form in FORMS if set(roles) & set(case.roles.values())])


class Call:
    """A call of a loss with valid arguments; keyword arguments replace some of them."""

    def __init__(self, case, form, **options):
        torch.manual_seed(0)
        self.case, self.form, self.options = case, form, options
        rows = torch.randn(B, case.width * L, V if form == "logits" else D)
        self.arguments = case.arguments(form, rows, case.draw(B, L, V), (W, BIAS) if form == "hidden" else ())
        self.rows, self.targets = case.rows[form == "hidden"], case.targets

    def __call__(self, **changes):
        output = self.case.output(self.form, self.arguments | changes, **self.options)
        return output if isinstance(output, torch.Tensor) else output.total_loss

    def of(self, *roles):
        """Yield (name, valid value) of the arguments with these roles, including arguments that are not drawn."""
        for name, role in self.case.roles.items():
            name = f"causal_{self.form}" if name == "causal" else name
            if role in roles and (role != "rows" or name in self.arguments):
                yield name, self.arguments.get(name, 3 if role == "count" else ON)


def invalid_values(role, name, good, call):
    """Return (error, beginning of the message, invalid values that cause it) for an argument of this role."""
    if role == "count":
        return [
            (TypeError, f"{name} must be a number or a 0-d tensor, got ", ("3", True, [6])),
            (ValueError, f"{name} must be a number or a 0-d tensor, got a tensor of shape (2,)", (torch.ones(2),)),
        ]
    tensor = TypeError, f"{name} must be a torch.Tensor, got ", (6, [0], True)
    if role == "unused":
        return [tensor]
    shape = f"{name} must have shape (2, 3) (that of {call.targets}), got "
    like = call.rows if role == "active" else call.targets
    wrong = [
        tensor,
        (ValueError, shape, (good[:, :2], good[:, :1], good[0], torch.tensor(6))),
        (ValueError, f"{name} must be on cpu like {like}, got meta", (good.to(META),)),
    ]
    if role == "ids":
        return [*wrong, (ValueError, f"{name} must have dtype {INTS}, got bool", (Y.bool(),))]
    wrong.append((ValueError, f"{name} must have dtype bool, ", (ON.to(torch.complex64),)))
    if role in ("probability", "time"):
        swapped = f"{name} must hold probabilities, got bool; are noise_mask and p_mask swapped?"
        wrong.append((ValueError, swapped, (ON.bool(),)))
    return wrong


@pytest.mark.everyday(24)
@every_loss
def test_invalid_arguments(case, form):
    call = Call(case, form)
    assert call().isfinite().all()
    for role in sorted(set(case.roles.values()) - {"targets", "rows"}):
        for name, good in call.of(role):
            for error, message, values in invalid_values(role, name, good, call):
                for value in values:
                    raises(error, message, call, **{name: value})


@every_loss
def test_invalid_rows_and_targets(case, form):
    call = Call(case, form)
    rows, targets, (_, N, size) = call.rows, call.targets, call.arguments[call.rows].shape
    for name, *_ in ((rows,), *call.of("rows")):
        x = call.arguments[name]
        wrong = functools.partial(lambda value, name: call(**{name: value}), name=name)
        raises(TypeError, f"{name} must be a torch.Tensor, got list", wrong, [])
        raises(ValueError, f"{name} must have dtype {FLOATS}, got int64", wrong, x.long())
        if form == "logits":
            raises(ValueError, f"{name} must have shape [..., V] with V >= 1, got (2, {N}, 0)", wrong, x[..., :0])
        if case in LOSSES:
            fits = f"(2, {N}, {size}) to go with {targets} of shape (2, 3)"
            for bad in (x[:, 1:], torch.cat([x, x[:, :1]], 1)):
                raises(ValueError, f"{name} must have shape {fits}, got {tuple(bad.shape)}", wrong, bad)
    y = call.arguments[targets]
    raises(TypeError, f"{targets} must be a torch.Tensor, got int", call, **{targets: 3})
    for bad, got in ((y.float(), "float32"), (y.bool(), "bool")):
        raises(ValueError, f"{targets} must have dtype {INTS}, got {got}", call, **{targets: bad})
    if case in LOSSES:
        layout = "[B, L, V]" if form == "logits" else "[B, L, D]"
        flat = call.arguments[rows].flatten(0, 1)
        raises(ValueError, f"{targets} must have shape [B, L], got (6,)", call, **{targets: y.flatten()})
        raises(ValueError, f"{rows} must have shape {layout}, got ({2 * N}, {size})", call, **{rows: flat})
    elif case.name not in ("masked cross-entropy", "row_stats"):  # these take other shapes, too
        message = f"{targets} must have shape (2, 3) (that of {rows} without its last dimension), got (2, 2)"
        raises(ValueError, message, call, **{targets: y[:, :2]})


def test_a_model_output_in_place_of_its_tensor():
    output, body = SimpleNamespace(logits=X), SimpleNamespace(last_hidden_state=H)
    got = "must be a torch.Tensor, got types.SimpleNamespace"
    raises(TypeError, f"logits {got}; pass its .logits", token_nll, output, Y)
    raises(TypeError, f"logits {got}; pass its .logits", MDLMCrossEntropyLoss(), output, Y, ON, ON, ON)
    with pytest.raises(TypeError, match=f"^targets {got}$"):
        token_nll(X, output)
    raises(TypeError, f"hidden {got}; pass its .last_hidden_state", token_nll, LinearLogits(body, W), Y)


@of_losses([(case, form) for case, form in (*FORMS, *OTHERS) if form == "hidden"])
def test_an_invalid_head(case, form):
    call = Call(case, form)
    hidden, (weight, bias), N = call.rows, case.head, call.arguments[call.rows].shape[1]
    for error, message, value in (
        (TypeError, "must be a torch.Tensor, got NoneType", None),
        (ValueError, f"must have dtype {FLOATS}, got int64", W.long()),
        (ValueError, "must have shape [V, D], got (4,)", W[0]),
        (ValueError, "must have shape [V, D] with V >= 1 and D >= 1, got (0, 4)", W[:0]),
        (ValueError, "must have shape [V, D] with V >= 1 and D >= 1, got (5, 0)", W[:, :0]),
    ):
        raises(error, f"{weight} {message}", call, **{weight: value})
    for error, message, value in (
        (TypeError, "must be a torch.Tensor, got float", 0.0),
        (ValueError, f"must have shape (5,) (one entry per row of {weight}), got (4,)", BIAS[1:]),
        (ValueError, f"must have dtype {FLOATS}, got int64", BIAS.long()),
        (
            ValueError,
            f"must have the dtype of {hidden}, torch.float32, unless torch.autocast is on, got torch.bfloat16",
            BIAS.bfloat16(),
        ),
    ):
        raises(error, f"{bias} {message}", call, **{bias: value})
    for name, *_ in ((hidden,), *call.of("rows")):
        h = call.arguments[name]
        fits = f"[..., 4] to go with {weight} [V, D] = (5, 4), got (2, {N}, 3)"
        raises(ValueError, f"{name} must have shape {fits}", call, **{name: h[..., :3]})
        of = f"the dtype of {name}, torch.bfloat16, unless torch.autocast is on, got torch.float32"
        raises(ValueError, f"{weight} must have {of}", call, **{name: h.bfloat16()})


@pytest.mark.everyday(23)
@losses_alone
def test_unused_arguments_have_no_effect(case, form):
    """Match the original, which does not read the unused argument; None is accepted, too."""
    call = Call(case, form)
    expected = call()
    for name, good in call.of("unused"):
        for value in (None, good, good[:1], 7 * good):
            assert torch.equal(call(**{name: value}), expected)
    for name, good in call.of("mask"):
        if name not in call.arguments:
            for value in (None, good, good.bool(), good.long()):
                assert torch.equal(call(**{name: value}), expected)


@pytest.mark.everyday(25)
@every_loss
def test_constants_must_not_require_a_gradient(case, form):
    """The original would compute a gradient for these arguments."""
    call = Call(case, form)
    for name, good in call.of("weight", "factor", "probability", "time", "count"):
        value = torch.as_tensor(good).float().clone().requires_grad_()
        message = f"{name} must not require a gradient, since it is taken as a constant; detach it"
        raises(ValueError, message, call, **{name: value})
        call(**{name: value.detach()})
        with torch.no_grad():
            call(**{name: value})
    for name in case.constants:
        for value in (torch.tensor(0.5, requires_grad=True), torch.nn.Parameter(torch.tensor(0.5))):
            call = Call(replace(case, settings={**case.settings, name: value}), form)
            raises(ValueError, f"{name} must not require a gradient, since it is taken as a constant; detach it", call)
            with torch.no_grad():
                call()


@losses_with_roles("mask")
def test_masks_that_are_only_compared_may_require_a_gradient(case, form):
    """They receive no gradient in the original either."""
    call = Call(case, form)
    for name, good in call.of("mask"):
        assert torch.equal(call(**{name: good.float().clone().requires_grad_()}), call(**{name: good}))


@of_losses([*FORMS, *OTHERS[: 2 * len(OPS)]])
def test_invalid_options(case, form):
    arguments = Call(case, form).arguments
    output = functools.partial(case.output, form, arguments)
    for backend in ("tpu", None):
        raises(ValueError, f"backend must be one of auto, triton, torch, got {backend!r}", output, backend=backend)
    for error, message, size in SIZES if form == "hidden" else ():
        raises(error, f"chunk_size {message}", output, chunk_size=size)
    for bad in (-1, 99, 2.0, True) if form == "hidden" else ():
        N = arguments["hidden"][..., 0].numel()
        sizes = f"{N}|{N // 2}|{2 * N}"  # rows of one half, of two branches
        with pytest.raises(ValueError, match=rf"^num_active must be an int in \[0, ({sizes})\], got {bad}$"):
            case.output(form, arguments | {"num_active": bad})


def all_on(call):
    """Turn on all masks, and pack one document per row, so that all targets of the loss count."""
    masks = {name: ON for name, _ in call.of("mask", "weight", "noise")}
    masks |= {"segment_ids": torch.zeros_like(Y)} if "segment_ids" in call.arguments else {}
    return masks | {name: ON / 2 for name, _ in call.of("probability")}


@pytest.mark.everyday(40)
@every_loss
def test_bad_targets_are_named(case, form, monkeypatch):
    """On a CPU, unless the check is switched off. The error gives the position in the caller's tensor.

    This also holds if the loss shifts the targets and never predicts the first token. Rows that do not count are not
    checked.
    """
    monkeypatch.delenv("DLLM_KERNELS_CHECK", raising=False)
    call = Call(case, form)
    name, on, masks = call.targets, all_on(call), dict(call.of("mask", "weight", "noise", "active", "factor"))
    message = f"{name} must lie in [0, {V}) or be -100, got"
    for where, bad in itertools.product(((1, 2), (0, 1)), (7, -1, -99)):
        y, off = Y.clone(), ON.clone()
        y[where], y[1, 1], off[where] = bad, -100, 0
        raises(IndexError, f"{message} {bad} at position {where}", call, **on, **{name: y})
        if masks:
            call(**on | dict.fromkeys(masks, off), **{name: y})
    first = Y.clone()
    first[:, 0] = 7
    if predicts_the_first_token(call):
        raises(IndexError, f"{message} 7 at position (0, 0)", call, **on, **{name: first})
    else:
        call(**on, **{name: first})
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "0")
    call(**on, **{name: y})


def predicts_the_first_token(call):
    """Return whether the loss depends on the first token when all masks are on."""
    other = Y.clone()
    other[:, 0] = 1
    values = [call(**{**all_on(call), call.targets: y}) for y in (Y, other)]
    return not torch.equal(*values)


@pytest.mark.everyday(23)
@pytest.mark.parametrize("bad", [-0.5, 1.5, float("nan"), float("inf"), 2])
@losses_with_roles("probability")
def test_probabilities_lie_between_0_and_1_where_they_are_used(case, form, bad):
    call = Call(case, form)
    p = ON.clone() if isinstance(bad, float) else ON.long()
    p[1, 2] = bad
    on = all_on(call) | {"p_mask": p}
    message = f"p_mask must lie in [0, 1] where it is used, got {bad} at position (1, 2)"
    raises(ValueError, message, call, **on)
    off = ON.clone()
    off[1, 2] = 0
    assert call(**(on | {"noise_mask": off})).isfinite()
    assert call(**(on | {"loss_mask": off})).isfinite()
    for good in (torch.zeros(B, L), ON, ON.long(), ON.half()):
        assert call(**(on | {"p_mask": good})).isfinite()


PROBABLE = [case for case in FIRSTS if "probability" in case.roles.values()]
probable = pytest.mark.parametrize("case", PROBABLE, ids=lambda case: case.name)


@pytest.mark.exhaustive
@probable
def test_no_value_is_read_while_compiling(case):
    call = Call(case, "logits")
    on = all_on(call)
    compiled = torch.compile(lambda p: call(**(on | {"p_mask": p})), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ON / 2), call(**(on | {"p_mask": ON / 2})))
    compiled(ON * 2)


@forms
def test_seq_len_of_idlm(form):
    call = Call(BY_NAME["idlm"], form)
    raises(ValueError, "seq_len must be the length of target_ids, 3, got 6", call, seq_len=6)
    raises(TypeError, "seq_len must be an int, got float", call, seq_len=3.0)
    raises(TypeError, "seq_len must be an int, got bool", call, seq_len=True)
    one = call.arguments[form][:, :L]
    fits = f"(2, 6, {one.shape[2]}) to go with target_ids of shape (2, 3)"
    raises(ValueError, f"{form} must have shape {fits}, got (2, 3, {one.shape[2]})", call, **{form: one})
    assert call(seq_len=np.int64(3)).isfinite()


def test_a_type_is_named_with_its_module():
    """The module is named, because other libraries have classes of the same name."""
    message = "generator must be a torch.Generator or None, got numpy.random._generator.Generator"
    raises(TypeError, message, corrupt_uniform, Y, ON, 0, generator=np.random.default_rng(0))


SIZE_OF_CHUNK = [(size, error, f"chunk_size {message}") for error, message, size in SIZES]
NO_ALPHA = "alpha must be a number or a 0-d tensor, got "


NORMALIZE = "normalize must be one of tokens, rows, mean, blocks, sequences, sequence_blocks, got 'sum'"
NO_GAMMA, NO_COST = "loss_gamma must be a number ", "confidence_weight must be finite and non-negative, got "
SHIFT = {"shift": [("no", TypeError, "shift must be a bool, got str")]}
PARAMETER = torch.nn.Parameter(torch.tensor(2.0))
# case -> setting -> (invalid value, error, message)
SETTINGS = {
    "idlm": {
        "clean_loss_weight": [
            *((value, TypeError, f"clean_loss_weight must be a number, got {kind}") for value, kind in (
                ("0.2", "str"), (True, "bool"), (PARAMETER, "torch.nn.parameter.Parameter"),
                (Fraction(1, 2), "fractions.Fraction"),
            )),
            *((value, ValueError, f"clean_loss_weight must be finite, got {value}") for value in (math.nan, math.inf)),
        ],
        "auto_balance": [("no", TypeError, "auto_balance must be a bool, got str")],
    },
    "scdd": {
        "mask_token_id": [
            (1.0, TypeError, "mask_token_id must be an int, got float"),
            (True, TypeError, "mask_token_id must be an int, got bool"),
            (-1, ValueError, "mask_token_id must be at least 0, got -1"),
        ],
        "num_timesteps": [
            (1, ValueError, "num_timesteps must be at least 2, got 1"),
            (10.0, TypeError, "num_timesteps must be an int, got float"),
        ],
        "max_ratio": [(1.0, ValueError, "max_ratio must lie in [0, 1), got 1.0")],
        "gamma_shape": [(None, TypeError, "gamma_shape must be a number, got NoneType")],
        "t_peak": [(1.0, ValueError, "t_peak must lie in (0, 1), got 1.0")],
        "chunk_size": SIZE_OF_CHUNK,
    },
    "dflash": {
        "normalize": [("sum", ValueError, NORMALIZE)],
        "loss_gamma": [
            (0.0, ValueError, NO_GAMMA + "other than 0, or None, got 0.0"),
            (math.nan, ValueError, NO_GAMMA + "other than 0, or None, got nan"),
            ("7", TypeError, NO_GAMMA + "or None, got str"), (True, TypeError, NO_GAMMA + "or None, got bool"),
            (PARAMETER, ValueError, "loss_gamma must not require a gradient"),
        ],
        "position_weights": [
            (word, ValueError, "position_weights must be one of decay, dpace, ") for word in ("linear", None)
        ],
        "dpace_alpha": [
            (2, ValueError, "dpace_alpha must lie in [0, 1], got 2"),
            (-1, ValueError, "dpace_alpha must lie in [0, 1], got -1"),
            (None, TypeError, "dpace_alpha must be a number, got NoneType"),
        ],
        "anchor_row": [("no", TypeError, "anchor_row must be a bool, got str")],
        "chunk_size": SIZE_OF_CHUNK,
    },
    "distillation": {
        "kind": [
            ("js", ValueError, "kind must be one of kl, "),
            (["kl"], TypeError, "kind must be a name or a dict of names and coefficients, got list"),
        ],
        "beta": [(0.5, ValueError, "beta only applies to kind='jsd', got kind=")],
        "confidence": [("draft", ValueError, "confidence must be one of target, teacher, acceptance, got 'draft'")],
        "temperature": [
            (0.0, ValueError, "temperature must be positive, from "),
            (None, TypeError, "temperature must be a number, got NoneType"),
        ],
        "confidence_weight": [
            ("1", TypeError, "confidence_weight must be a number, got str"),
            *((value, ValueError, f"{NO_COST}{value}") for value in (-1.0, math.nan)),
        ],
        "decay_from": [
            (1.0, TypeError, "decay_from must be an int, got float"),
            (-1, ValueError, "decay_from must be at least 0, got -1"),
        ],
        "normalize": [("sum", ValueError, NORMALIZE)],
        "loss_gamma": [(0.0, ValueError, NO_GAMMA + "other than 0, or None, got 0.0")],
    },
    "hybrid": SHIFT | {
        "alpha": [
            (torch.ones(2, 1, 1), ValueError, f"{NO_ALPHA}a tensor of shape (2, 1, 1), torch.float32"),
            (torch.ones(2), ValueError, f"{NO_ALPHA}a tensor of shape (2,), torch.float32"),
            (torch.tensor(1j), ValueError, f"{NO_ALPHA}a tensor of shape (), torch.complex64"),
            (None, TypeError, f"{NO_ALPHA}NoneType"),
            *((value, ValueError, f"alpha must be finite, got {value}") for value in (math.nan, math.inf, -math.inf)),
        ],
    },
    "mdlm": SHIFT, "block diffusion": SHIFT,
}  # fmt: skip


@forms
@pytest.mark.parametrize(("name", "setting"), [(name, setting) for name, of in SETTINGS.items() for setting in of])
def test_settings_are_checked_at_construction_and_in_each_call(name, setting, form):
    """In each call, too, because attributes may be assigned later."""
    call = Call(BY_NAME[name], form)
    for value, error, message in SETTINGS[name][setting]:
        raises(error, message, call.case.loss, **{**call.case.settings, setting: value})
        loss = call.case.loss(**call.case.settings)
        setattr(loss, setting, value)
        raises(error, message, Case._of(loss, form), **call.arguments)


scdd = of_losses([(case, form) for case, form in FORMS if case.loss is SCDDLoss])


@scdd
def test_scdd_needs_the_noisy_tokens(case, form):
    message = "noisy_input_ids must be given, got None; pass the tokens that the model received"
    raises(ValueError, message, Call(case, form), noisy_input_ids=None)


@scdd
@pytest.mark.parametrize("bad", [-0.5, 1.5, float("nan"), float("inf")])
def test_times_of_scdd_lie_between_0_and_1_where_they_are_used(case, form, bad):
    call, p, off = Call(case, form), ON / 2, ON.clone()
    on = all_on(call)
    p[1], off[1] = bad, 0
    message = f"p_mask must lie in [0, 1] where it is used, got {bad} at position (1, 0)"
    raises(ValueError, message, call, **on, p_mask=p)
    assert call(**(on | {"loss_mask": off}), p_mask=p).isfinite()  # in a sequence that is not supervised


def test_statistics_are_not_rounded():
    loss = SCDDLoss(1)
    loss.fp32_upcast = False
    message = "fp32_upcast must be True for a loss that is not a sum of NLLs, got False"
    raises(ValueError, message, loss, X, Y, ON, ON, ON, noisy_input_ids=Y)
    raises(ValueError, message, loss.forward_fused, H, W, Y, ON, ON, ON, noisy_input_ids=Y)


@forms
def test_the_mask_of_scdd_lies_in_the_vocabulary(form):
    message = f"mask_token_id must lie in [0, {V}), got {V}"
    case = replace(BY_NAME["scdd"], settings={"mask_token_id": V})
    raises(ValueError, message, Call(case, form))


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"max_ratio": 1.0}, ValueError, "max_ratio must lie in [0, 1), got 1.0"),
        ({"max_ratio": -0.1}, ValueError, "max_ratio must lie in [0, 1), got -0.1"),
        ({"max_ratio": float("nan")}, ValueError, "max_ratio must lie in [0, 1), got nan"),
        ({"max_ratio": "0.1"}, TypeError, "max_ratio must be a number, got str"),
        ({"gamma_shape": float("nan")}, ValueError, "gamma_shape must be finite, got nan"),
        ({"gamma_shape": float("inf")}, ValueError, "gamma_shape must be finite, got inf"),
        ({"gamma_shape": 2**40}, ValueError, "gamma_shape must be nearer to 0 at t_peak=0.5, because c(t) leaves the "),
        ({"gamma_shape": -(2.0**40)}, ValueError, "gamma_shape must be nearer to 0 at t_peak=0.5, because c(t) "),
        ({"gamma_shape": True}, TypeError, "gamma_shape must be a number, got bool"),
        ({"t_peak": 0.0}, ValueError, "t_peak must lie in (0, 1), got 0.0"),
        ({"t_peak": 1}, ValueError, "t_peak must lie in (0, 1), got 1"),
        ({"t_peak": None}, TypeError, "t_peak must be a number, got NoneType"),
    ],
)
def test_scdd_schedule_settings(setting, error, message):
    good = {"max_ratio": 0.1, "gamma_shape": 1.0, "t_peak": 0.5}
    raises(error, message, scdd_schedule, torch.rand(2), **(good | setting))


def test_scdd_schedule_times():
    good = {"max_ratio": 0.1, "gamma_shape": 1.0, "t_peak": 0.5}
    raises(TypeError, "t must be a torch.Tensor, got float", scdd_schedule, 0.5, **good)
    raises(ValueError, f"t must have dtype {FLOATS}, got int64", scdd_schedule, torch.tensor([1]), **good)


@forms
def test_blocks_of_dflash(form):
    call = Call(BY_NAME["dflash"], form)
    raises(ValueError, "block_size must be at least 1, got 0", call, block_size=0)
    raises(TypeError, "block_size must be an int, got float", call, block_size=4.0)
    raises(ValueError, "T must be a multiple of block_size - 1", call, block_size=3)


@forms
@pytest.mark.parametrize(
    "settings",
    [{"position_weights": "dpace"}, {"loss_gamma": None, "normalize": "blocks"}, {"loss_gamma": 2.0}],
    ids=str,
)
def test_a_loss_over_blocks_needs_whole_blocks(form, settings):
    call = Call(replace(BY_NAME["dflash"], settings=settings), form)
    raises(ValueError, "T must be a multiple of block_size - 1 for ", call, block_size=3)
    call = Call(replace(BY_NAME["dflash"], settings=settings | {"anchor_row": True}), form)
    raises(ValueError, "T must be a multiple of block_size for ", call, block_size=4)


@forms
def test_the_blocks_of_each_sequence(form):
    call = Call(BY_NAME["dflash, sequence blocks"], form)
    shape = "num_blocks must have shape (2,) (one entry per sequence), got "
    raises(ValueError, shape + "()", call, num_blocks=torch.tensor(3))
    raises(ValueError, shape + "(3,)", call, num_blocks=torch.ones(3))
    raises(TypeError, "num_blocks must be a torch.Tensor, got int", call, num_blocks=3)
    no_count = "num_blocks must hold counts, got a bool tensor; sum the mask, any() does not count"
    raises(ValueError, no_count, call, num_blocks=torch.ones(2).bool())
    raises(ValueError, "num_blocks must be on cpu like target_ids, got meta", call, num_blocks=torch.ones(2).to(META))
    wants = torch.ones(2, requires_grad=True)
    raises(ValueError, "num_blocks must not require a gradient", call, num_blocks=wants)


def test_acceptance_length_arguments():
    correct, on = torch.ones(2, 6).bool(), torch.ones(2, 6)
    raises(TypeError, "output must be a torch.Tensor, got float", acceptance_length, 0.5, on, 4)
    of_rows = "output must have shape [B, T] or [B, blocks, k], got (1, 1, 2, 6)"
    raises(ValueError, of_rows, acceptance_length, correct[None, None], on[None, None], 4)
    raises(
        ValueError, "mask must have shape (2, 6) (that of output), got (2,)", acceptance_length, correct, on[:, 0], 4
    )
    raises(ValueError, "block_size must be at least 1, got 0", acceptance_length, correct, on, 0)
    raises(TypeError, "block_size must be an int, got NoneType", acceptance_length, correct, on, None)
    raises(ValueError, "T must be a multiple of block_size - 1 for ", acceptance_length, correct, on, 6)
    raises(ValueError, "T must be a multiple of block_size for ", acceptance_length, correct, on, 4, anchor_row=True)
    raises(TypeError, "bonus must be a bool, got str", acceptance_length, correct, on, 4, bonus="yes")
    raises(TypeError, "anchor_row must be a bool, got str", acceptance_length, correct, on, 4, anchor_row="yes")
    rows = DLLMLossOutput(on, on, draft_correct=correct)
    message = "mask must have shape (2, 6) (that of output), got (2,)"
    raises(ValueError, message, acceptance_length, rows, on[:, 0], 4)
    raises(TypeError, "output must be the output of a loss, got int", draft_accuracy, 1)
    other = BlockDiffusionCrossEntropyLoss()(X, Y, ON, ON, ON)
    raises(ValueError, "output must have draft_correct, which DFlashDecayLoss returns", acceptance_length, other, ON, 4)
    one = torch.zeros(2, 6)
    for value, got in ((0.3, "0.30000001192092896"), (5, "5.0")):
        one[1, 2] = value
        message = f"output must hold 0 or 1, got {got} at position (1, 2); pass sampling=True with acceptance rates"
        raises(ValueError, message, acceptance_length, one, on, 4)
    for value in (-1.0, 5.0):
        one[1, 2] = value
        message = f"output must lie in [0, 1] where it is used, got {value} at position (1, 2)"
        raises(ValueError, message, acceptance_length, one, on, 4, sampling=True)
        of_blocks = message.replace("(1, 2)", "(1, 0, 2)")
        raises(ValueError, of_blocks, acceptance_length, one.view(2, 2, 3), on.view(2, 2, 3), 4, sampling=True)
    unread = on.clone()
    unread[1, 2] = 0
    assert acceptance_length(one, unread, 4, sampling=True) == 0
    given = torch.tensor([[1, 1], [3, 1]])  # a row of a given token is not read, nor those behind it
    assert acceptance_length(one.roll(-1, 1), on, 4, sampling=True, prefix=given) == 0


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_integers_of_numpy_are_integers(integer):
    sizes = {"num_active": 6, "chunk_size": 2}
    numpys = {name: integer(size) for name, size in sizes.items()}
    for call in (lambda x: token_nll(x, Y), lambda x: weighted_nll(x, Y, ON)):
        torch.testing.assert_close(*(call(LinearLogits(H, W, **o)).nll for o in (numpys, sizes)))
    loss = DFlashDecayLoss(chunk_size=integer(2))
    torch.testing.assert_close(loss.forward_fused(H, W, Y, ON)[:2], DFlashDecayLoss().forward_fused(H, W, Y, ON)[:2])


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(D, V)


class Subclass(FusedLinearCrossEntropy):
    def forward(self, hidden_states, labels, lm_weight, **options):
        return super().forward(hidden_states, labels, lm_weight, **options)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("loss_fn", "made_from"),
    [
        (MaskedCrossEntropy(), "logits"),
        (MaskedCrossEntropy(), "h"),
        (FusedLinearCrossEntropy(), "h"),
        (Subclass(), "h"),
    ],
    ids=["masked, logits", "masked", "fused", "subclass"],
)
def test_bad_labels_of_mtp_are_named_by_the_callers_position(loss_fn, made_from, flat, monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_CHECK", "1")
    depths = [torch.randn(1, 6, D if made_from == "h" else V) for _ in range(2)]

    def call(labels, **options):
        labels = labels.flatten() if flat else labels
        return calculate_mtp_loss(
            loss_fn, labels=labels, model=Head(), **{f"mtp_per_depth_{made_from}": depths}, **options
        )

    for place in (1, 4, 5):
        labels = torch.zeros(1, 6, dtype=torch.long)
        labels[0, place] = 7
        where = (place,) if flat else (0, place)
        raises(IndexError, f"labels must lie in [0, {V}) or be -100, got 7 at position {where}", call, labels)
        depth_targets = [torch.zeros_like(labels), labels]
        depth_targets = [t.flatten() for t in depth_targets] if flat else depth_targets
        message = f"mtp_per_depth_targets[1] must lie in [0, {V}) or be -100, got 7 at position {where}"
        raises(IndexError, message, call, torch.zeros_like(labels), mtp_per_depth_targets=depth_targets)
    labels = torch.full((1, 6), -100)
    labels[0, 0] = 7  # no depth has it as a target
    assert call(labels).item() == 0


def test_mtp_errors_use_the_names_of_the_caller():
    h, labels = [torch.randn(B, L, D)] * 2, Y
    fused = functools.partial(calculate_mtp_loss, FusedLinearCrossEntropy(), labels=labels, model=Head())
    masked = functools.partial(calculate_mtp_loss, MaskedCrossEntropy(), labels=labels, model=Head())
    raises(TypeError, "labels must be a torch.Tensor, got list", fused, mtp_per_depth_h=h, labels=[0])
    raises(TypeError, "mtp_per_depth_h[1] must be a torch.Tensor, got list", fused, mtp_per_depth_h=[h[0], []])
    for call in (fused, masked):
        raises(
            ValueError, f"mtp_per_depth_h[0] must have dtype {FLOATS}, got int64", call, mtp_per_depth_h=[h[0].long()]
        )
    logits = [torch.zeros(B, L, V).long()]
    raises(
        ValueError, f"mtp_per_depth_logits[0] must have dtype {FLOATS}, got int64", masked, mtp_per_depth_logits=logits
    )
    raises(ValueError, "lm_weight must have shape [V, D], got (4,)", fused, mtp_per_depth_h=h, lm_weight=W[0])
    message = "mtp_per_depth_h[1] must have shape [..., 4] to go with lm_weight [V, D] = (5, 4), got (2, 3, 3)"
    raises(ValueError, message, fused, mtp_per_depth_h=[h[0], h[1][..., :3]])
    targets = [Y, Y.float()]
    message = f"mtp_per_depth_targets[1] must have dtype {INTS}, got float32"
    raises(ValueError, message, fused, mtp_per_depth_h=h, mtp_per_depth_targets=targets)
    message = "mtp_per_depth_targets[1] must be on cpu like mtp_per_depth_h[1], got meta"
    raises(ValueError, message, fused, mtp_per_depth_h=h, mtp_per_depth_targets=[Y, Y.to("meta")])


def test_an_unknown_backend_in_the_environment(monkeypatch):
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "fast")
    raises(ValueError, "DLLM_KERNELS_BACKEND must be one of auto, triton, torch, got 'fast'", token_nll, X, Y)
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "")  # as unset
    token_nll(X, Y)


def test_inplace_backward_under_compile():
    def step(x):
        return token_nll(x, Y, inplace_backward=True).nll.sum()

    with pytest.raises(Exception, match=r"inplace_backward must be False under torch.compile, got True"):
        torch.compile(step, backend="eager", fullgraph=True)(X.clone().requires_grad_())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tensors lie on the CPU on purpose")
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_triton_on_cpu_tensors_without_the_interpreter(by, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    source, options = "DLLM_KERNELS_BACKEND", {}
    if by == "argument":
        source, options = "backend", {"backend": "triton"}
    else:
        monkeypatch.setenv("DLLM_KERNELS_BACKEND", "triton")
    message = f"{source}='triton' needs a CUDA or ROCm tensor, got one on cpu; set TRITON_INTERPRET=1"
    raises(ValueError, message, token_nll, X, Y, **options)


@pytest.mark.exhaustive
def test_triton_that_is_not_installed():
    code = """
import sys
sys.modules["triton"] = None
import torch
from dllm_kernels.ops import token_nll
try:
    token_nll(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), backend="triton")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    message = "backend='triton' was asked for, but triton is not installed; GPU builds of torch install theirs (triton"
    assert done.stdout.startswith(message)


def test_an_ignore_index_is_an_int():
    for op in (token_nll, weighted_nll):
        others = (ON,) if op is weighted_nll else ()
        raises(TypeError, "ignore_index must be an int, got float", op, X, Y, *others, ignore_index=-100.0)


MODULE = torch.nn.Linear(D, V)
IN_PLACE_OF_THE_HEAD = {
    "linear_token_nll": (lambda w, b: linear_token_nll(H, w, Y, bias=b), "weight", "bias"),
    "mdlm": (
        lambda w, b: MDLMCrossEntropyLoss().forward_fused(H, w, Y, ON, ON, ON, lm_head_bias=b),
        "lm_head_weight", "lm_head_bias",
    ),
    "FusedLinearCrossEntropy": (
        lambda w, b: FusedLinearCrossEntropy()(H, Y, w, lm_bias=b), "lm_weight", "lm_bias",
    ),
    "linear_sample": (lambda w, b: linear_sample(H, w, bias=b, temperature=0), "head", "bias"),
    "soft_embedding": (lambda w, b: soft_embedding(H, w, W, bias=b), "head", "bias"),
    "linear_divergence": (lambda w, b: linear_divergence(H, w, H, bias=b), "weight", "bias"),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE_OF_THE_HEAD)
def test_a_module_in_place_of_a_parameter(name):
    call, weight, bias = IN_PLACE_OF_THE_HEAD[name]
    linear = "torch.nn.modules.linear.Linear"
    raises(TypeError, f"{weight} must be a torch.Tensor, got {linear}; pass its .weight", call, MODULE, None)
    raises(TypeError, f"{bias} must be a torch.Tensor, got {linear}; pass its .bias", call, W, MODULE)
    embedding = torch.nn.Embedding(V, D)
    kind = "torch.nn.modules.sparse.Embedding"
    raises(TypeError, f"{weight} must be a torch.Tensor, got {kind}; pass its .weight", call, embedding, None)
    with pytest.raises(TypeError, match=rf"^{weight} must be a torch.Tensor, got torch\.nn\.modules\.\S+\.Dropout$"):
        call(torch.nn.Dropout(), None)


@pytest.mark.parametrize("name", IN_PLACE_OF_THE_HEAD)
def test_a_partitioned_parameter(name):
    """DeepSpeed ZeRO-3 replaces the data of a parameter by an empty tensor while it is partitioned."""
    call, weight, bias = IN_PLACE_OF_THE_HEAD[name]
    partitioned = torch.nn.Parameter(torch.empty(0))
    partitioned.ds_id = 0
    message = "{} must hold its values, got an empty tensor of shape (0,), as DeepSpeed ZeRO-3 leaves a partitioned "
    raises(ValueError, message.format(weight), call, partitioned, None)
    raises(ValueError, message.format(bias), call, W, partitioned)
    with pytest.raises(ValueError, match=r"compute the loss inside deepspeed\.zero\.GatheredParameters"):
        call(partitioned, None)


@pytest.mark.parametrize("name", IN_PLACE_OF_THE_HEAD)
def test_a_local_shard_of_fsdp1(name):
    """Between forwards, ``use_orig_params=True`` leaves a flat or an empty shard, and False a freed view."""
    call, weight, bias = IN_PLACE_OF_THE_HEAD[name]
    freed = torch.randn_like(W)
    freed.untyped_storage().resize_(0)
    advice = "; it may be a local shard, as FullyShardedDataParallel leaves a parameter outside of its forward"
    empty = f"must hold its values, got an empty tensor of shape (0,){advice}"
    for shard, message in (
        (torch.randn(V * D // 2), f"must have shape [V, D], got ({V * D // 2},){advice}"),
        (torch.empty(0), empty),
        (freed, f"must hold its values, got a tensor without storage{advice}"),
    ):
        raises(ValueError, f"{weight} {message}", call, shard, None)
    raises(ValueError, f"{bias} {empty}", call, W, torch.empty(0))


def test_a_partitioned_embedding():
    raises(ValueError, "embedding must hold its values, ", soft_embedding, H, W, torch.empty(0))


@pytest.mark.parametrize(
    "call",
    [
        lambda **o: linear_sample(H, W, **o),
        lambda **o: divergence(X, X, **o),
        lambda **o: linear_divergence(H, W, H, **o),
    ],
)
def test_a_scale_that_overflows_by_the_temperature(call):
    for scale, temperature in ((1e10, 1e-10), (1e-10, 1e10)):
        message = (
            f"scale / temperature must lie between 1e-18 and 1e+18, got scale={scale} and temperature={temperature}"
        )
        raises(ValueError, message, call, scale=scale, temperature=temperature)
    raises(ValueError, "scale must be positive, from 1e-18 to 1e+18, got -1", call, scale=-1.0, temperature=2.0)
    assert call(scale=1e-10, temperature=1e-10)


def test_the_teachers_scale_is_named():
    own = {"temperature": 1e-10, "teacher_transform": {"scale": 1e10}}
    message = "teacher_transform['scale'] / temperature must lie between 1e-18 and 1e+18, got "
    raises(ValueError, message, divergence, X, X, **own)


def test_a_temperature_of_zero():
    """It is legal in samples only, and a message says so."""
    assert linear_sample(H, W, temperature=0).ids.shape == (B, L)
    raises(ValueError, "temperature must be 0, or positive, from ", linear_sample, H, W, temperature=-1)
    raises(ValueError, "temperature must be positive, from ", token_log_probs, X, Y, temperature=0)
