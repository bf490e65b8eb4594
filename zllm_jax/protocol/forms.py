"""The form that an answer must have, as all protocols ask for it: a schema, which becomes a fence."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence

from zllm_jax.errors import InvalidRequest
from zllm_jax.protocol.reading import Json, members, required, typed
from zllm_jax.values import Fence, ToolChoice


def openai_form(form: Json, param: str, *, inside: str | None = None) -> Fence | None:
    """`text`, `json_object` or `json_schema`. inside: the member of the latter that holds name and schema.

    A schema is enforced exactly, or refused; `strict: false` leaves out what cannot be.
    """
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Fence(schema={"type": "object"})
    if kind != "json_schema":
        raise InvalidRequest(
            f"{param}.type is {reprlib.repr(kind)}, must be text, json_object or json_schema", param=f"{param}.type"
        )
    if inside is not None:
        param = f"{param}.{inside}"
        form = members(form.get(inside), param)
    required(form, "name", str, prefix=f"{param}.")
    schema: Json = required(form, "schema", dict, prefix=f"{param}.")
    return Fence(schema=schema, relax=not typed(form, "strict", bool, True, prefix=f"{param}."))


def check_together(tools: Sequence[Json], choice: ToolChoice, fence: Fence | None, *, param: str, none: str) -> None:
    """Raises where an answer would have to be of a form and may be calls. none: how a client says that none may."""
    if tools and fence is not None and choice != "none":
        raise InvalidRequest(
            f"{param} and calls of tools cannot share one answer: leave out {param} or tools, or send tool_choice: "
            f"{none}",
            param=param,
        )
