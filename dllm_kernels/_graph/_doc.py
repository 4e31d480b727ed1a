"""Descriptions of arguments that many public functions share.

A docstring refers to a description as ``name: {key}``, which more text may follow. The key is the name of the argument,
unless other functions have an argument of that name with another meaning. :func:`describe_arguments` inserts the
description when the package is imported, so that ``help`` shows it.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

SHARED = {
    "logits": "``[..., V]``, float16, bfloat16, float32 or float64; any strides.",
    "hidden": "``[..., D]``, float16, bfloat16, float32 or float64.",
    "weight": "``[V, D]``, the LM head, of the dtype of ``hidden`` unless autocast is on.",
    "extra": (
        "low-rank second part of the head, in its dtype, (u ``[..., r]``, one row per row of hidden states; U ``[V, "
        "r]``), or None. ``U u`` is added to the logits."
    ),
    "targets": "``[...]`` integers in ``[0, V)`` or ``ignore_index``; any other value raises an IndexError on a "
    "CPU and gives NaN in that row on a GPU, see ``check_targets``.",
    "ids": (
        "``[...]`` or ``[..., K]``, K >= 1, integers in ``[0, V)``. -100 marks a missing id, with log-probability 0. "
        "Any other out-of-range id raises an IndexError on a CPU, see ``check_targets``; on a GPU it gives NaN in that "
        "entry, as ``skip_id`` does everywhere. If the entry receives a gradient, the gradient of its row is NaN too."
    ),
    "weights": "``[...]``, bool or numeric constants; must not require a gradient.",
    "ignore_index": "target of inactive rows.",
    "with_lse": "also return the logsumexp of each row.",
    "chunk_size": "rows per chunk of logits; None: chosen from the sizes and the memory of the device.",
    "num_active": (
        "upper bound on the number of active rows; None: read back from a GPU, a host sync. If the bound is too small, "
        "all floating results and all gradients are NaN, flags are False, and the ids of ``with_ids`` are -100."
    ),
    "logits_dtype": (
        "torch.float32 keeps the logits of float16 and bfloat16 operands in float32, also for the argmax. The "
        "gradient of the logits is rounded once, before its matrix products. None: the dtype of the operands."
    ),
    "softcap": "c > 0 replaces each logit by ``c tanh(z / c)`` first, as in Gemma; None: no cap.",
    "scale": "s > 0 multiplies each logit, after the cap: 1 / T for a temperature T; None: 1.",
    "skip_id": (
        "column that is never predicted, such as the MASK column. Its logit is -inf, its gradient is 0, and the NLL "
        "or log-probability of a target or id equal to it is NaN. None: every column can be predicted."
    ),
    "check_targets": (
        "raise an IndexError that names the first out-of-range target or id of an active row. None: the environment "
        "variable ``DLLM_KERNELS_CHECK``, 1 or 0; if it is unset, True for eager calls on a CPU, and False elsewhere. "
        "True also rejects ``skip_id``, and costs a host sync on a GPU."
    ),
    "linear_correct": (
        "also return the argmax match: True if the target is the argmax of the logits rounded to the compute dtype."
    ),
    "with_ids": "also return the predicted id, the argmax of the transformed logits; takes no second product or pass.",
    "linear_ids": (
        "also return the predicted id, the argmax of the transformed logits rounded to the compute dtype; takes no "
        "second product."
    ),
    "inplace_backward": (
        "write the gradient over ``logits`` instead of allocating it. Rows must not share memory, and nothing else may "
        "read the logits afterwards. Autograd raises an error if another backward pass reads them."
    ),
    "mix": (
        "(a, b), each ``[...]``, floating, not negative, constants (detached): also return F. a = 0 and b = 0 are "
        "legal; F is -inf if one of its logarithms is."
    ),
    "divergence_reduction": (
        '"sum", or "none": ``loss`` is then ``[...]``, the weighted value of each row, and takes an arbitrary upstream '
        "gradient per row."
    ),
    "top_ids": (
        "``[..., K]``, K >= 1, integers in ``[0, V)``, distinct in each row, in any order. -100 marks a missing entry, "
        "for rows of fewer than K ids. A repeated id raises a ValueError on a CPU and gives NaN in that row on a GPU "
        "and under ``torch.compile``. Any other value raises an IndexError on a CPU and gives NaN in that row on a GPU."
    ),
    "top_log_probs": (
        "``[..., K]``, floating, the teacher's log-probability of each id, a constant; ignored at missing ids. At "
        "float16 and bfloat16, rounding moves small masses into or out of the last bucket."
    ),
    "topk_tail": (
        "True: all other columns are one more bucket. The teacher's mass of it is 0 if the probabilities sum to 1, up "
        "to the rounding of ``top_log_probs``, or to more; ``rkl`` is then infinite. False: both distributions are "
        "renormalised over the K ids, and ``top_log_probs`` may be logits."
    ),
    "topk_temperature": (
        "T > 0. The student's logits are divided by T, and value and loss are multiplied by T squared. "
        "``top_log_probs`` must be those of the teacher's logits divided by T."
    ),
    "jsd_beta": "option of ``jsd``, in [0, 1]; None: 0.5.",
    "draft_to_target": (
        "``[V]`` integers, for a student with a smaller vocabulary: for each student token the teacher's column, all "
        "distinct. Offsets such as d2t of EAGLE-3 are converted by ``torch.arange(len(d2t)) + d2t``. The acceptance "
        "rate and the argmax match cover all columns of the teacher."
    ),
    "teacher": (
        'distribution q of the loss with ``draft_to_target``. "draft": the softmax over these columns. "full": their '
        "probabilities in the softmax over all columns of the teacher, which sum to a mass M. kl and soft_ce are then "
        "weighted by M. a in tv, l1, nla and lk is the acceptance rate. rkl increases by -log M, jsd by "
        "-beta (1 - M) log beta. teacher_ce is 0 if the student does not have the argmax. ce does not change."
    ),
    "teacher_transform": (
        '``{"softcap": ..., "scale": ..., "skip_id": ...}`` for the teacher\'s logits, ``{}`` for no transform. Its '
        "``skip_id`` is a column after ``draft_to_target``. None: ``softcap``, ``scale`` and ``skip_id`` apply to the "
        "teacher's logits too."
    ),
    "input_ids": "clean tokens ``[B, L]``, integer.",
    "loss_mask": "``[B, L]``, bool or numeric, nonzero for supervised positions; as integers, 0 and 1.",
    "generator": (
        "source of one seed per call, which each row uses with its index. A CPU generator can be used for tensors on "
        "any device and gives the same result on all of them. None: the default generator of the device."
    ),
    "seeds": (
        "int64 ``[B]``, one seed per row, instead of a generator. Row b then depends only on ``seeds[b]``, L and the "
        "options, in any batch and on any device."
    ),
    "start": (
        "int64 ``[B]``, in [0, L], the first column of each row that is not left padding; None: 0. The row is "
        "corrupted as if it began there, so that with ``seeds`` it has the same noise as without padding. Columns "
        "before it never change. Checked on CPU; on a GPU it is clamped, because a check would cost a host sync."
    ),
    "level": (
        "levels to use instead of drawn ones, unchanged, without ``eps``; floating, in [0, 1]. A level outside [0, 1] "
        "raises ValueError on CPU. On a GPU it corrupts nothing or everything, because a check would cost a host sync."
    ),
    "fp32_upcast": (
        "the loss is always computed in float32 (float64 for float64 logits). False rounds each token's NLL to the "
        "dtype of the logits, like a cross-entropy computed in that dtype."
    ),
    "shift": (
        "True for a model whose row i predicts token i + 1 (Dream, DiffuCoder, Fast-dLLM v2). Targets, masks and "
        "weights are shifted, never the logits. Token 0 is not predicted. Row i of ``row_losses`` and ``row_weights`` "
        "holds token i + 1, and the last row is 0."
    ),
    "position_weights": (
        '"decay", or weights of :func:`dpace_weights`: "dpace" is S, "prefix" C and "continuation" S / C. The names '
        "used by trainers are accepted too."
    ),
    "dpace_alpha": "alpha of :func:`dpace_weights`, in [0, 1].",
}
_REFERENCE = re.compile(r"^( +)(\w+): \{(\w+)\}(.*(?:\n\1 +\S.*)*)", re.MULTILINE)


@functools.cache  # most arguments are described in the same words by many functions, and this runs at import
def _wrapped(indent: str, text: str) -> str:
    """Wrap at 120 columns, between words. ``textwrap`` takes five times as long."""
    lines, line = [], indent
    for word in text.split():
        if len(line) + len(word) >= 120:
            lines.append(line)
            line = f"{indent}    {word}"
        else:
            line = f"{line} {word}" if line != indent else indent + word
    return "\n".join([*lines, line])


def filled(docstring: str) -> str:
    """Replace each ``name: {key}`` by the shared description, wrapped at 120 columns."""

    def described(match: re.Match[str]) -> str:
        indent, name, shared, more = match.groups()
        return _wrapped(indent, f"{name}: {SHARED[shared]} {' '.join(more.split())}".rstrip())

    return _REFERENCE.sub(described, docstring) if ": {" in docstring else docstring


def describe_arguments(things: list[Any]) -> None:
    """Fill the docstrings of functions, classes, and the methods that these classes and their bases define."""
    classes = {base for thing in things if inspect.isclass(thing) for base in thing.__mro__}
    classes = {base for base in classes if base.__module__.startswith("dllm_kernels.")}
    methods = [value for base in classes for value in vars(base).values()]
    for thing in (*things, *classes, *methods):
        if (inspect.isfunction(thing) or inspect.isclass(thing)) and thing.__doc__:  # none under -OO
            thing.__doc__ = filled(thing.__doc__)
