"""One kernel at one real size, described well enough to be compiled without a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple


class Specimen(NamedTuple):
    """What ``python -m benchmarks inspect`` and the offline compile test need to know of a kernel.

    Attributes:
        name: what the report calls it, such as ``token_nll_fwd[bf16]``.
        kernel: the ``@triton.jit`` function.
        signature: run-time argument -> Triton type (``"*bf16"``, ``"i32"``, ``"i64"``, ``"fp32"``). Pointers, and
            integers named in ``divisible``, are taken to be multiples of 16, as they are at the sizes of real models.
        constexprs: compile-time argument -> value.
        num_warps: warps of a program.
        divisible: integer arguments that are multiples of 16.
        num_stages: software pipelining depth.
        fp_fusion: whether a product and a sum may become one fused multiply-add, as at the kernel's launch.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int
    divisible: tuple[str, ...] = ()
    num_stages: int = 3
    fp_fusion: bool = True
