"""Code of the pages about many GPUs and of an example, compared with plain PyTorch on the whole batch in one process.

The expected counts, losses and gradients are computed here without code of the package.
"""

import importlib.util
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from dllm_kernels import LinearLogits, MDLMCrossEntropyLoss, corrupt_uniform
from dllm_kernels.distributed import global_token_count, summed_over
from tests.support.cases import BY_NAME
from tests.support.defaults import default_dtype
from tests.support.distributed_checks import D, V, check, close, drawn, same_gradients
from tests.support.readme import DOCS, ROOT, fences, run

WORLD = 2
PAGES = {name: (DOCS / name).read_text() for name in ("many-gpus.md", "model-parallel.md")}
FENCES = {paragraph: codes for text in PAGES.values() for paragraph, codes in fences(text).items()}


class Model(nn.Module):
    """The model of the examples: layers and a head; its forward returns hidden states."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Embedding(V, D), nn.Linear(D, D)])
        self.lm_head = nn.Linear(D, V)
        self.double()

    def forward(self, ids):
        return self.layers[1](self.layers[0](ids)).tanh()


class ModelWithLogits(Model):
    def forward(self, ids):
        return self.lm_head(super().forward(ids))


def batch():
    """Draw the whole batch, equal on every rank."""
    inputs = drawn(BY_NAME["mdlm"])
    ids = inputs.pop("target_ids")
    return inputs | {"ids": ids, "noisy": torch.where(inputs["noise_mask"] | (ids < 0), V - 1, ids)}


def names(model, rows=slice(None)):
    """Return the names that an example expects to be defined."""
    mine = {name: t[rows] for name, t in batch().items()}
    return mine | {"model": model, "rank": dist.get_rank(), "world": WORLD, "device": torch.device("cpu")}


def my_rows():
    return slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def whole_batch(bias=True):
    """Compute the masked diffusion loss over the whole batch's supervised tokens, and gradients, in plain PyTorch.

    Without ``bias``, the bias of the head is 0.
    """
    model, b = ModelWithLogits(), batch()
    model.lm_head.bias.data.mul_(bias)
    nll = F.cross_entropy(model(b["noisy"]).transpose(1, 2), b["ids"], reduction="none")
    supervised = b["loss_mask"] != 0
    loss = (nll * (b["noise_mask"] & supervised) / b["p_mask"]).sum() / supervised.sum()
    loss.backward()
    return loss.detach(), gradients(model)


def run_each(codes, rows, total):
    """Run each code. ``total`` of its loss, and the gradient of every parameter, are those of the whole batch."""
    loss, grads = whole_batch()
    model = Model()
    found = names(model, rows)
    for code in codes:
        model.zero_grad()
        run(code, found)
        close(total(found["out"].total_loss), loss)
        same_gradients(model, grads)


def sharded(parameter, in_forward):
    """In both ways, the ranks' losses add up."""
    run_each((parameter, in_forward), my_rows(), summed_over)


class HuggingFaceModel(nn.Module):
    """Modules and results of a ``...ForCausalLM``: ``model`` with ``layers``, and ``lm_head``."""

    def __init__(self):
        super().__init__()
        parts = Model()
        self.model, self.lm_head = nn.Module(), parts.lm_head
        self.model.embed_tokens, self.model.layers = parts.layers[0], parts.layers[1:]
        self.model.forward = self._hidden

    def _hidden(self, input_ids):
        (layer,) = self.model.layers
        return SimpleNamespace(last_hidden_state=layer(self.model.embed_tokens(input_ids)).tanh())


def hugging_face(code):
    """The head has no bias here. The ranks' losses add up, and every parameter has the gradient of the whole batch."""
    loss, grads = whole_batch(bias=False)
    m = HuggingFaceModel()
    m.lm_head.bias = None
    found = names(None, my_rows()) | {"m": m, "loss_fn": MDLMCrossEntropyLoss()}
    found |= {"fully_shard": fully_shard, "LinearLogits": LinearLogits}
    found["inputs"] = tuple(found[name] for name in ("ids", "noise_mask", "p_mask", "loss_mask"))
    found["count"] = global_token_count(found["loss_mask"])
    run(code, found)
    close(summed_over(found["out"].total_loss), loss)
    where = {"model.embed_tokens.weight": "layers.0.weight", "model.layers.0.weight": "layers.1.weight"}
    where |= {"model.layers.0.bias": "layers.1.bias", "lm_head.weight": "lm_head.weight"}
    same_gradients(m, {name: grads[other] for name, other in where.items()})


def split_vocabulary(from_logits, from_head):
    """Every rank has the loss of the whole batch."""
    run_each((from_logits, from_head), slice(None), torch.Tensor.detach)


def accumulated(code):
    """Each rank has two micro-batches of one row, and the losses of all add up."""
    loss, grads = whole_batch()
    model = ModelWithLogits()
    found = names(model, my_rows()) | {"micro_batch_size": 1}
    run(code, found)
    assert len(found["losses"]) == 2
    close(summed_over(torch.stack(found["losses"]).sum()), loss)
    same_gradients(model, grads)


def pipelined(code):
    """There are two stages, embedding and head. The loss is the sum over all tokens with a label."""
    b = batch()
    stages = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V)).double()
    whole = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V)).double()
    whole.load_state_dict(stages.state_dict())
    loss = F.cross_entropy(whole(b["noisy"]).transpose(1, 2), b["ids"], reduction="sum")
    loss.backward()
    part = stages[dist.get_rank()]
    found = names(None) | {"part_of_the_model": part, "labels": b["ids"]}
    run(code, found)
    if dist.get_rank():
        assert len(found["losses"]) == 4
        close(torch.stack(found["losses"]).sum(), loss.detach())
    same_gradients(part, gradients(whole[dist.get_rank()]))


# First words of a paragraph -> the function that runs all of its fences; its parameters are the fences.
SCENARIOS = {
    "FSDP2": sharded,
    "A Hugging Face model": hugging_face,
    "Tensor parallelism": split_vocabulary,
    "Data parallelism, accumulation": accumulated,
    "Pipeline": pipelined,
}


@check(WORLD, paragraph=SCENARIOS)
def readme(paragraph):
    """The code runs as printed: the loss and every gradient equal those of one process."""
    SCENARIOS[paragraph](*FENCES[paragraph])


@check(4)
def example_fsdp2_tensor_parallel():
    """In float64, the loss of each step of ``examples/fsdp2_tensor_parallel.py`` equals that of one process."""
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "fsdp2_tensor_parallel.py")
    example = importlib.util.module_from_spec(spec)
    with default_dtype(torch.float64):
        spec.loader.exec_module(example)
        found = example.main(steps=3)
        model, expected = example.Model(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            samples = step * example.B + torch.arange(example.B)
            ids = (7 * samples[:, None] + torch.arange(example.L)) % example.MASK
            noisy, noise, p = corrupt_uniform(ids, torch.ones(ids.shape), example.MASK, eps=0.1, seeds=samples)
            nll = F.cross_entropy(model.lm_head(model(noisy)).transpose(1, 2), ids, reduction="none")
            loss = (nll * noise / p).sum() / ids.numel()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    assert expected[2] < expected[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
