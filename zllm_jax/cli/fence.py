"""`zllm fence`: what a grammar becomes, and whether a text satisfies it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zllm_jax.cli.output import add_json, print_json, print_table
from zllm_jax.errors import ConfigError, InvalidRequest
from zllm_jax.values import Fence

if TYPE_CHECKING:
    from zllm_jax.fence import Machine, Refused

EXAMPLES = """\
examples:
  zllm fence compile person.json --model smollm2-135m
  zllm fence compile --regex "[0-9]{4}-[0-9]{2}" --json
  zllm fence check person.json --text '{"name": "Ada"}'
  cat answer.json | zllm fence check person.json --whitespace free --text -
  zllm fence check sums.lark --kind lark --text "(1+2)+3"

`check` exits with 1 where the text breaks the grammar, and shows where and what might have come instead.
"""
KINDS = ("json-schema", "regex", "lark")


def add(commands: Any) -> None:
    fence: argparse.ArgumentParser = commands.add_parser(
        "fence",
        help="what a schema or pattern enforces",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = fence.add_subparsers(title="commands", metavar="COMMAND", required=True)
    compiling: argparse.ArgumentParser = actions.add_parser("compile", help="compile a grammar and show its size")
    _add_grammar(compiling)
    compiling.add_argument(
        "--model", metavar="NAME", help="also its masks over this model's vocabulary: bytes and time"
    )
    add_json(compiling, "the figures")
    compiling.set_defaults(run=_compile)
    checking: argparse.ArgumentParser = actions.add_parser("check", help="whether a text satisfies a grammar")
    _add_grammar(checking)
    checking.add_argument(
        "--text", required=True, metavar="TEXT", help="the text; - reads it from stdin, without its last line break"
    )
    checking.set_defaults(run=_check)


def _add_grammar(parser: argparse.ArgumentParser) -> None:
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the grammar")
    given.add_argument("--regex", metavar="PATTERN", help="instead of a file: an ECMA pattern")
    given.add_argument("--choice", action="append", metavar="TEXT", help="instead of a file: a text; may be repeated")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help="what the file is (default: %(default)s)")
    _add_of_json(parser)


def _grammar_of(args: argparse.Namespace) -> Fence:
    options = {"whitespace": args.whitespace, "relax": args.relax}
    if args.file is None:
        return Fence(regex=args.regex, choices=tuple(args.choice or ()), **options)
    text = _read(args.file, "FILE")
    if args.kind == "json-schema":
        return Fence(schema=_json(text, f"FILE {args.file}"), **options)
    return Fence(lark=text, **options) if args.kind == "lark" else Fence(regex=text.removesuffix("\n"), **options)


def add_fence_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what an output must be."""
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--schema", metavar="FILE.json", type=Path, help="JSON that satisfies this JSON Schema")
    kind.add_argument("--regex", metavar="PATTERN", help="a text that this ECMA pattern matches as a whole")
    kind.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; may be repeated")
    kind.add_argument(
        "--lark", metavar="FILE", type=Path, help="a text of this Lark-like grammar (masks from the host)"
    )
    _add_of_json(parser)


def _add_of_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--whitespace",
        choices=("spaced", "dense", "free"),
        default="spaced",
        help="of JSON: `, ` and `: `, none, or any (default: %(default)s)",
    )
    parser.add_argument("--relax", action="store_true", help="leave out, and report, what cannot be enforced exactly")


def fence_of(args: argparse.Namespace) -> Fence | None:
    """What the options say; None where they say nothing."""
    if args.schema is None and args.regex is None and args.lark is None and not args.choice:
        return None
    schema = None if args.schema is None else _json(_read(args.schema, "--schema"), f"--schema {args.schema}")
    lark = None if args.lark is None else _read(args.lark, "--lark")
    choices = tuple(args.choice or ())
    return Fence(
        schema=schema, regex=args.regex, choices=choices, lark=lark, whitespace=args.whitespace, relax=args.relax
    )


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path} cannot be read: {error}") from None


def _json(text: str, where: str) -> Any:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} cannot be read as JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply to be read") from None
    if schema is None:
        raise ConfigError(f"{where} is null: a schema is an object, true or false")
    return schema


def _compile(args: argparse.Namespace) -> int:
    from zllm_jax.fence import Grammar, Machine

    begun = time.perf_counter()
    grammar = Grammar(_grammar_of(args))
    compile_ms = round(1e3 * (time.perf_counter() - begun), 1)
    machine = grammar.machine
    if not isinstance(machine, Machine):
        if args.model is not None:
            raise ConfigError("--model shows masks that are kept: those of a Lark-like grammar are made at each step")
        figures: dict[str, Any] = {"followed_on": "host", "compile_ms": compile_ms}
    else:
        figures = {
            "followed_on": "device",
            "states": machine.num_states,
            "guarded_edges": len(machine.special),
            "compile_ms": compile_ms,
            **(_tables(machine, args.model) if args.model is not None else {}),
        }
    if args.json:
        print_json({**figures, "relaxed": list(grammar.relaxed), "notes": list(grammar.notes)})
        return 0
    values = [f"{value:,}" if isinstance(value, int) else str(value) for value in figures.values()]
    print_table([name.replace("_", " ") for name in figures], [values])
    for line in (*(f"not enforced: {one}" for one in grammar.relaxed), *grammar.notes):
        print(f"note: {line}", file=sys.stderr)
    return 0


def _tables(machine: Machine, model: str) -> dict[str, Any]:
    """What the grammar is over a model's vocabulary."""
    from zllm_jax.checkpoint import open_checkpoint, resolve
    from zllm_jax.dialect import load_tokenizer
    from zllm_jax.engine.fences import vocabulary_of
    from zllm_jax.fence import compile_tokens

    checkpoint = open_checkpoint(resolve(model))
    if checkpoint.tokenizer is None:
        raise ConfigError(f"--model {model} has no tokenizer: a fence is made of its tokens")
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    vocabulary = vocabulary_of(tokenizer, checkpoint.config.vocab_size)
    assert vocabulary.levels  # made once a model, not a grammar
    begun = time.perf_counter()
    tables = compile_tokens(machine, vocabulary)
    tables_ms = round(1e3 * (time.perf_counter() - begun), 1)
    return {"tokens": len(vocabulary), "masks": len(tables.masks), "bytes": tables.nbytes, "tables_ms": tables_ms}


def _check(args: argparse.Namespace) -> int:
    from zllm_jax.fence import Grammar

    text = args.text
    if text == "-":
        try:
            text = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"standard input is not UTF-8: {error}", param="text") from None
    data = text.encode(errors="surrogateescape")
    refused = Grammar(_grammar_of(args)).first_error(data)
    if refused is None:
        print("satisfies the grammar")
        return 0
    offset, may = refused.offset, _allowed(refused)
    if offset == len(data):
        print(f"the text is a good beginning, but not whole; what may follow: {may}")
        return 1
    before = data[max(0, offset - 40) : offset].decode(errors="replace")
    print(f"broken at byte {offset}, after {before!r}: {_shown(data[offset : offset + 1])} may not come here")
    print(f"what may: {may}")
    return 1


def _allowed(refused: Refused) -> str:
    """The bytes that may come next, runs of them shortened, and whether the text may end."""
    runs: list[list[int]] = []
    for byte in refused.allowed:
        if runs and runs[-1][1] == byte - 1:
            runs[-1][1] = byte
        else:
            runs.append([byte, byte])
    parts = [_shown(bytes([a])) if a == b else f"{_shown(bytes([a]))}-{_shown(bytes([b]))}" for a, b in runs]
    return ", ".join([*parts, *(["the end"] if refused.may_end else [])]) or "nothing"


def _shown(byte: bytes) -> str:
    return byte.decode() if 0x21 <= byte[0] < 0x7F else f"0x{byte[0]:02x}"
