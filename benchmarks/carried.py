"""What a run on a GPU brings along: the peers' wheels, and what ``python -m benchmarks prepare`` made without a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import said, version, write_whole

MODEL, KERNELS, RECORD = "model.json", "triton.tar.gz", "prepared.json"  # files of a prepared folder


def joined(folders: Sequence[Path], scratch: Path) -> list[Path]:
    """Return the wheels in the folders; files ``WHEEL.part-*`` are joined, in the order of their names."""
    parts: dict[str, list[Path]] = {}
    for part in sorted((p for folder in folders for p in folder.glob("*.whl.part-*")), key=lambda path: path.name):
        parts.setdefault(part.name.rpartition(".part-")[0], []).append(part)
    for name, found in parts.items():
        with Path(scratch, name).open("wb") as whole:
            for part in found:
                whole.write(part.read_bytes())
    return sorted([*(w for folder in folders for w in folder.glob("*.whl")), *(Path(scratch, name) for name in parts)])


def _rejects(wheels: Sequence[Path], into: Path) -> bool:
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade")
    done = subprocess.run([*pip, "--target", str(into), *map(str, wheels)], capture_output=True, check=False)
    return bool(done.returncode)


def install(wheels: Sequence[Path], into: Path) -> list[Path]:
    """Install the wheels into a folder; return those that pip rejects.

    One call of pip installs all of them. If it rejects one, each is installed separately. A wheel without its last part
    is not offered to pip.
    """
    whole = [wheel for wheel in wheels if zipfile.is_zipfile(wheel)]
    rejected = [wheel for wheel in wheels if wheel not in whole]
    if whole and _rejects(whole, into):
        rejected += [wheel for wheel in whole if _rejects([wheel], into)]
    return rejected


class Wheels:
    """Wheels that are installed beside this environment, in the background."""

    def __init__(self, folders: Sequence[Path], scratch: Path) -> None:
        self._into, self._rejected = scratch / "peers", list[Path]()
        self._thread = threading.Thread(target=self._install, args=(folders, scratch), daemon=True) if folders else None
        if self._thread is not None:
            self._thread.start()

    def _install(self, folders: Sequence[Path], scratch: Path) -> None:
        self._rejected = install(joined(folders, scratch), self._into)

    @property
    def installing(self) -> bool:
        """True until the installation ends."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> dict[str, str]:
        """Wait for the installation; return the environment variables that make the wheels importable."""
        if self._thread is None:
            return {}
        self._thread.join()
        for wheel in self._rejected:
            print(f"pip rejects {wheel.name}: measured without it", flush=True)
        self._rejected = []
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(self._into), os.environ.get("PYTHONPATH", "")]))}


def use_prepared(folder: Path, work: Path) -> str:
    """Copy the predictions to ``work`` and the compiled kernels to Triton's cache; return a line that says so."""
    prepared = json.loads((folder / RECORD).read_text())
    if prepared["triton"] != version("triton"):
        return f"not used: {folder}, prepared with Triton {prepared['triton']}, here is {version('triton')}"
    shutil.copy(folder / MODEL, work)
    try:
        count = _extract(folder / KERNELS)
    except (OSError, tarfile.TarError) as error:  # a cache that cannot be written to must not prevent the run
        return f"prepared: predictions alone, {said(error)}"
    return f"prepared: predictions, and {count} kernels for {prepared['target']}"


def _extract(kernels: Path) -> int:
    """Extract kernels into Triton's cache; return their number."""
    from triton import knobs

    cache = Path(knobs.cache.dir)
    with tarfile.open(kernels) as archive:
        archive.extractall(cache, filter="data")
        groups = [cache / name for name in archive.getnames() if Path(name).name.startswith("__grp__")]
    for group in groups:  # these list the files of a kernel with their folder
        names = json.loads(group.read_text())["child_paths"]
        write_whole(group, json.dumps({"child_paths": {name: str(group.parent / name) for name in names}}))
    return len(groups)
