"""JSON Schema as a machine over bytes.

The way: `document` finds subschemas and references, `reader` turns keywords into sets of values (the algebra is in
`values`), `compiler` with `objects` and `arrays` writes the states, `finish` makes them few. Knows nothing of tokens.
"""

from zllm_jax.fence.schema.compiler import Whitespace
from zllm_jax.fence.schema.schema import (
    CompiledSchema,
    SchemaWriter,
    inhabited,
    json_schema,
    text_language,
    with_error_variant,
)

__all__ = [
    "CompiledSchema",
    "SchemaWriter",
    "Whitespace",
    "inhabited",
    "json_schema",
    "text_language",
    "with_error_variant",
]
