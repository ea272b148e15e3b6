"""The parts of a report in any format: plain data, with raw values in base units.

A section of a report says here once what it has to say. `terminal`, `html` and `markup` (Markdown and LaTeX) print any
document; `rendering` chooses one, and writes JSON and CSV.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from steplab.records.figure import Figure
from steplab.records.rows import Scalar
from steplab.report.kit.quantities import BY_NAME, UNITS, Quantity, quantity_of

Row = Mapping[str, Scalar]

Role = Literal["text", "finding", "note", "warning", "code"]
"""How sentences are set: running text; a list of findings; remarks in small print; a warning; a line to copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """How one field of a table's rows is shown."""

    key: str
    """Field of the row."""
    header: str | None = None
    """Heading, with the convention where one is needed to read the figure; None: the field's name in words."""
    quantity: Quantity = BY_NAME
    """How its values are written, and whether they are figures; BY_NAME: as the unit says that `key` ends in."""
    shared: str | Callable[[Scalar], str] = ""
    """How the caption says a value that all rows share, which then has no column: '{} ranks', with {s} for the plural's
    s, or a function of the value. Empty: the column always stays."""
    note: str = ""
    """Its definition, in whole sentences after the table's caption."""
    quiet: str | None = None
    """Text that is not worth a column or a word of the caption where no row has another."""
    rank: int = 0
    """Narrow terminals drop columns of the highest rank first, of one rank the last, with all columns of the same
    heading; rank 0 stays.
    """
    wraps_from: int | None = None
    """Least width to which a terminal may wrap its texts; None: each stays on one line."""
    folds: bool = False
    """True: a terminal without room puts the values of such columns below their row, in the words of `shared`."""
    value: Callable[[Any], Scalar] | None = None
    """Its value for an item in `Table.of`; None: the item's attribute `key`."""

    def __post_init__(self) -> None:
        """Take the quantity from the unit at the end of the field's name, unless one was given."""
        if self.quantity is BY_NAME:
            object.__setattr__(self, "quantity", quantity_of(self.key))

    @classmethod
    def of(cls, figures: Iterable[Figure[Any]]) -> "tuple[Column, ...]":
        """The columns of those figures that have a header."""
        return tuple(
            cls(
                key=figure.key,
                header=figure.header,
                quantity=UNITS.get(figure.unit, BY_NAME),
                shared=figure.shared,
                note=figure.note,
                rank=figure.rank,
                wraps_from=figure.wraps_from or (12 if figure.is_words else None),
                folds=figure.folds,
            )
            for figure in figures
            if figure.header is not None
        )

    @property
    def heading(self) -> str:
        """The heading as it is shown."""
        return self.key.replace("_", " ") if self.header is None else self.header

    def of_item(self, item: Any) -> Scalar:
        """The value of an item."""
        return self.value(item) if self.value else getattr(item, self.key)

    def said(self, value: Scalar) -> str:
        """A value together with what it is a value of; the column has words for that in `shared`."""
        if not isinstance(self.shared, str):
            return self.shared(value)
        text = self.quantity.show(value)
        return self.shared.format(text, s="" if text == "1" else "s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of one kind.

    A row with a `status` other than 'ok' is a failure and stands out; `RESULT` is the column that says why.
    """

    name: str
    """Its name for screen readers."""
    columns: tuple[Column, ...]
    """What people are shown. A column for which no row has a value is left out."""
    rows: tuple[Row, ...]
    """Values in base units. People are shown the fields with a column."""
    caption: str = ""
    """How to read it, in whole sentences."""
    first: int | None = None
    """How many rows come first: a terminal shows these alone, a page has the others closed. None: all of them."""
    empty: str = ""
    """What people read where there are no rows; empty: its section then leaves it out."""
    folded: bool = False
    """Whether a page starts with it closed. Longer tables start so in any case."""

    @classmethod
    def of(cls, name: str, items: Iterable[Any], columns: Sequence[Column], caption: str = "", **more: Any) -> "Table":
        """One row per item, with a field per column; `more` are further fields of the table."""
        rows = ({column.key: column.of_item(item) for column in columns} for item in items)
        return cls(name=name, columns=tuple(columns), rows=tuple(rows), caption=caption, **more)


RESULT = Column(key="failure", header="result", wraps_from=12)
"""'ok', or why there is none, from a row's `status` and `failure`; left out of a table without failures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentences:
    """Whole sentences, one under the other."""

    texts: tuple[str, ...]
    """The texts as they are; renderers remove control characters."""
    role: Role = "text"
    """How they are set."""

    @classmethod
    def of(cls, texts: Iterable[str | None], role: Role = "text") -> "Sentences":
        """Sentences of these texts, without those that are None or empty."""
        return cls(texts=tuple(text for text in texts if text), role=role)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Names and what they are."""

    pairs: tuple[tuple[str, str], ...]
    """Each once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One sentence, and the figure that stands out of it."""

    figure: str
    """Short, shown large: '3.1x'."""
    text: str
    """The sentence."""
    wide: bool = False
    """Whether the sentence is long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The summary of many records."""

    facts: tuple[Fact, ...]
    """The most telling first."""


Legend = tuple[tuple[int, str, str], ...]
"""Number of the colour (from 1), glyph and label of each thing that is told apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One SVG."""

    title: str
    """What this panel shows; empty for the only one."""
    svg: str
    """The element."""
    width: float
    """Pixels it was drawn for."""
    subtitle: str = ""
    """Words next to the title."""
    alarming: bool = False
    """Whether the subtitle is bad news."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Pictures that belong together. A page alone shows them."""

    pictures: tuple[Picture, ...]
    """A panel each."""
    legend: Legend = ()
    """Empty where there is nothing to tell apart."""
    note: str = ""
    """How to read it, and what is not shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A part of a bar."""

    value: float
    """Its length, in the unit of all bars."""
    color: int
    """Number of its colour, from 1."""
    tip: str
    """Hover text, with the exact figure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One bar with its label and its figure."""

    label: str
    """What it is about."""
    figure: str
    """The value as text, beside the bar."""
    segments: tuple[Segment, ...] = ()
    """The parts, from the left; none where there is no value."""
    mark: float | None = None
    """Value of a stroke across the bar, such as a formula's."""
    mark_tip: str = ""
    """Hover text of the stroke."""
    detail: str = ""
    """Lesser text under the label."""
    strong: bool = False
    """Whether the bar stands out from the others."""
    bad: bool = False
    """Whether the figure says why there is no value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Horizontal bars of one unit, one per row. Only a page shows them; a table beside them has the figures."""

    bars: tuple[Bar, ...]
    """From top to bottom."""
    legend: Legend = ()
    """The label of each kind of segment that is drawn."""
    note: str = ""
    """Quantity, statistic and meaning of the mark, in whole sentences."""
    full: float | None = None
    """Value of the whole width; None: the largest bar or mark."""
    first: int | None = None
    """Number of bars that start open; the others start closed. None: all."""

    @property
    def drawn_legend(self) -> Legend:
        """The legend of those colours that some segment has."""
        colors = {segment.color for bar in self.bars for segment in bar.segments}
        return tuple(entry for entry in self.legend if entry[0] in colors)

    @property
    def width(self) -> float:
        """Value of the whole width."""
        ends = [max(sum(segment.value for segment in bar.segments), bar.mark or 0.0) for bar in self.bars]
        return self.full or max(ends, default=0.0) or 1.0


@dataclass(frozen=True, slots=True)
class Deferred:
    """A chart that is drawn where it is shown: drawing takes longer than all the rest of a report."""

    draw: Callable[[], Chart | None]
    """Gives the chart; None: there is nothing to draw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """What stands under one heading."""

    title: str
    """The heading; empty for none."""
    blocks: tuple["Block", ...] = ()
    """In the order they are read; a section among them is one level down."""
    anchor: str = ""
    """Name that a page's links lead to; empty: none leads here."""
    folded: bool = False
    """Whether a page starts with it closed."""

    @classmethod
    def of(cls, title: str, *blocks: "Block | str | None", anchor: str = "", folded: bool = False) -> "Section":
        """A section of those blocks that say something; a text is a sentence.

        A section without blocks is not printed, so callers need not check.
        """
        found = (Sentences.of([block]) if isinstance(block, str) else block for block in blocks)
        kept = tuple(block for block in found if block and _says(block))
        return cls(title=title, anchor=anchor, folded=folded, blocks=kept)

    @classmethod
    def notes(cls, notes: Iterable[str], title: str = "Notes") -> "Section":
        """A section of these notes as a list."""
        return cls.of(title, Sentences.of(notes, "finding"))

    @classmethod
    def of_record(cls, heading: str, verdict: "Verdict", sections: "Iterable[Section]", *, title: str) -> "Section":
        """A record among others: its heading, its verdict and its sections, one level down."""
        return cls.of(title, Sentences.of([heading], "note"), *verdict.blocks(), *sections)


@dataclass(frozen=True, kw_only=True, slots=True)
class Equation:
    """One line of a derivation."""

    text: str
    """In plain text."""
    latex: str
    """The same in LaTeX's mathematics, without delimiters."""
    what: str
    """What it gives, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Equations:
    """A derivation. LaTeX and Markdown set it as mathematics."""

    lines: tuple[Equation, ...]


Block = Sentences | Facts | Table | Pairs | Chart | Bars | Deferred | Equations | Section


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The answer of a report, before anything else."""

    sentences: tuple[str, ...] = ()
    """One to three sentences with the figures and their uncertainty. The first can stand alone."""
    cautions: tuple[str, ...] = ()
    """Reasons to doubt the figures, with what to do about it."""

    def blocks(self) -> Iterator[Sentences]:
        """The same as blocks of a section."""
        if self.sentences:
            yield Sentences(texts=self.sentences)
        if self.cautions:
            yield Sentences(texts=self.cautions, role="warning")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """All that is said of a record, or of several."""

    title: str
    """What it is about."""
    subtitle: str = ""
    """Which record it is, of when, and by which version; a line or several."""
    verdict: Verdict = Verdict()
    """The answer, before anything else."""
    sections: tuple[Section, ...] = ()
    """In the order they are read."""
    data: Sequence[Row] | Mapping[str, Sequence[Row]] = ()
    """Rows for programs, in base units; several tables are under their names."""


class Identified(Protocol):
    """A record, or an object with the id of one."""

    @property
    def id(self) -> str:
        """The record's."""


def _says(block: Block) -> bool:
    """Whether a block has anything to print; what a chart has is not known before it is drawn."""
    match block:
        case (
            Sentences(texts=parts) | Facts(facts=parts) | Pairs(pairs=parts) | Bars(bars=parts) | Section(blocks=parts)
        ):
            return bool(parts)
        case Table():
            return bool(block.rows or block.empty)
    return True


def later(draw: Callable[..., Chart | None], *arguments: Any) -> Deferred:
    """The chart that `draw` makes of the arguments, once it is to be shown."""
    return Deferred(partial(draw, *arguments))


def row_of(item: object | None, *names: str) -> dict[str, Scalar]:
    """A row with these attributes of an item, under their own names; without an item they are absent."""
    return {name: None if item is None else getattr(item, name) for name in names}


def even(rows: Sequence[Row]) -> list[dict[str, Scalar]]:
    """The rows, each with the fields of all, None where it lacked one."""
    fields: dict[str, Scalar] = dict.fromkeys(key for row in rows for key in row)
    return [{**fields, **row} for row in rows]


MOST_ROWS = 40
"""Number of rows of a long table that a terminal shows."""
MOST_IN_FULL = 6
"""Number of records of one chapter that are shown in full."""


def records_in_full(
    shown: Sequence[Identified], every: Sequence[Identified], make: Callable[[Any], Section]
) -> Iterator[Block]:
    """The sections of the records that are shown in full, and a note with the ids of all others."""
    yield from map(make, shown)
    ids = {one.id for one in shown}
    if others := [one.id for one in every if one.id not in ids]:
        told = f"{len(others)} more are not shown in full; `steplab show ID` shows each: {', '.join(others)}."
        yield Sentences.of([told], "note")
