"""Names and specs of the divergences, their custom ops, and the conversion of a teacher's head."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_kernels import ops
from dllm_kernels.rows._divergence_spec import Comparison, checked_spec
from dllm_kernels.rows._transform import Transform
from tests.ops.test_divergence import MANY
from tests.repo.test_imports import PACKAGE, home, imports


def test_names():
    """Aliases, twice tv and the ends of jsd map to existing kinds; a custom op takes a comparison as its arguments."""
    assert checked_spec("kl_div") == checked_spec("kl") == checked_spec("jsd", beta=0) == checked_spec({"kl": 1})
    assert checked_spec("rkl") == checked_spec("jsd", beta=1.0)
    assert checked_spec("lk_hybrid", alpha="mean").lam_of_mean
    assert checked_spec({"l1": 0.5, "tv": 1, "kl": 0}) == checked_spec({"tv": 2.0})
    for transform in (Transform(), Transform(3.0, 0.7, 0)):
        comparison = Comparison(checked_spec(MANY, beta=0.3, base="soft_ce"), transform, 4.0, True)
        assert Comparison.from_arguments(**comparison.arguments()) == comparison


class Casts(TorchDispatchMode):
    """Record the shapes of tensors that are cast or indexed, and "read back" if the number of nonzero elements is."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.nonzero.default:
            self.seen.append("read back")
        elif function in (torch.ops.aten._to_copy.default, torch.ops.aten.index_select.default):
            self.seen.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_the_teacher_s_head_is_converted_before_the_host_sync(reduction):
    """Otherwise a GPU would idle meanwhile. The head is converted once per pass over the rows, not once per chunk."""
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    head, columns = torch.randn(9, 5), torch.randperm(9)[:7]
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
        ops.linear_divergence(
            hidden, weight, torch.randn(6, 5), torch.ones(6), teacher_weight=head, draft_to_target=columns,
            reduction=reduction, chunk_size=2, kind="lk", alpha="mean",
        ).loss.sum().backward()  # fmt: skip
    casts_of_head = [i for i, event in enumerate(casts.seen) if event in ((9, 5), (7, 5))]
    read_back = [i for i, event in enumerate(casts.seen) if event == "read back"]
    # Forward casts the whole head, and selects rows for the pass of the mean; backward selects rows, then casts them.
    assert len(casts_of_head) == 2 + 2 * (reduction == "none")
    assert casts_of_head[0] < read_back[0]


def test_importing_the_package_loads_no_engine():
    """The kinds are data beside the interface of the backends. The worker threads register a hook of forks."""
    loaded, new = set(), {PACKAGE / "__init__.py"}
    while new:
        loaded |= new
        modules = [module.split(".") for path in new for module, at_top in imports(path) if at_top]
        packages = {home(".".join(module[:n])) for module in modules for n in range(1, len(module) + 1)}
        new = {path for path in packages - loaded - {None} if path.is_relative_to(PACKAGE)}
    assert PACKAGE / "ops" / "divergence.py" in loaded
    assert not {home(f"dllm_kernels.backends.torch.{name}") for name in ("_divergence", "_workers", "_blocks")} & loaded
