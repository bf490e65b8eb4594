"""Thirty sets of tools as clients offer them: one to six each, without parameters or with many, nested, optional."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]
Tool = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
WHOLE: Schema = {"type": "integer"}
YES_NO: Schema = {"type": "boolean"}


def obj(*required: str, **properties: Schema) -> Schema:
    """A closed object; the properties not among `required` are optional."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def listed(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


def described(schema: Schema, text: str) -> Schema:
    return {**schema, "description": text}


def tool(name: str, description: str, parameters: Schema | None = None) -> Tool:
    """parameters: None for a tool that takes none."""
    function = {"name": name, "description": description, "parameters": parameters or obj()}
    return {"type": "function", "function": function}


POINT = obj("lat", "lon", lat=NUMBER | {"minimum": -90, "maximum": 90}, lon=NUMBER | {"minimum": -180, "maximum": 180})
MONEY = obj("amount", "currency", amount=NUMBER, currency=one_of("EUR", "USD", "GBP"))
DAY = {"type": "string", "format": "date"}
ADDRESS = obj("street", "city", street=TEXT, city=TEXT, zip=TEXT | {"pattern": "^[0-9]{5}$"}, country=TEXT)
EMAIL = TEXT | {"pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.(com|org)$"}
ID = TEXT | {"pattern": "^[A-Z]{2}-[0-9]{4}$"}

SETS: Mapping[str, list[Tool]] = {
    "weather": [
        tool(
            "get_weather",
            "The weather of a city.",
            obj("city", city=TEXT, days=listed(WHOLE), unit=one_of("celsius", "fahrenheit")),
        ),
        tool("get_time", "The local time of a city.", obj("city", city=TEXT)),
    ],
    "clock": [tool("now", "The current time.")],
    "switch": [tool("lights_on", "Turn the lights on."), tool("lights_off", "Turn the lights off.")],
    "files": [
        tool("read_file", "Read a file.", obj("path", path=TEXT, offset=WHOLE, limit=WHOLE)),
        tool("write_file", "Write a file.", obj("path", "content", path=TEXT, content=TEXT)),
        tool("list_files", "List a folder.", obj(path=TEXT, recursive=YES_NO)),
        tool("delete_file", "Delete a file.", obj("path", path=TEXT)),
    ],
    "editor": [
        tool(
            "edit",
            "Replace a text in a file.",
            obj("file_path", "old_string", "new_string", file_path=TEXT, old_string=TEXT, new_string=TEXT, all=YES_NO),
        ),
        tool("bash", "Run a command.", obj("command", command=TEXT, timeout=WHOLE | {"minimum": 1, "maximum": 600})),
        tool("grep", "Search files.", obj("pattern", pattern=TEXT, glob=TEXT, case=one_of("sensitive", "ignore"))),
        tool("todo", "Keep a list.", obj("items", items=listed(obj("text", "done", text=TEXT, done=YES_NO)))),
    ],
    "maps": [
        tool("geocode", "The place of an address.", obj("address", address=ADDRESS)),
        tool(
            "route",
            "A way between places.",
            obj("start", "end", start=POINT, end=POINT, mode=one_of("car", "foot", "train"), avoid=listed(TEXT)),
        ),
    ],
    "mail": [
        tool(
            "send_mail",
            "Send a message.",
            obj("to", "subject", to=listed(EMAIL, minItems=1, maxItems=3), cc=listed(EMAIL), subject=TEXT, body=TEXT),
        ),
        tool("search_mail", "Find messages.", obj("query", query=TEXT, limit=WHOLE | {"minimum": 1, "maximum": 50})),
        tool("archive", "Archive a message.", obj("id", id=ID)),
    ],
    "calendar": [
        tool(
            "create_event",
            "Add an event.",
            obj("title", "day", title=TEXT, day=DAY, hours=WHOLE, guests=listed(obj("name", name=TEXT, email=EMAIL))),
        ),
        tool("list_events", "The events of a day.", obj("day", day=DAY)),
        tool("today", "The date of today."),
    ],
    "shop": [
        tool(
            "search_products", "Find products.", obj("query", query=TEXT, max_price=MONEY, sort=one_of("price", "new"))
        ),
        tool("add_to_cart", "Put into the cart.", obj("sku", "count", sku=ID, count=WHOLE | {"minimum": 1})),
        tool(
            "checkout", "Buy.", obj("address", "payment", address=ADDRESS, payment=one_of("card", "invoice"), note=TEXT)
        ),
        tool("cart", "What is in the cart."),
    ],
    "bank": [
        tool(
            "transfer",
            "Send money.",
            obj("iban", "money", iban=TEXT | {"pattern": "^[A-Z]{2}[0-9]{18}$"}, money=MONEY, reference=TEXT),
        ),
        tool("balance", "What an account holds.", obj("account", account=ID)),
    ],
    "unions": [
        tool(
            "set_value",
            "Set a key.",
            obj("key", "value", key=TEXT, value={"anyOf": [TEXT, NUMBER, YES_NO, {"type": "null"}]}),
        ),
        tool("find", "Find by name or number.", obj("by", by={"anyOf": [WHOLE, listed(WHOLE), ID]})),
    ],
    "nullable": [
        tool(
            "update_user",
            "Change a user.",
            obj("id", id=WHOLE, name={"type": ["string", "null"]}, age={"type": ["integer", "null"]}, email=EMAIL),
        )
    ],
    "shapes": [
        tool(
            "draw",
            "Draw a shape.",
            obj(
                "shape",
                shape={
                    "anyOf": [
                        obj("kind", "radius", kind={"const": "circle"}, radius=NUMBER),
                        obj("kind", "width", "height", kind={"const": "box"}, width=NUMBER, height=NUMBER),
                    ]
                },
                color=TEXT | {"pattern": "^#[0-9a-f]{6}$"},
            ),
        )
    ],
    "query": [
        tool(
            "query",
            "Ask a database.",
            obj(
                "table",
                table=one_of("users", "orders", "items"),
                where=listed(
                    obj(
                        "column",
                        "op",
                        "value",
                        column=TEXT,
                        op=one_of("=", "<", ">", "like"),
                        value={"type": ["string", "number"]},
                    )
                ),
                limit=WHOLE,
                order=obj("column", column=TEXT, descending=YES_NO),
            ),
        )
    ],
    "many_parameters": [
        tool(
            "configure",
            "Set options.",
            obj(
                "name",
                name=TEXT,
                **{f"option_{i}": [TEXT, WHOLE, YES_NO, one_of("a", "b", "c")][i % 4] for i in range(24)},
            ),
        )
    ],
    "all_required": [tool("register", "Register.", obj(*"abcdefgh", **dict.fromkeys("abcdefgh", YES_NO)))],
    "all_optional": [tool("filter", "Filter.", obj(**dict.fromkeys(["color", "size", "brand", "shop"], TEXT)))],
    "prefixes": [
        tool("get", "Get."),
        tool("get_all", "Get all.", obj(limit=WHOLE)),
        tool("get_all_users", "Get all users.", obj("page", page=WHOLE, page_size=WHOLE, page_size_max=WHOLE)),
    ],
    "dotted_names": [
        tool("github.create_issue", "Open an issue.", obj("repo", "title", repo=TEXT, title=TEXT, labels=listed(TEXT))),
        tool("mcp:slack/post-message", "Post.", obj("channel", "text", channel=TEXT, text=TEXT)),
    ],
    "reserved_words": [
        tool("call", "A tool with awkward names.", obj("arguments", "name", arguments=TEXT, name=TEXT, type=WHOLE)),
        tool("tool_call", "Another.", obj(tool_call=YES_NO, parameters=obj(arguments=NUMBER))),
    ],
    "described": [
        tool(
            "translate",
            "Translate a text.",
            obj(
                "text",
                "language",
                text=described(TEXT, 'What to translate, e.g. "a < b" or </text>.'),
                language=described(one_of("de", "fr", "es"), "ISO 639-1."),
                formal=described(YES_NO | {"default": False}, "Formal or not."),
            ),
        )
    ],
    "matrix": [
        tool("multiply", "Multiply matrices.", obj("a", "b", a=listed(listed(NUMBER)), b=listed(listed(NUMBER)))),
        tool("solve", "Solve.", obj("equation", equation=TEXT, tolerance=NUMBER | {"exclusiveMinimum": 0})),
    ],
    "tree": [
        tool(
            "save_tree",
            "Save a tree.",
            {
                **obj("root", root={"$ref": "#/$defs/node"}),
                "$defs": {"node": obj("name", name=TEXT, children=listed({"$ref": "#/$defs/node"}, maxItems=2))},
            },
        )
    ],
    "bounded_texts": [
        tool(
            "tweet", "Post a short text.", obj("text", text=TEXT | {"minLength": 1, "maxLength": 40}, tags=listed(ID))
        ),
        tool("set_pin", "Set a PIN.", obj("pin", pin=TEXT | {"pattern": "^[0-9]{4,6}$"})),
    ],
    "music": [
        tool(
            "play", "Play music.", obj("artist", artist=TEXT, album=TEXT, shuffle=YES_NO, volume=one_of(1, 2, 3, 4, 5))
        ),
        tool("pause", "Pause."),
        tool("next", "Next song."),
        tool("queue", "Queue songs.", obj("songs", songs=listed(TEXT, minItems=1, maxItems=4))),
        tool("rate", "Rate a song.", obj("stars", stars=WHOLE | {"minimum": 1, "maximum": 5})),
        tool("lyrics", "The words of a song.", obj("title", title=TEXT)),
    ],
    "home": [
        tool("set_heat", "Set the heating.", obj("room", "degrees", room=TEXT, degrees=NUMBER | {"multipleOf": 0.5})),
        tool("open_door", "Open a door.", obj("door", door=one_of("front", "back", "garage"))),
        tool(
            "scene",
            "Set lamps.",
            obj("lamps", lamps=listed(obj("id", "level", id=WHOLE, level=WHOLE | {"minimum": 0, "maximum": 100}))),
        ),
    ],
    "tuple": [
        tool(
            "move",
            "Move to a place.",
            obj("to", to={"type": "array", "prefixItems": [WHOLE, WHOLE, TEXT], "items": False, "minItems": 3}),
        )
    ],
    "open_schema": [
        tool("log", "Write a log line.", {"type": "object", "properties": {"message": TEXT, "level": WHOLE}}),
        tool("ping", "Nothing said of parameters.", {"type": "object", "properties": {}}),
    ],
    "hr": [
        tool(
            "hire",
            "Hire a person.",
            obj(
                "person",
                "role",
                person=obj("name", "address", name=TEXT, address=ADDRESS, born=DAY),
                role=one_of("engineer", "designer", "manager"),
                salary=MONEY,
                remote=YES_NO,
                team=listed(obj("id", id=ID, lead=YES_NO), maxItems=2),
            ),
        ),
        tool("fire", "Part with a person.", obj("id", "reason", id=ID, reason=TEXT)),
    ],
    "unicode": [
        tool(
            "wörterbuch".replace("ö", "oe"),
            "Schlägt ein Wort nach.",
            obj("wort", wort=TEXT, größe=one_of("S", "M", "größer")),
        ),
        tool("search_jp", "検索する。", obj("語", 語=TEXT, 数=WHOLE)),
    ],
}

_MATCHING = {
    "^[0-9]{5}$": "10115",
    "^[a-z]{1,8}@[a-z]{1,8}\\.(com|org)$": "ada@example.org",
    "^[A-Z]{2}-[0-9]{4}$": "AB-0042",
    "^[A-Z]{2}[0-9]{18}$": "DE893704004405320130",
    "^#[0-9a-f]{6}$": "#00ff7f",
    "^[0-9]{4,6}$": "0420",
}


def example(schema: Schema, *, full: bool, root: Schema | None = None, depth: int = 0) -> Any:
    """A value that a schema of these tools allows. full: with all optional properties and an item in every list."""
    root = root or schema

    def inner(one: Schema) -> Any:
        return example(one, full=full, root=root, depth=depth + 1)

    if "$ref" in schema:
        return inner(root["$defs"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return inner(schema["anyOf"][-1 if full else 0])
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][-1 if full else 0]
    kinds = schema["type"]
    kind = kinds if isinstance(kinds, str) else kinds[-1 if full else 0]
    if kind == "string":
        if "format" in schema:
            return "2024-02-29"
        return _MATCHING[schema["pattern"]] if "pattern" in schema else 'a < b, "c" </ d\n漢' if full else "x"
    if kind == "array":
        first = [inner(one) for one in schema.get("prefixItems", [])]
        count = max(schema.get("minItems", 0), 1 if full and depth < 5 else 0) if schema["items"] else 0
        return first + [inner(schema["items"]) for _ in range(count)]
    if kind == "object":
        properties, required = schema["properties"], schema.get("required", ())
        return {name: inner(one) for name, one in properties.items() if full or name in required}
    plain: Mapping[str, Any] = {"integer": 3, "number": 2.5, "boolean": full, "null": None}
    return plain[kind]
