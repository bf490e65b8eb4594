"""What schemas become: order, registers, recursion, spellings, and what is refused by its keyword."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zllm_jax.errors import UnsupportedGrammar
from zllm_jax.fence import MAX_DEPTH, Machine
from zllm_jax.fence.schema import json_schema, with_error_variant


def machine(schema: Any, **options: Any) -> Machine:
    return json_schema(schema, **options).machine


def accepts(schema: Any, value: Any, **options: Any) -> bool:
    return machine(schema, **options).accepts(json.dumps(value).encode())


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


TREE = {**closed(value={"type": "integer"}, children={"type": "array", "items": {"$ref": "#"}}), "required": ["value"]}


def test_twenty_optional_members_in_any_order_cost_few_states() -> None:
    kinds = ["string", "integer", "boolean", "null", "number"]
    schema = closed(**{f"parameter_{i}": {"type": kinds[i % 5]} for i in range(20)})
    automaton = machine(schema)
    assert automaton.num_states < 200
    everything = {f"parameter_{i}": [f"x{i}", 1, True, None, 1.5][i % 5] for i in reversed(range(20))}
    assert automaton.accepts(json.dumps(everything).encode())
    assert automaton.accepts(b"{}")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": 1, "b": 2}', '{"b": 1,}', "{,}", '{"a": 1, }'])
def test_a_closed_object_refuses(text: str) -> None:
    assert not machine(closed(a={"type": "integer"}, b={"type": "string"})).accepts(text.encode())


def test_no_comma_where_no_member_is_left() -> None:
    automaton = machine(closed(a={"type": "integer"}))
    assert automaton.run(b'{"a": 1,').dead


def test_no_way_leads_to_a_name_that_was_used() -> None:
    automaton = machine(closed(about=True, above=True, other=True))
    assert automaton.run(b'{"about": 1, "above": 1, "a').dead
    assert not automaton.run(b'{"about": 1, "o').dead


def test_a_recursive_schema_nests_as_deep_as_the_stack_and_can_always_be_closed() -> None:
    automaton = machine(TREE)
    deep = b'{"children": [' * (MAX_DEPTH // 2)
    at = automaton.run(deep)
    assert not at.dead
    assert automaton.run(b"{", at).dead  # there is no room for another
    ending = b"]" + b', "value": 1}' + (b'], "value": 1}' * (MAX_DEPTH // 2 - 1))
    assert automaton.ended(automaton.run(ending, at))


def test_a_schema_that_no_finite_value_satisfies_is_refused() -> None:
    endless = {**closed(next={"$ref": "#"}), "required": ["next"]}
    with pytest.raises(UnsupportedGrammar, match="no value satisfies"):
        machine(endless)


@pytest.mark.parametrize(
    "spelling, whitespace, accepted",
    [
        ('{"a": [1, 2]}', "spaced", True),
        ('{"a":[1,2]}', "spaced", False),
        ('{"a":[1,2]}', "dense", True),
        ('{"a": [1, 2]}', "dense", False),
        ('{ "a" :\n[1 ,\t2] } ', "free", True),
        ('{"a": [1, 2]}', "free", True),
    ],
)
def test_white_space_is_an_option(spelling: str, whitespace: Any, accepted: bool) -> None:
    assert machine(closed(a={"type": "array"}), whitespace=whitespace).accepts(spelling.encode()) is accepted


@pytest.mark.parametrize("text", ['"caf\\u00e9"', '"café"'])
def test_a_listed_text_is_spelled_as_python_spells_it(text: str) -> None:
    assert machine({"const": "café"}).accepts(text.encode())
    assert not machine({"const": "café"}).accepts(b'"caf\\u00E9"')
    assert machine({"type": "string"}).accepts(b'"caf\\u00E9"')


def test_alternatives_are_told_apart_in_any_order() -> None:
    circle = {**closed(kind={"const": "circle"}, radius={"type": "number"}), "required": ["kind", "radius"]}
    square = {**closed(kind={"const": "square"}, side={"type": "number"}), "required": ["kind", "side"]}
    automaton = machine({"oneOf": [circle, square]})
    assert automaton.accepts(b'{"kind": "circle", "radius": 1}')
    assert automaton.accepts(b'{"side": 2, "kind": "square"}')
    assert automaton.run(b'{"side": 2, "kind": "c').dead
    assert automaton.run(b'{"kind": "circle", "s').dead


@pytest.mark.parametrize(
    "schema, where",
    [
        ({"properties": {"a": {"uniqueItems": True}}}, "#/properties/a/uniqueItems"),
        ({"$ref": "other.json"}, "#/$ref"),
        ({"$ref": "#/$defs/missing"}, "#/$ref"),
        ({"allOf": [{"items": {"minLength": -1}}]}, "#/allOf/0/items/minLength"),
        ({"type": "text"}, "#/type"),
        ({"items": 3}, "#/items"),
        ({"properties": []}, "#/properties"),
        ({"anyOf": []}, "#/anyOf"),
        ({"required": ["a", 1]}, "#/required"),
        ({"pattern": 3}, "#/pattern"),
        ({"multipleOf": 0}, "#/multipleOf"),
        ({"minimum": "1"}, "#/minimum"),
        ({"maximum": float("inf")}, "#/maximum"),
        ({"required": "a"}, "#/required"),
        ({"dependentRequired": {"a": "b"}}, "#/dependentRequired/a"),
        ({"items": {"contains": {}, "minContains": 3, "maxContains": 1}}, "#/items"),
        ({"items": {"minProperties": 3}}, "#/items"),
        ({"const": "\ud800"}, "#"),
        ({"const": {"a": ["\udc00b"]}}, "#"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_place(schema: Any, where: str) -> None:
    with pytest.raises(UnsupportedGrammar) as caught:
        machine(schema)
    assert caught.value.where == where
    assert str(caught.value).startswith(f"{where}: ")


def test_half_a_surrogate_pair_is_in_no_text() -> None:
    schema = {"anyOf": [{"enum": ["\ud800", "a"]}, {"type": "array", "items": {"const": "\udc00"}}]}
    automaton = machine(schema)
    assert automaton.accepts(b'"a"')
    assert automaton.accepts(b"[]")
    assert automaton.run(b'["').dead
    assert machine({"not": {"enum": ["\ud800", "a"]}}).accepts(b'"b"')


def test_the_members_of_a_closed_object_are_counted() -> None:
    schema = {**closed(a={}, b={}, c={}), "minProperties": 2}
    assert [accepts(schema, dict.fromkeys(names)) for names in ("", "b", "ac", "abc")] == [False, False, True, True]
    assert not machine(schema).accepts(b'{"a": 1, "a": 2}')


NULL = {"type": "null"}


@pytest.mark.parametrize(
    "others",
    [
        {"properties": {"a": NULL}, "required": ["a"], "additionalProperties": False},
        {"properties": {"a": NULL, "b": False}, "additionalProperties": False},
        {"properties": {"a": NULL}, "propertyNames": {"enum": ["a"]}},
        {"properties": {"a": NULL}, "patternProperties": {"^a$": {}}, "additionalProperties": False},
        {"properties": {"a": NULL}, "additionalProperties": {"enum": []}},
    ],
)
def test_an_object_that_cannot_have_enough_members_is_no_alternative(others: Any) -> None:
    short = {"type": "object", "minProperties": 2, **others}
    automaton = machine({"anyOf": [NULL, short]})
    assert automaton.accepts(b"null")
    assert automaton.run(b"{").dead
    with pytest.raises(UnsupportedGrammar, match="no value satisfies"):
        machine(short)


def test_alternatives_that_differ_in_a_listed_value_may_recurse() -> None:
    leaf = {**closed(type={"const": "leaf"}, value={"type": "number"}), "required": ["type", "value"]}
    node = {**closed(type={"const": "node"}, left={"$ref": "#"}), "required": ["type", "left"]}
    automaton = machine({"oneOf": [leaf, node]})
    assert automaton.accepts(b'{"type": "node", "left": {"type": "leaf", "value": 1}}')
    assert automaton.run(b'{"type": "leaf", "l').dead
    with pytest.raises(UnsupportedGrammar, match="refers to itself with nothing between"):
        machine({"oneOf": [leaf, {"$ref": "#"}]})


def test_on_request_it_is_left_out_and_reported() -> None:
    compiled = json_schema({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, relax=True)
    assert [one.split(":")[0] for one in compiled.relaxed] == ["#/uniqueItems"]
    assert compiled.machine.accepts(b"[1, 1]")
    assert not compiled.machine.accepts(b'["a"]')


def test_a_misspelt_keyword_is_reported() -> None:
    assert json_schema({"type": "object", "propertis": {}}).unknown == ("#/propertis",)


def test_a_schema_gets_a_way_to_say_that_no_answer_is_known() -> None:
    schema = with_error_variant(TREE)
    assert accepts(schema, {"error": "I do not know"})
    assert accepts(schema, {"value": 1, "children": [{"value": 2}]})
    assert not accepts(schema, {"value": 1, "children": [{"error": "no"}]})


def test_many_items_are_counted_by_the_frame() -> None:
    automaton = machine({"type": "array", "items": {"type": "boolean"}, "minItems": 100, "maxItems": 200})
    assert automaton.num_states < 100
    verdicts = [automaton.accepts(json.dumps([True] * n).encode()) for n in (99, 100, 200, 201)]
    assert verdicts == [False, True, True, False]


@pytest.mark.parametrize(
    "text, accepted", [("1", True), ("1.0", True), ("1.00", False), ("1.5", False), ("-1", False), ("10", False)]
)
def test_a_listed_number_ends(text: str, accepted: bool) -> None:
    assert machine({"enum": [1, 2]}).accepts(text.encode()) is accepted


def test_a_fraction_does_not_end_in_zeros() -> None:
    automaton = machine({"type": "number"})
    assert [automaton.accepts(text) for text in (b"1.05", b"0.0", b"1.50", b"2e-07")] == [True, True, False, True]


LEFT_OUT = {  # texts that have a format, but are not in the part of it that is written
    "time": "15:59:60-08:00",
    "date-time": "1998-12-31T15:59:60.123-08:00",
    "hostname": "a." * 60 + "example.com",
    "idn-email": "실례@실례.테스트실례테스트실례.a.b.c",
    "regex": "(?<name>a)",
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_opposite_of_a_format_has_none_of_its_texts(name: str) -> None:
    """Nor those that are never written where the format is asked for."""
    text, rule = LEFT_OUT[name], {"type": "string", "format": name}
    assert not accepts(rule, text)
    opposites = [
        {"type": "string", "not": rule},
        {"oneOf": [rule, {"type": "string"}]},
        {"if": rule, "then": False},
        {"anyOf": [{"not": rule}, {"type": "null"}]},
    ]
    for schema in opposites:
        try:
            assert not accepts(schema, text), schema
        except UnsupportedGrammar:
            assert name == "regex", schema
    few = {"type": "array", "contains": rule, "maxContains": 1, "items": {"type": "string"}}
    if name != "regex":
        assert not accepts(few, [text, text])
        assert accepts({"not": rule}, "not the format!")


def test_a_format_beside_alternatives_costs_nothing() -> None:
    schema = {"oneOf": [{"type": "string", "format": "time"}, {"type": "string", "format": "date"}, {"type": "null"}]}
    assert [accepts(schema, value) for value in ("10:00:00Z", "2024-02-29", None, "x", "15:59:60-08:00")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_a_spelling_does_not_hide_an_item_from_a_count() -> None:
    few = machine({"type": "array", "contains": {"const": "a"}, "maxContains": 1})
    assert not few.accepts(b'["\\u0061", "a"]')
    assert few.accepts(b'["\\u0062", "a"]')
