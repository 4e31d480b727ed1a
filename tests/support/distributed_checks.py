"""Checks that run in several processes, and their helpers. ``tests/support/distributed_workers.py`` runs them."""

import functools
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dllm_kernels as ours
import reference
from tests.support import cases
from tests.support.cases import FEWER, Case

V, D, B, L = 19, 8, 4, 6
CHECKS = {2: {}, 4: {}}
LAYOUTS = Counter()  # loss -> number of the checks of long lists that run it
# (world size, name) of what these checks omit, and of slow checks with a similar one
EVERY_CASE = {
    (2, "inside_a_compiled_step[logits]"), (2, "fsdp_kernels[hybrid]"), (2, "tp_linear_sample[transformed]"),
    (2, "tp_soft_embedding[plain]"), (4, "tp_soft_embedding[plain]"), (4, "tp_linear_sample[top_k]"),
}  # fmt: skip
# Checks of the everyday half: about one per way of communication, and fast ones that execute every other line of
# distributed/. The others run with the exhaustive tests.
EVERY_DAY = {
    2: {
        "data_parallel[token_nll]", "backward_of_split_logits_sends_nothing", "fsdp_other_ways[MTP]",
        "fsdp_mixed_precision[MTP]", "fused_head_with_tied_weights_and_checkpointing[resharded_root]",
        "the_loss_in_a_head_that_fsdp1_shards[True]", "pipeline_of_a_diffusion_loss[hidden states]",
        "tp_frozen_head[token_nll]", "split_rows_of_logits[token_nll]", "a_teacher_whose_rows_one_rank_has",
        "split_rows_of_a_divergence[kl]", "tp_divergence[all others]", "layouts_that_cannot_be_served",
        "linear_sample_that_cannot_be_served", "extra_that_cannot_be_served", "sums_of_bad_input", "counts_over_ranks",
        "gradient_divide_factor_of_a_parameter_without_a_module", "rollouts_of_trl_end_together",
        "metrics_of_a_smaller_vocabulary", "a_mesh_dimension_of_one_rank", "split_rows_of_hidden[token_nll]",
        "token_log_probs_with_a_split_head", "autocast_with_a_split_head", "tp_linear_sample[top_k]",
        "fsdp_soft_embedding", "split_rows_with_extra[token_nll]", "fsdp_output_dtype_of_counts",
        "tp_divergence_of_logits[lk, mean]", "targets_and_masks_as_dtensors[token_nll]", "tp_extra[row_objective]",
        "a_frozen_head_with_a_second_part_sends_nothing_as_long_as_the_vocabulary",
    },
    4: {
        "data_parallel[hybrid]", "fsdp_over_tensor_parallel[MTP]", "tp_soft_embedding[softcap scale skip_id]",
        "special_row_statistics[targets at the edges]", "special_rows_of_a_divergence",
        "layouts_that_cannot_be_served_in_two_dimensions", "a_replicated_head_is_scattered_before_it_is_summed",
        "a_strided_head_is_split_by_tensor_parallelism_first", "tp_linear_sample_of_few_columns",
        "a_rank_without_columns_launches_nothing[row_stats]",
    },
}  # fmt: skip
# Of checks with many losses or kinds of rows, the most demanding ones for a parallel layout run every time.
EVERY_TIME = {
    2: ("token_nll", "hybrid", "MTP", "-inf in one shard", "targets at the edges"),
    4: ("hybrid", "MTP", "-inf in one shard", "targets at the edges"),
}


# Basis of the tables of parallelisms in docs/many-gpus.md and docs/model-parallel.md: row -> the checks of its three
# columns (losses from logits, losses from hidden states, MTP and the pipeline's loss); none if the table says no. A
# name without a parameter stands for all parameters.
TABLE = {
    "FSDP2, head in a separate unit, its parameter passed to the loss": (
        ["fsdp_logits"],
        ["fsdp_own_unit", "fsdp_chunks_and_columns", "fsdp_several_uses_in_one_graph", "fsdp_checkpointing"],
        ["fsdp_own_unit[MTP]", "fsdp_own_unit[pipeline]", "fsdp_mtp_finds_the_head"],
    ),
    "FSDP2, head in the root unit, loss in the root's forward": (
        ["fsdp_logits"], ["fsdp_in_root", "fsdp_reshard_after_forward"],
        ["fsdp_in_root[MTP]", "fsdp_in_root[pipeline]"],
    ),
    "FSDP2, loss in the head's forward (`LossHead`)": (
        ["fsdp_logits"], ["fsdp_loss_head", "fsdp_reshard_after_forward"],
        ["fsdp_loss_head[MTP]", "fsdp_loss_head[pipeline]"],
    ),
    "FSDP2 with a frozen head, mixed precision, accumulation without synchronisation or hybrid sharding": (
        ["fsdp_frozen_head", "fsdp_mixed_precision", "fsdp_accumulation", "fsdp_hybrid_shard"],
        ["fsdp_frozen_head", "fsdp_frozen_head_sends_no_gradient", "fsdp_mixed_precision", "fsdp_accumulation",
         "fsdp_hybrid_shard"],
        ["fsdp_frozen_head[MTP]", "fsdp_frozen_head[pipeline]", "fsdp_mixed_precision[MTP]", "fsdp_accumulation[MTP]",
         "fsdp_hybrid_shard[MTP]", "fsdp_hybrid_shard[pipeline]"],
    ),
    "FSDP2, embeddings tied to the head, in one unit": (
        ["fsdp_tied_embeddings"], ["fsdp_tied_embeddings"], ["fsdp_tied_embeddings[MTP]"],
    ),
    "Tensor parallelism: vocabulary sharded, hidden states also along the sequence": (
        ["tp_logits", "bytes_from_logits", "special_values", "split_rows_of_logits", "rows_and_vocabulary_of_logits"],
        ["tp_hidden", "bytes_from_hidden", "tp_frozen_head", "sequence_parallel_hidden"],
        ["tp_mtp", "mtp_with_a_split_head"],
    ),
    "FSDP2 over tensor parallelism": (
        ["fsdp_over_tensor_parallel_logits"], ["fsdp_over_tensor_parallel"],
        ["fsdp_over_tensor_parallel[MTP]", "fsdp_over_tensor_parallel[pipeline]"],
    ),
    "Data parallelism and accumulation, any split of the batch": (
        ["data_parallel", "counts_over_ranks", "draft_accuracy_over_ranks", "acceptance_length_over_ranks"],
        ["data_parallel"], ["data_parallel[MTP]", "data_parallel[pipeline]"],
    ),
    "`DistributedDataParallel`": (
        ["distributed_data_parallel"], ["distributed_data_parallel", "fused_head_with_frozen_and_unused_parameters"],
        ["distributed_data_parallel[MTP]", "distributed_data_parallel_mtp_finds_the_head"],
    ),
    "Context parallelism, plain tensors, unshifted losses (MDLM, block diffusion, SCDD, DFlash)": (
        ["context_parallel"], ["context_parallel"], ["context_parallel_targets_of_mtp"],
    ),
    "Context parallelism, plain tensors, shifted losses (hybrid, I-DLM, AR, any loss with `shift=True`)": ([], [], []),
    "Context parallelism, DTensors sharded along the sequence": (
        ["context_parallel_shifted_logits", "split_rows_of_logits"],
        ["context_parallel_shifted", "context_parallel_shifted_fsdp", "split_rows_of_hidden"],
        ["context_parallel_shifted[MTP]", "context_parallel_shifted_fsdp[MTP]", "context_parallel_shifted[pipeline]"],
    ),
    "Pipeline schedules (GPipe, 1F1B)": (
        ["pipeline_of_a_diffusion_loss[logits]", "pipeline_schedules[logits]"],
        ["pipeline_of_a_diffusion_loss[hidden states]", "pipeline_schedules[hidden states]"],
        ["pipeline_schedules[hidden depths]", "pipeline_schedules[logit depths]",
         "pipeline_schedules[hidden depths, packed]", "pipeline_in_evaluation"],
    ),
    "Pipeline schedules, MTP from hidden states in a fused head": ([], [], []),
    "Pipeline schedules, each stage under FSDP2": (
        ["pipeline_of_sharded_stages[logits]"], ["pipeline_of_sharded_stages[hidden states]"],
        ["pipeline_of_sharded_stages[hidden depths]", "pipeline_of_sharded_stages[hidden depths, packed]"],
    ),
}  # fmt: skip


IN_TABLE = {name for columns in TABLE.values() for checks in columns for name in checks}


def check(world, whole=False, **parameter):
    """Register a check for a world size, once for each value of its parameter, if any.

    Of the losses of a long list, a check runs those in ``EVERY_TIME`` or ``TABLE``, and a fifth of the others: those
    that the checks before have run least often. ``make test-every-case`` runs all, and so does every run if ``whole``.
    """

    def register(function):
        if not parameter:
            CHECKS[world][function.__name__] = function
        for name, values in parameter.items():
            others = [value for value in values if value not in EVERY_TIME[world]]
            if len(others) > 10 and not whole:
                rarest = sorted(others, key=lambda loss: LAYOUTS[loss])[: -(-len(others) // 5)]
                LAYOUTS.update(rarest)
                names = {f"{function.__name__}[{value}]" for value in set(others).difference(rarest)} - IN_TABLE
                EVERY_CASE.update((world, check_name) for check_name in names)
            for value in values:
                CHECKS[world][f"{function.__name__}[{value}]"] = functools.partial(function, **{name: value})
        return function

    return register


@functools.cache
def mesh_of(*names):
    """Create a mesh over all processes: one dimension, or two of size 2."""
    world = dist.get_world_size()
    return init_device_mesh("cpu", (world,) if len(names) == 1 else (2, world // 2), mesh_dim_names=names)


def shard(t, mesh, *placements):
    """Return a tensor that is equal on all ranks as a DTensor, differentiably: its gradient is gathered."""
    whole = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=placements)


def raises(error, match, function, *args, **options):
    with pytest.raises(error, match=re.escape(match)):
        function(*args, **options)


def close(got, expected, label=""):
    """Assert equality up to rounding in another order, with the defaults of torch.testing except for float64."""
    got = got.full_tensor() if isinstance(got, DTensor) else got
    double = got.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(
        got, expected, equal_nan=True, check_dtype=got.dtype == expected.dtype, msg=lambda m: f"{label} {m}",
        rtol=1e-9 if double else None, atol=1e-9 if double else None,
    )  # fmt: skip


def all_close(got, expected, *, plain=False):
    """Compare several results, of which both sides lack the same ones; with ``plain``, none is a DTensor."""
    for name, a, b in zip(getattr(expected, "_fields", range(len(expected))), got, expected, strict=True):
        assert (a is None) == (b is None), name
        assert not (plain and isinstance(a, DTensor)), name
        if b is not None:
            close(a, b, name)


def upstream(case, rows=B):
    shape = rows, L * case.width
    return torch.randn(shape) * (torch.rand(shape) < 0.8) if case.per_row else torch.randn(())


def drawn(case, seed=0, rows=B):
    torch.manual_seed(seed)
    return case.draw(rows, L, V)


def set_up(name, *dimensions):
    """Return a case, its inputs, and a mesh with these dimensions."""
    mesh, case = mesh_of(*dimensions), BY_NAME[name]
    return case, drawn(case), mesh


def _mtp(B, L, V):
    labels = torch.where(torch.rand(B, L) < 1 / 6, -100, torch.randint(0, V, (B, L)))
    packed = (torch.arange(L) // 4).int().expand(B, L)
    return {"labels": labels, "seq_idx": packed, "num_label_tokens": torch.tensor(B * L - 2)}


def _with_head(weight, bias):
    model = nn.Module()
    model.lm_head = nn.Module()
    model.lm_head.weight, model.lm_head.bias = weight, bias
    return model


def _mtp_logits(logits, labels, seq_idx, num_label_tokens, backend="auto"):
    """The main loss and two depths, side by side in ``logits``."""
    main, *depths = logits.chunk(3, 1)
    loss_fn = ours.MaskedCrossEntropy(backend=backend)
    labelled = {"labels": labels, "num_label_tokens": num_label_tokens}
    mtp = ours.calculate_mtp_loss(loss_fn, mtp_per_depth_logits=depths, model=nn.Module(), seq_idx=seq_idx, **labelled)
    return loss_fn(main, **labelled) + mtp


def _mtp_hidden(
    hidden, lm_head_weight, lm_head_bias, labels, seq_idx, num_label_tokens, chunk_size=None, backend="auto"
):
    main, *depths = hidden.chunk(3, 1)
    loss_fn = ours.FusedLinearCrossEntropy(chunk_size=chunk_size, backend=backend)
    model, labelled = _with_head(lm_head_weight, lm_head_bias), {"labels": labels, "num_label_tokens": num_label_tokens}
    mtp = ours.calculate_mtp_loss(
        loss_fn, mtp_per_depth_h=depths, model=model, lm_weight=lm_head_weight, seq_idx=seq_idx, **labelled
    )
    return loss_fn(main, lm_weight=lm_head_weight, lm_bias=lm_head_bias, **labelled) + mtp


def _pipeline_logits(logits, labels, seq_idx, num_label_tokens, backend="auto"):
    main, *depths = logits.chunk(3, 1)
    model = nn.Module()
    model.mtp_outputs_are_logits = True
    loss = ours.PipelineCausalLMLoss(ours.MaskedCrossEntropy(backend=backend), model)
    return loss((main, *depths, seq_idx), labels)


def _pipeline_hidden(
    hidden, lm_head_weight, lm_head_bias, labels, seq_idx, num_label_tokens, chunk_size=None, backend="auto"
):
    main, *depths = hidden.chunk(3, 1)
    loss_fn = ours.FusedLinearCrossEntropy(chunk_size=chunk_size, backend=backend)
    output = SimpleNamespace(hidden_states=main, mtp_per_depth_h=depths)
    return ours.PipelineCausalLMLoss(loss_fn, _with_head(lm_head_weight, lm_head_bias))(output, labels)


def _mtp_oracle(logits, labels, seq_idx, num_label_tokens):
    main, *depths = logits.chunk(3, 1)
    loss = reference.masked_cross_entropy(main, labels, num_label_tokens=num_label_tokens)
    return loss + reference.mtp_loss(depths, labels, 0.1, num_label_tokens, seq_idx=seq_idx).loss


MTP = Case(
    "MTP", (_mtp_logits, _mtp_hidden), _mtp, _mtp_oracle, width=3, separate=True, shifted=True,
    roles={"labels": "targets", "num_label_tokens": "count"},
)  # fmt: skip
PIPELINE = replace(MTP, name="pipeline", loss=(_pipeline_logits, _pipeline_hidden), equation=None)


def _policy(B, L, V, per_token):
    shape = (B, L) if per_token else (B,)
    old, ref = torch.randn(2, *shape) - 3
    mask, seeds = (torch.rand(B, L) < 0.8).long(), torch.randint(2**40, (B,))
    mask[:, 0] = 0  # a prompt
    return {
        "ids": torch.randint(1, V, (B, L)), "loss_mask": mask, "seeds": seeds, "old": old, "ref": ref,
        "advantages": torch.randn(B),
    }  # fmt: skip


def _policy_views(form, rows, inputs, scheme):
    """Stack the views' hidden states or logits, which depend only on the row."""
    ids, loss_mask, seeds = (
        t.full_tensor() if isinstance(t, DTensor) else t for t in map(inputs.get, ("ids", "loss_mask", "seeds"))
    )
    views = ours.policy_views(ids, loss_mask, 0, scheme, seeds=seeds)
    K = len(views.scored)
    return rows[None] if K == 1 else torch.stack(rows.chunk(K, 1)), {"views": views}


def _policy_logits(logits, normalize, level="token", kind="clip", shift=False, **arguments):
    objective = ours.PolicyObjective(kind, kl="k2", kl_coef=0.1)
    return ours.PolicyLoss(objective, level=level, normalize=normalize, shift=shift)(logits, **arguments).loss


def _policy_hidden(hidden, lm_head_weight, normalize, level="token", kind="clip", shift=False, **arguments):
    objective = ours.PolicyObjective(kind, kl="k2", kl_coef=0.1)
    policy_loss = ours.PolicyLoss(objective, level=level, normalize=normalize, shift=shift)
    return policy_loss.forward_fused(hidden, lm_head_weight, **arguments).loss


def _policy_oracle(
    logits, ids, views, loss_mask, old, advantages, ref, normalize, level="token", kind="clip", num_tokens=None,
    shift=False,
):  # fmt: skip
    return reference.policy_loss(
        logits, ids, reference.PolicyViews(*views), loss_mask, old, advantages, ref, level=level, kind=kind,
        normalize=normalize, num_tokens=num_tokens, shift=shift, kl="k2", kl_coef=0.1,
    )  # fmt: skip


# The loss per token scores each token once and computes its gradient in forward. The loss per sequence needs all rows
# first.
POLICY = Case(
    "policy", (_policy_logits, _policy_hidden),
    lambda B, L, V: _policy(B, L, V, True) | {"num_tokens": torch.tensor(B * L - 2)}, _policy_oracle,
    {"normalize": "tokens"}, {"ids": "targets", "loss_mask": "mask", "num_tokens": "count"},
    extra=functools.partial(_policy_views, scheme="full"), derived_from=("loss_mask", "seeds"), shifted=True,
)  # fmt: skip
POLICY_OF_SEQUENCES = replace(
    POLICY, name="policy of sequences", draw=functools.partial(_policy, per_token=False),
    settings={"normalize": "none", "level": "sequence", "kind": "cispo"},
    extra=functools.partial(_policy_views, scheme="coupled"), width=3, separate=True,
)  # fmt: skip
POLICY_OF_NEXT_TOKENS = replace(POLICY, name="policy, shift", settings={"normalize": "tokens", "shift": True})
POLICIES = (POLICY, POLICY_OF_SEQUENCES, POLICY_OF_NEXT_TOKENS)
BY_NAME = {case.name: case for case in (*FEWER, cases.BY_NAME["encoder AR, counted"], MTP, PIPELINE, *POLICIES)}
NAMES = tuple(BY_NAME)


class Model(nn.Module):
    """Embedding, body and LM head. Returns hidden states, or the result of a loss on them and the head."""

    def __init__(self, bias=True, head=nn.Linear):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(V, D)
        self.body = nn.Linear(D, D)
        self.lm_head = head(D, V, bias=bias)
        self.double()

    def forward(self, ids, loss=None):
        hidden = self.body(self.embed(ids)).tanh()
        return hidden if loss is None else loss(hidden, self.lm_head.weight, self.lm_head.bias)


class Job:
    """A loss of a whole batch, which can be split along the batch.

    ``run(ids, loss)`` calls a model and then ``loss(hidden, weight, bias)``, or ``loss(logits)`` for the form from
    logits. The form "oracle" is the reference on the logits of plain PyTorch. With ``scaled``, the loss is multiplied
    by a factor.
    """

    def __init__(self, name, form="hidden", seed=0, scaled=True, **options):
        self.case, self.form = BY_NAME[name], form
        options = {"backend": "torch"} | options
        self.function = {
            "hidden": functools.partial(self.case.hidden_form, **options),
            "logits": functools.partial(self.case.logits_form, **options),
            "oracle": lambda h, w, b, i: self.case.oracle(nn.functional.linear(h, w, b), i),
        }[form]
        torch.manual_seed(seed)
        self.inputs = self.case.draw(B, L, V)
        self.ids = torch.randint(0, V, (B, L * self.case.width))
        self.upstream = upstream(self.case) if scaled or self.case.per_row else torch.ones(())

    def loss(self, run, part=0, parts=1):
        """Compute the loss of one of the parts."""
        ids, upstream = self.cut(self.ids, part, parts), self.cut(self.upstream, part, parts)
        inputs = {name: self.cut(t, part, parts) for name, t in self.inputs.items()}
        return (run(ids, lambda *x: self.function(*x, inputs)) * upstream).sum()

    def cut(self, t, part, parts):
        """Return a part along the batch; counts are unchanged."""
        return t.chunk(parts)[part] if isinstance(t, torch.Tensor) and t.dim() else t

    def share(self, parts):
        """Return the factor by which the sum of the losses of all parts equals the loss of the whole batch."""
        return 1 / parts if self.case.counted_locally else 1.0

    def expected(self, model, parts):
        """Compute loss and gradients in one process, with the whole batch in one call if its denominator allows it."""
        if self.case.counted_locally:
            loss = sum(self.loss(outside_forward(model, self.form), part, parts) for part in range(parts)) / parts
        else:
            loss = self.loss(outside_forward(model, self.form))
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def outside_forward(model, form="hidden"):
    """Run a :class:`Job` with the parameters or the logits of the head, outside of the model's forward."""
    if form == "logits":
        return lambda ids, loss: loss(model.lm_head(model(ids)))
    return lambda ids, loss: loss(model(ids), model.lm_head.weight, model.lm_head.bias)


def same_gradients(model, expected):
    """Assert that the gradient of every parameter exists and is equal."""
    got = {name: p.grad for name, p in model.named_parameters()}
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        assert (got[name] is None) == (grad is None), f"gradient of {name}: {got[name]}"
        if grad is not None:
            assert grad.abs().sum() > 0, name
            close(got[name], grad, name)


class Sent(TorchDispatchMode):
    """Record the tensors that this rank passes to collectives: (name, shape, bytes) of each."""

    NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
    OPS: ClassVar = {  # name of the operator: (our name for it, index of the argument that is sent)
        "allreduce_": ("all_reduce", 0),
        "all_reduce": ("all_reduce", 0),
        "all_reduce_": ("all_reduce", 0),
        "_allgather_base_": ("all_gather", 1),
        "all_gather_into_tensor": ("all_gather", 0),
        "_reduce_scatter_base_": ("reduce_scatter", 1),
        "reduce_scatter_tensor": ("reduce_scatter", 0),
    }

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it dispatches again with its local tensors
        name = func._opname
        if func.namespace in self.NAMESPACES and not name.startswith(("wait", "_wrap", "_allgather_into_tensor_out")):
            label, position = self.OPS.get(name, (name, slice(None)))
            sent = [t for t in tree_leaves(args[position]) if isinstance(t, torch.Tensor)]
            self.calls += [(label, tuple(t.shape), t.numel() * t.element_size()) for t in sent]
        return func(*args, **(kwargs or {}))

    @property
    def shapes(self):
        return [shape for _, shape, _ in self.calls]

    @property
    def names(self):
        return [name for name, *_ in self.calls]

    @property
    def nbytes(self):
        return sum(n for *_, n in self.calls)
