"""The executor of PTX: each instruction against an independent computation, and faults planted into kernels."""

import contextlib
import math
import operator
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.conftest import EXECUTED

if not EXECUTED:
    pytest.skip("the executor of PTX is tested by `make ptx`", allow_module_level=True)

from tools.ptx import arithmetic, memory, threads
from tools.ptx.memory import FaultError
from tools.ptx.threads import Launch, launch

N = 64  # threads
DTYPES = {"b": "u", "u": "u", "s": "i", "f": "f"}


def dtype_of(kind):
    """Return the NumPy type of a PTX type; bits of 16-bit floats are integers."""
    return np.dtype("u2" if kind in ("bf16", "f16") else f"{DTYPES[kind[0]]}{int(kind[1:]) // 8}")


def execute(body, inputs, *outputs, count=N, shared=0, programs=1):
    """Execute PTX on ``%a0, %a1, ...``, one number per thread, and return ``%o0, ...`` of these types."""
    outputs = [np.zeros(count * programs, dtype) for dtype in outputs]
    names = [f"a{k}" for k in range(len(inputs))] + [f"o{k}" for k in range(len(outputs))]
    declared, loads, stores = "", "", ""
    for k, (name, x) in enumerate(zip(names, (*inputs, *outputs), strict=True)):
        bits, at = 8 * x.itemsize, f"%at{k}"
        declared += f".reg .b{max(bits, 16)} %{name};\n.reg .b64 {at};\n"
        loads += f"ld.param.b64 {at}, [k_param_{k}];\nmad.wide.u32 {at}, %thread, {x.itemsize}, {at};\n"
        loads += f"ld.global.b{bits} %{name}, [{at}];\n" if name[0] == "a" else ""
        stores += f"st.global.b{bits} [{at}], %{name};\n" if name[0] == "o" else ""
    parameters = ",\n".join(f".param .u64 k_param_{k}" for k in range(len(names)))
    registers = ".reg .pred %p<9>;\n.reg .b16 %rs<9>;\n.reg .b32 %r<9>;\n.reg .b64 %rd<9>;\n.reg .b32 %thread, %tid;\n"
    start = f"mov.u32 %tid, %tid.x;\nmov.u32 %r0, %ctaid.x;\nmad.lo.s32 %thread, %r0, {count}, %tid;\n"
    text = f".visible .entry k(\n{parameters}\n)\n.reqntid {count}\n{{\n{registers}{declared}{start}{loads}{body}\n"
    tensors = [*zip(names, map(torch.from_numpy, (*inputs, *outputs)), strict=True)]
    pointers = [struct.pack("<Q", tensor.data_ptr()) for _, tensor in tensors]
    launch(Launch("k", f"{text}{stores}ret;\n}}\n", (programs, 1, 1), shared, pointers, tensors))
    return outputs if len(outputs) > 1 else outputs[0]


def execute_one(instruction, operands, result):
    """Execute an instruction that writes ``%o0`` and reads ``%a0, %a1, ...``."""
    return execute(f"{instruction} %o0, {', '.join(f'%a{k}' for k in range(len(operands)))};", operands, result)


def drawn(dtype, seed=0):
    """Draw numbers of every size, among them the special ones."""
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype.kind == "f":
        x = (rng.standard_normal(N) * 2.0 ** rng.integers(-40, 40, N)).astype(dtype)
        info = np.finfo(dtype)
        special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1, -1, 2, 0.5, info.max, info.tiny, -info.tiny / 4]
    else:
        info = np.iinfo(dtype)
        x = rng.integers(info.min, info.max, N, dtype, endpoint=True)
        special = [0, 1, 2, 31, 33, info.max, info.min, info.max - 1, info.min + 1]
    x[: len(special)] = special
    return rng.permutation(x)


def wrapped(number, dtype):
    return np.array([number & (256**dtype.itemsize - 1)], np.uint64).astype(f"u{dtype.itemsize}").view(dtype)[0]


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def multiply_add(a, b, c):
    return a * b + c


def extracted(a, first, count):
    return a >> first & (1 << count) - 1


def extracted_signed(a, first, count):
    bits = extracted(a, first, count)
    return bits - (1 << count) if bits >> (count - 1) & 1 else bits


def inserted(a, b, first, count):
    replaced = (1 << count) - 1 << first
    return b & ~replaced | a << first & replaced


def permuted(a, b, selector):
    taken = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    choices = [selector >> 4 * k & 15 for k in range(4)]
    return int.from_bytes(bytes(taken[c & 7] >> 7 & 1 and 255 if c & 8 else taken[c & 7] for c in choices), "little")


SHIFTS = np.arange(N, dtype=np.uint32)  # beyond 32 bits, too
FIRST, COUNT = SHIFTS % 20, 1 + SHIFTS % 12
# (instruction, its types, function of Python integers, number of operands that are drawn, other operands)
INSTRUCTIONS = [
    ("add", "s16 s32 s64", operator.add, 2), ("sub", "s32 s64", operator.sub, 2), ("neg", "s32 s64", operator.neg, 1),
    ("mul.lo", "s32 s64", operator.mul, 2), ("mad.lo", "s32 s64", multiply_add, 3),
    ("mul.wide", "u32 s32", operator.mul, 2), ("mad.wide", "u32 s32", multiply_add, 3),
    ("mul.hi", "u64", lambda a, b: a * b >> 64, 2),
    ("div", "s32", quotient, 1, np.where(drawn("i4", 5) == 0, 7, drawn("i4", 5))),
    ("min", "s32 u32 s64 u64", min, 2), ("max", "s32 u32 s64 u64", max, 2),
    ("and", "b16 b32 b64", operator.and_, 2), ("or", "b16 b32 b64", operator.or_, 2),
    ("xor", "b16 b32 b64", operator.xor, 2), ("not", "b16 b32 b64", operator.invert, 1),
    ("shl", "b16 b32 b64", operator.lshift, 1, SHIFTS), ("shr", "u16 u32 s32 u64 s64", operator.rshift, 1, SHIFTS),
    ("bfe", "u32 u64", extracted, 1, FIRST, COUNT), ("bfe", "s32", extracted_signed, 1, FIRST, COUNT),
    ("bfi", "b32 b64", inserted, 2, FIRST, COUNT), ("popc", "b32 b64", int.bit_count, 1),
    ("cvt", "u64.u32 s64.s32 s64.s16 u16.u32 u32.u64 u16.u64", int, 1),
]  # fmt: skip
INTEGERS = {f"{name}.{kind}": rest for name, kinds, *rest in INSTRUCTIONS for kind in kinds.split()}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    function, count, *others = INTEGERS[name]
    kind = dtype_of(name.rpartition(".")[2])
    result = np.dtype(f"{kind.kind}8") if "wide" in name else dtype_of(name.split(".")[1]) if "cvt" in name else kind
    operands = [drawn(result if "wide" in name and k == 2 else kind, k) for k in range(count)] + others
    result = np.dtype("u4") if "popc" in name else result
    wanted = [wrapped(function(*numbers), result) for numbers in zip(*(x.tolist() for x in operands), strict=True)]
    assert execute_one(name, operands, result).tolist() == wanted


@pytest.mark.parametrize("selector", [0x3340, 0x5410, 0x7770, 0x0123, 0xBA98, 0xF4C1], ids=hex)
def test_bytes_are_permuted(selector):
    a, b = drawn("u4"), drawn("u4", 1)
    found = execute(f"prmt.b32 %o0, %a0, %a1, {selector:#x}U;", [a, b], "u4")
    assert found.tolist() == [permuted(*pair, selector) for pair in zip(a.tolist(), b.tolist(), strict=True)]


def is_rounded(exact, found):
    """Return True if a float is nearest to a fraction, and even if two are."""
    if not np.isfinite(found):
        return abs(exact) >= Fraction(float(np.finfo(found.dtype).max))
    error = abs(Fraction(float(found)) - exact)
    with np.errstate(over="ignore"):
        around = [np.nextafter(found, found.dtype.type(side)) for side in (-np.inf, np.inf)]
    others = [abs(Fraction(float(x)) - exact) for x in around if np.isfinite(x)]
    is_even = int(found.view(f"u{found.itemsize}")) % 2 == 0
    return all(error < other or (error == other and is_even) for other in others)


FLOATS = {
    "add": operator.add, "sub.rn": operator.sub, "mul": operator.mul, "div.rn": operator.truediv,
    "fma.rn": multiply_add,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_rounded_once(name, kind):
    function = FLOATS[name]
    operands = [drawn(dtype_of(kind), k) for k in range(3 if name == "fma.rn" else 2)]
    found = execute_one(f"{name}.{kind}", operands, dtype_of(kind))
    with np.errstate(all="ignore"):
        plain = function(*operands)
    for x, y, numbers in zip(found, plain, zip(*operands, strict=True), strict=True):
        if np.isfinite(numbers).all() and not (name == "div.rn" and numbers[1] == 0):
            assert is_rounded(function(*(Fraction(float(n)) for n in numbers)), x), numbers
        else:
            np.testing.assert_equal(x, y)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_smaller_larger_and_signs(kind):
    dtype = dtype_of(kind)
    a, b = (np.append(drawn(dtype, k)[4:], x).astype(dtype) for k, x in enumerate(([0.0, -0.0, 1, math.nan],) * 2))
    b[-4:-2] = b[-3], b[-4]
    body = f"min.{kind} %o0, %a0, %a1; max.{kind} %o1, %a0, %a1; abs.{kind} %o2, %a0; neg.{kind} %o3, %a0;"
    found = execute(body, [a, b], *(dtype,) * 4)
    for x, y in zip(found, (np.fmin(a, b), np.fmax(a, b), abs(a), -a), strict=True):
        np.testing.assert_equal(x, y)
    assert [np.signbit(x[-4:-2]).tolist() for x in found[:2]] == [[True, True], [False, False]]
    assert np.signbit(found[3]).tolist() == (~np.signbit(a)).tolist()


ORDERED = {c: getattr(operator, c) for c in ("eq", "ne", "lt", "le", "gt", "ge")}
COMPARISONS = {
    **{c: lambda x, y, f=f: f(x, y) and x == x and y == y for c, f in ORDERED.items()},
    **{f"{c}u": lambda x, y, f=f: f(x, y) or x != x or y != y for c, f in ORDERED.items() if c != "eq"},
    "num": lambda x, y: x == x and y == y,
    "nan": lambda x, y: x != x or y != y,
}


@pytest.mark.parametrize("kind", ["f32", "f64", "s32", "u32", "s64", "u64", "b16"])
def test_comparisons(kind):
    a, b = (drawn(dtype_of(kind), k) for k in range(2))
    b[::3] = a[::3]
    for name, function in COMPARISONS.items() if kind[0] == "f" else ORDERED.items():
        compared = f"setp.{name}.{kind} %p1, %a0, %a1;"
        body = f"{compared} selp.b32 %o0, 1, 0, %p1; not.pred %p2, %p1; mov.b32 %o1, 2; @%p2 mov.b32 %o1, 3;"
        found, guarded = execute(body, [a, b], "u4", "u4")
        wanted = [bool(function(x, y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        assert found.astype(bool).tolist() == wanted, name
        assert guarded.tolist() == [2 if w else 3 for w in wanted], name


OF_16_BITS = {"bf16": torch.bfloat16, "f16": torch.float16}


@pytest.mark.parametrize(("name", "dtype"), OF_16_BITS.items())
def test_two_comparisons_of_16_bits(name, dtype):
    a, b = drawn("u4"), drawn("u4", 1)
    b[::3], b[1::3] = a[::3], a[1::3] ^ (1 << 20)
    halves = [torch.from_numpy(x.view("u2").copy()).view(dtype).view(N, 2).double() for x in (a, b)]
    for comparison in ("eq", "ne", "neu", "lt", "geu", "num"):
        compared = f"setp.{comparison}.{name}x2 %p1|%p2, %a0, %a1;"
        found = execute(f"{compared} selp.b32 %o0, 1, 0, %p1; selp.b32 %o1, 1, 0, %p2;", [a, b], "u4", "u4")
        for k, got in enumerate(found):
            wanted = [COMPARISONS[comparison](x, y) for x, y in zip(*(h[:, k].tolist() for h in halves), strict=True)]
            assert got.astype(bool).tolist() == wanted, comparison


def same_bits_or_nan(found, wanted):
    """Compare the bits of two tensors of floats; all NaN are equal."""
    return bool(((found == wanted) | (found.isnan() & wanted.isnan())).all())


@pytest.mark.parametrize(("name", "dtype"), OF_16_BITS.items())
def test_floats_of_16_bits(name, dtype):
    x, y = drawn("f4"), (300 * np.random.default_rng(1).standard_normal(N)).astype("f4")
    wanted = [torch.from_numpy(t).to(dtype) for t in (x, y)]
    body = f"cvt.rn.{name}.f32 %o0, %a0; cvt.rn.{name}x2.f32 %o1, %a0, %a1; cvt.f32.{name} %o2, %a2;"
    bits = drawn("u2", 2)
    one, two, wide = execute(body, [x, y, bits], "u2", "u4", "f4")
    for found, expected in ((one, wanted[0]), (two >> 16, wanted[0]), (two & 0xFFFF, wanted[1])):
        assert same_bits_or_nan(torch.from_numpy(found.astype("u2")).view(dtype), expected)
    assert same_bits_or_nan(torch.from_numpy(wide), torch.from_numpy(bits).view(dtype).float())


@pytest.mark.parametrize("name", ["f32.s32", "f32.u32", "f64.s32", "f64.u32", "f64.s64", "f32.s64", "f32.f64"])
def test_conversions_are_rounded(name):
    target, source = map(dtype_of, name.split("."))
    x = drawn(source)
    x = x[np.isfinite(x)][:32] if source.kind == "f" else x[:32]
    found = execute(f"cvt.rn.{name} %o0, %a0;", [x], target, count=32)
    assert all(is_rounded(Fraction(a), b) for a, b in zip(x.tolist(), found, strict=True))


@pytest.mark.parametrize(("how", "whole"), [("rzi", np.trunc), ("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil)])
def test_floats_become_whole(how, whole):
    x = drawn("f4")
    integers, floored = execute(f"cvt.{how}.s32.f32 %o0, %a0; cvt.rmi.ftz.f32.f32 %o1, %a0;", [x], "i4", "f4")
    clamped = [0 if v != v else int(min(max(float(whole(v)), -(2**31)), 2**31 - 1)) for v in x.tolist()]
    assert integers.tolist() == clamped
    np.testing.assert_equal(floored, np.floor(np.where(abs(x) < 2.0**-126, 0, x)))


@pytest.mark.parametrize("far", [False, True])
def test_approximations_are_within_the_bounds_of_the_manual(far, monkeypatch):
    monkeypatch.setattr(arithmetic, "FAR", far)
    x = np.append(np.random.default_rng(0).uniform(-30, 30, N - 4), [0, 1, -math.inf, math.nan]).astype("f4")
    positive, wide = abs(drawn("f4", 1)), drawn("f8", 2)
    body = "ex2.approx.ftz.f32 %o0, %a0; lg2.approx.ftz.f32 %o1, %a1; div.full.f32 %o2, %a0, %a1;"
    body += "rcp.approx.ftz.f64 %o3, %a2; abs.ftz.f32 %o4, %a1;"
    found = execute(body, [x, positive, wide], "f4", "f4", "f4", "f8", "f4")
    with np.errstate(all="ignore"):
        normal = np.where(positive < 2.0**-126, 0, positive).astype("f8")
        wanted = [np.exp2(x.astype("f8")), np.log2(normal), x.astype("f8") / positive, 1 / wide]
    bounds = (2.0**-22.4, 0.0), (2.0**-22, 2.0**-22), (2.0**-22, 1.5e-45), (2.0**-19, 2.3e-308)
    for got, want, (relative, absolute) in zip(found, wanted, bounds, strict=False):
        limits = np.isfinite(want) & (abs(want) < np.finfo(got.dtype).max)
        np.testing.assert_allclose(got[limits], want[limits], relative, absolute)
    np.testing.assert_equal(found[4], normal)
    exact = np.exp2(x.astype("f8")).astype("f4")
    assert (np.nan_to_num(found[0]) != np.nan_to_num(exact)).any() == far
    assert found[0][-4:-2].tolist() == [1.0, 2.0]


def test_registers_are_packed_and_split():
    x = drawn("u8")
    body = "mov.b64 {%o0, %o1}, %a0; mov.b64 %o2, {%o1, %o0}; { .reg .b32 t; mov.b64 {t, %r1}, %a0; mov.b32 %o3, t; }"
    low, high, swapped, scoped = execute(body, [x], "u4", "u4", "u8", "u4")
    assert low.tolist() == scoped.tolist() == (x & 0xFFFFFFFF).tolist()
    assert high.tolist() == (x >> 32).tolist()
    assert swapped.tolist() == [v >> 32 | (v & 0xFFFFFFFF) << 32 for v in x.tolist()]


SHUFFLED = {
    "bfly": ("4, 31", lambda t: t ^ 4), "up": ("2, 0", lambda t: t - 2 if t % 32 >= 2 else t),
    "down": ("8, 31", lambda t: t + 8 if t % 32 < 24 else t), "idx": ("%a1, 31", lambda t: t - t % 32 + t * 7 % 32),
}  # fmt: skip


@pytest.mark.parametrize("kind", SHUFFLED)
def test_shuffles(kind):
    x, by = drawn("u4"), (np.arange(N) * 7 % 32).astype("u4")
    operands, source = SHUFFLED[kind]
    found = execute(f"shfl.sync.{kind}.b32 %o0, %a0, {operands}, -1;", [x, by], "u4")
    assert found.tolist() == [x[source(t)] for t in range(N)]


def test_reductions_over_a_warp():
    x = drawn("i4")
    body = " ".join(f"redux.sync.{f}.s32 %o{k}, %a0, -1;" for k, f in enumerate(("add", "min", "max")))
    found = execute(body, [x], "i4", "i4", "i4")
    warps = x.reshape(-1, 32)
    sums = [wrapped(sum(w.tolist()), np.dtype("i4")) for w in warps]
    for got, want in zip(found, (sums, warps.min(1), warps.max(1)), strict=True):
        assert got.tolist() == np.repeat(want, 32).tolist()


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_in_shared_memory(trans):
    m = np.random.default_rng(0).integers(0, 1 << 16, (32, 8)).astype("u2")
    registers = "%o0, %o1, %o2, %o3"
    to_rows = "shl.b32 %r1, %tid, 4; st.shared.v4.b32 [%r1], {%a0, %a1, %a2, %a3}; bar.warp.sync -1;"
    load = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{registers}}}, [%r1];"
    columns = [np.ascontiguousarray(m.view("u4")[:, k]) for k in range(4)]
    found = execute(f"{to_rows} {load}", columns, *["u4"] * 4, count=32, shared=512)
    for k, got in enumerate(found):
        matrix = m[8 * k : 8 * k + 8].T if trans else m[8 * k : 8 * k + 8]
        assert got.tolist() == np.ascontiguousarray(matrix).view("u4").ravel().tolist()
    store = f"shl.b32 %r1, %tid, 4; stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r1], {{%a0, %a1, %a2, %a3}};"
    back = f"bar.warp.sync -1; ld.shared.v4.b32 {{{registers}}}, [%r1];"
    stored = execute(store + back, found, *["u4"] * 4, count=32, shared=512)
    assert np.stack(stored, 1).tolist() == m.view("u4").tolist()


THROUGH_SHARED = "shl.b32 %r2, %tid, 2; st.shared.b32 [%r2], %a0; {} sub.s32 %r4, 252, %r2; ld.shared.b32 %o0, [%r4];"


def test_programs_have_shared_memory_of_their_own():
    x = drawn("u4")
    both = np.concatenate([x, x + 1])
    found = execute(THROUGH_SHARED.format("bar.sync 0;"), [both], "u4", shared=4 * N, programs=2)
    assert found.tolist() == [*x[::-1], *(x + 1)[::-1]]


def test_threads_that_branch_apart_meet_again():
    """Each thread runs a loop another number of times, with a condition in it."""
    turns = (np.arange(N) * 7 % 23).astype("u4")
    body = (
        "mov.b32 %r1, 0; mov.b32 %o0, 0;\n$L1:\nsetp.ge.u32 %p1, %r1, %a0;\n@%p1 bra $L4;\nand.b32 %r2, %r1, 1;\n"
        "setp.eq.b32 %p2, %r2, 0;\n@%p2 bra $L2;\nadd.s32 %o0, %o0, 5;\nbra.uni $L3;\n$L2:\nadd.s32 %o0, %o0, %r1;\n"
        "$L3:\nadd.s32 %r1, %r1, 1;\nbra.uni $L1;\n$L4:\nredux.sync.add.s32 %r3, %o0, -1; add.s32 %o0, %o0, 1000;"
    )
    wanted = [1000 + sum(5 if i % 2 else i for i in range(n)) for n in turns.tolist()]
    assert execute(body, [turns], "u4").tolist() == wanted


PARTLY = "mov.b32 %o0, 0; setp.lt.u32 %p1, %tid, 40; @%p1 bra $L1; bra.uni $L2;\n$L1:\n{}\n$L2:\n"
FAULTS = {
    "no barrier between two warps": (THROUGH_SHARED.format(""), "any order"),
    "a barrier of each warp between two warps": (THROUGH_SHARED.format("bar.warp.sync -1;"), "any order"),
    "a barrier for some warps": (PARTLY.format("bar.sync 0;"), "only some threads"),
    "a barrier for some threads of a warp": (PARTLY.format("bar.warp.sync -1;"), "only some of its threads"),
    "a shuffle of some threads": (PARTLY.format("shfl.sync.bfly.b32 %o0, %a0, 1, 31, -1;"), "only some of its threads"),
    "a shuffle with other members": ("shfl.sync.bfly.b32 %o0, %a0, 1, 31, 255;", "only some of its threads"),
    "shared memory that nobody wrote": ("shl.b32 %r2, %tid, 2; ld.shared.b32 %o0, [%r2];", "nobody wrote"),
    "beyond shared memory": ("mov.b32 %o0, 0; shl.b32 %r2, %tid, 3; st.shared.b32 [%r2], %o0;", "bytes of shared"),
    "a misaligned vector": ("add.s64 %rd1, %at0, 4; st.global.v2.b32 [%rd1], {%a0, %a0};", "misaligned"),
    "a loop without an end": ("mov.b32 %o0, 0;\n$L1:\nbra.uni $L1;", "endless"),
}


@contextlib.contextmanager
def fault(message):
    """Expect a fault, and do not report it as one of the test."""
    before = len(threads.faults)
    with pytest.raises(FaultError, match=message):
        yield
    del threads.faults[before:]


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_instructions_are_found(name, monkeypatch):
    monkeypatch.setattr(threads, "MOST_BLOCKS", 1000)
    body, message = FAULTS[name]
    with fault(message):
        execute(body, [drawn("u4")], "u4", shared=4 * N)


@pytest.mark.parametrize("first", [False, True])
def test_the_first_of_different_values_at_one_place_may_stay(first, monkeypatch):
    monkeypatch.setattr(memory, "FIRST_STAYS", first)
    body = "mov.b32 %r1, 0; st.shared.b32 [%r1], %tid; bar.sync 0; ld.shared.b32 %o0, [%r1];"
    with contextlib.nullcontext() if first else fault("different values"):
        assert execute(body, [], "u4", shared=4).tolist() == [0] * N


@pytest.mark.parametrize(
    "body", ["mma.sync.aligned %r1, %r2;", "add.s32 %o0, %nothing, 1;", "call foo;", "bar.sync 1, 64;"]
)
def test_unknown_instructions_are_errors(body):
    with pytest.raises(NotImplementedError, match="PTX"):
        execute(body, [drawn("u4")], "u4")
