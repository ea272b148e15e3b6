"""The JSON Schema of stored records, made from their types, with the meaning of each field."""

import ast
import dataclasses
import inspect
import sys
import typing
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import msgspec

from steplab.records.registry import KINDS
from steplab.specs.step_fields import Declared


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a record of any kind, as `show --format json` and `export` write it.

    Descriptions are the docstrings of the fields. Fields that a later version adds are allowed, as readers allow them.
    """
    types = [kind.type for kind in KINDS.values()]
    references, definitions = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    for described in set(_dataclasses(types)):
        properties = definitions[described.__name__]["properties"]
        for name, text in _meanings(described):
            properties[name].setdefault("description", text)  # of a field declared twice, the nearest class's
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
    """The dataclasses among these types and within them, some more than once."""
    for found in types:
        yield from _dataclasses((*typing.get_args(found), *getattr(found, "__orig_bases__", ())))
        if dataclasses.is_dataclass(found) and isinstance(found, type):
            yield found
            yield from _dataclasses(hint for hint in typing.get_type_hints(found).values() if hint is not found)


def _meanings(described: type) -> Iterator[tuple[str, str]]:
    """Name and meaning of each field of a dataclass: its declaration's help (specs.step_fields), or its docstring."""
    fields = {field.name: field.type for field in dataclasses.fields(described)}
    for name, hint in fields.items():
        yield from ((name, about.help) for about in typing.get_args(hint) if isinstance(about, Declared))
    for base in filter(dataclasses.is_dataclass, described.__mro__):
        for field, text in pairwise(_body(base)):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as doc)):
                    if name in fields:
                        yield name, inspect.cleandoc(doc).replace("\n", " ")


def _body(described: type) -> list[ast.stmt]:
    """The statements of a class in its source."""
    module = ast.parse(inspect.getsource(sys.modules[described.__module__]))
    return next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == described.__name__)
