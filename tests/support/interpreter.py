"""Faster Triton interpreter for the tests: patches ``triton.language`` once per launch and creates types once.

Whenever a kernel calls a helper, the original interpreter searches all of ``triton.language`` and replaces some 300
attributes. This takes half of the time of a launch. Here, the replacements are determined once per process and
installed once per launch, so a helper finds them in place.

Half of the remaining time is spent on the type of each result, three representations of its shape, and comparisons of
two shapes. During a launch, each type is therefore created only once per shape and dtype (``types_made_once``).

The results are bit-identical (``test_interpreter.py``). The supported sources of Triton are identified by their hash.
With other sources, the original interpreter is used.

Accesses are checked (``check_accesses``).
"""

import bisect
import builtins
import dataclasses
import functools
import hashlib
import importlib
import inspect
import itertools
import sys
import types
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import triton.runtime.interpreter as triton_interpreter
from torch.utils._pytree import tree_leaves
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import GridExecutor

KNOWN = {
    "7efb4434d2b90fa7",  # Triton 3.6
    "9c9078a13a654b9e",  # 3.7, 3.8
    "94065fedc15ba881",  # 3.9
}
KNOWN_TYPES = {"8a3d8f76d926c27c"}  # 3.9
THEIRS = triton_interpreter._patch_lang
core = triton_interpreter.tl.core


def hashed(parts):
    """Return the hash of the sources of ``parts()``, or an empty string if one of them is missing."""
    try:
        return hashlib.sha256("".join(map(inspect.getsource, parts())).encode()).hexdigest()[:16]
    except (AttributeError, OSError):
        return ""


def internals():
    """Return the sources on which ``patched_once`` depends: callers, behaviour and result of ``_patch_lang``."""
    return [
        triton_interpreter.GridExecutor.__call__,
        triton_interpreter.InterpretedFunction.__call__,
        triton_interpreter._LangPatchScope,
        triton_interpreter._patch_attr,
        core.builtin,
        THEIRS,
    ]


def sources_of_types():
    """Return the sources that ``types_made_once`` replaces or depends on."""
    return [
        core.dtype.__eq__,
        core.block_type,
        core.tensor.__init__,
        core.tuple.__init__,
        core.constexpr.__init__,
        core._unwrap_shape,
        core._unwrap_if_constexpr,
        core.pointer_type,
        TritonSemantic.make_tensor,
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic._cast_to_computation_type,
        TritonSemantic.computation_type_impl,
        TritonSemantic.broadcast_impl_value,
        TritonSemantic.cast,
        triton_interpreter._get_np_dtype,
        triton_interpreter.TensorHandle,
        triton_interpreter.InterpreterBuilder.get_block_ty,
        triton_interpreter.InterpreterBuilder.get_ptr_ty,
    ]


def types_made_once():
    """Return (owner, name, value) of the replacements in a launch that avoid creating and comparing types again."""
    dtype, block_type, pointer_type = core.dtype, core.block_type, core.pointer_type
    tensor, constexpr, unwrap = core.tensor, core.constexpr, core._unwrap_if_constexpr
    equal, equal_blocks, of_tensor = dtype.__eq__, block_type.__eq__, tensor.__init__
    np_dtype, binary = triton_interpreter._get_np_dtype, TritonSemantic.binary_op_type_checking_impl
    broadcast = TritonSemantic.broadcast_impl_value
    # Name of a type -> its smallest Python number. Two tensors of the type, or one and such a number, give the type.
    as_they_are = dict.fromkeys((t.name for t in (core.float32, core.float64, core.int32, core.int64)), -(2**31))
    as_they_are |= dict.fromkeys((core.uint32.name, core.uint64.name), 0)
    constants = {}

    @functools.cache
    def sizes_of_shape(sizes):
        """Return shape, size and name of the shape of a block type, and size and shape of its tensors."""
        shape = core.tuple(sizes)
        return (
            shape,
            core.validate_block_shape(shape),
            str(shape),
            constexpr(np.prod(sizes).item()),
            core.tuple([*map(constexpr, sizes)]),
        )

    scalar = constexpr(1), core.tuple([])

    def block_init(self, element_ty, shape):
        sizes = builtins.tuple(s.value if isinstance(s, constexpr) else s for s in shape)
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty = element_ty
        self.shape, self.numel, name, *self.tensor_sizes = sizes_of_shape(sizes)
        self.name = f"<{name}, {element_ty}>"
        self.made = {}

    def with_element_ty(self, element_ty):
        if type(element_ty) is dtype:
            key = element_ty.name
        elif type(element_ty) is pointer_type and type(element_ty.element_ty) is dtype:
            key = element_ty.element_ty.name, element_ty.address_space, element_ty.const
        else:
            return block_type(element_ty, self.shape)
        if key not in self.made:
            self.made[key] = block_type(element_ty, self.shape)
        return self.made[key]

    def tensor_init(self, handle, type):
        if not type.is_block():
            self.numel, self.shape = scalar
        elif hasattr(type, "tensor_sizes"):
            self.numel, self.shape = type.tensor_sizes
        else:
            return of_tensor(self, handle, type)
        self.handle, self.type, self.dtype = handle, type, type.scalar

    @functools.cache
    def np_dtype_of(name):
        return np_dtype(dtype(name))

    def np_dtype_once(dtype_or_block):
        dtype_or_block = dtype_or_block.scalar
        return np_dtype_of(dtype_or_block.name) if type(dtype_or_block) is dtype else np_dtype(dtype_or_block)

    def binary_once(self, lhs, rhs, *pointers, **checks):
        if type(lhs) is tensor and lhs.dtype.name in as_they_are:
            if type(rhs) is tensor and lhs.dtype is rhs.dtype:
                return self.broadcast_impl_value(lhs, rhs)
            number = type(rhs)
            if (number is float and lhs.dtype.is_floating()) or (
                number is int and as_they_are[lhs.dtype.name] <= rhs < 2**31
            ):
                return lhs, constant_like(self, lhs, rhs)
        return binary(self, lhs, rhs, *pointers, **checks)

    def constant_like(self, lhs, number):
        """Return a tensor of this number like ``lhs``, which operations read only."""
        key = lhs.type.name, number.hex() if type(number) is float else number  # 0.0 is equal to -0.0 and to 0
        if key not in constants:
            if len(constants) > 1000:
                constants.clear()
            constants[key] = broadcast(self, lhs, self.scalar_constant(number, lhs.dtype))[1]
            constants[key].handle.data.flags.writeable = False
        return constants[key]

    def handle_init(self, data, dtype, attr=None):  # without the check of the size that each operation has chosen
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def unwrap_once(value):
        kind = type(value)
        if kind is constexpr:
            return value.value
        return value if kind is tensor or kind is int or kind is bool or kind is str else unwrap(value)

    def broadcast_once(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return [
        (dtype, "__eq__", lambda self, other: self is other or equal(self, other)),
        (block_type, "__eq__", lambda self, other: self is other or equal_blocks(self, other)),
        (block_type, "__init__", block_init),
        (block_type, "with_element_ty", with_element_ty),
        (block_type, "to_ir", lambda self, builder: self),  # the builder would return an equal type
        (core, "_unwrap_if_constexpr", unwrap_once),
        (triton_interpreter.TensorHandle, "__init__", handle_init),
        (tensor, "__init__", tensor_init),
        (triton_interpreter, "_get_np_dtype", np_dtype_once),
        (TritonSemantic, "binary_op_type_checking_impl", binary_once),
        (TritonSemantic, "broadcast_impl_value", broadcast_once),
    ]


def patched_once():
    """Return a ``_patch_lang`` that installs all replacements for any function, once per launch."""
    changes, launches = [], []

    class Launch(triton_interpreter._LangPatchScope):
        def restore(self):
            super().restore()
            launches.remove(self)

    def patch_lang(function):
        if launches:  # a helper: everything is in place, and its caller restores nothing
            return triton_interpreter._LangPatchScope()
        if not changes:
            changes.extend(recorded())
            changes.extend(types_made_once() if hashed(sources_of_types) in KNOWN_TYPES else [])
        launch = Launch()
        for change in changes:
            launch.set_attr(*change)
        launches.append(launch)
        return launch

    return patch_lang


def recorded():
    """Return (owner, name, value) of Triton's replacements for functions that see both names of ``triton.language``."""
    language = {"tl": triton_interpreter.tl, "core": core}
    scope = THEIRS(types.FunctionType(patched_once.__code__, language))
    changes = {(id(owner), name): (owner, name, direct(vars(owner)[name])) for owner, name, _ in scope._changes}
    scope.restore()
    return changes.values()


def direct(replaced):
    """Replace a checked builtin, which first verifies its semantic, by one that passes the semantic directly."""
    builtin = (getattr(replaced, "__kwdefaults__", None) or {}).get("member")
    if getattr(builtin, "__code__", None) is not core.builtin(lambda: None).__code__:
        return replaced
    function, semantic = builtin.__wrapped__, TritonSemantic(triton_interpreter.interpreter_builder)

    def call(*args, **options):
        options["_semantic"] = semantic
        return function(*args, **options)

    return call


def install():
    """Install the patches, once per process and before the first launch."""
    if triton_interpreter._patch_lang is not THEIRS:
        return
    importlib.import_module("dllm_kernels.backends.triton._launch")  # fixes Triton 3.6 with NumPy 2.4
    if hashed(internals) in KNOWN:
        triton_interpreter._patch_lang = patched_once()
    _check_overflow(False)
    check_accesses(triton_interpreter.interpreter_builder)


def check_accesses(builder):
    """Let an access outside of the tensors of a launch raise, and masked lanes without ``other`` hold no zeros.

    They hold small and the largest integers, or numbers and NaN. A GPU leaves any value there, Triton's interpreter 0.
    """
    if "create_masked_load" in vars(builder):
        return  # installed already
    load, store, execute = builder.create_masked_load, builder.create_masked_store, GridExecutor.__call__
    starts = ends = (0,)  # addresses of the tensors, in order, and behind them

    def launch(self, *args, **options):
        nonlocal starts, ends
        spans = [(0, 0)]
        for t in tree_leaves((args, options)):
            if isinstance(t, torch.Tensor) and t.numel():
                last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
                spans.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()))
        starts, ends = zip(*sorted(spans), strict=True)
        ends = [*itertools.accumulate(ends, max)]  # a tensor may be a part of another one
        execute(self, *args, **options)

    def check(ptrs, mask):
        at, size = ptrs.data[mask.data], triton_interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize
        if at.size and int(at.max()) + size > ends[bisect.bisect(starts, int(at.min())) - 1]:  # of several tensors
            inside = [address + size <= ends[bisect.bisect(starts, address) - 1] for address in at.ravel().tolist()]
            if not all(inside):
                raise IndexError("a kernel accesses memory outside of its tensors")

    @functools.cache
    def any_values(shape, dtype):
        values = [7, np.nan] if dtype.kind == "f" else [1, True if dtype.kind == "b" else np.iinfo(dtype).max, 1]
        return np.resize(np.array(values, dtype), shape)

    def checked_load(ptrs, mask, other, *options, **keywords):
        check(ptrs, mask)
        if other is None:
            kind = ptrs.get_element_ty()
            lanes = any_values(ptrs.data.shape, triton_interpreter._get_np_dtype(kind))
            other = triton_interpreter.TensorHandle(lanes, kind)
        return load(ptrs, mask, other, *options, **keywords)

    def checked_store(ptrs, value, mask, *options, **keywords):
        check(ptrs, mask)
        return store(ptrs, value, mask, *options, **keywords)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    GridExecutor.__call__ = launch


def _check_overflow(checked):
    """Set whether 32-bit integer overflow raises. By default, Triton computes integers twice but asserts nothing."""
    builder = triton_interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=checked, debug=checked)


@contextmanager
def checked_overflow():
    _check_overflow(True)
    try:
        yield
    finally:
        _check_overflow(False)


@contextmanager
def tritons_own():
    """Use the original interpreter without the patches of ``install``, but with the package's own fix of Triton 3.6."""
    ours, builder = triton_interpreter._patch_lang, triton_interpreter.interpreter_builder
    options = builder.options
    triton_interpreter._patch_lang, builder.options = THEIRS, type(options)()
    try:
        yield
    finally:
        triton_interpreter._patch_lang, builder.options = ours, options


_WIDER = {np.dtype(np.float32): np.float64, np.dtype(np.float64): np.longdouble}


def _rounded_once(product, other, sign_of_product, sign_of_other):
    (a, b), kept = product.factors, product.data.dtype
    a, b, c = (handle.data.astype(_WIDER[kept]) for handle in (a, b, other))
    return triton_interpreter.TensorHandle(
        (sign_of_product * a * b + sign_of_other * c).astype(kept), product.dtype.scalar
    )


@contextmanager
def products_fused(chosen=lambda: True):
    """Fuse sums and differences of a product, as a compiler may in a kernel that is launched with ``FUSED``.

    The interpreter rounds each product, so that ``a * b - a * b`` is 0. Fused, it is the rounding error of the product.
    ``chosen()`` is called for each such sum and returns True if it is fused.
    """
    builder = triton_interpreter.interpreter_builder
    multiply = builder.create_fmul

    def product(left, right):
        made = multiply(left, right)
        if made.data.dtype in _WIDER:
            made.factors = left, right
        return made

    def fusing(make, sign):
        def made(left, right):
            if not (hasattr(left, "factors") or hasattr(right, "factors")) or not chosen():
                return make(left, right)
            if hasattr(left, "factors"):
                return _rounded_once(left, right, 1, sign)
            return _rounded_once(right, left, sign, 1)

        return made

    def keeping_factors(make):
        def made(*args):
            out = make(*args)
            for i, arg in enumerate(args):
                if hasattr(arg, "factors"):
                    out.factors = tuple(make(*args[:i], factor, *args[i + 1 :]) for factor in arg.factors)
            return out

        return made

    moved = ("create_reshape", "create_broadcast", "create_expand_dims", "create_splat")
    replaced = {name: keeping_factors(getattr(builder, name)) for name in moved}
    replaced |= {"create_fadd": fusing(builder.create_fadd, 1), "create_fsub": fusing(builder.create_fsub, -1)}
    with mock.patch.multiple(builder, create_fmul=product, **replaced):
        yield


def _specialisation(kernel, args, options):
    """Return what determines the compiled code of a launch: the kernel, its constants, the types, what is aligned."""
    arguments = dict(zip(kernel.arg_names, args, strict=False)) | options

    def unspecialised(option):
        return {kernel.arg_names[n] if isinstance(n, int) else n for n in kernel.kwargs[option] or ()}

    fixed, anywhere = map(unspecialised, ("do_not_specialize", "do_not_specialize_on_alignment"))
    constants = {name for name, kind in inspect.get_annotations(kernel.fn).items() if "constexpr" in str(kind)}

    def of_argument(name, value):
        if isinstance(value, tuple):
            return tuple(of_argument(name, one) for one in value)
        if hasattr(value, "data_ptr"):
            return str(value.dtype), name not in fixed | anywhere and value.data_ptr() % 16 == 0
        if name in constants or name not in kernel.arg_names or isinstance(value, bool) or not isinstance(value, int):
            return type(value).__name__ if isinstance(value, float) and name not in constants else str(value)
        width = "int32" if -(2**31) <= value < 2**31 else "int64"
        return (width,) if name in fixed else (width, value == 1, name not in anywhere and value % 16 == 0)

    return kernel.fn.__qualname__, *((name, of_argument(name, value)) for name, value in sorted(arguments.items()))


@contextmanager
def products_fused_by_specialisation():
    """Fuse some sums of products, others in each specialisation of a kernel, as a compiler decides for each anew.

    Two launches of one specialisation return the same bits, and those of two specialisations need not. Yields the
    specialisations launched.
    """
    function = triton_interpreter.InterpretedFunction
    run, launched = function.run, set()

    def fused(specialisation):
        @functools.cache
        def at(file, line):
            return hashlib.sha256(repr((specialisation, file, line)).encode()).digest()[0] % 2 == 0

        def chosen():
            frame = sys._getframe(2)
            while "triton" in (module := frame.f_globals.get("__name__", "")).split(".")[:1] or module == __name__:
                frame = frame.f_back
            return at(Path(frame.f_code.co_filename).name, frame.f_lineno)

        return chosen

    def run_fused(self, *args, **options):
        launch = {name: value for name, value in options.items() if name not in ("grid", "warmup")}
        specialisation = _specialisation(self, args, launch)
        launched.add(specialisation)
        with products_fused(fused(specialisation)):
            run(self, *args, **options)

    with mock.patch.object(function, "run", run_fused):
        yield launched
