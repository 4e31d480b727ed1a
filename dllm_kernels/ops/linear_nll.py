r"""NLL straight from hidden states and the LM head; the logits exist one chunk at a time.

    z_i = W h_i + b,      nll_i = logsumexp(z_i) - z_{i, y_i},      g_i = s_i (softmax(z_i) - onehot(y_i)),
    d/dh_i = g_i W,       d/dW = sum_i g_i h_i^T,                    d/db = sum_i g_i.

Per chunk of active rows: one product makes the logits, one pass over them leaves the NLL and writes g over them, one
product gives the gradient of the hidden states and, if the head trains, one more that of the head, summed in float32.

``weighted_linear_nll`` knows s_i = w_i in the forward pass, so it makes the gradients there, and backward only scales
them: 2 products with a frozen head, 3 with a trainable one. ``linear_token_nll`` does not know its upstream gradient;
but row i of d/dh depends on the upstream gradient of row i alone, so with a frozen head the gradient for s_i = 1 is made
in forward and its rows are scaled in backward: 2 products again. Only a trainable head needs its logits twice (4).
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, NamedTuple

import torch

from dllm_kernels.ops import _checks
from dllm_kernels.ops._active_rows import ActiveRows, choose_chunk
from dllm_kernels.ops._backend import use_triton
from dllm_kernels.ops._first_order import first_order_only
from dllm_kernels.ops._plain import all_plain, is_dtensor
from dllm_kernels.ops._rows import RowPrimitives, row_primitives
from dllm_kernels.ops.token_nll import TokenNLL, WeightedNLL, check_weights, flat_rows, weighted_sum

# Columns of a low-precision chunk that are widened at a time where a product cannot sum in float32 by itself (CPU).
SLAB = 4096


def weighted_linear_nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    ignore_index: int = -100,
    with_lse: bool = False,
    with_correct: bool = False,
    round_nll: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    num_active: int | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> WeightedNLL:
    r"""Weighted sum of the NLL of each target under ``softmax(weight @ hidden + bias)``.

    .. math:: \text{loss} = \sum_i w_i \, \text{nll}_i

    The gradients are made in the forward pass, on the rows of nonzero weight only, and only for what requires them;
    backward scales them by the upstream scalar, in place, which is why it can run only once.

    Args:
        hidden: ``[..., D]``, float16, bfloat16, float32 or float64.
        weight: ``[V, D]``, the LM head, of the dtype of ``hidden`` unless autocast is on.
        targets: ``[...]`` integers in ``[0, V)`` or ``ignore_index``; anything else gives NaN in its own row.
        weights: ``[...]``, bool or numeric, taken as constants (detached).
        bias: ``[V]`` or None.
        active: ``[...]``, rows to project; None: those whose weight is not zero.
        ignore_index: the target that switches a row off.
        with_lse: also return the logsumexp of each row.
        with_correct: also return whether the target is the argmax of the logits as rounded to the compute dtype.
        round_nll: round each NLL to the compute dtype before it is weighted (the value; the gradient is not rounded).
        chunk_size: rows of logits that exist at a time; None chooses.
        memory_budget: bytes that a chunk of logits may take where ``chunk_size`` is None.
        num_active: an upper bound of the number of active rows, which saves reading it back from a GPU. Too small a
            bound gives a NaN loss.
        check_targets: raise an IndexError that names the first bad target; reads the targets back to the host. None
            follows the environment variable ``DLLM_KERNELS_CHECK``.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`WeightedNLL`: ``loss`` float32 (float64 for float64 input), differentiable in hidden, weight and bias.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes, dtypes or devices that do not fit, ``chunk_size`` < 1, or an unknown backend.
        IndexError: ``check_targets`` found a bad target.
        RuntimeError: a second backward pass through the same loss.
    """
    targets, weights, active = all_plain(targets, weights, active)
    weights = check_weights(weights, targets, hidden)
    _check(
        hidden,
        weight,
        bias,
        targets,
        active,
        chunk_size,
        memory_budget,
        num_active,
        check_targets,
        ignore_index,
    )
    sharded = _sharded(hidden, weight, bias)
    if sharded is not None:
        return sharded.weighted_linear_nll(  # type: ignore[no-any-return]
            hidden, weight, targets, weights, bias=bias, active=active, ignore_index=ignore_index, with_lse=with_lse,
            with_correct=with_correct, round_nll=round_nll, chunk_size=chunk_size, memory_budget=memory_budget,
            num_active=num_active, backend=backend,
        )  # fmt: skip
    options = _options(hidden, weight, chunk_size, memory_budget, num_active, ignore_index, with_correct, backend)
    return weighted_with_options(
        hidden, weight, targets, weights, bias, active, with_lse=with_lse, round_nll=round_nll, options=options
    )


def weighted_with_options(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    active: torch.Tensor | None,
    *,
    with_lse: bool,
    round_nll: bool,
    options: _Options,
) -> WeightedNLL:
    """:func:`weighted_linear_nll` after its checks, with the row primitives chosen."""
    flat_targets, flat_active = flat_rows(targets, weights if active is None else active)
    inputs = (
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        flat_targets,
        flat_active,
        weights.reshape(-1).contiguous(),
    )
    needs = _needs(hidden, weight, bias)
    if torch.compiler.is_compiling():
        from dllm_kernels.ops._compiled_linear_nll import _weighted_op

        loss, nll, row_max, log_sum, correct, *_ = _weighted_op(
            *inputs, active is not None, round_nll, *needs, *options
        )
    else:
        loss, nll, row_max, log_sum, correct = _WeightedLinearNLL.apply(  # type: ignore[no-untyped-call]
            *inputs, active is not None, round_nll, needs, options
        )
    shape = targets.shape
    return WeightedNLL(
        loss,
        nll.view(shape),
        (row_max + log_sum).view(shape) if with_lse else None,
        correct.view(shape) if options.with_correct else None,
    )


def linear_token_nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    ignore_index: int = -100,
    with_lse: bool = False,
    with_correct: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    num_active: int | None = None,
    check_targets: bool | None = None,
    backend: str = "auto",
) -> TokenNLL:
    r"""NLL of each target under ``softmax(weight @ hidden + bias)``, with an arbitrary upstream gradient per row.

    .. math:: \text{nll}_i = \log \sum_v e^{z_{iv}} - z_{i, y_i}, \qquad z_i = W h_i + b

    With a frozen head nothing is recomputed; a trainable head (or bias) has its logits made again in backward. Use
    :func:`weighted_linear_nll` where the weight of each row is known in advance.

    Args:
        hidden: ``[..., D]``, as in :func:`weighted_linear_nll`.
        weight: ``[V, D]``.
        targets: ``[...]`` integers.
        bias: ``[V]`` or None.
        active: ``[...]``, rows to project; None: all.
        ignore_index: the target that switches a row off.
        with_lse: also return the logsumexp of each row.
        with_correct: also return whether the target is the argmax of the logits as rounded to the compute dtype.
        chunk_size: rows of logits that exist at a time; None chooses.
        memory_budget: bytes that a chunk of logits may take where ``chunk_size`` is None.
        num_active: an upper bound of the number of active rows; too small a bound gives NaN.
        check_targets: as in :func:`weighted_linear_nll`.
        backend: "auto", "triton" or "torch".

    Returns:
        :class:`TokenNLL`, its ``nll`` differentiable in hidden, weight and bias.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes, dtypes or devices that do not fit, ``chunk_size`` < 1, or an unknown backend.
        IndexError: ``check_targets`` found a bad target.
    """
    targets, active = all_plain(targets, active)
    _check(
        hidden,
        weight,
        bias,
        targets,
        active,
        chunk_size,
        memory_budget,
        num_active,
        check_targets,
        ignore_index,
    )
    sharded = _sharded(hidden, weight, bias)
    if sharded is not None:
        return sharded.linear_token_nll(  # type: ignore[no-any-return]
            hidden, weight, targets, bias=bias, active=active, ignore_index=ignore_index, with_lse=with_lse,
            with_correct=with_correct, chunk_size=chunk_size, memory_budget=memory_budget, num_active=num_active,
            backend=backend,
        )  # fmt: skip
    options = _options(hidden, weight, chunk_size, memory_budget, num_active, ignore_index, with_correct, backend)
    return token_with_options(hidden, weight, targets, bias, active, with_lse=with_lse, options=options)


def token_with_options(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    active: torch.Tensor | None,
    *,
    with_lse: bool,
    options: _Options,
) -> TokenNLL:
    """:func:`linear_token_nll` after its checks, with the row primitives chosen."""
    flat_targets, flat_active = flat_rows(targets, active)
    inputs = (hidden.reshape(-1, hidden.shape[-1]), weight, bias, flat_targets, flat_active)
    needs = _needs(hidden, weight, bias)
    if torch.compiler.is_compiling():
        from dllm_kernels.ops._compiled_linear_nll import _token_op

        nll, row_max, log_sum, correct, _ = _token_op(*inputs, *needs, *options)
    else:
        nll, row_max, log_sum, correct = _LinearTokenNLL.apply(  # type: ignore[no-untyped-call]
            *inputs, needs, options
        )
    shape = targets.shape
    return TokenNLL(
        nll.view(shape),
        (row_max + log_sum).detach().view(shape) if with_lse else None,
        correct.view(shape) if options.with_correct else None,
    )


class _Options(NamedTuple):
    """What a call chose: plain values, so that a custom op can take them too."""

    compute_dtype: torch.dtype
    chunk_size: int | None
    memory_budget: int | None
    num_active: int | None
    ignore_index: int
    with_correct: bool
    triton: bool | RowPrimitives


class _Needs(NamedTuple):
    """Which inputs want a gradient."""

    hidden: bool
    weight: bool
    bias: bool


def _needs(*inputs: torch.Tensor | None) -> _Needs:
    """Asked here and not in forward, where ``ctx.needs_input_grad`` is True even under ``torch.no_grad``."""
    grad = torch.is_grad_enabled()
    return _Needs(*(t is not None and t.requires_grad and grad for t in inputs))


def _options(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    chunk_size: int | None,
    memory_budget: int | None,
    num_active: int | None,
    ignore_index: int,
    with_correct: bool,
    backend: str,
) -> _Options:
    return _Options(
        compute_dtype(hidden, weight), None if chunk_size is None else int(chunk_size), memory_budget, num_active,
        ignore_index, with_correct,
        use_triton(backend, hidden),
    )  # fmt: skip


def compute_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The dtype of the logits, as ``F.linear`` would choose it, autocast included."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    chunk_size: int | None,
    memory_budget: int | None,
    num_active: int | None,
    check_targets: bool | None,
    ignore_index: int,
) -> None:
    _checks.check_float("hidden", hidden)
    _checks.check_float("weight", weight)
    _checks.check_ids("targets", targets)
    _checks.check_ndim("weight", weight, 2, "[V, D]")
    V, D = weight.shape
    if 0 in (V, D):
        raise ValueError(f"weight must have shape [V, D] with V >= 1 and D >= 1, got {(V, D)}")
    if hidden.dim() == 0 or hidden.shape[-1] != D:
        raise ValueError(
            f"hidden must have shape [..., {D}] to go with weight [V, D] = {(V, D)}, got {tuple(hidden.shape)}"
        )
    _checks.check_shape("targets", targets, hidden.shape[:-1], "that of hidden without its last dimension")
    if active is not None:
        _checks.check_mask("active", active, targets.shape, "that of targets")
    if bias is not None:
        _checks.check_float("bias", bias)
        _checks.check_shape("bias", bias, (V,), "one entry per row of weight")
    _checks.check_same_device("hidden", hidden, weight=weight, bias=bias, targets=targets, active=active)
    check_dtypes(hidden, weight, bias)
    for name, value in (("chunk_size", chunk_size), ("memory_budget", memory_budget)):
        if value is not None:
            _checks.check_positive_int(name, value)
    is_int = isinstance(num_active, int) and not isinstance(num_active, bool)
    if num_active is not None and not (is_int and 0 <= num_active <= targets.numel()):
        raise ValueError(f"num_active must be an int in [0, {targets.numel()}], got {num_active!r}")
    if _checks.targets_checked(check_targets):
        _checks.check_target_range(targets, V, ignore_index)


def check_dtypes(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise unless weight and bias have the dtype of hidden, or autocast will give them one.

    A DTensor may be stored in another dtype, as under FSDP2's mixed precision: it is looked at once it is gathered.
    """
    dtypes = [t.dtype for t in (hidden, weight, bias) if t is not None]
    if torch.is_autocast_enabled(hidden.device.type) and torch.float64 not in dtypes:  # which autocast leaves alone
        return
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype and not is_dtensor(tensor):
            raise ValueError(
                f"{name} must have the dtype of hidden, {hidden.dtype}, unless torch.autocast is on, got {tensor.dtype}"
            )


def _sharded(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """The implementation for DTensors, else None; torch.distributed is loaded only when there is one."""
    if not any(is_dtensor(t) for t in (hidden, weight, bias)):
        return None
    from dllm_kernels.distributed import linear

    return linear


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False)


class _Chunks:
    """The chunk loop: the one place where logits exist, in one buffer that every chunk re-uses."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        active: torch.Tensor | None,
        needs: _Needs,
        options: _Options,
    ) -> None:
        dtype = options.compute_dtype
        self.hidden, self.needs, self.options, self.targets = hidden, needs, options, targets
        self.weight_dtype = weight.dtype
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.acc = torch.promote_types(dtype, torch.float32)
        mask = targets != options.ignore_index
        self.rows = ActiveRows(mask if active is None else mask & (active != 0), options.num_active)
        V, D = weight.shape
        size = options.chunk_size or choose_chunk(
            self.rows.count, V, dtype.itemsize, needs.weight, hidden.is_cuda, options.memory_budget
        )
        self.size = max(1, min(size, self.rows.count))
        self.primitives = row_primitives(options.triton)
        device = hidden.device
        self.logits = torch.empty(self.size if self.rows.count else 0, V, dtype=dtype, device=device)
        self.grad_hidden = self.rows.empty(D, dtype=hidden.dtype, device=device) if needs.hidden else None
        self.grad_weight: torch.Tensor | None = None
        self.grad_bias = torch.zeros(V, dtype=self.acc, device=device) if needs.bias else None

    def __iter__(self) -> Any:
        """Chunks as (slice, hidden rows, targets, logits): the product that makes the logits happens here."""
        for start in range(0, self.rows.count, self.size):
            chunk = slice(start, min(start + self.size, self.rows.count))
            h = self.rows.take(self.hidden, chunk).to(self.options.compute_dtype)
            y = self.rows.take(self.targets, chunk)
            logits = self.logits[: h.shape[0]]
            if self.bias is None:
                torch.mm(h, self.weight.t(), out=logits)
            else:
                torch.addmm(self.bias, h, self.weight.t(), out=logits)
            yield chunk, h, y, logits

    def add_gradients(self, chunk: slice, h: torch.Tensor, grad_logits: torch.Tensor, scale: torch.Tensor) -> None:
        """The products with the gradient that now stands where the logits were."""
        if self.grad_hidden is not None:
            self.rows.put(self.grad_hidden, chunk, torch.mm(grad_logits, self.weight))
        if self.needs.weight:
            self._add_grad_weight(self._without_idle_rows(chunk, h, scale), grad_logits)
        if self.grad_bias is not None:
            _add_column_sums(self.grad_bias, grad_logits)

    def _without_idle_rows(self, chunk: slice, h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Rows without a gradient as zeros: a NaN there, times 0, would reach all of grad_weight."""
        idle = scale == 0
        mask = self.rows.take_mask(chunk)
        return h.masked_fill((idle if mask is None else idle | ~mask).unsqueeze(1), 0)

    def _add_grad_weight(self, h: torch.Tensor, grad_logits: torch.Tensor) -> None:
        """grad_weight += grad_logits^T h, in float32 whatever the dtype; a single chunk is rounded by its product.

        But for float16, whose gradient is not yet scaled down (``_fp16_headroom``) and might not fit.
        """
        a = grad_logits.t()
        single = self.size >= self.rows.count and a.dtype == self.weight_dtype and a.dtype != torch.float16
        if a.dtype == self.acc or single:
            self.grad_weight = torch.mm(a, h) if self.grad_weight is None else self.grad_weight.addmm_(a, h)
            return
        if self.grad_weight is None:
            self.grad_weight = torch.zeros(a.shape[0], h.shape[1], dtype=self.acc, device=h.device)
        if not a.is_cuda:
            _add_product_by_slabs(self.grad_weight, a, h)
        elif torch.version.hip is None:
            torch.addmm(self.grad_weight, a, h, out_dtype=self.acc, out=self.grad_weight)
        else:  # rocBLAS has no product of low-precision matrices into a float32 one through torch
            self.grad_weight += torch.mm(a, h)

    def gradients(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, wide: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The gradients in the dtypes of the inputs; with ``wide`` those of the head in the dtype of the sums."""
        grad_weight = self.grad_weight
        if self.needs.weight and grad_weight is None:
            grad_weight = torch.zeros(weight.shape, dtype=self.acc, device=weight.device)
        return (
            None if self.grad_hidden is None else self.rows.whole(self.grad_hidden),
            None if grad_weight is None else grad_weight.to(self.acc if wide else weight.dtype),
            None if self.grad_bias is None or bias is None else self.grad_bias.to(self.acc if wide else bias.dtype),
        )


def _add_product_by_slabs(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Out += a b in the dtype of out, widening ``a`` a slab at a time: no wide copy of a chunk of logits exists."""
    wide = b.to(out.dtype)
    for v in range(0, a.shape[0], SLAB):
        out[v : v + SLAB].addmm_(a[v : v + SLAB].to(out.dtype), wide)


def _add_column_sums(out: torch.Tensor, a: torch.Tensor) -> None:
    """Out += column sums of ``a`` in the dtype of out; on CPU a widening sum copies its operand, hence slabs."""
    slab = max(a.shape[1], 1) if a.is_cuda or a.dtype == out.dtype else SLAB  # a rank may hold no columns
    for v in range(0, a.shape[1], slab):
        out[v : v + slab] += a[:, v : v + slab].sum(0, dtype=out.dtype)


def _row_outputs(chunks: _Chunks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    device, rows = chunks.hidden.device, chunks.rows
    nll, row_max, log_sum = (rows.empty(dtype=chunks.acc, device=device) for _ in range(3))
    correct = rows.empty(dtype=torch.bool, device=device)
    return nll, row_max, log_sum, correct


def _run(chunks: _Chunks, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One pass over all chunks: (nll, row_max, log_sum, correct), and the gradients for ``scale [N]`` where needed.

    ``scale=None`` makes none: only the first product and the reduction run.
    """
    options, rows = chunks.options, chunks.rows
    outputs = _row_outputs(chunks)
    flags: dict[str, Any] = {"ignore_index": options.ignore_index, "with_correct": options.with_correct}
    for chunk, h, y, logits in chunks:
        mask = rows.take_mask(chunk)
        if scale is None:
            stats = chunks.primitives.row_stats(logits[None], y, mask, **flags)
        else:
            s = rows.take(scale, chunk)
            stats = chunks.primitives.row_nll_grad_(logits, y, mask, s, **flags)
            chunks.add_gradients(chunk, h, logits, s)
        nll, row_max, log_sum, _, correct = stats
        for out, part in zip(outputs, (nll, row_max, log_sum, correct), strict=True):
            if part is not None:
                rows.put(out, chunk, part)
    if rows.overflow is not None:
        outputs[0].masked_fill_(rows.overflow, float("nan"))
    nll, row_max, log_sum, correct = (rows.whole(out) for out in outputs)
    return nll, row_max, log_sum, correct


def _fp16_headroom(scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """For float16, row weights divided by the largest of them, and that: w / N times a probability would underflow."""
    if dtype != torch.float16:
        return scale, None
    if scale.numel() == 0:
        return scale, scale.new_ones(())
    largest = scale.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    return scale / largest, largest


class _WeightedResult(NamedTuple):
    loss: torch.Tensor
    nll: torch.Tensor
    row_max: torch.Tensor
    log_sum: torch.Tensor
    correct: torch.Tensor
    grad_hidden: torch.Tensor | None
    grad_weight: torch.Tensor | None
    grad_bias: torch.Tensor | None
    headroom: torch.Tensor | None


def _weighted_forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    scale: torch.Tensor,
    read_beyond: bool,
    round_nll: bool,
    needs: _Needs,
    options: _Options,
) -> _WeightedResult:
    with _no_autocast(hidden.device):
        headroom = None
        row_scale: torch.Tensor | None = None
        if any(needs):
            row_scale, headroom = _fp16_headroom(scale, options.compute_dtype)
        chunks = _Chunks(hidden, weight, bias, targets, active, needs, options)
        nll, row_max, log_sum, correct = _run(chunks, row_scale)
        value = nll.to(options.compute_dtype).to(nll.dtype) if round_nll else nll
        loss = weighted_sum(value, scale, read_beyond)
        grads = chunks.gradients(weight, bias, wide=headroom is not None)
        return _WeightedResult(loss, value, row_max, log_sum, correct, *grads, headroom)


class _WeightedLinearNLL(torch.autograd.Function):
    """(loss, nll, row_max, log_sum, correct); only loss is differentiable, and its gradients are ready made."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        active: torch.Tensor | None,
        scale: torch.Tensor,
        read_beyond: bool,
        round_nll: bool,
        needs: _Needs,
        options: _Options,
    ) -> tuple[torch.Tensor, ...]:
        out = _weighted_forward(hidden, weight, bias, targets, active, scale, read_beyond, round_nll, needs, options)
        ctx.save_for_backward(out.grad_hidden, out.grad_weight, out.grad_bias, out.headroom)
        ctx.triton, ctx.consumed = options.triton, False
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (hidden, weight, bias))
        ctx.head = [
            weakref.ref(t) for t, trains in ((weight, needs.weight), (bias, needs.bias)) if trains and t is not None
        ]
        detached = (out.nll, out.row_max, out.log_sum, out.correct)
        ctx.mark_non_differentiable(*detached)
        ctx.set_materialize_grads(False)
        return (out.loss, *detached)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_loss: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad_loss is None:
            return (None,) * 10
        if ctx.consumed:
            raise RuntimeError(
                "weighted_linear_nll made its gradients in the forward pass and gave them away in the first backward; "
                "call the loss again for a second one, or use linear_token_nll"
            )
        ctx.consumed = True
        _check_still_gathered(ctx.head)
        *grads, headroom = ctx.saved_tensors
        factor = grad_loss if headroom is None else grad_loss * headroom
        for grad in grads:
            if grad is not None:
                row_primitives(ctx.triton).scale_(grad, factor)
        narrow = (None if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True))
        return (*narrow, *(None,) * 7)


def _check_still_gathered(head: list[weakref.ref[torch.Tensor]]) -> None:
    """Raise where FSDP2 has freed the gathered head before its gradient came: there the gradient would be lost.

    Backward does not read the head here, so nothing else would notice.
    """
    for parameter in (ref() for ref in head):
        if parameter is not None and parameter.numel() and not parameter.untyped_storage().size():
            raise RuntimeError(
                "weight or bias was freed before its gradient came, which would be lost: under fully_shard with "
                "reshard_after_forward=False, run the loss inside the head's forward (dllm_kernels.distributed.LossHead) "
                "where the head is also called by itself in the same step"
            )


class _LinearTokenNLL(torch.autograd.Function):
    """(nll, row_max, log_sum, correct), nll differentiable with any gradient per row."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        active: torch.Tensor | None,
        needs: _Needs,
        options: _Options,
    ) -> tuple[torch.Tensor, ...]:
        nll, row_max, log_sum, correct, unit_grad = _token_forward(
            hidden, weight, bias, targets, active, needs, options
        )
        if _frozen(needs):
            ctx.save_for_backward(unit_grad)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, active, row_max, log_sum)
        ctx.needs, ctx.options = needs, options
        ctx.mark_non_differentiable(row_max, log_sum, correct)
        ctx.set_materialize_grads(False)
        return nll, row_max, log_sum, correct

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_nll: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad_nll is None:
            return (None,) * 7
        if _frozen(ctx.needs):
            (unit_grad,) = ctx.saved_tensors
            return (_scale_rows(unit_grad, grad_nll), *(None,) * 6)
        hidden, weight, bias, targets, active, row_max, log_sum = ctx.saved_tensors
        grads = _token_backward(
            hidden, weight, bias, targets, active, row_max, log_sum, grad_nll, ctx.needs, ctx.options
        )
        return (*grads, *(None,) * 4)


def _frozen(needs: _Needs) -> bool:
    """Only hidden wants a gradient, each row of which depends on the upstream gradient of that row alone."""
    return needs.hidden and not needs.weight and not needs.bias


def _scale_rows(unit_grad: torch.Tensor, grad_nll: torch.Tensor) -> torch.Tensor:
    """Rows times their upstream gradient; a row with an upstream gradient of 0 gets zeros whatever it holds."""
    factor = grad_nll.reshape(-1, 1)
    return torch.where(factor != 0, unit_grad * factor, 0.0).to(unit_grad.dtype)


def _token_forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    needs: _Needs,
    options: _Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    with _no_autocast(hidden.device):
        frozen = _frozen(needs)
        now = needs if frozen else _Needs(False, False, False)
        chunks = _Chunks(hidden, weight, bias, targets, active, now, options)
        ones = torch.ones(targets.shape, dtype=chunks.acc, device=targets.device) if frozen else None
        nll, row_max, log_sum, correct = _run(chunks, ones)
        return nll, row_max, log_sum, correct, chunks.gradients(weight, bias)[0]


def _token_backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    active: torch.Tensor | None,
    row_max: torch.Tensor,
    log_sum: torch.Tensor,
    grad_nll: torch.Tensor,
    needs: _Needs,
    options: _Options,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The logits made again chunk by chunk, and the gradients from the saved row statistics."""
    with _no_autocast(hidden.device):
        scale = grad_nll.reshape(-1).to(row_max.dtype).contiguous()
        chunks = _Chunks(hidden, weight, bias, targets, active, needs, options)
        rows = chunks.rows
        for chunk, h, y, logits in chunks:
            s, *stats = (rows.take(t, chunk) for t in (scale, row_max, log_sum))
            chunks.primitives.row_grad(
                logits[None],
                y,
                rows.take_mask(chunk),
                s,
                *stats,
                logits[None],
                ignore_index=options.ignore_index,
            )
            chunks.add_gradients(chunk, h, logits, s)
        return chunks.gradients(weight, bias)
