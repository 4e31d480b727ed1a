"""The kernels with the tiles of real vocabularies, up to 512 threads, on few rows; most other tests have small tiles.

Every result is compared with the torch path by the rule of ``tests/support/parity.py``.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map

from dllm_kernels import ops
from dllm_kernels.ops import LinearLogits
from tests.conftest import DEVICE, INTERPRETED
from tests.support.op_cases import FIRST_OPS, OF_EVERY_KIND, OP_BY_NAME, Rows, results
from tests.support.parity import assert_as_good_as_plain, largest_error, reduction_sizes, same
from tests.support.routines import ROUTINES

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter knows no threads")
VOCABULARIES = [126464, 50257, 32000]
HALF, SINGLE = torch.bfloat16, torch.float32
ALL = {"softcap": 30.0, "scale": 0.7, "skip_id": 6}
D = 16
IDS = [7, -2, 5]


def drawn(kind, V, dtype=HALF):
    """Return the leaves of logits of three rows, whose ids are probable."""
    if kind == "stored":
        logits = 4 * torch.randn(1, 3, V, device=DEVICE)
        logits[0, range(3), IDS] = 16
        return [logits.to(dtype)]
    weight = torch.randn(V, D, device=DEVICE).to(dtype)
    return [weight[None, IDS], weight]


def logits_of(leaves, view=lambda x: x):
    return view(leaves[0]) if len(leaves) == 1 else LinearLogits(*leaves, chunk_size=2)


def compare(case, leaves, view=lambda x: x, **options):
    """Compare all results of a case, and the gradients of their sum with a weight for each element."""
    x = logits_of([leaf.detach() for leaf in leaves], view)
    V = x.shape[-1] if len(leaves) == 1 else len(leaves[1])
    weights = torch.tensor([[0.5, 0.9, 0.3]], device=DEVICE)
    r = Rows.of(
        torch.tensor([[7, V - 2, 5]], device=DEVICE), torch.tensor([[True, True, False]], device=DEVICE), weights
    )
    options = {**case.options(x, r), **case.accepted(**options)}

    def outputs(leaves, arguments, options, backend):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = case.op(logits_of(leaves, view), *arguments, **options, backend=backend)
        upstream = [torch.linspace(0.5, 1.5, t.numel(), device=DEVICE).view(t.shape).to(t) for t in case.values(out)]
        grads = torch.autograd.grad(case.values(out), leaves, upstream) if upstream else ()
        return {**results(out), **{f"gradient {i}": grad for i, grad in enumerate(grads)}}

    given = leaves, case.arguments(x, r), options
    kernels, plain = (outputs(*given, backend) for backend in ("triton", "torch"))
    wide = tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, given)
    for (name, got), p, e in zip(kernels.items(), plain.values(), outputs(*wide, "torch").values(), strict=True):
        if got.is_floating_point():
            assert_as_good_as_plain([got], [e], largest_error([p], [e]), name, {V, *reduction_sizes(leaves)})
        else:
            assert same(got, p, name)


def spread(cases):
    """Parametrize with these cases, each with the next combination of vocabulary, dtype and transform."""
    combinations = [*itertools.product(VOCABULARIES, (HALF, SINGLE), ({}, ALL))]
    values = [(*case, *combinations[5 * i % len(combinations)]) for i, case in enumerate(cases)]
    ids = [f"{kind}-{case.name}-{V}-{dtype}" for kind, case, V, dtype, _ in values]
    return pytest.mark.parametrize(("kind", "case", "V", "dtype", "steps"), values, ids=ids)


@spread([(kind, case) for kind, case in OF_EVERY_KIND if case in FIRST_OPS])
def test_ops(kind, case, V, dtype, steps):
    compare(case, drawn(kind, V, dtype), **steps)


def changed(name, **options):
    """Return the case with other options."""
    case = OP_BY_NAME[name]
    return replace(case, name=f"{name}, {options}", options=lambda x, r: {**case.options(x, r), **options})


_ROW_STATS = OP_BY_NAME["row_stats"]
CHANGED = [
    *(changed("token_nll", with_correct=correct, with_ids=False) for correct in (False, True)),
    changed("weighted_nll", with_correct=False, with_ids=False),
    *(changed("divergence, all rows", kind=kind) for kind in ("kl", "l1", "jsd", "rkl")),
    changed("divergence", kind={"ce": 0.1, "lk": 1.0}, temperature=0.7),
    *(changed("divergence, columns", kind=kind, teacher="draft") for kind in ("kl", "jsd")),
    changed("divergence, columns", kind="jsd"),
    replace(_ROW_STATS, name="row_stats, nine ids", arguments=lambda x, r: ((r.ids[..., None] + torch.arange(9)) % 9,)),
    changed("linear_sample", temperature=0.7),
    changed("linear_sample", temperature=0),
]


@spread([(kind, case) for case in CHANGED for kind in case.kinds])
def test_other_options(kind, case, V, dtype, steps):
    compare(case, drawn(kind, V, dtype), **steps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_row_stats(dtype):
    compare(_ROW_STATS, drawn("stored", 50257, dtype))


@pytest.mark.parametrize("view", ["sliced", "shifted", "longer"])
@pytest.mark.parametrize("name", ["token_nll", "row_stats"])
def test_views(name, view):
    """Rows of another stride than columns, which begin anywhere relative to 16 bytes."""
    part = {"sliced": lambda x: x[..., 1:], "shifted": lambda x: x[:, 1:], "longer": lambda x: x[..., :-3]}[view]
    compare(OP_BY_NAME[name], [4 * torch.randn(1, 4, 50264, device=DEVICE).to(HALF)], lambda x: part(x)[:, :3])


@pytest.mark.parametrize("D", [32, 4096, 8192])
def test_selection_and_corruption(D):
    torch.manual_seed(1)
    uniform, weights = torch.rand(2, D, device=DEVICE), torch.randn(2, D, device=DEVICE)
    k = torch.tensor([D // 3, 1], device=DEVICE)
    masks = [ops.gumbel_topk_mask(weights, k, uniform=uniform, backend=b) for b in ("triton", "torch")]
    assert same(*masks)
    ids, mask = torch.randint(0, 1000, (2, D), device=DEVICE), torch.rand(2, D, device=DEVICE) < 0.9
    seeds = torch.tensor([3, 4], device=DEVICE)
    for name, case in ROUTINES.items():
        assert same(*(case(ids, mask, seeds=seeds, backend=b) for b in ("triton", "torch"))), name
