"""`POST /v1/messages`, one call through the engine, whole or as events; `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TypeVar

from starlette.datastructures import MutableHeaders
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zllm_jax.protocol import anthropic_errors, anthropic_messages
from zllm_jax.protocol.anthropic_messages import MessagesCall
from zllm_jax.protocol.anthropic_messages_reply import PING, Reply, message
from zllm_jax.server.calls import Calls, ended
from zllm_jax.server.disconnect import until_disconnect
from zllm_jax.server.errors import failed_response, json_response
from zllm_jax.server.sse import EventStream, named_event
from zllm_jax.values import Delta

log = logging.getLogger(__name__)
T = TypeVar("T")

PING_S = 10.0  # how long a stream may be silent: proxies and clients give up on silent connections


class Messages:
    """The endpoints."""

    def __init__(self, calls: Calls, *, ping_s: float = PING_S) -> None:
        self.calls, self.ping_s = calls, ping_s

    async def respond(self, request: HttpRequest) -> Response:
        body = await self.calls.read(request)
        message_id = f"msg_{self.calls.new_id()}"
        call = anthropic_messages.parse_request(body, request_id=message_id)
        self.calls.check_model(call.model)
        running, reply = _Running(self.calls, self.calls.owned(request, call)), Reply(call, message_id)
        if not call.stream:
            return await until_disconnect(request.receive, _whole(running, reply))
        # Headers are sent with the first delta: what fails until then is an HTTP error, not an event. A prompt that
        # takes longer than a connection may be silent is waited for with pings, and then failures are events.
        deltas = _paced(running.deltas(), self.ping_s)
        first = await until_disconnect(request.receive, _next(deltas))
        if first and first.envelope and (failed := failed_response(first.envelope, anthropic_errors.failure)):
            await deltas.aclose()
            return failed
        return EventStream(_events(reply, first, deltas), running.headers())

    async def count(self, request: HttpRequest) -> Response:
        call = anthropic_messages.parse_prompt(await self.calls.read(request))
        self.calls.check_model(call.model)
        call = self.calls.owned(request, call)
        tokens = await asyncio.to_thread(self.calls.engine.count_tokens, call.request)
        return json_response(anthropic_messages.count_object(tokens))


class _Running:
    """A call, and what there is to say of it once its first delta is there."""

    def __init__(self, calls: Calls, asked: MessagesCall) -> None:
        self._calls, self._asked, self._call = calls, asked, asked

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        self._call, first, rest = await self._calls.fit(self._asked)
        async with aclosing(rest):
            yield first
            async for delta in rest:
                yield delta

    def headers(self) -> Mapping[str, str]:
        """`zllm-max-tokens`: how many tokens the answer may have, where that is fewer than were asked for."""
        limit = self._call.request.max_tokens
        return {} if limit == self._asked.request.max_tokens else {"zllm-max-tokens": str(limit)}


async def _whole(running: _Running, reply: Reply) -> Response:
    events, last = [reply.opening()], Delta()
    async with aclosing(running.deltas()) as deltas:
        async for last in deltas:
            if last.envelope is None:
                events += reply.events(last)
    if failed := failed_response(ended(last), anthropic_errors.failure):
        return failed
    return json_response(message([*events, *reply.events(last)]), headers=running.headers())


async def _events(
    reply: Reply, first: Delta | None, rest: AsyncGenerator[Delta | None, None]
) -> AsyncGenerator[bytes, None]:
    """The events of one stream. It ends with `message_stop`, or, where the call failed on the way, with an error."""
    async with aclosing(rest):
        try:
            yield named_event(reply.opening())
            yield named_event(PING)
            last = first if first is not None else await anext(rest)
            while last is None or last.envelope is None:
                for one in reply.events(last) if last is not None else (PING,):
                    yield named_event(one)
                last = await anext(rest)
            if failed := anthropic_errors.failure(last.envelope):
                yield named_event(failed)
                return
            for one in reply.events(last):
                yield named_event(one)
        except Exception as error:
            log.exception("%s failed after its stream had begun", reply.message_id)
            yield named_event(anthropic_errors.error_object(error))


async def _paced(deltas: AsyncGenerator[Delta, None], silence_s: float) -> AsyncGenerator[Delta | None, None]:
    """The deltas, and None whenever there has been none for `silence_s`."""
    async with aclosing(deltas):
        coming: asyncio.Task[Delta] | None = None
        try:
            while True:
                coming = coming or asyncio.create_task(_next(deltas))
                await asyncio.wait((coming,), timeout=silence_s)
                if not coming.done():
                    yield None
                    continue
                delta, coming = coming.result(), None
                yield delta
                if delta.envelope is not None:
                    return
        finally:
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)


async def _next(several: AsyncGenerator[T, None]) -> T:
    return await anext(several)


class WithRequestId:
    """ASGI middleware: every answer of the protocol, errors too, has an id of its own in `request-id`."""

    def __init__(self, app: ASGIApp, *, new_id: Callable[[], str]) -> None:
        self.app, self.new_id = app, new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["request-id"] = f"req_{self.new_id()}"
            await send(message)

        await self.app(scope, receive, send_with_id)
