"""Where log lines go, and in which form: text for people, one JSON object a line for machines."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

from zllm_jax.errors import ConfigError

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


def add_log_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format", choices=FORMATS, help="of log lines on stderr (default: ZLLM_LOG_FORMAT, or text)"
    )
    parser.add_argument(
        "--log-level", choices=LEVELS, help="the least that is logged (default: ZLLM_LOG_LEVEL, or warning)"
    )


def configure(args: argparse.Namespace) -> None:
    """Send log lines to stderr as the flags say, or else the environment; raises `ConfigError` for an unknown word.

    A process that has handlers already keeps them, and its levels.
    """
    form = _chosen(args, "log_format", "ZLLM_LOG_FORMAT", FORMATS, "text")
    level = _chosen(args, "log_level", "ZLLM_LOG_LEVEL", LEVELS, "warning").upper()
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("zllm_jax").setLevel(level)


def _chosen(args: argparse.Namespace, name: str, variable: str, words: tuple[str, ...], default: str) -> str:
    chosen = getattr(args, name, None) or os.environ.get(variable) or default
    if chosen not in words:
        raise ConfigError(f"{variable} is {chosen!r}, must be one of {', '.join(words)}")
    return str(chosen)


class TextFormatter(logging.Formatter):
    """`zllm: message`, with the request where one is meant."""

    def format(self, record: logging.LogRecord) -> str:
        text, request = super().format(record), getattr(record, "request_id", None)
        return f"zllm: {text}" if request is None or str(request) in text else f"zllm: [{request}] {text}"


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and whatever the record was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN and value is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
