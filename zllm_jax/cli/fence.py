"""`zllm fence`: what a grammar becomes, and whether a text satisfies it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from zllm_jax.cli.output import add_json, print_json, print_table
from zllm_jax.errors import ConfigError, InvalidRequest
from zllm_jax.values import Fence

EXAMPLES = """\
examples:
  zllm fence compile --schema person.json
  zllm fence compile --regex "[0-9]{4}-[0-9]{2}" --json
  zllm fence check --schema person.json '{"name": "Ada"}'
  cat answer.json | zllm fence check --schema person.json --whitespace free -
  zllm fence check --lark sums.lark "(1+2)+3"

`check` exits with 1 where the text breaks the grammar, and shows where and what might have come instead.
"""


def add(commands: Any) -> None:
    fence: argparse.ArgumentParser = commands.add_parser(
        "fence",
        help="what a schema or pattern enforces",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = fence.add_subparsers(title="commands", metavar="COMMAND", required=True)
    compiling: argparse.ArgumentParser = actions.add_parser("compile", help="compile a grammar and show its size")
    add_fence_options(compiling, required=True)
    add_json(compiling, "the figures")
    compiling.set_defaults(run=_compile)
    checking: argparse.ArgumentParser = actions.add_parser("check", help="whether a text satisfies a grammar")
    add_fence_options(checking, required=True)
    checking.add_argument("text", metavar="TEXT", help="the text; - reads it from stdin, without its last line break")
    checking.set_defaults(run=_check)


def add_fence_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """The options that say what an output must be."""
    kind = parser.add_mutually_exclusive_group(required=required)
    kind.add_argument("--schema", metavar="FILE.json", type=Path, help="JSON that satisfies this JSON Schema")
    kind.add_argument("--regex", metavar="PATTERN", help="a text that this ECMA pattern matches as a whole")
    kind.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; may be repeated")
    kind.add_argument(
        "--lark", metavar="FILE", type=Path, help="a text of this Lark-like grammar (masks from the host)"
    )
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
    schema, lark = None, None
    if args.schema is not None:
        try:
            schema = json.loads(args.schema.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--schema {args.schema} cannot be read as JSON: {error}") from None
    if args.lark is not None:
        try:
            lark = args.lark.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--lark {args.lark} cannot be read: {error}") from None
    choices = tuple(args.choice or ())
    return Fence(
        schema=schema, regex=args.regex, choices=choices, lark=lark, whitespace=args.whitespace, relax=args.relax
    )


def _compile(args: argparse.Namespace) -> int:
    from zllm_jax.fence import compile_fence

    fence = fence_of(args)
    assert fence is not None
    if fence.lark is not None:
        return _compile_on_host(fence.lark, as_json=args.json)
    compiled = compile_fence(fence)
    machine = compiled.machine
    figures = {
        "followed_on": "device",
        "states": machine.num_states,
        "guarded_edges": len(machine.special),
        "compile_ms": round(1e3 * compiled.seconds, 1),
        "relaxed": list(compiled.relaxed),
        "notes": list(compiled.notes),
    }
    if args.json:
        print_json(figures)
        return 0
    columns = ("states", "guarded edges", "compiled in")
    print_table(columns, [(f"{machine.num_states}", f"{len(machine.special)}", f"{figures['compile_ms']} ms")])
    for line in (*(f"not enforced: {one}" for one in compiled.relaxed), *compiled.notes):
        print(f"note: {line}", file=sys.stderr)
    return 0


def _compile_on_host(grammar: str, *, as_json: bool) -> int:
    begun = time.perf_counter()
    _machine(Fence(lark=grammar))
    compile_ms = round(1e3 * (time.perf_counter() - begun), 1)
    if as_json:
        print_json({"followed_on": "host", "compile_ms": compile_ms})
    else:
        print_table(("followed on", "compiled in"), [("the host", f"{compile_ms} ms")])
    return 0


def _machine(fence: Fence) -> Any:
    """What steps through a text byte by byte: `begin`, `step`, `ended`."""
    from zllm_jax.fence import HostMachine, compile_fence, lark

    return compile_fence(fence).machine if fence.lark is None else HostMachine(lark(fence.lark))


def _check(args: argparse.Namespace) -> int:
    fence = fence_of(args)
    assert fence is not None
    text = args.text
    if text == "-":
        try:
            text = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"standard input is not UTF-8: {error}", param="text") from None
    machine, data = _machine(fence), text.encode(errors="surrogateescape")
    at = machine.begin
    for i, byte in enumerate(data):
        after = machine.step(at, byte)
        if after.dead:
            before = data[max(0, i - 40) : i].decode(errors="replace")
            print(f"broken at byte {i}, after {before!r}: {_shown(bytes([byte]))} may not come here")
            print(f"what may: {_allowed(machine, at)}")
            return 1
        at = after
    if not machine.ended(at):
        print(f"the text is a good beginning, but not whole; what may follow: {_allowed(machine, at)}")
        return 1
    print("satisfies the grammar")
    return 0


def _allowed(machine: Any, at: Any) -> str:
    """The bytes that may come next, runs of them shortened, and whether the text may end."""
    allowed = [byte for byte in range(256) if not machine.step(at, byte).dead]
    runs: list[list[int]] = []
    for byte in allowed:
        if runs and runs[-1][1] == byte - 1:
            runs[-1][1] = byte
        else:
            runs.append([byte, byte])
    parts = [_shown(bytes([a])) if a == b else f"{_shown(bytes([a]))}-{_shown(bytes([b]))}" for a, b in runs]
    return ", ".join([*parts, *(["the end"] if machine.ended(at) else [])]) or "nothing"


def _shown(byte: bytes) -> str:
    return byte.decode() if 0x21 <= byte[0] < 0x7F else f"0x{byte[0]:02x}"
