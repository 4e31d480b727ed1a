"""Code fences of README and of docs; ``test_readme.py`` and ``test_docs.py`` run them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
FENCE = re.compile(r"\s*(```|~~~)")
NAME = re.compile(r"#+ (.+)|\*\*(.+?)\*\*")  # a heading, or the bold words that a paragraph begins with


def parsed(text):
    """Yield (heading or bold first words of a paragraph, language, code) of each fence of a page, in order."""
    name, code, before = "", None, ""
    for line in text.splitlines():
        if FENCE.match(line):
            if code is None:
                code, language = [], line.strip().strip("`~")
            else:
                yield name, language, "\n".join(code) + "\n"
                code = None
        elif code is not None:
            code.append(line)
        elif not before.strip() and (match := NAME.match(line)):
            name = (match[1] or match[2]).rstrip(".")
        before = line


def fences(text):
    """Return heading or bold first words of a paragraph -> code of its fences, in order."""
    found = {}
    for name, _, code in parsed(text):
        found.setdefault(name, []).append(code)
    return found


def run(code, names):
    """Run code as printed, with the given names as globals; the names that it defines remain there."""
    exec(compile(code, str(README), "exec"), names)


def blocks(text):
    """Return (language, code) of each fence of a page, in order."""
    return [(language, code) for _, language, code in parsed(text)]


def python(text):
    """Return the Python fences of a page, in order."""
    return [code for language, code in blocks(text) if language == "python"]
