"""Meaning of each field of a dataclass, from its declaration or docstring, for `help`."""

import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from collections.abc import Iterator
from itertools import pairwise

from steplab.specs.model import SIZE_FIELDS
from steplab.specs.step import STEP_FIELDS, StepSpec
from steplab.specs.step_fields import Declared


def meanings(described: type) -> Iterator[tuple[str, str]]:
    """Name and meaning of each field: the help of its declaration (specs.step_fields), or its docstring, nearest class
    first.
    """
    fields = {field.name: field.type for field in dataclasses.fields(described)}
    for name, hint in fields.items():
        yield from ((name, about.help) for about in typing.get_args(hint) if isinstance(about, Declared))
    for base in filter(dataclasses.is_dataclass, described.__mro__):
        for field, text in pairwise(_body(base)):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as doc)):
                    if name in fields:
                        yield name, inspect.cleandoc(doc).replace("\n", " ")


def add_to_help(described: type) -> None:
    """List a dataclass's fields in its docstring for `help`, where Python shows only functions and properties. Without
    source the class stays unchanged.
    """
    if (described.__doc__ or "").find(_HEADING) >= 0:
        return
    try:
        listed = dict(reversed([*meanings(described)]))
    except OSError:
        return
    if described is StepSpec:
        listed = {field.attribute: field.help for field in STEP_FIELDS}
    names = [field.name for field in dataclasses.fields(described) if field.name in listed]
    told = [_HEADING, *(_entry(name, listed[name]) for name in names)]
    if described is StepSpec:
        told += ["", _SIZES, *(_entry(field.key, field.help) for field in SIZE_FIELDS)]
    described.__doc__ = "\n".join([inspect.cleandoc(described.__doc__ or ""), "", *told])


_HEADING = "Fields:"
_SIZES = 'Model size overrides, as in steplab.measure("tiny", **{"model.num_layers": 4}):'


def _entry(name: str, text: str) -> str:
    return textwrap.fill(
        f"{name}: {text}", 100, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False
    )


def _body(described: type) -> list[ast.stmt]:
    module = ast.parse(inspect.getsource(sys.modules[described.__module__]))
    return next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == described.__name__)
