"""`zllm generate` and `zllm serve`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zllm_jax.cli.engine import add_engine_options, open_engine
from zllm_jax.cli.fence import add_fence_options, fence_of
from zllm_jax.cli.logs import add_log_options
from zllm_jax.cli.output import ConsoleProgress, add_json, print_json
from zllm_jax.cli.tools import Printer, add_tool_options, tool_fields
from zllm_jax.config import zllm_home
from zllm_jax.errors import ConfigError, InvalidRequest
from zllm_jax.values import Envelope, Request, Sampling, Status

if TYPE_CHECKING:
    from zllm_jax.wiring import Engine

GENERATE_EXAMPLES = """\
examples:
  zllm generate --prompt "It is a truth universally acknowledged" --max-tokens 40 --temperature 0
  echo "The sea is" | zllm generate --prompt -
  zllm generate --chat chat.json --schema answer.json         answer in JSON that satisfies a schema
  zllm generate --prompt "3 + 4 = " --lark sums.lark           a text of a grammar
  zllm generate --chat chat.json --tools tools.json --tool-choice required        call one of the tools, or several
  zllm generate --chat chat.json --tools tools.json --tool-choice get_weather --no-parallel-calls
  zllm generate --chat chat.json --seed 7 --json        chat.json: [{"role": "user", "content": "Hello"}]

tools.json: [{"name": "get_weather", "description": "The weather of a city.", "parameters": {"type": "object",
"properties": {"city": {"type": "string"}}, "required": ["city"]}}]. A call satisfies its tool's schema, always; it is
printed as -> get_weather({"city": "Oslo"}). Nothing is run.

Text is written as it comes. --json prints the whole envelope at the end; with --stream too, one JSON line a piece.
"""

SERVE_EXAMPLES = """\
examples:
  zllm serve --model smollm2-135m
  ZLLM_API_KEY=... zllm serve --host 0.0.0.0 --port 8080 --set max_batch=16

A client then talks to http://127.0.0.1:8000/v1 as it would to the OpenAI API.
"""


def add(commands: Any) -> None:
    generate: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="let a model write",
        epilog=GENERATE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_options(generate)
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="text to continue as it is; - reads it from stdin")
    source.add_argument("--chat", metavar="FILE.json", type=Path, help="messages; the model's chat template is applied")
    generate.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    generate.add_argument("--temperature", type=float, metavar="T", help="0 takes the most likely token (default: 1)")
    generate.add_argument("--top-k", type=int, metavar="K", help="keep the K most likely tokens (default: all)")
    generate.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens of mass P (default: 1)")
    generate.add_argument("--min-p", type=float, metavar="P", help="keep tokens P times as likely as the likeliest")
    generate.add_argument("--seed", type=int, metavar="N", help="same seed, same tokens (default: drawn and reported)")
    generate.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated"
    )
    add_fence_options(generate)
    generate.add_argument(
        "--loop-guard",
        action=argparse.BooleanOptionalAction,
        help="lead the output out of loops (default: EngineConfig.loop_guard)",
    )
    add_tool_options(generate)
    generate.add_argument("--stream", action="store_true", help="with --json: one JSON line a piece")
    add_json(generate, "the envelope")
    add_log_options(generate)
    generate.set_defaults(run=_generate)

    serve: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        epilog=SERVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_options(serve)
    serve.add_argument("--host", default="127.0.0.1", help="default: %(default)s, this machine only")
    serve.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    serve.add_argument("--api-key", metavar="KEY", help="asked of every client; better set as ZLLM_API_KEY")
    add_log_options(serve)
    serve.set_defaults(run=_serve)


def _generate(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    sampling = Sampling(**{name: value for name, value in given.items() if value is not None})
    request = Request(
        _input(args),
        max_tokens=args.max_tokens,
        sampling=sampling,
        stop=tuple(args.stop),
        fence=fence_of(args),
        loop_guard=args.loop_guard,
        **tool_fields(args),
    )
    with ConsoleProgress() as progress:
        engine = open_engine(args, progress, max_batch=1, device_cache_bytes=None)  # one request, then it ends
    with engine:
        envelope = _streamed(engine, request, as_json=args.json, pieces=args.stream)
    if args.json and not args.stream:
        print_json(_plain(envelope))
    if not args.json:
        print()
        print(_closing_line(envelope), file=sys.stderr)
    return 0 if envelope.status in (Status.COMPLETED, Status.TRUNCATED) else 1


def _input(args: argparse.Namespace) -> Any:
    if args.prompt is not None:
        try:
            return sys.stdin.read() if args.prompt == "-" else args.prompt
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"standard input is not UTF-8: {error}", param="prompt") from None
    try:
        messages = json.loads(args.chat.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat {args.chat} cannot be read as JSON: {error}") from None
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise ConfigError(f'--chat {args.chat} must hold a list such as [{{"role": "user", "content": "Hello"}}]')
    return messages


def _streamed(engine: Engine, request: Request, *, as_json: bool, pieces: bool) -> Envelope:
    """Print the answer as it comes; leaving early for any reason cancels it."""
    ticket = engine.submit(request)
    envelope, show = None, Printer()
    try:
        for delta in ticket:
            if as_json and pieces:
                print(json.dumps(_plain(delta), ensure_ascii=False), flush=True)
            elif not as_json:
                show(delta)
            envelope = delta.envelope or envelope
    except BaseException:
        ticket.cancel()
        raise
    assert envelope is not None, "the last delta carries the envelope"
    return envelope


def _plain(value: Envelope | Any) -> dict[str, Any]:
    """As JSON, the derived figures (TTFT, total, prefilled tokens) included."""
    data = dataclasses.asdict(value)
    envelope = value if isinstance(value, Envelope) else value.envelope
    if envelope is not None:
        target = data if isinstance(value, Envelope) else data["envelope"]
        target["timing"] |= {"ttft_s": envelope.timing.ttft_s, "total_s": envelope.timing.total_s}
        target["usage"] |= {"prefilled_tokens": envelope.usage.prefilled_tokens}
    return data


def _closing_line(envelope: Envelope) -> str:
    usage, timing = envelope.usage, envelope.timing
    later = usage.generated_tokens - 1
    speed = f", {later / timing.decode_s:.1f} tokens/s" if later > 0 and timing.decode_s > 0 else ""
    loops = envelope.telemetry.loops_broken
    broken = f"; {loops} loop{'s' if loops > 1 else ''} broken" if loops else ""
    why = f" ({envelope.error})" if envelope.error else ""
    return (
        f"[{envelope.status.value}{why}: {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached "
        f"({usage.tier.value}); first token after {timing.ttft_s:.3f} s; "
        f"{usage.generated_tokens} generated{speed}{broken}; seed {envelope.telemetry.seed}]"
    )


def _serve(args: argparse.Namespace) -> int:
    from zllm_jax.server import serve
    from zllm_jax.server.run import is_loopback

    api_key = args.api_key or os.environ.get("ZLLM_API_KEY")
    if api_key is None and not is_loopback(args.host):
        raise ConfigError(f"--host {args.host} is reachable from outside: set ZLLM_API_KEY, or serve on 127.0.0.1")
    with ConsoleProgress() as progress:
        engine = open_engine(args, progress)
        engine.warmup(progress=progress)
    with engine:
        history = zllm_home() / "responses.sqlite"
        serve(engine, args.host, args.port, api_key=api_key, history=history, own_logs=False)
    return 0
