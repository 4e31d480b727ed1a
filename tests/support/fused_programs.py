"""Random programs on the logits of an LM head, as source code that runs with and without ``fused_head``.

A :class:`Program` is a list of statements of Python, in a :class:`World` of two models. :func:`check` compares both
runs, :func:`shrunk` makes a failing program small. ``fused_grammar`` writes programs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import pickle
import random
import re
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import dllm_kernels
from dllm_kernels import fused_head

B, L, V, D = 2, 5, 11, 6
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


# Functions of a user ----------------------------------------------------------------------------------------------


class Saving(Function):
    """Save input and output."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * (1 - y * y) + 0 * x


class Dirty(Function):
    """Multiply in place."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(1.5)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 1.5


class Once(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g * ctx.factor, None


class Several(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2, (x * x).sum(-1)

    @staticmethod
    def backward(ctx, a, b):
        (x,) = ctx.saved_tensors
        return a * 2 + 2 * x * b.unsqueeze(-1)


class PartlyConstant(Function):
    @staticmethod
    def forward(ctx, x):
        ids, y = x.argmax(-1), x * 0.5
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)
        return y, ids

    @staticmethod
    def backward(ctx, g, _):
        return None if g is None else g * 0.5


class Alias(Function):
    """Return a view of the input."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Same(Function):
    """Return the input."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Setup(Function):
    """Two tensors, one of which may need no gradient, in the newer form."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        first, second = ctx.needs_input_grad
        return g * w if first else None, (g * x).sum_to_size(w.shape) if second else None


class GradInForward(Function):
    """Compute the gradient in the forward, as kernels of cross-entropies do."""

    @staticmethod
    def forward(ctx, z, y):
        z = z.detach().float()
        p = z.softmax(-1)
        ctx.save_for_backward(p - F.one_hot(y, z.shape[-1]))
        return (z.logsumexp(-1) - z.gather(-1, y[..., None])[..., 0]).sum()

    @staticmethod
    def backward(ctx, g):
        (grad,) = ctx.saved_tensors
        return g * grad, None


class GradInLogits(Function):
    """Write the gradient into the memory of the logits, as Liger's cross-entropy does."""

    @staticmethod
    def forward(ctx, z, y):
        p = z.float().softmax(-1)
        loss = -p.gather(-1, y[..., None]).log().sum()
        z.data.copy_(p - F.one_hot(y, z.shape[-1]))
        ctx.save_for_backward(z.detach())
        return loss

    @staticmethod
    def backward(ctx, g):
        (grad,) = ctx.saved_tensors
        return g * grad, None


class LogProb(Function):
    """Log-probability of ids, as TRL's kernel: logits and logsumexp are saved."""

    @staticmethod
    def forward(ctx, z, y):
        lse = z.float().logsumexp(-1)
        ctx.save_for_backward(z, y, lse)
        return z.gather(-1, y.unsqueeze(-1)).squeeze(-1).float() - lse

    @staticmethod
    def backward(ctx, g):
        z, y, lse = ctx.saved_tensors
        grad = -(z.float() - lse[..., None]).exp() * g[..., None]
        grad.scatter_add_(-1, y[..., None], g[..., None].to(grad.dtype))
        return grad.to(z.dtype), None


class Sums(Function):
    @staticmethod
    def forward(ctx, *xs):
        ctx.shapes = [x.shape for x in xs]
        return torch.stack([x.sum() * (i + 1) for i, x in enumerate(xs)]).sum()

    @staticmethod
    def backward(ctx, g):
        return tuple((g * (i + 1)).expand(s) for i, s in enumerate(ctx.shapes))


class Checked(Function):
    """Return what a tensor says of itself, in values."""

    @staticmethod
    def forward(ctx, x):
        ctx.like = x
        told = x.requires_grad, x.is_leaf, x.is_contiguous(), x.grad_fn is None, x.numel() == math.prod(x.shape)
        return x.new_zeros(x.shape).copy_(x) * (1 + sum(0.1 * 2**i for i, t in enumerate(told) if t))

    @staticmethod
    def backward(ctx, g):
        assert (g.shape, g.dtype) == (ctx.like.shape, ctx.like.dtype)
        return g.clone()


@torch.library.custom_op("fused_programs::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Custom op, with the gradient of a triple."""
    return x * 2


doubled.register_autograd(lambda ctx, g: g * 3)


def in_thread(function):
    """Return what a function returns in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def subs(z, ids, change="add"):
    """Return log-probabilities as MDLM, BD3-LM and Duo compute them; class 3 is never taken, ``ids`` are not masked."""
    if change == "add":
        z[..., 3] += -1e4
    elif change == "set":
        z[:, :, 3] = -torch.inf
    else:
        z = z.masked_fill(torch.arange(V) == 3, -5e5)
    z = z - torch.logsumexp(z, dim=-1, keepdim=True)
    unmasked = ids != 3
    z[unmasked] = -1e4
    z[unmasked, ids[unmasked]] = 0
    return z


def guided(z, scale):
    """Return guided logits of two halves of a batch."""
    conditional, other = z[:1], z[-1:]
    return other + (scale + 1) * (conditional - other)


FUNCTIONS = Saving, Dirty, Once, Several, PartlyConstant, Alias, Same, Setup, GradInForward, GradInLogits, LogProb
FUNCTIONS += Sums, Checked


# The model ----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, head, form):
        super().__init__()
        self.form = form
        self.body, self.mix = nn.Embedding(V, D), nn.Linear(D, D)
        self.lm_head = nn.Linear(D, V, bias=head == "bias")
        if head == "tied":
            self.lm_head.weight = self.body.weight

    def hidden(self, ids):
        return torch.tanh(self.mix(self.body(ids)))

    def forward(self, ids):
        z = self.lm_head(self.hidden(ids))
        if "cap" in self.form:
            z = 3.0 * torch.tanh(z / 3.0)
        if "scale" in self.form:
            z = z * 0.7
        if "float" in self.form:
            z = z.float()
        if "object" in self.form:
            return SimpleNamespace(logits=z)
        if "dict" in self.form:
            return {"logits": z}
        return z


@dataclass(frozen=True)
class Spec:
    """The world of a program."""

    seed: int = 0
    head: str = "trained"  # frozen, bias, tied, lora, copy (modules_to_save), normed (parametrised)
    form: str = ""
    dtype: str = "float32"
    teacher: str = "frozen"  # trained, frozen
    fuse_teacher: bool = True
    on_logits: str = "allow"


def eps(spec):
    return {"float32": 3e-7, "float64": 1e-15, "bfloat16": 8e-3}[spec.dtype] if spec.seed >= 0 else 4e-3


@functools.cache
def template(head, form, dtype, seed):
    """Return a model."""
    torch.manual_seed(seed)
    model = Model(head, form)
    if head == "frozen":
        model.lm_head.requires_grad_(False)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.6)
    if head in ("lora", "copy"):
        import peft

        lora, kept = (["lm_head"], None) if head == "lora" else (["mix"], ["lm_head"])
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=lora, modules_to_save=kept)
        model = peft.get_peft_model(model, config)
        for n, p in model.named_parameters():
            if "lora_" in n:
                nn.init.normal_(p, 0, 0.5)
    if head == "normed":
        nn.utils.parametrizations.weight_norm(model.lm_head)
    return model.to(DTYPES[dtype])


def copied(head, form, dtype, seed):
    """Return a copy of :func:`template`."""
    first = template(head, form, dtype, seed)
    if head in ("lora", "copy", "normed"):
        return copy.deepcopy(first)
    model = Model(head, form).to(DTYPES[dtype])
    with torch.no_grad():
        for p, q in zip(model.parameters(), first.parameters(), strict=True):
            p.copy_(q).requires_grad_(q.requires_grad)
    return model


class Optimizer:
    """SGD, made when it is used."""

    def __init__(self, parameters):
        self.parameters = parameters

    def __getattr__(self, name):
        self.__dict__["made"] = self.__dict__.get("made") or torch.optim.SGD(self.parameters, lr=0.1)
        return getattr(self.made, name)


class World:
    """Names that a program sees, and what it reports."""

    def __init__(self, spec, fused, nudge=None):
        self.seen, self.logs, self.spec = [], [], spec
        model = copied(spec.head, spec.form, spec.dtype, 1)
        teacher = copied(spec.teacher, "", spec.dtype, 2)
        hid = fixed((B, L, D), 0.5, DTYPES[spec.dtype])
        if nudge is not None:
            with torch.no_grad():
                for i, t in enumerate([*model.parameters(), *teacher.parameters(), hid]):
                    t.mul_(1 + eps(spec) * fixed(t.shape, nudge * i, t.dtype).sign())
        if spec.teacher == "frozen":
            teacher.requires_grad_(False)
        self.model, self.teacher, self.hid = model, teacher, hid.requires_grad_()
        trained = [p for p in model.parameters() if p.requires_grad]
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.stack = contextlib.ExitStack()
        self.fused = []
        if fused:
            self.fused.append(self.stack.enter_context(fused_head(model, head=base.lm_head, on_logits=spec.on_logits)))
            if spec.fuse_teacher:
                self.fused.append(self.stack.enter_context(fused_head(teacher, on_logits=spec.on_logits)))
        self.names = {f.__name__: f for f in (*FUNCTIONS, ids, mask, wts, fixed, lg, in_thread, subs, guided)}
        self.names |= {m.__name__.rsplit(".", 1)[-1]: m for m in (torch, nn, copy, pickle, io)}
        self.names |= {"F": F, "pytree": pytree, "dllm": dllm_kernels, "checkpoint": checkpoint, "doubled": doubled}
        self.names |= {"B": B, "L": L, "V": V, "D": D, "model": model, "teacher": teacher, "base": base}
        self.names |= {"head": base.lm_head, "hid": self.hid, "x": ids((B, L), 3), "opt": Optimizer(trained)}
        self.names |= {"see": self.see, "hook": self.hook, "leave": self.stack.close}

    def see(self, what):
        if isinstance(what, torch.Tensor):
            with torch.no_grad():
                what = what.detach().clone()
            if type(what) is not torch.Tensor:
                what = what.materialize() if hasattr(what, "materialize") else what.as_subclass(torch.Tensor)
        self.seen.append(what)

    def hook(self, t, name, factor=1.0):
        def log(g):
            self.logs.append((name, g.detach().clone()))
            return g * factor if factor != 1.0 else None

        return t.register_hook(log)

    def results(self):
        out = [(f"seen {i}", v) for i, v in enumerate(self.seen)]
        out += [(f"hook {n}", v) for n, v in sorted(self.logs, key=lambda x: x[0])]
        for who, model in (("model", self.model), ("teacher", self.teacher)):
            out += [(f"{who}.{n}.grad", p.grad) for n, p in model.named_parameters()]
            out += [(f"{who}.{n}", p.detach().clone()) for n, p in model.named_parameters()]
        return [*out, ("hid.grad", self.hid.grad)]


def ids(shape, k=1):
    return torch.arange(math.prod(shape)).mul(2 * k + 1).add(k).remainder(V).view(shape)


def mask(shape, k=1):
    return (torch.arange(math.prod(shape)).mul(k + 2).add(k).remainder(3) > 0).view(shape)


def wts(shape, k=1):
    return (torch.arange(math.prod(shape)).mul(k + 1).add(k).remainder(5) / 4).view(shape)


def fixed(shape, k=1, dtype=torch.float32):
    """Fixed noise."""
    return (torch.arange(math.prod(shape)).mul(0.7).add(k).sin()).view(shape).to(dtype)


def lg(out):
    """Return the logits of what the model returned."""
    return out if isinstance(out, torch.Tensor) else out["logits"] if isinstance(out, dict) else out.logits


# Programs -------------------------------------------------------------------------------------------------------------


@dataclass
class Program:
    """A list of statements; a statement is a line or a block ``(header, statements)``."""

    spec: Spec
    body: list[Any] = field(default_factory=list)

    def source(self):
        return "\n".join(lines_of(self.body))

    def __str__(self):
        default = asdict(Spec())
        told = ", ".join(f"{k}={v!r}" for k, v in asdict(self.spec).items() if v != default[k] and k != "seed")
        return f"# Spec({told})\n{self.source()}"


def lines_of(body, indent=""):
    for s in body:
        if isinstance(s, str):
            yield from (indent + line for line in s.split("\n"))
        else:
            yield indent + s[0]
            yield from lines_of(s[1] or ["pass"], indent + "    ")


# Errors that the documentation announces.
TOLD = {
    "changed": "must not be modified (in place )?between the head and the use|after rows of it were used",
    "metadata": "must not be called on deferred logits|which returns another tensor",
    "gradient": "which a fused loss never computes",
    "dirty": "directly after another one that marked a view",
    "second order": "has no second derivative",
    "once": "frees them in the first backward|run only once",
}


SAYS_NOTHING = "unstable", "undefined"  # verdicts of programs that are no reference


class FailedError(Exception):
    """A statement raised."""

    def __init__(self, error, line):
        super().__init__(f"line {line}: {type(error).__name__}: {error}")
        self.error, self.line = error, line


@functools.lru_cache(8)
def compiled(source):
    return compile(source, "<program>", "exec")


def run(program, fused, nudge=None):
    """Run a program and return what it reports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = World(program.spec, fused, nudge)
        with world.stack:
            try:
                exec(compiled(program.source()), world.names)
            except Exception as error:
                lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<program>"]
                raise FailedError(error, lines[0] if lines else 0) from error
            results = world.results()
        program.materialized = sum(f.materialized for f in world.fused)
        return results


def numbers(value):
    """Return what was seen as a list of strings and one tensor of float64 of its numbers."""
    if value is None or isinstance(value, bool):
        return str(value), torch.empty(0, dtype=torch.float64)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}", value.detach().to(torch.float64).flatten()
    number = r"-?\d+\.?\d*(?:e[-+]\d+)?"
    found = [float(f) for f in re.findall(number, str(value))]
    return re.sub(rf"{number}|\s+", "#", str(value)), torch.tensor(found, dtype=torch.float64)


class UnstableError(Exception):
    """A program that says nothing: plain runs of it differ."""


def bounds(program):
    """Return what the plain program reports, with bounds of the error of each; UnstableError if these are large."""
    plain = run(program, False)
    # Results of two other roundings of the parameters.
    others = [run(program, False, nudge=n) for n in (11, 12)]
    loose = program.spec.dtype == "bfloat16" or "bfloat16" in program.source() or "bf16" in program.source()
    base = 2e-2 if loose else 1e-4
    if loose and program.spec.dtype != "bfloat16":
        rough = Program(replace(program.spec, seed=-1), program.body)
        others += [run(rough, False, nudge=n) for n in (13,)]
    out = []
    for i, (name, value) in enumerate(plain):
        text, a = numbers(value)
        if a.isnan().any():
            raise UnstableError("nan")
        spread = torch.zeros_like(a)
        for other in others:
            told, b = numbers(other[i][1]) if i < len(other) else ("", None)
            if len(other) != len(plain) or told != text or a.shape != b.shape or not torch.equal(a.isinf(), b.isinf()):
                raise UnstableError("another form")
            spread = torch.maximum(spread, (a - b).abs().nan_to_num(0, 0, 0))
        finite = a[a.isfinite()].abs()
        scale = finite.max().item() if finite.numel() else 0.0
        if scale > 1e6 or (spread > 0.1 * max(scale, 0.1)).any() or ("torch.int" in text and spread.any()):
            raise UnstableError("spread")
        bound = base * max(scale, 1.0 if loose else 0.1) + 8 * spread.max().item() if a.numel() else 0.0
        out.append((name, text, a, bound))
    return out


class Undefined:
    """Notes in a run of a plain program what torch does not define, so that its results are no reference.

    - A backward reads a saved tensor that was overwritten without a change of its version, as kernels that write the
      gradient into the logits do, and code that writes to ``.data``. Torch computes another gradient without an error.
    - Hooks of a view are registered before a change in place of the memory that it shares. Torch documents that they
      receive the gradient of the values before the change, but drops them with the node of the view, which it makes
      anew. Whether the output of a head is a view depends on its bias, its input and the release of torch.
    """

    def __init__(self):
        self.overwritten, self.hooked = False, []

    def pack(self, t):
        return t, t.detach().clone()

    def unpack(self, saved):
        t, before = saved
        self.overwritten |= not torch.equal(t.nan_to_num(), before.nan_to_num())
        return t

    def register_hook(self, t, hook):
        self.hooked.append((t, t.grad_fn))
        return REGISTER_HOOK(t, hook)

    @property
    def dropped(self):
        return any(t._is_view() and t.grad_fn is not node for t, node in self.hooked)


REGISTER_HOOK = torch.Tensor.register_hook


def undefined(program):
    """Return the part of the plain program that torch does not define, or None; see :class:`Undefined`."""
    notes = Undefined()
    torch.Tensor.register_hook = lambda t, hook: notes.register_hook(t, hook)
    try:
        with torch.autograd.graph.saved_tensors_hooks(notes.pack, notes.unpack):
            run(program, False)
    except FailedError:
        pass
    finally:
        torch.Tensor.register_hook = REGISTER_HOOK
    return "overwritten memory" if notes.overwritten else "hook of a view" if notes.dropped else None


def verdict_of(error):
    told = [name for name, text in TOLD.items() if re.search(text, str(error))]
    return f"told: {told[0]}" if told else "raise", str(error)


def check(program):
    """Return None if both runs report the same, otherwise ``(kind, text)``.

    Raises:
        FailedError: the plain program raises.
        UnstableError: the plain program says nothing.
    """
    verdict = compared(program)
    reason = undefined(program) if verdict is not None and verdict[0] == "wrong" else None
    return verdict if reason is None else (f"undefined: {reason}", verdict[1])


def compared(program):
    """Return the verdict of :func:`check`, also for programs that torch does not define."""
    plain = bounds(program)
    try:
        fused = run(program, True)
    except FailedError as failed:
        return verdict_of(failed)
    names = [Counter(name for name, *_ in reports) for reports in (plain, fused)]
    if names[0] != names[1]:
        return "wrong", f"reports: only plain has {dict(names[0] - names[1])}, only fused {dict(names[1] - names[0])}"
    for (name, text, a, bound), (_, value) in zip(plain, fused, strict=True):
        try:
            told, b = numbers(value)
        except RuntimeError as error:  # what a hook received
            return verdict_of(error)
        if told != text:
            return "wrong", f"{name}: plain {text}, fused {told}"
        if a.shape != b.shape:
            return "wrong", f"{name}: plain {tuple(a.shape)}, fused {tuple(b.shape)} numbers"
        off = (a - b).abs().masked_fill(a == b, 0)
        if not (off <= bound).all():
            at = off.nan_to_num(math.inf).argmax().item()
            return (
                "wrong",
                f"{name}: plain {a[at]:.6g}, fused {b[at]:.6g}, of up to {a.abs().max():.4g}, bound {bound:.2g}",
            )
    return None


def mended(program, verdict=check, tries=6):
    """Return a program that runs without the statements at which the plain one fails, and its verdict."""
    rng = random.Random(program.spec.seed)
    for _ in range(tries):
        try:
            return program, verdict(program)
        except FailedError as failed:
            index = _statement_at(program.body, failed.line)
            earlier = [i for i, s in enumerate(program.body[:index]) if re.search(r"_\(|\] =|[-+*/]= ", str(s))]
            drop = rng.choice(earlier) if earlier and ".backward(" in str(program.body[index]) else index
            program = Program(program.spec, [s for i, s in enumerate(program.body) if i != drop])
        except UnstableError:
            return program, ("unstable", "")
    return program, ("unstable", "")


def _statement_at(body, line):
    at = 0
    for i, s in enumerate(body):
        at += len(list(lines_of([s])))
        if line <= at:
            return i
    return len(body) - 1


# Shrinking ------------------------------------------------------------------------------------------------------------


def kind_of(verdict):
    if verdict is None or verdict[0].startswith(SAYS_NOTHING):
        return None
    if verdict[0] not in ("wrong",):
        return verdict[0], re.sub(r"\d+|line|'[^']*'|\([^)]*\)", "", verdict[1])[:90]
    return verdict[0], re.sub(r"\d+", "", verdict[1].split(":")[0]).split(" ")[0]


def shrunk(program, verdict):
    """Return a small program that fails alike."""
    wanted = kind_of(verdict)

    def fails(p):
        try:
            got = check(p)
        except (FailedError, UnstableError, SyntaxError):
            return None
        if got is None:
            return None
        same = got[0] == wanted[0] and (got[0] == "wrong" or kind_of(got) == wanted)
        return got if same else None

    for key, plain in asdict(Spec()).items():
        if key != "seed" and getattr(program.spec, key) != plain:
            p = Program(replace(program.spec, **{key: plain}), program.body)
            verdict_now = fails(p)
            if verdict_now:
                program, verdict = p, verdict_now
    changed = True
    while changed:
        changed = False
        for candidate in _smaller(program.body):
            p = Program(program.spec, candidate)
            verdict_now = fails(p)
            if verdict_now:
                program, verdict, changed = p, verdict_now, True
                break
    return program, verdict


def _smaller(body):
    for i in reversed(range(len(body))):
        yield body[:i] + body[i + 1 :]
    for i, s in enumerate(body):
        if not isinstance(s, str):
            yield body[:i] + list(s[1]) + body[i + 1 :]
            for inner in _smaller(s[1]):
                yield [*body[:i], (s[0], inner), *body[i + 1 :]]
        elif "\n    " in s and s.startswith("with "):
            rest = s.split("\n", 1)[1]
            yield [*body[:i], "\n".join(line[4:] for line in rest.split("\n")), *body[i + 1 :]]
        elif "\n" in s:
            yield [*body[:i], *s.split("\n"), *body[i + 1 :]]
        elif re.match(r"loss = .+ \+ .+$", s):
            terms = s[len("loss = ") :].split(" + ")
            for j in range(len(terms)):
                yield [*body[:i], "loss = " + " + ".join(terms[:j] + terms[j + 1 :]), *body[i + 1 :]]
        elif m := re.match(r"\((.+ \+ .+)\)( . [\d.]+)?\.backward\(\)$", s):
            yield [*body[:i], f"loss = {m[1]}", "loss.backward()", *body[i + 1 :]]
        elif m := re.match(r"(\w+) = ([a-z]\d+)$", s):
            rename = lambda t, m=m: re.sub(rf"\b{m[1]}\b", m[2], t)  # noqa: E731
            yield [*body[:i], *_mapped(rename, body[i + 1 :])]
        elif m := re.match(r"(\w+) = (\w+)(\.\w+)?[\[(].*[\])]$", s):
            yield [*body[:i], f"{m[1]} = {m[2]}", *body[i + 1 :]]


def _mapped(change, body):
    return [change(s) if isinstance(s, str) else (s[0], _mapped(change, s[1])) for s in body]
