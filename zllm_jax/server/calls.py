"""A call through the engine, whole or piece by piece: what the endpoints of all protocols share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from uuid import uuid4

from starlette.requests import Request as HttpRequest

from zllm_jax.errors import BudgetExceeded, UnknownModel
from zllm_jax.protocol.call import Call
from zllm_jax.server.auth import tenant_of
from zllm_jax.server.body import Limits, read_json
from zllm_jax.server.engine import Engine
from zllm_jax.values import Delta, Envelope

DEFAULT_MAX_TOKENS = 1024
C = TypeVar("C", bound=Call)


def new_id() -> str:
    return uuid4().hex


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What an endpoint is given. clock: Unix seconds. new_id: a unique text, which objects and requests carry.

    default_max_tokens: for calls that set no limit, or less where the context leaves less.
    """

    engine: Engine
    limits: Limits = field(default_factory=Limits)
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    clock: Callable[[], float]
    new_id: Callable[[], str] = new_id

    async def read(self, request: HttpRequest) -> Any:
        """The decoded body. Raises what `read_json` does."""
        return await read_json(request, self.limits)

    def check_model(self, name: str) -> None:
        """Raises `UnknownModel` for a name that is not served."""
        if name != self.engine.model_name:
            raise UnknownModel(f"model {name!r} is not served here; {self.engine.model_name!r} is")

    def owned(self, request: HttpRequest, call: C) -> C:
        """The call as its client's own: what is cached of it is shared with no other tenant."""
        return replace(call, request=replace(call.request, tenant=tenant_of(request.scope)))

    async def open(self, call: Call) -> tuple[Delta, AsyncGenerator[Delta, None]]:
        """Start a call: its first delta, and the stream of the others, which the caller must close."""
        _, first, rest = await self.fit(call)
        return first, rest

    async def fit(self, call: C) -> tuple[C, Delta, AsyncGenerator[Delta, None]]:
        """`open`, and the call as it runs: with the `max_tokens` that fit."""
        try:
            return call, *await self._start(call)
        except BudgetExceeded as error:
            left = error.budget_tokens - error.prompt_tokens
            if call.limited or left < 1:
                raise
            fitting = replace(call, request=replace(call.request, max_tokens=left))
            return fitting, *await self._start(fitting)

    async def whole(self, call: Call) -> Envelope:
        """Run a call to its end."""
        last, rest = await self.open(call)
        async with aclosing(rest):
            async for delta in rest:
                last = delta
        return ended(last)

    async def _start(self, call: Call) -> tuple[Delta, AsyncGenerator[Delta, None]]:
        stream = self.engine.stream(call.request)
        try:
            return await anext(stream), stream
        except BaseException:
            await stream.aclose()
            raise


def ended(last: Delta) -> Envelope:
    """The envelope of a stream's last delta."""
    assert last.envelope is not None, "the last delta of a stream carries the envelope"
    return last.envelope
