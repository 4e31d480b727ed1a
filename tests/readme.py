"""README's fences, each list of them under the name of its paragraph; ``test_readme.py`` says which test runs which."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
FENCE = re.compile(r"\s*(```|~~~)")
NAME = re.compile(r"#+ (.+)|\*\*(.+?)\*\*")  # a heading, or the bold words that a paragraph begins with


def fences(text):
    """name of the paragraph -> the code of its fences, in order."""
    found, name, code, before = {}, "", None, ""
    for line in text.splitlines():
        if FENCE.match(line):
            code = [] if code is None else None
            if code is not None:
                found.setdefault(name, []).append(code)
        elif code is not None:
            code.append(line)
        elif not before.strip() and (match := NAME.match(line)):
            name = (match[1] or match[2]).rstrip(".")
        before = line
    return {name: ["\n".join(code) + "\n" for code in codes] for name, codes in found.items()}


def run(code, names):
    """As printed, among the names that the text around it speaks of; it leaves there what it makes."""
    exec(compile(code, str(README), "exec"), names)
