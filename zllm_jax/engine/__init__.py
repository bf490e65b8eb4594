"""Requests in, envelopes out: joins text (dialect) with token ids (scheduler), and owns neither.

It knows no wire format, no model and no file.
"""

from zllm_jax.engine.call import Call
from zllm_jax.engine.engine import Engine, Progress

__all__ = ["Call", "Engine", "Progress"]
