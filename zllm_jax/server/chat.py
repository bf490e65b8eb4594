"""`POST /v1/chat/completions`: calls through the engine, one for each choice, whole or as events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from zllm_jax.protocol import openai_chat, openai_errors
from zllm_jax.protocol.call import Call
from zllm_jax.protocol.openai_chat_reply import Reply
from zllm_jax.server.calls import Calls
from zllm_jax.server.choices import Numbered, open_choices
from zllm_jax.server.disconnect import until_disconnect
from zllm_jax.server.errors import failed_response, json_response
from zllm_jax.server.sse import EventStream, event
from zllm_jax.values import Envelope

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
        choices = call.choices()
        if not call.stream:
            return await until_disconnect(request.receive, self._whole(reply, choices))
        # Headers are sent with the first delta, not before: what fails until then is an HTTP error, not an event.
        first, deltas = await until_disconnect(request.receive, open_choices(calls, choices))
        if first.envelope is not None and (failed := failed_response(first.envelope, openai_errors.failure)):
            await deltas.aclose()
            return failed
        return EventStream(_events(reply, deltas, len(choices)))

    async def _whole(self, reply: Reply, choices: Sequence[Call]) -> Response:
        """All choices, or the failure of one."""
        _, deltas = await open_choices(self.calls, choices)
        envelopes: dict[int, Envelope] = {}
        async with aclosing(deltas):
            async for number, delta in deltas:
                if delta.envelope is None:
                    continue
                if failed := failed_response(delta.envelope, openai_errors.failure):
                    return failed
                envelopes[number] = delta.envelope
        return json_response(reply.completion(*(envelopes[number] for number in range(len(choices)))))


async def _events(reply: Reply, deltas: Numbered, num_choices: int) -> AsyncGenerator[bytes, None]:
    """The events of one stream. It ends with `[DONE]`, or, where a choice failed on the way, with an error."""
    envelopes: dict[int, Envelope] = {}
    async with aclosing(deltas):
        try:
            for number in range(num_choices):
                yield event(reply.opening(number))
            async for number, delta in deltas:
                if delta.envelope is not None:
                    if failed := openai_errors.failure(delta.envelope):
                        yield event(failed)
                        return
                    envelopes[number] = delta.envelope
                for chunk in reply.chunks(delta, number):
                    yield event(chunk)
            for chunk in reply.closing([envelopes[number].usage for number in range(num_choices)]):
                yield event(chunk)
            yield event("[DONE]")
        except Exception as error:
            log.exception("%s failed after its first token", reply.completion_id)
            yield event(openai_errors.error_object(error))
