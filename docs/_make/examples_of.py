"""The pages of the examples: source and recorded output. ``python docs/_make/examples_of.py`` records the outputs.

Outputs are recorded, not computed with the site, because the examples take minutes and need frameworks.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OUTPUTS = Path(__file__).parent / "outputs"
#: Examples that several processes run.
RANKS = {"fsdp2_tensor_parallel": 4}


def names() -> list[str]:
    """Return the names of all examples."""
    return sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "__init__")


def command(name: str) -> list[str]:
    """Return the arguments of Python that run an example."""
    if name in RANKS:
        return ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS[name]), f"examples/{name}.py"]
    return ["-m", f"examples.{name}"] if name == "tour" else [f"examples/{name}.py"]


def shown(name: str) -> str:
    """Return the command as a reader types it."""
    words = command(name)
    return "torchrun " + " ".join(words[2:]) if name in RANKS else "python " + " ".join(words)


def pages() -> Iterator[tuple[str, str]]:
    """Return (name, Markdown) of the page of each example."""
    for name in names():
        source = (EXAMPLES / f"{name}.py").read_text()
        first = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0].split(": python ")[0].rstrip(".")
        lines = ["---", "hide: [toc]", "---", "", f"# {name}", "", f"{first}.", "", "```sh", shown(name), "```", ""]
        if (output := OUTPUTS / f"{name}.txt").exists():
            lines += ['<div class="output" markdown>', "```text", output.read_text().rstrip(), "```", "</div>", ""]
        lines += [f"`examples/{name}.py`:", "", '<div class="source" markdown>', "```python", source.rstrip(), "```"]
        yield name, "\n".join([*lines, "</div>", ""])


def main() -> None:
    """Run the examples, or those named, and record what they print."""
    OUTPUTS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or names():
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
        done = subprocess.run(
            [sys.executable, *command(name)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"{name} failed:\n{done.stderr[-2000:]}", flush=True)
            continue
        (OUTPUTS / f"{name}.txt").write_text(done.stdout.strip("\n") + "\n", encoding="utf-8")
        print(f"{name}: {len(done.stdout.splitlines())} lines", flush=True)


if __name__ == "__main__":
    main()
