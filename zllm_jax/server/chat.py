"""`POST /v1/chat/completions`: one call through the engine, whole or as events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from zllm_jax.protocol import openai_chat, openai_errors
from zllm_jax.protocol.openai_chat_reply import Reply
from zllm_jax.server.calls import Calls
from zllm_jax.server.disconnect import until_disconnect
from zllm_jax.server.errors import failed_response, json_response
from zllm_jax.server.sse import EventStream, event
from zllm_jax.values import Delta

log = logging.getLogger(__name__)


class ChatCompletions:
    """The endpoint."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    async def respond(self, request: HttpRequest) -> Response:
        body, calls = await self.calls.read(request), self.calls
        completion_id = f"chatcmpl-{calls.new_id()}"
        call = openai_chat.parse_request(body, default_max_tokens=calls.default_max_tokens, request_id=completion_id)
        calls.check_model(call.model)
        call = calls.owned(request, call)
        reply = Reply(
            call=call,
            completion_id=completion_id,
            created=int(calls.clock()),
            token_bytes=calls.engine.token_bytes,
        )
        if not call.stream:
            envelope = await until_disconnect(request.receive, calls.whole(call))
            return failed_response(envelope, openai_errors.failure) or json_response(reply.completion(envelope))
        # Headers are sent with the first delta, not before: what fails until then is an HTTP error, not an event.
        first, rest = await until_disconnect(request.receive, calls.open(call))
        if first.envelope is not None and (failed := failed_response(first.envelope, openai_errors.failure)):
            await rest.aclose()
            return failed
        return EventStream(_events(reply, first, rest))


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
