"""Habits that a reader relies on: short files, rooms that introduce themselves, nothing of one machine in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

MAX_LINES = 600
SOURCES = ("zllm_jax", "pallas_kernels", "tests", "scripts", "notebooks")

# Folders that are somebody's: what stands there is on no other machine.
MACHINE_PATH = re.compile(r"(?<![\w.:/~$}])/(?:home|root|Users|work|mnt|farm)/\w")
ADDRESS = re.compile(r"\w+://")


def tracked(repo: Path) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repo,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    return [path for name in listing.stdout.split("\0") if name and (path := repo / name).is_file()]


def python_files(repo: Path) -> list[Path]:
    return [path for folder in SOURCES for path in sorted((repo / folder).rglob("*.py"))]


def test_no_file_has_outgrown_one_subject(repo: Path) -> None:
    lengths = {str(path.relative_to(repo)): len(path.read_text("utf-8").splitlines()) for path in python_files(repo)}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


def test_every_room_says_what_it_knows(repo: Path) -> None:
    inits = [path for path in python_files(repo) if path.name == "__init__.py" and "tests" not in path.parts]
    silent = [
        str(path.relative_to(repo)) for path in inits if not ast.get_docstring(ast.parse(path.read_text("utf-8")))
    ]
    assert not silent


def test_a_room_only_re_exports(repo: Path) -> None:
    """A package's `__init__.py` holds imports, `__all__` and a docstring; the root's lazy door is the one exception."""
    allowed = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign)
    busy = {}
    for path in python_files(repo):
        name = str(path.relative_to(repo))
        if path.name != "__init__.py" or name == "zllm_jax/__init__.py" or name.startswith("tests/"):
            continue
        body = ast.parse(path.read_text("utf-8")).body
        if lines := [node.lineno for node in body if not isinstance(node, allowed)]:
            busy[name] = lines
    assert not busy


def test_nothing_names_one_machine(repo: Path) -> None:
    found = {}
    for path in tracked(repo):
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if lines := [n for n, line in enumerate(text.splitlines(), 1) if MACHINE_PATH.search(line)]:
            found[str(path.relative_to(repo))] = lines[:5]
    assert not found


@pytest.mark.parametrize("line", ["/{}/me/x", "'/{}/x'", "see /{}/x", "path=/{}/x"])
def test_a_path_of_one_machine_is_seen(line: str) -> None:
    assert MACHINE_PATH.search(line.format("home"))


def test_the_lock_pins_with_hashes_and_names_no_host(repo: Path) -> None:
    lock = (repo / "requirements" / "locked.txt").read_text("utf-8")
    assert not ADDRESS.search(lock)
    entries = re.split(r"\n(?=\S)", lock.strip())
    unpinned = [
        entry.splitlines()[0] for entry in entries if not re.match(r"[\w.-]+==\S+.*--hash=sha256:", entry, re.S)
    ]
    assert not unpinned
