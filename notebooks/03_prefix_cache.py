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
# # The prefix cache
#
# A prompt that begins like one before need not be computed again: its keys and values are still in device memory, or
# on disk. This notebook looks at that with one real model: hits, pages, forks, eviction, restores, near misses, replay.
#
# `ZLLM_QUICK=1` keeps it short (that is how CI runs it).

# %%
import os
import tempfile
import textwrap
import time
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyBboxPatch

import zllm_jax as zllm
from zllm_jax.experiment.plots import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from zllm_jax.experiment.texts import packaged_text

QUICK = bool(os.environ.get("ZLLM_QUICK"))
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
engine = zllm.Engine.from_pretrained(
    "smollm2-135m",
    zllm.EngineConfig(
        max_batch=1, max_seq_tokens=2048, page_tokens=32, device_cache_bytes=256 << 20,
        prefill_buckets=(32, 128), decode_buckets=(1,), store=Path(tempfile.mkdtemp()),
    ),
)  # fmt: skip
engine.warmup()
novel = packaged_text()  # Northanger Abbey


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(messages: list[dict[str, str]], max_tokens: int = 8, **sampling: float) -> zllm.Envelope:
    how = zllm.Sampling(**{"temperature": 0.0, **sampling})
    return engine.generate(zllm.Request(messages, max_tokens=max_tokens, sampling=how))


# %% [markdown]
# ## What a hit is
#
# The prompt's first n tokens equal n tokens of a stored state; nothing else counts. Those n are not computed again.
# The same question is asked three times: while nothing is known, while its pages are in device memory, and after they
# were moved to disk.

# %%
passage = {"role": "system", "content": novel[: 1500 if QUICK else 4500]}
question = [passage, user("Who is Catherine?")]
answers = {"nowhere": ask(question), "in device memory": ask(question)}
engine.evict()
answers["on disk"] = ask(question)
print(f"{'state':>16} prompt cached computed first token")
for place, answer in answers.items():
    usage, ttft_ms = answer.usage, answer.timing.ttft_s * 1e3
    print(f"{place:>16} {usage.prompt_tokens:6} {usage.cached_tokens:6} {usage.prefilled_tokens:8} {ttft_ms:8.0f} ms")
assert len({answer.tokens for answer in answers.values()}) == 1
assert [answer.usage.tier for answer in answers.values()] == [zllm.Tier.COLD, zllm.Tier.RESIDENT, zllm.Tier.DISK]

# %% [markdown]
# A short prefill remains (a prompt is never cached whole: its last token must be computed to predict the next), and of
# a hit on disk the time to read and copy.

# %%
parts = {"prep_s": PURPLE, "queue_s": VERMILION, "restore_s": BLUE, "prefill_s": SKY}
fig, ax = plt.subplots(figsize=(8, 2.2), layout="constrained")
left = np.zeros(len(answers))
for part, colour in parts.items():
    widths = np.array([getattr(answer.timing, part) * 1e3 for answer in answers.values()])
    ax.barh(list(answers), widths, left=left, color=colour, label=part.removesuffix("_s"))
    left += widths
ax.set(xlabel="time to first token (ms)", title="Where the state of the prompt was")
ax.invert_yaxis()
ax.legend(ncols=4, loc="lower right")
plt.show()

# %% [markdown]
# ## A conversation forks, its pages don't
#
# A state is a list of pages. A new turn shares every whole page of what it continues; the page that it would write
# into is copied first. So a fork costs its own tail only, however long the history is.

# %%
engine.forget()
opening = [{"role": "system", "content": novel[:600]}, user("Who is this about?")]
copied: set[int] = set()
branches: dict[str, list[int]] = {}


def branch(name: str, messages: list[dict[str, str]], max_tokens: int = 24) -> list[dict[str, str]]:
    """Ask, note which pages hold the state now and which of them was copied, and return what was said."""
    answer = ask(messages, max_tokens)
    pages = {one["id"]: one["page_ids"] for one in engine.report()["resident"]}
    place, within_page = divmod(answer.usage.cached_tokens, engine.config.page_tokens)
    if within_page:
        copied.add(pages[answer.conversation][place])
    for old in [old for old, kept in branches.items() if kept not in pages.values()]:
        del branches[old]  # a state that is continued is replaced by its continuation
    branches[name] = pages[answer.conversation]
    return [*messages, {"role": "assistant", "content": answer.text}]


said = branch("Who is this about?", opening)
father = branch("What of her father?", [*said, user("What of her father?")])
branch("Was he rich?", [*father, user("Was he rich? Answer with a number, and say how you know.")])
branch("Was he kind?", [*father, user("Was he kind? Quote the words that tell, then explain them.")])
branch("What of her mother?", [*said, user("What of her mother?")])
branch("Where does it play?", [opening[0], user("Where does it play?")])
print(f"{len(branches)} states refer to {sum(map(len, branches.values()))} pages", end=", ")
print(f"{len(set().union(*branches.values()))} exist")

# %%
rows = sorted(branches.items(), key=lambda item: item[1])
owners: dict[tuple[int, int], list[int]] = {}  # (place in the sequence, page): the rows that have it there
for row, (_, pages) in enumerate(rows):
    for place, page in enumerate(pages):
        owners.setdefault((place, page), []).append(row)
spot = {key: float(np.mean(held)) for key, held in owners.items()}
styles = {"shared": SKY, "one state's own": ORANGE, "copied on write": GREEN}
fig, ax = plt.subplots(figsize=(10, 0.6 * len(rows) + 1.1), layout="constrained")
for name, pages in rows:
    points = [(place, spot[place, page]) for place, page in enumerate(pages)]
    for (x, y), (next_x, next_y) in pairwise(points):
        ax.plot([x, x + 0.5, x + 0.5, next_x], [y, y, next_y, next_y], color="#999999", lw=1.2, zorder=1)
    ax.text(points[-1][0] + 0.5, points[-1][1], name, va="center", fontsize=11)
for (place, page), y in spot.items():
    kind = "copied on write" if page in copied else "shared" if len(owners[place, page]) > 1 else "one state's own"
    ax.add_patch(FancyBboxPatch((place - 0.28, y - 0.2), 0.56, 0.4, "round,pad=0.06", fc=styles[kind], ec="white"))
    ax.text(place, y, str(page), ha="center", va="center", fontsize=10, zorder=3)
for kind, colour in styles.items():
    ax.scatter([], [], marker="s", s=90, color=colour, label=kind)
longest = max(map(len, branches.values()))
ax.set(
    xlim=(-0.6, longest + 1.8), ylim=(len(rows) - 0.4, -0.6), xticks=range(longest), yticks=[],
    xlabel=f"place in the sequence (pages of {engine.config.page_tokens} tokens)",
    title="One conversation, its forks, and the pages they share",
)  # fmt: skip
ax.spines["left"].set_visible(False)
ax.legend(loc="upper left")
plt.show()

# %% [markdown]
# ## A turn writes its own bytes
#
# Each turn is moved to disk before the next is asked. On disk a state is cut into chunks named after their content, so
# a longer state shares those of the shorter one: turn n+1 writes what turn n did not have.

# %%
engine.forget()
talk, table = [passage], []
for text in ("Who is Catherine?", "Describe her mother.", "Describe her father.", "What does she like to play?"):
    answer = ask([*talk, user(text)], 32)
    (state,) = engine.report()["resident"]
    started = time.perf_counter()
    written = engine.evict()
    evict_s = time.perf_counter() - started
    page_bytes = engine.report()["device_budget_bytes"] // engine.report()["pages"]["total"]
    table.append((state["pages"] * page_bytes, written, evict_s, answer.telemetry.bytes_read, answer.timing.restore_s))
    talk += [user(text), {"role": "assistant", "content": answer.text}]
print("turn  state MB  written MB   in s  read MB   in s")
for turn, (held, written, evict_s, read, restore_s) in enumerate(table, 1):
    print(f"{turn:4} {held / 1e6:9.1f} {written / 1e6:11.1f} {evict_s:6.2f} {read / 1e6:8.1f} {restore_s:6.2f}")
assert all(written < first for (_, written, *_), first in zip(table[1:], [table[0][1]] * 3, strict=True))

# %%
fig, ax = plt.subplots(figsize=(8, 2.6), layout="constrained")
turns = np.arange(1, len(table) + 1)
for shift, column, colour, label in ((-0.27, 0, SKY, "state"), (0, 3, BLUE, "read"), (0.27, 1, ORANGE, "written")):
    bars = ax.bar(turns + shift, [row[column] / 1e6 for row in table], 0.25, color=colour, label=label)
    ax.bar_label(bars, fmt="%.1f", fontsize=8)
ax.set(xticks=turns, xlabel="turn", ylabel="MB", title="A state grows; what is written is its growth")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# ## Restored by layers
#
# Stage by stage, the first layers compute while the rows of the later ones are still being read; all at once, nothing
# computes before the last row is there. What a restore will take is predicted from those before it, and decides
# between reading and computing. By stages, its seconds hold the computing in between; the gain is in the first token,
# and at most the shorter of reading and computing: little for a short turn and a fast disk.

# %%
restores: dict[str, list[zllm.Envelope]] = {"all at once": [], "stage by stage": []}
for mode, done in restores.items():
    engine.stage_restores(mode == "stage by stage")
    for _ in range(3 if QUICK else 8):
        engine.forget(keep_disk=True)
        engine.drop_page_cache()  # read the disk, not what the system remembers of it
        done.append(ask([*talk, user("And her brothers?")], 1))
fig, axes = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True, layout="constrained")
for ax, (mode, done) in zip(axes, restores.items(), strict=True):
    numbers = range(1, len(done) + 1)
    actual = np.array([answer.timing.restore_s for answer in done]) * 1e3
    predicted = np.array([answer.telemetry.predicted_restore_s or np.nan for answer in done]) * 1e3
    first = np.array([answer.timing.ttft_s for answer in done]) * 1e3
    ax.plot(numbers, first, "s-", color=ORANGE, label="first token")
    ax.plot(numbers, actual, "o-", color=BLUE, label="restored")
    ax.plot(numbers, predicted, "x--", color="#222222", label="restored, as predicted")
    ax.set(title=mode, xlabel="restore", xticks=numbers)
    print(f"{mode:>14}: restored in {np.median(actual):.0f} ms, first token after {np.median(first):.0f} ms (medians)")
axes[0].set(ylabel="ms", ylim=(0, None))
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# ## A near miss explains itself
#
# A client that puts the time into its instructions loses everything behind it. The engine says so in words: which
# token, which text on both sides, which field of the request.

# %%
engine.forget()
for clock in ("10:15", "10:16"):
    instructions = f"{passage['content']}\nIt is {clock}."
    answer = ask([{"role": "system", "content": instructions}, user("Who is Catherine?")])
miss = answer.telemetry.near_miss
assert miss is not None
print(textwrap.fill(miss.explanation, 100))

# %% [markdown]
# ## Exact replay
#
# A model may spell a text with other tokens than the tokenizer would, and a state is made of tokens. So the sampled
# ids are kept, and stand for the assistant's turn when a client sends its text back.

# %%
assert engine.tokenizer is not None
engine.forget()
for seed in range(50):
    answer = ask(question, 16, temperature=1.5, seed=seed)
    again = engine.tokenizer.encode(answer.text, add_bos=False)
    same_text = b"".join(map(engine.token_bytes, answer.tokens)) == answer.text.encode()
    if same_text and again != list(answer.tokens):
        break
parting = next(i for i, (one, other) in enumerate(zip(answer.tokens, [*again, -1], strict=False)) if one != other)
for what, ids in (("sampled", answer.tokens), ("encoded again", again)):
    print(f"{what:>14}: ...{[engine.tokenizer.decode([token]) for token in ids[max(0, parting - 2) : parting + 4]]}")
echo = [*question, {"role": "assistant", "content": answer.text}, user("And her mother?")]
following = ask(echo)
held = answer.usage.prompt_tokens + answer.usage.generated_tokens - 1  # the last one drawn was never fed
print(f"the state holds {held} tokens; the next turn reuses {following.usage.cached_tokens}")
assert following.usage.cached_tokens == held

# %% [markdown]
# ## The metrics
#
# The same story as Prometheus scrapes it: every look-up is counted once, with its tier and its reason.

# %%
wanted = ("cache_lookups", "cached_tokens", "near_misses", "evictions", "written_bytes", "restored_bytes")
for line in engine.metrics().decode().splitlines():
    if line.startswith(tuple(f"zllm_{name}_total" for name in wanted)) and not line.endswith(" 0.0"):
        print(line)
engine.close()
