"""What was computed once: states of finished sequences on the device and on disk, and who owns which page.

It knows tokens, pages and files; it does not know protocols, prompts as text, or how a state is computed.
"""

from zllm_jax.cache.index import Match, PrefixIndex, common_prefix
from zllm_jax.cache.lease import Lease
from zllm_jax.cache.policy import POLICIES, Candidate, CostAware, Lru, Policy
from zllm_jax.cache.pool import Pool
from zllm_jax.cache.prefix_cache import PrefixCache
from zllm_jax.cache.rates import Rates
from zllm_jax.cache.snapshot import Base, Filling, SnapshotInfo, SnapshotReader, SnapshotStore, SnapshotWriter

__all__ = [
    "POLICIES",
    "Base",
    "Candidate",
    "CostAware",
    "Filling",
    "Lease",
    "Lru",
    "Match",
    "Policy",
    "Pool",
    "PrefixCache",
    "PrefixIndex",
    "Rates",
    "SnapshotInfo",
    "SnapshotReader",
    "SnapshotStore",
    "SnapshotWriter",
    "common_prefix",
]
