"""The device side: what a model is and keeps, pure jitted steps over pytrees, sampling, weights.

It knows arrays, pages and positions; it does not know who asked, where pages come from, or what a token means.
"""

from zllm_jax.runtime.batch import Batch
from zllm_jax.runtime.compilation import count_compilations, keep_compilations
from zllm_jax.runtime.models import architecture
from zllm_jax.runtime.port import Backend, Capacity, Chunk, Copying, Drawn, Fenced, Row, Watched
from zllm_jax.runtime.programs import fetch_decode, fetch_prefill
from zllm_jax.runtime.rope import extend_context
from zllm_jax.runtime.runner import Runner
from zllm_jax.runtime.sampling import Sampled, SamplingParams, pack_sampling, sample
from zllm_jax.runtime.sharding import check_mesh, make_mesh
from zllm_jax.runtime.specs import ArraySpec, PagedSpec, RingSpec, StateSpec
from zllm_jax.runtime.state import State, StateShape, init_state, page_bytes, pages_for
from zllm_jax.runtime.steps import DecodeInputs, PrefillInputs, decode, prefill, prefill_logits
from zllm_jax.runtime.weights import check_shapes, init_params, load_params, params_bytes

__all__ = [
    "ArraySpec",
    "Backend",
    "Batch",
    "Capacity",
    "Chunk",
    "Copying",
    "DecodeInputs",
    "Drawn",
    "Fenced",
    "PagedSpec",
    "PrefillInputs",
    "RingSpec",
    "Row",
    "Runner",
    "Sampled",
    "SamplingParams",
    "State",
    "StateShape",
    "StateSpec",
    "Watched",
    "architecture",
    "check_mesh",
    "check_shapes",
    "count_compilations",
    "decode",
    "extend_context",
    "fetch_decode",
    "fetch_prefill",
    "init_params",
    "init_state",
    "keep_compilations",
    "load_params",
    "make_mesh",
    "pack_sampling",
    "page_bytes",
    "pages_for",
    "params_bytes",
    "prefill",
    "prefill_logits",
    "sample",
]
