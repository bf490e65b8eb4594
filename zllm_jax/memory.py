"""Host memory that the C library keeps after it was freed."""

from __future__ import annotations

import ctypes
import sys


def trim() -> None:
    """Give freed memory back to the operating system: after loading and compiling it is some 100 MB (glibc only)."""
    if not sys.platform.startswith("linux"):
        return
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
