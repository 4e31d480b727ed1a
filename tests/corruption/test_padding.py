"""Left padding: with ``start``, a padded row has the noise that the same row has without padding."""

import pytest
import torch
import torch.nn.functional as F

from dllm_kernels import corruption, gumbel_topk_mask, policy_views
from tests.conftest import every_time
from tests.corruption.test_corruption import every_routine
from tests.support.parity import same
from tests.support.routines import MASK, ROUTINES, batch, three

pytestmark = pytest.mark.indices

WIDTHS = (0, 3, 16, 29)  # columns of padding


def padded(t, width, value=0):
    return F.pad(t, (width, 0), value=value)


def padded_arguments(routine, ids, loss_mask, width):
    """Return ids and mask behind ``width`` columns of supervised padding, and the other arguments of the rows."""
    given = routine.inputs_on(ids)
    for name, t in given.items():
        if name == "segment_ids":  # the padding is in a segment, which does not count
            given[name] = padded(t, width, 3)
        elif t.dim() == 2 and t.shape[1] > 1:  # a padded row has more columns, and their blocks are not used
            given[name] = F.pad(t, (0, routine.columns(ids.shape[1] + width) - t.shape[1]), value=0.5)
    return padded(ids, width, 7), padded(loss_mask, width, True), given


def starts(ids, width):
    """Return first columns: none of padding, of the padding, some columns later, and after the last column."""
    L = ids.shape[1]
    return torch.tensor([0, width, width + 1, width + L // 2, width + L], device=ids.device)


@pytest.mark.covering(2, most=2)
@every_routine
@pytest.mark.parametrize("width", every_time([3], WIDTHS))
def test_a_padded_row_has_the_noise_of_the_row(routine, width, backend, device):
    ids, loss_mask, seeds = batch(5, 40, device)
    wide, wide_mask, given = padded_arguments(routine, ids, loss_mask, width)
    start = starts(ids, width)
    of_call = given | {"seeds": seeds, "start": start, "backend": backend}
    outputs = routine(wide, wide_mask, **of_call)
    if routine.takes_no_mask:
        assert same(routine(wide, None, **of_call), routine(wide, torch.ones_like(wide_mask), **of_call))
    for b, first in enumerate(start.tolist()):
        assert torch.equal(outputs[0][b, :first], wide[b, :first])
        assert not outputs[1][b, :first].any()
        # One level per row fills the row, as SCDD requires; otherwise padding is in no block and in no segment.
        several = routine.columns(wide.shape[1]) > 1 or routine.factor
        assert (outputs[2][b, :first] == (1 if several else outputs[2][b, -1:])).all()
        if first == wide.shape[1]:
            continue
        of_row = routine.of_row(given, b, first, wide.shape[1])
        row = wide[b : b + 1, first:], wide_mask[b : b + 1, first:]
        alone = three(routine.launch(*row, **of_row, seeds=seeds[b : b + 1], backend="torch"))
        assert same([t[b : b + 1, first:] for t in outputs], alone)


@pytest.mark.everyday(3)
@pytest.mark.parametrize("D", [3, 40, 200, 5000])
def test_gumbel_topk_of_padded_rows(D, backend, device):
    generator = torch.Generator().manual_seed(D)
    log_w, seeds, width = torch.randn(4, D, generator=generator).to(device), torch.arange(4, device=device), 9
    log_w[0, -1] = -torch.inf
    wide, k = padded(log_w, width, 2.0), torch.tensor([1, D // 2, D, 3], device=device)
    start = torch.tensor([width, width + 1, width, width + D], device=device)
    chosen = gumbel_topk_mask(wide, k, seeds=seeds, start=start, backend=backend)
    assert torch.equal(corruption.batched_gumbel_topk(wide, k, seeds=seeds, start=start, backend=backend), chosen)
    for b, first in enumerate(start.tolist()):
        assert not chosen[b, :first].any()
        if first < width + D:
            rows = slice(b, b + 1)
            alone = gumbel_topk_mask(wide[rows, first:], k[rows], seeds=seeds[rows], backend="torch")
            assert torch.equal(chosen[rows, first:], alone)


@pytest.mark.everyday(1)
@pytest.mark.parametrize("scheme", ["full", "coupled", "elbo", "count", "quadrature", "trace"])
def test_views_of_padded_rows(scheme, backend, device):
    ids, loss_mask, seeds = batch(3, 20, device)
    steps = (ids % 5 - 1) * loss_mask
    width, start = 6, torch.tensor([6, 8, 11], device=device)
    more = {"prompt_prob": 0.4} if scheme == "full" else {}

    def views(ids, loss_mask, steps, seeds, **keywords):
        given = {"step_map": steps} if scheme == "trace" else {}
        return policy_views(
            ids, loss_mask, MASK, scheme, num=2, seeds=seeds, backend=backend, **given, **more, **keywords
        )

    wide = [padded(t, width, 1) for t in (ids, loss_mask, steps)]
    whole = views(*wide, seeds, start=start)
    for b, first in enumerate(start.tolist()):
        assert torch.equal(whole.noisy[:, b, :first], wide[0][b, :first].expand(len(whole.noisy), first))
        assert not whole.scored[:, b, :first].any()
        assert not whole.weights[:, b, :first].any()
        alone = views(*(t[b : b + 1, first:] for t in wide), seeds[b : b + 1])
        assert all(torch.equal(x[:, b : b + 1, first:], y) for x, y in zip(whole, alone, strict=True))
        assert whole.num_supervised[b] == alone.num_supervised[0]
    assert all(
        torch.equal(x, y) for x, y in zip(views(*wide, seeds, start=start * 0), views(*wide, seeds), strict=True)
    )


def every_start(ids, loss_mask, seeds, start):
    """Return the masks of several routines, traced as one graph."""
    keywords = {"seeds": seeds, "start": start}
    log_w = torch.linspace(-2, 2, ids.shape[1]).expand(ids.shape)
    return [
        *corruption.corrupt_blockwise(ids, loss_mask, MASK, **keywords),
        *corruption.corrupt_uniform(ids, loss_mask, MASK, segment_ids=ids % 3, **keywords),
        gumbel_topk_mask(log_w, 3, **keywords),
    ]


@pytest.mark.parametrize("backend", every_time(["aot_eager"], ["aot_eager", "inductor"]))
def test_compiled_routines_of_padded_rows(backend):
    ids, loss_mask, seeds = batch(3, 18)
    compiled = torch.compile(every_start, backend=backend, fullgraph=True)
    torch.compiler.reset()
    for start in (torch.tensor([0, 4, 18]), torch.tensor([2, 0, 9])):
        expected, got = (run(ids, loss_mask, seeds, start) for run in (every_start, compiled))
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    with pytest.raises(ValueError, match=r"start must lie in \[0, 18\], got values from 0 to 19"):
        compiled(ids, loss_mask, seeds, torch.tensor([0, 4, 19]))


START = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        ([0, 1], TypeError, "start must be a torch.Tensor, got list"),
        (START.int(), ValueError, "start must have dtype int64, got int32"),
        (START[:1], ValueError, r"start must have shape \(2,\) \(the rows of .*\), got \(1,\)"),
        (START - 1, ValueError, r"start must lie in \[0, 6\], got values from -1 to 0"),
        (START + 6, ValueError, r"start must lie in \[0, 6\], got values from 6 to 7"),
    ],
)
def test_errors_of_start(start, error, message):
    ids, loss_mask, seeds = batch(2, 6)
    for call in ROUTINES.values():
        with pytest.raises(error, match=message):
            call(ids, loss_mask, seeds=seeds, start=start)
    for scheme in ("full", "elbo"):
        with pytest.raises(error, match=message):
            policy_views(ids, loss_mask, MASK, scheme, seeds=seeds, start=start)
    with pytest.raises(error, match=message):
        gumbel_topk_mask(ids.float(), 2, seeds=seeds, start=start)


def test_a_start_with_given_draws():
    with pytest.raises(ValueError, match="start must be None with uniform, which already has one value per column"):
        gumbel_topk_mask(torch.zeros(2, 3), 1, uniform=torch.full((2, 3), 0.5), start=START)
