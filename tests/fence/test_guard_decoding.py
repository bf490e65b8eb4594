"""Whole texts through the decode step: a model that says each of them word for word is led out of loops, and only them.

The model looks at positions alone, so that it goes on with its text whatever was drawn.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from tests.fence import guard_held_out
from tests.fence.guard_texts import LEGAL, LOOPING
from zllm_jax.checkpoint import open_checkpoint
from zllm_jax.dialect import Tokenizer, load_tokenizer
from zllm_jax.fence import LoopGuard, word_tokens
from zllm_jax.fence.guard import guard_advance, guard_excluded, guard_start
from zllm_jax.runtime import Row, StateShape, StateSpec, Watched, init_state, programs
from zllm_jax.runtime.models import registry
from zllm_jax.runtime.steps import decode
from zllm_jax.values import Sampling

GUARD = LoopGuard()
WATCHED = Watched()
HELD_OUT_MISSED = {"long period", "passages with new words between", "numbered doubts"}
HELD_OUT_STOPPED = {"stack of a recursion"}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    files = open_checkpoint(smollm2).tokenizer
    assert files is not None
    return load_tokenizer(files)


@pytest.fixture
def reciting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture without layers: row r wants `script[r, position + 1]`."""

    def embed(params, batch, cfg):
        ahead = jnp.minimum(batch.positions + 1, params["script"].shape[1] - 1)
        return params["embed"][params["script"][batch.rings[:, None], ahead]]

    model = SimpleNamespace(
        embed=embed,
        blocks=lambda weights, layers, x, batch, cfg, kinds: (x, layers),
        finish=lambda params, x, cfg: x,
        state_spec=lambda cfg: StateSpec(()),
    )
    monkeypatch.setitem(registry._ARCHITECTURES, "recital", model)


def decoded(
    texts: dict[str, str], tokenizer: Tokenizer, watch: Watched | None = WATCHED, limit: int | None = None
) -> tuple[dict[str, tuple[list[int], list[int]]], dict[str, int], npt.NDArray[np.bool_]]:
    """Of each text, (what the model wanted, what was drawn); loops broken; which of these ids are words.

    The ids are numbered anew, so that the vocabulary is small. limit: of each text, so many tokens.
    """
    encoded = {name: tokenizer.encode(text, add_bos=False)[:limit] for name, text in texts.items()}
    known = sorted({token for ids in encoded.values() for token in ids})
    number = {token: i for i, token in enumerate(known)}
    wanted = {name: [number[token] for token in ids] for name, ids in encoded.items()}
    words = word_tokens([tokenizer.token_bytes(token) for token in known])
    B, V, longest = len(texts), len(known), max(map(len, wanted.values()))
    script = np.zeros((B, longest), np.int32)
    for row, ids in enumerate(wanted.values()):
        script[row, : len(ids)] = ids
    bits = np.arange(V)[:, None] >> np.arange(V.bit_length()) & 1
    params = {"script": jnp.asarray(script), "embed": jnp.asarray(2 * bits - 1, jnp.float32), "layers": ()}
    cfg = SimpleNamespace(arch="recital", vocab_size=V)
    shape = StateShape(num_pages=1, page_tokens=1, num_rings=1, num_slots=B, max_pages=1)
    state = init_state(StateSpec(()), shape, V, jnp.dtype(jnp.float32), guard=GUARD)
    rows = [
        Row(
            token=ids[0],
            position=0,
            pages=(),
            ring=row,
            slot=row,
            sampling=Sampling(temperature=0.0),
            seed=0,
            budget=len(ids) - 1,
            stop_ids=(),
            watch=watch,
        )
        for row, ids in enumerate(wanted.values())
    ]
    inputs = programs.decode_inputs(rows, B, 1, longest)
    step = jax.jit(lambda params, state, inputs: decode(params, state, inputs, cfg=cfg, max_steps=longest, words=words))
    state, out = step(params, state, inputs)
    ids = np.asarray(out.sampled.ids)
    found = {name: (one[1:], ids[: len(one) - 1, row].tolist()) for row, (name, one) in enumerate(wanted.items())}
    broken = dict(zip(texts, np.asarray(state.history.guard.broken).tolist(), strict=True))
    return found, broken, words


def led_out(found: dict[str, tuple[list[int], list[int]]]) -> set[str]:
    return {name for name, (wanted, drawn) in found.items() if wanted != drawn}


def some(texts: dict[str, str], longest: int) -> dict[str, str]:
    return {name: text for name, text in texts.items() if len(text) <= longest}


def test_short_ones_as_the_host_says(reciting: None, tokenizer: Tokenizer) -> None:
    """Each draw is what the model wants, unless the host's machine, told of the draws so far, excludes it."""
    chosen = some(LEGAL, 600) | dict(list(some(LOOPING, 1600).items())[:6])
    found, broken, words = decoded(chosen, tokenizer, limit=450)
    assert led_out(found) == set(chosen) & set(LOOPING)
    for name, (wanted, drawn) in list(found.items())[::3]:
        state = guard_start(GUARD)
        for want, token in zip(wanted, drawn, strict=True):
            excluded = guard_excluded(GUARD, state)
            assert (token == want) == (want not in excluded), name
            assert token not in excluded
            state = guard_advance(GUARD, words, state, token)
        assert state.broken == broken[name]


@pytest.mark.slow
def test_unwatched_a_loop_goes_on(reciting: None, tokenizer: Tokenizer) -> None:
    found, broken, _ = decoded(dict(list(LOOPING.items())[:3]), tokenizer, watch=None)
    assert not led_out(found)
    assert set(broken.values()) == {0}


@pytest.mark.slow
def test_legal_repetition_is_left_alone_and_every_loop_is_broken(reciting: None, tokenizer: Tokenizer) -> None:
    found, broken, _ = decoded(LEGAL | LOOPING, tokenizer)
    assert led_out(found) == set(LOOPING)
    assert {name for name, count in broken.items() if count} == set(LOOPING)


@pytest.mark.slow
def test_texts_that_the_thresholds_were_not_chosen_by(reciting: None, tokenizer: Tokenizer) -> None:
    """What is wrong here is named, and nothing else is wrong."""
    texts = guard_held_out.LEGAL | guard_held_out.LOOPING
    assert (len(guard_held_out.LEGAL), len(guard_held_out.LOOPING)) == (20, 15)
    found, _, _ = decoded(texts, tokenizer)
    assert led_out(found) == set(guard_held_out.LOOPING) - HELD_OUT_MISSED | HELD_OUT_STOPPED
