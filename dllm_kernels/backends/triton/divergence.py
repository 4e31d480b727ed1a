r"""Divergence of rows of student to rows of teacher logits: value, acceptance, agreement and gradient in one launch.

One program processes one pair of rows, student logits z and teacher logits t. Let M be the maximum of a row's
transformed logits x, and S = sum_v e^{x_v - M}. Logarithms are in base 2:

    lp_v = (z_v - M_z) log2(e) - log2 S_z,    p_v = 2^{lp_v},
    lq_v = (t_v - M_t) log2(e) - log2 S_t,    q_v = 2^{lq_v}.

**Kinds.** All kinds of a spec (``rows/_divergence_kinds.py``) depend on a few sums over the columns of a row,

    overlap = sum min(p, q)         below = sum p [p <= q]          kl = sum q (lq - lp)      soft_ce = sum -q lp
    ratio = sum p d                 p_mix = sum p (lp - lm)         q_mix = sum q (lq - lm),  m = beta q + (1 - beta) p
    accept = sum min(p, mass q)

(:class:`Sums`, :func:`_with_terms`). The sums give the value of the row (:func:`_value`) and the factors of its
gradient (:class:`Factors`, :func:`_factors`). With these the gradient of any sum of kinds is one expression per column
(:func:`_gradient`):

    dL/dz_v = p_v (p_coef or, where p_v <= q_v, below) + apart (p_v - q_v) + ratio p_v (d_v - mean) + mix p_v (lp_v -
    lm_v)

minus one-hot terms. d = (z - M_z) - (t - M_t) differs from lp - lq by a constant per row, which does not change the
gradient of rkl.

The coefficient of each kind (:class:`Kinds`) is passed as an integer, like the numbers of a transform
(``_transform.py``), or as None if the spec does not contain the kind. A None argument is a compile-time constant, and
the code for its kind is compiled out. Compiled kernels differ in which arguments are None.

**Some columns of longer rows.** ``norms_ptr`` has the maximum and log S of the teacher's whole rows, if the columns of
the call are a part of them. The mass of the columns is e^(log S_t + M_t) over e^(log S + M) of the whole row.
``accept`` is then the acceptance rate. With FULL, lq is the log-probability in the whole row instead, so that
``overlap`` is the acceptance rate, and kl has the gradient mass p - q. The value of kl omits the constant mass log
mass, and that of jsd includes the other columns of the whole rows, where m = beta q.

**Passes.** The first pass reads both rows for M, S and the argmax, per lane as in ``_math.py``. If the coefficients
need no sum (kl, soft_ce, teacher_ce, ce), the second pass computes sums and gradient. So it does for rkl, whose sum is
computed in the first pass, relative to running maxima. All other specs need a pass for the sums in between. If a launch
without a gradient has stored the statistics (:func:`_store_stats`), the gradient takes one pass for every spec.
Successive passes scan the row in opposite directions, because the rows of all programs exceed the L2, and the tiles
read last are still in it. One-hot terms are evaluated only in the tile that contains their column.

**Precision.** lp - lm and lq - lm are computed from lp - lq, and from the logarithm of a number near 1. Equal
probabilities therefore give exactly 0, unlike a difference of logarithms of small p and m. A product e x with a
probability e below 1e-30 counts as 0, for any x, so that an infinite x does not give NaN. Comparisons and minima hide
NaN. Therefore ``poison``, which is NaN if either row has no distribution and otherwise 0, is added to log2 S_z, and so
makes every p NaN, and to all results.
"""

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl

from dllm_kernels.backends.triton import _launch, _math, _tiles, _transform
from dllm_kernels.backends.triton._launch import PER_ROW, SIZES, TRANSFORM
from dllm_kernels.backends.triton._math import IGNORE, LOG2E, finite
from dllm_kernels.backends.triton._transform import number, transformed
from dllm_kernels.rows._divergence import SAVED_STATS, DivergenceRequest, DivergenceResult, SavedStats
from dllm_kernels.rows._divergence_kinds import KINDS, OPTIONS, TIE
from dllm_kernels.rows._dtypes import accum_dtype
from dllm_kernels.rows._transform import Transform

Tensor = torch.Tensor


# Factors of the kinds and values of their options, each None if the spec does not need it; arguments of
# ``_divergence_rows`` with the same names.
Kinds: Any = namedtuple("Kinds", list(KINDS))  # type: ignore[misc]
Options: Any = namedtuple("Options", list(OPTIONS))  # type: ignore[misc]
# Running sums of a row or of a lane; sums that no kind of the spec needs keep their initial value.
Sums = namedtuple("Sums", "overlap below kl soft_ce ratio p_mix q_mix accept")
# Per-row coefficients of the gradient (:func:`_gradient`).
Factors = namedtuple("Factors", "p_coef below ratio mean mix apart")

LN2 = tl.constexpr(0.6931471805599453)
_TIE = tl.constexpr(TIE)
LEAST = tl.constexpr(1e-30)
FAR = tl.constexpr(-1e38)
NOWHERE = tl.constexpr(2147483647)
STATS = tl.constexpr(SAVED_STATS)


@triton.constexpr_function
def _any(*coefficients):
    """Return True if one of these kinds is in the spec."""
    return any(coefficient is not None for coefficient in coefficients)


@triton.jit
def _times(e, x):
    """Multiply; 0 if the probability e is negligible, for any x. A NaN in e propagates."""
    return tl.where(e < LEAST, 0.0, e * x)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """Compute log2 of numbers in (0, 1] that are not tiny.

    FAST: one instruction instead of the 15 of ``tl.log2``, with an error of 2^-22 near 1.
    """
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def _from_mixture(lp, lq, beta, FAST: tl.constexpr):
    """Return (lp - lm, lq - lm); for a probability of 0 the result is NaN or -inf."""
    d = lq - lp
    e = tl.exp2(-tl.abs(d))
    up = d > 0
    share = tl.where(up, beta, 1 - beta)
    larger = 0 - _log2(share + (1 - share) * e, FAST)
    return tl.where(up, larger - d, larger), tl.where(up, larger, larger + d)


@triton.jit
def _filled_sums(x):
    return Sums(x, x, x, x, x, x, x, x)


@triton.jit
def _totals(sums, tails):
    """Combine the sums of the lanes and of the tail to the sums of a row."""
    totals = ()
    for i in tl.static_range(len(sums)):
        totals += (_math.total(sums[i]) + _math.total(tails[i]),)
    return Sums(*totals)


@triton.jit
def _with_terms(sums, p, q, lp, lq, d, spec, WITH_RATIO: tl.constexpr, FAST: tl.constexpr, WIDE: tl.constexpr):
    """Update the sums of the lanes with one more tile; ``spec`` as in :func:`_pass`."""
    kinds, beta, mass, _ = spec
    overlap, below, kl, soft_ce, ratio, p_mix, q_mix, accept = sums
    overlap = _math.lane_sum(overlap, tl.minimum(p, q), WIDE)
    if mass is not None:
        accept = _math.lane_sum(accept, tl.minimum(p, q * mass), WIDE)
    if _any(kinds.tv, kinds.nla, kinds.lk, kinds.lk_soft_ce):
        below = _math.lane_sum(below, tl.where(p <= q * _TIE, p, 0.0), WIDE)
    if _any(kinds.kl, kinds.lk):
        kl = _math.lane_sum(kl, _times(q, lq - lp), WIDE)
    if _any(kinds.soft_ce, kinds.lk_soft_ce):
        soft_ce = _math.lane_sum(soft_ce, _times(q, 0 - lp), WIDE)
    if WITH_RATIO:
        ratio = _math.lane_sum(ratio, _times(p, d), WIDE)
    if kinds.jsd is not None:
        log_p_over_m, log_q_over_m = _from_mixture(lp, lq, beta, FAST)
        p_mix = _math.lane_sum(p_mix, _times(p, log_p_over_m), WIDE)
        q_mix = _math.lane_sum(q_mix, _times(q, log_q_over_m), WIDE)
    return Sums(overlap, below, kl, soft_ce, ratio, p_mix, q_mix, accept)


@triton.jit
def _store_stats(stats_ptr, norms, sums, ratio):
    """Store the statistics of a row that :func:`_load_stats` loads."""
    stats = (norms[0], norms[1], norms[2], norms[3], sums.overlap, sums.below, ratio, sums.p_mix)
    for i in tl.static_range(len(stats)):
        tl.store(stats_ptr + i, stats[i])


@triton.jit
def _load_stats(stats_ptr):
    """Load (M_z, log2 S_z, M_t, log2 S_t), the sums that the gradient reads, and sum p d of a row."""
    norms = (tl.load(stats_ptr), tl.load(stats_ptr + 1), tl.load(stats_ptr + 2), tl.load(stats_ptr + 3))
    overlap, below = tl.load(stats_ptr + 4), tl.load(stats_ptr + 5)
    ratio, p_mix = tl.load(stats_ptr + 6), tl.load(stats_ptr + 7)
    return norms, Sums(overlap, below, overlap, overlap, ratio, p_mix, overlap, overlap), ratio


@triton.jit
def _plus(total, bits, term):
    """Add a term times the coefficient of its kind; return the total if the kind is not in the spec (bits is None)."""
    if bits is None:
        return total
    else:
        return total + number(bits, total.dtype) * term


@triton.jit
def _value(sums, ratio, norms, at_hot, at_target, lam, mass, kinds, options, ACC: tl.constexpr):
    """Sum coefficients times kinds, in nats; ``at_hot``, ``at_target``: -log p at the teacher's argmax, the target.

    ``mass``: the sum of q if it may be less than 1, otherwise None.
    """
    kl = sums.kl * LN2
    if mass is not None:
        kl -= _times(mass, tl.log(mass))
    value = _plus(sums.overlap * 0, kinds.kl, kl)
    value = _plus(value, kinds.soft_ce, sums.soft_ce * LN2)
    value = _plus(value, kinds.rkl, ratio + (norms[3] - norms[1]) * LN2)
    if kinds.jsd is not None:
        b = number(options.beta, ACC)
        jsd = (b * sums.q_mix + (1 - b) * sums.p_mix) * LN2
        if mass is not None:
            jsd -= (1 - mass) * _times(b, tl.log(b))
        value += number(kinds.jsd, ACC) * jsd
    value = _plus(value, kinds.tv, 1 - sums.overlap)
    if kinds.nla is not None:
        least = number(options.floor, ACC)
        value -= number(kinds.nla, ACC) * tl.log(tl.where(sums.overlap < least, least, sums.overlap))
    value = _plus(value, kinds.lk, lam * kl + (1 - lam) * (1 - sums.overlap))
    value = _plus(value, kinds.lk_soft_ce, lam * (sums.soft_ce * LN2) + (1 - lam) * (1 - sums.overlap))
    value = _plus(value, kinds.teacher_ce, at_hot)
    return _plus(value, kinds.ce, at_target)


@triton.jit
def _factors(sums, mean, lam, has_hot, has_target, kinds, options, ACC: tl.constexpr):
    """Compute the coefficients of the gradient without the row's weight; ``mean`` is sum p d."""
    p_coef = sums.overlap * 0
    ratio, mix = p_coef, p_coef
    apart = _plus(_plus(p_coef, kinds.kl, 1.0), kinds.soft_ce, 1.0)
    tv_like = _plus(p_coef, kinds.tv, 1.0)
    if kinds.nla is not None:
        tv_like += tl.where(sums.overlap < number(options.floor, ACC), 0.0, number(kinds.nla, ACC) / sums.overlap)
    apart = _plus(apart, kinds.lk, lam)
    tv_like = _plus(tv_like, kinds.lk, 1 - lam)
    apart = _plus(apart, kinds.lk_soft_ce, lam)
    tv_like = _plus(tv_like, kinds.lk_soft_ce, 1 - lam)
    if kinds.rkl is not None:
        ratio = number(kinds.rkl, ACC)
    if kinds.jsd is not None:
        mix = number(kinds.jsd, ACC) * (1 - number(options.beta, ACC)) * LN2
        p_coef -= mix * sums.p_mix
    if kinds.teacher_ce is not None:
        p_coef += tl.where(has_hot, number(kinds.teacher_ce, ACC), 0.0)
    if kinds.ce is not None:
        p_coef += tl.where(has_target, number(kinds.ce, ACC), 0.0)
    with_below = tv_like * (sums.below - 1) + p_coef
    return Factors(tv_like * sums.below + p_coef, with_below, ratio, mean, mix, apart)


@triton.jit
def _gradient(p, q, lp, lq, d, c, spec, FAST: tl.constexpr):
    """Compute the gradient in the transformed logits, without the one-hot terms."""
    kinds, beta, _, mass = spec
    if _any(kinds.tv, kinds.nla, kinds.lk, kinds.lk_soft_ce):
        grad = p * tl.where(p <= q * _TIE, c.below, c.p_coef)
    elif _any(kinds.jsd, kinds.teacher_ce, kinds.ce):
        grad = p * c.p_coef
    else:
        grad = tl.zeros(p.shape, p.dtype)
    if _any(kinds.kl, kinds.soft_ce, kinds.lk, kinds.lk_soft_ce):
        if mass is None:
            grad += c.apart * (p - q)  # exactly 0 if p equals q, unlike a difference of products
        else:
            grad += c.apart * (p * mass - q)
    if kinds.rkl is not None:
        grad += _times(p, c.ratio * (d - c.mean))
    if kinds.jsd is not None:
        log_p_over_m, _ = _from_mixture(lp, lq, beta, FAST)
        grad += _times(p, c.mix * log_p_over_m)
    return grad


@triton.jit
def _with_tile(x, tile, lanes, WIDE: tl.constexpr):
    """Update (maximum, sum, first tile with the maximum) of the lanes with one more tile.

    Also return d = x - maximum, and e^d.
    """
    lane_max, lane_sum, lane_tile = lanes
    LANES: tl.constexpr = lane_max.shape[0]
    x = tl.reshape(x, [x.shape[0] // (LANES * WIDE), LANES, WIDE])
    new_max = tl.maximum(lane_max, tl.max(tl.max(x, 2), 0))
    m = finite(new_max)
    d = x - m[None, :, None]
    e = tl.exp2(d * LOG2E)
    lane_sum = lane_sum * tl.exp2((finite(lane_max) - m) * LOG2E) + tl.sum(tl.sum(e, 2), 0)
    return (new_max, lane_sum, tl.where(new_max > lane_max, tile, lane_tile)), d, e


@triton.jit
def _moved(moment, total, step_z, step_t):
    """Convert sum e^dz (dz - dt) from the old maxima to maxima that are larger by ``-step_z`` and ``-step_t``."""
    less = tl.exp2(step_z * LOG2E)
    shift = tl.maximum(step_z, FAR) - tl.maximum(step_t, FAR)
    return tl.where(less == 0, 0.0, less * (moment + shift * total))


@triton.jit
def _with_tiles(x, y, tile, student, teacher, moment, WITH_MOMENT: tl.constexpr, WIDE: tl.constexpr):
    """Update the lanes of both rows with one more tile of each."""
    new_student, dz, e = _with_tile(x, tile, student, WIDE)
    new_teacher, dt, _ = _with_tile(y, tile, teacher, WIDE)
    if WITH_MOMENT:
        step_z = finite(student[0]) - finite(new_student[0])
        step_t = finite(teacher[0]) - finite(new_teacher[0])
        moment = _moved(moment, student[1], step_z, step_t) + tl.sum(tl.sum(_times(e, dz - dt), 2), 0)
    return new_student, new_teacher, moment


@triton.jit
def _below_maximum(lanes, tail, lanes_max, tail_max):
    """Return (M, the lanes' terms of S, the tail's terms of S) of a row."""
    lane_max, lane_sum, _ = lanes
    row_max = finite(tl.maximum(lanes_max, tail_max))
    return row_max, lane_sum * tl.exp2((finite(lane_max) - row_max) * LOG2E), tl.exp2((tail - row_max) * LOG2E)


@triton.jit
def _tile_again(row_ptr, tile, wide, row_max, transform, WIDE: tl.constexpr, BLOCK_V: tl.constexpr, ACC: tl.constexpr):
    """Re-read a tile and return its columns that equal the maximum; NOWHERE in all others."""
    # NOWHERE: the maximum is in the tail. // WIDE * WIDE shows the compiler that the position is a multiple.
    tile = tl.where(tile == NOWHERE, wide, tile) // WIDE * WIDE
    i = tl.arange(0, BLOCK_V)
    x = tl.load(row_ptr + tile + i, mask=i < wide - tile, other=float("nan"))
    x = transformed(x, tile + i, transform, ACC)
    return tl.where(x == row_max, tile + i, NOWHERE)


@triton.jit
def _in_tail(column, wide, tail, row_max):
    j = wide + tl.arange(0, tail.shape[0])
    return tl.minimum(column, tl.min(tl.where(tail == row_max, j, NOWHERE), 0))


@triton.jit
def _row_at(ptr, row, WIDE: tl.constexpr, ALIGNED: tl.constexpr):
    """Hint to the compiler that an ALIGNED row begins at a multiple of WIDE columns."""
    if ALIGNED:
        return ptr + row // WIDE * WIDE
    else:
        return ptr + row


@triton.jit
def _tail(row_ptr, wide, V, WIDE: tl.constexpr):
    """Load the last columns, fewer than WIDE; -inf beyond the row."""
    v = wide + tl.arange(0, WIDE)
    return tl.load(row_ptr + v, mask=v < V, other=-float("inf"))


@triton.jit
def _first_pass(
    rows, tails, transforms, WITH_MOMENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr,
    THREADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return ((M_z, log2 S_z, M_t, log2 S_t), sum p d if WITH_MOMENT, student's argmax, teacher's argmax).

    ``rows``, ``tails`` and ``transforms`` as in :func:`_pass`.
    """
    z_ptr, t_ptr, _, wide, _ = rows
    _, z_tail, t_tail = tails
    transform, teacher_transform = transforms
    WIDE: tl.constexpr = z_tail.shape[0]
    LANES: tl.constexpr = min(THREADS, BLOCK_V // WIDE)
    i = tl.arange(0, BLOCK_V)
    moment = tl.zeros([LANES], ACC)
    student = (tl.full([LANES], -float("inf"), ACC), moment, tl.zeros([LANES], tl.int32))
    teacher = student
    whole = wide // BLOCK_V * BLOCK_V
    if whole > 0:
        z = _math.load_columns(z_ptr, None, BLOCK_V, ALIGNED, -float("inf"), "")
        t = _math.load_columns(t_ptr, None, BLOCK_V, ALIGNED, -float("inf"), "")
        for tile in range(0, whole, BLOCK_V):  # the last iteration reloads its own tile, which is cheaper than masking
            ahead = tl.minimum(tile + BLOCK_V, whole - BLOCK_V)
            z_ahead = _math.load_columns(z_ptr + ahead, None, BLOCK_V, ALIGNED, -float("inf"), "")
            t_ahead = _math.load_columns(t_ptr + ahead, None, BLOCK_V, ALIGNED, -float("inf"), "")
            x = transformed(z, i, transform, ACC, tile)
            y = transformed(t, i, teacher_transform, ACC, tile)
            student, teacher, moment = _with_tiles(x, y, tile, student, teacher, moment, WITH_MOMENT, WIDE)
            z, t = z_ahead, t_ahead
    if whole < wide:
        x = _math.load_columns(z_ptr + whole, wide - whole, BLOCK_V, ALIGNED, -float("inf"), "")
        y = _math.load_columns(t_ptr + whole, wide - whole, BLOCK_V, ALIGNED, -float("inf"), "")
        x = _math.masked_tile(x, i, i < wide - whole, transform, ACC, whole)
        y = _math.masked_tile(y, i, i < wide - whole, teacher_transform, ACC, whole)
        student, teacher, moment = _with_tiles(x, y, whole, student, teacher, moment, WITH_MOMENT, WIDE)
    # Reduce both rows at once, because each reduction takes two barriers.
    lanes_z, lanes_t = tl.split(tl.max(tl.join(student[0], teacher[0]), 0))
    max_z, in_lanes_z, in_tail_z = _below_maximum(student, z_tail, lanes_z, tl.max(z_tail, 0))
    max_t, in_lanes_t, in_tail_t = _below_maximum(teacher, t_tail, lanes_t, tl.max(t_tail, 0))
    sum_z, sum_t = tl.split(_math.total(tl.join(in_lanes_z, in_lanes_t)))
    sum_z += _math.total(in_tail_z)
    sum_t += _math.total(in_tail_t)
    norms = (max_z, tl.log2(sum_z), max_t, tl.log2(sum_t))
    ratio = max_z * 0
    if WITH_MOMENT:
        moment = _moved(moment, student[1], finite(student[0]) - max_z, finite(teacher[0]) - max_t)
        in_tail = _times(tl.exp2((z_tail - max_z) * LOG2E), (z_tail - max_z) - (t_tail - max_t))
        ratio = (_math.total(moment) + _math.total(in_tail)) / sum_z
    # Find the first column with the maximum of each row by re-reading the first tile that contains it.
    tile_z = tl.where(student[0] == max_z, student[2], NOWHERE)
    tile_t = tl.where(teacher[0] == max_t, teacher[2], NOWHERE)
    tile_z, tile_t = tl.split(tl.min(tl.join(tile_z, tile_t), 0))
    columns_z = _tile_again(z_ptr, tile_z, wide, max_z, transform, WIDE, BLOCK_V, ACC)
    columns_t = _tile_again(t_ptr, tile_t, wide, max_t, teacher_transform, WIDE, BLOCK_V, ACC)
    column_z, column_t = tl.split(tl.min(tl.join(columns_z, columns_t), 0))
    return norms, ratio, _in_tail(column_z, wide, z_tail, max_z), _in_tail(column_t, wide, t_tail, max_t)


@triton.jit
def _subtract_one_hot(grad, v, column, factor, first):
    """Subtract a number from ``grad`` in one column; ``first`` as in ``transformed``."""
    if first is None:
        return tl.where(v == column, grad - factor, grad)
    else:
        i = column - first
        if (i >= 0) & (i < v.shape[0]):
            grad = tl.where(v == i, grad - factor, grad)
        return grad


@triton.jit
def _columns(
    z, x, y, i, first, mask, out_ptr, sums, norms, gradient, spec, SUM: tl.constexpr, STORE: tl.constexpr,
    WITH_RATIO: tl.constexpr, FAST: tl.constexpr, WIDE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Update the sums (if SUM) with one more tile, whose masked columns are -inf, and store its gradient (if STORE)."""
    max_z, log_z, max_t, log_t = norms
    dz = x - max_z
    dt = y - max_t
    lp = dz * LOG2E - log_z
    lq = dt * LOG2E - log_t
    p, q, d = tl.exp2(lp), tl.exp2(lq), dz - dt
    if SUM:
        sums = _with_terms(sums, p, q, lp, lq, d, spec, WITH_RATIO, FAST, WIDE)
    if STORE:
        c, hots, slope = gradient
        grad = _gradient(p, q, lp, lq, d, c, spec, FAST)
        argmax_t, argmax_factor, target, target_factor = hots
        if argmax_factor is not None:
            grad = _subtract_one_hot(grad, i, argmax_t, argmax_factor, first)
        if target_factor is not None:
            grad = _subtract_one_hot(grad, i, target, target_factor, first)
        grad = _transform.logits_transform_bwd(grad, z, i, slope, ACC, first)
        tl.store(out_ptr + i, grad.to(out_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")
    return sums


@triton.jit
def _pass(
    rows, tails, norms, gradient, spec, transforms, REVERSE: tl.constexpr, SUM: tl.constexpr, STORE: tl.constexpr,
    WITH_RATIO: tl.constexpr, ALIGNED: tl.constexpr, FAST: tl.constexpr, BLOCK_V: tl.constexpr, THREADS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Run one pass over both rows, in either direction; return the sums of the row.

    Each tile is loaded while the previous one is processed. A pass that stores is the last one.

    ``rows``: pointers to student, teacher and gradient, number of columns before the tail, and V. ``tails``: the last
    columns of the student as given, of the student transformed, of the teacher transformed. ``gradient``: coefficients,
    one-hot terms, and the transform to backpropagate through; None if the pass does not store. ``spec``: kinds, beta,
    and the mass of the teacher's columns in its whole row, for ``accept`` and as the sum of q, each None if unused.
    """
    z_ptr, t_ptr, out_ptr, wide, V = rows
    z_few, z_tail, t_tail = tails
    transform, teacher_transform = transforms
    EVICT: tl.constexpr = "evict_first" if STORE else ""
    WIDE: tl.constexpr = z_tail.shape[0]
    LANES: tl.constexpr = min(THREADS, BLOCK_V // WIDE)
    i = tl.arange(0, BLOCK_V)
    zero = tl.zeros([1], ACC)
    v = wide + tl.arange(0, WIDE)
    tails = _columns(
        z_few, z_tail, t_tail, v, None, v < V, out_ptr, _filled_sums(zero), norms, gradient, spec,
        SUM, STORE, WITH_RATIO, FAST, WIDE, ACC,
    )  # fmt: skip
    sums = _filled_sums(tl.zeros([LANES], ACC))
    whole = wide // BLOCK_V * BLOCK_V
    if whole < wide:
        mask = i < wide - whole
        z = _math.load_columns(z_ptr + whole, wide - whole, BLOCK_V, ALIGNED, -float("inf"), EVICT)
        t = _math.load_columns(t_ptr + whole, wide - whole, BLOCK_V, ALIGNED, -float("inf"), EVICT)
        x = _math.masked_tile(z, i, mask, transform, ACC, whole)
        y = _math.masked_tile(t, i, mask, teacher_transform, ACC, whole)
        sums = _columns(
            z, x, y, i, whole, mask, out_ptr + whole, sums, norms, gradient, spec,
            SUM, STORE, WITH_RATIO, FAST, WIDE, ACC,
        )  # fmt: skip
    if whole > 0:
        tile = whole - BLOCK_V if REVERSE else 0
        z = _math.load_columns(z_ptr + tile, None, BLOCK_V, ALIGNED, -float("inf"), EVICT)
        t = _math.load_columns(t_ptr + tile, None, BLOCK_V, ALIGNED, -float("inf"), EVICT)
        for _ in range(0, whole, BLOCK_V):  # the last iteration reloads its own tile, which is cheaper than masking
            ahead = tl.maximum(tile - BLOCK_V, 0) if REVERSE else tl.minimum(tile + BLOCK_V, whole - BLOCK_V)
            z_ahead = _math.load_columns(z_ptr + ahead, None, BLOCK_V, ALIGNED, -float("inf"), EVICT)
            t_ahead = _math.load_columns(t_ptr + ahead, None, BLOCK_V, ALIGNED, -float("inf"), EVICT)
            x = transformed(z, i, transform, ACC, tile)
            y = transformed(t, i, teacher_transform, ACC, tile)
            sums = _columns(
                z, x, y, i, tile, None, out_ptr + tile, sums, norms, gradient, spec,
                SUM, STORE, WITH_RATIO, FAST, WIDE, ACC,
            )  # fmt: skip
            z, t, tile = z_ahead, t_ahead, ahead
    return _totals(sums, tails)


@triton.jit
def _zero_row(out_ptr, wide, V, WIDE: tl.constexpr, BLOCK_V: tl.constexpr):
    i = tl.arange(0, BLOCK_V)
    for tile in range(0, wide, BLOCK_V):
        _math.zero_columns(out_ptr + tile, i, i < wide - tile)
    v = wide + tl.arange(0, WIDE)
    _math.zero_columns(out_ptr, v, v < V)


@triton.jit(do_not_specialize_on_alignment=PER_ROW, do_not_specialize=[*SIZES, *Kinds._fields, *Options._fields])
def _divergence_rows(
    logits_ptr, teacher_ptr, out_ptr, weight_ptr, row_ptr, target_ptr, mean_acceptance_ptr, norms_ptr, best_ptr,
    value_ptr, acceptance_ptr, agree_ptr, stats_ptr, hot_ptr,
    L, stride_b, stride_l, teacher_L, teacher_stride_b, teacher_stride_l, out_stride_b, out_stride_l, V, R,
    logit_scale, inv_softcap, skip_id, teacher_logit_scale, teacher_inv_softcap, teacher_skip_id,
    kl, rkl, jsd, tv, nla, lk, lk_soft_ce, soft_ce, teacher_ce, ce, beta, floor, eta, kl_scale,
    FULL: tl.constexpr, WITH_GRAD: tl.constexpr, ALIGNED: tl.constexpr, FAST: tl.constexpr, BLOCK_V: tl.constexpr,
    THREADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    kinds = Kinds(kl, rkl, jsd, tv, nla, lk, lk_soft_ce, soft_ce, teacher_ce, ce)  # type: ignore[call-arg]
    SUMS_FIRST: tl.constexpr = _any(jsd, tv, nla, lk, lk_soft_ce)
    HAS_SUMS: tl.constexpr = WITH_GRAD and stats_ptr is not None
    options = Options(beta, floor, eta, kl_scale)  # type: ignore[call-arg]
    transform = (logit_scale, inv_softcap, skip_id)
    teacher_transform = (teacher_logit_scale, teacher_inv_softcap, teacher_skip_id)
    n = tl.program_id(0)
    z_ptr = _row_at(logits_ptr, _math.row_offset(n, L, stride_b, stride_l), WIDE, ALIGNED)
    grad_ptr = z_ptr
    if out_ptr is not None:
        grad_ptr = _row_at(out_ptr, _math.row_offset(n, L, out_stride_b, out_stride_l), WIDE, ALIGNED)
    wide = V // WIDE * WIDE
    w = tl.load(weight_ptr + n).to(ACC)
    if w == 0:
        if not HAS_SUMS:
            tl.store(value_ptr + n, 0.0)
            tl.store(acceptance_ptr + n, 0.0)
            tl.store(agree_ptr + n, False)
        if WITH_GRAD:
            _zero_row(grad_ptr, wide, V, WIDE, BLOCK_V)
        elif stats_ptr is not None:
            tl.store(stats_ptr + n.to(tl.int64) * STATS + tl.arange(0, STATS), tl.zeros([STATS], ACC))
            tl.store(hot_ptr + n, 0)
    else:
        r = n.to(tl.int64)
        if row_ptr is not None:
            r = tl.load(row_ptr + n)
        known = (r >= 0) & (r < R)
        r = tl.where(known, r, 0)
        t_row = _math.row_offset(r, teacher_L, teacher_stride_b, teacher_stride_l)
        t_ptr = _row_at(teacher_ptr, t_row, WIDE, ALIGNED)
        v = wide + tl.arange(0, WIDE)
        z_few = _tail(z_ptr, wide, V, WIDE)
        z_tail = _math.masked_tile(z_few, v, v < V, transform, ACC)
        t_tail = _math.masked_tile(_tail(t_ptr, wide, V, WIDE), v, v < V, teacher_transform, ACC)
        rows, tails = (z_ptr, t_ptr, grad_ptr, wide, V), (z_few, z_tail, t_tail)
        transforms = transform, teacher_transform
        if HAS_SUMS:
            norms, sums, ratio = _load_stats(stats_ptr + n.to(tl.int64) * STATS)
            hot = tl.load(hot_ptr + n).to(tl.int32)
        else:
            norms, ratio, argmax, hot = _first_pass(
                rows, tails, transforms, rkl is not None and not SUMS_FIRST, ALIGNED, BLOCK_V, THREADS, ACC
            )
        max_z, log_z, max_t, log_t = norms
        poison = tl.where(known, (log_z + log_t) * 0, float("nan"))
        column_norms, best, mass, q_sum = norms, hot, None, None
        if norms_ptr is not None:
            norms_ptr += n.to(tl.int64) * 2
            log_mass = (max_t - tl.load(norms_ptr)) * LOG2E + (log_t - tl.load(norms_ptr + 1) * LOG2E)
            best = tl.load(best_ptr + n).to(tl.int32)
            mass = tl.exp2(log_mass)
            if FULL:
                poison += mass * 0
                norms = (max_z, log_z, max_t, log_t - log_mass)
                q_sum, mass, hot = mass, None, best
        norms = (norms[0], norms[1] + poison, norms[2], norms[3])  # every p of such a row is NaN
        has_hot = hot >= 0
        b = poison
        if beta is not None:
            b = number(beta, ACC)
        at_hot, at_target, y = poison, poison, hot * 0
        has_target = w == w
        if teacher_ce is not None:
            at_hot = (max_z - _math.load_target_logit(z_ptr, hot, V, transform, ACC)) + log_z * LN2
            at_hot = tl.where(has_hot, at_hot, 0.0)
        if ce is not None:
            target = tl.load(target_ptr + n)
            has_target = target != IGNORE
            y = _math.column_of(target, V)
            at_target = (max_z - _math.load_target_logit(z_ptr, target, V, transform, ACC)) + log_z * LN2
            at_target = tl.where(has_target, at_target, 0.0)
        if not HAS_SUMS:
            sums = _filled_sums(poison)
        if SUMS_FIRST and not HAS_SUMS:
            sums = _pass(
                rows, tails, norms, None, (kinds, b, mass, q_sum), transforms,
                True, True, False, rkl is not None, ALIGNED, FAST, BLOCK_V, THREADS, ACC,
            )  # fmt: skip
            ratio = sums.ratio
        lam = poison
        if _any(lk, lk_soft_ce):  # lam: the weight of the first kind in lk
            a = sums.overlap
            if mean_acceptance_ptr is not None:
                a = tl.load(mean_acceptance_ptr).to(ACC)
            lam = number(kl_scale, ACC) * tl.exp(0 - number(eta, ACC) * a)
        if WITH_GRAD or not SUMS_FIRST:
            scale, slope = w, transform
            if inv_softcap is None and logit_scale is not None:  # a constant slope is multiplied into the row's scale
                scale, slope = w * number(logit_scale, ACC), (None, None, skip_id)
            scale = tl.where(has_target & (y < 0), float("nan"), scale + poison)
            c = _factors(sums, ratio, lam, has_hot, has_target, kinds, options, ACC)
            c = Factors(scale * c.p_coef, scale * c.below, scale * c.ratio, c.mean, scale * c.mix, scale * c.apart)
            hot_factor, y_factor = None, None
            if teacher_ce is not None:
                hot_factor = scale * number(teacher_ce, ACC)  # a column of -100 is in no tile
            if ce is not None:
                y_factor = scale * number(ce, ACC)
            hots = (hot, hot_factor, y, y_factor)
            tl.debug_barrier()  # all threads must finish their loads of the row before the first store
            pass_sums = _pass(
                rows, tails, norms, (c, hots, slope), (kinds, b, mass, q_sum), transforms,
                not SUMS_FIRST, not SUMS_FIRST and not HAS_SUMS, WITH_GRAD, False, ALIGNED, FAST, BLOCK_V, THREADS, ACC,
            )  # fmt: skip
            if not SUMS_FIRST and not HAS_SUMS:
                sums = pass_sums
        if not HAS_SUMS:
            value = _value(sums, ratio, norms, at_hot, at_target, lam, q_sum, kinds, options, ACC)
            acceptance = sums.overlap + poison
            if mass is not None:
                acceptance = sums.accept + (poison + mass * 0)
            tl.store(value_ptr + n, value + poison)
            tl.store(acceptance_ptr + n, acceptance)
            tl.store(agree_ptr + n, (argmax == best) & (acceptance == acceptance))
            if stats_ptr is not None:
                _store_stats(stats_ptr + n.to(tl.int64) * STATS, column_norms, sums, ratio)
                tl.store(hot_ptr + n, hot)


@triton.jit(do_not_specialize_on_alignment=PER_ROW, do_not_specialize=["stride", "V", "start", *TRANSFORM[:2]])
def _row_norms(
    logits_ptr, skip_ptr, norms_ptr, column_ptr, stride, V, start, logit_scale, inv_softcap,
    ALIGNED: tl.constexpr, BLOCK_V: tl.constexpr, THREADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute M, log S and the argmax of a row, by the first pass of a row and itself, whose second read is cached."""
    WIDE: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    n = tl.program_id(0).to(tl.int64)
    row_ptr = _row_at(logits_ptr, n * stride, WIDE, ALIGNED)
    transform = (logit_scale, inv_softcap, None)
    if skip_ptr is not None:
        transform = (logit_scale, inv_softcap, tl.load(skip_ptr).to(tl.int32))
    wide = V // WIDE * WIDE
    v = wide + tl.arange(0, WIDE)
    tail = _math.masked_tile(_tail(row_ptr, wide, V, WIDE), v, v < V, transform, ACC)
    rows, tails = (row_ptr, row_ptr, row_ptr, wide, V), (tail, tail, tail)
    norms, _, column, _ = _first_pass(rows, tails, (transform, transform), False, ALIGNED, BLOCK_V, THREADS, ACC)
    tl.store(norms_ptr + 2 * n, norms[0])
    tl.store(norms_ptr + 2 * n + 1, norms[1] * LN2)
    tl.store(column_ptr + n, start + tl.minimum(column, V - 1))  # no column if the row has NaN


def divergence(logits: Tensor, request: DivergenceRequest, *, with_grad: bool) -> DivergenceResult:
    """Launch the kernel over the rows of both sides; see ``rows/_divergence.py``."""
    N, device, acc = logits.shape[0] * logits.shape[1], logits.device, accum_dtype(logits.dtype)
    value, acceptance = (torch.empty(N, dtype=acc, device=device) for _ in range(2))
    agree, saved = torch.empty(N, dtype=torch.bool, device=device), None
    if not with_grad:
        stats = torch.empty(N, SAVED_STATS, dtype=acc, device=device)
        saved = SavedStats(stats, torch.empty(N, dtype=torch.int64, device=device))
    result = DivergenceResult(value, acceptance, agree, saved)
    _launch_rows(logits, request, saved, logits if with_grad else None, result[:3])
    return result


def divergence_grad(logits: Tensor, request: DivergenceRequest, saved: SavedStats, out: Tensor) -> None:
    """Launch the kernel over the rows of both sides; see ``rows/_divergence.py``."""
    _launch_rows(logits, request, saved, out, (None, None, None))


def row_norms(logits: Tensor, transform: Transform, skip: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
    """Launch the kernel over the rows; see ``rows/_divergence.py``."""
    (C, V), device, acc = logits.shape, logits.device, accum_dtype(logits.dtype)
    norms, column = torch.empty(C, 2, dtype=acc, device=device), torch.empty(C, dtype=torch.int64, device=device)
    if C:
        tile = _tiles.divergence_rows(V, logits.element_size(), with_steps=transform[::2] != (None, None))
        logit_scale, inv_softcap, _ = _transform.arguments(transform)
        _row_norms[(C,)](
            logits, skip, norms, column, logits.stride(0), V, start, logit_scale, inv_softcap,
            ALIGNED=_launch.aligned(logits[None]),
            ACC=_launch.acc(acc), **_launch.tile_options(tile), **_launch.alone_on_a_multiprocessor(tile.num_warps),
        )  # fmt: skip
    return norms, column


def _launch_rows(
    logits: Tensor, request: DivergenceRequest, saved: SavedStats | None, out: Tensor | None,
    results: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    """Launch the kernel; the gradient goes to ``out``, maybe the logits. ``results``: value, acceptance rate, agree."""
    spec, teacher, weights, teacher_rows, targets, mean_acceptance, whole, transform, teacher_transform = request
    B, L, V = logits.shape
    N, R = B * L, teacher.shape[0] * teacher.shape[1]
    if N == 0:
        return
    if R == 0:  # the kernel reads some row; not one of the logits, which other programs may overwrite
        teacher = torch.zeros(1, 1, V, dtype=logits.dtype, device=logits.device)
    acc = accum_dtype(logits.dtype)
    rows = (*_launch.strides(logits), 0, 0) if out is None or out is logits else _launch.strides_of_both(logits, out)[0]
    steps = (*transform[::2], *teacher_transform[::2])
    tile = _tiles.divergence_rows(V, logits.element_size(), kinds=len(spec.terms), with_steps=steps != (None,) * 4)
    numbers: dict[str, float | None] = dict.fromkeys((*Kinds._fields, *Options._fields))
    for term in spec.terms:
        numbers |= {term.kind: term.coefficient, **dict(zip(KINDS[term.kind].options, term.options, strict=False))}
    bits = {name: None if number is None else _transform.bits_of(number) for name, number in numbers.items()}
    _divergence_rows[(N,)](
        logits, teacher, None if out is logits else out, weights, teacher_rows, targets,
        mean_acceptance if spec.lam_of_mean else None, *(whole or (None, None)), *results, *(saved or (None, None)),
        *rows[:3], *_launch.strides(teacher), *rows[3:], V, R,
        *_transform.arguments(transform), *_transform.arguments(teacher_transform), **bits,
        FULL=spec.full and whole is not None, WITH_GRAD=out is not None, ALIGNED=_launch.aligned(logits, teacher, out),
        FAST=acc == torch.float32 and _launch.on_nvidia(), ACC=_launch.acc(acc), **_launch.tile_options(tile),
        **_launch.alone_on_a_multiprocessor(tile.num_warps),
    )  # fmt: skip
