"""Triton's interpreter, quicker: ``triton.language`` is patched once a launch, not at every call of a jit helper.

Triton's own looks through the whole of ``triton.language`` and replaces some 300 attributes whenever a kernel calls a
helper: half of the time of a launch. Here what is replaced is found once a process and put in place once a launch; a helper
finds it there. The numbers are the same to the bit (``test_interpreter.py``). The sources that this was written against are
known by their hash: where others are installed, Triton's own is left as it is.
"""

import dataclasses
import hashlib
import inspect
import types
from contextlib import contextmanager

import triton.runtime.interpreter as triton_interpreter

KNOWN = {
    "e16187e2e847b082",  # Triton 3.6, 3.7, 3.8
    "667a21a4143851c0",  # 3.9
}
THEIRS = triton_interpreter._patch_lang


def internals():
    """The hash of what ``patched_once`` relies on: who calls ``_patch_lang``, what it does and what it returns."""
    try:
        parts = [
            triton_interpreter.GridExecutor.__call__,
            triton_interpreter.InterpretedFunction.__call__,
            triton_interpreter._LangPatchScope,
            THEIRS,
        ]
        return hashlib.sha256("".join(map(inspect.getsource, parts)).encode()).hexdigest()[:16]
    except (AttributeError, OSError):
        return ""


def patched_once():
    """A ``_patch_lang`` that replaces all that Triton's replaces for any function, at the launch alone."""
    changes, launches = [], []

    class Launch(triton_interpreter._LangPatchScope):
        def restore(self):
            super().restore()
            launches.remove(self)

    def patch_lang(function):
        if launches:  # a helper: all is in place, and its caller puts nothing back
            return triton_interpreter._LangPatchScope()
        if not changes:
            changes.extend(recorded())
        launch = Launch()
        for change in changes:
            launch.set_attr(*change)
        launches.append(launch)
        return launch

    return patch_lang


def recorded():
    """(owner, name, value) of what Triton replaces for a function that sees ``triton.language`` under both its names."""
    language = {"tl": triton_interpreter.tl, "core": triton_interpreter.tl.core}
    scope = THEIRS(types.FunctionType(patched_once.__code__, language))
    changes = {(id(owner), name): (owner, name, vars(owner)[name]) for owner, name, _ in scope._changes}
    scope.restore()
    return changes.values()


def mend_indices():
    """Triton 3.6 makes an integer of an array with one element in a way that NumPy 2.4 refuses; later ones do not."""
    of_tensor = triton_interpreter._patch_lang_tensor
    if "int(self.handle.data))" not in inspect.getsource(of_tensor):
        return

    def patch_lang_tensor(tensor, scope):
        of_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    triton_interpreter._patch_lang_tensor = patch_lang_tensor


def install():
    """Once a process, before the first launch."""
    if triton_interpreter._patch_lang is not THEIRS:
        return
    mend_indices()
    if internals() in KNOWN:
        triton_interpreter._patch_lang = patched_once()
    _check_overflow(False)


def _check_overflow(checked):
    """Whether integer arithmetic that leaves 32 bits is an error. Triton computes it twice by default, and asserts nothing."""
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
    """Without what ``install`` has put in place, but for the mended indices."""
    ours, builder = triton_interpreter._patch_lang, triton_interpreter.interpreter_builder
    options = builder.options
    triton_interpreter._patch_lang, builder.options = THEIRS, type(options)()
    try:
        yield
    finally:
        triton_interpreter._patch_lang, builder.options = ours, options
