"""Reading a JSON body within bounds: bytes, nesting, seconds."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from zllm_jax.errors import InvalidRequest


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may send. json_depth: how deep lists and objects nest; body_timeout_s: for the whole body."""

    body_bytes: int = 16 << 20
    json_depth: int = 64
    body_timeout_s: float = 30.0


async def read_json(request: HttpRequest, limits: Limits) -> Any:
    """The decoded body. Raises `HTTPException` 413 or 408 for its size or slowness, `InvalidRequest` for its form."""
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            raw = await _read(request, limits.body_bytes)
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {limits.body_timeout_s:g} s") from None
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep(limits) from None
    except ValueError as error:  # of JSON, of UTF-8, or of a number with thousands of digits
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    _check(value, limits)
    return value


async def _read(request: HttpRequest, max_bytes: int) -> bytes:
    too_large = HTTPException(413, f"the body is larger than {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    chunks = bytearray()
    async for chunk in request.stream():
        chunks += chunk
        if len(chunks) > max_bytes:
            raise too_large
    return bytes(chunks)


def _check(value: Any, limits: Limits) -> None:
    """Bound the nesting, and refuse texts with half a surrogate pair: they are no Unicode and cannot be encoded."""
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        nests = False
        for item in level:
            if isinstance(item, dict):
                nests = True
                below.extend(item.keys())
                below.extend(item.values())
            elif isinstance(item, list):
                nests = True
                below.extend(item)
            elif isinstance(item, str) and not item.isascii() and _has_surrogate(item):
                raise InvalidRequest("the body holds a text with an unpaired surrogate (\\ud800 to \\udfff)")
        depth += nests
        if depth > limits.json_depth:
            raise _too_deep(limits)
        level = below


def _has_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _too_deep(limits: Limits) -> InvalidRequest:
    return InvalidRequest(f"the body nests deeper than {limits.json_depth} lists and objects")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
