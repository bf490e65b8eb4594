"""What files on disk say: formats, names, shapes, numbers. A low room: it knows no device, no request, no token text.

`open_checkpoint` reads headers only and refuses what cannot work; `Checkpoint.read` then brings one parameter at a time
into the canonical layout of `parameter_shapes`. `pull` fetches the models of the catalogue.
"""

from zllm_jax.checkpoint.base import Checkpoint, TokenizerFiles, Vocabulary
from zllm_jax.checkpoint.catalogue import KnownModel, is_pulled, known_models, resolve
from zllm_jax.checkpoint.opening import open_checkpoint, open_tokenizer
from zllm_jax.checkpoint.orbax_directory import OrbaxDirectory, convert
from zllm_jax.checkpoint.parameters import parameter_shapes
from zllm_jax.checkpoint.pull import pull

__all__ = [
    "Checkpoint",
    "KnownModel",
    "OrbaxDirectory",
    "TokenizerFiles",
    "Vocabulary",
    "convert",
    "is_pulled",
    "known_models",
    "open_checkpoint",
    "open_tokenizer",
    "parameter_shapes",
    "pull",
    "resolve",
]
