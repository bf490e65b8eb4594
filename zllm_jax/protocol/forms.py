"""The form that an answer must have, as both of OpenAI's protocols ask for it: a schema, which becomes a fence."""

from __future__ import annotations

import reprlib

from zllm_jax.errors import InvalidRequest
from zllm_jax.protocol.reading import Json, members, only, required, typed
from zllm_jax.values import Fence


def openai_form(form: Json, param: str, *, inside: str | None = None) -> Fence | None:
    """`text`, `json_object` or `json_schema`. inside: the member of the latter that holds name and schema.

    A schema is enforced exactly, or refused; `strict: false` leaves out what cannot be.
    """
    kind = form.get("type")
    if kind in ("text", "json_object"):
        only(form, ("type",), param)
        return None if kind == "text" else Fence(schema={"type": "object"})
    if kind != "json_schema":
        raise InvalidRequest(
            f"{param}.type is {reprlib.repr(kind)}, must be text, json_object or json_schema", param=f"{param}.type"
        )
    own: tuple[str, ...] = ("type",)
    if inside is not None:
        only(form, ("type", inside), param)
        own, param = (), f"{param}.{inside}"
        form = members(form.get(inside), param)
    only(form, (*own, "name", "description", "schema", "strict"), param)
    required(form, "name", str, prefix=f"{param}.")
    schema: Json = required(form, "schema", dict, prefix=f"{param}.")
    return Fence(schema=schema, relax=not typed(form, "strict", bool, True, prefix=f"{param}."))
