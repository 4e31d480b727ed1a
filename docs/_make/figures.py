"""Diagrams of the pages, drawn by hand: which call to use, and the chunk loop of a head."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.svg import Picture

#: (situation, call)
CALLS = (
    ("My loop computes a loss from logits and stays as it is", "with fused_head(model): ..."),
    ("I use NeMo AutoModel or speculators", "integrations.….patch()"),
    ("I train an autoregressive model in TRL", "integrations.trl.patch()"),
    ("I train a diffusion LM in TRL", "DiffusionPolicyMixin"),
    ("I use the Hugging Face Trainer", "MaskedDiffusionTrainerMixin"),
    ("I train with a published loss (MDLM, SCDD, DFlash, ...)", "LossClass()(LinearLogits(...))"),
    ("My loss has one weight per row, known before", "weighted_nll"),
    ("My loss uses the NLL of each row", "token_nll"),
    ("My loss is a function of log p or entropy of each row", "row_objective"),
    ("My loss compares with a teacher", "divergence"),
    ("I train a policy on rewards or preferences", "policy_views, PolicyLoss"),
    ("I decode completions", "diffusion_generate"),
    ("I write a sampler: tokens, log p, confidences", "linear_sample"),
)
STEPS = (
    ("gather", "hidden states of C active rows", "[C, D]"),
    ("product", "logits of the chunk", "[C, V]"),
    ("kernel", "NLL; the logits become their gradient", "[C, V], in place"),
    ("product", "gradient of the hidden states", "[C, D]"),
    ("product", "gradient of a trained head, added in float32", "[V, D]"),
)


def which_call() -> Picture:
    """Draw one row for each situation, with the call that fits it; the first row that applies counts."""
    row = 34
    picture = Picture(720, 50 + row * len(CALLS), "Which call: the first situation that applies names it")
    picture.text(16, 26, "The first line that applies", bold=True)
    picture.text(452, 26, "is your call", bold=True)
    for i, (situation, call) in enumerate(CALLS):
        y = 42 + row * i
        picture.box(12, y, 396, 26, fill="wash", radius=5)
        picture.text(22, y + 18, situation)
        picture.arrow((412, y + 13), (444, y + 13))
        picture.box(450, y, 258, 26, fill="tint", radius=5)
        picture.text(460, y + 18, call, mono=True, size=12.5)
        if i + 1 < len(CALLS):
            picture.line([(28, y + 26), (28, y + row)], colour="soft")
    return picture


def chunk_loop() -> Picture:
    """Draw the steps of a chunk, and the rows that it takes from the hidden states."""
    picture = Picture(720, 330, "The chunk loop: active rows are projected, reduced and sent back, C rows at a time")
    active = (1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 0)
    picture.text(16, 26, "hidden states", bold=True)
    picture.text(16, 44, "[N, D]", colour="soft", size=12)
    for i, on in enumerate(active):
        picture.box(16, 54 + 20 * i, 96, 17, fill="ours" if on and i < 7 else "tint" if on else "wash", radius=2)
    picture.text(16, 306, "bright: this chunk", colour="soft", size=11)
    picture.text(16, 321, "grey: never read", colour="soft", size=11)
    picture.arrow((120, 122), (166, 122))
    picture.text(176, 26, "for each chunk of C active rows", bold=True)
    for i, (kind, what, shape) in enumerate(STEPS):
        y = 42 + 52 * i
        fill = "tint" if kind == "product" else "wash"
        picture.box(176, y, 528, 38, fill=fill, border="grid", radius=5)
        picture.text(188, y + 24, kind, colour="soft", size=12)
        picture.text(252, y + 24, what)
        picture.text(694, y + 24, shape, colour="soft", anchor="end", size=12, mono=True)
        if i + 1 < len(STEPS):
            picture.arrow((208, y + 39), (208, y + 51))
    picture.text(176, 318, "Only [C, V] of the logits exists. Backward scales the gradients by one number.", size=12)
    return picture


def all_of_them() -> Iterator[tuple[str, str]]:
    """Return (file name, SVG) of each diagram."""
    yield "which-call.svg", str(which_call())
    yield "chunk-loop.svg", str(chunk_loop())
