"""Frozen values that travel between the rooms: a request, its sampling, its envelope.

No jax, no I/O. Times are seconds, sizes are bytes or tokens; the names say which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from zllm_jax.errors import InvalidRequest, NotReleased

Message = Mapping[str, Any]

# Of header lines ("name: value") in front of an instruction that change with every request and say nothing to a model:
# their names, lower case. Claude Code sends the version, the entry point and a nonce in one.
VOLATILE_HEADERS = ("x-anthropic-billing-header",)


class Status(StrEnum):
    """How a call ended. The set is closed; only COMPLETED may be acted on."""

    COMPLETED = "COMPLETED"
    TRUNCATED = "TRUNCATED"
    REFUSED = "REFUSED"
    TRANSPORT_FAILURE = "TRANSPORT_FAILURE"
    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    FAULTED = "FAULTED"


class Tier(StrEnum):
    """From where the cached part of a prompt came."""

    COLD = "cold"
    RESIDENT = "resident"
    DISK = "disk"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. Applied in this order: bias, penalties, temperature, top-k, top-p, min-p.

    temperature: 0 takes the most likely token; otherwise logits are divided by it.
    top_k: keep the k most likely tokens, ties of the k-th included (0: off).
    top_p: keep the smallest set of most likely tokens whose mass reaches p (1: off).
    min_p: keep tokens at least min_p times as likely as the most likely one (0: off).
    repetition_penalty: divides positive and multiplies negative logits of every token of prompt or output.
    presence_penalty, frequency_penalty: subtracted once, or once per occurrence, for output tokens.
    logit_bias: pairs (token id, bias) added first.
    seed: same request and seed, same tokens, alone or in any batch; None draws one, which the telemetry reports.
    logprobs: None off; n >= 0: log-probability of the chosen token and of the n most likely.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias.items())))
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed",
                param="logit_bias",
            )
        for token, bias in self.logit_bias:
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -100.0, 100.0)


MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 300


def _number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high  # NaN compares false
    if not ok or (open_low and value == low):
        left = "(" if open_low else "["
        raise InvalidRequest(f"{name} is {value!r}, must be a number in {left}{low:g}, {high:g}]", param=name)


def _integer(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value!r}, must be an integer in [{low}, {high}]", param=name)


@dataclass(frozen=True, kw_only=True)
class Fence:
    """What the output must be: exactly one of schema, regex, choices and lark.

    schema: JSON Schema. regex: ECMA, the whole text. lark: a Lark-like grammar, whose recursion has no bounds; its
    masks come from the host, a step at a time, while the other three are followed on the device.
    whitespace: of JSON: "spaced" as `json.dumps` writes it, "dense" none, "free" any.
    formats: whether a schema's `format` is a rule. relax: leave out the keywords that cannot be enforced exactly, and
    say so in the telemetry, instead of refusing the schema.
    """

    schema: bool | Mapping[str, Any] | None = None
    regex: str | None = None
    choices: tuple[str, ...] = ()
    lark: str | None = None
    whitespace: Literal["spaced", "dense", "free"] = "spaced"
    formats: bool = True
    relax: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", tuple(self.choices))
        given = [name for name in ("schema", "regex", "lark") if getattr(self, name) is not None]
        given += ["choices"] if self.choices else []
        if len(given) != 1:
            raise InvalidRequest(
                f"a fence is exactly one of schema, regex, choices and lark, got {', '.join(given) or 'none'}",
                param="fence",
            )
        if self.whitespace not in ("spaced", "dense", "free"):
            raise InvalidRequest(f"whitespace is {self.whitespace!r}, must be spaced, dense or free", param="fence")


@dataclass(frozen=True)
class NamedTool:
    """A choice of tools: this one must be called."""

    name: str


@dataclass(frozen=True)
class AllowedTools:
    """A choice of tools: of those that the model is shown, only these may be called; required: one of them must be."""

    names: tuple[str, ...]
    required: bool = False


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedTools


@dataclass(frozen=True)
class ToolCall:
    """A call. arguments: parameters in the order given, or the client's own text where that is no JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True)
class Request:
    """One call: exactly one of `messages` (chat template applied), `prompt` (text) or `tokens` (ids).

    The first positional argument may be any of the three; its type decides.
    max_tokens: K_max, the most tokens to generate. timeout_s: T_max over queue and run.
    stop: texts that end the output (not part of it). ignore_eos: keep going after EOS, for measurements.
    cache: look the prompt up in the prefix cache and keep the finished state (False: neither).
    conversation: a hint where to look first; tokens are always compared.
    share_prompt: whether others may reuse the prompt's state from the first token on, and not only from the end on; for
    several answers to one prompt.
    tenant: whose request it is: cached states are never shared between tenants, and each gets its fair share.
    priority: higher ones are admitted first.
    tools: on offer, each `{"type": "function", "function": {"name", "description", "parameters"}}`. What may come of
    them is enforced token by token: tool_choice "auto" is text, calls or both; "none" no call; "required" one or more
    and no text; `NamedTool` likewise, of one tool; `AllowedTools` is "auto" or "required" with some of the tools.
    parallel_tool_calls: whether more than one call may come.
    tool_dialect: how calls are written; None takes what the checkpoint was trained on.
    fence: what the output must be; enforced token by token, before sampling. It is for the text of an answer: a model
    may reason before it, and with tools the output is then either calls or such a text ("auto"), the calls alone where
    there must be one, or the text ("none"). A Lark-like grammar stands beside no calls.
    loop_guard: exclude the token that would continue a loop, and end thinking that only loops. A fence goes before it.
        None: as `EngineConfig.loop_guard` says.
    """

    input: str | Sequence[int] | Sequence[Message] | None = None
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    timeout_s: float | None = None
    cache: bool = True
    conversation: str | None = None
    share_prompt: bool = False
    tenant: str = ""
    priority: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    tool_dialect: str | None = None
    fence: Fence | None = None
    loop_guard: bool | None = None
    request_id: str | None = None

    def __post_init__(self) -> None:
        given: dict[str, Any] = {}
        if self.input is not None:
            given[_kind_of(self.input)] = self.input
        for name in ("messages", "prompt", "tokens"):
            value = getattr(self, name)
            if value is not None:
                if name in given:
                    raise InvalidRequest(f"the {name} were given twice", param=name)
                given[name] = value
        if len(given) != 1:
            raise InvalidRequest(
                f"exactly one of messages, prompt and tokens is needed, got {sorted(given) or 'none'}", param="messages"
            )
        ((name, value),) = given.items()
        object.__setattr__(self, "input", None)
        if name == "tokens":
            for token in value:
                _integer("tokens", int(token) if hasattr(token, "item") else token, 0, 2**31 - 1)
            value = tuple(int(token) for token in value)
        elif name == "messages":
            value = tuple(value)
        elif not isinstance(value, str):
            raise InvalidRequest(f"prompt must be text, got {type(value).__name__}", param="prompt")
        if len(value) == 0:
            raise InvalidRequest(f"{name} is empty: at least one token is needed to predict the next", param=name)
        object.__setattr__(self, name, value)
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.fence is not None and self.ignore_eos:
            raise InvalidRequest("a fence ends its output with EOS: ignore_eos cannot be used with it", param="fence")
        object.__setattr__(self, "tools", tuple(self.tools))
        self._check_tools()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if any(not isinstance(text, str) or not text for text in stop):
            raise InvalidRequest("stop sequences must be non-empty texts", param="stop")
        object.__setattr__(self, "stop", stop)
        if self.timeout_s is not None:
            _number("timeout_s", self.timeout_s, 0.0, 86_400.0, open_low=True)

    def _check_tools(self) -> None:
        names = [_tool_name(tool, number) for number, tool in enumerate(self.tools)]
        for name in names:
            if names.count(name) > 1:
                raise InvalidRequest(f"two tools have the name {name!r}: a call could not say which", param="tools")
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            if choice.name not in names:
                raise InvalidRequest(
                    f"tool_choice names {choice.name!r}, which is not among the tools {names}", param="tool_choice"
                )
        elif isinstance(choice, AllowedTools):
            unknown = sorted(set(choice.names) - set(names))
            if unknown or not choice.names:
                raise InvalidRequest(
                    f"tool_choice allows {unknown or 'no tool'}, but the tools are {names}", param="tool_choice"
                )
        elif choice not in ("auto", "none", "required"):
            raise InvalidRequest(
                f"tool_choice is {choice!r}, must be auto, none, required, a NamedTool or AllowedTools",
                param="tool_choice",
            )
        elif choice == "required" and not names:
            raise InvalidRequest("tool_choice is required, but there are no tools to call", param="tool_choice")
        if self.tools and self.fence is not None and self.fence.lark is not None and choice != "none":
            raise InvalidRequest(
                "a Lark-like grammar and calls of tools cannot share one output: use a schema, a regex or choices, "
                "leave the fence out, or set tool_choice to none",
                param="fence",
            )
        if self.tools and self.ignore_eos:
            raise InvalidRequest("a call of tools ends with EOS: ignore_eos cannot be used with tools", param="tools")


def _tool_name(tool: Any, number: int) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest(f"tools[{number}] must have a function with a name", param=f"tools[{number}]")
    return name


def _kind_of(value: Any) -> str:
    if isinstance(value, str):
        return "prompt"
    items = list(value)
    return "messages" if items and isinstance(items[0], Mapping) else "tokens"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts. prompt = cached + prefilled; `cached_tokens` is exactly what was not recomputed."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    tier: Tier = Tier.COLD

    @property
    def prefilled_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Where the time of one call went. TTFT = prep + queue + restore + prefill; the parts add up to the total."""

    prep_s: float = 0.0
    queue_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    post_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.prep_s + self.queue_s + self.restore_s + self.prefill_s

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.decode_s + self.post_s


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """log p of one generated token under the model's own distribution (before bias, penalties, mask, temperature)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class NearMiss:
    """A stored state that has a long prefix in common with the prompt, but could not be reused as far as that.

    common: equal tokens. stored_tokens: those of the state. reused_tokens: what was reused nevertheless.
    before: the last common tokens, at most 8. here, there: what follows them in the prompt and in the stored state,
    at most 8 each, empty where one ends.
    explanation: the same in words, with the texts and the place in the request; empty until the engine adds it.
    """

    common: int
    stored_tokens: int
    reused_tokens: int
    before: tuple[int, ...] = ()
    here: tuple[int, ...] = ()
    there: tuple[int, ...] = ()
    explanation: str = ""


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """What else a run must say so that it can be repeated and accounted for."""

    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    finish: str = ""  # "eos", "stop", "max_tokens", "canceled", "deadline", "fault"
    bytes_read: int = 0
    bytes_copied: int = 0
    predicted_restore_s: float | None = None  # what Timing.restore_s was expected to be, where there was a measurement
    near_miss: NearMiss | None = None
    deadline_exceeded: bool = False
    saved_steps: int = 0  # decode steps that a cancel or an early stop made unnecessary
    saved_bytes: int = 0  # state bytes those steps would have written
    termination: str = "ok"  # the accelerator's own flag
    stop_text: str | None = None
    fence: Literal["device", "host", ""] = ""  # where the masks came from
    loops_broken: int = 0  # how often the loop guard led the output out of a loop
    forced_tokens: int = 0  # of those generated, how many the fence left no choice about and were appended at once
    fence_relaxed: tuple[str, ...] = ()  # what `Fence.relax` left out of the schema, as "path: reason"
    tool_dialect: str | None = None  # in which the output was read, if it was
    malformed_calls: tuple[str, ...] = ()  # "reason: text" of what began as a call and is none; never so where fenced


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """The answer to one request, whatever happened to it.

    text: what is to be shown. reasoning: of a model that reasons before it answers. calls: where tools were on offer; a
    call that the end of the output cut is none.
    """

    request_id: str
    status: Status
    tokens: tuple[int, ...] = ()
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    telemetry: Telemetry = field(default_factory=Telemetry)
    logprobs: tuple[TokenLogprob, ...] = ()
    conversation: str | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class CallDelta:
    """A piece of the `index`-th call of a turn. The first has its id and name, the last is `done`.

    arguments: more of their JSON text. A call without a last piece was cut, and is none. malformed: why what began as a
    call is none, with the text of it; the last piece of such a one.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    done: bool = False
    malformed: str = ""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """One piece of a stream: new text and the ids behind it; the last one carries the envelope.

    In one delta, reasoning comes before text, and text before calls.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    envelope: Envelope | None = None


def release(envelope: Envelope) -> str:
    """The text of a COMPLETED envelope. Raises `NotReleased` for every other status."""
    if envelope.status is not Status.COMPLETED:
        why = f": {envelope.error}" if envelope.error else ""
        raise NotReleased(f"request {envelope.request_id} ended as {envelope.status.value}{why}; nothing is released")
    return envelope.text
