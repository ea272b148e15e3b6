"""Questions on records, in TOML: rows that answer one, the table of them, and a sentence with its figures.

docs/studies.md has an example and the keys.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from steplab.errors import UserError
from steplab.specs.study import content_of

FOLDER = "questions"

Value = str | int | float | bool
Where = dict[str, Value | list[Value]]
"""Fields of a row -> the value, or any of the values, that it has to have."""


class Expression(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A figure of each row: a field, which may be divided."""

    value: str
    """A field of the row."""
    over: str = ""
    """The field that divides it."""
    against: dict[str, Value] = {}
    """The row that divides it has these values instead, and else the same settings."""
    share: bool = False
    """Whether a quotient is written as a share, 12 %, and not as 0.12×."""

    @property
    def is_quotient(self) -> bool:
        return bool(self.over or self.against)


class Column(Expression, kw_only=True, frozen=True):
    """A column of the table."""

    header: str = ""
    """Empty: the field's name in words."""
    interval: bool = False
    """True: its 95 % interval follows, of a time whose rows have one."""


class Figure(Expression, kw_only=True, frozen=True):
    """A figure of the answer: one of many rows."""

    where: Where = {}
    """Use these of the question's rows."""
    take: Literal["range", "min", "max", "median", "a_doubling"] = "range"
    """a_doubling: median growth where `along` doubles."""
    along: str = ""
    """The field that doubles."""


class Derivation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A question of `steplab plan accounting`, by the beginning of its text, with that command's options; without a
    model, `steplab attention --derive`."""

    question: str = ""
    model: str = ""
    gpu: str = "H100 SXM"
    mesh: str = "fsdp=16,tp=4"


class Question(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A question and how records answer it."""

    asks: str
    rows_of: str = ""
    """The kind of row; empty: `derives` answers, or no record can."""
    where: Where = {}
    rows: str | list[str] = []
    """The settings that vary between rows."""
    across: str = ""
    """The setting that varies between columns, which all show the first of `columns`."""
    columns: list[Column] = []
    order: str = ""
    """Sort rows by this field, the largest first; empty: by their settings."""
    most: int = 0
    """Number of rows that are shown; 0: all."""
    figures: dict[str, Figure] = {}
    """Named in the answer as {name}; {name.at} is where the largest, or the smallest, was found."""
    answer: str = ""
    otherwise: str = ""
    """The answer where no record has the figures; empty: not measured."""
    complete: Where = {}
    """Values that the question asks for: a combination of them without a row leaves it partly answered."""
    shows: list[str] = []
    """Sections of the answering record's own report, by their titles, with their pictures."""
    derives: Derivation | None = None
    why: str = ""
    measure: str = ""
    """The command that measures the answer."""


class Chapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Questions on one thing."""

    title: str
    question: list[Question]


class Questions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A write-up."""

    title: str
    chapter: list[Chapter]


def load_questions(source: str) -> Questions:
    """Raises UserError for a file without questions."""
    content: Mapping[str, Any] = content_of("set of questions", source, FOLDER)
    try:
        return msgspec.convert(content, Questions)
    except msgspec.ValidationError as error:
        raise UserError(f"questions {source}: {error}") from error
