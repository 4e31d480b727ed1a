"""Hooks that add generated files to the site (pictures, API pages, examples, changelog) and render without scripts.

Equations become MathML. Pictures become part of the page, so that they take the colours of its theme.
"""

from __future__ import annotations

import html
import inspect
import logging
import os
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
import examples_of  # noqa: E402
import figures  # noqa: E402
import pictures  # noqa: E402

log = logging.getLogger("mkdocs.hooks.docs")
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\(?:\(|\[)(.*?)\\(?:\)|\])</\1>', re.DOTALL)
SUM = re.compile(r"<msub>(<mo>&#x0(?:2211|220F);</mo>(?:(?!</?msub>).)*)</msub>")
PICTURE = re.compile(r'<img alt="([^"]*)" src="(?:\.\./)*(?:pictures/)?([\w-]+\.svg)"\s*/?>')
#: Code points of the font of the equations.
FONT = {
    point
    for first, last in re.findall(r"U\+(\w+)(?:-(\w+))?", (HERE.parent / "extra.css").read_text())
    for point in range(int(first, 16), int(last or first, 16) + 1)
}
HYPHENS = re.compile(r"<code>([^<]*-[^<]*)</code>(?!</pre>)")
#: File name -> SVG of each picture; filled when the files are collected.
SVG: dict[str, str] = {}
CLONE = "a clone of the repository"
LOADED = re.compile(r'<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)="((?:https?:)?//[^"]*)"[^>]*>')


def on_config(config: Any) -> Any:
    """Take the address of the repository from GitHub's runners, as the metadata of the package does."""
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if server and repository:
        config.repo_url = f"{server}/{repository}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated files."""
    SVG.update({path.name: path.read_text() for path in HERE.parent.glob("*.svg")})
    for name, content in (*pictures.all_of_them(), *figures.all_of_them()):
        SVG[name] = content
        files.append(File.generated(config, f"pictures/{name}", content=content))
    for page, module in docstrings.PAGES.items():
        files.append(File.generated(config, f"api/{page}.md", content=api_page(page, module)))
    for name, content in examples_of.pages():
        files.append(File.generated(config, f"examples/{name}.md", content=content))
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


def on_page_markdown(markdown: str, config: Any, **kwargs: Any) -> str:
    """Point links to public names to the API reference, and name the address of the repository, if it is known."""
    if config.repo_url:
        markdown = markdown.replace(CLONE, f"{CLONE} (`git clone {config.repo_url}`)")
    return docstrings.linked(markdown)


def on_page_content(content: str, page: Any, **kwargs: Any) -> str:
    """Render equations as MathML, which browsers support without scripts, and put pictures into the page."""

    def mathml(match: re.Match[str]) -> str:
        block = match[1] == "div"
        try:
            made = convert(html.unescape(match[2]).strip(), display="block" if block else "inline")
        except Exception as error:
            log.warning("%s: no equation: %s (%s)", page.file.src_uri, match[2], error)
            return match[0]
        text = html.unescape(re.sub(r"<[^>]*>|\s", "", made))
        if missing := {character for character in text if ord(character) not in FONT}:
            log.warning("%s: not in fonts/math.woff2: %s", page.file.src_uri, " ".join(sorted(missing)))
        if block:  # limits below a sum, also in parentheses
            made = SUM.sub(r"<munder>\1</munder>", made)
        return f'<div class="equation">{made}</div>' if block else made

    def picture(match: re.Match[str]) -> str:
        svg = SVG[match[2]].replace("<svg ", f'<svg aria-label="{match[1]}" ', 1)
        return f'<span class="drawn">{svg}</span>'

    return HYPHENS.sub(unbroken, PICTURE.sub(picture, EQUATION.sub(mathml, content)))


def unbroken(match: re.Match[str]) -> str:
    """Mark the words of inline code with hyphens, at which a browser would break a name such as ``GSAI-ML``."""
    words = (f'<span class="word">{word}</span>' if "-" in word else word for word in match[1].split(" "))
    return f"<code>{' '.join(words)}</code>"


def on_post_build(config: Any) -> None:
    """Raise an error if a page loads a resource from another site."""
    for path in Path(config["site_dir"]).rglob("*.html"):
        found = [m for m in LOADED.finditer(path.read_text()) if 'rel="canonical"' not in m[0]]
        if found:
            raise PluginError(f"{path} loads {found[0][1]}")
