"""The door: a JSON Schema in, a machine out, with a report of what it does not enforce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zllm_jax.fence.automaton import ByteAutomaton
from zllm_jax.fence.machine import Machine, MachineBuilder
from zllm_jax.fence.schema.arrays import write_array
from zllm_jax.fence.schema.compiler import Compiler, Whitespace
from zllm_jax.fence.schema.document import Document, Schema
from zllm_jax.fence.schema.finish import finished
from zllm_jax.fence.schema.objects import write_object
from zllm_jax.fence.schema.reader import Options, Reader


@dataclass(frozen=True)
class CompiledSchema:
    """relaxed: what was left out on request, as "path: reason". unknown: keywords that JSON Schema does not have."""

    machine: Machine
    relaxed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def json_schema(
    schema: Schema, *, whitespace: Whitespace = "spaced", formats: bool = True, relax: bool = False
) -> CompiledSchema:
    """The machine of exactly the JSON texts whose values satisfy `schema` (draft 2020-12; draft-07 where it says so).

    Members may come in any order, each of 64 listed ones once. Texts that the schema lists (names, `const`, `enum`) are
    spelled as `json.dumps` does, all others as JSON allows. whitespace: "spaced" writes `, ` and `: `, "dense" `,` and
    `:`; "free" allows any. formats: whether `format` is a rule or a remark. Arrays and objects nest at most
    `machine.MAX_DEPTH` deep.

    Raises `UnsupportedGrammar` with the path of a keyword that cannot be enforced exactly; with `relax`, such keywords
    are left out and reported.
    """
    builder, module_of = MachineBuilder(), [0, 0]
    end = builder.state(accepting=True)
    writer = SchemaWriter(builder, module_of, whitespace, Options(formats=formats, relax=relax))
    start = writer.value(schema, end)
    writer.finish()
    machine = finished(builder.build(start), np.array(module_of))
    return CompiledSchema(machine, tuple(dict.fromkeys(writer.relaxed)), tuple(dict.fromkeys(writer.unknown)))


@dataclass(eq=False)
class SchemaWriter:
    """Writes values of schemas into a machine under construction. module_of: by state, the first one of its frame."""

    builder: MachineBuilder
    module_of: list[int]
    whitespace: Whitespace = "spaced"
    options: Options = field(default_factory=Options)
    relaxed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    _compilers: list[Compiler] = field(default_factory=list)

    def value(self, schema: Schema, after: int, module: int = 0) -> int:
        """A state in which a value of `schema` begins; it goes on in `after`. Raises `UnsupportedGrammar`."""
        reader = Reader(Document(schema), self.options, relaxed=self.relaxed, unknown=self.unknown)
        compiler = Compiler(reader, self.whitespace, write_object, write_array, self.builder, self.module_of)
        self._compilers.append(compiler)
        return compiler.root(after, module)

    def finish(self) -> None:
        """Once all that follows the values is written."""
        for compiler in self._compilers:
            compiler.finish()


def text_language(schema: Schema) -> ByteAutomaton | None:
    """The texts (UTF-8, not JSON) that satisfy a schema; None where none does. Raises `UnsupportedGrammar`."""
    reader = Reader(Document(schema))
    strings = reader.values(reader.root).string
    return None if strings is None else strings.automaton


def inhabited(schema: Schema) -> bool:
    """Whether any value satisfies a schema. Raises `UnsupportedGrammar`."""
    reader = Reader(Document(schema))
    return reader.inhabited(reader.root)


def with_error_variant(schema: Mapping[str, Any], name: str = "error") -> dict[str, Any]:
    """The schema or an object with one text, `{"error": "..."}`: a way to say that no answer is known.

    A strict schema without such a branch forces a model to invent.
    """
    error = {
        "type": "object",
        "properties": {name: {"type": "string"}},
        "required": [name],
        "additionalProperties": False,
    }
    draft = {"$schema": schema["$schema"]} if "$schema" in schema else {}
    return {**draft, "anyOf": [{"$id": "urn:schema:answer", **schema}, error]}  # its references stay its own
