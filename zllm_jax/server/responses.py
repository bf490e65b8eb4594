"""`/v1/responses`: a turn through the engine, whole or as events, and the turns that are kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from zllm_jax.errors import BudgetExceeded, InvalidRequest
from zllm_jax.protocol import openai_errors, openai_responses
from zllm_jax.protocol.openai_responses import Earlier, ResponsesCall
from zllm_jax.protocol.openai_responses_reply import Reply, item_list
from zllm_jax.protocol.reading import Json
from zllm_jax.server.auth import tenant_of
from zllm_jax.server.calls import Calls
from zllm_jax.server.disconnect import until_disconnect
from zllm_jax.server.errors import failed_response, json_response
from zllm_jax.server.history import History, Turn
from zllm_jax.server.sse import EventStream, named_event
from zllm_jax.values import Delta

log = logging.getLogger(__name__)

LISTED, MAX_LISTED = 20, 100


@dataclass(frozen=True, eq=False)
class Running:
    """A turn under way. rest: its later deltas. stopped: set by whoever cancels it."""

    call: ResponsesCall
    reply: Reply
    tenant: str
    first: Delta
    rest: AsyncGenerator[Delta, None]
    stopped: asyncio.Event


class Responses:
    """The endpoints."""

    def __init__(self, calls: Calls, history: History) -> None:
        self.calls, self.history = calls, history
        self._running: dict[tuple[str, str], Running] = {}

    async def respond(self, request: HttpRequest) -> Response:
        body = await self.calls.read(request)
        running = await until_disconnect(request.receive, self.start(body, tenant_of(request.scope)))
        if running.first.envelope and (failed := failed_response(running.first.envelope, openai_errors.failure)):
            await running.rest.aclose()
            return failed
        events = self.events(running)
        if running.call.stream:
            return EventStream(_named(events))
        last = await until_disconnect(request.receive, _last(events))
        if last["type"] == "response.failed":  # as it would be before the first token
            said = last["response"]["error"]
            return json_response(openai_errors.error_body(said["message"], kind="server_error", code=said["code"]), 500)
        return json_response(last["response"])

    async def start(self, body: Any, tenant: str, kept: Mapping[str, Turn] | None = None) -> Running:
        """Understand a body and run it to its first delta. kept: turns that only the caller has."""
        id = f"resp_{self.calls.new_id()}"
        call = await self._understood(body, tenant, kept or {}, id)
        call = replace(call, request=replace(call.request, tenant=tenant))
        reply = Reply(
            call,
            id,
            created=int(self.calls.clock()),
            token_bytes=self.calls.engine.token_bytes,
            new_id=self.calls.new_id,
        )
        while True:
            try:
                first, rest = await self.calls.open(call)
                return Running(call, reply, tenant, first, rest, asyncio.Event())
            except BudgetExceeded:
                messages = openai_responses.shortened(call.request.messages or ()) if call.shortens else None
                if messages is None:
                    raise
                call = replace(call, request=replace(call.request, messages=messages))

    async def events(self, running: Running, kept: dict[str, Turn] | None = None) -> AsyncGenerator[Json, None]:
        """The events of a turn, durable before its last one is out. kept: where to put a turn that isn't stored."""
        reply, key = running.reply, (running.tenant, running.reply.response["id"])
        self._running[key] = running
        async with aclosing(running.rest):
            try:
                for one in reply.opening():
                    yield one
                async for delta in _until(running):
                    several = list(reply.events(delta))
                    if delta.envelope is not None:
                        await self._keep(running, kept)
                    for one in several:
                        yield one
                if running.stopped.is_set() and reply.response["status"] == "in_progress":
                    several = list(reply.cancelled())
                    await self._keep(running, kept)
                    for one in several:
                        yield one
            except Exception as error:
                log.exception("%s failed after its first token", key[1])
                for one in reply.failed(openai_errors.error_object(error)):
                    yield one
            finally:
                self._running.pop(key, None)

    async def get(self, request: HttpRequest) -> Response:
        return json_response((await self._turn(request)).response)

    async def delete(self, request: HttpRequest) -> Response:
        id = request.path_params["id"]
        if not await self.history.delete(tenant_of(request.scope), id):
            raise _unknown(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: HttpRequest) -> Response:
        key = (tenant_of(request.scope), request.path_params["id"])
        if (running := self._running.get(key)) is not None:
            running.stopped.set()
            return json_response(running.reply.response | {"status": "cancelled"})
        await self._turn(request)
        raise InvalidRequest(f"response {key[1]} has ended: only one in progress can be cancelled", param="response_id")

    async def items(self, request: HttpRequest) -> Response:
        query = request.query_params
        limit, order, after = query.get("limit", str(LISTED)), query.get("order", "desc"), query.get("after")
        if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LISTED:
            raise InvalidRequest(f"limit is {limit!r}, must be an integer in [1, {MAX_LISTED}]", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order is {order!r}, must be asc or desc", param="order")
        chain = await self.history.chain(tenant_of(request.scope), request.path_params["id"])
        if not chain:
            raise _unknown(request.path_params["id"])
        items = [*_items(chain[:-1]), *chain[-1].items]
        if order == "desc":
            items.reverse()
        if after is not None:
            at = next((i for i, one in enumerate(items) if one["id"] == after), None)
            if at is None:
                raise InvalidRequest(f"after is {after!r}, which is no item of this response", param="after")
            items = items[at + 1 :]
        return json_response(item_list(items[: int(limit)], has_more=len(items) > int(limit)))

    async def count(self, request: HttpRequest) -> Response:
        tenant = tenant_of(request.scope)
        call = await self._understood(await self.calls.read(request), tenant, {}, None)
        asked = replace(call.request, tenant=tenant)
        tokens = await asyncio.to_thread(self.calls.engine.count_tokens, asked)
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    async def _understood(
        self, body: Any, tenant: str, kept: Mapping[str, Turn], request_id: str | None
    ) -> ResponsesCall:
        earlier = None
        if (previous := openai_responses.previous_id(body)) is not None:
            chain = await self._chain(tenant, previous, kept)
            earlier = Earlier(items=tuple(_items(chain)), conversation=chain[-1].conversation)
        call = openai_responses.parse_request(
            body,
            default_max_tokens=self.calls.default_max_tokens,
            new_id=self.calls.new_id,
            earlier=earlier,
            request_id=request_id,
        )
        self.calls.check_model(call.model)
        return call

    async def _chain(self, tenant: str, id: str, kept: Mapping[str, Turn]) -> list[Turn]:
        """Turns of a socket come after those that are stored."""
        later, wanted = list[Turn](), id
        while (turn := kept.get(wanted)) is not None:
            later.append(turn)
            if turn.previous is None:
                return later[::-1]
            wanted = turn.previous
        before = await self.history.chain(tenant, wanted)
        if not before:
            raise InvalidRequest(
                f"previous_response_id is {id!r}, but response {wanted} is not there: it was not stored, was deleted "
                "or is too old",
                param="previous_response_id",
            )
        return [*before, *later[::-1]]

    async def _keep(self, running: Running, kept: dict[str, Turn] | None) -> None:
        call, response = running.call, running.reply.response
        turn = Turn(
            response=response,
            items=call.items,
            previous=response["previous_response_id"],
            conversation=call.request.conversation or response["id"],
        )
        if call.store:
            await self.history.keep(running.tenant, turn)
        elif kept is not None:
            kept[response["id"]] = turn

    async def _turn(self, request: HttpRequest) -> Turn:
        turn = await self.history.get(tenant_of(request.scope), request.path_params["id"])
        if turn is None:
            raise _unknown(request.path_params["id"])
        return turn


def _items(turns: list[Turn]) -> list[Json]:
    """What stood in a conversation after its last turn; a call that was cut is none."""
    items = list[Json]()
    for turn in turns:
        items += turn.items
        items += [
            one for one in turn.response["output"] if one["type"] != "function_call" or one["status"] == "completed"
        ]
    return items


def _unknown(id: str) -> HTTPException:
    return HTTPException(404, f"response {id!r} is not there: it was not stored, was deleted or is too old")


async def _until(running: Running) -> AsyncGenerator[Delta, None]:
    """The deltas of a turn, until it is stopped."""
    yield running.first
    if running.first.envelope is not None:
        return
    stopped = asyncio.create_task(running.stopped.wait())
    coming: asyncio.Future[Delta] | None = None
    try:
        while not running.stopped.is_set():
            coming = asyncio.ensure_future(anext(running.rest))
            await asyncio.wait((coming, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                return
            delta = coming.result()
            yield delta
            if delta.envelope is not None:
                return
    finally:
        stopped.cancel()
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


async def _named(events: AsyncGenerator[Json, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for one in events:
            yield named_event(one)


async def _last(events: AsyncGenerator[Json, None]) -> Json:
    async with aclosing(events):
        return [one async for one in events][-1]
