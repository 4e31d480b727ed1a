"""The pictures of the pages, drawn from results of the package, in the ink of the page around them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator

import matplotlib
import torch

import dllm_kernels as ours

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap

INK = "#010203"  # drawn as ``currentColor``
COLOURS = ["#0d9488", "#ea580c", "#6366f1", "#ca8a04", "#94a3b8"]
CLEAN, PROMPT, MASKED, REPLACED = range(4)
V, MASK = 12, 11


def all_of_them() -> Iterator[tuple[str, str]]:
    """Return (file name, SVG) of each picture."""
    torch.manual_seed(0)
    style = {
        "svg.fonttype": "none", "svg.hashsalt": "dllm_kernels", "font.family": "sans-serif", "font.size": 10,
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        "axes.prop_cycle": plt.cycler(color=COLOURS), "figure.constrained_layout.use": True,
    }  # fmt: skip
    for name, draw in PICTURES.items():
        with plt.rc_context(style):
            figure = draw()
            out = io.StringIO()
            figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
            plt.close(figure)
            yield f"{name}.svg", inline(out.getvalue(), name)


def inline(svg: str, name: str) -> str:
    """Return the SVG element alone, in the colour of the text around it; no other picture of a page has its ids."""
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would apply to the whole page
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return svg.replace("<svg ", '<svg class="figure" role="img" ', 1)


def weights_of(loss: Callable[[torch.Tensor], torch.Tensor], rows: tuple[int, ...], ids: torch.Tensor) -> torch.Tensor:
    """Return the row weights of a loss, read from its gradient: d/dz_y = w (p_y - 1), and p = 1 / V for logits of 0."""
    logits = torch.zeros(*rows, V, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(loss(logits), logits)
    return grad.gather(-1, ids[..., None])[..., 0] / (1 / V - 1)


def bars(weights: torch.Tensor, label: str, title: str = "") -> plt.Figure:
    """Draw one bar per position."""
    figure, axes = plt.subplots(figsize=(7, 2.2))
    axes.bar(range(1, len(weights) + 1), weights)
    axes.set(xlabel="position", ylabel=label, title=title)
    return figure


def mdlm() -> plt.Figure:
    t = torch.linspace(0.04, 1, 100)
    ids, ones = torch.zeros(100, 1, dtype=torch.long), torch.ones(100, 1)
    weights = weights_of(
        lambda z: ours.MDLMCrossEntropyLoss()(z, ids, ones, t[:, None], ones).total_loss, (100, 1), ids
    )
    figure, axes = plt.subplots(figsize=(7, 2.6))
    axes.plot(t, weights[:, 0], label="a masked token")
    axes.plot(t, t * weights[:, 0], label="mean over all tokens of a sequence")
    axes.set(xlabel="fraction of masked tokens p", ylabel="weight")
    axes.legend()
    return figure


def block_diffusion() -> plt.Figure:
    ids, loss_mask = torch.zeros(1, 32, dtype=torch.long), torch.ones(1, 32)
    loss_mask[:, :8] = 0
    masks = torch.rand(1, 32) < 0.5, torch.rand(1, 32), loss_mask
    weights = weights_of(lambda z: ours.BlockDiffusionCrossEntropyLoss()(z, ids, *masks).total_loss, (1, 32), ids)
    return bars(weights[0], "weight", "a prompt of 8 tokens, then 24 supervised ones")


def hybrid() -> plt.Figure:
    ids, loss_mask = torch.zeros(1, 24, dtype=torch.long), torch.ones(1, 24)
    loss_mask[:, :6] = 0
    _, noise, p = ours.corrupt_uniform(ids, loss_mask, MASK, seeds=torch.tensor([3]), level=torch.tensor([0.5]))
    loss = ours.HybridDiffusionLLMLoss(alpha=0.3)
    counts = {"num_diffusion_tokens": 18, "num_ar_tokens": 18}
    shifted = torch.cat([ids, ids], 1)
    weights = weights_of(
        lambda z: loss(z, ids, noise, p, loss_mask, loss_mask_ar=loss_mask, **counts).total_loss, (1, 48), shifted
    )[0]
    return two_halves(weights, 24, "diffusion rows", "autoregressive rows", "a prompt of 6 tokens; alpha 0.3, p 0.5")


def idlm() -> plt.Figure:
    ids, answer = torch.zeros(1, 24, dtype=torch.long), torch.ones(1, 24)
    answer[:, :6] = 0
    weights = weights_of(
        lambda z: ours.IDLMLoss()(z, ids, answer, torch.ones(1, 24), seq_len=24).total_loss, (1, 48),
        torch.cat([ids, ids], 1),
    )[0]  # fmt: skip
    return two_halves(weights, 24, "masked copy", "clean copy", "a prompt of 6 tokens; alpha 0.2")


def two_halves(weights: torch.Tensor, L: int, first: str, second: str, title: str) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(7, 2.4))
    axes.bar(range(1, L + 1), weights[:L], label=first)
    axes.bar(range(L + 1, 2 * L + 1), weights[L:], label=second)
    axes.set(xlabel="row", ylabel="weight", title=title)
    axes.set_ylim(top=1.35 * weights.max().item())
    axes.legend(ncols=2, loc="upper center")
    return figure


def scdd() -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8))
    t = torch.linspace(0.01, 0.99, 99).double()
    mass = ours.scdd_schedule(t, max_ratio=0.1, gamma_shape=1.0, t_peak=0.5)
    for name in ("clean", "uniform", "absorbed"):
        left.plot(t, getattr(mass, f"{name}_mass"), label=f"{name}_mass")
    left.set(xlabel="time t", title="what has become of a token")
    left.legend()
    ids, seen = torch.zeros(99, 1, dtype=torch.long), {"MASK": MASK, "a wrong token": 1, "the clean token": 0}
    loss, ones = ours.SCDDLoss(MASK), torch.ones(99, 1)
    for name, token in seen.items():
        logits = torch.zeros(99, 1, V, dtype=torch.float64, requires_grad=True)
        noisy = torch.full_like(ids, token)
        out = loss(logits, ids, ones, t[:, None], ones, noisy_input_ids=noisy, num_diffusion_tokens=1)
        (grad,) = torch.autograd.grad(out.total_loss, logits)
        right.plot(t, -grad[:, 0, 0], label=f"the model saw {name}")
    right.set(xlabel="time t", title="gradient at the clean token's logit, negated", yscale="symlog")
    right.legend(fontsize=8)
    return figure


def dflash() -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), sharey=False)
    ids, mask = torch.zeros(1, 15, dtype=torch.long), torch.ones(1, 15)
    for gamma in (4.0, 5.0, 7.0):
        loss = ours.DFlashDecayLoss(loss_gamma=gamma)
        weights = weights_of(lambda z, loss=loss: loss(z, ids, mask, block_size=16).total_loss, (1, 15), ids)
        left.plot(range(1, 16), weights[0], marker=".", label=f"gamma {gamma:.0f}")
    left.set(xlabel="predicted position of the block", ylabel="weight", title="decay")
    left.legend()
    for name, q in {"0.9 throughout": torch.full((15,), 0.9), "0.1 at position 6": torch.full((15,), 0.9)}.items():
        if "6" in name:
            q[5] = 0.1
        right.plot(range(1, 16), ours.dpace_weights(q, torch.ones(15)), marker=".", label=f"confidence {name}")
    right.set(xlabel="predicted position of the block", title="D-PACE, alpha 0.5")
    right.legend()
    return figure


def encoder_ar() -> plt.Figure:
    ids, valid = torch.zeros(1, 20, dtype=torch.long), torch.ones(1, 20)
    valid[:, 14:] = 0
    weights = weights_of(lambda z: ours.encoder_ar_loss(z, ids, valid), (1, 20), ids)
    return bars(weights[0], "weight", "14 tokens, then padding: 13 pairs")


def mtp() -> plt.Figure:
    from dllm_kernels.mtp.depths import mtp_labels

    figure, axes = plt.subplots(figsize=(8, 2.2))
    labels, seq_idx = torch.arange(14), torch.tensor([0] * 6 + [1] * 8)
    for depth in range(3):
        for position, label in enumerate(mtp_labels(labels, depth, seq_idx=seq_idx).tolist()):
            axes.text(
                position, depth, "-" if label < 0 else f"{label}", ha="center", va="center",
                color=COLOURS[seq_idx[label]] if label >= 0 else INK,
            )  # fmt: skip
    axes.axvline(5.5, color=COLOURS[4], linestyle=":")
    axes.set(
        xlim=(-0.7, 13.7), ylim=(2.6, -0.6), xticks=range(14), yticks=range(3), xlabel="position", ylabel="depth k",
        title="label of each position, by its index; a dash is left out; two packed sequences",
    )  # fmt: skip
    return figure


def corruption() -> plt.Figure:
    B, L = 16, 64
    ids, loss_mask = torch.zeros(B, L, dtype=torch.long), torch.ones(B, L)
    loss_mask[:, :12] = 0
    level, seeds = torch.linspace(0.05, 0.95, B), torch.arange(B)
    routines = {
        "corrupt_uniform": ours.corrupt_uniform(ids, loss_mask, MASK, level=level, seeds=seeds)[0],
        "corrupt_uniform, exact=True":
            ours.corrupt_uniform(ids, loss_mask, MASK, level=level, exact=True, seeds=seeds)[0],
        "corrupt_blockwise": ours.corrupt_blockwise(ids, loss_mask, MASK, level=level, seeds=seeds)[0],
        "corrupt_blockwise, block_size=16":
            ours.corrupt_blockwise(ids, loss_mask, MASK, block_size=16, level=level, seeds=seeds)[0],
        "corrupt_uniform_random": ours.corrupt_uniform_random(ids, loss_mask, 2**31, level=level, seeds=seeds)[0],
        "corrupt_mix, half of the noise each": ours.corrupt_mix(
            ids, loss_mask, MASK, V, mask_prob=level / 2, uniform_prob=level / 2, seeds=seeds
        )[0],
    }  # fmt: skip
    figure, axes = plt.subplots(3, 2, figsize=(9, 5.6))
    for place, (name, noisy) in zip(axes.flat, routines.items(), strict=True):
        kind = torch.where(noisy == MASK, MASKED, torch.where(noisy != 0, REPLACED, CLEAN))
        kind[:, :12] = PROMPT
        picture(place, kind)
        place.set_title(name)
    key = {"clean": CLEAN, "prompt": PROMPT, "masked": MASKED, "another token": REPLACED}
    patches = [plt.Rectangle((0, 0), 1, 1, color=CELLS[k]) for k in key.values()]
    figure.legend(patches, key, ncols=4, loc="outside lower center")
    return figure


def bias() -> plt.Figure:
    B, size = 20_000, 16
    ids, everywhere = torch.zeros(B, size, dtype=torch.long), torch.ones(B, size)
    routines = {"corrupt_uniform": ours.corrupt_uniform, "corrupt_blockwise": ours.corrupt_blockwise}
    figure, place = plt.subplots(figsize=(6, 2.6))
    for name, routine in routines.items():
        generator = torch.Generator().manual_seed(0)
        _, noise, p_mask = routine(ids, everywhere, MASK, block_size=size, generator=generator)
        place.plot(range(size), (noise / p_mask).mean(0), marker=".", label=f"{name}, block_size={size}")
    place.set(xlabel="position in the block", ylabel="mean of noise / p_mask", ylim=(0, None))
    place.legend()
    return figure


def generation() -> plt.Figure:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.places = torch.nn.Embedding(V, 16), torch.randn(28, 16)
            self.lm_head = torch.nn.Linear(16, V)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids) + self.places
            return self.lm_head(3 * torch.tanh(x + x.roll(1, 1) + x.roll(-1, 1)))

    N, steps, model = 24, 12, Model()
    options = {"confidence": {}, "random": {"remasking": "random"}, "confidence, block_size=8": {"block_size": 8}}
    names = {"decoded": "#cbd5e1", "decoded in this step": "#0d9488", "MASK": "#64748b"}
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.6))
    for place, (title, chosen) in zip(axes, options.items(), strict=True):
        out = ours.diffusion_generate(
            model, torch.zeros(1, 4, dtype=torch.long), mask_token_id=MASK, max_new_tokens=N, steps=steps,
            seeds=torch.tensor([1]), **chosen,
        )  # fmt: skip
        decoded, step = out.step_map[:, 4:], torch.arange(steps)[:, None]
        picture(place, (decoded >= step).int() + (decoded > step).int(), list(names.values()))
        place.set(title=title, xlabel="new token")
    axes[0].set_ylabel("step")
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in names.values()]
    figure.legend(patches, names, ncols=3, loc="outside lower center")
    return figure


def truncation() -> plt.Figure:
    """Draw the distribution of one row, as the sampler returns it for each truncation."""
    columns = 16
    logits = -0.35 * torch.arange(columns, dtype=torch.float32)
    hidden, head = torch.ones(1, 1), logits[:, None]
    options = {"": {}, "top_k=6": {"top_k": 6}, "top_p=0.8": {"top_p": 0.8}, "min_p=0.1": {"min_p": 0.1}}
    figure, axes = plt.subplots(1, len(options), figsize=(9, 2.2), sharey=True)
    for place, (title, chosen) in zip(axes, options.items(), strict=True):
        out = ours.linear_sample(hidden, head, seeds=torch.tensor([1]), return_top=columns, **chosen)
        place.bar(out.top_ids[0], out.top_log_probs[0].exp())
        place.set(title=title or "no truncation", xlabel="token, by probability")
    axes[0].set_ylabel("probability")
    return figure


def sparse_teacher() -> plt.Figure:
    """Draw teacher and student over the K ids and the bucket for the rest, and without the bucket."""
    K, teacher = 5, (-0.5 * torch.arange(V, dtype=torch.float32)).log_softmax(0)
    student = (-0.25 * torch.arange(V, dtype=torch.float32)).log_softmax(0)
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.4), sharey=True)
    for place, tail in zip(axes, (True, False), strict=True):
        for shift, (name, log_p) in zip((-0.2, 0.2), {"teacher": teacher, "student": student}.items(), strict=True):
            p = log_p[:K].exp()
            p = torch.cat([p, 1 - p.sum(0, keepdim=True)]) if tail else p / p.sum()
            place.bar(torch.arange(len(p)) + shift, p, 0.4, label=name)
        value = ours.topk_divergence(student[None], torch.arange(K)[None], teacher[None, :K], tail=tail).value.item()
        place.set(title=f"tail={tail}: KL = {value:.3f}", xticks=range(K + tail))
        place.set_xticklabels([*map(str, range(K)), *(["others"] if tail else [])])
        place.set_xlabel("token")
    axes[0].set_ylabel("probability")
    axes[0].legend()
    return figure


CELLS = ["#cbd5e1", "#64748b", "#0d9488", "#ea580c"]


def picture(place: plt.Axes, kind: torch.Tensor, colours: list[str] = CELLS) -> None:
    place.imshow(
        kind, cmap=ListedColormap(colours), vmin=0, vmax=len(colours) - 1, aspect="auto", interpolation="nearest"
    )
    place.set(xticks=[], yticks=[])
    for side in place.spines.values():
        side.set_visible(False)


def levels() -> plt.Figure:
    figure, axes = plt.subplots(1, 3, figsize=(8, 2.4), sharey=True)
    for place, method in zip(axes, ("uniform", "antithetic", "stratified"), strict=True):
        for step in range(12):
            drawn = ours.sample_level(8, method=method, generator=torch.Generator().manual_seed(step))
            place.plot([step] * 8, drawn, ".", color=COLOURS[0])
        place.set(title=method, xlabel="step")
    axes[0].set_ylabel("level")
    return figure


def collator() -> plt.Figure:
    samples = [
        {"input_ids": [1] * n, "loss_mask": [0] * p + [1] * (n - p), "attention_mask": [1] * n}
        for n, p in ((9, 3), (17, 6), (12, 2))
    ]
    batch = ours.DLLMCollator(pad_token_id=0, eos_token_id=2, block_size=8)(samples)
    ids, supervised = batch["input_ids"], batch["loss_mask"] != 0
    kind = torch.where(ids == 2, 2, torch.where(ids == 0, 3, torch.where(supervised, 0, 1)))
    figure, place = plt.subplots(figsize=(8, 1.8))
    names = {"supervised": "#0d9488", "prompt": "#64748b", "block fill, supervised": "#6366f1", "padding": "#cbd5e1"}
    picture(place, kind, list(names.values()))
    place.set_title("block_size=8")
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in names.values()]
    figure.legend(patches, names, ncols=4, loc="outside lower center")
    return figure


def divergence() -> plt.Figure:
    p = torch.linspace(0.01, 0.99, 99).double()
    student, teacher = torch.stack([p.log(), (1 - p).log()], -1), torch.tensor([0.3, 0.7]).double().log().expand(99, 2)
    figure, axes = plt.subplots(figsize=(7, 2.8))
    for kind in ("kl", "rkl", "jsd", "tv", "nla", "lk"):
        axes.plot(
            p, ours.divergence(student, teacher, kind=kind).value, label=kind, color="#be185d" if kind == "lk" else None
        )
    axes.set(xlabel="p of the first token; q is 0.3", ylabel="D", ylim=(0, 2))
    axes.legend(ncols=2)
    return figure


def views() -> plt.Figure:
    L, prompt = 24, 6
    ids, loss_mask = torch.zeros(1, L, dtype=torch.long), torch.ones(1, L)
    loss_mask[:, :prompt] = 0
    steps = torch.full((1, L), -1)
    steps[:, prompt:] = torch.arange(L - prompt) // 6
    schemes = {
        '"full", prompt_prob=0.15': {"scheme": "full", "num": 2, "prompt_prob": 0.15},
        '"coupled"': {"scheme": "coupled"},
        '"elbo", num=3': {"scheme": "elbo", "num": 3},
        '"count"': {"scheme": "count"},
        '"quadrature", num=3': {"scheme": "quadrature", "num": 3},
        '"trace", 3 steps': {"scheme": "trace", "step_map": steps},
    }  # fmt: skip
    figure, axes = plt.subplots(3, 2, figsize=(9, 4.4))
    for place, (name, options) in zip(axes.flat, schemes.items(), strict=True):
        found = ours.policy_views(ids, loss_mask, MASK, seeds=torch.tensor([5]), **options)
        masked, scored = found.noisy[:, 0] == MASK, found.scored[:, 0]
        kind = torch.where(scored, MASKED, torch.where(masked, REPLACED, CLEAN))
        kind[:, :prompt] = torch.where(masked[:, :prompt], REPLACED, PROMPT)
        picture(place, kind)
        place.set(title=name, ylabel="views")
    key = {"visible": CLEAN, "prompt": PROMPT, "masked and scored": MASKED, "masked, not scored": REPLACED}
    patches = [plt.Rectangle((0, 0), 1, 1, color=CELLS[k]) for k in key.values()]
    figure.legend(patches, key, ncols=4, loc="outside lower center")
    return figure


PICTURES = {
    "views": views,
    "divergence": divergence,
    "mdlm": mdlm, "block-diffusion": block_diffusion, "hybrid": hybrid, "idlm": idlm, "scdd": scdd, "dflash": dflash,
    "encoder-ar": encoder_ar, "mtp": mtp, "corruption": corruption, "bias": bias, "levels": levels,
    "collator": collator, "generation": generation, "truncation": truncation, "sparse-teacher": sparse_teacher,
}  # fmt: skip
