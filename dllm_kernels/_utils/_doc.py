"""Descriptions of arguments that many public functions share.

A docstring refers to a description as ``name: {name}``, which more text may follow. :func:`describe_arguments` inserts
the description when the package is imported, so that ``help`` shows it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

SHARED = {
    "logits": "``[..., V]``, float16, bfloat16, float32 or float64; any strides.",
    "hidden": "``[..., D]``, float16, bfloat16, float32 or float64.",
    "weight": "``[V, D]``, the LM head, of the dtype of ``hidden`` unless autocast is on.",
    "extra": (
        "low-rank second part of the head, in its dtype, (u ``[..., r]``, one row per row of hidden states; U ``[V, "
        "r]``), or None. ``U u`` is added to the logits."
    ),
    "targets": "``[...]`` integers in ``[0, V)`` or ``ignore_index``; any other value gives NaN in that row.",
    "ids": (
        "``[...]`` or ``[..., K]``, K >= 1, integers in ``[0, V)``. -100 marks a missing id, with log-probability 0. "
        "Any other out-of-range id, or ``skip_id``, gives NaN in that entry. If the entry receives a gradient, the "
        "gradient of its row is NaN too."
    ),
    "ignore_index": "target of inactive rows.",
    "with_lse": "also return the logsumexp of each row.",
    "chunk_size": "rows per chunk of logits; None: chosen from the sizes.",
    "num_active": (
        "upper bound on the number of active rows; None: read back from a GPU, a host sync. Results are NaN if the "
        "bound is too small."
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
        "True to raise an IndexError for the first out-of-range target or id, which costs a host sync. None: True if "
        "the environment variable ``DLLM_KERNELS_CHECK`` is 1."
    ),
}
_REFERENCE = re.compile(r"^( +)(\w+): \{(\w+)\}(.*(?:\n\1 +\S.*)*)", re.MULTILINE)


def filled(docstring: str) -> str:
    """Replace each ``name: {name}`` by the shared description, wrapped at 120 columns."""

    def described(match: re.Match[str]) -> str:
        indent, name, shared, more = match.groups()
        text = f"{name}: {SHARED[shared]} {' '.join(more.split())}".rstrip()
        return textwrap.fill(text, 120, initial_indent=indent, subsequent_indent=f"{indent}    ")

    return _REFERENCE.sub(described, docstring)


def describe_arguments(things: list[Any]) -> None:
    """Fill the docstrings of functions, classes, and the methods that these classes and their bases define."""
    classes = {base for thing in things if inspect.isclass(thing) for base in thing.__mro__}
    classes = {base for base in classes if base.__module__.startswith("dllm_kernels.")}
    methods = [value for base in classes for value in vars(base).values()]
    for thing in (*things, *classes, *methods):
        if (inspect.isfunction(thing) or inspect.isclass(thing)) and thing.__doc__:  # none under -OO
            thing.__doc__ = filled(thing.__doc__)
