"""Values <-> token ids: tokenizers, chat templates. It knows no wire format, no device and no cache."""

from zllm_jax.dialect.chat_template import ChatTemplate, require_template
from zllm_jax.dialect.detokenizer import Detokenizer
from zllm_jax.dialect.near_miss import explain
from zllm_jax.dialect.replay import Replay
from zllm_jax.dialect.tokenizer import Tokenizer, load_tokenizer
from zllm_jax.dialect.volatile import VOLATILE_HEADERS, without_volatile

__all__ = [
    "VOLATILE_HEADERS",
    "ChatTemplate",
    "Detokenizer",
    "Replay",
    "Tokenizer",
    "explain",
    "load_tokenizer",
    "require_template",
    "without_volatile",
]
