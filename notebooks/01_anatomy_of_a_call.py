# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Anatomy of a call
#
# One request on its way through the house: text, template, ids, pages, prefill, logits, a sample, decode, and the
# envelope that says what it cost. First by hand with the functional core, then through the engine, which does the
# same and remembers the conversation: in device memory, and on disk.
#
# `ZLLM_QUICK=1` keeps it short (that is how CI runs it).

# %%
import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import zllm_jax as zllm
from zllm_jax.checkpoint import open_checkpoint, pull
from zllm_jax.config import zllm_home
from zllm_jax.dialect import Detokenizer, load_tokenizer, require_template
from zllm_jax.runtime import (
    DecodeInputs,
    PrefillInputs,
    StateShape,
    architecture,
    decode,
    init_state,
    keep_compilations,
    load_params,
    pack_sampling,
    page_bytes,
    pages_for,
    params_bytes,
    prefill_logits,
)

QUICK = bool(os.environ.get("ZLLM_QUICK"))
MODEL = "smollm2-135m"
keep_compilations(zllm_home() / "compilations")

# %% [markdown]
# ## What the files say
#
# `open_checkpoint` reads headers only. The configuration is all the rest of the house knows about the architecture.

# %%
checkpoint = open_checkpoint(pull(MODEL))
cfg = checkpoint.config
print(f"{cfg.arch}: {cfg.num_layers} layers of {cfg.embed_dim}, {cfg.num_heads} query and {cfg.num_kv_heads} kv heads")
print(f"{len(checkpoint.shapes)} parameters, {sum(np.prod(s) for s in checkpoint.shapes.values()) / 1e6:.1f} M numbers")

# %% [markdown]
# ## Text, template, ids
#
# The checkpoint brings its own chat template, run in a sandbox. The tokenizer then turns text into ids; each id stands
# for some bytes.

# %%
messages = [{"role": "user", "content": "What is the capital of France?"}]
assert checkpoint.tokenizer is not None
tokenizer = load_tokenizer(checkpoint.tokenizer)
prompt = require_template(checkpoint.chat_template).render(messages)
ids = tokenizer.encode(prompt)
print(prompt)
print(f"{len(prompt)} characters are {len(ids)} tokens; the last eight:")
print([(token, tokenizer.token_bytes(token).decode()) for token in ids[-8:]])

# %% [markdown]
# ## State: pages
#
# The model declares what it keeps; from that follow the bytes. Keys and values lie in pages of a fixed number of
# tokens, and a sequence is a list of page numbers, its page table. Which pages it gets does not matter, so they are
# taken from all over the pool here, and pages that nobody owns are filled with NaN: nothing reads them.

# %%
PAGE_TOKENS, BUCKET = 16, 64
spec = architecture(cfg).state_spec(cfg)
shape = StateShape(num_pages=24, page_tokens=PAGE_TOKENS, num_rings=1, num_slots=1, max_pages=8)
state = init_state(spec, shape, cfg.vocab_size, jnp.dtype("float32"), fill=jnp.nan)
table = np.random.default_rng(0).permutation(shape.num_pages)[: shape.max_pages].astype(np.int32)
print(f"a page of {PAGE_TOKENS} tokens holds {page_bytes(spec, PAGE_TOKENS, 4):,} bytes over all layers")
print(f"{len(ids)} tokens need {pages_for(len(ids), PAGE_TOKENS)} pages; the table: {table.tolist()}")

# %% [markdown]
# ## Prefill: all prompt tokens at once
#
# A pure function `(params, state, inputs) -> (state, outputs)`, jitted with the configuration static and the state
# donated. Prompts are padded to a bucket, so that few programs are compiled.

# %%
params = load_params(checkpoint, cfg, "float32")
print(f"weights: {params_bytes(params) / 1e6:.0f} MB in float32")
prefill_step = jax.jit(prefill_logits, static_argnames="cfg", donate_argnames="state")
greedy = pack_sampling([(zllm.Sampling(temperature=0.0), 0)])


def prefill_inputs(tokens: list[int]) -> PrefillInputs:
    padded = np.zeros(BUCKET, np.int32)
    padded[: len(tokens)] = tokens
    zero = np.int32(0)
    return PrefillInputs(
        tokens=padded, start=zero, count=np.int32(len(tokens)), table=table, ring=zero, slot=zero,
        sampling=greedy, last=np.bool_(False),
    )  # fmt: skip


state, logits = prefill_step(params=params, state=state, inputs=prefill_inputs(ids), cfg=cfg)
last = np.asarray(logits[len(ids) - 1])
print(f"logits f32{list(logits.shape)}; those after the last prompt token are {last.min():.1f} .. {last.max():.1f}")

# %% [markdown]
# ## A sample from the logits
#
# The distribution of the next token, and what the temperature does to it.

# %%
best = np.argsort(-last)[:8]
fig, axes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True, layout="constrained")
for ax, temperature in zip(axes, (0.5, 1.0, 2.0), strict=True):
    scaled = last / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    ax.barh([repr(tokenizer.decode([int(token)])) for token in best], probabilities[best], color="#0072B2")
    ax.set(title=f"temperature {temperature:g}", xlabel="probability", xlim=(0, 1))
axes[0].invert_yaxis()

# %% [markdown]
# ## Decode: one token after the other
#
# Each step feeds one token and draws the next, on the device; several steps are one call. Only ids cross to the host.

# %%
STEPS = 8
decode_step = jax.jit(decode, static_argnames=("cfg", "max_steps"), donate_argnames="state")
first = int(last.argmax())


def column(value: int) -> np.ndarray:
    return np.array([value], np.int32)


inputs = DecodeInputs(
    tokens=column(first), positions=column(len(ids)), table=table[None], rings=column(0), slots=column(0),
    budget=column(STEPS), stop_ids=np.array([cfg.eos_ids], np.int32), sampling=greedy, steps=np.int32(STEPS),
)  # fmt: skip
state, out = decode_step(params=params, state=state, inputs=inputs, cfg=cfg, max_steps=STEPS)
drawn = [first, *np.asarray(out.sampled.ids)[: int(out.emitted[0]), 0].tolist()]
detokenizer = Detokenizer(tokenizer)
print(drawn)
print(detokenizer.feed(drawn) + detokenizer.close())

# %% [markdown]
# The invariant that everything else stands on: prefill of n tokens and a decode step equal the prefill of n + 1.

# %%
longer = [*ids, *drawn[:-1]]
_, again = prefill_step(
    params=params,
    state=init_state(spec, shape, cfg.vocab_size, jnp.dtype("float32")),
    inputs=prefill_inputs(longer),
    cfg=cfg,
)
recomputed = np.asarray(again[len(ids) - 1 : len(longer)]).argmax(axis=1).tolist()
assert recomputed == drawn, (recomputed, drawn)
print("prefill of the longer text chooses the same tokens")
del state, params  # the engine below has its own

# %% [markdown]
# ## The same through the engine
#
# The envelope says how the call ended, what it used, and where the time went. Its parts add up.

# %%
question = "Describe the sea in one sentence. " * (4 if QUICK else 40)
config = zllm.EngineConfig(
    max_batch=1, max_seq_tokens=2048, prefill_buckets=(32, 128) if QUICK else (32, 128, 512),
    store=Path(tempfile.mkdtemp()),
)  # fmt: skip
engine = zllm.Engine.from_pretrained(MODEL, config)
engine.warmup()
sampling = zllm.Sampling(temperature=0.0)
messages = [{"role": "user", "content": question}]
cold = engine.generate(zllm.Request(messages, max_tokens=24, sampling=sampling))
print(cold.status, repr(cold.text))
print(cold.usage)
timing = cold.timing
print(f"first token after {timing.ttft_s * 1e3:.0f} ms, everything after {timing.total_s * 1e3:.0f} ms")

# %% [markdown]
# ## The next turn
#
# The conversation goes on: what was said, and a little more. Asked three times: while its state is in device memory,
# after it was moved to disk, and after everything was forgotten. The answers are the same; the time is not.

# %%
# Ids rather than messages: the answer's own ids are what the state was computed from, and may spell the text in a way
# that encoding it again would not.
follow_up = "<|im_end|>\n<|im_start|>user\nAnd the sky?<|im_end|>\n<|im_start|>assistant\n"
history = tokenizer.encode(require_template(checkpoint.chat_template).render(messages))
turn = zllm.Request([*history, *cold.tokens, *tokenizer.encode(follow_up)], max_tokens=8, sampling=sampling)
first_turn = zllm.Request(history, max_tokens=24, sampling=sampling)

answers = {}
for place in ("in device memory", "on disk", "nowhere"):
    engine.forget()
    engine.generate(first_turn)
    if place == "on disk":
        print(f"moved {engine.evict():,} bytes to disk")
    elif place == "nowhere":
        engine.forget()
    answers[place] = engine.generate(turn)
engine.close()
for place, answer in answers.items():
    usage = answer.usage
    print(f"{place:>16}: {usage.cached_tokens:3} of {usage.prompt_tokens} tokens cached ({usage.tier.value}), "
          f"first token after {answer.timing.ttft_s * 1e3:.0f} ms")  # fmt: skip
assert len({answer.tokens for answer in answers.values()}) == 1
assert answers["in device memory"].usage.cached_tokens > 0
assert answers["on disk"].usage.tier is zllm.Tier.DISK
assert answers["nowhere"].usage.cached_tokens == 0

# %%
parts = {"prep_s": "#CC79A7", "queue_s": "#222222", "restore_s": "#0072B2", "prefill_s": "#56B4E9"}
fig, ax = plt.subplots(figsize=(8, 2.2), layout="constrained")
left = np.zeros(len(answers))
for part, colour in parts.items():
    widths = np.array([getattr(answer.timing, part) * 1e3 for answer in answers.values()])
    ax.barh(list(answers), widths, left=left, color=colour, label=part.removesuffix("_s"))
    left += widths
ax.set(xlabel="time to first token (ms)", title="Where the conversation's state was")
ax.invert_yaxis()
ax.legend(ncols=4, frameon=False, loc="lower right")
plt.show()
