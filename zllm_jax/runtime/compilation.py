"""Compilations: kept on disk between processes, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"


def keep_compilations(folder: Path) -> None:
    """Use `folder` as jax's persistent compilation cache (unless the user has set one)."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@dataclass
class Count:
    """How many programs were compiled (or fetched from the persistent cache) since counting began."""

    programs: int = 0


@contextmanager
def count_compilations() -> Iterator[Count]:
    """Counts every program that jax compiles inside the block."""
    count = Count()

    def listen(event: str, duration_s: float, **_: object) -> None:
        if event == _COMPILED:
            count.programs += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
