"""Log-probabilities as OpenAI's protocols write them."""

from __future__ import annotations

from collections.abc import Callable

from zllm_jax.protocol.reading import Json
from zllm_jax.values import TokenLogprob

MIN_LOGPROB = -9999.0  # what the protocols send for a probability of zero: JSON has no -inf
TokenBytes = Callable[[int], bytes]


def logprob_object(entry: TokenLogprob, token_bytes: TokenBytes) -> Json:
    """One entry a token, with the most likely ones beside it."""
    top = [_token(token, logprob, token_bytes) for token, logprob in entry.top]
    return _token(entry.token, entry.logprob, token_bytes) | {"top_logprobs": top}


def _token(token: int, logprob: float, token_bytes: TokenBytes) -> Json:
    text = token_bytes(token)
    # A token may end inside a character: `token` then shows U+FFFD, and `bytes` says what it is.
    shown = text.decode("utf-8", errors="replace")
    return {"token": shown, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(text)}
