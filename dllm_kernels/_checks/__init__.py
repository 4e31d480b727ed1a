"""Argument validation of the public functions: each error names the argument, the condition and the value passed."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dllm_kernels._checks._target_range import first_true, raise_bad_target
from dllm_kernels._graph import _changing, _plain

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The largest length of a dimension that a caller gives as a number.
MOST_SIZE = 2**31 - 1
# Range of a soft cap or a scale, such that float32 holds the value, its inverse and the product of a cap and a scale.
FACTOR_RANGE = (1e-18, 1e18)
# Case-insensitive values of an environment variable.
ON, OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
# Values that show that a tensor is not a mask: the label that Hugging Face ignores, and a bound that the entries of
# additive attention masks lie below.
IGNORED_LABEL, ADDITIVE = -100, -1000
Extra = tuple[Tensor, Tensor]  # (u, U), the low-rank part of a head
INT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MASK_DTYPES = (torch.bool, *INT_DTYPES, *FLOAT_DTYPES)


class Names(NamedTuple):
    """Argument names of the public function, for the error messages of shared checks.

    Attributes:
        rows: the logits ``[..., V]``.
        targets: the target ids ``[...]``.
        weight: the weight of the LM head ``[V, D]``.
        bias: the bias of the head ``[V]``.
        hidden: the hidden states ``[..., D]``, in the place of logits.
        extra: the low-rank part of the head.
    """

    rows: str = "logits"
    targets: str = "targets"
    weight: str = "weight"
    bias: str = "bias"
    hidden: str = "hidden"
    extra: str = "extra"

    @property
    def for_hidden(self) -> Names:
        """The names for rows that are hidden states."""
        return Names(self.hidden, *self[1:])


INSIDE_FORWARD = (
    "it may be a local shard, as FullyShardedDataParallel leaves a parameter outside of its forward; compute the loss "
    "inside the model's forward, or shard by fully_shard, whose parameters are gathered here"
)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def type_name(value: object) -> str:
    """Name the type of ``value`` with its module, because other libraries have a Tensor, Generator and Linear too."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _hint_of_part(name: str, value: object) -> str:
    """Say which part of a module or of a model's output to pass, or return an empty string."""
    if isinstance(value, nn.Module):
        part = "bias" if "bias" in name else "weight"
    elif "hidden" in name:
        part = "last_hidden_state"
    else:
        part = "logits" if "logits" in name else ""
    return f"; pass its .{part}" if part and hasattr(value, part) else ""


def check_tensor(name: str, value: object) -> None:
    """Raise a TypeError unless ``value`` is a dense tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type_name(value)}{_hint_of_part(name, value)}")
    if value.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested tensor; pass its to_padded_tensor() and a mask")
    if type(value) is Tensor and value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {value.layout}; pass its to_dense()")


def check_gathered(**parameters: Tensor | None) -> None:
    """Raise a ValueError if a parameter has no values, as sharding leaves it outside of the forward of its module.

    DeepSpeed ZeRO-3 leaves an empty tensor, and FSDP1 an empty shard or a view without storage.
    """
    for name, value in parameters.items():
        if value is None:
            continue
        empty = value.dim() == 1 and not value.numel()
        if empty and hasattr(value, "ds_id"):
            raise ValueError(
                f"{name} must hold its values, got an empty tensor of shape (0,), as DeepSpeed ZeRO-3 leaves a "
                "partitioned parameter; compute the loss inside deepspeed.zero.GatheredParameters([...]) of the head"
            )
        if empty or is_freed(value):
            got = "an empty tensor of shape (0,)" if empty else "a tensor without storage"
            raise ValueError(f"{name} must hold its values, got {got}; {INSIDE_FORWARD}")


def is_freed(parameter: Tensor | None) -> bool:
    """Return True for a plain tensor whose storage sharding has freed."""
    if parameter is None or torch.compiler.is_compiling() or type(parameter) not in (Tensor, nn.Parameter):
        return False
    return parameter.numel() > 0 and parameter.untyped_storage().size() == 0


def check_dtype(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise a ValueError unless the tensor's dtype is one of ``dtypes``."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must have dtype {_names(dtypes)}, got {_names([tensor.dtype])}")


def check_float(name: str, value: Any) -> None:
    """Raise unless ``value`` is a float16, bfloat16, float32 or float64 tensor."""
    check_tensor(name, value)
    check_dtype(name, value, FLOAT_DTYPES)


def check_ids(name: str, value: Any) -> None:
    """Raise unless ``value`` is an integer tensor."""
    check_tensor(name, value)
    check_dtype(name, value, INT_DTYPES)


def check_flags(**flags: object) -> None:
    """Raise a TypeError unless every argument is a bool of Python or NumPy.

    0 and 1 are rejected, too: where a flag is expected, an int is more often a misplaced argument.
    """
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} must be a bool, got {type_name(value)}")


def check_shape(name: str, tensor: Tensor, expected: Sequence[int], of: str = "") -> None:
    """Raise ValueError unless the tensor has exactly this shape; ``of`` explains the expected shape."""
    if tuple(tensor.shape) != tuple(expected):
        hint = f" ({of})" if of else ""
        raise ValueError(f"{name} must have shape {tuple(expected)}{hint}, got {tuple(tensor.shape)}")


def check_ndim(name: str, tensor: Tensor, ndim: int, layout: str) -> None:
    """Raise ValueError unless the tensor has ``ndim`` dimensions; ``layout`` names them."""
    if tensor.dim() != ndim:
        raise ValueError(f"{name} must have shape {layout}, got {tuple(tensor.shape)}")


def check_none_negative(name: str, tensor: Tensor) -> None:
    """Raise a ValueError if an entry is negative; not checked on a GPU, where it would be a sync."""
    if _plain.readable_without_sync(tensor) and bool((tensor < 0).any()):
        raise ValueError(f"{name} must not be negative, got {tensor.min().item()}")


def check_same_device(first_name: str, first: Tensor, **others: Tensor | None) -> None:
    """Raise a ValueError unless every given tensor is on the device of the first."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise ValueError(f"{name} must be on {first.device} like {first_name}, got {tensor.device}")


def check_constant(name: str, value: object, instead: str = "") -> None:
    """Raise if ``value`` is a tensor that requires a gradient or has a tangent, because it is treated as a constant.

    Args:
        name: the name of the argument.
        value: the argument, a tensor or not.
        instead: function to use if its gradient is needed.

    Raises:
        ValueError: ``value`` requires a gradient, and gradients are enabled.
        NotImplementedError: ``value`` has a tangent of forward-mode differentiation.
    """
    if not isinstance(value, Tensor):
        return
    _plain.check_no_tangent(value)
    if value.requires_grad and torch.is_grad_enabled():
        or_else = f", or use {instead}" if instead else ""
        raise ValueError(f"{name} must not require a gradient, since it is taken as a constant; detach it{or_else}")


def check_weights(name: str, value: Any, expected: Sequence[int], of: str = "") -> None:
    """Raise unless ``value`` is a bool, integer or floating tensor of the expected shape; its values are free."""
    check_tensor(name, value)
    check_dtype(name, value, MASK_DTYPES)
    check_shape(name, value, expected, of)


def check_mask(name: str, value: Any, expected: Sequence[int], of: str = "", *, no_ids: bool = False) -> None:
    """Raise unless ``value`` is a bool, integer or floating mask of the expected shape with values of a mask."""
    check_weights(name, value, expected, of)
    check_mask_values(name, value, no_ids=no_ids)


def check_whole_tensor(name: str, tensor: object) -> None:
    """Raise TypeError for a DTensor, because a routine would read its local rows only."""
    if _plain.is_dtensor(tensor):
        raise TypeError(
            f"{name} must be a plain torch.Tensor, got DTensor; pass its to_local(), with seeds for its rows"
        )


def check_like(of: str, first: Tensor, dtypes: Sequence[torch.dtype] = MASK_DTYPES, /, **others: Tensor | None) -> None:
    """Raise unless every other tensor has one of the dtypes, and the shape and device of the first."""
    for name, value in others.items():
        check_tensor(name, value)
        assert value is not None
        check_dtype(name, value, dtypes)
        check_shape(name, value, first.shape, f"that of {of}")
    check_same_device(of, first, **others)


def check_masks_like(first_name: str, first: Tensor, /, **masks: Any) -> None:
    """Raise unless every mask has the dtype and the values of a mask, and the shape and device of the first."""
    check_like(first_name, first, MASK_DTYPES, **masks)
    for name, mask in masks.items():
        check_mask_values(name, mask)


def check_mask_values(name: str, mask: Tensor, *, no_ids: bool = False) -> None:
    """Raise a ValueError if a mask holds a negative number, NaN or an infinity: it is probably no mask.

    ``no_ids``: also raise for an integer above 1, where tokens and mask may be swapped. Not checked on a GPU, where it
    would be a sync, nor while a graph is traced.
    """
    if mask.dtype is torch.bool or (mask.dtype is torch.uint8 and not no_ids):
        return
    mask = _plain.plain(mask)
    if not _plain.readable_without_sync(mask) or not mask.numel():
        return
    least, most = (value.item() for value in torch.aminmax(mask))
    if not (least >= 0 and most < math.inf):  # NaN is both
        _raise_no_mask(name, mask)
    if no_ids and most > 1 and not mask.is_floating_point():
        where = first_true(mask > 1)
        assert where is not None
        raise ValueError(
            f"{name} must hold no integer above 1, got {mask[where].item()} at position {where}; it looks like token "
            "ids, pass a mask of 0 and 1"
        )


def _raise_no_mask(name: str, mask: Tensor) -> None:
    """Raise the error of :func:`check_mask_values`, which says what the tensor looks like."""
    labels, additive = mask == IGNORED_LABEL, mask <= ADDITIVE
    bad, hint = ~((mask >= 0) & (mask < math.inf)), "; pass a mask of 0 and 1"
    if bool(labels.any()):
        bad, hint = labels, f"; it looks like labels, pass labels != {IGNORED_LABEL}"
    elif bool(additive.any()):
        bad, hint = additive, "; it looks like an additive attention mask, pass mask == 0"
    where = first_true(bad)
    assert where is not None
    raise ValueError(
        f"{name} must hold no negative number, NaN or infinity, got {mask[where].item()} at position {where}{hint}"
    )


def is_int(value: object) -> bool:
    """Return True for an int of Python or NumPy, False for a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def checked_bool(name: str, value: object) -> bool:
    """Convert a value that passes :func:`check_flags` to a Python bool."""
    check_flags(**{name: value})
    return bool(value)


def checked_logits_dtype(value: Any) -> torch.dtype | None:
    """Return ``logits_dtype``; raise unless it is None or a dtype."""
    if not isinstance(value, torch.dtype | None):
        raise TypeError(f"logits_dtype must be a torch.dtype or None, got {type_name(value)}")
    return value


def checked_wide_logits(value: Any) -> torch.dtype | None:
    """Return ``logits_dtype``; raise unless it is None or float32, the dtypes for any operands but float64."""
    if checked_logits_dtype(value) not in (None, torch.float32):
        raise ValueError(f"logits_dtype must be torch.float32 or None, got {value}")
    return value  # type: ignore[no-any-return]


def checked_int(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Convert an int of at least ``least`` and at most ``most`` to Python's, which cannot overflow."""
    if not is_int(value):
        raise TypeError(f"{name} must be an int, got {type_name(value)}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return value if type(value) is int else int(value)


def check_column(name: str, value: Any, V: int | None = None) -> None:
    """Raise unless ``value`` is None or an int in [0, V), or not negative if V is None."""
    if value is None:
        return
    if not is_int(value):
        raise TypeError(f"{name} must be an int or None, got {type_name(value)}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    if V is not None and value >= V:
        raise ValueError(f"{name} must lie in [0, {V}), got {value}")


def check_choice(name: str, value: Any, known: Collection[str]) -> None:
    """Raise ValueError unless ``value`` is one of the allowed strings."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def checked_int64(name: str, value: Any) -> int:
    """Convert an int in the range of int64 to Python's."""
    number = checked_int(name, value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} must be an int of 64 bits, got {value}")
    return number


def check_count(name: str, value: object) -> None:
    """Raise unless ``value`` is None, a number, or a tensor with one element."""
    if value is None or _is_number(value):
        return
    if isinstance(value, (Tensor, np.ndarray)):  # NumPy scalars are arrays while a graph is traced
        if math.prod(value.shape) != 1:
            raise ValueError(f"{name} must be a number or a 0-d tensor, got a tensor of shape {tuple(value.shape)}")
        return
    raise TypeError(f"{name} must be a number or a 0-d tensor, got {type_name(value)}")


def check_total(name: str, value: Any) -> None:
    """Raise unless ``value`` passes :func:`check_count`, is finite and not negative; on a GPU only its dtype counts."""
    check_count(name, value)
    value = _plain.plain(value)
    value = value.detach() if isinstance(value, Tensor) else value
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        raise ValueError(f"{name} must be a count, got a bool tensor; sum the mask, any() does not count")
    known = _plain.readable_without_sync(value) if isinstance(value, Tensor) else isinstance(value, numbers.Real)
    # A float may be a symbol while a graph is traced, and isfinite() of a symbol breaks the graph.
    real = known and not isinstance(value, numbers.Integral) and not torch.compiler.is_compiling()
    if real and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {float(value)}")
    if known and not real and not torch.compiler.is_compiling() and value >= 2**63:
        raise ValueError(f"{name} must be an int of 64 bits, got {value}")
    if known and value < 0:
        got = value.item() if isinstance(value, Tensor) else value
        raise ValueError(f"{name} must not be negative, got {_changing.printable(got)}")


def check_rows(names: Names, rows: Tensor, targets: Tensor, head: Sequence[Any] = (), *, casts: bool = False) -> int:
    """Validate logits, or hidden states and head, and the dtype and device of the targets; return V.

    ``head``: (weight, bias), or nothing for logits. ``casts``: their dtypes may differ.
    """
    check_float(names.rows, rows)
    weight, bias = head or (None, None)
    if head:
        check_float(names.weight, weight)
    check_ids(names.targets, targets)
    _plain.check_no_transform()
    if weight is not None:
        check_gathered(**{names.weight: weight})
        if weight.dim() == 1:
            raise ValueError(f"{names.weight} must have shape [V, D], got {tuple(weight.shape)}; {INSIDE_FORWARD}")
        check_ndim(names.weight, weight, 2, "[V, D]")
        V, D = weight.shape
        if 0 in (V, D):
            raise ValueError(f"{names.weight} must have shape [V, D] with V >= 1 and D >= 1, got {(V, D)}")
        if rows.dim() == 0 or rows.shape[-1] != D:
            raise ValueError(
                f"{names.rows} must have shape [..., {D}] to go with {names.weight} [V, D] = {(V, D)}, "
                f"got {tuple(rows.shape)}"
            )
        if bias is not None:
            check_float(names.bias, bias)
            check_gathered(**{names.bias: bias})
            check_shape(names.bias, bias, (V,), f"one entry per row of {names.weight}")
        check_same_device(names.rows, rows, **{names.weight: weight, names.bias: bias, names.targets: targets})
        if not casts:
            check_dtypes(names.rows, rows, {names.weight: weight, names.bias: bias})
        return V  # type: ignore[no-any-return]
    if rows.dim() == 0 or rows.shape[-1] == 0:
        raise ValueError(f"{names.rows} must have shape [..., V] with V >= 1, got {tuple(rows.shape)}")
    check_same_device(names.rows, rows, **{names.targets: targets})
    return rows.shape[-1]


def check_dtypes(rows_name: str, rows: Tensor, others: Mapping[str, Tensor | None]) -> None:
    """Raise unless all others have the dtype of the rows, or autocast will cast them. Autocast never casts float64.

    A DTensor may be stored in another dtype, as under FSDP2's mixed precision. It is checked after it is gathered.
    """
    present = {name: t for name, t in others.items() if t is not None}
    if _plain.autocasts(rows) and all(t.dtype != torch.float64 for t in (rows, *present.values())):
        return
    for name, t in present.items():
        if t.dtype != rows.dtype and not _plain.is_dtensor(t):
            raise ValueError(
                f"{name} must have the dtype of {rows_name}, {rows.dtype}, unless torch.autocast is on, got {t.dtype}"
            )


def checked_pair(name: str, value: Any, parts: str) -> tuple[Any, Any]:
    """Validate an argument that is None or a tuple of two tensors; None becomes ``(None, None)``."""
    if value is None:
        return None, None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        got = f"{len(value)} of them" if isinstance(value, (tuple, list)) else type_name(value)
        raise TypeError(f"{name} must be a tuple of two tensors {parts}, got {got}")
    for i, t in enumerate(value):
        check_tensor(f"{name}[{i}]", t)
    return value[0], value[1]


def checked_extra(names: Names, hidden: Tensor, weight: Tensor, extra: Any, *, casts: bool = False) -> Extra:
    """Validate the low-rank part of a head: rows ``[..., r]`` and a weight ``[V, r]``.

    ``casts``: see :func:`check_rows`.
    """
    name = names.extra
    u, second = checked_pair(name, extra, "(u, U)")
    check_float(f"{name}[0]", u)
    check_float(f"{name}[1]", second)
    check_ndim(f"{name}[1]", second, 2, "[V, r]")
    V, r = second.shape
    if weight.shape[0] != V or r < 1:
        raise ValueError(
            f"{name}[1] must have shape ({weight.shape[0]}, r) with r >= 1, as many rows as {names.weight}, "
            f"got {(V, r)}"
        )
    check_shape(f"{name}[0]", u, (*hidden.shape[:-1], r), f"the rows of {names.rows}, the columns of {name}[1]")
    check_same_device(names.rows, hidden, **{f"{name}[0]": u, f"{name}[1]": second})
    if not casts:
        check_dtypes(names.rows, hidden, {f"{name}[0]": u, f"{name}[1]": second, names.weight: weight})
    return u, second


def _targets_checked(check_targets: bool | None) -> bool | None:
    """Return the argument, or if it is None the environment variable ``DLLM_KERNELS_CHECK``; None if both are unset.

    A compiled function reads the variable only when it is traced.
    """
    if check_targets is not None:
        return checked_bool("check_targets", check_targets)
    word = os.environ.get("DLLM_KERNELS_CHECK")
    if word is None or not (word := word.strip().lower()):
        return None
    if word not in ON and word not in OFF:
        raise ValueError(f"DLLM_KERNELS_CHECK must be one of {', '.join((*ON, *OFF[1:]))} or empty, got {word!r}")
    return word in ON


def check_target_range(
    check_targets: bool | None, name: str, targets: Tensor, V: int, ignore_index: int | None = -100, *,
    counted: Tensor | None = None, shift: int = 0, excluded: int | None = None,
) -> None:  # fmt: skip
    """Raise an IndexError naming the first target outside [0, V) that is not ``ignore_index``, in a row that counts.

    By default, the check runs only if it needs no sync: on eager CPU tensors. On request it also runs on a GPU, and
    rejects the excluded column. While a graph is traced, a requested check is recorded as one custom op, which
    does not break the graph and runs with it.

    Args:
        check_targets: the argument of the public function; None: see :func:`_targets_checked`.
        name: name of the targets.
        targets: integers ``[...]``.
        V: number of classes.
        ignore_index: target that is always accepted, or None.
        counted: of the shape of the targets, 0 in rows that do not count; None: all rows count.
        shift: added to the last index in the message, if the caller's tensor holds these targets that many positions
            further on.
        excluded: column that is skipped (``skip_id``), or None.
    """
    requested = _targets_checked(check_targets)
    if requested is False:
        return
    targets, counted = _plain.all_plain(targets, counted)
    readable = _plain.readable_without_sync(targets)
    if requested is None and readable:
        raise_bad_target(targets, name, V, ignore_index, shift, None, counted)
    elif requested and torch.compiler.is_compiling():
        from dllm_kernels._checks._compiled import target_range

        target_range(targets, name, V, ignore_index, shift, excluded, counted)
    elif requested:
        raise_bad_target(targets, name, V, ignore_index, shift, excluded, counted)


def check_inplace(logits: Tensor, rows: Tensor) -> None:
    """Raise unless the gradient can overwrite the logits: ``rows [B, L, V]`` is a view whose rows do not overlap."""
    if torch.compiler.is_compiling():
        raise ValueError("inplace_backward must be False under torch.compile, got True")
    needs_grad = logits.requires_grad and torch.is_grad_enabled()
    if needs_grad and (rows.data_ptr() != logits.data_ptr() or _rows_overlap(rows)):
        raise ValueError(
            "inplace_backward=True needs logits whose rows can be written in place, got shape "
            f"{tuple(logits.shape)} with strides {logits.stride()}"
        )


def _rows_overlap(x: Tensor) -> bool:
    """Return True if rows of ``x [B, L, V]`` may share memory.

    Rows do not overlap if the strides along B and L nest, each at least as long as the extent of the smaller ones.
    Strides that interleave without overlap are reported as an overlap too. No slice, transpose or expansion makes them.
    """
    span = x.shape[2]
    for stride, size in sorted(zip(x.stride()[:2], x.shape[:2], strict=True)):
        if size > 1 and stride < span:
            return True
        span += stride * (size - 1)
    return False


def checked_size(name: str, value: Any) -> int | None:
    """Convert an int of at least 1 to Python's; None passes."""
    return None if value is None else checked_int(name, value, 1)


def checked_up_to(name: str, value: Any, most: int) -> int | None:
    """Convert an int in [0, most] to Python's; None passes."""
    if value is None:
        return None
    if not (is_int(value) and 0 <= value <= most):
        raise ValueError(f"{name} must be an int in [0, {most}], got {value!r}")
    return checked_int(name, value)


def _is_number(value: object) -> bool:
    """Return True for an int or a float of Python or NumPy, False for a bool and a Fraction, which torch rejects."""
    fraction = isinstance(value, numbers.Rational) and not isinstance(value, numbers.Integral)
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and not fraction


def check_number(name: str, value: Any, allowed: str = "a number") -> None:
    """Raise TypeError unless ``value`` is a number of Python or NumPy."""
    if not _is_number(value):
        raise TypeError(f"{name} must be {allowed}, got {type_name(value)}")


def check_finite(name: str, value: Any) -> None:
    """Raise unless ``value`` is a finite number."""
    check_number(name, value)
    if not -math.inf < float(value) < math.inf:
        raise ValueError(f"{name} must be finite, got {_changing.printable(float(value))}")


def check_not_negative(name: str, value: Any) -> None:
    """Raise unless ``value`` is a finite number of at least 0."""
    check_number(name, value)
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be finite and non-negative, got {_changing.printable(value)}")


def check_probability(name: str, value: Any, allowed: str = "a number") -> None:
    """Raise unless ``value`` is a number in [0, 1]."""
    check_number(name, value, allowed)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")


def checked_share(name: str, value: Any, *, keeps_all: int) -> float | None:
    """Validate the parameter of a truncation, None or in [0, 1]; ``keeps_all``, which truncates nothing, becomes None.

    0 is out of range unless it is ``keeps_all``, because no column would be left.
    """
    if value is None:
        return None
    check_number(name, value, "a number or None")
    if not 0 <= value <= 1 or (keeps_all and value == 0):
        raise ValueError(f"{name} must lie in {'(' if keeps_all else '['}0, 1], or be None, got {value}")
    return None if _changing.equals(value, keeps_all) else float(value)


def check_factor(name: str, value: Any, allowed: str = "positive") -> None:
    """Raise unless ``value`` is None or a valid soft cap or scale. ``allowed`` is the condition in the message."""
    if value is None:
        return
    check_number(name, value, "a number or None")
    least, most = FACTOR_RANGE
    if not least <= float(value) <= most:
        raise ValueError(f"{name} must be {allowed}, from {least} to {most}, got {_changing.printable(float(value))}")


def is_per_row(reduction: Any) -> bool:
    """Return False for a sum over the rows, True for a loss of each row."""
    if not isinstance(reduction, str) or reduction not in ("sum", "none"):
        raise ValueError(f"reduction must be sum or none, got {reduction!r}")
    return bool(reduction == "none")


def checked_temperature(temperature: Any, allowed: str = "positive") -> float:
    """Validate a divisor of the logits. ``allowed`` is the condition in the message."""
    check_number("temperature", temperature)
    check_factor("temperature", temperature, allowed)  # the inverse is used as a scale, which has the same range
    return float(temperature)


def tempered_scale(scale: Any, temperature: float, name: str = "scale") -> Any:
    """Divide a scale, or None, by a validated temperature; raise unless the quotient is a valid scale, too."""
    if _changing.equals(temperature, 1):
        return scale
    check_factor(name, scale)
    quotient = (1.0 if scale is None else scale) / temperature
    least, most = FACTOR_RANGE
    if not least <= quotient <= most:
        raise ValueError(
            f"{name} / temperature must lie between {least} and {most}, got {name}={_changing.printable(scale)} and "
            f"temperature={_changing.printable(temperature)}"
        )
    return quotient
