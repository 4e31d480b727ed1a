"""Hooks that add generated files to the site (pictures, API pages, changelog) and render equations without scripts."""

from __future__ import annotations

import html
import inspect
import logging
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import docstrings  # noqa: E402
import pictures  # noqa: E402

log = logging.getLogger("mkdocs.hooks.docs")
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\(?:\(|\[)(.*?)\\(?:\)|\])</\1>', re.DOTALL)
SUM = re.compile(r"<msub>(<mo>&#x0(?:2211|220F);</mo>(?:(?!</?msub>).)*)</msub>")
LOADED = re.compile(r'<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)="((?:https?:)?//[^"]*)"[^>]*>')


def on_files(files: Any, config: Any) -> Any:
    """Add the generated files."""
    for name, content in pictures.all_of_them():
        files.append(File.generated(config, f"pictures/{name}", content=content))
    for page, module in docstrings.PAGES.items():
        files.append(File.generated(config, f"api/{page}.md", content=api_page(page, module)))
    changelog = (HERE.parents[1] / "CHANGELOG.md").read_text()
    files.append(File.generated(config, "changelog.md", content=changelog))
    return files


def api_page(page: str, module: str) -> str:
    """Return the API page of a module; a public name without a docstring is an error."""
    lines = [f"# `{module}`\n"]
    for name, where in docstrings.documented(module).items():
        value = docstrings.public(module)[name]
        if not inspect.getdoc(value):
            log.warning("%s.%s has no docstring", module, name)
        options = ["      heading: " + name]
        if inspect.isclass(value) and any(hasattr(value, method) for method in ("forward", "forward_fused")):
            options.append("      inherited_members: [forward, forward_fused]")
        lines.append("\n".join([f"::: {where}", "    options:", *options, ""]))
    return "\n".join(lines)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Point links to public names to the API reference."""
    return docstrings.linked(markdown)


def on_page_content(content: str, page: Any, **kwargs: Any) -> str:
    """Render equations as MathML, which browsers support without scripts."""

    def mathml(match: re.Match[str]) -> str:
        block = match[1] == "div"
        try:
            made = convert(html.unescape(match[2]).strip(), display="block" if block else "inline")
        except Exception as error:
            log.warning("%s: no equation: %s (%s)", page.file.src_uri, match[2], error)
            return match[0]
        if block:  # limits below a sum, also in parentheses
            made = SUM.sub(r"<munder>\1</munder>", made)
        return f'<div class="equation">{made}</div>' if block else made

    return EQUATION.sub(mathml, content)


def on_post_build(config: Any) -> None:
    """Raise an error if a page loads a resource from another site."""
    for path in Path(config["site_dir"]).rglob("*.html"):
        found = [m for m in LOADED.finditer(path.read_text()) if 'rel="canonical"' not in m[0]]
        if found:
            raise PluginError(f"{path} loads {found[0][1]}")
