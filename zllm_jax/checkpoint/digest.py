"""sha256 of weight files, remembered under ZLLM_HOME so that a second start need not read them again."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from zllm_jax.config import zllm_home


def digest_files(paths: list[Path]) -> str:
    """sha256 (hex) of one file, or of the lines `<sha256>  <name>` of several in the order of their names."""
    if len(paths) == 1:
        return digest_file(paths[0])
    ordered = sorted(paths, key=lambda path: (path.name, str(path)))
    lines = "".join(f"{digest_file(path)}  {path.name}\n" for path in ordered)
    return hashlib.sha256(lines.encode()).hexdigest()


def digest_file(path: Path) -> str:
    """sha256 (hex) of one file; computed again only when its size or modification time changed."""
    path = path.resolve()
    stat = path.stat()
    seen = {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    sidecar = zllm_home() / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    if known := _recall(sidecar, seen):
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _remember(sidecar, seen | {"sha256": digest})
    return digest


def _recall(sidecar: Path, seen: dict[str, object]) -> str | None:
    try:
        known = json.loads(sidecar.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(known, dict):
        return None
    digest = known.pop("sha256", None)
    return digest if known == seen and isinstance(digest, str) else None


def _remember(sidecar: Path, content: dict[str, object]) -> None:
    """Write atomically, or not at all: on a read-only disk the digest is merely computed again next time."""
    with suppress(OSError):
        sidecar.parent.mkdir(parents=True, exist_ok=True)
        partial = sidecar.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(content))
        partial.replace(sidecar)
