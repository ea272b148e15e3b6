"""Questions that records answer, in TOML, each with its table and a sentence with figures.

docs/studies.md has an example and the keys.
"""

from typing import Literal

import msgspec

from steplab.specs.study import content_of

FOLDER = "questions"

Value = str | int | float | bool
Where = dict[str, Value | list[Value]]
"""Filter of rows: each field must have the value, or one of the values."""


class Expression(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A value computed from each row: a field, or a quotient."""

    value: str
    over: str = ""
    """Field to divide by."""
    against: dict[str, Value] = {}
    """Divide by the row with these values and otherwise equal settings."""
    share: bool = False
    """True to write a quotient as 12 % instead of 0.12×."""

    @property
    def is_quotient(self) -> bool:
        return bool(self.over or self.against)


class Column(Expression, kw_only=True, frozen=True):
    header: str = ""
    """Heading; empty: the field's name in words."""
    interval: bool = False
    """True to append the 95 % interval of a time, if its row has one."""


class Figure(Expression, kw_only=True, frozen=True):
    """A figure in the answer's sentence, taken from several rows."""

    where: Where = {}
    """Filter of the question's rows."""
    take: Literal["range", "min", "max", "median", "a_doubling"] = "range"
    """a_doubling: median growth where the field `along` doubles."""
    along: str = ""


class Derivation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Answer computed instead of read from rows: the question of `steplab plan accounting` whose title begins with
    `question`, with its options. Without a model, it is the answer of `steplab attention --derive`."""

    question: str = ""
    model: str = ""
    gpu: str = "H100 SXM"
    mesh: str = "fsdp=16,tp=4"


class Question(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A question and how records answer it."""

    asks: str
    rows_of: str = ""
    """Kind of the table's rows, such as runs; empty: `derives` or `answer` alone answers, or no record can."""
    where: Where = {}
    rows: str | list[str] = []
    """Settings that distinguish the table's rows."""
    across: str = ""
    """Setting with a column for each value; all these columns show the first of `columns`."""
    columns: list[Column] = []
    order: str = ""
    """Field to sort rows by, the largest first; empty: sort by their settings."""
    most: int = 0
    """Largest number of rows to show; 0: all."""
    figures: dict[str, Figure] = {}
    """Figures that the answer inserts as {name}; {name.at} is where the largest, or smallest, was."""
    answer: str = ""
    headline: bool = False
    """True to put the answer at the top of the page."""
    complete: Where = {}
    """Values to cover in all combinations; without a row for each, the question is partly answered."""
    shows: list[str] = []
    """Titles of sections, with pictures, to show from the answering record's own report."""
    derives: Derivation | None = None
    why: str = ""
    measure: str = ""


class Chapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    title: str
    question: list[Question]


class Questions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    title: str
    chapter: list[Chapter]


def load_questions(source: str) -> Questions:
    """Read a preset or a TOML file. Raises UserError if it has no questions."""
    return content_of("set of questions", source, FOLDER, Questions)
