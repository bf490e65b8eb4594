"""What requests demand of their output -> tables for the device or matchers on the host, each compiled once."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property

from zllm_jax.dialect import Spoken, Tokenizer, call_machine, tools_of
from zllm_jax.engine.fence_store import FenceStore
from zllm_jax.errors import InvalidRequest, UnsupportedGrammar
from zllm_jax.fence import (
    MIN_TOKENS,
    Compiled,
    ForcedRuns,
    HostMatcher,
    HostVocabulary,
    TokenTables,
    Vocabulary,
    compile_fence,
    compile_tokens,
    lark,
)
from zllm_jax.runtime import Watched
from zllm_jax.values import Fence, Request

_KEPT = 64  # grammars
_ROWS_A_TOKEN = 8  # of a prefill, which cost as much as one token's decode step
_BEGIN = "\n"  # the space that the tokenizer adds goes before it


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, shown: frozenset[int] = frozenset()) -> Vocabulary:
    """The tokens that text is made of; control tokens and ids beyond the tokenizer's match none.

    shown: control tokens that are text to some fence (`markup_ids`); the others leave them out.
    """
    silent = tokenizer.special_ids - shown | set(tokenizer.eos_ids)
    tokens = [b"" if token in silent else tokenizer.token_bytes(token) for token in range(vocab_size)]
    return Vocabulary(tokens, tokenizer.eos_ids)


def thinking_of(tokenizer: Tokenizer | None) -> Watched:
    """The tokens around a region of thinking, for the loop guard; none where the tags are several tokens."""
    if tokenizer is None:
        return Watched()
    opens, closes = (tokenizer.encode(tag, add_bos=False) for tag in ("<think>", "</think>"))
    return Watched(opens[0], closes[0]) if len(opens) == len(closes) == 1 else Watched()


def forced_runs_of(tokenizer: Tokenizer, vocabulary: Vocabulary, chunk_tokens: int) -> ForcedRuns:
    """Forced texts as this tokenizer cuts them: as those of a prompt, or else with control tokens as text.

    chunk_tokens: rows of the smallest prefill, whatever the length of a run: they must be worth it.
    """
    begin = _BEGIN if tokenizer.strips_space else ""
    skipped = len(tokenizer.encode(begin, add_bos=False)) if begin else 0

    def encode(text: str) -> Iterator[list[int]]:
        for parse_special in (True, False):
            yield tokenizer.encode(begin + text, add_bos=False, parse_special=parse_special)[skipped:]

    return ForcedRuns(vocabulary, encode, min_tokens=max(MIN_TOKENS, chunk_tokens // _ROWS_A_TOKEN))


@dataclass(frozen=True, eq=False)
class Ready:
    """A fence that can be followed: on the device, or by a matcher on the host. relaxed: what it leaves out."""

    followed: TokenTables | HostMatcher
    relaxed: tuple[str, ...] = ()


class FenceCompiler:
    """Compiles fences over one vocabulary, in the caller's thread; the last few are kept.

    shown: as `vocabulary_of` had it. store: where compiled ones are kept for later engines; None: nowhere.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        max_states: int,
        shown: frozenset[int] = frozenset(),
        store: FenceStore | None = None,
    ) -> None:
        self._vocabulary, self._max_states, self._shown, self._store = vocabulary, max_states, shown, store
        self._parts = {shown: vocabulary}  # by the control tokens that are text in them
        self._kept: OrderedDict[str, Ready] = OrderedDict()
        self._lock = threading.Lock()

    def ready(self, fence: Fence) -> Ready:
        """Raises `UnsupportedGrammar` where the fence cannot be enforced, `InvalidRequest` where it is too large."""
        try:
            key = json.dumps(asdict(fence))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the schema is no JSON: {error}", param="fence") from None
        if fence.lark is not None:
            grammar = fence.lark
            return self._remembered(key, lambda: self._on_host(grammar))

        def compiled() -> Compiled:
            with _named("fence"):
                return compile_fence(fence)

        return self._remembered(key, lambda: self._on_device(key, frozenset(), "fence", compiled))

    def ready_turn(self, spoken: Spoken, request: Request, thinking: bool | None) -> Ready:
        """Of a turn that may reason, call the request's tools, or must be of its fence, which is none for the host.

        thinking: as `call_machine` has it. Raises as `ready` does.
        """
        fence = None if request.fence is None else asdict(request.fence)
        demand = [spoken.name, request.tools, repr(request.tool_choice), request.parallel_tool_calls, thinking, fence]
        param = "tools" if request.tools else "fence"
        try:
            key = json.dumps(demand)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the tools or the schema are no JSON: {error}", param=param) from None

        def compiled() -> Compiled:
            with _named("fence"):
                text = None if request.fence is None else compile_fence(request.fence)
            with _named(param):
                machine = call_machine(
                    spoken.layout,
                    tools_of(request.tools),
                    request.tool_choice,
                    parallel=request.parallel_tool_calls,
                    thinking=thinking,
                    text=None if text is None else text.machine,
                )
            return Compiled(machine, () if text is None else text.relaxed)

        return self._remembered(key, lambda: self._on_device(key, spoken.shown, param, compiled))

    def _remembered(self, key: str, make: Callable[[], Ready]) -> Ready:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made

    def _on_device(self, key: str, shown: frozenset[int], param: str, compile_: Callable[[], Compiled]) -> Ready:
        vocabulary = self._part(shown)
        stored = None if self._store is None else self._store.get(key, vocabulary)
        if stored is not None and stored[0].machine.num_states <= self._max_states - 2:
            return Ready(*stored)
        compiled = compile_()
        if compiled.machine.num_states > self._max_states - 2:
            raise InvalidRequest(
                f"the fence has {compiled.machine.num_states} states, but there is room for {self._max_states - 2}: "
                "raise EngineConfig.fence_states, or simplify the grammar",
                param=param,
            )
        made = Ready(tables := compile_tokens(compiled.machine, vocabulary), compiled.relaxed)
        if self._store is not None:
            self._store.put(key, tables, made.relaxed)
        return made

    def _on_host(self, grammar: str) -> Ready:
        return Ready(self._host_vocabulary.matcher(lark(grammar)))

    @cached_property
    def _host_vocabulary(self) -> HostVocabulary:
        plain = self._part(frozenset())
        return HostVocabulary(plain.tokens, plain.eos_ids)

    def _part(self, shown: frozenset[int]) -> Vocabulary:
        """The vocabulary in which these control tokens are text, and no others."""
        with self._lock:
            if shown not in self._parts:
                self._parts[shown] = self._vocabulary.without(self._shown - shown)
            return self._parts[shown]


@contextmanager
def _named(param: str) -> Iterator[None]:
    """What is refused in here is refused in the name of a parameter."""
    try:
        yield
    except UnsupportedGrammar as error:
        error.param = param
        raise
