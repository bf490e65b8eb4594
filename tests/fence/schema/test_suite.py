"""The JSON-Schema-Test-Suite against its ratchet: nothing wrongly accepted, and never fewer right than before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fence.schema.suite import DRAFTS, RATCHET, summary, verdicts


@pytest.mark.shared
@pytest.mark.parametrize("draft", DRAFTS)
def test_instances_are_judged_as_the_suite_says(draft: str, shared_dir: Path) -> None:
    folder = shared_dir / "suites" / "json-schema" / draft
    if not folder.is_dir():
        pytest.skip("the JSON-Schema-Test-Suite is not in the shared folder")
    found: dict[str, Any] = summary(list(verdicts(folder)))
    kept = json.loads(RATCHET.read_text())[draft]
    assert found["wrongly_accepted"] == []
    assert len(found["wrongly_refused"]) <= found["instances"] // 100
    assert found == kept, "python -m tests.fence.schema.suite rewrites the ratchet, if this is better"


def test_the_ratchet_reaches_the_goal() -> None:
    kept = json.loads(RATCHET.read_text())["draft2020-12"]
    assert kept["wrongly_accepted"] == []
    assert kept["right_without_format_files"] >= 560
    assert kept["right_in_format_files"] >= 400
