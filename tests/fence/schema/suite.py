"""The JSON-Schema-Test-Suite against our machines: which instances are judged as the suite says.

`python -m tests.fence.schema.suite` prints what differs and rewrites the ratchet.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import Machine
from zllm_jax.fence.schema import json_schema

RATCHET = Path(__file__).parent / "ratchet.json"
DRAFTS = ("draft2020-12", "draft7")


@dataclass(frozen=True)
class Verdict:
    """One instance of the suite. refused: the keyword (with its reason) for which the schema was not compiled."""

    place: str
    valid: bool
    accepted: bool
    refused: str | None = None

    @property
    def right(self) -> bool:
        return self.refused is None and self.accepted == self.valid


def accepts(machines: tuple[Machine, Machine], data: Any) -> bool:
    """Compactly, and with white space in three ways; all of them must agree."""
    plain, free = machines
    texts = [json.dumps(data, indent=indent, ensure_ascii=ascii) for indent in (None, 2) for ascii in (True, False)]
    verdicts = {free.accepts(_utf8(text)) for text in texts} | {plain.accepts(_utf8(text)) for text in texts[:2]}
    verdicts.add(free.accepts(_utf8(" \n" + texts[2] + "\t")))
    if len(verdicts) != 1:
        raise AssertionError(f"{data!r}: its spellings are not judged alike")
    return verdicts.pop()


def verdicts(folder: Path) -> Iterator[Verdict]:
    """Every instance of a draft's folder. `format` is a rule in the files that are about it, as their README says."""
    for path in sorted(folder.glob("*.json")):
        formats = path.name.startswith("format-")
        for i, group in enumerate(json.loads(path.read_text())):
            schema = group["schema"]
            if isinstance(schema, dict) and folder.name == "draft7":
                schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
            refused, machines = None, None
            try:
                plain = json_schema(schema, formats=formats).machine
                machines = plain, json_schema(schema, formats=formats, whitespace="free").machine
            except UnsupportedGrammar as error:
                if "no value satisfies" not in error.reason:
                    refused = f"{error.where.rsplit('/', 1)[-1]}: {error.reason}"
            for j, test in enumerate(group["tests"]):
                accepted = machines is not None and accepts(machines, test["data"])
                yield Verdict(f"{path.stem}/{i}/{j}", test["valid"], accepted, refused)


def summary(all_verdicts: list[Verdict]) -> dict[str, Any]:
    """Counts, with and without the files about one format each, and what was refused by keyword."""
    judged = [one for one in all_verdicts if one.refused is None]
    keywords = Counter(one.refused.split(":")[0] for one in all_verdicts if one.refused is not None)
    formats = [one for one in all_verdicts if one.place.startswith("format-")]
    return {
        "instances": len(all_verdicts),
        "right": sum(one.right for one in all_verdicts),
        "right_without_format_files": sum(one.right for one in all_verdicts) - sum(one.right for one in formats),
        "right_in_format_files": sum(one.right for one in formats),
        "wrongly_accepted": [one.place for one in judged if one.accepted and not one.valid],
        "wrongly_refused": [one.place for one in judged if one.valid and not one.accepted],
        "unsupported": dict(sorted(keywords.items())),
    }


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def main() -> None:
    root = Path(sys.argv[1])
    found = {draft: summary(list(verdicts(root / draft))) for draft in DRAFTS}
    RATCHET.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
