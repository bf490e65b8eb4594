"""Log lines: text for people, JSON for machines, each with the request that it is about."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator

import pytest

from zllm_jax.cli import logs, main
from zllm_jax.cli.logs import JsonFormatter, TextFormatter
from zllm_jax.errors import ConfigError

log = logging.getLogger("zllm_jax.tests")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`configure` in a process without handlers; afterwards logging is as it was."""
    root, ours = logging.getLogger(), logging.getLogger("zllm_jax")
    levels = root.level, ours.level
    for name in ("ZLLM_LOG_FORMAT", "ZLLM_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)

    def configure(**flags: str) -> None:
        monkeypatch.setattr(root, "handlers", [])  # pytest's own, which it puts there before each phase
        logs.configure(argparse.Namespace(**flags))

    yield configure
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    return log.makeRecord("zllm_jax.x", logging.INFO, __file__, 1, message, args, None, extra=extra)


def test_a_json_line_holds_what_the_record_was_given() -> None:
    text = JsonFormatter().format(
        record("took %d\nsteps", 3, request_id="req-1", ttft_s=0.25, error=None, what=b"\xff")
    )
    assert "\n" not in text
    line = json.loads(text)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "zllm_jax.x",
        "message": "took 3\nsteps",
        "request_id": "req-1",
        "ttft_s": 0.25,
        "what": "b'\\xff'",
    }


def test_an_exception_is_a_field() -> None:
    one = record("failed")
    try:
        raise OSError("disk full")
    except OSError as error:
        one.exc_info = (OSError, error, error.__traceback__)
    assert json.loads(JsonFormatter().format(one))["exception"].endswith("OSError: disk full")


def test_text_names_the_request_once() -> None:
    form = TextFormatter().format
    assert form(record("nothing")) == "zllm: nothing"
    assert form(record("late", request_id="req-1")) == "zllm: [req-1] late"
    assert form(record("request_id=req-1 late", request_id="req-1")) == "zllm: request_id=req-1 late"


def test_flags_go_over_the_environment(
    fresh: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZLLM_LOG_FORMAT", "text")
    monkeypatch.setenv("ZLLM_LOG_LEVEL", "error")
    fresh(log_format="json", log_level="info")
    log.info("seen", extra={"request_id": "req-1"})
    log.debug("not seen")
    logging.getLogger("another.library").info("not seen")
    (line,) = capsys.readouterr().err.splitlines()
    assert (json.loads(line)["message"], json.loads(line)["request_id"]) == ("seen", "req-1")


def test_the_environment_alone(
    fresh: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZLLM_LOG_LEVEL", "error")
    fresh()
    log.warning("not seen")
    log.error("seen")
    assert capsys.readouterr().err == "zllm: seen\n"


def test_a_process_that_logs_already_keeps_its_ways() -> None:
    before = logging.getLogger("zllm_jax").level, logging.getLogger().handlers[:]
    logs.configure(argparse.Namespace(log_level="error"))
    assert (logging.getLogger("zllm_jax").level, logging.getLogger().handlers) == before


def test_a_word_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ZLLM_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="ZLLM_LOG_LEVEL is 'loud', must be one of debug, info, warning, error"):
        logs.configure(argparse.Namespace())
    assert main(["models"]) == 2
    assert "ZLLM_LOG_LEVEL" in capsys.readouterr().err
