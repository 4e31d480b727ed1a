"""Converts docstrings with reStructuredText roles and ``.. math::``, as editors show them, to Markdown for the site."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

#: Page of the API reference -> the module whose ``__all__`` it shows.
PAGES = {
    "losses": "dllm_kernels.losses",
    "ops": "dllm_kernels.ops",
    "corruption": "dllm_kernels.corruption",
    "collate": "dllm_kernels.collate",
    "mtp": "dllm_kernels.mtp",
    "policy": "dllm_kernels.policy",
    "generate": "dllm_kernels.generate",
    "fused": "dllm_kernels.fused",
    "distributed": "dllm_kernels.distributed",
    "nemo_automodel": "dllm_kernels.integrations.nemo_automodel",
    "speculators": "dllm_kernels.integrations.speculators",
    "transformers": "dllm_kernels.integrations.transformers",
    "trl": "dllm_kernels.integrations.trl",
    "names": "dllm_kernels.integrations.names",
}
ROLE = re.compile(r":(?:py:)?(?:class|func|meth|mod|data|attr):`~?([^`]+)`")
INLINE_MATH = re.compile(r":math:`([^`]+)`")
MATH_BLOCK = re.compile(r"^( *)\.\. math::[ ]*(.*(?:\n(?:\1 +.*|[ ]*(?=\n\1 +\S)))*)", re.MULTILINE)
RULE = re.compile(r"^( *)=+(?: +=+)+ *$")
LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)


def public(module: str) -> dict[str, Any]:
    """Return the public names of a module with their objects; aliases with a leading underscore are omitted."""
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [
        name for name, value in vars(loaded).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module
    ]  # fmt: skip
    return {name: getattr(loaded, name) for name in names if not name.startswith("_")}


def place(value: Any) -> str:
    """Return the place where a class or function is defined, which is its anchor in the API reference."""
    return f"{value.__module__}.{value.__qualname__}"


def documented(module: str) -> dict[str, str]:
    """Return the public classes and functions of a module with their places."""
    names = public(module).items()
    return {name: place(value) for name, value in names if inspect.isclass(value) or inspect.isfunction(value)}


#: Public name -> its place. If several integrations have the name, the place in the first one.
PUBLIC: dict[str, str] = {}
for _module in PAGES.values():
    PUBLIC = documented(_module) | PUBLIC
PLACES = {where for module in PAGES.values() for where in documented(module).values()}
SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)", re.MULTILINE)
LINK = re.compile(r"\]\[(\w+)\]")


def linked(text: str) -> str:
    """Point the links to public names of a page, ``[...][name]``, to the API reference."""
    return LINK.sub(lambda match: f"][{PUBLIC.get(match[1], match[1])}]", text)


def one_by_one(text: str) -> str:
    """Split arguments that share a description, ``a, b: ...``, because the pages list each argument separately."""
    before, head, after = text.partition("Args:\n")
    arguments, blank, rest = after.partition("\n\n")
    arguments = SEVERAL.sub(lambda m: "\n".join(f"{m[1]}{name}: {m[3]}" for name in m[2].split(", ")), arguments)
    return before + head + arguments + blank + rest


def markdown(text: str, module: str = "") -> str:
    """Convert a docstring to Markdown; references are looked up in its own module first."""

    def reference(match: re.Match[str]) -> str:
        name = match[1].rpartition(".")[2] if match[1].startswith("dllm_kernels.") else match[1]
        own = f"{module}.{name}"
        target = own if own in PLACES else PUBLIC.get(name)
        return f"[`{name}`][{target}]" if target else f"`{name}`"

    def block(match: re.Match[str]) -> str:
        inner = " ".join(line.strip() for line in match[2].splitlines())
        return f"{match[1]}$$\n{match[1]}{inner.strip()}\n{match[1]}$$\n"

    text = MATH_BLOCK.sub(block, tables(one_by_one(text)))
    text = INLINE_MATH.sub(r"$\1$", text)
    return LITERAL_BLOCK.sub(":", ROLE.sub(reference, text))


def tables(text: str) -> str:
    """Convert simple tables of reStructuredText, in which each line is a row, to Markdown."""
    found, lines = [], text.splitlines()
    while lines:
        line = lines.pop(0)
        if not (rule := RULE.match(line)):
            found.append(line)
            continue
        starts = [match.start() for match in re.finditer("=+", line)]
        spans = list(zip(starts, [*starts[1:], None], strict=True))
        rows, rules = [], 1
        while rules < 3 and lines and (RULE.match(lines[0]) or lines[0].strip()):
            row = lines.pop(0)
            if RULE.match(row):
                rules += 1
                headed = rules == 2 and bool(lines) and bool(lines[0].strip())
                if not headed:
                    break
            else:
                cells = [row[start:end].strip().replace("|", "\\|") for start, end in spans]
                if cells[0] or not rows:
                    rows.append(cells)
                else:  # continuation of the previous row
                    rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], cells, strict=True)]
        head = rows.pop(0) if rules > 2 or headed else [""] * len(spans)
        made = [head, ["---"] * len(spans), *rows]
        found += ["", *(f"{rule[1]}| {' | '.join(row)} |" for row in made), ""]
    return "\n".join(found)


class Docstrings(griffe.Extension):
    """Rewrites each docstring once, after its object was read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe of every module, class, function and attribute."""
        if obj.name == "__init__":
            obj.docstring = None  # it refers readers of ``help()`` to the class, whose page this is
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, obj.module.path if not obj.is_module else obj.path)
