"""Faults that users met in other servers, one test each, named after its number in docs/proofs.md."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cache.driver import Driver, open_store, prompt
from tests.engine.talker import Talker
from tests.scheduler.device import Bench
from zllm_jax.cache import SnapshotStore
from zllm_jax.testing import ScriptedBackend
from zllm_jax.values import Envelope, Request, Sampling, Status, Tier

WINDOW = 6
GREEDY = Sampling(temperature=0.0)
NONCE = "x-anthropic-billing-header: cc_version=2.1.1; cch={};\nYou are terse. You answer in one word, always."


class Template:
    """Marks roles with control bytes; an assistant's turn is rendered as other servers' templates do it: changed."""

    source = ""

    def __init__(self, spell: Any = lambda message: message.get("content") or "") -> None:
        self._spell = spell

    def render(self, messages: Any, tools: Any = None) -> str:
        def text(message: Any) -> str:
            return self._spell(message) if message["role"] == "assistant" else str(message["content"])

        turns = [f"\x01{message['role']}\n{text(message)}\x02" for message in messages]
        return "".join(turns) + "\x01assistant\n"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def chat(one: Talker, *messages: dict[str, Any], max_tokens: int = 40) -> Envelope:
    envelope = one.engine.generate(Request(list(messages), max_tokens=max_tokens, sampling=GREEDY))
    assert envelope.status in (Status.COMPLETED, Status.TRUNCATED), envelope.error
    return envelope


def all_but_eos(envelope: Envelope) -> int:
    """Tokens of a finished conversation's state: its last drawn one was not fed."""
    return envelope.usage.prompt_tokens + len(envelope.tokens) - 1


def second_turn_is_a_hit(one: Talker, first: Envelope, echo: dict[str, Any], *before: dict[str, Any]) -> Envelope:
    """The client sends its history back; everything that was computed for it is reused."""
    second = chat(one, *before, echo, user("and then?"))
    assert second.usage.cached_tokens == all_but_eos(first)
    return second


# -- near misses ---------------------------------------------------------------------------------------------------


def test_fault_01_a_nonce_in_the_first_system_block_does_not_hide_the_prefix() -> None:
    one = Talker(template=Template())
    one.say("yes")
    for nonce, cached in (("aaaa", False), ("bbbb", True)):
        envelope = chat(one, {"role": "system", "content": NONCE.format(nonce)}, user("ready?"))
        assert (envelope.usage.cached_tokens > 40) is cached
    one.engine.close()


@pytest.mark.parametrize("window", [0, WINDOW])
def test_fault_02_history_renders_as_it_was_generated(window: int) -> None:
    """The template shows an empty thought only in front of the newest answer."""
    one = Talker(template=Template(lambda message: message["content"].removeprefix("<think></think>")), window=window)
    one.say("<think></think>", "yes")
    first = chat(one, user("ready?"))
    second_turn_is_a_hit(one, first, assistant(first.text), user("ready?"))
    one.engine.close()


def test_fault_03_what_is_common_is_reused_and_the_difference_reported(caplog: pytest.LogCaptureFixture) -> None:
    one = Talker(template=Template())
    one.say("yes")
    long = "a" * 300
    chat(one, user(long + "b" + "c" * 10))
    with caplog.at_level(logging.INFO):
        envelope = chat(one, user(long + "d" + "c" * 10))
    assert envelope.usage.cached_tokens == len("\x01user\n") + 300
    miss = envelope.telemetry.near_miss
    assert miss is not None
    assert (miss.here[0], miss.there[0]) == (ord("d"), ord("b"))
    assert "messages[0]" in caplog.text
    one.engine.close()


def test_fault_04_sampled_bytes_are_replayed_white_space_included() -> None:
    one = Talker(template=Template(lambda message: message["content"].strip()))
    one.say(" ", "yes", "  ")
    first = chat(one, user("ready?"))
    assert first.text == " yes  "
    second_turn_is_a_hit(one, first, assistant(first.text), user("ready?"))
    one.engine.close()


@pytest.mark.parametrize("window", [0, WINDOW])
def test_fault_05_regenerating_rewinds_to_the_boundary(window: int) -> None:
    one = Talker(template=Template(), window=window)
    one.say("yes")
    first = chat(one, user("ready?"))
    turns = [user("ready?"), assistant(first.text), user("really?")]
    chat(one, *turns)
    again = chat(one, *turns)
    whole = again.usage.prompt_tokens
    assert again.usage.cached_tokens == (all_but_eos(first) if window else whole - 1)
    one.engine.close()


def test_fault_06_interleaved_thinking_and_calls_keep_their_order() -> None:
    """A client that sends parts back in another order gets the turn as it was sampled."""
    one = Talker(template=Template(lambda message: "".join(sorted(message["content"]))))
    one.say("<t>1</t>", "call a", "<t>2</t>", "call b")
    first = chat(one, user("do both"))
    second_turn_is_a_hit(one, first, assistant(first.text), user("do both"))
    one.engine.close()


@pytest.mark.parametrize("arguments", ['{"a": 1}', '{"a":1}', {"a": 1}])
def test_fault_07_arguments_that_were_serialised_anew_do_not_fork(arguments: Any) -> None:
    one = Talker(template=Template(lambda message: message["content"] + json.dumps(message.get("tool_calls", ""))))
    one.say('{"a" : 1}')
    first = chat(one, user("call f"))
    call = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    one.engine.name_calls(first.request_id, ["call-1"])
    echo = assistant("", tool_calls=[call])
    result = {"role": "tool", "tool_call_id": "call-1", "content": "42"}
    second = chat(one, user("call f"), echo, result)
    assert second.usage.cached_tokens == all_but_eos(first)
    one.engine.close()


def test_fault_08_a_newline_that_only_the_template_puts_does_not_fork() -> None:
    one = Talker(template=Template(lambda message: message["content"].replace("<call>", "\n<call>")))
    one.say("sure", "<call>f</call>")
    first = chat(one, user("call f"))
    second_turn_is_a_hit(one, first, assistant(first.text), user("call f"))
    one.engine.close()


def test_fault_09_a_state_that_cannot_be_cut_is_hit_as_far_as_it_reaches() -> None:
    one = Driver(ScriptedBackend(window=WINDOW, num_pages=64, max_pages=32))
    first = one.run(prompt(40))
    second = one.run([*first.rows, 1, 2, 3])
    assert one.hit([*second.rows[:-1], 255 - second.rows[-1], 7]) == (Tier.RESIDENT, len(first.rows))
    one.close()


# -- offload and restore -------------------------------------------------------------------------------------------


def two_on_disk(root: Path, **options: Any) -> tuple[Driver, list[list[int]]]:
    one = Driver(ScriptedBackend(**options), open_store(root))
    rows = [one.run(prompt(20, seed)).rows for seed in range(2)]
    one.cache.evict()
    return one, rows


def test_fault_10_another_requests_state_is_never_attached(tmp_path: Path) -> None:
    """Two chunks of equal size trade places on disk."""
    one, rows = two_on_disk(tmp_path)
    chunks = sorted(tmp_path.rglob("chunks/*"), key=lambda path: (path.stat().st_size, path.name))
    a, b = chunks[-2:]
    assert a.stat().st_size == b.stat().st_size
    content = a.read_bytes(), b.read_bytes()
    a.write_bytes(content[1])
    b.write_bytes(content[0])
    for stored in rows:
        one.run([*stored, 1])  # `run` compares the answer with one that was computed without a cache
    assert one.cache.counters.failed_restores > 0
    one.close()


def test_fault_11_the_index_is_rebuilt_from_the_files(tmp_path: Path) -> None:
    one, rows = two_on_disk(tmp_path)
    one.close()
    again = Driver(ScriptedBackend(), open_store(tmp_path))
    assert [again.hit([*stored, 1]) for stored in rows] == [(Tier.DISK, len(stored)) for stored in rows]
    again.close()


def test_fault_12_a_failed_load_is_a_miss_and_the_request_ends(tmp_path: Path) -> None:
    one = Bench(SnapshotStore(tmp_path, namespace="n", chunk_tokens=4))
    one.run(range(20), 3)
    one.scheduler.call(one.cache.evict)
    for path in tmp_path.rglob("chunks/*"):
        path.unlink()
    tokens, outcome = one.run([*range(20), 5], 3)
    assert (len(tokens), outcome.status, outcome.usage.tier) == (3, Status.TRUNCATED, Tier.COLD)
    one.close()


def test_fault_13_bit_rot_of_equal_size_is_found(tmp_path: Path) -> None:
    one, rows = two_on_disk(tmp_path)
    for path in tmp_path.rglob("chunks/*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    for stored in rows:
        assert one.run([*stored, 1]).lease.tier is Tier.COLD
    one.close()


def test_fault_14_another_layout_of_pages_restores_the_same_rows(tmp_path: Path) -> None:
    """Over meshes: tests/runtime/test_mesh.py and tests/e2e/test_mesh.py."""
    one, rows = two_on_disk(tmp_path, page_tokens=4)
    one.close()
    other = Driver(ScriptedBackend(page_tokens=16, max_pages=8), open_store(tmp_path))
    assert [other.hit([*stored, 1])[0] for stored in rows] == [Tier.DISK, Tier.DISK]
    other.close()


@pytest.mark.parametrize("window", [0, WINDOW])
def test_fault_15_all_that_is_stored_is_loaded_again(tmp_path: Path, window: int) -> None:
    one, rows = two_on_disk(tmp_path, window=window)
    assert {entry["tokens"] for entry in one.cache.report()["disk"]} == {len(stored) for stored in rows}
    assert [one.hit([*stored, 1]) for stored in rows] == [(Tier.DISK, len(stored)) for stored in rows]
    assert one.cache.counters.bytes_read >= one.cache.report()["disk_bytes"]
    one.close()


def test_fault_16_pages_are_not_attached_without_what_belongs_to_them(tmp_path: Path) -> None:
    """What a model without rings stored is no state of one that has them."""
    one, rows = two_on_disk(tmp_path)
    one.close()
    other = Driver(ScriptedBackend(window=WINDOW), open_store(tmp_path))
    assert [other.hit([*stored, 1])[0] for stored in rows] == [Tier.COLD, Tier.COLD]
    other.close()


@pytest.mark.parametrize("window", [0, WINDOW])
def test_fault_17_after_a_restore_only_the_tail_is_computed(tmp_path: Path, window: int) -> None:
    one, rows = two_on_disk(tmp_path, window=window)
    before = one.backend.num_computed
    assert one.hit([*rows[0], 1, 2, 3]) == (Tier.DISK, len(rows[0]))
    assert one.backend.num_computed - before == 3
    one.close()


def test_fault_18_a_disk_that_is_slower_than_computing_is_not_asked(tmp_path: Path) -> None:
    one, rows = two_on_disk(tmp_path)
    for _ in range(2):  # the first measurement of each is left out
        one.cache.rates.restored(1, 1.0)
        one.cache.rates.prefilled(0, 1000, 1.0)
    assert one.hit([*rows[0], 1]) == (Tier.COLD, 0)
    one.close()


def test_fault_19_the_ring_is_part_of_what_is_stored(tmp_path: Path) -> None:
    one, rows = two_on_disk(tmp_path, window=WINDOW)
    one.spoil()
    for stored in rows:
        one.run([*stored, 1])
    assert one.cache.counters.hits[Tier.DISK] == 2
    one.close()


def test_fault_42_every_request_is_counted(tmp_path: Path) -> None:
    one = Talker(store=SnapshotStore(tmp_path, namespace="n", chunk_tokens=8))
    one.say("yes")
    prompts = [np.arange(20) % 250, np.arange(20) % 250, np.arange(30) % 200]
    for i, tokens in enumerate(prompts):
        ids = [*tokens.tolist(), ord("\n")]
        one.engine.generate(Request(ids, max_tokens=4, sampling=GREEDY, cache=i != 2))
    hits = one.engine.report()["hits"]
    assert sum(hits.values()) == len(prompts)
    assert (hits["cold"], hits["resident"]) == (2, 1)
    assert 'zllm_cache_lookups_total{reason="off",tier="cold"} 1.0' in one.engine.metrics().decode()
    one.engine.close()
