"""Real prose as prompts: slices of the packaged public-domain text, as token ids."""

from __future__ import annotations

from importlib import resources
from typing import Protocol

from zllm_jax.errors import ConfigError


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


def packaged_text() -> str:
    """The text in `data/*.txt`; its source and licence stand in a file beside it."""
    folder = resources.files(__package__).joinpath("data")
    (entry,) = (item for item in folder.iterdir() if item.name.endswith(".txt"))
    return entry.read_text(encoding="utf-8")


class PromptSource:
    """Token ids of running prose; each `turn` starts at another place, so that prompts share no prefix."""

    def __init__(self, encoder: Encoder, text: str | None = None) -> None:
        self._ids = encoder.encode(packaged_text() if text is None else text)

    def slice(self, num_tokens: int, turn: int) -> list[int]:
        """`num_tokens` ids from the place of `turn`; the text goes round at its end."""
        total = len(self._ids)
        if not 0 < num_tokens <= total:
            raise ConfigError(f"a prompt of {num_tokens} tokens was asked for, the packaged text has {total}")
        start = turn * PLACE_STEP % total
        return [self._ids[(start + i) % total] for i in range(num_tokens)]


PLACE_STEP = 997  # a prime: places of successive turns stay apart all round the text
