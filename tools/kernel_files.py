"""The files with Triton kernels, their kernels, and which file imports which."""

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "dllm_kernels" / "backends" / "triton"
#: Stem of a file with code for a GPU -> its source.
SOURCES = {path.stem: text for path in sorted(FOLDER.glob("*.py")) if "@triton.jit" in (text := path.read_text())}


def launched_in(stem: str) -> set[str]:
    """Return the names of the kernels that a file launches, which precede ``[grid](...)``."""
    return set(re.findall(r"(\w+)\[(?:grid|programs|\(.*\))\]\(", SOURCES[stem]))


def every_kernel() -> set[str]:
    """Return the names of all kernels of the package."""
    return set().union(*map(launched_in, SOURCES))


def files_with(stem: str) -> list[str]:
    """Return this file and the files that import it, directly or not."""
    found = [stem]
    for used in found:
        imports = re.compile(rf"^from dllm_kernels\.backends\.triton(\.{used} import| import .*\b{used}\b)", re.M)
        found += [other for other, source in SOURCES.items() if other not in found and imports.search(source)]
    return found
