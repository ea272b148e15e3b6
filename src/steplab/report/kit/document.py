"""Defines a report as plain data, with raw values in base units, independent of its format.

`terminal`, `html` and `markup` (Markdown and LaTeX) print it; `rendering` chooses one, and writes JSON and CSV.
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
"""text: running text; finding: a list; note: small print; warning; code: a line to copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    key: str
    header: str | None = None
    """Column heading; None: `key` with spaces for underscores."""
    quantity: Quantity = BY_NAME
    """Number format; BY_NAME derives it from the unit at the end of `key`."""
    shared: str | Callable[[Scalar], str] = ""
    """Caption text that replaces the column if all rows are equal: '{} ranks' ({s} for a plural s), or a function of
    the common value.

    Empty: the column always stays.
    """
    note: str = ""
    """Definition of the figure, printed below the table."""
    quiet: str | None = None
    """Usual text; a column with nothing else is left out."""
    rank: int = 0
    """A narrow terminal drops the highest rank first, among equals the rightmost, and never 0. Columns of one rank and
    heading go together.
    """
    wraps_from: int | None = None
    """Minimum width in characters if cells may wrap; None: they never wrap."""
    folds: bool = False
    """True: on a narrow terminal the values move to a line below their row, worded by `shared`."""
    bar: bool = False
    """True: HTML pages draw a bar in each cell, proportional to its value."""
    value: Callable[[Any], Scalar] | None = None
    """Function that reads the value from an item in `Table.of`; None: attribute `key`."""

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
    """Rows of one kind. If the `status` of a row is not 'ok', the column RESULT shows the reason of its failure."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    first: int | None = None
    """Number of rows that a terminal prints and an HTML page shows unfolded. None: all."""
    empty: str = ""

    @classmethod
    def of(cls, name: str, items: Iterable[Any], columns: Sequence[Column], caption: str = "", **more: Any) -> "Table":
        """Build a table with one row per item; `more` sets other fields of Table."""
        rows = ({column.key: column.of_item(item) for column in columns} for item in items)
        return cls(name=name, columns=tuple(columns), rows=tuple(rows), caption=caption, **more)


RESULT = Column(key="failure", header="result", wraps_from=12)
"""Column with 'ok' or the failure's reason; left out if no row failed."""


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

    @classmethod
    def of(cls, *pairs: tuple[str, str | None]) -> "Pairs":
        """Build pairs without those that lack a text."""
        return cls(pairs=tuple((name, text) for name, text in pairs if text))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    figure: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    facts: tuple[Fact, ...]


Legend = tuple[tuple[int, str, str], ...]
"""For each entry: colour number (from 1), glyph and label."""


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
    """Related pictures, drawn on HTML pages and in picture files; terminals omit them."""

    pictures: tuple[Picture, ...]
    legend: Legend = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    value: float
    """Length in the unit of all bars; a negative segment, alone in its bar, extends left of zero."""
    color: int
    tip: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    label: str
    figure: str
    segments: tuple[Segment, ...] = ()
    mark: float | None = None
    """Value at which a stroke crosses the bar, such as a prediction."""
    mark_tip: str = ""
    detail: str = ""
    strong: bool = False
    bad: bool = False
    """True if `figure` is the reason why there is no value."""

    @classmethod
    def of(
        cls, label: str, parts: Iterable[tuple[str, int, float]], show: Callable[[float], str], **more: Any
    ) -> "Bar":
        """Build a bar with a segment for each part above zero, given as (words, colour number, value)."""
        segments = tuple(
            Segment(value=value, color=color, tip=f"{label}: {words} {show(value)}")
            for words, color, value in parts
            if value > 0
        )
        return cls(label=label, segments=segments, **more)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Horizontal bars of one unit, drawn on HTML pages; terminals omit them."""

    bars: tuple[Bar, ...]
    legend: Legend = ()
    note: str = ""
    """Sentences below the chart: quantity, statistic, and meaning of the stroke."""
    full: float | None = None
    first: int | None = None
    """Number of bars shown unfolded. None: all."""

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
    """A chart that is drawn only if the output format shows it."""

    draw: Callable[[], Chart | Bars | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    title: str
    blocks: tuple["Block", ...] = ()
    anchor: str = ""
    folded: bool = False

    @classmethod
    def of(cls, title: str, *blocks: "Block | str | None", anchor: str = "", folded: bool = False) -> "Section":
        """Build a section without empty blocks; a string becomes a sentence.

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
        """Build a record's section: heading, verdict, then its sections one level down."""
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
    """One to three sentences with figures and uncertainty; the first is understandable alone."""
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
    """Record id, time and version, on one or more lines."""
    verdict: Verdict = Verdict()
    sections: tuple[Section, ...] = ()
    data: Sequence[Row] | Mapping[str, Sequence[Row]] = ()
    """Rows for JSON and CSV, in base units; a mapping holds several tables by name."""


class Identified(Protocol):
    @property
    def id(self) -> str:
        """Id of the record."""


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
    """Draw the section's deferred charts and drop empty subsections."""
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
    """Read attributes by name into a row; all are None if `item` is None."""
    return {name: None if item is None else getattr(item, name) for name in names}


def even(rows: Sequence[Row]) -> list[dict[str, Scalar]]:
    """Give all rows the same fields; missing values are None."""
    fields: dict[str, Scalar] = dict.fromkeys(key for row in rows for key in row)
    return [{**fields, **row} for row in rows]


MOST_ROWS = 40
MOST_IN_FULL = 6


def records_in_full(
    shown: Sequence[Identified], every: Sequence[Identified], make: Callable[[Any], Section]
) -> Iterator[Block]:
    """Yield a section per record in `shown`, and a note with the ids of all other records in `every`."""
    yield from map(make, shown)
    ids = {one.id for one in shown}
    if others := [one.id for one in every if one.id not in ids]:
        told = f"{len(others)} more are not shown in full; `steplab show ID` shows each: {', '.join(others)}."
        yield Sentences.of([told], "note")
