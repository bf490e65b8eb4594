r"""The formats that JSON Schema names, as languages of texts.

Each is the grammar of its RFC, or a part of it where the whole is not regular or would need very many states; a text
that breaks the grammar is never in it. What is left out:

- leap seconds other than 23:59:60 at UTC;
- hostnames whose labels behind the third have more than 61 characters together, and labels with `--` in the third
  place (A-labels);
- internationalised hostnames of more than three labels, and labels of more than ten characters or with letters outside
  the plain blocks of Latin, Greek, Cyrillic, Han, Hangul and Kana;
- regular expressions with references, names or properties, and groups nested deeper than two.

The limits on the length of an email address (64 and 255 octets) are not kept.

So each has a second language, of the texts that may be in it: what is outside of that surely breaks the format.
"""

from __future__ import annotations

from functools import lru_cache

from zllm_jax.fence.automaton import ByteAutomaton
from zllm_jax.fence.regular.regex import fullmatch_regex

_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = r"(?:\.[0-9]+)?"
_TIME = f"(?:{_HOUR_MINUTE}:[0-5][0-9]{_FRACTION}(?:[Zz]|[+\\-]{_HOUR_MINUTE})|23:59:60{_FRACTION}(?:[Zz]|[+\\-]00:00))"
_LOOSE_TIME = f"(?:{_HOUR_MINUTE}:(?:[0-5][0-9]|60){_FRACTION}(?:[Zz]|[+\\-]{_HOUR_MINUTE}))"
_CLOCK_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION = (
    f"P(?:[0-9]+W|{_CLOCK_TIME}|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)(?:{_CLOCK_TIME})?)"
)

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_LAST_32 = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"


def _ipv6(most: int = 7) -> str:
    """RFC 3986: eight groups, or at most seven and `::` in place of the others (RFC 5321: at most six)."""
    forms = [f"(?:{_GROUP}:){{6}}{_LAST_32}"]
    for before in range(most + 1):
        head = f"(?:{_GROUP}(?::{_GROUP}){{0,{before - 1}}})?" if before else ""
        after = most - 2 - before
        if after >= 0:
            forms.append(f"{head}::(?:{_GROUP}:){{{after}}}{_LAST_32}")
        elif after == -1:
            forms.append(f"{head}::{_GROUP}")
        else:
            forms.append(f"{head}::")
    return f"(?:{'|'.join(forms)})"


_LDH_LABEL = "(?!..--)[A-Za-z0-9](?:[A-Za-z0-9-]{0,%d}[A-Za-z0-9])?"
_LABEL = _LDH_LABEL % 61
_REST = r"(?=[A-Za-z0-9.\-]{1,61}$)(?:(?!..--)[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.|$))*(?<!\.)"
_HOSTNAME = rf"(?:{_LABEL}(?:\.{_LABEL}){{0,2}}|(?:{_LABEL}\.){{3}}{_REST})"

_LETTERS = "\u00df-\u00f6\u00f8-\u00ff\u03ac-\u03ce\u0430-\u045f\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
_IDN_LABEL = rf"(?:{_LABEL}|(?!..--)[a-z0-9{_LETTERS}](?:[a-z0-9{_LETTERS}-]{{0,8}}[a-z0-9{_LETTERS}])?)"
_IDN_HOSTNAME = rf"(?:{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,2}})"

_ATOM = r"[A-Za-z0-9!#$%&'*+\-/=?^_`{|}~%s]+"
_DOMAIN = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*"


def _email(more: str, domain: str) -> str:
    """RFC 5321 (and 6531, with more letters): a dotted or a quoted local part, a domain or an address."""
    atom = _ATOM.replace("%s", more)
    quoted = rf'"(?:[ !#-\[\]-~{more}]|\\[ -~])*"'
    return rf"(?:{atom}(?:\.{atom})*|{quoted})@(?:{domain}|\[{_IPV4}\]|\[[Ii][Pp][Vv]6:{_ipv6(6)}\])"


_UCS = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    f"\\u{{{plane:x}{'1000' if plane == 14 else '0000'}}}-\\u{{{plane:x}fffd}}" for plane in range(1, 15)
)
_PRIVATE = "\ue000-\uf8ff\\u{f0000}-\\u{ffffd}\\u{100000}-\\u{10fffd}"


def _reference(ucs: str, private: str, *, relative: bool) -> str:
    """RFC 3986 (and 3987, with the characters `ucs` and, in a query, `private`)."""
    letters = rf"A-Za-z0-9\-._~!$&'()*+,;={ucs}"
    escaped = "%[0-9A-Fa-f]{2}"
    user, segment = f"(?:[{letters}:]|{escaped})*", f"(?:[{letters}:@]|{escaped})"
    literal = rf"\[(?:{_ipv6()}|[Vv][0-9A-Fa-f]+\.[A-Za-z0-9\-._~!$&'()*+,;=:]+)\]"
    authority = f"(?:{user}@)?(?:{literal}|(?:[{letters}]|{escaped})*)(?::[0-9]*)?"
    absolute, rest = f"/(?:{segment}+(?:/{segment}*)*)?", f"(?:/{segment}*)*"
    tail = rf"(?:\?(?:[{letters}:@/?{private}]|{escaped})*)?(?:#(?:[{letters}:@/?]|{escaped})*)?"
    whole = f"[A-Za-z][A-Za-z0-9+\\-.]*:(?://{authority}{rest}|{absolute}|{segment}+{rest}|)"
    first = f"(?:[{letters}@]|{escaped})+"
    part = f"|(?://{authority}{rest}|{absolute}|{first}{rest}|)"
    return f"(?:{whole}{part if relative else ''}){tail}"


def _uri_template() -> str:
    """RFC 6570: literals and expressions."""
    literals = rf"[!#$&-;=?-\[\]_a-z~{_UCS}{_PRIVATE}]|%[0-9A-Fa-f]{{2}}"
    letter = "(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})"
    variable = rf"{letter}(?:\.?{letter})*(?::[1-9][0-9]{{0,3}}|\*)?"
    return rf"(?:{literals}|\{{[+#./;?&=,!@|]?{variable}(?:,{variable})*\}})*"


_POINTER = "(?:/(?:[^/~]|~[01])*)*"


def _regular_expression() -> str:
    """A part of ECMA-262's patterns, with groups up to two deep."""
    escapes = r"\\(?:[dDwWsStnvfr^$\\.*+?()\[\]{}|/]|0(?![0-9])|c[A-Za-z]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4})"
    members = rf"(?:[^\\\[\]\-\^]|{escapes})"
    atom = rf"(?:[^\\^$.*+?()\[\]{{}}|]|\.|{escapes}|\[\^?-?{members}*-?\])"
    times = r"(?:(?:[*+?]|\{[0-9]\}|\{[0-9],\})\??)?"
    parts = rf"(?:[\^$|]|{atom}{times})*"
    for _ in range(2):
        parts = rf"(?:[\^$|]|{atom}{times}|\((?:\?:)?{parts}\){times}|\(\?<?[=!]{parts}\))*"
    return parts


def _patterns(name: str) -> str | None:
    makers = {
        "date": lambda: _DATE,
        "time": lambda: _TIME,
        "date-time": lambda: f"{_DATE}[Tt]{_TIME}",
        "duration": lambda: _DURATION,
        "ipv4": lambda: _IPV4,
        "ipv6": _ipv6,
        "hostname": lambda: _HOSTNAME,
        "idn-hostname": lambda: _IDN_HOSTNAME,
        "email": lambda: _email("", _DOMAIN),
        "idn-email": lambda: _email(_UCS, f"(?:{_DOMAIN}|{_IDN_HOSTNAME})"),
        "uri": lambda: _reference("", "", relative=False),
        "uri-reference": lambda: _reference("", "", relative=True),
        "iri": lambda: _reference(_UCS, _PRIVATE, relative=False),
        "iri-reference": lambda: _reference(_UCS, _PRIVATE, relative=True),
        "uri-template": _uri_template,
        "uuid": lambda: "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
        "json-pointer": lambda: _POINTER,
        "relative-json-pointer": lambda: f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
        "regex": _regular_expression,
        "ecmascript-regex": _regular_expression,
    }
    return makers[name]() if name in makers else None


_LOOSE = {
    "time": _LOOSE_TIME,
    "date-time": f"{_DATE}[Tt]{_LOOSE_TIME}",
    "hostname": r"[A-Za-z0-9.\-]+",
    "idn-hostname": r"[\s\S]+",
    "idn-email": r"[\s\S]+@[\s\S]+",
    "regex": r"[\s\S]*",
    "ecmascript-regex": r"[\s\S]*",
}


@lru_cache(maxsize=32)
def format_text(name: str) -> ByteAutomaton | None:
    """Texts (UTF-8) of a format that JSON Schema names; None for a name that is not known.

    No text outside the format is in it; see the module for the few that are missing.

    >>> date = format_text("date")
    >>> date is not None and [date.accepts(text) for text in (b"2024-02-29", b"2023-02-29")]
    [True, False]
    >>> format_text("colour") is None
    True
    """
    pattern = _patterns(name)
    return None if pattern is None else fullmatch_regex(pattern)


@lru_cache(maxsize=32)
def loose_format_text(name: str) -> ByteAutomaton | None:
    """Texts (UTF-8) that may have the format: a text outside breaks it. The same as `format_text` where that is exact.

    >>> sure, possible = format_text("time"), loose_format_text("time")
    >>> sure is not None and possible is not None and [one.accepts(b"15:59:60-08:00") for one in (sure, possible)]
    [False, True]
    """
    return fullmatch_regex(_LOOSE[name]) if name in _LOOSE else format_text(name)
