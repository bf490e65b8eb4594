"""What a request has put out so far: ids, text, calls, and how much of the text may already be shown.

Text goes out only when it can no longer be part of a stop sequence, of an unfinished character, or of a call's markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from zllm_jax.dialect import Detokenizer, Tokenizer, ToolParser
from zllm_jax.dialect.tool_parser import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    CallMalformed,
    Event,
    ReasoningDelta,
    TextDelta,
    TextStands,
)
from zllm_jax.runtime import Drawn
from zllm_jax.scheduler import Outcome, clock
from zllm_jax.values import AllowedTools, CallDelta, Delta, Envelope, Request, Status, TokenLogprob


@dataclass(frozen=True, eq=False)
class Reading:
    """How an output is read that may hold reasoning or calls. shown: control tokens that are text in its dialect."""

    dialect: str
    parser: ToolParser
    shown: frozenset[int] = frozenset()


def text_stands(request: Request) -> TextStands:
    """Where the text stands in a request's output, as its parser must know."""
    choice = request.tool_choice
    if not request.tools or choice == "none":
        return "alone"
    may_call = choice == "auto" or (isinstance(choice, AllowedTools) and not choice.required)
    return "instead" if request.fence is not None and may_call else "beside"


class Output:
    """Of one request. stop: texts that end it; they are looked for in what is shown, not in reasoning nor in calls.

    reading: None where all of the output is text.
    """

    def __init__(self, stop: Sequence[str], tokenizer: Tokenizer | None, reading: Reading | None = None) -> None:
        self._stop, self._reading = stop, reading
        shown = reading.shown if reading is not None else frozenset[int]()
        self._text = Detokenizer(tokenizer, continuing=True, shown=shown) if tokenizer is not None else None
        self.tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._shown, self._held = "", ""
        self._malformed: list[str] = []
        self.stop_text: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_text is not None

    def feed(self, drawn: Sequence[Drawn]) -> list[Delta]:
        """The visible part of new tokens; tokens after a stop sequence are dropped."""
        fresh: list[Drawn] = []
        parts = _Parts()
        for one in drawn:
            if self.stopped:
                break
            fresh.append(one)
            if self._text is not None:
                self._read(self._text.feed([one.token]), parts)
        if not fresh:
            return []
        parts.text(self._visible())
        logprobs = tuple(one.logprob for one in fresh if one.logprob is not None)
        tokens = tuple(one.token for one in fresh)
        self.tokens += tokens
        self._logprobs += logprobs
        first, *rest = parts.made or [Delta()]
        return [replace(first, tokens=tokens, logprobs=logprobs), *rest]

    def close(self) -> list[Delta]:
        """What was held back to the end. Where calls are read, half a character at the end is nothing."""
        parts = _Parts()
        if self._text is not None and not self.stopped:
            if self._reading is None:
                self._read(self._text.close(), parts)
            else:
                self._take(self._reading.parser.close(), parts)
        rest, self._held = ("" if self.stopped else self._held), ""
        self._shown += rest
        parts.text(rest)
        return parts.made

    def envelope(self, request_id: str, outcome: Outcome) -> Envelope:
        stopped = self.stopped and outcome.status in (Status.COMPLETED, Status.TRUNCATED)
        telemetry = outcome.telemetry
        if stopped:  # the sequence may have ended in another way before the scheduler heard of the stop
            telemetry = replace(telemetry, finish="stop", stop_text=self.stop_text)
        timing = outcome.timing
        made = Envelope(
            request_id=request_id,
            status=Status.COMPLETED if stopped else outcome.status,
            tokens=tuple(self.tokens),
            text=self._shown,
            usage=replace(outcome.usage, generated_tokens=len(self.tokens)),
            timing=replace(timing, post_s=timing.post_s + clock() - outcome.ended),
            telemetry=telemetry,
            logprobs=tuple(self._logprobs),
            conversation=outcome.conversation,
            error=outcome.error,
        )
        if self._reading is None:
            return made
        turn = self._reading.parser.turn()
        telemetry = replace(telemetry, tool_dialect=self._reading.dialect, malformed_calls=tuple(self._malformed))
        return replace(made, reasoning=turn.reasoning, calls=turn.calls, telemetry=telemetry)

    def _read(self, piece: str, parts: _Parts) -> None:
        if self._reading is None:
            self._held += piece
            self._look_for_stop()
        else:
            self._take(self._reading.parser.feed(piece), parts)

    def _take(self, events: Iterable[Event], parts: _Parts) -> None:
        for event in events:
            if self.stopped:
                return
            if isinstance(event, TextDelta):
                self._held += event.text
                self._look_for_stop()
                continue
            self._shown += self._held  # a stop sequence does not go on behind what is no text
            parts.text(self._held)
            self._held = ""
            if isinstance(event, ReasoningDelta):
                parts.reasoning(event.text)
                continue
            if isinstance(event, CallMalformed):
                self._malformed.append(f"{event.reason}: {event.text}")
            parts.call(_call_delta(event))

    def _look_for_stop(self) -> None:
        found = [(at, text) for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            at, self.stop_text = min(found)
            self._held = self._held[:at]

    def _visible(self) -> str:
        """Everything held but the longest suffix that may begin a stop sequence."""
        keep = 0
        if not self.stopped:
            keep = max((_overlap(self._held, text) for text in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        self._shown += text
        return text


@dataclass(eq=False)
class _Parts:
    """Pieces as deltas: one more wherever a piece would stand before its time in the last one."""

    made: list[Delta] = field(default_factory=list)

    def reasoning(self, text: str) -> None:
        last = self._last(lambda one: not one.text and not one.calls)
        self.made[-1] = replace(last, reasoning=last.reasoning + text)

    def text(self, text: str) -> None:
        if text:
            last = self._last(lambda one: not one.calls)
            self.made[-1] = replace(last, text=last.text + text)

    def call(self, piece: CallDelta) -> None:
        last = self._last(lambda one: True)
        self.made[-1] = replace(last, calls=(*last.calls, piece))

    def _last(self, fits: Callable[[Delta], bool]) -> Delta:
        if not self.made or not fits(self.made[-1]):
            self.made.append(Delta())
        return self.made[-1]


def _call_delta(event: CallBegin | ArgumentsDelta | CallEnd | CallMalformed) -> CallDelta:
    if isinstance(event, CallBegin):
        return CallDelta(index=event.index, id=event.id, name=event.name)
    if isinstance(event, ArgumentsDelta):
        return CallDelta(index=event.index, arguments=event.json)
    if isinstance(event, CallEnd):
        return CallDelta(index=event.index, done=True)
    return CallDelta(index=event.index, malformed=f"{event.reason}: {event.text}")


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
