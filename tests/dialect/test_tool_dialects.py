"""Which dialect a checkpoint speaks, and conversations with tools for templates that know them and that don't."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from zllm_jax.dialect import ChatTemplate, Detokenizer, Tokenizer, ToolDialects
from zllm_jax.dialect.chatml_json import ChatmlJson
from zllm_jax.dialect.dsml import Dsml
from zllm_jax.dialect.glm_xml import Glm
from zllm_jax.dialect.tool_dialects import ToolDialect, detect, knows_tools, lowered
from zllm_jax.dialect.tools import tools_of
from zllm_jax.errors import InvalidRequest

BARE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
# Writes tools, calls and results itself, and fails where arguments are a text.
KNOWS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ dict(c.function.arguments.items()) | tojson }}}'
    "{{ '\n' }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
TOOLS = ({"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}},)
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Time?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}},
            {"id": "b", "type": "function", "function": {"name": "now", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "12:00"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "11:00"}]},
    {"role": "user", "content": "Thanks."},
]


class Specials(Tokenizer):
    """Bytes, and some texts as one control token each."""

    bos_id, eos_ids, add_bos, strips_space = None, (256,), False, False

    def __init__(self, *specials: str) -> None:
        self.specials = specials
        self.vocab_size = 256 + len(specials)
        self.special_ids = frozenset(range(256, self.vocab_size))

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        for i, special in enumerate(self.specials):
            if special in text:
                before, _, after = text.partition(special)
                return [*self._encode(before, True), 256 + i, *self._encode(after, True)]
        return list(text.encode())

    @property
    def _bytes(self) -> tuple[bytes, ...]:  # type: ignore[override]
        return (*(bytes([i]) for i in range(256)), *(special.encode() for special in self.specials))

    digest = ""


IM_END = Specials("<|im_end|>", "<|im_start|>")


@pytest.mark.parametrize(
    ("template", "specials", "name"),
    [
        (BARE, (), "chatml"),
        ("", ("<|im_start|>",), "chatml"),
        ("{{ '<|user|>' }}<arg_key>k</arg_key>\n<arg_value>", (), "glm-4.6"),
        ("{{ '</arg_key>\\n' }}[gMASK]", (), "glm-4.6"),
        ("[gMASK]<sop><arg_key>k</arg_key><arg_value>", (), "glm-4.7"),
        ("", ("[gMASK]",), "glm-4.7"),
        ("", ("<｜User｜>", "<think>"), "dsml"),
        ("<｜DSML｜tool_calls>", (), "dsml"),
        ("<｜DSML｜function_calls>", (), "dsml-v3.2"),
        ("{{ messages[0].content }}", ("<s>", "</s>"), None),
        (BARE, ("[gMASK]",), "chatml"),  # the template is what the checkpoint was trained on
    ],
)
def test_marks_tell_the_dialect(template: str, specials: Sequence[str], name: str | None) -> None:
    assert detect(template, specials) == name


def test_a_recognised_dialect_must_fit_and_a_named_one_survive() -> None:
    assert ToolDialects(IM_END, ChatTemplate(BARE)).spoken().name == "chatml"
    cut = ToolDialects(Specials("<|im_start|>"), ChatTemplate(BARE))
    assert not cut.fits
    with pytest.raises(
        InvalidRequest, match=r"ChatML JSON does not fit this tokenizer: '<\|im_end\|>' takes 10 tokens"
    ):
        cut.spoken()
    assert cut.spoken("chatml").layout.name == "ChatML JSON"
    assert cut.spoken("dsml").layout.name == "DSML"
    with pytest.raises(InvalidRequest, match="neither its chat template nor its tokenizer shows"):
        ToolDialects(Specials("</s>"), ChatTemplate("{{ messages[0].content }}")).spoken()

    class Upper(Specials):
        def _encode(self, text: str, parse_special: bool) -> list[int]:
            return super()._encode(text.upper(), parse_special)

    with pytest.raises(InvalidRequest, match="'<think>' comes back as '<THINK>'"):
        ToolDialects(Upper("</s>"), ChatTemplate("x")).spoken("glm-4.7")


def test_a_template_that_knows_tools_is_asked() -> None:
    assert knows_tools(ChatTemplate(KNOWS), ChatmlJson())
    assert not knows_tools(ChatTemplate(KNOWS), Glm())
    assert not knows_tools(ChatTemplate(KNOWS), Dsml())
    assert not knows_tools(ChatTemplate(BARE), ChatmlJson())
    assert not knows_tools(ChatTemplate("{{ raise_exception('no') }}"), ChatmlJson())
    spoken = ToolDialects(IM_END, ChatTemplate(KNOWS)).spoken()
    text = spoken.render(TALK, TOOLS)
    assert '<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>' in text
    assert text.startswith('{"type": "function", "function": {"name": "now"')


@pytest.mark.parametrize(
    "dialect", [ChatmlJson(), Dsml(), Glm(lines=True), Glm(lines=False)], ids=lambda one: one.layout.name
)
def test_a_template_that_knows_none_gets_plain_messages(dialect: ToolDialect) -> None:
    told = dialect.instructions(tools_of(TOOLS))
    system, user, assistant, results, thanks = lowered(dialect, TALK, tools_of(TOOLS))
    assert system == {"role": "system", "content": f"Be brief.\n\n{told}"}
    assert (user, thanks) == (TALK[1], TALK[5])
    assert "tool_calls" not in assistant
    assert assistant["content"].startswith("I look." + dialect.layout.lead + dialect.layout.trigger)
    assert assistant["content"].count("now") == 2
    assert results == {"role": "user", "content": dialect.results(["12:00", "11:00"])}
    (first, *_) = lowered(dialect, TALK[1:], tools_of(TOOLS))
    assert first == {"role": "system", "content": told}
    assert lowered(dialect, TALK[:2], ()) == TALK[:2]


def test_conversations_without_tools_are_the_templates_own() -> None:
    spoken, template = ToolDialects(IM_END, ChatTemplate(BARE)).spoken("glm-4.7"), ChatTemplate(BARE)
    assert spoken.render(TALK[:2]) == template.render(TALK[:2])
    assert "<tool_response>" in spoken.render(TALK)  # a history with calls, though no tools are offered now


def test_calls_that_name_nothing_are_refused() -> None:
    spoken = ToolDialects(IM_END, ChatTemplate(BARE)).spoken()
    for call in ({"id": "a"}, {"function": {"name": 1}}, "now"):
        with pytest.raises(InvalidRequest, match=r"tool_calls\[0\] must have a function with a name"):
            spoken.render([TALK[1], {"role": "assistant", "content": "", "tool_calls": [call]}], TOOLS)


def test_where_reasoning_begins() -> None:
    plain, thinks = (ToolDialects(IM_END, ChatTemplate(BARE + more)).spoken() for more in ("", "{# <think> #}"))
    ends = ("assistant\n", "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n")
    assert [plain.thinking(end) for end in ends] == [False, True, False]
    assert [thinks.thinking(end) for end in ends] == [None, True, False]
    marked = ToolDialects(Specials("<|im_end|>", "<think>"), ChatTemplate(BARE)).spoken()
    assert marked.thinking("assistant\n") is None


def test_control_tokens_that_are_text_are_shown() -> None:
    tokenizer = Specials("<eos>", "<tool_call>", "<other>")
    ids = [257, *b"x", 258, 256]
    assert Detokenizer(tokenizer, shown=frozenset({257})).feed(ids) == "<tool_call>x"
    assert Detokenizer(tokenizer).feed(ids) == "x"
