"""Exact replay: a prompt continues the very ids that were generated, whatever the template would make of them now."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dialect.test_tokenizer import llama2_files
from tests.engine.talker import PieceTokenizer
from zllm_jax.checkpoint import open_checkpoint
from zllm_jax.dialect import ChatTemplate, Replay, Tokenizer, load_tokenizer
from zllm_jax.dialect.remembered import MAX_ANSWERS
from zllm_jax.dialect.replay import MAX_META_BYTES
from zllm_jax.dialect.turns import Turn, keys, owner_of

FIRST_PIECE = 259
VOCAB = 1000
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
USER = {"role": "user", "content": "ready?"}
THEN = {"role": "user", "content": "and then?"}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


class Talk:
    """Conversations over bytes and pieces: what was answered to which messages, and what a prompt becomes."""

    def __init__(self, source: str = PLAIN, **options: Any) -> None:
        self.tokenizer = PieceTokenizer()
        self.template = ChatTemplate(source)
        self.replay = Replay(self.tokenizer, self.template, **{"vocab_size": VOCAB} | options)  # type: ignore[arg-type]
        self.number = 0

    def prompt(self, messages: Sequence[Any], **options: Any) -> list[int]:
        return self.replay.prompt(messages, **options) or self.tokenizer.encode(
            self.template.render(messages, options.get("tools"))
        )

    def answer(
        self, messages: Sequence[Any], *pieces: str | bytes, given: str | None = None, **options: Any
    ) -> list[int]:
        """One token a piece; the ids of prompt and answer."""
        prompt = self.prompt(messages, **options)
        data = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        first = FIRST_PIECE + len(self.tokenizer.pieces)
        self.tokenizer.pieces = [*self.tokenizer.pieces, *data]
        sampled = list(range(first, first + len(data)))
        content = b"".join(data).decode(errors="replace") if given is None else given
        self.number += 1
        options = {name: options[name] for name in ("tools", "tenant") if name in options}
        self.replay.remember(
            f"r{self.number}",
            messages,
            np.array(prompt, np.int32),
            sampled,
            content,
            stopped=given is not None,
            **options,
        )
        return [*prompt, *sampled]

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode()


# -- templates that render a past turn otherwise than it was generated -------------------------------------------------

TRIMS = PLAIN.replace("m.content }}", "m.content | trim }}")
NEWLINE_BEFORE_CALLS = PLAIN.replace("m.content }}", "m.content | replace('<call>', '\\n<call>') }}")
THINKS_LAST = (  # as Qwen3's does it: thoughts stay in the turns after the last question only
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set text = m.content.split('</think>')[-1] %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think></think>{% endif %}{{ text }}</>{% endfor %}"
    "<assistant>"
)
SORTS = PLAIN.replace("m.content }}", "m.content | list | sort | join }}")
SHOUTS = PLAIN.replace("m.content }}", "m.content | upper }}")


@pytest.mark.parametrize(
    ("source", "pieces"),
    [
        (PLAIN, ("y", "es")),
        (TRIMS, (" ", "yes", " \n")),
        (NEWLINE_BEFORE_CALLS, ("sure", "<call>f</call>")),
        (THINKS_LAST, ("<think>", "hm", "</think>", "yes")),
        (SORTS, ("<t>2</t>", "b", "<t>1</t>", "a")),
        (SHOUTS, ("quiet",)),
        (PLAIN, ()),
    ],
)
def test_history_is_what_was_generated(source: str, pieces: tuple[str, ...]) -> None:
    """Known faults 2, 4, 6, 8; three turns, each prompt begins with all that was computed before it."""
    talk = Talk(source)
    messages: list[Any] = [USER]
    state: list[int] = []
    for turn in range(3):
        prompt = talk.prompt(messages)
        assert prompt[: len(state)] == state
        if turn:
            shown = talk.text(prompt[len(state) :]).lower()
            assert sorted(shown) == sorted("</><user>and then?</><assistant>")
        state = talk.answer(messages, *pieces)
        messages += [said("".join(pieces)), THEN]


def test_ids_are_replayed_not_their_text() -> None:
    """The same text would be encoded to bytes; a control token inside, which is no text, comes back too."""
    talk = Talk()
    prompt = np.array(talk.prompt([USER]), np.int32)
    talk.tokenizer.pieces = [b"yes"]
    sampled = [FIRST_PIECE, talk.tokenizer.pad_id, ord("!")]
    talk.replay.remember("r", [USER], prompt, sampled, "yes!")
    replayed = talk.replay.prompt([USER, said("yes!"), THEN])
    assert replayed is not None
    assert replayed[: len(prompt) + 3] == [*prompt.tolist(), *sampled]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages if m.role != 'assistant' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>",
        PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"),
        PLAIN.replace("{{ m.content }}", "{{ m.content[:4] }}"),
        "{% if messages[1:] and messages[1].content != 'yes' %}{{ raise_exception('edited') }}{% endif %}" + PLAIN,
    ],
)
def test_a_template_that_loses_the_turn_gets_no_replay(source: str) -> None:
    talk = Talk(source)
    talk.answer([USER], "yes")
    assert talk.replay.prompt([USER, said("yes"), THEN]) is None


# -- what the client changed -------------------------------------------------------------------------------------------


def test_the_first_change_ends_the_replay() -> None:
    talk = Talk()
    state = talk.answer([USER], "one ", "two ", "three")
    prompt = talk.prompt([USER, said("one two 3"), THEN])
    assert prompt[: len(state) - 1] == state[:-1]
    assert talk.text(prompt[len(state) - 1 :]) == "3</><user>and then?</><assistant>"


def test_a_change_inside_a_token_leaves_it_out() -> None:
    talk = Talk()
    state = talk.answer([USER], "one ", "two ", "three")
    prompt = talk.prompt([USER, said("one twx"), THEN])
    assert prompt[: len(state) - 2] == state[:-2]
    assert talk.text(prompt[len(state) - 2 :]).startswith("twx</>")


def test_a_turn_with_nothing_in_common_is_rendered_behind_the_one_before() -> None:
    talk = Talk(TRIMS)
    first = [USER, said(" yes "), THEN]
    state = talk.answer([USER], " yes ")
    talk.answer(first, "no")
    prompt = talk.prompt([*first, said("never"), THEN])
    assert prompt[: len(state)] == state
    assert talk.text(prompt[len(state) :]) == "</><user>and then?</><assistant>never</><user>and then?</><assistant>"


def test_messages_before_the_turn_decide() -> None:
    talk = Talk()
    talk.answer([USER], "yes")
    other = {"role": "user", "content": "Ready?"}
    assert talk.replay.prompt([other, said("yes"), THEN]) is None
    assert talk.replay.prompt([USER, said("yes"), THEN], tenant="other") is None
    assert talk.replay.prompt([USER, said("yes"), THEN], tools=[{"name": "f"}]) is None
    assert talk.replay.prompt([said("yes"), THEN]) is None
    assert talk.replay.prompt([USER]) is None


def test_what_means_the_same_has_the_same_key() -> None:
    plain = [USER, said("yes", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}])]
    spelled = [
        {"content": [{"type": "text", "text": "rea"}, {"type": "text", "text": "dy?"}], "role": "user", "name": None},
        said(
            "yes",
            refusal=None,
            annotations=[],
            tool_calls=[{"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}],
        ),
    ]
    assert list(keys(plain, (), "")) == list(keys(spelled, (), ""))
    edited = [USER, said("yes", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": '{"a": 2}'}}])]
    assert [a == b for a, b in zip(keys(plain, (), ""), keys(edited, (), ""), strict=True)] == [True, True, False]


def test_parts_in_and_parts_out() -> None:
    """A template that takes the parts of a content gets parts."""
    source = PLAIN.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    talk = Talk(source)
    question = {"role": "user", "content": [{"type": "text", "text": "ready?"}]}
    state = talk.answer([question], "y", "es")
    prompt = talk.prompt([question, said([{"type": "text", "text": "ye"}, {"type": "text", "text": "s"}]), question])
    assert prompt[: len(state)] == state
    picture = said([{"type": "image_url", "image_url": {}}])
    assert talk.replay.prompt([question, picture, question]) is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("ab é👋", min_size=1, max_size=3), max_size=6),
    st.lists(st.integers(1, 4), min_size=30, max_size=30),
    st.text("ab é👋", max_size=8),
    st.integers(0, 12),
)
def test_any_answer_any_echo(said_: list[str], cuts: list[int], other: str, keep: int) -> None:
    """The prompt reads as prompt, echo, rest, and its ids are the sampled ones as far as the echo agrees."""
    answer, pieces = "".join(said_), []
    data = answer.encode()
    for size in cuts:
        pieces += [data[:size]] if data else []
        data = data[size:]
    talk = Talk()
    state = talk.answer([USER], *pieces)
    echo = answer[:keep] + other
    prompt = talk.prompt([USER, said(echo), THEN])
    assert talk.text(prompt) == f"<user>ready?</><assistant>{echo}</><user>and then?</><assistant>"
    agree, start = 0, len(state) - len(pieces)
    for number in range(len(pieces) + 1):
        if f"{echo}\0".encode().startswith(b"".join(pieces[:number])):
            text = b"".join(pieces[:number]).decode(errors="ignore").encode()
            agree = number if text == b"".join(pieces[:number]) else agree
    assert prompt[: start + agree] == state[: start + agree]


def test_a_stop_sequence_inside_a_token() -> None:
    """The client was given less than was sampled: what it was given is replayed, the rest of it encoded."""
    talk = Talk()
    state = talk.answer([USER], "one ", "two<st", "op>", given="one two")
    prompt = talk.prompt([USER, said("one two"), THEN])
    assert prompt[: len(state) - 2] == state[:-2]
    assert talk.text(prompt[len(state) - 2 :]) == "two</><user>and then?</><assistant>"


def test_half_a_character_at_the_end() -> None:
    """max_tokens cut it: the client has a replacement character, the state has the bytes."""
    talk = Talk()
    state = talk.answer([USER], "hi ", "👋".encode()[:2])
    assert talk.prompt([USER, said("hi \ufffd"), THEN])[: len(state)] == state


def test_text_that_is_none_gets_no_replay() -> None:
    talk = Talk()
    talk.answer([USER], "yes")
    assert talk.replay.prompt([USER, said("yes"), {"role": "user", "content": "\ud800"}]) is None
    assert talk.replay.prompt([USER, said("y\ud800"), THEN]) is None


# -- calls -------------------------------------------------------------------------------------------------------------

WITH_CALLS = PLAIN.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or () %}{% set f = c.function %}[{{ f.name }}:{{ f.arguments | tojson }}]"
    "{% endfor %}",
)
CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "3"}


def call(**changed: Any) -> dict[str, Any]:
    return CALL | {"function": CALL["function"] | changed}  # type: ignore[operator]


@pytest.mark.parametrize("named", [[CALL], ["call-1"]])
@pytest.mark.parametrize("arguments", ['{"a": 1, "b": 2}', '{"b":2,"a":1}', {"b": 2, "a": 1}])
def test_calls_that_were_serialised_anew(named: list[Any], arguments: Any) -> None:
    """Known fault 7."""
    talk = Talk(WITH_CALLS)
    state = talk.answer([USER], "I add.", "<call>", 'add{"a" : 1,"b" : 2}', "</call>")
    talk.replay.name_calls("r1", named, "I add.")
    echo = said("I add.", tool_calls=[call(arguments=arguments)])
    prompt = talk.prompt([USER, echo, RESULT])
    assert prompt[: len(state)] == state
    assert talk.text(prompt[len(state) :]) == "</><tool>3</><assistant>"


def test_a_changed_call_is_rendered_behind_the_text() -> None:
    talk = Talk(WITH_CALLS)
    state = talk.answer([USER], "I add.", "<call>add</call>")
    talk.replay.name_calls("r1", [CALL], "I add.")
    prompt = talk.prompt([USER, said("I add.", tool_calls=[call(arguments={"a": 1})]), RESULT])
    assert prompt[: len(state) - 1] == state[:-1]
    assert talk.text(prompt[len(state) - 1 :]) == '[add:{"a": 1}]</><tool>3</><assistant>'


def test_a_changed_call_that_the_template_puts_elsewhere_gets_no_replay() -> None:
    talk = Talk(WITH_CALLS.replace("{{ m.content }}", "").replace("</>", "{{ m.content }}</>"))
    talk.answer([USER], "I add.", "<call>add</call>")
    talk.replay.name_calls("r1", [CALL], "I add.")
    assert talk.replay.prompt([USER, said("I add.", tool_calls=[call(arguments={"a": 1})]), RESULT]) is None


def test_a_result_finds_the_turn_that_made_the_call() -> None:
    """Two answers to the same messages, and a client that sends neither call back: the id says which."""
    talk = Talk(WITH_CALLS)
    first = talk.answer([USER], "<call>one</call>")
    talk.replay.name_calls("r1", ["call-1"])
    second = talk.answer([USER], "<call>two</call>")
    talk.replay.name_calls("r2", ["call-2"])
    for state, id in ((first, "call-1"), (second, "call-2"), (first, "call-1")):
        assert talk.prompt([USER, said(None), RESULT | {"tool_call_id": id}])[: len(state)] == state
    assert talk.replay.prompt([USER, said(None), RESULT | {"tool_call_id": "call-3"}]) is None


def test_naming_what_is_forgotten_is_nothing() -> None:
    talk = Talk()
    talk.replay.name_calls("r1", ["call-1"])
    assert len(talk.replay) == 0


# -- several answers, memory, storage ----------------------------------------------------------------------------------


def test_of_several_answers_the_one_that_comes_back() -> None:
    talk = Talk()
    states = [talk.answer([USER], *pieces) for pieces in (("yes",), ("y", "es", "!"), ("no", "pe"))]
    for state, echo in zip(states, ("yes", "yes!", "nope"), strict=True):
        assert talk.prompt([USER, said(echo), THEN])[: len(state)] == state


def test_the_newest_of_equal_answers() -> None:
    talk = Talk()
    talk.answer([USER], "yes")
    newest = talk.answer([USER], "y", "es")
    assert talk.prompt([USER, said("yes"), THEN])[: len(newest)] == newest


def test_memory_is_bounded_and_the_least_recently_used_go() -> None:
    talk = Talk(max_bytes=10_000)
    questions = [{"role": "user", "content": f"question {number}"} for number in range(60)]
    for question in questions:
        talk.answer([question], "yes")
        assert talk.replay.nbytes <= 10_000
        assert talk.replay.prompt([questions[0], said("yes"), THEN]) is not None  # used, and so kept
    assert len(talk.replay) < 20
    assert talk.replay.prompt([questions[-1], said("yes"), THEN]) is not None
    assert talk.replay.prompt([questions[1], said("yes"), THEN]) is None
    before = (len(talk.replay), talk.replay.nbytes)
    talk.answer([{"role": "user", "content": "x" * 3000}], "too large to keep")
    assert (len(talk.replay), talk.replay.nbytes) == before


def test_answers_to_the_same_messages_are_bounded() -> None:
    talk = Talk()
    for number in range(MAX_ANSWERS + 1):
        talk.answer([USER], f"answer {number}")
    assert len(talk.replay) == MAX_ANSWERS
    assert talk.replay.prompt([USER, said("answer 1"), THEN]) is not None


LONG_CALL = call(arguments={"text": "x" * 500_000})


@pytest.mark.parametrize("content, calls", [("é" * 500_000, ()), ("\U0001f600" * 100_000, ()), ("", [LONG_CALL] * 2)])
def test_everything_that_a_turn_holds_counts(content: str, calls: Sequence[Any]) -> None:
    """Texts, calls, ids and what keeping them costs: no less than what is in use."""
    talk, prompt = Talk(), np.arange(100, dtype=np.int32)
    tracemalloc.start()
    try:
        for number in range(200):
            talk.replay.remember(f"r{number}", [], prompt, [number], f"few {number}", tenant=f"tenant {number}")
            talk.replay.name_calls(f"r{number}", [call(id=f"id {number}") for _ in range(3)], f"few {number}")
        assert tracemalloc.get_traced_memory()[0] <= talk.replay.nbytes
        talk.replay.remember("long", [], prompt, [1], content)
        talk.replay.name_calls("long", json.loads(json.dumps(calls)), content)
        assert tracemalloc.get_traced_memory()[0] <= talk.replay.nbytes
    finally:
        tracemalloc.stop()


def test_a_state_is_not_kept_for_the_few_ids_of_a_stored_turn() -> None:
    talk = Talk()
    assert talk.replay.recall(np.arange(VOCAB, dtype=np.int32), {"turns": [GOOD]}) == 1
    (turn,) = talk.replay._turns.all()
    assert turn.ids.base is None


def test_one_tenant_cannot_push_out_all_that_another_has() -> None:
    talk = Talk(max_bytes=40_000)
    told = [{"role": "user", "content": f"question {number}"} for number in range(60)]
    for number in range(4):
        talk.answer([told[number]], "yes", tenant="few")
    for question in told:
        talk.answer([question], "yes", tenant="many")
    assert talk.replay.nbytes <= 40_000
    assert all(talk.replay.prompt([told[i], said("yes"), THEN], tenant="few") is not None for i in range(4))
    found = [talk.replay.prompt([question, said("yes"), THEN], tenant="many") is not None for question in told]
    assert found == sorted(found)  # of its own the oldest went
    assert 4 < sum(found) < 30


def test_the_same_answer_twice_is_kept_once() -> None:
    talk = Talk()
    prompt = np.array(talk.prompt([USER]), np.int32)
    for _ in range(3):
        talk.replay.remember("r", [USER], prompt, [1, 2], "\x01\x02")
    assert len(talk.replay) == 1


def stored(talk: Talk, state: Sequence[int]) -> tuple[np.ndarray, Any]:
    """What a snapshot would keep, after a trip through JSON."""
    tokens = np.array(state, np.int32)
    return tokens, json.loads(json.dumps(talk.replay.meta(tokens)))


def test_turns_survive_in_their_snapshot() -> None:
    """All turns of the conversation, none of another; the last id, which a state never holds, included."""
    talk = Talk(TRIMS)
    messages: list[Any] = [USER]
    states = []
    for _ in range(3):
        states.append(talk.answer(messages, " y", "es "))
        messages += [said(" yes "), THEN]
    talk.answer([THEN], "of another conversation")
    tokens, meta = stored(talk, states[-1][:-1])
    later = Talk(TRIMS)
    later.tokenizer.pieces = talk.tokenizer.pieces
    assert later.replay.recall(tokens, meta) == 3
    assert later.prompt(messages) == talk.prompt(messages)
    assert later.prompt(messages)[: len(states[-1])] == states[-1]
    assert later.prompt(messages[:-2])[: len(states[1])] == states[1]


def test_calls_survive_too() -> None:
    talk = Talk(WITH_CALLS)
    state = talk.answer([USER], "<call>add</call>")
    talk.replay.name_calls("r1", [CALL])
    later = Talk(WITH_CALLS)
    later.tokenizer.pieces = talk.tokenizer.pieces
    later.replay.recall(*stored(talk, state))
    assert later.prompt([USER, said("", tool_calls=[call()]), RESULT])[: len(state)] == state


def test_meta_is_bounded_and_prefers_the_newest() -> None:
    talk = Talk()
    prompt = np.arange(10, dtype=np.int32)
    talk.replay.remember("a", [USER], prompt, [1], "x" * 400_000)
    talk.replay.remember("b", [USER, said("x"), THEN], np.arange(20, dtype=np.int32), [1], "y" * 400_000)
    tokens = np.append(np.arange(20, dtype=np.int32), 1).astype(np.int32)
    tokens[10] = 1
    talk.replay.remember("c", [USER, said("x"), THEN], tokens[:20], [1], "z" * 400_000)
    (entry,) = talk.replay.meta(tokens)["turns"]
    assert entry["content"][0] == "z"


@pytest.mark.parametrize(
    "more",
    [
        {"content": "\x01" * 100_000},  # six characters each in JSON
        {"calls": (("id", "name", "x" * 600_000),)},
        {"calls": (("id", "x" * 600_000, "{}"),)},
        {"calls": (("x", "", ""),) * 60_000},
        {"rest": "x" * 600_000},
    ],
)
def test_all_that_a_turn_holds_counts_in_meta(more: dict[str, Any]) -> None:
    """A turn that is too large stands in no other's way."""
    talk, tokens = Talk(), np.arange(20, dtype=np.int32)
    turns = [Turn("k", tokens, 10, "small"), replace(Turn("k", tokens, 12, "large"), **more)]
    for turn in turns:
        talk.replay._turns.keep(turn)
    meta = talk.replay.meta(tokens)
    assert [entry["content"] for entry in meta["turns"]] == ["small"]
    assert len(json.dumps(meta)) <= MAX_META_BYTES


def test_many_small_turns_keep_within_the_bound_of_meta() -> None:
    talk, tokens = Talk(), np.arange(20, dtype=np.int32)
    for number in range(6000):
        talk.replay._turns.keep(Turn(str(number), tokens, 10, "said", request_id=str(number)))
    meta = talk.replay.meta(tokens)
    assert MAX_META_BYTES - 200 < len(json.dumps(meta)) <= MAX_META_BYTES


GOOD = {
    "key": "k", "prompt": 3, "tokens": 5, "missing": [], "content": "c", "rest": "", "calls": [], "request": "r",
    "owner": "o",
}  # fmt: skip


@pytest.mark.parametrize(
    "turns",
    [
        None,
        7,
        "text",
        [None],
        [{}],
        *([GOOD | wrong] for wrong in (
            {"prompt": 6}, {"prompt": 0}, {"prompt": -1}, {"prompt": "3"}, {"prompt": 1e300},
            {"tokens": 11}, {"tokens": 2}, {"tokens": 10**30}, {"tokens": None},
            {"missing": [1]}, {"missing": "11"}, {"missing": [-1], "tokens": 11}, {"missing": [2**40], "tokens": 11},
            {"missing": ["a"], "tokens": 11}, {"missing": list(range(100)), "tokens": 110},
            {"content": None}, {"key": 7}, {"rest": []}, {"owner": None},
            {"calls": 3}, {"calls": [["a"]]}, {"calls": ["abcd"]},
        )),
    ],
)  # fmt: skip
def test_what_a_file_may_hold(turns: Any) -> None:
    replay = Talk().replay
    tokens = np.arange(10, dtype=np.int32)
    assert replay.recall(tokens, {"turns": turns}) == 0
    assert len(replay) == 0
    assert replay.recall(tokens, {"turns": [GOOD]}) == 1


@pytest.mark.parametrize(
    "tokens, missing", [([1, 2, 3, 4, 5], [VOCAB]), ([1, VOCAB, 3, 4, 5], []), ([1, 2, -1, 4], [5])]
)
def test_an_id_that_the_model_does_not_have_is_not_replayed(
    tokens: list[int], missing: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    replay, state = Talk().replay, np.array(tokens, np.int32)
    entry = GOOD | {"tokens": len(tokens) + len(missing), "missing": missing}
    assert replay.recall(state, {"turns": [entry]}) == 0
    assert f"must be in [0, {VOCAB})" in caplog.text
    assert replay.recall(
        np.minimum(abs(state), VOCAB - 1), {"turns": [entry | {"missing": [VOCAB - 1] * len(missing)}]}
    )


# -- a real tokenizer and template -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> tuple[Tokenizer, ChatTemplate]:
    checkpoint = open_checkpoint(smollm2)
    assert checkpoint.tokenizer is not None
    assert checkpoint.chat_template is not None
    return load_tokenizer(checkpoint.tokenizer), ChatTemplate(checkpoint.chat_template)


def test_smollm2_three_turns(smol: tuple[Tokenizer, ChatTemplate]) -> None:
    """Answers sampled byte by byte, which no encoder would cut like that: each prompt goes on from them."""
    tokenizer, template = smol
    replay = Replay(tokenizer, template, vocab_size=tokenizer.vocab_size)
    messages: list[Any] = [{"role": "user", "content": "Name a river."}]
    state: list[int] = []
    for answer in (" The Aare, \n", "The Rhône!\n\n", ""):
        prompt = replay.prompt(messages) or tokenizer.encode(template.render(messages))
        assert prompt[: len(state)] == state
        assert tokenizer.decode(prompt, skip_special=False) == template.render(messages)
        sampled = [id for character in answer for id in tokenizer.encode(character, add_bos=False)]
        assert sampled != tokenizer.encode(answer, add_bos=False) or not answer
        replay.remember("r", messages, np.array(prompt, np.int32), sampled, answer)
        state = [*prompt, *sampled]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Another."}]
    prompt = replay.prompt(messages)
    assert prompt is not None
    assert prompt[: len(state)] == state


def test_a_space_that_encoding_adds_is_never_put_in() -> None:
    """SentencePiece puts a space in front of what it encodes: only a control token may follow the replayed ids."""
    tokenizer = load_tokenizer(llama2_files())
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}assistant:")
    replay = Replay(tokenizer, template, vocab_size=tokenizer.vocab_size)
    prompt = tokenizer.encode(template.render([USER]))
    sampled = tokenizer.encode("yes indeed", add_bos=False)
    replay.remember("r", [USER], np.array(prompt, np.int32), sampled, "yes indeed")
    replayed = replay.prompt([USER, said("yes indeed"), THEN])
    assert replayed is not None
    assert replayed[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    assert replay.prompt([USER, said("yes on"), THEN]) is None


def test_two_tenants_may_choose_the_same_request_id() -> None:
    talk, tokens = Talk(), np.arange(20, dtype=np.int32)
    for tenant in ("a", "b"):
        talk.replay._turns.keep(Turn(tenant, tokens, 10, f"said to {tenant}", request_id="r1", owner=owner_of(tenant)))
    talk.replay.name_calls("r1", ["call-1"], "shown to a", tenant="a")
    found = {turn.key: (turn.content, [call[0] for call in turn.calls]) for turn in talk.replay._turns.all()}
    assert found == {"a": ("shown to a", ["call-1"]), "b": ("said to b", [])}


def test_a_stored_turn_answers_no_request_of_this_process() -> None:
    old, new, tokens = Talk(), Talk(), np.arange(20, dtype=np.int32)
    old.replay._turns.keep(Turn("k", tokens, 10, "said", request_id="req-1"))
    assert new.replay.recall(tokens, old.replay.meta(tokens)) == 1
    new.replay.name_calls("req-1", ["call-1"], "shown")
    (turn,) = new.replay._turns.all()
    assert (turn.content, turn.calls) == ("said", ())
