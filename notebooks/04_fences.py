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
# # Fences
#
# A fence decides, before a token is drawn, which tokens may come: only those after which the text can still become a
# legal one. This notebook follows one on its way: from a JSON Schema to an automaton over bytes, from there to bits
# over a real vocabulary, then into the step of a real model. It looks at what a mask does to what the model wants to
# say, at calls of tools, and at what a fence costs.
#
# `ZLLM_QUICK=1` keeps it short (that is how CI runs it): of the model only the first layers, so that its texts mean
# nothing; they obey their fences all the same.

# %%
import json
import os
import re
import statistics
from collections import Counter
from dataclasses import replace

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

import zllm_jax as zllm
from zllm_jax.checkpoint import open_checkpoint, pull
from zllm_jax.config import zllm_home
from zllm_jax.dialect import load_tokenizer
from zllm_jax.dialect.chatml_json import CHATML_LAYOUT
from zllm_jax.dialect.dsml import dsml_layout
from zllm_jax.dialect.glm_xml import glm_layout
from zllm_jax.dialect.tool_fence import call_machine
from zllm_jax.dialect.tool_parser import ToolParser
from zllm_jax.dialect.tools import tools_of
from zllm_jax.engine.fences import vocabulary_of
from zllm_jax.experiment.fence_bench import Bench
from zllm_jax.experiment.plots import BLUE, GREEN, ORANGE, SKY, VERMILION
from zllm_jax.fence import FencePool, compile_tokens, fence_mask, pack_positions, unpack_bits
from zllm_jax.fence.schema import json_schema, with_error_variant
from zllm_jax.runtime import Chunk, Fenced, Row, Runner, StateShape, keep_compilations, load_params
from zllm_jax.runtime.fences import DeviceFences

QUICK = bool(os.environ.get("ZLLM_QUICK"))
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
keep_compilations(zllm_home() / "compilations")
checkpoint = open_checkpoint(pull("smollm2-135m"))
assert checkpoint.tokenizer is not None
cfg, tokenizer = checkpoint.config, load_tokenizer(checkpoint.tokenizer)
vocabulary = vocabulary_of(tokenizer, cfg.vocab_size)
print(f"{len(vocabulary):,} tokens, {sum(map(len, vocabulary.tokens)):,} bytes; ends a turn: {vocabulary.eos_ids}")

# %% [markdown]
# ## From a schema to an automaton
#
# The compiler turns a schema into a machine over bytes. Where only one byte may follow, the text is forced; the dots
# below are the places where there is a choice. The members may come in any order, `ok` must come.

# %%
SMALL = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "unit": {"enum": ["C", "F"]}},
    "required": ["ok"],
    "additionalProperties": False,
}
machine = json_schema(SMALL).machine


def choices(machine, at):
    """The bytes that may follow, and where each leads."""
    after = {byte: machine.step(at, byte) for byte in range(256)}
    return {byte: to for byte, to in after.items() if not to.dead}


def forced(machine, at):
    """The text that must follow, and where it leads."""
    text = b""
    while len(after := choices(machine, at)) == 1 and not machine.ended(at):
        ((byte, at),) = after.items()
        text += bytes([byte])
    return text, at


def graph(machine):
    """Places with a choice, by their longest distance from the start, and the texts that lead from one to another."""
    text, start = forced(machine, machine.begin)
    level, edges = {machine.begin: 0, start: 1}, {(machine.begin, start): [text]}
    waiting = [start]
    for place in waiting:
        for byte, to in choices(machine, place).items():
            more, end = forced(machine, to)
            edges.setdefault((place, end), []).append(bytes([byte]) + more)
            if level.get(end, 0) <= level[place]:
                level[end] = level[place] + 1
                waiting.append(end)
    return level, {pair: sorted(set(texts)) for pair, texts in edges.items()}


level, edges = graph(machine)
print(f"{machine.num_states} states, {len(level)} places with a choice")
for text in ('{"ok": true}', '{"unit": "F", "ok": false}', '{"unit": "F"}', '{"ok": yes}'):
    print(f"{'legal' if machine.accepts(text.encode()) else 'refused':>8}  {text}")

# %%
columns = {depth: [place for place in level if level[place] == depth] for depth in level.values()}
spot = {p: (d * 2.2, (len(ps) - 1) / 2 - i) for d, ps in columns.items() for i, p in enumerate(ps)}
fig, ax = plt.subplots(figsize=(11, 3), layout="constrained")
for (source, target), texts in edges.items():
    (x, y), (to_x, to_y) = spot[source], spot[target]
    arrow = {"arrowstyle": "-|>", "color": "#999999", "shrinkA": 11, "shrinkB": 11}
    ax.annotate("", (to_x, to_y), (x, y), arrowprops=arrow)
    label = "\n".join(text.decode() for text in texts)
    box = {"fc": "white", "ec": "none", "pad": 0.5, "alpha": 0.9}
    along = 1.1 / (to_x - x)  # before the next column
    ax.text(x + 1.1, y + along * (to_y - y), label, ha="center", va="center", fontsize=8, family="monospace", bbox=box)
for place, (x, y) in spot.items():
    colour = GREEN if machine.ended(place) else SKY
    ax.scatter([x], [y], s=420, color=colour, zorder=3, edgecolors="white")
    ax.text(x, y, str(place.state), ha="center", va="center", fontsize=9, zorder=4)
for colour, label in ((SKY, "a choice"), (GREEN, "the text may end")):
    ax.scatter([], [], s=90, color=colour, label=label)
ax.set(title="The machine of a small schema, by the number of its states", ylim=(-1.6, 1.2))
ax.axis("off")
ax.legend(loc="lower left", ncols=2)
plt.show()

# %% [markdown]
# ## From bytes to tokens
#
# A model draws tokens, and a token may be any piece of text: half a word, a quote with the comma behind it, a part of
# a character. A token is legal where each of its bytes is. That is decided for every state and token at once and kept
# as one bit each.

# %%
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "age": {"type": "integer"},
    },
    "required": ["name"],
    "additionalProperties": False,
}
person = compile_tokens(json_schema(PERSON).machine, vocabulary)
print(f"{person.machine.num_states} states, {len(person.masks)} masks of {person.masks[0].nbytes:,} bytes each")
on_device = DeviceFences(FencePool(vocabulary, 512))
device_mask = jax.jit(fence_mask)


def legal_tokens(tables, text):
    """bool[V] after `text`, as the device's step sees it."""
    place = on_device.load(tables)
    at = pack_positions([(place.states, place.returns, tables.machine.run(text))])
    return unpack_bits(np.asarray(device_mask(on_device.tables, at)), len(vocabulary))[0]


# %%
PLACES = {"in a text": b'{"name": "Ada', "after a value": b'{"name": "x"', "in a name": b'{"name": "x", "'}
fig, axes = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")
for ax, (name, text) in zip(axes, PLACES.items(), strict=True):
    legal = legal_tokens(person, text)
    ax.imshow(legal.reshape(192, 256), cmap="Blues", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    ax.set(title=f"{name}: {legal.sum():,} legal", xticks=[], yticks=[])
    few = np.flatnonzero(legal)[:8]
    print(f"{name:>14}: {[tokenizer.decode([token]) for token in few]}{' ...' if legal.sum() > 8 else ''}")
fig.suptitle("A mask over 49,152 tokens, a pixel each, in the order of their ids (blue: legal)")
plt.show()

# %% [markdown]
# Along a text, the number of legal tokens jumps: a handful where the grammar forces what comes, nearly all inside a
# string.

# %%
said = json.dumps({"name": "Ada Lovelace", "tags": ["poet"], "age": 36})
pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode(said)]
assert b"".join(pieces) == said.encode()
counts = [int(legal_tokens(person, b"".join(pieces[:i])).sum()) for i in range(len(pieces) + 1)]
fig, ax = plt.subplots(figsize=(11, 2.8), layout="constrained")
ax.bar(range(len(counts)), counts, color=[ORANGE if count == 1 else BLUE for count in counts], width=0.8)
ax.bar_label(ax.containers[0], fontsize=8)
ax.set_xticks(range(len(counts)), [*(piece.decode() for piece in pieces), "end"], family="monospace", fontsize=8)
ax.tick_params(axis="x", rotation=45)
ax.set(yscale="log", ylabel="legal tokens", ylim=(0.7, 2e5), title="What may come instead of each token")
plt.show()

# %% [markdown]
# ## The model
#
# A runner holds weights and state on the device and draws up to four tokens a call; mask, draw and the grammar's next
# state all happen in there. Eight rows continue one prompt, each with its own seed.

# %%
MAX_TOKENS, ROWS, PAGES = 128, 8, 8
params = load_params(checkpoint, cfg, "float32")
if QUICK:
    cfg = replace(cfg, num_layers=2)
    params["layers"] = params["layers"][:2]
runner = Runner(
    params,
    cfg,
    StateShape(num_pages=ROWS * PAGES, page_tokens=MAX_TOKENS, num_rings=ROWS, num_slots=ROWS, max_pages=PAGES),
    prefill_buckets=(MAX_TOKENS,),
    decode_buckets=(1, ROWS),
    fences=FencePool(vocabulary, 2048),
)
ROW_PAGES = [tuple(range(i * PAGES, (i + 1) * PAGES)) for i in range(ROWS)]


def prefill(prompt, last=False):
    first = Chunk(tokens=prompt, start=0, pages=ROW_PAGES[0], ring=0, slot=0, seed=0, last=last,
                  sampling=zllm.Sampling(temperature=0.0, logprobs=20))  # fmt: skip
    return runner.prefill(first)


def generate(text, tables=None, *, rows=ROWS, temperature=1.0, max_tokens=24, seed=0):
    """The tokens of `rows` continuations of `text`, fenced or free."""
    prompt = tokenizer.encode(text)
    prefill(prompt[:-1])
    for i in range(1, rows):
        runner.copy_page(ROW_PAGES[0][0], ROW_PAGES[i][0])
    place = None if tables is None else runner.load_fence(tables)
    drawn = [[] for _ in range(rows)]

    def row(i):
        at = None if tables is None else tables.machine.run(text_of(drawn[i]))
        return Row(
            token=(drawn[i] or prompt)[-1], position=len(prompt) - 1 + len(drawn[i]),
            pages=ROW_PAGES[i], ring=i, slot=i,
            sampling=zllm.Sampling(temperature=temperature), seed=seed + i, budget=max_tokens - len(drawn[i]),
            stop_ids=vocabulary.eos_ids, fence=None if at is None else Fenced(place, at),
        )  # fmt: skip

    running = list(range(rows))
    while running:
        for i, more in zip(running, runner.decode([row(i) for i in running], 4), strict=True):
            drawn[i] += [one.token for one in more]
        running = [i for i in running if drawn[i][-1] not in vocabulary.eos_ids and len(drawn[i]) < max_tokens]
    if tables is not None:
        runner.release_fence(tables)
    return drawn


def text_of(tokens):
    return b"".join(vocabulary.tokens[token] for token in tokens)


def chat(question):
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


for name, tables in (("free", None), ("fenced", person)):
    (answer,) = generate(chat("Who was the first programmer? Answer in JSON."), tables, rows=1, temperature=0.0)
    print(f"{name:>7}: {text_of(answer).decode()}")

# %% [markdown]
# ## What one masked step does
#
# A text that doesn't tell a year of birth, and a model that was shown how to say so. At the place where it names the
# member, it has an opinion; the mask of a strict schema deletes it. What is legal keeps its proportions and is scaled
# up to one, whatever it was before.

# %%
YEAR = {
    "type": "object",
    "properties": {"year": {"type": "integer", "minimum": 1900, "maximum": 2020}},
    "required": ["year"],
    "additionalProperties": False,
}
strict = compile_tokens(json_schema(YEAR).machine, vocabulary)
honest = compile_tokens(json_schema(with_error_variant(YEAR)).machine, vocabulary)
PROMPT = """Answer in JSON with the year of birth, or with an error if the text does not tell it.
Text: Tom, born in 1961, is a cook.
Answer: {"year": 1961}
Text: Eve is a nurse in Rome.
Answer: {"error": "not in the text"}
Text: Ada is a gardener and likes roses.
Answer:"""
drawn = prefill(tokenizer.encode(PROMPT + ' {"'), last=True)
top = {token: float(np.exp(logprob)) for token, logprob in drawn.logprob.top}


def under(tables):
    """The model's twenty most likely tokens under a mask: what is left, scaled up to one."""
    legal = legal_tokens(tables, b'{"')
    kept = {token: share for token, share in top.items() if legal[token]}
    return {token: share / sum(kept.values()) for token, share in kept.items()}, sum(kept.values())


shown = list(top)[:8]
ways = (("free", None, SKY), ("strict schema", strict, VERMILION), ("with an error variant", honest, GREEN))
fig, axes = plt.subplots(1, 3, figsize=(11, 2.8), sharey=True, layout="constrained")
for ax, (name, tables, colour) in zip(axes, ways, strict=True):
    shares, kept = (top, 1.0) if tables is None else under(tables)
    ax.bar(range(len(shown)), [shares.get(token, 0.0) for token in shown], color=colour)
    ax.bar_label(ax.containers[0], fmt=lambda share: f"{share:.2f}" if share >= 0.005 else "", fontsize=8)
    labels = [tokenizer.decode([token]) for token in shown]
    ax.set_xticks(range(len(shown)), labels, rotation=45, family="monospace", fontsize=8)
    ax.set(title=name if tables is None else f"{name}: keeps {kept:.0%}", ylim=(0, 1.1))
axes[0].set_ylabel("probability")
plt.show()

# %% [markdown]
# The whole answers say the same. Where no branch says "I don't know", each of them is a year, and each year is made up.
# Beside ours stand the figures of the example that this repeats; they are another model's.

# %%
KINDS = ("says it doesn't know", "a year", "anything else")


def kind(tokens):
    text = text_of(tokens).decode(errors="replace").strip().split("\n")[0]
    return KINDS[0] if text.startswith('{"error"') else KINDS[1] if re.match(r'\{"year": \d', text) else KINDS[2]


def survey(tables, batches=1 if QUICK else 5):
    batch = [generate(PROMPT, tables, seed=ROWS * number) for number in range(batches)]
    return Counter(kind(answer) for answers in batch for answer in answers)


found = {name: survey(tables) for name, tables in (("free", None), ("strict", strict), ("error variant", honest))}
print(f"{'':22} {'stated: free':>14} {'strict':>8}" + "".join(f"{name:>15}" for name in found))
for name, stated in zip(KINDS, ((0.82, 0), (0.12, 1), (0.06, 0)), strict=True):
    ours = "".join(f"{counts[name] / counts.total():15.2f}" for counts in found.values())
    print(f"{name:22} {stated[0]:14.2f} {stated[1]:8.2f}{ours}")
assert found["strict"][KINDS[1]] == found["strict"].total()
print("made up:", [text_of(answer).decode() for answer in generate(PROMPT, strict, rows=4)])

# %% [markdown]
# ## Calls of tools
#
# A call is a text with a grammar like any other. From the literals of a dialect and the tools on offer comes one
# machine: the markup and the names are forced, a parameter comes once, and the call cannot end before its required
# ones are there. Grey is forced: not one byte of it was a choice. A dot is a part of a character: this model was
# trained for none of these dialects, and its tokenizer has no word for their markup. What it writes where it may is
# its own affair: a fence is about syntax.

# %%
TOOLS = tools_of([
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 16},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["city", "days"], "additionalProperties": False,
    }}},
    {"type": "function", "function": {"name": "get_time", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 16}},
        "required": ["city"], "additionalProperties": False,
    }}},
])  # fmt: skip
DIALECTS = {"ChatML JSON": CHATML_LAYOUT, "GLM XML": glm_layout(lines=True), "DSML": dsml_layout()}
if QUICK:
    del DIALECTS["GLM XML"], DIALECTS["DSML"]


def is_forced(machine, before, token):
    at = machine.run(before)
    for byte in vocabulary.tokens[token]:
        if len(choices(machine, at)) > 1 or machine.ended(at):
            return False
        at = machine.step(at, byte)
    return True


LINE = 119  # characters


def draw_tokens(ax, tokens, marks, title):
    """The tokens as boxes, line by line; marks: which of them were forced."""
    x, y = 0, 0
    for token, mark in zip(tokens, marks, strict=True):
        lines = vocabulary.tokens[token].decode(errors="replace").replace("\ufffd", "·").split("\n")
        for number, line in enumerate(lines):
            x, y = (0, y - 1) if number else (x, y)
            piece = line + "⏎" * (number < len(lines) - 1)
            if x + len(piece) > LINE:
                x, y = 0, y - 1
            ax.add_patch(Rectangle((x, y - 0.42), len(piece), 0.84, fc="#dddddd" if mark else SKY, ec="white", lw=0.6))
            ax.text(x, y, piece, family="DejaVu Sans Mono", fontsize=8.5, va="center_baseline")
            x += len(piece)
    ax.set(xlim=(0, LINE), ylim=(y - 0.8, 0.8))
    ax.set_title(title, loc="left", fontsize=10)
    ax.axis("off")


# %%
calls = {}
for name, layout in DIALECTS.items():
    tables = compile_tokens(call_machine(layout, TOOLS, "required", parallel=False), vocabulary)
    question = chat("What will the weather be in Paris, in the next three days? Call a tool.")
    (tokens,) = generate(question, tables, rows=1, temperature=0.0, max_tokens=300)
    tokens = [token for token in tokens if token not in vocabulary.eos_ids]
    marks = [is_forced(tables.machine, text_of(tokens[:i]), token) for i, token in enumerate(tokens)]
    parser = ToolParser(layout, TOOLS, thinking=False)
    parser.feed(text_of(tokens).decode())
    parser.close()
    (call,) = parser.turn().calls
    print(f"{name:>12}: {call.name}({json.dumps(call.arguments)}), {sum(marks)} of {len(tokens)} tokens forced")
    calls[name] = (tokens, marks)
heights = (2, 5, 6)[: len(calls)]
fig, axes = plt.subplots(len(calls), figsize=(11, sum(heights) / 2.2), height_ratios=heights, squeeze=False)
for ax, (name, (tokens, marks)) in zip(axes[:, 0], calls.items(), strict=True):
    draw_tokens(ax, tokens, marks, name)
plt.show()

# %% [markdown]
# ## What it costs
#
# The usual way keeps the grammar on the host: fetch the token, step the grammar, compute the mask, send it, and only
# then run the next step. Here mask and grammar are in the step. Eight rows at three places of a grammar, the ways in
# turn; medians. On a busy machine a few per cent are noise, which is why the parts are timed by themselves too. Where
# the device is this processor, there is no link to cross and the parts weigh alike; what remains is that the host's way
# runs one step a call. The experiment `fence_overhead` measures it at length.

# %%
config = zllm.EngineConfig(max_seq_tokens=MAX_TOKENS * PAGES, page_tokens=MAX_TOKENS, decode_buckets=(1, ROWS))
bench = Bench(params, cfg, vocabulary, config)
times: dict[tuple[str, str], list[float]] = {}
for number in range(2 if QUICK else 16):
    for place in ("text", "value", "name"):
        round_of = {
            "free": bench.decode("", ROWS, 1.0, 4),
            "on the device": bench.decode(place, ROWS, 1.0, 4),
            "from the host": bench.masked(place, ROWS, 1.0),
        }
        for way, timed in round_of.items():
            times.setdefault((way, place), []).extend([timed.step_s] * (number > 0))  # the first one compiles
middle = {key: statistics.median(found) for key, found in times.items()}
for (way, place), step_s in middle.items():
    print(f"{way:>14}, {place:5}: {step_s * 1e3:6.1f} ms a step, {step_s / middle['free', place] - 1:+.1%}")

# %%
stages = [bench.stages("text", ROWS) for _ in range(3 if QUICK else 16)]
parts = {part: statistics.median(one[part] for one in stages) * 1e6 for part in stages[0]}
HOST = {"token to the host": "fetch_s", "grammar steps": "advance_s", "mask computed": "mask_s",
        "mask to the device": "put_s", "mask applied": "apply_s"}  # fmt: skip
DEVICE = {"mask": "device_mask_s", "state advances": "device_advance_s"}
for name, part in {**HOST, **DEVICE}.items():
    print(f"{name:>18}: {parts[part]:6.1f} microseconds")
fig, ax = plt.subplots(figsize=(11, 2.4), layout="constrained")
for at, names in enumerate((HOST, DEVICE)):
    left = 0.0
    for (name, part), colour in zip(names.items(), (ORANGE, VERMILION, BLUE, SKY, GREEN), strict=False):
        bar = ax.barh(at, parts[part], left=left, color=colour, height=0.6, edgecolor="white")
        if parts[part] > 40:
            ax.bar_label(bar, [f"{name}\n{parts[part]:.0f}"], label_type="center", fontsize=7)
        left += parts[part]
step_us = middle["free", "text"] * 1e6
ax.set(xlabel="microseconds a step, eight rows", title=f"Parts of a fence, beside a step of {step_us / 1e3:.0f} ms")
ax.set_yticks([0, 1], ["from the host", "on the device"])
ax.invert_yaxis()
plt.show()
