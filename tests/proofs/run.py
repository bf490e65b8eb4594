"""Does a test notice a fault? Plant the fault in a copy of the sources, and see the test fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("zllm_jax", "pallas_kernels", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """In `file`, `old` (which stands there once) becomes `new`."""

    file: str
    old: str
    new: str

    def plant(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text("utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} holds {self.old!r} {text.count(self.old)} times, must be once")
        path.write_text(text.replace(self.old, self.new), "utf-8")


@dataclass(frozen=True)
class Proof:
    """What is promised, the test that proves it, and a fault that this test finds."""

    number: int
    promise: str
    test: str
    mutant: Mutant
    fault: str


def run_with_mutant(repo: Path, root: Path, proof: Proof) -> subprocess.CompletedProcess[str]:
    """The test on a copy of the sources with the fault planted."""
    for name in SOURCES:
        source = repo / name
        if source.is_dir():
            shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, root / name)
    proof.mutant.plant(root)
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", proof.test]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
