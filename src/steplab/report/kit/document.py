"""The parts of a report in any format: plain data, with raw values in base units.

`terminal`, `html` and `markup` (Markdown and LaTeX) print any document; `rendering` chooses one, and writes JSON and
CSV.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from steplab.records.figure import Figure
from steplab.records.rows import Scalar
from steplab.report.kit.quantities import BY_NAME, UNITS, Quantity, quantity_of

if TYPE_CHECKING:
    from steplab.report.kit.charts import Drawing

Row = Mapping[str, Scalar]

Role = Literal["text", "finding", "note", "warning", "code"]
"""Running text; a list; small print; a warning; a line to copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    key: str
    header: str | None = None
    """The column's heading; None: its key, with spaces for underscores."""
    quantity: Quantity = BY_NAME
    """Its format; BY_NAME follows the unit at the end of `key`."""
    shared: str | Callable[[Scalar], str] = ""
    """The caption's words for a common value, which then has no column: '{} ranks', with {s} for the plural's s, or a
    function of the value. Empty: the column always stays.
    """
    note: str = ""
    """A definition below the table."""
    quiet: str | None = None
    """The column is left out if no row has another text."""
    rank: int = 0
    """Narrow terminals drop the highest rank first, the last column within a rank, with all columns of the same
    heading; rank 0 stays.
    """
    wraps_from: int | None = None
    """Its least width, in characters, if its texts may wrap; None: one line each."""
    folds: bool = False
    """True: without room its values are below their row, in the words of `shared`."""
    bar: bool = False
    """True: pages draw a bar in each cell, as long as its value."""
    value: Callable[[Any], Scalar] | None = None
    """Reads an item's value in `Table.of`; None: its attribute `key`."""

    def __post_init__(self) -> None:
        if self.quantity is BY_NAME:
            object.__setattr__(self, "quantity", quantity_of(self.key))

    @classmethod
    def of(cls, figures: Iterable[Figure[Any]]) -> "tuple[Column, ...]":
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
        return self.key.replace("_", " ") if self.header is None else self.header

    def of_item(self, item: Any) -> Scalar:
        return self.value(item) if self.value else getattr(item, self.key)

    def said(self, value: Scalar) -> str:
        if not isinstance(self.shared, str):
            return self.shared(value)
        text = self.quantity.show(value)
        return self.shared.format(text, s="" if text == "1" else "s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of one kind.

    A row with a `status` other than 'ok' is a highlighted failure; `RESULT` has its reason.
    """

    name: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    first: int | None = None
    """Rows to show: a terminal stops there, a page has the others closed. None: all."""
    empty: str = ""
    folded: bool = False
    """True: a page starts with it closed, as with any longer table."""

    @classmethod
    def of(cls, name: str, items: Iterable[Any], columns: Sequence[Column], caption: str = "", **more: Any) -> "Table":
        """A table with one row per item; `more` sets further fields of the table."""
        rows = ({column.key: column.of_item(item) for column in columns} for item in items)
        return cls(name=name, columns=tuple(columns), rows=tuple(rows), caption=caption, **more)


RESULT = Column(key="failure", header="result", wraps_from=12)
"""'ok', or the reason from a row's `status` and `failure`; left out without failures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentences:
    texts: tuple[str, ...]
    role: Role = "text"

    @classmethod
    def of(cls, texts: Iterable[str | None], role: Role = "text") -> "Sentences":
        return cls(texts=tuple(text for text in texts if text), role=role)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    figure: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    facts: tuple[Fact, ...]


Legend = tuple[tuple[int, str, str], ...]
"""Number of the colour (from 1), glyph and label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    title: str
    drawing: "Drawing"
    subtitle: str = ""
    alarming: bool = False

    @property
    def svg(self) -> str:
        return self.drawing.to_svg()

    @property
    def width(self) -> float:
        return self.drawing.width


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Pages draw these related pictures; terminals leave them out."""

    pictures: tuple[Picture, ...]
    legend: Legend = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    value: float
    """In the unit of all bars; negative, alone in its bar: to the left of zero."""
    color: int
    tip: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    label: str
    figure: str
    segments: tuple[Segment, ...] = ()
    mark: float | None = None
    """Value at a stroke across the bar, such as a formula's."""
    mark_tip: str = ""
    detail: str = ""
    strong: bool = False
    bad: bool = False
    """True if the figure is the reason of a missing value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Pages draw these horizontal bars of one unit; a table has their figures."""

    bars: tuple[Bar, ...]
    legend: Legend = ()
    note: str = ""
    """Quantity, statistic and meaning of the mark, in sentences."""
    full: float | None = None
    first: int | None = None
    """Bars that start open. None: all."""

    @property
    def drawn_legend(self) -> Legend:
        colors = {segment.color for bar in self.bars for segment in bar.segments}
        return tuple(entry for entry in self.legend if entry[0] in colors)

    @property
    def low(self) -> float:
        return min((0.0, *(segment.value for bar in self.bars for segment in bar.segments)))

    @property
    def width(self) -> float:
        ends = [max(0.0, sum(part.value for part in bar.segments), bar.mark or 0.0) for bar in self.bars]
        return (self.full or max(ends, default=0.0)) - self.low or 1.0


@dataclass(frozen=True, slots=True)
class Deferred:
    """A chart is drawn only where a format shows it."""

    draw: Callable[[], Chart | Bars | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    title: str
    blocks: tuple["Block", ...] = ()
    anchor: str = ""
    folded: bool = False

    @classmethod
    def of(cls, title: str, *blocks: "Block | str | None", anchor: str = "", folded: bool = False) -> "Section":
        """A section of blocks with content; a text is a sentence.

        Empty sections are not printed, so callers need not check.
        """
        found = (Sentences.of([block]) if isinstance(block, str) else block for block in blocks)
        kept = tuple(block for block in found if block and _says(block))
        return cls(title=title, anchor=anchor, folded=folded, blocks=kept)

    @classmethod
    def notes(cls, notes: Iterable[str], title: str = "Notes") -> "Section":
        return cls.of(title, Sentences.of(notes, "finding"))

    @classmethod
    def of_record(cls, heading: str, verdict: "Verdict", sections: "Iterable[Section]", *, title: str) -> "Section":
        """A section of one record: heading, verdict, and its sections one level down."""
        return cls.of(title, Sentences.of([heading], "note"), *verdict.blocks(), *sections)


@dataclass(frozen=True, kw_only=True, slots=True)
class Equation:
    text: str
    latex: str
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Equations:
    lines: tuple[Equation, ...]


Block = Sentences | Facts | Table | Pairs | Chart | Bars | Deferred | Equations | Section


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    sentences: tuple[str, ...] = ()
    """One to three sentences with figures and uncertainty; the first is complete alone."""
    cautions: tuple[str, ...] = ()

    def blocks(self) -> Iterator[Sentences]:
        if self.sentences:
            yield Sentences(texts=self.sentences)
        if self.cautions:
            yield Sentences(texts=self.cautions, role="warning")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    title: str
    subtitle: str = ""
    """Record, time and version, on one or more lines."""
    verdict: Verdict = Verdict()
    sections: tuple[Section, ...] = ()
    data: Sequence[Row] | Mapping[str, Sequence[Row]] = ()
    """Rows for programs, in base units; several tables by name."""


class Identified(Protocol):
    @property
    def id(self) -> str:
        """The record's."""


def _says(block: Block) -> bool:
    match block:
        case (
            Sentences(texts=parts) | Facts(facts=parts) | Pairs(pairs=parts) | Bars(bars=parts) | Section(blocks=parts)
        ):
            return bool(parts)
        case Table():
            return bool(block.rows or block.empty)
    return True


def drawn(section: Section) -> Section:
    """Charts drawn, empty sections left out."""
    blocks: list[Block] = []
    for block in section.blocks:
        made = drawn(block) if isinstance(block, Section) else block.draw() if isinstance(block, Deferred) else block
        if isinstance(made, Section) and not (made.title or made.anchor):
            blocks += made.blocks
        elif made is not None and not (isinstance(made, Section) and not made.blocks):
            blocks.append(made)
    return replace(section, blocks=tuple(blocks))


def later(draw: Callable[..., Chart | Bars | None], *arguments: Any) -> Deferred:
    return Deferred(partial(draw, *arguments))


def row_of(item: object | None, *names: str) -> dict[str, Scalar]:
    """The item's attributes by name; None without an item."""
    return {name: None if item is None else getattr(item, name) for name in names}


def even(rows: Sequence[Row]) -> list[dict[str, Scalar]]:
    """Rows with the fields of all; missing ones are None."""
    fields: dict[str, Scalar] = dict.fromkeys(key for row in rows for key in row)
    return [{**fields, **row} for row in rows]


MOST_ROWS = 40
MOST_IN_FULL = 6


def records_in_full(
    shown: Sequence[Identified], every: Sequence[Identified], make: Callable[[Any], Section]
) -> Iterator[Block]:
    """Sections of records in full, and a note with the ids of all others."""
    yield from map(make, shown)
    ids = {one.id for one in shown}
    if others := [one.id for one in every if one.id not in ids]:
        told = f"{len(others)} more are not shown in full; `steplab show ID` shows each: {', '.join(others)}."
        yield Sentences.of([told], "note")
