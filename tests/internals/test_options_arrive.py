"""Options of a call reach the code that runs: the backend, in every op and loss, and the chunk size."""

import pytest
import torch

from dllm_kernels import DraftDistillationLoss
from dllm_kernels.rows import _chunks, _setup
from tests.conftest import DEVICE
from tests.support.cases import CASES, to_device

V, D = 19, 8
FORMS = [(case, form) for case in CASES for form in ("logits", "hidden")]
every_form = pytest.mark.parametrize(("case", "form"), FORMS, ids=lambda value: getattr(value, "name", value))


def called(case, form, **options):
    torch.manual_seed(0)
    shapes = [(2, 6 * case.width, V)] if form == "logits" else [(2, 6 * case.width, D), (V, D), (V,)]
    rows, *head = (torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes)
    arguments = case.arguments(form, rows, to_device(case.draw(2, 6, V), DEVICE), tuple(head))
    return case.output(form, arguments, **options)


@pytest.mark.everyday(48)
@every_form
def test_the_backend(case, form, monkeypatch):
    requested, torch_primitives = set(), _setup.row_primitives(False)
    monkeypatch.setattr(_setup, "row_primitives", lambda triton: requested.add(triton) or torch_primitives)
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "triton")  # the backend of a call that names none
    called(case, form, backend="torch")
    assert requested <= {False}  # a short path requests none
    requested.clear()
    monkeypatch.setenv("DLLM_KERNELS_BACKEND", "torch")
    called(case, form, backend="triton")
    assert requested == {True}


@pytest.mark.parametrize("case", [case for case, form in FORMS if form == "hidden"], ids=lambda case: case.name)
def test_the_size_of_a_chunk(case, monkeypatch):
    def choose(*_):
        raise AssertionError("chosen")

    monkeypatch.setattr(_chunks, "choose_chunk", choose)
    called(case, "hidden", chunk_size=5)


def test_the_size_of_a_chunk_in_the_cross_entropy_of_a_distillation(monkeypatch):
    """Cross-entropy needs no teacher, and therefore runs another op."""
    sizes = []
    monkeypatch.setattr(_chunks, "choose_chunk", lambda *_: sizes.append(1) or 4)
    hidden, weight = torch.randn(2, 6, D, device=DEVICE), torch.randn(V, D, device=DEVICE)
    targets, mask = torch.zeros(2, 6, dtype=torch.int64, device=DEVICE), torch.ones(2, 6, device=DEVICE)
    for chunk_size in (5, None):
        loss = DraftDistillationLoss(kind="ce", chunk_size=chunk_size)
        loss.forward_fused(hidden, weight, None, targets, mask, block_size=3)
        assert bool(sizes) is (chunk_size is None)
