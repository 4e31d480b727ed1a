"""Triton kernels and their launchers: the only place that imports Triton. Imported lazily by ``ops``."""

import triton


def check_version(version: str) -> None:
    """Raise an ImportError unless Triton is recent enough for the kernels."""
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 6):
        raise ImportError(
            f"triton must be of version 3.6 or later, got {version}; upgrade it, or pass backend='torch' or set "
            "DLLM_KERNELS_BACKEND=torch"
        )


check_version(triton.__version__)
