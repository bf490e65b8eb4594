"""Tools on the command line: the options, and how calls are printed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from zllm_jax.errors import ConfigError
from zllm_jax.values import Delta, NamedTool


def add_tool_options(parser: argparse.ArgumentParser) -> None:
    """The options that say what may be called."""
    parser.add_argument(
        "--tools",
        metavar="FILE.json",
        type=Path,
        help='what the model may call: a list of {"name", "description", "parameters"}, or of the API\'s tools',
    )
    parser.add_argument(
        "--tool-choice",
        metavar="CHOICE",
        help="auto: text, calls or both; none: no call; required: at least one; NAME: that tool (default: auto)",
    )
    parser.add_argument("--no-parallel-calls", action="store_true", help="at most one call")
    parser.add_argument(
        "--tool-dialect",
        metavar="DIALECT",
        help="how calls are written: chatml, dsml, dsml-v3.2, glm-4.6 or glm-4.7 (default: as the model was trained)",
    )


def tool_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Request` that the options set. Raises `ConfigError` for a file that holds no tools."""
    fields: dict[str, Any] = {"tool_dialect": args.tool_dialect, "parallel_tool_calls": not args.no_parallel_calls}
    if args.tools is not None:
        fields["tools"] = _tools(args.tools)
    if args.tool_choice is not None:
        choice = args.tool_choice
        fields["tool_choice"] = choice if choice in ("auto", "none", "required") else NamedTool(choice)
    return fields


def _tools(path: Path) -> tuple[dict[str, Any], ...]:
    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools {path} cannot be read as JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools) or not tools:
        raise ConfigError(f'--tools {path} must hold a list such as [{{"name": "get_time", "parameters": {{}}}}]')
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


class Printer:
    """Shows deltas as they come: text as it is, each call on a line of its own as NAME(ARGUMENTS)."""

    def __init__(self) -> None:
        self._line_open = False

    def __call__(self, delta: Delta) -> None:
        self._say(delta.reasoning + delta.text)
        for call in delta.calls:
            if call.name:
                self._say(("\n" if self._line_open else "") + f"-> {call.name}(")
            self._say(call.arguments)
            if call.done:
                self._say(")\n")
            if call.malformed:
                self._say(f" [no call: {call.malformed}]\n")

    def _say(self, text: str) -> None:
        if text:
            print(text, end="", flush=True)
            self._line_open = not text.endswith("\n")
