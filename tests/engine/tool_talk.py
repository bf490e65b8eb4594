"""Requests with tools to an engine whose model says what it was told to say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.engine.talker import PieceTokenizer, Talker
from zllm_jax.dialect import ChatTemplate
from zllm_jax.engine.fences import FenceCompiler
from zllm_jax.fence import Vocabulary
from zllm_jax.values import Delta, Envelope, Request, Sampling

Make = Callable[..., Talker]
CHATML = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now", "parameters": {}}},
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
USER = {"role": "user", "content": "Is it warm?"}


def ready(
    talker: Make, *pieces: str | bytes, fenced: bool = False, decode_steps: int = 4, template: ChatTemplate = CHATML
) -> Talker:
    """A talker that will say `pieces`."""
    texts = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    whole = PieceTokenizer([*texts, *[b""] * (PieceTokenizer.vocab_size - 259 - len(texts))])
    tokens = [b"" if i in whole.special_ids else whole.token_bytes(i) for i in range(whole.vocab_size)]
    fences = FenceCompiler(Vocabulary(tokens, whole.eos_ids), 4096) if fenced else None
    size = {"num_pages": 1024, "max_pages": 256, "max_seq_tokens": 2000, "decode_steps": decode_steps}
    one = talker(template=template, fences=fences, **size)
    one.say(*pieces)
    return one


def asked(**options: Any) -> Request:
    given = {"messages": (USER,), "tools": TOOLS, "tool_dialect": "chatml", "max_tokens": 60, **options}
    return Request(sampling=Sampling(temperature=0.0), **given)


def answered(one: Talker, request: Request) -> tuple[list[Delta], Envelope]:
    deltas = list(one.engine.submit(request))
    envelope = deltas[-1].envelope
    assert envelope is not None
    assert "".join(delta.text for delta in deltas) == envelope.text
    assert "".join(delta.reasoning for delta in deltas) == envelope.reasoning
    assert tuple(token for delta in deltas for token in delta.tokens) == envelope.tokens
    pieces = [piece for delta in deltas for piece in delta.calls]
    done = [piece.index for piece in pieces if piece.done]
    arguments = {i: json.loads("".join(piece.arguments for piece in pieces if piece.index == i)) for i in done}
    names = {piece.index: (piece.id, piece.name) for piece in pieces if piece.id}
    assert [(call.id, call.name, call.arguments) for call in envelope.calls] == [
        (*names[i], arguments[i]) for i in done
    ]
    return deltas, envelope
