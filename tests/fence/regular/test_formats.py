"""Formats against the JSON Schema test suite, and against what is easily forgotten."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from zllm_jax.fence.regular import difference, equal, format_text, is_empty, loose_format_text

NAMES = [
    "date",
    "time",
    "date-time",
    "duration",
    "ipv4",
    "ipv6",
    "hostname",
    "idn-hostname",
    "email",
    "idn-email",
    "uri",
    "uri-reference",
    "iri",
    "iri-reference",
    "uri-template",
    "uuid",
    "json-pointer",
    "relative-json-pointer",
    "regex",
    "ecmascript-regex",
]


def accepts(name: str, text: str) -> bool:
    automaton = format_text(name)
    assert automaton is not None
    return automaton.accepts(text.encode())


def may_be(name: str, text: str) -> bool:
    automaton = loose_format_text(name)
    assert automaton is not None
    return automaton.accepts(text.encode())


def instances(folder: Path) -> Iterator[tuple[str, str, bool]]:
    for path in sorted(folder.glob("format-*.json")):
        for group in json.loads(path.read_text()):
            name = group["schema"].get("format", "unknown")
            if format_text(name) is not None:
                yield from (
                    (name, test["data"], test["valid"]) for test in group["tests"] if isinstance(test["data"], str)
                )


@pytest.mark.shared
@pytest.mark.parametrize("draft", ["draft2020-12", "draft7"])
def test_the_suite(draft: str, shared_dir: Path) -> None:
    """Nothing invalid is accepted; of the valid ones some are refused, which the module lists, but may be in it."""
    found = list(instances(shared_dir / "suites" / "json-schema" / draft))
    judged = [(accepts(name, text), valid, name, text) for name, text, valid in found]
    assert not [(name, text) for accepted, valid, name, text in judged if accepted and not valid]
    refused = [(name, text) for accepted, valid, name, text in judged if valid and not accepted]
    assert len(found) > 400
    assert len(refused) <= 0.05 * len(found)
    assert not [(name, text) for name, text in refused if not may_be(name, text)]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_is_known_and_small(name: str) -> None:
    automaton = format_text(name)
    assert automaton is not None
    assert 1 < automaton.num_states < 1500


def test_other_names() -> None:
    assert format_text("colour") is None
    assert format_text("") is None
    assert loose_format_text("colour") is None


@pytest.mark.parametrize("name", NAMES)
def test_what_is_in_a_format_may_be_in_it(name: str) -> None:
    sure, possible = format_text(name), loose_format_text(name)
    assert sure is not None
    assert possible is not None
    assert is_empty(difference(sure, possible))
    partial = {"time", "date-time", "hostname", "idn-hostname", "idn-email", "regex", "ecmascript-regex"}
    assert equal(sure, possible) == (name not in partial)


def is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_every_day_of_some_years() -> None:
    for year in (1, 4, 1900, 1996, 2000, 2023, 2024, 2100, 2400, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                assert accepts("date", text) == is_date(text), text


def test_addresses_at_random() -> None:
    rng = random.Random(5)
    parts = ["0", "1", "ffff", "::", ":", "1.2.3.4", "12345", "256", ".", "a", "00"]
    for _ in range(4000):
        text = "".join(rng.choice(parts) + rng.choice([":", ":", ""]) for _ in range(rng.randint(1, 9)))
        assert accepts("ipv6", text) == is_address(text, ipaddress.IPv6Address), text
    for _ in range(1000):
        text = ".".join(rng.choice(["0", "00", "9", "10", "99", "255", "256", "1000", ""]) for _ in range(4))
        assert accepts("ipv4", text) == is_address(text, ipaddress.IPv4Address), text


def is_address(text: str, kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        ("date-time", "2024-02-29T23:59:60Z 1990-01-01t00:00:00.5+14:00", "2024-02-29 2023-02-29T00:00:00Z"),
        ("time", "00:00:00Z 23:59:60+00:00", "00:00:00 24:00:00Z 12:59:60Z 23:59:60+01:00"),
        ("duration", "P1Y2M3D P4W PT1H P1DT2S", "P P1Y3D PT P1W2D PT1H3S P1S"),
        ("hostname", "a.b.c.d.e.f x-1 " + "a" * 63, "-a a- a..b a. " + "a" * 64 + " ab--c"),
        ("hostname", ".".join(["a" * 63] * 3 + ["b" * 61]), ".".join(["a" * 63] * 3 + ["b" * 62])),
        ("idn-hostname", "bücher.example 日本.jp", "-ü ü- xn--a"),
        ("email", 'a.b+c@x.org "a\\"b"@x a@[127.0.0.1] a@[IPv6:::1]', "a..b@x .a@x a@ @x a@[1] a@b..c"),
        ("email", "a@[IPv6:1:2:3:4:5:6:7:8]", "a@[IPv6:1:2:3:4:5:6:7::] é@x.org"),
        ("uri", "http://a:80/b?c#d urn:x: a: file:///x http://[::1]/", "//a /a a%zz:x http://[::1 http://a/é a:%2"),
        ("uri-reference", "a/b ../c?d # //x:1/y a?b:c", "a^b 1:2 :a \\"),
        ("iri", "http://é/ü?\ue000", "http://a/\ue000"),
        ("uri-template", "x{?a,b*}{/c:3} {a.b} {%41}", "{ } {} {a:0} {a,} {^a} a%2"),
        ("uuid", "00000000-0000-0000-0000-00000000000F", "0000000000000000000000000000000F"),
        ("json-pointer", "/a/b~0~1 / /é", "a /~ /~2"),
        ("relative-json-pointer", "0 1/a 2#", "01 /a # -1 1#/"),
        ("regex", r"^a+(b|[c-]*)?$ \d{2} (?=a)b \u00e9", r"( a** \Z [ (?=a)* +a a)"),
    ],
)
def test_examples(name: str, yes: str, no: str) -> None:
    assert [text for text in yes.split() if not accepts(name, text)] == []
    assert [text for text in no.split() if accepts(name, text)] == []
