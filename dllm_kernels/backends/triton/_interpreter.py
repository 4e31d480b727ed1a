"""A fix of Triton's interpreter, which runs the kernels on CPU tensors under ``TRITON_INTERPRET=1``."""

import numpy as np
import triton


def fix_indices() -> None:
    """Let Triton 3.6 convert a scalar to an index with NumPy 2.4 or newer, which refuses arrays of one element."""
    if not triton.__version__.startswith("3.6.") or np.lib.NumpyVersion(np.__version__) < "2.4.0":
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor
