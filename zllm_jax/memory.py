"""Host memory as the C library sees it (glibc; elsewhere nothing happens and nothing is known)."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_COUNTS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _COUNTS]


def trim() -> None:
    """Give freed memory back to the operating system: after loading and compiling it is some 100 MB."""
    release = _glibc("malloc_trim")
    if release is not None:
        release(0)


def allocated_bytes() -> int:
    """What was allocated and not freed, but for Python's small objects; 0 where it is not known."""
    info = _glibc("mallinfo2")
    if info is None:
        return 0
    info.restype = _Mallinfo2
    found = info()
    return int(found.uordblks + found.hblkhd)


def _glibc(name: str) -> Any | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
