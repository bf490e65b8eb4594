"""A loop guard whose thresholds texts of some dozen tokens reach."""

from zllm_jax.fence import LoopGuard

SMALL = LoopGuard(
    max_period=12,
    min_repeats=3,
    prose_words=2,
    prose_tokens=8,
    chant_tokens=12,
    symbol_tokens=20,
    context=3,
    num_slots=32,
    passage_tokens=6,
    passage_seen=2,
    passage_words=3,
)
