"""`POST /v1/chat/completions`: one call through the engine, whole or as events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from uuid import uuid4

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from zllm_jax.errors import BudgetExceeded, UnknownModel
from zllm_jax.protocol import openai_chat, openai_errors
from zllm_jax.protocol.openai_chat import Call
from zllm_jax.protocol.openai_chat_reply import Reply
from zllm_jax.server.body import Limits, read_json
from zllm_jax.server.disconnect import until_disconnect
from zllm_jax.server.engine import Engine
from zllm_jax.server.errors import failed_response, json_response
from zllm_jax.server.sse import EventStream, event
from zllm_jax.values import Delta, Envelope, Request

log = logging.getLogger(__name__)


def new_id() -> str:
    return uuid4().hex


class ChatCompletions:
    """The endpoint. clock: Unix seconds; new_id: unique text of a call, which its objects and its request carry."""

    def __init__(
        self,
        engine: Engine,
        *,
        limits: Limits,
        default_max_tokens: int,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self.engine = engine
        self.limits = limits
        self.default_max_tokens = default_max_tokens
        self.clock = clock
        self.new_id = new_id

    async def respond(self, request: HttpRequest) -> Response:
        body = await read_json(request, self.limits)
        completion_id = f"chatcmpl-{self.new_id()}"
        call = openai_chat.parse_request(body, default_max_tokens=self.default_max_tokens, request_id=completion_id)
        if call.model != self.engine.model_name:
            raise UnknownModel(f"model {call.model!r} is not served here; {self.engine.model_name!r} is")
        reply = Reply(
            call=call,
            completion_id=completion_id,
            created=int(self.clock()),
            token_bytes=self.engine.token_bytes,
        )
        if not call.stream:
            envelope = await until_disconnect(request.receive, self._whole(call))
            return failed_response(envelope) or json_response(reply.completion(envelope))
        # Headers are sent with the first delta, not before: what fails until then is an HTTP error, not an event.
        first, rest = await until_disconnect(request.receive, self._open(call))
        if first.envelope is not None and (failed := failed_response(first.envelope)):
            await rest.aclose()
            return failed
        return EventStream(_events(reply, first, rest))

    async def _whole(self, call: Call) -> Envelope:
        first, rest = await self._open(call)
        async with aclosing(rest):
            last = first
            async for delta in rest:
                last = delta
        return _envelope(last)

    async def _open(self, call: Call) -> tuple[Delta, AsyncGenerator[Delta, None]]:
        """Start a call: its first delta, and the stream of the others."""
        try:
            return await _start(self.engine, call.request)
        except BudgetExceeded as error:
            # A client that set no limit asked for what fits.
            left = error.budget_tokens - error.prompt_tokens
            if call.limited or left < 1:
                raise
            return await _start(self.engine, replace(call.request, max_tokens=left))


async def _start(engine: Engine, request: Request) -> tuple[Delta, AsyncGenerator[Delta, None]]:
    stream = engine.stream(request)
    try:
        return await anext(stream), stream
    except BaseException:
        await stream.aclose()
        raise


async def _events(reply: Reply, first: Delta, rest: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
    """The events of one stream. It ends with `[DONE]`, or, where the call failed on the way, with an error."""
    async with aclosing(rest):
        try:
            yield event(reply.opening())
            last = first
            while last.envelope is None:
                for chunk in reply.chunks(last):
                    yield event(chunk)
                last = await anext(rest)
            if failed := openai_errors.failure(last.envelope):
                yield event(failed)
                return
            for chunk in reply.chunks(last):
                yield event(chunk)
            yield event("[DONE]")
        except Exception as error:
            log.exception("%s failed after its first token", reply.completion_id)
            yield event(openai_errors.error_object(error))


def _envelope(last: Delta) -> Envelope:
    assert last.envelope is not None, "the last delta of a stream carries the envelope"
    return last.envelope
