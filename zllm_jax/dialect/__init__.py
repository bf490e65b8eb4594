"""Values <-> token ids: tokenizers, chat templates. It knows no wire format, no device and no cache."""

from zllm_jax.dialect.chat_template import ChatTemplate, require_template
from zllm_jax.dialect.detokenizer import Detokenizer
from zllm_jax.dialect.replay import Replay
from zllm_jax.dialect.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Replay", "Tokenizer", "load_tokenizer", "require_template"]
