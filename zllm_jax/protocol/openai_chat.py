"""Chat Completions: a request body to a `Call`.

Nothing is ignored in silence: a parameter either acts, or is one of the hints that cannot change the answer,
or is refused by name. Follows https://platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zllm_jax.errors import InvalidRequest
from zllm_jax.protocol.call import Call
from zllm_jax.protocol.openai_chat_messages import messages
from zllm_jax.protocol.openai_chat_tools import response_format, tool_choice, tools
from zllm_jax.protocol.reading import Json, members, refuse_unsupported, required, typed
from zllm_jax.values import MAX_TOP_LOGPROBS, Request, Sampling

MAX_STOP = 4
MAX_CHOICES = 16
_SEED_STEP = 0x9E3779B97F4A7C15  # far from the seeds that clients count through

_MAX_DIGITS = 10  # of a token id

_SAMPLING = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",  # this and the two below are no part of the protocol, but what its servers commonly add
    "min_p",
    "repetition_penalty",
)
# Said to the operator, to a cache that keeps what it can anyway, or to a model that can be told so: how much one
# reasons, if it does, is its own, and no such effort changes what it is asked.
_HINTS = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_retention", "prompt_cache_options", "reasoning_effort"}
)
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_READ = frozenset(
    {"model", "messages", "n", "max_tokens", "max_completion_tokens", "stop", "logit_bias", "logprobs", "top_logprobs"}
    | {"stream", "stream_options", "prompt_cache_key", "ignore_eos", *_SAMPLING}
    | {"tools", "tool_choice", "parallel_tool_calls", "response_format"}
)
# Parameters without an implementation, each with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "moderation": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
_NEWER = {"functions": "tools", "function_call": "tool_choice"}


@dataclass(frozen=True, kw_only=True)
class ChatCall(Call):
    """A Chat Completions body, understood. num_choices: how many answers are asked for."""

    include_usage: bool = False
    num_choices: int = 1

    def choices(self) -> tuple[ChatCall, ...]:
        """One call for each answer. The first is as it would be alone; equal requests with a seed get equal answers."""
        if self.num_choices == 1:
            return (self,)
        first = replace(self.request, share_prompt=True)
        return tuple(replace(self, request=_nth(first, index), num_choices=1) for index in range(self.num_choices))


def _nth(request: Request, index: int) -> Request:
    """The request of another answer: with a seed and a name of its own, from which the ids of its calls follow."""
    if index == 0:
        return request
    name = None if request.request_id is None else f"{request.request_id}-{index}"
    seed = request.sampling.seed
    if seed is not None:
        seed = (seed + index * _SEED_STEP) % 2**64
    return replace(request, request_id=name, share_prompt=False, sampling=replace(request.sampling, seed=seed))


def parse_request(body: Any, *, default_max_tokens: int, request_id: str | None = None) -> ChatCall:
    """Understand a Chat Completions body. Raises `InvalidRequest` with the parameter's name in `param`."""
    given = members(body, "")
    for name, newer in _NEWER.items():
        if given.get(name) not in (None, *_NEUTRAL[name]):
            raise InvalidRequest(f"{name} is an older form, which is not supported: send {newer}", param=name)
    refuse_unsupported(given, known=_READ | _HINTS, neutral=_NEUTRAL)
    _check_effort(given)
    max_tokens = _max_tokens(given)
    stream = typed(given, "stream", bool, False)
    sampling = Sampling(
        **{name: given[name] for name in _SAMPLING if name in given},
        logit_bias=_logit_bias(given),
        logprobs=_logprobs(given),
    )
    request = Request(
        messages=messages(given),
        max_tokens=default_max_tokens if max_tokens is None else max_tokens,
        sampling=sampling,
        stop=_stop(given),
        ignore_eos=typed(given, "ignore_eos", bool, False),
        conversation=typed(given, "prompt_cache_key", str, None),
        tools=tools(given),
        tool_choice=tool_choice(given),
        parallel_tool_calls=typed(given, "parallel_tool_calls", bool, True),
        fence=response_format(given),
        request_id=request_id,
    )
    return ChatCall(
        model=required(given, "model", str),
        request=request,
        stream=stream,
        include_usage=_include_usage(given, stream),
        limited=max_tokens is not None,
        num_choices=_num_choices(given),
    )


def _check_effort(given: Mapping[str, Any]) -> None:
    if (effort := given.get("reasoning_effort", "none")) not in _EFFORTS:
        raise InvalidRequest(
            f"reasoning_effort is {reprlib.repr(effort)}, must be one of {', '.join(_EFFORTS)}",
            param="reasoning_effort",
        )


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    for name in names:
        value = given[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise InvalidRequest(f"{name} is {reprlib.repr(value)}, must be an integer of at least 1", param=name)
    values = {given[name] for name in names}
    if len(values) > 1:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ: send one of them (max_tokens is the older name)",
            param="max_tokens",
        )
    return values.pop() if values else None


def _num_choices(given: Mapping[str, Any]) -> int:
    value = given.get("n", 1)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_CHOICES:
        raise InvalidRequest(f"n is {reprlib.repr(value)}, must be an integer in [1, {MAX_CHOICES}]", param="n")
    return value


def _logit_bias(given: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    bias: dict[str, float] = typed(given, "logit_bias", dict, {})
    for token in bias:
        if not (token.isascii() and token.isdigit() and len(token) <= _MAX_DIGITS):
            raise InvalidRequest(
                f"logit_bias has the key {reprlib.repr(token)}, must be a token id in decimal", param="logit_bias"
            )
    return tuple(sorted((int(token), value) for token, value in bias.items()))


def _logprobs(given: Mapping[str, Any]) -> int | None:
    wanted = typed(given, "logprobs", bool, False)
    top = given.get("top_logprobs")
    if top is None:
        return 0 if wanted else None
    if not isinstance(top, int) or isinstance(top, bool) or not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs is {reprlib.repr(top)}, must be an integer in [0, {MAX_TOP_LOGPROBS}]", param="top_logprobs"
        )
    if not wanted:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return top


def _stop(given: Mapping[str, Any]) -> tuple[str, ...]:
    stop = given.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or len(texts) > MAX_STOP or not all(isinstance(t, str) and t for t in texts):
        raise InvalidRequest(
            f"stop is {reprlib.repr(stop)}, must be a non-empty text or a list of at most {MAX_STOP}", param="stop"
        )
    return tuple(texts)


def _include_usage(given: Mapping[str, Any], stream: bool) -> bool:
    options: Json = typed(given, "stream_options", dict, {})
    if options and not stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    for name in options:
        # Obfuscation pads chunks against traffic analysis; False, and leaving it out, ask for none.
        if name != "include_usage" and not (name == "include_obfuscation" and not options[name]):
            raise InvalidRequest(f"stream_options.{name} is not supported", param=f"stream_options.{name}")
    return typed(options, "include_usage", bool, False, prefix="stream_options.")
