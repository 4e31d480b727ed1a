"""Features of draft losses and their metrics against each other: each pair of values once, compared with the oracle."""

import math

import pytest
import torch

import reference
from dllm_kernels import (
    DFlashDecayLoss,
    DraftDistillationLoss,
    acceptance_length,
    acceptance_stats,
    draft_accuracy,
    fused_head,
)
from tests.conftest import DEVICE
from tests.support.pairs import pairs

B, BLOCKS, SIZE, V, D, R, SKIPPED = 2, 3, 8, 11, 5, 2, 4
TRUNCATED = 7  # columns of a draft with a smaller vocabulary
TRANSFORMS = {"none": {}, "softcap": {"softcap": 2.0}, "scale": {"scale": 0.5}, "skip": {"skip_id": SKIPPED}}
COMMON = {
    "layout": ["sequences", "blocks", "packed"],
    "weights": ["decay", "no decay", "paper", "dpace", "prefix", "continuation"],
    "normalize": ["tokens", "rows", "mean", "blocks", "sequences", "sequence_blocks"],
    "counts": ["none", "given"],
    "anchor_row": [False, True],
    "mask": ["ones", "holes", "fractions", "no anchors", "empty"],
    "ignored": [False, True],
    "transform": list(TRANSFORMS),
    "head": ["frozen", "trained"],
    "bias": [False, True],
    "extra": [False, True],
    "reduction": ["total", "none"],
    "dtype": [torch.float64, torch.float32],
    "chunk_size": [None, 5],
    "num_active": ["none", "exact", "bound"],
    "bonus": [False, True],
    "metric": ["output", "tensor"],
}
DFLASH = COMMON | {"form": ["logits", "hidden", "deferred"], "nll": [False, True], "prefix": [False, True]}
DISTILLED = COMMON | {
    "form": ["logits", "hidden"],
    "layout": ["sequences", "packed"],
    "kind": ["kl", "rkl", "jsd", "tv", "nla", "lk", "mean lk", "soft_ce", "teacher_ce", "ce and l1", "ce alone"],
    "confidence": ["target", "teacher", "acceptance"],
    "decay_from": [0, 1, 2],
    "learned": [False, True],
    "temperature": [1.0, 2.0],
    "columns": ["all", "draft_to_target", "full"],
    "teacher_rows": [False, True],
    "teacher_head": ["shared", "own", "own and extra"],
    "sampling": [False, True],
}


def excluded(case):
    """Return True for values that no call takes together."""
    of_form = {"bias": False, "extra": False, "num_active": "none", "chunk_size": None, "teacher_head": "shared"}
    form, weights = case.get("form", "hidden"), case.get("weights", "decay")
    if form == "deferred":  # the head is one nn.Linear, and the loss takes no bound
        of_form = {"extra": False, "num_active": "none"}
    if form != "hidden" and any(case.get(name, value) != value for name, value in of_form.items()):
        return True
    if case.get("nll") and form == "hidden":
        return True
    if case.get("prefix") and weights not in ("decay", "no decay", "paper"):
        return True
    if case.get("columns", "all") != "all" and case.get("teacher_head", "own") == "shared" and form == "hidden":
        return True
    # without a teacher
    of_teacher = {"confidence": "target", "learned": False, "temperature": 1.0, "columns": "all", "teacher_rows": False}
    of_teacher |= {"teacher_head": "shared", "sampling": False}
    return case.get("kind") == "ce alone" and any(case.get(name, value) != value for name, value in of_teacher.items())


def rows_of(case):
    return SIZE if case["anchor_row"] else SIZE - 1


def drawn_mask(case, shape, rows):
    """Return the mask of a case; "holes" has some of every kind, at the beginning of a block too."""
    mask = torch.ones(shape, dtype=torch.bool)
    if case["mask"] in ("holes", "fractions"):
        mask = torch.rand(shape) < 0.8
    if case["mask"] == "fractions":
        return mask * (0.1 + 0.9 * torch.rand(shape))
    if case["mask"] == "no anchors":
        mask[:, ::rows] = False
        return mask.long()
    if case["mask"] == "empty":
        mask[:, :rows] = False
        mask[shape[0] // 2 :] = False
    return mask


class Inputs:
    """Tensors of a case; rows are ``[B, T]``, B = 1 if packed."""

    def __init__(self, case, vocabulary=V):
        torch.manual_seed(0)
        self.case, rows = case, rows_of(case)
        b = 1 if case["layout"] == "packed" else B
        T, dtype = BLOCKS * rows, case["dtype"]
        self.shape, self.rows = (b, T), rows
        draw = lambda *shape: torch.randn(shape, dtype=dtype, device=DEVICE)  # noqa: E731
        self.hidden, self.weight, self.bias = 2 * draw(b, T, D), draw(vocabulary, D), draw(vocabulary)
        self.u, self.second = draw(b, T, R), draw(vocabulary, R)
        self.mask = drawn_mask(case, (b, T), rows).to(DEVICE)
        self.read = torch.ones_like(self.mask, dtype=torch.bool)
        with torch.no_grad():
            best = self.transformed(self.logits()).argmax(-1)
        other = torch.randint(0, vocabulary - 1, (b, T), device=DEVICE)
        other += other >= SKIPPED  # never the skipped column
        self.targets = torch.where(torch.rand(b, T, device=DEVICE) < 0.7, best, other)
        if case["ignored"]:
            self.targets[torch.rand(b, T, device=DEVICE) < 0.2] = -100
        self.prefix, self.read = None, self.mask != 0
        if case.get("prefix"):
            self.prefix = torch.randint(1, rows + 1, (b, BLOCKS), device=DEVICE)
            self.read &= reference.prefix_weights(self.prefix, rows, None).to(DEVICE) != 0
        self.hidden[~self.read], self.u[~self.read] = math.nan, math.nan
        self.leaves = [self.hidden]
        if case["head"] == "trained":
            self.leaves += [self.weight, *([self.bias] if case["bias"] else [])]
        if case["extra"]:
            self.leaves += [self.u, self.second]
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.counts = {}
        if case["counts"] == "given":
            of_blocks = torch.arange(2, 2 + b, device=DEVICE)
            self.counts = {"num_tokens": 7, "num_sequences": torch.tensor(3, device=DEVICE)}
            self.counts["num_blocks"] = of_blocks if case["normalize"] == "sequence_blocks" else 4
        active = int((self.mask != 0).sum())
        bound = {"none": None, "exact": active, "bound": min(active + 3, self.mask.numel())}[case["num_active"]]
        self.head_options = {"lm_head_bias": self.bias if case["bias"] else None, "num_active": bound}
        self.head_options |= {"extra": (self.laid(self.u), self.second)} if case["extra"] else {}

    def logits(self):
        bias, extra = (
            (self.bias if self.case["bias"] else None),
            ((self.u, self.second) if self.case["extra"] else None),
        )
        return reference.linear_logits(self.hidden, self.weight, bias, self.read, extra)

    def transformed(self, logits):
        return reference.transformed(logits, **TRANSFORMS[self.case["transform"]])

    def laid(self, t):
        """Change a tensor ``[B, T, ...]`` to the layout of the case."""
        if t is None or self.case["layout"] == "sequences":
            return t
        if self.case["layout"] == "packed":
            return t[0]
        return t.unflatten(1, (BLOCKS, self.rows))

    @property
    def laid_prefix(self):
        return self.prefix[0] if self.prefix is not None and self.case["layout"] == "packed" else self.prefix


def weighting(case):
    """Return the settings of the weights, and the arguments of the oracle for them."""
    name = case["weights"]
    if name in ("dpace", "prefix", "continuation"):
        return {"position_weights": name, "dpace_alpha": 0.3}, {"position_weights": name, "dpace_alpha": 0.3}
    gamma = {"decay": 3.0, "no decay": None, "paper": "paper"}[name]
    return {"loss_gamma": gamma}, {"loss_gamma": 4.0 if gamma == "paper" else gamma}


def settings(case):
    names = "normalize", "anchor_row", "reduction", "chunk_size"
    return {name: case[name] for name in names} | TRANSFORMS[case["transform"]] | weighting(case)[0]


def assert_same(found, expected, leaves):
    """Compare the loss, the losses of the rows if there are any, and all gradients with upstream gradients in both."""
    (total, rows), (expected_total, expected_rows) = found, expected
    torch.testing.assert_close(total, expected_total.to(total))
    both = [total, expected_total]
    if rows is not None:
        torch.testing.assert_close(rows.reshape(expected_rows.shape), expected_rows.to(rows))
        upstream = torch.linspace(-1, 1, rows.numel(), device=DEVICE, dtype=expected_rows.dtype)
        both[0] = both[0] + (rows.flatten() * upstream).sum()
        both[1] = both[1] + (expected_rows.flatten() * upstream).sum()
    grads = [torch.autograd.grad(value, leaves, allow_unused=True) for value in both]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


def assert_metrics(case, i, out, rates, mask, prefix, **options):
    """Compare the accuracy and the acceptance, from the output or from a tensor in it, with the oracle."""
    given = i.laid(rates) if case["layout"] != "packed" else rates
    options |= {"anchor_row": case["anchor_row"], "bonus": case["bonus"]}
    of_loss = prefix if case["metric"] == "tensor" else None
    if of_loss is not None and case["layout"] == "packed":
        of_loss = of_loss[0]
    source = out if case["metric"] == "output" else given
    found = acceptance_stats(source, i.laid(i.mask), SIZE, prefix=of_loss, **options)
    expected = reference.acceptance_stats(rates.double(), i.mask, i.rows, case["bonus"], case["anchor_row"], prefix)
    torch.testing.assert_close(torch.stack(found).cpu(), torch.tensor(expected))
    mean = acceptance_length(source, i.laid(i.mask), SIZE, prefix=of_loss, **options)
    torch.testing.assert_close(mean.item(), expected[0] / max(expected[1], 1))
    period = SIZE + 1 if case["anchor_row"] else SIZE
    hits, count = reference.draft_accuracy_per_position(out.draft_correct.reshape(i.shape), mask, period)
    torch.testing.assert_close(out.draft_correct_per_pos, hits)
    torch.testing.assert_close(out.draft_count_per_pos, count)
    each = [hits.sum() / count.sum().clamp(min=1e-9), *(hits / count.clamp(min=1e-9))]
    names = ["draft_acc", *(f"draft_acc_k{k}" for k in range(1, 1 + i.rows))]
    torch.testing.assert_close(draft_accuracy(out), dict(zip(names, each, strict=True)))


def called_dflash(case, i, loss):
    """Call the loss of a case from logits or hidden states."""
    rest = i.laid(i.targets), i.laid(i.mask)
    options = {"block_size": SIZE, "prefix": i.laid_prefix, **i.counts}
    if case["form"] == "hidden":
        return loss.forward_fused(i.laid(i.hidden), i.weight, *rest, **options, **i.head_options)
    call = loss.forward_with_token_nll if case["nll"] else loss.forward
    if case["form"] == "logits":
        return call(i.laid(i.logits()), *rest, **options)
    head = torch.nn.Linear(D, V, device=DEVICE, dtype=case["dtype"])
    head.weight, head.bias = torch.nn.Parameter(i.weight.detach()), torch.nn.Parameter(i.bias.detach())
    head.bias = head.bias if case["bias"] else None
    head.requires_grad_(case["head"] == "trained")
    if case["head"] == "trained":  # the oracle's leaves are those of the head
        i.weight, i.bias, i.leaves = head.weight, head.bias, [i.hidden, *head.parameters()]
    with fused_head(head, head=head, on_logits="raise"):
        return call(head(i.laid(i.hidden)), *rest, **options)


DFLASH_CASES = pairs(DFLASH, excluded)
DISTILLED_CASES = pairs(DISTILLED, excluded)


@pytest.mark.parametrize("number", range(len(DFLASH_CASES)))
def test_dflash(number):
    case = DFLASH_CASES[number]
    i, loss = Inputs(case), DFlashDecayLoss(**settings(case))
    out = called_dflash(case, i, loss)
    out, nll = out if case["nll"] else (out, None)
    _, of_oracle = weighting(case)
    arguments = {"block_size": SIZE, "prefix": i.prefix, **i.counts, **of_oracle, "anchor_row": case["anchor_row"]}
    logits = i.transformed(i.logits())
    expected = [
        reference.dflash_loss(logits, i.targets, i.mask, normalize=case["normalize"], reduction=reduction, **arguments)
        for reduction in ("total", "none")
    ]
    rows = out.row_losses
    assert (rows is None) == (case["reduction"] == "total")
    assert_same((out.total_loss, rows), expected, i.leaves)
    read = torch.where(i.read, i.mask, 0)
    assert i.prefix is out.prefix is None or torch.equal(out.prefix, i.prefix)
    if nll is not None:
        plain = reference.token_nll(logits, i.targets, active=read)
        torch.testing.assert_close(nll.reshape(i.shape), plain.to(nll))
    matches = reference.argmax_match(logits, i.targets, active=read)
    assert torch.equal(out.draft_correct.reshape(i.shape), matches)
    assert_metrics(case, i, out, matches, read, i.prefix)


KINDS = {
    "ce and l1": {"kind": {"ce": 0.5, "l1": 0.7}},
    "ce alone": {"kind": {"ce": 2.0}},
    "jsd": {"kind": "jsd", "beta": 0.3},
    "lk": {"kind": "lk", "eta": 2.0},
    "mean lk": {"kind": "lk", "alpha": "mean", "base": "soft_ce"},
}


@pytest.mark.parametrize("number", range(len(DISTILLED_CASES)))
def test_distillation(number):
    case = DISTILLED_CASES[number]
    i = Inputs(case, TRUNCATED if case["columns"] != "all" else V)
    (b, T), dtype, kind = i.shape, case["dtype"], KINDS.get(case["kind"], {"kind": case["kind"]})
    draw = lambda *shape: torch.randn(shape, dtype=dtype, device=DEVICE)  # noqa: E731
    count, own = T + 3 if case["teacher_rows"] else T, case["teacher_head"] != "shared" or case["columns"] != "all"
    teacher_hidden = 2 * draw(b, count, D)
    rows = torch.randint(0, b * count, (b, T), device=DEVICE) if case["teacher_rows"] else None
    columns = torch.randperm(V, device=DEVICE)[:TRUNCATED] if case["columns"] != "all" else None
    given = {"weight": i.weight, "bias": i.bias if case["bias"] else None}
    if own:
        given = {"weight": draw(V, D), "bias": None}
    if case["teacher_head"] == "own and extra":
        given = {"weight": given["weight"], "bias": draw(V), "extra": (draw(b, count, R), draw(V, R))}
    teacher_logits = reference.linear_logits(
        teacher_hidden, given["weight"], given["bias"], extra=given.get("extra")
    ).detach()
    s = draw(b, T).requires_grad_() if case["learned"] else None
    leaves = i.leaves if s is None else [*i.leaves, s]
    options = {**kind, "temperature": case["temperature"], "confidence": case["confidence"]}
    options |= {"decay_from": case["decay_from"], "confidence_weight": 0.7}
    options |= {"teacher": "full"} if case["columns"] == "full" else {}
    loss = DraftDistillationLoss(**settings(case) | options)
    counts = i.counts | ({"total_weight": 5.5} if i.counts else {})
    alone = case["kind"] == "ce alone"
    rest = i.laid(i.targets), i.laid(i.mask)
    others = {"block_size": SIZE, "confidence_logits": i.laid(s), **counts}
    if not alone:
        others |= {"teacher_rows": i.laid(rows), "draft_to_target": columns}
    if case["form"] == "logits":
        out = loss(i.laid(i.logits()), None if alone else i.laid(teacher_logits), *rest, **others)
    else:
        if own and not alone:
            others |= {f"teacher_{name}": t for name, t in given.items() if name != "extra"}
        if "extra" in given and not alone:
            others["teacher_extra"] = i.laid(given["extra"][0]), given["extra"][1]
        x = None if alone else i.laid(teacher_hidden)
        out = loss.forward_fused(i.laid(i.hidden), i.weight, x, *rest, **others, **i.head_options)
    transform = TRANSFORMS[case["transform"]]
    arguments = {**weighting(case)[1], **options, **transform, **counts, "normalize": case["normalize"]}
    arguments |= {"anchor_row": case["anchor_row"], "block_size": SIZE, "confidence_logits": s}
    arguments |= {"teacher_rows": rows, "draft_to_target": columns}
    expected = [
        reference.draft_distillation_loss(
            i.logits(), teacher_logits, i.targets, i.mask, reduction=reduction, **arguments
        )
        for reduction in ("total", "none")
    ]
    assert_same((out.total_loss, out.row_losses), expected, leaves)
    read, prefix = i.mask, None
    if case["decay_from"] and case["weights"] in ("decay", "no decay", "paper"):
        prefix = torch.full((b, BLOCKS), case["decay_from"] + 1, device=DEVICE)
        read = torch.where(reference.prefix_weights(prefix, i.rows, None).to(DEVICE) != 0, i.mask, 0)
    models = {name: arguments[name] for name in ("teacher_rows", "draft_to_target", "temperature")} | transform
    each = reference.divergence(i.logits(), teacher_logits, (read != 0).to(dtype), **models)
    matches = reference.argmax_match(i.transformed(i.logits()), i.targets, active=read) if alone else each.agree
    assert torch.equal(out.draft_correct, matches)
    if alone:
        assert out.acceptance_rate is None
    else:
        torch.testing.assert_close(out.acceptance_rate, each.acceptance_rate.to(out.acceptance_rate))
    rates = each.acceptance_rate if case["sampling"] else matches
    if case["sampling"] and case["metric"] == "tensor":
        rates = rates.to(torch.float32)
    assert_metrics(case, i, out, rates, read, prefix, sampling=case["sampling"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(0, len(DFLASH_CASES), 16))
def test_dflash_in_a_compiled_graph(number):
    """Loss and acceptance are one graph."""
    torch.compiler.reset()
    case = DFLASH_CASES[number]
    case |= {"form": "hidden", "nll": False} if case["form"] == "deferred" else {}
    i, loss = Inputs(case), DFlashDecayLoss(**settings(case))

    def step():
        out = called_dflash(case, i, loss)
        out = out[0] if case["nll"] else out
        stats = acceptance_stats(
            out, i.laid(i.mask), SIZE, anchor_row=case["anchor_row"], bonus=case["bonus"], prefix=i.laid_prefix
        )
        return out.total_loss, out.weight_sum, *stats

    found, expected = torch.compile(step, backend="aot_eager", fullgraph=True)(), step()
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(of[0], i.leaves, allow_unused=True) for of in (found, expected)]
    torch.testing.assert_close(*grads)
