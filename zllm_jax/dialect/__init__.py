"""Values <-> token ids: tokenizers, chat templates. It knows no wire format, no device and no cache."""

from zllm_jax.dialect.chat_template import ChatTemplate, require_template
from zllm_jax.dialect.detokenizer import Detokenizer
from zllm_jax.dialect.named import NamedDialect, get_dialect
from zllm_jax.dialect.near_miss import explain
from zllm_jax.dialect.replay import Replay
from zllm_jax.dialect.tokenizer import Tokenizer, load_tokenizer
from zllm_jax.dialect.tool_dialects import DIALECTS, Spoken, ToolDialects, call_message, markup_ids
from zllm_jax.dialect.tool_fence import call_machine
from zllm_jax.dialect.tool_parser import ToolParser
from zllm_jax.dialect.tools import tools_of
from zllm_jax.dialect.volatile import without_volatile
from zllm_jax.values import VOLATILE_HEADERS

__all__ = [
    "DIALECTS",
    "VOLATILE_HEADERS",
    "ChatTemplate",
    "Detokenizer",
    "NamedDialect",
    "Replay",
    "Spoken",
    "Tokenizer",
    "ToolDialects",
    "ToolParser",
    "call_machine",
    "call_message",
    "explain",
    "get_dialect",
    "load_tokenizer",
    "markup_ids",
    "require_template",
    "tools_of",
    "without_volatile",
]
