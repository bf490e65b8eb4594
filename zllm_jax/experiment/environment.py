"""Where a measurement was taken: enough to know what its figures may be compared with."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from zllm_jax import __version__


def describe_environment() -> dict[str, Any]:
    """Versions, devices, processor and date. Touches jax, so call it once an engine is open."""
    import jax

    return {
        "zllm": __version__,
        "commit": _commit(),
        "jax": importlib.metadata.version("jax"),
        "devices": [f"{device.platform}:{device.device_kind}" for device in jax.devices()],
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout this package runs from, `-dirty` when tracked files differ; None if installed."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
