"""Documents say what the code has: every name, setting and flag; figures from committed results; links that resolve."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.machinery
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import zllm_jax
from zllm_jax.config import ContextExtension, EngineConfig
from zllm_jax.values import Envelope, Request, Sampling, Timing, Usage

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def documents(repo: Path) -> list[Path]:
    return [*sorted(repo.glob("*.md")), *sorted((repo / "docs").rglob("*.md"))]


def coded_words(repo: Path) -> set[str]:
    """Every word and flag that stands as code in README or docs."""
    spans = (span for path in documents(repo) for span in CODE.findall(path.read_text("utf-8")))
    return {word for span in spans for word in re.findall(r"--[a-z][\w-]*|\w+", span)}


def test_every_public_name_is_documented(repo: Path) -> None:
    assert not set(zllm_jax.__all__) - coded_words(repo)


@pytest.mark.parametrize("value", [ContextExtension, EngineConfig, Envelope, Request, Sampling, Timing, Usage])
def test_every_field_is_documented(value: type, repo: Path) -> None:
    fields = {field.name for field in dataclasses.fields(value)}
    assert not fields - coded_words(repo)


def flags_and_commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (option for option in action.option_strings if option.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield name
                yield from flags_and_commands(command)


def test_every_command_and_flag_is_documented(repo: Path) -> None:
    from zllm_jax.cli.app import build_parser

    found = set(flags_and_commands(build_parser()))
    assert {"generate", "--max-tokens"} <= found
    assert not found - {"--help"} - coded_words(repo)


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as forges make them."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(text)}


def test_links_resolve(repo: Path) -> None:
    broken = []
    for path in documents(repo):
        for link in LINK.findall(re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)):
            target, _, anchor = link.partition("#")
            if "://" in target:
                continue
            file = (path.parent / target).resolve() if target else path
            if not file.exists() or (anchor and anchor not in anchors(file.read_text("utf-8"))):
                broken.append(f"{path.relative_to(repo)}: {link}")
    assert not broken


def test_the_tests_that_the_table_of_protocols_names_exist(repo: Path) -> None:
    page = (repo / "docs" / "reference" / "protocols.md").read_text("utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| feature ")]
    assert len(rows) > 20
    for row in rows:
        named = TEST.findall(row.split(" | ")[-1])
        assert named, f"no test in: {row}"
        for file, name in named:
            assert f"def {name}(" in (repo / file).read_text("utf-8"), f"{file} has no {name}"


@pytest.fixture(scope="module")
def figures(repo: Path) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("figures", str(repo / "scripts" / "figures"))
    spec = importlib.util.spec_from_loader("figures", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_figures_are_those_of_the_committed_results(figures: ModuleType, repo: Path) -> None:
    stale = [
        str(path.relative_to(repo))
        for path in documents(repo)
        if figures.refreshed(text := path.read_text("utf-8")) != text
    ]
    assert not stale, "run scripts/figures"


def test_a_figure_that_differs_is_mended_and_a_missing_one_refused(figures: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"summary": {"x": 2.345}, "rows": [{"s": 1}]}))
    text = (
        "about <!-- figure: r.json summary.x .1f -->9.9<!-- end --> and <!-- figure: r.json rows.0.s d --><!-- end -->"
    )
    mended = figures.refreshed(text, tmp_path)
    assert mended == text.replace("9.9", "2.3").replace("--><!-- end", "-->1<!-- end")
    with pytest.raises(KeyError, match=r"summary\.y: nothing at 'y'"):
        figures.refreshed(text.replace("summary.x", "summary.y"), tmp_path)
