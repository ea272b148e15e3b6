"""Writes a document as one self-contained HTML page: no network, no scripts, no second file."""

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from steplab.report.kit.document import Block, Document, Table, drawn
from steplab.report.kit.table import sheet
from steplab.report.kit.text import unbroken

if TYPE_CHECKING:
    from jinja2 import Environment

_OPEN_ROWS = 24


def to_html(page: Document) -> str:
    """Self-contained HTML page; its margin links to sections that have an anchor."""
    return _written("page.html.j2", page)


def to_fragment(page: Document) -> str:
    """HTML element for a notebook; its CSS applies to nothing else."""
    return _written("fragment.html.j2", page, style=_nested_style())


def _written(template: str, page: Document, **further: str) -> str:
    sections = tuple(section for section in map(drawn, page.sections) if section.blocks)
    return environment().get_template(template).render(page=replace(page, sections=sections), **further)


@functools.cache
def _nested_style() -> str:
    text, _, _ = environment().loader.get_source(environment(), "page.css")  # type: ignore[union-attr]
    return re.sub(r"^(html|body) \{", "& {", re.sub(r":root\b", "&", text), flags=re.MULTILINE)


@functools.cache
def light_colors() -> Mapping[str, str]:
    style, _, _ = environment().loader.get_source(environment(), "page.css")  # type: ignore[union-attr]
    return dict(re.findall(r"--(\w+): (#\w+)", style[: style.index("@media")]))


@functools.cache
def environment() -> "Environment":
    """jinja2 environment of the templates, with autoescape on."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("steplab.report.kit", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= {"prose": _prose, "options": _whole_options, "sheet": sheet, "first_rows": _first_rows}
    for kind in get_args(Block):
        made.tests[kind.__name__.lower()] = lambda block, kind=kind: isinstance(block, kind)
    return made


def _prose(text: str) -> str:
    from markupsafe import Markup

    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(_whole_options(unbroken(text)))))


def _whole_options(text: str) -> str:
    """Keeps command-line options and dates from breaking at their dashes."""
    from markupsafe import Markup, escape

    return Markup(
        re.sub(r"(?<![\w-])--[a-z][\w.-]*|\b\d{4}-\d\d-\d\d\b", r'<span class="nb">\g<0></span>', str(escape(text)))
    )


def _first_rows(table: Table) -> int:
    total = len(table.rows)
    return min(table.first, total) if table.first is not None else total if total <= _OPEN_ROWS else 0
