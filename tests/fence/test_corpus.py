"""The corpus is what it says: the same valid schemas each time, valid instances, mutations mostly not."""

from __future__ import annotations

import json
import random

import jsonschema

from tests.fence.corpus import instance, mutated, schemas


def test_the_schemas_are_valid_different_and_the_same_each_time() -> None:
    found = schemas()
    assert len(found) == 500
    assert found == schemas()
    assert len({json.dumps(schema) for schema in found}) > 490
    for schema in found:
        jsonschema.Draft202012Validator.check_schema(schema)


def test_instances_are_valid_and_mutations_mostly_are_not() -> None:
    rng = random.Random(1)
    refused = 0
    for schema in schemas():
        validator = jsonschema.Draft202012Validator(schema)
        value = instance(schema, rng)
        validator.validate(value)
        refused += not validator.is_valid(mutated(value, rng))
    assert refused > 250
