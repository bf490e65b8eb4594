"""`zllm fence` on grammars that a host follows, and `zllm generate` with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zllm_jax.cli import main

SUMS = 'start: sum\nsum: term ("+" term)*\nterm: /[0-9]/ | "(" sum ")"\n'


@pytest.fixture
def sums(tmp_path: Path) -> str:
    path = tmp_path / "sums.lark"
    path.write_text(SUMS, encoding="utf-8")
    return str(path)


def test_compile_says_where_a_grammar_is_followed(sums: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fence", "compile", sums, "--kind", "lark"]) == 0
    assert "host" in capsys.readouterr().out
    assert main(["fence", "compile", sums, "--kind", "lark", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["followed_on"], figures["compile_ms"] > 0) == ("host", True)
    assert main(["fence", "compile", "--regex", "a+", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["followed_on"] == "device"


@pytest.mark.parametrize(
    "text, code, said",
    [
        ("(1+2)+3", 0, "satisfies the grammar"),
        ("(1+", 1, "a good beginning, but not whole; what may follow: (, 0-9"),
        ("12", 1, "broken at byte 1, after '1': 2 may not come here"),
        ("(" * 40 + "7" + ")" * 40, 0, "satisfies the grammar"),
    ],
)
def test_check_looks_at_a_text(sums: str, text: str, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fence", "check", sums, "--kind", "lark", "--text", text]) == code
    assert said in capsys.readouterr().out


def test_a_grammar_that_cannot_be_used_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.lark"
    path.write_text("start: missing\n", encoding="utf-8")
    assert main(["fence", "check", str(path), "--kind", "lark", "--text", "x"]) != 0
    assert "line 1, column 8: unknown name" in capsys.readouterr().err
    assert main(["generate", "--prompt", "x", "--lark", str(tmp_path / "none.lark")]) != 0
    assert "none.lark cannot be read" in capsys.readouterr().err


def test_the_kinds_of_grammar_are_one_door(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, pattern = tmp_path / "person.json", tmp_path / "year"
    schema.write_text('{"type": "object", "required": ["name"]}', encoding="utf-8")
    pattern.write_text("[0-9]{4}\n", encoding="utf-8")
    assert main(["fence", "check", str(schema), "--text", '{"name": 1}']) == 0
    assert main(["fence", "check", str(schema), "--text", "{}"]) == 1
    assert main(["fence", "check", str(pattern), "--kind", "regex", "--text", "1843"]) == 0
    assert main(["fence", "check", "--choice", "yes", "--choice", "no", "--text", "no"]) == 0
    assert main(["fence", "check", "--regex", "[0-9]{4}", "--text", "184x"]) == 1
    assert "broken at byte 3" in capsys.readouterr().out
    assert main(["fence", "compile", str(pattern)]) != 0
    assert "cannot be read as JSON" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["fence", "check", "--text", "1843"])


def test_compile_shows_the_masks_over_a_vocabulary(
    smollm2: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["fence", "compile", "--regex", "[0-9]{4}", "--model", str(smollm2), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["tokens"], figures["states"]) == (49152, 6)
    assert 0 < figures["masks"] <= figures["states"]
    assert figures["bytes"] >= figures["masks"] * 49152 // 8
