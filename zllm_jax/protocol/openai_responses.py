"""Responses: a request body to a `ResponsesCall`.

Nothing is ignored in silence: a parameter either acts, or is one of the hints that cannot change the answer, or is
refused by name. Follows https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zllm_jax.errors import InvalidRequest
from zllm_jax.protocol.call import Call
from zllm_jax.protocol.openai_responses_items import input_items, messages_of
from zllm_jax.protocol.openai_responses_tools import Offer, offered, text_format, tool_choice
from zllm_jax.protocol.reading import Json, members, refuse_unsupported, required, typed
from zllm_jax.values import MAX_TOP_LOGPROBS, Message, Request, Sampling, ToolChoice

_SAMPLING = ("temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty")  # the last four are our own
_HINTS = frozenset(
    {"user", "safety_identifier", "prompt_cache_retention", "prompt_cache_options", "client_metadata"}
    # Reasoning's effort and summary are wishes. No tool of the server's own is run, so there is none to be counted.
    | {"reasoning", "max_tool_calls"}
)
_READ = frozenset(
    {"model", "input", "instructions", "max_output_tokens", "stream", "stream_options", "store", "metadata", "include"}
    | {"previous_response_id", "prompt_cache_key", "tools", "tool_choice", "parallel_tool_calls", "text", "truncation"}
    | {"top_logprobs", *_SAMPLING}
)
# Parameters without an implementation, each with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "prompt": (),
    "moderation": (),
    "service_tier": ("auto", "default"),
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset({_LOGPROBS, "reasoning.encrypted_content"})  # what is encrypted nowhere is left out
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """What an earlier turn left: its input and output items, and the name by which the cache knows its conversation."""

    items: tuple[Json, ...] = ()
    conversation: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResponsesCall(Call):
    """A Responses body, understood.

    given: the body. items: the input items of this turn, each with an id. earlier: the items before them, of the chain.
    offer: the tools, by the names that the model sees. shortens: whether the oldest turns may be left out.
    """

    given: Json
    items: tuple[Json, ...]
    earlier: tuple[Json, ...] = ()
    offer: Offer = field(default_factory=Offer)
    store: bool = True
    shortens: bool = False
    logprobs: bool = False


def previous_id(body: Any) -> str | None:
    """The response that a body continues."""
    return typed(members(body, ""), "previous_response_id", str, None)


def parse_request(
    body: Any,
    *,
    default_max_tokens: int,
    new_id: Callable[[], str],
    earlier: Earlier | None = None,
    request_id: str | None = None,
) -> ResponsesCall:
    """Understand a Responses body. Raises `InvalidRequest` with the parameter's name in `param`.

    earlier: what `previous_id` names. new_id: makes the ids of input items that have none.
    """
    given = members(body, "")
    refuse_unsupported(given, known=_READ | _HINTS, neutral=_NEUTRAL)
    _check_options(given)
    before = earlier or Earlier()
    items = input_items(given, new_id)
    max_tokens = _max_tokens(given)
    include = _include(given)
    sampling = Sampling(
        **{name: given[name] for name in _SAMPLING if name in given}, logprobs=_logprobs(given, _LOGPROBS in include)
    )
    offer = offered(given, (*before.items, *items))
    offer, choice = _without_hosted(offer, tool_choice(given, offer))
    request = Request(
        messages=_messages(given, before.items, items),
        max_tokens=default_max_tokens if max_tokens is None else max_tokens,
        sampling=sampling,
        conversation=typed(given, "prompt_cache_key", str, None) or before.conversation,
        tools=offer.tools,
        tool_choice=choice,
        parallel_tool_calls=typed(given, "parallel_tool_calls", bool, True),
        fence=text_format(given),
        request_id=request_id,
    )
    return ResponsesCall(
        model=required(given, "model", str),
        request=request,
        stream=typed(given, "stream", bool, False),
        limited=max_tokens is not None,
        given=given,
        items=items,
        earlier=before.items,
        offer=offer,
        store=typed(given, "store", bool, True),
        shortens=_truncation(given),
        logprobs=_LOGPROBS in include,
    )


def shortened(messages: Sequence[Message]) -> tuple[Message, ...] | None:
    """The conversation without its oldest turn; None where only one turn is left."""
    first = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
    later = next((i for i in range(first + 1, len(messages)) if messages[i]["role"] == "user"), None)
    return None if later is None else (*messages[:first], *messages[later:])


def _without_hosted(offer: Offer, choice: ToolChoice) -> tuple[Offer, ToolChoice]:
    """Where all tools were the server's own, which are not run here, there is nothing to call."""
    return (offer, choice) if offer.tools or choice in ("auto", "required") else (offer, "auto")


def _messages(given: Json, before: Sequence[Json], items: Sequence[Json]) -> tuple[Message, ...]:
    instructions = typed(given, "instructions", str, "")
    head: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    messages = (*head, *messages_of((*before, *items)))
    if not messages:
        raise InvalidRequest("input is empty: at least one message is needed", param="input")
    return messages


def _check_options(given: Json) -> None:
    options: Json = typed(given, "stream_options", dict, {})
    for name in options:
        if name != "include_obfuscation" or options[name]:
            raise InvalidRequest(f"stream_options.{name} is not supported", param=f"stream_options.{name}")
    metadata: Json = typed(given, "metadata", dict, {})
    fits = all(
        isinstance(text, str) and len(text) <= MAX_METADATA_VALUE and len(name) <= MAX_METADATA_KEY
        for name, text in metadata.items()
    )
    if not fits or len(metadata) > MAX_METADATA:
        raise InvalidRequest(
            f"metadata must be at most {MAX_METADATA} texts of at most {MAX_METADATA_VALUE} characters, under names "
            f"of at most {MAX_METADATA_KEY}",
            param="metadata",
        )


def _max_tokens(given: Json) -> int | None:
    value = given.get("max_output_tokens")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise InvalidRequest(
            f"max_output_tokens is {reprlib.repr(value)}, must be an integer of at least 1", param="max_output_tokens"
        )
    return value


def _include(given: Json) -> frozenset[str]:
    several: list[Any] = typed(given, "include", list, [])
    for one in several:
        if one not in _INCLUDABLE:
            raise InvalidRequest(
                f"include has {reprlib.repr(one)}, which is not supported; {sorted(_INCLUDABLE)} are", param="include"
            )
    return frozenset(several)


def _logprobs(given: Json, included: bool) -> int | None:
    top = given.get("top_logprobs")
    if top is None:
        return 0 if included else None
    if not isinstance(top, int) or isinstance(top, bool) or not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs is {reprlib.repr(top)}, must be an integer in [0, {MAX_TOP_LOGPROBS}]", param="top_logprobs"
        )
    if top and not included:
        raise InvalidRequest(f"top_logprobs needs include: [{_LOGPROBS!r}]", param="top_logprobs")
    return top if included else None


def _truncation(given: Json) -> bool:
    value = given.get("truncation", "disabled")
    if value not in ("auto", "disabled"):
        raise InvalidRequest(f"truncation is {reprlib.repr(value)}, must be auto or disabled", param="truncation")
    return bool(value == "auto")
