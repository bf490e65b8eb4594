"""Regular languages of bytes: operations, texts, their JSON spellings, numbers, patterns and formats.

Every language is a minimal `ByteAutomaton`. Knows JSON's grammar of strings and numbers, not JSON Schema.
"""

from zllm_jax.fence.regular.algebra import (
    complement,
    concat,
    difference,
    empty,
    equal,
    finite_texts,
    intersect,
    is_empty,
    literal,
    optional,
    product,
    repeat,
    shortest,
    star,
    union,
)
from zllm_jax.fence.regular.formats import format_text, loose_format_text
from zllm_jax.fence.regular.numbers import json_number
from zllm_jax.fence.regular.regex import fullmatch_regex, regex
from zllm_jax.fence.regular.strings import json_string
from zllm_jax.fence.regular.texts import any_text, text_length

__all__ = [
    "any_text",
    "complement",
    "concat",
    "difference",
    "empty",
    "equal",
    "finite_texts",
    "format_text",
    "fullmatch_regex",
    "intersect",
    "is_empty",
    "json_number",
    "json_string",
    "literal",
    "loose_format_text",
    "optional",
    "product",
    "regex",
    "repeat",
    "shortest",
    "star",
    "text_length",
    "union",
]
