"""Generations by a small model under schemas and tools, and what each of them must be; `python -m` prints the figures.

    python -m tests.e2e.generations [--cases 300] [--max-tokens 256] [--off] [--unbounded]

A small model at temperature 1 seldom ends a text by itself, so that the limit cuts every second answer: texts and lists
that have no bounds get some, as in schemas that are written for such a model; --unbounded leaves them as they are.
--off: the same requests to an engine that follows no fences, and how many answers are valid all the same.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema

from tests.dialect.tool_sets import SETS
from tests.fence import corpus
from zllm_jax import Engine, EngineConfig, Envelope, Fence, NamedTool, Request, Sampling, Status
from zllm_jax.checkpoint import pull
from zllm_jax.dialect import DIALECTS, Detokenizer, ToolParser, call_machine, tools_of
from zllm_jax.fence import compile_fence
from zllm_jax.values import ToolChoice

FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
TRAINED_ON = ("dsml", "glm-4.7", "chatml")
MAX_CHARS, MAX_ITEMS = 24, 3
CHOICES = ("auto", "required", "named", "none")
CONFIG = EngineConfig(
    max_seq_tokens=2048,
    device_cache_bytes=512 << 20,
    disk_cache=False,
    decode_buckets=(8,),
    prefill_buckets=(256,),
    fence_states=8192,
)


@dataclass(frozen=True)
class Case:
    """One request. kind: what it is counted as. schema: None where the request has tools."""

    kind: str
    request: Request
    schema: Any = None


def as_it_is(schema: Any) -> Any:
    return schema


def bounded(schema: Any) -> Any:
    """The schema with a bound on every text and list that has none."""
    if isinstance(schema, list):
        return [bounded(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: value if name in ("enum", "const") else bounded(value) for name, value in schema.items()}
    kinds = made.get("type")
    if kinds == "string" and not made.keys() & {"pattern", "format", "maxLength", "enum", "const"}:
        made["maxLength"] = max(MAX_CHARS, made.get("minLength", 0))
    if kinds == "array" and "maxItems" not in made:
        made["maxItems"] = max(MAX_ITEMS, made.get("minItems", 0))
    return made


def cases(count: int, *, max_tokens: int, bound: Callable[[Any], Any] = bounded) -> list[Case]:
    """A third under the 50 schemas, two thirds under the 30 sets of tools, in all dialects and with all choices, mixed.

    300 of them have each schema twice, and each set of tools twice or more in each dialect.
    """
    schemas, names = [bound(schema) for schema in corpus.schemas(50, seed=3)], list(SETS)
    made = []
    for i in range(count):
        number = i // 3
        if i % 3 == 0:
            made.append(schema_case(schemas[number % 50], seed=i, max_tokens=max_tokens))
            continue
        number = 2 * number + i % 3 - 1
        turn = number // 30
        dialect, choice = TRAINED_ON[turn % 3], CHOICES[(number + turn) % 4]
        made.append(tool_case(names[number % 30], dialect, choice, seed=i, max_tokens=max_tokens, bound=bound))
    return made


def schema_case(schema: Any, *, seed: int, max_tokens: int) -> Case:
    prompt = "Answer with a short made-up example, as JSON that satisfies this schema:\n" + json.dumps(schema)[:1500]
    request = Request(
        [{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        sampling=Sampling(temperature=1.0, seed=seed),
        fence=Fence(schema=schema),
    )
    return Case("schema", request, schema)


def tool_case(
    name: str, dialect: str, choice: str, *, seed: int, max_tokens: int, bound: Callable[[Any], Any] = as_it_is
) -> Case:
    tools = bound(SETS[name])
    wanted = tools[seed % len(tools)]["function"]
    demanded: Any = NamedTool(wanted["name"]) if choice == "named" else choice
    request = Request(
        [{"role": "user", "content": f"Please do this with a tool, with short values: {wanted['description']}"}],
        max_tokens=max_tokens,
        sampling=Sampling(temperature=1.0, seed=seed),
        tools=tuple(tools),
        tool_choice=demanded,
        parallel_tool_calls=seed % 5 > 1,
        tool_dialect=dialect,
    )
    return Case(choice, request)


def answers(engine: Engine, requests: Sequence[Request]) -> Iterator[Envelope]:
    """In the order of the requests, all of which share the batch."""
    for call in [engine.submit(one) for one in requests]:
        yield next(delta.envelope for delta in call if delta.envelope is not None)


def complaint(case: Case, envelope: Envelope, raw: str) -> str:
    """What is wrong with an answer; empty where nothing is. An answer cut by the limit must be a good beginning."""
    if envelope.status not in (Status.COMPLETED, Status.TRUNCATED):
        return f"ended as {envelope.status}: {envelope.error}"
    if case.schema is None:
        return _tool_complaint(case.request, envelope, raw)
    if envelope.status is Status.TRUNCATED:
        return _beginning(compile_fence(Fence(schema=case.schema)).machine, raw)
    try:
        value = json.loads(raw)
    except ValueError as error:
        return f"no JSON: {error}"
    checker = jsonschema.Draft202012Validator(case.schema, format_checker=FORMATS)
    return "" if checker.is_valid(value) else "breaks the schema"


def _tool_complaint(request: Request, envelope: Envelope, raw: str) -> str:
    tools, choice = tools_of(request.tools), request.tool_choice
    layout = DIALECTS[request.tool_dialect or ""]().layout
    parser = ToolParser(layout, tools, thinking=False)
    parser.feed(raw)
    parser.close()
    turn = parser.turn()
    if turn.malformed:
        return f"a malformed call: {turn.malformed[0].reason}"
    calls = [(call.name, call.arguments) for call in turn.calls]
    if calls != [(call.name, call.arguments) for call in envelope.calls] or turn.text != envelope.text:
        return "the stream was read otherwise than the whole"
    schemas = {tool.name: tool.parameters for tool in tools}
    for name, arguments in calls:
        if name not in schemas:
            return f"{name} was not offered"
        if not jsonschema.Draft202012Validator(schemas[name], format_checker=FORMATS).is_valid(arguments):
            return f"a call of {name} breaks its schema"
    if not request.parallel_tool_calls and len(calls) > 1:
        return "more than one call"
    if envelope.status is Status.TRUNCATED:
        machine = call_machine(layout, tools, choice, parallel=request.parallel_tool_calls)
        return _beginning(machine, raw)
    return "a call is not whole" if turn.incomplete else _choice_complaint(choice, [name for name, _ in calls], raw)


def _choice_complaint(choice: ToolChoice, names: list[str], raw: str) -> str:
    if choice == "none" and names:
        return "called, though none may be"
    if choice not in ("auto", "none") and not names:
        return f"no call, though one is required: {raw[:60]!r}"
    if isinstance(choice, NamedTool) and set(names) != {choice.name}:
        return f"called {names}, not {choice.name}"
    return ""


def _beginning(machine: Any, raw: str) -> str:
    return "no good beginning" if machine.run(raw.encode()).dead else ""


def raw_text(engine: Engine, envelope: Envelope) -> str:
    """All that was generated, but for half a character at its end."""
    assert engine.tokenizer is not None
    return Detokenizer(engine.tokenizer, continuing=True).feed(envelope.tokens)


def unfenced(request: Request) -> Request:
    """The same demand without what an engine without fences must refuse."""
    return replace(request, fence=None, tool_choice="auto", parallel_tool_calls=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--off", action="store_true")
    parser.add_argument("--unbounded", action="store_true")
    args = parser.parse_args()
    config = replace(CONFIG, fence_states=0) if args.off else CONFIG
    all_cases = cases(args.cases, max_tokens=args.max_tokens, bound=as_it_is if args.unbounded else bounded)
    whole, cut, wrong = Counter[str](), Counter[str](), Counter[str]()
    with Engine.from_pretrained(Path(pull("smollm2-135m")), config) as engine:
        for start in range(0, len(all_cases), 50):
            some = all_cases[start : start + 50]
            requests = [unfenced(one.request) if args.off else one.request for one in some]
            for case, envelope in zip(some, answers(engine, requests), strict=True):
                if said := complaint(case, envelope, raw_text(engine, envelope)):
                    wrong[case.kind] += 1
                    if not args.off:
                        print(f"{case.kind}: {said}: {raw_text(engine, envelope)!r}")
                else:
                    (whole if envelope.status is Status.COMPLETED else cut)[case.kind] += 1
            figures = f"{whole.total()} valid, {cut.total()} cut, {wrong.total()} wrong"
            print(f"{start + len(some)} of {len(all_cases)}: {figures}", flush=True)
    for kind in ("schema", *CHOICES):
        print(f"{kind:9} {whole[kind]:4} valid {cut[kind]:4} cut by max_tokens {wrong[kind]:4} wrong")
    print(f"{'all':9} {whole.total():4} valid {cut.total():4} cut by max_tokens {wrong.total():4} wrong")


if __name__ == "__main__":
    main()
