"""JSON Schema of stored records, derived from their types, with each field's meaning."""

import dataclasses
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from steplab.records.field_docs import meanings
from steplab.records.registry import KINDS


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of all kinds, as `show --format json` and `export` write them.

    Descriptions are field docstrings. Unknown fields are allowed, as readers allow them.
    """
    types = [kind.type for kind in KINDS.values()]
    references, definitions = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    for described in set(_dataclasses(types)):
        properties = definitions[described.__name__]["properties"]
        for name, text in meanings(described):
            properties[name].setdefault("description", text)  # the nearest class's wins
    for kind in KINDS.values():
        properties = definitions[kind.type.__name__]["properties"]
        properties["schema"] |= {"const": kind.schema}
        properties["summary"] = {
            "type": "object",
            "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
            "description": "Figures computed from the record, in base units, as in the rows of `steplab list`.",
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A record of steplab",
        "oneOf": list(references),
        "$defs": definitions,
    }


def _dataclasses(types: Iterable[Any]) -> Iterator[type]:
    """Dataclasses among and within these types, with repeats."""
    for found in types:
        yield from _dataclasses((*typing.get_args(found), *getattr(found, "__orig_bases__", ())))
        if dataclasses.is_dataclass(found) and isinstance(found, type):
            yield found
            yield from _dataclasses(hint for hint in typing.get_type_hints(found).values() if hint is not found)
