"""One ``Case`` per op and loss: everything that tests need to know about it.

All lists of losses in tests are created here.

Every test that holds for all losses (parity, laws, compilation, bad input, memory, inputs left alone) runs over these.
``B`` sequences of ``L`` tokens; the logits or hidden states have ``case.width * L`` positions a sequence.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import dllm_kernels as ours
import reference
from dllm_kernels import ops
from tests.support.op_cases import FIRST_OPS, OpCase, Rows
from tests.support.statistics import FLAGS, statistics

Inputs = dict[str, torch.Tensor]
SKIP_ID = 1
HEAD_OPTIONS = ("chunk_size", "num_active", "logits_dtype")
BLOCK = 4  # positions of a DFlash block, its anchor included: 3 are predicted

# Role of an argument, by its name; the checks of bad input use it (``tests/ops/test_errors.py``).
#   targets: token ids that the rows predict     ids: other token ids
#   mask: compared with 0     weight: a mask whose fractions count     noise: a mask without fractions
#   probability: in [0, 1] where it is used     time: a probability, of which column 0 is read
#   count: a number or 0-d tensor to divide by
#   rows: logits or hidden states besides the first     unused: of the right type, and not looked at
COMMON = {
    "target_ids": "targets",
    "noise_mask": "noise",
    "p_mask": "probability",
    "loss_mask": "mask",
    "loss_mask_ar": "mask",
    "num_diffusion_tokens": "count",
    "num_ar_tokens": "count",
    "causal": "unused",  # causal_logits or causal_hidden
    "noisy_input_ids": "unused",
}
DLLM_LOSS = "components.loss.dllm_loss"  # the framework's module of such losses
MASKS = (
    "logits, target_ids, noise_mask, p_mask, loss_mask, loss_mask_ar=None, "
    "num_diffusion_tokens=None, num_ar_tokens=None, "
)
FORWARD = {"": "fp32_upcast=True", ".forward": f"self, {MASKS}causal_logits=None"}


def _no_extra(form: str, rows: Any, inputs: Inputs) -> tuple[Any, dict[str, Any]]:
    return rows, {}


@dataclass(frozen=True, eq=False)
class Case:
    """Description of an op or loss for the tests. The defaults fit a loss of the common signature.

    Attributes:
        name: name in test ids.
        loss: the class, an op of logits, stored or a record, or a pair of functions: from logits and hidden states.
        draw: (B, L, V) -> the tensors of a call by name, drawn from torch's default generator.
        equation: the oracle; it receives the inputs, settings and options for which it has a parameter.
        settings: arguments of the constructor, or of the function.
        roles: the role of each argument of a call, with the values of ``COMMON``; other signatures need their own.
        rows: the argument names of the logits and of the hidden states.
        head: the argument names of the head's weight and bias.
        extra: (form, rows, inputs) -> the rows, and further arguments that are not tensors or are slices of the rows.
        derived_from: inputs that are not arguments; ``extra`` derives arguments from them.
        width: number of positions of the logits per token.
        separate: whether a model returns these positions as separate tensors.
        per_row: whether the value is one number per row, with ``width`` rows per token.
        linear_in: the input in which the value is linear, if any.
        rounds: whether it takes ``fp32_upcast``.
        shifted: whether the loss of a slice of a sequence differs from its part of the whole loss. This holds if rows
            predict the next token, or if weights depend on the position.
        counted_locally: whether the denominator is counted in each call, so that the gradients of ranks and
            micro-batches are averaged.
        normalized: whether the loss is a sum of NLLs with weights of the sum ``weight_sum``, over its denominator.
        kernels: the launches that are expected on a GPU, a key of ``KERNELS`` in ``tests/support/mock_gpu_checks.py``.
        learns: names of the parameters of the loss.
        constants: settings that must not require a gradient.
        chunks_at_construction: whether ``chunk_size`` is an argument of the constructor, not of the call.
        variant: whether it differs from another case only in numbers; omitted if a case takes seconds.
        transformed_by: transform that is applied to the logits of its twin; None: it has no twin.
        transform: transform options of the loss.
        home: the module of the framework that it replaces, if any.
        documented: signatures in the documentation of the framework, by the suffix of the name of the loss.
    """

    name: str
    loss: Any
    draw: Callable[[int, int, int], Inputs]
    equation: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=lambda: COMMON)
    rows: tuple[str, str] = ("logits", "hidden")
    head: tuple[str, str] = ("lm_head_weight", "lm_head_bias")
    extra: Callable[[str, Any, Inputs], tuple[Any, dict[str, Any]]] = _no_extra
    derived_from: tuple[str, ...] = ()
    width: int = 1
    separate: bool = False
    per_row: bool = False
    linear_in: str | None = None
    rounds: bool = False
    shifted: bool = False
    counted_locally: bool = False
    normalized: bool = True
    kernels: str = "nll"
    learns: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    chunks_at_construction: bool = False
    variant: bool = False
    transformed_by: Mapping[str, Any] | None = None
    transform: Mapping[str, Any] = field(default_factory=dict)
    home: str | None = None
    documented: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_op(cls, case: OpCase) -> "Case":
        """Build the case of an op. Its value is a sum of the differentiable results with distinct weights."""

        def rows(targets: torch.Tensor, weights: torch.Tensor, positive: torch.Tensor) -> Rows:
            return Rows(targets, weights != 0, weights, positive)

        def total(values: list[torch.Tensor]) -> torch.Tensor:
            return sum(t * (-1.3) ** i for i, t in enumerate(values))

        def loss(logits: Any, *, targets: Any, weights: Any, positive: Any, **options: Any) -> torch.Tensor:
            return total(case.values(case(logits, rows(targets, weights, positive), **options)))

        def oracle(logits: Any, targets: Any, weights: Any, positive: Any) -> torch.Tensor:
            return total(case.oracle(logits, rows(targets, weights, positive)))

        def draw(B: int, L: int, V: int) -> Inputs:
            return _rows(B, L, V) | {"positive": torch.rand(B, L) + 0.1}

        loss.__wrapped__ = case.op  # has its signature
        one = {"targets": torch.zeros(1, 1).long(), "weights": torch.ones(1, 1), "positive": torch.ones(1, 1)}
        steps = {"softcap": 4.0, "scale": 1.7, "skip_id": SKIP_ID}
        return cls(
            case.name, loss, draw, oracle, roles={"targets": "targets"}, kernels=case.kernels or case.name,
            per_row=oracle(torch.zeros(1, 1, 3), **one).dim() > 0, linear_in=next(iter(case.factors), None),
            transformed_by=steps if steps.keys() <= inspect.signature(case.op).parameters.keys() else None,
        )  # fmt: skip

    @property
    def functions(self) -> tuple[Any, ...]:
        """Return the public callables: one class or op, or two functions."""
        return self.loss if isinstance(self.loss, tuple) else (self.loss,)

    @property
    def targets(self) -> str:
        """Return the name of the loss's argument for the targets."""
        return next(name for name, role in self.roles.items() if role == "targets")

    @property
    def counts(self) -> list[str]:
        """Return the names of the counts that ``draw`` returns."""
        return [name for name in self.draw(1, 3, 7) if self.roles.get(name) == "count"]

    def arguments(self, form: str, rows: Any, inputs: Inputs, head: tuple[Any, ...] = ()) -> dict[str, Any]:
        """Return the arguments of one call by name.

        ``head``: weight and bias of the LM head if ``form`` is "hidden".
        """
        rows, extra = self.extra(form, rows, inputs)
        heads = dict(zip(self.head, head, strict=False))
        supplied = {name: t for name, t in inputs.items() if name not in self.derived_from}
        return {self.rows[int(form == "hidden")]: rows, **heads, **supplied, **extra}

    def output(self, form: str, arguments: Mapping[str, Any], **options: Any) -> Any:
        """Return the output of the loss. Options of the head, such as ``chunk_size``, are options, too."""
        of_head = {name: options.pop(name) for name in HEAD_OPTIONS if name in options}
        options = {**self.settings, **self.transform, **options}
        if isinstance(self.loss, tuple):
            return self.loss[int(form == "hidden")](**arguments, **options, **of_head)
        if not isinstance(self.loss, type):
            return self.loss(**(self._recorded(arguments | of_head) if form == "hidden" else arguments), **options)
        if self.chunks_at_construction and "chunk_size" in of_head:
            options["chunk_size"] = of_head.pop("chunk_size")
        return self._of(self.loss(**options), form)(**arguments, **of_head)

    def _recorded(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with the record of hidden states and head as logits."""
        rest = dict(arguments)
        fields = [rest.pop(name, None) for name in (self.rows[1], *self.head, "extra")]
        options = {name: rest.pop(name) for name in HEAD_OPTIONS if name in rest}
        return {self.rows[0]: ops.LinearLogits(*fields, **options), **rest}

    @staticmethod
    def _of(loss: Any, form: str) -> Any:
        return loss if form == "logits" else loss.forward_fused

    def logits_form(self, x: Any, inputs: Inputs, **options: Any) -> torch.Tensor:
        """Return the value. Options are ``backend`` and, if the loss has that argument, ``fp32_upcast``."""
        return value_of(self.output("logits", self.arguments("logits", x, inputs), **options))

    def hidden_form(self, h: Any, w: Any, b: Any, inputs: Inputs, **options: Any) -> torch.Tensor:
        """Return the value. ``chunk_size`` is an option, too."""
        return value_of(self.output("hidden", self.arguments("hidden", h, inputs, (w, b)), **options))

    def oracle(self, x: torch.Tensor, inputs: Inputs, **options: Any) -> torch.Tensor:
        """Return the value in plain PyTorch."""
        return value_of(self.oracle_output(x, inputs, **options))

    def oracle_output(self, x: torch.Tensor, inputs: Inputs, **options: Any) -> Any:
        """Return the output of the oracle."""
        if self.transform:
            x = reference.transformed(x, **self.transform)
        x, extra = self.extra("logits", x, inputs)
        supplied = {**inputs, **extra, **self.settings, **options}
        accepted = inspect.signature(self.equation).parameters.keys()
        accepted |= {"beta", "temperature"} if "options" in accepted else set()  # of a divergence
        return self.equation(x, **{name: value for name, value in supplied.items() if name in accepted})


def value_of(output: Any) -> torch.Tensor:
    """Return the value to differentiate: the row losses if requested, otherwise the loss."""
    if isinstance(output, torch.Tensor):
        return output
    rows = getattr(output, "row_losses", None)
    return output.total_loss if rows is None else rows


def _targets(B: int, L: int, V: int) -> torch.Tensor:
    """Draw targets, about one in six of them -100."""
    targets = torch.randint(0, V, (B, L))
    return torch.where(torch.rand(B, L) < 1 / 6, -100, targets)


def _mask(B: int, L: int, share: float = 0.6) -> torch.Tensor:
    return torch.rand(B, L) < share


def _counted(draw: Callable[[int, int, int], Inputs], **fewer: int) -> Callable[[int, int, int], Inputs]:
    """Add counts to the inputs, each ``fewer`` below B L."""
    return lambda B, L, V: draw(B, L, V) | {name: torch.tensor(max(1, B * L - less)) for name, less in fewer.items()}


def _rows(B: int, L: int, V: int) -> Inputs:
    weights = torch.randn(B, L) * _mask(B, L)
    return {"targets": _targets(B, L, V), "weights": weights}


def _diffusion(B: int, L: int, V: int) -> Inputs:
    return {
        "target_ids": _targets(B, L, V),
        "noise_mask": _mask(B, L),
        "p_mask": torch.rand(B, L).clamp(min=0.05),
        "loss_mask": _mask(B, L, 0.8).long(),
    }


def _hybrid(B: int, L: int, V: int) -> Inputs:
    ar = torch.rand(B, L) * _mask(B, L)
    return _diffusion(B, L, V) | {"loss_mask_ar": ar}


def _dflash(B: int, L: int, V: int) -> Inputs:
    return {"target_ids": _targets(B, L, V), "block_mask": torch.rand(B, L) * _mask(B, L, 0.8)}


def _distillation(B: int, L: int, V: int) -> Inputs:
    """Draw the inputs; the teacher's logits exist in every dtype, because they have the dtype of the draft's logits."""
    return _dflash(B, L, V) | {"teacher": (2 * torch.randn(B, L, V)).bfloat16().float()}


def _idlm(B: int, L: int, V: int) -> Inputs:
    masks = {"answer_mask": _mask(B, L, 0.7), "valid_mask": _mask(B, L, 0.9).long()}
    return {"target_ids": _targets(B, L, V)} | masks


MASK_ID = 2


def _scdd(B: int, L: int, V: int) -> Inputs:
    """Mask a third of the tokens, keep a third, redraw the rest. No clean token is MASK, whose probability is 0."""
    targets = _targets(B, L, V)
    targets = torch.where(targets == MASK_ID, (MASK_ID + 1) % V, targets)
    kind, other = torch.rand(B, L), (MASK_ID + 1 + torch.randint(0, V - 1, (B, L))) % V
    noisy = torch.where(kind < 1 / 3, MASK_ID, torch.where(kind < 2 / 3, targets.clamp(min=0), other))
    return {
        "target_ids": targets,
        "noise_mask": noisy != targets,
        "p_mask": (torch.rand(B, 1) * 0.8 + 0.1).expand(B, L).contiguous(),
        "loss_mask": _mask(B, L, 0.8).long(),
        "noisy_input_ids": noisy,
    }


def _encoder(B: int, L: int, V: int) -> Inputs:
    return {"input_ids": torch.randint(0, V, (B, L)), "valid_mask": _mask(B, L, 0.8)}


def _documents(B: int, L: int, V: int) -> Inputs:
    """Draw packed documents, and positions in none of them (-1)."""
    return _encoder(B, L, V) | {"segment_ids": torch.randint(-1, 2, (B, L))}


def _statistics(B: int, L: int, V: int) -> Inputs:
    ids = torch.stack([_targets(B, L, V) for _ in range(2)], -1)
    a, b = 10 ** (-3 * torch.rand(B, L)) * _mask(B, L, 0.8), torch.rand(B, L) + 0.1
    return {"ids": ids, "a": a, "b": b, "weights": torch.randn(B, L) * _mask(B, L)}


def _top(B: int, L: int, V: int) -> Inputs:
    """Draw distinct ids per row, some of them missing, and the log-probabilities of a teacher."""
    ids = torch.rand(B, L, V).topk(min(3, V)).indices
    ids = torch.where(torch.rand(ids.shape) < 1 / 6, -100, ids)
    log_q = (torch.log_softmax(torch.randn(ids.shape), -1) - 0.2).bfloat16().float()
    return {"top_ids": ids, "top_log_probs": log_q, "weights": torch.randn(B, L) * _mask(B, L)}


def _one_number(out):
    """Combine a row's statistics with distinct weights.

    The logsumexp is omitted, because adding a constant to a row changes it.
    """
    values = statistics(out)
    ids = torch.tensor([1.0, -0.7], dtype=out.lse.dtype, device=out.lse.device)
    total = values.pop("log_probs") @ ids - 1.3 * values.pop("entropy") + 0.1 * values.pop("mix")
    return sum((0.4 * t for name, t in values.items() if name != "lse"), total)


def _row_stats(logits, ids, a, b, weights, **options):
    return _one_number(ops.row_stats(logits, ids, **FLAGS, mix=(a, b), active=weights != 0, **options))


def _statistics_oracle(logits, ids, a, b, weights):
    return _one_number(reference.row_stats(logits, ids, (a, b), weights != 0))


def _focal(stats, weights):
    """Compute a focal loss with an entropy bonus, of size 1 over a batch. A row without a target has only the bonus."""
    value = 0.1 * stats.entropy - (1 - stats.log_probs.exp()).square() * stats.log_probs
    return 0.1 * value * weights.abs()  # in the dtype of the statistics


def _row_objective(logits, targets, weights, **options):
    return ops.row_objective(logits, targets, _focal, weights, entropy=True, active=weights != 0, **options).loss


def _objective_oracle(logits, targets, weights):
    return reference.row_objective(logits, targets, _focal, weights.to(logits), active=weights != 0)


def _topk(logits, top_ids, top_log_probs, weights, **options):
    return ops.topk_divergence(logits, top_ids, top_log_probs, weights, **options).loss


def _topk_oracle(logits, top_ids, top_log_probs, weights, kind):
    return reference.topk_divergence(logits, top_ids, top_log_probs, weights, kind=kind).loss


def _causal(form: str, rows: Any, inputs: Inputs) -> tuple[Any, dict[str, Any]]:
    """Pass the AR rows as a separate tensor."""
    L = inputs["target_ids"].shape[1]
    return rows[:, :L], {f"causal_{form}": rows[:, L:]}


def _blocks(form: str, rows: Any, inputs: Inputs) -> tuple[Any, dict[str, Any]]:
    return rows, {"block_size": BLOCK}


def _anchor_blocks(form: str, rows: Any, inputs: Inputs) -> tuple[Any, dict[str, Any]]:
    """Blocks with one row per position, including the anchor."""
    return rows, {"block_size": BLOCK - 1}


def _taught(form: str, rows: Any, inputs: Inputs) -> tuple[Any, dict[str, Any]]:
    """Pass the teacher's logits, or use the logits as hidden states with an identity head."""
    teacher = inputs["teacher"].to(rows.dtype)
    if form == "logits":
        return rows, {"block_size": BLOCK, "teacher_logits": teacher}
    eye = torch.eye(teacher.shape[-1], dtype=teacher.dtype, device=teacher.device)
    return rows, {"block_size": BLOCK, "teacher_hidden": teacher, "teacher_weight": eye}


def _seq_len(form: str, rows: Any, inputs: Inputs) -> tuple[Any, dict[str, Any]]:
    return rows, {"seq_len": inputs["target_ids"].shape[1]}


_ROW_ROLES = {"targets": "targets"}
_ROW_STATS = Case(
    "row_stats", _row_stats, _statistics, _statistics_oracle, roles={"ids": "targets"},
    per_row=True, kernels="row_stats",
)  # fmt: skip
_ROW_OBJECTIVE = Case(
    "row_objective", _row_objective, _rows, _objective_oracle, roles=_ROW_ROLES,
    kernels="row_objective",
)  # fmt: skip
_TOPK = Case(
    "topk_divergence", _topk, _top, _topk_oracle, {"kind": "jsd"}, roles={"top_ids": "targets"},
    linear_in="weights", kernels="topk_divergence",
)  # fmt: skip
_MDLM = Case(
    "mdlm", ours.MDLMCrossEntropyLoss, _diffusion, reference.mdlm_loss, rounds=True, home=DLLM_LOSS, documented=FORWARD,
    kernels="mdlm",
)  # fmt: skip
_BLOCK = Case(
    "block diffusion", ours.BlockDiffusionCrossEntropyLoss, _diffusion, reference.block_diffusion_loss, rounds=True,
    counted_locally=True, roles=COMMON | {"noise_mask": "unused", "p_mask": "unused"},
    transformed_by={"softcap": 30.0}, home=DLLM_LOSS, documented=FORWARD,
)  # fmt: skip
_HYBRID = Case(
    "hybrid", ours.HybridDiffusionLLMLoss, _counted(_hybrid, num_diffusion_tokens=2, num_ar_tokens=1),
    reference.hybrid_loss, {"alpha": 0.3}, COMMON | {"loss_mask_ar": "weight", "causal": "rows"},
    extra=_causal, width=2, separate=True, rounds=True, shifted=True, kernels="mdlm", constants=("alpha",),
    transformed_by={"softcap": 2.5, "skip_id": SKIP_ID}, home=DLLM_LOSS,
    documented=FORWARD | {"": "alpha=1.0, fp32_upcast=True"},
)  # fmt: skip
_DFLASH = Case(
    "dflash", ours.DFlashDecayLoss, _counted(_dflash, num_tokens=3), reference.dflash_loss,
    roles={
        "target_ids": "targets", "block_mask": "weight", "num_tokens": "count", "num_blocks": "count",
        "num_sequences": "count",
    },
    extra=_blocks,
    linear_in="block_mask", constants=("loss_gamma",), chunks_at_construction=True,
    transformed_by={"softcap": 5.0, "scale": 0.8, "skip_id": SKIP_ID}, home=DLLM_LOSS,
    documented={
        "": "loss_gamma=7.0, use_fused_linear_ce=False, chunk_size=None, normalize='tokens'",
        ".forward": "self, logits, target_ids, block_mask, num_tokens=None, block_size=None",
        ".forward_fused": "self, hidden, lm_head_weight, target_ids, block_mask, num_tokens=None, block_size=None, "
        "lm_head_bias=None",
        "._decay_weights": "self, T, block_size, device, dtype",
        "._draft_acc_per_pos": "correct, block_mask, block_size",
        "._chunk_nll": "hidden_chunk, lm_head_weight, lm_head_bias, target_chunk",
        "._reduce": "self, token_nll, block_mask, num_tokens, block_size, draft_correct_per_pos=None, "
        "draft_count_per_pos=None",
    },
)  # fmt: skip
_DISTILLATION = Case(
    "distillation", ours.DraftDistillationLoss, _counted(_distillation, num_tokens=3),
    reference.draft_distillation_loss, {"kind": {"ce": 0.1, "l1": 0.9}, "teacher_transform": {}},
    roles=_DFLASH.roles | {"total_weight": "count"}, extra=_taught, derived_from=("teacher",), linear_in="block_mask",
    constants=("loss_gamma",), chunks_at_construction=True, transformed_by={"softcap": 5.0, "scale": 0.8},
    normalized=False, kernels="divergence",
)  # fmt: skip
_IDLM = Case(
    "idlm", ours.IDLMLoss, _idlm, reference.idlm_loss,
    roles={
        "target_ids": "targets", "answer_mask": "mask", "valid_mask": "mask", "num_diffusion_tokens": "count",
    },
    extra=_seq_len, width=2, shifted=True, counted_locally=True,
    transformed_by={"softcap": 4.0, "skip_id": SKIP_ID}, home=DLLM_LOSS,
    documented={
        "": "clean_loss_weight=0.2, auto_balance=False",
        ".forward": "self, logits, target_ids, answer_mask, valid_mask, *, seq_len, num_diffusion_tokens=None",
    },
)  # fmt: skip
_SCDD = Case(  # few steps: with more of them, the loss is a difference of closer numbers
    "scdd", ours.SCDDLoss, _scdd, reference.scdd_loss, {"mask_token_id": MASK_ID, "num_timesteps": 5, "max_ratio": 0.4},
    COMMON | {"noise_mask": "unused", "p_mask": "time", "noisy_input_ids": "ids"}, counted_locally=True,
    normalized=False, kernels="row_stats", variant=True, home=DLLM_LOSS,
    documented={
        "": "mask_token_id, num_timesteps=1000, max_ratio=0.1, gamma_shape=1.0, t_peak=0.5, chunk_size=None",
        ".forward": f"self, {MASKS}causal_logits=None, noisy_input_ids=None",
    },
)  # fmt: skip
_SCDD_COUNTED = replace(
    _SCDD, name="scdd, counted", draw=_counted(_scdd, num_diffusion_tokens=2), counted_locally=False, variant=False,
    settings={"mask_token_id": MASK_ID, "num_timesteps": 5, "gamma_shape": 2.0, "t_peak": 0.3},
    transformed_by={"softcap": 5.0, "scale": 0.8},
)  # fmt: skip
_ENCODER = Case(
    "encoder AR", (ours.encoder_ar_loss, ours.encoder_ar_loss_fused), _encoder, reference.encoder_ar_loss,
    roles={"input_ids": "targets", "valid_mask": "mask", "num_tokens": "count"}, rows=("encoder_logits", "hidden"),
    shifted=True, counted_locally=True, transformed_by={"softcap": 4.0, "scale": 1.3}, home=DLLM_LOSS,
    documented={"": "encoder_logits, input_ids, valid_mask=None, num_tokens=None"},
)  # fmt: skip

_OPS = {case.name: case for case in (_ROW_STATS, _ROW_OBJECTIVE, _TOPK)}
PLAIN = (
    *(  # token_log_probs is row_stats, with a temperature for its transform
        _OPS.get(case.name) or Case.of_op(case)
        for case in FIRST_OPS
        if case.oracle and len(case.kinds) == 2 and case.name != "token_log_probs"
    ),
    _MDLM,
    replace(
        _MDLM, name="mdlm, counted", draw=_counted(_diffusion, num_diffusion_tokens=2),
        transformed_by={"scale": 1 / 0.7, "skip_id": SKIP_ID},
    ),
    replace(
        _MDLM, name="mdlm, shift", draw=_counted(_diffusion, num_diffusion_tokens=2), settings={"shift": True},
        shifted=True,
    ),
    _BLOCK,
    replace(
        _BLOCK, name="block diffusion, counted", draw=_counted(_diffusion, num_diffusion_tokens=2),
        counted_locally=False, transformed_by=None,
    ),
    replace(
        _BLOCK, name="block diffusion, shift", settings={"shift": True}, shifted=True, variant=True,
        transformed_by=None,
    ),
    _HYBRID,
    replace(
        _HYBRID, name="hybrid, one tensor", extra=_no_extra, separate=False, transformed_by={"scale": 0.6}
    ),
    replace(
        _HYBRID, name="hybrid, shift", settings={"alpha": 0.3, "shift": True}, variant=True, transformed_by=None
    ),
    replace(
        _HYBRID, name="hybrid, one tensor, shift", extra=_no_extra, separate=False, variant=True,
        settings={"alpha": 0.3, "shift": True}, transformed_by=None,
    ),
    _DFLASH,
    replace(
        _DFLASH, name="dflash, mean", settings={"normalize": "mean", "loss_gamma": 2.0}, linear_in=None,
        counted_locally=True, transformed_by=None,
    ),
    replace(_DFLASH, name="dflash, one block", extra=_no_extra, shifted=True, transformed_by=None),
    replace(_DFLASH, name="dflash, no decay", settings={"loss_gamma": None}, transformed_by=None),
    replace(
        _DFLASH, name="dflash, dpace", settings={"position_weights": "dpace"}, linear_in=None,
        transformed_by={"softcap": 4.0},
    ),
    replace(
        _DFLASH, name="dflash, continuation, blocks here", draw=_dflash, linear_in=None, counted_locally=True,
        variant=True,
        settings={"position_weights": "continuation", "dpace_alpha": 0.2, "normalize": "blocks"}, transformed_by=None,
    ),
    replace(
        _DFLASH, name="dflash, prefix, sequences", draw=_counted(_dflash, num_sequences=2), linear_in=None,
        variant=True, settings={"position_weights": "prefix", "normalize": "sequences"}, transformed_by=None,
    ),
    replace(
        _DFLASH, name="dflash, blocks", draw=_counted(_dflash, num_blocks=2), settings={"normalize": "blocks"},
        variant=True, transformed_by=None,
    ),
    replace(  # because a part of a sequence has fewer blocks
        _DFLASH, name="dflash, sequence blocks", draw=_counted(_dflash, num_sequences=2), linear_in=None, shifted=True,
        roles={name: role for name, role in _DFLASH.roles.items() if name != "num_blocks"}, variant=True,
        settings={"normalize": "sequence_blocks"}, transformed_by=None,
    ),
    replace(
        _DFLASH, name="dflash, anchor row", settings={"anchor_row": True}, extra=_anchor_blocks, variant=True,
        transformed_by=None,
    ),
    _DISTILLATION,
    replace(
        _DISTILLATION, name="distillation, dpace, blocks", linear_in=None, variant=True, transformed_by=None,
        draw=_counted(_distillation, num_blocks=2),
        settings={
            "kind": "kl", "position_weights": "dpace", "normalize": "blocks", "decay_from": 1, "teacher_transform": {},
        },
    ),
    replace(
        _DISTILLATION, name="distillation, dpace of the teacher, rows", linear_in=None, variant=True,
        transformed_by=None, draw=_distillation, counted_locally=True,
        settings={
            "kind": {"ce": 0.3, "rkl": 0.7}, "position_weights": "continuation", "confidence": "teacher",
            "normalize": "rows", "teacher_transform": {},
        },
    ),
    replace(
        _DISTILLATION, name="distillation, acceptance, mean", linear_in=None, variant=True, transformed_by=None,
        draw=_distillation, counted_locally=True,
        settings={
            "kind": {"ce": 0.5, "jsd": 0.5}, "beta": 0.3, "position_weights": "prefix", "confidence": "acceptance",
            "normalize": "mean", "teacher_transform": {},
        },
    ),
    _IDLM,
    replace(
        _IDLM, name="idlm, counted", draw=_counted(_idlm, num_diffusion_tokens=2), counted_locally=False, variant=True,
        settings={"clean_loss_weight": 0.7}, transformed_by=None,
    ),
    replace(_IDLM, name="idlm, balanced", settings={"auto_balance": True}, transformed_by={"scale": 1.2}),
    _SCDD,
    _SCDD_COUNTED,
    replace(
        _SCDD_COUNTED, name="scdd, no uniform noise", kernels="nll", variant=True, transformed_by=None,
        settings={"mask_token_id": MASK_ID, "num_timesteps": 5, "max_ratio": 0.0},
    ),
    replace(
        _SCDD, name="scdd, shift", settings={**_SCDD.settings, "shift": True}, shifted=True, variant=False,
    ),
    replace(
        _SCDD, name="scdd, no uniform noise, shift", kernels="nll", shifted=True,
        settings={"mask_token_id": MASK_ID, "num_timesteps": 5, "max_ratio": 0.0, "shift": True},
    ),
    _ENCODER,
    replace(
        _ENCODER, name="encoder AR, documents", draw=_documents, settings={"normalize": "sequences"}, variant=True,
        roles={"input_ids": "targets", "valid_mask": "mask", "segment_ids": "ids", "num_sequences": "count"},
        transformed_by=None,
    ),
    replace(
        _ENCODER, name="encoder AR, counted", draw=_counted(_encoder, num_tokens=3), counted_locally=False,
        variant=True, transformed_by=None,
    ),
)  # fmt: skip


def _twin(case: Case) -> Case:
    """Return the case with transformed logits. No target is the skipped column, whose NLL would be NaN."""
    skip_id = case.transformed_by.get("skip_id", -1)

    def draw(B, L, V):
        inputs = case.draw(B, L, V)
        ids = inputs[case.targets]
        return inputs | {case.targets: torch.where(ids == skip_id, (skip_id + 1) % V, ids)}

    return replace(
        case, name=f"{case.name}, {' '.join(case.transformed_by)}", draw=draw, rounds=False,
        transform=case.transformed_by, transformed_by=None,
        variant=case.name not in ("token_nll", "mdlm, counted"),  # two ways are enough if a case takes seconds
    )  # fmt: skip


def _per_row(case: Case) -> Case:
    """Return the case with one loss per row."""
    return replace(
        case, name=f"{case.name}, rows", settings={**case.settings, "reduction": "none"}, per_row=True,
        variant=case.name != "mdlm, counted",  # one way is enough if a case takes seconds
    )  # fmt: skip


# One case per code path of a loss, with a count if possible, because the rows must not depend on it.
ROWS = tuple(
    _per_row(case) for case in PLAIN if case.name in (
        "mdlm, counted", "block diffusion", "hybrid", "hybrid, one tensor", "dflash", "dflash, dpace",
        "dflash, sequence blocks", "distillation", "distillation, acceptance, mean",
        "idlm", "idlm, balanced", "scdd, counted", "scdd, no uniform noise", "encoder AR",
        "mdlm, shift", "hybrid, shift", "hybrid, one tensor, shift", "scdd, shift", "scdd, no uniform noise, shift",
    )
)  # fmt: skip
CASES = (*PLAIN, *(_twin(case) for case in PLAIN if case.transformed_by), *ROWS)
SUMS = tuple(case for case in CASES if not case.per_row)
LOSSES = tuple(case for case in PLAIN if case.functions[0].__module__.startswith("dllm_kernels."))
# FIRSTS has one case per op and loss. FEWER omits cases that differ from others only in numbers. It is for tests in
# several processes and under a compiler, where a case takes seconds.
FIRSTS = tuple({case.loss: case for case in reversed(PLAIN)}.values())[::-1]
FEWER = tuple(case for case in CASES if not case.variant)
BY_NAME = {case.name: case for case in CASES}


def to_device(inputs: Inputs, device: str) -> Inputs:
    """Move the inputs to another device."""
    return {name: t.to(device) for name, t in inputs.items()}


def upstream_for(case: Case, B: int, L: int) -> torch.Tensor:
    """Draw a random upstream gradient: one value per row, some of them zero, or one for the loss."""
    if not case.per_row:
        return torch.randn(())
    return torch.randn(B, L * case.width) * (torch.rand(B, L * case.width) < 0.8)
