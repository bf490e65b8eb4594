"""Traps of real vocabularies: a legal text may come in every tokenisation, an illegal one in none."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

from tests.fence.masks import legal, mask
from zllm_jax.checkpoint import open_tokenizer
from zllm_jax.dialect import Tokenizer, load_tokenizer
from zllm_jax.dialect.chatml_json import CHATML_LAYOUT
from zllm_jax.dialect.dsml import dsml_layout
from zllm_jax.dialect.glm_xml import glm_layout
from zllm_jax.dialect.tool_dialects import DIALECTS
from zllm_jax.dialect.tool_fence import call_machine
from zllm_jax.dialect.tools import Layout, ToolCall, check_fits, render_calls, tools_of
from zllm_jax.engine.fences import vocabulary_of
from zllm_jax.errors import BadTokenizer
from zllm_jax.fence import Machine, TokenTables, Vocabulary, compile_fence, compile_tokens
from zllm_jax.values import Fence

NAMES = {"smollm2": "smollm2", "gemma": "gemma3", "deepseek": "deepseek"}
LAYOUTS = {name: make().layout for name, make in DIALECTS.items()}
TEXTS = [
    "",
    "Paris",
    " a  b   c" + " " * 40,
    "line\nline\r\n\n\n\tend",
    'say "hi", \'ho\' \\ "',
    "Run tests.",
    "a < b </ c </div> <b>x</b> </a></",
    "{}[],:\": \"}]}, {\"",
    "漢字かな交じり文。한국어, Ελληνικά; עברית 'हिन्दी'",
    "e\u0301 a\u0308\u0323 n\u0303",
    "😀👋🏽👨‍👩‍👧🇩🇪 𝔘𝔫𝔦 𐍈",
    "\u00a0\u200b\u2028\ufeff｜＜",
    "\x01\x1b\x7f\b\f",
    "1234567890" * 6,
    "=-" * 30,
    "<｜DSML｜ ｜DSML｜ <tool <arg_ <tool_call",
    "<0xE2><0x0A> <|im_start|> <eos> <｜User｜> <think>",
    "null true 1e5 0x1F",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """A real tokenizer and its vocabulary."""

    tokenizer: Tokenizer

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer, self.tokenizer.vocab_size)

    @cached_property
    def ids(self) -> dict[bytes, list[int]]:
        """The tokens of each spelling; there may be several."""
        found: dict[bytes, list[int]] = {}
        for token, text in enumerate(self.vocabulary.tokens):
            if text:
                found.setdefault(text, []).append(token)
        return found

    @cached_property
    def longest(self) -> int:
        return max(map(len, self.ids))

    def canonical(self, text: bytes) -> list[int]:
        return self.tokenizer.encode(text.decode(), add_bos=False, parse_special=False)

    def randomly(self, text: bytes, rng: random.Random, several: int) -> list[list[int]]:
        """Any tokens that spell `text`, so many times; none where none do: few vocabularies have all bytes."""
        ways: list[list[int]] = [[] for _ in text] + [[-1]]  # the tokens that it may go on with
        for start in reversed(range(len(text))):
            for end in range(start + 1, min(len(text), start + self.longest) + 1):
                if ways[end]:
                    ways[start] += self.ids.get(text[start:end], ())
        return [self._chosen(ways, rng) for _ in range(several)] if ways[0] else []

    def _chosen(self, ways: Sequence[Sequence[int]], rng: random.Random) -> list[int]:
        found, at = list[int](), 0
        while at < len(ways) - 1:
            found.append(rng.choice(ways[at]))
            at += len(self.vocabulary.tokens[found[-1]])
        return found

    def bytewise(self, text: bytes) -> list[int] | None:
        """A token a byte."""
        singles = [self.ids.get(bytes([byte]), []) for byte in text]
        return [one[-1] for one in singles] if all(singles) else None

    def tables(self, machine: Machine) -> TokenTables:
        return compile_tokens(machine, self.vocabulary)

    def spellings(self, text: bytes, rng: random.Random, several: int) -> list[list[int]]:
        """The canonical tokenisation, the one of single bytes, and others."""
        found = [self.canonical(text), self.bytewise(text), *self.randomly(text, rng, several)]
        return [one for one in found if one is not None and self.spelled(one) == text]

    def spelled(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.vocabulary.tokens[token] for token in tokens)


@cache
def case_of(path: Path) -> Case:
    return Case(load_tokenizer(open_tokenizer(path)))


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.getfixturevalue(NAMES[request.param]))


def follow(tables: TokenTables, tokens: Sequence[int]) -> int | None:
    """Where a tokenisation is refused: the number of tokens that may come; None where all may, and EOS behind them.

    On the way EOS is legal exactly where the text may end, and no control token ever.
    """
    machine, vocabulary = tables.machine, tables.vocabulary
    at = machine.begin
    for done, token in enumerate(tokens):
        if not legal(tables, at, token):
            return done
        at = machine.run(vocabulary.tokens[token], at)
        assert not at.dead
    return None if legal(tables, at, vocabulary.eos_ids[0]) else len(tokens)


def accepts_all(case: Case, machine: Machine, texts: Sequence[bytes], several: int) -> None:
    tables, rng = case.tables(machine), random.Random(0)
    tried = 0
    for text in texts:
        assert machine.accepts(text), text
        for tokens in case.spellings(text, rng, several):
            assert follow(tables, tokens) is None, (text, [case.vocabulary.tokens[token] for token in tokens])
            tried += 1
    assert tried >= 0.9 * len(texts) * (1 + several)  # a text with a byte that is no token has the canonical one only


def refuses_all(case: Case, machine: Machine, texts: Sequence[bytes], several: int) -> None:
    """In each tokenisation the token is refused with which the text goes wrong, or EOS where it ends too soon."""
    tables, rng = case.tables(machine), random.Random(0)
    for text in texts:
        bad = next((i for i in range(len(text)) if machine.run(text[: i + 1]).dead), len(text))
        spelled = [one for one in (case.bytewise(text), *case.randomly(text, rng, several)) if one is not None]
        assert spelled or not set(text) <= case.vocabulary.single_bytes, text
        for tokens in spelled:
            done = follow(tables, tokens)
            assert done is not None, text
            assert len(case.spelled(tokens[:done])) <= bad, text
            assert done == len(tokens) or len(case.spelled(tokens[: done + 1])) > bad, text


SCHEMA = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "list": {"items": {"enum": ["é😀", "<", 12]}}},
    "required": ["s"],
    "additionalProperties": False,
}


def schema_texts() -> list[bytes]:
    values = [{"s": text, "n": 12345678901234567890, "list": ["é😀", "<"]} for text in TEXTS]
    return [json.dumps(one, ensure_ascii=False).encode() for one in values] + [json.dumps({"s": TEXTS[8]}).encode()]


BAD_JSON = [
    b'{"s": "a\nb"}',
    b'{"s": "a\x01"}',
    b'{"s": "\xff"}',
    b'{"s": "\xe6\xbc"}',
    b'{"s": "\xed\xa0\x80"}',
    b'{"s": "\\x"}',
    b'{"s": "\xe6\xbc\xa2"',
    b'{"s": "a"} ',
    b'{"s":  "a"}',
    b'{"s": "a", "s": "b"}',
    b'{"n": 1}',
    b'{"s": "a", "n": 01}',
    '{"s": "a", "list": ["é😁"]}'.encode(),
    b'{"s": "a", "other": 1}',
    b'[1]',
    b"",
]  # fmt: skip


def test_a_schema(case: Case) -> None:
    machine = compile_fence(Fence(schema=SCHEMA)).machine
    accepts_all(case, machine, schema_texts(), 2)
    refuses_all(case, machine, BAD_JSON, 3)


def test_a_pattern(case: Case) -> None:
    machine = compile_fence(Fence(regex=r"<<[\s\S]*>>|\d{3,}|(?:ü|漢|😀){2}")).machine
    accepts_all(case, machine, [f"<<{text}>>".encode() for text in TEXTS] + ["漢😀".encode(), b"0123456789"], 2)
    refuses_all(case, machine, [b"<<a", b"12", "漢".encode(), "漢".encode()[:2], b"<<\xf0\x9f\x98>>", b"12a"], 3)


def test_choices(case: Case) -> None:
    texts = [text for text in TEXTS if text]
    machine = compile_fence(Fence(choices=tuple(texts))).machine
    accepts_all(case, machine, [text.encode() for text in texts], 2)
    refuses_all(case, machine, [b"Pari", b"Paris ", "😁".encode(), b"<|im_end|>", texts[7].encode() + b"x"], 3)


F = {"name": "f", "parameters": {"properties": {"s": {"type": "string"}, "o": {"type": ["object", "null"]}}}}
TOOLS = tools_of([{"type": "function", "function": F}])


def call_texts(layout: Layout) -> list[bytes]:
    calls = [[ToolCall("", "f", {"s": text, "o": {"k": text}}), ToolCall("", "f", {})] for text in TEXTS]
    return [("Sure: <b>" + layout.lead + render_calls(layout, one)).encode() for one in calls]


def check_calls(case: Case, layout: Layout, several: int) -> None:
    good = call_texts(layout)
    accepts_all(case, call_machine(layout, TOOLS, "auto"), [*good, b"No <tool> needed."], several)
    once, literals = good[1], [one.strip().encode() for one in (layout.call_open[0], layout.call_close)]
    once = once.removeprefix(b"Sure: <b>")
    bad = [once[:-3], once.replace(b"Paris", b"\xff"), once.replace(b"f", b"g")]
    bad += [once.replace(one, one[:-1] + b"_", 1) for one in literals]
    refuses_all(case, call_machine(layout, TOOLS, "required"), bad, several)


def test_calls_of_chatml(case: Case) -> None:
    check_calls(case, CHATML_LAYOUT, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_calls_in_many_tokenisations(case: Case, name: str) -> None:
    check_calls(case, LAYOUTS[name], 20)


@pytest.mark.slow
def test_many_tokenisations(case: Case) -> None:
    machine = compile_fence(Fence(schema=SCHEMA, whitespace="free")).machine
    accepts_all(case, machine, schema_texts(), 100)
    refuses_all(case, machine, [text for text in BAD_JSON if b"  " not in text and not text.endswith(b" ")], 100)


def test_control_tokens_match_no_text(case: Case) -> None:
    """The spelling of a control token is text like any other; the token itself may never come."""
    tables = case.tables(compile_fence(Fence(regex=r"[\s\S]*")).machine)
    found = mask(tables, tables.machine.begin)
    control = sorted(case.tokenizer.special_ids - set(case.tokenizer.eos_ids))
    assert control
    assert not found[control].any()
    for token in control[:3]:
        spelling = case.tokenizer.token_bytes(token)
        assert follow(tables, [token]) == 0
        assert follow(tables, case.canonical(spelling)) is None
        assert case.spelled(case.canonical(spelling)) == spelling


def test_byte_tokens_are_bytes(gemma3: Path) -> None:
    """`<0xE6>` is the byte 0xE6, not its spelling, which is six characters of text."""
    case = case_of(gemma3)
    first, second, third = (case.ids[bytes([byte])][0] for byte in "漢".encode())
    assert case.tokenizer.decode([first, second, third]) == "漢"
    machine = compile_fence(Fence(choices=("漢", "<0xE6>"))).machine
    tables = case.tables(machine)
    assert follow(tables, [first, second, third]) is None
    assert follow(tables, [first, second]) == 2
    assert follow(tables, [first, first]) == 1
    spelled = case.canonical(b"<0xE6>")
    assert first not in spelled
    assert follow(tables, spelled) is None


def test_dialects_fit_their_tokenizers(deepseek: Path, smollm2: Path) -> None:
    v4, smol = case_of(deepseek).tokenizer, case_of(smollm2).tokenizer
    for block in ("tool_calls", "function_calls"):
        check_fits(dsml_layout(block), v4)
    check_fits(CHATML_LAYOUT, smol)
    with pytest.raises(BadTokenizer, match=r"'｜DSML｜' takes \d+ tokens, not 1"):
        check_fits(dsml_layout(), smol)
    with pytest.raises(BadTokenizer, match="GLM"):
        check_fits(glm_layout(lines=True), v4)


def test_512_states_fit_8_mib_and_compile_in_seconds(deepseek: Path) -> None:
    """The largest table that must be affordable: 131,072 tokens, DeepSeek's and some without text."""
    vocabulary = vocabulary_of(case_of(deepseek).tokenizer, 131_072)
    names = [f"{chr(97 + i) * 6}_the_name_of_a_parameter" for i in range(12)]
    properties = {name: {"type": ["string", "integer", "array"][i % 3]} for i, name in enumerate(names)}
    schema = {"type": "object", "properties": properties, "required": names[:2], "additionalProperties": False}
    for fence in (Fence(schema=schema), Fence(regex="[a-z ,.]{0,510}")):
        machine = compile_fence(fence).machine
        assert 400 < machine.num_states <= 512
        begun = time.process_time()
        tables = compile_tokens(machine, vocabulary)
        assert time.process_time() - begun < 3
        assert tables.masks.nbytes + tables.counts.nbytes <= 8 << 20
