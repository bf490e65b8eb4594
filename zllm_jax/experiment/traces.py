"""Traces for cache experiments: made from published statistics, or read from a file in the format of Mooncake."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zllm_jax.errors import ConfigError

BLOCK_TOKENS = 512  # of the Mooncake format
_VOCAB = 49_152


@dataclass(frozen=True)
class Ask:
    """One request: prompt i32[S] and the reply that it got; `prompt_tokens` is the prompt's true length."""

    prompt: np.ndarray
    reply: np.ndarray
    prompt_tokens: int


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival. Each id in them stands for `unit_tokens` tokens."""

    name: str
    asks: tuple[Ask, ...]
    unit_tokens: int = 1


@dataclass(frozen=True, kw_only=True)
class Agents:
    """A mix of chats, agents and single calls, with the published statistics that it follows.

    Lengths are tokens, times are seconds, both are medians; what varies is drawn from a log-normal distribution whose
    logarithm has the spread given.

    Published:

    - chat_turns: 3.5 a conversation in ShareGPT (table 1 of ShareChat, arXiv 2512.17843).
    - chat_prompt, call_prompt, chat_reply: 7,590 tokens of input and 182 of output a request (Mooncake, arXiv
      2407.00079; means there).
    - pause, pause_spread: 80 % of reuses come within 10 minutes ("KVCache Cache in the Wild", arXiv 2506.02634,
      trace A).
    - calls: single requests after one of a few shared templates, as they prevail in trace B of arXiv 2506.02634.
    - agent_system: about 12,400 tokens that describe what may be called and 2,800 to 4,200 of instructions (data set
      semianalysisai/cc-traces-weka-042026).
    - agent_turns, agent_step, agent_reply: 33 turns, a few hundred to a few thousand new tokens in each, 80,000 after
      30 turns, 131 tokens of input to one of output (Codex on SWE-bench Pro, in the vLLM project's "Serving agentic
      workloads at scale with vLLM x Mooncake", May 2026).

    Assumed, because nothing published was found: the shares of `chats` and `calls` among sessions (the rest are
    agents) and how often sessions begin; call_time and its spread between sessions (pace) and steps; the number of
    templates; `forks` (how often a turn is asked again from one of the last three), `branches` (tasks that begin with
    num_branches attempts side by side, of which one goes on) and `helpers` (turns after which an agent starts a
    conversation of its own and ends it). A conversation ends when it reaches max_tokens.
    """

    name: str
    requests: int = 6000
    session_every_s: float = 1.0
    chats: float = 0.3
    calls: float = 0.68
    forks: float = 0.03
    branches: float = 0.0
    num_branches: int = 4
    helpers: float = 0.03
    max_tokens: int = 100_000
    length_spread: float = 0.8
    chat_turns: float = 3.5
    chat_system: int = 1000
    chat_prompt: int = 3000
    chat_message: int = 300
    chat_reply: int = 132
    pause: float = 120.0
    pause_spread: float = 1.9
    call_prompt: int = 4000
    template: int = 4000
    num_templates: int = 6
    agent_system: int = 16_000
    agent_task: int = 1000
    agent_tasks: float = 2.0
    agent_turns: int = 33
    agent_step: int = 1300
    agent_reply: int = 380
    call_time: float = 8.0
    pace_spread: float = 1.0
    step_spread: float = 0.8
    helper_system: int = 6000
    helper_turns: int = 8

    def __post_init__(self) -> None:
        if self.chats + self.calls > 1:
            raise ConfigError(f"trace {self.name}: chats {self.chats:g} and calls {self.calls:g} are more than 1")
        if self.requests < 1:
            raise ConfigError(f"trace {self.name}: requests is {self.requests}, must be at least 1")


Step = tuple[float, np.ndarray, np.ndarray]
"""Seconds since the session's step before, prompt, reply."""
Talk = Generator[Step, None, np.ndarray]
"""Steps, and at the end all that was said."""


def make_trace(settings: Agents, seed: int) -> Trace:
    """The trace of these settings and this seed."""
    maker = _Maker(settings, np.random.default_rng(seed))
    return Trace(settings.name, tuple(maker.asks()))


def read_mooncake(path: str | Path, name: str, limit: int | None = None) -> Trace:
    """The first `limit` requests of a JSON-lines file: input_length, hash_ids (one for each 512 tokens of input).

    One id stands for its 512 tokens. Replies are left out: the file does not name their tokens, and the next turn
    brings them as part of its input. Raises ConfigError naming the line.
    """
    asks: list[Ask] = []
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(asks) == limit:
                    break
                if line.strip():
                    asks.append(_read_ask(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not asks:
        raise ConfigError(f"{path} holds no request")
    return Trace(name, tuple(asks), BLOCK_TOKENS)


def _read_ask(line: str, where: str) -> Ask:
    try:
        record: Any = json.loads(line)
        length, ids = int(record["input_length"]), np.array(record["hash_ids"], np.int32)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ConfigError(f"{where} is no request of a Mooncake trace: {error!r}") from None
    if ids.ndim != 1 or len(ids) == 0 or len(ids) != math.ceil(length / BLOCK_TOKENS):
        raise ConfigError(f"{where}: {len(ids)} hash_ids for {length} tokens, must be one for each {BLOCK_TOKENS}")
    return Ask(ids, np.zeros(0, np.int32), length)


@dataclass(frozen=True)
class _Manner:
    """How one session talks: tokens of a message and of a reply, seconds between a reply and the next message."""

    message: int
    reply: int
    pause_s: float
    spread: float


class _Maker:
    """Sessions that begin at random times and run side by side."""

    def __init__(self, settings: Agents, rng: np.random.Generator) -> None:
        self._settings, self._rng = settings, rng
        s = settings
        self._agent_systems = [self._text(s.agent_system, 0.0) for _ in range(2)]
        self._chat_systems = [self._text(s.chat_system, 0.0) for _ in range(3)]
        self._helper_system = self._text(s.helper_system, 0.0)
        self._templates = [self._text(s.template, 0.3) for _ in range(s.num_templates)]

    def asks(self) -> Iterator[Ask]:
        """`requests` requests in the order of time."""
        steps = _merged((begin_s, self._session()) for begin_s in self._begins())
        for _, prompt, reply in itertools.islice(steps, self._settings.requests):
            yield Ask(prompt, reply, len(prompt))

    def _begins(self) -> Iterator[float]:
        begin_s = 0.0
        while True:
            yield begin_s
            begin_s += self._rng.exponential(self._settings.session_every_s)

    def _session(self) -> Iterator[Step]:
        kind = self._rng.random()
        if kind < self._settings.chats:
            return self._chat()
        return self._call() if kind < self._settings.chats + self._settings.calls else self._agent()

    def _call(self) -> Iterator[Step]:
        s = self._settings
        ranks = np.arange(1, len(self._templates) + 1)
        which = self._rng.choice(len(ranks), p=(1 / ranks) / (1 / ranks).sum())
        yield 0.0, np.concatenate([self._templates[which], self._text(s.call_prompt)]), self._text(s.chat_reply)

    def _chat(self) -> Iterator[Step]:
        s = self._settings
        said = np.concatenate([self._pick(self._chat_systems), self._text(s.chat_prompt)])
        manner = _Manner(s.chat_message, s.chat_reply, s.pause, s.pause_spread)
        yield from self._turns(said, self._rng.geometric(1 / s.chat_turns), manner)

    def _agent(self) -> Iterator[Step]:
        """Tasks of one user; each is a loop of calls and their results, with attempts and helpers in between."""
        s = self._settings
        pace_s = self._wait(s.call_time, s.pace_spread)
        manner = _Manner(s.agent_step, s.agent_reply, pace_s, s.step_spread)
        said, wait_s = self._pick(self._agent_systems), 0.0
        for _ in range(self._rng.geometric(1 / s.agent_tasks)):
            said = np.concatenate([said, self._text(s.agent_task)])
            turns = self._count(s.agent_turns / s.agent_tasks)
            if self._rng.random() < s.branches:
                said = yield from self._attempts(said, max(1, turns // 3), manner, wait_s)
                wait_s = self._pause(manner)
            said = yield from self._work(said, turns, manner, wait_s)
            wait_s = self._wait(s.pause, s.pause_spread)

    def _attempts(self, said: np.ndarray, turns: int, manner: _Manner, wait_s: float) -> Talk:
        """Several go on side by side from one state; returns what was said in one of them."""
        ends: list[np.ndarray] = []

        def attempt() -> Iterator[Step]:
            ends.append((yield from self._turns(said, turns, manner, self._pause(manner))))

        yield from _merged((wait_s, attempt()) for _ in range(self._settings.num_branches))
        return self._pick(ends)

    def _work(self, said: np.ndarray, turns: int, manner: _Manner, wait_s: float) -> Talk:
        """A loop of calls, interrupted by helpers."""
        s = self._settings
        while turns > 0:
            part = min(turns, self._rng.geometric(s.helpers)) if s.helpers else turns
            said = yield from self._turns(said, part, manner, wait_s)
            wait_s = self._pause(manner)
            turns -= part
            if turns > 0:
                helper = np.concatenate([self._helper_system, self._text(s.agent_task)])
                yield from self._turns(helper, self._count(s.helper_turns), manner, wait_s)
        return said

    def _turns(self, said: np.ndarray, turns: int, manner: _Manner, wait_s: float = 0.0) -> Talk:
        """Requests that each continue all that was said before; returns what was said at the end."""
        earlier = [said]
        for turn in range(turns):
            if len(said) >= self._settings.max_tokens:
                break
            answer = self._text(manner.reply)
            yield wait_s, said, answer
            said = np.concatenate([said, answer, self._text(manner.message)])
            wait_s = self._pause(manner)
            earlier.append(said)
            if turn + 1 < turns and self._rng.random() < self._settings.forks:
                del earlier[-min(len(earlier) - 1, int(self._rng.integers(1, 4))) :]
                said = earlier[-1]
        return said

    def _pause(self, manner: _Manner) -> float:
        return self._wait(manner.pause_s, manner.spread)

    def _text(self, median_tokens: float, spread: float | None = None) -> np.ndarray:
        spread = self._settings.length_spread if spread is None else spread
        tokens = median_tokens * self._rng.lognormal(0.0, spread)
        limit = self._settings.max_tokens // 2
        return self._rng.integers(0, _VOCAB, max(1, min(limit, round(tokens))), dtype=np.int32)

    def _count(self, median: float) -> int:
        return max(1, round(median * self._rng.lognormal(0.0, 0.6)))

    def _wait(self, median_s: float, spread: float) -> float:
        return float(median_s * self._rng.lognormal(0.0, spread))

    def _pick(self, texts: list[np.ndarray]) -> np.ndarray:
        return texts[int(self._rng.integers(len(texts)))]


def _merged(sessions: Iterable[tuple[float, Iterator[Step]]]) -> Iterator[Step]:
    """The steps of sessions that begin at the given seconds, in ascending order, and run side by side."""
    coming, waiting, numbers = iter(sessions), list[tuple[float, int, Step, Iterator[Step]]](), itertools.count()

    def wait(since_s: float, session: Iterator[Step]) -> None:
        step = next(session, None)
        if step is not None:
            heapq.heappush(waiting, (since_s + step[0], next(numbers), step, session))

    upcoming, now_s = next(coming, None), 0.0
    while waiting or upcoming is not None:
        if upcoming is not None and (not waiting or upcoming[0] <= waiting[0][0]):
            wait(*upcoming)
            upcoming = next(coming, None)
            continue
        time_s, _, (_, prompt, reply), session = heapq.heappop(waiting)
        yield time_s - now_s, prompt, reply
        now_s = time_s
        wait(time_s, session)
