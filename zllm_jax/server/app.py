"""The application: routes, and what they need passed in."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from zllm_jax.errors import ConfigError, UnknownModel
from zllm_jax.metrics import CONTENT_TYPE
from zllm_jax.protocol import openai_chat_reply
from zllm_jax.server.auth import RequireKey
from zllm_jax.server.body import Limits
from zllm_jax.server.calls import DEFAULT_MAX_TOKENS, Calls, new_id
from zllm_jax.server.chat import ChatCompletions
from zllm_jax.server.engine import Engine
from zllm_jax.server.errors import HANDLERS, json_response
from zllm_jax.server.history import History
from zllm_jax.server.messages import Messages, WithRequestId
from zllm_jax.server.responses import Responses


def create_app(
    engine: Engine,
    *,
    api_key: str | None = None,
    limits: Limits | None = None,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
    history: Path | None = None,
    clock: Callable[[], float] = time.time,
    new_id: Callable[[], str] = new_id,
) -> Starlette:
    """The ASGI application that serves `engine`.

    api_key: needed on every path but /health and /ready (None: no key). default_max_tokens: for calls that set no
    limit, or less where the context leaves less. history: the file of the responses that clients may continue or ask
    for again (None: in memory). clock, new_id: where times (Unix seconds) and ids come from.
    """
    if api_key is not None and not api_key.strip():
        raise ConfigError("api_key is empty: give a key, or None to serve without one")
    started = int(clock())
    calls = Calls(
        engine=engine, limits=limits or Limits(), default_max_tokens=default_max_tokens, clock=clock, new_id=new_id
    )
    chat, responses = ChatCompletions(calls), Responses(calls, History(history))
    messages, identified = Messages(calls), [Middleware(WithRequestId, new_id=new_id)]

    async def models(_: HttpRequest) -> Response:
        return json_response(openai_chat_reply.model_list([engine.model_name], created=started))

    async def model(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name != engine.model_name:
            raise UnknownModel(f"model {name!r} is not served here; {engine.model_name!r} is")
        return json_response(openai_chat_reply.model_object(name, created=started))

    async def health(_: HttpRequest) -> Response:
        return json_response({"status": "ok"})

    async def ready(_: HttpRequest) -> Response:
        return json_response({"ready": engine.ready}, 200 if engine.ready else 503)

    async def cache(_: HttpRequest) -> Response:
        return json_response(engine.report())

    def metrics(_: HttpRequest) -> Response:  # not async: Starlette gives it a thread
        return Response(engine.metrics(), headers={"content-type": CONTENT_TYPE})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat.respond, methods=["POST"]),
            Route("/v1/messages", messages.respond, methods=["POST"], middleware=identified),
            Route("/v1/messages/count_tokens", messages.count, methods=["POST"], middleware=identified),
            Route("/v1/responses", responses.respond, methods=["POST"]),
            Route("/v1/responses/input_tokens", responses.count, methods=["POST"]),
            Route("/v1/responses/{id}", responses.get, methods=["GET"]),
            Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
            Route("/v1/responses/{id}/input_items", responses.items, methods=["GET"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", model, methods=["GET"]),
            Route("/v1/cache", cache, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/ready", ready, methods=["GET"]),
        ],
        middleware=[Middleware(RequireKey, api_key=api_key)] if api_key is not None else [],
        exception_handlers=dict(HANDLERS),
    )
