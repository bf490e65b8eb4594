"""The Python that the documents show, run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.mark.parametrize(("document", "says"), [("README.md", "truncated"), ("docs/reference/python.md", "Paris")])
def test_what_is_shown_runs(
    document: str, says: str, repo: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (repo / document).read_text("utf-8"), re.DOTALL)
    assert blocks
    exec(compile(blocks[0], document, "exec"), {})
    assert says.lower() in capsys.readouterr().out.lower()
