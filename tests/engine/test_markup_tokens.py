"""A dialect's tags as control tokens: text to the fence of its calls and to its parser, and to no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jsonschema
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from zllm_jax.cache import PrefixCache
from zllm_jax.config import EngineConfig
from zllm_jax.dialect import ChatTemplate, markup_ids
from zllm_jax.dialect.bpe import BpeTokenizer
from zllm_jax.dialect.chatml_json import CHATML_LAYOUT
from zllm_jax.dialect.glm_xml import glm_layout
from zllm_jax.engine import Engine
from zllm_jax.engine.fences import FenceCompiler, vocabulary_of
from zllm_jax.fence import FencePool
from zllm_jax.runtime import Runner, StateShape, init_params
from zllm_jax.scheduler import Scheduler
from zllm_jax.testing import tiny_config
from zllm_jax.values import Envelope, Fence, Request, Sampling, Status

SPECIALS = ["<|eos|>", "[gMASK]", "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"]
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}<arg_key></arg_key><arg_value>")
PARAMETERS = {
    "type": "object",
    "properties": {"level": {"enum": ["low", "high"]}, "on": {"type": "boolean"}},
    "required": ["level"],
    "additionalProperties": False,
}
TOOLS = ({"type": "function", "function": {"name": "dim", "parameters": PARAMETERS}},)


def tokenizer() -> BpeTokenizer:
    """Single bytes, and tags that are control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    return BpeTokenizer(library, bos_id=None, eos_ids=(library.token_to_id("<|eos|>"),), add_bos=False)


TOKENIZER = tokenizer()
TAG = TOKENIZER.encode("<tool_call>")[0]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    cfg = replace(tiny_config("llama"), vocab_size=TOKENIZER.vocab_size, eos_ids=TOKENIZER.eos_ids)
    shown = markup_ids(TOKENIZER)
    vocabulary = vocabulary_of(TOKENIZER, cfg.vocab_size, shown)
    shape = StateShape(num_pages=128, page_tokens=16, num_rings=1, num_slots=1, max_pages=32)
    runner = Runner(
        init_params(cfg, jax.random.key(0)),
        cfg,
        shape,
        prefill_buckets=(64,),
        decode_buckets=(1,),
        decode_steps=4,
        fences=FencePool(vocabulary, 2048),
    )
    cache = PrefixCache(runner, None)
    with Engine(
        model_name="tiny",
        model_config=cfg,
        config=EngineConfig(),
        scheduler=Scheduler(runner, cache, max_seq_tokens=500, max_queue=8),
        cache=cache,
        tokenizer=TOKENIZER,
        template=TEMPLATE,
        warm=lambda progress: None,
        fences=FenceCompiler(vocabulary, 2048, shown),
    ) as made:
        yield made


def test_markup_is_what_stands_in_a_dialects_literals() -> None:
    assert {TOKENIZER.decode([token], skip_special=False) for token in markup_ids(TOKENIZER)} == set(SPECIALS[2:])
    chatml = markup_ids(TOKENIZER, CHATML_LAYOUT)
    assert {TOKENIZER.decode([token], skip_special=False) for token in chatml} == set(SPECIALS[2:6])


def turn(engine: Engine, seed: int, **options: object) -> Envelope:
    given = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 150, **options}
    return engine.generate(Request(prompt="A</think>", sampling=Sampling(seed=seed), **given))  # type: ignore[arg-type]


def test_calls_may_be_written_with_control_tokens_or_without(engine: Engine) -> None:
    spellings = set()
    for seed in range(6):
        envelope = turn(engine, seed)
        assert envelope.status is Status.COMPLETED
        (call,) = envelope.calls
        jsonschema.validate(call.arguments, PARAMETERS)
        spellings.add(TAG in envelope.tokens)
        assert envelope.text == ""
    assert spellings == {True, False}


def test_a_choice_of_none_knows_both_spellings(engine: Engine) -> None:
    for seed in range(3):
        envelope = turn(engine, seed, tool_choice="none", max_tokens=200)
        assert TAG not in envelope.tokens
        assert "<tool_call>" not in envelope.text


def test_no_other_fence_matches_a_control_token(engine: Engine) -> None:
    specials = TOKENIZER.special_ids - set(TOKENIZER.eos_ids)
    for seed in range(3):
        fence = Fence(regex="[^x]{120}")
        envelope = engine.generate(Request(prompt="A", sampling=Sampling(seed=seed), max_tokens=200, fence=fence))
        assert not specials & set(envelope.tokens)
    envelope = turn(engine, 0, tool_dialect="chatml")
    assert not {TOKENIZER.encode(text)[0] for text in ("<arg_key>", "</arg_key>", "[gMASK]")} & set(envelope.tokens)


def test_each_dialect_has_its_own_part_of_the_vocabulary() -> None:
    whole = vocabulary_of(TOKENIZER, TOKENIZER.vocab_size, markup_ids(TOKENIZER))
    part = whole.without(markup_ids(TOKENIZER) - markup_ids(TOKENIZER, glm_layout(lines=False)))
    assert part is whole  # GLM writes all of them
    bare = whole.without(markup_ids(TOKENIZER))
    assert bare.digest == vocabulary_of(TOKENIZER, TOKENIZER.vocab_size).digest != whole.digest == bare.origin
